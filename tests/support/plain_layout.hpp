// SPDX-License-Identifier: Apache-2.0
/// @file
/// A layout of two planes of one strip a page, from its strides.
#pragma once

#include <cstdint>

#include "pulseinfer/layout.hpp"

namespace test {

inline pulseinfer::block_layout plain_layout(std::int64_t pages, std::int64_t page_stride,
                                             std::int64_t strip_bytes) {
  const pulseinfer::plane_layout plane{.page_stride = page_stride, .strip_bytes = strip_bytes};
  return pulseinfer::checked({.pages = pages, .planes = 2, .plane = {plane, plane}});
}

}  // namespace test
