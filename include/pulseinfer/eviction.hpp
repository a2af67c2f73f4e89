// SPDX-License-Identifier: Apache-2.0
/// @file
/// The plainest of the eviction policies, which are small types over one concept (`eviction_policy`
/// in concepts.hpp). The others stand in the headers `eviction_*.hpp`.
#pragma once

#include <cstdint>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/group_lists.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Least recently used first. A doubly linked list over an array: 8 bytes a group.
///
/// @par Threads  one at a time: a store calls it under its lock
class lru {
 public:
  /// @param capacity  groups are 0 to capacity-1
  /// @throws std::invalid_argument  if it is negative
  explicit lru(std::int32_t capacity) : lists_("lru", capacity, 1) {}

  [[nodiscard]] std::int32_t capacity() const noexcept { return lists_.capacity(); }
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the calls below
  [[nodiscard]] bool contains(std::int32_t group) const { return lists_.contains(group); }

  /// Enters a group as the most recently used. @throws std::logic_error if it is in the order
  void insert(std::int32_t group, const eviction_entry& /*entry*/) {
    lists_.expect_out(group);
    lists_.push_back(0, group);
  }
  /// Makes a group the most recently used. @throws std::logic_error if it is not in the order
  void touch(std::int32_t group) {
    erase(group);
    lists_.push_back(0, group);
  }
  /// Takes a group out. @throws std::logic_error if it is not in the order
  void erase(std::int32_t group) {
    lists_.expect_in(group);
    lists_.remove(group);
  }
  void evict(std::int32_t group) { erase(group); }
  /// The least recently used group that the predicate allows, -1 if there is none.
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) const {
    return lists_.first(0, can_evict);
  }

 private:
  detail::group_lists lists_;
};
static_assert(eviction_policy<lru>);

}  // namespace pulseinfer
