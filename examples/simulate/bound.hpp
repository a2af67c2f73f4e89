// SPDX-License-Identifier: Apache-2.0
/// @file
/// No schedule of a kind is faster than this: the least over the number of groups of what the device,
/// the link and the host's memory, and the largest group by itself need for a step. By brute force,
/// and without the library's cost model.
///
/// What holds of every schedule of the simulated machine that keeps its number of groups through a
/// step, computes on one stream, and recalls as stands in recall_bound.hpp is in it, and nothing else:
///
/// - Each group makes its own recalls: what two of them choose is known at different moments. What is
///   late is taken to find the link at rest. Where another group's copies are on it just then, it
///   saves the start of a copy, and a step may be faster than this; the fewer layers, the sooner.
/// - A choice is known when the layer before has been computed; what is known ahead, one layer
///   earlier; of the first layer nothing, as the token before is not there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "recall_bound.hpp"

namespace simulate {

struct bound {
  double seconds = std::numeric_limits<double>::infinity();
  std::int32_t groups = 0;
  double compute = 0, link = 0, path = 0, both = 0;  ///< with that many groups
};

/// The bound of one decode step of all streams, as the mean over steps of `even_lack`.
///
/// - compute: g times the weights and launches, once every request's KV and digests.
/// - link: all misses over link, DRAM and workers, and their scatter on the HBM. With one group they
///   rest from when the last layer begins to compute until the first one has chosen and a copy has
///   started: all that the last one lacked is there, and what the first one lacks is not known. With
///   more groups another one's recalls may fill that.
/// - path of the largest group, which has an even share or more: each layer is computed once, and
///   not before what it lacks is there. Between a layer's choice and the run of the k-th behind it,
///   k layers are computed, and what was not known before travels; the bound is the best way to cut
///   the step into such windows.
/// - both: link and path of two groups at once, for what is late; of all else only the bytes count. A
///   recall in more chunks, or with more units by themselves, may be there sooner, but takes more of
///   the link and of the DRAM. No step is shorter than a mean of what it needs of each (with weights p,
///   l, d) with the cuts that are best for that mean: the bound is the largest such mean, for the best
///   sizes of the two groups.
class step_bound {
 public:
  step_bound(const setting& s, const recall_bounds& machine, std::int32_t step)
      : machine_(machine),
        layers_(static_cast<std::size_t>(s.model.layers)),
        n_(static_cast<std::size_t>(s.streams)) {
    const pulseinfer::layer_work w = s.work();
    weights_ = w.weight_bytes / machine.hbm;
    request_ = w.request_bytes / machine.hbm;
    launch_ = kernels_of_layer * machine.launch;
    const auto sums = [](std::vector<double> each) {
      std::sort(each.begin(), each.end());
      std::vector<double> sum{0};
      for (const double units : each) sum.push_back(sum.back() + units);
      return sum;
    };
    for (std::size_t l = 0; l < layers_; ++l) {
      std::vector<double> late, ahead;
      for (std::size_t r = 0; r < n_; ++r) {
        const lack here =
            even_lack(s, static_cast<std::int32_t>(r), step, static_cast<std::int32_t>(l));
        late.push_back(here.late + (l == 0 ? here.ahead : 0));
        ahead.push_back(l == 0 ? 0 : here.ahead);
        units_ += here.late + here.ahead;
      }
      least_.push_back({sums(std::move(late)), sums(std::move(ahead))});
    }
  }

  /// Of all but `both`.
  [[nodiscard]] bound of(std::size_t groups) {
    const std::size_t q = (n_ - 1) / groups + 1;
    const double reads = static_cast<double>(layers_) * (static_cast<double>(groups) * weights_ +
                                                         static_cast<double>(n_) * request_);
    double recalls = 0, late_calls = 0;
    for (const least_lack& l : least_) {
      recalls += l.late[1] + l.ahead[1] > 0 ? 1 : 0;
      late_calls += l.late[1] > 0 ? 1 : 0;
    }
    bound b;
    b.compute = reads + static_cast<double>(layers_ * groups) * launch_;
    b.link = machine_.throughput(units_, recalls, late_calls, reads,
                                 groups == 1 && units_ > 0 ? computes(q) + machine_.task : 0);
    b.path = path(q);
    return b;
  }

  [[nodiscard]] double both() {
    double least = std::numeric_limits<double>::infinity();
    for (std::size_t q = (n_ + 1) / 2; q < n_; ++q) {
      // A larger group's path is longer yet.
      const double alone = path(q);
      if (alone >= least) break;
      least = std::min(least, std::max(alone, both(q)));
    }
    return least;
  }

 private:
  /// What any q requests lack at least, at a layer: [n + 1], of the late, and of those known ahead.
  struct least_lack {
    std::vector<double> late, ahead;
  };

  /// A layer of so many requests, computed.
  [[nodiscard]] double computes(std::size_t requests) const {
    return launch_ + weights_ + static_cast<double>(requests) * request_;
  }
  [[nodiscard]] double latency(double units) {
    const auto [at, is_new] = latency_.try_emplace(units);
    if (is_new) at->second = machine_.latency(units);
    return at->second;
  }
  [[nodiscard]] double path(std::size_t q) {
    // [l] Until layer l has chosen, from when the first one has.
    std::vector<double> until(layers_ + 1, 0);
    for (std::size_t i = 0; i < layers_; ++i) {
      double travels = 0, late = 0, calls = 0, between = 0;
      for (std::size_t j = i; j < layers_; ++j) {
        travels += least_[j].late[q] + (j > i ? least_[j].ahead[q] : 0);
        late += latency(least_[j].late[q]);
        calls += least_[j].late[q] > 0 ? 1 : 0;
        const double window = std::max(
            late + between,
            travels > 0 ? machine_.start() + machine_.throughput(travels, 1, calls, 0, 0) : 0);
        until[j + 1] = std::max(until[j + 1], until[i] + window + computes(q));
        between += computes(q);
      }
    }
    return until[layers_];
  }

  /// With groups of q and of all the others: the largest mean of the mean of their paths, the link, and
  /// either the link or the DRAM.
  [[nodiscard]] double both(std::size_t q) const {
    std::map<std::pair<double, double>, double> layers;  // that lack so much
    for (const least_lack& l : least_) layers[{l.late[q], l.late[n_ - q]}] += 1;
    const double compute = static_cast<double>(layers_) * (computes(q) + computes(n_ - q)) / 2;
    const double bytes = units_ * machine_.unit;
    const auto mean = [&](double p, double l, double d) {
      const double of_call = l + d * machine_.link / machine_.dram;
      const double gather = d * 2 * machine_.unit / machine_.dram;  // of a unit
      const auto recall = [&](double units) {
        return machine_.least_of_cuts(
            units, p / 2 * (machine_.start() + units * machine_.unit / machine_.link),
            (p / 2 + of_call) * machine_.call, [&](const recall_bounds::cut& c) {
              return p / 2 * machine_.latency(units, c) + of_call * machine_.calls(c) +
                     gather * (units - c.alone);
            });
      };
      double sum = p * compute + l * bytes / machine_.link + d * bytes / machine_.dram;
      for (const auto& [lacks, count] : layers) {
        sum += count * (recall(lacks.first) + recall(lacks.second));
      }
      return sum;
    };
    // Concave in the weights, so between two of them the largest is found by thirds.
    const auto largest = [](const auto& of) {
      double low = 0, high = 1, most = 0;
      for (int i = 0; i < 12; ++i) {
        const double a = low + (high - low) / 3, b = high - (high - low) / 3;
        const double at_a = of(a), at_b = of(b);
        most = std::max({most, at_a, at_b});
        (at_a < at_b ? low : high) = at_a < at_b ? a : b;
      }
      return most;
    };
    const double with_link = largest([&](double p) { return mean(p, 1 - p, 0); });
    if (machine_.dram == std::numeric_limits<double>::infinity()) return with_link;
    return std::max(with_link, largest([&](double p) { return mean(p, 0, 1 - p); }));
  }

  recall_bounds machine_;
  std::size_t layers_, n_;
  double weights_ = 0, request_ = 0, launch_ = 0;
  double units_ = 0;  ///< that all requests lack at all layers
  std::vector<least_lack> least_;
  std::map<double, double> latency_;  ///< that is known
};

/// The mean over steps [first, steps).
inline bound lower_bound(const setting& s, std::int32_t first = 1, std::int32_t steps = 3,
                         bool joins_calls = false) {
  const recall_bounds machine(s, joins_calls);
  std::vector<step_bound> each;
  for (std::int32_t step = first; step < steps; ++step) each.emplace_back(s, machine, step);
  const double all = steps - first;
  std::vector<bound> of;
  const auto least = [&] {
    return *std::min_element(of.begin(), of.end(),
                             [](const bound& a, const bound& b) { return a.seconds < b.seconds; });
  };
  for (std::int32_t g = 1; g <= s.streams; ++g) {
    bound b{.seconds = 0, .groups = g};
    for (step_bound& step : each) {
      const bound one = step.of(static_cast<std::size_t>(g));
      b.compute += one.compute / all, b.link += one.link / all, b.path += one.path / all;
    }
    b.seconds = std::max({b.compute, b.link, b.path});
    of.push_back(b);
  }
  if (least().groups != 2) return least();
  bound& two = of[1];
  for (step_bound& step : each) two.both += step.both() / all;
  two.seconds = std::max(two.seconds, two.both);
  return least();
}

}  // namespace simulate
