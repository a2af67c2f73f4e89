// SPDX-License-Identifier: Apache-2.0
/// @file
/// What recalls need of a simulated machine (sim_timed.hpp) at least: one by itself, and many of them.
///
/// - A unit gets to its page by a copy of its own, or is gathered by a worker, copied with others,
///   and scattered by a kernel. Each unit may go either way.
/// - A call keeps the link busy, and within one each copy does. So the copies of single units cost a
///   call, or so much each, whichever is more; chunks cost a call each, as the next one is gathered
///   when the one before is copied already; and what different layers lack late, a call each. Single
///   units have calls of their own; `joins_calls` says what were if they had not.
/// - Gathering a byte moves two in DRAM. A copy takes as much of the DRAM as the link could move, for
///   as long as it has the link: its call, then its bytes.
/// - A recall begins with a host task, as the engine's do, and what is late finds the link at rest. No
///   copies are made just to keep it moving, nor is another recall timed so that it moves just then.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "setting.hpp"

namespace simulate {

/// The machine as the bound needs it; all in seconds and bytes.
struct recall_bounds {
  /// @param joins  single units may go in the calls of chunks
  explicit recall_bounds(const setting& s, bool joins = false)
      : joins_calls(joins),
        unit(s.unit_bytes()),
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
    for (const bool before : {false, true}) {
      double chunk = 0, slope = 1;
      chain grown{0, 1};
      for (int n = 1; n <= most_chunks; ++n) {
        chains_[before ? 1 : 0][static_cast<std::size_t>(n)] = grown;
        // While the first copy starts, the link rests.
        const double more = n == 1 && !before ? at_rest * copy : 0;
        chunk = beside * (chunk / link + call) + more;
        slope = beside * slope / link;
        grown = {grown.a + chunk, grown.b + slope};
      }
    }
  }

  bool joins_calls;
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

  /// How a recall goes: in so many chunks, and so many of its units by themselves: before the first
  /// chunk or between two, behind the last one, or some here and some there.
  struct cut {
    int chunks = 0;
    double alone = 0;
    bool before = false;
    bool behind = false;
  };
  /// Of the link, for the calls of a recall, beside its bytes.
  [[nodiscard]] double calls(const cut& c) const {
    if (joins_calls && c.chunks > 0) {
      return std::max(c.chunks * call, each * (c.chunks + c.alone));
    }
    const int batches = (c.before ? 1 : 0) + (c.behind ? 1 : 0);
    return c.chunks * call + std::max(batches * call, each * c.alone);
  }
  /// From a choice until so many units are in their pages, at least, with the machine to themselves
  /// and the link at rest. The DRAM moves all that is gathered and copied; the link copies it, and may
  /// rest; behind the first chunk come the copies of all chunks, and behind the last one a scatter.
  [[nodiscard]] double latency(double units, const cut& c) const {
    const double bytes = units * unit;
    const double copied = bytes / link + calls(c);
    if (c.chunks == 0) return start() + copied;
    const double gathered = bytes - c.alone * unit;
    const double chunks = c.chunks * call + gathered / link;
    // Each later chunk is gathered while the ones before are copied: of x bytes in the first one come
    // a + b x in all. The first may be larger than that, if the link rests longer.
    const chain& growth = chains_[c.before ? 1 : 0][static_cast<std::size_t>(c.chunks)];
    const double first = std::max((gathered - growth.a) / growth.b, std::min(gathered, unit));
    const double scatter = c.behind ? 0 : launch;
    const double moved = task + (link * copied + 2 * gathered) / dram + scatter;
    // The link rests until there is a chunk.
    if (!c.before) {
      return std::max(start() + first / at_rest + chunks + std::max(launch, copied - chunks),
                      moved);
    }
    // Or it does not, and gathering is the slower for it, but for as long as it rests all the same.
    const double on_link = start() + copied + scatter;
    const double in_turn = start() + (first - at_rest * copy) / beside + chunks + launch;
    const double rests = std::max(0.0, (in_turn - on_link) / (1 + at_rest / beside));
    return std::max(on_link + rests, moved);
  }
  /// The least of a cost over all cuts of so many units. For a number of chunks it is convex in the
  /// units that go alone, if there are any; it is `base` at least, and as much as `of_chunk` more for
  /// each chunk.
  template <class Cost>
  [[nodiscard]] static double least_of_cuts(double units, double base, double of_chunk,
                                            const Cost& cost) {
    if (units <= 0) return 0;
    double least = cost(cut{.alone = units, .before = true});
    for (int n = 1; n <= most_chunks && n <= units && base + n * of_chunk < least; ++n) {
      least = std::min(least, cost(cut{.chunks = n}));
      for (cut c : {cut{n, 0, true, false}, cut{n, 0, false, true}, cut{n, 0, true, true}}) {
        const auto with = [&](double alone) {
          c.alone = alone;
          return cost(c);
        };
        double low = c.before && c.behind ? 2 : 1, high = units - n;
        if (high < low) continue;
        while (high > low) {
          const double d = std::floor((low + high) / 2);
          if (with(d) > with(d + 1)) {
            low = d + 1;
          } else {
            high = d;
          }
        }
        least = std::min(least, with(low));
      }
    }
    return least;
  }
  [[nodiscard]] double latency(double units) const {
    return least_of_cuts(units, start() + units * unit / link, call,
                         [&](const cut& c) { return latency(units, c); });
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

 private:
  static constexpr int most_chunks = 64;  ///< more pay off only where a call costs next to nothing
  struct chain {
    double a = 0, b = 1;
  };
  std::array<chain, most_chunks + 1> chains_[2];  ///< of n chunks; [1] with units before them
};

}  // namespace simulate
