// SPDX-License-Identifier: Apache-2.0
/// @file
/// Everything that compiles without a CUDA compiler. `pulseinfer/backend/cuda.cuh` adds the CUDA
/// backend.
#pragma once

#include "pulseinfer/backend/host.hpp"
#include "pulseinfer/backend/simulated.hpp"
#include "pulseinfer/batch.hpp"
#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/block_store.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/consensus.hpp"
#include "pulseinfer/context_writer.hpp"
#include "pulseinfer/digest.hpp"
#include "pulseinfer/element.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/eviction.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/hot_buffer.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/numa.hpp"
#include "pulseinfer/page_table.hpp"
#include "pulseinfer/pool_shape.hpp"
#include "pulseinfer/prefix_stream.hpp"
#include "pulseinfer/residency.hpp"
#include "pulseinfer/staging_pool.hpp"
#include "pulseinfer/ticket.hpp"
#include "pulseinfer/top_k.hpp"
#include "pulseinfer/trace.hpp"
#include "pulseinfer/transfer.hpp"
#include "pulseinfer/version.hpp"
