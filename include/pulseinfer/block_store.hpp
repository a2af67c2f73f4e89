// SPDX-License-Identifier: Apache-2.0
/// @file
/// The host tier: units of sequences in host memory, found by index, pinned by leases, given up in
/// a policy's order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/eviction.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/integrity.hpp"
#include "pulseinfer/store_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

namespace detail {

/// A word of mapped memory that another thread, or the host, may write meanwhile: what was written
/// before it can be read after it, on a device by the kernels behind this one.
PULSEINFER_HD inline std::int32_t load_mapped(const std::int32_t* word) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const volatile std::int32_t*>(word);
#else
  return std::atomic_ref<std::int32_t>(*const_cast<std::int32_t*>(word))
      .load(std::memory_order_acquire);
#endif
}

}  // namespace detail

/// The units of a sequence and layer, as kernels find them in the store: what a lease finds on the
/// host. Its addresses are those that the device knows. An empty one finds nothing.
///
/// @par Life  of the lease that gave it
struct store_view {
  const std::int32_t* slots =
      nullptr;  ///< [blocks] slot of a block, negative where it is not stored
  const std::byte* payload = nullptr;  ///< [slots, unit_bytes]
  std::int64_t unit_bytes = 0;
  std::int64_t blocks = 0;

  /// The bytes of a block, or null where the store has none. Read in a kernel, they may be followed
  /// in the same or a later one.
  [[nodiscard]] PULSEINFER_HD const std::byte* find(std::int64_t block) const {
    if (slots == nullptr || block < 0 || block >= blocks) return nullptr;
    const std::int32_t slot = detail::load_mapped(slots + block);
    return slot < 0 ? nullptr : payload + slot * unit_bytes;
  }
};

/// Fixed-capacity store of units in pinned host memory; so is its table of them, [sequences, layers,
/// blocks] of 4 bytes, for kernels that find units themselves.
///
/// A unit is named by (sequence, layer, block). Its bytes are the strips of a page, joined (see
/// layout.hpp). Writing is reserve - fill - commit, or abort; a unit can be read only once it is
/// committed. Reading goes through a lease, taken once for a sequence and layer: after that a
/// lookup is two indexed loads, no lock and no count.
///
/// When no slot is free, `reserve` evicts from the sequence that the policy names, last block
/// first, so that what is left of it is still a prefix. A leased sequence is never evicted from,
/// nor is the one that is being written.
///
/// @tparam Policy  eviction_policy over sequences
/// @par Threads    all members, from any thread; structure changes take one lock, `lease::find`
/// takes none
/// @par Life       outlives its leases
template <backend Backend, eviction_policy Policy = lru>
class block_store {
 public:
  /// Keeps the sequence's units where they are while it lives. Movable; the moved-from lease holds
  /// nothing.
  class lease {
   public:
    lease() = default;
    lease(lease&& other) noexcept
        : store_(std::exchange(other.store_, nullptr)),
          key_(other.key_),
          layer_(other.layer_),
          table_(other.table_) {}
    lease& operator=(lease&& other) noexcept {
      if (this == &other) return *this;
      release();
      store_ = std::exchange(other.store_, nullptr);
      key_ = other.key_;
      layer_ = other.layer_;
      table_ = other.table_;
      return *this;
    }
    ~lease() { release(); }

    /// Gives the lease back early. Idempotent.
    void release() noexcept {
      if (store_ != nullptr) store_->release_lease(key_.index);
      store_ = nullptr;
    }
    /// The committed bytes of a block, or null where the store has none. Valid while the lease
    /// lives.
    [[nodiscard]] const std::byte* find(std::int32_t block) const noexcept {
      const std::int32_t slot = slot_of(block);
      return slot < 0 ? nullptr : store_->address(slot);
    }
    /// The same for kernels; also units that are committed later are found.
    [[nodiscard]] store_view device_view() const noexcept {
      if (store_ == nullptr) return {};
      return {.slots = store_->device_table_ + (table_ - store_->table_.data()),
              .payload = store_->device_payload_,
              .unit_bytes = store_->unit_bytes_,
              .blocks = store_->options_.max_blocks};
    }
    /// True if these are the bytes of the block as they were committed, wherever they lie now: as
    /// far as the store's `integrity` tells, so always true with `none`. A block that the store
    /// does not have has no bytes.
    [[nodiscard]] bool matches(std::int32_t block, const std::byte* unit) const noexcept {
      if (store_ == nullptr || !store_->tagger_) return true;
      const std::int32_t slot = slot_of(block);
      return slot >= 0 && store_->tags_[static_cast<std::size_t>(slot)] ==
                              store_->tag(unit, key_, layer_, block);
    }
    /// Looks at the bytes in the store itself, and takes the unit out if they are not those that
    /// were committed: it is absent from here on, may be written anew, and its slot stays
    /// quarantined, for others may be reading it, until the last lease on the sequence ends.
    /// @return true if the unit was taken out. False says that the store's bytes are well (those
    ///         that did not match were damaged on their way), or that the unit is absent.
    bool drop_if_corrupt(std::int32_t block) noexcept {
      return store_ != nullptr && store_->tagger_ && slot_of(block) >= 0 &&
             store_->drop_if_corrupt(key_, layer_, block);
    }
    [[nodiscard]] explicit operator bool() const noexcept { return store_ != nullptr; }

   private:
    friend class block_store;
    lease(block_store* store, sequence_id key, std::int32_t layer, const std::int32_t* table)
        : store_(store), key_(key), layer_(layer), table_(table) {}
    [[nodiscard]] std::int32_t slot_of(std::int32_t block) const noexcept {
      if (store_ == nullptr || block < 0 || block >= store_->options_.max_blocks) return absent;
      return detail::load_mapped(table_ + block);
    }

    block_store* store_ = nullptr;
    sequence_id key_;
    std::int32_t layer_ = -1;
    const std::int32_t* table_ = nullptr;
  };

  /// @throws std::invalid_argument  on a bad geometry, a capacity below one unit, counts below 1, or
  ///                                a checksum without a hash
  /// @throws out_of_memory          when payload or table cannot be had
  block_store(Backend backend, const kv_geometry& geometry, const block_store_options& options)
      : geometry_(checked(geometry)),
        options_(detail::checked_options(geometry, options)),
        unit_bytes_(geometry.unit_bytes()),
        tagger_(options.integrity, options.checksum),
        payload_(backend, static_cast<std::size_t>(capacity_units() * unit_bytes_)),
        table_(backend, table_index(options_.max_sequences, 0, 0)),
        device_payload_(payload_.device_data()),
        device_table_(table_.device_data()),
        policy_(options.max_sequences) {
    const auto sequences = static_cast<std::size_t>(options_.max_sequences);
    sequences_.resize(sequences);
    tails_.assign(sequences * static_cast<std::size_t>(geometry_.layers), -1);
    std::fill_n(table_.data(), table_.size(), absent);
    const auto capacity = static_cast<std::size_t>(capacity_units());
    owner_.assign(capacity, {});
    if (tagger_) tags_.assign(capacity, 0);
    free_.reserve(capacity);
    for (std::size_t i = capacity; i > 0; --i) free_.push_back(static_cast<std::int32_t>(i - 1));
    free_sequences_.reserve(sequences);
    for (std::size_t i = sequences; i > 0; --i) {
      free_sequences_.push_back(static_cast<std::int32_t>(i - 1));
    }
    counts_.capacity = counts_.free = capacity_units();
  }
  block_store(const block_store&) = delete;
  block_store& operator=(const block_store&) = delete;

  [[nodiscard]] const kv_geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] std::int64_t unit_bytes() const noexcept { return unit_bytes_; }
  [[nodiscard]] std::int32_t max_blocks() const noexcept { return options_.max_blocks; }
  /// Where the units' bytes begin: pinned memory, a unit every `unit_bytes()`.
  [[nodiscard]] const std::byte* payload() const noexcept { return payload_.data(); }
  /// A consistent snapshot.
  [[nodiscard]] store_counts counts() const {
    std::lock_guard lock(mutex_);
    return counts_;
  }

  /// Begins an empty sequence; empty when `max_sequences` are open or still closing.
  [[nodiscard]] std::optional<sequence_id> open_sequence() {
    std::lock_guard lock(mutex_);
    if (free_sequences_.empty()) return std::nullopt;
    const std::int32_t index = free_sequences_.back();
    free_sequences_.pop_back();
    at(index).open = true;
    return sequence_id{index, at(index).generation};
  }

  /// Ends a sequence. Its handle is stale from here on, whatever is returned. Leases on it go on
  /// reading; writes under way end as always, and are then forgotten.
  /// @throws std::invalid_argument  on a stale handle
  /// @par Cost  O(units of the sequence)
  close_outcome close_sequence(sequence_id id) {
    std::lock_guard lock(mutex_);
    sequence_state& s = checked_sequence(id);
    s.open = false;
    ++s.generation;
    leave_policy(id.index);
    auto& from = s.leases > 0 ? counts_.pinned : counts_.evictable;
    from -= s.ready;
    counts_.writing -= s.writing;
    counts_.quarantined += s.ready + s.writing;
    if (s.leases == 0) free_ready_units(id.index);
    return finish_closing(id.index) ? close_outcome::closed : close_outcome::deferred;
  }

  /// Takes a slot for a unit that is not stored yet, evicting one unit where that is needed and
  /// allowed.
  ///
  /// @return the slot, which is the caller's until `commit` or `abort`; or why there is none, and
  ///         then nothing has changed
  /// @throws std::invalid_argument  on a stale handle
  /// @throws std::out_of_range      on a layer or block out of range
  /// @par Cost  O(1); O(layers) when it evicts
  reservation reserve(sequence_id id, std::int32_t layer, std::int32_t block) {
    std::lock_guard lock(mutex_);
    sequence_state& s = checked_sequence(id);
    check_unit(layer, block);
    const auto entry = entry_of(id.index, layer, block);
    switch (entry.load(std::memory_order_relaxed)) {
      case absent:
        break;
      case being_written:
        return {reserve_outcome::writing, host_slot::none};
      default:
        return {reserve_outcome::exists, host_slot::none};
    }
    if (free_.empty() && !evict_one(id.index)) return {reserve_outcome::full, host_slot::none};
    const std::int32_t slot = free_.back();
    free_.pop_back();
    --counts_.free;
    ++counts_.writing;
    ++s.writing;
    owner_[static_cast<std::size_t>(slot)] = {id.index, layer, block, slot_state::writing};
    entry.store(being_written, std::memory_order_relaxed);
    if (s.in_policy) policy_.touch(id.index);
    return {reserve_outcome::reserved, static_cast<host_slot>(slot)};
  }

  /// The bytes of a reserved slot, `unit_bytes()` of pinned memory: the caller's to write until
  /// commit or abort.
  /// @throws std::logic_error  if the slot is not being written
  [[nodiscard]] std::byte* writable(host_slot slot) {
    std::lock_guard lock(mutex_);
    (void)writing_owner(slot);
    return address(static_cast<std::int32_t>(slot));
  }

  /// Makes a written unit readable. If its sequence was closed meanwhile, the slot becomes free
  /// instead.
  /// @post  a lease on the sequence and layer finds the bytes as they were written
  /// @throws std::logic_error  if the slot is not being written: a second commit, or a commit after
  ///                           abort
  /// @par Cost  O(1) under the lock; before it, with a checksum, one read of the unit
  void commit(host_slot slot) { end_write(slot, true, tagger_ ? tag_to_be(slot) : 0); }

  /// Gives a reserved slot back; the unit stays absent. @throws std::logic_error as commit
  void abort(host_slot slot) { end_write(slot, false, 0); }

  /// A lease on the units of a sequence and layer, and a logical use of the sequence. It pins the
  /// whole sequence, also units that are committed later.
  /// @throws std::invalid_argument  on a stale handle
  /// @throws std::out_of_range      on a layer out of range
  /// @par Cost  O(1), under the lock; to be taken once a transfer, not once a unit
  [[nodiscard]] lease acquire(sequence_id id, std::int32_t layer) {
    std::lock_guard lock(mutex_);
    sequence_state& s = checked_sequence(id);
    check_unit(layer, 0);
    if (s.leases++ == 0) {
      counts_.evictable -= s.ready;
      counts_.pinned += s.ready;
      leave_policy(id.index);
    }
    return lease(this, id, layer, table_.data() + table_index(id.index, layer, 0));
  }

  /// True if the unit is committed. A snapshot: only a lease makes it last.
  /// @throws std::invalid_argument, std::out_of_range  as reserve
  [[nodiscard]] bool contains(sequence_id id, std::int32_t layer, std::int32_t block) const {
    std::lock_guard lock(mutex_);
    (void)checked_sequence(id);
    check_unit(layer, block);
    return entry_of(id.index, layer, block).load(std::memory_order_relaxed) >= 0;
  }

 private:
  // Values of the table that are no slot.
  static constexpr std::int32_t absent = -1;
  static constexpr std::int32_t being_written = -2;

  enum class slot_state : std::uint8_t { free, writing, ready, corrupt };
  struct slot_owner {
    std::int32_t sequence = -1;
    std::int32_t layer = -1;
    std::int32_t block = -1;
    slot_state state = slot_state::free;
  };
  struct sequence_state {
    std::uint32_t generation = 1;
    std::int32_t leases = 0;
    std::int64_t ready = 0;
    std::int64_t writing = 0;
    std::int64_t corrupt = 0;  ///< slots that are read by nobody who comes from now on
    bool open = false;
    bool in_policy = false;
  };

  [[nodiscard]] std::int64_t capacity_units() const noexcept {
    return options_.capacity_bytes / unit_bytes_;
  }
  [[nodiscard]] sequence_state& at(std::int32_t index) {
    return sequences_[static_cast<std::size_t>(index)];
  }
  [[nodiscard]] std::byte* address(std::int32_t slot) const noexcept {
    return payload_.data() + std::int64_t{slot} * unit_bytes_;
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
    return std::atomic_ref<std::int32_t>(table_[table_index(sequence, layer, block)]);
  }
  [[nodiscard]] std::int32_t& tail(std::int32_t sequence, std::int32_t layer) {
    return tails_[static_cast<std::size_t>(sequence) * static_cast<std::size_t>(geometry_.layers) +
                  static_cast<std::size_t>(layer)];
  }
  void check_unit(std::int32_t layer, std::int32_t block) const {
    detail::expects<std::out_of_range>(layer >= 0 && layer < geometry_.layers,
                                       "block_store: layer is ", layer, ", expected 0 to ",
                                       geometry_.layers - 1);
    detail::expects<std::out_of_range>(block >= 0 && block < options_.max_blocks,
                                       "block_store: block is ", block, ", expected 0 to ",
                                       options_.max_blocks - 1);
  }
  [[nodiscard]] const sequence_state& checked_sequence(sequence_id id) const {
    detail::expects(id.index >= 0 && id.index < options_.max_sequences &&
                        sequences_[static_cast<std::size_t>(id.index)].open &&
                        sequences_[static_cast<std::size_t>(id.index)].generation == id.generation,
                    "block_store: sequence (", id.index, ", generation ", id.generation,
                    ") is stale or unknown");
    return sequences_[static_cast<std::size_t>(id.index)];
  }
  [[nodiscard]] sequence_state& checked_sequence(sequence_id id) {
    return const_cast<sequence_state&>(std::as_const(*this).checked_sequence(id));
  }
  [[nodiscard]] slot_owner& writing_owner(host_slot slot) {
    const auto index = static_cast<std::int32_t>(slot);
    detail::expects<std::logic_error>(
        index >= 0 && index < counts_.capacity &&
            owner_[static_cast<std::size_t>(index)].state == slot_state::writing,
        "block_store: slot ", index, " is not being written");
    return owner_[static_cast<std::size_t>(index)];
  }

  /// A sequence is in the policy exactly while it is open, not leased, and has something to give
  /// up.
  void enter_policy(std::int32_t index) {
    sequence_state& s = at(index);
    if (s.in_policy || !s.open || s.leases > 0 || s.ready == 0) return;
    policy_.insert(index, {});
    s.in_policy = true;
  }
  void leave_policy(std::int32_t index) {
    if (!at(index).in_policy) return;
    policy_.erase(index);
    at(index).in_policy = false;
  }

  void free_slot(std::int32_t slot) {
    owner_[static_cast<std::size_t>(slot)] = {};
    free_.push_back(slot);
    ++counts_.free;
  }

  /// Frees the last block of the victim, of the highest layer that has it.
  [[nodiscard]] bool evict_one(std::int32_t writer) {
    const std::int32_t victim =
        policy_.victim([writer](std::int32_t sequence) { return sequence != writer; });
    if (victim < 0) return false;
    std::int32_t layer = 0;
    for (std::int32_t l = 0; l < geometry_.layers; ++l) {
      if (settled_tail(victim, l) >= tail(victim, layer)) layer = l;
    }
    const auto entry = entry_of(victim, layer, tail(victim, layer));
    const std::int32_t slot = entry.exchange(absent, std::memory_order_relaxed);
    settled_tail(victim, layer);
    --counts_.evictable;
    if (--at(victim).ready == 0) {
      policy_.evict(victim);
      at(victim).in_policy = false;
    }
    free_slot(slot);
    return true;
  }

  /// The last ready block of a layer, -1 if none. Blocks that are being written are passed over.
  std::int32_t settled_tail(std::int32_t sequence, std::int32_t layer) {
    std::int32_t& block = tail(sequence, layer);
    while (block >= 0 && entry_of(sequence, layer, block).load(std::memory_order_relaxed) < 0) {
      --block;
    }
    return block;
  }

  [[nodiscard]] std::uint64_t tag(const std::byte* unit, sequence_id id, std::int32_t layer,
                                  std::int32_t block) const noexcept {
    return tagger_(unit, static_cast<std::size_t>(unit_bytes_),
                   detail::unit_seed(id.index, id.generation, layer, block));
  }
  /// The tag of a unit that is about to be committed. The bytes are the caller's still, so the lock
  /// is not held while they are read.
  [[nodiscard]] std::uint64_t tag_to_be(host_slot slot) {
    slot_owner owner;
    sequence_id id;
    {
      std::lock_guard lock(mutex_);
      owner = writing_owner(slot);
      id = {owner.sequence, at(owner.sequence).generation};
    }
    return tag(address(static_cast<std::int32_t>(slot)), id, owner.layer, owner.block);
  }

  /// Under the lock, so that a unit written anew meanwhile is judged by its own bytes.
  bool drop_if_corrupt(sequence_id id, std::int32_t layer, std::int32_t block) noexcept {
    std::lock_guard lock(mutex_);
    auto entry = entry_of(id.index, layer, block);
    const std::int32_t slot = entry.load(std::memory_order_relaxed);
    if (slot < 0) return false;
    const auto i = static_cast<std::size_t>(slot);
    if (tags_[i] == tag(address(slot), id, layer, block)) return false;
    sequence_state& s = at(id.index);
    entry.store(absent, std::memory_order_relaxed);
    owner_[i].state = slot_state::corrupt;
    --s.ready;
    ++s.corrupt;
    if (s.open) {  // leased, so it was pinned; those of a closed sequence are quarantined already
      --counts_.pinned;
      ++counts_.quarantined;
    }
    return true;
  }

  /// After the last lease. A search, but it is rare.
  void free_corrupt_units(std::int32_t index) {
    for (std::size_t i = 0; i < owner_.size() && at(index).corrupt > 0; ++i) {
      if (owner_[i].sequence != index || owner_[i].state != slot_state::corrupt) continue;
      --at(index).corrupt;
      --counts_.quarantined;
      free_slot(static_cast<std::int32_t>(i));
    }
  }

  void end_write(host_slot slot, bool keep, std::uint64_t tag_of_unit) {
    std::lock_guard lock(mutex_);
    slot_owner& owner = writing_owner(slot);
    const std::int32_t index = owner.sequence;
    sequence_state& s = at(index);
    const auto entry = entry_of(index, owner.layer, owner.block);
    --s.writing;
    if (!s.open) {
      entry.store(absent, std::memory_order_relaxed);
      --counts_.quarantined;
      free_slot(static_cast<std::int32_t>(slot));
      finish_closing(index);
      return;
    }
    --counts_.writing;
    if (!keep) {
      entry.store(absent, std::memory_order_relaxed);
      free_slot(static_cast<std::int32_t>(slot));
      return;
    }
    owner.state = slot_state::ready;
    if (tagger_) tags_[static_cast<std::size_t>(slot)] = tag_of_unit;
    if (tail(index, owner.layer) < owner.block) tail(index, owner.layer) = owner.block;
    ++s.ready;
    ++(s.leases > 0 ? counts_.pinned : counts_.evictable);
    enter_policy(index);
    // Readers load the slot without the lock: the bytes and their tag come before it.
    entry.store(static_cast<std::int32_t>(slot), std::memory_order_release);
  }

  void release_lease(std::int32_t index) noexcept {
    std::lock_guard lock(mutex_);
    sequence_state& s = at(index);
    if (--s.leases > 0) return;
    if (s.corrupt > 0) free_corrupt_units(index);
    if (s.open) {
      counts_.pinned -= s.ready;
      counts_.evictable += s.ready;
      enter_policy(index);
    } else {
      free_ready_units(index);
      finish_closing(index);
    }
  }

  /// Frees the readable units of a closed sequence, which are quarantined.
  void free_ready_units(std::int32_t index) {
    for (std::int32_t layer = 0; layer < geometry_.layers; ++layer) {
      for (std::int32_t block = tail(index, layer); block >= 0; --block) {
        const auto entry = entry_of(index, layer, block);
        const std::int32_t slot = entry.load(std::memory_order_relaxed);
        if (slot < 0) continue;
        entry.store(absent, std::memory_order_relaxed);
        --counts_.quarantined;
        free_slot(slot);
      }
      tail(index, layer) = -1;
    }
    at(index).ready = 0;
  }

  bool finish_closing(std::int32_t index) {
    const sequence_state& s = at(index);
    if (s.open || s.leases > 0 || s.writing > 0) return false;
    free_sequences_.push_back(index);
    return true;
  }

  kv_geometry geometry_;
  block_store_options options_;
  std::int64_t unit_bytes_;
  tagger tagger_;
  pinned_buffer<std::byte, Backend> payload_;
  pinned_buffer<std::int32_t, Backend> table_;  ///< [sequences, layers, blocks] slots
  const std::byte* device_payload_;             ///< the same, as kernels see them
  const std::int32_t* device_table_;
  mutable std::mutex mutex_;
  Policy policy_;
  store_counts counts_;
  std::vector<sequence_state> sequences_;
  std::vector<std::int32_t> free_sequences_;
  std::vector<std::int32_t> tails_;  ///< [sequences, layers] upper bound of the last ready block
  std::vector<slot_owner> owner_;    ///< [capacity]
  std::vector<std::uint64_t> tags_;  ///< [capacity] of ready units, or empty
  std::vector<std::int32_t> free_;   ///< slots, the next one last
};

}  // namespace pulseinfer
