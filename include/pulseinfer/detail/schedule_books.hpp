// SPDX-License-Identifier: Apache-2.0
/// @file
/// The books of a layer scheduler: requests, the groups that they run in, and how many are in each
/// state. They hold no opinion about who should run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "pulseinfer/error.hpp"
#include "pulseinfer/schedule_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

inline constexpr std::uint64_t no_deadline = std::numeric_limits<std::uint64_t>::max();

/// What is known of one layer of a request, before and while the request is there.
struct task_turn {
  std::int32_t waits = 0;     ///< flights that bring what the layer reads
  std::uint32_t attempt = 0;  ///< flights of an earlier one are not waited for any more
  bool selected = false;
  bool owes_recall = false;  ///< there is something to recall, and no flight that brings it
  bool lost = false;         ///< a flight did not bring everything
  bool is_late = false;
  bool told_select = false;  ///< what the engine was told, so that it is told once
  bool told_recall = false;
  bool told_late = false;
  std::uint64_t deadline_ns = no_deadline;
  std::uint64_t due_ns = 0;  ///< when its recall is expected
};

/// A request. Its state follows from the rest, see `state_of`.
struct layer_task {
  std::uint32_t generation = 1;
  layer_state state = layer_state::parked;
  bool held = false;
  bool running = false;
  bool parked = false;
  bool done = false;
  bool leaving = false;
  bool giving_back = false;    ///< its pages go as soon as nothing uses them
  bool parks_after = false;    ///< at the end of its batch
  bool resumes_after = false;  ///< once its pages are given back
  bool queued = false;         ///< in the list of those of whom the engine is to be told something
  std::int32_t layer = 0;
  std::int32_t group = -1;
  std::int32_t before = -1;  ///< in the group
  std::int32_t behind = -1;
  std::int32_t flights = 0;
  std::int32_t pages_held = 0;
  std::int32_t pages_needed = 0;
  std::uint32_t turn = 0;  ///< counts layers, over all steps
  std::array<task_turn, 4> turns = {};
  std::uint64_t age = 0;          ///< lower is older
  std::uint64_t short_since = 0;  ///< batches so far when it began to lack pages
  std::uint64_t looked_at = 0;    ///< to see a request that stands in a list twice
  double bytes = 0;

  [[nodiscard]] task_turn& at(std::uint32_t number) noexcept { return turns[number % 4]; }
  [[nodiscard]] task_turn& now() noexcept { return at(turn); }
  [[nodiscard]] const task_turn& now() const noexcept { return turns[turn % 4]; }
  [[nodiscard]] bool lacks_pages() const noexcept { return pages_held < pages_needed; }
  /// Nothing that was brought, or is under way, counts any more.
  void forget(std::uint32_t number) noexcept {
    task_turn& t = at(number);
    t = {.attempt = t.attempt + 1};
  }
};

[[nodiscard]] inline layer_state state_of(const layer_task& t) noexcept {
  if (t.leaving) return layer_state::leaving;
  if (t.running) return layer_state::running;
  if (t.parked) return layer_state::parked;
  if (t.done) return layer_state::done;
  if (t.lacks_pages()) return layer_state::waiting;
  const task_turn& now = t.now();
  if (!now.selected) return layer_state::selecting;
  if (now.owes_recall || now.waits > 0 || now.lost) return layer_state::recalling;
  return layer_state::ready;
}

[[nodiscard]] constexpr bool is_coming(layer_state s) noexcept {
  return s <= layer_state::recalling;
}

/// Requests that run together. While it gathers all its members are at one layer.
struct task_group {
  std::uint32_t generation = 1;
  bool alive = false;
  bool running = false;
  std::int32_t layer = 0;
  std::int32_t first = -1;
  std::int32_t last = -1;
  std::int32_t size = 0;    ///< members
  std::int32_t coming = 0;  ///< members that will be ready
  std::int32_t ready = 0;
  std::int32_t place = 0;            ///< in the list of groups
  std::uint64_t serial = 0;          ///< no two groups have the same
  std::uint64_t complete_order = 0;  ///< 0: somebody is coming, or nobody is ready
  std::uint64_t ready_order = 0;     ///< 0: nobody is ready
  std::uint64_t ready_since = 0;     ///< batches so far when somebody became ready
};

/// Requests and groups, in arrays of fixed size.
class schedule_books {
 public:
  explicit schedule_books(std::int32_t max_requests)
      : tasks(static_cast<std::size_t>(max_requests)),
        groups(static_cast<std::size_t>(max_requests)) {
    const auto n = static_cast<std::size_t>(max_requests);
    free_tasks_.reserve(n);
    free_groups_.reserve(n);
    live.reserve(n);
    for (std::int32_t i = max_requests; i-- > 0;) {
      free_tasks_.push_back(i);
      free_groups_.push_back(i);
    }
  }

  [[nodiscard]] layer_task& task(std::int32_t i) noexcept {
    return tasks[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] task_group& group(std::int32_t i) noexcept {
    return groups[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] request_id id_of(std::int32_t i) const noexcept {
    return {i, tasks[static_cast<std::size_t>(i)].generation};
  }
  /// @throws std::invalid_argument  on a handle that is no request's, or no longer
  [[nodiscard]] std::int32_t index_of(request_id id) const {
    expects(id.index >= 0 && static_cast<std::size_t>(id.index) < tasks.size(),
            "layer_scheduler: request index is ", id.index, ", expected 0 to ", tasks.size() - 1);
    const layer_task& t = tasks[static_cast<std::size_t>(id.index)];
    expects(t.held && t.generation == id.generation, "layer_scheduler: request ", id.index,
            " of generation ", id.generation, " is gone");
    return id.index;
  }

  /// A request in state `parked`, in no group; -1 when there is no room.
  [[nodiscard]] std::int32_t open() noexcept {
    if (free_tasks_.empty()) return -1;
    const std::int32_t i = free_tasks_.back();
    free_tasks_.pop_back();
    layer_task& t = task(i);
    const std::uint32_t generation = t.generation;
    t = {};
    t.generation = generation;
    t.held = t.parked = true;
    t.age = ++ages_;
    ++counts.of[static_cast<int>(t.state)];
    return i;
  }
  /// In no group, and nothing under way.
  void close(std::int32_t i) noexcept {
    layer_task& t = task(i);
    --counts.of[static_cast<int>(t.state)];
    t.held = false;
    ++t.generation;
    free_tasks_.push_back(i);
  }

  /// Brings state and counts to what follows from the rest of a request.
  void settle(std::int32_t i) noexcept {
    layer_task& t = task(i);
    const layer_state next = state_of(t);
    if (next == t.state) return;
    --counts.of[static_cast<int>(t.state)];
    ++counts.of[static_cast<int>(next)];
    if (t.group >= 0) {
      task_group& g = group(t.group);
      count(g, t.state, -1);
      count(g, next, 1);
      look_at(g);
    }
    t.state = next;
  }

  [[nodiscard]] std::int32_t open_group(std::int32_t layer) noexcept {
    const std::int32_t g = free_groups_.back();
    free_groups_.pop_back();
    task_group& made = group(g);
    const std::uint32_t generation = made.generation;
    made = {};
    made.generation = generation;
    made.alive = true;
    made.layer = layer;
    made.serial = ++orders_;
    made.place = static_cast<std::int32_t>(live.size());
    live.push_back(g);
    return g;
  }
  void join(std::int32_t i, std::int32_t g) noexcept {
    layer_task& t = task(i);
    task_group& to = group(g);
    t.group = g;
    t.before = to.last;
    t.behind = -1;
    (to.last >= 0 ? task(to.last).behind : to.first) = i;
    to.last = i;
    ++to.size;
    count(to, t.state, 1);
    look_at(to);
  }
  /// The group ends with its last member.
  void leave(std::int32_t i) noexcept {
    layer_task& t = task(i);
    if (t.group < 0) return;
    const std::int32_t g = t.group;
    task_group& from = group(g);
    (t.before >= 0 ? task(t.before).behind : from.first) = t.behind;
    (t.behind >= 0 ? task(t.behind).before : from.last) = t.before;
    --from.size;
    count(from, t.state, -1);
    look_at(from);
    t.group = t.before = t.behind = -1;
    if (from.size > 0) return;
    from.alive = false;
    ++from.generation;
    group(live.back()).place = from.place;
    live[static_cast<std::size_t>(from.place)] = live.back();
    live.pop_back();
    free_groups_.push_back(g);
  }
  void move(std::int32_t i, std::int32_t g) noexcept {
    leave(i);
    join(i, g);
  }

  std::vector<layer_task> tasks;
  std::vector<task_group> groups;
  std::vector<std::int32_t> live;  ///< groups that have members
  schedule_counts counts;
  std::uint64_t batches = 0;  ///< given out so far

 private:
  static void count(task_group& g, layer_state s, std::int32_t by) noexcept {
    if (is_coming(s)) g.coming += by;
    if (s == layer_state::ready) g.ready += by;
  }
  /// Since when a group is ready, and complete: who came first goes first.
  void look_at(task_group& g) noexcept {
    if (g.ready == 0) {
      g.ready_order = g.complete_order = 0;
      return;
    }
    if (g.ready_order == 0) {
      g.ready_order = ++orders_;
      g.ready_since = batches;
    }
    if (g.coming > 0) {
      g.complete_order = 0;
    } else if (g.complete_order == 0) {
      g.complete_order = ++orders_;
    }
  }

  std::vector<std::int32_t> free_tasks_;
  std::vector<std::int32_t> free_groups_;
  std::uint64_t ages_ = 0;
  std::uint64_t orders_ = 0;
};

}  // namespace pulseinfer::detail
