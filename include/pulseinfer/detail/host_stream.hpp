// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the host backend's streams are made of: events and their records, the paced link, a queue
/// with its thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/cpu_affinity.hpp"
#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/host_workers.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A link between host and device, one for each direction. All zero: as fast as memory.
struct link_pace {
  double bytes_per_second = 0;  ///< 0: not limited
  double seconds_per_copy = 0;  ///< the link is busy this much longer for each copy
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
  /// What is queued next does not fail. @throws std::bad_alloc
  void make_room() {
    std::lock_guard lock(mutex_);
    grow_if_full();
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

  void grow_if_full() {
    if (count_ < ring_.size()) return;
    std::vector<entry> larger(ring_.empty() ? 16 : ring_.size() * 2);
    for (std::size_t i = 0; i < count_; ++i) {
      larger[i] = std::move(ring_[(head_ + i) % ring_.size()]);
    }
    ring_ = std::move(larger);
    head_ = 0;
  }
  entry& next_entry() {
    grow_if_full();
    return ring_[(head_ + count_++) % ring_.size()];
  }

  void run() {
    run_behind_callers();
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
}  // namespace pulseinfer
