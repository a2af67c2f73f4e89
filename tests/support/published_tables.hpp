// SPDX-License-Identifier: Apache-2.0
/// @file
/// Transfer times that others have published, as machines: they answer how long a way takes for a
/// shape, interpolated between what is published and never beyond it. None of them was measured by
/// us, none follows the formula of way_cost. What a source does not say and we had to assume stands
/// in `derived`. KB of a power of two is read as KiB.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "pulseinfer/calibration.hpp"
#include "pulseinfer/transfer_cost.hpp"

namespace published {

using pulseinfer::transfer_shape;
using pulseinfer::transfer_way;

inline constexpr double kib = 1024;

/// Seconds of one transfer of `entries` of `entry_bytes` each.
struct point {
  transfer_way way;
  double entry_bytes;
  double entries;
  double seconds;
};

struct table {
  std::string name;
  std::string hardware;
  std::string source;
  std::string derived;
  std::vector<point> points;
  /// Not 0: the source has times per entry. They hold for 1 / `any_count` to `any_count` times the
  /// entries of the points.
  double any_count = 0;
  /// Not 0: the source has ratios to a kernel, which the points are, of such a latency and rate.
  double kernel_latency = 0;
  double kernel_rate = 0;

  [[nodiscard]] std::vector<transfer_way> ways() const {
    std::vector<transfer_way> found;
    for (const point& p : points) {
      if (std::find(found.begin(), found.end(), p.way) == found.end()) found.push_back(p.way);
    }
    return found;
  }

  /// Logarithms of times are interpolated over the logarithm of the entry size, then over that of
  /// the count, between the nearest counts that were published for this size. Infinity outside.
  [[nodiscard]] double seconds(transfer_way way, double entry_bytes, double entries) const {
    const double kernel =
        kernel_rate > 0 ? kernel_latency + entry_bytes * entries / kernel_rate : 1.0;
    return kernel * interpolated(way, entry_bytes, entries);
  }
  [[nodiscard]] double interpolated(transfer_way way, double entry_bytes, double entries) const {
    std::map<double, std::vector<point>> rows;  // by entries
    for (const point& p : points) {
      if (p.way == way) rows[p.entries].push_back(p);
    }
    const double none = std::numeric_limits<double>::infinity();
    double low_count = 0;
    double low = none;
    for (auto& [count, row] : rows) {
      const double here = std::log(in_row(row, entry_bytes));
      if (!std::isfinite(here)) continue;
      if (any_count > 0) {
        const double times = entries / count;
        const bool within = times <= any_count * 1.0001 && times * any_count >= 0.9999;
        return within ? std::exp(here) * times : none;
      }
      if (std::abs(count - entries) < 0.5) return std::exp(here);
      if (count > entries) {
        if (!std::isfinite(low)) return none;
        const double t = std::log(entries / low_count) / std::log(count / low_count);
        return std::exp((1 - t) * low + t * here);
      }
      low_count = count;
      low = here;
    }
    return none;
  }
  [[nodiscard]] double operator()(transfer_way way, const transfer_shape& shape) const {
    const auto n = static_cast<double>(shape.pieces);
    return seconds(way, static_cast<double>(shape.bytes) / n, n);
  }

  /// The range of what is published.
  [[nodiscard]] pulseinfer::calibration_options range() const {
    const auto [small, large] = std::minmax_element(
        points.begin(), points.end(),
        [](const point& a, const point& b) { return a.entry_bytes < b.entry_bytes; });
    const auto [few, many] =
        std::minmax_element(points.begin(), points.end(),
                            [](const point& a, const point& b) { return a.entries < b.entries; });
    const double more = std::max(any_count, 1.0);
    return {.least_entry_bytes = std::llround(small->entry_bytes),
            .most_entry_bytes = std::llround(large->entry_bytes),
            .least_entries = std::max(1LL, std::llround(few->entries / more)),
            .most_entries = std::llround(many->entries * more),
            .ways = ways()};
  }

 private:
  [[nodiscard]] static double in_row(std::vector<point>& row, double entry_bytes) {
    std::sort(row.begin(), row.end(),
              [](const point& a, const point& b) { return a.entry_bytes < b.entry_bytes; });
    for (std::size_t i = 0; i < row.size(); ++i) {
      if (std::abs(row[i].entry_bytes - entry_bytes) < 0.5) return row[i].seconds;
      if (i == 0 || row[i].entry_bytes < entry_bytes) continue;
      if (row[i - 1].entry_bytes > entry_bytes) break;
      const double t = std::log(entry_bytes / row[i - 1].entry_bytes) /
                       std::log(row[i].entry_bytes / row[i - 1].entry_bytes);
      return std::exp((1 - t) * std::log(row[i - 1].seconds) + t * std::log(row[i].seconds));
    }
    return std::numeric_limits<double>::infinity();
  }
};

/// Seconds from a rate.
[[nodiscard]] inline point at_rate(transfer_way way, double entry_bytes, double entries,
                                   double bytes_per_second) {
  return {way, entry_bytes, entries, entry_bytes * entries / bytes_per_second};
}

[[nodiscard]] inline table mi300x_loop_and_batch() {
  const double small = 22.4e-3 / 4096;
  const double large = 11.2e-3 / 512;
  const auto of_loop = [&](double bytes) {
    return small * std::pow(large / small, std::log(bytes / (4 * kib)) / std::log(128.0));
  };
  return {
      "MI300X: loop of copies, batched copy",
      "MI300X",
      "vLLM #40549: 4 KB 22.4 and 10.5 ms (2.13x), 512 KB 11.2 ms, 1.00x from 32 KB",
      "4,096 copies at 4 KB and 512 at 512 KB, from the rates (0.75 and 24 GB/s); times per copy "
      "hold for an eighth to eight times 512; from 32 KB both take what the loop takes",
      {{transfer_way::direct, 4 * kib, 512, 512 * small},
       {transfer_way::direct, 512 * kib, 512, 512 * large},
       {transfer_way::batched, 4 * kib, 512, 512 * 10.5e-3 / 4096},
       {transfer_way::batched, 32 * kib, 512, 512 * of_loop(32 * kib)},
       {transfer_way::batched, 512 * kib, 512, 512 * large}},
      8};
}

[[nodiscard]] inline table mi300x_pull_and_direct() {
  return {"MI300X: zero-copy kernel, single copies",
          "MI300X",
          "SGLang #31741: 4 KB x 256, 14.2 against 0.5 GB/s",
          "",
          {at_rate(transfer_way::pull, 4 * kib, 256, 14.2e9),
           at_rate(transfer_way::direct, 4 * kib, 256, 0.5e9)}};
}

/// Only ratios are published, so the figure of a choice does not depend on what the kernel is taken
/// to cost; how well a formula fits does. So there is a table for each of several such costs.
[[nodiscard]] inline table a30_batch_and_pull(double kernel_latency, double kernel_rate) {
  table made{"A30: batched copy, zero-copy kernel of " + std::to_string(kernel_latency * 1e6) +
                 " us and " + std::to_string(kernel_rate / 1e9) + " GB/s",
             "A30, PCIe 4",
             "vLLM #57555: time of the batched copy over that of the kernel, by size and count",
             "the kernel's own time: a latency, and a rate below PCIe 4's 32 GB/s",
             {},
             0,
             kernel_latency,
             kernel_rate};
  const auto add = [&](double size_kib, double entries, double ratio) {
    made.points.push_back({transfer_way::pull, size_kib * kib, entries, 1});
    made.points.push_back({transfer_way::batched, size_kib * kib, entries, ratio});
  };
  add(1, 16, 0.49);
  add(4, 16, 0.57);
  add(16, 16, 0.86);
  add(24, 16, 0.99);
  add(28, 16, 0.57);
  add(28, 256, 1.29);
  add(28, 1024, 1.6);
  add(1, 4096, 4.23);
  add(4, 4096, 4.47);
  add(16, 4096, 3.73);
  add(24, 4096, 3.56);
  return made;
}

[[nodiscard]] inline table h100_batch_and_pull() {
  table made{"H100: batched copy, zero-copy kernel",
             "H100, PCIe 5",
             "vLLM #42212: GB/s of batched copies of 10,000 and 100,000 entries; vLLM's blog of "
             "2026-01-08: a kernel, about 50 GB/s one way",
             "the kernel's rate is taken for every size and count",
             {}};
  const auto add = [&](double size_kib, double entries, double gigabytes) {
    made.points.push_back(at_rate(transfer_way::batched, size_kib * kib, entries, gigabytes * 1e9));
    made.points.push_back(at_rate(transfer_way::pull, size_kib * kib, entries, 50e9));
  };
  add(4, 10'000, 6.8);
  add(8, 10'000, 6.8);
  add(16, 10'000, 7.1);
  add(24, 10'000, 25.8);
  add(28, 10'000, 27.5);
  add(64, 10'000, 38.8);
  add(4, 100'000, 3.8);
  add(16, 100'000, 6.3);
  add(24, 100'000, 6.9);
  add(28, 100'000, 44.1);
  add(64, 100'000, 51.8);
  return made;
}

[[nodiscard]] inline table h200_batch_and_staged() {
  const double entry = 0.6e-6;
  const double even = entry * 55e9;  // 33,000 bytes
  return {
      "H200: batched copy, staged",
      "H200, CUDA 13",
      "LMCache's design document: max(entries x 0.6 us, bytes / 55 GB/s); staged is 2x at 16 KB, "
      "7 to 8x at 4 KB, even at about 34 KB",
      "7.5x at 4 KB; even where the two terms are, 33,000 bytes; a law per entry, so for an "
      "eighth to eight times 1,024 entries",
      {{transfer_way::batched, 4 * kib, 1024, 1024 * entry},
       {transfer_way::batched, even, 1024, 1024 * entry},
       {transfer_way::staged, 4 * kib, 1024, 1024 * entry / 7.5},
       {transfer_way::staged, 16 * kib, 1024, 1024 * entry / 2},
       {transfer_way::staged, even, 1024, 1024 * entry}},
      8};
}

[[nodiscard]] inline table h20_single_copies() {
  return {"H20: single copies",
          "H20, PCIe 5",
          "FlexKV #193: about 2.3 us a call, 0.11 GB/s for chunks of 256 B",
          "a law per call, so for an eighth to eight times 512 calls",
          {{transfer_way::direct, 256, 512, 512 * 2.3e-6}},
          8};
}

[[nodiscard]] inline std::vector<table> tables() {
  return {mi300x_loop_and_batch(),        mi300x_pull_and_direct(),
          a30_batch_and_pull(5e-6, 24e9), a30_batch_and_pull(15e-6, 24e9),
          a30_batch_and_pull(5e-6, 12e9), h100_batch_and_pull(),
          h200_batch_and_staged(),        h20_single_copies()};
}

/// How much longer the chosen way takes than the best one of a table, at the worst shape.
struct judgement {
  double worst = 1;
  double entry_bytes = 0;
  double entries = 0;
  std::int64_t shapes = 0;
};

/// Asks `choose(shape)` for a way at shapes between and at the published ones: 48 an octave of
/// entry size, 6 an octave of counts. They are many times as many as a calibration measures, and
/// other ones.
template <class Choose>
[[nodiscard]] judgement judge(const table& t, Choose choose) {
  const pulseinfer::calibration_options range = t.range();
  const auto ways = t.ways();
  judgement found;
  for (const std::int64_t entries :
       pulseinfer::detail::spaced(range.least_entries, range.most_entries, std::exp2(1.0 / 6))) {
    for (const std::int64_t size : pulseinfer::detail::spaced(
             range.least_entry_bytes, range.most_entry_bytes, std::exp2(1.0 / 48))) {
      const transfer_shape shape{entries, entries, entries * size};
      double best = std::numeric_limits<double>::infinity();
      bool all = true;
      for (const transfer_way way : ways) {
        const double seconds = t(way, shape);
        best = std::min(best, seconds);
        all = all && std::isfinite(seconds);
      }
      if (!all) continue;
      ++found.shapes;
      const double ratio = t(choose(shape), shape) / best;
      if (ratio > found.worst) {
        found.worst = ratio;
        found.entry_bytes = static_cast<double>(size);
        found.entries = static_cast<double>(entries);
      }
    }
  }
  return found;
}

}  // namespace published
