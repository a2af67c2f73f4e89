// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the study measured of a small model (docs/fidelity.md, `sh cmake/run.sh study`), as shares of
/// a list of a sixteenth of the context, and what a simulation makes of it.
#pragma once

#include <algorithm>

#include "setting.hpp"

namespace simulate {

/// A layer's list foretold from the input of the layer before, and a hot buffer of twice the list.
struct study {
  double foretold = 0.9006;  ///< of the list: what the foretold one has of it
  double missed = 0.0265;    ///< of the list, by the hot buffer, where nothing is foretold
  double late = 0.0116;      ///< of the list, still missed where what is foretold is recalled ahead
  double in_vain = 0.0299;   ///< of the list, recalled ahead and not chosen
  double per_head = 1.7;     ///< units that a list for each KV head moves, to one list a layer

  /// p of what is missed. Not of the list: most of a list is in the hot buffer, foretold or not, and
  /// what is new in it is what a guess fails at.
  [[nodiscard]] constexpr double foretold_of_misses() const { return 1 - late / missed; }
  /// What of a foretold list is wrong, all of it recalled in vain: the most that it can cost.
  [[nodiscard]] constexpr double wrong() const { return 1 - foretold; }
};
inline constexpr study studied{};

/// Misses and what is foretold of them, and a share of a list that moves ahead of its layer in vain.
inline locality with_vain(const locality& kv, double vain) {
  const double moved = kv.miss + vain;
  return {moved, moved > 0 ? (kv.miss * kv.ahead + vain) / moved : 0};
}

/// As the study measured all of it: what the hot buffer misses, and what comes in vain.
inline locality as_studied() {
  return with_vain({studied.missed, studied.foretold_of_misses()}, studied.in_vain);
}

}  // namespace simulate
