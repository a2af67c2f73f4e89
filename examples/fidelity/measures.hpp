// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the study counts: lists of blocks compared, means and quantiles, and what a budget would
/// have to be for the same mass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace fidelity {

/// How many numbers two ascending lists have in common.
inline std::int64_t overlap(std::span<const std::int32_t> a, std::span<const std::int32_t> b) {
  std::int64_t common = 0;
  std::size_t i = 0;
  std::size_t j = 0;
  while (i < a.size() && j < b.size()) {
    common += a[i] == b[j] ? 1 : 0;
    const bool first = a[i] <= b[j];
    j += b[j] <= a[i] ? 1 : 0;
    i += first ? 1 : 0;
  }
  return common;
}

/// The numbers of several lists, each once, ascending.
inline std::vector<std::int32_t> union_of(std::span<const std::span<const std::int32_t>> lists) {
  std::vector<std::int32_t> all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

/// The `k` indices of [first, last) with the largest values, ascending; of equal ones the lower.
inline std::vector<std::int32_t> largest(std::span<const double> values, std::int64_t first,
                                         std::int64_t last, std::int64_t k) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = first; i < last; ++i) ids.push_back(static_cast<std::int32_t>(i));
  const auto better = [&](std::int32_t a, std::int32_t b) {
    const double x = values[static_cast<std::size_t>(a)];
    const double y = values[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  };
  if (k < static_cast<std::int64_t>(ids.size())) {
    const auto n = static_cast<std::ptrdiff_t>(std::max<std::int64_t>(k, 0));
    std::nth_element(ids.begin(), ids.begin() + n, ids.end(), better);
    ids.resize(static_cast<std::size_t>(n));
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

/// Not a number for no values.
inline double mean(std::span<const float> values) {
  double total = 0;
  for (const float v : values) total += v;
  return total / static_cast<double>(values.size());
}

/// The value that a share of the values is at most, without interpolation; NaN for no values.
inline double quantile(std::span<const float> values, double share) {
  if (values.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::vector<float> sorted(values.begin(), values.end());
  const double last = static_cast<double>(sorted.size() - 1);
  const auto at = static_cast<std::ptrdiff_t>(std::clamp(std::floor(share * last), 0.0, last));
  std::nth_element(sorted.begin(), sorted.begin() + at, sorted.end());
  return sorted[static_cast<std::size_t>(at)];
}

/// One measured point of a budget: how many blocks, what share of the attention.
struct point {
  double blocks;
  double mass;
};

/// The budget at which a curve of fixed budgets has a mass; between two points the mass is linear
/// in the logarithm of the budget. NaN for a mass that the curve does not reach on either side.
/// @param curve  by ascending blocks, above zero, with ascending masses
inline double blocks_at(std::span<const point> curve, double mass) {
  for (std::size_t i = 1; i < curve.size(); ++i) {
    if (mass < curve[i - 1].mass || mass > curve[i].mass) continue;
    const double step = curve[i].mass - curve[i - 1].mass;
    const double part = step > 0 ? (mass - curve[i - 1].mass) / step : 0.0;
    return std::exp((1 - part) * std::log(curve[i - 1].blocks) + part * std::log(curve[i].blocks));
  }
  return std::numeric_limits<double>::quiet_NaN();
}

/// What share of the fixed budget's blocks another way to spend them saves at the same mass.
inline double saving(std::span<const point> fixed, const point& other) {
  return 1 - other.blocks / blocks_at(fixed, other.mass);
}

/// A whole number from a command line.
/// @throws std::invalid_argument  naming the argument and its value
inline std::int64_t whole_number(const std::string& name, const std::string& value,
                                 std::int64_t least) {
  const bool digits = !value.empty() && value.size() <= 9 &&
                      value.find_first_not_of("0123456789") == std::string::npos;
  const std::int64_t number = digits ? std::stoll(value) : -1;
  if (number < least) {
    throw std::invalid_argument("fidelity: " + name + " is '" + value +
                                "', expected a whole number of at least " + std::to_string(least));
  }
  return number;
}

}  // namespace fidelity
