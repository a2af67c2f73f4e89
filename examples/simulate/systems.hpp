// SPDX-License-Identifier: Apache-2.0
/// @file
/// The systems that are compared: each a setting and a policy for the same machinery.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "decoder.hpp"
#include "setting.hpp"
#include "studied.hpp"

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
  guide_figures guide = {};
  simulate::setting setting = {};
  simulate::policy policy = {};
  bool offloads = true;

  [[nodiscard]] std::int32_t streams_that_fit() const { return setting.streams_that_fit(offloads); }
};

/// The case of the headline figures, as far as machine, model and lists go.
inline bool is_headline(const setting& s) {
  return s.machine.name == "h100" && s.model.name == "llama-3-8b" && s.context == 131072 &&
         s.budget == 64 && s.streams == 16;
}

/// What ours is made of, for `base` with its miss rate and prediction.
inline system ours(const setting& base) {
  return {
      .key = "ours",
      .name = "ours",
      .what =
          "groups, prediction, hot buffer, FP16 mean digests; staged in overlapping chunks, cut as "
          "trials found best, or "
          "copies in a batch where those are sooner",
      .setting = base,
      .policy = {.moves = {.tuned = true}}};
}

/// All systems at one base setting. Whoever moves all that is chosen has foretold of it what the
/// study found of a list, whoever moves what is missing `base.kv.ahead` of that.
inline std::vector<system> systems(const setting& base) {
  using pulseinfer::transfer_way;
  std::vector<system> all;
  const std::int32_t heads = std::max(1, base.model.kv_heads / base.ranks);

  // Others: all streams in one group.
  const auto other = [&](system s, const auto& change) {
    s.setting = base;
    s.policy.max_groups = 1;
    change(s);
    all.push_back(std::move(s));
  };
  other({"hbm_only", "SGLang, HBM only", "reads all of the cache from HBM", {1, 38.2, 26.1}},
        [](system& s) {
          s.offloads = false;
          s.setting.budget = 0;
          s.setting.kv = {0, 0};
        });
  other({"naive",
         "FlexGen, naive",
         "moves all chosen blocks each step, a copy for each, then computes",
         {8, 195.4, 40.9}},
        [](system& s) {
          s.setting.kv = {1, 0};
          s.policy.moves.way = transfer_way::per_block;
        });
  other({"prefetch",
         "InfiniGen, prefetch",
         "every KV head chooses by itself; moves all it chose, one layer ahead where foretold; "
         "gathers, then one copy",
         {8, 112.6, 71.0}},
        [&](system& s) {
          s.setting.kv = {1, studied.foretold};
          s.policy.moves = {.serial = true, .pieces = heads};
        });
  other({"sync",
         "ArkVale, synchronous",
         "keeps pages on the device; recalls what is missing, a copy for each page, then computes",
         {8, 88.5, 90.4}},
        [](system& s) {
          s.setting.kv.ahead = 0;
          s.policy.moves.way = transfer_way::per_block;
        });
  other({"guide",
         "PulseInfer as the guide has it",
         "moves all chosen blocks each step: gather, then copy, then scatter, then compute",
         {16, 26.8, 122.8}},
        [](system& s) {
          s.setting.kv = {1, 0};
          s.policy.moves.serial = true;
        });

  all.push_back(ours(base));
  // Ours with one idea taken away, or changed.
  const auto but = [&](const char* key, const char* name, const char* what, const auto& change) {
    system s = ours(base);
    s.key += std::string("_") + key;
    s.name = std::string("  ") + name;
    s.what = what;
    change(s);
    all.push_back(std::move(s));
  };
  but("one_group", "- without groups", "all streams run a layer together",
      [](system& s) { s.policy.max_groups = 1; });
  but("no_prediction", "- without prediction", "a layer's recalls begin when it has chosen",
      [](system& s) { s.setting.kv.ahead = 0; });
  but("neither", "- without either", "no groups and no prediction", [](system& s) {
    s.setting.kv.ahead = 0;
    s.policy.max_groups = 1;
  });
  but("no_hot_buffer", "- without hot buffer", "all that is chosen moves, each step",
      [](system& s) {
        s.setting.kv = {1, studied.foretold};
      });
  but("serial_phases", "- without overlapping phases", "gathers all, copies all, scatters all",
      [](system& s) { s.policy.moves.serial = true; });
  but("per_block", "- without staging", "a copy for each block",
      [](system& s) { s.policy.moves.way = transfer_way::per_block; });
  but("per_head", "- without consensus",
      "every KV head chooses by itself, which moves 1.7 times as much by the study",
      [&](system& s) {
        s.setting.kv.miss = std::min(1.0, studied.per_head * base.kv.miss);
        s.policy.moves.pieces = heads;
      });
  but("min_max_f16", "- min_max digests, FP16", "twice the bytes of digests",
      [](system& s) { s.setting.digest_channel_bytes = 4; });
  but("mean_i8", "+ mean digests, INT8", "half the bytes of digests; min_max in INT8 has as many",
      [](system& s) { s.setting.digest_channel_bytes = 1; });
  but("anchors", "+ one layer in 3 chooses",
      "the choice of the other two is known before them, and keeps less of the mass",
      [&](system& s) {
        s.setting.anchor_every = 3;
        s.setting.kv.ahead = 1 - (1 - base.kv.ahead) / 3;
      });
  but("in_vain", "+ what is foretold in vain",
      "all that is wrong in a foretold list is recalled, too: a tenth of the list",
      [&](system& s) { s.setting.kv = with_vain(base.kv, studied.wrong()); });
  return all;
}

/// What a number of streams came to.
struct throughput {
  std::int32_t streams = 0;
  double tpot_seconds = 0;
  double stall_seconds = 0;  ///< a token
  [[nodiscard]] double tokens_per_second() const {
    return tpot_seconds > 0 ? streams / tpot_seconds : 0;
  }
};

/// Steps of a system with so many streams.
inline decoded decode(const system& s, std::int32_t streams, std::int32_t steps = 3,
                      pulseinfer::trace* trace = nullptr) {
  setting with = s.setting;
  with.streams = streams;
  return decoder(with, s.policy, trace).run(steps, even_misses(with));
}

/// The one with the most tokens a second; none of nothing.
inline throughput best_of(const std::vector<throughput>& all) {
  throughput best;
  for (const throughput& t : all) {
    if (t.tokens_per_second() > best.tokens_per_second()) best = t;
  }
  return best;
}

inline throughput measure(const system& s, std::int32_t streams) {
  const decoded r = decode(s, streams);
  return {streams, r.tpot_seconds, r.stall_seconds};
}

}  // namespace simulate
