// SPDX-License-Identifier: Apache-2.0
/// @file
/// What kernels find: units of a row of the table, and nothing beside it. (That it is what a lease
/// finds, on every backend: block_store.cpp.)
#include "pulseinfer/store_view.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

using pulseinfer::store_view;

static_assert(std::is_trivially_copyable_v<store_view>);  // a kernel takes it as it is

TEST_CASE("store view: an empty one finds nothing") {
  const store_view none;
  for (const std::int64_t block : {std::int64_t{-1}, std::int64_t{0}, std::int64_t{1}}) {
    CHECK(none.find(block) == nullptr);
  }
}

TEST_CASE(
    "store view: a slot is found at its place, an absent unit and one being written are not") {
  const std::vector<std::int32_t> slots{2, -1, -2, 0};
  const std::vector<std::byte> payload(192);
  const store_view view{
      .slots = slots.data(), .payload = payload.data(), .unit_bytes = 64, .blocks = 4};
  CHECK(view.find(0) == payload.data() + 128);
  CHECK(view.find(1) == nullptr);
  CHECK(view.find(2) == nullptr);
  CHECK(view.find(3) == payload.data());
}

TEST_CASE("store view: blocks before the row and behind it are absent, whatever lies there") {
  const std::vector<std::int32_t> slots{7, 1, 7};
  const std::vector<std::byte> payload(128);
  const store_view view{
      .slots = slots.data() + 1, .payload = payload.data(), .unit_bytes = 64, .blocks = 1};
  CHECK(view.find(0) == payload.data() + 64);
  for (const std::int64_t block :
       {std::int64_t{-1}, std::int64_t{1}, std::numeric_limits<std::int64_t>::min(),
        std::numeric_limits<std::int64_t>::max()}) {
    CHECK(view.find(block) == nullptr);
  }
}

TEST_CASE("store view: a slot beyond 2 GiB is computed in 64 bits") {
  const std::int32_t slot = std::numeric_limits<std::int32_t>::max();
  const auto begin = std::uintptr_t{1} << 20;  // only the address counts
  const store_view view{.slots = &slot,
                        .payload = std::bit_cast<const std::byte*>(begin),
                        .unit_bytes = 65'536,
                        .blocks = 1};
  CHECK(reinterpret_cast<std::uintptr_t>(view.find(0)) ==
        begin + static_cast<std::uintptr_t>(slot) * 65'536);
}

}  // namespace
