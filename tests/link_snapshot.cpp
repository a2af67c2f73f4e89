// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ranks agree on the worst of their links, in whatever order they merge.
#include "pulseinfer/link_snapshot.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "pulseinfer/detail/random.hpp"

namespace {

using pulseinfer::link_load;
using pulseinfer::link_snapshot;
using pulseinfer::merge;
using pulseinfer::detail::check_snapshot;
using pulseinfer::detail::random_source;

static_assert(std::is_trivially_copyable_v<link_snapshot>);

link_load drawn_load(random_source& draw) {
  return {.utilisation = static_cast<double>(draw.below(5)) / 4,
          .seconds_per_byte = static_cast<double>(draw.below(4)) * 1e-11,
          .queued_bytes = static_cast<std::int64_t>(draw.below(4)) << 20,
          .queued_transfers = static_cast<std::int64_t>(draw.below(4))};
}
link_snapshot drawn_snapshot(random_source& draw) {
  return {.recalls = drawn_load(draw),
          .stores = drawn_load(draw),
          .taken_at = static_cast<double>(draw.below(4))};
}

}  // namespace

TEST_CASE("link_snapshot: merging is commutative, associative and idempotent") {
  random_source draw(1);
  for (int i = 0; i < 2'000; ++i) {
    const link_snapshot a = drawn_snapshot(draw), b = drawn_snapshot(draw),
                        c = drawn_snapshot(draw);
    CHECK(merge(a, b) == merge(b, a));
    CHECK(merge(a, merge(b, c)) == merge(merge(a, b), c));
    CHECK(merge(a, a) == a);
    CHECK(merge(a, merge(a, b)) == merge(a, b));
    CHECK(merge(a, link_snapshot{}) == a);
  }
}

TEST_CASE("fault 65: of ranks in any order the same comes out, the worst in each field") {
  random_source draw(2);
  for (std::size_t ranks = 1; ranks <= 8; ++ranks) {
    std::vector<link_snapshot> local;
    for (std::size_t i = 0; i < ranks; ++i) local.push_back(drawn_snapshot(draw));
    const link_snapshot agreed = merge(local);
    for (int i = 0; i < 20; ++i) {
      std::swap(local[draw.below(ranks)], local[draw.below(ranks)]);
      CHECK(merge(local) == agreed);
    }
    double busiest = 0;
    std::int64_t deepest = 0;
    for (const link_snapshot& l : local) {
      busiest = std::max({busiest, l.recalls.utilisation, l.stores.utilisation});
      deepest = std::max(deepest, l.stores.queued_bytes);
    }
    CHECK(agreed.utilisation() == busiest);
    CHECK(agreed.stores.queued_bytes == deepest);
  }
  CHECK(merge(std::vector<link_snapshot>{}) == link_snapshot{});
}

TEST_CASE("link_snapshot: what is unknown does not hide what a rank knows") {
  link_snapshot known, unknown;
  known.recalls.seconds_per_byte = 2e-11;
  CHECK(merge(unknown, known).recalls.seconds_per_byte == 2e-11);
  CHECK(merge(known, unknown).recalls.seconds_per_byte == 2e-11);
  known.stores.utilisation = 0.25;
  known.recalls.utilisation = 0.125;
  CHECK(known.utilisation() == 0.25);
}

TEST_CASE("link_snapshot: a field that cannot be is named") {
  const double bad[] = {-1, std::numeric_limits<double>::quiet_NaN(),
                        std::numeric_limits<double>::infinity()};
  for (const double value : bad) {
    CAPTURE(value);
    link_snapshot link;
    link.recalls.utilisation = value;
    CHECK_THROWS_AS(check_snapshot("test", link), std::invalid_argument);
    link = {};
    link.stores.seconds_per_byte = value;
    CHECK_THROWS_AS(check_snapshot("test", link), std::invalid_argument);
    link = {};
    link.taken_at = value;
    CHECK_THROWS_AS(check_snapshot("test", link), std::invalid_argument);
  }
  link_snapshot link;
  link.stores.utilisation = 1;
  check_snapshot("test", link);
  link.stores.utilisation = 1.5;
  CHECK_THROWS_WITH_AS(check_snapshot("test", link),
                       "test: utilisation is 1.500000, expected 0 to 1.000000",
                       std::invalid_argument);
  link = {};
  link.recalls.queued_bytes = -3;
  CHECK_THROWS_WITH_AS(check_snapshot("test", link),
                       "test: queued_bytes is -3, expected at least 0", std::invalid_argument);
  link = {};
  link.recalls.queued_transfers = -1;
  CHECK_THROWS_AS(check_snapshot("test", link), std::invalid_argument);
}
