# SPDX-License-Identifier: Apache-2.0
# cmake -D from= -D to= -P other_version.cmake   copies the headers as of the next minor version.
cmake_minimum_required(VERSION 3.24)

file(REMOVE_RECURSE "${to}")
file(COPY "${from}/pulseinfer" DESTINATION "${to}")
set(version "${to}/pulseinfer/version.hpp")
file(READ "${version}" text)
string(REGEX MATCH "VERSION_MINOR ([0-9]+)" line "${text}")
math(EXPR next "${CMAKE_MATCH_1} + 1")
string(REPLACE "${line}" "VERSION_MINOR ${next}" text "${text}")
file(WRITE "${version}" "${text}")
