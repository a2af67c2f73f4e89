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
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/block_key.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/store_books.hpp"
#include "pulseinfer/detail/store_lease.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/eviction.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/integrity.hpp"
#include "pulseinfer/prefix_index.hpp"
#include "pulseinfer/store_types.hpp"
#include "pulseinfer/store_view.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

namespace detail {

/// The memory of a block store that kernels reach.
template <backend Backend>
class store_memory {
 protected:
  store_memory(Backend backend, const kv_geometry& geometry, const block_store_options& options)
      : checked_options_(checked_options(checked(geometry), options)),
        payload_(backend, units_of(geometry) * static_cast<std::size_t>(geometry.unit_bytes())),
        table_(backend, static_cast<std::size_t>(options.max_sequences) *
                            static_cast<std::size_t>(geometry.layers) *
                            static_cast<std::size_t>(options.max_blocks)),
        device_payload_(payload_.device_data()),
        device_table_(table_.device_data()) {}

  block_store_options checked_options_;
  pinned_buffer<std::byte, Backend> payload_;
  pinned_buffer<std::int32_t, Backend> table_;  ///< [sequences, layers, blocks] slots
  const std::byte* device_payload_;             ///< the same, as kernels see them
  const std::int32_t* device_table_;

 private:
  [[nodiscard]] std::size_t units_of(const kv_geometry& geometry) const noexcept {
    return static_cast<std::size_t>(checked_options_.capacity_bytes / geometry.unit_bytes());
  }
};

}  // namespace detail

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
/// @tparam Policy  eviction_policy over blocks that only their names keep
/// @par Threads    all members, from any thread. Changes take one lock; leases, what they find, and
///                 `ready_blocks` take none
/// @par Life       outlives its leases and holds
template <backend Backend, eviction_policy Policy = lru>
class block_store : private detail::store_memory<Backend>, private detail::store_books<Policy> {
  using memory = detail::store_memory<Backend>;
  using books = detail::store_books<Policy>;

 public:
  using lease = detail::store_lease<block_store>;
  using hold = detail::store_hold<block_store>;
  static constexpr std::int64_t no_deadline = std::numeric_limits<std::int64_t>::max();

  /// A sequence that begins with blocks that were there.
  struct opened_prefix {
    sequence_id sequence;
    std::int32_t blocks = 0;  ///< of the prompt, whole, from the first on
    hold held;                ///< keeps them until the engine has its leases
  };

  /// @throws std::invalid_argument  on a bad geometry, a capacity below one unit, counts out of
  ///                                range, or a checksum without a hash
  /// @throws out_of_memory          when payload or table cannot be had
  block_store(Backend backend, const kv_geometry& geometry, const block_store_options& options)
      : memory(backend, geometry, options),
        books(geometry, checked_options_, table_.data(), payload_.data()) {}
  block_store(const block_store&) = delete;
  block_store& operator=(const block_store&) = delete;

  [[nodiscard]] const kv_geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] std::int64_t unit_bytes() const noexcept { return unit_bytes_; }
  [[nodiscard]] std::int32_t max_blocks() const noexcept { return options_.max_blocks; }
  [[nodiscard]] std::int64_t capacity_units() const noexcept {
    return options_.capacity_bytes / unit_bytes_;
  }
  /// Where the units' bytes begin: pinned memory, [capacity_units, unit_bytes].
  [[nodiscard]] const std::byte* payload() const noexcept { return payload_.data(); }
  /// Memory beside the payload: table, books, names, tags. The policy's own is not in it.
  [[nodiscard]] std::int64_t metadata_bytes() const noexcept {
    return static_cast<std::int64_t>(sizeof *this + table_.size() * sizeof(std::int32_t) +
                                     sequences_.size() * sizeof(sequence_state) +
                                     tags_.capacity() * sizeof(std::uint64_t) +
                                     free_sequences_.capacity() * sizeof(std::int32_t) +
                                     events_.capacity() * sizeof(store_event)) +
           free_.bytes() + catalog_.bytes() + index_.bytes();
  }
  /// A snapshot in which the counts balance. @par Cost  O(blocks of the sequences with leases)
  [[nodiscard]] store_counts counts() const {
    std::lock_guard lock(mutex_);
    return counts_under_lock();
  }

  /// Begins an empty sequence; empty when `max_sequences` are open or still read.
  [[nodiscard]] std::optional<sequence_id> open_sequence() {
    std::lock_guard lock(mutex_);
    return open_under_lock();
  }
  /// Begins a sequence with the longest beginning of a prompt that is there: whole blocks with
  /// these names, which it shares with whoever has them too.
  ///
  /// @param prompt    keys of the prompt's blocks from the first on, as of a `block_namer`
  /// @param deadline  of the hold, in the time that `expire` is told
  /// @return empty when there is no sequence to be had
  /// @par Cost  O(layers) a block that is there
  [[nodiscard]] std::optional<opened_prefix> open_sequence(std::span<const block_key> prompt,
                                                           std::int64_t deadline = no_deadline) {
    std::lock_guard lock(mutex_);
    const std::optional<sequence_id> id = open_under_lock();
    if (!id) return std::nullopt;
    const std::size_t most = std::min(prompt.size(), static_cast<std::size_t>(options_.max_blocks));
    std::int32_t blocks = 0;
    for (; static_cast<std::size_t>(blocks) < most; ++blocks) {
      const std::int32_t block = index_.find(prompt[static_cast<std::size_t>(blocks)]);
      if (block < 0 || !is_whole(block) || catalog_.at(block).position != blocks) break;
      if (catalog_.at(block).is_cached) {
        policy_.evict(block);  // it is used, and may be remembered
        catalog_.at(block).is_cached = false;
      }
      join(block, id->index);
    }
    sequence_state& s = at(id->index);
    (void)s.gate.acquire(id->generation);
    s.is_held = true;
    s.deadline = deadline;
    return std::optional<opened_prefix>(opened_prefix{*id, blocks, hold(this, *id)});
  }
  /// How many blocks of a prompt are there as a whole, from the first on. A snapshot, for those who
  /// decide where to send a request. @par Cost  no lock; a miss of the cache for several blocks
  [[nodiscard]] std::int32_t ready_blocks(std::span<const block_key> prompt) const noexcept {
    std::size_t found = 0;
    std::int32_t groups[64];
    for (std::size_t now = std::size(groups); now == std::size(groups);) {
      const std::span<const block_key> next =
          prompt.subspan(found, std::min(std::size(groups), prompt.size() - found));
      now = index_.longest_prefix(next, groups);
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
    check_sequence(parent);
    check_length(blocks);
    const std::optional<sequence_id> id = open_under_lock();
    if (!id) return std::nullopt;
    for (std::int32_t position = 0; position < std::min(blocks, at(parent.index).length);
         ++position) {
      const std::int32_t block = catalog_.block_of(parent.index, position);
      if (block >= 0) join(block, id->index);
    }
    touch(parent.index);
    return id;
  }

  /// Forgets all blocks of a sequence from `blocks` on, as if it had ended there.
  /// @return leased, and nothing has changed, while somebody has a lease on the sequence
  /// @throws as fork
  /// @par Cost  O(units that it forgets)
  trim_outcome trim(sequence_id id, std::int32_t blocks) {
    std::lock_guard lock(mutex_);
    check_sequence(id);
    check_length(blocks);
    if (!at(id.index).gate.try_lock()) return trim_outcome::leased;
    let_go_from(id.index, blocks);
    at(id.index).gate.unlock();
    return trim_outcome::trimmed;
  }

  /// Ends a sequence. Its handle is stale from here on, whatever is returned. Leases on it go on
  /// reading; writes under way end as always, and are then forgotten. A block that has a name stays
  /// if it is whole, to be found by `open_sequence`.
  /// @throws std::invalid_argument  on a stale handle
  /// @par Cost  O(units of the sequence)
  close_outcome close_sequence(sequence_id id) {
    std::lock_guard lock(mutex_);
    check_sequence(id);
    sequence_state& s = at(id.index);
    s.gate.close();
    bool is_written = false;
    for (std::int32_t position = 0; position < s.length; ++position) {
      const std::int32_t block = catalog_.block_of(id.index, position);
      is_written = (block >= 0 && abandon_if_closed(block)) || is_written;
    }
    if (std::exchange(s.is_held, false)) (void)s.gate.release();
    s.is_closing = true;
    const bool is_read = s.gate.leases() > 0;
    if (!is_read) finish_closing(id.index);
    return is_read || is_written ? close_outcome::deferred : close_outcome::closed;
  }

  /// Gives a block a name under which others find it. The engine names a block once it has all its
  /// tokens; it is found once all its layers are committed.
  /// @throws std::invalid_argument  on a stale handle
  /// @throws std::out_of_range      on a block out of range
  /// @throws std::logic_error       if nothing of the block is there, or it has another name
  /// @throws ...                    what `Policy::check` does, where there is one: see
  ///                                `eviction_policy`
  name_outcome name_block(sequence_id id, std::int32_t block, const block_key& key,
                          const retention& stay = {}) {
    std::lock_guard lock(mutex_);
    check_sequence(id);
    check_unit(0, block);
    return name_under_lock(id.index, block, key, stay);
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
  void name_blocks(sequence_id id, std::int32_t first, std::span<const block_key> keys,
                   std::span<name_outcome> outcomes, const retention& stay = {}) {
    detail::expects(outcomes.size() >= keys.size(), "block_store: room for ", outcomes.size(),
                    " outcomes, expected one for each of ", keys.size(), " keys");
    std::lock_guard lock(mutex_);
    check_sequence(id);
    if (keys.empty()) return;
    check_unit(0, first);
    check_length(static_cast<std::int32_t>(
        std::min<std::int64_t>(first + static_cast<std::int64_t>(keys.size()), INT32_MAX)));
    constexpr std::size_t ahead = 16;
    for (std::size_t i = 0; i < std::min(ahead, keys.size()); ++i) index_.prefetch(keys[i]);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (keys.size() - i > ahead) index_.prefetch(keys[i + ahead]);
      outcomes[i] = name_under_lock(id.index, first + static_cast<std::int32_t>(i), keys[i], stay);
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
  reservation reserve(sequence_id id, std::int32_t layer, std::int32_t block) {
    std::lock_guard lock(mutex_);
    check_sequence(id);
    check_unit(layer, block);
    const reservation got = reserve_under_lock(id.index, layer, block);
    if (got.outcome == reserve_outcome::reserved) touch(id.index);
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
  void reserve(sequence_id id, std::int32_t layer, std::span<const std::int32_t> blocks,
               std::span<reservation> results) {
    detail::expects(results.size() >= blocks.size(), "block_store: room for ", results.size(),
                    " reservations, expected one for each of ", blocks.size(), " blocks");
    std::lock_guard lock(mutex_);
    check_sequence(id);
    check_unit(layer, 0);
    std::int64_t wanted = 0;
    std::int32_t highest = -1;  // so that none counts twice: too few is what may be said
    for (const std::int32_t block : blocks) {
      check_unit(layer, block);
      if (block <= highest) continue;
      highest = block;
      const bool is_new =
          entry_of(id.index, layer, block).load(std::memory_order_relaxed) == absent;
      wanted += is_new ? 1 : 0;
    }
    bool is_any = false;
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      if (free_.size() == 0) evict_cached(std::min(wanted, most_evicted_ahead));
      results[i] = reserve_under_lock(id.index, layer, blocks[i]);
      const bool is_reserved = results[i].outcome == reserve_outcome::reserved;
      wanted -= is_reserved ? 1 : 0;
      is_any = is_any || is_reserved;
    }
    if (is_any) touch(id.index);
  }

  /// The bytes of a reserved slot, `unit_bytes()` of pinned memory: the caller's to write until
  /// commit or abort.
  /// @throws std::logic_error  if the slot is not being written
  [[nodiscard]] std::byte* writable(host_slot slot) {
    std::lock_guard lock(mutex_);
    return address(checked_writing(slot));
  }

  /// Makes a written unit readable, for all sequences that share its block. If none holds it any
  /// more, the slot becomes free instead.
  /// @post  a lease on the sequence and layer finds the bytes as they were written
  /// @throws std::logic_error  if the slot is not being written: a second commit, or a commit after
  ///                           abort
  /// @par Cost  O(sequences that share it) under the lock; before it, with a checksum, one read of
  ///            the unit
  void commit(host_slot slot) { end_write(slot, true, tagger_ ? tag_to_be(slot) : 0); }

  /// The same for many slots, in their order, under one lock where there are no tags to compute.
  /// @throws as commit; the slots before it are committed, it and those behind it stay as they are
  void commit(std::span<const host_slot> slots) {
    if (tagger_) {
      for (const host_slot slot : slots) commit(slot);
      return;
    }
    std::lock_guard lock(mutex_);
    for (const host_slot slot : slots) end_write_under_lock(slot, true, 0);
  }

  /// Gives a reserved slot back; the unit stays absent. @throws std::logic_error as commit
  void abort(host_slot slot) { end_write(slot, false, 0); }

  /// A lease on the units of a sequence and layer. It pins the whole sequence, also units that are
  /// committed later.
  /// @throws std::invalid_argument  on a stale handle
  /// @throws std::out_of_range      on a layer out of range
  /// @par Cost  no lock, O(1); to be taken once a transfer, not once a unit
  [[nodiscard]] lease acquire(sequence_id id, std::int32_t layer) {
    check_unit(layer, 0);
    if (id.index < 0 || id.index >= options_.max_sequences ||
        !at(id.index).gate.acquire(id.generation)) {
      refuse_stale(id);
    }
    return lease(this, id, layer, table_.data() + table_index(id.index, layer, 0));
  }

  /// Lets the holds go whose deadline is `now` or before. @return how many
  /// @par Cost  O(max_sequences)
  std::int32_t expire(std::int64_t now) {
    std::lock_guard lock(mutex_);
    std::int32_t ended = 0;
    for (std::int32_t i = 0; i < options_.max_sequences; ++i) {
      if (!at(i).is_held || at(i).deadline > now) continue;
      end_hold_under_lock(i);
      ++ended;
    }
    return ended;
  }
  /// Forgets all blocks that only their names keep, also those that the policy never gives up.
  /// @return how many
  /// @par Cost  O(max_stored_blocks)
  std::int32_t clear() {
    std::lock_guard lock(mutex_);
    std::int32_t cleared = 0;
    for (std::int32_t block = 0; block < options_.max_stored_blocks; ++block) {
      if (!catalog_.at(block).is_cached) continue;
      policy_.erase(block);
      forget_cached(block, store_event::what::cleared);
      ++cleared;
    }
    return cleared;
  }
  /// Hands out what has become of blocks with names, oldest first, and forgets it.
  /// @return how many were written to `to`
  std::size_t drain_events(std::span<store_event> to) {
    std::lock_guard lock(mutex_);
    const std::size_t n = std::min(to.size(), events_.size());
    const auto end = events_.begin() + static_cast<std::ptrdiff_t>(n);
    std::copy(events_.begin(), end, to.begin());
    events_.erase(events_.begin(), end);
    return n;
  }
  /// Events that found `max_events` waiting, since the store was made.
  [[nodiscard]] std::int64_t lost_events() const {
    std::lock_guard lock(mutex_);
    return lost_events_;
  }
  /// Calls `use(policy)` under the lock: for what a policy wants to be told, such as the time.
  template <class Use>
  void with_policy(Use use) {
    std::lock_guard lock(mutex_);
    use(policy_);
  }

  /// True if the unit is committed. A snapshot: only a lease makes it last.
  /// @throws std::invalid_argument, std::out_of_range  as reserve
  [[nodiscard]] bool contains(sequence_id id, std::int32_t layer, std::int32_t block) const {
    std::lock_guard lock(mutex_);
    check_sequence(id);
    check_unit(layer, block);
    return entry_of(id.index, layer, block).load(std::memory_order_relaxed) >= 0;
  }

 private:
  friend lease;
  friend hold;
  using books::abandon_if_closed;
  using books::absent;
  using books::address;
  using books::at;
  using books::being_written;
  using books::catalog_;
  using books::check_length;
  using books::check_sequence;
  using books::check_unit;
  using books::checked_writing;
  using books::corrupt_;
  using books::counts_under_lock;
  using books::end_hold_under_lock;
  using books::entry_of;
  using books::events_;
  using books::evict_cached;
  using books::evict_one;
  using books::finish_closing;
  using books::forget_cached;
  using books::forget_if_empty;
  using books::free_;
  using books::free_sequences_;
  using books::free_slot;
  using books::geometry_;
  using books::index_;
  using books::is_whole;
  using books::join;
  using books::let_go_from;
  using books::lost_events_;
  using books::most_evicted_ahead;
  using books::open_under_lock;
  using books::options_;
  using books::orphans_;
  using books::payload_bytes_;
  using books::policy_;
  using books::publish;
  using books::ready_;
  using books::refuse_stale;
  using books::sequences_;
  using books::settle;
  using books::settle_whole;
  using books::slot_before;
  using books::table_index;
  using books::tag;
  using books::tagger_;
  using books::tags_;
  using books::tell;
  using books::touch;
  using books::unit_bytes_;
  using books::writing_;
  using memory::checked_options_;
  using memory::device_payload_;
  using memory::device_table_;
  using memory::payload_;
  using memory::table_;
  using typename books::sequence_state;
  using slot_state = detail::slot_state;

  name_outcome name_under_lock(std::int32_t sequence, std::int32_t block, const block_key& key,
                               const retention& stay) {
    const std::int32_t record = catalog_.block_of(sequence, block);
    detail::expects<std::logic_error>(record >= 0, "block_store: block ", block,
                                      " has no unit that could be named");
    if constexpr (requires(const Policy& policy, const eviction_entry& e) { policy.check(e); }) {
      std::as_const(policy_).check({.priority = stay.priority, .keep_until = stay.keep_until});
    }
    detail::stored_block& b = catalog_.at(record);
    if (b.has_name) {
      detail::expects<std::logic_error>(index_.key_of(record) == key, "block_store: block ", block,
                                        " has another name already");
    } else {
      if (index_.insert(key, record, is_whole(record)) != record) return name_outcome::exists;
      b.has_name = true;
      if (is_whole(record)) tell(store_event::what::stored, record);
    }
    b.priority = stay.priority;
    b.keep_until = stay.keep_until;
    return name_outcome::named;
  }
  reservation reserve_under_lock(std::int32_t sequence, std::int32_t layer, std::int32_t block) {
    switch (entry_of(sequence, layer, block).load(std::memory_order_relaxed)) {
      case absent:
        break;
      case being_written:
        return {reserve_outcome::writing, host_slot::none};
      default:
        return {reserve_outcome::exists, host_slot::none};
    }
    std::int32_t record = catalog_.block_of(sequence, block);
    // One eviction is enough for both, so that one that fails has given nothing up.
    const bool needs_record = record < 0 && !catalog_.has_free_block();
    if ((free_.size() == 0 || needs_record) && !evict_one(sequence, needs_record)) {
      return {reserve_outcome::full, host_slot::none};
    }
    if (record < 0) {
      record = catalog_.make(block);
      catalog_.hold(record, sequence);
      at(sequence).length = std::max(at(sequence).length, block + 1);
    }
    const std::int32_t slot = free_.take(slot_before(sequence, layer, block));
    catalog_.add_slot(slot, record, layer);
    ++writing_;
    publish(record, layer, being_written);
    return {reserve_outcome::reserved, static_cast<host_slot>(slot)};
  }

  /// The tag of a unit that is about to be committed. The bytes are the caller's still, so the lock
  /// is not held while they are read; a block with a slot that is written stays what it is.
  [[nodiscard]] std::uint64_t tag_to_be(host_slot slot) {
    std::int32_t block = -1;
    std::int32_t layer = -1;
    {
      std::lock_guard lock(mutex_);
      block = catalog_.block_of_slot(checked_writing(slot));
      layer = catalog_.layer_of_slot(static_cast<std::int32_t>(slot));
    }
    return tag(address(static_cast<std::int32_t>(slot)), block, layer);
  }

  /// Under the lock, so that a unit written anew meanwhile is judged by its own bytes.
  bool drop_if_corrupt(std::int32_t index, std::int32_t layer, std::int32_t position) noexcept {
    std::lock_guard lock(mutex_);
    const std::int32_t slot = entry_of(index, layer, position).load(std::memory_order_relaxed);
    if (slot < 0) return false;
    const std::int32_t block = catalog_.block_of(index, position);
    if (tags_[static_cast<std::size_t>(slot)] == tag(address(slot), block, layer)) return false;
    publish(block, layer, absent);
    catalog_.set_state(slot, slot_state::corrupt);
    --ready_;
    ++corrupt_;
    settle_whole(block, store_event::what::damaged);
    catalog_.each_holder(block, [this](std::int32_t s) { at(s).gate.call_for_attention(); });
    return true;
  }
  void end_write(host_slot slot, bool keep, std::uint64_t tag_of_unit) {
    std::lock_guard lock(mutex_);
    end_write_under_lock(slot, keep, tag_of_unit);
  }
  void end_write_under_lock(host_slot slot, bool keep, std::uint64_t tag_of_unit) {
    const std::int32_t index = checked_writing(slot);
    const std::int32_t block = catalog_.block_of_slot(index);
    const std::int32_t layer = catalog_.layer_of_slot(index);
    --writing_;
    const bool is_orphan = catalog_.at(block).is_orphan;
    orphans_ -= is_orphan ? 1 : 0;
    if (is_orphan || !keep) {
      publish(block, layer, absent);
      free_slot(index);
    } else {
      catalog_.set_state(index, slot_state::ready);
      ++ready_;
      if (tagger_) tags_[static_cast<std::size_t>(index)] = tag_of_unit;
      publish(block, layer, index);
      settle_whole(block, store_event::what::damaged);
    }
    forget_if_empty(block);
  }

  void release_lease(std::int32_t index) noexcept {
    touch(index);
    const detail::sequence_gate::rest rest = at(index).gate.release();
    if (!rest.is_any) return;
    std::lock_guard lock(mutex_);
    if (at(index).gate.generation() == rest.generation) settle(index);
  }
  [[nodiscard]] bool is_held(sequence_id id) const noexcept {
    std::lock_guard lock(mutex_);
    return at(id.index).is_held && at(id.index).gate.is_open(id.generation);
  }
  void end_hold(sequence_id id) noexcept {
    std::lock_guard lock(mutex_);
    if (at(id.index).is_held && at(id.index).gate.is_open(id.generation)) {
      end_hold_under_lock(id.index);
    }
  }
  mutable std::mutex mutex_;
};

}  // namespace pulseinfer
