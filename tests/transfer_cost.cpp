// SPDX-License-Identifier: Apache-2.0
/// @file
/// Costs of the ways of moving: what they predict and choose, what they refuse, and their text.
#include "pulseinfer/transfer_cost.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "pulseinfer/detail/random.hpp"

namespace {

using namespace pulseinfer;

/// One of everything; times are easy to add up.
transfer_costs sample() {
  transfer_costs costs;
  costs.set(transfer_way::staged, {.latency = 10, .per_entry = 1, .per_byte = 0.5});
  costs.set(transfer_way::direct, {.latency = 1, .per_call = 4, .per_byte = 0.25});
  costs.set(transfer_way::batched, {.latency = 2,
                                    .per_entry = 1,
                                    .per_byte = 0.25,
                                    .knee_bytes = 8,
                                    .per_entry_below = 3,
                                    .per_byte_below = 0.5});
  costs.set(transfer_way::pull,
            {.latency = 3, .per_byte = 1, .measured = {{2, 8, 22}, {2, 32, 70}, {8, 32, 35}}});
  return costs;
}

std::string refusal(const way_cost& cost, transfer_way way = transfer_way::staged) {
  transfer_costs costs = sample();
  try {
    costs.set(way, cost);
  } catch (const std::invalid_argument& refused) {
    CHECK(costs == sample());  // nothing has changed
    return refused.what();
  }
  return "accepted";
}

std::string unreadable(std::string_view text) {
  try {
    (void)transfer_costs::from_text(text);
  } catch (const std::invalid_argument& refused) {
    return refused.what();
  }
  return "read";
}

}  // namespace

TEST_CASE("transfer_cost: ways have the names that they have in C++") {
  CHECK(name_of(transfer_way::automatic) == "automatic");
  CHECK(name_of(transfer_way::staged) == "staged");
  CHECK(name_of(transfer_way::direct) == "direct");
  CHECK(name_of(transfer_way::batched) == "batched");
  CHECK(name_of(transfer_way::pull) == "pull");
  CHECK(name_of(transfer_way::per_block) == "per_block");
  CHECK(name_of(static_cast<transfer_way>(77)) == "unknown");
}

TEST_CASE("transfer_cost: a formula adds up latency, calls, entries and bytes") {
  const transfer_costs costs = sample();
  const transfer_shape shape{.units = 3, .pieces = 5, .bytes = 60};
  CHECK(costs.predict(transfer_way::staged, shape) == 10 + 3 * 1 + 60 * 0.5);
  CHECK(costs.predict(transfer_way::direct, shape) == 1 + 5 * 4 + 60 * 0.25);
  CHECK(costs.predict(transfer_way::batched, shape) == 2 + 5 * 1 + 60 * 0.25);
}

TEST_CASE("transfer_cost: entries below the knee cost something else") {
  const transfer_costs costs = sample();
  // 5 pieces of 8 bytes are not below it, 5 pieces of less are.
  CHECK(costs.predict(transfer_way::batched, {1, 5, 40}) == 2 + 5 * 1 + 40 * 0.25);
  CHECK(costs.predict(transfer_way::batched, {1, 5, 39}) == 2 + 5 * 3 + 39 * 0.5);
}

TEST_CASE("transfer_cost: measured points correct the formula, in between and beyond") {
  const transfer_costs costs = sample();
  const auto pull = [&](std::int64_t units, std::int64_t bytes) {
    return costs.predict(transfer_way::pull, {units, 1, bytes});
  };
  // The formula, 3 + bytes, is off by 2, 2 and 1.
  CHECK(pull(2, 8) == doctest::Approx(22));
  CHECK(pull(2, 32) == doctest::Approx(70));
  CHECK(pull(8, 32) == doctest::Approx(35));
  CHECK(pull(2, 16) == doctest::Approx(2 * 19));             // between two sizes
  CHECK(pull(4, 32) == doctest::Approx(std::sqrt(2) * 35));  // half way between two counts
  CHECK(pull(1, 16) == doctest::Approx(2 * 19));             // fewer than any
  CHECK(pull(100, 4000) == doctest::Approx(4003));           // more than any
  CHECK(pull(2, 1'000'000) == doctest::Approx(2 * 1'000'003));
  CHECK(pull(2, 2) == doctest::Approx(2 * 5));
}

TEST_CASE("transfer_cost: without knee and points, more never takes less") {
  transfer_costs costs;
  costs.set(transfer_way::staged, {.latency = 1e-5, .per_entry = 3e-7, .per_byte = 2e-11});
  costs.set(transfer_way::direct, {.latency = 1e-6, .per_call = 2.3e-6, .per_byte = 2e-11});
  detail::random_source random(3);
  for (int i = 0; i < 2000; ++i) {
    const auto units = static_cast<std::int64_t>(1 + random.below(5000));
    const auto bytes = static_cast<std::int64_t>(5000 + random.below(1 << 24));
    const auto more = static_cast<std::int64_t>(random.below(5000));
    for (const transfer_way way : {transfer_way::staged, transfer_way::direct}) {
      const double seconds = costs.predict(way, {units, units, bytes});
      CHECK(costs.predict(way, {units, units, bytes + more}) >= seconds);
      CHECK(costs.predict(way, {units + more, units + more, bytes + 2 * more}) >= seconds);
    }
  }
}

TEST_CASE("transfer_cost: the cheapest way is chosen, with its prediction") {
  const transfer_costs costs = sample();
  for (const transfer_shape shape :
       {transfer_shape{1, 1, 1}, {1, 1, 100}, {4, 1, 4000}, {1, 30, 4000}, {30, 30, 60}}) {
    const way_choice choice = costs.cheapest(shape);
    CHECK(choice.seconds == costs.predict(choice.way, shape));
    for (const transfer_way way :
         {transfer_way::staged, transfer_way::direct, transfer_way::batched, transfer_way::pull}) {
      CHECK(choice.seconds <= costs.predict(way, shape));
    }
  }
  CHECK(costs.cheapest({4, 1, 4000}).way == transfer_way::batched);
  CHECK(costs.cheapest({2, 50, 60}).way == transfer_way::staged);
}

TEST_CASE("transfer_cost: of equal ways the first, and never the baseline") {
  transfer_costs costs;
  const way_cost same{.latency = 1, .per_byte = 1};
  costs.set(transfer_way::per_block, {.latency = 1e-9});
  CHECK_THROWS_WITH_AS(
      (void)costs.cheapest({1, 1, 1}),
      "transfer_costs: no way has a cost but per_block, which is not asked, calibrate or load some",
      std::invalid_argument);
  costs.set(transfer_way::pull, same);
  CHECK(costs.cheapest({1, 1, 1}) == way_choice{transfer_way::pull, 2});
  costs.set(transfer_way::batched, same);
  CHECK(costs.cheapest({1, 1, 1}).way == transfer_way::batched);
  CHECK(costs.predict(transfer_way::per_block, {1, 1, 1}) == 1e-9);
}

TEST_CASE("transfer_cost: a way without a cost is not there") {
  const transfer_costs none;
  CHECK(none.find(transfer_way::staged) == nullptr);
  CHECK(none.find(transfer_way::automatic) == nullptr);
  CHECK(none.find(static_cast<transfer_way>(77)) == nullptr);
  CHECK_THROWS_WITH_AS((void)none.predict(transfer_way::staged, {1, 1, 1}),
                       "transfer_costs: staged has no cost", std::invalid_argument);
  CHECK_THROWS_AS((void)none.predict(transfer_way::automatic, {1, 1, 1}), std::invalid_argument);
}

TEST_CASE("transfer_cost: a shape is at least one unit, one piece, and a byte of each") {
  const transfer_costs costs = sample();
  const auto refuses = [&](const transfer_shape& shape, const char* what) {
    CHECK_THROWS_WITH_AS((void)costs.cheapest(shape), what, std::invalid_argument);
    CHECK_THROWS_WITH_AS((void)costs.predict(transfer_way::staged, shape), what,
                         std::invalid_argument);
  };
  refuses({0, 1, 8}, "transfer_shape: units is 0, expected 1 to 8");
  refuses({1, -1, 8}, "transfer_shape: pieces is -1, expected 1 to 8");
  refuses({9, 1, 8}, "transfer_shape: units is 9, expected 1 to 8");
  refuses({1, 1, 0}, "transfer_shape: bytes is 0, expected 1 to 9007199254740992");
  refuses({1, 1, std::numeric_limits<std::int64_t>::max()},
          "transfer_shape: bytes is 9223372036854775807, expected 1 to 9007199254740992");
}

TEST_CASE("transfer_cost: the largest shapes and costs have finite times") {
  transfer_costs costs;
  const std::int64_t most = std::int64_t{1} << 53;
  costs.set(transfer_way::staged, {.latency = 1e6, .per_entry = 1e6, .per_byte = 1e6});
  costs.set(transfer_way::pull, {.per_byte = 1e-18, .measured = {{1, most, 1e6}}});
  CHECK(std::isfinite(costs.predict(transfer_way::staged, {most, most, most})));
  CHECK(costs.predict(transfer_way::pull, {1, 1, most}) == doctest::Approx(1e6));
  CHECK(costs.predict(transfer_way::pull, {1, 1, 1}) > 0);
  // As near as two points can be where numbers are largest.
  costs.set(transfer_way::pull,
            {.per_byte = 1e-18, .measured = {{most - 1, most, 1e6}, {most, most, 1e-6}}});
  CHECK(std::isfinite(costs.predict(transfer_way::pull, {most, most, most})));
  CHECK(refusal({.latency = 1, .measured = {{1, most + 1, 1}}}) ==
        "transfer_costs: a point of staged has 1 entries of 9007199254740993 bytes, expected at "
        "least one, each of at least a byte, and at most 2^53 bytes");
}

TEST_CASE("transfer_cost: what is no cost is refused by name, and changes nothing") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinite = std::numeric_limits<double>::infinity();
  CHECK(refusal({.latency = nan}) ==
        "transfer_costs: latency of staged is nan, expected 0 or 1e-18 to 1e+06");
  CHECK(refusal({.per_call = -1}) ==
        "transfer_costs: per_call of staged is -1, expected 0 or 1e-18 to 1e+06");
  CHECK(refusal({.per_entry = infinite}) ==
        "transfer_costs: per_entry of staged is inf, expected 0 or 1e-18 to 1e+06");
  CHECK(refusal({.per_byte = 1e-19}) ==
        "transfer_costs: per_byte of staged is 1e-19, expected 0 or 1e-18 to 1e+06");
  CHECK(refusal({.latency = 1, .knee_bytes = nan}) ==
        "transfer_costs: knee_bytes of staged is nan, expected 0 or 1e-18 to 1e+15");
  CHECK(refusal({.latency = 1, .per_byte_below = 1e7}) ==
        "transfer_costs: per_byte_below of staged is 1e+07, expected 0 or 1e-18 to 1e+06");
  const std::string nothing =
      "transfer_costs: staged costs nothing, expected a latency, or a cost per call, entry or "
      "byte, "
      "on both sides of the knee";
  CHECK(refusal({}) == nothing);
  CHECK(refusal({.per_entry = 1, .knee_bytes = 8}) == nothing);
  CHECK(refusal({.knee_bytes = 8, .per_entry_below = 1}) == nothing);
  CHECK(refusal({.latency = 1}, transfer_way::automatic) ==
        "transfer_costs: automatic is no way that has a cost");
  CHECK(refusal({.latency = 1}, static_cast<transfer_way>(77)) ==
        "transfer_costs: unknown is no way that has a cost");
  CHECK(
      refusal({.latency = 1, .measured = {{0, 8, 1}}}) ==
      "transfer_costs: a point of staged has 0 entries of 8 bytes, expected at least one, each of "
      "at least a byte, and at most 2^53 bytes");
  CHECK(refusal({.latency = 1, .measured = {{1, 8, 0}}}) ==
        "transfer_costs: a point of staged took 0 seconds, expected 1e-18 to 1e6");
  CHECK(refusal({.latency = 1, .measured = {{1, 8, nan}}}) ==
        "transfer_costs: a point of staged took nan seconds, expected 1e-18 to 1e6");
  for (const auto& points : {std::vector<measured_cost>{{1, 8, 1}, {1, 8, 1}},
                             std::vector<measured_cost>{{1, 9, 1}, {1, 8, 1}},
                             std::vector<measured_cost>{{2, 8, 1}, {1, 8, 1}}}) {
    CHECK(refusal({.latency = 1, .measured = points}) ==
          "transfer_costs: the point of staged with 1 entries of 8 bytes is not in its place, "
          "expected points by entries, then bytes, none twice");
  }
}

TEST_CASE("transfer_cost: the text is what it says in the header") {
  transfer_costs costs;
  costs.set(transfer_way::pull,
            {.latency = 1e-05, .per_byte = 0.1, .measured = {{16, 65536, 0.5}}});
  CHECK(costs.to_text() ==
        "pulseinfer transfer_costs 1 ways 1\n"
        "way pull latency 1e-05 per_call 0 per_entry 0 per_byte 0.1 knee_bytes 0 per_entry_below 0 "
        "per_byte_below 0 measured 1\n"
        "measured entries 16 bytes 65536 seconds 0.5\n");
  CHECK(transfer_costs::from_text(transfer_costs{}.to_text()) == transfer_costs{});
}

TEST_CASE("transfer_cost: a text reads back to the bit") {
  CHECK(transfer_costs::from_text(sample().to_text()) == sample());
  detail::random_source random(5);
  const auto number = [&] {
    const double mantissa = 1 + static_cast<double>(random.next() >> 11) * 0x1p-53;
    return std::ldexp(mantissa, -static_cast<int>(random.below(50)));
  };
  for (int round = 0; round < 100; ++round) {
    transfer_costs costs;
    for (const transfer_way way : detail::priced_ways) {
      if (random.one_in(3)) continue;
      way_cost cost{number(), number(), number(), number(), number(), number(), number(), {}};
      for (std::int64_t i = 1; i < 20; ++i) {
        cost.measured.push_back({i, i * 1'000'000'007, number()});
      }
      costs.set(way, cost);
    }
    const transfer_costs read = transfer_costs::from_text(costs.to_text());
    CHECK(read == costs);
    CHECK(read.to_text() == costs.to_text());
  }
}

TEST_CASE("transfer_cost: comments, blank lines and carriage returns are passed over") {
  std::string text = "# the machine in the corner\n\n  \n" + sample().to_text() + "\n# end\n";
  for (std::size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at + 2)) {
    text.insert(at, "\r");
  }
  CHECK(transfer_costs::from_text(text) == sample());
}

TEST_CASE("transfer_cost: a bad text is refused with its line and field") {
  const std::string head = "pulseinfer transfer_costs 1 ways 1\n";
  const std::string terms =
      "latency 1 per_call 0 per_entry 0 per_byte 0 knee_bytes 0 per_entry_below 0 per_byte_below "
      "0 ";
  const std::string way = head + "way pull " + terms;
  CHECK(unreadable(way + "measured 0\n") == "read");
  CHECK(unreadable("") == "transfer_costs: line 0: the text is empty");
  CHECK(unreadable("hello") ==
        "transfer_costs: line 1: \"hello\" stands where pulseinfer is expected");
  CHECK(unreadable("\n\npulseinfer transfer_costs 2 ways 0\n") ==
        "transfer_costs: line 3: the text is of version 2, expected 1: calibrate anew");
  CHECK(unreadable("pulseinfer transfer_costs one ways 0\n") ==
        "transfer_costs: line 1: transfer_costs is \"one\", expected a number");
  CHECK(unreadable("pulseinfer transfer_costs 1 ways -1\n") ==
        "transfer_costs: line 1: ways is -1, expected at least 0");
  CHECK(unreadable(head) == "transfer_costs: line 1: the text ends before way 1 of 1");
  CHECK(unreadable(head + "way automatic latency 1\n") ==
        "transfer_costs: line 2: \"automatic\" is no way that has a cost");
  CHECK(unreadable(head + "way pull latency 1,5 per_call 0\n") ==
        "transfer_costs: line 2: latency is \"1,5\", expected a number");
  CHECK(unreadable(head + "way pull latency 1e999 per_call 0\n") ==
        "transfer_costs: line 2: latency is \"1e999\", expected a number");
  CHECK(unreadable(head + "way pull latency 1 per_entry 0\n") ==
        "transfer_costs: line 2: \"per_entry\" stands where per_call is expected");
  CHECK(unreadable(head + "way pull latency") == "transfer_costs: line 2: latency is missing");
  CHECK(unreadable(head + "way") == "transfer_costs: line 2: the way's name is missing");
  CHECK(unreadable(way + "measured 0 0\n") ==
        "transfer_costs: line 2: \"0\" stands behind the last field");
  CHECK(unreadable(way + "measured -1\n") ==
        "transfer_costs: line 2: measured is -1, expected at least 0");
  CHECK(unreadable(way + "measured 2\nmeasured entries 1 bytes 8 seconds 1\n") ==
        "transfer_costs: line 3: the text ends before point 2 of 2");
  CHECK(unreadable(way + "measured 1\nmeasured entries 1.5 bytes 8 seconds 1\n") ==
        "transfer_costs: line 3: entries is \"1.5\", expected a number");
  CHECK(unreadable(way + "measured 1\nmeasured entries 1 bytes 8 seconds nan\n") ==
        "transfer_costs: line 3: the way that ends here: transfer_costs: a point of pull took nan "
        "seconds, expected 1e-18 to 1e6");
  CHECK(unreadable(way + "measured 0\nway staged " + terms + "measured 0\n") ==
        "transfer_costs: line 3: there is text behind the last of 1 ways");
  CHECK(unreadable("pulseinfer transfer_costs 1 ways 2\nway pull " + terms +
                   "measured 0\nway pull " + terms + "measured 0\n") ==
        "transfer_costs: line 3: way pull stands here again");
}

TEST_CASE("transfer costs: a text that was cut off anywhere is refused") {
  transfer_costs costs;
  costs.set(transfer_way::staged, {.latency = 2e-6, .per_byte = 1.5e-9});
  costs.set(transfer_way::pull,
            {.latency = 1e-6,
             .per_byte = 1e-9,
             .measured = {{.entries = 16, .bytes = 65536, .seconds = 1.25e-05}}});
  const std::string text = costs.to_text();
  CHECK(transfer_costs::from_text(text) == costs);
  for (std::size_t size = 0; size < text.size(); ++size) {
    CAPTURE(size);
    CHECK_THROWS_AS((void)transfer_costs::from_text(text.substr(0, size)), std::invalid_argument);
  }
}
