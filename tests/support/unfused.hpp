// SPDX-License-Identifier: Apache-2.0
/// @file
/// Sums of products from a translation unit in which the compiler may fuse them (unfused.cpp).
#pragma once

#include <cstddef>

namespace test {

/// The sum of a[i] * b[i] by detail::product and detail::sum.
float dot_where_fusing_is_allowed(const float* a, const float* b, std::size_t size);

/// The same in plain arithmetic: what the compiler does when nothing forbids it.
float plain_dot_where_fusing_is_allowed(const float* a, const float* b, std::size_t size);

/// out[i] = out[i] + a[i] * b[i] by detail::product and detail::sum: vector instructions.
void multiply_add_where_fusing_is_allowed(float* out, const float* a, const float* b,
                                          std::size_t size);

}  // namespace test
