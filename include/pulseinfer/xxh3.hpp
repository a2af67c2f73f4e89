// SPDX-License-Identifier: Apache-2.0
/// @file
/// xxHash's XXH3 as the checksum of a store. The only header that needs anything but the standard
/// library and CUDA; without xxhash.h it offers null, which a store refuses.
///
///     block_store store(backend, geometry, {.capacity_bytes = ...,
///                                           .integrity = integrity::checksum,
///                                           .checksum = xxh3});
#pragma once

#include <cstddef>
#include <cstdint>

#if __has_include(<xxhash.h>)
// All of xxHash becomes static functions under names of their own, so a program that links another
// version of it is not disturbed.
#if defined(XXH_INLINE_ALL)
#include <xxhash.h>
#else
#define XXH_INLINE_ALL
#include <xxhash.h>
#undef XXH_INLINE_ALL
#endif
#endif

#include "pulseinfer/integrity.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

// Whether xxhash.h is found may differ between the parts of a program. So nothing here has external
// linkage, and no type or template depends on it: a store keeps the pointer that it was given.
#if __has_include(<xxhash.h>)
namespace detail {
[[maybe_unused]] static std::uint64_t xxh3_of(const std::byte* bytes, std::size_t count,
                                              std::uint64_t seed) noexcept {
  return XXH3_64bits_withSeed(bytes, count, seed);
}
}  // namespace detail

/// XXH3, 64 bits. Null where xxhash.h was not found.
constexpr checksum_function xxh3 = detail::xxh3_of;
#else
constexpr checksum_function xxh3 = nullptr;
#endif

}  // namespace pulseinfer
