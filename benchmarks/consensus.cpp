// SPDX-License-Identifier: Apache-2.0
// Scores and consensus of one row on the host, against what reading memory gives.
//
// 8,192 blocks, 8 KV heads, 64 query heads, 128 channels, mean digests in FP16: 16.8 MB a layer. One
// row at a time, a layer after the other: 12 layers are 201 MB, so that no digest is in the last-level
// cache when its turn comes. Queries in FP32, the rule that is the default, one list for all heads;
// queries arranged, scores and consensus included, top-k not. Digests lie in the backend's device
// memory, on pages of 2 MiB where the system grants them. No block size matters: keys are not read.
//
// Baseline: the digests of another layer read by loads of 32 bytes (AVX2; 16 without) into four sums,
// by a kernel of the same backend on the same stream, whose one thread runs both. In turn, a layer each; the median of time
// of the reading / time of the scores.
//
// Noted beside it: in_cache_gb_per_s is the rate of the same kernel over one tile that stays in the
// cache, which is what arithmetic alone allows: for each element 8 products and 8 sums, rounded
// apart, without fused instructions.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/pulseinfer.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using namespace pulseinfer;
using clock_type = std::chrono::steady_clock;

constexpr std::int32_t layers = 12;
constexpr std::int64_t blocks = 8192;
constexpr std::int32_t query_heads = 64;
constexpr kv_geometry geometry{
    .layers = layers, .kv_heads = 8, .head_dim = 128, .block_tokens = 16};

double seconds_since(clock_type::time_point start) {
  return std::chrono::duration<double>(clock_type::now() - start).count();
}

#if defined(__x86_64__)
#define PULSEINFER_BENCH_WIDE __attribute__((target("avx2")))
#else
#define PULSEINFER_BENCH_WIDE
#endif

/// Reads bytes, a multiple of 256, at the speed of memory. What it returns depends on all of them.
PULSEINFER_BENCH_WIDE std::uint64_t read_all(const std::byte* at, std::size_t bytes) {
  using wide = std::uint64_t __attribute__((vector_size(32), may_alias));
  wide sums[4] = {};
  for (std::size_t i = 0; i < bytes; i += 256) {
    for (std::size_t k = 0; k < 8; ++k) {
      sums[k % 4] += *reinterpret_cast<const wide*>(at + i + 32 * k);
    }
    // The hardware stops at the border of a page: a step ahead of it gains a third.
    __builtin_prefetch(at + i + 1024, 0, 0);
    __builtin_prefetch(at + i + 1088, 0, 0);
    __builtin_prefetch(at + i + 1152, 0, 0);
    __builtin_prefetch(at + i + 1216, 0, 0);
  }
  const wide all = sums[0] + sums[1] + sums[2] + sums[3];
  return all[0] + all[1] + all[2] + all[3];
}

/// Kernel body: reads a part of some memory.
struct read_part {
  static constexpr std::int64_t bytes = 128 << 10;  // of a tile

  const std::byte* at;
  std::uint64_t* sum;

  void operator()(std::int64_t part, std::int64_t) const {
    *sum += read_all(at + part * bytes, bytes);
  }
};

/// One request with digests of all layers, all of them made of random numbers.
struct setting {
  setting()
      : stream(machine.make_stream(stream_priority::normal)),
        digests(machine, geometry,
                {.kind = digest_kind::mean,
                 .max_requests = 1,
                 .max_blocks = blocks,
                 .element = element_type::f16}),
        selector(machine, digests, {.query_heads = query_heads, .max_rows = 1}),
        batch_arrays(machine, 2),
        queries(machine, static_cast<std::size_t>(query_heads) * geometry.head_dim) {
    if (!digests.reserve(0, blocks, stream)) throw std::runtime_error("no tiles");
    machine.sync(stream);
    detail::random_source draw(1);
    std::vector<std::uint16_t> some(1 << 16);
    for (std::uint16_t& half : some) half = f16_from_float(number(draw));
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      std::byte* const at = digests.view(layer).tiles;
      for (std::size_t i = 0; i < bytes(); i += some.size() * sizeof some[0]) {
        std::memcpy(at + i, some.data(), some.size() * sizeof some[0]);
        std::rotate(some.begin(), some.begin() + 77, some.end());
      }
    }
    for (std::size_t i = 0; i < queries.size(); ++i) queries.data()[i] = number(draw);
    batch_arrays.data()[0] = 0;
    batch_arrays.data()[1] = static_cast<std::int32_t>(blocks) * geometry.block_tokens;
  }
  static float number(detail::random_source& draw) {
    return (static_cast<float>(draw.below(1 << 16)) - 32768.0f) * 0x1p-15f;
  }
  /// Of the digests of a layer.
  [[nodiscard]] std::size_t bytes() const {
    return static_cast<std::size_t>(digests.form().tile_bytes() * blocks / tile_blocks);
  }
  double score(std::int32_t layer) {
    const auto start = clock_type::now();
    (void)selector.score(layer,
                         {.requests = rows,
                          .device_requests = batch_arrays.data(),
                          .device_tokens = batch_arrays.data() + 1,
                          .max_tokens = batch_arrays.data()[1]},
                         {queries.data(), element_type::f32}, stream);
    machine.sync(stream);
    return seconds_since(start);
  }
  double read(std::int32_t layer) {
    const auto start = clock_type::now();
    machine.for_each({static_cast<std::int64_t>(bytes()) / read_part::bytes, 1}, {}, bytes(),
                     read_part{digests.view(layer).tiles, &sum}, stream);
    machine.sync(stream);
    return seconds_since(start);
  }
  /// Bytes a second of the scores of one tile again and again.
  double in_cache() {
    constexpr query_columns shape{.kv_heads = 8, .head_dim = 128, .heads = 8, .tokens = 1};
    device_buffer<float, host_backend> arranged(
        machine, static_cast<std::size_t>(shape.kv_heads * shape.size()));
    for (std::size_t i = 0; i < arranged.size(); ++i) arranged.data()[i] = 0.5f;
    std::vector<float> most(8 * tile_blocks), total(8 * tile_blocks);
    const std::int32_t full = tile_blocks;
    const score_blocks op{.digest = digests.view(0),
                          .shape = shape,
                          .queries = arranged.data(),
                          .requests = rows.data(),
                          .full = &full,
                          .tiles = 1,
                          .piece = shape.columns(),
                          .scale = 0.1f,
                          .most = most.data(),
                          .total = total.data(),
                          .stride = tile_blocks};
    std::vector<double> rates;
    for (int round = 0; round < 9; ++round) {
      const auto start = clock_type::now();
      for (int i = 0; i < 1024; ++i) op.whole_block(i % 2);  // two heads: 32 KiB
      rates.push_back(1024.0 * static_cast<double>(digests.form().head_bytes()) /
                      seconds_since(start));
      benchmark::DoNotOptimize(most.data());
    }
    return pulseinfer_bench::median(rates);
  }

  host_backend machine{{.workers = 1}};
  host_backend::stream stream;
  digest_store<host_backend> digests;
  consensus_selector<host_backend> selector;
  device_buffer<std::int32_t, host_backend> batch_arrays;  // the host's own memory, on this backend
  device_buffer<float, host_backend> queries;
  std::vector<std::int32_t> rows = {0};
  std::uint64_t sum = 0;
};

void select(benchmark::State& state) {
  setting s;
  constexpr int pairs = 60;
  std::vector<double> ratios, scored, read;
  for (auto _ : state) {
    for (int i = 0; i < pairs + 2; ++i) {
      // Half of the layers apart: what one leaves in the cache the other does not find.
      const double score = s.score(i % layers);
      const double plain = s.read((i + layers / 2) % layers);
      if (i < 2) continue;
      scored.push_back(score);
      read.push_back(plain);
      ratios.push_back(plain / score);
    }
  }
  const double ratio = pulseinfer_bench::median(ratios);
  const auto bytes = static_cast<double>(s.bytes());
  state.counters["score_gb_per_s"] = bytes / pulseinfer_bench::median(scored) * 1e-9;
  state.counters["read_gb_per_s"] = bytes / pulseinfer_bench::median(read) * 1e-9;
  state.counters["in_cache_gb_per_s"] = s.in_cache() * 1e-9;
  state.counters["ratio"] = ratio;
  state.counters["vectors"] = detail::has_score_vectors() ? 1 : 0;
  pulseinfer_bench::report("select_vs_read_bandwidth", ratio);
}
BENCHMARK(select)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
