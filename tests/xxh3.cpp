// SPDX-License-Identifier: Apache-2.0
/// @file
/// xxHash as a store's checksum. Without xxHash this is reported as skipped.
#include "pulseinfer/xxh3.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

using pulseinfer::xxh3;

#if __has_include(<xxhash.h>)

TEST_CASE("xxh3: it is XXH3 of 64 bits, with its seed") {
  CHECK(xxh3(nullptr, 0, 0) == 0x2d06800538d394c2);  // as xxHash's specification has it
  std::vector<std::byte> bytes(100'000, std::byte{7});
  for (const std::size_t count : {1u, 16u, 241u, 65'536u, 99'999u}) {
    CHECK(xxh3(bytes.data(), count, 3) == XXH3_64bits_withSeed(bytes.data(), count, 3));
    CHECK(xxh3(bytes.data(), count, 3) != xxh3(bytes.data(), count, 4));
  }
}

TEST_CASE("xxh3: a flipped bit anywhere is noticed") {
  const pulseinfer::tagger tag(pulseinfer::integrity::checksum, xxh3);
  std::vector<std::byte> bytes(65'536, std::byte{7});
  const std::uint64_t whole = tag(bytes.data(), bytes.size(), 1);
  for (std::size_t at = 0; at < bytes.size(); at += 97) {
    const auto bit = std::byte{1} << (at % 8);
    bytes[at] ^= bit;
    CHECK(tag(bytes.data(), bytes.size(), 1) != whole);
    bytes[at] ^= bit;
  }
  CHECK(tag(bytes.data(), bytes.size(), 1) == whole);
}

#else

TEST_CASE("xxh3: null without xxHash") {
  static_assert(xxh3 == nullptr);
  std::puts("skipped: xxHash is not installed (Debian, Ubuntu: apt-get install libxxhash-dev)");
}

#endif
