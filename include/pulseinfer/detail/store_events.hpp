// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a block store has to tell, until somebody asks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/store_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Events in their order, as many as there is room for; later ones are lost, and counted. Room for
/// none is not to want any: nothing is counted then.
///
/// All calls but the constructor allocate nothing.
/// @par Threads  one at a time
class store_events {
 public:
  explicit store_events(std::int32_t most) : events_(static_cast<std::size_t>(most)) {}

  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(events_.size() * sizeof(store_event));
  }
  [[nodiscard]] std::int64_t lost() const noexcept { return lost_; }

  void tell(const store_event& event) noexcept {
    if (waiting_ == events_.size()) {
      lost_ += events_.empty() ? 0 : 1;
    } else {
      at(waiting_++) = event;
    }
  }
  /// Hands out the oldest ones, and forgets them. @return how many
  std::size_t drain(std::span<store_event> to) noexcept {
    const std::size_t n = std::min(to.size(), waiting_);
    for (std::size_t i = 0; i < n; ++i) to[i] = at(i);
    if (n > 0) first_ = (first_ + n) % events_.size();
    waiting_ -= n;
    return n;
  }

 private:
  /// One of those that wait, or the place behind them.
  [[nodiscard]] store_event& at(std::size_t i) noexcept {
    return events_[(first_ + i) % events_.size()];
  }

  std::vector<store_event> events_;  ///< a ring
  std::size_t first_ = 0;
  std::size_t waiting_ = 0;
  std::int64_t lost_ = 0;
};

}  // namespace pulseinfer::detail
