// SPDX-License-Identifier: Apache-2.0
/// @file
/// An eviction policy's order under priorities, pins and retention times.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/eviction.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// The `eviction_entry::priority` of what is never given up.
inline constexpr std::int32_t never_evict = std::numeric_limits<std::int32_t>::max();

/// The order of another policy, one of it for each priority, under three rules:
///
/// 1. A group of priority `never_evict` is never the victim.
/// 2. A group with a `keep_until` later than `now()` is the victim only if no other group can be.
/// 3. Of those that are left, one of a lower priority goes before one of a higher.
///
/// Within a priority the wrapped policy chooses, of those that are not kept. A kept group stays in
/// that policy's order, and is passed over there as a refused one is; when its time has passed, it
/// goes when its last use says. Time is what `advance` was told: the caller's clock, or a count of
/// steps, the same on all ranks that are to decide alike.
///
/// A policy that knows the prefix tree knows that of one priority: a block's priority and time
/// should be no less than those of the blocks behind it.
///
/// Memory is that of the wrapped policy times the priorities, and 16 bytes a group.
///
/// @tparam Policy  eviction_policy
/// @par Threads    one at a time: a store calls it under its lock
template <eviction_policy Policy = lru>
class prioritized {
 public:
  /// @param capacity    groups are 0 to capacity-1
  /// @param priorities  how many there are beside `never_evict`: 0 to priorities-1
  /// @throws std::invalid_argument  if capacity is negative or priorities below 1
  prioritized(std::int32_t capacity, std::int32_t priorities) {
    detail::expects(capacity >= 0, "prioritized: capacity is ", capacity, ", expected at least 0");
    detail::expects(priorities >= 1, "prioritized: priorities is ", priorities,
                    ", expected at least 1");
    policies_.reserve(static_cast<std::size_t>(priorities));
    for (std::int32_t p = 0; p < priorities; ++p) policies_.emplace_back(capacity);
    groups_.resize(static_cast<std::size_t>(capacity));
  }
  explicit prioritized(std::int32_t capacity) : prioritized(capacity, 3) {}

  [[nodiscard]] std::int32_t capacity() const noexcept {
    return static_cast<std::int32_t>(groups_.size());
  }
  [[nodiscard]] std::int32_t priorities() const noexcept {
    return static_cast<std::int32_t>(policies_.size());
  }
  /// The time so far; 0 at first.
  [[nodiscard]] std::int64_t now() const noexcept { return now_; }
  /// Says what time it is. @throws std::invalid_argument if that is before `now()`
  void advance(std::int64_t now) {
    detail::expects(now >= now_, "prioritized: now is ", now, ", expected at least ", now_);
    now_ = now;
  }

  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the calls below
  [[nodiscard]] bool contains(std::int32_t group) const {
    detail::expects<std::out_of_range>(group >= 0 && group < capacity(), "prioritized: group is ",
                                       group, ", expected 0 to ", capacity() - 1);
    return at(group).priority != absent;
  }
  /// Says beforehand whether an entry can be taken.
  /// @throws std::out_of_range  on a priority that is neither below `priorities()` nor
  ///                            `never_evict`
  void check(const eviction_entry& entry) const {
    detail::expects<std::out_of_range>(
        (entry.priority >= 0 && entry.priority < priorities()) || entry.priority == never_evict,
        "prioritized: priority is ", entry.priority, ", expected 0 to ", priorities() - 1,
        " or never_evict");
  }
  /// Enters a group.
  /// @throws std::out_of_range  also as `check`
  /// @throws std::logic_error   if it is in the order; and what the wrapped policy throws
  void insert(std::int32_t group, const eviction_entry& entry) {
    detail::expects<std::logic_error>(!contains(group), "prioritized: group ", group,
                                      " is in already");
    check(entry);
    if (entry.priority != never_evict) {
      policy(entry.priority).insert(group, entry);
      ++evictable_;
    }
    at(group) = {entry.keep_until, entry.priority};
    if (entry.keep_until > last_kept_until_) last_kept_until_ = entry.keep_until;
  }
  /// A use of a group. @throws std::logic_error if it is not in the order
  void touch(std::int32_t group) {
    expect_in(group);
    if (at(group).priority != never_evict) policy(at(group).priority).touch(group);
  }
  /// Keeps a group until another time than it entered with, later or earlier.
  /// @throws std::logic_error if it is not in the order
  void keep(std::int32_t group, std::int64_t until) {
    expect_in(group);
    at(group).keep_until = until;
    if (until > last_kept_until_) last_kept_until_ = until;
  }
  /// Takes a group out. @throws std::logic_error if it is not in the order
  void erase(std::int32_t group) {
    expect_in(group);
    if (at(group).priority != never_evict) {
      policy(at(group).priority).erase(group);
      --evictable_;
    }
    at(group).priority = absent;
  }
  /// Takes a group out that was given up. @throws std::logic_error if it is not in the order
  void evict(std::int32_t group) {
    expect_in(group);
    if (at(group).priority != never_evict) {
      policy(at(group).priority).evict(group);
      --evictable_;
    }
    at(group).priority = absent;
  }
  /// How many groups it gives up, one after the other, if the predicate allows all: those that are
  /// not of priority `never_evict`.
  [[nodiscard]] std::int32_t evictable() const noexcept { return evictable_; }
  /// The group that goes first of those that the predicate allows, -1 if there is none.
  /// @par Cost  that of the wrapped policy for each priority, in which kept groups are refused ones
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) {
    const auto not_kept = [&](std::int32_t group) {
      return at(group).keep_until <= now_ && can_evict(group);
    };
    for (Policy& p : policies_) {
      const std::int32_t group = p.victim(not_kept);
      if (group >= 0) return group;
    }
    if (last_kept_until_ <= now_) return -1;  // nobody is kept
    for (Policy& p : policies_) {
      const std::int32_t group = p.victim([&](std::int32_t g) { return can_evict(g); });
      if (group >= 0) return group;
    }
    return -1;
  }

 private:
  static constexpr std::int32_t absent = -1;
  struct state {
    std::int64_t keep_until = 0;
    std::int32_t priority = absent;
  };

  [[nodiscard]] state& at(std::int32_t group) noexcept {
    return groups_[static_cast<std::size_t>(group)];
  }
  [[nodiscard]] const state& at(std::int32_t group) const noexcept {
    return groups_[static_cast<std::size_t>(group)];
  }
  [[nodiscard]] Policy& policy(std::int32_t priority) noexcept {
    return policies_[static_cast<std::size_t>(priority)];
  }
  void expect_in(std::int32_t group) const {
    detail::expects<std::logic_error>(contains(group), "prioritized: group ", group, " is not in");
  }

  std::vector<Policy> policies_;  ///< by priority
  std::vector<state> groups_;
  std::int32_t evictable_ = 0;
  std::int64_t now_ = 0;
  std::int64_t last_kept_until_ = 0;  ///< no group is kept beyond it
};
static_assert(eviction_policy<prioritized<lru>>);

}  // namespace pulseinfer
