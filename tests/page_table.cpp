// SPDX-License-Identifier: Apache-2.0
/// @file
/// The dense block table and its check.
#include "pulseinfer/page_table.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

namespace {

using pulseinfer::block_table;
using pulseinfer::checked_block_table;

constexpr std::int64_t requests = 2;
constexpr std::int64_t max_blocks = 3;
const std::vector<std::int32_t> entries = {5, -1, 0, 7, 6, -2'000'000'000};

}  // namespace

TEST_CASE("page table: a block has the page of its entry, -1 where the entry is negative") {
  const block_table table = checked_block_table(entries, requests, max_blocks, 8);
  const std::int64_t expected[requests][max_blocks] = {{5, -1, 0}, {7, 6, -1}};
  for (std::int64_t request = 0; request < requests; ++request) {
    for (std::int64_t block = 0; block < max_blocks; ++block) {
      CHECK(table.page(request, block) == expected[request][block]);
    }
  }
  CHECK(table.pages == entries.data());  // a view
}

TEST_CASE("page table: outside the table there is no page") {
  const block_table table = checked_block_table(entries, requests, max_blocks, 8);
  constexpr std::int64_t far = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t outside : {std::int64_t{-1}, -far, far}) {
    CHECK(table.page(outside, 0) == -1);
    CHECK(table.page(0, outside) == -1);
  }
  CHECK(table.page(requests, 0) == -1);
  CHECK(table.page(0, max_blocks) == -1);  // not the first entry of the next request
  CHECK(block_table{}.page(0, 0) == -1);
}

TEST_CASE("page table: an entry outside the pool is named") {
  CHECK_THROWS_WITH_AS((void)checked_block_table(entries, requests, max_blocks, 7),
                       "block_table: entry (1, 0) is page 7, the pool has pages 0 to 6",
                       std::out_of_range);
  CHECK_THROWS_WITH_AS((void)checked_block_table(entries, 3, 2, 6),
                       "block_table: entry (1, 1) is page 7, the pool has pages 0 to 5",
                       std::out_of_range);
}

TEST_CASE("page table: an array of another size is refused, also where the product overflows") {
  struct shape {
    std::int64_t requests, max_blocks;
  };
  constexpr std::int64_t large = std::int64_t{1} << 32;
  for (const shape s : {shape{2, 2},
                        {3, 3},
                        {0, 6},
                        {-2, -3},
                        {-1, 6},
                        {6, -1},
                        {large, large},
                        {large, large + 6}}) {
    CAPTURE(s.requests);
    CAPTURE(s.max_blocks);
    CHECK_THROWS_AS((void)checked_block_table(entries, s.requests, s.max_blocks, 8),
                    std::invalid_argument);
  }
  CHECK_THROWS_WITH_AS((void)checked_block_table(entries, 2, 2, 8),
                       "block_table: 6 entries, expected 2 requests x 2 blocks",
                       std::invalid_argument);
  CHECK_THROWS_AS((void)checked_block_table({}, large, large, 8), std::invalid_argument);
}

TEST_CASE("page table: an empty table has no pages") {
  CHECK(checked_block_table({}, 0, 0, 8).page(0, 0) == -1);
  CHECK(checked_block_table({}, 5, 0, 8).page(0, 0) == -1);
  CHECK(checked_block_table({}, 0, 5, 8).page(0, 0) == -1);
}

TEST_CASE("page table: FlashInfer's ragged table") {
  const std::int32_t indptr[] = {0, 3, 3, 5};
  const std::int32_t indices[] = {4, 0, -2, 9, 1};
  const pulseinfer::ragged_table table{indptr, indices, 3};
  const std::int64_t expected[3][4] = {{4, 0, -1, -1}, {-1, -1, -1, -1}, {9, 1, -1, -1}};
  for (std::int64_t request = 0; request < 3; ++request) {
    for (std::int64_t block = 0; block < 4; ++block) {
      CHECK(table.page(request, block) == expected[request][block]);
    }
  }
  constexpr std::int64_t far = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t outside : {std::int64_t{-1}, std::int64_t{3}, -far, far}) {
    CHECK(table.page(outside, 0) == -1);
    CHECK(table.page(2, outside) == -1);
  }
  CHECK(pulseinfer::ragged_table{}.page(0, 0) == -1);
}

TEST_CASE("page table: SGLang's token slots") {
  const std::int32_t slots[2][6] = {{8, 9, 4, 5, -1, -1}, {0, 1, -1, -1, -1, -1}};
  const pulseinfer::slot_table pairs{&slots[0][0], 2, 6, 2};
  CHECK(pairs.page(0, 0) == 4);
  CHECK(pairs.page(0, 1) == 2);
  CHECK(pairs.page(0, 2) == -1);
  CHECK(pairs.page(1, 0) == 0);
  CHECK(pairs.page(1, 1) == -1);
  const pulseinfer::slot_table tokens{&slots[0][0], 2, 6, 1};
  CHECK(tokens.page(0, 1) == 9);
  CHECK(tokens.page(1, 1) == 1);
  // A last page that the table cuts short counts by its first token.
  const pulseinfer::slot_table fours{&slots[0][0], 2, 6, 4};
  CHECK(fours.page(0, 1) == -1);
  constexpr std::int64_t far = std::numeric_limits<std::int64_t>::max();
  for (const std::int64_t outside : {std::int64_t{-1}, std::int64_t{6}, -far, far}) {
    CHECK(tokens.page(outside, 0) == -1);
    CHECK(tokens.page(0, outside) == -1);
    CHECK(pairs.page(0, outside) == -1);
  }
  CHECK(pulseinfer::slot_table{}.page(0, 0) == -1);
  for (const std::int32_t nothing : {0, -2}) {
    CHECK(pulseinfer::slot_table{&slots[0][0], 2, 6, nothing}.page(0, 0) == -1);
  }
}

TEST_CASE("page table: rows over head groups") {
  const block_table heads = checked_block_table(entries, requests, max_blocks, 8);
  const pulseinfer::grouped_table<block_table> table{heads, 4};
  CHECK(table.page(0, 0) == 5 * 4);
  CHECK(table.page(3, 0) == 5 * 4 + 3);
  CHECK(table.page(1, 1) == -1);
  CHECK(table.page(4, 1) == 6 * 4);
  CHECK(table.page(7, 0) == 7 * 4 + 3);
  CHECK(table.page(8, 0) == -1);
  CHECK(table.page(-1, 0) == -1);
  for (const std::int32_t nothing : {0, -2}) {
    CHECK(pulseinfer::grouped_table<block_table>{heads, nothing}.page(0, 0) == -1);
  }
}
