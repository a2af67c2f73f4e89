// SPDX-License-Identifier: Apache-2.0
/// @file
/// Finds out by trial how recalls are best cut on the machine at hand: into which head and chunks, for
/// each size.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/chunk_plan.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/transfer.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What a tuning may ask of a machine. Some 20 recalls for each trial and plan.
struct tuning_options {
  std::int64_t least_units = 2;    ///< 1 to most_units; a recall of one unit goes by no plan
  std::int64_t most_units = 2048;  ///< 1 to 2^24
  double step = 1.05;              ///< sizes that share a plan lie within this factor; 1.01 to 4
  /// Of plans near the best one, in turn; 1 to 10,000. With few, what is found may be slower than none.
  std::int32_t trials = 30;
  std::int32_t repeats = 1;  ///< of each recall, of which the shortest counts; 1 to 100
  std::uint64_t seed = 1;    ///< of which plans are tried
};

/// A machine that can be asked how long, in seconds, a recall of so many units takes by a plan.
template <class Measure>
concept recall_measure = requires(Measure& measure, const chunk_plan& plan, std::int64_t units) {
  { measure(plan, units) } -> std::convertible_to<double>;
};

namespace detail {

inline const tuning_options& checked_tuning(const tuning_options& o) {
  const auto check = [](const char* name, auto value, auto least, auto most) {
    expects(value >= least && value <= most, "tune_chunks: ", name, " is ", number_text(value),
            ", expected ", number_text(least), " to ", number_text(most));
  };
  check("most_units", o.most_units, std::int64_t{1}, std::int64_t{1} << 24);
  check("least_units", o.least_units, std::int64_t{1}, o.most_units);
  check("step", o.step, 1.01, 4.0);
  check("trials", o.trials, 1, 10'000);
  check("repeats", o.repeats, 1, 100);
  return o;
}

/// Recalls in a row that are made again, as they found their stream busy and went by no plan.
inline constexpr int most_unplanned = 8;

/// Changes plans at random and keeps what is not worse; what is good for one size is tried for its
/// neighbours, too. A plan is judged at both ends of its sizes: one that is just in time for one size
/// may be late for the next.
template <class Measure>
class chunk_tuner {
 public:
  chunk_tuner(Measure& measure, const tuning_options& o)
      : measure_(&measure), options_(checked_tuning(o)), random_(o.seed) {}

  [[nodiscard]] chunk_plans run() {
    for (std::int64_t from = options_.least_units; from <= options_.most_units;) {
      const double last = std::floor(options_.step * static_cast<double>(from));
      const std::int64_t to =
          std::min(std::max(from, static_cast<std::int64_t>(last)), options_.most_units);
      sizes_.push_back({from, to, {}, std::numeric_limits<double>::infinity()});
      from = to + 1;
    }
    for (std::size_t i = 0; i < sizes_.size(); ++i) begin(i);
    for (int pass = 0; pass < 2; ++pass) {
      for (std::size_t i = sizes_.size(); i-- > 0;) learn(i);
    }
    chunk_plans plans;
    for (const size& s : sizes_) {
      chunk_plan plan = s.plan;
      plan.max_units = s.to;
      plans.add(plan);
    }
    return plans;
  }

 private:
  /// Recalls of `from` to `to` units, and the best plan so far.
  struct size {
    std::int64_t from, to;
    chunk_plan plan;
    double seconds;
  };
  struct tried {
    chunk_plan plan;
    double seconds = 0;
  };

  [[nodiscard]] double seconds_of(const chunk_plan& plan, std::int64_t units) {
    double least = std::numeric_limits<double>::infinity();
    for (std::int32_t i = 0; i < options_.repeats; ++i) {
      const double seconds = (*measure_)(plan, units);
      expects(seconds > 0 && std::isfinite(seconds), "tune_chunks: a recall of ", units,
              " units took ", number_text(seconds), " seconds, expected more than 0");
      least = std::min(least, seconds);
    }
    return least;
  }
  [[nodiscard]] double seconds_of(const chunk_plan& plan, const size& s) {
    chunk_plan at = plan;
    at.max_units = s.to;
    return seconds_of(at, s.from) + (s.to > s.from ? seconds_of(at, s.to) : 0);
  }

  /// Goes on from a plan, by small changes that make it no worse.
  [[nodiscard]] tried climb(const size& s, const chunk_plan& from, std::int32_t trials) {
    tried best{from, seconds_of(from, s)};
    for (std::int32_t i = 0; i < trials; ++i) {
      const chunk_plan next = changed(best.plan, s.to);
      const double seconds = seconds_of(next, s);
      if (seconds <= best.seconds) best = {next, seconds};
    }
    return best;
  }
  static void keep(size& s, const tried& t) {
    if (t.seconds >= s.seconds) return;
    s.plan = t.plan;
    s.seconds = t.seconds;
  }

  /// From plans of each kind and from those of smaller sizes: a few trials each, then more from the
  /// two that are best.
  void begin(std::size_t i) {
    std::vector<chunk_plan> from(std::begin(kinds), std::end(kinds));
    for (std::size_t d = 1; d <= 2 && d <= i; ++d) from.push_back(sizes_[i - d].plan);
    std::vector<tried> all;
    for (const chunk_plan& p : from) {
      all.push_back(climb(sizes_[i], p, std::max(options_.trials / 5, 1)));
    }
    std::stable_sort(all.begin(), all.end(),
                     [](const tried& a, const tried& b) { return a.seconds < b.seconds; });
    for (std::size_t k = 0; k < 2; ++k) {
      keep(sizes_[i], climb(sizes_[i], all[k].plan, options_.trials));
    }
  }
  /// From its own plan and from those of the sizes around it.
  void learn(std::size_t i) {
    const std::int32_t trials = std::max(2 * options_.trials / 3, 1);
    keep(sizes_[i], climb(sizes_[i], sizes_[i].plan, trials));
    for (std::size_t d = 1; d <= 2; ++d) {
      if (i + d < sizes_.size()) keep(sizes_[i], climb(sizes_[i], sizes_[i + d].plan, trials));
      if (i >= d) keep(sizes_[i], climb(sizes_[i], sizes_[i - d].plan, trials));
    }
  }

  [[nodiscard]] double factor() {
    const double most = random_.one_in(3) ? 0.4 : 0.12;
    return 1 + most * (static_cast<double>(random_.below(2001)) - 1000) / 1000;
  }
  [[nodiscard]] double wide_factor() {
    return std::exp2((static_cast<double>(random_.below(2001)) - 1000) / 500);
  }
  /// The plan with one thing different. Shares stay large enough for a unit.
  [[nodiscard]] chunk_plan changed(chunk_plan p, std::int64_t units) {
    const double least = 0.5 / static_cast<double>(units);
    const auto end = std::find(p.chunks.begin(), p.chunks.end(), 0.0);
    const auto scale = [&](double& share, double by) {
      share = std::clamp(share * by, least, 1.0);
    };
    switch (random_.below(5)) {
      case 0:
        // A copy each is dear where units are small: what is best may be a tenth of what it is nearby.
        p.head = std::clamp(p.head * (random_.one_in(4) ? wide_factor() : factor()), 0.0, 0.95);
        return p;
      case 1:
        if (random_.one_in(2)) {
          p.parts = part_counts[random_.below(part_counts.size())];
          return p;
        }
        for (const double by = factor(); double& share : std::span(p.chunks.begin(), end)) {
          scale(share, by);
        }
        return p;
      default:
        break;
    }
    const auto count = static_cast<std::uint64_t>(end - p.chunks.begin());
    const double by = factor();  // drawn first, whatever order a compiler prefers
    scale(p.chunks[random_.below(count)], by);
    if (!random_.one_in(12)) return p;
    if (end != p.chunks.end() && random_.one_in(2)) {
      *end = *(end - 1);
    } else if (count > 1) {
      *(end - 1) = 0;
    }
    return p;
  }

  static constexpr std::array<std::int32_t, 6> part_counts = {4, 8, 12, 16, 24, 32};
  static constexpr chunk_plan kinds[] = {
      {.head = 0.2, .chunks = {0.8}},
      {.head = 0.1, .chunks = {0.4, 0.5}},
      {.head = 0.1, .chunks = {0.25, 0.3, 0.35}},
      {.head = 0.05, .chunks = {0.15, 0.2, 0.3, 0.3}},
  };

  Measure* measure_;
  tuning_options options_;
  random_source random_;
  std::vector<size> sizes_;
};

}  // namespace detail

/// Finds a plan for each size of a recall, by trial.
///
/// @param measure  called as measure(plan, units), returns the seconds of one recall of so many units
///                 that goes by the plan and has the machine to itself
/// @param options  which sizes, and how many trials
/// @return plans for all sizes up to `most_units`
/// @throws std::invalid_argument  on bad options, and when a measure returns no finite number or not
///                                more than 0
/// @throws whatever `measure` throws
/// @par Cost  for each plan up to 20 `trials` + 60 recalls, times `repeats`; half of that for a plan of
///            one size. Plans are the logarithm of most_units / least_units by that of `step`
/// The same numbers measured, the same plans are found.
template <recall_measure Measure>
[[nodiscard]] chunk_plans tune_chunks(Measure&& measure, const tuning_options& options = {}) {
  return detail::chunk_tuner<std::remove_reference_t<Measure>>(measure, options).run();
}

/// The same on an engine itself, with its own chunks, link and workers, by recalls of the first of
/// `units`; the engine then goes by what was found. Nothing else should use the machine meanwhile.
///
/// @param engine     staged recalls are tuned, whatever its way is
/// @param layer      as recall_units, like the next three
/// @param sequences  as recall_units
/// @param units      that are stored; their pages are written, so nobody else uses them. Sizes go up to
///                   their number, or to `most_units`
/// @param stream     on which nothing is under way
/// @param options    which sizes, and how many trials
/// @return the plans, as the engine has them now; to be kept as `to_text` for the next start
/// @throws std::invalid_argument  as tune_chunks and recall_units; where no recall goes by a plan, as
///                                one chunk is in flight or the store is not ready
/// @throws std::runtime_error     where a unit does not come, or no recall can be had; as on all
///                                errors, the engine has the way and the plans that it had
template <backend Backend, class Store>
chunk_plans tune_chunks(transfer_engine<Backend, Store>& engine, std::int32_t layer,
                        std::span<const sequence_id> sequences, std::span<const unit_target> units,
                        typename Backend::stream_ref stream, tuning_options options = {}) {
  detail::expects(!units.empty(), "tune_chunks: units is empty, expected at least one");
  detail::expects(
      engine.options().chunks_in_flight >= 2,
      "tune_chunks: chunks_in_flight is 1, expected at least 2: no recall goes by a plan");
  detail::expects(engine.store().is_ready(),
                  "tune_chunks: the store is not ready: no recall goes by a plan");
  options.most_units = std::min(options.most_units, static_cast<std::int64_t>(units.size()));
  const chunk_plans before = engine.options().plans;
  const transfer_way way = engine.options().way;
  const auto measure = [&](const chunk_plan& plan, std::int64_t count) {
    chunk_plans one;
    one.add(plan);
    engine.set_plans(std::move(one));
    const auto first = units.first(static_cast<std::size_t>(count));
    for (int others = 0;; ++others) {
      auto t = engine.recall_units(layer, sequences, first, stream);
      if (!t) throw std::runtime_error("tune_chunks: too many recalls are under way");
      t->sync();
      const transfer_report& report = t->report();
      if (report.moved != count) {
        throw std::runtime_error("tune_chunks: a unit of the recall did not come");
      }
      // A stream may be late to say that nothing is under way on it; one may always be.
      if (!report.planned && count > 1 && others < detail::most_unplanned) continue;
      return 1e-9 * static_cast<double>(report.ended_ns - report.requested_ns);
    }
  };
  try {
    engine.set_way(transfer_way::staged);
    chunk_plans found = tune_chunks(measure, options);
    engine.set_plans(found);
    engine.set_way(way);
    return found;
  } catch (...) {
    engine.set_way(way);
    engine.set_plans(before);
    throw;
  }
}

}  // namespace pulseinfer
