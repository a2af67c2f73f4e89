// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which blocks a step reads, chosen once for all query heads that share a unit.
///
/// Every query scores every block from its digest (score.hpp); a group of heads then agrees on one
/// number a block and takes the best. What is not told is what docs/fidelity.md recommends: the mean
/// of the heads over INT8 bounds of the keys, one list a layer, a sixteenth of the context. The
/// formula of the source guide,
///     S(b) = max_h S(h, b) + lambda * mean_h S(h, b)
/// is `.rule = consensus_rule::max_mean`, over digests of `.kind = digest_kind::mean`.
///
/// Scores are logits, or shares of attention (score_mass.hpp). All of it is computed in one order
/// without fused operations, so that every machine and backend selects the same blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pulseinfer/batch.hpp"
#include "pulseinfer/budget.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/consensus_rule.hpp"
#include "pulseinfer/detail/group_scorer.hpp"
#include "pulseinfer/digest.hpp"
#include "pulseinfer/score.hpp"
#include "pulseinfer/selection.hpp"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Chooses the blocks of a step.
///
/// @par Threads  one at a time
/// @par Cost     the digests of the batch are read once; nothing is allocated. Device memory: of
///               each row and block 8 bytes a KV head, or, where scores are normalised or vote, 4
///               bytes a query (12 where they vote); and 8 a list
/// @see the source guide's "SoloHead Sparse Selection"
template <backend Backend>
class consensus_selector {
 public:
  /// @param backend  the machine of the digests
  /// @param digests  outlives the selector
  /// @param options  sizes and weights
  /// @throws std::invalid_argument  naming the option and its limit: among them a budget of zero or
  ///         above the digests' max_blocks, and query heads that the KV heads, or the head groups,
  ///         do not divide
  /// @throws out_of_memory  when keys and workspace cannot be had
  consensus_selector(Backend backend, const digest_store<Backend>& digests,
                     const consensus_options& options)
      : backend_(backend),
        scorer_(backend, digests, checked(options, digests.geometry(), digests.max_blocks())),
        ids_(backend, scorer_.elements(head_groups(), budget_blocks())),
        counts_(backend, scorer_.elements(head_groups(), 1)),
        limits_(backend, scorer_.elements(head_groups(), 1)),
        workspace_(backend, backend_.top_k_workspace_bytes(
                                {std::int64_t{scorer_.options().max_rows} * head_groups(),
                                 digests.max_blocks(), budget_blocks()})) {}

  [[nodiscard]] const consensus_options& options() const noexcept { return scorer_.options(); }

  /// Enqueues scores, consensus and top-k for every row of the batch.
  ///
  /// Blocks of row r that may be chosen are those from `sink_blocks` up to its full blocks less
  /// `window_blocks`; their digests have been built by work that `stream` is ordered after. One that
  /// never was, or that is not reserved, ranks last, as does one whose score is NaN: it is chosen
  /// only when nothing else is left. A row that has fewer than are wanted gets all of them, one that
  /// has none an empty list.
  ///
  /// @param layer    in [0, layers of the digests)
  /// @param batch    its device arrays are valid until the stream has got past this call
  /// @param queries  [rows, tokens, query_heads, head_dim]; device memory, valid as long
  /// @param stream   the writers of queries, batch and digests stand on it before this call
  /// @return lists that hold once the stream has got past this call, until the next `select`
  /// @throws std::invalid_argument, std::out_of_range  on a batch or layer that does not fit;
  ///         nothing is enqueued
  selection select(std::int32_t layer, const batch_view& batch, const query_view& queries,
                   typename Backend::stream_ref stream) {
    return select(layer, batch, queries, options().budget, stream);
  }

  /// The same by another budget than the options': layers may have their own.
  ///
  /// By mass, and scores normalised over the context: sinks and window count towards the share, and
  /// where they reach it nothing is chosen but the floor. Normalised over the candidates it is a
  /// share of what these have. A row that nothing is known of (all NaN) gets its cap. By worth a
  /// block has its share of the same whole; sinks and window change nothing.
  ///
  /// @param layer    as above
  /// @param batch    as above
  /// @param queries  as above
  /// @param budget   its cap is at most `options().budget_blocks`, which `selection::k` stays
  /// @param stream   as above
  /// @return as above
  /// @throws std::invalid_argument  too on a budget that cannot be kept, naming the value, as on one
  ///         by mass where scores are not normalised
  selection select(std::int32_t layer, const batch_view& batch, const query_view& queries,
                   const selection_budget& budget, typename Backend::stream_ref stream) {
    checked_budget("select", budget, options());
    block_scores scores = score(layer, batch, queries, stream);
    scores.keys.limits = enqueue_limits(batch, budget, scores.blocks, stream);
    backend_.top_k({scores.lists, scores.blocks, budget_blocks()}, scores.keys, ids_.data(),
                   counts_.data(), {workspace_.data(), workspace_.size()}, stream);
    if (options().rule == consensus_rule::union_of_heads) {
      backend_.for_each_row(scores.lists, {}, ids_.bytes(),
                            keep_voted{.keys = scores.keys.keys,
                                       .key_stride = scores.keys.row_stride,
                                       .ids = ids_.data(),
                                       .k = budget_blocks(),
                                       .counts = counts_.data()},
                            stream);
    }
    if (budget.needs_masses()) enqueue_trim(scores, queries.tokens, budget, stream);
    return {ids_.data(), counts_.data(), scores.lists, budget_blocks()};
  }

  /// Enqueues scores and consensus alone, for who chooses by himself: as `select` in all else.
  block_scores score(std::int32_t layer, const batch_view& batch, const query_view& queries,
                     typename Backend::stream_ref stream) {
    return scorer_.score(layer, batch, queries, stream);
  }

 private:
  [[nodiscard]] std::int32_t head_groups() const noexcept { return options().head_groups; }
  [[nodiscard]] std::int32_t budget_blocks() const noexcept { return options().budget_blocks; }

  /// The limits of a top-k that the budget sets, or null: all lists are as long as they may be.
  const std::int32_t* enqueue_limits(const batch_view& batch, const selection_budget& budget,
                                     std::int64_t max_blocks, typename Backend::stream_ref stream) {
    const bool by_context = budget.rule == budget_rule::fraction;
    if (!by_context && budget.cap == budget_blocks()) return nullptr;
    const std::int32_t groups = head_groups();
    backend_.for_each(
        {batch.rows(), groups}, {},
        static_cast<std::uint64_t>(batch.rows()) * (4 + 4 * static_cast<std::uint64_t>(groups)),
        limit_to_context{.tokens = batch.device_tokens,
                         .block_tokens = scorer_.digests().geometry().block_tokens,
                         .max_blocks = static_cast<std::int32_t>(max_blocks),
                         .groups = groups,
                         .floor = by_context ? budget.floor : budget.cap,
                         .cap = budget.cap,
                         .share = detail::fixed_share(budget.share),
                         .limits = limits_.data()},
        stream);
    return limits_.data();
  }

  /// Cuts the lists of a budget by mass down to it.
  void enqueue_trim(const block_scores& scores, std::int32_t tokens, const selection_budget& budget,
                    typename Backend::stream_ref stream) {
    const bool by_worth = budget.rule == budget_rule::worth;
    const float* const always =
        by_worth ? nullptr : scorer_.enqueue_always_in(scores, tokens, stream);
    // (The limits have left no more than the cap. A list is as long as there is room.)
    backend_.for_each_row(scores.lists, {},
                          static_cast<std::uint64_t>(scores.lists) * 12 * budget.cap,
                          trim_to_mass{.mass = {scores.masses, scores.mass_stride, always, nullptr},
                                       .share = detail::fixed_share(budget.share),
                                       .floor = budget.floor,
                                       .cap = budget_blocks(),
                                       .ids = ids_.data(),
                                       .counts = counts_.data(),
                                       .kept = ids_.data(),
                                       .kept_counts = counts_.data(),
                                       .by_worth = by_worth},
                          stream);
  }

  Backend backend_;
  detail::group_scorer<Backend> scorer_;
  device_buffer<std::int32_t, Backend> ids_;
  device_buffer<std::int32_t, Backend> counts_;
  device_buffer<std::int32_t, Backend> limits_;  ///< [lists] by the budget
  device_buffer<std::byte, Backend> workspace_;
};

}  // namespace pulseinfer
