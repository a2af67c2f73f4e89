// SPDX-License-Identifier: Apache-2.0
/// @file
/// Models as shapes, and the bytes that follow from them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "key_values.hpp"

namespace simulate {

inline constexpr std::int32_t block_tokens = 16;

/// A decoder with gated MLPs and grouped queries; two bytes an element.
struct model {
  std::string name;
  std::int32_t layers = 0;
  std::int32_t hidden = 0;
  std::int32_t heads = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t ffn = 0;
  std::int32_t vocabulary = 0;
  std::string source = {};  ///< of the shape

  /// The shape in words.
  [[nodiscard]] std::string text() const {
    const auto of = [](std::int32_t number, const char* what) {
      return std::to_string(number) + " " + what;
    };
    return of(layers, "layers, ") + of(heads, "query heads, ") + of(kv_heads, "KV heads of ") +
           of(head_dim, "channels, hidden ") + of(hidden, "wide, MLP ") + of(ffn, "wide, ") +
           of(vocabulary, "tokens");
  }

  static constexpr double element = 2;

  /// Read for each batch: queries, keys, values, output, and the three matrices of the MLP.
  [[nodiscard]] double layer_bytes() const {
    const double h = hidden;
    return element * (2 * h * heads * head_dim + 2 * h * kv_heads * head_dim + 3 * h * ffn + 2 * h);
  }
  /// Read once a step: from the last hidden state to logits.
  [[nodiscard]] double head_bytes() const { return element * hidden * double(vocabulary); }
  /// All that is resident: layers, head, and the table of embeddings, of which a step reads rows.
  [[nodiscard]] double weight_bytes() const { return layers * layer_bytes() + 2 * head_bytes(); }
  /// Keys and values of one token, one layer.
  [[nodiscard]] double token_bytes() const { return 2 * element * kv_heads * head_dim; }
  [[nodiscard]] double kv_bytes(double tokens) const { return layers * token_bytes() * tokens; }
  [[nodiscard]] double unit_bytes() const { return block_tokens * token_bytes(); }
};

/// The models that come with the simulation.
inline std::vector<model> models() {
  return {{"llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256, "its config.json"},
          {"llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256, "its config.json"},
          {"qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064, "its config.json"}};
}

/// A model from a file of `key = value` lines: the members of `model` by name, all numbers.
/// @throws as read_keys
inline model model_from(const std::string& path) {
  model m;
  m.name = path;
  m.source = "the file " + path;
  const double most = 1 << 20;
  read_keys(path,
            {text_key("name", m.name), text_key("source", m.source),
             needed_key("layers", m.layers, 1, most), needed_key("hidden", m.hidden, 1, most),
             needed_key("heads", m.heads, 1, most), needed_key("kv_heads", m.kv_heads, 1, most),
             needed_key("head_dim", m.head_dim, 1, most), needed_key("ffn", m.ffn, 1, most),
             needed_key("vocabulary", m.vocabulary, 1, most)});
  return m;
}

}  // namespace simulate
