// SPDX-License-Identifier: Apache-2.0
/// @file
/// Misses that kernels fetch: the same pages and bytes as a recall's, with nobody told. Captured in
/// graphs they are tested in cuda_graph.cpp.
#include "pulseinfer/pull.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/pull_rig.hpp"

namespace {

using backend = test::backend;
using rig = test::pull_rig<backend>;
using pulseinfer::sequence_id;
using pulseinfer::take_back_outcome;
using pulseinfer::unit_status;
using ints = std::vector<std::int32_t>;

template <class Case>
void each(Case run) {
  test::each_backend([&](backend machine) { run(machine); });
}

ints blocks(std::int32_t count) {
  ints all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

struct broken_kernel {
  void operator()(std::int64_t, std::int64_t) const {
    throw pulseinfer::device_error("broken_kernel: failed on purpose");
  }
};

/// A kernel of a device cannot throw, and a device does not recover.
template <class Backend>
inline constexpr bool recovers = test::device_memory_is_host_readable;

template <class Backend>
void pull_behind_a_failure(Backend machine) {
  if constexpr (recovers<Backend>) {
    rig r(machine);
    const sequence_id id = r.stored(1, blocks(8));
    r.lend(0, 0, 6);
    const auto chosen = r.choice({{1, 2}});
    const auto& batch = r.rows_of({0});
    const auto* views = r.views(0, {id});
    const auto fail = [&] { machine.for_each({1, 1}, {}, 0, broken_kernel{}, r.stream); };
    const auto clear = [&] { CHECK_THROWS_AS(machine.sync(r.stream), pulseinfer::device_error); };
    const auto step = r.hot.resolve(0, batch, chosen, r.stream);
    REQUIRE(step.has_value());
    fail();
    r.puller.pull(r.hot, *step, batch.device_requests, views, r.stream);
    clear();
    // The misses would be taken for hits.
    CHECK_THROWS_AS((void)r.hot.resolve(0, batch, chosen, r.stream), pulseinfer::device_error);
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::in_use);
    r.hot.discard(*step, batch, r.stream);
    machine.sync(r.stream);
    const auto again = r.pull(0, {0}, {id}, {{1, 2}});
    REQUIRE(again.has_value());
    CHECK((rig::missed(*again, 0) == ints{1, 2}));
    CHECK(r.holds(0, r.pages_of(*again)[0], 1, {1, 2}));

    const auto held = r.hot.hold_step(0, 1);
    REQUIRE(held.has_value());
    const auto more = r.choice({{2, 3}});
    r.hot.resolve_held(*held, batch.device_requests, more, r.stream);
    fail();
    r.puller.pull(r.hot, *held, batch.device_requests, r.views(0, {id}), r.stream);
    clear();
    CHECK((rig::missed(*held, 0) == ints{3}));
    CHECK(held->misses(0)[0].status == unit_status::pending);
    r.hot.forget_held(*held, batch.device_requests, r.stream);
    r.hot.resolve_held(*held, batch.device_requests, more, r.stream);
    r.puller.pull(r.hot, *held, batch.device_requests, r.views(0, {id}), r.stream);
    machine.sync(r.stream);
    CHECK((rig::missed(*held, 0) == ints{3}));
    CHECK(r.holds(0, r.pages_of(*held)[0], 1, {2, 3}));
    r.hot.drop_step(*held);
  }
}

}  // namespace

TEST_CASE("pull: misses of all rows come, hits stay, and the step ends by itself") {
  each([](backend machine) {
    for (const int max_ctas : {1, 3, 0}) {
      CAPTURE(max_ctas);
      rig r(machine, {}, max_ctas);
      const sequence_id first = r.stored(1, blocks(20)), second = r.stored(2, blocks(20));
      r.lend(0, 30, 6);
      r.lend(2, 50, 5);
      const auto step = r.pull(1, {2, 0}, {second, first}, {{3, 7}, {2, 5, 7, 9}});
      REQUIRE(step.has_value());
      auto pages = r.pages_of(*step);
      CHECK(r.holds(1, pages[0], 2, {3, 7}));
      CHECK(r.holds(1, pages[1], 1, {2, 5, 7, 9}));
      CHECK((rig::missed(*step, 1) == ints{2, 5, 7, 9}));
      for (std::int32_t row = 0; row < 2; ++row) {
        for (const auto& miss : step->misses(row)) CHECK(miss.status == unit_status::moved);
      }
      CHECK_FALSE(step->is_open());
      // 5, 7 and 9 stay where they are.
      const auto next = r.pull(1, {0}, {first}, {{5, 7, 9, 11}});
      REQUIRE(next.has_value());
      CHECK((rig::missed(*next, 0) == ints{11}));
      CHECK(r.pages_of(*next)[0][0] == pages[1][1]);
      CHECK(r.holds(1, r.pages_of(*next)[0], 1, {5, 7, 9, 11}));
      CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::taken);
      CHECK(r.hot.try_take_back(2, r.stream) == take_back_outcome::taken);
      r.end_leases();
      CHECK(rig::at_rest(r.store.counts()));
      r.machine.sync(r.stream);
    }
  });
}

TEST_CASE("pull: what is pulled is what a recall brings, step after step") {
  each([](backend machine) {
    rig pulled(machine);
    test::offload_rig<backend> recalled(machine);
    const auto store = [](auto& r) {
      r.lend(0, 10, 6);
      r.lend(1, 40, 4);
      return std::vector<sequence_id>{r.stored(1, blocks(24)), r.stored(2, blocks(24))};
    };
    const auto sequences = store(pulled), others = store(recalled);
    pulseinfer::detail::random_source draw(31);
    for (int i = 0; i < 12; ++i) {
      std::vector<ints> chosen(2);
      for (ints& row : chosen) {
        const std::uint64_t range = i % 3 == 0 ? 24 : 8;
        for (std::int32_t b = 0; b < 24 && row.size() < 4; ++b) {
          if (static_cast<std::uint64_t>(b) < range && draw.one_in(2)) row.push_back(b);
        }
      }
      const auto layer = static_cast<std::int32_t>(draw.below(2));
      const auto a = pulled.pull(layer, {0, 1}, sequences, chosen);
      const auto b = recalled.resolve(layer, {0, 1}, chosen);
      REQUIRE(a.has_value());
      REQUIRE(b.has_value());
      auto ticket = recalled.mover.recall(*b, others, recalled.stream);
      REQUIRE(ticket.has_value());
      ticket->sync();
      const auto pages = pulled.pages_of(*a);
      CHECK((pages == recalled.pages_of(*b)));
      for (std::int32_t row = 0; row < 2; ++row) {
        CHECK((rig::missed(*a, row) == rig::missed(*b, row)));
        CHECK(pulled.holds(layer, pages[static_cast<std::size_t>(row)], row + 1,
                           chosen[static_cast<std::size_t>(row)]));
      }
    }
  });
}

TEST_CASE("pull: what the store lacks is missing, out of the page table, and missed again") {
  each([](backend machine) {
    rig r(machine);
    const sequence_id id = r.stored(1, {0, 1, 2, 5});
    const sequence_id other = r.stored(2, blocks(8));
    r.lend(0, 0, 6);
    r.lend(1, 10, 6);
    const auto step = r.pull(0, {0, 1}, {id, other}, {{1, 3, 4, 5}, {3, 4}});
    REQUIRE(step.has_value());
    const auto misses = step->misses(0);
    REQUIRE(misses.size() == 4);
    CHECK(misses[0].status == unit_status::moved);
    CHECK(misses[1].status == unit_status::missing);
    CHECK(misses[2].status == unit_status::missing);
    CHECK(misses[3].status == unit_status::moved);
    const auto pages = r.pages_of(*step);
    CHECK((pages[0] == ints{0, -1, -1, 3}));
    CHECK(r.holds(0, pages[1], 2, {3, 4}));
    CHECK((r.pages.get(0, 0) == test::stamp(rig::geometry, 1, 0, 1)));
    CHECK((r.pages.get(0, 3) == test::stamp(rig::geometry, 1, 0, 5)));
    r.end_leases();
    r.add(id, 1, 0, 3);
    const auto next = r.pull(0, {0}, {id}, {{1, 3, 4, 5}});
    REQUIRE(next.has_value());
    CHECK((rig::missed(*next, 0) == ints{3, 4}));
    CHECK(next->misses(0)[0].status == unit_status::moved);
    CHECK(next->misses(0)[1].status == unit_status::missing);
    CHECK(r.pages_of(*next)[0][2] == -1);
    // A row without a view finds nothing at all.
    const auto last = r.pull(0, {0}, {sequence_id{}}, {{0, 1}});
    REQUIRE(last.has_value());
    CHECK((rig::missed(*last, 0) == ints{0}));
    CHECK(last->misses(0)[0].status == unit_status::missing);
  });
}

TEST_CASE("pull: nothing to pull") {
  each([](backend machine) {
    rig r(machine);
    const sequence_id id = r.stored(1, blocks(4));
    r.lend(0, 0, 6);
    for (int i = 0; i < 6; ++i) {  // more often than there are steps in flight
      const auto none = r.pull(0, {0}, {id}, {{}});
      REQUIRE(none.has_value());
      CHECK(none->misses(0).empty());
      REQUIRE(r.pull(0, {}, {}, {}).has_value());
    }
    REQUIRE(r.pull(0, {0}, {id}, {{1, 2}}).has_value());
    const auto hits = r.pull(0, {0}, {id}, {{1, 2}});
    REQUIRE(hits.has_value());
    CHECK(hits->misses(0).empty());
    CHECK(r.holds(0, r.pages_of(*hits)[0], 1, {1, 2}));
  });
}

TEST_CASE("pull: pages are not taken back before the stream is through") {
  each([](backend machine) {
    rig r(machine);
    const sequence_id id = r.stored(1, blocks(4));
    r.lend(0, 0, 6);
    const auto chosen = r.choice({{1, 2}});
    const auto& batch = r.rows_of({0});
    const auto* views = r.views(0, {id});
    r.machine.sync(r.stream);
    test::hold<backend> held(machine, r.stream);
    const auto step = r.hot.resolve(0, batch, chosen, r.stream);
    REQUIRE(step.has_value());
    r.puller.pull(r.hot, *step, batch.device_requests, views, r.stream);
    if constexpr (test::hold<backend>::is_exact) {
      CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::in_use);
    }
    CHECK_THROWS_AS(r.puller.pull(r.hot, *step, batch.device_requests, views, r.stream),
                    std::logic_error);
    CHECK_THROWS_AS((void)r.mover.recall(*step, {&id, 1}, r.stream), std::logic_error);
    CHECK_THROWS_AS(r.hot.discard(*step, batch, r.stream), std::logic_error);
    held.release();
    r.machine.sync(r.stream);
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::taken);
    r.machine.sync(r.stream);
  });
}

TEST_CASE("pull: a held step is resolved and pulled again and again") {
  each([](backend machine) {
    rig r(machine);
    const sequence_id first = r.stored(1, blocks(20)), second = r.stored(2, blocks(20));
    r.lend(0, 30, 6);
    r.lend(1, 50, 4);
    const auto held = r.hot.hold_step(0, 2);
    REQUIRE(held.has_value());
    CHECK(held->is_held());
    CHECK_FALSE(held->is_open());
    const auto run = [&](const ints& requests, const std::vector<sequence_id>& sequences,
                         const std::vector<ints>& chosen) {
      const auto selected = r.choice(chosen);
      test::device_array<std::int32_t, backend> rows(machine, requests, r.stream);
      r.hot.resolve_held(*held, rows.data(), selected, r.stream);
      r.puller.pull(r.hot, *held, rows.data(), r.views(0, sequences), r.stream);
      r.machine.sync(r.stream);
      return r.pages_of(*held);
    };
    auto pages = run({0, 1}, {first, second}, {{1, 2, 3, 4}, {5, 6}});
    CHECK(r.holds(0, pages[0], 1, {1, 2, 3, 4}));
    CHECK(r.holds(0, pages[1], 2, {5, 6}));
    // The other way round, with hits; steps of the same requests in between count, too.
    REQUIRE(r.pull(0, {0}, {first}, {{2, 3, 8}}).has_value());
    pages = run({1, 0}, {second, first}, {{5, 9}, {3, 8, 10, 11}});
    CHECK((rig::missed(*held, 0) == ints{9}));
    CHECK((rig::missed(*held, 1) == ints{10, 11}));
    CHECK(r.holds(0, pages[0], 2, {5, 9}));
    CHECK(r.holds(0, pages[1], 1, {3, 8, 10, 11}));
    // 1 and 4 were used longest ago, then 2: it is still there.
    pages = run({0, -1}, {first, sequence_id{}}, {{2}, {1, 2, 3}});
    CHECK(held->misses(0).empty());
    CHECK(held->misses(1).empty());
    CHECK((pages[1] == ints(4, -1)));
    // A request that has no pages gets nothing.
    pages = run({2, 0}, {second, first}, {{1, 2}, {2}});
    CHECK(held->misses(0).empty());
    CHECK((pages[0] == ints(4, -1)));
    CHECK(r.holds(0, pages[1], 1, {2}));
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::taken);  // the engine knows
    r.hot.drop_step(*held);
    CHECK_FALSE(held->is_held());
    r.machine.sync(r.stream);
  });
}

TEST_CASE("pull: held steps are steps in flight, and nothing else ends them") {
  each([](backend machine) {
    rig r(machine, {.steps_in_flight = 2});
    const sequence_id id = r.stored(1, blocks(4));
    r.lend(0, 0, 6);
    const auto first = r.hot.hold_step(0, 1), second = r.hot.hold_step(1, 3);
    REQUIRE(first.has_value());
    REQUIRE(second.has_value());
    CHECK_FALSE(r.hot.hold_step(0, 1).has_value());
    CHECK_FALSE(r.resolve(0, {0}, {{1}}).has_value());
    CHECK_THROWS_AS((void)r.mover.recall(*first, {&id, 1}, r.stream), std::logic_error);
    CHECK_THROWS_AS(r.hot.discard(*first, r.rows_of({0}), r.stream), std::logic_error);
    r.hot.drop_step(*first);
    CHECK_THROWS_AS(r.hot.drop_step(*first), std::logic_error);
    const auto selected = r.choice({{1}});
    const auto* requests = r.rows_of({0}).device_requests;
    CHECK_THROWS_AS(r.hot.resolve_held(*first, requests, selected, r.stream), std::logic_error);
    CHECK_THROWS_AS(r.hot.forget_held(*first, requests, r.stream), std::logic_error);
    CHECK_THROWS_AS(r.puller.pull(r.hot, *first, requests, r.views(0, {id}), r.stream),
                    std::logic_error);
    const auto step = r.pull(0, {0}, {id}, {{1}});
    REQUIRE(step.has_value());
    CHECK_THROWS_AS(r.hot.resolve_held(*step, requests, selected, r.stream), std::logic_error);
    CHECK_THROWS_AS(r.hot.drop_step(*step), std::logic_error);
    r.hot.drop_step(*second);
    r.machine.sync(r.stream);
  });
}

TEST_CASE("pull: what does not fit is refused, and nothing is enqueued") {
  backend machine = test::make_backend();
  rig r(machine);
  const sequence_id id = r.stored(1, blocks(4));
  r.lend(0, 0, 6);
  const auto make = [&](const pulseinfer::kv_geometry& geometry,
                        const pulseinfer::puller_options& options) {
    CHECK_THROWS_AS(pulseinfer::unit_puller<backend>(machine, geometry, r.pages.pool(), options),
                    std::invalid_argument);
  };
  make(rig::geometry, {.max_rows = 0});
  make(rig::geometry, {.budget_blocks = 0});
  make(rig::geometry, {.max_rows = 1 << 14, .budget_blocks = 1 << 14});
  make(rig::geometry, {.max_ctas = -1});
  pulseinfer::kv_geometry other = rig::geometry;
  other.layers = 3;
  make(other, {});

  CHECK_THROWS_AS((void)r.hot.hold_step(-1, 1), std::out_of_range);
  CHECK_THROWS_AS((void)r.hot.hold_step(2, 1), std::out_of_range);
  CHECK_THROWS_AS((void)r.hot.hold_step(0, -1), std::invalid_argument);
  CHECK_THROWS_AS((void)r.hot.hold_step(0, 4), std::invalid_argument);
  const auto held = r.hot.hold_step(0, 1);
  REQUIRE(held.has_value());
  const auto* views = r.views(0, {id});
  const auto* requests = r.rows_of({0}).device_requests;
  CHECK_THROWS_AS(r.hot.resolve_held(*held, nullptr, r.choice({{1}}), r.stream),
                  std::invalid_argument);
  CHECK_THROWS_AS(r.hot.resolve_held(*held, requests, r.choice({{1}, {2}}), r.stream),
                  std::invalid_argument);
  CHECK_THROWS_AS(r.hot.forget_held(*held, nullptr, r.stream), std::invalid_argument);
  CHECK_THROWS_AS(r.puller.pull(r.hot, *held, nullptr, views, r.stream), std::invalid_argument);
  CHECK_THROWS_AS(r.puller.pull(r.hot, *held, requests, nullptr, r.stream), std::invalid_argument);
  CHECK_THROWS_AS(r.puller.pull(r.hot, {}, requests, views, r.stream), std::logic_error);
  pulseinfer::unit_puller<backend> small(machine, rig::geometry, r.pages.pool(),
                                         {.max_rows = 1, .budget_blocks = 3});
  CHECK_THROWS_AS(small.pull(r.hot, *held, requests, views, r.stream), std::invalid_argument);
  const auto step = r.resolve(0, {0}, {{1, 2}});
  REQUIRE(step.has_value());
  {
    auto ticket = r.mover.recall(*step, {&id, 1}, r.stream);
    REQUIRE(ticket.has_value());
    if (!ticket->is_final()) {
      CHECK_THROWS_AS(r.puller.pull(r.hot, *step, requests, views, r.stream), std::logic_error);
    }
    ticket->sync();
  }
  machine.sync(r.stream);
}

TEST_CASE("pull: after a stream that failed, what did not come is forgotten by a discard") {
  each([](backend machine) { pull_behind_a_failure(machine); });
}
