// SPDX-License-Identifier: Apache-2.0
/// @file
/// Files of `key = value` lines: what a machine or a model of your own is read from.
#pragma once

#include <cmath>
#include <cstddef>
#include <fstream>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace simulate {

/// A key, and what takes its value.
struct file_key {
  std::string_view name;
  double least = 0;
  double most = 1e18;
  bool is_whole = false;  ///< no fractions
  std::function<void(double)> take;
  std::function<void(std::string)> take_text = {};  ///< instead, of a key whose value is a text
  bool must_be_there = false;
};

/// A number of a record under its name; a whole one where the record has it so.
template <class Number>
file_key number_key(std::string_view name, Number& to, double least = 0, double most = 1e18) {
  return {name, least, most, std::is_integral_v<Number>,
          [&to](double value) { to = static_cast<Number>(value); }};
}
/// The same of a key without which a file is no record.
template <class Number>
file_key needed_key(std::string_view name, Number& to, double least, double most) {
  file_key key = number_key(name, to, least, most);
  key.must_be_there = true;
  return key;
}
/// A text of a record under its name.
inline file_key text_key(std::string_view name, std::string& to) {
  return {name, 0, 0, false, {}, [&to](std::string value) { to = std::move(value); }};
}

/// Reads a file. Blank lines and those that begin with # say nothing; a key that is not there
/// leaves its record as it is. Of a key that is there twice the last line counts.
/// @throws std::runtime_error     when the file cannot be read
/// @throws std::invalid_argument  naming file and line of what is not understood, or a needed key
///                                that no line has; the record may then be half read
inline void read_keys(const std::string& path, const std::vector<file_key>& keys) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::vector<bool> is_there(keys.size());
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    std::istringstream words(line);
    std::string name, equals;
    if (!(words >> name) || name[0] == '#') continue;
    const auto bad = [&](const std::string& why) {
      return std::invalid_argument(path + ":" + std::to_string(number) + ": " + why + ": " + line);
    };
    if (!(words >> equals) || equals != "=") throw bad("expected key = value");
    const file_key* key = nullptr;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      if (keys[i].name != name) continue;
      key = &keys[i];
      is_there[i] = true;
    }
    if (key == nullptr) throw bad("there is no such key");
    if (key->take_text) {
      std::string text;
      std::getline(words >> std::ws, text);
      key->take_text(std::move(text));
      continue;
    }
    double value = 0;
    std::string rest;
    if (!(words >> value) || words >> rest) throw bad("expected one number");
    if (key->is_whole && std::floor(value) != value) throw bad("expected a whole number");
    if (!(value >= key->least) || value > key->most) {
      std::ostringstream range;
      range << "expected " << key->least << " to " << key->most;
      throw bad(range.str());
    }
    key->take(value);
  }
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].must_be_there && !is_there[i]) {
      throw std::invalid_argument(path + ": no line gives " + std::string(keys[i].name));
    }
  }
}

}  // namespace simulate
