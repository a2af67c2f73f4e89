// SPDX-License-Identifier: Apache-2.0
/// @file
/// What the error types are, and how their texts are made.
#include "pulseinfer/error.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace costly {

/// A part of a message that notices when it is turned into text.
struct part {
  int* uses;
};
void append(std::string& text, const part& p) {
  ++*p.uses;
  text += "costly";
}

}  // namespace costly

using pulseinfer::device_error;
using pulseinfer::out_of_memory;
using pulseinfer::detail::expects;
using pulseinfer::detail::text_of;

// Whoever catches logic errors to report a bug does not swallow a failed device, nor the reverse.
static_assert(std::is_base_of_v<std::runtime_error, device_error>);
static_assert(!std::is_base_of_v<std::logic_error, device_error>);
static_assert(std::is_base_of_v<std::bad_alloc, out_of_memory>);
static_assert(!std::is_base_of_v<device_error, out_of_memory>);

TEST_CASE("error: a text joins words and numbers of every kind") {
  CHECK(text_of() == "");
  CHECK(text_of("pages is ", -1, ", expected ", std::string("1 to "), std::string_view("9")) ==
        "pages is -1, expected 1 to 9");
  CHECK(text_of(std::int64_t{-9'223'372'036'854'775'807}) == "-9223372036854775807");
  CHECK(text_of(~std::uint64_t{0}) == "18446744073709551615");
  CHECK(text_of(0.5) == "0.500000");
}

TEST_CASE("error: expects throws the type asked for, with the whole text") {
  CHECK_THROWS_WITH_AS(expects(false, "k is ", 3), "k is 3", std::invalid_argument);
  CHECK_THROWS_WITH_AS(expects<std::out_of_range>(false, "k is ", 3), "k is 3", std::out_of_range);
  CHECK_THROWS_WITH_AS(expects<device_error>(false, "call ", 700), "call 700", device_error);
}

TEST_CASE("error: a precondition that holds makes no text") {
  int uses = 0;
  CHECK_NOTHROW(expects(true, "this is ", costly::part{&uses}));
  CHECK(uses == 0);
  CHECK_THROWS_WITH(expects(false, "this is ", costly::part{&uses}), "this is costly");
  CHECK(uses == 1);
}

TEST_CASE("error: out_of_memory keeps its text, also in a copy") {
  const out_of_memory original("no 5 bytes of pinned memory");
  const out_of_memory copy = original;  // NOLINT(performance-*): the copy is what is tested
  CHECK(std::string(copy.what()) == "no 5 bytes of pinned memory");
  CHECK_THROWS_WITH_AS(throw out_of_memory("no 5 bytes"), "no 5 bytes", std::bad_alloc);
}
