// SPDX-License-Identifier: Apache-2.0
/// @file
/// An eviction policy that knows which block of a prefix follows which.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/group_lists.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Leaves first, the least recently used of them before the others. A group is a leaf while there
/// is none that named it as its `parent`: so a block never goes before those that can only be read
/// behind it, in whichever order they were stored or used. 28 bytes a group.
///
/// A group whose children have all gone is a leaf from then on, as recent as its own last use; if a
/// search for a victim has passed it meanwhile, it was less recent than all leaves, and goes first.
///
/// When a parent leaves all the same (its sequence was closed, it was damaged), its children are
/// roots: who enters in its place later is not their parent.
///
/// @pre  nobody is its own ancestor; such a ring would have no leaf
/// @par Threads  one at a time: a store calls it under its lock
class prefix_tree_lru {
 public:
  /// @param capacity  groups are 0 to capacity-1
  /// @throws std::invalid_argument  if it is negative
  explicit prefix_tree_lru(std::int32_t capacity)
      : lists_("prefix_tree_lru", capacity, 2), nodes_(static_cast<std::size_t>(capacity)) {}

  [[nodiscard]] std::int32_t capacity() const noexcept { return lists_.capacity(); }
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the calls below
  [[nodiscard]] bool contains(std::int32_t group) const { return lists_.contains(group); }

  /// Enters a group as the most recently used. Its parent is there, or comes later.
  /// @throws std::out_of_range  also if the parent is neither -1 nor a group
  /// @throws std::logic_error   if it is in the order, or its own parent
  void insert(std::int32_t group, const eviction_entry& entry) {
    lists_.expect_out(group);
    detail::expects<std::out_of_range>(entry.parent >= -1 && entry.parent < capacity(),
                                       "prefix_tree_lru: parent is ", entry.parent,
                                       ", expected -1 to ", capacity() - 1);
    detail::expects<std::logic_error>(entry.parent != group, "prefix_tree_lru: group ", group,
                                      " is its own parent");
    at(group).parent = entry.parent;
    if (entry.parent >= 0) {
      at(group).parent_life = at(entry.parent).life;
      ++at(entry.parent).children;
    }
    lists_.push_back(by_use, group);
  }
  /// Makes a group the most recently used. @throws std::logic_error if it is not in the order
  void touch(std::int32_t group) {
    lists_.expect_in(group);
    lists_.remove(group);
    lists_.push_back(by_use, group);
    at(group).passed = false;
  }
  /// Takes a group out. @throws std::logic_error if it is not in the order
  void erase(std::int32_t group) {
    lists_.expect_in(group);
    lists_.remove(group);
    node& left = at(group);
    ++left.life;
    left.children = 0;
    left.passed = false;
    if (left.parent < 0 || at(left.parent).life != left.parent_life) return;
    node& parent = at(left.parent);
    if (--parent.children > 0 || !parent.passed) return;
    parent.passed = false;
    lists_.remove(left.parent);
    lists_.push_front(by_use, left.parent);
  }
  void evict(std::int32_t group) { erase(group); }
  /// The least recently used leaf that the predicate allows, -1 if there is none.
  /// @par Cost  O(1) on average: who is no leaf is passed once after each of its uses
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) {
    std::int32_t group = lists_.front(by_use);
    while (group != detail::group_lists::none) {
      const std::int32_t next = lists_.after(group);
      if (can_evict(group)) {
        if (at(group).children == 0) return group;
        lists_.remove(group);
        lists_.push_back(inner, group);
        at(group).passed = true;
      }
      group = next;
    }
    return group;
  }

 private:
  // Lists.
  static constexpr std::int32_t by_use = 0;  ///< least recently used first
  static constexpr std::int32_t inner = 1;   ///< have children, and were passed by a search
  struct node {
    std::int32_t parent = -1;
    std::uint32_t parent_life = 0;  ///< which of those who were at that place one after the other
    std::int32_t children = 0;      ///< may have some before it enters
    std::uint32_t life = 0;
    bool passed = false;  ///< is in `inner`
  };

  [[nodiscard]] node& at(std::int32_t group) noexcept {
    return nodes_[static_cast<std::size_t>(group)];
  }

  detail::group_lists lists_;
  std::vector<node> nodes_;
};
static_assert(eviction_policy<prefix_tree_lru>);

}  // namespace pulseinfer
