// SPDX-License-Identifier: Apache-2.0
/// @file
/// Random numbers that are the same on every compiler: a seed names one run, everywhere.
#pragma once

#include <cstdint>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// A Weyl sequence through a 64-bit mixing function (splitmix64). The standard engines would do,
/// the standard distributions would not: each library draws differently.
class random_source {
 public:
  explicit constexpr random_source(std::uint64_t seed) noexcept : state_(seed) {}

  constexpr std::uint64_t next() noexcept {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }

  /// A number in [0, bound); `bound` is at least 1. The bias of the remainder is far below what a
  /// test could notice.
  constexpr std::uint64_t below(std::uint64_t bound) noexcept { return next() % bound; }

  /// True once in `n` draws.
  constexpr bool one_in(std::uint64_t n) noexcept { return below(n) == 0; }

 private:
  std::uint64_t state_;
};

}  // namespace pulseinfer::detail
