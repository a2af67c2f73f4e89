// SPDX-License-Identifier: Apache-2.0
/// @file
/// What every backend keeps: exact top-k, the same set everywhere.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/top_k.hpp"
#include "support/device_array.hpp"

namespace conformance {

using pulseinfer::stream_priority;

/// One row of a top-k: `scores` from index `begin` on.
struct scored_row {
  std::int32_t begin = 0;
  std::vector<float> scores;
  std::int32_t before = 0;  ///< where there are no scores, how far its end is before its begin
};

/// The k best by the rule in words: larger first, zeros equal, NaN last, then the lower index.
inline std::vector<std::int32_t> brute_force_top_k(const scored_row& row, std::size_t k) {
  std::vector<std::int32_t> indices(row.scores.size());
  std::iota(indices.begin(), indices.end(), row.begin);
  const auto score = [&row](std::int32_t i) {
    return row.scores[static_cast<std::size_t>(i - row.begin)];
  };
  std::stable_sort(indices.begin(), indices.end(), [&](std::int32_t a, std::int32_t b) {
    if (std::isnan(score(a)) || std::isnan(score(b)))
      return std::isnan(score(b)) && !std::isnan(score(a));
    return score(a) > score(b);
  });
  indices.resize(std::min(k, indices.size()));
  std::sort(indices.begin(), indices.end());
  return indices;
}

/// Runs a top-k over the rows and compares it with brute force. What lies outside the rows in the
/// key array would win if it were looked at; the results, and the workspace, hold something else
/// before.
/// @param limits  of each row, or none
template <class Backend>
void check_top_k(Backend& backend, const std::vector<scored_row>& rows, std::size_t k,
                 typename Backend::stream& stream, bool with_counts = true,
                 const std::vector<std::int32_t>& limits = {}) {
  CAPTURE(k);
  std::size_t columns = 0;
  std::size_t stride = 3;
  std::vector<std::int32_t> begin, end;
  for (const scored_row& row : rows) {
    begin.push_back(row.begin);
    end.push_back(row.begin + static_cast<std::int32_t>(row.scores.size()) - row.before);
    columns = std::max(columns, row.scores.size());
    stride = std::max(stride, static_cast<std::size_t>(std::max(row.begin, end.back())) + 3);
  }
  std::vector<std::uint64_t> keys(rows.size() * stride, std::numeric_limits<std::uint64_t>::max());
  std::vector<std::int32_t> selected(rows.size() * k, -1);
  std::vector<std::int32_t> counts;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t i = 0; i < rows[r].scores.size(); ++i) {
      const std::size_t index = static_cast<std::size_t>(rows[r].begin) + i;
      keys[r * stride + index] =
          pulseinfer::top_k_key(rows[r].scores[i], static_cast<std::int32_t>(index));
    }
    const std::size_t most =
        limits.empty()
            ? k
            : std::min(k, static_cast<std::size_t>(std::max<std::int32_t>(limits[r], 0)));
    const std::vector<std::int32_t> best = brute_force_top_k(rows[r], most);
    std::copy(best.begin(), best.end(), selected.begin() + static_cast<std::ptrdiff_t>(r * k));
    counts.push_back(static_cast<std::int32_t>(best.size()));
  }

  test::device_array<std::uint64_t, Backend> device_keys(backend, keys, stream);
  test::device_array<std::int32_t, Backend> device_begin(backend, begin, stream);
  test::device_array<std::int32_t, Backend> device_end(backend, end, stream);
  test::device_array<std::int32_t, Backend> device_limits(backend, limits, stream);
  test::device_array<std::int32_t, Backend> device_selected(
      backend, std::vector<std::int32_t>(selected.size(), -77), stream);
  test::device_array<std::int32_t, Backend> device_counts(
      backend, std::vector<std::int32_t>(counts.size(), -77), stream);
  const pulseinfer::top_k_shape shape{static_cast<std::int64_t>(rows.size()),
                                      static_cast<std::int64_t>(columns),
                                      static_cast<std::int64_t>(k)};
  test::device_array<std::byte, Backend> workspace(
      backend, std::vector<std::byte>(backend.top_k_workspace_bytes(shape), std::byte{0xcd}),
      stream);
  backend.top_k(shape,
                {device_keys.data(), static_cast<std::int64_t>(stride), device_begin.data(),
                 device_end.data(), limits.empty() ? nullptr : device_limits.data()},
                device_selected.data(), with_counts ? device_counts.data() : nullptr,
                {workspace.data(), workspace.bytes()}, stream);
  CHECK((device_selected.download(stream) == selected));
  if (with_counts) CHECK((device_counts.download(stream) == counts));
}

template <class Backend>
void top_k_of_random_rows_equals_brute_force(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  pulseinfer::detail::random_source draw(77);
  for (const std::size_t k : {1u, 7u, 64u}) {
    std::vector<scored_row> rows(6);
    for (scored_row& row : rows) {
      row.begin = static_cast<std::int32_t>(draw.below(5));
      row.scores.resize(draw.below(300));
      // Few different scores: ties at the threshold are the rule.
      for (float& score : row.scores) score = static_cast<float>(draw.below(40)) / 8 - 2;
    }
    rows.push_back({});
    check_top_k(backend, rows, k, stream);
    check_top_k(backend, rows, k, stream, false);
  }
}

template <class Backend>
void top_k_pads_what_is_missing(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  const std::vector<scored_row> rows = {{0, {3, 1, 2}}, {4, {}}, {6, {}, 4}, {2, {5}}};
  for (const std::size_t k : {0u, 1u, 2u, 3u, 4u, 50u}) check_top_k(backend, rows, k, stream);
  check_top_k(backend, {}, 5, stream);
  check_top_k(backend, {{0, {}}, {0, {}}}, 5, stream);
}

template <class Backend>
void top_k_orders_special_scores(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  constexpr float inf = std::numeric_limits<float>::infinity();
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  constexpr float tiny = std::numeric_limits<float>::denorm_min();
  const std::vector<scored_row> rows = {
      {0, {nan, -inf, 0.0f, -0.0f, inf, -nan, tiny, -tiny, 1.0f, -1.0f}},
      {1, {-0.0f, 0.0f, -0.0f, 0.0f, -0.0f}},
      {0, {nan, nan, -nan, nan}},
      {0, {-inf, nan, -inf, inf, inf}},
      {3, std::vector<float>(70, 1.5f)},
  };
  for (std::size_t k = 1; k <= 11; ++k) check_top_k(backend, rows, k, stream);
}

/// Far more ties at the threshold than places, and the winners between them.
template <class Backend>
void top_k_of_many_ties_and_few_winners(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  constexpr float inf = std::numeric_limits<float>::infinity();
  std::vector<scored_row> rows;
  for (const float tie : {0.0f, inf, -inf}) {
    scored_row row;
    row.scores.assign(8'320, tie);
    for (std::size_t i = 0; i < 100; ++i) {
      row.scores[i * 83 + 19] = tie > 0 ? tie : 1 + static_cast<float>(i);
    }
    rows.push_back(std::move(row));
  }
  check_top_k(backend, rows, 2'048, stream);
}

/// Rows of a power of two and one more or less, with as much chosen as the limits allow.
template <class Backend>
void top_k_of_rows_around_powers_of_two(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  pulseinfer::detail::random_source draw(16);
  std::vector<scored_row> rows;
  for (const std::size_t size : {63u, 64u, 65u, 511u, 512u, 513u, 1'023u, 1'024u, 1'025u, 2'047u,
                                 2'049u, 4'095u, 4'096u, 4'097u}) {
    scored_row row;
    row.begin = static_cast<std::int32_t>(draw.below(3));
    for (std::size_t i = 0; i < size; ++i) {
      row.scores.push_back(pulseinfer::detail::float_of(static_cast<std::uint32_t>(draw.next())));
    }
    rows.push_back(std::move(row));
  }
  for (const std::size_t k : {64u, 4'096u}) check_top_k(backend, rows, k, stream);
}

/// Equal scores go by their index, whatever else is chosen, every time.
template <class Backend>
void top_k_orders_ties_by_index(Backend& backend, int runs) {
  auto stream = backend.make_stream(stream_priority::normal);
  const scored_row row{0, {1, 2, 5, 4, 5}};
  CHECK((brute_force_top_k(row, 1) == std::vector<std::int32_t>{2}));
  CHECK((brute_force_top_k(row, 2) == std::vector<std::int32_t>{2, 4}));
  for (std::size_t k = 1; k <= 5; ++k) check_top_k(backend, {row}, k, stream);
  scored_row ties{7, {}};
  for (int i = 0; i < 700; ++i) ties.scores.push_back(static_cast<float>(i % 3));
  for (int run = 0; run < runs; ++run) check_top_k(backend, {ties}, 300, stream);
}

/// Each row may have a limit of its own below k.
template <class Backend>
void top_k_keeps_the_limits_of_rows(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  pulseinfer::detail::random_source draw(3);
  std::vector<scored_row> rows(8);
  for (scored_row& row : rows) {
    row.begin = static_cast<std::int32_t>(draw.below(5));
    row.scores.resize(40 + draw.below(900));
    for (float& score : row.scores) score = static_cast<float>(draw.below(40));
  }
  rows.push_back({2, {}});
  const std::vector<std::int32_t> limits = {0, 1, 2, 29, 30, 31, 1'000'000, -5, 3};
  for (const std::size_t k : {0u, 1u, 30u, 700u}) {
    check_top_k(backend, rows, k, stream, true, limits);
  }
}

template <class Backend>
void broken_top_ks_are_refused(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  test::device_array<std::uint64_t, Backend> keys(backend, std::vector<std::uint64_t>(32, 5),
                                                  stream);
  test::device_array<std::int32_t, Backend> begin(backend, {0, 0}, stream);
  test::device_array<std::int32_t, Backend> end(backend, {16, 16}, stream);
  test::device_array<std::int32_t, Backend> out(backend, std::vector<std::int32_t>(8, 42), stream);
  const pulseinfer::top_k_shape good{2, 16, 4};
  const pulseinfer::top_k_keys good_keys{keys.data(), 16, begin.data(), end.data()};
  const std::size_t bytes = backend.top_k_workspace_bytes(good);
  test::device_array<std::byte, Backend> memory(backend, bytes);
  const std::span<std::byte> workspace{memory.data(), bytes};

  const auto refused = [&](pulseinfer::top_k_shape shape, pulseinfer::top_k_keys from,
                           std::int32_t* selected, std::span<std::byte> scratch) {
    CHECK_THROWS_AS(backend.top_k(shape, from, selected, nullptr, scratch, stream),
                    std::logic_error);
  };
  refused({-1, 16, 4}, good_keys, out.data(), workspace);
  refused({2, -1, 4}, good_keys, out.data(), workspace);
  refused({2, 16, -4}, good_keys, out.data(), workspace);
  refused({2, pulseinfer::max_top_k_columns + 1, 4}, good_keys, out.data(), workspace);
  refused({2, 17, 4}, good_keys, out.data(), workspace);  // wider than the stride
  refused(good, {nullptr, 16, begin.data(), end.data()}, out.data(), workspace);
  refused(good, {keys.data(), 16, nullptr, end.data()}, out.data(), workspace);
  refused(good, {keys.data(), 16, begin.data(), nullptr}, out.data(), workspace);
  refused(good, good_keys, nullptr, workspace);
  if (bytes > 0) refused(good, good_keys, out.data(), workspace.first(bytes - 1));
  CHECK((out.download(stream) == std::vector<std::int32_t>(8, 42)));
}

}  // namespace conformance
