// SPDX-License-Identifier: Apache-2.0
/// @file
/// The CPU's copies: all sets of instructions give the same bytes, and touch no others.
#include "pulseinfer/detail/cpu_copy.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/rounds.hpp"

namespace {

using pulseinfer::store_hint;
using pulseinfer::detail::copy_path;
using pulseinfer::detail::random_source;

/// Random bytes that begin at `offset` bytes behind a cache line, with guards around them.
class bytes_at {
 public:
  static constexpr std::size_t guard = 192;

  bytes_at(std::size_t offset, std::size_t size, std::uint64_t seed)
      : memory_(size + 2 * guard + 64), size_(size) {
    random_source draw(seed);
    for (std::byte& value : memory_) value = static_cast<std::byte>(draw.below(256));
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data() + guard);
    begin_ = guard + (64 - address % 64) % 64 + offset;
    before_ = memory_;
  }
  [[nodiscard]] std::byte* data() { return memory_.data() + begin_; }
  /// What is expected, byte by byte; starts as what there was.
  [[nodiscard]] std::byte* expected() { return before_.data() + begin_; }
  [[nodiscard]] bool is_as_expected() const { return memory_ == before_; }
  [[nodiscard]] std::size_t size() const { return size_; }

 private:
  std::vector<std::byte> memory_, before_;
  std::size_t size_;
  std::size_t begin_ = 0;
};

/// Calls run(path, hint) for all that this machine has.
template <class Run>
void each_copy(Run run) {
  for (const copy_path path :
       {copy_path::portable, copy_path::avx2, copy_path::avx512, copy_path::neon}) {
    if (!pulseinfer::detail::has_copy_path(path)) continue;
    CAPTURE(static_cast<int>(path));
    for (const store_hint hint : {store_hint::cached, store_hint::streaming}) {
      CAPTURE(static_cast<int>(hint));
      run(path, hint);
    }
  }
}

void gather(copy_path path, store_hint hint, std::byte* chunk,
            const std::vector<const std::byte*>& sources, std::size_t unit_bytes) {
  pulseinfer::detail::copy_units<const std::byte>(path, hint, {chunk, sources, unit_bytes});
}
void scatter(copy_path path, store_hint hint, const std::byte* chunk,
             const std::vector<std::byte*>& destinations, std::size_t unit_bytes) {
  pulseinfer::detail::copy_units<std::byte>(path, hint, {chunk, destinations, unit_bytes});
}

}  // namespace

TEST_CASE("cpu copy: one unit of any length, to and from any alignment") {
  each_copy([](copy_path path, store_hint hint) {
    // All lengths around the 128 bytes of a step and the 512 of a turn, and at all alignments of
    // the destination; sources are loaded without alignment, a few of theirs do.
    bool all_right = true;
    for (std::size_t size = 0; size <= 1'100; size += size < 300 || size > 1'000 ? 1 : 37) {
      const std::size_t step =
          test::is_sanitized ? 37 : test::rounds<std::size_t>(9, size % 8 == 0 ? 1 : 7);
      for (std::size_t to = 0; to < 64; to += step) {
        for (const std::size_t from : {0, 1, 31, 40}) {
          bytes_at source(from, size, size);
          bytes_at chunk(to, size, size + 1);
          gather(path, hint, chunk.data(), {source.data()}, size);
          std::memcpy(chunk.expected(), source.data(), size);
          all_right = all_right && chunk.is_as_expected() && source.is_as_expected();
        }
      }
    }
    CHECK(all_right);
  });
}

TEST_CASE("cpu copy: units that lie anywhere, some of them adjacent, some of them none") {
  each_copy([](copy_path path, store_hint hint) {
    random_source draw(3);
    for (int round = 0; round < test::rounds(300, 3000); ++round) {
      CAPTURE(round);
      // Odd sizes, sizes of a cache line's multiple, and those that are cut in two.
      const std::size_t unit = draw.below(3) == 0   ? draw.below(3'000)
                               : draw.below(8) == 0 ? 64 * draw.below(700)
                                                    : 64 * draw.below(80);
      const std::size_t units = draw.below(12);
      const std::size_t slots = 3 * units + 1;
      bytes_at store(draw.below(2) == 0 ? 0 : draw.below(64), slots * unit,
                     1 + static_cast<std::uint64_t>(round));
      bytes_at chunk(draw.below(2) == 0 ? 0 : draw.below(64), units * unit,
                     2 + static_cast<std::uint64_t>(round));
      std::vector<std::size_t> at;  // slots: all different, so that it can be scattered, too
      std::vector<std::size_t> free(slots);
      for (std::size_t i = 0; i < slots; ++i) free[i] = i;
      while (at.size() < units) {
        const std::size_t pick = draw.below(free.size());
        const std::size_t slot =
            !at.empty() && draw.below(2) == 0 &&
                    std::find(free.begin(), free.end(), at.back() + 1) != free.end()
                ? at.back() + 1
                : free[pick];
        free.erase(std::find(free.begin(), free.end(), slot));
        at.push_back(slot);
      }
      std::vector<const std::byte*> sources;
      std::vector<std::byte*> destinations;
      std::vector<bool> is_there;
      for (std::size_t i = 0; i < units; ++i) {
        is_there.push_back(draw.below(8) > 0);
        sources.push_back(is_there[i] ? store.data() + at[i] * unit : nullptr);
        destinations.push_back(is_there[i] ? store.data() + at[i] * unit : nullptr);
      }

      gather(path, hint, chunk.data(), sources, unit);
      for (std::size_t i = 0; i < units; ++i) {
        if (is_there[i] && unit > 0) std::memcpy(chunk.expected() + i * unit, sources[i], unit);
      }
      REQUIRE(chunk.is_as_expected());
      REQUIRE(store.is_as_expected());

      bytes_at other(draw.below(2) == 0 ? 0 : draw.below(64), units * unit,
                     5 + static_cast<std::uint64_t>(round));
      scatter(path, hint, other.data(), destinations, unit);
      for (std::size_t i = 0; i < units; ++i) {
        if (is_there[i] && unit > 0) {
          std::memcpy(store.expected() + at[i] * unit, other.data() + i * unit, unit);
        }
      }
      REQUIRE(store.is_as_expected());
      REQUIRE(other.is_as_expected());
    }
  });
}

TEST_CASE("cpu copy: large runs, with a rest behind their halves") {
  each_copy([](copy_path path, store_hint hint) {
    const std::size_t longest = test::is_sanitized ? 131'072 + 192 : 1'048'576 + 192;
    for (const std::size_t unit : {std::size_t{16'384}, std::size_t{16'386}, std::size_t{65'536},
                                   std::size_t{70'001}, longest}) {
      for (const std::size_t offset : {0, 32, 5}) {
        bytes_at store(offset, 4 * unit, unit);
        bytes_at chunk(offset, 3 * unit, unit + 1);
        const std::byte* const first = store.data();
        // The first two are one run.
        gather(path, hint, chunk.data(), {first + unit, first + 2 * unit, first}, unit);
        std::memcpy(chunk.expected(), first + unit, 2 * unit);
        std::memcpy(chunk.expected() + 2 * unit, first, unit);
        CHECK(chunk.is_as_expected());
        CHECK(store.is_as_expected());
      }
    }
  });
}

TEST_CASE("cpu copy: adjacent units are one run, which a null ends") {
  std::vector<std::byte> store(16 * 64), chunk(8 * 64);
  std::byte* const s = store.data();
  const std::vector<const std::byte*> sources = {s,       s + 64,  s + 128, nullptr,
                                                 s + 192, s + 320, s + 384, nullptr};
  pulseinfer::detail::unit_groups<const std::byte> groups(chunk.data(), sources, 64);
  std::vector<std::size_t> lengths;
  pulseinfer::detail::copy_group group;
  for (groups.next(group); group.streams > 0; groups.next(group)) {
    for (int i = 0; i < group.streams; ++i) lengths.push_back(group.bytes);
    CHECK(group.rest == 0);
  }
  CHECK((lengths == std::vector<std::size_t>{192, 64, 128}));
  groups.next(group);
  CHECK(group.streams == 0);
}

TEST_CASE("cpu copy: runs of the same length go together, long ones in halves") {
  alignas(64) static std::byte chunk[100'000];
  const std::vector<std::byte> memory(200'000);
  const auto streams = [&](std::size_t unit, const std::vector<std::size_t>& offsets,
                           std::byte* to) {
    std::vector<const std::byte*> sources;
    for (const std::size_t offset : offsets) sources.push_back(memory.data() + offset);
    pulseinfer::detail::unit_groups<const std::byte> groups(to, sources, unit);
    std::vector<std::vector<std::size_t>> found;
    pulseinfer::detail::copy_group group;
    for (groups.next(group); group.streams > 0; groups.next(group)) {
      found.push_back({static_cast<std::size_t>(group.streams), group.bytes, group.rest});
    }
    return found;
  };
  using list = std::vector<std::vector<std::size_t>>;
  CHECK((streams(4'096, {0, 8'192}, chunk) == list{{2, 4'096, 0}}));
  CHECK((streams(4'096, {0, 8'192, 40'000}, chunk) == list{{3, 4'096, 0}}));
  CHECK((streams(4'096, {0, 8'192, 40'000, 16'384}, chunk) == list{{3, 4'096, 0}, {1, 4'096, 0}}));
  CHECK((streams(4'096, {0, 8'192, 12'288}, chunk) == list{{1, 4'096, 0}, {1, 8'192, 0}}));
  CHECK((streams(16'400, {0, 40'000}, chunk) == list{{2, 8'192, 16}, {1, 16'400, 0}}));
  CHECK((streams(4'096, {0, 8'192}, chunk + 8) == list{{1, 4'096, 0}, {1, 4'096, 0}}));
  CHECK(streams(4'096, {}, chunk).empty());
  CHECK(streams(0, {0, 8'192}, chunk).empty());
}

TEST_CASE("cpu copy: this machine has the portable path, and one that is the best") {
  using namespace pulseinfer::detail;
  CHECK(has_copy_path(copy_path::portable));
  CHECK(has_copy_path(best_copy_path()));
  CHECK(!(has_copy_path(copy_path::avx2) && has_copy_path(copy_path::neon)));
  CHECK(last_level_cache_bytes() >= 1 << 18);
  CHECK(last_level_cache_bytes() == last_level_cache_bytes());
}
