// SPDX-License-Identifier: Apache-2.0
// What resolving costs.
//
// resolve: the body of the resolve kernel as the host backend runs it, one lane, one thread, 16 rows
// of one layer, one after the other, step after step. No baseline: nanoseconds per chosen unit.
// Contexts of 8,192 blocks; capacities of k to 4 k pages a request. Cache state: the tables of 16
// rows (64 to 100 KiB each) go round, so they lie beyond the first level; the lists are read from
// memory. Each step keeps 7 of 8 blocks of the last one; of the others half were chosen lately.
// That share of misses is a counter, `missed`; at capacity k all that change are misses.
// resolve_ns_per_unit is the worst over k and capacity, of medians over passes; LRU, as by default.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/detail/resolve_row.hpp"
#include "pulseinfer/hot_buffer_types.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

constexpr std::int32_t max_blocks = 8192;
constexpr std::int32_t rows = 16;

/// Lists [steps][rows, k], each ascending: most of a step's blocks are those of the step before.
std::vector<std::vector<std::int32_t>> drifting_lists(std::int32_t k, std::int32_t steps) {
  pulseinfer::detail::random_source draw(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(draw.below(n)); };
  std::vector<std::vector<std::int32_t>> lists;
  std::vector<std::vector<std::int32_t>> chosen(rows), left(rows);
  std::vector<std::vector<bool>> in(rows, std::vector<bool>(max_blocks, false));
  for (std::int32_t step = 0; step < steps; ++step) {
    std::vector<std::int32_t>& list = lists.emplace_back();
    for (std::size_t row = 0; row < rows; ++row) {
      const auto enter = [&](std::int32_t& place) {
        std::int32_t block = 0;
        do {
          const std::size_t lately =
              std::min<std::size_t>(left[row].size(), 2 * chosen[row].size());
          block = draw.one_in(2) && lately > 0 ? left[row][left[row].size() - 1 - below(lately)]
                                               : static_cast<std::int32_t>(below(max_blocks));
        } while (in[row][static_cast<std::size_t>(block)]);
        in[row][static_cast<std::size_t>(block)] = true;
        place = block;
      };
      if (step == 0) {
        chosen[row].resize(static_cast<std::size_t>(k));
        for (std::int32_t& place : chosen[row]) enter(place);
      }
      for (std::int32_t i = 0; i < k / 8; ++i) {
        std::int32_t& place = chosen[row][below(chosen[row].size())];
        in[row][static_cast<std::size_t>(place)] = false;
        left[row].push_back(place);
        enter(place);
      }
      std::vector<std::int32_t> sorted = chosen[row];
      std::sort(sorted.begin(), sorted.end());
      list.insert(list.end(), sorted.begin(), sorted.end());
    }
  }
  return lists;
}

/// One layer's tables and a step's mirror.
class resolver {
 public:
  resolver(std::int32_t k, std::int32_t capacity, const pulseinfer::hot_buffer_options& options)
      : k_(k),
        capacity_(capacity),
        ranks_(pulseinfer::detail::ranks_of(options)),
        block_in_(slots(), -1),
        rank_(slots(), 0),
        clock_(rows, 0),
        reach_(rows, 0),
        slot_of_(std::size_t{rows} * max_blocks, -1),
        page_in_(slots()),
        lent_(rows, capacity),
        requests_(rows),
        counts_(rows, k),
        pages_(units()),
        scratch_(4 * units()),
        misses_(units()),
        miss_counts_(rows),
        chosen_counts_(rows) {
    for (std::size_t i = 0; i < slots(); ++i) page_in_[i] = static_cast<std::int32_t>(i);
    for (std::size_t i = 0; i < rows; ++i) requests_[i] = static_cast<std::int32_t>(i);
  }

  /// Resolves a step of all rows; returns the misses.
  std::int64_t run(const std::vector<std::int32_t>& lists) {
    const pulseinfer::detail::resolve_row body{.tables = {.block_in = block_in_.data(),
                                                          .rank = rank_.data(),
                                                          .clock = clock_.data(),
                                                          .reach = reach_.data(),
                                                          .slot_of = slot_of_.data(),
                                                          .page_in = page_in_.data(),
                                                          .lent = lent_.data(),
                                                          .slots = capacity_,
                                                          .usable = capacity_,
                                                          .max_blocks = max_blocks},
                                               .requests = requests_.data(),
                                               .ids = lists.data(),
                                               .counts = counts_.data(),
                                               .k = k_,
                                               .pages = pages_.data(),
                                               .scratch = scratch_.data(),
                                               .misses = misses_.data(),
                                               .miss_counts = miss_counts_.data(),
                                               .chosen_counts = chosen_counts_.data(),
                                               .ranks = ranks_};
    for (std::int64_t row = 0; row < rows; ++row) body(row, pulseinfer::detail::single_lane{});
    std::int64_t missed = 0;
    for (const std::int32_t n : miss_counts_) missed += n;
    return missed;
  }

 private:
  [[nodiscard]] std::size_t slots() const noexcept {
    return std::size_t{rows} * static_cast<std::size_t>(capacity_);
  }
  [[nodiscard]] std::size_t units() const noexcept {
    return std::size_t{rows} * static_cast<std::size_t>(k_);
  }

  std::int32_t k_;
  std::int32_t capacity_;
  pulseinfer::detail::use_rank ranks_;
  std::vector<std::int32_t> block_in_, rank_, clock_, reach_, slot_of_, page_in_, lent_;
  std::vector<std::int32_t> requests_, counts_, pages_, scratch_;
  std::vector<pulseinfer::unit_miss> misses_;
  std::vector<std::int32_t> miss_counts_, chosen_counts_;
};

double worst_ns = 0;

void resolve(benchmark::State& state, pulseinfer::hot_replacement replacement) {
  const auto k = static_cast<std::int32_t>(state.range(0));
  const auto capacity = static_cast<std::int32_t>(state.range(0) * state.range(1) / 2);
  constexpr std::int32_t steps = 64;
  const auto lists = drifting_lists(k, steps);
  resolver r(k, capacity, {.replacement = replacement});
  for (const auto& list : lists) (void)r.run(list);  // fills the tables
  std::vector<double> ns;
  std::int64_t missed = 0;
  for (auto _ : state) {
    const auto begin = std::chrono::steady_clock::now();
    for (const auto& list : lists) missed += r.run(list);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    ns.push_back(took.count() / (double{steps} * rows * k));
  }
  const double middle = pulseinfer_bench::median(ns);
  state.counters["ns_per_unit"] = middle;
  state.counters["missed"] =
      static_cast<double>(missed) / (static_cast<double>(ns.size()) * steps * rows * k);
  if (replacement != pulseinfer::hot_replacement::least_recent) return;
  worst_ns = std::max(worst_ns, middle);
  pulseinfer_bench::report("resolve_ns_per_unit", worst_ns);
}
BENCHMARK_CAPTURE(resolve, least_recent, pulseinfer::hot_replacement::least_recent)
    ->ArgsProduct({{64, 128, 256, 512}, {2, 3, 4, 8}})
    ->Iterations(21)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(resolve, least_used, pulseinfer::hot_replacement::least_used)
    ->ArgsProduct({{64, 512}, {3, 8}})
    ->Iterations(21)
    ->Unit(benchmark::kMillisecond);

}  // namespace
