// SPDX-License-Identifier: Apache-2.0
// Finds out what each way of moving costs on this machine, and lets a transfer engine choose.
#include <cstdio>
#include <cstring>
#include <vector>

#include "pulseinfer/pulseinfer.hpp"

int main() {
  using namespace pulseinfer;
  host_backend backend;

  // Under a second; `to_text` and `from_text` keep it for the next start.
  const transfer_costs costs = calibrate_machine(backend, {.max_seconds = 0.3});
  const transfer_shape shape{.units = 256, .pieces = 512, .bytes = 256 * 65536};
  for (const transfer_way way :
       {transfer_way::staged, transfer_way::direct, transfer_way::batched, transfer_way::pull}) {
    std::printf("%-8s %.3f ms\n", name_of(way).data(), costs.predict(way, shape) * 1e3);
  }

  const kv_geometry geometry{.layers = 1, .kv_heads = 8, .head_dim = 128, .block_tokens = 16};
  const block_layout layout = nhd_layout(geometry, 64);
  device_buffer<std::byte, host_backend> pages(backend,
                                               static_cast<std::size_t>(layout.plane_bytes()) * 2);
  const kv_pool pool(geometry, layout,
                     {{.plane = {pages.data(), pages.data() + layout.plane_bytes()}}});
  block_store<host_backend> store(backend, geometry,
                                  {.capacity_bytes = 64 * geometry.unit_bytes()});
  transfer_engine mover(backend, store, pool, {.way = transfer_way::automatic, .costs = costs});

  const sequence_id sequence = store.open_sequence().value();
  std::vector<unit_target> units;
  for (int block = 0; block < 32; ++block)
    units.push_back({0, logical_block{block}, device_page{block}});
  auto stream = backend.make_stream(stream_priority::normal);
  mover.offload(0, {&sequence, 1}, units, stream)->sync();
  auto ticket = mover.recall_units(0, {&sequence, 1}, units, stream).value();
  ticket.sync();
  std::printf("32 units went %s\n", name_of(ticket.report().way).data());
  return ticket.report().moved == 32 ? 0 : 1;
}
