// SPDX-License-Identifier: Apache-2.0
/// @file
/// SoloHead: which blocks a step reads, chosen once for all query heads that share a unit.
///
/// Every query head h scores every block b from its digest; a group of heads then agrees on
///     S(b) = max_h S(h, b) + lambda * mean_h S(h, b)
/// and takes the k best. Scores are logits (q . digest / sqrt(head_dim)), summed channel by channel
/// in one order without fused operations, so that every machine and backend selects the same
/// blocks.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "pulseinfer/batch.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/digest.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Queries of one layer, as kernels see them: [rows, query_heads, head_dim], dense, device memory.
struct query_view {
  const void* data = nullptr;
  element_type element = element_type::f32;
};

namespace detail {

/// Kernel body: the blocks that row r may choose from, [sinks, full blocks - window), once for each
/// head group.
struct find_candidates {
  const std::int32_t* tokens;  ///< [rows]
  std::int32_t block_tokens;
  std::int32_t sinks;
  std::int32_t window;
  std::int32_t head_groups;
  std::int32_t max_blocks;
  std::int32_t* begin;  ///< [rows * head_groups]
  std::int32_t* end;

  PULSEINFER_HD void operator()(std::int64_t row, std::int64_t group) const {
    std::int32_t full = tokens[row] / block_tokens;
    if (full > max_blocks) full = max_blocks;
    const std::int32_t last = full - window;
    begin[row * head_groups + group] = sinks;
    end[row * head_groups + group] = last > sinks ? last : sinks;
  }
};

}  // namespace detail

/// Kernel body: scores block `unit` of tile `i` for one row and head group, and packs the consensus
/// into a key.
///
/// `mean` digests score q . mean; `min_max` digests the largest value that q . key can take inside
/// the bounds.
struct score_blocks {
  static constexpr int max_heads_at_once = 8;

  digest_view digest;
  query_view queries;
  const std::int32_t* requests;  ///< [rows]
  const std::int32_t* begin;     ///< [rows * head_groups]
  const std::int32_t* end;
  std::int64_t tiles;  ///< tiles a row, at most
  std::int32_t query_heads;
  std::int32_t head_groups;
  float scale;
  float lambda;
  std::uint64_t* keys;  ///< [rows * head_groups, key_stride]
  std::int64_t key_stride;

  PULSEINFER_HD void operator()(std::int64_t i, std::int64_t unit) const {
    const std::int64_t list = i / tiles;
    const std::int64_t block = (i % tiles) * tile_blocks + unit;
    if (block < begin[list] || block >= end[list]) return;
    const std::int64_t row = list / head_groups;
    const std::int32_t heads = query_heads / head_groups;
    const std::int32_t first = static_cast<std::int32_t>(list % head_groups) * heads;
    const std::int32_t heads_per_kv = query_heads / digest.kv_heads;

    float most = 0.0f;
    float total = 0.0f;
    std::int32_t head = first;
    while (head < first + heads) {
      // The query heads of one KV head read its digest together.
      const std::int32_t kv_head = head / heads_per_kv;
      std::int32_t together = (kv_head + 1) * heads_per_kv - head;
      if (together > first + heads - head) together = first + heads - head;
      if (together > max_heads_at_once) together = max_heads_at_once;
      float score[max_heads_at_once];
      score_heads(requests[row], row, block, kv_head, head, together, score);
      for (std::int32_t h = 0; h < together; ++h) {
        const float value = detail::product(score[h], scale);
        // Written so that a NaN stays: comparisons with one are false.
        most = head + h == first || !(value <= most) ? value : most;
        total = detail::sum(total, value);
      }
      head += together;
    }
    const float mean = detail::product(total, 1.0f / static_cast<float>(heads));
    const float consensus = detail::sum(most, detail::product(lambda, mean));
    keys[list * key_stride + block] = top_k_key(consensus, static_cast<std::int32_t>(block));
  }

 private:
  PULSEINFER_HD void score_heads(std::int64_t request, std::int64_t row, std::int64_t block,
                                 std::int32_t kv_head, std::int32_t head, std::int32_t together,
                                 float* score) const {
    const std::int64_t dim = digest.head_dim;
    const float* at = digest.find(request, block, kv_head);
    // A block without a digest ranks last: NaN does.
    const float start = at == nullptr ? detail::float_of(0x7fc00000u) : 0.0f;
    for (std::int32_t h = 0; h < together; ++h) score[h] = start;
    if (at == nullptr) return;
    const float* upper = at + digest.part_size();
    for (std::int64_t channel = 0; channel < dim; ++channel) {
      const float low = at[channel * tile_blocks];
      const float high = digest.kind == digest_kind::min_max ? upper[channel * tile_blocks] : low;
      for (std::int32_t h = 0; h < together; ++h) {
        const std::int64_t index = (row * query_heads + head + h) * dim + channel;
        const float q = load_element(queries.data, index, queries.element);
        score[h] = detail::sum(score[h], detail::product(q, q < 0.0f ? low : high));
      }
    }
  }
};
static_assert(std::is_trivially_copyable_v<score_blocks>);

/// What was chosen, in device memory: ids [lists, k] of blocks, ascending, unique, padded with -1,
/// and how many. List r * head_groups + g is group g of row r. Valid until the selector's next
/// `select`.
struct selection {
  const std::int32_t* ids = nullptr;
  const std::int32_t* counts = nullptr;
  std::int32_t lists = 0;
  std::int32_t k = 0;
};

/// What a selector chooses. Buffers are sized by it once.
struct consensus_options {
  std::int32_t query_heads = 0;
  std::int32_t budget_blocks = 64;  ///< k: blocks chosen beside those that are always in
  std::int32_t sink_blocks = 1;     ///< first blocks, always in, never chosen
  std::int32_t window_blocks = 2;   ///< last full blocks, always in, never chosen
  std::int32_t head_groups =
      1;  ///< lists a row: 1 (a list a layer), kv_heads, or query_heads (every head alone)
  float lambda = 0.5f;
  std::int32_t max_rows = 16;
};

/// Chooses the blocks of a step.
///
/// @par Threads  one at a time
/// @par Cost     the digests of the batch are read once; nothing is allocated
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
        digests_(&digests),
        options_(checked_options(digests, options)),
        keys_(backend, lists() * static_cast<std::size_t>(digests.max_blocks())),
        ranges_(backend, 2 * lists()),
        ids_(backend, lists() * static_cast<std::size_t>(options.budget_blocks)),
        counts_(backend, lists()),
        workspace_(backend,
                   backend_.top_k_workspace_bytes(shape(options.max_rows, digests.max_blocks()))) {}

  [[nodiscard]] const consensus_options& options() const noexcept { return options_; }

  /// Enqueues scores, consensus and top-k for every row of the batch.
  ///
  /// Blocks of row r that may be chosen are those from `sink_blocks` up to its full blocks less
  /// `window_blocks`; their digests have been built by work that `stream` is ordered after.
  ///
  /// @param layer    in [0, layers of the digests)
  /// @param batch    its device arrays are valid until the stream has got past this call
  /// @param queries  [rows, query_heads, head_dim]; device memory, valid as long
  /// @param stream   the writers of queries, batch and digests stand on it before this call
  /// @return lists that hold once the stream has got past this call, until the next `select`
  /// @throws std::invalid_argument, std::out_of_range  on a batch or layer that does not fit;
  ///         nothing is enqueued
  selection select(std::int32_t layer, const batch_view& batch, const query_view& queries,
                   typename Backend::stream_ref stream) {
    const digest_view digest = digests_->view(layer);
    detail::check_batch("select", batch, options_.max_rows, digests_->max_requests());
    detail::expects(queries.data != nullptr || batch.rows() == 0, "select: queries is null");
    const std::int64_t max_blocks = batch.max_tokens / digests_->geometry().block_tokens;
    detail::expects(batch.max_tokens >= 0 && max_blocks <= digests_->max_blocks(),
                    "select: max_tokens is ", batch.max_tokens, ", the digests hold ",
                    digests_->max_blocks(), " blocks of ", digests_->geometry().block_tokens);
    const std::int64_t rows = batch.rows();
    const std::int32_t groups = options_.head_groups;
    std::int32_t* begin = ranges_.data();
    std::int32_t* end = ranges_.data() + lists();
    backend_.for_each({rows, groups}, {}, static_cast<std::uint64_t>(rows * groups) * 12,
                      detail::find_candidates{.tokens = batch.device_tokens,
                                              .block_tokens = digests_->geometry().block_tokens,
                                              .sinks = options_.sink_blocks,
                                              .window = options_.window_blocks,
                                              .head_groups = groups,
                                              .max_blocks = static_cast<std::int32_t>(max_blocks),
                                              .begin = begin,
                                              .end = end},
                      stream);
    const std::int64_t tiles = (max_blocks + tile_blocks - 1) / tile_blocks;
    const auto tile_bytes =
        static_cast<std::uint64_t>(digest_parts(digest.kind) * digest.part_size()) * sizeof(float);
    if (tiles > 0) {
      backend_.for_each({rows * groups * tiles, tile_blocks}, {},
                        static_cast<std::uint64_t>(rows * tiles) * tile_bytes,
                        score_blocks{.digest = digest,
                                     .queries = queries,
                                     .requests = batch.device_requests,
                                     .begin = begin,
                                     .end = end,
                                     .tiles = tiles,
                                     .query_heads = options_.query_heads,
                                     .head_groups = groups,
                                     .scale = 1.0f / std::sqrt(static_cast<float>(digest.head_dim)),
                                     .lambda = options_.lambda,
                                     .keys = keys_.data(),
                                     .key_stride = digests_->max_blocks()},
                        stream);
    }
    backend_.top_k(shape(rows, max_blocks), {keys_.data(), digests_->max_blocks(), begin, end},
                   ids_.data(), counts_.data(), {workspace_.data(), workspace_.size()}, stream);
    return {ids_.data(), counts_.data(), static_cast<std::int32_t>(rows) * groups,
            options_.budget_blocks};
  }

 private:
  static consensus_options checked_options(const digest_store<Backend>& digests,
                                           const consensus_options& o) {
    const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                          std::int64_t most) {
      detail::expects(value >= least && value <= most, "consensus_selector: ", name, " is ", value,
                      ", expected ", least, " to ", most);
    };
    const std::int32_t kv_heads = digests.geometry().kv_heads;
    check("query_heads", o.query_heads, 1, max_extent);
    check("budget_blocks", o.budget_blocks, 1, digests.max_blocks());
    check("sink_blocks", o.sink_blocks, 0, digests.max_blocks());
    check("window_blocks", o.window_blocks, 0, digests.max_blocks());
    check("max_rows", o.max_rows, 1, max_extent);
    check("head_groups", o.head_groups, 1, o.query_heads);
    detail::expects(o.query_heads % kv_heads == 0, "consensus_selector: ", o.query_heads,
                    " query heads are no multiple of ", kv_heads, " KV heads");
    detail::expects(o.query_heads % o.head_groups == 0, "consensus_selector: ", o.query_heads,
                    " query heads are no multiple of ", o.head_groups, " head groups");
    detail::expects(std::isfinite(o.lambda) && o.lambda >= 0.0f, "consensus_selector: lambda is ",
                    o.lambda, ", expected 0 or more");
    return o;
  }
  [[nodiscard]] std::size_t lists() const noexcept {
    return static_cast<std::size_t>(options_.max_rows) *
           static_cast<std::size_t>(options_.head_groups);
  }
  [[nodiscard]] top_k_shape shape(std::int64_t rows, std::int64_t columns) const noexcept {
    return {rows * options_.head_groups, columns, options_.budget_blocks};
  }

  Backend backend_;
  const digest_store<Backend>* digests_;
  consensus_options options_;
  device_buffer<std::uint64_t, Backend> keys_;
  device_buffer<std::int32_t, Backend> ranges_;  ///< begin, then end, of every list
  device_buffer<std::int32_t, Backend> ids_;
  device_buffer<std::int32_t, Backend> counts_;
  device_buffer<std::byte, Backend> workspace_;
};

}  // namespace pulseinfer
