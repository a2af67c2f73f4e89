// SPDX-License-Identifier: Apache-2.0
/// @file
/// The systems that are compared: each a setting and a policy for the same machinery.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "decoder.hpp"
#include "setting.hpp"

namespace simulate {

struct guide_figures {
  std::int32_t streams = 0;  ///< 0: not in the guide's table
  double tpot_ms = 0;
  double tokens_per_second = 0;
};

struct system {
  std::string key;
  std::string name;
  std::string what;  ///< what it does, in words
  simulate::setting setting;
  simulate::policy policy;
  guide_figures guide;
  bool offloads = true;

  [[nodiscard]] std::int32_t streams_that_fit() const { return setting.streams_that_fit(offloads); }
};

/// What ours is made of, for `base` with its miss rate and prediction.
inline system ours(const setting& base) {
  return {.key = "ours",
          .name = "ours",
          .what = "groups, prediction, hot buffer, staged in overlapping chunks, FP16 mean digests",
          .setting = base,
          .policy = {},
          .guide = {}};
}

/// All systems at one base setting.
inline std::vector<system> systems(const setting& base) {
  using pulseinfer::transfer_way;
  std::vector<system> all;
  const auto add = [&](system s) -> system& { return all.emplace_back(std::move(s)); };
  const policy alone{.max_groups = 1, .moves = {}};

  system& hbm = add({"hbm_only",
                     "SGLang, HBM only",
                     "reads all of the cache from HBM",
                     base,
                     alone,
                     {1, 38.2, 26.1},
                     false});
  hbm.setting.budget = 0;
  hbm.setting.kv = {0, 0};

  system& naive = add({"naive",
                       "FlexGen, naive",
                       "moves all chosen blocks each step, a copy for each, then computes",
                       base,
                       alone,
                       {8, 195.4, 40.9}});
  naive.setting.kv = {1, 0};
  naive.policy.moves.way = transfer_way::per_block;

  system& ahead = add({"prefetch",
                       "InfiniGen, prefetch",
                       "every KV head chooses by itself; moves all it chose, one layer ahead where "
                       "foretold; gathers, then one copy",
                       base,
                       alone,
                       {8, 112.6, 71.0}});
  ahead.setting.kv = {1, base.kv.ahead};
  ahead.policy.moves = {transfer_way::staged, true, base.model.kv_heads / base.ranks};

  system& sync = add({"sync",
                      "ArkVale, synchronous",
                      "keeps pages on the device; recalls what is missing, a copy for each page, "
                      "then computes",
                      base,
                      alone,
                      {8, 88.5, 90.4}});
  sync.setting.kv = {base.kv.miss, 0};
  sync.policy.moves.way = transfer_way::per_block;

  system& guide = add({"guide",
                       "PulseInfer as the guide has it",
                       "moves all chosen blocks each step: gather, then copy, then scatter, then "
                       "compute",
                       base,
                       alone,
                       {16, 26.8, 122.8}});
  guide.setting.kv = {1, 0};
  guide.policy.moves.serial = true;

  add(ours(base));

  system& groups = add(ours(base));
  groups.key = "ours_one_group", groups.name = "  - without groups";
  groups.policy.max_groups = 1;
  system& foresight = add(ours(base));
  foresight.key = "ours_no_prediction", foresight.name = "  - without prediction";
  foresight.setting.kv.ahead = 0;
  system& plain = add(ours(base));
  plain.key = "ours_neither", plain.name = "  - without either";
  plain.setting.kv.ahead = 0;
  plain.policy.max_groups = 1;
  system& cold = add(ours(base));
  cold.key = "ours_no_hot_buffer", cold.name = "  - without hot buffer";
  cold.setting.kv.miss = 1;
  system& phases = add(ours(base));
  phases.key = "ours_serial_phases", phases.name = "  - gather, copy, scatter in turn";
  phases.policy.moves.serial = true;
  system& large = add(ours(base));
  large.key = "ours_min_max_f16", large.name = "  - min_max digests, FP16";
  large.setting.digest_channel_bytes = 4;
  system& bytes = add(ours(base));
  bytes.key = "ours_min_max_i8", bytes.name = "  + min_max digests, INT8";
  bytes.setting.digest_channel_bytes = 2;
  system& least = add(ours(base));
  least.key = "ours_mean_i8", least.name = "  + mean digests, INT8";
  least.setting.digest_channel_bytes = 1;
  system& anchors = add(ours(base));
  anchors.key = "ours_anchors", anchors.name = "  + one layer in 3 chooses";
  anchors.setting.anchor_every = 3;
  anchors.setting.kv.ahead = 1 - (1 - base.kv.ahead) / 3;  // the others' choice is known before
  return all;
}

/// One step of a system with so many streams.
inline decoded decode(const system& s, std::int32_t streams, std::int32_t steps = 3,
                      pulseinfer::trace* trace = nullptr) {
  setting with = s.setting;
  with.streams = streams;
  return decoder(with, s.policy, trace).run(steps, even_misses(with));
}

struct throughput {
  std::int32_t streams = 0;
  double tpot_seconds = 0;
  [[nodiscard]] double tokens_per_second() const {
    return tpot_seconds > 0 ? streams / tpot_seconds : 0;
  }
};

/// The number of streams with the most tokens a second: of 4, 16, and what fits.
inline throughput best_throughput(const system& s) {
  const std::int32_t most = s.streams_that_fit();
  throughput best;
  for (const std::int32_t n : {4, 16, most}) {
    if (n > most || n < 1 || (n == most && best.streams == most)) continue;
    const throughput now{n, decode(s, n, 2).tpot_seconds};
    if (now.tokens_per_second() > best.tokens_per_second()) best = now;
  }
  return best;
}

}  // namespace simulate
