// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where a layer scheduler looks for what has ended: tickets of transfers and events of batches,
/// numbered; and snapshots of them, on which the ranks of a tensor-parallel group agree.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/schedule_types.hpp"
#include "pulseinfer/ticket.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// When a recall has landed.
enum class landing : std::uint8_t {
  ended,     ///< when its ticket is final: the transfer engine can take another one instead
  complete,  ///< when `ticket::is_complete`: earlier by as much as a host task takes
};

/// Tickets and events of one backend under numbers.
///
/// @par Threads  one at a time
/// @par Life     outlived by the engines that gave its tickets
/// @par Cost     O(1) a call, but for `sync_change` and snapshots; allocates nothing after the
///               constructor
template <backend Backend>
class flight_board {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// @param b            the machine of the tickets and streams
  /// @param max_flights  at a time; the scheduler's `max_flights`
  /// @param lands        when a recall has landed
  /// @throws std::invalid_argument  unless max_flights is 1 to 1048576
  flight_board(Backend b, std::int32_t max_flights, landing lands = landing::ended)
      : backend_(b), lands_(lands) {
    detail::expects(max_flights >= 1 && max_flights <= 1 << 20, "flight_board: max_flights is ",
                    max_flights, ", expected 1 to ", 1 << 20);
    flights_.reserve(static_cast<std::size_t>(max_flights));
    free_.reserve(static_cast<std::size_t>(max_flights));
    for (std::int32_t i = max_flights; i-- > 0;) free_.push_back(i);
    for (std::int32_t i = 0; i < max_flights; ++i)
      flights_.push_back({backend_.make_event(), std::nullopt, false});
  }

  /// Takes a transfer's ticket. It lands when the transfer has ended and all its units have come.
  /// @return empty, and the ticket is the caller's still, when there are `max_flights`
  [[nodiscard]] std::optional<flight_id> add(ticket<Backend>&& transfer) {
    if (free_.empty()) return std::nullopt;
    const std::int32_t i = take();
    (void)at(i).transfer.emplace(std::move(transfer));
    return static_cast<flight_id>(i);
  }
  /// A flight that lands when the stream has done what it holds now: a batch, as a rule.
  /// @return empty when there are `max_flights`
  [[nodiscard]] std::optional<flight_id> add(stream_ref stream) {
    if (free_.empty()) return std::nullopt;
    backend_.record(at(free_.back()).event, stream);
    return static_cast<flight_id>(take());
  }

  /// Where a flight is. A transfer of which some units did not come has failed, and so has what is
  /// no flight.
  [[nodiscard]] flight_state poll(flight_id id) const noexcept {
    if (!is_taken(id)) return flight_state::failed;
    const flight& f = flights_[static_cast<std::size_t>(static_cast<std::int32_t>(id))];
    if (f.transfer) {
      const bool is_final = f.transfer->is_final();
      if (!is_final && lands_ == landing::ended) return flight_state::under_way;
      if (f.transfer->is_complete()) return flight_state::landed;
      return is_final ? flight_state::failed : flight_state::under_way;
    }
    switch (backend_.poll(f.event)) {
      case event_state::pending:
        return flight_state::under_way;
      case event_state::done:
        return flight_state::landed;
      default:
        return flight_state::failed;
    }
  }
  /// The number is free again, and the ticket dropped. Nothing happens if it is free.
  void retire(flight_id id) noexcept {
    if (!is_taken(id)) return;
    flight& f = at(static_cast<std::int32_t>(id));
    f.transfer.reset();
    f.taken = false;
    free_.push_back(static_cast<std::int32_t>(id));
  }

  /// The ticket of a flight, null if it is none or was retired: for `enqueue_wait`, `cancel`.
  [[nodiscard]] ticket<Backend>* find(flight_id id) noexcept {
    const auto i = static_cast<std::int32_t>(id);
    if (i < 0 || static_cast<std::size_t>(i) >= flights_.size() || !at(i).transfer) return nullptr;
    return &*at(i).transfer;
  }
  [[nodiscard]] std::int32_t size() const noexcept {
    return static_cast<std::int32_t>(flights_.size() - free_.size());
  }

  /// Where all flights are, by number; those that do not exist are `under_way`.
  /// @param states  [max_flights]
  /// @throws std::invalid_argument  on another size
  void snapshot(std::span<flight_state> states) const {
    detail::expects(states.size() == flights_.size(), "flight_board: ", states.size(),
                    " states, expected ", flights_.size());
    for (std::size_t i = 0; i < flights_.size(); ++i) {
      states[i] = flights_[i].taken ? poll(static_cast<flight_id>(static_cast<std::int32_t>(i)))
                                    : flight_state::under_way;
    }
  }

  /// Blocks until a flight has ended, or the backend's clock is at `until_ns`; returns at once if
  /// there is no flight.
  void sync_change(std::uint64_t until_ns = std::numeric_limits<std::uint64_t>::max()) {
    if (size() == 0) return;
    backend_.sync_until([this, until_ns] {
      if (backend_.now_ns() >= until_ns) return true;
      const auto end = flights_.begin() + ever_taken_;
      return std::any_of(flights_.begin(), end, [this](const flight& f) {
        return f.taken && poll(id_of(f)) != flight_state::under_way;
      });
    });
  }

 private:
  struct flight {
    typename Backend::event event;
    std::optional<ticket<Backend>> transfer;
    bool taken = false;
  };

  [[nodiscard]] bool is_taken(flight_id id) const noexcept {
    const auto i = static_cast<std::int32_t>(id);
    return i >= 0 && static_cast<std::size_t>(i) < flights_.size() &&
           flights_[static_cast<std::size_t>(i)].taken;
  }
  [[nodiscard]] flight& at(std::int32_t i) noexcept {
    return flights_[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] flight_id id_of(const flight& f) const noexcept {
    return static_cast<flight_id>(static_cast<std::int32_t>(&f - flights_.data()));
  }
  std::int32_t take() noexcept {
    const std::int32_t i = free_.back();
    free_.pop_back();
    ever_taken_ = std::max(ever_taken_, i + 1);
    at(i).taken = true;
    return i;
  }

  Backend backend_;
  landing lands_;
  std::vector<flight> flights_;
  std::vector<std::int32_t> free_;
  std::int32_t ever_taken_ = 0;  ///< no later one was, as those that are free again come first
};

/// Makes of one rank's snapshot what all ranks agree on: a flight has ended when it has ended
/// everywhere, and failed if it failed anywhere. Joins `other` into `agreed`, in any order of
/// ranks. What they agree on holds for one call of `next`: afterwards numbers may be used again.
/// @throws std::invalid_argument  where the sizes differ
inline void agree_on(std::span<flight_state> agreed, std::span<const flight_state> other) {
  detail::expects(agreed.size() == other.size(), "agree_on: ", agreed.size(), " and ", other.size(),
                  " states, expected as many");
  for (std::size_t i = 0; i < agreed.size(); ++i) {
    if (agreed[i] == flight_state::under_way || other[i] == flight_state::under_way) {
      agreed[i] = flight_state::under_way;
    } else {
      agreed[i] = std::max(agreed[i], other[i]);
    }
  }
}

/// A board's flights as a snapshot says: what a rank gives its scheduler once all ranks agree.
template <class Board>
class agreed_flights {
 public:
  /// @param board   outlives this
  /// @param agreed  [max_flights], likewise
  agreed_flights(Board& board, std::span<const flight_state> agreed)
      : board_(&board), agreed_(agreed) {}
  [[nodiscard]] flight_state poll(flight_id id) const noexcept {
    return agreed_[static_cast<std::size_t>(static_cast<std::int32_t>(id))];
  }
  void retire(flight_id id) noexcept { board_->retire(id); }

 private:
  Board* board_;
  std::span<const flight_state> agreed_;
};

}  // namespace pulseinfer
