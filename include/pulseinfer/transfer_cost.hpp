// SPDX-License-Identifier: Apache-2.0
/// @file
/// What moving costs, by each way of moving, as numbers of one machine: they predict a time, choose
/// the cheapest way, and can be saved. calibration.hpp measures them.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pulseinfer/detail/text_fields.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// How a recall moves its units.
enum class transfer_way : std::uint8_t {
  automatic,  ///< the cheapest of the others, by `transfer_costs`
  staged,     ///< gather, one DMA a chunk, scatter
  direct,     ///< one copy for each run of adjacent bytes
  batched,    ///< all runs in one batched copy call
  pull,       ///< a kernel reads them from mapped pinned memory
  per_block,  ///< one copy for each strip of each unit: what the others are measured against
};

namespace detail {

inline constexpr std::array<std::string_view, 6> way_names = {"automatic", "staged", "direct",
                                                              "batched",   "pull",   "per_block"};
/// The ways that have a cost.
inline constexpr std::array priced_ways = {transfer_way::staged, transfer_way::direct,
                                           transfer_way::batched, transfer_way::pull,
                                           transfer_way::per_block};

}  // namespace detail

/// The way's name, as it stands in this header.
[[nodiscard]] constexpr std::string_view name_of(transfer_way way) noexcept {
  const auto index = static_cast<std::size_t>(way);
  return index < detail::way_names.size() ? detail::way_names[index] : "unknown";
}

/// What is to be moved, as far as its cost goes. All three are at least 1, and bytes at least the
/// other two.
struct transfer_shape {
  std::int64_t units = 0;
  std::int64_t pieces = 0;  ///< runs of adjacent bytes: what copy engines are given one by one
  std::int64_t bytes = 0;   ///< of all units
  friend bool operator==(const transfer_shape&, const transfer_shape&) = default;
};

/// How long one transfer took, of `entries` of equal size.
struct measured_cost {
  std::int64_t entries = 0;
  std::int64_t bytes = 0;
  double seconds = 0;
  friend bool operator==(const measured_cost&, const measured_cost&) = default;
};

/// What one way costs, in seconds:
///
///     latency + per_call * calls + per_entry * entries + per_byte * bytes
///
/// An entry is a unit where a kernel moves it (staged, pull), a piece where a copy engine does
/// (direct, batched, per_block). A direct or per_block transfer is a call an entry, the others are
/// one call. Entries smaller than the knee cost what the two `_below` say instead: a batched copy
/// of 10,000 entries of 16 KiB has been seen to take twice as long as one of entries of 24 KiB.
///
/// No such formula is true of a machine. Where `measured` has points, the formula is multiplied by
/// what it was off by there, interpolated over the logarithms of entry size and entries; beyond the
/// outermost points their factor goes on.
struct way_cost {
  double latency = 0;
  double per_call = 0;
  double per_entry = 0;
  double per_byte = 0;
  double knee_bytes = 0;  ///< 0: none
  double per_entry_below = 0;
  double per_byte_below = 0;
  std::vector<measured_cost> measured = {};  ///< by entries, then by bytes, none twice
  friend bool operator==(const way_cost&, const way_cost&) = default;
};

/// A way, and how long it is expected to take.
struct way_choice {
  transfer_way way = transfer_way::automatic;
  double seconds = 0;
  friend bool operator==(way_choice, way_choice) = default;
};

namespace detail {

[[nodiscard]] constexpr bool is_call_each(transfer_way way) noexcept {
  return way == transfer_way::direct || way == transfer_way::per_block;
}
[[nodiscard]] constexpr std::int64_t entries_of(transfer_way way,
                                                const transfer_shape& s) noexcept {
  return way == transfer_way::staged || way == transfer_way::pull ? s.units : s.pieces;
}

/// The formula alone.
[[nodiscard]] inline double formula_seconds(transfer_way way, const way_cost& c,
                                            std::int64_t entries, std::int64_t bytes) noexcept {
  const auto n = static_cast<double>(entries);
  const auto b = static_cast<double>(bytes);
  const bool below = b < c.knee_bytes * n;
  return c.latency + c.per_call * (is_call_each(way) ? n : 1.0) +
         (below ? c.per_entry_below : c.per_entry) * n +
         (below ? c.per_byte_below : c.per_byte) * b;
}

/// ln of what the formula is off by, at an entry size within points of equal entries.
[[nodiscard]] inline double factor_in_row(transfer_way way, const way_cost& c,
                                          std::span<const measured_cost> row,
                                          double entry_bytes) noexcept {
  const auto factor = [&](const measured_cost& m) {
    return std::log(m.seconds / formula_seconds(way, c, m.entries, m.bytes));
  };
  const auto size = [](const measured_cost& m) {
    return static_cast<double>(m.bytes) / static_cast<double>(m.entries);
  };
  const auto above =
      std::lower_bound(row.begin(), row.end(), entry_bytes,
                       [&](const measured_cost& m, double bytes) { return size(m) < bytes; });
  if (above == row.begin()) return factor(row.front());
  if (above == row.end()) return factor(row.back());
  const auto below = above - 1;
  const double t = std::log(entry_bytes / size(*below)) / std::log(size(*above) / size(*below));
  return (1 - t) * factor(*below) + t * factor(*above);
}

[[nodiscard]] inline double seconds_of(transfer_way way, const way_cost& c, std::int64_t entries,
                                       std::int64_t bytes) noexcept {
  const double formula = formula_seconds(way, c, entries, bytes);
  if (c.measured.empty()) return formula;
  const double entry_bytes = static_cast<double>(bytes) / static_cast<double>(entries);
  const std::span<const measured_cost> all = c.measured;
  // The rows of the nearest counts on both sides; the outermost goes on.
  const auto row_of = [&](std::int64_t count) {
    const auto [first, last] = std::equal_range(
        all.begin(), all.end(), measured_cost{.entries = count},
        [](const measured_cost& a, const measured_cost& b) { return a.entries < b.entries; });
    return std::span<const measured_cost>(first, last);
  };
  const auto after = std::upper_bound(
      all.begin(), all.end(), entries,
      [](std::int64_t count, const measured_cost& m) { return count < m.entries; });
  const std::int64_t low = after == all.begin() ? all.front().entries : (after - 1)->entries;
  const std::int64_t high = after == all.end() ? all.back().entries : after->entries;
  double factor = factor_in_row(way, c, row_of(low), entry_bytes);
  if (high != low && entries > low) {
    const double t = std::log(static_cast<double>(entries) / static_cast<double>(low)) /
                     std::log(static_cast<double>(high) / static_cast<double>(low));
    factor += t * (factor_in_row(way, c, row_of(high), entry_bytes) - factor);
  }
  return formula * std::exp(factor);
}

/// Sizes and counts up to here are exact as double, so that two that differ still do.
inline constexpr std::int64_t most_bytes_with_cost = std::int64_t{1} << 53;

inline void check_shape(const transfer_shape& s) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t most) {
    expects(value >= 1 && value <= most, "transfer_shape: ", name, " is ", value,
            ", expected 1 to ", most);
  };
  check("bytes", s.bytes, most_bytes_with_cost);
  check("units", s.units, s.bytes);
  check("pieces", s.pieces, s.bytes);
}

/// Calls `visit(name, term)` for the numbers of a cost, in the order of its text.
template <class Cost, class Visit>
void each_term(Cost& cost, Visit visit) {
  visit("latency", cost.latency);
  visit("per_call", cost.per_call);
  visit("per_entry", cost.per_entry);
  visit("per_byte", cost.per_byte);
  visit("knee_bytes", cost.knee_bytes);
  visit("per_entry_below", cost.per_entry_below);
  visit("per_byte_below", cost.per_byte_below);
}

/// Bounds far outside of any machine, so that no product of a cost and a shape overflows.
inline void check_cost(transfer_way way, const way_cost& c) {
  const std::string_view name = name_of(way);
  each_term(c, [&](std::string_view term, double value) {
    const double most = term == "knee_bytes" ? 1e15 : 1e6;
    expects(value == 0 || (value >= 1e-18 && value <= most), "transfer_costs: ", term, " of ", name,
            " is ", number_text(value), ", expected 0 or 1e-18 to ", number_text(most));
  });
  const double fixed = c.latency + c.per_call;
  expects(fixed + c.per_entry + c.per_byte > 0 &&
              (c.knee_bytes == 0 || fixed + c.per_entry_below + c.per_byte_below > 0),
          "transfer_costs: ", name,
          " costs nothing, expected a latency, or a cost per call, entry or ",
          "byte, on both sides of the knee");
  const measured_cost* before = nullptr;
  for (const measured_cost& m : c.measured) {
    expects(m.entries >= 1 && m.bytes >= m.entries && m.bytes <= most_bytes_with_cost,
            "transfer_costs: a point of ", name, " has ", m.entries, " entries of ", m.bytes,
            " bytes, expected at least one, each of at least a byte, and at most 2^53 bytes");
    expects(m.seconds >= 1e-18 && m.seconds <= 1e6, "transfer_costs: a point of ", name, " took ",
            number_text(m.seconds), " seconds, expected 1e-18 to 1e6");
    expects(before == nullptr || before->entries < m.entries ||
                (before->entries == m.entries && before->bytes < m.bytes),
            "transfer_costs: the point of ", name, " with ", m.entries, " entries of ", m.bytes,
            " bytes is not in its place, expected points by entries, then bytes, none twice");
    before = &m;
  }
}

// Costs as text:
//
//     pulseinfer transfer_costs 1 ways 2
//     way staged latency 1e-05 per_call 0 ... measured 1
//     measured entries 16 bytes 65536 seconds 1.2e-05
//     way pull ...
//
// The counts of ways and points show when the end is missing.
inline constexpr std::int64_t cost_text_version = 1;

inline void append_cost(std::string& text, transfer_way way, const way_cost& cost) {
  text += "way ";
  text += name_of(way);
  each_term(cost, [&](std::string_view name, double value) { append_field(text, name, value); });
  append_field(text, "measured", static_cast<std::int64_t>(cost.measured.size()));
  text += '\n';
  for (const measured_cost& m : cost.measured) {
    text += "measured";
    append_field(text, "entries", m.entries);
    append_field(text, "bytes", m.bytes);
    append_field(text, "seconds", m.seconds);
    text += '\n';
  }
}

[[nodiscard]] inline transfer_way read_way(field_reader& reader) {
  reader.name("way");
  const std::string_view name = reader.word("the way's name");
  for (const transfer_way way : priced_ways) {
    if (name == name_of(way)) return way;
  }
  reader.fail("\"", name, "\" is no way that has a cost");
}

/// The rest of a way's line, and its points.
[[nodiscard]] inline way_cost read_cost(field_reader& reader) {
  way_cost cost;
  each_term(cost,
            [&](std::string_view name, double& value) { value = reader.number<double>(name); });
  const auto points = reader.number<std::int64_t>("measured");
  if (points < 0) reader.fail("measured is ", points, ", expected at least 0");
  reader.end_of_line();
  for (std::int64_t i = 0; i < points; ++i) {
    if (!reader.next_line()) reader.fail("the text ends before point ", i + 1, " of ", points);
    reader.name("measured");
    measured_cost& point = cost.measured.emplace_back();
    point.entries = reader.number<std::int64_t>("entries");
    point.bytes = reader.number<std::int64_t>("bytes");
    point.seconds = reader.number<double>("seconds");
    reader.end_of_line();
  }
  return cost;
}

}  // namespace detail

/// What each way costs on one machine. A way without a cost is one that the machine does not have.
///
/// Pure: the same costs and shape give the same choice, everywhere.
/// @par Threads  const members, from any thread
class transfer_costs {
 public:
  /// Sets the cost of a way.
  /// @throws std::invalid_argument  naming the term, its value and its limits: not finite,
  ///                                negative, or nothing at all; points out of order; a way that
  ///                                can have no cost
  void set(transfer_way way, way_cost cost) {
    check_way(way);
    detail::check_cost(way, cost);
    costs_[index(way)] = std::move(cost);
  }
  /// The cost of a way, null if it has none.
  [[nodiscard]] const way_cost* find(transfer_way way) const noexcept {
    if (index(way) >= costs_.size() || !costs_[index(way)]) return nullptr;
    return &*costs_[index(way)];
  }

  /// The seconds that a way is expected to take.
  /// @throws std::invalid_argument  if the way has no cost, or on a bad shape
  /// @par Cost  below a microsecond; allocates nothing
  [[nodiscard]] double predict(transfer_way way, const transfer_shape& shape) const {
    detail::check_shape(shape);
    const way_cost* const cost = find(way);
    detail::expects(cost != nullptr, "transfer_costs: ", name_of(way), " has no cost");
    return detail::seconds_of(way, *cost, detail::entries_of(way, shape), shape.bytes);
  }

  /// The cheapest way that has a cost, and its seconds; of two equal ones, that which stands first
  /// in `transfer_way`. `per_block` is not asked: `direct` is never worse.
  /// @throws std::invalid_argument  if none has a cost, or on a bad shape
  /// @par Cost  a few microseconds at most; allocates nothing
  [[nodiscard]] way_choice cheapest(const transfer_shape& shape) const {
    detail::check_shape(shape);
    way_choice best;
    for (const transfer_way way : detail::priced_ways) {
      const way_cost* const cost = find(way);
      if (cost == nullptr || way == transfer_way::per_block) continue;
      const double seconds =
          detail::seconds_of(way, *cost, detail::entries_of(way, shape), shape.bytes);
      if (best.way == transfer_way::automatic || seconds < best.seconds) best = {way, seconds};
    }
    detail::expects(
        best.way != transfer_way::automatic, "transfer_costs: no way has a cost",
        find(transfer_way::per_block) != nullptr ? " but per_block, which is not asked" : "",
        ", calibrate or load some");
    return best;
  }

  /// All of it as lines of text, which `from_text` reads back to the bit, in any locale.
  [[nodiscard]] std::string to_text() const {
    std::string lines;
    std::int64_t ways = 0;
    for (const transfer_way way : detail::priced_ways) {
      if (const way_cost* const cost = find(way); cost != nullptr) {
        detail::append_cost(lines, way, *cost);
        ++ways;
      }
    }
    std::string text;
    detail::append_field(text, "pulseinfer transfer_costs", detail::cost_text_version);
    detail::append_field(text, "ways", ways);
    return text + '\n' + lines;
  }
  /// Reads what `to_text` wrote. Blank lines and lines that begin with # are passed over.
  /// @throws std::invalid_argument  naming line and field; also on another version of the format, or
  ///                                where the end is missing
  [[nodiscard]] static transfer_costs from_text(std::string_view text) {
    detail::field_reader reader("transfer_costs", text);
    const std::int64_t ways = reader.first_line(detail::cost_text_version, "calibrate", "ways");
    transfer_costs costs;
    for (std::int64_t i = 0; i < ways; ++i) {
      if (!reader.next_line()) reader.fail("the text ends before way ", i + 1, " of ", ways);
      const transfer_way way = detail::read_way(reader);
      if (costs.find(way) != nullptr) reader.fail("way ", name_of(way), " stands here again");
      const way_cost cost = detail::read_cost(reader);
      try {
        costs.set(way, cost);
      } catch (const std::invalid_argument& refused) {
        reader.fail("the way that ends here: ", std::string_view(refused.what()));
      }
    }
    reader.end(ways, "ways");
    return costs;
  }

  friend bool operator==(const transfer_costs&, const transfer_costs&) = default;

 private:
  [[nodiscard]] static constexpr std::size_t index(transfer_way way) noexcept {
    return static_cast<std::size_t>(way);
  }
  static void check_way(transfer_way way) {
    detail::expects(way != transfer_way::automatic && index(way) < detail::way_names.size(),
                    "transfer_costs: ", name_of(way), " is no way that has a cost");
  }

  std::array<std::optional<way_cost>, detail::way_names.size()> costs_;
};

}  // namespace pulseinfer
