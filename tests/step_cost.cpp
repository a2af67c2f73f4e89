// SPDX-License-Identifier: Apache-2.0
/// @file
/// The cost of a layer and the best number of groups, against machines that are run event by event.
#include "pulseinfer/step_cost.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "pulseinfer/detail/random.hpp"

namespace {

using pulseinfer::best_groups;
using pulseinfer::layer_seconds;
using pulseinfer::layer_work;
using pulseinfer::predict_layer;
using pulseinfer::step_speeds;

constexpr double infinite = std::numeric_limits<double>::infinity();

/// Seconds a layer when groups of these sizes take turns on a device and a link, each of which does
/// one thing after the other, first come first served. The mean of 200 layers, behind 100 others.
double run_groups(const layer_work& w, const step_speeds& s,
                  const std::vector<std::int32_t>& sizes) {
  struct group {
    double ready = 0;  // to compute
    double ahead = 0;  // what is known of the layer behind is here
    int layers = 0;
  };
  std::vector<group> groups(sizes.size());
  double device_free = 0;
  double link_free = 0;
  double from = 0;
  constexpr int warm = 100;
  constexpr int layers = 300;
  while (true) {
    std::size_t next = 0;
    for (std::size_t g = 1; g < groups.size(); ++g) {
      if (groups[g].ready < groups[next].ready) next = g;
    }
    group& g = groups[next];
    const double n = sizes[next];
    const double end = std::max(device_free, g.ready) +
                       (w.weight_bytes + n * w.request_bytes) / s.device_bytes_per_second +
                       s.launch_seconds;
    device_free = end;
    const auto recall = [&](double bytes) {
      if (bytes <= 0) return end;
      link_free =
          std::max(link_free, end) + s.recall_busy_seconds + bytes / s.link_bytes_per_second;
      return link_free + s.recall_seconds;
    };
    g.ready = std::max(g.ahead, recall(n * w.recall_bytes * (1 - w.known_ahead)));
    g.ahead = recall(n * w.recall_bytes * w.known_ahead);
    if (++g.layers == layers) return (end - from) / (layers - warm);
    if (next == 0 && g.layers == warm) from = end;
  }
}

std::vector<std::int32_t> even_sizes(std::int32_t requests, std::int32_t groups) {
  std::vector<std::int32_t> sizes;
  for (std::int32_t g = 0; g < groups; ++g) {
    sizes.push_back(requests / groups + (g < requests % groups ? 1 : 0));
  }
  return sizes;
}

/// Llama-3-8B on an H100, a layer: 436 MB of weights, 64 blocks and the digests of 128k tokens.
constexpr layer_work llama{.weight_bytes = 436e6, .request_bytes = 38e6, .recall_bytes = 840e3};
constexpr step_speeds h100{.device_bytes_per_second = 3350e9,
                           .link_bytes_per_second = 56e9,
                           .launch_seconds = 20e-6,
                           .recall_seconds = 30e-6,
                           .recall_busy_seconds = 2.3e-6};

struct drawn {
  layer_work work;
  step_speeds speeds;
  std::int32_t requests;
};
drawn draw(pulseinfer::detail::random_source& random) {
  const auto upto = [&](double most) {
    return most * static_cast<double>(random.below(1001)) / 1000;
  };
  drawn d{llama, h100, 1 + static_cast<std::int32_t>(random.below(32))};
  d.work.weight_bytes = upto(1e9);
  d.work.request_bytes = upto(60e6);
  d.work.recall_bytes = random.one_in(4) ? 0 : upto(4e6);
  d.work.known_ahead = random.one_in(2) ? 0 : random.one_in(3) ? 1 : upto(1);
  d.speeds.recall_seconds = upto(60e-6);
  return d;
}

TEST_CASE("step_cost: a layer by hand") {
  const layer_work w{.weight_bytes = 100, .request_bytes = 10, .recall_bytes = 8};
  const step_speeds s{.device_bytes_per_second = 10,
                      .link_bytes_per_second = 4,
                      .launch_seconds = 1,
                      .recall_seconds = 3,
                      .recall_busy_seconds = 2};
  // Two groups of two: 11 + 2 each on the device, 2 + 4 each on the link.
  const layer_seconds two = predict_layer(w, s, 4, 2);
  CHECK(two.compute == doctest::Approx(26));
  CHECK(two.link == doctest::Approx(12));
  CHECK(two.path == doctest::Approx(13 + 6 + 3));
  CHECK(two.total() == doctest::Approx(26));
  CHECK(predict_layer(w, s, 4, 1).total() == doctest::Approx(15 + 10 + 3));
  // One group of three beside one of one.
  CHECK(predict_layer(w, s, 4, 2, 3).path == doctest::Approx(14 + 8 + 3));
  CHECK(best_groups(w, s, 4, 4).groups == 2);
  CHECK(best_groups(w, s, 4, 1).groups == 1);
}

TEST_CASE("step_cost: what is known a layer ahead needs no second group") {
  const layer_work w{.weight_bytes = 100, .request_bytes = 10, .recall_bytes = 8, .known_ahead = 1};
  const step_speeds s{.device_bytes_per_second = 10,
                      .link_bytes_per_second = 4,
                      .launch_seconds = 1,
                      .recall_seconds = 3,
                      .recall_busy_seconds = 2};
  CHECK(predict_layer(w, s, 4, 1).total() == doctest::Approx(15));
  CHECK(best_groups(w, s, 4, 4).groups == 1);
}

TEST_CASE("step_cost: nothing is known ahead of the first of a few layers") {
  const step_speeds speeds{.device_bytes_per_second = 1,
                           .link_bytes_per_second = 1,
                           .launch_seconds = 0,
                           .recall_seconds = 2,
                           .recall_busy_seconds = 0};
  layer_work work{
      .weight_bytes = 10, .request_bytes = 1, .recall_bytes = 8, .known_ahead = 1, .layers = 4};
  // One group: the link rests for a computation and a start each step, a quarter of it a layer; and
  // of every fourth layer all is late.
  const layer_seconds one = predict_layer(work, speeds, 2, 1);
  CHECK(one.compute == doctest::Approx(12));
  CHECK(one.link == doctest::Approx(16 + (12 + 2) / 4.0));
  CHECK(one.path == doctest::Approx(12 + 16 / 4.0));
  const layer_seconds two = predict_layer(work, speeds, 2, 2);
  CHECK(two.link == doctest::Approx(16));
  work.layers = 0;
  CHECK(predict_layer(work, speeds, 2, 1).link == doctest::Approx(16));
  work.recall_bytes = 0, work.layers = 4;
  CHECK(predict_layer(work, speeds, 2, 1).link == 0);
  work.layers = -1;
  CHECK_THROWS_WITH_AS((void)predict_layer(work, speeds, 2, 1), doctest::Contains("layers is -1"),
                       std::invalid_argument);
}

TEST_CASE("step_cost: predictions are what a machine of groups takes") {
  pulseinfer::detail::random_source random(1);
  double worst = 0;
  double best = 10;
  for (int i = 0; i < 400; ++i) {
    const drawn d = draw(random);
    const auto groups = 1 + static_cast<std::int32_t>(random.below(
                                static_cast<std::uint64_t>(std::min<std::int32_t>(d.requests, 8))));
    const double took = run_groups(d.work, d.speeds, even_sizes(d.requests, groups));
    const double ratio = took / predict_layer(d.work, d.speeds, d.requests, groups).total();
    worst = std::max(worst, ratio);
    best = std::min(best, ratio);
  }
  CHECK(best > 0.97);
  CHECK(worst < 1.06);
}

TEST_CASE("step_cost: the best number of groups is that of brute force") {
  pulseinfer::detail::random_source random(2);
  double worst = 1;
  for (int i = 0; i < 100; ++i) {
    const drawn d = draw(random);
    double least = infinite;
    double chosen = 0;
    const std::int32_t groups = best_groups(d.work, d.speeds, d.requests, d.requests).groups;
    double least_predicted = infinite;
    for (std::int32_t g = 1; g <= d.requests; ++g) {
      const double took = run_groups(d.work, d.speeds, even_sizes(d.requests, g));
      least = std::min(least, took);
      least_predicted =
          std::min(least_predicted, predict_layer(d.work, d.speeds, d.requests, g).total());
      if (g == groups) chosen = took;
    }
    CHECK(predict_layer(d.work, d.speeds, d.requests, groups).total() == least_predicted);
    worst = std::max(worst, chosen / least);
  }
  CHECK(worst < 1.05);
}

TEST_CASE("step_cost: with an infinite link a layer is its computation, in one group") {
  step_speeds s = h100;
  s.link_bytes_per_second = infinite;
  s.recall_seconds = s.recall_busy_seconds = 0;
  const auto plan = best_groups(llama, s, 16, 16);
  CHECK(plan.groups == 1);
  CHECK(plan.layer.total() == plan.layer.compute);
  layer_work resident = llama;
  resident.recall_bytes = 0;
  CHECK(best_groups(resident, h100, 16, 16).layer.total() == plan.layer.compute);
}

TEST_CASE("step_cost: with an infinite device a layer is its transfer") {
  step_speeds s = h100;
  s.device_bytes_per_second = infinite;
  s.launch_seconds = s.recall_seconds = 0;
  const auto plan = best_groups(llama, s, 16, 16);
  CHECK(plan.groups == 1);
  CHECK(plan.layer.total() == plan.layer.link);
}

TEST_CASE("step_cost: a faster link and less work are never slower") {
  pulseinfer::detail::random_source random(3);
  for (int i = 0; i < 2000; ++i) {
    const drawn d = draw(random);
    const double now = best_groups(d.work, d.speeds, d.requests, 16).layer.total();
    drawn faster = d;
    faster.speeds.link_bytes_per_second *= 1.5;
    CHECK(best_groups(faster.work, faster.speeds, d.requests, 16).layer.total() <= now);
    drawn fewer = d;
    fewer.work.recall_bytes *= 0.7;
    CHECK(best_groups(fewer.work, fewer.speeds, d.requests, 16).layer.total() <= now);
    if (d.requests > 1) {
      CHECK(best_groups(d.work, d.speeds, d.requests - 1, 16).layer.total() <= now * (1 + 1e-12));
    }
  }
}

TEST_CASE("step_cost: what is out of range is refused, naming it") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto bad_work = [](auto change) {
    layer_work w = llama;
    change(w);
    CHECK_THROWS_AS((void)best_groups(w, h100, 4, 4), std::invalid_argument);
    CHECK_THROWS_AS((void)predict_layer(w, h100, 4, 2), std::invalid_argument);
  };
  bad_work([&](layer_work& w) { w.weight_bytes = nan; });
  bad_work([&](layer_work& w) { w.weight_bytes = -1; });
  bad_work([&](layer_work& w) { w.request_bytes = infinite; });
  bad_work([&](layer_work& w) { w.recall_bytes = -0.5; });
  bad_work([&](layer_work& w) { w.known_ahead = 1.01; });
  bad_work([&](layer_work& w) { w.known_ahead = nan; });
  const auto bad_speed = [](auto change) {
    step_speeds s = h100;
    change(s);
    CHECK_THROWS_AS((void)best_groups(llama, s, 4, 4), std::invalid_argument);
  };
  bad_speed([&](step_speeds& s) { s.device_bytes_per_second = 0; });
  bad_speed([&](step_speeds& s) { s.link_bytes_per_second = nan; });
  bad_speed([&](step_speeds& s) { s.launch_seconds = -1e-9; });
  bad_speed([&](step_speeds& s) { s.recall_seconds = infinite; });
  CHECK_THROWS_WITH_AS((void)best_groups(llama, h100, 0, 4),
                       "best_groups: requests is 0, expected at least 1", std::invalid_argument);
  CHECK_THROWS_AS((void)best_groups(llama, h100, 4, 0), std::invalid_argument);
  CHECK_THROWS_AS((void)predict_layer(llama, h100, 4, 5), std::invalid_argument);
  CHECK_THROWS_AS((void)predict_layer(llama, h100, 4, 0), std::invalid_argument);
  CHECK_THROWS_AS((void)predict_layer(llama, h100, 4, 2, 1), std::invalid_argument);
  CHECK_THROWS_AS((void)predict_layer(llama, h100, 4, 2, 4), std::invalid_argument);
}

}  // namespace
