// SPDX-License-Identifier: Apache-2.0
// What recalls and scores ask of a CUDA device, counted.
//
// Recalls: copies for each chunk, synchronisations for each recall, and the share of the touched
// 32-byte sectors that the scatter kernel has a use for.
//
// Scores: the share of the touched sectors that the kernel has a use for, and the bytes of those
// sectors over the bytes of the digests. One row, 4,096 blocks, 8 KV heads of 128 channels, mean
// digests in FP16, 64 query heads. Sectors of results and of tables count; the queries count once,
// though every warp reads them: they are 4 KiB for a KV head, one address at a time for a whole
// warp, and stay in the nearest cache, which that runtime does not have.
//
// Counts, not times: they come from the CUDA runtime that runs kernels on the CPU, and are the same
// on every machine. No other runtime tells them, so without that one the program fails. No baseline,
// no cache state; one thread starts the recalls, the backend's two workers run them. 8 recalls of 96
// units in chunks of 16; units of 16 tokens in FP16, keys and values, once with all of 4 heads of 64
// channels in dense pages (strips of 8 KiB), once with one of the heads (strips of 128 bytes).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "pulseinfer/backend/cuda_core.cuh"
#include "pulseinfer/pulseinfer.hpp"
#include "support/report.hpp"

#if __has_include("ptxsim_stats.h")
#include "ptxsim_stats.h"
#else
namespace ptxsim {  // compiled without that runtime: nothing can be counted
inline bool available() {
  return false;
}
}  // namespace ptxsim
#endif

namespace {

using namespace pulseinfer;

struct counts {
  double copies_per_chunk = 0;
  double syncs_per_recall = 0;
  double sector_efficiency = 0;
};

#if __has_include("ptxsim_stats.h")
constexpr std::int32_t units = 96;
constexpr std::int64_t chunk_units = 16;
constexpr int recalls = 8;

/// Counts the recalls of `units` units into a pool of that shape.
counts count(const kv_geometry& g, const block_layout& layout) {
  cuda_backend backend;
  device_buffer<std::byte, cuda_backend> memory(backend,
                                                static_cast<std::size_t>(2 * layout.plane_bytes()));
  const kv_pool pool(g, layout, {{.plane = {memory.data(), memory.data() + layout.plane_bytes()}}});
  block_store<cuda_backend> store(
      backend, g,
      {.capacity_bytes = units * g.unit_bytes(), .max_sequences = 1, .max_blocks = units});
  const sequence_id sequence = store.open_sequence().value();
  std::vector<unit_target> targets;
  for (std::int32_t block = 0; block < units; ++block) {
    const reservation r = store.reserve(sequence, 0, logical_block{block});
    store.commit(r.slot);
    targets.push_back({0, logical_block{block}, device_page{block * 7 % units}});  // each page once
  }
  transfer_engine mover(backend, store, pool,
                        {.staging_bytes = 4 * chunk_units * g.unit_bytes(),
                         .chunk_bytes = chunk_units * g.unit_bytes(),
                         .transfers_in_flight = 2,
                         .max_rows = 1,
                         .max_units = units,
                         .way = transfer_way::staged});
  auto stream = backend.make_stream(stream_priority::normal);
  ptxsim::reset();
  for (int i = 0; i < recalls; ++i) {
    auto ticket = mover.recall_units(0, {&sequence, 1}, targets, stream).value();
    ticket.sync_submitted();
    if (ticket.enqueue_wait(stream) != wait_outcome::enqueued) {
      throw std::runtime_error("a recall lost units");
    }
    ticket.sync();
  }
  const ptxsim_counters asked = ptxsim::counters();
  const ptxsim_kernel_counters scatter = ptxsim::kernel("scatter_units");
  const std::uint64_t syncs = asked.stream_syncs + asked.device_syncs + asked.event_syncs +
                              asked.blocking_copies + asked.implicit_syncs;
  // Words are loaded and stored by 16 bytes. The other loads are of page ids, by 4: one address for
  // a whole warp, since a unit has a multiple of 32 words, and so one sector that is not the words'.
  if (scatter.launches == 0 || layout.unit_words() % 32 != 0) {
    throw std::runtime_error("the scatter kernel did not run, or not as this counts");
  }
  const double moved = 2.0 * recalls * units * static_cast<double>(g.unit_bytes());
  const double sectors = static_cast<double>(scatter.sectors_loaded + scatter.sectors_stored -
                                             scatter.requests_width_4);
  return {static_cast<double>(asked.h2d_copies) / static_cast<double>(scatter.launches),
          static_cast<double>(syncs) / recalls, moved / (32.0 * sectors)};
}

std::vector<counts> count_all() {
  const kv_geometry dense{.layers = 1, .kv_heads = 4, .head_dim = 64};
  const kv_geometry one_head{.layers = 1, .kv_heads = 1, .head_dim = 64};
  return {count(dense, nhd_layout(dense, units)),
          count(one_head, make_layout(one_head, units / 4, {.head_groups = 4}))};
}
#endif

#if __has_include("ptxsim_stats.h")
struct score_counts {
  double sector_efficiency = 0;
  double bytes_vs_digests = 0;
};

score_counts count_scores() {
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  constexpr std::int64_t blocks = 4096;
  constexpr std::int64_t tiles = blocks / tile_blocks;
  constexpr query_columns shape{.kv_heads = 8, .head_dim = 128, .heads = 8, .tokens = 1};
  const kv_geometry g{.layers = 1, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim};
  digest_store<cuda_backend> digests(backend, g,
                                     {.kind = digest_kind::mean,
                                      .max_requests = 1,
                                      .max_blocks = blocks,
                                      .element = element_type::f16});
  if (!digests.reserve(0, blocks, stream)) throw std::runtime_error("no tiles");
  device_buffer<float, cuda_backend> queries(backend, shape.kv_heads * shape.size());
  device_buffer<float, cuda_backend> most(backend, shape.kv_heads * blocks);
  device_buffer<float, cuda_backend> total(backend, shape.kv_heads * blocks);
  pinned_buffer<std::int32_t, cuda_backend> row(backend, 2);
  row[0] = 0;
  row[1] = blocks;
  const score_blocks body{.digest = digests.view(0),
                          .shape = shape,
                          .queries = queries.data(),
                          .requests = row.device_data(),
                          .full = row.device_data() + 1,
                          .tiles = tiles,
                          .piece = shape.columns(),
                          .scale = 1.0f,
                          .most = most.data(),
                          .total = total.data(),
                          .stride = blocks};
  ptxsim::reset();
  backend.for_each({tiles * shape.kv_heads, body.words()}, {}, 0, body, stream);
  backend.sync(stream);
  const ptxsim_kernel_counters found = ptxsim::kernel("score_blocks");
  // A warp has one KV head of one tile: of each channel it asks for two times four queries.
  const std::uint64_t query_loads = tiles * shape.kv_heads * shape.head_dim * 2;
  if (found.launches != 1 || found.requests_width_16 != query_loads) {
    throw std::runtime_error("the score kernel did not run, or not as this counts");
  }
  const auto sectors =
      static_cast<double>(found.sectors_loaded + found.sectors_stored - query_loads);
  const auto digest_bytes = static_cast<double>(digests.form().tile_bytes() * tiles);
  const auto result_bytes = static_cast<double>(most.bytes() + total.bytes());
  return {(digest_bytes + result_bytes) / (32.0 * sectors),
          (32.0 * sectors + static_cast<double>(queries.bytes())) / digest_bytes};
}
#endif

void score(benchmark::State& state) {
  if (!ptxsim::available()) {
    throw std::runtime_error("cuda_counts: this is not the runtime that counts");
  }
#if __has_include("ptxsim_stats.h")
  score_counts found;
  for (auto _ : state) found = count_scores();
  state.counters["sector_efficiency"] = found.sector_efficiency;
  state.counters["bytes_vs_digests"] = found.bytes_vs_digests;
  pulseinfer_bench::report("cuda_score_sector_efficiency", found.sector_efficiency);
  pulseinfer_bench::report("cuda_score_bytes_vs_digest_bytes", found.bytes_vs_digests);
#endif
}
BENCHMARK(score)->Iterations(1)->Unit(benchmark::kMillisecond);

void recall(benchmark::State& state) {
  if (!ptxsim::available()) {
    throw std::runtime_error("cuda_counts: this is not the runtime that counts");
  }
#if __has_include("ptxsim_stats.h")
  std::vector<counts> all;
  for (auto _ : state) all = count_all();
  counts worst{0, 0, 2};
  for (const counts& c : all) {
    worst.copies_per_chunk = std::max(worst.copies_per_chunk, c.copies_per_chunk);
    worst.syncs_per_recall = std::max(worst.syncs_per_recall, c.syncs_per_recall);
    worst.sector_efficiency = std::min(worst.sector_efficiency, c.sector_efficiency);
  }
  const auto note = [&](const char* name, double value) {
    state.counters[name] = value;
    pulseinfer_bench::report(name, value);
  };
  note("cuda_h2d_copies_per_chunk", worst.copies_per_chunk);
  note("cuda_syncs_per_recall", worst.syncs_per_recall);
  note("cuda_scatter_sector_efficiency", worst.sector_efficiency);
#endif
}

BENCHMARK(recall)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
