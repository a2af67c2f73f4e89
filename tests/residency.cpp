// SPDX-License-Identifier: Apache-2.0
/// @file
/// The row kernels of residency.hpp against a slow model, and the law that the size of the group
/// does not matter. With a backend they run in hot_buffer.cpp.
#include "pulseinfer/residency.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/detail/resolve_row.hpp"
#include "pulseinfer/detail/use_rank.hpp"
#include "support/lanes.hpp"

namespace {

using pulseinfer::unit_miss;
using pulseinfer::unit_status;
using pulseinfer::detail::single_lane;
using pulseinfer::detail::use_rank;

/// The tables of one layer.
struct tables {
  tables(std::size_t requests, std::size_t slots, std::size_t blocks,
         const std::vector<std::int32_t>& lent_slots)
      : slots_each(slots),
        blocks_each(blocks),
        block_in(requests * slots, -1),
        rank(requests * slots, 0),
        clock(requests, 0),
        reach(requests, 0),
        last_use(requests * slots, 0),
        totals(requests),
        mirrors(requests),
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
            .rank = rank.data(),
            .clock = clock.data(),
            .reach = reach.data(),
            .last_use = predicts ? last_use.data() : nullptr,
            .totals = totals.data(),
            .mirrors = mirrors.data(),
            .slot_of = slot_of.data(),
            .page_in = page_in.data(),
            .lent = lent.data(),
            .slots = static_cast<std::int64_t>(slots_each),
            .usable = usable,
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
  std::int64_t usable = 1 << 24;
  bool predicts = false;
  std::vector<std::int32_t> block_in;
  std::vector<std::int32_t> rank;
  std::vector<std::int32_t> clock;
  std::vector<std::int32_t> reach;
  std::vector<std::int32_t> last_use;
  std::vector<pulseinfer::detail::residency_totals> totals;
  std::vector<pulseinfer::residency_counts> mirrors;
  std::vector<std::int32_t> slot_of;
  std::vector<std::int32_t> page_in;
  std::vector<std::int32_t> lent;
};

/// A miss.
struct moved {
  std::int32_t block, slot, victim;
  bool operator==(const moved&) const = default;
};

/// What a step is given and what it says.
struct step {
  step(std::size_t row_count, std::size_t budget)
      : k(budget),
        requests(row_count),
        ids(row_count * budget, -1),
        counts(row_count),
        pages(row_count * budget, 77),
        scratch(2 * row_count * budget, 77),
        misses(row_count * budget, unit_miss{77, 77, 77, 77, unit_status::refused}),
        miss_counts(row_count, 77),
        chosen_counts(row_count, 77) {}
  std::int64_t rows() const { return static_cast<std::int64_t>(requests.size()); }
  /// Step `number` of every request.
  pulseinfer::detail::resolve_row body(tables& t, std::int32_t number, const use_rank& by = {}) {
    std::fill(t.clock.begin(), t.clock.end(), (number - 1) * by.per_step);
    return {.tables = t.view(),
            .requests = requests.data(),
            .ids = ids.data(),
            .counts = counts.data(),
            .k = static_cast<std::int64_t>(k),
            .pages = pages.data(),
            .scratch = scratch.data(),
            .misses = misses.data(),
            .miss_counts = miss_counts.data(),
            .chosen_counts = chosen_counts.data(),
            .ranks = by};
  }
  std::vector<moved> misses_of(std::size_t row) const {
    std::vector<moved> found;
    for (std::int32_t i = 0; i < miss_counts[row]; ++i) {
      const unit_miss& miss = misses[row * k + static_cast<std::size_t>(i)];
      CHECK(miss.status == unit_status::pending);
      found.push_back({miss.block, miss.slot, miss.victim});
    }
    return found;
  }

  std::size_t k;
  std::vector<std::int32_t> requests, ids, counts, pages, scratch;
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

/// One request by the book: a slot is a block, what its uses are worth, and whether it is in use.
struct model {
  struct slot {
    std::int32_t block = -1;
    std::int32_t rank = 0;
    bool in_use = false;
  };
  std::vector<slot> slots;
  use_rank by;

  /// The slot of each chosen block, and the misses.
  std::vector<std::int32_t> resolve(const std::vector<std::int32_t>& chosen, std::int32_t number,
                                    std::vector<moved>& misses) {
    std::vector<std::int32_t> where(chosen.size(), -1);
    for (slot& s : slots) s.in_use = false;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      for (std::size_t s = 0; s < slots.size(); ++s) {
        if (slots[s].block != chosen[i]) continue;
        where[i] = static_cast<std::int32_t>(s);
        slots[s].rank = by.again(slots[s].rank, number * by.per_step);
        slots[s].in_use = true;
      }
    }
    const auto wanted = static_cast<std::size_t>(std::count(where.begin(), where.end(), -1));
    std::vector<std::size_t> order;
    for (std::size_t s = 0; s < slots.size(); ++s) {
      if (!slots[s].in_use) order.push_back(s);  // nothing that this step uses is given up
    }
    REQUIRE(order.size() >= wanted);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return slots[a].rank < slots[b].rank; });
    order.resize(wanted);
    std::sort(order.begin(), order.end());
    std::size_t next = 0;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      if (where[i] >= 0) continue;
      const std::size_t s = order[next++];
      where[i] = static_cast<std::int32_t>(s);
      misses.push_back({chosen[i], where[i], slots[s].block});
      slots[s] = {chosen[i], number * by.per_step, true};
    }
    return where;
  }
};

/// The default rule, and uses that fade with several half-lives.
std::vector<use_rank> rules() {
  std::vector<use_rank> all(1);
  for (const std::int32_t bits : {4, 7, 10}) {
    use_rank by;
    by.per_step = 16;
    by.unit_bits = bits;
    all.push_back(by);
  }
  return all;
}

}  // namespace

TEST_CASE("residency: hits stay, the slots worth least go, as a slow model has it") {
  constexpr std::size_t requests = 3, slots = 9, blocks = 20, k = 5;
  for (const use_rank& by : rules()) {
    CAPTURE(by.unit_bits);
    pulseinfer::detail::random_source draw(11);
    const std::vector<std::int32_t> lent = {9, 5, 7};  // the second exactly the budget
    tables t(requests, slots, blocks, lent);
    t.usable = 8;  // of the first's nine slots the layer uses eight
    std::vector<model> models;
    for (const std::int32_t count : {8, 5, 7}) {
      models.push_back({std::vector<model::slot>(static_cast<std::size_t>(count)), by});
    }
    for (std::int32_t number = 1; number <= 200; ++number) {
      step s(requests, k);
      // Skewed: the more often a block is chosen again, the more is hit.
      choose(s, number % 3 == 0 ? blocks : 8, draw);
      const auto body = s.body(t, number, by);
      for (std::int64_t row = 0; row < s.rows(); ++row) body(row, single_lane{});
      for (std::size_t row = 0; row < requests; ++row) {
        const auto request = static_cast<std::size_t>(s.requests[row]);
        const auto first = s.ids.begin() + static_cast<std::ptrdiff_t>(row * k);
        const std::vector<std::int32_t> chosen(first, first + s.counts[row]);
        std::vector<moved> misses;
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
          CHECK(t.rank[request * slots + i] == models[request].slots[i].rank);
        }
      }
      REQUIRE(t.are_inverse());
    }
  }
}

TEST_CASE("residency: any ranks, and any guess of how far the victims are, give the same victims") {
  constexpr std::size_t slots = 70, blocks = 200, k = 24;
  pulseinfer::detail::random_source draw(13);
  for (int round = 0; round < 400; ++round) {
    tables t(1, slots, blocks, {static_cast<std::int32_t>(k + draw.below(slots - k + 1))});
    const std::int32_t number = 1 << draw.below(31);
    const std::uint64_t spread = std::uint64_t{1} << draw.below(28);
    model m{std::vector<model::slot>(static_cast<std::size_t>(t.lent[0])), {}};
    for (std::size_t s = 0; s < m.slots.size(); ++s) {
      if (draw.one_in(5)) continue;
      t.block_in[s] = static_cast<std::int32_t>(s);
      t.slot_of[s] = static_cast<std::int32_t>(s);
      t.rank[s] = static_cast<std::int32_t>(1 + draw.below(spread));
      m.slots[s] = {t.block_in[s], t.rank[s], false};
    }
    t.reach[0] = static_cast<std::int32_t>(draw.below(spread)) - 5;
    // As far ahead as a search may end: no sum of that and the clock is too large for what it is in.
    if (draw.one_in(4)) t.reach[0] = number - (pulseinfer::detail::resolve_row::in_use - 1);
    if (draw.one_in(4)) t.reach[0] = number;
    step s(1, k);
    choose(s, round % 2 == 0 ? blocks : slots, draw);
    s.body(t, number)(0, single_lane{});
    std::vector<moved> misses;
    (void)m.resolve({s.ids.begin(), s.ids.begin() + s.counts[0]}, number, misses);
    REQUIRE((s.misses_of(0) == misses));
  }
}

TEST_CASE("residency: of slots used at the same time the lower ones go first") {
  tables t(1, 6, 10, {6});
  step s(1, 3);
  s.ids = {0, 1, 2};
  s.counts = {3};
  s.body(t, 1)(0, single_lane{});
  CHECK((s.misses_of(0) == std::vector<moved>{{0, 0, -1}, {1, 1, -1}, {2, 2, -1}}));
  s.ids = {3, 4, 5};
  s.body(t, 2)(0, single_lane{});
  s.ids = {1, 6, 7};  // 1 is hit in slot 1; 0 and 2 are the oldest now, both of step 1
  s.body(t, 3)(0, single_lane{});
  CHECK((s.misses_of(0) == std::vector<moved>{{6, 0, 0}, {7, 2, 2}}));
  s.ids = {0, 2, 8};  // of three slots of step 2 all go; none of step 3
  s.body(t, 4)(0, single_lane{});
  CHECK((s.misses_of(0) == std::vector<moved>{{0, 3, 3}, {2, 4, 4}, {8, 5, 5}}));
}

TEST_CASE("residency: uses that fade are worth what the formula says") {
  for (const std::int32_t half_life : {1, 8, 64, 1024}) {
    CAPTURE(half_life);
    use_rank by;
    by.per_step = 16;
    by.unit_bits = static_cast<std::int32_t>(std::lround(std::log2(16 * half_life)));
    pulseinfer::detail::random_source draw(14);
    double worth = 0;  // at step 0
    std::int32_t rank = 0;
    for (std::int32_t number = 1; number <= 200;
         number += 1 + static_cast<std::int32_t>(draw.below(7))) {
      const std::int32_t clock = number * by.per_step;
      rank = worth == 0 ? clock : by.again(rank, clock);
      worth += std::exp2(double(number) / half_life);
      // In half-lives: nobody minds an eighth.
      CHECK(std::abs(rank / (16.0 * half_life) - std::log2(worth)) < 0.12);
    }
  }
  // A block chosen in each of eight steps outlives one chosen once, later.
  use_rank by;
  by.per_step = 16;
  by.unit_bits = 7;
  tables t(1, 3, 10, {3});
  step s(1, 2);
  s.counts = {1};
  for (std::int32_t number = 1; number <= 8; ++number) {
    s.ids = {4, -1};
    s.body(t, number, by)(0, single_lane{});
  }
  s.ids = {5, -1};
  s.body(t, 9, by)(0, single_lane{});
  s.counts = {2};
  s.ids = {6, 7};
  s.body(t, 10, by)(0, single_lane{});
  CHECK((s.misses_of(0) == std::vector<moved>{{6, 1, 5}, {7, 2, -1}}));
}

TEST_CASE("residency: the result does not depend on the size of the group") {
  constexpr std::size_t requests = 2, slots = 40, blocks = 90, k = 20;
  for (const int lanes : {2, 3, 32}) {
    CAPTURE(lanes);
    const use_rank by = rules()[lanes == 3 ? 2 : 0];
    pulseinfer::detail::random_source draw(12);
    tables one(requests, slots, blocks, {40, 21});
    one.predicts = true;
    tables many = one;
    for (std::int32_t number = 1; number <= 12; ++number) {
      step a(requests, k);
      choose(a, number % 2 == 0 ? blocks : 30, draw);
      step b = a;
      auto body = a.body(one, number, by);
      auto same = b.body(many, number, by);
      body.predicted = same.predicted = number % 4 == 3;
      for (std::int64_t r = 0; r < a.rows(); ++r) body(r, single_lane{});
      test::run_rows(b.rows(), lanes, same);
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
      for (std::int64_t r = 0; r < a.rows(); ++r) forget(r, single_lane{});
      test::run_rows(b.rows(), lanes,
                     pulseinfer::detail::forget_misses{many.view(), b.requests.data(),
                                                       b.misses.data(), b.miss_counts.data(), k});
      CHECK((one == many));
      CHECK(one.are_inverse());
    }
  }
}

TEST_CASE("residency: clocks that are wound back keep the order of uses") {
  constexpr std::int32_t limit = pulseinfer::detail::resolve_row::clock_limit;
  tables t(1, 4, 20, {4});
  t.clock[0] = limit - 3;
  for (std::int32_t i = 0; i < 6; ++i) {
    step s(1, 2);
    const std::int32_t block = 2 * i;
    s.ids = {block, block + 1};
    s.counts = {2};
    const std::int32_t clock = t.clock[0];
    auto body = s.body(t, 1);
    t.clock[0] = clock;  // as the step before left it
    body(0, single_lane{});
    REQUIRE(s.miss_counts[0] == 2);
    // Slots 0 and 1, then 2 and 3, in turns.
    CHECK(s.misses_of(0)[0].slot == (i % 2) * 2);
    CHECK(s.misses_of(0)[1].slot == (i % 2) * 2 + 1);
    CHECK(t.are_inverse());
  }
  CHECK(t.clock[0] == limit / 2 + 3);
  // A slot that was not used for as long as that: older than all others, not empty.
  t.rank = {5, limit - 1, 0, limit - 2};
  t.block_in[2] = -1;
  t.slot_of = std::vector<std::int32_t>(20, -1);
  for (const std::size_t slot : {0, 1, 3}) {
    t.slot_of[static_cast<std::size_t>(t.block_in[slot])] = static_cast<std::int32_t>(slot);
  }
  step s(1, 2);
  s.counts = {0};
  auto body = s.body(t, 1);
  t.clock[0] = limit;
  body(0, single_lane{});
  CHECK((t.rank == std::vector<std::int32_t>{1, limit / 2 - 1, 0, limit / 2 - 2}));
}

TEST_CASE("residency: a prediction spares what the last true choice used, and is counted") {
  tables t(1, 6, 20, {6});
  t.predicts = true;
  step s(1, 4);
  const auto run = [&](const std::vector<std::int32_t>& ids, bool predicted) {
    s.ids = ids;
    s.ids.resize(4, -1);
    s.counts = {static_cast<std::int32_t>(ids.size())};
    const std::int32_t clock = t.clock[0];
    auto body = s.body(t, 1);
    t.clock[0] = clock;
    body.predicted = predicted;
    body(0, single_lane{});
    CHECK(t.are_inverse());
    return s.misses_of(0);
  };
  const auto counts = [&] {
    CHECK((t.totals[0].counts == t.mirrors[0]));
    return t.mirrors[0];
  };
  using misses = std::vector<moved>;
  CHECK((run({9}, true) == misses{{9, 0, -1}}));  // before any true choice
  CHECK((run({1, 2, 3, 4}, false) == misses{{1, 1, -1}, {2, 2, -1}, {3, 3, -1}, {4, 4, -1}}));
  CHECK((counts() == pulseinfer::residency_counts{4, 4, 1, 0, 1}));
  // 3 stays where it is; 9's slot and the empty one are free, the other three are not.
  CHECK((run({3, 5, 6, 7}, true) == misses{{5, 0, 9}, {6, 5, -1}}));
  CHECK((s.pages == std::vector<std::int32_t>{t.page_in[3], t.page_in[0], t.page_in[5], -1}));
  CHECK(t.clock[0] == 1);
  CHECK(run({8, 10}, true).empty());  // nothing is left
  CHECK((s.pages == std::vector<std::int32_t>{-1, -1, -1, -1}));
  // The truth: 6 was brought. 5 was not chosen, and is worth less than what the last step used.
  CHECK((run({3, 6, 11}, false) == misses{{11, 0, 5}}));
  CHECK((counts() == pulseinfer::residency_counts{7, 5, 3, 1, 2}));
  // Again: that 6 was brought is long ago.
  CHECK((run({3, 6, 11}, false) == misses{}));
  CHECK((counts() == pulseinfer::residency_counts{10, 5, 3, 1, 2}));
}

TEST_CASE("residency: what a prediction did not bring counts neither as used nor as wasted") {
  tables t(1, 6, 20, {6});
  t.predicts = true;
  step s(1, 4);
  s.ids = {1, 2, 3, -1};
  s.counts = {3};
  auto body = s.body(t, 1);
  body.predicted = true;
  body(0, single_lane{});
  s.misses[0].status = unit_status::moved;
  s.misses[1].status = unit_status::failed;
  s.misses[2].status = unit_status::cancelled;
  const pulseinfer::detail::forget_misses forget{t.view(), s.requests.data(), s.misses.data(),
                                                 s.miss_counts.data(), 4};
  forget(0, single_lane{});
  forget(0, single_lane{});  // twice is as once
  CHECK((t.mirrors[0] == pulseinfer::residency_counts{0, 0, 1, 0, 0}));
  s.ids = {1, 2, 4, -1};
  s.body(t, 1)(0, single_lane{});
  CHECK((s.misses_of(0) == std::vector<moved>{{2, 1, -1}, {4, 2, -1}}));
  CHECK((t.mirrors[0] == pulseinfer::residency_counts{3, 2, 1, 1, 0}));
}

TEST_CASE("residency: predictions hold their marks when a clock is wound back") {
  constexpr std::int32_t limit = pulseinfer::detail::resolve_row::clock_limit;
  tables t(1, 3, 20, {3});
  t.predicts = true;
  t.clock[0] = limit;
  step s(1, 2);
  s.ids = {1, 2};
  s.counts = {2};
  auto body = s.body(t, 1);
  t.clock[0] = limit;
  body.predicted = true;
  body(0, single_lane{});
  body.predicted = false;
  body(0, single_lane{});  // winds back
  CHECK(t.clock[0] == limit / 2 + 1);
  CHECK((t.mirrors[0] == pulseinfer::residency_counts{2, 0, 2, 2, 0}));
}

TEST_CASE("residency: what did not arrive is forgotten, and its slot is the first to go") {
  tables t(1, 6, 10, {6});
  step s(1, 3);
  s.ids = {1, 2, 3};
  s.counts = {3};
  s.body(t, 1)(0, single_lane{});
  s.misses[0].status = unit_status::moved;
  s.misses[1].status = unit_status::failed;
  s.misses[2].status = unit_status::pending;
  const pulseinfer::detail::forget_misses forget{t.view(), s.requests.data(), s.misses.data(),
                                                 s.miss_counts.data(), 3};
  forget(0, single_lane{});
  CHECK(t.are_inverse());
  CHECK((t.block_in == std::vector<std::int32_t>{1, -1, -1, -1, -1, -1}));
  const tables after = t;
  forget(0, single_lane{});  // twice is as once
  CHECK((t == after));
  s.body(t, 2)(0, single_lane{});
  CHECK((s.misses_of(0) == std::vector<moved>{{2, 1, -1}, {3, 2, -1}}));

  // A row that is not in use has no tables, whatever a replay before has left in its mirror.
  const tables before = t;
  pulseinfer::detail::forget_misses of_nobody = forget;
  const std::int32_t nobody = -1;
  of_nobody.requests = &nobody;
  of_nobody.tables.block_in += 6;  // (so that there is memory before it)
  of_nobody.tables.slot_of += 10;
  of_nobody.tables.rank += 6;
  of_nobody(0, single_lane{});
  CHECK((t == before));

  // A slot that has another block meanwhile is left alone.
  t.block_in[1] = 9;
  t.slot_of[9] = 1;
  t.slot_of[2] = -1;
  s.misses[0].status = s.misses[1].status = unit_status::cancelled;
  forget(0, single_lane{});
  CHECK(t.block_in[1] == 9);
  CHECK(t.slot_of[9] == 1);
  CHECK(t.are_inverse());
}
