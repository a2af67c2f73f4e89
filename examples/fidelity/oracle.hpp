// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the attention of a captured layer really is: the share of the softmax that each query head
/// gives each block, and what each block adds to the output.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../demo/capture.hpp"
#include "measures.hpp"

namespace fidelity {

/// Exact attention of one layer over all decode steps. Blocks of step s are 0 to blocks(s) - 1, the
/// last one perhaps not full.
class oracle {
 public:
  /// @param output_every  the outputs of steps 0, n, 2n, ... are kept too, for output_error
  oracle(const demo::capture& c, std::int32_t layer, std::int64_t output_every)
      : c_(&c),
        heads_(c.query_heads),
        dim_(c.geometry.head_dim),
        group_(c.query_heads / c.geometry.kv_heads),
        stride_(c.geometry.blocks_of(c.tokens)),
        every_(output_every),
        mass_(static_cast<std::size_t>(c.steps * heads_ * stride_)),
        mean_mass_(static_cast<std::size_t>(c.steps * stride_)) {
    const std::int64_t kept = (c.steps + every_ - 1) / every_;
    parts_.resize(static_cast<std::size_t>(kept * heads_ * stride_ * dim_));
    for (std::int32_t head = 0; head < c.geometry.kv_heads; ++head) attend(layer, head);
    for (std::int64_t s = 0; s < c.steps; ++s) {
      for (std::int64_t b = 0; b < stride_; ++b) {
        double total = 0;
        for (std::int64_t h = 0; h < heads_; ++h) total += mass(s, h)[static_cast<std::size_t>(b)];
        mean_mass_[static_cast<std::size_t>(s * stride_ + b)] = total / static_cast<double>(heads_);
      }
    }
  }

  [[nodiscard]] std::int64_t heads() const { return heads_; }
  [[nodiscard]] std::int64_t tokens(std::int64_t step) const {
    return c_->prompt_tokens + step + 1;
  }
  [[nodiscard]] std::int64_t blocks(std::int64_t step) const {
    return c_->geometry.blocks_of(tokens(step));
  }
  /// [blocks] share of the softmax of a head.
  [[nodiscard]] std::span<const float> mass(std::int64_t step, std::int64_t head) const {
    return {mass_.data() + (step * heads_ + head) * stride_, static_cast<std::size_t>(stride_)};
  }
  /// [blocks] the same, mean over the heads.
  [[nodiscard]] std::span<const double> mean_mass(std::int64_t step) const {
    return {mean_mass_.data() + step * stride_, static_cast<std::size_t>(stride_)};
  }
  [[nodiscard]] bool has_output(std::int64_t step) const { return step % every_ == 0; }

  /// Relative error (L2) of a head's output when only `blocks` and those outside [first, last) are
  /// read.
  [[nodiscard]] double output_error(std::int64_t step, std::int64_t head,
                                    std::span<const std::int32_t> chosen, std::int64_t first,
                                    std::int64_t last) const {
    const float* parts = parts_.data() + (step / every_ * heads_ + head) * stride_ * dim_;
    const std::span<const float> share = mass(step, head);
    std::vector<double> full(static_cast<std::size_t>(dim_));
    std::vector<double> some(static_cast<std::size_t>(dim_));
    double read = 0;
    const auto add = [&](std::vector<double>& to, std::int64_t b) {
      for (std::int64_t i = 0; i < dim_; ++i) {
        to[static_cast<std::size_t>(i)] += parts[b * dim_ + i];
      }
    };
    for (std::int64_t b = 0; b < blocks(step); ++b) {
      add(full, b);
      if (b >= first && b < last) continue;
      add(some, b);
      read += share[static_cast<std::size_t>(b)];
    }
    for (const std::int32_t b : chosen) {
      add(some, b);
      read += share[static_cast<std::size_t>(b)];
    }
    double difference = 0;
    double norm = 0;
    for (std::size_t i = 0; i < full.size(); ++i) {
      const double off = some[i] / read - full[i];
      difference += off * off;
      norm += full[i] * full[i];
    }
    return std::sqrt(difference / norm);
  }

 private:
  static constexpr std::int64_t tile = 256;  ///< tokens whose scores are summed together

  void attend(std::int32_t layer, std::int32_t kv_head) {
    const auto l = static_cast<std::size_t>(layer);
    const std::int64_t all = c_->tokens;
    const std::int64_t width = (all + tile - 1) / tile * tile;
    const std::int64_t token_floats = dim_ * c_->geometry.kv_heads;
    // Keys channel by channel, so that neighbouring tokens are summed side by side.
    std::vector<float> keys(static_cast<std::size_t>(dim_ * width));
    std::vector<float> values(static_cast<std::size_t>(all * dim_));
    for (std::int64_t t = 0; t < all; ++t) {
      const std::int64_t at = t * token_floats + kv_head * dim_;
      for (std::int64_t i = 0; i < dim_; ++i) {
        const auto from = static_cast<std::size_t>(at + i);
        keys[static_cast<std::size_t>(i * width + t)] =
            pulseinfer::float_from_f16(c_->keys[l][from]);
        values[static_cast<std::size_t>(t * dim_ + i)] =
            pulseinfer::float_from_f16(c_->values[l][from]);
      }
    }
    std::vector<float> weights(static_cast<std::size_t>(width));
    for (std::int64_t s = 0; s < c_->steps; ++s) {
      for (std::int64_t g = 0; g < group_; ++g) {
        const std::int64_t head = kv_head * group_ + g;
        const float* q = c_->queries[l].data() + (s * heads_ + head) * dim_;
        score(keys.data(), width, q, tokens(s), weights.data());
        float* share = mass_.data() + (s * heads_ + head) * stride_;
        normalise(weights.data(), tokens(s), share);
        if (has_output(s)) {
          float* parts = parts_.data() + (s / every_ * heads_ + head) * stride_ * dim_;
          weigh(values.data(), weights.data(), tokens(s), parts);
        }
      }
    }
  }

  void score(const float* keys, std::int64_t width, const float* q, std::int64_t tokens,
             float* out) const {
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim_));
    for (std::int64_t first = 0; first < tokens; first += tile) {
      float* sums = out + first;
      std::fill_n(sums, tile, 0.0f);
      for (std::int64_t i = 0; i < dim_; ++i) {
        const float* row = keys + i * width + first;
        const float factor = q[i] * scale;
        for (std::int64_t t = 0; t < tile; ++t) sums[t] += factor * row[t];
      }
    }
  }

  /// Logits to weights, in place, and their sums over blocks.
  void normalise(float* weights, std::int64_t tokens, float* share) const {
    float most = weights[0];
    for (std::int64_t t = 1; t < tokens; ++t) most = std::max(most, weights[t]);
    double total = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      weights[t] = std::exp(weights[t] - most);
      total += weights[t];
    }
    const auto factor = static_cast<float>(1 / total);
    for (std::int64_t t = 0; t < tokens; ++t) {
      weights[t] *= factor;
      share[t / c_->geometry.block_tokens] += weights[t];
    }
  }

  void weigh(const float* values, const float* weights, std::int64_t tokens, float* parts) const {
    for (std::int64_t t = 0; t < tokens; ++t) {
      float* to = parts + t / c_->geometry.block_tokens * dim_;
      const float* from = values + t * dim_;
      for (std::int64_t i = 0; i < dim_; ++i) to[i] += weights[t] * from[i];
    }
  }

  const demo::capture* c_;
  std::int64_t heads_;
  std::int64_t dim_;
  std::int64_t group_;
  std::int64_t stride_;  ///< blocks of the whole text
  std::int64_t every_;
  std::vector<float> mass_;        ///< [steps, heads, stride]
  std::vector<double> mean_mass_;  ///< [steps, stride]
  std::vector<float> parts_;       ///< [kept steps, heads, stride, dim] of the output
};

}  // namespace fidelity
