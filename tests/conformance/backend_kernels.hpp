// SPDX-License-Identifier: Apache-2.0
/// @file
/// What every backend keeps: kernels over blocks and words, and over rows.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/device_array.hpp"
#include "support/hold.hpp"

namespace conformance {

using pulseinfer::stream_priority;

/// Counts the visits of each pair, and those outside the space in the last element.
struct count_visits {
  std::int32_t* visits;
  std::int64_t blocks;
  std::int64_t words;
  PULSEINFER_HD void operator()(std::int64_t block, std::int64_t word) const {
    const bool inside = block >= 0 && block < blocks && word >= 0 && word < words;
    visits[inside ? block * words + word : blocks * words] += 1;
  }
};

/// The visits of a launch over `blocks` x `words` of which the first `expected_blocks` are
/// expected.
template <class Backend>
void check_visits(Backend& backend, std::int64_t blocks, std::int64_t words,
                  const std::int32_t* device_blocks, pulseinfer::launch_limits limits,
                  std::int64_t expected_blocks, typename Backend::stream& stream) {
  CAPTURE(blocks);
  CAPTURE(words);
  CAPTURE(expected_blocks);
  std::vector<std::int32_t> expected(static_cast<std::size_t>(blocks * words + 1));
  test::device_array<std::int32_t, Backend> visits(backend, expected, stream);
  backend.for_each({blocks, words, device_blocks}, limits, 0,
                   count_visits{visits.data(), blocks, words}, stream);
  std::fill_n(expected.begin(), expected_blocks * words, 1);
  CHECK((visits.download(stream) == expected));
}

template <class Backend>
void a_kernel_visits_each_pair_once(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  for (const std::int64_t blocks : {0, 1, 2, 37}) {
    for (const std::int64_t words : {0, 1, 5, 33, 64}) {
      check_visits(backend, blocks, words, nullptr, {}, blocks, stream);
    }
  }
  check_visits(backend, 1, 3000, nullptr, {}, 1, stream);
  check_visits(backend, 3000, 1, nullptr, {}, 3000, stream);
}

template <class Backend>
void a_kernel_limited_in_ctas_visits_each_pair_once(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::high);
  for (const int ctas : {1, 2, 100}) {
    check_visits(backend, 23, 40, nullptr, {.max_ctas = ctas}, 23, stream);
    check_visits(backend, 1, 700, nullptr, {.max_ctas = ctas}, 1, stream);
  }
}

/// The count is what the device memory holds when the kernel runs, not when it is enqueued.
template <class Backend>
void a_kernel_reads_its_block_count_on_the_device(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  test::device_array<std::int32_t, Backend> count(backend, 1);
  for (const std::int32_t blocks : {-2'000'000'000, -1, 0, 1, 6, 7, 8, 2'000'000'000}) {
    count.upload({blocks}, stream);
    const std::int64_t expected = std::clamp(blocks, 0, 7);
    check_visits(backend, 7, 9, count.data(), {}, expected, stream);
    check_visits(backend, 7, 9, count.data(), {.max_ctas = 1}, expected, stream);
  }
  check_visits(backend, 0, 9, count.data(), {}, 0, stream);

  const test::pinned_array<std::int32_t, Backend> next(backend, 1);
  next[0] = 5;
  test::device_array<std::int32_t, Backend> visits(backend, std::vector<std::int32_t>(64), stream);
  count.upload({2}, stream);
  test::hold<Backend> held(backend, stream);
  backend.copy_async(count.data(), next.data(), next.bytes(),
                     pulseinfer::copy_direction::host_to_device, stream);
  backend.for_each({7, 9, count.data()}, {}, 0, count_visits{visits.data(), 7, 9}, stream);
  held.release();
  std::vector<std::int32_t> expected(64);
  std::fill_n(expected.begin(), 5 * 9, 1);
  CHECK((visits.download(stream) == expected));
}

/// Per row of `columns` integers: sum, least, the odd values in order (by scan) and how many, and
/// the row reversed (by way of memory that other lanes wrote).
struct summarise_row {
  const std::int32_t* in;
  std::int64_t columns;
  std::int64_t* sums;
  std::int64_t* least;
  std::int32_t* odd;
  std::int64_t* odd_counts;
  std::int32_t* stage;
  std::int32_t* reversed;

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int32_t* mine = in + row * columns;
    std::int64_t sum = 0;
    std::int64_t smallest = INT64_MAX;
    for (std::int64_t i = group.rank(); i < columns; i += group.size()) {
      sum += mine[i];
      if (mine[i] < smallest) smallest = mine[i];
      stage[row * columns + i] = mine[i];
    }
    sum = group.sum(sum);
    smallest = group.min(smallest);
    group.sync();
    for (std::int64_t i = group.rank(); i < columns; i += group.size()) {
      reversed[row * columns + i] = stage[row * columns + columns - 1 - i];
    }
    std::int64_t found = 0;
    for (std::int64_t start = 0; start < columns; start += group.size()) {
      const std::int64_t i = start + group.rank();
      const bool is_odd = i < columns && mine[i] % 2 != 0;
      const std::int64_t at = found + group.scan(is_odd ? 1 : 0);
      if (is_odd) odd[row * columns + at] = mine[i];
      found += group.sum(is_odd ? 1 : 0);
    }
    if (group.rank() == 0) {
      sums[row] = sum;
      least[row] = smallest;
      odd_counts[row] = found;
    }
  }
};

/// Compares with plain loops: the result does not depend on how many lanes a group has.
template <class Backend>
void check_row_summaries(Backend& backend, std::size_t rows, std::size_t columns,
                         pulseinfer::launch_limits limits, typename Backend::stream& stream) {
  CAPTURE(rows);
  CAPTURE(columns);
  pulseinfer::detail::random_source draw(rows * 10'000 + columns);
  std::vector<std::int32_t> in(rows * columns);
  for (std::int32_t& value : in) value = static_cast<std::int32_t>(draw.below(4001)) - 2000;

  std::vector<std::int64_t> sums(rows), least(rows), odd_counts(rows);
  std::vector<std::int32_t> odd(rows * columns, -1), reversed(rows * columns);
  for (std::size_t row = 0; row < rows; ++row) {
    least[row] = std::numeric_limits<std::int64_t>::max();
    std::size_t found = 0;
    for (std::size_t i = 0; i < columns; ++i) {
      const std::int32_t value = in[row * columns + i];
      sums[row] += value;
      least[row] = std::min<std::int64_t>(least[row], value);
      if (value % 2 != 0) odd[row * columns + found++] = value;
      reversed[row * columns + columns - 1 - i] = value;
    }
    odd_counts[row] = static_cast<std::int64_t>(found);
  }

  using integers = test::device_array<std::int32_t, Backend>;
  using totals = test::device_array<std::int64_t, Backend>;
  integers device_in(backend, in, stream);
  totals device_sums(backend, rows), device_least(backend, rows), device_counts(backend, rows);
  integers device_odd(backend, std::vector<std::int32_t>(rows * columns, -1), stream);
  integers stage(backend, rows * columns), device_reversed(backend, rows * columns);
  backend.for_each_row(static_cast<std::int64_t>(rows), limits, 4 * rows * columns,
                       summarise_row{device_in.data(), static_cast<std::int64_t>(columns),
                                     device_sums.data(), device_least.data(), device_odd.data(),
                                     device_counts.data(), stage.data(), device_reversed.data()},
                       stream);
  CHECK((device_sums.download(stream) == sums));
  CHECK((device_least.download(stream) == least));
  CHECK((device_counts.download(stream) == odd_counts));
  CHECK((device_odd.download(stream) == odd));
  CHECK((device_reversed.download(stream) == reversed));
}

template <class Backend>
void row_kernels_do_not_depend_on_the_group(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  for (const std::size_t columns : {0u, 1u, 31u, 32u, 33u, 255u, 257u, 1100u}) {
    check_row_summaries(backend, 5, columns, {}, stream);
  }
}

template <class Backend>
void row_kernels_run_every_row(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::high);
  for (const std::size_t rows : {0u, 1u, 2u, 130u}) {
    check_row_summaries(backend, rows, 10, {}, stream);
    check_row_summaries(backend, rows, 10, {.max_ctas = 1}, stream);
  }
}

template <class Backend>
void broken_launches_are_refused(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  test::device_array<std::int32_t, Backend> visits(backend, {0, 0, 0, 0, 0}, stream);
  const count_visits count{visits.data(), 2, 2};
  CHECK_THROWS_AS(backend.for_each({-1, 2}, {}, 0, count, stream), std::logic_error);
  CHECK_THROWS_AS(backend.for_each({2, -1}, {}, 0, count, stream), std::logic_error);
  CHECK_THROWS_AS(backend.for_each({2, 2}, {.max_ctas = -1}, 0, count, stream), std::logic_error);
  const summarise_row summary{};
  CHECK_THROWS_AS(backend.for_each_row(-1, {}, 0, summary, stream), std::logic_error);
  CHECK_THROWS_AS(backend.for_each_row(1, {.max_ctas = -1}, 0, summary, stream), std::logic_error);
  CHECK((visits.download(stream) == std::vector<std::int32_t>(5)));
}

}  // namespace conformance
