// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a block store knows of its blocks: where their units lie, what they are called, and which
/// go first of those that nobody holds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/slot_extents.hpp"
#include "pulseinfer/detail/store_catalog.hpp"
#include "pulseinfer/detail/store_events.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/integrity.hpp"
#include "pulseinfer/prefix_index.hpp"
#include "pulseinfer/store_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Values of a store's table that are no slot.
inline constexpr std::int32_t absent_unit = -1;
inline constexpr std::int32_t unit_being_written = -2;

/// Blocks, slots, names and the policy of a store. It knows who holds a block, not who may be
/// reading it: that is `store_sequences`, which calls it.
///
/// @par Threads  one at a time, under the store's lock; the table's entries, the names, and of a
///               block that is leased its tags may be read at any time
template <class Policy>
class store_blocks {
 public:
  /// @param options  checked
  /// @param table    [sequences, layers, blocks], all is absent from here on
  /// @param payload  [capacity_units, unit_bytes]
  store_blocks(const kv_geometry& geometry, const block_store_options& options, std::int32_t* table,
               std::byte* payload)
      : geometry_(geometry),
        options_(options),
        unit_bytes_(geometry.unit_bytes()),
        table_(table),
        payload_(payload),
        tagger_(options.integrity, options.checksum),
        free_(static_cast<std::int32_t>(options_.capacity_bytes / unit_bytes_)),
        catalog_(free_.size(), options_.max_stored_blocks, options_.max_sequences,
                 options_.max_blocks),
        index_(options_.max_stored_blocks),
        policy_(options_.max_stored_blocks),
        events_(options_.max_events) {
    std::fill_n(table_, table_index(options_.max_sequences, 0, 0), absent_unit);
    if (tagger_) tags_.assign(static_cast<std::size_t>(free_.size()), 0);
  }

  [[nodiscard]] const kv_geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] const block_store_options& options() const noexcept { return options_; }
  [[nodiscard]] std::int64_t unit_bytes() const noexcept { return unit_bytes_; }
  [[nodiscard]] std::byte* payload() const noexcept { return payload_; }
  [[nodiscard]] std::byte* address(std::int32_t slot) const noexcept {
    return payload_ + std::int64_t{slot} * unit_bytes_;
  }
  [[nodiscard]] std::size_t table_index(std::int32_t sequence, std::int32_t layer,
                                        std::int32_t position) const noexcept {
    return (static_cast<std::size_t>(sequence) * static_cast<std::size_t>(geometry_.layers) +
            static_cast<std::size_t>(layer)) *
               static_cast<std::size_t>(options_.max_blocks) +
           static_cast<std::size_t>(position);
  }
  [[nodiscard]] std::int32_t entry(std::int32_t sequence, std::int32_t layer,
                                   std::int32_t position) const noexcept {
    return entry_of(sequence, layer, position).load(std::memory_order_relaxed);
  }
  [[nodiscard]] store_catalog& catalog() noexcept { return catalog_; }
  [[nodiscard]] const store_catalog& catalog() const noexcept { return catalog_; }
  [[nodiscard]] const prefix_index& index() const noexcept { return index_; }
  [[nodiscard]] Policy& policy() noexcept { return policy_; }
  [[nodiscard]] std::int32_t free_units() const noexcept { return free_.size(); }
  [[nodiscard]] store_events& events() noexcept { return events_; }
  [[nodiscard]] const store_events& events() const noexcept { return events_; }
  /// Units that can be read, whoever holds them; those being written that somebody waits for; those
  /// that nobody can have.
  [[nodiscard]] std::int64_t ready() const noexcept { return ready_; }
  [[nodiscard]] std::int64_t awaited() const noexcept { return writing_ - orphans_; }
  [[nodiscard]] std::int64_t spoilt() const noexcept { return orphans_ + corrupt_; }
  /// Bytes of all that is in here, but for the policy, the table and the payload.
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(tags_.capacity() * sizeof(std::uint64_t)) + events_.bytes() +
           free_.bytes() + catalog_.bytes() + index_.bytes();
  }

  void check_unit(std::int32_t layer, std::int32_t position) const {
    expects<std::out_of_range>(layer >= 0 && layer < geometry_.layers, "block_store: layer is ",
                               layer, ", expected 0 to ", geometry_.layers - 1);
    expects<std::out_of_range>(position >= 0 && position < options_.max_blocks,
                               "block_store: block is ", position, ", expected 0 to ",
                               options_.max_blocks - 1);
  }
  void check_length(std::int64_t blocks) const {
    expects<std::out_of_range>(blocks >= 0 && blocks <= options_.max_blocks,
                               "block_store: blocks is ", blocks, ", expected 0 to ",
                               options_.max_blocks);
  }
  [[nodiscard]] std::int32_t checked_writing(host_slot slot) const {
    const std::int32_t index = index_of(slot);
    expects<std::logic_error>(
        index >= 0 && index < catalog_.slots() && catalog_.state_of(index) == slot_state::writing &&
            handle_of(index) == slot,
        "block_store: slot ", index, " is not being written by whom the handle was given to");
    return index;
  }
  /// A slot as it is handed out: the place, and above it which write of it.
  [[nodiscard]] host_slot handle_of(std::int32_t slot) const noexcept {
    return static_cast<host_slot>(
        std::int64_t{static_cast<std::int32_t>(catalog_.writes_of(slot))} << 32 | slot);
  }

  /// A sequence holds a block from here on, and its row of the table says where it is.
  void enter(std::int32_t block, std::int32_t sequence) noexcept {
    const std::int32_t position = catalog_.at(block).position;
    catalog_.hold(block, sequence);
    const auto write = [&](std::int32_t layer, std::int32_t value) {
      entry_of(sequence, layer, position).store(value, std::memory_order_release);
    };
    catalog_.each_slot(block, slot_state::ready,
                       [&](std::int32_t slot, std::int32_t layer) { write(layer, slot); });
    catalog_.each_slot(block, slot_state::writing,
                       [&](std::int32_t, std::int32_t layer) { write(layer, unit_being_written); });
  }
  /// A sequence that nobody reads holds a block no longer.
  void leave(std::int32_t block, std::int32_t sequence) noexcept {
    const std::int32_t position = catalog_.at(block).position;
    for (std::int32_t layer = 0; layer < geometry_.layers; ++layer) {
      entry_of(sequence, layer, position).store(absent_unit, std::memory_order_relaxed);
    }
    catalog_.let_go(block, sequence);
  }

  /// Gives a layer of a block a free slot, to be written; there is one.
  [[nodiscard]] std::int32_t begin_write(std::int32_t sequence, std::int32_t block,
                                         std::int32_t layer) noexcept {
    const std::int32_t slot = free_.take(slot_before(sequence, layer, catalog_.at(block).position));
    catalog_.add_slot(slot, block, layer);
    ++writing_;
    publish(block, layer, unit_being_written);
    return slot;
  }
  void end_write(std::int32_t slot, bool keep, std::uint64_t tag_of_unit) noexcept {
    const std::int32_t block = catalog_.block_of_slot(slot);
    const std::int32_t layer = catalog_.layer_of_slot(slot);
    --writing_;
    const bool is_orphan = catalog_.at(block).is_orphan;
    orphans_ -= is_orphan ? 1 : 0;
    if (is_orphan || !keep) {
      publish(block, layer, absent_unit);
      free_slot(slot);
    } else {
      catalog_.set_state(slot, slot_state::ready);
      ++ready_;
      if (tagger_) tags_[static_cast<std::size_t>(slot)] = tag_of_unit;
      publish(block, layer, slot);
      settle_whole(block, store_event::what::damaged);
    }
    forget_if_empty(block);
  }
  /// What is being written of a block is not wanted any more.
  void abandon(std::int32_t block) noexcept {
    stored_block& b = catalog_.at(block);
    if (std::exchange(b.is_orphan, true)) return;
    orphans_ += b.writing;
  }

  [[nodiscard]] bool has_tags() const noexcept { return static_cast<bool>(tagger_); }
  [[nodiscard]] std::uint64_t tag(const std::byte* unit, std::int32_t block,
                                  std::int32_t layer) const noexcept {
    const stored_block& b = catalog_.at(block);
    return tagger_(unit, static_cast<std::size_t>(unit_bytes_),
                   unit_seed(block, b.generation, layer, b.position));
  }
  [[nodiscard]] std::uint64_t tag_of(std::int32_t slot) const noexcept {
    return tags_[static_cast<std::size_t>(slot)];
  }
  /// A unit is absent from here on; its slot stays with the block, until nobody can be reading it.
  void spoil(std::int32_t slot) noexcept {
    const std::int32_t block = catalog_.block_of_slot(slot);
    publish(block, catalog_.layer_of_slot(slot), absent_unit);
    catalog_.set_state(slot, slot_state::corrupt);
    --ready_;
    ++corrupt_;
    settle_whole(block, store_event::what::damaged);
  }
  void free_spoilt(std::int32_t block) noexcept {
    corrupt_ -= catalog_.at(block).corrupt;
    free_slots(block, slot_state::corrupt);
  }

  /// Gives a block a name, unless another has it.
  /// @param before  the block before it in a sequence, -1 if there is none
  /// @throws std::logic_error  if it has another one; and what `Policy::check` does
  name_outcome name(std::int32_t block, const block_key& key, const retention& stay,
                    std::int32_t before) {
    if constexpr (requires(const Policy& policy, const eviction_entry& e) { policy.check(e); }) {
      std::as_const(policy_).check({.priority = stay.priority, .keep_until = stay.keep_until});
    }
    stored_block& b = catalog_.at(block);
    if (b.has_name) {
      expects<std::logic_error>(index_.key_of(block) == key, "block_store: block ",
                                std::int32_t{b.position}, " has another name already");
    } else {
      const std::int32_t other = index_.insert(key, block, b.is_whole, in_index(before));
      if (other != block) {
        b.namesake = other;
        b.namesake_generation = catalog_.at(other).generation;
        return name_outcome::exists;
      }
      b.has_name = true;
      if (b.is_whole) tell(store_event::what::stored, block);
    }
    b.priority = stay.priority;
    b.keep_until = stay.keep_until;
    return name_outcome::named;
  }

  /// The block by which a block's name finds what it stands for: itself, or the one that had the
  /// name already; -1 if there is none (any more).
  [[nodiscard]] std::int32_t in_index(std::int32_t block) noexcept {
    if (block < 0) return -1;
    if (index_.contains(block)) return block;
    const stored_block& b = catalog_.at(block);
    if (b.namesake < 0 || !index_.contains(b.namesake)) return -1;
    return catalog_.at(b.namesake).generation == b.namesake_generation ? b.namesake : -1;
  }

  /// How many of these blocks stand at positions first, first + 1, ... in their sequences. A
  /// snapshot, beside whoever has the lock.
  [[nodiscard]] std::size_t in_place(std::span<const std::int32_t> blocks,
                                     std::size_t first) const noexcept {
    std::size_t count = 0;
    while (count < blocks.size() &&
           catalog_.at(blocks[count]).position == static_cast<std::int64_t>(first + count)) {
      ++count;
    }
    return count;
  }
  /// A block that only its name kept is used again; the policy may remember that it was.
  void take_up(std::int32_t block) {
    if (!catalog_.at(block).is_cached) return;
    policy_.evict(block);
    leave_policy(block);
  }
  /// What becomes of a block that nobody holds any more: a whole one with a name stays.
  void leave_behind(std::int32_t block, std::int32_t parent) noexcept {
    stored_block& b = catalog_.at(block);
    free_spoilt(block);
    if (b.has_name && b.is_whole) {
      if (is_taken(block, parent)) return;
      tell(store_event::what::evicted, block);
    }
    abandon(block);
    ready_ -= b.ready;
    free_slots(block, slot_state::ready);
    b.has_name = false;
    b.is_whole = false;
    (void)index_.erase_if_named(block);
    forget_if_empty(block);
  }
  /// Forgets a block that has no slots left, for all who hold it.
  void forget_if_empty(std::int32_t block) noexcept {
    if (!catalog_.at(block).is_empty()) return;
    catalog_.each_holder(block, [&](std::int32_t s) { catalog_.let_go(block, s); });
    (void)index_.erase_if_named(block);
    catalog_.forget(block);
  }

  /// How many blocks that only their names keep the policy gives up, one after the other. All their
  /// layers can be read.
  [[nodiscard]] std::int64_t evictable_cached() const {
    if constexpr (requires(const Policy& policy) { policy.evictable(); }) {
      return policy_.evictable();
    } else {
      return cached_;
    }
  }
  static constexpr std::int64_t most_evicted_ahead = 16;
  /// Gives up blocks that only their names keep until so many units are free, or none is left. One
  /// after the other, each would wait for memory several times; so what their books lie in is
  /// fetched for all of them first. @return how many
  std::size_t evict_cached(std::int64_t units) {
    std::int32_t victims[most_evicted_ahead];
    std::size_t count = 0;
    const auto forget_victims = [&] {
      for (std::size_t i = 0; i < count; ++i) {
        forget_cached(victims[i], store_event::what::evicted);
      }
    };
    try {
      for (units -= free_.size(); units > 0 && count < std::size(victims); ++count) {
        const std::int32_t block = next_victim();
        if (block < 0) break;
        policy_.evict(block);
        leave_policy(block);
        index_.prefetch(block);
        victims[count] = block;
        units -= catalog_.at(block).ready;
      }
    } catch (...) {
      forget_victims();  // it knows of them no longer
      throw;
    }
    forget_victims();
    return count;
  }
  /// Forgets all blocks that only their names keep, in the policy's order, then those that it never
  /// gives up.
  std::int32_t clear() {
    std::int32_t cleared = 0;
    const auto forget = [&](std::int32_t block) {
      policy_.erase(block);
      leave_policy(block);
      forget_cached(block, store_event::what::cleared);
      ++cleared;
    };
    for (std::int32_t next = next_victim(); next >= 0; next = next_victim()) forget(next);
    for (std::int32_t block = 0; block < options_.max_stored_blocks; ++block) {
      if (catalog_.at(block).is_cached) forget(block);
    }
    return cleared;
  }
  /// Gives up a block that nobody reads, or its highest layer. It may be empty then.
  void give_up(std::int32_t block, bool all_layers) noexcept {
    std::int32_t highest = -1;
    catalog_.each_slot(block, slot_state::ready, [&](std::int32_t, std::int32_t layer) {
      highest = std::max(highest, layer);
    });
    catalog_.each_slot(block, slot_state::ready, [&](std::int32_t slot, std::int32_t layer) {
      if (!all_layers && layer != highest) return;
      publish(block, layer, absent_unit);
      free_slot(slot);
      --ready_;
    });
    settle_whole(block, store_event::what::evicted);
  }

 private:
  /// Readers, kernels among them, load entries without the lock.
  [[nodiscard]] std::atomic_ref<std::int32_t> entry_of(std::int32_t sequence, std::int32_t layer,
                                                       std::int32_t position) const noexcept {
    return std::atomic_ref<std::int32_t>(table_[table_index(sequence, layer, position)]);
  }
  /// Writes an entry for all who hold a block. Readers load the slot without the lock: its bytes
  /// and their tag come before it.
  void publish(std::int32_t block, std::int32_t layer, std::int32_t value) noexcept {
    const std::int32_t position = catalog_.at(block).position;
    catalog_.each_holder(block, [&](std::int32_t sequence) {
      entry_of(sequence, layer, position).store(value, std::memory_order_release);
    });
  }
  /// The slot of the unit before one, also while it is written; -1 if there is none.
  [[nodiscard]] std::int32_t slot_before(std::int32_t sequence, std::int32_t layer,
                                         std::int32_t position) const noexcept {
    const std::int32_t before = position > 0 ? catalog_.block_of(sequence, position - 1) : -1;
    return before < 0 ? -1 : catalog_.slot_of(before, layer);
  }
  /// Gives a block that only its name keeps to the policy. False if that throws: there is nobody who
  /// could be told.
  [[nodiscard]] bool is_taken(std::int32_t block, std::int32_t parent) noexcept {
    stored_block& b = catalog_.at(block);
    try {
      policy_.insert(block, {.key = index_.key_of(block).low | 1,
                             .parent = parent,
                             .priority = b.priority,
                             .keep_until = b.keep_until});
    } catch (...) {
      return false;
    }
    b.is_cached = true;
    ++cached_;
    return true;
  }
  void leave_policy(std::int32_t block) noexcept {
    catalog_.at(block).is_cached = false;
    --cached_;
  }
  /// What the policy gives up next, -1 if there is nothing. One that names a block that it does not
  /// have would give up units that others read.
  [[nodiscard]] std::int32_t next_victim() {
    const std::int32_t block = policy_.victim([](std::int32_t) { return true; });
    expects<std::logic_error>(
        block < 0 || (block < options_.max_stored_blocks && catalog_.at(block).is_cached),
        "block_store: the policy gives up block ", block, ", which it does not have");
    return block;
  }
  void free_slot(std::int32_t slot) noexcept {
    catalog_.remove_slot(slot);
    if (options_.zero_freed) {
      std::memset(address(slot), 0, static_cast<std::size_t>(unit_bytes_));
    }
    free_.give(slot);
  }
  void free_slots(std::int32_t block, slot_state state) noexcept {
    catalog_.each_slot(block, state, [this](std::int32_t slot, std::int32_t) { free_slot(slot); });
  }
  /// A block is whole when all its layers can be read; only then it is found by its name.
  void settle_whole(std::int32_t block, store_event::what otherwise) noexcept {
    stored_block& b = catalog_.at(block);
    const bool now = b.ready == geometry_.layers;
    if (std::exchange(b.is_whole, now) == now || !b.has_name) return;
    index_.set_ready_if_named(block, now);
    tell(now ? store_event::what::stored : otherwise, block);
  }
  /// Frees a block that only its name kept, and that the policy has let go.
  void forget_cached(std::int32_t block, store_event::what why) noexcept {
    ready_ -= catalog_.at(block).ready;
    free_slots(block, slot_state::ready);
    settle_whole(block, why);
    forget_if_empty(block);
  }
  void tell(store_event::what kind, std::int32_t block) noexcept {
    events_.tell({kind, index_.key_of(block)});
  }

  kv_geometry geometry_;
  block_store_options options_;
  std::int64_t unit_bytes_;
  std::int32_t* table_;  ///< [sequences, layers, blocks] slots
  std::byte* payload_;
  tagger tagger_;
  // What lookups read stands above, what every change writes below, in lines of their own.
  alignas(64) slot_extents free_;
  store_catalog catalog_;
  prefix_index index_;               ///< name -> block, ready if it is whole
  Policy policy_;                    ///< over blocks that nobody holds
  std::vector<std::uint64_t> tags_;  ///< [capacity] of ready units, or empty
  store_events events_;
  std::int64_t cached_ = 0;  ///< blocks that only their names keep
  std::int64_t ready_ = 0;   ///< slots by state, whoever holds them
  std::int64_t writing_ = 0;
  std::int64_t orphans_ = 0;  ///< of those being written, the ones that nobody waits for
  std::int64_t corrupt_ = 0;
};

}  // namespace pulseinfer::detail
