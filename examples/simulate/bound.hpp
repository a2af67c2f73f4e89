// SPDX-License-Identifier: Apache-2.0
/// @file
/// No schedule is faster than this: the least over the number of groups of what the device, the
/// link and the host's memory, and the largest group by itself need for a step. By brute force, and
/// without the library's cost model.
///
/// What holds of every schedule of the simulated machine (sim_timed.hpp) that keeps its number of
/// groups through a step and computes on one stream is in it, and nothing else:
///
/// - A unit gets to its page by a copy of its own, or is gathered by a worker, copied with others,
///   and scattered by a kernel. Each unit may go either way.
/// - A call keeps the link busy, and within one each copy does. So the copies of single units cost a
///   call, or so much each, whichever is more; chunks cost a call each, as the next one is gathered
///   when the one before is copied already; and what different layers lack late, a call each.
/// - Gathering a byte moves two in DRAM. A copy takes as much of the DRAM as the link could move, for
///   as long as it has the link: its call, then its bytes.
/// - A recall begins with a host task, as the engine's do, and what is late finds the link at rest. No
///   copies are made just to keep it moving, nor is another recall timed so that it moves just then.
/// - A choice is known when the layer before has been computed; what is known ahead, one layer
///   earlier; of the first layer nothing, as the token before is not there.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <vector>

#include "setting.hpp"

namespace simulate {

struct bound {
  double seconds = std::numeric_limits<double>::infinity();
  std::int32_t groups = 0;
  double compute = 0, link = 0, path = 0;  ///< with that many groups
};

/// The machine as the bound needs it; all in seconds and bytes.
struct recall_bounds {
  explicit recall_bounds(const setting& s)
      : unit(s.unit_bytes()),
        link(s.machine.profile.link_bytes_per_second),
        hbm(s.machine.profile.hbm_bytes_per_second) {
    const pulseinfer::hardware_profile& p = s.machine.profile;
    const auto seconds = [](std::uint64_t ns) { return 1e-9 * static_cast<double>(ns); };
    call = seconds(p.copy_busy_ns);
    each = std::min(seconds(p.batched_copy_busy_ns), call);
    task = seconds(p.task_start_ns);
    copy = seconds(p.copy_start_ns);
    launch = seconds(p.kernel_launch_ns);
    workers = p.workers * p.worker_bytes_per_second;
    // Where copies leave nothing of the DRAM, tasks get a share beyond it all the same.
    const double left = p.dram_bytes_per_second - link;
    dram = left > 0 ? p.dram_bytes_per_second : std::numeric_limits<double>::infinity();
    at_rest = std::min(workers, dram) / 2;
    beside = std::min(workers, left > 0 ? left : dram) / 2;
  }

  double unit, link, hbm;
  double each = 0;  ///< of the link, for a copy in a batch
  double call = 0;  ///< of the link, for a call
  double task = 0, copy = 0, launch = 0;
  double workers = 0;
  double dram = 0;
  double at_rest = 0;  ///< bytes a second that are gathered while the link rests
  double beside = 0;   ///< and while it is busy

  /// Before the first byte is on a link that rests: a task starts, then the copy.
  [[nodiscard]] double start() const { return task + copy; }

  /// How long the link rests, or is kept busy by calls, at least, for so many bytes that are
  /// gathered: in n chunks. The first is gathered before it is copied; each later one while those
  /// before are copied. Where the link rests later, a larger first chunk would have done as well.
  [[nodiscard]] double filling(double bytes) const {
    double least = std::numeric_limits<double>::infinity();
    for (int n = 1; n <= 64 && (n - 1) * call < least; ++n) {
      // Gathered in all, when the first chunk has x bytes: a + b x.
      double chunk = 0, slope = 1, a = 0, b = 1;
      for (int k = 1; k < n; ++k) {
        chunk = beside * (chunk / link + call) + (k == 1 ? at_rest * copy : 0);
        slope = beside * slope / link;
        a += chunk, b += slope;
      }
      const double first = std::max((bytes - a) / b, std::min(bytes, unit));
      least = std::min(least, (n - 1) * call + first / at_rest);
    }
    return least;
  }

  /// From a choice until so many units are in their pages, with the machine to themselves. With d
  /// copied by themselves, which may cover the time in which the others are gathered and scattered.
  [[nodiscard]] double latency(double units) const {
    if (units <= 0) return 0;
    const double bytes = units * unit;
    const auto takes = [&](double d) {
      const double copied = bytes / link + std::max(call, each * d);
      const double rest = bytes - d * unit;
      if (rest < 0.5 * unit) return copied;
      return std::max({copied, call + filling(rest) + rest / link + launch,
                       (link * copied + 2 * rest) / dram - copy});
    };
    // Of these one grows with d, one falls, and one falls, then may grow: so does the largest.
    double low = 0, high = units;
    while (high - low > 0.5) {
      const double d = std::floor((low + high) / 2);
      if (takes(d) > takes(d + 1)) {
        low = d + 1;
      } else {
        high = d;
      }
    }
    return start() + takes(low);
  }

  /// The least x in [0, 1], the share that is gathered, can make of the largest of some a + b x.
  struct line {
    double a = 0, b = 0;
    [[nodiscard]] double at(double x) const { return a + b * x; }
  };
  [[nodiscard]] static double least_of_largest(std::initializer_list<line> lines) {
    const auto largest = [&](double x) {
      double most = 0;
      for (const line& l : lines) most = std::max(most, l.at(x));
      return most;
    };
    double least = std::min(largest(0), largest(1));
    for (const line& l : lines) {
      for (const line& m : lines) {
        if (l.b == m.b) continue;
        const double x = (m.a - l.a) / (l.b - m.b);
        if (x > 0 && x < 1) least = std::min(least, largest(x));
      }
    }
    return least;
  }
  /// What link, DRAM, workers and HBM need for so many units in so many recalls, and calls, at least,
  /// when the HBM reads for `computes` seconds beside, and link and host rest for `rests`.
  [[nodiscard]] double throughput(double units, double recalls, double calls, double computes,
                                  double rests) const {
    const double bytes = units * unit;
    const double more = each * std::max(units - recalls, 0.0);
    return least_of_largest({{bytes / link + each * recalls + more + rests, -more},
                             {bytes / link + call * calls + rests, 0},
                             {(bytes + link * (each * recalls + more)) / dram + rests,
                              (2 * bytes - link * more) / dram},
                             {(bytes + link * call * calls) / dram + rests, 2 * bytes / dram},
                             {rests, 2 * bytes / workers},
                             {computes, 2 * bytes / hbm}});
  }
};

/// The bound of one decode step of all streams, as the mean over steps [first, steps) of
/// `even_lack`.
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
inline bound lower_bound(const setting& s, std::int32_t first = 1, std::int32_t steps = 3) {
  const recall_bounds machine(s);
  const pulseinfer::layer_work w = s.work();
  const auto layers = static_cast<std::size_t>(s.model.layers);
  const auto n = static_cast<std::size_t>(s.streams);
  const double weights = w.weight_bytes / machine.hbm;
  const double request = w.request_bytes / machine.hbm;
  const double launch = kernels_of_layer * machine.launch;

  // [layers][n + 1] What any q requests lack at least: of the late, and of those known ahead.
  struct least_lack {
    std::vector<double> late, ahead;
  };
  const auto sums = [](std::vector<double> each) {
    std::sort(each.begin(), each.end());
    std::vector<double> sum{0};
    for (const double units : each) sum.push_back(sum.back() + units);
    return sum;
  };
  std::vector<bound> of(n + 1);
  for (std::int32_t step = first; step < steps; ++step) {
    std::vector<least_lack> least(layers);
    double units = 0;
    for (std::size_t l = 0; l < layers; ++l) {
      std::vector<double> late, ahead;
      for (std::size_t r = 0; r < n; ++r) {
        const lack here =
            even_lack(s, static_cast<std::int32_t>(r), step, static_cast<std::int32_t>(l));
        late.push_back(here.late + (l == 0 ? here.ahead : 0));
        ahead.push_back(l == 0 ? 0 : here.ahead);
        units += here.late + here.ahead;
      }
      least[l] = {sums(std::move(late)), sums(std::move(ahead))};
    }
    for (std::size_t g = 1; g <= n; ++g) {
      const std::size_t q = (n - 1) / g + 1;
      const double computes = launch + weights + static_cast<double>(q) * request;
      const double reads = static_cast<double>(layers) *
                           (static_cast<double>(g) * weights + static_cast<double>(n) * request);
      double recalls = 0, late_calls = 0;
      for (const least_lack& l : least) {
        recalls += l.late[1] + l.ahead[1] > 0 ? 1 : 0;
        late_calls += l.late[1] > 0 ? 1 : 0;
      }
      bound& b = of[g];
      b.compute += reads + static_cast<double>(layers * g) * launch;
      b.link += machine.throughput(units, recalls, late_calls, reads,
                                   g == 1 && units > 0 ? computes + machine.task : 0);
      // [l] Until layer l has chosen, from when the first one has.
      std::vector<double> until(layers + 1, 0);
      for (std::size_t i = 0; i < layers; ++i) {
        double travels = 0, late = 0, calls = 0, between = 0;
        for (std::size_t j = i; j < layers; ++j) {
          travels += least[j].late[q] + (j > i ? least[j].ahead[q] : 0);
          late += machine.latency(least[j].late[q]);
          calls += least[j].late[q] > 0 ? 1 : 0;
          const double window = std::max(
              late + between,
              travels > 0 ? machine.start() + machine.throughput(travels, 1, calls, 0, 0) : 0);
          until[j + 1] = std::max(until[j + 1], until[i] + window + computes);
          between += computes;
        }
      }
      b.path += until[layers];
    }
  }
  bound best;
  for (std::size_t g = 1; g <= n; ++g) {
    bound& b = of[g];
    const double all = steps - first;
    b = {0, static_cast<std::int32_t>(g), b.compute / all, b.link / all, b.path / all};
    b.seconds = std::max({b.compute, b.link, b.path});
    if (b.seconds < best.seconds) best = b;
  }
  return best;
}

}  // namespace simulate
