// SPDX-License-Identifier: Apache-2.0
/// @file
/// When something was busy: a union of intervals, in a fixed amount of memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Intervals that do not overlap, in order, with those that touch joined. Where there would be more
/// than `limit`, those are forgotten that nobody will read, and if that is not enough the two oldest
/// become one that is busy for a part of its length, evenly: so what is read is exact for the newest
/// `limit` intervals, and the sum is right for the others, too.
///
/// @par Cost  adding at the end is O(1) amortised, before the end O(intervals after it); no
///            allocation
class busy_intervals {
 public:
  static constexpr std::size_t limit = 128;

  /// The end of the newest interval so far.
  [[nodiscard]] double newest() const noexcept { return count_ > 0 ? at(count_ - 1).end : 0; }
  [[nodiscard]] std::size_t size() const noexcept { return count_; }
  void clear() noexcept { count_ = 0; }

  /// Adds [begin, end). What is before `horizon` will not be read any more.
  /// @return how much of it no other interval covered
  /// @pre  begin < end, all finite
  double add(double begin, double end, double horizon) noexcept {
    if (count_ == limit) forget_before(horizon);
    // Those that overlap or touch it are [first, last).
    std::size_t last = count_;
    while (last > 0 && at(last - 1).begin > end) --last;
    std::size_t first = last;
    interval joined{begin, end, 0};
    double covered = 0;
    while (first > 0 && at(first - 1).end >= begin) {
      const interval& old = at(--first);
      covered += old.busy_within(begin, end);
      joined.begin = std::min(joined.begin, old.begin);
      joined.end = std::max(joined.end, old.end);
      joined.busy += old.busy;
    }
    const double added = std::max(0.0, (end - begin) - covered);
    joined.busy = std::min(joined.busy + added, joined.end - joined.begin);
    if (first == last) {
      insert(first, joined);
    } else {
      at(first) = joined;
      for (std::size_t i = last; i < count_; ++i) at(first + 1 + i - last) = at(i);
      count_ -= last - first - 1;
    }
    return added;
  }

  /// Busy time within [begin, end).
  [[nodiscard]] double busy_within(double begin, double end) const noexcept {
    double busy = 0;
    for (std::size_t i = 0; i < count_; ++i) busy += at(i).busy_within(begin, end);
    return busy;
  }

 private:
  struct interval {
    double begin;
    double end;
    double busy;  ///< at most the length

    [[nodiscard]] double busy_within(double from, double to) const noexcept {
      const double shared = std::min(end, to) - std::max(begin, from);
      if (shared <= 0) return 0;
      const double length = end - begin;
      return busy >= length ? shared : busy * std::min(shared / length, 1.0);
    }
  };

  [[nodiscard]] interval& at(std::size_t i) noexcept { return ring_[(head_ + i) % limit]; }
  [[nodiscard]] const interval& at(std::size_t i) const noexcept {
    return ring_[(head_ + i) % limit];
  }
  void pop_front() noexcept {
    head_ = (head_ + 1) % limit;
    --count_;
  }
  void forget_before(double moment) noexcept {
    while (count_ > 0 && at(0).end <= moment) pop_front();
    if (count_ == 0 || at(0).begin >= moment) return;
    at(0).busy = at(0).busy_within(moment, at(0).end);
    at(0).begin = moment;
  }
  /// The two oldest become one.
  void coarsen() noexcept {
    at(1).busy += at(0).busy;
    at(1).begin = at(0).begin;
    pop_front();
  }
  void insert(std::size_t position, const interval& added) noexcept {
    if (count_ == limit) {
      coarsen();
      if (position > 0) --position;
      // What would come before the joined pair, or into its gap, is part of it.
      if (position == 0) {
        at(0).begin = std::min(at(0).begin, added.begin);
        at(0).busy = std::min(at(0).busy + added.busy, at(0).end - at(0).begin);
        return;
      }
    }
    for (std::size_t i = count_; i > position; --i) at(i) = at(i - 1);
    at(position) = added;
    ++count_;
  }

  std::array<interval, limit> ring_{};
  std::size_t head_ = 0;
  std::size_t count_ = 0;
};

}  // namespace pulseinfer::detail
