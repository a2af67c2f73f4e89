// SPDX-License-Identifier: Apache-2.0
/// @file
/// Predicted times and layer plans: what they add up to, and that no plan ever loads.
#include "pulseinfer/admission_types.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

#include "pulseinfer/detail/random.hpp"

namespace {

using pulseinfer::admission_request;
using pulseinfer::layer_blocks;
using pulseinfer::layer_plan;
using pulseinfer::link_load;
using pulseinfer::plan_layer;
using pulseinfer::predicted_load_s;
using pulseinfer::predicted_recompute_s;
using pulseinfer::resident_bytes;

doctest::Approx about(double value) {
  return doctest::Approx(value).epsilon(1e-12).scale(0.0);
}

}  // namespace

TEST_CASE("admission_types: a load goes over the free share of the link, behind the queue") {
  link_load link{.seconds_per_byte = 1e-9};
  CHECK(predicted_load_s(link, 1'000'000) == about(1e-3));
  CHECK(predicted_load_s(link, 0) == 0);
  link.utilisation = 0.75;
  CHECK(predicted_load_s(link, 1'000'000) == about(4e-3));
  link.queued_bytes = 2'000'000;
  CHECK(predicted_load_s(link, 1'000'000) == about(6e-3));
  CHECK(predicted_load_s(link, 1'000'000, 500'000) == about(6.5e-3));
  CHECK(predicted_load_s(link, 0) == 0);
  link.utilisation = 1;
  CHECK(predicted_load_s(link, 1'000'000) == about(22e-3));  // late, but a time
  link.seconds_per_byte = 0;
  CHECK(predicted_load_s(link, 1'000'000) == 0);  // never measured
}

TEST_CASE("admission_types: recomputing costs by the token, where it can be done") {
  admission_request r{.load_bytes = 10, .load_tokens = 1'000, .recompute_s_per_token = 2e-5};
  CHECK(predicted_recompute_s(r) == about(0.02));
  r.load_bytes = 0;
  CHECK(predicted_recompute_s(r) == 0);
  r = {.load_bytes = 10, .load_tokens = 1'000};
  CHECK(std::isinf(predicted_recompute_s(r)));
  r = {.load_bytes = 10, .recompute_s_per_token = 1};
  CHECK(std::isinf(predicted_recompute_s(r)));
}

TEST_CASE("admission_types: a placement keeps what it does not offload") {
  CHECK(resident_bytes(1'000, std::vector<double>{1, 1, 1}) == 0);
  CHECK(resident_bytes(1'000, std::vector<double>{0, 0}) == 1'000);
  CHECK(resident_bytes(1'000, std::vector<double>{0, 1, 1, 0.5}) == about(375));
  CHECK(resident_bytes(0, std::vector<double>{0, 1}) == 0);
  CHECK(resident_bytes(1'000, {}) == 0);
}

TEST_CASE("admission_types: a layer offloads what was never stored, then releases what was") {
  CHECK(plan_layer(0.9, {.only_on_device = 100}) == layer_plan{.offload = 90, .keep = 10});
  CHECK(plan_layer(0.9, {.only_on_device = 9}) == layer_plan{.offload = 8, .keep = 1});
  CHECK(plan_layer(0.9, {.only_on_device = 10, .on_both = 30, .only_in_store = 60}) ==
        layer_plan{.offload = 10, .release = 20, .keep = 10});
  CHECK(plan_layer(0.9, {.only_in_store = 100}) == layer_plan{});
  CHECK(plan_layer(0.9, {}) == layer_plan{});
  CHECK(plan_layer(1, {.only_on_device = 3, .on_both = 4}) ==
        layer_plan{.offload = 3, .release = 4});
  CHECK(plan_layer(0, {.only_on_device = 3, .on_both = 4}) == layer_plan{.keep = 7});
}

TEST_CASE("admission_types: no plan loads, whatever the share was before") {
  pulseinfer::detail::random_source draw(5);
  bool parts_add_up = true, none_negative = true, near_share = true, nothing_new = true;
  for (int i = 0; i < 300; ++i) {
    layer_blocks at{.only_on_device = static_cast<std::int64_t>(draw.below(200)),
                    .on_both = static_cast<std::int64_t>(draw.below(50)),
                    .only_in_store = static_cast<std::int64_t>(draw.below(200))};
    for (int step = 0; step < 20; ++step) {  // the link gets busy, and idle, and busy
      const double share = static_cast<double>(draw.below(1'001)) / 1'000;
      const layer_plan plan = plan_layer(share, at);
      const std::int64_t on_device = at.only_on_device + at.on_both;
      const std::int64_t all = on_device + at.only_in_store;
      parts_add_up = parts_add_up && plan.offload + plan.release + plan.keep == on_device;
      none_negative = none_negative && plan.offload >= 0 && plan.release >= 0 && plan.keep >= 0;
      nothing_new = nothing_new && plan.offload <= at.only_on_device && plan.release <= at.on_both;
      const std::int64_t before = at.only_in_store;
      at.only_on_device -= plan.offload;
      at.on_both -= plan.release;
      at.only_in_store += plan.offload + plan.release;
      // What is only in the store never becomes less by a plan: that would be a load.
      nothing_new = nothing_new && at.only_in_store >= before;
      const double wanted = std::floor(share * static_cast<double>(all));
      near_share =
          near_share && (static_cast<double>(at.only_in_store) == wanted ||
                         (at.only_in_store == before && static_cast<double>(before) > wanted));
      // A decode step recalls what it chose, and the context grows.
      const auto recalled = static_cast<std::int64_t>(
          draw.below(static_cast<std::uint64_t>(at.only_in_store / 4 + 1)));
      at.only_in_store -= recalled;
      at.on_both += recalled;
      at.only_on_device += static_cast<std::int64_t>(draw.below(3));
    }
  }
  CHECK(parts_add_up);
  CHECK(none_negative);
  CHECK(near_share);
  CHECK(nothing_new);
}

TEST_CASE("admission_types: a share or a count that cannot be is named") {
  CHECK_THROWS_WITH_AS((void)plan_layer(1.5, {}),
                       "plan_layer: share is 1.500000, expected 0 to 1.000000",
                       std::invalid_argument);
  CHECK_THROWS_AS((void)plan_layer(-0.1, {}), std::invalid_argument);
  CHECK_THROWS_AS((void)plan_layer(std::numeric_limits<double>::quiet_NaN(), {}),
                  std::invalid_argument);
  CHECK_THROWS_WITH_AS((void)plan_layer(0.5, {.on_both = -2}),
                       "plan_layer: on_both is -2, expected at least 0", std::invalid_argument);
  CHECK_THROWS_AS((void)plan_layer(0.5, {.only_on_device = -1}), std::invalid_argument);
  CHECK_THROWS_AS((void)plan_layer(0.5, {.only_in_store = -1}), std::invalid_argument);
}
