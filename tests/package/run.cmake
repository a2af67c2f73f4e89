# SPDX-License-Identifier: Apache-2.0
# cmake -D way= -D source= -D build= -D generator= -D compiler= -D cuda_compiler= -P run.cmake
# Configures, builds and runs the consumer in its way. An installed package is moved first: it must not
# remember where it was installed.
cmake_minimum_required(VERSION 3.24)

set(consumer "${CMAKE_CURRENT_LIST_DIR}/consumer")
set(work "${build}/package/${way}")
set(prefix "${work}/moved")
file(REMOVE_RECURSE "${work}")
file(MAKE_DIRECTORY "${work}")

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(install_and_move)
  run("${CMAKE_COMMAND}" --install "${build}" --prefix "${work}/installed")
  file(RENAME "${work}/installed" "${prefix}")
endfunction()

# A project with CMake, and what it is told.
function(build_project folder)
  run("${CMAKE_COMMAND}" -G "${generator}" -S "${folder}" -B "${work}/build" -D "way=${way}"
    -D "source=${source}" -D "CMAKE_CXX_COMPILER=${compiler}" ${ARGN})
  run("${CMAKE_COMMAND}" --build "${work}/build")
endfunction()

if(way STREQUAL "copied")
  # No CMake: a copy of the folder, and one command.
  file(COPY "${source}/include/" DESTINATION "${work}/include")
  run("${compiler}" -std=c++20 "-I${work}/include" "${consumer}/consumer.cpp" -pthread
    -o "${work}/consumer")
  run("${work}/consumer")

  # Whoever forgets the flag is told which.
  execute_process(COMMAND "${compiler}" -std=c++17 -fsyntax-only "-I${work}/include"
    "${consumer}/consumer.cpp" ERROR_VARIABLE text RESULT_VARIABLE status)
  string(REGEX MATCH "error: [^\n]*" first "${text}")
  if(status EQUAL 0 OR NOT first MATCHES "-std=c\\+\\+20")
    message(FATAL_ERROR "the first error does not name the flag: ${first}")
  endif()
elseif(way STREQUAL "pkg_config")
  find_program(pkg_config NAMES pkg-config pkgconf)
  if(NOT pkg_config)
    message("\nskipped: there is no pkg-config")
    return()
  endif()
  install_and_move()
  set(ENV{PKG_CONFIG_PATH} "${prefix}/share/pkgconfig")
  execute_process(COMMAND "${pkg_config}" --cflags --libs pulseinfer OUTPUT_VARIABLE flags
    COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(flags UNIX_COMMAND "${flags}")
  run("${compiler}" -std=c++20 "${consumer}/consumer.cpp" ${flags} -o "${work}/consumer")
  run("${work}/consumer")
  file(STRINGS "${source}/include/pulseinfer/version.hpp" parts REGEX "define PULSEINFER_VERSION_")
  string(REGEX MATCHALL "[0-9]+" parts "${parts}")
  list(JOIN parts "." version)
  run("${pkg_config}" "--exact-version=${version}" pulseinfer)
elseif(way STREQUAL "thrust_first")
  install_and_move()
  build_project("${consumer}/cuda" "-DCMAKE_PREFIX_PATH=${prefix}"
    "-DCMAKE_CUDA_COMPILER=${cuda_compiler}" -D CMAKE_CUDA_ARCHITECTURES=80-virtual)
elseif(way STREQUAL "exported")
  # An engine that vendors the library and is itself installed, moved, and consumed.
  build_project("${consumer}/exporting")
  run("${CMAKE_COMMAND}" --install "${work}/build" --prefix "${work}/engine_installed")
  file(RENAME "${work}/engine_installed" "${prefix}")
  file(REMOVE_RECURSE "${work}/build")
  build_project("${consumer}/exporting/user" "-DCMAKE_PREFIX_PATH=${prefix}")
  run("${work}/build/user")
else()
  if(way STREQUAL "find_package")
    install_and_move()
  endif()
  build_project("${consumer}" "-DCMAKE_PREFIX_PATH=${prefix}")
  run("${work}/build/consumer")
  if(EXISTS "${work}/build/consumer_cuda")
    run("${work}/build/consumer_cuda")
  endif()
endif()
