// SPDX-License-Identifier: Apache-2.0
/// @file
/// Holding a stream back in a test, as far as each backend can, and what else tests must know of
/// one.
#pragma once

#include <cstddef>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"

namespace test {

/// Whether several host threads may use one backend.
template <class Backend>
inline constexpr bool takes_threads = true;

/// What is enqueued on `stream` afterwards runs late: where `is_exact`, not before `release()`;
/// elsewhere behind a chain of copies that takes a while. To be released before anything is synced
/// that waits for the stream.
template <class Backend>
class hold {
 public:
  static constexpr bool is_exact = false;

  hold(const Backend& machine, typename Backend::stream& stream)
      : backend_(machine), done_(backend_.make_event()), memory_(backend_.allocate_device(bytes)) {
    auto* const second = static_cast<std::byte*>(memory_) + bytes / 2;
    for (int i = 0; i < 64; ++i) {
      backend_.copy_async(second, memory_, bytes / 2, pulseinfer::copy_direction::device_to_device,
                          stream);
    }
    backend_.record(done_, stream);
  }
  hold(const hold&) = delete;
  hold& operator=(const hold&) = delete;
  ~hold() {
    try {
      backend_.sync(done_);
    } catch (const pulseinfer::device_error&) {  // the test that made it fail has seen it
    }
    backend_.deallocate_device(memory_, bytes);
  }

  void release() noexcept {}

 private:
  static constexpr std::size_t bytes = 128 * 1024;
  Backend backend_;
  typename Backend::event done_;
  void* memory_;
};

}  // namespace test
