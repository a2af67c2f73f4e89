// SPDX-License-Identifier: Apache-2.0
/// @file
/// Who may use a sequence of a store, decided without the store's lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// A sequence's generation, whether it is open, and its leases, in one word.
///
/// Leases are taken and given back from any thread. Everything else is done by whoever has the
/// store's lock; `try_lock` keeps leases away while units are taken from under the sequence.
class sequence_gate {
 public:
  /// What a lease that was given back leaves to be done, under the store's lock.
  struct rest {
    bool is_any = false;
    std::uint32_t generation = 0;
  };

  [[nodiscard]] std::uint32_t generation() const noexcept { return generation_of(load()); }
  [[nodiscard]] bool is_open() const noexcept { return (load() & open_bit) != 0; }
  [[nodiscard]] bool is_open(std::uint32_t generation) const noexcept {
    const std::uint64_t now = load();
    return (now & open_bit) != 0 && generation_of(now) == generation;
  }
  [[nodiscard]] std::int64_t leases() const noexcept {
    return static_cast<std::int64_t>(load() & lease_mask);
  }

  /// Takes a lease; false if the sequence is not open in that generation.
  [[nodiscard]] bool acquire(std::uint32_t generation) noexcept {
    std::uint64_t now = load();
    for (;;) {
      if ((now & open_bit) == 0 || generation_of(now) != generation) return false;
      if ((now & locked_bit) != 0) {  // for the time of one eviction
        std::this_thread::yield();
        now = load();
      } else if (word_.compare_exchange_weak(now, now + 1, std::memory_order_acquire,
                                             std::memory_order_acquire)) {
        return true;
      }
    }
  }
  /// Gives a lease back.
  [[nodiscard]] rest release() noexcept {
    const std::uint64_t before = word_.fetch_sub(1, std::memory_order_acq_rel);
    return {(before & lease_mask) == 1 && (before & (open_bit | attention_bit)) != open_bit,
            generation_of(before)};
  }

  // Under the store's lock:

  void open() noexcept { word_.fetch_or(open_bit, std::memory_order_release); }
  /// No handle is valid from here on; leases stay.
  void close() noexcept {
    std::uint64_t now = load();
    while (!word_.compare_exchange_weak(now, (now & ~open_bit) + one_generation,
                                        std::memory_order_acq_rel, std::memory_order_acquire)) {
    }
  }
  /// Keeps leases away until `unlock`; false if there is one.
  [[nodiscard]] bool try_lock() noexcept {
    std::uint64_t now = load();
    while ((now & lease_mask) == 0) {
      if (word_.compare_exchange_weak(now, now | locked_bit, std::memory_order_acq_rel,
                                      std::memory_order_acquire)) {
        return true;
      }
    }
    return false;
  }
  void unlock() noexcept { word_.fetch_and(~locked_bit, std::memory_order_release); }
  /// Has the one who gives the last lease back come by.
  void call_for_attention() noexcept { word_.fetch_or(attention_bit, std::memory_order_relaxed); }
  void end_attention() noexcept { word_.fetch_and(~attention_bit, std::memory_order_relaxed); }
  [[nodiscard]] bool wants_attention() const noexcept { return (load() & attention_bit) != 0; }

 private:
  static constexpr std::uint64_t one_generation = std::uint64_t{1} << 32;
  static constexpr std::uint64_t open_bit = std::uint64_t{1} << 31;
  static constexpr std::uint64_t locked_bit = std::uint64_t{1} << 30;
  static constexpr std::uint64_t attention_bit = std::uint64_t{1} << 29;
  static constexpr std::uint64_t lease_mask = attention_bit - 1;

  [[nodiscard]] std::uint64_t load() const noexcept {
    return word_.load(std::memory_order_acquire);
  }
  [[nodiscard]] static std::uint32_t generation_of(std::uint64_t word) noexcept {
    return static_cast<std::uint32_t>(word >> 32);
  }

  std::atomic<std::uint64_t> word_{one_generation};
};

}  // namespace pulseinfer::detail
