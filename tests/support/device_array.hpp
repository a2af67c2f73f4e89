// SPDX-License-Identifier: Apache-2.0
/// @file
/// Buffers as tests use them: values in, values out. Device memory is reached by copies only.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"

namespace test {

/// `size` elements of pinned memory, not initialised. The host reads and writes it in place.
template <class T, class Backend>
class pinned_array : public pulseinfer::pinned_buffer<T, Backend> {
 public:
  pinned_array(const Backend& machine, std::size_t size)
      : pulseinfer::pinned_buffer<T, Backend>(machine, size) {}

  [[nodiscard]] std::vector<T> values() const {
    return std::vector<T>(this->data(), this->data() + this->size());
  }
  void fill(const T& value) const { std::fill_n(this->data(), this->size(), value); }
};

/// `size` elements of device memory, not initialised.
template <class T, class Backend>
class device_array : public pulseinfer::device_buffer<T, Backend> {
 public:
  using stream_ref = typename Backend::stream_ref;

  device_array(const Backend& machine, std::size_t size)
      : pulseinfer::device_buffer<T, Backend>(machine, size), backend_(machine) {}
  /// Holds `values`; they are there when this returns.
  device_array(const Backend& machine, const std::vector<T>& values, stream_ref stream)
      : device_array(machine, values.size()) {
    upload(values, stream);
  }

  /// Behind what the stream has been given; returns when it is done.
  void upload(const std::vector<T>& values, stream_ref stream) {
    pinned_array<T, Backend> staging(backend_, values.size());
    std::copy(values.begin(), values.end(), staging.data());
    backend_.copy_async(this->data(), staging.data(), staging.bytes(),
                        pulseinfer::copy_direction::host_to_device, stream);
    backend_.sync(stream);
  }
  [[nodiscard]] std::vector<T> download(stream_ref stream) {
    pinned_array<T, Backend> staging(backend_, this->size());
    backend_.copy_async(staging.data(), this->data(), this->bytes(),
                        pulseinfer::copy_direction::device_to_host, stream);
    backend_.sync(stream);
    return staging.values();
  }

 private:
  Backend backend_;
};

}  // namespace test
