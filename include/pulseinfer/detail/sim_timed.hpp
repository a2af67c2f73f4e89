// SPDX-License-Identifier: Apache-2.0
/// @file
/// The order that follows from a cost model: a simulated machine by the clock.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>
#include <vector>

#include "pulseinfer/backend/hardware_profile.hpp"
#include "pulseinfer/detail/sim_queues.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Advances the clock from one moment at which something ends or starts to the next.
///
/// - Each direction of the link moves one copy at a time, in the order in which they became ready,
///   those of one moment in order of their streams' creation. A copy that was enqueued and ready
///   before the one in front of it ended starts at once, any other after `copy_start_ns`.
/// - Kernels take `kernel_launch_ns` side by side, then their bytes one after the other: high
///   priority first, then in the order in which they were launched. One that runs is not
///   interrupted.
/// - Host tasks take a worker for `task_start_ns`, then for their bytes. Copies on the link take
///   their part of the DRAM first, tasks share the rest evenly (where there is none, they get an
///   even share among all), each at most at a worker's speed.
/// - Bytes are moved, kernels and tasks run, at the moment of their end.
class timed_order {
 public:
  timed_order(sim_queues& queues, const hardware_profile& profile)
      : queues_(queues), profile_(profile) {
    check_profile(profile);
  }

  /// Goes on to the next moment at which something happens, but not beyond `limit`. False when
  /// there is none. Without tasks, those that have ended are left for a later step.
  bool step(bool with_tasks, std::uint64_t limit = never) {
    queues_.settle();
    start();
    const std::uint64_t next = next_moment(with_tasks);
    if (next == never || next > limit) return false;
    advance(std::max(next, queues_.clock_ns));
    end_streams();
    if (with_tasks) end_tasks();
    queues_.settle();
    return true;
  }

  /// Lets the clock go on by as much as a poll takes.
  void poll() {
    const std::uint64_t limit = queues_.clock_ns + profile_.poll_ns;
    while (step(false, limit)) {
    }
    advance(limit);
  }

  void enqueued() noexcept {}
  void stream_added(sim_stream&) noexcept {}

 private:
  static constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();

  /// A resource that serves one stream's first operation at a time.
  struct server {
    std::vector<sim_stream*> waiting;
    sim_stream* serves = nullptr;
    std::uint64_t begin_ns = 0;  ///< of its bytes
    std::uint64_t end_ns = 0;
  };
  struct running_task {
    sim_task task;
    std::uint64_t moves_from_ns;
    double bytes_left;
  };

  static std::uint64_t duration_ns(std::uint64_t bytes, double bytes_per_second) {
    return static_cast<std::uint64_t>(
        std::llround(static_cast<double>(bytes) * 1e9 / bytes_per_second));
  }

  /// Hands all that is ready now to its resource.
  void start() {
    for (const auto& stream : queues_.streams) {
      if (stream->running || !stream->has_work()) continue;
      stream->running = true;
      stream->ready_ns = queues_.clock_ns;
      const sim_operation& first = stream->queue.front();
      if (first.what == sim_operation::kind::copy &&
          first.direction != copy_direction::device_to_device) {
        link_[first.direction == copy_direction::host_to_device ? 0 : 1].waiting.push_back(
            stream.get());
      } else {
        launching_.push_back({stream.get(), queues_.clock_ns + profile_.kernel_launch_ns});
      }
    }
    launch();
    for (server& direction : link_) serve_link(direction);
    serve_hbm();
    while (tasks_.size() < static_cast<std::size_t>(profile_.workers)) {
      sim_task task;
      if (!queues_.take_ready_task(task)) break;
      const auto bytes = static_cast<double>(task.bytes);
      tasks_.push_back({std::move(task), queues_.clock_ns + profile_.task_start_ns, bytes});
    }
  }

  /// Moves kernels whose launch is over to the HBM's queue.
  void launch() {
    std::erase_if(launching_, [this](const auto& launched) {
      if (launched.second > queues_.clock_ns) return false;
      launched.first->ready_ns = launched.second;
      hbm_.waiting.push_back(launched.first);
      return true;
    });
  }

  template <class Before>
  static sim_stream* take_first(server& from, Before before) {
    const auto first = std::min_element(from.waiting.begin(), from.waiting.end(), before);
    from.serves = *first;
    from.waiting.erase(first);
    return from.serves;
  }

  void serve_link(server& direction) {
    if (direction.serves != nullptr || direction.waiting.empty()) return;
    const sim_stream* stream = take_first(direction, [](const sim_stream* a, const sim_stream* b) {
      return std::pair(a->ready_ns, a->id) < std::pair(b->ready_ns, b->id);
    });
    const sim_operation& copy = stream->queue.front();
    const bool is_behind =
        copy.enqueued_ns < direction.end_ns && queues_.clock_ns <= direction.end_ns;
    const std::size_t count = copy.copies.size();
    direction.begin_ns = queues_.clock_ns + (is_behind ? 0 : profile_.copy_start_ns);
    direction.end_ns =
        direction.begin_ns +
        std::max(profile_.copy_busy_ns, count > 1 ? count * profile_.batched_copy_busy_ns : 0) +
        duration_ns(copy.bytes, profile_.link_bytes_per_second);
  }

  void serve_hbm() {
    if (hbm_.serves != nullptr || hbm_.waiting.empty()) return;
    const sim_stream* stream = take_first(hbm_, [](const sim_stream* a, const sim_stream* b) {
      const bool a_later = a->priority != stream_priority::high;
      const bool b_later = b->priority != stream_priority::high;
      return std::tuple(a_later, a->ready_ns, a->id) < std::tuple(b_later, b->ready_ns, b->id);
    });
    hbm_.begin_ns = queues_.clock_ns;
    hbm_.end_ns =
        hbm_.begin_ns + duration_ns(stream->queue.front().bytes, profile_.hbm_bytes_per_second);
  }

  [[nodiscard]] static bool is_moving(const server& direction, std::uint64_t at) noexcept {
    return direction.serves != nullptr && direction.begin_ns <= at;
  }

  /// Bytes a ns of every task that moves bytes now.
  [[nodiscard]] double task_speed() const {
    const auto moving = std::count_if(tasks_.begin(), tasks_.end(), [this](const running_task& t) {
      return t.moves_from_ns <= queues_.clock_ns && t.bytes_left > negligible;
    });
    if (moving == 0) return 0;
    const double copies =
        is_moving(link_[0], queues_.clock_ns) + is_moving(link_[1], queues_.clock_ns);
    const double dram = profile_.dram_bytes_per_second;
    const auto tasks = static_cast<double>(moving);
    const double left = dram - copies * profile_.link_bytes_per_second;
    const double share = left > 0 ? left / tasks : dram / (tasks + copies);
    return std::min(share, profile_.worker_bytes_per_second) / 1e9;
  }

  [[nodiscard]] std::uint64_t end_of(const running_task& task, double speed) const {
    if (task.moves_from_ns > queues_.clock_ns) return task.moves_from_ns;
    if (task.bytes_left <= negligible) return queues_.clock_ns;
    return queues_.clock_ns + static_cast<std::uint64_t>(std::ceil(task.bytes_left / speed - 1e-6));
  }

  [[nodiscard]] std::uint64_t next_moment(bool with_tasks) const {
    std::uint64_t next = never;
    for (const auto& launched : launching_) next = std::min(next, launched.second);
    if (hbm_.serves != nullptr) next = std::min(next, hbm_.end_ns);
    for (const server& direction : link_) {
      if (direction.serves == nullptr) continue;
      const bool moves = is_moving(direction, queues_.clock_ns);
      next = std::min(next, moves ? direction.end_ns : direction.begin_ns);
    }
    const double speed = task_speed();
    for (const running_task& task : tasks_) {
      const std::uint64_t end = end_of(task, speed);
      // What is due already and may not be run now is no moment to go on to.
      if (with_tasks || end > queues_.clock_ns) next = std::min(next, end);
    }
    return next;
  }

  void advance(std::uint64_t to) {
    const double moved = task_speed() * static_cast<double>(to - queues_.clock_ns);
    for (running_task& task : tasks_) {
      if (task.moves_from_ns <= queues_.clock_ns) task.bytes_left -= moved;
    }
    queues_.clock_ns = to;
  }

  /// Lets the operations that end now take effect, in order of their streams' creation.
  void end_streams() {
    struct end {
      sim_stream* stream;
      std::uint64_t busy_ns;
    };
    end ended[3] = {};
    int count = 0;
    for (server* from : {&link_[0], &link_[1], &hbm_}) {
      if (from->serves == nullptr || from->end_ns > queues_.clock_ns) continue;
      if (from->begin_ns > queues_.clock_ns) continue;
      int at = count++;
      for (; at > 0 && ended[at - 1].stream->id > from->serves->id; --at) ended[at] = ended[at - 1];
      ended[at] = {std::exchange(from->serves, nullptr), from->end_ns - from->begin_ns};
    }
    for (int i = 0; i < count; ++i) {
      sim_stream& stream = *ended[i].stream;
      queues_.perform(stream, [&] { take_effect(stream.queue.front()); });
      queues_.finish(stream, ended[i].busy_ns);
    }
  }

  static void take_effect(const sim_operation& operation) {
    for (const copy_span& copy : operation.copies) {
      std::memcpy(copy.destination, copy.source, copy.bytes);
    }
    if (operation.what == sim_operation::kind::kernel) {
      const std::uint64_t total = operation.kernel.count();
      operation.kernel.run(0, 1, total, total);
    }
  }

  /// Runs the tasks that end now, in the order in which they were started.
  void end_tasks() {
    std::vector<sim_task> ended;
    std::erase_if(tasks_, [&](running_task& t) {
      if (t.moves_from_ns > queues_.clock_ns || t.bytes_left > negligible) return false;
      queues_.statistics.tasks.operations += 1;
      queues_.statistics.tasks.bytes += t.task.bytes;
      queues_.statistics.tasks.busy_ns += queues_.clock_ns - t.moves_from_ns;
      ended.push_back(std::move(t.task));
      return true;
    });
    for (const sim_task& task : ended) queues_.run(task.task);
  }

  static constexpr double negligible = 1e-3;  ///< of a byte: rounding, not work

  sim_queues& queues_;
  hardware_profile profile_;
  server link_[2];
  server hbm_;
  std::vector<std::pair<sim_stream*, std::uint64_t>> launching_;  ///< and when the launch is over
  std::vector<running_task> tasks_;
};

}  // namespace pulseinfer::detail
