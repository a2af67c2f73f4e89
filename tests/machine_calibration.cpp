// SPDX-License-Identifier: Apache-2.0
/// @file
/// Calibration through real recalls, and engines that go by it. Include the backend's support header
/// first.
#include "pulseinfer/machine_calibration.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "pulseinfer/transfer_cost.hpp"
#include "support/offload_rig.hpp"

namespace {

using test::backend;
using rig = test::offload_rig<backend>;
using pulseinfer::transfer_costs;
using pulseinfer::transfer_way;

/// Few and small transfers.
pulseinfer::calibration_options brief() {
  return {.least_entry_bytes = 1 << 10,
          .most_entry_bytes = 16 << 10,
          .least_entries = 4,
          .most_entries = 16,
          .max_transfer_bytes = 1 << 20,
          .max_transfers = 60};
}

/// Costs by which this way is by far the cheapest.
transfer_costs in_favour_of(transfer_way way) {
  transfer_costs costs;
  for (const transfer_way other :
       {transfer_way::staged, transfer_way::direct, transfer_way::batched, transfer_way::pull}) {
    costs.set(other, {.latency = other == way ? 1e-6 : 1});
  }
  return costs;
}

}  // namespace

TEST_CASE("machine calibration: every way gets a cost") {
  const transfer_costs costs =
      pulseinfer::calibrate_machine(test::make_backend(), brief(), 1 << 20);
  for (const transfer_way way : brief().ways) {
    CAPTURE(static_cast<int>(way));
    REQUIRE(costs.find(way) != nullptr);
    const double one = costs.predict(way, {.units = 4, .pieces = 4, .bytes = 4 << 10});
    CHECK(std::isfinite(one));
    CHECK(one > 0);
  }
  CHECK(transfer_costs::from_text(costs.to_text()) == costs);
}

TEST_CASE(
    "machine calibration: a memory for not even the smallest transfer is refused by its name") {
  auto options = brief();
  options.least_entry_bytes = options.most_entry_bytes = 1 << 20;
  options.least_entries = options.most_entries = 2;
  CHECK_THROWS_WITH_AS((void)pulseinfer::calibrate_machine(test::make_backend(), options, 1 << 20),
                       "calibrate_machine: capacity_bytes is 1048576, expected at least "
                       "least_entries of least_entry_bytes, which are 2097152",
                       std::invalid_argument);
}

TEST_CASE("machine calibration: what does not fit is not timed, and bad sizes are refused") {
  pulseinfer::transfer_timer<backend> timer(test::make_backend(), 1 << 20);
  CHECK(timer(transfer_way::staged, {.units = 2, .pieces = 2, .bytes = 4 << 20}) ==
        std::numeric_limits<double>::infinity());
  CHECK(timer(transfer_way::staged, {.units = 1, .pieces = 1, .bytes = 4 << 20}) ==
        std::numeric_limits<double>::infinity());
  for (const std::int64_t bytes : {std::int64_t{1}, std::int64_t{1000}, std::int64_t{70'001}}) {
    CAPTURE(bytes);
    const double seconds =
        timer(transfer_way::direct, {.units = 3, .pieces = 3, .bytes = 3 * bytes});
    CHECK(std::isfinite(seconds));
    CHECK(seconds > 0);
  }
  CHECK_THROWS_AS((void)timer(transfer_way::staged, {}), std::invalid_argument);
  CHECK_THROWS_AS((void)timer(transfer_way::staged, {.units = 4, .pieces = 4, .bytes = 0}),
                  std::invalid_argument);
  CHECK_THROWS_AS(pulseinfer::transfer_timer<backend>(test::make_backend(), 1000),
                  std::invalid_argument);
}

TEST_CASE(
    "machine calibration: an engine goes the way that costs say is the cheapest, and says so") {
  test::each_backend([](backend machine) {
    for (const transfer_way way :
         {transfer_way::staged, transfer_way::direct, transfer_way::batched, transfer_way::pull}) {
      CAPTURE(static_cast<int>(way));
      rig r(machine, {.way = transfer_way::automatic, .costs = in_favour_of(way)});
      const auto id = r.stored(1, {0, 1, 2, 3, 4, 5});
      auto t = r.recall(0, id, {{0, 1, 10}, {0, 2, 30}, {0, 5, 20}}).value();
      t.sync();
      CHECK(t.report().way == way);
      CHECK(t.report().predicted_seconds == doctest::Approx(1e-6));
      CHECK(t.report().moved == 3);
      r.pages.download(r.stream);
      CHECK((r.pages.get(0, 30) == test::stamp(rig::geometry, 1, 0, 2)));
      auto nothing = r.recall(0, id, {{0, 40, 10}}).value();  // the store lacks it
      nothing.sync();
      CHECK(nothing.report().moved == 0);
      r.mover.set_way(transfer_way::per_block);  // and back to a way of the caller's choice
      auto forced = r.recall(0, id, {{0, 1, 11}}).value();
      forced.sync();
      CHECK(forced.report().way == transfer_way::per_block);
      CHECK(forced.report().predicted_seconds == 0);
      CHECK_THROWS_AS(r.mover.set_way(static_cast<transfer_way>(99)), std::invalid_argument);
      CHECK(r.mover.options().way == transfer_way::per_block);
    }
  });
}

TEST_CASE("machine calibration: automatic needs costs") {
  backend machine = test::make_backend();
  CHECK_THROWS_WITH_AS(rig(machine, {.way = transfer_way::automatic}),
                       doctest::Contains("there are no costs"), std::invalid_argument);
  CHECK_THROWS_AS(rig(machine, {.way = transfer_way::automatic, .costs = transfer_costs{}}),
                  std::invalid_argument);
  rig r(machine);
  CHECK_THROWS_AS(r.mover.set_way(transfer_way::automatic), std::invalid_argument);
}
