// SPDX-License-Identifier: Apache-2.0
/// @file
/// Bodies that digest blocks: from the keys in a page of an engine's pool to a place in a tile.
#pragma once

#include <cstddef>
#include <cstdint>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/digest_tile.hpp"
#include "pulseinfer/element.hpp"
#include "pulseinfer/layout.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

namespace detail {

/// Digests one head of one block from its page, by a group of lanes. A part of it: the kernel bodies
/// below say which blocks.
///
/// Tokens are summed in their order, distances too. The result does not depend on the group's size:
/// what lanes join is one float each, or the largest of floats that are not negative, whose bits
/// order as integers.
struct block_digester {
  digest_view digest;
  plane_reader keys;
  plane_reader scales;  ///< of the keys; without memory where they have none

  /// Of the block's tokens the first `tokens`, at least 1.
  template <class Group>
  PULSEINFER_HD void run(std::byte* tile, std::int64_t unit, std::int64_t page, std::int64_t head,
                         std::int32_t tokens, Group group) const {
    const digest_form& form = digest.form;
    std::int64_t largest[2] = {0, 0};  // bits of the largest magnitude of each part
    for (std::int64_t c = group.rank(); c < form.head_dim; c += group.size()) {
      float value[2];
      channel(page, head, c, tokens, value);
      for (std::int64_t p = 0; p < form.parts(); ++p) {
        if (form.is_scaled()) {
          const std::int64_t magnitude = detail::bits_of(value[p]) & 0x7fffffffu;
          largest[p] = magnitude > largest[p] ? magnitude : largest[p];
        } else {
          store_element(digest.element_at(tile, p, head, c, unit), form.element, value[p]);
        }
      }
    }
    if (form.is_scaled()) store_scaled(tile, unit, page, head, tokens, largest, group);
    if (form.kind == digest_kind::centre_distance) {
      group.sync();  // other lanes read the centre
      store_distance(tile, unit, page, head, tokens, group);
    }
  }

 private:
  [[nodiscard]] PULSEINFER_HD float key(std::int64_t page, std::int64_t head, std::int64_t c,
                                        std::int32_t token) const {
    const float value = keys(page, token, head, c);
    return scales.memory == nullptr ? value : product(value, scales(page, token, head, 0));
  }
  /// The parts of one channel, not rounded.
  PULSEINFER_HD void channel(std::int64_t page, std::int64_t head, std::int64_t c,
                             std::int32_t tokens, float (&out)[2]) const {
    float total = 0.0f;
    float least = 0.0f;
    float most = 0.0f;
    for (std::int32_t token = 0; token < tokens; ++token) {
      const float value = key(page, head, c, token);
      total = sum(total, value);
      // A NaN is taken, whichever token has it, and then stays: no comparison with one holds.
      const bool always = token == 0 || value != value;
      least = always || value < least ? value : least;
      most = always || value > most ? value : most;
    }
    const bool is_bounds = digest.form.kind == digest_kind::min_max;
    out[0] = is_bounds ? least : product(total, quotient(1.0f, static_cast<float>(tokens)));
    out[1] = most;
  }
  /// With a NaN or an infinity in a part its scale is one, and all of the part reads as NaN.
  template <class Group>
  PULSEINFER_HD void store_scaled(std::byte* tile, std::int64_t unit, std::int64_t page,
                                  std::int64_t head, std::int32_t tokens,
                                  const std::int64_t (&largest)[2], Group group) const {
    const digest_form& form = digest.form;
    const float range = form.element == element_type::i8 ? 127.0f : 448.0f;
    float scale[2] = {0, 0};
    for (std::int64_t p = 0; p < form.parts(); ++p) {
      const std::int64_t of_all = -group.min(-largest[p]);
      const float most = float_of(static_cast<std::uint32_t>(of_all));
      scale[p] = of_all >= 0x7f800000 ? float_of(0x7fc00000u) : quotient(most, range);
      if (group.rank() == 0) *digest.factor_at(tile, p, head, unit) = scale[p];
    }
    for (std::int64_t c = group.rank(); c < form.head_dim; c += group.size()) {
      float value[2];
      channel(page, head, c, tokens, value);
      for (std::int64_t p = 0; p < form.parts(); ++p) {
        const float scaled = scale[p] > 0.0f ? quotient(value[p], scale[p]) : 0.0f;
        store_element(digest.element_at(tile, p, head, c, unit), form.element, scaled);
      }
    }
  }
  /// The mean length of key - centre, of the centre as it is stored.
  template <class Group>
  PULSEINFER_HD void store_distance(std::byte* tile, std::int64_t unit, std::int64_t page,
                                    std::int64_t head, std::int32_t tokens, Group group) const {
    const digest_form& form = digest.form;
    float total = 0.0f;
    for (std::int32_t first = 0; first < tokens; first += group.size()) {
      const std::int32_t token = first + group.rank();
      float square = 0.0f;
      for (std::int64_t c = 0; token < tokens && c < form.head_dim; ++c) {
        const float apart = sum(key(page, head, c, token), -digest.value(tile, 0, head, c, unit));
        square = sum(square, product(apart, apart));
      }
      const std::int64_t bits = bits_of(square_root(square));
      for (std::int32_t lane = 0; lane < group.size() && first + lane < tokens; ++lane) {
        const std::int64_t of_lane = group.sum(lane == group.rank() ? bits : 0);
        total = sum(total, float_of(static_cast<std::uint32_t>(of_lane)));
      }
    }
    if (group.rank() != 0) return;
    *digest.factor_at(tile, form.factors() - 1, head, unit) =
        product(total, quotient(1.0f, static_cast<float>(tokens)));
  }
};

}  // namespace detail

/// Row kernel: digests head `row % kv_heads` of block `first_block + row / kv_heads` of a request,
/// reading the keys from the page that the table names.
template <page_table Table>
struct digest_blocks {
  detail::block_digester digester;
  Table table;
  std::int64_t request;
  std::int64_t first_block;
  std::int32_t block_tokens;

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int64_t heads = digester.digest.form.kv_heads;
    const std::int64_t block = first_block + row / heads;
    const std::int64_t page = table.page(request, block);
    std::byte* const tile = digester.digest.tile(request, block);
    if (page < 0 || tile == nullptr) return;
    digester.run(tile, block % tile_blocks, page, row % heads, block_tokens, group);
  }
};

/// Row kernel: digests a head of a block that the last tokens of a row of a batch lie in. Row
/// (r * blocks + i) * kv_heads + h is head h of the i-th block from the end of row r.
template <page_table Table>
struct digest_appended {
  detail::block_digester digester;
  Table table;
  const std::int32_t* requests;  ///< [rows]
  const std::int32_t* tokens;    ///< [rows]
  std::int64_t new_tokens;
  std::int64_t blocks;  ///< a row, at most
  std::int32_t block_tokens;

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int64_t heads = digester.digest.form.kv_heads;
    const std::int64_t r = row / heads / blocks;
    const std::int64_t held = tokens[r];
    const std::int64_t block = (held - 1) / block_tokens - row / heads % blocks;
    // The block's last token is none of the new ones, or there is no such block.
    if (held < 1 || block < 0 || (block + 1) * block_tokens <= held - new_tokens) return;
    const std::int64_t page = table.page(requests[r], block);
    std::byte* const tile = digester.digest.tile(requests[r], block);
    if (page < 0 || tile == nullptr) return;
    const std::int64_t in_block = held - block * block_tokens;
    digester.run(tile, block % tile_blocks, page, row % heads,
                 static_cast<std::int32_t>(in_block < block_tokens ? in_block : block_tokens),
                 group);
  }
};

}  // namespace pulseinfer
