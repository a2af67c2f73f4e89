// SPDX-License-Identifier: Apache-2.0
/// @file
/// The hot buffer's tables, which units are on the device, in which slot, and who goes first, with
/// the bodies that undo and settle steps (detail/resolve_row.hpp resolves them). All of it runs on
/// the device, on the engine's stream.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A unit that is chosen and not resident, the page that it gets, and the block that had the page.
struct unit_miss {
  std::int32_t block;
  std::int32_t page;
  std::int32_t slot;    ///< of the hot buffer's table
  std::int32_t victim;  ///< the block that leaves the page in this layer, -1 where there was none
  unit_status status;
};

/// What steps have come to, of a request and layer or of several.
struct residency_counts {
  std::int64_t chosen = 0;   ///< units of true choices
  std::int64_t missed = 0;   ///< of these, those that were not resident
  std::int64_t brought = 0;  ///< units that predictions have brought, or are bringing
  std::int64_t used = 0;     ///< of these, those that the next true choice had in it
  std::int64_t wasted = 0;   ///< of these, those that it did not

  bool operator==(const residency_counts&) const = default;
};

namespace detail {

/// The counts of one request and layer, on the device and where the host reads them.
struct residency_totals {
  residency_counts counts;
  std::int64_t open = 0;  ///< brought since the last true choice

  bool operator==(const residency_totals&) const = default;

  /// Writes what has changed where a host reads it at any time, number by number.
  PULSEINFER_HD void publish(residency_counts* mirror) const {
    publish(&mirror->chosen, counts.chosen);
    publish(&mirror->missed, counts.missed);
    publish(&mirror->brought, counts.brought);
    publish(&mirror->used, counts.used);
    publish(&mirror->wasted, counts.wasted);
  }

 private:
  PULSEINFER_HD static void publish(std::int64_t* at, std::int64_t value) {
#if defined(__CUDA_ARCH__)
    *static_cast<volatile std::int64_t*>(at) = value;
#else
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
#endif
  }
};

/// How far the recall of a step's misses is. One that ends well ends the step.
enum class recall_state : std::uint8_t {
  none,
  under_way,  ///< from the call on
  short_of,   ///< it has ended, and not every miss came
};

/// One step's mirror: what the device tells the host about it. Busy from resolve until its recall
/// has ended well, or its misses were discarded.
struct step_record {
  std::atomic<bool> busy{false};
  std::atomic<recall_state> recall{recall_state::none};
  std::uint64_t generation = 0;  ///< of the step that has the record now
  std::int32_t layer = 0;
  std::int32_t k = 0;
  std::vector<std::int32_t> requests;     ///< [rows]
  std::int32_t* row_requests = nullptr;   ///< [rows], pinned: the same, not of held steps
  unit_miss* misses = nullptr;            ///< [rows, k], pinned
  std::int32_t* miss_counts = nullptr;    ///< [rows], pinned
  std::int32_t* chosen_counts = nullptr;  ///< [rows], pinned
  unit_miss* device_misses = nullptr;     ///< the same arrays as kernels see them
  std::int32_t* device_miss_counts = nullptr;
  std::int32_t* device_chosen_counts = nullptr;
  std::int32_t* device_requests = nullptr;
  std::int32_t* pages = nullptr;    ///< [rows, k], device memory
  std::int32_t* scratch = nullptr;  ///< [rows, 2 k], device memory
  bool predicted = false;           ///< its choice is not the true one
  bool settled = false;             ///< what resolves the true one stands behind its recall
  bool held = false;                ///< for replays, until it is dropped
  bool discarded = false;           ///< busy only until its last kernel is done
  bool pulled = false;              ///< that kernel stands behind one that writes the pages
  bool forget_failed = false;       ///< that kernel did not run: its stream had failed

  [[nodiscard]] std::int32_t rows() const noexcept {
    return static_cast<std::int32_t>(requests.size());
  }
  [[nodiscard]] bool has(std::int32_t request) const noexcept {
    return std::find(requests.begin(), requests.end(), request) != requests.end();
  }
  [[nodiscard]] bool is_recalling() const noexcept {
    return recall.load(std::memory_order_acquire) == recall_state::under_way;
  }
};

/// The tables of one layer, as kernels see them.
struct residency_tables {
  std::int32_t* block_in;  ///< [requests, slots] block in a slot, -1 none
  std::int32_t* rank;      ///< [requests, slots] the lowest goes first; 0 where there is none
  std::int32_t* clock;     ///< [requests] counts up with each step that is resolved
  std::int32_t* reach;     ///< [requests] how far the last victims' rank was behind the clock
  /// [requests, slots] the clock of the last true choice that had the slot's block; for one that a
  /// prediction has brought, brought_at(the clock then). Null where nothing is predicted
  std::int32_t* last_use;
  residency_totals* totals;     ///< [requests]
  residency_counts* mirrors;    ///< [requests], mapped
  std::int32_t* slot_of;        ///< [requests, max_blocks] slot of a block, -1 none
  const std::int32_t* page_in;  ///< [requests, slots] page of a slot
  const std::int32_t* lent;     ///< [requests] slots in use
  std::int64_t slots;           ///< of a request, in memory
  std::int64_t usable;          ///< of those lent, how many this layer uses at most
  std::int64_t max_blocks;

  [[nodiscard]] PULSEINFER_HD static std::int32_t brought_at(std::int32_t clock) {
    return -clock - 1;
  }
  [[nodiscard]] PULSEINFER_HD bool is_brought(std::int64_t request, std::int64_t slot) const {
    return last_use != nullptr && last_use[request * slots + slot] == brought_at(clock[request]);
  }
};

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
    if (request < 0) return;  // not in use: the misses, if there are some, are of a replay before
    std::int64_t mine = 0;
    for (std::int64_t i = group.rank(); i < miss_counts[row]; i += group.size()) {
      const unit_miss miss = misses[row * k + i];
      if (miss.status != unit_status::moved) mine += forget(tables, request, miss);
    }
    take_off(tables, request, group.sum(mine), group);
  }

  /// Where the slot has another block meanwhile it is left alone. Returns how many units less a
  /// prediction has brought: one or none.
  PULSEINFER_HD static std::int64_t forget(const residency_tables& tables, std::int64_t request,
                                           const unit_miss& miss) {
    std::int32_t& block_in = tables.block_in[request * tables.slots + miss.slot];
    if (block_in != miss.block) return 0;
    const bool was_brought = tables.is_brought(request, miss.slot);
    block_in = -1;
    if (tables.last_use != nullptr) tables.last_use[request * tables.slots + miss.slot] = 0;
    tables.rank[request * tables.slots + miss.slot] = 0;
    tables.slot_of[request * tables.max_blocks + miss.block] = -1;
    return was_brought ? 1 : 0;
  }

  /// Takes units that a prediction did not bring after all off its counts.
  template <class Group>
  PULSEINFER_HD static void take_off(const residency_tables& tables, std::int64_t request,
                                     std::int64_t units, const Group& group) {
    if (units == 0 || group.rank() != 0) return;
    residency_totals& totals = tables.totals[request];
    totals.open -= units;
    totals.counts.brought -= units;
    totals.publish(tables.mirrors + request);
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
    std::int64_t mine = 0;
    for (std::int64_t i = group.rank(); i < miss_counts[row]; i += group.size()) {
      unit_miss& miss = misses[row * k + i];
      if (sources[first + i] != nullptr) {
        miss.status = unit_status::moved;
        continue;
      }
      miss.status = unit_status::missing;
      mine += forget_misses::forget(tables, requests[row], miss);
      for (std::int64_t j = 0; j < k; ++j) {
        if (pages[row * k + j] == miss.page) pages[row * k + j] = -1;
      }
    }
    forget_misses::take_off(tables, requests[row], group.sum(mine), group);
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
struct fill_words {
  std::int32_t* table;
  std::int64_t stride;
  std::int32_t value;
  PULSEINFER_HD void operator()(std::int64_t block, std::int64_t word) const {
    table[block * stride + word] = value;
  }
};

/// Kernel body: clears counts, of which `word` is the index.
struct clear_totals {
  residency_totals* totals;
  PULSEINFER_HD void operator()(std::int64_t, std::int64_t word) const { totals[word] = {}; }
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
