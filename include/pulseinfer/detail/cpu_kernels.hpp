// SPDX-License-Identifier: Apache-2.0
/// @file
/// How the CPU runs kernels: plain loops, one lane a row. Shared by the host and the simulated
/// backend.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// The largest kernel body a backend takes: it is stored in the stream's queue without an
/// allocation.
inline constexpr std::size_t max_kernel_bytes = 512;

template <class Op>
inline constexpr bool is_kernel_body = std::is_trivially_copyable_v<Op> &&
                                       sizeof(Op) <= max_kernel_bytes && alignof(Op) <= 16;

/// A body may know a faster way to do all `words()` words of a block at once on a CPU. It does the same.
template <class Op>
inline constexpr bool has_whole_blocks = requires(const Op& op) {
  { op.words() } -> std::same_as<std::int64_t>;
  op.whole_block(std::int64_t{});
};

/// A row_group of one lane.
struct single_lane {
  [[nodiscard]] PULSEINFER_HD int rank() const { return 0; }
  [[nodiscard]] PULSEINFER_HD int size() const { return 1; }
  PULSEINFER_HD void sync() const {}
  [[nodiscard]] PULSEINFER_HD std::int64_t sum(std::int64_t value) const { return value; }
  [[nodiscard]] PULSEINFER_HD std::int64_t min(std::int64_t value) const { return value; }
  [[nodiscard]] PULSEINFER_HD std::int64_t scan(std::int64_t) const { return 0; }
};
static_assert(row_group<single_lane>);

/// The number of blocks a kernel runs over, read when it runs.
inline std::int64_t blocks_of(const launch_shape& shape) {
  if (shape.device_blocks == nullptr) return shape.blocks;
  return std::clamp<std::int64_t>(*shape.device_blocks, 0, shape.blocks);
}

/// Checks all copies of a batch, so that either all of it is enqueued or nothing.
inline void check_copies(std::span<const copy_span> copies) {
  for (const copy_span& copy : copies) {
    expects(copy.bytes == 0 || (copy.destination != nullptr && copy.source != nullptr),
            "copy: an address is null with bytes ", copy.bytes);
  }
}

inline void check_launch(const launch_shape& shape, const launch_limits& limits) {
  expects(shape.blocks >= 0, "for_each: blocks is ", shape.blocks, ", expected at least 0");
  expects(shape.words >= 0, "for_each: words is ", shape.words, ", expected at least 0");
  expects(limits.max_ctas >= 0, "for_each: max_ctas is ", limits.max_ctas,
          ", expected at least 0 (0: no limit)");
}

inline void check_rows(std::int64_t rows, const launch_limits& limits) {
  expects(rows >= 0, "for_each_row: rows is ", rows, ", expected at least 0");
  expects(limits.max_ctas >= 0, "for_each_row: max_ctas is ", limits.max_ctas,
          ", expected at least 0 (0: no limit)");
}

/// Scratch of one row, then a threshold a row.
[[nodiscard]] inline std::size_t cpu_top_k_workspace_bytes(const top_k_shape& shape) {
  if (shape.rows <= 0 || shape.k <= 0 || shape.columns <= 0) return 0;
  return static_cast<std::size_t>(shape.columns + shape.rows) * sizeof(std::uint64_t);
}

/// Top-k of a backend whose row kernels run on one lane, one row after the other.
template <class Backend>
void cpu_top_k(Backend& backend, const top_k_shape& shape, const top_k_keys& keys,
               std::int32_t* selected, std::int32_t* counts, std::span<std::byte> workspace,
               typename Backend::stream_ref stream) {
  check_top_k(shape, keys, selected, workspace, cpu_top_k_workspace_bytes(shape));
  if (shape.rows == 0) return;
  const auto key_bytes = static_cast<std::uint64_t>(shape.rows * shape.columns) * 8;
  std::uint64_t* thresholds = nullptr;  // none without keys, when there need not be a workspace
  if (shape.k > 0 && shape.columns > 0) {
    auto* scratch = reinterpret_cast<std::uint64_t*>(workspace.data());
    thresholds = scratch + shape.columns;
    backend.for_each_row(shape.rows, {}, key_bytes,
                         find_top_k_threshold{keys, shape.k, scratch, thresholds}, stream);
  }
  backend.for_each_row(shape.rows, {}, key_bytes,
                       compact_top_k{keys, shape.k, thresholds, selected, counts}, stream);
}

}  // namespace pulseinfer::detail
