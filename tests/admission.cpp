// SPDX-License-Identifier: Apache-2.0
/// @file
/// The policy that looks at the link: where its placement goes, how it gets there, and whom it lets
/// in.
#include "pulseinfer/admission.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "conformance/admission.hpp"
#include "pulseinfer/detail/random.hpp"

namespace {

using doctest::Approx;
using pulseinfer::adaptive_admission;
using pulseinfer::adaptive_admission_options;
using pulseinfer::admission_verdict;
using pulseinfer::link_snapshot;
using pulseinfer::next_level;
using pulseinfer::retention_level;
using pulseinfer::detail::random_source;
using ints = std::vector<std::int32_t>;

constexpr std::int64_t mib = 1 << 20;

link_snapshot busy(double utilisation, std::int64_t queued_recalls = 0,
                   std::int64_t queued_stores = 0) {
  link_snapshot link;
  link.recalls = {
      .utilisation = utilisation, .seconds_per_byte = 2e-11, .queued_bytes = queued_recalls};
  link.stores.queued_bytes = queued_stores;
  return link;
}
void observe(adaptive_admission& policy, const link_snapshot& link, int times = 1,
             const std::vector<double>& activity = {}) {
  for (int i = 0; i < times; ++i) policy.observe(link, activity);
}
std::vector<double> shares(const adaptive_admission& policy) {
  std::vector<double> all(static_cast<std::size_t>(policy.layers()));
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = policy.offload_share(static_cast<std::int32_t>(i));
  }
  return all;
}
/// The layers of which less than the most is offloaded.
ints kept(const adaptive_admission& policy) {
  ints layers;
  for (std::int32_t layer = 0; layer < policy.layers(); ++layer) {
    if (policy.offload_share(layer) < policy.options().max_offload_share) layers.push_back(layer);
  }
  return layers;
}

}  // namespace

TEST_CASE("admission: keeps what every policy keeps") {
  conformance::check_admission_policy([] { return adaptive_admission(6); });
  conformance::check_admission_policy([] {
    return adaptive_admission(32, {.retained_layers = 20,
                                   .hysteresis = 0,
                                   .max_step = 1,
                                   .patience = 1,
                                   .store_queue_bytes = 1 << 10,
                                   .recall_queue_bytes = 1 << 20,
                                   .resume_share = 1,
                                   .max_wait_s = 0});
  });
  conformance::check_admission_policy(
      [] { return adaptive_admission(1, {.max_offload_share = 0, .retained_layers = 0}); });
  conformance::check_admission_policy([] {
    return adaptive_admission(3, {.low_utilisation = 0,
                                  .high_utilisation = 1,
                                  .max_offload_share = 1,
                                  .retained_layers = 3,
                                  .resume_share = 0});
  });
}

TEST_CASE("admission: 90 % of all layers at an idle link, the outermost stay at a busy one") {
  adaptive_admission policy(6);
  CHECK(shares(policy) == std::vector<double>(6, 0.9));
  for (const double low : {0.0, 0.3, 0.49}) {
    observe(policy, busy(low), 20);
    CHECK(shares(policy) == std::vector<double>(6, 0.9));
  }
  for (const double high : {0.85, 0.9, 1.0}) {
    adaptive_admission other(6);
    observe(other, busy(high), 20);
    CHECK(shares(other) == std::vector<double>{0, 0.9, 0.9, 0.9, 0.9, 0});
    observe(other, busy(0.49), 20);
    CHECK(shares(other) == std::vector<double>(6, 0.9));
  }
  // Either direction makes a link busy.
  link_snapshot stores;
  stores.stores.utilisation = 0.95;
  observe(policy, stores, 20);
  CHECK(kept(policy) == ints{0, 5});
}

TEST_CASE("admission: between the two it is interpolated, the busier the more stays") {
  double before = 2;
  for (const double u : {0.50, 0.58, 0.62, 0.66, 0.70, 0.74, 0.78, 0.82, 0.85}) {
    CAPTURE(u);
    adaptive_admission rising(10, {.retained_layers = 4}), falling(10, {.retained_layers = 4});
    observe(rising, busy(u), 40);
    observe(falling, busy(1), 40);
    observe(falling, busy(u), 40);
    CHECK(rising.retained_layers() == Approx(4 * std::clamp((u - 0.6) / 0.25, 0.0, 1.0)));
    CHECK(falling.retained_layers() == Approx(4 * std::clamp((u - 0.5) / 0.25, 0.0, 1.0)));
    double sum = 0;
    for (const double share : shares(rising)) sum += share;
    CHECK(sum == Approx(0.9 * (10 - rising.retained_layers())));
    CHECK(sum / 9 <= before);
    before = sum / 9;
  }
}

TEST_CASE("admission: the layers that stay are those that were recalled most") {
  const std::vector<double> activity = {1, 2, 9, 3, 8, 2, 1, 1};
  adaptive_admission policy(8);
  observe(policy, busy(0.9), 20, activity);
  CHECK(kept(policy) == ints{2, 4});
  CHECK(policy.order()[0] == 2);
  // In part, the most active comes first.
  adaptive_admission half(8);
  observe(half, busy(0.7), 20, activity);
  CHECK(half.retained_layers() == Approx(0.8));
  CHECK(kept(half) == ints{2});
  CHECK(half.offload_share(2) == Approx(0.9 * 0.2));
  // Measurements that stop leave things as they are; without any it is the first and the last.
  observe(policy, busy(0.9), 20);
  CHECK(kept(policy) == ints{2, 4});
  observe(policy, busy(0.1), 20, std::vector<double>(8, 0.0));
  observe(policy, busy(0.9), 20);
  CHECK(kept(policy) == ints{0, 7});
}

TEST_CASE("admission: a layer that stays is recalled less, and stays all the same") {
  adaptive_admission policy(6);
  std::vector<double> activity = {5, 9, 5, 5, 9, 5};
  observe(policy, busy(0.95), 10, activity);
  CHECK(kept(policy) == ints{1, 4});
  activity[1] = activity[4] = 0;  // nothing is missing there any more
  for (int i = 0; i < 50; ++i) {
    observe(policy, busy(0.95), 1, activity);
    REQUIRE(kept(policy) == ints{1, 4});
  }
  activity[2] = 11;  // not by a quarter
  observe(policy, busy(0.95), 10, activity);
  CHECK(kept(policy) == ints{1, 4});
  activity[2] = activity[3] = 12;  // one a decision
  observe(policy, busy(0.95), 1, activity);
  CHECK(kept(policy) == ints{2, 4});
  observe(policy, busy(0.95), 1, activity);
  CHECK(kept(policy) == ints{2, 3});
}

TEST_CASE("admission: no decision moves further than a step, or swaps more than one layer") {
  random_source draw(4);
  for (int run = 0; run < 20; ++run) {
    const double step = 0.05 * (1 + static_cast<double>(draw.below(10)));
    adaptive_admission policy(12, {.retained_layers = 5,
                                   .max_step = step,
                                   .patience = 1 + static_cast<std::int32_t>(draw.below(4))});
    std::vector<double> activity(12), before = shares(policy);
    ints order(policy.order().begin(), policy.order().end());
    bool bounded = true, one_swap = true;
    for (int i = 0; i < 300; ++i) {
      for (double& a : activity) a = static_cast<double>(draw.below(100));
      const auto stayed = static_cast<std::size_t>(std::ceil(policy.retained_layers()));
      const double level = policy.level().level;
      policy.observe(busy(static_cast<double>(draw.below(101)) / 100), activity);
      bounded = bounded && std::abs(policy.level().level - level) <= step + 1e-12;
      std::size_t changed = 0;
      for (std::size_t at = 0; at < stayed; ++at)
        changed += policy.order()[at] != order[at] ? 1 : 0;
      one_swap = one_swap && changed <= 1;
      order.assign(policy.order().begin(), policy.order().end());
    }
    CHECK(bounded);
    CHECK(one_swap);
    std::sort(order.begin(), order.end());
    for (std::int32_t i = 0; i < 12; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
  }
}

TEST_CASE("admission: a load that swings within the hysteresis moves nothing") {
  for (const double middle : {0.5, 0.6, 0.675, 0.75, 0.82}) {
    CAPTURE(middle);
    adaptive_admission policy(8);
    observe(policy, busy(middle), 40);
    int moves = 0;
    for (int i = 0; i < 1'000; ++i) {
      const double before = policy.level().level;
      observe(policy, busy(middle + (i % 2 == 0 ? 0.0499 : -0.0499)));
      if (i > 40) moves += policy.level().level != before ? 1 : 0;
    }
    CHECK(moves == 0);
  }
}

TEST_CASE("admission: an oscillating load does not make it thrash") {
  for (const int patience : {1, 3, 5}) {
    for (const int period : {2, 4, 6, 20, 64}) {
      CAPTURE(patience);
      CAPTURE(period);
      adaptive_admission policy(8, {.patience = patience});
      const int decisions = 3'000;
      int turns = 0, direction = 0;
      for (int i = 0; i < decisions; ++i) {
        const double before = policy.level().level;
        observe(policy, busy(i % period < period / 2 ? 0.95 : 0.3));
        const double moved = policy.level().level - before;
        const int now = moved > 0 ? 1 : (moved < 0 ? -1 : 0);
        if (now != 0 && direction != 0 && now != direction) ++turns;
        if (now != 0) direction = now;
      }
      // At worst twice a period; not at all where no phase lasts for the patience.
      CHECK(turns <= 2 * decisions / period + 1);
      if (period / 2 < patience) CHECK(turns == 0);
      if (period == 64) CHECK(turns >= 2 * decisions / period - 2);  // it does follow a slow one
    }
  }
}

TEST_CASE("admission: turns are bounded by the patience, whatever the load does") {
  random_source draw(9);
  for (const int patience : {1, 2, 7}) {
    retention_level level;
    const adaptive_admission_options options{.patience = patience};
    const int decisions = 20'000;
    int turns = 0;
    for (int i = 0; i < decisions; ++i) {
      const retention_level next =
          next_level(level, static_cast<double>(draw.below(1'001)) / 1'000, options);
      if (next.direction == -level.direction && next.direction != 0) ++turns;
      level = next;
    }
    CHECK(turns <= decisions / patience);
    CHECK(turns > 0);
  }
}

TEST_CASE("admission: in a loop with a link that it relieves it settles") {
  // Each layer that stays takes some load off the link. What it takes off is seen a few decisions
  // later, as an average.
  for (const double load : {0.3, 0.7, 0.9, 1.1, 1.5}) {
    for (const double relief : {0.05, 0.1, 0.2}) {
      CAPTURE(load);
      CAPTURE(relief);
      adaptive_admission policy(16, {.retained_layers = 6});
      double seen = 0;
      int turns_late = 0, direction = 0;
      for (int i = 0; i < 600; ++i) {
        const double utilisation = std::clamp(load - relief * policy.retained_layers(), 0.0, 1.0);
        seen += 0.3 * (utilisation - seen);
        const double before = policy.level().level;
        observe(policy, busy(std::clamp(seen, 0.0, 1.0)));
        const double moved = policy.level().level - before;
        const int now = moved > 0 ? 1 : (moved < 0 ? -1 : 0);
        if (now != 0 && direction == -now && i > 300) ++turns_late;
        if (now != 0) direction = now;
      }
      CHECK(turns_late == 0);
      if (load < 0.5) CHECK(policy.retained_layers() == 0);
      if (load > 0.9) CHECK(policy.retained_layers() > 0);
    }
  }
}

TEST_CASE("fault 68: a saturated tier is not fed, its queue is bounded, and it recovers") {
  const std::int64_t piece = 16 * mib;
  adaptive_admission policy(8);  // stores up to 256 MiB, recalls up to 1 GiB
  std::int64_t recalls = 0, stores = 0, deepest = 0, fed_late = 0;
  std::vector<double> placement(8);
  bool shed_first = true;
  int deferred = 0, admitted_late = 0;
  const int busy_steps = 400, steps = 800;
  for (int i = 0; i < steps; ++i) {
    const bool is_saturated = i < busy_steps;
    policy.observe(busy(is_saturated ? 1 : 0.1, recalls, stores), {});
    for (int k = 0; k < 40; ++k) {  // far more than the link carries
      const bool stored = policy.may_store(piece);
      if (stored) stores += piece;
      const bool recalled = policy.may_recall(piece);
      if (recalled) recalls += piece;
      shed_first = shed_first && (recalled || !stored);
      if (!is_saturated && k >= 2) break;
    }
    deepest = std::max(deepest, recalls + stores);
    const auto answer = policy.admit({.context_bytes = mib, .device_bytes_free = mib}, placement);
    if (answer.verdict == admission_verdict::defer) ++deferred;
    if (i > busy_steps + 100) {
      admitted_late += answer.verdict == admission_verdict::admit ? 1 : 0;
      fed_late += policy.may_store(piece) ? 1 : 0;
    }
    // What the link carries in a step.
    recalls = std::max<std::int64_t>(0, recalls - (is_saturated ? 2 : 6) * piece);
    stores = std::max<std::int64_t>(0, stores - (is_saturated ? 2 : 6) * piece);
  }
  CHECK(shed_first);
  CHECK(deepest <= 1'280 * mib);
  CHECK(deferred >= busy_steps - 20);
  CHECK(admitted_late == steps - busy_steps - 101);
  CHECK(fed_late == admitted_late);
  CHECK(policy.retained_layers() == 0);  // and everything is offloaded again
}

TEST_CASE("fault 68: the first to wait are stores, then requests, and recalls last") {
  adaptive_admission policy(4);
  std::vector<double> placement(4);
  const pulseinfer::admission_request small{.load_bytes = mib};
  policy.observe(busy(0.2, 0, 255 * mib), {});
  CHECK(policy.may_store(mib));
  CHECK(!policy.may_store(1));  // what was let in counts
  CHECK(policy.may_recall(mib));
  CHECK(policy.admit(small, placement).verdict == admission_verdict::admit);
  policy.observe(busy(0.2, 0, 256 * mib), {});
  CHECK(policy.is_shedding());
  CHECK(!policy.may_store(1));
  CHECK(policy.admit(small, placement).verdict == admission_verdict::defer);
  CHECK(policy.admit({.load_bytes = mib, .waited_s = 6}, placement).verdict ==
        admission_verdict::admit);
  CHECK(policy.may_recall(mib));
  policy.observe(busy(0.2, 1'024 * mib), {});
  CHECK(!policy.may_recall(1));
  policy.observe(busy(0.2, 513 * mib), {});  // not drained to a half yet
  CHECK(!policy.may_recall(1));
  policy.observe(busy(0.2, 512 * mib), {});
  CHECK(policy.may_recall(mib));
  CHECK(!policy.may_store(1));
  policy.observe(busy(0.2, 129 * mib), {});
  CHECK(!policy.may_store(1));
  policy.observe(busy(0.2, 64 * mib, 64 * mib), {});
  CHECK(policy.may_store(mib));
  CHECK(policy.admit(small, placement).verdict == admission_verdict::admit);
  // What is larger than the queue goes when nothing waits.
  policy.observe(busy(0.2), {});
  CHECK(policy.may_store(10'000 * mib));
  CHECK(!policy.may_store(1));
}

TEST_CASE("admission: a prefix is loaded or recomputed, whichever is sooner") {
  adaptive_admission policy(4);
  std::vector<double> placement(4);
  // 8 GiB/s of which a fifth is busy, 1 GiB: a little more than 0.15 s.
  link_snapshot link = busy(0.2);
  link.recalls.seconds_per_byte = 1.0 / (8'192.0 * mib);
  policy.observe(link, {});
  pulseinfer::admission_request r{.load_bytes = 1'024 * mib, .load_tokens = 8'192};
  auto answer = policy.admit(r, placement);
  CHECK(answer.verdict == admission_verdict::admit);  // it cannot be recomputed
  CHECK(answer.load_s == Approx(0.125 / 0.8));
  CHECK(std::isinf(answer.recompute_s));
  policy.observe(link, {});
  r.recompute_s_per_token = 20e-6;
  answer = policy.admit(r, placement);
  CHECK(answer.verdict == admission_verdict::admit);
  CHECK(answer.recompute_s == Approx(0.16384));
  // The second one has the first one before it.
  answer = policy.admit(r, placement);
  CHECK(answer.verdict == admission_verdict::recompute);
  CHECK(answer.load_s == Approx(0.125 / 0.8 + 0.125));
  // A busy link makes recomputing the better way, an idle one loading again.
  link.recalls.utilisation = 0.9;
  policy.observe(link, {});
  CHECK(policy.admit(r, placement).verdict == admission_verdict::recompute);
  link.recalls.utilisation = 0;
  policy.observe(link, {});
  CHECK(policy.admit(r, placement).verdict == admission_verdict::admit);
  // Nothing is known of the link: the load will tell.
  link.recalls.seconds_per_byte = 0;
  policy.observe(link, {});
  CHECK(policy.admit(r, placement).verdict == admission_verdict::admit);
}

TEST_CASE("admission: those who were deferred come in as the load falls, not all at once") {
  adaptive_admission policy(4);
  std::vector<double> placement(4);
  const pulseinfer::admission_request r{.load_bytes = 300 * mib};
  const auto try_all = [&](int waiting) {
    int admitted = 0;
    for (int i = 0; i < waiting; ++i) {
      admitted += policy.admit(r, placement).verdict == admission_verdict::admit ? 1 : 0;
    }
    return admitted;
  };
  policy.observe(busy(0.97, 1'500 * mib), {});
  CHECK(try_all(20) == 0);
  policy.observe(busy(0.4, 0), {});
  CHECK(try_all(20) == 3);  // 900 MiB of 1 GiB
  policy.observe(busy(0.6, 900 * mib), {});
  CHECK(try_all(17) == 0);
  policy.observe(busy(0.4, 100 * mib), {});
  CHECK(try_all(17) == 3);
}

TEST_CASE("admission: where there is memory nothing is offloaded, and all requests share it") {
  adaptive_admission policy(10);
  const auto granted = [&](std::int64_t capacity, std::int64_t contexts) {
    policy.observe(busy(0.1), {});
    policy.observe_memory({.capacity_bytes = capacity, .context_bytes = contexts});
    return policy.retained_layers();
  };
  CHECK(granted(1'000, 1'000) == 10);
  CHECK(granted(5'000, 1'000) == 10);
  CHECK(granted(1'000, 0) == 10);
  CHECK(granted(0, 0) == 10);
  // 55 of 100 bytes: a tenth of each layer, and half of what is beyond.
  CHECK(granted(550, 1'000) == Approx(5));
  CHECK(policy.offload_share(0) == 0);
  CHECK(policy.offload_share(5) == Approx(0.9));
  CHECK(granted(100, 1'000) == Approx(0));
  CHECK(granted(0, 1'000) == 0);
  // A busy link asks for what stays at least.
  observe(policy, busy(0.95), 20);
  policy.observe_memory({.capacity_bytes = 0, .context_bytes = 1'000});
  CHECK(policy.retained_layers() == 2);
  CHECK_THROWS_AS(policy.observe_memory({.capacity_bytes = -1}), std::invalid_argument);
  CHECK_THROWS_AS(policy.observe_memory({.context_bytes = -1}), std::invalid_argument);
  CHECK(policy.retained_layers() == 2);
}

TEST_CASE("admission: who would keep less than there is room for waits for those who give it up") {
  adaptive_admission policy(10);
  policy.observe(busy(0.1), {});
  policy.observe_memory({.capacity_bytes = 5'500, .context_bytes = 10'000});
  std::vector<double> placement(10);
  const auto admit = [&](std::int64_t free, double waited) {
    return policy
        .admit({.context_bytes = 1'000, .device_bytes_free = free, .waited_s = waited}, placement)
        .verdict;
  };
  CHECK(admit(550, 0) == admission_verdict::admit);
  CHECK(admit(500, 0) == admission_verdict::admit);  // less than a layer less
  CHECK(admit(300, 0) == admission_verdict::defer);
  CHECK(admit(300, 0.49) == admission_verdict::defer);
  CHECK(admit(300, 0.5) == admission_verdict::admit);
  CHECK(pulseinfer::resident_bytes(1'000, placement) == Approx(300));
  CHECK(admit(99, 9) == admission_verdict::defer);
}

TEST_CASE("admission: what all requests keep is not given up for what they recall") {
  adaptive_admission policy(6);
  const auto look = [&](const std::vector<double>& activity, std::int64_t capacity) {
    policy.observe(busy(0.1), activity);
    policy.observe_memory({.capacity_bytes = capacity, .context_bytes = 1'000});
  };
  look(std::vector<double>(6, 0.0), 1'000);
  look(std::vector<double>(6, 0.0), 690);
  const auto first = kept(policy);
  CHECK(first == ints{0, 1, 4, 5});
  // Those that went are recalled now, one of them a little more than the other.
  for (int i = 0; i < 20; ++i) look({0, 0, 5, 5.5, 0, 0}, 690);
  CHECK(kept(policy) == first);
  for (int i = 0; i < 20; ++i) look({0, 0, 5, 7, 0, 0}, 840);
  CHECK(kept(policy) == ints{0, 1, 3, 4, 5});
}

TEST_CASE("admission: what does not fit stays less, the least active first, and else waits") {
  adaptive_admission policy(10, {.retained_layers = 4});
  std::vector<double> activity = {9, 1, 1, 8, 1, 1, 7, 1, 1, 6};
  observe(policy, busy(0.95), 20, activity);
  CHECK(kept(policy) == ints{0, 3, 6, 9});
  std::vector<double> placement(10);
  const auto admit = [&](std::int64_t free) {
    return policy.admit({.context_bytes = 10'000, .device_bytes_free = free}, placement).verdict;
  };
  CHECK(admit(4'600) == admission_verdict::admit);
  CHECK(placement == std::vector<double>{0, 0.9, 0.9, 0, 0.9, 0.9, 0, 0.9, 0.9, 0});
  CHECK(admit(2'801) == admission_verdict::admit);
  CHECK(placement[0] == Approx(0));
  CHECK(placement[3] == Approx(0));
  CHECK(placement[6] == Approx(0.9).epsilon(0.01));
  CHECK(placement[9] == 0.9);
  CHECK(admit(1'001) == admission_verdict::admit);
  CHECK(*std::min_element(placement.begin(), placement.end()) > 0.89);
  CHECK(admit(999) == admission_verdict::defer);
  CHECK(
      policy.admit({.context_bytes = 10'000, .device_bytes_free = 999, .waited_s = 1e6}, placement)
          .verdict == admission_verdict::defer);
  CHECK(policy.admit({}, placement).verdict == admission_verdict::admit);
  CHECK(kept(policy) == ints{0, 3, 6, 9});  // of the others nothing changed
}

TEST_CASE("admission: ranks with links of their own go apart unless they agree") {
  std::vector<adaptive_admission> apart(8, adaptive_admission(8)), together = apart;
  for (int step = 0; step < 40; ++step) {
    std::vector<link_snapshot> local(8);
    for (int rank = 0; rank < 8; ++rank) {
      local[static_cast<std::size_t>(rank)] = busy(0.1 * rank + 0.1);
    }
    for (std::size_t rank = 0; rank < 8; ++rank) {
      apart[rank].observe(local[rank], {});
      together[rank].observe(pulseinfer::merge(local), {});
    }
  }
  CHECK(shares(apart[0]) != shares(apart[7]));
  for (const adaptive_admission& rank : together) CHECK(shares(rank) == shares(together[0]));
  CHECK(kept(together[0]) == ints{0, 7});
}

TEST_CASE("admission: a load that was let in counts as what waits, not as others' traffic") {
  adaptive_admission policy(4);
  std::vector<double> placement(4);
  link_snapshot link;
  link.recalls.seconds_per_byte = 1e-9;
  policy.observe(link, {});
  CHECK(policy.admit({.load_bytes = 1'000'000'000}, placement).verdict == admission_verdict::admit);
  // Half of it is through, and nobody else moves anything.
  link = {.recalls = {1, 1e-9, 500'000'000, 1}, .stores = {}, .taken_at = 0.5};
  policy.observe(link, {});
  const pulseinfer::admission_request next{
      .load_bytes = 100'000'000, .load_tokens = 1'000, .recompute_s_per_token = 1e-3};
  const auto asked = [&] {
    adaptive_admission copy = policy;  // it does not come in
    return copy.admit(next, placement);
  };
  CHECK(asked().load_s == Approx(0.6).epsilon(0.01));
  CHECK(asked().verdict == admission_verdict::defer);  // for a while, rather than recompute in 1 s
  // All of it is through, and others have half of the link.
  link = {.recalls = {0.5, 1e-9, 0, 0}, .stores = {}, .taken_at = 5};
  policy.observe(link, {});
  CHECK(asked().load_s == Approx(0.2).epsilon(0.15));
  link.taken_at = 9;
  policy.observe(link, {});
  CHECK(asked().load_s == Approx(0.2).epsilon(0.001));
  CHECK(asked().verdict == admission_verdict::admit);
  // A clock that stands still, or goes back, says nothing.
  link.taken_at = 8;
  policy.observe(link, {});
  CHECK(asked().load_s == Approx(0.2).epsilon(0.001));
}

TEST_CASE("admission: limits out of order are refused, by name") {
  using options = adaptive_admission_options;
  const auto make = [](const options& o) { return adaptive_admission(4, o); };
  CHECK_THROWS_WITH_AS(make({.low_utilisation = 0.9}),
                       "adaptive_admission: low_utilisation is 0.900000, expected less than "
                       "high_utilisation, which is 0.850000",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(make({.max_offload_share = 1.5}),
                       "adaptive_admission: max_offload_share is 1.500000, expected 0 to 1.000000",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(make({.retained_layers = 5}),
                       "adaptive_admission: retained_layers is 5, expected 0 to 4, the layers of "
                       "the model",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(make({.store_queue_bytes = 2, .recall_queue_bytes = 1}),
                       "adaptive_admission: recall_queue_bytes is 1, expected at least "
                       "store_queue_bytes, which is 2: stores are refused first",
                       std::invalid_argument);
  const double no_number = std::numeric_limits<double>::quiet_NaN();
  for (double options::*field :
       {&options::low_utilisation, &options::high_utilisation, &options::max_offload_share,
        &options::hysteresis, &options::max_step, &options::swap_margin, &options::resume_share,
        &options::max_wait_s, &options::utilisation_window_s}) {
    for (const double bad : {no_number, -0.25, std::numeric_limits<double>::infinity()}) {
      options o;
      o.*field = bad;
      CHECK_THROWS_AS(make(o), std::invalid_argument);
    }
  }
  CHECK_THROWS_AS(make({.low_utilisation = 0.85}), std::invalid_argument);
  CHECK_THROWS_AS(make({.high_utilisation = 1.25}), std::invalid_argument);
  CHECK_THROWS_AS(make({.retained_layers = -1}), std::invalid_argument);
  CHECK_THROWS_AS(make({.hysteresis = 0.35}), std::invalid_argument);
  CHECK_THROWS_AS(make({.max_step = 0}), std::invalid_argument);
  CHECK_THROWS_AS(make({.utilisation_window_s = 0}), std::invalid_argument);
  CHECK_THROWS_AS(make({.patience = 0}), std::invalid_argument);
  CHECK_THROWS_AS(make({.store_queue_bytes = 0}), std::invalid_argument);
  CHECK_THROWS_AS(adaptive_admission(0), std::invalid_argument);
  CHECK_THROWS_AS(adaptive_admission(-1), std::invalid_argument);
}
