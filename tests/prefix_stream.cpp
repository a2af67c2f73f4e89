// SPDX-License-Identifier: Apache-2.0
/// @file
/// prefix_stream.hpp on the backend under test. Include the backend's support header first.
#include "pulseinfer/prefix_stream.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <stdexcept>
#include <vector>

#include "support/offload_rig.hpp"

namespace {

using backend = test::backend;
using rig = test::offload_rig<backend>;
using pulseinfer::device_page;
using pulseinfer::logical_block;
using pulseinfer::prefix_outcome;
using pulseinfer::prefix_stream;

constexpr std::int32_t blocks = 5;
std::vector<device_page> pages_from(std::initializer_list<std::int32_t> numbers) {
  std::vector<device_page> pages;
  for (const std::int32_t number : numbers) pages.push_back(device_page{number});
  return pages;
}
const std::vector<device_page> even = pages_from({10, 12, 14, 16, 18});
const std::vector<device_page> odd = pages_from({11, 13, 15, 17, 19});

std::vector<std::int32_t> all_blocks() {
  return {0, 1, 2, 3, 4};
}

/// What the engine's work on a layer reads: the pages of the layer, on the engine's stream, into the
/// host's copy of the pool.
void read_layer(rig& r, std::int32_t layer, std::span<const device_page> pages) {
  for (const device_page page : pages) r.pages.read_page(layer, index_of(page), r.stream);
}

}  // namespace

TEST_CASE("prefix stream: every layer's blocks come in order, over two sets of pages") {
  test::each_backend([](backend machine) {
    rig r(machine);
    const auto id = r.stored(7, all_blocks());
    for (int round = 0; round < 2; ++round) {
      prefix_stream stream(r.mover, id, rig::geometry.layers, even, odd, r.stream);
      for (std::int32_t layer = 0; layer < rig::geometry.layers; ++layer) {
        REQUIRE(stream.sync_layer(r.stream) == prefix_outcome::ready);
        CHECK(stream.missing().empty());
        const auto pages = stream.pages();
        REQUIRE(pages.size() == blocks);
        CHECK(pages[0] == (layer % 2 == 0 ? even[0] : odd[0]));
        read_layer(r, layer, pages);
      }
      machine.sync(r.stream);
      for (std::int32_t layer = 0; layer < rig::geometry.layers; ++layer) {
        for (std::int32_t block = 0; block < blocks; ++block) {
          const auto& set = layer % 2 == 0 ? even : odd;
          CHECK((r.pages.get(layer, index_of(set[static_cast<std::size_t>(block)])) ==
                 test::stamp(rig::geometry, 7, layer, block)));
        }
      }
    }
  });
}

TEST_CASE("prefix stream: a layer that the store lost in part is incomplete, the next one is not") {
  test::each_backend([](backend machine) {
    rig r(machine);
    const auto id = r.store.open_sequence().value();
    for (const std::int32_t block : {0, 2, 4}) r.add(id, 3, 0, block);
    for (const std::int32_t block : all_blocks()) r.add(id, 3, 1, block);
    prefix_stream stream(r.mover, id, 2, even, odd, r.stream);
    REQUIRE(stream.sync_layer(r.stream) == prefix_outcome::incomplete);
    CHECK(std::vector<logical_block>(stream.missing().begin(), stream.missing().end()) ==
          std::vector<logical_block>{logical_block{1}, logical_block{3}});
    read_layer(r, 0, stream.pages());
    REQUIRE(stream.sync_layer(r.stream) == prefix_outcome::ready);
    CHECK(stream.missing().empty());
    machine.sync(r.stream);
    CHECK((r.pages.get(0, index_of(even[2])) == test::stamp(rig::geometry, 3, 0, 2)));
    CHECK((r.pages.get(0, index_of(even[1])) != test::stamp(rig::geometry, 3, 0, 1)));
  });
}

TEST_CASE("prefix stream: without a transfer to be had the layer stays the next") {
  test::each_backend([](backend machine) {
    rig r(machine, {.transfers_in_flight = 1});
    const auto id = r.stored(5, all_blocks());
    auto other = r.recall(0, id, {{0, 0, 40}});  // its ticket is held: no transfer is left
    prefix_stream stream(r.mover, id, 2, even, odd, r.stream);
    other->sync();
    CHECK(stream.sync_layer(r.stream) == prefix_outcome::refused);
    CHECK(stream.sync_layer(r.stream) == prefix_outcome::refused);
    other.reset();
    REQUIRE(stream.sync_layer(r.stream) == prefix_outcome::ready);
    CHECK(stream.pages()[0] == even[0]);
    machine.sync(r.stream);
  });
}

TEST_CASE("prefix stream: dropped early, its recall has ended and nothing is leased") {
  test::each_backend([](backend machine) {
    rig r(machine);
    const auto id = r.stored(5, all_blocks());
    prefix_stream stream(r.mover, id, 2, even, odd, r.stream);
    stream.sync_dropped();
    CHECK(r.store.counts().pinned == 0);
    CHECK_THROWS_AS((void)stream.sync_layer(r.stream), std::logic_error);
  });
}

TEST_CASE("prefix stream: bad sets, layers and sequences are refused") {
  test::each_backend([](backend machine) {
    rig r(machine);
    const auto id = r.stored(5, all_blocks());
    using stream_type = prefix_stream<backend, pulseinfer::block_store<backend>>;
    const std::vector<device_page> four = pages_from({1, 2, 3, 4});
    const std::vector<device_page> outside = pages_from({1, 2, 3, 4, 96});
    CHECK_THROWS_WITH_AS(stream_type(r.mover, id, 2, even, four, r.stream),
                         "prefix_stream: the sets have 5 and 4 pages, expected the same",
                         std::invalid_argument);
    for (const std::int32_t layers : {0, 3}) {
      CHECK_THROWS_WITH_AS(stream_type(r.mover, id, layers, even, odd, r.stream),
                           doctest::Contains("expected 1 to 2"), std::invalid_argument);
    }
    CHECK_THROWS_AS(stream_type(r.mover, id, 2, outside, odd, r.stream), std::out_of_range);
    const pulseinfer::sequence_id stale{id.index, id.generation + 1};
    CHECK_THROWS_AS(stream_type(r.mover, stale, 2, even, odd, r.stream), std::invalid_argument);
    stream_type none(r.mover, id, 1, {}, {}, r.stream);  // an empty prefix is at once there
    CHECK(none.sync_layer(r.stream) == prefix_outcome::ready);
    CHECK_THROWS_WITH_AS((void)none.sync_layer(r.stream), "prefix_stream: all 1 layers are through",
                         std::logic_error);
  });
}

TEST_CASE(
    "prefix stream: a sequence that is closed on the way fails the next layer, not this one") {
  test::each_backend([](backend machine) {
    rig r(machine);
    const auto id = r.stored(5, all_blocks());
    prefix_stream stream(r.mover, id, 2, even, odd, r.stream);
    (void)r.store.close_sequence(id);
    CHECK(stream.sync_layer(r.stream) == prefix_outcome::ready);  // its lease is older
    read_layer(r, 0, stream.pages());
    CHECK_THROWS_AS((void)stream.sync_layer(r.stream), std::invalid_argument);
    machine.sync(r.stream);
    CHECK((r.pages.get(0, index_of(even[4])) == test::stamp(rig::geometry, 5, 0, 4)));
    // The recall ends, and gives its lease back, a moment after its pages can be used.
    machine.sync_until([&] { return r.store.counts().free == r.store.counts().capacity; });
  });
}
