// SPDX-License-Identifier: Apache-2.0
/// @file
/// The host as a machine: real threads in place of streams, host memory in place of a device's.
///
/// Nothing is eager here. A stream is a thread that works off its queue; an event is done when that
/// thread gets to it. A wait that is missing is therefore a data race, and ThreadSanitizer says so.
/// Copies between host and "device" can be paced to the speed of a link, so that overlap takes real
/// time.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/host_memory.hpp"
#include "pulseinfer/detail/host_workers.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A link between host and device, one for each direction. All zero: as fast as memory.
struct link_pace {
  double bytes_per_second = 0;  ///< 0: not limited
  double seconds_per_copy = 0;  ///< the link is busy this much longer for each copy
};

/// How many workers, where they run, and how fast a link.
struct host_options {
  int workers = 2;             ///< threads for host tasks, 1 to 1024
  link_pace link = {};         ///< the copy's thread spins until the link would be done
  std::vector<int> cpus = {};  ///< on which the workers may run, see numa.hpp; empty: on any
};

namespace detail {

/// One record of an event: where a stream was when the event was recorded.
struct host_record {
  std::atomic<event_state> state{event_state::done};

  void reach(bool ok) noexcept {
    state.store(ok ? event_state::done : event_state::failed, std::memory_order_release);
    state.notify_all();
  }
  /// Blocks until the record is reached; false if it failed.
  [[nodiscard]] bool wait() const noexcept {
    yield_while([this] { return state.load(std::memory_order_acquire) == event_state::pending; });
    state.wait(event_state::pending, std::memory_order_acquire);
    return state.load(std::memory_order_acquire) == event_state::done;
  }
};

/// The records of one event. Each is an object of its own: whoever waits for one of them is not let
/// through by a later one that another stream reaches earlier.
class host_event {
 public:
  host_event() {
    for (int i = 0; i < 3; ++i) add();  // a stream lets go of a record a moment after it reached it
    last_ = add();
  }

  /// Starts a record. One that nobody mentions any more is used again, so that this allocates
  /// nothing once there are as many as are in flight at a time.
  [[nodiscard]] std::shared_ptr<host_record> begin() {
    std::lock_guard lock(mutex_);
    const auto free = std::find_if(records_.begin(), records_.end(), [this](const auto& r) {
      return r.use_count() == (r == last_ ? 2 : 1) && r->state.load() != event_state::pending;
    });
    last_ = free != records_.end() ? *free : add();
    last_->state.store(event_state::pending);
    return last_;
  }
  [[nodiscard]] std::shared_ptr<host_record> last() const noexcept {
    std::lock_guard lock(mutex_);
    return last_;
  }
  [[nodiscard]] event_state poll() const noexcept {
    std::lock_guard lock(mutex_);
    return last_->state.load(std::memory_order_acquire);
  }

 private:
  std::shared_ptr<host_record> add() {
    return records_.emplace_back(std::make_shared<host_record>());
  }

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<host_record>> records_;
  std::shared_ptr<host_record> last_;
};

/// When each direction of the link is free again.
class host_link {
 public:
  explicit host_link(link_pace pace) : pace_(pace) {
    expects(std::isfinite(pace.bytes_per_second) && pace.bytes_per_second >= 0,
            "host_backend: link bytes_per_second is ", pace.bytes_per_second,
            ", expected 0 (not limited) or more");
    expects(std::isfinite(pace.seconds_per_copy) && pace.seconds_per_copy >= 0,
            "host_backend: link seconds_per_copy is ", pace.seconds_per_copy,
            ", expected 0 or more");
  }

  using clock = std::chrono::steady_clock;

  [[nodiscard]] bool is_paced() const noexcept {
    return pace_.bytes_per_second > 0 || pace_.seconds_per_copy > 0;
  }

  /// Copies, and returns when the link would have. Its work begins when the copy is `ready` and the
  /// link free: a real link goes on with what is queued, whatever this thread was kept from.
  void copy(void* destination, const void* source, std::size_t bytes, copy_direction direction,
            clock::time_point ready) {
    if (direction == copy_direction::device_to_device || !is_paced()) {
      std::memcpy(destination, source, bytes);
      return;
    }
    double seconds = pace_.seconds_per_copy;
    if (pace_.bytes_per_second > 0) seconds += static_cast<double>(bytes) / pace_.bytes_per_second;
    clock::time_point end;
    {
      std::lock_guard lock(mutex_);
      auto& free_at = free_at_[direction == copy_direction::host_to_device ? 0 : 1];
      end = std::max(free_at, ready) +
            std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(seconds));
      free_at = end;
    }
    std::memcpy(destination, source, bytes);
    while (clock::now() < end) {
    }
  }

 private:
  link_pace pace_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point free_at_[2] = {};
};

/// One queue and its thread. Entries are stored in a ring that grows to the depth in use and stays
/// there.
class host_stream {
 public:
  host_stream() : thread_([this] { run(); }) {}
  host_stream(const host_stream&) = delete;
  host_stream& operator=(const host_stream&) = delete;
  ~host_stream() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  /// Queues a trivially copyable callable.
  template <class Work>
  void push(const Work& work, bool is_link_copy = false) {
    static_assert(std::is_trivially_copyable_v<Work> && sizeof(Work) <= sizeof(entry::storage) &&
                  alignof(Work) <= 16);
    std::lock_guard lock(mutex_);
    entry& e = next_entry();
    ::new (static_cast<void*>(e.storage)) Work(work);
    e.run = [](void* storage) { (*std::launder(static_cast<Work*>(storage)))(); };
    e.is_link_copy = is_link_copy;
    tell();
  }
  void push_record(std::shared_ptr<host_record> record) { push_event(std::move(record), true); }
  void push_wait(std::shared_ptr<host_record> record) { push_event(std::move(record), false); }

  /// When the last kernel before the current entry ended, or the last wait that held the stream
  /// back was over: what comes behind was not ready before. For the stream's own thread.
  [[nodiscard]] std::chrono::steady_clock::time_point clear_since() const noexcept {
    return clear_since_;
  }

  /// Blocks until the queue is empty. Throws what failed since the last call, which is then
  /// forgotten.
  void sync() {
    std::exception_ptr error;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return count_ == 0; });
      error = std::exchange(error_, nullptr);
    }
    if (error) std::rethrow_exception(error);
  }

 private:
  struct entry {
    alignas(16) std::byte storage[max_kernel_bytes + 64];
    void (*run)(void*) = nullptr;
    std::shared_ptr<host_record> record;
    bool is_record = false;
    bool is_link_copy = false;
  };

  /// What has nothing to wait for is done at once: waking a thread costs the caller more.
  void push_event(std::shared_ptr<host_record> record, bool is_record) {
    std::lock_guard lock(mutex_);
    if (is_record && count_ == 0) return record->reach(error_ == nullptr);
    if (!is_record && record->state.load(std::memory_order_acquire) == event_state::done) return;
    entry& e = next_entry();
    e.run = nullptr;
    e.record = std::move(record);
    e.is_record = is_record;
    tell();
  }
  /// Under the mutex.
  void tell() {
    has_news_.store(true, std::memory_order_release);
    changed_.notify_all();
  }

  entry& next_entry() {
    if (count_ == ring_.size()) {
      std::vector<entry> larger(ring_.empty() ? 16 : ring_.size() * 2);
      for (std::size_t i = 0; i < count_; ++i) {
        larger[i] = std::move(ring_[(head_ + i) % ring_.size()]);
      }
      ring_ = std::move(larger);
      head_ = 0;
    }
    return ring_[(head_ + count_++) % ring_.size()];
  }

  void run() {
    entry current;
    std::unique_lock lock(mutex_);
    for (;;) {
      if (!stopping_ && count_ == 0) {
        lock.unlock();
        yield_while([this] { return !has_news_.load(std::memory_order_acquire); });
        lock.lock();
      }
      has_news_.store(false, std::memory_order_relaxed);
      changed_.wait(lock, [this] { return stopping_ || count_ > 0; });
      if (count_ == 0) return;
      std::swap(current, ring_[head_]);
      lock.unlock();
      std::exception_ptr error = perform(current);
      current.record.reset();
      lock.lock();
      head_ = (head_ + 1) % ring_.size();
      --count_;
      if (error && !error_) error_ = error;
      if (count_ == 0) changed_.notify_all();
    }
  }

  /// After a failure nothing runs until the next sync: its input may be wrong. Events still arrive,
  /// as failed.
  std::exception_ptr perform(entry& e) {
    const bool ok = !has_failed();
    try {
      if (e.record && e.is_record) {
        e.record->reach(ok);
      } else if (e.record) {
        const bool held_back = e.record->state.load() == event_state::pending;
        if (!e.record->wait()) {
          throw device_error("stream: an event that it waits for has failed");
        }
        if (held_back) clear_since_ = std::chrono::steady_clock::now();
      } else if (ok) {
        e.run(e.storage);
        if (!e.is_link_copy) clear_since_ = std::chrono::steady_clock::now();
      }
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  bool has_failed() {
    std::lock_guard lock(mutex_);
    return error_ != nullptr;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<entry> ring_;
  std::size_t head_ = 0;
  std::size_t count_ = 0;              ///< the entry being performed included
  std::atomic<bool> has_news_{false};  ///< something was queued since the thread last looked
  bool stopping_ = false;
  std::exception_ptr error_;
  std::chrono::steady_clock::time_point clear_since_;  ///< the thread's own
  std::thread thread_;
};

}  // namespace detail

/// Models `backend` with threads. See concepts.hpp for what every member promises.
///
/// @par Threads  any number; one stream is fed by one thread at a time
class host_backend {
 public:
  /// Owns a queue and its thread. Its destructor works off the queue.
  class stream {
   public:
    stream(stream&&) noexcept = default;
    stream& operator=(stream&& other) noexcept {
      std::swap(link_, other.link_);
      std::swap(queue_, other.queue_);
      return *this;
    }

   private:
    friend class host_backend;
    explicit stream(std::shared_ptr<detail::host_link> link)
        : link_(std::move(link)), queue_(std::make_unique<detail::host_stream>()) {}
    std::shared_ptr<detail::host_link>
        link_;  ///< the queue's copies use it, also after the backend
    std::unique_ptr<detail::host_stream> queue_;
  };

  /// Borrows a stream, which must outlive it.
  class stream_ref {
   public:
    stream_ref(stream& owner) noexcept : queue_(owner.queue_.get()) {}
    friend bool operator==(stream_ref, stream_ref) = default;

   private:
    friend class host_backend;
    detail::host_stream* queue_;
  };

  /// Owns an event. Its destructor waits for its last record.
  class event {
   public:
    event(event&&) noexcept = default;
    event& operator=(event&& other) noexcept {
      std::swap(state_, other.state_);
      return *this;
    }
    ~event() {
      if (state_) (void)state_->last()->wait();
    }

   private:
    friend class host_backend;
    event() : state_(std::make_unique<detail::host_event>()) {}
    std::unique_ptr<detail::host_event> state_;
  };

  /// @throws std::invalid_argument  naming the option and its limit
  explicit host_backend(const host_options& options = {})
      : state_(std::make_shared<state>(options)) {}

  // Job 1: memory.
  [[nodiscard]] void* allocate_device(std::size_t bytes) {
    return allocate(bytes, limits_.device_alignment, "device");
  }
  void deallocate_device(void* p, std::size_t) noexcept { std::free(p); }
  [[nodiscard]] void* allocate_pinned(std::size_t bytes) {
    return allocate(bytes, limits_.pinned_alignment, "pinned");
  }
  void deallocate_pinned(void* p, std::size_t) noexcept { std::free(p); }
  template <class T>
  [[nodiscard]] T* device_pointer(T* pinned) const noexcept {
    return pinned;
  }
  [[nodiscard]] memory_limits limits() const {
    memory_limits found = limits_;
    const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
    found.device_bytes_total = page * static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES));
    found.device_bytes_free = page * static_cast<std::uint64_t>(sysconf(_SC_AVPHYS_PAGES));
    return found;
  }

  // Job 2: streams and events.
  [[nodiscard]] stream make_stream(stream_priority) { return stream(state_->link); }
  [[nodiscard]] event make_event() { return event(); }
  void record(event& e, stream_ref s) { s.queue_->push_record(e.state_->begin()); }
  void enqueue_wait(const event& e, stream_ref s) { s.queue_->push_wait(e.state_->last()); }
  [[nodiscard]] event_state poll(const event& e) const noexcept { return state::poll(e); }
  void sync(const event& e) {
    if (!e.state_->last()->wait()) {
      throw device_error("sync: the work before the event has failed");
    }
  }
  void sync(stream_ref s) { s.queue_->sync(); }
  template <class Ready>
  void sync_until(Ready ready) {
    detail::backoff idle;
    while (!ready()) idle.pause();
  }
  [[nodiscard]] std::uint64_t now_ns() const noexcept {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }

  // Job 3: copies.
  void copy_async(void* destination, const void* source, std::size_t bytes,
                  copy_direction direction, stream_ref s) {
    const copy_span copy{destination, source, bytes};
    copy_many_async({&copy, 1}, direction, s);
  }
  void copy_many_async(std::span<const copy_span> copies, copy_direction direction, stream_ref s) {
    detail::check_copies(copies);
    for (const copy_span& copy : copies) {
      if (copy.bytes == 0) continue;
      detail::host_link* const link = state_->link.get();
      const auto asked = link->is_paced() ? detail::host_link::clock::now()
                                          : detail::host_link::clock::time_point{};
      s.queue_->push(
          [link, copy, direction, asked, queue = s.queue_] {
            link->copy(copy.destination, copy.source, copy.bytes, direction,
                       std::max(asked, queue->clear_since()));
          },
          direction != copy_direction::device_to_device);
    }
  }

  // Job 4: host tasks.
  void host_async(std::span<const event* const> after, host_task task, host_cost = {}) {
    state_->workers.submit(after, task);
  }

  // Jobs 5 to 7: kernels.
  template <class Op>
  void for_each(const launch_shape& shape, const launch_limits& limits, std::uint64_t, const Op& op,
                stream_ref s) {
    static_assert(detail::is_kernel_body<Op>);
    detail::check_launch(shape, limits);
    if (shape.blocks == 0 || shape.words == 0) return;
    s.queue_->push([shape, op] {
      const std::int64_t blocks = detail::blocks_of(shape);
      for (std::int64_t block = 0; block < blocks; ++block) {
        if constexpr (detail::has_whole_blocks<Op>) {
          if (op.words() == shape.words) {
            op.whole_block(block);
            continue;
          }
        }
        for (std::int64_t word = 0; word < shape.words; ++word) op(block, word);
      }
    });
  }
  template <class Op>
  void for_each_row(std::int64_t rows, const launch_limits& limits, std::uint64_t, const Op& op,
                    stream_ref s) {
    static_assert(detail::is_kernel_body<Op>);
    detail::check_rows(rows, limits);
    if (rows == 0) return;
    s.queue_->push([rows, op] {
      for (std::int64_t row = 0; row < rows; ++row) op(row, detail::single_lane{});
    });
  }
  [[nodiscard]] std::size_t top_k_workspace_bytes(const top_k_shape& shape) const {
    return detail::cpu_top_k_workspace_bytes(shape);
  }
  void top_k(const top_k_shape& shape, const top_k_keys& keys, std::int32_t* selected,
             std::int32_t* counts, std::span<std::byte> workspace, stream_ref s) {
    detail::cpu_top_k(*this, shape, keys, selected, counts, workspace, s);
  }

 private:
  struct state {
    explicit state(const host_options& options)
        : link(std::make_shared<detail::host_link>(options.link)),
          workers(options.workers, &state::poll, options.cpus) {}
    static event_state poll(const event& e) noexcept { return e.state_->poll(); }
    std::shared_ptr<detail::host_link> link;
    detail::host_workers<event, event_state (*)(const event&) noexcept> workers;
  };

  static void* allocate(std::size_t bytes, std::size_t alignment, const char* kind) {
    if (bytes == 0) return nullptr;
    void* const p = detail::allocate_host(bytes, alignment);
    if (p == nullptr) {
      throw out_of_memory(
          detail::text_of("host_backend: no ", bytes, " bytes of ", kind, " memory to be had"));
    }
    return p;
  }

  static constexpr memory_limits limits_{};
  std::shared_ptr<state> state_;
};
static_assert(backend<host_backend>);

}  // namespace pulseinfer
