// SPDX-License-Identifier: Apache-2.0
/// @file
/// Device -> store. For each chunk: one gather kernel, one DMA, and a worker that deals the units
/// out into the store. The engine's pages are free again after the last gather kernel.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>

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
  using typename base::job;
  using typename base::state;
  using typename base::stream_ref;

  offload_pipeline(Backend b, Store& store, const kv_pool& pool, const transfer_options& options)
      : base(b, store, pool, options),
        gather_(b.make_stream(stream_priority::normal)),
        copy_(b.make_stream(stream_priority::normal)) {}
  ~offload_pipeline() { this->sync_all(); }

 private:
  static constexpr stream_priority urgency = stream_priority::normal;  // recalls go first
  static constexpr copy_direction direction = copy_direction::device_to_host;
  static constexpr transfer_way way_ = transfer_way::staged;
  static constexpr std::size_t on_pages = 0;

  /// Whom the store gave room is known at the call.
  [[nodiscard]] std::size_t asked(const state& s) const noexcept { return s.order.size(); }

  void begin(state& s) {
    s.report.started_ns = this->backend_.now_ns();
    // One for each chunk that is not in the store yet, and one until all are enqueued.
    s.outstanding.store(1, std::memory_order_relaxed);
  }

  [[nodiscard]] bool takes_parts(const state&) const noexcept { return false; }
  [[nodiscard]] std::uint64_t host_bytes(const job&, std::size_t) const noexcept { return 0; }

  void prepare(job& j, std::size_t begin, std::size_t count) noexcept {
    auto* const pages = reinterpret_cast<std::int32_t*>(j.at->host + this->shape_.ids_at(j.count));
    for (std::size_t i = begin; i < begin + count; ++i) {
      pages[i] = index_of(j.owner->at(j.first + i).page);
    }
  }

  /// Enqueues the kernel and the DMA that bring a chunk to the host, and the task behind them.
  void move_chunk(job& j) {
    state& s = *j.owner;
    chunk& c = *j.at;
    const std::size_t ids = this->shape_.ids_at(j.count);
    const std::size_t units = this->shape_.units_at();
    const std::size_t payload = j.count * this->unit_size();
    const block_layout& layout = this->pool_->layout();
    {
      auto& b = this->backend_;
      std::lock_guard lock(this->enqueue_mutex_);
      this->wait_for_engine_with_copies(s);
      j.enqueued_ns = b.now_ns();
      b.for_each(
          {static_cast<std::int64_t>(j.count), layout.unit_words()}, {this->options_.max_ctas},
          2 * payload,
          gather_units{.layout = layout,
                       .pool = this->pool_->layer(s.layer),
                       .pages = reinterpret_cast<const std::int32_t*>(c.host_on_device + ids),
                       .units = c.device + units},
          gather_);
      b.record(c.copied, gather_);
      b.enqueue_wait(c.copied, copy_);
      b.copy_async(c.host + units, c.device + units, payload, direction, copy_);
      b.record(c.drained, copy_);
    }
    s.outstanding.fetch_add(1, std::memory_order_relaxed);
    try {
      this->template run<&offload_pipeline::store_chunk>(j, c.drained, 2 * payload);
    } catch (...) {
      s.outstanding.fetch_sub(1, std::memory_order_relaxed);
      throw;
    }
  }

  /// Host task: deals a chunk out into the store.
  void store_chunk(job& j) noexcept {
    state& s = *j.owner;
    const bool ok = this->backend_.poll(j.at->drained) == event_state::done;
    this->leave_link(j, ok);
    if (ok) {
      auto** const to = reinterpret_cast<std::byte**>(j.at->host);
      for (std::size_t i = 0; i < j.count; ++i) to[i] = s.at(j.first + i).host;
      scatter_from(j.at->host + this->shape_.units_at(), {to, j.count}, this->store_->unit_bytes());
    }
    // A unit is readable from its commit on: behind the call, which ends with a fence.
    for (std::size_t first = 0; first < j.count; first += most_units_at_once) {
      host_slot slots[most_units_at_once];
      const std::size_t count = std::min(most_units_at_once, j.count - first);
      for (std::size_t i = 0; i < count; ++i) {
        unit_move& unit = s.at(j.first + first + i);
        unit.status = ok ? unit_status::moved : unit_status::failed;
        slots[i] = unit.slot;
        if (!ok) this->store_->abort(unit.slot);
      }
      if (ok) this->store_->commit(std::span<const host_slot>(slots, count));
    }
    this->release(j);
    leave(s);
  }

  /// A stream that fails behind the last kernel has failed this transfer, not the next one.
  void concluded(state& s, bool known) noexcept {
    if (!known) return leave(s);
    try {
      this->template run<&offload_pipeline::released>(s, s.pages_usable);
    } catch (...) {
      this->fail(s, std::current_exception());
      (void)this->watch(s.pages_usable);
      leave(s);
    }
  }

  void released(state& s) noexcept {
    if (this->backend_.poll(s.pages_usable) == event_state::failed) {
      this->fail(s, "offload: its stream failed");
    }
    leave(s);
  }

  /// The last one to leave an offload ends it.
  void leave(state& s) noexcept {
    if (s.outstanding.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (const unit_move& unit : s.units) {
      if (unit.status != unit_status::failed) continue;
      this->fail(s, "offload: a copy or a kernel failed");
      break;
    }
    this->finish(s);
  }

  [[nodiscard]] std::array<stream_ref, 2> streams() noexcept { return {gather_, copy_}; }

  typename Backend::stream gather_;
  typename Backend::stream copy_;
};

}  // namespace pulseinfer::detail
