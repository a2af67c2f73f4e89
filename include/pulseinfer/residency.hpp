// SPDX-License-Identifier: Apache-2.0
/// @file
/// The bodies that keep the hot buffer's tables: which units are on the device, in which slot, last
/// used when. All of it runs on the device, on the engine's stream.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A unit that is chosen and not resident, and the page that it gets.
struct unit_miss {
  std::int32_t block;
  std::int32_t page;
  std::int32_t slot;  ///< of the hot buffer's table
  unit_status status;
};

namespace detail {

/// One step's mirror: what the device tells the host about it. Busy from resolve until its recall
/// has ended well, or its misses were discarded.
struct step_record {
  std::atomic<bool> busy{false};
  std::atomic<bool> recalling{false};  ///< from the call of a recall to its end
  std::uint64_t generation = 0;        ///< of the step that has the record now
  std::int32_t layer = 0;
  std::int32_t k = 0;
  std::vector<std::int32_t> requests;     ///< [rows]
  unit_miss* misses = nullptr;            ///< [rows, k], pinned
  std::int32_t* miss_counts = nullptr;    ///< [rows], pinned
  std::int32_t* chosen_counts = nullptr;  ///< [rows], pinned
  unit_miss* device_misses = nullptr;     ///< the same arrays as kernels see them
  std::int32_t* device_miss_counts = nullptr;
  std::int32_t* device_chosen_counts = nullptr;
  std::int32_t* pages = nullptr;    ///< [rows, k], device memory
  std::int32_t* victims = nullptr;  ///< [rows, k], device memory, scratch
  bool held = false;                ///< for replays, until it is dropped
  bool discarded = false;           ///< busy only until its last kernel is done
  bool pulled = false;              ///< that kernel stands behind one that writes the pages
  bool forget_failed = false;       ///< that kernel did not run: its stream had failed

  [[nodiscard]] std::int32_t rows() const noexcept {
    return static_cast<std::int32_t>(requests.size());
  }
};

/// The tables of one layer, as kernels see them.
struct residency_tables {
  std::int32_t* block_in;       ///< [requests, slots] block in a slot, -1 none
  std::int64_t* last_use;       ///< [requests, slots] step of its last use, 0 never
  std::int64_t* last_step;      ///< [requests] the number of steps that were resolved for a request
  std::int32_t* slot_of;        ///< [requests, max_blocks] slot of a block, -1 none
  const std::int32_t* page_in;  ///< [requests, slots] page of a slot
  const std::int32_t* lent;     ///< [requests] slots in use
  std::int64_t slots;
  std::int64_t max_blocks;
};

/// Row kernel: resolves one row. The result does not depend on the size of the group.
///
/// Nothing in it changes from step to step, not even the step's number: captured once, it can be
/// replayed. A row whose request is negative is not in use, and chooses nothing; nor does one that
/// was lent fewer pages than it chooses, which the host cannot check of a replay.
struct resolve_row {
  residency_tables tables;
  const std::int32_t* requests;
  const std::int32_t* ids;     ///< [rows, k]
  const std::int32_t* counts;  ///< [rows]
  std::int64_t k;
  std::int32_t* pages;    ///< [rows, k]
  std::int32_t* victims;  ///< [rows, k] scratch
  unit_miss* misses;      ///< [rows, k], mapped
  std::int32_t* miss_counts;
  std::int32_t* chosen_counts;

  static constexpr std::int32_t missing = -2;

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int64_t request = requests[row];
    if (request < 0) {
      choose_nothing(row, group);
      return;
    }
    std::int32_t* block_in = tables.block_in + request * tables.slots;
    std::int64_t* last_use = tables.last_use + request * tables.slots;
    std::int32_t* slot_of = tables.slot_of + request * tables.max_blocks;
    const std::int32_t* page_in = tables.page_in + request * tables.slots;
    const std::int64_t lent = tables.lent[request];
    const std::int64_t chosen = counts[row];
    if (chosen > lent) {
      choose_nothing(row, group);
      return;
    }
    // Counts up for each request and layer by itself: 32 bits would wrap within days.
    const std::int64_t step = tables.last_step[request] + 1;
    const std::int32_t* row_ids = ids + row * k;
    std::int32_t* row_pages = pages + row * k;
    std::int32_t* row_victims = victims + row * k;

    // Hits keep their page, and are marked as used before anybody looks for victims.
    std::int64_t my_misses = 0;
    for (std::int64_t i = group.rank(); i < k; i += group.size()) {
      std::int32_t page = -1;
      if (i < chosen) {
        const std::int32_t slot = slot_of[row_ids[i]];
        page = slot < 0 ? missing : page_in[slot];
        if (slot < 0) {
          ++my_misses;
        } else {
          last_use[slot] = step;
        }
      }
      row_pages[i] = page;
    }
    group.sync();
    const std::int64_t wanted = group.sum(my_misses);

    // Victims: the `wanted` slots used longest ago, lower slots first.
    const std::int64_t newest = wanted == 0 ? 0 : oldest_uses(group, last_use, lent, wanted, step);
    const std::int64_t older = count_below(group, last_use, lent, newest);
    std::int64_t found = 0;
    std::int64_t found_newest = 0;
    for (std::int64_t start = 0; start < lent && wanted > 0; start += group.size()) {
      const std::int64_t slot = start + group.rank();
      const std::int64_t use = slot < lent ? last_use[slot] : step;
      const bool is_newest = slot < lent && use == newest;
      const std::int64_t rank_newest = found_newest + group.scan(is_newest ? 1 : 0);
      const bool taken =
          slot < lent && (use < newest || (is_newest && rank_newest < wanted - older));
      const std::int64_t at = found + group.scan(taken ? 1 : 0);
      if (taken) row_victims[at] = static_cast<std::int32_t>(slot);
      found += group.sum(taken ? 1 : 0);
      found_newest += group.sum(is_newest ? 1 : 0);
    }
    group.sync();

    // Each miss takes a victim's slot, in block order.
    std::int64_t placed = 0;
    for (std::int64_t start = 0; start < chosen; start += group.size()) {
      const std::int64_t i = start + group.rank();
      const bool is_miss = i < chosen && row_pages[i] == missing;
      const std::int64_t at = placed + group.scan(is_miss ? 1 : 0);
      if (is_miss) {
        const std::int32_t slot = row_victims[at];
        const std::int32_t block = row_ids[i];
        if (block_in[slot] >= 0) slot_of[block_in[slot]] = -1;
        block_in[slot] = block;
        slot_of[block] = slot;
        last_use[slot] = step;
        row_pages[i] = page_in[slot];
        misses[row * k + at] = {block, page_in[slot], slot, unit_status::pending};
      }
      placed += group.sum(is_miss ? 1 : 0);
    }
    if (group.rank() == 0) {
      miss_counts[row] = static_cast<std::int32_t>(placed);
      chosen_counts[row] = static_cast<std::int32_t>(chosen);
      tables.last_step[request] = step;  // every lane has read it, before the first sum
    }
  }

 private:
  template <class Group>
  PULSEINFER_HD void choose_nothing(std::int64_t row, const Group& group) const {
    for (std::int64_t i = group.rank(); i < k; i += group.size()) pages[row * k + i] = -1;
    if (group.rank() == 0) miss_counts[row] = chosen_counts[row] = 0;
  }

  template <class Group>
  PULSEINFER_HD static std::int64_t count_below(const Group& group, const std::int64_t* last_use,
                                                std::int64_t lent, std::int64_t bound) {
    std::int64_t mine = 0;
    for (std::int64_t slot = group.rank(); slot < lent; slot += group.size()) {
      if (last_use[slot] < bound) ++mine;
    }
    return group.sum(mine);
  }

  /// The smallest use such that at least `wanted` slots were used then or before. By bisection over
  /// the step number: as many passes over the slots as it has bits, whatever the group.
  template <class Group>
  PULSEINFER_HD static std::int64_t oldest_uses(const Group& group, const std::int64_t* last_use,
                                                std::int64_t lent, std::int64_t wanted,
                                                std::int64_t step) {
    std::int64_t low = 0;
    std::int64_t high = step - 1;
    while (low < high) {
      const std::int64_t middle = low + (high - low) / 2;
      if (count_below(group, last_use, lent, middle + 1) >= wanted) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};
static_assert(std::is_trivially_copyable_v<resolve_row>);

/// Row kernel: forgets the misses of a row that did not arrive, so that no later step takes them
/// for hits.
struct forget_misses {
  residency_tables tables;
  const std::int32_t* requests;  ///< [rows]
  const unit_miss* misses;       ///< [rows, k]
  const std::int32_t* miss_counts;
  std::int64_t k;

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int64_t request = requests[row];
    for (std::int64_t i = group.rank(); i < miss_counts[row]; i += group.size()) {
      const unit_miss miss = misses[row * k + i];
      if (miss.status != unit_status::moved) forget(tables, request, miss);
    }
  }

  /// Where the slot has another block meanwhile it is left alone.
  PULSEINFER_HD static void forget(const residency_tables& tables, std::int64_t request,
                                   const unit_miss& miss) {
    std::int32_t& block_in = tables.block_in[request * tables.slots + miss.slot];
    if (block_in != miss.block) return;
    block_in = -1;
    tables.last_use[request * tables.slots + miss.slot] = 0;
    tables.slot_of[request * tables.max_blocks + miss.block] = -1;
  }
};

/// Row kernel, behind one that has pulled the misses: says of each what became of it. What the store
/// lacked is forgotten, and its page is taken out of the page table, so that attention passes it
/// over instead of reading what lies there.
struct settle_misses {
  residency_tables tables;
  const std::int32_t* requests;     ///< [rows]
  unit_miss* misses;                ///< [rows, k], mapped
  const std::int32_t* miss_counts;  ///< [rows]
  const std::byte* const* sources;  ///< of all misses, row after row; null where the store lacks it
  std::int32_t* pages;              ///< [rows, k]
  std::int64_t k;

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int64_t first = misses_before(miss_counts, row, group);
    for (std::int64_t i = group.rank(); i < miss_counts[row]; i += group.size()) {
      unit_miss& miss = misses[row * k + i];
      if (sources[first + i] != nullptr) {
        miss.status = unit_status::moved;
        continue;
      }
      miss.status = unit_status::missing;
      forget_misses::forget(tables, requests[row], miss);
      for (std::int64_t j = 0; j < k; ++j) {
        if (pages[row * k + j] == miss.page) pages[row * k + j] = -1;
      }
    }
  }

  /// The misses of all rows before `row`.
  template <class Group>
  PULSEINFER_HD static std::int64_t misses_before(const std::int32_t* counts, std::int64_t row,
                                                  const Group& group) {
    std::int64_t mine = 0;
    for (std::int64_t r = group.rank(); r < row; r += group.size()) mine += counts[r];
    return group.sum(mine);
  }
};

/// Kernel body: table[block * stride + word] = value.
template <class Word>
struct fill_words {
  Word* table;
  std::int64_t stride;
  Word value;
  PULSEINFER_HD void operator()(std::int64_t block, std::int64_t word) const {
    table[block * stride + word] = value;
  }
};

/// Kernel body: writes up to 64 words that travel in the body itself: no staging, no lifetime to
/// keep.
struct write_words {
  static constexpr std::int64_t capacity = 64;
  std::int32_t* destination;
  std::int32_t values[capacity];
  PULSEINFER_HD void operator()(std::int64_t, std::int64_t word) const {
    destination[word] = values[word];
  }
};

}  // namespace detail

}  // namespace pulseinfer
