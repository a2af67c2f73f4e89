// SPDX-License-Identifier: Apache-2.0
/// @file
/// Units of a block store as kernels find them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

namespace detail {

/// A word of mapped memory that another thread, or the host, may write meanwhile: what was written
/// before it can be read after it, on a device by the kernels behind this one.
PULSEINFER_HD inline std::int32_t load_mapped(const std::int32_t* word) {
#if defined(__CUDA_ARCH__)
  return *static_cast<const volatile std::int32_t*>(word);
#else
  return std::atomic_ref<std::int32_t>(*const_cast<std::int32_t*>(word))
      .load(std::memory_order_acquire);
#endif
}

}  // namespace detail

/// The units of a sequence and layer, as kernels find them in the store: what a lease finds on the
/// host. Its addresses are those that the device knows. An empty one finds nothing.
///
/// @par Life  of the lease that gave it
struct store_view {
  const std::int32_t* slots =
      nullptr;  ///< [blocks] slot of a block, negative where it is not stored
  const std::byte* payload = nullptr;  ///< [slots, unit_bytes]
  std::int64_t unit_bytes = 0;
  std::int64_t blocks = 0;

  /// The bytes of a block, or null where the store has none. Read in a kernel, they may be followed
  /// in the same or a later one.
  [[nodiscard]] PULSEINFER_HD const std::byte* find(std::int64_t block) const {
    if (slots == nullptr || block < 0 || block >= blocks) return nullptr;
    const std::int32_t slot = detail::load_mapped(slots + block);
    return slot < 0 ? nullptr : payload + slot * unit_bytes;
  }
};

}  // namespace pulseinfer
