// SPDX-License-Identifier: Apache-2.0
/// @file
/// What goes into a block store and comes out of it, as values: handles, outcomes, counts, sizes.
#pragma once

#include <cstdint>

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/integrity.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A sequence of a store. The generation makes a handle that outlived its sequence an error, never
/// another's bytes.
struct sequence_id {
  std::int32_t index = -1;
  std::uint32_t generation = 0;
  friend bool operator==(sequence_id, sequence_id) = default;
};

/// A place for one unit in a store.
enum class host_slot : std::int32_t { none = -1 };

/// What became of a request to write a unit.
enum class [[nodiscard]] reserve_outcome : std::uint8_t{
    reserved,  ///< the slot is the caller's until commit or abort
    exists,    ///< the unit is stored already
    writing,   ///< somebody else writes it; whether it arrives is not decided
    full,      ///< no slot is free and nothing may be evicted; nothing was evicted
};

/// What `reserve` gave: a slot if the outcome is `reserved`.
struct [[nodiscard]] reservation {
  reserve_outcome outcome = reserve_outcome::full;
  host_slot slot = host_slot::none;
};

/// What became of the slots of a sequence that was closed.
enum class [[nodiscard]] close_outcome : std::uint8_t{
    closed,    ///< all slots are free again
    deferred,  ///< leases or writes are under way: their slots are quarantined until the last of
               ///< them ends
};

/// Where every slot is. Law: free + writing + evictable + pinned + quarantined == capacity, at
/// every moment.
struct store_counts {
  std::int64_t free = 0;
  std::int64_t writing = 0;
  std::int64_t evictable = 0;
  std::int64_t pinned = 0;
  std::int64_t quarantined = 0;
  std::int64_t capacity = 0;
  friend bool operator==(const store_counts&, const store_counts&) = default;
};

/// Sizes of a store. All of it is allocated by the constructor.
struct block_store_options {
  std::int64_t capacity_bytes = 0;  ///< payload; rounded down to whole units, at least one
  std::int32_t max_sequences = 64;
  std::int32_t max_blocks = 8192;  ///< blocks a sequence; 8,192 of 16 tokens are 131,072 tokens
  /// What a recall can check of a unit: a tag of 8 bytes a unit, none without.
  pulseinfer::integrity integrity = pulseinfer::integrity::none;
  checksum_function checksum = nullptr;  ///< for integrity::checksum, such as `xxh3`
};

namespace detail {

/// Throws `std::invalid_argument` naming the option and its limit.
inline block_store_options checked_options(const kv_geometry& geometry,
                                           const block_store_options& options) {
  expects(options.capacity_bytes >= geometry.unit_bytes(), "block_store: capacity_bytes is ",
          options.capacity_bytes, ", expected at least one unit, which is ", geometry.unit_bytes());
  expects(options.capacity_bytes / geometry.unit_bytes() <= INT32_MAX,
          "block_store: capacity_bytes is ", options.capacity_bytes, ", more than ", INT32_MAX,
          " units of ", geometry.unit_bytes());
  expects(options.max_sequences >= 1 && options.max_sequences <= max_extent,
          "block_store: max_sequences is ", options.max_sequences, ", expected 1 to ", max_extent);
  expects(options.max_blocks >= 1 && options.max_blocks <= (1 << 24), "block_store: max_blocks is ",
          options.max_blocks, ", expected 1 to ", 1 << 24);
  return options;
}

}  // namespace detail
}  // namespace pulseinfer
