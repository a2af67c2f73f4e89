// SPDX-License-Identifier: Apache-2.0
/// @file
/// The laws of strips, and the pools that are refused.
#include "pulseinfer/layout.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

namespace {

using pulseinfer::block_layout;
using pulseinfer::kv_geometry;
using pulseinfer::kv_pool;
using pulseinfer::layer_planes;
using pulseinfer::nhd_layout;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
constexpr kv_geometry small{.layers = 2, .kv_heads = 3, .head_dim = 8, .block_tokens = 4};

/// Addresses that are never followed: a pool only does arithmetic with them.
std::vector<layer_planes> planes_of(std::int32_t layers) {
  static std::byte memory[64];
  auto* const aligned = memory + 16 - reinterpret_cast<std::uintptr_t>(memory) % 16;
  return std::vector<layer_planes>(static_cast<std::size_t>(layers), {{aligned, aligned + 16}});
}

/// `small` with room between its pages.
block_layout padded_layout() {
  block_layout layout = nhd_layout(small, 5);
  layout.page_stride += 48;
  return layout;
}

/// Law: strips of distinct pages never overlap, and lie inside the plane. Counted byte by byte.
void check_strips(const block_layout& layout) {
  std::vector<int> owners(static_cast<std::size_t>(layout.plane_bytes()));
  for (std::int64_t page = 0; page < layout.pages; ++page) {
    const std::int64_t begin = layout.page_offset(page);
    REQUIRE(begin >= 0);
    REQUIRE(begin + layout.strip_bytes <= layout.plane_bytes());
    for (std::int64_t i = begin; i < begin + layout.strip_bytes; ++i) {
      ++owners[static_cast<std::size_t>(i)];
    }
  }
  std::int64_t owned = 0;
  bool once = true;
  for (const int owner : owners) {
    once = once && owner <= 1;
    owned += owner;
  }
  CHECK(once);
  CHECK(owned == layout.pages * layout.strip_bytes);
}

}  // namespace

TEST_CASE("layout: a dense layout follows from the geometry") {
  const kv_geometry llama{.layers = 32, .kv_heads = 8, .head_dim = 128};
  const block_layout layout = nhd_layout(llama, 100);
  CHECK(layout == block_layout{.pages = 100,
                               .page_stride = 32'768,
                               .strip_bytes = 32'768,
                               .token_stride = 2'048,
                               .head_stride = 256});
  CHECK(layout.unit_bytes() == 65'536);
  CHECK(layout.unit_words() == 4'096);
  CHECK(layout.plane_bytes() == 3'276'800);
}

TEST_CASE("layout: strips are disjoint and inside their plane") {
  check_strips(nhd_layout(small, 5));
  check_strips(nhd_layout(small, 1));
  check_strips(padded_layout());
}

TEST_CASE("layout: every channel of a page has a place of its own in the page's strip") {
  for (const block_layout& layout : {nhd_layout(small, 5), padded_layout()}) {
    std::vector<int> owners(static_cast<std::size_t>(layout.plane_bytes()));
    for (std::int64_t page = 0; page < layout.pages; ++page) {
      for (std::int64_t token = 0; token < small.block_tokens; ++token) {
        for (std::int64_t head = 0; head < small.kv_heads; ++head) {
          const std::int64_t begin = layout.offset(page, token, head);
          CHECK(begin >= layout.page_offset(page));
          REQUIRE(begin + small.head_bytes() <= layout.page_offset(page) + layout.strip_bytes);
          for (std::int64_t i = 0; i < small.head_bytes(); ++i) {
            ++owners[static_cast<std::size_t>(begin + i)];
          }
        }
      }
    }
    std::int64_t owned = 0;
    bool once = true;
    for (const int owner : owners) {
      once = once && owner <= 1;
      owned += owner;
    }
    CHECK(once);
    CHECK(owned == layout.pages * layout.strip_bytes);
  }
}

TEST_CASE("fault 51: offsets of far pages do not wrap at 32 bits") {
  const block_layout wide{.pages = 4'000, .page_stride = 1'039'680, .strip_bytes = 1'039'680};
  CHECK(wide.page_offset(2'066) == 2'147'978'880);
  CHECK(wide.offset(2'066, 0, 0) == 2'147'978'880);
  const block_layout narrow{.pages = 262'145, .page_stride = 16'384, .strip_bytes = 16'384};
  CHECK(narrow.page_offset(262'144) == 4'294'967'296);
  CHECK(narrow.plane_bytes() == 4'294'983'680);
  const block_layout many{.pages = 1 << 30, .page_stride = 1 << 30, .strip_bytes = 1 << 30};
  CHECK(many.offset((1 << 30) - 1, 0, 0) == (std::int64_t{1} << 60) - (1 << 30));
}

TEST_CASE("layout: a dense layout of no pages, too many or too large ones is refused") {
  for (const std::int64_t pages : {std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 31}) {
    CAPTURE(pages);
    CHECK_THROWS_WITH_AS((void)nhd_layout(small, pages), doctest::Contains("pages is "),
                         std::invalid_argument);
  }
  CHECK(nhd_layout(small, 2'147'483'647).plane_bytes() == 2'147'483'647 * std::int64_t{192});
  constexpr std::int32_t extent = pulseinfer::max_extent;
  const kv_geometry largest{extent, extent, extent, extent, pulseinfer::element_type::f32};
  CHECK(nhd_layout(largest, 8'191).plane_bytes() == std::int64_t{8'191} << 50);
  CHECK_THROWS_WITH_AS((void)nhd_layout(largest, 8'192), doctest::Contains("overflow"),
                       std::invalid_argument);
  CHECK_THROWS_AS((void)nhd_layout(kv_geometry{}, 1), std::invalid_argument);
}

TEST_CASE("layout: a pool gives back what it was made of") {
  const std::vector<layer_planes> planes = planes_of(2);
  const kv_pool pool(small, padded_layout(), planes);
  CHECK(pool.geometry() == small);
  CHECK(pool.layout() == padded_layout());
  for (const std::int32_t layer : {0, 1}) {
    for (const int plane : {0, 1}) {
      CHECK(pool.layer(layer).plane[plane] == planes[0].plane[plane]);
    }
  }
}

TEST_CASE("layout: a layer or page outside the pool is named") {
  const kv_pool pool(small, nhd_layout(small, 5), planes_of(2));
  CHECK_THROWS_WITH_AS((void)pool.layer(2), "kv_pool: layer is 2, expected 0 to 1",
                       std::out_of_range);
  CHECK_THROWS_WITH_AS(pool.check_layer(-1), "kv_pool: layer is -1, expected 0 to 1",
                       std::out_of_range);
  CHECK_THROWS_WITH_AS(pool.check_page(5), "kv_pool: page is 5, expected 0 to 4",
                       std::out_of_range);
  CHECK_THROWS_WITH_AS(pool.check_page(-1), "kv_pool: page is -1, expected 0 to 4",
                       std::out_of_range);
  CHECK_NOTHROW(pool.check_page(0));
  CHECK_NOTHROW(pool.check_page(4));
  CHECK_NOTHROW(pool.check_layer(1));
}

namespace {

/// Changes one thing of a good layout, and expects a pool over it to be refused with `text`.
template <class Change>
void check_refused(const char* text, Change change) {
  block_layout layout = nhd_layout(small, 5);
  change(layout);
  CHECK_THROWS_WITH_AS((void)kv_pool(small, layout, planes_of(2)), doctest::Contains(text),
                       std::invalid_argument);
}

}  // namespace

TEST_CASE("layout: a pool whose strides do not fit is refused") {
  check_refused("pages is 0", [](block_layout& l) { l.pages = 0; });
  check_refused("pages is -3", [](block_layout& l) { l.pages = -3; });
  check_refused("strip_bytes is 176, expected 192",
                [](block_layout& l) { l.strip_bytes = 192 - 16; });
  check_refused("strip_bytes is ", [](block_layout& l) { l.strip_bytes = most - 15; });
  // Twice this is the geometry's unit, in 64 bits that wrap.
  check_refused("strip_bytes is ", [](block_layout& l) {
    l.strip_bytes = std::numeric_limits<std::int64_t>::min() + 192;
  });
  check_refused("page_stride is 176", [](block_layout& l) { l.page_stride = 192 - 16; });
  check_refused("page_stride is 0", [](block_layout& l) { l.page_stride = 0; });
  check_refused("page_stride is -192", [](block_layout& l) { l.page_stride = -192; });
  check_refused("page_stride is 200", [](block_layout& l) { l.page_stride = 200; });
  check_refused("overflow", [](block_layout& l) { l.pages = most / 192 + 1; });
  check_refused("overflow", [](block_layout& l) { l.page_stride = most / 5 / 16 * 16 + 16; });
}

TEST_CASE("layout: a pool whose addresses do not fit is refused") {
  const block_layout layout = nhd_layout(small, 5);
  CHECK_THROWS_WITH_AS((void)kv_pool(small, layout, planes_of(1)),
                       doctest::Contains("1 layers of addresses, the geometry has 2"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS((void)kv_pool(small, layout, planes_of(3)), doctest::Contains("3 layers"),
                       std::invalid_argument);
  std::vector<layer_planes> planes = planes_of(2);
  planes[1].plane[1] += 8;
  CHECK_THROWS_WITH_AS((void)kv_pool(small, layout, planes),
                       doctest::Contains("an address of layer 1 is 8 bytes past"),
                       std::invalid_argument);
  planes[0].plane[0] = nullptr;
  CHECK_THROWS_WITH_AS((void)kv_pool(small, layout, planes),
                       doctest::Contains("an address of layer 0 is null"), std::invalid_argument);
  CHECK_THROWS_AS((void)kv_pool(kv_geometry{}, layout, planes_of(2)), std::invalid_argument);
}
