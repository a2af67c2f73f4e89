// SPDX-License-Identifier: Apache-2.0
/// @file
/// The layer scheduler: requests as sequences of layers that can be put aside while their blocks
/// travel, run in batches that are kept together.
///
/// The engine asks `next` what to do and does it; it tells what it started and what it found.
/// Time, and what has ended on the machine, come in as arguments, so a decision depends on the
/// calls before alone: ranks of a tensor-parallel group that make the same calls with the same
/// arguments decide alike (flight_board.hpp has snapshots that they can agree on).
///
/// One step of one request, layer by layer:
///
///     selecting ── selected ──► recalling ── landed ──► ready ── run ──► running ── completed ─┐
///         ▲                                                                                    │
///         └───────────────────────── the next layer ◄──────────────────────────────────────────┘
///
/// and after the last layer `done`, until `restart`. A request whose layer needs pages that are not
/// there is `waiting`; one that was interrupted is `parked` at its layer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>

#include "pulseinfer/detail/schedule_core.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/schedule_types.hpp"
#include "pulseinfer/step_cost.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Decides which layer of which requests runs next.
///
/// Groups: requests run in as many groups as `best_groups` says for the work as it is measured, so
/// that one computes while the blocks of another travel. Groups that became too many, because a
/// request entered, resumed or came too late, become one again where they meet at a layer.
///
/// Progress: what is ready runs before `max_wait_batches` other batches do. The oldest request gets
/// its pages, if need be from younger ones, whose recall is then in vain. Older ones that the engine
/// put aside, or that are done and not restarted, keep theirs: `preempt` and `cancel` are the
/// engine's, and while only they could give what is lacking the answer is `wait`.
///
/// Errors: a stale handle, a call that does not fit the state, a value out of range throw a
/// `std::logic_error` type and change nothing.
///
/// @par Threads  one at a time
/// @par Cost     `next` is O(requests of the batch + groups + flights under way); a call for a
///               request is O(1). Where pages are counted and lacking, O(requests) more. Nothing is
///               allocated after the constructor, and nothing blocks
class layer_scheduler {
 public:
  /// @throws std::invalid_argument  naming the option and its limit
  explicit layer_scheduler(const scheduler_options& options) : core_(options) {}

  // What the engine tells of requests.

  /// A request enters at layer 0.
  /// @return empty when there are `max_requests`
  /// @throws std::invalid_argument  on more pages than there are, or bytes that are no number
  [[nodiscard]] std::optional<request_id> add(const request_work& work = {}) {
    detail::expects(work.bytes <= 1e18, "layer_scheduler: bytes is ", work.bytes,
                    ", expected at most 1e18");
    core_.check_pages(work.pages);
    const std::int32_t i = core_.books.open();
    if (i < 0) return std::nullopt;
    double& bytes = core_.books.record(i).bytes;
    bytes = work.bytes < 0 ? core_.options.work.request_bytes : work.bytes;
    core_.grouping.entered(bytes);
    (void)core_.pages.need(core_.books, i, work.pages);
    core_.enter(i);
    return core_.books.id_of(i);
  }
  /// A request that is done begins its next step.
  void restart(request_id request) {
    const std::int32_t i = core_.books.index_of(request);
    detail::layer_task& t = core_.books.task(i);
    core_.expects_state(core_.books.state(i) == layer_state::done, "restart", i);
    t.done = false;
    core_.enter(i);
  }

  /// What the layer of a request reads is known, or will be on the device. While the request's
  /// batch runs, this speaks of the layer behind it: an engine may choose for the next layer in the
  /// same launches.
  /// @throws std::invalid_argument  on bytes that are negative or no number, or on too many pages
  /// @throws std::logic_error       where the selection of that layer is known already
  selected_outcome selected(request_id request, const recall_need& need) {
    const std::int32_t i = core_.books.index_of(request);
    detail::layer_task& t = core_.books.task(i);
    detail::expects(
        need.bytes >= 0 && need.bytes <= 1e18 && need.ahead_bytes >= 0 && need.ahead_bytes <= 1e18,
        "selected: ", need.bytes, " and ", need.ahead_bytes, " bytes, expected 0 to 1e18");
    core_.check_pages(need.pages);
    const std::uint32_t turn = core_.turn_of(request.index, "selected", 0);
    detail::task_turn& at = t.at(turn);
    core_.expects_state(!at.selected, "selected (it was told already)", i);
    core_.grouping.saw(need, t.layer + static_cast<std::int32_t>(turn - t.turn));
    const bool has_pages = core_.pages.need(core_.books, i, need.pages);
    at.selected = true;
    at.owes_recall = need.bytes > 0;
    at.told_recall = at.owes_recall && has_pages;
    core_.changed(i);
    if (!has_pages) return selected_outcome::wait_for_pages;
    return at.owes_recall ? selected_outcome::recall_now : selected_outcome::nothing_to_recall;
  }

  /// A flight brings blocks of these requests, all at one layer; their layer runs when it, and
  /// other such flights of theirs, have landed. While a request's batch runs, this speaks of the
  /// layer behind it. A request that is late waits for this flight instead of those before.
  ///
  /// @param requests  each once; read before the call returns
  /// @param flight    not under way; the scheduler looks at it until it ends
  /// @param now_ns    by the clock of `next`
  /// @param terms     until when it is waited for, what it brings, and for which layer
  /// @throws std::invalid_argument, std::logic_error  changing nothing; also on a request with
  ///         `flights_per_request` flights, or without the pages it lacks
  void recalling(std::span<const request_id> requests, flight_id flight, std::uint64_t now_ns,
                 const recall_terms& terms = {}) {
    detail::expects(terms.bytes >= 0 && terms.bytes <= 1e18, "recalling: ", terms.bytes,
                    " bytes, expected 0 to 1e18");
    detail::expects(terms.layers_ahead == 0 || terms.layers_ahead == 1,
                    "recalling: layers_ahead is ", terms.layers_ahead, ", expected 0 or 1");
    core_.check_flight(requests, flight);
    for (const request_id request : requests) {
      const detail::layer_task& t = core_.books.task(core_.books.index_of(request));
      (void)core_.turn_of(request.index, "recalling", terms.layers_ahead);
      core_.expects_state(!t.lacks_pages(), "recalling (it lacks pages)", request.index);
    }
    const double link_seconds = core_.link_seconds_of(terms.bytes);
    const std::uint64_t due = core_.due_of(now_ns, link_seconds);
    core_.flights.begin(flight, {}, link_seconds);
    for (const request_id request : requests) {
      detail::layer_task& t = core_.books.task(request.index);
      const std::uint32_t turn = core_.turn_of(request.index, "recalling", terms.layers_ahead);
      detail::task_turn& at = t.at(turn);
      detail::task_record& record = core_.books.record(request.index);
      if (at.is_late || at.lost) {
        ++at.attempt;
        at.waits = 0;
        at.lost = at.is_late = at.told_late = at.has_deadline = false;
      }
      if (terms.layers_ahead == 0) at.owes_recall = false;
      std::uint64_t& due_ns = record.due_ns[turn % 4];
      due_ns = at.waits > 0 ? std::max(due_ns, due) : due;
      ++at.waits;
      if (terms.deadline_ns != detail::no_deadline) {
        std::uint64_t& deadline = record.deadline_ns[turn % 4];
        deadline = at.has_deadline ? std::min(deadline, terms.deadline_ns) : terms.deadline_ns;
        at.has_deadline = true;
      }
      ++t.flights;
      core_.flights.link(flight, request.index, turn, at.attempt, true);
      core_.changed(request.index);
    }
  }

  /// A flight uses pages of these requests, and nobody waits for it: a store, as a rule. Pages are
  /// not given back before it ends.
  /// @throws as `recalling`
  void hold(std::span<const request_id> requests, flight_id flight) {
    core_.check_flight(requests, flight);
    core_.flights.begin(flight);
    for (const request_id request : requests) {
      ++core_.books.task(request.index).flights;
      core_.flights.link(flight, request.index, 0, 0, false);
    }
  }

  /// The layer of a request does not wait any more for what was to be recalled: it runs with what
  /// is there. Whatever is still under way for it is not waited for, but uses its pages.
  /// @throws std::logic_error  unless it is recalling or ready
  void fall_back(request_id request) {
    const std::int32_t i = core_.books.index_of(request);
    detail::layer_task& t = core_.books.task(i);
    if (core_.books.state(i) == layer_state::ready) return;
    core_.expects_state(core_.books.state(i) == layer_state::recalling, "fall_back", i);
    t.forget(t.turn);
    t.now().selected = t.now().told_select = true;
    core_.changed(i);
  }

  /// Puts a request aside, at its layer; one that runs, at the end of its batch. It keeps its
  /// pages unless an older one lacks them, and what is under way for it goes on. One whose pages are
  /// being taken back will not go on when they are back.
  leave_outcome interrupt(request_id request) {
    const std::int32_t i = core_.books.index_of(request);
    detail::layer_task& t = core_.books.task(i);
    const bool was_to_resume = t.resumes_after && !t.leaving;
    t.resumes_after = false;
    if (core_.books.is_running(i) && !t.leaving) {
      t.parks_after = true;
      return leave_outcome::later;
    }
    if (was_to_resume) return leave_outcome::at_once;
    if (t.parked || t.done || t.leaving) return leave_outcome::not_running;
    core_.park(i);
    return leave_outcome::at_once;
  }
  /// A request that was put aside goes on where it was; one that runs is not put aside after all.
  /// @throws std::logic_error  if it was not put aside
  void resume(request_id request) {
    const std::int32_t i = core_.books.index_of(request);
    detail::layer_task& t = core_.books.task(i);
    core_.expects_state(!t.leaving && (t.parked || t.parks_after), "resume", i);
    if (t.giving_back) {
      t.resumes_after = true;
    } else if (core_.books.is_running(i)) {
      t.parks_after = false;
    } else {
      t.parked = false;
      core_.enter(i);
    }
  }
  /// Puts a request aside and takes its pages back. When it goes on, its layer is selected and
  /// recalled anew.
  /// @return `later`: a `release` decision says when the pages are back
  leave_outcome preempt(request_id request) {
    const std::int32_t i = core_.books.index_of(request);
    detail::layer_task& t = core_.books.task(i);
    if (t.leaving) return leave_outcome::not_running;
    t.resumes_after = false;
    if (!core_.books.is_running(i) && t.flights == 0) {
      core_.park(i);
      core_.give_back(i);
      return leave_outcome::at_once;
    }
    core_.begin_giving_back(i);
    return leave_outcome::later;
  }
  /// A request leaves, in whatever state. Its handle is good until its pages are back.
  /// @return `later`: a `release` decision says when it is gone
  leave_outcome cancel(request_id request) {
    const std::int32_t i = core_.books.index_of(request);
    detail::layer_task& t = core_.books.task(i);
    t.leaving = true;
    if (!core_.books.is_running(i)) core_.books.leave(i);
    if (!core_.books.is_running(i) && t.flights == 0) {
      core_.close(i);
      return leave_outcome::at_once;
    }
    core_.books.settle(i);
    return leave_outcome::later;
  }

  // What the engine does.

  /// What to do next. First takes note of the flights that have ended, so that it never says there
  /// is nothing to run while something has landed.
  ///
  /// @param now_ns   does not go back; the clock of deadlines
  /// @param flights  where they are; of ranks that must agree, what they agreed on
  /// @return release, late, select and recall come before run; after `wait` ask again when a flight
  ///         has ended, a call was made, or at `until_ns`. A request that this very call found to have
  ///         run its last layer is `done` then: look at `counts` before waiting, and `restart` it
  template <tells_flights Flights>
  schedule_decision next(std::uint64_t now_ns, Flights& flights) {
    core_.flights.reap(
        flights,
        [this](const detail::flight_link& link, flight_state state) { core_.ended(link, state); },
        [this](batch_id batch, flight_state state) { core_.batch_ended(batch, state); });
    core_.books.count_ready();
    if (now_ns >= core_.first_deadline_ns) core_.find_late(now_ns);
    core_.pages.grant(
        core_.books, [this](std::int32_t i) { core_.changed(i); },
        [this](std::int32_t i) {
          detail::layer_task& t = core_.books.task(i);
          t.resumes_after = !t.parked && !t.parks_after;
          ++core_.statistics.preemptions;
          core_.begin_giving_back(i);
        });
    schedule_decision decision = core_.tell();
    if (!decision.requests.empty()) return decision;
    decision.until_ns = core_.first_deadline_ns;
    if (core_.running < core_.options.batches_in_flight) {
      const auto choice = core_.grouping.choose(core_.books, now_ns, core_.running);
      if (choice.group >= 0) return core_.run(choice.group);
      decision.until_ns = std::min(decision.until_ns, choice.until_ns);
    }
    const schedule_counts& n = core_.books.counts;
    const bool is_idle = core_.flights.empty() && core_.running == 0 &&
                         n.total() == n[layer_state::parked] + n[layer_state::done];
    decision.action = is_idle ? schedule_action::idle : schedule_action::wait;
    return decision;
  }

  /// A batch was started, and a flight tells when it is complete.
  /// @throws std::invalid_argument  on a batch that is not running, or a flight as `recalling`
  void issued(batch_id batch, flight_id flight) {
    core_.check_batch(batch);
    core_.flights.check(flight);
    core_.flights.begin(flight, batch);
  }
  /// A batch that no flight tells of is complete: its requests are at their next layer.
  /// @throws std::invalid_argument  on a batch that is not running
  void completed(batch_id batch) {
    core_.check_batch(batch);
    core_.end(batch, true);
  }
  /// A batch was not started after all: its requests are ready again.
  /// @throws std::invalid_argument  on a batch that is not running
  void withdraw(batch_id batch) {
    core_.check_batch(batch);
    core_.end(batch, false);
  }

  // What there is.

  [[nodiscard]] const scheduler_options& options() const noexcept { return core_.options; }
  [[nodiscard]] const schedule_counts& counts() const noexcept { return core_.books.counts; }
  [[nodiscard]] const schedule_statistics& statistics() const noexcept { return core_.statistics; }
  [[nodiscard]] layer_state state_of(request_id request) const {
    return core_.books.state(core_.books.index_of(request));
  }
  [[nodiscard]] std::int32_t layer_of(request_id request) const {
    return core_.books.tasks[static_cast<std::size_t>(core_.books.index_of(request))].layer;
  }
  [[nodiscard]] std::int32_t pages_of(request_id request) const {
    return core_.books.tasks[static_cast<std::size_t>(core_.books.index_of(request))].pages_held;
  }
  [[nodiscard]] std::int32_t free_pages() const noexcept { return core_.pages.free(); }
  [[nodiscard]] std::int32_t batches_running() const noexcept { return core_.running; }
  /// How many groups the cost model wants at present.
  [[nodiscard]] std::int32_t planned_groups() const noexcept {
    return core_.grouping.planned_groups();
  }
  /// A layer's work, its recalls as measured so far.
  [[nodiscard]] const layer_work& work() const noexcept { return core_.grouping.work(); }

 private:
  detail::schedule_core core_;
};

}  // namespace pulseinfer
