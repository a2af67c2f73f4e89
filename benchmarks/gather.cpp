// SPDX-License-Identifier: Apache-2.0
// The CPU's gather into the staging ring, against what memory gives.
//
// Sources: units at random places of a pool of 2 GiB, each read once in a pass over the pool, so
// none is in a cache. Pool and ring are pinned memory of the host backend: on pages of 2 MiB where
// the system grants them (the counter huge_pages is the share that is). The ring is a staging_pool
// whose chunks are taken and given back in turn, in the state that its own use leaves it in: what
// fits into the last-level cache is there. One thread.
//
// Baselines:
// - gather_vs_contiguous_*: the fastest of three copies of as many contiguous bytes into the same
//   ring, which are memcpy, a loop of streaming stores, and our own copy of the one run. The ring
//   is that of the default transfer_options, 64 MiB in chunks of 4 MiB. In turn, a chunk each; the
//   median of time of the contiguous copy / time of the gather.
// - gather_vs_best_simple_loop: the faster of one memcpy a unit and one loop of streaming stores a
//   unit, of the same kind of units into the same ring; the worst over units of 2 KiB to 1 MiB and
//   rings of 1 to 256 MiB, and the geometric mean. With PULSEINFER_BENCH_VERBOSE set, each of them.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/pulseinfer.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using pulseinfer::host_backend;
using pulseinfer::store_hint;
using clock_type = std::chrono::steady_clock;

constexpr std::size_t kib = 1024;
constexpr std::size_t mib = 1024 * kib;

/// The share of the memory at [begin, begin + bytes) that lies on huge pages, as Linux tells.
double share_on_huge_pages(const void* begin, std::size_t bytes) {
  std::FILE* file = std::fopen("/proc/self/smaps", "r");
  if (file == nullptr) return 0;
  const auto from = reinterpret_cast<unsigned long long>(begin);
  bool is_inside = false;
  double found = 0;
  char line[512];
  while (std::fgets(line, sizeof line, file) != nullptr) {
    constexpr std::string_view key = "AnonHugePages:";
    char* end = nullptr;
    const unsigned long long first = std::strtoull(line, &end, 16);  // "7f00-7f80 rw-p ..."
    if (end != line && *end == '-') {
      is_inside = first < from + bytes && std::strtoull(end + 1, nullptr, 16) > from;
    } else if (is_inside && std::string_view(line).starts_with(key)) {
      found += static_cast<double>(std::strtoull(line + key.size(), nullptr, 10)) * kib;
    }
  }
  std::fclose(file);
  return std::min(1.0, found / static_cast<double>(bytes));
}

/// What all figures read from.
class source_pool {
 public:
  source_pool() : memory_(host_backend{{.workers = 1}}, std::size_t{2048} * mib) {
    std::memset(memory_.data(), 1, memory_.size());
    huge_pages_ = share_on_huge_pages(memory_.data(), memory_.size());
  }
  [[nodiscard]] double huge_pages() const { return huge_pages_; }

  /// Every unit of `unit` bytes once, in a random order; after the last begins the first again.
  void cut(std::size_t unit) {
    unit_ = unit;
    order_.resize(memory_.size() / unit);
    std::iota(order_.begin(), order_.end(), std::uint32_t{0});
    pulseinfer::detail::random_source draw(unit);
    for (std::size_t i = order_.size(); i > 1; --i) std::swap(order_[i - 1], order_[draw.below(i)]);
  }
  void pick(std::vector<const std::byte*>& sources) {
    for (const std::byte*& source : sources) {
      source = memory_.data() + order_[next_++ % order_.size()] * unit_;
    }
  }
  /// Contiguous bytes, the next ones at every call.
  [[nodiscard]] const std::byte* pick_run(std::size_t bytes) {
    if (run_ + bytes > memory_.size()) run_ = 0;
    const std::byte* begin = memory_.data() + run_;
    run_ += bytes;
    return begin;
  }

 private:
  pulseinfer::pinned_buffer<std::byte, host_backend> memory_;
  double huge_pages_ = 0;
  std::size_t unit_ = 0;
  std::vector<std::uint32_t> order_;
  std::size_t next_ = 0;
  std::size_t run_ = 0;
};

source_pool& pool() {
  static source_pool the_pool;
  return the_pool;
}

/// What every figure was measured under.
std::string conditions() {
  return "; source not cached; " + std::to_string(std::lround(100 * pool().huge_pages())) +
         "% of it on pages of 2 MiB; 1 thread";
}

/// Streaming stores as one writes them: 32 bytes at a time where the machine can.
#if defined(__x86_64__)
__attribute__((target("avx2"))) void stream_avx2(std::byte* to, const std::byte* from,
                                                 std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 128) {
    const auto* source = reinterpret_cast<const __m256i*>(from + i);
    auto* destination = reinterpret_cast<__m256i*>(to + i);
    const __m256i a = _mm256_loadu_si256(source);
    const __m256i b = _mm256_loadu_si256(source + 1);
    const __m256i c = _mm256_loadu_si256(source + 2);
    const __m256i d = _mm256_loadu_si256(source + 3);
    _mm256_stream_si256(destination, a);
    _mm256_stream_si256(destination + 1, b);
    _mm256_stream_si256(destination + 2, c);
    _mm256_stream_si256(destination + 3, d);
  }
}
void stream_sse2(std::byte* to, const std::byte* from, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; i += 64) {
    const auto* source = reinterpret_cast<const __m128i*>(from + i);
    auto* destination = reinterpret_cast<__m128i*>(to + i);
    for (int k = 0; k < 4; ++k) _mm_stream_si128(destination + k, _mm_loadu_si128(source + k));
  }
}
const auto stream_bytes = __builtin_cpu_supports("avx2") ? &stream_avx2 : &stream_sse2;
#else
void stream_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}
#endif

/// A way to fill a chunk, and what it took in each round.
struct contestant {
  const char* name;
  bool is_contiguous;
  void (*fill)(std::byte* chunk, std::span<const std::byte* const> sources, std::size_t unit,
               store_hint hint);
  std::vector<double> seconds = {};
};

void gather(std::byte* chunk, std::span<const std::byte* const> sources, std::size_t unit,
            store_hint hint) {
  pulseinfer::gather_into(chunk, sources, static_cast<std::int64_t>(unit), hint);
}
void memcpy_loop(std::byte* chunk, std::span<const std::byte* const> sources, std::size_t unit,
                 store_hint) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    std::memcpy(chunk + i * unit, sources[i], unit);
  }
}
void streaming_loop(std::byte* chunk, std::span<const std::byte* const> sources, std::size_t unit,
                    store_hint) {
  for (std::size_t i = 0; i < sources.size(); ++i) {
    stream_bytes(chunk + i * unit, sources[i], unit);
  }
  pulseinfer::detail::fence_stores();
}

/// The real staging ring, its chunks taken and given back in turn.
class ring {
 public:
  ring(std::size_t chunk, std::size_t chunks)
      : pool_(host_backend{{.workers = 1}}, chunk, static_cast<std::int32_t>(chunks)),
        chunks_(chunks) {}
  [[nodiscard]] std::size_t chunk_bytes() const { return pool_.chunk_bytes(); }
  [[nodiscard]] std::size_t chunks() const { return chunks_; }
  [[nodiscard]] std::size_t bytes() const { return chunk_bytes() * chunks_; }

  /// Fills the next chunk; the seconds that it took.
  double fill(const contestant& c, std::span<const std::byte* const> sources, std::size_t unit) {
    const store_hint hint = pulseinfer::stores_for_ring(static_cast<std::int64_t>(bytes()));
    const auto begin = clock_type::now();
    auto* chunk = pool_.acquire_or_wait(nobody_);
    if (chunk == nullptr) throw std::logic_error("gather: the ring has no chunk");
    c.fill(chunk->host, sources, unit, hint);
    pool_.release(*chunk);
    const std::chrono::duration<double> taken = clock_type::now() - begin;
    benchmark::ClobberMemory();
    return taken.count();
  }

 private:
  pulseinfer::staging_pool<host_backend> pool_;
  pulseinfer::staging_waiter<host_backend> nobody_;
  std::size_t chunks_;
};

/// Lets the contestants fill the ring in turn, `rounds` times.
void compete(ring& staging, std::size_t unit, int rounds, std::span<contestant> contestants) {
  std::vector<const std::byte*> sources(staging.chunk_bytes() / unit);
  pool().cut(unit);
  // Seconds a chunk.
  const auto run = [&](const contestant& c, std::size_t chunks) {
    double seconds = 0;
    for (std::size_t i = 0; i < chunks; ++i) {
      if (c.is_contiguous) {
        sources[0] = pool().pick_run(staging.chunk_bytes());
        seconds += staging.fill(c, std::span{sources}.first(1), staging.chunk_bytes());
      } else {
        pool().pick(sources);
        seconds += staging.fill(c, sources, unit);
      }
    }
    return seconds / static_cast<double>(chunks);
  };
  // A small ring is left in the state of the one before: a pass makes it one's own.
  const bool is_small = staging.bytes() <= 32 * mib;
  const std::size_t part = is_small ? staging.chunks() * (1 + 3 * mib / staging.bytes()) : 1;
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < contestants.size(); ++i) {
      contestant& c = contestants[(i + static_cast<std::size_t>(round)) % contestants.size()];
      if (is_small) (void)run(c, staging.chunks());
      c.seconds.push_back(run(c, part));
    }
  }
}

/// Time of the fastest of contestants[1...] over that of contestants[0], round by round.
double against_best(std::span<const contestant> contestants, std::string& best_name) {
  const contestant* best = &contestants[1];
  for (const contestant& c : contestants.subspan(1)) {
    if (pulseinfer_bench::median(c.seconds) < pulseinfer_bench::median(best->seconds)) best = &c;
  }
  best_name = best->name;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < best->seconds.size(); ++i) {
    ratios.push_back(best->seconds[i] / contestants[0].seconds[i]);
  }
  return pulseinfer_bench::median(ratios);
}

void against_contiguous(benchmark::State& state, const std::string& key, std::size_t unit) {
  const pulseinfer::transfer_options defaults;
  const auto chunk = static_cast<std::size_t>(defaults.chunk_bytes);
  ring staging(chunk, static_cast<std::size_t>(defaults.staging_bytes) / chunk);
  double ratio = 0;
  std::string best;
  contestant contestants[] = {{"gather", false, &gather},
                              {"memcpy", true, &memcpy_loop},
                              {"streaming stores", true, &streaming_loop},
                              {"our copy", true, &gather}};
  for (auto _ : state) {
    compete(staging, unit, 3'000, contestants);
    ratio = against_best(contestants, best);
  }
  const auto gigabytes = [&](const contestant& c) {
    return static_cast<double>(chunk) * 1e-9 / pulseinfer_bench::median(c.seconds);
  };
  state.counters["ratio"] = ratio;
  state.counters["gather_GBps"] = gigabytes(contestants[0]);
  state.counters["memcpy_GBps"] = gigabytes(contestants[1]);
  state.counters["streaming_GBps"] = gigabytes(contestants[2]);
  state.counters["our_copy_GBps"] = gigabytes(contestants[3]);
  state.counters["huge_pages"] = pool().huge_pages();
  state.SetLabel("best contiguous: " + best + conditions());
  pulseinfer_bench::report(key, ratio);
}

BENCHMARK_CAPTURE(against_contiguous, 64k, "gather_vs_contiguous_64k", 64 * kib)
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(against_contiguous, 16k, "gather_vs_contiguous_16k", 16 * kib)
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(against_contiguous, 4k, "gather_vs_contiguous_4k", 4 * kib)
    ->Iterations(1)
    ->Unit(benchmark::kMillisecond);

/// A ring and a kind of units, and what the contestants took for them.
struct pairing {
  std::size_t ring;
  std::size_t unit;
  std::vector<contestant> contestants = {{"gather", false, &gather},
                                         {"memcpy", false, &memcpy_loop},
                                         {"streaming stores", false, &streaming_loop}};
};

void against_simple_loops(benchmark::State& state) {
  constexpr std::size_t rings[] = {1 * mib, 4 * mib, 16 * mib, 64 * mib, 256 * mib};
  constexpr std::size_t units[] = {2 * kib,  4 * kib,   8 * kib, 16 * kib,
                                   64 * kib, 256 * kib, 1 * mib};
  std::vector<pairing> pairings;
  for (const std::size_t size : rings) {
    for (const std::size_t unit : units) pairings.push_back({size, unit});
  }
  for (auto _ : state) {
    // Several times through all of them, so that what else the machine does for a while is no
    // pairing's fate.
    for (int pass = 0; pass < 8; ++pass) {
      for (std::size_t i = 0; i < pairings.size(); i += std::size(units)) {
        // Chunks that hold the largest unit, and where there is room, four of them in the ring.
        const std::size_t size = pairings[i].ring;
        const std::size_t chunk = std::max(1 * mib, std::min(4 * mib, size / 4));
        ring staging(chunk, size / chunk);
        for (std::size_t k = i; k < i + std::size(units); ++k) {
          compete(staging, pairings[k].unit, size <= 32 * mib ? 12 : 40, pairings[k].contestants);
        }
      }
    }
  }
  double worst = 1e9;
  double sum_of_logs = 0;
  std::string worst_at;
  for (const pairing& p : pairings) {
    std::string best;
    const double ratio = against_best(p.contestants, best);
    const std::string name = std::to_string(p.unit / kib) + " KiB into " +
                             std::to_string(p.ring / mib) + " MiB, against " + best;
    if (std::getenv("PULSEINFER_BENCH_VERBOSE") != nullptr) {
      std::fprintf(stderr, "%s: %.3f\n", name.c_str(), ratio);
    }
    sum_of_logs += std::log(ratio);
    if (ratio < worst) {
      worst = ratio;
      worst_at = name;
    }
  }
  const double mean = std::exp(sum_of_logs / static_cast<double>(pairings.size()));
  state.counters["worst"] = worst;
  state.counters["mean"] = mean;
  state.counters["huge_pages"] = pool().huge_pages();
  state.SetLabel("worst: " + worst_at + conditions());
  pulseinfer_bench::report("gather_vs_best_simple_loop", worst);
  pulseinfer_bench::report("gather_vs_best_simple_loop_mean", mean);
}
BENCHMARK(against_simple_loops)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
