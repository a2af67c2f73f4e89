// SPDX-License-Identifier: Apache-2.0
/// @file
/// How the library says no.
///
/// - A broken precondition throws a `std::logic_error` type (`std::invalid_argument` unless stated)
///   whose text names the value and the limit. Nothing has changed when it is thrown.
/// - A failure of a device or of its runtime throws `device_error`; the CUDA backend's `cuda_error`
///   is one.
/// - Memory that cannot be had throws `out_of_memory`, which is a `std::bad_alloc`.
/// - Expected outcomes (a miss, a full store, a refusal) are return values: `std::optional` or a
///   `[[nodiscard]]` enum.
#pragma once

#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A device, a driver or a runtime refused or failed a call.
class device_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Memory of one kind could not be had; the text names the bytes asked for and what there is.
class out_of_memory : public std::bad_alloc {
 public:
  explicit out_of_memory(std::string what) : what_(std::move(what)) {}
  [[nodiscard]] const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

namespace detail {

inline void append(std::string& text, std::string_view part) {
  text += part;
}

template <class Number>
requires std::is_arithmetic_v<Number>
void append(std::string& text, Number value) {
  text += std::to_string(value);
}

template <class... Parts>
[[nodiscard]] std::string text_of(const Parts&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

/// Throws unless the precondition holds. The parts of the message (texts and numbers) are joined
/// only then.
template <class Error = std::invalid_argument, class... Parts>
void expects(bool holds, const Parts&... parts) {
  if (!holds) throw Error(text_of(parts...));
}

}  // namespace detail
}  // namespace pulseinfer
