// SPDX-License-Identifier: Apache-2.0
/// @file
/// A timeline is JSON that a viewer reads, with the times and names that were put in.
#include "pulseinfer/trace.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "support/json.hpp"

namespace {

using test::json;
using test::json_reader;

/// The events of a kind: "M" names a track, "X" is a span.
std::vector<json> events_of(const pulseinfer::trace& timeline, const std::string& kind) {
  const json whole = json_reader::read(timeline.json());
  std::vector<json> found;
  for (const json& event : whole["traceEvents"].items) {
    if (event["ph"].text == kind) found.push_back(event);
  }
  return found;
}

}  // namespace

TEST_CASE("trace: the reader of these tests refuses what is no JSON") {
  for (const char* text :
       {"", "{", "[1,]", "{\"a\":1,}", "[1 2]", "{\"a\" 1}", "\"a", "\"\n\"", "\"\\x\"", "01", "1.",
        "-", "[1]]", "{\"a\":1,\"a\":2}", "tru", "\"\\u00g0\"", "nul"}) {
    CAPTURE(text);
    CHECK_THROWS_AS((void)json_reader::read(text), std::runtime_error);
  }
  CHECK(json_reader::read(" [1, -2.5e1, {\"a\": \"\\u0009\"}, []] ").items[1].number == -25);
}

TEST_CASE("trace: an empty timeline is valid") {
  const pulseinfer::trace timeline;
  CHECK(timeline.size() == 0);
  CHECK(json_reader::read(timeline.json())["traceEvents"].items.empty());
}

TEST_CASE("trace: spans keep names, tracks and values") {
  pulseinfer::trace timeline;
  timeline.add("copy", "chunk", 1'000, 3'500, "bytes", -42);
  timeline.add("compute", "attention", 2'000, 2'001);
  timeline.add("copy", "chunk", 4'000, 5'000);
  CHECK(timeline.size() == 3);

  const std::vector<json> tracks = events_of(timeline, "M");
  REQUIRE(tracks.size() == 2);
  CHECK(tracks[0]["name"].text == "thread_name");
  CHECK(tracks[0]["args"]["name"].text == "copy");
  CHECK(tracks[1]["args"]["name"].text == "compute");
  CHECK(tracks[0]["tid"].number != tracks[1]["tid"].number);

  const std::vector<json> spans = events_of(timeline, "X");
  REQUIRE(spans.size() == 3);
  CHECK(spans[0]["name"].text == "chunk");
  CHECK(spans[0]["tid"].number == tracks[0]["tid"].number);
  CHECK(spans[0]["args"]["bytes"].number == -42);
  CHECK(spans[1]["name"].text == "attention");
  CHECK(spans[1]["tid"].number == tracks[1]["tid"].number);
  CHECK(!spans[1].has("args"));
  CHECK(spans[2]["tid"].number == tracks[0]["tid"].number);
  for (const json& span : spans) CHECK(span["pid"].number == tracks[0]["pid"].number);
}

TEST_CASE("trace: times are microseconds from the earliest span, wherever it was added") {
  pulseinfer::trace timeline;
  constexpr std::uint64_t base = 1'700'000'000'000'000'000;  // nanoseconds that no double holds
  timeline.add("a", "late", base + 2'003, base + 12'003);
  timeline.add("b", "early", base, base + 1);
  timeline.add("a", "middle", base + 1'050, base + 1'050);
  const std::vector<json> spans = events_of(timeline, "X");
  REQUIRE(spans.size() == 3);
  CHECK(spans[0]["ts"].number == doctest::Approx(2.003).epsilon(1e-12));
  CHECK(spans[0]["dur"].number == doctest::Approx(10.0).epsilon(1e-12));
  CHECK(spans[1]["ts"].number == 0);
  CHECK(spans[1]["dur"].number == doctest::Approx(0.001).epsilon(1e-12));
  CHECK(spans[2]["ts"].number == doctest::Approx(1.05).epsilon(1e-12));
  CHECK(spans[2]["dur"].number == 0);
}

TEST_CASE("trace: a span that ends before it begins has no length") {
  pulseinfer::trace timeline;
  timeline.add("a", "reversed", 5'000, 1'000);
  timeline.add("a", "whole", 0, std::numeric_limits<std::uint64_t>::max());
  const std::vector<json> spans = events_of(timeline, "X");
  REQUIRE(spans.size() == 2);
  CHECK(spans[0]["ts"].number == 5);
  CHECK(spans[0]["dur"].number == 0);
  CHECK(spans[1]["dur"].number == doctest::Approx(18'446'744'073'709'551.615));
}

TEST_CASE("trace: any byte may stand in a name") {
  std::string name;
  for (int c = 1; c < 0x80; ++c) name += static_cast<char>(c);
  name += '\0';
  name += "end \xc3\xa9 \xe2\x82\xac";  // UTF-8 stays what it is
  pulseinfer::trace timeline;
  timeline.add(name, name, 0, 1, name, 5);
  CHECK(events_of(timeline, "M")[0]["args"]["name"].text == name);
  const json span = events_of(timeline, "X")[0];
  CHECK(span["name"].text == name);
  CHECK(span["args"][name].number == 5);
}

TEST_CASE("trace: values are whole numbers to the last digit") {
  pulseinfer::trace timeline;
  timeline.add("a", "s", 0, 1, "v", std::numeric_limits<std::int64_t>::min());
  CHECK(timeline.json().find("{\"v\":-9223372036854775808}") != std::string::npos);
}

TEST_CASE("trace: a file holds the same text, and one that cannot be written is named") {
  pulseinfer::trace timeline;
  timeline.add("a", "s", 0, 1);
  const std::string path =
      "trace_test_" + std::to_string(std::hash<std::thread::id>{}(std::this_thread::get_id())) +
      ".json";
  timeline.write(path);
  std::ifstream file(path, std::ios::binary);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  file.close();
  std::remove(path.c_str());
  CHECK(text == timeline.json());
  CHECK_THROWS_WITH_AS(timeline.write("no/such/folder/trace.json"),
                       "trace: cannot write no/such/folder/trace.json", std::runtime_error);
  if (std::ifstream("/dev/full").good()) {  // opens, and then has no room
    CHECK_THROWS_AS(timeline.write("/dev/full"), std::runtime_error);
  }
}

TEST_CASE("trace: threads add spans at once") {
  pulseinfer::trace timeline;
  constexpr int each = 200;
  const auto add = [&timeline](const char* track) {
    for (std::uint64_t i = 0; i < each; ++i) timeline.add(track, "s", i, i + 1);
  };
  std::thread other([&] { add("other"); });
  add("this");
  other.join();
  CHECK(timeline.size() == 2 * each);
  const std::vector<json> spans = events_of(timeline, "X");
  const double first = spans[0]["tid"].number;
  CHECK(std::count_if(spans.begin(), spans.end(),
                      [&](const json& s) { return s["tid"].number == first; }) == each);
}
