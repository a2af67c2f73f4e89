// SPDX-License-Identifier: Apache-2.0
/// @file
/// The least recently used order against a list that is searched.
#include "pulseinfer/eviction.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "conformance/eviction.hpp"
#include "support/eviction_model.hpp"
#include "support/rounds.hpp"

namespace {

using namespace eviction_test;
using pulseinfer::lru;

/// The order as one would write it down: oldest first.
class naive_lru {
 public:
  void insert(std::int32_t group, const eviction_entry&) { order_.push_back(group); }
  void touch(std::int32_t group) {
    erase(group);
    order_.push_back(group);
  }
  void erase(std::int32_t group) { take(order_, group); }
  void evict(std::int32_t group) { erase(group); }
  [[nodiscard]] std::int32_t victim(const std::vector<bool>& allowed) const {
    return first_of(order_, allowed);
  }

 private:
  std::vector<std::int32_t> order_;
};

}  // namespace

TEST_CASE("lru: keeps what every policy keeps") {
  conformance::check_eviction_policy<lru>();
}

TEST_CASE("lru: an empty order has no victim") {
  CHECK(lru(0).victim(any) == -1);
  CHECK(lru(0).capacity() == 0);
  CHECK(lru(5).victim(any) == -1);
  CHECK(lru(5).capacity() == 5);
}

TEST_CASE("lru: the victim is the least recently inserted or touched") {
  lru policy(4);
  for (const std::int32_t group : {2, 0, 3}) policy.insert(group, {});
  CHECK(policy.victim(any) == 2);
  policy.touch(2);
  CHECK(policy.victim(any) == 0);
  policy.touch(3);
  policy.touch(3);
  CHECK(policy.victim(any) == 0);
  CHECK(policy.victim([](std::int32_t group) { return group != 0; }) == 2);
  policy.erase(0);
  CHECK(order_of(policy) == std::vector<std::int32_t>{2, 3});
  policy.insert(0, {});  // as the most recent, not where it was
  CHECK(order_of(policy) == std::vector<std::int32_t>{2, 3, 0});
}

TEST_CASE("lru: random operations keep the order of a searched list") {
  for (const std::int32_t capacity : {1, 2, 17}) {
    CAPTURE(capacity);
    CHECK(differences(lru(capacity), naive_lru(), static_cast<std::uint64_t>(capacity),
                      test::rounds(40'000, 4'000'000), few_keys{40}) == 0);
  }
}

TEST_CASE("lru: broken calls throw and change nothing") {
  lru policy(3);
  policy.insert(1, {});
  policy.insert(0, {});
  CHECK_THROWS_WITH_AS(policy.insert(1, {}), "lru: group 1 is in already", std::logic_error);
  CHECK_THROWS_WITH_AS(policy.touch(2), "lru: group 2 is not in", std::logic_error);
  CHECK_THROWS_WITH_AS(policy.erase(2), "lru: group 2 is not in", std::logic_error);
  CHECK_THROWS_WITH_AS(policy.touch(3), "lru: group is 3, expected 0 to 2", std::out_of_range);
  CHECK(order_of(policy) == std::vector<std::int32_t>{1, 0});
  policy.erase(1);
  CHECK_THROWS_AS(policy.erase(1), std::logic_error);
  CHECK_THROWS_WITH_AS(lru(-1), "lru: capacity is -1, expected at least 0", std::invalid_argument);
  CHECK_THROWS_WITH_AS(lru(2'147'483'647),
                       "lru: capacity is 2147483647, expected at most 2147483646",
                       std::invalid_argument);
}
