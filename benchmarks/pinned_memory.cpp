// SPDX-License-Identifier: Apache-2.0
// How long it takes to pin memory, and how much of it is taken.
//
// - pin_time_vs_serial_touch: 8 GiB of a pinned_region of the host backend, two workers and the
//   caller, until all of it is touched and locked; over the time of the same by one thread, which
//   maps as many bytes, writes a byte of every page, and locks them with mlock. Both on pages of
//   4 KiB, in turn, a pair at a time; the median of three ratios. Giving memory back is not
//   timed. Where less memory is free, or may be locked, fewer bytes are pinned, and the label says
//   so; below 1 GiB there is no figure. The counters have the same for transparent huge pages.
// - bytes_reserved_over_asked: what a region of 2,236,817,408 bytes on pages of 4 KiB takes of the
//   address space, by the mappings of the process before and after.
#include <benchmark/benchmark.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "pulseinfer/backend/host.hpp"
#include "pulseinfer/pinned_memory.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using pulseinfer::host_backend;
using pulseinfer::page_kind;
using pulseinfer::pinned_options;
using pulseinfer::pinned_region;
using clock_type = std::chrono::steady_clock;

constexpr std::size_t gib = std::size_t{1} << 30;
constexpr std::size_t page = 4096;

/// A figure of a file like /proc/meminfo, in bytes; 0 if it is not there.
std::size_t figure_of(const char* path, const char* key) {
  std::FILE* file = std::fopen(path, "r");
  if (file == nullptr) return 0;
  char line[256];
  std::size_t found = 0;
  while (std::fgets(line, sizeof line, file) != nullptr) {
    if (std::strncmp(line, key, std::strlen(key)) == 0) {
      found = std::strtoull(line + std::strlen(key), nullptr, 10) * 1024;
    }
  }
  std::fclose(file);
  return found;
}

double seconds_since(clock_type::time_point begin) {
  return std::chrono::duration<double>(clock_type::now() - begin).count();
}

double pin(const host_backend& machine, std::size_t bytes, page_kind kind) {
  pinned_options options;
  options.pages.pages = kind;
  options.workers = 2;
  const auto begin = clock_type::now();
  const pinned_region memory(machine, bytes, options);
  const double seconds = seconds_since(begin);
  if (memory.ready_bytes() != bytes || !memory.report().is_locked) {
    throw std::runtime_error("pinned_memory: not all of it is pinned");
  }
  return seconds;
}

double pin_serially(std::size_t bytes, page_kind kind) {
  const auto begin = clock_type::now();
  void* const found =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (found == MAP_FAILED) throw std::runtime_error("pinned_memory: mmap failed");
  (void)madvise(found, bytes, kind == page_kind::small ? MADV_NOHUGEPAGE : MADV_HUGEPAGE);
  auto* const memory = static_cast<volatile std::byte*>(found);
  for (std::size_t at = 0; at < bytes; at += page) memory[at] = std::byte{1};
  if (mlock(found, bytes) != 0) throw std::runtime_error("pinned_memory: mlock failed");
  const double seconds = seconds_since(begin);
  munmap(found, bytes);
  return seconds;
}

struct outcome {
  std::vector<double> ours, serial, ratios;
};
outcome compete(const host_backend& machine, std::size_t bytes, page_kind kind, int pairs) {
  outcome found;
  for (int i = 0; i < pairs; ++i) {  // each is first in every other pair
    double times[2] = {};
    for (int k = 0; k < 2; ++k) {
      const bool is_ours = (i + k) % 2 == 0;
      times[is_ours ? 0 : 1] = is_ours ? pin(machine, bytes, kind) : pin_serially(bytes, kind);
    }
    found.ours.push_back(times[0]);
    found.serial.push_back(times[1]);
    found.ratios.push_back(times[0] / times[1]);
  }
  return found;
}

void pin_time(benchmark::State& state) {
  // What may be locked, for those who are not allowed to ignore the limit, and what there is.
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool is_free = geteuid() == 0 || limit.rlim_cur == RLIM_INFINITY;
  const std::size_t available = figure_of("/proc/meminfo", "MemAvailable:");
  const std::size_t lockable =
      is_free ? available : std::min<std::size_t>(available, limit.rlim_cur);
  const std::size_t bytes = std::min(8 * gib, lockable / 10 * 8 / gib * gib);
  if (bytes < gib) {
    const std::string why = "pin_time_vs_serial_touch is left out: of memory " +
                            std::to_string(available) + " bytes are available, and " +
                            std::to_string(lockable) + " may be locked";
    std::fprintf(stderr, "%s\n", why.c_str());
    state.SkipWithError(why.c_str());
    return;
  }
  const host_backend machine{{.workers = 2}};
  outcome small, huge;
  for (auto _ : state) {
    small = compete(machine, bytes, page_kind::small, 3);
    // Who asks first for huge pages pays for the system's making of them.
    (void)pin_serially(bytes, page_kind::transparent);
    huge = compete(machine, bytes, page_kind::transparent, 3);
  }
  const double ratio = pulseinfer_bench::median(small.ratios);
  state.counters["ratio"] = ratio;
  state.counters["seconds"] = pulseinfer_bench::median(small.ours);
  state.counters["serial_seconds"] = pulseinfer_bench::median(small.serial);
  state.counters["ratio_of_huge_pages"] = pulseinfer_bench::median(huge.ratios);
  state.counters["seconds_of_huge_pages"] = pulseinfer_bench::median(huge.ours);
  state.counters["GiB"] = static_cast<double>(bytes) / static_cast<double>(gib);
  state.SetLabel(std::to_string(bytes / gib) + " GiB on pages of 4 KiB, 2 workers and the caller" +
                 (bytes < 8 * gib ? "; LESS THAN 8 GiB: no more is free or may be locked" : ""));
  pulseinfer_bench::report("pin_time_vs_serial_touch", ratio);
}
BENCHMARK(pin_time)->Iterations(1)->Unit(benchmark::kMillisecond);

void reserved(benchmark::State& state) {
  constexpr std::size_t asked = 2'236'817'408;
  const host_backend machine{{.workers = 1}};
  pinned_options options;
  options.pages.pages = page_kind::small;
  options.workers = 0;
  options.in_background = true;
  options.locking =
      pulseinfer::page_locking::never;  // the limit of locked memory is not its matter
  double ratio = 0;
  for (auto _ : state) {
    const std::size_t before = figure_of("/proc/self/status", "VmSize:");
    const pinned_region memory(machine, asked, options);
    const std::size_t taken = figure_of("/proc/self/status", "VmSize:") - before;
    if (taken < memory.report().reserved_bytes) {
      throw std::runtime_error("pinned_memory: more is said than the system has");
    }
    ratio = static_cast<double>(taken) / static_cast<double>(asked);
  }
  state.counters["ratio"] = ratio;
  state.SetLabel("2,236,817,408 bytes on pages of 4 KiB");
  pulseinfer_bench::report("bytes_reserved_over_asked", ratio);
}
BENCHMARK(reserved)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
