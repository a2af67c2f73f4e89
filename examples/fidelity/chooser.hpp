// SPDX-License-Identifier: Apache-2.0
/// @file
/// The library's side of the study: digests of one captured layer, what a selector chooses from
/// them, and what a hot buffer makes of the lists. Nothing here selects by itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../demo/capture.hpp"
#include "measures.hpp"
#include "pulseinfer/pulseinfer.hpp"

namespace fidelity {

/// For whom one list is made.
enum class scope : std::uint8_t { layer, kv_head, query_head };

/// One way to choose. What is not told is the library's own default.
struct choice {
  pulseinfer::digest_kind digest = pulseinfer::digest_options{}.kind;
  pulseinfer::element_type element = pulseinfer::digest_options{}.element;
  pulseinfer::consensus_rule rule = pulseinfer::consensus_options{}.rule;
  pulseinfer::score_normalisation normalisation = pulseinfer::consensus_options{}.normalisation;
  float lambda = pulseinfer::consensus_options{}.lambda;
  scope over = scope::layer;
  pulseinfer::budget_rule cut = pulseinfer::budget_rule::fixed;  ///< or by mass, or by worth
  double share = 0;                                              ///< of such a budget
  float softening = 1.0f;  ///< what logits are multiplied with
  friend bool operator==(const choice&, const choice&) = default;
};
static_assert(pulseinfer::consensus_options{}.head_groups == 1, "scope::layer is the default");

/// What was chosen: for each step the same number of lists.
struct chosen_lists {
  std::int32_t k = 0;  ///< the longest list
  std::int32_t per_step = 0;
  std::vector<std::int32_t> ids;     ///< [steps, per_step, k]
  std::vector<std::int32_t> counts;  ///< [steps, per_step]

  [[nodiscard]] std::int64_t steps() const {
    return static_cast<std::int64_t>(counts.size()) / std::max(per_step, 1);
  }
  /// Ascending blocks.
  [[nodiscard]] std::span<const std::int32_t> list(std::int64_t step, std::int64_t i) const {
    const auto at = static_cast<std::size_t>(step * per_step + i);
    return {ids.data() + at * static_cast<std::size_t>(k), static_cast<std::size_t>(counts[at])};
  }
  void add(std::span<const std::int32_t> blocks) {
    const std::size_t begin = ids.size();
    ids.insert(ids.end(), blocks.begin(), blocks.end());
    ids.resize(begin + static_cast<std::size_t>(k), -1);
    counts.push_back(static_cast<std::int32_t>(blocks.size()));
  }
};

/// A hot buffer that lists go through.
struct residency {
  double times = 2;  ///< its blocks, in lists
  pulseinfer::hot_replacement replacement = pulseinfer::hot_buffer_options{}.replacement;
  friend bool operator==(const residency&, const residency&) = default;
};

/// The fewest blocks that a cut leaves of a list.
inline constexpr std::int32_t cut_floor = 4;

/// First blocks and last full ones that are never chosen.
inline constexpr std::int32_t sink_blocks = pulseinfer::consensus_options{}.sink_blocks;
inline constexpr std::int32_t window_blocks = pulseinfer::consensus_options{}.window_blocks;

/// One layer of a capture in an engine's pages, block b in page b.
class layer_chooser {
 public:
  layer_chooser(const demo::capture& c, std::int32_t layer)
      : c_(&c),
        stream_(backend_.make_stream(pulseinfer::stream_priority::normal)),
        geometry_(one_layer(c)),
        blocks_(geometry_.blocks_of(c.tokens)),
        layout_(pulseinfer::nhd_layout(geometry_, blocks_ * c.geometry.kv_heads)),
        memory_(backend_, static_cast<std::size_t>(2 * layout_.plane_bytes())),
        pool_(geometry_, layout_,
              {{.plane = {memory_.data(), memory_.data() + layout_.plane_bytes()}}}),
        table_(backend_, static_cast<std::size_t>(blocks_)),
        tokens_(backend_, static_cast<std::size_t>(c.steps)),
        requests_(backend_, static_cast<std::size_t>(c.geometry.kv_heads)) {
    const auto l = static_cast<std::size_t>(layer);
    // The last block may lack tokens: what its page holds of them is never looked at.
    put(memory_.data(), c.keys[l]);
    put(memory_.data() + layout_.plane_bytes(), c.values[l]);
    std::iota(table_.span().begin(), table_.span().end(), 0);
    std::iota(requests_.span().begin(), requests_.span().end(), 0);
    for (std::int64_t s = 0; s < c.steps; ++s) {
      tokens_[static_cast<std::size_t>(s)] = static_cast<std::int32_t>(c.prompt_tokens + s + 1);
    }
    backend_.sync(stream_);
  }
  layer_chooser(const layer_chooser&) = delete;
  layer_chooser& operator=(const layer_chooser&) = delete;

  /// The blocks that may be chosen at a step: [sink_blocks, this).
  [[nodiscard]] std::int64_t end_of_choice(std::int64_t step) const {
    const std::int64_t full = (c_->prompt_tokens + step + 1) / geometry_.block_tokens;
    return std::max<std::int64_t>(full - window_blocks, sink_blocks);
  }

  /// What the library's selector chooses for some steps.
  /// @param budget   blocks a list; 0: the library's own default
  /// @param queries  [c.steps, query_heads, head_dim], of this layer or what stands in for them
  [[nodiscard]] chosen_lists choose(const choice& how, std::int32_t budget,
                                    std::span<const std::int64_t> steps,
                                    std::span<const float> queries) {
    const std::int32_t lists = how.over == scope::layer     ? 1
                               : how.over == scope::kv_head ? geometry_.kv_heads
                                                            : c_->query_heads;
    pulseinfer::consensus_options options{
        .query_heads = c_->query_heads,
        .head_groups = lists,
        .lambda = how.lambda,
        .max_rows = 1,
        .rule = how.rule,
        .normalisation = how.normalisation,
        .logit_scale = how.softening / std::sqrt(static_cast<float>(geometry_.head_dim))};
    if (budget > 0) options.budget_blocks = budget;
    if (how.cut != pulseinfer::budget_rule::fixed) {
      options.budget = {
          .rule = how.cut, .cap = budget, .floor = std::min(cut_floor, budget), .share = how.share};
    }
    pulseinfer::consensus_selector<backend> selector(backend_, digests(how), options);
    const std::int32_t k = selector.options().budget_blocks;
    pulseinfer::pinned_buffer<float, backend> on_host(backend_, queries.size());
    std::copy(queries.begin(), queries.end(), on_host.data());
    const auto per_step = static_cast<std::size_t>(lists) * static_cast<std::size_t>(k);
    pulseinfer::pinned_buffer<std::int32_t, backend> ids(backend_, steps.size() * per_step);
    pulseinfer::pinned_buffer<std::int32_t, backend> counts(
        backend_, steps.size() * static_cast<std::size_t>(lists));
    const std::int32_t request = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
      const auto s = static_cast<std::size_t>(steps[i]);
      const pulseinfer::batch_view batch{
          {&request, 1}, requests_.device_data(), tokens_.device_data() + s, tokens_[s]};
      const pulseinfer::query_view of_step{on_host.device_data() +
                                           s * static_cast<std::size_t>(c_->query_heads) *
                                               static_cast<std::size_t>(geometry_.head_dim)};
      const pulseinfer::selection chosen = selector.select(0, batch, of_step, stream_);
      backend_.copy_async(ids.data() + i * per_step, chosen.ids, per_step * sizeof(std::int32_t),
                          pulseinfer::copy_direction::device_to_host, stream_);
      backend_.copy_async(counts.data() + i * static_cast<std::size_t>(lists), chosen.counts,
                          static_cast<std::size_t>(lists) * sizeof(std::int32_t),
                          pulseinfer::copy_direction::device_to_host, stream_);
    }
    backend_.sync(stream_);
    return {.k = k,
            .per_step = lists,
            .ids = {ids.data(), ids.data() + ids.size()},
            .counts = {counts.data(), counts.data() + counts.size()}};
  }

  /// How many units each step misses when the lists of consecutive steps go through the library's
  /// hot buffer; a list of each step is a request of its own. The first step misses everything.
  /// @param capacity  blocks that a list may keep on the device, at least the longest
  [[nodiscard]] std::vector<std::int64_t> misses(const chosen_lists& lists, std::int32_t capacity,
                                                 pulseinfer::hot_replacement replacement) {
    const std::int32_t rows = lists.per_step;
    capacity = static_cast<std::int32_t>(std::min<std::int64_t>(capacity, blocks_));
    const auto units = static_cast<std::size_t>(rows) * static_cast<std::size_t>(lists.k);
    pulseinfer::hot_buffer<backend> hot(backend_, pool_,
                                        {.pages_per_request = capacity,
                                         .budget_blocks = lists.k,
                                         .max_requests = rows,
                                         .max_rows = rows,
                                         .max_blocks = blocks_,
                                         .steps_in_flight = 1,
                                         .replacement = replacement});
    std::vector<std::int32_t> pages(static_cast<std::size_t>(capacity));
    for (std::int32_t row = 0; row < rows; ++row) {
      std::iota(pages.begin(), pages.end(), row * capacity);
      hot.lend(row, pages, stream_);
    }
    pulseinfer::pinned_buffer<std::int32_t, backend> ids(backend_, lists.ids.size());
    pulseinfer::pinned_buffer<std::int32_t, backend> counts(backend_, lists.counts.size());
    std::copy(lists.ids.begin(), lists.ids.end(), ids.data());
    std::copy(lists.counts.begin(), lists.counts.end(), counts.data());
    // Nothing is moved: that every miss came is all that the hot buffer is told.
    pulseinfer::pinned_buffer<const std::byte*, backend> sources(backend_, units);
    std::fill(sources.span().begin(), sources.span().end(), memory_.data());
    const pulseinfer::resolved_step step = hot.hold_step(0, rows).value();
    std::vector<std::int64_t> out;
    for (std::size_t s = 0; s < static_cast<std::size_t>(lists.steps()); ++s) {
      const pulseinfer::selection chosen{ids.device_data() + s * units,
                                         counts.device_data() + s * static_cast<std::size_t>(rows),
                                         rows, lists.k};
      hot.resolve_held(step, requests_.device_data(), chosen, stream_);
      hot.settle_pulled(step, requests_.device_data(), sources.device_data(), stream_);
      backend_.sync(stream_);
      std::int64_t missed = 0;
      for (std::int32_t row = 0; row < rows; ++row) {
        missed += static_cast<std::int64_t>(step.misses(row).size());
      }
      out.push_back(missed);
    }
    hot.drop_step(step);
    return out;
  }

  /// What guesses at the next list bring ahead through the library's hot buffer, what of it is used,
  /// and what is missed all the same. One list a step; the first step has no guess, and does not
  /// count.
  /// @param capacity  as misses
  [[nodiscard]] pulseinfer::residency_counts recalled_ahead(const chosen_lists& truth,
                                                            const chosen_lists& guess,
                                                            std::int32_t capacity) {
    const std::int32_t k = truth.k;
    capacity = static_cast<std::int32_t>(
        std::clamp<std::int64_t>(capacity, k, std::max<std::int64_t>(blocks_, k)));
    pulseinfer::hot_buffer<backend> hot(backend_, pool_,
                                        {.pages_per_request = capacity,
                                         .budget_blocks = k,
                                         .max_requests = 1,
                                         .max_rows = 1,
                                         .max_blocks = blocks_,
                                         .predicts = true});
    std::vector<std::int32_t> pages(static_cast<std::size_t>(capacity));
    std::iota(pages.begin(), pages.end(), 0);
    hot.lend(0, pages, stream_);
    pulseinfer::pinned_buffer<std::int32_t, backend> ids(backend_, 2 * truth.ids.size());
    pulseinfer::pinned_buffer<std::int32_t, backend> counts(backend_, 2 * truth.counts.size());
    std::copy(truth.ids.begin(), truth.ids.end(), ids.data());
    std::copy(guess.ids.begin(), guess.ids.end(), ids.data() + truth.ids.size());
    std::copy(truth.counts.begin(), truth.counts.end(), counts.data());
    std::copy(guess.counts.begin(), guess.counts.end(), counts.data() + truth.counts.size());
    pulseinfer::pinned_buffer<const std::byte*, backend> sources(backend_,
                                                                 static_cast<std::size_t>(k));
    std::fill(sources.span().begin(), sources.span().end(), memory_.data());
    const auto steps = static_cast<std::size_t>(truth.steps());
    const std::int32_t request = 0;
    pulseinfer::residency_counts first;
    for (std::size_t s = 0; s < steps; ++s) {
      const pulseinfer::batch_view batch{
          {&request, 1}, requests_.device_data(), tokens_.device_data() + s, tokens_[s]};
      const auto resolve = [&](std::size_t at, bool is_guess) {
        const pulseinfer::selection list{ids.device_data() + at * static_cast<std::size_t>(k),
                                         counts.device_data() + at, 1, k};
        const auto step = is_guess ? hot.resolve_predicted(0, batch, list, stream_)
                                   : hot.resolve(0, batch, list, stream_);
        if (!step) throw std::logic_error("fidelity: the hot buffer has no free step");
        // Nothing is moved: as in `misses`.
        hot.settle_pulled(*step, requests_.device_data(), sources.device_data(), stream_);
        backend_.sync(stream_);
      };
      if (s > 0) resolve(steps + s, true);
      resolve(s, false);
      if (s == 0) first = hot.counts(0, 0);
    }
    pulseinfer::residency_counts all = hot.counts(0, 0);
    all.chosen -= first.chosen;
    all.missed -= first.missed;
    return all;
  }

 private:
  using backend = pulseinfer::host_backend;

  static pulseinfer::kv_geometry one_layer(const demo::capture& c) {
    pulseinfer::kv_geometry g = c.geometry;
    g.layers = 1;
    return g;
  }
  void put(std::byte* plane, const std::vector<std::uint16_t>& from) {
    backend_.copy_async(plane, from.data(), from.size() * sizeof(from[0]),
                        pulseinfer::copy_direction::host_to_device, stream_);
  }
  [[nodiscard]] const pulseinfer::digest_store<backend>& digests(const choice& how) {
    auto& kept = digests_[{how.digest, how.element}];
    if (kept) return *kept;
    kept = std::make_unique<pulseinfer::digest_store<backend>>(
        backend_, geometry_,
        pulseinfer::digest_options{
            .kind = how.digest, .max_requests = 1, .max_blocks = blocks_, .element = how.element});
    if (!kept->reserve(0, blocks_, stream_)) throw std::logic_error("fidelity: too few tiles");
    kept->build(0, 0, 0, c_->tokens / geometry_.block_tokens, pool_,
                pulseinfer::block_table{table_.device_data(), 1, blocks_}, stream_);
    backend_.sync(stream_);
    return *kept;
  }

  backend backend_{pulseinfer::host_options{.workers = 1}};
  const demo::capture* c_;
  backend::stream stream_;
  pulseinfer::kv_geometry geometry_;
  std::int64_t blocks_;  ///< of the whole text
  pulseinfer::block_layout layout_;
  pulseinfer::device_buffer<std::byte, backend> memory_;
  pulseinfer::kv_pool pool_;
  pulseinfer::pinned_buffer<std::int32_t, backend> table_;     ///< [blocks] block b is in page b
  pulseinfer::pinned_buffer<std::int32_t, backend> tokens_;    ///< [steps]
  pulseinfer::pinned_buffer<std::int32_t, backend> requests_;  ///< 0, 1, 2, ...
  std::map<std::pair<pulseinfer::digest_kind, pulseinfer::element_type>,
           std::unique_ptr<pulseinfer::digest_store<backend>>>
      digests_;
};

}  // namespace fidelity
