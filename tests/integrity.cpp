// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tags of units: what they notice, and what they do not.
#include "pulseinfer/integrity.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <set>
#include <stdexcept>
#include <vector>

#include "pulseinfer/detail/random.hpp"

namespace {

using namespace pulseinfer;

std::vector<std::byte> random_bytes(std::size_t count, std::uint64_t seed) {
  detail::random_source random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random.next());
  return bytes;
}

/// Looks at every byte; slow and plain.
std::uint64_t plain_checksum(const std::byte* bytes, std::size_t count,
                             std::uint64_t seed) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    seed = detail::mixed(seed, std::to_integer<std::uint64_t>(bytes[i]));
  }
  return detail::mixed(seed, count);
}

constexpr std::size_t sizes[] = {0, 1, 7, 8, 9, 15, 16, 63, 64, 65, 100, 4096, 65537};

}  // namespace

TEST_CASE("integrity: none tags nothing") {
  const tagger none(integrity::none, nullptr);
  CHECK(!none);
  CHECK(none(nullptr, 65536, 1) == 0);  // reads nothing
}

TEST_CASE("integrity: a tag depends on bytes, count and seed, of any count") {
  for (const tagger& tag :
       {tagger(integrity::canary, nullptr), tagger(integrity::checksum, plain_checksum)}) {
    CHECK(tag);
    std::set<std::uint64_t> tags;
    for (const std::size_t count : sizes) {
      const auto bytes = random_bytes(count, 1);
      const auto others = random_bytes(count, 2);
      CHECK(tag(bytes.data(), count, 5) == tag(std::vector(bytes).data(), count, 5));
      tags.insert(tag(bytes.data(), count, 5));
      tags.insert(tag(bytes.data(), count, 6));
      if (count > 0) tags.insert(tag(others.data(), count, 5));
    }
    CHECK(tags.size() == 3 * std::size(sizes) - 1);  // all of them different
  }
}

TEST_CASE("integrity: a canary reads within the bytes") {
  for (const std::size_t count : sizes) {
    std::vector<std::byte> bytes(count);  // of its own size: a sanitizer sees what is beside it
    CHECK(canary(bytes.data(), count, 1) != 0);
  }
  CHECK(canary(nullptr, 0, 1) == canary(nullptr, 0, 1));
}

TEST_CASE("integrity: a canary sees every byte of 64, and eight words of more") {
  for (const std::size_t count : sizes) {
    auto bytes = random_bytes(count, 3);
    const std::uint64_t tag = canary(bytes.data(), count, 9);
    std::size_t seen = 0;
    for (std::byte& b : bytes) {
      b ^= std::byte{1};
      seen += canary(bytes.data(), count, 9) != tag ? 1 : 0;
      b ^= std::byte{1};
    }
    CHECK(seen == std::min<std::size_t>(count, 64));
    if (count == 0) continue;
    for (std::byte* end : {&bytes.front(), &bytes.back()}) {
      *end ^= std::byte{0x80};
      CHECK(canary(bytes.data(), count, 9) != tag);
      *end ^= std::byte{0x80};
    }
  }
}

TEST_CASE("integrity: every part of a unit's name is in its seed") {
  std::set<std::uint64_t> seeds;
  for (std::int32_t sequence = 0; sequence < 6; ++sequence) {
    for (std::uint32_t generation = 0; generation < 6; ++generation) {
      for (std::int32_t layer = 0; layer < 6; ++layer) {
        for (std::int32_t block = 0; block < 6; ++block) {
          seeds.insert(detail::unit_seed(sequence, generation, layer, block));
        }
      }
    }
  }
  CHECK(seeds.size() == 6 * 6 * 6 * 6);
}

TEST_CASE("integrity: a checksum without a hash is refused, and says what to install") {
  CHECK_THROWS_WITH_AS(
      tagger(integrity::checksum, nullptr),
      "integrity::checksum needs a hash, and checksum is null: include pulseinfer/xxh3.hpp and set "
      ".checksum = xxh3; where that is null too, xxHash was not there when this was compiled "
      "(Debian, Ubuntu: apt-get install libxxhash-dev)",
      std::invalid_argument);
  CHECK_THROWS_WITH_AS(tagger(static_cast<integrity>(3), plain_checksum),
                       "integrity is 3, expected none, canary or checksum", std::invalid_argument);
}
