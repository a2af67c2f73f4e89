// SPDX-License-Identifier: Apache-2.0
/// @file
/// The pure parts of top_k.hpp. Selections through a backend are in the conformance suite.
#include "pulseinfer/top_k.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/lanes.hpp"

namespace {

using pulseinfer::ordered_score_bits;
using pulseinfer::top_k_index;
using pulseinfer::top_k_key;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

std::vector<float> interesting_scores() {
  using limits = std::numeric_limits<float>;
  std::vector<float> scores = {
      -inf, limits::lowest(),     -1.5f,         -limits::min(), -limits::denorm_min(),
      0.0f, limits::denorm_min(), limits::min(), 1.0f,           limits::max(),
      inf};
  pulseinfer::detail::random_source draw(3);
  while (scores.size() < 400) {
    const float score = pulseinfer::detail::float_of(static_cast<std::uint32_t>(draw.next()));
    if (!std::isnan(score)) scores.push_back(score);
  }
  return scores;
}

}  // namespace

TEST_CASE("top-k: ordered bits order as scores do") {
  const std::vector<float> scores = interesting_scores();
  bool all = true;
  for (const float a : scores) {
    for (const float b : scores) {
      all = all && (a < b) == (ordered_score_bits(a) < ordered_score_bits(b));
    }
  }
  CHECK(all);
}

TEST_CASE("top-k: zeros are equal, NaN of any kind is below everything") {
  CHECK(ordered_score_bits(0.0f) == ordered_score_bits(-0.0f));
  const std::uint32_t nans[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xffffffffu, 0x7fffffffu};
  for (const std::uint32_t bits : nans) {
    CHECK(ordered_score_bits(pulseinfer::detail::float_of(bits)) ==
          ordered_score_bits(not_a_number));
    CHECK(ordered_score_bits(pulseinfer::detail::float_of(bits)) < ordered_score_bits(-inf));
  }
}

TEST_CASE("top-k: a key gives its index back, the lower index has the larger key") {
  const std::int32_t last = static_cast<std::int32_t>(pulseinfer::max_top_k_columns - 1);
  for (const float score : {-inf, -1.0f, 0.0f, 1.0f, inf, not_a_number}) {
    for (const std::int32_t index : {0, 1, 65'535, 65'536, last - 1, last}) {
      CHECK(top_k_index(top_k_key(score, index)) == index);
    }
    CHECK(top_k_key(score, 0) > top_k_key(score, 1));
    CHECK(top_k_key(score, last - 1) > top_k_key(score, last));
  }
  CHECK(top_k_key(-1.0f, last) > top_k_key(-inf, 0));
  CHECK(top_k_key(-0.0f, 0) > top_k_key(0.0f, 1));
}

TEST_CASE("top-k: compaction does not depend on the size of the group") {
  constexpr std::int64_t rows = 4;
  constexpr std::int64_t stride = 150;
  const std::vector<std::int32_t> begin = {0, 7, 20, 9};
  const std::vector<std::int32_t> end = {150, 100, 20, 4};  // the last one ends before it begins
  pulseinfer::detail::random_source draw(5);
  std::vector<std::uint64_t> keys;
  for (std::int64_t i = 0; i < rows * stride; ++i) {
    const auto score = static_cast<float>(draw.below(20));
    keys.push_back(top_k_key(score, static_cast<std::int32_t>(i % stride)));
  }
  const pulseinfer::top_k_keys view{keys.data(), stride, begin.data(), end.data()};

  for (const std::int64_t k : {0, 1, 30, 93, 94, 200}) {
    CAPTURE(k);
    std::vector<std::uint64_t> scratch(stride), thresholds(rows);
    const pulseinfer::find_top_k_threshold find{view, k, scratch.data(), thresholds.data()};
    for (std::int64_t r = 0; r < rows; ++r) find(r, pulseinfer::detail::single_lane{});

    const auto size = static_cast<std::size_t>(rows * k);
    std::vector<std::int32_t> selected(size, 99), counts(rows, 99);
    const pulseinfer::compact_top_k compact{view, k, thresholds.data(), selected.data(),
                                            counts.data()};
    for (std::int64_t r = 0; r < rows; ++r) compact(r, pulseinfer::detail::single_lane{});
    for (std::size_t r = 0; r < 4; ++r) {
      const std::int64_t length = std::max(end[r] - begin[r], 0);
      CHECK(counts[r] == std::min(k, length));
      const auto first = selected.begin() + static_cast<std::ptrdiff_t>(r) * k;
      CHECK(std::is_sorted(first, first + counts[r]));
      CHECK(std::count(first, first + k, -1) == k - counts[r]);
      for (auto chosen = first; chosen != first + counts[r]; ++chosen) {
        CHECK((*chosen >= begin[r] && *chosen < end[r]));
      }
    }

    for (const int lanes : {2, 5, 32}) {
      std::vector<std::int32_t> other(size, 98), other_counts(rows, 98);
      test::run_rows(
          rows, lanes,
          pulseinfer::compact_top_k{view, k, thresholds.data(), other.data(), other_counts.data()});
      CHECK((other == selected));
      CHECK((other_counts == counts));
    }
  }
}
