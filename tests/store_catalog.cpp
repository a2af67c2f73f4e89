// SPDX-License-Identifier: Apache-2.0
/// @file
/// The books of a store: which slots are a block's, and who holds it.
#include "pulseinfer/detail/store_catalog.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "support/allocations.hpp"

namespace {

using pulseinfer::detail::slot_state;
using pulseinfer::detail::store_catalog;
using numbers = std::vector<std::int32_t>;

numbers holders_of(const store_catalog& c, std::int32_t block) {
  numbers found;
  c.each_holder(block, [&](std::int32_t s) { found.push_back(s); });
  std::sort(found.begin(), found.end());
  return found;
}
std::vector<std::pair<std::int32_t, std::int32_t>> slots_of(const store_catalog& c,
                                                            std::int32_t block, slot_state state) {
  std::vector<std::pair<std::int32_t, std::int32_t>> found;
  c.each_slot(block, state,
              [&](std::int32_t slot, std::int32_t layer) { found.emplace_back(slot, layer); });
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

TEST_CASE("store catalog: blocks are made until there is none, and again when they are forgotten") {
  store_catalog c(4, 2, 1, 8);
  CHECK(c.free_blocks() > 0);
  const std::int32_t a = c.make(3);
  const std::int32_t b = c.make(0);
  CHECK(a != b);
  CHECK(c.free_blocks() == 0);
  CHECK(c.at(a).position == 3);
  CHECK(c.at(b).position == 0);
  CHECK(c.at(a).is_empty());
  const std::uint32_t generation = c.at(a).generation;
  c.at(a).has_name = c.at(a).is_orphan = true;
  c.at(a).priority = 5;
  c.forget(a);
  CHECK(c.free_blocks() > 0);
  CHECK(c.make(1) == a);
  CHECK(c.at(a).generation == generation + 1);  // another block, with nothing of the one before
  CHECK(!c.at(a).has_name);
  CHECK(!c.at(a).is_orphan);
  CHECK(c.at(a).priority == 0);
}

TEST_CASE("store catalog: holders come and go in any order") {
  store_catalog c(1, 2, 4, 2);
  const std::int32_t a = c.make(1);
  const std::int32_t b = c.make(0);
  CHECK(holders_of(c, a).empty());
  CHECK(c.all_holders(a, [](std::int32_t) { return false; }));  // of nobody all is true
  for (const std::int32_t s : {2, 0, 3}) c.hold(a, s);
  c.hold(b, 3);
  CHECK(holders_of(c, a) == numbers{0, 2, 3});
  CHECK(holders_of(c, b) == numbers{3});
  CHECK(c.block_of(3, 1) == a);
  CHECK(c.block_of(3, 0) == b);
  CHECK(c.block_of(1, 1) == store_catalog::none);
  CHECK(c.all_holders(a, [](std::int32_t s) { return s != 1; }));
  CHECK(!c.all_holders(a, [](std::int32_t s) { return s != 2; }));
  c.let_go(a, 0);
  CHECK(holders_of(c, a) == numbers{2, 3});
  CHECK(c.block_of(0, 1) == store_catalog::none);
  c.each_holder(a, [&](std::int32_t s) { c.let_go(a, s); });
  CHECK(holders_of(c, a).empty());
  CHECK(holders_of(c, b) == numbers{3});
}

TEST_CASE("store catalog: slots have one state each, and are counted") {
  store_catalog c(8, 2, 1, 2);
  const std::int32_t a = c.make(0);
  const std::int32_t b = c.make(1);
  c.add_slot(5, a, 0);
  c.add_slot(2, a, 1);
  c.add_slot(7, a, 2);
  c.add_slot(3, b, 0);
  CHECK(c.at(a).writing == 3);
  CHECK(c.state_of(5) == slot_state::writing);
  CHECK(c.block_of_slot(7) == a);
  CHECK(c.layer_of_slot(7) == 2);
  CHECK(c.slot_of(a, 1) == 2);
  CHECK(c.slot_of(a, 3) == store_catalog::none);
  c.set_state(5, slot_state::ready);
  c.set_state(7, slot_state::ready);
  CHECK(c.at(a).ready == 2);
  CHECK(c.at(a).writing == 1);
  CHECK(c.at(a).corrupt == 0);
  CHECK(!c.at(a).is_ready_only());
  using pairs = std::vector<std::pair<std::int32_t, std::int32_t>>;
  CHECK(slots_of(c, a, slot_state::ready) == pairs{{5, 0}, {7, 2}});
  CHECK(slots_of(c, a, slot_state::writing) == pairs{{2, 1}});
  c.set_state(5, slot_state::corrupt);
  CHECK(c.at(a).ready == 1);
  CHECK(c.at(a).corrupt == 1);
  CHECK(c.slot_of(a, 0) == store_catalog::none);  // what is damaged is not the layer's any more
  c.add_slot(0, a, 0);
  CHECK(c.slot_of(a, 0) == 0);
  c.remove_slot(2);
  c.remove_slot(0);
  c.remove_slot(5);
  CHECK(c.state_of(2) == slot_state::free);
  CHECK(c.at(a).is_ready_only());
  c.each_slot(a, slot_state::ready, [&](std::int32_t slot, std::int32_t) { c.remove_slot(slot); });
  CHECK(c.at(a).is_empty());
  CHECK(c.at(b).writing == 1);
}

TEST_CASE("store catalog: nothing is allocated but by the constructor") {
  store_catalog c(64, 16, 4, 16);
  const std::uint64_t before = test::allocations();
  for (int round = 0; round < 100; ++round) {
    const std::int32_t block = c.make(round % 16);
    c.hold(block, round % 4);
    c.add_slot(round % 64, block, 0);
    c.set_state(round % 64, slot_state::ready);
    c.remove_slot(round % 64);
    c.let_go(block, round % 4);
    c.forget(block);
  }
  CHECK(test::allocations() == before);
  CHECK(c.bytes() > 0);
}
