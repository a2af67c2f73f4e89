// SPDX-License-Identifier: Apache-2.0
/// @file
/// How much a resident unit is worth keeping, as one integer that does not change while it is not
/// used.
#pragma once

#include <cstdint>
#include <type_traits>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// The rank that uses give. The lowest goes first.
///
/// Each use is worth 1 when it is made, and half as much every `half_life` steps later. What all
/// uses of a unit are worth halves likewise, so that the order of two units changes only when one
/// is used: it is enough to keep the logarithm of what the uses would have been worth at step 0. In
/// units of 1/16 step it rises by 16 a step; a use at `clock` joins those before, of rank r, as
///     max(r, clock) + unit * log2(1 + 2^-(|r - clock| / unit)),   unit = 16 * half_life,
/// by a table, in integers. With a half-life of nothing the last use alone counts: LRU.
/// @see Lee et al., LRFU, IEEE Trans. Computers 50(12), 2001
struct use_rank {
  std::int32_t per_step = 1;   ///< by how much the clock advances; 16 where uses add up
  std::int32_t unit_bits = 0;  ///< log2(16 * half_life), 0: LRU
  std::uint8_t gain[32] = {
      // 128 * log2(1 + 2^-((i + 1/2) / 4)): the middle of each quarter of a half-life
      120, 106, 92, 80, 70, 60, 52, 45, 38, 33, 28, 24, 20, 17, 14, 12,
      10,  9,   7,  6,  5,  4,  4,  3,  3,  2,  2,  2,  1,  1,  1,  1};

  /// A unit of rank `rank` is used again at `clock`.
  PULSEINFER_HD std::int32_t again(std::int32_t rank, std::int32_t clock) const {
    if (unit_bits == 0) return clock;
    const std::int32_t newer = rank > clock ? rank : clock;
    const std::int32_t apart = rank > clock ? rank - clock : clock - rank;
    const std::int32_t quarter = apart >> (unit_bits - 2);
    return quarter < 32 ? newer + ((gain[quarter] << unit_bits) >> 7) : newer;
  }
};
static_assert(std::is_trivially_copyable_v<use_rank>);

}  // namespace pulseinfer::detail
