// SPDX-License-Identifier: Apache-2.0
#include <thrust/version.h>

#include "pulseinfer/backend/cuda.cuh"

#include <cub/version.cuh>

static_assert(CUB_VERSION == EXPECTED_CUB_VERSION, "another CUB than the toolkit's");
static_assert(CUB_VERSION / 100 == THRUST_VERSION / 100, "CUB and Thrust of different toolkits");

int main() {
  pulseinfer::cuda_backend backend;
  return backend.top_k_workspace_bytes({1, 64, 8}) > 0 ? 0 : 1;
}
