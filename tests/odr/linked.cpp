// SPDX-License-Identifier: Apache-2.0
// Runs two units of one program, each twice, in turns. They hold the same version of the library, and
// share its types; or two versions, and share none.
#include <cstdio>
#include <cstring>

#include "unit.hpp"

#if defined(PULSEINFER_OTHER_VERSION)
constexpr auto second = run_other;
constexpr bool same_version = false;
#else
constexpr auto second = run_b;
constexpr bool same_version = true;
#endif

int main() {
  for (int round = 0; round < 2; ++round) {
    const unit_result a = run_a();
    const unit_result b = second();
    std::printf("%s: status %d\n%s: status %d\n", a.type_name, a.status, b.type_name, b.status);
    if (a.status != 0 || b.status != 0) return 1;
    if ((std::strcmp(a.type_name, b.type_name) == 0) != same_version) {
      std::puts(same_version ? "one version has two names" : "two versions have one name");
      return 1;
    }
  }
}
