# SPDX-License-Identifier: Apache-2.0
# cmake -D nm=PROGRAM -D a=OBJECT -D b=OBJECT -P no_shared_name.cmake   fails if two objects, which hold two
# versions of the library, define a name of the library in common.
cmake_minimum_required(VERSION 3.24)

foreach(object IN ITEMS a b)
  execute_process(COMMAND "${nm}" --defined-only --format=posix "${${object}}"
    OUTPUT_VARIABLE text COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^ \n]*10pulseinfer[^ \n]*" names_${object} "${text}")
  list(LENGTH names_${object} count)
  if(count EQUAL 0)
    message(FATAL_ERROR "error: ${${object}} defines no name of the library")
  endif()
  list(REMOVE_DUPLICATES names_${object})
endforeach()
set(common "${names_a}")
list(REMOVE_ITEM common ${names_b})
set(own "${common}")
set(common "${names_a}")
if(own)
  list(REMOVE_ITEM common ${own})
endif()
if(common)
  list(LENGTH common count)
  list(GET common 0 first)
  message(FATAL_ERROR "error: one name in two versions, ${count} of them, such as ${first}")
endif()
