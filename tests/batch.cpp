// SPDX-License-Identifier: Apache-2.0
/// @file
/// batch.hpp: what a batch must be before anything is enqueued.
#include "pulseinfer/batch.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using pulseinfer::batch_view;
using pulseinfer::detail::check_batch;

/// Never read by the check.
const std::int32_t somewhere = 0;

batch_view batch_of(const std::vector<std::int32_t>& requests) {
  return {.requests = requests,
          .device_requests = &somewhere,
          .device_tokens = &somewhere,
          .max_tokens = 1};
}

}  // namespace

TEST_CASE("batch: rows are the requests") {
  const std::vector<std::int32_t> requests = {4, 2, 7};
  CHECK(batch_of(requests).rows() == 3);
  CHECK(batch_view{}.rows() == 0);
}

TEST_CASE("batch: what fits passes") {
  const std::vector<std::int32_t> requests = {0, 7, 3};
  check_batch("test", batch_of(requests), 3, 8);
  check_batch("test", batch_view{}, 1, 1);  // an empty batch needs no arrays
}

TEST_CASE("batch: too many rows are refused") {
  const std::vector<std::int32_t> requests = {0, 1, 2};
  CHECK_THROWS_AS(check_batch("test", batch_of(requests), 2, 8), std::invalid_argument);
}

TEST_CASE("batch: a request outside the limit is refused") {
  for (const std::int32_t request : {-1, 8, 1 << 30}) {
    const std::vector<std::int32_t> requests = {1, request};
    CHECK_THROWS_AS(check_batch("test", batch_of(requests), 4, 8), std::out_of_range);
  }
}

TEST_CASE("batch: null device arrays are refused") {
  const std::vector<std::int32_t> requests = {1};
  batch_view without_requests = batch_of(requests);
  without_requests.device_requests = nullptr;
  CHECK_THROWS_AS(check_batch("test", without_requests, 4, 8), std::invalid_argument);
  batch_view without_tokens = batch_of(requests);
  without_tokens.device_tokens = nullptr;
  CHECK_THROWS_AS(check_batch("test", without_tokens, 4, 8), std::invalid_argument);
}

TEST_CASE("batch: the error names the caller, the value and the limit") {
  const std::vector<std::int32_t> requests = {9};
  std::string text;
  try {
    check_batch("select", batch_of(requests), 4, 8);
  } catch (const std::out_of_range& error) {
    text = error.what();
  }
  CHECK(text == "select: request is 9, expected 0 to 7");
}
