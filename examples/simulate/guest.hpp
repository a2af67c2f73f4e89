// SPDX-License-Identifier: Apache-2.0
/// @file
/// A request of a server: what it has in HBM, what of it is in the store, what its layers lack.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "arrivals.hpp"
#include "decoder.hpp"
#include "pulseinfer/admission_types.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/schedule_types.hpp"
#include "setting.hpp"

namespace simulate {

struct guest {
  enum class where : std::uint8_t { queued, arriving, decoding, gone };
  /// Blocks of one layer. What is leaving is on the device until it is in the store.
  struct layer {
    std::int32_t away = 0;     ///< only in the store
    std::int32_t leaving = 0;  ///< of those on the device
  };

  guest(const setting& s, const arrival& a, std::size_t nth)
      : arrives_ns(static_cast<std::uint64_t>(std::llround(1e9 * a.at_seconds))),
        output_tokens(a.output_tokens),
        blocks((a.prompt_tokens + a.output_tokens - 1) / block_tokens + 1),
        stored(a.stored_tokens / block_tokens),
        new_tokens(stored > 0 ? a.prompt_tokens - stored * block_tokens : 0),
        number(nth),
        layers(static_cast<std::size_t>(s.model.layers)) {}

  std::uint64_t arrives_ns;
  std::int32_t output_tokens;
  std::int32_t blocks;      ///< of each layer, those that it will write included
  std::int32_t stored;      ///< of each layer, that were in the store when it came
  std::int32_t new_tokens;  ///< that are prefilled here, behind those; 0 where nothing was stored
  std::size_t number;
  where place = where::queued;
  pulseinfer::request_id id;
  std::vector<layer> layers;
  std::int32_t pieces = 0;  ///< of it, that are yet to be stored, loaded or prefilled

  [[nodiscard]] double away(std::size_t l) const {
    return static_cast<double>(layers[l].away) / blocks;
  }
  [[nodiscard]] double chosen(const setting& s) const { return std::min<double>(s.budget, blocks); }
  [[nodiscard]] double context_bytes(const setting& s) const {
    return s.unit_bytes() * blocks * s.model.layers;
  }
  [[nodiscard]] double digest_bytes_of_layer(const setting& s) const {
    return s.digest_channel_bytes * blocks * s.model.kv_heads * s.model.head_dim / s.ranks;
  }
  [[nodiscard]] double digest_bytes(const setting& s) const {
    return s.model.layers * digest_bytes_of_layer(s);
  }
  /// Hot buffers of all layers.
  [[nodiscard]] double hot_bytes(const setting& s) const {
    return s.model.layers * s.unit_bytes() * std::min(s.pages, blocks);
  }
  [[nodiscard]] double fixed_bytes(const setting& s) const {
    return digest_bytes(s) + hot_bytes(s);
  }
  /// What a layer reads of it.
  [[nodiscard]] double layer_bytes(const setting& s) const {
    return chosen(s) * s.unit_bytes() + digest_bytes_of_layer(s) / s.anchor_every;
  }
  /// Of HBM, now. While it arrives what leaves goes through the reserve, a few layers at a time.
  [[nodiscard]] double held_bytes(const setting& s) const {
    double units = 0;
    for (const layer& l : layers) {
      const std::int32_t leaves = place == where::decoding ? 0 : l.leaving;
      const std::int32_t gone = l.away + leaves;
      units += blocks - gone + (gone > 0 ? std::min(s.pages, gone) : 0);
    }
    return digest_bytes(s) + units * s.unit_bytes();
  }

  /// A placement, before anything of it has arrived. What was in the store is there still when it
  /// has been loaded or recomputed.
  void plan(std::span<const double> placement) {
    for (std::size_t l = 0; l < layers.size(); ++l) {
      const pulseinfer::layer_plan plan = pulseinfer::plan_layer(
          placement[l], {.only_on_device = blocks - stored, .on_both = stored});
      layers[l] = {.away = static_cast<std::int32_t>(plan.release),
                   .leaving = static_cast<std::int32_t>(plan.offload)};
    }
  }
  /// Blocks of a layer that are to be stored for a share that is larger now; noted as leaving.
  [[nodiscard]] std::int32_t give_up(std::int32_t which, double share) {
    layer& l = layers[static_cast<std::size_t>(which)];
    const std::int32_t gone = l.away + l.leaving;
    const pulseinfer::layer_plan plan =
        pulseinfer::plan_layer(share, {.only_on_device = blocks - gone, .only_in_store = gone});
    l.leaving += static_cast<std::int32_t>(plan.offload);
    return static_cast<std::int32_t>(plan.offload);
  }
  /// They are in the store, and their pages free.
  void left(std::int32_t which, std::int32_t units) {
    layer& l = layers[static_cast<std::size_t>(which)];
    l.leaving -= units;
    l.away += units;
  }

  /// What a layer lacks in a step: its share of misses of what is away, as a whole number on one
  /// side or the other as a draw has it that depends on request, step and layer alone.
  [[nodiscard]] lack lacks(const setting& s, std::int32_t step, std::int32_t which) const {
    const double all = s.kv.miss * chosen(s) * away(static_cast<std::size_t>(which));
    if (all == 0) return {};
    pulseinfer::detail::random_source random(
        (static_cast<std::uint64_t>(number) << 40) ^
        (static_cast<std::uint64_t>(static_cast<std::uint32_t>(step)) << 12) ^
        static_cast<std::uint64_t>(static_cast<std::uint32_t>(which)));
    const double draw = detail::draw(random);
    const auto whole = static_cast<std::int32_t>(std::floor(all + draw));
    const auto ahead = static_cast<std::int32_t>(std::floor(s.kv.ahead * all + draw));
    return {whole - ahead, ahead};
  }
};

}  // namespace simulate
