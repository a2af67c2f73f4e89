// SPDX-License-Identifier: Apache-2.0
// How long it takes to find out how much of a prompt is there: per block, tables cold.
//
// The chains are those of the conversation trace that PULSEINFER_TRACE names: a block of 512 tokens
// for each of its ids, the key of a block chained from the ids before it under a tenant's salt. The
// index is filled by a replay of the whole trace for each of 16 tenants, in the order of the trace,
// each block once: 2.9 million blocks, 203 MB. Then each request is probed once, under a tenant
// drawn for it, for its longest ready prefix, which is all of it. What is ready, and which block is
// before another, the index has been told, as a block_store tells it.
//
// Cold: before each pass over the requests 256 MiB of other memory are written, so that nothing
// of the index is in a cache (the counter `seen` is the share of the blocks that
// the pass has met before under the same tenant; these may be). The keys are read
// once before the pass: an engine has just made them. A figure is the median of passes,
// over all blocks probed. One thread.
//
// Half of the requests have at most 14 blocks, so that what a request waits for once, memory for
// its first bucket, is a large part of the figure.
//
// There is no baseline but the target. Beside it, the same blocks looked for one at a time, each
// with its own wait for memory unless the processor looks ahead itself: `find_ns`.
//
// - prefix_probe_ns_per_block
// - prefix_hash_ns_per_block: the keys of prompts of 128 blocks of 512 tokens, which lie in the
// cache.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <stdexcept>
#include <unordered_set>
#include <vector>

#include "pulseinfer/block_key.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/prefix_index.hpp"
#include "support/report.hpp"
#include "support/request_trace.hpp"
#include "support/statistics.hpp"

namespace {

using pulseinfer::block_key;
using pulseinfer::prefix_index;
using pulseinfer::detail::random_source;
using pulseinfer_bench::request_trace;
using clock_type = std::chrono::steady_clock;

constexpr std::int32_t tenants = 16;
constexpr int passes = 15;

double ns_since(clock_type::time_point begin) {
  return std::chrono::duration<double, std::nano>(clock_type::now() - begin).count();
}

/// The keys of a request's blocks, appended.
void append_chain(const std::vector<std::uint64_t>& request, std::int32_t tenant,
                  std::vector<block_key>& keys) {
  block_key key = pulseinfer::root_key(static_cast<std::uint64_t>(tenant));
  for (const std::uint64_t block : request) {
    const auto id = static_cast<std::int32_t>(block);
    keys.push_back(key = pulseinfer::chained_key(key, {&id, 1}));
  }
}

/// Requests as one pass probes them: all keys, and how many each of them has.
struct probe_list {
  std::vector<block_key> keys;
  std::vector<std::size_t> lengths;
  double seen = 0;  ///< share of the keys that were in the list before
};

probe_list drawn_probes(const request_trace& requests, random_source& draw) {
  probe_list list;
  for (const std::vector<std::uint64_t>& request : requests) {
    append_chain(request, static_cast<std::int32_t>(draw.below(tenants)), list.keys);
    list.lengths.push_back(request.size());
  }
  std::vector<block_key> sorted = list.keys;
  std::sort(sorted.begin(), sorted.end());
  const auto distinct = std::unique(sorted.begin(), sorted.end()) - sorted.begin();
  list.seen = 1 - static_cast<double>(distinct) / static_cast<double>(list.keys.size());
  return list;
}

void write_other_memory() {
  static std::vector<std::uint64_t> memory(std::size_t{256} << 17);
  for (std::uint64_t& word : memory) ++word;
  benchmark::DoNotOptimize(memory.data());
}

void probe(benchmark::State& state) {
  const request_trace* const trace = pulseinfer_bench::environment_trace();
  if (trace == nullptr) {
    state.SkipWithError("PULSEINFER_TRACE does not name the conversation trace");
    return;
  }
  const request_trace& requests = *trace;
  std::unordered_set<std::uint64_t> ids;
  std::size_t longest = 0;
  for (const std::vector<std::uint64_t>& request : requests) {
    ids.insert(request.begin(), request.end());
    longest = std::max(longest, request.size());
  }
  const auto capacity = static_cast<std::int32_t>(ids.size()) * tenants;
  prefix_index index(capacity);
  std::vector<block_key> chain;
  std::int32_t group = 0;
  for (std::int32_t tenant = 0; tenant < tenants; ++tenant) {
    for (const std::vector<std::uint64_t>& request : requests) {
      chain.clear();
      append_chain(request, tenant, chain);
      std::int32_t before = -1;
      for (const block_key& key : chain) {
        const std::int32_t there = index.find(key);
        before = there >= 0 ? there : index.insert(key, group++, true, before);
      }
    }
  }
  if (index.size() != capacity) throw std::logic_error("two blocks of the trace share a key");
  random_source draw(1);
  std::vector<std::int32_t> groups(longest);
  std::vector<double> probe_ns, find_ns, seen;
  for (auto _ : state) {
    for (int pass = 0; pass < 2 * passes; ++pass) {
      const probe_list list = drawn_probes(requests, draw);
      seen.push_back(list.seen);
      write_other_memory();
      std::uint64_t sum = 0;
      for (const block_key& key : list.keys) sum += key.low;
      for (const std::size_t length : list.lengths) sum += length;
      benchmark::DoNotOptimize(sum);
      const bool all_at_once = pass % 2 == 0;
      std::size_t found = 0;
      const auto begin = clock_type::now();
      const block_key* keys = list.keys.data();
      for (const std::size_t length : list.lengths) {
        if (all_at_once) {
          found += index.longest_prefix({keys, length}, groups);
        } else {
          for (std::size_t i = 0; i < length; ++i) {
            const std::int32_t g = index.find(keys[i]);
            if (g < 0) break;
            groups[i] = g;
            ++found;
          }
        }
        keys += length;
        benchmark::DoNotOptimize(groups.data());
      }
      (all_at_once ? probe_ns : find_ns)
          .push_back(ns_since(begin) / static_cast<double>(list.keys.size()));
      if (found != list.keys.size()) throw std::logic_error("a block is not found");
    }
  }
  const double figure = pulseinfer_bench::median(probe_ns);
  state.counters["ns_per_block"] = figure;
  state.counters["find_ns"] = pulseinfer_bench::median(find_ns);
  state.counters["seen"] = pulseinfer_bench::median(seen);
  state.counters["blocks"] = capacity;
  state.counters["bytes_per_block"] = static_cast<double>(index.bytes()) / capacity;
  pulseinfer_bench::report("prefix_probe_ns_per_block", figure);
}
BENCHMARK(probe)->Iterations(1)->Unit(benchmark::kMillisecond);

void hash(benchmark::State& state) {
  constexpr std::int32_t block_tokens = 512;
  constexpr std::size_t blocks = 128;
  random_source draw(2);
  std::vector<pulseinfer::token_id> prompt(blocks * block_tokens);
  for (pulseinfer::token_id& t : prompt) t = static_cast<pulseinfer::token_id>(draw.below(128'000));
  std::vector<block_key> keys(blocks);
  std::vector<double> ns;
  for (auto _ : state) {
    for (int pass = 0; pass < 101; ++pass) {
      const auto begin = clock_type::now();
      const block_key root = pulseinfer::root_key(static_cast<std::uint64_t>(pass));
      benchmark::DoNotOptimize(pulseinfer::block_keys(root, prompt, block_tokens, keys));
      benchmark::DoNotOptimize(keys.data());
      ns.push_back(ns_since(begin) / blocks);
    }
  }
  state.counters["ns_per_block"] = pulseinfer_bench::median(ns);
  state.counters["ns_per_token"] = pulseinfer_bench::median(ns) / block_tokens;
  pulseinfer_bench::report("prefix_hash_ns_per_block", pulseinfer_bench::median(ns));
}
BENCHMARK(hash)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
