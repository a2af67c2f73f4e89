// SPDX-License-Identifier: Apache-2.0
/// @file
/// The link by the second: tokens come at a rate, and are spent by the byte.
#include "pulseinfer/admission_token_bucket.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "conformance/admission.hpp"

namespace {

using doctest::Approx;
using pulseinfer::admission_verdict;
using pulseinfer::link_snapshot;
using pulseinfer::token_bucket_admission;
using pulseinfer::token_bucket_options;

token_bucket_admission made(const token_bucket_options& options = {.bytes_per_second = 1'000,
                                                                   .burst_bytes = 500}) {
  return {2, options};
}
link_snapshot at(double seconds) {
  link_snapshot link;
  link.taken_at = seconds;
  return link;
}

}  // namespace

TEST_CASE("token_bucket: keeps what every policy keeps") {
  conformance::check_admission_policy([] { return made(); });
  conformance::check_admission_policy([] {
    return token_bucket_admission(7, {.bytes_per_second = 5e10,
                                      .burst_bytes = std::int64_t{1} << 30,
                                      .reserved_for_recalls = 0.25,
                                      .offload_share = 0.5});
  });
  conformance::check_admission_policy([] {
    return token_bucket_admission(
        1, {.bytes_per_second = 1, .burst_bytes = 1, .reserved_for_recalls = 1});
  });
}

TEST_CASE("token_bucket: over any time no more than the rate and one burst") {
  auto policy = made();
  std::int64_t granted = 0;
  for (int ms = 0; ms <= 10'000; ++ms) {
    policy.observe(at(1e-3 * ms), {});
    while (policy.may_recall(7)) granted += 7;
  }
  CHECK(granted <= 10 * 1'000 + 500);
  CHECK(granted >= 10 * 1'000 + 500 - 7);
}

TEST_CASE("token_bucket: stores stop while there is something for recalls") {
  auto policy = made();
  policy.observe(at(0), {});
  std::int64_t stored = 0;
  while (policy.may_store(10)) stored += 10;
  CHECK(stored == 250);
  CHECK(policy.tokens() == 250);
  CHECK(policy.may_recall(250));
  CHECK(!policy.may_recall(1));
  policy.observe(at(0.25), {});
  CHECK(!policy.may_store(1));
  policy.observe(at(0.251), {});
  CHECK(policy.may_store(1));
}

TEST_CASE("token_bucket: what is larger than the bucket goes when it is full, and then costs") {
  auto policy = made();
  policy.observe(at(0), {});
  CHECK(policy.may_recall(2'500));
  CHECK(policy.tokens() == -2'000);
  CHECK(!policy.may_recall(0));
  policy.observe(at(2), {});
  CHECK(policy.may_recall(0));
  policy.observe(at(2.499), {});
  CHECK(!policy.may_recall(2'500));
  policy.observe(at(2.5), {});
  CHECK(policy.may_recall(2'500));
  policy.observe(at(1), {});  // a clock that went backwards brings nothing
  CHECK(policy.tokens() == -2'000);
  policy.observe(at(100), {});
  CHECK(policy.tokens() == 500);
}

TEST_CASE("token_bucket: a request waits for tokens, or recomputes where that is sooner") {
  auto policy = made();
  std::vector<double> placement(2);
  policy.observe(at(0), {});
  CHECK(policy.admit({.load_bytes = 500}, placement).verdict == admission_verdict::admit);
  const auto waits = policy.admit({.load_bytes = 300}, placement);
  CHECK(waits.verdict == admission_verdict::defer);
  CHECK(waits.load_s == Approx(0.3));
  CHECK(
      policy
          .admit({.load_bytes = 300, .load_tokens = 10, .recompute_s_per_token = 0.029}, placement)
          .verdict == admission_verdict::recompute);
  CHECK(
      policy
          .admit({.load_bytes = 300, .load_tokens = 10, .recompute_s_per_token = 0.031}, placement)
          .verdict == admission_verdict::defer);
  CHECK(policy.admit({}, placement).verdict == admission_verdict::admit);
  policy.observe(at(0.3), {});
  CHECK(policy.admit({.load_bytes = 300}, placement).verdict == admission_verdict::admit);
  CHECK(placement == std::vector<double>(2, 0.9));
}

TEST_CASE("token_bucket: options out of range are refused, by name") {
  CHECK_THROWS_WITH_AS(made({.bytes_per_second = 0, .burst_bytes = 1}),
                       "token_bucket_admission: bytes_per_second is 0.000000, expected at least 1, "
                       "and finite",
                       std::invalid_argument);
  CHECK_THROWS_AS(
      made({.bytes_per_second = std::numeric_limits<double>::quiet_NaN(), .burst_bytes = 1}),
      std::invalid_argument);
  CHECK_THROWS_WITH_AS(made({.bytes_per_second = 1, .burst_bytes = 0}),
                       "token_bucket_admission: burst_bytes is 0, expected at least 1",
                       std::invalid_argument);
  CHECK_THROWS_AS(made({.bytes_per_second = 1, .burst_bytes = 1, .reserved_for_recalls = 1.5}),
                  std::invalid_argument);
  CHECK_THROWS_AS(made({.bytes_per_second = 1, .burst_bytes = 1, .offload_share = -1}),
                  std::invalid_argument);
}
