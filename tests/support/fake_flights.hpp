// SPDX-License-Identifier: Apache-2.0
/// @file
/// Flights without a machine: they end when the test says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/schedule_types.hpp"

namespace test {

class fake_flights {
 public:
  explicit fake_flights(std::int32_t max_flights)
      : states_(static_cast<std::size_t>(max_flights)), used_(states_.size(), false) {}

  /// The lowest number that is free.
  pulseinfer::flight_id add() {
    std::size_t i = 0;
    while (used_[i]) ++i;
    used_[i] = true;
    states_[i] = pulseinfer::flight_state::under_way;
    return static_cast<pulseinfer::flight_id>(static_cast<std::int32_t>(i));
  }
  void land(pulseinfer::flight_id id) { states_[at(id)] = pulseinfer::flight_state::landed; }
  void fail(pulseinfer::flight_id id) { states_[at(id)] = pulseinfer::flight_state::failed; }
  [[nodiscard]] std::size_t under_way() const {
    std::size_t n = 0;
    for (const bool used : used_) n += used ? 1 : 0;
    return n;
  }
  [[nodiscard]] bool is_under_way(pulseinfer::flight_id id) const { return used_[at(id)]; }

  [[nodiscard]] pulseinfer::flight_state poll(pulseinfer::flight_id id) const noexcept {
    ++polls;
    return states_[at(id)];
  }
  void retire(pulseinfer::flight_id id) noexcept { used_[at(id)] = false; }

  mutable std::int64_t polls = 0;

 private:
  static std::size_t at(pulseinfer::flight_id id) noexcept {
    return static_cast<std::size_t>(static_cast<std::int32_t>(id));
  }
  std::vector<pulseinfer::flight_state> states_;
  std::vector<bool> used_;
};

}  // namespace test
