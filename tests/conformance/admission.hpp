// SPDX-License-Identifier: Apache-2.0
/// @file
/// What every admission policy keeps, whatever it goes by.
#pragma once

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/admission_types.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/link_snapshot.hpp"
#include "support/allocations.hpp"

namespace conformance {

using pulseinfer::admission_answer;
using pulseinfer::admission_request;
using pulseinfer::admission_verdict;
using pulseinfer::link_load;
using pulseinfer::link_snapshot;
using pulseinfer::detail::random_source;

/// Draws of what policies are told, in the same order from the same seed.
class admission_weather {
 public:
  explicit admission_weather(std::uint64_t seed) : draw_(seed) {}

  [[nodiscard]] double share() { return static_cast<double>(draw_.below(1'001)) / 1'000; }
  [[nodiscard]] std::int64_t bytes() {
    return draw_.one_in(5) ? 0 : static_cast<std::int64_t>(draw_.next() >> (24 + draw_.below(40)));
  }
  [[nodiscard]] link_load load() {
    return {.utilisation = share(),
            .seconds_per_byte = draw_.one_in(8) ? 0 : 1e-11 * (1 + share()),
            .queued_bytes = bytes(),
            .queued_transfers = static_cast<std::int64_t>(draw_.below(20))};
  }
  [[nodiscard]] link_snapshot link() {
    now_ += 0.01 * share();
    return {.recalls = load(), .stores = load(), .taken_at = now_};
  }
  /// An activity of each layer, or nothing.
  [[nodiscard]] std::span<const double> activity(std::int32_t layers) {
    activity_.clear();
    if (draw_.one_in(3)) return activity_;
    for (std::int32_t i = 0; i < layers; ++i) activity_.push_back(1e9 * share());
    return activity_;
  }
  [[nodiscard]] admission_request request() {
    admission_request r;
    r.context_bytes = bytes();
    r.device_bytes_free = bytes();
    r.load_bytes = bytes();
    r.load_tokens = draw_.one_in(4) ? 0 : static_cast<std::int64_t>(draw_.below(131'072));
    r.recompute_s_per_token = draw_.one_in(4) ? 0 : 1e-4 * share();
    r.waited_s = draw_.one_in(2) ? 0 : 10 * share();
    return r;
  }
  [[nodiscard]] random_source& draw() { return draw_; }

 private:
  random_source draw_;
  double now_ = 0;
  std::vector<double> activity_;
};

/// Everything that a policy answered, and where its placement stood.
struct admission_history {
  std::vector<double> numbers;
  void add(double value) { numbers.push_back(std::isinf(value) ? -1 : value); }
};

/// Random calls; what they answered is added to the history where there is one.
template <class Policy>
void stir_admission(Policy& policy, admission_weather& weather, int calls,
                    admission_history* history = nullptr) {
  std::vector<double> placement(static_cast<std::size_t>(policy.layers()));
  for (int i = 0; i < calls; ++i) {
    double answered = 0;
    switch (weather.draw().below(4)) {
      case 0: {
        const link_snapshot link = weather.link();
        policy.observe(link, weather.activity(policy.layers()));
        break;
      }
      case 1: {
        const admission_answer a = policy.admit(weather.request(), placement);
        answered = static_cast<double>(a.verdict);
        if (history != nullptr) {
          history->add(a.load_s);
          history->add(a.recompute_s);
          for (const double share : placement) history->add(share);
        }
        break;
      }
      case 2:
        answered = policy.may_store(weather.bytes()) ? 1 : 0;
        break;
      default:
        answered = policy.may_recall(weather.bytes()) ? 1 : 0;
    }
    if (history == nullptr) continue;
    history->add(answered);
    for (std::int32_t layer = 0; layer < policy.layers(); ++layer) {
      history->add(policy.offload_share(layer));
    }
  }
}

/// Shares are shares; whoever gets in fits, and has a time for what it was told to do.
template <class Make>
void admission_answers_make_sense(Make make) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    auto policy = make();
    admission_weather weather(seed);
    std::vector<double> placement(static_cast<std::size_t>(policy.layers()));
    bool shares = true, fits = true, timed = true;
    for (int i = 0; i < 200; ++i) {
      stir_admission(policy, weather, 3);
      const admission_request r = weather.request();
      const admission_answer a = policy.admit(r, placement);
      timed = timed && a.load_s >= 0 && a.recompute_s >= 0 && std::isfinite(a.load_s);
      for (std::int32_t layer = 0; layer < policy.layers(); ++layer) {
        const double share = policy.offload_share(layer);
        shares = shares && share >= 0 && share <= 1;
      }
      if (a.verdict == admission_verdict::defer) continue;
      for (const double share : placement) shares = shares && share >= 0 && share <= 1;
      fits = fits && pulseinfer::resident_bytes(r.context_bytes, placement) <=
                         static_cast<double>(r.device_bytes_free) +
                             1e-9 * static_cast<double>(r.context_bytes);
      if (a.verdict == admission_verdict::recompute) {
        timed =
            timed && std::isfinite(a.recompute_s) && a.recompute_s <= a.load_s && r.load_bytes > 0;
      }
    }
    CHECK(shares);
    CHECK(fits);
    CHECK(timed);
  }
}

/// Where a recall would be refused, so would a store of as many bytes. Asked of a twin, since being
/// let through is remembered.
template <class Make>
void admission_sheds_stores_first(Make make) {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    bool holds = true;
    for (int steps = 0; steps < 60; ++steps) {
      auto one = make(), other = make();
      admission_weather first(seed), second(seed);
      stir_admission(one, first, steps);
      stir_admission(other, second, steps);
      const std::int64_t bytes = first.bytes();
      if (!one.may_recall(bytes)) holds = holds && !other.may_store(bytes);
    }
    CHECK(holds);
  }
}

/// The same calls have the same answers, also in one that was moved.
template <class Make>
void admission_is_pure(Make make) {
  for (std::uint64_t seed = 1; seed <= 5; ++seed) {
    CAPTURE(seed);
    auto first = make(), second = make();
    admission_weather one(seed), other(seed);
    admission_history a, b;
    stir_admission(first, one, 150, &a);
    stir_admission(second, other, 75, &b);
    auto moved(std::move(second));
    stir_admission(moved, other, 75, &b);
    CHECK(a.numbers == b.numbers);
  }
}

/// Eight ranks that measured each their own link, and agree on the worst of them, answer alike.
template <class Make>
void admission_agrees_in_a_group(Make make) {
  constexpr std::size_t ranks = 8;
  std::vector<decltype(make())> group;
  for (std::size_t i = 0; i < ranks; ++i) group.push_back(make());
  std::vector<admission_history> histories(ranks);
  admission_weather weather(11);
  for (int step = 0; step < 60; ++step) {
    std::vector<link_snapshot> local;
    for (std::size_t i = 0; i < ranks; ++i) local.push_back(weather.link());
    const link_snapshot agreed = pulseinfer::merge(local);
    const std::uint64_t seed = weather.draw().next();
    for (std::size_t i = 0; i < ranks; ++i) {
      admission_weather same(seed);
      group[i].observe(agreed, same.activity(group[i].layers()));
      std::vector<double> placement(static_cast<std::size_t>(group[i].layers()));
      const admission_answer a = group[i].admit(same.request(), placement);
      histories[i].add(static_cast<double>(a.verdict));
      histories[i].add(group[i].may_store(same.bytes()) ? 1 : 0);
      for (const double share : placement) histories[i].add(share);
    }
  }
  for (std::size_t i = 1; i < ranks; ++i) CHECK(histories[i].numbers == histories[0].numbers);
}

template <class Make>
void admission_refuses_bad_input(Make make) {
  const double not_a_number = std::numeric_limits<double>::quiet_NaN();
  auto policy = make(), untouched = make();
  admission_weather one(3), other(3);
  stir_admission(policy, one, 50);
  stir_admission(untouched, other, 50);
  const std::int32_t layers = policy.layers();
  std::vector<double> placement(static_cast<std::size_t>(layers));
  const std::vector<double> none;
  for (const double bad : {not_a_number, -0.5, std::numeric_limits<double>::infinity()}) {
    CAPTURE(bad);
    link_snapshot link;
    link.recalls.utilisation = bad;
    CHECK_THROWS_AS(policy.observe(link, none), std::invalid_argument);
    link = {};
    link.taken_at = bad;
    CHECK_THROWS_AS(policy.observe(link, none), std::invalid_argument);
    std::vector<double> activity(static_cast<std::size_t>(layers), 1.0);
    activity.back() = bad;
    CHECK_THROWS_AS(policy.observe(link_snapshot{}, activity), std::invalid_argument);
    admission_request request;
    request.recompute_s_per_token = bad;
    CHECK_THROWS_AS((void)policy.admit(request, placement), std::invalid_argument);
    request = {};
    request.waited_s = bad;
    CHECK_THROWS_AS((void)policy.admit(request, placement), std::invalid_argument);
  }
  link_snapshot link;
  link.stores.utilisation = 1.25;
  CHECK_THROWS_AS(policy.observe(link, none), std::invalid_argument);
  link = {};
  link.stores.queued_bytes = -1;
  CHECK_THROWS_AS(policy.observe(link, none), std::invalid_argument);
  CHECK_THROWS_AS(policy.observe(link_snapshot{},
                                 std::vector<double>(static_cast<std::size_t>(layers) + 1, 1.0)),
                  std::invalid_argument);
  for (std::int64_t admission_request::*field :
       {&admission_request::context_bytes, &admission_request::device_bytes_free,
        &admission_request::load_bytes, &admission_request::load_tokens}) {
    admission_request request;
    request.*field = -1;
    CHECK_THROWS_AS((void)policy.admit(request, placement), std::invalid_argument);
  }
  std::vector<double> too_long(static_cast<std::size_t>(layers) + 1);
  CHECK_THROWS_AS((void)policy.admit(admission_request{}, too_long), std::invalid_argument);
  CHECK_THROWS_AS((void)policy.may_store(-1), std::invalid_argument);
  CHECK_THROWS_AS((void)policy.may_recall(-1), std::invalid_argument);
  CHECK_THROWS_AS((void)policy.offload_share(-1), std::out_of_range);
  CHECK_THROWS_AS((void)policy.offload_share(layers), std::out_of_range);
  // None of it has left a trace.
  admission_history a, b;
  stir_admission(policy, one, 80, &a);
  stir_admission(untouched, other, 80, &b);
  CHECK(a.numbers == b.numbers);
}

template <class Make>
void admission_allocates_nothing(Make make) {
  auto policy = make();
  admission_weather weather(7);
  std::vector<double> placement(static_cast<std::size_t>(policy.layers()));
  std::uint64_t allocated = 0;
  for (int i = 0; i < 500; ++i) {
    const link_snapshot link = weather.link();
    const std::span<const double> activity = weather.activity(policy.layers());
    const admission_request request = weather.request();
    const std::uint64_t before = test::allocations();
    policy.observe(link, activity);
    (void)policy.admit(request, placement);
    (void)policy.may_store(1 << 20);
    (void)policy.may_recall(1 << 20);
    allocated += test::allocations() - before;
  }
  CHECK(allocated == 0);
}

/// @param make  makes a policy, the same each time
template <class Make>
void check_admission_policy(Make make) {
  static_assert(pulseinfer::admission_policy<decltype(make())>);
  admission_answers_make_sense(make);
  admission_sheds_stores_first(make);
  admission_is_pure(make);
  admission_agrees_in_a_group(make);
  admission_refuses_bad_input(make);
  admission_allocates_nothing(make);
}

}  // namespace conformance
