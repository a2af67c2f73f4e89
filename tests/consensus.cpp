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

#include "pulseinfer/detail/exponential.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"
#include "support/device_array.hpp"
#include "support/keys.hpp"

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

struct shape {
  std::int32_t query_heads = 1;
  std::int32_t kv_heads = 1;
  std::int32_t head_dim = 4;
  element_type keys = element_type::f16;
  element_type queries = element_type::f32;
  digest_kind kind = digest_kind::mean;
  element_type digest = element_type::f32;
  std::int32_t query_tokens = 1;
  std::vector<std::int32_t> tokens = {};  ///< of each request; all are rows, in this order
};

constexpr std::int32_t block_tokens = 4;

pulseinfer::kv_geometry geometry_of(const shape& s) {
  return {.layers = 1,
          .kv_heads = s.kv_heads,
          .head_dim = s.head_dim,
          .block_tokens = block_tokens,
          .element = s.keys};
}

/// Requests with keys, digests of their full blocks, and queries.
class scene {
 public:
  scene(backend machine, const shape& s)
      : machine_(machine),
        shape_(s),
        stream_(machine_.make_stream(pulseinfer::stream_priority::normal)),
        max_blocks_(
            std::max(1, *std::max_element(s.tokens.begin(), s.tokens.end()) / block_tokens)),
        keys_(machine, geometry_of(s), static_cast<std::int64_t>(s.tokens.size()), max_blocks_),
        digests_(machine, geometry_of(s),
                 {.kind = s.kind,
                  .max_requests = static_cast<std::int32_t>(s.tokens.size()),
                  .max_blocks = max_blocks_,
                  .element = s.digest}),
        batch_(machine, 2 * s.tokens.size()),
        queries_(s.tokens.size() *
                 static_cast<std::size_t>(s.query_tokens * s.query_heads * s.head_dim)),
        bytes_(4 * queries_.size()),
        device_queries_(machine, bytes_.size()) {
    // Row r is request n-1-r: rows are not requests.
    std::vector<std::int32_t> arrays;
    for (std::size_t row = 0; row < s.tokens.size(); ++row) {
      requests_.push_back(static_cast<std::int32_t>(s.tokens.size() - 1 - row));
    }
    arrays = requests_;
    for (const std::int32_t request : requests_) {
      arrays.push_back(s.tokens[static_cast<std::size_t>(request)]);
    }
    batch_.upload(arrays, stream_);
  }
  scene(const scene&) = delete;
  scene& operator=(const scene&) = delete;
  ~scene() { machine_.sync(stream_); }

  test::key_cache<backend>& keys() { return keys_; }
  backend::stream& stream() { return stream_; }
  pulseinfer::digest_store<backend>& digests() { return digests_; }
  float& query(std::size_t row, std::int32_t head, std::int32_t channel, std::int32_t token = 0) {
    return queries_[query_index(row, head, static_cast<std::size_t>(channel), token)];
  }
  void randomise(std::uint64_t seed) {
    keys_.randomise(seed);
    pulseinfer::detail::random_source draw(seed + 1000);
    for (float& q : queries_) q = test::random_float(draw);
  }
  /// Brings keys, digests (of `digested` full blocks at most) and queries to the device.
  void upload(std::int32_t digested = 1 << 20) {
    keys_.upload(stream_);
    for (std::size_t r = 0; r < shape_.tokens.size(); ++r) {
      const auto request = static_cast<std::int32_t>(r);
      const std::int32_t full = std::min(shape_.tokens[r] / block_tokens, digested);
      REQUIRE(digests_.reserve(request, full, stream_));
      if (full == 0) continue;
      digests_.build(0, request, 0, full, keys_.pool(), keys_.device_table(), stream_);
    }
    for (std::size_t i = 0; i < queries_.size(); ++i) {
      if (shape_.queries == element_type::f32) {
        reinterpret_cast<float*>(bytes_.data())[i] = queries_[i];
      } else {
        const std::uint16_t half = shape_.queries == element_type::f16
                                       ? pulseinfer::f16_from_float(queries_[i])
                                       : pulseinfer::bf16_from_float(queries_[i]);
        reinterpret_cast<std::uint16_t*>(bytes_.data())[i] = half;
      }
    }
    device_queries_.upload(bytes_, stream_);
  }

  pulseinfer::batch_view batch() const {
    const std::int32_t most = *std::max_element(shape_.tokens.begin(), shape_.tokens.end());
    return {.requests = requests_,
            .device_requests = batch_.data(),
            .device_tokens = batch_.data() + requests_.size(),
            .max_tokens = most};
  }
  pulseinfer::query_view queries() const {
    return {device_queries_.data(), shape_.queries, shape_.query_tokens};
  }
  std::int64_t max_blocks() const { return max_blocks_; }

  lists select(const consensus_options& options) {
    pulseinfer::consensus_selector<backend> selector(machine_, digests_, options);
    return download(selector.select(0, batch(), queries(), stream_));
  }
  /// The first elements of an array in device memory.
  template <class T>
  std::vector<T> download(const T* array, std::size_t size) {
    const test::pinned_array<T, backend> values(machine_, size);
    machine_.copy_async(values.data(), array, values.bytes(),
                        pulseinfer::copy_direction::device_to_host, stream_);
    machine_.sync(stream_);
    return values.values();
  }
  lists download(const pulseinfer::selection& chosen) {
    const auto count = static_cast<std::size_t>(chosen.lists);
    const auto k = static_cast<std::size_t>(chosen.k);
    const test::pinned_array<std::int32_t, backend> ids(machine_, count * k),
        counts(machine_, count);
    machine_.copy_async(ids.data(), chosen.ids, ids.bytes(),
                        pulseinfer::copy_direction::device_to_host, stream_);
    machine_.copy_async(counts.data(), chosen.counts, counts.bytes(),
                        pulseinfer::copy_direction::device_to_host, stream_);
    machine_.sync(stream_);
    lists found;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int32_t* const first = ids.data() + i * k;
      REQUIRE(counts[i] >= 0);
      REQUIRE(counts[i] <= chosen.k);
      found.emplace_back(first, first + counts[i]);
      CHECK(std::count(first, first + k, -1) == chosen.k - counts[i]);
    }
    return found;
  }

  /// The score of every query for a block, as the library computes it, or in double precision: head
  /// by head, and of a head token by token.
  template <class Number>
  std::vector<Number> query_scores(std::size_t row, std::int32_t block) const {
    using pulseinfer::detail::product;
    using pulseinfer::detail::sum;
    const std::int32_t request = requests_[row];
    const auto digest = keys_.stored_digest(shape_.kind, shape_.digest, 0, request, block);
    std::vector<Number> scores;
    const auto dim = static_cast<std::size_t>(shape_.head_dim);
    const std::int32_t heads_per_kv = shape_.query_heads / shape_.kv_heads;
    for (std::int32_t column = 0; column < shape_.query_heads * shape_.query_tokens; ++column) {
      const std::int32_t head = column / shape_.query_tokens;
      Number score = 0;
      for (std::size_t c = 0; c < dim; ++c) {
        const auto q = query_as_stored(row, head, c, column % shape_.query_tokens);
        const std::size_t at = static_cast<std::size_t>(head / heads_per_kv) * dim + c;
        const bool upper = shape_.kind == digest_kind::min_max && q >= 0.0f;
        const float d = digest[upper ? at + static_cast<std::size_t>(keys_.channels()) : at];
        if constexpr (std::is_same_v<Number, float>) {
          score = sum(score, product(q, d));
        } else {
          score += static_cast<double>(q) * static_cast<double>(d);
        }
      }
      const float scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim));
      if constexpr (std::is_same_v<Number, float>) {
        scores.push_back(product(score, scale));
      } else {
        scores.push_back(score * static_cast<double>(scale));
      }
    }
    return scores;
  }

  [[nodiscard]] std::int32_t full_blocks(std::size_t row) const {
    return shape_.tokens[static_cast<std::size_t>(requests_[row])] / block_tokens;
  }
  /// What the rule makes of each block of a row, as the library computes it: [group][block], NaN
  /// where the block may not be chosen.
  std::vector<std::vector<float>> joined(std::size_t row, const consensus_options& o) const {
    const std::int32_t full = full_blocks(row);
    std::vector<std::vector<float>> columns;  // [block][column]
    for (std::int32_t block = 0; block < full; ++block) {
      columns.push_back(query_scores<float>(row, block));
    }
    if (o.normalisation != pulseinfer::score_normalisation::none) {
      const bool is_context = o.normalisation == pulseinfer::score_normalisation::context;
      normalise(columns, is_context ? 0 : o.sink_blocks,
                is_context ? full : full - o.window_blocks);
    }
    std::vector<std::vector<float>> found;
    for (std::int32_t group = 0; group < o.head_groups; ++group) {
      auto& of_group = found.emplace_back(static_cast<std::size_t>(full), not_a_number);
      for (std::int32_t block = o.sink_blocks; block < full - o.window_blocks; ++block) {
        of_group[static_cast<std::size_t>(block)] =
            consensus(columns[static_cast<std::size_t>(block)], group, o);
      }
    }
    return found;
  }
  /// Softmax of each column over blocks [first, last).
  static void normalise(std::vector<std::vector<float>>& columns, std::int32_t first,
                        std::int32_t last) {
    if (first >= last) return;
    for (std::size_t column = 0; column < columns[0].size(); ++column) {
      float most = -std::numeric_limits<float>::infinity();
      for (auto b = static_cast<std::size_t>(first); b < static_cast<std::size_t>(last); ++b) {
        most = std::max(most, columns[b][column]);
      }
      float partial[64] = {};
      for (auto b = static_cast<std::size_t>(first); b < static_cast<std::size_t>(last); ++b) {
        float& score = columns[b][column];
        score = pulseinfer::detail::exponential(score - most);
        partial[b % 64] += score;
      }
      float total = 0.0f;
      for (const float p : partial) total += p;
      for (auto& block : columns) {
        block[column] = pulseinfer::detail::product(block[column], 1.0f / total);
      }
    }
  }
  /// Queries that share a KV head and a group are joined first, where scores are not kept apart.
  float consensus(const std::vector<float>& scores, std::int32_t group,
                  const consensus_options& o) const {
    using pulseinfer::consensus_rule;
    using pulseinfer::detail::product;
    using pulseinfer::detail::sum;
    const std::int32_t queries = o.query_heads / o.head_groups * shape_.query_tokens;
    const bool apart = o.is_normalised() || o.has_votes();
    const std::int32_t piece =
        apart ? 1
              : std::gcd(o.query_heads / shape_.kv_heads, o.query_heads / o.head_groups) *
                    shape_.query_tokens;
    const std::int32_t first = group * queries;
    float most = scores[static_cast<std::size_t>(first)];
    float total = 0.0f;
    for (std::int32_t start = first; start < first + queries; start += piece) {
      float of_piece = 0.0f;
      for (std::int32_t i = start; i < start + piece; ++i) {
        most = std::max(most, scores[static_cast<std::size_t>(i)]);
        of_piece = sum(of_piece, scores[static_cast<std::size_t>(i)]);
      }
      total = sum(total, of_piece);
    }
    const float mean = product(total, 1.0f / static_cast<float>(queries));
    if (o.rule == consensus_rule::mean) return mean;
    if (o.rule == consensus_rule::max) return most;
    return sum(most, product(o.lambda, mean));
  }
  /// The best `k` blocks of some that have scores, ascending.
  static std::vector<std::int32_t> best(const std::vector<float>& scores, std::int32_t k) {
    std::vector<std::int32_t> ids;
    for (std::size_t b = 0; b < scores.size(); ++b) {
      if (!std::isnan(scores[b])) ids.push_back(static_cast<std::int32_t>(b));
    }
    std::stable_sort(ids.begin(), ids.end(), [&](std::int32_t a, std::int32_t b) {
      return scores[static_cast<std::size_t>(a)] > scores[static_cast<std::size_t>(b)];
    });
    if (ids.size() > static_cast<std::size_t>(k)) ids.resize(static_cast<std::size_t>(k));
    std::sort(ids.begin(), ids.end());
    return ids;
  }

  /// What is chosen by the rule, slowly: list r * head_groups + g.
  lists expected(const consensus_options& o) const {
    lists found;
    for (std::size_t row = 0; row < requests_.size(); ++row) {
      auto scores = joined(row, o);
      for (std::int32_t group = 0; group < o.head_groups; ++group) {
        auto& of_group = scores[static_cast<std::size_t>(group)];
        if (o.has_votes()) add_votes(row, group, o, of_group);
        found.push_back(best(of_group, o.budget_blocks));
      }
    }
    return found;
  }
  /// Turns scores into votes + a place among the blocks, below 1; blocks without votes go where only
  /// voted ones stay.
  void add_votes(std::size_t row, std::int32_t group, const consensus_options& o,
                 std::vector<float>& of_group) const {
    const std::int32_t queries = o.query_heads / o.head_groups * shape_.query_tokens;
    std::vector<std::vector<float>> columns(static_cast<std::size_t>(queries));
    for (std::size_t b = 0; b < of_group.size(); ++b) {
      const auto all = query_scores<float>(row, static_cast<std::int32_t>(b));
      for (std::int32_t i = 0; i < queries; ++i) {
        columns[static_cast<std::size_t>(i)].push_back(
            std::isnan(of_group[b]) ? not_a_number
                                    : all[static_cast<std::size_t>(group * queries + i)]);
      }
    }
    std::vector<int> votes(of_group.size());
    for (const auto& column : columns) {
      for (const std::int32_t id : best(column, o.head_blocks)) {
        ++votes[static_cast<std::size_t>(id)];
      }
    }
    std::vector<float> order = of_group;  // of scores that are equal in 20 bits none is better
    for (float& score : order) {
      const std::uint32_t bits = pulseinfer::ordered_score_bits(score) >> 12;
      score = std::isnan(score) ? score : static_cast<float>(bits) * 0x1p-20f;
    }
    for (std::size_t b = 0; b < of_group.size(); ++b) {
      if (std::isnan(of_group[b])) continue;
      // In double precision both parts would stand side by side; votes are few here.
      of_group[b] = static_cast<float>(votes[b]) + static_cast<float>(rank_of(order, b)) * 0x1p-10f;
      const bool stays = o.rule == pulseinfer::consensus_rule::vote || votes[b] > 0;
      if (!stays) of_group[b] = not_a_number;
    }
  }
  static std::ptrdiff_t rank_of(const std::vector<float>& scores, std::size_t at) {
    return std::count_if(scores.begin(), scores.end(),
                         [&](float other) { return other < scores[at]; });
  }

 private:
  std::size_t query_index(std::size_t row, std::int32_t head, std::size_t channel,
                          std::int32_t token) const {
    const std::size_t of_token =
        row * static_cast<std::size_t>(shape_.query_tokens) + static_cast<std::size_t>(token);
    return (of_token * static_cast<std::size_t>(shape_.query_heads) +
            static_cast<std::size_t>(head)) *
               static_cast<std::size_t>(shape_.head_dim) +
           channel;
  }
  float query_as_stored(std::size_t row, std::int32_t head, std::size_t channel,
                        std::int32_t token) const {
    return pulseinfer::load_element(
        bytes_.data(), static_cast<std::int64_t>(query_index(row, head, channel, token)),
        shape_.queries);
  }

  backend machine_;
  shape shape_;
  backend::stream stream_;
  std::int32_t max_blocks_;
  test::key_cache<backend> keys_;
  pulseinfer::digest_store<backend> digests_;
  std::vector<std::int32_t> requests_;  ///< of each row
  test::device_array<std::int32_t, backend> batch_;
  std::vector<float> queries_;
  std::vector<std::byte> bytes_;  ///< queries_ as they are stored
  test::device_array<std::byte, backend> device_queries_;
};

/// The score that a key was made of.
float score_of(std::uint64_t key) {
  const auto ordered = static_cast<std::uint32_t>(key >> 32);
  return pulseinfer::detail::float_of((ordered & 0x80000000u) != 0 ? ordered ^ 0x80000000u
                                                                   : ~ordered);
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

    const lists alone = s.select(
        {.query_heads = 3, .budget_blocks = 3, .head_groups = 3, .lambda = 0.5f, .max_rows = 1});
    CHECK((alone == lists{{12, 45, 89}, {14, 45, 92}, {12, 77, 104}}));
    std::set<std::int32_t> all;
    for (const auto& list : alone) all.insert(list.begin(), list.end());
    CHECK(all.size() == 7);
    CHECK((s.select({.query_heads = 3, .budget_blocks = 4, .lambda = 0.5f, .max_rows = 1}) ==
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
        const consensus_options o{.query_heads = 18, .lambda = 0.37f};
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
      const consensus_options o{
          .query_heads = 2, .budget_blocks = 1, .sink_blocks = 0, .window_blocks = 0};
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
    for (const digest_kind kind : {digest_kind::mean, digest_kind::min_max}) {
      scene s(machine, {.query_heads = 2, .kind = kind, .tokens = {12 * block_tokens}});
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
    }
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
