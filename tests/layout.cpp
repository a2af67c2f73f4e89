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

#include "pulseinfer/pool_shape.hpp"
#include "support/plain_layout.hpp"

namespace {

using pulseinfer::block_layout;
using pulseinfer::checked;
using pulseinfer::kv_geometry;
using pulseinfer::kv_pool;
using pulseinfer::layer_planes;
using pulseinfer::nhd_layout;
using pulseinfer::plane_layout;

constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
constexpr kv_geometry small{.layers = 2, .kv_heads = 3, .head_dim = 8, .block_tokens = 4};

/// Addresses that are never followed: a pool only does arithmetic with them.
std::vector<layer_planes> planes_of(std::int32_t layers) {
  static std::byte memory[64];
  auto* const aligned = memory + 16 - reinterpret_cast<std::uintptr_t>(memory) % 16;
  return std::vector<layer_planes>(static_cast<std::size_t>(layers),
                                   {.plane = {aligned, aligned + 16}});
}

/// `small` with room between its pages.
block_layout padded_layout() {
  block_layout layout = nhd_layout(small, 5);
  for (plane_layout& plane : layout.plane) plane.page_stride += 48;
  return checked(layout);
}

}  // namespace

TEST_CASE("layout: a dense layout follows from the geometry") {
  const kv_geometry llama{.layers = 32, .kv_heads = 8, .head_dim = 128};
  const block_layout layout = nhd_layout(llama, 100);
  CHECK(layout.pages == 100);
  CHECK(layout.head_groups == 1);
  CHECK(layout.planes == 2);
  plane_layout keys{.page_stride = 32'768,
                    .group_stride = 2'048,
                    .strip_stride = 2'048,
                    .strip_bytes = 32'768,
                    .token_stride = 2'048,
                    .head_stride = 256,
                    .channel_stride = 2,
                    .word = 16};
  CHECK(layout.plane[0] == keys);
  keys.unit_offset = 32'768;
  CHECK(layout.plane[1] == keys);
  CHECK(layout.unit_bytes() == 65'536);
  CHECK(layout.unit_words() == 4'096);
  CHECK(layout.plane_bytes() == 3'276'800);
}

TEST_CASE("layout: the word is the largest that divides all strides, offsets and bytes") {
  const auto word_of = [](plane_layout plane) {
    return checked({.pages = 4, .planes = 1, .plane = {plane}}).plane[0].word;
  };
  CHECK(word_of({.page_stride = 64, .strip_bytes = 64}) == 16);
  CHECK(word_of({.page_stride = 64, .strip_bytes = 24}) == 8);
  CHECK(word_of({.page_stride = 36, .strip_bytes = 32}) == 4);
  CHECK(word_of({.base = 2, .page_stride = 64, .strip_bytes = 64}) == 2);
  CHECK(word_of({.page_stride = 65, .strip_bytes = 64}) == 1);
  CHECK(word_of({.page_stride = 64, .strips = 2, .strip_stride = 24, .strip_bytes = 16}) == 8);
  // The second plane begins in the unit where the first one ends.
  const block_layout uneven = checked(
      {.pages = 1,
       .planes = 2,
       .plane = {{.page_stride = 20, .strip_bytes = 20}, {.page_stride = 64, .strip_bytes = 64}}});
  CHECK(uneven.plane[1].unit_offset == 20);
  CHECK(uneven.plane[1].word == 4);
  CHECK(uneven.unit_bytes() == 96);
  CHECK(uneven.unit_words() == 5 + 16);
}

TEST_CASE("fault 51: offsets of far pages do not wrap at 32 bits") {
  const block_layout wide = test::plain_layout(4'000, 1'039'680, 1'039'680);
  CHECK(wide.page_offset(2'066) == 2'147'978'880);
  CHECK(wide.offset(2'066, 0, 0) == 2'147'978'880);
  const block_layout narrow = test::plain_layout(262'145, 16'384, 16'384);
  CHECK(narrow.page_offset(262'144) == 4'294'967'296);
  CHECK(narrow.plane_bytes() == 4'294'983'680);
  // Head groups within a page, and a page within a head group.
  const block_layout groups = checked(
      {.pages = 2 * 4'000,
       .head_groups = 2,
       .planes = 1,
       .plane = {{.page_stride = 1'039'680, .group_stride = 519'840, .strip_bytes = 519'840}}});
  CHECK(groups.page_offset(2 * 2'066) == 2'147'978'880);
  CHECK(groups.page_offset(2 * 2'066 + 1) == 2'147'978'880 + 519'840);
  const block_layout outside = checked(
      {.pages = 2'067 * 16,
       .head_groups = 2'067,
       .planes = 1,
       .plane = {{.page_stride = 64'980, .group_stride = 1'039'680, .strip_bytes = 64'980}}});
  CHECK(outside.page_offset(3 * 2'067 + 2'066) == 2'147'978'880 + 3 * 64'980);
  const block_layout many = test::plain_layout(1 << 30, 1 << 30, 1 << 30);
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
      CHECK(pool.reader(layer, plane).memory == planes[0].plane[plane]);
      CHECK(pool.reader(layer, plane).at == padded_layout().plane[plane]);
    }
    CHECK_THROWS_WITH_AS((void)pool.reader(layer, 2), "kv_pool: plane is 2, expected 0 to 1",
                         std::out_of_range);
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
  check_refused("a page holds 368 bytes, the geometry's unit has 384",
                [](block_layout& l) { l.plane[1].strip_bytes = 192 - 16; });
  check_refused("strip_bytes of plane 0 is 0", [](block_layout& l) { l.plane[0].strip_bytes = 0; });
  check_refused("overflow", [](block_layout& l) {
    l.plane[0].strip_bytes = l.plane[0].page_stride = most - 15;
  });
  check_refused("strips of plane 1 is 0", [](block_layout& l) { l.plane[1].strips = 0; });
  check_refused("strip_stride of plane 1 is 5", [](block_layout& l) {
    l.plane[1].strips = 2;
    l.plane[1].strip_stride = 5;
  });
  check_refused("page_stride of plane 0 is 176, expected at least 192",
                [](block_layout& l) { l.plane[0].page_stride = 192 - 16; });
  check_refused("page_stride of plane 1 is -192",
                [](block_layout& l) { l.plane[1].page_stride = -192; });
  check_refused("base of plane 1 is -1", [](block_layout& l) { l.plane[1].base = -1; });
  check_refused("head_groups is 2, with 5 page ids", [](block_layout& l) { l.head_groups = 2; });
  check_refused("head_groups is 0", [](block_layout& l) { l.head_groups = 0; });
  check_refused("planes is 0", [](block_layout& l) { l.planes = 0; });
  check_refused("planes is 5", [](block_layout& l) { l.planes = 5; });
  check_refused("the layout has 1 planes, the geometry needs 2", [](block_layout& l) {
    l.planes = 1;
    l.plane[0].strip_bytes = l.plane[0].page_stride = 384;
  });
  check_refused("overflow", [](block_layout& l) { l.plane[0].page_stride = most / 4; });
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
                       doctest::Contains("address 1 of layer 1 is 8 bytes past a multiple of 16"),
                       std::invalid_argument);
  planes[0].plane[0] = nullptr;
  CHECK_THROWS_WITH_AS((void)kv_pool(small, layout, planes),
                       doctest::Contains("address 0 of layer 0 is null"), std::invalid_argument);
  CHECK_THROWS_AS((void)kv_pool(kv_geometry{}, layout, planes_of(2)), std::invalid_argument);
}

TEST_CASE("layout: a layout of another geometry is refused though its unit is as large") {
  CHECK_THROWS_WITH_AS(
      (void)kv_pool(small,
                    nhd_layout({.layers = 2, .kv_heads = 1, .head_dim = 48, .block_tokens = 2}, 5),
                    planes_of(2)),
      doctest::Contains("last element of plane 0"), std::invalid_argument);
  CHECK_THROWS_WITH_AS((void)kv_pool(
                           small,
                           [] {
                             block_layout layout = nhd_layout(small, 5);
                             layout.plane[1].head_stride = -16;
                             return layout;
                           }(),
                           planes_of(2)),
                       "kv_pool: a stride of plane 1 is negative", std::invalid_argument);
}
