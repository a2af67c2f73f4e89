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
/// A view. `pages` points to host memory where the host asks, to device memory where a kernel does.
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

/// Makes a block table over host memory, having read every entry.
///
/// @param entries     [requests * max_blocks] page ids; host memory that outlives the view
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
