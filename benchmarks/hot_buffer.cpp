// SPDX-License-Identifier: Apache-2.0
// What resolving costs, and what the hot buffer has of what is chosen.
//
// resolve: the body of the resolve kernel as the host backend runs it, one lane, one thread, 16 rows
// of one layer, one after the other, step after step. No baseline: nanoseconds per chosen unit.
// Contexts of 8,192 blocks; capacities of k to 4 k pages a request. Cache state: the tables of 16
// rows (64 to 100 KiB each) go round, so they lie beyond the first level; the lists are read from
// memory. Each step keeps 7 of 8 blocks of the last one; of the others half were chosen lately.
// That share of misses is a counter, `missed`; at capacity k all that change are misses.
// resolve_ns_per_unit is the worst over k, capacity and replacement, of medians over passes.
//
// hit_rate: hits over chosen units when the lists of a trace are resolved by the kernel, once with
// each replacement, and Belady's bound for the same capacity beside them (a step's own units stay).
// Traces: the capture of examples/data, its 2 layers and 128 steps over 261 blocks, lists of the
// consensus of mean digests (lambda 0.5, logits; sinks and window left out), for the layer (k 16, 32)
// and for one KV head (k 16); and 600 steps over 1,024 blocks of which a third of a block's score
// stays, a third fades over some 7 steps and the rest is noise. Counts, not times.
// hot_buffer_misses_vs_lru_<k>_<capacity>: misses of least_used (half-life 8) over those of LRU, both
// layers of the capture together. Misses that no policy avoids, first uses, are among them.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "../examples/demo/capture.hpp"

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/detail/resolve_row.hpp"
#include "pulseinfer/hot_buffer_types.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

constexpr std::int32_t max_blocks = 8192;
constexpr std::int32_t all_rows = 16;

using lists_of_steps = std::vector<std::vector<std::int32_t>>;

/// Lists [steps][rows, k], each ascending: most of a step's blocks are those of the step before.
lists_of_steps drifting_lists(std::int32_t k, std::int32_t steps) {
  pulseinfer::detail::random_source draw(7);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(draw.below(n)); };
  lists_of_steps lists;
  lists_of_steps chosen(all_rows), left(all_rows);
  std::vector<std::vector<bool>> in(all_rows, std::vector<bool>(max_blocks, false));
  for (std::int32_t step = 0; step < steps; ++step) {
    std::vector<std::int32_t>& list = lists.emplace_back();
    for (std::size_t row = 0; row < all_rows; ++row) {
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
  resolver(std::int32_t k, std::int32_t capacity, const pulseinfer::hot_buffer_options& options,
           std::int32_t rows = all_rows)
      : rows_(rows),
        k_(k),
        capacity_(capacity),
        ranks_(pulseinfer::detail::ranks_of(options)),
        block_in_(slots(), -1),
        rank_(slots(), 0),
        clock_(static_cast<std::size_t>(rows), 0),
        reach_(static_cast<std::size_t>(rows), 0),
        totals_(static_cast<std::size_t>(rows)),
        mirrors_(static_cast<std::size_t>(rows)),
        slot_of_(static_cast<std::size_t>(rows) * max_blocks, -1),
        page_in_(slots()),
        lent_(static_cast<std::size_t>(rows), capacity),
        requests_(static_cast<std::size_t>(rows)),
        counts_(static_cast<std::size_t>(rows), k),
        pages_(units()),
        scratch_(2 * units()),
        misses_(units()),
        miss_counts_(static_cast<std::size_t>(rows)),
        chosen_counts_(static_cast<std::size_t>(rows)) {
    for (std::size_t i = 0; i < slots(); ++i) page_in_[i] = static_cast<std::int32_t>(i);
    for (std::int32_t i = 0; i < rows; ++i) requests_[static_cast<std::size_t>(i)] = i;
  }

  /// Resolves a step of all rows; returns the misses.
  std::int64_t run(const std::vector<std::int32_t>& lists) {
    const pulseinfer::detail::resolve_row body{.tables = {.block_in = block_in_.data(),
                                                          .rank = rank_.data(),
                                                          .clock = clock_.data(),
                                                          .reach = reach_.data(),
                                                          .last_use = nullptr,
                                                          .totals = totals_.data(),
                                                          .mirrors = mirrors_.data(),
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
    for (std::int64_t row = 0; row < rows_; ++row) body(row, pulseinfer::detail::single_lane{});
    std::int64_t missed = 0;
    for (const std::int32_t n : miss_counts_) missed += n;
    return missed;
  }

 private:
  [[nodiscard]] std::size_t slots() const noexcept {
    return static_cast<std::size_t>(rows_) * static_cast<std::size_t>(capacity_);
  }
  [[nodiscard]] std::size_t units() const noexcept {
    return static_cast<std::size_t>(rows_) * static_cast<std::size_t>(k_);
  }

  std::int32_t rows_;
  std::int32_t k_;
  std::int32_t capacity_;
  pulseinfer::detail::use_rank ranks_;
  std::vector<std::int32_t> block_in_, rank_, clock_, reach_;
  std::vector<pulseinfer::detail::residency_totals> totals_;
  std::vector<pulseinfer::residency_counts> mirrors_;
  std::vector<std::int32_t> slot_of_, page_in_, lent_;
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
    ns.push_back(took.count() / (double{steps} * all_rows * k));
  }
  const double middle = pulseinfer_bench::median(ns);
  state.counters["ns_per_unit"] = middle;
  state.counters["missed"] =
      static_cast<double>(missed) / (static_cast<double>(ns.size()) * steps * all_rows * k);
  worst_ns = std::max(worst_ns, middle);
  pulseinfer_bench::report("resolve_ns_per_unit", worst_ns);
}
BENCHMARK_CAPTURE(resolve, least_recent, pulseinfer::hot_replacement::least_recent)
    ->ArgsProduct({{64, 128, 256, 512}, {2, 3, 4, 8}})
    ->Iterations(21)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(resolve, least_used, pulseinfer::hot_replacement::least_used)
    ->ArgsProduct({{64, 128, 256, 512}, {2, 3, 4, 8}})
    ->Iterations(21)
    ->Unit(benchmark::kMillisecond);

/// The `k` largest of the scores, ascending.
std::vector<std::int32_t> largest(const std::vector<float>& scores, std::int32_t k) {
  std::vector<std::int32_t> order(scores.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
  const auto score = [&](std::int32_t i) { return scores[static_cast<std::size_t>(i)]; };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return score(a) > score(b); });
  order.resize(static_cast<std::size_t>(k));
  std::sort(order.begin(), order.end());
  return order;
}

const demo::capture& captured() {
  static const demo::capture c =
      demo::load_capture(PULSEINFER_SOURCE_DIR "/examples/data/smollm2-135m-gpl3.safetensors");
  return c;
}

/// What the capture chooses in a layer, for query heads [first, last).
lists_of_steps capture_lists(std::size_t layer, std::int32_t k, std::int64_t first,
                             std::int64_t last) {
  const demo::capture& c = captured();
  const std::int64_t dim = c.geometry.head_dim, heads = c.geometry.kv_heads;
  const std::int64_t width = heads * dim, block_tokens = c.geometry.block_tokens;
  const std::int64_t blocks = c.tokens / block_tokens;
  std::vector<float> means(static_cast<std::size_t>(blocks * width));
  for (std::int64_t block = 0; block < blocks; ++block) {
    for (std::int64_t i = 0; i < width; ++i) {
      float total = 0;
      for (std::int64_t token = block * block_tokens; token < (block + 1) * block_tokens; ++token) {
        total +=
            pulseinfer::load_element(c.keys[layer].data(), token * width + i, c.geometry.element);
      }
      means[static_cast<std::size_t>(block * width + i)] = total / static_cast<float>(block_tokens);
    }
  }
  lists_of_steps lists;
  for (std::int64_t step = 0; step < c.steps; ++step) {
    const std::int64_t full = (c.prompt_tokens + step) / block_tokens;
    std::vector<float> scores(static_cast<std::size_t>(full - 2),
                              -std::numeric_limits<float>::infinity());
    for (std::int64_t block = 1; block < full - 2; ++block) {
      float most = -std::numeric_limits<float>::infinity(), total = 0;
      for (std::int64_t head = first; head < last; ++head) {
        const std::int64_t group = head / (c.query_heads / heads);
        const float* const mean = &means[static_cast<std::size_t>(block * width + group * dim)];
        const float* const query =
            &c.queries[layer][static_cast<std::size_t>((step * c.query_heads + head) * dim)];
        float score = 0;
        for (std::int64_t i = 0; i < dim; ++i) score += query[i] * mean[i];
        score /= std::sqrt(static_cast<float>(dim));
        most = std::max(most, score);
        total += score;
      }
      scores[static_cast<std::size_t>(block)] =
          most + 0.5f * total / static_cast<float>(last - first);
    }
    lists.push_back(largest(scores, k));
  }
  return lists;
}

lists_of_steps synthetic_lists(std::int32_t k) {
  pulseinfer::detail::random_source draw(3);
  const auto normal = [&] {  // of variance 1, nearly
    double total = 0;
    for (int i = 0; i < 12; ++i) total += static_cast<double>(draw.below(1 << 20)) / (1 << 20);
    return static_cast<float>(total - 6);
  };
  std::vector<float> stays(1024), fades(1024), scores(1024);
  for (std::size_t i = 0; i < stays.size(); ++i) {
    stays[i] = normal();
    fades[i] = normal();
  }
  lists_of_steps lists;
  for (int step = 0; step < 600; ++step) {
    for (std::size_t i = 0; i < scores.size(); ++i) {
      fades[i] = 0.9f * fades[i] + 0.436f * normal();
      scores[i] = stays[i] + fades[i] + normal();
    }
    lists.push_back(largest(scores, k));
  }
  return lists;
}

/// Misses of the best that knows the future.
std::int64_t least_misses(const lists_of_steps& lists, std::int32_t capacity) {
  std::vector<std::vector<std::int32_t>> uses(max_blocks);
  for (std::size_t step = 0; step < lists.size(); ++step) {
    for (const std::int32_t block : lists[step]) {
      uses[static_cast<std::size_t>(block)].push_back(static_cast<std::int32_t>(step));
    }
  }
  std::set<std::int32_t> in;
  std::int64_t misses = 0;
  for (std::size_t step = 0; step < lists.size(); ++step) {
    const auto next_use = [&](std::int32_t block) {
      const auto& all = uses[static_cast<std::size_t>(block)];
      const auto next = std::upper_bound(all.begin(), all.end(), static_cast<std::int32_t>(step));
      return next == all.end() ? std::numeric_limits<std::int32_t>::max() : *next;
    };
    const std::set<std::int32_t> now(lists[step].begin(), lists[step].end());
    for (const std::int32_t block : lists[step]) {
      if (!in.insert(block).second) continue;
      ++misses;
      if (in.size() <= static_cast<std::size_t>(capacity)) continue;
      std::int32_t victim = -1;
      for (const std::int32_t other : in) {
        if (now.count(other) != 0) continue;
        if (victim < 0 || next_use(other) > next_use(victim)) victim = other;
      }
      in.erase(victim);
    }
  }
  return misses;
}

std::int64_t misses_of(const lists_of_steps& lists, std::int32_t k, std::int32_t capacity,
                       pulseinfer::hot_replacement replacement) {
  resolver r(k, capacity, {.replacement = replacement}, 1);
  std::int64_t missed = 0;
  for (const auto& list : lists) missed += r.run(list);
  return missed;
}

enum class source { layers, heads, synthetic };

void hit_rate(benchmark::State& state, source from, std::int32_t k) {
  const auto capacity = static_cast<std::int32_t>(k * state.range(0) / 2);
  std::vector<lists_of_steps> traces;
  if (from == source::synthetic) traces.push_back(synthetic_lists(k));
  for (std::size_t layer = 0; from != source::synthetic && layer < 2; ++layer) {
    const std::int64_t all = captured().query_heads;
    const std::int64_t group = from == source::heads ? all / captured().geometry.kv_heads : all;
    for (std::int64_t head = 0; head < all; head += group) {
      traces.push_back(capture_lists(layer, k, head, head + group));
    }
  }
  std::int64_t chosen = 0, lru = 0, least_used = 0, least = 0;
  for (auto _ : state) {
    for (const lists_of_steps& lists : traces) {
      chosen += static_cast<std::int64_t>(lists.size()) * k;
      lru += misses_of(lists, k, capacity, pulseinfer::hot_replacement::least_recent);
      least_used += misses_of(lists, k, capacity, pulseinfer::hot_replacement::least_used);
      least += least_misses(lists, capacity);
    }
  }
  const auto rate = [&](std::int64_t misses) {
    return 1 - static_cast<double>(misses) / static_cast<double>(chosen);
  };
  state.counters["lru"] = rate(lru);
  state.counters["least_used"] = rate(least_used);
  state.counters["belady"] = rate(least);
  if (from != source::layers) return;
  pulseinfer_bench::report(
      "hot_buffer_misses_vs_lru_" + std::to_string(k) + "_" + std::to_string(capacity),
      static_cast<double>(least_used) / static_cast<double>(lru));
}
void at_each_capacity(benchmark::internal::Benchmark* b) {
  for (const std::int64_t halves : {2, 3, 4, 8}) b->Arg(halves);
  b->Iterations(1)->Unit(benchmark::kMillisecond);
}
BENCHMARK_CAPTURE(hit_rate, layer_16, source::layers, 16)->Apply(at_each_capacity);
BENCHMARK_CAPTURE(hit_rate, layer_32, source::layers, 32)->Apply(at_each_capacity);
BENCHMARK_CAPTURE(hit_rate, kv_head_16, source::heads, 16)->Apply(at_each_capacity);
BENCHMARK_CAPTURE(hit_rate, synthetic_32, source::synthetic, 32)->Apply(at_each_capacity);

}  // namespace
