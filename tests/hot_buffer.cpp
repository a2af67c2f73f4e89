// SPDX-License-Identifier: Apache-2.0
/// @file
/// hot_buffer.hpp on the backend under test, with the transfers that end its steps. Include the
/// backend's support header first.
#include "pulseinfer/hot_buffer.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "support/offload_rig.hpp"

namespace {

using backend = test::backend;
using rig = test::offload_rig<backend>;
using pulseinfer::take_back_outcome;
using ints = std::vector<std::int32_t>;

template <class Case>
void each(Case run) {
  test::each_backend([&](backend machine) { run(machine); });
}

/// Blocks 0 to `count` - 1.
ints blocks(std::int32_t count) {
  ints all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// Resolves, recalls and waits: afterwards what was chosen is resident. Returns the missed blocks of
/// the first row.
ints settle(rig& r, std::int32_t layer, std::int32_t request, pulseinfer::sequence_id id,
            const ints& chosen) {
  const auto step = r.resolve(layer, {request}, {chosen});
  REQUIRE(step.has_value());
  auto ticket = r.mover.recall(*step, {&id, 1}, r.stream);
  REQUIRE(ticket.has_value());
  ticket->sync();
  r.machine.sync(r.stream);
  return rig::missed(*step, 0);
}

ints held(const rig& r, std::int32_t request) {
  const auto pages = r.hot.pages_of(request);
  return {pages.begin(), pages.end()};
}

}  // namespace

TEST_CASE("hot buffer: pages are lent and taken back") {
  each([](backend machine) {
    rig r(machine);
    CHECK(held(r, 1).empty());
    r.lend(1, 10, 6);
    CHECK((held(r, 1) == ints{10, 11, 12, 13, 14, 15}));
    CHECK(r.hot.try_take_back(1, r.stream) == take_back_outcome::taken);
    CHECK(held(r, 1).empty());
    CHECK(r.hot.try_take_back(1, r.stream) == take_back_outcome::taken);  // of nothing
    r.lend(2, 12, 4);  // the same pages, to another request
    CHECK((held(r, 2) == ints{12, 13, 14, 15}));
    r.machine.sync(r.stream);
  });
}

TEST_CASE("hot buffer: pages that do not fit are refused, and nothing changes") {
  each([](backend machine) {
    rig r(machine);
    r.lend(0, 0, 4);
    const auto refuses = [&](std::int32_t request, const ints& pages) {
      CHECK_THROWS_AS(r.hot.lend(request, pages, r.stream), std::logic_error);
    };
    refuses(1, {3, 10, 11, 12});               // request 0 has page 3
    refuses(1, {10, 11, 12, 10});              // one page twice
    refuses(1, {10, 11, 12, 96});              // the pool ends at 95
    refuses(1, {10, 11, 12, -1});              // no page
    refuses(1, {10, 11, 12});                  // fewer than the budget
    refuses(1, {10, 11, 12, 13, 14, 15, 16});  // more than there are slots
    refuses(1, {});
    refuses(0, {20, 21, 22, 23});  // it holds some
    refuses(4, {20, 21, 22, 23});
    refuses(-1, {20, 21, 22, 23});
    CHECK((held(r, 0) == ints{0, 1, 2, 3}));
    CHECK(held(r, 1).empty());
    r.lend(1, 10, 6);  // of what was refused, nothing was kept
    CHECK_THROWS_AS((void)r.hot.try_take_back(4, r.stream), std::out_of_range);
    CHECK_THROWS_AS((void)r.hot.try_take_back(-1, r.stream), std::out_of_range);
    CHECK_THROWS_AS((void)r.hot.pages_of(4), std::out_of_range);
    r.machine.sync(r.stream);
  });
}

TEST_CASE("hot buffer: misses get pages of the request, hits keep them") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(20));
    r.lend(0, 30, 6);
    CHECK((settle(r, 0, 0, id, {2, 5, 7, 9}) == ints{2, 5, 7, 9}));
    const auto step = r.resolve(0, {0}, {{5, 7, 9, 11}});
    REQUIRE(step.has_value());
    const auto pages = r.pages_of(*step)[0];
    CHECK((rig::missed(*step, 0) == ints{11}));
    CHECK((pages == ints{31, 32, 33, 34}));  // the slots of step one, and the next free one
    auto ticket = r.mover.recall(*step, {&id, 1}, r.stream);
    REQUIRE(ticket.has_value());
    ticket->sync();
    // 2 was not used in the last step, and slot 5 never: that one is older.
    CHECK((settle(r, 0, 0, id, {5, 9, 11, 13}) == ints{13}));
    CHECK((settle(r, 0, 0, id, {2, 5, 9, 11}).empty()));
    CHECK((settle(r, 0, 0, id, {1, 2, 5, 9}) == ints{1}));  // for 7
    CHECK((settle(r, 0, 0, id, {7}) == ints{7}));
    r.pages.download(r.stream);
    const auto last = r.resolve(0, {0}, {{1, 2, 5, 7}});
    REQUIRE(last.has_value());
    const auto where = r.pages_of(*last)[0];
    CHECK(rig::missed(*last, 0).empty());
    for (std::size_t i = 0; i < 4; ++i) {
      const std::int32_t block = ints{1, 2, 5, 7}[i];
      CHECK((r.pages.get(0, where[i]) == test::stamp(rig::geometry, 1, 0, block)));
    }
  });
}

TEST_CASE("hot buffer: exactly as many pages as the budget") {
  each([](backend machine) {
    rig r(machine, {.pages_per_request = 4});
    const auto id = r.stored(1, blocks(20));
    r.lend(3, 8, 4);
    CHECK((settle(r, 1, 3, id, {0, 1, 2, 3}) == ints{0, 1, 2, 3}));
    CHECK((settle(r, 1, 3, id, {4, 5, 6, 7}) == ints{4, 5, 6, 7}));
    CHECK((settle(r, 1, 3, id, {0, 5, 6, 7}) == ints{0}));
    CHECK((settle(r, 1, 3, id, {0, 5, 6, 7}).empty()));
  });
}

TEST_CASE("hot buffer: a layer uses the first of the pages, as many as it has") {
  each([](backend machine) {
    rig r(machine, {.pages_of_layer = {4, 6}});
    const auto id = r.stored(1, blocks(20));
    r.lend(0, 10, 6);
    r.lend(1, 20, 5);
    r.lend(2, 30, 4);
    for (const std::int32_t request : {0, 1, 2}) {
      (void)settle(r, 0, request, id, {0, 1, 2, 3});
      (void)settle(r, 1, request, id, {0, 1, 2, 3});
      // The layer of exactly the budget has given up two for these, the other one has not.
      (void)settle(r, 0, request, id, {2, 3, 4, 5});
      (void)settle(r, 1, request, id, {2, 3, 4, 5});
      CHECK((settle(r, 0, request, id, {0, 1}) == ints{0, 1}));
      const std::size_t kept = request == 0 ? 2 : request == 1 ? 1 : 0;
      CHECK(settle(r, 1, request, id, {0, 1}).size() == 2 - kept);
      const auto step = r.resolve(0, {request}, {{6, 7, 8, 9}});
      REQUIRE(step.has_value());
      const auto table = r.pages_of(*step);
      for (const std::int32_t page : table[0]) {
        CHECK(page >= 10 * (request + 1));
        CHECK(page < 10 * (request + 1) + 4);
      }
      r.hot.discard(*step, r.rows_of({request}), r.stream);
    }
    r.machine.sync(r.stream);
  });
}

TEST_CASE("hot buffer: a unit chosen often outlives one chosen lately, if that is asked for") {
  each([](backend machine) {
    for (const auto rule :
         {pulseinfer::hot_replacement::least_recent, pulseinfer::hot_replacement::least_used}) {
      rig r(machine, {.replacement = rule});
      const auto id = r.stored(1, blocks(20));
      r.lend(0, 10, 6);
      for (int i = 0; i < 6; ++i) (void)settle(r, 0, 0, id, {1, 2});
      (void)settle(r, 0, 0, id, {3, 4, 5, 6});
      const auto step = r.resolve(0, {0}, {{7, 8}});
      REQUIRE(step.has_value());
      r.machine.sync(r.stream);
      ints gone;
      for (const auto& miss : step->misses(0)) gone.push_back(miss.victim);
      CHECK(
          (gone == (rule == pulseinfer::hot_replacement::least_recent ? ints{1, 2} : ints{3, 4})));
      r.hot.discard(*step, r.rows_of({0}), r.stream);
      r.machine.sync(r.stream);
    }
  });
}

TEST_CASE("hot buffer: requests and layers do not mix") {
  each([](backend machine) {
    rig r(machine);
    const auto first = r.stored(1, blocks(20));
    const auto second = r.stored(2, blocks(20));
    r.lend(0, 0, 6);
    r.lend(2, 6, 5);
    CHECK((settle(r, 0, 0, first, {1, 2, 3, 4}) == ints{1, 2, 3, 4}));
    CHECK((settle(r, 1, 0, first, {1, 2, 3, 4}) == ints{1, 2, 3, 4}));
    CHECK((settle(r, 0, 2, second, {3, 4, 5, 6}) == ints{3, 4, 5, 6}));
    // Both at once, in the other order of rows, one short.
    const auto step = r.resolve(0, {2, 0}, {{4, 7}, {1, 2, 3, 8}});
    REQUIRE(step.has_value());
    const pulseinfer::sequence_id ids[] = {second, first};
    auto ticket = r.mover.recall(*step, ids, r.stream);
    REQUIRE(ticket.has_value());
    ticket->sync();
    CHECK((rig::missed(*step, 0) == ints{7}));
    CHECK((rig::missed(*step, 1) == ints{8}));
    const auto pages = r.pages_of(*step);
    CHECK(pages[0][2] == -1);
    CHECK(pages[0][3] == -1);
    r.pages.download(r.stream);
    CHECK((r.pages.get(0, pages[0][0]) == test::stamp(rig::geometry, 2, 0, 4)));
    CHECK((r.pages.get(0, pages[0][1]) == test::stamp(rig::geometry, 2, 0, 7)));
    CHECK((r.pages.get(0, pages[1][0]) == test::stamp(rig::geometry, 1, 0, 1)));
    CHECK((r.pages.get(0, pages[1][3]) == test::stamp(rig::geometry, 1, 0, 8)));
    // Layer 1 of the first request is as it was.
    CHECK((settle(r, 1, 0, first, {1, 2, 3, 4}).empty()));
    CHECK((r.pages.get(1, 0) == test::stamp(rig::geometry, 1, 1, 1)));
  });
}

TEST_CASE("hot buffer: pages that come back to a request hold nothing of before") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(20));
    r.lend(0, 0, 6);
    (void)settle(r, 0, 0, id, {1, 2, 3, 4});
    (void)settle(r, 1, 0, id, {1, 2, 3, 4});
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::taken);
    r.lend(0, 2, 6);
    CHECK((settle(r, 0, 0, id, {1, 2, 3, 4}) == ints{1, 2, 3, 4}));
    CHECK((settle(r, 1, 0, id, {3, 4}) == ints{3, 4}));
    CHECK((settle(r, 1, 0, id, {3, 4}).empty()));
  });
}

TEST_CASE("hot buffer: a step in flight keeps its pages, until it is recalled or discarded") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(20));
    r.lend(0, 0, 6);
    r.lend(1, 6, 6);
    const auto step = r.resolve(0, {0}, {{1, 2}});
    REQUIRE(step.has_value());
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::in_use);
    CHECK((held(r, 0) == ints{0, 1, 2, 3, 4, 5}));
    CHECK(r.hot.try_take_back(1, r.stream) == take_back_outcome::taken);  // not in that step
    auto ticket = r.mover.recall(*step, {&id, 1}, r.stream);
    REQUIRE(ticket.has_value());
    ticket->sync();
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::taken);

    r.lend(0, 0, 6);
    const auto other = r.resolve(0, {0}, {{1, 2}});
    REQUIRE(other.has_value());
    r.machine.sync(r.stream);
    CHECK((rig::missed(*other, 0) == ints{1, 2}));
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::in_use);
    r.hot.discard(*other, r.rows_of({0}), r.stream);
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::taken);
    r.machine.sync(r.stream);
  });
}

TEST_CASE("hot buffer: a discarded step's units are missed again") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(20));
    r.lend(0, 0, 6);
    r.lend(1, 6, 6);
    (void)settle(r, 0, 0, id, {1, 2});
    for (int i = 0; i < 10; ++i) {  // more often than there are steps in flight
      const auto step = r.resolve(0, {1, 0}, {{9}, {1, 2, 3, 4}});
      REQUIRE(step.has_value());
      r.machine.sync(r.stream);
      CHECK((rig::missed(*step, 0) == ints{9}));
      CHECK((rig::missed(*step, 1) == ints{3, 4}));
      r.hot.discard(*step, r.rows_of({1, 0}), r.stream);
    }
    CHECK((settle(r, 0, 0, id, {1, 2, 3, 4}) == ints{3, 4}));
    r.machine.sync(r.stream);
  });
}

TEST_CASE("hot buffer: no more steps than may be in flight, and nothing changes then") {
  each([](backend machine) {
    rig r(machine, {.steps_in_flight = 2});
    const auto id = r.stored(1, blocks(20));
    r.lend(0, 0, 6);
    r.lend(1, 6, 6);
    const auto first = r.resolve(0, {0}, {{1, 2, 3, 4}});
    const auto second = r.resolve(1, {0}, {{1, 2, 3, 4}});
    REQUIRE(first.has_value());
    REQUIRE(second.has_value());
    CHECK(!r.resolve(0, {1}, {{7, 8}}).has_value());
    r.machine.sync(r.stream);
    CHECK((rig::missed(*first, 0) == ints{1, 2, 3, 4}));
    CHECK((rig::missed(*second, 0) == ints{1, 2, 3, 4}));
    CHECK(r.hot.try_take_back(1, r.stream) == take_back_outcome::taken);  // it has no step
    r.lend(1, 6, 6);
    auto ticket = r.mover.recall(*first, {&id, 1}, r.stream);
    REQUIRE(ticket.has_value());
    ticket->sync();
    CHECK((settle(r, 0, 1, id, {7, 8}) == ints{7, 8}));  // the refused one had placed nothing
    r.hot.discard(*second, r.rows_of({0}), r.stream);
    r.machine.sync(r.stream);
    CHECK((settle(r, 1, 0, id, {1, 2}) == ints{1, 2}));
  });
}

TEST_CASE("hot buffer: an empty choice and an empty batch") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(4));
    r.lend(0, 0, 6);
    CHECK(settle(r, 0, 0, id, {}).empty());
    const auto step = r.resolve(0, {}, {});
    REQUIRE(step.has_value());
    auto ticket = r.mover.recall(*step, {}, r.stream);
    REQUIRE(ticket.has_value());
    ticket->sync();
    CHECK(ticket->report().units == 0);
    CHECK(ticket->phase() == pulseinfer::transfer_phase::done);
  });
}

TEST_CASE("hot buffer: what does not fit is refused by resolve and discard") {
  backend machine = test::make_backend();
  rig r(machine);
  r.lend(0, 0, 6);
  const pulseinfer::selection chosen = r.choice({{1, 2}});
  const auto throws = [&](std::int32_t layer, const pulseinfer::batch_view& batch,
                          const pulseinfer::selection& s) {
    CHECK_THROWS_AS((void)r.hot.resolve(layer, batch, s, r.stream), std::logic_error);
  };
  pulseinfer::batch_view batch = r.rows_of({0});
  throws(-1, batch, chosen);
  throws(2, batch, chosen);
  throws(0, r.rows_of({1}), chosen);  // holds no pages
  throws(0, r.rows_of({4}), chosen);
  throws(0, r.rows_of({-1}), chosen);
  throws(0, r.rows_of({0, 1}), chosen);  // another number of rows than of lists
  batch = r.rows_of({0});
  pulseinfer::selection other = chosen;
  other.k = 3;
  throws(0, batch, other);
  batch.max_tokens = (rig::max_blocks + 1) * rig::geometry.block_tokens;
  throws(0, batch, chosen);
  batch = r.rows_of({0});
  batch.device_requests = nullptr;
  throws(0, batch, chosen);
  CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::taken);  // no step was begun
  r.lend(0, 0, 6);
  const auto step = r.resolve(0, {0}, {{1, 2}});
  REQUIRE(step.has_value());
  CHECK_THROWS_AS(r.hot.discard({}, r.rows_of({0}), r.stream), std::logic_error);
  CHECK_THROWS_AS(r.hot.discard(*step, r.rows_of({0, 1}), r.stream), std::invalid_argument);
  r.hot.discard(*step, r.rows_of({0}), r.stream);
  machine.sync(r.stream);

  const auto make = [&](const pulseinfer::hot_buffer_options& o) {
    CHECK_THROWS_AS(pulseinfer::hot_buffer<backend>(machine, r.pages.pool(), o),
                    std::invalid_argument);
  };
  make({.pages_per_request = 3, .budget_blocks = 4});
  make({.budget_blocks = 0});
  make({.max_requests = 0});
  make({.max_rows = 0});
  make({.max_blocks = 0});
  make({.steps_in_flight = 0});
}
