// SPDX-License-Identifier: Apache-2.0
/// @file
/// The options of pinned memory as they stand, and where a warning goes.
#include "pulseinfer/pinned_options.hpp"

#include <doctest/doctest.h>

TEST_CASE("pinned options: what is not chosen is safe") {
  const pulseinfer::pinned_options options;
  CHECK(options.unit_bytes == 1);
  CHECK(options.max_chunk_bytes == pulseinfer::pinned_options::most_chunk_bytes);
  CHECK(options.source == pulseinfer::pinned_source::registered);
  CHECK(options.locking == pulseinfer::page_locking::automatic);
  CHECK(!options.in_background);
  CHECK(!options.allow_unpinned);
  CHECK(!options.zero_on_release);
  CHECK(options.pages.numa_node == -1);
  CHECK(options.pages.pages == pulseinfer::page_kind::transparent);
}

TEST_CASE("pinned options: what is not pinned is said where nobody asks: on stderr") {
  const pulseinfer::pinned_options options;
  REQUIRE((options.warn == &pulseinfer::detail::warn_on_stderr));
  options.warn("this line is a test's");
}

TEST_CASE("pinned options: a report of nothing is empty") {
  const pulseinfer::pinned_report report;
  CHECK(report.bytes == 0);
  CHECK(report.pinned_bytes == 0);
  CHECK(report.placement.node == -1);
  CHECK(report.remarks.empty());
}
