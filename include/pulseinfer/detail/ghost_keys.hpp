// SPDX-License-Identifier: Apache-2.0
/// @file
/// What eviction policies remember of groups that left.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/group_lists.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Spreads the bits of a key, whatever it was made of: the mixing function of splitmix64.
[[nodiscard]] constexpr std::uint64_t mixed(std::uint64_t key) noexcept {
  key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
  key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
  return key ^ (key >> 31);
}

/// `share` x capacity, for what a policy allocates, at most what an index of 32 bits can count.
[[nodiscard]] constexpr std::int32_t times(std::int32_t share, std::int32_t capacity) noexcept {
  const std::int64_t product = std::int64_t{share} * capacity;
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max() / 2;
  return static_cast<std::int32_t>(product < most ? product : most);
}

/// A queue of distinct keys with a note each, found by key. Where it is full, the newest takes the
/// place of the oldest. The key 0 is nobody's and is not remembered. All calls are O(1) and
/// allocate nothing; memory is 16 bytes a key, a note, and 8 to 16 bytes to find it.
template <class Note>
class ghost_keys {
 public:
  /// @param capacity  at least 0
  explicit ghost_keys(std::int32_t capacity)
      : lists_("ghost_keys", capacity, 2),
        keys_(static_cast<std::size_t>(capacity), 0),
        notes_(static_cast<std::size_t>(capacity)),
        index_(std::bit_ceil(2 * static_cast<std::size_t>(capacity) + 1), empty) {
    for (std::int32_t place = 0; place < capacity; ++place) lists_.push_back(unused, place);
  }

  [[nodiscard]] std::int32_t size() const noexcept { return size_; }

  /// Remembers a key as the newest; it may be known already.
  /// @return the note that was forgotten for it: its own former one, or that of the oldest key
  std::optional<Note> push(std::uint64_t key, Note note) noexcept {
    if (key == 0 || lists_.capacity() == 0) return std::nullopt;
    std::optional<Note> forgotten = take(key);
    if (size_ == lists_.capacity()) forgotten = pop();
    const std::int32_t place = lists_.front(unused);
    lists_.remove(place);
    lists_.push_back(known, place);
    ++size_;
    key_at(place) = key;
    notes_[static_cast<std::size_t>(place)] = note;
    std::size_t at = home(key);
    while (index_[at] != empty) at = next(at);
    index_[at] = place;
    return forgotten;
  }

  /// Forgets a key. @return its note; empty if it was not known
  std::optional<Note> take(std::uint64_t key) noexcept {
    if (key == 0) return std::nullopt;
    for (std::size_t at = home(key); index_[at] != empty; at = next(at)) {
      if (key_at(index_[at]) == key) return forget(at);
    }
    return std::nullopt;
  }

  /// Forgets the oldest key. @return its note; empty if there is none
  std::optional<Note> pop() noexcept {
    const std::int32_t oldest = lists_.front(known);
    return oldest == group_lists::none ? std::nullopt : take(key_at(oldest));
  }

 private:
  static constexpr std::int32_t known = 0;  ///< lists: the oldest first
  static constexpr std::int32_t unused = 1;
  static constexpr std::int32_t empty = -1;

  [[nodiscard]] std::uint64_t& key_at(std::int32_t place) noexcept {
    return keys_[static_cast<std::size_t>(place)];
  }
  [[nodiscard]] std::size_t home(std::uint64_t key) const noexcept {
    return static_cast<std::size_t>(mixed(key)) & (index_.size() - 1);
  }
  [[nodiscard]] std::size_t next(std::size_t at) const noexcept {
    return (at + 1) & (index_.size() - 1);
  }

  Note forget(std::size_t at) noexcept {
    const std::int32_t place = index_[at];
    lists_.remove(place);
    lists_.push_front(unused, place);
    --size_;
    // Linear probing without tombstones: who stands behind the gap and may stand in it moves up.
    std::size_t gap = at;
    index_[gap] = empty;
    for (at = next(at); index_[at] != empty; at = next(at)) {
      const std::size_t from_home = (at - home(key_at(index_[at]))) & (index_.size() - 1);
      if (from_home < ((at - gap) & (index_.size() - 1))) continue;  // its home is behind the gap
      index_[gap] = index_[at];
      index_[at] = empty;
      gap = at;
    }
    return notes_[static_cast<std::size_t>(place)];
  }

  group_lists lists_;
  std::int32_t size_ = 0;
  std::vector<std::uint64_t> keys_;
  std::vector<Note> notes_;
  std::vector<std::int32_t> index_;  ///< places by hash; a power of two, at most half full
};

}  // namespace pulseinfer::detail
