// SPDX-License-Identifier: Apache-2.0
/// @file
/// Prefill over an offloaded prefix: whole layers of blocks stream into the pool, one layer ahead
/// of the computation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/transfer.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What going on to the next layer came to.
enum class [[nodiscard]] prefix_outcome : std::uint8_t{
    ready,       ///< the stream waits for the layer's blocks
    incomplete,  ///< some did not come, `missing` tells which: recompute them. The others are there
    refused,     ///< no transfer was to be had: the layer is still the next. Let others end first
};

/// Streams the first blocks of a sequence through two sets of pages, layer after layer.
///
/// While the engine computes layer l over one set, layer l + 1 is on its way into the other. For
/// each layer, in order: `sync_layer`, then the engine's work on the layer. The recall of layer
/// l + 1 is ordered after what the engine's stream held when layer l was asked for: the work on
/// layer l - 1, which read the same pages.
///
/// @par Threads  one at a time
/// @par Life     mover and store outlive it. Before the pages are used for anything else, every
///               layer has been gone on to, or `sync_dropped` has been called
template <backend Backend, class Store>
class prefix_stream {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// @param mover     outlives the prefix_stream
  /// @param sequence  whose blocks 0 to pages of a set - 1 are streamed
  /// @param layers    layers that will be gone on to, from 0 on
  /// @param even,odd  [blocks] distinct pages each, for layers 0, 2, ... and 1, 3, ...; block i of
  ///                  the sequence goes to page i of a set
  /// @param stream    the engine's; layer 0 starts to travel, ordered after what it holds
  /// @throws std::invalid_argument, std::out_of_range  on sets of different sizes, or as
  ///         recall_units
  prefix_stream(transfer_engine<Backend, Store>& mover, sequence_id sequence, std::int32_t layers,
                std::span<const device_page> even, std::span<const device_page> odd,
                stream_ref stream)
      : mover_(&mover), sequence_(sequence), layers_(layers) {
    detail::expects(even.size() == odd.size(), "prefix_stream: the sets have ", even.size(),
                    " and ", odd.size(), " pages, expected the same");
    detail::expects(layers >= 1 && layers <= mover.pool().geometry().layers,
                    "prefix_stream: layers is ", layers, ", expected 1 to ",
                    mover.pool().geometry().layers);
    pages_[0].assign(even.begin(), even.end());
    pages_[1].assign(odd.begin(), odd.end());
    units_.reserve(even.size());
    begin(0, stream);
  }

  /// Goes on to the next layer: blocks the caller until its recall is submitted, makes `stream`
  /// wait for it, and starts the layer after it. `pages` are then those of the layer.
  /// @param stream  the engine's, one and the same for all layers
  /// @throws std::logic_error  after the last layer
  prefix_outcome sync_layer(stream_ref stream) {
    detail::expects<std::logic_error>(layer_ < layers_, "prefix_stream: all ", layers_,
                                      " layers are through");
    if (!under_way_) begin(layer_, stream);
    if (!under_way_) return prefix_outcome::refused;
    ticket<Backend> arriving = std::move(*under_way_);
    under_way_.reset();
    arriving.sync_submitted();
    const wait_outcome waited = arriving.enqueue_wait(stream);
    missing_.clear();
    if (waited != wait_outcome::enqueued) note_missing(arriving);
    if (++layer_ < layers_) {
      try {
        begin(layer_, stream);
      } catch (const std::exception&) {
        // This layer is there. What is wrong with the next one, its own call will say.
      }
    }
    return waited == wait_outcome::enqueued ? prefix_outcome::ready : prefix_outcome::incomplete;
  }

  /// The pages of the layer gone on to last, block by block.
  [[nodiscard]] std::span<const device_page> pages() const noexcept {
    return pages_[(layer_ + 1) % 2];
  }
  /// Gives up what is left: blocks until the recall under way has ended. The pages are then the
  /// engine's.
  void sync_dropped() {
    layer_ = layers_;
    if (!under_way_) return;
    under_way_->cancel();
    try {
      under_way_->sync();
    } catch (const std::exception&) {
      // Nobody wants the blocks any more.
    }
    under_way_.reset();
  }

  /// Blocks of the layer gone on to last that did not come.
  [[nodiscard]] std::span<const logical_block> missing() const noexcept { return missing_; }

 private:
  void begin(std::int32_t layer, stream_ref stream) {
    const std::vector<device_page>& pages = pages_[layer % 2];
    units_.clear();
    for (std::size_t i = 0; i < pages.size(); ++i) {
      units_.push_back({0, static_cast<logical_block>(i), pages[i]});
    }
    under_way_ = mover_->recall_units(layer, {&sequence_, 1}, units_, stream);
  }
  void note_missing(ticket<Backend>& arriving) {
    try {
      arriving.sync();
    } catch (const std::exception&) {
      // The units say which of them it concerns.
    }
    for (std::size_t i = 0; i < pages_[0].size(); ++i) {
      if (arriving.status(i) != unit_status::moved) {
        missing_.push_back(static_cast<logical_block>(i));
      }
    }
  }

  transfer_engine<Backend, Store>* mover_;
  sequence_id sequence_;
  std::int32_t layers_;
  std::int32_t layer_ = 0;  ///< the next to go on to
  std::vector<device_page> pages_[2];
  std::vector<unit_target> units_;
  std::vector<logical_block> missing_;
  std::optional<ticket<Backend>> under_way_;
};

}  // namespace pulseinfer
