// SPDX-License-Identifier: Apache-2.0
// Hits of the eviction policies on recorded traffic: the trace that PULSEINFER_TRACE names. Where it
// is unset, `run.sh bench` takes mooncake_conversation_trace.jsonl of ../shared/data if that is
// there; else the figures are left out.
//
// Single references in the order of the file; what is missing is inserted, and for it the policy's
// victim given up once the cache is full. Policies see what a store sees: a block's key, and its
// parent. No look-ahead.
//
// hits_of: lru_hits_N are those of plain LRU with room for N blocks; best_policy_hits_vs_lru_N are
// those of adaptive_2q over them, with its default parameters at each N. The other policies are
// counters only. Baseline: LRU. Counts, not times: the same every time.
//
// admitted: LRU behind a filter that stores a block at its second sight: what is stored, and what
// that costs in hits. Baseline: LRU without it.
#include <benchmark/benchmark.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#include "pulseinfer/admission_filter.hpp"
#include "pulseinfer/eviction.hpp"
#include "pulseinfer/eviction_adaptive_2q.hpp"
#include "pulseinfer/eviction_arc.hpp"
#include "pulseinfer/eviction_prefix_tree.hpp"
#include "pulseinfer/eviction_s3_fifo.hpp"
#include "pulseinfer/eviction_sieve.hpp"
#include "pulseinfer/eviction_slru.hpp"
#include "support/report.hpp"
#include "support/request_trace.hpp"

namespace {

using pulseinfer_bench::request_trace;

struct replay_result {
  std::int64_t references = 0;
  std::int64_t hits = 0;
  std::int64_t stored = 0;
};

/// @param admit  admit(key): whether a block that is missing is stored
template <class Policy, class Admit>
replay_result replay(const request_trace& trace, std::int32_t capacity, Admit admit) {
  Policy policy(capacity);
  std::unordered_map<std::uint64_t, std::int32_t> group_of;
  std::vector<std::uint64_t> key_of(static_cast<std::size_t>(capacity));
  replay_result result;
  std::int32_t used = 0;
  for (const std::vector<std::uint64_t>& request : trace) {
    std::int32_t parent = -1;
    for (const std::uint64_t id : request) {
      ++result.references;
      const std::uint64_t key = id + 1;  // 0 names nothing
      const auto found = group_of.find(key);
      const bool admitted = admit(key);
      if (found != group_of.end()) {
        ++result.hits;
        policy.touch(found->second);
        parent = found->second;
        continue;
      }
      if (!admitted) {
        parent = -1;
        continue;
      }
      std::int32_t group = used;
      if (used < capacity) {
        ++used;
      } else {
        group = policy.victim([](std::int32_t) { return true; });
        policy.evict(group);
        group_of.erase(key_of[static_cast<std::size_t>(group)]);
        if (group == parent) parent = -1;
      }
      policy.insert(group, {.key = key, .parent = parent});
      key_of[static_cast<std::size_t>(group)] = key;
      group_of.emplace(key, group);
      ++result.stored;
      parent = group;
    }
  }
  return result;
}

constexpr auto everything = [](std::uint64_t) { return true; };

const request_trace* trace_or_skip(benchmark::State& state) {
  const request_trace* const trace = pulseinfer_bench::environment_trace();
  if (trace == nullptr) {
    state.SkipWithError("left out: PULSEINFER_TRACE names no trace");
  }
  return trace;
}

template <class Policy>
void hits_of(benchmark::State& state) {
  const request_trace* const trace = trace_or_skip(state);
  if (trace == nullptr) return;
  const auto capacity = static_cast<std::int32_t>(state.range(0));
  replay_result result;
  for (auto _ : state) result = replay<Policy>(*trace, capacity, everything);
  const auto hits = static_cast<double>(result.hits);
  const auto of_lru =
      static_cast<double>(replay<pulseinfer::lru>(*trace, capacity, everything).hits);
  state.counters["hits"] = hits;
  state.counters["vs_lru"] = hits / of_lru;
  state.SetItemsProcessed(state.iterations() * result.references);
  if constexpr (std::is_same_v<Policy, pulseinfer::lru>) {
    pulseinfer_bench::report("lru_hits_" + std::to_string(capacity), hits);
  }
  if constexpr (std::is_same_v<Policy, pulseinfer::adaptive_2q>) {
    pulseinfer_bench::report("best_policy_hits_vs_lru_" + std::to_string(capacity), hits / of_lru);
  }
}

void at_each_capacity(benchmark::internal::Benchmark* benchmark) {
  for (const std::int64_t capacity : {1'000, 5'000, 20'000, 50'000}) benchmark->Arg(capacity);
  benchmark->Iterations(1)->Unit(benchmark::kMillisecond);
}

BENCHMARK_TEMPLATE(hits_of, pulseinfer::lru)->Apply(at_each_capacity);
BENCHMARK_TEMPLATE(hits_of, pulseinfer::slru)->Apply(at_each_capacity);
BENCHMARK_TEMPLATE(hits_of, pulseinfer::arc)->Apply(at_each_capacity);
BENCHMARK_TEMPLATE(hits_of, pulseinfer::s3_fifo)->Apply(at_each_capacity);
BENCHMARK_TEMPLATE(hits_of, pulseinfer::sieve)->Apply(at_each_capacity);
BENCHMARK_TEMPLATE(hits_of, pulseinfer::prefix_tree_lru)->Apply(at_each_capacity);
BENCHMARK_TEMPLATE(hits_of, pulseinfer::adaptive_2q)->Apply(at_each_capacity);

void admitted(benchmark::State& state) {
  const request_trace* const trace = trace_or_skip(state);
  if (trace == nullptr) return;
  const auto capacity = static_cast<std::int32_t>(state.range(0));
  replay_result result;
  for (auto _ : state) {
    pulseinfer::reuse_filter filter(4 * std::int64_t{capacity});
    result = replay<pulseinfer::lru>(*trace, capacity,
                                     [&](std::uint64_t key) { return filter.admit(key); });
  }
  const replay_result plain = replay<pulseinfer::lru>(*trace, capacity, everything);
  state.counters["hits"] = static_cast<double>(result.hits);
  state.counters["vs_lru"] = static_cast<double>(result.hits) / static_cast<double>(plain.hits);
  state.counters["stored_vs_lru"] =
      static_cast<double>(result.stored) / static_cast<double>(plain.stored);
}
BENCHMARK(admitted)->Apply(at_each_capacity);

}  // namespace
