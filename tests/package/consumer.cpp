// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/version.hpp"
#if defined(WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace {

struct identity_table {
  [[nodiscard]] static long page(long, long block) { return block; }
};
static_assert(pulseinfer::page_table<identity_table>);

}  // namespace

int main() {
#if defined(WITH_CUDA)
  int version = 0;
  if (cudaRuntimeGetVersion(&version) != cudaSuccess) return 1;
#endif
  std::printf("pulseinfer %d.%d.%d\n", PULSEINFER_VERSION_MAJOR, PULSEINFER_VERSION_MINOR,
              PULSEINFER_VERSION_PATCH);
}
