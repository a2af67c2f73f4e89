// SPDX-License-Identifier: Apache-2.0
/// @file
/// What waits for one direction of a link.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Bytes and transfers, neither ever fewer than none, nor more than a number can say. Without a
/// lock: whoever submits a transfer does not wait for those who report of theirs.
///
/// Each of the two is right by itself; who reads both may see a transfer of which the bytes are
/// not counted yet, or no longer.
class link_queue {
 public:
  void add_bytes(std::int64_t change) noexcept { add(bytes_, change); }
  void add_transfers(std::int64_t change) noexcept { add(transfers_, change); }
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return bytes_.load(std::memory_order_relaxed);
  }
  [[nodiscard]] std::int64_t transfers() const noexcept {
    return transfers_.load(std::memory_order_relaxed);
  }

 private:
  using count = std::atomic<std::int64_t>;
  static_assert(count::is_always_lock_free);

  static void add(count& to, std::int64_t change) noexcept {
    std::int64_t now = to.load(std::memory_order_relaxed);
    while (!to.compare_exchange_weak(now, sum(now, change), std::memory_order_relaxed)) {
    }
  }
  [[nodiscard]] static std::int64_t sum(std::int64_t now, std::int64_t change) noexcept {
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    return change > most - now ? most : std::max<std::int64_t>(now + change, 0);
  }

  count bytes_{0};
  count transfers_{0};
};

}  // namespace pulseinfer::detail
