// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a block store knows of its sequences: which blocks they share, who keeps them from being
/// given up, and which of them gives up its end.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/sequence_gate.hpp"
#include "pulseinfer/detail/store_blocks.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/store_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Sequences over the blocks of a store: a block store without its memory and its lock.
///
/// @par Threads  one at a time, under the store's lock, but `acquire`, `release` and `touch`
template <class Policy>
class store_sequences {
 public:
  store_sequences(const kv_geometry& geometry, const block_store_options& options,
                  std::int32_t* table, std::byte* payload)
      : blocks_(geometry, options, table, payload),
        sequences_(static_cast<std::size_t>(options.max_sequences)) {
    free_.reserve(sequences_.size());
    for (std::int32_t i = options.max_sequences; i > 0; --i) free_.push_back(i - 1);
  }

  [[nodiscard]] store_blocks<Policy>& blocks() noexcept { return blocks_; }
  [[nodiscard]] const store_blocks<Policy>& blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(sequences_.size() * sizeof(sequence_state) +
                                     free_.capacity() * sizeof(std::int32_t)) +
           blocks_.bytes();
  }

  /// @throws std::invalid_argument  on a stale handle
  void check(sequence_id id) const {
    if (!is_known(id) || !at(id.index).gate.is_open(id.generation)) refuse_stale(id);
  }
  /// Takes a lease. @throws as check
  void acquire(sequence_id id) {
    if (!is_known(id) || !at(id.index).gate.acquire(id.generation)) refuse_stale(id);
  }
  /// Gives a lease back, which is a use. @return what is to be done under the lock, by `settle`
  [[nodiscard]] sequence_gate::rest release(std::int32_t index) noexcept {
    touch(index);
    return at(index).gate.release();
  }
  /// Does what was put off until nobody reads a sequence, if it is still the one that it was.
  void settle(std::int32_t index, std::uint32_t generation) noexcept {
    if (at(index).gate.generation() == generation) settle(index);
  }
  void touch(std::int32_t index) noexcept {
    at(index).last_use.store(clock_.fetch_add(1, std::memory_order_relaxed) + 1,
                             std::memory_order_relaxed);
  }

  [[nodiscard]] std::optional<sequence_id> open() {
    if (free_.empty()) return std::nullopt;
    const std::int32_t index = free_.back();
    free_.pop_back();
    at(index).gate.open();
    touch(index);
    return sequence_id{index, at(index).gate.generation()};
  }
  /// Lets a sequence begin with the blocks of a prompt that are there as a whole, and holds it.
  /// @return how many blocks
  [[nodiscard]] std::int32_t adopt(sequence_id id, std::span<const block_key> prompt,
                                   std::int64_t deadline) {
    const std::size_t most =
        std::min(prompt.size(), static_cast<std::size_t>(blocks_.options().max_blocks));
    std::int32_t count = 0;
    for (; static_cast<std::size_t>(count) < most; ++count) {
      const std::int32_t block = blocks_.index().find(prompt[static_cast<std::size_t>(count)]);
      if (block < 0 || !catalog().at(block).is_whole || catalog().at(block).position != count) {
        break;
      }
      blocks_.take_up(block);
      join(block, id.index);
    }
    sequence_state& s = at(id.index);
    (void)s.gate.acquire(id.generation);
    s.is_held = true;
    s.deadline = deadline;
    return count;
  }
  /// Lets a sequence begin with what another one has of its first blocks.
  void share(sequence_id parent, sequence_id child, std::int32_t blocks) {
    for (std::int32_t position = 0; position < std::min(blocks, at(parent.index).length);
         ++position) {
      const std::int32_t block = catalog().block_of(parent.index, position);
      if (block >= 0) join(block, child.index);
    }
    touch(parent.index);
  }
  trim_outcome trim(std::int32_t index, std::int32_t blocks) noexcept {
    if (!at(index).gate.try_lock()) return trim_outcome::leased;
    let_go_from(index, blocks);
    at(index).gate.unlock();
    return trim_outcome::trimmed;
  }
  close_outcome close(std::int32_t index) noexcept {
    sequence_state& s = at(index);
    s.gate.close();
    bool is_written = false;
    for (std::int32_t position = 0; position < s.length; ++position) {
      const std::int32_t block = catalog().block_of(index, position);
      is_written = (block >= 0 && abandon_if_closed(block)) || is_written;
    }
    if (std::exchange(s.is_held, false)) (void)s.gate.release();
    s.is_closing = true;
    const bool is_read = s.gate.leases() > 0;
    if (!is_read) finish_closing(index);
    return is_read || is_written ? close_outcome::deferred : close_outcome::closed;
  }

  reservation reserve(std::int32_t index, std::int32_t layer, std::int32_t position) {
    switch (blocks_.entry(index, layer, position)) {
      case absent_unit:
        break;
      case unit_being_written:
        return {.outcome = reserve_outcome::writing};
      default:
        return {.outcome = reserve_outcome::exists};
    }
    std::int32_t block = catalog().block_of(index, position);
    // One eviction is enough for both, so that one that fails has given nothing up.
    const bool needs_record = block < 0 && !catalog().has_free_block();
    if ((blocks_.free_units() == 0 || needs_record) && !evict_one(index, needs_record)) {
      return {.outcome = reserve_outcome::full};
    }
    if (block < 0) {
      block = catalog().make(position);
      join(block, index);
    }
    const std::int32_t slot = blocks_.begin_write(index, block, layer);
    return {.outcome = reserve_outcome::reserved,
            .slot = static_cast<host_slot>(slot),
            .bytes = blocks_.address(slot)};
  }

  /// Looks at a unit's bytes, and takes it out if they are not those that were committed. Under the
  /// lock, so that a unit written anew meanwhile is judged by its own bytes.
  bool drop_if_corrupt(std::int32_t index, std::int32_t layer, std::int32_t position) noexcept {
    const std::int32_t slot = blocks_.entry(index, layer, position);
    if (slot < 0) return false;
    const std::int32_t block = catalog().block_of(index, position);
    if (blocks_.tag_of(slot) == blocks_.tag(blocks_.address(slot), block, layer)) return false;
    blocks_.spoil(slot);
    catalog().each_holder(block, [this](std::int32_t s) { at(s).gate.call_for_attention(); });
    return true;
  }

  [[nodiscard]] bool is_held(sequence_id id) const noexcept {
    return at(id.index).is_held && at(id.index).gate.is_open(id.generation);
  }
  void end_hold(std::int32_t index) noexcept {
    at(index).is_held = false;
    if (release(index).is_any) settle(index);
  }
  std::int32_t expire(std::int64_t now) noexcept {
    std::int32_t ended = 0;
    for (std::int32_t i = 0; i < count(); ++i) {
      if (!at(i).is_held || at(i).deadline > now) continue;
      end_hold(i);
      ++ended;
    }
    return ended;
  }

  [[nodiscard]] store_counts counts() {
    ++mark_;
    const std::int64_t pinned = ready_of_leased(true);
    const std::int64_t unheld = ready_of_leased(false);
    return {.free = blocks_.free_units(),
            .writing = blocks_.awaited(),
            .evictable = blocks_.ready() - pinned - unheld,
            .pinned = pinned,
            .quarantined = blocks_.spoilt() + unheld,
            .capacity = catalog().slots()};
  }

 private:
  struct alignas(64) sequence_state {
    sequence_gate gate;
    std::atomic<std::uint64_t> last_use{0};
    // Under the lock:
    std::int32_t length = 0;  ///< behind it there is no block
    bool is_closing = false;  ///< closed, and still read
    bool is_held = false;     ///< by a hold, which has a lease in the gate
    std::int64_t deadline = 0;
  };

  [[nodiscard]] std::int32_t count() const noexcept {
    return static_cast<std::int32_t>(sequences_.size());
  }
  [[nodiscard]] sequence_state& at(std::int32_t index) noexcept {
    return sequences_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] const sequence_state& at(std::int32_t index) const noexcept {
    return sequences_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] store_catalog& catalog() noexcept { return blocks_.catalog(); }
  [[nodiscard]] bool is_known(sequence_id id) const noexcept {
    return id.index >= 0 && id.index < count();
  }
  [[noreturn]] static void refuse_stale(sequence_id id) {
    expects(false, "block_store: sequence (", id.index, ", generation ", id.generation,
            ") is stale or unknown");
    std::abort();
  }

  void join(std::int32_t block, std::int32_t index) noexcept {
    blocks_.enter(block, index);
    at(index).length = std::max(at(index).length, catalog().at(block).position + 1);
    // Its leases keep damaged slots from those who free them.
    if (catalog().at(block).corrupt > 0) at(index).gate.call_for_attention();
  }

  /// Makes room for a unit: a block that only its name keeps, or the end of a sequence. False if
  /// there is neither, and then nothing has changed.
  /// @param needs_record  the unit's block is new and all records are taken: what goes is a block
  ///                      of which nothing is left
  [[nodiscard]] bool evict_one(std::int32_t writer, bool needs_record) {
    if (blocks_.evict_cached(blocks_.free_units() + 1) > 0) return true;
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
    for (std::int32_t position = length - 1; position >= 0; --position) {
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

  void settle(std::int32_t index) noexcept {
    sequence_state& s = at(index);
    if (s.gate.leases() > 0) return;
    if (s.gate.wants_attention()) free_spoilt(index);
    if (s.is_closing) finish_closing(index);
  }
  /// After the last lease: nobody reads the damaged slots that no other reader of the block could.
  void free_spoilt(std::int32_t index) noexcept {
    bool are_left = false;
    for (std::int32_t position = 0; position < at(index).length; ++position) {
      const std::int32_t block = catalog().block_of(index, position);
      if (block < 0 || catalog().at(block).corrupt == 0) continue;
      if (!catalog().all_holders(block,
                                 [this](std::int32_t s) { return at(s).gate.leases() == 0; })) {
        are_left = true;  // another is leased: the last of all does it, and that may be this one
        continue;
      }
      blocks_.free_spoilt(block);
      blocks_.forget_if_empty(block);
    }
    if (!are_left) at(index).gate.end_attention();
  }
  void finish_closing(std::int32_t index) noexcept {
    if (at(index).gate.wants_attention()) free_spoilt(index);
    let_go_from(index, 0);
    at(index).gate.end_attention();
    at(index).is_closing = false;
    free_.push_back(index);
  }
  /// A sequence that nobody reads lets its blocks go, the last one first: what they leave to the
  /// policy is given up in that order.
  void let_go_from(std::int32_t index, std::int32_t first) noexcept {
    for (std::int32_t position = at(index).length - 1; position >= first; --position) {
      const std::int32_t block = catalog().block_of(index, position);
      if (block < 0) continue;
      blocks_.leave(block, index);
      if (catalog().at(block).first_holder >= 0) {
        (void)abandon_if_closed(block);
      } else {
        blocks_.leave_behind(block, position > 0 ? catalog().block_of(index, position - 1) : -1);
      }
    }
    at(index).length = std::min(at(index).length, first);
  }
  /// If all who hold a block are closed, what is being written of it is not wanted any more.
  /// @return whether something is
  bool abandon_if_closed(std::int32_t block) noexcept {
    if (catalog().at(block).writing == 0) return false;
    if (catalog().all_holders(block, [this](std::int32_t s) { return !at(s).gate.is_open(); })) {
      blocks_.abandon(block);
    }
    return catalog().at(block).is_orphan;
  }
  /// Units that can be read of the blocks of sequences with leases, each block once: of those that
  /// are open, or of the rest.
  [[nodiscard]] std::int64_t ready_of_leased(bool open) noexcept {
    std::int64_t units = 0;
    for (std::int32_t i = 0; i < count(); ++i) {
      const sequence_state& s = at(i);
      if (s.gate.leases() == 0 || s.gate.is_open() != open) continue;
      for (std::int32_t position = 0; position < s.length; ++position) {
        const std::int32_t block = catalog().block_of(i, position);
        if (block < 0 || catalog().at(block).seen == mark_) continue;
        catalog().at(block).seen = mark_;
        units += catalog().at(block).ready;
      }
    }
    return units;
  }

  // What every use writes, in a line of its own.
  alignas(64) std::atomic<std::uint64_t> clock_{0};  ///< uses so far
  alignas(64) store_blocks<Policy> blocks_;
  std::vector<sequence_state> sequences_;
  std::vector<std::int32_t> free_;  ///< sequences
  std::uint32_t mark_ = 0;          ///< of the last count
};

}  // namespace pulseinfer::detail
