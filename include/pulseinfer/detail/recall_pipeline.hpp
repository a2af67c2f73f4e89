// SPDX-License-Identifier: Apache-2.0
/// @file
/// Store -> device. For each chunk: gather on a worker, one DMA, one scatter kernel. While a chunk
/// is gathered, the DMA of the one before and the scatter of the one before that are under way.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/detail/transfer_pipeline.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

template <backend Backend, class Store>
class recall_pipeline : public transfer_pipeline<recall_pipeline<Backend, Store>, Backend, Store> {
  using base = transfer_pipeline<recall_pipeline, Backend, Store>;
  friend base;

 public:
  using typename base::chunk;
  using typename base::state;
  using typename base::stream_ref;

  recall_pipeline(Backend b, Store& store, const kv_pool& pool, const transfer_options& options)
      : base(b, store, pool, options),
        copy_(b.make_stream(stream_priority::high)),
        scatter_(b.make_stream(stream_priority::high)) {}
  ~recall_pipeline() { this->sync_all(); }

 private:
  void begin(state& s) {
    s.report.started_ns = this->backend_.now_ns();
    if (s.step != nullptr) collect_misses(s);
    s.report.units = static_cast<std::int64_t>(s.units.size());
    for (std::size_t i = 0; i < s.units.size(); ++i) {
      if (s.units[i].source != nullptr) {
        s.order.push_back(static_cast<std::int32_t>(i));
      } else {
        s.units[i].status = unit_status::missing;
        s.incomplete.store(true, std::memory_order_relaxed);
      }
    }
    if (this->options_.way == transfer_way::per_block) {
      copy_each(s);
    } else {
      this->advance(s);
    }
  }

  /// Reads what the resolve kernel mirrored.
  void collect_misses(state& s) {
    if (this->backend_.poll(s.ready) == event_state::failed) {
      throw device_error("recall: the work before it on the engine's stream has failed");
    }
    for (std::int32_t row = 0; row < s.step->rows(); ++row) {
      unit_miss* misses = s.step->misses + std::int64_t{row} * s.step->k;
      const auto& units_of_row = s.leases[static_cast<std::size_t>(row)];
      for (std::int32_t i = 0; i < s.step->miss_counts[row]; ++i) {
        s.units.push_back({.source = units_of_row.find(misses[i].block),
                           .page = misses[i].page,
                           .mirrored = &misses[i].status});
      }
    }
  }

  [[nodiscard]] std::uint64_t host_bytes_of_chunk(const state& s) const noexcept {
    return 2 * s.count * this->unit_size();
  }

  /// Gathers the current chunk, and enqueues its DMA and scatter.
  void move_chunk(state& s) {
    chunk& c = *s.current;
    const auto head = static_cast<std::size_t>(this->shape_.head_bytes);
    auto* pages = reinterpret_cast<std::int32_t*>(c.host);
    std::byte* to = c.host + head;
    for (std::size_t i = 0; i < s.count; ++i, to += this->unit_size()) {
      const unit_move& unit = s.at(s.next + i);
      pages[i] = unit.page;
      gather_into(to, {&unit.source, 1}, this->store_->unit_bytes());
    }
    const std::size_t payload = s.count * this->unit_size();
    const block_layout& layout = this->pool_->layout();
    {
      auto& b = this->backend_;
      std::lock_guard lock(this->enqueue_mutex_);
      b.copy_async(c.device, c.host, head + payload, copy_direction::host_to_device, copy_);
      b.record(c.copied, copy_);
      b.enqueue_wait(c.copied, scatter_);
      // The pages' readers, on the engine's stream, come first.
      if (s.chunks == 0) b.enqueue_wait(s.ready, scatter_);
      b.for_each({static_cast<std::int64_t>(s.count), layout.unit_words()},
                 {this->options_.max_ctas}, 2 * payload,
                 scatter_units{.layout = layout,
                               .pool = this->pool_->layer(s.layer),
                               .pages = reinterpret_cast<const std::int32_t*>(c.device),
                               .units = c.device + head},
                 scatter_);
      b.record(c.drained, scatter_);
    }
    this->chunk_enqueued(s);
    this->staging_.release(c);
    this->advance(s);
  }

  /// The naive way: one copy for each strip of each unit.
  void copy_each(state& s) {
    const block_layout& layout = this->pool_->layout();
    const layer_planes& planes = this->pool_->layer(s.layer);
    {
      std::lock_guard lock(this->enqueue_mutex_);
      this->backend_.enqueue_wait(s.ready, copy_);
      for (; s.next < s.order.size(); ++s.next) {
        const unit_move& unit = s.at(s.next);
        each_strip(
            layout, unit.page,
            [&](std::int32_t p, std::int64_t in_pool, std::int64_t in_unit, std::size_t bytes) {
              this->backend_.copy_async(planes.plane[p] + in_pool, unit.source + in_unit, bytes,
                                        copy_direction::host_to_device, copy_);
            });
      }
    }
    this->conclude(s);
  }

  void concluded(state& s, bool known) noexcept {
    if (!known) return end(s, false);
    try {
      this->template run<&recall_pipeline::arrived>(s, &s.pages_usable, 0);
    } catch (...) {
      this->set_error(s, std::current_exception());
      end(s, this->watch(s.pages_usable));
    }
  }

  void arrived(state& s) { end(s, this->backend_.poll(s.pages_usable) == event_state::done); }

  void end(state& s, bool ok) noexcept {
    for (std::size_t i = 0; i < s.next; ++i) {
      s.at(i).status = ok ? unit_status::moved : unit_status::failed;
    }
    if (!ok) {
      this->set_error(s,
                      std::make_exception_ptr(device_error("recall: a copy or a kernel failed")));
    }
    bool all_moved = true;
    for (const unit_move& unit : s.units) {
      if (unit.mirrored != nullptr) *unit.mirrored = unit.status;
      all_moved = all_moved && unit.status == unit_status::moved;
    }
    // A step with units that did not come stays the engine's to discard.
    if (s.step != nullptr) {
      s.step->recalling.store(false, std::memory_order_release);
      if (all_moved && !s.error) s.step->busy.store(false, std::memory_order_release);
    }
    this->finish(s);
  }

  [[nodiscard]] std::array<stream_ref, 2> streams() noexcept { return {copy_, scatter_}; }
  [[nodiscard]] stream_ref stream_on_pages() noexcept {
    return this->options_.way == transfer_way::staged ? scatter_ : copy_;
  }

  typename Backend::stream copy_;
  typename Backend::stream scatter_;
};

}  // namespace pulseinfer::detail
