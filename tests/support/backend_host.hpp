// SPDX-License-Identifier: Apache-2.0
/// @file
/// The host backend as the backend under test.
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "pulseinfer/backend/host.hpp"
#include "support/hold.hpp"

namespace test {

using backend = pulseinfer::host_backend;
inline constexpr const char* backend_name = "host";
inline constexpr bool device_memory_is_host_readable = true;

inline backend make_backend() {
  return backend{};
}

/// Calls f(backend) for each configuration worth testing.
template <class F>
void each_backend(F&& f) {
  for (const int workers : {1, 3}) {
    INFO("host backend, workers ", workers);
    f(backend{pulseinfer::host_options{.workers = workers, .link = {}}});
  }
}

/// A kernel on the host can wait for the host.
template <>
class hold<backend> {
 public:
  static constexpr bool is_exact = true;

  hold(const backend& of, backend::stream& stream) : done_(backend(of).make_event()) {
    backend copy = of;
    copy.for_each({1, 1}, {}, 0, spin{released_.get()}, stream);
    copy.record(done_, stream);
  }
  hold(const hold&) = delete;
  hold& operator=(const hold&) = delete;
  ~hold() { release(); }

  void release() noexcept { released_->store(true); }

 private:
  struct spin {
    const std::atomic<bool>* released;
    void operator()(std::int64_t, std::int64_t) const {
      while (!released->load()) std::this_thread::yield();
    }
  };
  std::unique_ptr<std::atomic<bool>> released_ = std::make_unique<std::atomic<bool>>(false);
  backend::event done_;  ///< its destructor waits until the flag is no longer looked at
};

}  // namespace test
