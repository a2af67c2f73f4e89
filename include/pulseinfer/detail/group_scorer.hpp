// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a group of heads says of each block: scores of all queries against the digests, made shares
/// of attention where that is asked for, joined to a key and an estimated mass for each block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>

#include "pulseinfer/batch.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/consensus_rule.hpp"
#include "pulseinfer/digest.hpp"
#include "pulseinfer/element.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/score.hpp"
#include "pulseinfer/score_mass.hpp"
#include "pulseinfer/selection.hpp"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Kernel body: the blocks that row r may choose from, [sinks, full blocks - window), once for each
/// of its lists, and its full blocks.
struct find_candidates {
  const std::int32_t* tokens;  ///< [rows]
  std::int32_t block_tokens;
  std::int32_t sinks;
  std::int32_t window;
  std::int32_t lists;  ///< a row
  std::int32_t max_blocks;
  std::int32_t* begin;  ///< [rows * lists]
  std::int32_t* end;
  std::int32_t* full;  ///< [rows]

  PULSEINFER_HD void operator()(std::int64_t row, std::int64_t list) const {
    std::int32_t blocks = tokens[row] / block_tokens;
    if (blocks > max_blocks) blocks = max_blocks;
    const std::int32_t last = blocks - window;
    begin[row * lists + list] = sinks;
    end[row * lists + list] = last > sinks ? last : sinks;
    if (list == 0) full[row] = blocks;
  }
};

/// The part of a `consensus_selector` that does not choose. Its threads, order and life are that
/// one's.
template <backend Backend>
class group_scorer {
 public:
  /// @param options  checked, of the selector
  group_scorer(Backend backend, const digest_store<Backend>& digests,
               const consensus_options& options)
      : backend_(backend),
        digests_(&digests),
        options_(options),
        queries_(backend, elements(columns(options_.query_tokens).kv_heads,
                                   columns(options_.query_tokens).size())),
        most_(backend, elements(pieces(options_.query_tokens), stride())),
        total_(backend, scores_alone() ? 0 : most_.size()),
        partial_(backend,
                 is_normalised() ? elements(pieces(options_.query_tokens), tile_blocks) : 0),
        factor_(backend, is_normalised() ? elements(pieces(options_.query_tokens), 1) : 0),
        masses_(backend, is_normalised() ? elements(options_.head_groups, stride()) : 0),
        always_(backend, is_normalised() ? elements(options_.head_groups, 1) : 0),
        keys_(backend, elements(options_.head_groups, digests.max_blocks())),
        ranges_(backend, 2 * elements(options_.head_groups, 1) + 3 * elements(1, 1)),
        vote_keys_(backend,
                   has_votes() ? elements(pieces(options_.query_tokens), digests.max_blocks()) : 0),
        vote_ids_(backend,
                  has_votes() ? elements(pieces(options_.query_tokens), options_.head_blocks) : 0),
        vote_lists_(backend, has_votes() ? 3 * elements(pieces(options_.query_tokens), 1) : 0),
        workspace_(backend, workspace_bytes()) {}

  [[nodiscard]] const consensus_options& options() const noexcept { return options_; }
  [[nodiscard]] const digest_store<Backend>& digests() const noexcept { return *digests_; }

  /// See `consensus_selector::score`.
  block_scores score(std::int32_t layer, const batch_view& batch, const query_view& queries,
                     typename Backend::stream_ref stream) {
    const digest_view digest = digests_->view(layer);
    check_batch("select", batch, options_.max_rows, digests_->max_requests());
    expects(queries.data != nullptr || batch.rows() == 0, "select: queries is null");
    expects(element_bytes(queries.element) > 0, "select: element of the queries is ",
            static_cast<int>(queries.element), ", expected one of element_type");
    expects(queries.tokens >= 1 && queries.tokens <= options_.query_tokens, "select: queries have ",
            queries.tokens, " tokens, expected 1 to ", options_.query_tokens);
    const std::int64_t max_blocks = batch.max_tokens / digests_->geometry().block_tokens;
    expects(batch.max_tokens >= 0 && max_blocks <= digests_->max_blocks(), "select: max_tokens is ",
            batch.max_tokens, ", the digests hold ", digests_->max_blocks(), " blocks of ",
            digests_->geometry().block_tokens);
    const std::int64_t rows = batch.rows();
    const std::int64_t tiles = (max_blocks + tile_blocks - 1) / tile_blocks;
    const std::int32_t groups = options_.head_groups;
    const row_ranges ranges = enqueue_ranges(batch, max_blocks, groups, ranges_.data(), stream);
    if (tiles > 0) {
      const query_columns shape = columns(queries.tokens);
      enqueue_queries(queries, shape, rows, digest.form.kind, stream);
      const std::int64_t of_row = pieces(queries.tokens);
      const std::int32_t piece =
          static_cast<std::int32_t>(std::int64_t{shape.kv_heads} * shape.columns() / of_row);
      backend_.for_each({rows * tiles * shape.kv_heads, tile_blocks / score_blocks::blocks_at_once},
                        {}, static_cast<std::uint64_t>(rows * tiles * digest.form.tile_bytes()),
                        score_blocks{.digest = digest,
                                     .shape = shape,
                                     .queries = queries_.data(),
                                     .requests = batch.device_requests,
                                     .full = ranges.full,
                                     .tiles = tiles,
                                     .piece = piece,
                                     .scale = options_.logit_scale,
                                     .most = most_.data(),
                                     .total = total_.data(),
                                     .stride = stride()},
                        stream);
      if (has_votes()) enqueue_votes(batch, max_blocks, of_row, stream);
      if (is_normalised()) enqueue_softmax(rows, of_row, ranges, stream);
      backend_.for_each({rows * groups * tiles, tile_blocks}, {},
                        score_bytes(rows * of_row * tiles), join(of_row, tiles, queries, ranges),
                        stream);
    }
    return {.keys = {keys_.data(), digests_->max_blocks(), ranges.begin, ranges.end},
            .lists = static_cast<std::int32_t>(rows) * groups,
            .blocks = max_blocks,
            .masses = masses_.data(),
            .mass_stride = stride()};
  }

  /// Enqueues what adds up the estimated masses of all that is always in, a number a list. Null
  /// where scores are not shares of the whole context: then nothing is known of it.
  /// @param scores  of the last `score`
  /// @param tokens  of its queries
  const float* enqueue_always_in(const block_scores& scores, std::int32_t tokens,
                                 typename Backend::stream_ref stream) {
    if (options_.normalisation != score_normalisation::context) return nullptr;
    const std::int32_t groups = options_.head_groups;
    const std::int32_t queries = options_.query_heads / groups * tokens;
    const std::int64_t blocks = std::int64_t{options_.sink_blocks} + options_.window_blocks;
    backend_.for_each_row(
        scores.lists, {},
        static_cast<std::uint64_t>(scores.lists * blocks) * static_cast<std::uint64_t>(queries) * 4,
        add_always_in{.scores = most_.data(),
                      .factor = factor_.data(),
                      .stride = stride(),
                      .pieces = queries,
                      .share = 1.0f / static_cast<float>(queries),
                      .begin = scores.keys.begin,
                      .end = scores.keys.end,
                      .full = full_blocks(),
                      .groups = groups,
                      .masses = always_.data()},
        stream);
    return always_.data();
  }

  /// Elements of an array of all rows.
  [[nodiscard]] std::size_t elements(std::int64_t of_row, std::int64_t each) const {
    return static_cast<std::size_t>(
        checked_offset(checked_offset(of_row, each, 0), options_.max_rows, 0));
  }

 private:
  struct row_ranges {
    const std::int32_t* begin;      ///< [lists]
    const std::int32_t* end;        ///< [lists]
    const std::int32_t* full;       ///< [rows]
    const std::int32_t* row_begin;  ///< [rows]
    const std::int32_t* row_end;    ///< [rows]
  };

  [[nodiscard]] bool is_normalised() const noexcept { return options_.is_normalised(); }
  [[nodiscard]] bool has_votes() const noexcept { return options_.has_votes(); }
  /// True if the score of each query is kept; otherwise what several come to.
  [[nodiscard]] bool scores_alone() const noexcept { return is_normalised() || has_votes(); }

  [[nodiscard]] query_columns columns(std::int32_t tokens) const noexcept {
    const kv_geometry& g = digests_->geometry();
    return {g.kv_heads, g.head_dim, options_.query_heads / g.kv_heads, tokens};
  }
  /// Pieces of a row: the heads that share both a KV head and a group, or each query.
  [[nodiscard]] std::int64_t pieces(std::int32_t tokens) const {
    if (scores_alone()) return std::int64_t{options_.query_heads} * tokens;
    return options_.query_heads / std::gcd(options_.query_heads / digests_->geometry().kv_heads,
                                           options_.query_heads / options_.head_groups);
  }
  /// Floats from the scores of a piece to the next: whole tiles.
  [[nodiscard]] std::int64_t stride() const noexcept {
    return (digests_->max_blocks() + tile_blocks - 1) / tile_blocks * tile_blocks;
  }
  [[nodiscard]] std::uint64_t score_bytes(std::int64_t tiles) const noexcept {
    return static_cast<std::uint64_t>(tiles * tile_blocks) * (scores_alone() ? 4 : 8);
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    if (!has_votes()) return 0;
    return backend_.top_k_workspace_bytes(
        {std::int64_t{options_.max_rows} * pieces(options_.query_tokens), digests_->max_blocks(),
         options_.head_blocks});
  }

  row_ranges enqueue_ranges(const batch_view& batch, std::int64_t max_blocks, std::int64_t lists,
                            std::int32_t* at, typename Backend::stream_ref stream) {
    const auto find = [&](std::int64_t of_row, std::int32_t* begin, std::int32_t* end,
                          std::int32_t* full) {
      backend_.for_each({batch.rows(), of_row}, {},
                        static_cast<std::uint64_t>(batch.rows() * of_row) * 12,
                        find_candidates{.tokens = batch.device_tokens,
                                        .block_tokens = digests_->geometry().block_tokens,
                                        .sinks = options_.sink_blocks,
                                        .window = options_.window_blocks,
                                        .lists = static_cast<std::int32_t>(of_row),
                                        .max_blocks = static_cast<std::int32_t>(max_blocks),
                                        .begin = begin,
                                        .end = end,
                                        .full = full},
                        stream);
    };
    const std::int64_t rows = options_.max_rows;
    std::int32_t* const full = full_blocks();
    find(lists, at, at + rows * lists, full);
    if (is_normalised()) find(1, full + rows, full + 2 * rows, full);
    return {at, at + rows * lists, full, full + rows, full + 2 * rows};
  }

  void enqueue_queries(const query_view& queries, const query_columns& shape, std::int64_t rows,
                       digest_kind kind, typename Backend::stream_ref stream) {
    const auto bytes = static_cast<std::uint64_t>(rows * shape.kv_heads * shape.size()) * 4;
    backend_.for_each({rows * shape.kv_heads * shape.padded(), shape.head_dim}, {}, 2 * bytes,
                      arrange_queries{queries, shape, queries_.data()}, stream);
    if (kind != digest_kind::centre_distance) return;
    backend_.for_each({rows * shape.kv_heads, shape.padded()}, {}, bytes,
                      measure_queries{shape, queries_.data()}, stream);
  }

  void enqueue_votes(const batch_view& batch, std::int64_t max_blocks, std::int64_t of_row,
                     typename Backend::stream_ref stream) {
    const std::int64_t tiles = (max_blocks + tile_blocks - 1) / tile_blocks;
    const row_ranges own = enqueue_ranges(batch, max_blocks, of_row, vote_lists_.data(), stream);
    const std::int64_t lists = batch.rows() * of_row;
    backend_.for_each({lists * tiles, tile_blocks}, {}, score_bytes(3 * lists * tiles),
                      column_keys{.scores = most_.data(),
                                  .stride = stride(),
                                  .begin = own.begin,
                                  .end = own.end,
                                  .tiles = tiles,
                                  .keys = vote_keys_.data(),
                                  .key_stride = digests_->max_blocks()},
                      stream);
    backend_.top_k({lists, max_blocks, options_.head_blocks},
                   {vote_keys_.data(), digests_->max_blocks(), own.begin, own.end},
                   vote_ids_.data(), vote_counts(), {workspace_.data(), workspace_.size()}, stream);
  }

  void enqueue_softmax(std::int64_t rows, std::int64_t of_row, const row_ranges& ranges,
                       typename Backend::stream_ref stream) {
    const bool is_context = options_.normalisation == score_normalisation::context;
    backend_.for_each_row(rows * of_row, {},
                          static_cast<std::uint64_t>(rows * of_row * stride()) * 12,
                          normalise_scores{.scores = most_.data(),
                                           .stride = stride(),
                                           .columns = static_cast<std::int32_t>(of_row),
                                           .begin = is_context ? nullptr : ranges.row_begin,
                                           .end = is_context ? ranges.full : ranges.row_end,
                                           .partial = partial_.data(),
                                           .factor = factor_.data()},
                          stream);
  }

  [[nodiscard]] join_scores join(std::int64_t of_row, std::int64_t tiles, const query_view& queries,
                                 const row_ranges& ranges) const {
    const std::int32_t groups = options_.head_groups;
    const std::int32_t columns = options_.query_heads / groups * queries.tokens;
    return {.most = most_.data(),
            .total = total_.data(),
            .factor = factor_.data(),
            .stride = stride(),
            .pieces = static_cast<std::int32_t>(of_row / groups),
            .share = 1.0f / static_cast<float>(columns),
            .begin = ranges.begin,
            .end = ranges.end,
            .tiles = tiles,
            .rule = options_.rule,
            .lambda = options_.lambda,
            .votes = vote_ids_.data(),
            .vote_counts = vote_counts(),
            .votes_each = options_.head_blocks,
            .keys = keys_.data(),
            .key_stride = digests_->max_blocks(),
            .masses = masses_.data()};
  }
  /// Behind the ranges of the lists.
  [[nodiscard]] std::int32_t* full_blocks() const noexcept {
    return ranges_.data() + 2 * std::int64_t{options_.max_rows} * options_.head_groups;
  }
  /// Behind the ranges of the queries' own lists.
  [[nodiscard]] std::int32_t* vote_counts() const noexcept {
    return vote_lists_.data() == nullptr ? nullptr
                                         : vote_lists_.data() + vote_lists_.size() / 3 * 2;
  }

  Backend backend_;
  const digest_store<Backend>* digests_;
  consensus_options options_;
  device_buffer<float, Backend> queries_;  ///< arranged
  device_buffer<float, Backend> most_;     ///< [rows, pieces, stride]
  device_buffer<float, Backend> total_;    ///< the same
  device_buffer<float, Backend> partial_;  ///< sums of a softmax
  device_buffer<float, Backend> factor_;   ///< of a softmax
  device_buffer<float, Backend> masses_;   ///< [lists, stride]
  device_buffer<float, Backend> always_;   ///< [lists] masses of what is always in
  device_buffer<std::uint64_t, Backend> keys_;
  /// [max_rows, head_groups] begin, then end; [max_rows] full blocks, begin, end.
  device_buffer<std::int32_t, Backend> ranges_;
  device_buffer<std::uint64_t, Backend> vote_keys_;
  device_buffer<std::int32_t, Backend> vote_ids_;
  device_buffer<std::int32_t, Backend> vote_lists_;  ///< [rows, queries] begin, end, count
  device_buffer<std::byte, Backend> workspace_;      ///< of the votes' top-k
};

}  // namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail
