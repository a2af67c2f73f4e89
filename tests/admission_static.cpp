// SPDX-License-Identifier: Apache-2.0
/// @file
/// Policies that do not look.
#include "pulseinfer/admission_static.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <stdexcept>
#include <vector>

#include "conformance/admission.hpp"

namespace {

using pulseinfer::admission_verdict;
using pulseinfer::always_admission;
using pulseinfer::link_snapshot;
using pulseinfer::static_ratio_admission;

}  // namespace

TEST_CASE("static_ratio: keeps what every policy keeps") {
  conformance::check_admission_policy([] { return static_ratio_admission(5, 0.7); });
  conformance::check_admission_policy([] { return static_ratio_admission(1, 0); });
  conformance::check_admission_policy([] { return always_admission(3); });
}

TEST_CASE("static_ratio: the link changes nothing, room does") {
  static_ratio_admission policy(4, 0.75);
  std::vector<double> placement(4);
  link_snapshot link;
  link.recalls = {.utilisation = 1, .seconds_per_byte = 1e-9, .queued_bytes = 1'000'000};
  policy.observe(link, {});
  for (int layer = 0; layer < 4; ++layer) CHECK(policy.offload_share(layer) == 0.75);
  CHECK(policy.may_store(1 << 30));
  CHECK(policy.may_recall(1 << 30));
  const auto fits = policy.admit(
      {.context_bytes = 4'000, .device_bytes_free = 1'000, .load_bytes = 1'000'000}, placement);
  CHECK(fits.verdict == admission_verdict::admit);
  CHECK(fits.load_s == doctest::Approx(0.021));
  CHECK(placement == std::vector<double>(4, 0.75));
  CHECK(policy.admit({.context_bytes = 4'000, .device_bytes_free = 999}, placement).verdict ==
        admission_verdict::defer);
}

TEST_CASE("always: everybody gets in, with nothing in HBM") {
  always_admission policy(2);
  std::vector<double> placement(2);
  CHECK(policy.admit({.context_bytes = 1'000'000'000}, placement).verdict ==
        admission_verdict::admit);
  CHECK(placement == std::vector<double>(2, 1.0));
}

TEST_CASE("static_ratio: a share that is none is refused") {
  CHECK_THROWS_WITH_AS(static_ratio_admission(4, 1.5),
                       "static_ratio_admission: share is 1.500000, expected 0 to 1.000000",
                       std::invalid_argument);
  CHECK_THROWS_AS(static_ratio_admission(4, -0.5), std::invalid_argument);
  CHECK_THROWS_AS(static_ratio_admission(4, std::numeric_limits<double>::quiet_NaN()),
                  std::invalid_argument);
  CHECK_THROWS_WITH_AS(static_ratio_admission(0, 0.5),
                       "static_ratio_admission: layers is 0, expected 1 to 65536",
                       std::invalid_argument);
}
