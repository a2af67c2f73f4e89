// SPDX-License-Identifier: Apache-2.0
/// @file
/// An exponential that has the same bits on every machine. (That of a standard library is its own.)
#pragma once

#include <cstdint>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// e^x for x of at most 0, within 1e-5 of it; 0 where that is less than 2^-125, 1 at 0. NaN stays
/// NaN. Without branches, so that loops over it become vectors.
PULSEINFER_HD inline float exponential(float x) {
  // e^x = 2^n * 2^f: added to 1.5 x 2^23 a number keeps no fraction, f is in [-1/2, 1/2].
  const float power = product(x, 0x1.715476p0f);
  const float within = power > -125.0f ? power : -125.0f;
  const float shifted = sum(within, 0x1.8p23f);
  const float f = sum(within, -sum(shifted, -0x1.8p23f));
  // 2^f by its series: the first term left out is below 2^-22.
  float series = 0x1.430912p-13f;
  series = sum(product(series, f), 0x1.5d87fep-10f);
  series = sum(product(series, f), 0x1.3b2ab6p-7f);
  series = sum(product(series, f), 0x1.c6b08ep-5f);
  series = sum(product(series, f), 0x1.ebfbep-3f);
  series = sum(product(series, f), 0x1.62e43p-1f);
  series = sum(product(series, f), 1.0f);
  const std::uint32_t n = bits_of(shifted) - 0x4b400000u;
  const float value = float_of(bits_of(series) + (n << 23));
  const float found = power > -125.0f ? value : 0.0f;
  return x != x ? x : found;
}

}  // namespace pulseinfer::detail
