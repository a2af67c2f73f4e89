// SPDX-License-Identifier: Apache-2.0
/// @file
/// Blocks of a store that have names: kept once their sequences are closed, found again by a
/// prompt, held, expired, given up in a policy's order, told of.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/eviction_adaptive_2q.hpp"
#include "pulseinfer/eviction_prefix_tree.hpp"
#include "pulseinfer/eviction_priority.hpp"
#include "support/store_shelf.hpp"

namespace {

using namespace store_test;
using pulseinfer::block_key;
using pulseinfer::name_outcome;
using pulseinfer::store_event;
using pulseinfer::trim_outcome;
using store_type = pulseinfer::block_store<test::backend>;
using shelf_type = shelf<store_type>;
using keys = std::vector<block_key>;
using what = store_event::what;

shelf_type make_shelf(std::int64_t units, const pulseinfer::block_store_options& options = {}) {
  return shelf_type(test::make_backend(), units, options);
}
template <class Policy>
using store_with = pulseinfer::block_store<test::backend, Policy>;
template <class Policy>
shelf<store_with<Policy>> make_shelf_with(std::int64_t units) {
  return shelf<store_with<Policy>>(test::make_backend(), units);
}

keys first_of(const keys& all, std::size_t count) {
  return {all.begin(), all.begin() + static_cast<std::ptrdiff_t>(count)};
}

}  // namespace

TEST_CASE("store prefix: blocks with names stay when their sequence is closed, and are found") {
  shelf_type s = make_shelf(10);
  const keys prompt = keys_of({1, 2, 3});
  const sequence_id writer = s.open();
  s.put_blocks(writer, 0, 3);
  s.name(writer, first_of(prompt, 2));
  CHECK(s->ready_blocks(prompt) == 2);  // as soon as they have names
  CHECK(s->close_sequence(writer) == close_outcome::closed);
  s.expect({.free = 6, .evictable = 4});  // the third is forgotten
  CHECK(s->ready_blocks(prompt) == 2);
  auto found = s->open_sequence(prompt);
  REQUIRE(found.has_value());
  CHECK(found->blocks == 2);
  CHECK(found->sequence != writer);
  CHECK(found->held.is_live());
  s.expect({.free = 6, .pinned = 4});
  CHECK(s.prefix_of(found->sequence) == 2);
  const auto lease = s->acquire(found->sequence, 1);
  CHECK(finds(lease, writer, {1, 1}));
  CHECK(lease.find(logical_block{2}) == nullptr);
  s.put_blocks(found->sequence, 2, 3);
  CHECK(finds(lease, found->sequence, {1, 2}));
}

TEST_CASE("store prefix: a prompt ends at its first block that is not there") {
  shelf_type s = make_shelf(20);
  const keys prompt = keys_of({1, 2, 3, 4});
  s.leave(prompt);
  struct asked {
    std::vector<std::int32_t> blocks;
    std::int32_t common;
  };
  for (const asked& a :
       {asked{{}, 0}, asked{{1}, 1}, asked{{1, 2, 3, 4}, 4}, asked{{1, 2, 3, 4, 5}, 4},
        asked{{1, 2, 9, 4}, 2}, asked{{9, 2, 3, 4}, 0}, asked{{2, 3}, 0}}) {
    const std::int32_t common = a.common;
    CAPTURE(common);
    const keys other = keys_of(a.blocks);
    CHECK(s->ready_blocks(other) == common);
    auto found = s->open_sequence(other);
    REQUIRE(found.has_value());
    CHECK(found->blocks == common);
    CHECK(s.prefix_of(found->sequence) == common);
    s.expect({.free = 12, .evictable = 8 - 2 * common, .pinned = 2 * common});
    found->held.release();
    s.expect({.free = 12, .evictable = 8});
    CHECK(s->close_sequence(found->sequence) == close_outcome::closed);
    s.expect({.free = 12, .evictable = 8});  // they stay once more
  }
}

TEST_CASE("store prefix: a block is found only where it stands, whoever asks") {
  shelf_type s = make_shelf(20);
  const keys names = keys_of({1, 2, 3});
  s.leave(names);
  const std::pair<keys, std::int32_t> asked[] = {
      {names, 3},
      {{names[1]}, 0},
      {{names[0], names[0]}, 1},
      {{names[0], names[2], names[1]}, 1},
      {{names[0], names[1], names[1]}, 2},
  };
  for (const auto& [prompt, found] : asked) {
    CHECK(s->ready_blocks(prompt) == found);
    const auto opened = s->open_sequence(prompt);
    REQUIRE(opened.has_value());
    CHECK(opened->blocks == found);
    (void)s->close_sequence(opened->sequence);
  }
}

TEST_CASE("store prefix: tenants share nothing, whatever their tokens") {
  shelf_type s = make_shelf(20);
  const keys one = keys_of({1, 2}, 1);
  const keys two = keys_of({1, 2}, 2);
  s.leave(one);
  CHECK(s->ready_blocks(two) == 0);
  CHECK(s->open_sequence(two)->blocks == 0);
  s.leave(two);
  s.expect({.free = 12, .evictable = 8});
  const auto of_one = s->open_sequence(one);
  const auto of_two = s->open_sequence(two);
  CHECK(s->acquire(of_one->sequence, 0).find(logical_block{0}) !=
        s->acquire(of_two->sequence, 0).find(logical_block{0}));
}

TEST_CASE("store prefix: a block is found when all its layers are there, not before") {
  shelf_type s = make_shelf(8);
  const keys prompt = keys_of({1, 2});
  const sequence_id id = s.open();
  s.put(id, {0, 0});
  const host_slot slot = s.reserve(id, {1, 0});
  CHECK(s->name_block(id, logical_block{0}, prompt[0]) == name_outcome::named);
  CHECK(s->ready_blocks(prompt) == 0);
  CHECK(s->open_sequence(prompt)->blocks == 0);
  s->commit(slot);
  CHECK(s->ready_blocks(prompt) == 1);
  s.put(id, {1, 1});
  CHECK(s->name_block(id, logical_block{1}, prompt[1]) == name_outcome::named);
  CHECK(s->ready_blocks(prompt) == 1);
  CHECK(s->close_sequence(id) == close_outcome::closed);
  s.expect({.free = 6, .evictable = 2});  // half a block does not stay
  const sequence_id again = s.open();
  s.put_blocks(again, 0, 2);
  CHECK(s->name_block(again, logical_block{0}, prompt[0]) == name_outcome::exists);
  CHECK(s->name_block(again, logical_block{1}, prompt[1]) ==
        name_outcome::named);  // the name was free
}

TEST_CASE("store prefix: the first block with a name keeps it, another one stays without") {
  shelf_type s = make_shelf(12);
  const keys prompt = keys_of({1, 2});
  const sequence_id first = s.open();
  const sequence_id second = s.open();
  s.put_blocks(first, 0, 2);
  s.put_blocks(second, 0, 2);
  s.name(first, prompt);
  s.name(first, prompt);  // again the same is no change
  CHECK(s->name_block(second, logical_block{0}, prompt[0]) == name_outcome::exists);
  CHECK(s->name_block(second, logical_block{1}, prompt[1]) == name_outcome::exists);
  CHECK_THROWS_WITH_AS((void)s->name_block(first, logical_block{0}, prompt[1]),
                       "block_store: block 0 has another name already", std::logic_error);
  s.expect({.free = 4, .evictable = 8});
  CHECK(s->close_sequence(second) == close_outcome::closed);
  s.expect({.free = 8, .evictable = 4});
  CHECK(s->close_sequence(first) == close_outcome::closed);
  CHECK(finds(s->acquire(s->open_sequence(prompt)->sequence, 0), first, {0, 1}));
}

TEST_CASE("store prefix: names that make no sense are refused, and change nothing") {
  shelf_type s = make_shelf(6, {.max_blocks = 4});
  const keys prompt = keys_of({1});
  const sequence_id stale = s.open();
  CHECK(s->close_sequence(stale) == close_outcome::closed);
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 1);
  CHECK_THROWS_WITH_AS((void)s->name_block(id, logical_block{1}, prompt[0]),
                       "block_store: block 1 has no unit that could be named", std::logic_error);
  CHECK_THROWS_AS((void)s->name_block(id, logical_block{4}, prompt[0]), std::out_of_range);
  CHECK_THROWS_AS((void)s->name_block(id, logical_block{-1}, prompt[0]), std::out_of_range);
  CHECK_THROWS_AS((void)s->name_block(stale, logical_block{0}, prompt[0]), std::invalid_argument);
  CHECK_THROWS_AS((void)s->name_block({}, logical_block{0}, prompt[0]), std::invalid_argument);
  CHECK(s->ready_blocks(prompt) == 0);
  CHECK(s->close_sequence(id) == close_outcome::closed);
  s.expect({.free = 6});
}

TEST_CASE("store prefix: a key of another place is not this place's block") {
  shelf_type s = make_shelf(8);
  const keys prompt = keys_of({1, 2});
  s.leave(prompt);
  const keys crossed{prompt[1], prompt[0]};
  CHECK(s->open_sequence(crossed)->blocks == 0);
  s.expect({.free = 4, .evictable = 4});
}

TEST_CASE("store prefix: a prompt of more blocks than a sequence may have") {
  shelf_type s = make_shelf(2 * 130, {.max_blocks = 64});
  std::vector<std::int32_t> blocks;
  for (std::int32_t i = 0; i < 130; ++i) blocks.push_back(i);
  const keys prompt = keys_of(blocks);
  s.leave(first_of(prompt, 64));
  CHECK(s->ready_blocks(prompt) == 64);
  CHECK(s->ready_blocks(first_of(prompt, 63)) == 63);
  CHECK(s->ready_blocks(first_of(prompt, 64)) == 64);
  CHECK(s->ready_blocks({}) == 0);
  CHECK(s->open_sequence(prompt)->blocks == 64);
}

TEST_CASE("store prefix: two who ask for a prefix share it, and it is counted once") {
  shelf_type s = make_shelf(10);
  const keys prompt = keys_of({1, 2});
  s.leave(prompt);
  auto one = s->open_sequence(prompt);
  auto two = s->open_sequence(prompt);
  s.expect({.free = 6, .pinned = 4});
  CHECK(s->acquire(one->sequence, 0).find(logical_block{1}) ==
        s->acquire(two->sequence, 0).find(logical_block{1}));
  s.put_blocks(one->sequence, 2, 3);
  CHECK(s.prefix_of(two->sequence) == 2);
  CHECK(s->close_sequence(one->sequence) == close_outcome::closed);
  s.expect({.free = 6, .pinned = 4});
  CHECK(s->close_sequence(two->sequence) == close_outcome::closed);
  s.expect({.free = 6, .evictable = 4});
}

TEST_CASE("store prefix: where no sequence is left, the prompt's blocks stay as they were") {
  shelf_type s = make_shelf(6, {.max_sequences = 1});
  const keys prompt = keys_of({1});
  s.leave(prompt);
  const sequence_id id = s.open();
  CHECK(!s->open_sequence(prompt).has_value());
  s.expect({.free = 4, .evictable = 2});
  CHECK(s->close_sequence(id) == close_outcome::closed);
  CHECK(s->open_sequence(prompt)->blocks == 1);
}

// Holds.

TEST_CASE("fault 1: what a prompt was told is there stays until it is leased") {
  shelf_type s = make_shelf(4);
  const keys prompt = keys_of({1});
  s.leave(prompt);
  auto found = s->open_sequence(prompt);
  const sequence_id writer = s.open();
  s.put_blocks(writer, 0, 1);
  s.fail_to_put(writer, {0, 1});
  const auto lease = s->acquire(found->sequence, 0);
  found->held.release();
  s.fail_to_put(writer, {0, 1});  // now the lease keeps it
  CHECK(lease.find(logical_block{0}) != nullptr);
}

TEST_CASE("fault 7: a prefix that is asked for and never read is given back") {
  enum class end { closed, dropped, replaced, expired };
  shelf_type s = make_shelf(4);
  const keys prompt = keys_of({1, 2});
  s.leave(prompt);
  const store_counts before = s.counts();
  for (int i = 0; i < 3; ++i) {
    for (const end how : {end::closed, end::dropped, end::replaced, end::expired}) {
      CAPTURE(static_cast<int>(how));
      auto found = s->open_sequence(prompt, 10);
      const sequence_id id = found->sequence;
      s.expect({.pinned = 4});
      if (how == end::closed) {
        CHECK(s->close_sequence(id) == close_outcome::closed);  // with its hold
        CHECK(!found->held.is_live());
      }
      if (how == end::dropped) found.reset();
      if (how == end::replaced) found->held = {};
      if (how == end::expired) CHECK(s->expire(10) == 1);
      s.expect({.evictable = 4});
      if (how != end::closed) CHECK(s->close_sequence(id) == close_outcome::closed);
      CHECK(s.counts() == before);
    }
  }
}

TEST_CASE("store prefix: a hold ends at its deadline, and not before") {
  shelf_type s = make_shelf(4);
  const keys prompt = keys_of({1});
  s.leave(prompt);
  auto early = s->open_sequence(prompt, 10);
  auto late = s->open_sequence(prompt, 20);
  auto never = s->open_sequence(prompt);
  CHECK(s->expire(9) == 0);
  CHECK(early->held.is_live());
  CHECK(s->expire(10) == 1);
  CHECK(!early->held.is_live());
  CHECK(s->expire(10) == 0);
  s.expect({.free = 2, .pinned = 2});
  CHECK(s->expire(1000) == 1);
  CHECK(!late->held.is_live());
  s.expect({.free = 2, .pinned = 2});
  never->held.release();
  s.expect({.free = 2, .evictable = 2});
  // The sequences are open as before, until their blocks are given up.
  CHECK(s.prefix_of(early->sequence) == 1);
  const sequence_id writer = s.open();
  s.put_blocks(writer, 0, 1);
  s.put(writer, {0, 1});
  CHECK(!s.has(early->sequence, {1, 0}));
  CHECK(!s.has(never->sequence, {1, 0}));
  CHECK(s->expire(std::numeric_limits<std::int64_t>::max()) == 0);
}

TEST_CASE("store prefix: a hold without a deadline does not end by itself, whatever time it is") {
  shelf_type s = make_shelf(4);
  s.leave(keys_of({1}));
  auto never = s->open_sequence(keys_of({1}));
  auto late = s->open_sequence(keys_of({1}), store_type::no_deadline - 1);
  CHECK(s->expire(store_type::no_deadline - 2) == 0);
  CHECK(s->expire(store_type::no_deadline) == 1);
  CHECK(!late->held.is_live());
  CHECK(never->held.is_live());
  s.expect({.free = 2, .pinned = 2});
  never->held.release();
  CHECK(s->expire(store_type::no_deadline) == 0);
  s.expect({.free = 2, .evictable = 2});
}

TEST_CASE("store prefix: who names what is there already does not change how long it stays") {
  auto s = make_shelf_with<pulseinfer::prioritized<>>(6);
  const keys prompt = keys_of({1});
  const pulseinfer::retention pinned{.priority = pulseinfer::never_evict};
  const auto can_go = [&] {
    const sequence_id writer = s.open();
    const logical_block blocks[] = {logical_block{0}, logical_block{1}, logical_block{2}};
    pulseinfer::reservation got[3 * layers];  // all that there is
    const bool is_room = s->reserve_whole(writer, blocks, got) == reserve_outcome::reserved;
    for (const pulseinfer::reservation& r : got) {
      if (is_room) s->abort(r.slot);
    }
    CHECK(s->close_sequence(writer) == close_outcome::closed);
    return is_room;
  };
  s.leave(prompt);
  const sequence_id twin = s.open();
  s.put_blocks(twin, 0, 1);
  CHECK(s->name_block(twin, logical_block{0}, prompt[0], pinned) == name_outcome::exists);
  CHECK(s->close_sequence(twin) == close_outcome::closed);
  CHECK(can_go());
  CHECK(s->ready_blocks(prompt) == 0);
  s.leave(prompt);
  const auto found = s->open_sequence(prompt);  // what is found is the block that has the name
  CHECK(s->name_block(found->sequence, logical_block{0}, prompt[0], pinned) == name_outcome::named);
  CHECK(s->close_sequence(found->sequence) == close_outcome::closed);
  CHECK(!can_go());
  CHECK(s->ready_blocks(prompt) == 1);
}

TEST_CASE("store prefix: holds move, and are let go once") {
  shelf_type s = make_shelf(8);
  s.leave(keys_of({1}));
  s.leave(keys_of({2}));
  auto one = s->open_sequence(keys_of({1}));
  auto two = s->open_sequence(keys_of({2}));
  store_type::hold none;
  CHECK(!none.is_live());
  none.release();
  store_type::hold moved(std::move(one->held));
  CHECK(!one->held.is_live());  // NOLINT: a moved-from hold holds nothing
  CHECK(moved.is_live());
  one->held.release();
  s.expect({.free = 4, .pinned = 4});
  moved = std::move(two->held);
  s.expect({.free = 4, .evictable = 2, .pinned = 2});
  store_type::hold& same = moved;
  moved = std::move(same);
  CHECK(moved.is_live());
  moved.release();
  moved.release();
  s.expect({.free = 4, .evictable = 4});
}

TEST_CASE("store prefix: a hold knows its sequence from the next one at the same place") {
  shelf_type s = make_shelf(4, {.max_sequences = 1});
  const keys prompt = keys_of({1});
  s.leave(prompt);
  auto first = s->open_sequence(prompt);
  CHECK(s->close_sequence(first->sequence) == close_outcome::closed);
  auto second = s->open_sequence(prompt);
  CHECK(second->sequence.index == first->sequence.index);
  CHECK(!first->held.is_live());
  first->held.release();
  CHECK(second->held.is_live());
  s.expect({.free = 2, .pinned = 2});
}

TEST_CASE("store prefix: a held sequence is not trimmed, and a read one is closed later") {
  shelf_type s = make_shelf(4);
  s.leave(keys_of({1}));
  auto found = s->open_sequence(keys_of({1}));
  CHECK(s->trim(found->sequence, 0) == trim_outcome::leased);
  auto lease = s->acquire(found->sequence, 0);
  CHECK(s->close_sequence(found->sequence) == close_outcome::deferred);
  s.expect({.free = 2, .quarantined = 2});
  lease.release();
  s.expect({.free = 2, .evictable = 2});
  CHECK(s->ready_blocks(keys_of({1})) == 1);
}

TEST_CASE("fault 10: what is found again while its closed sequence is read has two readers") {
  shelf_type s = make_shelf(4);
  const keys prompt = keys_of({1});
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 1);
  s.name(id, prompt);
  auto lease = s->acquire(id, 0);
  CHECK(s->close_sequence(id) == close_outcome::deferred);
  s.expect({.free = 2, .quarantined = 2});
  auto found = s->open_sequence(prompt);
  CHECK(found->blocks == 1);
  s.expect({.free = 2, .pinned = 2});
  found->held.release();
  lease.release();
  s.expect({.free = 2, .evictable = 2});
  CHECK(finds(s->acquire(found->sequence, 0), id, {0, 0}));
}

// What goes first.

TEST_CASE("store prefix: what only its name keeps goes before what is open, as a whole") {
  shelf_type s = make_shelf(6);
  const sequence_id old = s.open();
  s.put_blocks(old, 0, 1);
  s.leave(keys_of({1, 2}));
  const sequence_id writer = s.open();
  s.put(writer, {0, 0});
  s.expect({.free = 1, .evictable = 5});         // a block made room for two units
  CHECK(s->ready_blocks(keys_of({1, 2})) == 1);  // the tail went
  CHECK(s.prefix_of(old) == 1);
  s.put(writer, {1, 0});
  s.put(writer, {0, 1});
  CHECK(s->ready_blocks(keys_of({1, 2})) == 0);
  CHECK(s.prefix_of(old) == 1);
  s.put(writer, {1, 1});
  s.put(writer, {0, 2});
  CHECK(s.prefix_of(old) == 0);
}

TEST_CASE("fault 4: of prefixes the one goes that was not used for longest, its tail first") {
  shelf_type s = make_shelf(12);
  s.leave(keys_of({1, 2}));
  s.leave(keys_of({3, 4}));
  s.leave(keys_of({5, 6}));
  CHECK(s->close_sequence(s->open_sequence(keys_of({1, 2}))->sequence) == close_outcome::closed);
  const sequence_id writer = s.open();
  const auto left = [&] {
    return std::vector<std::int32_t>{s->ready_blocks(keys_of({1, 2})),
                                     s->ready_blocks(keys_of({3, 4})),
                                     s->ready_blocks(keys_of({5, 6}))};
  };
  const std::vector<std::vector<std::int32_t>> expected{{2, 1, 2}, {2, 0, 2}, {2, 0, 1},
                                                        {2, 0, 0}, {1, 0, 0}, {0, 0, 0}};
  for (std::size_t i = 0; i < expected.size(); ++i) {
    s.put_blocks(writer, static_cast<std::int32_t>(i), static_cast<std::int32_t>(i) + 1);
    CHECK(left() == expected[i]);
  }
  s.fail_to_put(writer, {0, 6});
}

TEST_CASE("fault 4: a tail behind a head that another sequence named goes before that head") {
  // Both write the same beginning; only the first one's blocks get the names, only the second one's
  // go on. However they are closed, the prefix shrinks from its end.
  for (const bool first_ends_first : {true, false}) {
    CAPTURE(first_ends_first);
    auto s = make_shelf_with<pulseinfer::prefix_tree_lru>(10);
    const keys prompt = keys_of({1, 2, 3});
    const sequence_id first = s.open();
    const sequence_id second = s.open();
    s.put_blocks(first, 0, 2);
    s.name(first, first_of(prompt, 2));
    s.put_blocks(second, 0, 3);
    CHECK(s->name_block(second, logical_block{0}, prompt[0]) == name_outcome::exists);
    CHECK(s->name_block(second, logical_block{1}, prompt[1]) == name_outcome::exists);
    CHECK(s->name_block(second, logical_block{2}, prompt[2]) == name_outcome::named);
    CHECK(s->ready_blocks(prompt) == 3);
    CHECK(s->close_sequence(first_ends_first ? first : second) == close_outcome::closed);
    CHECK(s->close_sequence(first_ends_first ? second : first) == close_outcome::closed);
    const sequence_id writer = s.open();
    std::int32_t block = 0;
    for (const std::int32_t left : {3, 3, 2, 1, 0}) {  // two of five blocks are free
      s.put_blocks(writer, block, block + 1);
      ++block;
      CHECK(s->ready_blocks(prompt) == left);
    }
  }
}

TEST_CASE("fault 65: ranks whose stores kept unequal parts of a prompt go on with what all have") {
  // The same calls, but rank 1 has less room; rank 2 has not seen the prompt before.
  shelf_type ranks[] = {make_shelf(20), make_shelf(10), make_shelf(20)};
  const keys prompt = keys_of({1, 2, 3, 4});
  for (const std::size_t among : {2, 3}) {
    CAPTURE(among);
    std::int32_t agreed = static_cast<std::int32_t>(prompt.size());
    std::vector<std::optional<store_type::opened_prefix>> found;
    for (std::size_t r = 0; r < among; ++r) {
      if (among == 2) {
        ranks[r].leave(prompt);
        const sequence_id other = ranks[r].open();
        ranks[r].put_blocks(other, 0, 3);
        CHECK(ranks[r]->close_sequence(other) == close_outcome::closed);
      }
      found.push_back(ranks[r]->open_sequence(prompt));
      agreed = std::min(agreed, found[r]->blocks);
    }
    CHECK(agreed == (among == 2 ? 2 : 0));
    CHECK(found[0]->blocks > agreed);
    for (std::size_t r = 0; r < among; ++r) {
      const sequence_id id = found[r]->sequence;
      found[r]->held.release();
      CHECK(ranks[r]->trim(id, agreed) == trim_outcome::trimmed);
      CHECK(ranks[r].prefix_of(id) == agreed);
      // From there on every rank is given the same, and has it.
      for (const std::int32_t layer : {0, 1}) {
        CHECK(ranks[r]->reserve(id, layer, logical_block{agreed}).outcome ==
              pulseinfer::reserve_outcome::reserved);
      }
    }
  }
}

TEST_CASE("store prefix: a prefix in use stays, what nobody uses behind it goes") {
  shelf_type s = make_shelf(6);
  s.leave(keys_of({1, 2, 3}));
  const auto found = s->open_sequence(keys_of({1}));
  const sequence_id writer = s.open();
  s.put_blocks(writer, 0, 2);
  CHECK(s->ready_blocks(keys_of({1, 2, 3})) == 1);
  s.fail_to_put(writer, {0, 2});
  CHECK(s.prefix_of(found->sequence) == 1);
}

TEST_CASE("store prefix: a block that loses a layer is not found until it is whole again") {
  shelf_type s = make_shelf(4, {.max_events = 8});
  const keys prompt = keys_of({1});
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 1);
  s.name(id, prompt);
  const sequence_id writer = s.open();
  s.put_blocks(writer, 0, 1);
  s.put(writer, {0, 1});
  CHECK(s.has(id, {0, 0}));
  CHECK(!s.has(id, {1, 0}));
  CHECK(s->ready_blocks(prompt) == 0);
  CHECK(s->close_sequence(writer) == close_outcome::closed);
  s.put(id, {1, 0});
  CHECK(s->ready_blocks(prompt) == 1);  // the name is its own still
  CHECK(s.events() == std::vector<store_event>{{what::stored, prompt[0]},
                                               {what::evicted, prompt[0]},
                                               {what::stored, prompt[0]}});
}

TEST_CASE("store prefix: where no record is left, a block that its name keeps goes") {
  shelf_type s = make_shelf(8, {.max_stored_blocks = 2});
  s.leave(keys_of({1, 2}));
  const sequence_id writer = s.open();
  s.put(writer, {0, 0});
  CHECK(s->ready_blocks(keys_of({1, 2})) == 1);
  s.put(writer, {0, 1});
  CHECK(s->ready_blocks(keys_of({1, 2})) == 0);
  s.fail_to_put(writer, {0, 2});
  s.expect({.free = 6, .evictable = 2});
}

TEST_CASE("store prefix: clear forgets what only names keep, and nothing else") {
  shelf_type s = make_shelf(20, {.max_events = 16});
  CHECK(s->clear() == 0);
  s.leave(keys_of({1, 2, 3}));
  const auto found = s->open_sequence(keys_of({1}));
  const sequence_id open = s.open();
  s.put_blocks(open, 0, 1);
  CHECK(s->name_block(open, logical_block{0}, keys_of({7})[0]) == name_outcome::named);
  CHECK(s.events().size() == 4);
  CHECK(s->clear() == 2);
  s.expect({.free = 16, .evictable = 2, .pinned = 2});
  CHECK(s->ready_blocks(keys_of({1, 2, 3})) == 1);
  CHECK(s->ready_blocks(keys_of({7})) == 1);
  CHECK(s.events().size() == 2);
  CHECK(s->clear() == 0);
  s.leave(keys_of({1, 2, 3}, 2));  // the names are free, and so are the records
  CHECK(s->clear() == 3);
}

// Policies.

TEST_CASE("store prefix: under priorities the lowest goes first, and pinned prefixes stay") {
  auto s = make_shelf_with<pulseinfer::prioritized<>>(6);
  s.leave(keys_of({1}), {.priority = 2});
  s.leave(keys_of({2}), {.priority = pulseinfer::never_evict});
  s.leave(keys_of({3}), {.priority = 0});
  const sequence_id writer = s.open();
  s.put_blocks(writer, 0, 1);
  CHECK(s->ready_blocks(keys_of({3})) == 0);
  CHECK(s->ready_blocks(keys_of({1})) == 1);
  s.put_blocks(writer, 1, 2);
  CHECK(s->ready_blocks(keys_of({1})) == 0);
  s.fail_to_put(writer, {0, 2});
  CHECK(s->ready_blocks(keys_of({2})) == 1);
  CHECK(s->clear() == 1);  // that is no eviction
  CHECK(s->ready_blocks(keys_of({2})) == 0);
  s.put_blocks(writer, 2, 3);
}

TEST_CASE("store prefix: a priority that the policy does not have is refused with the name") {
  auto s = make_shelf_with<pulseinfer::prioritized<>>(6);
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 1);
  for (const std::int32_t priority : {-1, 3, pulseinfer::never_evict - 1}) {
    CHECK_THROWS_WITH_AS(
        (void)s->name_block(id, logical_block{0}, keys_of({1})[0], {.priority = priority}),
        doctest::Contains("expected 0 to 2"), std::out_of_range);
  }
  CHECK(s->ready_blocks(keys_of({1})) == 0);
  s.name(id, keys_of({1}), {.priority = 1});
  CHECK_THROWS_AS((void)s->name_block(id, logical_block{0}, keys_of({1})[0], {.priority = 9}),
                  std::out_of_range);
  CHECK(s->close_sequence(id) == close_outcome::closed);
  CHECK(s->ready_blocks(keys_of({1})) == 1);
}

TEST_CASE("store prefix: a block is kept until its time, which the policy is told") {
  auto s = make_shelf_with<pulseinfer::prioritized<>>(6);
  s.leave(keys_of({1}), {.keep_until = 10});
  s.leave(keys_of({2}));
  s.leave(keys_of({3}));
  const sequence_id writer = s.open();
  s.put_blocks(writer, 0, 1);
  CHECK(s->ready_blocks(keys_of({1})) == 1);
  CHECK(s->ready_blocks(keys_of({2})) == 0);
  s->with_policy([](auto& policy) { policy.advance(10); });
  s.put_blocks(writer, 1, 2);
  CHECK(s->ready_blocks(keys_of({1})) == 0);
  CHECK(s->ready_blocks(keys_of({3})) == 1);
}

TEST_CASE("store prefix: a policy that knows the tree gives up no block before those behind it") {
  auto s = make_shelf_with<pulseinfer::prefix_tree_lru>(20);
  s.leave(keys_of({1, 2, 3}));
  s.leave(keys_of({4}));
  // The third block of the first chain is the most recent of all, its parents are older.
  auto found = s->open_sequence(keys_of({1, 2, 3}));
  const sequence_id child = s.fork(found->sequence, 2);
  CHECK(s->close_sequence(child) == close_outcome::closed);
  CHECK(s->close_sequence(found->sequence) == close_outcome::closed);
  const sequence_id writer = s.open();
  std::vector<std::int32_t> left;
  for (std::int32_t block = 0; block < 10; ++block) {
    s.put_blocks(writer, block, block + 1);
    const std::int32_t chain = s->ready_blocks(keys_of({1, 2, 3}));
    if (left.empty() || left.back() != chain) left.push_back(chain);
  }
  CHECK(left == std::vector<std::int32_t>{3, 2, 1, 0});
}

TEST_CASE("store prefix: a policy that remembers knows what comes back by its name") {
  auto s = make_shelf_with<pulseinfer::adaptive_2q>(8);
  for (int round = 0; round < 50; ++round) {
    for (std::int32_t i = 0; i < 3; ++i) {
      const auto found = s->open_sequence(keys_of({i}));
      if (found->blocks == 0) {
        s.put_blocks(found->sequence, 0, 1);
        s.name(found->sequence, keys_of({i}));
      }
      CHECK(s->close_sequence(found->sequence) == close_outcome::closed);
    }
    s.leave(keys_of({1000 + round}));  // traffic that is seen once
  }
  s.expect({.evictable = 8});
  CHECK(s->clear() == 4);
  s.expect({.free = 8});
}

// Events.

TEST_CASE("store prefix: events tell what became of names, in order") {
  shelf_type s = make_shelf(6, {.max_events = 16, .integrity = pulseinfer::integrity::canary});
  const keys prompt = keys_of({1, 2});
  const keys other = keys_of({3});
  s.leave(prompt);
  s.leave(other);
  const sequence_id writer = s.open();
  s.put(writer, {0, 0});  // the second block of the prompt goes
  {
    const auto found = s->open_sequence(other);
    auto lease = s->acquire(found->sequence, 0);
    const_cast<std::byte&>(lease.find(logical_block{0})[0]) ^= std::byte{1};
    CHECK(lease.drop_if_corrupt(logical_block{0}));
    CHECK(s->ready_blocks(other) == 0);
  }
  CHECK(s->clear() == 1);
  CHECK(s.events() == std::vector<store_event>{{what::stored, prompt[0]},
                                               {what::stored, prompt[1]},
                                               {what::stored, other[0]},
                                               {what::evicted, prompt[1]},
                                               {what::damaged, other[0]},
                                               {what::cleared, prompt[0]}});
  CHECK(s.events().empty());
  CHECK(s->lost_events() == 0);
}

TEST_CASE("store prefix: a block is told of when name and layers are there, whichever is last") {
  shelf_type s = make_shelf(6, {.max_events = 16});
  const keys prompt = keys_of({1, 2});
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 1);
  CHECK(s.events().empty());
  s.put(id, {0, 1});
  s.name(id, prompt);
  CHECK(s.events() == std::vector<store_event>{{what::stored, prompt[0]}});
  s.put(id, {1, 1});
  CHECK(s.events() == std::vector<store_event>{{what::stored, prompt[1]}});
  CHECK(s->close_sequence(id) == close_outcome::closed);  // they stay: nothing to tell
  CHECK(s.events().empty());
}

TEST_CASE("store prefix: events that find no room are lost, and counted; the older ones stay") {
  shelf_type s = make_shelf(20, {.max_events = 3});
  const keys prompt = keys_of({1, 2, 3, 4, 5});
  s.leave(prompt);
  CHECK(s->lost_events() == 2);
  std::vector<store_event> two(2);
  CHECK(s->drain_events({}) == 0);
  CHECK(s->drain_events(two) == 2);
  CHECK(two[0] == store_event{what::stored, prompt[0]});
  CHECK(two[1] == store_event{what::stored, prompt[1]});
  s.leave(keys_of({6}));  // there is room again
  CHECK(s.events() ==
        std::vector<store_event>{{what::stored, prompt[2]}, {what::stored, keys_of({6})[0]}});
  CHECK(s->lost_events() == 2);
  shelf_type without = make_shelf(4);
  without.leave(keys_of({1}));
  CHECK(without.events().empty());
  CHECK(without->lost_events() == 0);  // nobody wanted them
}
