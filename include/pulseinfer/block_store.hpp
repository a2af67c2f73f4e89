// SPDX-License-Identifier: Apache-2.0
/// @file
/// The host tier: units of sequences in host memory, found by index, shared by sequences with the
/// same beginning, pinned by leases, given up in a policy's order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/admission_filter.hpp"
#include "pulseinfer/block_key.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/store_blocks.hpp"
#include "pulseinfer/detail/store_lease.hpp"
#include "pulseinfer/detail/store_memory.hpp"
#include "pulseinfer/detail/store_sequences.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/eviction.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/integrity.hpp"
#include "pulseinfer/prefix_index.hpp"
#include "pulseinfer/store_types.hpp"
#include "pulseinfer/store_view.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Fixed-capacity store of units in pinned host memory; so is its table of them, [sequences,
/// layers, blocks] of 4 bytes, for kernels that find units themselves.
///
/// A unit is named by (sequence, layer, block). Its bytes are the strips of a page, joined (see
/// layout.hpp). Writing is reserve - fill - commit, or abort; a unit can be read only once it is
/// committed. Reading goes through a lease, taken once for a sequence and layer: after that a
/// lookup is two indexed loads, no lock and no count. Units of a sequence and layer that are
/// reserved in their order lie side by side where there is room, so that gathers merge them.
///
/// Sequences share blocks: `fork` gives a second one the beginning of a first. A block that has
/// been given a name (`name_block`) stays when its last sequence is closed, and `open_sequence`
/// finds it again: the longest beginning of a prompt that is there as a whole, kept by a hold until
/// the engine has its leases. `trim` forgets the end of a sequence.
///
/// When no slot is free, `reserve` gives up what can be had: first a block that only its name
/// keeps, the one that the policy picks; then of the sequences that are open the one that has not
/// been used for longest gives up its last block, or a layer of it, so that what is left is still a
/// prefix. (A use is a lease or a hold that ends, a reservation, a fork.) A block goes under all
/// who share it, and not while one of them is leased, is the one that is written, or has a block
/// behind it. What `max_stored_blocks` leaves no record for has a whole block given up for it.
///
/// @tparam Policy     eviction_policy over blocks that only their names keep. What it throws, where
///                    it may not, comes out of the call that asked it: that has given up what it
///                    was told to so far, and changed nothing else. So does a std::logic_error where
///                    its victim is a block that it does not have
/// @tparam Admission  admission_filter: of the blocks of a prompt that `open_sequence` does not find
///                    it says which are taken in
/// @par Threads    all members, from any thread. Changes take one lock; leases, what they find, and
///                 `ready_blocks` take none
/// @par Life       outlives its leases and holds
template <backend Backend, eviction_policy Policy = lru, admission_filter Admission = admit_all>
class block_store {
 public:
  /// What `acquire` gives; its members stand in detail/store_lease.hpp, as do the hold's.
  using lease = detail::store_lease<block_store>;
  using hold = detail::store_hold<block_store>;
  /// Of a hold that ends only when it is let go; also `expire(no_deadline)` leaves it.
  static constexpr std::int64_t no_deadline = detail::endless_hold;

  /// A sequence that begins with blocks that were there.
  struct opened_prefix {
    sequence_id sequence;
    std::int32_t blocks = 0;  ///< of the prompt, whole, from the first on
    hold held;                ///< keeps them until the engine has its leases
  };

  /// @throws std::invalid_argument  on a bad geometry, a capacity below one unit, counts out of
  ///                                range, or a checksum without a hash
  /// @throws std::bad_alloc         when payload, table or books cannot be had; for the first two
  ///                                it is an out_of_memory, which names them
  block_store(Backend backend, const kv_geometry& geometry, const block_store_options& options,
              Admission admission = Admission())
      : block_store(detail::checked_options(checked(geometry), options), backend, geometry,
                    std::move(admission)) {}
  block_store(const block_store&) = delete;
  block_store& operator=(const block_store&) = delete;

  [[nodiscard]] const kv_geometry& geometry() const noexcept { return blocks().geometry(); }
  [[nodiscard]] std::int64_t unit_bytes() const noexcept { return blocks().unit_bytes(); }
  [[nodiscard]] std::int32_t max_blocks() const noexcept { return blocks().options().max_blocks; }
  [[nodiscard]] std::int64_t capacity_units() const noexcept { return blocks().catalog().slots(); }
  /// Where the units' bytes begin: pinned memory, [capacity_units, unit_bytes].
  [[nodiscard]] const std::byte* payload() const noexcept { return blocks().payload(); }
  /// How much of it is pinned in one piece: no copy may go on from one piece into the next.
  [[nodiscard]] std::size_t piece_bytes() const noexcept { return memory_.piece_bytes(); }
  /// Whether streams may copy from all of the payload (see `paged_backend`).
  [[nodiscard]] bool is_ready() const { return memory_.is_ready(); }
  /// The payload as kernels see it. @throws what the backend does if not all of it is reached (yet)
  [[nodiscard]] const std::byte* device_payload() const { return memory_.device_payload(); }
  /// Memory beside the payload: table, books, names, tags. The policy's own is not in
  /// it, nor the filter's.
  [[nodiscard]] std::int64_t metadata_bytes() const noexcept {
    return static_cast<std::int64_t>(sizeof *this + memory_.table_bytes()) + sequences_.bytes();
  }
  /// A snapshot in which the counts balance. @par Cost  O(blocks of the sequences with leases)
  [[nodiscard]] store_counts counts() const {
    std::lock_guard lock(mutex_);
    return sequences_.counts();
  }

  /// Begins an empty sequence; empty when `max_sequences` are open or still read.
  [[nodiscard]] std::optional<sequence_id> open_sequence() {
    std::lock_guard lock(mutex_);
    return sequences_.open();
  }
  /// Begins a sequence with the longest beginning of a prompt that is there: whole blocks with
  /// these names, which it shares with whoever has them too. The admission filter is asked about the
  /// others: those that it keeps out are `not_admitted` in this sequence, and what forks of it share.
  ///
  /// @param prompt    keys of the prompt's blocks from the first on, see `block_keys`
  /// @param deadline  of the hold, in the time that `expire` is told
  /// @return empty when there is no sequence to be had
  /// @throws ...  what the filter does; there is no new sequence then
  /// @par Cost  O(layers) a block that is there, and what the filter costs for each other
  [[nodiscard]] std::optional<opened_prefix> open_sequence(std::span<const block_key> prompt,
                                                           std::int64_t deadline = no_deadline) {
    std::lock_guard lock(mutex_);
    const std::optional<sequence_id> id = sequences_.open();
    if (!id) return std::nullopt;
    std::int32_t found = 0;
    try {
      found = sequences_.adopt(*id, prompt, deadline);
    } catch (...) {
      (void)sequences_.close(id->index);  // nobody has been told of it
      throw;
    }
    return std::optional<opened_prefix>(opened_prefix{*id, found, hold(this, *id)});
  }
  /// How many blocks of a prompt are there as a whole, from the first on. A snapshot, for those who
  /// decide where to send a request.
  /// @param prompt  as of `open_sequence`: a key stands for all blocks before its own, so that not
  ///                each of them is looked up
  /// @par Cost      no lock; a miss of the cache for several blocks
  [[nodiscard]] std::int32_t ready_blocks(std::span<const block_key> prompt) const noexcept {
    std::size_t found = 0;
    std::int32_t groups[64];
    for (std::size_t now = std::size(groups); now == std::size(groups);) {
      const std::span<const block_key> next =
          prompt.subspan(found, std::min(std::size(groups), prompt.size() - found));
      now = blocks().index().longest_prefix(next, groups);
      now = blocks().in_place(std::span(groups, now), found);
      found += now;
    }
    return static_cast<std::int32_t>(found);
  }

  /// A second sequence that begins with the first `blocks` blocks of one, as far as they are there
  /// or being written. What either appends is its own.
  /// @return empty when there is no sequence to be had
  /// @throws std::invalid_argument  on a stale handle
  /// @throws std::out_of_range      on a number of blocks below 0 or above max_blocks
  /// @par Cost  O(layers x blocks)
  [[nodiscard]] std::optional<sequence_id> fork(sequence_id parent, std::int32_t blocks) {
    std::lock_guard lock(mutex_);
    sequences_.check(parent);
    this->blocks().check_length(blocks);
    const std::optional<sequence_id> id = sequences_.open();
    if (id) sequences_.share(parent, *id, blocks);
    return id;
  }

  /// Forgets all blocks of a sequence from `blocks` on, as if it had ended there.
  /// @return leased, and nothing has changed, while somebody has a lease or a hold on the sequence
  /// @throws as fork
  /// @par Cost  O(units that it forgets)
  trim_outcome trim(sequence_id id, std::int32_t blocks) {
    std::lock_guard lock(mutex_);
    sequences_.check(id);
    this->blocks().check_length(blocks);
    return sequences_.trim(id.index, blocks);
  }

  /// Ends a sequence. Its handle is stale from here on, whatever is returned. Leases on it go on
  /// reading; writes under way end as always, and are then forgotten. A block that has a name stays
  /// if it is whole, to be found by `open_sequence`.
  /// @throws std::invalid_argument  on a stale handle
  /// @par Cost  O(units of the sequence)
  close_outcome close_sequence(sequence_id id) {
    std::lock_guard lock(mutex_);
    sequences_.check(id);
    return sequences_.close(id.index);
  }

  /// Gives a block a name under which others find it. The engine names a block once it has all its
  /// tokens; it is found once all its layers are committed.
  /// How long it stays is what was said last. Where another block has the name (`exists`) that
  /// one's does not change: open the prompt, and name the block that is found.
  /// @throws std::invalid_argument  on a stale handle
  /// @throws std::out_of_range      on a block out of range
  /// @throws std::logic_error       if nothing of the block is there, or it has another name
  /// @throws ...                    what `Policy::check` does, where there is one: see
  ///                                `eviction_policy`
  name_outcome name_block(sequence_id id, logical_block block, const block_key& key,
                          const retention& stay = {}) {
    std::lock_guard lock(mutex_);
    sequences_.check(id);
    blocks().check_unit(0, index_of(block));
    return sequences_.name(id.index, index_of(block), key, stay);
  }
  /// The same for blocks that follow each other, under one lock and with their misses of the cache
  /// overlapped.
  /// @param id        of the sequence
  /// @param first     the block that keys[0] is for
  /// @param keys      of blocks first, first + 1, ...
  /// @param outcomes  [keys.size()] at least; the rest is left alone
  /// @param stay      of all of them
  /// @throws as name_block, and std::invalid_argument if `outcomes` is shorter. Nothing has changed
  ///         then, but by std::logic_error: then the blocks before that one have their names
  void name_blocks(sequence_id id, logical_block first, std::span<const block_key> keys,
                   std::span<name_outcome> outcomes, const retention& stay = {}) {
    detail::expects(outcomes.size() >= keys.size(), "block_store: room for ", outcomes.size(),
                    " outcomes, expected one for each of ", keys.size(), " keys");
    std::lock_guard lock(mutex_);
    sequences_.check(id);
    if (keys.empty()) return;
    const std::int32_t position = index_of(first);
    blocks().check_unit(0, position);
    blocks().check_length(position + static_cast<std::int64_t>(keys.size()));
    const prefix_index& index = blocks().index();
    constexpr std::size_t ahead = 16;
    for (std::size_t i = 0; i < std::min(ahead, keys.size()); ++i) index.prefetch(keys[i]);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (keys.size() - i > ahead) index.prefetch(keys[i + ahead]);
      outcomes[i] =
          sequences_.name(id.index, position + static_cast<std::int32_t>(i), keys[i], stay);
    }
  }

  /// Takes a slot for a unit that is not stored yet, giving up others where that is needed and
  /// allowed.
  ///
  /// @return the slot, which is the caller's until `commit` or `abort`; or why there is none, and
  ///         then nothing has changed
  /// @throws std::invalid_argument  on a stale handle
  /// @throws std::out_of_range      on a layer or block out of range
  /// @par Cost  O(1) where layers are written one after the other; O(layers + sequences) when it
  ///            evicts
  reservation reserve(sequence_id id, std::int32_t layer, logical_block block) {
    std::lock_guard lock(mutex_);
    sequences_.check(id);
    blocks().check_unit(layer, index_of(block));
    const reservation got = sequences_.reserve(id.index, layer, index_of(block));
    if (got.outcome == reserve_outcome::reserved) sequences_.touch(id.index);
    return got;
  }
  /// The same for many blocks of a layer under one lock, in their order. The outcomes, and what is
  /// given up, are those of one call for each; which slots they are may differ. What the books know
  /// of what has to go is fetched into the cache together.
  /// @param id       of the sequence
  /// @param layer    of all of them
  /// @param blocks   in the order of the calls
  /// @param results  [blocks.size()] at least; the rest is left alone
  /// @throws as reserve, and std::invalid_argument if `results` is shorter; nothing has changed
  void reserve(sequence_id id, std::int32_t layer, std::span<const logical_block> blocks,
               std::span<reservation> results) {
    detail::expects(results.size() >= blocks.size(), "block_store: room for ", results.size(),
                    " reservations, expected one for each of ", blocks.size(), " blocks");
    std::lock_guard lock(mutex_);
    sequences_.check(id);
    this->blocks().check_unit(layer, 0);
    for (const logical_block block : blocks) this->blocks().check_unit(layer, index_of(block));
    sequences_.reserve(id.index, layer, blocks, results);
  }

  /// Takes slots for all that is absent of blocks, in every layer, or for none of it. Only whole
  /// blocks are given up for it, and none where that would not be enough.
  ///
  /// @param id       of the sequence
  /// @param blocks   ascending
  /// @param results  [blocks.size(), layers] at least: what `reserve` would have said of each unit,
  ///                 where all that is absent is reserved now; the rest is left alone
  /// @return reserved, also where nothing was absent; or full, and nothing has changed
  /// @throws as reserve, and std::invalid_argument if `results` is shorter or the blocks do not
  ///         ascend; nothing has changed
  /// @par Cost  O(layers) a block. When it evicts, O(sequences) for each block of a sequence that
  ///            goes, whose leases wait meanwhile
  reserve_outcome reserve_whole(sequence_id id, std::span<const logical_block> blocks,
                                std::span<reservation> results) {
    const std::size_t units = blocks.size() * static_cast<std::size_t>(geometry().layers);
    detail::expects(results.size() >= units, "block_store: room for ", results.size(),
                    " reservations, expected one for each of ", units, " units");
    std::lock_guard lock(mutex_);
    sequences_.check(id);
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      this->blocks().check_unit(0, index_of(blocks[i]));
      detail::expects(i == 0 || blocks[i - 1] < blocks[i], "block_store: block ",
                      index_of(blocks[i]), " comes behind block ",
                      i == 0 ? 0 : index_of(blocks[i - 1]), ", expected ascending ones");
    }
    return sequences_.reserve_whole(id.index, blocks, results);
  }

  /// The bytes of a reserved slot, `unit_bytes()` of pinned memory: the caller's to write until
  /// commit or abort.
  /// @throws std::logic_error  if the slot is not being written
  [[nodiscard]] std::byte* writable(host_slot slot) {
    std::lock_guard lock(mutex_);
    return blocks().address(blocks().checked_writing(slot));
  }

  /// Makes a written unit readable, for all sequences that share its block. If none holds it any
  /// more, the slot becomes free instead.
  /// @post  a lease on the sequence and layer finds the bytes as they were written
  /// @throws std::logic_error  if the slot is not being written: a second commit, or a commit after
  ///                           abort
  /// @par Cost  O(sequences that share it) under the lock; before it, with a checksum, one read of
  ///            the unit
  void commit(host_slot slot) { end_write(slot, true, blocks().has_tags() ? tag_to_be(slot) : 0); }

  /// The same for many slots, in their order, under one lock where there are no tags to compute.
  /// @throws as commit; the slots before it are committed, it and those behind it stay as they are
  void commit(std::span<const host_slot> slots) {
    if (blocks().has_tags()) {
      for (const host_slot slot : slots) commit(slot);
      return;
    }
    std::lock_guard lock(mutex_);
    for (const host_slot slot : slots) {
      blocks().end_write(blocks().checked_writing(slot), true, 0);
    }
  }

  /// Gives a reserved slot back; the unit stays absent. @throws std::logic_error as commit
  void abort(host_slot slot) { end_write(slot, false, 0); }

  /// A lease on the units of a sequence and layer. It pins the whole sequence, also units that are
  /// committed later.
  /// @throws std::invalid_argument  on a stale handle
  /// @throws std::out_of_range      on a layer out of range
  /// @par Cost  no lock, O(1); to be taken once a transfer, not once a unit
  [[nodiscard]] lease acquire(sequence_id id, std::int32_t layer) {
    blocks().check_unit(layer, 0);
    sequences_.acquire(id);
    return lease(this, id, layer, memory_.table() + blocks().table_index(id.index, layer, 0));
  }

  /// Lets the holds go that have a deadline, which is `now` or before.
  /// @return how many
  /// @par Cost  O(max_sequences)
  std::int32_t expire(std::int64_t now) {
    std::lock_guard lock(mutex_);
    return sequences_.expire(now);
  }
  /// Forgets all blocks that only their names keep, also those that the policy never gives up.
  /// @return how many
  /// @par Cost  O(max_stored_blocks)
  std::int32_t clear() {
    std::lock_guard lock(mutex_);
    return blocks().clear();
  }
  /// Hands out what has become of blocks with names, oldest first, and forgets it.
  /// @return how many were written to `to`
  std::size_t drain_events(std::span<store_event> to) {
    std::lock_guard lock(mutex_);
    return blocks().events().drain(to);
  }
  /// Events that found `max_events` waiting, since the store was made.
  [[nodiscard]] std::int64_t lost_events() const {
    std::lock_guard lock(mutex_);
    return blocks().events().lost();
  }
  /// Calls `use(policy)` under the lock: for what a policy wants to be told, such as the time.
  template <class Use>
  void with_policy(Use use) {
    std::lock_guard lock(mutex_);
    use(blocks().policy());
  }

  /// True if the unit is committed. A snapshot: only a lease makes it last.
  /// @throws std::invalid_argument, std::out_of_range  as reserve
  [[nodiscard]] bool contains(sequence_id id, std::int32_t layer, logical_block block) const {
    std::lock_guard lock(mutex_);
    sequences_.check(id);
    blocks().check_unit(layer, index_of(block));
    return blocks().entry(id.index, layer, index_of(block)) >= 0;
  }

 private:
  friend lease;
  friend hold;

  /// The options come first: nothing is allocated by those that make no sense.
  block_store(const block_store_options& checked, Backend backend, const kv_geometry& geometry,
              Admission admission)
      : memory_(backend, geometry, checked),
        sequences_(geometry, checked, memory_.table(), memory_.payload(), std::move(admission)) {}

  [[nodiscard]] detail::store_blocks<Policy>& blocks() noexcept { return sequences_.blocks(); }
  [[nodiscard]] const detail::store_blocks<Policy>& blocks() const noexcept {
    return sequences_.blocks();
  }
  /// The tag of a unit that is about to be committed. The bytes are the caller's still, so the lock
  /// is not held while they are read; a block with a slot that is written stays what it is.
  [[nodiscard]] std::uint64_t tag_to_be(host_slot slot) {
    std::int32_t block = -1;
    std::int32_t layer = -1;
    {
      std::lock_guard lock(mutex_);
      const std::int32_t index = blocks().checked_writing(slot);
      block = blocks().catalog().block_of_slot(index);
      layer = blocks().catalog().layer_of_slot(index);
    }
    return blocks().tag(blocks().address(index_of(slot)), block, layer);
  }
  void end_write(host_slot slot, bool keep, std::uint64_t tag_of_unit) {
    std::lock_guard lock(mutex_);
    blocks().end_write(blocks().checked_writing(slot), keep, tag_of_unit);
  }
  bool drop_if_corrupt(std::int32_t index, std::int32_t layer, std::int32_t position) noexcept {
    std::lock_guard lock(mutex_);
    return sequences_.drop_if_corrupt(index, layer, position);
  }
  void release_lease(std::int32_t index) noexcept {
    const detail::sequence_gate::rest rest = sequences_.release(index);
    if (!rest.is_any) return;
    std::lock_guard lock(mutex_);
    sequences_.settle(index, rest.generation);
  }
  [[nodiscard]] bool is_held(sequence_id id) const noexcept {
    std::lock_guard lock(mutex_);
    return sequences_.is_held(id);
  }
  void end_hold(sequence_id id) noexcept {
    std::lock_guard lock(mutex_);
    if (sequences_.is_held(id)) sequences_.end_hold(id.index);
  }

  detail::store_memory<Backend> memory_;
  mutable std::mutex mutex_;
  /// Mutable for the marks of a count.
  mutable detail::store_sequences<Policy, Admission> sequences_;
};

}  // namespace pulseinfer
