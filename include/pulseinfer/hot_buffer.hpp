// SPDX-License-Identifier: Apache-2.0
/// @file
/// The hot buffer: which chosen units are on the device already, which must come, and whose pages
/// they take.
///
/// Consecutive steps choose mostly the same blocks. The engine lends each request some pages; a
/// page is valid in all layers, and each layer keeps its own table of what is in it. `resolve` runs
/// on the device: hits keep their page, misses take the pages that are worth least (never one that this
/// step uses), and the misses alone are mirrored to the host, where the transfer reads them. The
/// host never sees the chosen ids.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pulseinfer/batch.hpp"
#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/consensus.hpp"
#include "pulseinfer/detail/lent_pages.hpp"
#include "pulseinfer/detail/residency_memory.hpp"
#include "pulseinfer/detail/resolve_row.hpp"
#include "pulseinfer/detail/step_ring.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/hot_buffer_types.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/residency.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Device-resident units of all requests and layers.
///
/// @par Threads  one at a time; the records of its steps are read by host tasks
/// @par Life     outlives the transfers of its steps, dropped tickets or not: destroy the transfer
///               engine first. Its streams outlive it
template <backend Backend>
class hot_buffer {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// Blocks until the tables are initialised.
  /// @param backend  the machine of the pool
  /// @param pool     pages that are lent are checked against it; read before the call returns
  /// @param options  sizes
  /// @throws std::invalid_argument  naming the option and its limit
  /// @throws out_of_memory          when the tables cannot be had
  hot_buffer(Backend backend, const kv_pool& pool, const hot_buffer_options& options)
      : backend_(backend),
        layers_(pool.geometry().layers),
        block_tokens_(pool.geometry().block_tokens),
        options_(detail::checked_hot_buffer_options(options, layers_)),
        memory_(backend, layers_, options_),
        lent_pages_(options_.max_requests, pool.layout().pages, options_.budget_blocks,
                    options_.pages_per_request),
        seen_(static_cast<std::size_t>(options_.max_requests)),
        steps_(backend, options_) {}
  hot_buffer(const hot_buffer&) = delete;
  hot_buffer& operator=(const hot_buffer&) = delete;

  [[nodiscard]] const hot_buffer_options& options() const noexcept { return options_; }

  /// Lends pages of the pool to a request, for all layers, and forgets what it had. Enqueued on
  /// `stream`, which the request's next `resolve` is ordered after. Should that stream fail, the
  /// device knows nothing of it: sync the stream, take the pages back, lend them anew.
  ///
  /// @param request  that holds no pages
  /// @param pages    distinct pages of the pool, at least budget_blocks and at most
  ///                 pages_per_request of them, that no request has; host memory, read before the
  ///                 call returns. The engine uses the pages for nothing else until they are back
  /// @param stream   the pages' writers and readers stand on it before this call
  /// @throws std::invalid_argument, std::out_of_range  naming the page or count; nothing is changed
  /// @par Cost  O(pages of the pool) on the host; not for every step
  void lend(std::int32_t request, std::span<const std::int32_t> pages, stream_ref stream) {
    lent_pages_.lend(request, pages);
    try {
      memory_.write_lent(request, lent_pages_.of(request), stream);
    } catch (...) {
      lent_pages_.take_back(request);  // what the device has of it is written anew with the next
      throw;
    }
  }

  /// Takes a request's pages back: `pages_of` no longer lists them, and its tables forget them.
  /// Refuses while a step of the request is in flight. Attention that reads the pages is the
  /// engine's to wait for.
  /// @throws std::out_of_range  on a request out of range
  take_back_outcome try_take_back(std::int32_t request, stream_ref stream) {
    (void)lent_pages_.of(request);
    if (steps_.writes_pages_of(request)) return take_back_outcome::in_use;
    lent_pages_.take_back(request);
    memory_.write_lent(request, lent_pages_.of(request), stream);
    return take_back_outcome::taken;
  }

  /// The pages that a request was lent; valid until they are taken back.
  /// @throws std::out_of_range  on a request out of range
  [[nodiscard]] std::span<const std::int32_t> pages_of(std::int32_t request) const {
    return lent_pages_.of(request);
  }

  /// Resolves the chosen units of a layer: enqueues one kernel on `stream`, after which `pages` and
  /// the mirror hold.
  ///
  /// The next resolve of the same requests and layer is ordered after the recall of this one: the
  /// engine's attention, which waits for the ticket, stands between them. It is refused while this
  /// step was neither recalled nor pulled, or its recall has ended short of a unit: as long as it is
  /// not discarded, what did not come would be taken for a hit.
  ///
  /// @param layer   in [0, layers of the pool)
  /// @param batch   no request twice; its device arrays are valid until the stream has got past this
  ///                call
  /// @param chosen  one list a row (`head_groups` 1), on the device, of blocks that the store has:
  ///                any number of them up to `budget_blocks`, which is its k; none is a step, too
  /// @param stream  the selection stands on it before this call
  /// @return empty when `steps_in_flight` steps have neither ended nor been discarded
  /// @post  the step is in flight until its recall has brought every miss, or it was discarded
  /// @throws std::invalid_argument, std::out_of_range  on a batch, layer or selection that does not
  ///         fit, or a request that was lent no pages; nothing is enqueued, as in the next cases
  /// @throws std::logic_error  while a step of a request in this layer lacks units, see above
  /// @throws device_error  while a step of a request has a discard or pull that failed with its
  ///         stream, or a prediction that was settled and failed afterwards
  /// @par Cost  O(rows) and one kernel; allocates nothing
  [[nodiscard]] std::optional<resolved_step> resolve(std::int32_t layer, const batch_view& batch,
                                                     const selection& chosen, stream_ref stream) {
    steps_.check_settled(layer, batch.requests);
    return begin_step("resolve", layer, batch, chosen, false, stream);
  }

  /// Resolves a guess at what the next true choice of a layer will be, so that it can be recalled
  /// ahead. What of it is resident stays where it is and counts as not used. Misses take pages, but
  /// none that the last true choice of the request and layer used, and none that was brought ahead
  /// since then: where there are no others they are left out, in the page table too.
  ///
  /// The true choice is resolved as ever. Before that the step is settled: its recall has ended, or
  /// the stream waits for it (`mark_settled`), or it was discarded. lookahead.hpp sees to that.
  ///
  /// @param layer      as resolve
  /// @param batch      as resolve
  /// @param predicted  as `chosen` of resolve
  /// @param stream     as resolve, and behind the last true resolve of the layer
  /// @return as resolve
  /// @throws as resolve; std::logic_error unless `hot_buffer_options::predicts`
  [[nodiscard]] std::optional<resolved_step> resolve_predicted(std::int32_t layer,
                                                               const batch_view& batch,
                                                               const selection& predicted,
                                                               stream_ref stream) {
    detail::expects<std::logic_error>(options_.predicts,
                                      "resolve_predicted: made without `predicts`");
    return begin_step("resolve_predicted", layer, batch, predicted, true, stream);
  }

  /// Says that the stream of the next true resolve waits for the recall of a predicted step.
  /// @throws std::logic_error  if the step is not a prediction's, or is another's by now
  void mark_settled(const resolved_step& step) {
    detail::expects<std::logic_error>(
        step.record != nullptr && step.record->generation == step.generation &&
            step.record->predicted,
        "mark_settled: not a predicted step, or one that has ended long ago");
    step.record->settled = true;
  }

  /// What the steps of a request and layer have come to since the hot buffer was made, as far as the
  /// host knows: the device writes the numbers as it goes, one by one.
  /// @throws std::out_of_range  on a layer or request out of range
  /// @par Cost  five loads; no wait
  [[nodiscard]] residency_counts counts(std::int32_t layer, std::int32_t request) const {
    check_layer("counts", layer);
    (void)lent_pages_.of(request);
    return memory_.counts(layer, request);
  }

  /// Holds a step for a layer, so that resolving it can be captured in a graph and replayed: its
  /// addresses stay what they are until it is dropped. It is one of the `steps_in_flight`.
  ///
  /// The host does not know whom a replay resolves. What it checks elsewhere is the engine's to see
  /// to: that a request of a held step has pages, and that they are taken back only when no replay
  /// that resolves it is under way (`try_take_back` cannot tell).
  ///
  /// @param layer  in [0, layers of the pool)
  /// @param rows   in [0, max_rows], the same in every replay
  /// @return empty when `steps_in_flight` steps have neither ended nor been discarded nor dropped
  /// @throws std::out_of_range, std::invalid_argument  on a layer or number of rows out of range
  [[nodiscard]] std::optional<resolved_step> hold_step(std::int32_t layer, std::int32_t rows) {
    check_layer("hold_step", layer);
    detail::expects(rows >= 0 && rows <= options_.max_rows, "hold_step: ", rows,
                    " rows, expected 0 to ", options_.max_rows);
    detail::step_record* record = steps_.take();
    if (record == nullptr) return std::nullopt;
    record->layer = layer;
    record->requests.clear();
    record->predicted = false;
    record->held = true;
    std::fill_n(record->miss_counts, rows, 0);
    record->busy.store(true, std::memory_order_release);
    return step_of(*record, rows);
  }

  /// Resolves the chosen units for a held step: enqueues one kernel and nothing else, and may be
  /// captured. Each run of it resolves what the device arrays hold then, overwriting `pages` and
  /// `misses` of the run before; the misses are pulled (pull.hpp).
  ///
  /// @param step             held
  /// @param device_requests  [step.rows], device memory, none of them twice. A negative one is a row
  ///                         that is not in use: it chooses nothing
  /// @param chosen           as resolve; the host cannot check that its blocks are below
  ///                         `hot_buffer_options::max_blocks`
  /// @param stream           as resolve
  /// @throws std::logic_error, std::invalid_argument  if the step is not held, or the selection
  ///         does not fit
  void resolve_held(const resolved_step& step, const std::int32_t* device_requests,
                    const selection& chosen, stream_ref stream) {
    detail::expects<std::logic_error>(step.is_held(), "resolve_held: the step is not held");
    detail::expects(device_requests != nullptr || step.rows == 0,
                    "resolve_held: the device array of requests is null");
    check_selection("resolve_held", chosen, step.rows);
    enqueue_resolve(*step.record, step.layer, step.rows, device_requests, chosen, stream);
  }

  /// Gives a held step back: its graph is not replayed again.
  /// @pre  no run of it is under way
  /// @throws std::logic_error  if the step is not held
  void drop_step(const resolved_step& step) {
    detail::expects<std::logic_error>(step.is_held(), "drop_step: the step is not held");
    step.record->held = false;
    step.record->busy.store(false, std::memory_order_release);
  }

  /// Forgets the misses of a held step that have not been settled: for a replay that failed on its
  /// way. Sync the stream first, on a failed one nothing is forgotten.
  /// @param step             held
  /// @param device_requests  [step.rows], device memory: those of that replay
  /// @param stream           of the replay
  /// @throws std::logic_error, std::invalid_argument  if the step is not held, or the array null
  void forget_held(const resolved_step& step, const std::int32_t* device_requests,
                   stream_ref stream) {
    detail::expects<std::logic_error>(step.is_held(), "forget_held: the step is not held");
    detail::expects(device_requests != nullptr || step.rows == 0,
                    "forget_held: the device array of requests is null");
    enqueue_forget(step, device_requests, stream);
  }

  /// Settles a step whose misses a kernel on `stream` has pulled: enqueues one kernel that says of
  /// each miss what became of it, and forgets what the store lacked. A step of `resolve` ends once
  /// the stream gets there; a held one goes on. See pull.hpp, which calls it.
  ///
  /// @param step             open and not being recalled, or held
  /// @param device_requests  [step.rows], device memory: those that it was resolved for
  /// @param sources          of the misses, row after row, null for those that did not come; device
  ///                         memory
  /// @param stream           behind the kernel that pulled
  /// @throws std::logic_error  if the step is neither; nothing is enqueued
  void settle_pulled(const resolved_step& step, const std::int32_t* device_requests,
                     const std::byte* const* sources, stream_ref stream) {
    check_pullable("settle_pulled", step);
    backend_.for_each_row(step.rows, {}, 0,
                          detail::settle_misses{.tables = memory_.tables(step.layer),
                                                .requests = device_requests,
                                                .misses = step.record->device_misses,
                                                .miss_counts = step.record->device_miss_counts,
                                                .sources = sources,
                                                .pages = step.record->pages,
                                                .k = step.k},
                          stream);
    if (step.record->held) return;
    steps_.end_behind(*step.record, stream);
    step.record->pulled = true;
  }

  /// Throws unless the misses of a step may be pulled.
  void check_pullable(const char* who, const resolved_step& step) const {
    detail::expects<std::logic_error>(step.is_held() || step.is_open(), who,
                                      ": the step was not resolved, or has ended");
    detail::expects<std::logic_error>(!step.record->is_recalling(), who,
                                      ": the step is being recalled");
  }

  /// Gives up a step whose recall failed, was cancelled, or never took place: units that did not
  /// arrive are forgotten, so that the next resolve misses them again. Enqueued on `stream`.
  ///
  /// After a failure of the engine's own stream, sync it first: on a failed stream nothing is
  /// forgotten. `resolve` then refuses the step's requests until the step is discarded again.
  /// @param step    open
  /// @param batch   its requests are the step's; its device arrays are not looked at
  /// @param stream  what resolves the requests next stands behind this call
  /// @pre  the recall's ticket, if there is one, is final
  /// @throws std::logic_error       if the step has ended, was discarded, or is being recalled
  /// @throws std::invalid_argument  on a batch of other requests, or in another order
  void discard(const resolved_step& step, const batch_view& batch, stream_ref stream) {
    detail::expects<std::logic_error>(step.is_open(),
                                      "discard: the step has ended, or was discarded already");
    detail::expects<std::logic_error>(!step.record->is_recalling(),
                                      "discard: the step's recall is under way");
    detail::expects(batch.rows() == step.rows, "discard: the batch has ", batch.rows(),
                    " rows, the step ", step.rows);
    for (std::size_t row = 0; row < batch.requests.size(); ++row) {
      detail::expects(batch.requests[row] == step.record->requests[row], "discard: row ", row,
                      " of the batch is request ", batch.requests[row], ", of the step request ",
                      step.record->requests[row]);
    }
    enqueue_forget(step, step.record->device_requests, stream);
    steps_.end_behind(*step.record, stream);
    step.record->pulled = false;
  }

 private:
  [[nodiscard]] std::optional<resolved_step> begin_step(const char* who, std::int32_t layer,
                                                        const batch_view& batch,
                                                        const selection& chosen, bool predicted,
                                                        stream_ref stream) {
    check_layer(who, layer);
    detail::check_batch(who, batch, options_.max_rows, options_.max_requests);
    detail::expects(batch.max_tokens / block_tokens_ <= options_.max_blocks, who,
                    ": max_tokens is ", batch.max_tokens, ", the hot buffer knows ",
                    options_.max_blocks, " blocks of ", block_tokens_);
    check_selection(who, chosen, batch.rows());
    ++calls_;
    for (const std::int32_t request : batch.requests) {
      detail::expects(!lent_pages_.of(request).empty(), who, ": request ", request,
                      " was lent no pages");
      std::uint64_t& seen = seen_[static_cast<std::size_t>(request)];
      detail::expects(seen != calls_, who, ": request ", request, " stands twice in the batch");
      seen = calls_;
    }
    steps_.check_complete(who, layer, batch.requests);
    detail::step_record* record = steps_.take();
    if (record == nullptr) return std::nullopt;
    record->layer = layer;
    record->predicted = predicted;
    record->settled = false;
    record->requests.assign(batch.requests.begin(), batch.requests.end());
    std::copy(batch.requests.begin(), batch.requests.end(), record->row_requests);
    // Should the stream have failed, the kernel does not run, and what is discarded is nothing.
    std::fill_n(record->miss_counts, batch.rows(), 0);
    enqueue_resolve(*record, layer, batch.rows(), batch.device_requests, chosen, stream);
    record->busy.store(true, std::memory_order_release);
    return step_of(*record, batch.rows());
  }
  void check_layer(const char* who, std::int32_t layer) const {
    detail::expects<std::out_of_range>(layer >= 0 && layer < layers_, who, ": layer is ", layer,
                                       ", expected 0 to ", layers_ - 1);
  }
  void check_selection(const char* who, const selection& chosen, std::int32_t rows) const {
    detail::expects(chosen.lists == rows && chosen.k == options_.budget_blocks, who,
                    ": the selection is ", chosen.lists, " lists of ", chosen.k, ", expected ",
                    rows, " of ", options_.budget_blocks);
  }

  [[nodiscard]] resolved_step step_of(detail::step_record& record, std::int32_t rows) const {
    resolved_step step;
    step.pages = record.pages;
    step.rows = rows;
    step.k = options_.budget_blocks;
    step.layer = record.layer;
    step.record = &record;
    step.generation = record.generation;
    return step;
  }
  void enqueue_resolve(detail::step_record& record, std::int32_t layer, std::int32_t rows,
                       const std::int32_t* device_requests, const selection& chosen,
                       stream_ref stream) {
    const auto units =
        static_cast<std::uint64_t>(rows) *
        static_cast<std::uint64_t>(options_.budget_blocks + options_.pages_per_request);
    backend_.for_each_row(rows, {}, units * 2 * sizeof(std::int32_t),
                          detail::resolve_row{.tables = memory_.tables(layer),
                                              .requests = device_requests,
                                              .ids = chosen.ids,
                                              .counts = chosen.counts,
                                              .k = options_.budget_blocks,
                                              .pages = record.pages,
                                              .scratch = record.scratch,
                                              .misses = record.device_misses,
                                              .miss_counts = record.device_miss_counts,
                                              .chosen_counts = record.device_chosen_counts,
                                              .ranks = detail::ranks_of(options_),
                                              .predicted = record.predicted},
                          stream);
  }
  void enqueue_forget(const resolved_step& step, const std::int32_t* device_requests,
                      stream_ref stream) {
    backend_.for_each_row(step.rows, {}, 0,
                          detail::forget_misses{.tables = memory_.tables(step.layer),
                                                .requests = device_requests,
                                                .misses = step.record->device_misses,
                                                .miss_counts = step.record->device_miss_counts,
                                                .k = step.k},
                          stream);
  }

  Backend backend_;
  std::int32_t layers_;
  std::int32_t block_tokens_;
  hot_buffer_options options_;
  detail::residency_memory<Backend> memory_;
  detail::lent_pages lent_pages_;
  std::vector<std::uint64_t> seen_;  ///< [requests] the last call that had it in its batch
  std::uint64_t calls_ = 0;
  detail::step_ring<Backend> steps_;
};

}  // namespace pulseinfer
