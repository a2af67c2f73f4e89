// SPDX-License-Identifier: Apache-2.0
/// @file
/// What many timings come to.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace pulseinfer_bench {

/// The middle one; of an even number, the upper of the two. There is at least one.
[[nodiscard]] inline double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace pulseinfer_bench
