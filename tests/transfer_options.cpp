// SPDX-License-Identifier: Apache-2.0
/// @file
/// Options of a transfer engine: their limits, and the chunks that follow from them.
#include "pulseinfer/transfer_options.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "pulseinfer/detail/transfer_state.hpp"
#include "pulseinfer/pool_shape.hpp"

namespace {

using pulseinfer::kv_geometry;
using pulseinfer::transfer_options;
using pulseinfer::transfer_way;
using pulseinfer::detail::checked_transfer_options;
using pulseinfer::detail::chunk_shape;
using pulseinfer::detail::shape_of_chunk;

constexpr kv_geometry geometry{.layers = 1, .kv_heads = 1, .head_dim = 64};  // units of 4 KiB
constexpr std::int64_t unit = 4096;

void refuses(const transfer_options& o, const std::string& what) {
  static std::byte memory[2 * unit];
  const pulseinfer::block_layout layout = pulseinfer::nhd_layout(geometry, 2);
  const pulseinfer::kv_pool pool(geometry, layout, {{.plane = {memory, memory + unit}}});
  CHECK_THROWS_WITH_AS((void)checked_transfer_options(geometry, pool, o),
                       doctest::Contains(what.c_str()), std::invalid_argument);
  CHECK_NOTHROW((void)checked_transfer_options(geometry, pool, {}));
}

/// The units of all chunks of a transfer.
std::vector<std::size_t> chunks_of(const chunk_shape& shape, std::size_t units) {
  std::vector<std::size_t> counts;
  for (std::size_t left = units; left > 0; left -= counts.back()) {
    counts.push_back(shape.count(static_cast<std::int64_t>(counts.size()), left, units));
    REQUIRE(counts.back() > 0);
    REQUIRE(counts.back() <= left);
  }
  return counts;
}

}  // namespace

TEST_CASE("transfer options: each has its limits, and the error names value and limit") {
  refuses({.chunk_bytes = unit - 1}, "chunk_bytes is 4095, expected 4096");
  refuses({.chunk_bytes = 0}, "chunk_bytes is 0");
  refuses({.chunk_bytes = std::numeric_limits<std::int64_t>::max()}, "chunk_bytes is");
  refuses({.staging_bytes = 2 * unit - 1, .chunk_bytes = unit},
          "staging_bytes is 8191, expected 8192");
  refuses({.first_chunk_bytes = 0}, "first_chunk_bytes is 0, expected 1");
  refuses({.first_chunk_share = -1}, "first_chunk_share is -1, expected 0 to 4096");
  refuses({.first_chunk_share = 4097}, "first_chunk_share is 4097");
  refuses({.head_copies = -1}, "head_copies is -1, expected 0 to 4096");
  refuses({.head_copies = 4097}, "head_copies is 4097");
  refuses({.link_bytes_per_second = -1}, "link_bytes_per_second is -1");
  refuses({.link_bytes_per_second = 0.5}, "link_bytes_per_second is 0.5");
  refuses({.link_bytes_per_second = std::numeric_limits<double>::quiet_NaN()},
          "link_bytes_per_second is");
  refuses({.part_bytes = -1}, "part_bytes is -1, expected 1");
  refuses({.chunks_in_flight = 0}, "chunks_in_flight is 0, expected 1 to 4096");
  refuses({.chunks_in_flight = 4097}, "chunks_in_flight is 4097");
  refuses({.transfers_in_flight = 0}, "transfers_in_flight is 0");
  refuses({.max_rows = 0}, "max_rows is 0");
  refuses({.max_units = 0}, "max_units is 0");
  refuses({.max_units = (1 << 24) + 1}, "max_units is 16777217");
  refuses({.max_ctas = -1}, "max_ctas is -1");
  refuses({.way = static_cast<transfer_way>(77)}, "way is 77");
}

TEST_CASE("fault 44: a pool whose pages are not the store's blocks is refused, not misread") {
  static std::byte memory[4 * unit];
  kv_geometry other = geometry;
  other.kv_heads = 2;
  const pulseinfer::block_layout layout = pulseinfer::nhd_layout(other, 2);
  const pulseinfer::kv_pool pool(other, layout, {{.plane = {memory, memory + 2 * unit}}});
  CHECK_THROWS_WITH_AS((void)checked_transfer_options(geometry, pool, {}),
                       doctest::Contains("different geometries"), std::invalid_argument);
}

TEST_CASE("transfer options: chunks start small, double, and get small again") {
  const chunk_shape shape = shape_of_chunk(
      {.chunk_bytes = 16 * unit, .first_chunk_bytes = 2 * unit, .part_bytes = 4 * unit}, unit);
  CHECK(shape.units == 16);
  CHECK(shape.least == 2);
  CHECK(shape.part == 4);
  CHECK(shape.list_bytes >= 16 * 8);
  CHECK(shape.head_bytes >= 16 * 4);
  CHECK(shape.bytes >= shape.list_bytes + shape.head_bytes + 16 * unit);
  CHECK(shape.bytes % 256 == 0);
  using counts = std::vector<std::size_t>;
  CHECK((chunks_of(shape, 0) == counts{}));
  CHECK((chunks_of(shape, 1) == counts{1}));
  CHECK((chunks_of(shape, 2) == counts{2}));
  CHECK((chunks_of(shape, 3) == counts{2, 1}));
  CHECK((chunks_of(shape, 8) == counts{2, 3, 2, 1}));
  CHECK((chunks_of(shape, 100) == counts{2, 4, 8, 16, 16, 16, 16, 11, 6, 3, 2}));
}

TEST_CASE("transfer options: with a share, chunks grow by a fifth, and not beyond a full one") {
  const chunk_shape shape = shape_of_chunk(
      {.chunk_bytes = 30 * unit, .first_chunk_bytes = 5 * unit, .first_chunk_share = 4}, unit);
  using counts = std::vector<std::size_t>;
  CHECK((chunks_of(shape, 80) == counts{20, 24, 28, 8}));
  CHECK((chunks_of(shape, 100) == counts{25, 30, 30, 15}));
  CHECK((chunks_of(shape, 200) == counts{30, 30, 30, 30, 30, 30, 20}));
  CHECK((chunks_of(shape, 12) == counts{5, 6, 1}));  // the first is no smaller than was asked for
  CHECK((chunks_of(shape, 4) == counts{4}));
  // Behind others it is a third of them, and no more than a full one or what there is.
  CHECK(shape.count(0, 80, 80, false, 62) == 20);
  CHECK(shape.count(0, 80, 80, false, 63) == 21);
  CHECK(shape.count(0, 80, 80, false, 1000) == 30);
  CHECK(shape.count(3, 7, 80, false, 1000) == 7);
  // Who only lists units has no reason to begin small.
  CHECK(shape.count(0, 80, 80, true) == 30);
  CHECK(shape.count(2, 20, 80, true) == 20);
  CHECK(shape_of_chunk({.chunk_bytes = 30 * unit, .first_chunk_bytes = 5 * unit}, unit)
            .count(0, 80, 80, true) == 5);
}

TEST_CASE("transfer options: a chunk has parts of the size asked for, or sixteen") {
  const chunk_shape shape =
      shape_of_chunk({.chunk_bytes = 256 * unit, .part_bytes = 4 * unit}, unit);
  const auto part_of = [&](std::size_t units) { return shape.part_of(units); };
  CHECK(part_of(1) == 4);
  CHECK(part_of(64) == 4);
  CHECK(part_of(65) == 5);
  CHECK(part_of(80) == 5);
  CHECK(part_of(81) == 6);
  CHECK(part_of(255) == 16);
  CHECK(part_of(256) == 16);
}

TEST_CASE("transfer options: however they are chosen, all units are dealt out") {
  for (const std::int64_t first : {std::int64_t{1}, unit, 7 * unit, 1000 * unit}) {
    for (const std::int64_t chunk : {unit, 3 * unit, 64 * unit}) {
      const chunk_shape shape =
          shape_of_chunk({.chunk_bytes = chunk, .first_chunk_bytes = first, .part_bytes = 1}, unit);
      CHECK(shape.part == 1);
      for (const std::size_t units : {1u, 2u, 63u, 64u, 65u, 100'000u}) {
        std::size_t sum = 0;
        for (const std::size_t count : chunks_of(shape, units)) {
          CHECK(count <= static_cast<std::size_t>(shape.units));
          sum += count;
        }
        CHECK(sum == units);
      }
    }
  }
  CHECK(shape_of_chunk({}, 4096).count(1'000'000, 1'000'000, 1'000'000) == 1024);
}
