// SPDX-License-Identifier: Apache-2.0
/// @file
/// Bits of floats, and sums of products that are rounded twice whatever the compiler may do.
#include "pulseinfer/config.hpp"

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/unfused.hpp"

namespace {

using pulseinfer::detail::bits_of;
using pulseinfer::detail::float_of;
using pulseinfer::detail::product;
using pulseinfer::detail::sum;

/// a * b + c with two roundings, by way of double: a product of floats is exact there, so its
/// rounding to float is the first of the two.
float rounded_twice(float a, float b, float c) {
  const auto first = static_cast<float>(static_cast<double>(a) * static_cast<double>(b));
  // Rounding a sum of floats to double and then to float is rounding it to float.
  return static_cast<float>(static_cast<double>(first) + static_cast<double>(c));
}

std::vector<float> random_floats(std::size_t size, std::uint64_t seed) {
  pulseinfer::detail::random_source draw(seed);
  std::vector<float> values(size);
  for (float& value : values) {
    // 24 random bits: nearly every product has to be rounded.
    value = (static_cast<float>(draw.below(1 << 24)) - 8'388'608.0f) * 0x1p-23f;
  }
  return values;
}

bool cpu_has_fused_instructions() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("fma") != 0;
#else
  return true;  // on other machines nothing more than the default was asked for
#endif
}

// (1 + 2^-12)^2 - (1 + 2^-11) is 2^-24. The square rounds to 1 + 2^-11, a tie.
constexpr float factor = 1.0f + 0x1p-12f;
constexpr float subtrahend = -(1.0f + 0x1p-11f);

}  // namespace

TEST_CASE("config: bits of a float and back") {
  CHECK(bits_of(1.0f) == 0x3f800000u);
  CHECK(bits_of(-0.0f) == 0x80000000u);
  CHECK(float_of(0x7f7fffffu) == 0x1.fffffep127f);
  CHECK(float_of(0x00000001u) == 0x1p-149f);
  pulseinfer::detail::random_source draw(1);
  for (int i = 0; i < 1'000; ++i) {
    const auto bits = static_cast<std::uint32_t>(draw.next());
    if ((bits & 0x7f800000u) == 0x7f800000u) continue;  // a NaN may change where it is passed
    CHECK(bits_of(float_of(bits)) == bits);
    CHECK(bits_of(float_of(bits)) == std::bit_cast<std::uint32_t>(float_of(bits)));
  }
}

TEST_CASE("config: a product is rounded before it is added to") {
  CHECK(sum(product(factor, factor), subtrahend) == 0.0f);
  const std::vector<float> a = random_floats(2'000, 2);
  const std::vector<float> b = random_floats(2'000, 3);
  const std::vector<float> c = random_floats(2'000, 4);
  for (std::size_t i = 0; i < a.size(); ++i) {
    CHECK(bits_of(sum(product(a[i], b[i]), c[i])) == bits_of(rounded_twice(a[i], b[i], c[i])));
  }
}

TEST_CASE("config: where the compiler may fuse, it still does not") {
  if (!cpu_has_fused_instructions()) {
    MESSAGE("not tested: this CPU has no fused instructions");
    return;
  }
  const float a[] = {1.0f, factor};
  const float b[] = {subtrahend, factor};
#if defined(__x86_64__) && defined(__OPTIMIZE__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
  // Otherwise this case would show nothing.
  CHECK(test::plain_dot_where_fusing_is_allowed(a, b, 2) == 0x1p-24f);
#endif
  CHECK(test::dot_where_fusing_is_allowed(a, b, 2) == 0.0f);

  for (const std::size_t size : {1u, 7u, 64u, 1'000u}) {
    CAPTURE(size);
    const std::vector<float> x = random_floats(size, size);
    const std::vector<float> y = random_floats(size, size + 1);
    float total = 0;
    std::vector<float> out = random_floats(size, size + 2);
    std::vector<float> expected = out;
    for (std::size_t i = 0; i < size; ++i) {
      total = rounded_twice(x[i], y[i], total);
      expected[i] = rounded_twice(x[i], y[i], expected[i]);
    }
    CHECK(bits_of(test::dot_where_fusing_is_allowed(x.data(), y.data(), size)) == bits_of(total));
    test::multiply_add_where_fusing_is_allowed(out.data(), x.data(), y.data(), size);
    CHECK((out == expected));
  }
}

static_assert(pulseinfer::word_bytes == 16);

TEST_CASE("config: quotients and roots are rounded to nearest") {
  for (const float a : random_floats(2000, 3)) {
    for (const float b : {3.0f, -0.7f, 0x1.8p-20f}) {
      // Of floats, the quotient and the root in double precision round to those in single.
      CHECK(pulseinfer::detail::quotient(a, b) ==
            static_cast<float>(static_cast<double>(a) / static_cast<double>(b)));
    }
    if (a >= 0) {
      CHECK(pulseinfer::detail::square_root(a) ==
            static_cast<float>(std::sqrt(static_cast<double>(a))));
    }
  }
  CHECK(std::isnan(pulseinfer::detail::square_root(-1.0f)));
}
