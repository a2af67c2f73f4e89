// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which free slot a store gets: behind its neighbour where it can be, else where there is room.
#include "pulseinfer/detail/slot_extents.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"

namespace {

using pulseinfer::detail::slot_extents;
constexpr std::int32_t extent = slot_extents::extent_slots;

}  // namespace

TEST_CASE("slot extents: every slot is handed out once, however many there are") {
  for (const std::int32_t count : {0, 1, 15, 16, 17, 31, 32, 33, 100}) {
    CAPTURE(count);
    slot_extents slots(count);
    CHECK(slots.size() == count);
    std::vector<bool> taken(static_cast<std::size_t>(count));
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int32_t slot = slots.take(slot_extents::none);
      REQUIRE(slot >= 0);
      REQUIRE(slot < count);
      CHECK(!taken[static_cast<std::size_t>(slot)]);
      taken[static_cast<std::size_t>(slot)] = true;
    }
    CHECK(slots.size() == 0);
    CHECK(slots.take(slot_extents::none) == slot_extents::none);
    CHECK(slots.take(0) == slot_extents::none);
  }
}

TEST_CASE("slot extents: who goes on gets the slot behind his own, to the end of the extent") {
  slot_extents slots(4 * extent);
  std::int32_t slot = slots.take(slot_extents::none);
  CHECK(slot % extent == 0);
  for (std::int32_t i = 1; i < extent; ++i) {
    const std::int32_t next = slots.take(slot);
    CHECK(next == slot + 1);
    slot = next;
  }
  const std::int32_t other = slots.take(slot);  // another extent, from its beginning
  CHECK(other % extent == 0);
  CHECK(other / extent != slot / extent);
}

TEST_CASE("slot extents: two who take turns stay each in their own extents") {
  slot_extents slots(8 * extent);
  std::int32_t last[2] = {slot_extents::none, slot_extents::none};
  int adjacent = 0;
  for (std::int32_t i = 0; i < 4 * extent; ++i) {
    for (std::int32_t& slot : last) {
      const std::int32_t next = slots.take(slot);
      adjacent += slot >= 0 && next == slot + 1 ? 1 : 0;
      slot = next;
    }
  }
  CHECK(adjacent == 2 * 4 * (extent - 1));
  CHECK(slots.size() == 0);
}

TEST_CASE("slot extents: where no extent is whole, any free slot will do") {
  slot_extents slots(2 * extent);
  for (std::int32_t i = 0; i < 2 * extent; ++i) (void)slots.take(slot_extents::none);
  slots.give(5);
  slots.give(20);
  CHECK(slots.take(18) == 5);  // 19 is taken
  CHECK(slots.take(19) == 20);
  slots.give(9);
  CHECK(slots.take(1000) == 9);  // a neighbour beyond the end is nobody's
}

TEST_CASE("slot extents: an extent that is whole again is one that is begun") {
  slot_extents slots(2 * extent);
  std::vector<std::int32_t> first, second;
  for (std::int32_t i = 0; i < extent; ++i) {
    first.push_back(slots.take(i == 0 ? slot_extents::none : first.back()));
    second.push_back(slots.take(i == 0 ? slot_extents::none : second.back()));
  }
  slots.give(second[3]);
  for (const std::int32_t slot : first) slots.give(slot);
  CHECK(slots.size() == extent + 1);
  CHECK(slots.take(slot_extents::none) == first[0]);  // not the hole
}

TEST_CASE("fault 13: a checkerboard that is given back is one run of all slots") {
  constexpr std::int32_t count = 16 * extent;
  for (const std::int32_t kept : {slot_extents::none, 3 * extent + 6, 3 * extent + 7}) {
    CAPTURE(kept);
    slot_extents slots(count);
    for (std::int32_t i = 0; i < count; ++i) (void)slots.take(slot_extents::none);
    for (const std::int32_t first : {0, 1}) {
      for (std::int32_t i = first; i < count; i += 2) {
        if (i != kept) slots.give(i);
      }
    }
    CHECK(slots.size() == count - (kept < 0 ? 0 : 1));
    // Two who take turns get runs of their own, and none of the extent of which a slot is taken.
    for (std::int32_t whole = count / extent - (kept < 0 ? 0 : 1); whole > 0; whole -= 2) {
      std::int32_t at[2] = {};
      for (std::int32_t i = 0; i < extent; ++i) {
        for (int who = 0; who < (whole > 1 ? 2 : 1); ++who) {
          const std::int32_t slot = slots.take(i == 0 ? slot_extents::none : at[who]);
          CHECK(slot == (i == 0 ? slot / extent * extent : at[who] + 1));
          if (kept >= 0) CHECK(slot / extent != kept / extent);
          at[who] = slot;
        }
      }
    }
    CHECK(slots.size() == (kept < 0 ? 0 : extent - 1));
  }
}

TEST_CASE("slot extents: random takes and gives agree with a set") {
  pulseinfer::detail::random_source draw(3);
  for (const std::int32_t count : {1, 16, 50, 333}) {
    slot_extents slots(count);
    std::vector<bool> is_free(static_cast<std::size_t>(count), true);
    std::vector<std::int32_t> taken;
    taken.reserve(static_cast<std::size_t>(count));
    const std::uint64_t reserved = test::allocations();
    for (int step = 0; step < 20'000; ++step) {
      if (draw.below(2) == 0) {
        const auto after =
            static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(count) + 2)) - 1;
        const std::int32_t slot = slots.take(after);
        REQUIRE((slot < 0) == (taken.size() == static_cast<std::size_t>(count)));
        if (slot < 0) continue;
        REQUIRE(is_free[static_cast<std::size_t>(slot)]);
        const std::int32_t wanted = after + 1;
        if (after >= 0 && wanted < count && wanted % extent != 0 &&
            is_free[static_cast<std::size_t>(wanted)]) {
          REQUIRE(slot == wanted);
        }
        is_free[static_cast<std::size_t>(slot)] = false;
        taken.push_back(slot);
      } else if (!taken.empty()) {
        std::swap(taken[draw.below(taken.size())], taken.back());
        is_free[static_cast<std::size_t>(taken.back())] = true;
        slots.give(taken.back());
        taken.pop_back();
      }
      REQUIRE(slots.size() == count - static_cast<std::int32_t>(taken.size()));
    }
    CHECK(test::allocations() == reserved);
  }
}

TEST_CASE("slot extents: the books are less than a byte a slot") {
  CHECK(slot_extents(1'000'000).bytes() < 1'000'000);
}
