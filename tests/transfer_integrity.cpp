// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recalls from a store that keeps tags: damaged units are named, go nowhere, and leave the store.
/// Include the backend's support header first.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "pulseinfer/transfer.hpp"
#include "pulseinfer/xxh3.hpp"
#include "support/offload_rig.hpp"

namespace {

using test::backend;
using rig = test::offload_rig<backend>;
using pulseinfer::integrity;
using pulseinfer::logical_block;
using pulseinfer::transfer_phase;
using pulseinfer::unit_status;
using pulseinfer::wait_outcome;

test::unit_bytes stamp(std::int64_t key, std::int32_t layer, std::int32_t block) {
  return test::stamp(rig::geometry, key, layer, block);
}

/// The integrities that are to be had with this hash.
std::vector<integrity> kinds_with(pulseinfer::checksum_function hash) {
  std::vector<integrity> all = {integrity::canary};
  if (hash != nullptr) all.push_back(integrity::checksum);
  return all;
}
std::vector<integrity> kinds() {
  return kinds_with(pulseinfer::xxh3);
}

/// Flips a bit of a stored unit's first byte: what a canary looks at as well.
void damage(rig& r, pulseinfer::sequence_id id, std::int32_t layer, std::int32_t block) {
  const auto lease = r.store.acquire(id, layer);
  auto* const bytes = const_cast<std::byte*>(lease.find(logical_block{block}));
  REQUIRE(bytes != nullptr);
  bytes[0] ^= std::byte{1};
}

}  // namespace

TEST_CASE("integrity: a damaged unit is named by every way, and the others come") {
  test::each_backend([](backend machine) {
    for (const integrity kind : kinds()) {
      CAPTURE(static_cast<int>(kind));
      for (const pulseinfer::transfer_way way : test::all_ways) {
        CAPTURE(static_cast<int>(way));
        rig r(machine, {.way = way, .integrity = kind});
        const auto id = r.stored(1, {0, 1, 2, 3, 4, 5});
        damage(r, id, 1, 2);
        damage(r, id, 1, 5);
        rig::targets units;
        for (std::int32_t b = 0; b < 6; ++b) {
          units.push_back({0, b, 10 + b});
          r.pages.put(1, 10 + b, stamp(9, 1, b));
        }
        r.pages.upload(r.stream);
        {
          auto t = r.recall(1, id, units).value();
          t.sync();
          CHECK(t.phase() == transfer_phase::done);
          CHECK(t.report().moved == 4);
          using enum unit_status;
          CHECK((test::statuses(t) ==
                 std::vector<unit_status>{moved, moved, corrupt, moved, moved, corrupt}));
          CHECK(t.enqueue_wait(r.stream) == wait_outcome::incomplete);
        }
        r.pages.download(r.stream);
        for (std::int32_t b = 0; b < 6; ++b) {
          const std::int64_t key = b == 2 || b == 5 ? 9 : 1;  // the engine's page is as it was
          CHECK((r.pages.get(1, 10 + b) == stamp(key, 1, b)));
        }
        // They are the store's no more, and can be stored anew.
        CHECK(rig::at_rest(r.store.counts()));
        CHECK(!r.store.contains(id, 1, logical_block{2}));
        CHECK(r.store.contains(id, 1, logical_block{3}));
        CHECK(r.store.contains(id, 0, logical_block{2}));
        r.add(id, 1, 1, 2);
        auto again = r.recall(1, id, units).value();
        again.sync();
        CHECK(again.status(2) == unit_status::moved);
        CHECK(again.status(5) == unit_status::missing);
      }
    }
  });
}

TEST_CASE("integrity: what an offload has stored is sound, and a step says what was not") {
  test::each_backend([](backend machine) {
    for (const integrity kind : kinds()) {
      CAPTURE(static_cast<int>(kind));
      rig r(machine, {.integrity = kind});
      const auto id = r.store.open_sequence().value();
      rig::targets out;
      for (std::int32_t b = 0; b < 4; ++b) {
        out.push_back({0, b, 20 + b});
        r.pages.put(0, 20 + b, stamp(3, 0, b));
      }
      r.pages.upload(r.stream);
      {
        auto leaving = r.offload(0, id, out).value();
        leaving.sync();
        CHECK(leaving.report().moved == 4);
      }
      damage(r, id, 0, 1);
      r.lend(0, 40, 6);
      const auto step = r.resolve(0, {0}, {{0, 1, 2, 3}});
      REQUIRE(step.has_value());
      auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
      t.sync();
      CHECK(t.report().moved == 3);
      REQUIRE(step->misses(0).size() == 4);
      CHECK(step->misses(0)[0].status == unit_status::moved);
      CHECK(step->misses(0)[1].block == 1);
      CHECK(step->misses(0)[1].status == unit_status::corrupt);
      CHECK(r.hot.try_take_back(0, r.stream) == pulseinfer::take_back_outcome::in_use);
      r.hot.discard(*step, r.rows_of({0}), r.stream);
      CHECK(r.hot.try_take_back(0, r.stream) == pulseinfer::take_back_outcome::taken);
      machine.sync(r.stream);
      CHECK(rig::at_rest(r.store.counts()));
    }
  });
}

TEST_CASE("integrity: a cancel that comes behind the check leaves a damaged unit its name") {
  test::each_backend([](backend machine) {
    rig r(machine, {.chunk_units = 8, .integrity = integrity::canary});
    const auto id = r.stored(1, {0, 1, 2, 3, 4, 5});
    damage(r, id, 0, 2);
    rig::targets units;
    for (std::int32_t b = 0; b < 6; ++b) units.push_back({0, b, 10 + b});
    auto t = r.recall(0, id, units).value();
    auto other = r.recall(1, id, {{0, 0, 30}}).value();
    other.sync();  // by then the first one may have come anywhere
    t.cancel();
    t.sync();
    // Whatever else became of it: a unit that has left the store says so.
    CHECK((t.status(2) == unit_status::corrupt) == !r.store.contains(id, 0, logical_block{2}));
  });
}

TEST_CASE("integrity: without it nothing is noticed, and nothing is kept") {
  backend machine = test::make_backend();
  rig r(machine);
  const auto id = r.stored(1, {0});
  damage(r, id, 0, 0);
  auto t = r.recall(0, id, {{0, 0, 1}}).value();
  t.sync();
  CHECK(t.status(0) == unit_status::moved);
}
