// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a store takes in as a whole or not at all. Include the backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/admission_filter.hpp"
#include "pulseinfer/block_store.hpp"
#include "pulseinfer/eviction_priority.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/allocations.hpp"
#include "support/offload_rig.hpp"
#include "support/paged_pool.hpp"
#include "support/store_shelf.hpp"

namespace {

using namespace store_test;
using pulseinfer::reservation;
using store_type = pulseinfer::block_store<test::backend>;
using shelf_type = shelf<store_type>;

shelf_type make_shelf(std::int64_t units, const pulseinfer::block_store_options& options = {}) {
  return shelf_type(test::make_backend(), units, options);
}
std::vector<logical_block> blocks_of(std::int32_t first, std::int32_t last) {
  std::vector<logical_block> blocks;
  for (std::int32_t b = first; b < last; ++b) blocks.push_back(logical_block{b});
  return blocks;
}
/// Reserves blocks [first, last) of all layers; empty if there was no room, and then nothing has
/// changed.
template <class Shelf>
std::vector<reservation> reserve_whole(Shelf& s, sequence_id id, std::int32_t first,
                                       std::int32_t last) {
  const auto blocks = blocks_of(first, last);
  std::vector<reservation> got(blocks.size() * layers);
  const store_counts before = s.counts();
  const reserve_outcome outcome = s->reserve_whole(id, blocks, got);
  if (outcome == reserve_outcome::reserved) return got;
  CHECK(outcome == reserve_outcome::full);
  CHECK(s.counts() == before);
  for (const reservation& r : got) CHECK(r.slot == host_slot::none);
  return {};
}
template <class Shelf>
void put_whole(Shelf& s, sequence_id id, std::int32_t first, std::int32_t last) {
  const auto got = reserve_whole(s, id, first, last);
  REQUIRE(got.size() == static_cast<std::size_t>((last - first) * layers));
  for (std::size_t i = 0; i < got.size(); ++i) {
    REQUIRE(got[i].outcome == reserve_outcome::reserved);
    const auto at = static_cast<std::int32_t>(i);
    write_stamp(got[i].bytes, stamp_of(id, {at % layers, first + at / layers}));
    s->commit(got[i].slot);
  }
}

/// Admits what its counter allows, and counts who asks.
struct counted_filter {
  int* asked = nullptr;
  bool admits = false;
  bool admit(std::uint64_t key) noexcept {
    CHECK(key != 0);
    ++*asked;
    return admits;
  }
};
/// Admits so many blocks, then throws.
struct throwing_filter {
  int* left = nullptr;
  bool admit(std::uint64_t) {
    if (--*left < 0) throw std::runtime_error("no answer");
    return false;
  }
};
template <class Filter>
using filtered_store = pulseinfer::block_store<test::backend, pulseinfer::lru, Filter>;
template <class Filter>
using filtered_shelf = shelf<filtered_store<Filter>>;

/// Stores what a store takes of a request's prompt. Returns how many blocks it found, and took.
template <class Shelf>
std::pair<std::int32_t, std::int32_t> serve(Shelf& s,
                                            const std::vector<pulseinfer::block_key>& prompt) {
  const auto opened = s->open_sequence(prompt);
  REQUIRE(opened.has_value());
  const sequence_id id = opened->sequence;
  std::int32_t taken = 0;
  for (std::int32_t b = opened->blocks; b < static_cast<std::int32_t>(prompt.size()); ++b) {
    reservation got[layers];
    const logical_block block{b};
    REQUIRE(s->reserve_whole(id, {&block, 1}, got) == reserve_outcome::reserved);
    if (got[0].outcome == reserve_outcome::not_admitted) {
      CHECK(got[1].outcome == reserve_outcome::not_admitted);
      CHECK(got[1].slot == host_slot::none);
      continue;
    }
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      write_stamp(got[layer].bytes, stamp_of(id, {layer, b}));
      s->commit(got[layer].slot);
    }
    ++taken;
    CHECK(s->name_block(id, block, prompt[static_cast<std::size_t>(b)]) ==
          pulseinfer::name_outcome::named);
  }
  (void)s->close_sequence(id);
  return {opened->blocks, taken};
}

}  // namespace

TEST_CASE("store admission: all layers of blocks are reserved at once") {
  shelf_type s = make_shelf(8);
  const sequence_id id = s.open();
  put_whole(s, id, 0, 3);
  CHECK(s.prefix_of(id) == 3);
  s.expect({.free = 2, .evictable = 6});
  {
    const auto lease = s->acquire(id, 1);
    CHECK(finds(lease, id, {1, 2}));
  }
  CHECK(reserve_whole(s, id, 0, 0).empty());  // no blocks: nothing is asked for
  CHECK(s->reserve_whole(id, {}, {}) == reserve_outcome::reserved);
}

TEST_CASE("store admission: what is there already, or being written, is said and needs no room") {
  shelf_type s = make_shelf(5);
  const sequence_id id = s.open();
  s.put(id, {0, 0});
  const host_slot slot = s.reserve(id, {1, 0});
  s.put(id, {1, 1});
  const auto got = reserve_whole(s, id, 0, 3);  // three units of four
  REQUIRE(got.empty());                         // two are free
  const auto two = reserve_whole(s, id, 0, 2);
  REQUIRE(two.size() == 4);
  CHECK(two[0].outcome == reserve_outcome::exists);
  CHECK(two[1].outcome == reserve_outcome::writing);
  CHECK(two[2].outcome == reserve_outcome::reserved);
  CHECK(two[3].outcome == reserve_outcome::exists);
  CHECK(two[2].bytes == s->writable(two[2].slot));
  s->commit(slot);
  s->abort(two[2].slot);
  s.expect({.free = 2, .evictable = 3});
}

TEST_CASE("store admission: blocks that do not fit as a whole change nothing and evict nothing") {
  shelf_type s = make_shelf(8, {.max_events = 16});
  s.leave(keys_of({1}));
  const sequence_id old = s.open();
  s.put_blocks(old, 0, 2);
  const sequence_id writer = s.open();
  s.put(writer, {0, 0});
  (void)s.events();
  // One is free, two have a name, four are of a sequence: seven, but the block of the writer's.
  CHECK(reserve_whole(s, writer, 1, 5).empty());
  CHECK(s.prefix_of(old) == 2);
  CHECK(s->ready_blocks(keys_of({1})) == 1);
  CHECK(s.events().empty());
  {
    const auto lease = s->acquire(old, 0);
    CHECK(reserve_whole(s, writer, 1, 3).empty());  // a reader: only three are to be had
    CHECK(s->ready_blocks(keys_of({1})) == 1);
    CHECK(reserve_whole(s, writer, 1, 2).size() == 2);  // the name goes
    CHECK(s->ready_blocks(keys_of({1})) == 0);
  }
}

TEST_CASE("store admission: names go first, then the ends of sequences, whole blocks only") {
  shelf_type s = make_shelf(10, {.max_events = 16});
  s.leave(keys_of({1, 2}));
  const sequence_id first = s.open();
  s.put_blocks(first, 0, 1);
  const sequence_id second = s.open();
  s.put_blocks(second, 0, 2);
  const sequence_id writer = s.open();
  put_whole(s, writer, 0, 1);  // the tail of the prefix
  CHECK(s->ready_blocks(keys_of({1, 2})) == 1);
  put_whole(s, writer, 1, 3);  // its head, and the sequence that was not used for longest
  CHECK(s->ready_blocks(keys_of({1, 2})) == 0);
  CHECK(s.prefix_of(first) == 0);
  CHECK(s.prefix_of(second) == 2);
  put_whole(s, writer, 3, 5);  // both blocks of one sequence
  CHECK(s.prefix_of(second) == 0);
  CHECK(s.prefix_of(writer) == 5);
  s.expect({.evictable = 10});
  CHECK(reserve_whole(s, writer, 5, 6).empty());  // its own stay
  // Their gates are open again: all can be leased.
  for (const sequence_id id : {first, second, writer}) CHECK(static_cast<bool>(s->acquire(id, 0)));
}

TEST_CASE("store admission: a block that two sequences share goes under both, once") {
  shelf_type s = make_shelf(8);
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 3);
  const sequence_id child = s.fork(parent, 2);
  s.put_blocks(child, 2, 3);
  const sequence_id writer = s.open();
  put_whole(s, writer, 0, 3);  // both ends, and the block before them
  CHECK(s.prefix_of(parent) == 1);
  CHECK(s.prefix_of(child) == 1);
  const auto lease = s->acquire(child, 0);
  CHECK(reserve_whole(s, writer, 3, 4).empty());  // what is left is read
  CHECK(s.prefix_of(parent) == 1);
}

TEST_CASE(
    "store admission: what is held or read is not made room of, and can be leased meanwhile") {
  shelf_type s = make_shelf(8);
  s.leave(keys_of({1}));
  auto found = s->open_sequence(keys_of({1}));
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 2);
  const sequence_id child = s.fork(parent, 1);
  const sequence_id writer = s.open();
  auto lease = s->acquire(child, 1);  // keeps the first block of the parent's, not the second
  s.expect({.free = 2, .evictable = 2, .pinned = 4});
  CHECK(reserve_whole(s, writer, 0, 3).empty());
  CHECK(s.prefix_of(parent) == 2);
  put_whole(s, writer, 0, 2);
  CHECK(s.prefix_of(parent) == 1);
  CHECK(reserve_whole(s, writer, 2, 3).empty());
  CHECK(found->held.is_live());
  CHECK(s->expire(store_type::no_deadline) == 0);
  CHECK(reserve_whole(s, writer, 2, 3).empty());
  found->held.release();
  put_whole(s, writer, 2, 3);  // its sequence is open still, and gives it up
  CHECK(s.prefix_of(found->sequence) == 0);
  lease.release();
  put_whole(s, writer, 3, 4);
  CHECK(s.prefix_of(parent) == 0);
  CHECK(s.prefix_of(child) == 0);
  s.expect({.evictable = 8});
}

TEST_CASE("store admission: records are made room for as units are") {
  shelf_type s = make_shelf(8, {.max_stored_blocks = 3});
  const sequence_id old = s.open();
  s.put_blocks(old, 0, 1);
  s.put(old, {0, 1});
  const host_slot slot = s.reserve(old, {1, 1});
  const sequence_id writer = s.open();
  CHECK(reserve_whole(s, writer, 0, 2).empty());  // the block that is written stays one
  CHECK(s.prefix_of(old) == 1);
  s->commit(slot);
  put_whole(s, writer, 0, 2);
  CHECK(s.prefix_of(old) == 1);
  CHECK(reserve_whole(s, writer, 2, 4).empty());
  put_whole(s, writer, 2, 3);
  CHECK(s.prefix_of(old) == 0);
}

TEST_CASE("store admission: what a policy never gives up is no room") {
  using policy = pulseinfer::prioritized<>;
  shelf<pulseinfer::block_store<test::backend, policy>> s(test::make_backend(), 6);
  s.leave(keys_of({1}), {.priority = pulseinfer::never_evict});
  s.leave(keys_of({2}));
  const sequence_id writer = s.open();
  CHECK(reserve_whole(s, writer, 0, 3).empty());
  CHECK(s->ready_blocks(keys_of({2})) == 1);
  put_whole(s, writer, 0, 2);
  CHECK(s->ready_blocks(keys_of({1})) == 1);
  CHECK(s->ready_blocks(keys_of({2})) == 0);
}

TEST_CASE("store admission: a request for whole blocks that makes no sense is refused") {
  shelf_type s = make_shelf(8);
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 1);
  const store_counts before = s.counts();
  std::vector<reservation> got(4);
  const auto two = blocks_of(1, 3);
  CHECK_THROWS_AS((void)s->reserve_whole(id, two, std::span(got).first(3)), std::invalid_argument);
  CHECK_THROWS_AS((void)s->reserve_whole({}, two, got), std::invalid_argument);
  CHECK_THROWS_AS((void)s->reserve_whole(id, blocks_of(63, 65), got), std::out_of_range);
  CHECK_THROWS_AS((void)s->reserve_whole(id, blocks_of(-1, 1), got), std::out_of_range);
  const std::vector<logical_block> twice = {logical_block{2}, logical_block{2}};
  CHECK_THROWS_WITH_AS((void)s->reserve_whole(id, twice, got),
                       "block_store: block 2 comes behind block 2, expected ascending ones",
                       std::invalid_argument);
  CHECK(s.counts() == before);
}

TEST_CASE("store admission: whole blocks are made room for without an allocation") {
  shelf_type s = make_shelf(16);
  const sequence_id ids[] = {s.open(), s.open()};
  std::uint64_t least = 1000;
  std::vector<reservation> got(8 * layers);
  for (std::int32_t round = 0; round < 8; ++round) {
    const sequence_id id = ids[round % 2];
    const auto blocks = blocks_of(0, 8);  // takes the other's
    const std::uint64_t before = test::allocations();
    const reserve_outcome outcome = s->reserve_whole(id, blocks, got);
    least = std::min(least, test::allocations() - before);
    REQUIRE(outcome == reserve_outcome::reserved);
    for (const reservation& r : got) s->commit(r.slot);
  }
  CHECK(least == 0);
}

TEST_CASE("fault 70: a store takes a prompt's blocks in when they are asked for again") {
  filtered_shelf<pulseinfer::reuse_filter> s(test::make_backend(), 64, {},
                                             pulseinfer::reuse_filter(1'000));
  std::int32_t stored = 0;
  for (std::int32_t request = 0; request < 500; ++request) {
    const auto [found, taken] = serve(s, keys_of({-request, 2, 3}));
    CHECK(found == 0);
    stored += taken;
  }
  CHECK(stored <= 15);  // by the chance of a filter
  const auto prompt = keys_of({1, 2, 3});
  CHECK(serve(s, prompt) == std::pair(0, 0));
  CHECK(serve(s, prompt) == std::pair(0, 3));
  CHECK(serve(s, prompt) == std::pair(3, 0));
  CHECK(serve(s, keys_of({1, 2, 4})) == std::pair(2, 0));
  CHECK(serve(s, keys_of({1, 2, 4})) == std::pair(2, 1));
}

TEST_CASE("store admission: a filter is asked once a request for each block that is not there") {
  int asked = 0;
  filtered_shelf<counted_filter> s(test::make_backend(), 64, {}, counted_filter{&asked, true});
  CHECK(serve(s, keys_of({1, 2})) == std::pair(0, 2));
  CHECK(asked == 2);
  CHECK(serve(s, keys_of({1, 2, 3})) == std::pair(2, 1));
  CHECK(asked == 3);
  const std::vector<pulseinfer::block_key> longer(70, keys_of({9})[0]);  // than a sequence may be
  CHECK(s->open_sequence(longer)->blocks == 0);
  CHECK(asked == 3 + 64);
  const sequence_id id = s.open();  // no prompt, nothing to ask
  s.put_blocks(id, 0, 2);
  CHECK(asked == 3 + 64);
}

TEST_CASE("store admission: what is kept out stays out of the sequence, and of forks of it") {
  int asked = 0;
  filtered_shelf<counted_filter> s(test::make_backend(), 64, {}, counted_filter{&asked});
  const auto prompt = keys_of({1, 2, 3});
  const sequence_id id = s->open_sequence(prompt)->sequence;
  const auto outcome = [&](sequence_id of, std::int32_t block) {
    const reservation r = s->reserve(of, 1, logical_block{block});
    if (r.outcome == reserve_outcome::reserved) s->abort(r.slot);
    CHECK((r.slot == host_slot::none) == (r.outcome != reserve_outcome::reserved));
    return r.outcome;
  };
  for (std::int32_t block = 0; block < 3; ++block) {
    CHECK(outcome(id, block) == reserve_outcome::not_admitted);
  }
  CHECK(outcome(id, 3) == reserve_outcome::reserved);  // what is generated has no name yet
  const sequence_id child = s.fork(id, 2);
  CHECK(outcome(child, 1) == reserve_outcome::not_admitted);
  CHECK(outcome(child, 2) == reserve_outcome::reserved);  // its own
  const sequence_id whole = s.fork(id, 64);
  CHECK(outcome(whole, 2) == reserve_outcome::not_admitted);
  CHECK(s->trim(id, 1) == pulseinfer::trim_outcome::trimmed);
  CHECK(outcome(id, 0) == reserve_outcome::not_admitted);
  CHECK(outcome(id, 1) == reserve_outcome::reserved);  // what comes now is something else
  CHECK(s->close_sequence(id) == close_outcome::closed);
  const sequence_id next = s.open();
  CHECK(next.index == id.index);
  CHECK(outcome(next, 0) == reserve_outcome::reserved);
  s.expect({.free = 64});
}

TEST_CASE("store admission: a filter that throws leaves no sequence behind, and all blocks") {
  int left = 1;
  filtered_shelf<throwing_filter> s(test::make_backend(), 8, {.max_sequences = 2},
                                    throwing_filter{&left});
  s.leave(keys_of({1, 2}));
  const auto prompt = keys_of({1, 2, 3, 4});
  for (int i = 0; i < 3; ++i) {
    left = 1;  // it says something of the third block, and nothing of the fourth
    CHECK_THROWS_WITH_AS((void)s->open_sequence(prompt), "no answer", std::runtime_error);
    s.expect({.free = 4, .evictable = 4});
    CHECK(s->ready_blocks(prompt) == 2);
  }
  left = 100;
  auto found = s->open_sequence(prompt);
  REQUIRE(found.has_value());
  CHECK(found->blocks == 2);
  const sequence_id other = s.open();
  s.put_blocks(other, 2, 3);  // what was said to those that failed is forgotten
}

TEST_CASE("store admission: nothing is given up for what is kept out") {
  int asked = 0;
  filtered_shelf<counted_filter> s(test::make_backend(), 8, {}, counted_filter{&asked});
  for (const std::int32_t name : {11, 12, 13, 14}) s.leave(keys_of({name}));
  s.expect({.evictable = 8});
  const auto prompt = keys_of({1, 2, 3});
  const sequence_id id = s->open_sequence(prompt)->sequence;
  const auto blocks = blocks_of(0, 4);
  reservation got[4 * layers];
  s->reserve(id, 0, blocks, got);
  CHECK(got[2].outcome == reserve_outcome::not_admitted);
  REQUIRE(got[3].outcome == reserve_outcome::reserved);
  s.expect({.free = 1, .writing = 1, .evictable = 6});
  s->commit(got[3].slot);
  CHECK(s->reserve_whole(id, blocks, got) == reserve_outcome::reserved);
  CHECK(got[0].outcome == reserve_outcome::not_admitted);
  CHECK(got[6].outcome == reserve_outcome::exists);
  REQUIRE(got[7].outcome == reserve_outcome::reserved);
  s.expect({.writing = 1, .evictable = 7});
  s->abort(got[7].slot);
}

TEST_CASE("store admission: an offload says what the store keeps out, and moves the rest") {
  test::each_backend([](test::backend machine) {
    int asked = 0;
    constexpr auto of = test::small_geometry;
    test::paged_pool<test::backend> pages(machine, of, 8);
    using store_of = filtered_store<counted_filter>;
    store_of store(machine, of,
                   {.capacity_bytes = 8 * of.unit_bytes(), .max_sequences = 2, .max_blocks = 8},
                   counted_filter{&asked});
    pulseinfer::transfer_engine<test::backend, store_of> mover(
        machine, store, pages.pool(),
        {.staging_bytes = 2 * of.unit_bytes(), .chunk_bytes = of.unit_bytes()});
    auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
    const auto prompt = keys_of({1, 2});
    const sequence_id id = store.open_sequence(prompt)->sequence;
    const test::unit_targets units = {{0, 1, 5}, {0, 2, 6}};
    auto t = mover.offload(0, {&id, 1}, units, stream).value();
    t.sync();
    CHECK(t.status(0) == pulseinfer::unit_status::not_admitted);
    CHECK(t.status(1) == pulseinfer::unit_status::moved);
    CHECK(t.report().moved == 1);
    CHECK(!store.contains(id, 0, logical_block{1}));
    CHECK(store.contains(id, 0, logical_block{2}));
  });
}
