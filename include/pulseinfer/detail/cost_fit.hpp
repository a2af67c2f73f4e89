// SPDX-License-Identifier: Apache-2.0
/// @file
/// Fits the formula of a way's cost to points: no term negative, relative errors least in squares.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "pulseinfer/transfer_cost.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Terms of one equation, in the order in which they are preferred where points do not tell them
/// apart: it makes the way slow beyond the points, a rate above the knee and a cost an entry below.
enum cost_term : std::size_t {
  bytes_above,
  entries_below,
  fixed,
  entries_above,
  bytes_below,
  cost_terms,
};
using term_row = std::array<double, cost_terms>;

/// Solves the normal equations of the terms in `chosen`; empty if they are not independent.
[[nodiscard]] inline std::optional<term_row> solve_terms(
    const std::array<term_row, cost_terms>& normal, const term_row& wanted, unsigned chosen) {
  std::array<std::array<double, cost_terms + 1>, cost_terms> m{};
  std::array<std::size_t, cost_terms> term{};
  std::size_t n = 0;
  for (std::size_t i = 0; i < cost_terms; ++i) {
    if ((chosen >> i & 1u) != 0) term[n++] = i;
  }
  for (std::size_t r = 0; r < n; ++r) {
    for (std::size_t c = 0; c < n; ++c) m[r][c] = normal[term[r]][term[c]];
    m[r][n] = wanted[term[r]];
  }
  for (std::size_t k = 0; k < n; ++k) {
    std::size_t pivot = k;
    for (std::size_t r = k + 1; r < n; ++r) {
      if (std::abs(m[r][k]) > std::abs(m[pivot][k])) pivot = r;
    }
    if (std::abs(m[pivot][k]) < 1e-9) return std::nullopt;
    std::swap(m[k], m[pivot]);
    for (std::size_t r = 0; r < n; ++r) {
      if (r == k) continue;
      const double f = m[r][k] / m[k][k];
      for (std::size_t c = k; c <= n; ++c) m[r][c] -= f * m[k][c];
    }
  }
  term_row x{};
  for (std::size_t k = 0; k < n; ++k) x[term[k]] = m[k][n] / m[k][k];
  return x;
}

struct term_fit {
  term_row terms{};
  double error = 0;  ///< sum of squares of relative errors
};

/// The terms, none negative, for which sum (row * terms - 1)^2 is least. Few terms, so every subset
/// is tried; a term has to earn its place.
[[nodiscard]] inline term_fit fit_terms(std::vector<term_row> rows) {
  term_row scale{};
  for (std::size_t i = 0; i < cost_terms; ++i) {
    for (const term_row& row : rows) scale[i] += row[i] * row[i];
    scale[i] = scale[i] > 0 ? std::sqrt(scale[i]) : 1;
    for (term_row& row : rows) row[i] /= scale[i];
  }
  std::array<term_row, cost_terms> normal{};
  term_row wanted{};
  for (const term_row& row : rows) {
    for (std::size_t i = 0; i < cost_terms; ++i) {
      wanted[i] += row[i];
      for (std::size_t k = 0; k < cost_terms; ++k) normal[i][k] += row[i] * row[k];
    }
  }
  term_fit best{.error = static_cast<double>(rows.size())};
  for (unsigned chosen = 1; chosen < 1u << cost_terms; ++chosen) {
    const auto x = solve_terms(normal, wanted, chosen);
    if (!x || std::any_of(x->begin(), x->end(), [](double term) { return term < 0; })) continue;
    double error = 0;
    for (const term_row& row : rows) {
      double off = -1;
      for (std::size_t i = 0; i < cost_terms; ++i) off += row[i] * (*x)[i];
      error += off * off;
    }
    if (error < 0.999 * best.error) best = {*x, error};
  }
  for (std::size_t i = 0; i < cost_terms; ++i) best.terms[i] /= scale[i];
  return best;
}

[[nodiscard]] inline double entry_size(const measured_cost& m) noexcept {
  return static_cast<double>(m.bytes) / static_cast<double>(m.entries);
}

/// Both sides of a knee fitted at once; points of entries smaller than it are below.
[[nodiscard]] inline term_fit fit_at_knee(std::span<const measured_cost> points, double knee) {
  std::vector<term_row> rows;
  rows.reserve(points.size());
  for (const measured_cost& m : points) {
    const double n = static_cast<double>(m.entries) / m.seconds;
    const double b = static_cast<double>(m.bytes) / m.seconds;
    term_row& row = rows.emplace_back();
    row[fixed] = 1 / m.seconds;
    row[entry_size(m) < knee ? entries_below : entries_above] = n;
    row[entry_size(m) < knee ? bytes_below : bytes_above] = b;
  }
  return fit_terms(std::move(rows));
}

/// The cost of a way from points in their order, which it keeps. Only batched copies have a knee:
/// it is where two laws fit much better than one.
[[nodiscard]] inline way_cost fit_cost(transfer_way way, std::vector<measured_cost> points) {
  way_cost cost;
  term_fit fit = fit_at_knee(points, 0);
  if (way == transfer_way::batched) {
    std::vector<double> sizes;
    sizes.reserve(points.size());
    for (const measured_cost& m : points) sizes.push_back(entry_size(m));
    std::sort(sizes.begin(), sizes.end());
    sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());
    double least = fit.error / 2;
    for (std::size_t i = 1; i < sizes.size(); ++i) {
      const term_fit two = fit_at_knee(points, sizes[i]);
      if (two.error >= least) continue;
      least = two.error;
      fit = two;
      // Where the laws of an entry cross, if they do so between the two sizes; else in the middle.
      const double cross = (two.terms[entries_below] - two.terms[entries_above]) /
                           (two.terms[bytes_above] - two.terms[bytes_below]);
      cost.knee_bytes =
          cross > sizes[i - 1] && cross < sizes[i] ? cross : std::sqrt(sizes[i - 1] * sizes[i]);
    }
  }
  cost.latency = fit.terms[fixed];
  (is_call_each(way) ? cost.per_call : cost.per_entry) = fit.terms[entries_above];
  cost.per_byte = fit.terms[bytes_above];
  cost.per_entry_below = fit.terms[entries_below];
  cost.per_byte_below = fit.terms[bytes_below];
  // What rounding left of a term is none, and no side of the knee costs nothing.
  each_term(cost, [](std::string_view, double& term) { term = term < 1e-18 ? 0 : term; });
  const double least = std::min_element(points.begin(), points.end(), [](auto& m, auto& other) {
                         return m.seconds < other.seconds;
                       })->seconds;
  if (cost.latency + cost.per_call + cost.per_entry + cost.per_byte == 0) cost.latency = least;
  if (cost.knee_bytes > 0 && cost.latency + cost.per_entry_below + cost.per_byte_below == 0) {
    cost.latency = least;
  }
  cost.measured = std::move(points);
  return cost;
}

}  // namespace pulseinfer::detail
