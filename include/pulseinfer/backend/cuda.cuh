// SPDX-License-Identifier: Apache-2.0
/// @file
/// A CUDA device as a machine: `cuda_backend` with everything it can do.
///
/// The class is in backend/cuda_core.cuh; this header adds what its top-k needs (CUB).
#pragma once

#include "pulseinfer/backend/cuda_core.cuh"
#include "pulseinfer/detail/cuda_top_k.cuh"
