// SPDX-License-Identifier: Apache-2.0
/// @file
/// An eviction policy that divides its room between what was used once and what was used again, by
/// what each would gain from it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/ghost_keys.hpp"
#include "pulseinfer/detail/group_lists.hpp"
#include "pulseinfer/detail/hit_curve.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Two lists, least recently used first: of what was used once, and of what was used again while it
/// was there or remembered. For both it is counted, ghosts included, how many uses would have been
/// hits at each length; the room is divided so that the two together would have had the most.
///
/// While there is not room for both, new blocks leave quickly, and are known by their keys when
/// they come back: what was used again pays for its place sooner. Where there is room until most of the
/// new ones come back, the division follows, and the two lists are little worse than one. Steps
/// from one ghost to the next (see `arc`) do not find the way there: no length of the first list
/// pays until it outlasts the pause between two turns of a conversation.
///
/// A round of more blocks than there is room for defeats it, as it defeats `lru`.
///
/// 32 bytes a group, and about 44 for each key that is remembered: some 210 a group by default.
///
/// @par Threads  one at a time: a store calls it under its lock
/// @see Johnson, Shasha: "2Q: a low overhead high performance buffer management replacement
///      algorithm", VLDB 1994, for the lists and the memory; Qureshi, Patt: "Utility-based cache
///      partitioning", MICRO 2006, for the division; docs/measured.md for what it gains
class adaptive_2q {
 public:
  /// @param capacity    groups are 0 to capacity-1
  /// @param remembered  how many keys of what was given up: four capacities unless it is said
  /// @throws std::invalid_argument  if one of them is negative
  adaptive_2q(std::int32_t capacity, std::int32_t remembered)
      : lists_("adaptive_2q", capacity, 2),
        groups_(static_cast<std::size_t>(capacity)),
        ghosts_(checked(remembered)),
        curves_{detail::hit_curve(capacity), detail::hit_curve(capacity)} {}
  explicit adaptive_2q(std::int32_t capacity)
      : adaptive_2q(capacity, capacity < 0 ? 0 : detail::times(4, capacity)) {}

  [[nodiscard]] std::int32_t capacity() const noexcept { return lists_.capacity(); }
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the calls below
  [[nodiscard]] bool contains(std::int32_t group) const { return lists_.contains(group); }
  /// How many of the groups should be of those that were used once: at first all.
  [[nodiscard]] std::int32_t once_target() const noexcept {
    return static_cast<std::int32_t>(std::int64_t{capacity()} * once_steps_ / steps);
  }

  /// Enters a group: as used again if its key is remembered, else as used once.
  /// @throws std::logic_error if it is in the order
  void insert(std::int32_t group, const eviction_entry& entry) {
    lists_.expect_out(group);
    const auto ghost = ghosts_.take(entry.key);
    if (ghost) curve(ghost->list).use(ghost->entered);
    at(group).key = entry.key;
    enter(group, ghost ? again : once);
    count_use();
  }
  /// Makes a group the most recently used again. @throws std::logic_error if it is not in the order
  void touch(std::int32_t group) {
    const place was = leave(group);
    curve(was.list).use(was.entered);
    enter(group, again);
    count_use();
  }
  /// Takes a group out, and remembers nothing. @throws std::logic_error if it is not in the order
  void erase(std::int32_t group) {
    const place was = leave(group);
    curve(was.list).leave(was.entered);
  }
  /// Takes a group out, and remembers its key. @throws std::logic_error if it is not in the order
  void evict(std::int32_t group) {
    const place was = leave(group);
    const auto forgotten = ghosts_.push(at(group).key, was);
    if (forgotten) curve(forgotten->list).leave(forgotten->entered);
  }
  /// The group that goes first of those that the predicate allows, -1 if there is none.
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) const {
    const std::int32_t from = once_size_ > once_target() ? once : again;
    const std::int32_t group = lists_.first(from, can_evict);
    if (group != detail::group_lists::none) return group;
    return lists_.first(from == once ? again : once, can_evict);
  }

 private:
  static constexpr int steps = detail::hit_curve::steps;
  // Lists, least recently used first; and their curves.
  static constexpr std::int32_t once = 0;
  static constexpr std::int32_t again = 1;
  struct place {
    detail::hit_curve::bucket entered = 0;
    std::int32_t list = once;
  };
  struct state {
    std::uint64_t key = 0;
    place where;
  };

  [[nodiscard]] static std::int32_t checked(std::int32_t remembered) {
    detail::expects(remembered >= 0, "adaptive_2q: remembered is ", remembered,
                    ", expected at least 0");
    return remembered;
  }
  [[nodiscard]] state& at(std::int32_t group) noexcept {
    return groups_[static_cast<std::size_t>(group)];
  }
  [[nodiscard]] detail::hit_curve& curve(std::int32_t list) noexcept {
    return curves_[static_cast<std::size_t>(list)];
  }
  void enter(std::int32_t group, std::int32_t list) noexcept {
    lists_.push_back(list, group);
    at(group).where = {curve(list).enter(), list};
    if (list == once) ++once_size_;
  }
  place leave(std::int32_t group) {
    lists_.expect_in(group);
    lists_.remove(group);
    if (at(group).where.list == once) --once_size_;
    return at(group).where;
  }

  /// Now and then it is looked at what the curves say. They fade about as fast as ghosts do.
  void count_use() noexcept {
    if (++uses_ < std::max(1, capacity() / steps)) return;
    uses_ = 0;
    divide();
    for (detail::hit_curve& c : curves_) c.fade();
  }
  void divide() noexcept {
    std::int64_t hits = 0;  // with `s` steps for the used once, the others for the used again
    for (int step = 0; step < steps; ++step) hits += curve(again).hits(step);
    std::int64_t hits_now = hits;
    std::int64_t most = hits;
    int best = 0;
    for (int s = 1; s <= steps; ++s) {
      hits += curve(once).hits(s - 1) - curve(again).hits(steps - s);
      if (s == once_steps_) hits_now = hits;
      if (hits <= most) continue;
      most = hits;
      best = s;
    }
    // Not for what may be chance: a list that is to grow must fill first.
    if (most - hits_now > hits_now / 32 + detail::hit_curve::weight) once_steps_ = best;
  }

  detail::group_lists lists_;
  std::vector<state> groups_;
  detail::ghost_keys<place> ghosts_;
  std::array<detail::hit_curve, 2> curves_;
  int once_steps_ = steps;
  std::int32_t once_size_ = 0;
  std::int32_t uses_ = 0;
};
static_assert(eviction_policy<adaptive_2q>);

}  // namespace pulseinfer
