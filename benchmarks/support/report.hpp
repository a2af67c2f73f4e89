// SPDX-License-Identifier: Apache-2.0
/// @file
/// Figures of a benchmark that go into build/bench/report.json.
#pragma once

#include <string_view>

namespace pulseinfer_bench {

/// Notes a figure under a key such as `transfer.overlap_speedup`. The last value of a key counts.
/// When the program ends it writes what it noted, one JSON object of numbers, to the file that the
/// environment variable PULSEINFER_BENCH_REPORT names.
void report(std::string_view key, double value);

}  // namespace pulseinfer_bench
