// SPDX-License-Identifier: Apache-2.0
/// @file
/// Sizes of a hot buffer, and steps as their owners see them. What they do is in hot_buffer.cpp.
#include "pulseinfer/hot_buffer_types.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace {

using pulseinfer::hot_buffer_options;
using pulseinfer::resolved_step;
using pulseinfer::detail::checked_hot_buffer_options;

std::string refusal(const hot_buffer_options& o) {
  try {
    (void)checked_hot_buffer_options(o, 2);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

}  // namespace

TEST_CASE("hot buffer types: sizes at their limits are taken, beyond them refused by name") {
  CHECK(refusal({}).empty());
  CHECK(refusal({.pages_per_request = 1, .budget_blocks = 1, .max_requests = 1, .max_rows = 1})
            .empty());
  CHECK(refusal({.pages_per_request = 64, .budget_blocks = 64}).empty());
  CHECK(refusal({.pages_per_request = 63, .budget_blocks = 64}) ==
        "hot_buffer: pages_per_request is 63, expected 64 to 16777216");
  CHECK(refusal({.budget_blocks = 0}).find("budget_blocks is 0") != std::string::npos);
  CHECK(refusal({.max_requests = 0}).find("max_requests is 0") != std::string::npos);
  CHECK(refusal({.max_rows = -1}).find("max_rows is -1") != std::string::npos);
  CHECK(refusal({.max_blocks = (std::int64_t{1} << 24) + 1}).find("max_blocks is 16777217") !=
        std::string::npos);
  CHECK(refusal({.steps_in_flight = 0}).find("steps_in_flight is 0") != std::string::npos);
  CHECK(refusal({.steps_in_flight = 1025}).find("steps_in_flight is 1025") != std::string::npos);
}

TEST_CASE("hot buffer types: layers have sizes of their own, and half-lives are powers of two") {
  CHECK(refusal({.pages_of_layer = {64, 128}}).empty());
  CHECK(refusal({.pages_of_layer = {64}}) ==
        "hot_buffer: pages_of_layer has 1 entries, expected 2 (the layers) or none");
  CHECK(refusal({.pages_of_layer = {64, 63}}) ==
        "hot_buffer: pages_of_layer is 63, expected 64 to 128");
  CHECK(refusal({.pages_of_layer = {129, 64}}) ==
        "hot_buffer: pages_of_layer is 129, expected 64 to 128");
  CHECK(refusal({.half_life = 1024}).empty());
  CHECK(refusal({.half_life = 12}) == "hot_buffer: half_life is 12, expected a power of two");
  CHECK(refusal({.half_life = 0}).find("half_life is 0") != std::string::npos);
  CHECK(refusal({.replacement = static_cast<pulseinfer::hot_replacement>(2)})
            .find("replacement is 2") != std::string::npos);
  using pulseinfer::detail::ranks_of;
  CHECK(ranks_of({.replacement = pulseinfer::hot_replacement::least_recent}).unit_bits == 0);
  const auto faded =
      ranks_of({.replacement = pulseinfer::hot_replacement::least_used, .half_life = 8});
  CHECK(faded.per_step == 16);
  CHECK(faded.unit_bits == 7);
}

TEST_CASE("hot buffer types: a step is open while its record is its own") {
  CHECK_FALSE(resolved_step{}.is_open());
  CHECK_FALSE(resolved_step{}.is_held());
  CHECK(resolved_step{}.misses(0).empty());
  CHECK(resolved_step{}.misses(-1).empty());
  pulseinfer::detail::step_record record;
  record.generation = 4;
  resolved_step step;
  step.record = &record;
  step.generation = 4;
  CHECK_FALSE(step.is_open());  // nothing was resolved
  record.busy = true;
  CHECK(step.is_open());
  record.held = true;
  CHECK_FALSE(step.is_open());
  CHECK(step.is_held());
  record.held = false;
  record.discarded = true;
  CHECK_FALSE(step.is_open());
  record.discarded = false;
  ++record.generation;  // another step has it
  CHECK_FALSE(step.is_open());
}
