// SPDX-License-Identifier: Apache-2.0
// How long the CPU takes to choose k of n packed keys, one thread.
//
// Baseline: std::nth_element over a copy of the same keys (it moves them, and the row is to stay as
// it is), and the ids of the k largest, ascending: those that it left in front, sorted, or those of
// one more pass over the row, whichever is faster for that n and k. Ours writes the same ids; each
// pair is compared.
//
// Scores are random floats, a key each (score, inverted index). 24 rows take turns, so that no
// branch is foreseen: at n 8,192 they are 1.5 MB, in the second or last level of the cache, at
// 65,536 12 MB, in the last; normal pages. A figure is the median over pairs that were measured one
// after the other.
//
// - topk_vs_nth_element: k = 64, the worse of both n
// - topk_vs_nth_element_512: k = 512, likewise
// - topk_vs_nth_element_ascending: keys in ascending order, k = 64, the worse of both n. Nothing is
//   easier for nth_element
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include "pulseinfer/detail/host_top_k.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/top_k.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using clock_type = std::chrono::steady_clock;

constexpr std::int64_t rows = 24;
constexpr int passes = 20;

struct selection_case {
  std::int64_t n = 0;
  std::int64_t k = 0;
  bool ascending = false;
  std::vector<std::uint64_t> keys;  ///< [rows, n]
  std::vector<std::uint64_t> scratch;
  std::vector<std::int32_t> positions, ours, theirs;

  selection_case(std::int64_t size, std::int64_t chosen, bool in_order)
      : n(size), k(chosen), ascending(in_order) {
    pulseinfer::detail::random_source draw(3);
    for (std::int64_t i = 0; i < rows * n; ++i) {
      const auto score = static_cast<float>(ascending ? static_cast<std::uint64_t>(i % n)
                                                      : draw.below(std::uint64_t{1} << 24));
      keys.push_back(pulseinfer::top_k_key(score, static_cast<std::int32_t>(i % n)));
    }
    scratch.resize(static_cast<std::size_t>(n));
    positions.resize(static_cast<std::size_t>(n));
    ours.resize(static_cast<std::size_t>(k));
    theirs.resize(static_cast<std::size_t>(k));
  }

  void select(const std::uint64_t* row) {
    pulseinfer::detail::select_top_k(row, n, k, pulseinfer::detail::best_collect_keys(),
                                     scratch.data(), positions.data(), ours.data(), 0);
  }
  void nth_element(const std::uint64_t* row, bool sorts) {
    std::copy(row, row + n, scratch.begin());
    const auto kth = scratch.begin() + (k - 1);
    std::nth_element(scratch.begin(), kth, scratch.end(), std::greater<>{});
    if (sorts) {
      for (std::size_t i = 0; i < theirs.size(); ++i) {
        theirs[i] = pulseinfer::top_k_index(scratch[i]);
      }
      std::sort(theirs.begin(), theirs.end());
    } else {
      std::size_t written = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        if (row[i] >= *kth) theirs[written++] = static_cast<std::int32_t>(i);
      }
    }
  }
};

template <class F>
double ns_of(F&& run) {
  const auto begin = clock_type::now();
  run();
  benchmark::ClobberMemory();
  return std::chrono::duration<double, std::nano>(clock_type::now() - begin).count();
}

/// How many times as fast ours is.
double compare(benchmark::State& state, std::int64_t n, std::int64_t k, bool ascending) {
  selection_case at(n, k, ascending);
  std::vector<double> ours, ratio[2];
  for (int pass = 0; pass < passes; ++pass) {
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::uint64_t* keys = at.keys.data() + row * n;
      ours.push_back(ns_of([&] { at.select(keys); }));
      const bool sorts = pass % 2 == 0;
      ratio[sorts ? 1 : 0].push_back(ns_of([&] { at.nth_element(keys, sorts); }) / ours.back());
      if (at.ours != at.theirs) throw std::logic_error("two selections differ");
    }
  }
  const std::string name = std::to_string(n) + (ascending ? "_ascending" : "");
  const double figure =
      std::min(pulseinfer_bench::median(ratio[0]), pulseinfer_bench::median(ratio[1]));
  state.counters["us_" + name] = pulseinfer_bench::median(ours) / 1000;
  state.counters["ratio_" + name] = figure;
  return figure;
}

void top_k(benchmark::State& state) {
  const std::int64_t k = state.range(0);
  double figure = 0;
  double ascending = 0;
  for (auto _ : state) {
    figure = std::min(compare(state, 8'192, k, false), compare(state, 65'536, k, false));
    ascending = std::min(compare(state, 8'192, k, true), compare(state, 65'536, k, true));
  }
  if (k == 64) {
    pulseinfer_bench::report("topk_vs_nth_element", figure);
    pulseinfer_bench::report("topk_vs_nth_element_ascending", ascending);
  } else {
    pulseinfer_bench::report("topk_vs_nth_element_" + std::to_string(k), figure);
  }
}
BENCHMARK(top_k)->Arg(64)->Arg(512)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
