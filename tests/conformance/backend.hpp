// SPDX-License-Identifier: Apache-2.0
/// @file
/// The conformance suite of the backend concept: what its requirements cannot say. Every backend
/// runs it (tests/backend.cpp); one of your own can too.
#pragma once

#include "conformance/backend_kernels.hpp"
#include "conformance/backend_streams.hpp"
#include "conformance/backend_tasks.hpp"
#include "conformance/backend_top_k.hpp"
