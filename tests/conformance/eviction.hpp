// SPDX-License-Identifier: Apache-2.0
/// @file
/// What every eviction policy keeps, whatever its order is.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"
#include "support/eviction_model.hpp"
#include "support/rounds.hpp"

namespace conformance {

using eviction_test::any;
using eviction_test::nobody;
using eviction_test::order_of;
using pulseinfer::eviction_entry;

/// Random calls, so that the policy is in one of its states, with queues and ghosts in use.
template <class Policy>
void stir(Policy& policy, std::uint64_t seed, int calls) {
  pulseinfer::detail::random_source draw(seed);
  const auto capacity = static_cast<std::uint64_t>(policy.capacity());
  for (int i = 0; i < calls; ++i) {
    const auto group = static_cast<std::int32_t>(draw.below(capacity));
    if (!policy.contains(group)) {
      policy.insert(group, {.key = draw.below(3 * capacity)});
    } else if (draw.one_in(3)) {
      const std::int32_t victim = policy.victim(any);
      if (victim >= 0) policy.evict(victim);
    } else if (draw.one_in(8)) {
      policy.erase(group);
    } else {
      policy.touch(group);
    }
  }
}

template <class Policy>
[[nodiscard]] std::vector<std::int32_t> members_of(const Policy& policy) {
  std::vector<std::int32_t> members;
  for (std::int32_t group = 0; group < policy.capacity(); ++group) {
    if (policy.contains(group)) members.push_back(group);
  }
  return members;
}

/// True if the call throws `Error`, with a text that names the number.
template <class Error, class Call>
[[nodiscard]] bool throws_naming(std::int32_t number, Call call) {
  try {
    call();
  } catch (const Error& error) {
    return std::string(error.what()).find(std::to_string(number)) != std::string::npos;
  }
  return false;
}

template <class Policy>
void eviction_has_edges() {
  CHECK_THROWS_AS(Policy(-1), std::invalid_argument);
  CHECK_THROWS_AS(Policy(std::int32_t{-2'147'483'647}), std::invalid_argument);
  Policy none(0);
  CHECK(none.capacity() == 0);
  CHECK(none.victim(any) == -1);
  CHECK_THROWS_AS(none.insert(0, {}), std::out_of_range);
  CHECK_THROWS_AS((void)none.contains(0), std::out_of_range);
  Policy one(1);
  CHECK(one.victim(any) == -1);
  for (std::uint64_t key = 1; key < 8; ++key) {
    one.insert(0, {.key = key % 3});
    CHECK(one.victim(any) == 0);
    CHECK(one.victim(nobody) == -1);
    one.touch(0);
    CHECK(one.victim(any) == 0);
    key % 4 == 0 ? one.erase(0) : one.evict(0);
    CHECK(one.victim(any) == -1);
    CHECK(!one.contains(0));
  }
}

/// Every group that is in is given up once, by itself, and asking twice changes nothing.
template <class Policy>
void eviction_gives_all_up() {
  for (const std::int32_t capacity : {1, 2, 5, 40}) {
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
      CAPTURE(capacity);
      CAPTURE(seed);
      Policy policy(capacity);
      stir(policy, seed, 20 * capacity);
      const std::vector<std::int32_t> members = members_of(policy);
      const std::int32_t victim = policy.victim(any);
      CHECK(policy.victim(any) == victim);
      CHECK(members_of(policy) == members);
      std::vector<std::int32_t> order = order_of(policy);
      CHECK((order.empty() ? -1 : order.front()) == victim);
      CHECK(order_of(policy) == order);
      std::sort(order.begin(), order.end());
      CHECK(order == members);
    }
  }
}

/// The victim is in, and allowed; there is one if anybody is. The predicate is asked about nobody
/// else. Where everybody is refused, nothing has changed.
template <class Policy>
void eviction_heeds_the_predicate() {
  for (const std::int32_t capacity : {1, 3, 17}) {
    for (std::uint64_t seed = 0; seed < 30; ++seed) {
      CAPTURE(capacity);
      CAPTURE(seed);
      Policy policy(capacity);
      stir(policy, seed, 20 * capacity);
      const std::vector<std::int32_t> order = order_of(policy);
      bool strangers = false;
      const auto refuse = [&](std::int32_t group) {
        strangers = strangers || group < 0 || group >= capacity || !policy.contains(group);
        return false;
      };
      CHECK(policy.victim(refuse) == -1);
      CHECK(!strangers);
      CHECK(order_of(policy) == order);
      for (const std::int32_t alone : members_of(policy)) {
        CHECK(policy.victim([alone](std::int32_t group) { return group == alone; }) == alone);
      }
      pulseinfer::detail::random_source draw(seed);
      while (!members_of(policy).empty()) {
        const std::uint64_t bits = draw.next();
        const auto allows = [bits](std::int32_t group) { return (bits >> group & 1) != 0; };
        const std::vector<std::int32_t> members = members_of(policy);
        const std::int32_t victim = policy.victim(allows);
        if (std::any_of(members.begin(), members.end(), allows)) {
          REQUIRE(victim >= 0);
          CHECK(policy.contains(victim));
          CHECK(allows(victim));
          policy.evict(victim);
        } else {
          CHECK(victim == -1);
        }
      }
    }
  }
}

template <class Policy>
void eviction_refuses_bad_input() {
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    CAPTURE(seed);
    Policy policy(6);
    stir(policy, seed, 100);
    if (policy.contains(2)) policy.erase(2);
    if (!policy.contains(3)) policy.insert(3, {.key = 5});
    const std::vector<std::int32_t> order = order_of(policy);
    for (const std::int32_t group : {-1, 6, 7, 8, -2'147'483'647, 2'147'483'647}) {
      using error = std::out_of_range;
      CHECK(throws_naming<error>(group, [&] { policy.insert(group, {.key = 5}); }));
      CHECK(throws_naming<error>(group, [&] { policy.touch(group); }));
      CHECK(throws_naming<error>(group, [&] { policy.erase(group); }));
      CHECK(throws_naming<error>(group, [&] { policy.evict(group); }));
      CHECK(throws_naming<error>(group, [&] { (void)policy.contains(group); }));
    }
    CHECK(throws_naming<std::logic_error>(3, [&] { policy.insert(3, {.key = 5}); }));
    CHECK(throws_naming<std::logic_error>(2, [&] { policy.touch(2); }));
    CHECK(throws_naming<std::logic_error>(2, [&] { policy.erase(2); }));
    CHECK(throws_naming<std::logic_error>(2, [&] { policy.evict(2); }));
    CHECK(!policy.contains(2));
    CHECK(policy.contains(3));
    CHECK(order_of(policy) == order);
  }
}

template <class Policy>
void eviction_allocates_nothing() {
  for (const std::int32_t capacity : {1, 40}) {
    CAPTURE(capacity);
    Policy policy(capacity);
    const std::uint64_t before = test::allocations();
    stir(policy, 1, 20'000);
    CHECK(test::allocations() == before);
  }
}

/// The same calls have the same answers, also after a move.
template <class Policy>
void eviction_is_pure() {
  Policy first(17), second(17);
  stir(first, 5, 1'000);
  stir(second, 5, 500);
  Policy moved(std::move(second));
  second = Policy(17);
  stir(second, 5, 500);
  CHECK(order_of(moved) == order_of(second));
  Policy third(17);
  stir(third, 5, 1'000);
  CHECK(order_of(first) == order_of(third));
}

template <class Policy>
void check_eviction_policy() {
  static_assert(pulseinfer::eviction_policy<Policy>);
  eviction_has_edges<Policy>();
  eviction_gives_all_up<Policy>();
  eviction_heeds_the_predicate<Policy>();
  eviction_refuses_bad_input<Policy>();
  eviction_allocates_nothing<Policy>();
  eviction_is_pure<Policy>();
}

}  // namespace conformance
