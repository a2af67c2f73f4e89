// SPDX-License-Identifier: Apache-2.0
/// @file
/// The transfer engine: moves units between the store and the engine's pages, in chunks whose
/// phases overlap.
///
/// Recall (store -> device), for each chunk:
///   host task: gather units into pinned staging | copy stream: one DMA | scatter stream: kernel
///   into the pages
/// Offload (device -> store), the same road back:
///   gather stream: kernel out of the pages | copy stream: one DMA | host task: deal the units out
///   into the store
///
/// The caller's thread checks, records one event and hands over a task. Everything else happens on
/// the backend's workers, one chunk after the other; while one chunk is gathered, the DMA of the
/// one before and the scatter of the one before that are under way. The page ids of a chunk travel
/// in its head, so that one DMA carries all.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/block_store.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/hot_buffer.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/staging_pool.hpp"
#include "pulseinfer/ticket.hpp"

namespace pulseinfer {

/// How a recall moves its units.
enum class transfer_way : std::uint8_t {
  staged,     ///< gather, one DMA a chunk, scatter
  per_block,  ///< one copy for each strip of each unit: what the staged way is measured against
};

/// One unit that the host names: block `block` of sequence `sequences[row]`, and its page.
struct unit_target {
  std::int32_t row = 0;
  std::int32_t block = 0;
  std::int32_t page = 0;
};

struct transfer_options {
  std::int64_t staging_bytes = 64 << 20;  ///< for each direction: pinned, and as much on the device
  std::int64_t chunk_bytes = 4 << 20;     ///< one DMA; at least a unit
  std::int32_t transfers_in_flight = 16;
  std::int32_t max_rows = 64;      ///< rows of a transfer
  std::int64_t max_units = 16384;  ///< units of a transfer
  int scatter_max_ctas =
      0;  ///< what gather and scatter kernels may take of the device (0: no limit)
  transfer_way way = transfer_way::staged;
};

/// Moves units for all layers of one pool.
///
/// Order: a recall's pages are written after everything that `stream` held at the call (the kernels
/// that read them before); an offload reads its pages after the same (the kernels that wrote them).
/// Use of the pages afterwards is ordered by `ticket::enqueue_wait`.
///
/// Errors: a broken precondition throws and changes nothing. A failure later is in the ticket:
/// units say which, the store keeps what it had, and pages of failed units are not ready.
///
/// @par Threads  one at a time may start transfers; tickets are used from anywhere
/// @par Life     backend, store and pool memory outlive the engine; its destructor waits for
/// transfers in flight
/// @par Cost     a call is O(rows) for a step, O(units) for a list, and allocates nothing once the
/// units of a transfer
///               have been as many before
template <backend Backend, class Store>
class transfer_engine {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// @throws std::invalid_argument  naming the option and its limit, or a pool whose geometry is
  /// not the store's
  transfer_engine(Backend backend, Store& store, const kv_pool& pool,
                  const transfer_options& options)
      : backend_(backend),
        store_(&store),
        pool_(pool),
        options_(checked_options(store, pool, options)),
        chunk_units_(std::max<std::int64_t>(1, options.chunk_bytes / store.unit_bytes())),
        head_bytes_(round_up(chunk_units_ * std::int64_t{sizeof(std::int32_t)})),
        in_(backend, chunk_size(), chunk_count()),
        out_(backend, chunk_size(), chunk_count()),
        copy_in_(backend_.make_stream(stream_priority::high)),
        scatter_(backend_.make_stream(stream_priority::high)),
        gather_(backend_.make_stream(stream_priority::high)),
        copy_out_(backend_.make_stream(stream_priority::high)),
        out_jobs_(static_cast<std::size_t>(chunk_count())) {
    for (std::int32_t i = 0; i < options_.transfers_in_flight; ++i) {
      states_.push_back(std::make_unique<state>(backend_, *this));
    }
  }
  transfer_engine(const transfer_engine&) = delete;
  transfer_engine& operator=(const transfer_engine&) = delete;
  ~transfer_engine() {
    backend_.sync_until([this] {
      return std::all_of(states_.begin(), states_.end(),
                         [](const auto& s) { return s->is_final(); });
    });
  }

  [[nodiscard]] const transfer_options& options() const noexcept { return options_; }
  /// Units of a chunk.
  [[nodiscard]] std::int64_t chunk_units() const noexcept { return chunk_units_; }

  /// Recalls the misses of a resolved step into the pages that the step gave them: every row in one
  /// transfer.
  ///
  /// @param sequences  [step.rows] the sequence of each row; read before the call returns
  /// @return empty, with nothing changed, when `transfers_in_flight` transfers are under way or
  /// their tickets held
  /// @throws std::invalid_argument  on a count that does not fit or a stale sequence
  [[nodiscard]] std::optional<ticket<Backend>> recall(const resolved_step& step,
                                                      std::span<const sequence_id> sequences,
                                                      stream_ref stream) {
    detail::expects(step.record != nullptr && step.record->busy.load(std::memory_order_acquire),
                    "recall: the step was not resolved, or has ended");
    detail::expects(sequences.size() == static_cast<std::size_t>(step.rows),
                    "recall: ", sequences.size(), " sequences, the step has ", step.rows, " rows");
    detail::expects(std::int64_t{step.rows} * step.k <= options_.max_units, "recall: the step has ",
                    step.rows, " x ", step.k, " units, expected at most max_units, which is ",
                    options_.max_units);
    state* s = begin(step.layer, sequences);
    if (s == nullptr) return std::nullopt;
    s->step = step.record;
    return start<&transfer_engine::begin_recall>(*s, stream);
  }

  /// Recalls units that the host names into pages that the host names.
  ///
  /// @param units  distinct pages of the pool; read before the call returns
  /// @return as above
  /// @throws std::invalid_argument, std::out_of_range  on a stale sequence, a layer, row, block or
  /// page out of range
  [[nodiscard]] std::optional<ticket<Backend>> recall_units(std::int32_t layer,
                                                            std::span<const sequence_id> sequences,
                                                            std::span<const unit_target> units,
                                                            stream_ref stream) {
    check_units("recall_units", layer, sequences, units);
    state* s = begin(layer, sequences);
    if (s == nullptr) return std::nullopt;
    for (const unit_target& unit : units) {
      s->units.push_back({.source = s->leases[static_cast<std::size_t>(unit.row)].find(unit.block),
                          .page = unit.page});
    }
    return start<&transfer_engine::begin_recall>(*s, stream);
  }

  /// Offloads units: copies their pages into the store. A unit that the store has is `present`; one
  /// for which there is no room is `refused`; the others become readable one by one as their bytes
  /// arrive.
  ///
  /// @param units  pages whose writers stand on `stream` before this call; read before the call
  /// returns
  /// @return, throws  as recall_units
  [[nodiscard]] std::optional<ticket<Backend>> offload(std::int32_t layer,
                                                       std::span<const sequence_id> sequences,
                                                       std::span<const unit_target> units,
                                                       stream_ref stream) {
    check_units("offload", layer, sequences, units);
    state* s = begin(layer, sequences);
    if (s == nullptr) return std::nullopt;
    for (const unit_target& unit : units) {
      const reservation r =
          store_->reserve(sequences[static_cast<std::size_t>(unit.row)], layer, unit.block);
      detail::unit_move move{.page = unit.page};
      if (r.outcome == reserve_outcome::reserved) {
        move.slot = static_cast<std::int32_t>(r.slot);
        move.host = store_->writable(r.slot);
      } else {
        move.status =
            r.outcome == reserve_outcome::exists ? unit_status::present : unit_status::refused;
      }
      s->units.push_back(move);
    }
    s->report.units = static_cast<std::int64_t>(s->units.size());
    for (std::size_t i = 0; i < s->units.size(); ++i) {
      if (s->units[i].host != nullptr) s->order.push_back(static_cast<std::int32_t>(i));
    }
    return start<&transfer_engine::begin_offload>(*s, stream);
  }

 private:
  using chunk = staging_chunk<Backend>;

  /// One transfer. Its host tasks follow each other, so plain members need no lock.
  struct state : detail::ticket_state<Backend>, staging_waiter<Backend> {
    state(Backend b, transfer_engine& e) : detail::ticket_state<Backend>(b), engine(&e) {
      this->units.reserve(static_cast<std::size_t>(e.options_.max_units));
      order.reserve(static_cast<std::size_t>(e.options_.max_units));
      leases.reserve(static_cast<std::size_t>(e.options_.max_rows));
      staging_waiter<Backend>::ready = [](staging_waiter<Backend>& self, chunk& c) noexcept {
        auto& s = static_cast<state&>(self);
        s.engine->with_chunk(s, c);
      };
    }
    transfer_engine* engine;
    bool is_offload = false;
    std::int32_t layer = 0;
    detail::step_record* step = nullptr;
    std::vector<typename Store::lease> leases;
    std::vector<std::int32_t> order;  ///< the units to move
    std::size_t next = 0;     ///< position in `order` of the first unit that is not enqueued
    std::size_t count = 0;    ///< units of the current chunk
    std::int64_t chunks = 0;  ///< chunks enqueued
    chunk* current = nullptr;
    std::atomic<std::int64_t> outstanding{
        0};  ///< offload: chunks not in the store, one more until all are enqueued
  };
  /// An offloaded chunk on its way into the store.
  struct out_job {
    state* owner = nullptr;
    chunk* from = nullptr;
    std::size_t first = 0;
    std::size_t count = 0;
  };

  static transfer_options checked_options(const Store& store, const kv_pool& pool,
                                          const transfer_options& o) {
    const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                          std::int64_t most) {
      detail::expects(value >= least && value <= most, "transfer_engine: ", name, " is ", value,
                      ", expected ", least, " to ", most);
    };
    detail::expects(pool.geometry() == store.geometry(),
                    "transfer_engine: pool and store have different geometries (units of ",
                    pool.layout().unit_bytes(), " and ", store.unit_bytes(), " bytes)");
    check("chunk_bytes", o.chunk_bytes, store.unit_bytes(), std::int64_t{1} << 38);
    check("staging_bytes", o.staging_bytes, 2 * o.chunk_bytes, std::int64_t{1} << 40);
    check("transfers_in_flight", o.transfers_in_flight, 1, 4096);
    check("max_rows", o.max_rows, 1, max_extent);
    check("max_units", o.max_units, 1, 1 << 24);
    check("scatter_max_ctas", o.scatter_max_ctas, 0, 1 << 20);
    return o;
  }
  static std::int64_t round_up(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }
  [[nodiscard]] std::size_t chunk_size() const {
    return static_cast<std::size_t>(round_up(head_bytes_ + chunk_units_ * store_->unit_bytes()));
  }
  [[nodiscard]] std::int32_t chunk_count() const {
    return static_cast<std::int32_t>(
        std::clamp<std::int64_t>(options_.staging_bytes / options_.chunk_bytes, 2, 4096));
  }
  [[nodiscard]] std::size_t unit_size() const noexcept {
    return static_cast<std::size_t>(store_->unit_bytes());
  }

  void check_units(const char* who, std::int32_t layer, std::span<const sequence_id> sequences,
                   std::span<const unit_target> units) const {
    pool_.check_layer(layer);
    detail::expects(units.size() <= static_cast<std::size_t>(options_.max_units), who, ": ",
                    units.size(), " units, expected at most max_units, which is ",
                    options_.max_units);
    for (const unit_target& unit : units) {
      detail::expects<std::out_of_range>(
          unit.row >= 0 && static_cast<std::size_t>(unit.row) < sequences.size(), who, ": row is ",
          unit.row, ", there are ", sequences.size(), " sequences");
      detail::expects<std::out_of_range>(unit.block >= 0 && unit.block < store_->max_blocks(), who,
                                         ": block is ", unit.block, ", expected 0 to ",
                                         store_->max_blocks() - 1);
      pool_.check_page(unit.page);
    }
  }

  /// Takes a state and the leases of its rows; null if none is to be had. All or nothing.
  [[nodiscard]] state* begin(std::int32_t layer, std::span<const sequence_id> sequences) {
    pool_.check_layer(layer);
    detail::expects(sequences.size() <= static_cast<std::size_t>(options_.max_rows),
                    "transfer: ", sequences.size(), " rows, expected at most ", options_.max_rows);
    recover();
    const auto found = std::find_if(states_.begin(), states_.end(), [](const auto& s) {
      return s->is_final() && !s->held.load(std::memory_order_acquire);
    });
    if (found == states_.end()) return nullptr;
    state& s = **found;
    s.leases.clear();
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

  /// Hands the transfer over to the workers.
  template <void (transfer_engine::*First)(state&)>
  [[nodiscard]] ticket<Backend> start(state& s, stream_ref stream) {
    s.is_offload = First == &transfer_engine::begin_offload;
    s.report.requested_ns = backend_.now_ns();
    s.phase.store(transfer_phase::pending, std::memory_order_relaxed);
    s.held.store(true, std::memory_order_relaxed);
    try {
      backend_.record(event_ready(s), stream);
      // What the host names can be gathered at once; a step's misses are known only once it was
      // resolved.
      if (s.step != nullptr) {
        run<First>(s, event_ready(s), 0);
      } else {
        run<First>(s, 0);
      }
    } catch (...) {
      give_up(s, unit_status::failed);
      s.leases.clear();
      s.held.store(false, std::memory_order_relaxed);
      s.phase.store(transfer_phase::done, std::memory_order_release);
      throw;
    }
    return ticket<Backend>(s);
  }
  static typename Backend::event& event_ready(state& s) noexcept {
    return static_cast<detail::ticket_state<Backend>&>(s).ready;
  }

  /// Runs a member as a host task of the transfer, at once or after an event.
  template <void (transfer_engine::*Body)(state&)>
  void run(state& s, std::uint64_t bytes) {
    backend_.host_async({}, task<Body>(s), {bytes});
  }
  template <void (transfer_engine::*Body)(state&)>
  void run(state& s, const typename Backend::event& after, std::uint64_t bytes) {
    const typename Backend::event* events[] = {&after};
    backend_.host_async(events, task<Body>(s), {bytes});
  }
  template <void (transfer_engine::*Body)(state&)>
  static host_task task(state& s) {
    return {[](void* p) noexcept {
              auto& self = *static_cast<state*>(p);
              try {
                (self.engine->*Body)(self);
              } catch (...) {
                self.engine->fail(self, std::current_exception());
              }
            },
            &s};
  }

  // Recall
  // ---------------------------------------------------------------------------------------------------------

  void begin_recall(state& s) {
    s.report.started_ns = backend_.now_ns();
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
    if (options_.way == transfer_way::per_block) {
      copy_each(s);
    } else {
      advance(s);
    }
  }

  /// Reads what the resolve kernel mirrored.
  void collect_misses(state& s) {
    if (backend_.poll(event_ready(s)) == event_state::failed) {
      throw device_error("recall: the work before it on the engine's stream has failed");
    }
    for (std::int32_t row = 0; row < s.step->rows(); ++row) {
      unit_miss* misses = s.step->misses + std::int64_t{row} * s.step->k;
      for (std::int32_t i = 0; i < s.step->miss_counts[row]; ++i) {
        s.units.push_back({.source = s.leases[static_cast<std::size_t>(row)].find(misses[i].block),
                           .page = misses[i].page,
                           .mirrored = &misses[i].status});
      }
    }
  }

  /// Gathers the current chunk, and enqueues its DMA and scatter.
  void gather_chunk(state& s) {
    chunk& c = *s.current;
    auto* pages = reinterpret_cast<std::int32_t*>(c.host);
    std::byte* to = c.host + head_bytes_;
    for (std::size_t i = 0; i < s.count; ++i, to += unit_size()) {
      const detail::unit_move& unit = unit_at(s, s.next + i);
      pages[i] = unit.page;
      gather_into(to, {&unit.source, 1}, store_->unit_bytes());
    }
    const std::size_t payload = s.count * unit_size();
    {
      std::lock_guard lock(enqueue_mutex_);
      backend_.copy_async(c.device, c.host, static_cast<std::size_t>(head_bytes_) + payload,
                          copy_direction::host_to_device, copy_in_);
      backend_.record(c.copied, copy_in_);
      backend_.enqueue_wait(c.copied, scatter_);
      // The pages' readers, on the engine's stream, come first.
      if (s.chunks == 0) backend_.enqueue_wait(event_ready(s), scatter_);
      backend_.for_each({static_cast<std::int64_t>(s.count), pool_.layout().unit_words()},
                        {options_.scatter_max_ctas}, 2 * payload,
                        scatter_units{.layout = pool_.layout(),
                                      .pool = pool_.layer(s.layer),
                                      .pages = reinterpret_cast<const std::int32_t*>(c.device),
                                      .units = c.device + head_bytes_},
                        scatter_);
      backend_.record(c.drained, scatter_);
    }
    chunk_enqueued(s);
    in_.release(c);
    advance(s);
  }

  /// The naive way: one copy for each strip of each unit.
  void copy_each(state& s) {
    std::unique_lock lock(enqueue_mutex_);
    backend_.enqueue_wait(event_ready(s), copy_in_);
    const layer_planes& planes = pool_.layer(s.layer);
    const block_layout& layout = pool_.layout();
    while (s.next < s.order.size()) {
      const detail::unit_move& unit = unit_at(s, s.next);
      copy_span strips[block_layout::strips];
      for (std::int64_t i = 0; i < block_layout::strips; ++i) {
        strips[i] = {planes.plane[i] + layout.page_offset(unit.page),
                     unit.source + i * layout.strip_bytes,
                     static_cast<std::size_t>(layout.strip_bytes)};
      }
      backend_.copy_many_async(strips, copy_direction::host_to_device, copy_in_);
      ++s.next;
    }
    lock.unlock();
    conclude(s);
  }

  void finish_recall(state& s) {
    end_recall(s, backend_.poll(s.pages_usable) == event_state::done);
  }

  void end_recall(state& s, bool arrived) noexcept {
    for (std::size_t i = 0; i < s.next; ++i) {
      unit_at(s, i).status = arrived ? unit_status::moved : unit_status::failed;
    }
    if (!arrived)
      set_error(s, std::make_exception_ptr(device_error("recall: a copy or kernel failed")));
    bool all_moved = true;
    for (const detail::unit_move& unit : s.units) {
      if (unit.mirrored != nullptr) *unit.mirrored = unit.status;
      all_moved = all_moved && unit.status == unit_status::moved;
    }
    // A step with units that did not come stays the engine's to discard.
    if (s.step != nullptr && all_moved && !s.error) {
      s.step->busy.store(false, std::memory_order_release);
    }
    finish(s);
  }

  // Offload
  // --------------------------------------------------------------------------------------------------------

  void begin_offload(state& s) {
    s.report.started_ns = backend_.now_ns();
    s.outstanding.store(1, std::memory_order_relaxed);
    advance(s);
  }

  /// Enqueues the kernel and the DMA that bring the current chunk to the host.
  void gather_out_chunk(state& s) {
    chunk& c = *s.current;
    auto* pages = reinterpret_cast<std::int32_t*>(c.host);
    for (std::size_t i = 0; i < s.count; ++i) pages[i] = unit_at(s, s.next + i).page;
    const std::size_t payload = s.count * unit_size();
    {
      std::lock_guard lock(enqueue_mutex_);
      // The pages' writers, on the engine's stream, come first.
      if (s.chunks == 0) backend_.enqueue_wait(event_ready(s), gather_);
      backend_.for_each(
          {static_cast<std::int64_t>(s.count), pool_.layout().unit_words()},
          {options_.scatter_max_ctas}, 2 * payload,
          gather_units{.layout = pool_.layout(),
                       .pool = pool_.layer(s.layer),
                       .pages = reinterpret_cast<const std::int32_t*>(c.host_on_device),
                       .units = c.device + head_bytes_},
          gather_);
      backend_.record(c.copied, gather_);
      backend_.enqueue_wait(c.copied, copy_out_);
      backend_.copy_async(c.host + head_bytes_, c.device + head_bytes_, payload,
                          copy_direction::device_to_host, copy_out_);
      backend_.record(c.drained, copy_out_);
    }
    out_job& job = out_jobs_[static_cast<std::size_t>(c.index)];
    job = {&s, &c, s.next, s.count};
    const typename Backend::event* after[] = {&c.drained};
    s.outstanding.fetch_add(1, std::memory_order_relaxed);
    try {
      backend_.host_async(after, {&transfer_engine::store_chunk, &job}, {2 * payload});
    } catch (...) {
      s.outstanding.fetch_sub(1, std::memory_order_relaxed);
      throw;
    }
    chunk_enqueued(s);
    advance(s);
  }

  /// Host task: deals a chunk out into the store.
  static void store_chunk(void* p) noexcept {
    const out_job job = *static_cast<out_job*>(p);
    state& s = *job.owner;
    transfer_engine& e = *s.engine;
    const bool arrived = e.backend_.poll(job.from->drained) == event_state::done;
    const std::byte* from = job.from->host + e.head_bytes_;
    for (std::size_t i = 0; i < job.count; ++i, from += e.unit_size()) {
      detail::unit_move& unit = e.unit_at(s, job.first + i);
      if (arrived) {
        scatter_from(from, {&unit.host, 1}, e.store_->unit_bytes());
        e.store_->commit(static_cast<host_slot>(unit.slot));
        unit.status = unit_status::moved;
      } else {
        e.store_->abort(static_cast<host_slot>(unit.slot));
        unit.status = unit_status::failed;
      }
    }
    e.out_.release(*job.from);
    e.leave(s);
  }

  /// The last one to leave an offload ends it.
  void leave(state& s) noexcept {
    if (s.outstanding.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    for (const detail::unit_move& unit : s.units) {
      if (unit.status == unit_status::failed) {
        set_error(s, std::make_exception_ptr(device_error("offload: a copy or kernel failed")));
        break;
      }
    }
    finish(s);
  }

  // Both
  // ----------------------------------------------------------------------------------------------------------

  [[nodiscard]] detail::unit_move& unit_at(state& s, std::size_t position) const noexcept {
    return s.units[static_cast<std::size_t>(s.order[position])];
  }

  /// Goes on with the next chunk as soon as there is one, or concludes.
  void advance(state& s) {
    if (s.next >= s.order.size() || s.cancel.load(std::memory_order_acquire)) {
      conclude(s);
      return;
    }
    auto& pool = s.is_offload ? out_ : in_;
    if (chunk* c = pool.acquire_or_wait(s)) with_chunk(s, *c);
  }

  void with_chunk(state& s, chunk& c) noexcept {
    s.current = &c;
    // The first chunk is small, so that the link starts early; then they grow to their full size.
    const std::int64_t growing = std::max<std::int64_t>(1, chunk_units_ / 8)
                                 << std::min<std::int64_t>(s.chunks, 16);
    s.count = std::min({s.order.size() - s.next, static_cast<std::size_t>(growing),
                        static_cast<std::size_t>(chunk_units_)});
    try {
      if (s.is_offload) {
        run<&transfer_engine::gather_out_chunk>(s, c.drained, 0);
      } else {
        run<&transfer_engine::gather_chunk>(s, c.drained, 2 * s.count * unit_size());
      }
    } catch (...) {
      fail(s, std::current_exception());
    }
  }

  void chunk_enqueued(state& s) noexcept {
    s.next += s.count;
    ++s.chunks;
    s.current = nullptr;
  }

  /// Something threw in a host task. What was enqueued goes on; the rest is given up.
  void fail(state& s, std::exception_ptr error) noexcept {
    set_error(s, error);
    if (s.current != nullptr) {
      // Work of the chunk may be in its streams. It stays ahead of the next user's work there, and
      // what it moves belongs to units that have failed.
      (s.is_offload ? out_ : in_).release(*std::exchange(s.current, nullptr));
    }
    conclude(s);
  }

  /// All device work of the transfer is enqueued, or never will be.
  void conclude(state& s) noexcept {
    if (s.next < s.order.size()) {
      give_up(s, s.error ? unit_status::failed : unit_status::cancelled);
      s.incomplete.store(true, std::memory_order_relaxed);
    }
    bool known = true;  // whether pages_usable tells when the enqueued work is done
    try {
      std::lock_guard lock(enqueue_mutex_);
      backend_.record(s.pages_usable, s.is_offload ? gather_ : way_stream());
    } catch (...) {
      set_error(s, std::current_exception());
      s.incomplete.store(true, std::memory_order_relaxed);
      known = false;
    }
    s.report.submitted_ns = backend_.now_ns();
    s.phase.store(transfer_phase::submitted, std::memory_order_release);
    if (s.is_offload) {
      leave(s);
      return;
    }
    try {
      if (known) {
        run<&transfer_engine::finish_recall>(s, s.pages_usable, 0);
        return;
      }
    } catch (...) {
      set_error(s, std::current_exception());
    }
    end_recall(s, false);
  }

  [[nodiscard]] stream_ref way_stream() noexcept {
    return options_.way == transfer_way::per_block ? copy_in_ : scatter_;
  }

  /// Units that are not enqueued will not be: their status says why, and their slots are free
  /// again.
  void give_up(state& s, unit_status why) noexcept {
    for (std::size_t i = s.next; i < s.order.size(); ++i) {
      detail::unit_move& unit = unit_at(s, i);
      unit.status = why;
      if (unit.slot >= 0) store_->abort(static_cast<host_slot>(unit.slot));
    }
  }

  static void set_error(state& s, std::exception_ptr error) noexcept {
    if (!s.error) s.error = std::move(error);
  }

  /// The last access to the state: behind it the state may serve another transfer.
  void finish(state& s) noexcept {
    bool cancelled = false;
    for (const detail::unit_move& unit : s.units) {
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

  /// After a failure: collects what the library's own streams remember of it, so that it is not
  /// reported to the next transfer. Waits for them once; without a failure it does nothing.
  void recover() {
    if (!failed_.exchange(false, std::memory_order_relaxed)) return;
    for (const stream_ref stream :
         {stream_ref(copy_in_), stream_ref(scatter_), stream_ref(gather_), stream_ref(copy_out_)}) {
      try {
        backend_.sync(stream);
      } catch (const std::exception&) {
        // It is in the ticket of the transfer that it failed.
      }
    }
  }

  Backend backend_;
  Store* store_;
  kv_pool pool_;
  transfer_options options_;
  std::int64_t chunk_units_;
  std::int64_t head_bytes_;  ///< of a chunk: the page ids of its units
  staging_pool<Backend> in_;
  staging_pool<Backend> out_;
  typename Backend::stream copy_in_;
  typename Backend::stream scatter_;
  typename Backend::stream gather_;
  typename Backend::stream copy_out_;
  std::mutex enqueue_mutex_;       ///< one chunk's work stays together in the streams
  std::vector<out_job> out_jobs_;  ///< one a chunk of out_
  std::vector<std::unique_ptr<state>> states_;
  std::atomic<bool> failed_{false};
};

}  // namespace pulseinfer
