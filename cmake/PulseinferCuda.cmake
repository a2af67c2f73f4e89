# SPDX-License-Identifier: Apache-2.0

# Enables the language CUDA for this project when nvcc is found and compiles. Sets `reason` in the
# caller: empty, or why there is no CUDA.
macro(pulseinfer_enable_cuda reason)
  set(${reason} "")
  if(NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # a toolkit that came since then counts
    if("$ENV{CUDACXX}" STREQUAL "")
      find_program(PULSEINFER_NVCC nvcc
        HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin" PATHS /usr/local/cuda/bin)
      mark_as_advanced(PULSEINFER_NVCC)
      if(PULSEINFER_NVCC)
        set(ENV{CUDACXX} "${PULSEINFER_NVCC}")
      endif()
    endif()
    if("$ENV{CUDACXX}" STREQUAL "")
      set(${reason} "no nvcc: PATH, CUDA_HOME and /usr/local/cuda were searched")
    else()
      include(CheckLanguage)
      check_language(CUDA)
      if(NOT CMAKE_CUDA_COMPILER)
        set(${reason} "$ENV{CUDACXX} does not compile; it may not support the g++ on PATH, see CUDAHOSTCXX")
      endif()
    endif()
  endif()
  if(NOT ${reason})
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES "${PULSEINFER_CUDA_ARCHITECTURES}")
    endif()
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_ID STREQUAL "NVIDIA" AND CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12)
      message(FATAL_ERROR "pulseinfer: C++20 needs nvcc 12 or newer; ${CMAKE_CUDA_COMPILER} is "
        "${CMAKE_CUDA_COMPILER_VERSION}. Choose another with CUDACXX, or set PULSEINFER_CUDA=OFF")
    endif()
    if(NOT DEFINED CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
      # CMake up to 3.25.1 does not know that nvcc has C++20.
      set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
      set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
    endif()
  elseif(NOT PULSEINFER_CUDA STREQUAL "AUTO")
    message(FATAL_ERROR "pulseinfer: PULSEINFER_CUDA is ${PULSEINFER_CUDA}, but ${${reason}}")
  endif()
endmacro()
