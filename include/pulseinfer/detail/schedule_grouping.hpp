// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which group runs next, whether it waits for those who are late, and when groups become one or
/// two: what a layer scheduler decides.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "pulseinfer/detail/schedule_books.hpp"
#include "pulseinfer/step_cost.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Some seconds after a moment; 10^9 at most, and no later than there is a number for.
[[nodiscard]] inline std::uint64_t after(std::uint64_t moment_ns, double seconds) noexcept {
  const auto ns = static_cast<std::uint64_t>(std::llround(std::clamp(seconds, 0.0, 1e9) * 1e9));
  return moment_ns > no_deadline - ns ? no_deadline : moment_ns + ns;
}

/// Groups form as the cost model wants them, and change one at a time, at a layer.
///
/// - Who is complete runs, in the order in which groups became complete: no convoy behind a load.
/// - Who is not complete, or waits for another group to become one with it, waits as long as
///   something else runs. When the device has nothing else, waiting may cost as much as reading the
///   weights once more, which is what going without the others costs; for two groups that should be
///   one, as much again as a layer waits for its recalls by plan, as they are better off for many
///   layers; and where the others are not expected by then, nothing.
/// - What is ready for `max_wait_batches` batches runs, whatever else holds.
class schedule_grouping {
 public:
  explicit schedule_grouping(const scheduler_options& o) : options_(o), work_(o.work) {
    work_.layers = o.layers;
  }

  /// The work of a layer as measured, per request.
  [[nodiscard]] const layer_work& work() const noexcept { return work_; }
  [[nodiscard]] std::int32_t planned_groups() const noexcept { return groups_; }

  void entered(double bytes) noexcept { bytes_ += bytes; }
  void left(double bytes) noexcept { bytes_ -= bytes; }
  /// A selection's recall goes into the average of the last hundred or so. What was known ahead is
  /// averaged over the layers that something can be known of: a hundred requests that begin their
  /// step together would look like a change for the worse.
  void saw(const recall_need& need, std::int32_t layer) noexcept {
    const auto average = [](double& mean, double value) { mean += (value - mean) / 128; };
    average(work_.recall_bytes, need.bytes + need.ahead_bytes);
    if (layer == 0 && options_.layers > 1) return;
    average(behind_bytes_, need.bytes + need.ahead_bytes);
    average(ahead_bytes_, need.ahead_bytes);
    average(last_recalls_, need.bytes > 0 ? 1 : 0);
    average(ahead_recalls_, need.ahead_bytes > 0 ? 1 : 0);
    work_.known_ahead = behind_bytes_ > 0 ? std::clamp(ahead_bytes_ / behind_bytes_, 0.0, 1.0) : 0;
  }

  /// A group for a request that has none: one that gathers at its layer and is not full, else a new
  /// one.
  void place(schedule_books& books, std::int32_t i) noexcept {
    const std::int32_t layer = books.task(i).layer;
    plan(books);
    std::int32_t found = -1;
    for (const std::int32_t g : books.live) {
      const task_group& group = books.group(g);
      if (group.running || group.layer != layer || group.size >= most()) continue;
      if (found < 0 || group.size < books.group(found).size) found = g;
    }
    books.join(i, found >= 0 ? found : books.open_group(layer));
  }

  struct choice {
    std::int32_t group = -1;
    std::uint64_t until_ns = no_deadline;  ///< then ask again, where there is no group
  };
  [[nodiscard]] choice choose(schedule_books& books, std::uint64_t now_ns,
                              std::int32_t running) noexcept {
    plan(books);
    const std::int32_t groups = count_groups(books);
    if (groups > groups_ && books.batches >= no_hold_until_) {
      pair_up(books, groups);
    } else {
      hold_ = {};
    }
    std::int32_t overdue = -1;
    std::int32_t complete = -1;
    std::int32_t partial = -1;
    for (const std::int32_t g : books.live) {
      const task_group& group = books.group(g);
      if (group.running || group.ready == 0) continue;
      const auto earlier = [&](std::int32_t other, std::uint64_t task_group::*order) {
        return other < 0 || group.*order < books.group(other).*order;
      };
      if (books.batches - group.ready_since >=
          static_cast<std::uint64_t>(options_.max_wait_batches)) {
        if (earlier(overdue, &task_group::ready_order)) overdue = g;
      } else if (group.complete_order != 0 && !is_held(books, g)) {
        if (earlier(complete, &task_group::complete_order)) complete = g;
      } else if (earlier(partial, &task_group::ready_order)) {
        partial = g;
      }
    }
    if (overdue >= 0 || complete >= 0) {
      tempted_since_ = no_deadline;
      if (overdue >= 0) release_hold(books, overdue);
      return {overdue >= 0 ? overdue : complete, no_deadline};
    }
    if (partial < 0 || running > 0) {
      tempted_since_ = no_deadline;
      return {};
    }
    // The device has nothing to do. (A clock that was set back begins anew.)
    tempted_since_ = std::min(tempted_since_, now_ns);
    const double again = work_.weight_bytes / options_.speeds.device_bytes_per_second +
                         options_.speeds.launch_seconds;
    const bool held = is_held(books, partial);
    const std::uint64_t until = after(tempted_since_, held ? again + planned_wait_ : again);
    const std::int32_t late = held ? hold_.other : partial;
    if (now_ns < until && due_ns(books, late, now_ns) <= until) return {-1, until};
    tempted_since_ = no_deadline;
    release_hold(books, partial);
    return {partial, no_deadline};
  }

  /// Makes of a group what runs: without those who are not ready, with others that are ready at
  /// the same layer if there are too many groups, or a part of it if there are too few.
  void shape(schedule_books& books, std::int32_t g, schedule_statistics& statistics) noexcept {
    leave_behind(books, g, statistics);
    std::int32_t groups = count_groups(books);
    for (std::size_t k = 0; k < books.live.size() && groups > groups_;) {
      const std::int32_t other = books.live[k];
      const task_group& from = books.group(other);
      if (other == g || from.running || from.complete_order == 0 ||
          from.layer != books.group(g).layer || !is_worth(books, groups, g, other)) {
        ++k;
        continue;
      }
      while (books.group(other).alive) {
        const std::int32_t i = books.group(other).first;
        books.leave(i);
        if (books.task(i).state == layer_state::ready) books.join(i, g);
      }
      --groups;
      ++statistics.merges;
    }
    const std::int32_t size = books.group(g).size;
    const std::int32_t even = (planned_for_ - 1) / groups_ + 1;
    if (size > (groups < groups_ ? even : even + even / 4)) {
      const std::int32_t rest = books.open_group(books.group(g).layer);
      std::int32_t kept = 0;
      for (std::int32_t i = books.group(g).first; i >= 0;) {
        const std::int32_t next = books.link(i).behind;
        if (++kept > even) books.move(i, rest);
        i = next;
      }
      ++statistics.splits;
    }
  }

 private:
  /// A group that waits for another one, which is some layers behind it.
  struct hold {
    std::int32_t group = -1;
    std::int32_t other = -1;
    std::uint64_t group_serial = 0;
    std::uint64_t other_serial = 0;
    std::int32_t distance = 0;
  };

  /// How many groups there should be: the fewest that are nearly as good as the best number, as
  /// fewer groups stand less in each other's way. Fewer than that stay while they are not much worse.
  void plan(const schedule_books& books) noexcept {
    std::int32_t n = books.counts[layer_state::done];
    for (int s = 0; s <= static_cast<int>(layer_state::running); ++s) n += books.counts.of[s];
    n = std::max(n, 1);
    const double drift =
        std::abs(work_.recall_bytes - planned_recall_) + std::abs(ahead_bytes_ - planned_ahead_);
    if (n == planned_for_ && drift <= 0.05 * planned_recall_) return;
    if (n == planned_for_ && planned_recall_ == 0 && work_.recall_bytes == 0) return;
    const std::int32_t held = books.counts.total();
    if (held > 0) work_.request_bytes = bytes_ / held;
    const step_cost cost = cost_now();
    const group_plan best = cheapest_groups(cost, n, options_.max_groups);
    const auto is_near = [&](std::int32_t groups, double factor) {
      return cost.of(n, groups).total() <= factor * best.layer.total();
    };
    std::int32_t fewest = 1;
    while (fewest < best.groups && !is_near(fewest, 1.03)) ++fewest;
    if (groups_ > fewest || !is_near(groups_, 1.05)) groups_ = fewest;
    const layer_seconds planned = cost.of(n, groups_);
    planned_wait_ = planned.total() - planned.compute;
    planned_for_ = n;
    planned_recall_ = work_.recall_bytes;
    planned_ahead_ = ahead_bytes_;
  }
  [[nodiscard]] step_cost cost_now() const noexcept {
    step_cost cost(work_, options_.speeds);
    cost.last_recalls = last_recalls_;
    cost.ahead_recalls = ahead_recalls_;
    return cost;
  }
  /// The most requests that a group takes in.
  [[nodiscard]] std::int32_t most() const noexcept { return (planned_for_ - 1) / groups_ + 1; }

  [[nodiscard]] static std::int32_t count_groups(const schedule_books& books) noexcept {
    std::int32_t n = 0;
    for (const std::int32_t g : books.live) {
      const task_group& group = books.groups[static_cast<std::size_t>(g)];
      n += group.running || group.coming + group.ready > 0 ? 1 : 0;
    }
    return n;
  }

  /// Whether a layer would not take longer with two of the groups as one.
  [[nodiscard]] bool is_worth(const schedule_books& books, std::int32_t groups, std::int32_t a,
                              std::int32_t b) const noexcept {
    std::int32_t largest = 0;
    std::int32_t all = 0;
    for (const std::int32_t g : books.live) {
      const std::int32_t size = books.groups[static_cast<std::size_t>(g)].size;
      largest = std::max(largest, size);
      all += size;
    }
    const std::int32_t both = books.groups[static_cast<std::size_t>(a)].size +
                              books.groups[static_cast<std::size_t>(b)].size;
    const step_cost cost = cost_now();
    return cost.of(all, groups - 1, std::max(largest, both)).total() <=
           cost.of(all, groups, largest).total();
  }

  /// Of two groups that should be one, the one that is ahead waits; of all such pairs the one for
  /// which the fewest requests wait for the fewest layers. One of them is the smallest group.
  void pair_up(const schedule_books& books, std::int32_t groups) noexcept {
    const auto group = [&](std::int32_t g) -> const task_group& {
      return books.groups[static_cast<std::size_t>(g)];
    };
    const auto behind = [&](std::int32_t ahead, std::int32_t other) {
      const std::int32_t d = group(ahead).layer - group(other).layer;
      return d < 0 ? d + options_.layers : d;
    };
    if (hold_.group >= 0 && group(hold_.group).alive && group(hold_.other).alive &&
        group(hold_.group).serial == hold_.group_serial &&
        group(hold_.other).serial == hold_.other_serial &&
        behind(hold_.group, hold_.other) <= hold_.distance) {
      return;
    }
    hold_ = {};
    const auto counts = [&](std::int32_t g) {
      return group(g).running || group(g).coming + group(g).ready > 0;
    };
    std::int32_t smallest = -1;
    for (const std::int32_t g : books.live) {
      if (counts(g) && (smallest < 0 || group(g).size < group(smallest).size)) smallest = g;
    }
    if (smallest < 0) return;
    std::int64_t least = 0;
    for (const std::int32_t g : books.live) {
      if (g == smallest || !counts(g)) continue;
      const auto pair = [&](std::int32_t ahead, std::int32_t other) {
        const std::int32_t distance = behind(ahead, other);
        const std::int64_t cost = std::int64_t{group(ahead).size} * distance;
        if (group(ahead).running || (hold_.group >= 0 && cost >= least)) return;
        if (!is_worth(books, groups, ahead, other)) return;
        least = cost;
        hold_ = {ahead, other, group(ahead).serial, group(other).serial, distance};
      };
      pair(smallest, g);
      pair(g, smallest);
    }
  }
  [[nodiscard]] bool is_held(const schedule_books& books, std::int32_t g) const noexcept {
    if (hold_.group != g) return false;
    const task_group& other = books.groups[static_cast<std::size_t>(hold_.other)];
    return other.running || other.complete_order == 0 ||
           other.layer != books.groups[static_cast<std::size_t>(g)].layer;
  }
  /// A group that was held runs all the same: for a while nobody is held.
  void release_hold(const schedule_books& books, std::int32_t g) noexcept {
    if (!is_held(books, g)) return;
    hold_ = {};
    no_hold_until_ = books.batches + static_cast<std::uint64_t>(options_.layers);
  }

  /// When the last of those who are coming is expected.
  [[nodiscard]] static std::uint64_t due_ns(schedule_books& books, std::int32_t g,
                                            std::uint64_t now_ns) noexcept {
    std::uint64_t due = now_ns;
    for (std::int32_t i = books.group(g).first; i >= 0; i = books.link(i).behind) {
      const layer_task& t = books.task(i);
      if (t.state == layer_state::waiting || t.now().is_late) return no_deadline;
      if (t.state == layer_state::recalling)
        due = std::max(due, books.record(i).due_ns[t.turn % 4]);
    }
    return due;
  }

  static void leave_behind(schedule_books& books, std::int32_t g,
                           schedule_statistics& statistics) noexcept {
    if (books.group(g).ready == books.group(g).size) return;
    std::int32_t late = -1;
    for (std::int32_t i = books.group(g).first; i >= 0;) {
      const std::int32_t next = books.link(i).behind;
      const layer_state state = books.task(i).state;
      if (state == layer_state::done) {
        books.leave(i);
      } else if (state != layer_state::ready) {
        if (late < 0) late = books.open_group(books.group(g).layer);
        books.move(i, late);
        ++statistics.left_behind;
      }
      i = next;
    }
  }

  scheduler_options options_;
  layer_work work_;
  double behind_bytes_ = work_.recall_bytes;  ///< that layers behind the first one lack
  double ahead_bytes_ = work_.recall_bytes * work_.known_ahead;
  double last_recalls_ = step_cost(options_.work, options_.speeds).last_recalls;
  double ahead_recalls_ = step_cost(options_.work, options_.speeds).ahead_recalls;
  double bytes_ = 0;  ///< of all requests
  std::int32_t groups_ = 1;
  std::int32_t planned_for_ = 1;
  double planned_recall_ = -1;
  double planned_ahead_ = 0;
  double planned_wait_ = 0;  ///< of the device, a layer: for recalls
  hold hold_;
  std::uint64_t no_hold_until_ = 0;
  std::uint64_t tempted_since_ = no_deadline;
};

}  // namespace pulseinfer::detail
