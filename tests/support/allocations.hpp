// SPDX-License-Identifier: Apache-2.0
/// @file
/// How often the program has allocated, for tests of what allocates nothing, and allocations that
/// fail, for tests of what is left then. Every test program counts, see allocations.cpp.
#pragma once

#include <cstdint>

namespace test {

/// Calls of operator new so far, of all threads.
[[nodiscard]] std::uint64_t allocations() noexcept;

/// Those of them that were not given back so far.
[[nodiscard]] std::int64_t live_allocations() noexcept;

/// The `nth` allocation of this thread from now on fails, the first being 1; 0: none does.
void fail_allocation(std::uint64_t nth) noexcept;
/// True while that one has not come.
[[nodiscard]] bool will_fail() noexcept;

/// False where the sanitizer brings its own operator new: all of the above does nothing then.
[[nodiscard]] bool counts_allocations() noexcept;

}  // namespace test
