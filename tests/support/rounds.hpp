// SPDX-License-Identifier: Apache-2.0
/// @file
/// How long a randomised test goes on.
#pragma once

#include <cstdlib>
#include <string_view>

namespace test {

/// `brief` where somebody waits for the test, `full` under `sh cmake/run.sh soak`.
template <class Count>
[[nodiscard]] Count rounds(Count brief, Count full) {
  const char* soak = std::getenv("PULSEINFER_SOAK");
  return soak != nullptr && std::string_view(soak) == "1" ? full : brief;
}

}  // namespace test
