// SPDX-License-Identifier: Apache-2.0
/// @file
/// The version of the library. CMake reads it from here: there is no second place.
#pragma once

#define PULSEINFER_VERSION_MAJOR 0
#define PULSEINFER_VERSION_MINOR 1
#define PULSEINFER_VERSION_PATCH 0
