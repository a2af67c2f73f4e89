// SPDX-License-Identifier: Apache-2.0
/// @file
/// A store, a pool, and engines between them of which some cannot be had: fault 46 in a constructor.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/offload_rig.hpp"
#include "support/paged_pool.hpp"

namespace test {

template <class Backend>
class engine_attempts {
  using rig = offload_rig<Backend>;
  static constexpr std::int64_t unit = rig::geometry.unit_bytes();

 public:
  explicit engine_attempts(const Backend& machine)
      : machine_(machine),
        pages_(machine, rig::geometry, 8),
        store_(machine, rig::geometry,
               {.capacity_bytes = 8 * unit, .max_sequences = 2, .max_blocks = 8}),
        stream_(machine_.make_stream(pulseinfer::stream_priority::normal)),
        sequence_(store_.open_sequence().value()) {}

  /// Makes an engine, calls `is_made`, and has it move two units to the store and back. Throws what
  /// its constructor does; nothing of it is left, then or otherwise.
  template <class IsMade>
  void make_one(IsMade is_made) {
    pulseinfer::transfer_engine mover(
        machine_, store_, pages_.pool(),
        {.staging_bytes = 3 * unit, .chunk_bytes = unit, .transfers_in_flight = 2, .max_units = 8});
    is_made();
    const unit_targets units = {{0, 0, 3}, {0, 1, 4}};
    mover.offload(0, {&sequence_, 1}, units, stream_)->sync();
    auto t = mover.recall_units(0, {&sequence_, 1}, units, stream_).value();
    t.sync();
    CHECK(t.report().moved == 2);
  }
  [[nodiscard]] bool at_rest() const { return rig::at_rest(store_.counts()); }

 private:
  Backend machine_;
  paged_pool<Backend> pages_;
  pulseinfer::block_store<Backend> store_;
  typename Backend::stream stream_;
  pulseinfer::sequence_id sequence_;
};

}  // namespace test
