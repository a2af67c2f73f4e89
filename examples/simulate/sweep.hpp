// SPDX-License-Identifier: Apache-2.0
/// @file
/// Step time against the bound, over machines, models, streams, contexts and localities.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bound.hpp"
#include "decoder.hpp"
#include "systems.hpp"

namespace simulate {

/// Runs `work(i)` for all i below n on all processors; what it throws ends the program.
inline void in_parallel(std::size_t n, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::vector<std::jthread> threads;
  const unsigned count = std::max(1U, std::thread::hardware_concurrency());
  for (unsigned t = 0; t < count; ++t) {
    threads.emplace_back([&] {
      for (std::size_t i = next++; i < n; i = next++) work(i);
    });
  }
}

/// A model on the GPUs that hold it: 70B and more are split over eight, which share two sockets of
/// eight channels DDR5-4800 (614 GB/s) where each GPU has no DRAM of its own.
inline setting placed(const machine& m, const model& which) {
  setting s;
  s.machine = m;
  s.model = which;
  if (which.weight_bytes() < 0.5 * static_cast<double>(m.profile.device_bytes)) return s;
  s.ranks = 8;
  s.machine.host_bytes = 2e12;
  if (m.name != "gh200") s.machine.profile.dram_bytes_per_second = 614e9 / 8;
  return s;
}

struct point {
  simulate::setting setting;
  double seconds = 0;
  simulate::bound bound;
  double joined_seconds = 0;  ///< the bound, were single units to go in the calls of chunks
  [[nodiscard]] double ratio() const { return seconds / bound.seconds; }
  [[nodiscard]] std::string text() const {
    char line[160];
    std::snprintf(line, sizeof line, "%s, %s, %d streams, %.0fk tokens, m %.1f, p %.1f",
                  setting.machine.name.c_str(), setting.model.name.c_str(), setting.streams,
                  setting.context / 1024, setting.kv.miss, setting.kv.ahead);
    return line;
  }
};

inline std::vector<point> sweep() {
  const policy how{.moves = {.tuned = true}};
  // Found out at first, side by side: points of one machine would wait for each other.
  const std::vector<machine> all = machines();
  in_parallel(2 * all.size(), [&](std::size_t i) {
    (void)equipment_of(placed(all[i / 2], models()[i % 2]), how.moves);
  });
  std::vector<point> points;
  for (const machine& m : all) {
    for (const std::size_t which : {std::size_t{0}, std::size_t{1}}) {
      for (const std::int32_t streams : {1, 4, 16, 64}) {
        for (const double context : {8192.0, 131072.0, 1048576.0}) {
          setting s = placed(m, models()[which]);
          s.context = context;
          if (s.streams_that_fit(true) < streams) continue;
          s.streams = streams;
          for (const double miss : {0.0, 0.2, 1.0}) {
            for (const double ahead : {0.0, 0.9}) {
              if (miss == 0 && ahead > 0) continue;
              s.kv = {miss, ahead};
              points.push_back({s, 0, {}, 0});
            }
          }
        }
      }
    }
  }
  in_parallel(points.size(), [&](std::size_t i) {
    point& p = points[i];
    // Groups have formed by the third token.
    const std::int32_t steps = p.setting.streams * p.setting.kv.miss > 20 ? 3 : 4;
    p.bound = lower_bound(p.setting, 2, steps);
    p.joined_seconds = lower_bound(p.setting, 2, steps, true).seconds;
    p.seconds = decoder(p.setting, how).run(steps, even_misses(p.setting), 2).tpot_seconds;
  });
  return points;
}

}  // namespace simulate
