// SPDX-License-Identifier: Apache-2.0
/// @file
/// The templates that most tests use, for the backend under test. They are compiled once for each test
/// program, in support/instances.cpp, not again in every test: that halves the time of a build. Include
/// the backend's support header first.
#pragma once

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/hot_buffer.hpp"
#include "pulseinfer/staging_pool.hpp"
#include "pulseinfer/ticket.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/offload_rig.hpp"
#include "support/paged_pool.hpp"

#if !defined(PULSEINFER_TEST_INSTANCES)
#define PULSEINFER_TEST_INSTANCES extern
#endif

PULSEINFER_TEST_INSTANCES template class pulseinfer::block_store<test::backend>;
PULSEINFER_TEST_INSTANCES template class pulseinfer::hot_buffer<test::backend>;
PULSEINFER_TEST_INSTANCES template class pulseinfer::staging_pool<test::backend>;
PULSEINFER_TEST_INSTANCES template class pulseinfer::ticket<test::backend>;
PULSEINFER_TEST_INSTANCES template class pulseinfer::detail::recall_pipeline<
    test::backend, pulseinfer::block_store<test::backend>>;
PULSEINFER_TEST_INSTANCES template class pulseinfer::detail::offload_pipeline<
    test::backend, pulseinfer::block_store<test::backend>>;
PULSEINFER_TEST_INSTANCES template class pulseinfer::transfer_engine<
    test::backend, pulseinfer::block_store<test::backend>>;
PULSEINFER_TEST_INSTANCES template class test::paged_pool<test::backend>;
PULSEINFER_TEST_INSTANCES template class test::offload_rig<test::backend>;
