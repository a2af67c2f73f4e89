// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is printed: the guide's table beside the simulated one, and what it rests on.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "systems.hpp"

namespace simulate {

/// One row: a system at the guide's number of streams, and at its own best.
struct row {
  const simulate::system* of = nullptr;
  throughput at_guide;
  throughput best;
};

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

inline void print_table(const std::vector<row>& rows) {
  std::printf("\n%-32s | %21s | %25s | %21s\n", "", "the guide claims",
              "simulated, as many streams", "simulated, at its best");
  std::printf("%-32s | %3s %9s %7s | %5s %10s %8s | %3s %9s %7s\n", "system", "n", "TPOT ms",
              "tok/s", "n", "TPOT ms", "tok/s", "n", "TPOT ms", "tok/s");
  for (const row& r : rows) {
    const guide_figures& g = r.of->guide;
    if (g.streams > 0) {
      std::printf("%-32s | %3d %9.1f %7.1f |", r.of->name.c_str(), g.streams, g.tpot_ms,
                  g.tokens_per_second);
    } else {
      std::printf("%-32s | %21s |", r.of->name.c_str(), "");
    }
    std::printf(" %5d %10.2f %8.1f | %3d %9.2f %7.1f\n", r.at_guide.streams,
                1e3 * r.at_guide.tpot_seconds, r.at_guide.tokens_per_second(), r.best.streams,
                1e3 * r.best.tpot_seconds, r.best.tokens_per_second());
  }
}

inline void print_contradictions() {
  setting s;  // the guide's case
  s.model = models().front();
  std::printf(
      "\nThe guide against itself: 16 streams at 26.8 ms are %.0f tok/s, not 122.8. All 16 x 64 "
      "blocks\n"
      "of a step are %.2f GB, %.1f ms at 56 GB/s. Its own formulas, with its 8.5 ms of compute a\n"
      "layer, give %.0f ms with and %.0f ms without its engine at 4 streams (a speed-up of %.2f); "
      "the\n"
      "transfers of 16 streams alone take %.1f ms and %.1f ms.\n",
      16 / 0.0268, 16 * 64 * 32 * s.model.unit_bytes() / 1e9,
      16 * 64 * 32 * s.model.unit_bytes() / 56e9 * 1e3, guide_formula_ms(s, 4, false, true),
      guide_formula_ms(s, 4, true, true),
      guide_formula_ms(s, 4, true, true) / guide_formula_ms(s, 4, false, true),
      guide_formula_ms(s, 16, false, false), guide_formula_ms(s, 16, true, false));
}

/// Every assumption, a line each; also in the report.
inline const std::vector<std::string>& assumptions() {
  // NOLINTBEGIN(bugprone-suspicious-missing-comma): lines are broken at 100 columns
  static const std::vector<std::string> all = {
      "No GPU ran: a virtual clock goes by declared bytes and the speeds of a profile.",
      "Scheduler, flights, transfers, store and link monitor are the library's own, on its "
      "simulated "
      "backend. A block's 16 tokens stand as one and all speeds are a sixteenth: fewer bytes to "
      "copy, the same times; the 12 bytes a unit that a chunk's list has weigh 16 times as much.",
      "A layer of a batch reads its weights once, and of each request the chosen blocks and all "
      "digests, at HBM's full speed, in 4 kernels with a launch each. Arithmetic is hidden behind "
      "it.",
      "The model's head is read once a step, spread evenly over the layers; its table of "
      "embeddings "
      "is resident and not read.",
      "Tensor parallel ranks do the same at the same time, one of them is simulated; two "
      "all-reduces "
      "of 8 us a layer occupy the device.",
      "Misses are spread evenly over requests, layers and steps; which blocks they are does not "
      "matter. What p foretells of a layer's misses travels while the layer before computes; of "
      "the "
      "first layer nothing is known before.",
      "p = 0.9 is the share of a whole list that the study found from the input of the layer "
      "before "
      "(a 135M model); of misses alone it may be less. Predicting costs no time here.",
      "The host decides in no time, a poll takes it 10 ns; a decision is measured elsewhere.",
      "What a step generates is not offloaded meanwhile (the server does): 4 KiB a token and "
      "layer.",
      "The server's channels stand for eight, so lists weigh 2 % of what moves. Its requests "
      "arrive "
      "when their prefill, on other GPUs, is over; keys and values cost their writing to HBM. It "
      "misses as the study measured at a sixteenth of the context, 1.2 % of a list late and 4.5 % "
      "ahead, in vain in part; a share that stays lowers both alike. Prompts share nothing.",
      "HBM: 4 GB of each GPU are kept for activations; hot buffers of 2k blocks, digests of all "
      "blocks. Host: all blocks of all streams.",
      "One GPU has 16 workers of 25 GB/s and the DRAM of its profile; eight share 614 GB/s, two "
      "sockets of eight channels DDR5-4800."};
  // NOLINTEND(bugprone-suspicious-missing-comma)
  return all;
}

}  // namespace simulate
