// SPDX-License-Identifier: Apache-2.0
/// @file
/// Sizes of units, and the geometries that are refused.
#include "pulseinfer/geometry.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace {

using pulseinfer::checked;
using pulseinfer::element_type;
using pulseinfer::kv_geometry;

constexpr kv_geometry llama_3_8b{.layers = 32, .kv_heads = 8, .head_dim = 128};

static_assert(llama_3_8b.head_bytes() == 256);
static_assert(llama_3_8b.token_bytes() == 2'048);
static_assert(llama_3_8b.unit_bytes() == 65'536);

/// An extent of a geometry, and its name in messages.
struct extent {
  const char* name;
  std::int32_t kv_geometry::*member;
};
constexpr extent extents[] = {{"layers", &kv_geometry::layers},
                              {"kv_heads", &kv_geometry::kv_heads},
                              {"head_dim", &kv_geometry::head_dim},
                              {"block_tokens", &kv_geometry::block_tokens}};

}  // namespace

TEST_CASE("geometry: what makes sense is returned as it is") {
  CHECK(checked(llama_3_8b) == llama_3_8b);
  kv_geometry other = llama_3_8b;
  other.element = element_type::f32;
  CHECK(checked(other).unit_bytes() == 131'072);
  CHECK(other != llama_3_8b);
  constexpr kv_geometry least{1, 1, 8, 1, element_type::f16};  // one word of keys
  CHECK(checked(least).unit_bytes() == 32);
}

TEST_CASE("geometry: the largest extents do not overflow") {
  constexpr std::int32_t most = pulseinfer::max_extent;
  constexpr kv_geometry largest{most, most, most, most, element_type::f32};
  CHECK(checked(largest).unit_bytes() == std::int64_t{1} << 51);
}

TEST_CASE("geometry: an extent out of range is named with its value") {
  using limits = std::numeric_limits<std::int32_t>;
  for (const extent& e : extents) {
    for (const std::int32_t value :
         {0, -1, limits::min(), pulseinfer::max_extent + 1, limits::max()}) {
      kv_geometry geometry = llama_3_8b;
      geometry.*e.member = value;
      const std::string expected = "kv_geometry: " + std::string(e.name) + " is " +
                                   std::to_string(value) + ", expected 1 to 65536";
      CHECK_THROWS_WITH_AS((void)checked(geometry), expected.c_str(), std::invalid_argument);
    }
  }
}

TEST_CASE("geometry: a unit is filled up to whole words") {
  for (const std::int32_t head_dim : {1, 4, 7, 8, 9, 12}) {
    const kv_geometry geometry{1, 1, head_dim, 1, element_type::f16};
    CHECK(checked(geometry).unit_bytes() == (4 * head_dim + 15) / 16 * 16);
  }
  // It is the block that counts, not the token: four tokens of 12 bytes are three words.
  const kv_geometry odd_tokens{1, 1, 6, 4, element_type::bf16};
  CHECK(checked(odd_tokens).unit_bytes() == 96);
}

TEST_CASE("geometry: scales and latents") {
  kv_geometry geometry{1, 8, 128, 16, element_type::f8_e4m3};
  CHECK(geometry.unit_bytes() == 32'768);
  geometry.scales = pulseinfer::scale_kind::per_token_head;
  CHECK(geometry.scale_bytes() == 512);
  CHECK(geometry.unit_bytes() == 32'768 + 1'024);
  geometry.scales = pulseinfer::scale_kind::per_head;
  CHECK(geometry.unit_bytes() == 32'768 + 64);
  const kv_geometry latent{60, 1, 576, 64, element_type::bf16, 1};  // DeepSeek's, 64 tokens a page
  CHECK(checked(latent).unit_bytes() == 73'728);
  for (const std::int32_t planes : {0, -1, 3}) {
    geometry.planes = planes;
    const std::string expected = "planes is " + std::to_string(planes) + ", expected 1 to 2";
    CHECK_THROWS_WITH_AS((void)checked(geometry), doctest::Contains(expected.c_str()),
                         std::invalid_argument);
  }
  geometry.planes = 2;
  geometry.scales = static_cast<pulseinfer::scale_kind>(7);
  CHECK_THROWS_WITH_AS((void)checked(geometry), doctest::Contains("scales is 7"),
                       std::invalid_argument);
}

TEST_CASE("geometry: an element that is none of the types is refused") {
  kv_geometry geometry = llama_3_8b;
  geometry.element = static_cast<element_type>(9);
  CHECK_THROWS_WITH_AS((void)checked(geometry), doctest::Contains("element is 9"),
                       std::invalid_argument);
}

TEST_CASE("geometry: a block that is begun counts") {
  CHECK(llama_3_8b.blocks_of(0) == 0);
  CHECK(llama_3_8b.blocks_of(1) == 1);
  CHECK(llama_3_8b.blocks_of(16) == 1);
  CHECK(llama_3_8b.blocks_of(17) == 2);
  CHECK(llama_3_8b.blocks_of(131'072) == 8'192);
}
