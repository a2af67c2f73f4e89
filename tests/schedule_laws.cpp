// SPDX-License-Identifier: Apache-2.0
/// @file
/// Laws of the layer scheduler by the simulated clock. Times are a hundred times those of a real
/// machine, so that what the simulation charges for a poll is small beside them.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "pulseinfer/backend/simulated.hpp"
#include "pulseinfer/step_cost.hpp"
#include "support/layer_engine.hpp"
#include "support/offload_rig.hpp"

namespace {

using pulseinfer::hardware_profile;
using pulseinfer::layer_work;
using pulseinfer::simulated_backend;
using test::layer_demand;
using engine = test::layer_engine<simulated_backend>;

constexpr hardware_profile slow{.dram_bytes_per_second = 1e13,
                                .link_bytes_per_second = 1e7,
                                .hbm_bytes_per_second = 2e8,
                                .copy_start_ns = 200'000,
                                .copy_busy_ns = 20'000,
                                .kernel_launch_ns = 40'000};

pulseinfer::step_speeds speeds_of(const hardware_profile& p) {
  return {.device_bytes_per_second = p.hbm_bytes_per_second,
          .link_bytes_per_second = p.link_bytes_per_second,
          .launch_seconds = static_cast<double>(p.kernel_launch_ns) * 1e-9,
          .recall_seconds = static_cast<double>(p.copy_start_ns) * 1e-9,
          .recall_busy_seconds = static_cast<double>(p.copy_busy_ns) * 1e-9};
}

constexpr std::int32_t layers = 24;

struct outcome {
  double seconds = 0;
  pulseinfer::schedule_statistics statistics;
  std::vector<std::int32_t> batches;
};
outcome run(const hardware_profile& p, const layer_work& w, std::int32_t requests,
            std::int32_t steps) {
  engine e(simulated_backend{pulseinfer::timed{p}}, {.max_requests = 64,
                                                     .layers = layers,
                                                     .max_flights = 512,
                                                     .work = w,
                                                     .speeds = speeds_of(p)});
  const auto all = static_cast<std::int64_t>(w.recall_bytes);
  const auto ahead = static_cast<std::int64_t>(w.recall_bytes * w.known_ahead);
  const std::uint64_t ns = e.run(requests, steps, [&](std::int32_t, std::int32_t) {
    return layer_demand{all - ahead, ahead};
  });
  CHECK(e.scheduler.counts().total() == 0);
  CHECK(e.board.size() == 0);
  return {static_cast<double>(ns) * 1e-9, e.scheduler.statistics(), e.batch_sizes};
}

TEST_CASE("schedule laws: with an infinite link a step is its computation") {
  hardware_profile p = slow;
  p.link_bytes_per_second = 1e15;
  p.copy_start_ns = p.copy_busy_ns = 0;
  const layer_work w{.weight_bytes = 1e5, .request_bytes = 1e4, .recall_bytes = 2000};
  const outcome o = run(p, w, 16, 4);
  const double compute = 4 * layers * (1e5 + 16 * 1e4) / p.hbm_bytes_per_second;
  const double launches = 4 * layers * 40e-6;
  CHECK(o.seconds >= compute);
  CHECK(o.seconds <= compute + 1.1 * launches);
  CHECK(o.statistics.batches == 4 * layers);
}

TEST_CASE("schedule laws: with an infinite device a step is its transfer") {
  hardware_profile p = slow;
  p.hbm_bytes_per_second = 1e15;
  p.copy_start_ns = p.copy_busy_ns = p.kernel_launch_ns = 0;
  const layer_work w{.weight_bytes = 1e5, .request_bytes = 1e4, .recall_bytes = 2000};
  const outcome o = run(p, w, 16, 4);
  const double transfer = 4 * layers * 16 * 2000 / p.link_bytes_per_second;
  CHECK(o.seconds >= transfer);
  CHECK(o.seconds <= 1.02 * transfer);
}

TEST_CASE("schedule laws: work is conserved") {
  for (const double recall : {0.0, 100.0, 3000.0}) {
    const layer_work w{.weight_bytes = 1e5, .request_bytes = 1e4, .recall_bytes = recall};
    for (const std::int32_t requests : {1, 2, 7, 30}) {
      const outcome o = run(slow, w, requests, 3);
      CHECK(o.statistics.layers_run == std::int64_t{requests} * layers * 3);
      CHECK(std::accumulate(o.batches.begin(), o.batches.end(), std::int64_t{0}) ==
            o.statistics.layers_run);
      CHECK(o.statistics.batches == static_cast<std::int64_t>(o.batches.size()));
    }
  }
}

TEST_CASE("schedule laws: the same calls, the same schedule") {
  const layer_work w{.weight_bytes = 1e5, .request_bytes = 1e4, .recall_bytes = 1500};
  const outcome a = run(slow, w, 13, 5);
  const outcome b = run(slow, w, 13, 5);
  CHECK(a.seconds == b.seconds);
  CHECK(a.batches == b.batches);
}

TEST_CASE("schedule laws: a step takes what the best number of groups takes, within 8 percent") {
  double worst = 0;
  for (const std::int32_t requests : {1, 2, 5, 16, 64}) {
    for (const double weights : {1e4, 1e5, 4e5}) {
      for (const double recall : {0.0, 100.0, 1000.0, 5000.0}) {
        for (const double ahead : {0.0, 0.9}) {
          const layer_work w{.weight_bytes = weights,
                             .request_bytes = 1e4,
                             .recall_bytes = recall,
                             .known_ahead = ahead};
          if (recall == 0 && ahead > 0) continue;
          const auto plan = pulseinfer::best_groups(w, speeds_of(slow), requests, 64);
          worst = std::max(worst,
                           run(slow, w, requests, 4).seconds / (4 * layers * plan.layer.total()));
        }
      }
    }
  }
  CHECK(worst <= 1.08);
}

TEST_CASE("schedule laws: a faster link or less load makes no step slower, beyond 4 percent") {
  for (const std::int32_t requests : {3, 16, 40}) {
    for (const double recall : {300.0, 1500.0, 6000.0}) {
      const layer_work w{.weight_bytes = 1e5, .request_bytes = 1e4, .recall_bytes = recall};
      const double now = run(slow, w, requests, 4).seconds;
      hardware_profile faster = slow;
      faster.link_bytes_per_second *= 1.3;
      CHECK(run(faster, w, requests, 4).seconds <= 1.04 * now);
      layer_work less = w;
      less.recall_bytes *= 0.7;
      CHECK(run(slow, less, requests, 4).seconds <= 1.04 * now);
      CHECK(run(slow, w, requests - 1, 4).seconds <= 1.04 * now);
    }
  }
}

struct no_kernel {
  void operator()(std::int64_t, std::int64_t) const {}
};

TEST_CASE("fault 66: a load passes a hundred queued stores") {
  using rig = test::offload_rig<simulated_backend>;
  const auto recall_ns = [](const hardware_profile& profile, int stores) {
    rig r(simulated_backend{pulseinfer::timed{profile}},
          {.pages = 96, .capacity_units = 256, .transfers_in_flight = 128});
    const auto loaded = r.stored(1, {0, 1, 2, 3});
    const auto written = r.store.open_sequence().value();
    std::vector<rig::ticket> queued;
    const std::uint64_t before = r.machine.now_ns();
    r.machine.for_each({1, 1}, {}, 20'000, no_kernel{}, r.stream);  // the engine's, under way
    for (int i = 0; i < stores; ++i) {
      queued.push_back(r.offload(i % 2, written, {{0, i / 2, 8 + i % 80}}).value());
    }
    pulseinfer::flight_board<simulated_backend> board(r.machine, 1);
    const auto load =
        board.add(r.recall(0, loaded, {{0, 0, 0}, {0, 1, 1}, {0, 2, 2}, {0, 3, 3}}).value());
    const std::uint64_t begin = r.machine.now_ns();
    CHECK(begin == before);  // who submits waits for nothing
    board.sync_change();
    CHECK(board.poll(load.value()) == pulseinfer::flight_state::landed);
    const std::uint64_t took = r.machine.now_ns() - begin;
    std::int64_t behind = 0;
    for (const auto& t : queued) behind += t.is_final() ? 0 : 1;
    CHECK(behind >= stores * 3 / 4);
    for (auto& t : queued) t.sync();
    return took;
  };
  // What there is too little of is the link, or workers.
  hardware_profile few_workers = slow;
  few_workers.workers = 1;
  few_workers.task_start_ns = 500'000;
  for (const hardware_profile& profile : {slow, few_workers}) {
    CHECK(recall_ns(profile, 100) <= 3 * recall_ns(profile, 0));
  }
}

}  // namespace
