// SPDX-License-Identifier: Apache-2.0
// One translation unit of several that hold the whole library. It runs a round trip of it, through the
// entry point that its compile definition names, and says by which name the linker knows one of its types.
// (unit.cu is this file, compiled by nvcc.)
#include "unit.hpp"
#include "all_headers.hpp"
#include "sparse_decode.hpp"

#include <typeinfo>

unit_result PULSEINFER_UNIT() {
#if defined(__CUDACC__)
  using backend = pulseinfer::cuda_backend;
  const int status = sparse_decode(backend{});
#else
  using backend = pulseinfer::host_backend;
  const int status = sparse_decode(backend{}) +
                     sparse_decode(pulseinfer::simulated_backend{pulseinfer::fuzzed{.seed = 1}});
#endif
  return {status, typeid(pulseinfer::sequence_id).name()};
}
