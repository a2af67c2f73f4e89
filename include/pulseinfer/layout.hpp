// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where a unit lies in the engine's pool: the strips of a page.
///
/// A page of one layer is rarely one run of bytes: keys and values lie apart, a head group is a
/// slice of every token, scales have a tensor of their own. A layout names the runs ("strips") of a
/// page; the store keeps them joined, plane by plane in strip order. It is arithmetic only, so that
/// kernels carry it by value. pool_shape.hpp makes the layouts that engines use today.
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

/// Planes of a page at most: keys, values, scales of keys, scales of values.
inline constexpr std::int32_t max_planes = 4;

/// Device addresses of one layer of a pool, one a plane; those that a layout does not use are null.
/// Planes that share a tensor have the same address here and differ in `plane_layout::base`.
struct layer_planes {
  std::byte* plane[max_planes] = {};
};

/// One plane of a page. All strides are in bytes.
struct plane_layout {
  std::int64_t base = 0;            ///< from the plane's address to page 0
  std::int64_t page_stride = 0;     ///< from a page to the next
  std::int64_t group_stride = 0;    ///< from a head group of a page to the next
  std::int64_t strips = 1;          ///< runs of bytes of one page and head group
  std::int64_t strip_stride = 0;    ///< from a run to the next
  std::int64_t strip_bytes = 0;     ///< of a run
  std::int64_t token_stride = 0;    ///< from a token of a page to the next
  std::int64_t head_stride = 0;     ///< from a head to the next
  std::int64_t channel_stride = 0;  ///< from a channel of a head to the next
  std::int64_t unit_offset = 0;     ///< where the plane's bytes begin in a unit
  std::int32_t word = 1;            ///< bytes that are copied at a time: 16, 8, 4, 2 or 1

  [[nodiscard]] PULSEINFER_HD std::int64_t bytes() const { return strips * strip_bytes; }
  [[nodiscard]] PULSEINFER_HD std::int64_t words() const { return bytes() / word; }
  /// Byte offset of a page id (see block_layout) from the plane's address.
  [[nodiscard]] PULSEINFER_HD std::int64_t page_offset(std::int64_t page,
                                                       std::int32_t head_groups) const {
    if (head_groups == 1) return base + page * page_stride;
    const std::int64_t engine_page = page / head_groups;
    return base + engine_page * page_stride + (page - engine_page * head_groups) * group_stride;
  }

  friend bool operator==(const plane_layout&, const plane_layout&) = default;
};

/// Where every unit of a pool lies.
///
/// A page id names a page of the engine and a head group of it: engine page x head_groups + group.
/// With one group, which is the default, it is the engine's page.
///
/// Law: the strips of distinct (plane, page id) never overlap, and each lies inside its plane.
/// Layouts of make_layout keep it; who fills in strides by hand promises it.
struct block_layout {
  std::int64_t pages = 0;  ///< page ids: pages of the engine x head groups
  std::int32_t head_groups = 1;
  std::int32_t planes = 0;
  std::int64_t bytes_of_unit = 0;
  plane_layout plane[max_planes] = {};

  /// Bytes of a unit, a multiple of word_bytes.
  [[nodiscard]] PULSEINFER_HD std::int64_t unit_bytes() const { return bytes_of_unit; }
  /// Pieces that a mover copies of a unit.
  [[nodiscard]] PULSEINFER_HD std::int64_t unit_words() const {
    std::int64_t words = 0;
    for (std::int32_t p = 0; p < planes; ++p) words += plane[p].words();
    return words;
  }
  /// Byte offset of a page id from its plane's address.
  [[nodiscard]] PULSEINFER_HD std::int64_t page_offset(std::int64_t page,
                                                       std::int32_t p = 0) const {
    return plane[p].page_offset(page, head_groups);
  }
  /// Byte offset of channel 0 of (page, token, head) from its plane's address.
  [[nodiscard]] PULSEINFER_HD std::int64_t offset(std::int64_t page, std::int64_t token,
                                                  std::int64_t head, std::int32_t p = 0) const {
    return page_offset(page, p) + token * plane[p].token_stride + head * plane[p].head_stride;
  }
  /// Bytes of memory, from its address on, that a plane reaches over.
  [[nodiscard]] PULSEINFER_HD std::int64_t plane_bytes(std::int32_t p = 0) const {
    const plane_layout& at = plane[p];
    return page_offset(pages - 1, p) + (at.strips - 1) * at.strip_stride + at.strip_bytes;
  }

  friend bool operator==(const block_layout&, const block_layout&) = default;
};
static_assert(std::is_trivially_copyable_v<block_layout>);

/// The elements of one plane of one layer, as numbers, for kernels.
struct plane_reader {
  plane_layout at;
  std::int32_t head_groups = 1;
  element_type element = element_type::f16;
  const std::byte* memory = nullptr;

  [[nodiscard]] PULSEINFER_HD float operator()(std::int64_t page, std::int64_t token,
                                               std::int64_t head, std::int64_t channel) const {
    return load_element(memory + at.page_offset(page, head_groups) + token * at.token_stride +
                            head * at.head_stride + channel * at.channel_stride,
                        element);
  }
};

namespace detail {

/// a * b + c for strides and counts that are not negative. @throws std::invalid_argument on
/// overflow
inline std::int64_t checked_offset(std::int64_t a, std::int64_t b, std::int64_t c) {
  std::int64_t out = 0;
  expects(!__builtin_mul_overflow(a, b, &out) && !__builtin_add_overflow(out, c, &out),
          "block_layout: ", a, " x ", b, " + ", c, " bytes overflow 64 bits");
  return out;
}

/// The largest word that divides everything that a mover adds up, at most word_bytes.
inline std::int32_t word_of(const plane_layout& p) {
  const std::int64_t all = p.base | p.page_stride | p.group_stride | p.strip_bytes | p.unit_offset |
                           (p.strips > 1 ? p.strip_stride : 0) | word_bytes;
  return static_cast<std::int32_t>(all & -all);
}

}  // namespace detail

/// Fills in what follows from the rest (unit offsets, words, bytes of a unit) and checks all of it.
///
/// That planes do not overlap each other depends on the addresses, and is the caller's to know.
///
/// @post  offsets of all page ids fit 64 bits; checked(checked(layout)) == checked(layout)
/// @throws std::invalid_argument  naming the count or stride that is out of range, or overflows
inline block_layout checked(block_layout layout) {
  detail::expects(layout.pages >= 1 && layout.pages <= std::numeric_limits<std::int32_t>::max(),
                  "block_layout: pages is ", layout.pages, ", expected 1 to ",
                  std::numeric_limits<std::int32_t>::max());
  detail::expects(layout.planes >= 1 && layout.planes <= max_planes, "block_layout: planes is ",
                  layout.planes, ", expected 1 to ", max_planes);
  detail::expects(layout.head_groups >= 1 && layout.pages % layout.head_groups == 0,
                  "block_layout: head_groups is ", layout.head_groups, ", with ", layout.pages,
                  " page ids");
  std::int64_t unit = 0;
  for (std::int32_t p = 0; p < layout.planes; ++p) {
    plane_layout& at = layout.plane[p];
    const auto check = [p](const char* name, std::int64_t value, std::int64_t least) {
      detail::expects(value >= least, "block_layout: ", name, " of plane ", p, " is ", value,
                      ", expected at least ", least);
    };
    check("base", at.base, 0);
    check("strips", at.strips, 1);
    check("strip_bytes", at.strip_bytes, 1);
    check("strip_stride", at.strip_stride, at.strips > 1 ? at.strip_bytes : 0);
    const std::int64_t pages = layout.pages / layout.head_groups;
    check("page_stride", at.page_stride, pages > 1 ? at.strip_bytes : 0);
    check("group_stride", at.group_stride, layout.head_groups > 1 ? at.strip_bytes : 0);
    std::int64_t end = detail::checked_offset(at.page_stride, pages - 1, at.base);
    end = detail::checked_offset(at.group_stride, layout.head_groups - 1, end);
    end = detail::checked_offset(at.strip_stride, at.strips - 1, end);
    (void)detail::checked_offset(1, at.strip_bytes, end);
    at.unit_offset = unit;
    unit = detail::checked_offset(at.strips, at.strip_bytes, unit);
    detail::expects(at.strips == 1 || at.bytes() <= std::numeric_limits<std::uint32_t>::max(),
                    "block_layout: plane ", p, " of a unit has ", at.bytes(),
                    " bytes in strips, expected at most ",
                    std::numeric_limits<std::uint32_t>::max());
    at.word = detail::word_of(at);
  }
  layout.bytes_of_unit =
      (detail::checked_offset(1, word_bytes - 1, unit)) / word_bytes * word_bytes;
  return layout;
}

/// The engine's pool as the library sees it: a geometry, a layout, and the addresses of every
/// layer. Borrowed: the memory is the engine's and outlives every transfer. A copy has tables of
/// its own.
///
/// @par Threads  any: nothing changes after the constructor
class kv_pool {
 public:
  /// @param geometry  of one unit: `kv_heads` are those of one head group
  /// @param layout  as `checked` returns it
  /// @param planes  [geometry.layers] device addresses, each a multiple of its plane's word and
  ///                `layout.plane_bytes(plane)` long
  /// @throws std::invalid_argument  naming the layer and the address, stride or count that is wrong
  kv_pool(const kv_geometry& geometry, const block_layout& layout, std::vector<layer_planes> planes)
      : geometry_(checked(geometry)), layout_(checked(layout)), planes_(std::move(planes)) {
    detail::expects(layout_.unit_bytes() == geometry_.unit_bytes(), "kv_pool: a page holds ",
                    layout_.unit_bytes(), " bytes, the geometry's unit has ",
                    geometry_.unit_bytes());
    const std::int32_t planes_needed =
        geometry_.scales == scale_kind::none ? geometry_.planes : 2 * geometry_.planes;
    detail::expects(layout_.planes == planes_needed, "kv_pool: the layout has ", layout_.planes,
                    " planes, the geometry needs ", planes_needed);
    for (std::int32_t p = 0; p < layout_.planes; ++p) check_elements(p);
    detail::expects(planes_.size() == static_cast<std::size_t>(geometry_.layers),
                    "kv_pool: ", planes_.size(), " layers of addresses, the geometry has ",
                    geometry_.layers);
    for (std::size_t layer = 0; layer < planes_.size(); ++layer) {
      for (std::int32_t p = 0; p < layout_.planes; ++p) {
        const auto address = reinterpret_cast<std::uintptr_t>(planes_[layer].plane[p]);
        const auto word = static_cast<std::uintptr_t>(layout_.plane[p].word);
        detail::expects(address != 0, "kv_pool: address ", p, " of layer ", layer, " is null");
        detail::expects(address % word == 0, "kv_pool: address ", p, " of layer ", layer, " is ",
                        address % word, " bytes past a multiple of ", word);
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
  /// The elements of a plane (0: keys, 1: values, then their scales) of a layer, for kernels.
  /// @throws std::out_of_range  on a layer or plane that there is not
  [[nodiscard]] plane_reader reader(std::int32_t layer_index, std::int32_t plane) const {
    detail::expects<std::out_of_range>(plane >= 0 && plane < layout_.planes, "kv_pool: plane is ",
                                       plane, ", expected 0 to ", layout_.planes - 1);
    return {layout_.plane[plane], layout_.head_groups,
            plane < geometry_.planes ? geometry_.element : element_type::f32,
            layer(layer_index).plane[plane]};
  }
  /// @throws std::out_of_range  on a layer that the geometry does not have
  void check_layer(std::int32_t layer) const {
    detail::expects<std::out_of_range>(layer >= 0 && layer < geometry_.layers, "kv_pool: layer is ",
                                       layer, ", expected 0 to ", geometry_.layers - 1);
  }
  /// @throws std::out_of_range  on a page id outside the pool
  void check_page(std::int64_t page) const {
    detail::expects<std::out_of_range>(page >= 0 && page < layout_.pages, "kv_pool: page is ", page,
                                       ", expected 0 to ", layout_.pages - 1);
  }

 private:
  /// Every element that a reader of the plane may ask for lies between the first and the last byte
  /// of a page.
  void check_elements(std::int32_t p) const {
    const plane_layout& at = layout_.plane[p];
    const bool is_scale = p >= geometry_.planes;
    detail::expects(at.token_stride >= 0 && at.head_stride >= 0 && at.channel_stride >= 0,
                    "kv_pool: a stride of plane ", p, " is negative");
    const std::int64_t channels = is_scale ? 1 : geometry_.head_dim;
    const std::int64_t element =
        is_scale ? std::int64_t{sizeof(float)} : element_bytes(geometry_.element);
    std::int64_t end = detail::checked_offset(at.token_stride, geometry_.block_tokens - 1, element);
    end = detail::checked_offset(at.head_stride, geometry_.kv_heads - 1, end);
    end = detail::checked_offset(at.channel_stride, channels - 1, end);
    const std::int64_t page = (at.strips - 1) * at.strip_stride + at.strip_bytes;
    detail::expects(end <= page, "kv_pool: the geometry's last element of plane ", p,
                    " ends at byte ", end, " of a page, the page has ", page);
  }

  kv_geometry geometry_;
  block_layout layout_;
  std::vector<layer_planes> planes_;
};

}  // namespace pulseinfer
