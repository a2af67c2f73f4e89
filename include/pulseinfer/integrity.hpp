// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tags of units: what a store keeps beside a unit's bytes to notice, when they are recalled, that
/// they are not those that were written, or another unit's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What is checked of a unit.
enum class integrity : std::uint8_t {
  none,      ///< nothing; costs nothing
  canary,    ///< a few sampled words: finds units that were mixed up or overwritten, not every bit
  checksum,  ///< every byte
};

/// A 64-bit hash of bytes, which depends on the seed. `xxh3` of xxh3.hpp is one.
using checksum_function = std::uint64_t (*)(const std::byte* bytes, std::size_t count,
                                            std::uint64_t seed) noexcept;

namespace detail {

/// One step of a hash over words: a bijection of the state for each word (splitmix64's).
[[nodiscard]] constexpr std::uint64_t mixed(std::uint64_t state, std::uint64_t word) noexcept {
  state = (state ^ word) + 0x9e3779b97f4a7c15u;
  state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9u;
  state = (state ^ (state >> 27)) * 0x94d049bb133111ebu;
  return state ^ (state >> 31);
}

/// The seed of a unit's tag: equal bytes of two units have different tags.
[[nodiscard]] constexpr std::uint64_t unit_seed(std::int32_t sequence, std::uint32_t generation,
                                                std::int32_t layer, std::int32_t block) noexcept {
  const auto pair = [](std::uint32_t high, std::uint32_t low) {
    return std::uint64_t{high} << 32 | low;
  };
  const std::uint64_t of_sequence =
      mixed(0, pair(static_cast<std::uint32_t>(sequence), generation));
  return mixed(of_sequence,
               pair(static_cast<std::uint32_t>(layer), static_cast<std::uint32_t>(block)));
}

}  // namespace detail

/// Words that a canary looks at.
inline constexpr std::size_t canary_words = 8;

/// A tag of the first and last 8 bytes and of six words evenly in between, all of them where there
/// are no more than 64 bytes. A change of a sampled word changes it.
/// @par Cost  eight loads, whatever the count
[[nodiscard]] inline std::uint64_t canary(const std::byte* bytes, std::size_t count,
                                          std::uint64_t seed) noexcept {
  std::uint64_t state = detail::mixed(seed, count);
  const auto take = [&](std::size_t at, std::size_t size) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + at, size);
    state = detail::mixed(state, word);
  };
  constexpr std::size_t size = sizeof(std::uint64_t);
  if (count < size) {
    if (count > 0) take(0, count);
    return state;
  }
  for (std::size_t i = 0; i < canary_words; ++i) {
    take((count - size) * i / (canary_words - 1), size);
  }
  return state;
}

/// How the tags of a store are made.
class tagger {
 public:
  /// @throws std::invalid_argument  on a checksum without a function, or no such integrity
  tagger(integrity kind, checksum_function checksum) : kind_(kind), checksum_(checksum) {
    detail::expects(kind <= integrity::checksum, "integrity is ", static_cast<int>(kind),
                    ", expected none, canary or checksum");
    detail::expects(
        kind != integrity::checksum || checksum != nullptr,
        "integrity::checksum needs a hash, and checksum is null: include pulseinfer/xxh3.hpp and "
        "set .checksum = xxh3; where that is null too, xxHash was not there when this was compiled "
        "(Debian, Ubuntu: apt-get install libxxhash-dev)");
  }

  [[nodiscard]] explicit operator bool() const noexcept { return kind_ != integrity::none; }
  /// The tag of a unit's bytes, 0 for `none`.
  [[nodiscard]] std::uint64_t operator()(const std::byte* bytes, std::size_t count,
                                         std::uint64_t seed) const noexcept {
    switch (kind_) {
      case integrity::none:
        return 0;
      case integrity::canary:
        return canary(bytes, count, seed);
      default:
        return checksum_(bytes, count, seed);
    }
  }

 private:
  integrity kind_;
  checksum_function checksum_;
};

}  // namespace pulseinfer
