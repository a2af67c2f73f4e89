// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a translation unit or shared library says of itself. Knows nothing of the library.
#pragma once

struct unit_result {
  int status;
  const char* type_name;
};

// The entry points, whichever exist in a program.
#define PULSEINFER_UNIT_EXPORT __attribute__((visibility("default")))
extern "C" {
PULSEINFER_UNIT_EXPORT unit_result run_a();
PULSEINFER_UNIT_EXPORT unit_result run_b();
PULSEINFER_UNIT_EXPORT unit_result run_other();
}
