// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tables of quality: what digests, rules, scopes and budgets read of the attention. Each asks the
/// book for the runs that it shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "../demo/report.hpp"
#include "book.hpp"
#include "choices.hpp"

namespace fidelity {

/// Digests under the rule `mean`, and the true masses: what `value` says of each outcome.
template <class Value>
void by_digest(book& b, const char* title, const Value& value) {
  b.print("\n%s\n", title);
  b.print("  %-36s", "digest, lists");
  for (const std::int32_t k : budgets) b.print("  k %-4d", k);
  b.print("\n");
  const auto row = [&](const std::string& name, const auto& of) {
    b.print("  %-36s", name.c_str());
    for (const std::int32_t k : budgets) b.print("  %.4f", value(b(of(k))));
    b.print("\n");
  };
  for (const auto& [digest, kind] : digest_kinds) {
    const choice how{.digest = kind, .element = element_type::f32, .rule = consensus_rule::mean};
    row(std::string(digest) + ", every head its own",
        [&](std::int32_t k) { return sampled(with_scope(how, scope::query_head), k); });
    row(std::string(digest) + ", one a layer", [&](std::int32_t k) { return sampled(how, k); });
  }
  row("true masses, every head", [](std::int32_t k) { return exactly(scope::query_head, k); });
  row("true masses, one a layer", [](std::int32_t k) { return exactly(scope::layer, k); });
}

inline void digests_table(book& b) {
  by_digest(b, "Attention mass that lists of k blocks read, by digest (sinks and window included)",
            [](const outcome& o) { return o.mean_mass(); });
  by_digest(b, "Relative error of the attention's output over the same blocks",
            [](const outcome& o) { return o.mean_error(); });
}

inline void elements_table(book& b) {
  b.print("\nWhat digests weigh, and mass that one list a layer of k blocks reads (rule mean)\n");
  b.print("  %-24s  %12s  %8s", "digest, element", "bytes/token", "of K+V");
  for (const std::int32_t k : {16, 64}) b.print("  k %-4d", k);
  b.print("\n");
  for (const auto& [digest, kind] : digest_kinds) {
    for (const auto& [name, element] : elements) {
      const choice how{.digest = kind, .element = element, .rule = consensus_rule::mean};
      double bytes = 0;
      double share = 0;
      if (b.is_open()) {
        const pulseinfer::kv_geometry& g = b.texts().front().geometry;
        bytes = pulseinfer::digest_bytes_per_token(
            {.kind = kind, .element = element, .kv_heads = g.kv_heads, .head_dim = g.head_dim},
            g.block_tokens);
        share = bytes * g.block_tokens / static_cast<double>(g.unit_bytes());
      }
      b.print("  %-24s  %12.1f  %7.2f%%", (std::string(digest) + ", " + name).c_str(), bytes,
              100 * share);
      for (const std::int32_t k : {16, 64}) b.print("  %.4f", b(sampled(how, k)).mean_mass());
      b.print("\n");
    }
  }
}

inline void rules_table(book& b) {
  b.print("\nOne list a layer against every head its own list, same k and digest: mass kept\n");
  b.print("  %-44s", "digest, rule");
  for (const std::int32_t k : budgets) b.print("  k %-4d", k);
  b.print("\n");
  for (const auto& [digest, kind] : digest_kinds) {
    const choice plain{.digest = kind, .element = element_type::f32, .rule = consensus_rule::mean};
    const auto own = [&](std::int32_t k) {
      return sampled(with_scope(plain, scope::query_head), k);
    };
    for (const auto& [rule, joined] : rules) {
      b.print("  %-44s", (std::string(digest) + ", " + rule).c_str());
      for (const std::int32_t k : budgets) {
        const choice how{.digest = kind,
                         .element = element_type::f32,
                         .rule = joined.rule,
                         .normalisation = joined.normalisation,
                         .lambda = joined.lambda};
        b.print("  %.4f", b(sampled(how, k)).mean_mass() / b(own(k)).mean_mass());
      }
      b.print("\n");
    }
    b.print("  %-44s", (std::string(digest) + ", units saved against the union").c_str());
    for (const std::int32_t k : budgets) {
      const outcome& heads = b(own(k));
      b.print("  %.4f", 1 - b(sampled(plain, k)).units_a_step() /
                                (heads.layer_union / static_cast<double>(heads.mass.size())));
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

/// A budget by mass beside fixed ones: what it saves of the blocks at the same mean mass, at the
/// same mass of the step and layer that is worse off than nine in ten, and of the bytes moved.
struct adaptive_row {
  std::string name;
  choice how;
};
inline constexpr std::int32_t curve[] = {8, 16, 24, 32, 48, 64, 96, 128, 192, 256};

inline std::vector<adaptive_row> adaptive_rows() {
  std::vector<adaptive_row> rows;
  const auto add = [&](const std::string& name, scope over, float softening,
                       pulseinfer::budget_rule cut, double share) {
    choice how = by_mass(cut, share);
    how.over = over;
    how.softening = softening;
    char text[96];
    std::snprintf(text, sizeof text, "%s %g%s", name.c_str(), share,
                  softening == 1.0f ? "" : ", softened");
    rows.push_back({text, how});
  };
  for (const auto& [name, over] :
       {std::pair<std::string, scope>{"layer", scope::layer}, {"KV head", scope::kv_head}}) {
    for (const float softening : {1.0f, 0.7f}) {
      for (const double share : {0.9, 0.95}) {
        add(name + ", share", over, softening, pulseinfer::budget_rule::mass, share);
      }
      for (const double share : {2e-3, 1e-3, 5e-4}) {
        add(name + ", unit", over, softening, pulseinfer::budget_rule::worth, share);
      }
    }
  }
  return rows;
}

/// The blocks of fixed budgets against their mass, and against the worse off.
struct fixed_curves {
  std::vector<point> mean;
  std::vector<point> worse;
};
inline constexpr double worse_off = 0.1;

inline fixed_curves fixed_budgets(book& b, scope over) {
  fixed_curves out;
  for (const std::int32_t k : curve) {
    const outcome& o = b(sampled(with_scope(recommended, over), k));
    if (!b.is_open()) continue;
    out.mean.push_back({o.units_a_step(), o.mean_mass()});
    out.worse.push_back({o.units_a_step(), quantile(o.mass, worse_off)});
  }
  return out;
}

/// The one whose saving is the study's figure: see docs/fidelity.md.
inline constexpr const char* adaptive_choice = "KV head, unit 0.0005, softened";

inline void adaptive_table(book& b, demo::report& report) {
  b.print("\nBudgets by estimated mass against fixed ones, recommended digest\n");
  b.print("  %-34s  %7s  %7s  %7s  %7s  %9s\n", "scope, cut", "blocks", "mass", "saved", "p10",
          "saved p10");
  for (const adaptive_row& row : adaptive_rows()) {
    const fixed_curves fixed = fixed_budgets(b, row.how.over);
    const outcome& o = b(sampled(row.how, 256));
    if (!b.is_open()) continue;
    const point mean{o.units_a_step(), o.mean_mass()};
    const point worse{o.units_a_step(), quantile(o.mass, worse_off)};
    const double saved = saving(fixed.mean, mean);
    b.print("  %-34s  %7.1f  %7.4f  %7.3f  %7.4f  %9.3f\n", row.name.c_str(), mean.blocks,
            mean.mass, saved, worse.mass, saving(fixed.worse, worse));
    if (row.name != adaptive_choice) continue;
    report.text("adaptive_budget", row.name);
    report.number("adaptive_budget_saving", saved);
    report.number("adaptive_budget_mass", mean.mass);
    report.number("adaptive_budget_saving_at_p10", saving(fixed.worse, worse));
  }
  report.target("adaptive_budget_saving", ">= 0.25");
}

}  // namespace fidelity
