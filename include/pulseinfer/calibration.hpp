// SPDX-License-Identifier: Apache-2.0
/// @file
/// Measures what each way of moving costs on the machine at hand, with few and small transfers.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/detail/cost_fit.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/transfer_cost.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What a calibration may ask of a machine. Shapes in between are interpolated, shapes beyond are
/// extrapolated by the fitted formula.
struct calibration_options {
  std::int64_t least_entry_bytes = 1 << 10;
  std::int64_t most_entry_bytes = 1 << 20;
  std::int64_t least_entries = 16;
  std::int64_t most_entries = 4096;
  std::int64_t max_transfer_bytes = 128 << 20;  ///< of one measured transfer
  std::int32_t max_transfers = 4000;            ///< measured in all
  /// That all of them take, but for the last few. Each way is measured once at least.
  double max_seconds = 0.7;
  /// What to measure; the cheapest is chosen among them.
  std::vector<transfer_way> ways = {transfer_way::staged, transfer_way::direct,
                                    transfer_way::batched, transfer_way::pull};
};

/// A machine that can be asked how long, in seconds, a way takes for a shape. Infinity: the way
/// cannot do that shape there, or at all.
template <class Measure>
concept transfer_measure =
    std::invocable<Measure&, transfer_way, const transfer_shape&> &&
    std::convertible_to < std::invoke_result_t<Measure&, transfer_way, const transfer_shape&>,
double > ;

namespace detail {

inline const calibration_options& checked_calibration(const calibration_options& o) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
    expects(value >= least && value <= most, "calibrate: ", name, " is ", value, ", expected ",
            least, " to ", most);
  };
  check("most_entry_bytes", o.most_entry_bytes, 1, std::int64_t{1} << 30);
  check("least_entry_bytes", o.least_entry_bytes, 1, o.most_entry_bytes);
  check("most_entries", o.most_entries, 1, std::int64_t{1} << 30);
  check("least_entries", o.least_entries, 1, o.most_entries);
  check("max_transfer_bytes", o.max_transfer_bytes, o.least_entry_bytes * o.least_entries,
        detail::most_bytes_with_cost);
  check("max_transfers", o.max_transfers, 1, 1 << 24);
  expects(o.max_seconds > 0 && o.max_seconds <= 1e6, "calibrate: max_seconds is ",
          number_text(o.max_seconds), ", expected more than 0, at most 1e6");
  expects(!o.ways.empty(), "calibrate: ways is empty, expected at least one");
  for (const transfer_way way : o.ways) {
    expects(way != transfer_way::automatic && name_of(way) != "unknown",
            "calibrate: ", name_of(way), " (", static_cast<int>(way),
            ") is no way that has a cost");
  }
  return o;
}

/// least to most in equal steps of a logarithm, each at most `factor`.
[[nodiscard]] inline std::vector<std::int64_t> spaced(std::int64_t least, std::int64_t most,
                                                      double factor) {
  const double span = std::log(static_cast<double>(most) / static_cast<double>(least));
  const auto steps = static_cast<int>(std::ceil(span / std::log(factor) - 1e-9));
  std::vector<std::int64_t> values{least};
  for (int i = 1; i <= steps; ++i) {
    const double at = static_cast<double>(least) * std::exp(span * i / steps);
    const std::int64_t value = i == steps ? most : std::llround(at);
    if (value > values.back()) values.push_back(value);
  }
  return values;
}

/// Transfers of one entry size and count, by each way. Infinity: not measured, or not possible.
struct cost_column {
  std::int64_t entry_bytes = 0;
  std::array<double, way_names.size()> seconds{};
  bool sure = false;  ///< was measured a second time
};
struct cost_rows {
  std::int64_t entries = 0;
  std::vector<cost_column> columns;  ///< by entry size
};

template <class Measure>
class calibrator {
 public:
  calibrator(Measure& measure, const calibration_options& o)
      : measure_(&measure), options_(checked_calibration(o)) {}

  [[nodiscard]] transfer_costs run() {
    allowed_ = 0.6;  // the rest is for a closer look
    measure_grid();
    allowed_ = 1;
    for (cost_rows& row : rows_) refine(row);
    transfer_costs costs;
    for (const transfer_way way : options_.ways) {
      std::vector<measured_cost> points;
      for (const cost_rows& row : rows_) {
        for (const cost_column& c : row.columns) {
          const double seconds = c.seconds[index(way)];
          if (std::isfinite(seconds)) {
            points.push_back({row.entries, row.entries * c.entry_bytes, seconds});
          }
        }
      }
      if (!points.empty()) costs.set(way, fit_cost(way, std::move(points)));
    }
    return costs;
  }

 private:
  static constexpr int max_refinements = 12;  ///< of a row
  static constexpr double close = 0.04;       ///< ln of a lead that does not matter

  [[nodiscard]] static constexpr std::size_t index(transfer_way way) noexcept {
    return static_cast<std::size_t>(way);
  }
  [[nodiscard]] bool may_go_on() const noexcept {
    return transfers_ < allowed_ * options_.max_transfers &&
           spent_ < allowed_ * options_.max_seconds;
  }

  double measure_once(transfer_way way, const transfer_shape& shape) {
    const double seconds = (*measure_)(way, shape);
    expects(seconds > 0, "calibrate: ", name_of(way), " took ", number_text(seconds),
            " seconds for ", shape.pieces, " entries of ", shape.bytes,
            " bytes, expected more than 0, or infinity where it cannot do that");
    ++transfers_;
    if (std::isfinite(seconds)) spent_ += seconds;
    return std::max(seconds, 1e-12);
  }
  /// The median of three, of which the first is known; the better of two where they take long.
  double measure_again(transfer_way way, const transfer_shape& shape, double first) {
    if (!std::isfinite(first)) return first;
    const double second = measure_once(way, shape);
    if (first > long_seconds) return std::min(first, second);
    const double third = measure_once(way, shape);
    return std::max(std::min(first, second), std::min(std::max(first, second), third));
  }
  static constexpr double long_seconds = 1e-3;
  static constexpr double very_long_seconds = 3e-3;  ///< once is enough, unless it looks odd

  [[nodiscard]] static transfer_shape shape_of(const cost_rows& row,
                                               std::int64_t entry_bytes) noexcept {
    return {row.entries, row.entries, row.entries * entry_bytes};
  }

  /// Measures the ways in `wanted` (bits) and puts the column into its place.
  void measure_column(cost_rows& row, std::int64_t entry_bytes, unsigned wanted) {
    cost_column column{.entry_bytes = entry_bytes};
    column.seconds.fill(std::numeric_limits<double>::infinity());
    const transfer_shape shape = shape_of(row, entry_bytes);
    for (const transfer_way way : options_.ways) {
      // The first column is measured whatever it takes: no way is left without a cost.
      if ((wanted >> index(way) & 1u) == 0 || (has_columns_ && !may_go_on())) continue;
      if (!std::exchange(warm_[index(way)], true)) (void)measure_once(way, shape);
      column.seconds[index(way)] = measure_once(way, shape);
    }
    // Of what is far from the best it is enough to know that.
    const double best = column.seconds[best_of(column)];
    for (const transfer_way way : options_.ways) {
      double& seconds = column.seconds[index(way)];
      if (seconds < 5 * best && seconds < very_long_seconds && may_go_on()) {
        seconds = measure_again(way, shape, seconds);
      }
    }
    const auto at = std::lower_bound(
        row.columns.begin(), row.columns.end(), entry_bytes,
        [](const cost_column& c, std::int64_t bytes) { return c.entry_bytes < bytes; });
    row.columns.insert(at, column);
    has_columns_ = true;
  }

  /// Entry sizes in steps of 2, counts in steps of 4, small transfers first: what a short budget
  /// leaves out is large.
  void measure_grid() {
    const auto counts = spaced(options_.least_entries, options_.most_entries, 4);
    std::vector<std::pair<std::size_t, std::int64_t>> grid;
    for (std::size_t r = 0; r < counts.size(); ++r) {
      rows_.push_back({counts[r], {}});
      const std::int64_t most =
          std::min(options_.most_entry_bytes, options_.max_transfer_bytes / counts[r]);
      if (most < options_.least_entry_bytes) continue;
      for (const std::int64_t size : spaced(options_.least_entry_bytes, most, 2)) {
        grid.emplace_back(r, size);
      }
    }
    std::stable_sort(grid.begin(), grid.end(), [&](const auto& a, const auto& b) {
      return counts[a.first] * a.second < counts[b.first] * b.second;
    });
    for (const auto& [row, size] : grid) {
      if (!has_columns_ || may_go_on()) measure_column(rows_[row], size, ~0u);
    }
  }

  /// Where a row is to be measured more closely, and how much it matters.
  struct refinement {
    std::size_t after = 0;  ///< the column before it
    double at = 0.5;        ///< of the way to the next column, in logarithms
    double gain = 0;
  };

  /// Adds columns where the best way changes, and where a way's times bend: there is a knee.
  void refine(cost_rows& row) {
    int refinements = 0;
    while (may_go_on()) {
      refinement most;
      const auto consider = [&](const refinement& r) {
        if (r.gain > most.gain) most = r;
      };
      for (std::size_t c = 1; c < row.columns.size(); ++c) {
        consider(change_of_lead(row, c - 1));
        if (c + 1 < row.columns.size()) consider(bend(row, c));
      }
      if (most.gain == 0) return;
      // Another program may have been in the way: what looks odd is measured again first.
      if (make_sure(row, most.after)) continue;
      if (refinements++ == max_refinements || !split(row, most)) return;
    }
  }

  /// Measures the columns around an interval again; false if they were before.
  bool make_sure(cost_rows& row, std::size_t after) {
    const std::size_t begin = after == 0 ? 0 : after - 1;
    const std::size_t end = std::min(after + 3, row.columns.size());
    unsigned wanted = 0;
    for (std::size_t c = begin; c < end; ++c) wanted |= ways_that_matter(row.columns[c]);
    bool any = false;
    for (std::size_t c = begin; c < end; ++c) {
      cost_column& column = row.columns[c];
      if (std::exchange(column.sure, true)) continue;
      any = true;
      for (const transfer_way way : options_.ways) {
        double& seconds = column.seconds[index(way)];
        if ((wanted >> index(way) & 1u) == 0 || !std::isfinite(seconds) || !may_go_on()) continue;
        // Interference only ever adds.
        const transfer_shape shape = shape_of(row, column.entry_bytes);
        seconds = std::min(seconds, measure_again(way, shape, measure_once(way, shape)));
      }
    }
    return any;
  }

  /// Between two columns with different best ways: near the crossing of two straight lines, though
  /// the lines are not straight.
  [[nodiscard]] refinement change_of_lead(const cost_rows& row, std::size_t c) const {
    const cost_column& a = row.columns[c];
    const cost_column& b = row.columns[c + 1];
    const std::size_t first = best_of(a);
    const std::size_t last = best_of(b);
    if (first == last || span(a, b) < 0.02 || !std::isfinite(a.seconds[first] + b.seconds[last])) {
      return {};
    }
    const double lead = std::log(a.seconds[last] / a.seconds[first]);
    const double lag = std::log(b.seconds[first] / b.seconds[last]);
    if (std::max(lead, lag) < close) return {};
    const double at = std::isfinite(lead + lag) ? std::clamp(lead / (lead + lag), 0.15, 0.85) : 0.5;
    return {c, at, 100 + std::max(lead, lag)};
  }

  /// Around a column at which the slope of a way that matters changes: in the wider interval beside
  /// it. The gain is how far the line between the columns may be off.
  [[nodiscard]] refinement bend(const cost_rows& row, std::size_t c) const {
    const cost_column& a = row.columns[c - 1];
    const cost_column& b = row.columns[c];
    const cost_column& d = row.columns[c + 1];
    const double before = span(a, b);
    const double after = span(b, d);
    refinement most;
    for (const transfer_way way : options_.ways) {
      const std::size_t w = index(way);
      if (!matters(b, w) || !std::isfinite(a.seconds[w] + d.seconds[w])) continue;
      const double change = std::log(d.seconds[w] / b.seconds[w]) / after -
                            std::log(b.seconds[w] / a.seconds[w]) / before;
      const double wider = std::max(before, after);
      const double gain = std::abs(change) * wider / 4;
      if (gain > close && wider > 0.08 && gain > most.gain) {
        most = {before > after ? c - 1 : c, 0.5, gain};
      }
    }
    return most;
  }

  bool split(cost_rows& row, const refinement& where) {
    const cost_column& a = row.columns[where.after];
    const cost_column& b = row.columns[where.after + 1];
    const auto size = static_cast<std::int64_t>(
        std::llround(static_cast<double>(a.entry_bytes) * std::exp(where.at * span(a, b))));
    if (size <= a.entry_bytes || size >= b.entry_bytes) return false;
    measure_column(row, size, ways_that_matter(a) | ways_that_matter(b));
    return true;
  }

  [[nodiscard]] static double span(const cost_column& a, const cost_column& b) noexcept {
    return std::log(static_cast<double>(b.entry_bytes) / static_cast<double>(a.entry_bytes));
  }
  /// Not much slower than the best.
  [[nodiscard]] static bool matters(const cost_column& column, std::size_t way) noexcept {
    return column.seconds[way] < 2 * column.seconds[best_of(column)];
  }
  [[nodiscard]] unsigned ways_that_matter(const cost_column& column) const noexcept {
    unsigned ways = 0;
    for (const transfer_way way : options_.ways) {
      if (matters(column, index(way))) ways |= 1u << index(way);
    }
    return ways;
  }
  [[nodiscard]] static std::size_t best_of(const cost_column& column) noexcept {
    return static_cast<std::size_t>(std::min_element(column.seconds.begin(), column.seconds.end()) -
                                    column.seconds.begin());
  }

  Measure* measure_;
  calibration_options options_;
  std::vector<cost_rows> rows_;
  std::array<bool, way_names.size()> warm_{};
  bool has_columns_ = false;
  double allowed_ = 1;  ///< share of the budget
  std::int32_t transfers_ = 0;
  double spent_ = 0;
};

}  // namespace detail

/// Finds out what each way costs, by transfers of entries of one size: units that are one piece
/// each. Entry sizes in steps of two and counts in steps of four are measured, short transfers
/// three times, and then more closely where the best way changes or the times of a way bend.
///
/// @param measure  called as measure(way, shape), returns seconds; see transfer_measure. The first
///                 call of each way is not counted, so that it may warm up
/// @param options  what may be asked of the machine
/// @return  costs of the ways that could do anything; a way that could not has none
/// @throws std::invalid_argument  on bad options, and when a measure returns no number or not more
///                                than 0
/// @throws whatever `measure` throws
/// @par Cost  at most `max_seconds` by the sum of what is returned, and three transfers more;
///            milliseconds of arithmetic
template <transfer_measure Measure>
[[nodiscard]] transfer_costs calibrate(Measure&& measure, const calibration_options& options = {}) {
  return detail::calibrator<std::remove_reference_t<Measure>>(measure, options).run();
}

}  // namespace pulseinfer
