// SPDX-License-Identifier: Apache-2.0
/// @file
/// Options of a choice: what is filled in, and what is refused.
#include "pulseinfer/selection.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>

namespace {

using pulseinfer::consensus_options;
using pulseinfer::consensus_rule;
using pulseinfer::score_normalisation;

constexpr pulseinfer::kv_geometry geometry{.layers = 1, .kv_heads = 4, .head_dim = 64};
constexpr std::int64_t max_blocks = 100;
constexpr consensus_options fine{.query_heads = 8, .budget_blocks = 10};

template <class Change>
void refused(Change change, const char* named) {
  consensus_options o = fine;
  change(o);
  CAPTURE(named);
  try {
    (void)pulseinfer::checked(o, geometry, max_blocks);
    CHECK(false);
  } catch (const std::invalid_argument& e) {
    CHECK(std::string(e.what()).find(named) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("selection: defaults that depend on others are filled in, the rest stays") {
  const consensus_options o = pulseinfer::checked(fine, geometry, max_blocks);
  CHECK(o.head_blocks == 10);
  CHECK(o.logit_scale == 0.125f);
  CHECK(o.query_heads == 8);
  CHECK(!o.is_normalised());
  CHECK(!o.has_votes());
  consensus_options mine = fine;
  mine.head_blocks = 3;
  mine.logit_scale = 0.07f;
  mine.rule = consensus_rule::union_of_heads;
  mine.normalisation = score_normalisation::context;
  const consensus_options kept = pulseinfer::checked(mine, geometry, max_blocks);
  CHECK(kept.head_blocks == 3);
  CHECK(kept.logit_scale == 0.07f);
  CHECK(kept.is_normalised());
  CHECK(kept.has_votes());
}

TEST_CASE("selection: what nobody tells is what docs/fidelity.md recommends") {
  using pulseinfer::selection_budget;
  const auto made = [](consensus_options o, std::int64_t blocks) {
    o.query_heads = 8;
    return pulseinfer::checked(o, geometry, blocks);
  };
  const consensus_options o = made({}, 8192);
  CHECK(o.rule == consensus_rule::mean);
  CHECK(o.normalisation == score_normalisation::none);
  CHECK(o.head_groups == 1);
  CHECK(o.budget_blocks == 64);
  CHECK(o.budget == selection_budget::of_context(1.0 / 16, 16, 64));
  // A store that cannot hold so many.
  CHECK(made({}, 40).budget_blocks == 40);
  CHECK(made({}, 40).budget == selection_budget::of_context(1.0 / 16, 16, 40));
  CHECK(made({}, 9).budget == selection_budget::of_context(1.0 / 16, 9, 9));
  // One of the two told says the other: a number is that number, a budget gets its room.
  CHECK(made({.budget_blocks = 8}, 100).budget == selection_budget::fixed(8));
  const auto by_mass = [&](const selection_budget& budget) {
    return made({.budget = budget, .normalisation = score_normalisation::context}, 100);
  };
  CHECK(by_mass(selection_budget::of_mass(0.9, 4, 80)).budget_blocks == 80);
  CHECK(by_mass(selection_budget::of_worth(0.001, 4, 0)).budget ==
        selection_budget::of_worth(0.001, 4, 64));
  CHECK(made({.budget_blocks = 8, .budget = selection_budget::of_context(0.5, 1, 4)}, 100)
            .budget_blocks == 8);
}

TEST_CASE("fault 59: heads that do not divide are refused, as is all that is out of range") {
  refused([](auto& o) { o.query_heads = 10; }, "10 query heads are no multiple of 4 KV heads");
  refused([](auto& o) { o.head_groups = 3; }, "8 query heads are no multiple of 3 head groups");
  refused([](auto& o) { o.query_heads = 0; }, "query_heads is 0");
  refused([](auto& o) { o.head_groups = 0; }, "head_groups is 0");
  refused([](auto& o) { o.head_groups = 16; }, "head_groups is 16");
  refused([](auto& o) { o.budget_blocks = 0; }, "budget_blocks is 0");
  refused([](auto& o) { o.budget_blocks = -1; }, "budget_blocks is -1");
  refused([](auto& o) { o.budget_blocks = 101; }, "budget_blocks is 101");
  refused(
      [](auto& o) {
        o.budget_blocks = pulseinfer::room_for_budget;
        o.budget = pulseinfer::selection_budget::fixed(101);
      },
      "the budget's cap is 101, expected 1 to 100");
  refused([](auto& o) { o.budget = pulseinfer::selection_budget::of_worth(0.1, 0, 9); },
          "the budget is by mass, but normalisation is none");
  refused([](auto& o) { o.sink_blocks = -1; }, "sink_blocks is -1");
  refused([](auto& o) { o.window_blocks = 101; }, "window_blocks is 101");
  refused([](auto& o) { o.max_rows = 0; }, "max_rows is 0");
  refused([](auto& o) { o.query_tokens = 0; }, "query_tokens is 0");
  refused([](auto& o) { o.query_tokens = 1025; }, "query_tokens is 1025");
  refused([](auto& o) { o.head_blocks = 101; }, "head_blocks is 101");
  refused([](auto& o) { o.rule = static_cast<consensus_rule>(5); }, "rule is 5");
  refused([](auto& o) { o.normalisation = static_cast<score_normalisation>(3); },
          "normalisation is 3");
  refused([](auto& o) { o.lambda = -0.5f; }, "lambda is -0.5");
  refused([](auto& o) { o.lambda = std::numeric_limits<float>::quiet_NaN(); }, "lambda is");
  refused([](auto& o) { o.logit_scale = -1.0f; }, "logit_scale is -1");
  refused([](auto& o) { o.logit_scale = std::numeric_limits<float>::infinity(); }, "logit_scale");
}

TEST_CASE("selection: no more may vote than are counted") {
  consensus_options o{.query_heads = 8, .budget_blocks = 10, .query_tokens = 512};
  (void)pulseinfer::checked(o, geometry, max_blocks);
  o.rule = consensus_rule::vote;  // 4,096 queries of one group
  CHECK_THROWS_AS((void)pulseinfer::checked(o, geometry, max_blocks), std::invalid_argument);
  o.head_groups = 2;
  (void)pulseinfer::checked(o, geometry, max_blocks);
}
