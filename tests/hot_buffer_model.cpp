// SPDX-License-Identifier: Apache-2.0
/// @file
/// The hot buffer with its transfers against a slow model, step after step: hits, misses and their
/// victims, page tables, counts, and the bytes in the pages. Include the backend's support header
/// first.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>
#include <vector>

#include "pulseinfer/consensus.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/detail/use_rank.hpp"
#include "support/pull_rig.hpp"
#include "support/rounds.hpp"
#include "support/selection_scene.hpp"

namespace {

using backend = test::backend;
using rig = test::pull_rig<backend>;
using pulseinfer::hot_replacement;
using pulseinfer::residency_counts;
using pulseinfer::sequence_id;
using pulseinfer::take_back_outcome;
using pulseinfer::detail::random_source;
using ints = std::vector<std::int32_t>;

constexpr bool is_simulated = std::string_view(test::backend_name) == "simulated";
constexpr bool is_cuda = std::string_view(test::backend_name) == "cuda";
constexpr std::int32_t stored_blocks = 20;  ///< of each sequence; it is asked for a few more
constexpr std::int32_t known_blocks = 24;

ints blocks(std::int32_t count) {
  ints all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// What a request has of a layer, by the rules in words.
class model {
 public:
  struct slot {
    std::int32_t page = 0;
    std::int32_t block = -1;
    std::int32_t rank = 0;       ///< the lowest goes first
    bool used_last = false;      ///< the last true choice had it
    bool brought_since = false;  ///< a guess brought it, since the last true choice
    bool in_step = false;
  };
  struct miss {
    std::int32_t block, page, victim;
    bool operator==(const miss&) const = default;
  };

  model(const ints& pages, std::int32_t usable, hot_replacement rule, std::int32_t half_life) {
    for (std::int32_t i = 0; i < usable; ++i)
      slots.push_back({.page = pages[static_cast<std::size_t>(i)]});
    pulseinfer::hot_buffer_options o;
    o.replacement = rule;
    o.half_life = half_life;
    ranks = pulseinfer::detail::ranks_of(o);
  }

  /// Pages in the order of what was chosen, -1 where a guess found no place; and the misses.
  std::pair<ints, std::vector<miss>> resolve(const ints& chosen, bool is_guess, std::int32_t& clock,
                                             residency_counts& counts) {
    const std::int32_t now = is_guess ? clock : clock + ranks.per_step;
    for (slot& s : slots) s.in_step = std::count(chosen.begin(), chosen.end(), s.block) > 0;
    // Who may give up a page, the one that is worth least first.
    std::vector<std::size_t> victims;
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const slot& s = slots[i];
      const bool spared = is_guess && (s.used_last || s.brought_since);
      if (!s.in_step && !spared) victims.push_back(i);
    }
    std::stable_sort(victims.begin(), victims.end(),
                     [&](std::size_t a, std::size_t b) { return slots[a].rank < slots[b].rank; });
    const auto missing = static_cast<std::size_t>(std::count_if(
        chosen.begin(), chosen.end(), [&](std::int32_t b) { return at(b) == nullptr; }));
    if (victims.size() > missing) victims.resize(missing);
    REQUIRE((is_guess || victims.size() == missing));
    std::sort(victims.begin(), victims.end());

    if (!is_guess) {
      for (slot& s : slots) {
        if (s.brought_since && s.in_step) ++counts.used;
        if (s.brought_since && !s.in_step) ++counts.wasted;
        s.used_last = s.in_step;
        s.brought_since = false;
        if (s.in_step) s.rank = ranks.again(s.rank, now);
      }
    }
    ints pages;
    std::vector<miss> misses;
    for (const std::int32_t block : chosen) {
      if (const slot* const s = at(block)) {
        pages.push_back(s->page);
      } else if (misses.size() < victims.size()) {
        slot& s2 = slots[victims[misses.size()]];
        misses.push_back({block, s2.page, s2.block});
        s2.block = block;
        s2.rank = is_guess ? std::max(now - ranks.per_step, 1) : now;
        s2.used_last = !is_guess;
        s2.brought_since = is_guess;
        pages.push_back(s2.page);
      } else {
        pages.push_back(-1);
      }
    }
    if (is_guess) {
      counts.brought += static_cast<std::int64_t>(misses.size());
    } else {
      counts.chosen += static_cast<std::int64_t>(chosen.size());
      counts.missed += static_cast<std::int64_t>(misses.size());
    }
    clock = now;
    return {pages, misses};
  }
  void forget(std::int32_t block, residency_counts& counts) {
    for (slot& s : slots) {
      if (s.block != block) continue;
      if (s.brought_since) --counts.brought;
      s = {.page = s.page};
    }
  }

  std::vector<slot> slots;
  pulseinfer::detail::use_rank ranks;

 private:
  [[nodiscard]] const slot* at(std::int32_t block) const {
    for (const slot& s : slots) {
      if (s.block == block) return &s;
    }
    return nullptr;
  }
};

/// A rig, and a model of each of its layers and requests.
class world {
 public:
  static constexpr std::int32_t requests = 4;

  world(backend machine, const test::rig_options& o, random_source& draw)
      : r(machine, o), options_(o), draw_(draw) {
    for (std::int32_t request = 0; request < requests; ++request) {
      sequences_.push_back(r.stored(request + 1, blocks(stored_blocks)));
      lend(request);
    }
    for (auto& layer : clocks_) layer.assign(requests, 0);
    for (auto& layer : counts_) layer.assign(requests, {});
    for (auto& layer : unsaid_) layer.assign(requests, 0);
  }

  /// One step, or something else that an engine does.
  void act() {
    const auto layer = static_cast<std::int32_t>(draw_.below(2));
    switch (draw_.below(options_.predicts ? 10 : 8)) {
      case 0:
        return give_and_take();
      case 1:
        return given_up(layer);
      case 2:
      case 3:
        return pulled(layer);
      case 4:
        return replayed(layer);
      case 8:
      case 9:
        return guessed(layer);
      default:
        return recalled(layer);
    }
  }
  void check_counts() {
    r.machine.sync(r.stream);
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      for (std::int32_t request = 0; request < requests; ++request) {
        const residency_counts found = r.hot.counts(layer, request);
        CHECK((found == counts(layer, request)));
        CHECK(found.brought >= found.used + found.wasted);
      }
    }
  }

  rig r;

 private:
  struct rows {
    ints requests;
    std::vector<ints> chosen;
    std::vector<sequence_id> sequences;
  };
  struct expectation {
    std::vector<ints> pages;
    std::vector<std::vector<model::miss>> misses;
  };

  void lend(std::int32_t request) {
    // Some pages of the request's own 12, in any order.
    ints pages(12);
    std::iota(pages.begin(), pages.end(), request * 12);
    for (std::size_t i = pages.size(); i > 1; --i) {
      std::swap(pages[i - 1], pages[static_cast<std::size_t>(draw_.below(i))]);
    }
    const auto most = static_cast<std::uint64_t>(options_.pages_per_request - options_.budget + 1);
    pages.resize(static_cast<std::size_t>(options_.budget) + draw_.below(most));
    r.hot.lend(request, pages, r.stream);
    for (std::size_t layer = 0; layer < 2; ++layer) {
      auto usable = static_cast<std::int32_t>(pages.size());
      if (!options_.pages_of_layer.empty())
        usable = std::min(usable, options_.pages_of_layer[layer]);
      models_[layer].resize(requests, model({}, 0, options_.replacement, 8));
      models_[layer][static_cast<std::size_t>(request)] =
          model(pages, usable, options_.replacement, 8);
    }
  }
  model& of(std::int32_t layer, std::int32_t request) {
    return models_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(request)];
  }
  residency_counts& counts(std::int32_t layer, std::int32_t request) {
    return counts_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(request)];
  }
  std::int32_t& clock(std::int32_t layer, std::int32_t request) {
    return clocks_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(request)];
  }

  /// None to k blocks: mostly those of a few.
  ints drawn_choice() {
    const auto range = static_cast<std::uint64_t>(draw_.one_in(3) ? known_blocks : 7);
    std::size_t count = static_cast<std::size_t>(options_.budget);
    if (draw_.one_in(3)) count = static_cast<std::size_t>(draw_.below(count + 1));
    std::set<std::int32_t> found;
    while (found.size() < count) found.insert(static_cast<std::int32_t>(draw_.below(range)));
    return {found.begin(), found.end()};
  }
  rows drawn_rows() {
    rows all;
    const std::size_t count = draw_.one_in(9) ? 0 : 1 + static_cast<std::size_t>(draw_.below(3));
    std::set<std::int32_t> taken;
    while (taken.size() < count) {
      const auto request = static_cast<std::int32_t>(draw_.below(requests));
      if (!taken.insert(request).second) continue;
      all.requests.push_back(request);
      all.chosen.push_back(drawn_choice());
      all.sequences.push_back(sequences_[static_cast<std::size_t>(request)]);
    }
    return all;
  }
  expectation expect(std::int32_t layer, const rows& of_step, bool is_guess = false) {
    expectation e;
    for (std::size_t row = 0; row < of_step.requests.size(); ++row) {
      const std::int32_t request = of_step.requests[row];
      std::int64_t& unsaid =
          unsaid_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(request)];
      if (!is_guess) counts(layer, request).wasted += std::exchange(unsaid, 0);
      auto [pages, misses] = of(layer, request)
                                 .resolve(of_step.chosen[row], is_guess, clock(layer, request),
                                          counts(layer, request));
      pages.resize(static_cast<std::size_t>(options_.budget), -1);
      e.pages.push_back(pages);
      e.misses.push_back(misses);
    }
    return e;
  }
  /// The misses of a step; its kernel is done.
  void check_misses(const pulseinfer::resolved_step& step, const expectation& e) {
    REQUIRE(step.rows == static_cast<std::int32_t>(e.misses.size()));
    for (std::int32_t row = 0; row < step.rows; ++row) {
      std::vector<model::miss> found;
      for (const auto& miss : step.misses(row)) {
        found.push_back({miss.block, miss.page, miss.victim});
      }
      CHECK((found == e.misses[static_cast<std::size_t>(row)]));
    }
  }
  /// Every page that is expected holds the block that was chosen, come now or long ago.
  void check_bytes(const pulseinfer::resolved_step& step, const rows& now, const expectation& e) {
    r.pages.download(r.stream);
    for (std::size_t row = 0; row < now.requests.size(); ++row) {
      for (std::size_t i = 0; i < now.chosen[row].size(); ++i) {
        const std::int32_t page = e.pages[row][i];
        if (page < 0) continue;
        CHECK((r.pages.get(step.layer, page) ==
               test::stamp(rig::geometry, now.requests[row] + 1, step.layer, now.chosen[row][i])));
      }
    }
  }
  /// Forgets the misses that the store lacks, or all; true if there are some. They leave the table.
  bool forget(std::int32_t layer, const rows& now, expectation& e, bool all = false) {
    bool lacks = false;
    for (std::size_t row = 0; row < e.misses.size(); ++row) {
      const std::int32_t request = now.requests[row];
      for (const model::miss& miss : e.misses[row]) {
        if (miss.block < stored_blocks && !all) continue;
        lacks = true;
        of(layer, request).forget(miss.block, counts(layer, request));
        std::replace(e.pages[row].begin(), e.pages[row].end(), miss.page, -1);
      }
    }
    return lacks;
  }
  /// Whoever goes on as if all of a step had come is stopped, and nothing changes.
  void check_refused(std::int32_t layer, const rows& now) {
    if (now.requests.empty()) return;
    const auto chosen = r.choice(now.chosen);
    CHECK_THROWS_AS((void)r.hot.resolve(layer, r.rows_of(now.requests), chosen, r.stream),
                    std::logic_error);
  }

  void recall(const pulseinfer::resolved_step& step, const rows& now, expectation& e) {
    {
      auto ticket = r.mover.recall(step, now.sequences, r.stream);
      REQUIRE(ticket.has_value());
      ticket->sync();
    }
    check_misses(step, e);
    CHECK((r.pages_of(step) == e.pages));
    if (forget(step.layer, now, e)) {
      CHECK(step.is_open());
      check_refused(step.layer, now);
      r.hot.discard(step, r.rows_of(now.requests), r.stream);
    }
    CHECK_FALSE(step.is_open());
    check_bytes(step, now, e);
  }
  void recalled(std::int32_t layer) {
    const rows now = drawn_rows();
    expectation e = expect(layer, now);
    const auto step = r.resolve(layer, now.requests, now.chosen);
    REQUIRE(step.has_value());
    check_refused(layer, now);
    recall(*step, now, e);
  }
  void pulled(std::int32_t layer) {
    const rows now = drawn_rows();
    expectation e = expect(layer, now);
    const auto step = r.pull(layer, now.requests, now.sequences, now.chosen);
    REQUIRE(step.has_value());
    check_misses(*step, e);
    (void)forget(layer, now, e);
    CHECK((r.pages_of(*step) == e.pages));
    CHECK_FALSE(step->is_open());
    check_bytes(*step, now, e);
  }
  /// A step that nobody recalls.
  void given_up(std::int32_t layer) {
    const rows now = drawn_rows();
    expectation e = expect(layer, now);
    const auto step = r.resolve(layer, now.requests, now.chosen);
    REQUIRE(step.has_value());
    r.machine.sync(r.stream);
    check_misses(*step, e);
    CHECK((r.pages_of(*step) == e.pages));
    if (!now.requests.empty()) {
      CHECK(r.hot.try_take_back(now.requests[0], r.stream) == take_back_outcome::in_use);
      ints others = now.requests;
      others.back() = (others.back() + 1) % requests;
      CHECK_THROWS_AS(r.hot.discard(*step, r.rows_of(others), r.stream), std::invalid_argument);
    }
    (void)forget(layer, now, e, true);
    r.hot.discard(*step, r.rows_of(now.requests), r.stream);
    check_bytes(*step, now, e);
  }
  /// A held step, run twice; one of its rows may be out of use.
  void replayed(std::int32_t layer) {
    const auto held = r.hot.hold_step(layer, 3);
    REQUIRE(held.has_value());
    for (int run = 0; run < 2; ++run) {
      rows now = drawn_rows();
      expectation e = expect(layer, now);
      while (now.requests.size() < 3) {
        now.requests.push_back(-1);
        now.chosen.push_back(drawn_choice());
        now.sequences.push_back({});
        e.pages.emplace_back(static_cast<std::size_t>(options_.budget), -1);
        e.misses.emplace_back();
      }
      const auto chosen = r.choice(now.chosen);
      test::device_array<std::int32_t, backend> device_rows(r.machine, now.requests, r.stream);
      r.hot.resolve_held(*held, device_rows.data(), chosen, r.stream);
      r.puller.pull(r.hot, *held, device_rows.data(), r.views(layer, now.sequences), r.stream);
      r.machine.sync(r.stream);
      check_misses(*held, e);
      (void)forget(layer, now, e);
      CHECK((r.pages_of(*held) == e.pages));
      check_bytes(*held, now, e);
    }
    r.hot.drop_step(*held);
  }
  /// A guess that is recalled before anything is chosen.
  void guessed(std::int32_t layer) {
    const rows now = drawn_rows();
    expectation e = expect(layer, now, true);
    const auto chosen = r.choice(now.chosen);
    const auto step = r.hot.resolve_predicted(layer, r.rows_of(now.requests), chosen, r.stream);
    REQUIRE(step.has_value());
    check_refused(layer, now);
    recall(*step, now, e);
  }
  void give_and_take() {
    const auto request = static_cast<std::int32_t>(draw_.below(requests));
    CHECK(r.hot.try_take_back(request, r.stream) == take_back_outcome::taken);
    CHECK_THROWS_AS((void)r.resolve(0, {request}, {{1}}), std::invalid_argument);
    CHECK_THROWS_AS(
        (void)r.resolve(0, {(request + 1) % requests, (request + 1) % requests}, {{1}, {2}}),
        std::invalid_argument);
    for (std::int32_t layer = 0; layer < 2; ++layer) {
      for (const auto& slot : of(layer, request).slots) {
        unsaid_[static_cast<std::size_t>(layer)][static_cast<std::size_t>(request)] +=
            slot.brought_since ? 1 : 0;
      }
    }
    lend(request);
  }

  test::rig_options options_;
  random_source& draw_;
  std::vector<sequence_id> sequences_;
  std::array<std::vector<model>, 2> models_;  ///< [layer][request]
  std::array<std::vector<std::int32_t>, 2> clocks_;
  std::array<std::vector<residency_counts>, 2> counts_;
  /// [layer][request] what was brought, and taken back before anybody could choose it: it is wasted
  /// once there is a choice.
  std::array<std::vector<std::int64_t>, 2> unsaid_;
};

/// Calls f(machine, draw), never twice with the same numbers.
template <class F>
void each(std::uint64_t seed, F f) {
  std::uint64_t machines = 0;
  test::each_backend([&](backend machine) {
    random_source draw(seed + 100 * machines++);
    f(machine, draw);
  });
}
int steps() {
  return std::max(test::rounds(is_simulated ? 12
                               : is_cuda    ? 12
                                            : 120,
                               is_simulated ? 400
                               : is_cuda    ? 200
                                            : 20'000),
                  8);
}

}  // namespace

TEST_CASE("hot buffer model: recalls, pulls, replays, guesses and discards, step after step") {
  each(1, [](backend machine, random_source& draw) {
    for (const hot_replacement rule :
         {hot_replacement::least_recent, hot_replacement::least_used}) {
      test::rig_options o{.capacity_units = 256, .replacement = rule};
      o.predicts = draw.one_in(2);
      o.budget = 1 + static_cast<std::int32_t>(draw.below(4));
      o.pages_per_request = o.budget + static_cast<std::int32_t>(draw.below(9));  // k to 9 k
      if (o.pages_per_request > o.budget && draw.one_in(2)) {
        o.pages_of_layer = {o.pages_per_request - 1, o.budget};
      }
      CAPTURE(o.budget);
      CAPTURE(o.pages_per_request);
      CAPTURE(o.predicts);
      world w(machine, o, draw);
      for (int i = 0; i < steps(); ++i) {
        CAPTURE(i);
        w.act();
      }
      w.check_counts();
    }
  });
}

TEST_CASE("hot buffer model: a budget by mass chooses any number of blocks, and these come") {
  // What is chosen differs from row to row, and goes to resolve as it lies on the device.
  each(2, [](backend machine, random_source& draw) {
    using scene = test::selection_scene<backend>;
    constexpr std::int32_t k = 12;
    rig pulled(machine, {.budget = k, .pages_per_request = 18});
    test::offload_rig<backend> recalled(machine, {.budget = k, .pages_per_request = 18});
    std::vector<sequence_id> sequences, others;
    for (std::int32_t row = 0; row < 3; ++row) {
      sequences.push_back(pulled.stored(row + 1, blocks(20)));
      others.push_back(recalled.stored(row + 1, blocks(20)));
      pulled.lend(2 - row, 20 * row, 18 - 3 * row);  // row r is request 2 - r
      recalled.lend(2 - row, 20 * row, 18 - 3 * row);
    }
    // One context has no more than what is always in.
    scene s(machine, {.query_heads = 4, .kv_heads = 2, .tokens = {20 * 4, 3 * 4 + 1, 18 * 4 + 3}});
    s.randomise(draw.next());
    pulseinfer::consensus_selector<backend> selector(
        machine, s.digests(),
        {.query_heads = 4,
         .budget_blocks = k,
         .budget = pulseinfer::selection_budget::of_mass(0.75, 0, k),
         .max_rows = 3,
         .normalisation = pulseinfer::score_normalisation::context});
    std::set<std::size_t> sizes;
    for (int step = 0; step < (is_cuda ? 4 : 6); ++step) {
      for (std::size_t row = 0; row < 3; ++row) {
        for (std::int32_t i = 0; i < 16; ++i) {
          s.query(row, i / 4, i % 4) = test::random_float(draw) * static_cast<float>(1 << 2 * step);
        }
      }
      s.upload();
      const auto chosen = selector.select(0, s.batch(), s.queries(), pulled.stream);
      const auto ids = [&] {
        machine.sync(pulled.stream);
        return s.download(chosen);
      }();
      const std::int32_t layer = step % 2;
      const auto a = pulled.hot.resolve(layer, s.batch(), chosen, pulled.stream);
      REQUIRE(a.has_value());
      pulled.puller.pull(pulled.hot, *a, s.batch().device_requests, pulled.views(layer, sequences),
                         pulled.stream);
      const auto b = recalled.hot.resolve(layer, s.batch(), chosen, recalled.stream);
      REQUIRE(b.has_value());
      auto ticket = recalled.mover.recall(*b, others, recalled.stream);
      REQUIRE(ticket.has_value());
      ticket->sync();
      machine.sync(pulled.stream);
      CHECK(ticket->report().moved == ticket->report().units);
      const auto table = pulled.pages_of(*a);
      CHECK((table == recalled.pages_of(*b)));
      recalled.pages.download(recalled.stream);
      for (std::int32_t row = 0; row < 3; ++row) {
        const auto& list = ids[static_cast<std::size_t>(row)];
        const auto& pages = table[static_cast<std::size_t>(row)];
        sizes.insert(list.size());
        CHECK((rig::missed(*a, row) == rig::missed(*b, row)));
        CHECK(pulled.holds(layer, pages, row + 1, list));
        for (std::size_t i = 0; i < list.size(); ++i) {
          CHECK((recalled.pages.get(layer, pages[i]) ==
                 test::stamp(rig::geometry, row + 1, layer, list[i])));
        }
      }
    }
    CHECK(sizes.size() > 3);
    CHECK(sizes.count(0) == 1);
    pulled.end_leases();
    CHECK(rig::at_rest(pulled.store.counts()));
    machine.sync(pulled.stream);
  });
}

TEST_CASE("hot buffer model: the record of a discarded step is another's only behind its kernel") {
  each(4, [](backend machine, random_source&) {
    rig r(machine, {.steps_in_flight = 1});
    const auto id = r.stored(1, blocks(8));
    r.lend(0, 0, 6);
    r.lend(1, 6, 6);
    const auto chosen = r.choice({{1, 2}});
    const ints first = {0}, second = {1};
    const test::device_array<std::int32_t, backend> rows(machine, {0, 1, 256, 256}, r.stream);
    const auto resolve = [&](const ints& requests) {
      return r.hot.resolve(0,
                           {.requests = requests,
                            .device_requests = rows.data() + requests[0],
                            .device_tokens = rows.data() + 2,
                            .max_tokens = 256},
                           chosen, r.stream);
    };
    {
      test::hold<backend> held(machine, r.stream);
      const auto step = resolve(first);
      REQUIRE(step.has_value());
      r.hot.discard(*step, {.requests = first}, r.stream);
      // Whoever has the record writes into the mirror, at once.
      const auto next = resolve(second);
      if (test::hold<backend>::is_exact) CHECK_FALSE(next.has_value());
      held.release();
      r.machine.sync(r.stream);
      if (next) r.hot.discard(*next, {.requests = second}, r.stream);
      r.machine.sync(r.stream);
    }
    for (const ints& requests : {first, second}) {
      const auto step = resolve(requests);
      REQUIRE(step.has_value());
      r.machine.sync(r.stream);
      CHECK((rig::missed(*step, 0) == ints{1, 2}));
      auto ticket = r.mover.recall(*step, {&id, 1}, r.stream);
      REQUIRE(ticket.has_value());
      ticket->sync();
    }
    r.machine.sync(r.stream);
  });
}

TEST_CASE("hot buffer model: more steps than may be in flight change nothing") {
  each(3, [](backend machine, random_source&) {
    rig r(machine, {.steps_in_flight = 3, .predicts = true});
    const auto id = r.stored(1, blocks(8));
    r.lend(0, 0, 6);
    r.lend(1, 6, 6);
    const auto held = r.hot.hold_step(0, 3);
    const auto first = r.resolve(1, {0}, {{1, 2, 3, 4}});
    const auto second = r.resolve(1, {1}, {{1, 2}});
    REQUIRE((held && first && second));
    const residency_counts before = [&] {
      r.machine.sync(r.stream);
      return r.hot.counts(0, 0);
    }();
    for (int i = 0; i < 3; ++i) {
      CHECK_FALSE(r.resolve(0, {0}, {{5, 6}}).has_value());
      const auto list = r.choice({{5, 6}});
      CHECK_FALSE(r.hot.resolve_predicted(0, r.rows_of({0}), list, r.stream).has_value());
      CHECK_FALSE(r.hot.hold_step(1, 1).has_value());
    }
    r.machine.sync(r.stream);
    CHECK((r.hot.counts(0, 0) == before));
    CHECK((rig::missed(*first, 0) == ints{1, 2, 3, 4}));
    CHECK((rig::missed(*second, 0) == ints{1, 2}));
    auto ticket = r.mover.recall(*first, {&id, 1}, r.stream);
    REQUIRE(ticket.has_value());
    ticket->sync();
    const auto next = r.resolve(0, {0}, {{5, 6}});
    REQUIRE(next.has_value());
    r.machine.sync(r.stream);
    CHECK((rig::missed(*next, 0) == ints{5, 6}));
    r.hot.discard(*next, r.rows_of({0}), r.stream);
    r.hot.discard(*second, r.rows_of({1}), r.stream);
    r.hot.drop_step(*held);
    r.machine.sync(r.stream);
  });
}
