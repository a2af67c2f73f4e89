// SPDX-License-Identifier: Apache-2.0
/// @file
/// The version of the library. CMake reads it from here: there is no second place.
#pragma once

#define PULSEINFER_VERSION_MAJOR 0
#define PULSEINFER_VERSION_MINOR 1
#define PULSEINFER_VERSION_PATCH 0

/// The inline namespace that everything is in, v0_1: two versions that a program links, because two
/// of its libraries hold them, do not share a name. Before 1.0 a minor version may change any type.
#define PULSEINFER_ABI_NAME_OF(major, minor) v##major##_##minor
#define PULSEINFER_ABI_NAME(major, minor) PULSEINFER_ABI_NAME_OF(major, minor)
#define PULSEINFER_ABI_NAMESPACE \
  PULSEINFER_ABI_NAME(PULSEINFER_VERSION_MAJOR, PULSEINFER_VERSION_MINOR)
