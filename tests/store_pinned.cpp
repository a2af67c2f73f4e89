// SPDX-License-Identifier: Apache-2.0
/// @file
/// A block store in pinned memory that comes in chunks, and in the background. Include the backend's
/// support header first.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/pinned_allocator.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/offload_rig.hpp"
#include "support/paged_pool.hpp"

namespace {

using backend = test::backend;
using paged = pulseinfer::paged_backend<backend>;
using pulseinfer::pinned_options;
using pulseinfer::unit_status;

constexpr std::int32_t blocks = 24;
// 4,608 bytes: neither a part of a page nor a multiple of one.
constexpr pulseinfer::kv_geometry geometry{
    .layers = 1, .kv_heads = 3, .head_dim = 48, .block_tokens = 8};
static_assert(geometry.unit_bytes() == 4'608);

/// Of registered memory its device sees each further chunk a page further off.
struct apart_backend : backend {
  explicit apart_backend(const backend& base) : backend(base) {}
  template <class T>
  [[nodiscard]] T* device_pointer(T* p) const {
    return p + 4'096 / sizeof(T) * static_cast<std::size_t>((*asked)++);
  }
  std::shared_ptr<int> asked = std::make_shared<int>(0);
};

/// Nobody fills it but who waits for it.
pinned_options later() {
  pinned_options options;
  options.unit_bytes = static_cast<std::size_t>(geometry.unit_bytes());
  options.max_chunk_bytes = 9 * 4'096;  // eight units
  options.in_background = true;
  options.workers = 0;
  return options;
}

}  // namespace

TEST_CASE("store pinned: the payload is a region in chunks of units, used before it is there") {
  test::each_backend([](backend machine) {
    test::paged_pool<backend> pages(machine, geometry, 2 * blocks);
    paged memory(machine, later());
    pulseinfer::block_store<paged> store(memory, geometry,
                                         {.capacity_bytes = blocks * geometry.unit_bytes(),
                                          .max_sequences = 2,
                                          .max_blocks = blocks});
    auto* const region = memory.resource().find(store.payload());
    REQUIRE(region != nullptr);
    CHECK(region->bytes() == static_cast<std::size_t>(blocks * geometry.unit_bytes()));
    CHECK(region->chunk_bytes() % static_cast<std::size_t>(geometry.unit_bytes()) == 0);
    CHECK(region->report().chunks == 3);
    CHECK(region->ready_bytes() == 0);

    auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
    pulseinfer::transfer_engine<backend, pulseinfer::block_store<paged>> mover(
        machine, store, pages.pool(),
        {.staging_bytes = 4 * geometry.unit_bytes(), .chunk_bytes = 2 * geometry.unit_bytes()});
    const auto id = store.open_sequence().value();
    test::unit_targets out, in;
    for (std::int32_t b = 0; b < blocks; ++b) {
      pages.put(0, b, test::stamp(geometry, 1, 0, b));
      out.push_back({0, b, b});
      in.push_back({0, b, 2 * blocks - 1 - b});
    }
    pages.upload(stream);
    const auto arrives = [&](pulseinfer::transfer_way way) {
      const test::unit_bytes blank(static_cast<std::size_t>(geometry.unit_bytes()),
                                   std::byte{0xcc});
      for (std::int32_t b = blocks; b < 2 * blocks; ++b) pages.put(0, b, blank);
      pages.upload(stream);
      mover.set_way(way);
      auto t = mover.recall_units(0, {&id, 1}, in, stream).value();
      t.sync();
      pages.download(stream);
      for (std::int32_t b = 0; b < blocks; ++b) {
        CHECK(t.status(static_cast<std::size_t>(b)) == unit_status::moved);
        CHECK((pages.get(0, 2 * blocks - 1 - b) == test::stamp(geometry, 1, 0, b)));
      }
    };
    auto leaving = mover.offload(0, {&id, 1}, out, stream).value();
    leaving.sync();
    arrives(pulseinfer::transfer_way::staged);
    CHECK(region->ready_bytes() == 0);
    {
      // What kernels would read is not there yet, and that is said.
      const auto lease = store.acquire(id, 0);
      CHECK_THROWS_AS((void)lease.device_view(), std::logic_error);
      mover.set_way(pulseinfer::transfer_way::pull);
      auto t = mover.recall_units(0, {&id, 1}, in, stream).value();
      CHECK_THROWS_AS(t.sync(), std::logic_error);
      CHECK(t.phase() == pulseinfer::transfer_phase::failed);
    }
    region->sync_ready(0, region->bytes());
    CHECK(region->ready_bytes() == region->bytes());
    arrives(pulseinfer::transfer_way::pull);
    arrives(pulseinfer::transfer_way::batched);
    CHECK(store.counts().free == 0);
  });
}

TEST_CASE("store pinned: chunks that would end within units are refused") {
  pinned_options options = later();
  options.unit_bytes = 1;
  options.max_chunk_bytes = 4'096;
  CHECK_THROWS_WITH_AS(
      pulseinfer::block_store<paged>(paged(test::make_backend(), options), geometry,
                                     {.capacity_bytes = blocks * geometry.unit_bytes()}),
      "block_store: pinned chunks of 4096 bytes end within units of 4608, expected "
      "pinned_options::unit_bytes to be that",
      std::invalid_argument);
}

TEST_CASE("fault 101: chunks that the device sees apart are not taken for one piece of memory") {
  pinned_options options = later();
  options.in_background = false;
  const apart_backend machine(test::make_backend());
  const pulseinfer::paged_backend<apart_backend> memory(machine, options);
  using store_type = pulseinfer::block_store<pulseinfer::paged_backend<apart_backend>>;
  const pulseinfer::block_store_options sizes{
      .capacity_bytes = blocks * geometry.unit_bytes(), .max_sequences = 1, .max_blocks = blocks};
  const store_type in_three(memory, geometry, sizes);
  CHECK(memory.resource().find(in_three.payload())->report().chunks == 3);
  CHECK_THROWS_AS((void)in_three.device_payload(), pulseinfer::device_error);
  options.max_chunk_bytes = pinned_options::most_chunk_bytes;
  *machine.asked = 5;
  const pulseinfer::paged_backend<apart_backend> whole(machine, options);
  const store_type in_one(whole, geometry, sizes);
  CHECK(in_one.device_payload() == in_one.payload() + 5 * 4'096);  // as the device says
}
