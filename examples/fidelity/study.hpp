// SPDX-License-Identifier: Apache-2.0
/// @file
/// Runs the plan over every layer of every text, layers beside each other, and what compares layers
/// after that.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../demo/capture.hpp"
#include "chooser.hpp"
#include "measures.hpp"
#include "oracle.hpp"
#include "plan.hpp"

namespace fidelity {

/// How well a layer's lists could be known before its query is.
struct foresight {
  double found = 0;  ///< part of the true list that is in the foretold one
  double mass = 0;   ///< share of the attention that the foretold list reads
  double truth = 0;  ///< that the true list reads
  std::int64_t samples = 0;
  pulseinfer::residency_counts ahead;  ///< when guesses are recalled ahead; empty: they were not

  void add(const foresight& o) {
    ahead.chosen += o.ahead.chosen;
    ahead.missed += o.ahead.missed;
    ahead.brought += o.ahead.brought;
    ahead.used += o.ahead.used;
    ahead.wasted += o.ahead.wasted;
    found += o.found;
    mass += o.mass;
    truth += o.truth;
    samples += o.samples;
  }
};

/// From what a list is foretold.
enum class source : std::uint8_t {
  hidden_state,  ///< the input of the layer before, through this layer's query weights
  query_before,  ///< the query of the layer before
  step_before,   ///< the layer's own list of the step before
  layer_before,  ///< the list of the layer before
};
inline constexpr std::size_t sources = 4;

/// What came of one text.
struct text_result {
  std::string name;
  bool for_length = false;          ///< another text cut shorter: only in what compares lengths
  std::int64_t context_blocks = 0;  ///< at the first step
  pulseinfer::kv_geometry geometry;
  std::vector<outcome> all;                 ///< [runs] over all layers
  std::vector<std::vector<outcome>> layer;  ///< [layers][runs]
  foresight foretold[sources];
  std::vector<foresight> anchored;    ///< [anchor_strides]
  std::vector<double> layer_overlap;  ///< [layers] with the layer before; the first: 0
};

/// Every n-th layer chooses, those after it use its list.
inline constexpr std::int32_t anchor_strides[] = {2, 3, 5};

/// Kept of a layer until all of its text are done.
struct layer_result {
  std::vector<outcome> runs;
  chosen_lists lists;                          ///< of the run that keeps them
  std::vector<std::vector<double>> mean_mass;  ///< [steps][blocks]
  foresight foretold[sources];
};

/// Share of the attention that a list reads, from masses that are means over the heads.
inline double mass_of(std::span<const double> mass, std::span<const std::int32_t> list,
                      std::int64_t end_of_choice) {
  double read = 0;
  for (std::size_t b = 0; b < mass.size(); ++b) {
    const auto block = static_cast<std::int64_t>(b);
    if (block < sink_blocks || block >= end_of_choice) read += mass[b];
  }
  for (const std::int32_t b : list) read += mass[static_cast<std::size_t>(b)];
  return read;
}

inline void compare_lists(foresight& to, std::span<const double> mass,
                          std::span<const std::int32_t> truth, std::span<const std::int32_t> told,
                          std::int64_t end_of_choice) {
  if (truth.empty()) return;
  to.found += static_cast<double>(overlap(truth, told)) / static_cast<double>(truth.size());
  to.mass += mass_of(mass, told, end_of_choice);
  to.truth += mass_of(mass, truth, end_of_choice);
  ++to.samples;
}

/// Every `sample_every`-th step is a sample, and has its output compared.
inline constexpr std::int64_t sample_every = 16;

inline layer_result study_layer(const demo::capture& c, std::int32_t layer,
                                std::span<const run> plan, bool for_length) {
  const auto l = static_cast<std::size_t>(layer);
  const oracle truth(c, layer, sample_every);
  layer_chooser chooser(c, layer);
  std::vector<std::int64_t> every(static_cast<std::size_t>(c.steps));
  std::iota(every.begin(), every.end(), 0);
  std::vector<std::int64_t> sample;
  for (std::int64_t s = 0; s < c.steps; s += sample_every) sample.push_back(s);
  const std::int64_t context = c.geometry.blocks_of(c.prompt_tokens);

  layer_result out;
  for (const run& r : plan) {
    if (for_length && !r.all_lengths) {
      out.runs.emplace_back();
      continue;
    }
    const auto& steps = r.steps == steps_of::every ? every : sample;
    const std::int32_t budget = r.budget_for(context);
    chosen_lists lists =
        r.exact ? choose_exactly(truth, chooser, r.how.over, c.geometry.kv_heads, budget, steps)
                : chooser.choose(r.how, budget, steps, c.queries[l]);
    out.runs.push_back(measure(r, truth, chooser, lists, steps, c.geometry.kv_heads));
    if (!r.keep_lists || for_length) continue;
    const auto foretell = [&](source from, const chosen_lists& told, std::int64_t behind) {
      for (std::int64_t s = behind; s < c.steps; ++s) {
        compare_lists(out.foretold[static_cast<std::size_t>(from)], truth.mean_mass(s),
                      lists.list(s, 0), told.list(s - behind, 0), chooser.end_of_choice(s));
      }
    };
    const auto foretell_by_query = [&](source from, std::span<const float> queries) {
      const chosen_lists told = chooser.choose(r.how, budget, every, queries);
      foretell(from, told, 0);
      out.foretold[static_cast<std::size_t>(from)].ahead =
          chooser.recalled_ahead(lists, told, 2 * budget);
    };
    if (!c.predicted[l].empty()) foretell_by_query(source::hidden_state, c.predicted[l]);
    if (layer > 0) foretell_by_query(source::query_before, c.queries[l - 1]);
    foretell(source::step_before, lists, 1);
    for (const std::int64_t s : every) {
      out.mean_mass.emplace_back(truth.mean_mass(s).begin(), truth.mean_mass(s).end());
    }
    out.lists = std::move(lists);
  }
  return out;
}

/// What compares the layers of a text.
inline void compare_layers(text_result& text, const demo::capture& c,
                           std::span<const layer_result> layers) {
  text.anchored.resize(std::size(anchor_strides));
  text.layer_overlap.assign(layers.size(), 0.0);
  for (std::size_t l = 0; l < layers.size(); ++l) {
    if (layers[l].lists.k == 0) return;  // no run keeps its lists
    for (std::int64_t s = 0; s < c.steps; ++s) {
      const std::int64_t full = (c.prompt_tokens + s + 1) / c.geometry.block_tokens;
      const std::int64_t end = std::max<std::int64_t>(full - window_blocks, sink_blocks);
      const auto& mass = layers[l].mean_mass[static_cast<std::size_t>(s)];
      const auto own = layers[l].lists.list(s, 0);
      if (l > 0 && !own.empty()) {
        const auto before = layers[l - 1].lists.list(s, 0);
        text.layer_overlap[l] += static_cast<double>(overlap(own, before)) /
                                 static_cast<double>(own.size()) / static_cast<double>(c.steps);
        compare_lists(text.foretold[static_cast<std::size_t>(source::layer_before)], mass, own,
                      before, end);
      }
      for (std::size_t i = 0; i < std::size(anchor_strides); ++i) {
        const std::size_t anchor = l - l % static_cast<std::size_t>(anchor_strides[i]);
        if (anchor == l) continue;
        compare_lists(text.anchored[i], mass, own, layers[anchor].lists.list(s, 0), end);
      }
    }
  }
}

/// Runs `work(0)` to `work(count - 1)` on some threads, in no order; rethrows what one throws.
template <class Work>
void in_parallel(std::size_t count, int threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto loop = [&] {
    for (std::size_t i = next++; i < count; i = next++) {
      try {
        work(i);
      } catch (...) {
        const std::lock_guard lock(mutex);
        failure = std::current_exception();
        next = count;
      }
    }
  };
  std::vector<std::thread> others;
  for (int t = 1; t < threads; ++t) others.emplace_back(loop);
  loop();
  for (std::thread& t : others) t.join();
  if (failure) std::rethrow_exception(failure);
}

/// The plan over one text. Says on stderr how far it is.
///
/// @param for_length  only the runs that all lengths have; the others give nothing
inline text_result study_text(const std::string& name, const demo::capture& c,
                              std::span<const run> plan, bool for_length, int threads) {
  const auto begin = std::chrono::steady_clock::now();
  const auto layers = static_cast<std::size_t>(c.geometry.layers);
  std::vector<layer_result> done(layers);
  std::atomic<int> finished{0};
  in_parallel(layers, threads, [&](std::size_t l) {
    done[l] = study_layer(c, static_cast<std::int32_t>(l), plan, for_length);
    const std::chrono::duration<double> so_far = std::chrono::steady_clock::now() - begin;
    const int count = ++finished;
    if (count % 10 != 0 && count != static_cast<int>(layers)) return;
    std::fprintf(stderr, "  %s: %d of %zu layers, %.0f s\n", name.c_str(), count, layers,
                 so_far.count());
  });

  text_result text;
  text.name = name;
  text.for_length = for_length;
  text.context_blocks = c.geometry.blocks_of(c.prompt_tokens);
  text.geometry = c.geometry;
  text.all.resize(plan.size());
  for (layer_result& l : done) {
    for (std::size_t i = 0; i < plan.size(); ++i) text.all[i].add(l.runs[i]);
    for (std::size_t i = 0; i < sources; ++i) text.foretold[i].add(l.foretold[i]);
  }
  compare_layers(text, c, done);
  for (layer_result& l : done) text.layer.push_back(std::move(l.runs));
  return text;
}

}  // namespace fidelity
