// SPDX-License-Identifier: Apache-2.0
/// @file
/// The records of the steps that a hot buffer has in flight, with the memory that they mirror into,
/// and what those steps forbid.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/hot_buffer_types.hpp"
#include "pulseinfer/residency.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// A ring of records. One is busy from `take` until its recall has ended well, which a host task
/// says, or until the stream got past `end_behind`.
///
/// @par Threads  one at a time; host tasks end steps beside it
template <backend Backend>
class step_ring {
 public:
  /// @throws out_of_memory  when the mirrors cannot be had
  step_ring(Backend backend, const hot_buffer_options& options)
      : backend_(backend),
        count_(static_cast<std::size_t>(options.steps_in_flight)),
        predicts_(options.predicts),
        pages_(backend, 3 * count_ * row_units(options)),
        misses_(backend, count_ * row_units(options)),
        counts_(backend, 3 * count_ * static_cast<std::size_t>(options.max_rows)),
        records_(std::make_unique<step_record[]>(count_)) {
    for (std::size_t i = 0; i < count_; ++i) {
      step_record& r = records_[i];
      const std::size_t units = i * row_units(options);
      const std::size_t rows = 3 * i * static_cast<std::size_t>(options.max_rows);
      r.k = options.budget_blocks;
      r.requests.reserve(static_cast<std::size_t>(options.max_rows));
      r.misses = misses_.data() + units;
      r.device_misses = misses_.device_data() + units;
      r.miss_counts = counts_.data() + rows;
      r.device_miss_counts = counts_.device_data() + rows;
      r.chosen_counts = r.miss_counts + options.max_rows;
      r.device_chosen_counts = r.device_miss_counts + options.max_rows;
      r.row_requests = r.chosen_counts + options.max_rows;
      r.device_requests = r.device_chosen_counts + options.max_rows;
      r.pages = pages_.data() + 3 * units;
      r.scratch = r.pages + row_units(options);
      ended_.push_back(backend_.make_event());
    }
  }

  /// A record that is not busy, with its next generation, or null.
  [[nodiscard]] step_record* take() {
    for (std::size_t i = 0; i < count_; ++i) {
      const std::size_t at = (next_ + i) % count_;
      if (is_busy(at)) continue;
      next_ = (at + 1) % count_;
      records_[at].discarded = false;
      records_[at].pulled = false;
      records_[at].recall.store(recall_state::none, std::memory_order_relaxed);
      ++records_[at].generation;
      return &records_[at];
    }
    return nullptr;
  }
  /// The last kernel of a step reads the mirror: its record is free again only behind it.
  void end_behind(step_record& record, typename Backend::stream_ref stream) {
    backend_.record(ended_[static_cast<std::size_t>(&record - records_.get())], stream);
    record.discarded = true;
    record.forget_failed = false;
  }

  /// Whether the pages of a request may still be written. Those of a step that was discarded are
  /// not any more; those of one that is pulled are, until its last kernel is done.
  [[nodiscard]] bool writes_pages_of(std::int32_t request) {
    for (std::size_t i = 0; i < count_; ++i) {
      if (!is_busy(i) || (records_[i].discarded && !records_[i].pulled)) continue;
      if (records_[i].has(request)) return true;
    }
    return false;
  }
  /// Throws if what a prediction brings for one of the requests may be on its way to the layer: its
  /// units would be taken for hits.
  void check_settled(std::int32_t layer, std::span<const std::int32_t> requests) {
    for (std::size_t i = 0; predicts_ && i < count_; ++i) {
      const step_record& r = records_[i];
      if (!is_busy(i) || !r.predicted || r.settled || r.discarded || r.layer != layer) continue;
      for (const std::int32_t request : requests) {
        expects<std::logic_error>(!r.has(request), "resolve: request ", request,
                                  " has a predicted step in layer ", layer,
                                  " that was not settled");
      }
    }
  }
  /// Throws if units of one of the requests did not come to the layer, and were not forgotten: they
  /// would be taken for hits. So it is with a step that nobody recalls, one whose recall did not
  /// bring all, and one whose discard has forgotten nothing, because its stream had failed.
  void check_complete(const char* who, std::int32_t layer, std::span<const std::int32_t> requests) {
    for (std::size_t i = 0; i < count_; ++i) {
      const step_record& r = records_[i];
      if (!is_busy(i) || r.held || r.discarded || r.layer != layer || r.is_recalling()) continue;
      for (const std::int32_t request : requests) {
        if (!r.has(request)) continue;
        if (r.forget_failed || (r.predicted && r.settled)) {
          throw device_error(text_of(who, ": request ", request,
                                     " has a step whose transfer, discard or pull failed with its "
                                     "stream; sync the stream, then discard the step"));
        }
        throw std::logic_error(text_of(who, ": request ", request, " has a step in layer ", layer,
                                       " that lacks units; recall it, or discard it"));
      }
    }
  }

 private:
  [[nodiscard]] bool is_busy(std::size_t i) {
    step_record& r = records_[i];
    if (!r.busy.load(std::memory_order_acquire)) return false;
    if (!r.discarded) return true;
    const event_state ended = backend_.poll(ended_[i]);
    if (ended == event_state::done) {
      r.busy.store(false, std::memory_order_release);
      return false;
    }
    if (ended == event_state::failed) {
      r.discarded = false;
      r.forget_failed = true;
    }
    return true;
  }

  [[nodiscard]] static std::size_t row_units(const hot_buffer_options& o) noexcept {
    return static_cast<std::size_t>(o.max_rows) * static_cast<std::size_t>(o.budget_blocks);
  }

  Backend backend_;
  std::size_t count_;
  bool predicts_;
  device_buffer<std::int32_t, Backend> pages_;  ///< pages, then scratch, of every record
  pinned_buffer<unit_miss, Backend> misses_;
  pinned_buffer<std::int32_t, Backend> counts_;
  std::unique_ptr<step_record[]> records_;
  std::vector<typename Backend::event> ended_;  ///< [records]
  std::size_t next_ = 0;
};

}  // namespace pulseinfer::detail
