// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a simulated machine has been given to do: streams, records of events, host tasks. Without a
/// notion of order beyond the promised one; sim_timed.hpp and sim_fuzzed.hpp each choose from it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What one resource of a simulated machine has done so far.
struct simulated_work {
  std::uint64_t operations = 0;
  std::uint64_t bytes = 0;    ///< as declared or copied
  std::uint64_t busy_ns = 0;  ///< of virtual time; start and launch latencies not counted
};

struct simulated_statistics {
  simulated_work host_to_device;  ///< one operation for each copy of a batch
  simulated_work device_to_host;
  simulated_work kernels;  ///< copies from device to device included
  simulated_work tasks;    ///< busy_ns is summed over the workers
};

namespace detail {

/// One record of an event: where a stream was when the event was recorded.
struct sim_record {
  event_state state = event_state::pending;
};

/// A kernel over a space of `count()` indices, read when it starts. `run` visits `portion` of them:
/// `first`, then each time `stride` further, modulo `total`.
struct sim_kernel {
  std::function<std::uint64_t()> count;
  std::function<void(std::uint64_t first, std::uint64_t stride, std::uint64_t portion,
                     std::uint64_t total)>
      run;
};

struct sim_operation {
  enum class kind : std::uint8_t { copy, kernel, record, wait };

  kind what = kind::record;
  copy_direction direction = copy_direction::device_to_device;
  std::vector<copy_span> copies;
  sim_kernel kernel;
  std::uint64_t bytes = 0;
  std::shared_ptr<sim_record> record;
  std::uint64_t enqueued_ns = 0;

  /// True for what occupies the machine; records and waits only pass.
  [[nodiscard]] bool is_work() const noexcept { return what == kind::copy || what == kind::kernel; }
};

/// A part of a copy: read at one moment into a buffer, written at a later one.
struct sim_piece {
  copy_span span;
  std::size_t buffer;  ///< offset
  bool is_read = false;
};

/// How far a stream's first operation has come, where it is performed in portions.
struct sim_progress {
  bool begun = false;
  std::vector<sim_piece> pieces;  ///< of a copy, those not written yet
  std::vector<std::byte> buffer;
  std::size_t unread = 0;
  std::uint64_t style = 0;
  std::uint64_t total = 0, visited = 0, at = 0, stride = 1;  ///< of a kernel
};

struct sim_stream {
  std::uint64_t id = 0;  ///< in order of creation
  stream_priority priority = stream_priority::normal;
  std::deque<sim_operation> queue;
  std::exception_ptr error;  ///< what failed since the last sync

  std::uint64_t rank = 0;      ///< fuzzed: the highest goes first
  sim_progress progress;       ///< fuzzed
  bool running = false;        ///< timed: the first operation has been handed to a resource
  std::uint64_t ready_ns = 0;  ///< timed: when it was, or when it reached the last one

  /// True if the first operation is ready to be performed.
  [[nodiscard]] bool has_work() const noexcept { return !queue.empty() && queue.front().is_work(); }
};

struct sim_task {
  host_task task;
  std::uint64_t bytes = 0;
  std::vector<std::shared_ptr<sim_record>> after;

  [[nodiscard]] bool is_ready() const noexcept {
    return std::all_of(after.begin(), after.end(),
                       [](const auto& r) { return r->state != event_state::pending; });
  }
};

/// Streams in order of creation, and the host tasks that no worker has taken yet.
class sim_queues {
 public:
  std::vector<std::unique_ptr<sim_stream>> streams;
  std::deque<sim_task> tasks;
  std::uint64_t clock_ns = 0;
  simulated_statistics statistics;

  sim_stream* add_stream(stream_priority priority) {
    auto& added = streams.emplace_back(std::make_unique<sim_stream>());
    added->id = next_stream_++;
    added->priority = priority;
    return added.get();
  }
  void remove_stream(sim_stream* stream) noexcept {
    std::erase_if(streams, [stream](const auto& s) { return s.get() == stream; });
  }

  void enqueue(sim_stream& stream, sim_operation operation) {
    operation.enqueued_ns = clock_ns;
    stream.queue.push_back(std::move(operation));
  }

  /// Takes off the heads of the queues all that needs no machine: records, waits for what is done,
  /// and the work of streams that have failed. What then leads a queue is work, or a wait for a
  /// record of another stream.
  void settle() {
    bool changed = true;
    while (changed) {
      changed = false;
      for (const auto& stream : streams) {
        while (pass(*stream)) changed = true;
      }
    }
  }

  /// Takes the oldest task of the highest priority whose events are done; false if there is none.
  bool take_ready_task(sim_task& taken) {
    auto ready = tasks.end();
    for (auto t = tasks.begin(); t != tasks.end(); ++t) {
      const bool urgent = t->task.priority == stream_priority::high;
      if ((ready != tasks.end() && !urgent) || !t->is_ready()) continue;
      ready = t;
      if (urgent) break;
    }
    if (ready == tasks.end()) return false;
    taken = std::move(*ready);
    tasks.erase(ready);
    return true;
  }

  /// Runs `effect` as part of the stream's first operation. What it throws fails the stream.
  template <class Effect>
  void perform(sim_stream& stream, Effect effect) {
    const bool outer = std::exchange(performing_, true);
    try {
      effect();
    } catch (...) {
      stream.error = std::current_exception();
    }
    performing_ = outer;
  }
  /// True inside a copy or a kernel: the machine cannot go on before it returns.
  [[nodiscard]] bool is_performing() const noexcept { return performing_; }

  void run(const host_task& task) {
    ++running_tasks_;
    task.run(task.state);
    --running_tasks_;
  }
  [[nodiscard]] bool is_in_task() const noexcept { return running_tasks_ > 0; }

  /// Takes the stream's first operation off its queue and counts it.
  void finish(sim_stream& stream, std::uint64_t busy_ns) {
    const sim_operation done = std::move(stream.queue.front());
    stream.queue.pop_front();
    stream.running = false;
    stream.progress = {};
    const bool on_link = done.what == sim_operation::kind::copy &&
                         done.direction != copy_direction::device_to_device;
    auto& work = !on_link                                           ? statistics.kernels
                 : done.direction == copy_direction::host_to_device ? statistics.host_to_device
                                                                    : statistics.device_to_host;
    work.operations += on_link ? done.copies.size() : 1;
    work.bytes += done.bytes;
    work.busy_ns += busy_ns;
  }

  /// What waits for something, in words.
  [[nodiscard]] std::string pending() const {
    std::string text;
    for (const auto& stream : streams) {
      if (stream->queue.empty()) continue;
      text +=
          text_of(text.empty() ? "" : "; ", "stream ", stream->id, " has ", stream->queue.size(),
                  " operations, the first one a ", name(stream->queue.front().what));
    }
    if (!tasks.empty()) {
      text += text_of(text.empty() ? "" : "; ", tasks.size(), " host tasks wait for events");
    }
    return text.empty() ? "nothing is pending" : text;
  }

 private:
  static const char* name(sim_operation::kind what) noexcept {
    switch (what) {
      case sim_operation::kind::copy:
        return "copy";
      case sim_operation::kind::kernel:
        return "kernel";
      case sim_operation::kind::record:
        return "record of an event";
      case sim_operation::kind::wait:
        return "wait for an event";
    }
    return "operation";
  }

  static bool pass(sim_stream& stream) {
    if (stream.queue.empty() || stream.running || stream.progress.begun) return false;
    const sim_operation& first = stream.queue.front();
    if (first.what == sim_operation::kind::record) {
      first.record->state = stream.error ? event_state::failed : event_state::done;
    } else if (first.what == sim_operation::kind::wait) {
      if (first.record->state == event_state::pending) return false;
      if (first.record->state == event_state::failed && !stream.error) {
        stream.error =
            std::make_exception_ptr(device_error("stream: an event that it waits for has failed"));
      }
    } else if (!stream.error) {
      return false;
    }
    stream.queue.pop_front();
    return true;
  }

  std::uint64_t next_stream_ = 0;
  int running_tasks_ = 0;
  bool performing_ = false;
};

}  // namespace detail
}  // namespace pulseinfer
