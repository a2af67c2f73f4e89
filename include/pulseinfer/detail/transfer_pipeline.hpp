// SPDX-License-Identifier: Apache-2.0
/// @file
/// What recall and offload have in common: how a transfer goes from chunk to chunk as host tasks.
///
/// A transfer asks for chunks as long as it has units to deal out. Chunks go to the transfers in
/// the order in which they asked, or by when they would end (see transfer_options.hpp), and each
/// asks again behind the others: so a small one passes a long one at the next chunk.
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
#include "pulseinfer/detail/pipeline_task.hpp"
#include "pulseinfer/detail/transfer_state.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/staging_pool.hpp"
#include "pulseinfer/ticket.hpp"
#include "pulseinfer/transfer_options.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// The machinery of one direction. `Derived` brings the two ends:
/// - `asked(state)`          units that are to move, as far as the call knows
/// - `begin(state)`          the first host task: fills `order`; chunks are dealt out behind it
/// - `prepare(job, i, n)`    host task with a drained chunk: units [i, i + n) of the chunk
/// - `move_chunk(job)`       when all are prepared: enqueues the chunk's work, and has the chunk
///                           released behind it; where it throws, the chunk is not released
/// - `concluded(state, ok)`  all is enqueued; ok: pages_usable tells when the work is done
/// - `leave(state)`          one of the `outstanding` parts of the transfer is over
/// - `streams()`             its streams, in the order in which chunks pass through them
/// - `on_pages`              which of them the engine waits for to use the pages
/// - `host_bytes(job, n)`     traffic of prepare
/// - `takes_parts(state)`    whether several workers prepare a chunk
/// - `way_`, `urgency`, `direction`  of transfers that are started, their tasks and their copies
template <class Derived, backend Backend, class Store>
class transfer_pipeline {
 public:
  using stream_ref = typename Backend::stream_ref;
  using chunk = staging_chunk<Backend>;
  using lease = typename Store::lease;
  using state = transfer_state<Backend, Derived>;
  using job = chunk_job<Backend, Derived>;

  transfer_pipeline(Backend b, Store& store, const kv_pool& pool, const transfer_options& options)
      : backend_(b),
        store_(&store),
        pool_(&pool),
        options_(options),
        shape_(shape_of_chunk(options, store.unit_bytes())),
        staging_(b, static_cast<std::size_t>(shape_.bytes), chunks_of(options),
                 std::min(options.chunks_in_flight, chunks_of(options))),
        jobs_(static_cast<std::size_t>(staging_.size())) {
    for (std::int32_t i = 0; i < options_.transfers_in_flight; ++i) {
      states_.push_back(std::make_unique<state>(backend_, self(), options_));
    }
  }
  transfer_pipeline(const transfer_pipeline&) = delete;
  transfer_pipeline& operator=(const transfer_pipeline&) = delete;

  [[nodiscard]] const chunk_shape& shape() const noexcept { return shape_; }

  /// Blocks until no transfer is under way and every chunk is back. `Derived`'s destructor calls it
  /// first.
  void sync_all() noexcept {
    const auto is_idle = [this] {
      return std::all_of(states_.begin(), states_.end(),
                         [](const auto& s) { return s->is_final(); }) &&
             staging_.available() == staging_.size();
    };
    while (!is_idle()) {
      try {
        backend_.sync_until(is_idle);
      } catch (...) {
        // A stream has failed; the tasks of its transfers still end them.
        std::this_thread::yield();
      }
    }
  }

  /// Takes a state and the leases of its rows; null if no state is to be had. All or nothing.
  [[nodiscard]] state* take(std::int32_t layer, std::span<const sequence_id> sequences,
                            std::uint64_t lead_ns = 0) {
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
    s.reset();
    s.layer = layer;
    s.lead_ns = lead_ns;
    return &s;
  }

  /// Hands a transfer over to the workers; or throws, with nothing begun.
  [[nodiscard]] ticket<Backend> start(state& s, stream_ref stream) {
    s.report.requested_ns = backend_.now_ns();
    s.report.way = self().way_;
    s.ends_with_pages = Derived::direction == copy_direction::host_to_device && s.step == nullptr;
    s.phase.store(transfer_phase::pending, std::memory_order_relaxed);
    s.held.store(true, std::memory_order_relaxed);
    s.shares = 1;
    s.link.begin(options_.monitor, Derived::direction, self().asked(s) * unit_size());
    try {
      backend_.record(s.ready, stream);
      // What the host names can be gathered at once; a step's misses are known only once the
      // engine's stream has resolved it.
      const typename Backend::event* const resolved = &s.ready;
      backend_.host_async({&resolved, s.step != nullptr ? 1u : 0u},
                          task_of<&transfer_pipeline::deal_out>(s, Derived::urgency), {});
    } catch (...) {
      give_up(s, unit_status::failed);
      s.link.end(s.report);
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
    job* claimed = nullptr;
    {
      std::lock_guard lock(s.mutex);
      s.is_waiting = false;
      if (s.has_more()) claimed = &claim(s, c);
    }
    if (claimed != nullptr) {
      hand_over(*claimed);
    } else {
      staging_.release(c);
    }
    advance(s);
  }

 protected:
  [[nodiscard]] Derived& self() noexcept { return static_cast<Derived&>(*this); }
  [[nodiscard]] std::size_t unit_size() const noexcept {
    return static_cast<std::size_t>(store_->unit_bytes());
  }
  /// Runs a member as a host task after an event: on a chunk, or on a transfer, in which the task
  /// has no share.
  template <auto Body, class Target>
  void run(Target& target, const typename Backend::event& after, std::uint64_t bytes = 0) {
    const typename Backend::event* const event = &after;
    backend_.host_async({&event, 1}, task_of<Body>(target, Derived::urgency), {bytes});
  }

  /// With a share: hands over chunks while there are some, then gives the share up. The first task of
  /// a transfer lists the first chunk itself, if that is all there is to do with it.
  void advance(state& s, bool is_first = false) noexcept {
    for (;; is_first = false) {
      job* claimed = nullptr;
      {
        std::lock_guard lock(s.mutex);
        if (!s.is_waiting && s.has_more()) {
          s.rank = s.rank_of(unit_size(), options_.link_bytes_per_second);
          if (chunk* c = staging_.acquire_or_wait(s)) {
            claimed = &claim(s, *c);
          } else {
            s.is_waiting = true;
            ++s.shares;
          }
        }
        if (claimed == nullptr && --s.shares > 0) return;
      }
      if (claimed == nullptr) return conclude(s);
      if (is_first && (claimed->is_head || only_lists(s)) &&
          backend_.poll(claimed->at->drained) == event_state::done) {
        work_on(*claimed);
      } else {
        hand_over(*claimed);
      }
    }
  }

  /// Something threw. What was enqueued goes on; the rest is given up.
  void fail(state& s, const std::exception_ptr& error) noexcept {
    std::lock_guard lock(s.mutex);
    if (!s.error) s.error = error;
  }
  /// The same in words; where there is no memory for them, that is what it failed with.
  void fail(state& s, const char* what) noexcept {
    try {
      fail(s, std::make_exception_ptr(device_error(what)));
    } catch (...) {
      fail(s, std::current_exception());
    }
  }

  /// A chunk's units will not come; some of their work may be in the streams without the event that
  /// ends it, so whoever gets the chunk next comes behind all of it.
  void drop(job& j, unit_status why) noexcept {
    state& s = *j.owner;
    for (std::size_t i = j.first; i < j.first + j.count; ++i) give_up(s.at(i), why);
    s.link.give_up(j.count * unit_size());
    s.incomplete.store(true, std::memory_order_relaxed);
    if (why == unit_status::failed) fence(*j.at);
    release(j);
  }
  void release(job& j) noexcept {
    under_way_.all -= j.count;
    staging_.release(*j.at);
  }

  /// Stream number `which` comes behind what the engine's stream held at the call. Under the enqueue
  /// mutex, before its first work on the pages.
  void wait_for_engine(state& s, std::size_t which) {
    if ((s.behind_readers >> which & 1) != 0) return;
    backend_.enqueue_wait(s.ready, self().streams()[which]);
    s.behind_readers |= 1u << which;
  }
  /// The same where copies wait, too: a task notes until when, for that is not the link's time. If
  /// none can be had, the copies' times are not known.
  void wait_for_engine_with_copies(state& s) {
    if (s.behind_readers != 0) return;
    wait_for_engine(s, Derived::on_pages);
    if (backend_.poll(s.ready) != event_state::pending) return;
    s.link.wait_for_engine();
    s.outstanding.fetch_add(1, std::memory_order_relaxed);
    try {
      run<&transfer_pipeline::engine_passed>(s, s.ready);
    } catch (...) {
      s.outstanding.fetch_sub(1, std::memory_order_relaxed);
    }
  }

  /// A chunk's copies are through, or have failed. With a part of the transfer outstanding.
  void leave_link(job& j, bool ok) noexcept {
    const std::size_t bytes = j.count * unit_size();
    if (ok) {
      j.owner->link.moved(bytes, j.enqueued_ns, backend_.now_ns());
    } else {
      j.owner->link.give_up(bytes);
    }
  }

  /// Waits on the worker itself, which may poll but not sync; true if the event is done in the end.
  /// For when no host task can be had: ended early, a transfer would have pages used too early.
  [[nodiscard]] bool watch(const typename Backend::event& e) noexcept {
    event_state seen = backend_.poll(e);
    for (; seen == event_state::pending; seen = backend_.poll(e)) std::this_thread::yield();
    return seen == event_state::done;
  }

  /// The last access to the state: behind it the state may serve another transfer.
  void finish(state& s) noexcept {
    const bool cancelled = s.count_moved(store_->unit_bytes());
    s.report.ended_ns = backend_.now_ns();
    s.link.end(s.report);
    s.leases.clear();
    if (s.error) failed_.store(true, std::memory_order_relaxed);
    s.phase.store(s.error     ? transfer_phase::failed
                  : cancelled ? transfer_phase::cancelled
                              : transfer_phase::done,
                  std::memory_order_release);
  }

 private:
  void engine_passed(state& s) noexcept {
    s.link.engine_passed(backend_.now_ns());
    self().leave(s);
  }
  /// Whether a recall's units are read where they lie.
  [[nodiscard]] bool only_lists(const state& s) noexcept {
    return Derived::direction == copy_direction::host_to_device && !self().takes_parts(s);
  }

  /// The next units of the transfer, in a chunk, with a share for whoever works on them.
  [[nodiscard]] job& claim(state& s, chunk& c) noexcept {
    job& j = jobs_[static_cast<std::size_t>(c.index)];
    const auto [units, part] = s.next_cut(shape_, only_lists(s), under_way_.all);
    under_way_.all += units;
    j.claim(s, c, units, self().takes_parts(s) ? part : units);
    ++s.shares;
    return j;
  }

  /// Behind the last part the chunk, and with it the job, may be another transfer's.
  void hand_over(job& j) noexcept {
    const std::size_t parts = j.parts();
    for (std::size_t i = 0; i < parts; ++i) {
      try {
        run<&transfer_pipeline::work_on>(
            j, j.at->drained,
            self().host_bytes(j, std::min(j.part_units, j.count - i * j.part_units)));
      } catch (...) {
        fail(*j.owner, std::current_exception());
        j.is_dropped.store(true, std::memory_order_relaxed);
        return end_parts(j, parts - i);
      }
    }
  }

  /// The first host task of a transfer.
  void deal_out(state& s) noexcept {
    try {
      self().begin(s);
    } catch (...) {
      fail(s, std::current_exception());
    }
    under_way_.not_gathered += s.order.size();
    s.link.resize(s.order.size() * unit_size());
    advance(s, true);
  }

  /// Host task with a drained chunk: prepares a part of it.
  void work_on(job& j) noexcept {
    const std::size_t begin = j.next_part.fetch_add(1, std::memory_order_relaxed) * j.part_units;
    if (!j.owner->cancel.load(std::memory_order_acquire)) {
      self().prepare(j, begin, std::min(j.part_units, j.count - begin));
    }
    end_parts(j, 1);
  }

  /// Whoever ends the last parts of a chunk enqueues it, and has its share in the transfer.
  void end_parts(job& j, std::size_t parts) noexcept {
    if (j.parts_left.fetch_sub(parts, std::memory_order_acq_rel) > parts) return;
    under_way_.not_gathered -= j.count;
    state& s = *j.owner;
    if (j.is_dropped.load(std::memory_order_relaxed)) {
      drop(j, unit_status::failed);
    } else if (s.cancel.load(std::memory_order_acquire)) {
      drop(j, unit_status::cancelled);
    } else {
      try {
        self().move_chunk(j);
      } catch (...) {
        fail(s, std::current_exception());
        drop(j, unit_status::failed);
      }
    }
    advance(s);
  }

  void fence(chunk& c) noexcept {
    try {
      std::lock_guard lock(enqueue_mutex_);
      const auto streams = self().streams();
      for (std::size_t i = 1; i < streams.size(); ++i) {
        backend_.record(c.copied, streams[i - 1]);
        backend_.enqueue_wait(c.copied, streams[i]);
      }
      backend_.record(c.drained, streams.back());
    } catch (...) {
      // Failed twice: the device is lost, and with it the work that the chunk is kept from.
    }
  }

  /// All device work of the transfer is enqueued, or never will be.
  void conclude(state& s) noexcept {
    if (s.next < s.order.size()) {
      under_way_.not_gathered -= s.order.size() - s.next;
      s.link.give_up((s.order.size() - s.next) * unit_size());
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
      backend_.record(s.pages_usable, self().streams()[Derived::on_pages]);
      return true;
    } catch (...) {
      fail(s, std::current_exception());
      return false;
    }
  }

  /// Units that no chunk has will not come: their status says why, and their slots are free.
  void give_up(state& s, unit_status why) noexcept {
    for (; s.next < s.order.size(); ++s.next) give_up(s.at(s.next), why);
  }
  void give_up(unit_move& unit, unit_status why) noexcept {
    if (unit.status == unit_status::corrupt) return;  // it has left the store: that is what to know
    unit.status = why;
    if (unit.slot != host_slot::none) store_->abort(unit.slot);
  }

  /// After a failure: collects what the pipeline's own streams remember of it, so that it is not
  /// reported to the next transfer. Transfers under way end first: a stream that forgets its failure
  /// between two chunks of one would do the second, and all of that transfer would look well.
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

 protected:
  Backend backend_;
  Store* store_;
  const kv_pool* pool_;
  transfer_options options_;
  chunk_shape shape_;
  staging_pool<Backend> staging_;
  std::mutex enqueue_mutex_;  ///< the work of one chunk stays together in the streams
  units_under_way under_way_;

 private:
  std::vector<job> jobs_;  ///< one a chunk
  std::vector<std::unique_ptr<state>> states_;
  std::atomic<bool> failed_{false};
};

}  // namespace pulseinfer::detail
