// SPDX-License-Identifier: Apache-2.0
/// @file
/// Scores of a whole tile on the CPU, by the widest instructions that the machine has: the numbers
/// that score_blocks gives, to the bit.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

#include "pulseinfer/config.hpp"
#include "pulseinfer/digest_tile.hpp"
#include "pulseinfer/element.hpp"

// ThreadSanitizer sees what the plain body reads, and not what assembly does.
#if defined(__SANITIZE_THREAD__)
#define PULSEINFER_PLAIN_SCORES
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define PULSEINFER_PLAIN_SCORES
#endif
#endif

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// One KV head of a tile, the queries that share it, and where their scores go.
struct score_task {
  const std::byte* part;      ///< [head_dim, 64] elements
  const std::byte* upper;     ///< the same of the upper bounds, or `part` again
  const std::byte* next;      ///< what will be asked for next, or null
  const float* scales;        ///< [64] of `part`, where elements are scaled
  const float* upper_scales;  ///< [64] of `upper`
  const float* distances;     ///< [64] or null
  const float* queries;       ///< [head_dim + 1, padded]
  std::int32_t head_dim;
  std::int32_t columns;
  std::int32_t padded;
  std::int32_t piece;
  float scale;
  float* most;   ///< [pieces, stride]
  float* total;  ///< the same, or null
  std::int64_t stride;
};

using score_function = void (*)(const score_task& task);

#if defined(__x86_64__) && defined(__GNUC__)

// No fused instructions, even where all else is compiled with them: sums have to be those of other
// machines.
#define PULSEINFER_AVX2 __attribute__((target("avx2,f16c,no-fma,no-fma4")))
#define PULSEINFER_AVX2_INLINE PULSEINFER_AVX2 __attribute__((always_inline)) inline

using float8 = float __attribute__((vector_size(32)));
using float8_unaligned = float __attribute__((vector_size(32), aligned(4), may_alias));
using int8x32 = std::int32_t __attribute__((vector_size(32)));

/// The numbers of eight elements.
template <element_type Element>
PULSEINFER_AVX2_INLINE void load_eight(float8& out, const std::byte* at) {
  struct sixteen {
    std::byte bytes[16];
  };
  struct eight {
    std::byte bytes[8];
  };
  if constexpr (Element == element_type::f32) {
    out = *reinterpret_cast<const float8_unaligned*>(at);
  } else if constexpr (Element == element_type::f16) {
    asm("vcvtph2ps %1, %0" : "=x"(out) : "m"(*reinterpret_cast<const sixteen*>(at)));
  } else if constexpr (Element == element_type::bf16) {
    int8x32 bits;
    asm("vpmovzxwd %1, %0" : "=x"(bits) : "m"(*reinterpret_cast<const sixteen*>(at)));
    out = reinterpret_cast<float8>(bits << 16);
  } else if constexpr (Element == element_type::i8) {
    int8x32 bits;
    asm("vpmovsxbd %1, %0" : "=x"(bits) : "m"(*reinterpret_cast<const eight*>(at)));
    out = __builtin_convertvector(bits, float8);
  } else {
    static_assert(Element == element_type::f8_e4m3);
    int8x32 bits;
    asm("vpmovsxbd %1, %0" : "=x"(bits) : "m"(*reinterpret_cast<const eight*>(at)));
    const int8x32 magnitude = bits & 0x7f;
    const float8 value = reinterpret_cast<float8>(magnitude << 20) * 0x1p120f;
    const int8x32 nan = (magnitude == 0x7f) & 0x7fc00000;
    out = reinterpret_cast<float8>(reinterpret_cast<int8x32>(value) | nan |
                                   (bits & static_cast<std::int32_t>(0x80000000u)));
  }
}

/// Channels that are scored for each line of memory that is asked for.
inline constexpr std::int32_t channels_a_line = 4;

/// One channel of some blocks for some columns: sums += q * digest, rounded twice.
template <element_type Element, bool Bounds, int AtOnce, int Vectors>
PULSEINFER_AVX2_INLINE void score_channel(float8 (&sums)[AtOnce][Vectors],
                                          const float8 (&scales)[2][Vectors], const std::byte* at,
                                          std::int64_t to_upper, const float* q) {
  constexpr bool is_scaled = Element == element_type::f8_e4m3 || Element == element_type::i8;
  constexpr std::int64_t eight = 8 * element_bytes(Element);
  float8 digest[2][Vectors];
  for (int v = 0; v < Vectors; ++v) {
    load_eight<Element>(digest[0][v], at + v * eight);
    if constexpr (is_scaled) digest[0][v] *= scales[0][v];
    if constexpr (Bounds) {
      load_eight<Element>(digest[1][v], at + to_upper + v * eight);
      if constexpr (is_scaled) digest[1][v] *= scales[1][v];
    }
  }
  for (int c = 0; c < AtOnce; ++c) {
    const float one = q[c];
    const float8 many = {one, one, one, one, one, one, one, one};
    // Where a query is negative its product with the lower bound is the larger one.
    const int which = Bounds && !(one < 0.0f) ? 1 : 0;
    for (int v = 0; v < Vectors; ++v) sums[c][v] += many * digest[which][v];
  }
}

/// Columns [column, column + AtOnce) for the `8 * Vectors` blocks from `unit` on.
template <element_type Element, bool Bounds, int AtOnce, int Vectors>
PULSEINFER_AVX2_INLINE void score_part(const score_task& t, std::int32_t column, int unit,
                                       float8 (&scores)[AtOnce][Vectors], const std::byte*& ahead,
                                       std::int64_t ahead_step) {
  constexpr std::int64_t channel = tile_blocks * element_bytes(Element);
  float8 scales[2][Vectors];
  for (int v = 0; v < Vectors; ++v) {
    scales[0][v] = scales[1][v] = float8{};
    if constexpr (Element == element_type::f8_e4m3 || Element == element_type::i8) {
      scales[0][v] =
          *reinterpret_cast<const float8_unaligned*>(t.scales + unit + std::int64_t{8} * v);
      scales[1][v] =
          *reinterpret_cast<const float8_unaligned*>(t.upper_scales + unit + std::int64_t{8} * v);
    }
  }
  float8 sums[AtOnce][Vectors];  // (`scores` has an address, and would be stored each time)
  for (int c = 0; c < AtOnce; ++c) {
    for (int v = 0; v < Vectors; ++v) sums[c][v] = float8{};
  }
  const std::byte* at = t.part + unit * element_bytes(Element);
  const std::int64_t to_upper = t.upper - t.part;
  const float* q = t.queries + column;
  for (std::int32_t k = 0; k < t.head_dim; ++k) {
    if (k % channels_a_line == 0) {
      __builtin_prefetch(ahead, 0, 2);
      if constexpr (Bounds) __builtin_prefetch(ahead + to_upper, 0, 2);
      ahead += ahead_step;
    }
    score_channel<Element, Bounds, AtOnce, Vectors>(sums, scales, at, to_upper, q);
    at += channel;
    q += t.padded;
  }
  for (int c = 0; c < AtOnce; ++c) {
    const float length = q[c];
    for (int v = 0; v < Vectors; ++v) {
      float8 score = sums[c][v];
      if (t.distances != nullptr) {
        score += length * *reinterpret_cast<const float8_unaligned*>(t.distances + unit +
                                                                     std::int64_t{8} * v);
      }
      scores[c][v] = score * t.scale;
    }
  }
}

template <element_type Element, bool Bounds, int AtOnce>
PULSEINFER_AVX2 void score_tile_avx2(const score_task& t) {
  // As many sums as are under way at a time, in registers. (One vector for eight columns would load
  // more queries than the sums take time for.)
  constexpr int vectors = 8 / AtOnce;
  constexpr int units = 8 * vectors;
  // All columns of some blocks, then of the next: what is joined stays in registers.
  const std::int64_t part = t.head_dim * tile_blocks * element_bytes(Element);
  const std::int64_t lines = tile_blocks / units * (t.padded / AtOnce) *
                             ((t.head_dim + channels_a_line - 1) / channels_a_line);
  // Spread over all of the next part. (Where there is none, this one is asked for.)
  const std::byte* ahead = t.next == nullptr ? t.part : t.next;
  const std::int64_t step = t.next == nullptr ? 0 : (part + lines - 1) / lines;
  for (int unit = 0; unit < tile_blocks; unit += units) {
    float8 most[vectors] = {};
    float8 total[vectors] = {};
    std::int32_t within = 0;
    std::int64_t out = unit;
    for (std::int32_t column = 0; column < t.columns; column += AtOnce) {
      float8 sums[AtOnce][vectors];
      score_part<Element, Bounds, AtOnce, vectors>(t, column, unit, sums, ahead, step);
      for (int c = 0; c < AtOnce && column + c < t.columns; ++c) {
        for (int v = 0; v < vectors; ++v) {
          const float8 s = sums[c][v];
          // A NaN, wherever it comes, stays.
          const int8x32 takes = (s > most[v]) | (s != s);
          float8 larger;  // (by an instruction: nvcc has no choice between vectors)
          asm("vblendvps %3, %2, %1, %0" : "=x"(larger) : "x"(most[v]), "x"(s), "x"(takes));
          const float8 sum = total[v] + s;
          most[v] = within == 0 ? s : larger;
          total[v] = within == 0 ? s : sum;
        }
        if (++within < t.piece) continue;
        within = 0;
        for (int v = 0; v < vectors; ++v) {
          *reinterpret_cast<float8_unaligned*>(t.most + out + std::int64_t{8} * v) = most[v];
          if (t.total != nullptr) {
            *reinterpret_cast<float8_unaligned*>(t.total + out + std::int64_t{8} * v) = total[v];
          }
        }
        out += t.stride;
      }
    }
  }
}

template <element_type Element>
[[nodiscard]] score_function score_function_of(digest_kind kind, std::int32_t padded) noexcept {
  if (kind == digest_kind::min_max) {
    return padded % 4 == 0 ? &score_tile_avx2<Element, true, 4>
                           : &score_tile_avx2<Element, true, 1>;
  }
  return padded % 4 == 0 ? &score_tile_avx2<Element, false, 4>
                         : &score_tile_avx2<Element, false, 1>;
}

#undef PULSEINFER_AVX2_INLINE
#undef PULSEINFER_AVX2

#endif

/// True if this machine scores whole tiles by vectors.
[[nodiscard]] inline bool has_score_vectors() noexcept {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(PULSEINFER_PLAIN_SCORES)
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __builtin_cpu_supports("avx2") != 0 && __get_cpuid(1, &a, &b, &c, &d) != 0 &&
           (c & bit_F16C) != 0;
  }();
  return has;
#else
  return false;
#endif
}

/// The fastest way to score a tile of that form for `padded` columns, with those that fill up, or
/// null: one block after the other.
[[nodiscard]] inline score_function best_score_function(
    [[maybe_unused]] const digest_form& form, [[maybe_unused]] std::int32_t padded) noexcept {
#if defined(__x86_64__) && defined(__GNUC__)
  if (!has_score_vectors()) return nullptr;
  switch (form.element) {
    case element_type::f32:
      return score_function_of<element_type::f32>(form.kind, padded);
    case element_type::f16:
      return score_function_of<element_type::f16>(form.kind, padded);
    case element_type::bf16:
      return score_function_of<element_type::bf16>(form.kind, padded);
    case element_type::f8_e4m3:
      return score_function_of<element_type::f8_e4m3>(form.kind, padded);
    case element_type::i8:
      return score_function_of<element_type::i8>(form.kind, padded);
    default:
      return nullptr;
  }
#else
  return nullptr;
#endif
}

}  // namespace pulseinfer::detail

#undef PULSEINFER_PLAIN_SCORES
