// SPDX-License-Identifier: Apache-2.0
/// @file
/// A small block store for tests, with whole blocks, names and counts at hand.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "support/store_model.hpp"

namespace store_test {

/// Keys of a prompt of which each block's tokens are one number.
inline std::vector<pulseinfer::block_key> keys_of(const std::vector<std::int32_t>& blocks,
                                                  std::uint64_t tenant = 1) {
  std::vector<pulseinfer::block_key> keys;
  pulseinfer::block_key key = pulseinfer::root_key(tenant);
  for (const std::int32_t block : blocks) {
    key = pulseinfer::chained_key(key, std::span(&block, 1));
    keys.push_back(key);
  }
  return keys;
}

/// Counts that have to balance, whatever happened.
inline store_counts balanced(const store_counts& c) {
  for (const std::int64_t part : {c.free, c.writing, c.evictable, c.pinned, c.quarantined}) {
    CHECK(part >= 0);
  }
  CHECK(c.free + c.writing + c.evictable + c.pinned + c.quarantined == c.capacity);
  return c;
}

template <class Store>
class shelf {
 public:
  using keys = std::vector<pulseinfer::block_key>;
  using event = pulseinfer::store_event;

  template <class Backend, class... Filter>
  explicit shelf(const Backend& backend, std::int64_t units,
                 pulseinfer::block_store_options options = {}, Filter... filter)
      : store_(backend, geometry, completed(units, options), filter...) {}

  Store* operator->() { return &store_; }

  /// A snapshot, which has to balance.
  [[nodiscard]] store_counts counts() const { return balanced(store_.counts()); }
  void expect(const store_counts& wanted) const {
    const store_counts c = counts();
    CHECK(c.free == wanted.free);
    CHECK(c.writing == wanted.writing);
    CHECK(c.evictable == wanted.evictable);
    CHECK(c.pinned == wanted.pinned);
    CHECK(c.quarantined == wanted.quarantined);
  }
  sequence_id open() {
    const auto id = store_.open_sequence();
    REQUIRE(id.has_value());
    return *id;
  }
  sequence_id fork(sequence_id parent, std::int32_t blocks) {
    const auto id = store_.fork(parent, blocks);
    REQUIRE(id.has_value());
    (void)counts();
    return *id;
  }
  host_slot reserve(sequence_id id, unit at) {
    const auto got = store_.reserve(id, at.layer, logical_block{at.block});
    REQUIRE(got.outcome == reserve_outcome::reserved);
    write_stamp(store_.writable(got.slot), stamp_of(id, at));
    (void)counts();
    return got.slot;
  }
  void put(sequence_id id, unit at) { store_.commit(reserve(id, at)); }
  /// Blocks [first, last), all layers.
  void put_blocks(sequence_id id, std::int32_t first, std::int32_t last) {
    for (std::int32_t block = first; block < last; ++block) {
      for (std::int32_t layer = 0; layer < layers; ++layer) put(id, {layer, block});
    }
  }
  void name(sequence_id id, const keys& names, const pulseinfer::retention& stay = {}) {
    for (std::size_t i = 0; i < names.size(); ++i) {
      CHECK(store_.name_block(id, static_cast<logical_block>(i), names[i], stay) ==
            pulseinfer::name_outcome::named);
    }
  }
  /// A sequence of whole blocks with these names, closed: they stay for others.
  void leave(const keys& names, const pulseinfer::retention& stay = {}) {
    const sequence_id id = open();
    put_blocks(id, 0, static_cast<std::int32_t>(names.size()));
    name(id, names, stay);
    CHECK(store_.close_sequence(id) == close_outcome::closed);
    (void)counts();
  }
  [[nodiscard]] bool has(sequence_id id, unit at) const {
    return store_.contains(id, at.layer, logical_block{at.block});
  }
  /// Whole blocks from the first on; what is behind them is absent, or the check fails.
  [[nodiscard]] std::int32_t prefix_of(sequence_id id) const {
    std::int32_t whole = 0;
    while (whole < store_.max_blocks() && has(id, {0, whole}) && has(id, {1, whole})) ++whole;
    for (std::int32_t block = whole + 1; block < store_.max_blocks(); ++block) {
      CHECK(!has(id, {0, block}));
      CHECK(!has(id, {1, block}));
    }
    return whole;
  }
  void fail_to_put(sequence_id id, unit at) {
    const store_counts before = counts();
    CHECK(store_.reserve(id, at.layer, logical_block{at.block}).outcome == reserve_outcome::full);
    CHECK(counts() == before);
  }
  /// Fills what is free, and gives one more unit up.
  void evict_one(sequence_id writer) {
    const std::int64_t free = counts().free;
    for (std::int64_t i = 0; i <= free; ++i) {
      put(writer, {next_ % layers, next_ / layers});
      ++next_;
    }
  }
  [[nodiscard]] std::vector<event> events() {
    std::vector<event> all(64);
    all.resize(store_.drain_events(all));
    return all;
  }

 private:
  [[nodiscard]] static pulseinfer::block_store_options completed(
      std::int64_t units, pulseinfer::block_store_options options) {
    options.capacity_bytes = units * unit_bytes;
    options.max_sequences = std::min(options.max_sequences, 8);
    options.max_blocks = std::min(options.max_blocks, 64);
    return options;
  }

  Store store_;
  std::int32_t next_ = 0;  ///< what the evicting writer writes next
};

/// True if the lease finds the unit as `writer` wrote it.
template <class Lease>
bool finds(const Lease& lease, sequence_id writer, unit at) {
  const std::byte* const bytes = lease.find(logical_block{at.block});
  return bytes != nullptr && read_stamp(bytes) == stamp_of(writer, at);
}

}  // namespace store_test
