// SPDX-License-Identifier: Apache-2.0
/// @file
/// A machine without threads and without real time: one virtual clock, and an order of operations
/// that is the same in every run.
///
/// - *timed*: the order and the times follow from a cost model. Simulated figures come from it.
/// - *fuzzed*: the order is drawn from a seed, as unkind as streams, events and tasks allow. A wait
///   that is missing is a wrong byte on some seed, the same one every time.
///
/// The machine goes on inside `sync`, `sync_until` and, a little, inside a poll of a pending event.
/// A fuzzed one may also perform work inside the calls that enqueue. Host tasks run inside `sync`
/// and `sync_until` only, so the caller holds no lock there that a task takes; polls, enqueues and
/// destructors never run one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <span>
#include <utility>

#include "pulseinfer/backend/hardware_profile.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/sim_machine.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Chooses the cost model of `profile`.
struct timed {
  hardware_profile profile = {};
};

/// Chooses an order drawn from `seed`.
struct fuzzed {
  std::uint64_t seed = 0;
  int workers = 0;  ///< 0: drawn, 1 to 4
  std::uint64_t device_bytes = 80'000'000'000;
};

/// Models `backend` as a discrete-event simulation. See concepts.hpp for what every member
/// promises.
///
/// @par Threads  one: all copies of one backend, their streams and events are used by one thread
class simulated_backend {
 public:
  /// Owns a queue. Its destructor works off the queue.
  class stream {
   public:
    stream(stream&&) noexcept = default;
    stream& operator=(stream&& other) noexcept {
      std::swap(machine_, other.machine_);
      std::swap(queue_, other.queue_);
      return *this;
    }
    // NOLINTNEXTLINE(bugprone-exception-escape): a machine that cannot go on ends the program
    ~stream() {
      if (!machine_) return;
      machine_->drain([this] { return queue_->queue.empty(); });
      machine_->queues.remove_stream(queue_);
    }

   private:
    friend class simulated_backend;
    stream(std::shared_ptr<detail::sim_machine> machine, stream_priority priority)
        : machine_(std::move(machine)), queue_(machine_->add_stream(priority)) {}
    std::shared_ptr<detail::sim_machine> machine_;
    detail::sim_stream* queue_;
  };

  /// Borrows a stream, which must outlive it.
  class stream_ref {
   public:
    stream_ref(stream& owner) noexcept : queue_(owner.queue_) {}
    friend bool operator==(stream_ref, stream_ref) = default;

   private:
    friend class simulated_backend;
    detail::sim_stream* queue_;
  };

  /// Owns an event. Its destructor goes on until its last record.
  class event {
   public:
    event(event&&) noexcept = default;
    event& operator=(event&& other) noexcept {
      std::swap(machine_, other.machine_);
      std::swap(record_, other.record_);
      return *this;
    }
    // NOLINTNEXTLINE(bugprone-exception-escape): a machine that cannot go on ends the program
    ~event() {
      if (machine_) machine_->drain([this] { return state() != event_state::pending; });
    }

   private:
    friend class simulated_backend;
    explicit event(std::shared_ptr<detail::sim_machine> machine) : machine_(std::move(machine)) {}
    [[nodiscard]] event_state state() const noexcept {
      return record_ ? record_->state : event_state::done;
    }
    std::shared_ptr<detail::sim_machine> machine_;
    std::shared_ptr<detail::sim_record> record_;  ///< the last one; null before the first
  };

  /// A machine by the clock. @throws std::invalid_argument on a profile that cannot be
  explicit simulated_backend(const timed& mode = {}) : owner_(make_owner(mode.profile)) {}
  /// A machine whose order is drawn. @throws std::invalid_argument on a count of workers below 0
  explicit simulated_backend(const fuzzed& mode)
      : owner_(make_owner(mode.seed, mode.workers, mode.device_bytes)) {}

  /// What the machine has done since it was made.
  [[nodiscard]] simulated_statistics statistics() const { return machine().queues.statistics; }

  // Job 1: memory.
  [[nodiscard]] void* allocate_device(std::size_t bytes) {
    return machine().allocate_device(bytes);
  }
  void deallocate_device(void* p, std::size_t) noexcept { machine().deallocate_device(p); }
  [[nodiscard]] void* allocate_pinned(std::size_t bytes) {
    return machine().allocate_pinned(bytes);
  }
  void deallocate_pinned(void* p, std::size_t) noexcept { std::free(p); }
  /// Notes the range, and refuses what a driver refuses: a range that shares bytes with one that is
  /// registered.
  void register_pinned(void* p, std::size_t bytes) { machine().register_pinned(p, bytes); }
  void unregister_pinned(void* p, std::size_t) noexcept { machine().unregister_pinned(p); }
  /// Ranges that are registered now.
  [[nodiscard]] std::size_t registrations() const noexcept { return machine().registrations(); }
  static constexpr bool registration_pins = true;
  template <class T>
  [[nodiscard]] T* device_pointer(T* pinned) const noexcept {
    return pinned;
  }
  [[nodiscard]] memory_limits limits() const { return machine().limits(); }

  // Job 2: streams and events.
  [[nodiscard]] stream make_stream(stream_priority priority) {
    return stream(owner_->machine, priority);
  }
  [[nodiscard]] event make_event() { return event(owner_->machine); }
  void record(event& e, stream_ref s) {
    e.record_ = std::make_shared<detail::sim_record>();
    enqueue_event(detail::sim_operation::kind::record, e.record_, s);
  }
  void enqueue_wait(const event& e, stream_ref s) {
    if (e.record_) enqueue_event(detail::sim_operation::kind::wait, e.record_, s);
  }
  // NOLINTNEXTLINE(bugprone-exception-escape): a machine that cannot go on ends the program
  [[nodiscard]] event_state poll(const event& e) const noexcept {
    if (e.state() == event_state::pending) machine().poll();
    return e.state();
  }
  void sync(const event& e) {
    const auto record = e.record_;
    machine().sync([&] { return !record || record->state != event_state::pending; });
    if (record && record->state == event_state::failed) {
      throw device_error("sync: the work before the event has failed");
    }
  }
  void sync(stream_ref s) {
    machine().sync([s] { return s.queue_->queue.empty(); });
    if (s.queue_->error) std::rethrow_exception(std::exchange(s.queue_->error, nullptr));
  }
  /// @throws std::logic_error naming what is pending, when nothing can run and ready() is false
  template <class Ready>
  void sync_until(Ready ready) {
    machine().sync(std::move(ready));
  }
  /// The virtual clock.
  [[nodiscard]] std::uint64_t now_ns() const noexcept { return machine().queues.clock_ns; }

  // Job 3: copies.
  void copy_async(void* destination, const void* source, std::size_t bytes,
                  copy_direction direction, stream_ref s) {
    const copy_span copy{destination, source, bytes};
    copy_many_async({&copy, 1}, direction, s);
  }
  void copy_many_async(std::span<const copy_span> copies, copy_direction direction, stream_ref s) {
    detail::check_copies(copies);
    detail::sim_operation batch;
    batch.what = detail::sim_operation::kind::copy;
    batch.direction = direction;
    for (const copy_span& copy : copies) {
      if (copy.bytes == 0) continue;
      batch.copies.push_back(copy);
      // Within the device every byte is read and written there.
      batch.bytes += direction == copy_direction::device_to_device ? 2 * copy.bytes : copy.bytes;
    }
    if (!batch.copies.empty()) machine().enqueue(*s.queue_, std::move(batch));
  }

  // Job 4: host tasks.
  void host_async(std::span<const event* const> after, host_task task, host_cost cost = {}) {
    detail::expects(task.run != nullptr, "host_async: the task has no function");
    detail::expects(after.size() <= max_task_events, "host_async: ", after.size(),
                    " events to wait for, expected at most ", max_task_events);
    detail::sim_task added{task, cost.bytes, {}};
    for (const event* e : after) {
      detail::expects(e != nullptr, "host_async: an event is null");
      if (e->record_) added.after.push_back(e->record_);
    }
    machine().queues.tasks.push_back(std::move(added));
  }

  // Jobs 5 to 7: kernels.
  template <class Op>
  void for_each(const launch_shape& shape, const launch_limits& limits, std::uint64_t bytes,
                const Op& op, stream_ref s) {
    static_assert(detail::is_kernel_body<Op>);
    detail::check_launch(shape, limits);
    if (shape.blocks == 0 || shape.words == 0) return;
    const auto words = static_cast<std::uint64_t>(shape.words);
    enqueue_kernel(
        bytes,
        [shape, words] { return static_cast<std::uint64_t>(detail::blocks_of(shape)) * words; },
        each_word<Op>{op, words}, s);
  }
  template <class Op>
  void for_each_row(std::int64_t rows, const launch_limits& limits, std::uint64_t bytes,
                    const Op& op, stream_ref s) {
    static_assert(detail::is_kernel_body<Op>);
    detail::check_rows(rows, limits);
    if (rows == 0) return;
    enqueue_kernel(
        bytes, [rows] { return static_cast<std::uint64_t>(rows); }, each_row<Op>{op}, s);
  }
  [[nodiscard]] std::size_t top_k_workspace_bytes(const top_k_shape& shape) const {
    return detail::cpu_top_k_workspace_bytes(shape);
  }
  void top_k(const top_k_shape& shape, const top_k_keys& keys, std::int32_t* selected,
             std::int32_t* counts, std::span<std::byte> workspace, stream_ref s) {
    detail::cpu_top_k(*this, shape, keys, selected, counts, workspace, s);
  }

 private:
  template <class... Mode>
  static std::shared_ptr<detail::sim_owner> make_owner(const Mode&... mode) {
    return std::make_shared<detail::sim_owner>(std::make_shared<detail::sim_machine>(mode...));
  }

  [[nodiscard]] detail::sim_machine& machine() const noexcept { return *owner_->machine; }

  void enqueue_event(detail::sim_operation::kind what, std::shared_ptr<detail::sim_record> record,
                     stream_ref s) {
    detail::sim_operation operation;
    operation.what = what;
    operation.record = std::move(record);
    machine().enqueue(*s.queue_, std::move(operation));
  }

  /// A kernel's indices, one by one, or all of them where the body knows a shorter way.
  template <class Op>
  struct each_word {
    Op op;
    std::uint64_t words;
    void operator()(std::uint64_t i) const {
      op(static_cast<std::int64_t>(i / words), static_cast<std::int64_t>(i % words));
    }
    [[nodiscard]] bool all(std::uint64_t total) const {
      if constexpr (detail::has_whole_blocks<Op>) {
        if (words != static_cast<std::uint64_t>(op.words())) return false;
        for (std::uint64_t b = 0; b < total / words; ++b) {
          op.whole_block(static_cast<std::int64_t>(b));
        }
        return true;
      }
      return false;
    }
  };
  template <class Op>
  struct each_row {
    Op op;
    void operator()(std::uint64_t row) const {
      op(static_cast<std::int64_t>(row), detail::single_lane{});
    }
    [[nodiscard]] bool all(std::uint64_t) const { return false; }
  };

  template <class Count, class Visit>
  void enqueue_kernel(std::uint64_t bytes, Count count, Visit visit, stream_ref s) {
    detail::sim_operation kernel;
    kernel.what = detail::sim_operation::kind::kernel;
    kernel.bytes = bytes;
    kernel.kernel.count = count;
    kernel.kernel.run = [visit](std::uint64_t at, std::uint64_t stride, std::uint64_t portion,
                                std::uint64_t total) {
      if (stride == 1 && portion == total && visit.all(total)) return;
      for (; portion > 0; --portion) {
        visit(at);
        at += stride;
        if (at >= total) at -= total;
      }
    };
    machine().enqueue(*s.queue_, std::move(kernel));
  }

  std::shared_ptr<detail::sim_owner> owner_;
};
static_assert(backend<simulated_backend>);

}  // namespace pulseinfer
