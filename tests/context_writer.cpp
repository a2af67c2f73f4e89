// SPDX-License-Identifier: Apache-2.0
/// @file
/// context_writer.hpp on the backend under test. Include the backend's support header first.
#include "pulseinfer/context_writer.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "pulseinfer/page_table.hpp"
#include "support/device_array.hpp"
#include "support/offload_rig.hpp"

namespace {

using backend = test::backend;
using rig = test::offload_rig<backend>;
using pulseinfer::appended_row;
using pulseinfer::block_table;
using pulseinfer::logical_block;

constexpr std::int32_t block_tokens = rig::geometry.block_tokens;
constexpr std::int64_t table_blocks = 16;

/// A rig, digests, a writer, and a block table whose block b of request r is page 20 * r + b.
struct scene {
  explicit scene(const backend& machine, const test::rig_options& o = {}, std::int64_t tiles = 0)
      : r(machine, o),
        digests(machine, rig::geometry,
                {.max_requests = 3, .max_blocks = rig::max_blocks, .tiles = tiles}),
        writer(digests, r.mover, r.pages.pool()),
        device_entries(machine, 3 * static_cast<std::size_t>(table_blocks)) {
    for (std::int32_t request = 0; request < 3; ++request) {
      for (std::int32_t block = 0; block < table_blocks; ++block) {
        entries.push_back(20 * request + block);
      }
    }
    device_entries.upload(entries, r.stream);
  }

  /// Digests that are under way read the table.
  ~scene() { r.machine.sync(r.stream); }
  scene(const scene&) = delete;
  scene& operator=(const scene&) = delete;

  /// The engine writes block `block` of a request, on its stream.
  void write(std::int32_t layer, std::int32_t request, std::int32_t block) {
    const std::int64_t page = 20 * request + block;
    r.pages.put(layer, page, test::stamp(rig::geometry, request, layer, block));
    r.pages.write_page(layer, page, r.stream);
  }
  bool append(std::int32_t layer, const std::vector<appended_row>& rows) {
    return writer.append(layer, rows, block_table{entries.data(), 3, table_blocks},
                         block_table{device_entries.data(), 3, table_blocks}, r.stream);
  }
  [[nodiscard]] bool holds(pulseinfer::sequence_id id, std::int32_t layer, std::int32_t request,
                           std::int32_t block) {
    return r.in_store(id, layer, block) == test::stamp(rig::geometry, request, layer, block);
  }

  rig r;
  pulseinfer::digest_store<backend> digests;
  pulseinfer::context_writer<backend, pulseinfer::block_store<backend>> writer;
  std::vector<std::int32_t> entries;
  test::device_array<std::int32_t, backend> device_entries;
};

}  // namespace

TEST_CASE("context writer: blocks are stored as they become full, the last one is not") {
  test::each_backend([](backend machine) {
    scene s(machine);
    const auto id = s.r.store.open_sequence().value();
    s.writer.open(0, id);
    for (std::int64_t tokens = 1; tokens <= 3 * block_tokens + 1; ++tokens) {
      for (std::int32_t layer = 0; layer < 2; ++layer) {
        if (tokens % block_tokens == 0) {
          s.write(layer, 0, static_cast<std::int32_t>(tokens / block_tokens) - 1);
        }
        if (!s.append(layer, {{0, tokens}})) {  // four transfers are under way: let them end
          s.writer.sync_layer(0);
          s.writer.sync_layer(1);
          CHECK(s.append(layer, {{0, tokens}}));
        }
      }
    }
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      s.writer.sync_layer(layer);
      CHECK(s.writer.stored_blocks(layer, 0) == 3);
      for (std::int32_t block = 0; block < 3; ++block) CHECK(s.holds(id, layer, 0, block));
      CHECK_FALSE(s.r.store.contains(id, layer, logical_block{3}));
    }
    s.writer.close(0);
  });
}

TEST_CASE("context writer: rows of a layer go in one transfer, several blocks at a time") {
  test::each_backend([](backend machine) {
    scene s(machine, {.transfers_in_flight = 1});
    const auto first = s.r.store.open_sequence().value();
    const auto second = s.r.store.open_sequence().value();
    s.writer.open(0, first);
    s.writer.open(2, second);
    for (const std::int32_t block : {0, 1, 2}) s.write(1, 0, block);
    for (const std::int32_t block : {0, 1}) s.write(1, 2, block);
    CHECK(s.append(1, {{0, 3 * block_tokens}, {2, 2 * block_tokens + 3}}));
    s.writer.sync_layer(1);
    CHECK(s.writer.stored_blocks(1, 0) == 3);
    CHECK(s.writer.stored_blocks(1, 2) == 2);
    CHECK(s.writer.stored_blocks(0, 0) == 0);
    for (const std::int32_t block : {0, 1, 2}) CHECK(s.holds(first, 1, 0, block));
    for (const std::int32_t block : {0, 1}) CHECK(s.holds(second, 1, 2, block));
  });
}

TEST_CASE("context writer: what finds no room is tried again") {
  test::each_backend([](backend machine) {
    scene s(machine, {.capacity_units = 3});
    const auto id = s.r.store.open_sequence().value();
    s.writer.open(1, id);
    for (const std::int32_t block : {0, 1, 2, 3, 4}) s.write(0, 1, block);
    CHECK(s.append(0, {{1, 5 * block_tokens}}));  // handed over; the store has room for three
    s.writer.sync_layer(0);
    CHECK(s.writer.stored_blocks(0, 1) == 3);
    CHECK(s.append(0, {{1, 5 * block_tokens}}));
    s.writer.sync_layer(0);
    CHECK(s.writer.stored_blocks(0, 1) == 3);
    const auto counts = s.r.store.counts();
    CHECK(counts.free == 0);
    CHECK(counts.pinned == 3);
  });
}

TEST_CASE("context writer: without a transfer or a digest tile nothing is lost, and it says so") {
  test::each_backend([](backend machine) {
    scene s(machine, {.transfers_in_flight = 1});
    const auto id = s.r.store.open_sequence().value();
    s.writer.open(0, id);
    for (const std::int32_t block : {0, 1}) s.write(0, 0, block);
    auto other = s.r.offload(1, id, {{0, 9, 70}});
    other->sync();  // ended, but its ticket is held
    CHECK_FALSE(s.append(0, {{0, 2 * block_tokens}}));
    CHECK(s.writer.stored_blocks(0, 0) == 0);
    other.reset();
    CHECK(s.append(0, {{0, 2 * block_tokens}}));
    s.writer.sync_layer(0);
    CHECK(s.writer.stored_blocks(0, 0) == 2);
  });
  test::each_backend([](backend machine) {
    scene s(machine, {}, 1);  // one tile: for one request
    const auto first = s.r.store.open_sequence().value();
    const auto second = s.r.store.open_sequence().value();
    s.writer.open(0, first);
    s.writer.open(1, second);
    s.write(0, 0, 0);
    s.write(0, 1, 0);
    CHECK_FALSE(s.append(0, {{0, block_tokens}, {1, block_tokens}}));
    s.writer.sync_layer(0);
    CHECK(s.writer.stored_blocks(0, 0) == 1);
    CHECK(s.writer.stored_blocks(0, 1) == 0);
    s.digests.release(0, s.r.stream);
    CHECK(s.append(0, {{1, block_tokens}}));
    s.writer.sync_layer(0);
    CHECK(s.writer.stored_blocks(0, 1) == 1);
    CHECK(s.holds(second, 0, 1, 0));
  });
}

TEST_CASE("context writer: a request index that is used again begins anew") {
  test::each_backend([](backend machine) {
    scene s(machine);
    const auto first = s.r.store.open_sequence().value();
    s.writer.open(0, first);
    for (const std::int32_t block : {0, 1}) s.write(0, 0, block);
    CHECK(s.append(0, {{0, 2 * block_tokens}}));
    s.writer.close(0);
    const auto second = s.r.store.open_sequence().value();
    s.writer.open(0, second);
    s.writer.sync_layer(0);  // the transfer of the first one ends now
    CHECK(s.writer.stored_blocks(0, 0) == 0);
    CHECK(s.append(0, {{0, 2 * block_tokens}}));
    s.writer.sync_layer(0);
    CHECK(s.writer.stored_blocks(0, 0) == 2);
    CHECK(s.holds(first, 0, 0, 1));
    CHECK(s.holds(second, 0, 0, 1));
  });
}

TEST_CASE("context writer: bad requests, tokens and pages are refused, and nothing changes") {
  test::each_backend([](backend machine) {
    scene s(machine);
    const auto id = s.r.store.open_sequence().value();
    CHECK_THROWS_WITH_AS(s.writer.open(3, id), "context_writer: request is 3, expected 0 to 2",
                         std::out_of_range);
    CHECK_THROWS_AS(s.writer.close(1), std::invalid_argument);
    CHECK_THROWS_AS((void)s.append(0, {{1, 8}}), std::invalid_argument);
    s.writer.open(1, id);
    CHECK_THROWS_AS(s.writer.open(1, id), std::invalid_argument);
    CHECK_THROWS_AS((void)s.append(2, {{1, 8}}), std::out_of_range);
    CHECK_THROWS_AS((void)s.append(0, {{1, -1}}), std::invalid_argument);
    CHECK_THROWS_AS((void)s.append(0, {{1, rig::max_blocks * block_tokens + block_tokens}}),
                    std::invalid_argument);
    // Block 16 is outside the table: it has no page.
    CHECK_THROWS_AS((void)s.append(0, {{1, (table_blocks + 1) * block_tokens}}), std::out_of_range);
    CHECK_THROWS_AS((void)s.writer.stored_blocks(0, 0), std::invalid_argument);
    CHECK(s.writer.stored_blocks(0, 1) == 0);
    CHECK(s.append(0, {}));
    CHECK(s.append(0, {{1, 0}}));
    CHECK(s.r.store.counts().free == s.r.store.counts().capacity);
  });
}

TEST_CASE("context writer: what it has written stays while the request is open") {
  test::each_backend([](backend machine) {
    scene s(machine, {.capacity_units = 4});
    const auto first = s.r.store.open_sequence().value();
    const auto second = s.r.store.open_sequence().value();
    s.writer.open(0, first);
    s.writer.open(1, second);
    for (const std::int32_t block : {0, 1, 2, 3}) s.write(0, 0, block);
    for (const std::int32_t block : {0, 1}) s.write(0, 1, block);
    CHECK(s.append(0, {{0, 4 * block_tokens}}));
    s.writer.sync_layer(0);
    CHECK(s.append(0, {{1, 2 * block_tokens}}));  // finds the store full of leased blocks
    s.writer.sync_layer(0);
    CHECK(s.writer.stored_blocks(0, 0) == 4);
    CHECK(s.writer.stored_blocks(0, 1) == 0);
    for (const std::int32_t block : {0, 1, 2, 3}) CHECK(s.holds(first, 0, 0, block));
    s.writer.close(0);
    CHECK(s.append(0, {{1, 2 * block_tokens}}));  // now there is room
    s.writer.sync_layer(0);
    CHECK(s.writer.stored_blocks(0, 1) == 2);
  });
}

TEST_CASE("context writer: more full blocks than a transfer takes go in several") {
  test::each_backend([](backend machine) {
    scene s(machine);  // a transfer takes 3 rows and 80 units
    pulseinfer::transfer_engine few(machine, s.r.store, s.r.pages.pool(),
                                    {.staging_bytes = 8 * rig::geometry.unit_bytes(),
                                     .chunk_bytes = 2 * rig::geometry.unit_bytes(),
                                     .max_units = 4});
    pulseinfer::context_writer writer(s.digests, few, s.r.pages.pool());
    const auto id = s.r.store.open_sequence().value();
    writer.open(0, id);
    for (std::int32_t block = 0; block < 10; ++block) s.write(0, 0, block);
    const appended_row row{0, 10 * block_tokens};
    const block_table host{s.entries.data(), 3, table_blocks};
    const block_table device{s.device_entries.data(), 3, table_blocks};
    int calls = 1;
    while (!writer.append(0, {&row, 1}, host, device, s.r.stream) && calls < 20) {
      writer.sync_layer(0);
      ++calls;
    }
    writer.sync_layer(0);
    CHECK(calls == 3);
    CHECK(writer.stored_blocks(0, 0) == 10);
    for (std::int32_t block = 0; block < 10; ++block) CHECK(s.holds(id, 0, 0, block));
    machine.sync(s.r.stream);
  });
}
