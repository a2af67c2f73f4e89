// SPDX-License-Identifier: Apache-2.0
/// @file
/// What differs between compilers, and nothing else.
#pragma once

// (MSVC keeps __cplusplus at 199711; it is not among the compilers that we know.)
#if __cplusplus < 202002L
#error "pulseinfer is C++20: compile with -std=c++20 (CMake: CXX_STANDARD 20, CUDA_STANDARD 20)"
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pulseinfer/version.hpp"

/// Marks a function that runs on the host and inside kernels. Vanishes in plain C++.
#if defined(__CUDACC__)
#define PULSEINFER_HD __host__ __device__
#else
#define PULSEINFER_HD
#endif

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// The unit of every mover: pools, strips and staging are aligned to it.
inline constexpr std::int64_t word_bytes = 16;

namespace detail {

/// The bits of a float, and the float of those bits (std::bit_cast cannot be called on a device).
PULSEINFER_HD inline std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}
PULSEINFER_HD inline float float_of(std::uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/// a * b, rounded before anything is added to it.
///
/// Scores are sums of products. Where a compiler may fuse the two into one instruction, the sum
/// differs in its last bit between machines, two blocks change places, and selections stop being
/// equal. Each compiler has its own way to be told so; none of them costs anything on a machine
/// without fused instructions. What no source can stop is clang's -ffp-contract=fast, which
/// -ffast-math implies: compile with -ffp-contract=on there, clang's default.
PULSEINFER_HD inline float product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#elif defined(__clang__)
#pragma clang fp contract(off)
  return a * b;
#elif defined(__FP_FAST_FMAF)
  // A fused instruction whose addend changes nothing, not even the sign of a zero: no sum can be
  // fused into it any more. (g++ has a barrier for this, which its vectoriser drops.)
  return __builtin_fmaf(a, b, -0.0f);
#elif defined(__GNUC__)
  return a * b;  // the machine has no fused instruction
#else
  volatile float rounded = a * b;
  return rounded;
#endif
}

/// a + b as one rounded addition: the partner of product().
PULSEINFER_HD inline float sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#elif defined(__clang__)
#pragma clang fp contract(off)
  return a + b;
#else
  return a + b;
#endif
}

/// a / b, rounded to nearest, on a device too, whatever it is compiled with.
PULSEINFER_HD inline float quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

/// The square root, rounded to nearest; of a negative number it is NaN.
PULSEINFER_HD inline float square_root(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

}  // namespace detail
}  // namespace pulseinfer
