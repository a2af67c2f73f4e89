// SPDX-License-Identifier: Apache-2.0
/// @file
/// The CUDA backend as the backend under test, without its top-k: tests that select include
/// pulseinfer/backend/cuda.cuh as well.
#pragma once

#include <doctest/doctest.h>

#include "pulseinfer/backend/cuda_core.cuh"
#include "support/hold.hpp"

namespace test {

using backend = pulseinfer::cuda_backend;
inline constexpr const char* backend_name = "cuda";
inline constexpr bool device_memory_is_host_readable = false;

inline backend make_backend() {
  return backend{};
}

/// Calls f(backend) for each configuration worth testing.
template <class F>
void each_backend(F&& f) {
  for (const int workers : {1, 3}) {
    INFO("CUDA backend, workers ", workers);
    f(backend{pulseinfer::cuda_options{.workers = workers}});
  }
}

}  // namespace test
