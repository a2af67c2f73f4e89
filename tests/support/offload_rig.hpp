// SPDX-License-Identifier: Apache-2.0
/// @file
/// A pool, a store, a hot buffer and a transfer engine, small, and what tests do with all of them.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/hot_buffer.hpp"
#include "pulseinfer/transfer.hpp"
#include "pulseinfer/xxh3.hpp"
#include "support/device_array.hpp"
#include "support/paged_pool.hpp"

namespace test {

inline constexpr pulseinfer::transfer_way all_ways[] = {
    pulseinfer::transfer_way::staged, pulseinfer::transfer_way::direct,
    pulseinfer::transfer_way::batched, pulseinfer::transfer_way::pull,
    pulseinfer::transfer_way::per_block};

/// Targets that are written down as three numbers: row, block, page.
class unit_targets : public std::vector<pulseinfer::unit_target> {
 public:
  struct numbers {
    std::int32_t row, block, page;
    [[nodiscard]] pulseinfer::unit_target target() const {
      return {row, pulseinfer::logical_block{block}, pulseinfer::device_page{page}};
    }
  };
  unit_targets() = default;
  unit_targets(std::initializer_list<numbers> all) {
    for (const numbers& unit : all) push_back(unit);
  }
  unit_targets(std::size_t count, const numbers& unit) { assign(count, unit.target()); }
  void push_back(const numbers& unit) { vector::push_back(unit.target()); }
};

struct rig_options {
  std::int64_t pages = 96;
  std::int64_t capacity_units = 128;
  std::int32_t budget = 4;
  std::int32_t pages_per_request = 6;
  std::int32_t steps_in_flight = 4;
  std::int64_t chunk_units = 4;
  std::int64_t staging_chunks = 2;
  std::int32_t chunks_in_flight = 8;
  std::int32_t transfers_in_flight = 4;
  pulseinfer::transfer_way way = pulseinfer::transfer_way::staged;
  std::optional<pulseinfer::transfer_costs> costs = {};
  pulseinfer::integrity integrity = pulseinfer::integrity::none;
  pulseinfer::hot_replacement replacement = pulseinfer::hot_replacement::least_recent;
  std::vector<std::int32_t> pages_of_layer = {};
  pulseinfer::link_monitor* monitor = nullptr;
  bool predicts = false;
  double link_bytes_per_second = 0;
  std::int32_t head_copies = 0;
  pulseinfer::chunk_plans plans = {};
};

/// 0 to count - 1.
inline std::vector<std::int32_t> blocks(std::int32_t count) {
  std::vector<std::int32_t> all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}
/// These blocks of row 0, into pages that lie scattered.
inline unit_targets units_of(std::int32_t count) {
  unit_targets units;
  for (std::int32_t b = 0; b < count; ++b) units.push_back({0, b, 1 + b * 17 % 80});
  return units;
}

template <class Backend>
class offload_rig {
 public:
  using ticket = pulseinfer::ticket<Backend>;
  using targets = unit_targets;
  static constexpr pulseinfer::kv_geometry geometry = small_geometry;
  static constexpr std::int32_t max_blocks = 64;
  static constexpr std::int32_t max_requests = 4;

  explicit offload_rig(const Backend& with, const rig_options& o = {})
      : machine(with),
        pages(with, geometry, o.pages),
        store(with, geometry,
              {.capacity_bytes = o.capacity_units * geometry.unit_bytes(),
               .max_sequences = 8,
               .max_blocks = max_blocks,
               .integrity = o.integrity,
               .checksum = pulseinfer::xxh3}),
        hot(with, pages.pool(),
            {.pages_per_request = o.pages_per_request,
             .budget_blocks = o.budget,
             .max_requests = max_requests,
             .max_rows = 3,
             .max_blocks = max_blocks,
             .steps_in_flight = o.steps_in_flight,
             .replacement = o.replacement,
             .predicts = o.predicts,
             .pages_of_layer = o.pages_of_layer}),
        stream(machine.make_stream(pulseinfer::stream_priority::normal)),
        ids_(with, std::size_t{3} * static_cast<std::size_t>(o.budget)),
        counts_(with, 3),
        batch_(with, 6),
        budget_(o.budget),
        mover(with, store, pages.pool(),
              {.staging_bytes = o.staging_chunks * o.chunk_units * geometry.unit_bytes(),
               .chunk_bytes = o.chunk_units * geometry.unit_bytes(),
               .first_chunk_bytes = geometry.unit_bytes(),
               .head_copies = o.head_copies,
               .plans = o.plans,
               .chunks_in_flight = o.chunks_in_flight,
               .transfers_in_flight = o.transfers_in_flight,
               .max_rows = 3,
               .max_units = 80,
               .link_bytes_per_second = o.link_bytes_per_second,
               .way = o.way,
               .costs = o.costs,
               .monitor = o.monitor}) {}
  offload_rig(const offload_rig&) = delete;
  offload_rig& operator=(const offload_rig&) = delete;

  /// A sequence with these blocks of both layers stored, stamped with `key`.
  pulseinfer::sequence_id stored(std::int64_t key, const std::vector<std::int32_t>& blocks) {
    const pulseinfer::sequence_id id = store.open_sequence().value();
    for (std::int32_t layer = 0; layer < geometry.layers; ++layer) {
      for (const std::int32_t block : blocks) add(id, key, layer, block);
    }
    return id;
  }
  void add(pulseinfer::sequence_id id, std::int64_t key, std::int32_t layer, std::int32_t block) {
    const pulseinfer::reservation r = store.reserve(id, layer, pulseinfer::logical_block{block});
    REQUIRE(r.outcome == pulseinfer::reserve_outcome::reserved);
    const unit_bytes bytes = stamp(geometry, key, layer, block);
    std::memcpy(store.writable(r.slot), bytes.data(), bytes.size());
    store.commit(r.slot);
  }
  /// The stored bytes of a unit, empty where the store has none.
  unit_bytes in_store(pulseinfer::sequence_id id, std::int32_t layer, std::int32_t block) {
    const auto lease = store.acquire(id, layer);
    const std::byte* const found = lease.find(pulseinfer::logical_block{block});
    if (found == nullptr) return {};
    return unit_bytes(found, found + geometry.unit_bytes());
  }

  std::optional<ticket> recall(std::int32_t layer, pulseinfer::sequence_id id,
                               const targets& units) {
    return mover.recall_units(layer, {&id, 1}, units, stream);
  }
  std::optional<ticket> offload(std::int32_t layer, pulseinfer::sequence_id id,
                                const targets& units) {
    return mover.offload(layer, {&id, 1}, units, stream);
  }

  /// Lends pages first, first + 1, ... to a request.
  void lend(std::int32_t request, std::int32_t first, std::int32_t count) {
    std::vector<std::int32_t> lent;
    for (std::int32_t i = 0; i < count; ++i) lent.push_back(first + i);
    hot.lend(request, lent, stream);
  }

  /// The batch of these requests, on the device once this returns.
  const pulseinfer::batch_view& rows_of(const std::vector<std::int32_t>& requests) {
    requests_ = requests;
    std::vector<std::int32_t> arrays(6, 0);
    std::copy(requests.begin(), requests.end(), arrays.begin());
    std::fill_n(arrays.begin() + 3, 3, max_blocks * geometry.block_tokens);
    batch_.upload(arrays, stream);
    view_ = {.requests = requests_,
             .device_requests = batch_.data(),
             .device_tokens = batch_.data() + 3,
             .max_tokens = std::int64_t{max_blocks} * geometry.block_tokens};
    return view_;
  }
  /// A selection of these blocks, a list a row.
  pulseinfer::selection choice(const std::vector<std::vector<std::int32_t>>& chosen) {
    const auto k = static_cast<std::size_t>(budget_);
    std::vector<std::int32_t> ids(3 * k, -1), counts(3, 0);
    for (std::size_t row = 0; row < chosen.size(); ++row) {
      std::copy(chosen[row].begin(), chosen[row].end(),
                ids.begin() + static_cast<std::ptrdiff_t>(row * k));
      counts[row] = static_cast<std::int32_t>(chosen[row].size());
    }
    ids_.upload(ids, stream);
    counts_.upload(counts, stream);
    return {ids_.data(), counts_.data(), static_cast<std::int32_t>(chosen.size()), budget_};
  }
  /// Resolves a choice for some requests.
  std::optional<pulseinfer::resolved_step> resolve(
      std::int32_t layer, const std::vector<std::int32_t>& requests,
      const std::vector<std::vector<std::int32_t>>& chosen) {
    const pulseinfer::selection selected = choice(chosen);
    return hot.resolve(layer, rows_of(requests), selected, stream);
  }
  /// The page table of a step, row by row.
  std::vector<std::vector<std::int32_t>> pages_of(const pulseinfer::resolved_step& step) {
    const auto k = static_cast<std::size_t>(step.k);
    const pinned_array<std::int32_t, Backend> table(machine,
                                                    static_cast<std::size_t>(step.rows) * k);
    machine.copy_async(table.data(), step.pages, table.bytes(),
                       pulseinfer::copy_direction::device_to_host, stream);
    machine.sync(stream);
    std::vector<std::vector<std::int32_t>> found;
    for (std::int32_t row = 0; row < step.rows; ++row) {
      const std::int32_t* const first = table.data() + static_cast<std::size_t>(row) * k;
      found.emplace_back(first, first + k);
    }
    return found;
  }
  /// The blocks that a row missed. The step's kernel is done.
  static std::vector<std::int32_t> missed(const pulseinfer::resolved_step& step, std::int32_t row) {
    std::vector<std::int32_t> blocks;
    for (const pulseinfer::unit_miss& miss : step.misses(row)) blocks.push_back(miss.block);
    return blocks;
  }

  static bool balanced(const pulseinfer::store_counts& c) {
    return c.free + c.writing + c.evictable + c.pinned + c.quarantined == c.capacity &&
           c.free >= 0 && c.writing >= 0 && c.evictable >= 0 && c.pinned >= 0 && c.quarantined >= 0;
  }
  /// Nothing is held by a transfer.
  static bool at_rest(const pulseinfer::store_counts& c) {
    return balanced(c) && c.writing == 0 && c.pinned == 0 && c.quarantined == 0;
  }

  Backend machine;
  paged_pool<Backend> pages;
  pulseinfer::block_store<Backend> store;
  pulseinfer::hot_buffer<Backend> hot;
  typename Backend::stream stream;  ///< the engine's

 private:
  device_array<std::int32_t, Backend> ids_;
  device_array<std::int32_t, Backend> counts_;
  device_array<std::int32_t, Backend> batch_;
  std::int32_t budget_;
  std::vector<std::int32_t> requests_;
  pulseinfer::batch_view view_;

 public:
  pulseinfer::transfer_engine<Backend, pulseinfer::block_store<Backend>> mover;
};

/// The number of units of a ticket in each state.
template <class Backend>
std::vector<pulseinfer::unit_status> statuses(const pulseinfer::ticket<Backend>& t) {
  std::vector<pulseinfer::unit_status> found;
  for (std::int64_t i = 0; i < t.report().units; ++i) {
    found.push_back(t.status(static_cast<std::size_t>(i)));
  }
  return found;
}

}  // namespace test
