// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a decode step costs when its requests run through the layers in groups, and the best number
/// of groups.
///
/// A group computes a layer (reads the weights, then the KV and the digests of each of its
/// requests), chooses the next layer's blocks, and waits for those that must be recalled. Meanwhile
/// other groups compute. More groups hide more of the link, but each reads the weights again. The
/// costs are of a steady state: requests decode token after token, so the last layer of one step is
/// followed by the first one of the next.
#pragma once

#include <algorithm>
#include <cstdint>

#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// One layer of a decode step, in bytes of one device (of a tensor-parallel rank: its share).
struct layer_work {
  double weight_bytes = 0;   ///< read from device memory once for each group that runs the layer
  double request_bytes = 0;  ///< read from device memory for each request: KV and digests
  double recall_bytes = 0;   ///< over the link for each request: what is chosen and not resident
  /// The share of `recall_bytes` that is known a layer ahead, in [0, 1]. It may travel while the
  /// layer before computes; of a group, that is two recalls a layer unless all or nothing is known.
  double known_ahead = 0;
  /// Of a step. Of the first one nothing is known ahead, as the token before is not there; 0: so
  /// many that this does not matter. A layer scheduler takes its own.
  std::int32_t layers = 0;
  friend bool operator==(const layer_work&, const layer_work&) = default;
};

/// The speeds of a device and its link, and what does not depend on bytes.
struct step_speeds {
  double device_bytes_per_second = 0;  ///< of device memory; more than 0, may be infinite
  double link_bytes_per_second = 0;    ///< host to device; more than 0, may be infinite
  double launch_seconds = 0;           ///< of the device, for each group and layer
  double recall_seconds = 0;           ///< of each recall, while the link is free for others
  double recall_busy_seconds = 0;      ///< of each recall, on the link, beside its bytes
  friend bool operator==(const step_speeds&, const step_speeds&) = default;
};

/// What bounds a layer, in seconds for all groups together.
struct layer_seconds {
  double compute = 0;  ///< all groups, one after the other
  double link = 0;     ///< all recalls, one after the other
  double path = 0;     ///< the largest group by itself: it computes, and waits for its recall
  /// The layer takes as long as what takes longest.
  [[nodiscard]] constexpr double total() const noexcept {
    return std::max(compute, std::max(link, path));
  }
  friend bool operator==(const layer_seconds&, const layer_seconds&) = default;
};

/// A number of groups, and what a layer takes with it.
struct group_plan {
  std::int32_t groups = 0;
  layer_seconds layer;
  friend bool operator==(const group_plan&, const group_plan&) = default;
};

namespace detail {

inline void check_work(const layer_work& w) {
  const auto check = [](const char* name, double value) {
    expects(value >= 0 && value <= 1e18, "layer_work: ", name, " is ", value,
            ", expected 0 to 1e18");
  };
  check("weight_bytes", w.weight_bytes);
  check("request_bytes", w.request_bytes);
  check("recall_bytes", w.recall_bytes);
  expects(w.known_ahead >= 0 && w.known_ahead <= 1, "layer_work: known_ahead is ", w.known_ahead,
          ", expected 0 to 1");
  expects(w.layers >= 0, "layer_work: layers is ", w.layers, ", expected at least 0");
}
inline void check_speeds(const step_speeds& s) {
  const auto speed = [](const char* name, double value) {
    expects(value >= 1, "step_speeds: ", name, " is ", value, ", expected at least 1");
  };
  const auto seconds = [](const char* name, double value) {
    expects(value >= 0 && value <= 1e6, "step_speeds: ", name, " is ", value,
            ", expected 0 to 1e6");
  };
  speed("device_bytes_per_second", s.device_bytes_per_second);
  speed("link_bytes_per_second", s.link_bytes_per_second);
  seconds("launch_seconds", s.launch_seconds);
  seconds("recall_seconds", s.recall_seconds);
  seconds("recall_busy_seconds", s.recall_busy_seconds);
}

/// Layer costs, with what does not depend on groups worked out once.
struct step_cost {
  double group = 0;         ///< of the device, for each group
  double request = 0;       ///< of the device, for each request
  double recall = 0;        ///< of the link, for each request
  double busy = 0;          ///< of the link, for each recall
  double start = 0;         ///< of each recall, beside the link
  double late_share = 0;    ///< of what is recalled, what is known last
  double last_recalls = 0;  ///< of a group and layer, of what is known last: 0 to 1
  double ahead_recalls = 0;
  double first = 0;  ///< share of the layers of which nothing is known ahead

  step_cost(const layer_work& w, const step_speeds& s) noexcept
      : group(w.weight_bytes / s.device_bytes_per_second + s.launch_seconds),
        request(w.request_bytes / s.device_bytes_per_second),
        recall(w.recall_bytes / s.link_bytes_per_second),
        busy(s.recall_busy_seconds),
        start(s.recall_seconds),
        late_share(w.layers > 0 ? 1 - w.known_ahead * (1 - 1.0 / w.layers) : 1 - w.known_ahead),
        last_recalls(w.recall_bytes > 0 && w.known_ahead < 1 ? 1 : 0),
        ahead_recalls(w.recall_bytes > 0 && w.known_ahead > 0 ? 1 : 0),
        first(w.layers > 0 && w.recall_bytes > 0 ? 1.0 / w.layers : 0) {}

  [[nodiscard]] layer_seconds of(std::int32_t requests, std::int32_t groups,
                                 std::int32_t largest) const noexcept {
    const auto n = static_cast<double>(requests);
    const auto g = static_cast<double>(groups);
    const double recalls = busy * (last_recalls + ahead_recalls);
    const double travels = recall * static_cast<double>(largest);
    const double computes = group + request * static_cast<double>(largest);
    layer_seconds layer{.compute = g * group + n * request, .link = g * recalls + n * recall};
    // With one group the link rests while the last layer computes: what the first one lacks is known
    // only then. Recalls of other groups would fill that.
    if (groups == 1) layer.link += first * (computes + start);
    layer.path = computes + travels * late_share + last_recalls * (busy + start);
    if (ahead_recalls > 0) {
      // From the choice for a layer until the next layer but one begins to compute, what is known
      // ahead travels, and the layer between computes: two layers.
      layer.path = std::max(layer.path, (computes + recalls + travels + ahead_recalls * start) / 2);
    }
    return layer;
  }
  [[nodiscard]] layer_seconds of(std::int32_t requests, std::int32_t groups) const noexcept {
    return of(requests, groups, (requests - 1) / groups + 1);
  }
};

/// The number of even groups with which a layer takes least; of equals the smallest.
[[nodiscard]] inline group_plan cheapest_groups(const step_cost& cost, std::int32_t requests,
                                                std::int32_t max_groups) noexcept {
  group_plan best;
  for (std::int32_t groups = 1; groups <= std::min(requests, max_groups); ++groups) {
    const layer_seconds layer = cost.of(requests, groups);
    if (groups == 1 || layer.total() < best.layer.total()) best = {groups, layer};
    // From here on more groups only read the weights more often.
    if (layer.compute >= layer.path && layer.compute >= layer.link) break;
  }
  return best;
}

}  // namespace detail

/// What a layer takes with a given number of groups, of which the largest has `largest` requests.
///
/// Pure: the same arguments give the same seconds everywhere.
/// @param work      of the layer
/// @param speeds    of the machine
/// @param requests  of all groups, at least 1
/// @param groups    1 to `requests`
/// @param largest   of one group; at least an even share, and leaves one for each other group
/// @throws std::invalid_argument  naming what is out of range
[[nodiscard]] inline layer_seconds predict_layer(const layer_work& work, const step_speeds& speeds,
                                                 std::int32_t requests, std::int32_t groups,
                                                 std::int32_t largest) {
  detail::check_work(work);
  detail::check_speeds(speeds);
  detail::expects(requests >= 1, "predict_layer: requests is ", requests, ", expected at least 1");
  detail::expects(groups >= 1 && groups <= requests, "predict_layer: groups is ", groups,
                  ", expected 1 to ", requests);
  detail::expects(std::int64_t{largest} * groups >= requests && largest <= requests - (groups - 1),
                  "predict_layer: the largest of ", groups, " groups has ", largest, " of ",
                  requests, " requests");
  return detail::step_cost(work, speeds).of(requests, groups, largest);
}

/// The same for groups that are as even as can be.
[[nodiscard]] inline layer_seconds predict_layer(const layer_work& work, const step_speeds& speeds,
                                                 std::int32_t requests, std::int32_t groups) {
  detail::expects(groups >= 1 && groups <= requests, "predict_layer: groups is ", groups,
                  ", expected 1 to ", requests);
  return predict_layer(work, speeds, requests, groups, (requests - 1) / groups + 1);
}

/// The number of even groups with which a layer takes least; of equals the smallest.
///
/// @param work        of the layer
/// @param speeds      of the machine
/// @param requests    that decode together, at least 1
/// @param max_groups  the most groups that are tried, at least 1
/// @return that number, and what the layer takes with it
/// @throws std::invalid_argument  naming what is out of range
/// @par Cost  O(min(requests, max_groups)), some ns each; allocates nothing
[[nodiscard]] inline group_plan best_groups(const layer_work& work, const step_speeds& speeds,
                                            std::int32_t requests, std::int32_t max_groups) {
  detail::check_work(work);
  detail::check_speeds(speeds);
  detail::expects(requests >= 1, "best_groups: requests is ", requests, ", expected at least 1");
  detail::expects(max_groups >= 1, "best_groups: max_groups is ", max_groups,
                  ", expected at least 1");
  return detail::cheapest_groups(detail::step_cost(work, speeds), requests, max_groups);
}

}  // namespace pulseinfer
