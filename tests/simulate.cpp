// SPDX-License-Identifier: Apache-2.0
/// @file
/// Laws of the simulation in examples/simulate, on a model of a few layers.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>

#include "../examples/simulate/bound.hpp"
#include "../examples/simulate/decoder.hpp"
#include "../examples/simulate/setting.hpp"

namespace {

using simulate::decoded;
using simulate::setting;

/// Four layers, each like those of an 8B model.
setting small(std::int32_t streams, double miss, double ahead) {
  setting s;
  s.machine = simulate::machines().front();
  s.model = simulate::models().front();
  s.model.layers = 4;
  s.streams = streams;
  s.context = 32768;
  s.budget = 32;
  s.kv = {miss, ahead};
  return s;
}
constexpr std::int32_t steps = 3;

decoded run(const setting& s, const simulate::policy& how = {}) {
  return simulate::decoder(s, how).run(steps, simulate::even_misses(s));
}
double compute_seconds(const setting& s) {
  const pulseinfer::layer_work w = s.work();
  return s.model.layers * (w.weight_bytes + s.streams * w.request_bytes) /
         s.machine.profile.hbm_bytes_per_second;
}

TEST_CASE("simulate: shapes give the bytes that the models have") {
  const auto models = simulate::models();
  CHECK(models[0].weight_bytes() == doctest::Approx(16.06e9).epsilon(0.002));
  CHECK(models[1].weight_bytes() == doctest::Approx(141.1e9).epsilon(0.002));
  CHECK(models[2].weight_bytes() == doctest::Approx(145.4e9).epsilon(0.002));
  CHECK(models[0].unit_bytes() == 65536);  // not the 32 KiB of the guide's comment
  CHECK(models[1].kv_bytes(128000) == doctest::Approx(41.9e9).epsilon(0.002));  // nor its 33.5 GB
}

TEST_CASE("simulate: how many streams fit") {
  setting s = small(1, 0, 0);
  s.model = simulate::models().front();
  s.context = 131072;
  s.budget = 64;
  CHECK(s.streams_that_fit(false) == 3);
  CHECK(s.streams_that_fit(true) == 29);  // of 512 GB
  s.machine.host_bytes = 10e9;
  CHECK(s.streams_that_fit(true) == 0);
  s.machine.profile.device_bytes = 16'000'000'000;
  CHECK(s.streams_that_fit(false) == 0);
}

TEST_CASE("simulate: with an infinite link a step is its computation") {
  setting s = small(5, 0.5, 0);
  s.machine.profile.link_bytes_per_second = 1e15;
  s.machine.profile.dram_bytes_per_second = 1e16;
  s.machine.profile.worker_bytes_per_second = 1e15;
  s.machine.profile.copy_start_ns = s.machine.profile.copy_busy_ns = 0;
  s.machine.profile.task_start_ns = s.machine.profile.kernel_launch_ns = 0;
  const double tpot = run(s).tpot_seconds;
  CHECK(tpot >= 0.9999 * compute_seconds(s));
  CHECK(tpot <= 1.02 * compute_seconds(s));
}

TEST_CASE("simulate: with an infinite device a step is its transfer") {
  setting s = small(8, 1, 0);
  s.budget = 128;
  s.machine.profile.hbm_bytes_per_second = 1e15;
  s.machine.profile.dram_bytes_per_second = 1e16;
  s.machine.profile.worker_bytes_per_second = 1e15;
  s.machine.profile.copy_start_ns = s.machine.profile.copy_busy_ns = 0;
  s.machine.profile.task_start_ns = s.machine.profile.kernel_launch_ns = 0;
  const double transfer = s.model.layers * s.streams * s.chosen() * s.unit_bytes() /
                          s.machine.profile.link_bytes_per_second;
  const double tpot = run(s).tpot_seconds;
  CHECK(tpot >= 0.9999 * transfer);
  CHECK(tpot <= 1.02 * transfer);
}

TEST_CASE("simulate: no step is below the bound, and a busy link is near it") {
  for (const std::int32_t streams : {1, 6}) {
    for (const double miss : {0.0, 0.25, 1.0}) {
      for (const double ahead : {0.0, 0.9}) {
        const setting s = small(streams, miss, ahead);
        CAPTURE(streams);
        CAPTURE(miss);
        CAPTURE(ahead);
        const double ratio = run(s).tpot_seconds / simulate::lower_bound(s).seconds;
        CHECK(ratio >= 0.999);
        CHECK(ratio <= 1.35);
      }
    }
  }
}

TEST_CASE("simulate: work is conserved") {
  for (const double ahead : {0.0, 0.5, 1.0}) {
    const setting s = small(3, 0.5, ahead);
    const decoded r = run(s);
    CHECK(r.layers_run == std::int64_t{s.streams} * s.model.layers * steps);
    CHECK(r.recalled_bytes ==
          doctest::Approx(s.streams * s.model.layers * s.kv.miss * s.chosen() * s.unit_bytes())
              .epsilon(1e-9));
    CHECK(r.token_seconds.size() == static_cast<std::size_t>(s.streams * (steps - 1)));
  }
}

TEST_CASE("simulate: the same setting, the same result") {
  const setting s = small(5, 0.3, 0.7);
  const decoded a = run(s);
  const decoded b = run(s);
  CHECK(a.end_ns == b.end_ns);
  CHECK(a.token_seconds == b.token_seconds);
  CHECK(a.token_stalls == b.token_stalls);
}

TEST_CASE("simulate: a faster link or less load makes no step slower, beyond 5 percent") {
  for (const std::int32_t streams : {2, 7}) {
    for (const double ahead : {0.0, 0.9}) {
      const setting s = small(streams, 0.5, ahead);
      const double now = run(s).tpot_seconds;
      setting faster = s;
      faster.machine.profile.link_bytes_per_second *= 1.4;
      CHECK(run(faster).tpot_seconds <= 1.05 * now);
      setting less = s;
      less.kv.miss *= 0.6;
      CHECK(run(less).tpot_seconds <= 1.05 * now);
      setting fewer = s;
      --fewer.streams;
      CHECK(run(fewer).tpot_seconds <= 1.05 * now);
    }
  }
}

}  // namespace
