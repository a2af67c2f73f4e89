// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the study runs, a line for each way to choose and budget, and what it learns from one layer.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "chooser.hpp"
#include "measures.hpp"
#include "oracle.hpp"

namespace fidelity {

/// Which decode steps a run looks at.
enum class steps_of : std::uint8_t { sample, every };

/// One line of the plan.
struct run {
  choice how;
  bool exact = false;       ///< lists from the true masses in place of a selector's
  std::int32_t budget = 0;  ///< blocks a list
  std::int32_t fraction =
      0;  ///< where budget is 0: the context's blocks divided by this; where that
          ///< is 0 too: the library's default budget
  steps_of steps = steps_of::sample;
  std::vector<residency> through;  ///< hot buffers; every step only
  bool keep_lists = false;         ///< for what compares layers
  bool all_lengths = false;        ///< also over texts that are here for their length

  [[nodiscard]] std::int32_t budget_for(std::int64_t context_blocks) const {
    if (budget > 0 || fraction == 0) return budget;
    return static_cast<std::int32_t>(
        std::max<std::int64_t>(1, (context_blocks + fraction / 2) / fraction));
  }
};

/// Lags of the step-to-step overlap.
inline constexpr std::int64_t lags[] = {1, 2, 4, 8, 16, 32};

/// What one layer of one text gives for a run. Units are whole layers' blocks: a block of one KV
/// head counts as its part of one.
struct outcome {
  std::vector<float> mass;  ///< a value a step: share of the attention that is read, mean of heads
  double error = 0;         ///< of the output, summed over steps that have one and heads
  std::int64_t errors = 0;
  double chosen = 0;       ///< units of all steps
  double layer_union = 0;  ///< units that the lists of a step have together, with one unit a block
  double kv_union = 0;     ///< the same with a unit for each KV head
  // Of the hot buffers, all steps but the first, which fills them.
  std::vector<double> missed;                     ///< for each hot buffer, units
  double asked = 0;                               ///< units
  std::int64_t later = 0;                         ///< steps
  std::vector<std::vector<std::int64_t>> misses;  ///< for each hot buffer, of each step
  double shared[std::size(lags)] = {};            ///< part of a list that was chosen a lag before
  std::int64_t shares[std::size(lags)] = {};

  void add(const outcome& o) {
    mass.insert(mass.end(), o.mass.begin(), o.mass.end());
    error += o.error;
    errors += o.errors;
    chosen += o.chosen;
    asked += o.asked;
    later += o.later;
    layer_union += o.layer_union;
    kv_union += o.kv_union;
    missed.resize(std::max(missed.size(), o.missed.size()));
    for (std::size_t i = 0; i < o.missed.size(); ++i) {
      missed[i] += o.missed[i];
    }
    for (std::size_t i = 0; i < std::size(lags); ++i) {
      shared[i] += o.shared[i];
      shares[i] += o.shares[i];
    }
  }
  [[nodiscard]] double mean_mass() const { return mean(mass); }
  [[nodiscard]] double units_a_step() const { return chosen / static_cast<double>(mass.size()); }
  [[nodiscard]] double mean_error() const { return error / static_cast<double>(errors); }
  [[nodiscard]] double mean_shared(std::size_t lag) const {
    return shared[lag] / static_cast<double>(shares[lag]);
  }
};

/// Lists from the true masses: the best that one list for these heads can be.
inline chosen_lists choose_exactly(const oracle& truth, const layer_chooser& chooser, scope over,
                                   std::int64_t kv_heads, std::int32_t budget,
                                   std::span<const std::int64_t> steps) {
  const std::int64_t heads = truth.heads();
  const std::int64_t lists = over == scope::layer ? 1 : over == scope::kv_head ? kv_heads : heads;
  chosen_lists out{
      .k = budget, .per_step = static_cast<std::int32_t>(lists), .ids = {}, .counts = {}};
  for (const std::int64_t s : steps) {
    std::vector<double> sum;
    for (std::int64_t l = 0; l < lists; ++l) {
      sum.assign(truth.mean_mass(s).size(), 0.0);
      for (std::int64_t h = l * heads / lists; h < (l + 1) * heads / lists; ++h) {
        const auto mass = truth.mass(s, h);
        for (std::size_t b = 0; b < sum.size(); ++b) sum[b] += mass[b];
      }
      out.add(largest(sum, sink_blocks, chooser.end_of_choice(s), budget));
    }
  }
  return out;
}

/// Share of the attention that is read of a step, mean over the heads.
inline double mass_read(const oracle& truth, std::int64_t step, const chosen_lists& lists,
                        std::int64_t row, std::int64_t end_of_choice) {
  const std::int64_t heads = truth.heads();
  double total = 0;
  for (std::int64_t h = 0; h < heads; ++h) {
    const auto mass = truth.mass(step, h);
    double read = 0;
    for (std::int64_t b = 0; b < truth.blocks(step); ++b) {
      if (b < sink_blocks || b >= end_of_choice) read += mass[static_cast<std::size_t>(b)];
    }
    for (const std::int32_t b : lists.list(row, h * lists.per_step / heads)) {
      read += mass[static_cast<std::size_t>(b)];
    }
    total += read;
  }
  return total / static_cast<double>(heads);
}

/// The lists of each step joined: one a step, or one a KV head and step.
inline chosen_lists joined(const chosen_lists& lists, std::int32_t groups) {
  chosen_lists out{.k = 0, .per_step = groups, .ids = {}, .counts = {}};
  std::vector<std::vector<std::int32_t>> unions;
  for (std::int64_t s = 0; s < lists.steps(); ++s) {
    for (std::int32_t g = 0; g < groups; ++g) {
      std::vector<std::span<const std::int32_t>> members;
      const std::int32_t each = lists.per_step / groups;
      for (std::int32_t i = 0; i < each; ++i) members.push_back(lists.list(s, g * each + i));
      unions.push_back(union_of(members));
      out.k = std::max(out.k, static_cast<std::int32_t>(unions.back().size()));
    }
  }
  for (const auto& blocks : unions) out.add(blocks);
  return out;
}

/// Everything that the tables ask of some lists.
/// @param steps  the steps of the lists
inline outcome measure(const run& what, const oracle& truth, layer_chooser& chooser,
                       const chosen_lists& lists, std::span<const std::int64_t> steps,
                       std::int32_t kv_heads) {
  outcome out;
  const double unit = lists.per_step == 1 ? 1.0 : 1.0 / kv_heads;
  const std::int32_t groups = lists.per_step == 1 ? 1 : kv_heads;
  // Every head its own list: what is read of a KV head is the union of its query heads' lists.
  const chosen_lists read = lists.per_step > kv_heads ? joined(lists, kv_heads) : lists;
  const chosen_lists whole = lists.per_step > 1 ? joined(lists, 1) : lists;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const auto row = static_cast<std::int64_t>(i);
    const std::int64_t s = steps[i];
    const std::int64_t end = chooser.end_of_choice(s);
    out.mass.push_back(static_cast<float>(mass_read(truth, s, lists, row, end)));
    for (std::int32_t g = 0; g < groups; ++g) {
      out.kv_union += static_cast<double>(read.list(row, g).size()) * unit;
    }
    out.layer_union += static_cast<double>(whole.list(row, 0).size());
    if (truth.has_output(s)) {
      for (std::int64_t h = 0; h < truth.heads(); ++h) {
        out.error += truth.output_error(s, h, lists.list(row, h * lists.per_step / truth.heads()),
                                        sink_blocks, end);
        ++out.errors;
      }
    }
  }
  out.chosen = out.kv_union;
  // Heads that each have a list share the units of a layer: what is moved is what any of them has.
  const chosen_lists moved = lists.per_step > kv_heads ? whole : joined(lists, lists.per_step);
  const double moved_unit = lists.per_step > kv_heads ? 1.0 : unit;
  const auto blocks_from = [&](std::ptrdiff_t list) {
    return static_cast<double>(
        std::accumulate(moved.counts.begin() + list, moved.counts.end(), std::int64_t{0}));
  };
  if (!what.through.empty()) {
    out.asked = blocks_from(moved.per_step) * moved_unit;
    out.later = moved.steps() - 1;
  }
  for (const residency& hot : what.through) {
    const double mean_list = blocks_from(0) / static_cast<double>(moved.counts.size());
    const auto pages = static_cast<std::int32_t>(std::lround(hot.times * mean_list));
    out.misses.push_back(chooser.misses(moved, std::max(pages, moved.k), hot.replacement));
    const auto& each = out.misses.back();
    out.missed.push_back(
        static_cast<double>(std::accumulate(each.begin() + 1, each.end(), std::int64_t{0})) *
        moved_unit);
  }
  if (what.steps == steps_of::every) {
    for (std::size_t lag = 0; lag < std::size(lags); ++lag) {
      for (std::int64_t s = lags[lag]; s < lists.steps(); ++s) {
        for (std::int32_t l = 0; l < lists.per_step; ++l) {
          const auto now = lists.list(s, l);
          if (now.empty()) continue;
          out.shared[lag] += static_cast<double>(overlap(now, lists.list(s - lags[lag], l))) /
                             static_cast<double>(now.size());
          ++out.shares[lag];
        }
      }
    }
  }
  return out;
}

}  // namespace fidelity
