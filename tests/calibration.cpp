// SPDX-License-Identifier: Apache-2.0
/// @file
/// Calibration: machines that follow the formula, that are noisy, that follow what others have
/// published; and what it asks of a machine.
#include "pulseinfer/calibration.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/published_tables.hpp"

namespace {

using namespace pulseinfer;

constexpr double never = std::numeric_limits<double>::infinity();

/// A machine of costs: what its formula says.
struct formula_machine {
  transfer_costs costs;
  double operator()(transfer_way way, const transfer_shape& shape) const {
    return costs.find(way) == nullptr ? never : costs.predict(way, shape);
  }
};

/// Its ways are the best in turn, within what a calibration measures.
formula_machine plain_machine() {
  formula_machine machine;
  machine.costs.set(transfer_way::staged,
                    {.latency = 40e-6, .per_entry = 0.1e-6, .per_byte = 1 / 50e9});
  machine.costs.set(transfer_way::direct,
                    {.latency = 1e-6, .per_call = 2.3e-6, .per_byte = 1 / 55e9});
  machine.costs.set(transfer_way::batched, {.latency = 12e-6,
                                            .per_entry = 0.05e-6,
                                            .per_byte = 1 / 54e9,
                                            .knee_bytes = 24576,
                                            .per_entry_below = 0.6e-6,
                                            .per_byte_below = 1 / 20e9});
  machine.costs.set(transfer_way::pull,
                    {.latency = 8e-6, .per_entry = 0.02e-6, .per_byte = 1 / 30e9});
  return machine;
}

/// Shapes within the default range, other ones than those that are measured.
template <class Visit>
void each_shape(Visit visit) {
  for (std::int64_t entries = 17; entries <= 4096; entries = entries * 13 / 8) {
    for (std::int64_t size = 1100; size <= 1 << 20; size = size * 9 / 8) {
      visit(transfer_shape{entries, entries, entries * size});
    }
  }
}

template <class Measure>
double worst_choice(const transfer_costs& costs, const Measure& machine) {
  double worst = 1;
  each_shape([&](const transfer_shape& shape) {
    double best = never;
    for (const transfer_way way : detail::priced_ways) {
      best = std::min(best, double{machine(way, shape)});
    }
    worst = std::max(worst, machine(costs.cheapest(shape).way, shape) / best);
  });
  return worst;
}

/// A machine of which each answer is off by up to `jitter`, and now and then three times too long.
template <class Machine>
auto with_noise(const Machine& machine, double jitter, std::uint64_t seed) {
  return [&machine, jitter, random = detail::random_source(seed)](
             transfer_way way, const transfer_shape& shape) mutable {
    const double off = jitter * (static_cast<double>(random.below(2001)) / 1000 - 1);
    return machine(way, shape) * (1 + off) * (random.one_in(40) ? 3 : 1);
  };
}

transfer_costs calibrated(const published::table& table) {
  return calibrate(table, table.range());
}

double judged(const published::table& table, const transfer_costs& costs) {
  return published::judge(table, [&](const transfer_shape& s) { return costs.cheapest(s).way; })
      .worst;
}

}  // namespace

TEST_CASE("calibration: a machine that follows the formula is found out, term by term") {
  formula_machine machine = plain_machine();
  const transfer_costs costs = calibrate(machine);
  for (const transfer_way way : {transfer_way::staged, transfer_way::direct, transfer_way::pull}) {
    const way_cost& found = *costs.find(way);
    const way_cost& law = *machine.costs.find(way);
    CHECK(found.latency == doctest::Approx(law.latency).epsilon(1e-3));
    CHECK(found.per_call == doctest::Approx(law.per_call).epsilon(1e-3));
    CHECK(found.per_entry == doctest::Approx(law.per_entry).epsilon(1e-3));
    CHECK(found.per_byte == doctest::Approx(law.per_byte).epsilon(1e-3));
    CHECK(found.knee_bytes == 0);
  }
  const way_cost& batched = *costs.find(transfer_way::batched);
  CHECK(batched.knee_bytes > 22000);
  CHECK(batched.knee_bytes < 27000);
  CHECK(batched.per_byte == doctest::Approx(1 / 54e9).epsilon(1e-3));
  CHECK(batched.per_entry_below == doctest::Approx(0.6e-6).epsilon(1e-3));
  CHECK(batched.per_byte_below == doctest::Approx(1 / 20e9).epsilon(1e-3));
}

TEST_CASE("calibration: without a knee the choice is exactly the best, also far outside") {
  formula_machine machine = plain_machine();
  way_cost batched = *machine.costs.find(transfer_way::batched);
  batched.knee_bytes = batched.per_entry_below = batched.per_byte_below = 0;
  machine.costs.set(transfer_way::batched, batched);
  const transfer_costs costs = calibrate(machine);
  std::set<transfer_way> chosen;
  const auto check = [&](const transfer_shape& shape) {
    const way_choice choice = costs.cheapest(shape);
    const way_choice best = machine.costs.cheapest(shape);
    chosen.insert(choice.way);
    // Equal to rounding: two ways that are equal may change places.
    CHECK(machine(choice.way, shape) <= best.seconds * (1 + 1e-6));
    CHECK(choice.seconds == doctest::Approx(best.seconds).epsilon(1e-6));
  };
  each_shape(check);
  for (const transfer_shape far : {transfer_shape{1, 1, 16},
                                   {1, 1, 1 << 30},
                                   {100'000, 100'000, 100'000 << 8},
                                   {20'000, 20'000, std::int64_t{20'000} << 20}}) {
    check(far);
  }
  CHECK(chosen.size() >= 3);
}

TEST_CASE("calibration: with a knee the choice is the best but for its immediate surroundings") {
  const formula_machine machine = plain_machine();
  CHECK(worst_choice(calibrate(machine), machine) <= 1.10);
}

TEST_CASE("calibration: noise and interference are taken out") {
  const formula_machine machine = plain_machine();
  for (std::uint64_t seed = 1; seed <= 8; ++seed) {
    CAPTURE(seed);
    CHECK(worst_choice(calibrate(with_noise(machine, 0.03, seed)), machine) <= 1.10);
  }
}

TEST_CASE("calibration: published tables: the chosen way takes at most 1.10 of the best") {
  for (const published::table& table : published::tables()) {
    CAPTURE(table.name);
    const auto found = published::judge(table, [costs = calibrated(table)](const auto& shape) {
      return costs.cheapest(shape).way;
    });
    CAPTURE(found.entry_bytes);
    CAPTURE(found.entries);
    CHECK(found.shapes >= 1);
    CHECK(found.worst <= 1.10);
  }
}

TEST_CASE("calibration: a table is asked for few of the shapes that judge it") {
  const published::table table = published::a30_batch_and_pull(5e-6, 24e9);
  std::set<std::pair<std::int64_t, std::int64_t>> asked;
  (void)calibrate(
      [&](transfer_way way, const transfer_shape& s) {
        asked.emplace(s.pieces, s.bytes);
        return table(way, s);
      },
      table.range());
  const auto judged_at = published::judge(table, [](const auto&) { return transfer_way::pull; });
  CHECK(judged_at.shapes > 100 * static_cast<std::int64_t>(asked.size()));
}

TEST_CASE("calibration: the judge notices a wrong cost, a bare formula and a single way") {
  for (const published::table& table :
       {published::a30_batch_and_pull(5e-6, 24e9), published::h200_batch_and_staged(),
        published::mi300x_pull_and_direct(), published::mi300x_loop_and_batch()}) {
    CAPTURE(table.name);
    // Every way is taken for the next one.
    const std::vector<transfer_way> ways = table.ways();
    const transfer_costs wrong = calibrate(
        [&](transfer_way way, const transfer_shape& shape) {
          const auto at = std::find(ways.begin(), ways.end(), way) - ways.begin();
          return table(ways[(static_cast<std::size_t>(at) + 1) % ways.size()], shape);
        },
        table.range());
    CHECK(judged(table, wrong) > 1.10);
  }
  const published::table a30 = published::a30_batch_and_pull(5e-6, 24e9);
  transfer_costs bare;
  for (const transfer_way way : a30.ways()) {
    way_cost cost = *calibrated(a30).find(way);
    cost.measured.clear();
    bare.set(way, cost);
  }
  CHECK(judged(a30, bare) > 1.10);
  for (const transfer_way way : a30.ways()) {
    CHECK(published::judge(a30, [&](const auto&) { return way; }).worst > 1.5);
  }
}

TEST_CASE("calibration: published tables: points are as published, and nothing is beyond them") {
  const published::table h100 = published::h100_batch_and_pull();
  const auto rate = [&](double size, double entries) {
    return size * entries / h100.seconds(transfer_way::batched, size, entries);
  };
  CHECK(rate(16 << 10, 10'000) == doctest::Approx(7.1e9));
  CHECK(rate(28 << 10, 100'000) == doctest::Approx(44.1e9));
  CHECK(rate(20 << 10, 10'000) > 7.1e9);
  CHECK(rate(20 << 10, 10'000) < 25.8e9);
  CHECK(rate(64 << 10, 30'000) > 38.8e9);
  CHECK(rate(64 << 10, 30'000) < 51.8e9);
  CHECK(h100.seconds(transfer_way::batched, 4 << 10, 9'000) == never);
  CHECK(h100.seconds(transfer_way::batched, 4 << 10, 110'000) == never);
  CHECK(h100.seconds(transfer_way::batched, 3 << 10, 10'000) == never);
  CHECK(h100.seconds(transfer_way::staged, 4 << 10, 10'000) == never);
  const published::table mi300x = published::mi300x_loop_and_batch();
  CHECK(mi300x.seconds(transfer_way::direct, 4 << 10, 4096) == doctest::Approx(22.4e-3));
  CHECK(mi300x.seconds(transfer_way::direct, 512 << 10, 512) == doctest::Approx(11.2e-3));
  CHECK(mi300x.seconds(transfer_way::batched, 64 << 10, 512) ==
        doctest::Approx(mi300x.seconds(transfer_way::direct, 64 << 10, 512)));
  CHECK(mi300x.seconds(transfer_way::direct, 4 << 10, 5000) == never);
  const published::table a30 = published::a30_batch_and_pull(5e-6, 24e9);
  CHECK(a30.seconds(transfer_way::batched, 16 << 10, 4096) ==
        doctest::Approx(3.73 * (5e-6 + 4096.0 * 16384 / 24e9)));
  CHECK(a30.seconds(transfer_way::batched, 26 << 10, 256) == never);
}

TEST_CASE("calibration: it keeps to its budget and its range") {
  const formula_machine machine = plain_machine();
  for (const double budget : {1e-9, 1e-3, 0.02, 0.7}) {
    for (const std::int32_t transfers : {1, 10, 4000}) {
      std::int64_t calls = 0;
      double spent = 0;
      double longest = 0;
      calibration_options options{.max_transfers = transfers, .max_seconds = budget};
      const transfer_costs costs = calibrate(
          [&](transfer_way way, const transfer_shape& s) {
            CHECK(s.units == s.pieces);
            CHECK(s.pieces >= options.least_entries);
            CHECK(s.pieces <= options.most_entries);
            CHECK(s.bytes <= options.max_transfer_bytes);
            CHECK(s.bytes >= s.pieces * options.least_entry_bytes);
            CHECK(s.bytes <= s.pieces * options.most_entry_bytes);
            ++calls;
            const double seconds = machine(way, s);
            spent += seconds;
            longest = std::max(longest, seconds);
            return seconds;
          },
          options);
      // Each way warms up and is measured once, whatever the budget.
      const auto ways = static_cast<std::int64_t>(options.ways.size());
      CHECK(calls <= std::max<std::int64_t>(transfers + 3, 2 * ways));
      CHECK(spent <= budget + 2 * static_cast<double>(ways) * longest);
      CHECK(costs.cheapest({16, 16, 16 << 10}).seconds > 0);  // something was learned
    }
  }
}

TEST_CASE("calibration: a way that a machine does not have gets no cost") {
  formula_machine machine;
  machine.costs.set(transfer_way::pull, {.latency = 8e-6, .per_byte = 1 / 30e9});
  const transfer_costs costs = calibrate(machine);
  CHECK(costs.find(transfer_way::pull) != nullptr);
  CHECK(costs.find(transfer_way::staged) == nullptr);
  CHECK(costs.find(transfer_way::batched) == nullptr);
  const transfer_costs none = calibrate([](transfer_way, const transfer_shape&) { return never; });
  CHECK(none == transfer_costs{});
}

TEST_CASE("calibration: a way may be limited to some shapes") {
  const formula_machine machine = plain_machine();
  const transfer_costs costs = calibrate([&](transfer_way way, const transfer_shape& s) {
    return way == transfer_way::batched && s.pieces > 1000 ? never : machine(way, s);
  });
  for (const measured_cost& point : costs.find(transfer_way::batched)->measured) {
    CHECK(point.entries <= 1000);
  }
  CHECK(costs.find(transfer_way::direct)->measured.back().entries == 4096);
}

TEST_CASE("calibration: only what is asked for is measured, and of one size and count") {
  const formula_machine machine = plain_machine();
  const transfer_costs costs = calibrate(machine, {.least_entry_bytes = 5000,
                                                   .most_entry_bytes = 5000,
                                                   .least_entries = 7,
                                                   .most_entries = 7,
                                                   .ways = {transfer_way::direct}});
  CHECK(costs.find(transfer_way::staged) == nullptr);
  CHECK(costs.predict(transfer_way::direct, {7, 7, 35000}) ==
        doctest::Approx(machine(transfer_way::direct, {7, 7, 35000})));
  CHECK(costs.find(transfer_way::direct)->measured.size() == 1);
}

TEST_CASE("calibration: saved costs choose as the measured ones do") {
  const formula_machine machine = plain_machine();
  const transfer_costs costs = calibrate(machine);
  const transfer_costs loaded = transfer_costs::from_text(costs.to_text());
  CHECK(loaded == costs);
  each_shape(
      [&](const transfer_shape& shape) { CHECK(loaded.cheapest(shape) == costs.cheapest(shape)); });
}

TEST_CASE("calibration: a time that is none is refused") {
  const auto returning = [](double seconds) {
    return [seconds](transfer_way, const transfer_shape&) { return seconds; };
  };
  CHECK_THROWS_WITH_AS((void)calibrate(returning(0)),
                       "calibrate: staged took 0 seconds for 16 entries of 16384 bytes, expected "
                       "more than 0, or infinity where it cannot do that",
                       std::invalid_argument);
  CHECK_THROWS_AS((void)calibrate(returning(-1)), std::invalid_argument);
  CHECK_THROWS_AS((void)calibrate(returning(std::nan(""))), std::invalid_argument);
  // A clock that does not move, or hardly.
  CHECK(calibrate(returning(1e-300)).cheapest({16, 16, 16384}).seconds > 0);
  CHECK_THROWS_AS((void)calibrate([](transfer_way, const transfer_shape&) -> double {
                    throw std::runtime_error("the device is lost");
                  }),
                  std::runtime_error);
}

TEST_CASE("calibration: bad options are refused by name") {
  const formula_machine machine = plain_machine();
  const auto refuses = [&](const calibration_options& options, const char* what) {
    CHECK_THROWS_WITH_AS((void)calibrate(machine, options), what, std::invalid_argument);
  };
  refuses({.least_entry_bytes = 0}, "calibrate: least_entry_bytes is 0, expected 1 to 1048576");
  refuses({.least_entry_bytes = 64, .most_entry_bytes = 32},
          "calibrate: least_entry_bytes is 64, expected 1 to 32");
  refuses({.most_entry_bytes = std::int64_t{1} << 40},
          "calibrate: most_entry_bytes is 1099511627776, expected 1 to 1073741824");
  refuses({.least_entries = 5, .most_entries = 4},
          "calibrate: least_entries is 5, expected 1 to 4");
  refuses({.most_entries = 0}, "calibrate: most_entries is 0, expected 1 to 1073741824");
  refuses({.max_transfer_bytes = 1000},
          "calibrate: max_transfer_bytes is 1000, expected 16384 to 9007199254740992");
  refuses({.max_transfers = 0}, "calibrate: max_transfers is 0, expected 1 to 16777216");
  refuses({.max_seconds = 0}, "calibrate: max_seconds is 0, expected more than 0, at most 1e6");
  refuses({.max_seconds = std::nan("")},
          "calibrate: max_seconds is nan, expected more than 0, at most 1e6");
  refuses({.ways = {}}, "calibrate: ways is empty, expected at least one");
  refuses({.ways = {transfer_way::automatic}},
          "calibrate: automatic (0) is no way that has a cost");
  refuses({.ways = {static_cast<transfer_way>(9)}},
          "calibrate: unknown (9) is no way that has a cost");
}

TEST_CASE("calibration: on a machine that is slower than the budget every way has a cost") {
  int asked = 0;
  const auto slow = [&asked](transfer_way, const transfer_shape&) {
    ++asked;
    return 10.0;  // ten seconds each
  };
  const calibration_options options;
  const transfer_costs costs = calibrate(slow, options);
  for (const transfer_way way : options.ways) {
    CAPTURE(static_cast<int>(way));
    REQUIRE(costs.find(way) != nullptr);
    CHECK(costs.predict(way, {.units = 16, .pieces = 16, .bytes = 16 << 10}) ==
          doctest::Approx(10));
  }
  CHECK(asked <= 2 * static_cast<int>(options.ways.size()));  // and no more than that
}
