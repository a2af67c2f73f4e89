// SPDX-License-Identifier: Apache-2.0
/// @file
/// An eviction policy of one queue and a hand, on which a use writes one bit.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/group_lists.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// SIEVE: groups stand in the order in which they came. A hand goes from the oldest to the newest
/// and round again; it passes over those that were used since it passed last, and the first that
/// was not goes. Nobody moves. 9 bytes a group.
///
/// @par Threads  one at a time: a store calls it under its lock
/// @see Zhang, Yang, Yue, Vigfusson, Rashmi: "SIEVE is simpler than LRU: an efficient turn-key
///      eviction algorithm for web caches", NSDI 2024
class sieve {
 public:
  /// @param capacity  groups are 0 to capacity-1
  /// @throws std::invalid_argument  if it is negative
  explicit sieve(std::int32_t capacity)
      : lists_("sieve", capacity, 1), used_(static_cast<std::size_t>(capacity), 0) {}

  [[nodiscard]] std::int32_t capacity() const noexcept { return lists_.capacity(); }
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the calls below
  [[nodiscard]] bool contains(std::int32_t group) const { return lists_.contains(group); }

  /// Enters a group as the newest. @throws std::logic_error if it is in the order
  void insert(std::int32_t group, const eviction_entry& /*entry*/) {
    lists_.expect_out(group);
    lists_.push_back(0, group);
    used(group) = 0;
  }
  /// Marks a group as used. @throws std::logic_error if it is not in the order
  void touch(std::int32_t group) {
    lists_.expect_in(group);
    used(group) = 1;
  }
  /// Takes a group out. @throws std::logic_error if it is not in the order
  void erase(std::int32_t group) {
    lists_.expect_in(group);
    if (hand_ == group) hand_ = lists_.after(group);
    lists_.remove(group);
  }
  void evict(std::int32_t group) { erase(group); }
  /// The group that goes first of those that the predicate allows, -1 if there is none. Takes marks
  /// off those that it allows, and moves the hand.
  /// @par Cost  O(1) on average: each step but those over refused groups takes a mark off
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) {
    const std::int32_t start = hand_ != none ? hand_ : lists_.front(0);
    if (start == none) return none;
    // At most two rounds: after the first, nobody who is allowed has a mark.
    for (bool may_go_round = true; may_go_round;) {
      may_go_round = false;
      std::int32_t group = start;
      do {
        if (can_evict(group)) {
          if (used(group) == 0) return hand_ = group;
          used(group) = 0;
          may_go_round = true;
        }
        group = lists_.after(group);
        if (group == none) group = lists_.front(0);
      } while (group != start);
    }
    return none;
  }

 private:
  static constexpr std::int32_t none = detail::group_lists::none;

  [[nodiscard]] std::uint8_t& used(std::int32_t group) noexcept {
    return used_[static_cast<std::size_t>(group)];
  }

  detail::group_lists lists_;
  std::vector<std::uint8_t> used_;
  std::int32_t hand_ = none;  ///< who is looked at next; none: the oldest
};
static_assert(eviction_policy<sieve>);

}  // namespace pulseinfer
