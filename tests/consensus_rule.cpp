// SPDX-License-Identifier: Apache-2.0
/// @file
/// How scores are joined, votes counted, and lists thinned.
#include "pulseinfer/consensus_rule.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/far_array.hpp"
#include "support/lanes.hpp"

namespace {

using pulseinfer::consensus_rule;
using pulseinfer::join_scores;
using pulseinfer::top_k_key;
using pulseinfer::vote_key;

constexpr float inf = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();
constexpr std::int64_t stride = 128;

/// Two lists of three pieces, of two queries each.
struct scene {
  std::vector<float> most = std::vector<float>(6 * stride);
  std::vector<float> total = std::vector<float>(6 * stride);
  std::vector<float> factor = std::vector<float>(6, 1.0f);
  std::vector<std::uint64_t> keys = std::vector<std::uint64_t>(2 * stride, 7);
  std::vector<float> masses = std::vector<float>(2 * stride, -1.0f);
  std::int32_t begin[2] = {1, 0};
  std::int32_t end[2] = {100, 64};

  scene() {
    pulseinfer::detail::random_source draw(2);
    for (std::size_t i = 0; i < most.size(); ++i) {
      most[i] = (static_cast<float>(draw.below(4096)) - 2048.0f) * 0x1p-8f;
      total[i] = most[i] + (static_cast<float>(draw.below(4096)) - 2048.0f) * 0x1p-8f;
    }
    for (std::size_t i = 0; i < 6; ++i) factor[i] = 1.0f / static_cast<float>(i + 3);
  }
  join_scores body(consensus_rule rule) {
    return {.most = most.data(),
            .total = total.data(),
            .factor = nullptr,
            .stride = stride,
            .pieces = 3,
            .share = 1.0f / 6,
            .begin = begin,
            .end = end,
            .tiles = 2,
            .rule = rule,
            .lambda = 0.5f,
            .votes = nullptr,
            .vote_counts = nullptr,
            .votes_each = 0,
            .keys = keys.data(),
            .key_stride = stride,
            .masses = nullptr};
  }
  void run(const join_scores& op) {
    for (std::int64_t i = 0; i < 4; ++i) {
      for (std::int64_t unit = 0; unit < 64; ++unit) op(i, unit);
    }
  }
};

}  // namespace

TEST_CASE("consensus rule: largest, mean and both, over all pieces of a list") {
  for (const consensus_rule rule :
       {consensus_rule::max_mean, consensus_rule::mean, consensus_rule::max}) {
    scene s;
    s.run(s.body(rule));
    for (std::int64_t list = 0; list < 2; ++list) {
      for (std::int64_t block = 0; block < stride; ++block) {
        const auto at = static_cast<std::size_t>(list * stride + block);
        if (block < s.begin[list] || block >= s.end[list]) {
          CHECK(s.keys[at] == 7);
          continue;
        }
        float largest = -inf;
        float all = 0;
        for (std::int64_t p = 0; p < 3; ++p) {
          const auto piece = static_cast<std::size_t>((list * 3 + p) * stride + block);
          largest = std::max(largest, s.most[piece]);
          all += s.total[piece];
        }
        const float mean = all * (1.0f / 6);
        const float score = rule == consensus_rule::mean  ? mean
                            : rule == consensus_rule::max ? largest
                                                          : largest + 0.5f * mean;
        CHECK(s.keys[at] == top_k_key(score, static_cast<std::int32_t>(block)));
      }
    }
  }
}

TEST_CASE("consensus rule: a tile at once is as block after block, with factors and masses too") {
  for (const bool apart : {false, true}) {
    scene plain, whole;
    for (scene* s : {&plain, &whole}) {
      s->most[5] = not_a_number;
      s->most[stride + 6] = not_a_number;
      s->most[2 * stride + 7] = inf;
      auto op = s->body(consensus_rule::max);
      if (apart) {
        op.total = nullptr;
        op.share = 1.0f / 3;
        op.factor = s->factor.data();
        op.masses = s->masses.data();
      }
      if (s == &plain) {
        s->run(op);
      } else {
        for (std::int64_t i = 0; i < 4; ++i) op.whole_block(i);
      }
    }
    CHECK(plain.keys == whole.keys);
    CHECK(plain.masses == whole.masses);
    // A NaN in any piece ranks last, and has no mass.
    CHECK(plain.keys[5] == top_k_key(not_a_number, 5));
    CHECK(plain.keys[6] == top_k_key(not_a_number, 6));
    CHECK(plain.keys[7] == top_k_key(inf, 7));
    if (!apart) continue;
    CHECK(plain.masses[5] == 0.0f);
    CHECK(plain.masses[0] == -1.0f);  // not a candidate
    const float mean =
        (plain.most[9] / 3 + plain.most[stride + 9] / 4 + plain.most[2 * stride + 9] / 5) / 3;
    CHECK(plain.masses[9] == doctest::Approx(mean));
  }
}

TEST_CASE(
    "consensus rule: without a weight the mean says nothing, not even where it is no number") {
  scene s;
  s.most[9] = 3e38f;
  s.total[9] = inf;  // three heads of 3e38
  s.total[10] = not_a_number;
  auto op = s.body(consensus_rule::max_mean);
  op.lambda = 0.0f;
  s.run(op);
  CHECK(s.keys[9] == top_k_key(3e38f, 9));
  CHECK(s.keys[10] ==
        top_k_key(std::max({s.most[10], s.most[stride + 10], s.most[2 * stride + 10]}), 10));
  op.lambda = 0.5f;
  s.run(op);
  CHECK(s.keys[9] == top_k_key(inf, 9));
  CHECK(s.keys[10] == top_k_key(not_a_number, 10));
}

TEST_CASE("consensus rule: votes come first, then the score, then the lower block") {
  CHECK(vote_key(3, -5.0f, 9) > vote_key(2, 100.0f, 1));
  CHECK(vote_key(2, 1.0f, 9) > vote_key(2, 0.5f, 1));
  CHECK(vote_key(2, 1.0f, 1) > vote_key(2, 1.0f, 9));
  CHECK(vote_key(2, -inf, 1) > vote_key(2, not_a_number, 0));
  for (const std::int32_t votes : {0, 1, 7, pulseinfer::max_votes}) {
    CHECK(pulseinfer::votes_of(vote_key(votes, -3.5f, 12)) == votes);
    CHECK(pulseinfer::top_k_index(vote_key(votes, -3.5f, 12)) == 12);
  }
}

TEST_CASE("consensus rule: a block's votes are the lists that have it") {
  scene s;
  const std::vector<std::int32_t> votes = {1, 5, 9, -1, 5, 6,  7,  8,  2,  5, -1, -1,  // list 0
                                           0, 1, 2, 3,  0, -1, -1, -1, -1, 0, 0,  0};  // list 1
  const std::vector<std::int32_t> counts = {3, 4, 2, 4, 1, 0};
  auto op = s.body(consensus_rule::vote);
  op.votes = votes.data();
  op.vote_counts = counts.data();
  op.votes_each = 4;
  s.run(op);
  const auto votes_at = [&](std::size_t block, std::size_t list) {
    return pulseinfer::votes_of(s.keys[list * stride + block]);
  };
  CHECK(votes_at(5, 0) == 3);
  CHECK(votes_at(9, 0) == 1);
  CHECK(votes_at(2, 0) == 1);
  CHECK(votes_at(4, 0) == 0);
  CHECK(votes_at(0, 1) == 2);
  CHECK(votes_at(3, 1) == 1);
  CHECK(votes_at(4, 1) == 0);
}

TEST_CASE("consensus rule: lists keep what has votes, whatever the size of the group") {
  std::vector<std::uint64_t> keys(3 * 16);
  for (std::int32_t block = 0; block < 48; ++block) {
    keys[static_cast<std::size_t>(block)] = vote_key(block % 16 % 3, 1.0f, block % 16);
  }
  const std::vector<std::int32_t> ids = {0,  1,  3,  4,  5, 6, 9, 12, 0, 3, 6,  -1,
                                         -1, -1, -1, -1, 1, 2, 4, 5,  7, 8, 10, -1};
  for (const int lanes : {1, 2, 3, 7}) {
    std::vector<std::int32_t> kept = ids;
    std::vector<std::int32_t> counts = {8, 3, 7};
    const pulseinfer::keep_voted op{keys.data(), 16, kept.data(), 8, counts.data()};
    if (lanes == 1) {
      for (std::int64_t row = 0; row < 3; ++row) op(row, pulseinfer::detail::single_lane{});
    } else {
      test::run_rows(3, lanes, op);
    }
    CHECK((counts == std::vector<std::int32_t>{3, 0, 7}));
    CHECK((kept == std::vector<std::int32_t>{1,  4,  5,  -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                             -1, -1, -1, -1, 1,  2,  4,  5,  7,  8,  10, -1}));
  }
}

TEST_CASE("fault 51: a list whose scores, keys and votes lie beyond 2^31 is joined and thinned") {
  constexpr std::int64_t list = test::far_row;
  constexpr std::int64_t far = test::far_row * test::far_stride;
  constexpr std::int64_t tiles = test::far_stride / pulseinfer::tile_blocks;
  constexpr std::int32_t blocks = 70;
  test::far_array<float> most(far + 128, far), masses(far + 128, far);
  test::far_array<std::uint64_t> keys(far + 128, far);
  test::far_array<std::int32_t> votes(far + 128, far);
  std::vector<std::int32_t> begin(list + 1, 0), end(list + 1, 0), counts(list + 1, 0);
  end[list] = blocks;
  counts[list] = 2;
  votes.data()[far] = 3;
  votes.data()[far + 1] = 69;
  for (std::int32_t block = 0; block < 128; ++block) {
    most.data()[far + block] = static_cast<float>(block * 37 % 71);
  }
  const auto score = [&](std::int32_t block) { return most.data()[far + block]; };
  join_scores join{.most = most.data(),
                   .total = nullptr,
                   .factor = nullptr,
                   .stride = test::far_stride,
                   .pieces = 1,
                   .share = 1.0f,
                   .begin = begin.data(),
                   .end = end.data(),
                   .tiles = tiles,
                   .rule = consensus_rule::max,
                   .lambda = 0.0f,
                   .votes = nullptr,
                   .vote_counts = counts.data(),
                   .votes_each = test::far_stride,
                   .keys = keys.data(),
                   .key_stride = test::far_stride,
                   .masses = masses.data()};
  const pulseinfer::column_keys own{.scores = most.data(),
                                    .stride = test::far_stride,
                                    .begin = begin.data(),
                                    .end = end.data(),
                                    .tiles = tiles,
                                    .keys = keys.data(),
                                    .key_stride = test::far_stride};
  const auto check = [&](auto key_of) {
    for (std::int32_t block = 0; block < blocks; ++block) {
      CHECK(keys.data()[far + block] == key_of(block));
      keys.data()[far + block] = 0;
    }
  };
  const auto each_unit = [&](const auto& op) {
    for (std::int64_t i = list * tiles; i < list * tiles + 2; ++i) {
      for (std::int64_t unit = 0; unit < pulseinfer::tile_blocks; ++unit) op(i, unit);
    }
  };
  const auto plain = [&](std::int32_t block) { return top_k_key(score(block), block); };
  each_unit(join);
  check(plain);
  CHECK(masses.data()[far + 5] == score(5));
  for (std::int64_t i = list * tiles; i < list * tiles + 2; ++i) join.whole_block(i);
  check(plain);
  each_unit(own);
  check(plain);
  join.votes = votes.data();
  each_unit(join);
  const std::uint64_t voted = keys.data()[far + 3];
  CHECK(keys.data()[far + 4] == vote_key(0, score(4), 4));
  CHECK(keys.data()[far + 69] == vote_key(1, score(69), 69));
  CHECK(voted == vote_key(1, score(3), 3));

  // Of blocks 3 to 5 one has votes.
  votes.data()[far + 1] = 4;
  votes.data()[far + 2] = 5;
  counts[list] = 3;
  const pulseinfer::keep_voted keep{.keys = keys.data(),
                                    .key_stride = test::far_stride,
                                    .ids = votes.data(),
                                    .k = test::far_stride,
                                    .counts = counts.data()};
  keep(list, pulseinfer::detail::single_lane{});
  CHECK(counts[list] == 1);
  CHECK(votes.data()[far] == 3);
  CHECK(votes.data()[far + 1] == -1);
}
