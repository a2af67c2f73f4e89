// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is printed: the guide's table beside the simulated one, and what it rests on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "bound.hpp"
#include "systems.hpp"

namespace simulate {

/// One row: a system with several numbers of streams.
struct row {
  const simulate::system* of = nullptr;
  std::int32_t asked = 0;  ///< streams that the guide has of it, or 16; what fits of them
  std::map<std::int32_t, throughput> by_streams = {};
  double traced_seconds =
      0;  ///< a token as asked, with the misses of the study's trace; 0: not run

  [[nodiscard]] throughput as_asked() const {
    const auto at = by_streams.find(asked);
    return at == by_streams.end() ? throughput{} : at->second;
  }
  /// No schedule of what it reads and recalls is faster.
  [[nodiscard]] double bound_seconds() const {
    setting with = of->setting;
    with.streams = asked;
    return asked > 0 ? lower_bound(with).seconds : 0;
  }
  /// With the number of streams that has the most tokens a second.
  [[nodiscard]] throughput best() const {
    std::vector<throughput> all;
    for (const auto& one : by_streams) all.push_back(one.second);
    return best_of(all);
  }
};

/// Its time a token is plotted against the streams.
inline bool is_plotted(const system& s) {
  return s.key == "hbm_only" || s.key == "sync" || s.key == "guide" || s.key == "ours";
}

/// What a step of `streams` takes by the guide's own formulas, in ms: 8.5 ms of compute a layer, as
/// its simulator has it, and all chosen blocks moved, by pieces or in bulk. `with_compute` false:
/// the transfer alone.
inline double guide_formula_ms(const setting& s, std::int32_t streams, bool fragmented,
                               bool with_compute) {
  constexpr double gib = 1024.0 * 1024 * 1024;
  const double blocks = s.chosen() * streams;
  const double gigabytes = blocks * s.model.unit_bytes() / gib;
  const double moves = fragmented ? gigabytes / 7.5 * 1e3 + blocks * 0.02
                                  : gigabytes * 1e3 * (1 / 200.0 + 1 / 56.0 + 1 / 3350.0) + 0.05;
  return s.model.layers * (with_compute ? std::max(8.5, moves) : moves);
}

/// The same for a system of the guide's table that it has a formula of: in bulk its own, by pieces
/// the others that move all they choose. 0 where it has none.
inline double formula_ms(const system& s) {
  if (s.guide.streams < 1 || !s.offloads || s.setting.kv.miss < 1) return 0;
  return guide_formula_ms(s.setting, s.guide.streams, s.key != "guide", true);
}

/// As text; none of 0.
inline std::string in_ms(double ms) {
  if (ms == 0) return "";
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", ms);
  return text;
}

inline void print_table(const std::vector<row>& rows) {
  std::printf("\n%-30s | %21s %8s | %38s %8s %8s | %20s\n", "", "the guide claims", "formula",
              "simulated, as many streams", "trace", "bound", "simulated, at best");
  std::printf("%-30s | %3s %8s %8s %8s | %5s %10s %10s %10s %8s %8s | %3s %8s %7s\n", "system", "n",
              "TPOT ms", "tok/s", "ms", "n", "TPOT ms", "stall ms", "tok/s", "ms", "ms", "n",
              "TPOT ms", "tok/s");
  for (const row& r : rows) {
    const guide_figures& g = r.of->guide;
    if (g.streams > 0) {
      std::printf("%-30s | %3d %8.1f %8.1f %8s |", r.of->name.c_str(), g.streams, g.tpot_ms,
                  g.tokens_per_second, in_ms(formula_ms(*r.of)).c_str());
    } else {
      std::printf("%-30s | %30s |", r.of->name.c_str(), "");
    }
    const throughput now = r.as_asked();
    const throughput best = r.best();
    std::printf(" %5d %10.2f %10.2f %10.1f %8s %8s | %3d %8.2f %7.1f\n", now.streams,
                1e3 * now.tpot_seconds, 1e3 * now.stall_seconds, now.tokens_per_second(),
                in_ms(1e3 * r.traced_seconds).c_str(), in_ms(1e3 * r.bound_seconds()).c_str(),
                best.streams, 1e3 * best.tpot_seconds, best.tokens_per_second());
  }
  std::printf(
      "n: streams. Stall: of a token's time, how long its next layer could not run. Formula: of "
      "the guide's own simulator\n(which has none of HBM alone and of recalls of what is missing). "
      "Trace: the same with the misses of the study's\ntrace, where a system keeps what it has. "
      "Bound: no schedule of what is read and moved is faster.\n");
}

/// Where the guide's figures contradict each other, or what its machines and models are.
inline std::vector<std::string> contradictions() {
  setting s;  // the guide's case
  s.machine = machines().front();
  s.model = models().front();
  std::vector<system> all = systems(s);
  const auto claims = [&](const char* key) -> const guide_figures& {
    return std::find_if(all.begin(), all.end(), [&](const system& one) { return one.key == key; })
        ->guide;
  };
  const guide_figures& guide = claims("guide");
  std::vector<std::string> lines;
  const auto say = [&](const char* format, auto... values) {
    char line[320];
    std::snprintf(line, sizeof line, format, values...);
    lines.emplace_back(line);
  };
  say("%d streams at %.1f ms are %.0f tok/s, not %.1f, which is 4.7 times the %.1f of HBM only.",
      guide.streams, guide.tpot_ms, 1e3 * guide.streams / guide.tpot_ms, guide.tokens_per_second,
      claims("hbm_only").tokens_per_second);
  say("It claims 2.6 times InfiniGen, and has %.2f times; ArkVale %.2f, FlexGen %.2f times.",
      guide.tokens_per_second / claims("prefetch").tokens_per_second,
      guide.tokens_per_second / claims("sync").tokens_per_second,
      guide.tokens_per_second / claims("naive").tokens_per_second);
  const double chosen = guide.streams * s.chosen() * s.model.layers * s.model.unit_bytes();
  say("All %d x %.0f blocks of a step are %.2f GB, %.1f ms at 56 GB/s: more than the %.1f ms it "
      "takes.",
      guide.streams, s.chosen(), chosen / 1e9, chosen / 56e9 * 1e3, guide.tpot_ms);
  say("By its own formulas, with its 8.5 ms of compute a layer, 4 streams take %.0f ms with and "
      "%.0f ms "
      "without its engine: a speed-up of %.2f.",
      guide_formula_ms(s, 4, false, true), guide_formula_ms(s, 4, true, true),
      guide_formula_ms(s, 4, true, true) / guide_formula_ms(s, 4, false, true));
  say("By the same formulas the transfers of 16 streams alone take %.1f ms in bulk and %.1f ms by "
      "pieces.",
      guide_formula_ms(s, 16, false, false), guide_formula_ms(s, 16, true, false));
  say("A block of 16 tokens and a layer has %.0f KiB, not the 32 KB of its comment.",
      s.model.unit_bytes() / 1024);
  say("128,000 tokens of Llama-3-70B are %.1f GB of keys and values, not 33.5.",
      models()[1].kv_bytes(128000) / 1e9);
  say("HBM alone holds %d streams of %.0f tokens, not the one it has.", s.streams_that_fit(false),
      s.context);
  say("Llama-3-70B has %.0f GB of weights: it does not fit the one GPU of %.0f GB that it is "
      "launched on.",
      models()[1].weight_bytes() / 1e9, static_cast<double>(s.machine.profile.device_bytes) / 1e9);
  setting bounds = s;
  bounds.digest_channel_bytes = 4;
  const double digests = guide.streams * s.model.layers * bounds.digest_bytes();
  say("Digests are not free: min and max of each channel in FP16 are 1/%.0f of the cache, %.1f GB "
      "for %d streams, %.1f ms of HBM a step.",
      s.model.kv_bytes(s.context) * guide.streams / digests, digests / 1e9, guide.streams,
      digests / s.machine.profile.hbm_bytes_per_second * 1e3);
  return lines;
}

/// Every assumption, a line each; also in the report.
inline const std::vector<std::string>& assumptions() {
  // NOLINTBEGIN(bugprone-suspicious-missing-comma): lines are broken at 100 columns
  static const std::vector<std::string> all = {
      "No GPU ran: a virtual clock goes by declared bytes and the speeds of a profile. Those are "
      "of data sheets, of links published copy speeds where there are any (the sources stand "
      "beside each machine); starts of copies, launches and tasks are the library's defaults. "
      "Nothing is fitted to what anybody's system takes.",
      "Scheduler, flights, transfers, store and link monitor are the library's own, on its "
      "simulated backend. A block's 16 tokens stand as one and all speeds are a sixteenth: fewer "
      "bytes to copy, the same times; the 12 bytes a unit that a chunk's list has weigh 16 times "
      "as much.",
      "Pages have keys and values of a block side by side, so that a block by itself is one copy. "
      "Recalls go staged, or as copies in a batch where the library's calibration of the machine "
      "has those sooner; where the link is what takes long, staged.",
      "A layer of a batch reads its weights once, and of each request the chosen blocks and all "
      "digests, at HBM's full speed, in 4 kernels with a launch each. Arithmetic is hidden behind "
      "it.",
      "The model's head is read once a step, spread evenly over the layers; its table of "
      "embeddings is resident and not read.",
      "Tensor parallel ranks do the same at the same time, one of them is simulated; two "
      "all-reduces of 8 us a layer occupy the device.",
      "Misses are spread evenly over requests, layers and steps; which blocks they are does not "
      "matter. What p foretells of a layer's misses travels while the layer before computes; of "
      "the first layer nothing is known before. Predicting costs no time here.",
      "p as the study measured it (a 135M model, from the input of the layer before) depends on "
      "what it is a share of: 0.90 of a whole list, which counts where all of a list moves "
      "(InfiniGen, ours without hot buffer), and 0.56 of what a hot buffer misses (1.16 of 2.65 % "
      "of a list come late all the same), which counts where only that moves: ours. What is "
      "foretold in vain is left out but for the row that says so; the server has it.",
      "The host decides in no time, a poll takes it 10 ns; a decision is measured elsewhere.",
      "What a step generates is not offloaded meanwhile (the server does): 4 KiB a token and "
      "layer.",
      "The server's channels stand for eight, so lists weigh 2 % of what moves. Its requests "
      "arrive when their prefill, on other GPUs, is over; keys and values cost their writing to "
      "HBM. It misses as the study measured at a sixteenth of the context, 1.2 % of a list late "
      "and 4.5 % ahead, in vain in part; a share that stays lowers both alike. Prompts share "
      "nothing.",
      "Next turns are prefilled here, at 500 TFLOP/s and 128 tokens at a time between the layers "
      "of those who decode; they attend to all that is stored of their prompt, which is loaded, or "
      "recomputed, whole. The store has all of it, and keeps it.",
      "HBM: 4 GB of each GPU are kept for activations; hot buffers of 2k blocks, digests of all "
      "blocks. Host: all blocks of all streams.",
      "One GPU has 16 workers of 25 GB/s and the DRAM of its profile; eight share 614 GB/s, two "
      "sockets of eight channels DDR5-4800."};
  // NOLINTEND(bugprone-suspicious-missing-comma)
  return all;
}

}  // namespace simulate
