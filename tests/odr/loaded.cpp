// SPDX-License-Identifier: Apache-2.0
// loaded LOCAL|GLOBAL LIBRARY_A LIBRARY_B   loads two libraries that both hold the library, each with
// names of its own or with names that the process shares, and runs both, each twice, in turns.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <initializer_list>

#include "unit.hpp"

namespace {

using entry = unit_result (*)();

entry load(const char* file, int scope, const char* name) {
  void* const library = dlopen(file, RTLD_NOW | scope);
  void* const found = library == nullptr ? nullptr : dlsym(library, name);
  if (found == nullptr) std::printf("%s\n", dlerror());
  return reinterpret_cast<entry>(found);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const int scope = std::strcmp(argv[1], "GLOBAL") == 0 ? RTLD_GLOBAL : RTLD_LOCAL;
  const entry a = load(argv[2], scope, "run_a");
  const entry b = load(argv[3], scope, "run_b");
  if (a == nullptr || b == nullptr) return 1;
  for (int round = 0; round < 2; ++round) {
    for (const entry run : {a, b}) {
      const unit_result result = run();
      std::printf("%s: status %d\n", result.type_name, result.status);
      if (result.status != 0) return 1;
    }
  }
}
