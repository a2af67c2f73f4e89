// SPDX-License-Identifier: Apache-2.0
/// @file
/// digest.hpp on the backend under test. Include the backend's support header first.
#include "pulseinfer/digest.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <vector>

#include "pulseinfer/page_table.hpp"
#include "pulseinfer/pool_shape.hpp"
#include "support/allocations.hpp"
#include "support/device_array.hpp"
#include "support/keys.hpp"

namespace {

using backend = test::backend;
using pulseinfer::digest_kind;
using pulseinfer::element_type;

template <class Case>
void each(Case run) {
  test::each_backend([&](backend machine) { run(machine); });
}

constexpr pulseinfer::kv_geometry geometry{
    .layers = 2, .kv_heads = 2, .head_dim = 4, .block_tokens = 4, .element = element_type::f16};
constexpr std::int64_t channels = 8;
constexpr float nothing_there = -12345.0f;

/// Kernel: what `find` leads to for block `block` of a request, part by part.
struct read_digests {
  pulseinfer::digest_view digest;
  std::int64_t request;
  std::int64_t parts;
  float* out;  ///< [blocks, parts, kv_heads * head_dim]

  PULSEINFER_HD void operator()(std::int64_t block, std::int64_t channel) const {
    const std::int64_t head = channel / digest.form.head_dim;
    std::byte* const tile = digest.tile(request, block);
    const std::int64_t all = std::int64_t{digest.form.kv_heads} * digest.form.head_dim;
    for (std::int64_t part = 0; part < parts; ++part) {
      out[(block * parts + part) * all + channel] =
          tile == nullptr ? -12345.0f
                          : digest.value(tile, part, head, channel % digest.form.head_dim,
                                         block % pulseinfer::tile_blocks);
    }
  }
};

/// All digests of the first blocks of a request: [block][part * channels + channel].
std::vector<std::vector<float>> read(backend machine,
                                     const pulseinfer::digest_store<backend>& digests,
                                     std::int32_t layer, std::int32_t request, std::int64_t blocks,
                                     backend::stream& stream) {
  const auto view = digests.view(layer);
  const std::int64_t parts = view.form.parts();
  const std::int64_t all = std::int64_t{view.form.kv_heads} * view.form.head_dim;
  test::device_array<float, backend> out(machine, static_cast<std::size_t>(blocks * parts * all));
  machine.for_each({blocks, all}, {}, 0, read_digests{view, request, parts, out.data()}, stream);
  const std::vector<float> flat = out.download(stream);
  std::vector<std::vector<float>> found;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const auto first = flat.begin() + b * parts * all;
    found.emplace_back(first, first + parts * all);
  }
  return found;
}

/// Keys of some blocks, and where they lie.
struct scene {
  scene(backend machine, const pulseinfer::kv_geometry& g, std::int64_t requests,
        std::int64_t max_blocks)
      : stream(machine.make_stream(pulseinfer::stream_priority::normal)),
        keys(machine, g, requests, max_blocks) {}

  backend::stream stream;
  test::key_cache<backend> keys;
};

void same_bits(const std::vector<float>& is, const std::vector<float>& should) {
  REQUIRE(is.size() == should.size());
  CHECK(std::memcmp(is.data(), should.data(), is.size() * sizeof(float)) == 0);
}

}  // namespace

TEST_CASE("digest: mean and bounds are those of the keys, for every element type") {
  each([](backend machine) {
    for (const element_type element :
         {element_type::f16, element_type::bf16, element_type::f32, element_type::i8,
          element_type::f8_e4m3, element_type::f8_e5m2}) {
      for (const digest_kind kind : {digest_kind::mean, digest_kind::min_max}) {
        CAPTURE(static_cast<int>(element));
        CAPTURE(static_cast<int>(kind));
        pulseinfer::kv_geometry g = geometry;
        g.element = element;
        scene s(machine, g, 1, 6);
        pulseinfer::digest_store<backend> digests(
            machine, g,
            {.kind = kind, .max_requests = 1, .max_blocks = 6, .element = element_type::f32});
        REQUIRE(digests.reserve(0, 6, s.stream));
        for (std::int32_t layer = 0; layer < 2; ++layer) {
          s.keys.randomise(static_cast<std::uint64_t>(layer) + 1);
          s.keys.upload(s.stream);
          digests.build(layer, 0, 0, 6, s.keys.pool(), s.keys.device_table(), s.stream);
          const auto found = read(machine, digests, layer, 0, 6, s.stream);
          for (std::int64_t block = 0; block < 6; ++block) {
            const auto& digest = found[static_cast<std::size_t>(block)];
            same_bits(digest, s.keys.digest(kind, layer, 0, block));
            for (std::int64_t channel = 0; channel < channels; ++channel) {
              double total = 0;
              double least = std::numeric_limits<double>::infinity();
              double most = -least;
              for (std::int64_t token = 0; token < g.block_tokens; ++token) {
                const double key = s.keys.key(layer, 0, block, token, channel);
                total += key / g.block_tokens;
                least = std::min(least, key);
                most = std::max(most, key);
              }
              const auto at = static_cast<std::size_t>(channel);
              if (kind == digest_kind::mean) {
                CHECK(digest[at] == doctest::Approx(total).epsilon(1e-5));
              } else {
                CHECK(digest[at] == least);
                CHECK(digest[at + channels] == most);
              }
            }
          }
        }
      }
    }
  });
}

TEST_CASE("digest: elements are rounded the same way on every machine") {
  each([](backend machine) {
    for (const digest_kind kind :
         {digest_kind::mean, digest_kind::min_max, digest_kind::centre_distance}) {
      for (const element_type element :
           {element_type::f16, element_type::bf16, element_type::f8_e4m3, element_type::i8}) {
        CAPTURE(static_cast<int>(kind));
        CAPTURE(static_cast<int>(element));
        scene s(machine, geometry, 1, 3);
        s.keys.randomise(21);
        s.keys.upload(s.stream);
        pulseinfer::digest_store<backend> digests(
            machine, geometry,
            {.kind = kind, .max_requests = 1, .max_blocks = 3, .element = element});
        CHECK(digests.form().element == element);
        REQUIRE(digests.reserve(0, 3, s.stream));
        digests.build(0, 0, 0, 3, s.keys.pool(), s.keys.device_table(), s.stream);
        const auto found = read(machine, digests, 0, 0, 3, s.stream);
        for (std::int64_t block = 0; block < 3; ++block) {
          same_bits(found[static_cast<std::size_t>(block)],
                    s.keys.stored_digest(kind, element, 0, 0, block));
        }
      }
    }
  });
}

TEST_CASE("digest: blocks being filled are digested token by token, as if built at once") {
  each([](backend machine) {
    for (const element_type element : {element_type::f32, element_type::i8}) {
      scene s(machine, geometry, 3, 4);
      s.keys.randomise(31);
      s.keys.upload(s.stream);
      const pulseinfer::digest_options options{.kind = digest_kind::centre_distance,
                                               .max_requests = 3,
                                               .max_blocks = 4,
                                               .element = element};
      pulseinfer::digest_store<backend> digests(machine, geometry, options);
      pulseinfer::digest_store<backend> at_once(machine, geometry, options);
      // Request 2 grows beside request 0; request 1 has no tile, and stays without.
      REQUIRE(digests.reserve(0, 4, s.stream));
      REQUIRE(digests.reserve(2, 4, s.stream));
      const std::vector<std::int32_t> requests = {2, 1, 0};
      test::device_array<std::int32_t, backend> rows(machine, requests, s.stream);
      test::device_array<std::int32_t, backend> tokens(machine, 3);
      for (std::int32_t held = 0; held <= 13; ++held) {
        tokens.upload({held, 3, std::max(0, held - 2)}, s.stream);
        digests.append(1,
                       {.requests = requests,
                        .device_requests = rows.data(),
                        .device_tokens = tokens.data(),
                        .max_tokens = held},
                       1, s.keys.pool(), s.keys.device_table(), s.stream);
        machine.sync(s.stream);
      }
      REQUIRE(at_once.reserve(0, 2, s.stream));
      REQUIRE(at_once.reserve(2, 3, s.stream));
      at_once.build(1, 0, 0, 2, s.keys.pool(), s.keys.device_table(), s.stream);
      at_once.build(1, 2, 0, 3, s.keys.pool(), s.keys.device_table(), s.stream);
      for (const std::int32_t request : {0, 2}) {
        const std::int64_t full = request == 0 ? 2 : 3;
        const auto found = read(machine, digests, 1, request, full, s.stream);
        const auto should = read(machine, at_once, 1, request, full, s.stream);
        for (std::size_t block = 0; block < static_cast<std::size_t>(full); ++block) {
          same_bits(found[block], should[block]);
        }
      }
      CHECK(read(machine, digests, 1, 1, 1, s.stream)[0][0] == nothing_there);
    }
  });
}

TEST_CASE("digest: an append that makes no sense is refused") {
  backend machine = test::make_backend();
  scene s(machine, geometry, 1, 4);
  pulseinfer::digest_store<backend> digests(machine, geometry,
                                            {.kind = digest_kind::mean,
                                             .max_requests = 1,
                                             .max_blocks = 4,
                                             .element = element_type::f32});
  const std::vector<std::int32_t> requests = {0};
  test::device_array<std::int32_t, backend> zeros(machine, {0}, s.stream);
  const pulseinfer::batch_view batch{
      .requests = requests, .device_requests = zeros.data(), .device_tokens = zeros.data()};
  const auto append = [&](std::int32_t layer, const pulseinfer::batch_view& b, std::int64_t count) {
    digests.append(layer, b, count, s.keys.pool(), s.keys.device_table(), s.stream);
  };
  append(0, batch, 0);
  append(0, batch, 16);
  append(0, {}, 1);
  CHECK_THROWS_AS(append(2, batch, 1), std::out_of_range);
  CHECK_THROWS_AS(append(0, batch, -1), std::invalid_argument);
  CHECK_THROWS_AS(append(0, batch, 17), std::invalid_argument);
  const std::vector<std::int32_t> unknown = {1};
  pulseinfer::batch_view other = batch;
  other.requests = unknown;
  CHECK_THROWS_AS(append(0, other, 1), std::out_of_range);
  other = batch;
  other.device_tokens = nullptr;
  CHECK_THROWS_AS(append(0, other, 1), std::invalid_argument);
  machine.sync(s.stream);
}

TEST_CASE("digest: ragged requests, blocks across the border of a tile") {
  each([](backend machine) {
    constexpr std::int64_t blocks[] = {3, 67};
    scene s(machine, geometry, 2, 67);
    s.keys.randomise(5);
    s.keys.upload(s.stream);
    pulseinfer::digest_store<backend> digests(machine, geometry,
                                              {.kind = digest_kind::mean,
                                               .max_requests = 2,
                                               .max_blocks = 67,
                                               .element = element_type::f32});
    CHECK(digests.free_tiles() == 4);
    for (std::int32_t request = 0; request < 2; ++request) {
      const std::int64_t count = blocks[request];
      REQUIRE(digests.reserve(request, count, s.stream));
      // In parts, one of them over the border.
      for (std::int64_t first = 0; first < count; first += 2) {
        digests.build(1, request, first, std::min<std::int64_t>(2, count - first), s.keys.pool(),
                      s.keys.device_table(), s.stream);
      }
    }
    CHECK(digests.free_tiles() == 1);
    for (std::int32_t request = 0; request < 2; ++request) {
      const auto found = read(machine, digests, 1, request, blocks[request], s.stream);
      for (std::int64_t block = 0; block < blocks[request]; ++block) {
        same_bits(found[static_cast<std::size_t>(block)],
                  s.keys.digest(digest_kind::mean, 1, request, block));
      }
    }
  });
}

TEST_CASE("digest: find gives null where there is no tile") {
  each([](backend machine) {
    scene s(machine, geometry, 1, 1);
    pulseinfer::digest_store<backend> digests(machine, geometry,
                                              {.kind = digest_kind::mean,
                                               .max_requests = 2,
                                               .max_blocks = 128,
                                               .element = element_type::f32});
    REQUIRE(digests.reserve(1, 64, s.stream));
    const auto lacks = [&](std::int32_t request, std::size_t block) {
      return read(machine, digests, 0, request, 140, s.stream)[block][0] == nothing_there;
    };
    CHECK(lacks(0, 0));
    CHECK(!lacks(1, 63));
    CHECK(lacks(1, 64));   // not reserved
    CHECK(lacks(1, 128));  // beyond max_blocks
    CHECK(lacks(1, 139));
  });
}

TEST_CASE("digest: a block without a page keeps what is there") {
  each([](backend machine) {
    scene s(machine, geometry, 1, 3);
    s.keys.randomise(5);
    s.keys.upload(s.stream);
    pulseinfer::digest_store<backend> digests(machine, geometry,
                                              {.kind = digest_kind::mean,
                                               .max_requests = 1,
                                               .max_blocks = 3,
                                               .element = element_type::f32});
    REQUIRE(digests.reserve(0, 3, s.stream));
    digests.build(0, 0, 0, 3, s.keys.pool(), s.keys.device_table(), s.stream);
    const auto before = read(machine, digests, 0, 0, 3, s.stream);
    s.keys.forget_page(0, 1);
    s.keys.randomise(6);
    s.keys.upload(s.stream);
    digests.build(0, 0, 0, 3, s.keys.pool(), s.keys.device_table(), s.stream);
    const auto after = read(machine, digests, 0, 0, 3, s.stream);
    CHECK(after[0] != before[0]);
    same_bits(after[1], before[1]);
    CHECK(after[2] != before[2]);
  });
}

TEST_CASE("digest: growth keeps what is digested, release gives the tiles to others") {
  each([](backend machine) {
    scene s(machine, geometry, 2, 130);
    s.keys.randomise(7);
    s.keys.upload(s.stream);
    pulseinfer::digest_store<backend> digests(machine, geometry,
                                              {.kind = digest_kind::mean,
                                               .max_requests = 2,
                                               .max_blocks = 192,
                                               .tiles = 4,
                                               .element = element_type::f32});
    const auto build = [&](std::int32_t request, std::int64_t first, std::int64_t count) {
      digests.build(0, request, first, count, s.keys.pool(), s.keys.device_table(), s.stream);
    };
    REQUIRE(digests.reserve(0, 64, s.stream));
    build(0, 62, 2);
    REQUIRE(digests.reserve(1, 1, s.stream));
    build(1, 0, 1);
    REQUIRE(digests.reserve(0, 65, s.stream));
    REQUIRE(digests.reserve(0, 10, s.stream));  // fewer than it has: nothing to do
    build(0, 64, 1);
    CHECK(digests.free_tiles() == 1);

    // Two more would be needed, one is free: nothing changes, and what is left can still be had.
    CHECK(!digests.reserve(1, 192, s.stream));
    CHECK(digests.free_tiles() == 1);
    CHECK_THROWS_AS(build(1, 64, 1), std::out_of_range);
    const auto kept = read(machine, digests, 0, 1, 65, s.stream);
    same_bits(kept[0], s.keys.digest(digest_kind::mean, 0, 1, 0));
    CHECK(kept[64][0] == nothing_there);

    const auto grown = read(machine, digests, 0, 0, 65, s.stream);
    for (const std::int64_t block : {62, 63, 64}) {
      same_bits(grown[static_cast<std::size_t>(block)],
                s.keys.digest(digest_kind::mean, 0, 0, block));
    }

    digests.release(0, s.stream);
    CHECK(digests.free_tiles() == 3);
    CHECK(read(machine, digests, 0, 0, 1, s.stream)[0][0] == nothing_there);
    REQUIRE(digests.reserve(1, 192, s.stream));
    CHECK(digests.free_tiles() == 1);
    build(1, 64, 66);
    const auto reused = read(machine, digests, 0, 1, 130, s.stream);
    same_bits(reused[0], s.keys.digest(digest_kind::mean, 0, 1, 0));
    for (const std::int64_t block : {64, 127, 128, 129}) {
      same_bits(reused[static_cast<std::size_t>(block)],
                s.keys.digest(digest_kind::mean, 0, 1, block));
    }
    digests.release(0, s.stream);  // holds nothing: nothing happens
    CHECK(digests.free_tiles() == 1);
    machine.sync(s.stream);
  });
}

TEST_CASE("digest: where there is no memory for its books, no tile is anybody's twice") {
  if (!test::counts_allocations()) return;
  each([](backend machine) {
    scene s(machine, geometry, 2, 130);
    s.keys.randomise(7);
    s.keys.upload(s.stream);
    machine.sync(s.stream);
    int failed = 0;
    for (std::uint64_t nth = 1; nth < 20; ++nth) {
      CAPTURE(nth);
      pulseinfer::digest_store<backend> digests(machine, geometry,
                                                {.max_requests = 2, .max_blocks = 128});
      test::fail_allocation(nth);
      bool has_failed = false;
      try {
        const bool is_reserved = digests.reserve(0, 65, s.stream);
        CHECK(is_reserved);
      } catch (const std::bad_alloc&) {
        has_failed = true;
      }
      const bool is_over = test::will_fail();
      test::fail_allocation(0);
      if (has_failed && digests.free_tiles() == 4) {
        ++failed;
        REQUIRE(digests.reserve(1, 65, s.stream));
        digests.build(0, 1, 0, 65, s.keys.pool(), s.keys.device_table(), s.stream);
        CHECK(read(machine, digests, 0, 0, 1, s.stream)[0][0] == nothing_there);
      }
      machine.sync(s.stream);
      if (is_over) break;
    }
    CHECK(failed >= 1);
  });
}

TEST_CASE("digest: a NaN among the keys of a channel is in its digest, whichever token has it") {
  each([](backend machine) {
    for (const digest_kind kind : {digest_kind::mean, digest_kind::min_max}) {
      scene s(machine, geometry, 1, 4);
      pulseinfer::digest_store<backend> digests(
          machine, geometry,
          {.kind = kind, .max_requests = 1, .max_blocks = 4, .element = element_type::f32});
      REQUIRE(digests.reserve(0, 4, s.stream));
      s.keys.randomise(8);
      const float nan = std::numeric_limits<float>::quiet_NaN();
      for (std::int64_t token = 0; token < 4; ++token) s.keys.set(0, 0, token, token, 5, nan);
      s.keys.upload(s.stream);
      digests.build(0, 0, 0, 4, s.keys.pool(), s.keys.device_table(), s.stream);
      const auto found = read(machine, digests, 0, 0, 4, s.stream);
      for (std::size_t block = 0; block < 4; ++block) {
        for (std::size_t i = 0; i < found[block].size(); ++i) {
          CHECK(std::isnan(found[block][i]) == (i % channels == 5));
        }
      }
    }
  });
}

TEST_CASE("digest: what is out of range is refused") {
  each([](backend machine) {
    scene s(machine, geometry, 1, 4);
    pulseinfer::digest_store<backend> digests(machine, geometry,
                                              {.kind = digest_kind::mean,
                                               .max_requests = 2,
                                               .max_blocks = 100,
                                               .element = element_type::f32});
    REQUIRE(digests.reserve(0, 3, s.stream));
    const auto build = [&](std::int32_t layer, std::int32_t request, std::int64_t first,
                           std::int64_t count) {
      digests.build(layer, request, first, count, s.keys.pool(), s.keys.device_table(), s.stream);
    };
    build(0, 0, 64, 0);  // nothing, at the end of what is reserved
    CHECK_THROWS_AS(build(-1, 0, 0, 1), std::out_of_range);
    CHECK_THROWS_AS(build(2, 0, 0, 1), std::out_of_range);
    CHECK_THROWS_AS(build(0, -1, 0, 1), std::out_of_range);
    CHECK_THROWS_AS(build(0, 2, 0, 1), std::out_of_range);
    CHECK_THROWS_AS(build(0, 1, 0, 1), std::out_of_range);
    CHECK_THROWS_AS(build(0, 0, -1, 1), std::out_of_range);
    CHECK_THROWS_AS(build(0, 0, 0, -1), std::out_of_range);
    CHECK_THROWS_AS(build(0, 0, 64, 1), std::out_of_range);
    CHECK_THROWS_AS(build(0, 0, 1, std::numeric_limits<std::int64_t>::max()), std::out_of_range);
    CHECK_THROWS_AS((void)digests.reserve(2, 1, s.stream), std::out_of_range);
    CHECK_THROWS_AS((void)digests.reserve(-1, 1, s.stream), std::out_of_range);
    CHECK_THROWS_AS((void)digests.reserve(0, 101, s.stream), std::out_of_range);
    CHECK_THROWS_AS((void)digests.reserve(0, -1, s.stream), std::out_of_range);
    CHECK_THROWS_AS(digests.release(2, s.stream), std::out_of_range);
    CHECK_THROWS_AS((void)digests.view(2), std::out_of_range);
    CHECK_THROWS_AS((void)digests.view(-1), std::out_of_range);

    pulseinfer::kv_geometry other = geometry;
    other.layers = 1;
    test::key_cache<backend> elsewhere(machine, other, 1, 1);
    CHECK_THROWS_AS(digests.build(0, 0, 0, 1, elsewhere.pool(), elsewhere.device_table(), s.stream),
                    std::invalid_argument);
    machine.sync(s.stream);
  });
}

TEST_CASE("digest: options out of range are refused") {
  backend machine = test::make_backend();
  const auto make = [&](const pulseinfer::digest_options& options) {
    pulseinfer::digest_store<backend> digests(machine, geometry, options);
  };
  make({.max_requests = 1, .max_blocks = 1, .tiles = 1});
  CHECK_THROWS_AS(make({.max_requests = 0}), std::invalid_argument);
  CHECK_THROWS_AS(make({.max_blocks = 0}), std::invalid_argument);
  CHECK_THROWS_AS(make({.max_blocks = (1 << 24) + 1}), std::invalid_argument);
  CHECK_THROWS_AS(make({.max_requests = 2, .max_blocks = 65, .tiles = 5}), std::invalid_argument);
  CHECK_THROWS_AS(make({.max_requests = 2, .max_blocks = 65, .tiles = -1}), std::invalid_argument);
  CHECK_THROWS_AS(make({.element = element_type::f8_e5m2}), std::invalid_argument);
  CHECK_THROWS_AS(make({.kind = static_cast<digest_kind>(3)}), std::invalid_argument);
}

TEST_CASE("digest: quantised keys are scaled, in every order of a page and for head groups") {
  each([](backend machine) {
    for (const pulseinfer::page_order order :
         {pulseinfer::page_order::nhd, pulseinfer::page_order::hnd}) {
      for (const pulseinfer::scale_kind scales :
           {pulseinfer::scale_kind::per_head, pulseinfer::scale_kind::per_token_head}) {
        constexpr std::int32_t tokens = 4, heads = 2, dim = 4, groups = 2, pages = 3;
        const pulseinfer::kv_geometry g{.layers = 1,
                                        .kv_heads = 1,
                                        .head_dim = dim,
                                        .block_tokens = tokens,
                                        .element = element_type::i8,
                                        .scales = scales};
        const pulseinfer::block_layout layout =
            pulseinfer::make_layout(g, pages, {.order = order, .head_groups = groups});
        auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
        std::vector<std::int8_t> keys(static_cast<std::size_t>(layout.plane_bytes(0)));
        std::vector<float> factors(static_cast<std::size_t>(layout.plane_bytes(2)) / 4);
        for (std::size_t i = 0; i < keys.size(); ++i) {
          keys[i] = static_cast<std::int8_t>(static_cast<int>(i * 37 % 251) - 125);
        }
        for (std::size_t i = 0; i < factors.size(); ++i) {
          factors[i] = 0.25f * static_cast<float>(i + 1);
        }
        test::device_array<std::int8_t, backend> device_keys(machine, keys, stream);
        test::device_array<float, backend> device_factors(machine, factors, stream);
        auto* const key_plane = reinterpret_cast<std::byte*>(device_keys.data());
        auto* const factor_plane = reinterpret_cast<std::byte*>(device_factors.data());
        const pulseinfer::kv_pool pool(
            g, layout, {{.plane = {key_plane, key_plane, factor_plane, factor_plane}}});
        // Rows 0 and 1 are the two head groups of one request, whose block 0 is page 2.
        const test::device_array<std::int32_t, backend> entries(machine, {2, 0}, stream);
        const pulseinfer::grouped_table<pulseinfer::block_table> table{{entries.data(), 1, 2},
                                                                       groups};
        pulseinfer::digest_store<backend> digests(machine, g,
                                                  {.kind = digest_kind::min_max,
                                                   .max_requests = 2,
                                                   .max_blocks = 2,
                                                   .element = element_type::f32});
        for (std::int32_t row = 0; row < groups; ++row) {
          REQUIRE(digests.reserve(row, 2, stream));
          digests.build(0, row, 0, 2, pool, table, stream);
          const auto found = read(machine, digests, 0, row, 2, stream);
          for (std::int64_t block = 0; block < 2; ++block) {
            const std::int64_t page = block == 0 ? 2 : 0;
            for (std::int64_t c = 0; c < dim; ++c) {
              float least = std::numeric_limits<float>::infinity();
              float most = -least;
              for (std::int64_t t = 0; t < tokens; ++t) {
                // The engine's own index of (page, token, head = row, channel).
                const std::int64_t token_head = order == pulseinfer::page_order::nhd
                                                    ? (page * tokens + t) * heads + row
                                                    : (page * heads + row) * tokens + t;
                const std::int64_t scale =
                    scales == pulseinfer::scale_kind::per_head ? page * heads + row : token_head;
                const float value =
                    static_cast<float>(keys[static_cast<std::size_t>(token_head * dim + c)]) *
                    factors[static_cast<std::size_t>(scale)];
                least = std::min(least, value);
                most = std::max(most, value);
              }
              const auto& digest = found[static_cast<std::size_t>(block)];
              CHECK(digest[static_cast<std::size_t>(c)] == least);
              CHECK(digest[static_cast<std::size_t>(c + dim)] == most);
            }
          }
        }
      }
    }
  });
}
