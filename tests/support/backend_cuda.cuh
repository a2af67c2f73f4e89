// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tests of this translation unit run on the CUDA backend.
#pragma once

#include "pulseinfer/backend/cuda.cuh"

namespace test {

using backend = pulseinfer::cuda_backend;
inline constexpr const char* backend_name = "cuda";
inline constexpr bool device_memory_is_host_readable = false;

inline backend make_backend() {
  return backend{};
}

/// Calls f with each kind of backend that a test should pass on.
template <class F>
void each_backend(F&& f) {
  f(backend{pulseinfer::cuda_options{.workers = 1}});
  f(backend{pulseinfer::cuda_options{.workers = 3}});
}

}  // namespace test
