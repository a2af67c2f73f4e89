// SPDX-License-Identifier: Apache-2.0
/// @file
/// The least recently used order against a list that is searched.
#include "pulseinfer/eviction.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/rounds.hpp"

namespace {

using pulseinfer::lru;

/// The order as one would write it down: oldest first.
class naive_lru {
 public:
  void insert(std::int32_t group) { order_.push_back(group); }
  void touch(std::int32_t group) {
    erase(group);
    insert(group);
  }
  void erase(std::int32_t group) { order_.erase(std::find(order_.begin(), order_.end(), group)); }
  [[nodiscard]] bool contains(std::int32_t group) const {
    return std::find(order_.begin(), order_.end(), group) != order_.end();
  }
  [[nodiscard]] std::int32_t victim() const { return order_.empty() ? -1 : order_.front(); }
  [[nodiscard]] const std::vector<std::int32_t>& order() const { return order_; }

 private:
  std::vector<std::int32_t> order_;
};

constexpr auto any = [](std::int32_t) { return true; };

/// The whole order, taken off a copy victim by victim.
std::vector<std::int32_t> order_of(lru policy) {
  std::vector<std::int32_t> order;
  for (std::int32_t group = policy.victim(any); group >= 0; group = policy.victim(any)) {
    order.push_back(group);
    policy.evict(group);
  }
  return order;
}

}  // namespace

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
  policy.erase(0);
  CHECK(order_of(policy) == std::vector<std::int32_t>{2, 3});
  policy.insert(0, {});  // as the most recent, not where it was
  CHECK(order_of(policy) == std::vector<std::int32_t>{2, 3, 0});
}

TEST_CASE("lru: random operations keep the order of a searched list") {
  for (const std::int32_t capacity : {1, 2, 17}) {
    CAPTURE(capacity);
    lru policy(capacity);
    naive_lru model;
    pulseinfer::detail::random_source draw(static_cast<std::uint64_t>(capacity));
    std::int64_t differences = 0;
    for (int i = 0; i < test::rounds(5'000, 500'000); ++i) {
      const auto group =
          static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(capacity)));
      if (!model.contains(group)) {
        policy.insert(group, {});
        model.insert(group);
      } else if (draw.one_in(2)) {
        policy.touch(group);
        model.touch(group);
      } else {
        policy.erase(group);
        model.erase(group);
      }
      if (policy.victim(any) != model.victim()) ++differences;
      if (policy.contains(group) != model.contains(group)) ++differences;
      if (i % 50 == 0 && order_of(policy) != model.order()) ++differences;
    }
    CHECK(differences == 0);
  }
}

TEST_CASE("lru: broken calls throw and change nothing") {
  lru policy(3);
  policy.insert(1, {});
  policy.insert(0, {});
  CHECK_THROWS_WITH_AS(policy.insert(1, {}), "lru: group 1 is in already", std::logic_error);
  CHECK_THROWS_WITH_AS(policy.touch(2), "lru: group 2 is not in", std::logic_error);
  CHECK_THROWS_WITH_AS(policy.erase(2), "lru: group 2 is not in", std::logic_error);
  for (const std::int32_t group : {-1, 3, 4}) {  // 3 is where the list keeps its ends
    CHECK_THROWS_AS(policy.insert(group, {}), std::out_of_range);
    CHECK_THROWS_AS(policy.touch(group), std::out_of_range);
    CHECK_THROWS_AS(policy.erase(group), std::out_of_range);
    CHECK_THROWS_AS((void)policy.contains(group), std::out_of_range);
  }
  CHECK(order_of(policy) == std::vector<std::int32_t>{1, 0});
  policy.erase(1);
  CHECK_THROWS_AS(policy.erase(1), std::logic_error);
  CHECK_THROWS_WITH_AS(lru(-1), "lru: capacity is -1, expected at least 0", std::invalid_argument);
}
