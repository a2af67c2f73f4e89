// SPDX-License-Identifier: Apache-2.0
/// @file
/// Lines of named fields, written and read alike in every locale.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// The shortest text that reads back to the same bits.
template <class Number>
[[nodiscard]] std::string number_text(Number value) {
  char digits[32];
  return {digits, std::to_chars(digits, digits + sizeof digits, value).ptr};
}

/// Appends " name number"; no blank begins a line.
template <class Number>
void append_field(std::string& text, std::string_view name, Number value) {
  if (!text.empty() && text.back() != '\n') text += ' ';
  text += name;
  text += ' ';
  text += number_text(value);
}

/// Takes a text apart, line by line, field by field. Blank lines and those that begin with # are
/// passed over. What is not as asked for throws `std::invalid_argument` naming line and field.
class field_reader {
 public:
  /// @param what  the kind of text, for the messages
  field_reader(std::string_view what, std::string_view text)
      : what_(what), text_(text), ends_(!text.empty() && text.back() == '\n') {}

  /// Goes to the next line that says something; false at the end.
  [[nodiscard]] bool next_line() {
    while (!text_.empty()) {
      const std::size_t end = std::min(text_.find('\n'), text_.size());
      line_ = text_.substr(0, end);
      text_.remove_prefix(std::min(end + 1, text_.size()));
      ++number_;
      skip_blanks();
      if (!line_.empty() && line_.front() != '#') return true;
    }
    line_ = {};
    return false;
  }
  /// Takes the next word.
  [[nodiscard]] std::string_view word(std::string_view field) {
    const std::string_view found = take();
    if (found.empty()) fail(field, " is missing");
    return found;
  }
  /// Takes a word that is known.
  void name(std::string_view field) {
    const std::string_view found = word(field);
    if (found != field) fail("\"", found, "\" stands where ", field, " is expected");
  }
  /// Takes a field: its name, then a number.
  template <class Number>
  [[nodiscard]] Number number(std::string_view field) {
    name(field);
    const std::string_view digits = word(field);
    Number value{};
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc{} || end != digits.data() + digits.size()) {
      fail(field, " is \"", digits, "\", expected a number");
    }
    return value;
  }
  void end_of_line() {
    if (!line_.empty()) fail("\"", take(), "\" stands behind the last field");
  }
  /// The first line: whose text it is, of which version, and how many of `things` follow.
  /// @param again  what to do about another version
  [[nodiscard]] std::int64_t first_line(std::int64_t version, std::string_view again,
                                        std::string_view things) {
    if (!next_line()) fail("the text is empty");
    name("pulseinfer");
    const auto found = number<std::int64_t>(what_);
    if (found != version) {
      fail("the text is of version ", found, ", expected ", version, ": ", again, " anew");
    }
    const auto count = number<std::int64_t>(things);
    if (count < 0) fail(things, " is ", count, ", expected at least 0");
    end_of_line();
    return count;
  }
  /// There is nothing behind the last of them, and it is whole: cut within its last number it would
  /// look well.
  void end(std::int64_t count, std::string_view things) {
    if (next_line()) fail("there is text behind the last of ", count, " ", things);
    expects(ends_, what_, ": the last line does not end, the text was cut off");
  }
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    throw std::invalid_argument(text_of(what_, ": line ", number_, ": ", parts...));
  }

 private:
  void skip_blanks() {
    line_.remove_prefix(std::min(line_.find_first_not_of(" \t\r"), line_.size()));
  }
  std::string_view take() {
    const std::string_view found = line_.substr(0, line_.find_first_of(" \t\r"));
    line_.remove_prefix(found.size());
    skip_blanks();
    return found;
  }

  std::string_view what_;
  std::string_view text_;
  std::string_view line_;
  bool ends_;
  std::int64_t number_ = 0;
};

}  // namespace pulseinfer::detail
