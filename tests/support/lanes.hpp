// SPDX-License-Identifier: Apache-2.0
/// @file
/// A row group of several lanes on the host, one thread each: for the law that the result of a row
/// kernel does not depend on the size of its group.
#pragma once

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <thread>
#include <vector>

#include "pulseinfer/concepts.hpp"

namespace test {

/// Lanes meet at a barrier, leave a value each, and read what the others left.
class lane_group {
 public:
  struct meeting {
    explicit meeting(int size) : arrive(size), values(static_cast<std::size_t>(size)) {}
    std::barrier<> arrive;
    std::vector<std::int64_t> values;
  };

  lane_group(int rank, meeting& with) : rank_(rank), with_(&with) {}

  [[nodiscard]] int rank() const { return rank_; }
  [[nodiscard]] int size() const { return static_cast<int>(with_->values.size()); }
  void sync() const { with_->arrive.arrive_and_wait(); }
  [[nodiscard]] std::int64_t sum(std::int64_t value) const {
    return meet(value, [](const auto& all, std::ptrdiff_t) {
      return std::accumulate(all.begin(), all.end(), std::int64_t{0});
    });
  }
  [[nodiscard]] std::int64_t min(std::int64_t value) const {
    return meet(value, [](const auto& all, std::ptrdiff_t) {
      return *std::min_element(all.begin(), all.end());
    });
  }
  [[nodiscard]] std::int64_t scan(std::int64_t value) const {
    return meet(value, [](const auto& all, std::ptrdiff_t rank) {
      return std::accumulate(all.begin(), all.begin() + rank, std::int64_t{0});
    });
  }

 private:
  template <class Reduce>
  std::int64_t meet(std::int64_t value, Reduce reduce) const {
    with_->values[static_cast<std::size_t>(rank_)] = value;
    sync();
    const std::int64_t result = reduce(with_->values, rank_);
    sync();  // before the next value is left
    return result;
  }

  int rank_;
  meeting* with_;
};
static_assert(pulseinfer::row_group<lane_group>);

/// Runs a row kernel with groups of `lanes` lanes, one row after the other.
template <class Op>
void run_rows(std::int64_t rows, int lanes, const Op& op) {
  lane_group::meeting meeting(lanes);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < lanes; ++rank) {
    threads.emplace_back([&, rank] {
      for (std::int64_t row = 0; row < rows; ++row) op(row, lane_group(rank, meeting));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace test
