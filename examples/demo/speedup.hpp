// SPDX-License-Identifier: Apache-2.0
/// @file
/// Staged against per-block recall of the same units, over the same link.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "pulseinfer/pulseinfer.hpp"

namespace demo {

/// Bytes per second that one thread copies, the median of several copies of 32 MiB.
inline double copy_speed() {
  std::vector<std::byte> from(32 << 20, std::byte{1});
  std::vector<std::byte> to(from.size());
  std::vector<double> speeds;
  for (int i = 0; i < 9; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    std::memcpy(to.data(), from.data(), from.size());
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
    if (to[static_cast<std::size_t>(i) * 999] != std::byte{1}) throw std::logic_error("memcpy");
    speeds.push_back(static_cast<double>(from.size()) / taken.count());
  }
  std::nth_element(speeds.begin(), speeds.begin() + 4, speeds.end());
  return speeds[4];
}

/// Time of a per-block recall over that of a staged one: 512 units of the geometry, scattered in the
/// store, both ways in turn; the median of the pairs' ratios.
template <class Backend>
double staged_vs_per_block(Backend backend, const pulseinfer::kv_geometry& geometry) {
  using namespace pulseinfer;
  constexpr std::int32_t units = 512;
  constexpr int pairs = 7;
  const kv_geometry g{.layers = 1,
                      .kv_heads = geometry.kv_heads,
                      .head_dim = geometry.head_dim,
                      .block_tokens = geometry.block_tokens,
                      .element = geometry.element};
  const block_layout layout = nhd_layout(g, units);
  device_buffer<std::byte, Backend> memory(backend,
                                           static_cast<std::size_t>(2 * layout.plane_bytes()));
  const kv_pool pool(g, layout, {{.plane = {memory.data(), memory.data() + layout.plane_bytes()}}});
  block_store<Backend> store(backend, g,
                             {.capacity_bytes = std::int64_t{4} * units * g.unit_bytes(),
                              .max_sequences = 1,
                              .max_blocks = 4 * units});
  const sequence_id sequence = store.open_sequence().value();
  for (std::int32_t block = 0; block < 4 * units; ++block) {
    const reservation r = store.reserve(sequence, 0, logical_block{block});
    std::memset(store.writable(r.slot), block & 0xff, static_cast<std::size_t>(g.unit_bytes()));
    store.commit(r.slot);
  }
  std::vector<unit_target> targets;
  for (std::int32_t i = 0; i < units; ++i)
    targets.push_back({0, logical_block{(i * 1223) % (4 * units)}, device_page{i}});

  const transfer_options options{.staging_bytes = 4 << 20, .chunk_bytes = 512 << 10};
  transfer_options direct = options;
  direct.way = transfer_way::per_block;
  transfer_engine staged(backend, store, pool, options);
  transfer_engine per_block(backend, store, pool, direct);
  auto stream = backend.make_stream(stream_priority::normal);
  const auto time = [&](auto& engine) {
    auto ticket = engine.recall_units(0, {&sequence, 1}, targets, stream).value();
    ticket.sync();
    if (ticket.report().moved != units) throw std::runtime_error("demo: a recall lost units");
    return static_cast<double>(ticket.report().ended_ns - ticket.report().requested_ns);
  };
  std::vector<double> ratios;
  for (int i = 0; i < pairs; ++i) {
    const double slow = time(per_block);
    ratios.push_back(slow / time(staged));
  }
  std::nth_element(ratios.begin(), ratios.begin() + pairs / 2, ratios.end());
  return ratios[pairs / 2];
}

}  // namespace demo
