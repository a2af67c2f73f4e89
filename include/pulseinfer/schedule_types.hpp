// SPDX-License-Identifier: Apache-2.0
/// @file
/// What goes into a layer scheduler and comes out of it, as values: handles, states, decisions,
/// counts, sizes.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <span>

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/step_cost.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A request of a scheduler. The index is below `max_requests` and may serve as a row of the
/// engine's own arrays; the generation makes a handle that outlived its request an error.
struct request_id {
  std::int32_t index = -1;
  std::uint32_t generation = 0;
  friend bool operator==(request_id, request_id) = default;
};

/// A batch that the scheduler gave out to be run.
struct batch_id {
  std::int32_t index = -1;
  std::uint32_t generation = 0;
  friend bool operator==(batch_id, batch_id) = default;
};

/// Something under way on the machine that the scheduler is to look at: a recall, a store, a batch.
/// The engine numbers them, below `max_flights`; flight_board.hpp does so for tickets and events.
enum class flight_id : std::int32_t { none = -1 };

/// Where a flight is. The last two are final.
enum class flight_state : std::uint8_t {
  under_way,
  landed,
  failed,  ///< it ended, and not everything came
};

/// Tells where flights are. `poll` does not block; a flight whose final state the scheduler has
/// seen is retired once, and its number may be used again.
template <class F>
concept tells_flights = requires(F& flights, flight_id id) {
  { flights.poll(id) }
  noexcept->std::same_as<flight_state>;
  { flights.retire(id) }
  noexcept;
};

/// Where a request is. It is in exactly one of these.
enum class layer_state : std::uint8_t {
  waiting,    ///< for pages
  selecting,  ///< what its layer reads is not known yet
  recalling,  ///< what its layer reads is not all there
  ready,      ///< its layer can run
  running,    ///< its layer is in a batch that was given out
  parked,     ///< interrupted or preempted, at a layer
  done,       ///< has run all layers of its step
  leaving,    ///< cancelled; the machine, or the engine, still has its pages
};
inline constexpr int layer_states = 8;

/// What the engine does next.
enum class schedule_action : std::uint8_t {
  release,  ///< take the pages of these requests back; those that were cancelled are gone with it
  select,   ///< choose what the layer of these requests reads, then call `selected` for each
  recall,   ///< these have their pages now: start their recall, and call `recalling`
  late,     ///< a deadline is over, or a recall did not bring everything: `fall_back`, recall or
            ///< recompute (`recalling` again), `cancel`, or let it go on
  run,      ///< run the layer of these requests, then call `issued`
  wait,     ///< nothing to do until a flight ends or `until_ns`
  idle,     ///< nothing to do, and nothing under way
};

/// A decision. The requests are valid until the next call of the scheduler.
struct [[nodiscard]] schedule_decision {
  schedule_action action = schedule_action::idle;
  std::int32_t layer = -1;                    ///< of all the requests
  std::span<const request_id> requests = {};  ///< none for `wait` and `idle`
  batch_id batch = {};                        ///< of `run`
  std::uint64_t until_ns = std::numeric_limits<std::uint64_t>::max();  ///< of `wait`
};

/// What is known of a request when it enters.
struct request_work {
  double bytes = -1;       ///< read from device memory a layer; below 0: as `options.work` says
  std::int32_t pages = 0;  ///< held before its first layer; 0 to all of them
};

/// What a selection found.
struct recall_need {
  double bytes = 0;        ///< to be recalled now
  double ahead_bytes = 0;  ///< recalled ahead already, under way or here
  std::int32_t pages = 0;  ///< in all, that the request must hold to run the layer
};

/// What follows from a selection.
enum class [[nodiscard]] selected_outcome : std::uint8_t{
    nothing_to_recall,
    recall_now,      ///< the request has its pages: start the recall and call `recalling`
    wait_for_pages,  ///< a decision will say when
};

/// How a recall is waited for.
struct recall_terms {
  double bytes = 0;  ///< of all its requests together
  std::uint64_t deadline_ns = std::numeric_limits<std::uint64_t>::max();  ///< then it is late
  std::int32_t layers_ahead = 0;  ///< 1: for the layer behind the one that selects now
};

/// What became of a wish to interrupt, preempt or cancel.
enum class [[nodiscard]] leave_outcome : std::uint8_t{
    at_once,      ///< it is so; pages that were to be given back are the engine's again
    later,        ///< behind a batch or flights that still use its pages; a `release` will tell
    not_running,  ///< `interrupt` of a request that is parked, done or leaving: nothing changed
};

/// How many requests are in each state.
struct schedule_counts {
  std::int32_t of[layer_states] = {};
  [[nodiscard]] constexpr std::int32_t operator[](layer_state s) const noexcept {
    return of[static_cast<int>(s)];
  }
  /// All requests of the scheduler.
  [[nodiscard]] constexpr std::int32_t total() const noexcept {
    std::int32_t sum = 0;
    for (const std::int32_t n : of) sum += n;
    return sum;
  }
};

/// What a scheduler has done so far.
struct schedule_statistics {
  std::int64_t batches = 0;
  std::int64_t layers_run = 0;   ///< of requests: the batches' sizes added up
  std::int64_t merges = 0;       ///< of two groups
  std::int64_t splits = 0;       ///< of a group in two, as planned
  std::int64_t left_behind = 0;  ///< requests whose group did not wait for them
  std::int64_t preemptions = 0;  ///< that the scheduler itself made
  std::int64_t late = 0;         ///< requests that were reported late
};

/// Sizes and costs of a scheduler. Everything it needs is allocated by its constructor.
struct scheduler_options {
  std::int32_t max_requests = 256;
  std::int32_t layers = 32;
  std::int32_t max_groups = 16;          ///< that are planned; 1: no interleaving
  std::int32_t max_flights = 1024;       ///< at a time
  std::int32_t flights_per_request = 8;  ///< at a time
  std::int32_t batches_in_flight = 2;    ///< given out and not complete
  std::int32_t max_wait_batches = 256;   ///< what is ready runs before so many others do
  std::int32_t pages = 0;                ///< of all requests; 0: the scheduler counts no pages
  layer_work work = {};                  ///< of a layer, until measurements replace its recalls
  step_speeds speeds = {.device_bytes_per_second = 3350e9,
                        .link_bytes_per_second = 56e9,
                        .launch_seconds = 4e-6,
                        .recall_seconds = 20e-6,
                        .recall_busy_seconds = 2.3e-6};
};

namespace detail {

inline scheduler_options checked_scheduler_options(const scheduler_options& o) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
    expects(value >= least && value <= most, "layer_scheduler: ", name, " is ", value,
            ", expected ", least, " to ", most);
  };
  check("max_requests", o.max_requests, 1, 1 << 16);
  check("layers", o.layers, 1, 1 << 16);
  check("max_groups", o.max_groups, 1, 1 << 16);
  check("max_flights", o.max_flights, 1, 1 << 20);
  check("flights_per_request", o.flights_per_request, 1, 1024);
  check("batches_in_flight", o.batches_in_flight, 1, 1024);
  check("max_wait_batches", o.max_wait_batches, 1, 1 << 30);
  check("pages", o.pages, 0, 1 << 30);
  check_work(o.work);
  check_speeds(o.speeds);
  return o;
}

}  // namespace detail
}  // namespace pulseinfer
