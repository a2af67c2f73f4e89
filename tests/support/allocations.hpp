// SPDX-License-Identifier: Apache-2.0
/// @file
/// How often the program has allocated, for tests of what allocates nothing. Every test program
/// counts, see allocations.cpp.
#pragma once

#include <cstdint>

namespace test {

/// Calls of operator new so far, of all threads.
[[nodiscard]] std::uint64_t allocations() noexcept;

}  // namespace test
