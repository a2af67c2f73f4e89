// SPDX-License-Identifier: Apache-2.0
/// @file
/// Priorities, pins and retention times against their three rules, written down.
#include "pulseinfer/eviction_priority.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "conformance/eviction.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/eviction_arc.hpp"
#include "pulseinfer/eviction_prefix_tree.hpp"
#include "pulseinfer/eviction_sieve.hpp"
#include "support/eviction_model.hpp"
#include "support/rounds.hpp"

namespace {

using namespace eviction_test;
using pulseinfer::never_evict;
using pulseinfer::prioritized;

class naive_prioritized {
 public:
  explicit naive_prioritized(std::size_t capacity) : entries_(capacity) {}
  void insert(std::int32_t group, const eviction_entry& entry) {
    order_.push_back(group);
    at(group) = entry;
  }
  void touch(std::int32_t group) {
    erase(group);
    order_.push_back(group);
  }
  void erase(std::int32_t group) { take(order_, group); }
  void evict(std::int32_t group) { erase(group); }
  void advance(std::int64_t now) { now_ = now; }
  void keep(std::int32_t group, std::int64_t until) { at(group).keep_until = until; }
  [[nodiscard]] std::int32_t victim(const std::vector<bool>& allowed) {
    std::int32_t best = -1;
    for (const std::int32_t group : order_) {  // the first of equals stays
      if (!allowed[static_cast<std::size_t>(group)]) continue;
      if (at(group).priority == never_evict) continue;
      if (best < 0 || goes_before(at(group), at(best))) best = group;
    }
    return best;
  }

 private:
  [[nodiscard]] bool goes_before(const eviction_entry& a, const eviction_entry& b) const {
    const bool a_is_kept = a.keep_until > now_;
    const bool b_is_kept = b.keep_until > now_;
    return a_is_kept != b_is_kept ? b_is_kept : a.priority < b.priority;
  }
  eviction_entry& at(std::int32_t group) { return entries_[static_cast<std::size_t>(group)]; }
  std::vector<std::int32_t> order_;  // least recently used first
  std::vector<eviction_entry> entries_;
  std::int64_t now_ = 0;
};

}  // namespace

TEST_CASE("prioritized: keeps what every policy keeps, over any policy") {
  conformance::check_eviction_policy<prioritized<>>();
  conformance::check_eviction_policy<prioritized<pulseinfer::arc>>();
  conformance::check_eviction_policy<prioritized<pulseinfer::sieve>>();
  conformance::check_eviction_policy<prioritized<pulseinfer::prefix_tree_lru>>();
}

TEST_CASE("prioritized: the lower priority goes first, and within one the policy chooses") {
  prioritized<> policy(6);
  const std::int32_t priority_of[] = {2, 0, 1, 0, 1, 2};
  for (std::int32_t group = 0; group < 6; ++group) {
    policy.insert(group, {.priority = priority_of[group]});
  }
  policy.touch(1);
  policy.touch(2);
  CHECK(order_of(policy) == std::vector<std::int32_t>{3, 1, 4, 2, 0, 5});
}

TEST_CASE("prioritized: what is pinned never goes, until it is taken out and enters anew") {
  prioritized<> policy(3);
  policy.insert(0, {.priority = never_evict});
  policy.insert(1, {.priority = 2});
  policy.touch(0);
  CHECK(policy.contains(0));
  CHECK(order_of(policy) == std::vector<std::int32_t>{1});
  CHECK(policy.victim([](std::int32_t group) { return group == 0; }) == -1);
  policy.erase(0);
  policy.insert(0, {.priority = 0});
  CHECK(order_of(policy) == std::vector<std::int32_t>{0, 1});
}

TEST_CASE("prioritized: what is kept goes only if nothing else can, and has its place afterwards") {
  prioritized<> policy(4);
  policy.advance(100);
  policy.insert(0, {.keep_until = 110});
  policy.insert(1, {});
  policy.insert(2, {.priority = 2});
  policy.insert(3, {.priority = 1, .keep_until = 120});
  CHECK(order_of(policy) == std::vector<std::int32_t>{1, 2, 0, 3});
  policy.advance(109);
  CHECK(policy.victim(any) == 1);
  policy.advance(110);  // the time itself is no longer kept
  CHECK(order_of(policy) == std::vector<std::int32_t>{0, 1, 2, 3});
  policy.keep(0, 111);
  CHECK(policy.victim(any) == 1);
  policy.keep(0, 0);
  policy.keep(3, 0);
  CHECK(order_of(policy) == std::vector<std::int32_t>{0, 1, 3, 2});
}

TEST_CASE("prioritized: random operations follow the rules") {
  for (const std::int32_t capacity : {1, 2, 5, 17}) {
    for (const std::int32_t priorities : {1, 3}) {
      CAPTURE(capacity);
      CAPTURE(priorities);
      std::int64_t now = 0;
      const auto entry = [&](pulseinfer::detail::random_source& draw, std::int32_t) {
        const auto levels = static_cast<std::uint64_t>(priorities);
        const std::int64_t until = now + static_cast<std::int64_t>(draw.below(9)) - 2;
        return eviction_entry{.priority = draw.one_in(8)
                                              ? never_evict
                                              : static_cast<std::int32_t>(draw.below(levels)),
                              .keep_until = draw.one_in(2) ? until : 0};
      };
      const auto time_passes = [&](auto& policy, auto& model, auto& draw) {
        const auto group =
            static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(capacity)));
        if (policy.contains(group) && draw.one_in(3)) {
          policy.keep(group, now + 3);
          model.keep(group, now + 3);
        }
        now += static_cast<std::int64_t>(draw.below(3));
        policy.advance(now);
        model.advance(now);
      };
      CHECK(differences(prioritized<>(capacity, priorities),
                        naive_prioritized(static_cast<std::size_t>(capacity)),
                        static_cast<std::uint64_t>(capacity + priorities),
                        test::rounds(15'000, 1'500'000), entry, time_passes) == 0);
    }
  }
}

TEST_CASE("prioritized: ghosts are remembered for what was given up, not for what was taken out") {
  for (const bool given_up : {false, true}) {
    CAPTURE(given_up);
    prioritized<pulseinfer::arc> policy(2);
    policy.insert(0, {.key = 1});
    given_up ? policy.evict(0) : policy.erase(0);
    policy.insert(1, {.key = 2});
    policy.insert(0, {.key = 1});
    // Remembered, 0 was used again, and the list of the once used, which is 1, has the length that
    // it should have.
    CHECK(policy.victim(any) == (given_up ? 0 : 1));
  }
}

TEST_CASE("prioritized: bad input is refused, and nothing has changed") {
  prioritized<> policy(3);
  policy.insert(0, {});
  CHECK_THROWS_WITH_AS(policy.insert(1, {.priority = 3}),
                       "prioritized: priority is 3, expected 0 to 2 or never_evict",
                       std::out_of_range);
  CHECK_THROWS_AS(policy.insert(1, {.priority = -1}), std::out_of_range);
  CHECK_THROWS_AS(policy.check({.priority = 3}), std::out_of_range);
  policy.check({.priority = 2, .keep_until = -1});
  policy.check({.priority = pulseinfer::never_evict});
  CHECK(!policy.contains(1));
  policy.advance(5);
  CHECK_THROWS_WITH_AS(policy.advance(4), "prioritized: now is 4, expected at least 5",
                       std::invalid_argument);
  CHECK(policy.now() == 5);
  CHECK_THROWS_AS(policy.keep(1, 9), std::logic_error);
  CHECK_THROWS_AS(policy.keep(3, 9), std::out_of_range);
  CHECK_THROWS_WITH_AS(prioritized<>(1, 0), "prioritized: priorities is 0, expected at least 1",
                       std::invalid_argument);
  CHECK_THROWS_AS(prioritized<>(-1, 1), std::invalid_argument);
  CHECK(prioritized<>(4).priorities() == 3);
}
