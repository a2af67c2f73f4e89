// SPDX-License-Identifier: Apache-2.0
/// @file
/// A policy and a model of it, driven by one stream of random numbers as a store would drive them,
/// and as no store should.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/random.hpp"

namespace eviction_test {

using pulseinfer::eviction_entry;

inline constexpr auto any = [](std::int32_t) { return true; };
inline constexpr auto nobody = [](std::int32_t) { return false; };

/// The whole order, taken off a copy victim by victim.
template <class Policy>
[[nodiscard]] std::vector<std::int32_t> order_of(Policy policy) {
  std::vector<std::int32_t> order;
  for (std::int32_t group = policy.victim(any); group >= 0; group = policy.victim(any)) {
    order.push_back(group);
    policy.evict(group);
  }
  return order;
}

/// Takes a value out of a list. @return false if it was not there
template <class T>
bool take(std::vector<T>& list, const T& value) {
  const auto found = std::find(list.begin(), list.end(), value);
  if (found == list.end()) return false;
  list.erase(found);
  return true;
}

/// The first of a list that is allowed, -1 if none is.
[[nodiscard]] inline std::int32_t first_of(const std::vector<std::int32_t>& list,
                                           const std::vector<bool>& allowed) {
  for (const std::int32_t group : list) {
    if (allowed[static_cast<std::size_t>(group)]) return group;
  }
  return -1;
}

struct nothing_else {
  template <class Policy, class Model>
  void operator()(Policy&, Model&, pulseinfer::detail::random_source&) const {}
};

/// @tparam Model  copyable; insert, touch, erase, evict as the policy has them, and
///                victim(allowed), over vectors that are searched
/// @param entry   entry(draw, group) of what enters
/// @param other   other(policy, model, draw), called now and then
/// @return how often the two differed
template <class Policy, class Model, class Entry, class Other = nothing_else>
[[nodiscard]] std::int64_t differences(Policy policy, Model model, std::uint64_t seed,
                                       std::int64_t operations, Entry entry, Other other = {}) {
  const std::int32_t capacity = policy.capacity();
  pulseinfer::detail::random_source draw(seed);
  std::vector<bool> in(static_cast<std::size_t>(capacity));
  std::vector<bool> allowed(in.size());
  const auto is = [](const std::vector<bool>& set, std::int32_t group) {
    return static_cast<bool>(set[static_cast<std::size_t>(group)]);
  };
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < operations; ++i) {
    const auto group = static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(capacity)));
    const std::uint64_t what = draw.below(16);
    if (what == 0) other(policy, model, draw);
    if (what >= 12) {                                               // gives one up
      const std::uint64_t refused = draw.below(4) * draw.below(3);  // of 8
      for (std::size_t g = 0; g < allowed.size(); ++g) allowed[g] = draw.below(8) >= refused;
      const std::int32_t victim =
          policy.victim([&](std::int32_t g) { return is(in, g) && is(allowed, g); });
      if (victim != model.victim(allowed)) ++found;
      if (victim >= 0 && !draw.one_in(8)) {
        policy.evict(victim);
        model.evict(victim);
        in[static_cast<std::size_t>(victim)] = false;
      }
    } else if (!is(in, group)) {
      const eviction_entry made = entry(draw, group);
      policy.insert(group, made);
      model.insert(group, made);
      in[static_cast<std::size_t>(group)] = true;
    } else if (what == 11) {
      const bool erased = draw.one_in(2);
      erased ? policy.erase(group) : policy.evict(group);
      erased ? model.erase(group) : model.evict(group);
      in[static_cast<std::size_t>(group)] = false;
    } else {
      policy.touch(group);
      model.touch(group);
    }
    if (policy.contains(group) != is(in, group)) ++found;
    if (i % 64 != 0) continue;
    Model left = model;
    std::vector<std::int32_t> order;
    const std::vector<bool> all(in.size(), true);
    for (std::int32_t g = left.victim(all); g >= 0; g = left.victim(all)) {
      order.push_back(g);
      left.evict(g);
    }
    if (order_of(policy) != order) ++found;
  }
  return found;
}

/// Keys that come back now and then; some groups have none.
struct few_keys {
  std::uint64_t keys;
  eviction_entry operator()(pulseinfer::detail::random_source& draw, std::int32_t) const {
    return {.key = draw.below(keys)};
  }
};

}  // namespace eviction_test
