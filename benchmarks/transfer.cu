// SPDX-License-Identifier: Apache-2.0
// Recall on a GPU by every way, against one bulk copy from pinned memory, which is as fast as the link
// goes.
//
// Units of 4 to 256 KiB, 64 to 16,384 of them, scattered in the store, into pages of their own; the
// time from the call until the host sees the end, medians of runs in turn. `automatic` goes by a
// calibration of this machine, done once before. Where kernels are run by the CPU times mean
// nothing: one small size runs once, and nothing is reported.
#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "pulseinfer/backend/cuda_core.cuh"
#include "pulseinfer/pulseinfer.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using namespace pulseinfer;

/// Units of `kib` KiB: keys and values of 16 tokens in FP16.
kv_geometry geometry_of(std::int64_t kib) {
  kv_geometry g{.layers = 1, .kv_heads = 1, .head_dim = 64, .block_tokens = 16};
  if (kib > 4) {
    g.head_dim = 128;
    g.kv_heads = static_cast<std::int32_t>(kib / 8);
  }
  return g;
}

/// Bytes of a bulk copy: those of the units, up to 1 GiB.
std::int64_t bulk_bytes(std::int64_t bytes) {
  return std::min(bytes, std::int64_t{1} << 30);
}

/// True if store, bulk source and pool leave half of what is free.
bool fits(const cuda_backend& backend, std::int64_t bytes) {
  const std::int64_t pinned =
      std::int64_t{sysconf(_SC_PAGESIZE)} * std::int64_t{sysconf(_SC_AVPHYS_PAGES)};
  const auto device = static_cast<std::int64_t>(backend.limits().device_bytes_free);
  constexpr std::int64_t staging = std::int64_t{1} << 29;  // of all engines, and more
  return bytes + bulk_bytes(bytes) + staging <= pinned / 2 && bytes + staging <= device / 2;
}

constexpr transfer_way ways[] = {transfer_way::staged,    transfer_way::direct,
                                 transfer_way::batched,   transfer_way::pull,
                                 transfer_way::per_block, transfer_way::automatic};

/// Seconds of each way, one entry a run, in the order of `ways`.
struct seconds {
  std::array<std::vector<double>, std::size(ways)> by_way;
  std::vector<double> bulk;
  transfer_way chosen = transfer_way::automatic;  ///< by `automatic`
};

const transfer_costs& costs_of_this_machine(const cuda_backend& backend) {
  static const transfer_costs costs =
      backend.measures_time()
          ? calibrate_machine(backend)
          : calibrate_machine(backend,
                              {.most_entry_bytes = 4096, .most_entries = 16, .max_transfers = 8},
                              1 << 20);
  return costs;
}

seconds measure(cuda_backend backend, const kv_geometry& g, std::int32_t units, int runs) {
  const block_layout layout = nhd_layout(g, units);
  const std::int64_t bytes = units * g.unit_bytes();
  device_buffer<std::byte, cuda_backend> memory(backend,
                                                static_cast<std::size_t>(2 * layout.plane_bytes()));
  const kv_pool pool(g, layout, {{.plane = {memory.data(), memory.data() + layout.plane_bytes()}}});
  block_store<cuda_backend> store(
      backend, g, {.capacity_bytes = bytes, .max_sequences = 1, .max_blocks = units});
  const sequence_id sequence = store.open_sequence().value();
  for (std::int32_t block = 0; block < units; ++block) {
    const reservation r = store.reserve(sequence, 0, logical_block{block});
    std::memset(store.writable(r.slot), block & 0xff, static_cast<std::size_t>(g.unit_bytes()));
    store.commit(r.slot);
  }
  // 1,223 is prime and the counts are powers of two: each block once, far from the one before.
  std::vector<unit_target> targets;
  for (std::int64_t i = 0; i < units; ++i) {
    targets.push_back(
        {0, static_cast<logical_block>(i * 1223 % units), static_cast<device_page>(i)});
  }
  pinned_buffer<std::byte, cuda_backend> source(backend,
                                                static_cast<std::size_t>(bulk_bytes(bytes)));
  std::memset(source.data(), 1, source.bytes());

  transfer_engine engine(backend, store, pool,
                         {.transfers_in_flight = 2,
                          .max_rows = 1,
                          .max_units = units,
                          .costs = costs_of_this_machine(backend)});
  auto stream = backend.make_stream(stream_priority::normal);
  seconds s;
  const auto recall = [&](transfer_way way) {
    engine.set_way(way);
    auto ticket = engine.recall_units(0, {&sequence, 1}, targets, stream).value();
    ticket.sync();
    if (ticket.report().moved != units) throw std::runtime_error("a recall lost units");
    if (way == transfer_way::automatic) s.chosen = ticket.report().way;
    return static_cast<double>(ticket.report().ended_ns - ticket.report().requested_ns) * 1e-9;
  };
  const auto copy = [&] {
    const std::uint64_t begin = backend.now_ns();
    backend.copy_async(memory.data(), source.data(), source.bytes(), copy_direction::host_to_device,
                       stream);
    backend.sync(stream);
    return static_cast<double>(backend.now_ns() - begin) * 1e-9;
  };

  for (int run = -1; run < runs; ++run) {  // the first one warms up
    for (std::size_t i = 0; i < std::size(ways); ++i) {
      const double taken = recall(ways[i]);
      if (run >= 0) s.by_way[i].push_back(taken);
    }
    const double taken = copy();
    if (run >= 0) s.bulk.push_back(taken);
  }
  return s;
}

void transfer(benchmark::State& state) {
  const std::int64_t kib = state.range(0);
  const auto units = static_cast<std::int32_t>(state.range(1));
  const kv_geometry g = geometry_of(kib);
  const std::int64_t bytes = units * g.unit_bytes();
  const cuda_backend backend;
  const bool times_mean_something = backend.measures_time();
  const bool runs = times_mean_something ? fits(backend, bytes) : kib == 4 && units == 64;
  seconds s;
  for (auto _ : state) {
    if (!runs) continue;
    s = measure(backend, g, units, times_mean_something ? 9 : 1);
    if (times_mean_something) state.SetIterationTime(pulseinfer_bench::median(s.by_way[0]));
  }
  if (!runs || !times_mean_something) {
    state.SetLabel(runs                   ? "ran; times mean nothing on this runtime"
                   : times_mean_something ? "left out: more than half of the memory"
                                          : "left out: times mean nothing on this runtime");
    return;
  }
  const std::string size = "_" + std::to_string(kib) + "k_" + std::to_string(units);
  const auto note = [&](const std::string& name, double value) {
    state.counters[name] = value;
    pulseinfer_bench::report("gpu_" + name + size, value);
  };
  const double bulk = static_cast<double>(bulk_bytes(bytes)) / pulseinfer_bench::median(s.bulk);
  note("bulk_bytes_per_second", bulk);
  std::array<double, std::size(ways)> speed{};
  double best = 0;
  for (std::size_t i = 0; i < std::size(ways); ++i) {
    speed[i] = static_cast<double>(bytes) / pulseinfer_bench::median(s.by_way[i]);
    note(std::string(name_of(ways[i])) + "_bytes_per_second", speed[i]);
    if (ways[i] != transfer_way::automatic) best = std::max(best, speed[i]);
  }
  note("staged_vs_bulk", speed[0] / bulk);
  note("staged_vs_per_block", speed[0] / speed[4]);
  note("auto_vs_best_way", best / speed[5]);
  state.SetLabel("automatic went " + std::string(name_of(s.chosen)));
}

BENCHMARK(transfer)
    ->ArgNames({"KiB", "units"})
    ->ArgsProduct({{4, 16, 64, 256}, {64, 1024, 16384}})
    ->Iterations(1)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace
