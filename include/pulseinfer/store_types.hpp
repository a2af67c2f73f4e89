// SPDX-License-Identifier: Apache-2.0
/// @file
/// What goes into a block store and comes out of it, as values: handles, outcomes, counts, sizes.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>

#include "pulseinfer/block_key.hpp"
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

// Three numbers that are easily taken for each other. None converts from or to an integer, or to
// another: `logical_block{3}` makes one, `index_of` tells which it is.

/// A block of a sequence, counted from its beginning.
enum class logical_block : std::int32_t { none = -1 };

/// A place for one unit in a store, and the write that it was reserved for (the upper 32 bits): what
/// was kept beyond `commit` or `abort` is an error, never another's write. `index_of` is the place.
enum class host_slot : std::int64_t { none = -1 };

/// A page of the engine's pool. In tables that kernels read it is an integer: those are the
/// engine's, see `page_table`.
enum class device_page : std::int32_t { none = -1 };

/// The number of a block, a slot or a page.
template <class Place>
requires std::same_as<Place, logical_block> || std::same_as<Place, host_slot> ||
    std::same_as<Place, device_page>
[[nodiscard]] constexpr std::int32_t index_of(Place place) noexcept {
  return static_cast<std::int32_t>(place);
}

/// What became of a request to write a unit.
enum class [[nodiscard]] reserve_outcome : std::uint8_t{
    reserved,      ///< the slot is the caller's until commit or abort
    exists,        ///< the unit is stored already
    writing,       ///< somebody else writes it; whether it arrives is not decided
    full,          ///< no slot is free and nothing may be evicted; nothing was evicted
    not_admitted,  ///< the store's admission filter keeps the block out
};

/// What `reserve` gave: a slot and its bytes if the outcome is `reserved`.
struct [[nodiscard]] reservation {
  reserve_outcome outcome = reserve_outcome::full;
  host_slot slot = host_slot::none;
  std::byte* bytes = nullptr;  ///< the slot's, as `block_store::writable` gives them
};

/// What became of the slots of a sequence that was closed.
enum class [[nodiscard]] close_outcome : std::uint8_t{
    closed,    ///< all its slots are free again, or hold what others share or a prefix that has a
               ///< name
    deferred,  ///< leases or writes are under way: their slots are quarantined until the last of
               ///< them ends
};

/// What became of a wish to forget the end of a sequence.
enum class [[nodiscard]] trim_outcome : std::uint8_t{
    trimmed,
    leased,  ///< somebody reads the sequence; nothing has changed
};

/// What became of a name for a block.
enum class [[nodiscard]] name_outcome : std::uint8_t{
    named,   ///< the block is found by this key from here on, once it is whole
    exists,  ///< another block has the key, and keeps it as it is; this one stays without
};

/// How long a block with a name should stay once no sequence holds it, for a policy that looks at
/// that: see eviction_entry.
struct retention {
  std::int32_t priority = 0;
  std::int64_t keep_until = 0;
};

/// What a store tells of blocks that have a name.
struct store_event {
  enum class what : std::uint8_t {
    stored,   ///< all its layers are there: it can be found
    evicted,  ///< given up for another
    damaged,  ///< a unit of it was not what was stored
    cleared,  ///< `clear` was called
  };
  what kind = what::stored;
  block_key key;
  friend bool operator==(const store_event&, const store_event&) = default;
};

/// What a full store gives up at a time from a sequence that is open. Blocks that only the prefix
/// index knows always go as a whole.
enum class eviction_scope : std::uint8_t {
  unit,   ///< the highest layer of the last block: the least that makes room
  block,  ///< all layers of the last block: what is left is whole
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
  /// Blocks that the store can know, whoever holds them and however many layers they have; 0: four
  /// times as many as whole ones would fit, at least `max_blocks`, at most one a unit. A block that
  /// finds none free has a whole one given up for it.
  std::int32_t max_stored_blocks = 0;
  eviction_scope scope = eviction_scope::unit;
  std::int32_t max_events = 0;  ///< that wait to be drained; later ones are lost, and counted
  /// Overwrite a slot's bytes when it becomes free. What no unit has been in is as the backend gave
  /// it; at the store's end nothing is done: see `pinned_options::zero_on_release`.
  bool zero_freed = false;
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
  const std::int64_t units = options.capacity_bytes / geometry.unit_bytes();
  expects(options.max_stored_blocks >= 0 && options.max_stored_blocks <= units,
          "block_store: max_stored_blocks is ", options.max_stored_blocks, ", expected 0 to ",
          units);
  expects(options.max_events >= 0 && options.max_events <= (1 << 24), "block_store: max_events is ",
          options.max_events, ", expected 0 to ", 1 << 24);
  expects(options.scope <= eviction_scope::block, "block_store: scope is ",
          static_cast<int>(options.scope), ", expected one of eviction_scope");
  block_store_options checked = options;
  if (checked.max_stored_blocks == 0) {
    const std::int64_t whole = (units + geometry.layers - 1) / geometry.layers;
    checked.max_stored_blocks = static_cast<std::int32_t>(
        std::min(units, std::max<std::int64_t>(4 * whole, options.max_blocks)));
  }
  return checked;
}

}  // namespace detail
}  // namespace pulseinfer
