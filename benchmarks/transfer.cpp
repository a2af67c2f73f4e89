// SPDX-License-Identifier: Apache-2.0
// Recall over a paced link: staged against one copy for each block and plane.
//
// Baseline: transfer_way::per_block over the same link, store and units. The link moves a quarter of
// what one thread copies and is busy 2.3 us longer for each copy. Units are scattered in the store,
// their order is fixed; pages of 4 KiB; the host backend's two workers.
#include <benchmark/benchmark.h>

#include <string>

#include "../examples/demo/speedup.hpp"
#include "pulseinfer/pulseinfer.hpp"
#include "support/report.hpp"

namespace {

void staged_against_per_block(benchmark::State& state, const std::string& key,
                              const pulseinfer::kv_geometry& geometry) {
  const pulseinfer::link_pace link{.bytes_per_second = demo::copy_speed() / 4,
                                   .seconds_per_copy = 2.3e-6};
  double ratio = 0;
  for (auto _ : state) {
    ratio = demo::staged_vs_per_block(pulseinfer::host_backend{{.link = link}}, geometry);
  }
  state.counters["ratio"] = ratio;
  state.counters["unit_bytes"] = static_cast<double>(geometry.unit_bytes());
  pulseinfer_bench::report(key, ratio);
}

constexpr pulseinfer::kv_geometry smollm2_135m{.layers = 1, .kv_heads = 3, .head_dim = 64};
constexpr pulseinfer::kv_geometry llama3_8b{.layers = 1, .kv_heads = 8, .head_dim = 128};

BENCHMARK_CAPTURE(staged_against_per_block, smollm2_135m, "staged_vs_per_block_speedup_12k",
                  smollm2_135m)
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(staged_against_per_block, llama3_8b, "staged_vs_per_block_speedup_64k", llama3_8b)
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);

}  // namespace
