// SPDX-License-Identifier: Apache-2.0
/// @file
/// Top-k on one CPU thread: two keys between which the k-th largest probably lies are guessed from a
/// sample, one pass keeps the positions of all keys from the lower one on, and only what lies
/// between the two is put in order.
///
/// A guess decides how much is left to do, never what is chosen: where the lower key turns out too
/// high, all keys are kept, and where the upper one turns out too low it is forgotten. So the worst
/// order of keys costs a pass more than `std::nth_element` over all of them, which is never
/// quadratic.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <type_traits>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/cpu_lines.hpp"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Appends the positions of keys that are not below `threshold`, ascending, and returns how many.
/// @param positions  room for `length`
using collect_function = std::int64_t (*)(const std::uint64_t* keys, std::int64_t length,
                                          std::uint64_t threshold,
                                          std::int32_t* positions) noexcept;

/// Without a branch: how often a key is kept cannot be foreseen.
inline std::int64_t collect_keys_portable(const std::uint64_t* keys, std::int64_t length,
                                          std::uint64_t threshold,
                                          std::int32_t* positions) noexcept {
  std::int64_t kept = 0;
  for (std::int64_t i = 0; i < length; ++i) {
    positions[kept] = static_cast<std::int32_t>(i);
    kept += keys[i] >= threshold ? 1 : 0;
  }
  return kept;
}

#if defined(__x86_64__)

/// Bit i is set where keys[i] is below the threshold, for 32 keys. Both are compared as signed
/// numbers, with their upper bits turned.
/// @param turned  the threshold, its upper bit turned
inline std::uint32_t keys_below_avx2(const std::uint64_t* keys, std::uint64_t turned) noexcept {
  const std::uint64_t turn = std::uint64_t{1} << 63;
  std::uint32_t below = 0;
  asm volatile(
      "vpbroadcastq %2, %%ymm4\n\tvpbroadcastq %3, %%ymm5\n\t"
      "vpxor 224(%1), %%ymm5, %%ymm0\n\tvpxor 192(%1), %%ymm5, %%ymm1\n\t"
      "vpxor 160(%1), %%ymm5, %%ymm2\n\tvpxor 128(%1), %%ymm5, %%ymm3\n\t"
      "vpcmpgtq %%ymm0, %%ymm4, %%ymm0\n\tvpcmpgtq %%ymm1, %%ymm4, %%ymm1\n\t"
      "vpcmpgtq %%ymm2, %%ymm4, %%ymm2\n\tvpcmpgtq %%ymm3, %%ymm4, %%ymm3\n\t"
      "vmovmskpd %%ymm0, %0\n\t"
      "vmovmskpd %%ymm1, %%ecx\n\tshl $4, %0\n\tor %%ecx, %0\n\t"
      "vmovmskpd %%ymm2, %%ecx\n\tshl $4, %0\n\tor %%ecx, %0\n\t"
      "vmovmskpd %%ymm3, %%ecx\n\tshl $4, %0\n\tor %%ecx, %0\n\t"
      "vpxor 96(%1), %%ymm5, %%ymm0\n\tvpxor 64(%1), %%ymm5, %%ymm1\n\t"
      "vpxor 32(%1), %%ymm5, %%ymm2\n\tvpxor (%1), %%ymm5, %%ymm3\n\t"
      "vpcmpgtq %%ymm0, %%ymm4, %%ymm0\n\tvpcmpgtq %%ymm1, %%ymm4, %%ymm1\n\t"
      "vpcmpgtq %%ymm2, %%ymm4, %%ymm2\n\tvpcmpgtq %%ymm3, %%ymm4, %%ymm3\n\t"
      "vmovmskpd %%ymm0, %%ecx\n\tshl $4, %0\n\tor %%ecx, %0\n\t"
      "vmovmskpd %%ymm1, %%ecx\n\tshl $4, %0\n\tor %%ecx, %0\n\t"
      "vmovmskpd %%ymm2, %%ecx\n\tshl $4, %0\n\tor %%ecx, %0\n\t"
      "vmovmskpd %%ymm3, %%ecx\n\tshl $4, %0\n\tor %%ecx, %0"
      : "=&r"(below)
      : "r"(keys), "m"(turned), "m"(turn)
      : "ecx", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "cc", "memory");
  return below;
}

/// 32 keys at a time; most of them keep none.
inline std::int64_t collect_keys_avx2(const std::uint64_t* keys, std::int64_t length,
                                      std::uint64_t threshold, std::int32_t* positions) noexcept {
  const std::uint64_t turned = threshold ^ (std::uint64_t{1} << 63);
  std::int64_t kept = 0;
  std::int64_t i = 0;
  for (; length - i >= 32; i += 32) {
    std::uint32_t here = ~keys_below_avx2(keys + i, turned);
    for (; here != 0; here &= here - 1) {
      positions[kept++] = static_cast<std::int32_t>(i) + std::countr_zero(here);
    }
  }
  avx2_lines::finish();
  for (; i < length; ++i) {
    positions[kept] = static_cast<std::int32_t>(i);
    kept += keys[i] >= threshold ? 1 : 0;
  }
  return kept;
}

#endif

/// The fastest that this machine has, found out once. (Sanitizers do not see what assembly reads.)
[[nodiscard]] inline collect_function best_collect_keys() noexcept {
#if defined(__x86_64__)
  if (best_copy_path() != copy_path::portable && has_copy_path(copy_path::avx2)) {
    return &collect_keys_avx2;
  }
#endif
  return &collect_keys_portable;
}

/// Two keys: the k-th largest is probably at least `low` and below `high`.
struct top_k_guess {
  std::uint64_t low = 0;  ///< 0: all keys
  std::uint64_t high = 0;
  bool has_high = false;
};

/// Guesses from one key of each of some equal stretches. (Scores of neighbours are alike, and ranks
/// may follow positions: so the stretches, and a drawn place in each.)
/// @param sample  scratch, room for `length`
inline top_k_guess guess_top_k(const std::uint64_t* keys, std::int64_t length, std::int64_t k,
                               std::uint64_t* sample) noexcept {
  top_k_guess guess;
  const std::int64_t size = std::clamp<std::int64_t>(length / 128, 128, 512);
  if (length < 4 * size) return guess;
  const std::int64_t stretch = length / size;
  std::uint32_t draw = 1;
  for (std::int64_t i = 0; i < size; ++i) {
    draw = draw * 1664525u + 1013904223u;
    const auto drawn = static_cast<std::int64_t>(
        (std::uint64_t{draw} * static_cast<std::uint64_t>(stretch)) >> 32);
    sample[i] = keys[i * stretch + drawn];
  }
  // Of the k largest so many are in the sample, give or take three standard deviations.
  const double expected =
      static_cast<double>(k) * static_cast<double>(size) / static_cast<double>(length);
  const double margin = 3 * std::sqrt(expected) + 1;
  const auto low = static_cast<std::int64_t>(expected + margin);
  const auto high = static_cast<std::int64_t>(expected - margin);
  if (low >= size) return guess;
  std::nth_element(sample, sample + low, sample + size, std::greater<>{});
  guess.low = sample[low];
  if (high > 0) {
    std::nth_element(sample, sample + (high - 1), sample + low, std::greater<>{});
    guess.high = sample[high - 1];
    guess.has_high = true;
  }
  return guess;
}

/// Writes the positions of the k largest of `length` keys, ascending; the keys differ.
/// @param k          above 0 and below `length`
/// @param scratch    room for `length`
/// @param positions  room for `length`
/// @param selected   [k]
/// @param offset     added to each position
inline void select_top_k(const std::uint64_t* keys, std::int64_t length, std::int64_t k,
                         collect_function collect, std::uint64_t* scratch, std::int32_t* positions,
                         std::int32_t* selected, std::int32_t offset) noexcept {
  const top_k_guess guess = guess_top_k(keys, length, k, scratch);
  std::int64_t kept = guess.low == 0 ? 0 : collect(keys, length, guess.low, positions);
  if (kept < k) {
    kept = length;
    std::iota(positions, positions + length, 0);
  }
  // Those of the kept that are not surely chosen.
  std::int64_t open = 0;
  std::int64_t chosen = k;
  if (guess.has_high) {
    for (std::int64_t i = 0; i < kept; ++i) {
      scratch[open] = keys[positions[i]];
      open += scratch[open] < guess.high ? 1 : 0;
    }
    chosen = kept - open;
  }
  if (chosen >= k) {
    for (std::int64_t i = 0; i < kept; ++i) scratch[i] = keys[positions[i]];
    open = kept;
    chosen = 0;
  }
  const std::int64_t last = k - chosen - 1;
  std::nth_element(scratch, scratch + last, scratch + open, std::greater<>{});
  const std::uint64_t threshold = scratch[last];
  std::int64_t written = 0;
  for (std::int64_t i = 0; i < kept && written < k; ++i) {
    selected[written] = positions[i] + offset;
    written += keys[positions[i]] >= threshold ? 1 : 0;
  }
}

/// Row kernel of the CPU: the k largest of a row, ascending, padded with -1, and how many.
struct select_top_k_row {
  top_k_keys keys;
  std::int64_t k;
  collect_function collect;
  std::uint64_t* scratch;   ///< [columns], for one row at a time
  std::int32_t* positions;  ///< likewise
  std::int32_t* selected;   ///< [rows, k]
  std::int32_t* counts;     ///< [rows], or null

  template <class Group>
  void operator()(std::int64_t row, Group) const {
    const std::int64_t chosen = row_choice(keys, k, row);
    const std::int64_t length = chosen > 0 ? row_length(keys, row) : 0;
    const std::int32_t begin = chosen > 0 ? keys.begin[row] : 0;
    const std::int64_t count = std::min(length, chosen);
    std::int32_t* out = selected + row * k;
    if (length > chosen) {
      select_top_k(row_keys(keys, row), length, chosen, collect, scratch, positions, out, begin);
    } else {
      std::iota(out, out + length, begin);
    }
    std::fill(out + count, out + k, -1);
    if (counts != nullptr) counts[row] = static_cast<std::int32_t>(count);
  }
};
static_assert(std::is_trivially_copyable_v<select_top_k_row>);

}  // namespace pulseinfer::detail
