// SPDX-License-Identifier: Apache-2.0
/// @file
/// The shape of a model's KV cache, and the size of the unit that everything else counts in.
#pragma once

#include <cstdint>

#include "pulseinfer/config.hpp"
#include "pulseinfer/element.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// FP32 scales that travel with quantised keys, and the same with values.
enum class scale_kind : std::uint8_t {
  none,
  per_head,        ///< one for each head of a block
  per_token_head,  ///< one for each token and head
};

/// Shape of a KV cache. A value: fill it in, and let `checked` refuse what makes no sense.
///
/// The **unit** of store, digest, selection, residency and transfer is one block of one layer for
/// one head group: `block_tokens` tokens x `kv_heads` heads, keys and values, and their scales. For
/// Llama-3-8B in FP16, 16 tokens and all heads in one group that is 64 KiB.
///
/// Where the heads of a layer are split into groups (see pool_shape), `kv_heads` are those of one
/// group, and each group of a request is a row of its own.
struct kv_geometry {
  std::int32_t layers = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t block_tokens = 16;
  element_type element = element_type::f16;
  std::int32_t planes = 2;  ///< 2: keys and values; 1: a latent that is both (MLA)
  scale_kind scales = scale_kind::none;

  /// Bytes of one head of one token of keys (or values).
  [[nodiscard]] constexpr std::int64_t head_bytes() const {
    return std::int64_t{head_dim} * element_bytes(element);
  }
  /// Bytes of one token of keys (or values), all heads.
  [[nodiscard]] constexpr std::int64_t token_bytes() const { return kv_heads * head_bytes(); }
  /// Bytes of the keys (or values) of a unit.
  [[nodiscard]] constexpr std::int64_t plane_bytes() const { return block_tokens * token_bytes(); }
  /// Bytes of the scales of the keys (or values) of a unit.
  [[nodiscard]] constexpr std::int64_t scale_bytes() const {
    if (scales == scale_kind::none) return 0;
    const std::int64_t tokens = scales == scale_kind::per_head ? 1 : block_tokens;
    return tokens * kv_heads * std::int64_t{sizeof(float)};
  }
  /// Bytes of a unit, filled up to whole words.
  [[nodiscard]] constexpr std::int64_t unit_bytes() const {
    const std::int64_t bytes = planes * (plane_bytes() + scale_bytes());
    return (bytes + word_bytes - 1) / word_bytes * word_bytes;
  }
  /// Blocks that `tokens` tokens fill or begin.
  [[nodiscard]] constexpr std::int64_t blocks_of(std::int64_t tokens) const {
    return (tokens + block_tokens - 1) / block_tokens;
  }

  friend bool operator==(const kv_geometry&, const kv_geometry&) = default;
};

/// Largest value of each extent, and most tokens of a block: a unit stays below 2^53 bytes.
inline constexpr std::int32_t max_extent = 1 << 16;

/// Returns the geometry, or throws `std::invalid_argument` naming what is out of range.
inline kv_geometry checked(const kv_geometry& g) {
  const auto check = [](const char* name, std::int32_t value, std::int32_t most) {
    detail::expects(value >= 1 && value <= most, "kv_geometry: ", name, " is ", value,
                    ", expected 1 to ", most);
  };
  check("layers", g.layers, max_extent);
  check("kv_heads", g.kv_heads, max_extent);
  check("head_dim", g.head_dim, max_extent);
  check("block_tokens", g.block_tokens, max_extent);
  check("planes", g.planes, 2);
  detail::expects(element_bytes(g.element) > 0, "kv_geometry: element is ",
                  static_cast<int>(g.element), ", expected one of element_type");
  detail::expects(g.scales <= scale_kind::per_token_head, "kv_geometry: scales is ",
                  static_cast<int>(g.scales), ", expected one of scale_kind");
  return g;
}

}  // namespace pulseinfer
