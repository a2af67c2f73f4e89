// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a block store knows of its sequences, blocks and slots, and what it does with them under
/// its lock: sharing, eviction, counts.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/sequence_gate.hpp"
#include "pulseinfer/detail/slot_extents.hpp"
#include "pulseinfer/detail/store_catalog.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/integrity.hpp"
#include "pulseinfer/prefix_index.hpp"
#include "pulseinfer/store_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// The base of a block store, without its memory and its lock.
///
/// @par Threads  one at a time, under the store's lock; the exceptions say so
template <class Policy>
class store_books {
 protected:
  /// @param options  checked
  /// @param table    [sequences, layers, blocks], all is absent from here on
  /// @param payload  [capacity_units, unit_bytes]
  store_books(const kv_geometry& geometry, const block_store_options& options, std::int32_t* table,
              std::byte* payload)
      : geometry_(geometry),
        options_(options),
        unit_bytes_(geometry.unit_bytes()),
        rows_(table),
        payload_bytes_(payload),
        tagger_(options.integrity, options.checksum),
        free_(static_cast<std::int32_t>(options_.capacity_bytes / unit_bytes_)),
        catalog_(free_.size(), options_.max_stored_blocks, options_.max_sequences,
                 options_.max_blocks),
        index_(options_.max_stored_blocks),
        policy_(options_.max_stored_blocks),
        sequences_(static_cast<std::size_t>(options_.max_sequences)) {
    std::fill_n(rows_, table_index(options_.max_sequences, 0, 0), absent);
    if (tagger_) tags_.assign(static_cast<std::size_t>(free_.size()), 0);
    events_.reserve(static_cast<std::size_t>(options_.max_events));
    free_sequences_.reserve(sequences_.size());
    for (std::int32_t i = options_.max_sequences; i > 0; --i) free_sequences_.push_back(i - 1);
  }
  // Values of the table that are no slot.
  static constexpr std::int32_t absent = -1;
  static constexpr std::int32_t being_written = -2;

  struct alignas(64) sequence_state {
    sequence_gate gate;
    std::atomic<std::uint64_t> last_use{0};
    // Under the lock:
    std::int32_t length = 0;  ///< behind it there is no block
    bool is_closing = false;  ///< closed, and still read
    bool is_held = false;     ///< by a hold, which has a lease in the gate
    std::int64_t deadline = 0;
  };

  [[nodiscard]] sequence_state& at(std::int32_t index) noexcept {
    return sequences_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] const sequence_state& at(std::int32_t index) const noexcept {
    return sequences_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] std::byte* address(std::int32_t slot) const noexcept {
    return payload_bytes_ + std::int64_t{slot} * unit_bytes_;
  }
  [[nodiscard]] std::size_t table_index(std::int32_t sequence, std::int32_t layer,
                                        std::int32_t block) const noexcept {
    return (static_cast<std::size_t>(sequence) * static_cast<std::size_t>(geometry_.layers) +
            static_cast<std::size_t>(layer)) *
               static_cast<std::size_t>(options_.max_blocks) +
           static_cast<std::size_t>(block);
  }
  /// Readers, kernels among them, load entries without the lock.
  [[nodiscard]] std::atomic_ref<std::int32_t> entry_of(std::int32_t sequence, std::int32_t layer,
                                                       std::int32_t block) const noexcept {
    return std::atomic_ref<std::int32_t>(rows_[table_index(sequence, layer, block)]);
  }
  /// Writes an entry for all who hold a block. Readers load the slot without the lock: its bytes
  /// and their tag come before it.
  void publish(std::int32_t block, std::int32_t layer, std::int32_t value) noexcept {
    const std::int32_t position = catalog_.at(block).position;
    catalog_.each_holder(block, [&](std::int32_t sequence) {
      entry_of(sequence, layer, position).store(value, std::memory_order_release);
    });
  }

  void check_unit(std::int32_t layer, std::int32_t block) const {
    expects<std::out_of_range>(layer >= 0 && layer < geometry_.layers, "block_store: layer is ",
                               layer, ", expected 0 to ", geometry_.layers - 1);
    expects<std::out_of_range>(block >= 0 && block < options_.max_blocks, "block_store: block is ",
                               block, ", expected 0 to ", options_.max_blocks - 1);
  }
  void check_length(std::int32_t blocks) const {
    expects<std::out_of_range>(blocks >= 0 && blocks <= options_.max_blocks,
                               "block_store: blocks is ", blocks, ", expected 0 to ",
                               options_.max_blocks);
  }
  [[noreturn]] static void refuse_stale(sequence_id id) {
    expects(false, "block_store: sequence (", id.index, ", generation ", id.generation,
            ") is stale or unknown");
    std::abort();
  }
  void check_sequence(sequence_id id) const {
    if (id.index < 0 || id.index >= options_.max_sequences ||
        !at(id.index).gate.is_open(id.generation)) {
      refuse_stale(id);
    }
  }
  [[nodiscard]] std::int32_t checked_writing(host_slot slot) const {
    const auto index = static_cast<std::int32_t>(slot);
    expects<std::logic_error>(
        index >= 0 && index < catalog_.slots() && catalog_.state_of(index) == slot_state::writing,
        "block_store: slot ", index, " is not being written");
    return index;
  }

  /// The slot of the unit before one, also while it is written; -1 if there is none.
  [[nodiscard]] std::int32_t slot_before(std::int32_t sequence, std::int32_t layer,
                                         std::int32_t block) const noexcept {
    const std::int32_t before = block > 0 ? catalog_.block_of(sequence, block - 1) : -1;
    return before < 0 ? -1 : catalog_.slot_of(before, layer);
  }
  void touch(std::int32_t index) noexcept {
    at(index).last_use.store(clock_.fetch_add(1, std::memory_order_relaxed) + 1,
                             std::memory_order_relaxed);
  }
  [[nodiscard]] bool is_whole(std::int32_t block) const noexcept {
    return catalog_.at(block).is_whole;
  }
  void tell(store_event::what kind, std::int32_t block) noexcept {
    if (events_.size() == static_cast<std::size_t>(options_.max_events)) {
      lost_events_ += options_.max_events > 0 ? 1 : 0;
    } else {
      events_.push_back({kind, index_.key_of(block)});
    }
  }

  [[nodiscard]] std::optional<sequence_id> open_under_lock() {
    if (free_sequences_.empty()) return std::nullopt;
    const std::int32_t index = free_sequences_.back();
    free_sequences_.pop_back();
    at(index).gate.open();
    touch(index);
    return sequence_id{index, at(index).gate.generation()};
  }
  /// A sequence holds a block from here on, and its row of the table says where it is.
  void join(std::int32_t block, std::int32_t sequence) noexcept {
    const std::int32_t position = catalog_.at(block).position;
    catalog_.hold(block, sequence);
    at(sequence).length = std::max(at(sequence).length, position + 1);
    const auto enter = [&](std::int32_t layer, std::int32_t value) {
      entry_of(sequence, layer, position).store(value, std::memory_order_release);
    };
    catalog_.each_slot(block, slot_state::ready,
                       [&](std::int32_t slot, std::int32_t layer) { enter(layer, slot); });
    catalog_.each_slot(block, slot_state::writing,
                       [&](std::int32_t, std::int32_t layer) { enter(layer, being_written); });
    // Its leases keep damaged slots from those who free them.
    if (catalog_.at(block).corrupt > 0) at(sequence).gate.call_for_attention();
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
  /// Forgets a block that has no slots left, for all who hold it.
  void forget_if_empty(std::int32_t block) noexcept {
    if (!catalog_.at(block).is_empty()) return;
    catalog_.each_holder(block, [&](std::int32_t s) { catalog_.let_go(block, s); });
    (void)index_.erase_if_named(block);
    catalog_.forget(block);
  }
  /// Frees a block that only its name kept, and that the policy has let go.
  void forget_cached(std::int32_t block, store_event::what why) noexcept {
    catalog_.at(block).is_cached = false;
    ready_ -= catalog_.at(block).ready;
    free_slots(block, slot_state::ready);
    settle_whole(block, why);
    forget_if_empty(block);
  }

  static constexpr std::int64_t most_evicted_ahead = 16;
  /// Gives up blocks that only their names keep until so many units are free, or none is left.
  /// One after the other, each would wait for memory several times; so what their books lie in is
  /// fetched for all of them first.
  void evict_cached(std::int64_t units) {
    std::int32_t victims[most_evicted_ahead];
    std::size_t count = 0;
    for (units -= free_.size(); units > 0 && count < std::size(victims); ++count) {
      const std::int32_t block = policy_.victim([](std::int32_t) { return true; });
      if (block < 0) break;
      policy_.evict(block);
      index_.prefetch(block);
      victims[count] = block;
      units -= catalog_.at(block).ready;
    }
    for (std::size_t i = 0; i < count; ++i) {
      forget_cached(victims[i], store_event::what::evicted);
    }
  }
  /// Makes room for a unit: a block that only its name keeps, or the end of a sequence. False if
  /// there is neither, and then nothing has changed.
  /// @param needs_record  the unit's block is new and all records are taken: what goes is a block
  ///                      of which nothing is left
  [[nodiscard]] bool evict_one(std::int32_t writer, bool needs_record) {
    const std::int32_t block = policy_.victim([](std::int32_t) { return true; });
    if (block >= 0) {
      policy_.evict(block);
      forget_cached(block, store_event::what::evicted);
      return true;
    }
    // A lease may be taken at any time: then somebody else is looked for.
    for (;;) {
      const std::int32_t end = least_recent_end(writer, needs_record);
      if (end < 0) return false;
      if (evict_end(end, needs_record)) return true;
    }
  }
  /// What the sequence gives up that has not been used for longest; -1 if there is none.
  [[nodiscard]] std::int32_t least_recent_end(std::int32_t writer, bool needs_record) noexcept {
    std::int32_t found = -1;
    std::uint64_t least = 0;
    for (std::int32_t i = 0; i < options_.max_sequences; ++i) {
      if (i == writer || !at(i).gate.is_open() || at(i).gate.leases() > 0) continue;
      const std::uint64_t used = at(i).last_use.load(std::memory_order_relaxed);
      if (found >= 0 && used >= least) continue;
      const std::int32_t end = evictable_end(i, writer);
      if (end < 0 || (needs_record && !catalog_.at(end).is_ready_only())) continue;
      found = end;
      least = used;
    }
    return found;
  }
  /// The last block of a sequence of which something can be read; -1 if there is none.
  [[nodiscard]] std::int32_t last_ready(std::int32_t sequence) noexcept {
    std::int32_t& length = at(sequence).length;
    while (length > 0 && catalog_.block_of(sequence, length - 1) < 0) --length;
    for (std::int32_t position = length - 1; position >= 0; --position) {
      const std::int32_t block = catalog_.block_of(sequence, position);
      if (block >= 0 && catalog_.at(block).ready > 0) return block;
    }
    return -1;
  }
  /// That block if it may be given up: nobody who holds it writes or is read, and none has a later
  /// one.
  [[nodiscard]] std::int32_t evictable_end(std::int32_t sequence, std::int32_t writer) noexcept {
    const std::int32_t block = last_ready(sequence);
    if (block < 0) return -1;
    const bool may_go = catalog_.all_holders(block, [&](std::int32_t s) {
      return s != writer && at(s).gate.leases() == 0 && (s == sequence || last_ready(s) == block);
    });
    return may_go ? block : -1;
  }
  /// Gives up a block, or its highest layer, under all who hold it. False if somebody has taken a
  /// lease meanwhile.
  [[nodiscard]] bool evict_end(std::int32_t block, bool all_layers) noexcept {
    all_layers = all_layers || options_.scope == eviction_scope::block;
    std::int32_t locked = 0;
    const bool is_alone = catalog_.all_holders(block, [&](std::int32_t s) {
      const bool is_locked = at(s).gate.try_lock();
      locked += is_locked ? 1 : 0;
      return is_locked;
    });
    const auto unlock = [&] {
      catalog_.each_holder(block, [&](std::int32_t s) {
        if (locked-- > 0) at(s).gate.unlock();
      });
    };
    if (!is_alone) {
      unlock();
      return false;
    }
    std::int32_t highest = -1;
    catalog_.each_slot(block, slot_state::ready, [&](std::int32_t, std::int32_t layer) {
      highest = std::max(highest, layer);
    });
    catalog_.each_slot(block, slot_state::ready, [&](std::int32_t slot, std::int32_t layer) {
      if (!all_layers && layer != highest) return;
      publish(block, layer, absent);
      free_slot(slot);
      --ready_;
    });
    settle_whole(block, store_event::what::evicted);
    unlock();
    forget_if_empty(block);
    return true;
  }

  [[nodiscard]] std::uint64_t tag(const std::byte* unit, std::int32_t block,
                                  std::int32_t layer) const noexcept {
    const stored_block& b = catalog_.at(block);
    return tagger_(unit, static_cast<std::size_t>(unit_bytes_),
                   unit_seed(block, b.generation, layer, b.position));
  }
  /// After the last lease: nobody reads the damaged slots that no other reader of the block could.
  void free_corrupt_units(std::int32_t index) noexcept {
    bool are_left = false;
    for (std::int32_t position = 0; position < at(index).length; ++position) {
      const std::int32_t block = catalog_.block_of(index, position);
      if (block < 0 || catalog_.at(block).corrupt == 0) continue;
      if (!catalog_.all_holders(block,
                                [this](std::int32_t s) { return at(s).gate.leases() == 0; })) {
        are_left = true;  // another is leased: the last of all does it, and that may be this one
        continue;
      }
      corrupt_ -= catalog_.at(block).corrupt;
      free_slots(block, slot_state::corrupt);
      forget_if_empty(block);
    }
    if (!are_left) at(index).gate.end_attention();
  }

  /// What was put off until nobody reads a sequence.
  void settle(std::int32_t index) noexcept {
    sequence_state& s = at(index);
    if (s.gate.leases() > 0) return;
    if (s.gate.wants_attention()) free_corrupt_units(index);
    if (s.is_closing) finish_closing(index);
  }
  void end_hold_under_lock(std::int32_t index) noexcept {
    at(index).is_held = false;
    touch(index);
    if (at(index).gate.release().is_any) settle(index);
  }

  void finish_closing(std::int32_t index) noexcept {
    if (at(index).gate.wants_attention()) free_corrupt_units(index);
    let_go_from(index, 0);
    at(index).gate.end_attention();
    at(index).is_closing = false;
    free_sequences_.push_back(index);
  }
  /// A sequence that nobody reads lets its blocks go, the last one first: what they leave to the
  /// policy is given up in that order.
  void let_go_from(std::int32_t index, std::int32_t first) noexcept {
    for (std::int32_t position = at(index).length - 1; position >= first; --position) {
      const std::int32_t block = catalog_.block_of(index, position);
      if (block < 0) continue;
      for (std::int32_t layer = 0; layer < geometry_.layers; ++layer) {
        entry_of(index, layer, position).store(absent, std::memory_order_relaxed);
      }
      catalog_.let_go(block, index);
      if (catalog_.at(block).first_holder >= 0) {
        (void)abandon_if_closed(block);
        continue;
      }
      leave_behind(block, position > 0 ? catalog_.block_of(index, position - 1) : -1);
    }
    at(index).length = std::min(at(index).length, first);
  }
  /// If all who hold a block are closed, what is being written of it is not wanted any more.
  /// @return whether something is
  bool abandon_if_closed(std::int32_t block) noexcept {
    stored_block& b = catalog_.at(block);
    if (b.writing == 0) return false;
    if (!b.is_orphan &&
        catalog_.all_holders(block, [this](std::int32_t s) { return !at(s).gate.is_open(); })) {
      b.is_orphan = true;
      orphans_ += b.writing;
    }
    return b.is_orphan;
  }
  /// What becomes of a block when the last who held it is gone.
  void leave_behind(std::int32_t block, std::int32_t parent) noexcept {
    stored_block& b = catalog_.at(block);
    corrupt_ -= b.corrupt;
    free_slots(block, slot_state::corrupt);
    if (b.has_name && is_whole(block)) {
      b.is_cached = true;
      policy_.insert(block, {.key = index_.key_of(block).low | 1,
                             .parent = parent,
                             .priority = b.priority,
                             .keep_until = b.keep_until});
      return;
    }
    (void)abandon_if_closed(block);
    ready_ -= b.ready;
    free_slots(block, slot_state::ready);
    b.has_name = false;
    (void)index_.erase_if_named(block);
    b.is_whole = false;
    forget_if_empty(block);
  }

  [[nodiscard]] store_counts counts_under_lock() const {
    ++mark_;
    const std::int64_t pinned = ready_of_leased(true);
    const std::int64_t unheld = ready_of_leased(false);
    return {.free = free_.size(),
            .writing = writing_ - orphans_,
            .evictable = ready_ - pinned - unheld,
            .pinned = pinned,
            .quarantined = orphans_ + corrupt_ + unheld,
            .capacity = catalog_.slots()};
  }
  /// Units that can be read of the blocks of sequences with leases, each block once: of those that
  /// are open, or of the rest.
  [[nodiscard]] std::int64_t ready_of_leased(bool open) const {
    std::int64_t units = 0;
    for (std::int32_t i = 0; i < options_.max_sequences; ++i) {
      const sequence_state& s = at(i);
      if (s.gate.leases() == 0 || s.gate.is_open() != open) continue;
      for (std::int32_t position = 0; position < s.length; ++position) {
        const std::int32_t block = catalog_.block_of(i, position);
        if (block < 0 || catalog_.at(block).seen == mark_) continue;
        catalog_.at(block).seen = mark_;
        units += catalog_.at(block).ready;
      }
    }
    return units;
  }

  kv_geometry geometry_;
  block_store_options options_;
  std::int64_t unit_bytes_;
  std::int32_t* rows_;  ///< [sequences, layers, blocks] slots
  std::byte* payload_bytes_;
  tagger tagger_;
  // What lookups read stands above, what every change writes below, in lines of their own.
  alignas(64) std::atomic<std::uint64_t> clock_{0};  ///< uses so far
  alignas(64) slot_extents free_;
  mutable store_catalog catalog_;
  prefix_index index_;  ///< name -> block, ready if it is whole
  Policy policy_;       ///< over blocks that nobody holds
  std::vector<sequence_state> sequences_;
  std::vector<std::int32_t> free_sequences_;
  std::vector<std::uint64_t> tags_;  ///< [capacity] of ready units, or empty
  std::vector<store_event> events_;
  std::int64_t lost_events_ = 0;
  std::int64_t ready_ = 0;  ///< slots by state, whoever holds them
  std::int64_t writing_ = 0;
  std::int64_t orphans_ = 0;  ///< of those being written, the ones that nobody waits for
  std::int64_t corrupt_ = 0;
  mutable std::uint32_t mark_ = 0;
};

}  // namespace pulseinfer::detail
