// SPDX-License-Identifier: Apache-2.0
/// @file
/// What one transfer has of the link: what of it waits, and the times of its copies, reported as
/// they come through.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/link_monitor.hpp"
#include "pulseinfer/ticket.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Times are a backend's clock. `begin` comes first and `end` last; between them any thread may
/// call.
class link_share {
 public:
  /// The transfer has so many bytes for the link, as far as is known at the call. The monitor may be
  /// null. For the caller's thread: it takes no lock.
  void begin(link_monitor* monitor, copy_direction direction, std::size_t bytes) noexcept {
    monitor_ = monitor;
    direction_ = direction;
    bytes_left_ = static_cast<std::int64_t>(bytes);
    began_ns_ = ended_ns_ = 0;
    engine_passed_ns_.store(0, std::memory_order_relaxed);
    if (monitor_ != nullptr) monitor_->submitted(direction_, bytes_left_);
  }

  /// So many bytes it has in truth: its units have been looked up. Before the first copy.
  void resize(std::size_t size) noexcept {
    const auto bytes = static_cast<std::int64_t>(size);
    if (monitor_ != nullptr && bytes != bytes_left_) {
      monitor_->resized(direction_, bytes - bytes_left_);
    }
    bytes_left_ = bytes;
  }
  /// So many bytes of it will not come: they wait no longer.
  void give_up(std::size_t size) noexcept {
    const auto bytes = static_cast<std::int64_t>(size);
    {
      std::lock_guard lock(mutex_);
      bytes_left_ -= bytes;
    }
    if (monitor_ != nullptr) monitor_->resized(direction_, -bytes);
  }

  /// The copies wait for work of the engine's: until `engine_passed` they are not the link's.
  void wait_for_engine() noexcept { engine_passed_ns_.store(not_yet, std::memory_order_relaxed); }
  void engine_passed(std::uint64_t now) noexcept {
    engine_passed_ns_.store(now, std::memory_order_release);
  }

  /// Copies that were enqueued in one go are through. Where it is not known since when the link had
  /// them, the monitor is told of no time.
  void moved(std::size_t size, std::uint64_t enqueued_ns, std::uint64_t now) noexcept {
    const auto bytes = static_cast<std::int64_t>(size);
    const std::uint64_t passed = engine_passed_ns_.load(std::memory_order_acquire);
    const std::uint64_t began = std::min(now, std::max(enqueued_ns, passed));
    {
      std::lock_guard lock(mutex_);
      bytes_left_ -= bytes;
      began_ns_ = began_ns_ == 0 ? began : std::min(began_ns_, began);
      ended_ns_ = std::max(ended_ns_, now);
    }
    if (monitor_ != nullptr) {
      (void)monitor_->moved({direction_, bytes, seconds_of(began), seconds_of(now)});
    }
  }

  /// The transfer has ended. What has not moved will not.
  void end(transfer_report& report) noexcept {
    if (monitor_ != nullptr) monitor_->ended(direction_, bytes_left_);
    report.link_began_ns = began_ns_;
    report.link_ended_ns = ended_ns_;
  }

 private:
  static constexpr std::uint64_t not_yet = ~std::uint64_t{0};

  [[nodiscard]] static double seconds_of(std::uint64_t ns) noexcept {
    return 1e-9 * static_cast<double>(ns);
  }

  link_monitor* monitor_ = nullptr;
  copy_direction direction_ = copy_direction::host_to_device;
  std::atomic<std::uint64_t> engine_passed_ns_{0};
  std::mutex mutex_;  ///< guards what follows
  std::int64_t bytes_left_ = 0;
  std::uint64_t began_ns_ = 0;
  std::uint64_t ended_ns_ = 0;
};

}  // namespace pulseinfer::detail
