// SPDX-License-Identifier: Apache-2.0
/// @file
/// transfer.hpp on the backend under test. What happens when something fails is in
/// transfer_failures.cpp, what each wait is for in transfer_order.cpp. Include the backend's support
/// header first.
#include "pulseinfer/transfer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "pulseinfer/link_monitor.hpp"
#include "support/allocations.hpp"
#include "support/failing_backend.hpp"
#include "support/offload_rig.hpp"

namespace {

using backend = test::backend;
using rig = test::offload_rig<backend>;
using pulseinfer::logical_block;
using pulseinfer::transfer_phase;
using pulseinfer::transfer_way;
using pulseinfer::unit_status;
using pulseinfer::unit_target;
using pulseinfer::wait_outcome;
using ints = std::vector<std::int32_t>;

template <class Case>
void each(Case run) {
  test::each_backend([&](backend machine) { run(machine); });
}

ints blocks(std::int32_t count) {
  ints all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}
test::unit_bytes stamp(std::int64_t key, std::int32_t layer, std::int32_t block) {
  return test::stamp(rig::geometry, key, layer, block);
}
constexpr std::int32_t layers = rig::geometry.layers;

}  // namespace

TEST_CASE("transfer: units come back as they went, in any number, by every way") {
  each([](backend machine) {
    for (const transfer_way way : test::all_ways) {
      CAPTURE(static_cast<int>(way));
      rig r(machine, {.way = way});
      CHECK(r.mover.chunk_units() == 4);
      std::int64_t key = 0;
      for (const std::int32_t count : {0, 1, 3, 4, 5, 8, 37}) {
        CAPTURE(count);
        ++key;
        const auto id = r.store.open_sequence().value();
        for (std::int32_t layer = 0; layer < layers; ++layer) {
          rig::targets out, in;
          for (std::int32_t b = 0; b < count; ++b) {
            out.push_back({0, b, 60 - b});
            in.push_back({0, b, 1 + (b * 17) % 40});  // elsewhere, scattered
            r.pages.put(layer, 60 - b, stamp(key, layer, b));
          }
          r.pages.upload(r.stream);
          auto leaving = r.offload(layer, id, out);
          REQUIRE(leaving.has_value());
          leaving->sync();
          CHECK(leaving->phase() == transfer_phase::done);
          CHECK(leaving->report().moved == count);
          CHECK(leaving->report().bytes == count * rig::geometry.unit_bytes());
          for (std::int32_t b = 0; b < count; ++b) {
            CHECK((r.in_store(id, layer, b) == stamp(key, layer, b)));
          }
          const test::unit_bytes blank(static_cast<std::size_t>(rig::geometry.unit_bytes()));
          for (std::int32_t page = 0; page < 96; ++page) r.pages.put(layer, page, blank);
          r.pages.upload(r.stream);
          auto coming = r.recall(layer, id, in);
          REQUIRE(coming.has_value());
          coming->sync_submitted();
          CHECK(coming->enqueue_wait(r.stream) == wait_outcome::enqueued);
          r.pages.download(r.stream);
          coming->sync();
          CHECK((test::statuses(*coming) ==
                 std::vector<unit_status>(static_cast<std::size_t>(count), unit_status::moved)));
          std::vector<bool> filled(96, false);
          for (const unit_target& unit : in) {
            filled[static_cast<std::size_t>(index_of(unit.page))] = true;
            CHECK((r.pages.get(layer, index_of(unit.page)) ==
                   stamp(key, layer, index_of(unit.block))));
          }
          for (std::int32_t page = 0; page < 96; ++page) {  // nothing else is touched
            if (!filled[static_cast<std::size_t>(page)]) {
              CHECK((r.pages.get(layer, page) == blank));
            }
          }
        }
        CHECK(rig::at_rest(r.store.counts()));
        CHECK(r.store.close_sequence(id) == pulseinfer::close_outcome::closed);
      }
      CHECK(r.store.counts().free == r.store.counts().capacity);
    }
  });
}

TEST_CASE("transfer: the rows of a step move in one transfer, each from its own sequence") {
  each([](backend machine) {
    rig r(machine, {.chunk_units = 3});
    const pulseinfer::sequence_id ids[] = {r.stored(1, blocks(9)), r.stored(2, blocks(9)),
                                           r.stored(3, blocks(9))};
    for (std::int32_t request = 0; request < 3; ++request) r.lend(request, 8 * request, 6);
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      const std::vector<ints> chosen = {{0, 3, 5, 8}, {}, {1, 3}};
      const auto step = r.resolve(layer, {0, 1, 2}, chosen);
      REQUIRE(step.has_value());
      auto t = r.mover.recall(*step, ids, r.stream);
      REQUIRE(t.has_value());
      t->sync_submitted();
      CHECK(t->enqueue_wait(r.stream) == wait_outcome::enqueued);
      r.pages.download(r.stream);
      t->sync();
      CHECK(t->report().units == 6);
      CHECK(t->report().moved == 6);
      const auto pages = r.pages_of(*step);
      for (std::size_t row = 0; row < 3; ++row) {
        for (std::size_t i = 0; i < chosen[row].size(); ++i) {
          CHECK((r.pages.get(layer, pages[row][i]) ==
                 stamp(static_cast<std::int64_t>(row) + 1, layer, chosen[row][i])));
        }
        for (const auto& miss : step->misses(static_cast<std::int32_t>(row))) {
          CHECK(miss.status == unit_status::moved);
        }
      }
      // Again: nothing is missing, and a step of hits alone ends too.
      const auto again = r.resolve(layer, {0, 1, 2}, chosen);
      REQUIRE(again.has_value());
      auto nothing = r.mover.recall(*again, ids, r.stream);
      REQUIRE(nothing.has_value());
      nothing->sync();
      CHECK(nothing->phase() == transfer_phase::done);
      CHECK(nothing->report().units == 0);
      CHECK(nothing->report().bytes == 0);
      CHECK((r.pages_of(*again) == pages));
    }
    for (std::int32_t request = 0; request < 3; ++request) {
      CHECK(r.hot.try_take_back(request, r.stream) == pulseinfer::take_back_outcome::taken);
    }
    CHECK(rig::at_rest(r.store.counts()));
    machine.sync(r.stream);
  });
}

TEST_CASE("transfer: a unit that the store lacks is missing, the others come") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, {1, 3});
    r.lend(0, 10, 6);
    const auto step = r.resolve(0, {0}, {{0, 1, 2, 3}});
    REQUIRE(step.has_value());
    auto t = r.mover.recall(*step, {&id, 1}, r.stream);
    REQUIRE(t.has_value());
    t->sync();
    using enum unit_status;
    CHECK((test::statuses(*t) == std::vector<unit_status>{missing, moved, missing, moved}));
    CHECK(t->phase() == transfer_phase::done);
    CHECK(t->report().moved == 2);
    CHECK(t->enqueue_wait(r.stream) == wait_outcome::incomplete);
    r.pages.download(r.stream);
    const ints pages = r.pages_of(*step)[0];
    CHECK((r.pages.get(0, pages[1]) == stamp(1, 0, 1)));
    CHECK((r.pages.get(0, pages[3]) == stamp(1, 0, 3)));
    CHECK(step->misses(0)[0].status == missing);
    CHECK(step->misses(0)[1].status == moved);

    // The step is the engine's to discard; then what did not come is missed again, the rest is hot.
    CHECK(r.hot.try_take_back(0, r.stream) == pulseinfer::take_back_outcome::in_use);
    r.hot.discard(*step, r.rows_of({0}), r.stream);
    const auto next = r.resolve(0, {0}, {{0, 1, 2, 3}});
    REQUIRE(next.has_value());
    machine.sync(r.stream);
    CHECK((rig::missed(*next, 0) == ints{0, 2}));
    r.add(id, 1, 0, 0);
    r.add(id, 1, 0, 2);
    auto second = r.mover.recall(*next, {&id, 1}, r.stream);
    REQUIRE(second.has_value());
    second->sync();
    CHECK(second->report().moved == 2);
    CHECK(r.hot.try_take_back(0, r.stream) == pulseinfer::take_back_outcome::taken);
    machine.sync(r.stream);
  });
}

TEST_CASE("fault 37: a unit that is being written is not readable yet, nor offloaded twice") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.store.open_sequence().value();
    const auto reserved = r.store.reserve(id, 0, logical_block{0});
    REQUIRE(reserved.outcome == pulseinfer::reserve_outcome::reserved);
    auto coming = r.recall(0, id, {{0, 0, 10}}).value();
    coming.sync();
    CHECK(coming.status(0) == unit_status::missing);
    auto leaving = r.offload(0, id, {{0, 0, 10}}).value();
    leaving.sync();
    CHECK(leaving.status(0) == unit_status::being_written);
    r.store.abort(reserved.slot);
    CHECK(rig::at_rest(r.store.counts()));
  });
}

TEST_CASE("transfer: what the store has is present, and keeps its bytes") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, {1, 2});
    r.pages.put(0, 5, stamp(9, 0, 0));
    r.pages.upload(r.stream);
    auto t = r.offload(0, id, {{0, 1, 5}, {0, 3, 5}, {0, 2, 5}}).value();
    t.sync();
    using enum unit_status;
    CHECK((test::statuses(t) == std::vector<unit_status>{present, moved, present}));
    CHECK(t.phase() == transfer_phase::done);
    CHECK(t.report().moved == 1);
    CHECK((r.in_store(id, 0, 1) == stamp(1, 0, 1)));
    CHECK((r.in_store(id, 0, 3) == stamp(9, 0, 0)));
    auto all = r.offload(0, id, {{0, 1, 5}}).value();  // nothing to move at all
    all.sync();
    CHECK(all.phase() == transfer_phase::done);
    CHECK(all.enqueue_wait(r.stream) == wait_outcome::enqueued);
    machine.sync(r.stream);
  });
}

TEST_CASE("faults 2 and 45: a unit that finds no room is refused, the others are kept") {
  each([](backend machine) {
    rig r(machine, {.capacity_units = 6});
    const auto first = r.stored(1, {0, 1});  // four units of two layers, pinned:
    auto lease = r.store.acquire(first, 0);
    const auto second = r.store.open_sequence().value();
    for (std::int32_t b = 0; b < 4; ++b) r.pages.put(1, b, stamp(2, 1, b));
    r.pages.upload(r.stream);
    const pulseinfer::sequence_id ids[] = {second, first};
    // Room for two; the third of the batch finds none, what the store has is known all the same.
    const rig::targets units = {{0, 0, 0}, {0, 1, 1}, {0, 2, 2}, {1, 1, 3}, {0, 3, 3}};
    auto t = r.mover.offload(1, ids, units, r.stream).value();
    t.sync();
    using enum unit_status;
    CHECK((test::statuses(t) == std::vector<unit_status>{moved, moved, refused, present, refused}));
    CHECK(t.phase() == transfer_phase::done);
    CHECK((r.in_store(second, 1, 0) == stamp(2, 1, 0)));
    CHECK((r.in_store(second, 1, 1) == stamp(2, 1, 1)));
    CHECK((r.in_store(first, 1, 1) == stamp(1, 1, 1)));
    CHECK(r.in_store(second, 1, 2).empty());
    CHECK(rig::balanced(r.store.counts()));
    // A refused unit is a miss, and can be had once there is room.
    auto coming = r.recall(1, second, {{0, 2, 20}, {0, 0, 21}}).value();
    coming.sync();
    CHECK((test::statuses(coming) == std::vector<unit_status>{missing, moved}));
    lease.release();
    auto again = r.offload(1, second, {{0, 2, 2}}).value();
    again.sync();
    CHECK(again.status(0) == moved);
    CHECK((r.in_store(second, 1, 2) == stamp(2, 1, 2)));
  });
}

TEST_CASE("fault 16: transfers that are only polled end, and leave nothing pinned") {
  if constexpr (std::string_view(test::backend_name) == "host") {  // others need who syncs
    rig r(test::make_backend());
    const auto id = r.store.open_sequence().value();
    rig::targets units;
    for (const std::int32_t b : blocks(20)) units.push_back({0, b, b});
    const auto poll_to_the_end = [&](auto ticket) {
      REQUIRE(ticket.has_value());
      while (ticket->phase() < transfer_phase::done) std::this_thread::yield();
      CHECK(ticket->phase() == transfer_phase::done);
    };
    for (int step = 0; step < 50; ++step) {
      poll_to_the_end(r.offload(step % layers, id, units));
      CHECK(rig::at_rest(r.store.counts()));
      poll_to_the_end(r.recall(step % layers, id, units));
      CHECK(rig::at_rest(r.store.counts()));
    }
    CHECK(r.store.counts().evictable == 20 * layers);
    CHECK(r.store.close_sequence(id) == pulseinfer::close_outcome::closed);
  }
}

TEST_CASE("fault 45: one missing key does not void its batch, and does not come back as a hit") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, {0, 2});
    for (int i = 0; i < 3; ++i) {  // the same answer every time
      auto t = r.recall(0, id, {{0, 0, 10}, {0, 1, 11}, {0, 2, 12}}).value();
      t.sync();
      using enum unit_status;
      CHECK((test::statuses(t) == std::vector<unit_status>{moved, missing, moved}));
    }
    r.pages.download(r.stream);
    CHECK((r.pages.get(0, 10) == stamp(1, 0, 0)));
    CHECK((r.pages.get(0, 12) == stamp(1, 0, 2)));
  });
}

TEST_CASE("transfer: more transfers than staging wait for chunks, and all arrive") {
  each([](backend machine) {
    rig r(machine, {.chunk_units = 1});
    std::vector<pulseinfer::sequence_id> ids;
    std::vector<rig::ticket> coming, leaving;
    for (std::int64_t key = 1; key <= 3; ++key) ids.push_back(r.stored(key, blocks(10)));
    for (std::int32_t i = 0; i < 3; ++i) {
      rig::targets in;
      for (std::int32_t b = 0; b < 10; ++b) in.push_back({0, b, 30 * i + b});
      coming.push_back(r.recall(1, ids[static_cast<std::size_t>(i)], in).value());
    }
    for (rig::ticket& t : coming) t.sync();
    r.pages.download(r.stream);
    for (std::int32_t i = 0; i < 3; ++i) {
      for (std::int32_t b = 0; b < 10; ++b) {
        CHECK((r.pages.get(1, 30 * i + b) == stamp(i + 1, 1, b)));
      }
    }
    // The other way, at the same time as the first.
    for (std::int32_t i = 0; i < 3; ++i) {
      rig::targets out;
      for (std::int32_t b = 0; b < 10; ++b) out.push_back({0, 20 + b, 30 * i + b});
      leaving.push_back(r.offload(1, ids[static_cast<std::size_t>(i)], out).value());
    }
    coming.clear();
    coming.push_back(r.recall(0, ids[0], {{0, 0, 25}, {0, 1, 26}, {0, 2, 27}}).value());
    for (rig::ticket& t : leaving) t.sync();
    coming[0].sync();
    for (std::int32_t i = 0; i < 3; ++i) {
      for (std::int32_t b = 0; b < 10; ++b) {
        CHECK((r.in_store(ids[static_cast<std::size_t>(i)], 1, 20 + b) == stamp(i + 1, 1, b)));
      }
    }
    CHECK(rig::at_rest(r.store.counts()));
  });
}

TEST_CASE("transfer: no more transfers than may be in flight, and nothing changes then") {
  each([](backend machine) {
    rig r(machine, {.transfers_in_flight = 2});
    const auto id = r.stored(1, blocks(4));
    r.lend(0, 0, 6);
    {
      auto first = r.recall(0, id, {{0, 0, 10}}).value();
      auto second = r.recall(0, id, {{0, 1, 11}}).value();
      first.sync();
      second.sync();
      const auto before = r.store.counts();
      CHECK(!r.recall(0, id, {{0, 2, 12}}).has_value());
      CHECK(r.store.counts() == before);
      const auto step = r.resolve(0, {0}, {{0, 1}});
      REQUIRE(step.has_value());
      CHECK(!r.mover.recall(*step, {&id, 1}, r.stream).has_value());
      CHECK(r.store.counts() == before);
      (void)(first = std::move(second));  // both are still held
      r.hot.discard(*step, r.rows_of({0}), r.stream);
      machine.sync(r.stream);
    }
    CHECK(r.recall(0, id, {{0, 2, 12}}).has_value());
    {
      auto first = r.offload(0, id, {{0, 20, 10}}).value();
      auto second = r.offload(0, id, {{0, 21, 11}}).value();
      first.sync();
      second.sync();
      const auto before = r.store.counts();
      CHECK(!r.offload(0, id, {{0, 22, 12}}).has_value());
      CHECK(r.store.counts() == before);
      CHECK(!r.store.contains(id, 0, logical_block{22}));
    }
    CHECK(r.offload(0, id, {{0, 22, 12}}).has_value());
    machine.sync_until([&] { return rig::at_rest(r.store.counts()); });
  });
}

TEST_CASE("transfer: a stale sequence is an error, and leaves all as it was") {
  each([](backend machine) {
    rig r(machine);
    const auto live = r.stored(1, blocks(4));
    const auto stale = r.stored(2, blocks(4));
    (void)r.store.close_sequence(stale);
    const auto other = r.stored(3, blocks(4));  // the same place, another generation
    REQUIRE(other.index == stale.index);
    r.lend(0, 0, 6);
    r.lend(1, 6, 6);
    const auto before = r.store.counts();
    const pulseinfer::sequence_id ids[] = {live, stale};
    const rig::targets units = {{0, 0, 20}, {1, 1, 21}};
    CHECK_THROWS_AS((void)r.mover.recall_units(0, ids, units, r.stream), std::invalid_argument);
    CHECK_THROWS_AS((void)r.mover.offload(0, ids, units, r.stream), std::invalid_argument);
    const auto step = r.resolve(0, {0, 1}, {{0, 1}, {0, 1}});
    REQUIRE(step.has_value());
    CHECK_THROWS_AS((void)r.mover.recall(*step, ids, r.stream), std::invalid_argument);
    CHECK(r.store.counts() == before);
    const pulseinfer::sequence_id fine[] = {live, other};
    auto t = r.mover.recall(*step, fine, r.stream).value();  // the step is still to be had
    t.sync();
    CHECK(t.report().moved == 4);
    CHECK(r.store.counts() == before);
    machine.sync(r.stream);
  });
}

TEST_CASE("transfer: what is out of range is refused, and leaves all as it was") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(4));
    const auto before = r.store.counts();
    const auto refuses = [&](std::int32_t layer, const rig::targets& units) {
      CHECK_THROWS_AS((void)r.recall(layer, id, units), std::logic_error);
      CHECK_THROWS_AS((void)r.offload(layer, id, units), std::logic_error);
      CHECK(r.store.counts() == before);
    };
    refuses(-1, {{0, 9, 1}});
    refuses(2, {{0, 9, 1}});
    refuses(0, {{0, 9, 1}, {1, 9, 1}});  // there is one row
    refuses(0, {{0, 9, 1}, {-1, 9, 1}});
    refuses(0, {{0, 9, 1}, {0, -1, 1}});
    refuses(0, {{0, 9, 1}, {0, rig::max_blocks, 1}});
    refuses(0, {{0, 9, 1}, {0, 10, -1}});
    refuses(0, {{0, 9, 1}, {0, 10, 96}});                    // the pool ends at 95
    refuses(0, rig::targets(81, {0, 9, 1}));                 // more than max_units
    const std::vector<pulseinfer::sequence_id> many(4, id);  // more than max_rows
    CHECK_THROWS_AS((void)r.mover.recall_units(0, many, {}, r.stream), std::invalid_argument);
    CHECK_THROWS_AS((void)r.mover.offload(0, many, {}, r.stream), std::invalid_argument);
    CHECK_THROWS_AS((void)r.mover.recall({}, {&id, 1}, r.stream), std::invalid_argument);
    r.lend(0, 0, 6);
    const auto step = r.resolve(0, {0}, {{0, 1}});
    REQUIRE(step.has_value());
    CHECK_THROWS_AS((void)r.mover.recall(*step, {}, r.stream), std::invalid_argument);
    auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
    t.sync();
    CHECK_THROWS_AS((void)r.mover.recall(*step, {&id, 1}, r.stream), std::invalid_argument);
    CHECK(r.store.counts() == before);
    // Row and sequence may be many to one.
    auto all = r.recall(0, id, rig::targets(80, {0, 9, 1})).value();
    all.sync();
    CHECK(all.report().units == 80);
    machine.sync(r.stream);
  });
}

TEST_CASE("transfer: a sequence that is closed while its recall is in flight stays readable") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(4));
    r.lend(0, 10, 6);
    const auto step = r.resolve(0, {0}, {{0, 1, 2, 3}});
    REQUIRE(step.has_value());
    auto intruder = r.store.open_sequence().value();
    {
      test::hold<backend> held(machine, r.stream);
      auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
      const auto outcome = r.store.close_sequence(id);
      if (test::hold<backend>::is_exact || !test::takes_threads<backend>) {
        CHECK(outcome == pulseinfer::close_outcome::deferred);
        CHECK(r.store.counts().quarantined == 8);
        CHECK(r.store.counts().pinned == 0);
        CHECK(rig::balanced(r.store.counts()));
      }
      // Nobody gets its slots meanwhile.
      for (std::int32_t b = 0; b < 40; ++b) r.add(intruder, 7, 0, b);
      held.release();
      t.sync();
      CHECK(t.report().moved == 4);
    }
    r.pages.download(r.stream);
    const ints pages = r.pages_of(*step)[0];
    for (std::int32_t b = 0; b < 4; ++b) {
      CHECK((r.pages.get(0, pages[static_cast<std::size_t>(b)]) == stamp(1, 0, b)));
    }
    CHECK(rig::at_rest(r.store.counts()));
    CHECK(r.store.counts().free == r.store.counts().capacity - 40);
    CHECK_THROWS_AS((void)r.recall(0, id, {}), std::invalid_argument);
  });
}

TEST_CASE("transfer: a sequence that is closed while its offload is in flight frees its slots") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.store.open_sequence().value();
    {
      test::hold<backend> held(machine, r.stream);
      rig::targets out;
      for (std::int32_t b = 0; b < 9; ++b) out.push_back({0, b, b});
      auto t = r.offload(0, id, out).value();
      (void)r.store.close_sequence(id);
      CHECK(rig::balanced(r.store.counts()));
      held.release();
      t.sync();
    }
    CHECK(r.store.counts().free == r.store.counts().capacity);
    machine.sync(r.stream);
  });
}

TEST_CASE("transfer: a cancel takes effect at the border of a chunk") {
  each([](backend machine) {
    using failing = test::failing_backend<backend>;
    failing watched(machine);
    // The first call of the third chunk: chunks of one, two and two units, of two strips each.
    struct moment {
      bool is_recall;
      transfer_way way;
      test::job which;
      int nth;
    };
    using test::job;
    for (const moment& at : {moment{true, transfer_way::staged, job::copy, 3},
                             moment{true, transfer_way::pull, job::kernel, 3},
                             moment{true, transfer_way::batched, job::copy_many, 3},
                             moment{true, transfer_way::direct, job::copy, 7},
                             moment{true, transfer_way::per_block, job::copy, 7},
                             moment{false, transfer_way::staged, job::copy, 3}}) {
      const bool is_recall = at.is_recall;
      const transfer_way way = at.way;
      CAPTURE(is_recall);
      CAPTURE(static_cast<int>(way));
      test::offload_rig<failing> r(watched, {.chunk_units = 2, .chunks_in_flight = 1, .way = way});
      const auto id = r.stored(1, blocks(4));
      if (!is_recall) {
        for (std::int32_t b = 0; b < 12; ++b) r.pages.put(0, b, stamp(2, 0, b));
        r.pages.upload(r.stream);
      }
      r.lend(0, 20, 6);
      std::optional<pulseinfer::ticket<failing>> t;
      std::atomic<bool> is_there{false};
      watched.arm(at.which, at.nth, [&](const auto*) {
        while (!is_there.load()) std::this_thread::yield();
        t->cancel();
      });
      rig::targets units;
      for (std::int32_t b = 0; b < 12; ++b) units.push_back({0, is_recall ? b % 4 : b + 10, b});
      t = is_recall ? r.recall(0, id, units) : r.offload(0, id, units);
      is_there.store(true);
      REQUIRE(t.has_value());
      t->sync();
      CHECK(t->phase() == transfer_phase::cancelled);
      CHECK(t->report().moved == 5);
      CHECK(t->report().bytes == 5 * rig::geometry.unit_bytes());
      std::vector<unit_status> expected(12, unit_status::cancelled);
      std::fill_n(expected.begin(), 5, unit_status::moved);
      CHECK((test::statuses(*t) == expected));
      CHECK(t->enqueue_wait(r.stream) == wait_outcome::incomplete);
      CHECK(test::offload_rig<failing>::at_rest(r.store.counts()));
      if (is_recall) {
        r.pages.download(r.stream);
        for (std::int32_t b = 0; b < 5; ++b) CHECK((r.pages.get(0, b) == stamp(1, 0, b % 4)));
      } else {
        CHECK(r.store.counts().free == r.store.counts().capacity - 8 - 5);
        for (std::int32_t b = 0; b < 12; ++b) {
          CHECK((r.in_store(id, 0, b + 10) == (b < 5 ? stamp(2, 0, b) : test::unit_bytes{})));
        }
        auto rest = r.offload(0, id, units).value();  // what was cancelled can be had again
        rest.sync();
        CHECK(rest.report().moved == 7);
        CHECK(rest.phase() == transfer_phase::done);
      }
    }
  });
}

TEST_CASE("transfer: all ways fill the pool alike") {
  each([](backend machine) {
    std::vector<std::vector<test::unit_bytes>> by_way;
    for (const transfer_way way : test::all_ways) {
      rig r(machine, {.way = way});
      const pulseinfer::sequence_id ids[] = {r.stored(1, blocks(11)), r.stored(2, {3, 4})};
      rig::targets units;
      for (std::int32_t b = 0; b < 11; ++b) units.push_back({0, b, 40 - 3 * b});
      units.push_back({1, 3, 50});
      units.push_back({1, 5, 51});  // the store lacks it
      units.push_back({1, 4, 52});
      auto t = r.mover.recall_units(1, ids, units, r.stream).value();
      t.sync();
      CHECK(t.report().moved == 13);
      CHECK(t.status(12) == unit_status::missing);
      r.pages.download(r.stream);
      auto& all = by_way.emplace_back();
      for (std::int32_t layer = 0; layer < layers; ++layer) {
        for (std::int32_t page = 0; page < 96; ++page) all.push_back(r.pages.get(layer, page));
      }
    }
    for (const auto& all : by_way) CHECK((all == by_way.front()));
  });
}

TEST_CASE("transfer: the engine's destructor waits for what is in flight") {
  each([](backend machine) {
    test::paged_pool<backend> pages(machine, rig::geometry, 32);
    const std::int64_t unit = rig::geometry.unit_bytes();
    pulseinfer::block_store<backend> store(
        machine, rig::geometry,
        {.capacity_bytes = 64 * unit, .max_sequences = 2, .max_blocks = 32});
    auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
    for (std::int32_t b = 0; b < 16; ++b) pages.put(0, b, stamp(1, 0, b));
    pages.upload(stream);
    const auto id = store.open_sequence().value();
    rig::targets out, in;
    for (std::int32_t b = 0; b < 16; ++b) out.push_back({0, b, b});
    {
      pulseinfer::transfer_engine<backend, pulseinfer::block_store<backend>> mover(
          machine, store, pages.pool(),
          {.staging_bytes = 2 * unit, .chunk_bytes = unit, .transfers_in_flight = 2});
      const auto dropped = mover.offload(0, {&id, 1}, out, stream);
      CHECK(dropped.has_value());
    }
    CHECK(rig::at_rest(store.counts()));
    CHECK(store.counts().evictable == 16);
    for (std::int32_t b = 0; b < 16; ++b) in.push_back({0, b, 16 + b});
    {
      pulseinfer::transfer_engine<backend, pulseinfer::block_store<backend>> mover(
          machine, store, pages.pool(),
          {.staging_bytes = 2 * unit, .chunk_bytes = unit, .transfers_in_flight = 2});
      const auto dropped = mover.recall_units(0, {&id, 1}, in, stream);
      CHECK(dropped.has_value());
    }
    CHECK(rig::at_rest(store.counts()));
    pages.download(stream);
    for (std::int32_t b = 0; b < 16; ++b) CHECK((pages.get(0, 16 + b) == stamp(1, 0, b)));
  });
}

TEST_CASE("fault 31: of recalls behind a late stream each goes by its own list of pages") {
  // Two chunks for all of them: a list that came before its turn would be written over.
  each([](backend machine) {
    for (const transfer_way way : test::all_ways) {
      CAPTURE(static_cast<int>(way));
      rig r(machine, {.chunk_units = 2, .staging_chunks = 2, .way = way});
      const auto id = r.stored(7, blocks(24));
      std::vector<test::offload_rig<backend>::ticket> steps;
      {
        test::hold<backend> held(machine, r.stream);
        for (std::int32_t step = 0; step < 4; ++step) {
          rig::targets table;  // the same pages in another order, six blocks a step
          for (std::int32_t i = 0; i < 6; ++i) {
            table.push_back({0, 6 * step + i, 10 + 6 * step + (5 * i + step) % 6});
          }
          steps.push_back(r.recall(1, id, table).value());
        }
        held.release();
      }
      for (auto& step : steps) step.sync();
      r.pages.download(r.stream);
      for (std::int32_t step = 0; step < 4; ++step) {
        for (std::int32_t i = 0; i < 6; ++i) {
          CHECK((r.pages.get(1, 10 + 6 * step + (5 * i + step) % 6) == stamp(7, 1, 6 * step + i)));
        }
      }
    }
  });
}

TEST_CASE("fault 41: pages are ordered alike whether they were lent or named") {
  // One writer, late: then the page is offloaded, and recalled into a page of either kind.
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, {1});
    r.lend(0, 0, 6);
    r.pages.put(0, 20, stamp(5, 0, 0));
    {
      test::hold<backend> held(machine, r.stream);
      r.pages.write_page(0, 20, r.stream);
      auto leaving = r.offload(0, id, {{0, 0, 20}}).value();
      held.release();
      leaving.sync();
    }
    CHECK((r.in_store(id, 0, 0) == stamp(5, 0, 0)));
    const auto step = r.resolve(0, {0}, {{0, 1}});
    REQUIRE(step.has_value());
    auto lent = r.mover.recall(*step, {&id, 1}, r.stream).value();
    auto named = r.recall(0, id, {{0, 0, 30}, {0, 1, 31}}).value();
    for (auto* t : {&lent, &named}) {
      t->sync_submitted();
      CHECK(t->enqueue_wait(r.stream) == wait_outcome::enqueued);
    }
    r.pages.download(r.stream);
    const ints pages = r.pages_of(*step)[0];
    CHECK((r.pages.get(0, pages[0]) == stamp(5, 0, 0)));
    CHECK((r.pages.get(0, pages[1]) == stamp(1, 0, 1)));
    CHECK((r.pages.get(0, 30) == stamp(5, 0, 0)));
    CHECK((r.pages.get(0, 31) == stamp(1, 0, 1)));
    lent.sync();
    named.sync();
  });
}

TEST_CASE("transfer: in steady state nothing is allocated") {
  // Real threads alone: a simulated machine allocates for itself. How many records of an event are
  // in flight depends on the threads, so now and then the backend grows; the path itself allocates
  // in every round or in none.
  if (std::string_view(test::backend_name) != "host") return;
  each([](backend machine) {
    pulseinfer::link_monitor monitor;
    rig r(machine, {.monitor = &monitor});
    const auto id = r.stored(1, blocks(40));
    r.lend(0, 0, 6);
    const std::vector<pulseinfer::selection> choices = {r.choice({{0, 1, 2, 3}})};
    const pulseinfer::batch_view batch = r.rows_of({0});
    rig::targets in, out;
    for (std::int32_t b = 0; b < 30; ++b) {
      in.push_back({0, b, 10 + b});
      out.push_back({0, b, 10 + b});  // present
    }
    out[3].block = out[9].block = logical_block{60};
    std::uint64_t least_of_step = 1000, least_in = 1000, least_out = 1000;
    std::int64_t recalled = 0;
    for (int round = 0; round < 60; ++round) {
      std::uint64_t before = test::allocations();
      {
        const auto step = r.hot.resolve(0, batch, choices[0], r.stream);
        auto t = r.mover.recall(*step, {&id, 1}, r.stream);
        t->sync_submitted();
        (void)t->enqueue_wait(r.stream);
        t->sync();
        recalled += t->report().moved;
        machine.sync(r.stream);
      }
      least_of_step = std::min(least_of_step, test::allocations() - before);
      (void)r.hot.try_take_back(0, r.stream);
      r.lend(0, 0, 6);  // so that all is missed again
      machine.sync(r.stream);
      before = test::allocations();
      r.recall(0, id, in)->sync();
      least_in = std::min(least_in, test::allocations() - before);
      const auto temporary = r.store.open_sequence().value();
      before = test::allocations();
      r.offload(0, temporary, out)->sync();
      least_out = std::min(least_out, test::allocations() - before);
      (void)r.store.close_sequence(temporary);
    }
    CHECK(recalled == 60 * 4);
    CHECK(least_of_step == 0);
    CHECK(least_in == 0);
    CHECK(least_out == 0);
  });
}

TEST_CASE("transfer: a unit that another transfer writes is not called present") {
  each([](backend machine) {
    rig r(machine, {.transfers_in_flight = 4});
    const auto id = r.store.open_sequence().value();
    const auto taken =
        r.store.reserve(id, 0, logical_block{1});  // somebody's write, not decided yet
    REQUIRE(taken.outcome == pulseinfer::reserve_outcome::reserved);
    auto t = r.offload(0, id, {{0, 0, 3}, {0, 1, 4}}).value();
    t.sync();
    CHECK(t.status(0) == unit_status::moved);
    CHECK(t.status(1) == unit_status::being_written);
    r.store.abort(taken.slot);
    CHECK_FALSE(r.store.contains(id, 0, logical_block{1}));
  });
}

TEST_CASE(
    "transfer: a stale step is refused, and so are a second recall and a discard on the way") {
  each([](backend machine) {
    rig r(machine, {.steps_in_flight = 1});
    const auto id = r.stored(1, {0, 1, 2, 3});
    r.lend(0, 40, 6);
    const auto first = r.resolve(0, {0}, {{0, 1}}).value();
    const auto batch = r.rows_of({0});
    {
      auto t = r.mover.recall(first, {&id, 1}, r.stream).value();
      CHECK_THROWS_AS((void)r.mover.recall(first, {&id, 1}, r.stream), std::invalid_argument);
      t.sync();
    }
    CHECK_THROWS_AS((void)r.mover.recall(first, {&id, 1}, r.stream), std::invalid_argument);
    CHECK_THROWS_AS(r.hot.discard(first, batch, r.stream), std::logic_error);
    const auto second = r.resolve(1, {0}, {{2, 3}}).value();  // has the record of the first
    CHECK_THROWS_AS((void)r.mover.recall(first, {&id, 1}, r.stream), std::invalid_argument);
    CHECK_THROWS_AS(r.hot.discard(first, batch, r.stream), std::logic_error);
    auto t = r.mover.recall(second, {&id, 1}, r.stream).value();
    t.sync();
    CHECK(t.report().moved == 2);
    CHECK_THROWS_AS(r.hot.discard(second, batch, r.stream), std::logic_error);
    machine.sync(r.stream);
  });
}

TEST_CASE("transfer: an offload that a closed sequence breaks off gives all slots back") {
  each([](backend machine) {
    rig r(machine);
    const auto open = r.store.open_sequence().value();
    const auto closed = r.store.open_sequence().value();
    (void)r.store.close_sequence(closed);
    const auto before = r.store.counts();
    const pulseinfer::sequence_id both[] = {open, closed};
    const rig::targets units = {{0, 0, 3}, {0, 1, 4}, {1, 0, 5}};
    CHECK_THROWS_AS((void)r.mover.offload(0, both, units, r.stream), std::invalid_argument);
    CHECK(r.store.counts() == before);
  });
}
