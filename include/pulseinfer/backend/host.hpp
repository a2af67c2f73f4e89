// SPDX-License-Identifier: Apache-2.0
/// @file
/// The host as a machine: real threads in place of streams, host memory in place of a device's.
///
/// No work is eager here. A stream is a thread that works off its queue; an event is done when that
/// thread gets to it, at once only where nothing is queued before it. A wait that is missing is therefore a data race, and ThreadSanitizer says so.
/// Copies between host and "device" can be paced to the speed of a link, so that overlap takes real
/// time.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/host_memory.hpp"
#include "pulseinfer/detail/host_stream.hpp"
#include "pulseinfer/detail/host_workers.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// How many workers, where they run, and how fast a link.
struct host_options {
  int workers = 2;             ///< threads for host tasks, 1 to 1024
  link_pace link = {};         ///< the copy's thread spins until the link would be done
  std::vector<int> cpus = {};  ///< on which the workers may run, see numa.hpp; empty: on any
};

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
  /// @throws std::system_error      when the system has no more threads
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
  /// The device is the host: it reaches all memory, and nothing keeps that in place.
  void register_pinned(void*, std::size_t) {}
  void unregister_pinned(void*, std::size_t) noexcept {}
  static constexpr bool registration_pins = false;
  static constexpr bool starts_kernels_at_once = true;  ///< they are calls: no launch to hide
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
  /// @throws std::bad_alloc  when the queue cannot grow; the event is what it was
  void record(event& e, stream_ref s) {
    s.queue_->make_room();  // a record that no stream has would be waited for for ever
    s.queue_->push_record(e.state_->begin());
  }
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
