// SPDX-License-Identifier: Apache-2.0
/// @file
/// Typed arrays in a backend's memory, owned and movable.
#pragma once

#include <cstddef>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Where an array lies.
enum class memory_kind : std::uint8_t { device, pinned };

/// An array of `size` elements in device or pinned memory. Contents are not initialised; pinned
/// memory can be read and written by the host, device memory only by copies and kernels.
///
/// @tparam T  trivially copyable
/// @par Threads  one at a time may move or destroy it; the memory is whose streams use it
/// @par Life     no stream still uses the memory when it is destroyed
template <class T, memory_kind Kind, backend Backend>
class buffer {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  /// @param backend  whose memory it is; a copy is kept
  /// @param size     in elements; an empty array allocates nothing
  /// @throws out_of_memory      when the memory cannot be had
  /// @throws std::length_error  when its bytes overflow the address space
  buffer(Backend backend, std::size_t size) : backend_(std::move(backend)), size_(size) {
    detail::expects<std::length_error>(size <= std::numeric_limits<std::size_t>::max() / sizeof(T),
                                       "buffer: ", size, " elements of ", sizeof(T),
                                       " bytes overflow the address space");
    if constexpr (Kind == memory_kind::device) {
      data_ = static_cast<T*>(backend_.allocate_device(size_ * sizeof(T)));
    } else {
      data_ = static_cast<T*>(backend_.allocate_pinned(size_ * sizeof(T)));
    }
  }
  buffer(buffer&& other) noexcept
      // NOLINTNEXTLINE(performance-move-constructor-init): the moved-from buffer keeps its backend
      : backend_(other.backend_),
        data_(std::exchange(other.data_, nullptr)),
        size_(std::exchange(other.size_, 0)) {}
  buffer& operator=(buffer&& other) noexcept {
    std::swap(backend_, other.backend_);
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~buffer() {
    if (data_ == nullptr) return;
    if constexpr (Kind == memory_kind::device) {
      backend_.deallocate_device(data_, size_ * sizeof(T));
    } else {
      backend_.deallocate_pinned(data_, size_ * sizeof(T));
    }
  }

  /// The array: dereferenced by the host only where it is pinned memory.
  [[nodiscard]] T* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return size_ * sizeof(T); }
  [[nodiscard]] std::span<T> span() const noexcept requires(Kind == memory_kind::pinned) {
    return {data_, size_};
  }
  [[nodiscard]] T& operator[](std::size_t i) const noexcept requires(Kind == memory_kind::pinned) {
    return data_[i];
  }
  /// The address under which kernels reach the array.
  [[nodiscard]] T* device_data() const {
    if constexpr (Kind == memory_kind::device) {
      return data_;
    } else {
      return data_ == nullptr ? nullptr : backend_.device_pointer(data_);
    }
  }

 private:
  Backend backend_;
  T* data_ = nullptr;
  std::size_t size_ = 0;
};

/// An array in device memory.
template <class T, backend Backend>
using device_buffer = buffer<T, memory_kind::device, Backend>;
/// An array in pinned memory, which kernels reach under `device_data()`.
template <class T, backend Backend>
using pinned_buffer = buffer<T, memory_kind::pinned, Backend>;

}  // namespace pulseinfer
