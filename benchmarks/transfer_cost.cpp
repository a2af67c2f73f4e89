// SPDX-License-Identifier: Apache-2.0
// The automatic choice of a way, judged by published tables; and what a choice costs the caller.
//
// auto_vs_best_way: time of the chosen way over that of the best way, the worst over all tables of
// tests/support/published_tables.hpp and over shapes between and at the published ones. No time is
// taken for it: the tables answer. Baseline: the best way of the table for each shape. The choice
// is by a calibration that asks the table, within its limits of time and bytes.
//
// choose: one thread, everything in the cache; the costs hold some 40 points a way.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>

#include "../tests/support/published_tables.hpp"
#include "pulseinfer/calibration.hpp"
#include "support/report.hpp"

namespace {

using pulseinfer::transfer_costs;
using pulseinfer::transfer_shape;

void judge(benchmark::State& state) {
  double worst = 0;
  std::int64_t shapes = 0;
  for (auto _ : state) {
    for (const published::table& table : published::tables()) {
      const transfer_costs costs = pulseinfer::calibrate(table, table.range());
      const auto found = published::judge(
          table, [&](const transfer_shape& shape) { return costs.cheapest(shape).way; });
      worst = std::max(worst, found.worst);
      shapes += found.shapes;
    }
  }
  state.counters["worst"] = worst;
  state.counters["shapes"] = static_cast<double>(shapes);
  pulseinfer_bench::report("auto_vs_best_way", worst);
}
BENCHMARK(judge)->Iterations(1)->Unit(benchmark::kMillisecond);

void choose(benchmark::State& state) {
  const published::table table = published::a30_batch_and_pull(5e-6, 24e9);
  const transfer_costs costs = pulseinfer::calibrate(table, table.range());
  std::int64_t entries = 16;
  for (auto _ : state) {
    entries = entries % 4096 + 16;
    benchmark::DoNotOptimize(costs.cheapest({entries, entries, entries * 12'345}));
  }
}
BENCHMARK(choose);

}  // namespace
