// SPDX-License-Identifier: Apache-2.0
/// @file
/// The lists that eviction policies are made of, and the checks that all of them make.
#pragma once

#include <cstdint>
#include <limits>
#include <string_view>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Doubly linked lists over the groups 0 to capacity-1, a group in one of them or in none. The
/// policy knows which one it is. All calls are O(1) and allocate nothing; memory is 8 bytes a group.
class group_lists {
 public:
  static constexpr std::int32_t none = -1;

  /// @param policy  its name, for the texts of errors; lives as long as this
  /// @throws std::invalid_argument  if the capacity is negative, or leaves no indices for the ends
  group_lists(std::string_view policy, std::int32_t capacity, std::int32_t lists)
      : policy_(policy), capacity_(capacity) {
    expects(capacity >= 0, policy, ": capacity is ", capacity, ", expected at least 0");
    expects(capacity <= std::numeric_limits<std::int32_t>::max() - lists, policy, ": capacity is ",
            capacity, ", expected at most ", std::numeric_limits<std::int32_t>::max() - lists);
    links_.assign(static_cast<std::size_t>(capacity) + static_cast<std::size_t>(lists),
                  link{none, none});
    for (std::int32_t end = capacity; end < capacity + lists; ++end) at(end) = {end, end};
  }

  [[nodiscard]] std::int32_t capacity() const noexcept { return capacity_; }

  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the next two
  [[nodiscard]] bool contains(std::int32_t group) const {
    expects<std::out_of_range>(group >= 0 && group < capacity_, policy_, ": group is ", group,
                               ", expected 0 to ", capacity_ - 1);
    return at(group).next != none;
  }
  /// @throws std::logic_error  if the group is in a list
  void expect_out(std::int32_t group) const {
    expects<std::logic_error>(!contains(group), policy_, ": group ", group, " is in already");
  }
  /// @throws std::logic_error  if the group is in none
  void expect_in(std::int32_t group) const {
    expects<std::logic_error>(contains(group), policy_, ": group ", group, " is not in");
  }

  // From here on groups are not checked: a policy did so before it changed anything.

  void push_back(std::int32_t list, std::int32_t group) noexcept {
    join(at(end(list)).previous, group, end(list));
  }
  void push_front(std::int32_t list, std::int32_t group) noexcept {
    join(end(list), group, at(end(list)).next);
  }
  void remove(std::int32_t group) noexcept {
    link& l = at(group);
    at(l.previous).next = l.next;
    at(l.next).previous = l.previous;
    l = {none, none};
  }
  [[nodiscard]] std::int32_t front(std::int32_t list) const noexcept { return after(end(list)); }
  [[nodiscard]] std::int32_t back(std::int32_t list) const noexcept { return before(end(list)); }
  /// The neighbour in the group's list, none at its end.
  [[nodiscard]] std::int32_t after(std::int32_t group) const noexcept {
    return at(group).next < capacity_ ? at(group).next : none;
  }
  [[nodiscard]] std::int32_t before(std::int32_t group) const noexcept {
    return at(group).previous < capacity_ ? at(group).previous : none;
  }
  /// The first group of a list for which the predicate is true, or none. One step for each that is
  /// refused.
  template <class CanEvict>
  [[nodiscard]] std::int32_t first(std::int32_t list, CanEvict& can_evict) const {
    std::int32_t refused = none;
    return first(list, can_evict, refused);
  }
  /// The same, behind the group `refused` if that is one; it becomes the last that is refused now.
  template <class CanEvict>
  [[nodiscard]] std::int32_t first(std::int32_t list, CanEvict& can_evict,
                                   std::int32_t& refused) const {
    std::int32_t group = refused == none ? front(list) : after(refused);
    for (; group != none && !can_evict(group); group = after(group)) refused = group;
    return group;
  }

 private:
  struct link {
    std::int32_t previous;
    std::int32_t next;
  };

  [[nodiscard]] std::int32_t end(std::int32_t list) const noexcept { return capacity_ + list; }
  [[nodiscard]] link& at(std::int32_t i) noexcept { return links_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] const link& at(std::int32_t i) const noexcept {
    return links_[static_cast<std::size_t>(i)];
  }
  void join(std::int32_t previous, std::int32_t group, std::int32_t next) noexcept {
    at(group) = {previous, next};
    at(previous).next = group;
    at(next).previous = group;
  }

  std::string_view policy_;
  std::int32_t capacity_;
  std::vector<link> links_;  ///< [capacity] groups, then [lists] where each begins and ends
};

}  // namespace pulseinfer::detail
