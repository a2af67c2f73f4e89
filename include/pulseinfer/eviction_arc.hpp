// SPDX-License-Identifier: Apache-2.0
/// @file
/// An eviction policy that learns from what it should not have given up.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/ghost_keys.hpp"
#include "pulseinfer/detail/group_lists.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Adaptive replacement cache: a list of what was used once and one of what was used again, both
/// least recently used first, and for each the keys of what was given up of it. A key that comes
/// back to the list of the once used says that it should be longer; one that comes back to the
/// other, that it should be shorter. About 90 bytes a group.
///
/// A store gives up a group before it inserts another: so the length that counts is the one before
/// the key that comes is looked up, where the paper takes the one after.
///
/// What a use is, the caller says: a store that reads a group a hundred times for one request
/// touches it once (see `eviction_policy`), so that one request does not count as many.
///
/// @par Threads  one at a time: a store calls it under its lock
/// @see Megiddo, Modha: "ARC: a self-tuning, low overhead replacement cache", FAST 2003
class arc {
 public:
  /// @param capacity  groups are 0 to capacity-1
  /// @throws std::invalid_argument  if it is negative
  explicit arc(std::int32_t capacity)
      : lists_("arc", capacity, 2),
        groups_(static_cast<std::size_t>(capacity)),
        ghosts_once_(capacity),
        ghosts_again_(detail::times(2, capacity)) {}

  [[nodiscard]] std::int32_t capacity() const noexcept { return lists_.capacity(); }
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the calls below
  [[nodiscard]] bool contains(std::int32_t group) const { return lists_.contains(group); }
  /// How many of the groups should be of those that were used once.
  [[nodiscard]] std::int32_t once_target() const noexcept { return target_; }

  /// Enters a group: as used again if its key is remembered, else as used once.
  /// @throws std::logic_error if it is in the order
  void insert(std::int32_t group, const eviction_entry& entry) {
    lists_.expect_out(group);
    const std::int32_t of_once = ghosts_once_.size();
    const std::int32_t of_again = ghosts_again_.size();
    bool known = true;
    if (ghosts_once_.take(entry.key)) {
      target_ = std::min(capacity(), target_ + std::max(1, of_again / of_once));
    } else if (ghosts_again_.take(entry.key)) {
      target_ = std::max(0, target_ - std::max(1, of_once / of_again));
    } else {
      known = false;
    }
    at(group).key = entry.key;
    enter(group, known ? again : once);
    limit_ghosts();
  }
  /// Makes a group the most recently used again. @throws std::logic_error if it is not in the order
  void touch(std::int32_t group) {
    erase(group);
    enter(group, again);
    limit_ghosts();
  }
  /// Takes a group out, and remembers nothing. @throws std::logic_error if it is not in the order
  void erase(std::int32_t group) {
    lists_.expect_in(group);
    lists_.remove(group);
    --size_[at(group).list];
  }
  /// Takes a group out, and remembers its key. @throws std::logic_error if it is not in the order
  void evict(std::int32_t group) {
    erase(group);
    // The key may be known from another group that had it.
    ghosts_once_.take(at(group).key);
    ghosts_again_.take(at(group).key);
    (at(group).list == once ? ghosts_once_ : ghosts_again_).push(at(group).key, {});
    limit_ghosts();
  }
  /// The group that goes first of those that the predicate allows, -1 if there is none.
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) const {
    const std::int32_t from = size_[once] > target_ ? once : again;
    const std::int32_t group = lists_.first(from, can_evict);
    if (group != detail::group_lists::none) return group;
    return lists_.first(from == once ? again : once, can_evict);
  }

 private:
  // Lists, least recently used first.
  static constexpr std::int32_t once = 0;
  static constexpr std::int32_t again = 1;
  struct nothing {};
  struct state {
    std::uint64_t key = 0;
    std::int32_t list = once;
  };

  [[nodiscard]] state& at(std::int32_t group) noexcept {
    return groups_[static_cast<std::size_t>(group)];
  }
  void enter(std::int32_t group, std::int32_t list) noexcept {
    lists_.push_back(list, group);
    at(group).list = list;
    ++size_[list];
  }
  /// As many as the paper allows: a capacity for the once used, there or gone; two for all.
  void limit_ghosts() noexcept {
    while (ghosts_once_.size() > 0 && size_[once] + ghosts_once_.size() > capacity()) {
      ghosts_once_.pop();
    }
    while (ghosts_again_.size() > 0 &&
           std::int64_t{size_[once]} + size_[again] + ghosts_once_.size() + ghosts_again_.size() >
               2 * std::int64_t{capacity()}) {
      ghosts_again_.pop();
    }
  }

  detail::group_lists lists_;
  std::vector<state> groups_;
  detail::ghost_keys<nothing> ghosts_once_;
  detail::ghost_keys<nothing> ghosts_again_;
  std::int32_t target_ = 0;
  std::int32_t size_[2] = {0, 0};
};
static_assert(eviction_policy<arc>);

}  // namespace pulseinfer
