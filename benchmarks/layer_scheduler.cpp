// SPDX-License-Identifier: Apache-2.0
// What a decision costs, and what interleaving saves.
//
// decision_ns: `next` where it gives out a batch, with 256 requests and 80 layers of Llama-3-70B's
// size a rank, and the costs of an H100 on PCIe 5: the scheduler has them run as two groups, so a
// batch has 128. Median over the batches of 10 steps, caches as the calls between leave them; one
// thread, no machine: a recall has landed when `next` asks, so that taking note of that is in the
// figure. decision_ns_growth: ns per ready request of a batch of 4,096 over the same of one of 256.
// Counters have other sizes, all requests in one batch, and `next` of all other kinds.
//
// interleaved_vs_blocking: a decode of 16 requests through 12 layers, twice, over a host backend of
// two workers whose link is paced to an eighth of what one thread copies (2.3 us more a copy). Each
// request recalls 4 units of 64 KiB a layer, from a store of 1,024 units, into its own pages; a
// layer's kernel reads all of them, and holds its stream for a fixed time: weights, a tenth of what
// a layer of all 16 takes, and the rest evenly for the requests. (It sleeps: a device would not
// take a CPU from those that gather, and the link's thread spins already.) That time is equal to
// the link's for all 16: compute : transfer is 1 : 1. Blocking: all 16 in one group (weights are read once), each
// layer waits for its recall. Interleaved: the same calls as the layer scheduler decides, with the
// costs as they are here; it takes two groups, which read the weights twice a layer. Median ratio
// of pairs, in turns. What the kernels read is summed up, and equal in both.
#include <benchmark/benchmark.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../examples/demo/speedup.hpp"
#include "pulseinfer/pulseinfer.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using namespace pulseinfer;
using clock_type = std::chrono::steady_clock;

/// What is asked for has landed.
struct landed_flights {
  flight_state poll(flight_id) const noexcept { return flight_state::landed; }
  void retire(flight_id) noexcept {}
};

struct decision_times {
  double run_ns = 0;
  double other_ns = 0;
  double requests = 0;  ///< of a batch
};

decision_times time_decisions(std::int32_t requests, std::int32_t max_groups) {
  constexpr std::int32_t layers = 80;
  layer_scheduler scheduler(
      {.max_requests = requests,
       .layers = layers,
       .max_groups = max_groups,
       .max_flights = 64,
       .work = {.weight_bytes = 855e6, .request_bytes = 38e6, .recall_bytes = 840e3}});
  landed_flights flights;
  std::vector<request_id> ids;
  for (std::int32_t i = 0; i < requests; ++i) ids.push_back(scheduler.add().value());
  std::vector<request_id> who;
  who.reserve(ids.size());
  std::vector<double> runs;
  std::vector<double> others;
  double in_batches = 0;
  std::uint64_t now = 0;
  for (int steps = 0; steps < 10;) {
    const auto begin = clock_type::now();
    const schedule_decision d = scheduler.next(now, flights);
    const double ns = std::chrono::duration<double, std::nano>(clock_type::now() - begin).count();
    (d.action == schedule_action::run ? runs : others).push_back(ns);
    now += 1'000'000;
    who.assign(d.requests.begin(), d.requests.end());
    if (d.action == schedule_action::run) {
      in_batches += static_cast<double>(who.size());
      scheduler.completed(d.batch);
    } else if (d.action == schedule_action::select) {
      for (const request_id id : who) (void)scheduler.selected(id, {.bytes = 840e3});
      scheduler.recalling(who, static_cast<flight_id>(0), now, {.bytes = 840e3});
    } else if (scheduler.counts()[layer_state::done] == requests) {
      for (const request_id id : ids) scheduler.restart(id);
      ++steps;
    }
  }
  return {pulseinfer_bench::median(runs), pulseinfer_bench::median(others),
          in_batches / static_cast<double>(runs.size())};
}

void decision(benchmark::State& state) {
  const auto requests = static_cast<std::int32_t>(state.range(0));
  const auto groups = static_cast<std::int32_t>(state.range(1));
  decision_times times;
  for (auto _ : state) times = time_decisions(requests, groups);
  state.counters["run_ns"] = times.run_ns;
  state.counters["other_ns"] = times.other_ns;
  state.counters["batch"] = times.requests;
  if (requests == 256 && groups > 1) pulseinfer_bench::report("decision_ns", times.run_ns);
}
BENCHMARK(decision)
    ->Args({16, 1})
    ->Args({64, 1})
    ->Args({256, 1})
    ->Args({1024, 1})
    ->Args({256, 16})
    ->Iterations(1);

void decision_growth(benchmark::State& state) {
  double growth = 0;
  for (auto _ : state) {
    std::vector<double> ratios;
    for (int i = 0; i < 5; ++i) {
      const decision_times small = time_decisions(256, 1);
      const decision_times large = time_decisions(4096, 1);
      ratios.push_back(large.run_ns / large.requests / (small.run_ns / small.requests));
    }
    growth = pulseinfer_bench::median(ratios);
  }
  state.counters["growth"] = growth;
  pulseinfer_bench::report("decision_ns_growth", growth);
}
BENCHMARK(decision_growth)->Iterations(1);

constexpr kv_geometry geometry{.layers = 1, .kv_heads = 8, .head_dim = 128};
constexpr std::int32_t requests = 16;
constexpr std::int32_t layers = 12;
constexpr std::int32_t steps = 2;
constexpr std::int32_t units_each = 4;
constexpr std::int32_t stored_units = 1024;

/// Reads the pages of some requests, then holds the stream until its time is over.
struct compute_kernel {
  const std::byte* planes[2];
  std::int64_t strip_bytes;
  std::uint64_t who;  ///< a bit for each request
  std::int64_t ns;
  std::atomic<std::uint64_t>* sum;

  void operator()(std::int64_t, std::int64_t) const {
    const auto until = clock_type::now() + std::chrono::nanoseconds(ns);
    std::uint64_t read = 0;
    for (std::int32_t r = 0; r < requests; ++r) {
      if ((who >> r & 1) != 0) read += read_pages(r);
    }
    sum->fetch_add(read, std::memory_order_relaxed);
    std::this_thread::sleep_until(until - std::chrono::microseconds(80));
    while (clock_type::now() < until) std::this_thread::yield();
  }
  std::uint64_t read_pages(std::int32_t request) const {
    std::uint64_t read = 0;
    const std::int64_t bytes = units_each * strip_bytes;
    for (const std::byte* const plane : planes) {
      const std::byte* const from = plane + request * bytes;
      for (std::int64_t i = 0; i < bytes; i += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, from + i, 8);
        read += word;
      }
    }
    return read;
  }
};

struct decode {
  decode()
      : link{.bytes_per_second = demo::copy_speed() / 8, .seconds_per_copy = 2.3e-6},
        backend(host_options{.workers = 2, .link = link}),
        layout(nhd_layout(geometry, requests * units_each)),
        memory(backend, static_cast<std::size_t>(2 * layout.plane_bytes())),
        pool(geometry, layout, {{.plane = {memory.data(), memory.data() + layout.plane_bytes()}}}),
        store(backend, geometry,
              {.capacity_bytes = stored_units * geometry.unit_bytes(),
               .max_sequences = 1,
               .max_blocks = stored_units}),
        mover(backend, store, pool, {.staging_bytes = 16 << 20, .chunk_bytes = 1 << 20}),
        compute(backend.make_stream(stream_priority::normal)),
        pages(backend.make_stream(stream_priority::normal)),
        sequence(store.open_sequence().value()) {
    for (std::int32_t block = 0; block < stored_units; ++block) {
      const reservation r = store.reserve(sequence, 0, logical_block{block});
      std::memset(store.writable(r.slot), block & 0xff,
                  static_cast<std::size_t>(geometry.unit_bytes()));
      store.commit(r.slot);
    }
    const double layer =
        static_cast<double>(requests * units_each * geometry.unit_bytes()) / link.bytes_per_second;
    weights_seconds = 0.1 * layer;
    request_seconds = 0.9 * layer / requests;
  }

  /// What a request recalls: the same whoever runs with it.
  void add_units(std::int32_t request, std::int32_t layer, std::vector<unit_target>& units) const {
    for (std::int32_t u = 0; u < units_each; ++u) {
      const std::int32_t block = (request * 61 + layer * 173 + u * 307) % stored_units;
      units.push_back({0, logical_block{block}, device_page{request * units_each + u}});
    }
  }
  /// The pages' readers have ended: each group's batch has, before it selects again.
  ticket<host_backend> recall(const std::vector<unit_target>& units) {
    return mover.recall_units(0, {&sequence, 1}, units, pages).value();
  }
  void launch(std::uint64_t who, std::int32_t n) {
    const double seconds = weights_seconds + n * request_seconds;
    backend.for_each({1, 1}, {}, 0,
                     compute_kernel{.planes = {memory.data(), memory.data() + layout.plane_bytes()},
                                    .strip_bytes = layout.plane[0].strip_bytes,
                                    .who = who,
                                    .ns = static_cast<std::int64_t>(seconds * 1e9),
                                    .sum = &sum},
                     compute);
  }

  double blocking() {
    const auto begin = clock_type::now();
    for (std::int32_t turn = 0; turn < steps * layers; ++turn) {
      std::vector<unit_target> units;
      for (std::int32_t r = 0; r < requests; ++r) add_units(r, turn % layers, units);
      recall(units).sync();
      launch((std::uint64_t{1} << requests) - 1, requests);
      backend.sync(compute);
    }
    return std::chrono::duration<double>(clock_type::now() - begin).count();
  }

  double interleaved() {
    const step_speeds speeds{.device_bytes_per_second = 1e9,
                             .link_bytes_per_second = link.bytes_per_second,
                             .launch_seconds = 10e-6,
                             .recall_seconds = 150e-6,
                             .recall_busy_seconds = link.seconds_per_copy};
    const double recall_bytes = units_each * static_cast<double>(geometry.unit_bytes());
    layer_scheduler scheduler({.max_requests = requests,
                               .layers = layers,
                               .max_groups = 4,
                               .max_flights = 32,
                               .work = {.weight_bytes = weights_seconds * 1e9,
                                        .request_bytes = request_seconds * 1e9,
                                        .recall_bytes = recall_bytes},
                               .speeds = speeds});
    flight_board board(backend, 32);
    std::vector<request_id> ids;
    for (std::int32_t i = 0; i < requests; ++i) ids.push_back(scheduler.add().value());
    std::vector<std::int32_t> left(requests, steps);
    std::vector<request_id> who;
    std::vector<unit_target> units;
    const auto begin = clock_type::now();
    while (true) {
      if (scheduler.counts()[layer_state::done] > 0) {
        for (const request_id id : ids) {
          if (scheduler.state_of(id) != layer_state::done) continue;
          auto& n = left[static_cast<std::size_t>(id.index)];
          if (n > 0 && --n > 0) scheduler.restart(id);
        }
        if (scheduler.counts()[layer_state::done] == requests) break;
      }
      const schedule_decision d = scheduler.next(backend.now_ns(), board);
      who.assign(d.requests.begin(), d.requests.end());
      if (d.action == schedule_action::select) {
        units.clear();
        for (const request_id id : who) {
          (void)scheduler.selected(id, {.bytes = recall_bytes});
          add_units(id.index, d.layer, units);
        }
        scheduler.recalling(who, board.add(recall(units)).value(), backend.now_ns(),
                            {.bytes = recall_bytes * static_cast<double>(who.size())});
      } else if (d.action == schedule_action::run) {
        std::uint64_t bits = 0;
        for (const request_id id : who) bits |= std::uint64_t{1} << id.index;
        launch(bits, static_cast<std::int32_t>(who.size()));
        scheduler.issued(d.batch, board.add(compute).value());
      } else if (d.action == schedule_action::wait) {
        board.sync_change(d.until_ns);
      }
    }
    const double taken = std::chrono::duration<double>(clock_type::now() - begin).count();
    batches = static_cast<double>(scheduler.statistics().batches) / (steps * layers);
    return taken;
  }

  link_pace link;
  host_backend backend;
  block_layout layout;
  device_buffer<std::byte, host_backend> memory;
  kv_pool pool;
  block_store<host_backend> store;
  transfer_engine<host_backend, block_store<host_backend>> mover;
  host_backend::stream compute;
  host_backend::stream pages;
  sequence_id sequence;
  double weights_seconds = 0;
  double request_seconds = 0;
  double batches = 0;
  std::atomic<std::uint64_t> sum{0};
};

void interleaved_against_blocking(benchmark::State& state) {
  decode d;
  std::vector<double> ratios;
  double slow = 0;
  double batches = 0;
  for (auto _ : state) {
    for (int i = 0; i < 11; ++i) {
      d.sum = 0;
      slow = d.blocking();
      const std::uint64_t read = d.sum.exchange(0);
      ratios.push_back(d.interleaved() / slow);
      if (d.sum != read) throw std::runtime_error("bench: the kernels read something else");
      batches = std::max(batches, d.batches);
    }
  }
  state.counters["ratio"] = pulseinfer_bench::median(ratios);
  state.counters["blocking_ms_a_layer"] = slow * 1e3 / (steps * layers);
  state.counters["link_ms_a_layer"] = (d.weights_seconds + requests * d.request_seconds) * 1e3;
  state.counters["batches_a_layer"] = batches;
  pulseinfer_bench::report("interleaved_vs_blocking", pulseinfer_bench::median(ratios));
}
BENCHMARK(interleaved_against_blocking)->Iterations(1);

}  // namespace
