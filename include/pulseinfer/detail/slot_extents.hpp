// SPDX-License-Identifier: Apache-2.0
/// @file
/// Free slots of a store, handed out so that units that are read together lie together.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Slots 0 to count-1, in extents of 16. Who asks for the slot behind one that he has gets it if it
/// is free and in the same extent; whoever cannot gets the first of an extent that is free as a
/// whole, so that his next ones find room behind it; where there is none, any.
///
/// All calls are O(1) and allocate nothing. A slot costs half a byte and a bit more.
/// @par Threads  one at a time
class slot_extents {
 public:
  static constexpr std::int32_t none = -1;
  static constexpr std::int32_t extent_slots = 16;

  /// @param count  of slots, all free; at least 0
  explicit slot_extents(std::int32_t count) : free_(count) {
    const auto extents = (static_cast<std::size_t>(count) + extent_slots - 1) / extent_slots;
    extents_.resize(extents + lists);
    for (std::size_t i = extents; i < extents + lists; ++i) {
      extents_[i] = {.previous = static_cast<std::int32_t>(i),
                     .next = static_cast<std::int32_t>(i)};
    }
    for (std::size_t i = 0; i < extents; ++i) {
      const std::int32_t left = count - static_cast<std::int32_t>(i) * extent_slots;
      extents_[i].free =
          left >= extent_slots ? all_free : static_cast<std::uint16_t>((1u << left) - 1);
      push_back(list_of(extents_[i].free), static_cast<std::int32_t>(i));
    }
  }

  /// Bytes of the books.
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(extents_.size() * sizeof(extent));
  }
  /// Slots that are free.
  [[nodiscard]] std::int32_t size() const noexcept { return free_; }

  /// A free slot, none if there is none: the one behind `after` if that can be.
  [[nodiscard]] std::int32_t take(std::int32_t after) noexcept {
    if (free_ == 0) return none;
    const std::int32_t wanted = after + 1;
    if (after >= 0 && wanted % extent_slots != 0 && is_free(wanted)) return take_slot(wanted);
    std::int32_t first = at(end(whole)).next;
    if (first == end(whole)) first = at(end(broken)).next;
    return take_slot(first * extent_slots + std::countr_zero(at(first).free));
  }

  /// Takes a slot back. It is the caller's duty that it was taken.
  void give(std::int32_t slot) noexcept {
    change(slot / extent_slots,
           static_cast<std::uint16_t>(at(slot / extent_slots).free | 1u << slot % extent_slots));
    ++free_;
  }

 private:
  static constexpr std::uint16_t all_free = 0xffff;
  enum list : std::size_t { whole, broken, lists };  // an extent without a free slot is in neither

  struct extent {
    std::int32_t previous = none;
    std::int32_t next = none;
    std::uint16_t free = 0;  ///< a bit a slot
  };

  [[nodiscard]] extent& at(std::int32_t i) noexcept {
    return extents_[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] std::int32_t end(list of) const noexcept {
    return static_cast<std::int32_t>(extents_.size() - lists + of);
  }
  [[nodiscard]] static list list_of(std::uint16_t free) noexcept {
    return free == all_free ? whole : free != 0 ? broken : lists;
  }
  [[nodiscard]] bool is_free(std::int32_t slot) noexcept {
    const auto i = static_cast<std::size_t>(slot / extent_slots);
    return i < extents_.size() - lists && (extents_[i].free >> slot % extent_slots & 1) != 0;
  }
  std::int32_t take_slot(std::int32_t slot) noexcept {
    change(slot / extent_slots,
           static_cast<std::uint16_t>(at(slot / extent_slots).free & ~(1u << slot % extent_slots)));
    --free_;
    return slot;
  }
  void change(std::int32_t i, std::uint16_t free) noexcept {
    const list before = list_of(at(i).free);
    const list now = list_of(free);
    at(i).free = free;
    if (before == now) return;
    if (before != lists) {
      at(at(i).previous).next = at(i).next;
      at(at(i).next).previous = at(i).previous;
    }
    if (now != lists) push_back(now, i);
  }
  void push_back(list to, std::int32_t i) noexcept {
    if (to == lists) return;
    extent& e = at(i);
    e.previous = at(end(to)).previous;
    e.next = end(to);
    at(e.previous).next = i;
    at(end(to)).previous = i;
  }

  std::int32_t free_;
  std::vector<extent> extents_;  ///< and behind them the ends of the two lists
};

}  // namespace pulseinfer::detail
