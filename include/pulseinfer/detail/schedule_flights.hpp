// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which flights a layer scheduler looks at, and which requests each one carries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/error.hpp"
#include "pulseinfer/schedule_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// A request that a flight concerns.
struct flight_link {
  std::int32_t task = -1;
  std::int32_t next = -1;
  std::uint32_t turn = 0;     ///< that waits for it
  std::uint32_t attempt = 0;  ///< of that turn
  bool waits = false;         ///< false: it uses the pages, and nobody waits for it
};

/// Flights under way, in arrays of fixed size.
class schedule_flights {
 public:
  schedule_flights(std::int32_t max_flights, std::int64_t max_links)
      : flights_(static_cast<std::size_t>(max_flights)),
        links_(static_cast<std::size_t>(max_links)) {
    under_way_.reserve(flights_.size());
    for (std::size_t i = 0; i < links_.size(); ++i) {
      links_[i].next = i + 1 < links_.size() ? static_cast<std::int32_t>(i + 1) : -1;
    }
    free_link_ = 0;
  }

  /// @throws std::invalid_argument  on a number out of range, or of a flight that is under way
  void check(flight_id id) const {
    const auto number = static_cast<std::int32_t>(id);
    expects(number >= 0 && static_cast<std::size_t>(number) < flights_.size(),
            "layer_scheduler: flight is ", number, ", expected 0 to ", flights_.size() - 1);
    expects(flights_[static_cast<std::size_t>(number)].place < 0, "layer_scheduler: flight ",
            number, " is under way already");
  }
  /// @param link_seconds  that it is expected to keep the link busy
  void begin(flight_id id, batch_id batch = {}, double link_seconds = 0) noexcept {
    flight& f = of(id);
    f.link_seconds = link_seconds;
    link_seconds_ += link_seconds;
    f.place = static_cast<std::int32_t>(under_way_.size());
    f.batch = batch;
    under_way_.push_back(static_cast<std::int32_t>(id));
  }
  /// There is room for every request's flights: the caller counts them.
  void link(flight_id id, std::int32_t task, std::uint32_t turn, std::uint32_t attempt,
            bool waits) noexcept {
    const std::int32_t l = free_link_;
    flight_link& made = links_[static_cast<std::size_t>(l)];
    free_link_ = made.next;
    made = {task, -1, turn, attempt, waits};
    flight& f = of(id);
    (f.last >= 0 ? links_[static_cast<std::size_t>(f.last)].next : f.first) = l;
    f.last = l;
  }

  [[nodiscard]] bool empty() const noexcept { return under_way_.empty(); }
  /// That all under way keep the link busy, from their beginnings.
  [[nodiscard]] double link_seconds() const noexcept { return link_seconds_; }

  /// Polls every flight; of those that have ended, retires each and calls `ended(link, state)` for
  /// its requests, or `batch_ended(batch, state)`.
  template <class Flights, class Ended, class BatchEnded>
  void reap(Flights& flights, Ended ended, BatchEnded batch_ended) {
    for (std::size_t i = 0; i < under_way_.size();) {
      const auto id = static_cast<flight_id>(under_way_[i]);
      const flight_state state = flights.poll(id);
      if (state == flight_state::under_way) {
        ++i;
        continue;
      }
      flights.retire(id);
      const batch_id batch = of(id).batch;
      const std::int32_t last = of(id).last;
      const std::int32_t first = end(id);
      if (batch.index >= 0) batch_ended(batch, state);
      if (first < 0) continue;
      for (std::int32_t l = first; l >= 0; l = links_[static_cast<std::size_t>(l)].next) {
        ended(links_[static_cast<std::size_t>(l)], state);
      }
      links_[static_cast<std::size_t>(last)].next = free_link_;
      free_link_ = first;
    }
  }

 private:
  struct flight {
    std::int32_t place = -1;  ///< in the list of those under way
    std::int32_t first = -1;
    std::int32_t last = -1;
    batch_id batch;
    double link_seconds = 0;
  };

  [[nodiscard]] flight& of(flight_id id) noexcept {
    return flights_[static_cast<std::size_t>(static_cast<std::int32_t>(id))];
  }
  /// Out of the list; its first link.
  std::int32_t end(flight_id id) noexcept {
    flight& f = of(id);
    const std::int32_t first = f.first;
    const auto place = static_cast<std::size_t>(f.place);
    const std::int32_t other = under_way_.back();
    under_way_[place] = other;
    flights_[static_cast<std::size_t>(other)].place = f.place;
    under_way_.pop_back();
    link_seconds_ = under_way_.empty() ? 0 : link_seconds_ - f.link_seconds;
    f = {};
    return first;
  }

  std::vector<flight> flights_;
  std::vector<flight_link> links_;
  std::vector<std::int32_t> under_way_;
  double link_seconds_ = 0;
  std::int32_t free_link_ = -1;
};

}  // namespace pulseinfer::detail
