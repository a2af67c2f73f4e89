// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is seen once is not stored, what is seen again within the window is.
#include "pulseinfer/admission_filter.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <deque>
#include <set>
#include <stdexcept>

#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"
#include "support/rounds.hpp"

using pulseinfer::reuse_filter;

TEST_CASE("reuse_filter: the second sight admits") {
  reuse_filter filter(10);
  CHECK(!filter.admit(7));
  CHECK(!filter.admit(8));
  CHECK(filter.admit(7));
  CHECK(filter.admit(7));
  CHECK(filter.admit(8));
  CHECK(filter.admit(0));  // nobody's name
  CHECK(filter.window() == 10);
}

TEST_CASE("fault 70: of traffic without reuse next to nothing is stored") {
  for (const std::int64_t window : {1, 10, 1'000, 1'023, 1'025, 50'000}) {
    for (const std::uint64_t stride : {std::uint64_t{1}, std::uint64_t{1} << 32}) {
      CAPTURE(window);
      CAPTURE(stride);
      reuse_filter filter(window);
      const std::int64_t blocks = test::rounds(200'000, 10'000'000);
      std::int64_t stored = 0;
      for (std::int64_t i = 1; i <= blocks; ++i) {
        stored += filter.admit(static_cast<std::uint64_t>(i) * stride) ? 1 : 0;
      }
      CHECK(stored <= blocks / 1'000);
    }
  }
}

TEST_CASE("reuse_filter: a key is remembered for the window, and forgotten after twice that") {
  for (const std::int64_t window : {1, 2, 10, 1'000}) {
    CAPTURE(window);
    std::uint64_t next = 1'000'000;
    std::int64_t missed = 0, kept = 0;
    const int tries = 200;
    for (int i = 0; i < tries; ++i) {
      reuse_filter filter(window);
      for (int first = 0; first < i; ++first) (void)filter.admit(++next);  // any phase
      const std::uint64_t key = ++next;
      (void)filter.admit(key);
      for (std::int64_t other = 0; other < window; ++other) (void)filter.admit(++next);
      reuse_filter later = filter;
      if (!filter.admit(key)) ++missed;
      for (std::int64_t other = 0; other < window; ++other) (void)later.admit(++next);
      if (later.admit(key)) ++kept;
    }
    CHECK(missed == 0);
    CHECK(kept <= tries / 50);  // by the chance of any new key
  }
}

TEST_CASE("reuse_filter: random sights against sets") {
  const std::int64_t window = 500;
  reuse_filter filter(window);
  std::set<std::uint64_t> filling, before;
  pulseinfer::detail::random_source draw(3);
  std::int64_t missed = 0, by_chance = 0;
  const std::int64_t sights = test::rounds(100'000, 10'000'000);
  const std::uint64_t allocated = test::allocations();
  std::uint64_t by_model = 0;
  for (std::int64_t i = 0; i < sights; ++i) {
    const std::uint64_t key = draw.below(3'000) + 1;
    const bool admitted = filter.admit(key);
    const std::uint64_t at = test::allocations();
    const bool known = filling.count(key) != 0 || before.count(key) != 0;
    if (known && !admitted) ++missed;
    if (!known && admitted) ++by_chance;
    if (!admitted) {
      if (static_cast<std::int64_t>(filling.size()) == window) {
        before.swap(filling);
        filling.clear();
      }
      filling.insert(key);
    }
    by_model += test::allocations() - at;
  }
  CHECK(missed == 0);
  CHECK(by_chance <= sights / 1'000);
  CHECK(test::allocations() - allocated == by_model);
}

TEST_CASE("reuse_filter: a window that is none is refused") {
  CHECK_THROWS_WITH_AS(reuse_filter(0), "reuse_filter: window is 0, expected 1 to 1073741824",
                       std::invalid_argument);
  CHECK_THROWS_AS(reuse_filter((std::int64_t{1} << 30) + 1), std::invalid_argument);
  CHECK_THROWS_AS(reuse_filter(-1), std::invalid_argument);
}
