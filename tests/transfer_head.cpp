// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recalls whose first units are copied from where they lie while the others are gathered
/// (transfer_options::head_copies). Include the backend's support header first.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "pulseinfer/transfer.hpp"
#include "support/hold.hpp"
#include "support/offload_rig.hpp"

namespace {

using test::backend;
using test::blocks;
using test::units_of;
using rig = test::offload_rig<backend>;
using pulseinfer::unit_status;

test::unit_bytes stamp(std::int64_t key, std::int32_t layer, std::int32_t block) {
  return test::stamp(rig::geometry, key, layer, block);
}
/// A whole recall; says how many units its head had.
std::int64_t recall_all(rig& r, pulseinfer::sequence_id id, std::int32_t count) {
  const rig::targets units = units_of(count);
  auto t = r.recall(1, id, units).value();
  t.sync();
  CHECK(t.report().moved == count);
  CHECK(t.report().way == pulseinfer::transfer_way::staged);
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

}  // namespace

TEST_CASE("head: a sixth of a recall goes by itself, within its copies and a chunk's list") {
  test::each_backend([](backend machine) {
    // A unit of this pool has two strips.
    const auto head_of = [&](std::int32_t count, std::int32_t copies, std::int64_t chunk_units) {
      rig r(machine, {.chunk_units = chunk_units, .head_copies = copies});
      const auto id = r.stored(1, blocks(count));
      return recall_all(r, id, count);
    };
    CHECK(is_head(head_of(1, 4096, 16), 0));  // it is all there is
    CHECK(is_head(head_of(2, 4096, 16), 1));
    CHECK(is_head(head_of(11, 4096, 16), 1));
    CHECK(is_head(head_of(12, 4096, 16), 2));
    CHECK(is_head(head_of(40, 4096, 16), 6));
    CHECK(is_head(head_of(40, 4096, 4), 4));
    CHECK(is_head(head_of(40, 7, 16), 3));
    CHECK(is_head(head_of(40, 2, 16), 1));
    CHECK(is_head(head_of(40, 1, 16), 0));  // half a unit is none
    CHECK(is_head(head_of(40, 0, 16), 0));
  });
}

TEST_CASE("head: only where nothing else is under way") {
  test::each_backend([](backend machine) {
    rig r(machine, {.chunk_units = 8, .staging_chunks = 6, .head_copies = 16});
    const auto id = r.stored(1, blocks(40));
    CHECK(is_head(recall_all(r, id, 40), 6));
    // Of two that are under way together one at most finds the link at rest.
    auto first = r.recall(0, id, units_of(40)).value();
    auto second = r.recall(1, id, units_of(40)).value();
    first.sync();
    second.sync();
    CHECK(first.report().moved == 40);
    CHECK(second.report().moved == 40);
    if constexpr (!test::takes_threads<backend>) {
      CHECK(first.report().head_units + second.report().head_units <= 6);
    }
    CHECK(is_head(recall_all(r, id, 40), 6));  // and all is at rest again
  });
}

TEST_CASE("head: not while the engine's stream may still use the pages") {
  test::each_backend([](backend machine) {
    if constexpr (!test::hold<backend>::is_exact) return;
    rig r(machine, {.chunk_units = 8, .staging_chunks = 8, .head_copies = 16});
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

TEST_CASE("head: a damaged unit in it is named, goes nowhere, and the others come") {
  test::each_backend([](backend machine) {
    rig r(machine, {.integrity = pulseinfer::integrity::canary, .head_copies = 16});
    const auto id = r.stored(1, blocks(16));
    for (const std::int32_t b : {0, 9}) {  // one of the two in the head, one behind it
      const auto lease = r.store.acquire(id, 1);
      const_cast<std::byte*>(lease.find(pulseinfer::logical_block{b}))[0] ^= std::byte{1};
    }
    const rig::targets units = units_of(16);
    for (const auto& unit : units) r.pages.put(1, index_of(unit.page), stamp(9, 1, 0));
    r.pages.upload(r.stream);
    r.machine.sync(r.stream);
    auto t = r.recall(1, id, units).value();
    t.sync();
    CHECK(is_head(t.report().head_units, 2));
    CHECK(t.report().moved == 14);
    r.pages.download(r.stream);
    for (std::int32_t b = 0; b < 16; ++b) {
      const bool damaged = b == 0 || b == 9;
      CHECK(t.status(static_cast<std::size_t>(b)) ==
            (damaged ? unit_status::corrupt : unit_status::moved));
      CHECK((r.pages.get(1, index_of(units[static_cast<std::size_t>(b)].page)) ==
             (damaged ? stamp(9, 1, 0) : stamp(1, 1, b))));
    }
  });
}
