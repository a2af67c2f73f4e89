// SPDX-License-Identifier: Apache-2.0
/// @file
/// How transfers share the link and the workers: by the simulated machine's clock, to the nanosecond.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "pulseinfer/link_monitor.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/offload_rig.hpp"

namespace {

using backend = pulseinfer::simulated_backend;
using rig = test::offload_rig<backend>;

constexpr std::uint64_t unit_ns = 1280;  // 128 bytes
/// Of a chunk with so many units, four at most: its head, the page ids, is 16 bytes.
constexpr std::uint64_t chunk_ns(std::uint64_t units) {
  return units * unit_ns + unit_ns / 8;
}

/// A link that takes 10 ns a byte and is by far the slowest part.
constexpr pulseinfer::hardware_profile slow_link{.dram_bytes_per_second = 3e9,
                                                 .link_bytes_per_second = 1e8,
                                                 .hbm_bytes_per_second = 10e9,
                                                 .worker_bytes_per_second = 2e9,
                                                 .copy_start_ns = 0,
                                                 .copy_busy_ns = 0,
                                                 .kernel_launch_ns = 0,
                                                 .task_start_ns = 10,
                                                 .workers = 2,
                                                 .device_bytes = 10'000'000};

rig::targets units_to(std::int32_t count, std::int32_t page) {
  rig::targets units;
  for (std::int32_t b = 0; b < count; ++b) units.push_back({0, b, page + b});
  return units;
}
std::vector<std::int32_t> blocks(std::int32_t count) {
  std::vector<std::int32_t> all;
  for (std::int32_t b = 0; b < count; ++b) all.push_back(b);
  return all;
}

}  // namespace

TEST_CASE("sharing: a small transfer passes a long one at the next chunk") {
  backend machine{pulseinfer::timed{slow_link}};
  rig r(machine, {.chunk_units = 4, .staging_chunks = 8, .chunks_in_flight = 2});
  const auto id = r.stored(1, blocks(64));
  auto long_one = r.recall(0, id, units_to(60, 0)).value();
  machine.sync_until([&] { return machine.now_ns() >= 20 * unit_ns; });
  auto small_one = r.recall(0, id, units_to(1, 80)).value();
  small_one.sync();
  long_one.sync();
  const auto& small = small_one.report();
  CHECK(small.ended_ns < long_one.report().ended_ns);
  // Two chunks of the long one are gathered or on the link, and one more may have been dealt out.
  CHECK(small.ended_ns - small.requested_ns < 3 * chunk_ns(4) + chunk_ns(1));
  // All in all the link was never idle for long: 1, 2, 13 times 4, 2, 1, 1, 1 units, and the small one.
  const auto& all = long_one.report();
  CHECK(all.ended_ns - all.requested_ns < 19 * chunk_ns(0) + 60 * unit_ns + 2 * chunk_ns(1));
}

TEST_CASE("sharing: with more chunks in flight the small one waits longer") {
  std::uint64_t waited[2] = {};
  for (const std::int32_t chunks : {2, 8}) {
    backend machine{pulseinfer::timed{slow_link}};
    rig r(machine, {.chunk_units = 4, .staging_chunks = 8, .chunks_in_flight = chunks});
    const auto id = r.stored(1, blocks(64));
    auto long_one = r.recall(0, id, units_to(60, 0)).value();
    machine.sync_until([&] { return machine.now_ns() >= 20 * unit_ns; });
    auto small_one = r.recall(0, id, units_to(1, 80)).value();
    small_one.sync();
    waited[chunks == 2 ? 0 : 1] = small_one.report().ended_ns - small_one.report().requested_ns;
    long_one.sync();
  }
  CHECK(waited[1] > waited[0] + 8 * unit_ns);
}

TEST_CASE("sharing: equal transfers end together") {
  backend machine{pulseinfer::timed{slow_link}};
  rig r(machine, {.chunk_units = 2, .staging_chunks = 8, .chunks_in_flight = 4});
  const auto id = r.stored(1, blocks(64));
  std::vector<rig::ticket> tickets;
  for (std::int32_t i = 0; i < 4; ++i) {
    tickets.push_back(r.recall(0, id, units_to(20, 20 * i)).value());
  }
  std::uint64_t first = ~std::uint64_t{0}, last = 0;
  for (auto& t : tickets) {
    t.sync();
    first = std::min(first, t.report().ended_ns);
    last = std::max(last, t.report().ended_ns);
  }
  const std::uint64_t begin = tickets.front().report().requested_ns;
  CHECK(last - begin < 4 * 11 * chunk_ns(0) + 80 * unit_ns + chunk_ns(2));  // a busy link
  // The first one had all four chunks while it was alone, and is ahead by them.
  CHECK(last - first <= 4 * 4 * chunk_ns(2));
  // One after the other they would be three times this apart.
  CHECK(last - first < (last - begin) / 2);
}

TEST_CASE("sharing: a recall of units is complete a task's start before it has ended") {
  pulseinfer::hardware_profile slow_tasks = slow_link;
  slow_tasks.task_start_ns = 50'000;
  backend machine{pulseinfer::timed{slow_tasks}};
  rig r(machine, {.chunk_units = 2});
  const auto id = r.stored(1, blocks(4));
  auto t = r.recall(0, id, units_to(4, 0)).value();
  CHECK(!t.is_complete());
  machine.sync_until([&] { return t.is_complete(); });
  const std::uint64_t complete_ns = machine.now_ns();
  CHECK(!t.is_final());
  CHECK(t.enqueue_wait(r.stream) == pulseinfer::wait_outcome::enqueued);
  t.sync();
  CHECK(t.is_complete());
  CHECK(t.report().ended_ns > complete_ns + 40'000);  // seen by a poll, a little late
  // One that will not come whole never is; neither is a store before it has ended.
  auto part = r.recall(0, id, {{0, 0, 0}, {0, 9, 1}}).value();
  machine.sync_until([&] { return part.is_complete() || part.is_final(); });
  CHECK(part.is_final());
  CHECK(!part.is_complete());
  auto out = r.offload(0, id, {{0, 8, 0}}).value();
  machine.sync_until([&] { return out.is_complete() || out.is_final(); });
  CHECK(out.is_final());
  CHECK(out.is_complete());
}

TEST_CASE("sharing: with a head the link moves while the first chunk is gathered") {
  pulseinfer::hardware_profile slow_start = slow_link;
  slow_start.task_start_ns = 5 * unit_ns;
  const auto report_with = [&](std::int32_t head_copies) {
    backend machine{pulseinfer::timed{slow_start}};
    rig r(machine, {.chunk_units = 16, .staging_chunks = 8, .head_copies = head_copies});
    const auto id = r.stored(1, blocks(64));
    auto t = r.recall(1, id, units_to(32, 60)).value();
    t.sync();
    return t.report();
  };
  const auto gathered = report_with(0);
  const auto with_head = report_with(8);
  CHECK(with_head.head_units == 4);
  // A task less before the link's first byte; the first chunk's gathering is hidden behind the head.
  CHECK(gathered.link_began_ns - gathered.requested_ns > 2 * slow_start.task_start_ns);
  CHECK(with_head.link_began_ns - with_head.requested_ns == slow_start.task_start_ns);
  CHECK(with_head.ended_ns - with_head.requested_ns + 3 * unit_ns <
        gathered.ended_ns - gathered.requested_ns);
}

TEST_CASE("sharing: with the link's speed given, the one that would end first goes first") {
  backend machine{pulseinfer::timed{slow_link}};
  rig r(machine, {.chunk_units = 2,
                  .staging_chunks = 8,
                  .chunks_in_flight = 2,
                  .transfers_in_flight = 8,
                  .link_bytes_per_second = 1e8});
  const auto id = r.stored(1, blocks(64));
  const auto at = [&](const rig::ticket& t) { return t.report().ended_ns; };
  // One of two equal ones ends when it would have ended by itself, but for a chunk or two.
  auto first = r.recall(0, id, units_to(20, 0)).value();
  auto second = r.recall(0, id, units_to(20, 20)).value();
  first.sync();
  second.sync();
  const std::uint64_t whole = at(second) - first.report().requested_ns;
  CHECK(at(first) - first.report().requested_ns < whole / 2 + 3 * chunk_ns(2));

  // One that is not needed yet is passed, though it began before and is smaller.
  auto ahead = r.mover.recall_units(0, {&id, 1}, units_to(12, 0), 1'000'000, r.stream).value();
  const std::uint64_t then = machine.now_ns() + 4 * unit_ns;
  machine.sync_until([&] { return machine.now_ns() >= then; });
  auto needed = r.recall(0, id, units_to(20, 20)).value();
  needed.sync();
  CHECK(!ahead.is_final());
  ahead.sync();
  CHECK(at(needed) < at(ahead));

  // Nobody is passed for longer than it takes by itself: small ones that keep coming do not starve
  // a long one.
  auto long_one = r.recall(0, id, units_to(40, 0)).value();
  const std::uint64_t begun = machine.now_ns();
  int small_ones = 0;
  while (!long_one.is_final() && small_ones < 1000) {
    r.recall(0, id, units_to(2, 60))->sync();
    ++small_ones;
  }
  CHECK(long_one.is_final());
  CHECK(machine.now_ns() - begun < 5 * 40 * chunk_ns(1));
}

TEST_CASE("sharing: a recall goes before stores") {
  // Workers are the slowest part: one, at 10 ns a byte.
  pulseinfer::hardware_profile slow_worker = slow_link;
  slow_worker.link_bytes_per_second = 1e9;
  slow_worker.worker_bytes_per_second = 1e8;
  slow_worker.workers = 1;
  backend machine{pulseinfer::timed{slow_worker}};
  rig r(machine, {.chunk_units = 1, .staging_chunks = 16, .chunks_in_flight = 16});
  const auto id = r.stored(1, blocks(4));
  const auto other = r.store.open_sequence().value();
  auto out = r.offload(0, other, units_to(32, 0)).value();
  // By now the chunks of many units wait for the worker.
  machine.sync_until([&] { return machine.now_ns() >= 3 * unit_ns * 2; });
  auto in = r.recall(0, id, units_to(1, 80)).value();
  in.sync();
  const std::uint64_t taken = in.report().ended_ns - in.report().requested_ns;
  out.sync();
  CHECK(in.report().ended_ns + 10 * unit_ns < out.report().ended_ns);
  // One unit that is being dealt out already, the recall's own gather, and their small change.
  CHECK(taken < 2 * 2 * unit_ns + 2 * unit_ns);
}

TEST_CASE("sharing: a monitor finds the speed of the link, and how busy it was") {
  backend machine{pulseinfer::timed{slow_link}};
  pulseinfer::link_monitor monitor({.window_s = 1e-3, .time_constant_s = 10});
  rig r(machine, {.chunk_units = 4, .staging_chunks = 8, .monitor = &monitor});
  const auto now = [&] { return 1e-9 * static_cast<double>(machine.now_ns()); };
  const auto close = [](double value, double expected) {
    return value >= expected && value <= 1.03 * expected;  // tasks that look start a little later
  };
  const auto id = r.store.open_sequence().value();
  r.offload(0, id, units_to(61, 0))->sync();
  // What goes out has no head. The first of its kernels is the link's time, too.
  const double payload_s = 1e-9 * 61 * unit_ns;
  CHECK(close(monitor.counts(pulseinfer::copy_direction::device_to_host).busy_s, payload_s));
  CHECK(close(monitor.snapshot(now()).stores.seconds_per_byte, payload_s / (61 * 128)));
  CHECK(monitor.snapshot(now()).recalls.utilisation == 0);

  // Two at once take turns on the link, which is busy once: 1, 2, 14 times 4, 1, 1 units each.
  const double began = now();
  auto first = r.recall(0, id, units_to(61, 0)).value();
  auto second = r.recall(0, id, units_to(61, 0)).value();
  machine.sync_until([&] { return now() > began + 20e-9 * unit_ns; });
  CHECK(monitor.snapshot(now()).recalls.queued_transfers == 2);
  CHECK(monitor.snapshot(now()).recalls.queued_bytes < 2 * 61 * 128);
  CHECK(monitor.snapshot(now()).recalls.queued_bytes > 2 * 40 * 128);
  first.sync();
  second.sync();
  const auto counts = monitor.counts(pulseinfer::copy_direction::host_to_device);
  const double busy_s =
      1e-9 * (static_cast<double>(counts.samples) * chunk_ns(0) + 2 * 61 * unit_ns);
  CHECK(counts.bytes == 2 * 61 * 128);
  CHECK(counts.refused == 0);
  CHECK(close(counts.busy_s, busy_s));
  CHECK(counts.busy_s <= now() - began);
  CHECK(close(monitor.snapshot(now()).recalls.seconds_per_byte, busy_s / (2 * 61 * 128)));
  // The window is longer than all of it.
  CHECK(close(monitor.snapshot(now()).recalls.utilisation, busy_s / 1e-3));
  CHECK(monitor.snapshot(now()).recalls.queued_bytes == 0);
}
