// SPDX-License-Identifier: Apache-2.0
/// @file
/// Conversions of elements against slow ones that follow the definition.
#include "pulseinfer/element.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/rounds.hpp"

namespace {

using pulseinfer::element_type;
using pulseinfer::f16_from_float;
using pulseinfer::float_from_bf16;
using pulseinfer::float_from_f16;
using pulseinfer::detail::bits_of;
using pulseinfer::detail::float_of;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr std::uint16_t f16_inf = 0x7c00;
constexpr std::uint16_t f16_sign = 0x8000;

/// The value of a finite, positive half by IEEE 754's formula. The code of infinity gives 2^16, the
/// value that rounding takes it for.
double value_of_f16(std::uint16_t half) {
  const int exponent = half >> 10;
  const int fraction = half & 0x3ff;
  return exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
}

std::vector<double> all_f16_values() {
  std::vector<double> values;
  for (std::uint32_t half = 0; half <= f16_inf; ++half) {
    values.push_back(value_of_f16(static_cast<std::uint16_t>(half)));
  }
  return values;
}

/// The nearest half by search: doubles hold halves, floats and the distances between them exactly.
std::uint16_t slow_f16_from_float(const std::vector<double>& values, float value) {
  const auto sign = static_cast<std::uint16_t>(std::signbit(value) ? f16_sign : 0);
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= values.back()) return sign | f16_inf;
  const auto above = std::upper_bound(values.begin(), values.end(), magnitude);
  const auto below = above - 1;
  const auto code = static_cast<std::uint16_t>(below - values.begin());
  const double to_below = magnitude - *below;
  const double to_above = *above - magnitude;
  const bool up = to_above < to_below || (to_above == to_below && code % 2 == 1);
  return static_cast<std::uint16_t>(sign | (code + (up ? 1 : 0)));
}

/// Counts what differs, so that a fault prints one line and not a hundred thousand.
struct comparison {
  std::int64_t wrong = 0;
  float example = 0;
  void add(const std::vector<double>& values, float value) {
    if (f16_from_float(value) != slow_f16_from_float(values, value)) {
      ++wrong;
      example = value;
    }
  }
};

}  // namespace

TEST_CASE("element: every half becomes the float that IEEE 754 says, and the same half again") {
  std::int64_t wrong_values = 0;
  std::int64_t wrong_ways_back = 0;
  for (std::uint32_t magnitude = 0; magnitude <= 0x7fff; ++magnitude) {
    for (const std::uint32_t sign : {0u, 0x8000u}) {
      const auto half = static_cast<std::uint16_t>(sign | magnitude);
      const float value = float_from_f16(half);
      if (std::signbit(value) != (sign != 0)) ++wrong_values;
      if (magnitude > f16_inf) {
        // Which NaN it is need not survive; that it is one, and its sign, must.
        const std::uint16_t back = f16_from_float(value);
        if (!std::isnan(value)) ++wrong_values;
        if ((back & 0x7fff) <= f16_inf || (back & f16_sign) != sign) ++wrong_ways_back;
        continue;
      }
      const float expected =
          magnitude == f16_inf ? inf : static_cast<float>(value_of_f16(half & 0x7fff));
      if (std::fabs(value) != expected) ++wrong_values;
      if (f16_from_float(value) != half) ++wrong_ways_back;
    }
  }
  CHECK(wrong_values == 0);
  CHECK(wrong_ways_back == 0);
}

TEST_CASE("element: a float becomes the nearest half, ties go to even") {
  const std::vector<double> values = all_f16_values();
  comparison found;
  for (std::size_t code = 0; code < f16_inf; ++code) {
    const auto exact = static_cast<float>(values[code]);
    const auto tie = static_cast<float>((values[code] + values[code + 1]) / 2);
    for (const float near : {exact, tie}) {
      for (const float value : {near, std::nextafter(near, inf), std::nextafter(near, 0.0f)}) {
        found.add(values, value);
        found.add(values, -value);
      }
    }
  }
  CAPTURE(found.example);
  CHECK(found.wrong == 0);
}

TEST_CASE("element: random floats become the nearest half") {
  const std::vector<double> values = all_f16_values();
  pulseinfer::detail::random_source draw(11);
  comparison found;
  for (int i = 0; i < test::rounds(20'000, 10'000'000); ++i) {
    const float any = float_of(static_cast<std::uint32_t>(draw.next()));
    if (!std::isnan(any)) found.add(values, any);
    // Most floats are far outside the range of halves: others are drawn from within.
    const auto exponent = static_cast<std::uint32_t>(100 + draw.below(45));
    found.add(values, float_of(exponent << 23 | static_cast<std::uint32_t>(draw.below(1 << 23))));
  }
  CAPTURE(found.example);
  CHECK(found.wrong == 0);
}

TEST_CASE("element: what is too large becomes infinity, what is too small becomes zero") {
  using limits = std::numeric_limits<float>;
  const float first_too_large = 65520.0f;  // half way from the largest half to 2^16
  CHECK(f16_from_float(std::nextafter(first_too_large, 0.0f)) == 0x7bff);
  for (const float value : {first_too_large, 65536.0f, limits::max(), inf}) {
    CHECK(f16_from_float(value) == f16_inf);
    CHECK(f16_from_float(-value) == (f16_inf | f16_sign));
  }
  const float last_too_small = 0x1p-25f;  // half way to the least half: zero is even
  CHECK(f16_from_float(std::nextafter(last_too_small, 1.0f)) == 1);
  for (const float value : {last_too_small, limits::min(), limits::denorm_min(), 0.0f}) {
    CHECK(f16_from_float(value) == 0);
    CHECK(f16_from_float(-value) == f16_sign);
  }
}

TEST_CASE("element: NaN of any kind stays NaN") {
  for (const std::uint32_t bits : {0x7fc00000u, 0x7f800001u, 0x7fffffffu}) {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const std::uint16_t half = f16_from_float(float_of(sign | bits));
      CHECK((half & 0x7fff) > f16_inf);
      CHECK((half & f16_sign) == (sign >> 16));
    }
  }
}

TEST_CASE("element: a bfloat16 is the upper half of a float") {
  CHECK(float_from_bf16(0x3f80) == 1.0f);
  CHECK(float_from_bf16(0xc049) == -3.140625f);
  CHECK(float_from_bf16(0x0001) == 0x1p-133f);
  CHECK(float_from_bf16(0xff80) == -inf);
  CHECK(std::isnan(float_from_bf16(0x7fc0)));
  std::int64_t wrong = 0;
  for (std::uint32_t bits = 0; bits <= 0xffff; ++bits) {
    if (bits_of(float_from_bf16(static_cast<std::uint16_t>(bits))) != bits << 16) ++wrong;
  }
  CHECK(wrong == 0);
}

TEST_CASE("element: an element is read at its type's size") {
  const std::vector<float> f32 = {1.0f, -2.5f, 3.0f};
  const std::vector<std::uint16_t> f16 = {0x3c00, 0xc100, 0x4200};
  const std::vector<std::uint16_t> bf16 = {0x3f80, 0xc020, 0x4040};
  for (std::size_t i = 0; i < f32.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    CHECK(pulseinfer::load_element(f32.data(), index, element_type::f32) == f32[i]);
    CHECK(pulseinfer::load_element(f16.data(), index, element_type::f16) == f32[i]);
    CHECK(pulseinfer::load_element(bf16.data(), index, element_type::bf16) == f32[i]);
  }
}

static_assert(pulseinfer::element_bytes(element_type::f32) == 4);
static_assert(pulseinfer::element_bytes(element_type::f16) == 2);
static_assert(pulseinfer::element_bytes(element_type::bf16) == 2);
static_assert(pulseinfer::element_bytes(static_cast<element_type>(77)) == 0);

TEST_CASE("element: FP8 E4M3 and E5M2, bit pattern by bit pattern") {
  for (std::uint32_t bits = 0; bits < 256; ++bits) {
    const double sign = (bits & 0x80) != 0 ? -1 : 1;
    const auto byte = static_cast<std::uint8_t>(bits);
    CAPTURE(bits);
    const int exponent4 = static_cast<int>(bits >> 3 & 15);
    const int mantissa4 = static_cast<int>(bits & 7);
    const float e4m3 = pulseinfer::float_from_f8_e4m3(byte);
    if ((bits & 0x7f) == 0x7f) {
      CHECK(std::isnan(e4m3));
    } else {
      CHECK(e4m3 == sign * (exponent4 == 0 ? mantissa4 * 0x1p-9
                                           : std::ldexp(8 + mantissa4, exponent4 - 10)));
      CHECK(std::signbit(e4m3) == (sign < 0));
    }
    const int exponent5 = static_cast<int>(bits >> 2 & 31);
    const int mantissa5 = static_cast<int>(bits & 3);
    const float e5m2 = pulseinfer::float_from_f8_e5m2(byte);
    if (exponent5 == 31) {
      CHECK(std::isnan(e5m2) == (mantissa5 != 0));
      if (mantissa5 == 0) CHECK(e5m2 == static_cast<float>(sign) * inf);
    } else {
      CHECK(e5m2 == sign * (exponent5 == 0 ? mantissa5 * 0x1p-16
                                           : std::ldexp(4 + mantissa5, exponent5 - 17)));
    }
  }
  CHECK(pulseinfer::float_from_f8_e4m3(0x7e) == 448.0f);
  CHECK(pulseinfer::float_from_f8_e5m2(0x7b) == 57344.0f);
  const std::int8_t numbers[] = {-128, -1, 0, 127};
  for (int i = 0; i < 4; ++i) {
    CHECK(pulseinfer::load_element(numbers, i, pulseinfer::element_type::i8) ==
          static_cast<float>(numbers[i]));
  }
}

TEST_CASE("element: a float becomes the nearest bfloat16, ties go to even") {
  std::int64_t wrong = 0;
  for (std::uint32_t code = 0; code < 0x7f80; ++code) {
    const std::uint32_t bits = code << 16;
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
      const auto as = [&](std::uint32_t rest) {
        return pulseinfer::bf16_from_float(float_of(sign | (bits + rest))) ^ (sign >> 16);
      };
      if (as(0) != code || as(0x7fff) != code || as(0x8001) != code + 1) ++wrong;
      if (as(0x8000) != (code % 2 == 0 ? code : code + 1)) ++wrong;
    }
  }
  CHECK(wrong == 0);
  CHECK(pulseinfer::bf16_from_float(inf) == 0x7f80);
  CHECK(pulseinfer::bf16_from_float(-inf) == 0xff80);
  for (const std::uint32_t nan : {0x7f800001u, 0xffc00000u, 0x7fffffffu}) {
    CHECK((pulseinfer::bf16_from_float(float_of(nan)) & 0x7fff) > 0x7f80);
  }
}

TEST_CASE("element: a float becomes the nearest FP8 E4M3, ties go to even, up to 448") {
  const auto value = [](std::uint32_t code) {
    return pulseinfer::float_from_f8_e4m3(static_cast<std::uint8_t>(code));
  };
  const auto code_of = [](float number) {
    return std::uint32_t{pulseinfer::f8_e4m3_from_float(number)};
  };
  for (std::uint32_t code = 0; code < 0x7e; ++code) {
    CAPTURE(code);
    const float tie = (value(code) + value(code + 1)) / 2;  // exact
    const std::uint32_t even = code % 2 == 0 ? code : code + 1;
    for (const std::uint32_t sign : {0u, 0x80u}) {
      const float s = sign == 0 ? 1.0f : -1.0f;
      CHECK(code_of(s * value(code)) == (sign | code));
      CHECK(code_of(s * tie) == (sign | even));
      CHECK(code_of(s * std::nextafter(tie, 0.0f)) == (sign | code));
      CHECK(code_of(s * std::nextafter(tie, inf)) == (sign | (code + 1)));
    }
  }
  for (const float large : {448.0f, 463.9f, 464.0f, 480.0f, 1e30f, inf}) {
    CHECK(code_of(large) == 0x7e);
    CHECK(code_of(-large) == 0xfe);
  }
  CHECK(code_of(0x1p-149f) == 0);
  CHECK((code_of(std::numeric_limits<float>::quiet_NaN()) & 0x7f) == 0x7f);
}

TEST_CASE("element: a float becomes the nearest integer of [-127, 127], ties go to even") {
  const auto as = [](float value) { return int{pulseinfer::i8_from_float(value)}; };
  for (int i = -127; i < 127; ++i) {
    const auto number = static_cast<float>(i);
    CHECK(as(number) == i);
    CHECK(as(number + 0.5f) == (i % 2 == 0 ? i : i + 1));
    CHECK(as(std::nextafter(number + 0.5f, -inf)) == i);
    CHECK(as(std::nextafter(number + 0.5f, inf)) == i + 1);
  }
  for (const float large : {127.0f, 127.6f, 1e9f, 3e38f, inf}) {
    CHECK(as(large) == 127);
    CHECK(as(-large) == -127);
  }
  CHECK(as(std::numeric_limits<float>::quiet_NaN()) == 0);
  CHECK(as(-0.0f) == 0);
}

TEST_CASE("element: what is stored is what is read, and nothing beside it") {
  for (const element_type type : {element_type::f32, element_type::f16, element_type::bf16,
                                  element_type::f8_e4m3, element_type::i8}) {
    const std::int64_t bytes = pulseinfer::element_bytes(type);
    std::vector<std::uint32_t> memory(3, 0x55555555u);
    pulseinfer::store_element(memory.data() + 1, type, -3.0f);
    CHECK(pulseinfer::load_element(memory.data() + 1, type) == -3.0f);
    CHECK(memory[0] == 0x55555555u);
    CHECK(memory[2] == 0x55555555u);
    const std::uint32_t beside = bytes < 4 ? ~0u << (8 * bytes) : 0;
    CHECK((memory[1] & beside) == (0x55555555u & beside));
  }
  std::uint32_t untouched = 7;
  pulseinfer::store_element(&untouched, element_type::f8_e5m2, 1.0f);
  CHECK(untouched == 7);
}
