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
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/sequence_gate.hpp"
#include "pulseinfer/detail/store_admission.hpp"
#include "pulseinfer/detail/store_blocks.hpp"
#include "pulseinfer/detail/store_eviction.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/store_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Of a hold that does not end by itself.
inline constexpr std::int64_t endless_hold = std::numeric_limits<std::int64_t>::max();

/// Sequences over the blocks of a store: a block store without its memory and its lock.
///
/// @par Threads  one at a time, under the store's lock, but `acquire`, `release` and `touch`
template <class Policy, class Admission>
class store_sequences {
 public:
  store_sequences(const kv_geometry& geometry, const block_store_options& options,
                  std::int32_t* table, std::byte* payload, Admission admission)
      : blocks_(geometry, options, table, payload),
        sequences_(static_cast<std::size_t>(options.max_sequences)),
        eviction_(blocks_, sequences_),
        admission_(std::move(admission), options) {
    free_.reserve(sequences_.size());
    for (std::int32_t i = options.max_sequences; i > 0; --i) free_.push_back(i - 1);
  }

  [[nodiscard]] store_blocks<Policy>& blocks() noexcept { return blocks_; }
  [[nodiscard]] const store_blocks<Policy>& blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(sequences_.size() * sizeof(sequence_state) +
                                     free_.capacity() * sizeof(std::int32_t)) +
           eviction_.bytes() + admission_.bytes() + blocks_.bytes();
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
    admission_.forget(index, 0);
    return sequence_id{index, at(index).gate.generation()};
  }
  /// Lets a sequence begin with the blocks of a prompt that are there as a whole, and holds it. Of
  /// the others the admission filter says which may come.
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
    admission_.ask(
        id.index, count,
        prompt.subspan(static_cast<std::size_t>(count), most - static_cast<std::size_t>(count)));
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
    admission_.share(parent.index, child.index, blocks);
    touch(parent.index);
  }
  trim_outcome trim(std::int32_t index, std::int32_t blocks) noexcept {
    if (!at(index).gate.try_lock()) return trim_outcome::leased;
    let_go_from(index, blocks);
    admission_.forget(index, blocks);
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

  /// Gives a block of a sequence a name.
  /// @throws std::logic_error  if nothing of it is there; and as store_blocks::name
  name_outcome name(std::int32_t index, std::int32_t position, const block_key& key,
                    const retention& stay) {
    const std::int32_t block = catalog().block_of(index, position);
    expects<std::logic_error>(block >= 0, "block_store: block ", position,
                              " has no unit that could be named");
    const std::int32_t before = position > 0 ? catalog().block_of(index, position - 1) : -1;
    return blocks_.name(block, key, stay, before);
  }

  /// True if a unit is neither there nor on its way, and may come.
  [[nodiscard]] bool is_wanted(std::int32_t index, std::int32_t layer,
                               std::int32_t position) const noexcept {
    return blocks_.entry(index, layer, position) == absent_unit &&
           !admission_.is_refused(index, position);
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
    if (admission_.is_refused(index, position)) return {.outcome = reserve_outcome::not_admitted};
    std::int32_t block = catalog().block_of(index, position);
    // One eviction is enough for both, so that one that fails has given nothing up.
    const bool needs_record = block < 0 && catalog().free_blocks() == 0;
    if ((blocks_.free_units() == 0 || needs_record) &&
        !eviction_.make_room_for_one(index, needs_record)) {
      return {.outcome = reserve_outcome::full};
    }
    if (block < 0) {
      block = catalog().make(position);
      join(block, index);
    }
    const std::int32_t slot = blocks_.begin_write(index, block, layer);
    return {.outcome = reserve_outcome::reserved,
            .slot = blocks_.handle_of(slot),
            .bytes = blocks_.address(slot)};
  }

  /// As many calls for one, in their order; what has to go is fetched ahead.
  void reserve(std::int32_t index, std::int32_t layer, std::span<const logical_block> blocks,
               std::span<reservation> results) {
    std::int64_t wanted = 0;
    std::int32_t highest = -1;  // so that none counts twice: too few is what may be said
    for (const logical_block block : blocks) {
      const std::int32_t position = index_of(block);
      if (position <= highest) continue;
      highest = position;
      wanted += is_wanted(index, layer, position) ? 1 : 0;
    }
    std::size_t done = 0;
    bool is_any = false;
    try {
      for (; done < blocks.size(); ++done) {
        if (blocks_.free_units() == 0) {
          blocks_.evict_cached(std::min(wanted, store_blocks<Policy>::most_evicted_ahead));
        }
        results[done] = reserve(index, layer, index_of(blocks[done]));
        const bool is_reserved = results[done].outcome == reserve_outcome::reserved;
        wanted -= is_reserved ? 1 : 0;
        is_any = is_any || is_reserved;
      }
    } catch (...) {  // the policy's
      for (reservation& made : results.first(done)) {
        if (made.outcome == reserve_outcome::reserved) {
          blocks_.end_write(index_of(std::exchange(made, {}).slot), false, 0);
        }
      }
      throw;
    }
    if (is_any) touch(index);
  }
  /// Reserves all that is absent of blocks, or none of it.
  /// @param blocks   ascending
  /// @param results  [blocks, layers]
  reserve_outcome reserve_whole(std::int32_t index, std::span<const logical_block> blocks,
                                std::span<reservation> results) {
    const std::int32_t layers = blocks_.geometry().layers;
    store_room wanted;
    for (const logical_block block : blocks) {
      const std::int32_t position = index_of(block);
      std::int64_t absent = 0;
      for (std::int32_t layer = 0; layer < layers; ++layer) {
        absent += is_wanted(index, layer, position) ? 1 : 0;
      }
      wanted.units += absent;
      wanted.records += absent > 0 && catalog().block_of(index, position) < 0 ? 1 : 0;
    }
    if (!eviction_.make_room(index, wanted)) return reserve_outcome::full;
    auto result = results.begin();
    for (const logical_block block : blocks) {
      for (std::int32_t layer = 0; layer < layers; ++layer) {
        *result++ = reserve(index, layer, index_of(block));
      }
    }
    if (wanted.units > 0) touch(index);
    return reserve_outcome::reserved;
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
      if (!at(i).is_held || at(i).deadline > now || at(i).deadline == endless_hold) continue;
      end_hold(i);
      ++ended;
    }
    return ended;
  }

  [[nodiscard]] store_counts counts() {
    if (++mark_ == 0) {  // they go round: none is left of the count 2^32 counts ago
      for (std::int32_t i = 0; i < blocks_.options().max_stored_blocks; ++i)
        catalog().at(i).seen = 0;
      mark_ = 1;
    }
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
        // One that has no name goes with its last holder, and another block may get its record.
        const std::int32_t before = position > 0 ? catalog().block_of(index, position - 1) : -1;
        blocks_.leave_behind(block, blocks_.in_index(before));
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
  store_eviction<Policy> eviction_;
  store_admission<Admission> admission_;
  std::vector<std::int32_t> free_;  ///< sequences
  std::uint32_t mark_ = 0;          ///< of the last count
};

}  // namespace pulseinfer::detail
