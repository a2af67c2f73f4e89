// SPDX-License-Identifier: Apache-2.0
/// @file
/// Selectors that obey a budget, on the backend under test. Include the backend's support header
/// first.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "pulseinfer/consensus.hpp"
#include "support/allocations.hpp"
#include "support/sanitizers.hpp"
#include "support/selection_scene.hpp"

namespace {

using backend = test::backend;
using pulseinfer::budget_rule;
using pulseinfer::consensus_options;
using pulseinfer::consensus_rule;
using pulseinfer::score_normalisation;
using pulseinfer::selection_budget;
using scene = test::selection_scene<backend>;
using lists = scene::lists;

constexpr std::int32_t block_tokens = test::selection_block_tokens;
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class Case>
void each(Case run) {
  test::each_backend([&](backend machine) { run(machine); });
}

/// A mass in steps of 2^-40.
std::int64_t steps_of(float mass) {
  return std::isnan(mass) ? 0 : static_cast<std::int64_t>(std::floor(std::ldexp(mass, 40)));
}

/// What is chosen, by the rules in words.
class brute_force {
 public:
  brute_force(const scene& s, std::size_t rows, const consensus_options& options)
      : scene_(s), rows_(rows), options_(options) {}

  lists choose(const selection_budget& budget) const {
    lists all;
    for (std::size_t row = 0; row < rows_; ++row) {
      consensus_options o = options_;
      o.head_blocks = o.head_blocks == 0 ? o.budget_blocks : o.head_blocks;
      o.budget_blocks = most_of(row, budget);
      const lists found = scene_.expected(o);
      for (std::int32_t group = 0; group < o.head_groups; ++group) {
        const auto& list =
            found[row * static_cast<std::size_t>(o.head_groups) + static_cast<std::size_t>(group)];
        all.push_back(budget.needs_masses()
                          ? trim(list, row, static_cast<std::size_t>(group), budget)
                          : list);
      }
    }
    return all;
  }

 private:
  std::int32_t most_of(std::size_t row, const selection_budget& budget) const {
    if (budget.rule != budget_rule::fraction) return budget.cap;
    const auto wanted = static_cast<std::int32_t>(
        std::ceil(static_cast<double>(scene_.full_blocks(row)) * budget.share));
    return std::clamp(wanted, budget.floor, budget.cap);
  }
  std::vector<std::int32_t> trim(std::vector<std::int32_t> list, std::size_t row, std::size_t group,
                                 const selection_budget& budget) const {
    consensus_options o = options_;
    o.rule = consensus_rule::mean;
    const bool is_context = o.normalisation == score_normalisation::context;
    if (is_context) o.sink_blocks = o.window_blocks = 0;
    const std::vector<float> mean = scene_.joined(row, o)[group];
    const auto mass = [&](std::int32_t id) { return steps_of(mean[static_cast<std::size_t>(id)]); };
    std::int64_t sum = 0;
    const std::int32_t full = scene_.full_blocks(row);
    for (std::int32_t block = 0; is_context && block < full; ++block) {
      if (block < options_.sink_blocks || block >= full - options_.window_blocks)
        sum += mass(block);
    }
    sum = steps_of(static_cast<float>(std::ldexp(static_cast<float>(sum), -40)));
    const auto wanted = static_cast<std::int64_t>(std::ceil(std::ldexp(budget.share, 40)));
    std::stable_sort(list.begin(), list.end(), [&](std::int32_t a, std::int32_t b) {
      const auto score = [&](std::int32_t id) {
        const float m = mean[static_cast<std::size_t>(id)];
        return std::isnan(m) ? 0.0f : m;
      };
      return score(a) > score(b);
    });
    std::size_t kept = 0;
    const bool is_known = !list.empty() && mean[static_cast<std::size_t>(list[0])] > 0;
    const auto is_wanted = [&] {
      if (kept < static_cast<std::size_t>(budget.floor)) return true;
      if (budget.rule == budget_rule::mass) return sum < wanted;
      return !is_known || mass(list[kept]) >= wanted;
    };
    while (kept < list.size() && is_wanted()) sum += mass(list[kept++]);
    list.resize(kept);
    std::sort(list.begin(), list.end());
    return list;
  }

  const scene& scene_;
  std::size_t rows_;
  consensus_options options_;
};

/// Queries that like few blocks much.
void sharpen(scene& s, std::size_t rows, std::int32_t heads, float by) {
  for (std::size_t row = 0; row < rows; ++row) {
    for (std::int32_t head = 0; head < heads; ++head) {
      for (std::int32_t c = 0; c < 4; ++c) s.query(row, head, c) *= by;
    }
  }
}

/// How many blocks are chosen as in README, as layer 0 and as a later one.
template <class Backend>
std::vector<std::size_t> chosen_of_layers(Backend machine, scene& s) {
  using namespace pulseinfer;
  const batch_view batch = s.batch();
  const query_view queries = s.queries();
  auto& digests = s.digests();
  auto& stream = s.stream();
  std::vector<std::size_t> found;
  for (const int layer : {0, 2}) {
    consensus_selector<Backend> chooser(machine, digests,
                                        {.query_heads = 8,
                                         .budget = selection_budget::of_worth(0.0005, 4, 256),
                                         .normalisation = score_normalisation::context});
    const auto most = selection_budget::of_mass(0.98, 4, 256);
    const auto chosen = layer < 2 ? chooser.select(0, batch, queries, most, stream)
                                  : chooser.select(0, batch, queries, stream);
    found.push_back(s.download(chosen)[0].size());
  }
  return found;
}

constexpr consensus_options options{.query_heads = 4,
                                    .budget_blocks = 24,
                                    .sink_blocks = 2,
                                    .window_blocks = 3,
                                    .max_rows = 4,
                                    .normalisation = score_normalisation::context};

}  // namespace

TEST_CASE("budget: a selector keeps what brute force does, by every budget, rule and scope") {
  int machines = 0;
  each([&](backend machine) {
    if (++machines > 5) return;  // orders of the work: a few of them, for what is tested is sums
    // Row 3 is request 0: fewer full blocks than sinks. Row 2 has sinks and window alone.
    scene s(machine, {.query_heads = 4,
                      .kv_heads = 2,
                      .tokens = {7, 5 * block_tokens, 40 * block_tokens + 1, 130 * block_tokens}});
    s.randomise(21);
    sharpen(s, 4, 4, 8.0f);
    s.upload();
    const selection_budget budgets[] = {selection_budget::fixed(24),
                                        selection_budget::fixed(5),
                                        selection_budget::of_context(1.0 / 16, 0, 24),
                                        selection_budget::of_context(0.25, 7, 20),
                                        selection_budget::of_mass(0.5, 0, 24),
                                        selection_budget::of_mass(0.9375, 3, 24),
                                        selection_budget::of_mass(0.75, 2, 9),
                                        selection_budget::of_mass(1.0, 0, 24),
                                        selection_budget::of_mass(1e-9, 0, 24),
                                        selection_budget::of_mass(0.25, 24, 24),
                                        selection_budget::of_worth(0x1p-7, 0, 24),
                                        selection_budget::of_worth(0x1p-5, 4, 17)};
    // All of them on the host alone: a CPU that runs CUDA's kernels is slow, as is a sanitizer, and
    // simulated machines are many.
    const bool is_slow = test::is_sanitized || std::string_view(test::backend_name) != "host";
    std::size_t trimmed = 0;
    for (const consensus_rule rule :
         {consensus_rule::max_mean, consensus_rule::mean, consensus_rule::union_of_heads}) {
      for (const auto normalisation : {score_normalisation::none, score_normalisation::candidates,
                                       score_normalisation::context}) {
        for (const std::int32_t groups : {1, 2, 4}) {
          if (is_slow && (groups == 2 || rule == consensus_rule::mean)) continue;
          consensus_options o = options;
          o.rule = rule;
          o.normalisation = normalisation;
          o.head_groups = groups;
          o.head_blocks = 8;
          const brute_force reference(s, 4, o);
          pulseinfer::consensus_selector<backend> selector(machine, s.digests(), o);
          for (const selection_budget& budget : budgets) {
            if (budget.needs_masses() && !o.is_normalised()) continue;
            CAPTURE(static_cast<int>(rule));
            CAPTURE(static_cast<int>(normalisation));
            CAPTURE(groups);
            CAPTURE(static_cast<int>(budget.rule));
            CAPTURE(budget.share);
            const auto chosen = selector.select(0, s.batch(), s.queries(), budget, s.stream());
            CHECK(chosen.k == 24);
            const lists found = s.download(chosen);
            CHECK((found == reference.choose(budget)));
            const bool is_trimmed = !found[0].empty() && found[0].size() < 24;
            trimmed += budget.needs_masses() && is_trimmed ? 1 : 0;
          }
        }
      }
    }
    CHECK(trimmed > (is_slow ? 8 : 20));  // what is tested happens
  });
}

TEST_CASE("budget: the mass that is chosen reaches its share, in double precision, and no more") {
  each([](backend machine) {
    scene s(machine, {.query_heads = 4, .tokens = {100 * block_tokens}});
    s.randomise(22);
    sharpen(s, 1, 4, 8.0f);
    s.upload();
    std::vector<std::vector<double>> shares;  // [block][head]
    std::vector<double> sums(4);
    for (std::int32_t block = 0; block < 100; ++block) {
      auto& of_block = shares.emplace_back(s.query_scores<double>(0, block));
      for (std::size_t h = 0; h < 4; ++h) sums[h] += of_block[h] = std::exp(of_block[h]);
    }
    const auto mass = [&](std::int32_t block) {
      double all = 0;
      for (std::size_t h = 0; h < 4; ++h) {
        all += shares[static_cast<std::size_t>(block)][h] / sums[h] / 4;
      }
      return all;
    };
    consensus_options o = options;
    o.budget_blocks = 95;
    double always = 0;
    for (const std::int32_t block : {0, 1, 97, 98, 99}) always += mass(block);
    std::size_t longest = 0;
    for (const double share : {0.3, 0.6, 0.8, 0.9, 0.99}) {
      CAPTURE(share);
      o.budget = selection_budget::of_mass(share, 0, 95);
      const auto list = s.select(o)[0];
      double sum = always;
      double least = 1;
      for (const std::int32_t id : list) {
        sum += mass(id);
        least = std::min(least, mass(id));
      }
      CHECK(sum > share - 1e-5);
      if (!list.empty()) CHECK(sum - least < share + 1e-5);
      CHECK(list.size() >= longest);
      longest = list.size();
    }
    CHECK(longest > 10);
    CHECK(longest < 95);
  });
}

TEST_CASE("budget: who tells none gets a sixteenth of each row, 16 blocks at least, 64 at most") {
  each([](backend machine) {
    // Rows are the requests from the last to the first.
    scene s(machine, {.query_heads = 2,
                      .kind = pulseinfer::digest_options{}.kind,
                      .digest = pulseinfer::digest_options{}.element,
                      .tokens = {9 * block_tokens, 40 * block_tokens, 330 * block_tokens + 1}});
    s.randomise(27);
    s.upload();
    pulseinfer::consensus_selector<backend> selector(machine, s.digests(),
                                                     {.query_heads = 2, .max_rows = 3});
    const auto chosen = selector.select(0, s.batch(), s.queries(), s.stream());
    CHECK(chosen.k == 64);
    const lists found = s.download(chosen);
    CHECK(found[0].size() == 21);  // 330 / 16, rounded up
    CHECK(found[1].size() == 16);
    CHECK(found[2].size() == 6);  // all that are not always in
    const brute_force reference(s, 3, selector.options());
    CHECK((found == reference.choose(pulseinfer::default_budget)));
  });
}

TEST_CASE("budget: a layer's own, as README has it") {
  each([](backend machine) {
    scene s(machine, {.query_heads = 8, .kv_heads = 2, .tokens = {300 * block_tokens}});
    s.randomise(28);
    sharpen(s, 1, 8, 40.0f);
    s.upload();
    // Layer 0 gets the share, of which the budget of the others would leave out some.
    const std::vector<std::size_t> found = chosen_of_layers(machine, s);
    REQUIRE(found.size() == 2);
    CHECK(found[0] != found[1]);
    for (const std::size_t blocks : found) {
      CHECK(blocks > 4);
      CHECK(blocks < 256);
    }
  });
}

TEST_CASE("budget: sinks and window that have nearly all leave nothing to choose but the floor") {
  each([](backend machine) {
    scene s(machine, {.query_heads = 1, .tokens = {80 * block_tokens}});
    s.randomise(23);
    for (const std::int32_t block : {0, 79}) {
      for (std::int64_t token = 0; token < block_tokens; ++token) {
        for (std::int64_t c = 0; c < 4; ++c) s.keys().set(0, 0, block, token, c, 16.0f);
      }
    }
    for (std::int32_t c = 0; c < 4; ++c) s.query(0, 0, c) = 1.0f;
    s.upload();
    const auto chosen = [&](score_normalisation normalisation, std::int32_t floor) {
      return s
          .select({.query_heads = 1,
                   .budget_blocks = 20,
                   .budget = selection_budget::of_mass(0.9, floor, 20),
                   .sink_blocks = 1,
                   .window_blocks = 1,
                   .normalisation = normalisation})[0]
          .size();
    };
    CHECK(chosen(score_normalisation::context, 0) == 0);
    CHECK(chosen(score_normalisation::context, 7) == 7);
    CHECK(chosen(score_normalisation::candidates, 0) == 20);  // 0.9 of what is flat takes the cap
  });
}

TEST_CASE("budget: a row of which all is NaN gets the cap, NaN blocks come last") {
  each([](backend machine) {
    scene s(machine, {.query_heads = 2, .tokens = {30 * block_tokens, 30 * block_tokens}});
    s.randomise(24);
    for (std::int32_t c = 0; c < 4; ++c) s.query(0, 0, c) = not_a_number;  // row 0, one head
    for (std::int32_t block = 4; block < 26; ++block) s.keys().set(0, 0, block, 1, 2, not_a_number);
    s.upload();
    for (const auto normalisation :
         {score_normalisation::candidates, score_normalisation::context}) {
      consensus_options o = options;
      o.query_heads = 2;
      o.budget = selection_budget::of_mass(0.9375, 0, 12);
      o.normalisation = normalisation;
      const lists found = s.select(o);
      CHECK(found[0].size() == 12);
      CHECK((std::vector<std::int32_t>(found[0].begin(), found[0].begin() + 3) ==
             std::vector<std::int32_t>{2, 3, 4}));
      // Row 1 is request 0: of its blocks only 2, 3 and 26 have a mass, all of it or a part.
      const bool has_all = normalisation == score_normalisation::candidates;
      const std::vector<std::int32_t> sound = {2, 3, 26};
      for (const std::int32_t id : found[1]) {
        CHECK(std::count(sound.begin(), sound.end(), id) == 1);
      }
      if (has_all) CHECK(found[1].size() == 3);
      // By worth alike.
      o.budget = selection_budget::of_worth(0x1p-20, 2, 12);
      const lists worth = s.select(o);
      CHECK((worth[0] == found[0]));
      CHECK((worth[1] == sound));
    }
  });
}

TEST_CASE("budget: one that a selector cannot keep is refused, and changes nothing") {
  backend machine = test::make_backend();
  scene s(machine, {.query_heads = 4, .tokens = {40 * block_tokens}});
  s.randomise(25);
  s.upload();
  pulseinfer::consensus_selector<backend> selector(machine, s.digests(), options);
  consensus_options raw = options;
  raw.normalisation = score_normalisation::none;
  pulseinfer::consensus_selector<backend> by_logits(machine, s.digests(), raw);
  const auto before = selector.select(0, s.batch(), s.queries(), s.stream());
  const auto refused = [&](auto& by, const selection_budget& budget, std::string_view says) {
    try {
      (void)by.select(0, s.batch(), s.queries(), budget, s.stream());
      FAIL_CHECK("no error");
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).find(says) != std::string::npos);
    }
  };
  refused(selector, selection_budget::fixed(25), "cap is 25, expected 1 to 24");
  refused(selector, selection_budget::fixed(0), "cap is 0");
  refused(selector, selection_budget::of_context(0.5, 9, 8), "floor is 9");
  refused(selector, selection_budget::of_mass(0.0, 0, 8), "share is 0");
  refused(selector, selection_budget::of_mass(1.5, 0, 8), "share is 1.5");
  refused(selector, selection_budget::of_mass(static_cast<double>(not_a_number), 0, 8), "share");
  refused(selector, selection_budget::of_worth(0.0, 0, 8), "share is 0");
  refused(selector, selection_budget::of_worth(0.5, 9, 8), "floor is 9");
  refused(selector, selection_budget::of_worth(0.5, 0, 25), "cap is 25, expected 1 to 24");
  refused(by_logits, selection_budget::of_mass(0.5, 0, 8), "normalisation is none");
  refused(by_logits, selection_budget::of_worth(0.5, 0, 8), "normalisation is none");
  raw.budget = selection_budget::of_mass(0.5, 0, 8);
  CHECK_THROWS_AS(s.select(raw), std::invalid_argument);
  raw.budget = selection_budget::of_context(0.5, 0, 25);
  CHECK_THROWS_AS(s.select(raw), std::invalid_argument);
  CHECK(s.download(before)[0].size() == 24);
  CHECK(selector.options().budget.cap == 24);
}

TEST_CASE("budget: a step by mass or context allocates nothing") {
  // Real threads alone: a simulated machine allocates for itself.
  if (std::string_view(test::backend_name) != "host") return;
  backend machine = test::make_backend();
  scene s(machine, {.query_heads = 4, .kv_heads = 2, .tokens = {100 * block_tokens}});
  s.randomise(26);
  s.upload();
  const pulseinfer::batch_view batch = s.batch();
  pulseinfer::consensus_selector<backend> selector(machine, s.digests(), options);
  for (const selection_budget& budget :
       {selection_budget::of_mass(0.5, 1, 20), selection_budget::of_worth(0.01, 1, 20),
        selection_budget::of_context(0.1, 1, 20)}) {
    std::uint64_t least = 1000;
    for (int i = 0; i < 10; ++i) {
      const std::uint64_t before = test::allocations();
      (void)selector.select(0, batch, s.queries(), budget, s.stream());
      machine.sync(s.stream());
      least = std::min(least, test::allocations() - before);
    }
    CHECK(least == 0);
  }
}
