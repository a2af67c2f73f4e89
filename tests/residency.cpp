// SPDX-License-Identifier: Apache-2.0
/// @file
/// The row kernels of residency.hpp against a slow model, and the law that the size of the group
/// does not matter. With a backend they run in hot_buffer.cpp.
#include "pulseinfer/residency.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/lanes.hpp"

namespace {

using pulseinfer::unit_miss;
using pulseinfer::unit_status;

/// The tables of one layer.
struct tables {
  tables(std::size_t requests, std::size_t slots, std::size_t blocks,
         const std::vector<std::int32_t>& lent_slots)
      : slots_each(slots),
        blocks_each(blocks),
        block_in(requests * slots, -1),
        last_use(requests * slots, 0),
        last_step(requests, 0),
        slot_of(requests * blocks, -1),
        page_in(requests * slots),
        lent(lent_slots) {
    // Pages are no slots, and in no order.
    for (std::size_t i = 0; i < page_in.size(); ++i) {
      page_in[i] = static_cast<std::int32_t>(1000 + (i * 7) % page_in.size());
    }
  }
  pulseinfer::detail::residency_tables view() {
    return {.block_in = block_in.data(),
            .last_use = last_use.data(),
            .last_step = last_step.data(),
            .slot_of = slot_of.data(),
            .page_in = page_in.data(),
            .lent = lent.data(),
            .slots = static_cast<std::int64_t>(slots_each),
            .max_blocks = static_cast<std::int64_t>(blocks_each)};
  }
  /// block_in and slot_of say the same of each other, and no slot beyond those lent is used.
  bool are_inverse() const {
    for (std::size_t r = 0; r < lent.size(); ++r) {
      for (std::size_t s = 0; s < slots_each; ++s) {
        const std::int32_t block = block_in[r * slots_each + s];
        if (block < 0) continue;
        if (s >= static_cast<std::size_t>(lent[r])) return false;
        if (slot_of[r * blocks_each + static_cast<std::size_t>(block)] !=
            static_cast<std::int32_t>(s)) {
          return false;
        }
      }
      for (std::size_t b = 0; b < blocks_each; ++b) {
        const std::int32_t slot = slot_of[r * blocks_each + b];
        if (slot >= 0 && block_in[r * slots_each + static_cast<std::size_t>(slot)] !=
                             static_cast<std::int32_t>(b)) {
          return false;
        }
      }
    }
    return true;
  }
  bool operator==(const tables&) const = default;

  std::size_t slots_each;
  std::size_t blocks_each;
  std::vector<std::int32_t> block_in;
  std::vector<std::int64_t> last_use;
  std::vector<std::int64_t> last_step;
  std::vector<std::int32_t> slot_of;
  std::vector<std::int32_t> page_in;
  std::vector<std::int32_t> lent;
};

/// What a step is given and what it says.
struct step {
  step(std::size_t row_count, std::size_t budget)
      : k(budget),
        requests(row_count),
        ids(row_count * budget, -1),
        counts(row_count),
        pages(row_count * budget, 77),
        victims(row_count * budget, 77),
        misses(row_count * budget, unit_miss{77, 77, 77, unit_status::refused}),
        miss_counts(row_count, 77),
        chosen_counts(row_count, 77) {}
  std::int64_t rows() const { return static_cast<std::int64_t>(requests.size()); }
  /// Step `number` of every request.
  pulseinfer::detail::resolve_row body(tables& t, std::int64_t number) {
    std::fill(t.last_step.begin(), t.last_step.end(), number - 1);
    return {.tables = t.view(),
            .requests = requests.data(),
            .ids = ids.data(),
            .counts = counts.data(),
            .k = static_cast<std::int64_t>(k),
            .pages = pages.data(),
            .victims = victims.data(),
            .misses = misses.data(),
            .miss_counts = miss_counts.data(),
            .chosen_counts = chosen_counts.data()};
  }
  std::vector<std::pair<std::int32_t, std::int32_t>> misses_of(std::size_t row) const {
    std::vector<std::pair<std::int32_t, std::int32_t>> found;
    for (std::int32_t i = 0; i < miss_counts[row]; ++i) {
      const unit_miss& miss = misses[row * k + static_cast<std::size_t>(i)];
      CHECK(miss.status == unit_status::pending);
      found.emplace_back(miss.block, miss.slot);
    }
    return found;
  }

  std::size_t k;
  std::vector<std::int32_t> requests, ids, counts, pages, victims;
  std::vector<unit_miss> misses;
  std::vector<std::int32_t> miss_counts, chosen_counts;
};

/// Draws an ascending selection for each row; some are short, some empty.
void choose(step& s, std::size_t blocks, pulseinfer::detail::random_source& draw) {
  std::vector<std::int32_t> requests;
  for (std::size_t r = 0; r < s.requests.size(); ++r) {
    requests.push_back(static_cast<std::int32_t>(r));
  }
  for (std::size_t row = 0; row < s.requests.size(); ++row) {
    const std::size_t taken = draw.below(requests.size());
    s.requests[row] = requests[taken];
    requests.erase(requests.begin() + static_cast<std::ptrdiff_t>(taken));
    const std::size_t want = draw.one_in(3) ? draw.below(s.k + 1) : s.k;
    std::vector<std::int32_t> chosen;
    for (std::size_t b = 0; b < blocks; ++b) {
      if (draw.below(blocks - b) < want - chosen.size()) {
        chosen.push_back(static_cast<std::int32_t>(b));
      }
    }
    REQUIRE(chosen.size() == want);
    s.counts[row] = static_cast<std::int32_t>(want);
    std::fill_n(s.ids.begin() + static_cast<std::ptrdiff_t>(row * s.k), s.k, -1);
    std::copy(chosen.begin(), chosen.end(), s.ids.begin() + static_cast<std::ptrdiff_t>(row * s.k));
  }
}

/// One request by the book: a slot is a block and the step of its last use.
struct model {
  struct slot {
    std::int32_t block = -1;
    std::int64_t use = 0;
  };
  std::vector<slot> slots;

  /// The slot of each chosen block, and the misses: (block, slot).
  std::vector<std::int32_t> resolve(const std::vector<std::int32_t>& chosen, std::int64_t number,
                                    std::vector<std::pair<std::int32_t, std::int32_t>>& misses) {
    std::vector<std::int32_t> where(chosen.size(), -1);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      for (std::size_t s = 0; s < slots.size(); ++s) {
        if (slots[s].block != chosen[i]) continue;
        where[i] = static_cast<std::int32_t>(s);
        slots[s].use = number;
      }
    }
    const auto wanted = std::count(where.begin(), where.end(), -1);
    std::vector<std::size_t> order(slots.size());
    for (std::size_t s = 0; s < order.size(); ++s) order[s] = s;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return slots[a].use < slots[b].use; });
    order.resize(static_cast<std::size_t>(wanted));
    std::sort(order.begin(), order.end());
    std::size_t next = 0;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      if (where[i] >= 0) continue;
      const std::size_t s = order[next++];
      CHECK(slots[s].use < number);  // nothing that this step uses is given up
      slots[s] = {chosen[i], number};
      where[i] = static_cast<std::int32_t>(s);
      misses.emplace_back(chosen[i], where[i]);
    }
    return where;
  }
};

}  // namespace

TEST_CASE("residency: hits stay, the slots used longest ago go, as a slow model has it") {
  pulseinfer::detail::random_source draw(11);
  constexpr std::size_t requests = 3, slots = 9, blocks = 20, k = 5;
  const std::vector<std::int32_t> lent = {9, 5, 7};  // the second exactly the budget
  tables t(requests, slots, blocks, lent);
  std::vector<model> models;
  for (const std::int32_t count : lent) {
    models.push_back({std::vector<model::slot>(static_cast<std::size_t>(count))});
  }
  for (std::int64_t number = 1; number <= 400; ++number) {
    step s(requests, k);
    // Skewed: the more often a block is chosen again, the more is hit.
    choose(s, number % 3 == 0 ? blocks : 8, draw);
    const auto body = s.body(t, number);
    for (std::int64_t row = 0; row < s.rows(); ++row) body(row, pulseinfer::detail::single_lane{});
    for (std::size_t row = 0; row < requests; ++row) {
      const auto request = static_cast<std::size_t>(s.requests[row]);
      const auto first = s.ids.begin() + static_cast<std::ptrdiff_t>(row * k);
      const std::vector<std::int32_t> chosen(first, first + s.counts[row]);
      std::vector<std::pair<std::int32_t, std::int32_t>> misses;
      const auto where = models[request].resolve(chosen, number, misses);
      CHECK(s.chosen_counts[row] == s.counts[row]);
      CHECK((s.misses_of(row) == misses));
      for (std::size_t i = 0; i < k; ++i) {
        const std::int32_t page =
            i < chosen.size() ? t.page_in[request * slots + static_cast<std::size_t>(where[i])]
                              : -1;
        CHECK(s.pages[row * k + i] == page);
      }
      for (std::int32_t i = 0; i < s.miss_counts[row]; ++i) {
        const unit_miss& miss = s.misses[row * k + static_cast<std::size_t>(i)];
        CHECK(miss.page == t.page_in[request * slots + static_cast<std::size_t>(miss.slot)]);
      }
      for (std::size_t i = 0; i < models[request].slots.size(); ++i) {
        CHECK(t.block_in[request * slots + i] == models[request].slots[i].block);
      }
    }
    REQUIRE(t.are_inverse());
  }
}

TEST_CASE("residency: of slots used at the same time the lower ones go first") {
  tables t(1, 6, 10, {6});
  step s(1, 3);
  s.ids = {0, 1, 2};
  s.counts = {3};
  s.body(t, 1)(0, pulseinfer::detail::single_lane{});
  CHECK((s.misses_of(0) ==
         std::vector<std::pair<std::int32_t, std::int32_t>>{{0, 0}, {1, 1}, {2, 2}}));
  s.ids = {3, 4, 5};
  s.body(t, 2)(0, pulseinfer::detail::single_lane{});
  s.ids = {1, 6, 7};  // 1 is hit in slot 1; 0 and 2 are the oldest now, both of step 1
  s.body(t, 3)(0, pulseinfer::detail::single_lane{});
  CHECK((s.misses_of(0) == std::vector<std::pair<std::int32_t, std::int32_t>>{{6, 0}, {7, 2}}));
  s.ids = {0, 2, 8};  // of three slots of step 2 all go; none of step 3
  s.body(t, 4)(0, pulseinfer::detail::single_lane{});
  CHECK((s.misses_of(0) ==
         std::vector<std::pair<std::int32_t, std::int32_t>>{{0, 3}, {2, 4}, {8, 5}}));
}

TEST_CASE("residency: the result does not depend on the size of the group") {
  constexpr std::size_t requests = 2, slots = 40, blocks = 90, k = 20;
  for (const int lanes : {2, 3, 32}) {
    CAPTURE(lanes);
    pulseinfer::detail::random_source draw(12);
    tables one(requests, slots, blocks, {40, 21});
    tables many = one;
    for (std::int64_t number = 1; number <= 12; ++number) {
      step a(requests, k);
      choose(a, number % 2 == 0 ? blocks : 30, draw);
      step b = a;
      const auto body = a.body(one, number);
      for (std::int64_t r = 0; r < a.rows(); ++r) body(r, pulseinfer::detail::single_lane{});
      test::run_rows(b.rows(), lanes, b.body(many, number));
      CHECK((a.pages == b.pages));
      CHECK((a.miss_counts == b.miss_counts));
      CHECK((a.chosen_counts == b.chosen_counts));
      for (std::size_t row = 0; row < requests; ++row) {
        CHECK((a.misses_of(row) == b.misses_of(row)));
      }
      CHECK((one == many));
      // Every third miss does not arrive.
      for (step* s : {&a, &b}) {
        for (std::size_t i = 0; i < s->misses.size(); ++i) {
          s->misses[i].status = i % 3 == 0 ? unit_status::missing : unit_status::moved;
        }
      }
      const pulseinfer::detail::forget_misses forget{one.view(), a.requests.data(), a.misses.data(),
                                                     a.miss_counts.data(), k};
      for (std::int64_t r = 0; r < a.rows(); ++r) forget(r, pulseinfer::detail::single_lane{});
      test::run_rows(b.rows(), lanes,
                     pulseinfer::detail::forget_misses{many.view(), b.requests.data(),
                                                       b.misses.data(), b.miss_counts.data(), k});
      CHECK((one == many));
      CHECK(one.are_inverse());
    }
  }
}

TEST_CASE("residency: the order of uses holds beyond 2^31 steps") {
  constexpr std::int64_t late = (std::int64_t{1} << 31) - 2;
  tables t(1, 4, 20, {4});
  for (std::int64_t i = 0; i < 6; ++i) {
    step s(1, 2);
    const auto block = static_cast<std::int32_t>(2 * i);
    s.ids = {block, block + 1};
    s.counts = {2};
    s.body(t, late + i)(0, pulseinfer::detail::single_lane{});
    REQUIRE(s.miss_counts[0] == 2);
    // Slots 0 and 1, then 2 and 3, in turns.
    CHECK(s.misses_of(0)[0].second == (i % 2) * 2);
    CHECK(s.misses_of(0)[1].second == (i % 2) * 2 + 1);
    CHECK(t.are_inverse());
  }
}

TEST_CASE("residency: what did not arrive is forgotten, and its slot is the first to go") {
  tables t(1, 6, 10, {6});
  step s(1, 3);
  s.ids = {1, 2, 3};
  s.counts = {3};
  s.body(t, 1)(0, pulseinfer::detail::single_lane{});
  s.misses[0].status = unit_status::moved;
  s.misses[1].status = unit_status::failed;
  s.misses[2].status = unit_status::pending;
  const pulseinfer::detail::forget_misses forget{t.view(), s.requests.data(), s.misses.data(),
                                                 s.miss_counts.data(), 3};
  forget(0, pulseinfer::detail::single_lane{});
  CHECK(t.are_inverse());
  CHECK((t.block_in == std::vector<std::int32_t>{1, -1, -1, -1, -1, -1}));
  const tables after = t;
  forget(0, pulseinfer::detail::single_lane{});  // twice is as once
  CHECK((t == after));
  s.body(t, 2)(0, pulseinfer::detail::single_lane{});
  CHECK((s.misses_of(0) == std::vector<std::pair<std::int32_t, std::int32_t>>{{2, 1}, {3, 2}}));

  // A slot that has another block meanwhile is left alone.
  t.block_in[1] = 9;
  t.slot_of[9] = 1;
  t.slot_of[2] = -1;
  s.misses[0].status = s.misses[1].status = unit_status::cancelled;
  forget(0, pulseinfer::detail::single_lane{});
  CHECK(t.block_in[1] == 9);
  CHECK(t.slot_of[9] == 1);
  CHECK(t.are_inverse());
}
