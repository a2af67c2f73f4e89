// SPDX-License-Identifier: Apache-2.0
/// @file
/// Where the elements and factors of a tile lie, and what digests cost.
#include "pulseinfer/digest_tile.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <vector>

#include "support/far_array.hpp"

namespace {

using pulseinfer::digest_bytes_per_token;
using pulseinfer::digest_form;
using pulseinfer::digest_kind;
using pulseinfer::element_type;

constexpr digest_form llama(digest_kind kind, element_type element) {
  return {.kind = kind, .element = element, .kv_heads = 8, .head_dim = 128};
}

// Of 16 tokens of 8 heads x 128 channels, for each layer; the keys themselves are 2,048 in FP16.
static_assert(digest_bytes_per_token(llama(digest_kind::mean, element_type::f32), 16) == 256);
static_assert(digest_bytes_per_token(llama(digest_kind::mean, element_type::f16), 16) == 128);
static_assert(digest_bytes_per_token(llama(digest_kind::min_max, element_type::bf16), 16) == 256);
static_assert(digest_bytes_per_token(llama(digest_kind::mean, element_type::i8), 16) == 66);
static_assert(digest_bytes_per_token(llama(digest_kind::min_max, element_type::f8_e4m3), 16) ==
              132);
static_assert(digest_bytes_per_token(llama(digest_kind::centre_distance, element_type::f16), 16) ==
              130);
static_assert(digest_bytes_per_token(llama(digest_kind::centre_distance, element_type::i8), 32) ==
              34);
static_assert(llama(digest_kind::mean, element_type::f16).tile_bytes() == 8 * 128 * 64 * 2);

constexpr digest_kind kinds[] = {digest_kind::mean, digest_kind::min_max,
                                 digest_kind::centre_distance};
constexpr element_type elements[] = {element_type::f32, element_type::f16, element_type::bf16,
                                     element_type::f8_e4m3, element_type::i8};

}  // namespace

TEST_CASE("digest tile: elements and factors fill a tile, none shares a byte with another") {
  for (const digest_kind kind : kinds) {
    for (const element_type element : elements) {
      const digest_form form{.kind = kind, .element = element, .kv_heads = 2, .head_dim = 3};
      CHECK(form.factors() ==
            (form.is_scaled() ? form.parts() : 0) + (kind == digest_kind::centre_distance ? 1 : 0));
      std::vector<std::byte> memory(static_cast<std::size_t>(form.tile_bytes()));
      const pulseinfer::digest_view view{.form = form, .tiles = memory.data()};
      std::set<const std::byte*> bytes;
      const auto take = [&](const void* at, std::int64_t size) {
        for (std::int64_t i = 0; i < size; ++i) {
          const auto* const byte = static_cast<const std::byte*>(at) + i;
          CHECK(bytes.insert(byte).second);
          CHECK(byte >= memory.data());
          CHECK(byte < memory.data() + memory.size());
        }
      };
      for (std::int64_t head = 0; head < 2; ++head) {
        for (std::int64_t unit = 0; unit < pulseinfer::tile_blocks; ++unit) {
          for (std::int64_t part = 0; part < form.parts(); ++part) {
            for (std::int64_t c = 0; c < 3; ++c) {
              take(view.element_at(memory.data(), part, head, c, unit),
                   pulseinfer::element_bytes(element));
            }
          }
          for (std::int64_t factor = 0; factor < form.factors(); ++factor) {
            take(view.factor_at(memory.data(), factor, head, unit), sizeof(float));
          }
        }
      }
      CHECK(bytes.size() == memory.size());
    }
  }
}

TEST_CASE("digest tile: blocks beside each other are elements beside each other") {
  const digest_form form = llama(digest_kind::min_max, element_type::f16);
  std::vector<std::byte> memory(static_cast<std::size_t>(form.tile_bytes()));
  std::byte* const tile = memory.data();
  const pulseinfer::digest_view view{.form = form, .tiles = tile};
  CHECK(view.element_at(tile, 1, 3, 5, 8) - view.element_at(tile, 1, 3, 5, 7) == 2);
  CHECK(view.element_at(tile, 1, 3, 5, 7) - view.element_at(tile, 1, 3, 4, 7) == 128);
}

TEST_CASE("digest tile: a view finds tiles where there are any, and reads what they stand for") {
  const digest_form form{
      .kind = digest_kind::mean, .element = element_type::i8, .kv_heads = 1, .head_dim = 2};
  std::vector<std::byte> memory(static_cast<std::size_t>(3 * form.tile_bytes()));
  const std::int32_t table[] = {-1, 2, 0, -1};
  const pulseinfer::digest_view view{
      .form = form, .tiles = memory.data(), .tile_of = table, .tiles_per_request = 2};
  CHECK(view.tile(0, 63) == nullptr);
  CHECK(view.tile(0, 64) == memory.data() + 2 * form.tile_bytes());
  CHECK(view.tile(1, 0) == memory.data());
  CHECK(view.tile(1, 64) == nullptr);
  CHECK(view.tile(1, 128) == nullptr);  // beyond what a request may have
  const pulseinfer::digest_view behind{
      .form = form, .tiles = memory.data(), .tile_of = table + 2, .tiles_per_request = 2};
  CHECK(behind.tile(0, 0) == memory.data());
  CHECK(behind.tile(-1, 64) == nullptr);  // a row that is not in use
  std::byte* const tile = view.tile(0, 70);
  *view.element_at(tile, 0, 0, 1, 6) = std::byte{0xfd};  // -3
  *view.factor_at(tile, 0, 0, 6) = 0.5f;
  CHECK(view.value(tile, 0, 0, 1, 6) == -1.5f);
}

TEST_CASE("digest tile: what makes no form is refused") {
  const digest_form fine = llama(digest_kind::mean, element_type::f16);
  CHECK(pulseinfer::checked(fine) == fine);
  const auto refused = [&](auto change) {
    digest_form form = fine;
    change(form);
    CHECK_THROWS_AS((void)pulseinfer::checked(form), std::invalid_argument);
  };
  refused([](digest_form& f) { f.kind = static_cast<digest_kind>(3); });
  refused([](digest_form& f) { f.element = element_type::f8_e5m2; });
  refused([](digest_form& f) { f.element = static_cast<element_type>(77); });
  refused([](digest_form& f) { f.kv_heads = 0; });
  refused([](digest_form& f) { f.head_dim = 0; });
  refused([](digest_form& f) { f.head_dim = pulseinfer::max_extent + 1; });
}

TEST_CASE("fault 51: tiles, and entries of their table, beyond 2^31 are found") {
  constexpr digest_form form = llama(digest_kind::min_max, element_type::f32);
  constexpr std::int32_t tile = 5'000;
  constexpr std::int64_t begin = tile * form.tile_bytes();
  static_assert(begin > std::int64_t{1} << 31);
  test::far_array<std::byte> tiles(begin + form.tile_bytes(), begin);
  constexpr std::int64_t entry = test::far_row * test::far_stride;
  test::far_array<std::int32_t> table(entry + 2, entry);
  table.data()[entry + 1] = tile;
  const pulseinfer::digest_view view{.form = form,
                                     .tiles = tiles.data(),
                                     .tile_of = table.data(),
                                     .tiles_per_request = test::far_stride};
  std::byte* const found = view.tile(test::far_row, pulseinfer::tile_blocks + 3);
  CHECK(found == tiles.data() + begin);
  // The last element of it.
  const std::byte* const last = view.element_at(found, 1, 7, 127, 63);
  CHECK(last + 4 == tiles.data() + begin + form.tile_bytes());
  CHECK(view.value(found, 1, 7, 127, 63) == 0.0f);
}
