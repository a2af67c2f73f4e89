// SPDX-License-Identifier: Apache-2.0
/// @file
/// Sequences of a store that share blocks: fork, trim, close, eviction under several holders.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/store_shelf.hpp"

namespace {

using namespace store_test;
using pulseinfer::eviction_scope;
using pulseinfer::trim_outcome;
using store_type = pulseinfer::block_store<test::backend>;
using shelf_type = shelf<store_type>;
using lease_type = store_type::lease;

shelf_type make_shelf(std::int64_t units, const pulseinfer::block_store_options& options = {}) {
  return shelf_type(test::make_backend(), units, options);
}

}  // namespace

TEST_CASE("store sharing: a fork finds its parent's bytes, which are counted once") {
  shelf_type s = make_shelf(10);
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 3);
  const sequence_id child = s.fork(parent, 2);
  CHECK(child.index != parent.index);
  CHECK(s.prefix_of(child) == 2);
  s.expect({.free = 4, .evictable = 6});
  const lease_type of_parent = s->acquire(parent, 1);
  const lease_type of_child = s->acquire(child, 1);
  for (std::int32_t block = 0; block < 2; ++block) {
    CHECK(of_child.find(logical_block{block}) == of_parent.find(logical_block{block}));
    CHECK(finds(of_child, parent, {1, block}));
  }
  CHECK(of_child.find(logical_block{2}) == nullptr);
  s.expect({.free = 4, .pinned = 6});
}

TEST_CASE("store sharing: what either appends is its own") {
  shelf_type s = make_shelf(20);
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 2);
  const sequence_id child = s.fork(parent, 2);
  s.put_blocks(parent, 2, 4);
  s.put_blocks(child, 2, 3);
  const lease_type of_parent = s->acquire(parent, 0);
  const lease_type of_child = s->acquire(child, 0);
  CHECK(finds(of_parent, parent, {0, 2}));
  CHECK(finds(of_child, child, {0, 2}));
  CHECK(of_child.find(logical_block{3}) == nullptr);
  CHECK(of_parent.find(logical_block{2}) != of_child.find(logical_block{2}));
  s.expect({.free = 10, .pinned = 10});
}

TEST_CASE("store sharing: a lease of the fork sees what is committed through the parent") {
  shelf_type s = make_shelf(6);
  const sequence_id parent = s.open();
  s.put(parent, {0, 0});
  const host_slot slot = s.reserve(parent, {1, 0});
  const sequence_id child = s.fork(parent, 1);
  const lease_type lease = s->acquire(child, 1);
  CHECK(lease.find(logical_block{0}) == nullptr);
  CHECK(s->reserve(child, 1, logical_block{0}).outcome == reserve_outcome::writing);
  s->commit(slot);
  CHECK(finds(lease, parent, {1, 0}));
  CHECK(s->reserve(child, 1, logical_block{0}).outcome == reserve_outcome::exists);
  // The other way: a layer that the shared block lacks may come from the fork.
  s.put(parent, {0, 1});
  const sequence_id second = s.fork(parent, 2);
  const lease_type of_parent = s->acquire(parent, 1);
  s.put(second, {1, 1});
  CHECK(finds(of_parent, second, {1, 1}));
}

TEST_CASE("store sharing: a write that the parent aborts is absent for the fork, too") {
  shelf_type s = make_shelf(4);
  const sequence_id parent = s.open();
  const host_slot slot = s.reserve(parent, {1, 0});
  const sequence_id child = s.fork(parent, 1);
  s->abort(slot);
  CHECK(!s.has(child, {1, 0}));
  s.put(child, {1, 0});
  CHECK(!s.has(parent, {1, 0}));  // the block was forgotten with its last unit
  s.expect({.free = 3, .evictable = 1});
}

TEST_CASE("store sharing: forks of nothing, of all, of more, of holes, and of forks") {
  shelf_type s = make_shelf(12, {.max_sequences = 8, .max_blocks = 8});
  const sequence_id empty = s.open();
  CHECK(s.prefix_of(s.fork(empty, 8)) == 0);
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 2);
  s.put(parent, {1, 4});  // blocks 2 and 3 are holes
  CHECK(s.prefix_of(s.fork(parent, 0)) == 0);
  const sequence_id all = s.fork(parent, 8);
  CHECK(s.has(all, {1, 1}));
  CHECK(s.has(all, {1, 4}));
  CHECK(!s.has(all, {0, 4}));
  const sequence_id of_fork = s.fork(all, 2);
  CHECK(s.prefix_of(of_fork) == 2);
  s.expect({.free = 7, .evictable = 5});
}

TEST_CASE("store sharing: forks and trims that make no sense are refused") {
  shelf_type s = make_shelf(4, {.max_sequences = 2, .max_blocks = 4});
  const sequence_id stale = s.open();
  CHECK(s->close_sequence(stale) == close_outcome::closed);
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 1);
  const store_counts before = s.counts();
  for (const sequence_id wrong : {stale, sequence_id{}, sequence_id{2, 1}, sequence_id{-1, 1}}) {
    CHECK_THROWS_AS((void)s->fork(wrong, 1), std::invalid_argument);
    CHECK_THROWS_AS((void)s->trim(wrong, 0), std::invalid_argument);
  }
  for (const std::int32_t blocks : {-1, 5, std::numeric_limits<std::int32_t>::max()}) {
    CHECK_THROWS_WITH_AS((void)s->fork(id, blocks), doctest::Contains("expected 0 to 4"),
                         std::out_of_range);
    CHECK_THROWS_AS((void)s->trim(id, blocks), std::out_of_range);
  }
  CHECK(s.counts() == before);
  (void)s.open();
  CHECK(!s->fork(id, 1).has_value());  // no sequence is left
  CHECK(s.counts() == before);
  CHECK(s.prefix_of(id) == 1);
}

TEST_CASE("store sharing: closing leaves the others what they share") {
  for (const bool parent_first : {true, false}) {
    CAPTURE(parent_first);
    shelf_type s = make_shelf(10);
    const sequence_id parent = s.open();
    s.put_blocks(parent, 0, 3);
    const sequence_id child = s.fork(parent, 2);
    s.put_blocks(child, 2, 3);
    const sequence_id first = parent_first ? parent : child;
    const sequence_id last = parent_first ? child : parent;
    CHECK(s->close_sequence(first) == close_outcome::closed);
    s.expect({.free = 4, .evictable = 6});
    CHECK(s.prefix_of(last) == 3);
    const lease_type lease = s->acquire(last, 0);
    CHECK(finds(lease, parent, {0, 1}));
    CHECK(finds(lease, last, {0, 2}));
    CHECK(s->close_sequence(last) == close_outcome::deferred);
    s.expect({.free = 4, .quarantined = 6});
    CHECK(finds(lease, parent, {0, 1}));
  }
}

TEST_CASE("store sharing: what a closed sequence's lease reads and an open one shares, both keep") {
  shelf_type s = make_shelf(6);
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 2);
  const sequence_id child = s.fork(parent, 1);
  lease_type lease = s->acquire(parent, 0);
  CHECK(s->close_sequence(parent) == close_outcome::deferred);
  s.expect({.free = 2, .quarantined = 4});  // nobody else may have them yet
  const sequence_id writer = s.open();
  s.put_blocks(writer, 0, 1);
  s.fail_to_put(writer, {0, 1});
  lease.release();
  s.expect({.free = 2, .evictable = 4});
  CHECK(s.prefix_of(child) == 1);
}

TEST_CASE("store sharing: a write goes on for whoever is left") {
  shelf_type s = make_shelf(4);
  const sequence_id parent = s.open();
  const host_slot slot = s.reserve(parent, {0, 0});
  const sequence_id child = s.fork(parent, 1);
  CHECK(s->close_sequence(parent) == close_outcome::closed);  // the write is the child's as well
  s.expect({.free = 3, .writing = 1});
  s->commit(slot);
  CHECK(finds(s->acquire(child, 0), parent, {0, 0}));
  const host_slot second = s.reserve(child, {1, 0});
  CHECK(s->close_sequence(child) == close_outcome::deferred);
  s.expect({.free = 3, .quarantined = 1});
  s->commit(second);
  s.expect({.free = 4});
}

TEST_CASE("store sharing: nobody waits for a write whose last open holder trimmed it away") {
  shelf_type s = make_shelf(4);
  const sequence_id read = s.open();
  const host_slot slot = s.reserve(read, {0, 0});
  const sequence_id other = s.fork(read, 1);
  lease_type lease = s->acquire(read, 0);
  CHECK(s->close_sequence(read) == close_outcome::deferred);
  s.expect({.free = 3, .writing = 1});  // the other wants it
  CHECK(s->trim(other, 0) == trim_outcome::trimmed);
  s.expect({.free = 3, .quarantined = 1});
  s->commit(slot);
  CHECK(lease.find(logical_block{0}) == nullptr);
  s.expect({.free = 4});
}

// Trimming.

TEST_CASE("store sharing: a trimmed sequence ends where it was told") {
  shelf_type s = make_shelf(12);
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 4);
  CHECK(s->trim(id, 4) == trim_outcome::trimmed);
  CHECK(s->trim(id, 64) == trim_outcome::trimmed);
  CHECK(s.prefix_of(id) == 4);
  CHECK(s->trim(id, 3) == trim_outcome::trimmed);
  CHECK(s.prefix_of(id) == 3);
  s.expect({.free = 6, .evictable = 6});
  s.put_blocks(id, 3, 5);  // another continuation
  CHECK(s.prefix_of(id) == 5);
  CHECK(s->trim(id, 0) == trim_outcome::trimmed);
  s.expect({.free = 12});
  s.put_blocks(id, 0, 1);
  CHECK(s.prefix_of(id) == 1);
}

TEST_CASE("store sharing: a tail that others share is trimmed for one alone") {
  shelf_type s = make_shelf(12);
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 3);
  const sequence_id child = s.fork(id, 3);
  CHECK(s->trim(id, 1) == trim_outcome::trimmed);
  s.expect({.free = 6, .evictable = 6});
  CHECK(s.prefix_of(id) == 1);
  CHECK(s.prefix_of(child) == 3);
  s.put_blocks(id, 1, 2);
  CHECK(finds(s->acquire(id, 0), id, {0, 1}));
  const lease_type lease = s->acquire(child, 0);
  CHECK(lease.find(logical_block{1}) != s->acquire(id, 0).find(logical_block{1}));
  CHECK(finds(lease, id, {0, 2}));
}

TEST_CASE("store sharing: nothing is trimmed from under a lease") {
  shelf_type s = make_shelf(6);
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 2);
  const sequence_id child = s.fork(id, 2);
  lease_type lease = s->acquire(id, 1);
  CHECK(s->trim(id, 0) == trim_outcome::leased);
  CHECK(s->trim(id, 64) == trim_outcome::leased);
  CHECK(s.prefix_of(id) == 2);
  CHECK(s->trim(child, 0) == trim_outcome::trimmed);  // its own are not read
  CHECK(finds(lease, id, {1, 1}));
  lease.release();
  CHECK(s->trim(id, 0) == trim_outcome::trimmed);
  s.expect({.free = 6});
}

TEST_CASE("store sharing: a write that was trimmed away ends as always, and is forgotten") {
  for (const bool commit : {true, false}) {
    CAPTURE(commit);
    shelf_type s = make_shelf(4);
    const sequence_id id = s.open();
    s.put(id, {0, 0});
    const host_slot slot = s.reserve(id, {0, 1});
    CHECK(s->trim(id, 1) == trim_outcome::trimmed);
    s.expect({.free = 2, .evictable = 1, .quarantined = 1});
    const host_slot anew = s.reserve(id, {0, 1});  // another block at that place
    CHECK(anew != slot);
    commit ? s->commit(slot) : s->abort(slot);
    CHECK(!s.has(id, {0, 1}));
    s->commit(anew);
    CHECK(s.has(id, {0, 1}));
    s.expect({.free = 2, .evictable = 2});
    CHECK_THROWS_AS(s->commit(slot), std::logic_error);
  }
}

// Eviction.

TEST_CASE("store sharing: a shared block goes after all that is behind it, under all at once") {
  shelf_type s = make_shelf(8, {.scope = eviction_scope::block});
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 2);
  const sequence_id child = s.fork(parent, 1);
  s.put_blocks(child, 1, 3);  // parent: A B, child: A C D
  const sequence_id writer = s.open();
  s.evict_one(writer);
  CHECK(s.prefix_of(parent) == 1);  // B, of the least recently used
  CHECK(s.prefix_of(child) == 3);
  for (const std::int32_t left : {2, 1}) {
    s.evict_one(writer);  // not A, which the child needs: so D, then C
    CHECK(s.prefix_of(parent) == 1);
    CHECK(s.prefix_of(child) == left);
  }
  s.evict_one(writer);
  CHECK(s.prefix_of(parent) == 0);
  CHECK(s.prefix_of(child) == 0);
}

TEST_CASE("store sharing: nobody's prefix gets a hole, whatever is forked and evicted") {
  for (const auto scope : {eviction_scope::unit, eviction_scope::block}) {
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      CAPTURE(seed);
      pulseinfer::detail::random_source draw(seed);
      shelf_type s = make_shelf(24, {.scope = scope});
      std::vector<sequence_id> ids{s.open()};
      std::vector<std::int32_t> lengths{4};
      s.put_blocks(ids[0], 0, 4);
      while (ids.size() < 6) {
        const std::size_t from = draw.below(ids.size());
        const auto at =
            static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(lengths[from]) + 1));
        ids.push_back(s.fork(ids[from], at));
        lengths.push_back(at + 1);
        s.put_blocks(ids.back(), at, at + 1);
      }
      const sequence_id writer = s.open();
      while (s.counts().evictable > 0 && draw.below(64) != 0) {
        const std::size_t used = draw.below(ids.size());
        (void)s->acquire(ids[used], 0);
        if (s->reserve(writer, static_cast<std::int32_t>(draw.below(2)),
                       static_cast<logical_block>(draw.below(64)))
                .outcome == reserve_outcome::full) {
          break;
        }
        for (const sequence_id id : ids) (void)s.prefix_of(id);
      }
    }
  }
}

TEST_CASE("store sharing: a lease on one sequence keeps what it shares, not what others added") {
  shelf_type s = make_shelf(6);
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 2);
  const sequence_id child = s.fork(parent, 1);
  s.put_blocks(child, 1, 2);
  const lease_type lease = s->acquire(child, 0);
  s.expect({.evictable = 2, .pinned = 4});
  const sequence_id writer = s.open();
  s.put_blocks(writer, 0, 1);
  CHECK(s.prefix_of(parent) == 1);
  CHECK(s.prefix_of(child) == 2);
  s.fail_to_put(writer, {0, 1});  // block 0 of the parent is the child's, too
  CHECK(finds(lease, parent, {0, 0}));
  CHECK(finds(lease, child, {0, 1}));
}

TEST_CASE("store sharing: the writer's own prefix stays, also where others share it") {
  shelf_type s = make_shelf(4);
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 2);
  const sequence_id writer = s.fork(parent, 2);
  s.fail_to_put(writer, {0, 2});
  CHECK(s->trim(writer, 1) == trim_outcome::trimmed);
  s.put(writer, {0, 1});  // the parent's second block is its own now
  CHECK(s.has(writer, {0, 0}));
  CHECK(s.prefix_of(parent) == 1);
}

TEST_CASE("store sharing: all layers of the last block go, or one, as the scope says") {
  for (const auto scope : {eviction_scope::unit, eviction_scope::block}) {
    shelf_type s = make_shelf(5, {.scope = scope});
    const sequence_id id = s.open();
    s.put_blocks(id, 0, 2);
    const sequence_id writer = s.open();
    s.put(writer, {0, 0});
    s.put(writer, {1, 0});
    CHECK(s.prefix_of(id) == 1);
    CHECK(s.has(id, {0, 1}) == (scope == eviction_scope::unit));
    CHECK(!s.has(id, {1, 1}));
    s.expect({.free = scope == eviction_scope::unit ? 0 : 1,
              .evictable = scope == eviction_scope::unit ? 5 : 4});
  }
}

TEST_CASE("store sharing: a block that is written is given up in part, and stays a block") {
  shelf_type s = make_shelf(2, {.scope = eviction_scope::block});
  const sequence_id id = s.open();
  s.put(id, {0, 0});
  const host_slot slot = s.reserve(id, {1, 0});
  const sequence_id writer = s.open();
  s.put(writer, {0, 0});
  CHECK(!s.has(id, {0, 0}));
  s.fail_to_put(writer, {0, 1});
  s->commit(slot);
  CHECK(s.has(id, {1, 0}));
}

// Blocks that a store can know.

TEST_CASE("store sharing: where no record is left, a whole block goes") {
  shelf_type s = make_shelf(8, {.max_stored_blocks = 2});
  const sequence_id old = s.open();
  s.put_blocks(old, 0, 2);
  const sequence_id writer = s.open();
  s.put(writer, {1, 0});
  CHECK(s.prefix_of(old) == 1);  // both layers, although there is room
  s.expect({.free = 5, .evictable = 3});
  s.put(writer, {0, 0});  // the same block needs none
  CHECK(s.prefix_of(old) == 1);
  s.put(writer, {0, 1});
  s.fail_to_put(writer, {0, 2});  // its own blocks stay
  CHECK(s.prefix_of(old) == 0);
}

TEST_CASE("store sharing: a reservation for which there is no record gives nothing up") {
  shelf_type s = make_shelf(8, {.max_stored_blocks = 2});
  const sequence_id old = s.open();
  s.put_blocks(old, 0, 1);
  s.put(old, {0, 1});
  const host_slot slot = s.reserve(old, {1, 1});
  const sequence_id writer = s.open();
  s.fail_to_put(writer, {0, 0});  // the last block would stay a block, for it is written
  CHECK(s.prefix_of(old) == 1);
  CHECK(s.has(old, {0, 1}));
  s->commit(slot);
  s.put(writer, {0, 0});
  CHECK(s.prefix_of(old) == 1);
  CHECK(!s.has(old, {0, 1}));
}

// Damage.

TEST_CASE(
    "store sharing: a damaged unit of a shared block is absent for all, free after the last") {
  shelf_type s = make_shelf(4, {.integrity = pulseinfer::integrity::canary});
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 1);
  const sequence_id child = s.fork(parent, 1);
  lease_type first = s->acquire(parent, 0);
  lease_type second = s->acquire(child, 0);
  const std::byte* const bytes = second.find(logical_block{0});
  CHECK(second.matches(logical_block{0}, bytes));
  const_cast<std::byte&>(bytes[0]) ^= std::byte{1};
  CHECK(first.drop_if_corrupt(logical_block{0}));
  CHECK(!second.drop_if_corrupt(logical_block{0}));
  CHECK(second.find(logical_block{0}) == nullptr);
  s.expect({.free = 2, .pinned = 1, .quarantined = 1});
  first.release();
  s.expect({.free = 2, .pinned = 1, .quarantined = 1});
  second.release();
  s.expect({.free = 3, .evictable = 1});
}

TEST_CASE("store sharing: the last lease frees a damaged slot, whoever took it and when") {
  shelf_type s = make_shelf(4, {.integrity = pulseinfer::integrity::canary});
  const sequence_id parent = s.open();
  s.put_blocks(parent, 0, 1);
  const auto damage = [&](lease_type& lease) {
    const_cast<std::byte&>(lease.find(logical_block{0})[0]) ^= std::byte{1};
    CHECK(lease.drop_if_corrupt(logical_block{0}));
  };
  {
    lease_type first = s->acquire(parent, 0);
    damage(first);
    const sequence_id child = s.fork(parent, 1);  // after the damage
    lease_type second = s->acquire(child, 1);
    first.release();
    s.expect({.free = 2, .pinned = 1, .quarantined = 1});
    second.release();
    s.expect({.free = 3, .evictable = 1});
    CHECK(s->close_sequence(child) == close_outcome::closed);
  }
  s.put(parent, {0, 0});
  const sequence_id child = s.fork(parent, 1);
  lease_type first = s->acquire(parent, 0);
  lease_type second = s->acquire(child, 0);
  damage(first);
  first.release();  // not yet: the other reads
  lease_type third = s->acquire(parent, 1);
  second.release();  // not yet: the first sequence is read again
  s.expect({.free = 2, .pinned = 1, .quarantined = 1});
  third.release();
  s.expect({.free = 3, .evictable = 1});
}

// Places.

TEST_CASE("store sharing: units that are reserved in order lie side by side, written or not") {
  shelf_type s = make_shelf(128);
  for (const bool at_once : {true, false}) {
    CAPTURE(at_once);
    const sequence_id id = s.open();
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      std::vector<host_slot> slots;
      for (std::int32_t block = 0; block < 16; ++block) {
        slots.push_back(s.reserve(id, {layer, block}));
        if (at_once) s->commit(slots.back());
      }
      for (std::size_t i = 1; i < slots.size(); ++i) {
        CHECK(static_cast<std::int32_t>(slots[i]) == static_cast<std::int32_t>(slots[i - 1]) + 1);
        if (!at_once) s->commit(slots[i]);
      }
      if (!at_once) s->commit(slots[0]);
    }
  }
}

TEST_CASE("store sharing: after fragmentation, too, neighbours lie together where there is room") {
  shelf_type s = make_shelf(16 * 16, {.max_blocks = 64});
  // Layer by layer, block by block, of several sequences in turns; then every other one ends.
  std::vector<sequence_id> ids;
  for (int i = 0; i < 6; ++i) ids.push_back(s.open());
  for (std::int32_t block = 0; block < 20; ++block) {
    for (const sequence_id id : ids) s.put_blocks(id, block, block + 1);
  }
  for (std::size_t i = 0; i < ids.size(); i += 2) {
    CHECK(s->close_sequence(ids[i]) == close_outcome::closed);
  }
  const sequence_id id = s.open();
  const std::int64_t blocks = 60;
  CHECK(s.counts().free >= layers * blocks);
  std::int32_t adjacent = 0;
  for (std::int32_t layer = 0; layer < layers; ++layer) {
    std::int32_t before = -2;
    for (std::int32_t block = 0; block < blocks; ++block) {
      const host_slot slot = s.reserve(id, {layer, block});
      adjacent += index_of(slot) == before + 1 ? 1 : 0;
      before = index_of(slot);
      s->commit(slot);
    }
  }
  CHECK(adjacent >= 2 * blocks * 3 / 4);
}

TEST_CASE("store sharing: what is freed is zero where that was asked for, on every way") {
  shelf_type s = make_shelf(16, {.zero_freed = true, .integrity = pulseinfer::integrity::canary});
  const auto is_zero = [&](const std::byte* unit) {
    bool zero = true;
    for (std::int64_t i = 0; i < unit_bytes; ++i) zero = zero && unit[i] == std::byte{0};
    return zero;
  };
  const auto bytes_of = [&](sequence_id id, unit at) {
    return s->acquire(id, at.layer).find(logical_block{at.block});
  };
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 4);
  {
    const host_slot slot = s.reserve(id, {0, 9});
    const std::byte* const unit = s->writable(slot);
    s->abort(slot);
    CHECK(is_zero(unit));
  }
  const std::byte* const kept = bytes_of(id, {0, 0});
  const std::byte* const trimmed = bytes_of(id, {1, 3});
  (void)s->trim(id, 3);
  CHECK(is_zero(trimmed));
  CHECK(!is_zero(kept));
  const std::byte* const damaged = bytes_of(id, {0, 2});
  {
    lease_type lease = s->acquire(id, 0);
    const_cast<std::byte&>(damaged[0]) ^= std::byte{1};
    CHECK(lease.drop_if_corrupt(logical_block{2}));
    CHECK(!is_zero(damaged));  // it may be read
  }
  CHECK(is_zero(damaged));
  const std::byte* const evicted = bytes_of(id, {1, 2});
  const sequence_id writer = s.open();
  std::int32_t block = 0;
  while (s.counts().free > 0) s.put(writer, {0, block++});
  CHECK(!is_zero(evicted));
  const auto got = s->reserve(writer, 0, logical_block{block});  // in its place
  CHECK(s->writable(got.slot) == evicted);
  CHECK(is_zero(evicted));
  s->abort(got.slot);
  const std::byte* const closed = bytes_of(id, {0, 0});
  CHECK(s->close_sequence(id) == close_outcome::closed);
  CHECK(is_zero(closed));
}
