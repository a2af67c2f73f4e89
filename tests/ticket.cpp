// SPDX-License-Identifier: Apache-2.0
/// @file
/// ticket.hpp on the backend under test, by tickets of a transfer engine. Include the backend's
/// support header first.
#include "pulseinfer/ticket.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/failing_backend.hpp"
#include "support/offload_rig.hpp"

namespace {

using backend = test::backend;
using rig = test::offload_rig<backend>;
using pulseinfer::transfer_phase;
using pulseinfer::unit_status;
using pulseinfer::wait_outcome;
using ints = std::vector<std::int32_t>;

template <class Case>
void each(Case run) {
  test::each_backend([&](backend machine) { run(machine); });
}

/// Whether a held stream certainly keeps a transfer pending that waits for it: where nothing runs
/// before the test lets it.
constexpr bool is_held_back = test::hold<backend>::is_exact || !test::takes_threads<backend>;

/// A request with four blocks stored, and a step that misses them.
struct one_step {
  explicit one_step(backend machine, const test::rig_options& o = {}) : r(machine, o) {
    id = r.stored(1, {0, 1, 2, 3, 4});
    r.lend(0, 0, 6);
  }
  pulseinfer::resolved_step resolve() { return r.resolve(0, {0}, {{1, 2, 3, 4}}).value(); }
  rig::ticket recall(const pulseinfer::resolved_step& step) {
    return r.mover.recall(step, {&id, 1}, r.stream).value();
  }
  rig r;
  pulseinfer::sequence_id id;
};

}  // namespace

TEST_CASE("ticket: pending, submitted, done; a wait before submit enqueues nothing") {
  each([](backend machine) {
    one_step s(machine);
    const auto step = s.resolve();
    test::hold<backend> held(machine, s.r.stream);
    rig::ticket t = s.recall(step);
    auto other = machine.make_stream(pulseinfer::stream_priority::normal);
    if (is_held_back) {
      CHECK(t.phase() == transfer_phase::pending);
      CHECK(!t.is_final());
      CHECK(t.enqueue_wait(other) == wait_outcome::not_submitted);
      // Nothing was enqueued: the stream is not held back by what it did not get.
      test::device_array<std::int32_t, backend> word(machine, 1);
      word.upload({5}, other);
      CHECK((word.download(other) == ints{5}));
      if (test::hold<backend>::is_exact) CHECK(t.phase() == transfer_phase::pending);
    }
    held.release();
    t.sync_submitted();
    CHECK(t.phase() != transfer_phase::pending);
    CHECK(t.enqueue_wait(other) == wait_outcome::enqueued);
    t.sync();
    CHECK(t.phase() == transfer_phase::done);
    CHECK(t.is_final());
    CHECK(t.enqueue_wait(other) == wait_outcome::enqueued);  // of what is done already
    machine.sync(other);
    machine.sync(s.r.stream);
  });
}

TEST_CASE("ticket: numbers and statuses are there at the end, not before") {
  each([](backend machine) {
    one_step s(machine);
    const auto step = s.resolve();
    test::hold<backend> held(machine, s.r.stream);
    rig::ticket t = s.recall(step);
    if (is_held_back) {
      CHECK_THROWS_AS((void)t.report(), std::logic_error);
      CHECK_THROWS_AS((void)t.status(0), std::logic_error);
    }
    held.release();
    t.sync();
    const pulseinfer::transfer_report& report = t.report();
    CHECK(report.units == 4);
    CHECK(report.moved == 4);
    CHECK(report.bytes == 4 * rig::geometry.unit_bytes());
    CHECK(report.requested_ns <= report.started_ns);
    CHECK(report.started_ns <= report.submitted_ns);
    CHECK(report.submitted_ns <= report.ended_ns);
    CHECK((test::statuses(t) == std::vector<unit_status>(4, unit_status::moved)));
    CHECK_THROWS_AS((void)t.status(4), std::out_of_range);
    CHECK_THROWS_AS((void)t.status(static_cast<std::size_t>(-1)), std::out_of_range);
    machine.sync(s.r.stream);
  });
}

TEST_CASE("ticket: dropping a ticket does not stop its transfer") {
  each([](backend machine) {
    one_step s(machine);
    {
      const auto step = s.resolve();
      test::hold<backend> held(machine, s.r.stream);
      { const rig::ticket t = s.recall(step); }
      held.release();
      machine.sync_until([&] { return test::offload_rig<backend>::at_rest(s.r.store.counts()); });
    }
    // The step ends when its units have arrived.
    machine.sync_until([&] {
      return s.r.hot.try_take_back(0, s.r.stream) == pulseinfer::take_back_outcome::taken;
    });
    machine.sync(s.r.stream);
    s.r.pages.download(s.r.stream);
    for (std::int32_t i = 0; i < 4; ++i) {
      CHECK((s.r.pages.get(0, i) == test::stamp(rig::geometry, 1, 0, i + 1)));
    }
  });
}

TEST_CASE("ticket: a ticket that is held keeps its state, one that is moved is held by one") {
  each([](backend machine) {
    one_step s(machine, {.transfers_in_flight = 2});
    std::optional<rig::ticket> first = s.r.recall(0, s.id, {{0, 1, 10}});
    REQUIRE(first.has_value());
    first->sync();
    rig::ticket moved = std::move(*first);
    first.reset();
    rig::ticket second = s.r.recall(0, s.id, {{0, 1, 11}, {0, 60, 12}}).value();
    second.sync();
    CHECK(!s.r.recall(0, s.id, {{0, 1, 13}}).has_value());  // both are ended, and held
    CHECK(moved.report().units == 1);
    CHECK(second.report().units == 2);
    (void)(moved = std::move(second));  // nvcc takes it for a dropped ticket
    CHECK(moved.report().units == 2);
    CHECK(moved.status(1) == unit_status::missing);
    {
      // Assignment swaps. NOLINTNEXTLINE(bugprone-use-after-move)
      const rig::ticket dropped = std::move(second);
      CHECK(dropped.report().units == 1);
    }
    CHECK(s.r.recall(0, s.id, {{0, 1, 13}}).has_value());
  });
}

TEST_CASE("ticket: cancelled before it began, a transfer moves nothing") {
  each([](backend machine) {
    one_step s(machine);
    const auto step = s.resolve();
    auto other = machine.make_stream(pulseinfer::stream_priority::normal);
    {
      test::hold<backend> held(machine, s.r.stream);
      rig::ticket t = s.recall(step);
      t.cancel();
      held.release();
      t.sync();  // does not throw
      if (is_held_back) {
        CHECK(t.phase() == transfer_phase::cancelled);
        CHECK((test::statuses(t) == std::vector<unit_status>(4, unit_status::cancelled)));
        CHECK(t.report().moved == 0);
        CHECK(t.report().bytes == 0);
        CHECK(t.enqueue_wait(other) == wait_outcome::incomplete);
      }
    }
    CHECK(rig::at_rest(s.r.store.counts()));
    if (is_held_back) {
      CHECK(s.r.hot.try_take_back(0, s.r.stream) == pulseinfer::take_back_outcome::in_use);
    }
    // Where nothing holds it back, the recall may have ended before the cancel, and its step with it.
    if (step.is_open()) s.r.hot.discard(step, s.r.rows_of({0}), s.r.stream);
    const auto again = s.resolve();
    rig::ticket t = s.recall(again);
    t.sync();
    if (is_held_back) CHECK(t.report().moved == 4);
    machine.sync(s.r.stream);
  });
}

TEST_CASE("ticket: a cancel that comes too late changes nothing") {
  each([](backend machine) {
    one_step s(machine);
    rig::ticket t = s.r.recall(0, s.id, {{0, 1, 10}}).value();
    t.sync();
    t.cancel();
    CHECK(t.phase() == transfer_phase::done);
    CHECK(t.status(0) == unit_status::moved);
    { const rig::ticket dropped = std::move(t); }
    rig::ticket next = s.r.recall(0, s.id, {{0, 1, 10}}).value();  // the same state again
    next.sync();
    CHECK(next.phase() == transfer_phase::done);
  });
}

TEST_CASE("ticket: units that will not come are known as soon as it is submitted") {
  each([](backend machine) {
    one_step s(machine);
    rig::ticket t = s.r.recall(0, s.id, {{0, 1, 10}, {0, 60, 11}}).value();
    t.sync_submitted();
    CHECK(t.enqueue_wait(s.r.stream) == wait_outcome::incomplete);
    t.sync();
    CHECK(t.phase() == transfer_phase::done);
    CHECK(t.enqueue_wait(s.r.stream) == wait_outcome::incomplete);
  });
}

TEST_CASE("ticket: the wait itself may fail, and can be tried again") {
  each([](backend machine) {
    using failing = test::failing_backend<backend>;
    failing flaky(machine);
    test::offload_rig<failing> r(flaky);
    const auto id = r.stored(1, {1});
    auto t = r.recall(0, id, {{0, 1, 10}}).value();
    t.sync();
    flaky.arm_throw(test::job::wait, 1);
    CHECK_THROWS_AS((void)t.enqueue_wait(r.stream), pulseinfer::device_error);
    CHECK(t.phase() == transfer_phase::done);
    CHECK(t.enqueue_wait(r.stream) == wait_outcome::enqueued);
    flaky.sync(r.stream);
  });
}
