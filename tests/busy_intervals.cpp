// SPDX-License-Identifier: Apache-2.0
/// @file
/// The union of intervals against one that is painted second by second.
#include "pulseinfer/detail/busy_intervals.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"

namespace {

using pulseinfer::detail::busy_intervals;
using pulseinfer::detail::random_source;

constexpr double ages_ago = -1e9;

/// Whole seconds, each busy or not.
struct painted {
  std::vector<bool> busy = std::vector<bool>(4'000, false);

  double add(std::size_t begin, std::size_t end) {
    double added = 0;
    for (std::size_t i = begin; i < end; ++i) {
      added += busy[i] ? 0 : 1;
      busy[i] = true;
    }
    return added;
  }
  [[nodiscard]] double busy_within(std::size_t begin, std::size_t end) const {
    return static_cast<double>(std::count(busy.begin() + static_cast<std::ptrdiff_t>(begin),
                                          busy.begin() + static_cast<std::ptrdiff_t>(end), true));
  }
};

}  // namespace

TEST_CASE("busy_intervals: what overlaps counts once, in whatever order it comes") {
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    CAPTURE(seed);
    random_source draw(seed);
    busy_intervals intervals;
    painted model;
    for (int i = 0; i < 120; ++i) {  // fewer than the limit, so nothing is estimated
      const std::size_t begin = draw.below(900), end = begin + 1 + draw.below(1 + 20 * (seed % 3));
      const auto from = static_cast<double>(begin), to = static_cast<double>(end);
      CHECK(intervals.add(from, to, ages_ago) == model.add(begin, end));
      const std::size_t a = draw.below(1'000), b = a + draw.below(1'000);
      CHECK(intervals.busy_within(static_cast<double>(a), static_cast<double>(b)) ==
            model.busy_within(a, b));
    }
    CHECK(intervals.busy_within(0, 2'000) == model.busy_within(0, 2'000));
  }
}

TEST_CASE("busy_intervals: those that touch are one, the newest ends last") {
  busy_intervals intervals;
  CHECK(intervals.newest() == 0);
  CHECK(intervals.size() == 0);
  CHECK(intervals.add(5, 6, ages_ago) == 1);
  CHECK(intervals.add(1, 2, ages_ago) == 1);
  CHECK(intervals.newest() == 6);
  CHECK(intervals.size() == 2);
  CHECK(intervals.add(2, 5, ages_ago) == 3);
  CHECK(intervals.size() == 1);
  CHECK(intervals.add(1, 6, ages_ago) == 0);
  CHECK(intervals.busy_within(0, 3.5) == 2.5);
  intervals.clear();
  CHECK(intervals.busy_within(0, 9) == 0);
}

TEST_CASE("busy_intervals: beyond the limit the newest are exact, and the sum is right") {
  for (const std::size_t every : {1u, 3u, 7u}) {  // every nth comes late
    CAPTURE(every);
    busy_intervals intervals;
    painted model;
    for (std::size_t i = 0; i < 500; ++i) {
      const std::size_t late = every > 1 && i % every == 0 && i > 10 ? 9 : 0;
      const std::size_t begin = 4 * (i - late) + (late > 0 ? 2 : 0);
      CHECK(intervals.add(static_cast<double>(begin), static_cast<double>(begin + 1), ages_ago) ==
            model.add(begin, begin + 1));
      REQUIRE(intervals.size() <= busy_intervals::limit);
    }
    CHECK(intervals.busy_within(0, 4'000) == doctest::Approx(model.busy_within(0, 4'000)));
    CHECK(intervals.busy_within(1'700, 2'000) == model.busy_within(1'700, 2'000));
    // Of a regular pattern the estimate of what is older is close, too.
    CHECK(intervals.busy_within(400, 1'200) ==
          doctest::Approx(model.busy_within(400, 1'200)).epsilon(0.05));
  }
}

TEST_CASE("busy_intervals: what is older than the horizon makes room") {
  busy_intervals intervals;
  for (int i = 0; i < 5'000; ++i) {
    const double begin = 2.0 * i;
    CHECK(intervals.add(begin, begin + 1, begin + 1 - 50.5) == 1);
  }
  CHECK(intervals.busy_within(9'999 - 50, 9'999) == 25);
  CHECK(intervals.busy_within(0, 1'000) == 0);
}

TEST_CASE("busy_intervals: what comes before all others, when there is no room, is not lost") {
  busy_intervals intervals;
  for (int i = 0; i < 200; ++i) (void)intervals.add(1'000 + 2 * i, 1'001 + 2 * i, ages_ago);
  const std::uint64_t before = test::allocations();
  CHECK(intervals.add(10, 20, ages_ago) == 10);
  CHECK(test::allocations() == before);
  CHECK(intervals.busy_within(0, 2'000) == doctest::Approx(210));
  CHECK(intervals.size() == busy_intervals::limit - 1);
}
