// SPDX-License-Identifier: Apache-2.0
// A simulated link of 1 GB/s that gets busy and idle again, and what admission makes of it.
#include <cstdio>
#include <cstring>
#include <vector>

#include "pulseinfer/pulseinfer.hpp"

int main() {
  using namespace pulseinfer;
  simulated_backend backend{timed{{.link_bytes_per_second = 1e9}}};
  const kv_geometry geometry{.layers = 4, .kv_heads = 8, .head_dim = 128, .block_tokens = 16};
  const block_layout layout = nhd_layout(geometry, 64);
  device_buffer<std::byte, simulated_backend> memory(backend, 8 * layout.plane_bytes());
  std::vector<layer_planes> planes;
  for (int layer = 0; layer < 4; ++layer) {
    std::byte* const keys = memory.data() + 2L * layer * layout.plane_bytes();
    planes.push_back({.plane = {keys, keys + layout.plane_bytes()}});
  }
  const kv_pool pool(geometry, layout, planes);
  block_store<simulated_backend> store(backend, geometry,
                                       {.capacity_bytes = 256 * geometry.unit_bytes()});
  auto stream = backend.make_stream(stream_priority::normal);
  const sequence_id sequence = store.open_sequence().value();

  link_monitor monitor({.window_s = 0.01});
  transfer_engine mover(backend, store, pool, {.monitor = &monitor});
  adaptive_admission policy(geometry.layers, {.retained_layers = 2});
  layer_activity activity(geometry.layers);
  std::vector<double> active(4), placement(4);

  std::vector<unit_target> units;
  for (int block = 0; block < 32; ++block) {
    units.push_back({0, logical_block{block}, device_page{block}});
  }
  for (int layer = 0; layer < 4; ++layer) {
    mover.offload(layer, {&sequence, 1}, units, stream)->sync();
  }

  const auto decide = [&] {
    const double now = 1e-9 * static_cast<double>(backend.now_ns());
    const link_snapshot link = monitor.snapshot(now);  // of a group of ranks: merge(all of theirs)
    activity.read(active, now);
    policy.observe(link, active);
    const admission_answer answer = policy.admit(
        {.context_bytes = 1 << 30, .device_bytes_free = 1 << 30, .load_bytes = 64 << 20},
        placement);
    std::printf("link %3.0f %% busy: offload %.2f %.2f %.2f %.2f of the layers, load in %.0f ms\n",
                100 * link.utilisation(), placement[0], placement[1], placement[2], placement[3],
                1e3 * answer.load_s);
    return placement;
  };

  // Layer 2 misses most; the link has no rest.
  for (int step = 0; step < 8; ++step) {
    for (int layer = 0; layer < 4; ++layer) {
      const std::vector<unit_target> missed(units.begin(), units.begin() + (layer == 2 ? 32 : 8));
      auto ticket = mover.recall_units(layer, {&sequence, 1}, missed, stream).value();
      ticket.sync();
      activity.record(layer, {.recalled_bytes = ticket.report().bytes},
                      1e-9 * static_cast<double>(ticket.report().ended_ns));
    }
    decide();
  }
  const bool stays = placement[2] == 0;
  // Then nobody asks for anything: 1 second of other work.
  const auto idle = [&] {
    backend.for_each(
        {1, 1}, {}, 3'350'000'000'000, [](std::int64_t, std::int64_t) {}, stream);
    backend.sync(stream);
  };
  for (int step = 0; step < 8; ++step) {
    idle();
    decide();
  }
  return stays && placement[2] == 0.9 ? 0 : 1;
}
