// SPDX-License-Identifier: Apache-2.0
/// @file
/// The simulated machine behind the copies of one backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>
#include <utility>
#include <variant>

#include "pulseinfer/backend/hardware_profile.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/sim_fuzzed.hpp"
#include "pulseinfer/detail/sim_queues.hpp"
#include "pulseinfer/detail/sim_timed.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// The queues, the memory, and one of the two orders.
class sim_machine {
 public:
  explicit sim_machine(const hardware_profile& profile)
      : device_bytes_(profile.device_bytes),
        order_(std::in_place_type<timed_order>, queues, profile) {}
  sim_machine(std::uint64_t seed, int workers, std::uint64_t device_bytes)
      : device_bytes_(device_bytes),
        order_(std::in_place_type<fuzzed_order>, queues, seed, workers) {}
  sim_machine(const sim_machine&) = delete;
  sim_machine& operator=(const sim_machine&) = delete;
  ~sim_machine() {
    for (const auto& allocation : device_) std::free(allocation.first);
  }

  sim_queues queues;

  sim_stream* add_stream(stream_priority priority) {
    sim_stream* const added = queues.add_stream(priority);
    std::visit([added](auto& order) { order.stream_added(*added); }, order_);
    return added;
  }

  void enqueue(sim_stream& stream, sim_operation operation) {
    queues.enqueue(stream, std::move(operation));
    if (queues.is_performing()) return;
    std::visit([](auto& order) { order.enqueued(); }, order_);
  }

  void poll() {
    if (queues.is_performing()) return;
    std::visit([](auto& order) { order.poll(); }, order_);
  }

  /// Goes on, host tasks included, until `done()`.
  template <class Done>
  void sync(Done done) {
    expects<std::logic_error>(!queues.is_in_task() && !queues.is_performing(),
                              "sync: called inside a host task or a kernel, which may not wait");
    queues.settle();
    while (!done()) {
      if (step(true) || done()) continue;  // what is pending is put into words only when it matters
      throw std::logic_error("sync: deadlock, nothing is left that can run; " + queues.pending());
    }
  }

  /// Goes on without host tasks until `done()`. Enqueued work never waits for one.
  template <class Done>
  void drain(Done done) {
    queues.settle();
    while (!done() && step(false)) {
    }
  }

  /// Runs all there is.
  void finish() {
    while (step(true)) {
    }
  }

  [[nodiscard]] void* allocate_device(std::size_t bytes) {
    if (bytes == 0) return nullptr;
    if (bytes > device_bytes_ - device_used_) {
      throw out_of_memory(text_of("simulated_backend: no ", bytes,
                                  " bytes of device memory to be had, free are ",
                                  device_bytes_ - device_used_, " of ", device_bytes_));
    }
    void* const p = allocate(bytes, limits_.device_alignment, "device", 0xbe);
    device_.emplace(p, bytes);
    device_used_ += bytes;
    return p;
  }
  void deallocate_device(void* p) noexcept {
    const auto found = device_.find(p);
    if (found == device_.end()) return;
    device_used_ -= found->second;
    device_.erase(found);
    std::free(p);
  }
  [[nodiscard]] void* allocate_pinned(std::size_t bytes) const {
    return bytes == 0 ? nullptr : allocate(bytes, limits_.pinned_alignment, "pinned", 0xcd);
  }
  void register_pinned(void* p, std::size_t bytes) {
    if (bytes == 0) return;
    auto* const first = static_cast<std::byte*>(p);
    const auto next = registered_.upper_bound(first);
    const bool is_free =
        (next == registered_.end() || next->first >= first + bytes) &&
        (next == registered_.begin() || std::prev(next)->first + std::prev(next)->second <= first);
    if (!is_free) {
      throw device_error(text_of("simulated_backend: a part of the ", bytes,
                                 " bytes to register is registered already"));
    }
    registered_.emplace(first, bytes);
  }
  void unregister_pinned(void* p) noexcept { registered_.erase(static_cast<std::byte*>(p)); }
  [[nodiscard]] std::size_t registrations() const noexcept { return registered_.size(); }
  [[nodiscard]] memory_limits limits() const noexcept {
    memory_limits found = limits_;
    found.device_bytes_total = device_bytes_;
    found.device_bytes_free = device_bytes_ - device_used_;
    return found;
  }

 private:
  bool step(bool with_tasks) {
    return std::visit([with_tasks](auto& order) { return order.step(with_tasks); }, order_);
  }

  /// Memory up to 64 MiB is filled, so that what is read before it is written shows.
  static void* allocate(std::size_t bytes, std::size_t alignment, const char* kind, int fill) {
    const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
    void* const p = rounded < bytes ? nullptr : std::aligned_alloc(alignment, rounded);
    if (p == nullptr) {
      throw out_of_memory(
          text_of("simulated_backend: no ", bytes, " bytes of ", kind, " memory to be had"));
    }
    if (bytes <= (std::size_t{64} << 20)) std::memset(p, fill, rounded);
    return p;
  }

  static constexpr memory_limits limits_{};
  std::uint64_t device_bytes_;
  std::uint64_t device_used_ = 0;
  std::map<void*, std::size_t> device_;
  std::map<std::byte*, std::size_t> registered_;
  std::variant<timed_order, fuzzed_order> order_;
};

/// What the copies of a backend share. Streams and events hold the machine itself: they may outlive
/// it, the tasks may not.
struct sim_owner {
  std::shared_ptr<sim_machine> machine;
  explicit sim_owner(std::shared_ptr<sim_machine> of) : machine(std::move(of)) {}
  sim_owner(const sim_owner&) = delete;
  sim_owner& operator=(const sim_owner&) = delete;
  // NOLINTNEXTLINE(bugprone-exception-escape): a machine that cannot go on ends the program
  ~sim_owner() { machine->finish(); }
};

}  // namespace pulseinfer::detail
