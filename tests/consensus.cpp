// SPDX-License-Identifier: Apache-2.0
/// @file
/// consensus.hpp on the backend under test. Include the backend's support header first.
#include "pulseinfer/consensus.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "support/allocations.hpp"
#include "support/selection_scene.hpp"

namespace {

using backend = test::backend;
using pulseinfer::consensus_options;
using pulseinfer::digest_kind;
using pulseinfer::element_type;
using lists = std::vector<std::vector<std::int32_t>>;

constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class Case>
void each(Case run) {
  test::each_backend([&](backend machine) { run(machine); });
}

using scene = test::selection_scene<backend>;
using test::score_of;
constexpr std::int32_t block_tokens = test::selection_block_tokens;

/// Digests of all kinds and elements.
template <class Body>
void each_digest(Body body) {
  for (const digest_kind kind :
       {digest_kind::mean, digest_kind::min_max, digest_kind::centre_distance}) {
    for (const element_type element : {element_type::f32, element_type::f16, element_type::bf16,
                                       element_type::f8_e4m3, element_type::i8}) {
      CAPTURE(static_cast<int>(kind));
      CAPTURE(static_cast<int>(element));
      body(kind, element);
    }
  }
}

}  // namespace

TEST_CASE("consensus: heads that disagree agree on what most of them want") {
  // Head h alone scores channel h of a digest.
  each([](backend machine) {
    scene s(machine, {.query_heads = 3, .tokens = {107 * block_tokens}});
    const auto wants = [&](std::int32_t head, std::int32_t block, float score) {
      for (std::int64_t token = 0; token < block_tokens; ++token) {
        s.keys().set(0, 0, block, token, head, score);
      }
    };
    for (std::int32_t block = 0; block < 107; ++block) {
      for (std::int32_t channel = 0; channel < 4; ++channel) wants(channel, block, 0.0f);
    }
    wants(0, 12, 9), wants(0, 45, 8), wants(0, 89, 10);
    wants(1, 14, 5), wants(1, 45, 8), wants(1, 92, 9.5f);
    wants(2, 12, 9), wants(2, 77, 5), wants(2, 104, 4);
    for (std::int32_t head = 0; head < 3; ++head) s.query(0, head, head) = 2.0f;
    s.upload();

    constexpr auto solo_head = pulseinfer::consensus_rule::max_mean;
    const lists alone = s.select(
        {.query_heads = 3, .budget_blocks = 3, .head_groups = 3, .max_rows = 1, .rule = solo_head});
    CHECK((alone == lists{{12, 45, 89}, {14, 45, 92}, {12, 77, 104}}));
    std::set<std::int32_t> all;
    for (const auto& list : alone) all.insert(list.begin(), list.end());
    CHECK(all.size() == 7);
    CHECK((s.select({.query_heads = 3, .budget_blocks = 4, .max_rows = 1, .rule = solo_head}) ==
           lists{{12, 45, 89, 92}}));
  });
}

TEST_CASE("consensus: lambda weighs the mean against the loudest head") {
  // Block 2 has one loud head, block 3 two that are less so.
  each([](backend machine) {
    scene s(machine, {.query_heads = 2, .tokens = {6 * block_tokens}});
    s.keys().randomise(1);
    for (std::int32_t block = 0; block < 6; ++block) {
      for (std::int64_t i = 0; i < 16; ++i) s.keys().set(0, 0, block, i / 4, i % 4, 0.0f);
    }
    for (std::int64_t token = 0; token < 4; ++token) {
      s.keys().set(0, 0, 2, token, 0, 4.0f);
      s.keys().set(0, 0, 3, token, 0, 3.0f);
      s.keys().set(0, 0, 3, token, 1, 3.0f);
    }
    s.query(0, 0, 0) = s.query(0, 1, 1) = 1.0f;
    s.upload();
    consensus_options o{.query_heads = 2, .budget_blocks = 1, .max_rows = 1};
    o.rule = pulseinfer::consensus_rule::max_mean;
    o.lambda = 0.0f;
    CHECK((s.select(o) == lists{{2}}));
    o.lambda = 0.5f;  // 4 + 1 against 3 + 1.5
    CHECK((s.select(o) == lists{{2}}));
    o.lambda = 2.0f;  // 4 + 4 against 3 + 6
    CHECK((s.select(o) == lists{{3}}));
  });
}

TEST_CASE("fault 59: query heads read the keys of their own KV head, for every ratio") {
  each([](backend machine) {
    struct ratio {
      std::int32_t query_heads, kv_heads;
    };
    for (const ratio r : {ratio{12, 2}, ratio{32, 8}, ratio{8, 8}, ratio{8, 1}}) {
      CAPTURE(r.query_heads);
      CAPTURE(r.kv_heads);
      scene s(machine, {.query_heads = r.query_heads, .kv_heads = r.kv_heads, .tokens = {70}});
      s.randomise(3);
      s.upload();
      for (const std::int32_t groups : {1, r.kv_heads, r.query_heads}) {
        CAPTURE(groups);
        const consensus_options o{
            .query_heads = r.query_heads, .budget_blocks = 5, .head_groups = groups, .max_rows = 1};
        CHECK((s.select(o) == s.expected(o)));
      }
    }
    scene s(machine, {.query_heads = 8, .kv_heads = 4, .tokens = {70}});
    CHECK_THROWS_AS(s.select({.query_heads = 10, .budget_blocks = 1}), std::invalid_argument);
    CHECK_THROWS_AS(s.select({.query_heads = 8, .budget_blocks = 1, .head_groups = 3}),
                    std::invalid_argument);
  });
}

TEST_CASE("fault 59: identical heads choose what one of them would") {
  each([](backend machine) {
    lists first;
    for (const std::int32_t heads : {1, 2, 8}) {
      scene s(machine, {.query_heads = heads, .tokens = {33 * block_tokens}});
      s.randomise(4);
      for (std::int32_t head = 0; head < heads; ++head) {
        for (std::int32_t c = 0; c < 4; ++c) {
          s.query(0, head, c) = c % 2 == 0 ? 0.75f : -0.5f;
        }
      }
      s.upload();
      const lists chosen = s.select({.query_heads = heads, .budget_blocks = 6, .max_rows = 1});
      if (first.empty()) first = chosen;
      CHECK((chosen == first));
    }
    CHECK(first[0].size() == 6);
  });
}

TEST_CASE("consensus: scores are equal to the bit, and near those of double precision") {
  each([](backend machine) {
    for (const digest_kind kind : {digest_kind::mean, digest_kind::min_max}) {
      for (const element_type queries :
           {element_type::f32, element_type::f16, element_type::bf16}) {
        CAPTURE(static_cast<int>(kind));
        CAPTURE(static_cast<int>(queries));
        scene s(machine, {.query_heads = 18,
                          .kv_heads = 2,
                          .head_dim = 6,
                          .keys = element_type::f32,
                          .queries = queries,
                          .kind = kind,
                          .tokens = {66 * block_tokens}});
        s.randomise(6);
        s.upload();
        const consensus_options o{
            .query_heads = 18, .lambda = 0.37f, .rule = pulseinfer::consensus_rule::max_mean};
        pulseinfer::consensus_selector<backend> selector(machine, s.digests(), o);
        const auto scores = selector.score(0, s.batch(), s.queries(), s.stream());
        CHECK(scores.lists == 1);
        CHECK(scores.blocks == 66);
        CHECK(scores.masses == nullptr);
        const auto found = s.download(scores.keys.keys, 66);
        for (std::int32_t block = 1; block < 64; ++block) {
          const auto each_score = s.query_scores<float>(0, block);
          const std::uint64_t key = found[static_cast<std::size_t>(block)];
          CHECK(key == pulseinfer::top_k_key(s.consensus(each_score, 0, o), block));
          const auto exact = s.query_scores<double>(0, block);
          double total = 0;
          for (const double score : exact) total += score / 18;
          const double consensus =
              *std::max_element(exact.begin(), exact.end()) + static_cast<double>(o.lambda) * total;
          CHECK(std::abs(static_cast<double>(score_of(key)) - consensus) < 1e-5);
        }
      }
    }
  });
}

TEST_CASE("consensus: every rule, over heads and tokens, raw and as shares of attention") {
  using pulseinfer::consensus_rule;
  using pulseinfer::score_normalisation;
  each([](backend machine) {
    scene s(machine, {.query_heads = 6,
                      .kv_heads = 2,
                      .digest = element_type::f16,
                      .query_tokens = 2,
                      .tokens = {70 * block_tokens, 9 * block_tokens + 1}});
    s.randomise(12);
    s.upload();
    for (const consensus_rule rule :
         {consensus_rule::max_mean, consensus_rule::mean, consensus_rule::max, consensus_rule::vote,
          consensus_rule::union_of_heads}) {
      for (const score_normalisation normalisation :
           {score_normalisation::none, score_normalisation::candidates,
            score_normalisation::context}) {
        for (const std::int32_t groups : {1, 2, 3, 6}) {
          CAPTURE(static_cast<int>(rule));
          CAPTURE(static_cast<int>(normalisation));
          CAPTURE(groups);
          const consensus_options o{.query_heads = 6,
                                    .budget_blocks = 12,
                                    .sink_blocks = 2,
                                    .window_blocks = 3,
                                    .head_groups = groups,
                                    .max_rows = 2,
                                    .query_tokens = 2,
                                    .rule = rule,
                                    .normalisation = normalisation,
                                    .head_blocks = 3};
          CHECK((s.select(o) == s.expected(o)));
        }
      }
    }
  });
}

TEST_CASE("consensus: digests of every element, MHA and one latent for many heads") {
  each([](backend machine) {
    struct ratio {
      std::int32_t query_heads, kv_heads, head_dim;
    };
    for (const ratio r : {ratio{4, 4, 6}, ratio{32, 1, 18}, ratio{4, 2, 5}}) {
      for (const element_type element : {element_type::f32, element_type::f16, element_type::bf16,
                                         element_type::f8_e4m3, element_type::i8}) {
        for (const digest_kind kind : {digest_kind::mean, digest_kind::min_max}) {
          CAPTURE(r.query_heads);
          CAPTURE(static_cast<int>(element));
          scene s(machine, {.query_heads = r.query_heads,
                            .kv_heads = r.kv_heads,
                            .head_dim = r.head_dim,
                            .kind = kind,
                            .digest = element,
                            .tokens = {40}});
          s.randomise(13);
          s.upload();
          const consensus_options o{.query_heads = r.query_heads,
                                    .budget_blocks = 3,
                                    .head_groups = r.kv_heads,
                                    .max_rows = 1};
          CHECK((s.select(o) == s.expected(o)));
        }
      }
    }
  });
}

TEST_CASE("consensus: a block whose keys lie far from their centre is scored for how far") {
  each([](backend machine) {
    for (const element_type element : {element_type::f32, element_type::i8}) {
      scene s(machine, {.query_heads = 2,
                        .kind = digest_kind::centre_distance,
                        .digest = element,
                        .tokens = {9 * block_tokens}});
      for (std::int32_t block = 0; block < 9; ++block) {
        for (std::int64_t i = 0; i < 16; ++i) s.keys().set(0, 0, block, i / 4, i % 4, 0.0f);
      }
      // Of block 5 the centre is 0, too, and each key is 2 away from it: not where the query looks.
      for (std::int64_t token = 0; token < 4; ++token) {
        s.keys().set(0, 0, 5, token, 1 + token / 2, token % 2 == 0 ? 2.0f : -2.0f);
      }
      for (std::int32_t head = 0; head < 2; ++head) s.query(0, head, 0) = 3.0f;
      s.upload();
      const consensus_options o{.query_heads = 2,
                                .budget_blocks = 1,
                                .sink_blocks = 0,
                                .window_blocks = 0,
                                .rule = pulseinfer::consensus_rule::max_mean};
      CHECK((s.select(o) == lists{{5}}));
      pulseinfer::consensus_selector<backend> selector(machine, s.digests(), o);
      const auto scores = selector.score(0, s.batch(), s.queries(), s.stream());
      const auto keys = s.download(scores.keys.keys, 9);
      CHECK(score_of(keys[5]) == 3.0f * 2 / 2 * 1.5f);  // |q| x distance x scale, max + mean / 2
      CHECK(score_of(keys[4]) == 0.0f);
    }
  });
}

TEST_CASE("consensus: masses are shares of attention, in double precision too") {
  using pulseinfer::score_normalisation;
  each([](backend machine) {
    scene s(machine, {.query_heads = 4, .kv_heads = 2, .tokens = {66 * block_tokens, 20}});
    s.randomise(14);
    s.upload(64);  // a tile: the last two blocks of request 0 have no digest
    for (const auto normalisation :
         {score_normalisation::candidates, score_normalisation::context}) {
      const consensus_options o{.query_heads = 4,
                                .budget_blocks = 4,
                                .sink_blocks = 1,
                                .window_blocks = 0,
                                .head_groups = 2,
                                .max_rows = 2,
                                .normalisation = normalisation};
      pulseinfer::consensus_selector<backend> selector(machine, s.digests(), o);
      const auto scores = selector.score(0, s.batch(), s.queries(), s.stream());
      REQUIRE(scores.masses != nullptr);
      CHECK(scores.mass_stride == 128);
      const auto masses =
          s.download(scores.masses, static_cast<std::size_t>(scores.lists * scores.mass_stride));
      const std::int32_t digested[] = {5, 64};  // row r is request 1 - r
      for (std::int32_t row = 0; row < 2; ++row) {
        const auto at = static_cast<std::size_t>(row);
        const std::int32_t first = normalisation == score_normalisation::candidates ? 1 : 0;
        std::vector<double> sums(4);
        for (std::int32_t block = first; block < digested[row]; ++block) {
          const auto exact = s.query_scores<double>(at, block);
          for (std::size_t h = 0; h < 4; ++h) sums[h] += std::exp(exact[h]);
        }
        for (std::size_t group = 0; group < 2; ++group) {
          const float* const of_list = masses.data() + (at * 2 + group) * 128;
          double all = 0;
          for (std::int32_t block = 1; block < digested[row]; ++block) {
            const auto exact = s.query_scores<double>(at, block);
            const double mass = (std::exp(exact[2 * group]) / sums[2 * group] +
                                 std::exp(exact[2 * group + 1]) / sums[2 * group + 1]) /
                                2;
            CHECK(static_cast<double>(of_list[block]) == doctest::Approx(mass).epsilon(2e-5));
            all += static_cast<double>(of_list[block]);
          }
          if (first == 1) CHECK(all == doctest::Approx(1.0));
          if (row == 1) CHECK(of_list[65] == 0.0f);
        }
      }
    }
  });
}

TEST_CASE("consensus: a step allocates nothing, whatever the rule") {
  // Real threads alone: a simulated machine allocates for itself.
  if (std::string_view(test::backend_name) != "host") return;
  backend machine = test::make_backend();
  scene s(machine, {.query_heads = 4, .kv_heads = 2, .tokens = {100}});
  s.randomise(15);
  s.upload();
  const pulseinfer::batch_view batch = s.batch();
  for (const auto rule :
       {pulseinfer::consensus_rule::max_mean, pulseinfer::consensus_rule::union_of_heads}) {
    const consensus_options o{.query_heads = 4,
                              .budget_blocks = 4,
                              .max_rows = 1,
                              .rule = rule,
                              .normalisation = pulseinfer::score_normalisation::context};
    pulseinfer::consensus_selector<backend> selector(machine, s.digests(), o);
    std::uint64_t least = 1000;
    for (int i = 0; i < 10; ++i) {
      const std::uint64_t before = test::allocations();
      (void)selector.select(0, batch, s.queries(), s.stream());
      machine.sync(s.stream());
      least = std::min(least, test::allocations() - before);
    }
    CHECK(least == 0);
  }
}

TEST_CASE("consensus: ragged rows, sinks, windows and short contexts") {
  each([](backend machine) {
    // The last block of most rows is not full, one is shorter than a block.
    scene s(machine, {.query_heads = 4,
                      .kv_heads = 2,
                      .tokens = {3, 71 * block_tokens, 14, 5 * block_tokens + 3, 66 * block_tokens,
                                 6 * block_tokens, 4 * block_tokens + 3}});
    s.randomise(7);
    s.upload();
    for (const std::int32_t groups : {1, 2}) {
      for (const std::int32_t sinks : {0, 1, 3}) {
        for (const std::int32_t window : {0, 2}) {
          CAPTURE(sinks);
          CAPTURE(window);
          const consensus_options o{.query_heads = 4,
                                    .budget_blocks = 5,
                                    .sink_blocks = sinks,
                                    .window_blocks = window,
                                    .head_groups = groups,
                                    .max_rows = 9};
          const lists chosen = s.select(o);
          CHECK((chosen == s.expected(o)));
          // Row 6 is request 0, which has no full block at all.
          CHECK(chosen[static_cast<std::size_t>(6 * groups)].empty());
        }
      }
    }
    // Always-in blocks are never chosen, however many may be.
    const lists most = s.select({.query_heads = 4,
                                 .budget_blocks = 71,
                                 .sink_blocks = 3,
                                 .window_blocks = 2,
                                 .max_rows = 7});
    CHECK(most[5].size() == 71 - 5);
    CHECK(most[5].front() == 3);
    CHECK(most[5].back() == 71 - 3);
    CHECK((most[1] == std::vector<std::int32_t>{3}));  // 6 blocks: one between sinks and window
    CHECK(most[0].empty());                            // 4 blocks
  });
}

TEST_CASE("fault 49: a budget larger than what there is takes all of it, an empty batch nothing") {
  each([](backend machine) {
    scene s(machine, {.query_heads = 1, .tokens = {9 * block_tokens}});
    s.randomise(8);
    s.upload();
    const consensus_options o{.query_heads = 1, .budget_blocks = 9, .max_rows = 2};
    CHECK((s.select(o) == lists{{1, 2, 3, 4, 5, 6}}));
    pulseinfer::consensus_selector<backend> selector(machine, s.digests(), o);
    const auto nothing = selector.select(0, {}, {}, s.stream());
    CHECK(nothing.lists == 0);
    machine.sync(s.stream());
  });
}

TEST_CASE("fault 52: blocks with NaN keys, and blocks without a digest, rank last") {
  each([](backend machine) {
    // With a scale a NaN is all of its part.
    each_digest([&](digest_kind kind, element_type element) {
      scene s(machine,
              {.query_heads = 2, .kind = kind, .digest = element, .tokens = {12 * block_tokens}});
      s.randomise(9);
      s.keys().set(0, 0, 4, 0, 1, not_a_number);
      s.keys().set(0, 0, 6, 3, 2, -not_a_number);
      s.upload();
      const auto choose = [&](std::int32_t budget) {
        return s.select({.query_heads = 2,
                         .budget_blocks = budget,
                         .window_blocks = 0,
                         .lambda = 0.0f,
                         .max_rows = 1})[0];
      };
      CHECK((choose(9) == std::vector<std::int32_t>{1, 2, 3, 5, 7, 8, 9, 10, 11}));
      CHECK((choose(10) == std::vector<std::int32_t>{1, 2, 3, 4, 5, 7, 8, 9, 10, 11}));
      CHECK(choose(11).size() == 11);
    });
    scene s(machine, {.query_heads = 1, .tokens = {70 * block_tokens}});
    s.randomise(9);
    s.upload(64);  // a tile
    const lists chosen = s.select({.query_heads = 1,
                                   .budget_blocks = 66,
                                   .sink_blocks = 1,
                                   .window_blocks = 0,
                                   .max_rows = 1});
    // All that have a digest, then of those that rank alike the lowest.
    std::vector<std::int32_t> first(66);
    std::iota(first.begin(), first.end(), 1);
    CHECK((chosen == lists{first}));
    const lists fewer = s.select({.query_heads = 1,
                                  .budget_blocks = 63,
                                  .sink_blocks = 1,
                                  .window_blocks = 0,
                                  .max_rows = 1});
    first.resize(63);
    CHECK((fewer == lists{first}));
  });
}

TEST_CASE("fault 52: a block that is NaN for one query of the group ranks last, under every rule") {
  // Infinite keys in one channel: the best of blocks to a head that looks at it, NaN to one that does
  // not. The heads are of one KV head, or of two.
  using pulseinfer::consensus_rule;
  each([](backend machine) {
    for (const std::int32_t kv_heads : {1, 2}) {
      for (const bool first : {true, false}) {
        scene s(machine, {.query_heads = 2, .kv_heads = kv_heads, .tokens = {12 * block_tokens}});
        s.randomise(3);
        for (std::int32_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
          s.keys().set(0, 0, 5, 1, kv_head * 4 + 2, std::numeric_limits<float>::infinity());
        }
        for (std::int32_t head = 0; head < 2; ++head) {
          for (std::int32_t c = 0; c < 4; ++c) s.query(0, head, c) = 0.5f;
          s.query(0, head, 2) = (head == 0) == first ? 0.0f : 1.0f;
        }
        s.upload();
        for (const consensus_rule rule :
             {consensus_rule::max_mean, consensus_rule::mean, consensus_rule::max}) {
          CAPTURE(kv_heads);
          CAPTURE(first);
          CAPTURE(static_cast<int>(rule));
          const lists chosen = s.select({.query_heads = 2,
                                         .budget_blocks = 10,
                                         .window_blocks = 0,
                                         .max_rows = 1,
                                         .rule = rule});
          CHECK((chosen == lists{{1, 2, 3, 4, 6, 7, 8, 9, 10, 11}}));
        }
      }
    }
  });
}

TEST_CASE("fault 52: blocks that are reserved and never digested rank last, whatever lay there") {
  each([](backend machine) {
    each_digest([&](digest_kind kind, element_type element) {
      scene s(machine, {.query_heads = 2,
                        .kv_heads = 2,
                        .kind = kind,
                        .digest = element,
                        .tokens = {30 * block_tokens}});
      // The last ones would be the best.
      for (std::int32_t block = 0; block < 30; ++block) {
        for (std::int64_t i = 0; i < 32; ++i) {
          s.keys().set(0, 0, block, i / 8, i % 8, static_cast<float>(block));
        }
      }
      for (std::int32_t i = 0; i < 8; ++i) s.query(0, i / 4, i % 4) = i % 4 == 0 ? 0.0f : 1.0f;
      s.upload();
      const consensus_options o{.query_heads = 2,
                                .budget_blocks = 4,
                                .sink_blocks = 0,
                                .window_blocks = 0,
                                .max_rows = 1};
      CHECK((s.select(o) == lists{{26, 27, 28, 29}}));
      s.digests().release(0, s.stream());
      REQUIRE(s.digests().reserve(0, 30, s.stream()));
      s.digests().build(0, 0, 0, 9, s.keys().pool(), s.keys().device_table(), s.stream());
      CHECK((s.select(o) == lists{{5, 6, 7, 8}}));
    });
  });
}

TEST_CASE("fault 55: the same selection every time, ties to the lower block") {
  each([](backend machine) {
    scene s(machine, {.query_heads = 2, .tokens = {40 * block_tokens}});
    for (std::int32_t block = 0; block < 40; ++block) {
      for (std::int64_t i = 0; i < 16; ++i) {
        s.keys().set(0, 0, block, i / 4, i % 4, static_cast<float>(block % 4));
      }
    }
    for (std::int32_t i = 0; i < 8; ++i) s.query(0, i / 4, i % 4) = 1.0f;
    s.upload();
    const consensus_options o{
        .query_heads = 2, .budget_blocks = 12, .sink_blocks = 0, .window_blocks = 0, .max_rows = 1};
    for (int i = 0; i < 4; ++i) {
      CHECK((s.select(o) == lists{{2, 3, 6, 7, 11, 15, 19, 23, 27, 31, 35, 39}}));
    }
  });
}

TEST_CASE("consensus: what does not fit is refused") {
  backend machine = test::make_backend();
  scene s(machine, {.query_heads = 4, .kv_heads = 2, .tokens = {40, 24}});
  s.randomise(1);
  s.upload();
  const auto refused = [&](consensus_options o) {
    using selector = pulseinfer::consensus_selector<backend>;
    CHECK_THROWS_AS(selector(machine, s.digests(), o), std::invalid_argument);
  };
  const consensus_options fine{.query_heads = 4, .budget_blocks = 10, .max_rows = 2};
  const auto with = [&](auto change) {
    consensus_options o = fine;
    change(o);
    return o;
  };
  refused(with([](auto& o) { o.query_heads = 0; }));
  refused(with([](auto& o) { o.query_heads = 5; }));
  refused(with([](auto& o) { o.budget_blocks = 0; }));
  refused(with([](auto& o) { o.budget_blocks = -1; }));
  refused(with([](auto& o) { o.budget_blocks = 11; }));
  refused(with([](auto& o) { o.sink_blocks = -1; }));
  refused(with([](auto& o) { o.window_blocks = -1; }));
  refused(with([](auto& o) { o.head_groups = 0; }));
  refused(with([](auto& o) { o.head_groups = 8; }));
  refused(with([](auto& o) { o.max_rows = 0; }));
  refused(with([](auto& o) { o.lambda = -0.1f; }));
  refused(with([](auto& o) { o.lambda = not_a_number; }));
  refused(with([](auto& o) { o.lambda = std::numeric_limits<float>::infinity(); }));
  refused(with([](auto& o) { o.query_tokens = 0; }));
  refused(with([](auto& o) { o.head_blocks = 11; }));

  pulseinfer::consensus_selector<backend> selector(machine, s.digests(), fine);
  const pulseinfer::batch_view batch = s.batch();
  const auto select = [&](std::int32_t layer, const pulseinfer::batch_view& b,
                          const pulseinfer::query_view& q) {
    (void)selector.select(layer, b, q, s.stream());
  };
  select(0, batch, s.queries());
  CHECK_THROWS_AS(select(-1, batch, s.queries()), std::out_of_range);
  CHECK_THROWS_AS(select(1, batch, s.queries()), std::out_of_range);
  CHECK_THROWS_AS(select(0, batch, {}), std::invalid_argument);
  pulseinfer::query_view several = s.queries();
  several.tokens = 2;  // the selector has room for one
  CHECK_THROWS_AS(select(0, batch, several), std::invalid_argument);
  several.tokens = 0;
  CHECK_THROWS_AS(select(0, batch, several), std::invalid_argument);
  pulseinfer::query_view untyped = s.queries();
  untyped.element = static_cast<pulseinfer::element_type>(9);
  CHECK_THROWS_AS(select(0, batch, untyped), std::invalid_argument);
  pulseinfer::batch_view changed = batch;
  const std::vector<std::int32_t> three = {0, 1, 0};
  changed.requests = three;
  CHECK_THROWS_AS(select(0, changed, s.queries()), std::invalid_argument);
  const std::vector<std::int32_t> unknown = {2};
  changed.requests = unknown;
  CHECK_THROWS_AS(select(0, changed, s.queries()), std::out_of_range);
  changed = batch;
  changed.device_tokens = nullptr;
  CHECK_THROWS_AS(select(0, changed, s.queries()), std::invalid_argument);
  changed = batch;
  changed.max_tokens = 44;
  CHECK_THROWS_AS(select(0, changed, s.queries()), std::invalid_argument);
  changed.max_tokens = 43;  // ten full blocks, and one begun
  select(0, changed, s.queries());
  changed.max_tokens = -1;
  CHECK_THROWS_AS(select(0, changed, s.queries()), std::invalid_argument);
  machine.sync(s.stream());
}
