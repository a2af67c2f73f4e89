// SPDX-License-Identifier: Apache-2.0
/// @file
/// Plans found by trial: on machines that are a formula, and on engines. Include the backend's support
/// header first.
#include "pulseinfer/chunk_tuning.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/chunk_plan.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/offload_rig.hpp"

namespace {

using test::backend;
using test::blocks;
using test::units_of;
using rig = test::offload_rig<backend>;
using pulseinfer::chunk_plan;
using pulseinfer::chunk_plans;
using pulseinfer::transfer_way;
using pulseinfer::tune_chunks;
using pulseinfer::tuning_options;

/// Seconds of a machine on which two chunks are best, in 12 parts, and a head that grows with the size.
struct formula_machine {
  static constexpr double best = 1e-6;
  double operator()(const chunk_plan& p, std::int64_t units) const {
    const double head = 0.1 + 0.02 * std::log2(static_cast<double>(units));
    const auto chunks =
        std::count_if(p.chunks.begin(), p.chunks.end(), [](double share) { return share > 0; });
    const auto square = [](double x) { return x * x; };
    return best * (1 + 4 * square(p.head - head) + 2 * square(p.chunks[0] - 0.35) +
                   2 * square(p.chunks[1] - 0.45) + 0.1 * square(static_cast<double>(chunks) - 2) +
                   0.01 * std::abs(std::log2(p.parts / 12.0)));
  }
};

/// The same, and it notes what it is asked for.
struct noting_machine {
  struct question {
    chunk_plan plan;
    std::int64_t units;
  };
  std::vector<question>* asked;
  double operator()(const chunk_plan& p, std::int64_t units) const {
    asked->push_back({p, units});
    return formula_machine{}(p, units);
  }
};
static_assert(pulseinfer::recall_measure<formula_machine>);
static_assert(pulseinfer::recall_measure<noting_machine&>);
static_assert(!pulseinfer::recall_measure<int>);
static_assert(!pulseinfer::recall_measure<double (*)(std::int64_t)>);

/// Two plans, few trials.
tuning_options brief() {
  return {.least_units = 2, .most_units = 12, .step = 4, .trials = 2};
}
chunk_plans any_plans() {
  chunk_plans plans;
  plans.add({.max_units = 7, .head = 0.5, .chunks = {0.125}, .parts = 3});
  return plans;
}

}  // namespace

TEST_CASE("chunk_tuning: what a formula says is best is nearly found, for every size") {
  const chunk_plans plans =
      tune_chunks(formula_machine{}, {.least_units = 2, .most_units = 200, .step = 1.3});
  for (std::int64_t units = 2; units <= 200; ++units) {
    CAPTURE(units);
    const chunk_plan* const found = plans.find(static_cast<std::size_t>(units));
    REQUIRE(found != nullptr);
    CHECK(formula_machine{}(*found, units) < 1.02 * formula_machine::best);
  }
  CHECK(plans.find(201) == nullptr);
}

TEST_CASE("chunk_tuning: the same seed, the same plans") {
  const auto found = [](std::uint64_t seed) {
    return tune_chunks(formula_machine{}, {.most_units = 30, .step = 1.5, .seed = seed});
  };
  CHECK(found(1) == found(1));
  CHECK(found(2) == found(2));
  CHECK(found(1) != found(2));
  // Also on another compiler. All plans are alike here: it goes on from each that it tries.
  const auto alike = [](const chunk_plan&, std::int64_t) { return 1.0; };
  CHECK(tune_chunks(alike, {.least_units = 6, .most_units = 7, .step = 1.5, .trials = 60})
            .to_text() ==
        "pulseinfer chunk_plans 1 plans 1\n"
        "max_units 7 head 0.95 parts 8 chunk 0.21725270751254644 chunk 0 chunk 0 chunk 0 chunk 0 "
        "chunk 0\n");
}

TEST_CASE("chunk_tuning: plans cover all sizes, those that share one lie within the step") {
  const auto covers = [](std::int64_t least, std::int64_t most, double step) {
    CAPTURE(least);
    CAPTURE(most);
    CAPTURE(step);
    const chunk_plans plans = tune_chunks(
        formula_machine{}, {.least_units = least, .most_units = most, .step = step, .trials = 1});
    REQUIRE(!plans.all().empty());
    std::int64_t from = least;
    for (const chunk_plan& p : plans.all()) {
      CHECK(p.max_units >= from);
      CHECK((p.max_units == from ||
             static_cast<double>(p.max_units) <= step * static_cast<double>(from)));
      // No smaller than it need be.
      CHECK((p.max_units == most ||
             static_cast<double>(p.max_units + 1) > step * static_cast<double>(from)));
      from = p.max_units + 1;
    }
    CHECK(from == most + 1);
  };
  covers(1, 1, 1.05);
  covers(2, 2, 4);
  covers(1, 50, 1.01);
  covers(2, 300, 1.05);
  covers(3, 100, 1.5);
  covers(1, 64, 4);
  covers(100, 101, 2);
}

TEST_CASE(
    "chunk_tuning: it asks for plans that are some, at both ends of their sizes, and not more "
    "often than said") {
  for (const std::int32_t trials : {10, 30, 100}) {
    CAPTURE(trials);
    std::vector<noting_machine::question> asked;
    const chunk_plans plans =
        tune_chunks(noting_machine{&asked},
                    {.least_units = 20, .most_units = 100, .step = 1.2, .trials = trials});
    const std::size_t most = plans.all().size() * static_cast<std::size_t>(20 * trials + 60);
    CHECK(asked.size() <= most);
    CHECK(asked.size() >= most / 2);
    std::vector<std::int64_t> sizes;
    bool all_valid = true;
    for (const auto& question : asked) {
      try {
        pulseinfer::detail::check_plan(question.plan);
      } catch (const std::invalid_argument&) {
        all_valid = false;
      }
      all_valid = all_valid && question.units <= question.plan.max_units;
      sizes.push_back(question.units);
    }
    CHECK(all_valid);
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    std::vector<std::int64_t> ends;
    std::int64_t from = 20;
    for (const chunk_plan& p : plans.all()) {
      ends.push_back(from);
      if (p.max_units > from) ends.push_back(p.max_units);
      from = p.max_units + 1;
    }
    CHECK(sizes == ends);
  }
}

TEST_CASE("chunk_tuning: of repeated recalls the shortest counts") {
  tuning_options options{.most_units = 20, .step = 1.5, .trials = 10};
  std::vector<noting_machine::question> once, thrice;
  const chunk_plans plans = tune_chunks(noting_machine{&once}, options);
  options.repeats = 3;
  int calls = 0;
  const auto disturbed = [&](const chunk_plan& p, std::int64_t units) {
    const int nth = calls++;
    const bool is_quiet = nth % 3 == nth / 3 % 3;  // one of each three, now this, now that
    return noting_machine{&thrice}(p, units) * (is_quiet ? 1 : 2 + nth % 5);
  };
  CHECK(tune_chunks(disturbed, options) == plans);
  CHECK(thrice.size() == 3 * once.size());
}

TEST_CASE("chunk_tuning: bad options are refused by name, before anything is asked") {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const auto refuses = [](const tuning_options& options, const char* why) {
    std::vector<noting_machine::question> asked;
    CHECK_THROWS_WITH_AS((void)tune_chunks(noting_machine{&asked}, options), why,
                         std::invalid_argument);
    CHECK(asked.empty());
  };
  refuses({.most_units = 0}, "tune_chunks: most_units is 0, expected 1 to 16777216");
  refuses({.most_units = (1 << 24) + 1},
          "tune_chunks: most_units is 16777217, expected 1 to 16777216");
  refuses({.least_units = 0}, "tune_chunks: least_units is 0, expected 1 to 2048");
  refuses({.least_units = 5, .most_units = 4}, "tune_chunks: least_units is 5, expected 1 to 4");
  refuses({.step = 1}, "tune_chunks: step is 1, expected 1.01 to 4");
  refuses({.step = 4.5}, "tune_chunks: step is 4.5, expected 1.01 to 4");
  refuses({.step = nan}, "tune_chunks: step is nan, expected 1.01 to 4");
  refuses({.trials = 0}, "tune_chunks: trials is 0, expected 1 to 10000");
  refuses({.trials = 10'001}, "tune_chunks: trials is 10001, expected 1 to 10000");
  refuses({.repeats = 0}, "tune_chunks: repeats is 0, expected 1 to 100");
  refuses({.repeats = 101}, "tune_chunks: repeats is 101, expected 1 to 100");
}

TEST_CASE(
    "chunk_tuning: a time that is none is refused, and what a measure throws passes through") {
  const auto refuses = [](double seconds, const char* why) {
    const auto measure = [&](const chunk_plan&, std::int64_t) { return seconds; };
    CHECK_THROWS_WITH_AS((void)tune_chunks(measure), why, std::invalid_argument);
    int calls = 0;
    const auto later = [&](const chunk_plan&, std::int64_t) {
      return ++calls == 40 ? seconds : 1e-6;
    };
    CHECK_THROWS_AS((void)tune_chunks(later), std::invalid_argument);
    CHECK(calls == 40);
  };
  refuses(0, "tune_chunks: a recall of 2 units took 0 seconds, expected more than 0");
  refuses(-1.5, "tune_chunks: a recall of 2 units took -1.5 seconds, expected more than 0");
  refuses(std::numeric_limits<double>::quiet_NaN(),
          "tune_chunks: a recall of 2 units took nan seconds, expected more than 0");
  refuses(std::numeric_limits<double>::infinity(),
          "tune_chunks: a recall of 2 units took inf seconds, expected more than 0");
  const auto lost = [](const chunk_plan&, std::int64_t) -> double {
    throw std::runtime_error("the device is lost");
  };
  CHECK_THROWS_WITH_AS((void)tune_chunks(lost), "the device is lost", std::runtime_error);
}

TEST_CASE("chunk_tuning: an engine has the plans that were found for it, and its way") {
  test::each_backend([](backend machine) {
    rig r(machine, {.chunk_units = 8, .staging_chunks = 4, .plans = any_plans()});
    const auto id = r.stored(1, blocks(12));
    const rig::targets units = units_of(12);
    r.mover.set_way(transfer_way::batched);
    tuning_options options = brief();
    options.most_units = 2048;  // there are not so many
    const chunk_plans found = tune_chunks(r.mover, 1, {&id, 1}, units, r.stream, options);
    CHECK(found.all().back().max_units == 12);
    CHECK(r.mover.options().plans == found);
    CHECK(r.mover.options().way == transfer_way::batched);
    r.machine.sync(r.stream);
    r.pages.download(r.stream);  // what was recalled for it was what is stored
    for (std::int32_t b = 0; b < 12; ++b) {
      const std::int32_t page = index_of(units[static_cast<std::size_t>(b)].page);
      CHECK((r.pages.get(1, page) == test::stamp(rig::geometry, 1, 1, b)));
    }
    r.mover.set_way(transfer_way::staged);
    auto t = r.recall(0, id, units).value();
    t.sync();
    CHECK(t.report().moved == 12);
    const auto head =
        static_cast<std::int64_t>(std::min<std::size_t>(found.find(12)->head_of(12), 8));
    CHECK((t.report().head_units == head ||
           (!test::device_memory_is_host_readable && t.report().head_units == 0)));
    CHECK(rig::at_rest(r.store.counts()));
  });
}

TEST_CASE("chunk_tuning: not where no recall goes by a plan") {
  test::each_backend([](backend machine) {
    rig r(machine, {.chunk_units = 8, .staging_chunks = 4, .chunks_in_flight = 1});
    const auto id = r.stored(1, blocks(12));
    CHECK_THROWS_WITH_AS(
        (void)tune_chunks(r.mover, 1, {&id, 1}, units_of(12), r.stream, brief()),
        "tune_chunks: chunks_in_flight is 1, expected at least 2: no recall goes by a plan",
        std::invalid_argument);
    CHECK(r.mover.options().plans == chunk_plans{});
  });
}

TEST_CASE("chunk_tuning: where it fails an engine has its own plans and way again") {
  test::each_backend([](backend machine) {
    rig r(machine, {.chunk_units = 8,
                    .staging_chunks = 4,
                    .transfers_in_flight = 1,
                    .way = transfer_way::direct,
                    .plans = any_plans()});
    const auto id = r.stored(1, blocks(12));
    const auto is_as_before = [&] {
      CHECK(r.mover.options().plans == any_plans());
      CHECK(r.mover.options().way == transfer_way::direct);
      auto t = r.recall(0, id, units_of(6)).value();
      t.sync();
      CHECK(t.report().moved == 6);
      CHECK(t.report().way == transfer_way::direct);
      CHECK(rig::at_rest(r.store.counts()));
    };
    const auto tune = [&](const rig::targets& units, const tuning_options& options = brief()) {
      (void)tune_chunks(r.mover, 1, {&id, 1}, units, r.stream, options);
    };
    CHECK_THROWS_WITH_AS(tune({}), "tune_chunks: units is empty, expected at least one",
                         std::invalid_argument);
    is_as_before();
    CHECK_THROWS_WITH_AS(tune(units_of(1)), "tune_chunks: least_units is 2, expected 1 to 1",
                         std::invalid_argument);
    is_as_before();
    CHECK_THROWS_AS(tune(units_of(12), {.trials = 0}), std::invalid_argument);
    is_as_before();
    rig::targets units = units_of(12);
    units[11].block = pulseinfer::logical_block{40};
    CHECK_THROWS_WITH_AS(tune(units), "tune_chunks: a unit of the recall did not come",
                         std::runtime_error);
    is_as_before();
    units = units_of(12);
    units[1].page = pulseinfer::device_page{4'000};
    CHECK_THROWS_AS(tune(units), std::out_of_range);
    is_as_before();
    {
      auto held = r.recall(0, id, units_of(6)).value();
      held.sync();
      CHECK_THROWS_WITH_AS(tune(units_of(12)), "tune_chunks: too many recalls are under way",
                           std::runtime_error);
    }
    is_as_before();
  });
}
