// SPDX-License-Identifier: Apache-2.0
/// @file
/// Flights on the backend under test, and a scheduler that drives a transfer engine by them. Include
/// the backend's support header first.
#include "pulseinfer/flight_board.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "pulseinfer/layer_scheduler.hpp"
#include "support/hold.hpp"
#include "support/offload_rig.hpp"

namespace {

using backend = test::backend;
using rig = test::offload_rig<backend>;
using board = pulseinfer::flight_board<backend>;
using pulseinfer::flight_id;
using pulseinfer::flight_state;
using pulseinfer::layer_scheduler;
using pulseinfer::layer_state;
using pulseinfer::request_id;
using pulseinfer::schedule_action;
using pulseinfer::stream_priority;

static_assert(pulseinfer::tells_flights<board>);
static_assert(pulseinfer::tells_flights<pulseinfer::agreed_flights<board>>);

TEST_CASE("flight_board: an event is under way until the stream has done what it held") {
  test::each_backend([](backend machine) {
    board flights(machine, 2);
    auto stream = machine.make_stream(stream_priority::normal);
    {
      test::hold<backend> held(machine, stream);
      const flight_id id = flights.add(stream).value();
      CHECK(flights.size() == 1);
      CHECK(flights.find(id) == nullptr);
      if (test::hold<backend>::is_exact) CHECK(flights.poll(id) == flight_state::under_way);
      held.release();
      flights.sync_change();
      CHECK(flights.poll(id) == flight_state::landed);
      flights.retire(id);
      CHECK(flights.size() == 0);
      CHECK(flights.add(stream).value() == id);
    }
    CHECK(flights.add(stream));
    CHECK_FALSE(flights.add(stream));
    machine.sync(stream);
  });
}

TEST_CASE("flight_board: without flights nothing is waited for, and sizes are checked") {
  test::each_backend([](backend machine) {
    board flights(machine, 3);
    flights.sync_change();
    std::vector<flight_state> states(2);
    CHECK_THROWS_AS(flights.snapshot(states), std::invalid_argument);
    CHECK_THROWS_AS(board(machine, 0), std::invalid_argument);
    CHECK(flights.find(flight_id::none) == nullptr);
    CHECK(flights.find(static_cast<flight_id>(3)) == nullptr);
    for (const flight_id nobody : {flight_id::none, static_cast<flight_id>(0),
                                   static_cast<flight_id>(3), static_cast<flight_id>(-7)}) {
      CHECK(flights.poll(nobody) == flight_state::failed);
      flights.retire(nobody);
    }
    auto stream = machine.make_stream(stream_priority::normal);
    const flight_id twice = flights.add(stream).value();
    flights.retire(twice);
    flights.retire(twice);  // or two flights had its number
    CHECK(flights.size() == 0);
    for (int i = 0; i < 3; ++i) CHECK(flights.add(stream));
    CHECK_FALSE(flights.add(stream));
    machine.sync(stream);
  });
}

TEST_CASE("flight_board: a wait has an end, if the clock gets there first") {
  test::each_backend([](backend machine) {
    board flights(machine, 1);
    auto stream = machine.make_stream(stream_priority::normal);
    test::hold<backend> held(machine, stream);
    (void)flights.add(stream).value();
    flights.sync_change(machine.now_ns());
    held.release();
    machine.sync(stream);
  });
}

TEST_CASE("flight_board: a recall has landed when all its units have come, and failed otherwise") {
  test::each_backend([](backend machine) {
    rig r(machine);
    board flights(machine, 4);
    const auto id = r.stored(1, {0, 1, 2});
    const flight_id whole = flights.add(r.recall(0, id, {{0, 0, 0}, {0, 2, 1}}).value()).value();
    const flight_id part = flights.add(r.recall(0, id, {{0, 1, 2}, {0, 9, 3}}).value()).value();
    REQUIRE(flights.find(whole) != nullptr);
    flights.find(whole)->sync();
    flights.find(part)->sync();
    CHECK(flights.poll(whole) == flight_state::landed);
    CHECK(flights.poll(part) == flight_state::failed);
    std::vector<flight_state> states(4);
    flights.snapshot(states);
    CHECK(std::count(states.begin(), states.end(), flight_state::under_way) == 2);
    flights.retire(whole);
    flights.retire(part);
    CHECK(flights.find(whole) == nullptr);
  });
}

TEST_CASE("flight_board: with landing::complete a recall lands when its pages may be used") {
  test::each_backend([](backend machine) {
    rig r(machine);
    board flights(machine, 4, pulseinfer::landing::complete);
    const auto id = r.stored(1, {0, 1, 2});
    const flight_id whole = flights.add(r.recall(0, id, {{0, 0, 0}, {0, 2, 1}}).value()).value();
    while (flights.poll(whole) == flight_state::under_way) flights.sync_change();
    CHECK(flights.poll(whole) == flight_state::landed);
    CHECK(flights.find(whole)->is_complete());
    r.pages.download(r.stream);  // nothing but the board was waited for
    CHECK((r.pages.get(0, 1) == test::stamp(rig::geometry, 1, 0, 2)));
    flights.retire(whole);
    // What does not come whole has failed, and a store has landed when it can be read.
    const flight_id part = flights.add(r.recall(0, id, {{0, 1, 2}, {0, 9, 3}}).value()).value();
    const flight_id out = flights.add(r.offload(0, id, {{0, 7, 0}}).value()).value();
    const auto is_under_way = [&](flight_id f) {
      return flights.poll(f) == flight_state::under_way;
    };
    machine.sync_until([&] { return !is_under_way(part) && !is_under_way(out); });
    CHECK(flights.poll(part) == flight_state::failed);
    CHECK(!flights.find(part)->is_complete());
    CHECK(flights.poll(out) == flight_state::landed);
    CHECK((r.in_store(id, 0, 7) == test::stamp(rig::geometry, 1, 0, 0)));
    flights.retire(part);
    flights.retire(out);
  });
}

TEST_CASE("fault 65: what ranks agree on has ended everywhere, and failed if anywhere") {
  using enum flight_state;
  const std::vector<flight_state> all{under_way, landed, failed};
  for (const flight_state a : all) {
    for (const flight_state b : all) {
      std::vector<flight_state> agreed{a};
      pulseinfer::agree_on(agreed, std::vector<flight_state>{b});
      CHECK((agreed[0] == under_way) == (a == under_way || b == under_way));
      CHECK((agreed[0] == landed) == (a == landed && b == landed));
    }
  }
  std::vector<flight_state> two(2);
  CHECK_THROWS_AS(pulseinfer::agree_on(two, all), std::invalid_argument);

  test::each_backend([](backend machine) {
    board flights(machine, 1);
    auto stream = machine.make_stream(stream_priority::normal);
    const flight_id id = flights.add(stream).value();
    machine.sync(stream);
    std::vector<flight_state> agreed(1);
    pulseinfer::agreed_flights view(flights, agreed);
    flights.snapshot(agreed);
    CHECK(view.poll(id) == flight_state::landed);
    pulseinfer::agree_on(agreed, std::vector<flight_state>{flight_state::under_way});
    CHECK(view.poll(id) == flight_state::under_way);
    view.retire(id);
    CHECK(flights.size() == 0);
  });
}

/// Three requests, each with four blocks in the store and four pages, that run three steps of two
/// layers: every layer reads what its recall brought.
class reader {
 public:
  static constexpr std::int32_t requests = 3;
  static constexpr std::int32_t blocks = 4;
  static constexpr std::int32_t layers = rig::geometry.layers;

  explicit reader(backend machine)
      : r_(machine),
        flights_(machine, 16),
        scheduler_({.max_requests = requests,
                    .layers = layers,
                    .max_groups = 3,
                    .max_flights = 16,
                    .work = {.weight_bytes = 1, .request_bytes = 3e9, .recall_bytes = 56e6}}) {
    for (std::int32_t i = 0; i < requests; ++i) {
      ids_.push_back(scheduler_.add().value());
      sequences_.push_back(r_.stored(ids_.back().index, {0, 1, 2, 3}));
    }
  }
  void run(int steps) {
    std::vector<int> left(requests, steps);
    while (true) {
      bool runs = false;
      for (const request_id id : ids_) {
        auto& n = left[static_cast<std::size_t>(id.index)];
        if (n > 0 && scheduler_.state_of(id) == layer_state::done) {
          compare(id, layers - 1);
          if (--n > 0) scheduler_.restart(id);
        }
        runs = runs || n > 0;
      }
      if (!runs) break;
      act(scheduler_.next(r_.machine.now_ns(), flights_));
    }
    CHECK(compared_ == requests * steps * layers * blocks);
    CHECK(scheduler_.statistics().layers_run == requests * steps * layers);
    CHECK(flights_.size() == 0);
  }

 private:
  static std::int32_t page(request_id id, std::int32_t block) { return id.index * 8 + block; }

  void act(const pulseinfer::schedule_decision& d) {
    const std::vector<request_id> who(d.requests.begin(), d.requests.end());
    if (d.action == schedule_action::select) {
      std::vector<pulseinfer::sequence_id> rows;
      std::vector<pulseinfer::unit_target> units;
      for (const request_id id : who) {
        if (d.layer > 0) compare(id, d.layer - 1);
        (void)scheduler_.selected(id, {.bytes = 56e6});
        for (std::int32_t b = 0; b < blocks; ++b) {
          units.push_back({static_cast<std::int32_t>(rows.size()), pulseinfer::logical_block{b},
                           pulseinfer::device_page{page(id, b)}});
        }
        rows.push_back(sequences_[static_cast<std::size_t>(id.index)]);
      }
      auto recall = r_.mover.recall_units(d.layer, rows, units, r_.stream);
      scheduler_.recalling(who, flights_.add(std::move(recall.value())).value(),
                           r_.machine.now_ns(), {.bytes = 56e6});
    } else if (d.action == schedule_action::run) {
      for (const request_id id : who) {
        for (std::int32_t b = 0; b < blocks; ++b) {
          r_.pages.put(d.layer, page(id, b), test::unit_bytes(128));
          r_.pages.read_page(d.layer, page(id, b), r_.stream);
        }
      }
      scheduler_.issued(d.batch, flights_.add(r_.stream).value());
    } else if (d.action == schedule_action::wait) {
      flights_.sync_change(d.until_ns);
    } else {
      REQUIRE(d.action == schedule_action::idle);  // the last batch has just been seen to end
    }
  }
  void compare(request_id id, std::int32_t layer) {
    for (std::int32_t b = 0; b < blocks; ++b) {
      ++compared_;
      CHECK(r_.pages.get(layer, page(id, b)) == test::stamp(rig::geometry, id.index, layer, b));
    }
  }

  rig r_;
  board flights_;
  layer_scheduler scheduler_;
  std::vector<request_id> ids_;
  std::vector<pulseinfer::sequence_id> sequences_;
  int compared_ = 0;
};

TEST_CASE("flight_board: a scheduler drives recalls and reads on this machine") {
  test::each_backend([](backend machine) { reader(machine).run(3); });
}

}  // namespace
