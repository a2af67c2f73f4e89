// SPDX-License-Identifier: Apache-2.0
// The demo on a CUDA device, or on a CPU runtime for CUDA.
#include "pulseinfer/backend/cuda.cuh"
#include "pulseinfer/pulseinfer.hpp"
#include "run.hpp"
#include "speedup.hpp"

namespace {

std::optional<double> speedup(const pulseinfer::kv_geometry& geometry) {
  pulseinfer::cuda_backend backend;
  if (!backend.measures_time()) return std::nullopt;
  return demo::staged_vs_per_block(backend, geometry);
}

}  // namespace

int main(int argc, char** argv) {
  return demo::guarded([&] {
    demo::command_line line = demo::parse(argc, argv);
    line.backend = "cuda";
    demo::run(pulseinfer::cuda_backend{}, line, speedup);
  });
}
