// SPDX-License-Identifier: Apache-2.0
/// @file
/// What transfers tell a link monitor, on the backend under test: every byte once, times that lie
/// within the transfer, nothing left in the queue whatever happens. Include the backend's support
/// header first.
#include <doctest/doctest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "pulseinfer/link_monitor.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/failing_backend.hpp"
#include "support/offload_rig.hpp"

namespace {

using backend = test::failing_backend<test::backend>;
using rig = test::offload_rig<backend>;
using pulseinfer::copy_direction;
using pulseinfer::link_load;
using pulseinfer::link_monitor;
using pulseinfer::link_snapshot;
using pulseinfer::transfer_report;
using pulseinfer::transfer_way;
using test::job;

constexpr copy_direction in = copy_direction::host_to_device;
constexpr copy_direction out = copy_direction::device_to_host;
constexpr std::int64_t unit = rig::geometry.unit_bytes();

template <class Case>
void each(Case run) {
  test::each_backend([&](test::backend machine) { run(backend(machine)); });
}

rig::targets units(std::int32_t count) {
  rig::targets all;
  for (std::int32_t b = 0; b < count; ++b) all.push_back({0, b, 90 - b});
  return all;
}
double seconds(std::uint64_t ns) {
  return 1e-9 * static_cast<double>(ns);
}
link_snapshot now(const backend& machine, const link_monitor& monitor) {
  return monitor.snapshot(seconds(machine.now_ns()));
}
bool is_empty(const link_load& load) {
  return load.queued_bytes == 0 && load.queued_transfers == 0;
}
void check_times(const transfer_report& r) {
  CHECK(r.requested_ns <= r.link_began_ns);
  CHECK(r.link_began_ns <= r.link_ended_ns);
  CHECK(r.link_ended_ns <= r.ended_ns);
}

}  // namespace

TEST_CASE("transfer_link: a monitor sees every byte of both directions, by every way") {
  each([](backend machine) {
    for (const transfer_way way : test::all_ways) {
      CAPTURE(static_cast<int>(way));
      link_monitor monitor({.window_s = 1, .time_constant_s = 1});
      rig r(machine, {.way = way, .monitor = &monitor});
      const auto id = r.store.open_sequence().value();
      std::int64_t bytes = 0;
      for (const std::int32_t count : {0, 1, 9, 30}) {
        CAPTURE(count);
        auto leaving = r.offload(0, id, units(count));
        REQUIRE(leaving.has_value());
        leaving->sync();
        const std::int64_t left = leaving->report().bytes;
        auto coming = r.recall(0, id, units(count));
        REQUIRE(coming.has_value());
        coming->sync();
        if (left > 0) check_times(leaving->report());
        if (count > 0) check_times(coming->report());
        if (count == 0) CHECK(coming->report().link_ended_ns == 0);
        bytes += count * unit;
        CHECK(monitor.counts(in).bytes <= bytes);
        const link_snapshot s = now(machine, monitor);
        CHECK(is_empty(s.recalls));
        CHECK(is_empty(s.stores));
        CHECK(s.utilisation() >= 0);
        CHECK(s.utilisation() <= 1);
      }
      // All was timed, but for chunks whose beginning nobody saw; none came twice.
      const auto counts = monitor.counts(in);
      CHECK(counts.bytes <= bytes);
      if (counts.refused == 0) CHECK(counts.bytes == bytes);
      if (monitor.counts(out).refused == 0) CHECK(monitor.counts(out).bytes == 30 * unit);
      CHECK(counts.samples > 0);
      CHECK(counts.busy_s > 0);
      machine.sync(r.stream);
    }
  });
}

TEST_CASE("transfer_link: nothing is left in the queue, whatever failed, or was cancelled") {
  each([](backend machine) {
    for (const auto& [which, name] : test::all_jobs) {
      const std::string at = name;
      CAPTURE(at);
      for (int n = 1; n <= 6; ++n) {
        CAPTURE(n);
        link_monitor monitor;
        rig r(machine, {.chunk_units = 2, .monitor = &monitor});
        const auto id = r.stored(1, {0, 1, 2, 3, 4, 5, 6, 7});
        machine.arm_throw(which, n);
        for (const bool is_recall : {true, false}) {
          std::optional<rig::ticket> t;
          try {
            if (is_recall) {
              t = r.recall(0, id, units(8));
            } else {
              t = r.offload(0, id, {{0, 20, 3}, {0, 21, 4}, {0, 22, 5}});
            }
          } catch (const pulseinfer::device_error&) {
          }
          if (!t) continue;
          if (n % 3 == 0) t->cancel();
          try {
            t->sync();
          } catch (const pulseinfer::device_error&) {
          }
        }
        machine.arm(job::copy, 0, {});
        const link_snapshot s = now(machine, monitor);
        CHECK(is_empty(s.recalls));
        CHECK(is_empty(s.stores));
      }
    }
  });
}

TEST_CASE("transfer_link: the time that copies wait for the engine is not the link's") {
  backend machine(test::make_backend());
  for (const transfer_way way : {transfer_way::staged, transfer_way::direct, transfer_way::pull}) {
    CAPTURE(static_cast<int>(way));
    link_monitor monitor({.window_s = 10, .time_constant_s = 1});
    // As many chunks as there are units: none waits until another one is drained.
    rig r(machine, {.staging_chunks = 8, .way = way, .monitor = &monitor});
    const auto id = r.stored(1, {0, 1, 2, 3});
    machine.sync(r.stream);
    for (const bool is_recall : {false, true}) {
      CAPTURE(is_recall);
      std::uint64_t released = 0;
      std::optional<rig::ticket> t;
      {
        test::hold<test::backend> late(machine, r.stream);
        t = is_recall ? r.recall(0, id, units(4)) : r.offload(0, id, {{0, 9, 3}, {0, 10, 4}});
        REQUIRE(t.has_value());
        t->sync_submitted();
        if (test::hold<test::backend>::is_exact) released = machine.now_ns();
        late.release();
        t->sync();
      }
      const transfer_report& report = t->report();
      check_times(report);
      const bool waits = !is_recall || way != transfer_way::staged;
      // A stream is held back for a second of the simulated machine's time.
      if (!test::takes_threads<test::backend>) released = report.requested_ns + 999'000'000;
      if (waits) CHECK(report.link_began_ns >= released);
      if (!test::takes_threads<test::backend> && !waits) {
        CHECK(report.link_ended_ns < released);
      }
    }
    if (!test::takes_threads<test::backend>) {
      CHECK(monitor.counts(in).busy_s < 0.01);
      CHECK(monitor.counts(out).busy_s < 0.01);
    }
    machine.sync(r.stream);
  }
}
