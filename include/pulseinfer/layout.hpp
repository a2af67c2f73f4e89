// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where a unit lies in the engine's pool: the strips of a page.
///
/// A page of one layer is not one run of bytes: engines keep keys and values apart. A layout names
/// the runs ("strips") of a page; the store keeps them joined, in strip order. It is arithmetic
/// only, so kernels carry it by value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Device addresses of one layer of a pool: keys, then values.
struct layer_planes {
  static constexpr int count = 2;
  std::byte* plane[count] = {nullptr, nullptr};
};

/// Strides of a paged pool with keys and values apart, each a [pages, tokens, heads, channels]
/// array ("NHD").
///
/// Law: the strips of distinct (plane, page) never overlap, and each lies inside [0,
/// plane_bytes()).
struct block_layout {
  std::int64_t pages = 0;
  std::int64_t page_stride = 0;   ///< bytes from one page of a plane to the next
  std::int64_t strip_bytes = 0;   ///< bytes of a page in one plane; a multiple of word_bytes
  std::int64_t token_stride = 0;  ///< bytes between tokens of a page
  std::int64_t head_stride = 0;   ///< bytes between heads of a token

  /// Strips of a unit: one a plane.
  static constexpr std::int64_t strips = layer_planes::count;

  [[nodiscard]] PULSEINFER_HD std::int64_t unit_bytes() const { return strips * strip_bytes; }
  [[nodiscard]] PULSEINFER_HD std::int64_t unit_words() const { return unit_bytes() / word_bytes; }
  [[nodiscard]] PULSEINFER_HD std::int64_t plane_bytes() const { return pages * page_stride; }

  /// Byte offset of a page in its plane.
  [[nodiscard]] PULSEINFER_HD std::int64_t page_offset(std::int64_t page) const {
    return page * page_stride;
  }
  /// Byte offset of channel 0 of (page, token, head) in its plane.
  [[nodiscard]] PULSEINFER_HD std::int64_t offset(std::int64_t page, std::int64_t token,
                                                  std::int64_t head) const {
    return page * page_stride + token * token_stride + head * head_stride;
  }

  friend bool operator==(const block_layout&, const block_layout&) = default;
};
static_assert(std::is_trivially_copyable_v<block_layout>);

/// The dense NHD layout of a geometry: a page is `block_tokens` tokens, one after the other, and
/// pages follow each other.
///
/// @throws std::invalid_argument  on a bad geometry, or a count of pages that is not 1 to 2^31-1 or
/// overflows 64 bits
inline block_layout nhd_layout(const kv_geometry& geometry, std::int64_t pages) {
  const kv_geometry g = checked(geometry);
  detail::expects(pages >= 1 && pages <= std::numeric_limits<std::int32_t>::max(),
                  "nhd_layout: pages is ", pages, ", expected 1 to ",
                  std::numeric_limits<std::int32_t>::max());
  const std::int64_t strip = g.unit_bytes() / block_layout::strips;
  detail::expects(pages <= std::numeric_limits<std::int64_t>::max() / strip, "nhd_layout: ", pages,
                  " pages of ", strip, " bytes overflow 64 bits");
  return {.pages = pages,
          .page_stride = strip,
          .strip_bytes = strip,
          .token_stride = g.token_bytes(),
          .head_stride = g.head_bytes()};
}

/// The engine's pool as the library sees it: a geometry, a layout, and the addresses of every
/// layer. Borrowed: the memory is the engine's and outlives every transfer.
class kv_pool {
 public:
  /// @param planes  [geometry.layers] device addresses, each aligned to word_bytes and
  /// `layout.plane_bytes()` long
  /// @throws std::invalid_argument  naming the layer and the address, stride or count that does not
  /// fit
  kv_pool(const kv_geometry& geometry, const block_layout& layout, std::vector<layer_planes> planes)
      : geometry_(checked(geometry)), layout_(layout), planes_(std::move(planes)) {
    detail::expects(layout.pages >= 1, "kv_pool: pages is ", layout.pages, ", expected at least 1");
    const std::int64_t strip_bytes = geometry_.unit_bytes() / block_layout::strips;
    detail::expects(layout.strip_bytes == strip_bytes, "kv_pool: strip_bytes is ",
                    layout.strip_bytes, ", expected ", strip_bytes,
                    ", which is half of the geometry's unit");
    detail::expects(layout.page_stride >= layout.strip_bytes, "kv_pool: page_stride is ",
                    layout.page_stride, ", expected at least strip_bytes, which is ",
                    layout.strip_bytes);
    detail::expects(layout.page_stride % word_bytes == 0, "kv_pool: page_stride is ",
                    layout.page_stride, ", expected a multiple of ", word_bytes);
    detail::expects(layout.pages <= std::numeric_limits<std::int64_t>::max() / layout.page_stride,
                    "kv_pool: ", layout.pages, " pages of stride ", layout.page_stride,
                    " overflow 64 bits");
    detail::expects(planes_.size() == static_cast<std::size_t>(geometry_.layers),
                    "kv_pool: ", planes_.size(), " layers of addresses, the geometry has ",
                    geometry_.layers);
    for (std::size_t layer = 0; layer < planes_.size(); ++layer) {
      for (const std::byte* plane : planes_[layer].plane) {
        const auto address = reinterpret_cast<std::uintptr_t>(plane);
        detail::expects(plane != nullptr, "kv_pool: an address of layer ", layer, " is null");
        detail::expects(address % word_bytes == 0, "kv_pool: an address of layer ", layer, " is ",
                        address % word_bytes, " bytes past a multiple of ", word_bytes);
      }
    }
  }

  [[nodiscard]] const kv_geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] const block_layout& layout() const noexcept { return layout_; }

  /// @throws std::out_of_range  on a layer that the geometry does not have
  [[nodiscard]] const layer_planes& layer(std::int32_t layer) const {
    check_layer(layer);
    return planes_[static_cast<std::size_t>(layer)];
  }
  void check_layer(std::int32_t layer) const {
    detail::expects<std::out_of_range>(layer >= 0 && layer < geometry_.layers, "kv_pool: layer is ",
                                       layer, ", expected 0 to ", geometry_.layers - 1);
  }
  /// @throws std::out_of_range  on a page outside the pool
  void check_page(std::int64_t page) const {
    detail::expects<std::out_of_range>(page >= 0 && page < layout_.pages, "kv_pool: page is ", page,
                                       ", expected 0 to ", layout_.pages - 1);
  }

 private:
  kv_geometry geometry_;
  block_layout layout_;
  std::vector<layer_planes> planes_;
};

}  // namespace pulseinfer
