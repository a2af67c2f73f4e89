# SPDX-License-Identifier: Apache-2.0
# cmake -D fault=NUMBER... -D source= -P sources.cmake
# Looks in the sources for what must not be there.
cmake_minimum_required(VERSION 3.24)

function(forbid pattern)
  foreach(file IN LISTS ARGN)
    file(STRINGS "${file}" lines REGEX "${pattern}")
    foreach(line IN LISTS lines)
      file(RELATIVE_PATH name "${source}" "${file}")
      message(SEND_ERROR "${name}: ${line}")
    endforeach()
  endforeach()
endfunction()

file(GLOB_RECURSE headers "${source}/include/*.hpp" "${source}/include/*.cuh")
file(GLOB_RECURSE cuda "${source}/include/*.cuh" "${source}/tests/*.cu" "${source}/tests/*.cuh"
  "${source}/benchmarks/*.cu" "${source}/examples/*.cu")
file(GLOB lists "${source}/CMakeLists.txt" "${source}/cmake/*.cmake" "${source}/cmake/*.in"
  "${source}/*/CMakeLists.txt")
if(NOT headers OR NOT cuda OR NOT lists)
  message(FATAL_ERROR "there are no sources in ${source}")
endif()

if(fault MATCHES "^81 ")
  # The standard library, the CUDA runtime, CUB (whose newer calls take a stream of CCCL's) and the
  # system; nothing else, so no fmt.
  foreach(file IN LISTS headers)
    file(STRINGS "${file}" lines REGEX "^#include ")
    foreach(line IN LISTS lines)
      if(NOT line MATCHES "^#include \"pulseinfer/[a-z0-9_/]+\\.(hpp|cuh)\""
          AND NOT line MATCHES "^#include <(cub/.*|cuda/stream_ref|cuda_runtime.*|[a-z_]+|[a-z]+\\.h|sys/[a-z]+\\.h)>")
        message(SEND_ERROR "${file}: ${line}")
      endif()
    endforeach()
  endforeach()
elseif(fault MATCHES "^82 ")
  forbid("FetchContent|ExternalProject|file *\\( *DOWNLOAD|doctest_discover_tests|CPMAddPackage"
    ${lists})
elseif(fault MATCHES "^86 ")
  # Signatures that changed, and fields that went; attributes and events have not.
  forbid("cudaMemPrefetchAsync|cudaMemAdvise|cudaGraphAddDependencies|cudaMemcpyBatchAsync *\\(" ${cuda})
  forbid("[.>](clockRate|memoryClockRate|deviceOverlap|kernelExecTimeoutEnabled|computeMode)" ${cuda})
  forbid("[.>](singleToDoublePrecisionPerfRatio|cooperativeMultiDeviceLaunch|maxTexture1DLinear)" ${cuda})
else()
  message(FATAL_ERROR "no fault ${fault}")
endif()
