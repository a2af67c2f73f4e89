// SPDX-License-Identifier: Apache-2.0
/// @file
/// Reads a safetensors file: an 8-byte length, a JSON header that names tensors, and their bytes.
/// Everything that a damaged file could get wrong is checked before a tensor is handed out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace demo {

struct tensor {
  std::string type;  ///< "F16", "F32", "I32", ...
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;
};

/// A file, its tensors and its metadata. Tensors point into it.
class safetensors {
 public:
  /// @throws std::runtime_error  naming the file and what is wrong with it
  explicit safetensors(std::string path) : path_(std::move(path)) {
    std::ifstream file(path_, std::ios::binary | std::ios::ate);
    if (!file) fail("cannot be opened");
    const std::streamoff size = file.tellg();
    if (size < 8) fail("has " + std::to_string(size) + " bytes, too few for a header");
    data_.resize(static_cast<std::size_t>(size));
    file.seekg(0);
    file.read(reinterpret_cast<char*>(data_.data()), size);
    if (!file) fail("cannot be read");
    std::uint64_t header = 0;
    std::memcpy(&header, data_.data(), sizeof header);
    if (header > data_.size() - 8) {
      fail("names a header of " + std::to_string(header) + " bytes, the file has " +
           std::to_string(data_.size()));
    }
    text_ = {reinterpret_cast<const char*>(data_.data()) + 8, static_cast<std::size_t>(header)};
    body_ = std::span<const std::byte>(data_).subspan(8 + static_cast<std::size_t>(header));
    read_header();
  }
  safetensors(const safetensors&) = delete;
  safetensors& operator=(const safetensors&) = delete;

  [[nodiscard]] bool contains(const std::string& name) const { return tensors_.count(name) > 0; }
  /// A tensor of the given type and number of dimensions.
  [[nodiscard]] const tensor& at(const std::string& name, const std::string& type,
                                 std::size_t dimensions) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) fail("has no tensor " + name);
    if (found->second.type != type || found->second.shape.size() != dimensions) {
      fail("tensor " + name + " is " + found->second.type + " with " +
           std::to_string(found->second.shape.size()) + " dimensions, expected " + type + " with " +
           std::to_string(dimensions));
    }
    return found->second;
  }
  [[nodiscard]] const std::string& metadata(const std::string& key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) fail("has no metadata " + key);
    return found->second;
  }
  /// A whole number among the metadata.
  [[nodiscard]] std::int64_t number(const std::string& key) const {
    const std::string& text = metadata(key);
    if (text.empty() || text.size() > 15 ||
        text.find_first_not_of("0123456789") != std::string::npos) {
      fail("metadata " + key + " is '" + text + "', expected a whole number");
    }
    return std::stoll(text);
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("capture " + path_ + ": " + what);
  }

 private:
  // The header is a JSON object of objects; this reads just that much of JSON.
  void skip_space() {
    while (at_ < text_.size() &&
           (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t' || text_[at_] == '\r')) {
      ++at_;
    }
  }
  [[nodiscard]] bool accept(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void require(char c) {
    if (!accept(c)) {
      fail("header is not as expected at byte " + std::to_string(at_) + ": no '" +
           std::string(1, c) + "'");
    }
  }
  [[nodiscard]] std::string read_string() {
    require('"');
    std::string out;
    while (at_ < text_.size() && text_[at_] != '"') {
      if (text_[at_] == '\\' && at_ + 1 < text_.size()) {
        const char escaped = text_[++at_];
        out += escaped == 'n' ? '\n' : escaped == 't' ? '\t' : escaped;
      } else {
        out += text_[at_];
      }
      ++at_;
    }
    require('"');
    return out;
  }
  [[nodiscard]] std::vector<std::int64_t> read_numbers() {
    std::vector<std::int64_t> out;
    require('[');
    if (accept(']')) return out;
    do {
      skip_space();
      std::int64_t value = 0;
      std::size_t digits = 0;
      for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9' && digits < 16;
           ++at_, ++digits) {
        value = value * 10 + (text_[at_] - '0');
      }
      if (digits == 0) fail("header has no number at byte " + std::to_string(at_));
      out.push_back(value);
    } while (accept(','));
    require(']');
    return out;
  }
  void read_header() {
    require('{');
    if (accept('}')) return;
    do {
      const std::string name = read_string();
      require(':');
      if (name == "__metadata__") {
        read_metadata();
      } else {
        tensors_[name] = read_tensor(name);
      }
    } while (accept(','));
    require('}');
  }
  void read_metadata() {
    require('{');
    if (accept('}')) return;
    do {
      const std::string key = read_string();
      require(':');
      metadata_[key] = read_string();
    } while (accept(','));
    require('}');
  }
  [[nodiscard]] tensor read_tensor(const std::string& name) {
    tensor t;
    std::vector<std::int64_t> range;
    require('{');
    do {
      const std::string key = read_string();
      require(':');
      if (key == "dtype") {
        t.type = read_string();
      } else if (key == "shape") {
        t.shape = read_numbers();
      } else if (key == "data_offsets") {
        range = read_numbers();
      } else {
        fail("tensor " + name + " has an unknown key " + key);
      }
    } while (accept(','));
    require('}');
    const auto end = static_cast<std::int64_t>(body_.size());
    if (range.size() != 2 || range[0] > range[1] || range[1] > end) {
      fail("tensor " + name + " lies outside the file's " + std::to_string(end) + " bytes");
    }
    std::int64_t bytes = t.type == "F32" || t.type == "I32" ? 4 : t.type == "F16" ? 2 : 0;
    for (const std::int64_t extent : t.shape) {
      if (extent != 0 && bytes > end / extent) fail("tensor " + name + " is larger than the file");
      bytes *= extent;
    }
    if (bytes != range[1] - range[0]) {
      fail("tensor " + name + " (" + t.type + ") has " + std::to_string(range[1] - range[0]) +
           " bytes, its shape needs " + std::to_string(bytes));
    }
    t.bytes = body_.subspan(static_cast<std::size_t>(range[0]), static_cast<std::size_t>(bytes));
    return t;
  }

  std::string path_;
  std::vector<std::byte> data_;
  std::string_view text_;
  std::span<const std::byte> body_;
  std::size_t at_ = 0;
  std::map<std::string, tensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace demo
