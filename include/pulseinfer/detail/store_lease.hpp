// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a reader of a block store has in its hand: `block_store::lease` and `block_store::hold`.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/prefetch.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/store_types.hpp"
#include "pulseinfer/store_view.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Keeps the sequence's units where they are while it lives. Movable; the moved-from lease holds
/// nothing.
template <class Store>
class store_lease {
 public:
  store_lease() = default;
  store_lease(store_lease&& other) noexcept
      : store_(std::exchange(other.store_, nullptr)),
        key_(other.key_),
        layer_(other.layer_),
        table_(other.table_) {}
  store_lease& operator=(store_lease&& other) noexcept {
    if (this == &other) return *this;
    release();
    store_ = std::exchange(other.store_, nullptr);
    key_ = other.key_;
    layer_ = other.layer_;
    table_ = other.table_;
    return *this;
  }
  ~store_lease() { release(); }

  /// Gives the lease back early. Idempotent.
  void release() noexcept {
    if (store_ != nullptr) store_->release_lease(key_.index);
    store_ = nullptr;
  }
  /// The committed bytes of a block, or null where the store has none. Valid while the lease
  /// lives.
  [[nodiscard]] const std::byte* find(logical_block block) const noexcept {
    const std::int32_t slot = slot_of(block);
    return slot < 0 ? nullptr : store_->blocks().address(slot);
  }
  /// The same of many blocks at once, which overlaps the misses of the cache: several times as fast
  /// as one after the other where the table is cold.
  /// @param blocks  in any order, any of them more than once
  /// @param found   [blocks.size()] at least; the rest is left alone
  /// @throws std::invalid_argument  if it is shorter; nothing is written
  void find(std::span<const logical_block> blocks, std::span<const std::byte*> found) const {
    expects(found.size() >= blocks.size(), "block_store: room for ", found.size(),
            " addresses, expected one for each of ", blocks.size(), " blocks");
    if (store_ == nullptr) {
      std::fill_n(found.begin(), blocks.size(), nullptr);
      return;
    }
    const auto some = [blocks](std::size_t first) {
      return blocks.subspan(first, std::min(at_once, blocks.size() - first));
    };
    fetch(some(0));
    for (std::size_t first = 0; first < blocks.size(); first += at_once) {
      if (blocks.size() - first > at_once) fetch(some(first + at_once));
      find_fetched(some(first), found.subspan(first));
    }
  }
  /// The same for kernels; also units that are committed later are found.
  /// @throws as block_store::device_payload
  [[nodiscard]] store_view device_view() const {
    if (store_ == nullptr) return {};
    return {.slots = store_->memory_.device_table() + (table_ - store_->memory_.table()),
            .payload = store_->memory_.device_payload(),
            .unit_bytes = store_->unit_bytes(),
            .blocks = store_->max_blocks()};
  }
  /// Asks for the memory that `find` of many blocks reads first, and does not wait for it. Who looks
  /// up one sequence after the other does so for the next one before he looks at this one's: its
  /// lines are on their way meanwhile. A hint: nothing else comes of it.
  /// @param blocks  as `find` gets them next
  void prefetch(std::span<const logical_block> blocks) const noexcept {
    if (store_ != nullptr) fetch(blocks.first(std::min(at_once, blocks.size())));
  }
  /// True if these are the bytes of the block as they were committed, wherever they lie now: as
  /// far as the store's `integrity` tells, so always true with `none`. A block that the store
  /// does not have has no bytes. A lease that holds nothing can tell nothing: true.
  [[nodiscard]] bool matches(logical_block block, const std::byte* unit) const noexcept {
    if (store_ == nullptr || !store_->blocks().has_tags()) return true;
    const std::int32_t slot = slot_of(block);
    if (slot < 0) return false;
    return store_->blocks().tag_of(slot) ==
           store_->blocks().tag(
               unit, store_->blocks().catalog().block_of(key_.index, index_of(block)), layer_);
  }
  /// Looks at the bytes in the store itself, and takes the unit out if they are not those that
  /// were committed: it is absent from here on, may be written anew, and its slot stays
  /// quarantined, for others may be reading it, until the last lease on the sequence ends.
  /// @return true if the unit was taken out. False says that the store's bytes are well (those
  ///         that did not match were damaged on their way), or that the unit is absent.
  bool drop_if_corrupt(logical_block block) noexcept {
    return store_ != nullptr && store_->blocks().has_tags() && slot_of(block) >= 0 &&
           store_->drop_if_corrupt(key_.index, layer_, index_of(block));
  }
  [[nodiscard]] explicit operator bool() const noexcept { return store_ != nullptr; }

 private:
  friend Store;
  static constexpr std::size_t at_once = 64;  ///< more lines than can be on their way

  store_lease(Store* store, sequence_id key, std::int32_t layer, const std::int32_t* table)
      : store_(store), key_(key), layer_(layer), table_(table) {}
  void fetch(std::span<const logical_block> blocks) const noexcept {
    constexpr std::size_t line = 64 / sizeof *table_;
    const auto in_row = static_cast<std::uint32_t>(store_->max_blocks());
    if (in_row <= blocks.size() * line) {  // fewer lines than blocks: all of them, in order
      for (std::size_t at = 0; at < in_row; at += line) prefetch_line(table_ + at);
    } else {
      for (const logical_block block : blocks) {
        const std::int32_t at = index_of(block);
        if (static_cast<std::uint32_t>(at) < in_row) prefetch_line(table_ + at);
      }
    }
  }
  void find_fetched(std::span<const logical_block> blocks,
                    std::span<const std::byte*> found) const noexcept {
    const auto in_row = static_cast<std::uint32_t>(store_->max_blocks());
    const std::int32_t* const row = table_;
    const std::byte* const payload = store_->payload();
    const std::int64_t unit_bytes = store_->unit_bytes();
    // What can be done before the lines are there: then few instructions are left for each block, so
    // that many blocks, and the next call's, are under way at once.
    std::uint32_t highest = 0;
    for (const logical_block block : blocks) {
      highest = std::max(highest, static_cast<std::uint32_t>(index_of(block)));
    }
    if (highest < in_row) [[likely]] {
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        const std::int32_t slot = detail::load_mapped(row + index_of(blocks[i]));
        found[i] = slot < 0 ? nullptr : payload + slot * unit_bytes;
      }
      return;
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      const std::int32_t at = index_of(blocks[i]);
      const bool is_in_row = static_cast<std::uint32_t>(at) < in_row;
      const std::int32_t slot = is_in_row ? detail::load_mapped(row + at) : -1;
      found[i] = slot < 0 ? nullptr : payload + slot * unit_bytes;
    }
  }
  [[nodiscard]] std::int32_t slot_of(logical_block block) const noexcept {
    const std::int32_t at = index_of(block);
    if (store_ == nullptr || at < 0 || at >= store_->max_blocks()) return -1;
    return detail::load_mapped(table_ + at);
  }

  Store* store_ = nullptr;
  sequence_id key_;
  std::int32_t layer_ = -1;
  const std::int32_t* table_ = nullptr;
};

/// Keeps a sequence's blocks in the store until it is let go, or until `expire` is told that its
/// deadline is over; between finding a prefix and leasing it. It gives no addresses, so nobody
/// reads when it ends. Movable.
template <class Store>
class store_hold {
 public:
  store_hold() = default;
  store_hold(store_hold&& other) noexcept
      : store_(std::exchange(other.store_, nullptr)), sequence_(other.sequence_) {}
  store_hold& operator=(store_hold&& other) noexcept {
    if (this == &other) return *this;
    release();
    store_ = std::exchange(other.store_, nullptr);
    sequence_ = other.sequence_;
    return *this;
  }
  ~store_hold() { release(); }

  /// Lets go early. Idempotent.
  void release() noexcept {
    if (store_ != nullptr) store_->end_hold(sequence_);
    store_ = nullptr;
  }
  /// True while it keeps the blocks: it has not expired, and the sequence is open.
  [[nodiscard]] bool is_live() const noexcept {
    return store_ != nullptr && store_->is_held(sequence_);
  }

 private:
  friend Store;
  store_hold(Store* store, sequence_id sequence) noexcept : store_(store), sequence_(sequence) {}

  Store* store_ = nullptr;
  sequence_id sequence_;
};

}  // namespace pulseinfer::detail
