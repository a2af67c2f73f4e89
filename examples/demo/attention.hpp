// SPDX-License-Identifier: Apache-2.0
/// @file
/// The engine's own attention over pages, as an engine would write it against the library's tables;
/// and full attention on the host, which it is measured against.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "capture.hpp"
#include "pulseinfer/pulseinfer.hpp"

namespace demo {

/// Of tokens that are not there. (numeric_limits cannot be asked on a device.)
inline constexpr float lowest_logit = -__builtin_huge_valf();

/// Kernel body: entry `i` of the list of pages that row `row` attends to: sinks, chosen blocks,
/// recent window and the block being filled, in this order.
struct list_pages {
  pulseinfer::block_table table;
  const std::int32_t* requests;
  const std::int32_t* tokens;
  const std::int32_t* chosen_pages;  ///< [rows, k], -1 where there is none
  std::int32_t k;
  std::int32_t sinks;
  std::int32_t window;
  std::int32_t block_tokens;
  std::int32_t* pages;    ///< [rows, sinks + k + window + 1]
  std::int32_t* lengths;  ///< tokens to read of each page, 0 where there is none

  PULSEINFER_HD void operator()(std::int64_t row, std::int64_t i) const {
    const std::int64_t full = tokens[row] / block_tokens;
    const std::int64_t recent = full - window > sinks ? full - window : sinks;
    std::int64_t page = -1;
    std::int32_t length = block_tokens;
    if (i < sinks) {
      page = i < full ? table.page(requests[row], i) : -1;
    } else if (i < sinks + k) {
      page = chosen_pages[row * k + (i - sinks)];
    } else {
      const std::int64_t block = recent + (i - sinks - k);
      if (block == full) length = tokens[row] % block_tokens;
      page = block <= full && length > 0 ? table.page(requests[row], block) : -1;
    }
    const std::int64_t at = row * (sinks + k + window + 1) + i;
    pages[at] = static_cast<std::int32_t>(page);
    lengths[at] = page < 0 ? 0 : length;
  }
};

/// What the three attention kernels share.
struct attention_view {
  pulseinfer::plane_reader keys;
  pulseinfer::plane_reader values;
  const std::int32_t* pages;
  const std::int32_t* lengths;
  std::int64_t width;  ///< pages a row
  std::int32_t block_tokens;
  std::int32_t query_heads;
  std::int32_t heads_per_kv;
  std::int32_t head_dim;
  const float* queries;  ///< [rows, query_heads, head_dim]
  float* weights;        ///< [rows * query_heads, width * block_tokens]
  float* output;         ///< [rows * query_heads, head_dim]
};

/// Kernel body: the logit of one token for one (row, query head).
struct attention_logits {
  attention_view v;
  PULSEINFER_HD void operator()(std::int64_t list, std::int64_t i) const {
    const std::int64_t row = list / v.query_heads;
    const std::int64_t head = list % v.query_heads;
    const std::int64_t entry = row * v.width + i / v.block_tokens;
    const std::int64_t token = i % v.block_tokens;
    float logit = lowest_logit;
    if (token < v.lengths[entry]) {
      logit = 0.0f;
      for (std::int32_t c = 0; c < v.head_dim; ++c) {
        logit += v.queries[list * v.head_dim + c] *
                 v.keys(v.pages[entry], token, head / v.heads_per_kv, c);
      }
      logit *= 1.0f / sqrtf(static_cast<float>(v.head_dim));
    }
    v.weights[list * v.width * v.block_tokens + i] = logit;
  }
};

/// Row kernel: softmax over one (row, query head). One lane adds, so that the order is fixed.
struct attention_softmax {
  attention_view v;
  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t list, Group group) const {
    if (group.rank() != 0) return;
    float* weights = v.weights + list * v.width * v.block_tokens;
    const std::int64_t n = v.width * v.block_tokens;
    float most = lowest_logit;
    for (std::int64_t i = 0; i < n; ++i) most = weights[i] > most ? weights[i] : most;
    float total = 0.0f;
    for (std::int64_t i = 0; i < n; ++i) {
      weights[i] = expf(weights[i] - most);
      total += weights[i];
    }
    for (std::int64_t i = 0; i < n; ++i) weights[i] /= total;
  }
};

/// Kernel body: one channel of the output of one (row, query head).
struct attention_output {
  attention_view v;
  PULSEINFER_HD void operator()(std::int64_t list, std::int64_t channel) const {
    const std::int64_t row = list / v.query_heads;
    const std::int64_t head = list % v.query_heads;
    const float* weights = v.weights + list * v.width * v.block_tokens;
    float total = 0.0f;
    for (std::int64_t e = 0; e < v.width; ++e) {
      const std::int64_t entry = row * v.width + e;
      for (std::int32_t t = 0; t < v.lengths[entry]; ++t) {
        total += weights[e * v.block_tokens + t] *
                 v.values(v.pages[entry], t, head / v.heads_per_kv, channel);
      }
    }
    v.output[list * v.head_dim + channel] = total;
  }
};

/// Full attention of one step of one layer: what the sparse one is compared with.
struct full_attention {
  std::vector<std::vector<double>> block_mass;  ///< [query_heads][blocks] share of the softmax
  std::vector<double> output;                   ///< [query_heads, head_dim]
};

inline full_attention attend_fully(const capture& c, std::int32_t layer, std::int64_t step) {
  const auto l = static_cast<std::size_t>(layer);
  const std::int64_t tokens = c.prompt_tokens + step + 1;
  const std::int64_t dim = c.geometry.head_dim;
  const std::int64_t stride = dim * c.geometry.kv_heads;
  const std::int32_t heads_per_kv = c.query_heads / c.geometry.kv_heads;
  const auto blocks = static_cast<std::size_t>(c.geometry.blocks_of(tokens));
  full_attention out;
  out.block_mass.assign(static_cast<std::size_t>(c.query_heads), std::vector<double>(blocks));
  out.output.assign(static_cast<std::size_t>(c.query_heads * dim), 0.0);
  std::vector<double> weights(static_cast<std::size_t>(tokens));
  for (std::int32_t h = 0; h < c.query_heads; ++h) {
    const float* q = c.queries[l].data() + (step * c.query_heads + h) * dim;
    const std::int64_t head_at = h / heads_per_kv * dim;
    double most = -std::numeric_limits<double>::infinity();
    for (std::int64_t t = 0; t < tokens; ++t) {
      const std::uint16_t* k = c.keys[l].data() + t * stride + head_at;
      float dot = 0.0f;
      for (std::int64_t i = 0; i < dim; ++i) dot += q[i] * pulseinfer::float_from_f16(k[i]);
      weights[static_cast<std::size_t>(t)] = dot / std::sqrt(static_cast<double>(dim));
      most = std::max(most, weights[static_cast<std::size_t>(t)]);
    }
    double total = 0.0;
    for (double& w : weights) total += w = std::exp(w - most);
    double* output = out.output.data() + h * dim;
    for (std::int64_t t = 0; t < tokens; ++t) {
      const double w = weights[static_cast<std::size_t>(t)] / total;
      out.block_mass[static_cast<std::size_t>(h)]
                    [static_cast<std::size_t>(t / c.geometry.block_tokens)] += w;
      const std::uint16_t* v = c.values[l].data() + t * stride + head_at;
      for (std::int64_t i = 0; i < dim; ++i) output[i] += w * pulseinfer::float_from_f16(v[i]);
    }
  }
  return out;
}

}  // namespace demo
