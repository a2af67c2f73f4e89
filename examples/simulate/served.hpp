// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a server did, and how it is told to.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/schedule_types.hpp"

namespace simulate {

/// What a server did with all that arrived.
struct served {
  std::int64_t requests = 0;  ///< that were served to the end
  std::int64_t tokens = 0;
  double seconds = 0;       ///< from the first arrival to the last token
  double tpot_seconds = 0;  ///< mean over tokens, without each request's first
  double p99_tpot_seconds = 0;
  double stall_seconds = 0;  ///< mean
  double p99_stall_seconds = 0;
  double wait_seconds = 0;  ///< mean: from its arrival until a request decodes
  double p99_wait_seconds = 0;
  double streams = 0;                        ///< that decode, on average over tokens
  double recall_share = 0, store_share = 0;  ///< of the link's time, each direction
  double stored_bytes = 0, recalled_bytes = 0, loaded_bytes = 0;
  double hbm_bytes = 0;  ///< the most that requests had at a time
  // Requests by the answer with which they entered: nothing of them is placed in the store, some of
  // them is, what they had there was recomputed; and answers that they do not enter yet.
  std::int64_t admitted_whole = 0, admitted_placed = 0, recomputed = 0, deferred = 0;
  std::int64_t recomputed_tokens = 0;
  pulseinfer::schedule_statistics schedule;
  std::uint64_t end_ns = 0;
  [[nodiscard]] double tokens_per_second() const {
    return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
  }
};

/// Of values in any order, the one that `share` of them do not exceed; 0 of none.
inline double quantile(std::vector<double> values, double share) {
  if (values.empty()) return 0;
  const auto n = static_cast<double>(values.size());
  const auto i = static_cast<std::size_t>(std::clamp(std::ceil(share * n) - 1, 0.0, n - 1));
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(i), values.end());
  return values[i];
}

/// How a server lets its policy look, and how much it has under way.
struct serving_options {
  double decide_seconds = 0.002;
  double window_seconds = 0.05;  ///< of the link monitor
  std::int32_t stores = 8;       ///< offloads at a time
  std::int32_t most_streams = 128;
  double flops = 5e14;  ///< a second, of a prefill: half of what an H100 has in BF16
};

}  // namespace simulate
