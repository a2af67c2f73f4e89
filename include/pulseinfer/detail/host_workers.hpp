// SPDX-License-Identifier: Apache-2.0
/// @file
/// The worker threads that run host tasks, for backends with real threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/cpu_affinity.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Tells a CPU that its thread only looks at a value again and again.
inline void relax_cpu() noexcept {
#if defined(__x86_64__)
  asm volatile("pause");
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Lets other threads run as long as the condition holds, for 50 us at most: what is soon over is
/// over without the time that it takes to wake a thread.
template <class Condition>
void yield_while(Condition holds) noexcept {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  while (holds() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
}

/// Waits a little, longer each time: for 200 us it only lets other threads run, later it sleeps for
/// up to 50 us.
class backoff {
 public:
  void pause() {
    const auto now = std::chrono::steady_clock::now();
    if (count_ == 0) began_ = now;
    ++count_;
    if (now - began_ < std::chrono::microseconds(200)) {
      std::this_thread::yield();
    } else {
      sleep_ = std::min(sleep_ + std::chrono::microseconds(1), std::chrono::microseconds(50));
      std::this_thread::sleep_for(sleep_);
    }
  }
  void reset() noexcept {
    count_ = 0;
    sleep_ = {};
  }

 private:
  int count_ = 0;
  std::chrono::steady_clock::time_point began_;
  std::chrono::microseconds sleep_{0};
};

/// Runs host tasks in the order in which they become ready; of several ready ones the oldest of high
/// priority first, then the oldest.
///
/// A task waits for events that only the backend can ask about, so a waiting task is polled by idle
/// workers. Handing over a task allocates nothing once the list has grown to the number of tasks in
/// flight.
///
/// Where there are CPUs to spare, a worker that runs out of tasks looks for the next one for a
/// little while before it sleeps: a transfer's tasks follow each other closely, and to wake a
/// thread takes several microseconds of the one that hands over, and of the task. One that is woken
/// does not take the CPU of who hands over.
///
/// @tparam Event  the backend's event
/// @tparam Poll   `event_state(const Event&) noexcept`; where it has `enter_thread()`, each worker
///                calls that once, before anything else
/// @par Threads   any thread may hand over tasks, tasks included
template <class Event, class Poll>
class host_workers {
 public:
  /// @param threads  1 to 1024
  /// @param cpus     those on which the threads may run; empty: any
  /// @throws std::invalid_argument  naming the count, or the CPU that cannot be used
  host_workers(int threads, Poll poll, std::span<const int> cpus = {})
      : host_workers(threads, poll, cpus, time_to_look(threads, cpus.size())) {}
  /// The same, with the time for which an idle worker looks for a task before it sleeps.
  host_workers(int threads, Poll poll, std::span<const int> cpus, std::chrono::microseconds look)
      : poll_(poll), cpus_(cpus), look_(look) {
    expects(threads >= 1 && threads <= 1024, "host workers: threads is ", threads,
            ", expected 1 to 1024");
    waiting_.reserve(1024);  // of a transfer, all parts of its chunks in flight
    threads_.reserve(static_cast<std::size_t>(threads));
    try {
      for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
    } catch (...) {  // there are no more
      end();
      throw;
    }
  }

  host_workers(const host_workers&) = delete;
  host_workers& operator=(const host_workers&) = delete;

  /// Runs what was handed over, then ends the threads. Not to be called from a task.
  ~host_workers() { end(); }

  void submit(std::span<const Event* const> after, host_task task) {
    expects(task.run != nullptr, "host_async: the task has no function");
    expects(after.size() <= max_task_events, "host_async: ", after.size(),
            " events to wait for, expected at most ", max_task_events);
    entry added{task, {}, after.size()};
    std::copy(after.begin(), after.end(), added.after);
    for (const Event* event : after) expects(event != nullptr, "host_async: an event is null");
    bool is_looked_for = false;
    {
      std::lock_guard lock(mutex_);
      waiting_.push_back(added);
      news_.fetch_add(1, std::memory_order_relaxed);
      is_looked_for = waiting_.size() <= looking_;
    }
    if (!is_looked_for) changed_.notify_one();
  }

  /// True if the calling thread is one of the workers.
  [[nodiscard]] bool is_worker() const noexcept {
    return std::any_of(threads_.begin(), threads_.end(),
                       [](const auto& t) { return t.get_id() == std::this_thread::get_id(); });
  }

 private:
  void end() noexcept {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      news_.fetch_add(1, std::memory_order_relaxed);
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  struct entry {
    host_task task;
    const Event* after[max_task_events];
    std::size_t events;
  };

  [[nodiscard]] bool is_ready(const entry& e) const noexcept {
    return std::all_of(e.after, e.after + e.events, [this](const Event* event) {
      return poll_(*event) != event_state::pending;
    });
  }

  [[nodiscard]] auto next_ready() noexcept {
    auto ready = waiting_.end();
    for (auto e = waiting_.begin(); e != waiting_.end(); ++e) {
      const bool urgent = e->task.priority == stream_priority::high;
      if ((ready != waiting_.end() && !urgent) || !is_ready(*e)) continue;
      ready = e;
      if (urgent) break;
    }
    return ready;
  }

  void run() {
    cpus_.bind_this_thread();
    run_behind_callers();
    if constexpr (requires { poll_.enter_thread(); }) poll_.enter_thread();
    backoff idle;
    std::unique_lock lock(mutex_);
    for (;;) {
      const auto ready = next_ready();
      if (ready != waiting_.end()) {
        const host_task task = ready->task;
        waiting_.erase(ready);
        lock.unlock();
        task.run(task.state);
        idle.reset();
        lock.lock();
        // What this task handed over may be what another worker sleeps for.
        if (!waiting_.empty()) changed_.notify_one();
      } else if (!waiting_.empty()) {
        lock.unlock();
        idle.pause();
        lock.lock();
      } else if (stopping_) {
        return;
      } else {
        look_for_news(lock);
        changed_.wait(lock, [this] { return stopping_ || !waiting_.empty(); });
        idle.reset();
      }
    }
  }

  /// A looking worker keeps a CPU from others. Where the workers, the thread that hands over and
  /// the streams' threads need all there are, to look would hold up what is waited for.
  [[nodiscard]] static std::chrono::microseconds time_to_look(int threads,
                                                              std::size_t cpus) noexcept {
    const std::size_t there_are = cpus > 0 ? cpus : std::thread::hardware_concurrency();
    return std::chrono::microseconds(there_are >= static_cast<std::size_t>(threads) + 2 ? 50 : 0);
  }

  /// Returns when something has been handed over, or after a while.
  void look_for_news(std::unique_lock<std::mutex>& lock) {
    if (look_.count() == 0) return;
    const std::uint64_t known = news_.load(std::memory_order_relaxed);
    ++looking_;
    lock.unlock();
    const auto end = std::chrono::steady_clock::now() + look_;
    // No yield: on a busy machine that is to sleep without being woken.
    while (news_.load(std::memory_order_relaxed) == known &&
           std::chrono::steady_clock::now() < end) {
      relax_cpu();
    }
    lock.lock();
    --looking_;
  }

  Poll poll_;
  thread_cpus cpus_;
  std::chrono::microseconds look_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<entry> waiting_;
  std::size_t looking_ = 0;              ///< workers that look for a task, and do not sleep
  std::atomic<std::uint64_t> news_ = 0;  ///< counts what is handed over
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace pulseinfer::detail
