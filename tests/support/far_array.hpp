// SPDX-License-Identifier: Apache-2.0
/// @file
/// Arrays so long that their indices need more than 32 bits, of which only the end has memory.
#pragma once

#include <doctest/doctest.h>
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace test {

/// A row and a stride of which the product is beyond 2^31.
inline constexpr std::int64_t far_row = 2'066;
inline constexpr std::int64_t far_stride = 1'039'680;
static_assert(far_row * far_stride == 2'147'978'880);

/// Elements 0 to `elements` - 1, zeros; those before `used` are addresses without memory.
template <class T>
class far_array {
 public:
  far_array(std::int64_t elements, std::int64_t used)
      : bytes_(static_cast<std::size_t>(elements) * sizeof(T)),
        memory_(
            mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    REQUIRE(memory_ != MAP_FAILED);
    const std::size_t first = static_cast<std::size_t>(used) * sizeof(T) >> 16 << 16;
    REQUIRE(mprotect(static_cast<std::byte*>(memory_) + first, bytes_ - first,
                     PROT_READ | PROT_WRITE) == 0);
  }
  far_array(const far_array&) = delete;
  far_array& operator=(const far_array&) = delete;
  ~far_array() { munmap(memory_, bytes_); }

  [[nodiscard]] T* data() noexcept { return static_cast<T*>(memory_); }

 private:
  std::size_t bytes_;
  void* memory_;
};

}  // namespace test
