// SPDX-License-Identifier: Apache-2.0
/// @file
/// Ready page tables. An engine with another kind brings its own type: see the `page_table`
/// concept.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// vLLM's block table: a dense [requests, max_blocks] array of page ids, -1 (or any negative) where
/// there is no page.
///
/// A view, which the array outlives. `pages` points to host memory where the host asks, to device
/// memory where a kernel does.
struct block_table {
  const std::int32_t* pages = nullptr;
  std::int64_t requests = 0;
  std::int64_t max_blocks = 0;

  /// The page of a block, -1 where there is none or the indices lie outside the table.
  [[nodiscard]] PULSEINFER_HD std::int64_t page(std::int64_t request, std::int64_t block) const {
    if (request < 0 || request >= requests || block < 0 || block >= max_blocks) return -1;
    const std::int32_t page = pages[request * max_blocks + block];
    return page < 0 ? -1 : page;
  }
};
static_assert(page_table<block_table>);

/// FlashInfer's page table: the pages of request r are indices[indptr[r]] to
/// indices[indptr[r + 1]], the latter excluded.
///
/// A view, as block_table is.
struct ragged_table {
  const std::int32_t* indptr = nullptr;   ///< [requests + 1], ascending
  const std::int32_t* indices = nullptr;  ///< page ids
  std::int64_t requests = 0;

  /// As block_table::page.
  [[nodiscard]] PULSEINFER_HD std::int64_t page(std::int64_t request, std::int64_t block) const {
    if (request < 0 || request >= requests || block < 0) return -1;
    if (block >= std::int64_t{indptr[request + 1]} - indptr[request]) return -1;
    const std::int32_t page = indices[indptr[request] + block];
    return page < 0 ? -1 : page;
  }
};
static_assert(page_table<ragged_table>);

/// SGLang's table (`req_to_token`): a dense [requests, max_tokens] array of token slots. Slots of a
/// page follow each other, so the first token of a block tells its page.
///
/// A view, as block_table is.
struct slot_table {
  const std::int32_t* slots = nullptr;  ///< negative where there is no token
  std::int64_t requests = 0;
  std::int64_t max_tokens = 0;
  std::int32_t page_tokens = 1;

  /// As block_table::page.
  [[nodiscard]] PULSEINFER_HD std::int64_t page(std::int64_t request, std::int64_t block) const {
    if (request < 0 || request >= requests || block < 0) return -1;
    if (max_tokens < 1 || page_tokens < 1) return -1;
    if (block > (max_tokens - 1) / page_tokens) return -1;
    const std::int32_t slot = slots[request * max_tokens + block * page_tokens];
    return slot < 0 ? -1 : slot / page_tokens;
  }
};
static_assert(page_table<slot_table>);

/// The pages of one head group: page ids over a table of the engine's pages. Row r of a batch over
/// head groups is group r % head_groups of request r / head_groups (see block_layout).
template <page_table Table>
struct grouped_table {
  Table table;
  std::int32_t head_groups = 1;

  /// The page id of a row's block, -1 where the engine's table has no page.
  [[nodiscard]] PULSEINFER_HD std::int64_t page(std::int64_t row, std::int64_t block) const {
    if (row < 0 || head_groups < 1) return -1;
    const std::int64_t page = table.page(row / head_groups, block);
    return page < 0 ? -1 : page * head_groups + row % head_groups;
  }
};
static_assert(page_table<grouped_table<block_table>>);

/// Makes a block table over host memory, having read every entry.
///
/// @param entries     [requests * max_blocks] page ids; host memory that outlives the view
/// @param requests    rows of the array
/// @param max_blocks  columns of the array
/// @param pool_pages  pages of the pool
/// @throws std::invalid_argument  if the array has another size
/// @throws std::out_of_range      naming the first entry that points outside the pool
inline block_table checked_block_table(std::span<const std::int32_t> entries, std::int64_t requests,
                                       std::int64_t max_blocks, std::int64_t pool_pages) {
  detail::expects(
      requests >= 0 && max_blocks >= 0 &&
          (max_blocks == 0 || static_cast<std::uint64_t>(requests) <=
                                  entries.size() / static_cast<std::uint64_t>(max_blocks)) &&
          static_cast<std::uint64_t>(requests) * static_cast<std::uint64_t>(max_blocks) ==
              entries.size(),
      "block_table: ", entries.size(), " entries, expected ", requests, " requests x ", max_blocks,
      " blocks");
  for (std::size_t i = 0; i < entries.size(); ++i) {
    detail::expects<std::out_of_range>(entries[i] < pool_pages, "block_table: entry (",
                                       static_cast<std::int64_t>(i) / max_blocks, ", ",
                                       static_cast<std::int64_t>(i) % max_blocks, ") is page ",
                                       entries[i], ", the pool has pages 0 to ", pool_pages - 1);
  }
  return {entries.data(), requests, max_blocks};
}

}  // namespace pulseinfer
