// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a cache element is. To the mover elements are bytes; the digest and the scores read them as
/// numbers.
///
/// Conversions are plain integer and float arithmetic, exact, and the same on every machine.
#pragma once

#include <cstdint>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Types a digest can read. FP16 and BF16 are what most caches are kept in; FP8 and INT8 come with
/// scale tensors (see kv_geometry); FP32 serves tests and queries.
enum class element_type : std::uint8_t { f32, f16, bf16, f8_e4m3, f8_e5m2, i8 };

/// Bytes of one element; 0 for a value that is none of the types.
PULSEINFER_HD constexpr std::int64_t element_bytes(element_type type) {
  switch (type) {
    case element_type::f32:
      return 4;
    case element_type::f16:
    case element_type::bf16:
      return 2;
    case element_type::f8_e4m3:
    case element_type::f8_e5m2:
    case element_type::i8:
      return 1;
  }
  return 0;
}

/// The number that the bits of an IEEE half stand for. Exact; denormals, infinities and NaN
/// included.
PULSEINFER_HD inline float float_from_f16(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7fffu;
  const std::uint32_t sign = (half & 0x8000u) << 16;
  if (magnitude >= 0x7c00u)
    return detail::float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  // Reads the half's exponent as a float's, 112 too small, and corrects it by an exact product.
  const float value = detail::product(detail::float_of(magnitude << 13), 0x1p112f);
  return detail::float_of(detail::bits_of(value) | sign);
}

/// The half nearest to a float, ties to even. Overflow gives infinity; NaN stays NaN.
PULSEINFER_HD inline std::uint16_t f16_from_float(float value) {
  const std::uint32_t bits = detail::bits_of(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<std::uint16_t>(sign | 0x7c00u);
  std::uint32_t rounded;
  if (magnitude < 0x38800000u) {  // a denormal half: let the float unit round at 2^-24
    rounded = detail::bits_of(detail::sum(detail::float_of(magnitude), 0.5f)) - 0x3f000000u;
  } else {
    rounded = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return static_cast<std::uint16_t>(sign | rounded);
}

/// The number that the bits of a bfloat16 stand for.
PULSEINFER_HD inline float float_from_bf16(std::uint16_t bits) {
  return detail::float_of(static_cast<std::uint32_t>(bits) << 16);
}

/// The bfloat16 nearest to a float, ties to even. Overflow gives infinity; NaN stays NaN.
PULSEINFER_HD inline std::uint16_t bf16_from_float(float value) {
  const std::uint32_t bits = detail::bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<std::uint16_t>((bits >> 16) | 0x40u);
  return static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/// The number that the bits of an FP8 E4M3 stand for ("fn": no infinities, NaN is all ones).
PULSEINFER_HD inline float float_from_f8_e4m3(std::uint8_t bits) {
  const std::uint32_t magnitude = bits & 0x7fu;
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80u) << 24;
  if (magnitude == 0x7fu) return detail::float_of(sign | 0x7fc00000u);
  // Reads the exponent as a float's, 120 too small, and corrects it by an exact product.
  const float value = detail::product(detail::float_of(magnitude << 20), 0x1p120f);
  return detail::float_of(detail::bits_of(value) | sign);
}

/// The FP8 E4M3 nearest to a float, ties to even. What is beyond 448, infinity too, becomes 448 of
/// its sign; NaN stays NaN.
PULSEINFER_HD inline std::uint8_t f8_e4m3_from_float(float value) {
  const std::uint32_t bits = detail::bits_of(value);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<std::uint8_t>(sign | 0x7fu);
  if (magnitude >= 0x43e00000u) return static_cast<std::uint8_t>(sign | 0x7eu);
  std::uint32_t rounded;
  if (magnitude < 0x3c800000u) {  // a denormal: let the float unit round at 2^-9
    rounded = detail::bits_of(detail::sum(detail::float_of(magnitude), 16384.0f)) - 0x46800000u;
  } else {
    rounded = (magnitude - 0x3c000000u + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
  }
  return static_cast<std::uint8_t>(sign | rounded);
}

/// The integer of [-127, 127] nearest to a float, ties to even; 0 for NaN.
PULSEINFER_HD inline std::int8_t i8_from_float(float value) {
  if (!(value > -127.0f)) return value != value ? 0 : -127;
  if (value >= 127.0f) return 127;
  // Added to 1.5 x 2^23 a number keeps no fraction: the float unit rounds it.
  const std::uint32_t rounded = detail::bits_of(detail::sum(value, 0x1.8p23f)) - 0x4b400000u;
  return static_cast<std::int8_t>(static_cast<std::int32_t>(rounded));
}

/// The number that the bits of an FP8 E5M2 stand for: the upper half of an IEEE half.
PULSEINFER_HD inline float float_from_f8_e5m2(std::uint8_t bits) {
  return float_from_f16(static_cast<std::uint16_t>(bits << 8));
}

/// The element at an address, as a float. The address is aligned to the element.
PULSEINFER_HD inline float load_element(const void* at, element_type type) {
  switch (type) {
    case element_type::f16:
      return float_from_f16(*static_cast<const std::uint16_t*>(at));
    case element_type::bf16:
      return float_from_bf16(*static_cast<const std::uint16_t*>(at));
    case element_type::f8_e4m3:
      return float_from_f8_e4m3(*static_cast<const std::uint8_t*>(at));
    case element_type::f8_e5m2:
      return float_from_f8_e5m2(*static_cast<const std::uint8_t*>(at));
    case element_type::i8:
      return static_cast<float>(*static_cast<const std::int8_t*>(at));
    case element_type::f32:
      break;
  }
  return *static_cast<const float*>(at);
}

/// Element `index` of an array of the given type, as a float.
PULSEINFER_HD inline float load_element(const void* array, std::int64_t index, element_type type) {
  return load_element(static_cast<const std::uint8_t*>(array) + index * element_bytes(type), type);
}

/// Stores a float at an address, rounded to the element: FP32, FP16, BF16, FP8 E4M3 or INT8. The
/// address is aligned to the element; for other types nothing is stored.
PULSEINFER_HD inline void store_element(void* at, element_type type, float value) {
  switch (type) {
    case element_type::f16:
      *static_cast<std::uint16_t*>(at) = f16_from_float(value);
      return;
    case element_type::bf16:
      *static_cast<std::uint16_t*>(at) = bf16_from_float(value);
      return;
    case element_type::f8_e4m3:
      *static_cast<std::uint8_t*>(at) = f8_e4m3_from_float(value);
      return;
    case element_type::i8:
      *static_cast<std::int8_t*>(at) = i8_from_float(value);
      return;
    case element_type::f32:
      *static_cast<float*>(at) = value;
      return;
    case element_type::f8_e5m2:
      return;
  }
}

}  // namespace pulseinfer
