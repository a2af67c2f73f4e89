// SPDX-License-Identifier: Apache-2.0
#include "pulseinfer/backend/cuda.cuh"
#include "sparse_decode.hpp"

int main() {
  return sparse_decode(pulseinfer::cuda_backend{});
}
