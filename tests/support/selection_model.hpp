// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a selector should choose, from keys and queries on: slow, obvious, and with arithmetic of its
/// own. (Of the library it has the layout of nothing and the bits of one function, the exponential,
/// which is tested against double precision elsewhere.)
///
/// Every number is a double. `to_float` rounds each result as the documents say that it is rounded,
/// once; `not_at_all` leaves it, for inputs of which floats hold every sum.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>
#include <vector>

#include "pulseinfer/detail/exponential.hpp"
#include "pulseinfer/digest_tile.hpp"
#include "pulseinfer/selection.hpp"

namespace test {

/// A sum, product, quotient or root of floats in double precision, rounded to a float: as the float
/// unit rounds it, for doubles have more than twice the digits.
[[nodiscard]] inline double to_float(double value) {
  return static_cast<double>(static_cast<float>(value));
}
[[nodiscard]] inline double not_at_all(double value) {
  return value;
}

/// The nearest number of `digits` binary digits with exponents from `least` on, ties to even. Beyond
/// `most` it is that, or infinite.
[[nodiscard]] inline double to_format(double value, int digits, int least, double most,
                                      bool saturates) {
  if (std::isnan(value) || value == 0) return value;
  double nearest = value;
  if (std::isfinite(value)) {
    const int step = std::max(std::ilogb(value), least) - (digits - 1);
    nearest = std::ldexp(std::nearbyint(std::ldexp(value, -step)), step);
  }
  if (std::abs(nearest) <= most) return nearest;
  return std::copysign(saturates ? most : std::numeric_limits<double>::infinity(), value);
}

/// What an element of a digest keeps of a number (of scaled ones: of a number over its scale).
[[nodiscard]] inline double to_element(double value, pulseinfer::element_type element) {
  switch (element) {
    case pulseinfer::element_type::f16:
      return to_format(value, 11, -14, 65504, false);
    case pulseinfer::element_type::bf16:
      return to_format(value, 8, -126, 0x1.fep127, false);
    case pulseinfer::element_type::f8_e4m3:
      return to_format(value, 4, -6, 448, true);
    case pulseinfer::element_type::i8:
      return std::isnan(value) ? 0 : std::clamp(std::nearbyint(value), -127.0, 127.0);
    default:
      return value;
  }
}

/// What is kept of one block and KV head.
struct model_digest {
  std::vector<double> low;   ///< mean, centre or lower bound, by channel
  std::vector<double> high;  ///< upper bound
  double distance = 0;
};

/// One row: its keys, its queries, and the rules.
class selection_model {
 public:
  using lists = std::vector<std::vector<std::int32_t>>;
  using rounding = double (*)(double);
  static constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

  /// @param form      of the digests
  /// @param options   checked; one query token is `tokens` of them
  /// @param tokens    queries of each head
  /// @param round     what happens to every result
  selection_model(const pulseinfer::digest_form& form, const pulseinfer::consensus_options& options,
                  std::int32_t tokens, rounding round = to_float)
      : form_(form), o_(options), tokens_(tokens), round_(round) {}

  /// Keys of one block and KV head, [token][channel].
  [[nodiscard]] model_digest digest(const std::vector<std::vector<double>>& keys) const {
    using pulseinfer::digest_kind;
    const auto dim = static_cast<std::size_t>(form_.head_dim);
    const double share = round_(1.0 / static_cast<double>(keys.size()));
    std::vector<double> mean(dim), least(dim), most(dim);
    for (std::size_t c = 0; c < dim; ++c) {
      bool has_nan = false;
      least[c] = most[c] = keys[0][c];
      for (const auto& key : keys) {
        mean[c] = round_(mean[c] + key[c]);
        least[c] = std::min(least[c], key[c]);
        most[c] = std::max(most[c], key[c]);
        has_nan = has_nan || std::isnan(key[c]);
      }
      mean[c] = round_(mean[c] * share);
      if (has_nan) least[c] = most[c] = not_a_number;
    }
    model_digest d;
    const bool is_bounds = form_.kind == digest_kind::min_max;
    d.low = stored(is_bounds ? least : mean);
    if (is_bounds) d.high = stored(most);
    if (form_.kind != digest_kind::centre_distance) return d;
    for (const auto& key : keys) {
      double square = 0;
      for (std::size_t c = 0; c < dim; ++c) {
        const double apart = round_(key[c] - d.low[c]);
        square = round_(square + round_(apart * apart));
      }
      d.distance = round_(d.distance + round_(std::sqrt(square)));
    }
    d.distance = round_(d.distance * share);
    return d;
  }

  /// The logit of one query.
  [[nodiscard]] double score(const std::vector<double>& query, const model_digest& d) const {
    double score = 0;
    double square = 0;
    for (std::size_t c = 0; c < query.size(); ++c) {
      const bool is_lower = d.high.empty() || query[c] < 0;
      score = round_(score + round_(query[c] * (is_lower ? d.low : d.high)[c]));
      square = round_(square + round_(query[c] * query[c]));
    }
    if (form_.kind == pulseinfer::digest_kind::centre_distance) {
      score = round_(score + round_(round_(std::sqrt(square)) * d.distance));
    }
    return round_(score * static_cast<double>(o_.logit_scale));
  }

  /// Takes the logits of a row, [block][head * tokens + token], NaN of blocks without a digest; all
  /// full blocks.
  void take(std::vector<std::vector<double>> logits) {
    logits_ = std::move(logits);
    full_ = static_cast<std::int32_t>(logits_.size());
    first_ = std::min(o_.sink_blocks, full_);
    last_ = std::max(full_ - o_.window_blocks, first_);
    shares_ = logits_;
    for (std::int32_t q = 0; o_.is_normalised() && q < o_.query_heads * tokens_; ++q) {
      normalise(static_cast<std::size_t>(q));
    }
  }
  [[nodiscard]] std::int32_t first() const { return first_; }
  [[nodiscard]] std::int32_t last() const { return last_; }

  /// The group's score of a block.
  [[nodiscard]] double joined(std::int32_t group, std::int32_t block) const {
    const std::vector<double> scores = of_group(shares_, group, block);
    if (o_.rule == pulseinfer::consensus_rule::mean) return mean(scores);
    double largest = -std::numeric_limits<double>::infinity();
    for (const double s : scores) largest = std::isnan(s) ? s : std::max(largest, s);
    for (const double s : scores) largest = std::isnan(s) ? s : largest;
    if (o_.rule == pulseinfer::consensus_rule::max) return largest;
    if (o_.lambda == 0) return largest;
    return round_(largest + round_(static_cast<double>(o_.lambda) * mean(scores)));
  }
  /// The estimated share of attention of a block, 0 where nothing is known.
  [[nodiscard]] double mass(std::int32_t group, std::int32_t block) const {
    const double share = mean(of_group(shares_, group, block));
    return std::isnan(share) ? 0 : share;
  }
  /// How many queries of a group have each block among their own best.
  [[nodiscard]] std::vector<int> votes(std::int32_t group) const {
    std::vector<int> found(static_cast<std::size_t>(full_));
    const auto queries = static_cast<std::size_t>(queries_of_group());
    for (std::size_t q = 0; q < queries; ++q) {
      std::vector<std::int32_t> ids = candidates();
      sort(ids, [&](std::int32_t id) { return of_group(logits_, group, id)[q]; });
      for (std::size_t i = 0; i < ids.size() && i < static_cast<std::size_t>(o_.head_blocks); ++i) {
        ++found[static_cast<std::size_t>(ids[i])];
      }
    }
    return found;
  }

  /// What is chosen of a group, ascending.
  [[nodiscard]] std::vector<std::int32_t> choose(std::int32_t group,
                                                 const pulseinfer::selection_budget& budget) const {
    using pulseinfer::budget_rule;
    std::vector<std::int32_t> ids = candidates();
    std::vector<double> scores(static_cast<std::size_t>(full_));
    for (const std::int32_t id : ids) scores[static_cast<std::size_t>(id)] = joined(group, id);
    sort(ids, [&](std::int32_t id) { return scores[static_cast<std::size_t>(id)]; });
    std::vector<int> of_block;
    if (o_.has_votes()) {
      of_block = votes(group);
      sort_by_votes(ids, of_block, scores);
    }
    std::int64_t most = budget.cap;
    if (budget.rule == budget_rule::fraction) {
      // (What binary fractions make of 0.1 is no whole block more.)
      const double wanted = std::ceil(full_ * budget.share - 1e-6);
      most = std::clamp<std::int64_t>(static_cast<std::int64_t>(wanted), budget.floor, budget.cap);
    }
    if (static_cast<std::int64_t>(ids.size()) > most) ids.resize(static_cast<std::size_t>(most));
    if (o_.rule == pulseinfer::consensus_rule::union_of_heads) {
      std::erase_if(ids,
                    [&](std::int32_t id) { return of_block[static_cast<std::size_t>(id)] == 0; });
    }
    if (budget.rule == budget_rule::mass) trim(ids, group, budget);
    if (budget.rule == budget_rule::worth) keep_worth(ids, group, budget);
    std::sort(ids.begin(), ids.end());
    return ids;
  }

 private:
  /// The numbers that the elements of a part stand for.
  [[nodiscard]] std::vector<double> stored(std::vector<double> part) const {
    const bool is_scaled = form_.element == pulseinfer::element_type::f8_e4m3 ||
                           form_.element == pulseinfer::element_type::i8;
    double largest = 0;
    bool is_finite = true;
    for (const double v : part) {
      largest = std::max(largest, std::abs(v));
      is_finite = is_finite && std::isfinite(v);
    }
    const double scale =
        !is_finite ? not_a_number
                   : round_(largest / (form_.element == pulseinfer::element_type::i8 ? 127 : 448));
    for (double& v : part) {
      if (!is_scaled) {
        v = to_element(v, form_.element);
      } else {
        const double scaled = scale > 0 ? round_(v / scale) : 0;
        v = round_(to_element(scaled, form_.element) * scale);
      }
    }
    return part;
  }

  [[nodiscard]] std::int32_t queries_of_group() const {
    return o_.query_heads / o_.head_groups * tokens_;
  }
  [[nodiscard]] std::vector<double> of_group(const std::vector<std::vector<double>>& scores,
                                             std::int32_t group, std::int32_t block) const {
    const auto first = scores[static_cast<std::size_t>(block)].begin() + group * queries_of_group();
    return {first, first + queries_of_group()};
  }
  /// The mean over the queries of a group. Where their scores are not looked at one by one, heads
  /// that share a KV head are added up first.
  [[nodiscard]] double mean(const std::vector<double>& scores) const {
    const std::int32_t of_kv = o_.query_heads / form_.kv_heads;
    const bool apart = o_.is_normalised() || o_.has_votes();
    const auto piece = static_cast<std::size_t>(
        apart ? 1 : std::gcd(of_kv, o_.query_heads / o_.head_groups) * tokens_);
    double total = 0;
    for (std::size_t start = 0; start < scores.size(); start += piece) {
      double part = scores[start];
      for (std::size_t i = start + 1; i < start + piece; ++i) part = round_(part + scores[i]);
      total = start == 0 ? part : round_(total + part);
    }
    return round_(total * round_(1.0 / static_cast<double>(scores.size())));
  }

  /// Softmax of one query: 64 sums, of every 64th block each, then over these.
  void normalise(std::size_t q) {
    const bool is_context = o_.normalisation == pulseinfer::score_normalisation::context;
    const auto begin = static_cast<std::size_t>(is_context ? 0 : first_);
    const auto end = static_cast<std::size_t>(is_context ? full_ : last_);
    double largest = -std::numeric_limits<double>::infinity();
    for (std::size_t b = begin; b < end; ++b) {
      if (!std::isnan(logits_[b][q])) largest = std::max(largest, logits_[b][q]);
    }
    double sums[64] = {};
    for (std::size_t b = begin; b < end; ++b) {
      double& share = shares_[b][q];
      if (std::isnan(share)) continue;
      if (share == largest) {
        share = 1;
      } else {
        share = static_cast<double>(
            pulseinfer::detail::exponential(static_cast<float>(round_(share - largest))));
      }
      sums[b % 64] = round_(sums[b % 64] + share);
    }
    double total = 0;
    for (const double sum : sums) total = round_(total + sum);
    const double factor = total > 0 ? round_(1 / total) : not_a_number;
    for (std::size_t b = begin; b < end; ++b) shares_[b][q] = round_(shares_[b][q] * factor);
  }

  [[nodiscard]] std::vector<std::int32_t> candidates() const {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(last_ - first_));
    std::iota(ids.begin(), ids.end(), first_);
    return ids;
  }
  /// The larger score first, NaN last, of equal ones the lower id. (The ids are ascending.)
  template <class Score>
  static void sort(std::vector<std::int32_t>& ids, Score score) {
    std::vector<std::tuple<bool, double, std::int32_t>> order;
    for (const std::int32_t id : ids) {
      const double s = score(id);
      order.emplace_back(std::isnan(s), std::isnan(s) ? 0 : -s, id);
    }
    std::sort(order.begin(), order.end());
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::get<2>(order[i]);
  }
  /// More votes first, then the larger score as far as sign, exponent and 11 bits say, then the
  /// lower id.
  static void sort_by_votes(std::vector<std::int32_t>& ids, const std::vector<int>& votes,
                            const std::vector<double>& scores) {
    // What is below zero by less than these bits say is below zero still.
    using place = std::tuple<int, bool, double, bool, std::int32_t>;
    std::vector<place> order;
    for (const std::int32_t id : ids) {
      const double s = scores[static_cast<std::size_t>(id)];
      const bool is_nan = std::isnan(s);
      const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(s)) & 0xfffff000u;
      const double rough = is_nan ? 0 : static_cast<double>(std::bit_cast<float>(bits));
      order.emplace_back(-votes[static_cast<std::size_t>(id)], is_nan, -rough, s < 0, id);
    }
    std::sort(order.begin(), order.end());
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::get<4>(order[i]);
  }

  /// A mass in steps of 2^-40, rounded down.
  [[nodiscard]] static std::int64_t steps_of(double mass) {
    return static_cast<std::int64_t>(std::floor(std::ldexp(mass, 40)));
  }
  /// Leaves the fewest of the highest mass that reach the budget's share with what is always in.
  void trim(std::vector<std::int32_t>& ids, std::int32_t group,
            const pulseinfer::selection_budget& budget) const {
    std::int64_t sum = 0;
    if (o_.normalisation == pulseinfer::score_normalisation::context) {
      for (std::int32_t block = 0; block < full_; ++block) {
        if (block < first_ || block >= last_) sum += steps_of(mass(group, block));
      }
      sum = steps_of(to_float(std::ldexp(static_cast<double>(sum), -40)));
    }
    const auto wanted = static_cast<std::int64_t>(std::ceil(std::ldexp(budget.share, 40)));
    std::sort(ids.begin(), ids.end());
    sort(ids, [&](std::int32_t id) { return mass(group, id); });
    std::size_t kept = 0;
    while (kept < ids.size() && (sum < wanted || kept < static_cast<std::size_t>(budget.floor))) {
      sum += steps_of(mass(group, ids[kept++]));
    }
    ids.resize(kept);
  }
  /// Leaves those that have the budget's share each; all where none has anything.
  void keep_worth(std::vector<std::int32_t>& ids, std::int32_t group,
                  const pulseinfer::selection_budget& budget) const {
    const auto wanted = static_cast<std::int64_t>(std::ceil(std::ldexp(budget.share, 40)));
    std::sort(ids.begin(), ids.end());
    sort(ids, [&](std::int32_t id) { return mass(group, id); });
    if (ids.empty() || mass(group, ids[0]) == 0) return;
    std::size_t kept = 0;
    while (kept < ids.size() && (steps_of(mass(group, ids[kept])) >= wanted ||
                                 kept < static_cast<std::size_t>(budget.floor))) {
      ++kept;
    }
    ids.resize(kept);
  }

  pulseinfer::digest_form form_;
  pulseinfer::consensus_options o_;
  std::int32_t tokens_;
  rounding round_;
  std::vector<std::vector<double>> logits_;  ///< [block][query]
  std::vector<std::vector<double>> shares_;  ///< the same, normalised where that is asked for
  std::int32_t full_ = 0;
  std::int32_t first_ = 0;  ///< blocks that may be chosen
  std::int32_t last_ = 0;
};

}  // namespace test
