// SPDX-License-Identifier: Apache-2.0
/// @file
/// An eviction policy in which what was used once cannot displace what was used twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/group_lists.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Segmented least recently used: groups enter on probation; a use there protects them. Where more
/// are protected than may be, the least recently used of them is on probation again, as the most
/// recent there. Those on probation go first, the least recently used before the others. 9 bytes a
/// group.
///
/// @par Threads  one at a time: a store calls it under its lock
/// @see Karedla, Love, Wherry: "Caching strategies to improve disk system performance", IEEE
///      Computer 27(3), 1994
class slru {
 public:
  /// @param capacity          groups are 0 to capacity-1
  /// @param protected_groups  how many may be protected: four in five unless it is said
  /// @throws std::invalid_argument  if capacity is negative, or protected_groups not 0 to capacity
  slru(std::int32_t capacity, std::int32_t protected_groups)
      : lists_("slru", capacity, 2),
        is_protected_(static_cast<std::size_t>(capacity), 0),
        protected_limit_(protected_groups) {
    detail::expects(protected_groups >= 0 && protected_groups <= capacity,
                    "slru: protected_groups is ", protected_groups, ", expected 0 to ", capacity);
  }
  explicit slru(std::int32_t capacity) : slru(capacity, capacity - capacity / 5) {}

  [[nodiscard]] std::int32_t capacity() const noexcept { return lists_.capacity(); }
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the calls below
  [[nodiscard]] bool contains(std::int32_t group) const { return lists_.contains(group); }

  /// Enters a group, on probation. @throws std::logic_error if it is in the order
  void insert(std::int32_t group, const eviction_entry& /*entry*/) {
    lists_.expect_out(group);
    lists_.push_back(probation, group);
  }
  /// Protects a group, as the most recent. @throws std::logic_error if it is not in the order
  void touch(std::int32_t group) {
    erase(group);
    lists_.push_back(safe, group);
    set_protected(group, true);
    if (protected_size_ <= protected_limit_) return;
    const std::int32_t oldest = lists_.front(safe);
    lists_.remove(oldest);
    set_protected(oldest, false);
    lists_.push_back(probation, oldest);
  }
  /// Takes a group out. @throws std::logic_error if it is not in the order
  void erase(std::int32_t group) {
    lists_.expect_in(group);
    lists_.remove(group);
    set_protected(group, false);
  }
  void evict(std::int32_t group) { erase(group); }
  /// The group that goes first of those that the predicate allows, -1 if there is none.
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) const {
    const std::int32_t group = lists_.first(probation, can_evict);
    return group != detail::group_lists::none ? group : lists_.first(safe, can_evict);
  }

 private:
  // Lists, least recently used first.
  static constexpr std::int32_t probation = 0;
  static constexpr std::int32_t safe = 1;

  void set_protected(std::int32_t group, bool value) noexcept {
    std::uint8_t& now = is_protected_[static_cast<std::size_t>(group)];
    protected_size_ += (value ? 1 : 0) - now;
    now = value ? 1 : 0;
  }

  detail::group_lists lists_;
  std::vector<std::uint8_t> is_protected_;
  std::int32_t protected_limit_;
  std::int32_t protected_size_ = 0;
};
static_assert(eviction_policy<slru>);

}  // namespace pulseinfer
