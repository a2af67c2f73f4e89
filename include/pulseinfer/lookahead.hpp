// SPDX-License-Identifier: Apache-2.0
/// @file
/// Recalls that begin before a layer has chosen: with the list of an earlier layer, or with a guess
/// at the layer's own.
///
/// A layer's recall depends on that layer's query, so nothing hides it unless something is known in
/// advance. Two things can be. Where neighbouring layers choose alike, an `anchor_plan` says which
/// layers choose anew and which take over an anchor's list (Kascade, whose anchors are those that a
/// development set shows, and whose lists are each head's; in vLLM followers repeat a leader's plan);
/// then the misses of the latter are known at the anchor. And a layer's query can be guessed from the
/// hidden state of the layer before (InfiniGen), its list with it. docs/fidelity.md says how much of
/// a small model's lists each has found.
///
/// A list that is taken over for good is resolved as ever, only earlier. One that is a guess goes
/// through `lookahead`: it is recalled ahead, the layer's true choice corrects it, and what was
/// brought in vain is counted.
/// @see Deshmukh, Goyal, Kwatra and Ramjee, "Kascade: A Practical Sparse Attention Method for
///      Long-Context LLM Inference", arXiv:2512.16391; Lee et al., InfiniGen, OSDI 2024
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/batch.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/consensus.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/hot_buffer.hpp"
#include "pulseinfer/store_types.hpp"
#include "pulseinfer/ticket.hpp"
#include "pulseinfer/transfer.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Layers [first, last).
struct layer_range {
  std::int32_t first = 0;
  std::int32_t last = 0;
  bool operator==(const layer_range&) const = default;
};

/// Which layers choose anew. Every other one follows the last anchor before it.
class anchor_plan {
 public:
  /// @param layers   of the model, at least one
  /// @param anchors  ascending, the first of them layer 0
  /// @throws std::invalid_argument  on anchors that are not so
  anchor_plan(std::int32_t layers, std::span<const std::int32_t> anchors) {
    detail::expects(layers > 0, "anchor_plan: layers is ", layers, ", expected at least 1");
    detail::expects(!anchors.empty() && anchors[0] == 0,
                    "anchor_plan: the first anchor is no layer 0, which has none to follow");
    for (std::size_t i = 0; i < anchors.size(); ++i) {
      detail::expects(anchors[i] < layers, "anchor_plan: anchor is layer ", anchors[i],
                      ", expected 0 to ", layers - 1);
      detail::expects(i == 0 || anchors[i] > anchors[i - 1], "anchor_plan: layer ", anchors[i],
                      " follows layer ", i == 0 ? 0 : anchors[i - 1],
                      ", expected ascending anchors");
      while (static_cast<std::int32_t>(anchor_of_.size()) < anchors[i]) {
        anchor_of_.push_back(anchors[i - 1]);
      }
      anchor_of_.push_back(anchors[i]);
    }
    anchor_of_.resize(static_cast<std::size_t>(layers), anchors.back());
  }
  /// An anchor every `stride` layers.
  /// @throws std::invalid_argument  on fewer than one layer, or a stride below 1
  [[nodiscard]] static anchor_plan every(std::int32_t layers, std::int32_t stride) {
    detail::expects(stride > 0, "anchor_plan: the stride is ", stride, ", expected at least 1");
    std::vector<std::int32_t> anchors{0};
    while (layers - anchors.back() > stride) anchors.push_back(anchors.back() + stride);
    return anchor_plan(layers, anchors);
  }

  [[nodiscard]] std::int32_t layers() const noexcept {
    return static_cast<std::int32_t>(anchor_of_.size());
  }
  /// The layer whose list a layer takes, its own where it is an anchor.
  /// @throws std::out_of_range  on a layer out of range; so do the next two
  [[nodiscard]] std::int32_t anchor_of(std::int32_t layer) const {
    detail::expects<std::out_of_range>(layer >= 0 && layer < layers(), "anchor_plan: layer is ",
                                       layer, ", expected 0 to ", layers() - 1);
    return anchor_of_[static_cast<std::size_t>(layer)];
  }
  [[nodiscard]] bool is_anchor(std::int32_t layer) const { return anchor_of(layer) == layer; }
  /// The layers that follow an anchor; none where the layer is no anchor.
  [[nodiscard]] layer_range followers(std::int32_t anchor) const {
    layer_range found{anchor + 1, anchor + 1};
    if (!is_anchor(anchor)) return found;
    while (found.last < layers() && anchor_of(found.last) == anchor) ++found.last;
    return found;
  }

 private:
  std::vector<std::int32_t> anchor_of_;  ///< [layers]
};

/// What became of a guess that was handed in.
enum class [[nodiscard]] announce_outcome : std::uint8_t{
    announced,
    busy,  ///< no step or transfer was to be had, or the layer's last one is still under way;
           ///< nothing was changed
};

/// What became of the wait for a guess.
enum class [[nodiscard]] settle_outcome : std::uint8_t{
    none,        ///< nothing was announced, or it was settled already: resolve
    settled,     ///< the stream waits for what was announced: resolve
    incomplete,  ///< some of it did not come and is forgotten; the rest is there: resolve
    not_yet,  ///< nothing was enqueued: the transfer is pending, or has not ended after a failure
};

/// Recalls guesses ahead, one a layer at a time.
///
/// For each layer: `announce` a list as soon as it is known; go on with the layers before; then, in
/// front of the layer's true `hot_buffer::resolve`, `try_settle` (or `sync_settled`). The true
/// resolve refuses to run while a guess was not settled. Its misses are recalled as ever.
///
/// A guess displaces nothing that the layer's last true choice used, and nothing at all of other
/// layers, whose tables are their own. `hot_buffer::counts` says what guesses brought, and what of
/// it the true choice used. That of a guess which no true choice follows is not counted as wasted.
///
/// @par Threads  one at a time
/// @par Life     hot buffer and transfer engine outlive it
template <backend Backend, class Store>
class lookahead {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// @param hot     made with `predicts`
  /// @param mover   of the same pool
  /// @throws std::invalid_argument  if the hot buffer does not predict
  lookahead(hot_buffer<Backend>& hot, transfer_engine<Backend, Store>& mover)
      : hot_(&hot),
        mover_(&mover),
        guesses_(static_cast<std::size_t>(mover.pool().geometry().layers)) {
    detail::expects(hot.options().predicts,
                    "lookahead: the hot buffer was made without `predicts`");
    for (guess& g : guesses_) {
      g.requests.reserve(static_cast<std::size_t>(hot.options().max_rows));
    }
  }
  lookahead(const lookahead&) = delete;
  lookahead& operator=(const lookahead&) = delete;

  /// Resolves a guess and starts its recall.
  ///
  /// @param layer      in [0, layers of the pool)
  /// @param batch      its device arrays are valid until the stream has got past this call
  /// @param predicted  one list a row, on the device, as `hot_buffer::resolve` takes it
  /// @param sequences  [rows] as `transfer_engine::recall`
  /// @param stream     behind the layer's last attention, which reads the pages
  /// @throws std::logic_error  while the layer has a guess that was not settled
  /// @throws as `hot_buffer::resolve_predicted` and `transfer_engine::recall`; the step is discarded
  /// @par Cost  one kernel, one event and one host task; allocates nothing
  announce_outcome announce(std::int32_t layer, const batch_view& batch, const selection& predicted,
                            std::span<const sequence_id> sequences, stream_ref stream) {
    guess& g = at(layer);
    detail::expects<std::logic_error>(g.is_settled || !g.step, "announce: layer ", layer,
                                      " has a guess that was not settled");
    if (g.step && !release(g, stream)) return announce_outcome::busy;
    const auto step = hot_->resolve_predicted(layer, batch, predicted, stream);
    if (!step) return announce_outcome::busy;
    try {
      auto recalled = mover_->recall(*step, sequences, stream);
      if (!recalled) {
        hot_->discard(*step, batch, stream);
        return announce_outcome::busy;
      }
      (void)g.recalled.emplace(std::move(*recalled));
    } catch (...) {
      hot_->discard(*step, batch, stream);
      throw;
    }
    g.requests.assign(batch.requests.begin(), batch.requests.end());
    g.step = *step;
    g.is_settled = false;
    return announce_outcome::announced;
  }

  /// Announces an anchor's list for the layers that follow it, to be corrected by what they choose.
  /// @return how many were announced; the others are left to their own recalls
  /// @throws std::invalid_argument, and as `announce`
  std::int32_t announce_followers(const anchor_plan& plan, std::int32_t anchor,
                                  const batch_view& batch, const selection& chosen,
                                  std::span<const sequence_id> sequences, stream_ref stream) {
    detail::expects(plan.layers() == static_cast<std::int32_t>(guesses_.size()),
                    "announce_followers: the plan has ", plan.layers(), " layers, the pool ",
                    guesses_.size());
    const layer_range range = plan.followers(anchor);
    std::int32_t announced = 0;
    for (std::int32_t layer = range.first; layer < range.last; ++layer) {
      if (announce(layer, batch, chosen, sequences, stream) == announce_outcome::announced) {
        ++announced;
      }
    }
    return announced;
  }

  /// Makes `stream`, on which the layer's true choice will be resolved, wait for the guess; where
  /// some of it does not come, forgets that. Never blocks.
  ///
  /// A transfer may fail after that, with the stream that waits for it. What resolves next is then
  /// refused (`device_error`); once the stream was synced, this call forgets what did not come.
  /// @throws std::out_of_range  on a layer out of range; so do the others
  settle_outcome try_settle(std::int32_t layer, stream_ref stream) {
    guess& g = at(layer);
    if (!g.step) return settle_outcome::none;
    if (g.is_settled) {
      return is_final(g) && g.step->is_open() ? forget(g, stream) : settle_outcome::none;
    }
    if (g.recalled->enqueue_wait(stream) == wait_outcome::enqueued) {
      if (g.step->is_open()) hot_->mark_settled(*g.step);  // or it has ended, and needs no wait
      g.is_settled = true;
      return settle_outcome::settled;
    }
    if (!is_final(g)) return settle_outcome::not_yet;
    return forget(g, stream);
  }

  /// As `try_settle`, but waits until it can say how it ends. What failed the transfer is not thrown:
  /// the guess is `incomplete`.
  settle_outcome sync_settled(std::int32_t layer, stream_ref stream) {
    settle_outcome outcome = try_settle(layer, stream);
    if (outcome != settle_outcome::not_yet) return outcome;
    guess& g = at(layer);
    g.recalled->sync_submitted();
    outcome = try_settle(layer, stream);
    if (outcome != settle_outcome::not_yet) return outcome;
    sync_ended(layer);
    return try_settle(layer, stream);
  }

  /// Waits until the transfer of the layer's last guess has ended, settled or not. Until then the
  /// pages of its requests cannot be taken back, and the layer's next guess finds it busy.
  void sync_ended(std::int32_t layer) {
    guess& g = at(layer);
    if (!g.recalled) return;
    try {
      g.recalled->sync();
    } catch (const std::exception&) {  // `try_settle` says so
    }
  }

  /// Asks the recall of a guess to stop: another guess is better, or the true choice is known and
  /// shares little with it. It is settled as ever.
  void cancel(std::int32_t layer) {
    guess& g = at(layer);
    if (g.step && !g.is_settled) g.recalled->cancel();
  }

  /// Bytes that guesses brought for a request's layer and its true choices did not use.
  [[nodiscard]] std::int64_t wasted_bytes(std::int32_t layer, std::int32_t request) const {
    return hot_->counts(layer, request).wasted * mover_->store().geometry().unit_bytes();
  }

 private:
  struct guess {
    std::optional<resolved_step> step;
    std::optional<ticket<Backend>> recalled;
    std::vector<std::int32_t> requests;
    bool is_settled = false;
  };

  [[nodiscard]] guess& at(std::int32_t layer) {
    detail::expects<std::out_of_range>(
        layer >= 0 && static_cast<std::size_t>(layer) < guesses_.size(), "lookahead: layer is ",
        layer, ", expected 0 to ", guesses_.size() - 1);
    return guesses_[static_cast<std::size_t>(layer)];
  }
  [[nodiscard]] static bool is_final(const guess& g) noexcept {
    return !g.recalled || g.recalled->is_final();
  }
  /// Ends the ticket of a guess of which not all came, and forgets that. The step is kept: where the
  /// stream had failed nothing is forgotten, and the step is open again.
  settle_outcome forget(guess& g, stream_ref stream) {
    if (g.step->is_open()) hot_->discard(*g.step, {.requests = g.requests}, stream);
    g.recalled.reset();
    g.is_settled = true;
    return settle_outcome::incomplete;
  }
  /// Lets go of a guess that was settled; false while its transfer goes on. One that failed after all,
  /// with the stream that waited for it, is discarded.
  bool release(guess& g, stream_ref stream) {
    if (!is_final(g)) return false;
    if (g.step->is_open()) hot_->discard(*g.step, {.requests = g.requests}, stream);
    g.recalled.reset();
    g.step.reset();
    g.is_settled = false;
    return true;
  }

  hot_buffer<Backend>* hot_;
  transfer_engine<Backend, Store>* mover_;
  std::vector<guess> guesses_;  ///< [layers]
};

}  // namespace pulseinfer
