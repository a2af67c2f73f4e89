# SPDX-License-Identifier: Apache-2.0
# How our own tests, examples and benchmarks are built and run. Nothing here reaches a consumer.
#
#   pulseinfer_add_test(block_store BACKENDS host simulated cuda)
#
# compiles tests/block_store.cpp once for each backend, behind tests/support/backend_<backend>.hpp
# (.cuh for cuda), into the executable tests_<backend>, and registers the ctest entries
# host.block_store, simulated.block_store and cuda.block_store. A test of a header that knows no
# backend has no BACKENDS and is host.<header>. The test cases stand in tests/<header>.cpp itself:
# doctest selects them by that file name.
#
# Most of the time that a compiler takes for a test goes into what it includes, so a unit holds
# several: first what they include, then each in a namespace of its own. They follow each other in
# the order of the list until they are PULSEINFER_TEST_UNIT_BYTES long; 0 compiles each alone.
set(PULSEINFER_TEST_UNIT_BYTES 100000 CACHE STRING
  "Tests: how many bytes of them are compiled together; 0: each alone, to work on one")

option(PULSEINFER_TEST_SIMULATED "Tests: also on the simulated machine" ON)

# What all our programs have in common: warnings, and for CUDA the architectures, the shared runtime
# and a search path that LD_LIBRARY_PATH precedes (RUNPATH, not RPATH), so that the runtime can be
# replaced.
function(pulseinfer_own_target target)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wshadow>
    $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wno-sign-conversion>  # g++'s -Wconversion has none either
    $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
  if(PULSEINFER_WARNINGS_AS_ERRORS)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:-Werror> $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings>)
  endif()
  if(PULSEINFER_CUDA_RUNTIME_DIR)
    # The header of its counters, ptxsim_stats.h, if it has any.
    target_include_directories(${target} SYSTEM PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:${PULSEINFER_CUDA_RUNTIME_DIR}>)
  endif()
  target_compile_definitions(${target} PRIVATE PULSEINFER_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  target_link_options(${target} PRIVATE LINKER:--enable-new-dtags)
  set_target_properties(${target} PROPERTIES CXX_EXTENSIONS OFF CUDA_EXTENSIONS OFF
    CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON
    CUDA_ARCHITECTURES "${PULSEINFER_CUDA_ARCHITECTURES}" CUDA_RUNTIME_LIBRARY Shared)
endfunction()

# Registers `command` as a ctest. With CUDA it starts through pulseinfer_on_device, which ends with
# 77, "skipped", where nothing can run kernels; and on the CPU runtime it is registered three times:
# as it is, .lazy and .random, which are two orders of execution that streams and events allow.
#
#   pulseinfer_register_test(NAME cuda.transfer COMMAND tests_cuda --some-option [CUDA] [SERIAL])
function(pulseinfer_register_test)
  cmake_parse_arguments(PARSE_ARGV 0 arg "CUDA;SERIAL" "NAME" "COMMAND")
  set(names ${arg_NAME})
  if(arg_CUDA)
    pulseinfer_make_on_device()
    list(POP_FRONT arg_COMMAND program)
    list(PREPEND arg_COMMAND pulseinfer_on_device "$<TARGET_FILE:${program}>")
    if(PULSEINFER_CUDA_RUNTIME_DIR)
      list(APPEND names ${arg_NAME}.lazy ${arg_NAME}.random)
    endif()
  endif()
  foreach(name IN LISTS names)
    set(environment "")
    if(arg_CUDA AND PULSEINFER_CUDA_RUNTIME_DIR)
      set(environment "LD_LIBRARY_PATH=path_list_prepend:${PULSEINFER_CUDA_RUNTIME_DIR}"
        "PULSEINFER_REQUIRE_DEVICE=set:1")
      if(name MATCHES "\\.lazy$")
        list(APPEND environment "PTXSIM_ASYNC=set:lazy" "PTXSIM_SEED=set:1")
      elseif(name MATCHES "\\.random$")
        list(APPEND environment "PTXSIM_ASYNC=set:random" "PTXSIM_SEED=set:7")
      endif()
    endif()
    add_test(NAME ${name} COMMAND ${arg_COMMAND})
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ${arg_SERIAL}
      ENVIRONMENT_MODIFICATION "${environment}")
    if(arg_CUDA)
      set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77)
    endif()
  endforeach()
endfunction()

function(pulseinfer_make_on_device)
  if(NOT TARGET pulseinfer_on_device)
    add_executable(pulseinfer_on_device "${PROJECT_SOURCE_DIR}/cmake/on_device.cpp")
    target_link_libraries(pulseinfer_on_device PRIVATE pulseinfer::cuda)
    pulseinfer_own_target(pulseinfer_on_device)
  endif()
endfunction()

# doctest, the one main of all test programs and the count of their allocations, compiled once.
function(pulseinfer_make_test_main)
  if(TARGET pulseinfer_test_main)
    return()
  endif()
  find_package(doctest CONFIG QUIET)
  add_library(pulseinfer_test_main OBJECT "${PROJECT_SOURCE_DIR}/tests/support/main.cpp"
    "${PROJECT_SOURCE_DIR}/tests/support/allocations.cpp")
  target_include_directories(pulseinfer_test_main PRIVATE "${PROJECT_SOURCE_DIR}/tests")
  if(TARGET doctest::doctest)
    target_link_libraries(pulseinfer_test_main PUBLIC doctest::doctest)
  else()
    find_path(PULSEINFER_DOCTEST_DIR doctest/doctest.h)
    if(NOT PULSEINFER_DOCTEST_DIR)
      message(FATAL_ERROR "pulseinfer: the tests need doctest: install it (Debian, Ubuntu: apt-get "
        "install doctest-dev), or set PULSEINFER_BUILD_TESTS=OFF")
    endif()
    target_include_directories(pulseinfer_test_main SYSTEM PUBLIC "${PULSEINFER_DOCTEST_DIR}")
  endif()
  target_link_libraries(pulseinfer_test_main PUBLIC pulseinfer::pulseinfer)
  target_compile_options(pulseinfer_test_main PRIVATE $<$<CONFIG:Release>:-O1>)
  pulseinfer_own_target(pulseinfer_test_main)
endfunction()

# Tests of one header, see the top of this file. SERIAL: no other test runs beside it, for tests
# that measure time.
function(pulseinfer_add_test header)
  cmake_parse_arguments(PARSE_ARGV 1 arg "SERIAL" "" "BACKENDS")
  set(serial "")
  if(arg_SERIAL)
    set(serial SERIAL)
  endif()
  # Its includes come before the namespaces of a unit, so a change of them is a change of the unit.
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}.cpp")
  set(kind with)
  if(NOT arg_BACKENDS)
    set(arg_BACKENDS host)
    set(kind without)
  endif()

  foreach(backend IN LISTS arg_BACKENDS)
    if(backend STREQUAL "simulated" AND NOT PULSEINFER_TEST_SIMULATED)
      continue()
    endif()
    set(is_cuda "")
    if(backend STREQUAL "cuda")
      if(NOT TARGET pulseinfer_cuda)
        continue()
      endif()
      set(is_cuda CUDA)
      # CUB costs a third of the time of a unit: those that select have it, the others do not.
      file(STRINGS "${header}.cpp" selects LIMIT_COUNT 1
        REGEX "#include \"(conformance|pulseinfer)/(backend|consensus|top_k|backend/cuda)[.]")
      if(selects)
        set(kind with_cub)
      endif()
    endif()
    set(program tests_${backend})
    if(NOT TARGET ${program})
      pulseinfer_make_test_program(${backend})
    endif()
    set_property(TARGET ${program} APPEND PROPERTY PULSEINFER_TESTS_${kind} ${header})
    set_property(TARGET ${program} APPEND PROPERTY PULSEINFER_TESTED "*/${header}.cpp")
    pulseinfer_register_test(NAME ${backend}.${header}
      COMMAND ${program} "--source-file=*/${header}.cpp" ${is_cuda} ${serial})
  endforeach()
endfunction()

function(pulseinfer_make_test_program backend)
  pulseinfer_make_test_main()
  set(program tests_${backend})
  add_executable(${program})
  target_include_directories(${program} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  target_link_libraries(${program} PRIVATE pulseinfer_test_main)
  set(extension cpp)
  set(support hpp)
  if(backend STREQUAL "cuda")
    target_link_libraries(${program} PRIVATE pulseinfer::cuda)
    set(extension cu)
    set(support cuh)
  endif()
  pulseinfer_own_target(${program})
  set(instances "${CMAKE_CURRENT_BINARY_DIR}/instances.${backend}.${extension}")
  file(CONFIGURE OUTPUT "${instances}" @ONLY CONTENT
    "#include \"support/backend_${backend}.${support}\"\n#include \"support/instances.cpp\"\n")
  target_sources(${program} PRIVATE "${instances}")
  # They ask whether, not how fast: this halves the time it takes to build them. What a compiler
  # makes of the code is the host's tests' to see, the simulated machine has no need of it.
  set(optimised -O1)
  if(backend STREQUAL "simulated")
    set(optimised -O0)
  endif()
  target_compile_options(${program} PRIVATE
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:${optimised}>")
endfunction()

# After the last pulseinfer_add_test: writes the units that the test programs are compiled from.
function(pulseinfer_write_test_units)
  foreach(backend IN ITEMS host simulated cuda)
    if(NOT TARGET tests_${backend})
      continue()
    endif()
    foreach(kind IN ITEMS without with with_cub)
      get_target_property(headers tests_${backend} PULSEINFER_TESTS_${kind})
      set(unit "")
      set(bytes 0)
      foreach(header IN LISTS headers)
        if(NOT header)  # there are none of this kind
          continue()
        endif()
        list(APPEND unit ${header})
        file(SIZE "${CMAKE_CURRENT_SOURCE_DIR}/${header}.cpp" size)
        math(EXPR bytes "${bytes} + ${size}")
        if(bytes GREATER_EQUAL PULSEINFER_TEST_UNIT_BYTES)
          pulseinfer_write_test_unit(${backend} ${kind} ${unit})
          set(unit "")
          set(bytes 0)
        endif()
      endforeach()
      if(unit)
        pulseinfer_write_test_unit(${backend} ${kind} ${unit})
      endif()
    endforeach()
  endforeach()
endfunction()

# One unit, named after the first of its tests.
function(pulseinfer_write_test_unit backend kind)
  set(includes "")
  set(extension cpp)
  if(backend STREQUAL "cuda")
    set(extension cu)
    list(APPEND includes "\"support/backend_cuda.cuh\"")
    if(kind STREQUAL "with_cub")
      list(APPEND includes "\"pulseinfer/backend/cuda.cuh\"")
    endif()
  elseif(kind STREQUAL "with")
    list(APPEND includes "\"support/backend_${backend}.hpp\"")
  endif()
  set(tests "")
  foreach(header IN LISTS ARGN)
    file(STRINGS "${header}.cpp" lines REGEX "^ *#include [<\"]")
    list(TRANSFORM lines REPLACE "^ *#include " "")
    if(lines MATCHES "\"support/[a-z_]*rig.hpp\"")
      list(APPEND includes "\"support/instances.hpp\"")
    endif()
    list(APPEND includes ${lines})
    string(APPEND tests "namespace tests_of_${header} {\n#include \"${header}.cpp\"\n}\n")
  endforeach()
  list(REMOVE_DUPLICATES includes)
  list(TRANSFORM includes REPLACE "(.+)" "#include \\1\n")
  # A header of a runtime for CUDA on the CPU, which only some have.
  list(TRANSFORM includes REPLACE "(.*)(\"ptxsim_stats.h\")(.*)" "#if __has_include(\\2)\n\\1\\2\\3#endif\n")
  list(JOIN includes "" includes)
  list(GET ARGN 0 name)
  set(unit "${CMAKE_CURRENT_BINARY_DIR}/${name}.${backend}.${extension}")
  file(CONFIGURE OUTPUT "${unit}" CONTENT "${includes}${tests}" @ONLY)
  target_sources(tests_${backend} PRIVATE "${unit}")
endfunction()

# After the last pulseinfer_add_test: a test case that no ctest entry selects, because it stands in
# another file than tests/<header>.cpp, fails <backend>.strays.
function(pulseinfer_forbid_stray_tests)
  foreach(program IN ITEMS tests_host tests_simulated)
    if(TARGET ${program})
      get_target_property(tested ${program} PULSEINFER_TESTED)
      list(JOIN tested "," tested)
      string(REPLACE "tests_" "" backend ${program})
      add_test(NAME ${backend}.strays
        COMMAND ${program} --list-test-cases "--source-file-exclude=${tested}")
      set_tests_properties(${backend}.strays PROPERTIES
        PASS_REGULAR_EXPRESSION "passing the current filters: 0\n")
    endif()
  endforeach()
endfunction()

# For programs that only have to run: PTX of the oldest architecture, which every device can finish.
function(pulseinfer_one_architecture target)
  set(oldest "")
  foreach(architecture IN LISTS PULSEINFER_CUDA_ARCHITECTURES)
    if(architecture MATCHES "^([0-9]+)(-virtual)?$" AND (NOT oldest OR CMAKE_MATCH_1 LESS oldest))
      set(oldest "${CMAKE_MATCH_1}")
    endif()
  endforeach()
  if(oldest)
    set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${oldest}-virtual")
  endif()
endfunction()

# examples/<name>.cpp (or .cu, only with CUDA) as the program example_<name> and the ctest
# example.<name>. An example passes by returning zero.
function(pulseinfer_add_example name)
  set(is_cuda "")
  set(source ${name}.cpp)
  set(library pulseinfer::pulseinfer)
  if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${name}.cu")
    if(NOT TARGET pulseinfer_cuda)
      return()
    endif()
    set(is_cuda CUDA)
    set(source ${name}.cu)
    set(library pulseinfer::cuda)
  endif()
  add_executable(example_${name} ${source})
  target_link_libraries(example_${name} PRIVATE ${library})
  pulseinfer_own_target(example_${name})
  pulseinfer_register_test(NAME example.${name} COMMAND example_${name} ${is_cuda})
endfunction()

# benchmarks/<header>.cpp as the program bench_<header>, and benchmarks/<header>.cu (only with CUDA)
# as bench_<header>_cuda. benchmarks/support has their main.
function(pulseinfer_add_benchmark header)
  if(NOT TARGET pulseinfer_bench_main)
    find_package(benchmark CONFIG QUIET)
    if(NOT TARGET benchmark::benchmark)
      message(FATAL_ERROR "pulseinfer: the benchmarks need Google Benchmark: install it (Debian, "
        "Ubuntu: apt-get install libbenchmark-dev), or set PULSEINFER_BUILD_BENCHMARKS=OFF")
    endif()
    add_library(pulseinfer_bench_main OBJECT support/main.cpp)
    target_link_libraries(pulseinfer_bench_main PUBLIC benchmark::benchmark pulseinfer::pulseinfer)
    target_include_directories(pulseinfer_bench_main PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")
    pulseinfer_own_target(pulseinfer_bench_main)
  endif()
  set(found FALSE)
  if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${header}.cpp")
    set(found TRUE)
    add_executable(bench_${header} ${header}.cpp)
    target_link_libraries(bench_${header} PRIVATE pulseinfer_bench_main)
    pulseinfer_own_target(bench_${header})
    add_dependencies(benchmarks bench_${header})
  endif()
  if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/${header}.cu")
    set(found TRUE)
    if(TARGET pulseinfer_cuda)
      add_executable(bench_${header}_cuda ${header}.cu)
      target_link_libraries(bench_${header}_cuda PRIVATE pulseinfer_bench_main pulseinfer::cuda)
      pulseinfer_own_target(bench_${header}_cuda)
      add_dependencies(benchmarks bench_${header}_cuda)
    endif()
  endif()
  if(NOT found)
    message(FATAL_ERROR "pulseinfer_add_benchmark: there is no benchmarks/${header}.cpp or .cu")
  endif()
endfunction()
