// SPDX-License-Identifier: Apache-2.0
/// @file
/// Models as shapes, and the bytes that follow from them.
#pragma once

#include <cstdint>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

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

/// Shapes as their configuration files have them.
inline std::vector<model> models() {
  return {{"llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256},
          {"llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256},
          {"qwen2.5-72b", 80, 8192, 64, 8, 128, 29568, 152064}};
}

/// Reads `key = value` lines: the members of `model` by name, all of them.
/// @throws std::runtime_error     when the file cannot be read
/// @throws std::invalid_argument  naming what is not understood or not there
inline model model_from(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("model: cannot read " + path);
  model m;
  m.name = path;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key, equals;
    if (!(words >> key) || key[0] == '#') continue;
    const auto bad = [&] { return std::invalid_argument(path + ": not understood: " + line); };
    if (!(words >> equals) || equals != "=") throw bad();
    if (key == "name") {
      std::getline(words >> std::ws, m.name);
      continue;
    }
    std::int32_t value = 0;
    if (!(words >> value) || value < 1 || value > 1 << 20) throw bad();
    if (key == "layers")
      m.layers = value;
    else if (key == "hidden")
      m.hidden = value;
    else if (key == "heads")
      m.heads = value;
    else if (key == "kv_heads")
      m.kv_heads = value;
    else if (key == "head_dim")
      m.head_dim = value;
    else if (key == "ffn")
      m.ffn = value;
    else if (key == "vocabulary")
      m.vocabulary = value;
    else
      throw bad();
  }
  for (const std::int32_t value :
       {m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.ffn, m.vocabulary}) {
    if (value < 1) throw std::invalid_argument(path + ": a member of the model is not there");
  }
  return m;
}

}  // namespace simulate
