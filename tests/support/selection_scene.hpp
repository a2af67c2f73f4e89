// SPDX-License-Identifier: Apache-2.0
/// @file
/// Requests with keys, digests and queries on a backend, and what a selector should choose of them,
/// computed slowly by the rules in words.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

#include "pulseinfer/consensus.hpp"
#include "pulseinfer/detail/exponential.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/device_array.hpp"
#include "support/keys.hpp"

namespace test {

/// What a scene is made of.
struct selection_shape {
  std::int32_t query_heads = 1;
  std::int32_t kv_heads = 1;
  std::int32_t head_dim = 4;
  pulseinfer::element_type keys = pulseinfer::element_type::f16;
  pulseinfer::element_type queries = pulseinfer::element_type::f32;
  pulseinfer::digest_kind kind = pulseinfer::digest_kind::mean;
  pulseinfer::element_type digest = pulseinfer::element_type::f32;
  std::int32_t query_tokens = 1;
  std::vector<std::int32_t> tokens = {};  ///< of each request; all are rows, in this order
};

inline constexpr std::int32_t selection_block_tokens = 4;

[[nodiscard]] inline pulseinfer::kv_geometry geometry_of(const selection_shape& s) {
  return {.layers = 1,
          .kv_heads = s.kv_heads,
          .head_dim = s.head_dim,
          .block_tokens = selection_block_tokens,
          .element = s.keys};
}

/// Requests with keys, digests of their full blocks, and queries.
template <class Backend>
class selection_scene {
 public:
  using element_type = pulseinfer::element_type;
  using digest_kind = pulseinfer::digest_kind;
  using consensus_options = pulseinfer::consensus_options;
  using lists = std::vector<std::vector<std::int32_t>>;
  static constexpr std::int32_t block_tokens = selection_block_tokens;
  static constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

  selection_scene(Backend machine, const selection_shape& s)
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
  selection_scene(const selection_scene&) = delete;
  selection_scene& operator=(const selection_scene&) = delete;
  ~selection_scene() { machine_.sync(stream_); }

  key_cache<Backend>& keys() { return keys_; }
  typename Backend::stream& stream() { return stream_; }
  pulseinfer::digest_store<Backend>& digests() { return digests_; }
  float& query(std::size_t row, std::int32_t head, std::int32_t channel, std::int32_t token = 0) {
    return queries_[query_index(row, head, static_cast<std::size_t>(channel), token)];
  }
  void randomise(std::uint64_t seed) {
    keys_.randomise(seed);
    pulseinfer::detail::random_source draw(seed + 1000);
    for (float& q : queries_) q = random_float(draw);
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
    pulseinfer::consensus_selector<Backend> selector(machine_, digests_, options);
    return download(selector.select(0, batch(), queries(), stream_));
  }
  /// The first elements of an array in device memory.
  template <class T>
  std::vector<T> download(const T* array, std::size_t size) {
    const pinned_array<T, Backend> values(machine_, size);
    machine_.copy_async(values.data(), array, values.bytes(),
                        pulseinfer::copy_direction::device_to_host, stream_);
    machine_.sync(stream_);
    return values.values();
  }
  lists download(const pulseinfer::selection& chosen) {
    const auto count = static_cast<std::size_t>(chosen.lists);
    const auto k = static_cast<std::size_t>(chosen.k);
    const pinned_array<std::int32_t, Backend> ids(machine_, count * k), counts(machine_, count);
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

  Backend machine_;
  selection_shape shape_;
  typename Backend::stream stream_;
  std::int32_t max_blocks_;
  key_cache<Backend> keys_;
  pulseinfer::digest_store<Backend> digests_;
  std::vector<std::int32_t> requests_;  ///< of each row
  device_array<std::int32_t, Backend> batch_;
  std::vector<float> queries_;
  std::vector<std::byte> bytes_;  ///< queries_ as they are stored
  device_array<std::byte, Backend> device_queries_;
};

/// The score that a key was made of.
[[nodiscard]] inline float score_of(std::uint64_t key) {
  const auto ordered = static_cast<std::uint32_t>(key >> 32);
  return pulseinfer::detail::float_of((ordered & 0x80000000u) != 0 ? ordered ^ 0x80000000u
                                                                   : ~ordered);
}

}  // namespace test
