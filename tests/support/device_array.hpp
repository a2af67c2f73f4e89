// SPDX-License-Identifier: Apache-2.0
/// @file
/// Arrays in device and pinned memory for tests. Device memory is reached by copies only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "pulseinfer/concepts.hpp"

namespace test {

/// `size` elements of pinned memory, not initialised. The host reads and writes it in place.
template <class T, class Backend>
class pinned_array {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  pinned_array(const Backend& machine, std::size_t size)
      : backend_(machine),
        size_(size),
        data_(static_cast<T*>(backend_.allocate_pinned(size * sizeof(T)))) {}
  pinned_array(const pinned_array&) = delete;
  pinned_array& operator=(const pinned_array&) = delete;
  ~pinned_array() { backend_.deallocate_pinned(data_, bytes()); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] std::size_t bytes() const { return size_ * sizeof(T); }
  [[nodiscard]] T& operator[](std::size_t i) const { return data_[i]; }
  [[nodiscard]] std::vector<T> values() const { return std::vector<T>(data_, data_ + size_); }
  void fill(const T& value) const { std::fill(data_, data_ + size_, value); }

 private:
  Backend backend_;
  std::size_t size_;
  T* data_;
};

/// `size` elements of device memory, not initialised.
template <class T, class Backend>
class device_array {
 public:
  using stream_ref = typename Backend::stream_ref;

  device_array(const Backend& machine, std::size_t size)
      : backend_(machine),
        size_(size),
        data_(static_cast<T*>(backend_.allocate_device(size * sizeof(T)))) {}
  /// Holds `values`; they are there when this returns.
  device_array(const Backend& machine, const std::vector<T>& values, stream_ref stream)
      : device_array(machine, values.size()) {
    upload(values, stream);
  }
  device_array(const device_array&) = delete;
  device_array& operator=(const device_array&) = delete;
  ~device_array() { backend_.deallocate_device(data_, bytes()); }

  [[nodiscard]] T* data() const { return data_; }
  [[nodiscard]] std::size_t size() const { return size_; }
  [[nodiscard]] std::size_t bytes() const { return size_ * sizeof(T); }

  /// Behind what the stream has been given; returns when it is done.
  void upload(const std::vector<T>& values, stream_ref stream) {
    pinned_array<T, Backend> staging(backend_, values.size());
    std::copy(values.begin(), values.end(), staging.data());
    backend_.copy_async(data_, staging.data(), staging.bytes(),
                        pulseinfer::copy_direction::host_to_device, stream);
    backend_.sync(stream);
  }
  [[nodiscard]] std::vector<T> download(stream_ref stream) {
    pinned_array<T, Backend> staging(backend_, size_);
    backend_.copy_async(staging.data(), data_, bytes(), pulseinfer::copy_direction::device_to_host,
                        stream);
    backend_.sync(stream);
    return staging.values();
  }

 private:
  Backend backend_;
  std::size_t size_;
  T* data_;
};

}  // namespace test
