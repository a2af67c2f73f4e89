// SPDX-License-Identifier: Apache-2.0
/// @file
/// No schedule is faster than this: the least over the number of groups of what the device, the
/// link, and the largest group by itself need for a step. By brute force, and without the library's
/// cost model.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "setting.hpp"

namespace simulate {

struct bound {
  double seconds = std::numeric_limits<double>::infinity();
  std::int32_t groups = 0;
  double compute = 0, link = 0, path = 0;  ///< with that many groups
};

/// What moves recalled bytes at most: the link; or, as the staged way reads and writes each byte in
/// DRAM before the link reads it once more, the DRAM or the workers.
inline double recall_speed(const pulseinfer::hardware_profile& p) {
  return std::min({p.link_bytes_per_second, p.dram_bytes_per_second / 3,
                   p.workers * p.worker_bytes_per_second / 2});
}

/// The bound of one decode step of all streams.
///
/// - compute: g times the weights and launches, once every request's KV and digests.
/// - link: all misses, and each recall's start cost on it.
/// - path of the largest group: a layer's launch, its compute, then what was not known ahead. Of the
///   first layer nothing is known ahead: the token before is not there.
inline bound lower_bound(const setting& s) {
  const pulseinfer::hardware_profile& p = s.machine.profile;
  const pulseinfer::layer_work w = s.work();
  const double layers = s.model.layers;
  const double weights = w.weight_bytes / p.hbm_bytes_per_second;
  const double request = w.request_bytes / p.hbm_bytes_per_second;
  const double recall = w.recall_bytes / recall_speed(p);
  const double one_launch = 1e-9 * static_cast<double>(p.kernel_launch_ns);
  const double launch = kernels_of_layer * one_launch;
  const double busy = 1e-9 * static_cast<double>(p.copy_busy_ns);
  // A recall: a task gathers, the copy starts, a kernel scatters.
  const double start = 1e-9 * static_cast<double>(p.task_start_ns + p.copy_start_ns) + one_launch;
  const bool misses = w.recall_bytes > 0;
  bound best;
  for (std::int32_t g = 1; g <= s.streams; ++g) {
    bound b{.groups = g};
    const std::int32_t in_largest = (s.streams - 1) / g + 1;
    const double largest = in_largest;
    b.compute = layers * (g * (weights + launch) + s.streams * request);
    b.link = layers * (s.streams * recall + (misses ? g * busy : 0));
    const double computes = launch + weights + largest * request;
    const double late = misses ? start + busy + largest * recall : 0;
    double later =
        misses && w.known_ahead < 1 ? start + busy + largest * recall * (1 - w.known_ahead) : 0;
    // What is known ahead has one layer's time and its own wait to arrive in.
    if (misses && w.known_ahead > 0) {
      later = std::max(later, (start + busy + largest * recall - computes) / 2);
    }
    b.path = computes + late + (layers - 1) * (computes + later);
    b.seconds = std::max({b.compute, b.link, b.path});
    if (b.seconds < best.seconds) best = b;
  }
  return best;
}

}  // namespace simulate
