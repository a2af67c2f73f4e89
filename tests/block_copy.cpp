// SPDX-License-Identifier: Apache-2.0
/// @file
/// Units between pages and chunks: every byte lands where it should, and no other byte changes.
#include "pulseinfer/block_copy.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/layout.hpp"
#include "support/device_array.hpp"
#include "support/plain_layout.hpp"

namespace {

using pulseinfer::block_layout;
using pulseinfer::stream_priority;

using bytes = std::vector<std::byte>;
using device_bytes = test::device_array<std::byte, test::backend>;
using device_ids = test::device_array<std::int32_t, test::backend>;

bytes random_bytes(std::int64_t size, std::uint64_t seed) {
  pulseinfer::detail::random_source draw(seed);
  bytes values(static_cast<std::size_t>(size));
  for (std::byte& value : values) value = static_cast<std::byte>(draw.below(256));
  return values;
}

/// One layer of a pool, on the device and as the host expects it.
struct one_layer {
  one_layer(const test::backend& backend, const block_layout& of, std::uint64_t seed,
            test::backend::stream& stream)
      : layout(of),
        keys(random_bytes(of.plane_bytes(), seed)),
        values(random_bytes(of.plane_bytes(), seed + 1)),
        device_keys(backend, keys, stream),
        device_values(backend, values, stream) {}

  [[nodiscard]] pulseinfer::layer_planes planes() const {
    return {.plane = {device_keys.data(), device_values.data()}};
  }
  /// The bytes of a unit: its strips, joined.
  [[nodiscard]] bytes unit(std::int64_t page) const {
    bytes joined;
    each_strip(page, [&](const bytes& plane, std::int64_t at, std::int64_t size) {
      joined.insert(joined.end(), plane.begin() + at, plane.begin() + at + size);
    });
    joined.resize(static_cast<std::size_t>(layout.unit_bytes()));
    return joined;
  }
  /// What a scatter of `unit` to `page` should make of the planes.
  void expect(std::int64_t page, const std::byte* unit) {
    each_strip(page, [&](const bytes& plane, std::int64_t at, std::int64_t size) {
      std::copy_n(unit, size, const_cast<bytes&>(plane).begin() + at);
      unit += size;
    });
  }
  /// Calls visit(plane, offset, bytes) for the strips of a page, in order.
  template <class Visit>
  void each_strip(std::int64_t page, Visit visit) const {
    for (int p = 0; p < 2; ++p) {
      const pulseinfer::plane_layout& plane = layout.plane[p];
      for (std::int64_t i = 0; i < plane.strips; ++i) {
        visit(p == 0 ? keys : values, layout.page_offset(page, p) + i * plane.strip_stride,
              plane.strip_bytes);
      }
    }
  }
  void check(test::backend::stream& stream) {
    CHECK((device_keys.download(stream) == keys));
    CHECK((device_values.download(stream) == values));
  }

  block_layout layout;
  bytes keys, values;
  device_bytes device_keys, device_values;
};

/// Units of a host store, in slots that are in no order, with the addresses that the device knows.
class host_units {
 public:
  host_units(const test::backend& backend, const block_layout& layout, std::size_t units,
             std::uint64_t seed)
      : unit_bytes_(layout.unit_bytes()),
        expected_(random_bytes(static_cast<std::int64_t>(2 * units) * unit_bytes_, seed)),
        memory_(backend, expected_.size()) {
    std::copy(expected_.begin(), expected_.end(), memory_.data());
    // Every other slot, the last one first.
    for (std::size_t i = 0; i < units; ++i) slots_.push_back(2 * (units - 1 - i));
  }
  void lack(std::size_t i) { slots_[i] = none; }
  [[nodiscard]] const std::byte* unit(std::size_t i) const {
    return expected_.data() + slots_[i] * static_cast<std::size_t>(unit_bytes_);
  }
  [[nodiscard]] test::device_array<const std::byte*, test::backend> sources(
      const test::backend& backend, test::backend::stream& stream) const {
    std::vector<const std::byte*> all;
    for (const std::size_t slot : slots_) {
      all.push_back(slot == none
                        ? nullptr
                        : memory_.device_data() + slot * static_cast<std::size_t>(unit_bytes_));
    }
    return {backend, all, stream};
  }
  [[nodiscard]] bool is_untouched() const { return memory_.values() == expected_; }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  std::int64_t unit_bytes_;
  bytes expected_;
  test::pinned_array<std::byte, test::backend> memory_;
  std::vector<std::size_t> slots_;
};

/// Pages of several strips, in two head groups, the second plane unlike the first.
block_layout stripes() {
  const pulseinfer::plane_layout keys{
      .page_stride = 112, .group_stride = 8, .strips = 3, .strip_stride = 32, .strip_bytes = 8};
  const pulseinfer::plane_layout values{.base = 4,
                                        .page_stride = 60,
                                        .group_stride = 28,
                                        .strips = 2,
                                        .strip_stride = 12,
                                        .strip_bytes = 12};
  return pulseinfer::checked({.pages = 10, .head_groups = 2, .planes = 2, .plane = {keys, values}});
}

/// Strips of one word, of an odd number of words, of many, and of bytes that are no words.
const std::vector<block_layout>& layouts() {
  static const std::vector<block_layout> all = {test::plain_layout(9, 16, 16),
                                                test::plain_layout(9, 48, 16),
                                                test::plain_layout(9, 112, 80),
                                                test::plain_layout(9, 512, 512),
                                                test::plain_layout(9, 24, 24),
                                                test::plain_layout(9, 20, 12),
                                                test::plain_layout(9, 26, 26),
                                                test::plain_layout(9, 35, 29),
                                                stripes()};
  return all;
}

const std::vector<std::vector<std::int32_t>>& page_lists() {
  static const std::vector<std::vector<std::int32_t>> all = {
      {4}, {0, 8}, {7, 3, 5}, {8, 7, 6, 5, 4, 3, 2, 1, 0}};
  return all;
}

/// Calls run(backend, layout, pages) for everything that there is.
template <class Run>
void each_shape(Run run) {
  test::each_backend([&](test::backend backend) {
    for (const block_layout& layout : layouts()) {
      CAPTURE(layout.plane[0].strip_bytes);
      CAPTURE(layout.plane[0].page_stride);
      for (const std::vector<std::int32_t>& pages : page_lists()) {
        CAPTURE(pages.size());
        run(backend, layout, pages);
      }
    }
  });
}

pulseinfer::launch_shape shape_of(const block_layout& layout, std::size_t units) {
  return {static_cast<std::int64_t>(units), layout.unit_words()};
}

}  // namespace

TEST_CASE("block copy: gathered units are the pages' strips, joined") {
  each_shape([](test::backend& backend, const block_layout& layout,
                const std::vector<std::int32_t>& pages) {
    auto stream = backend.make_stream(stream_priority::high);
    one_layer pool(backend, layout, 1, stream);
    device_ids ids(backend, pages, stream);
    // One unit more than is gathered: it stays as it is.
    const auto units = static_cast<std::int64_t>(pages.size());
    bytes expected = random_bytes((units + 1) * layout.unit_bytes(), 3);
    device_bytes chunk(backend, expected, stream);
    backend.for_each(shape_of(layout, pages.size()), {}, 0,
                     pulseinfer::gather_units{layout, pool.planes(), ids.data(), chunk.data()},
                     stream);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      const bytes unit = pool.unit(pages[i]);
      std::copy(unit.begin(), unit.end(),
                expected.begin() + static_cast<std::int64_t>(i) * layout.unit_bytes());
    }
    const bytes is = chunk.download(stream);
    // What fills a unit up to whole words is nobody's.
    const std::int64_t payload = layout.plane[0].bytes() + layout.plane[1].bytes();
    for (std::int64_t i = 0; i <= units; ++i) {
      const auto begin = i * layout.unit_bytes();
      CHECK(std::equal(is.begin() + begin, is.begin() + begin + payload, expected.begin() + begin));
    }
    pool.check(stream);
  });
}

TEST_CASE("block copy: scattered units fill their pages and leave the neighbours") {
  each_shape([](test::backend& backend, const block_layout& layout,
                const std::vector<std::int32_t>& pages) {
    auto stream = backend.make_stream(stream_priority::high);
    one_layer pool(backend, layout, 5, stream);
    device_ids ids(backend, pages, stream);
    const auto units = static_cast<std::int64_t>(pages.size());
    const bytes source = random_bytes(units * layout.unit_bytes(), 7);
    device_bytes chunk(backend, source, stream);
    backend.for_each(shape_of(layout, pages.size()), {.max_ctas = 2}, 0,
                     pulseinfer::scatter_units{layout, pool.planes(), ids.data(), chunk.data()},
                     stream);
    for (std::size_t i = 0; i < pages.size(); ++i) {
      pool.expect(pages[i], source.data() + static_cast<std::int64_t>(i) * layout.unit_bytes());
    }
    pool.check(stream);
    CHECK((chunk.download(stream) == source));
  });
}

TEST_CASE("block copy: a unit whose page is negative goes nowhere") {
  test::each_backend([](test::backend backend) {
    const block_layout& layout = layouts()[2];
    auto stream = backend.make_stream(stream_priority::high);
    one_layer pool(backend, layout, 9, stream);
    const std::vector<std::int32_t> pages = {-1, 6, -2'000'000'000, 0, -1};
    device_ids ids(backend, pages, stream);
    const bytes source = random_bytes(5 * layout.unit_bytes(), 11);
    const device_bytes chunk(backend, source, stream);
    backend.for_each(shape_of(layout, 5), {}, 0,
                     pulseinfer::scatter_units{layout, pool.planes(), ids.data(), chunk.data()},
                     stream);
    pool.expect(6, source.data() + layout.unit_bytes());
    pool.expect(0, source.data() + 3 * layout.unit_bytes());
    pool.check(stream);
  });
}

TEST_CASE("block copy: the count of units may be known to the device alone") {
  test::each_backend([](test::backend backend) {
    const block_layout& layout = layouts()[2];
    auto stream = backend.make_stream(stream_priority::high);
    one_layer pool(backend, layout, 13, stream);
    const device_ids ids(backend, {3, 1, 8}, stream);
    const device_ids count(backend, {2}, stream);
    const bytes source = random_bytes(3 * layout.unit_bytes(), 15);
    const device_bytes chunk(backend, source, stream);
    backend.for_each({3, layout.unit_words(), count.data()}, {}, 0,
                     pulseinfer::scatter_units{layout, pool.planes(), ids.data(), chunk.data()},
                     stream);
    pool.expect(3, source.data());
    pool.expect(1, source.data() + layout.unit_bytes());
    pool.check(stream);
  });
}

TEST_CASE("block copy: pulled units fill their pages and leave the neighbours") {
  each_shape([](test::backend& backend, const block_layout& layout,
                const std::vector<std::int32_t>& pages) {
    auto stream = backend.make_stream(stream_priority::high);
    one_layer pool(backend, layout, 21, stream);
    host_units store(backend, layout, pages.size(), 23);
    const device_ids ids(backend, pages, stream);
    const auto sources = store.sources(backend, stream);
    backend.for_each(shape_of(layout, pages.size()), {.max_ctas = 2}, 0,
                     pulseinfer::pull_units{layout, pool.planes(), ids.data(), sources.data()},
                     stream);
    for (std::size_t i = 0; i < pages.size(); ++i) pool.expect(pages[i], store.unit(i));
    pool.check(stream);
    CHECK(store.is_untouched());
  });
}

TEST_CASE("block copy: nothing is pulled to a negative page, from a null, or beyond the count") {
  test::each_backend([](test::backend backend) {
    const block_layout& layout = layouts()[2];
    auto stream = backend.make_stream(stream_priority::high);
    one_layer pool(backend, layout, 25, stream);
    host_units store(backend, layout, 6, 27);
    const device_ids ids(backend, {3, -1, 5, 1, 7, 8}, stream);
    store.lack(2);
    store.lack(1);
    const auto sources = store.sources(backend, stream);
    const pulseinfer::pull_units body{layout, pool.planes(), ids.data(), sources.data()};
    const device_ids none(backend, {0}, stream), four(backend, {4}, stream);
    backend.for_each({6, layout.unit_words(), none.data()}, {}, 0, body, stream);
    pool.check(stream);
    backend.for_each({6, layout.unit_words(), four.data()}, {.max_ctas = 1}, 0, body, stream);
    pool.expect(3, store.unit(0));
    pool.expect(1, store.unit(3));
    pool.check(stream);
  });
}

TEST_CASE("block copy: offload and recall give the same bytes back in other pages") {
  test::each_backend([](test::backend backend) {
    const block_layout& here = layouts()[1];
    // The store's units do not depend on the strides of a pool.
    const block_layout there = test::plain_layout(9, 16, 16);
    auto stream = backend.make_stream(stream_priority::high);
    one_layer from(backend, here, 17, stream), to(backend, there, 19, stream);
    const device_ids sources(backend, {2, 7, 5}, stream), targets(backend, {0, 5, 8}, stream);
    const device_bytes chunk(backend, static_cast<std::size_t>(3 * here.unit_bytes()));
    backend.for_each(shape_of(here, 3), {}, 0,
                     pulseinfer::gather_units{here, from.planes(), sources.data(), chunk.data()},
                     stream);
    backend.for_each(shape_of(there, 3), {}, 0,
                     pulseinfer::scatter_units{there, to.planes(), targets.data(), chunk.data()},
                     stream);
    to.expect(0, from.unit(2).data());
    to.expect(5, from.unit(7).data());
    to.expect(8, from.unit(5).data());
    to.check(stream);
  });
}

/// No memory is touched: positions are arithmetic, and far pages are beyond 32 bits.
TEST_CASE("fault 51: a word of a far page is found beyond 32 bits") {
  const block_layout layout = test::plain_layout(3'000, 1'039'680, 1'039'680);
  const auto first = pulseinfer::detail::locate_word(layout, 2'066, 0);
  CHECK(first.plane == 0);
  CHECK(first.in_pool == 2'147'978'880);
  const std::int64_t strip_words = layout.plane[0].words();
  const auto last = pulseinfer::detail::locate_word(layout, 2'066, strip_words - 1);
  CHECK(last.plane == 0);
  CHECK(last.in_pool == 2'147'978'880 + 1'039'664);
  const auto other_plane = pulseinfer::detail::locate_word(layout, 2'066, strip_words);
  CHECK(other_plane.plane == 1);
  CHECK(other_plane.in_pool == 2'147'978'880);
  CHECK(pulseinfer::detail::locate_word(layout, 2'066, 2 * strip_words - 1).in_pool ==
        last.in_pool);
  int planes = 0;
  pulseinfer::detail::each_strip(
      layout, 2'066, [&](std::int32_t p, std::int64_t in_pool, std::int64_t in_unit, std::size_t) {
        CHECK(p == planes++);
        CHECK(in_pool == 2'147'978'880);
        CHECK(in_unit == p * 1'039'680);
      });
  CHECK(planes == 2);
}

TEST_CASE("block copy: the CPU joins units, a null leaves a gap") {
  const bytes a = random_bytes(48, 1), c = random_bytes(48, 2);
  bytes chunk = random_bytes(4 * 48, 3);
  bytes expected = chunk;
  std::copy(a.begin(), a.end(), expected.begin());
  std::copy(c.begin(), c.end(), expected.begin() + 2 * 48);
  const std::byte* const sources[] = {a.data(), nullptr, c.data()};
  pulseinfer::gather_into(chunk.data(), sources, 48);
  CHECK((chunk == expected));
  pulseinfer::gather_into(chunk.data(), {}, 48);
  pulseinfer::gather_into(nullptr, {}, 48);
  CHECK((chunk == expected));
}

TEST_CASE("block copy: the CPU deals units out, a null is passed over") {
  const bytes chunk = random_bytes(3 * 48, 5);
  bytes a(50, std::byte{1}), c(50, std::byte{2});
  std::byte* const destinations[] = {a.data() + 1, nullptr, c.data() + 1};
  pulseinfer::scatter_from(chunk.data(), destinations, 48);
  CHECK(std::equal(chunk.begin(), chunk.begin() + 48, a.begin() + 1));
  CHECK(std::equal(chunk.begin() + 96, chunk.end(), c.begin() + 1));
  CHECK((a.front() == std::byte{1} && a.back() == std::byte{1}));
  CHECK((c.front() == std::byte{2} && c.back() == std::byte{2}));
  pulseinfer::scatter_from(nullptr, {}, 48);
}

TEST_CASE("block copy: the CPU joins and deals out the same bytes, however they are stored") {
  using pulseinfer::store_hint;
  constexpr std::int64_t unit = 12'288;
  bytes store = random_bytes(6 * unit, 7);
  std::byte* const s = store.data();
  // Adjacent ones, one before them, a gap, and one twice.
  const std::byte* const sources[] = {s + 2 * unit, s + 3 * unit, s, nullptr, s + 5 * unit, s};
  bytes expected = random_bytes(6 * unit, 8);
  const bytes before = expected;
  for (std::size_t i = 0; i < 6; ++i) {
    if (sources[i] == nullptr) continue;
    std::copy_n(sources[i], unit, expected.begin() + static_cast<std::int64_t>(i) * unit);
  }
  for (const store_hint hint : {store_hint::cached, store_hint::streaming}) {
    bytes chunk = before;
    pulseinfer::gather_into(chunk.data(), sources, unit, hint);
    CHECK((chunk == expected));

    bytes other(6 * unit);
    std::byte* const o = other.data();
    std::byte* const destinations[] = {o + 2 * unit, o + 3 * unit, o, nullptr, o + 5 * unit};
    pulseinfer::scatter_from(chunk.data(), destinations, unit, hint);
    bytes dealt(6 * unit);
    for (std::size_t i = 0; i < 5; ++i) {
      if (destinations[i] == nullptr) continue;
      std::copy_n(chunk.begin() + static_cast<std::int64_t>(i) * unit, unit,
                  dealt.begin() + (destinations[i] - o));
    }
    CHECK((other == dealt));
  }
}

TEST_CASE("block copy: a ring that stays in the cache is written there, a larger one past it") {
  using pulseinfer::store_hint;
  CHECK(pulseinfer::stores_for_ring(0) == store_hint::cached);
  CHECK(pulseinfer::stores_for_ring(1 << 14) == store_hint::cached);
  CHECK(pulseinfer::stores_for_ring(std::int64_t{1} << 40) == store_hint::streaming);
  const std::int64_t cache = pulseinfer::detail::last_level_cache_bytes();
  CHECK(pulseinfer::stores_for_ring(cache / 16) == store_hint::cached);
  CHECK(pulseinfer::stores_for_ring(cache / 16 + 1) == store_hint::streaming);
}
