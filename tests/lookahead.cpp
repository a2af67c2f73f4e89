// SPDX-License-Identifier: Apache-2.0
/// @file
/// Guesses that are recalled ahead: what comes of them, what does not, and what they may not touch.
#include "pulseinfer/lookahead.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"
#include "support/failing_backend.hpp"
#include "support/hold.hpp"
#include "support/offload_rig.hpp"

namespace {

using backend = test::failing_backend<test::backend>;
using rig = test::offload_rig<backend>;
using pulseinfer::anchor_plan;
using pulseinfer::announce_outcome;
using pulseinfer::residency_counts;
using pulseinfer::settle_outcome;
using pulseinfer::take_back_outcome;
using ints = std::vector<std::int32_t>;

template <class Case>
void each(Case run) {
  test::each_backend([&](test::backend machine) { run(backend(machine)); });
}

/// A kernel that fails once it may. (Where there are no threads it may at once.)
struct fails_late {
  const std::atomic<bool>* released;
  void operator()(std::int64_t, std::int64_t) const {
    while (!released->load()) std::this_thread::yield();
    throw pulseinfer::device_error("fails_late: failed on purpose");
  }
};

ints blocks(std::int32_t count) {
  ints all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// A rig with a lookahead, and one request of sequence 1 with 24 blocks.
struct guesser : rig {
  explicit guesser(const backend& with, const test::rig_options& o = {.predicts = true})
      : rig(with, o), ahead(hot, mover), id(stored(1, blocks(24))) {
    lend(0, 10, o.pages_per_request);
  }
  announce_outcome announce(std::int32_t layer, const ints& guess) {
    const auto predicted = choice({guess});
    return ahead.announce(layer, rows_of({0}), predicted, {&id, 1}, stream);
  }
  /// Resolves, recalls and reads what was chosen; returns the missed blocks.
  ints choose(std::int32_t layer, const ints& chosen) {
    const auto step = resolve(layer, {0}, {chosen});
    REQUIRE(step.has_value());
    auto recalled = mover.recall(*step, {&id, 1}, stream);
    REQUIRE(recalled.has_value());
    recalled->sync_submitted();
    REQUIRE(recalled->enqueue_wait(stream) == pulseinfer::wait_outcome::enqueued);
    const auto table = pages_of(*step);
    // No more than these: a guess may be on its way into others.
    for (std::size_t i = 0; i < chosen.size(); ++i) pages.read_page(layer, table[0][i], stream);
    machine.sync(stream);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      CHECK((pages.get(layer, table[0][i]) == test::stamp(geometry, 1, layer, chosen[i])));
    }
    ints found = missed(*step, 0);
    recalled->sync();
    return found;
  }
  residency_counts counts(std::int32_t layer) {
    machine.sync(stream);
    return hot.counts(layer, 0);
  }

  pulseinfer::lookahead<backend, pulseinfer::block_store<backend>> ahead;
  pulseinfer::sequence_id id;
};

/// A kernel of a device cannot throw, and a device does not recover.
template <class Backend>
inline constexpr bool recovers = test::device_memory_is_host_readable;

template <class Backend>
void fail_behind_a_settled_guess(Backend machine) {
  if constexpr (recovers<Backend>) {
    guesser r(machine);
    (void)r.choose(1, {1, 2, 3, 4});
    const auto list = r.choice({{2, 5, 6}});
    const pulseinfer::batch_view batch = r.rows_of({0});
    const ints requests = {0};
    pulseinfer::batch_view same = batch;
    same.requests = requests;
    r.machine.sync(r.stream);
    std::atomic<bool> released{!test::takes_threads<test::backend>};
    test::backend plain = machine;
    r.machine.arm(test::job::kernel, 1, [&](const backend::stream_ref* stream) {
      plain.for_each({1, 1}, {}, 0, fails_late{&released}, *stream);
    });
    REQUIRE(r.ahead.announce(1, same, list, {&r.id, 1}, r.stream) == announce_outcome::announced);
    const bool settled = r.ahead.sync_settled(1, r.stream) == settle_outcome::settled;
    released.store(true);
    r.ahead.sync_ended(1);
    if (settled) {
      const auto refused = [&] {
        CHECK_THROWS_AS((void)r.hot.resolve(1, same, list, r.stream), pulseinfer::device_error);
      };
      refused();
      // On a stream that has failed nothing is forgotten.
      CHECK(r.ahead.try_settle(1, r.stream) == settle_outcome::incomplete);
      CHECK_THROWS_AS(r.machine.sync(r.stream), pulseinfer::device_error);
      refused();
      (void)r.rows_of({1});  // the engine's arrays hold other rows by now
      CHECK(r.ahead.try_settle(1, r.stream) == settle_outcome::incomplete);
    }
    CHECK(r.ahead.try_settle(1, r.stream) == settle_outcome::none);
    const std::int64_t brought = r.counts(1).brought;
    CHECK(brought < 2);
    CHECK(r.choose(1, {2, 5, 6}).size() == static_cast<std::size_t>(2 - brought));
    REQUIRE(r.announce(1, {7, 8}) == announce_outcome::announced);
    CHECK(r.ahead.sync_settled(1, r.stream) == settle_outcome::settled);
    CHECK(r.choose(1, {7, 8}).empty());
    if (std::string_view(test::backend_name) == "host") CHECK(settled);
  }
}

}  // namespace

TEST_CASE("lookahead: a plan says which layers choose, and whom the others follow") {
  const ints anchors = {0, 2, 3};
  const anchor_plan plan(7, anchors);
  CHECK(plan.layers() == 7);
  ints followed;
  for (std::int32_t layer = 0; layer < 7; ++layer) followed.push_back(plan.anchor_of(layer));
  CHECK((followed == ints{0, 0, 2, 3, 3, 3, 3}));
  CHECK(plan.is_anchor(2));
  CHECK_FALSE(plan.is_anchor(6));
  CHECK((plan.followers(0) == pulseinfer::layer_range{1, 2}));
  CHECK((plan.followers(2) == pulseinfer::layer_range{3, 3}));
  CHECK((plan.followers(3) == pulseinfer::layer_range{4, 7}));
  CHECK((plan.followers(5) == pulseinfer::layer_range{6, 6}));  // no anchor
  CHECK((anchor_plan::every(5, 2).followers(4) == pulseinfer::layer_range{5, 5}));
  CHECK(anchor_plan::every(5, 2).anchor_of(3) == 2);
  CHECK(anchor_plan::every(1, 9).is_anchor(0));
  const auto refuses = [](std::int32_t layers, const ints& list) {
    CHECK_THROWS_AS(anchor_plan(layers, list), std::invalid_argument);
  };
  refuses(0, {0});
  refuses(3, {});
  refuses(3, {1});
  refuses(3, {0, 2, 2});
  refuses(3, {0, 3});
  CHECK_THROWS_AS((void)anchor_plan::every(3, 0), std::invalid_argument);
  CHECK_THROWS_AS((void)plan.anchor_of(7), std::out_of_range);
  CHECK_THROWS_AS((void)plan.followers(-1), std::out_of_range);
}

TEST_CASE("lookahead: what was guessed is there, the rest comes, and what was in vain is counted") {
  each([](backend machine) {
    guesser r(machine);
    CHECK(r.ahead.try_settle(1, r.stream) == settle_outcome::none);
    {
      const auto list = r.choice({{2, 3, 5, 7}});
      const auto& batch = r.rows_of({0});
      test::hold<test::backend> held(r.machine, r.stream);
      const auto announce = [&] { return r.ahead.announce(1, batch, list, {&r.id, 1}, r.stream); };
      REQUIRE(announce() == announce_outcome::announced);
      CHECK_THROWS_AS((void)announce(), std::logic_error);
      // It is under way, on a machine that can be held, or that goes on in syncs only.
      if (test::hold<test::backend>::is_exact || !test::takes_threads<test::backend>) {
        CHECK_THROWS_AS((void)r.hot.resolve(1, batch, list, r.stream), std::logic_error);
      }
      held.release();
    }
    CHECK((r.choose(0, {1, 2}) == ints{1, 2}));  // the layer before is not concerned
    CHECK(r.ahead.sync_settled(1, r.stream) == settle_outcome::settled);
    CHECK(r.ahead.try_settle(1, r.stream) == settle_outcome::none);
    CHECK((r.choose(1, {2, 3, 9}) == ints{9}));
    CHECK((r.counts(1) == residency_counts{3, 1, 4, 2, 2}));
    CHECK((r.counts(0) == residency_counts{2, 2, 0, 0, 0}));
    CHECK(r.ahead.wasted_bytes(1, 0) == 2 * rig::geometry.unit_bytes());
    r.ahead.sync_ended(1);
    // 5 was brought and not chosen; it is still there, and no prediction's any more.
    REQUIRE(r.announce(1, {2, 5}) == announce_outcome::announced);
    CHECK(r.ahead.sync_settled(1, r.stream) == settle_outcome::settled);
    CHECK((r.choose(1, {2, 5}).empty()));
    CHECK((r.counts(1) == residency_counts{5, 1, 4, 2, 2}));
  });
}

TEST_CASE("lookahead: an anchor's list goes ahead to the layers that follow") {
  each([](backend machine) {
    guesser r(machine);
    const anchor_plan plan = anchor_plan::every(2, 2);
    const auto list = r.choice({{4, 6, 8}});
    CHECK(r.ahead.announce_followers(plan, 0, r.rows_of({0}), list, {&r.id, 1}, r.stream) == 1);
    CHECK(r.ahead.announce_followers(plan, 1, r.rows_of({0}), list, {&r.id, 1}, r.stream) == 0);
    CHECK((r.choose(0, {4, 6, 8}) == ints{4, 6, 8}));
    CHECK(r.ahead.sync_settled(1, r.stream) == settle_outcome::settled);
    CHECK((r.choose(1, {4, 6, 8}).empty()));
    CHECK((r.counts(1) == residency_counts{3, 0, 3, 3, 0}));
    CHECK_THROWS_AS((void)r.ahead.announce_followers(anchor_plan::every(3, 1), 0, r.rows_of({0}),
                                                     list, {&r.id, 1}, r.stream),
                    std::invalid_argument);
  });
}

TEST_CASE("lookahead: a guess takes no page that the last true choice uses") {
  each([](backend machine) {
    guesser r(machine, {.pages_per_request = 4, .predicts = true});
    CHECK((r.choose(1, {1, 2, 3, 4}) == ints{1, 2, 3, 4}));
    REQUIRE(r.announce(1, {4, 5, 6, 7}) == announce_outcome::announced);
    CHECK(r.ahead.sync_settled(1, r.stream) == settle_outcome::settled);
    CHECK((r.choose(1, {1, 2, 3, 4}).empty()));
    CHECK((r.counts(1) == residency_counts{8, 4, 0, 0, 0}));
    CHECK((r.choose(1, {1, 2}).empty()));  // now two are free
    r.ahead.sync_ended(1);
    REQUIRE(r.announce(1, {5, 6, 7}) == announce_outcome::announced);
    CHECK(r.ahead.sync_settled(1, r.stream) == settle_outcome::settled);
    CHECK((r.choose(1, {1, 2, 5, 7}) == ints{7}));
    CHECK((r.counts(1) == residency_counts{14, 5, 2, 1, 1}));
  });
}

TEST_CASE("lookahead: what the store lacks, and what is cancelled, is missed again") {
  each([](backend machine) {
    guesser r(machine);
    REQUIRE(r.announce(1, {2, 3, 40}) == announce_outcome::announced);  // there is no block 40
    CHECK(r.ahead.sync_settled(1, r.stream) == settle_outcome::incomplete);
    CHECK((r.choose(1, {2, 3, 5}) == ints{5}));
    CHECK((r.counts(1) == residency_counts{3, 1, 2, 2, 0}));

    REQUIRE(r.announce(1, {6, 7, 8}) == announce_outcome::announced);
    r.ahead.cancel(1);
    const settle_outcome outcome = r.ahead.sync_settled(1, r.stream);
    CHECK((outcome == settle_outcome::settled || outcome == settle_outcome::incomplete));
    const auto brought = r.counts(1).brought - 2;
    CHECK(r.choose(1, {6, 7, 8}).size() == static_cast<std::size_t>(3 - brought));
    CHECK(r.counts(1).used == 2 + brought);
    CHECK(r.counts(1).wasted == 0);
    r.ahead.cancel(1);  // of nothing
    r.ahead.sync_ended(1);
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::taken);
    CHECK(rig::at_rest(r.store.counts()));
  });
}

TEST_CASE("lookahead: a recall that fails on its way is forgotten, and the truth is recalled") {
  each([](backend machine) {
    for (const test::job which : {test::job::copy, test::job::kernel, test::job::record}) {
      guesser r(machine);
      (void)r.choose(1, {1, 2, 3, 4});
      const auto predicted = r.choice({{2, 5, 6}});
      const auto& batch = r.rows_of({0});
      r.machine.sync(r.stream);
      r.machine.arm_throw(which,
                          which == test::job::record ? 2 : 1);  // the first one is the call's
      REQUIRE(r.ahead.announce(1, batch, predicted, {&r.id, 1}, r.stream) ==
              announce_outcome::announced);
      CHECK(r.ahead.sync_settled(1, r.stream) == settle_outcome::incomplete);
      CHECK(r.machine.has_struck());
      // A chunk beside the one that failed may have come.
      const std::int64_t brought = r.counts(1).brought;
      CHECK(brought < 2);
      CHECK(r.choose(1, {2, 5, 6}).size() == static_cast<std::size_t>(2 - brought));
      CHECK((r.counts(1) == residency_counts{7, 6 - brought, brought, brought, 0}));
    }
  });
}

TEST_CASE("lookahead: a guess that fails behind what waits for it is not taken for there") {
  each([](backend machine) { fail_behind_a_settled_guess(machine); });
}

TEST_CASE("lookahead: a call that fails, or finds no room, changes nothing") {
  each([](backend machine) {
    {
      guesser r(machine);
      const auto predicted = r.choice({{2, 5, 6}});
      const auto& batch = r.rows_of({0});
      r.machine.sync(r.stream);
      for (const test::job which : {test::job::task, test::job::row_kernel}) {
        r.machine.arm_throw(which, 1);
        CHECK_THROWS_AS((void)r.ahead.announce(1, batch, predicted, {&r.id, 1}, r.stream),
                        pulseinfer::device_error);
      }
      CHECK_THROWS_AS((void)r.ahead.announce(2, batch, predicted, {&r.id, 1}, r.stream),
                      std::out_of_range);
      CHECK_THROWS_AS((void)r.ahead.announce(1, batch, predicted, {}, r.stream), std::logic_error);
      CHECK(r.ahead.try_settle(1, r.stream) == settle_outcome::none);
      CHECK((r.choose(1, {2, 5}) == ints{2, 5}));
      CHECK((r.counts(1) == residency_counts{2, 2, 0, 0, 0}));
    }
    {
      guesser r(machine, {.steps_in_flight = 1, .predicts = true});
      const auto step = r.resolve(0, {0}, {{1, 2}});
      REQUIRE(step.has_value());
      CHECK(r.announce(1, {2}) == announce_outcome::busy);
      r.hot.discard(*step, r.rows_of({0}), r.stream);
      r.machine.sync(r.stream);
    }
    guesser r(machine, {.transfers_in_flight = 1, .predicts = true});
    const auto held = r.recall(0, r.id, {{0, 1, 40}});
    REQUIRE(held.has_value());
    CHECK(r.announce(1, {2}) == announce_outcome::busy);
    r.machine.sync(r.stream);
    CHECK((r.counts(1) == residency_counts{}));
    CHECK(r.hot.try_take_back(0, r.stream) == take_back_outcome::taken);
  });
}

TEST_CASE("lookahead: without `predicts` there is none") {
  const backend machine{test::make_backend()};
  rig r(machine);
  CHECK_THROWS_AS(
      (pulseinfer::lookahead<backend, pulseinfer::block_store<backend>>(r.hot, r.mover)),
      std::invalid_argument);
  r.lend(0, 10, 6);
  const auto list = r.choice({{1}});
  CHECK_THROWS_AS((void)r.hot.resolve_predicted(0, r.rows_of({0}), list, r.stream),
                  std::logic_error);
  CHECK_THROWS_AS(r.hot.mark_settled({}), std::logic_error);
  CHECK_THROWS_AS((void)r.hot.counts(2, 0), std::out_of_range);
  CHECK_THROWS_AS((void)r.hot.counts(0, 4), std::out_of_range);
}

TEST_CASE("lookahead: in steady state a guess allocates nothing") {
  const backend machine{test::make_backend()};
  guesser r(machine);
  const auto list = r.choice({{1, 2, 3}});
  const auto& batch = r.rows_of({0});
  std::uint64_t least = 1000;
  std::int64_t settled = 0;
  for (int round = 0; round < 40; ++round) {
    const std::uint64_t before = test::allocations();
    if (r.ahead.announce(1, batch, list, {&r.id, 1}, r.stream) == announce_outcome::announced) {
      settled += r.ahead.sync_settled(1, r.stream) == settle_outcome::settled ? 1 : 0;
    }
    r.ahead.sync_ended(1);
    least = std::min(least, test::allocations() - before);
    r.machine.sync(r.stream);
    (void)r.hot.try_take_back(0, r.stream);
    r.lend(0, 10, 6);  // so that all is brought again
    r.machine.sync(r.stream);
  }
  CHECK(settled == 40);
  CHECK(r.hot.counts(1, 0).brought == 120);
  // Real threads alone: a simulated machine allocates for itself.
  if (std::string_view(test::backend_name) == "host") CHECK(least == 0);
}

TEST_CASE("lookahead: good guesses and bad ones, step after step") {
  each([](backend machine) {
    guesser r(machine, {.replacement = pulseinfer::hot_replacement::least_used, .predicts = true});
    pulseinfer::detail::random_source draw(51);
    const auto drawn = [&](std::uint64_t range) {
      ints list;
      for (std::int32_t b = 0; b < 24 && list.size() < 4; ++b) {
        if (static_cast<std::uint64_t>(b) < range && draw.one_in(3)) list.push_back(b);
      }
      return list;
    };
    std::int64_t chosen = 0, missed = 0;
    for (int i = 0; i < 10; ++i) {
      const ints truth = drawn(i % 4 == 0 ? 24 : 9);
      const ints guess = draw.one_in(2) ? truth : drawn(24);
      const announce_outcome outcome = r.announce(1, guess);
      (void)r.choose(0, drawn(24));
      const settle_outcome settled = r.ahead.sync_settled(1, r.stream);
      CHECK((settled == settle_outcome::settled) == (outcome == announce_outcome::announced));
      const residency_counts before = r.counts(1);
      chosen += static_cast<std::int64_t>(truth.size());
      missed += static_cast<std::int64_t>(r.choose(1, truth).size());
      const residency_counts after = r.counts(1);
      CHECK(after.chosen == chosen);
      CHECK(after.missed == missed);
      CHECK(after.brought == after.used + after.wasted);
      if (guess == truth && outcome == announce_outcome::announced) {
        CHECK(after.wasted == before.wasted);
      }
    }
    CHECK(r.counts(1).used > 0);
  });
}
