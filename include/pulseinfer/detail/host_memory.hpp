// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory of the backends whose device is the host.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Blocks from here on lie on huge pages where the system grants them.
inline constexpr std::size_t huge_block_bytes = std::size_t{4} << 20;
inline constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

/// Memory for std::free, null if there is none to be had.
///
/// Scattered units lie on more pages than a TLB holds. Large blocks begin at a huge page and ask
/// for such pages: a wish that the system may refuse, and nothing else changes then. What is left
/// behind the last whole huge page stays on small ones, so that no more is taken than was asked
/// for.
///
/// @param bytes      more than 0
/// @param alignment  a power of two, at least that of a pointer
[[nodiscard]] inline void* allocate_host(std::size_t bytes, std::size_t alignment) noexcept {
  const bool is_huge = bytes >= huge_block_bytes;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  if (rounded < bytes) return nullptr;
  void* p = nullptr;
  if (posix_memalign(&p, is_huge ? std::max(alignment, huge_page_bytes) : alignment, rounded) !=
      0) {
    return nullptr;
  }
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  if (is_huge) (void)madvise(p, rounded / huge_page_bytes * huge_page_bytes, MADV_HUGEPAGE);
#endif
  return p;
}

}  // namespace pulseinfer::detail
