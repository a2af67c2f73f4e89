// SPDX-License-Identifier: Apache-2.0
/// @file
/// budget.hpp on the backend under test. Include the backend's support header first.
#include "pulseinfer/budget.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/device_array.hpp"
#include "support/lanes.hpp"

namespace {

using backend = test::backend;
using pulseinfer::mass_view;
using pulseinfer::selection_budget;
using pulseinfer::stream_priority;
using pulseinfer::detail::random_source;
using ints = std::vector<std::int32_t>;
using floats = std::vector<float>;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class Case>
void each(Case run) {
  test::each_backend([&](backend machine) { run(machine); });
}

/// Lists as a top-k leaves them, and what is estimated of them.
struct lists {
  std::int32_t cap = 0;
  std::int64_t stride = 0;
  ints ids;       ///< [lists, cap]
  ints counts;    ///< [lists]
  floats masses;  ///< [lists, stride]
  floats always;  ///< [lists], or none
  floats totals;  ///< [lists], or none
};

/// A mass in whole steps, by the rule in words.
std::int64_t steps_of(float mass, int most) {
  if (std::isnan(mass) || mass <= 0) return 0;
  return static_cast<std::int64_t>(
      std::floor(std::ldexp(std::min<double>(mass, std::ldexp(1.0, most)), 40)));
}

/// The rule in words: the highest mass first, then the lower id, until it is enough.
ints brute_force_trim(const lists& of, std::size_t list, double share, std::int32_t floor) {
  const auto first = of.ids.begin() + static_cast<std::ptrdiff_t>(list) * of.cap;
  ints order(first, first + of.counts[list]);
  const auto mass = [&](std::int32_t id) {
    const float m =
        of.masses[list * static_cast<std::size_t>(of.stride) + static_cast<std::size_t>(id)];
    return m > 0 ? m : 0.0f;
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return mass(a) > mass(b); });
  const std::int64_t total =
      of.totals.empty() ? std::int64_t{1} << 40 : steps_of(of.totals[list], 22);
  // Shares of the tests have few digits: exact in long double.
  const auto wanted = static_cast<std::int64_t>(
      std::ceil(static_cast<long double>(total) * static_cast<long double>(share)));
  std::int64_t sum = of.always.empty() ? 0 : steps_of(of.always[list], 22);
  std::size_t kept = 0;
  while (kept < order.size() &&
         (sum < wanted || kept < static_cast<std::size_t>(std::max(floor, 0)))) {
    sum += steps_of(mass(order[kept++]), 8);
  }
  order.resize(kept);
  std::sort(order.begin(), order.end());
  return order;
}

/// The other rule in words: every block that has so much alone; of the others the best, up to the
/// floor. Where none has anything, all.
ints brute_force_worth(const lists& of, std::size_t list, double share, std::int32_t floor) {
  const std::int64_t total =
      of.totals.empty() ? std::int64_t{1} << 40 : steps_of(of.totals[list], 22);
  const auto wanted = std::max<std::int64_t>(
      1, static_cast<std::int64_t>(
             std::ceil(static_cast<long double>(total) * static_cast<long double>(share))));
  const auto first = of.ids.begin() + static_cast<std::ptrdiff_t>(list) * of.cap;
  ints kept, others;
  bool is_known = false;
  for (auto id = first; id != first + of.counts[list]; ++id) {
    const float mass =
        of.masses[list * static_cast<std::size_t>(of.stride) + static_cast<std::size_t>(*id)];
    (steps_of(mass, 8) >= wanted ? kept : others).push_back(*id);
    is_known = is_known || mass > 0;
  }
  if (!is_known) return others;
  std::stable_sort(others.begin(), others.end(), [&](std::int32_t a, std::int32_t b) {
    const auto mass = [&](std::int32_t id) {
      const float m =
          of.masses[list * static_cast<std::size_t>(of.stride) + static_cast<std::size_t>(id)];
      return m > 0 ? m : 0.0f;
    };
    return mass(a) > mass(b);
  });
  for (const std::int32_t id : others) {
    if (kept.size() < static_cast<std::size_t>(std::max(floor, 0))) kept.push_back(id);
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

/// What brute force leaves of all lists: ids, then counts.
std::pair<ints, ints> brute_force_trims(const lists& of, double share, std::int32_t floor,
                                        bool by_worth = false) {
  ints ids(of.ids.size(), -1), counts;
  for (std::size_t list = 0; list < of.counts.size(); ++list) {
    const ints kept = by_worth ? brute_force_worth(of, list, share, floor)
                               : brute_force_trim(of, list, share, floor);
    std::copy(kept.begin(), kept.end(), ids.begin() + static_cast<std::ptrdiff_t>(list) * of.cap);
    counts.push_back(static_cast<std::int32_t>(kept.size()));
  }
  return {ids, counts};
}

/// `count` lists of up to `cap` of `stride` blocks, with masses from draw(id).
template <class Draw>
lists drawn_lists(random_source& random, std::size_t count, std::int32_t cap, std::int64_t stride,
                  Draw draw) {
  lists all{cap, stride, {}, {}, {}, {}, {}};
  for (std::size_t list = 0; list < count; ++list) {
    for (std::int64_t i = 0; i < stride; ++i) all.masses.push_back(draw(i));
    ints ids(static_cast<std::size_t>(stride));
    std::iota(ids.begin(), ids.end(), 0);
    for (std::size_t i = ids.size(); i > 1; --i) {
      std::swap(ids[i - 1], ids[static_cast<std::size_t>(random.below(i))]);
    }
    const std::uint64_t most = static_cast<std::uint64_t>(std::min<std::int64_t>(cap, stride));
    ids.resize(static_cast<std::size_t>(list == 0 ? most : random.below(most + 1)));
    std::sort(ids.begin(), ids.end());
    all.counts.push_back(static_cast<std::int32_t>(ids.size()));
    ids.resize(static_cast<std::size_t>(cap), -1);
    all.ids.insert(all.ids.end(), ids.begin(), ids.end());
  }
  return all;
}

/// Lists with masses of every kind: sharp, flat, equal, none, and those that are no masses.
std::vector<lists> hard_lists() {
  random_source random(6);
  const auto uniform = [&] { return static_cast<float>(random.below(1 << 20)) / (1 << 20); };
  std::vector<lists> all;
  const auto add = [&](auto draw) {
    for (const std::int32_t cap : {1, 7, 130}) {
      all.push_back(drawn_lists(random, 5, cap, 200, draw));
    }
  };
  add([&](std::int64_t) { return uniform() / 64; });
  add([&](std::int64_t) { return std::exp(-20 * uniform()); });
  add([](std::int64_t) { return 1.0f / 64; });
  add([&](std::int64_t i) { return i % 3 == 0 ? 0.0f : 0.25f; });
  add([](std::int64_t) { return 0.0f; });
  add([](std::int64_t i) { return std::ldexp(1.0f, -static_cast<int>(i) / 2 - 1); });
  add([&](std::int64_t i) {
    const float odd[] = {not_a_number, -not_a_number, -1.0f,  -inf, inf,
                         -0.0f,        1e-42f,        300.0f, 1e30f};
    return i % 2 == 0 ? uniform() / 16 : odd[(i / 2) % 9];
  });
  // The last ones again, with totals and what is always in.
  for (std::size_t i = 0, size = all.size(); i < size; ++i) {
    lists with = all[i];
    with.totals = {1.0f, 0.5f, 40.0f, inf, not_a_number};
    with.always = {0.25f, 0.0f, 39.0f, -3.0f, 1.0f};
    all.push_back(std::move(with));
  }
  return all;
}

}  // namespace

TEST_CASE("budget: masses are counted in whole steps, rounded down") {
  const auto steps = [](float mass, int most) {
    return pulseinfer::detail::fixed_mass(pulseinfer::detail::mass_level(mass), most);
  };
  CHECK(steps(1.0f, 8) == std::int64_t{1} << 40);
  CHECK(steps(inf, 8) == std::int64_t{1} << 48);
  CHECK(steps(inf, 22) == std::int64_t{1} << 62);
  CHECK(steps(std::ldexp(1.0f, -40), 8) == 1);
  CHECK(steps(std::ldexp(1.99f, -41), 8) == 0);
  for (const float none : {0.0f, -0.0f, -1.0f, -inf, not_a_number, -not_a_number, 1e-44f}) {
    CHECK(steps(none, 8) == 0);
  }
  random_source draw(2);
  bool all = true;
  for (int i = 0; i < 20'000; ++i) {
    const float mass = pulseinfer::detail::float_of(static_cast<std::uint32_t>(draw.next()));
    all = all && steps(mass, 8) == steps_of(mass, 8) && steps(mass, 22) == steps_of(mass, 22);
  }
  CHECK(all);
}

TEST_CASE("budget: shares are rounded up, at any size") {
  using pulseinfer::detail::fixed_share;
  using pulseinfer::detail::share_of;
  CHECK(fixed_share(1.0) == std::uint64_t{1} << 32);
  CHECK(fixed_share(1e-12) == 1);
  constexpr std::int64_t most = std::int64_t{1} << 62;
  CHECK(share_of(most, fixed_share(1.0)) == most);
  CHECK(share_of(most - 1, fixed_share(1.0)) == most - 1);
  CHECK(share_of(most - 1, fixed_share(0.5)) == most / 2);
  CHECK(share_of(0xffffffff, fixed_share(1.0)) == 0xffffffff);
  CHECK(share_of(17, fixed_share(1.0 / 16)) == 2);
  CHECK(share_of(16, fixed_share(1.0 / 16)) == 1);
  CHECK(share_of(1, 1) == 1);
  CHECK(share_of(0, fixed_share(1.0)) == 0);
}

TEST_CASE("budget: a decimal share of a number that it divides is no block more") {
  // Of 0.1 and the like there are no binary digits to the end.
  int wrong = 0;
  for (std::int64_t percent = 1; percent <= 100; ++percent) {
    const std::uint64_t share =
        pulseinfer::detail::fixed_share(static_cast<double>(percent) / 100.0);
    for (std::int64_t blocks = 0; blocks <= 8'192; blocks += 1 + blocks / 40) {
      wrong += pulseinfer::detail::share_of(blocks, share) != (blocks * percent + 99) / 100;
    }
  }
  CHECK(wrong == 0);
}

TEST_CASE("budget: one that cannot be kept is refused, with its limits") {
  const auto refused = [](const selection_budget& budget, const char* says) {
    try {
      pulseinfer::checked_budget("test", budget, 100'000);
      FAIL_CHECK("no error");
    } catch (const std::invalid_argument& error) {
      CAPTURE(std::string(error.what()));
      CHECK(std::string(error.what()).find(says) != std::string::npos);
    }
  };
  refused(selection_budget::fixed(0), "cap is 0, expected 1 to 100000");
  refused(selection_budget::fixed(100'001), "cap is 100001");
  refused(selection_budget::of_mass(0.9, 0, 16'385), "cap is 16385, expected 1 to 16384");
  refused(selection_budget::of_context(0.5, 9, 8), "floor is 9, expected 0 to its cap, which is 8");
  refused(selection_budget::of_context(0.5, -1, 8), "floor is -1");
  refused(selection_budget::of_context(0.0, 1, 8), "share is 0");
  refused(selection_budget::of_mass(1.01, 1, 8), "share is 1.01");
  refused(selection_budget::of_worth(0.0, 1, 8),
          "share is 0.000000, expected above 0, and at most 1");
  refused(selection_budget::of_worth(-0.1, 1, 8), "share is -0.1");
  refused(selection_budget::of_worth(static_cast<double>(not_a_number), 1, 8), "share is");
  refused(selection_budget::of_worth(0.5, 9, 8), "floor is 9");
  refused(selection_budget::of_worth(0.5, 0, 0), "cap is 0");
  refused({.rule = static_cast<pulseinfer::budget_rule>(4), .cap = 8}, "rule is 4");
  refused(selection_budget::of_mass(static_cast<double>(not_a_number), 1, 8), "share is");
  for (const selection_budget& good :
       {selection_budget::fixed(100'000), selection_budget::of_mass(1.0, 0, 16'384),
        selection_budget::of_worth(1e-9, 0, 100'000), selection_budget::of_context(1e-9, 8, 8)}) {
    CHECK(&pulseinfer::checked_budget("test", good, 100'000) == &good);
  }
}

TEST_CASE("budget: a fraction of each row's full blocks, between floor and cap") {
  each([](backend machine) {
    auto stream = machine.make_stream(stream_priority::normal);
    const ints tokens = {0, 15, 16, 160, 161, 175, 2'000, 100'000, -7};
    test::device_array<std::int32_t, backend> device_tokens(machine, tokens, stream);
    test::device_array<std::int32_t, backend> limits(machine, ints(2 * tokens.size(), -77), stream);
    const auto budget = selection_budget::of_context(0.25, 1, 40);
    const std::int32_t* used = pulseinfer::enqueue_limits(machine, budget, device_tokens.data(),
                                                          static_cast<std::int64_t>(tokens.size()),
                                                          2, 16, 200, limits.data(), stream);
    CHECK(used == limits.data());
    ints expected;
    for (const std::int32_t limit : {1, 1, 1, 3, 3, 3, 32, 40, 1}) {
      expected.push_back(limit);
      expected.push_back(limit);
    }
    CHECK((limits.download(stream) == expected));

    // Without a floor a row of no blocks has none, and max_blocks bounds what is counted.
    (void)pulseinfer::enqueue_limits(machine, selection_budget::of_context(0.5, 0, 20),
                                     device_tokens.data(), 9, 1, 16, 20, limits.data(), stream);
    ints all = limits.download(stream);
    all.resize(9);
    CHECK((all == ints{0, 0, 1, 5, 5, 5, 10, 10, 0}));

    // Other budgets set no limits.
    for (const auto& other : {selection_budget::fixed(8), selection_budget::of_mass(0.9, 0, 8)}) {
      CHECK(pulseinfer::enqueue_limits(machine, other, nullptr, 9, 1, 16, 20, nullptr, stream) ==
            nullptr);
    }
    CHECK_THROWS_AS(
        pulseinfer::enqueue_limits(machine, budget, nullptr, 9, 1, 16, 200, limits.data(), stream),
        std::invalid_argument);
    CHECK_THROWS_AS(pulseinfer::enqueue_limits(machine, budget, device_tokens.data(), 9, 1, 0, 200,
                                               limits.data(), stream),
                    std::invalid_argument);
  });
}

TEST_CASE("budget: the fewest blocks that reach a mass, and those worth some, are a sort's") {
  const std::vector<lists> cases = hard_lists();
  each([&](backend machine) {
    auto stream = machine.make_stream(stream_priority::normal);
    int at = 0;
    for (const lists& of : cases) {
      CAPTURE(of.cap);
      CAPTURE(at);
      // Each case with one share and floor: all of them meet in turn.
      const double share = std::vector<double>{0.5, 1.0, 0.9375, 1.0 / 1024}[at % 4];
      const double worth = std::vector<double>{1.0 / 64, 0.25, 1.0 / 1024, 1.0}[at % 4];
      const std::int32_t floor =
          std::min(of.cap, ints{0, 3, 100}[static_cast<std::size_t>(at % 3)]);
      ++at;
      test::device_array<float, backend> masses(machine, of.masses, stream);
      test::device_array<float, backend> always(machine, of.always, stream);
      test::device_array<float, backend> totals(machine, of.totals, stream);
      test::device_array<std::int32_t, backend> ids(machine, of.ids, stream);
      test::device_array<std::int32_t, backend> counts(machine, of.counts, stream);
      const mass_view view{masses.data(), of.stride, always.data(), totals.data()};
      pulseinfer::enqueue_trim(machine, selection_budget::of_mass(share, floor, of.cap), view, 5,
                               ids.data(), counts.data(), stream);
      const auto [best, best_counts] = brute_force_trims(of, share, floor);
      CHECK((counts.download(stream) == best_counts));
      CHECK((ids.download(stream) == best));

      ids.upload(of.ids, stream);
      counts.upload(of.counts, stream);
      pulseinfer::enqueue_trim(machine, selection_budget::of_worth(worth, floor, of.cap), view, 5,
                               ids.data(), counts.data(), stream);
      const auto [worth_it, worth_counts] = brute_force_trims(of, worth, floor, true);
      CHECK((counts.download(stream) == worth_counts));
      CHECK((ids.download(stream) == worth_it));
    }
  });
}

// (A body that nvcc compiles asks for groups of the device; there a CTA is one.)
#if !defined(__CUDACC__)
TEST_CASE("budget: what is kept does not depend on the size of the group") {
  for (const lists& of : hard_lists()) {
    const mass_view view{of.masses.data(), of.stride,
                         of.always.empty() ? nullptr : of.always.data(),
                         of.totals.empty() ? nullptr : of.totals.data()};
    for (const bool by_worth : {false, true}) {
      const double share = by_worth ? 1.0 / 128 : 0.75;
      const auto [best, best_counts] = brute_force_trims(of, share, 2, by_worth);
      for (const int lanes : {1, 3, 16}) {
        CAPTURE(lanes);
        CAPTURE(by_worth);
        ints ids = of.ids, counts = of.counts;
        test::run_rows(5, lanes,
                       pulseinfer::trim_to_mass{view, pulseinfer::detail::fixed_share(share), 2,
                                                of.cap, ids.data(), counts.data(), ids.data(),
                                                counts.data(), by_worth});
        CHECK((ids == best));
        CHECK((counts == best_counts));
      }
    }
  }
}

#endif

TEST_CASE("budget: equal masses go by their id, and counts that make no sense are bounded") {
  const floats masses = {0.2f, 0.1f, 0.2f, 0.2f, 0.1f, 0.2f};
  const ints ids = {0, 1, 2, 3, 4, 5};
  const mass_view view{masses.data(), 6, nullptr, nullptr};
  const auto trimmed = [&](double share, std::int32_t floor, std::int32_t count) {
    ints kept(6, -77), kept_counts(1, -77);
    const ints counts = {count};
    const pulseinfer::trim_to_mass trim{view,        pulseinfer::detail::fixed_share(share),
                                        floor,       6,
                                        ids.data(),  counts.data(),
                                        kept.data(), kept_counts.data()};
    trim(0, pulseinfer::detail::single_lane{});
    CHECK(std::count(kept.begin(), kept.end(), -1) == 6 - kept_counts[0]);
    kept.resize(static_cast<std::size_t>(kept_counts[0]));
    return kept;
  };
  CHECK((trimmed(0.3, 0, 6) == ints{0, 2}));
  CHECK((trimmed(0.5, 0, 6) == ints{0, 2, 3}));
  CHECK((trimmed(0.85, 0, 6) == ints{0, 1, 2, 3, 5}));
  CHECK((trimmed(0.3, 5, 6) == ints{0, 1, 2, 3, 5}));
  CHECK((trimmed(1.0, 0, 6).size() == 6));
  CHECK((trimmed(0.3, 0, 1'000) == ints{0, 2}));
  CHECK((trimmed(0.3, 6, 2) == ints{0, 1}));
  CHECK(trimmed(0.3, 6, -4).empty());
}

TEST_CASE("budget: a block is kept while it has what one must, however much that is together") {
  // 2^-8 is a quarter of 2^-6, exactly: what has just so much is kept, what has a step less is not.
  const float exactly = 0x1p-8f;
  const floats masses = {0.5f, exactly, exactly - 0x1p-31f, 0x1p-6f, 0.0f, not_a_number, inf};
  const ints ids = {0, 1, 2, 3, 4, 5, 6};
  const auto kept_of = [&](double share, std::int32_t floor, const float* total) {
    ints kept(7, -77), kept_counts(1, -77);
    const ints counts = {7};
    const float always = 1.0f;  // changes nothing
    const pulseinfer::trim_to_mass trim{{masses.data(), 7, &always, total},
                                        pulseinfer::detail::fixed_share(share),
                                        floor,
                                        7,
                                        ids.data(),
                                        counts.data(),
                                        kept.data(),
                                        kept_counts.data(),
                                        true};
    trim(0, pulseinfer::detail::single_lane{});
    kept.resize(static_cast<std::size_t>(kept_counts[0]));
    return kept;
  };
  const float quarter = 0x1p-6f;
  const float none = 0.0f;
  CHECK((kept_of(0x1p-8, 0, nullptr) == ints{0, 1, 3, 6}));
  CHECK((kept_of(0.25, 0, &quarter) == ints{0, 1, 3, 6}));
  CHECK((kept_of(0x1p-7, 0, nullptr) == ints{0, 3, 6}));
  CHECK((kept_of(1.0, 0, nullptr) == ints{6}));
  CHECK((kept_of(1.0, 3, nullptr) == ints{0, 3, 6}));
  CHECK((kept_of(1.0, 5, nullptr) == ints{0, 1, 2, 3, 6}));
  CHECK((kept_of(1.0, 6, nullptr) == ints{0, 1, 2, 3, 4, 6}));  // NaN is no mass, nor is 0
  CHECK((kept_of(1e-9, 0, nullptr) == ints{0, 1, 2, 3, 6}));
  CHECK((kept_of(0.5, 0, &none) == ints{0, 1, 2, 3, 6}));
  // Of masses that are all nothing, nothing is known.
  const floats nothing = {0.0f, -1.0f, not_a_number};
  ints kept(3, -77), kept_counts(1, -77);
  const ints counts = {3};
  pulseinfer::trim_to_mass{{nothing.data(), 3, nullptr, nullptr},
                           1,
                           0,
                           3,
                           ids.data(),
                           counts.data(),
                           kept.data(),
                           kept_counts.data(),
                           true}(0, pulseinfer::detail::single_lane{});
  CHECK((kept == ints{0, 1, 2}));
  CHECK(kept_counts[0] == 3);
  CHECK(kept_of(1.0, 0, &inf).empty());  // what a block has ends at 256
  CHECK(kept_of(1.0, 9, &inf).size() == 7);
}

TEST_CASE("budget: budgets that are not by mass trim nothing, broken trims are refused") {
  each([](backend machine) {
    auto stream = machine.make_stream(stream_priority::normal);
    test::device_array<std::int32_t, backend> ids(machine, ints{3, 4, 9}, stream);
    test::device_array<std::int32_t, backend> counts(machine, ints{3}, stream);
    test::device_array<float, backend> masses(machine, floats(10, 0.5f), stream);
    const auto budget = selection_budget::of_mass(0.5, 0, 3);
    pulseinfer::enqueue_trim(machine, selection_budget::fixed(3), {}, 1, ids.data(), counts.data(),
                             stream);
    pulseinfer::enqueue_trim(machine, budget, {}, 0, nullptr, nullptr, stream);
    const auto refused = [&](const mass_view& mass, std::int64_t lists, std::int32_t* into) {
      CHECK_THROWS_AS(
          pulseinfer::enqueue_trim(machine, budget, mass, lists, into, counts.data(), stream),
          std::invalid_argument);
    };
    refused({}, 1, ids.data());
    refused({masses.data(), 0, nullptr, nullptr}, 1, ids.data());
    refused({masses.data(), 10, nullptr, nullptr}, -1, ids.data());
    refused({masses.data(), 10, nullptr, nullptr}, 1, nullptr);
    CHECK((ids.download(stream) == ints{3, 4, 9}));
    pulseinfer::enqueue_trim(machine, budget, {masses.data(), 10, nullptr, nullptr}, 1, ids.data(),
                             counts.data(), stream);
    CHECK((ids.download(stream) == ints{3, -1, -1}));
    CHECK((counts.download(stream) == ints{1}));
  });
}
