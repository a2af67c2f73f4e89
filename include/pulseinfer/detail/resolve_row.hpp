// SPDX-License-Identifier: Apache-2.0
/// @file
/// The body that resolves a row: hits, victims, misses.
#pragma once

#include <cstdint>
#include <type_traits>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/use_rank.hpp"
#include "pulseinfer/residency.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

struct single_lane;  // a CPU's, cpu_kernels.hpp

/// Row kernel: resolves one row. The result does not depend on the size of the group.
///
/// Nothing in it changes from step to step, not even the step's number: captured once, it can be
/// replayed. A row whose request is negative is not in use, and chooses nothing; nor does one that
/// has fewer pages than it chooses, which the host cannot check of a replay.
struct resolve_row {
  residency_tables tables;
  const std::int32_t* requests;
  const std::int32_t* ids;     ///< [rows, k]
  const std::int32_t* counts;  ///< [rows]
  std::int64_t k;
  std::int32_t* pages;    ///< [rows, k]
  std::int32_t* scratch;  ///< [rows, 2 k]: slots of victims, then new ranks of hits
  unit_miss* misses;      ///< [rows, k], mapped
  std::int32_t* miss_counts;
  std::int32_t* chosen_counts;
  use_rank ranks;
  /// The choice is a guess: nothing of it counts as used, and its misses take no slot that the last
  /// true choice used, nor one that a prediction has brought since. What finds none is left out.
  bool predicted = false;

  static constexpr std::int32_t in_use = 0x7fffffff;  ///< rank of a slot that this step uses
  /// Where a clock gets there it is wound back, with all ranks.
  static constexpr std::int32_t clock_limit = 1 << 30;
  /// Slots that a lane looks at in a go. More than one: most have no victim among them.
  static constexpr std::int64_t run = 8;

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int64_t request = requests[row];
    const std::int64_t chosen = counts[row];
    const std::int64_t lent = request < 0 ? 0 : tables.lent[request];
    const std::int64_t usable = lent < tables.usable ? lent : tables.usable;
    if (chosen > usable || request < 0) {
      for (std::int64_t i = group.rank(); i < k; i += group.size()) pages[row * k + i] = -1;
      if (group.rank() == 0) miss_counts[row] = chosen_counts[row] = 0;
      return;
    }
    std::int32_t* const rank = tables.rank + request * tables.slots;
    // Counts for each request and layer by itself, on the device, and true choices only.
    const std::int32_t clock = predicted ? tables.clock[request] : wound(request, usable, group);
    const std::int32_t now = predicted ? clock : clock + ranks.per_step;

    std::int64_t used = 0;
    std::int64_t wanted = mark_hits(row, rank, clock, now, used, group);
    group.sync();
    // The slots worth least go, of those worth the same the lower ones.
    if (predicted) {
      const spared_ranks spared{rank, tables.last_use + request * tables.slots, clock};
      const std::int64_t free = count_up_to(spared, usable, in_use - 1, group);
      wanted = wanted < free ? wanted : free;
      if (wanted > 0) find_victims(row, spared, usable, wanted, now, group);
    } else if (wanted > 0) {
      find_victims(row, plain_ranks{rank}, usable, wanted, now, group);
    }
    const std::int64_t placed = place(row, rank, wanted, now, group);
    if (group.rank() != 0) return;
    miss_counts[row] = static_cast<std::int32_t>(placed);
    chosen_counts[row] = static_cast<std::int32_t>(chosen);
    tables.clock[request] = now;  // every lane has read it, before the first sum
    residency_totals& totals = tables.totals[request];
    if (predicted) {
      totals.open += placed;
      totals.counts.brought += placed;
    } else {
      totals.counts.chosen += chosen;
      totals.counts.missed += placed;
      totals.counts.used += used;
      totals.counts.wasted += totals.open - used;
      totals.open = 0;
    }
    totals.publish(tables.mirrors + request);
  }

 private:
  /// Ranks of a true choice.
  struct plain_ranks {
    const std::int32_t* rank;
    PULSEINFER_HD std::int32_t operator[](std::int64_t slot) const { return rank[slot]; }
  };
  /// Ranks of a prediction, which spares what is in use.
  struct spared_ranks {
    const std::int32_t* rank;
    const std::int32_t* last_use;
    std::int32_t clock;
    PULSEINFER_HD std::int32_t operator[](std::int64_t slot) const {
      const std::int32_t use = last_use[slot];
      const bool spared = (use == clock && use != 0) || use == residency_tables::brought_at(clock);
      return spared ? in_use : rank[slot];
    }
  };

  /// The clock, which is wound back with all that counts by it before it gets too large.
  template <class Group>
  PULSEINFER_HD std::int32_t wound(std::int64_t request, std::int64_t usable,
                                   const Group& group) const {
    const std::int32_t clock = tables.clock[request];
    if (clock < clock_limit) return clock;
    constexpr std::int32_t back = clock_limit / 2;
    std::int32_t* const rank = tables.rank + request * tables.slots;
    for (std::int64_t slot = group.rank(); slot < usable; slot += group.size()) {
      // What was not used for so long keeps no order, but stays older than all else.
      if (rank[slot] > 0) rank[slot] = rank[slot] > back ? rank[slot] - back : 1;
      if (tables.last_use == nullptr) continue;
      std::int32_t& use = tables.last_use[request * tables.slots + slot];
      use = use > back ? use - back : use < -back ? use + back : 0;
    }
    group.sync();
    return clock - back;
  }

  /// Finds the slots of hits, and marks them before anybody looks for victims; their new ranks wait
  /// in the scratch. Leaves slots in the page table. Returns the misses; `used` becomes the hits that
  /// a prediction has brought since the last true choice.
  template <class Group>
  PULSEINFER_HD std::int64_t mark_hits(std::int64_t row, std::int32_t* rank, std::int32_t clock,
                                       std::int32_t now, std::int64_t& used,
                                       const Group& group) const {
    const std::int32_t* const slot_of = tables.slot_of + requests[row] * tables.max_blocks;
    const std::int32_t* const row_ids = ids + row * k;
    std::int32_t* const row_slots = pages + row * k;
    std::int32_t* const new_rank = scratch + (2 * row + 1) * k;
    const std::int64_t chosen = counts[row];
    // Nothing but loads at first: they miss the caches side by side.
    for (std::int64_t i = group.rank(); i < chosen; i += group.size()) {
      row_slots[i] = slot_of[row_ids[i]];
    }
    std::int64_t mine = 0;
    // Copies: the stores below may change no more than what they are for.
    const use_rank by = ranks;
    const bool guessed = predicted;
    for (std::int64_t i = group.rank(); i < chosen; i += group.size()) {
      const std::int32_t slot = row_slots[i];
      if (slot < 0) {
        ++mine;
      } else {
        new_rank[i] = guessed ? rank[slot] : by.again(rank[slot], now);
        rank[slot] = in_use;
      }
    }
    if (tables.last_use != nullptr && !predicted) {
      std::int32_t* const last_use = tables.last_use + requests[row] * tables.slots;
      std::int64_t brought = 0;
      for (std::int64_t i = group.rank(); i < chosen; i += group.size()) {
        const std::int32_t slot = row_slots[i];
        if (slot < 0) continue;
        brought += last_use[slot] == residency_tables::brought_at(clock) ? 1 : 0;
        last_use[slot] = now;
      }
      used = group.sum(brought);
    }
    return group.sum(mine);
  }

  /// The slots below a rank, and the first `equals` of that rank.
  struct cut {
    std::int32_t rank;
    std::int64_t equals;
  };

  template <class Ranks, class Group>
  PULSEINFER_HD void find_victims(std::int64_t row, const Ranks& rank, std::int64_t usable,
                                  std::int64_t wanted, std::int32_t now, const Group& group) const {
    std::int32_t& reach = tables.reach[requests[row]];
    std::int64_t guess = std::int64_t{now} - reach;
    if (guess < 0) guess = 0;
    if (guess > in_use - 1) guess = in_use - 1;
    const cut at = find_cut(rank, usable, wanted, guess, group);
    list_slots(at, rank, usable, scratch + 2 * row * k, group);
    group.sync();
    if (group.rank() == 0) reach = now - at.rank;
  }

  /// A cut that lets `wanted` slots through; as many are not in use.
  ///
  /// A pass over the slots counts those up to a guess. The first guess follows from the last step's
  /// cut, which is seldom off by more than a few steps; the next ones go away from it until the cut
  /// lies between two, then by turns on the line between these and in the middle.
  template <class Ranks, class Group>
  PULSEINFER_HD cut find_cut(const Ranks& rank, std::int64_t usable, std::int64_t wanted,
                             std::int64_t guess, const Group& group) const {
    std::int64_t low = 0;
    std::int64_t high = in_use - 1;  // it is between them, both included
    std::int64_t below_low = 0;
    std::int64_t to_high = usable;
    bool has_low = false;
    bool has_high = false;
    bool halve = false;
    std::int64_t stride = ranks.per_step;
    while (true) {
      const std::int64_t to_guess =
          count_up_to(rank, usable, static_cast<std::int32_t>(guess), group);
      if (to_guess == wanted) return {static_cast<std::int32_t>(guess), wanted};
      if (to_guess > wanted) {
        high = guess;
        to_high = to_guess;
        has_high = true;
      } else {
        low = guess + 1;
        below_low = to_guess;
        has_low = true;
      }
      // So many are of one rank that no rank is a cut by itself.
      if (low >= high) return {static_cast<std::int32_t>(low), wanted - below_low};
      const std::int64_t width = high - low;
      std::int64_t step = stride;
      if (has_low && has_high) {
        step = halve ? width / 2 : width * (wanted - below_low) / (to_high - below_low + 1);
        halve = !halve;
      } else if (has_high) {
        step = width > stride ? width - stride : 0;
      }
      if (stride < std::int64_t{1} << 32) stride *= 2;  // no two ranks are further apart
      guess = low + (step < width ? step : width - 1);
    }
  }

  /// Lists the slots that a cut lets through, in order.
  template <class Ranks, class Group>
  PULSEINFER_HD static void list_slots(const cut& at, const Ranks& rank, std::int64_t usable,
                                       std::int32_t* listed, const Group& group) {
    const auto through = [&](std::int64_t equals) {
      return equals < at.equals ? equals : at.equals;
    };
    std::int64_t lower_before = 0;
    std::int64_t equal_before = 0;
    for (std::int64_t start = 0; start < usable; start += group.size() * run) {
      const std::int64_t first = start + group.rank() * run;
      const std::int64_t last = first + run < usable ? first + run : usable;
      std::int32_t any = 0;  // negative where one of the run goes
      if (last - first == run) {
        for (std::int64_t i = 0; i < run; ++i) any |= rank[first + i] - at.rank - 1;
      } else {
        for (std::int64_t slot = first; slot < last; ++slot) any |= rank[slot] - at.rank - 1;
      }
      if (group.size() == 1 && any >= 0) continue;
      std::int32_t lower = 0;
      std::int32_t equal = 0;
      for (std::int64_t slot = first; slot < last; ++slot) {
        lower += rank[slot] < at.rank ? 1 : 0;
        equal += rank[slot] == at.rank ? 1 : 0;
      }
      // Both in one scan.
      const std::int64_t here = (std::int64_t{equal} << 32) + lower;
      const std::int64_t before = group.scan(here);
      const std::int64_t total = group.sum(here);
      std::int64_t equals = equal_before + (before >> 32);
      std::int64_t to = lower_before + (before & 0xffffffff) + through(equals);
      for (std::int64_t slot = first; slot < last && any < 0; ++slot) {
        const bool goes = rank[slot] < at.rank || (rank[slot] == at.rank && equals++ < at.equals);
        if (goes) listed[to++] = static_cast<std::int32_t>(slot);
      }
      lower_before += total & 0xffffffff;
      equal_before += total >> 32;
    }
  }

  template <class Ranks, class Group>
  PULSEINFER_HD static std::int64_t count_up_to(const Ranks& rank, std::int64_t count,
                                                std::int32_t highest, const Group& group) {
    // A CPU: several sums, of vectors each, that do not wait for each other.
    constexpr std::int64_t sums = 4;
    constexpr std::int64_t width = 4;
    std::int64_t first = 0;
    std::int32_t mine = 0;
    if constexpr (std::is_same_v<Group, single_lane>) {
      std::int32_t sum[sums][width] = {};
      for (; first + sums * width <= count; first += sums * width) {
        for (std::int64_t i = 0; i < sums; ++i) {
          for (std::int64_t at = 0; at < width; ++at) {
            sum[i][at] += rank[first + i * width + at] <= highest ? 1 : 0;
          }
        }
      }
      for (const auto& of_width : sum) {
        for (const std::int32_t n : of_width) mine += n;
      }
    }
    for (std::int64_t i = first + group.rank(); i < count; i += group.size()) {
      mine += rank[i] <= highest ? 1 : 0;
    }
    return group.sum(mine);
  }

  /// Each miss takes a victim's slot, in block order, while there are such; slots become pages.
  /// Returns the misses that have one.
  template <class Group>
  PULSEINFER_HD std::int64_t place(std::int64_t row, std::int32_t* rank, std::int64_t found,
                                   std::int32_t now, const Group& group) const {
    const std::int64_t request = requests[row];
    std::int32_t* const block_in = tables.block_in + request * tables.slots;
    std::int32_t* const slot_of = tables.slot_of + request * tables.max_blocks;
    const std::int32_t* const page_in = tables.page_in + request * tables.slots;
    const std::int32_t* const victims = scratch + 2 * row * k;
    const std::int32_t* const new_rank = victims + k;
    std::int32_t* const row_pages = pages + row * k;
    std::int32_t* const last_use =
        tables.last_use == nullptr ? nullptr : tables.last_use + request * tables.slots;
    const std::int64_t chosen = counts[row];
    std::int64_t placed = 0;
    for (std::int64_t start = 0; start < k; start += group.size()) {
      const std::int64_t i = start + group.rank();
      const std::int32_t at = i < chosen ? row_pages[i] : 0;
      const bool is_miss = at < 0;
      const std::int64_t place = placed + group.scan(is_miss ? 1 : 0);
      if (is_miss && place < found) {
        const std::int32_t slot = victims[place];
        const std::int32_t block = ids[row * k + i];
        const std::int32_t victim = block_in[slot];
        if (victim >= 0) slot_of[victim] = -1;
        block_in[slot] = block;
        slot_of[block] = slot;
        // What nobody has used yet is worth less than what the last step used.
        rank[slot] = !predicted ? now : now > ranks.per_step ? now - ranks.per_step : 1;
        if (last_use != nullptr) {
          last_use[slot] = predicted ? residency_tables::brought_at(now) : now;
        }
        row_pages[i] = page_in[slot];
        misses[row * k + place] = {block, page_in[slot], slot, victim, unit_status::pending};
      } else if (!is_miss && i < chosen) {
        rank[at] = new_rank[i];
        row_pages[i] = page_in[at];
      } else if (i < k) {
        row_pages[i] = -1;  // also a miss of a prediction that finds no place
      }
      placed += group.sum(is_miss ? 1 : 0);
    }
    return placed < found ? placed : found;
  }
};
static_assert(std::is_trivially_copyable_v<resolve_row>);

}  // namespace pulseinfer::detail
