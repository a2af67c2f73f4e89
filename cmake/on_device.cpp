// SPDX-License-Identifier: Apache-2.0
// on_device PROGRAM [ARGUMENTS...]   becomes PROGRAM where the CUDA runtime finds a device, real or
// run on the CPU. Elsewhere it says why and ends with 77, which ctest counts as skipped; with
// PULSEINFER_REQUIRE_DEVICE=1, where the caller knows that there must be one, with 1.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string_view>

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s PROGRAM [ARGUMENTS...]\n", argv[0]);
    return 2;
  }
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  if (status == cudaSuccess && devices > 0) {
    execv(argv[1], argv + 1);
    std::perror(argv[1]);
    return 1;
  }
  const char* required = std::getenv("PULSEINFER_REQUIRE_DEVICE");
  const bool fail = required != nullptr && std::string_view{required} == "1";
  std::fprintf(stderr, "%s: no CUDA device: %s\n", fail ? "failed" : "skipped",
               status == cudaSuccess ? "the runtime counts none" : cudaGetErrorString(status));
  return fail ? 1 : 77;
}
