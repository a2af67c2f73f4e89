// SPDX-License-Identifier: Apache-2.0
/// @file
/// What follows from what: how requests of a layer scheduler go from state to state, and what the
/// engine is to be told of it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "pulseinfer/detail/schedule_books.hpp"
#include "pulseinfer/detail/schedule_flights.hpp"
#include "pulseinfer/detail/schedule_grouping.hpp"
#include "pulseinfer/detail/schedule_pages.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/schedule_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// The parts of a scheduler, and the changes that concern several of them.
class schedule_core {
 public:
  explicit schedule_core(const scheduler_options& o)
      : options(checked_scheduler_options(o)),
        books(o.max_requests),
        flights(o.max_flights, std::int64_t{o.max_requests} * o.flights_per_request),
        pages(o.pages, static_cast<std::uint64_t>(o.max_wait_batches)),
        grouping(o),
        told_(static_cast<std::size_t>(o.max_requests)) {
    out_.reserve(static_cast<std::size_t>(o.max_requests));
  }

  void expects_state(bool holds, const char* call, std::int32_t i) const {
    expects<std::logic_error>(holds, "layer_scheduler: ", call, " of a request in state ",
                              static_cast<int>(books.state(i)), " at layer ",
                              books.tasks[static_cast<std::size_t>(i)].layer);
  }
  void check_pages(std::int32_t wanted) const {
    expects(wanted >= 0 && wanted <= options.pages, "layer_scheduler: pages is ", wanted,
            ", expected 0 to ", options.pages);
  }
  void check_flight(std::span<const request_id> requests, flight_id flight) {
    flights.check(flight);
    ++looks_;
    for (const request_id request : requests) {
      const layer_task& t = books.task(books.index_of(request));
      std::uint64_t& looked_at = books.record(request.index).looked_at;
      expects_state(!t.leaving, "a flight", request.index);
      expects(looked_at != looks_, "layer_scheduler: request ", request.index,
              " stands here twice");
      expects(t.flights < options.flights_per_request, "layer_scheduler: request ", request.index,
              " has ", t.flights, " flights, flights_per_request allows no more");
      looked_at = looks_;
    }
  }
  [[nodiscard]] bool is_running(batch_id batch) const noexcept {
    if (batch.index < 0 || static_cast<std::size_t>(batch.index) >= books.groups.size()) {
      return false;
    }
    const task_group& g = books.groups[static_cast<std::size_t>(batch.index)];
    return g.running && g.generation == batch.generation;
  }
  void check_batch(batch_id batch) const {
    expects(is_running(batch), "layer_scheduler: batch ", batch.index, " of generation ",
            batch.generation, " is not running");
  }
  /// The layer that a call speaks of, counted over all steps.
  [[nodiscard]] std::uint32_t turn_of(std::int32_t i, const char* call, std::int32_t ahead) const {
    const layer_task& t = books.tasks[static_cast<std::size_t>(i)];
    expects_state(!t.leaving && !t.done, call, i);
    ahead += books.is_running(i) ? 1 : 0;
    expects_state(t.layer + ahead < options.layers, call, i);
    return t.turn + static_cast<std::uint32_t>(ahead);
  }
  [[nodiscard]] double link_seconds_of(double bytes) const noexcept {
    return bytes / options.speeds.link_bytes_per_second + options.speeds.recall_busy_seconds;
  }
  /// When a recall is expected, if the link does one after the other. A link that is faster than it
  /// was said to be has no more before it than what is under way.
  [[nodiscard]] std::uint64_t due_of(std::uint64_t now_ns, double link_seconds) noexcept {
    link_free_ns = after(std::clamp(link_free_ns, now_ns, after(now_ns, flights.link_seconds())),
                         link_seconds);
    return after(link_free_ns, options.speeds.recall_seconds);
  }

  /// A request begins, or goes on.
  void enter(std::int32_t i) noexcept {
    books.task(i).parked = false;
    books.settle(i);
    note_deadline(i);
    if (is_coming(books.task(i).state) || books.task(i).state == layer_state::ready) {
      if (books.link(i).group < 0) grouping.place(books, i);
    }
    tell_later(i);
  }
  void park(std::int32_t i) noexcept {
    books.leave(i);
    books.task(i).parked = true;
    books.settle(i);
  }
  void changed(std::int32_t i) noexcept {
    books.settle(i);
    note_deadline(i);
    tell_later(i);
  }
  /// A deadline counts while its layer is recalled, not before or aside.
  void note_deadline(std::int32_t i) noexcept {
    const layer_task& t = books.task(i);
    if (t.state != layer_state::recalling || !t.now().has_deadline || t.now().is_late) return;
    first_deadline_ns = std::min(first_deadline_ns, books.record(i).deadline_ns[t.turn % 4]);
  }
  /// Its pages are nobody's; what they held must come again.
  void give_back(std::int32_t i) noexcept {
    layer_task& t = books.task(i);
    const bool lacked = t.lacks_pages();
    pages.take_back(t);
    if (!lacked && t.lacks_pages()) pages.begin_lack(books, i);
    for (std::uint32_t k = 0; k < t.turns.size(); ++k) t.forget(k);
    t.giving_back = false;
    books.settle(i);
  }
  void begin_giving_back(std::int32_t i) noexcept {
    layer_task& t = books.task(i);
    t.giving_back = true;
    if (books.is_running(i)) {
      t.parks_after = true;
      return;
    }
    for (std::uint32_t k = 0; k < t.turns.size(); ++k) t.forget(k);
    park(i);
    tell_later(i);
  }
  void close(std::int32_t i) noexcept {
    layer_task& t = books.task(i);
    pages.end_lack(t);
    pages.take_back(t);
    grouping.left(books.record(i).bytes);
    books.close(i);
  }

  // What the engine is to be told, in the order in which it came up.

  /// The most urgent thing that is owed to the engine about a request; `idle` if nothing is.
  [[nodiscard]] schedule_action owed(std::int32_t i) const noexcept {
    const layer_task& t = books.tasks[static_cast<std::size_t>(i)];
    if (!t.held || books.is_running(i)) return schedule_action::idle;
    if ((t.leaving || t.giving_back) && t.flights == 0) return schedule_action::release;
    const task_turn& now = t.now();
    if (t.state == layer_state::selecting && !now.told_select) return schedule_action::select;
    if (t.state != layer_state::recalling) return schedule_action::idle;
    if (now.is_late && !now.told_late) return schedule_action::late;
    if (now.owes_recall && !now.told_recall) return schedule_action::recall;
    return schedule_action::idle;
  }
  void tell_later(std::int32_t i) noexcept {
    layer_task& t = books.task(i);
    if (t.queued || owed(i) == schedule_action::idle) return;
    t.queued = true;
    std::size_t place = told_first_ + told_count_;
    if (place >= told_.size()) place -= told_.size();
    told_[place] = i;
    ++told_count_;
  }
  schedule_decision tell() noexcept {
    schedule_decision decision;
    out_.clear();
    while (told_count_ > 0) {
      const std::int32_t i = told_[told_first_];
      layer_task& t = books.task(i);
      const schedule_action action = owed(i);
      const bool joins = out_.empty() || (action == decision.action && t.layer == decision.layer);
      if (action != schedule_action::idle && !joins) break;
      if (++told_first_ == told_.size()) told_first_ = 0;
      --told_count_;
      t.queued = false;
      if (action == schedule_action::idle) continue;
      decision.action = action;
      decision.layer = t.layer;
      out_.push_back(books.id_of(i));
      note_told(i, action);
    }
    decision.requests = out_;
    return decision;
  }
  void note_told(std::int32_t i, schedule_action action) noexcept {
    layer_task& t = books.task(i);
    task_turn& now = t.now();
    switch (action) {
      case schedule_action::select:
        now.told_select = true;
        return;
      case schedule_action::recall:
        now.told_recall = true;
        return;
      case schedule_action::late:
        now.told_late = true;
        ++statistics.late;
        break;
      case schedule_action::release:
        if (t.leaving) {
          close(i);
          return;
        }
        give_back(i);
        if (t.resumes_after) {
          t.resumes_after = false;
          enter(i);
        }
        break;
      default:
        break;
    }
    tell_later(i);
  }

  // What has ended.

  void ended(const flight_link& link, flight_state state) noexcept {
    layer_task& t = books.task(link.task);
    --t.flights;
    task_turn& at = t.at(link.turn);
    // Turns come round every fourth layer, with another attempt.
    if (link.waits && at.attempt == link.attempt) {
      --at.waits;
      if (state == flight_state::failed) at.lost = at.is_late = true;
    }
    // Almost always this: it is ready, or not yet, and there is nothing to tell. (One that runs is
    // not noted as recalling.)
    const task_turn& now = t.now();
    if (t.state == layer_state::recalling && (!now.is_late || now.told_late)) {
      if (now.waits == 0 && !now.owes_recall && !now.lost) books.make_ready(link.task);
      return;
    }
    books.count_ready();
    changed(link.task);
  }
  void batch_ended(batch_id batch, flight_state state) noexcept {
    books.count_ready();
    if (!is_running(batch)) return;  // it was said to be complete, or withdrawn
    if (state == flight_state::failed) {
      const task_group& g = books.group(batch.index);
      for (std::int32_t i = g.first; i >= 0; i = books.link(i).behind) {
        books.task(i).now().lost = books.task(i).now().is_late = true;
      }
    }
    end(batch, state != flight_state::failed);
  }
  void end(batch_id batch, bool complete) noexcept {
    task_group& g = books.group(batch.index);
    books.end_batch(batch.index);
    --running;
    if (complete) g.layer = g.layer + 1 < options.layers ? g.layer + 1 : 0;
    for (std::int32_t i = g.first; i >= 0;) {
      layer_task& t = books.task(i);
      const std::int32_t next = books.link(i).behind;
      books.end_running(i);
      if (complete) {
        t.forget(t.turn);
        ++t.turn;
        t.done = t.layer + 1 == options.layers;
        t.layer = g.layer;
      }
      if (t.leaving) {
        books.leave(i);
      } else if (t.parks_after) {
        t.parks_after = false;
        if (t.giving_back) {
          begin_giving_back(i);
        } else {
          park(i);
        }
      }
      changed(i);
      i = next;
    }
  }

  void find_late(std::uint64_t now_ns) noexcept {
    first_deadline_ns = no_deadline;
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(books.tasks.size()); ++i) {
      layer_task& t = books.task(i);
      if (!t.held || !t.now().has_deadline || t.now().is_late) continue;
      if (books.state(i) != layer_state::recalling) continue;
      const std::uint64_t deadline = books.record(i).deadline_ns[t.turn % 4];
      if (deadline > now_ns) {
        first_deadline_ns = std::min(first_deadline_ns, deadline);
        continue;
      }
      t.now().is_late = true;
      tell_later(i);
    }
  }

  schedule_decision run(std::int32_t g) noexcept {
    grouping.shape(books, g, statistics);
    const batch_id batch = books.begin_batch(g);
    const task_group& group = books.group(g);
    out_.clear();
    out_.resize(static_cast<std::size_t>(group.size));
    auto out = out_.begin();
    for (std::int32_t i = group.first; i >= 0; i = books.link(i).behind) *out++ = books.id_of(i);
    ++running;
    ++statistics.batches;
    statistics.layers_run += group.size;
    return {.action = schedule_action::run, .layer = group.layer, .requests = out_, .batch = batch};
  }

  scheduler_options options;
  schedule_books books;
  schedule_flights flights;
  schedule_pages pages;
  schedule_grouping grouping;
  schedule_statistics statistics;
  std::int32_t running = 0;  ///< batches
  std::uint64_t first_deadline_ns = no_deadline;
  std::uint64_t link_free_ns = 0;

 private:
  std::vector<request_id> out_;
  std::vector<std::int32_t> told_;  ///< a ring: each request at most once
  std::size_t told_first_ = 0;
  std::size_t told_count_ = 0;
  std::uint64_t looks_ = 0;
};

}  // namespace pulseinfer::detail
