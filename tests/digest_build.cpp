// SPDX-License-Identifier: Apache-2.0
/// @file
/// Digests of single blocks against the definition, and for groups of any size.
#include "pulseinfer/digest_build.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/page_table.hpp"
#include "support/lanes.hpp"

namespace {

using pulseinfer::digest_form;
using pulseinfer::digest_kind;
using pulseinfer::element_type;

constexpr digest_kind kinds[] = {digest_kind::mean, digest_kind::min_max,
                                 digest_kind::centre_distance};
constexpr element_type elements[] = {element_type::f32, element_type::f16, element_type::bf16,
                                     element_type::f8_e4m3, element_type::i8};
constexpr std::int32_t dim = 5;
constexpr std::int32_t heads = 2;
constexpr std::int32_t block_tokens = 6;
constexpr std::int64_t blocks = 3;

/// Blocks of FP32 keys, block b on page b, and one tile for their digests.
struct bench {
  explicit bench(digest_kind kind, element_type element, std::uint64_t seed = 1)
      : form{.kind = kind, .element = element, .kv_heads = heads, .head_dim = dim},
        keys(static_cast<std::size_t>(blocks * block_tokens * heads * dim)),
        tile(static_cast<std::size_t>(form.tile_bytes())) {
    pulseinfer::detail::random_source draw(seed);
    for (float& key : keys) key = (static_cast<float>(draw.below(1 << 16)) - 32768.0f) * 0x1p-14f;
  }

  float& key(std::int64_t block, std::int64_t token, std::int64_t head, std::int64_t c) {
    return keys[static_cast<std::size_t>(((block * block_tokens + token) * heads + head) * dim +
                                         c)];
  }
  pulseinfer::digest_view view() {
    return {.form = form, .tiles = tile.data(), .tile_of = &first, .tiles_per_request = 1};
  }
  pulseinfer::detail::block_digester digester() {
    constexpr std::int64_t of_head = dim * std::int64_t{sizeof(float)};
    pulseinfer::plane_reader reader;
    reader.at.page_stride = block_tokens * heads * of_head;
    reader.at.token_stride = heads * of_head;
    reader.at.head_stride = of_head;
    reader.at.channel_stride = sizeof(float);
    reader.element = element_type::f32;
    reader.memory = reinterpret_cast<const std::byte*>(keys.data());
    return {.digest = view(), .keys = reader, .scales = {}};
  }
  pulseinfer::digest_blocks<pulseinfer::block_table> body() {
    return {.digester = digester(),
            .table = {pages, 1, blocks},
            .request = 0,
            .first_block = 0,
            .block_tokens = block_tokens};
  }
  void build() {
    for (std::int64_t row = 0; row < blocks * heads; ++row) {
      body()(row, pulseinfer::detail::single_lane{});
    }
  }
  float value(std::int64_t block, std::int64_t part, std::int64_t head, std::int64_t c) {
    return view().value(tile.data(), part, head, c, block);
  }
  float factor(std::int64_t block, std::int64_t factor, std::int64_t head) {
    return *view().factor_at(tile.data(), factor, head, block);
  }

  digest_form form;
  std::vector<float> keys;
  std::vector<std::byte> tile;
  std::int32_t first = 0;
  std::int32_t pages[blocks] = {0, 1, 2};
};

/// Half a step of an element near a value, in double precision.
double tolerance(element_type element, double value, double largest) {
  switch (element) {
    case element_type::f16:
      return std::abs(value) * 0x1p-11 + 0x1p-25;
    case element_type::bf16:
      return std::abs(value) * 0x1p-8;
    case element_type::f8_e4m3:
      return std::abs(value) * 0x1p-4 + largest / 448 * 0x1p-10;
    case element_type::i8:
      return largest / 127 / 2;
    default:
      return 0;
  }
}

}  // namespace

TEST_CASE("digest build: every kind and element is within half a step of the exact digest") {
  for (const digest_kind kind : kinds) {
    for (const element_type element : elements) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(static_cast<int>(element));
      bench b(kind, element);
      b.build();
      for (std::int64_t block = 0; block < blocks; ++block) {
        for (std::int64_t head = 0; head < heads; ++head) {
          double exact[2][dim];
          double largest[2] = {0, 0};
          for (std::int64_t c = 0; c < dim; ++c) {
            double total = 0;
            double least = std::numeric_limits<double>::infinity();
            double most = -least;
            for (std::int64_t token = 0; token < block_tokens; ++token) {
              const double key = b.key(block, token, head, c);
              total += key;
              least = std::min(least, key);
              most = std::max(most, key);
            }
            exact[0][c] = kind == digest_kind::min_max ? least : total / block_tokens;
            exact[1][c] = most;
            for (int part = 0; part < 2; ++part) {
              largest[part] = std::max(largest[part], std::abs(exact[part][c]));
            }
          }
          for (int part = 0; part < static_cast<int>(b.form.parts()); ++part) {
            double found_most = 0;
            for (std::int64_t c = 0; c < dim; ++c) {
              const double found = b.value(block, part, head, c);
              const double allowed = tolerance(element, exact[part][c], largest[part]);
              CHECK(std::abs(found - exact[part][c]) <= allowed + largest[part] * 1e-6);
              found_most = std::max(found_most, std::abs(found));
            }
            if (b.form.is_scaled()) {
              // The largest one is as large as the element can say.
              CHECK(found_most == doctest::Approx(largest[part]).epsilon(1e-6));
              CHECK(b.factor(block, part, head) ==
                    doctest::Approx(largest[part] / (element == element_type::i8 ? 127 : 448)));
            }
          }
          if (kind != digest_kind::centre_distance) continue;
          double total = 0;
          for (std::int64_t token = 0; token < block_tokens; ++token) {
            double square = 0;
            for (std::int64_t c = 0; c < dim; ++c) {
              const double apart = static_cast<double>(b.key(block, token, head, c)) -
                                   static_cast<double>(b.value(block, 0, head, c));
              square += apart * apart;
            }
            total += std::sqrt(square);
          }
          CHECK(b.factor(block, b.form.factors() - 1, head) ==
                doctest::Approx(total / block_tokens).epsilon(1e-5));
        }
      }
    }
  }
}

TEST_CASE("digest build: the result does not depend on the size of the group") {
  for (const digest_kind kind : kinds) {
    for (const element_type element : {element_type::f16, element_type::i8}) {
      bench alone(kind, element);
      alone.build();
      for (const int lanes : {2, 4, 7}) {
        bench together(kind, element);
        test::run_rows(blocks * heads, lanes, together.body());
        CHECK(together.tile == alone.tile);
      }
    }
  }
}

TEST_CASE("digest build: zeros, NaN and infinities") {
  for (const digest_kind kind : kinds) {
    for (const element_type element : elements) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(static_cast<int>(element));
      bench b(kind, element);
      for (std::int64_t token = 0; token < block_tokens; ++token) {
        for (std::int64_t c = 0; c < dim; ++c) b.key(0, token, 1, c) = 0.0f;
      }
      b.key(1, 3, 0, 2) = std::numeric_limits<float>::quiet_NaN();
      b.key(2, 5, 1, 4) = std::numeric_limits<float>::infinity();
      b.build();
      for (std::int64_t c = 0; c < dim; ++c) {
        CHECK(b.value(0, 0, 1, c) == 0.0f);
        // One scale for all channels: a NaN or an infinity takes the others with it.
        CHECK(std::isnan(b.value(1, 0, 0, c)) == (c == 2 || b.form.is_scaled()));
        CHECK(!std::isnan(b.value(1, 0, 1, c)));
        const std::int64_t upper = b.form.parts() - 1;
        if (b.form.is_scaled()) {
          CHECK(std::isnan(b.value(2, upper, 1, c)));
        } else {
          CHECK(std::isinf(b.value(2, upper, 1, c)) == (c == 4));
        }
      }
      if (kind == digest_kind::centre_distance) {
        CHECK(b.factor(0, b.form.factors() - 1, 1) == 0.0f);
        CHECK(std::isnan(b.factor(1, b.form.factors() - 1, 0)));
        CHECK(!std::isnan(b.factor(1, b.form.factors() - 1, 1)));
      }
    }
  }
}

TEST_CASE("digest build: a token at a time ends as all at once, block after block") {
  for (const digest_kind kind : kinds) {
    for (const element_type element : elements) {
      bench whole(kind, element);
      whole.build();
      for (const std::int64_t step : {1, 4, 13}) {
        CAPTURE(step);
        bench grown(kind, element);
        const std::int32_t request = 0;
        for (std::int32_t tokens = 0; tokens < blocks * block_tokens;) {
          const auto fresh = std::min<std::int64_t>(step, blocks * block_tokens - tokens);
          tokens += static_cast<std::int32_t>(fresh);
          const std::int64_t touched = (step + block_tokens - 2) / block_tokens + 1;
          const pulseinfer::digest_appended<pulseinfer::block_table> body{
              .digester = grown.digester(),
              .table = {grown.pages, 1, blocks},
              .requests = &request,
              .tokens = &tokens,
              .new_tokens = step,
              .blocks = touched,
              .block_tokens = block_tokens};
          for (std::int64_t row = 0; row < touched * heads; ++row) {
            body(row, pulseinfer::detail::single_lane{});
          }
          // The block being filled is digested of the tokens it has.
          const std::int64_t last = (tokens - 1) / block_tokens;
          float total = 0.0f;
          float most = -std::numeric_limits<float>::infinity();
          for (std::int64_t token = 0; token < tokens - last * block_tokens; ++token) {
            total += grown.key(last, token, 1, 3);
            most = std::max(most, grown.key(last, token, 1, 3));
          }
          if (element != element_type::f32) continue;
          if (kind == digest_kind::min_max) {
            CHECK(grown.value(last, 1, 1, 3) == most);
          } else {
            CHECK(grown.value(last, 0, 1, 3) ==
                  doctest::Approx(total / static_cast<float>(tokens - last * block_tokens)));
          }
        }
        CHECK(grown.tile == whole.tile);
      }
    }
  }
}
