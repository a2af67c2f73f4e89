// SPDX-License-Identifier: Apache-2.0
/// @file
/// How many blocks a step reads: a number, a fraction of each row's context, as few as reach a share
/// of the attention mass, or as many as are worth some of it each.
///
/// A budget is a value; layers may have different ones. It counts blocks that are chosen, beside
/// those that are always in (sinks and the recent window).
/// - *fixed*: `cap` blocks of every row.
/// - *fraction*: of row r the share of its full blocks, rounded up. These are limits of a top-k
///   (`top_k_keys::limits`): what a row does not get, nothing is spent on.
/// - *mass*: a top-k chooses `cap` candidates, and `trim_to_mass` keeps those of the highest
///   estimated mass until they, with what is always in, reach the share of the total.
/// - *worth*: of the same candidates those that have at least the share of the total, each of them.
///   So a block is taken while the next one still adds that much. A row whose attention is flat
///   gets few more blocks, for each would bring little; *mass* gives such a row most.
///
/// All of it is whole numbers: the same blocks are kept on every machine, by groups of any size.
/// `consensus_selector::select` takes one; what follows it is for who chooses by himself.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What a budget depends on.
enum class budget_rule : std::uint8_t { fixed, fraction, mass, worth };

/// The most blocks that a budget by mass may choose from: their masses are added up in 64 bits.
inline constexpr std::int32_t max_mass_cap = 1 << 14;

/// How many blocks are chosen. See the top of the header.
struct selection_budget {
  budget_rule rule = budget_rule::fixed;
  std::int32_t cap = 64;   ///< at most so many of a row; fixed: so many. Results have room for them
  std::int32_t floor = 0;  ///< at least so many, as far as a row has them; fixed: not looked at
  double share = 1.0;      ///< above 0, up to 1: of the full blocks, of the mass, or of the mass
                           ///< what a block must have

  [[nodiscard]] static constexpr selection_budget fixed(std::int32_t blocks) {
    return {.rule = budget_rule::fixed, .cap = blocks};
  }
  [[nodiscard]] static constexpr selection_budget of_context(double share, std::int32_t floor,
                                                             std::int32_t cap) {
    return {.rule = budget_rule::fraction, .cap = cap, .floor = floor, .share = share};
  }
  [[nodiscard]] static constexpr selection_budget of_mass(double share, std::int32_t floor,
                                                          std::int32_t cap) {
    return {.rule = budget_rule::mass, .cap = cap, .floor = floor, .share = share};
  }
  [[nodiscard]] static constexpr selection_budget of_worth(double share, std::int32_t floor,
                                                           std::int32_t cap) {
    return {.rule = budget_rule::worth, .cap = cap, .floor = floor, .share = share};
  }

  /// It depends on how much of the attention each block is expected to have.
  [[nodiscard]] constexpr bool needs_masses() const {
    return rule == budget_rule::mass || rule == budget_rule::worth;
  }
  friend constexpr bool operator==(const selection_budget&, const selection_budget&) = default;
};

/// The budget, if it can be kept.
/// @param what        who asks, for the message
/// @param budget      to check
/// @param max_blocks  blocks that a row may have at most
/// @throws std::invalid_argument  naming the value and its limits
inline const selection_budget& checked_budget(const char* what, const selection_budget& budget,
                                              std::int64_t max_blocks) {
  detail::expects(budget.rule <= budget_rule::worth, what, ": the budget's rule is ",
                  static_cast<int>(budget.rule), ", expected one of budget_rule");
  const bool by_mass = budget.rule == budget_rule::mass;
  const std::int64_t most = by_mass && max_blocks > max_mass_cap ? max_mass_cap : max_blocks;
  detail::expects(budget.cap >= 1 && budget.cap <= most, what, ": the budget's cap is ", budget.cap,
                  ", expected 1 to ", most);
  if (budget.rule == budget_rule::fixed) return budget;
  detail::expects(budget.floor >= 0 && budget.floor <= budget.cap, what, ": the budget's floor is ",
                  budget.floor, ", expected 0 to its cap, which is ", budget.cap);
  detail::expects(budget.share > 0 && budget.share <= 1, what, ": the budget's share is ",
                  budget.share, ", expected above 0, and at most 1");
  return budget;
}

/// Estimated attention masses of lists, in device memory. In any unit that a list keeps to: they
/// are compared with its total.
///
/// A mass counts in steps of 2^-40, rounded down, and as 256 from there on; NaN, and what is below
/// zero, counts as none. So a total of 1 leaves twelve digits, and one of millions is no total.
struct mass_view {
  const float* masses = nullptr;  ///< [lists, stride], by block
  std::int64_t stride = 0;
  const float* always = nullptr;  ///< [lists]: of what is always in; null: none
  const float* totals = nullptr;  ///< [lists]: of everything, what is always in too; null: 1
};

namespace detail {

/// The share in steps of 2^-32, rounded down, at least one. (Rounded up, a tenth of ten blocks would
/// be two: 0.1 has no end in binary digits.)
[[nodiscard]] inline std::uint64_t fixed_share(double share) {
  const double steps = std::floor(std::ldexp(share, 32));
  return steps < 1 ? 1 : static_cast<std::uint64_t>(steps);
}

/// value * share, rounded up. The value is at most 2^62, the share at most 1.
PULSEINFER_HD inline std::int64_t share_of(std::int64_t value, std::uint64_t share) {
  constexpr std::uint64_t low = 0xffffffffu;
  const auto whole = static_cast<std::uint64_t>(value);
  return static_cast<std::int64_t>((whole >> 32) * share + (((whole & low) * share + low) >> 32));
}

/// Bits that order as masses do; none where there is no mass.
PULSEINFER_HD inline std::uint32_t mass_level(float mass) {
  const std::uint32_t bits = bits_of(mass);
  return bits <= 0x7f800000u ? bits : 0;  // above are NaN, and all that has a sign
}

/// A mass in steps of 2^-40, rounded down; from 2^most_exponent on it is that.
/// @param level          see mass_level
/// @param most_exponent  at most 22
PULSEINFER_HD inline std::int64_t fixed_mass(std::uint32_t level, int most_exponent = 8) {
  const int exponent = static_cast<int>(level >> 23) - 127;
  if (exponent >= most_exponent) return std::int64_t{1} << (most_exponent + 40);
  const std::int64_t digits = (level & 0x7fffffu) | 0x800000u;
  const int shift = exponent - 23 + 40;
  if (shift >= 0) return digits << shift;
  return shift > -24 ? digits >> -shift : 0;
}

}  // namespace detail

/// Kernel body: the limit of each list, by the full blocks of its row.
struct limit_to_context {
  const std::int32_t* tokens;  ///< [rows]
  std::int32_t block_tokens;
  std::int32_t max_blocks;
  std::int32_t groups;  ///< lists a row
  std::int32_t floor;
  std::int32_t cap;
  std::uint64_t share;   ///< in steps of 2^-32
  std::int32_t* limits;  ///< [rows * groups]

  PULSEINFER_HD void operator()(std::int64_t row, std::int64_t group) const {
    std::int64_t full = tokens[row] / block_tokens;
    if (full > max_blocks) full = max_blocks;
    if (full < 0) full = 0;
    std::int64_t limit = detail::share_of(full, share);
    if (limit < floor) limit = floor;
    if (limit > cap) limit = cap;
    limits[row * groups + group] = static_cast<std::int32_t>(limit);
  }
};
static_assert(std::is_trivially_copyable_v<limit_to_context>);

/// Row kernel: of the blocks in a list keeps the fewest of the highest mass that, with what is
/// always in, reach a share of the total; of equal masses those of lower id. Or, `by_worth`, those
/// that each have at least this share, whatever is always in. At least `floor` are kept, as far as
/// there are; all, where all together do not reach the share. The others are taken out: the kept
/// ones are ascending, padded with -1. Of a list that has no mass at all nothing is known: it is kept.
struct trim_to_mass {
  mass_view mass;
  std::uint64_t share;  ///< in steps of 2^-32
  std::int32_t floor;
  std::int32_t cap;
  const std::int32_t* ids;     ///< [lists, cap], ascending, in [0, mass.stride)
  const std::int32_t* counts;  ///< [lists]: how many there are
  std::int32_t* kept;          ///< [lists, cap]; may be `ids`
  std::int32_t* kept_counts;   ///< [lists]; may be `counts`
  bool by_worth = false;

  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t list, Group group) const {
    std::int64_t count = counts[list];
    if (count > cap) count = cap;
    if (count < 0) count = 0;
    std::int64_t wanted = detail::share_of(
        mass.totals == nullptr ? std::int64_t{1} << 40 : large(mass.totals[list]), share);
    const std::int64_t least = count < floor ? count : floor;

    cut at{0, count, count};
    if (by_worth) {
      at = cut_below(list, count, wanted, group);
    } else {
      if (mass.always != nullptr) wanted -= large(mass.always[list]);
      if (wanted <= add(list, count, 0, true, group)) {
        at = find_cut(list, count, wanted, true, group);
      }
    }
    if (at.kept < least) at = find_cut(list, count, least, false, group);
    write(list, count, at, group);
  }

 private:
  /// Kept is what has a higher level, and of those that have this one the first so many.
  struct cut {
    std::uint32_t level;
    std::int64_t ties;
    std::int64_t kept;  ///< in all
  };

  PULSEINFER_HD std::uint32_t level_of(std::int64_t list, std::int64_t i) const {
    return detail::mass_level(mass.masses[list * mass.stride + ids[list * cap + i]]);
  }
  PULSEINFER_HD static std::int64_t large(float value) {
    return detail::fixed_mass(detail::mass_level(value), 22);
  }

  /// The mass, or the number, of blocks whose level is at least `level`.
  template <class Group>
  PULSEINFER_HD std::int64_t add(std::int64_t list, std::int64_t count, std::uint32_t level,
                                 bool by_mass, Group group) const {
    std::int64_t total = 0;
    for (std::int64_t i = group.rank(); i < count; i += group.size()) {
      const std::uint32_t here = level_of(list, i);
      if (here >= level) total += by_mass ? detail::fixed_mass(here) : 1;
    }
    return group.sum(total);
  }

  /// The fewest blocks that come to `wanted`, which all together do: the highest level from which
  /// on they do, bit by bit, and then how many of that level.
  template <class Group>
  PULSEINFER_HD cut find_cut(std::int64_t list, std::int64_t count, std::int64_t wanted,
                             bool by_mass, Group group) const {
    if (wanted <= 0) return {0x7fffffffu, 0, 0};  // above any mass
    std::uint32_t level = 0;
    for (int bit = 30; bit >= 0; --bit) {
      const std::uint32_t higher = level | (1u << bit);
      if (add(list, count, higher, by_mass, group) >= wanted) level = higher;
    }
    const std::int64_t missing = wanted - add(list, count, level + 1, by_mass, group);
    const std::int64_t each = by_mass ? detail::fixed_mass(level) : 1;
    const std::int64_t ties = (missing + each - 1) / each;
    return {level, ties, add(list, count, level + 1, false, group) + ties};
  }

  /// The blocks that have `wanted` each, and a step of mass at least; all where none has any mass, for
  /// then nothing is known of them.
  template <class Group>
  PULSEINFER_HD cut cut_below(std::int64_t list, std::int64_t count, std::int64_t wanted,
                              Group group) const {
    if (wanted < 1) wanted = 1;
    std::uint32_t level = 0;  // the highest that is too low
    for (int bit = 30; bit >= 0; --bit) {
      const std::uint32_t higher = level | (1u << bit);
      if (detail::fixed_mass(higher) < wanted) level = higher;
    }
    const std::int64_t found = add(list, count, level + 1, false, group);
    if (found == 0 && add(list, count, 1, false, group) == 0) return {0, count, count};
    return {level, 0, found};
  }

  /// In turns: what a turn writes lies before what the next ones read.
  template <class Group>
  PULSEINFER_HD void write(std::int64_t list, std::int64_t count, const cut& at,
                           Group group) const {
    std::int32_t* out = kept + list * cap;
    std::int64_t above = 0;
    std::int64_t ties = 0;
    for (std::int64_t start = 0; start < count; start += group.size()) {
      const std::int64_t i = start + group.rank();
      const std::int32_t id = i < count ? ids[list * cap + i] : -1;
      const std::uint32_t level = i < count ? level_of(list, i) : 0;
      const bool is_above = i < count && level > at.level;
      const bool is_tie = i < count && level == at.level;
      // Both counts in one number.
      const std::int64_t flags = (is_above ? std::int64_t{1} << 32 : 0) | (is_tie ? 1 : 0);
      const std::int64_t before = group.scan(flags);
      const std::int64_t tie = ties + (before & 0xffffffff);
      if (is_above || (is_tie && tie < at.ties)) {
        out[above + (before >> 32) + (tie < at.ties ? tie : at.ties)] = id;
      }
      const std::int64_t found = group.sum(flags);
      above += found >> 32;
      ties += found & 0xffffffff;
    }
    for (std::int64_t i = at.kept + group.rank(); i < cap; i += group.size()) out[i] = -1;
    if (group.rank() == 0) kept_counts[list] = static_cast<std::int32_t>(at.kept);
  }
};
static_assert(std::is_trivially_copyable_v<trim_to_mass>);

/// Enqueues what gives each list of a top-k its own limit, where the budget is a fraction; returns
/// what `top_k_keys::limits` takes, which is null for other budgets.
///
/// @param backend       the machine of the arrays
/// @param budget        checked
/// @param tokens        [rows]: tokens of each row; device memory, valid until the stream has got
///                      past this call
/// @param rows          how many there are
/// @param groups        lists a row; list r * groups + g is group g of row r
/// @param block_tokens  tokens of a block
/// @param max_blocks    blocks that a row may have at most
/// @param limits        [rows * groups], device memory
/// @param stream        the writers of tokens stand on it before this call
/// @throws std::invalid_argument  on sizes that do not fit; nothing is enqueued
template <backend Backend>
const std::int32_t* enqueue_limits(Backend& backend, const selection_budget& budget,
                                   const std::int32_t* tokens, std::int64_t rows,
                                   std::int32_t groups, std::int32_t block_tokens,
                                   std::int32_t max_blocks, std::int32_t* limits,
                                   typename Backend::stream_ref stream) {
  checked_budget("enqueue_limits", budget, max_blocks);
  if (budget.rule != budget_rule::fraction) return nullptr;
  detail::expects(rows >= 0, "enqueue_limits: rows is ", rows, ", expected at least 0");
  detail::expects(groups >= 1, "enqueue_limits: groups is ", groups, ", expected at least 1");
  detail::expects(block_tokens >= 1, "enqueue_limits: block_tokens is ", block_tokens,
                  ", expected at least 1");
  detail::expects((tokens != nullptr && limits != nullptr) || rows == 0,
                  "enqueue_limits: tokens or limits is null");
  backend.for_each({rows, groups}, {}, static_cast<std::uint64_t>(rows) * (4 + 4 * groups),
                   limit_to_context{tokens, block_tokens, max_blocks, groups, budget.floor,
                                    budget.cap, detail::fixed_share(budget.share), limits},
                   stream);
  return limits;
}

/// Enqueues what cuts lists down to the mass that is wanted, in place, where the budget is by mass or
/// by worth; nothing for other budgets.
///
/// @param backend  the machine of the arrays
/// @param budget   checked; `cap` is the length of the lists
/// @param mass     estimated masses of all blocks in the lists; valid until the stream has got past
///                 this call
/// @param lists    how many there are
/// @param ids      [lists, cap], as a top-k writes them; device memory
/// @param counts   [lists], device memory
/// @param stream   the writers of masses, ids and counts stand on it before this call
/// @throws std::invalid_argument  on sizes that do not fit; nothing is enqueued
/// @par Cost  a list's masses are read some 35 times by one group; by worth 2 times, and 35 where
///            the floor is not reached
template <backend Backend>
void enqueue_trim(Backend& backend, const selection_budget& budget, const mass_view& mass,
                  std::int64_t lists, std::int32_t* ids, std::int32_t* counts,
                  typename Backend::stream_ref stream) {
  checked_budget("enqueue_trim", budget, max_top_k_columns);
  if (!budget.needs_masses()) return;
  detail::expects(lists >= 0, "enqueue_trim: lists is ", lists, ", expected at least 0");
  if (lists == 0) return;
  detail::expects(mass.masses != nullptr && ids != nullptr && counts != nullptr,
                  "enqueue_trim: masses, ids or counts is null");
  detail::expects(mass.stride >= 1, "enqueue_trim: the stride of masses is ", mass.stride,
                  ", expected at least 1");
  backend.for_each_row(
      lists, {}, static_cast<std::uint64_t>(lists * budget.cap) * 12,
      trim_to_mass{mass, detail::fixed_share(budget.share), budget.floor, budget.cap, ids, counts,
                   ids, counts, budget.rule == budget_rule::worth},
      stream);
}

}  // namespace pulseinfer
