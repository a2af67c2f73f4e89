// SPDX-License-Identifier: Apache-2.0
/// @file
/// The layouts of today's engines, from a few choices. An engine with another one fills a
/// block_layout itself.
#pragma once

#include <cstdint>

#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/layout.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Order of the dimensions inside a page.
enum class page_order : std::uint8_t {
  nhd,  ///< [tokens, heads, channels]
  hnd,  ///< [heads, tokens, channels]
};

/// Where the values of a page lie beside its keys.
enum class kv_arrangement : std::uint8_t {
  apart,        ///< two tensors, each [pages, page]
  one_tensor,   ///< [2, pages, page]: both planes have the tensor's address
  interleaved,  ///< [pages, 2, page]: likewise
};

/// How values are stored.
enum class value_order : std::uint8_t {
  as_keys,
  transposed_page,     ///< [pages, heads, channels, tokens]; values in a tensor of their own
  transposed_context,  ///< [heads, channels, pages * tokens], llama.cpp's; likewise
};

/// The choices. Scales, where the geometry has them, lie in tensors of their own, in `order`:
/// [pages, tokens, heads] or [pages, heads, tokens] FP32, or [pages, heads] for `per_head`.
struct pool_shape {
  page_order order = page_order::nhd;
  kv_arrangement arrangement = kv_arrangement::apart;
  value_order values = value_order::as_keys;
  std::int32_t head_groups = 1;  ///< groups of geometry.kv_heads heads in a page
};

namespace detail {

/// A dense plane whose channels are `channels` elements of `element` bytes.
inline plane_layout dense_plane(const kv_geometry& g, const pool_shape& shape, std::int64_t tokens,
                                std::int64_t channels, std::int64_t element) {
  const std::int64_t heads = std::int64_t{g.kv_heads} * shape.head_groups;
  const std::int64_t head = channels * element;
  plane_layout p{.channel_stride = element};
  if (shape.order == page_order::hnd) {
    p.token_stride = head;
    p.head_stride = tokens * head;
    p.group_stride = g.kv_heads * p.head_stride;
    p.strip_bytes = p.group_stride;
  } else {
    p.token_stride = heads * head;
    p.head_stride = head;
    p.group_stride = g.kv_heads * head;
    // All heads together are one run; a group is a slice of every token.
    p.strips = shape.head_groups == 1 ? 1 : tokens;
    p.strip_stride = p.token_stride;
    p.strip_bytes = shape.head_groups == 1 ? tokens * p.token_stride : p.group_stride;
  }
  p.page_stride = checked_offset(tokens * heads, head, 0);
  return p;
}

inline plane_layout transposed_plane(const kv_geometry& g, const pool_shape& shape,
                                     std::int64_t pages) {
  const std::int64_t tokens = g.block_tokens;
  const std::int64_t element = element_bytes(g.element);
  const std::int64_t heads = std::int64_t{g.kv_heads} * shape.head_groups;
  plane_layout p{.token_stride = element};
  if (shape.values == value_order::transposed_page) {
    p.channel_stride = tokens * element;
    p.head_stride = g.head_dim * p.channel_stride;
    p.group_stride = g.kv_heads * p.head_stride;
    p.strip_bytes = p.group_stride;
    p.page_stride = heads * p.head_stride;
  } else {
    p.channel_stride = checked_offset(pages, tokens * element, 0);
    p.head_stride = checked_offset(p.channel_stride, g.head_dim, 0);
    p.group_stride = checked_offset(p.head_stride, g.kv_heads, 0);
    p.strips = std::int64_t{g.kv_heads} * g.head_dim;
    p.strip_stride = p.channel_stride;
    p.strip_bytes = tokens * element;
    p.page_stride = p.strip_bytes;
  }
  return p;
}

}  // namespace detail

/// The layout of a pool of `pages` engine pages.
///
/// @param geometry  of one unit: `kv_heads` are the heads of one head group
/// @param pages     of the engine; page ids are as many times head_groups
/// @param shape     how the engine arranges a page
/// @return a layout as `checked` returns it
/// @throws std::invalid_argument  on a bad geometry, choices that exclude each other, or a pool
///                                that overflows 64-bit offsets or 32-bit page ids
inline block_layout make_layout(const kv_geometry& geometry, std::int64_t pages,
                                const pool_shape& shape = {}) {
  const kv_geometry g = checked(geometry);
  detail::expects(shape.head_groups >= 1 && shape.head_groups <= max_extent,
                  "make_layout: head_groups is ", shape.head_groups, ", expected 1 to ",
                  max_extent);
  const auto is_one_of = [](const char* name, auto value, auto last) {
    detail::expects(value <= last, "make_layout: ", name, " is ", static_cast<int>(value),
                    ", expected 0 to ", static_cast<int>(last));
  };
  is_one_of("order", shape.order, page_order::hnd);
  is_one_of("arrangement", shape.arrangement, kv_arrangement::interleaved);
  is_one_of("values", shape.values, value_order::transposed_context);
  (void)detail::checked_offset(g.unit_bytes(), shape.head_groups, 0);  // bytes of an engine's page
  detail::expects(shape.values == value_order::as_keys ||
                      (shape.arrangement == kv_arrangement::apart && g.planes == 2),
                  "make_layout: transposed values need keys and values apart");
  detail::expects(g.planes == 2 || shape.arrangement == kv_arrangement::apart,
                  "make_layout: a single plane has no arrangement");
  detail::expects(pages >= 1 && pages <= std::numeric_limits<std::int32_t>::max(),
                  "make_layout: pages is ", pages, ", expected 1 to ",
                  std::numeric_limits<std::int32_t>::max());
  block_layout layout{
      .pages = pages * shape.head_groups, .head_groups = shape.head_groups, .planes = g.planes};
  plane_layout& keys = layout.plane[0];
  keys = detail::dense_plane(g, shape, g.block_tokens, g.head_dim, element_bytes(g.element));
  if (g.planes == 2) {
    plane_layout& values = layout.plane[1];
    values =
        shape.values == value_order::as_keys ? keys : detail::transposed_plane(g, shape, pages);
    if (shape.arrangement == kv_arrangement::one_tensor) {
      values.base = detail::checked_offset(pages, keys.page_stride, 0);
    } else if (shape.arrangement == kv_arrangement::interleaved) {
      values.base = keys.page_stride;
      keys.page_stride = values.page_stride = 2 * keys.page_stride;
    }
  }
  if (g.scales != scale_kind::none) {
    const std::int64_t tokens = g.scales == scale_kind::per_head ? 1 : g.block_tokens;
    plane_layout scale = detail::dense_plane(g, shape, tokens, 1, sizeof(float));
    if (g.scales == scale_kind::per_head) scale.token_stride = 0;
    for (std::int32_t p = 0; p < g.planes; ++p) layout.plane[layout.planes++] = scale;
  }
  return checked(layout);
}

/// Keys and values apart, each [pages, tokens, heads, channels]: the plainest layout.
/// @throws std::invalid_argument  as make_layout
inline block_layout nhd_layout(const kv_geometry& geometry, std::int64_t pages) {
  return make_layout(geometry, pages);
}

}  // namespace pulseinfer
