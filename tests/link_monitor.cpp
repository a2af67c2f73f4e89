// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a monitor makes of samples, true ones and nonsense.
#include "pulseinfer/link_monitor.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"

namespace {

using pulseinfer::copy_direction;
using pulseinfer::link_counts;
using pulseinfer::link_monitor;
using pulseinfer::link_sample;
using pulseinfer::link_snapshot;

constexpr copy_direction in = copy_direction::host_to_device;
constexpr copy_direction out = copy_direction::device_to_host;
constexpr double no_number = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

/// Equal but for rounding, or to a share of the value, however small that is.
doctest::Approx about(double value, double share = 1e-9) {
  return doctest::Approx(value).epsilon(share).scale(0.0);
}

}  // namespace

TEST_CASE("link_monitor: one that saw nothing knows an idle link") {
  const link_monitor monitor;
  const link_snapshot s = monitor.snapshot(3);
  CHECK(s.recalls == pulseinfer::link_load{});
  CHECK(s.stores == pulseinfer::link_load{});
  CHECK(s.taken_at == 3);
  CHECK(monitor.counts(in).samples == 0);
}

TEST_CASE("link_monitor: bytes, busy time and speed of each direction, apart") {
  link_monitor monitor({.window_s = 1, .time_constant_s = 1});
  CHECK(monitor.moved({in, 1'000, 0.0, 0.25}));
  CHECK(monitor.moved({out, 500, 0.5, 0.75}));
  CHECK(monitor.moved({in, 1'000, 0.5, 0.75}));
  const link_snapshot s = monitor.snapshot(1);
  CHECK(s.recalls.utilisation == about(0.5));
  CHECK(s.stores.utilisation == about(0.25));
  CHECK(s.recalls.seconds_per_byte == about(0.25 / 1'000));
  CHECK(s.stores.seconds_per_byte == about(0.25 / 500));
  CHECK(monitor.counts(in).bytes == 2'000);
  CHECK(monitor.counts(in).busy_s == about(0.5));
  CHECK(monitor.counts(in).samples == 2);
  CHECK(monitor.counts(out).samples == 1);
}

TEST_CASE("link_monitor: transfers that are under way at once keep the link busy once") {
  link_monitor monitor({.window_s = 1, .time_constant_s = 1});
  CHECK(monitor.moved({in, 100, 0.2, 0.6}));
  CHECK(monitor.moved({in, 300, 0.2, 0.6}));
  CHECK(monitor.moved({in, 400, 0.4, 0.8}));
  const link_snapshot s = monitor.snapshot(1);
  CHECK(s.recalls.utilisation == about(0.6));
  CHECK(monitor.counts(in).busy_s == about(0.6));
  CHECK(s.recalls.seconds_per_byte == about(0.6 / 800, 0.2));  // an average that forgets
}

TEST_CASE(
    "link_monitor: utilisation is of the window that ends now, and falls when nothing moves") {
  link_monitor monitor({.window_s = 1, .time_constant_s = 1});
  CHECK(monitor.moved({in, 100, 4, 5}));
  CHECK(monitor.snapshot(5).recalls.utilisation == about(1));
  CHECK(monitor.snapshot(5.25).recalls.utilisation == about(0.75));
  CHECK(monitor.snapshot(6).recalls.utilisation == 0);
  CHECK(monitor.snapshot(4.5).recalls.utilisation == about(1));        // the newest sample is later
  CHECK(monitor.snapshot(6).recalls.seconds_per_byte == about(0.01));  // the speed is known still
}

TEST_CASE("link_monitor: the average of the speed forgets with its time constant") {
  link_monitor monitor({.window_s = 1, .time_constant_s = 2});
  for (int i = 0; i < 200; ++i) CHECK(monitor.moved({in, 1'000, 0.1 * i, 0.1 * i + 0.05}));
  CHECK(monitor.snapshot(20).recalls.seconds_per_byte == about(5e-5));
  // From here on four times as slow. After one time constant 1/e of the old bytes is left.
  for (int i = 200; i < 220; ++i) CHECK(monitor.moved({in, 250, 0.1 * i, 0.1 * i + 0.05}));
  const double kept = std::exp(-1.0);
  const double bytes = 1'000 * kept + 250 * (1 - kept);
  CHECK(monitor.snapshot(22).recalls.seconds_per_byte == about(0.05 / bytes, 0.02));
  for (int i = 220; i < 500; ++i) CHECK(monitor.moved({in, 250, 0.1 * i, 0.1 * i + 0.05}));
  CHECK(monitor.snapshot(50).recalls.seconds_per_byte == about(2e-4, 0.001));
}

TEST_CASE("link_monitor: the queue is what was submitted and has not moved") {
  link_monitor monitor;
  monitor.submitted(in, 1'000);
  monitor.submitted(in, 500);
  monitor.submitted(out, 70);
  CHECK(monitor.snapshot(0).recalls.queued_bytes == 1'500);
  CHECK(monitor.snapshot(0).recalls.queued_transfers == 2);
  CHECK(monitor.snapshot(0).stores.queued_bytes == 70);
  CHECK(monitor.moved({in, 600, 1, 2}));
  CHECK(monitor.snapshot(2).recalls.queued_bytes == 900);
  CHECK(monitor.snapshot(2).recalls.queued_transfers == 2);
  monitor.ended(in, 400);  // failed at 600
  CHECK(monitor.snapshot(2).recalls.queued_bytes == 500);
  CHECK(monitor.snapshot(2).recalls.queued_transfers == 1);
  CHECK(!monitor.moved({in, 500, 3, 3}));  // of unknown length, but it waits no longer
  monitor.ended(in, 0);
  CHECK(monitor.snapshot(2).recalls.queued_bytes == 0);
  CHECK(monitor.snapshot(2).recalls.queued_transfers == 0);
  CHECK(monitor.snapshot(2).stores.queued_bytes == 70);
  // What was never submitted does not make it less than nothing.
  CHECK(monitor.moved({in, 600, 4, 5}));
  monitor.ended(in, 5);
  monitor.submitted(in, -7);
  monitor.ended(out, -7);
  CHECK(monitor.snapshot(2).recalls.queued_bytes == 0);
  CHECK(monitor.snapshot(2).recalls.queued_transfers == 1);
  CHECK(monitor.snapshot(2).stores.queued_bytes == 70);
}

TEST_CASE("link_monitor: a transfer that waits may turn out larger or smaller than was said") {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
  link_monitor monitor;
  const auto queued = [&] { return monitor.snapshot(0).recalls.queued_bytes; };
  monitor.submitted(in, 1'000);
  monitor.resized(in, -300);
  CHECK(queued() == 700);
  monitor.resized(in, 50);
  CHECK(queued() == 750);
  monitor.resized(in, 0);
  monitor.resized(copy_direction::device_to_device, 7);
  CHECK(queued() == 750);
  CHECK(monitor.snapshot(0).stores.queued_bytes == 0);
  monitor.resized(in, -751);
  CHECK(queued() == 0);
  monitor.resized(in, std::numeric_limits<std::int64_t>::min());
  CHECK(queued() == 0);
  monitor.submitted(in, most);
  monitor.submitted(in, most);
  monitor.resized(in, most);
  CHECK(queued() == most);
  CHECK(monitor.snapshot(0).recalls.queued_transfers == 3);
  monitor.ended(in, most);
  CHECK(queued() == 0);
}

TEST_CASE("fault 70: samples that say nothing are refused and counted, and change nothing") {
  link_monitor monitor({.window_s = 1, .time_constant_s = 1});
  CHECK(monitor.moved({in, 1'000, 9, 9.5}));
  const link_snapshot before = monitor.snapshot(10);
  const link_sample bad[] = {
      {in, 0, 9.5, 9.75},
      {in, -1, 9.5, 9.75},
      {in, 10, 9.5, 9.5},
      {in, 10, 9.75, 9.5},
      {in, 10, no_number, 9.75},
      {in, 10, 9.5, no_number},
      {in, 10, no_number, no_number},
      {in, 10, -infinity, 9.75},
      {in, 10, 9.5, infinity},
      {in, 10, -1, 9.75},
      {in, 10, infinity, no_number},
      {in, 10, 8.25, 8.5},
      {in, 10, 0.0, -infinity},
  };
  std::int64_t refused = 0;
  for (const link_sample& sample : bad) {
    CAPTURE(sample.bytes);
    CAPTURE(sample.began_at);
    CAPTURE(sample.ended_at);
    CHECK(!monitor.moved(sample));
    CHECK(monitor.counts(in).refused == ++refused);
    CHECK(monitor.snapshot(10) == before);
  }
  CHECK(monitor.counts(in).samples == 1);
  CHECK(!monitor.moved({copy_direction::device_to_device, 10, 9.5, 9.75}));
  monitor.submitted(copy_direction::device_to_device, 10);
  monitor.ended(copy_direction::device_to_device, 10);
  CHECK(monitor.snapshot(10) == before);
  CHECK(monitor.moved({in, 10, 9.5, 9.75}));
}

TEST_CASE("link_monitor: of a clock that was set back the monitor starts anew, in the end") {
  link_monitor monitor({.window_s = 1, .time_constant_s = 1});
  CHECK(monitor.moved({in, 1'000, 1e6, 1e6 + 1}));  // a clock that ran ahead, once
  int refused = 0;
  double now = 5;
  while (!monitor.moved({in, 10, now, now + 0.1})) {
    ++refused;
    now += 0.2;
    REQUIRE(refused < 100);
  }
  CHECK(refused == 15);
  CHECK(monitor.counts(in).refused == 15);
  const link_snapshot s = monitor.snapshot(now + 0.1);
  CHECK(s.recalls.utilisation == about(0.1));
  CHECK(s.recalls.seconds_per_byte == about(0.01));
  // Now and then one that is late is only that.
  for (int i = 0; i < 100; ++i) {
    now += 0.2;
    CHECK(monitor.moved({in, 10, now, now + 0.1}));
    if (i >= 10) CHECK(!monitor.moved({in, 10, now - 1.2, now - 1.1}));
  }
}

TEST_CASE("link_monitor: threads report while another one reads, nothing is lost or allocated") {
  link_monitor monitor({.window_s = 1, .time_constant_s = 1});
  constexpr int threads = 4, each = 2'000;
  const std::uint64_t before = test::allocations();
  for (int i = 0; i < 100; ++i) {
    monitor.submitted(out, 10);
    (void)monitor.moved({out, 10, i * 0.02, i * 0.02 + 0.01});
    monitor.ended(out, 0);
    (void)monitor.snapshot(2);
  }
  CHECK(test::allocations() == before);
  std::vector<std::thread> reporters;
  reporters.reserve(threads);
  for (int t = 0; t < threads; ++t) {
    reporters.emplace_back([&monitor, t] {
      for (int i = 0; i < each; ++i) {
        const double began = 1e-4 * (threads * i + t);
        monitor.submitted(in, 100);
        (void)monitor.moved({in, 100, began, began + 5e-5});
        monitor.ended(in, 0);
      }
    });
  }
  for (int i = 0; i < 500; ++i) {
    const link_snapshot s = monitor.snapshot(1);
    CHECK(s.recalls.utilisation >= 0);
    CHECK(s.recalls.utilisation <= 1);
    CHECK(s.recalls.queued_bytes >= 0);
  }
  for (std::thread& t : reporters) t.join();
  const link_counts counts = monitor.counts(in);
  CHECK(counts.samples + counts.refused == threads * each);
  CHECK(counts.bytes == 100 * counts.samples);
  CHECK(monitor.snapshot(1).recalls.queued_bytes == 0);
  CHECK(monitor.snapshot(1).recalls.queued_transfers == 0);
}

TEST_CASE("link_monitor: times that are none are refused, by name") {
  CHECK_THROWS_WITH_AS(link_monitor({.window_s = 0}),
                       "link_monitor: window_s is 0.000000, expected 0.000001 to 1000",
                       std::invalid_argument);
  CHECK_THROWS_AS(link_monitor({.window_s = no_number}), std::invalid_argument);
  CHECK_THROWS_AS(link_monitor({.window_s = -1}), std::invalid_argument);
  CHECK_THROWS_AS(link_monitor({.time_constant_s = infinity}), std::invalid_argument);
  CHECK_THROWS_AS(link_monitor({.time_constant_s = 0}), std::invalid_argument);
  const link_monitor monitor;
  CHECK_THROWS_AS((void)monitor.snapshot(no_number), std::invalid_argument);
  CHECK_THROWS_AS((void)monitor.snapshot(-1), std::invalid_argument);
  CHECK_THROWS_AS((void)monitor.snapshot(infinity), std::invalid_argument);
  CHECK_THROWS_WITH_AS((void)monitor.counts(copy_direction::device_to_device),
                       "link_monitor: direction is device_to_device, which is no link's",
                       std::invalid_argument);
}
