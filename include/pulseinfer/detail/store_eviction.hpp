// SPDX-License-Identifier: Apache-2.0
/// @file
/// How a store that is full makes room: what only names keep goes first, then the ends of
/// sequences, in the order of their last use.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/sequence_gate.hpp"
#include "pulseinfer/detail/store_blocks.hpp"
#include "pulseinfer/store_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// A sequence of a store.
struct alignas(64) sequence_state {
  sequence_gate gate;
  std::atomic<std::uint64_t> last_use{0};
  // Under the lock:
  std::int32_t length = 0;  ///< behind it there is no block
  bool is_closing = false;  ///< closed, and still read
  bool is_held = false;     ///< by a hold, which has a lease in the gate
  std::int32_t kept = -1;   ///< blocks that are left when what is planned is given up; or -1
  std::int64_t deadline = 0;
};

/// What a request needs.
struct store_room {
  std::int64_t units = 0;
  std::int64_t records = 0;
  [[nodiscard]] bool is_any() const noexcept { return units > 0 || records > 0; }
};

/// Gives up units of the blocks of a store, and never one that somebody reads.
///
/// @par Threads  one at a time, under the store's lock
template <class Policy>
class store_eviction {
 public:
  /// @param blocks     outlives it
  /// @param sequences  that hold them; outlives it
  store_eviction(store_blocks<Policy>& blocks, std::vector<sequence_state>& sequences)
      : blocks_(blocks), sequences_(sequences) {
    planned_.reserve(static_cast<std::size_t>(blocks.options().max_stored_blocks));
  }

  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(planned_.capacity() * sizeof(std::int32_t));
  }

  /// Makes room for a unit: a block that only its name keeps, or the end of a sequence. False if
  /// there is neither, and then nothing has changed.
  /// @param needs_record  the unit's block is new and all records are taken: what goes is a block
  ///                      of which nothing is left
  [[nodiscard]] bool make_room_for_one(std::int32_t writer, bool needs_record) {
    if (blocks_.evict_cached(blocks_.free_units() + 1) > 0) return true;
    // A lease may be taken at any time: then somebody else is looked for.
    for (;;) {
      const std::int32_t end = least_recent_end(writer, needs_record);
      if (end < 0) return false;
      if (evict_end(end, needs_record)) return true;
    }
  }
  /// Makes room for all of a request, whole blocks at a time. False if that cannot be, and then
  /// nothing has changed.
  [[nodiscard]] bool make_room(std::int32_t writer, const store_room& wanted) {
    const std::int64_t cached = blocks_.evictable_cached();
    const store_room missing{
        .units = wanted.units - blocks_.free_units() - cached * blocks_.geometry().layers,
        .records = wanted.records - catalog().free_blocks() - cached};
    // Whatever becomes of it, also if the policy throws, leases wait no longer.
    const struct planned {
      store_eviction& of;
      ~planned() { of.forget_plan(); }
    } guard{*this};
    if (!plan(writer, missing)) return false;
    const auto is_short = [&] {
      return wanted.units > blocks_.free_units() || wanted.records > catalog().free_blocks();
    };
    while (is_short()) {
      const std::int64_t next = blocks_.free_units() + 1;
      if (blocks_.evict_cached(std::max(wanted.units, next)) == 0) break;
    }
    // Ends are planned beyond all that the policy gives. One that gives less than it says costs
    // blocks that only their names kept, and nobody else's.
    if (planned_.empty()) return !is_short();
    if (blocks_.evictable_cached() != 0) return false;
    for (const std::int32_t block : planned_) {
      blocks_.give_up(block, true);
      blocks_.forget_if_empty(block);
    }
    return true;
  }

 private:
  [[nodiscard]] std::int32_t count() const noexcept {
    return static_cast<std::int32_t>(sequences_.size());
  }
  [[nodiscard]] sequence_state& at(std::int32_t index) noexcept {
    return sequences_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] store_catalog& catalog() noexcept { return blocks_.catalog(); }

  /// What the sequence gives up that has not been used for longest; -1 if there is none.
  [[nodiscard]] std::int32_t least_recent_end(std::int32_t writer, bool needs_record) noexcept {
    std::int32_t found = -1;
    std::uint64_t least = 0;
    for (std::int32_t i = 0; i < count(); ++i) {
      if (i == writer || !at(i).gate.is_open() || at(i).gate.leases() > 0) continue;
      const std::uint64_t used = at(i).last_use.load(std::memory_order_relaxed);
      if (found >= 0 && used >= least) continue;
      const std::int32_t end = evictable_end(i, writer);
      if (end < 0 || (needs_record && !catalog().at(end).is_ready_only())) continue;
      found = end;
      least = used;
    }
    return found;
  }
  /// The last block of a sequence of which something can be read; -1 if there is none.
  [[nodiscard]] std::int32_t last_ready(std::int32_t index) noexcept {
    std::int32_t& length = at(index).length;
    while (length > 0 && catalog().block_of(index, length - 1) < 0) --length;
    const std::int32_t end = at(index).kept >= 0 ? at(index).kept : length;
    for (std::int32_t position = end - 1; position >= 0; --position) {
      const std::int32_t block = catalog().block_of(index, position);
      if (block >= 0 && catalog().at(block).ready > 0) return block;
    }
    return -1;
  }
  /// That block if it may be given up: nobody who holds it writes or is read, and none has a later
  /// one.
  [[nodiscard]] std::int32_t evictable_end(std::int32_t index, std::int32_t writer) noexcept {
    const std::int32_t block = last_ready(index);
    if (block < 0) return -1;
    const bool may_go = catalog().all_holders(block, [&](std::int32_t s) {
      return s != writer && at(s).gate.leases() == 0 && (s == index || last_ready(s) == block);
    });
    return may_go ? block : -1;
  }
  /// Gives up a block, or its highest layer, under all who hold it. False if somebody has taken a
  /// lease meanwhile.
  [[nodiscard]] bool evict_end(std::int32_t block, bool all_layers) noexcept {
    std::int32_t locked = 0;
    const bool is_alone = catalog().all_holders(block, [&](std::int32_t s) {
      const bool is_locked = at(s).gate.try_lock();
      locked += is_locked ? 1 : 0;
      return is_locked;
    });
    if (is_alone) {
      blocks_.give_up(block, all_layers || blocks_.options().scope == eviction_scope::block);
    }
    catalog().each_holder(block, [&](std::int32_t s) {
      if (locked-- > 0) at(s).gate.unlock();
    });
    if (is_alone) blocks_.forget_if_empty(block);
    return is_alone;
  }

  /// Picks ends of sequences that make so much room, and keeps leases away from them, both until
  /// `forget_plan`. False if there are not enough.
  [[nodiscard]] bool plan(std::int32_t writer, store_room missing) noexcept {
    while (missing.is_any()) {
      const std::int32_t end = least_recent_end(writer, missing.records > 0);
      if (end < 0) return false;
      if (!lock_planned(end)) continue;  // somebody has taken a lease meanwhile
      planned_.push_back(end);
      missing.units -= catalog().at(end).ready;
      missing.records -= catalog().at(end).is_ready_only() ? 1 : 0;
    }
    return true;
  }
  [[nodiscard]] bool lock_planned(std::int32_t block) noexcept {
    const std::int32_t position = catalog().at(block).position;
    const bool are_alone = catalog().all_holders(
        block, [this](std::int32_t s) { return at(s).kept >= 0 || at(s).gate.try_lock(); });
    catalog().each_holder(block, [&](std::int32_t s) {
      if (are_alone) {
        at(s).kept = position;
      } else if (at(s).kept < 0) {
        at(s).gate.unlock();  // also of those that it was not tried for: nobody else locks
      }
    });
    return are_alone;
  }
  void forget_plan() noexcept {
    for (std::int32_t i = 0; !planned_.empty() && i < count(); ++i) {
      if (std::exchange(at(i).kept, -1) >= 0) at(i).gate.unlock();
    }
    planned_.clear();
  }

  store_blocks<Policy>& blocks_;
  std::vector<sequence_state>& sequences_;
  std::vector<std::int32_t> planned_;  ///< blocks that are given up next
};

}  // namespace pulseinfer::detail
