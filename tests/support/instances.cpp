// SPDX-License-Identifier: Apache-2.0
/// @file
/// See instances.hpp.
#define PULSEINFER_TEST_INSTANCES
#include "support/instances.hpp"
