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
#include "pulseinfer/detail/host_top_k.hpp"
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

/// Keys and positions of one row.
[[nodiscard]] inline std::size_t cpu_top_k_workspace_bytes(const top_k_shape& shape) {
  if (shape.rows <= 0 || shape.k <= 0 || shape.columns <= 0) return 0;
  return static_cast<std::size_t>(shape.columns) * (sizeof(std::uint64_t) + sizeof(std::int32_t));
}

/// Top-k of a backend whose row kernels run on one lane, one row after the other.
template <class Backend>
void cpu_top_k(Backend& backend, const top_k_shape& shape, const top_k_keys& keys,
               std::int32_t* selected, std::int32_t* counts, std::span<std::byte> workspace,
               typename Backend::stream_ref stream) {
  const std::size_t bytes = cpu_top_k_workspace_bytes(shape);
  check_top_k(shape, keys, selected, workspace, bytes);
  if (shape.rows == 0) return;
  auto* scratch = reinterpret_cast<std::uint64_t*>(workspace.data());
  auto* positions = reinterpret_cast<std::int32_t*>(bytes == 0 ? nullptr : scratch + shape.columns);
  backend.for_each_row(
      shape.rows, {}, static_cast<std::uint64_t>(shape.rows * shape.columns) * 8,
      select_top_k_row{keys, shape.k, best_collect_keys(), scratch, positions, selected, counts},
      stream);
}

}  // namespace pulseinfer::detail
