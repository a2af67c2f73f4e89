// SPDX-License-Identifier: Apache-2.0
/// @file
/// The tables of the study. Each asks the book for the runs that it shows.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "../demo/report.hpp"
#include "book.hpp"
#include "plan.hpp"
#include "svg.hpp"

namespace fidelity {

using pulseinfer::digest_kind;

/// Budgets of the sweep, in blocks a list.
inline constexpr std::int32_t budgets[] = {8, 16, 32, 64, 128, 256};
/// Budgets as parts of the context.
inline constexpr std::int32_t fractions[] = {32, 16, 8};
/// Capacities of the hot buffer, in budgets.
inline constexpr double capacities[] = {1, 1.5, 2, 3, 4};

/// What the guide has: means, max + lambda * mean over the scores, one list a layer.
inline constexpr choice guide{};
/// What the study recommends, see docs/fidelity.md.
inline constexpr choice recommended{
    .digest = digest_kind::min_max, .lambda = mean_only, .over = scope::layer};

struct named_digest {
  const char* name;
  digest_kind kind;
};
inline constexpr named_digest digest_kinds[] = {{"mean", digest_kind::mean},
                                                {"min_max", digest_kind::min_max}};

struct named_rule {
  const char* name;
  float lambda;
};
inline constexpr named_rule rules[] = {
    {"max", 0.0f},          {"max + 0.5 mean", 0.5f}, {"max + mean", 1.0f},
    {"max + 4 mean", 4.0f}, {"mean", mean_only},
};

inline run sampled(const choice& how, std::int32_t budget) {
  return {.how = how, .budget = budget, .through = {}};
}
inline run exactly(scope over, std::int32_t budget) {
  return {.how = {.over = over}, .exact = true, .budget = budget, .through = {}};
}
/// All steps, with a budget in blocks or as a part of the context, and hot buffers.
inline run consecutive(const choice& how, std::int32_t budget, std::int32_t fraction,
                       std::vector<residency> through) {
  return {.how = how,
          .budget = budget,
          .fraction = fraction,
          .steps = steps_of::every,
          .through = std::move(through)};
}
inline choice with_scope(choice c, scope over) {
  c.over = over;
  return c;
}

inline void digests_table(book& b) {
  b.print("\nAttention mass that lists of k blocks read, by digest (sinks and window included)\n");
  b.print("  %-28s", "digest, lists");
  for (const std::int32_t k : budgets) b.print("  k %-4d", k);
  b.print("  error at k 64\n");
  const auto row = [&](const std::string& name, const auto& of) {
    b.print("  %-28s", name.c_str());
    for (const std::int32_t k : budgets) b.print("  %.4f", b(of(k)).mean_mass());
    b.print("  %.4f\n", b(of(64)).mean_error());
  };
  for (const named_digest& d : digest_kinds) {
    for (const auto& [name, over] :
         {std::pair{"every head its own", scope::query_head}, {"one a layer", scope::layer}}) {
      row(std::string(d.name) + ", " + name, [&, over = over](std::int32_t k) {
        return sampled({.digest = d.kind, .lambda = mean_only, .over = over}, k);
      });
    }
  }
  row("true masses, every head", [](std::int32_t k) { return exactly(scope::query_head, k); });
  row("true masses, one a layer", [](std::int32_t k) { return exactly(scope::layer, k); });
}

inline void rules_table(book& b) {
  b.print("\nOne list a layer against every head its own list, same k and digest: mass kept\n");
  b.print("  %-28s", "digest, rule");
  for (const std::int32_t k : budgets) b.print("  k %-4d", k);
  b.print("\n");
  for (const named_digest& d : digest_kinds) {
    const auto own = [&](std::int32_t k) {
      return sampled({.digest = d.kind, .lambda = mean_only, .over = scope::query_head}, k);
    };
    for (const named_rule& r : rules) {
      b.print("  %-28s", (std::string(d.name) + ", " + r.name).c_str());
      for (const std::int32_t k : budgets) {
        const outcome& one = b(sampled({.digest = d.kind, .lambda = r.lambda}, k));
        b.print("  %.4f", one.mean_mass() / b(own(k)).mean_mass());
      }
      b.print("\n");
    }
    b.print("  %-28s", (std::string(d.name) + ", units saved").c_str());
    for (const std::int32_t k : budgets) {
      const outcome& one = b(sampled({.digest = d.kind, .lambda = mean_only}, k));
      b.print("  %.4f", 1 - one.units_a_step() / (b(own(k)).layer_union /
                                                  static_cast<double>(b(own(k)).mass.size())));
    }
    b.print("\n");
  }
}

inline void scopes_table(book& b) {
  b.print("\nScope of a list, recommended digest: mass / units of a layer that are read\n");
  b.print("  %-28s", "lists");
  for (const std::int32_t k : budgets) b.print("  k %-11d", k);
  b.print("\n");
  for (const auto& [name, over] : {std::pair{"one a layer", scope::layer},
                                   {"one a KV head", scope::kv_head},
                                   {"one a query head", scope::query_head}}) {
    b.print("  %-28s", name);
    for (const std::int32_t k : budgets) {
      const outcome& o = b(sampled(with_scope(recommended, over), k));
      b.print("  %.4f /%5.1f", o.mean_mass(), o.units_a_step());
    }
    b.print("\n");
  }
}

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
    series points{name, {}};
    for (const std::int32_t part : {64, 32, 16, 8}) {
      const run r = consecutive(how, 0, part, {{2.0}});
      const outcome& o = b(r);
      if (!b.is_open()) continue;
      const double kib = b.missed(o, r, {2.0}) / static_cast<double>(o.later) *
                         static_cast<double>(b.texts().front().unit_bytes) / 1024;
      b.print("  %.4f at %6.2f", o.mean_mass(), kib);
      points.points.emplace_back(kib, o.mean_mass());
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

inline void foresight_table(book& b) {
  run kept = consecutive(recommended, 0, 16, {});
  kept.keep_lists = true;
  (void)b(kept);
  if (!b.is_open()) return;
  b.print("\nA layer's list known before its query is, recommended, budget 1/16 of the context\n");
  b.print("  %-44s  found   mass kept\n", "foretold from");
  const auto row = [&](const std::string& name, const foresight& f) {
    b.print("  %-44s  %.4f  %.4f\n", name.c_str(), f.found / static_cast<double>(f.samples),
            f.mass / f.truth);
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

/// The figures that have targets, and those beside them.
inline void figures(book& b, demo::report& report) {
  const auto compare = [&](const std::string& prefix, const choice& how, std::int32_t budget,
                           std::int32_t fraction) {
    const run one = consecutive(how, budget, fraction, {});
    const run own = consecutive(with_scope(how, scope::query_head), budget, fraction, {});
    const outcome& o = b(one);
    const outcome& h = b(own);
    if (!b.is_open()) return;
    report.number(prefix + "consensus_mass_vs_per_head", o.mean_mass() / h.mean_mass());
    report.number(prefix + "recall_reduction_vs_union", 1 - o.chosen / h.layer_union);
    report.number(prefix + "attention_mass", o.mean_mass());
    report.number(prefix + "output_relative_error", o.mean_error());
  };
  compare("", recommended, 0, 16);
  compare("guide_", guide, 0, 16);
  compare("budget_64_", recommended, 64, 0);
  compare("guide_budget_64_", guide, 64, 0);
  const run hot = consecutive(recommended, 0, 16, {{2.0}});
  report.number("hot_buffer_hit_rate", hit_rate(b, hot, {2.0}, b(hot)));
  if (b.is_open()) {
    for (std::size_t t = 0; t < b.texts().size(); ++t) {
      if (b.texts()[t].for_length) continue;
      const std::string& name = b.texts()[t].name;
      report.number("hot_buffer_hit_rate_" + name, hit_rate(b, hot, {2.0}, b.of(t, hot)));
      const run own = consecutive(with_scope(recommended, scope::query_head), 0, 16, {});
      report.number("consensus_mass_vs_per_head_" + name,
                    b.of(t, hot).mean_mass() / b.of(t, own).mean_mass());
    }
  }
  report.target("consensus_mass_vs_per_head", ">= 0.998");
  report.target("recall_reduction_vs_union", ">= 0.35");
  report.target("hot_buffer_hit_rate", ">= 0.80");
}

}  // namespace fidelity
