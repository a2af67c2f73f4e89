// SPDX-License-Identifier: Apache-2.0
/// @file
/// A machine as numbers: what the simulated backend's virtual clock goes by.
#pragma once

#include <cmath>
#include <cstdint>

#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Speeds in bytes a second, times in ns. The defaults are an H100 on PCIe 5 beside a server CPU;
/// every one of them is a parameter, to be measured on the machine that is simulated.
struct hardware_profile {
  double dram_bytes_per_second = 200e9;
  double link_bytes_per_second = 56e9;  ///< of each direction
  double hbm_bytes_per_second = 3350e9;
  double worker_bytes_per_second = 25e9;  ///< of one worker, read plus written

  std::uint64_t copy_start_ns = 10'000;      ///< before the first byte, unless queued behind a copy
  std::uint64_t copy_busy_ns = 2'300;        ///< the link is busy this much longer for a copy call
  std::uint64_t batched_copy_busy_ns = 600;  ///< a batch: this for each copy, if that is more
  std::uint64_t kernel_launch_ns = 4'000;
  std::uint64_t task_start_ns = 2'000;
  std::uint64_t poll_ns = 1'000;  ///< what a poll of a pending event takes the caller

  int workers = 4;
  std::uint64_t device_bytes = 80'000'000'000;
};

namespace detail {

inline void check_speed(double bytes_per_second, const char* name) {
  expects(std::isfinite(bytes_per_second) && bytes_per_second >= 1, "hardware_profile: ", name,
          " is ", bytes_per_second, ", expected at least 1 byte a second");
}

inline void check_profile(const hardware_profile& profile) {
  check_speed(profile.dram_bytes_per_second, "dram_bytes_per_second");
  check_speed(profile.link_bytes_per_second, "link_bytes_per_second");
  check_speed(profile.hbm_bytes_per_second, "hbm_bytes_per_second");
  check_speed(profile.worker_bytes_per_second, "worker_bytes_per_second");
  expects(profile.poll_ns >= 1,
          "hardware_profile: poll_ns is 0, expected at least 1: who polls would ",
          "never see the clock go on");
  expects(profile.workers >= 1 && profile.workers <= 1024, "hardware_profile: workers is ",
          profile.workers, ", expected 1 to 1024");
}

}  // namespace detail
}  // namespace pulseinfer
