// SPDX-License-Identifier: Apache-2.0
/// @file
/// Device -> store. For each chunk: one gather kernel, one DMA, and a worker that deals the units
/// out into the store. The engine's pages are free again after the last gather kernel.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <vector>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/detail/transfer_pipeline.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

template <backend Backend, class Store>
class offload_pipeline
    : public transfer_pipeline<offload_pipeline<Backend, Store>, Backend, Store> {
  using base = transfer_pipeline<offload_pipeline, Backend, Store>;
  friend base;

 public:
  using typename base::chunk;
  using typename base::state;
  using typename base::stream_ref;

  offload_pipeline(Backend b, Store& store, const kv_pool& pool, const transfer_options& options)
      : base(b, store, pool, options),
        gather_(b.make_stream(stream_priority::high)),
        copy_(b.make_stream(stream_priority::high)),
        jobs_(static_cast<std::size_t>(this->staging_.size())) {}
  ~offload_pipeline() { this->sync_all(); }

 private:
  /// An offloaded chunk on its way into the store.
  struct store_job {
    offload_pipeline* pipeline = nullptr;
    state* owner = nullptr;
    chunk* from = nullptr;
    std::size_t first = 0;
    std::size_t count = 0;
  };

  void begin(state& s) {
    s.report.started_ns = this->backend_.now_ns();
    // One for each chunk that is not in the store yet, and one until all are enqueued.
    s.outstanding.store(1, std::memory_order_relaxed);
    this->advance(s);
  }

  [[nodiscard]] std::uint64_t host_bytes_of_chunk(const state&) const noexcept { return 0; }

  /// Enqueues the kernel and the DMA that bring the current chunk to the host.
  void move_chunk(state& s) {
    chunk& c = *s.current;
    const auto head = static_cast<std::size_t>(this->shape_.head_bytes);
    auto* pages = reinterpret_cast<std::int32_t*>(c.host);
    for (std::size_t i = 0; i < s.count; ++i) pages[i] = s.at(s.next + i).page;
    const std::size_t payload = s.count * this->unit_size();
    const block_layout& layout = this->pool_->layout();
    {
      auto& b = this->backend_;
      std::lock_guard lock(this->enqueue_mutex_);
      // The pages' writers, on the engine's stream, come first.
      if (s.chunks == 0) b.enqueue_wait(s.ready, gather_);
      b.for_each({static_cast<std::int64_t>(s.count), layout.unit_words()},
                 {this->options_.max_ctas}, 2 * payload,
                 gather_units{.layout = layout,
                              .pool = this->pool_->layer(s.layer),
                              .pages = reinterpret_cast<const std::int32_t*>(c.host_on_device),
                              .units = c.device + head},
                 gather_);
      b.record(c.copied, gather_);
      b.enqueue_wait(c.copied, copy_);
      b.copy_async(c.host + head, c.device + head, payload, copy_direction::device_to_host, copy_);
      b.record(c.drained, copy_);
    }
    store_job& job = jobs_[static_cast<std::size_t>(c.index)];
    job = {this, &s, &c, s.next, s.count};
    const typename Backend::event* after[] = {&c.drained};
    s.outstanding.fetch_add(1, std::memory_order_relaxed);
    try {
      this->backend_.host_async(after, {&offload_pipeline::store_chunk, &job}, {2 * payload});
    } catch (...) {
      s.outstanding.fetch_sub(1, std::memory_order_relaxed);
      throw;
    }
    this->chunk_enqueued(s);
    this->advance(s);
  }

  /// Host task: deals a chunk out into the store.
  static void store_chunk(void* p) noexcept {
    const store_job job = *static_cast<store_job*>(p);
    offload_pipeline& self = *job.pipeline;
    const bool ok = self.backend_.poll(job.from->drained) == event_state::done;
    const std::byte* from = job.from->host + self.shape_.head_bytes;
    for (std::size_t i = 0; i < job.count; ++i, from += self.unit_size()) {
      unit_move& unit = job.owner->at(job.first + i);
      if (ok) {
        scatter_from(from, {&unit.host, 1}, self.store_->unit_bytes());
        self.store_->commit(unit.slot);
        unit.status = unit_status::moved;
      } else {
        self.store_->abort(unit.slot);
        unit.status = unit_status::failed;
      }
    }
    self.staging_.release(*job.from);
    self.leave(*job.owner);
  }

  void concluded(state& s, bool) noexcept { leave(s); }

  /// The last one to leave an offload ends it.
  void leave(state& s) noexcept {
    if (s.outstanding.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (const unit_move& unit : s.units) {
      if (unit.status != unit_status::failed) continue;
      this->set_error(s,
                      std::make_exception_ptr(device_error("offload: a copy or a kernel failed")));
      break;
    }
    this->finish(s);
  }

  [[nodiscard]] std::array<stream_ref, 2> streams() noexcept { return {gather_, copy_}; }
  [[nodiscard]] stream_ref stream_on_pages() noexcept { return gather_; }

  typename Backend::stream gather_;
  typename Backend::stream copy_;
  std::vector<store_job> jobs_;  ///< one a chunk
};

}  // namespace pulseinfer::detail
