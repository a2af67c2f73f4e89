// SPDX-License-Identifier: Apache-2.0
/// @file
/// How the queries of a group agree on a block: bodies that join their scores to one key.
#pragma once

#include <cstdint>
#include <type_traits>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/digest_tile.hpp"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What a group's score of a block is, over the query heads of the group and the tokens of a step.
///
/// A block is NaN for the group, and so ranks last, where it is for one query of it: a query or key
/// that is NaN, or a digest that is not there. In a mean it is so, too, where one score is infinite
/// and another one infinite and negative.
enum class consensus_rule : std::uint8_t {
  max_mean,  ///< the largest + lambda x the mean (SoloHead); with a lambda of 0 as `max`
  mean,
  max,
  /// How many queries have the block among their own `head_blocks` best. Of equal counts the larger
  /// `max_mean` comes first, to 20 bits of it (sign, exponent, 11 bits).
  vote,
  /// The blocks that at least one query has among its own `head_blocks` best, and no others. If they
  /// are more than the budget, those with most votes, as for `vote`.
  union_of_heads,
};

/// The most queries of a group that can vote.
inline constexpr std::int32_t max_votes = 4095;

/// A block's key from its votes and the score that decides between equal ones.
PULSEINFER_HD inline std::uint64_t vote_key(std::int32_t votes, float score, std::int32_t block) {
  return (static_cast<std::uint64_t>(votes) << 52) |
         (static_cast<std::uint64_t>(ordered_score_bits(score) >> 12) << 32) |
         (top_k_key(0.0f, block) & 0xffffffffu);
}
/// The votes that a key was made of.
PULSEINFER_HD inline std::int32_t votes_of(std::uint64_t key) {
  return static_cast<std::int32_t>(key >> 52);
}

/// Kernel body: joins what the pieces of a group say of block `unit` of tile `i % tiles` for list
/// `i / tiles`, in the order of the pieces. On a CPU all blocks of the tile at once.
struct join_scores {
  const float* most;    ///< [rows * groups, pieces, stride]
  const float* total;   ///< the same, or null: `most` again
  const float* factor;  ///< [rows * groups, pieces] what to multiply with, or null
  std::int64_t stride;
  std::int32_t pieces;        ///< of a list
  float share;                ///< of one query in the mean: 1 / queries of a list
  const std::int32_t* begin;  ///< [lists] blocks that may be chosen
  const std::int32_t* end;
  std::int64_t tiles;  ///< of a list, at most
  consensus_rule rule;
  float lambda;
  /// [lists * pieces, votes_each] ascending, and how many: of each query its best. Or null.
  const std::int32_t* votes;
  const std::int32_t* vote_counts;
  std::int64_t votes_each;
  std::uint64_t* keys;  ///< [lists, key_stride]
  std::int64_t key_stride;
  float* masses;  ///< [lists, stride]: the mean, 0 where it is NaN. Or null.

  PULSEINFER_HD void operator()(std::int64_t i, std::int64_t unit) const {
    const std::int64_t list = i / tiles;
    const std::int64_t block = i % tiles * tile_blocks + unit;
    if (block < begin[list] || block >= end[list]) return;
    float largest = 0.0f;
    float all = 0.0f;
    for (std::int64_t p = 0; p < pieces; ++p) {
      const std::int64_t piece = list * pieces + p;
      const float scale = factor == nullptr ? 1.0f : factor[piece];
      const std::int64_t at = piece * stride + block;
      const float m = detail::product(most[at], scale);
      const float t = total == nullptr ? m : detail::product(total[at], scale);
      largest = p == 0 ? m : larger(m, largest);
      all = p == 0 ? t : detail::sum(all, t);
    }
    finish(list, block, largest, all);
  }

  [[nodiscard]] std::int64_t words() const { return tile_blocks; }
  void whole_block(std::int64_t i) const {
    const std::int64_t list = i / tiles;
    const std::int64_t first = i % tiles * tile_blocks;
    if (first >= end[list] || first + tile_blocks <= begin[list]) return;
    float largest[tile_blocks] = {};
    float all[tile_blocks] = {};
    for (std::int64_t p = 0; p < pieces; ++p) {
      const std::int64_t piece = list * pieces + p;
      const float scale = factor == nullptr ? 1.0f : factor[piece];
      const float* const m = most + piece * stride + first;
      const float* const t = total == nullptr ? m : total + piece * stride + first;
      // (Loops without a choice become vectors.)
      for (std::int64_t unit = 0; p == 0 && unit < tile_blocks; ++unit) {
        largest[unit] = detail::product(m[unit], scale);
        all[unit] = detail::product(t[unit], scale);
      }
      for (std::int64_t unit = 0; p != 0 && unit < tile_blocks; ++unit) {
        largest[unit] = larger(detail::product(m[unit], scale), largest[unit]);
        all[unit] = detail::sum(all[unit], detail::product(t[unit], scale));
      }
    }
    const std::int64_t from = begin[list] > first ? begin[list] - first : 0;
    const std::int64_t to = end[list] - first < tile_blocks ? end[list] - first : tile_blocks;
    for (std::int64_t unit = from; unit < to; ++unit) {
      finish(list, first + unit, largest[unit], all[unit]);
    }
  }

 private:
  /// A NaN, wherever it comes, stays: no comparison with one holds.
  PULSEINFER_HD static float larger(float next, float largest) {
    return next > largest || next != next ? next : largest;
  }
  PULSEINFER_HD void finish(std::int64_t list, std::int64_t block, float largest, float all) const {
    const float mean = detail::product(all, share);
    if (masses != nullptr) masses[list * stride + block] = mean != mean ? 0.0f : mean;
    const float joined = join(largest, mean);
    const auto id = static_cast<std::int32_t>(block);
    keys[list * key_stride + block] =
        votes == nullptr ? top_k_key(joined, id) : vote_key(count_votes(list, id), joined, id);
  }
  [[nodiscard]] PULSEINFER_HD float join(float largest, float mean) const {
    if (rule == consensus_rule::mean) return mean;
    // (Of a mean that is infinite, a lambda of 0 would make NaN.)
    if (rule == consensus_rule::max || lambda == 0.0f) return largest;
    return detail::sum(largest, detail::product(lambda, mean));
  }
  [[nodiscard]] PULSEINFER_HD std::int32_t count_votes(std::int64_t list,
                                                       std::int32_t block) const {
    std::int32_t found = 0;
    for (std::int64_t p = list * pieces; p < (list + 1) * pieces; ++p) {
      const std::int32_t* const ids = votes + p * votes_each;
      std::int32_t low = 0;
      std::int32_t high = vote_counts[p];
      while (low < high) {
        const std::int32_t middle = low + (high - low) / 2;
        if (ids[middle] < block) {
          low = middle + 1;
        } else {
          high = middle;
        }
      }
      if (low < vote_counts[p] && ids[low] == block) ++found;
    }
    return found;
  }
};
static_assert(std::is_trivially_copyable_v<join_scores>);

/// Kernel body: the keys of one column's own choice, for block `unit` of tile `i % tiles`.
struct column_keys {
  const float* scores;  ///< [columns of all rows, stride]
  std::int64_t stride;
  const std::int32_t* begin;  ///< [columns of all rows]
  const std::int32_t* end;
  std::int64_t tiles;
  std::uint64_t* keys;  ///< [columns of all rows, key_stride]
  std::int64_t key_stride;

  PULSEINFER_HD void operator()(std::int64_t i, std::int64_t unit) const {
    const std::int64_t column = i / tiles;
    const std::int64_t block = i % tiles * tile_blocks + unit;
    if (block < begin[column] || block >= end[column]) return;
    keys[column * key_stride + block] =
        top_k_key(scores[column * stride + block], static_cast<std::int32_t>(block));
  }
};
static_assert(std::is_trivially_copyable_v<column_keys>);

/// Row kernel: takes the blocks that nobody voted for out of a list.
struct keep_voted {
  const std::uint64_t* keys;  ///< [lists, key_stride]
  std::int64_t key_stride;
  std::int32_t* ids;  ///< [lists, k], ascending, padded with -1
  std::int64_t k;
  std::int32_t* counts;  ///< [lists]

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t list, Group group) const {
    std::int32_t* const of_list = ids + list * k;
    const std::int64_t held = counts[list];
    std::int64_t kept = 0;
    for (std::int64_t start = 0; start < held; start += group.size()) {
      const std::int64_t i = start + group.rank();
      const std::int32_t id = i < held ? of_list[i] : -1;
      const bool stays = id >= 0 && votes_of(keys[list * key_stride + id]) > 0;
      // All lanes have read before one writes: they meet in here.
      const std::int64_t at = kept + group.scan(stays ? 1 : 0);
      kept += group.sum(stays ? 1 : 0);
      if (stays) of_list[at] = id;
    }
    group.sync();
    for (std::int64_t i = kept + group.rank(); i < held; i += group.size()) of_list[i] = -1;
    if (group.rank() == 0) counts[list] = static_cast<std::int32_t>(kept);
  }
};
static_assert(std::is_trivially_copyable_v<keep_voted>);

}  // namespace pulseinfer
