// SPDX-License-Identifier: Apache-2.0
/// @file
/// The values that go into a store and come out of it.
#include "pulseinfer/store_types.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>

namespace {

using namespace pulseinfer;

constexpr kv_geometry geometry{.layers = 2, .kv_heads = 1, .head_dim = 8, .block_tokens = 4};
constexpr std::int64_t unit = 128;
constexpr std::int64_t largest = std::numeric_limits<std::int64_t>::max();

void refuses(const block_store_options& options, const char* what) {
  CHECK_THROWS_WITH_AS((void)detail::checked_options(geometry, options), doctest::Contains(what),
                       std::invalid_argument);
}

}  // namespace

TEST_CASE("store types: a default handle is nobody's, and generations tell sequences apart") {
  CHECK(sequence_id{}.index < 0);
  CHECK(sequence_id{3, 1} == sequence_id{3, 1});
  CHECK(sequence_id{3, 1} != sequence_id{3, 2});
  CHECK(sequence_id{3, 1} != sequence_id{2, 1});
  CHECK(reservation{}.slot == host_slot::none);
  CHECK(reservation{}.outcome == reserve_outcome::full);
}

TEST_CASE("store types: a block, a slot and a page keep their number") {
  static_assert(index_of(logical_block{7}) == 7 && index_of(host_slot{8}) == 8 &&
                index_of(device_page{9}) == 9);
  static_assert(index_of(logical_block::none) == -1 && index_of(host_slot::none) == -1 &&
                index_of(device_page::none) == -1);
  CHECK(logical_block{1} < logical_block{2});
  CHECK(device_page{3} != device_page::none);
}

TEST_CASE("store types: counts are compared one by one") {
  const store_counts counts{.free = 1, .pinned = 2, .capacity = 3};
  CHECK(counts == store_counts{.free = 1, .pinned = 2, .capacity = 3});
  CHECK(counts != store_counts{.free = 1, .evictable = 2, .capacity = 3});
}

TEST_CASE("store types: options at their limits are taken as they are") {
  for (const std::int64_t bytes :
       {unit, unit + 1, unit * std::numeric_limits<std::int32_t>::max()}) {
    CAPTURE(bytes);
    CHECK(detail::checked_options(geometry, {.capacity_bytes = bytes}).capacity_bytes == bytes);
  }
  const auto most = detail::checked_options(
      geometry, {.capacity_bytes = unit, .max_sequences = max_extent, .max_blocks = 1 << 24});
  CHECK(most.max_sequences == max_extent);
  CHECK(most.max_blocks == 1 << 24);
}

TEST_CASE("store types: options beyond their limits are refused with value and limit") {
  refuses({}, "capacity_bytes is 0, expected at least one unit, which is 128");
  refuses({.capacity_bytes = unit - 1}, "capacity_bytes is 127");
  refuses({.capacity_bytes = -1}, "capacity_bytes is -1");
  refuses({.capacity_bytes = largest}, "more than 2147483647 units of 128");
  refuses({.capacity_bytes = unit, .max_sequences = 0}, "max_sequences is 0, expected 1 to 65536");
  refuses({.capacity_bytes = unit, .max_sequences = max_extent + 1}, "max_sequences is 65537");
  refuses({.capacity_bytes = unit, .max_blocks = 0}, "max_blocks is 0, expected 1 to 16777216");
  refuses({.capacity_bytes = unit, .max_blocks = (1 << 24) + 1}, "max_blocks is 16777217");
  refuses({.capacity_bytes = 3 * unit, .max_stored_blocks = -1},
          "max_stored_blocks is -1, expected 0 to 3");
  refuses({.capacity_bytes = 3 * unit, .max_stored_blocks = 4}, "max_stored_blocks is 4");
  refuses({.capacity_bytes = unit, .max_events = -1}, "max_events is -1, expected 0 to 16777216");
  refuses({.capacity_bytes = unit, .max_events = (1 << 24) + 1}, "max_events is 16777217");
  refuses({.capacity_bytes = unit, .scope = static_cast<eviction_scope>(2)},
          "scope is 2, expected one of eviction_scope");
}

TEST_CASE("store types: how many blocks are known follows from capacity, layers and blocks") {
  const auto records = [](std::int64_t units, std::int32_t blocks, std::int32_t asked) {
    return detail::checked_options(
               geometry,
               {.capacity_bytes = units * unit, .max_blocks = blocks, .max_stored_blocks = asked})
        .max_stored_blocks;
  };
  CHECK(records(100, 8, 0) == 100);  // never more than one a unit
  CHECK(records(1, 8, 0) == 1);
  CHECK(records(100, 8, 7) == 7);
  CHECK(records(100, 8, 100) == 100);
  // With more layers than the factor a record a unit is more than is needed; a sequence can be as
  // long as it may be, though, with a layer of each block.
  constexpr kv_geometry deep{.layers = 80, .kv_heads = 1, .head_dim = 8, .block_tokens = 4};
  const auto deep_records = [&](std::int32_t blocks) {
    return detail::checked_options(deep, {.capacity_bytes = 8000 * unit, .max_blocks = blocks})
        .max_stored_blocks;
  };
  CHECK(deep_records(8) == 400);
  CHECK(deep_records(1000) == 1000);
  CHECK(deep_records(100'000) == 8000);
}

TEST_CASE("store types: events are compared by kind and key") {
  const store_event event{store_event::what::evicted, {1, 2}};
  CHECK(event == store_event{store_event::what::evicted, {1, 2}});
  CHECK(event != store_event{store_event::what::stored, {1, 2}});
  CHECK(event != store_event{store_event::what::evicted, {1, 3}});
}
