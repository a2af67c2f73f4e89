// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tables of what moves: how alike steps and layers choose, what a hot buffer makes of it, what could
/// be known in advance.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "book.hpp"
#include "choices.hpp"
#include "svg.hpp"

namespace fidelity {

inline void overlap_table(book& b) {
  b.print("\nPart of a list that was chosen some steps before, budget 1/16 of the context\n");
  b.print("  %-28s", "lists");
  for (const std::int64_t lag : lags) b.print("  lag %-2lld", static_cast<long long>(lag));
  b.print("\n");
  for (const auto& [name, how] : {std::pair{"guide", guide}, {"recommended", recommended}}) {
    const outcome& o = b(consecutive(how, 0, 16, {}));
    b.print("  %-28s", name);
    for (std::size_t lag = 0; lag < std::size(lags); ++lag) b.print("  %.4f", o.mean_shared(lag));
    b.print("\n");
  }
}

/// Hits of all steps but the first, which fills.
inline double hit_rate(book& b, const run& r, const residency& hot, const outcome& o) {
  return 1 - b.missed(o, r, hot) / o.asked;
}

inline void residency_table(book& b) {
  b.print("\nHits in a hot buffer, by capacity, policy and budget\n");
  b.print("  %-44s", "lists, budget, policy");
  for (const double c : capacities) b.print("  %.1fx k", c);
  b.print("\n");
  for (const auto& [name, how] : {std::pair{"guide", guide}, {"recommended", recommended}}) {
    for (const std::int32_t part : fractions) {
      for (const auto& [policy, replacement] :
           {std::pair{"least recent", pulseinfer::hot_replacement::least_recent},
            {"least used", pulseinfer::hot_replacement::least_used}}) {
        std::vector<residency> through;
        for (const double c : capacities) through.push_back({c, replacement});
        const run r = consecutive(how, 0, part, through);
        b.print(
            "  %-44s",
            (std::string(name) + ", context / " + std::to_string(part) + ", " + policy).c_str());
        for (const residency& hot : through) b.print("  %.4f", hit_rate(b, r, hot, b(r)));
        b.print("\n");
      }
    }
  }
}

/// Mass against what crosses the link for a token, over all layers, with a hot buffer of twice the
/// list.
inline std::vector<series> moved_table(book& b) {
  b.print("\nMass against KiB moved a token and layer, hot buffer of twice the list,\n");
  b.print("budgets of 1/64, 1/32, 1/16 and 1/8 of the context\n");
  std::vector<series> plot;
  const auto line = [&](const std::string& name, const choice& how) {
    b.print("  %-28s", name.c_str());
    series points{name, {}, {}};
    for (const std::int32_t part : {64, 32, 16, 8}) {
      const run r = consecutive(how, 0, part, {{2.0}});
      const outcome& o = b(r);
      if (!b.is_open()) continue;
      const double kib = b.missed(o, r, {2.0}) / static_cast<double>(o.later) *
                         static_cast<double>(b.texts().front().geometry.unit_bytes()) / 1024;
      b.print("  %.4f at %6.2f", o.mean_mass(), kib);
      points.points.emplace_back(kib, o.mean_mass());
      points.labels.push_back("1/" + std::to_string(part));
    }
    b.print("\n");
    plot.push_back(points);
  };
  line("guide, one a layer", guide);
  line("guide, every head its own", with_scope(guide, scope::query_head));
  line("recommended, one a layer", recommended);
  line("recommended, one a KV head", with_scope(recommended, scope::kv_head));
  line("recommended, every head", with_scope(recommended, scope::query_head));
  return plot;
}

/// What a hot buffer makes of budgets by mass: lists that change their length change more.
inline void adaptive_moved_table(book& b) {
  b.print("\nBudgets by mass and fixed ones through a hot buffer of twice the mean list\n");
  b.print("  %-34s  %7s  %7s  %7s\n", "budget", "blocks", "mass", "moved");
  const auto row = [&](const std::string& name, const choice& how, std::int32_t k) {
    const run r = consecutive(how, k, 0, {{2.0}});
    const outcome& o = b(r);
    if (!b.is_open()) return;
    b.print("  %-34s  %7.1f  %7.4f  %7.2f\n", name.c_str(), o.units_a_step(), o.mean_mass(),
            b.missed(o, r, {2.0}) / static_cast<double>(o.later));
  };
  for (const std::int32_t k : {32, 64, 128}) {
    row("fixed " + std::to_string(k), recommended, k);
  }
  for (const double worth : {1e-3, 5e-4}) {
    const choice how = by_mass(pulseinfer::budget_rule::worth, worth);
    for (const std::int32_t cap : {256, 96}) {
      char name[64];
      std::snprintf(name, sizeof name, "unit %g, at most %d", worth, cap);
      row(name, how, cap);
    }
  }
}

inline void foresight_table(book& b) {
  run kept = consecutive(recommended, 0, 16, {});
  kept.keep_lists = true;
  (void)b(kept);
  if (!b.is_open()) return;
  b.print("\nA layer's list known before its query is, recommended, budget 1/16 of the context;\n");
  b.print("of what is chosen: missed, and brought in vain, when it is recalled ahead at 2x k\n");
  b.print("  %-48s  %6s  %9s  %8s  %8s\n", "foretold from", "found", "mass kept", "missed",
          "in vain");
  const auto row = [&](const std::string& name, const foresight& f) {
    b.print("  %-48s  %.4f  %9.4f", name.c_str(), f.found / static_cast<double>(f.samples),
            f.mass / f.truth);
    if (f.ahead.chosen > 0) {
      const auto chosen = static_cast<double>(f.ahead.chosen);
      b.print("  %8.4f  %8.4f", static_cast<double>(f.ahead.missed) / chosen,
              static_cast<double>(f.ahead.wasted) / chosen);
    }
    b.print("\n");
  };
  static constexpr const char* names[] = {
      "input of the layer before, this layer's weights", "query of the layer before",
      "own list of the step before", "list of the layer before"};
  for (std::size_t i = 0; i < sources; ++i) {
    foresight sum;
    for (const text_result& t : b.texts()) {
      if (!t.for_length) sum.add(t.foretold[i]);
    }
    row(names[i], sum);
  }
  for (std::size_t i = 0; i < std::size(anchor_strides); ++i) {
    foresight sum;
    for (const text_result& t : b.texts()) {
      if (!t.for_length) sum.add(t.anchored[i]);
    }
    row("anchor: one layer in " + std::to_string(anchor_strides[i]) + " chooses", sum);
  }
}

/// What the length of a context changes: one text, cut at several lengths, and the other texts.
inline void lengths_table(book& b) {
  b.print("\nEach text and length, recommended: one list against a list a head, hits at 2x k\n");
  b.print("  %-14s %7s  %-34s  %-34s\n", "", "", "budget 1/16 of the context", "budget 64");
  b.print("  %-14s %7s", "text", "blocks");
  for (int i = 0; i < 2; ++i) b.print("  %7s %7s %7s %7s", "k", "mass", "ratio", "hits");
  b.print("\n");
  const std::size_t texts = b.is_open() ? b.texts().size() : 1;
  for (std::size_t t = 0; t < texts; ++t) {
    if (b.is_open()) {
      b.print("  %-14s %7lld", b.texts()[t].name.c_str(),
              static_cast<long long>(b.texts()[t].context_blocks));
    }
    for (const auto& [budget, part] : {std::pair{0, 16}, {64, 0}}) {
      run one = consecutive(recommended, budget, part, {{2.0}});
      run own = consecutive(with_scope(recommended, scope::query_head), budget, part, {});
      one.all_lengths = own.all_lengths = true;
      const outcome& o = b.of(t, one);
      const double own_mass = b.of(t, own).mean_mass();
      if (!b.is_open()) continue;
      b.print("  %7d %7.4f %7.4f %7.4f", one.budget_for(b.texts()[t].context_blocks), o.mean_mass(),
              o.mean_mass() / own_mass, hit_rate(b, one, {2.0}, o));
    }
    b.print("\n");
  }
}

/// How often a layer has to bring something, step by step: what a simulation may be fed with.
/// Lines of text, layer, blocks of the context, of the budget and of the hot buffer, and the misses
/// of every step.
inline std::string overlap_trace(book& b) {
  const std::vector<residency> through{{1.5}, {2.0}, {3.0}};
  const run r = consecutive(recommended, 0, 16, through);
  const std::size_t at = b.find(r);
  if (!b.is_open()) return {};
  std::string out = "text,layer,context_blocks,budget_blocks,hot_blocks,misses_of_each_step\n";
  for (const text_result& text : b.texts()) {
    if (text.for_length) continue;
    const std::int32_t budget = r.budget_for(text.context_blocks);
    for (std::size_t l = 0; l < text.layer.size(); ++l) {
      for (const residency& hot : through) {
        const auto& all = b.plan()[at].through;
        const auto c =
            static_cast<std::size_t>(std::find(all.begin(), all.end(), hot) - all.begin());
        out += text.name + "," + std::to_string(l) + "," + std::to_string(text.context_blocks) +
               "," + std::to_string(budget) + "," +
               std::to_string(std::lround(hot.times * budget)) + ",";
        const auto& misses = text.layer[l][at].misses[c];
        for (std::size_t s = 0; s < misses.size(); ++s) {
          if (s > 0) out += ' ';
          out += std::to_string(misses[s]);
        }
        out += "\n";
      }
    }
  }
  return out;
}

}  // namespace fidelity
