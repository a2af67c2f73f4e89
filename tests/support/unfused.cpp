// SPDX-License-Identifier: Apache-2.0
// Compiled with fused instructions and the leave to use them: see tests/CMakeLists.txt.
#include "support/unfused.hpp"

#include <cstdint>
#include <cstring>

// Inline functions of one name must be compiled alike in one program. These are not, so they get
// another.
#define pulseinfer pulseinfer_where_fusing_is_allowed
#include "pulseinfer/config.hpp"

using pulseinfer::detail::product;
using pulseinfer::detail::sum;

namespace test {

float dot_where_fusing_is_allowed(const float* a, const float* b, std::size_t size) {
  float total = 0;
  for (std::size_t i = 0; i < size; ++i) total = sum(total, product(a[i], b[i]));
  return total;
}

float plain_dot_where_fusing_is_allowed(const float* a, const float* b, std::size_t size) {
  float total = 0;
  for (std::size_t i = 0; i < size; ++i) total += a[i] * b[i];
  return total;
}

void multiply_add_where_fusing_is_allowed(float* out, const float* a, const float* b,
                                          std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) out[i] = sum(out[i], product(a[i], b[i]));
}

}  // namespace test
