// SPDX-License-Identifier: Apache-2.0
/// @file
/// Requests as they come: steadily, in bursts that a seed names, or as a trace has them.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "pulseinfer/detail/random.hpp"

namespace simulate {

struct arrival {
  double at_seconds = 0;
  std::int32_t prompt_tokens = 0;
  std::int32_t output_tokens = 0;
  std::int32_t stored_tokens = 0;  ///< of the prompt, from its beginning, that the store has
  friend bool operator==(const arrival&, const arrival&) = default;
};

/// Requests of a made-up workload: lengths are drawn evenly from a range, times go by the kind.
struct workload {
  std::int32_t requests = 80;
  std::uint64_t seed = 1;
  std::int32_t least_prompt = 8192, most_prompt = 24576;
  std::int32_t least_output = 128, most_output = 384;
  // Of bursts: as long as so many requests on average, so many times as dense as the mean, and so
  // large a share of the time.
  double burst_requests = 24;
  double burst_density = 3;
  double burst_share = 0.2;
  // Of next turns: prompts are as long, by the logarithm evenly, and so much of them is new.
  std::int32_t least_turn = 512, most_turn = 32768;
  std::int32_t least_new = 32, most_new = 256;
};

namespace detail {

/// In (0, 1), the same on every machine.
inline double draw(pulseinfer::detail::random_source& random) {
  return (static_cast<double>(random.next() >> 11) + 0.5) * 0x1p-53;
}
inline arrival lengths(const workload& w, pulseinfer::detail::random_source& random) {
  const auto between = [&](std::int32_t least, std::int32_t most) {
    return least +
           static_cast<std::int32_t>(random.below(static_cast<std::uint64_t>(most - least) + 1));
  };
  arrival a;
  a.prompt_tokens = between(w.least_prompt, w.most_prompt);
  a.output_tokens = between(w.least_output, w.most_output);
  return a;
}

}  // namespace detail

/// Equal gaps, one request a second.
inline std::vector<arrival> steady(const workload& w) {
  pulseinfer::detail::random_source random(w.seed);
  std::vector<arrival> all;
  for (std::int32_t i = 0; i < w.requests; ++i) {
    all.push_back(detail::lengths(w, random));
    all.back().at_seconds = i;
  }
  return all;
}

/// A Poisson process that changes between calm and burst, both of them as long as a Poisson process
/// has it; one request a second on the average of many.
inline std::vector<arrival> bursty(const workload& w) {
  pulseinfer::detail::random_source random(w.seed);
  const auto exponential = [&](double mean) { return -mean * std::log(detail::draw(random)); };
  const double calm_density = (1 - w.burst_density * w.burst_share) / (1 - w.burst_share);
  const double burst_seconds = w.burst_requests / w.burst_density;
  const double calm_seconds = burst_seconds * (1 - w.burst_share) / w.burst_share;
  bool is_burst = false;
  double now = 0, until = exponential(calm_seconds);
  std::vector<arrival> all;
  while (all.size() < static_cast<std::size_t>(w.requests)) {
    const double next = now + exponential(1 / (is_burst ? w.burst_density : calm_density));
    if (next >= until) {  // the gap forgets where it began
      now = until;
      is_burst = !is_burst;
      until = now + exponential(is_burst ? burst_seconds : calm_seconds);
      continue;
    }
    now = next;
    all.push_back(detail::lengths(w, random));
    all.back().at_seconds = now;
  }
  return all;
}

/// Bursts of the next turns of conversations: their prompts are stored but for what is new.
inline std::vector<arrival> next_turns(const workload& w) {
  std::vector<arrival> all = bursty(w);
  pulseinfer::detail::random_source random(w.seed);
  for (arrival& a : all) {
    const double growth = static_cast<double>(w.most_turn) / w.least_turn;
    a.prompt_tokens =
        static_cast<std::int32_t>(w.least_turn * std::pow(growth, detail::draw(random)));
    a.stored_tokens = a.prompt_tokens - w.least_new -
                      static_cast<std::int32_t>(
                          random.below(static_cast<std::uint64_t>(w.most_new - w.least_new) + 1));
  }
  return all;
}

namespace detail {

/// One line of a trace: an object of numbers, and arrays of numbers.
class trace_line {
 public:
  trace_line(const std::string& path, std::size_t number, std::string_view text)
      : where_(path + ":" + std::to_string(number)), text_(text) {}

  [[nodiscard]] arrival parse() {
    double at = nan, prompt = nan, output = nan;
    std::size_t ids = none;
    expect('{');
    do {
      const std::string key = quoted();
      expect(':');
      if (key == "hash_ids") {
        ids = array();
        continue;
      }
      const double value = number();
      if (key == "timestamp") at = value;
      if (key == "input_length") prompt = value;
      if (key == "output_length") output = value;
    } while (take(','));
    expect('}');
    if (!at_end()) fail("something stands behind the object");
    check("timestamp", at, 0, 1e15);
    check("input_length", prompt, 1, 1 << 24);
    check("output_length", output, 1, 1 << 24);
    // Names of 512 tokens each, the last of fewer.
    if (ids != none && static_cast<double>(ids) != std::ceil(prompt / 512)) {
      fail("hash_ids has " + std::to_string(ids) + " entries, input_length is " +
           std::to_string(static_cast<std::int64_t>(prompt)));
    }
    return {at / 1000, static_cast<std::int32_t>(prompt), static_cast<std::int32_t>(output)};
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw std::invalid_argument("arrivals: " + where_ + ": " + what);
  }

 private:
  static constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  void check(const char* key, double value, double least, double most) const {
    if (std::isnan(value)) fail(std::string(key) + " is not there");
    if (value < least || value > most || (least > 0 && value != std::floor(value))) {
      fail(std::string(key) + " is " + std::to_string(value));
    }
  }
  void skip() {
    while (!text_.empty() && (text_[0] == ' ' || text_[0] == '\t' || text_[0] == '\r')) {
      text_.remove_prefix(1);
    }
  }
  [[nodiscard]] bool at_end() {
    skip();
    return text_.empty();
  }
  [[nodiscard]] bool take(char c) {
    skip();
    if (text_.empty() || text_[0] != c) return false;
    text_.remove_prefix(1);
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(std::string("expected ") + c + " before '" + std::string(rest()) + "'");
  }
  [[nodiscard]] std::string_view rest() const { return text_.substr(0, 24); }
  [[nodiscard]] std::string quoted() {
    expect('"');
    const std::size_t end = text_.find('"');
    if (end == std::string_view::npos) fail("a name has no end");
    std::string name(text_.substr(0, end));
    text_.remove_prefix(end + 1);
    return name;
  }
  [[nodiscard]] double number() {
    skip();
    double value = 0;
    const auto [end, error] = std::from_chars(text_.data(), text_.data() + text_.size(), value);
    if (error != std::errc{}) fail("expected a number before '" + std::string(rest()) + "'");
    text_.remove_prefix(static_cast<std::size_t>(end - text_.data()));
    return value;
  }
  [[nodiscard]] std::size_t array() {
    expect('[');
    if (take(']')) return 0;
    std::size_t count = 0;
    do {
      (void)number();
      ++count;
    } while (take(','));
    expect(']');
    return count;
  }

  std::string where_;
  std::string_view text_;
};

}  // namespace detail

/// The first requests of a trace of JSON lines, as Mooncake's are: `timestamp` in ms, `input_length`
/// and `output_length` in tokens, `hash_ids` of 512 tokens each, which are counted and not used.
/// The first one comes at 0.
/// @throws std::runtime_error     where the file cannot be read, or has no request
/// @throws std::invalid_argument  naming the line that is not understood, or goes back in time
inline std::vector<arrival> arrivals_from(const std::string& path, std::size_t most) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("arrivals: cannot read " + path);
  std::vector<arrival> all;
  std::size_t number = 0;
  for (std::string text; all.size() < most && std::getline(file, text);) {
    ++number;
    if (text.find_first_not_of(" \t\r") == std::string::npos) continue;
    detail::trace_line line(path, number, text);
    const arrival a = line.parse();
    if (!all.empty() && a.at_seconds < all.back().at_seconds) line.fail("timestamp goes back");
    all.push_back(a);
  }
  if (all.empty()) throw std::runtime_error("arrivals: there is no request in " + path);
  const double first = all.front().at_seconds;
  for (arrival& a : all) a.at_seconds -= first;
  return all;
}

/// Requests a second, from the first to the last.
inline double rate_of(const std::vector<arrival>& all) {
  if (all.size() < 2) return 0;
  const double seconds = all.back().at_seconds - all.front().at_seconds;
  return seconds > 0 ? static_cast<double>(all.size() - 1) / seconds : 0;
}

/// The same requests in the same pattern, so many a second.
/// @throws std::invalid_argument  where all of them come at once
inline std::vector<arrival> at_rate(std::vector<arrival> all, double rate) {
  const double now = rate_of(all);
  if (!(now > 0) || !(rate > 0)) {
    throw std::invalid_argument("arrivals: requests that come at once have no rate");
  }
  for (arrival& a : all) a.at_seconds *= now / rate;
  return all;
}

}  // namespace simulate
