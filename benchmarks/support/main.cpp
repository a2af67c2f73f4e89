// SPDX-License-Identifier: Apache-2.0
// The main of all benchmark programs: Google Benchmark's, then the report.
//
// adds_per_ns_<program>: additions that one thread makes in a nanosecond, the least of what was seen
// before and after the program's benchmarks, medians of 9 passes of a million rounds in registers.
// No figure of ours: it tells the speed at which the machine ran, which others on it can halve.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

std::map<std::string, double, std::less<>> figures;

bool write_figures(const char* path) {
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) return false;
  const char* separator = "{";
  for (const auto& [key, value] : figures) {
    std::fprintf(file, "%s\n  \"%s\": %.10g", separator, key.c_str(), value);
    separator = ",";
  }
  std::fputs(figures.empty() ? "{}\n" : "\n}\n", file);
  return std::fclose(file) == 0;
}

double adds_per_ns() {
  constexpr int rounds = 1'000'000;
  std::vector<double> passes;
  for (int pass = 0; pass < 9; ++pass) {
    std::uint64_t a = 0, b = 0, c = 0, d = 0;  // four, which do not wait for each other
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < rounds; ++i) {
      a += 3, b += 3, c += 3, d += 3;
      asm volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d));  // one round after the other
    }
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    passes.push_back(4.0 * rounds / took.count());
  }
  return pulseinfer_bench::median(passes);
}

}  // namespace

void pulseinfer_bench::report(std::string_view key, double value) {
  if (key.find_first_of("\"\\") != std::string_view::npos || !std::isfinite(value)) {
    throw std::invalid_argument("report: quotes in the key or no finite value: " +
                                std::string{key});
  }
  figures.insert_or_assign(std::string{key}, value);
}

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  const double before = adds_per_ns();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  std::string program = argv[0];
  program.erase(0, program.find_last_of('/') + 1);
  if (program.rfind("bench_", 0) == 0) program.erase(0, 6);
  pulseinfer_bench::report("adds_per_ns_" + program, std::min(before, adds_per_ns()));
  const char* path = std::getenv("PULSEINFER_BENCH_REPORT");
  if (path != nullptr && !write_figures(path)) {
    std::perror(path);
    return 1;
  }
  return 0;
}
