// SPDX-License-Identifier: Apache-2.0
/// @file
/// Misses that kernels fetch themselves, from mapped pinned memory, right behind the resolve that
/// found them: nothing comes from the host, so resolve, pull and attention can stand in one graph.
///
/// Three kernels on the engine's stream. The first looks the misses up in the store's table, the
/// second moves their words, the third says of each what became of it. Over PCI Express a kernel
/// keeps up with a DMA only while enough lanes wait for it, and those are lanes that attention does
/// not have: this way is for few misses and short steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/block_store.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/hot_buffer.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/residency.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

namespace detail {

/// Row kernel: makes one list of the misses of all rows, page and source of each.
struct locate_misses {
  const store_view* views;  ///< [rows]
  const unit_miss* misses;  ///< [rows, k]
  const std::int32_t* miss_counts;
  std::int64_t rows;
  std::int64_t k;
  std::int32_t* pages;        ///< [rows * k]
  const std::byte** sources;  ///< [rows * k], null where the store has none
  std::int32_t* total;

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int64_t first = settle_misses::misses_before(miss_counts, row, group);
    const std::int64_t count = miss_counts[row];
    const store_view view = views[row];  // once: it may lie in host memory
    for (std::int64_t i = group.rank(); i < count; i += group.size()) {
      const unit_miss& miss = misses[row * k + i];
      pages[first + i] = miss.page;
      sources[first + i] = view.find(miss.block);
    }
    if (row == rows - 1 && group.rank() == 0) *total = static_cast<std::int32_t>(first + count);
  }
};
static_assert(std::is_trivially_copyable_v<locate_misses>);

}  // namespace detail

/// Sizes of a puller, and what it takes of the device. Of each CTA 4 KiB are on the link at a time:
/// with 1.5 us from request to answer, 16 would be good for some 40 GB/s.
struct puller_options {
  std::int32_t max_rows = 16;       ///< rows of a step
  std::int32_t budget_blocks = 64;  ///< of the hot buffer
  int max_ctas = 16;                ///< of the kernel that moves; 0: no limit
};

/// Pulls the misses of resolved steps into their pages.
///
/// Order: a pull stands on the stream of the resolve, behind it, and what reads the pages stands
/// behind the pull. Nobody is told anything: no ticket, no host task, no event that the host has to
/// see. A unit that the store lacks is `missing` in the step's mirror and out of its page table.
///
/// Errors: a broken precondition throws and enqueues nothing. A kernel that fails later fails its
/// stream. The misses of the step are then `pending`: after a sync `hot_buffer::discard` (of a held
/// step: `forget_held`) forgets them.
///
/// @par Threads  one at a time, on one stream at a time: calls share the list of misses
/// @par Life     store and pool memory outlive the pulls under way; so does the puller
template <backend Backend>
class unit_puller {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// @param b         the machine of store and pool
  /// @param geometry  the store's
  /// @param pool      copied
  /// @param options   sizes
  /// @throws std::invalid_argument  naming the option and its limit, or if the pool's geometry is
  ///                                another
  /// @throws out_of_memory          when the list cannot be had
  unit_puller(Backend b, const kv_geometry& geometry, const kv_pool& pool,
              const puller_options& options)
      : backend_(b),
        pool_(pool),
        options_(checked_options(geometry, pool, options)),
        pages_(b, capacity()),
        sources_(b, capacity()),
        total_(b, 1) {}
  unit_puller(const unit_puller&) = delete;
  unit_puller& operator=(const unit_puller&) = delete;

  [[nodiscard]] const puller_options& options() const noexcept { return options_; }

  /// Enqueues the pull of a step's misses. A step of `resolve` has ended when the stream gets past
  /// it. A held one may be pulled in a capture, and then in every replay.
  ///
  /// @param hot              that resolved the step
  /// @param step             open, or held; its resolve is the last thing on the stream that
  ///                         concerns the step
  /// @param device_requests  [step.rows], device memory: those of the resolve
  /// @param views            [step.rows], of leases on the sequence of each row and the step's
  ///                         layer, in memory that the device can read; empty ones for rows not in
  ///                         use. The leases live until the stream has got past the call, or the
  ///                         last replay; a replay reads what stands in `views` then
  /// @param stream           of the resolve
  /// @throws std::logic_error, std::invalid_argument  on a step that is neither open nor held or
  ///         does not fit, or a null array; nothing is enqueued
  /// @par Cost  three kernels, and for an open step one event; allocates nothing
  void pull(hot_buffer<Backend>& hot, const resolved_step& step,
            const std::int32_t* device_requests, const store_view* views, stream_ref stream) {
    hot.check_pullable("pull", step);
    detail::expects(step.rows <= options_.max_rows && step.k <= options_.budget_blocks,
                    "pull: the step has ", step.rows, " rows of ", step.k, ", expected at most ",
                    options_.max_rows, " of ", options_.budget_blocks);
    detail::expects(step.rows == 0 || (device_requests != nullptr && views != nullptr),
                    "pull: an array of the rows is null");
    const std::int64_t units = std::int64_t{step.rows} * step.k;
    const block_layout& layout = pool_.layout();
    backend_.for_each_row(step.rows, {},
                          static_cast<std::uint64_t>(units) * (sizeof(unit_miss) + 16),
                          detail::locate_misses{.views = views,
                                                .misses = step.record->device_misses,
                                                .miss_counts = step.record->device_miss_counts,
                                                .rows = step.rows,
                                                .k = step.k,
                                                .pages = pages_.data(),
                                                .sources = sources_.data(),
                                                .total = total_.data()},
                          stream);
    if (units > 0) {
      backend_.for_each({units, layout.unit_words(), total_.data()}, {options_.max_ctas},
                        static_cast<std::uint64_t>(units * layout.unit_bytes()),
                        pull_units{.layout = layout,
                                   .pool = pool_.layer(step.layer),
                                   .pages = pages_.data(),
                                   .sources = sources_.data()},
                        stream);
    }
    hot.settle_pulled(step, device_requests, sources_.data(), stream);
  }

 private:
  static puller_options checked_options(const kv_geometry& geometry, const kv_pool& pool,
                                        const puller_options& o) {
    const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                          std::int64_t most) {
      detail::expects(value >= least && value <= most, "unit_puller: ", name, " is ", value,
                      ", expected ", least, " to ", most);
    };
    detail::expects(pool.geometry() == geometry,
                    "unit_puller: pool and store have different geometries (units of ",
                    pool.layout().unit_bytes(), " and ", geometry.unit_bytes(), " bytes)");
    check("max_rows", o.max_rows, 1, max_extent);
    check("budget_blocks", o.budget_blocks, 1, max_extent);
    check("max_rows x budget_blocks", std::int64_t{o.max_rows} * o.budget_blocks, 1, 1 << 24);
    check("max_ctas", o.max_ctas, 0, 1 << 20);
    return o;
  }
  [[nodiscard]] std::size_t capacity() const noexcept {
    return static_cast<std::size_t>(options_.max_rows) *
           static_cast<std::size_t>(options_.budget_blocks);
  }

  Backend backend_;
  kv_pool pool_;
  puller_options options_;
  device_buffer<std::int32_t, Backend> pages_;
  device_buffer<const std::byte*, Backend> sources_;
  device_buffer<std::int32_t, Backend> total_;
};

}  // namespace pulseinfer
