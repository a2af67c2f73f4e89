// SPDX-License-Identifier: Apache-2.0
/// @file
/// Scores as shares of attention: a softmax over the blocks of each query, in one fixed order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "pulseinfer/budget.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/exponential.hpp"
#include "pulseinfer/digest_tile.hpp"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Which blocks the scores of a query are divided over.
enum class score_normalisation : std::uint8_t {
  none,        ///< scores are logits, as they are
  candidates,  ///< shares of the blocks that may be chosen
  context,     ///< shares of all full blocks: sinks and window, which often have most, included
};

/// Row kernel: turns the scores of one column (a head's query of one token) into e^(score - the
/// largest), in place, and finds the factor that makes shares of them: 1 / their sum.
///
/// Sums are 64, one for each block of a tile, over the tiles in their order, then those 64 in order.
/// A NaN, which stands for a block without a digest, stays and counts for nothing; infinite scores
/// share all between them.
struct normalise_scores {
  float* scores;  ///< [rows, columns, stride]
  std::int64_t stride;
  std::int32_t columns;       ///< of a row
  const std::int32_t* begin;  ///< [rows] blocks that count; null: from 0
  const std::int32_t* end;    ///< [rows]
  float* partial;             ///< [rows, columns, tile_blocks] of its own
  float* factor;              ///< [rows, columns]; NaN where nothing counts

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    const std::int64_t first = begin == nullptr ? 0 : begin[row / columns];
    const std::int64_t last = end[row / columns];
    float* const of_row = scores + row * stride;
    std::int64_t most = 0;
    for (std::int64_t i = first + group.rank(); i < last; i += group.size()) {
      const std::int64_t bits = ordered_score_bits(of_row[i]);
      most = bits > most ? bits : most;
    }
    most = -group.min(-most);
    const float largest = score_of_bits(static_cast<std::uint32_t>(most));
    float* const sums = partial + row * tile_blocks;
    if (group.size() == 1) {
      sum_by_tile(of_row, first, last, largest, sums);
    } else {
      for (std::int64_t unit = group.rank(); unit < tile_blocks; unit += group.size()) {
        float total = 0.0f;
        for (std::int64_t i = first / tile_blocks * tile_blocks + unit; i < last;
             i += tile_blocks) {
          if (i >= first) add(of_row[i], largest, total);
        }
        sums[unit] = total;
      }
      group.sync();
    }
    if (group.rank() != 0) return;
    float total = 0.0f;
    for (std::int64_t unit = 0; unit < tile_blocks; ++unit) {
      total = detail::sum(total, sums[unit]);
    }
    factor[row] = total > 0.0f ? detail::quotient(1.0f, total) : detail::float_of(0x7fc00000u);
  }

 private:
  PULSEINFER_HD static float score_of_bits(std::uint32_t ordered) {
    const bool is_positive = (ordered & 0x80000000u) != 0;
    return detail::float_of(is_positive ? ordered ^ 0x80000000u : ~ordered);
  }
  PULSEINFER_HD static void add(float& score, float largest, float& total) {
    // (Infinities have no difference.)
    const float share = score == largest ? 1.0f : detail::exponential(detail::sum(score, -largest));
    score = share;
    total = detail::sum(total, share != share ? 0.0f : share);
  }
  /// The same sums for one lane, in the order in which memory lies.
  PULSEINFER_HD static void sum_by_tile(float* of_row, std::int64_t first, std::int64_t last,
                                        float largest, float* sums) {
    float total[tile_blocks] = {};
    std::int64_t i = first;
    for (; i < last && i % tile_blocks != 0; ++i) add(of_row[i], largest, total[i % tile_blocks]);
    for (; i + tile_blocks <= last; i += tile_blocks) {
      for (std::int64_t unit = 0; unit < tile_blocks; ++unit) {
        add(of_row[i + unit], largest, total[unit]);
      }
    }
    for (; i < last; ++i) add(of_row[i], largest, total[i % tile_blocks]);
    for (std::int64_t unit = 0; unit < tile_blocks; ++unit) sums[unit] = total[unit];
  }
};
static_assert(std::is_trivially_copyable_v<normalise_scores>);

/// Row kernel: what a list estimates for all that is always in, the full blocks of its row that may
/// not be chosen: the mean over its queries. Blocks are added up in whole steps of 2^-40, so that
/// the sum does not depend on the size of the group.
struct add_always_in {
  const float* scores;  ///< [lists, pieces, stride], as `normalise_scores` leaves them
  const float* factor;  ///< [lists, pieces]
  std::int64_t stride;
  std::int32_t pieces;        ///< queries of a list
  float share;                ///< of one query in the mean: 1 / queries of a list
  const std::int32_t* begin;  ///< [lists] blocks that may be chosen; the others are always in
  const std::int32_t* end;
  const std::int32_t* full;  ///< [lists / groups]
  std::int32_t groups;       ///< lists a row
  float* masses;             ///< [lists]

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t list, Group group) const {
    const std::int64_t blocks = full[list / groups];
    const std::int64_t head = begin[list] < blocks ? begin[list] : blocks;
    const std::int64_t tail = end[list] < blocks ? end[list] : blocks;
    std::int64_t total = 0;
    for (std::int64_t i = group.rank(); i < head + blocks - tail; i += group.size()) {
      const std::int64_t block = i < head ? i : tail + i - head;
      total += detail::fixed_mass(detail::mass_level(mean(list, block)));
    }
    total = group.sum(total);
    if (group.rank() == 0) masses[list] = detail::product(static_cast<float>(total), 0x1p-40f);
  }

 private:
  /// As the mean of a block that may be chosen is made.
  [[nodiscard]] PULSEINFER_HD float mean(std::int64_t list, std::int64_t block) const {
    float all = 0.0f;
    for (std::int64_t p = list * pieces; p < (list + 1) * pieces; ++p) {
      all = detail::sum(all, detail::product(scores[p * stride + block], factor[p]));
    }
    return detail::product(all, share);
  }
};
static_assert(std::is_trivially_copyable_v<add_always_in>);

}  // namespace pulseinfer
