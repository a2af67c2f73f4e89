// SPDX-License-Identifier: Apache-2.0
/// @file
/// The host tier: life cycles, counts, eviction, leases, and a slow model that it is held against.
#include "pulseinfer/block_store.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/rounds.hpp"
#include "support/store_model.hpp"
#include "support/store_shelf.hpp"

namespace {

using namespace store_test;
using store_type = pulseinfer::block_store<test::backend>;
using lease_type = store_type::lease;

// A slot is not a number, and a handle is not an index: neither is taken for the other.
static_assert(!std::is_convertible_v<host_slot, std::int32_t> &&
              !std::is_convertible_v<std::int32_t, host_slot> &&
              !std::is_convertible_v<host_slot, sequence_id>);
static_assert(!std::is_copy_constructible_v<lease_type> &&
              std::is_nothrow_move_constructible_v<lease_type> &&
              std::is_nothrow_move_assignable_v<lease_type>);

/// A store that is asked for its counts after each of its changes: they add up, whatever happened.
class checked_store {
 public:
  explicit checked_store(std::int64_t units, std::int32_t sequences = 8, std::int32_t blocks = 64)
      : store_(test::make_backend(), geometry,
               {.capacity_bytes = units * unit_bytes,
                .max_sequences = sequences,
                .max_blocks = blocks}) {}

  store_type* operator->() { return &store_; }

  [[nodiscard]] store_counts counts() const { return balanced(store_.counts()); }
  /// free, writing, evictable, pinned, quarantined
  void expect(std::int64_t free, std::int64_t writing, std::int64_t evictable, std::int64_t pinned,
              std::int64_t quarantined) const {
    const store_counts c = counts();
    CHECK(c.free == free);
    CHECK(c.writing == writing);
    CHECK(c.evictable == evictable);
    CHECK(c.pinned == pinned);
    CHECK(c.quarantined == quarantined);
  }

  sequence_id open() {
    const auto id = store_.open_sequence();
    REQUIRE(id.has_value());
    (void)counts();
    return *id;
  }
  /// A slot for the unit, filled with its stamp.
  host_slot reserve(sequence_id id, unit at) {
    const auto got = store_.reserve(id, at.layer, logical_block{at.block});
    REQUIRE(got.outcome == reserve_outcome::reserved);
    (void)counts();
    const stamp content = stamp_of(id, at);
    write_stamp(store_.writable(got.slot), content);
    return got.slot;
  }
  void put(sequence_id id, unit at) {
    store_.commit(reserve(id, at));
    (void)counts();
  }
  /// Blocks [0, blocks) of layer 0.
  void put_chain(sequence_id id, std::int32_t blocks) {
    for (std::int32_t block = 0; block < blocks; ++block) put(id, {0, block});
  }
  void fail_to_put(sequence_id id, unit at) {
    const store_counts before = counts();
    const auto got = store_.reserve(id, at.layer, logical_block{at.block});
    CHECK(got.outcome == reserve_outcome::full);
    CHECK(got.slot == host_slot::none);
    CHECK(counts() == before);
  }
  [[nodiscard]] bool has(sequence_id id, unit at) {
    return store_.contains(id, at.layer, logical_block{at.block});
  }
  [[nodiscard]] std::vector<unit> units_of(sequence_id id) {
    std::vector<unit> found;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      for (std::int32_t block = 0; block < store_.max_blocks(); ++block) {
        if (has(id, {layer, block})) found.push_back({layer, block});
      }
    }
    return found;
  }

 private:
  store_type store_;
};

/// True if the lease finds the unit with its own content.
bool holds(const lease_type& lease, sequence_id id, unit at) {
  const std::byte* const bytes = lease.find(logical_block{at.block});
  return bytes != nullptr && read_stamp(bytes) == stamp_of(id, at);
}

/// Kernel body: the first eight bytes of blocks -1, 0, 1, ..., or none.
struct find_blocks {
  static constexpr std::uint64_t none = 0x6e6f6e65;
  pulseinfer::store_view view;
  std::uint64_t* found;
  PULSEINFER_HD void operator()(std::int64_t, std::int64_t word) const {
    const std::byte* const bytes = view.find(word - 1);
    found[word] = bytes == nullptr ? none : *reinterpret_cast<const std::uint64_t*>(bytes);
  }
};

std::vector<unit> chain(std::int32_t blocks) {
  std::vector<unit> all;
  for (std::int32_t block = 0; block < blocks; ++block) all.push_back({0, block});
  return all;
}

}  // namespace

TEST_CASE("block store: a new one is free and of the size asked for, in whole units") {
  const store_type store(test::make_backend(), geometry,
                         {.capacity_bytes = 3 * unit_bytes + unit_bytes - 1, .max_blocks = 5});
  CHECK(store.counts() == store_counts{.free = 3, .capacity = 3});
  CHECK(store.unit_bytes() == unit_bytes);
  CHECK(store.max_blocks() == 5);
  CHECK(store.geometry() == geometry);
}

TEST_CASE("block store: a unit goes from free by writing to evictable and back") {
  checked_store store(3);
  const sequence_id id = store.open();
  store.expect(3, 0, 0, 0, 0);
  const host_slot slot = store.reserve(id, {1, 4});
  store.expect(2, 1, 0, 0, 0);
  store->commit(slot);
  store.expect(2, 0, 1, 0, 0);
  {
    const lease_type lease = store->acquire(id, 1);
    store.expect(2, 0, 0, 1, 0);
    CHECK(holds(lease, id, {1, 4}));
    store.put(id, {0, 0});  // of the same sequence: pinned from the start
    store.expect(1, 0, 0, 2, 0);
  }
  store.expect(1, 0, 2, 0, 0);
  CHECK(store->close_sequence(id) == close_outcome::closed);
  store.expect(3, 0, 0, 0, 0);
}

TEST_CASE("fault 37: a unit is not readable before it is committed") {
  checked_store store(2);
  const sequence_id id = store.open();
  const lease_type lease = store->acquire(id, 0);
  const host_slot slot = store.reserve(id, {0, 1});
  CHECK(lease.find(logical_block{1}) == nullptr);
  CHECK(!store.has(id, {0, 1}));
  const auto again = store->reserve(id, 0, logical_block{1});  // nor is it written twice at a time
  CHECK(again.outcome == reserve_outcome::writing);
  CHECK(again.slot == host_slot::none);
  store->commit(slot);
  CHECK(holds(lease, id, {0, 1}));  // the lease is older than the unit
  CHECK(store.has(id, {0, 1}));
  CHECK(store->reserve(id, 0, logical_block{1}).outcome == reserve_outcome::exists);
  store.expect(1, 0, 0, 1, 0);
}

TEST_CASE("block store: kernels find what a lease finds") {
  auto machine = test::make_backend();
  checked_store store(6, 2, 8);
  const sequence_id id = store.open(), other = store.open();
  for (const std::int32_t block : {0, 3, 7}) store.put(id, {1, block});
  store.put(other, {1, 2});
  store.put(id, {0, 1});
  const lease_type lease = store->acquire(id, 1);
  const pulseinfer::store_view view = lease.device_view();
  const host_slot writing = store.reserve(id, {1, 4});
  auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
  pulseinfer::pinned_buffer<std::uint64_t, test::backend> found(machine, 11);
  const auto check = [&] {
    machine.for_each({1, 11}, {}, 0, find_blocks{view, found.device_data()}, stream);
    machine.sync(stream);
    for (std::int32_t block = -1; block < 10; ++block) {
      CAPTURE(block);
      std::uint64_t expected = find_blocks::none;
      const std::byte* const bytes = lease.find(logical_block{block});
      if (bytes != nullptr) std::memcpy(&expected, bytes, sizeof expected);
      CHECK(found[static_cast<std::size_t>(block + 1)] == expected);
    }
  };
  check();
  CHECK(found[5] == find_blocks::none);
  store->commit(writing);  // the view is older
  check();
  CHECK(found[5] != find_blocks::none);
  CHECK(found[1] != find_blocks::none);
  machine.for_each({1, 11}, {}, 0, find_blocks{lease_type{}.device_view(), found.device_data()},
                   stream);
  machine.sync(stream);
  for (std::size_t i = 0; i < 11; ++i) CHECK(found[i] == find_blocks::none);
}

TEST_CASE("block store: an aborted unit stays absent and can be written anew") {
  checked_store store(1);
  const sequence_id id = store.open();
  store->abort(store.reserve(id, {0, 3}));
  store.expect(1, 0, 0, 0, 0);
  CHECK(!store.has(id, {0, 3}));
  CHECK(store->acquire(id, 0).find(logical_block{3}) == nullptr);
  store.put(id, {0, 3});
  CHECK(holds(store->acquire(id, 0), id, {0, 3}));
}

TEST_CASE("block store: a write ends once") {
  checked_store store(3);
  const sequence_id id = store.open();
  const host_slot committed = store.reserve(id, {0, 0});
  const host_slot aborted = store.reserve(id, {0, 1});
  store->commit(committed);
  store->abort(aborted);
  const store_counts before = store.counts();
  for (const host_slot slot : {committed, aborted, static_cast<host_slot>(2), host_slot::none,
                               static_cast<host_slot>(3), static_cast<host_slot>(-2)}) {
    CHECK_THROWS_WITH_AS(store->commit(slot), doctest::Contains("is not being written"),
                         std::logic_error);
    CHECK_THROWS_AS(store->abort(slot), std::logic_error);
    CHECK_THROWS_AS((void)store->writable(slot), std::logic_error);
  }
  CHECK(store.counts() == before);
  CHECK(holds(store->acquire(id, 0), id, {0, 0}));
}

TEST_CASE("block store: a slot that is written anew is not its former writer's") {
  checked_store store(2);
  const sequence_id id = store.open();
  const auto is_refused = [&](host_slot stale) {
    CHECK_THROWS_AS(store->commit(stale), std::logic_error);
    CHECK_THROWS_AS(store->commit(std::span<const host_slot>(&stale, 1)), std::logic_error);
    CHECK_THROWS_AS(store->abort(stale), std::logic_error);
    CHECK_THROWS_AS((void)store->writable(stale), std::logic_error);
  };
  // The same unit once more, also while its block stays what it is.
  store.put(id, {1, 0});
  const host_slot aborted = store.reserve(id, {0, 0});
  store->abort(aborted);
  const host_slot anew = store.reserve(id, {0, 0});
  CHECK(index_of(anew) == index_of(aborted));
  const store_counts before = store.counts();
  is_refused(aborted);
  CHECK(store.counts() == before);
  store->commit(anew);
  is_refused(anew);

  // Another's unit in the place of one that was committed, and has been given up since.
  CHECK(store->close_sequence(id) == close_outcome::closed);
  const sequence_id other = store.open();
  const host_slot slots[] = {store.reserve(other, {0, 0}), store.reserve(other, {0, 1})};
  is_refused(anew);
  is_refused(aborted);
  CHECK(store.counts().writing == 2);
  store->commit(slots);
  CHECK(store.counts().evictable == 2);
}

TEST_CASE("block store: a stale handle throws and changes nothing") {
  checked_store store(4, 2);
  const sequence_id stale = store.open();
  store.put(stale, {0, 0});
  CHECK(store->close_sequence(stale) == close_outcome::closed);
  const sequence_id id = store.open();
  CHECK(id.index == stale.index);  // the place is used again, the handle is another
  CHECK(id.generation != stale.generation);
  store.put(id, {0, 1});
  const store_counts before = store.counts();
  for (const sequence_id wrong : {stale, sequence_id{}, sequence_id{-1, 1}, sequence_id{2, 1},
                                  sequence_id{1, 1}, sequence_id{id.index, id.generation + 1}}) {
    CHECK_THROWS_WITH_AS((void)store->reserve(wrong, 0, logical_block{0}),
                         doctest::Contains("stale or unknown"), std::invalid_argument);
    CHECK_THROWS_AS((void)store->acquire(wrong, 0), std::invalid_argument);
    CHECK_THROWS_AS((void)store->contains(wrong, 0, logical_block{0}), std::invalid_argument);
    CHECK_THROWS_AS((void)store->close_sequence(wrong), std::invalid_argument);
  }
  CHECK(store.counts() == before);
  CHECK(!store.has(id, {0, 0}));  // nothing of the sequence before
  CHECK(store.has(id, {0, 1}));
}

TEST_CASE("block store: a layer or block out of range is named") {
  checked_store store(2, 2, 4);
  const sequence_id id = store.open();
  CHECK_THROWS_WITH_AS((void)store->reserve(id, layers, logical_block{0}),
                       "block_store: layer is 2, expected 0 to 1", std::out_of_range);
  CHECK_THROWS_WITH_AS((void)store->reserve(id, 0, logical_block{4}),
                       "block_store: block is 4, expected 0 to 3", std::out_of_range);
  CHECK_THROWS_AS((void)store->reserve(id, -1, logical_block{0}), std::out_of_range);
  CHECK_THROWS_AS((void)store->reserve(id, 0, logical_block{-1}), std::out_of_range);
  CHECK_THROWS_AS((void)store->acquire(id, layers), std::out_of_range);
  CHECK_THROWS_AS((void)store->acquire(id, -1), std::out_of_range);
  CHECK_THROWS_AS((void)store->contains(id, 0, logical_block{4}), std::out_of_range);
  CHECK_THROWS_AS((void)store->contains(id, 2, logical_block{0}), std::out_of_range);
  store.expect(2, 0, 0, 0, 0);
  store.put(id, {0, 1});
  const lease_type lease = store->acquire(id, 0);
  for (const std::int32_t block : {-1, 4, std::numeric_limits<std::int32_t>::min(),
                                   std::numeric_limits<std::int32_t>::max()}) {
    CHECK(lease.find(logical_block{block}) == nullptr);  // reading never throws
  }
}

TEST_CASE("block store: options that make no sense are refused") {
  const auto make = [](pulseinfer::block_store_options options) {
    (void)store_type(test::make_backend(), geometry, options);
  };
  CHECK_THROWS_WITH_AS(make({.capacity_bytes = 63}),
                       "block_store: capacity_bytes is 63, expected at least one unit, which is 64",
                       std::invalid_argument);
  CHECK_THROWS_AS(make({.capacity_bytes = 0}), std::invalid_argument);
  CHECK_THROWS_AS(make({.capacity_bytes = -64}), std::invalid_argument);
  CHECK_THROWS_WITH_AS(make({.capacity_bytes = unit_bytes << 31}),
                       doctest::Contains("more than 2147483647 units"), std::invalid_argument);
  for (const std::int32_t sequences : {0, -1, 65'537}) {
    CHECK_THROWS_WITH_AS(make({.capacity_bytes = 64, .max_sequences = sequences}),
                         doctest::Contains("max_sequences is "), std::invalid_argument);
  }
  for (const std::int32_t blocks : {0, -1, (1 << 24) + 1}) {
    CHECK_THROWS_WITH_AS(make({.capacity_bytes = 64, .max_blocks = blocks}),
                         doctest::Contains("max_blocks is "), std::invalid_argument);
  }
  CHECK_THROWS_AS(store_type(test::make_backend(), {}, {.capacity_bytes = 64}),
                  std::invalid_argument);
  constexpr pulseinfer::kv_geometry large{
      .layers = 1, .kv_heads = 64, .head_dim = 1 << 16, .block_tokens = 64};
  CHECK_THROWS_AS(
      store_type(test::make_backend(), large, {.capacity_bytes = large.unit_bytes() << 28}),
      pulseinfer::out_of_memory);
}

TEST_CASE("block store: no more sequences than asked for, closing ones included") {
  checked_store store(4, 2);
  const sequence_id a = store.open();
  const sequence_id b = store.open();
  CHECK(a.index != b.index);
  CHECK(!store->open_sequence().has_value());
  lease_type lease = store->acquire(a, 0);
  CHECK(store->close_sequence(a) == close_outcome::deferred);
  CHECK(!store->open_sequence().has_value());
  lease.release();
  const sequence_id c = store.open();
  CHECK(c.index == a.index);
  CHECK(c.generation != a.generation);
  CHECK(!store->open_sequence().has_value());
  CHECK(store->close_sequence(b) == close_outcome::closed);
  CHECK(store->close_sequence(c) == close_outcome::closed);
}

// Eviction.

TEST_CASE("block store: a full store gives up the last block of the least recently used sequence") {
  checked_store store(5);
  const sequence_id old = store.open();
  const sequence_id young = store.open();
  store.put_chain(old, 3);
  store.put_chain(young, 2);
  const sequence_id writer = store.open();
  store.put(writer, {0, 0});
  CHECK(store.units_of(old) == chain(2));  // still a prefix
  store.put(writer, {0, 1});
  CHECK(store.units_of(old) == chain(1));
  store.put(writer, {0, 2});
  CHECK(store.units_of(old).empty());
  CHECK(store.units_of(young) == chain(2));
  store.put(writer, {0, 3});
  CHECK(store.units_of(young) == chain(1));
  store.expect(0, 0, 5, 0, 0);
  store.put(old, {1, 63});  // an emptied sequence is open as before
  CHECK(store.units_of(young).empty());
}

TEST_CASE("block store: of the layers that have the last block, the highest gives it up") {
  checked_store store(5);
  const sequence_id id = store.open();
  store.put(id, {1, 2});
  store.put(id, {0, 2});
  store.put(id, {0, 3});
  store.put(id, {1, 0});
  store.put(id, {0, 0});
  const sequence_id writer = store.open();
  const unit expected[] = {{0, 3}, {1, 2}, {0, 2}, {1, 0}, {0, 0}};
  for (std::int32_t i = 0; i < 5; ++i) {
    CHECK(store.has(id, expected[i]));
    store.put(writer, {0, i});
    CHECK(!store.has(id, expected[i]));
    CHECK(store.units_of(id).size() == static_cast<std::size_t>(4 - i));
  }
}

TEST_CASE("fault 4: the tail goes first, in whatever order the transfers of a chain end") {
  checked_store store(5);
  const sequence_id id = store.open();
  std::vector<host_slot> slots;
  for (std::int32_t block = 0; block < 4; ++block) slots.push_back(store.reserve(id, {0, block}));
  for (std::size_t i = 4; i > 0; --i) store->commit(slots[i - 1]);
  const sequence_id writer = store.open();
  store.put(writer, {0, 0});
  for (std::int32_t left = 3; left >= 0; --left) {
    store.put(writer, {0, 4 - left});
    CHECK(store.units_of(id) == chain(left));
  }
}

TEST_CASE("fault 4: recency is of reservations, not of the transfers that end") {
  checked_store store(4);
  const sequence_id before = store.open();
  const sequence_id after = store.open();
  const host_slot slow[] = {store.reserve(before, {0, 0}), store.reserve(before, {0, 1})};
  store.put_chain(after, 2);
  for (const host_slot slot : slow) store->commit(slot);  // the last to end, the first to go
  const sequence_id writer = store.open();
  for (std::int32_t block = 0; block < 2; ++block) {
    store.put(writer, {0, block});
    CHECK(store.units_of(before) == chain(1 - block));
    CHECK(store.units_of(after) == chain(2));
  }
}

TEST_CASE("block store: a tail that is committed after a later one was evicted is found") {
  checked_store store(3);
  const sequence_id id = store.open();
  store.put(id, {0, 0});
  const host_slot slow = store.reserve(id, {0, 5});
  store.put(id, {0, 7});
  const sequence_id writer = store.open();
  store.put(writer, {0, 0});  // block 7 goes
  CHECK(store.units_of(id) == chain(1));
  store->commit(slow);
  store.put(writer, {0, 1});
  CHECK(store.units_of(id) == chain(1));  // block 5, not block 0
  store.put(writer, {0, 2});
  CHECK(store.units_of(id).empty());
}

TEST_CASE("fault 4: recency is of uses, not of their number") {
  checked_store store(2);
  const sequence_id often = store.open();
  const sequence_id once = store.open();
  store.put(often, {0, 0});
  store.put(once, {0, 0});
  for (int i = 0; i < 100; ++i) (void)store->acquire(often, i % layers);
  (void)store->acquire(once, 0);
  const sequence_id writer = store.open();
  store.put(writer, {0, 0});
  CHECK(!store.has(often, {0, 0}));
  CHECK(store.has(once, {0, 0}));
}

TEST_CASE("block store: reading and writing make a sequence recent") {
  for (const bool by_reading : {true, false}) {
    CAPTURE(by_reading);
    checked_store store(4);
    const sequence_id used = store.open();
    const sequence_id unused = store.open();
    store.put(used, {0, 0});
    store.put(unused, {0, 0});
    if (by_reading) {
      (void)store->acquire(used, 1);
    } else {
      store.put(used, {1, 0});
    }
    const sequence_id writer = store.open();
    while (store.counts().free > 0) {
      store.put(writer, {0, static_cast<std::int32_t>(store.counts().free)});
    }
    store.put(writer, {0, 9});
    CHECK(!store.has(unused, {0, 0}));
    CHECK(store.has(used, {0, 0}));
  }
}

TEST_CASE("block store: what is pinned, being written or the writer's own is not given up") {
  checked_store store(4);
  const sequence_id pinned = store.open();
  const sequence_id writing = store.open();
  const sequence_id writer = store.open();
  store.put(pinned, {0, 0});
  const lease_type lease = store->acquire(pinned, 1);  // a lease on any layer pins the sequence
  const host_slot slot = store.reserve(writing, {0, 0});
  store.put(writer, {0, 0});
  store.put(writer, {0, 1});
  store.expect(0, 1, 2, 1, 0);
  store.fail_to_put(writer, {0, 2});
  CHECK(store.units_of(writer) == chain(2));
  CHECK(store.units_of(pinned) == chain(1));
  store->commit(slot);
  store.put(writer, {0, 2});  // now there is one to give up
  CHECK(store.units_of(writing).empty());
  store.fail_to_put(writer, {0, 3});
}

TEST_CASE("block store: the writer being the least recent does not protect the others") {
  checked_store store(2);
  const sequence_id writer = store.open();
  const sequence_id other = store.open();
  store.put(writer, {0, 0});
  store.put(other, {0, 0});
  store.put(writer, {0, 1});
  CHECK(store.units_of(other).empty());
  CHECK(store.units_of(writer) == chain(2));
}

TEST_CASE("fault 1: what was looked up stays while others fill the store") {
  checked_store store(8);
  const sequence_id hit = store.open();
  store.put_chain(hit, 4);
  const sequence_id other = store.open();
  store.put_chain(other, 4);
  lease_type lease = store->acquire(hit, 0);
  const sequence_id writer = store.open();
  store.put_chain(writer, 4);  // everything that may go has gone
  CHECK(store.units_of(other).empty());
  store.fail_to_put(writer, {0, 4});
  for (const unit at : chain(4)) CHECK(holds(lease, hit, at));
  store.expect(0, 0, 4, 4, 0);
  lease.release();  // a cancelled request lets go
  store.put(writer, {0, 4});
  CHECK(store.units_of(hit) == chain(3));
}

TEST_CASE("fault 2: a unit that does not fit leaves the others of its batch alone") {
  checked_store store(3);
  const sequence_id stays = store.open();
  store.put_chain(stays, 2);
  const lease_type lease = store->acquire(stays, 0);
  const sequence_id blocked = store.open();
  store.put(blocked, {0, 0});
  const sequence_id more = store.open();
  store.fail_to_put(blocked, {0, 1});
  store.put(more, {0, 0});  // takes the place of the blocked one
  CHECK(store->reserve(stays, 0, logical_block{1}).outcome == reserve_outcome::exists);
  CHECK(store.units_of(blocked).empty());
  CHECK(store.units_of(more) == chain(1));
  CHECK(store.units_of(stays) == chain(2));
}

TEST_CASE("fault 3: all units that were put are found, the tail too") {
  checked_store store(300, 2, 217);
  const sequence_id id = store.open();
  for (std::int32_t block = 0; block < 217; ++block) store.put(id, {block % layers, block});
  CHECK(store.units_of(id).size() == 217);
  const lease_type leases[] = {store->acquire(id, 0), store->acquire(id, 1)};
  int found = 0;
  for (std::int32_t block = 0; block < 217; ++block) {
    found += holds(leases[block % layers], id, {block % layers, block}) ? 1 : 0;
    CHECK(leases[1 - block % layers].find(logical_block{block}) ==
          nullptr);  // that layer does not have it
  }
  CHECK(found == 217);
}

// Leases.

TEST_CASE("fault 7: a lease that is dropped unread gives its units back") {
  checked_store store(4);
  const sequence_id id = store.open();
  store.put_chain(id, 3);
  const store_counts before = store.counts();
  {
    const lease_type first = store->acquire(id, 0);
    const lease_type second = store->acquire(id, 1);
    const lease_type third = store->acquire(id, 0);
    store.expect(1, 0, 0, 3, 0);  // units are pinned, not leases
  }
  CHECK(store.counts() == before);
}

TEST_CASE("fault 9: a lease is given back once") {
  checked_store store(4);
  const sequence_id id = store.open();
  store.put_chain(id, 2);
  lease_type first = store->acquire(id, 0);
  lease_type second = store->acquire(id, 0);
  first.release();
  first.release();
  CHECK(!first);
  CHECK(first.find(logical_block{0}) == nullptr);
  store.expect(2, 0, 0, 2, 0);  // the second still pins
  CHECK(holds(second, id, {0, 0}));
  second.release();
  store.expect(2, 0, 2, 0, 0);
}

TEST_CASE("block store: many blocks are found at once as they are one by one") {
  for (const std::int32_t blocks : {5, 64, 1025, 3000}) {  // also rows longer than what is wanted
    checked_store store(200, 2, blocks);
    const sequence_id id = store.open();
    pulseinfer::detail::random_source draw(17);
    for (int i = 0; i < 100; ++i) {
      const unit at{0, static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(blocks)))};
      if (!store.has(id, at)) store.put(id, at);
    }
    const lease_type lease = store->acquire(id, 0);
    for (const std::size_t count : {0, 1, 63, 64, 65, 300}) {
      std::vector<logical_block> wanted;
      for (std::size_t i = 0; i < count; ++i) {
        const auto drawn = draw.below(2 * static_cast<std::uint64_t>(blocks));
        wanted.push_back(logical_block{static_cast<std::int32_t>(drawn) - blocks / 2});
      }
      if (count > 1) wanted[0] = logical_block{INT32_MIN};
      if (count > 1) wanted[1] = logical_block{INT32_MAX};
      const std::byte untouched{};
      std::vector<const std::byte*> found(count + 1, &untouched);
      lease.prefetch(wanted);  // a hint, whatever is wanted
      lease_type().prefetch(wanted);
      lease.find(wanted, found);
      for (std::size_t i = 0; i < count; ++i) CHECK(found[i] == lease.find(wanted[i]));
      CHECK(found[count] == &untouched);
      lease_type().find(wanted, found);
      for (std::size_t i = 0; i < count; ++i) CHECK(found[i] == nullptr);
      if (count > 0) {
        CHECK_THROWS_AS(lease.find(wanted, std::span(found).first(count - 1)),
                        std::invalid_argument);
      }
    }
  }
}

TEST_CASE("block store: a batch gets what its blocks would get one by one") {
  // Two stores, full of named blocks and of an open sequence; one is asked in batches.
  const auto make = [] {
    return store_type(test::make_backend(), geometry,
                      {.capacity_bytes = 48 * unit_bytes,
                       .max_sequences = 8,
                       .max_blocks = 32,
                       .max_events = 1000});
  };
  store_type single = make();
  store_type batched = make();
  pulseinfer::detail::random_source draw(18);
  for (int round = 0; round < 60; ++round) {
    const sequence_id a = single.open_sequence().value();
    const sequence_id b = batched.open_sequence().value();
    REQUIRE(a == b);
    std::vector<logical_block> blocks;  // in order, and some of them twice
    const auto count = static_cast<std::int32_t>(1 + draw.below(30));
    for (std::int32_t block = 0; block < count; ++block) {
      blocks.push_back(logical_block{block});
      if (draw.one_in(8)) blocks.push_back(static_cast<logical_block>(draw.below(32)));
    }
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      std::vector<pulseinfer::reservation> got(blocks.size() + 1, {reserve_outcome::writing, {}});
      batched.reserve(b, layer, blocks, got);
      CHECK(got.back().outcome == reserve_outcome::writing);
      std::vector<host_slot> slots, single_slots;
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        const auto one = single.reserve(a, layer, blocks[i]);
        CHECK(one.outcome == got[i].outcome);
        if (one.outcome != reserve_outcome::reserved) continue;
        single_slots.push_back(one.slot);
        slots.push_back(got[i].slot);
      }
      CHECK(single.counts() == batched.counts());
      for (const host_slot slot : single_slots) single.commit(slot);
      batched.commit(slots);
      CHECK(single.counts() == batched.counts());
    }
    std::vector<pulseinfer::block_key> keys;
    for (std::int32_t block = 0; block < count && single.contains(a, 0, logical_block{block});
         ++block) {
      keys.push_back({draw.below(40) << 58, draw.below(4)});
    }
    std::vector<pulseinfer::name_outcome> names(keys.size());
    batched.name_blocks(b, logical_block{0}, keys, names);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      CHECK(single.name_block(a, static_cast<logical_block>(i), keys[i]) == names[i]);
    }
    if (round % 7 != 0) {
      CHECK(single.close_sequence(a) == batched.close_sequence(b));
    } else if (round % 3 == 0) {
      CHECK(single.trim(a, 1) == batched.trim(b, 1));
      CHECK(single.close_sequence(a) == batched.close_sequence(b));
    } else if (round > 40) {
      CHECK(single.close_sequence(a) == batched.close_sequence(b));
    }
    std::vector<pulseinfer::store_event> told(1000), told_batched(1000);
    told.resize(single.drain_events(told));
    told_batched.resize(batched.drain_events(told_batched));
    CHECK(told == told_batched);
    CHECK(single.counts() == batched.counts());
  }
}

TEST_CASE("block store: a batch with something wrong in it changes nothing") {
  checked_store store(8);
  const sequence_id id = store.open();
  store.put(id, {0, 0});
  const store_counts before = store.counts();
  pulseinfer::reservation got[3];
  const logical_block bad[] = {logical_block{1}, logical_block{2}, logical_block{64}};
  CHECK_THROWS_AS(store->reserve(id, 0, bad, got), std::out_of_range);
  CHECK_THROWS_AS(store->reserve(id, layers, bad, got), std::out_of_range);
  CHECK_THROWS_AS(store->reserve(id, 0, bad, std::span(got).first(2)), std::invalid_argument);
  CHECK_THROWS_AS(store->reserve({id.index, id.generation + 1}, 0, bad, got),
                  std::invalid_argument);
  const pulseinfer::block_key keys[] = {{1, 1}, {2, 2}};
  pulseinfer::name_outcome named[2];
  CHECK_THROWS_AS(store->name_blocks(id, logical_block{63}, keys, named), std::out_of_range);
  CHECK_THROWS_AS(store->name_blocks(id, logical_block{-1}, keys, named), std::out_of_range);
  CHECK_THROWS_AS(store->name_blocks(id, logical_block{0}, keys, std::span(named).first(1)),
                  std::invalid_argument);
  CHECK_THROWS_AS(store->name_blocks({}, logical_block{0}, keys, named), std::invalid_argument);
  CHECK(store.counts() == before);
  CHECK(store->ready_blocks(keys) == 0);
  store->reserve(id, 0, {}, {});
  store->commit(std::span<const host_slot>{});
  store->name_blocks(id, logical_block{0}, {}, {});
  const host_slot slots[] = {store.reserve(id, {0, 1}), store.reserve(id, {0, 2}), host_slot{7}};
  CHECK_THROWS_AS(store->commit(slots), std::logic_error);
  CHECK(store.has(id, {0, 2}));
}

TEST_CASE("block store: leases move") {
  checked_store store(4);
  const sequence_id a = store.open();
  const sequence_id b = store.open();
  store.put_chain(a, 1);
  store.put_chain(b, 2);
  lease_type none;
  CHECK(!none);
  CHECK(none.find(logical_block{0}) == nullptr);
  none.release();

  lease_type first = store->acquire(a, 0);
  lease_type moved(std::move(first));
  CHECK(!first);  // NOLINT: a moved-from lease holds nothing
  CHECK(holds(moved, a, {0, 0}));
  store.expect(1, 0, 2, 1, 0);

  lease_type other = store->acquire(b, 0);
  store.expect(1, 0, 0, 3, 0);
  moved = std::move(other);
  CHECK(!other);                // NOLINT
  store.expect(1, 0, 1, 2, 0);  // what it held before is given back at once
  CHECK(holds(moved, b, {0, 1}));
  lease_type& same = moved;
  moved = std::move(same);
  CHECK(holds(moved, b, {0, 1}));
  moved = {};
  store.expect(1, 0, 3, 0, 0);
}

TEST_CASE("fault 10: closing a sequence leaves a held block to its reader") {
  checked_store store(4, 2);
  const sequence_id id = store.open();
  store.put_chain(id, 3);
  lease_type lease = store->acquire(id, 0);
  lease_type other = store->acquire(id, 1);
  CHECK(store->close_sequence(id) == close_outcome::deferred);
  store.expect(1, 0, 0, 0, 3);
  CHECK_THROWS_AS((void)store->acquire(id, 0), std::invalid_argument);
  const sequence_id writer = store.open();
  store.put(writer, {0, 0});
  store.fail_to_put(writer, {0, 1});  // quarantined slots are nobody's
  for (const unit at : chain(3)) CHECK(holds(lease, id, at));
  lease.release();
  store.expect(0, 0, 1, 0, 3);
  other.release();
  store.expect(3, 0, 1, 0, 0);
  const sequence_id next = store.open();
  CHECK(next.index == id.index);
  CHECK(next.generation != id.generation);
  CHECK(store.units_of(next).empty());
}

TEST_CASE("block store: a sequence that is closed while it is written ends with the write") {
  for (const bool commit : {true, false}) {
    CAPTURE(commit);
    checked_store store(3, 1);
    const sequence_id id = store.open();
    store.put(id, {0, 0});
    const host_slot first = store.reserve(id, {0, 1});
    const host_slot second = store.reserve(id, {1, 1});
    CHECK(store->close_sequence(id) == close_outcome::deferred);
    store.expect(1, 0, 0, 0, 2);
    const auto end = [&](host_slot slot) { commit ? store->commit(slot) : store->abort(slot); };
    std::memset(store->writable(first), 1, unit_bytes);  // the copy may still be under way
    end(first);
    store.expect(2, 0, 0, 0, 1);
    const sequence_id next = store.open();  // knows nothing of it
    CHECK(next.index == id.index);
    CHECK(store.units_of(next).empty());
    CHECK_THROWS_AS(end(first), std::logic_error);
    end(second);
    store.expect(3, 0, 0, 0, 0);
    CHECK(store.units_of(next).empty());
  }
}

TEST_CASE(
    "block store: a sequence that is closed while it is read and written ends with the last") {
  for (const bool lease_first : {true, false}) {
    CAPTURE(lease_first);
    checked_store store(3, 1);
    const sequence_id id = store.open();
    store.put(id, {0, 0});
    lease_type lease = store->acquire(id, 0);
    const host_slot slot = store.reserve(id, {0, 1});
    CHECK(store->close_sequence(id) == close_outcome::deferred);
    store.expect(1, 0, 0, 0, 2);
    if (lease_first)
      lease.release();
    else
      store->commit(slot);
    store.expect(2, 0, 0, 0, 1);
    CHECK(lease.find(logical_block{1}) == nullptr);  // it was not committed in time
    CHECK(store->open_sequence().has_value() == lease_first);
    if (lease_first)
      store->commit(slot);
    else
      lease.release();
    store.expect(3, 0, 0, 0, 0);
    if (!lease_first) CHECK(store.units_of(store.open()).empty());
  }
}

TEST_CASE("fault 11: a batch whose third unit does not fit can be undone") {
  checked_store store(4);
  const sequence_id reader = store.open();
  store.put_chain(reader, 2);
  const lease_type lease = store->acquire(reader, 0);
  const store_counts before = store.counts();
  const sequence_id writer = store.open();
  std::vector<host_slot> batch;
  for (std::int32_t block = 0; block < 2; ++block) {
    batch.push_back(store.reserve(writer, {0, block}));
  }
  store.fail_to_put(writer, {0, 2});
  for (const host_slot slot : batch) store->abort(slot);
  CHECK(store.counts() == before);
  CHECK(store.units_of(writer).empty());
}

TEST_CASE("fault 13: a store that was full in pieces is whole again") {
  constexpr std::int32_t sequences = 8;
  checked_store store(32, sequences);
  std::vector<sequence_id> ids;
  for (std::int32_t i = 0; i < sequences; ++i) ids.push_back(store.open());
  for (std::int32_t block = 0; block < 4; ++block) {
    for (const sequence_id id : ids) store.put(id, {0, block});  // slots side by side
  }
  for (std::size_t i = 0; i < ids.size(); i += 2) {
    CHECK(store->close_sequence(ids[i]) == close_outcome::closed);
  }
  store.expect(16, 0, 16, 0, 0);
  for (std::size_t i = 1; i < ids.size(); i += 2) {
    CHECK(store.units_of(ids[i]) == chain(4));
    CHECK(store->close_sequence(ids[i]) == close_outcome::closed);
  }
  store.expect(32, 0, 0, 0, 0);
  const sequence_id whole = store.open();
  store.put_chain(whole, 32);  // every slot, each once
  const lease_type lease = store->acquire(whole, 0);
  for (const unit at : chain(32)) CHECK(holds(lease, whole, at));
}

TEST_CASE("faults 6, 14: random operations agree with a plain model, counts and content") {
  const int operations = test::rounds(2'000, 500'000);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    twins both(test::make_backend(), pulseinfer::detail::random_source(seed));
    int agreed = 0;
    while (agreed < operations && both.step()) ++agreed;
    CHECK(agreed == operations);
  }
}

/// For ThreadSanitizer, too: readers look through leases without the lock while a writer evicts.
TEST_CASE("block store: readers see whole units while a writer evicts") {
  if constexpr (std::string_view(test::backend_name) == "host") {
    constexpr std::int32_t sequences = 3;
    constexpr std::int32_t blocks = 8;
    store_type store(
        test::make_backend(), geometry,
        {.capacity_bytes = 20 * unit_bytes, .max_sequences = sequences, .max_blocks = blocks});
    std::vector<sequence_id> ids;
    for (std::int32_t i = 0; i < sequences; ++i) ids.push_back(store.open_sequence().value());
    std::atomic<bool> writing{true};
    const auto read = [&](std::uint64_t seed, std::int64_t& found, std::int64_t& wrong) {
      pulseinfer::detail::random_source draw(seed);
      while (writing.load()) {
        const sequence_id id = ids[draw.below(sequences)];
        const unit at{static_cast<std::int32_t>(draw.below(layers)), 0};
        const lease_type lease = store.acquire(id, at.layer);
        // Long enough for the writer to add units under the lease: those are found without the lock.
        for (std::int32_t i = 0; i < 10 * blocks; ++i) {
          const std::int32_t block = i % blocks;
          if (block == 0) std::this_thread::yield();
          const std::byte* const bytes = lease.find(logical_block{block});
          if (bytes == nullptr) continue;
          ++found;
          const stamp content = read_stamp(bytes);
          if (content != stamp_of(id, {at.layer, block}, content.version)) ++wrong;
        }
      }
    };
    std::int64_t found[2] = {}, wrong[2] = {};
    std::vector<std::thread> readers;
    for (std::size_t i = 0; i < 2; ++i) {
      readers.emplace_back([&, i] { read(i + 1, found[i], wrong[i]); });
    }
    pulseinfer::detail::random_source draw(9);
    const auto wanted = test::rounds<std::int64_t>(5'000, 200'000);
    std::int64_t committed = 0;
    for (std::int64_t attempt = 0; attempt < 80 * wanted && committed < wanted; ++attempt) {
      if (attempt % 8 == 0) std::this_thread::yield();  // also where there is one processor
      const sequence_id id = ids[draw.below(sequences)];
      const unit at{static_cast<std::int32_t>(draw.below(layers)),
                    static_cast<std::int32_t>(draw.below(blocks))};
      const auto got = store.reserve(id, at.layer, logical_block{at.block});
      if (got.outcome != reserve_outcome::reserved) continue;
      const stamp content = stamp_of(id, at, attempt);
      write_stamp(store.writable(got.slot), content);
      if (draw.one_in(5)) {
        store.abort(got.slot);
      } else {
        store.commit(got.slot);
        ++committed;
      }
    }
    writing.store(false);
    for (std::thread& reader : readers) reader.join();
    CHECK(wrong[0] + wrong[1] == 0);
    CHECK(committed > 20);  // more than fit: there was eviction
    const store_counts c = store.counts();
    CHECK(c.free + c.evictable == c.capacity);
  }
}

// --- Integrity -----------------------------------------------------------------------------------

namespace {

/// Every byte, plainly; block_store does not care which hash it is.
std::uint64_t plain_checksum(const std::byte* bytes, std::size_t count,
                             std::uint64_t seed) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    seed = pulseinfer::detail::mixed(seed, std::to_integer<std::uint64_t>(bytes[i]));
  }
  return seed;
}

constexpr pulseinfer::kv_geometry large_geometry{
    .layers = 2, .kv_heads = 2, .head_dim = 32, .block_tokens = 16};
constexpr std::int64_t large_bytes = large_geometry.unit_bytes();

/// A store of units of 4 KiB with tags, and what was written into it.
struct tagged_store {
  explicit tagged_store(pulseinfer::integrity kind, std::int64_t units = 8)
      : store(test::make_backend(), large_geometry,
              {.capacity_bytes = units * large_bytes,
               .max_sequences = 4,
               .max_blocks = 8,
               .integrity = kind,
               .checksum = plain_checksum}) {}

  sequence_id open() { return store.open_sequence().value(); }
  std::byte* put(sequence_id id, std::int32_t layer, std::int32_t block, std::uint64_t content) {
    const auto got = store.reserve(id, layer, logical_block{block});
    REQUIRE(got.outcome == reserve_outcome::reserved);
    std::byte* const bytes = store.writable(got.slot);
    pulseinfer::detail::random_source random(content);
    for (std::int64_t i = 0; i < large_bytes; ++i) bytes[i] = static_cast<std::byte>(random.next());
    store.commit(got.slot);
    return bytes;
  }
  /// free, pinned, evictable, quarantined; nothing is being written.
  void expect(std::int64_t free, std::int64_t pinned, std::int64_t evictable,
              std::int64_t quarantined) {
    const store_counts c = store.counts();
    CHECK(c.free == free);
    CHECK(c.pinned == pinned);
    CHECK(c.evictable == evictable);
    CHECK(c.quarantined == quarantined);
    CHECK(c.free + c.writing + c.evictable + c.pinned + c.quarantined == c.capacity);
  }

  store_type store;
};

std::vector<std::byte> copy_of(const std::byte* bytes) {
  return {bytes, bytes + large_bytes};
}

}  // namespace

TEST_CASE("block_store: gathered bytes match their unit wherever they lie, and no other unit") {
  for (const auto kind : {pulseinfer::integrity::canary, pulseinfer::integrity::checksum}) {
    tagged_store s(kind);
    const sequence_id a = s.open();
    const sequence_id b = s.open();
    // Equal bytes: it is the unit's name that tells them apart.
    (void)s.put(a, 0, 0, 1);
    (void)s.put(a, 0, 1, 1);
    (void)s.put(a, 1, 0, 1);
    (void)s.put(b, 0, 0, 1);
    (void)s.put(b, 0, 1, 2);
    const auto of_a = s.store.acquire(a, 0);
    const auto of_b = s.store.acquire(b, 0);
    const std::vector<std::byte> gathered = copy_of(of_a.find(logical_block{0}));
    CHECK(of_a.matches(logical_block{0}, gathered.data()));
    CHECK(of_a.matches(logical_block{0}, of_a.find(logical_block{0})));
    CHECK(of_b.matches(logical_block{1}, of_b.find(logical_block{1})));
    CHECK(!of_b.matches(logical_block{1}, gathered.data()));  // a crossed unit
    CHECK(!of_a.matches(logical_block{0}, of_b.find(logical_block{1})));
    CHECK(!of_a.matches(logical_block{2}, gathered.data()));  // not stored
    CHECK(!of_a.matches(logical_block{-1}, gathered.data()));
    CHECK(!of_a.matches(logical_block{99}, gathered.data()));
  }
}

TEST_CASE("block_store: a slot that another unit's writer overwrote is found, equal or not") {
  for (const auto kind : {pulseinfer::integrity::canary, pulseinfer::integrity::checksum}) {
    tagged_store s(kind);
    const sequence_id id = s.open();
    std::byte* const first = s.put(id, 0, 0, 1);
    const std::byte* const second = s.put(id, 0, 1, 2);
    std::memcpy(first, second, static_cast<std::size_t>(large_bytes));
    auto lease = s.store.acquire(id, 0);
    CHECK(!lease.matches(logical_block{0}, lease.find(logical_block{0})));
    CHECK(lease.matches(logical_block{1}, lease.find(logical_block{1})));
    CHECK(lease.drop_if_corrupt(logical_block{0}));
    CHECK(!lease.drop_if_corrupt(logical_block{1}));
  }
}

TEST_CASE("block_store: a flipped bit is found by the checksum, by the canary where it looks") {
  for (const bool looked_at : {true, false}) {
    const std::int64_t at = looked_at ? large_bytes - 1 : 100;
    for (const auto kind : {pulseinfer::integrity::none, pulseinfer::integrity::canary,
                            pulseinfer::integrity::checksum}) {
      tagged_store s(kind);
      const sequence_id id = s.open();
      std::byte* const bytes = s.put(id, 1, 3, 1);
      auto lease = s.store.acquire(id, 1);
      CHECK(lease.matches(logical_block{3}, lease.find(logical_block{3})));
      bytes[at] ^= std::byte{4};
      const bool found = kind == pulseinfer::integrity::checksum ||
                         (kind == pulseinfer::integrity::canary && looked_at);
      CHECK(lease.matches(logical_block{3}, lease.find(logical_block{3})) == !found);
      CHECK(lease.drop_if_corrupt(logical_block{3}) == found);
      CHECK((lease.find(logical_block{3}) == nullptr) == found);
    }
  }
}

TEST_CASE("block_store: a corrupt unit is absent at once, its slot free after the last lease") {
  tagged_store s(pulseinfer::integrity::checksum, 4);
  const sequence_id id = s.open();
  std::byte* const bytes = s.put(id, 0, 0, 1);
  (void)s.put(id, 0, 1, 2);
  s.expect(2, 0, 2, 0);
  {
    auto other = s.store.acquire(id, 0);
    auto lease = s.store.acquire(id, 0);
    const std::byte* const seen = other.find(logical_block{0});
    bytes[9] ^= std::byte{1};
    CHECK(lease.drop_if_corrupt(logical_block{0}));
    s.expect(2, 1, 0, 1);
    CHECK(lease.find(logical_block{0}) == nullptr);
    CHECK(other.find(logical_block{0}) == nullptr);
    CHECK(!s.store.contains(id, 0, logical_block{0}));
    CHECK(!lease.drop_if_corrupt(logical_block{0}));  // once
    CHECK(std::memcmp(seen, bytes, 16) == 0);         // still there for who reads it

    // It can be written anew beside the old one, and that one is well.
    const std::byte* const anew = s.put(id, 0, 0, 1);
    CHECK(anew != bytes);
    s.expect(1, 2, 0, 1);
    CHECK(lease.find(logical_block{0}) == anew);
    CHECK(lease.matches(logical_block{0}, anew));
    CHECK(!lease.matches(logical_block{0}, seen));    // one who gathered before
    CHECK(!other.drop_if_corrupt(logical_block{0}));  // does not take the new one out
    CHECK(lease.find(logical_block{0}) == anew);
    lease.release();
    s.expect(1, 2, 0, 1);
  }
  s.expect(2, 0, 2, 0);
  CHECK(s.store.close_sequence(id) == close_outcome::closed);
  s.expect(4, 0, 0, 0);
}

TEST_CASE("block_store: a corrupt unit of a closed sequence is freed with the others") {
  tagged_store s(pulseinfer::integrity::checksum, 4);
  const sequence_id id = s.open();
  std::byte* const bytes = s.put(id, 0, 0, 1);
  (void)s.put(id, 1, 1, 2);
  {
    auto lease = s.store.acquire(id, 0);
    CHECK(s.store.close_sequence(id) == close_outcome::deferred);
    s.expect(2, 0, 0, 2);
    CHECK(lease.matches(logical_block{0},
                        lease.find(logical_block{0})));  // the generation is that of the lease
    bytes[0] ^= std::byte{1};
    CHECK(!lease.matches(logical_block{0}, lease.find(logical_block{0})));
    CHECK(lease.drop_if_corrupt(logical_block{0}));
    s.expect(2, 0, 0, 2);
  }
  s.expect(4, 0, 0, 0);
  // The index comes back with another generation, and nothing of the unit is left.
  for (int i = 0; i < 4; ++i) {
    const sequence_id next = s.open();
    CHECK(!s.store.contains(next, 0, logical_block{0}));
  }
}

TEST_CASE("block_store: the only unit of a sequence may be the corrupt one") {
  tagged_store s(pulseinfer::integrity::canary, 1);
  const sequence_id id = s.open();
  const sequence_id other = s.open();
  std::byte* const bytes = s.put(id, 0, 0, 1);
  {
    auto lease = s.store.acquire(id, 0);
    bytes[0] ^= std::byte{1};
    CHECK(lease.drop_if_corrupt(logical_block{0}));
    s.expect(0, 0, 0, 1);
    CHECK(s.store.reserve(other, 0, logical_block{0}).outcome == reserve_outcome::full);
  }
  s.expect(1, 0, 0, 0);
  (void)s.put(other, 0, 0, 2);
  s.expect(0, 0, 1, 0);
}

TEST_CASE("block_store: slots are tagged anew when they are used again") {
  tagged_store s(pulseinfer::integrity::checksum, 1);
  for (std::uint64_t round = 0; round < 5; ++round) {
    const sequence_id id = s.open();
    (void)s.put(id, 0, 0, round);
    {
      const auto lease = s.store.acquire(id, 0);
      CHECK(lease.matches(logical_block{0}, lease.find(logical_block{0})));
    }
    CHECK(s.store.close_sequence(id) == close_outcome::closed);
  }
}

TEST_CASE("block_store: with tags too, a second commit and one after abort are errors") {
  tagged_store s(pulseinfer::integrity::checksum);
  const sequence_id id = s.open();
  const auto first = s.store.reserve(id, 0, logical_block{0});
  s.store.commit(first.slot);
  CHECK_THROWS_AS(s.store.commit(first.slot), std::logic_error);
  const auto second = s.store.reserve(id, 0, logical_block{1});
  s.store.abort(second.slot);
  CHECK_THROWS_AS(s.store.commit(second.slot), std::logic_error);
  CHECK_THROWS_AS(s.store.commit(host_slot::none), std::logic_error);
  // Closed meanwhile: the slot is free, whatever is in it.
  const auto third = s.store.reserve(id, 0, logical_block{2});
  CHECK(s.store.close_sequence(id) == close_outcome::deferred);
  s.store.commit(third.slot);
  s.expect(8, 0, 0, 0);
}

TEST_CASE("block_store: without integrity everything matches, and nothing is read") {
  tagged_store s(pulseinfer::integrity::none);
  const sequence_id id = s.open();
  (void)s.put(id, 0, 0, 1);
  auto lease = s.store.acquire(id, 0);
  CHECK(lease.matches(logical_block{0}, nullptr));
  CHECK(!lease.drop_if_corrupt(logical_block{0}));
  const lease_type none;
  CHECK(!none.matches(logical_block{0}, nullptr));
  CHECK(store_type::lease{}.drop_if_corrupt(logical_block{0}) == false);
}

TEST_CASE("block_store: a checksum needs a hash") {
  CHECK_THROWS_AS(store_type(test::make_backend(), geometry,
                             {.capacity_bytes = 640, .integrity = pulseinfer::integrity::checksum}),
                  std::invalid_argument);
  CHECK_THROWS_AS(
      store_type(test::make_backend(), geometry,
                 {.capacity_bytes = 640, .integrity = static_cast<pulseinfer::integrity>(9)}),
      std::invalid_argument);
}

TEST_CASE("block_store: units are checked and dropped beside writers and readers") {
  tagged_store s(pulseinfer::integrity::checksum, 16);
  const sequence_id id = s.open();
  std::atomic<int> dropped{0};
  for (std::int32_t block = 0; block < 4; ++block) {
    s.put(id, 0, block, 1)[block] ^= static_cast<std::byte>(block % 2);  // odd ones are damaged
  }
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      for (int round = 0; round < 50; ++round) {
        if (t == 0) {
          const auto got = s.store.reserve(id, 1, logical_block{round % 8});
          if (got.outcome == reserve_outcome::reserved) s.store.commit(got.slot);
          continue;
        }
        auto lease = s.store.acquire(id, 0);
        for (std::int32_t block = 0; block < 4; ++block) {
          const std::byte* const bytes = lease.find(logical_block{block});
          if (bytes == nullptr || lease.matches(logical_block{block}, bytes)) continue;
          if (lease.drop_if_corrupt(logical_block{block})) ++dropped;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(dropped == 2);
  s.expect(16 - 2 - 8, 0, 2 + 8, 0);
}
