// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a tile of digests holds: 64 blocks, `[part][kv_head][channel][64]` elements, then
/// `[factor][kv_head][64]` floats.
///
/// Neighbouring threads score neighbouring blocks and read neighbouring elements. A part is a vector
/// of a block and head: its mean, a bound, a centre. A factor is one number of a block and head: the
/// scale of a part whose elements are FP8 or INT8, or the distance from the centre.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "pulseinfer/config.hpp"
#include "pulseinfer/element.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Blocks of a tile.
inline constexpr std::int64_t tile_blocks = 64;

/// What is kept of the keys of a block. See score.hpp for how each is scored.
enum class digest_kind : std::uint8_t {
  mean,             ///< one part: the mean of each channel over the block's tokens
  min_max,          ///< two parts: smallest and largest value of each channel (Quest's bound)
  centre_distance,  ///< the mean, and how far from it the block's keys are on average, in length
};

/// Vectors that are kept of a block and head.
[[nodiscard]] PULSEINFER_HD constexpr std::int64_t digest_parts(digest_kind kind) {
  return kind == digest_kind::min_max ? 2 : 1;
}

/// What a digest is made of, and where it lies in a tile.
///
/// Elements are FP32, FP16 or BF16, rounded to nearest, ties to even; or FP8 E4M3 or INT8 times a
/// scale, one for each block, head and part, such that the largest magnitude of the part becomes
/// 448, or 127.
///
/// A NaN among a channel's keys is in its digest, whatever the kind. What is too large for an
/// element is infinite; with a scale, a NaN or an infinity makes all of its part NaN.
struct digest_form {
  digest_kind kind = digest_kind::mean;
  element_type element = element_type::f32;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;

  [[nodiscard]] PULSEINFER_HD constexpr bool is_scaled() const {
    return element == element_type::f8_e4m3 || element == element_type::i8;
  }
  [[nodiscard]] PULSEINFER_HD constexpr std::int64_t parts() const { return digest_parts(kind); }
  /// Floats of a block and head beside the parts: scales first, then the distance.
  [[nodiscard]] PULSEINFER_HD constexpr std::int64_t factors() const {
    return (is_scaled() ? parts() : 0) + (kind == digest_kind::centre_distance ? 1 : 0);
  }
  /// Bytes from a channel to the next.
  [[nodiscard]] PULSEINFER_HD constexpr std::int64_t channel_bytes() const {
    return tile_blocks * element_bytes(element);
  }
  /// Bytes of one head of a part of a tile.
  [[nodiscard]] PULSEINFER_HD constexpr std::int64_t head_bytes() const {
    return head_dim * channel_bytes();
  }
  /// Bytes from a part to the next.
  [[nodiscard]] PULSEINFER_HD constexpr std::int64_t part_bytes() const {
    return kv_heads * head_bytes();
  }
  [[nodiscard]] PULSEINFER_HD constexpr std::int64_t tile_bytes() const {
    return parts() * part_bytes() +
           factors() * kv_heads * tile_blocks * std::int64_t{sizeof(float)};
  }
  /// Byte of a tile at which a head of a part begins.
  [[nodiscard]] PULSEINFER_HD constexpr std::int64_t offset(std::int64_t part,
                                                            std::int64_t kv_head) const {
    return part * part_bytes() + kv_head * head_bytes();
  }
  /// Byte of a tile at which the 64 floats of a factor of a head begin. Factor p is the scale of
  /// part p; the last one is the distance.
  [[nodiscard]] PULSEINFER_HD constexpr std::int64_t factor_offset(std::int64_t factor,
                                                                   std::int64_t kv_head) const {
    return parts() * part_bytes() +
           (factor * kv_heads + kv_head) * tile_blocks * std::int64_t{sizeof(float)};
  }

  friend bool operator==(const digest_form&, const digest_form&) = default;
};

/// Bytes of device memory that digests take for each token of context and layer. (A tile that is
/// begun is taken whole, which is not counted here.)
[[nodiscard]] constexpr double digest_bytes_per_token(const digest_form& form,
                                                      std::int32_t block_tokens) {
  return static_cast<double>(form.tile_bytes()) / (static_cast<double>(tile_blocks) * block_tokens);
}

/// Returns the form, or throws `std::invalid_argument` naming what is out of range.
inline digest_form checked(const digest_form& form) {
  detail::expects(form.kind <= digest_kind::centre_distance, "digest_form: kind is ",
                  static_cast<int>(form.kind), ", expected one of digest_kind");
  detail::expects(element_bytes(form.element) > 0 && form.element != element_type::f8_e5m2,
                  "digest_form: element is ", static_cast<int>(form.element),
                  ", expected f32, f16, bf16, f8_e4m3 or i8");
  detail::expects(form.kv_heads >= 1 && form.kv_heads <= max_extent, "digest_form: kv_heads is ",
                  form.kv_heads, ", expected 1 to ", max_extent);
  detail::expects(form.head_dim >= 1 && form.head_dim <= max_extent, "digest_form: head_dim is ",
                  form.head_dim, ", expected 1 to ", max_extent);
  return form;
}

/// The digest tiles of one layer, as kernels see them. Trivially copyable; device addresses.
struct digest_view {
  digest_form form;
  std::byte* tiles = nullptr;             ///< of the layer
  const std::int32_t* tile_of = nullptr;  ///< [requests, tiles_per_request], -1 where there is none
  std::int64_t tiles_per_request = 0;

  /// The tile in which a block of a request lies, as its block `block % tile_blocks`. Null where
  /// the request has none, or is negative: a row that is not in use.
  [[nodiscard]] PULSEINFER_HD std::byte* tile(std::int64_t request, std::int64_t block) const {
    const std::int64_t index = block / tile_blocks;
    if (request < 0 || index >= tiles_per_request) return nullptr;
    const std::int32_t tile = tile_of[request * tiles_per_request + index];
    return tile < 0 ? nullptr : tiles + tile * form.tile_bytes();
  }
  /// Where element `channel` of a part lies, for block `unit` of a tile.
  [[nodiscard]] PULSEINFER_HD std::byte* element_at(std::byte* tile, std::int64_t part,
                                                    std::int64_t kv_head, std::int64_t channel,
                                                    std::int64_t unit) const {
    return tile + form.offset(part, kv_head) + channel * form.channel_bytes() +
           unit * element_bytes(form.element);
  }
  /// Where a factor lies, for block `unit` of a tile.
  [[nodiscard]] PULSEINFER_HD float* factor_at(std::byte* tile, std::int64_t factor,
                                               std::int64_t kv_head, std::int64_t unit) const {
    return reinterpret_cast<float*>(tile + form.factor_offset(factor, kv_head)) + unit;
  }
  /// The number that an element of a part stands for.
  [[nodiscard]] PULSEINFER_HD float value(std::byte* tile, std::int64_t part, std::int64_t kv_head,
                                          std::int64_t channel, std::int64_t unit) const {
    const float element =
        load_element(element_at(tile, part, kv_head, channel, unit), form.element);
    if (!form.is_scaled()) return element;
    return detail::product(element, *factor_at(tile, part, kv_head, unit));
  }
};
static_assert(std::is_trivially_copyable_v<digest_view>);

}  // namespace pulseinfer
