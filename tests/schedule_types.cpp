// SPDX-License-Identifier: Apache-2.0
/// @file
/// Values of the layer scheduler: counts add up, sizes out of range are refused.
#include "pulseinfer/schedule_types.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <stdexcept>

#include "support/fake_flights.hpp"

namespace {

using pulseinfer::flight_id;
using pulseinfer::flight_state;
using pulseinfer::layer_state;
using pulseinfer::scheduler_options;

struct polls_by_value {
  flight_state poll(flight_id) const noexcept { return flight_state::landed; }
  void retire(flight_id) noexcept {}
};
struct poll_may_throw {
  flight_state poll(flight_id) const { return flight_state::landed; }
  void retire(flight_id) noexcept {}
};
struct never_retires {
  flight_state poll(flight_id) const noexcept { return flight_state::landed; }
};
static_assert(pulseinfer::tells_flights<polls_by_value>);
static_assert(pulseinfer::tells_flights<test::fake_flights>);
static_assert(!pulseinfer::tells_flights<poll_may_throw>);
static_assert(!pulseinfer::tells_flights<never_retires>);

TEST_CASE("schedule_types: the states of a snapshot add up") {
  pulseinfer::schedule_counts counts;
  CHECK(counts.total() == 0);
  int n = 0;
  for (std::int32_t& of : counts.of) of = ++n;
  CHECK(counts.total() == 36);
  CHECK(counts[layer_state::waiting] == 1);
  CHECK(counts[layer_state::leaving] == 8);
}

TEST_CASE("schedule_types: options out of range are refused, naming option and limit") {
  const auto refused = [](auto change) {
    scheduler_options o;
    change(o);
    CHECK_THROWS_AS((void)pulseinfer::detail::checked_scheduler_options(o), std::invalid_argument);
  };
  CHECK(pulseinfer::detail::checked_scheduler_options({}).max_requests == 256);
  refused([](scheduler_options& o) { o.max_requests = 0; });
  refused([](scheduler_options& o) { o.max_requests = (1 << 16) + 1; });
  refused([](scheduler_options& o) { o.layers = 0; });
  refused([](scheduler_options& o) { o.max_groups = 0; });
  refused([](scheduler_options& o) { o.max_flights = -1; });
  refused([](scheduler_options& o) { o.flights_per_request = 0; });
  refused([](scheduler_options& o) { o.batches_in_flight = 0; });
  refused([](scheduler_options& o) { o.max_wait_batches = 0; });
  refused([](scheduler_options& o) { o.pages = -1; });
  refused([](scheduler_options& o) { o.work.weight_bytes = -1; });
  refused([](scheduler_options& o) {
    o.speeds.link_bytes_per_second = std::numeric_limits<double>::quiet_NaN();
  });
  scheduler_options o;
  o.layers = 0;
  CHECK_THROWS_WITH((void)pulseinfer::detail::checked_scheduler_options(o),
                    "layer_scheduler: layers is 0, expected 1 to 65536");
}

}  // namespace
