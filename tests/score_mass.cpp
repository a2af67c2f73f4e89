// SPDX-License-Identifier: Apache-2.0
/// @file
/// The exponential and the softmax against double precision, and for groups of any size.
#include "pulseinfer/score_mass.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/lanes.hpp"

namespace {

using pulseinfer::normalise_scores;
using pulseinfer::detail::exponential;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t stride = 192;

struct softmax {
  std::vector<float> scores;
  std::vector<float> partial = std::vector<float>(2 * 64);
  std::vector<float> factor = std::vector<float>(2);
  std::int32_t begin[2] = {0, 0};
  std::int32_t end[2] = {0, 0};

  /// One row of two columns.
  softmax(std::int32_t first, std::int32_t last, std::uint64_t seed) {
    begin[0] = first;
    end[0] = last;
    pulseinfer::detail::random_source draw(seed);
    for (std::int64_t i = 0; i < 2 * stride; ++i) {
      scores.push_back((static_cast<float>(draw.below(4096)) - 2048.0f) * 0x1p-8f);
    }
  }
  normalise_scores body() {
    return {.scores = scores.data(),
            .stride = stride,
            .columns = 2,
            .begin = begin,
            .end = end,
            .partial = partial.data(),
            .factor = factor.data()};
  }
  void run(int lanes) {
    if (lanes > 1) return test::run_rows(2, lanes, body());
    for (std::int64_t row = 0; row < 2; ++row) body()(row, pulseinfer::detail::single_lane{});
  }
};

/// The first `count` of both, to the bit.
bool are_same(const std::vector<float>& a, const std::vector<float>& b, std::int64_t count) {
  return std::equal(a.begin(), a.begin() + count, b.begin(), [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  });
}

}  // namespace

TEST_CASE("score mass: the exponential of what is not above 0") {
  double worst = 0;
  for (int i = 0; i <= 20'000; ++i) {
    const float x = -86.0f * static_cast<float>(i) / 20'000.0f;
    const double exact = std::exp(static_cast<double>(x));
    worst = std::max(worst, std::abs(static_cast<double>(exponential(x)) / exact - 1.0));
  }
  CHECK(worst < 1e-5);
  CHECK(exponential(0.0f) == 1.0f);
  CHECK(exponential(-0.0f) == 1.0f);
  CHECK(exponential(-88.0f) == 0.0f);
  CHECK(exponential(-1e30f) == 0.0f);
  CHECK(exponential(-inf) == 0.0f);
  CHECK(std::isnan(exponential(not_a_number)));
  float before = 0.0f;
  int falls = 0;  // (by a rounding, here and there, where the power of two changes)
  for (float x = -5.0f; x <= 0.0f; x += 1.0f / 4096) {
    falls += exponential(x) < before;
    before = exponential(x);
  }
  CHECK(falls == 0);
}

TEST_CASE("score mass: shares are those of double precision, and sum to one") {
  struct range {
    std::int32_t first, last;
  };
  for (const range r : {range{0, 192}, range{3, 130}, range{70, 75}, range{64, 128}, range{5, 6}}) {
    CAPTURE(r.first);
    softmax s(r.first, r.last, 3);
    const std::vector<float> before = s.scores;
    s.run(1);
    for (std::size_t column = 0; column < 2; ++column) {
      double sum = 0;
      double shares = 0;
      for (auto i = static_cast<std::size_t>(r.first); i < static_cast<std::size_t>(r.last); ++i) {
        sum += std::exp(static_cast<double>(before[column * stride + i]));
      }
      for (std::size_t i = 0; i < stride; ++i) {
        const std::size_t at = column * stride + i;
        if (i < static_cast<std::size_t>(r.first) || i >= static_cast<std::size_t>(r.last)) {
          CHECK(s.scores[at] == before[at]);
          continue;
        }
        const double share =
            static_cast<double>(s.scores[at]) * static_cast<double>(s.factor[column]);
        CHECK(share ==
              doctest::Approx(std::exp(static_cast<double>(before[at])) / sum).epsilon(3e-5));
        shares += share;
      }
      CHECK(shares == doctest::Approx(1.0).epsilon(1e-6));
    }
  }
}

TEST_CASE("score mass: the result does not depend on the size of the group") {
  for (const bool special : {false, true}) {
    softmax alone(3, 177, 5);
    if (special) {
      alone.scores[9] = alone.scores[stride + 70] = not_a_number;
      alone.scores[10] = -inf;
      alone.scores[stride + 80] = alone.scores[stride + 81] = inf;
    }
    const std::vector<float> before = alone.scores;
    alone.run(1);
    for (const int lanes : {2, 5, 8}) {
      softmax together(3, 177, 5);
      together.scores = before;
      together.run(lanes);
      CHECK(are_same(together.scores, alone.scores, 2 * stride));
      CHECK(are_same(together.factor, alone.factor, 2));
    }
  }
}

TEST_CASE("score mass: NaN counts for nothing, infinite scores share all, nothing has no factor") {
  softmax s(0, 8, 7);
  s.scores[2] = not_a_number;
  s.scores[stride + 3] = s.scores[stride + 5] = inf;
  s.run(1);
  CHECK(std::isnan(s.scores[2]));
  CHECK(std::isfinite(s.factor[0]));
  CHECK(s.factor[1] == 0.5f);
  for (std::size_t i = 0; i < 8; ++i) {
    CHECK(s.scores[stride + i] == (i == 3 || i == 5 ? 1.0f : 0.0f));
  }
  softmax low(0, 4, 7);
  for (std::size_t i = 0; i < 4; ++i) low.scores[i] = -inf;
  for (std::size_t i = 0; i < 4; ++i) low.scores[stride + i] = not_a_number;
  low.run(1);
  CHECK(low.factor[0] == 0.25f);
  CHECK(std::isnan(low.factor[1]));
  softmax empty(5, 5, 7);
  empty.run(1);
  CHECK(std::isnan(empty.factor[0]));
  softmax whole(0, 100, 9), from_zero(50, 100, 9);
  whole.run(1);
  auto body = from_zero.body();
  body.begin = nullptr;
  for (std::int64_t row = 0; row < 2; ++row) body(row, pulseinfer::detail::single_lane{});
  CHECK(from_zero.scores == whole.scores);
}
