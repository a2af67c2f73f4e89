// SPDX-License-Identifier: Apache-2.0
/// @file
/// What recall and offload have in common: the states of their transfers, and how a transfer goes
/// from chunk to chunk as a sequence of host tasks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/hot_buffer.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/staging_pool.hpp"
#include "pulseinfer/ticket.hpp"
#include "pulseinfer/transfer_cost.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// One unit that the host names: block `block` of sequence `sequences[row]`, and its page.
struct unit_target {
  std::int32_t row = 0;
  std::int32_t block = 0;
  std::int32_t page = 0;
};

struct transfer_options {
  std::int64_t staging_bytes = 64 << 20;  ///< a direction: pinned, and as much on the device
  std::int64_t chunk_bytes = 4 << 20;     ///< one DMA; at least a unit
  std::int32_t transfers_in_flight = 16;  ///< a direction
  std::int32_t max_rows = 64;             ///< rows of a transfer
  std::int64_t max_units = 16384;         ///< units of a transfer
  int max_ctas = 0;  ///< what gather and scatter kernels may take of the device (0: no limit)
  transfer_way way = transfer_way::staged;
};

namespace detail {

/// Throws `std::invalid_argument` naming the option and its limit.
inline transfer_options checked_transfer_options(const kv_geometry& store, const kv_pool& pool,
                                                 const transfer_options& o) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
    expects(value >= least && value <= most, "transfer_engine: ", name, " is ", value,
            ", expected ", least, " to ", most);
  };
  expects(pool.geometry() == store,
          "transfer_engine: pool and store have different geometries (units of ",
          pool.layout().unit_bytes(), " and ", store.unit_bytes(), " bytes)");
  check("chunk_bytes", o.chunk_bytes, store.unit_bytes(), std::int64_t{1} << 38);
  check("staging_bytes", o.staging_bytes, 2 * o.chunk_bytes, std::int64_t{1} << 40);
  check("transfers_in_flight", o.transfers_in_flight, 1, 4096);
  check("max_rows", o.max_rows, 1, max_extent);
  check("max_units", o.max_units, 1, 1 << 24);
  check("max_ctas", o.max_ctas, 0, 1 << 20);
  expects(o.way == transfer_way::staged || o.way == transfer_way::per_block,
          "transfer_engine: way is ", static_cast<int>(o.way), ", expected staged or per_block");
  return o;
}

/// A chunk is a head with the page ids of its units, then the units.
struct chunk_shape {
  std::int64_t units = 0;
  std::int64_t head_bytes = 0;
  std::int64_t bytes = 0;
};
[[nodiscard]] inline chunk_shape shape_of_chunk(std::int64_t chunk_bytes, std::int64_t unit_bytes) {
  const auto round_up = [](std::int64_t n) { return (n + 255) / 256 * 256; };
  chunk_shape shape{.units = chunk_bytes / unit_bytes};
  shape.head_bytes = round_up(shape.units * std::int64_t{sizeof(std::int32_t)});
  shape.bytes = round_up(shape.head_bytes + shape.units * unit_bytes);
  return shape;
}

/// One transfer of a pipeline. Its host tasks follow each other, so plain members need no lock.
template <backend Backend, class Pipeline>
struct transfer_state : ticket_state<Backend>, staging_waiter<Backend> {
  transfer_state(Backend b, Pipeline& p, const transfer_options& o)
      : ticket_state<Backend>(b), pipeline(&p) {
    this->units.reserve(static_cast<std::size_t>(o.max_units));
    order.reserve(static_cast<std::size_t>(o.max_units));
    leases.reserve(static_cast<std::size_t>(o.max_rows));
    this->chunk_ready = [](staging_waiter<Backend>& self, staging_chunk<Backend>& c) noexcept {
      auto& s = static_cast<transfer_state&>(self);
      s.pipeline->with_chunk(s, c);
    };
  }

  [[nodiscard]] unit_move& at(std::size_t position) noexcept {
    return this->units[static_cast<std::size_t>(order[position])];
  }

  Pipeline* pipeline;
  std::int32_t layer = 0;
  step_record* step = nullptr;
  std::vector<typename Pipeline::lease> leases;
  std::vector<std::int32_t> order;  ///< the units to move
  std::size_t next = 0;             ///< position in `order` of the first that is not enqueued
  std::size_t count = 0;            ///< units of the current chunk
  std::int64_t chunks = 0;          ///< chunks enqueued
  staging_chunk<Backend>* current = nullptr;
};

/// The machinery of one direction. `Derived` brings the two ends:
/// - `begin(state)`          the first host task: fills `order`, then `advance`s
/// - `move_chunk(state)`     host task with a drained chunk: enqueues its work, then `advance`s
/// - `concluded(state, ok)`  all is enqueued; ok: pages_usable tells when the work is done
/// - `streams()`             its two streams, in the order in which a chunk passes through them
/// - `stream_on_pages()`     the one that works on the engine's pages
template <class Derived, backend Backend, class Store>
class transfer_pipeline {
 public:
  using stream_ref = typename Backend::stream_ref;
  using chunk = staging_chunk<Backend>;
  using lease = typename Store::lease;
  using state = transfer_state<Backend, Derived>;

  transfer_pipeline(Backend b, Store& store, const kv_pool& pool, const transfer_options& options)
      : backend_(b),
        store_(&store),
        pool_(&pool),
        options_(options),
        shape_(shape_of_chunk(options.chunk_bytes, store.unit_bytes())),
        staging_(b, static_cast<std::size_t>(shape_.bytes),
                 static_cast<std::int32_t>(
                     std::min<std::int64_t>(options.staging_bytes / options.chunk_bytes, 4096))) {
    for (std::int32_t i = 0; i < options_.transfers_in_flight; ++i) {
      states_.push_back(std::make_unique<state>(backend_, self(), options_));
    }
  }
  transfer_pipeline(const transfer_pipeline&) = delete;
  transfer_pipeline& operator=(const transfer_pipeline&) = delete;

  [[nodiscard]] const chunk_shape& shape() const noexcept { return shape_; }

  /// Blocks until no transfer is under way. `Derived`'s destructor calls it first.
  void sync_all() noexcept {
    backend_.sync_until([this] {
      return std::all_of(states_.begin(), states_.end(),
                         [](const auto& s) { return s->is_final(); });
    });
  }

  /// Takes a state and the leases of its rows; null if no state is to be had. All or nothing.
  [[nodiscard]] state* take(std::int32_t layer, std::span<const sequence_id> sequences) {
    pool_->check_layer(layer);
    expects(sequences.size() <= static_cast<std::size_t>(options_.max_rows),
            "transfer: ", sequences.size(), " rows, expected at most max_rows, which is ",
            options_.max_rows);
    recover();
    const auto found = std::find_if(states_.begin(), states_.end(), [](const auto& s) {
      return s->is_final() && !s->held.load(std::memory_order_acquire);
    });
    if (found == states_.end()) return nullptr;
    state& s = **found;
    try {
      for (const sequence_id id : sequences) s.leases.push_back(store_->acquire(id, layer));
    } catch (...) {
      s.leases.clear();
      throw;
    }
    s.layer = layer;
    s.step = nullptr;
    s.units.clear();
    s.order.clear();
    s.next = 0;
    s.chunks = 0;
    s.current = nullptr;
    s.error = nullptr;
    s.report = {};
    s.cancel.store(false, std::memory_order_relaxed);
    s.incomplete.store(false, std::memory_order_relaxed);
    return &s;
  }

  /// Hands a transfer over to the workers. Throws, with nothing begun, if that cannot be done.
  [[nodiscard]] ticket<Backend> start(state& s, stream_ref stream) {
    s.report.requested_ns = backend_.now_ns();
    s.phase.store(transfer_phase::pending, std::memory_order_relaxed);
    s.held.store(true, std::memory_order_relaxed);
    try {
      backend_.record(s.ready, stream);
      // What the host names can be gathered at once; a step's misses are known only once the
      // engine's stream has resolved it.
      run<&Derived::begin>(s, s.step != nullptr ? &s.ready : nullptr, 0);
    } catch (...) {
      give_up(s, unit_status::failed);
      s.leases.clear();
      s.held.store(false, std::memory_order_relaxed);
      s.phase.store(transfer_phase::done, std::memory_order_release);
      throw;
    }
    return ticket<Backend>(s);
  }

  /// Gives up a transfer that was taken and will not be started.
  void give_back(state& s) noexcept {
    give_up(s, unit_status::failed);
    s.leases.clear();
  }

  /// Gives a transfer the chunk that it waited for.
  void with_chunk(state& s, chunk& c) noexcept {
    s.current = &c;
    // The first chunk is small, so that the link starts early; then they grow to their full size.
    const std::int64_t growing = std::max<std::int64_t>(1, shape_.units / 8)
                                 << std::min<std::int64_t>(s.chunks, 16);
    s.count = std::min(s.order.size() - s.next,
                       static_cast<std::size_t>(std::min(growing, shape_.units)));
    try {
      run<&Derived::move_chunk>(s, &c.drained, self().host_bytes_of_chunk(s));
    } catch (...) {
      fail(s, std::current_exception());
    }
  }

 protected:
  [[nodiscard]] Derived& self() noexcept { return static_cast<Derived&>(*this); }
  [[nodiscard]] std::size_t unit_size() const noexcept {
    return static_cast<std::size_t>(store_->unit_bytes());
  }

  /// Runs a member as a host task of the transfer, after an event or (null) at once.
  template <void (Derived::*Body)(state&)>
  void run(state& s, const typename Backend::event* after, std::uint64_t bytes) {
    const typename Backend::event* events[] = {after};
    const host_task task{[](void* p) noexcept {
                           auto& t = *static_cast<state*>(p);
                           try {
                             (t.pipeline->*Body)(t);
                           } catch (...) {
                             t.pipeline->fail(t, std::current_exception());
                           }
                         },
                         &s};
    backend_.host_async({events, after == nullptr ? std::size_t{0} : std::size_t{1}}, task,
                        {bytes});
  }

  /// Goes on with the next chunk as soon as there is one, or concludes.
  void advance(state& s) noexcept {
    if (s.next >= s.order.size() || s.cancel.load(std::memory_order_acquire)) {
      conclude(s);
    } else if (chunk* c = staging_.acquire_or_wait(s)) {
      with_chunk(s, *c);
    }
  }

  void chunk_enqueued(state& s) noexcept {
    s.next += s.count;
    ++s.chunks;
    s.current = nullptr;
  }

  /// Something threw in a host task. What was enqueued goes on; the rest is given up.
  void fail(state& s, const std::exception_ptr& error) noexcept {
    set_error(s, error);
    if (s.current != nullptr) {
      chunk& c = *std::exchange(s.current, nullptr);
      fence(c);
      staging_.release(c);
    }
    conclude(s);
  }

  /// Some work of a chunk may be in the streams without the event that ends it: whoever gets the
  /// chunk next comes behind all of it.
  void fence(chunk& c) noexcept {
    try {
      std::lock_guard lock(enqueue_mutex_);
      const auto [first, last] = self().streams();
      backend_.record(c.copied, first);
      backend_.enqueue_wait(c.copied, last);
      backend_.record(c.drained, last);
    } catch (...) {
      // Failed twice: the device is lost, and with it the work that the chunk is kept from.
    }
  }

  /// All device work of the transfer is enqueued, or never will be.
  void conclude(state& s) noexcept {
    if (s.next < s.order.size()) {
      give_up(s, s.error ? unit_status::failed : unit_status::cancelled);
      s.incomplete.store(true, std::memory_order_relaxed);
    }
    // The pages are not to be left while work on them is in the streams: without the event there is
    // no telling, so a second attempt is worth its while.
    const bool known = record_usable(s) || record_usable(s);
    if (s.error) s.incomplete.store(true, std::memory_order_relaxed);
    s.report.submitted_ns = backend_.now_ns();
    s.phase.store(transfer_phase::submitted, std::memory_order_release);
    self().concluded(s, known);
  }

  [[nodiscard]] bool record_usable(state& s) noexcept {
    try {
      std::lock_guard lock(enqueue_mutex_);
      backend_.record(s.pages_usable, self().stream_on_pages());
      return true;
    } catch (...) {
      set_error(s, std::current_exception());
      return false;
    }
  }

  /// Waits on the worker itself, which may poll but not sync; true if the event is done in the end.
  /// For the rare case that no host task can be had: a transfer that ended before its work would
  /// have the engine use pages that are still written.
  [[nodiscard]] bool watch(const typename Backend::event& e) noexcept {
    event_state seen = backend_.poll(e);
    for (; seen == event_state::pending; seen = backend_.poll(e)) std::this_thread::yield();
    return seen == event_state::done;
  }

  /// Units that are not enqueued will not be: their status says why, and their slots are free.
  void give_up(state& s, unit_status why) noexcept {
    for (std::size_t i = s.next; i < s.order.size(); ++i) {
      unit_move& unit = s.at(i);
      unit.status = why;
      if (unit.slot != host_slot::none) store_->abort(unit.slot);
    }
  }

  static void set_error(state& s, const std::exception_ptr& error) noexcept {
    if (!s.error) s.error = error;
  }

  /// The last access to the state: behind it the state may serve another transfer.
  void finish(state& s) noexcept {
    bool cancelled = false;
    for (const unit_move& unit : s.units) {
      if (unit.status == unit_status::moved) ++s.report.moved;
      cancelled = cancelled || unit.status == unit_status::cancelled;
    }
    s.report.bytes = s.report.moved * store_->unit_bytes();
    s.report.ended_ns = backend_.now_ns();
    s.leases.clear();
    if (s.error) failed_.store(true, std::memory_order_relaxed);
    s.phase.store(s.error     ? transfer_phase::failed
                  : cancelled ? transfer_phase::cancelled
                              : transfer_phase::done,
                  std::memory_order_release);
  }

  /// After a failure: collects what the pipeline's own streams remember of it, so that it is not
  /// reported to the next transfer. Without a failure it does nothing.
  ///
  /// Transfers under way end first. A stream that forgets its failure between two chunks of one
  /// would do the second, and all of that transfer would look well.
  void recover() {
    if (!failed_.exchange(false, std::memory_order_relaxed)) return;
    sync_all();
    failed_.store(false, std::memory_order_relaxed);
    for (const stream_ref stream : self().streams()) {
      try {
        backend_.sync(stream);
      } catch (const std::exception&) {
        // It is in the ticket of the transfer that it failed.
      }
    }
  }

  Backend backend_;
  Store* store_;
  const kv_pool* pool_;
  transfer_options options_;
  chunk_shape shape_;
  staging_pool<Backend> staging_;
  std::mutex enqueue_mutex_;  ///< the work of one chunk stays together in the streams
  std::vector<std::unique_ptr<state>> states_;
  std::atomic<bool> failed_{false};
};

}  // namespace detail
}  // namespace pulseinfer
