// SPDX-License-Identifier: Apache-2.0
/// @file
/// The layouts of engines: their strips are disjoint, and their elements where the engine has them.
#include "pulseinfer/pool_shape.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <vector>

namespace {

using namespace pulseinfer;

constexpr kv_geometry small{.layers = 1, .kv_heads = 2, .head_dim = 6, .block_tokens = 4};

/// Every choice that make_layout takes.
std::vector<pool_shape> shapes(const kv_geometry& g) {
  std::vector<pool_shape> all;
  for (const page_order order : {page_order::nhd, page_order::hnd}) {
    for (const std::int32_t groups : {1, 3}) {
      all.push_back({.order = order, .head_groups = groups});
      if (g.planes == 1) continue;
      for (const auto arrangement : {kv_arrangement::one_tensor, kv_arrangement::interleaved}) {
        all.push_back({.order = order, .arrangement = arrangement, .head_groups = groups});
      }
      for (const auto values : {value_order::transposed_page, value_order::transposed_context}) {
        all.push_back({.order = order, .values = values, .head_groups = groups});
      }
    }
  }
  return all;
}

/// Which tensor a plane lies in, and how many bytes of it are used, counted byte by byte.
void check_disjoint(const block_layout& layout, const pool_shape& shape) {
  std::map<int, std::vector<int>> owners;
  std::int64_t owned = 0;
  for (std::int32_t p = 0; p < layout.planes; ++p) {
    const bool shared = shape.arrangement != kv_arrangement::apart && p < 2;
    std::vector<int>& tensor = owners[shared ? 0 : p];
    if (tensor.size() < static_cast<std::size_t>(layout.plane_bytes(p))) {
      tensor.resize(static_cast<std::size_t>(layout.plane_bytes(p)));
    }
    const plane_layout& plane = layout.plane[p];
    for (std::int64_t page = 0; page < layout.pages; ++page) {
      for (std::int64_t strip = 0; strip < plane.strips; ++strip) {
        for (std::int64_t i = 0; i < plane.strip_bytes; ++i) {
          const auto at = layout.page_offset(page, p) + strip * plane.strip_stride + i;
          REQUIRE(at >= 0);
          REQUIRE(at < layout.plane_bytes(p));
          ++tensor[static_cast<std::size_t>(at)];
          ++owned;
        }
      }
    }
  }
  std::int64_t bytes = 0;
  bool once = true;
  for (const auto& [p, tensor] : owners) {
    bytes += static_cast<std::int64_t>(tensor.size());
    for (const int owner : tensor) once = once && owner == 1;
  }
  CHECK(once);  // no overlap, and these layouts leave no gap
  CHECK(owned == bytes);
}

}  // namespace

TEST_CASE("pool shape: strips of distinct pages and planes never overlap") {
  for (const std::int32_t planes : {1, 2}) {
    for (const scale_kind scales :
         {scale_kind::none, scale_kind::per_head, scale_kind::per_token_head}) {
      kv_geometry g = small;
      g.planes = planes;
      g.scales = scales;
      for (const pool_shape& shape : shapes(g)) {
        CAPTURE(static_cast<int>(shape.order));
        CAPTURE(static_cast<int>(shape.arrangement));
        CAPTURE(static_cast<int>(shape.values));
        CAPTURE(shape.head_groups);
        for (const std::int64_t pages : {1, 3}) {
          const block_layout layout = make_layout(g, pages, shape);
          CHECK(layout.pages == pages * shape.head_groups);
          CHECK(layout.unit_bytes() == g.unit_bytes());
          check_disjoint(layout, shape);
        }
      }
    }
  }
}

TEST_CASE("pool shape: elements lie where the engine's own indices say") {
  constexpr std::int64_t pages = 5, tokens = 4, heads = 6, dim = 6, e = 2, groups = 3;
  const kv_geometry g = small;  // 2 of the 6 heads
  // The flat index of an element of the engine's tensor, dimension by dimension.
  const auto flat = [](std::initializer_list<std::pair<std::int64_t, std::int64_t>> at_and_extent) {
    std::int64_t index = 0;
    for (const auto& [at, extent] : at_and_extent) index = index * extent + at;
    return index * e;
  };
  const auto check = [&](const pool_shape& shape, std::int32_t p, auto engine_index) {
    const block_layout layout = make_layout(g, pages, shape);
    for (std::int64_t page = 0; page < pages; ++page) {
      for (std::int64_t t = 0; t < tokens; ++t) {
        for (std::int64_t h = 0; h < heads; ++h) {
          for (std::int64_t c = 0; c < dim; ++c) {
            const std::int64_t id = page * groups + h / g.kv_heads;
            const std::int64_t is =
                layout.offset(id, t, h % g.kv_heads, p) + c * layout.plane[p].channel_stride;
            REQUIRE(is == engine_index(page, t, h, c));
          }
        }
      }
    }
  };
  using index = std::int64_t;
  pool_shape shape{.head_groups = groups};
  check(shape, 0, [&](index page, index t, index h, index c) {
    return flat({{page, pages}, {t, tokens}, {h, heads}, {c, dim}});
  });
  shape.order = page_order::hnd;
  check(shape, 1, [&](index page, index t, index h, index c) {
    return flat({{page, pages}, {h, heads}, {t, tokens}, {c, dim}});
  });
  shape.arrangement = kv_arrangement::interleaved;
  check(shape, 1, [&](index page, index t, index h, index c) {
    return flat({{page, pages}, {1, 2}, {h, heads}, {t, tokens}, {c, dim}});
  });
  shape.arrangement = kv_arrangement::one_tensor;
  shape.order = page_order::nhd;
  check(shape, 1, [&](index page, index t, index h, index c) {
    return flat({{1, 2}, {page, pages}, {t, tokens}, {h, heads}, {c, dim}});
  });
  shape.arrangement = kv_arrangement::apart;
  shape.values = value_order::transposed_page;
  check(shape, 1, [&](index page, index t, index h, index c) {
    return flat({{page, pages}, {h, heads}, {c, dim}, {t, tokens}});
  });
  shape.values = value_order::transposed_context;
  check(shape, 1, [&](index page, index t, index h, index c) {
    return flat({{h, heads}, {c, dim}, {page * tokens + t, pages * tokens}});
  });
}

TEST_CASE("pool shape: pages of 1 to 256 tokens") {
  for (const std::int32_t tokens : {1, 2, 16, 64, 256}) {
    const kv_geometry g{.layers = 1, .kv_heads = 8, .head_dim = 128, .block_tokens = tokens};
    CHECK(make_layout(g, 10).unit_bytes() == 4096 * tokens);
    CHECK(make_layout(g, 10, {.order = page_order::hnd}).plane_bytes() == 10 * 2048 * tokens);
  }
}

TEST_CASE("pool shape: choices that exclude each other, and counts out of range, are refused") {
  using error = std::invalid_argument;
  const auto refuse = [](const kv_geometry& g, std::int64_t pages, const pool_shape& shape,
                         const char* text) {
    CHECK_THROWS_WITH_AS((void)make_layout(g, pages, shape), doctest::Contains(text), error);
  };
  refuse(small, 0, {}, "pages is 0");
  refuse(small, 4, {.head_groups = 0}, "head_groups is 0");
  refuse(small, 4, {.head_groups = -2}, "head_groups is -2");
  refuse(small, 1 << 30, {.head_groups = 4}, "pages is 4294967296");
  refuse(small, 4,
         {.arrangement = kv_arrangement::interleaved, .values = value_order::transposed_page},
         "transposed values need");
  kv_geometry latent = small;
  latent.planes = 1;
  refuse(latent, 4, {.arrangement = kv_arrangement::one_tensor}, "a single plane");
  refuse(latent, 4, {.values = value_order::transposed_page}, "transposed values need");
  refuse(kv_geometry{}, 4, {}, "layers is 0");
  refuse(small, 4, {.order = static_cast<page_order>(2)}, "order is 2, expected 0 to 1");
  refuse(small, 4, {.arrangement = static_cast<kv_arrangement>(3)}, "arrangement is 3");
  refuse(small, 4, {.values = static_cast<value_order>(3)}, "values is 3");
}
