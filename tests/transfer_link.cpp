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

TEST_CASE("transfer_link: units wait from the call on, and those that the store lacks no longer") {
  backend machine(test::make_backend());
  link_monitor monitor;
  // As many chunks as there are units: submitting waits for none that comes back.
  rig r(machine, {.staging_chunks = 8, .way = transfer_way::direct, .monitor = &monitor});
  const auto id = r.stored(1, {0, 1, 2});
  machine.sync(r.stream);
  test::hold<test::backend> held(machine, r.stream);  // no copy goes before the engine
  auto coming = r.recall(0, id, units(5));
  auto leaving = r.offload(0, id, {{0, 2, 3}, {0, 9, 4}, {0, 10, 5}});  // the store has the first
  REQUIRE(coming.has_value());
  REQUIRE(leaving.has_value());
  const bool nothing_goes = test::hold<test::backend>::is_exact;
  if (nothing_goes || !test::takes_threads<test::backend>) {
    const link_snapshot at_once = now(machine, monitor);
    CHECK(at_once.recalls.queued_transfers == 1);
    CHECK(at_once.recalls.queued_bytes >= 3 * unit);
    CHECK(at_once.recalls.queued_bytes <= 5 * unit);
    CHECK(at_once.stores.queued_transfers == 1);
    CHECK(at_once.stores.queued_bytes == 2 * unit);
    if (!test::takes_threads<test::backend>) CHECK(at_once.recalls.queued_bytes == 5 * unit);
    coming->sync_submitted();
    CHECK(now(machine, monitor).recalls.queued_bytes == 3 * unit);
    auto unwanted = r.recall(0, id, units(3));
    REQUIRE(unwanted.has_value());
    unwanted->cancel();
    CHECK(now(machine, monitor).recalls.queued_transfers == 2);
    if (!test::takes_threads<test::backend>) {
      CHECK(now(machine, monitor).recalls.queued_bytes == 6 * unit);
      unwanted->sync_submitted();
      CHECK(now(machine, monitor).recalls.queued_bytes == 3 * unit);
    }
    held.release();
    unwanted->sync();
  }
  held.release();
  coming->sync();
  leaving->sync();
  CHECK(is_empty(now(machine, monitor).recalls));
  CHECK(is_empty(now(machine, monitor).stores));
  machine.sync(r.stream);
}

TEST_CASE("transfer_link: a step waits with as many units as the step before lacked") {
  backend machine(test::make_backend());
  link_monitor monitor;
  rig r(machine, {.monitor = &monitor});
  const auto id = r.stored(1, {0, 1, 2, 3, 4, 5, 6});
  r.lend(0, 0, 6);
  const auto recall = [&](const std::vector<std::int32_t>& chosen, std::int64_t expected) {
    CAPTURE(expected);
    const pulseinfer::selection selected = r.choice({chosen});
    const pulseinfer::batch_view batch = r.rows_of({0});
    test::hold<test::backend> held(machine, r.stream);  // it is not resolved yet
    const auto step = r.hot.resolve(0, batch, selected, r.stream);
    REQUIRE(step.has_value());
    auto t = r.mover.recall(*step, {&id, 1}, r.stream);
    REQUIRE(t.has_value());
    if (test::hold<test::backend>::is_exact || !test::takes_threads<test::backend>) {
      CHECK(now(machine, monitor).recalls.queued_transfers == 1);
      CHECK(now(machine, monitor).recalls.queued_bytes == expected * unit);
    }
    held.release();
    t->sync();
    CHECK(is_empty(now(machine, monitor).recalls));
    machine.sync(r.stream);
    return t->report().moved;
  };
  CHECK(recall({0, 1, 2}, 4) == 3);  // nothing is known: all that it may have chosen
  CHECK(recall({0, 1, 2, 3}, 3) == 1);
  CHECK(recall({0, 1, 2, 3}, 1) == 0);
  CHECK(recall({0, 1, 2, 4}, 0) == 1);
  CHECK(recall({0, 1, 2, 5}, 1) == 1);
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
