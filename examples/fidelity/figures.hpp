// SPDX-License-Identifier: Apache-2.0
/// @file
/// The figures of the report.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "../demo/report.hpp"
#include "book.hpp"
#include "moved.hpp"
#include "tables.hpp"

namespace fidelity {

/// A choice in words.
inline std::string said(const choice& how) {
  std::string text;
  for (const auto& [name, kind] : digest_kinds) text += kind == how.digest ? name : "";
  for (const auto& [name, element] : elements) {
    text += element == how.element ? std::string(" in ") + name : "";
  }
  for (const auto& [name, joined] : rules) {
    const bool is_this = joined.rule == how.rule && joined.normalisation == how.normalisation &&
                         (joined.rule != consensus_rule::max_mean || joined.lambda == how.lambda);
    text += is_this ? std::string(", ") + name : "";
  }
  return text + (how.over == scope::layer     ? ", one list a layer"
                 : how.over == scope::kv_head ? ", one a KV head"
                                              : ", every head its own");
}

/// The figures that have targets, and those beside them.
inline void figures(book& b, demo::report& report) {
  // One list of a budget against a list a head of another.
  const auto compare = [&](const std::string& prefix, const choice& how, std::int32_t budget,
                           std::int32_t fraction, std::int32_t of_heads) {
    const run one = consecutive(how, budget, fraction, {});
    const run own = consecutive(with_scope(how, scope::query_head), of_heads, fraction, {});
    const outcome& o = b(one);
    const outcome& h = b(own);
    if (!b.is_open()) return;
    report.number(prefix + "consensus_mass_vs_per_head", o.mean_mass() / h.mean_mass());
    report.number(prefix + "recall_reduction_vs_union", 1 - o.chosen / h.layer_union);
    report.number(prefix + "attention_mass", o.mean_mass());
    report.number(prefix + "output_relative_error", o.mean_error());
  };
  // The library's defaults, its budget too; the guide's formula with the same budget.
  compare("", recommended, 0, 0, 0);
  compare("guide_", guide, 0, 0, 0);
  compare("budget_64_", recommended, 64, 0, 64);
  compare("guide_budget_64_", guide, 64, 0, 64);
  compare("budget_80_vs_64_", recommended, 80, 0, 64);
  compare("guide_budget_80_vs_64_", guide, 80, 0, 64);
  const run hot = consecutive(recommended, 0, 0, {{2.0}});
  report.number("hot_buffer_hit_rate", hit_rate(b, hot, {2.0}, b(hot)));
  if (b.is_open()) {
    for (std::size_t t = 0; t < b.texts().size(); ++t) {
      if (b.texts()[t].for_length) continue;
      const std::string& name = b.texts()[t].name;
      report.number("hot_buffer_hit_rate_" + name, hit_rate(b, hot, {2.0}, b.of(t, hot)));
      const run own = consecutive(with_scope(recommended, scope::query_head), 0, 0, {});
      report.number("consensus_mass_vs_per_head_" + name,
                    b.of(t, hot).mean_mass() / b.of(t, own).mean_mass());
    }
    report.number("default_budget_blocks", b(hot).units_a_step());
    report.text("default_settings", said(recommended));
  }
  adaptive_table(b, report);
  report.target("consensus_mass_vs_per_head", ">= 0.998");
  report.target("recall_reduction_vs_union", ">= 0.35");
  report.target("hot_buffer_hit_rate", ">= 0.80");
}

}  // namespace fidelity
