// SPDX-License-Identifier: Apache-2.0
/// @file
/// The transfer engine: moves units between the store and the engine's pages, both directions, in
/// chunks whose phases overlap. Recalls go one of several ways.
///
/// The caller's thread checks, records one event and hands over a host task. Everything else runs
/// on the backend's workers and on the library's own streams (see detail/recall_pipeline.hpp and
/// detail/offload_pipeline.hpp). The page ids of a chunk travel in its head, so that one DMA
/// carries all of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <span>
#include <utility>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/offload_pipeline.hpp"
#include "pulseinfer/detail/recall_pipeline.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/hot_buffer.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/ticket.hpp"
#include "pulseinfer/transfer_options.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Moves units for all layers of one pool.
///
/// Order: a recall's pages are written after everything that `stream` held at the call (the kernels
/// that read them before); an offload reads its pages after the same (the kernels that wrote them).
/// Use of the pages afterwards is ordered by `ticket::enqueue_wait`, a further recall's too.
///
/// Transfers share the link chunk by chunk; a small one passes a long one at the next chunk. With
/// `link_bytes_per_second` the one that would end first goes first, at each chunk. Recalls go before
/// offloads on the workers and on the device.
///
/// Errors: a broken precondition throws and changes nothing. A failure later is in the ticket:
/// units say which, the store keeps what it had, and the pages of failed units are not ready. After
/// a failure the next call of that direction waits once for the transfers under way and the
/// library's own streams.
///
/// @par Threads  one at a time may start transfers; tickets are used from anywhere
/// @par Life     store, pool memory and the hot buffers whose steps it recalls outlive the engine;
///               its destructor waits for its transfers
/// @par Cost     a call is O(rows) for a step and O(units) for a list; it allocates nothing
template <backend Backend, class Store>
class transfer_engine {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// @param b        the machine of store and pool; its workers run the transfers' host tasks
  /// @param store    outlives the engine
  /// @param pool     copied; its memory outlives the engine
  /// @param options  sizes; staging of both directions is allocated here
  /// @throws std::invalid_argument  naming the option and its limit, or a pool and a store whose
  ///                                geometries differ
  /// @throws out_of_memory          when the staging cannot be had
  transfer_engine(Backend b, Store& store, const kv_pool& pool, const transfer_options& options)
      : store_(&store),
        pool_(pool),
        options_(detail::checked_transfer_options(store.geometry(), pool, options)),
        in_(b, store, pool_, options_),
        out_(b, store, pool_, options_) {}
  transfer_engine(const transfer_engine&) = delete;
  transfer_engine& operator=(const transfer_engine&) = delete;

  [[nodiscard]] const transfer_options& options() const noexcept { return options_; }
  [[nodiscard]] Store& store() const noexcept { return *store_; }
  [[nodiscard]] const kv_pool& pool() const noexcept { return pool_; }
  /// The way of the recalls that are started from here on. Offloads are always staged.
  /// @throws std::invalid_argument  on no way, or on `automatic` without costs; nothing changes
  void set_way(transfer_way way) {
    detail::check_way(way, options_.costs);
    options_.way = way;
    in_.set_way(way);
  }
  /// The plans of the recalls that are started from here on, see `transfer_options::plans`. Waits until
  /// no recall is under way, so not for a step that is still to be resolved. From the thread that starts
  /// transfers.
  void set_plans(chunk_plans plans) {
    in_.set_plans(plans);
    options_.plans = std::move(plans);
  }
  /// Units of a full chunk.
  [[nodiscard]] std::int64_t chunk_units() const noexcept { return in_.shape().units; }

  /// Recalls the misses of a resolved step into the pages that the step gave them: every row in one
  /// transfer. Where all arrive the step has ended; otherwise the hot buffer's `discard` ends it.
  ///
  /// @param step       resolved, and neither recalled nor discarded
  /// @param sequences  [step.rows] the sequence of each row; host memory, read before the call
  ///                   returns
  /// @param stream     the one that the step was resolved on, or one ordered after it; the pages'
  ///                   readers stand on it before this call
  /// @return empty, with nothing changed, when `transfers_in_flight` recalls are under way or their
  ///         tickets are still held
  /// @throws std::invalid_argument  on a count that does not fit, or a stale sequence
  [[nodiscard]] std::optional<ticket<Backend>> recall(const resolved_step& step,
                                                      std::span<const sequence_id> sequences,
                                                      stream_ref stream) {
    return recall(step, sequences, 0, stream);
  }
  /// The same, ahead of need: nobody waits for it before so many ns have gone by. Those that are
  /// needed now go before it, see `transfer_options::link_bytes_per_second`.
  [[nodiscard]] std::optional<ticket<Backend>> recall(const resolved_step& step,
                                                      std::span<const sequence_id> sequences,
                                                      std::uint64_t lead_ns, stream_ref stream) {
    detail::expects(step.is_open(), "recall: the step was not resolved, or has ended");
    const detail::recall_state before = step.record->recall.load(std::memory_order_acquire);
    detail::expects(before != detail::recall_state::under_way,
                    "recall: the step is being recalled already");
    detail::expects(sequences.size() == static_cast<std::size_t>(step.rows),
                    "recall: ", sequences.size(), " sequences, the step has ", step.rows, " rows");
    detail::expects(std::int64_t{step.rows} * step.k <= options_.max_units, "recall: the step has ",
                    step.rows, " x ", step.k, " units, expected at most max_units, which is ",
                    options_.max_units);
    auto* s = in_.take(step.layer, sequences, lead_ns);
    if (s == nullptr) return std::nullopt;
    s->step = step.record;
    step.record->recall.store(detail::recall_state::under_way, std::memory_order_relaxed);
    try {
      return in_.start(*s, stream);
    } catch (...) {
      step.record->recall.store(before, std::memory_order_relaxed);
      throw;
    }
  }

  /// Recalls units that the host names into pages that the host names.
  ///
  /// @param layer      in [0, layers of the pool)
  /// @param sequences  [rows]; host memory, read before the call returns
  /// @param units      each a row of `sequences`, a block of it and a distinct page id of the pool;
  ///                   host memory, read before the call returns
  /// @param stream     the pages' readers stand on it before this call
  /// @return as above. A block that the store lacks is `missing`, one whose bytes do not match their
  ///         tag (see integrity.hpp) is `corrupt`; the others come
  /// @throws std::invalid_argument, std::out_of_range  on a stale sequence, or a layer, row, block
  ///         or page out of range
  [[nodiscard]] std::optional<ticket<Backend>> recall_units(std::int32_t layer,
                                                            std::span<const sequence_id> sequences,
                                                            std::span<const unit_target> units,
                                                            stream_ref stream) {
    return recall_units(layer, sequences, units, 0, stream);
  }
  /// The same, ahead of need: nobody waits for it before so many ns have gone by. Those that are
  /// needed now go before it, see `transfer_options::link_bytes_per_second`.
  [[nodiscard]] std::optional<ticket<Backend>> recall_units(std::int32_t layer,
                                                            std::span<const sequence_id> sequences,
                                                            std::span<const unit_target> units,
                                                            std::uint64_t lead_ns,
                                                            stream_ref stream) {
    check_units("recall_units", layer, sequences, units);
    auto* s = in_.take(layer, sequences, lead_ns);
    if (s == nullptr) return std::nullopt;
    s->targets.assign(units.begin(), units.end());  // a worker looks them up
    return in_.start(*s, stream);
  }

  /// Offloads units: copies their pages into the store. A unit that the store has is `present`, one
  /// that another transfer writes is `being_written`, one for which there is no room is `refused`,
  /// one that the store's filter keeps out `not_admitted`; the others become readable as their bytes
  /// arrive.
  ///
  /// @param layer      as recall_units
  /// @param sequences  as recall_units
  /// @param units      as recall_units
  /// @param stream     the pages' writers stand on it before this call
  /// @return as recall_units; `enqueue_wait` then waits until the pages were read, not until the
  ///         bytes are in the store
  /// @throws std::invalid_argument, std::out_of_range  as recall_units
  [[nodiscard]] std::optional<ticket<Backend>> offload(std::int32_t layer,
                                                       std::span<const sequence_id> sequences,
                                                       std::span<const unit_target> units,
                                                       stream_ref stream) {
    check_units("offload", layer, sequences, units);
    auto* s = out_.take(layer, sequences);
    if (s == nullptr) return std::nullopt;
    try {
      reserve(*s, sequences, units);
    } catch (...) {
      out_.give_back(*s);  // a sequence was closed meanwhile: its slots, and all others, go back
      throw;
    }
    s->report.units = static_cast<std::int64_t>(s->units.size());
    return out_.start(*s, stream);
  }

 private:
  using offload_state = typename detail::offload_pipeline<Backend, Store>::state;

  /// Asks the store for all units, runs of a row at once.
  void reserve(offload_state& s, std::span<const sequence_id> sequences,
               std::span<const unit_target> units) {
    logical_block blocks[detail::most_units_at_once];
    reservation got[detail::most_units_at_once];
    for (std::size_t first = 0; first < units.size();) {
      const std::int32_t row = units[first].row;
      std::size_t count = 0;
      for (; count < std::size(blocks) && first + count < units.size(); ++count) {
        if (units[first + count].row != row) break;
        blocks[count] = units[first + count].block;
      }
      store_->reserve(sequences[static_cast<std::size_t>(row)], s.layer,
                      std::span<const logical_block>(blocks, count), got);
      for (std::size_t i = 0; i < count; ++i) note(s, units[first + i], got[i]);
      first += count;
    }
  }
  static void note(offload_state& s, const unit_target& unit, const reservation& r) {
    detail::unit_move move{.host = r.bytes, .page = unit.page, .slot = r.slot};
    switch (r.outcome) {
      case reserve_outcome::reserved:
        s.order.push_back(static_cast<std::int32_t>(s.units.size()));
        break;
      case reserve_outcome::exists:
        move.status = unit_status::present;
        break;
      case reserve_outcome::writing:
        move.status = unit_status::being_written;
        break;
      case reserve_outcome::full:
        move.status = unit_status::refused;
        break;
      case reserve_outcome::not_admitted:
        move.status = unit_status::not_admitted;
        break;
    }
    s.units.push_back(move);
  }

  void check_units(const char* who, std::int32_t layer, std::span<const sequence_id> sequences,
                   std::span<const unit_target> units) const {
    pool_.check_layer(layer);
    detail::expects(units.size() <= static_cast<std::size_t>(options_.max_units), who, ": ",
                    units.size(), " units, expected at most max_units, which is ",
                    options_.max_units);
    // Almost always all are in range: looked at without a branch, as the caller waits for this.
    const auto rows = static_cast<std::uint32_t>(sequences.size());
    const auto blocks = static_cast<std::uint32_t>(store_->max_blocks());
    const auto pages = static_cast<std::uint64_t>(pool_.layout().pages);
    bool in_range = true;
    for (const unit_target& unit : units) {
      in_range &= static_cast<std::uint32_t>(unit.row) < rows;
      in_range &= static_cast<std::uint32_t>(index_of(unit.block)) < blocks;
      in_range &= static_cast<std::uint64_t>(std::int64_t{index_of(unit.page)}) < pages;
    }
    if (in_range) return;
    for (const unit_target& unit : units) {
      detail::expects<std::out_of_range>(
          unit.row >= 0 && static_cast<std::size_t>(unit.row) < sequences.size(), who, ": row is ",
          unit.row, ", there are ", sequences.size(), " sequences");
      detail::expects<std::out_of_range>(
          index_of(unit.block) >= 0 && index_of(unit.block) < store_->max_blocks(), who,
          ": block is ", index_of(unit.block), ", expected 0 to ", store_->max_blocks() - 1);
      pool_.check_page(index_of(unit.page));
    }
  }

  Store* store_;
  kv_pool pool_;
  transfer_options options_;
  detail::recall_pipeline<Backend, Store> in_;
  detail::offload_pipeline<Backend, Store> out_;
};

}  // namespace pulseinfer
