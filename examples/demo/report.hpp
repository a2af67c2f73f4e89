// SPDX-License-Identifier: Apache-2.0
/// @file
/// A report: one flat JSON object, key -> number, text or null, with targets in a sibling object.
#pragma once

#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/trace.hpp"

namespace demo {

class report {
 public:
  void text(const std::string& key, const std::string& value) {
    entries_.emplace_back(key, pulseinfer::detail::json_quoted(value));
  }
  void number(const std::string& key, double value) {
    char digits[40];
    std::snprintf(digits, sizeof digits, "%.10g", value);
    entries_.emplace_back(key, std::isfinite(value) ? digits : "null");
  }
  void number(const std::string& key, std::optional<double> value) {
    number(key, value.value_or(std::nan("")));
  }
  void target(const std::string& key, const std::string& value) {
    targets_.emplace_back(key, pulseinfer::detail::json_quoted(value));
  }

  [[nodiscard]] std::string json() const {
    std::string out = "{\n";
    for (const auto& [key, value] : entries_) out += "  \"" + key + "\": " + value + ",\n";
    out += "  \"targets\": {";
    for (std::size_t i = 0; i < targets_.size(); ++i) {
      out += (i == 0 ? "\n" : ",\n") + ("    \"" + targets_[i].first + "\": ") + targets_[i].second;
    }
    return out + (targets_.empty() ? "}\n}\n" : "\n  }\n}\n");
  }
  /// @throws std::runtime_error  naming the file that cannot be written
  void write(const std::filesystem::path& path) const {
    std::ofstream file(path, std::ios::binary);
    file << json();
    if (!file.flush()) throw std::runtime_error("report: cannot write " + path.string());
  }

 private:
  std::vector<std::pair<std::string, std::string>> entries_;
  std::vector<std::pair<std::string, std::string>> targets_;
};

}  // namespace demo
