// SPDX-License-Identifier: Apache-2.0
/// @file
/// Scores of blocks: every query of every head against the digests, each tile read once.
///
/// The score of a block for one query q is q . mean; or the largest value that q . key can take
/// within the bounds (`min_max`); or q . centre + |q| x distance, which no key that is no further
/// from the centre exceeds (`centre_distance`); times a scale. Products are summed channel by
/// channel in one order, without fused operations, so that every machine has the same bits.
///
/// The queries of a layer are arranged first, `[row][kv_head][channel][column]`: a column is one
/// head's query of one token; those that share a KV head lie beside each other. Several columns are
/// joined to a **piece**, of which the largest score and the sum are kept; or each is a piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/cpu_score.hpp"
#include "pulseinfer/digest_tile.hpp"
#include "pulseinfer/element.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Queries of one layer, as kernels see them: [rows, tokens, query_heads, head_dim], dense, device
/// memory. Several tokens a row are those of one step of speculative decoding.
struct query_view {
  const void* data = nullptr;
  element_type element = element_type::f32;
  std::int32_t tokens = 1;
};

/// How the queries of one KV head are arranged.
struct query_columns {
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t heads = 0;   ///< query heads that share a KV head
  std::int32_t tokens = 0;  ///< queries of each

  /// Column `head * tokens + token` of a KV head.
  [[nodiscard]] PULSEINFER_HD constexpr std::int32_t columns() const { return heads * tokens; }
  /// Columns that are scored at a time.
  [[nodiscard]] PULSEINFER_HD constexpr std::int32_t at_once() const {
    return columns() == 1 ? 1 : columns() <= 4 ? 4 : 8;
  }
  /// Columns, filled up with zeros to those that are scored at a time.
  [[nodiscard]] PULSEINFER_HD constexpr std::int32_t padded() const {
    return (columns() + at_once() - 1) / at_once() * at_once();
  }
  /// Floats of one KV head: a line of columns for each channel, and one of their lengths.
  [[nodiscard]] PULSEINFER_HD constexpr std::int64_t size() const {
    return (std::int64_t{head_dim} + 1) * padded();
  }
};

/// Kernel body: channel `channel` of column `i % padded` of row and KV head `i / padded`. On a CPU
/// all channels at once.
struct arrange_queries {
  query_view queries;
  query_columns shape;
  float* arranged;  ///< [rows, kv_heads, head_dim + 1, padded]

  PULSEINFER_HD void operator()(std::int64_t i, std::int64_t channel) const {
    const std::int64_t from = source(i);
    arranged[target(i) + channel * shape.padded()] =
        from < 0 ? 0.0f : load_element(queries.data, from + channel, queries.element);
  }

  [[nodiscard]] std::int64_t words() const { return shape.head_dim; }
  void whole_block(std::int64_t i) const {
    const std::int64_t from = source(i);
    const std::int64_t step = shape.padded();
    float* const to = arranged + target(i);
    for (std::int64_t c = 0; c < shape.head_dim; ++c) {
      to[c * step] = from < 0 ? 0.0f : load_element(queries.data, from + c, queries.element);
    }
  }

 private:
  /// The element that is channel 0 of a column, or -1 of one that fills up.
  [[nodiscard]] PULSEINFER_HD std::int64_t source(std::int64_t i) const {
    const std::int64_t kv_row = i / shape.padded();
    const std::int64_t column = i % shape.padded();
    if (column >= shape.columns()) return -1;
    const std::int64_t row = kv_row / shape.kv_heads;
    const std::int64_t head = kv_row % shape.kv_heads * shape.heads + column / shape.tokens;
    const std::int64_t token = row * shape.tokens + column % shape.tokens;
    const std::int64_t query_heads = std::int64_t{shape.kv_heads} * shape.heads;
    return (token * query_heads + head) * shape.head_dim;
  }
  [[nodiscard]] PULSEINFER_HD std::int64_t target(std::int64_t i) const {
    return i / shape.padded() * shape.size() + i % shape.padded();
  }
};
static_assert(std::is_trivially_copyable_v<arrange_queries>);

/// Kernel body: the length of column `column` of row and KV head `i`.
struct measure_queries {
  query_columns shape;
  float* arranged;

  PULSEINFER_HD void operator()(std::int64_t i, std::int64_t column) const {
    float* const of_head = arranged + i * shape.size() + column;
    float square = 0.0f;
    for (std::int64_t c = 0; c < shape.head_dim; ++c) {
      const float q = of_head[c * shape.padded()];
      square = detail::sum(square, detail::product(q, q));
    }
    of_head[std::int64_t{shape.head_dim} * shape.padded()] = detail::square_root(square);
  }
};
static_assert(std::is_trivially_copyable_v<measure_queries>);

/// Kernel body: scores two blocks, 2 * `word` and the next, of tile `i / kv_heads % tiles` of a row
/// for the columns of one KV head. On the CPU all blocks of the tile at once, see cpu_score.hpp.
struct score_blocks {
  static constexpr std::int64_t blocks_at_once = 2;

  digest_view digest;
  query_columns shape;
  const float* queries;          ///< arranged
  const std::int32_t* requests;  ///< [rows]
  const std::int32_t* full;      ///< [rows] blocks from here on are not scored
  std::int64_t tiles;            ///< tiles a row, at most
  std::int32_t piece;            ///< columns of a piece; divides the columns
  float scale;
  /// Of each piece the largest score and the sum of all, [rows, kv_heads, pieces, stride]. A NaN
  /// among the scores stays. `total` is null where it is not wanted.
  float* most;
  float* total;
  std::int64_t stride;  ///< a multiple of tile_blocks

  PULSEINFER_HD void operator()(std::int64_t i, std::int64_t word) const {
    switch (shape.at_once()) {
      case 1:
        return score<1>(i, word * blocks_at_once);
      case 4:
        return score<4>(i, word * blocks_at_once);
      default:
        return score<8>(i, word * blocks_at_once);
    }
  }

  // The same for all blocks of a tile, on a CPU.
  [[nodiscard]] std::int64_t words() const { return tile_blocks / blocks_at_once; }
  void whole_block(std::int64_t i) const {
    const place at = place_of(i, 0);
    if (at.first_block >= full[at.row]) return;
    const detail::score_function by = detail::best_score_function(digest.form, shape.padded());
    if (by == nullptr || at.tile == nullptr) {
      for (std::int64_t word = 0; word < words(); ++word) (*this)(i, word);
      return;
    }
    // What is likely to be next: the next head of the tile, or the tile after it.
    const bool is_last = at.kv_head + 1 == shape.kv_heads;
    const std::byte* const next =
        is_last ? digest.tile(requests[at.row], at.first_block + tile_blocks) : at.tile;
    const digest_form& form = digest.form;
    by({.part = at.tile + form.offset(0, at.kv_head),
        .upper = at.tile + form.offset(form.parts() - 1, at.kv_head),
        .next = next == nullptr ? nullptr : next + form.offset(0, is_last ? 0 : at.kv_head + 1),
        .scales = form.is_scaled() ? digest.factor_at(at.tile, 0, at.kv_head, 0) : nullptr,
        .upper_scales =
            form.is_scaled() ? digest.factor_at(at.tile, form.parts() - 1, at.kv_head, 0) : nullptr,
        .distances = form.kind == digest_kind::centre_distance
                         ? digest.factor_at(at.tile, form.factors() - 1, at.kv_head, 0)
                         : nullptr,
        .queries = at.queries,
        .head_dim = shape.head_dim,
        .columns = shape.columns(),
        .padded = shape.padded(),
        .piece = piece,
        .scale = scale,
        .most = most + at.out,
        .total = total == nullptr ? nullptr : total + at.out,
        .stride = stride});
  }

 private:
  struct place {
    std::int64_t row;
    std::int64_t kv_head;
    std::int64_t first_block;
    std::byte* tile;
    const float* queries;
    std::int64_t out;  ///< of the first piece
  };
  [[nodiscard]] PULSEINFER_HD place place_of(std::int64_t i, std::int64_t unit) const {
    place at;
    at.kv_head = i % shape.kv_heads;
    at.row = i / shape.kv_heads / tiles;
    at.first_block = i / shape.kv_heads % tiles * tile_blocks;
    at.tile = digest.tile(requests[at.row], at.first_block);
    const std::int64_t kv_row = at.row * shape.kv_heads + at.kv_head;
    at.queries = queries + kv_row * shape.size();
    at.out = kv_row * (shape.columns() / piece) * stride + at.first_block + unit;
    return at;
  }

  template <int AtOnce>
  PULSEINFER_HD void score(std::int64_t i, std::int64_t unit) const {
    const place at = place_of(i, unit);
    if (at.first_block + unit >= full[at.row]) return;
    float largest[blocks_at_once] = {};
    float all[blocks_at_once] = {};
    std::int32_t within = 0;  // columns of the piece so far
    std::int64_t out = at.out;
    for (std::int32_t column = 0; column < shape.columns(); column += AtOnce) {
      float value[AtOnce][blocks_at_once];
      score_columns<AtOnce>(at, unit, column, value);
      for (std::int32_t c = 0; c < AtOnce; ++c) {
        if (column + c >= shape.columns()) continue;  // (a break would keep it from unrolling)
        for (int b = 0; b < blocks_at_once; ++b) {
          const float v = value[c][b];
          // A NaN, wherever it comes, stays: no comparison with one holds.
          const bool takes = within == 0 || v > largest[b] || v != v;
          largest[b] = takes ? v : largest[b];
          all[b] = within == 0 ? v : detail::sum(all[b], v);
        }
        if (++within < piece) continue;
        within = 0;
        store(most + out, largest);
        if (total != nullptr) store(total + out, all);
        out += stride;
      }
    }
  }

  struct alignas(8) two_floats {
    float number[blocks_at_once];
  };
  PULSEINFER_HD static void store(float* at, const float (&value)[blocks_at_once]) {
    *reinterpret_cast<two_floats*>(at) = {{value[0], value[1]}};
  }

  /// The elements of two blocks beside each other, by one load.
  PULSEINFER_HD void load(const std::byte* at, float (&out)[blocks_at_once]) const {
    switch (digest.form.element) {
      case element_type::f32: {
        const two_floats both = *reinterpret_cast<const two_floats*>(at);
        out[0] = both.number[0];
        out[1] = both.number[1];
        return;
      }
      case element_type::f16: {
        const std::uint32_t both = *reinterpret_cast<const std::uint32_t*>(at);
        out[0] = float_from_f16(static_cast<std::uint16_t>(both & 0xffffu));
        out[1] = float_from_f16(static_cast<std::uint16_t>(both >> 16));
        return;
      }
      case element_type::bf16: {
        const std::uint32_t both = *reinterpret_cast<const std::uint32_t*>(at);
        out[0] = detail::float_of(both << 16);
        out[1] = detail::float_of(both & 0xffff0000u);
        return;
      }
      case element_type::f8_e4m3: {
        const std::uint32_t both = *reinterpret_cast<const std::uint16_t*>(at);
        out[0] = float_from_f8_e4m3(static_cast<std::uint8_t>(both & 0xffu));
        out[1] = float_from_f8_e4m3(static_cast<std::uint8_t>(both >> 8));
        return;
      }
      default: {
        const std::uint32_t both = *reinterpret_cast<const std::uint16_t*>(at);
        out[0] = static_cast<float>(static_cast<std::int8_t>(both & 0xffu));
        out[1] = static_cast<float>(static_cast<std::int8_t>(both >> 8));
        return;
      }
    }
  }

  template <int AtOnce>
  PULSEINFER_HD void score_columns(const place& at, std::int64_t unit, std::int32_t column,
                                   float (&value)[AtOnce][blocks_at_once]) const {
    const digest_form& form = digest.form;
    // A block without a digest ranks last: NaN does.
    const float start = at.tile == nullptr ? detail::float_of(0x7fc00000u) : 0.0f;
    for (int c = 0; c < AtOnce; ++c) {
      for (int b = 0; b < blocks_at_once; ++b) value[c][b] = start;
    }
    if (at.tile == nullptr) return;
    const std::byte* part = digest.element_at(at.tile, 0, at.kv_head, 0, unit);
    const std::int64_t to_upper = (form.parts() - 1) * form.part_bytes();
    const bool is_scaled = form.is_scaled();
    float scales[2][blocks_at_once] = {};
    for (std::int64_t p = 0; is_scaled && p < form.parts(); ++p) {
      const float* const of_part = digest.factor_at(at.tile, p, at.kv_head, unit);
      for (int b = 0; b < blocks_at_once; ++b) scales[p][b] = of_part[b];
    }
    const float* q_line = at.queries + column;
    for (std::int32_t channel = 0; channel < shape.head_dim; ++channel) {
      float low[blocks_at_once];
      float high[blocks_at_once] = {};
      load(part, low);
      if (to_upper != 0) load(part + to_upper, high);
      if (is_scaled) {
        for (int b = 0; b < blocks_at_once; ++b) {
          low[b] = detail::product(low[b], scales[0][b]);
          if (to_upper != 0) high[b] = detail::product(high[b], scales[1][b]);
        }
      }
      float q[AtOnce];
      load_queries<AtOnce>(q_line, q);
      for (int c = 0; c < AtOnce; ++c) {
        const bool takes_upper = to_upper != 0 && !(q[c] < 0.0f);
        for (int b = 0; b < blocks_at_once; ++b) {
          const float d = takes_upper ? high[b] : low[b];
          value[c][b] = detail::sum(value[c][b], detail::product(q[c], d));
        }
      }
      part += form.channel_bytes();
      q_line += shape.padded();
    }
    const bool has_distance = form.kind == digest_kind::centre_distance;
    const float* const distances =
        has_distance ? digest.factor_at(at.tile, form.factors() - 1, at.kv_head, unit) : nullptr;
    for (int c = 0; c < AtOnce; ++c) {
      for (int b = 0; b < blocks_at_once; ++b) {
        if (has_distance) {
          // q_line is that of the lengths now.
          value[c][b] = detail::sum(value[c][b], detail::product(q_line[c], distances[b]));
        }
        value[c][b] = detail::product(value[c][b], scale);
      }
    }
  }

  struct alignas(16) four_floats {
    float number[4];
  };
  /// By loads of 16 bytes where there are so many.
  template <int AtOnce>
  PULSEINFER_HD static void load_queries(const float* at, float (&q)[AtOnce]) {
    if constexpr (AtOnce < 4) {
      for (int c = 0; c < AtOnce; ++c) q[c] = at[c];
    } else {
      for (int c = 0; c < AtOnce; c += 4) {
        const four_floats four = *reinterpret_cast<const four_floats*>(at + c);
        for (int k = 0; k < 4; ++k) q[c + k] = four.number[k];
      }
    }
  }
};
static_assert(std::is_trivially_copyable_v<score_blocks>);

}  // namespace pulseinfer
