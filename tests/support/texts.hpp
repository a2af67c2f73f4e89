// SPDX-License-Identifier: Apache-2.0
/// @file
/// What an error says.
#pragma once

#include <string>

namespace test {

[[nodiscard]] inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// The text of the error that a call throws; empty if it throws none.
template <class Error, class Call>
[[nodiscard]] std::string what_of(Call call) {
  try {
    call();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace test
