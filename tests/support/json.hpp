// SPDX-License-Identifier: Apache-2.0
/// @file
/// A small, strict reader of JSON (RFC 8259) for tests: what a viewer would accept, and nothing
/// else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace test {

/// A value; the members that its kind does not use are empty.
struct json {
  enum class kind { null, boolean, number, text, array, object } what = kind::null;
  bool boolean = false;
  double number = 0;
  std::string text;
  std::vector<json> items;
  std::map<std::string, json> members;

  [[nodiscard]] const json& operator[](const std::string& name) const { return members.at(name); }
  [[nodiscard]] bool has(const std::string& name) const { return members.count(name) != 0; }
};

class json_reader {
 public:
  /// @throws std::runtime_error  naming the byte at which the text stops being JSON
  static json read(std::string_view text) {
    json_reader reader(text);
    json value = reader.value();
    reader.skip_blanks();
    reader.need(reader.at_ == text.size(), "the end");
    return value;
  }

 private:
  explicit json_reader(std::string_view text) : text_(text) {}

  void need(bool holds, const char* what) const {
    if (!holds) {
      throw std::runtime_error("json: expected " + std::string(what) + " at " +
                               std::to_string(at_));
    }
  }
  [[nodiscard]] char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  [[nodiscard]] bool take(std::string_view token) {
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }
  void skip_blanks() {
    while (peek() != '\0' && std::string_view(" \t\r\n").find(peek()) != std::string_view::npos) {
      ++at_;
    }
  }
  [[nodiscard]] bool is_digit() const { return peek() >= '0' && peek() <= '9'; }

  json value() {
    json found;
    skip_blanks();
    if (take("null")) return found;
    if (peek() == 't' || peek() == 'f') {
      found.what = json::kind::boolean;
      found.boolean = take("true");
      need(found.boolean || take("false"), "true or false");
    } else if (peek() == '"') {
      found.what = json::kind::text;
      found.text = string();
    } else if (peek() == '[' || peek() == '{') {
      found = collection();
    } else {
      found.what = json::kind::number;
      found.number = number();
    }
    return found;
  }

  json collection() {
    json found;
    const bool is_object = peek() == '{';
    found.what = is_object ? json::kind::object : json::kind::array;
    const std::string_view close = is_object ? "}" : "]";
    ++at_;
    skip_blanks();
    if (take(close)) return found;
    do {
      skip_blanks();
      if (is_object) {
        need(peek() == '"', "a name");
        const std::string name = string();
        skip_blanks();
        need(take(":"), "a colon");
        need(found.members.emplace(name, value()).second, "another name");
      } else {
        found.items.push_back(value());
      }
      skip_blanks();
    } while (take(","));
    need(take(close), "a comma or the end of the collection");
    return found;
  }

  std::string string() {
    std::string found;
    ++at_;
    while (peek() != '"') {
      need(at_ < text_.size() && static_cast<unsigned char>(peek()) >= 0x20, "a character");
      if (!take("\\")) {
        found += text_[at_++];
        continue;
      }
      const std::size_t simple = std::string_view("\"\\/bfnrt").find(peek());
      if (simple != std::string_view::npos && peek() != '\0') {
        found += "\"\\/\b\f\n\r\t"[simple];
        ++at_;
      } else {
        need(take("u"), "an escape");
        found += escaped_code();
      }
    }
    ++at_;
    return found;
  }
  /// Four hexadecimal digits; only codes of one byte are expected here.
  char escaped_code() {
    int code = 0;
    for (int i = 0; i < 4; ++i, ++at_) {
      const std::size_t digit = std::string_view("0123456789abcdef").find(peek());
      need(peek() != '\0' && digit != std::string_view::npos, "a hexadecimal digit");
      code = 16 * code + static_cast<int>(digit);
    }
    need(code < 0x80, "a code below 0x80");
    return static_cast<char>(code);
  }

  double number() {
    const std::size_t begin = at_;
    (void)take("-");
    if (!take("0")) digits();
    if (take(".")) digits();
    if (take("e") || take("E")) {
      if (!take("-")) (void)take("+");
      digits();
    }
    return std::strtod(std::string(text_.substr(begin, at_ - begin)).c_str(), nullptr);
  }
  void digits() {
    need(is_digit(), "a digit");
    while (is_digit()) ++at_;
  }

  std::string_view text_;
  std::size_t at_ = 0;
};

}  // namespace test
