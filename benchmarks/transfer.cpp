// SPDX-License-Identifier: Apache-2.0
// Recall and offload over a paced link, and on the simulated machine.
//
// The machine: the host backend, two workers. Its link moves a quarter of what one thread copies,
// is busy 2.3 us longer for each copy, and its thread spins. The store holds 2 GiB in units of
// 64 KiB (16 tokens of 8 heads of 128 in FP16), asked for on huge pages; a transfer's units are
// drawn at random from all of it, so they are cold. Times are taken around the call and
// `ticket::sync`.
//
// Baselines: the link alone, bytes over its bytes a second; the guide's three phases one after the
// other (gather all by one thread, one DMA, scatter all by one thread) over the same link; one copy
// for each strip. Ratios are medians over runs; where two ways are measured they take turns.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "../examples/demo/speedup.hpp"
#include "../tests/support/allocations.hpp"
#include "pulseinfer/pulseinfer.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using namespace pulseinfer;
using host_store = block_store<host_backend>;
using host_engine = transfer_engine<host_backend, host_store>;

constexpr kv_geometry llama3_8b{.layers = 1, .kv_heads = 8, .head_dim = 128};
constexpr kv_geometry smollm2_135m{.layers = 1, .kv_heads = 3, .head_dim = 64};
constexpr std::int64_t unit_bytes = 64 << 10;
constexpr std::int32_t stored_units = 32768;  // 2 GiB
constexpr std::int32_t pool_pages = 1024;     // 64 MiB

template <class Work>
double seconds_of(Work work) {
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Store, pool and engine over the paced link; made once for all benchmarks.
struct machine {
  machine()
      : link{.bytes_per_second = demo::copy_speed() / 4, .seconds_per_copy = 2.3e-6},
        backend(host_options{.workers = 2, .link = link}),
        layout(nhd_layout(llama3_8b, pool_pages)),
        memory(backend, static_cast<std::size_t>(2 * layout.plane_bytes())),
        pool(llama3_8b, layout, {{.plane = {memory.data(), memory.data() + layout.plane_bytes()}}}),
        // Room for an offload beside what is recalled.
        store(backend, llama3_8b,
              {.capacity_bytes = (stored_units + pool_pages) * unit_bytes,
               .max_sequences = 4,
               .max_blocks = stored_units}),
        engine(backend, store, pool, {.first_chunk_bytes = unit_bytes}),
        stream(backend.make_stream(stream_priority::normal)),
        sequence(store.open_sequence().value()) {
    std::memset(memory.data(), 1, static_cast<std::size_t>(2 * layout.plane_bytes()));
    for (std::int32_t block = 0; block < stored_units; ++block) {
      const reservation r = store.reserve(sequence, 0, logical_block{block});
      std::memset(store.writable(r.slot), block & 0xff, static_cast<std::size_t>(unit_bytes));
      store.commit(r.slot);
    }
  }

  /// Units all over the store, into pages in order.
  std::vector<unit_target> draw(std::int32_t units) {
    std::uniform_int_distribution<std::int32_t> block(0, stored_units - 1);
    std::vector<unit_target> drawn;
    for (std::int32_t i = 0; i < units; ++i)
      drawn.push_back({0, logical_block{block(random)}, device_page{i}});
    return drawn;
  }
  void recall(const std::vector<unit_target>& units) {
    auto ticket = engine.recall_units(0, {&sequence, 1}, units, stream).value();
    ticket.sync();
    if (ticket.report().moved != static_cast<std::int64_t>(units.size())) {
      throw std::runtime_error("bench: a recall lost units");
    }
  }
  [[nodiscard]] double link_seconds(std::size_t units) const {
    return static_cast<double>(units) * static_cast<double>(unit_bytes) / link.bytes_per_second;
  }

  link_pace link;
  host_backend backend;
  block_layout layout;
  device_buffer<std::byte, host_backend> memory;
  kv_pool pool;
  host_store store;
  host_engine engine;
  host_backend::stream stream;
  sequence_id sequence;
  std::mt19937 random{1};
};

machine& the_machine() {
  static machine m;
  return m;
}

void staged_against_link(benchmark::State& state, const std::string& key, std::int32_t units,
                         int runs) {
  machine& m = the_machine();
  std::vector<double> ratios;
  for (auto _ : state) {
    for (int i = 0; i < runs; ++i) {
      const auto drawn = m.draw(units);
      ratios.push_back(m.link_seconds(drawn.size()) / seconds_of([&] { m.recall(drawn); }));
    }
  }
  state.counters["ratio"] = pulseinfer_bench::median(ratios);
  state.counters["link_GB/s"] = m.link.bytes_per_second / 1e9;
  pulseinfer_bench::report(key, pulseinfer_bench::median(ratios));
}
BENCHMARK_CAPTURE(staged_against_link, 64m, "staged_vs_link_64m", 1024, 15)->Iterations(1);
BENCHMARK_CAPTURE(staged_against_link, 4m, "staged_vs_link_4m", 64, 101)->Iterations(1);
BENCHMARK_CAPTURE(staged_against_link, 256k, "staged_vs_link_256k", 4, 501)->Iterations(1);

/// The guide's three phases, each over all units before the next one begins.
class serial_phases {
 public:
  explicit serial_phases(machine& m)
      : m_(m),
        host_(m.backend, static_cast<std::size_t>(pool_pages * unit_bytes)),
        device_(m.backend, host_.size()),
        pages_(m.backend, pool_pages),
        lease_(m.store.acquire(m.sequence, 0)) {
    std::memset(host_.data(), 1, host_.size());
    std::memset(device_.data(), 1, host_.size());
    std::iota(pages_.data(), pages_.data() + pool_pages, 0);
  }
  void recall(const std::vector<unit_target>& units) {
    sources_.clear();
    for (const unit_target& unit : units) sources_.push_back(lease_.find(unit.block));
    gather_into(host_.data(), sources_, unit_bytes);
    m_.backend.copy_async(device_.data(), host_.data(), units.size() * std::size_t{unit_bytes},
                          copy_direction::host_to_device, m_.stream);
    m_.backend.sync(m_.stream);
    m_.backend.for_each({static_cast<std::int64_t>(units.size()), m_.layout.unit_words()}, {}, 0,
                        scatter_units{.layout = m_.layout,
                                      .pool = m_.pool.layer(0),
                                      .pages = pages_.data(),
                                      .units = device_.data()},
                        m_.stream);
    m_.backend.sync(m_.stream);
  }

 private:
  machine& m_;
  pinned_buffer<std::byte, host_backend> host_;
  device_buffer<std::byte, host_backend> device_;
  device_buffer<std::int32_t, host_backend> pages_;
  host_store::lease lease_;
  std::vector<const std::byte*> sources_;
};

void staged_against_serial_phases(benchmark::State& state) {
  machine& m = the_machine();
  serial_phases serial(m);
  std::vector<double> ratios;
  for (auto _ : state) {
    for (int i = 0; i < 9; ++i) {
      const auto drawn = m.draw(1024);
      const double slow = seconds_of([&] { serial.recall(drawn); });
      ratios.push_back(slow / seconds_of([&] { m.recall(drawn); }));
    }
  }
  state.counters["ratio"] = pulseinfer_bench::median(ratios);
  pulseinfer_bench::report("staged_vs_serial_phases_64m", pulseinfer_bench::median(ratios));
}
BENCHMARK(staged_against_serial_phases)->Iterations(1);

void store_against_link(benchmark::State& state) {
  machine& m = the_machine();
  std::vector<unit_target> units;
  for (std::int32_t i = 0; i < pool_pages; ++i)
    units.push_back({0, logical_block{i}, device_page{i}});
  std::vector<double> ratios;
  for (auto _ : state) {
    for (int i = 0; i < 15; ++i) {
      const sequence_id id = m.store.open_sequence().value();
      const double taken = seconds_of([&] {
        auto ticket = m.engine.offload(0, {&id, 1}, units, m.stream).value();
        ticket.sync();
        if (ticket.report().moved != pool_pages) throw std::runtime_error("bench: units lost");
      });
      (void)m.store.close_sequence(id);
      ratios.push_back(m.link_seconds(units.size()) / taken);
    }
  }
  state.counters["ratio"] = pulseinfer_bench::median(ratios);
  pulseinfer_bench::report("store_vs_link_64m", pulseinfer_bench::median(ratios));
}
BENCHMARK(store_against_link)->Iterations(1);

/// What the caller's thread pays for a recall of 1,024 units, and what is allocated meanwhile, on
/// any thread.
void submit(benchmark::State& state) {
  machine& m = the_machine();
  const auto drawn = m.draw(1024);
  for (int i = 0; i < 20; ++i) m.recall(drawn);  // until every queue has its size
  std::vector<double> times;
  std::uint64_t allocations = 0;
  for (auto _ : state) {
    for (int i = 0; i < 101; ++i) {
      std::optional<ticket<host_backend>> t;
      const std::uint64_t before = test::allocations();
      const double taken = seconds_of([&] {
        t = m.engine.recall_units(0, {&m.sequence, 1}, drawn, m.stream);
      });
      t->sync();
      allocations += test::allocations() - before;
      times.push_back(taken * 1e9 / static_cast<double>(drawn.size()));
    }
  }
  state.counters["ns_per_unit"] = pulseinfer_bench::median(times);
  state.counters["allocations"] = static_cast<double>(allocations);
  pulseinfer_bench::report("submit_ns_per_unit", pulseinfer_bench::median(times));
  pulseinfer_bench::report("recall_allocations", static_cast<double>(allocations));
}
BENCHMARK(submit)->Iterations(1);

/// On the simulated machine's clock: DRAM 200, link 56, HBM 3,350 GB/s; a copy's first byte comes
/// after 50 us unless it queues behind another; 8 workers, each at 25 GB/s read plus written; 4 us
/// before a kernel and 2 us before a host task starts. `recalls` of 256 units of 64 KiB at once.
void simulated_recalls(benchmark::State& state, const std::string& key, std::int32_t recalls) {
  constexpr std::int32_t units = 256;
  constexpr hardware_profile guide{.copy_start_ns = 50'000, .copy_busy_ns = 0, .workers = 8};
  double ratio = 0;
  for (auto _ : state) {
    simulated_backend backend{timed{guide}};
    const block_layout layout = nhd_layout(llama3_8b, recalls * units);
    device_buffer<std::byte, simulated_backend> memory(
        backend, static_cast<std::size_t>(2 * layout.plane_bytes()));
    const kv_pool pool(llama3_8b, layout,
                       {{.plane = {memory.data(), memory.data() + layout.plane_bytes()}}});
    block_store<simulated_backend> store(
        backend, llama3_8b,
        {.capacity_bytes = units * unit_bytes, .max_sequences = 1, .max_blocks = units});
    transfer_engine engine(backend, store, pool, {.staging_bytes = 128 << 20});
    auto stream = backend.make_stream(stream_priority::normal);
    const sequence_id sequence = store.open_sequence().value();
    for (std::int32_t block = 0; block < units; ++block) {
      const reservation r = store.reserve(sequence, 0, logical_block{block});
      std::memset(store.writable(r.slot), block, static_cast<std::size_t>(unit_bytes));
      store.commit(r.slot);
    }
    std::vector<ticket<simulated_backend>> tickets;
    for (std::int32_t i = 0; i < recalls; ++i) {
      std::vector<unit_target> targets;
      for (std::int32_t u = 0; u < units; ++u)
        targets.push_back({0, logical_block{u * 37 % units}, device_page{i * units + u}});
      tickets.push_back(engine.recall_units(0, {&sequence, 1}, targets, stream).value());
    }
    std::uint64_t end = 0;
    for (auto& t : tickets) {
      t.sync();
      end = std::max(end, t.report().ended_ns);
    }
    const auto bytes = static_cast<double>(recalls * units * unit_bytes);
    const double link_ns = bytes * 1e9 / guide.link_bytes_per_second;
    ratio = link_ns / static_cast<double>(end - tickets.front().report().requested_ns);
  }
  state.counters["ratio"] = ratio;
  pulseinfer_bench::report(key, ratio);
}
BENCHMARK_CAPTURE(simulated_recalls, one, "simulated_isolated_recall_vs_link", 1)->Iterations(1);
BENCHMARK_CAPTURE(simulated_recalls, eight, "simulated_eight_recalls_vs_link", 8)->Iterations(1);

void staged_against_per_block(benchmark::State& state, const std::string& key,
                              const kv_geometry& geometry) {
  const link_pace link{.bytes_per_second = demo::copy_speed() / 4, .seconds_per_copy = 2.3e-6};
  double ratio = 0;
  for (auto _ : state) ratio = demo::staged_vs_per_block(host_backend{{.link = link}}, geometry);
  state.counters["ratio"] = ratio;
  state.counters["unit_bytes"] = static_cast<double>(geometry.unit_bytes());
  pulseinfer_bench::report(key, ratio);
}
BENCHMARK_CAPTURE(staged_against_per_block, smollm2_135m, "staged_vs_per_block_speedup_12k",
                  smollm2_135m)
    ->Iterations(1);
BENCHMARK_CAPTURE(staged_against_per_block, llama3_8b, "staged_vs_per_block_speedup_64k", llama3_8b)
    ->Iterations(1);

}  // namespace
