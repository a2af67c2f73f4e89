// SPDX-License-Identifier: Apache-2.0
// The main of all benchmark programs: Google Benchmark's, then the report.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

#include "support/report.hpp"

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
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  const char* path = std::getenv("PULSEINFER_BENCH_REPORT");
  if (path != nullptr && !write_figures(path)) {
    std::perror(path);
    return 1;
  }
  return 0;
}
