// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recalls that go by a plan (transfer_options::plans): what they bring, how large their heads are, and
/// when they do. Include the backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "pulseinfer/chunk_plan.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/hold.hpp"
#include "support/offload_rig.hpp"
#include "support/rounds.hpp"

namespace {

using test::backend;
using test::blocks;
using test::units_of;
using rig = test::offload_rig<backend>;
using pulseinfer::chunk_plan;
using pulseinfer::chunk_plans;
using pulseinfer::transfer_way;
using pulseinfer::unit_status;

test::unit_bytes stamp(std::int64_t key, std::int32_t layer, std::int32_t block) {
  return test::stamp(rig::geometry, key, layer, block);
}
/// A recall of all units into pages that held others; says how many its head had.
std::int64_t recall_all(rig& r, pulseinfer::sequence_id id, std::int32_t count,
                        transfer_way way = transfer_way::staged) {
  const rig::targets units = units_of(count);
  for (const auto& unit : units) r.pages.put(1, index_of(unit.page), stamp(9, 1, 0));
  r.pages.upload(r.stream);
  r.machine.sync(r.stream);
  auto t = r.recall(1, id, units).value();
  t.sync();
  CHECK(t.report().moved == count);
  CHECK(t.report().way == way);
  CHECK(t.enqueue_wait(r.stream) == pulseinfer::wait_outcome::enqueued);
  r.pages.download(r.stream);
  for (std::int32_t b = 0; b < count; ++b) {
    CHECK((r.pages.get(1, index_of(units[static_cast<std::size_t>(b)].page)) == stamp(1, 1, b)));
  }
  return t.report().head_units;
}

/// Whether a head has so many units. A device may be late to say that nobody uses the pages: then
/// there is none.
bool is_head(std::int64_t units, std::int64_t expected) {
  return units == expected || (!test::device_memory_is_host_readable && units == 0);
}

chunk_plans only(const chunk_plan& plan) {
  chunk_plans plans;
  plans.add(plan);
  return plans;
}
/// A quarter of a recall is its head, and a quarter each chunk.
chunk_plans quarters(std::int64_t max_units) {
  return only({.max_units = max_units, .head = 0.25, .chunks = {0.25}});
}

}  // namespace

TEST_CASE("plan: a head is as large as its plan says, within a chunk's list") {
  test::each_backend([](backend machine) {
    const auto head_of = [&](double share, std::int32_t count, std::int64_t chunk_units,
                             std::int32_t copies) {
      rig r(machine, {.chunk_units = chunk_units,
                      .staging_chunks = 4,
                      .head_copies = copies,
                      .plans = only({.max_units = 40, .head = share, .chunks = {0.25}})});
      const auto id = r.stored(1, blocks(count));
      return recall_all(r, id, count);
    };
    for (const std::int32_t copies : {0, 2, 16}) {  // it is the plan that counts
      CAPTURE(copies);
      CHECK(is_head(head_of(0.25, 40, 16, copies), 10));
      CHECK(is_head(head_of(0.25, 37, 16, copies), 9));
      CHECK(is_head(head_of(0.25, 2, 16, copies), 1));
      CHECK(is_head(head_of(0.25, 1, 16, copies), 0));  // it is all there is
      CHECK(is_head(head_of(1, 1, 16, copies), 0));
      CHECK(is_head(head_of(0, 40, 16, copies), 0));
      CHECK(is_head(head_of(1, 40, 16, copies), 16));
      CHECK(is_head(head_of(1, 40, 40, copies), 40));  // nothing is gathered
    }
    // The recall that no plan is for goes as it did.
    CHECK(is_head(head_of(0.25, 41, 16, 0), 0));
    CHECK(is_head(head_of(0.25, 41, 16, 16), 6));
  });
}

TEST_CASE("plan: it needs a second chunk, and staged recalls") {
  test::each_backend([](backend machine) {
    {
      rig r(machine, {.chunk_units = 16, .chunks_in_flight = 1, .plans = quarters(40)});
      const auto id = r.stored(1, blocks(40));
      CHECK(recall_all(r, id, 40) == 0);
    }
    rig r(machine, {.chunk_units = 16, .plans = quarters(40)});
    const auto id = r.stored(1, blocks(40));
    for (const transfer_way way : test::all_ways) {
      CAPTURE(static_cast<int>(way));
      r.mover.set_way(way);
      CHECK(is_head(recall_all(r, id, 40, way), way == transfer_way::staged ? 10 : 0));
    }
  });
}

TEST_CASE("plan: whatever it says, every byte comes to its page") {
  std::uint64_t seed = 0;
  const int rounds = test::rounds(20, 400);
  test::each_backend([&](backend machine) {
    rig r(machine, {.chunk_units = 8, .staging_chunks = 5, .chunks_in_flight = 4});
    const auto id = r.stored(1, blocks(40));
    for (int i = 0; i < rounds; ++i) {
      pulseinfer::detail::random_source draw(++seed);
      CAPTURE(seed);
      const auto share = [&] { return static_cast<double>(1 + draw.below(1000)) / 1000; };
      chunk_plan plan{.max_units = 40, .head = draw.one_in(3) ? 0 : share(), .chunks = {}};
      const std::size_t chunks = 1 + draw.below(chunk_plan::most_chunks);
      for (std::size_t c = 0; c < chunks; ++c) {
        plan.chunks[c] = draw.one_in(2) ? share() : share() / 20;
      }
      plan.parts = static_cast<std::int32_t>(1 + draw.below(20));
      r.mover.set_plans(only(plan));
      const auto count = static_cast<std::int32_t>(2 + draw.below(39));
      const auto head = static_cast<std::int64_t>(plan.head_of(static_cast<std::size_t>(count)));
      CHECK(is_head(recall_all(r, id, count), std::min<std::int64_t>(head, 8)));
    }
  });
}

TEST_CASE("plan: plans are set between recalls, behind those under way") {
  test::each_backend([](backend machine) {
    rig r(machine, {.chunk_units = 16, .staging_chunks = 4});
    const auto id = r.stored(1, blocks(40));
    CHECK(r.mover.options().plans == chunk_plans{});
    CHECK(recall_all(r, id, 40) == 0);
    r.mover.set_plans(quarters(40));
    CHECK(r.mover.options().plans == quarters(40));
    CHECK(is_head(recall_all(r, id, 40), 10));
    auto t = r.recall(0, id, units_of(40)).value();
    const chunk_plans half = only({.max_units = 64, .head = 0.5, .chunks = {0.1, 0.2}});
    r.mover.set_plans(half);
    CHECK(t.is_final());
    t.sync();
    CHECK(t.report().moved == 40);
    CHECK(is_head(t.report().head_units, 10));
    CHECK(is_head(recall_all(r, id, 40), 16));
    CHECK(is_head(recall_all(r, id, 22), 11));
    r.mover.set_plans({});
    CHECK(r.mover.options().plans == chunk_plans{});
    CHECK(recall_all(r, id, 40) == 0);
  });
}

TEST_CASE("plan: a step's recall goes by the plan for what it misses") {
  test::each_backend([](backend machine) {
    rig r(machine,
          {.chunk_units = 16, .plans = only({.max_units = 40, .head = 0.5, .chunks = {0.25}})});
    const auto id = r.stored(1, blocks(8));
    r.lend(0, 50, 6);
    const auto step = r.resolve(0, {0}, {{0, 2, 4, 5}});
    REQUIRE(step.has_value());
    auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
    t.sync();
    CHECK(t.report().moved == 4);
    CHECK(is_head(t.report().head_units, 2));
    CHECK(t.enqueue_wait(r.stream) == pulseinfer::wait_outcome::enqueued);
    r.pages.download(r.stream);
    const auto pages = r.pages_of(*step)[0];
    const std::int32_t chosen[] = {0, 2, 4, 5};
    for (std::size_t i = 0; i < 4; ++i) CHECK((r.pages.get(0, pages[i]) == stamp(1, 0, chosen[i])));
  });
}

TEST_CASE("plan: not behind a recall of which something is still to be gathered") {
  test::each_backend([](backend machine) {
    rig r(machine, {.chunk_units = 8, .staging_chunks = 6, .plans = quarters(40)});
    const auto id = r.stored(1, blocks(40));
    CHECK(is_head(recall_all(r, id, 40), 8));
    auto first = r.recall(0, id, units_of(40)).value();
    auto second = r.recall(1, id, units_of(40)).value();
    first.sync();
    second.sync();
    CHECK(first.report().moved == 40);
    CHECK(second.report().moved == 40);
    if constexpr (!test::takes_threads<backend>) {
      CHECK(first.report().head_units + second.report().head_units <= 8);
    }
    CHECK(is_head(recall_all(r, id, 40), 8));  // and all is at rest again
  });
}

TEST_CASE("plan: not while the engine's stream may still use the pages") {
  test::each_backend([](backend machine) {
    if constexpr (!test::hold<backend>::is_exact) return;
    rig r(machine, {.chunk_units = 8, .staging_chunks = 8, .plans = quarters(40)});
    const auto id = r.stored(1, blocks(16));
    std::optional<rig::ticket> t;
    {
      test::hold<backend> held(machine, r.stream);
      t = r.recall(0, id, units_of(16));
      t->sync_submitted();
      held.release();
    }
    t->sync();
    CHECK(t->report().head_units == 0);
    CHECK(t->report().moved == 16);
  });
}

TEST_CASE("plan: damaged units of head and chunks are named, go nowhere, and the others come") {
  test::each_backend([](backend machine) {
    rig r(machine,
          {.chunk_units = 8, .integrity = pulseinfer::integrity::canary, .plans = quarters(16)});
    const auto id = r.stored(1, blocks(16));
    const auto is_damaged = [](std::int32_t b) { return b == 3 || b == 4 || b == 15; };
    for (const std::int32_t b : {3, 4, 15}) {  // the head's last, the first and the last behind it
      const auto lease = r.store.acquire(id, 1);
      const_cast<std::byte*>(lease.find(pulseinfer::logical_block{b}))[0] ^= std::byte{1};
    }
    const rig::targets units = units_of(16);
    for (const auto& unit : units) r.pages.put(1, index_of(unit.page), stamp(9, 1, 0));
    r.pages.upload(r.stream);
    r.machine.sync(r.stream);
    auto t = r.recall(1, id, units).value();
    t.sync();
    CHECK(is_head(t.report().head_units, 4));
    CHECK(t.report().moved == 13);
    r.pages.download(r.stream);
    for (std::int32_t b = 0; b < 16; ++b) {
      CHECK(t.status(static_cast<std::size_t>(b)) ==
            (is_damaged(b) ? unit_status::corrupt : unit_status::moved));
      CHECK((r.pages.get(1, index_of(units[static_cast<std::size_t>(b)].page)) ==
             (is_damaged(b) ? stamp(9, 1, 0) : stamp(1, 1, b))));
    }
  });
}

TEST_CASE("plan: a recall of nothing, or of what the store lacks, has none") {
  test::each_backend([](backend machine) {
    rig r(machine, {.chunk_units = 8, .plans = quarters(40)});
    const auto id = r.stored(1, blocks(12));
    auto t = r.recall(0, id, {{0, 40, 3}, {0, 41, 4}}).value();
    t.sync();
    CHECK(t.report().moved == 0);
    CHECK(t.report().head_units == 0);
    // Only the units that are there count.
    rig::targets units = units_of(12);
    for (std::int32_t b = 40; b < 60; ++b) units.push_back({0, b, 90});
    auto some = r.recall(0, id, units).value();
    some.sync();
    CHECK(some.report().moved == 12);
    CHECK(is_head(some.report().head_units, 3));
  });
}
