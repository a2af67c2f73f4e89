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
  std::uint32_t attempt = 0;  ///< flights of an earlier one are not waited for any more
  std::int16_t waits = 0;     ///< flights that bring what the layer reads
  bool selected : 1 = false;
  bool owes_recall : 1 = false;  ///< there is something to recall, and no flight that brings it
  bool lost : 1 = false;         ///< a flight did not bring everything
  bool is_late : 1 = false;
  bool has_deadline : 1 = false;
  bool told_select : 1 = false;  ///< what the engine was told, so that it is told once
  bool told_recall : 1 = false;
  bool told_late : 1 = false;
};

/// A request, as far as every decision looks at it: one line of the cache. Its state follows from
/// the rest, see `state_of`.
struct layer_task {
  std::array<task_turn, 4> turns = {};
  std::uint32_t turn = 0;  ///< counts layers, over all steps
  std::int32_t layer = 0;
  std::int32_t pages_held = 0;
  std::int32_t pages_needed = 0;
  std::int16_t flights = 0;
  layer_state state = layer_state::parked;  ///< while its group runs: what it was
  bool held : 1 = false;
  bool parked : 1 = false;
  bool done : 1 = false;
  bool leaving : 1 = false;
  bool giving_back : 1 = false;    ///< its pages go as soon as nothing uses them
  bool parks_after : 1 = false;    ///< at the end of its batch
  bool resumes_after : 1 = false;  ///< once its pages are given back
  bool queued : 1 = false;  ///< in the list of those of whom the engine is to be told something

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
static_assert(sizeof(layer_task) <= 64);

/// The rest of it.
struct task_record {
  std::uint64_t age = 0;    ///< lower is older
  std::int32_t older = -1;  ///< the next one in the order of age
  std::int32_t younger = -1;
  std::uint64_t short_since = 0;                  ///< batches so far when it began to lack pages
  std::uint64_t looked_at = 0;                    ///< to see a request that stands in a list twice
  std::array<std::uint64_t, 4> deadline_ns = {};  ///< of turns that have one
  std::array<std::uint64_t, 4> due_ns = {};       ///< when the recall of a turn is expected
  double bytes = 0;
};

/// What a batch is made of, apart from the rest, which is large: a decision looks at nothing else
/// of its requests.
struct task_link {
  std::uint32_t generation = 1;
  std::int32_t group = -1;
  std::int32_t before = -1;  ///< in the group
  std::int32_t behind = -1;
};

/// The state of a request that does not run.
[[nodiscard]] inline layer_state state_of(const layer_task& t) noexcept {
  if (t.leaving) return layer_state::leaving;
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
        links(tasks.size()),
        records(tasks.size()),
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
  [[nodiscard]] task_record& record(std::int32_t i) noexcept {
    return records[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] task_link& link(std::int32_t i) noexcept {
    return links[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] task_group& group(std::int32_t i) noexcept {
    return groups[static_cast<std::size_t>(i)];
  }
  [[nodiscard]] request_id id_of(std::int32_t i) const noexcept {
    return {i, links[static_cast<std::size_t>(i)].generation};
  }
  [[nodiscard]] bool is_running(std::int32_t i) const noexcept {
    const std::int32_t g = links[static_cast<std::size_t>(i)].group;
    return g >= 0 && groups[static_cast<std::size_t>(g)].running;
  }
  [[nodiscard]] layer_state state(std::int32_t i) const noexcept {
    const layer_task& t = tasks[static_cast<std::size_t>(i)];
    return is_running(i) && !t.leaving ? layer_state::running : t.state;
  }
  /// @throws std::invalid_argument  on a handle that is no request's, or no longer
  [[nodiscard]] std::int32_t index_of(request_id id) const {
    expects(id.index >= 0 && static_cast<std::size_t>(id.index) < tasks.size(),
            "layer_scheduler: request index is ", id.index, ", expected 0 to ", tasks.size() - 1);
    const layer_task& t = tasks[static_cast<std::size_t>(id.index)];
    expects(t.held && links[static_cast<std::size_t>(id.index)].generation == id.generation,
            "layer_scheduler: request ", id.index, " of generation ", id.generation, " is gone");
    return id.index;
  }

  /// A request in state `parked`, in no group; -1 when there is no room.
  [[nodiscard]] std::int32_t open() noexcept {
    if (free_tasks_.empty()) return -1;
    const std::int32_t i = free_tasks_.back();
    free_tasks_.pop_back();
    layer_task& t = task(i);
    const bool queued = t.queued;  // of a request that went before its turn came
    t = {};
    t.queued = queued;
    t.held = t.parked = true;
    record(i) = {.age = ++ages_, .older = youngest};
    (youngest >= 0 ? record(youngest).younger : oldest) = i;
    youngest = i;
    ++counts.of[static_cast<int>(t.state)];
    return i;
  }
  /// In no group, and nothing under way.
  void close(std::int32_t i) noexcept {
    layer_task& t = task(i);
    --counts.of[static_cast<int>(t.state)];
    t.held = false;
    const task_record& r = record(i);
    (r.older >= 0 ? record(r.older).younger : oldest) = r.younger;
    (r.younger >= 0 ? record(r.younger).older : youngest) = r.older;
    ++link(i).generation;
    free_tasks_.push_back(i);
  }

  /// Brings state and counts to what follows from the rest of a request.
  void settle(std::int32_t i) noexcept {
    layer_task& t = task(i);
    if (is_running(i)) {  // counted with its group, unless it leaves
      if (!t.leaving || t.state == layer_state::leaving) return;
      count_state(layer_state::running, layer_state::leaving);
      t.state = layer_state::leaving;
      return;
    }
    const layer_state next = state_of(t);
    if (next == t.state) return;
    count_state(t.state, next);
    if (link(i).group >= 0) {
      task_group& g = group(link(i).group);
      count(g, t.state, -1);
      count(g, next, 1);
      look_at(g);
    }
    t.state = next;
  }

  /// `settle` where a request was recalling, and is ready. Counted with `count_ready`, which comes
  /// before anything else is asked: of a group all become ready in a row.
  void make_ready(std::int32_t i) noexcept {
    const std::int32_t g = link(i).group;
    if (g != made_ready_of_) {
      count_ready();
      made_ready_of_ = g;
    }
    ++made_ready_;
    task(i).state = layer_state::ready;
  }
  void count_ready() noexcept {
    if (made_ready_ == 0) return;
    counts.of[static_cast<int>(layer_state::recalling)] -= made_ready_;
    counts.of[static_cast<int>(layer_state::ready)] += made_ready_;
    if (made_ready_of_ >= 0) {
      task_group& g = group(made_ready_of_);
      g.coming -= made_ready_;
      g.ready += made_ready_;
      look_at(g);
    }
    made_ready_ = 0;
  }

  /// All members of a group, which are ready, run.
  batch_id begin_batch(std::int32_t i) noexcept {
    task_group& g = group(i);
    g.running = true;
    counts.of[static_cast<int>(layer_state::ready)] -= g.ready;
    counts.of[static_cast<int>(layer_state::running)] += g.ready;
    g.ready = 0;
    look_at(g);
    ++batches;
    return {i, ++g.generation};
  }
  /// The group runs no longer; for each member `end_running`, then `settle`.
  void end_batch(std::int32_t i) noexcept { group(i).running = false; }
  void end_running(std::int32_t i) noexcept {
    if (!task(i).leaving) task(i).state = layer_state::running;
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
    task_group& to = group(g);
    task_link& l = link(i);
    l.group = g;
    l.before = to.last;
    l.behind = -1;
    (to.last >= 0 ? link(to.last).behind : to.first) = i;
    to.last = i;
    ++to.size;
    count(to, task(i).state, 1);
    look_at(to);
  }
  /// Out of a group that does not run, which ends with its last member.
  void leave(std::int32_t i) noexcept {
    task_link& l = link(i);
    if (l.group < 0) return;
    const std::int32_t g = l.group;
    task_group& from = group(g);
    (l.before >= 0 ? link(l.before).behind : from.first) = l.behind;
    (l.behind >= 0 ? link(l.behind).before : from.last) = l.before;
    --from.size;
    count(from, task(i).state, -1);
    look_at(from);
    l.group = l.before = l.behind = -1;
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
  std::vector<task_link> links;      ///< [tasks]
  std::vector<task_record> records;  ///< [tasks]
  std::vector<task_group> groups;
  std::vector<std::int32_t> live;  ///< groups that have members
  schedule_counts counts;
  std::uint64_t batches = 0;  ///< given out so far
  std::int32_t oldest = -1;   ///< requests in the order of age; -1: there are none
  std::int32_t youngest = -1;

 private:
  void count_state(layer_state from, layer_state to) noexcept {
    --counts.of[static_cast<int>(from)];
    ++counts.of[static_cast<int>(to)];
  }
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
  std::int32_t made_ready_of_ = -1;
  std::int32_t made_ready_ = 0;  ///< not counted yet
  std::uint64_t ages_ = 0;
  std::uint64_t orders_ = 0;
};

}  // namespace pulseinfer::detail
