// SPDX-License-Identifier: Apache-2.0
/// @file
/// Digests, scores, rules, budgets and top-k together against a slow reference, to the bit, on the
/// backend under test. Include the backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <vector>

#include "pulseinfer/consensus.hpp"
#include "support/rounds.hpp"
#include "support/selection_model.hpp"
#include "support/selection_scene.hpp"

namespace {

using backend = test::backend;
using pulseinfer::consensus_options;
using pulseinfer::consensus_rule;
using pulseinfer::digest_kind;
using pulseinfer::element_type;
using pulseinfer::score_normalisation;
using pulseinfer::selection_budget;
using pulseinfer::detail::random_source;
using scene = test::selection_scene<backend>;
using lists = scene::lists;
using numbers = std::vector<std::vector<double>>;

constexpr std::int32_t block_tokens = test::selection_block_tokens;
constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr float tiny = std::numeric_limits<float>::denorm_min();
constexpr float huge = std::numeric_limits<float>::max();

template <class T>
T one_of(random_source& draw, std::initializer_list<T> all) {
  return all.begin()[draw.below(all.size())];
}
std::int32_t below(random_source& draw, std::int64_t range) {
  return static_cast<std::int32_t>(draw.below(static_cast<std::uint64_t>(range)));
}

constexpr bool is_simulated = std::string_view(test::backend_name) == "simulated";
constexpr bool is_cuda = std::string_view(test::backend_name) == "cuda";

/// Calls f(machine, draw) some times, never twice with the same numbers: once where a CPU runs CUDA's
/// kernels, twice for each of the many simulated machines.
template <class F>
void each(std::uint64_t seed, F f) {
  std::uint64_t machines = 0;
  test::each_backend([&](backend machine) {
    const int rounds = test::rounds(is_cuda        ? 1
                                    : is_simulated ? 2
                                                   : 16,
                                    is_cuda || is_simulated ? 30 : 1000);
    if (is_cuda && machines > 0 && rounds <= 1) return;
    for (int round = 0; round < std::max(rounds, 1); ++round) {
      CAPTURE(round);
      random_source draw(seed + 1000 * machines + static_cast<std::uint64_t>(round));
      f(machine, draw);
    }
    ++machines;
  });
}

/// A scene, and all that the reference needs of it.
struct subject {
  subject(backend machine, const test::selection_shape& s, std::int32_t digested_blocks)
      : shape(s), digested(digested_blocks), of(machine, s) {}

  void upload() { of.upload(digested); }
  [[nodiscard]] std::size_t rows() const { return shape.tokens.size(); }
  [[nodiscard]] std::int32_t request(std::size_t row) const {
    return static_cast<std::int32_t>(rows() - 1 - row);
  }
  /// The reference for a row.
  [[nodiscard]] test::selection_model model(std::size_t row, const consensus_options& o,
                                            test::selection_model::rounding round) {
    const std::int32_t heads_per_kv = shape.query_heads / shape.kv_heads;
    test::selection_model m({.kind = shape.kind,
                             .element = shape.digest,
                             .kv_heads = shape.kv_heads,
                             .head_dim = shape.head_dim},
                            o, shape.query_tokens, round);
    numbers logits;
    const std::int32_t full = shape.tokens[static_cast<std::size_t>(request(row))] / block_tokens;
    const auto dim = static_cast<std::size_t>(shape.head_dim);
    for (std::int32_t block = 0; block < full; ++block) {
      auto& of_block = logits.emplace_back();
      for (std::int32_t kv = 0; kv < shape.kv_heads; ++kv) {
        numbers keys;
        for (std::int64_t t = 0; t < block_tokens; ++t) {
          auto& key = keys.emplace_back();
          for (std::int64_t c = 0; c < shape.head_dim; ++c) {
            key.push_back(static_cast<double>(
                of.keys().key(0, request(row), block, t, kv * shape.head_dim + c)));
          }
        }
        const test::model_digest digest = m.digest(keys);
        for (std::int32_t q = 0; q < heads_per_kv * shape.query_tokens; ++q) {
          std::vector<double> query(dim);
          for (std::size_t c = 0; c < dim; ++c) {
            const float raw = of.query(row, kv * heads_per_kv + q / shape.query_tokens,
                                       static_cast<std::int32_t>(c), q % shape.query_tokens);
            query[c] = test::to_element(static_cast<double>(raw), shape.queries);
          }
          of_block.push_back(block < digested ? m.score(query, digest)
                                              : test::selection_model::not_a_number);
        }
      }
    }
    m.take(std::move(logits));
    return m;
  }

  /// Compares scores, masses and lists with the reference, by each of the budgets.
  void compare(backend machine, const consensus_options& options,
               const std::vector<selection_budget>& budgets,
               test::selection_model::rounding round = test::to_float) {
    const consensus_options o =
        pulseinfer::checked(options, test::geometry_of(shape), of.max_blocks());
    CAPTURE(static_cast<int>(shape.kind));
    CAPTURE(static_cast<int>(shape.digest));
    CAPTURE(shape.query_heads);
    CAPTURE(shape.kv_heads);
    CAPTURE(static_cast<int>(o.rule));
    CAPTURE(static_cast<int>(o.normalisation));
    CAPTURE(o.head_groups);
    CAPTURE(o.lambda);
    std::vector<test::selection_model> models;
    for (std::size_t row = 0; row < rows(); ++row) models.push_back(model(row, o, round));
    pulseinfer::consensus_selector<backend> selector(machine, of.digests(), o);
    check_scores(selector, models, o);
    for (const selection_budget& budget : budgets) {
      CAPTURE(static_cast<int>(budget.rule));
      CAPTURE(budget.cap);
      CAPTURE(budget.floor);
      CAPTURE(budget.share);
      lists expected;
      for (const auto& m : models) {
        for (std::int32_t g = 0; g < o.head_groups; ++g) expected.push_back(m.choose(g, budget));
      }
      const auto chosen = selector.select(0, of.batch(), of.queries(), budget, of.stream());
      CHECK(chosen.k == o.budget_blocks);
      CHECK((of.download(chosen) == expected));
    }
  }

  test::selection_shape shape;
  std::int32_t digested;  ///< of each request at most; a multiple of a tile, or all
  scene of;

 private:
  void check_scores(pulseinfer::consensus_selector<backend>& selector,
                    const std::vector<test::selection_model>& models, const consensus_options& o) {
    const auto scores = selector.score(0, of.batch(), of.queries(), of.stream());
    REQUIRE(scores.lists == static_cast<std::int32_t>(rows()) * o.head_groups);
    CHECK((scores.masses != nullptr) == o.is_normalised());
    const auto count = static_cast<std::size_t>(scores.lists);
    const auto stride = static_cast<std::size_t>(scores.keys.row_stride);
    const auto mass_stride = static_cast<std::size_t>(scores.mass_stride);
    const auto keys = of.download(scores.keys.keys, count * stride);
    const auto masses =
        o.is_normalised() ? of.download(scores.masses, count * mass_stride) : std::vector<float>();
    int wrong = 0;
    for (std::size_t list = 0; list < count; ++list) {
      const auto& m = models[list / static_cast<std::size_t>(o.head_groups)];
      const auto group = static_cast<std::int32_t>(list % static_cast<std::size_t>(o.head_groups));
      const std::vector<int> votes = o.has_votes() ? m.votes(group) : std::vector<int>();
      for (std::int32_t id = m.first(); id < m.last(); ++id) {
        const auto at = static_cast<std::size_t>(id);
        const auto score = static_cast<float>(m.joined(group, id));
        const std::uint64_t key = keys[list * stride + at];
        wrong += key != (o.has_votes() ? pulseinfer::vote_key(votes[at], score, id)
                                       : pulseinfer::top_k_key(score, id));
        if (o.is_normalised()) {
          wrong += static_cast<double>(masses[list * mass_stride + at]) != m.mass(group, id);
        }
      }
    }
    CHECK(wrong == 0);
  }
};

/// Contexts around whole tiles, and some that hold nothing.
std::vector<std::int32_t> drawn_contexts(random_source& draw, std::int32_t most) {
  std::vector<std::int32_t> tokens(1 + draw.below(3));
  for (std::int32_t& t : tokens) {
    const std::int32_t blocks =
        one_of(draw, {0, 1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257});
    t = std::min(blocks, most) * block_tokens + below(draw, block_tokens);
  }
  return tokens;
}

consensus_options drawn_options(random_source& draw, const test::selection_shape& s,
                                std::int64_t max_blocks) {
  std::vector<std::int32_t> divisors;
  for (std::int32_t d = 1; d <= s.query_heads; ++d) {
    if (s.query_heads % d == 0) divisors.push_back(d);
  }
  const auto most = static_cast<std::int32_t>(max_blocks);
  const auto few = [&] {
    return draw.one_in(8) ? below(draw, most + 1) : std::min(most, below(draw, 5));
  };
  consensus_options o{.query_heads = s.query_heads,
                      .budget_blocks = one_of(draw, {1, most, 1 + below(draw, most)}),
                      .sink_blocks = few(),
                      .window_blocks = few(),
                      .head_groups = divisors[draw.below(divisors.size())],
                      .lambda = one_of(draw, {0.0f, 0.5f, 0.37f, 4.0f}),
                      .max_rows = static_cast<std::int32_t>(s.tokens.size()),
                      .query_tokens = s.query_tokens};
  o.rule = static_cast<consensus_rule>(draw.below(5));
  o.normalisation = static_cast<score_normalisation>(draw.below(3));
  o.head_blocks = draw.one_in(2) ? 0 : 1 + below(draw, most);
  o.logit_scale = one_of(draw, {0.0f, 0.25f, 3.0f});
  return o;
}

std::vector<selection_budget> drawn_budgets(random_source& draw, const consensus_options& o) {
  const std::int32_t cap = 1 + below(draw, o.budget_blocks);
  const std::int32_t floor = draw.one_in(2) ? 0 : below(draw, cap + 1);
  const double share = one_of(draw, {1.0, 0.5, 0.0625, 0.9375, 0x1p-12});
  std::vector<selection_budget> all = {
      selection_budget::fixed(cap), selection_budget::fixed(o.budget_blocks),
      selection_budget::of_context(one_of(draw, {share, 0.1, 0.3, 0.7}), floor, cap)};
  if (o.is_normalised()) {
    all.push_back(selection_budget::of_mass(share, floor, cap));
    all.push_back(selection_budget::of_worth(one_of(draw, {share, 0x1p-5, 0x1p-7}), floor, cap));
  }
  return all;
}

test::selection_shape drawn_shape(random_source& draw) {
  const std::int32_t kv_heads = one_of(draw, {1, 1, 2, 3, 4});
  return {.query_heads = kv_heads * (1 + below(draw, kv_heads == 1 ? 16 : 5)),
          .kv_heads = kv_heads,
          .head_dim = one_of(draw, {1, 3, 4, 9, 16}),
          .keys = one_of(draw, {element_type::f16, element_type::bf16, element_type::f32}),
          .queries = one_of(draw, {element_type::f16, element_type::bf16, element_type::f32}),
          .kind = static_cast<digest_kind>(draw.below(3)),
          .digest = one_of(draw, {element_type::f32, element_type::f16, element_type::bf16,
                                  element_type::f8_e4m3, element_type::i8}),
          .query_tokens = one_of(draw, {1, 1, 2, 3}),
          .tokens = drawn_contexts(draw, is_cuda ? 66 : 257)};
}

void scatter_specials(subject& s, random_source& draw, std::uint64_t one_in,
                      std::initializer_list<float> specials) {
  const std::int64_t channels = std::int64_t{s.shape.kv_heads} * s.shape.head_dim;
  for (std::size_t request = 0; request < s.rows(); ++request) {
    for (std::int32_t block = 0; block < s.shape.tokens[request] / block_tokens; ++block) {
      for (std::int64_t i = 0; i < block_tokens * channels; ++i) {
        if (!draw.one_in(one_in)) continue;
        s.of.keys().set(0, static_cast<std::int64_t>(request), block, i / channels, i % channels,
                        one_of(draw, specials));
      }
    }
  }
}

/// Sets every key and query to what f(old) makes of it.
template <class F>
void each_number(subject& s, F f) {
  const std::int64_t channels = std::int64_t{s.shape.kv_heads} * s.shape.head_dim;
  for (std::size_t request = 0; request < s.rows(); ++request) {
    const auto r = static_cast<std::int64_t>(request);
    for (std::int32_t block = 0; block < s.shape.tokens[request] / block_tokens; ++block) {
      for (std::int64_t i = 0; i < block_tokens * channels; ++i) {
        const std::int64_t t = i / channels, c = i % channels;
        s.of.keys().set(0, r, block, t, c, f(s.of.keys().key(0, r, block, t, c), false));
      }
    }
    for (std::int32_t head = 0; head < s.shape.query_heads; ++head) {
      for (std::int32_t i = 0; i < s.shape.head_dim * s.shape.query_tokens; ++i) {
        float& q = s.of.query(request, head, i / s.shape.query_tokens, i % s.shape.query_tokens);
        q = f(q, true);
      }
    }
  }
}

}  // namespace

TEST_CASE("reference: drawn shapes, rules, budgets and contexts, to the bit") {
  each(1, [](backend machine, random_source& draw) {
    const test::selection_shape shape = drawn_shape(draw);
    // Of long contexts the tail may have no digest yet.
    subject s(machine, shape, draw.one_in(4) ? 64 : 1 << 20);
    s.of.randomise(draw.next());
    s.upload();
    for (int i = 0; i < 2; ++i) {
      const consensus_options o = drawn_options(draw, shape, s.of.max_blocks());
      s.compare(machine, o, drawn_budgets(draw, o));
    }
  });
}

TEST_CASE("reference: NaN, infinities, zeros, denormals and huge numbers in keys and queries") {
  each(2, [](backend machine, random_source& draw) {
    test::selection_shape shape = drawn_shape(draw);
    shape.keys = shape.queries = element_type::f32;
    for (std::int32_t& t : shape.tokens) t = std::min(t, 70 * block_tokens);
    subject s(machine, shape, 1 << 20);
    s.of.randomise(draw.next());
    switch (draw.below(7)) {
      case 0:
        scatter_specials(s, draw, 40, {inf, -inf, not_a_number, -not_a_number});
        break;
      case 1:
        scatter_specials(s, draw, 4, {0.0f, -0.0f, tiny, -tiny, 1e-39f, huge, -huge, inf, -inf});
        break;
      case 2:  // sums, squares and products that are too large
        each_number(s, [](float old, bool) { return old * 3e38f; });
        break;
      case 3:  // or too small
        each_number(s, [](float old, bool) { return old * 1e-22f; });
        break;
      case 4:
        each_number(s, [&](float old, bool is_query) {
          return is_query ? one_of(draw, {old, old, 0.0f, -0.0f, not_a_number, inf, -inf}) : old;
        });
        break;
      case 5:  // all scores are alike, or nearly
        each_number(s, [&](float old, bool is_query) {
          return is_query ? old : 1.0f + (draw.one_in(9) ? 0x1p-20f : 0.0f);
        });
        break;
      default:
        each_number(s, [&](float, bool) { return one_of(draw, {tiny, -tiny, 0.0f, 1e-40f}); });
        break;
    }
    s.upload();
    for (int i = 0; i < 2; ++i) {
      const consensus_options o = drawn_options(draw, shape, s.of.max_blocks());
      s.compare(machine, o, drawn_budgets(draw, o));
    }
  });
}

TEST_CASE("reference: where floats hold every sum, the choice is that of exact arithmetic") {
  each(3, [](backend machine, random_source& draw) {
    test::selection_shape shape = drawn_shape(draw);
    // Keys are multiples of 2^-3 up to 2, queries of 2^-2 up to 1; 1, 2 or 4 of each are averaged.
    shape.kv_heads = one_of(draw, {1, 2, 4});
    shape.query_heads = shape.kv_heads * one_of(draw, {1, 2, 4, 16});
    shape.kind = one_of(draw, {digest_kind::mean, digest_kind::min_max});
    shape.digest = one_of(draw, {element_type::f32, element_type::f16, element_type::bf16});
    shape.query_tokens = one_of(draw, {1, 2});
    for (std::int32_t& t : shape.tokens) t = std::min(t, 70 * block_tokens);
    subject s(machine, shape, 1 << 20);
    each_number(s, [&](float, bool is_query) {
      return is_query ? static_cast<float>(below(draw, 9) - 4) / 4
                      : static_cast<float>(below(draw, 33) - 16) / 8;
    });
    s.upload();
    consensus_options o = drawn_options(draw, shape, s.of.max_blocks());
    o.rule = one_of(draw, {consensus_rule::max_mean, consensus_rule::mean, consensus_rule::max});
    o.normalisation = score_normalisation::none;
    o.lambda = one_of(draw, {0.0f, 0.5f, 2.0f});
    o.logit_scale = 0.25f;
    s.compare(machine, o, drawn_budgets(draw, o), test::not_at_all);
  });
}

TEST_CASE("reference: every ratio of query heads to KV heads, up to a latent for 16") {
  constexpr bool is_slow = is_simulated || is_cuda;
  backend machine = test::make_backend();
  random_source draw(4);
  for (std::int32_t ratio = is_cuda ? 16 : 1; ratio <= 16; ratio += is_simulated ? 5 : 1) {
    for (const std::int32_t kv_heads : {1, 2, 8}) {
      if ((is_slow && kv_heads == 8) || (is_cuda && kv_heads > 1)) continue;
      const test::selection_shape shape{.query_heads = ratio * kv_heads,
                                        .kv_heads = kv_heads,
                                        .head_dim = kv_heads == 1 ? 36 : 4,  // MLA's are wide
                                        .kind = static_cast<digest_kind>(ratio % 3),
                                        .digest = element_type::bf16,
                                        .tokens = {65 * block_tokens + 1, 9 * block_tokens}};
      subject s(machine, shape, 1 << 20);
      s.of.randomise(static_cast<std::uint64_t>(ratio));
      s.upload();
      for (const std::int32_t groups : {1, kv_heads, ratio * kv_heads}) {
        consensus_options o = drawn_options(draw, shape, s.of.max_blocks());
        o.head_groups = groups;
        s.compare(machine, o, drawn_budgets(draw, o));
      }
    }
  }
}

TEST_CASE(
    "reference: a batch of rows that hold nothing, one block, a tile, one less and one more") {
  const auto run = [](backend machine) {
    subject s(machine,
              {.query_heads = 2,
               .kind = digest_kind::centre_distance,
               .digest = element_type::i8,
               .tokens = is_cuda ? std::vector<std::int32_t>{0, 3, 4, 63 * 4, 64 * 4, 65 * 4}
                                 : std::vector<std::int32_t>{0, 3, 4, 63 * 4, 64 * 4, 65 * 4,
                                                             127 * 4, 128 * 4, 129 * 4}},
              1 << 20);
    const auto most = static_cast<std::int32_t>(s.of.max_blocks());
    s.of.randomise(5);
    s.upload();
    for (const std::int32_t sinks : {0, 1, 65}) {
      if (is_cuda && sinks == 0) continue;
      const consensus_options o{.query_heads = 2,
                                .budget_blocks = most,
                                .sink_blocks = sinks,
                                .window_blocks = 1 - sinks % 2,
                                .max_rows = 9,
                                .normalisation = score_normalisation::context};
      s.compare(machine, o,
                {selection_budget::fixed(1), selection_budget::fixed(most),
                 selection_budget::of_context(0.5, 1, most - 1),
                 selection_budget::of_mass(0.5, 0, most)});
    }
    // No row has a block: nothing is scored, and everything is said.
    subject none(machine, {.query_heads = 1, .tokens = {0, 3}}, 1 << 20);
    none.upload();
    none.compare(machine, {.query_heads = 1, .budget_blocks = 1, .window_blocks = 1, .max_rows = 2},
                 {selection_budget::fixed(1), selection_budget::of_context(0.5, 1, 1)});
  };
  is_cuda ? run(test::make_backend()) : test::each_backend(run);
}

TEST_CASE("reference: a row that is not in use chooses nothing, and disturbs nobody") {
  // As a graph that is replayed has them: the host does not see what the arrays hold.
  test::each_backend([](backend machine) {
    subject s(machine, {.query_heads = 2, .tokens = {30 * block_tokens, 30 * block_tokens}},
              1 << 20);
    s.of.randomise(6);
    s.upload();
    const consensus_options o = pulseinfer::checked(
        {.query_heads = 2, .budget_blocks = 5, .max_rows = 2}, test::geometry_of(s.shape), 30);
    pulseinfer::consensus_selector<backend> selector(machine, s.of.digests(), o);
    pulseinfer::batch_view batch = s.of.batch();
    const test::device_array<std::int32_t, backend> rows(machine, {-1, 0, 0, 30 * block_tokens},
                                                         s.of.stream());
    batch.device_requests = rows.data();
    batch.device_tokens = rows.data() + 2;
    s.of.digests().append(0, batch, 1, s.of.keys().pool(), s.of.keys().device_table(),
                          s.of.stream());
    const auto chosen = selector.select(0, batch, s.of.queries(), s.of.stream());
    CHECK((s.of.download(chosen) ==
           lists{{}, s.model(1, o, test::to_float).choose(0, selection_budget::fixed(5))}));
  });
}
