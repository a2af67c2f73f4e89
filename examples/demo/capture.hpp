// SPDX-License-Identifier: Apache-2.0
/// @file
/// The capture of a real model that the demo decodes: see examples/data/PROVENANCE.md.
#pragma once

#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "pulseinfer/pulseinfer.hpp"
#include "safetensors.hpp"

namespace demo {

/// Keys, values and queries of some layers of a model over one text.
struct capture {
  std::string model;
  pulseinfer::kv_geometry geometry;  ///< its layers are the captured ones
  std::int32_t query_heads = 0;
  std::int64_t tokens = 0;         ///< positions with keys and values
  std::int64_t prompt_tokens = 0;  ///< the query of step i is that of position prompt_tokens + i
  std::int64_t steps = 0;
  std::vector<std::vector<std::uint16_t>> keys;    ///< [layers][tokens, kv_heads, head_dim], FP16
  std::vector<std::vector<std::uint16_t>> values;  ///< the same
  std::vector<std::vector<float>> queries;         ///< [layers][steps, query_heads, head_dim]
  std::vector<std::vector<float>> predicted;       ///< the same as the layer before could foretell
                                                   ///< them; empty where the file has none
};

/// @throws std::runtime_error  naming the file and what is missing or damaged
inline capture load_capture(const std::string& path) {
  const safetensors file(path);
  capture c;
  c.model = file.metadata("model");
  c.tokens = file.at("token_ids", "I32", 1).shape[0];
  c.prompt_tokens = file.number("prompt_tokens");
  c.steps = file.number("steps");
  c.query_heads = static_cast<std::int32_t>(file.number("heads"));
  std::vector<std::string> layers;
  std::istringstream names(file.metadata("layers"));
  for (std::string name; std::getline(names, name, ',');) layers.push_back(name);
  c.geometry = {.layers = static_cast<std::int32_t>(layers.size()),
                .kv_heads = static_cast<std::int32_t>(file.number("kv_heads")),
                .head_dim = static_cast<std::int32_t>(file.number("head_dim")),
                .block_tokens = 16,
                .element = pulseinfer::element_type::f16};
  (void)pulseinfer::checked(c.geometry);
  if (c.steps < 1 || c.prompt_tokens < 1 || c.prompt_tokens + c.steps > c.tokens) {
    file.fail("has " + std::to_string(c.tokens) + " tokens, too few for a prompt of " +
              std::to_string(c.prompt_tokens) + " and " + std::to_string(c.steps) + " steps");
  }
  const auto copy = [&](const std::string& name, const char* type, auto& to,
                        const std::vector<std::int64_t>& shape) {
    const tensor& t = file.at(name, type, 3);
    if (t.shape != shape) file.fail("tensor " + name + " has another shape than the metadata say");
    to.emplace_back(t.bytes.size() / sizeof(to[0][0]));
    std::memcpy(to.back().data(), t.bytes.data(), t.bytes.size());
  };
  for (const std::string& layer : layers) {
    const std::int64_t heads = c.geometry.kv_heads;
    const std::int64_t dim = c.geometry.head_dim;
    copy("layer." + layer + ".k", "F16", c.keys, {c.tokens, heads, dim});
    copy("layer." + layer + ".v", "F16", c.values, {c.tokens, heads, dim});
    copy("layer." + layer + ".q", "F32", c.queries, {c.steps, c.query_heads, dim});
    if (file.contains("layer." + layer + ".p")) {
      copy("layer." + layer + ".p", "F32", c.predicted, {c.steps, c.query_heads, dim});
    } else {
      c.predicted.emplace_back();
    }
  }
  return c;
}

}  // namespace demo
