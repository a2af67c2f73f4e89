// SPDX-License-Identifier: Apache-2.0
/// @file
/// Top-k on CUDA: CUB sorts each row, the k-th key is the threshold, and the shared `compact_top_k`
/// writes the indices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cub/device/device_segmented_radix_sort.cuh>
#include <span>
#include <type_traits>

#include "pulseinfer/detail/cuda_kernels.cuh"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Copies the keys of the rows that must be sorted close together, and says where they lie. CUB
/// gets no segment that is negative or leaves its buffer, whatever begin and end hold.
struct gather_top_k_rows {
  top_k_keys keys;
  std::int64_t columns;
  std::int64_t k;
  std::int64_t first_row;
  std::uint64_t* gathered;  ///< [rows of the batch, columns]
  std::int32_t* begin;      ///< [rows of the batch], into gathered
  std::int32_t* end;

  PULSEINFER_HD void operator()(std::int64_t at, std::int64_t column) const {
    const std::int64_t row = first_row + at;
    std::int64_t length = row_length(keys, row);
    // Short rows are taken whole: their threshold is never read.
    if (length <= k) length = 0;
    if (length > columns) length = columns;
    if (column == 0) {
      begin[at] = static_cast<std::int32_t>(at * columns);
      end[at] = static_cast<std::int32_t>(at * columns + length);
    }
    if (column < length) {
      gathered[at * columns + column] = keys.keys[row * keys.row_stride + keys.begin[row] + column];
    }
  }
};
static_assert(std::is_trivially_copyable_v<gather_top_k_rows>);

/// The k-th key of each row that was sorted; the others get one that is never read.
struct read_top_k_thresholds {
  const std::uint64_t* sorted;  ///< [rows, columns], descending
  std::int64_t columns;
  std::int64_t k;
  const std::int32_t* begin;  ///< [rows]
  const std::int32_t* end;
  std::uint64_t* thresholds;  ///< [rows]

  PULSEINFER_HD void operator()(std::int64_t, std::int64_t row) const {
    thresholds[row] = begin[row] < end[row] ? sorted[row * columns + k - 1] : 0;
  }
};
static_assert(std::is_trivially_copyable_v<read_top_k_thresholds>);

inline namespace PULSEINFER_CUDA_TAG {

/// Job 7. A template, so that only those who select have CUB's kernels compiled.
///
/// Rows are gathered close together and sorted in batches: CUB counts keys in 32 bits, and the
/// workspace (16 bytes a key of a batch) should not grow with the rows for ever. A workspace for a
/// shape serves every shape with as many rows and columns, or fewer, and the same k.
template <class Backend>
struct cuda_top_k {
  using sort_buffers = cub::DoubleBuffer<std::uint64_t>;

  static constexpr std::int64_t default_batch_keys = std::int64_t{1} << 26;
  /// The longest row: what CUB counts in 32 bits, less the tile by which it looks ahead.
  static constexpr std::int64_t max_columns = std::int64_t{1} << 30;

  /// Where everything lies in the workspace. No bytes where no row can be longer than k.
  struct plan {
    std::int64_t batch_rows = 0;
    std::size_t keys[2] = {};
    std::size_t thresholds = 0;
    std::size_t begin = 0;
    std::size_t end = 0;
    std::size_t temporary = 0;
    std::size_t bytes = 0;

    plan(const top_k_shape& shape, std::int64_t batch_keys) {
      if (shape.rows <= 0 || shape.k <= 0 || shape.columns <= shape.k) return;
      expects(shape.columns <= max_columns, "top_k: columns is ", shape.columns,
              ", expected at most ", max_columns, " on CUDA");
      batch_rows = std::clamp<std::int64_t>(batch_keys / shape.columns, 1, shape.rows);
      // Sizes grow with rows and with columns, never fall: a workspace serves every smaller shape.
      const std::int64_t most = std::max(batch_keys, shape.columns);
      const auto rows = static_cast<std::size_t>(std::min(shape.rows, most));
      const auto buffer_keys = static_cast<std::size_t>(
          shape.rows <= most / shape.columns ? shape.rows * shape.columns : most);
      for (auto& buffer : keys) buffer = take(buffer_keys * sizeof(std::uint64_t));
      thresholds = take(static_cast<std::size_t>(shape.rows) * 8);
      begin = take(rows * 4);
      end = take(rows * 4);
      temporary = take(sort_temporary_bytes());
    }

   private:
    std::size_t take(std::size_t size) {
      const std::size_t at = bytes;
      bytes += (size + 255) / 256 * 256;
      return at;
    }
  };

  [[nodiscard]] static std::size_t workspace_bytes(const top_k_shape& shape,
                                                   std::int64_t batch_keys = default_batch_keys) {
    return plan(shape, batch_keys).bytes;
  }

  static void run(Backend& backend, const top_k_shape& shape, const top_k_keys& keys,
                  std::int32_t* selected, std::int32_t* counts, std::span<std::byte> workspace,
                  typename Backend::stream_ref stream,
                  std::int64_t batch_keys = default_batch_keys) {
    const plan at(shape, batch_keys);
    check_top_k(shape, keys, selected, workspace, at.bytes);
    if (shape.rows == 0) return;
    std::byte* base = workspace.data();
    expects(at.bytes == 0 || reinterpret_cast<std::uintptr_t>(base) % 256 == 0,
            "top_k: the workspace is not aligned to 256 bytes");
    auto* thresholds = reinterpret_cast<std::uint64_t*>(base + at.thresholds);
    auto* begin = reinterpret_cast<std::int32_t*>(base + at.begin);
    auto* end = reinterpret_cast<std::int32_t*>(base + at.end);
    sort_buffers sorted(reinterpret_cast<std::uint64_t*>(base + at.keys[0]),
                        reinterpret_cast<std::uint64_t*>(base + at.keys[1]));

    for (std::int64_t row = 0; at.batch_rows > 0 && row < shape.rows; row += at.batch_rows) {
      const std::int64_t rows = std::min(at.batch_rows, shape.rows - row);
      backend.for_each(
          {rows, shape.columns}, {}, 0,
          gather_top_k_rows{keys, shape.columns, shape.k, row, sorted.Current(), begin, end},
          stream);
      sort(base + at.temporary, at.bytes - at.temporary, sorted, rows * shape.columns, rows, begin,
           end, stream.get());
      backend.for_each({1, rows}, {}, 0,
                       read_top_k_thresholds{sorted.Current(), shape.columns, shape.k, begin, end,
                                             thresholds + row},
                       stream);
    }
    backend.for_each_row(shape.rows, {}, 0,
                         compact_top_k{keys, shape.k, thresholds, selected, counts}, stream);
  }

 private:
  /// Sorts segments of `keys` descending. With a null `temporary` it only returns how many bytes it
  /// wants there.
  static std::size_t sort(void* temporary, std::size_t bytes, sort_buffers& keys,
                          std::int64_t keys_size, std::int64_t segments, const std::int32_t* begin,
                          const std::int32_t* end, cudaStream_t stream) {
    // CUB takes any last error that it finds after a launch for its own.
    (void)cudaGetLastError();
    check_cuda(cub::DeviceSegmentedRadixSort::SortKeysDescending(
                   temporary, bytes, keys, static_cast<int>(keys_size), static_cast<int>(segments),
                   begin, end, 0, 64, stream),
               "cub::DeviceSegmentedRadixSort::SortKeysDescending");
    return bytes;
  }

  /// What CUB wants beside the two buffers: next to nothing, whatever the sizes. Asked for once.
  static std::size_t sort_temporary_bytes() {
    static const std::size_t bytes = [] {
      sort_buffers keys;
      // A workspace of no bytes would be null, which to CUB is the question, not the sort.
      return std::max<std::size_t>(
          sort(nullptr, 0, keys, max_columns, 1, nullptr, nullptr, nullptr), 1);
    }();
    return bytes;
  }
};

}  // namespace PULSEINFER_CUDA_TAG
}  // namespace pulseinfer::detail
