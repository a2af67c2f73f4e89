// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a least recently used list of another length would have hit.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Hits of a least recently used list by its length, estimated from the uses of what stands, or
/// would still stand, in it: a use at depth d is a hit of each list that is longer than d (Mattson,
/// Gecsei, Slutz, Traiger: "Evaluation techniques for storage hierarchies", 1970). Lengths are in
/// steps of 1/16 of a capacity. Depths are counted over buckets of what entered at about the same
/// time (as in Saemundsson et al.: "Dynamic performance profiling of cloud caches", SoCC 2014), so
/// that a use costs at most as many additions as there are buckets. Integers only: the same on
/// every machine.
class hit_curve {
 public:
  static constexpr int steps = 16;
  static constexpr std::int64_t weight = 1024;  ///< of a hit, so that it can fade
  using bucket = std::int64_t;                  ///< when something entered

  explicit hit_curve(std::int32_t capacity) noexcept : width_(std::max(1, capacity / steps)) {}

  /// Something is the most recent from now on.
  [[nodiscard]] bucket enter() noexcept {
    if (count(newest_) >= width_) {
      ++newest_;  // in the place of the oldest bucket, which becomes one with the second oldest
      if (newest_ >= buckets) count(oldest()) += count(newest_);
      count(newest_) = 0;
    }
    ++count(newest_);
    return newest_;
  }
  /// It is gone, and was not used again.
  void leave(bucket entered) noexcept { --count(std::max(entered, oldest())); }
  /// It is used again, and enters anew, in this list or another.
  void use(bucket entered) noexcept {
    entered = std::max(entered, oldest());
    std::int64_t depth = count(entered) / 2;
    for (bucket b = newest_; b > entered && depth < steps * width_; --b) depth += count(b);
    leave(entered);
    if (depth < steps * width_) hits_[static_cast<std::size_t>(depth / width_)] += weight;
  }
  /// What a list of `step` steps, 0 to 15, would gain from one more, in `weight` a hit.
  [[nodiscard]] std::int64_t hits(int step) const noexcept {
    return hits_[static_cast<std::size_t>(step)];
  }
  /// What was seen so far counts a little less from now on.
  void fade() noexcept {
    for (std::int64_t& h : hits_) h -= h / 64;
  }

 private:
  static constexpr bucket buckets = bucket{8} * steps;

  [[nodiscard]] bucket oldest() const noexcept {
    return std::max<bucket>(0, newest_ - buckets + 1);
  }
  [[nodiscard]] std::int64_t& count(bucket b) noexcept {
    return counts_[static_cast<std::size_t>(b % buckets)];
  }

  std::int64_t width_;
  bucket newest_ = 0;
  std::array<std::int64_t, static_cast<std::size_t>(buckets)> counts_{};  ///< by bucket, a ring
  std::array<std::int64_t, steps> hits_{};
};

}  // namespace pulseinfer::detail
