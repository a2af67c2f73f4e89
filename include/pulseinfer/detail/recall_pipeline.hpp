// SPDX-License-Identifier: Apache-2.0
/// @file
/// Store -> device. Staged, a chunk is gathered on a worker, moved by one DMA, and scattered by one
/// kernel: while one chunk is gathered, the DMA of the one before and the scatter of the one before
/// that are under way. The other ways read the store's memory themselves.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <mutex>
#include <vector>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/detail/strip_runs.hpp"
#include "pulseinfer/detail/transfer_pipeline.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

template <backend Backend, class Store>
class recall_pipeline : public transfer_pipeline<recall_pipeline<Backend, Store>, Backend, Store> {
  using base = transfer_pipeline<recall_pipeline, Backend, Store>;
  friend base;

 public:
  using typename base::chunk;
  using typename base::job;
  using typename base::state;
  using typename base::stream_ref;

  recall_pipeline(Backend b, Store& store, const kv_pool& pool, const transfer_options& options)
      : base(b, store, pool, options),
        copy_(b.make_stream(stream_priority::high)),
        scatter_{b.make_stream(stream_priority::high), b.make_stream(stream_priority::high)},
        pages_(b.make_stream(stream_priority::high)),
        stores_(stores_for_ring(options.staging_bytes)),
        strips_(strips_of(pool)),
        way_(options.way) {}
  ~recall_pipeline() { this->sync_all(); }

  /// The way of the transfers that are started from here on.
  void set_way(transfer_way way) noexcept { way_ = way; }
  void set_plans(const chunk_plans& plans) {
    this->sync_all();  // first tasks read the old ones
    this->options_.plans = plans;
  }

 private:
  static constexpr stream_priority urgency = stream_priority::high;  // an engine waits for it
  static constexpr copy_direction direction = copy_direction::host_to_device;
  static constexpr std::size_t on_pages = 3;
  static constexpr bool in_turn = !requires { requires Backend::starts_kernels_at_once; };

  /// Of a step it is not known at the call how many units it lacks: as many, it is taken, as the
  /// step before. Before the first one, all that it chose.
  [[nodiscard]] std::size_t asked(const state& s) const noexcept {
    if (s.step == nullptr) return s.targets.size();
    return std::min(as_size(std::int64_t{s.step->rows()} * s.step->k),
                    last_misses_.load(std::memory_order_relaxed));
  }

  void begin(state& s) {
    s.report.started_ns = this->backend_.now_ns();
    // One for each chunk whose copies are not through, and one until all are enqueued and done.
    s.outstanding.store(1, std::memory_order_relaxed);
    if (s.step != nullptr) {
      collect_misses(s);
    } else {
      for (const unit_target& unit : s.targets) {
        s.units.push_back({.page = unit.page, .row = unit.row, .block = unit.block});
      }
    }
    find_sources(s);
    s.report.units = static_cast<std::int64_t>(s.units.size());
    for (std::size_t i = 0; i < s.units.size(); ++i) {
      if (s.units[i].source != nullptr) {
        s.order.push_back(static_cast<std::int32_t>(i));
      } else {
        s.units[i].status = unit_status::missing;
        s.incomplete.store(true, std::memory_order_relaxed);
      }
    }
    if (s.report.way == transfer_way::automatic) choose_way(s);
    if (s.report.way == transfer_way::staged) plan(s);
    s.store_on_device = nullptr;
    if (s.report.way == transfer_way::pull) s.store_on_device = this->store_->device_payload();
  }

  void choose_way(state& s) const {
    const auto units = static_cast<std::int64_t>(s.order.size());
    s.report.way = transfer_way::staged;
    if (units == 0) return;
    const way_choice chosen = this->options_.costs->cheapest(
        {.units = units, .pieces = units * strips_, .bytes = units * this->store_->unit_bytes()});
    s.report.way = chosen.way;
    s.report.predicted_seconds = chosen.seconds;
  }
  /// Who finds little under way goes by a plan; without one, the first units are worth a copy each
  /// where the link would rest until the first chunk is gathered.
  void plan(state& s) const {
    const std::size_t all = s.order.size();
    if (all < 2 || this->options_.chunks_in_flight < 2 || !this->store_->is_ready()) return;
    if (this->backend_.poll(s.ready) != event_state::done) return;
    const bool is_alone = this->staging_.available() == this->staging_.size();
    // What has been gathered, or nearly, leaves the workers to this one, and the link before long.
    const bool is_late = this->under_way_.not_gathered > all / 10 || this->under_way_.all > all;
    if (!is_alone && is_late) return;
    const std::size_t copies = as_size(this->options_.head_copies / strips_);
    if (const chunk_plan* const found = this->options_.plans.find(all)) {
      s.plan = *found;
      s.report.planned = true;
      // The link has something to do already: so much less of a head.
      const auto before = this->under_way_.before_link(this->backend_.now_ns(), units_per_ns());
      s.head = found->head_of(all) - std::min(found->head_of(all), before);
    } else if (is_alone && copies > 0) {
      s.head = std::clamp<std::size_t>(all / 6, 1, copies);
    }
    s.head = std::min(s.head, as_size(this->shape_.units));
  }
  /// Of the link; 0: not known.
  [[nodiscard]] double units_per_ns() const noexcept {
    return 1e-9 * this->options_.link_bytes_per_second / static_cast<double>(this->unit_size());
  }
  void note_copies(const job& j) noexcept {
    const double takes_ns = std::min(static_cast<double>(j.count) / units_per_ns(), 1e15);
    if (units_per_ns() > 0) this->under_way_.enqueued(j.enqueued_ns, std::uint64_t(takes_ns));
  }

  /// Reads what the resolve kernel mirrored.
  void collect_misses(state& s) {
    if (this->backend_.poll(s.ready) != event_state::done) {  // or it cannot be asked any more
      throw device_error("recall: the work before it on the engine's stream has failed");
    }
    for (std::int32_t row = 0; row < s.step->rows(); ++row) {
      unit_miss* misses = s.step->misses + std::int64_t{row} * s.step->k;
      for (std::int32_t i = 0; i < s.step->miss_counts[row]; ++i) {
        s.units.push_back({.page = device_page{misses[i].page},
                           .row = row,
                           .block = logical_block{misses[i].block},
                           .mirrored = &misses[i].status});
      }
    }
    last_misses_.store(s.units.size(), std::memory_order_relaxed);
  }

  /// Looks the units up, runs of a row at once, while the memory of the next run is on its way.
  static void find_sources(state& s) {
    logical_block runs[2][most_units_at_once];
    const std::byte* found[most_units_at_once];
    const auto lease_at = [&](std::size_t i) -> auto& {
      return s.leases[static_cast<std::size_t>(s.units[i].row)];
    };
    const auto take_run = [&](std::size_t first, logical_block* to) {
      std::size_t count = 0;
      for (; count < most_units_at_once && first + count < s.units.size(); ++count) {
        if (s.units[first + count].row != s.units[first].row) break;
        to[count] = s.units[first + count].block;
      }
      if (count > 0) lease_at(first).prefetch({to, count});
      return count;
    };
    std::size_t count = take_run(0, runs[0]);
    for (std::size_t first = 0, run = 0; count > 0; ++run) {
      const std::size_t next = take_run(first + count, runs[(run + 1) % 2]);
      lease_at(first).find({runs[run % 2], count}, found);
      for (std::size_t i = 0; i < count; ++i) s.units[first + i].source = found[i];
      first += count;
      count = next;
    }
  }

  [[nodiscard]] bool takes_parts(const state& s) const noexcept {
    return s.report.way == transfer_way::staged;
  }
  [[nodiscard]] bool is_gathered(const job& j) const noexcept {
    return takes_parts(*j.owner) && !j.is_head;
  }
  [[nodiscard]] std::uint64_t host_bytes(const job& j, std::size_t units) const noexcept {
    return is_gathered(j) ? 2 * units * this->unit_size() : 0;
  }

  /// Gathers a part of a chunk, or lists where its units lie; and looks whether they are what was
  /// stored.
  void prepare(job& j, std::size_t begin, std::size_t count) noexcept {
    state& s = *j.owner;
    const chunk_shape& shape = this->shape_;
    auto** const sources = reinterpret_cast<const std::byte**>(j.at->host) + begin;
    auto* const pages = reinterpret_cast<std::int32_t*>(j.at->host + shape.ids_at(j.count)) + begin;
    std::byte* const gathered = j.at->host + shape.units_at() + begin * this->unit_size();
    for (std::size_t i = 0; i < count; ++i) {
      const unit_move& unit = s.at(j.first + begin + i);
      pages[i] = index_of(unit.page);
      sources[i] = unit.source;
    }
    const bool staged = is_gathered(j);
    const std::byte* const store = this->store_->payload();
    const std::byte* const device_store = s.store_on_device;
    if (staged) gather_into(gathered, {sources, count}, this->store_->unit_bytes(), stores_);
    for (std::size_t i = 0; i < count; ++i) {
      unit_move& unit = s.at(j.first + begin + i);
      if (!is_sound(s, unit, staged ? gathered + i * this->unit_size() : unit.source))
        pages[i] = -1;
      // What kernels pull from is listed under the device's addresses.
      if (device_store != nullptr) sources[i] = device_store + (unit.source - store);
    }
  }
  /// A unit that is not what was stored goes nowhere, and leaves the store.
  [[nodiscard]] static bool is_sound(state& s, unit_move& unit, const std::byte* bytes) noexcept {
    auto& lease = s.leases[static_cast<std::size_t>(unit.row)];
    if (lease.matches(unit.block, bytes)) return true;
    lease.drop_if_corrupt(unit.block);
    unit.status = unit_status::corrupt;
    s.incomplete.store(true, std::memory_order_relaxed);
    return false;
  }

  void move_chunk(job& j) {
    switch (j.owner->report.way) {
      case transfer_way::automatic:  // chosen by now
      case transfer_way::staged:
        if (j.is_head) {
          copy_head(j);
        } else {
          stage(j);
        }
        break;
      case transfer_way::pull:
        pull(j);
        break;
      case transfer_way::direct:
      case transfer_way::batched:
      case transfer_way::per_block:
        copy_runs(j);
        break;
    }
    // The chunk is another's once the link has let go of it; its memory, once it is drained.
    state& s = *j.owner;
    s.outstanding.fetch_add(1, std::memory_order_relaxed);
    try {
      this->template run<&recall_pipeline::let_go>(j, j.at->copied);
    } catch (...) {
      s.outstanding.fetch_sub(1, std::memory_order_relaxed);
      this->release(j);
    }
  }
  void let_go(job& j) noexcept {
    state& s = *j.owner;
    this->leave_link(j, this->backend_.poll(j.at->copied) == event_state::done);
    this->release(j);
    leave(s);
  }

  /// One DMA, then the scatter. These take turns on two streams: a kernel that is launched while the
  /// one before runs begins at once when that has ended. The pages' stream follows both; where kernels
  /// cost no launch, they are in it.
  void stage(job& j) {
    state& s = *j.owner;
    chunk& c = *j.at;
    const std::size_t ids = this->shape_.ids_at(j.count);
    const std::size_t units = this->shape_.units_at();
    const std::size_t payload = j.count * this->unit_size();
    auto& b = this->backend_;
    std::lock_guard lock(this->enqueue_mutex_);
    turn_ = 1 - turn_;
    const std::size_t which = in_turn ? 1 + turn_ : on_pages;
    const stream_ref scatter = streams()[which];
    j.enqueued_ns = b.now_ns();
    b.copy_async(c.device + ids, c.host + ids, units - ids + payload, direction, copy_);
    note_copies(j);
    b.record(c.copied, copy_);
    b.enqueue_wait(c.copied, scatter);
    this->wait_for_engine(s, which);
    b.for_each(shape_of(j), {this->options_.max_ctas}, 2 * payload,
               scatter_units{.layout = this->pool_->layout(),
                             .pool = this->pool_->layer(s.layer),
                             .pages = reinterpret_cast<const std::int32_t*>(c.device + ids),
                             .units = c.device + units},
               scatter);
    b.record(c.drained, scatter);
    if (in_turn) b.enqueue_wait(c.drained, pages_);
  }

  /// A kernel reads the units where they lie in the store.
  void pull(job& j) {
    state& s = *j.owner;
    chunk& c = *j.at;
    const std::size_t ids = this->shape_.ids_at(j.count);
    auto& b = this->backend_;
    std::lock_guard lock(this->enqueue_mutex_);
    this->wait_for_engine_with_copies(s);
    j.enqueued_ns = b.now_ns();
    b.for_each(shape_of(j), {this->options_.max_ctas}, 2 * j.count * this->unit_size(),
               pull_units{.layout = this->pool_->layout(),
                          .pool = this->pool_->layer(s.layer),
                          .pages = reinterpret_cast<const std::int32_t*>(c.host_on_device + ids),
                          .sources = reinterpret_cast<const std::byte* const*>(c.host_on_device)},
               pages_);
    note_copies(j);
    b.record(c.copied, pages_);
    b.record(c.drained, pages_);
  }

  /// Copies strips, or runs of adjacent strips, without a kernel.
  void copy_runs(job& j) {
    state& s = *j.owner;
    chunk& c = *j.at;
    auto& b = this->backend_;
    std::lock_guard lock(this->enqueue_mutex_);
    list_runs(j, s.report.way != transfer_way::per_block);
    this->wait_for_engine_with_copies(s);
    j.enqueued_ns = b.now_ns();
    if (s.report.way == transfer_way::batched) {
      b.copy_many_async(runs_.all(), direction, pages_);
    } else {
      for (const copy_span& run : runs_.all()) {
        b.copy_async(run.destination, run.source, run.bytes, direction, pages_);
      }
    }
    note_copies(j);
    b.record(c.copied, pages_);
    b.record(c.drained, pages_);
  }

  /// The same in one batch, in the stream that chunks are copied in: a scatter of another transfer,
  /// which waits for its chunk, does not hold it up. Who waits for the pages waits for it, whatever
  /// becomes of the chunks behind it. Nobody uses the pages.
  void copy_head(job& j) {
    chunk& c = *j.at;
    auto& b = this->backend_;
    std::lock_guard lock(this->enqueue_mutex_);
    list_runs(j, true);
    j.enqueued_ns = b.now_ns();
    b.copy_many_async(runs_.all(), direction, copy_);
    note_copies(j);
    b.record(c.copied, copy_);
    b.enqueue_wait(c.copied, pages_);
    b.record(c.drained, copy_);
    j.owner->report.head_units = static_cast<std::int64_t>(j.count);
  }

  /// Lists the runs of a chunk's units; under the enqueue mutex.
  void list_runs(job& j, bool merge) {
    state& s = *j.owner;
    runs_.begin(this->pool_->layout(), this->pool_->layer(s.layer), *this->store_, merge);
    for (std::size_t i = 0; i < j.count; ++i) {
      const unit_move& unit = s.at(j.first + i);
      if (unit.status != unit_status::corrupt) runs_.add(index_of(unit.page), unit.source);
    }
  }

  [[nodiscard]] launch_shape shape_of(const job& j) const {
    return {static_cast<std::int64_t>(j.count), this->pool_->layout().unit_words()};
  }
  [[nodiscard]] static std::size_t as_size(std::int64_t n) noexcept {
    return static_cast<std::size_t>(n);
  }

  void concluded(state& s, bool known) noexcept {
    s.has_arrived = false;
    if (!known) return leave(s);
    try {
      this->template run<&recall_pipeline::arrived>(s, s.pages_usable);
    } catch (...) {
      this->fail(s, std::current_exception());
      s.has_arrived = this->watch(s.pages_usable);
      leave(s);
    }
  }

  void arrived(state& s) noexcept {
    s.has_arrived = this->backend_.poll(s.pages_usable) == event_state::done;
    leave(s);
  }

  /// The last one to leave a recall ends it.
  void leave(state& s) noexcept {
    if (s.outstanding.fetch_sub(1, std::memory_order_acq_rel) > 1) return;
    const bool ok = s.has_arrived;
    for (const std::int32_t i : s.order) {
      unit_status& status = s.units[static_cast<std::size_t>(i)].status;
      if (status == unit_status::pending) status = ok ? unit_status::moved : unit_status::failed;
    }
    if (!ok) {
      this->fail(s, "recall: a copy or a kernel failed");
    }
    bool all_moved = true;
    for (const unit_move& unit : s.units) {
      if (unit.mirrored != nullptr) *unit.mirrored = unit.status;
      all_moved = all_moved && unit.status == unit_status::moved;
    }
    // A step with units that did not come stays the engine's to discard. (The record of one that has
    // ended is another's at once.)
    if (s.step != nullptr) {
      if (all_moved && !s.error) {
        s.step->busy.store(false, std::memory_order_release);
      } else {
        s.step->recall.store(recall_state::short_of, std::memory_order_release);
      }
    }
    this->finish(s);
  }

  [[nodiscard]] std::array<stream_ref, 4> streams() noexcept {
    return {copy_, scatter_[0], scatter_[1], pages_};
  }

  typename Backend::stream copy_;
  typename Backend::stream scatter_[2];
  typename Backend::stream pages_;  ///< behind all that goes into them; copies straight there
  store_hint stores_;               ///< of gathers into the staging
  std::int64_t strips_;             ///< of a unit in the pool
  transfer_way way_;
  std::size_t turn_ = 0;  ///< of the scatter streams, under the enqueue mutex
  std::atomic<std::size_t> last_misses_{std::numeric_limits<std::size_t>::max()};  ///< of a step
  strip_runs runs_;  ///< of one chunk, under the enqueue mutex
};

}  // namespace pulseinfer::detail
