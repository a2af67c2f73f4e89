// SPDX-License-Identifier: Apache-2.0
/// @file
/// An eviction policy of three queues, on which a use writes nothing but a counter.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/ghost_keys.hpp"
#include "pulseinfer/detail/group_lists.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Three first-in first-out queues: groups enter a small one; what is used at least twice there
/// moves on to the main one, the rest goes, and its keys are remembered in the third; a key that
/// comes back while it is remembered enters the main queue. There a group goes round once more for
/// each of its uses, up to three. About 55 bytes a group.
///
/// @par Threads  one at a time: a store calls it under its lock
/// @see Yang, Zhang, Qiu, Yue, Vigfusson: "FIFO queues are all you need for cache eviction", SOSP
///      2023
class s3_fifo {
 public:
  /// @param capacity      groups are 0 to capacity-1
  /// @param small_groups  the small queue gives up while it has at least so many: a tenth, and at
  ///                      least 1, unless it is said. As many keys are remembered as the main queue
  ///                      has groups then.
  /// @throws std::invalid_argument  if capacity is negative, or small_groups not 0 to capacity
  s3_fifo(std::int32_t capacity, std::int32_t small_groups)
      : lists_("s3_fifo", capacity, 2),
        groups_(static_cast<std::size_t>(capacity)),
        ghosts_(ghosts_of(capacity, small_groups)),
        small_limit_(small_groups) {}
  explicit s3_fifo(std::int32_t capacity)
      : s3_fifo(capacity, std::min(capacity, std::max(1, capacity / 10))) {}

  [[nodiscard]] std::int32_t capacity() const noexcept { return lists_.capacity(); }
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the calls below
  [[nodiscard]] bool contains(std::int32_t group) const { return lists_.contains(group); }

  /// Enters a group: in the main queue if its key is remembered, else in the small one.
  /// @throws std::logic_error if it is in the order
  void insert(std::int32_t group, const eviction_entry& entry) {
    lists_.expect_out(group);
    const bool known = ghosts_.take(entry.key).has_value();
    at(group).key = entry.key;
    enter(group, known ? main : small);
  }
  /// Counts a use. @throws std::logic_error if it is not in the order
  void touch(std::int32_t group) {
    lists_.expect_in(group);
    at(group).uses = std::min(at(group).uses + 1, most_uses);
  }
  /// Takes a group out, and remembers nothing. @throws std::logic_error if it is not in the order
  void erase(std::int32_t group) {
    lists_.expect_in(group);
    leave(group);
  }
  /// Takes a group out; its key is remembered if it was in the small queue.
  /// @throws std::logic_error if it is not in the order
  void evict(std::int32_t group) {
    erase(group);
    if (at(group).queue == small) ghosts_.push(at(group).key, {});
  }
  /// The group that goes first of those that the predicate allows, -1 if there is none. Moves on
  /// those of them that were used.
  /// @par Cost  O(1) on average: each step but those over refused groups takes a use off a counter
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) {
    std::int32_t refused[2] = {none, none};  // so that each is asked about once
    while (true) {
      const std::int32_t from = small_size_ > 0 && small_size_ >= small_limit_ ? small : main;
      std::int32_t group = lists_.first(from, can_evict, refused[from]);
      if (group == none) {
        const std::int32_t other = from == small ? main : small;
        group = lists_.first(other, can_evict, refused[other]);
      }
      if (group == none) return none;
      if (at(group).queue == small) {
        if (at(group).uses < uses_to_move_on) return group;
        leave(group);
        enter(group, main);
      } else {
        if (at(group).uses == 0) return group;
        --at(group).uses;
        lists_.remove(group);
        lists_.push_back(main, group);
      }
    }
  }

 private:
  // Lists, first in first.
  static constexpr std::int32_t small = 0;
  static constexpr std::int32_t main = 1;
  static constexpr std::int32_t none = detail::group_lists::none;
  static constexpr int most_uses = 3;
  static constexpr int uses_to_move_on = 2;
  struct nothing {};
  struct state {
    std::uint64_t key = 0;
    std::int32_t queue = small;
    int uses = 0;
  };

  [[nodiscard]] static std::int32_t ghosts_of(std::int32_t capacity, std::int32_t small_groups) {
    detail::expects(small_groups >= 0 && small_groups <= capacity, "s3_fifo: small_groups is ",
                    small_groups, ", expected 0 to ", capacity);
    return capacity - small_groups;
  }
  [[nodiscard]] state& at(std::int32_t group) noexcept {
    return groups_[static_cast<std::size_t>(group)];
  }
  void enter(std::int32_t group, std::int32_t queue) noexcept {
    lists_.push_back(queue, group);
    at(group).queue = queue;
    at(group).uses = 0;
    if (queue == small) ++small_size_;
  }
  void leave(std::int32_t group) noexcept {
    lists_.remove(group);
    if (at(group).queue == small) --small_size_;
  }

  detail::group_lists lists_;
  std::vector<state> groups_;
  detail::ghost_keys<nothing> ghosts_;
  std::int32_t small_limit_;
  std::int32_t small_size_ = 0;
};
static_assert(eviction_policy<s3_fifo>);

}  // namespace pulseinfer
