// SPDX-License-Identifier: Apache-2.0
#include "engines.hpp"

#include <cstdio>

int main() {
  int failures = 0;
  for (const auto& example : engines::all<pulseinfer::host_backend>) {
    const bool good = example.run(pulseinfer::host_backend{});
    std::printf("%-14s %s\n", example.name, good ? "every byte came back" : "BYTES DIFFER");
    failures += good ? 0 : 1;
  }
  return failures;
}
