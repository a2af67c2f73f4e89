// SPDX-License-Identifier: Apache-2.0
/// @file
/// Monitor, admission and transfers together, on the backend under test: a link that is asked for
/// more than it carries. Include the backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "pulseinfer/admission.hpp"
#include "pulseinfer/link_monitor.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/offload_rig.hpp"

namespace {

using backend = test::backend;
using rig = test::offload_rig<backend>;
using pulseinfer::adaptive_admission;
using pulseinfer::admission_verdict;
using pulseinfer::copy_direction;
using pulseinfer::link_monitor;
using pulseinfer::link_snapshot;

constexpr std::int64_t unit = rig::geometry.unit_bytes();

link_snapshot now(const backend& machine, const link_monitor& monitor) {
  return monitor.snapshot(1e-9 * static_cast<double>(machine.now_ns()));
}
bool is_empty(const link_snapshot& link) {
  return link.recalls.queued_bytes == 0 && link.stores.queued_bytes == 0;
}

}  // namespace

TEST_CASE("fault 68: transfers that are offered without end fill a bounded queue, and it drains") {
  test::each_backend([](backend machine) {
    link_monitor monitor;
    rig r(machine, {.transfers_in_flight = 16, .monitor = &monitor});
    const auto id = r.stored(1, {0, 1, 2, 3});
    adaptive_admission policy(
        rig::geometry.layers,
        {.retained_layers = 1, .store_queue_bytes = 12 * unit, .recall_queue_bytes = 24 * unit});
    std::vector<double> placement(static_cast<std::size_t>(policy.layers()));
    std::vector<rig::ticket> under_way;
    std::int32_t next_block = 10;
    std::int64_t stores = 0, recalls = 0, deepest_stores = 0, deepest_recalls = 0;
    const auto add = [&](std::optional<rig::ticket> t) {
      if (t) under_way.push_back(std::move(*t));
      const link_snapshot link = now(machine, monitor);
      deepest_stores = std::max(deepest_stores, link.stores.queued_bytes);
      deepest_recalls = std::max(deepest_recalls, link.recalls.queued_bytes);
    };
    for (int i = 0; i < 12; ++i) {
      policy.observe(now(machine, monitor), {});
      for (int k = 0; k < 4; ++k) {
        if (policy.may_store(2 * unit)) {
          add(r.offload(0, id, {{0, next_block, 50}, {0, next_block + 1, 51}}));
          next_block += 2;
          ++stores;
        }
        if (policy.may_recall(4 * unit)) {
          add(r.recall(0, id, {{0, 0, 1}, {0, 1, 2}, {0, 2, 3}, {0, 3, 4}}));
          ++recalls;
        }
      }
      // The machine goes on a little: the oldest transfer ends.
      if (!under_way.empty()) {
        under_way.front().sync();
        under_way.erase(under_way.begin());
      }
      next_block = std::min(next_block, 60);
    }
    CHECK(stores > 0);
    CHECK(recalls > 0);
    CHECK(deepest_stores <= policy.options().store_queue_bytes);
    CHECK(deepest_recalls <= policy.options().recall_queue_bytes);
    for (rig::ticket& t : under_way) t.sync();
    under_way.clear();
    policy.observe(now(machine, monitor), {});
    CHECK(is_empty(now(machine, monitor)));
    CHECK(!policy.is_shedding());
    CHECK(policy.may_store(unit));
    CHECK(policy.may_recall(unit));
    CHECK(policy.admit({.context_bytes = 4 * unit, .device_bytes_free = 4 * unit}, placement)
              .verdict == admission_verdict::admit);
    machine.sync(r.stream);
    CHECK(rig::at_rest(r.store.counts()));
  });
}

TEST_CASE("fault 68: a tier that does not answer is not fed any more") {
  backend machine = test::make_backend();
  link_monitor monitor;
  rig r(machine, {.staging_chunks = 16, .transfers_in_flight = 16, .monitor = &monitor});
  const auto id = r.store.open_sequence().value();
  adaptive_admission policy(
      rig::geometry.layers,
      {.retained_layers = 1, .store_queue_bytes = 6 * unit, .recall_queue_bytes = 12 * unit});
  std::vector<double> placement(static_cast<std::size_t>(policy.layers()));
  std::vector<rig::ticket> under_way;
  {
    test::hold<backend> held(machine, r.stream);  // nothing of these can leave
    for (std::int32_t block = 0; block < 6; block += 2) {
      auto t = r.offload(0, id, {{0, block, block}, {0, block + 1, block + 1}});
      REQUIRE(t.has_value());
      under_way.push_back(std::move(*t));
    }
    if (test::hold<backend>::is_exact || !test::takes_threads<backend>) {
      policy.observe(now(machine, monitor), {});
      CHECK(now(machine, monitor).stores.queued_bytes == 6 * unit);
      CHECK(now(machine, monitor).stores.queued_transfers == 3);
      CHECK(policy.is_shedding());
      CHECK(!policy.may_store(unit));
      CHECK(policy.may_recall(unit));
      CHECK(policy.admit({}, placement).verdict == admission_verdict::defer);
    }
    held.release();
    for (rig::ticket& t : under_way) t.sync();
  }
  policy.observe(now(machine, monitor), {});
  CHECK(!policy.is_shedding());
  CHECK(policy.may_store(unit));
  CHECK(policy.admit({}, placement).verdict == admission_verdict::admit);
  machine.sync(r.stream);
}

TEST_CASE("admission: a link that gets busy is relieved without a single load") {
  test::each_backend([](backend machine) {
    link_monitor monitor;
    rig r(machine, {.monitor = &monitor});
    const auto id = r.store.open_sequence().value();
    adaptive_admission policy(rig::geometry.layers, {.retained_layers = 1});
    std::vector<pulseinfer::layer_blocks> at(static_cast<std::size_t>(rig::geometry.layers),
                                             {.only_on_device = 20});
    std::vector<std::int32_t> stored(at.size(), 0);
    for (int step = 0; step < 30; ++step) {
      link_snapshot link = now(machine, monitor);
      link.recalls.utilisation = step < 10 || step >= 20 ? 0.1 : 1;  // the engine's other traffic
      link.stores.utilisation = 0;  // a slow machine may be busy with so little
      policy.observe(link, {});
      for (std::size_t layer = 0; layer < at.size(); ++layer) {
        const auto which = static_cast<std::int32_t>(layer);
        ++at[layer].only_on_device;  // the context grows
        const auto plan = pulseinfer::plan_layer(policy.offload_share(which), at[layer]);
        rig::targets leaving;
        for (std::int64_t i = 0; i < plan.offload; ++i) {
          leaving.push_back({0, stored[layer], stored[layer]});
          ++stored[layer];
        }
        if (!leaving.empty()) r.offload(which, id, leaving)->sync();
        at[layer].only_on_device -= plan.offload;
        at[layer].only_in_store += plan.offload + plan.release;
        at[layer].on_both -= plan.release;
      }
    }
    CHECK(monitor.counts(copy_direction::host_to_device).samples == 0);
    CHECK(monitor.counts(copy_direction::host_to_device).refused == 0);
    // While it was busy the outermost layer kept what grew; then it caught up.
    CHECK(at[0].only_in_store == at[1].only_in_store);
    CHECK(at[0].only_in_store == 45);
    machine.sync(r.stream);
  });
}
