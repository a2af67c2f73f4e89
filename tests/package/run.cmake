# SPDX-License-Identifier: Apache-2.0
# cmake -D way=find_package|add_subdirectory -D source= -D build= -D generator= -D compiler= -P run.cmake
# Configures, builds and runs the consumer beside this file. The installed package is moved first: it
# must not remember where it was installed.
cmake_minimum_required(VERSION 3.24)

function(run)
  execute_process(COMMAND ${ARGV} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

set(work "${build}/package/${way}")
file(REMOVE_RECURSE "${work}")
set(prefix "${work}/moved")
if(way STREQUAL "find_package")
  run("${CMAKE_COMMAND}" --install "${build}" --prefix "${work}/installed")
  file(RENAME "${work}/installed" "${prefix}")
endif()
run("${CMAKE_COMMAND}" -G "${generator}" -S "${CMAKE_CURRENT_LIST_DIR}" -B "${work}/build"
  -D "way=${way}" -D "source=${source}" -D "CMAKE_PREFIX_PATH=${prefix}"
  -D "CMAKE_CXX_COMPILER=${compiler}")
run("${CMAKE_COMMAND}" --build "${work}/build")
run("${work}/build/consumer")
if(EXISTS "${work}/build/consumer_cuda")
  run("${work}/build/consumer_cuda")
endif()
