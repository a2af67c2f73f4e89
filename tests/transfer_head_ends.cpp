// SPDX-License-Identifier: Apache-2.0
/// @file
/// Heads of recalls that fail, are cancelled, or have undrained chunks before them
/// (transfer_options::head_copies). Include the simulated backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/pinned_allocator.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/failing_backend.hpp"
#include "support/offload_rig.hpp"
#include "support/rounds.hpp"

namespace {

using test::blocks;
using machine_type = pulseinfer::simulated_backend;
using pulseinfer::copy_direction;
using pulseinfer::unit_status;
using pulseinfer::wait_outcome;

template <class Rig>
test::unit_bytes stamp(std::int64_t key, std::int32_t layer, std::int32_t block) {
  return test::stamp(Rig::geometry, key, layer, block);
}
test::unit_targets units_of(std::int32_t count, std::int32_t first_page) {
  test::unit_targets units;
  for (std::int32_t b = 0; b < count; ++b) units.push_back({0, b, first_page + b});
  return units;
}

}  // namespace

TEST_CASE("head: the engine waits for a head that was handed over") {
  // The chunks of the first recall are back, but not drained: the second one's head is a task, and
  // the chunk behind it may be on its way before.
  int heads = 0;
  for (std::uint64_t seed = 1; seed <= test::rounds<std::uint64_t>(400, 4'000); ++seed) {
    CAPTURE(seed);
    using rig = test::offload_rig<machine_type>;
    machine_type machine(pulseinfer::fuzzed{.seed = seed});
    rig r(machine, {.chunk_units = 2, .staging_chunks = 2, .head_copies = 16});
    const auto id = r.stored(1, blocks(24));
    auto first = r.recall(0, id, units_of(12, 10)).value();
    first.sync_submitted();
    auto second = r.recall(1, id, units_of(2, 50)).value();
    second.sync_submitted();
    auto other = machine.make_stream(pulseinfer::stream_priority::normal);
    if (seed % 2 == 0) {
      machine.sync_until([&] { return second.is_complete(); });
    } else {
      REQUIRE(second.enqueue_wait(other) == wait_outcome::enqueued);
    }
    r.pages.download(other);
    for (std::int32_t b = 0; b < 2; ++b) {
      CHECK((r.pages.get(1, 50 + b) == stamp<rig>(1, 1, b)));
    }
    second.sync();
    first.sync();
    heads += second.report().head_units > 0 ? 1 : 0;
  }
  CHECK(heads > 0);
}

namespace {

struct broken_kernel {
  void operator()(std::int64_t, std::int64_t) const {
    throw pulseinfer::device_error("broken_kernel: failed on purpose");
  }
};

}  // namespace

TEST_CASE("head: a head whose copy failed did not move, though the rest was cancelled") {
  using backend = test::failing_backend<machine_type>;
  using rig = test::offload_rig<backend>;
  backend machine(machine_type{pulseinfer::timed{}});
  rig r(machine, {.chunk_units = 2, .staging_chunks = 4, .chunks_in_flight = 2, .head_copies = 16});
  const auto id = r.stored(1, blocks(12));
  machine_type plain = machine;
  machine.arm(test::job::copy_many, 1, [plain](const backend::stream_ref* stream) mutable {
    plain.for_each({1, 1}, {}, 0, broken_kernel{}, *stream);
  });
  auto t = r.recall(1, id, units_of(12, 10)).value();
  machine.sync_until([&] { return machine.has_struck(); });
  t.cancel();
  try {
    t.sync();
  } catch (const pulseinfer::device_error&) {
  }
  r.pages.download(r.stream);
  int wrong = 0;
  for (std::int32_t b = 0; b < 12; ++b) {
    const bool there = r.pages.get(1, 10 + b) == stamp<rig>(1, 1, b);
    if (t.status(static_cast<std::size_t>(b)) == unit_status::moved && !there) ++wrong;
  }
  CHECK(wrong == 0);
  CHECK(t.phase() == pulseinfer::transfer_phase::failed);
  // The stream's failure is this transfer's, not the next one's.
  auto again = r.recall(1, id, units_of(12, 10)).value();
  CHECK_NOTHROW(again.sync());
  CHECK(again.report().moved == 12);
}

TEST_CASE("head: a recall that is cancelled ends behind its head, though no task could be had") {
  using backend = test::failing_backend<machine_type>;
  using rig = test::offload_rig<backend>;
  for (int nth = 1; nth < 12; ++nth) {
    CAPTURE(nth);
    backend machine(machine_type{pulseinfer::timed{}});
    rig r(machine,
          {.chunk_units = 2, .staging_chunks = 4, .chunks_in_flight = 2, .head_copies = 16});
    const auto id = r.stored(1, blocks(12));
    machine.arm_throw(test::job::task, nth);
    std::optional<rig::ticket> t;
    try {
      t = r.recall(1, id, units_of(12, 10));
    } catch (const pulseinfer::device_error&) {
      continue;
    }
    machine.sync_until([&] { return machine.has_struck() || t->is_final(); });
    t->cancel();
    try {
      t->sync();
    } catch (const pulseinfer::device_error&) {
    }
    // It has ended: the pages are the engine's again, and read as they are now.
    int wrong = 0;
    for (std::int32_t b = 0; b < 12; ++b) {
      const auto& layout = r.pages.pool().layout();
      const std::byte* const at = r.pages.pool().layer(1).plane[0] + layout.page_offset(10 + b);
      const auto expected = stamp<rig>(1, 1, b);
      const bool there = std::equal(at, at + layout.plane[0].strip_bytes, expected.begin());
      if (t->status(static_cast<std::size_t>(b)) == unit_status::moved && !there) ++wrong;
    }
    CHECK(wrong == 0);
  }
}

TEST_CASE("head: what is said to have gone as a head has gone") {
  using rig = test::offload_rig<machine_type>;
  machine_type machine(pulseinfer::fuzzed{.seed = 0});
  rig r(machine, {.chunk_units = 2, .staging_chunks = 4, .head_copies = 16});
  const auto id = r.stored(1, blocks(12));
  auto t = r.recall(1, id, units_of(12, 10)).value();
  t.cancel();
  t.sync();
  CHECK(t.report().head_units <= t.report().moved);
}

namespace {

/// A machine that notes copies from the host's memory that the driver does not know: as pageable
/// memory goes, they block the caller.
class noting_machine : public machine_type {
 public:
  explicit noting_machine(machine_type base) : machine_type(std::move(base)) {}
  void know(const std::byte* first, std::size_t bytes, const std::size_t* known) {
    *range_ = {first, bytes, known};
  }
  [[nodiscard]] int unpinned() const { return *unpinned_; }
  void copy_many_async(std::span<const pulseinfer::copy_span> copies, copy_direction direction,
                       stream_ref s) {
    for (const auto& copy : copies) {
      const auto* const from = static_cast<const std::byte*>(copy.source);
      const bool in_store = from >= range_->first && from < range_->first + range_->bytes;
      if (in_store && registrations() == *range_->known) ++*unpinned_;
    }
    machine_type::copy_many_async(copies, direction, s);
  }

 private:
  struct range {
    const std::byte* first = nullptr;
    std::size_t bytes = 0;
    const std::size_t* known = nullptr;
  };
  std::shared_ptr<range> range_ = std::make_shared<range>();
  std::shared_ptr<int> unpinned_ = std::make_shared<int>(0);
};

}  // namespace

TEST_CASE("head: a store has heads once all of it is pinned, and none before") {
  using paged = pulseinfer::paged_backend<noting_machine>;
  constexpr auto geometry = test::small_geometry;
  noting_machine machine(machine_type{pulseinfer::timed{}});
  paged memory(machine, {.unit_bytes = static_cast<std::size_t>(geometry.unit_bytes()),
                         .workers = 0,
                         .in_background = true});
  test::paged_pool<noting_machine> pages(machine, geometry, 96);
  pulseinfer::block_store<paged> store(
      memory, geometry,
      {.capacity_bytes = 64 * geometry.unit_bytes(), .max_sequences = 2, .max_blocks = 32});
  const auto id = store.open_sequence().value();
  for (std::int32_t b = 0; b < 12; ++b) {
    const auto r = store.reserve(id, 0, pulseinfer::logical_block{b});
    const auto bytes = test::stamp(geometry, 1, 0, b);
    std::memcpy(store.writable(r.slot), bytes.data(), bytes.size());
    store.commit(r.slot);
  }
  auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
  pulseinfer::transfer_engine<noting_machine, pulseinfer::block_store<paged>> mover(
      machine, store, pages.pool(),
      {.staging_bytes = 8 * geometry.unit_bytes(),
       .chunk_bytes = 2 * geometry.unit_bytes(),
       .head_copies = 16});
  const std::size_t known = machine.registrations();
  machine.know(store.payload(), static_cast<std::size_t>(64 * geometry.unit_bytes()), &known);
  CHECK(!store.is_ready());
  auto t = mover.recall_units(0, {&id, 1}, units_of(12, 10), stream).value();
  t.sync();
  REQUIRE(t.report().moved == 12);
  // Staged recalls go from the beginning, the other ways once all is ready.
  CHECK(machine.registrations() == known);
  CHECK(machine.unpinned() == 0);
  CHECK(t.report().head_units == 0);

  memory.resource()
      .find(store.payload())
      ->sync_ready(0, static_cast<std::size_t>(store.capacity_units() * geometry.unit_bytes()));
  CHECK(store.is_ready());
  auto again = mover.recall_units(0, {&id, 1}, units_of(12, 10), stream).value();
  again.sync();
  CHECK(again.report().moved == 12);
  CHECK(again.report().head_units == 2);
}
