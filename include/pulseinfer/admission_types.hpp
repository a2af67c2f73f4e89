// SPDX-License-Identifier: Apache-2.0
/// @file
/// What admission is asked and what it answers: requests, their placement, and what each way to
/// begin would cost.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "pulseinfer/error.hpp"
#include "pulseinfer/link_snapshot.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A request that asks to run.
struct admission_request {
  /// Of its KV cache in all layers, all that it may grow to included.
  std::int64_t context_bytes = 0;
  std::int64_t device_bytes_free = 0;  ///< of HBM that it may take
  /// What has to cross the link before it can run, unless it is recomputed: a stored prefix that
  /// its prefill attends to. 0 where it begins with nothing, or selects from its prefix as it goes.
  std::int64_t load_bytes = 0;
  std::int64_t load_tokens = 0;      ///< that those bytes belong to
  double recompute_s_per_token = 0;  ///< of a prefill of them; 0: they cannot be recomputed
  double waited_s = 0;               ///< since it first asked
};

/// What becomes of a request.
enum class [[nodiscard]] admission_verdict : std::uint8_t{
    admit,      ///< it runs; what it has to load is loaded
    recompute,  ///< it runs; what it has to load is recomputed, which is sooner there
    defer,      ///< not now: it asks again after the next observation
};

/// A verdict, and the times that it was weighed by; infinite where there is no such way.
struct [[nodiscard]] admission_answer {
  admission_verdict verdict = admission_verdict::defer;
  double load_s = 0;
  double recompute_s = 0;

  friend bool operator==(const admission_answer&, const admission_answer&) = default;
};

/// When `bytes` would be there: behind what waits already, over the share of the link that is free.
/// Of a link that is all but full a twentieth is taken to be free, so that it is a time at all.
/// @param link      the direction of recalls, as observed
/// @param bytes     to be loaded
/// @param promised  bytes that were let in since the link was looked at
/// @return 0 for no bytes, and where the link was never measured
[[nodiscard]] inline double predicted_load_s(const link_load& link, std::int64_t bytes,
                                             std::int64_t promised = 0) noexcept {
  if (bytes == 0) return 0;
  const double free = std::max(1 - link.utilisation, 0.05);
  const double before = static_cast<double>(link.queued_bytes) + static_cast<double>(promised);
  return link.seconds_per_byte * (before + static_cast<double>(bytes) / free);
}

/// What recomputing would take: 0 for nothing to load, infinite where it cannot be done.
[[nodiscard]] inline double predicted_recompute_s(const admission_request& r) noexcept {
  if (r.load_bytes == 0) return 0;
  if (r.load_tokens == 0 || r.recompute_s_per_token == 0) {
    return std::numeric_limits<double>::infinity();
  }
  return static_cast<double>(r.load_tokens) * r.recompute_s_per_token;
}

/// Where the blocks of a layer are, of one request or of many.
struct layer_blocks {
  std::int64_t only_on_device = 0;  ///< not yet offloaded
  std::int64_t on_both = 0;         ///< offloaded, and recalled since, or not yet released
  std::int64_t only_in_store = 0;
};

/// What a placement asks of a layer. The three parts make up what the device has: a placement gives
/// up or keeps what is there, and nothing is ever loaded for its sake, for that would make a busy
/// link busier. What is kept although the store has it is not evicted for the placement's sake.
struct layer_plan {
  std::int64_t offload = 0;  ///< of those only on the device: to be stored, then released
  std::int64_t release = 0;  ///< of those on both: their pages are free at once
  std::int64_t keep = 0;

  friend bool operator==(const layer_plan&, const layer_plan&) = default;
};

/// How a layer gets to its share of blocks that are only in the store, or as near as it can without
/// a load. Blocks that were recalled are in use, so they are released last.
/// @param share   of its blocks, rounded down to whole ones
/// @param blocks  where they are now
/// @throws std::invalid_argument  if it is not 0 to 1, or a count is negative
[[nodiscard]] inline layer_plan plan_layer(double share, const layer_blocks& blocks) {
  detail::check_number("plan_layer", "share", share, 1);
  detail::check_count("plan_layer", "only_on_device", blocks.only_on_device);
  detail::check_count("plan_layer", "on_both", blocks.on_both);
  detail::check_count("plan_layer", "only_in_store", blocks.only_in_store);
  const std::int64_t on_device = blocks.only_on_device + blocks.on_both;
  const auto all = static_cast<double>(on_device + blocks.only_in_store);
  const std::int64_t wanted = static_cast<std::int64_t>(std::floor(share * all));
  const std::int64_t more = std::clamp<std::int64_t>(wanted - blocks.only_in_store, 0, on_device);
  const std::int64_t offload = std::min(more, blocks.only_on_device);
  return {.offload = offload, .release = more - offload, .keep = on_device - more};
}

/// Bytes of HBM that a request takes when every layer has its share offloaded.
/// @param context_bytes  of its KV cache in all layers
/// @param placement      [layers] the share of each layer's blocks that is not on the device
[[nodiscard]] inline double resident_bytes(std::int64_t context_bytes,
                                           std::span<const double> placement) noexcept {
  double kept = 0;
  for (const double share : placement) kept += 1 - share;
  const auto layers = static_cast<double>(std::max<std::size_t>(placement.size(), 1));
  return static_cast<double>(context_bytes) * (kept / layers);
}

namespace detail {

/// Throws `std::invalid_argument` naming the field.
inline void check_request(const char* who, const admission_request& r) {
  check_count(who, "context_bytes", r.context_bytes);
  check_count(who, "device_bytes_free", r.device_bytes_free);
  check_count(who, "load_bytes", r.load_bytes);
  check_count(who, "load_tokens", r.load_tokens);
  check_number(who, "recompute_s_per_token", r.recompute_s_per_token);
  check_number(who, "waited_s", r.waited_s);
}

/// What every policy's `admit` is given.
inline void check_admit(const char* who, std::int32_t layers, const admission_request& r,
                        std::span<const double> placement) {
  check_request(who, r);
  expects(placement.size() == static_cast<std::size_t>(layers), who, ": placement is of ",
          placement.size(), " layers, expected ", layers);
}
inline void check_activity(const char* who, std::int32_t layers, std::span<const double> activity) {
  expects(activity.empty() || activity.size() == static_cast<std::size_t>(layers), who,
          ": activity is of ", activity.size(), " layers, expected ", layers, ", or none");
  for (const double value : activity) check_number(who, "activity", value);
}
[[nodiscard]] inline std::int32_t checked_layers(const char* who, std::int32_t layers) {
  expects(layers >= 1 && layers <= 65'536, who, ": layers is ", layers, ", expected 1 to 65536");
  return layers;
}
inline void check_layer_of(const char* who, std::int32_t layers, std::int32_t layer) {
  expects<std::out_of_range>(layer >= 0 && layer < layers, who, ": layer is ", layer,
                             ", expected 0 to ", layers - 1);
}

}  // namespace detail
}  // namespace pulseinfer
