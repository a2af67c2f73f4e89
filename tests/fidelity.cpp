// SPDX-License-Identifier: Apache-2.0
// The parts of the fidelity study (examples/fidelity) that compute: on numbers done by hand, and
// its oracle against the plainest loop.
#include "../examples/fidelity/measures.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../examples/fidelity/book.hpp"
#include "../examples/fidelity/figures.hpp"
#include "../examples/fidelity/oracle.hpp"
#include "../examples/fidelity/plan.hpp"
#include "../examples/fidelity/svg.hpp"

TEST_CASE("lists of blocks are compared as sets") {
  using list = std::vector<std::int32_t>;
  const list a{1, 3, 5, 7};
  const list b{2, 3, 4, 7, 9};
  const list none;
  CHECK(fidelity::overlap(a, b) == 2);
  CHECK(fidelity::overlap(a, a) == 4);
  CHECK(fidelity::overlap(a, none) == 0);
  CHECK(fidelity::overlap(none, none) == 0);
  const std::vector<std::span<const std::int32_t>> lists{a, b, none};
  CHECK(fidelity::union_of(lists) == list{1, 2, 3, 4, 5, 7, 9});
  CHECK(fidelity::union_of({}).empty());
}

TEST_CASE("the largest values, of equal ones the lower index") {
  using list = std::vector<std::int32_t>;
  const std::vector<double> values{9, 1, 5, 5, 2, 5, 8};
  CHECK(fidelity::largest(values, 0, 7, 3) == list{0, 2, 6});
  CHECK(fidelity::largest(values, 1, 6, 2) == list{2, 3});
  CHECK(fidelity::largest(values, 1, 6, 0).empty());
  CHECK(fidelity::largest(values, 1, 6, 9) == list{1, 2, 3, 4, 5});
  CHECK(fidelity::largest(values, 4, 4, 2).empty());
}

TEST_CASE("means and quantiles") {
  const std::vector<float> values{4, 1, 3, 2, 5};
  CHECK(fidelity::mean(values) == 3);
  CHECK(fidelity::quantile(values, 0) == 1);
  CHECK(fidelity::quantile(values, 0.1) == 1);
  CHECK(fidelity::quantile(values, 0.5) == 3);
  CHECK(fidelity::quantile(values, 1) == 5);
  CHECK(fidelity::quantile(std::vector<float>{7}, 0.5) == 7);
  CHECK(std::isnan(fidelity::quantile({}, 0.5)));
  CHECK(std::isnan(fidelity::mean({})));
}

TEST_CASE("what a budget saves at the same mass") {
  const std::vector<fidelity::point> fixed{{8, 0.5}, {32, 0.7}, {128, 0.9}};
  CHECK(fidelity::blocks_at(fixed, 0.5) == doctest::Approx(8));
  CHECK(fidelity::blocks_at(fixed, 0.6) == doctest::Approx(16));  // half way in the logarithm
  CHECK(fidelity::blocks_at(fixed, 0.9) == doctest::Approx(128));
  CHECK(std::isnan(fidelity::blocks_at(fixed, 0.91)));
  CHECK(std::isnan(fidelity::blocks_at(fixed, 0.49)));
  CHECK(fidelity::saving(fixed, {12, 0.6}) == doctest::Approx(0.25));
  CHECK(fidelity::saving(fixed, {20, 0.6}) == doctest::Approx(-0.25));
  const std::vector<fidelity::point> level{{8, 0.5}, {16, 0.5}};
  CHECK(fidelity::blocks_at(level, 0.5) == doctest::Approx(8));
}

TEST_CASE("a number of the command line") {
  CHECK(fidelity::whole_number("--threads", "12", 1) == 12);
  for (const char* wrong : {"", "0", "-1", "two", "1.5", "1234567890"}) {
    CHECK_THROWS_WITH_AS((void)fidelity::whole_number("--threads", wrong, 1),
                         ("fidelity: --threads is '" + std::string(wrong) +
                          "', expected a whole number of at least 1")
                             .c_str(),
                         std::invalid_argument);
  }
}

TEST_CASE("a plot has its points within its axes") {
  CHECK(fidelity::log_ticks(3, 60) == std::vector<double>{5, 10, 20, 50});
  const auto near = [](const std::vector<double>& is, const std::vector<double>& should) {
    return std::equal(is.begin(), is.end(), should.begin(), should.end(),
                      [](double a, double b) { return a == doctest::Approx(b); });
  };
  CHECK(near(fidelity::linear_ticks(0.69, 0.93), {0.7, 0.75, 0.8, 0.85, 0.9}));
  CHECK(near(fidelity::linear_ticks(-1, 9), {0, 2, 4, 6, 8}));
  CHECK(near(fidelity::linear_ticks(0, 4), {0, 1, 2, 3, 4}));
  CHECK_THROWS_AS((void)fidelity::svg_plot("t", "n", "x", "y", {}), std::invalid_argument);
  CHECK_THROWS_AS((void)fidelity::svg_plot("t", "n", "x", "y", {{"zero", {{0, 1}}}}),
                  std::invalid_argument);
  const std::string plot = fidelity::svg_plot(
      "a < b & c", "note", "x", "y", {{"one", {{1, 0.5}, {10, 0.9}}, {"1/2"}}, {"two", {{3, 1}}}});
  CHECK(plot.starts_with("<svg "));
  CHECK(plot.ends_with("</svg>\n"));
  CHECK(plot.find("a &lt; b &amp; c") != std::string::npos);
  std::size_t circles = 0;
  for (std::size_t at = plot.find("<circle"); at != std::string::npos;
       at = plot.find("<circle", at + 1)) {
    ++circles;
    const double x = std::stod(plot.substr(plot.find("cx=\"", at) + 4));
    const double y = std::stod(plot.substr(plot.find("cy=\"", at) + 4));
    CHECK((x >= 70 && x <= 680 && y >= 56 && y <= 420));
  }
  CHECK(circles == 3);
  CHECK(plot.find(">1/2</text>") != std::string::npos);
  CHECK(plot.find(">0.50</text>") == std::string::npos);  // steps of a tenth have one digit
  CHECK(plot.find(">0.5</text>") != std::string::npos);
  CHECK(plot.find(">1.0</text>") != std::string::npos);
}

namespace {

/// Two KV heads of two query heads each, 16-token blocks, a context that ends within a block.
demo::capture small_capture(std::int64_t prompt, std::int64_t steps) {
  demo::capture c;
  c.geometry = {.layers = 1,
                .kv_heads = 2,
                .head_dim = 8,
                .block_tokens = 16,
                .element = pulseinfer::element_type::f16};
  c.query_heads = 4;
  c.prompt_tokens = prompt;
  c.steps = steps;
  c.tokens = prompt + steps;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  const auto f16s = [&] {
    std::vector<std::uint16_t> out(static_cast<std::size_t>(c.tokens * 16));
    for (auto& v : out) v = pulseinfer::f16_from_float(normal(random));
    return out;
  };
  c.keys.push_back(f16s());
  c.values.push_back(f16s());
  c.queries.emplace_back(static_cast<std::size_t>(steps * 32));
  for (float& q : c.queries[0]) q = 2 * normal(random);
  return c;
}

}  // namespace

TEST_CASE("lists of a step are joined, all of them or those of a KV head") {
  fidelity::chosen_lists lists{.k = 2, .per_step = 4, .ids = {}, .counts = {}};
  using list = std::vector<std::int32_t>;
  for (const list& l : {list{1, 2}, {2, 3}, {7}, {}, {4, 5}, {4, 5}, {4, 5}, {4, 5}}) lists.add(l);
  CHECK(lists.steps() == 2);
  const auto same = [](std::span<const std::int32_t> a, const list& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  };
  const fidelity::chosen_lists one = fidelity::joined(lists, 1);
  CHECK(one.k == 4);
  CHECK(same(one.list(0, 0), {1, 2, 3, 7}));
  CHECK(same(one.list(1, 0), {4, 5}));
  const fidelity::chosen_lists two = fidelity::joined(lists, 2);
  CHECK(two.k == 3);
  CHECK(same(two.list(0, 0), {1, 2, 3}));
  CHECK(same(two.list(0, 1), {7}));
}

TEST_CASE("the library's selector and hot buffer, as the study drives them") {
  const demo::capture c = small_capture(300, 3);  // 18 full blocks, 15 of them to choose from
  fidelity::layer_chooser chooser(c, 0);
  CHECK(chooser.end_of_choice(0) == 16);
  const std::vector<std::int64_t> steps{0, 2};
  fidelity::choice how{.digest = pulseinfer::digest_kind::mean,
                       .element = pulseinfer::element_type::f32,
                       .rule = pulseinfer::consensus_rule::mean};
  for (const auto& [over, per_step] : {std::pair{fidelity::scope::layer, 1},
                                       {fidelity::scope::kv_head, 2},
                                       {fidelity::scope::query_head, 4}}) {
    how.over = over;
    const fidelity::chosen_lists lists = chooser.choose(how, 5, steps, c.queries[0]);
    REQUIRE(lists.per_step == per_step);
    REQUIRE(lists.steps() == 2);
    for (std::int64_t i = 0; i < per_step; ++i) {
      // The best of the digests, done over: q . mean, summed over the heads of the list.
      const std::int64_t heads = 4 / per_step;
      std::vector<double> scores(18);
      for (std::int64_t h = i * heads; h < (i + 1) * heads; ++h) {
        for (std::int64_t t = 0; t < 18 * 16; ++t) {
          for (std::int64_t d = 0; d < 8; ++d) {
            scores[static_cast<std::size_t>(t / 16)] +=
                double{c.queries[0][static_cast<std::size_t>((2 * 4 + h) * 8 + d)]} *
                pulseinfer::float_from_f16(
                    c.keys[0][static_cast<std::size_t>((t * 2 + h / 2) * 8 + d)]);
          }
        }
      }
      const auto expected = fidelity::largest(scores, 1, 16, 5);
      const auto is = lists.list(1, i);
      CHECK(std::equal(is.begin(), is.end(), expected.begin(), expected.end()));
    }
  }
  how.over = fidelity::scope::layer;
  how.normalisation = pulseinfer::score_normalisation::context;
  how.cut = pulseinfer::budget_rule::mass;
  std::size_t length = 0;
  for (const double share : {0.01, 0.5, 0.9, 1.0}) {
    how.share = share;
    const auto cut = chooser.choose(how, 15, steps, c.queries[0]);
    CHECK(cut.list(0, 0).size() >= std::max<std::size_t>(length, fidelity::cut_floor));
    length = cut.list(0, 0).size();
  }
  CHECK(length == 15);
  how.cut = pulseinfer::budget_rule::worth;
  how.share = 1e-9;
  CHECK(chooser.choose(how, 15, steps, c.queries[0]).list(1, 0).size() == 15);
  how.share = 1;
  CHECK(chooser.choose(how, 15, steps, c.queries[0]).list(1, 0).size() == fidelity::cut_floor);

  fidelity::chosen_lists lists{.k = 2, .per_step = 1, .ids = {}, .counts = {}};
  for (const std::vector<std::int32_t>& l : {std::vector<std::int32_t>{1, 2}, {1, 3}, {2, 3}}) {
    lists.add(l);
  }
  const auto recent = pulseinfer::hot_replacement::least_recent;
  CHECK(chooser.misses(lists, 3, recent) == std::vector<std::int64_t>{2, 1, 0});
  CHECK(chooser.misses(lists, 2, recent) == std::vector<std::int64_t>{2, 1, 1});

  // Guessed are {1, 3}, which is right, then {3, 4}: 4 comes in vain, 2 is there already.
  fidelity::chosen_lists guesses{.k = 2, .per_step = 1, .ids = {}, .counts = {}};
  for (const std::vector<std::int32_t>& l : {std::vector<std::int32_t>{7, 8}, {1, 3}, {3, 4}}) {
    guesses.add(l);
  }
  const pulseinfer::residency_counts ahead = chooser.recalled_ahead(lists, guesses, 5);
  CHECK(ahead == pulseinfer::residency_counts{
                     .chosen = 4, .missed = 0, .brought = 2, .used = 1, .wasted = 1});
}

TEST_CASE("what the study measures as default is the library's, budget and all") {
  const demo::capture c = small_capture(300, 1);
  fidelity::layer_chooser chooser(c, 0);
  const std::vector<std::int64_t> steps{0};
  const fidelity::chosen_lists told = chooser.choose(fidelity::recommended, 0, steps, c.queries[0]);
  CHECK(told.k == 19);                  // no more than the text has
  CHECK(told.list(0, 0).size() == 15);  // the floor is 16, these may be chosen
  CHECK(fidelity::recommended == fidelity::choice{});
  CHECK(fidelity::said(fidelity::recommended) == "min_max in i8, mean, one list a layer");
  CHECK(fidelity::said(fidelity::guide) == "mean in f32, max + 0.5 mean, one list a layer");
}

TEST_CASE("what is read of true masses, and what is measured of it") {
  const demo::capture c = small_capture(300, 3);
  const fidelity::oracle truth(c, 0, 1);
  fidelity::layer_chooser chooser(c, 0);
  const std::vector<std::int64_t> steps{0, 1, 2};
  const auto all = fidelity::choose_exactly(truth, chooser, fidelity::scope::layer, 2, 15, steps);
  CHECK(fidelity::mass_read(truth, 1, all, 1, 16) == doctest::Approx(1));
  const auto own =
      fidelity::choose_exactly(truth, chooser, fidelity::scope::query_head, 2, 4, steps);
  const auto one = fidelity::choose_exactly(truth, chooser, fidelity::scope::layer, 2, 4, steps);
  CHECK(own.per_step == 4);
  CHECK(fidelity::mass_read(truth, 1, own, 1, 16) >= fidelity::mass_read(truth, 1, one, 1, 16));

  const fidelity::run what{
      .how = {}, .budget = 4, .steps = fidelity::steps_of::every, .through = {{2.0}}};
  const fidelity::outcome o = fidelity::measure(what, truth, chooser, one, steps, 2);
  CHECK(o.mass.size() == 3);
  CHECK(o.chosen == 12);
  CHECK(o.layer_union == 12);
  CHECK(o.asked == 8);
  CHECK(o.later == 2);
  CHECK(o.missed.at(0) == static_cast<double>(o.misses.at(0)[1] + o.misses.at(0)[2]));
  CHECK(o.shares[0] == 2);
  CHECK(o.errors == 12);
  const fidelity::outcome heads = fidelity::measure(what, truth, chooser, own, steps, 2);
  CHECK(heads.layer_union >= 12);
  CHECK(heads.chosen <= heads.layer_union);  // of a block that one KV head reads, a half
  fidelity::outcome sum = o;
  sum.add(heads);
  CHECK(sum.mass.size() == 6);
  CHECK(sum.chosen == o.chosen + heads.chosen);
  CHECK(sum.missed.at(0) == o.missed.at(0) + heads.missed.at(0));
}

TEST_CASE("a book plans what it is asked for, once") {
  fidelity::book book;
  const fidelity::run r{.how = {}, .budget = 4, .through = {}};
  fidelity::run with = r;
  with.through = {{2.0}, {3.0}};
  with.keep_lists = true;
  fidelity::run other = r;
  other.budget = 5;
  CHECK(book(r).mass.empty());
  CHECK(book.find(with) == 0);
  CHECK(book.find(other) == 1);
  REQUIRE(book.plan().size() == 2);
  CHECK(book.plan()[0].through.size() == 2);
  CHECK(book.plan()[0].keep_lists);

  std::vector<fidelity::text_result> texts(3);
  for (std::size_t t = 0; t < 3; ++t) {
    texts[t].all.resize(2);
    texts[t].all[0].mass = {static_cast<float>(t)};
    texts[t].all[0].missed = {1, 10};
  }
  texts[2].for_length = true;
  book.open(texts);
  CHECK(book(r).mean_mass() == 0.5);
  CHECK(book.of(2, r).mean_mass() == 2);
  CHECK(book.missed(book(r), r, {3.0}) == 20);
  other.budget = 6;
  CHECK_THROWS_AS((void)book(other), std::logic_error);
}

TEST_CASE("layers run beside each other, and what one throws comes out") {
  std::vector<int> done(20);
  fidelity::in_parallel(done.size(), 3, [&](std::size_t i) { done[i] += 1; });
  CHECK(std::count(done.begin(), done.end(), 1) == 20);
  CHECK_THROWS_AS(fidelity::in_parallel(4, 2,
                                        [](std::size_t i) {
                                          if (i == 2) throw std::runtime_error("two");
                                        }),
                  std::runtime_error);
}

TEST_CASE("the oracle is the softmax, block by block") {
  const demo::capture c = small_capture(300, 3);
  const fidelity::oracle truth(c, 0, 2);
  for (std::int64_t s = 0; s < 3; ++s) {
    const std::int64_t tokens = 301 + s;
    CHECK(truth.blocks(s) == 19);
    CHECK(truth.has_output(s) == (s != 1));
    for (std::int64_t h = 0; h < 4; ++h) {
      std::vector<double> weights;
      double total = 0;
      for (std::int64_t t = 0; t < tokens; ++t) {
        double dot = 0;
        for (std::int64_t i = 0; i < 8; ++i) {
          dot += double{c.queries[0][static_cast<std::size_t>((s * 4 + h) * 8 + i)]} *
                 pulseinfer::float_from_f16(
                     c.keys[0][static_cast<std::size_t>((t * 2 + h / 2) * 8 + i)]);
        }
        weights.push_back(std::exp(dot / std::sqrt(8.0)));
        total += weights.back();
      }
      for (std::int64_t b = 0; b < 19; ++b) {
        double mass = 0;
        for (std::int64_t t = b * 16; t < std::min<std::int64_t>(b * 16 + 16, tokens); ++t) {
          mass += weights[static_cast<std::size_t>(t)] / total;
        }
        CHECK(truth.mass(s, h)[static_cast<std::size_t>(b)] == doctest::Approx(mass).epsilon(1e-4));
      }
      if (!truth.has_output(s)) continue;
      // Without block 5: the others' weights grow, the output moves.
      std::vector<double> full(8);
      std::vector<double> some(8);
      double read = 0;
      for (std::int64_t t = 0; t < tokens; ++t) {
        const double w = weights[static_cast<std::size_t>(t)] / total;
        if (t / 16 != 5) read += w;
        for (std::size_t i = 0; i < 8; ++i) {
          const double v = pulseinfer::float_from_f16(
              c.values[0][static_cast<std::size_t>((t * 2 + h / 2) * 8) + i]);
          full[i] += w * v;
          if (t / 16 != 5) some[i] += w * v;
        }
      }
      double off = 0;
      double norm = 0;
      for (std::size_t i = 0; i < 8; ++i) {
        off += (some[i] / read - full[i]) * (some[i] / read - full[i]);
        norm += full[i] * full[i];
      }
      const std::vector<std::int32_t> chosen{4, 6};
      CHECK(truth.output_error(s, h, chosen, 4, 7) ==
            doctest::Approx(std::sqrt(off / norm)).epsilon(1e-3));
      CHECK(truth.output_error(s, h, {}, 4, 4) == doctest::Approx(0).epsilon(1e-5));
    }
  }
}

TEST_CASE("the oracle's mean is over all heads") {
  const demo::capture c = small_capture(40, 1);
  const fidelity::oracle truth(c, 0, 1);
  double all = 0;
  for (std::size_t b = 0; b < 3; ++b) {
    double mean = 0;
    for (std::int64_t h = 0; h < 4; ++h) mean += truth.mass(0, h)[b] / 4;
    CHECK(truth.mean_mass(0)[b] == doctest::Approx(mean));
    all += truth.mean_mass(0)[b];
  }
  CHECK(all == doctest::Approx(1));
}
