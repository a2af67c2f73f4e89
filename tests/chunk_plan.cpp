// SPDX-License-Identifier: Apache-2.0
/// @file
/// Plans of recalls: shares to units, what is refused, and the text that keeps them.
#include "pulseinfer/chunk_plan.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace {

using pulseinfer::chunk_plan;
using pulseinfer::chunk_plans;

chunk_plans plans_of(const std::vector<chunk_plan>& all) {
  chunk_plans plans;
  for (const chunk_plan& p : all) plans.add(p);
  return plans;
}

/// The sizes of all chunks of a recall, of which the head has gone.
std::vector<std::size_t> cut(const chunk_plan& plan, std::size_t all) {
  std::vector<std::size_t> sizes;
  for (std::size_t next = plan.head_of(all); next < all; next += sizes.back()) {
    const std::size_t units = plan.chunk_of(static_cast<std::int64_t>(sizes.size()), all);
    sizes.push_back(std::min(units, all - next));
  }
  return sizes;
}

const std::string good_text =
    "pulseinfer chunk_plans 1 plans 2\n"
    "max_units 8 head 0.25 parts 16 chunk 0.5 chunk 0.25 chunk 0 chunk 0 chunk 0 chunk 0\n"
    "max_units 64 head 0 parts 4 chunk 1 chunk 0 chunk 0 chunk 0 chunk 0 chunk 0\n";

std::string replaced(std::string text, std::string_view what, std::string_view by) {
  const std::size_t at = text.find(what);
  REQUIRE(at != std::string::npos);
  return text.replace(at, what.size(), by);
}

void text_is_refused(const std::string& text, const char* why) {
  CAPTURE(text);
  CHECK_THROWS_WITH_AS((void)chunk_plans::from_text(text), why, std::invalid_argument);
}

}  // namespace

TEST_CASE("chunk_plan: shares are rounded to units, a chunk has one at least") {
  const chunk_plan p{.max_units = 100, .head = 0.25, .chunks = {0.125, 0.5}};
  CHECK(p.head_of(0) == 0);
  CHECK(p.head_of(1) == 0);
  CHECK(p.head_of(2) == 1);  // half a unit is one
  CHECK(p.head_of(5) == 1);
  CHECK(p.head_of(6) == 2);
  CHECK(p.head_of(100) == 25);
  CHECK(p.chunk_of(0, 0) == 1);
  CHECK(p.chunk_of(0, 1) == 1);
  CHECK(p.chunk_of(0, 12) == 2);
  CHECK(p.chunk_of(0, 11) == 1);
  CHECK(p.chunk_of(1, 11) == 6);
  CHECK(cut(p, 40) == std::vector<std::size_t>{5, 20, 5});
}

TEST_CASE("chunk_plan: behind those with a share chunks go on as the last one") {
  const chunk_plan two{.max_units = 100, .chunks = {0.1, 0.2}};
  for (const std::int64_t chunk : {std::int64_t{1}, std::int64_t{2}, std::int64_t{5},
                                   std::int64_t{6}, std::int64_t{1} << 40}) {
    CHECK(two.chunk_of(chunk, 100) == 20);
  }
  CHECK(two.chunk_of(0, 100) == 10);
  const chunk_plan six{.max_units = 100, .chunks = {0.1, 0.11, 0.12, 0.13, 0.14, 0.15}};
  for (std::int64_t chunk = 0; chunk < 6; ++chunk) {
    CHECK(six.chunk_of(chunk, 100) == static_cast<std::size_t>(10 + chunk));
  }
  CHECK(six.chunk_of(6, 100) == 15);
  CHECK(six.chunk_of(1000, 100) == 15);
  CHECK(cut({.max_units = 100, .head = 0.1, .chunks = {0.3}}, 100) ==
        std::vector<std::size_t>{30, 30, 30});
  CHECK(cut({.max_units = 100, .chunks = {1e-9}}, 3) == std::vector<std::size_t>{1, 1, 1});
  CHECK(cut({.max_units = 100, .head = 1, .chunks = {1}}, 3).empty());
}

TEST_CASE("chunk_plans: what is out of range is refused by its name, and nothing changes") {
  const chunk_plan good{.max_units = 8, .head = 0.25, .chunks = {0.5, 0.25}};
  chunk_plans plans = plans_of({good});
  const chunk_plans before = plans;
  const auto refuses = [&](const chunk_plan& p, const char* why) {
    CHECK_THROWS_WITH_AS(plans.add(p), why, std::invalid_argument);
    CHECK(plans == before);
  };
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const auto with_head = [](double head) {
    return chunk_plan{.max_units = 9, .head = head, .chunks = {1}};
  };
  const auto with_parts = [](std::int32_t parts) {
    return chunk_plan{.max_units = 9, .chunks = {1}, .parts = parts};
  };
  const auto with_chunks = [](const std::array<double, chunk_plan::most_chunks>& chunks) {
    return chunk_plan{.max_units = 9, .chunks = chunks};
  };
  refuses({.max_units = 0, .chunks = {1}}, "chunk_plan: max_units is 0, expected at least 1");
  refuses({.max_units = -3, .chunks = {1}}, "chunk_plan: max_units is -3, expected at least 1");
  refuses(with_head(nan), "chunk_plan: head is nan, expected 0 to 1");
  refuses(with_head(-0.1), "chunk_plan: head is -0.1, expected 0 to 1");
  refuses(with_head(1.1), "chunk_plan: head is 1.1, expected 0 to 1");
  refuses(with_parts(0), "chunk_plan: parts is 0, expected 1 to 1024");
  refuses(with_parts(1025), "chunk_plan: parts is 1025, expected 1 to 1024");
  refuses(with_chunks({nan}), "chunk_plan: chunk 0 has a share of nan, expected 0 to 1");
  refuses(with_chunks({0.5, -0.1}), "chunk_plan: chunk 1 has a share of -0.1, expected 0 to 1");
  refuses(with_chunks({0.5, 0.5, 1.1}), "chunk_plan: chunk 2 has a share of 1.1, expected 0 to 1");
  refuses(with_chunks({}), "chunk_plan: chunk 0 has no share");
  refuses(with_chunks({0, 0.5}), "chunk_plan: chunk 0 has no share");
  refuses(with_chunks({0.5, 0, 0.5}), "chunk_plan: chunk 2 has a share, the one before has none");
  refuses(with_chunks({0.5, 0.1, 0, 0, 0, 1}),
          "chunk_plan: chunk 5 has a share, the one before has none");
  for (const std::int64_t units : {8, 7}) {
    chunk_plan p = good;
    p.max_units = units;
    CHECK_THROWS_WITH_AS(plans.add(p), doctest::Contains("expected more than the one before has"),
                         std::invalid_argument);
    CHECK(plans == before);
  }
  refuses({.max_units = 7, .chunks = {1}},
          "chunk_plans: max_units is 7, expected more than the one before has, which is 8");
  // The limits themselves are well.
  plans.add({.max_units = 9, .head = 1, .chunks = {1, 1, 1, 1, 1, 1}, .parts = 1024});
  plans.add({.max_units = 10, .head = 0, .chunks = {1e-300}, .parts = 1});
  CHECK(plans.all().size() == 3);
}

TEST_CASE("chunk_plans: a recall's plan is the first that is for as many units") {
  const chunk_plans none;
  CHECK(none.find(0) == nullptr);
  CHECK(none.find(1) == nullptr);
  CHECK(none.all().empty());
  const chunk_plans plans = plans_of({{.max_units = 8, .chunks = {1}},
                                      {.max_units = 9, .chunks = {0.5}},
                                      {.max_units = 64, .chunks = {0.25}}});
  const auto size_of = [&](std::size_t units) {
    const chunk_plan* const found = plans.find(units);
    return found == nullptr ? 0 : found->max_units;
  };
  CHECK(size_of(0) == 8);
  CHECK(size_of(1) == 8);
  CHECK(size_of(8) == 8);
  CHECK(size_of(9) == 9);
  CHECK(size_of(10) == 64);
  CHECK(size_of(64) == 64);
  CHECK(size_of(65) == 0);
  CHECK(size_of(std::numeric_limits<std::size_t>::max()) == 0);
}

TEST_CASE("chunk_plans: text brings them back to the bit") {
  CHECK(chunk_plans::from_text(chunk_plans{}.to_text()) == chunk_plans{});
  const chunk_plans plans = plans_of(
      {{.max_units = 1, .head = 1.0 / 3, .chunks = {0.1, 2.0 / 3}, .parts = 1},
       {.max_units = 77, .head = 5e-324, .chunks = {1e-17, std::nextafter(1.0, 0.0)}, .parts = 7},
       {.max_units = std::numeric_limits<std::int64_t>::max(),
        .head = 1,
        .chunks = {0.1, 0.2, 0.3, 0.4, 0.5, 0.6},
        .parts = 1024}});
  CHECK(chunk_plans::from_text(plans.to_text()) == plans);

  const chunk_plans good = plans_of({{.max_units = 8, .head = 0.25, .chunks = {0.5, 0.25}},
                                     {.max_units = 64, .chunks = {1}, .parts = 4}});
  CHECK(good.to_text() == good_text);
  CHECK(chunk_plans::from_text(good_text) == good);
  CHECK(chunk_plans::from_text("# found on Monday\n\n" + replaced(good_text, "2\n", "2\r\n \n#\n") +
                               "  \n# the end\n") == good);
}

TEST_CASE("chunk_plans: a text that is not whole is refused, with line and field") {
  text_is_refused("", "chunk_plans: line 0: the text is empty");
  text_is_refused("\n# nothing\n", "chunk_plans: line 2: the text is empty");
  text_is_refused("pulse chunk_plans 1 plans 0\n",
                  "chunk_plans: line 1: \"pulse\" stands where pulseinfer is expected");
  text_is_refused("pulseinfer transfer_costs 1\n",
                  "chunk_plans: line 1: \"transfer_costs\" stands where chunk_plans is expected");
  text_is_refused(replaced(good_text, "chunk_plans 1", "chunk_plans 2"),
                  "chunk_plans: line 1: the text is of version 2, expected 1: tune anew");
  text_is_refused(replaced(good_text, "plans 2", "plans -1"),
                  "chunk_plans: line 1: plans is -1, expected at least 0");
  text_is_refused(replaced(good_text, "plans 2", "plans 2 more"),
                  "chunk_plans: line 1: \"more\" stands behind the last field");
  text_is_refused(replaced(good_text, "plans 2", "plans 3"),
                  "chunk_plans: line 3: the text ends before plan 3 of 3");
  text_is_refused(replaced(good_text, "plans 2", "plans 1"),
                  "chunk_plans: line 3: there is text behind the last of 1 plans");
  text_is_refused(replaced(good_text, "parts 16", "parts many"),
                  "chunk_plans: line 2: parts is \"many\", expected a number");
  text_is_refused(replaced(good_text, "parts 16", "parts 16.5"),
                  "chunk_plans: line 2: parts is \"16.5\", expected a number");
  text_is_refused(replaced(good_text, "head 0.25 ", ""),
                  "chunk_plans: line 2: \"parts\" stands where head is expected");
  text_is_refused(replaced(good_text, "chunk 0.25 ", ""), "chunk_plans: line 2: chunk is missing");
  text_is_refused(replaced(good_text, "chunk 0\n", "chunk 0 chunk 0\n"),
                  "chunk_plans: line 2: \"chunk\" stands behind the last field");
  // A plan that is none is named with its line.
  text_is_refused(replaced(good_text, "max_units 64", "max_units 8"),
                  "chunk_plans: line 3: chunk_plans: max_units is 8, expected more than the one "
                  "before has, which is 8");
  text_is_refused(replaced(good_text, "head 0.25", "head nan"),
                  "chunk_plans: line 2: chunk_plan: head is nan, expected 0 to 1");
  text_is_refused(good_text.substr(0, good_text.size() - 1),
                  "chunk_plans: the last line does not end, the text was cut off");
  // Wherever it is cut off, that is seen.
  for (std::size_t length = 0; length < good_text.size(); ++length) {
    CAPTURE(length);
    CHECK_THROWS_AS((void)chunk_plans::from_text(good_text.substr(0, length)),
                    std::invalid_argument);
  }
}
