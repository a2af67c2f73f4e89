// SPDX-License-Identifier: Apache-2.0
/// @file
/// Misses of a real trace: what a hot buffer of twice the budget missed, step by step, in the study
/// of a small model (examples/data/PROVENANCE.md). Its layers stand for those of any model.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "decoder.hpp"

namespace simulate {

/// [layers and texts][steps] the share of the chosen blocks that was not there.
using overlap_trace = std::vector<std::vector<double>>;

/// @throws std::runtime_error  naming a file that cannot be read, or has no line of that size
inline overlap_trace overlap_from(const std::string& path) {
  std::ifstream file(path);
  overlap_trace trace;
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string text, layer, context, budget, hot;
    for (std::string* field : {&text, &layer, &context, &budget, &hot}) {
      std::getline(fields, *field, ',');
    }
    const long blocks = std::strtol(budget.c_str(), nullptr, 10);
    if (blocks < 1 || std::strtol(hot.c_str(), nullptr, 10) != 2 * blocks) continue;
    std::vector<double> shares;
    for (int misses = 0; fields >> misses;) shares.push_back(misses / static_cast<double>(blocks));
    if (shares.size() > 1) trace.push_back(std::move(shares));
  }
  if (trace.empty()) throw std::runtime_error("overlap: no hot buffer of two budgets in " + path);
  return trace;
}

/// Each request begins somewhere else in the trace; its first step, with nothing there, is left out.
inline decoder::demand traced_misses(const setting& s, const overlap_trace& trace) {
  const auto shared = std::make_shared<const overlap_trace>(trace);
  const double chosen = s.chosen(), ahead_share = s.kv.ahead;
  return [=](std::int32_t request, std::int32_t step, std::int32_t layer) {
    const auto& line = (*shared)[static_cast<std::size_t>(layer + 31 * request) % shared->size()];
    const double share =
        line[1 + static_cast<std::size_t>(step + 13 * request) % (line.size() - 1)];
    const auto all = static_cast<std::int32_t>(std::lround(share * chosen));
    const auto ahead = static_cast<std::int32_t>(std::lround(share * chosen * ahead_share));
    return lack{all - ahead, ahead};
  };
}

}  // namespace simulate
