// SPDX-License-Identifier: Apache-2.0
/// @file
/// Scores of single tiles against double precision, and by vectors against the plain body.
#include "pulseinfer/score.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/far_array.hpp"

namespace {

using pulseinfer::digest_form;
using pulseinfer::digest_kind;
using pulseinfer::element_type;
using pulseinfer::query_columns;
using pulseinfer::tile_blocks;

constexpr digest_kind kinds[] = {digest_kind::mean, digest_kind::min_max,
                                 digest_kind::centre_distance};
constexpr element_type elements[] = {element_type::f32, element_type::f16, element_type::bf16,
                                     element_type::f8_e4m3, element_type::i8};
constexpr std::int64_t tiles = 2;
constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

float draw_float(pulseinfer::detail::random_source& draw) {
  return (static_cast<float>(draw.below(1 << 20)) - 524288.0f) * 0x1p-18f;
}

/// Two rows over the tiles of one request each, random digests and queries.
struct scene {
  scene(const digest_form& f, std::int32_t heads, std::int32_t tokens, bool adversarial)
      : form(f),
        shape{f.kv_heads, f.head_dim, heads, tokens},
        memory(static_cast<std::size_t>(3 * f.tile_bytes())),
        raw(static_cast<std::size_t>(2 * tokens * heads * f.kv_heads * f.head_dim)),
        arranged(static_cast<std::size_t>(2 * f.kv_heads * shape.size()) + 4) {
    pulseinfer::detail::random_source draw(static_cast<std::uint64_t>(heads * 100 + tokens));
    const float specials[] = {0.0f, -0.0f, inf, -inf, not_a_number, 0x1p-149f, 3e38f, -3e38f};
    const auto number = [&] {
      return adversarial && draw.below(6) == 0 ? specials[draw.below(8)] : draw_float(draw);
    };
    for (std::int64_t tile = 0; tile < 3; ++tile) {
      std::byte* const at = memory.data() + tile * form.tile_bytes();
      for (std::int64_t head = 0; head < form.kv_heads; ++head) {
        for (std::int64_t unit = 0; unit < tile_blocks; ++unit) {
          for (std::int64_t part = 0; part < form.parts(); ++part) {
            for (std::int64_t c = 0; c < form.head_dim; ++c) {
              const float value = number() * (form.is_scaled() ? 30.0f : 1.0f);
              pulseinfer::store_element(view().element_at(at, part, head, c, unit), form.element,
                                        value);
            }
          }
          for (std::int64_t factor = 0; factor < form.factors(); ++factor) {
            *view().factor_at(at, factor, head, unit) = number();
          }
        }
      }
    }
    for (float& q : raw) q = number();
    const pulseinfer::arrange_queries arrange{
        .queries = {raw.data(), element_type::f32, tokens}, .shape = shape, .arranged = aligned()};
    const pulseinfer::measure_queries measure{shape, aligned()};
    for (std::int64_t i = 0; i < 2 * std::int64_t{form.kv_heads} * shape.padded(); ++i) {
      for (std::int64_t c = 0; c < form.head_dim; ++c) arrange(i, c);
    }
    for (std::int64_t i = 0; i < 2 * form.kv_heads; ++i) {
      for (std::int64_t c = 0; c < shape.padded(); ++c) measure(i, c);
    }
  }

  /// Loads of 16 bytes are aligned, as they are in device memory.
  float* aligned() {
    const auto past = reinterpret_cast<std::uintptr_t>(arranged.data()) % 16;
    return arranged.data() + (16 - past) % 16 / sizeof(float);
  }
  pulseinfer::digest_view view() {
    return {.form = form, .tiles = memory.data(), .tile_of = table, .tiles_per_request = tiles};
  }
  std::size_t out_size(std::int32_t piece) const {
    return static_cast<std::size_t>(2 * form.kv_heads * shape.columns() / piece * tiles *
                                    tile_blocks);
  }
  pulseinfer::score_blocks body(std::int32_t piece, std::vector<float>& most,
                                std::vector<float>* total) {
    return {.digest = view(),
            .shape = shape,
            .queries = aligned(),
            .requests = requests,
            .full = full,
            .tiles = tiles,
            .piece = piece,
            .scale = 0.3f,
            .most = most.data(),
            .total = total == nullptr ? nullptr : total->data(),
            .stride = tiles * tile_blocks};
  }
  float query(std::int64_t row, std::int64_t kv_head, std::int64_t column, std::int64_t c) const {
    const std::int64_t head = kv_head * shape.heads + column / shape.tokens;
    const std::int64_t token = row * shape.tokens + column % shape.tokens;
    return raw[static_cast<std::size_t>(
        (token * shape.kv_heads * shape.heads + head) * form.head_dim + c)];
  }

  digest_form form;
  query_columns shape;
  std::vector<std::byte> memory;
  std::vector<float> raw;  ///< [rows, tokens, query heads, head_dim]
  std::vector<float> arranged;
  std::int32_t table[4] = {2, 0, 1, -1};  ///< request 1 has one tile
  std::int32_t requests[2] = {1, 0};
  std::int32_t full[2] = {128, 100};
};

/// What the score of a block is, in double precision.
double exact_score(scene& s, std::int64_t row, std::int64_t kv_head, std::int64_t column,
                   std::int64_t block) {
  const pulseinfer::digest_view view = s.view();
  std::byte* const tile = view.tile(s.requests[row], block);
  const std::int64_t unit = block % tile_blocks;
  double score = 0;
  double square = 0;
  for (std::int64_t c = 0; c < s.form.head_dim; ++c) {
    const double q = s.query(row, kv_head, column, c);
    const double first = view.value(tile, 0, kv_head, c, unit);
    square += q * q;
    if (s.form.kind == digest_kind::min_max) {
      score += q * (q < 0 ? first : static_cast<double>(view.value(tile, 1, kv_head, c, unit)));
    } else {
      score += q * first;
    }
  }
  if (s.form.kind == digest_kind::centre_distance) {
    score += std::sqrt(square) *
             static_cast<double>(*view.factor_at(tile, s.form.factors() - 1, kv_head, unit));
  }
  return score * static_cast<double>(0.3f);
}

}  // namespace

TEST_CASE("score: every column of every head, in the order that is promised") {
  constexpr std::int32_t dim = 11;
  for (const digest_kind kind : kinds) {
    for (const element_type element : elements) {
      for (const std::int32_t heads : {1, 3, 16}) {
        for (const std::int32_t tokens : {1, 2}) {
          CAPTURE(static_cast<int>(kind));
          CAPTURE(static_cast<int>(element));
          CAPTURE(heads);
          scene s({.kind = kind, .element = element, .kv_heads = 2, .head_dim = dim}, heads, tokens,
                  false);
          std::vector<float> found(s.out_size(1), 7.0f);
          const auto body = s.body(1, found, nullptr);
          for (std::int64_t i = 0; i < 2 * tiles * 2; ++i) {
            for (std::int64_t word = 0; word < body.words(); ++word) body(i, word);
          }
          const std::int32_t columns = heads * tokens;
          double worst = 0;
          int unexpected = 0;
          for (std::int64_t row = 0; row < 2; ++row) {
            for (std::int64_t column = 0; column < 2 * columns; ++column) {
              for (std::int64_t block = 0; block < tiles * tile_blocks; ++block) {
                const float score = found[static_cast<std::size_t>(
                    (row * 2 * columns + column) * tiles * tile_blocks + block)];
                if (block >= s.full[row]) {
                  unexpected += score != 7.0f;  // not touched
                } else if (row == 0 && block >= tile_blocks) {
                  unexpected += !std::isnan(score);  // no digest
                } else {
                  const double exact =
                      exact_score(s, row, column / columns, column % columns, block);
                  worst = std::max(worst, std::abs(static_cast<double>(score) - exact));
                }
              }
            }
          }
          CHECK(unexpected == 0);
          CHECK(worst < (s.form.is_scaled() ? 2e-3 : 2e-5));
        }
      }
    }
  }
}

TEST_CASE("score: vectors give the bits of the plain body, pieces the largest and the sum") {
  for (const digest_kind kind : kinds) {
    for (const element_type element : elements) {
      for (const bool adversarial : {false, true}) {
        for (const std::int32_t columns : {1, 2, 4, 6, 8, 24}) {
          for (const std::int32_t piece : {columns, columns % 2 == 0 ? columns / 2 : columns, 1}) {
            CAPTURE(static_cast<int>(kind));
            CAPTURE(static_cast<int>(element));
            CAPTURE(columns);
            CAPTURE(piece);
            scene s({.kind = kind, .element = element, .kv_heads = 2, .head_dim = 9}, columns, 1,
                    adversarial);
            std::vector<float> plain(s.out_size(piece)), plain_total(s.out_size(piece));
            std::vector<float> whole(s.out_size(piece)), whole_total(s.out_size(piece));
            const auto by_block = s.body(piece, plain, &plain_total);
            const auto by_tile = s.body(piece, whole, &whole_total);
            for (std::int64_t i = 0; i < 2 * tiles * 2; ++i) {
              for (std::int64_t word = 0; word < by_block.words(); ++word) by_block(i, word);
              by_tile.whole_block(i);
            }
            // Which NaN it is, is no machine's promise; blocks beyond the full ones are anything.
            int wrong = 0;
            for (std::size_t i = 0; i < plain.size(); ++i) {
              const std::size_t block = i % (tiles * tile_blocks);
              const std::size_t row = i / (plain.size() / 2);
              if (block >= static_cast<std::size_t>(s.full[row])) continue;
              const auto same = [](float a, float b) {
                return std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b) ||
                       (std::isnan(a) && std::isnan(b));
              };
              wrong += !same(plain[i], whole[i]) + !same(plain_total[i], whole_total[i]);
            }
            CHECK(wrong == 0);
            if (piece == 1) continue;
            std::vector<float> each(s.out_size(1));
            const auto apart = s.body(1, each, nullptr);
            for (std::int64_t i = 0; i < 2 * tiles * 2; ++i) {
              for (std::int64_t word = 0; word < apart.words(); ++word) apart(i, word);
            }
            for (std::size_t p = 0; p < plain.size() / (tiles * tile_blocks); ++p) {
              float most = 0;
              float total = 0;
              bool has_nan = false;
              const std::size_t block = p % 64;
              for (std::int32_t c = 0; c < piece; ++c) {
                const float score =
                    each[(p * static_cast<std::size_t>(piece) + static_cast<std::size_t>(c)) *
                             (tiles * tile_blocks) +
                         block];
                has_nan = has_nan || std::isnan(score);
                most = c == 0 ? score : std::max(most, score);
                total = c == 0 ? score : total + score;
              }
              const std::size_t at = p * (tiles * tile_blocks) + block;
              CHECK((has_nan ? std::isnan(plain[at]) : plain[at] == most));
              CHECK((std::isnan(total) ? std::isnan(plain_total[at]) : plain_total[at] == total));
            }
          }
        }
      }
    }
  }
}

TEST_CASE("score: queries of every element are arranged, columns filled up with zeros") {
  const std::vector<float> f32 = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  for (const element_type element : {element_type::f32, element_type::f16, element_type::bf16}) {
    std::vector<std::uint32_t> stored(f32.size());
    for (std::size_t i = 0; i < f32.size(); ++i) {
      pulseinfer::store_element(
          reinterpret_cast<std::byte*>(stored.data()) +
              static_cast<std::int64_t>(i) * pulseinfer::element_bytes(element),
          element, f32[i]);
    }
    // One row, two tokens, two KV heads with one query head and three channels each.
    const query_columns shape{.kv_heads = 2, .head_dim = 3, .heads = 1, .tokens = 2};
    CHECK(shape.padded() == 4);
    std::vector<float> arranged(static_cast<std::size_t>(2 * shape.size()), -1.0f);
    const pulseinfer::arrange_queries arrange{{stored.data(), element, 2}, shape, arranged.data()};
    for (std::int64_t i = 0; i < 2 * 4; ++i) {
      for (std::int64_t c = 0; c < arrange.words(); ++c) arrange(i, c);
    }
    std::vector<float> at_once(arranged.size(), -1.0f);
    const pulseinfer::arrange_queries by_column{{stored.data(), element, 2}, shape, at_once.data()};
    for (std::int64_t i = 0; i < 2 * 4; ++i) by_column.whole_block(i);
    CHECK(at_once == arranged);
    const pulseinfer::measure_queries measure{shape, arranged.data()};
    for (std::int64_t i = 0; i < 2; ++i) {
      for (std::int64_t c = 0; c < 4; ++c) measure(i, c);
    }
    const float of_first = std::sqrt(14.0f);
    const std::vector<float> first = {1, 7, 0, 0, 2, 8, 0, 0, 3, 9, 0, 0};
    CHECK(std::equal(first.begin(), first.end(), arranged.begin()));
    CHECK(arranged[12] == doctest::Approx(of_first));
    CHECK(arranged[14] == 0.0f);
    CHECK(arranged[16] == 4.0f);
    CHECK(arranged[17] == 10.0f);
  }
  static_assert(query_columns{1, 1, 1, 1}.padded() == 1);
  static_assert(query_columns{1, 1, 8, 1}.padded() == 8);
  static_assert(query_columns{1, 1, 3, 3}.padded() == 16);
}

TEST_CASE("fault 51: queries and scores beyond 2^31 are found") {
  // One head of one channel, so that a row of the last one lies far behind the first.
  constexpr std::int64_t row = test::far_row;
  constexpr std::int64_t far = test::far_row * test::far_stride;
  const digest_form form{
      .kind = digest_kind::mean, .element = element_type::f32, .kv_heads = 1, .head_dim = 1};
  std::vector<std::byte> tile(static_cast<std::size_t>(form.tile_bytes()));
  std::vector<std::int32_t> table{0}, requests(row + 1, 0), full(row + 1, 0);
  full[row] = 9;
  std::vector<float> arranged(static_cast<std::size_t>(2 * (row + 1)));
  const pulseinfer::digest_view view{
      .form = form, .tiles = tile.data(), .tile_of = table.data(), .tiles_per_request = 1};
  for (std::int64_t unit = 0; unit < 9; ++unit) {
    pulseinfer::store_element(view.element_at(tile.data(), 0, 0, 0, unit), form.element,
                              static_cast<float>(unit));
  }
  arranged[static_cast<std::size_t>(2 * row)] = 3.0f;
  test::far_array<float> most(far + tile_blocks, far);
  const pulseinfer::score_blocks score{.digest = view,
                                       .shape = {1, 1, 1, 1},
                                       .queries = arranged.data(),
                                       .requests = requests.data(),
                                       .full = full.data(),
                                       .tiles = 1,
                                       .piece = 1,
                                       .scale = 1.0f,
                                       .most = most.data(),
                                       .total = nullptr,
                                       .stride = test::far_stride};
  score(row, 2);
  CHECK(most.data()[far + 4] == 12.0f);
  CHECK(most.data()[far + 5] == 15.0f);
  score.whole_block(row);
  CHECK(most.data()[far + 8] == 24.0f);

  // Rows of 64 heads of 128 channels.
  constexpr query_columns many{.kv_heads = 8, .head_dim = 128, .heads = 8, .tokens = 1};
  constexpr std::int64_t last = (std::int64_t{1} << 31) / (64 * 128) + 1;
  constexpr std::int64_t from = last * 64 * 128;
  constexpr std::int64_t to = last * 8 * many.size();
  test::far_array<float> queries(from + 64 * 128, from), out(to + 8 * many.size(), to);
  queries.data()[from + 9 * 128 + 5] = 7.0f;  // channel 5 of head 9, the second of KV head 1
  const pulseinfer::arrange_queries arrange{
      .queries = {queries.data(), element_type::f32, 1}, .shape = many, .arranged = out.data()};
  const std::int64_t column = (last * 8 + 1) * many.padded() + 1;
  const std::int64_t at = to + many.size() + 5 * many.padded() + 1;
  arrange(column, 5);
  CHECK(out.data()[at] == 7.0f);
  out.data()[at] = 0.0f;
  arrange.whole_block(column);
  CHECK(out.data()[at] == 7.0f);
  const pulseinfer::measure_queries measure{many, out.data()};
  measure(last * 8 + 1, 1);
  CHECK(out.data()[to + many.size() + 128 * many.padded() + 1] == 7.0f);
}
