// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies of the CPU at the speed of memory: up to three at a time, by the widest instructions that
/// the machine has.
///
/// One core reads as fast as it has reads under way, and a unit that begins somewhere else is not
/// foreseen by the hardware. So three units are copied at a time, in turns: each turn gives the
/// hardware's prefetch of the others time to get ahead; the first lines of the next three are asked
/// for meanwhile, and the pages of the three after those are touched, so that their addresses are
/// translated when they are needed. What has no partner is copied as two halves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pulseinfer/config.hpp"

// Sanitizers see memcpy, and not what assembly does.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define PULSEINFER_PORTABLE_COPIES
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer) || __has_feature(address_sanitizer) || \
    __has_feature(memory_sanitizer)
#define PULSEINFER_PORTABLE_COPIES
#endif
#endif

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// How the CPU stores what it copies.
enum class store_hint : std::uint8_t {
  cached,     ///< as usual: for memory that is in the cache, or read by the CPU soon
  streaming,  ///< past the caches, which saves to read what is overwritten
};

namespace detail {

/// Copies of the same length, made at the same time, and what is left behind the last. (A fourth
/// would gain something where units are large and lose it where they are small.)
struct copy_group {
  static constexpr int max_streams = 3;

  std::byte* to[max_streams] = {};
  const std::byte* from[max_streams] = {};
  int streams = 0;        ///< 0: there is nothing to copy
  std::size_t bytes = 0;  ///< each
  std::size_t rest = 0;
};

/// Makes the copies of a group; asks for what the next ones read. Streaming stores are not ordered
/// before a fence_stores().
using copy_function = void (*)(const copy_group& group, const copy_group& next,
                               const copy_group& after_next) noexcept;

/// A set of instructions to copy with.
enum class copy_path : std::uint8_t { portable, avx2, avx512, neon };

/// The copies with nothing but the standard library: always there, and what the others are tested
/// against.
inline void copy_group_portable(const copy_group& group, const copy_group&,
                                const copy_group&) noexcept {
  for (int i = 0; i < group.streams; ++i) std::memcpy(group.to[i], group.from[i], group.bytes);
  if (group.rest > 0) {
    const int last = group.streams - 1;
    std::memcpy(group.to[last] + group.bytes, group.from[last] + group.bytes, group.rest);
  }
}

/// Streamed bytes are in memory, or at least seen by whoever sees what is stored from here on, a
/// device that is told to read them included.
inline void fence_stores() noexcept {
#if defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
#elif defined(__aarch64__)
  asm volatile("dmb oshst" ::: "memory");
#endif
}

#if defined(__x86_64__)

// Assembly, because the intrinsics ask for a header of some 100,000 lines, and for functions that
// are compiled apart for each set of instructions.

/// Two cache lines through 32-byte registers. Stores are to whole lines.
struct avx2_lines {
  static constexpr std::size_t bytes = 128;

  static void copy(std::byte* to, const std::byte* from) noexcept {
    asm volatile(
        "vmovdqu (%1), %%ymm0\n\tvmovdqu 32(%1), %%ymm1\n\t"
        "vmovdqu 64(%1), %%ymm2\n\tvmovdqu 96(%1), %%ymm3\n\t"
        "vmovdqu %%ymm0, (%0)\n\tvmovdqu %%ymm1, 32(%0)\n\t"
        "vmovdqu %%ymm2, 64(%0)\n\tvmovdqu %%ymm3, 96(%0)"
        :
        : "r"(to), "r"(from)
        : "xmm0", "xmm1", "xmm2", "xmm3", "memory");
  }
  static void stream(std::byte* to, const std::byte* from) noexcept {
    asm volatile(
        "vmovdqu (%1), %%ymm0\n\tvmovdqu 32(%1), %%ymm1\n\t"
        "vmovdqu 64(%1), %%ymm2\n\tvmovdqu 96(%1), %%ymm3\n\t"
        "vmovntdq %%ymm0, (%0)\n\tvmovntdq %%ymm1, 32(%0)\n\t"
        "vmovntdq %%ymm2, 64(%0)\n\tvmovntdq %%ymm3, 96(%0)"
        :
        : "r"(to), "r"(from)
        : "xmm0", "xmm1", "xmm2", "xmm3", "memory");
  }
  /// Before code that may use the older instructions: they are slow otherwise.
  static void finish() noexcept {
    asm volatile("vzeroupper" ::
                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",
                       "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");
  }
};

/// The same through 64-byte registers: a store is a line.
struct avx512_lines {
  static constexpr std::size_t bytes = 128;

  static void copy(std::byte* to, const std::byte* from) noexcept {
    asm volatile(
        "vmovdqu64 (%1), %%zmm0\n\tvmovdqu64 64(%1), %%zmm1\n\t"
        "vmovdqu64 %%zmm0, (%0)\n\tvmovdqu64 %%zmm1, 64(%0)"
        :
        : "r"(to), "r"(from)
        : "xmm0", "xmm1", "memory");
  }
  static void stream(std::byte* to, const std::byte* from) noexcept {
    asm volatile(
        "vmovdqu64 (%1), %%zmm0\n\tvmovdqu64 64(%1), %%zmm1\n\t"
        "vmovntdq %%zmm0, (%0)\n\tvmovntdq %%zmm1, 64(%0)"
        :
        : "r"(to), "r"(from)
        : "xmm0", "xmm1", "memory");
  }
  static void finish() noexcept { avx2_lines::finish(); }
};

#elif defined(__aarch64__)

/// Two cache lines through 16-byte registers.
struct neon_lines {
  static constexpr std::size_t bytes = 128;

  static void copy(std::byte* to, const std::byte* from) noexcept {
    asm volatile(
        "ldp q0, q1, [%1]\n\tldp q2, q3, [%1, #32]\n\t"
        "ldp q4, q5, [%1, #64]\n\tldp q6, q7, [%1, #96]\n\t"
        "stp q0, q1, [%0]\n\tstp q2, q3, [%0, #32]\n\t"
        "stp q4, q5, [%0, #64]\n\tstp q6, q7, [%0, #96]"
        :
        : "r"(to), "r"(from)
        : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "memory");
  }
  static void stream(std::byte* to, const std::byte* from) noexcept {
    asm volatile(
        "ldp q0, q1, [%1]\n\tldp q2, q3, [%1, #32]\n\t"
        "ldp q4, q5, [%1, #64]\n\tldp q6, q7, [%1, #96]\n\t"
        "stnp q0, q1, [%0]\n\tstnp q2, q3, [%0, #32]\n\t"
        "stnp q4, q5, [%0, #64]\n\tstnp q6, q7, [%0, #96]"
        :
        : "r"(to), "r"(from)
        : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "memory");
  }
  static void finish() noexcept {}
};

#endif

#if defined(__x86_64__) || defined(__aarch64__)

inline constexpr std::size_t cache_line_bytes = 64;
/// What one stream copies before it is the other one's turn.
inline constexpr std::size_t copy_turn_bytes = 512;
/// How much of a next copy is asked for in all, and how much of that at once: more where the copy
/// is short, and there is less time for the rest.
inline constexpr std::size_t prefetch_bytes = 2560;
[[nodiscard]] inline std::size_t prefetch_first_bytes(std::size_t bytes) noexcept {
  return bytes <= (8 << 10) ? 512 : 256;
}
/// It is asked for no earlier than while this much is left to copy, lest it has gone again.
inline constexpr std::size_t prefetch_window_bytes = 16 << 10;

inline void prefetch_line(const std::byte* p) noexcept {
  __builtin_prefetch(p, 0, 0);  // it is read once
}

template <class Lines, store_hint Hint>
inline void copy_lines(std::byte* to, const std::byte* from) noexcept {
  if constexpr (Hint == store_hint::streaming) {
    Lines::stream(to, from);
  } else {
    Lines::copy(to, from);
  }
}

/// One turn of a stream; with every step a line of the next one is asked for, up to `end`. (Many
/// requests in a row would hold up the copy's own.)
template <class Lines, store_hint Hint>
inline void copy_turn(std::byte* to, const std::byte* from, const std::byte* ahead,
                      const std::byte* end) noexcept {
  for (std::size_t k = 0; k < copy_turn_bytes; k += Lines::bytes) {
    if (ahead < end) prefetch_line(ahead);
    ahead += cache_line_bytes;
    copy_lines<Lines, Hint>(to + k, from + k);
  }
}

/// Copies `bytes` in each stream, in turns, and asks for the first lines of the next streams.
/// @param bytes  a multiple of what Lines moves
template <class Lines, store_hint Hint, int Streams>
inline void copy_streams(std::byte* const* to, const std::byte* const* from, std::size_t bytes,
                         const copy_group& next) noexcept {
  const std::size_t wanted = next.streams > 0 ? std::min(next.bytes, prefetch_bytes) : 0;
  const std::byte* ahead[Streams];
  for (int i = 0; i < Streams; ++i) {
    ahead[i] = next.streams > 0 ? next.from[std::min(i, next.streams - 1)] : from[i];
  }
  std::size_t at = 0;
  for (; bytes - at > prefetch_window_bytes; at += copy_turn_bytes) {
    for (int i = 0; i < Streams; ++i) {
      copy_turn<Lines, Hint>(to[i] + at, from[i] + at, ahead[i], ahead[i]);
    }
  }
  const std::size_t first = std::min(wanted, prefetch_first_bytes(next.bytes));
  std::size_t asked = 0;
  for (; asked < first; asked += cache_line_bytes) {
    for (int i = 0; i < Streams; ++i) prefetch_line(ahead[i] + asked);
  }
  for (; bytes - at >= copy_turn_bytes; at += copy_turn_bytes) {
    for (int i = 0; i < Streams; ++i) {
      copy_turn<Lines, Hint>(to[i] + at, from[i] + at, ahead[i] + asked, ahead[i] + wanted);
    }
    asked += copy_turn_bytes / Lines::bytes * cache_line_bytes;
  }
  for (; at < bytes; at += Lines::bytes) {
    for (int i = 0; i < Streams; ++i) copy_lines<Lines, Hint>(to[i] + at, from[i] + at);
  }
}

/// The copies of a group. `Lines` moves 128 bytes at a time, to whole lines where it streams.
template <class Lines, store_hint Hint>
void copy_group_by(const copy_group& group, const copy_group& next,
                   const copy_group& after_next) noexcept {
  for (int i = 0; i < after_next.streams; ++i) prefetch_line(after_next.from[i]);
  std::byte* to[copy_group::max_streams];
  const std::byte* from[copy_group::max_streams];
  std::copy_n(group.to, copy_group::max_streams, to);
  std::copy_n(group.from, copy_group::max_streams, from);
  std::size_t bytes = group.bytes;
  if (group.streams == 1) {
    // Up to the first line. (Several streams begin at lines.)
    const auto begin = reinterpret_cast<std::uintptr_t>(to[0]) % cache_line_bytes;
    const std::size_t head = begin == 0 ? 0 : std::min(bytes, cache_line_bytes - begin);
    if (head > 0) std::memcpy(to[0], from[0], head);
    to[0] += head;
    from[0] += head;
    bytes -= head;
  }
  const std::size_t body = bytes / Lines::bytes * Lines::bytes;
  switch (group.streams) {
    case 1:
      copy_streams<Lines, Hint, 1>(to, from, body, next);
      break;
    case 2:
      copy_streams<Lines, Hint, 2>(to, from, body, next);
      break;
    default:
      copy_streams<Lines, Hint, 3>(to, from, body, next);
  }
  Lines::finish();
  for (int i = 0; i < group.streams && body < bytes; ++i) {
    std::memcpy(to[i] + body, from[i] + body, bytes - body);
  }
  if (group.rest > 0) {
    const int last = group.streams - 1;
    std::memcpy(to[last] + bytes, from[last] + bytes, group.rest);
  }
}

#endif

/// True if this machine has the instructions.
[[nodiscard]] inline bool has_copy_path(copy_path path) noexcept {
#if defined(__x86_64__)
  if (path == copy_path::avx2) return __builtin_cpu_supports("avx2") != 0;
  if (path == copy_path::avx512) return __builtin_cpu_supports("avx512f") != 0;
#elif defined(__aarch64__)
  if (path == copy_path::neon) return true;
#endif
  return path == copy_path::portable;
}

/// The function of a path that this machine has.
[[nodiscard]] inline copy_function copy_function_of(copy_path path, store_hint hint) noexcept {
  [[maybe_unused]] const bool is_streaming = hint == store_hint::streaming;
#if defined(__x86_64__)
  if (path == copy_path::avx2) {
    return is_streaming ? &copy_group_by<avx2_lines, store_hint::streaming>
                        : &copy_group_by<avx2_lines, store_hint::cached>;
  }
  if (path == copy_path::avx512) {
    return is_streaming ? &copy_group_by<avx512_lines, store_hint::streaming>
                        : &copy_group_by<avx512_lines, store_hint::cached>;
  }
#elif defined(__aarch64__)
  if (path == copy_path::neon) {
    return is_streaming ? &copy_group_by<neon_lines, store_hint::streaming>
                        : &copy_group_by<neon_lines, store_hint::cached>;
  }
#endif
  return &copy_group_portable;
}

/// The widest that this machine has, found out once.
[[nodiscard]] inline copy_path best_copy_path() noexcept {
#if defined(PULSEINFER_PORTABLE_COPIES)
  return copy_path::portable;
#else
  static const copy_path best = [] {
    for (const copy_path path : {copy_path::avx512, copy_path::avx2, copy_path::neon}) {
      if (has_copy_path(path)) return path;
    }
    return copy_path::portable;
  }();
  return best;
#endif
}

}  // namespace detail
}  // namespace pulseinfer

#undef PULSEINFER_PORTABLE_COPIES
