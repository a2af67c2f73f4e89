// SPDX-License-Identifier: Apache-2.0
/// @file
/// Lines of memory that are wanted soon.
#pragma once

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Asks for the line of memory at an address, and does not wait for it. Any address will do.
inline void prefetch_line(const void* p) noexcept {
  __builtin_prefetch(p);
  // GCC takes a function that does nothing but prefetch for one without effects, and removes the
  // calls of it that were not inlined by then. Nobody notices but the clock.
  asm volatile("");
}

}  // namespace pulseinfer::detail
