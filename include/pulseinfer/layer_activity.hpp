// SPDX-License-Identifier: Apache-2.0
/// @file
/// How much each layer is recalled, as measured.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "pulseinfer/error.hpp"
#include "pulseinfer/link_snapshot.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What one step of a layer asked for and got.
struct layer_step {
  std::int64_t recalled_bytes = 0;
  std::int64_t selected = 0;  ///< units that it chose
  std::int64_t missed = 0;    ///< of them, those that were not on the device
};

/// Averages of what layers recall and miss, which forget with a time constant. A layer without
/// steps has 0.
///
/// @par Threads  any, at any time
/// @par Cost     `record` is O(1), `read` O(layers); only the constructor allocates
class layer_activity {
 public:
  /// @param layers           of the model
  /// @param time_constant_s  what is older weighs 1/e
  /// @throws std::invalid_argument  if layers is not 1 to 65536, or the time 1 us to 1,000 s
  explicit layer_activity(std::int32_t layers, double time_constant_s = 1)
      : time_constant_s_(checked_time(time_constant_s)), of_(checked_count(layers)) {}
  layer_activity(const layer_activity&) = delete;
  layer_activity& operator=(const layer_activity&) = delete;

  [[nodiscard]] std::int32_t layers() const noexcept {
    return static_cast<std::int32_t>(of_.size());
  }

  /// Adds a step of a layer.
  /// @param layer  in [0, layers)
  /// @param step   a ticket's bytes, a step's counts
  /// @param now    seconds, by one clock; a moment before the last one is taken for that one
  /// @return whether it was taken: counts are not negative, no more are missed than were selected,
  ///         the time is a number; what is refused is counted and changes nothing
  /// @throws std::out_of_range  on the layer
  bool record(std::int32_t layer, const layer_step& step, double now) {
    detail::expects<std::out_of_range>(layer >= 0 && layer < layers(), "layer_activity: layer is ",
                                       layer, ", expected 0 to ", layers() - 1);
    std::lock_guard lock(mutex_);
    if (step.recalled_bytes < 0 || step.missed < 0 || step.selected < step.missed ||
        !std::isfinite(now) || now < 0) {
      ++refused_;
      return false;
    }
    average& a = of_[static_cast<std::size_t>(layer)];
    const double kept = weight(a, now);
    a.bytes = a.bytes * kept + static_cast<double>(step.recalled_bytes);
    a.selected = a.selected * kept + static_cast<double>(step.selected);
    a.missed = a.missed * kept + static_cast<double>(step.missed);
    a.at = std::max(a.at, now);
    return true;
  }

  /// Bytes a second that each layer recalled of late: what an `admission_policy` observes.
  /// @param bytes_per_second  [layers], written
  /// @param now               seconds, as `record`
  /// @throws std::invalid_argument  on another number of layers, or a time that is none
  void read(std::span<double> bytes_per_second, double now) const {
    detail::expects(bytes_per_second.size() == of_.size(), "layer_activity: there is room for ",
                    bytes_per_second.size(), " layers, expected ", of_.size());
    detail::check_number("layer_activity", "now", now);
    std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < of_.size(); ++i) {
      bytes_per_second[i] = of_[i].bytes * weight(of_[i], now) / time_constant_s_;
    }
  }

  /// Share of what a layer chose of late that was not on the device; 0 where it chose nothing.
  /// @throws std::out_of_range  on the layer
  [[nodiscard]] double miss_rate(std::int32_t layer) const {
    detail::expects<std::out_of_range>(layer >= 0 && layer < layers(), "layer_activity: layer is ",
                                       layer, ", expected 0 to ", layers() - 1);
    std::lock_guard lock(mutex_);
    const average& a = of_[static_cast<std::size_t>(layer)];
    return a.selected > 0 ? a.missed / a.selected : 0;
  }

  /// Steps that were refused.
  [[nodiscard]] std::int64_t refused() const {
    std::lock_guard lock(mutex_);
    return refused_;
  }

 private:
  struct average {
    double bytes = 0;
    double selected = 0;
    double missed = 0;
    double at = 0;
  };

  [[nodiscard]] static double checked_time(double seconds) {
    detail::expects(std::isfinite(seconds) && seconds >= 1e-6 && seconds <= 1e3,
                    "layer_activity: time_constant_s is ", seconds, ", expected 0.000001 to 1000");
    return seconds;
  }
  [[nodiscard]] static std::size_t checked_count(std::int32_t layers) {
    detail::expects(layers >= 1 && layers <= 65'536, "layer_activity: layers is ", layers,
                    ", expected 1 to 65536");
    return static_cast<std::size_t>(layers);
  }
  /// What is left of an average at a later moment.
  [[nodiscard]] double weight(const average& a, double now) const noexcept {
    return now > a.at ? std::exp((a.at - now) / time_constant_s_) : 1;
  }

  double time_constant_s_;
  mutable std::mutex mutex_;  ///< guards what follows
  std::vector<average> of_;
  std::int64_t refused_ = 0;
};

/// The larger of two ranks' activity, layer by layer: ranks that merge all of them, in any order,
/// observe the same.
/// @param into   [layers]
/// @param other  [layers]
/// @throws std::invalid_argument  if they differ in length
inline void merge_activity(std::span<double> into, std::span<const double> other) {
  detail::expects(into.size() == other.size(), "merge_activity: one is of ", into.size(),
                  " layers, the other of ", other.size());
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

}  // namespace pulseinfer
