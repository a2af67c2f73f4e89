// SPDX-License-Identifier: Apache-2.0
/// @file
/// A link at one moment, as a value: what decisions take, and what ranks agree on.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// One direction of a link. Each field is 0 where nothing is known, and the larger the heavier the
/// load: so the field by field larger one of two is the worse of both.
struct link_load {
  double utilisation = 0;             ///< busy share of the last window, 0 to 1
  double seconds_per_byte = 0;        ///< while it was busy, on average; 0: not measured
  std::int64_t queued_bytes = 0;      ///< submitted, and not yet moved
  std::int64_t queued_transfers = 0;  ///< submitted, and not yet ended

  friend bool operator==(const link_load&, const link_load&) = default;
};

/// Both directions, which do not share the link's width. Trivially copyable.
struct link_snapshot {
  link_load recalls;    ///< host to device
  link_load stores;     ///< device to host
  double taken_at = 0;  ///< seconds, by the clock of whoever took it

  /// Of the direction that is busier.
  [[nodiscard]] double utilisation() const noexcept {
    return std::max(recalls.utilisation, stores.utilisation);
  }
  friend bool operator==(const link_snapshot&, const link_snapshot&) = default;
};

/// The worse of two, field by field: of the ranks of a tensor-parallel group the slowest link and
/// the deepest queue hold all of them up. Commutative, associative and idempotent, so ranks may
/// merge in any order and with repeats, or take the largest of every field by an all-reduce; from
/// what they agree on they decide alike.
[[nodiscard]] inline link_load merge(const link_load& a, const link_load& b) noexcept {
  return {.utilisation = std::max(a.utilisation, b.utilisation),
          .seconds_per_byte = std::max(a.seconds_per_byte, b.seconds_per_byte),
          .queued_bytes = std::max(a.queued_bytes, b.queued_bytes),
          .queued_transfers = std::max(a.queued_transfers, b.queued_transfers)};
}
[[nodiscard]] inline link_snapshot merge(const link_snapshot& a, const link_snapshot& b) noexcept {
  return {.recalls = merge(a.recalls, b.recalls),
          .stores = merge(a.stores, b.stores),
          .taken_at = std::max(a.taken_at, b.taken_at)};
}
/// The worst of all ranks; of none an idle link at time 0.
[[nodiscard]] inline link_snapshot merge(std::span<const link_snapshot> ranks) noexcept {
  link_snapshot all = ranks.empty() ? link_snapshot{} : ranks[0];
  for (const link_snapshot& rank : ranks) all = merge(all, rank);
  return all;
}

namespace detail {

/// Throws unless the value is finite and in [0, limit]. A value that is not a number is neither.
inline void check_number(const char* who, const char* name, double value, double limit) {
  expects(std::isfinite(value) && value >= 0 && value <= limit, who, ": ", name, " is ", value,
          ", expected 0 to ", limit);
}
inline void check_number(const char* who, const char* name, double value) {
  expects(std::isfinite(value) && value >= 0, who, ": ", name, " is ", value,
          ", expected at least 0, and finite");
}
inline void check_count(const char* who, const char* name, std::int64_t value) {
  expects(value >= 0, who, ": ", name, " is ", value, ", expected at least 0");
}

inline void check_load(const char* who, const link_load& load) {
  check_number(who, "utilisation", load.utilisation, 1);
  check_number(who, "seconds_per_byte", load.seconds_per_byte);
  check_count(who, "queued_bytes", load.queued_bytes);
  check_count(who, "queued_transfers", load.queued_transfers);
}
/// Throws `std::invalid_argument` naming the field, for snapshots that come from elsewhere.
inline void check_snapshot(const char* who, const link_snapshot& link) {
  check_load(who, link.recalls);
  check_load(who, link.stores);
  check_number(who, "taken_at", link.taken_at);
}

}  // namespace detail
}  // namespace pulseinfer
