// SPDX-License-Identifier: Apache-2.0
/// @file
/// Exact top-k that is the same set on every machine.
///
/// A score and its index are packed into one 64-bit key: order-preserving score bits above,
/// inverted index below. Keys of one row then differ, so the k largest are one set, whatever
/// algorithm finds them. The rule:
/// - a larger score comes first; -0 equals +0; -inf is a score like any other;
/// - NaN, of either sign, comes last: it is chosen only when nothing else is left;
/// - of equal scores the lower index comes first.
///
/// How the k largest of a row are found is each machine's own: detail/host_top_k.hpp on the CPU,
/// detail/cuda_top_k.cuh on CUDA. The indices are written ascending.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// The most indices a row may have: indices are 32 bits, and one value is kept for padding.
inline constexpr std::int64_t max_top_k_columns = std::numeric_limits<std::int32_t>::max();

/// Bits that order as unsigned integers the way scores do: NaN lowest, -0 and +0 equal.
PULSEINFER_HD inline std::uint32_t ordered_score_bits(float score) {
  const std::uint32_t bits = detail::bits_of(score);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0;   // NaN of either sign
  if ((bits & 0x7fffffffu) == 0) return 0x80000000u;  // both zeros
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

/// One key for a score and its index in [0, max_top_k_columns). Larger keys are better.
PULSEINFER_HD inline std::uint64_t top_k_key(float score, std::int32_t index) {
  return (static_cast<std::uint64_t>(ordered_score_bits(score)) << 32) |
         (0xffffffffu - static_cast<std::uint32_t>(index));
}

/// The index that was packed into a key.
PULSEINFER_HD inline std::int32_t top_k_index(std::uint64_t key) {
  return static_cast<std::int32_t>(0xffffffffu - static_cast<std::uint32_t>(key & 0xffffffffu));
}

namespace detail {

/// Length of row r, with an `end` before its `begin` read as empty.
PULSEINFER_HD inline std::int64_t row_length(const top_k_keys& keys, std::int64_t row) {
  const std::int64_t length = std::int64_t{keys.end[row]} - keys.begin[row];
  return length > 0 ? length : 0;
}

/// Where the keys of row r begin: a row may lie beyond 2^31 keys.
PULSEINFER_HD inline const std::uint64_t* row_keys(const top_k_keys& keys, std::int64_t row) {
  return keys.keys + row * keys.row_stride + keys.begin[row];
}

/// How many of row r are wanted: k, or the row's own limit below it.
PULSEINFER_HD inline std::int64_t row_choice(const top_k_keys& keys, std::int64_t k,
                                             std::int64_t row) {
  if (keys.limits == nullptr || k <= 0) return k;
  const std::int64_t limit = keys.limits[row];
  if (limit >= k) return k;
  return limit > 0 ? limit : 0;
}

/// Checks a top-k before anything is enqueued.
inline void check_top_k(const top_k_shape& shape, const top_k_keys& keys,
                        const std::int32_t* selected, std::span<std::byte> workspace,
                        std::size_t workspace_bytes) {
  expects(shape.rows >= 0, "top_k: rows is ", shape.rows, ", expected at least 0");
  expects(shape.k >= 0, "top_k: k is ", shape.k, ", expected at least 0");
  expects(shape.columns >= 0 && shape.columns <= max_top_k_columns, "top_k: columns is ",
          shape.columns, ", expected 0 to ", max_top_k_columns);
  if (shape.rows == 0 || shape.k == 0) return;
  expects(keys.row_stride >= shape.columns, "top_k: row_stride is ", keys.row_stride,
          ", expected at least columns, which is ", shape.columns);
  expects(selected != nullptr, "top_k: selected is null");
  expects(keys.begin != nullptr && keys.end != nullptr, "top_k: begin or end is null");
  expects(keys.keys != nullptr || shape.columns == 0, "top_k: keys is null");
  expects(workspace.size() >= workspace_bytes, "top_k: workspace has ", workspace.size(),
          " bytes, expected at least ", workspace_bytes);
}

}  // namespace detail

/// Row kernel: writes the indices of all keys of a row that are not below the row's threshold,
/// ascending, padded with -1 up to k, and how many there are. With keys that differ and the last
/// chosen one as threshold that is the top-k.
struct compact_top_k {
  top_k_keys keys;
  std::int64_t k;
  const std::uint64_t* thresholds;  ///< [rows], read only for rows longer than what is chosen
  std::int32_t* selected;           ///< [rows, k]
  std::int32_t* counts;             ///< [rows], or null

  /// Lanes take turns through the row, four at a time: how many keys each turn chooses is counted
  /// for all four together, a field of 16 bits each. (A group has fewer lanes than that counts.)
  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int64_t chosen = detail::row_choice(keys, k, row);
    const std::int64_t length = chosen > 0 ? detail::row_length(keys, row) : 0;
    const std::uint64_t threshold = length > chosen ? thresholds[row] : 0;
    const std::int64_t first = chosen > 0 ? keys.begin[row] : 0;
    const std::uint64_t* const of_row = length > 0 ? detail::row_keys(keys, row) : nullptr;
    std::int32_t* out = selected + row * k;
    std::int64_t written = 0;
    for (std::int64_t start = group.rank(); start - group.rank() < length;
         start += turns * group.size()) {
      std::int64_t flags = 0;
      for (int turn = 0; turn < turns; ++turn) {
        const std::int64_t i = start + turn * group.size();
        if (i < length && of_row[i] >= threshold) flags |= std::int64_t{1} << (16 * turn);
      }
      const std::int64_t found = group.sum(flags);
      if (found == 0) continue;
      const std::int64_t before = group.scan(flags);
      for (int turn = 0; turn < turns; ++turn) {
        const std::int64_t at = written + ((before >> (16 * turn)) & 0xffff);
        if (((flags >> (16 * turn)) & 1) != 0 && at < chosen) {
          out[at] = static_cast<std::int32_t>(first + start + turn * group.size());
        }
        written += (found >> (16 * turn)) & 0xffff;
      }
    }
    if (written > chosen) written = chosen;
    for (std::int64_t i = written + group.rank(); i < k; i += group.size()) out[i] = -1;
    if (counts != nullptr && group.rank() == 0) counts[row] = static_cast<std::int32_t>(written);
  }

 private:
  static constexpr int turns = 4;
};
static_assert(std::is_trivially_copyable_v<compact_top_k>);

}  // namespace pulseinfer
