// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a step's choice of blocks is made by, and what comes of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "pulseinfer/budget.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/consensus_rule.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/score_mass.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What was chosen, in device memory: ids [lists, k] of blocks, ascending, unique, padded with -1,
/// and how many, from none to k. List r * head_groups + g is group g of row r. Valid until the
/// selector's next `select`.
struct selection {
  const std::int32_t* ids = nullptr;
  const std::int32_t* counts = nullptr;
  std::int32_t lists = 0;
  std::int32_t k = 0;
};

/// What the lists of a step are chosen from, in device memory. List r * head_groups + g is group g
/// of row r. Valid until the selector's next `score` or `select`.
struct block_scores {
  top_k_keys keys;          ///< the group's score of each block that may be chosen, packed
  std::int32_t lists = 0;   ///< rows x head groups
  std::int64_t blocks = 0;  ///< no list ends beyond
  /// [lists, mass_stride]: the estimated share of attention of each block that may be chosen, the
  /// mean over the queries of the group. Null without normalisation.
  const float* masses = nullptr;
  std::int64_t mass_stride = 0;
};

/// `consensus_options::budget_blocks` of who does not tell it: as many as the budget's cap.
inline constexpr std::int32_t room_for_budget = std::numeric_limits<std::int32_t>::min();

/// What is chosen where neither budget is told, as docs/fidelity.md recommends it: a sixteenth of
/// the context, but 16 blocks at least, and no more than a hot buffer's default takes.
inline constexpr selection_budget default_budget = selection_budget::of_context(1.0 / 16, 16, 64);

/// What a selector chooses. Buffers are sized by it once. What is not told is as docs/fidelity.md
/// recommends it; its study takes these values from here.
struct consensus_options {
  std::int32_t query_heads = 0;
  /// k: room of a list, and the most that a budget may choose.
  std::int32_t budget_blocks = room_for_budget;
  /// How many blocks are chosen beside those that are always in, where `select` is not told; of cap
  /// 0: `budget_blocks`, and where that is not told either, `default_budget`. By mass or by worth
  /// only where scores are normalised.
  selection_budget budget = {.cap = 0};
  std::int32_t sink_blocks = 1;    ///< first blocks, always in, never chosen
  std::int32_t window_blocks = 2;  ///< last full blocks, always in, never chosen
  std::int32_t head_groups =
      1;  ///< lists a row: 1 (a list a layer), kv_heads, or query_heads (every head alone)
  float lambda = 0.5f;  ///< of `max_mean`
  std::int32_t max_rows = 16;
  std::int32_t query_tokens = 1;  ///< queries of each head in a step, at most
  consensus_rule rule = consensus_rule::mean;
  score_normalisation normalisation = score_normalisation::none;
  std::int32_t head_blocks = 0;  ///< `vote`, `union_of_heads`: what each query votes for; 0: as k
  float logit_scale = 0.0f;      ///< that of the model's attention; 0: 1 / sqrt(head_dim)

  [[nodiscard]] constexpr bool is_normalised() const {
    return normalisation != score_normalisation::none;
  }
  [[nodiscard]] constexpr bool has_votes() const {
    return rule == consensus_rule::vote || rule == consensus_rule::union_of_heads;
  }
};

/// The budget, if a selector with such options can keep it.
/// @param what     who asks, for the message
/// @param budget   to check
/// @param options  whose lists have room for `budget_blocks`
/// @throws std::invalid_argument  naming the value and its limits
inline const selection_budget& checked_budget(const char* what, const selection_budget& budget,
                                              const consensus_options& options) {
  checked_budget(what, budget, options.budget_blocks);
  detail::expects(!budget.needs_masses() || options.is_normalised(), what,
                  ": the budget is by mass, but normalisation is none, expected candidates or "
                  "context");
  return budget;
}

/// Returns the options, those that are 0 for a default filled in, or throws `std::invalid_argument`
/// naming the option and its limit.
/// @param o           of a selector
/// @param geometry    of the digests
/// @param max_blocks  blocks a request that the digests hold
inline consensus_options checked(consensus_options o, const kv_geometry& geometry,
                                 std::int64_t max_blocks) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
    detail::expects(value >= least && value <= most, "consensus_selector: ", name, " is ", value,
                    ", expected ", least, " to ", most);
  };
  check("query_heads", o.query_heads, 1, max_extent);
  if (o.budget_blocks == room_for_budget) {
    const auto room =
        static_cast<std::int32_t>(std::min<std::int64_t>(default_budget.cap, max_blocks));
    if (o.budget == selection_budget{.cap = 0}) {
      o.budget = default_budget;
      o.budget.floor = std::min(o.budget.floor, room);
      o.budget.cap = 0;
    }
    if (o.budget.cap == 0) o.budget.cap = room;
    checked_budget("consensus_selector", o.budget, max_blocks);
    o.budget_blocks = o.budget.cap;
  }
  check("budget_blocks", o.budget_blocks, 1, max_blocks);
  check("sink_blocks", o.sink_blocks, 0, max_blocks);
  check("window_blocks", o.window_blocks, 0, max_blocks);
  check("max_rows", o.max_rows, 1, max_extent);
  check("head_groups", o.head_groups, 1, o.query_heads);
  check("query_tokens", o.query_tokens, 1, 1024);
  check("rule", static_cast<int>(o.rule), 0, static_cast<int>(consensus_rule::union_of_heads));
  check("normalisation", static_cast<int>(o.normalisation), 0,
        static_cast<int>(score_normalisation::context));
  check("head_blocks", o.head_blocks, 0, max_blocks);
  detail::expects(o.query_heads % geometry.kv_heads == 0, "consensus_selector: ", o.query_heads,
                  " query heads are no multiple of ", geometry.kv_heads, " KV heads");
  detail::expects(o.query_heads % o.head_groups == 0, "consensus_selector: ", o.query_heads,
                  " query heads are no multiple of ", o.head_groups, " head groups");
  detail::expects(std::isfinite(o.lambda) && o.lambda >= 0.0f, "consensus_selector: lambda is ",
                  o.lambda, ", expected 0 or more");
  detail::expects(std::isfinite(o.logit_scale) && o.logit_scale >= 0.0f,
                  "consensus_selector: logit_scale is ", o.logit_scale, ", expected 0 or more");
  if (o.has_votes()) {
    check("queries of a group that votes",
          std::int64_t{o.query_heads} / o.head_groups * o.query_tokens, 1, max_votes);
  }
  if (o.budget.cap == 0) o.budget.cap = o.budget_blocks;
  checked_budget("consensus_selector", o.budget, o);
  if (o.head_blocks == 0) o.head_blocks = o.budget_blocks;
  if (o.logit_scale == 0.0f) {
    o.logit_scale = 1.0f / std::sqrt(static_cast<float>(geometry.head_dim));
  }
  return o;
}

}  // namespace pulseinfer
