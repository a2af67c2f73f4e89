// SPDX-License-Identifier: Apache-2.0
/// @file
/// The two lists against lists that are searched; the curves against depths that are counted; and
/// what the division is for.
#include "pulseinfer/eviction_adaptive_2q.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "conformance/eviction.hpp"
#include "pulseinfer/detail/hit_curve.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/eviction.hpp"
#include "support/eviction_model.hpp"
#include "support/rounds.hpp"

namespace {

using namespace eviction_test;
using pulseinfer::adaptive_2q;
using pulseinfer::detail::hit_curve;
using pulseinfer::detail::random_source;

/// The lists and what is remembered. How long the first list should be, it is told.
class naive_2q {
 public:
  naive_2q(std::size_t capacity, std::size_t remembered)
      : target_(capacity), remembered_(remembered), keys_(capacity) {}
  void insert(std::int32_t group, const eviction_entry& entry) {
    key_of(group) = entry.key;
    (entry.key != 0 && take(ghosts_, entry.key) ? again_ : once_).push_back(group);
  }
  void touch(std::int32_t group) {
    erase(group);
    again_.push_back(group);
  }
  void erase(std::int32_t group) { take(once_, group) || take(again_, group); }
  void evict(std::int32_t group) {
    erase(group);
    if (key_of(group) == 0) return;
    take(ghosts_, key_of(group));
    ghosts_.push_back(key_of(group));
    if (ghosts_.size() > remembered_) ghosts_.erase(ghosts_.begin());
  }
  [[nodiscard]] std::int32_t victim(const std::vector<bool>& allowed) const {
    const bool from_once = once_.size() > target_;
    const std::int32_t group = first_of(from_once ? once_ : again_, allowed);
    return group >= 0 ? group : first_of(from_once ? again_ : once_, allowed);
  }
  void set_target(std::int32_t target) { target_ = static_cast<std::size_t>(target); }

 private:
  std::uint64_t& key_of(std::int32_t group) { return keys_[static_cast<std::size_t>(group)]; }
  std::size_t target_;
  std::size_t remembered_;
  std::vector<std::int32_t> once_, again_;  // least recently used first
  std::vector<std::uint64_t> ghosts_;       // what was given up first first
  std::vector<std::uint64_t> keys_;
};

/// The policy, with a model beside it that is told the target after each call.
class told_2q {
 public:
  told_2q(std::int32_t capacity, std::int32_t remembered)
      : policy_(capacity, remembered),
        model_(static_cast<std::size_t>(capacity), static_cast<std::size_t>(remembered)) {}
  [[nodiscard]] std::int32_t capacity() const { return policy_.capacity(); }
  [[nodiscard]] bool contains(std::int32_t group) const { return policy_.contains(group); }
  void insert(std::int32_t group, const eviction_entry& entry) {
    policy_.insert(group, entry);
    model_.insert(group, entry);
  }
  void touch(std::int32_t group) {
    policy_.touch(group);
    model_.touch(group);
  }
  void erase(std::int32_t group) {
    policy_.erase(group);
    model_.erase(group);
  }
  void evict(std::int32_t group) {
    policy_.evict(group);
    model_.evict(group);
  }
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) {
    std::vector<bool> allowed;
    for (std::int32_t group = 0; group < capacity(); ++group) {
      allowed.push_back(contains(group) && can_evict(group));
    }
    model_.set_target(policy_.once_target());
    const std::int32_t group = policy_.victim(can_evict);
    if (group != model_.victim(allowed)) ++differences_;
    return group;
  }
  [[nodiscard]] std::int64_t differences() const { return differences_; }
  [[nodiscard]] std::int32_t once_target() const { return policy_.once_target(); }

 private:
  adaptive_2q policy_;
  naive_2q model_;
  std::int64_t differences_ = 0;
};

/// A cache of keys that are given up by a policy.
template <class Policy>
class cache {
 public:
  cache(std::int32_t capacity, std::size_t keys)
      : policy_(capacity), group_of_(keys, -1), key_in_(static_cast<std::size_t>(capacity)) {}
  /// @return true if it is a hit
  bool use(std::size_t key) {
    if (group_of_[key] >= 0) {
      policy_.touch(group_of_[key]);
      return true;
    }
    std::int32_t group = used_;
    if (used_ < policy_.capacity()) {
      ++used_;
    } else {
      group = policy_.victim(any);
      policy_.evict(group);
      group_of_[key_in_[static_cast<std::size_t>(group)]] = -1;
    }
    policy_.insert(group, {.key = key + 1});
    key_in_[static_cast<std::size_t>(group)] = key;
    group_of_[key] = group;
    return false;
  }
  [[nodiscard]] const Policy& policy() const { return policy_; }

 private:
  Policy policy_;
  std::vector<std::int32_t> group_of_;
  std::vector<std::size_t> key_in_;
  std::int32_t used_ = 0;
};

struct outcome {
  std::int64_t hits_of_lru = 0;
  std::int64_t hits = 0;
  std::int32_t target = 0;
};

/// @param key_of  key_of(draw, i): the key of use i, below `keys`
template <class KeyOf>
outcome compare(std::int32_t capacity, std::size_t keys, int uses, KeyOf key_of) {
  cache<pulseinfer::lru> plain(capacity, keys);
  cache<adaptive_2q> tested(capacity, keys);
  random_source draw(9);
  outcome found;
  for (int i = 0; i < uses; ++i) {
    const std::size_t key = key_of(draw, static_cast<std::size_t>(i));
    found.hits_of_lru += plain.use(key) ? 1 : 0;
    found.hits += tested.use(key) ? 1 : 0;
  }
  found.target = tested.policy().once_target();
  return found;
}

}  // namespace

TEST_CASE("adaptive_2q: keeps what every policy keeps") {
  conformance::check_eviction_policy<adaptive_2q>();
}

TEST_CASE(
    "adaptive_2q: what was used again stays while the first list is longer than it should be") {
  // Sixteen groups; what is used again comes from what was given up lately.
  adaptive_2q policy(16);
  CHECK(policy.once_target() == 16);  // at first, all
  for (std::int32_t group = 0; group < 16; ++group) policy.insert(group, {});
  policy.touch(3);
  CHECK(policy.victim(any) == 3);  // the first list has its sixteen places: it grows
  CHECK(policy.victim([](std::int32_t group) { return group != 3; }) == 0);
}

TEST_CASE("adaptive_2q: random operations keep the order of searched lists") {
  for (const std::int32_t capacity : {1, 2, 5, 17, 40}) {
    for (const std::int32_t remembered : {0, 3, 4 * capacity}) {
      CAPTURE(capacity);
      CAPTURE(remembered);
      told_2q tested(capacity, remembered);
      random_source draw(static_cast<std::uint64_t>(capacity + remembered));
      bool moved = false;
      for (int i = 0; i < test::rounds(15'000, 1'500'000); ++i) {
        const auto group =
            static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(capacity)));
        const std::uint64_t bits = draw.next() | draw.next();
        const std::uint64_t what = draw.below(16);
        if (what >= 10) {
          const std::int32_t victim =
              tested.victim([bits](std::int32_t g) { return (bits >> (g % 64) & 1) != 0; });
          if (victim >= 0) tested.evict(victim);
        } else if (!tested.contains(group)) {
          tested.insert(group, {.key = draw.below(4 * static_cast<std::uint64_t>(capacity))});
        } else if (what == 9) {
          draw.one_in(2) ? tested.erase(group) : tested.evict(group);
        } else if (what < 4) {
          tested.touch(group);
        }
        moved = moved || tested.once_target() < capacity;
      }
      CHECK(tested.differences() == 0);
      CHECK((moved || remembered < capacity));  // the division was in play
    }
  }
}

TEST_CASE("adaptive_2q: what is closed or damaged is not remembered, what is given up is") {
  for (const bool given_up : {false, true}) {
    CAPTURE(given_up);
    adaptive_2q policy(16);
    for (std::int32_t group = 0; group < 16; ++group) {
      policy.insert(group, {.key = static_cast<std::uint64_t>(group) + 1});
    }
    given_up ? policy.evict(0) : policy.erase(0);
    policy.insert(0, {.key = 1});
    CHECK(policy.victim(any) == (given_up ? 0 : 1));  // used again, or once
  }
}

TEST_CASE("hit_curve: depths are about what counting says") {
  for (const std::int32_t capacity : {16, 160, 1'600}) {
    CAPTURE(capacity);
    hit_curve curve(capacity);
    random_source draw(static_cast<std::uint64_t>(capacity));
    struct entry {
      int key;
      hit_curve::bucket entered;
    };
    std::vector<entry> row;  // most recent last
    std::vector<double> counted(hit_curve::steps);
    const int width = capacity / hit_curve::steps;
    int next = 0;
    for (int i = 0; i < test::rounds(20'000, 200'000); ++i) {
      const std::uint64_t what = draw.below(8);
      if (row.size() < 8 || what < 3) {
        row.push_back({++next, curve.enter()});
        if (row.size() > 3 * static_cast<std::size_t>(capacity)) {
          curve.leave(row.front().entered);
          row.erase(row.begin());
        }
        continue;
      }
      // Recent ones more often.
      const std::size_t depth = draw.below(draw.below(row.size()) + 1);
      const auto place = row.end() - 1 - static_cast<std::ptrdiff_t>(depth);
      const entry used = *place;
      row.erase(place);
      if (what == 7) {
        curve.leave(used.entered);
        continue;
      }
      curve.use(used.entered);
      row.push_back({used.key, curve.enter()});
      const std::size_t step = depth / static_cast<std::size_t>(width);
      if (step < counted.size()) ++counted[step];
    }
    double sum = 0, counted_sum = 0;
    for (int step = 0; step < hit_curve::steps; ++step) {
      CAPTURE(step);
      sum += static_cast<double>(curve.hits(step)) / hit_curve::weight;
      counted_sum += counted[static_cast<std::size_t>(step)];
      CHECK(std::abs(sum - counted_sum) <= 0.06 * counted_sum + 3);
    }
  }
}

TEST_CASE("hit_curve: what lies for long is deep, and what was seen fades") {
  hit_curve curve(16);
  std::vector<hit_curve::bucket> old;
  for (int i = 0; i < 8; ++i) old.push_back(curve.enter());
  hit_curve::bucket two[] = {curve.enter(), curve.enter()};
  for (int i = 0; i < 100'000; ++i) {  // they take turns, each at depth 1
    curve.use(two[i % 2]);
    two[i % 2] = curve.enter();
  }
  CHECK(curve.hits(0) == 0);
  CHECK(curve.hits(1) == 100'000 * hit_curve::weight);
  for (int i = 0; i < 4; ++i) curve.leave(old[static_cast<std::size_t>(i)]);
  curve.use(old[4]);  // two are more recent; of the four old ones, it is in the middle
  CHECK(curve.hits(4) == hit_curve::weight);
  for (int i = 5; i < 7; ++i) curve.leave(old[static_cast<std::size_t>(i)]);
  for (int i = 0; i < 10; ++i) (void)curve.enter();
  curve.use(old[7]);  // twelve are more recent
  CHECK(curve.hits(12) == hit_curve::weight);
  for (int i = 0; i < 1'000; ++i) curve.fade();
  CHECK(curve.hits(12) < hit_curve::weight / 10);
}

TEST_CASE("adaptive_2q: passing traffic does not displace what is used again") {
  // One use in four is of 60 blocks, the others are of blocks that nobody asks for twice.
  const outcome found = compare(100, 100'000, 100'000, [](random_source& draw, std::size_t i) {
    return draw.one_in(4) ? draw.below(60) : 60 + i % 99'000;
  });
  CHECK(found.target < 40);
  CHECK(static_cast<double>(found.hits) > 1.5 * static_cast<double>(found.hits_of_lru));
  CHECK(found.hits > 23'000);  // of 25,000
}

TEST_CASE("adaptive_2q: where recency is all that counts it is little worse than recency") {
  // Each block is used twice, 70 uses apart, and never again.
  const outcome found = compare(100, 50'000, 100'000, [](random_source&, std::size_t i) {
    return i % 2 == 0 || i < 70 ? i / 2 : i / 2 - 35;
  });
  CHECK(found.hits_of_lru > 49'000);
  CHECK(static_cast<double>(found.hits) >= 0.97 * static_cast<double>(found.hits_of_lru));
}

TEST_CASE("adaptive_2q: the division follows where the traffic changes") {
  // First what passes by, then what is used twice.
  const outcome found = compare(100, 200'000, 200'000, [](random_source& draw, std::size_t i) {
    if (i < 100'000) return draw.one_in(4) ? draw.below(60) : 60 + i;
    return 100'060 + (i % 2 == 0 || i < 100'070 ? i - 100'000 : i - 100'069) / 2;
  });
  CHECK(found.target >= 35);
  CHECK(found.hits > 23'000 + 46'000);
}

TEST_CASE("adaptive_2q: what is forgotten no longer counts as more recent than what stayed") {
  adaptive_2q policy(16, 1);
  std::uint64_t next_key = 100;
  for (std::int32_t group = 2; group < 15; ++group) policy.insert(group, {});
  for (int round = 0; round < 200; ++round) {
    policy.insert(0, {});
    for (int i = 0; i < 40; ++i) {  // one of them stands, one is remembered
      policy.insert(1, {.key = ++next_key});
      policy.evict(1);
    }
    policy.touch(0);  // two in the list of the once used had to be longer than, not forty
    policy.erase(0);
    for (std::int32_t group = 2; group < 15; ++group) policy.touch(group);  // thirteen by turns
  }
  CHECK(policy.once_target() > 0);
  CHECK(policy.once_target() <= 3);
}

TEST_CASE("adaptive_2q: a memory of less than nothing is refused") {
  CHECK_THROWS_WITH_AS(adaptive_2q(4, -1), "adaptive_2q: remembered is -1, expected at least 0",
                       std::invalid_argument);
}
