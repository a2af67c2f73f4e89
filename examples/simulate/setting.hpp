// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is simulated: a machine, a model, its requests, what they choose and what of it is there;
/// and the bytes of a layer that follow.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "machines.hpp"
#include "models.hpp"
#include "pulseinfer/step_cost.hpp"

namespace simulate {

/// Launches of a batch and layer: what attends, output and MLP, the next queries, scores and choice.
inline constexpr std::int32_t kernels_of_layer = 4;

/// How often a choice is there already, and how often it is known before.
struct locality {
  double miss = 0.2;   ///< m: of the blocks that a layer chooses, those that are not resident
  double ahead = 0.9;  ///< p: of those, the share that is known one layer ahead
};

/// What moves recalled bytes at most: the link; or, as the staged way reads and writes each byte in
/// DRAM before the link reads it once more, the DRAM or the workers.
inline double recall_speed(const pulseinfer::hardware_profile& p) {
  return std::min({p.link_bytes_per_second, p.dram_bytes_per_second / 3,
                   p.workers * p.worker_bytes_per_second / 2});
}

struct setting {
  simulate::machine machine;
  simulate::model model;
  std::int32_t ranks = 1;  ///< tensor parallel; KV heads and weights are split evenly
  std::int32_t streams = 16;
  double context = 131072;   ///< tokens of each
  std::int32_t budget = 64;  ///< k: blocks that a layer reads of each request; 0: all of them
  std::int32_t pages = 128;  ///< of the hot buffer, each request and layer
  double digest_channel_bytes = 2;  ///< of each block and channel: a mean in FP16
  std::int32_t anchor_every = 1;    ///< layers that share one choice; only the first scores
  locality kv;
  std::int32_t shrink = 1;  ///< channels that stand as one, see carrier.hpp; divides head_dim

  [[nodiscard]] double blocks() const { return std::ceil(context / block_tokens); }
  [[nodiscard]] bool is_dense() const { return budget == 0; }
  /// Blocks that a layer reads.
  [[nodiscard]] double chosen() const {
    return is_dense() ? blocks() : std::min<double>(budget, blocks());
  }
  /// A unit's share of one rank.
  [[nodiscard]] double unit_bytes() const { return model.unit_bytes() / ranks; }
  [[nodiscard]] double digest_bytes() const {  // of a request and layer
    return is_dense() ? 0
                      : blocks() * model.kv_heads * model.head_dim * digest_channel_bytes / ranks;
  }
  /// One layer of one rank, as the library's cost model takes it. The head of the model is spread
  /// over the layers; two all-reduces a layer stand as the bytes that HBM moves meanwhile.
  [[nodiscard]] pulseinfer::layer_work work() const {
    const double head = model.head_bytes() / model.layers;
    const double reduces =
        ranks > 1 ? 2 * machine.all_reduce_seconds * machine.profile.hbm_bytes_per_second : 0;
    return {.weight_bytes = (model.layer_bytes() + head) / ranks + reduces,
            .request_bytes = chosen() * unit_bytes() + digest_bytes() / anchor_every,
            .recall_bytes = kv.miss * chosen() * unit_bytes(),
            .known_ahead = kv.miss > 0 ? kv.ahead : 0};
  }

  /// Of one rank's HBM: weights, then what each request has there.
  [[nodiscard]] double resident_weights() const { return model.weight_bytes() / ranks; }
  [[nodiscard]] double resident_of_request(bool offloads) const {
    if (!offloads) return model.kv_bytes(context) / ranks;
    const double hot = std::min<double>(pages, blocks()) * unit_bytes();
    return model.layers * (hot + digest_bytes());
  }
  static constexpr double reserve_bytes = 4e9;  ///< of HBM, for activations and the runtime
  [[nodiscard]] std::int32_t streams_that_fit(bool offloads) const {
    const double free =
        static_cast<double>(machine.profile.device_bytes) - reserve_bytes - resident_weights();
    double most = std::max(0.0, free / resident_of_request(offloads));
    if (offloads) most = std::min(most, machine.host_bytes / model.kv_bytes(context));
    return static_cast<std::int32_t>(std::min(most, 1024.0));
  }
};

/// Blocks that a request lacks at a layer.
struct lack {
  std::int32_t late = 0;   ///< known when the layer is chosen for
  std::int32_t ahead = 0;  ///< known a layer before
};

/// Misses as the setting says, spread evenly: over requests, layers and steps in turn.
inline lack even_lack(const setting& s, std::int32_t request, std::int32_t step,
                      std::int32_t layer) {
  const double all = s.kv.miss * s.chosen();
  const double ahead = all * s.kv.ahead;
  const double at = (double(step) * s.model.layers + layer) * s.streams + request;
  const auto nth = [&](double each) {
    return static_cast<std::int32_t>(std::floor((at + 1) * each) - std::floor(at * each));
  };
  return {nth(all) - std::min(nth(all), nth(ahead)), std::min(nth(all), nth(ahead))};
}

}  // namespace simulate
