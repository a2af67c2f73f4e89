// SPDX-License-Identifier: Apache-2.0
/// @file
/// The shape of a model's KV cache, and the size of the unit that everything else counts in.
#pragma once

#include <cstdint>

#include "pulseinfer/config.hpp"
#include "pulseinfer/element.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Shape of a KV cache. A value: fill it in, and let `checked` refuse what makes no sense.
///
/// The **unit** of store, digest, selection, residency and transfer is one block of one layer:
/// `block_tokens` tokens x `kv_heads` heads, keys and values. For Llama-3-8B in FP16 and 16 tokens
/// that is 64 KiB.
struct kv_geometry {
  std::int32_t layers = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t block_tokens = 16;
  element_type element = element_type::f16;

  /// Bytes of one head of one token of keys (or values).
  [[nodiscard]] constexpr std::int64_t head_bytes() const {
    return std::int64_t{head_dim} * element_bytes(element);
  }
  /// Bytes of one token of keys (or values), all heads.
  [[nodiscard]] constexpr std::int64_t token_bytes() const { return kv_heads * head_bytes(); }
  /// Bytes of a unit: keys and values of one block of one layer.
  [[nodiscard]] constexpr std::int64_t unit_bytes() const {
    return std::int64_t{2} * block_tokens * token_bytes();
  }
  /// Blocks that `tokens` tokens fill or begin.
  [[nodiscard]] constexpr std::int64_t blocks_of(std::int64_t tokens) const {
    return (tokens + block_tokens - 1) / block_tokens;
  }

  friend bool operator==(const kv_geometry&, const kv_geometry&) = default;
};

/// Largest value of each extent: a unit stays below 2^53 bytes, and every product in 64 bits.
inline constexpr std::int32_t max_extent = 1 << 16;

/// Returns the geometry, or throws `std::invalid_argument` naming the extent that is out of range.
///
/// Half a unit (the keys, or the values) must be a whole number of 16-byte words, because that is
/// what movers copy.
inline kv_geometry checked(const kv_geometry& g) {
  const auto check = [](const char* name, std::int32_t value) {
    detail::expects(value >= 1 && value <= max_extent, "kv_geometry: ", name, " is ", value,
                    ", expected 1 to ", max_extent);
  };
  check("layers", g.layers);
  check("kv_heads", g.kv_heads);
  check("head_dim", g.head_dim);
  check("block_tokens", g.block_tokens);
  detail::expects(element_bytes(g.element) > 0, "kv_geometry: element is ",
                  static_cast<int>(g.element), ", expected f32, f16 or bf16");
  detail::expects((g.unit_bytes() / 2) % word_bytes == 0, "kv_geometry: the keys of a unit are ",
                  g.unit_bytes() / 2, " bytes, expected a multiple of ", word_bytes);
  return g;
}

}  // namespace pulseinfer
