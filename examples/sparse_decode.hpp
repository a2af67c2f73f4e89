// SPDX-License-Identifier: Apache-2.0
// The shortest complete use: offload a context, then decode one step of one layer over it. The same
// function runs on every backend; the README shows it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "pulseinfer/pulseinfer.hpp"

template <class Backend>
int sparse_decode(Backend backend) {
  using namespace pulseinfer;
  auto stream = backend.make_stream(stream_priority::normal);

  // The engine's side: a pool of 64 pages, one request with 40 blocks of context in pages 0 to 39.
  const kv_geometry geometry{.layers = 1, .kv_heads = 2, .head_dim = 64, .block_tokens = 16};
  const block_layout layout = nhd_layout(geometry, 64);
  device_buffer<std::byte, Backend> memory(backend, 2 * layout.plane_bytes());
  const kv_pool pool(geometry, layout,
                     {{.plane = {memory.data(), memory.data() + layout.plane_bytes()}}});
  pinned_buffer<float, Backend> queries(backend, 8 * 64);
  pinned_buffer<std::int32_t, Backend> engine(backend, 66);  // request, tokens, block table
  std::fill(queries.data(), queries.data() + queries.size(), 0.5f);
  engine[0] = 0;
  engine[1] = 40 * geometry.block_tokens;
  for (int block = 0; block < 64; ++block) engine[2 + block] = block < 40 ? block : -1;
  const block_table table{engine.device_data() + 2, 1, 64};
  const batch_view batch{{engine.data(), 1}, engine.device_data(), engine.device_data() + 1, 640};

  // The library's side.
  block_store<Backend> store(backend, geometry,
                             {.capacity_bytes = 64 * geometry.unit_bytes(), .max_blocks = 64});
  digest_store<Backend> digests(backend, geometry, {.max_requests = 1, .max_blocks = 64});
  consensus_selector<Backend> chooser(backend, digests, {.query_heads = 8, .budget_blocks = 8});
  hot_buffer<Backend> hot(backend, pool, {.pages_per_request = 16, .budget_blocks = 8});
  transfer_engine mover(backend, store, pool, {.staging_bytes = 1 << 20, .chunk_bytes = 1 << 17});

  // Offload the context: digests stay on the device, units go to the store.
  const sequence_id sequence = store.open_sequence().value();
  std::vector<unit_target> units;
  for (int block = 0; block < 40; ++block)
    units.push_back({0, logical_block{block}, device_page{block}});
  if (!digests.reserve(0, 40, stream)) return 1;
  digests.build(0, 0, 0, 40, pool, table, stream);
  mover.offload(0, {&sequence, 1}, units, stream)->sync();

  // Lend 16 pages to the hot buffer; then one step: select, resolve, recall, attend.
  std::vector<std::int32_t> lent;
  for (int page = 40; page < 56; ++page) lent.push_back(page);
  hot.lend(0, lent, stream);
  const auto chosen = chooser.select(0, batch, {queries.device_data()}, stream);
  const auto step = hot.resolve(0, batch, chosen, stream).value();
  auto ticket = mover.recall(step, {&sequence, 1}, stream).value();
  ticket.sync_submitted();  // or run another group of requests until phase() says so
  if (ticket.enqueue_wait(stream) != wait_outcome::enqueued) return 1;  // else sync, then discard
  // ... here, on `stream`: the engine's attention, over its own pages of the sinks, the recent window
  // and the block being filled, and over step.pages, which holds the chosen blocks ...
  backend.sync(stream);
  ticket.sync();
  std::printf("%lld blocks recalled\n", static_cast<long long>(ticket.report().moved));
  return ticket.report().moved == 8 ? 0 : 1;
}
