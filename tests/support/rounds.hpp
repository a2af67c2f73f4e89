// SPDX-License-Identifier: Apache-2.0
/// @file
/// How long a randomised test goes on.
#pragma once

#include <cstdlib>
#include <string_view>

#include "support/sanitizers.hpp"

namespace test {

/// `brief` where somebody waits for the test, a quarter of it where a sanitizer slows it down, `full`
/// under `sh cmake/run.sh soak`.
template <class Count>
[[nodiscard]] Count rounds(Count brief, Count full) {
  const char* soak = std::getenv("PULSEINFER_SOAK");
  return soak != nullptr && std::string_view(soak) == "1" ? full : is_sanitized ? brief / 4 : brief;
}

}  // namespace test
