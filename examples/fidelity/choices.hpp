// SPDX-License-Identifier: Apache-2.0
/// @file
/// The ways to choose that the tables compare, and the runs that they ask for.
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "plan.hpp"

namespace fidelity {

using pulseinfer::consensus_rule;
using pulseinfer::digest_kind;
using pulseinfer::element_type;
using pulseinfer::score_normalisation;

/// Budgets of the sweep, in blocks a list.
inline constexpr std::int32_t budgets[] = {8, 16, 32, 64, 128, 256};
/// Budgets as parts of the context.
inline constexpr std::int32_t fractions[] = {32, 16, 8};
/// Capacities of the hot buffer, in budgets.
inline constexpr double capacities[] = {1, 1.5, 2, 3, 4};

/// What the guide has: means, max + lambda * mean over the scores, one list a layer.
inline constexpr choice guide{
    .digest = digest_kind::mean, .element = element_type::f32, .rule = consensus_rule::max_mean};
/// What the study recommends, see docs/fidelity.md: the library's defaults.
inline constexpr choice recommended{};

template <class Value>
struct named {
  const char* name;
  Value value;
};
inline constexpr named<digest_kind> digest_kinds[] = {
    {"mean", digest_kind::mean},
    {"min_max", digest_kind::min_max},
    {"centre_distance", digest_kind::centre_distance}};
inline constexpr named<element_type> elements[] = {{"f32", element_type::f32},
                                                   {"f16", element_type::f16},
                                                   {"bf16", element_type::bf16},
                                                   {"f8", element_type::f8_e4m3},
                                                   {"i8", element_type::i8}};

/// What joins the scores of a group.
struct joining {
  consensus_rule rule;
  score_normalisation normalisation;
  float lambda = 0.5f;
};
inline constexpr named<joining> rules[] = {
    {"max", {consensus_rule::max, score_normalisation::none}},
    {"max + 0.5 mean", {consensus_rule::max_mean, score_normalisation::none}},
    {"max + 4 mean", {consensus_rule::max_mean, score_normalisation::none, 4.0f}},
    {"mean", {consensus_rule::mean, score_normalisation::none}},
    {"vote", {consensus_rule::vote, score_normalisation::none}},
    {"union, most votes first", {consensus_rule::union_of_heads, score_normalisation::none}},
    {"softmax, max", {consensus_rule::max, score_normalisation::context}},
    {"softmax, max + 0.5 mean", {consensus_rule::max_mean, score_normalisation::context}},
    {"softmax, mean", {consensus_rule::mean, score_normalisation::context}},
    {"softmax of candidates, mean", {consensus_rule::mean, score_normalisation::candidates}},
};

inline run sampled(const choice& how, std::int32_t budget) {
  return {.how = how, .budget = budget, .through = {}};
}
inline run exactly(scope over, std::int32_t budget) {
  return {.how = {.over = over}, .exact = true, .budget = budget, .through = {}};
}
/// All steps, with a budget in blocks or as a part of the context, and hot buffers. Neither: the
/// library's default.
inline run consecutive(const choice& how, std::int32_t budget, std::int32_t fraction,
                       std::vector<residency> through) {
  return {.how = how,
          .budget = budget,
          .fraction = fraction,
          .steps = steps_of::every,
          .through = std::move(through)};
}
/// A budget by the masses that the recommended digests let one expect.
inline choice by_mass(pulseinfer::budget_rule cut, double share) {
  choice how = recommended;
  how.normalisation = score_normalisation::context;
  how.cut = cut;
  how.share = share;
  return how;
}
/// The same digest for other lists. A head of its own has nobody to agree with: no rule is applied.
inline choice with_scope(choice c, scope over) {
  c.over = over;
  if (over != scope::query_head) return c;
  return {.digest = c.digest, .element = c.element, .rule = consensus_rule::max, .over = over};
}

}  // namespace fidelity
