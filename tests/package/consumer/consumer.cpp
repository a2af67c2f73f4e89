// SPDX-License-Identifier: Apache-2.0
// There and back on the host backend: it needs the headers, C++20 and threads.
#include <cstddef>
#include <cstdio>

#include "pulseinfer/pulseinfer.hpp"
#if defined(WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

int main() {
#if defined(WITH_CUDA)
  int version = 0;
  if (cudaRuntimeGetVersion(&version) != cudaSuccess) return 1;
#endif
  using namespace pulseinfer;
  host_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  pinned_buffer<int, host_backend> host(backend, 1);
  device_buffer<int, host_backend> device(backend, 1);
  host.data()[0] = 41;
  backend.copy_async(device.data(), host.data(), host.bytes(), copy_direction::host_to_device,
                     stream);
  backend.sync(stream);
  host.data()[0] = 0;
  backend.copy_async(host.data(), device.data(), host.bytes(), copy_direction::device_to_host,
                     stream);
  backend.sync(stream);
  std::printf("pulseinfer %d.%d.%d\n", PULSEINFER_VERSION_MAJOR, PULSEINFER_VERSION_MINOR,
              PULSEINFER_VERSION_PATCH);
  return host.data()[0] == 41 ? 0 : 1;
}
