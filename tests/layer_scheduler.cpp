// SPDX-License-Identifier: Apache-2.0
/// @file
/// The layer scheduler, call by call, without a machine: flights end when the test says so.
#include "pulseinfer/layer_scheduler.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "pulseinfer/flight_board.hpp"
#include "support/allocations.hpp"
#include "support/fake_flights.hpp"

namespace {

using pulseinfer::batch_id;
using pulseinfer::flight_id;
using pulseinfer::flight_state;
using pulseinfer::layer_scheduler;
using pulseinfer::layer_state;
using pulseinfer::leave_outcome;
using pulseinfer::request_id;
using pulseinfer::schedule_action;
using pulseinfer::schedule_decision;
using pulseinfer::scheduler_options;
using pulseinfer::selected_outcome;

/// A scheduler and flights that end by hand.
struct desk {
  explicit desk(const scheduler_options& o)
      : scheduler(o), flights(o.max_flights), layers(o.layers) {}

  schedule_decision next() { return scheduler.next(now, flights); }
  /// The next decision is this one; its requests.
  std::vector<request_id> expect(schedule_action action) {
    last = next();
    REQUIRE(last.action == action);
    return {last.requests.begin(), last.requests.end()};
  }
  /// Every request that is to select finds so many bytes and pages; those who may recall do.
  std::optional<flight_id> select(double bytes, std::int32_t pages = 0) {
    const auto all = expect(schedule_action::select);
    std::vector<request_id> recalling;
    for (const request_id id : all) {
      if (scheduler.selected(id, {.bytes = bytes, .pages = pages}) ==
          selected_outcome::recall_now) {
        recalling.push_back(id);
      }
    }
    if (recalling.empty()) return std::nullopt;
    return recall(recalling);
  }
  flight_id recall(const std::vector<request_id>& ids, const pulseinfer::recall_terms& terms = {}) {
    const flight_id flight = flights.add();
    scheduler.recalling(ids, flight, now, terms);
    return flight;
  }
  /// Runs the next batch to its end; its requests.
  std::vector<request_id> run() {
    auto ids = expect(schedule_action::run);
    scheduler.completed(last.batch);
    return ids;
  }

  layer_scheduler scheduler;
  test::fake_flights flights;
  std::int32_t layers;
  std::uint64_t now = 1000;
  schedule_decision last;
};

/// Weights that cost a second to read, so that nobody goes without another by himself.
constexpr scheduler_options two_layers{.max_requests = 4,
                                       .layers = 2,
                                       .max_groups = 1,
                                       .max_flights = 16,
                                       .work = {.weight_bytes = 3350e9}};

TEST_CASE("layer_scheduler: a request goes through its layers, and its steps") {
  desk d(two_layers);
  CHECK(d.next().action == schedule_action::idle);
  const request_id id = d.scheduler.add().value();
  for (int step = 0; step < 3; ++step) {
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      CHECK(d.scheduler.state_of(id) == layer_state::selecting);
      const auto recall = d.select(100);
      CHECK(d.last.layer == layer);
      CHECK(d.scheduler.state_of(id) == layer_state::recalling);
      CHECK(d.next().action == schedule_action::wait);
      d.flights.land(*recall);
      CHECK(d.expect(schedule_action::run) == std::vector{id});
      CHECK(d.last.layer == layer);
      CHECK(d.scheduler.state_of(id) == layer_state::running);
      d.scheduler.completed(d.last.batch);
      CHECK_THROWS_AS(d.scheduler.completed(d.last.batch), std::invalid_argument);
    }
    CHECK(d.scheduler.state_of(id) == layer_state::done);
    CHECK(d.next().action == schedule_action::idle);
    d.scheduler.restart(id);
  }
  CHECK(d.scheduler.counts().total() == 1);
  CHECK(d.scheduler.cancel(id) == leave_outcome::at_once);
  CHECK(d.scheduler.counts().total() == 0);
  CHECK(d.flights.under_way() == 0);
}

TEST_CASE("layer_scheduler: what recalls nothing runs at once, and a batch's flight completes it") {
  desk d(two_layers);
  const request_id id = d.scheduler.add().value();
  CHECK_FALSE(d.select(0));
  CHECK(d.expect(schedule_action::run) == std::vector{id});
  const flight_id batch = d.flights.add();
  d.scheduler.issued(d.last.batch, batch);
  CHECK(d.next().action == schedule_action::wait);
  d.flights.land(batch);
  CHECK_FALSE(d.select(0));
  CHECK(d.scheduler.layer_of(id) == 1);
}

TEST_CASE("layer_scheduler: the next layer may be selected and recalled while a batch runs") {
  desk d(two_layers);
  const request_id id = d.scheduler.add().value();
  (void)d.select(0);
  (void)d.expect(schedule_action::run);
  const batch_id batch = d.last.batch;
  CHECK(d.scheduler.selected(id, {.bytes = 10}) == selected_outcome::recall_now);
  const flight_id recall = d.recall({id});
  d.flights.land(recall);
  CHECK(d.next().action == schedule_action::wait);
  d.scheduler.completed(batch);
  CHECK(d.run() == std::vector{id});
  CHECK(d.last.layer == 1);
  // Behind the last layer there is none to select for.
  d.scheduler.restart(id);
  (void)d.select(0);
  (void)d.run();
  (void)d.select(0);
  (void)d.expect(schedule_action::run);
  CHECK_THROWS_AS((void)d.scheduler.selected(id, {}), std::logic_error);
}

TEST_CASE("layer_scheduler: what was recalled a layer ahead is waited for at its layer") {
  desk d(two_layers);
  const request_id id = d.scheduler.add().value();
  (void)d.select(0);
  const flight_id ahead = d.recall({id}, {.bytes = 7, .layers_ahead = 1});
  (void)d.run();  // the first layer does not wait for it
  (void)d.expect(schedule_action::select);
  CHECK(d.scheduler.selected(id, {.bytes = 0, .ahead_bytes = 7}) ==
        selected_outcome::nothing_to_recall);
  CHECK(d.scheduler.state_of(id) == layer_state::recalling);
  CHECK(d.next().action == schedule_action::wait);
  d.flights.land(ahead);
  CHECK(d.run() == std::vector{id});
  CHECK_THROWS_AS(d.recall({id}, {.layers_ahead = 1}), std::logic_error);  // it is done
}

TEST_CASE("layer_scheduler: requests of a layer run as one batch") {
  desk d(two_layers);
  std::vector<request_id> ids;
  for (int i = 0; i < 4; ++i) ids.push_back(d.scheduler.add().value());
  CHECK_FALSE(d.scheduler.add());
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    const auto recall = d.select(1);
    CHECK(d.last.requests.size() == 4);
    d.flights.land(*recall);
    CHECK(d.run() == ids);
  }
  CHECK(d.scheduler.statistics().batches == 2);
  CHECK(d.scheduler.statistics().layers_run == 8);
}

TEST_CASE("layer_scheduler: two groups take turns where that hides the link") {
  // Recalls that take as long as computing; weights are nearly free.
  desk d({.max_requests = 4,
          .layers = 3,
          .max_flights = 16,
          .work = {.weight_bytes = 1, .request_bytes = 3350e6, .recall_bytes = 56e6}});
  for (int i = 0; i < 4; ++i) (void)d.scheduler.add();
  CHECK(d.scheduler.planned_groups() >= 2);
  const auto recall = d.select(56e6);
  d.flights.land(*recall);
  const auto first = d.expect(schedule_action::run);
  CHECK(first.size() <= 2);
  const batch_id batch = d.last.batch;
  const auto second = d.expect(schedule_action::run);  // the other group, behind the first
  CHECK(second.size() <= 2);
  CHECK(d.last.layer == 0);
  const batch_id other = d.last.batch;
  d.scheduler.completed(batch);
  const auto travels = d.select(56e6);  // the first recalls while the second computes
  CHECK(d.last.layer == 1);
  d.scheduler.completed(other);
  CHECK(travels);
}

TEST_CASE("layer_scheduler: a hundred that begin their step are no change of what is known ahead") {
  scheduler_options o = two_layers;
  o.max_requests = 100;
  o.work.recall_bytes = 100;
  o.work.known_ahead = 0.9;
  desk d(o);
  std::vector<request_id> ids;
  for (int i = 0; i < 100; ++i) ids.push_back(d.scheduler.add().value());
  const auto recalled = [&](double late, double ahead) {
    for (const request_id id : d.expect(schedule_action::select)) {
      (void)d.scheduler.selected(id, {.bytes = late, .ahead_bytes = ahead});
    }
    d.flights.land(d.recall(ids));
    return d.run().size();
  };
  // Of the first layer nothing can be known.
  CHECK(recalled(100, 0) == 100);
  CHECK(d.scheduler.work().known_ahead == doctest::Approx(0.9));
  CHECK(d.scheduler.work().recall_bytes == doctest::Approx(100));
  CHECK(recalled(80, 20) == 100);
  CHECK(d.scheduler.work().known_ahead < 0.6);
}

TEST_CASE("layer_scheduler: a batch that could not be started is ready again") {
  desk d(two_layers);
  const request_id id = d.scheduler.add().value();
  (void)d.select(0);
  (void)d.expect(schedule_action::run);
  d.scheduler.withdraw(d.last.batch);
  CHECK(d.scheduler.state_of(id) == layer_state::ready);
  CHECK(d.run() == std::vector{id});
  CHECK(d.last.layer == 0);
}

TEST_CASE("layer_scheduler: a batch ends once, whatever its flights say later") {
  desk d(two_layers);
  const request_id id = d.scheduler.add().value();
  (void)d.select(0);
  (void)d.expect(schedule_action::run);
  const flight_id batch = d.flights.add();
  d.scheduler.issued(d.last.batch, batch);
  d.scheduler.completed(d.last.batch);
  CHECK(d.scheduler.layer_of(id) == 1);
  (void)d.select(0);
  CHECK(d.expect(schedule_action::run) == std::vector{id});
  d.flights.land(batch);
  CHECK(d.next().action == schedule_action::wait);
  CHECK(d.scheduler.state_of(id) == layer_state::running);
  CHECK(d.flights.under_way() == 0);
}

TEST_CASE("layer_scheduler: a batch whose flight failed is told of, and not taken for run") {
  desk d(two_layers);
  const request_id id = d.scheduler.add().value();
  (void)d.select(0);
  (void)d.expect(schedule_action::run);
  const flight_id batch = d.flights.add();
  d.scheduler.issued(d.last.batch, batch);
  d.flights.fail(batch);
  CHECK(d.expect(schedule_action::late) == std::vector{id});
  CHECK(d.scheduler.layer_of(id) == 0);
  d.scheduler.fall_back(id);
  CHECK(d.run() == std::vector{id});
  CHECK(d.last.layer == 0);
}

TEST_CASE("layer_scheduler: a recall past its deadline is told of once; the engine chooses") {
  desk d(two_layers);
  const request_id waits = d.scheduler.add().value();
  const request_id falls_back = d.scheduler.add().value();
  const request_id recomputes = d.scheduler.add().value();
  for (const request_id id : d.expect(schedule_action::select)) {
    (void)d.scheduler.selected(id, {.bytes = 1});
  }
  const flight_id slow = d.recall({waits, falls_back, recomputes}, {.deadline_ns = 2000});
  d.now = 1999;
  CHECK(d.next().until_ns == 2000);
  d.now = 2000;
  CHECK(d.expect(schedule_action::late).size() == 3);
  CHECK(d.next().action == schedule_action::wait);
  d.scheduler.fall_back(falls_back);
  const flight_id again = d.recall({recomputes}, {.deadline_ns = 3000});
  d.flights.land(again);
  (void)d.next();
  CHECK(d.scheduler.state_of(waits) == layer_state::recalling);
  CHECK(d.scheduler.state_of(falls_back) != layer_state::recalling);
  CHECK(d.scheduler.state_of(recomputes) != layer_state::recalling);
  d.flights.land(slow);
  (void)d.next();
  CHECK(d.scheduler.statistics().late == 3);
  CHECK(d.flights.under_way() == 0);
}

TEST_CASE("layer_scheduler: a deadline counts when a request got the pages that it lacked") {
  desk d({.max_requests = 2, .layers = 2, .max_groups = 1, .max_flights = 8, .pages = 4});
  const request_id a = d.scheduler.add({.pages = 2}).value();
  const request_id b = d.scheduler.add({.pages = 2}).value();
  (void)d.select(0, 2);
  CHECK(d.expect(schedule_action::run).size() == 2);
  const flight_id load = d.recall({a}, {.bytes = 1, .deadline_ns = 5'000});
  CHECK(d.scheduler.selected(a, {.pages = 3}) == selected_outcome::wait_for_pages);
  d.scheduler.completed(d.last.batch);
  CHECK(d.expect(schedule_action::select) == std::vector{b});
  CHECK(d.scheduler.state_of(a) == layer_state::waiting);
  CHECK(d.scheduler.cancel(b) == leave_outcome::at_once);
  SUBCASE("in time") {
    d.flights.land(load);
    CHECK(d.run() == std::vector{a});
  }
  SUBCASE("too late") {
    d.last = d.next();
    CHECK(d.last.action == schedule_action::wait);
    CHECK(d.scheduler.state_of(a) == layer_state::recalling);
    CHECK(d.last.until_ns == 5'000);
    d.now = 5'000;
    CHECK(d.expect(schedule_action::late) == std::vector{a});
  }
}

TEST_CASE("layer_scheduler: a recall that failed is told of, and may be made again") {
  desk d(two_layers);
  const request_id id = d.scheduler.add().value();
  const auto recall = d.select(5);
  d.flights.fail(*recall);
  CHECK(d.expect(schedule_action::late) == std::vector{id});
  const flight_id again = d.recall({id});
  CHECK(d.next().action == schedule_action::wait);
  d.flights.land(again);
  CHECK(d.run() == std::vector{id});
}

TEST_CASE("layer_scheduler: nobody waits behind one load") {
  scheduler_options o = two_layers;
  o.layers = 8;
  desk d(o);
  const request_id slow = d.scheduler.add().value();
  const request_id fast = d.scheduler.add().value();
  (void)d.expect(schedule_action::select);
  (void)d.scheduler.selected(slow, {.bytes = 1});
  (void)d.scheduler.selected(fast, {.bytes = 0});
  // A link that takes a thousand seconds: the other is not expected, so nobody waits.
  const flight_id load = d.recall({slow}, {.bytes = 56e12});
  for (std::int32_t layer = 0; layer < 8; ++layer) {
    CHECK(d.run() == std::vector{fast});
    CHECK(d.last.layer == layer);
    if (layer < 7) (void)d.select(0);
  }
  CHECK(d.scheduler.statistics().left_behind == 1);
  d.flights.land(load);
  CHECK(d.run() == std::vector{slow});
}

TEST_CASE("layer_scheduler: one that is expected soon is waited for, no longer than it is worth") {
  desk d(two_layers);  // reading the weights again takes a second
  d.now = 10'000'000'000;
  const request_id a = d.scheduler.add().value();
  const request_id b = d.scheduler.add().value();
  (void)d.expect(schedule_action::select);
  (void)d.scheduler.selected(a, {.bytes = 0});
  (void)d.scheduler.selected(b, {.bytes = 1});
  const flight_id load = d.recall({b}, {.bytes = 56e6});  // a millisecond
  d.last = d.next();
  REQUIRE(d.last.action == schedule_action::wait);
  CHECK(d.last.until_ns > d.now + 900'000'000);
  CHECK(d.last.until_ns < d.now + 1'100'000'000);
  SUBCASE("it comes") {
    d.now += 2'000'000;
    d.flights.land(load);
    CHECK(d.run().size() == 2);
  }
  SUBCASE("it does not come") {
    d.now = d.last.until_ns;
    CHECK(d.run() == std::vector{a});
    CHECK(d.scheduler.statistics().left_behind == 1);
  }
  SUBCASE("the clock is set back") {
    const std::uint64_t until = d.last.until_ns;
    d.now -= 500'000'000;
    d.last = d.next();
    CHECK(d.last.action == schedule_action::wait);
    CHECK(d.last.until_ns == until - 500'000'000);
    d.now = 1;  // by this one nothing is expected soon
    CHECK(d.run() == std::vector{a});
  }
}

TEST_CASE("layer_scheduler: a link that is faster than was said has no past load before it") {
  desk d(two_layers);
  const request_id a = d.scheduler.add().value();
  for (int step = 0; step < 3; ++step) {
    for (int layer = 0; layer < 2; ++layer) {
      (void)d.expect(schedule_action::select);
      (void)d.scheduler.selected(a, {.bytes = 1});
      d.flights.land(d.recall({a}, {.bytes = 56e12}));  // a thousand seconds, it was said
      CHECK(d.run() == std::vector{a});
    }
    d.scheduler.restart(a);
  }
  const request_id b = d.scheduler.add().value();
  (void)d.expect(schedule_action::select);
  (void)d.scheduler.selected(a, {.bytes = 0});
  (void)d.scheduler.selected(b, {.bytes = 1});
  const flight_id load = d.recall({b}, {.bytes = 56e6});
  CHECK(d.next().action == schedule_action::wait);  // it is expected within a millisecond
  d.flights.land(load);
  CHECK(d.run().size() == 2);
}

TEST_CASE("layer_scheduler: times without end stay times") {
  constexpr std::uint64_t never = std::numeric_limits<std::uint64_t>::max();
  desk d({.max_requests = 2,
          .layers = 1,
          .max_groups = 1,
          .work = {.weight_bytes = 1e18},
          .speeds = {.device_bytes_per_second = 1, .link_bytes_per_second = 1}});
  const request_id a = d.scheduler.add().value();
  const request_id b = d.scheduler.add().value();
  for (const std::uint64_t now : {std::uint64_t{0}, never - 1, never}) {
    d.now = now;
    for (int i = 0; i < 30; ++i) {
      while (d.next().action == schedule_action::select) {
      }
      (void)d.scheduler.selected(a, {.bytes = 0});
      (void)d.scheduler.selected(b, {.bytes = 1e18});
      const flight_id load = d.recall({b}, {.bytes = 1e18, .deadline_ns = never - 2});
      const auto next = d.next();
      if (now > never - 2) {
        CHECK(next.action == schedule_action::late);
      } else {
        CHECK(next.action == schedule_action::wait);
        CHECK(next.until_ns <= never - 2);
      }
      d.flights.land(load);
      CHECK(d.run().size() == 2);
      d.scheduler.restart(a);
      d.scheduler.restart(b);
    }
  }
}

namespace {

/// Of two requests at their first layer, b is not there: a runs without it. What b waits for.
flight_id leave_behind(desk& d, request_id a, request_id b) {
  (void)d.expect(schedule_action::select);
  (void)d.scheduler.selected(a, {.bytes = 0});
  (void)d.scheduler.selected(b, {.bytes = 1});
  const flight_id late = d.recall({b}, {.bytes = 56e12});
  CHECK(d.run() == std::vector{a});
  return late;
}

}  // namespace

TEST_CASE("layer_scheduler: who was left behind is taken in where groups meet") {
  scheduler_options o = two_layers;
  o.layers = 4;
  desk d(o);
  const request_id a = d.scheduler.add().value();
  const request_id b = d.scheduler.add().value();
  d.flights.land(leave_behind(d, a, b));
  // a is a layer ahead, and waits until b is there.
  (void)d.select(0);
  CHECK(d.run() == std::vector{b});
  (void)d.select(0);
  CHECK(d.run().size() == 2);
  CHECK(d.scheduler.statistics().merges == 1);
}

TEST_CASE(
    "layer_scheduler: who should be one waits as long as a layer waits by plan, and no longer") {
  for (const bool is_soon : {true, false}) {
    scheduler_options o = two_layers;
    o.layers = 4;
    o.work.recall_bytes = 22.4e9;  // 0.4 s: a layer of both waits for 0.8 s, by plan
    desk d(o);
    const request_id a = d.scheduler.add().value();
    const request_id b = d.scheduler.add().value();
    const flight_id late = leave_behind(d, a, b);
    d.now += 2'000'000'000'000;  // more than it takes on the link
    d.flights.land(late);
    (void)d.select(0);
    CHECK(d.run() == std::vector{b});
    // Now b is at a's layer, and the device has nothing but a. To go without b costs a second.
    CHECK(d.expect(schedule_action::select) == std::vector{b});
    (void)d.scheduler.selected(b, {.bytes = 1});
    const flight_id load = d.recall({b}, {.bytes = is_soon ? 1.4 * 56e9 : 2.5 * 56e9});
    if (is_soon) {
      CHECK(d.next().action == schedule_action::wait);
      d.flights.land(load);
      CHECK(d.run().size() == 2);
    } else {
      CHECK(d.run() == std::vector{a});
    }
    CHECK(d.scheduler.statistics().merges == (is_soon ? 1 : 0));
  }
}

TEST_CASE("layer_scheduler: interrupted in any state, a request goes on where it was") {
  for (int state = 0; state < 4; ++state) {
    CAPTURE(state);
    desk d(two_layers);
    const request_id id = d.scheduler.add().value();
    if (state == 0) {  // selecting
      (void)d.expect(schedule_action::select);
      CHECK(d.scheduler.interrupt(id) == leave_outcome::at_once);
      CHECK(d.scheduler.interrupt(id) == leave_outcome::not_running);
      CHECK(d.scheduler.selected(id, {.bytes = 0}) == selected_outcome::nothing_to_recall);
    } else if (state == 1) {  // recalling
      const auto recall = d.select(3);
      CHECK(d.scheduler.interrupt(id) == leave_outcome::at_once);
      d.flights.land(*recall);
    } else if (state == 2) {  // ready
      (void)d.select(0);
      CHECK(d.scheduler.interrupt(id) == leave_outcome::at_once);
    } else {  // running
      (void)d.select(0);
      (void)d.expect(schedule_action::run);
      CHECK(d.scheduler.interrupt(id) == leave_outcome::later);
      CHECK(d.scheduler.state_of(id) == layer_state::running);
      d.scheduler.completed(d.last.batch);
    }
    CHECK(d.scheduler.state_of(id) == layer_state::parked);
    CHECK(d.next().action == schedule_action::idle);
    d.scheduler.resume(id);
    if (state == 3) (void)d.select(0);
    CHECK(d.run() == std::vector{id});
    CHECK(d.last.layer == (state == 3 ? 1 : 0));
  }
}

TEST_CASE("layer_scheduler: an interruption that is taken back while the batch runs is none") {
  desk d(two_layers);
  const request_id id = d.scheduler.add().value();
  (void)d.select(0);
  (void)d.expect(schedule_action::run);
  (void)d.scheduler.interrupt(id);
  d.scheduler.resume(id);
  d.scheduler.completed(d.last.batch);
  CHECK(d.scheduler.state_of(id) == layer_state::selecting);
  CHECK_THROWS_AS(d.scheduler.resume(id), std::logic_error);
}

TEST_CASE("fault 62: interrupted at each layer with a store in flight, a request resumes") {
  for (const bool preempts : {false, true}) {
    for (const bool lands_before : {false, true}) {
      desk d({.max_requests = 2, .layers = 5, .max_groups = 1, .max_flights = 8, .pages = 4});
      const request_id id = d.scheduler.add({.pages = 4}).value();
      std::optional<flight_id> store_before;
      for (std::int32_t layer = 0; layer < 5; ++layer) {
        (void)d.select(0);
        (void)d.expect(schedule_action::run);
        const batch_id batch = d.last.batch;
        if (store_before) d.flights.land(*store_before);
        const flight_id store = d.flights.add();
        d.scheduler.hold({&id, 1}, store);
        CHECK((preempts ? d.scheduler.preempt(id) : d.scheduler.interrupt(id)) ==
              leave_outcome::later);
        d.scheduler.completed(batch);
        CHECK(d.scheduler.state_of(id) == layer_state::parked);
        if (lands_before) d.flights.land(store);
        if (preempts) {
          // The pages come back only when the store has read them.
          if (!lands_before) {
            CHECK(d.next().action == schedule_action::wait);
            CHECK(d.scheduler.free_pages() == 0);
            d.flights.land(store);
          }
          CHECK(d.expect(schedule_action::release) == std::vector{id});
          CHECK(d.scheduler.free_pages() == 4);
        }
        d.scheduler.resume(id);
        if (!preempts && !lands_before) store_before = store;
        if (layer < 4) CHECK(d.scheduler.layer_of(id) == layer + 1);
      }
      if (store_before) d.flights.land(*store_before);
      (void)d.next();
      CHECK(d.scheduler.state_of(id) == layer_state::done);
      CHECK(d.flights.under_way() == 0);
    }
  }
}

TEST_CASE("fault 62: put aside before it runs, with a store in flight, a request resumes") {
  for (const bool preempts : {false, true}) {
    for (const bool lands_before : {false, true}) {
      desk d({.max_requests = 2, .layers = 3, .max_groups = 1, .max_flights = 8, .pages = 4});
      const request_id id = d.scheduler.add({.pages = 4}).value();
      for (std::int32_t layer = 0; layer < 3; ++layer) {
        // Of what the layer before wrote. Nobody waits for it.
        const flight_id store = d.flights.add();
        d.scheduler.hold({&id, 1}, store);
        (void)d.select(0);
        CHECK(d.scheduler.state_of(id) == layer_state::ready);
        if (lands_before) {
          d.flights.land(store);
          (void)d.expect(schedule_action::run);  // it looks at the flight
          d.scheduler.withdraw(d.last.batch);
        }
        const bool later = preempts && !lands_before;
        CHECK((preempts ? d.scheduler.preempt(id) : d.scheduler.interrupt(id)) ==
              (later ? leave_outcome::later : leave_outcome::at_once));
        CHECK(d.scheduler.state_of(id) == layer_state::parked);
        CHECK(d.scheduler.free_pages() == (preempts && lands_before ? 4 : 0));
        d.scheduler.resume(id);
        if (later) {
          CHECK(d.next().action == schedule_action::wait);
          CHECK(d.scheduler.free_pages() == 0);
          d.flights.land(store);
          CHECK(d.expect(schedule_action::release) == std::vector{id});
        }
        if (preempts) (void)d.select(0);
        CHECK(d.scheduler.pages_of(id) == 4);
        CHECK(d.run() == std::vector{id});
        CHECK(d.last.layer == layer);
        if (!preempts && !lands_before) d.flights.land(store);
      }
      (void)d.next();
      CHECK(d.scheduler.state_of(id) == layer_state::done);
      CHECK(d.flights.under_way() == 0);
    }
  }
}

TEST_CASE("fault 62: a flight of before is not taken for the one that is waited for") {
  // Of an earlier try, or of a layer that went without it, four layers ago.
  for (const bool falls_back : {false, true}) {
    for (const bool fails : {false, true}) {
      desk d({.max_requests = 1, .layers = 6, .max_groups = 1, .max_flights = 8});
      const request_id id = d.scheduler.add().value();
      (void)d.expect(schedule_action::select);
      (void)d.scheduler.selected(id, {.bytes = 1});
      const flight_id before = d.recall({id}, {.deadline_ns = 2000});
      d.now = 2000;
      CHECK(d.expect(schedule_action::late) == std::vector{id});
      flight_id waited_for = before;
      if (falls_back) {
        d.scheduler.fall_back(id);
        (void)d.run();
        for (std::int32_t layer = 1; layer < 4; ++layer) {
          (void)d.select(0);
          (void)d.run();
        }
        waited_for = d.select(1).value();
        CHECK(d.last.layer == 4);
      } else {
        waited_for = d.recall({id});
      }
      fails ? d.flights.fail(before) : d.flights.land(before);
      CHECK(d.next().action == schedule_action::wait);
      CHECK(d.scheduler.state_of(id) == layer_state::recalling);
      d.flights.land(waited_for);
      CHECK(d.run() == std::vector{id});
      CHECK(d.flights.under_way() == 0);
    }
  }
}

TEST_CASE("layer_scheduler: a preempted request selects and recalls anew") {
  desk d({.max_requests = 2, .layers = 2, .max_groups = 1, .max_flights = 8, .pages = 4});
  const request_id id = d.scheduler.add({.pages = 3}).value();
  const auto recall = d.select(10);
  CHECK(d.scheduler.preempt(id) == leave_outcome::later);
  d.flights.land(*recall);
  CHECK(d.expect(schedule_action::release) == std::vector{id});
  CHECK(d.scheduler.pages_of(id) == 0);
  d.scheduler.resume(id);
  CHECK(d.select(10));
  CHECK(d.scheduler.pages_of(id) == 3);
  CHECK(d.scheduler.state_of(id) == layer_state::recalling);
}

TEST_CASE("layer_scheduler: a request that gives its pages back may be put aside meanwhile") {
  desk d({.max_requests = 2,
          .layers = 2,
          .max_groups = 1,
          .max_flights = 8,
          .max_wait_batches = 1,
          .pages = 4});
  const request_id a = d.scheduler.add({.pages = 2}).value();
  const auto is_aside = [&](request_id id) {
    CHECK(d.scheduler.state_of(id) == layer_state::parked);
    d.scheduler.resume(id);
    CHECK(d.scheduler.state_of(id) == layer_state::waiting);  // its pages are gone
  };
  SUBCASE("the engine took them, and had it go on") {
    const flight_id load = d.select(1).value();
    CHECK(d.scheduler.preempt(a) == leave_outcome::later);
    d.scheduler.resume(a);
    CHECK(d.scheduler.interrupt(a) == leave_outcome::at_once);
    CHECK(d.scheduler.interrupt(a) == leave_outcome::not_running);
    d.flights.land(load);
    CHECK(d.expect(schedule_action::release) == std::vector{a});
    is_aside(a);
  }
  SUBCASE("while it ran") {
    (void)d.select(0);
    (void)d.expect(schedule_action::run);
    CHECK(d.scheduler.preempt(a) == leave_outcome::later);
    d.scheduler.resume(a);
    CHECK(d.scheduler.interrupt(a) == leave_outcome::later);
    d.scheduler.completed(d.last.batch);
    CHECK(d.expect(schedule_action::release) == std::vector{a});
    is_aside(a);
  }
  SUBCASE("an older one takes them") {
    // `a` finds out that it lacks a page; the younger one, which runs, has it.
    const request_id young = d.scheduler.add({.pages = 2}).value();
    (void)d.expect(schedule_action::select);
    (void)d.scheduler.selected(young, {});
    CHECK(d.scheduler.selected(a, {.pages = 3}) == selected_outcome::wait_for_pages);
    CHECK(d.expect(schedule_action::run) == std::vector{young});
    const batch_id batch = d.last.batch;
    bool before = false;
    SUBCASE("before it is put aside") {}
    SUBCASE("after it was put aside") {
      before = true;
    }
    if (before) CHECK(d.scheduler.interrupt(young) == leave_outcome::later);
    CHECK(d.next().action == schedule_action::wait);
    CHECK(d.scheduler.statistics().preemptions == 1);
    if (!before) CHECK(d.scheduler.interrupt(young) == leave_outcome::later);
    d.scheduler.completed(batch);
    CHECK(d.expect(schedule_action::release) == std::vector{young});
    CHECK(d.scheduler.pages_of(young) == 0);
    CHECK(d.run() == std::vector{a});
    is_aside(young);
  }
}

TEST_CASE("layer_scheduler: requests come and go with no decision between them") {
  for (const std::int32_t most : {1, 3}) {
    desk d({.max_requests = most, .layers = 1, .max_flights = 4});
    std::vector<request_id> held;
    for (int i = 0; i < 50; ++i) {
      held.push_back(d.scheduler.add().value());
      if (i % most == most - 1) {
        for (const request_id id : held) CHECK(d.scheduler.cancel(id) == leave_outcome::at_once);
        held.clear();
      }
    }
    while (static_cast<std::int32_t>(held.size()) < most) held.push_back(*d.scheduler.add());
    CHECK(!d.scheduler.add());
    CHECK(d.expect(schedule_action::select).size() == held.size());
    CHECK(d.next().action == schedule_action::wait);  // all were told of, each once
  }
}

TEST_CASE("layer_scheduler: cancelled in any state, a request leaves when nothing uses its pages") {
  for (int state = 0; state < 5; ++state) {
    CAPTURE(state);
    desk d({.max_requests = 1, .layers = 2, .max_flights = 8, .pages = 2});
    const request_id id = d.scheduler.add({.pages = 2}).value();
    std::optional<flight_id> flight;
    bool is_running = false;
    if (state == 1) flight = d.select(1);
    if (state >= 2) (void)d.select(0);
    if (state == 3) {
      (void)d.expect(schedule_action::run);
      is_running = true;
    }
    if (state == 4) {
      CHECK(d.scheduler.interrupt(id) == leave_outcome::at_once);
    }
    const bool later = flight.has_value() || is_running;
    const batch_id batch = d.last.batch;
    CHECK(d.scheduler.cancel(id) == (later ? leave_outcome::later : leave_outcome::at_once));
    if (later) {
      CHECK(d.scheduler.state_of(id) == layer_state::leaving);
      CHECK(d.scheduler.counts().total() == 1);
      CHECK(d.next().action == schedule_action::wait);
      CHECK(d.scheduler.free_pages() == 0);
      CHECK_FALSE(d.scheduler.add());
      if (flight) d.flights.land(*flight);
      if (is_running) d.scheduler.completed(batch);
      CHECK(d.expect(schedule_action::release) == std::vector{id});
    }
    CHECK(d.scheduler.free_pages() == 2);
    CHECK(d.scheduler.counts().total() == 0);
    CHECK_THROWS_AS((void)d.scheduler.state_of(id), std::invalid_argument);
    CHECK(d.next().action == schedule_action::idle);
    CHECK(d.scheduler.add());
  }
}

TEST_CASE("fault 60: of 7 pages A needs 4, then 1, and B 3, then 1: both complete") {
  for (const bool at_once : {false, true}) {
    desk d({.max_requests = 2, .layers = 2, .max_groups = 1, .max_flights = 8, .pages = 7});
    // Either both say what they need in all, or each finds out at its second layer.
    const request_id a = d.scheduler.add({.pages = at_once ? 5 : 4}).value();
    const request_id b = d.scheduler.add({.pages = at_once ? 4 : 3}).value();
    CHECK(d.scheduler.pages_of(b) == (at_once ? 0 : 3));  // all or none
    bool has_run[2] = {};
    for (int turns = 0; turns < 40; ++turns) {
      for (const request_id id : {a, b}) {
        if (has_run[id.index] || d.scheduler.state_of(id) != layer_state::done) continue;
        has_run[id.index] = true;
        (void)d.scheduler.cancel(id);
      }
      if (has_run[0] && has_run[1]) break;
      const schedule_decision next = d.next();
      const std::vector<request_id> ids(next.requests.begin(), next.requests.end());
      if (next.action == schedule_action::run) d.scheduler.completed(next.batch);
      std::vector<request_id> recalling;
      for (const request_id id : ids) {
        const std::int32_t pages = (id == a ? 4 : 3) + (at_once || next.layer == 1 ? 1 : 0);
        if (next.action == schedule_action::recall) recalling.push_back(id);
        if (next.action == schedule_action::select &&
            d.scheduler.selected(id, {.bytes = 1, .pages = pages}) ==
                selected_outcome::recall_now) {
          recalling.push_back(id);
        }
      }
      if (!recalling.empty()) d.flights.land(d.recall(recalling));
      CHECK(d.scheduler.counts().total() == 2 - (has_run[0] ? 1 : 0) - (has_run[1] ? 1 : 0));
    }
    CHECK(has_run[0]);
    CHECK(has_run[1]);
    CHECK(d.scheduler.free_pages() == 7);
    CHECK(d.scheduler.statistics().preemptions == (at_once ? 0 : 1));
  }
}

TEST_CASE("fault 60: what comes back for the oldest is nobody else's before it has all of it") {
  desk d({.max_requests = 3,
          .layers = 1,
          .max_groups = 1,
          .max_flights = 8,
          .max_wait_batches = 2,
          .pages = 4});
  const request_id oldest = d.scheduler.add().value();
  const request_id young[2] = {d.scheduler.add({.pages = 2}).value(),
                               d.scheduler.add({.pages = 2}).value()};
  const flight_id store = d.flights.add();
  d.scheduler.hold({&young[0], 1}, store);
  for (const request_id id : d.expect(schedule_action::select)) {
    (void)d.scheduler.selected(id, {.pages = id == oldest ? 4 : 2});
  }
  // The younger ones go on with the pages that the oldest lacks, but not for ever.
  while (d.scheduler.statistics().preemptions == 0 && d.scheduler.statistics().batches < 20) {
    const schedule_decision next = d.next();
    const std::vector<request_id> ids(next.requests.begin(), next.requests.end());
    if (next.action == schedule_action::run) d.scheduler.completed(next.batch);
    for (const request_id id : ids) {
      if (next.action == schedule_action::run) d.scheduler.restart(id);
      if (next.action == schedule_action::select) (void)d.scheduler.selected(id, {.pages = 2});
    }
  }
  CHECK(d.scheduler.statistics().batches <= 3);
  // Those of one are back, those of the other one are still read by its store.
  for (int turn = 0; turn < 5; ++turn) {
    CHECK(d.next().action == schedule_action::wait);
    CHECK(d.scheduler.free_pages() == 2);
    CHECK(d.scheduler.pages_of(young[1]) == 0);
  }
  d.flights.land(store);
  CHECK(d.expect(schedule_action::release) == std::vector{young[0]});
  CHECK(d.run() == std::vector{oldest});
  CHECK(d.scheduler.pages_of(oldest) == 4);
  CHECK(d.scheduler.statistics().preemptions == 2);
}

TEST_CASE("layer_scheduler: a younger request passes one that lacks pages, but not for ever") {
  desk d({.max_requests = 8,
          .layers = 1,
          .max_groups = 1,
          .max_flights = 8,
          .max_wait_batches = 10,
          .pages = 4});
  const request_id holder = d.scheduler.add({.pages = 2}).value();
  const request_id large = d.scheduler.add({.pages = 4}).value();
  (void)d.scheduler.add({.pages = 1}).value();
  CHECK(d.scheduler.state_of(large) == layer_state::waiting);
  int batches = 0;
  bool has_run = false;
  while (!has_run && batches < 100) {
    const schedule_decision next = d.next();
    const std::vector<request_id> ids(next.requests.begin(), next.requests.end());
    if (next.action == schedule_action::select) {
      for (const request_id id : ids) (void)d.scheduler.selected(id, {});
    } else if (next.action == schedule_action::run) {
      ++batches;
      d.scheduler.completed(next.batch);
      for (const request_id id : ids) {
        has_run = has_run || id == large;
        if (id == holder && batches > 3) {
          (void)d.scheduler.cancel(id);
        } else {
          d.scheduler.restart(id);
        }
      }
    }
  }
  CHECK(has_run);
  CHECK(batches > 1);
  CHECK(batches <= 12);
}

TEST_CASE("fault 64: what has ended is seen before there is said to be nothing to run") {
  desk d({.max_requests = 2, .layers = 1, .max_flights = 8, .pages = 4});
  const request_id a = d.scheduler.add({.pages = 4}).value();
  const auto recall = d.select(1);
  CHECK(d.scheduler.cancel(a) == leave_outcome::later);
  const request_id b = d.scheduler.add({.pages = 4}).value();
  CHECK(d.next().action == schedule_action::wait);
  d.flights.land(*recall);  // nobody tells the scheduler
  CHECK(d.expect(schedule_action::release) == std::vector{a});
  CHECK(d.expect(schedule_action::select) == std::vector{b});
}

TEST_CASE("layer_scheduler: nothing that is ready waits for more batches than allowed") {
  // One request is always left behind by three others, which are never complete without it.
  constexpr std::int32_t most = 12;
  desk d({.max_requests = 16,
          .layers = 6,
          .max_groups = 4,
          .max_flights = 64,
          .max_wait_batches = most,
          .work = {.weight_bytes = 1e9, .request_bytes = 1e6, .recall_bytes = 1e6}});
  std::vector<std::int64_t> ready_since(16, -1);
  std::vector<request_id> ids;
  for (int i = 0; i < 16; ++i) ids.push_back(d.scheduler.add().value());
  std::int64_t batches = 0;
  std::int64_t longest = 0;
  std::vector<std::pair<std::uint64_t, flight_id>> under_way;
  std::uint64_t draws = 1;
  while (batches < 3000) {
    for (const request_id id : ids) {
      auto& since = ready_since[static_cast<std::size_t>(id.index)];
      const bool is_ready = d.scheduler.state_of(id) == layer_state::ready;
      if (is_ready && since < 0) since = batches;
      if (!is_ready) since = -1;
      if (is_ready) longest = std::max(longest, batches - since);
      if (d.scheduler.state_of(id) == layer_state::done) d.scheduler.restart(id);
    }
    const schedule_decision next = d.next();
    const std::vector<request_id> who(next.requests.begin(), next.requests.end());
    if (next.action == schedule_action::select) {
      for (const request_id id : who) {
        draws = draws * 6364136223846793005u + 1442695040888963407u;
        const bool recalls = id.index == 0 || (draws >> 40) % 3 == 0;
        if (d.scheduler.selected(id, {.bytes = recalls ? 1e6 : 0}) !=
            selected_outcome::recall_now) {
          continue;
        }
        const flight_id flight = d.recall({id}, {.bytes = 1e6});
        under_way.emplace_back(d.now + (draws >> 33) % 3'000'000, flight);
      }
    } else if (next.action == schedule_action::run) {
      ++batches;
      d.now += 300'000;
      d.scheduler.completed(next.batch);
    } else {
      d.now += 50'000;
    }
    for (std::size_t i = 0; i < under_way.size();) {
      if (under_way[i].first > d.now) {
        ++i;
        continue;
      }
      d.flights.land(under_way[i].second);
      under_way[i] = under_way.back();
      under_way.pop_back();
    }
  }
  CHECK(longest <= most + 16);
}

TEST_CASE("layer_scheduler: who is ready runs, though others are complete all the time") {
  constexpr std::int32_t most = 5;
  desk d({.max_requests = 4,
          .layers = 3,
          .max_groups = 2,
          .max_flights = 16,
          .max_wait_batches = most,
          .work = {.weight_bytes = 1, .request_bytes = 3350e6, .recall_bytes = 56e6}});
  for (int i = 0; i < 4; ++i) (void)d.scheduler.add();
  d.flights.land(d.select(56e6).value());
  const auto first = d.expect(schedule_action::run);
  REQUIRE(first.size() == 2);
  const batch_id batch = d.last.batch;
  const auto others = d.run();
  REQUIRE(others.size() == 2);
  d.scheduler.completed(batch);
  // Of the first two one is ready at their next layer, and the other one's blocks never come.
  std::int64_t batches = -1;
  for (int turn = 0; turn < 100 && batches < 0; ++turn) {
    const schedule_decision next = d.next();
    const std::vector<request_id> ids(next.requests.begin(), next.requests.end());
    for (const request_id id : ids) {
      if (next.action == schedule_action::select &&
          d.scheduler.selected(id, {.bytes = id == first[0] ? 0 : 56e6}) ==
              selected_outcome::recall_now) {
        const flight_id recall = d.recall({id}, {.bytes = 56e6});
        if (id != first[1]) d.flights.land(recall);
      }
      if (next.action == schedule_action::run && id == first[0]) {
        batches = d.scheduler.statistics().batches;
      }
    }
    if (next.action == schedule_action::run) d.scheduler.completed(next.batch);
    for (const request_id id : others) {
      if (d.scheduler.state_of(id) == layer_state::done) d.scheduler.restart(id);
    }
  }
  CHECK(batches > 2 + 1);
  CHECK(batches <= 2 + most + 1);
}

/// What a rank has under way: when each flight ends by its own link, and whether it fails there.
struct own_flight {
  std::uint64_t ends;
  bool fails;
  flight_id flight;
};

TEST_CASE("fault 65: ranks that see recalls end at different times decide alike") {
  constexpr scheduler_options o{
      .max_requests = 8,
      .layers = 4,
      .max_flights = 64,
      .work = {.weight_bytes = 1e8, .request_bytes = 1e8, .recall_bytes = 1e6}};
  desk ranks[2] = {desk(o), desk(o)};
  for (desk& d : ranks) {
    for (int i = 0; i < 8; ++i) (void)d.scheduler.add();
  }
  std::vector<own_flight> under_way[2];
  int failures = 0, apart = 0;
  for (int turn = 0; turn < 2000; ++turn) {
    std::vector<flight_state> seen[2];
    for (int r = 0; r < 2; ++r) {
      desk& d = ranks[r];
      d.now = 1000 + static_cast<std::uint64_t>(turn) * 20'000;
      for (std::int32_t i = 0; i < 8; ++i) {
        if (d.scheduler.state_of({i, 1}) == layer_state::done) d.scheduler.restart({i, 1});
      }
      std::erase_if(under_way[r], [&d](const own_flight& f) {
        if (f.ends > d.now) return false;
        f.fails ? d.flights.fail(f.flight) : d.flights.land(f.flight);
        return true;
      });
      for (std::int32_t i = 0; i < o.max_flights; ++i) {
        const auto flight = static_cast<flight_id>(i);
        seen[r].push_back(d.flights.is_under_way(flight) ? d.flights.poll(flight)
                                                         : flight_state::under_way);
      }
    }
    apart += seen[0] != seen[1] ? 1 : 0;
    // Each rank joins what the other one says into what it has seen itself.
    std::vector<flight_state> agreed[2] = {seen[0], seen[1]};
    pulseinfer::agree_on(agreed[0], seen[1]);
    pulseinfer::agree_on(agreed[1], seen[0]);
    std::vector<std::tuple<schedule_action, std::int32_t, std::vector<std::int32_t>>> decided;
    for (int r = 0; r < 2; ++r) {
      desk& d = ranks[r];
      for (std::size_t i = 0; i < agreed[r].size(); ++i) {
        // What has not ended here has not ended.
        if (agreed[r][i] != flight_state::under_way) CHECK(seen[r][i] != flight_state::under_way);
      }
      pulseinfer::agreed_flights view(d.flights, agreed[r]);
      const schedule_decision next = d.scheduler.next(d.now, view);
      std::vector<std::int32_t> who;
      std::vector<request_id> recalling;
      for (const request_id id : next.requests) who.push_back(id.index);
      if (next.action == schedule_action::select) {
        for (const std::int32_t i : who) {
          const double bytes = (i + next.layer + turn) % 3 == 0 ? 0 : 1e6;
          if (d.scheduler.selected({i, 1}, {.bytes = bytes}) == selected_outcome::recall_now) {
            recalling.push_back({i, 1});
          }
        }
        if (!recalling.empty()) {
          const bool fails = r == 1 && turn % 7 == 0;
          failures += fails ? 1 : 0;
          const std::uint64_t deadline = turn % 3 == 0 ? d.now + 110'000 : d.now + 1'000'000;
          under_way[r].push_back({d.now + static_cast<std::uint64_t>(30'000 + 50'000 * r), fails,
                                  d.recall(recalling, {.bytes = 1e6, .deadline_ns = deadline})});
        }
      }
      if (next.action == schedule_action::late) {
        for (const std::int32_t i : who) d.scheduler.fall_back({i, 1});
      }
      if (next.action == schedule_action::run) d.scheduler.completed(next.batch);
      decided.emplace_back(next.action, next.layer, who);
    }
    REQUIRE(decided[0] == decided[1]);
  }
  CHECK(ranks[0].scheduler.statistics().batches > 100);
  // A flight that failed on one rank was late on both.
  CHECK(failures > 10);
  CHECK(apart > 100);
  CHECK(ranks[0].scheduler.statistics().late > failures);
}

TEST_CASE("layer_scheduler: a step allocates nothing") {
  if (!test::counts_allocations()) return;
  desk d({.max_requests = 64, .layers = 8, .max_flights = 64, .work = {.weight_bytes = 1e8}});
  std::vector<request_id> ids(64);
  for (request_id& id : ids) id = d.scheduler.add().value();
  std::vector<flight_id> under_way;
  under_way.reserve(64);
  const std::uint64_t before = test::allocations();
  for (int turn = 0; turn < 2000; ++turn) {
    const schedule_decision next = d.next();
    if (next.action == schedule_action::select) {
      request_id recalling[64];
      std::size_t n = 0;
      for (const request_id id : next.requests) recalling[n++] = id;
      for (std::size_t i = 0; i < n; ++i) (void)d.scheduler.selected(recalling[i], {.bytes = 1e5});
      under_way.push_back(d.flights.add());
      d.scheduler.recalling({recalling, n}, under_way.back(), d.now, {.bytes = 1e5});
    } else if (next.action == schedule_action::run) {
      d.scheduler.completed(next.batch);
    } else {
      for (const flight_id f : under_way) d.flights.land(f);
      under_way.clear();
    }
    for (const request_id id : ids) {
      if (d.scheduler.state_of(id) == layer_state::done) d.scheduler.restart(id);
    }
    d.now += 1'000'000;
  }
  CHECK(test::allocations() == before);
  CHECK(d.scheduler.statistics().batches > 100);
}

TEST_CASE("layer_scheduler: what does not fit is refused, and changes nothing") {
  desk d({.max_requests = 2, .layers = 2, .max_flights = 2, .flights_per_request = 1, .pages = 3});
  const double nan = std::numeric_limits<double>::quiet_NaN();
  CHECK_THROWS_AS((void)d.scheduler.add({.pages = 4}), std::invalid_argument);
  CHECK_THROWS_AS((void)d.scheduler.add({.bytes = nan}), std::invalid_argument);
  CHECK(d.scheduler.counts().total() == 0);
  const request_id id = d.scheduler.add().value();
  const request_id other = d.scheduler.add().value();
  const request_id stale{id.index, id.generation + 1};
  CHECK_THROWS_AS((void)d.scheduler.state_of(stale), std::invalid_argument);
  CHECK_THROWS_AS((void)d.scheduler.state_of({-1, 0}), std::invalid_argument);
  CHECK_THROWS_AS((void)d.scheduler.state_of({2, 1}), std::invalid_argument);
  CHECK_THROWS_AS(d.scheduler.restart(id), std::logic_error);
  CHECK_THROWS_AS(d.scheduler.fall_back(id), std::logic_error);
  CHECK_THROWS_AS(d.scheduler.resume(id), std::logic_error);
  (void)d.expect(schedule_action::select);
  CHECK_THROWS_AS((void)d.scheduler.selected(id, {.bytes = nan}), std::invalid_argument);
  CHECK_THROWS_AS((void)d.scheduler.selected(id, {.bytes = -1}), std::invalid_argument);
  CHECK_THROWS_AS((void)d.scheduler.selected(id, {.pages = 4}), std::invalid_argument);
  CHECK(d.scheduler.selected(id, {.bytes = 1}) == selected_outcome::recall_now);
  CHECK_THROWS_AS((void)d.scheduler.selected(id, {.bytes = 1}), std::logic_error);
  const auto one = static_cast<flight_id>(1);
  const auto recalling = [&](std::vector<request_id> ids, flight_id flight,
                             const pulseinfer::recall_terms& terms = {}) {
    d.scheduler.recalling(ids, flight, d.now, terms);
  };
  CHECK_THROWS_AS(recalling({id}, flight_id::none), std::invalid_argument);
  CHECK_THROWS_AS(recalling({id}, static_cast<flight_id>(2)), std::invalid_argument);
  CHECK_THROWS_AS(recalling({id, stale}, one), std::invalid_argument);
  CHECK_THROWS_AS(recalling({id, id}, one), std::invalid_argument);
  CHECK_THROWS_AS(recalling({id}, one, {.bytes = nan}), std::invalid_argument);
  CHECK_THROWS_AS(recalling({id}, one, {.layers_ahead = 2}), std::invalid_argument);
  CHECK(d.scheduler.state_of(id) == layer_state::recalling);
  const flight_id flight = d.recall({id});
  CHECK_THROWS_AS(recalling({other}, flight), std::invalid_argument);  // it is under way
  CHECK_THROWS_AS(recalling({id}, one), std::invalid_argument);        // one flight a request
  CHECK_THROWS_AS(d.scheduler.issued({0, 1}, one), std::invalid_argument);
  CHECK_THROWS_AS(d.scheduler.completed({-1, 0}), std::invalid_argument);
  CHECK_THROWS_AS(d.scheduler.withdraw({7, 0}), std::invalid_argument);
  CHECK_THROWS_AS(layer_scheduler({.layers = 0}), std::invalid_argument);
  d.flights.land(flight);
  (void)d.next();
  CHECK(d.flights.under_way() == 0);
  CHECK(d.scheduler.counts().total() == 2);
}

}  // namespace

TEST_CASE("layer_scheduler: what is known ahead is a share of what the same layers lack") {
  pulseinfer::scheduler_options o{.max_requests = 4,
                                  .layers = 2,
                                  .max_groups = 1,
                                  .max_flights = 16,
                                  .work = {.weight_bytes = 3350e9}};
  o.work.recall_bytes = 50;
  o.work.known_ahead = 0.6;
  pulseinfer::layer_scheduler scheduler(o);
  test::fake_flights flights(o.max_flights);
  const auto id = scheduler.add().value();
  for (int step = 0; step < 400; ++step) {
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      auto d = scheduler.next(1000, flights);
      REQUIRE(d.action == pulseinfer::schedule_action::select);
      // The first layer has all it reads, as engines that keep it dense do.
      const double late = layer == 0 ? 0 : 40;
      const double ahead = layer == 0 ? 0 : 60;
      if (scheduler.selected(id, {.bytes = late, .ahead_bytes = ahead}) ==
          pulseinfer::selected_outcome::recall_now) {
        const auto flight = flights.add();
        const std::vector ids{id};
        scheduler.recalling(ids, flight, 1000);
        flights.land(flight);
      }
      d = scheduler.next(1000, flights);
      REQUIRE(d.action == pulseinfer::schedule_action::run);
      scheduler.completed(d.batch);
    }
    (void)scheduler.next(1000, flights);
    scheduler.restart(id);
  }
  CHECK(scheduler.work().known_ahead == doctest::Approx(0.6).epsilon(0.1));
}
