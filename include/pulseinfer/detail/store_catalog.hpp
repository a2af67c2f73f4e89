// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which slots hold which block, and which sequences hold the block.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

enum class slot_state : std::uint8_t { free, writing, ready, corrupt };

/// A number that may be read beside who writes it.
class shared_number {
 public:
  shared_number(std::int32_t value) noexcept : value_(value) {}
  shared_number(const shared_number& other) noexcept : value_(std::int32_t{other}) {}
  shared_number& operator=(const shared_number& other) noexcept {
    value_.store(std::int32_t{other}, std::memory_order_relaxed);
    return *this;
  }
  operator std::int32_t() const noexcept { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::int32_t> value_;
};

/// A block of tokens, whoever holds it: a place in the order of its sequences, and up to a slot a
/// layer. All who hold it hold it at the same position, for they share all that is before it.
struct stored_block {
  shared_number position = -1;  ///< of a free one: the next free one
  std::int32_t first_slot = -1;
  std::int32_t first_holder = -1;  ///< a sequence
  std::int32_t ready = 0;          ///< slots of each state
  std::int32_t writing = 0;
  std::int32_t corrupt = 0;
  std::int32_t priority = 0;     ///< while it has a name, see eviction_entry
  std::uint32_t generation = 0;  ///< of this use of the record
  std::int64_t keep_until = 0;
  std::int32_t namesake = -1;             ///< the block that had its name already
  std::uint32_t namesake_generation = 0;  ///< of that record then
  std::uint32_t seen = 0;                 ///< mark of a count
  bool has_name = false;
  bool is_whole = false;   ///< all its layers can be read
  bool is_cached = false;  ///< nobody holds it, and the policy has it
  bool is_orphan = false;  ///< all who held it are closed: what is being written is not wanted

  [[nodiscard]] bool is_empty() const noexcept { return ready + writing + corrupt == 0; }
  [[nodiscard]] bool is_ready_only() const noexcept { return writing + corrupt == 0; }
};

/// The books of a store: blocks, their slots, their holders. It knows no bytes and no locks.
///
/// All calls allocate nothing; those on a slot in the middle of a block are O(layers).
/// @par Threads  one at a time, but `block_of` may be read beside a writer by who knows that the
///               block is there
class store_catalog {
 public:
  static constexpr std::int32_t none = -1;

  store_catalog(std::int32_t slots, std::int32_t blocks, std::int32_t sequences,
                std::int32_t positions)
      : positions_(static_cast<std::size_t>(positions)),
        slots_(static_cast<std::size_t>(slots)),
        blocks_(static_cast<std::size_t>(blocks)),
        holdings_(static_cast<std::size_t>(sequences) * positions_) {
    for (std::int32_t i = blocks; i > 0; --i) forget(i - 1);
  }

  [[nodiscard]] stored_block& at(std::int32_t block) noexcept {
    return blocks_[static_cast<std::size_t>(block)];
  }
  [[nodiscard]] const stored_block& at(std::int32_t block) const noexcept {
    return blocks_[static_cast<std::size_t>(block)];
  }
  [[nodiscard]] std::int32_t free_blocks() const noexcept { return free_blocks_; }
  /// The block at a position of a sequence, or none.
  [[nodiscard]] std::int32_t block_of(std::int32_t sequence, std::int32_t position) const noexcept {
    return holding_at(sequence, position).block.load(std::memory_order_relaxed);
  }

  /// A block without slots and holders; there is a free one.
  [[nodiscard]] std::int32_t make(std::int32_t position) noexcept {
    const std::int32_t block = free_;
    free_ = at(block).position;
    --free_blocks_;
    at(block) = {.position = position, .generation = at(block).generation + 1};
    return block;
  }
  /// Forgets a block that has no slots and no holders.
  void forget(std::int32_t block) noexcept {
    at(block).position = std::exchange(free_, block);
    ++free_blocks_;
  }

  void hold(std::int32_t block, std::int32_t sequence) noexcept {
    holding& h = holding_at(sequence, at(block).position);
    h.block.store(block, std::memory_order_relaxed);
    h.next = std::exchange(at(block).first_holder, sequence);
  }
  void let_go(std::int32_t block, std::int32_t sequence) noexcept {
    const std::int32_t position = at(block).position;
    std::int32_t* link = &at(block).first_holder;
    while (*link != sequence) link = &holding_at(*link, position).next;
    holding& h = holding_at(sequence, position);
    *link = h.next;
    h.block.store(none, std::memory_order_relaxed);
  }
  /// Calls visit(sequence) for all who hold it; what it is called for it may let go.
  template <class Visit>
  void each_holder(std::int32_t block, Visit visit) const {
    const std::int32_t position = at(block).position;
    for (std::int32_t s = at(block).first_holder; s != none;) {
      const std::int32_t next = holding_at(s, position).next;
      visit(s);
      s = next;
    }
  }
  template <class Predicate>
  [[nodiscard]] bool all_holders(std::int32_t block, Predicate is_so) const {
    const std::int32_t position = at(block).position;
    std::int32_t s = at(block).first_holder;
    while (s != none && is_so(s)) s = holding_at(s, position).next;
    return s == none;
  }

  [[nodiscard]] slot_state state_of(std::int32_t slot) const noexcept {
    return slot_at(slot).state;
  }
  [[nodiscard]] std::int32_t block_of_slot(std::int32_t slot) const noexcept {
    return slot_at(slot).block;
  }
  [[nodiscard]] std::int32_t layer_of_slot(std::int32_t slot) const noexcept {
    return static_cast<std::int32_t>(slot_at(slot).layer);
  }
  /// How often a slot was given out to be written, the last time included; counts round.
  [[nodiscard]] std::uint32_t writes_of(std::int32_t slot) const noexcept {
    return slot_at(slot).writes;
  }
  [[nodiscard]] std::int32_t slots() const noexcept {
    return static_cast<std::int32_t>(slots_.size());
  }

  /// Gives a free slot to a layer of a block, to be written.
  void add_slot(std::int32_t slot, std::int32_t block, std::int32_t layer) noexcept {
    slot_at(slot) = {block, std::exchange(at(block).first_slot, slot),
                     static_cast<std::uint32_t>(layer) & 0xffffffu, slot_state::writing,
                     slot_at(slot).writes + 1};
    ++at(block).writing;
  }
  void set_state(std::int32_t slot, slot_state to) noexcept {
    stored_block& b = at(block_of_slot(slot));
    --count(b, slot_at(slot).state);
    ++count(b, to);
    slot_at(slot).state = to;
  }
  void remove_slot(std::int32_t slot) noexcept {
    stored_block& b = at(block_of_slot(slot));
    std::int32_t* link = &b.first_slot;
    while (*link != slot) link = &slot_at(*link).next;
    *link = slot_at(slot).next;
    --count(b, slot_at(slot).state);
    slot_at(slot) = {.writes = slot_at(slot).writes};
  }
  /// The slot of a layer of a block that is written or can be read, or none. The last one that was
  /// added is found first.
  [[nodiscard]] std::int32_t slot_of(std::int32_t block, std::int32_t layer) const noexcept {
    std::int32_t slot = at(block).first_slot;
    while (slot != none && (layer_of_slot(slot) != layer || state_of(slot) == slot_state::corrupt))
      slot = slot_at(slot).next;
    return slot;
  }
  /// Calls visit(slot, layer) for the slots of a block in one state; what it is called for it may
  /// remove.
  template <class Visit>
  void each_slot(std::int32_t block, slot_state state, Visit visit) const {
    for (std::int32_t slot = at(block).first_slot; slot != none;) {
      const slot_record s = slot_at(slot);
      if (s.state == state) visit(slot, static_cast<std::int32_t>(s.layer));
      slot = s.next;
    }
  }

  /// Bytes of the books.
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(slots_.size() * sizeof(slot_record) +
                                     blocks_.size() * sizeof(stored_block) +
                                     holdings_.size() * sizeof(holding));
  }

 private:
  struct slot_record {
    std::int32_t block = none;
    std::int32_t next = none;  ///< slot of the same block
    std::uint32_t layer : 24 = 0;
    slot_state state = slot_state::free;
    std::uint32_t writes = 0;  ///< times that it was given out
  };
  struct holding {
    std::atomic<std::int32_t> block{none};
    std::int32_t next = none;  ///< sequence that holds the same block
  };

  [[nodiscard]] slot_record& slot_at(std::int32_t slot) noexcept {
    return slots_[static_cast<std::size_t>(slot)];
  }
  [[nodiscard]] const slot_record& slot_at(std::int32_t slot) const noexcept {
    return slots_[static_cast<std::size_t>(slot)];
  }
  [[nodiscard]] const holding& holding_at(std::int32_t sequence,
                                          std::int32_t position) const noexcept {
    return holdings_[static_cast<std::size_t>(sequence) * positions_ +
                     static_cast<std::size_t>(position)];
  }
  [[nodiscard]] holding& holding_at(std::int32_t sequence, std::int32_t position) noexcept {
    return const_cast<holding&>(std::as_const(*this).holding_at(sequence, position));
  }
  [[nodiscard]] static std::int32_t& count(stored_block& b, slot_state state) noexcept {
    return state == slot_state::writing ? b.writing
           : state == slot_state::ready ? b.ready
                                        : b.corrupt;
  }

  std::size_t positions_;
  std::vector<slot_record> slots_;
  std::vector<stored_block> blocks_;
  std::vector<holding> holdings_;  ///< [sequences, positions]
  std::int32_t free_ = none;       ///< the first free block
  std::int32_t free_blocks_ = 0;
};

}  // namespace pulseinfer::detail
