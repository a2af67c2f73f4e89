// SPDX-License-Identifier: Apache-2.0
/// @file
/// Eviction policies: small types over one concept (`eviction_policy` in concepts.hpp).
#pragma once

#include <cstdint>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Least recently used first. A doubly linked list over an array: every call is O(1) and allocates
/// nothing.
///
/// @par Threads  one at a time: a store calls it under its lock
class lru {
 public:
  /// @param capacity  groups are 0 to capacity-1
  /// @throws std::invalid_argument  if it is negative
  explicit lru(std::int32_t capacity) {
    detail::expects(capacity >= 0, "lru: capacity is ", capacity, ", expected at least 0");
    links_.assign(static_cast<std::size_t>(capacity) + 1, link{absent, absent});
    at(end()) = {end(), end()};
  }

  [[nodiscard]] std::int32_t capacity() const noexcept {
    return static_cast<std::int32_t>(links_.size()) - 1;
  }
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1; so do the calls below
  [[nodiscard]] bool contains(std::int32_t group) const {
    check(group);
    return at(group).next != absent;
  }

  /// Enters a group as the most recently used. @throws std::logic_error if it is in the order
  void insert(std::int32_t group) {
    detail::expects<std::logic_error>(!contains(group), "lru: group ", group, " is in already");
    append(group);
  }
  /// Makes a group the most recently used. @throws std::logic_error if it is not in the order
  void touch(std::int32_t group) {
    erase(group);
    append(group);
  }
  /// Takes a group out. @throws std::logic_error if it is not in the order
  void erase(std::int32_t group) {
    detail::expects<std::logic_error>(contains(group), "lru: group ", group, " is not in");
    link& l = at(group);
    at(l.previous).next = l.next;
    at(l.next).previous = l.previous;
    l = {absent, absent};
  }
  /// The least recently used group, -1 when the order is empty.
  [[nodiscard]] std::int32_t victim() const noexcept {
    const std::int32_t oldest = at(end()).next;
    return oldest == end() ? -1 : oldest;
  }

 private:
  struct link {
    std::int32_t previous;
    std::int32_t next;
  };
  static constexpr std::int32_t absent = -1;

  [[nodiscard]] std::int32_t end() const noexcept { return capacity(); }
  [[nodiscard]] link& at(std::int32_t i) noexcept { return links_[static_cast<std::size_t>(i)]; }
  [[nodiscard]] const link& at(std::int32_t i) const noexcept {
    return links_[static_cast<std::size_t>(i)];
  }
  void check(std::int32_t group) const {
    detail::expects<std::out_of_range>(group >= 0 && group < capacity(), "lru: group is ", group,
                                       ", expected 0 to ", capacity() - 1);
  }
  void append(std::int32_t group) {
    const std::int32_t newest = at(end()).previous;
    at(group) = {newest, end()};
    at(newest).next = group;
    at(end()).previous = group;
  }

  std::vector<link> links_;
};
static_assert(eviction_policy<lru>);

}  // namespace pulseinfer
