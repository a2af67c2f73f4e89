// SPDX-License-Identifier: Apache-2.0
/// @file
/// The server of the simulation in examples/simulate: arrivals, and laws of what is served.
#include <doctest/doctest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../examples/simulate/arrivals.hpp"
#include "../examples/simulate/serving.hpp"
#include "pulseinfer/admission.hpp"
#include "pulseinfer/admission_static.hpp"

namespace {

using simulate::arrival;
using simulate::served;
using simulate::setting;
using simulate::workload;

/// Four layers of an 8B model, on a device that holds few requests.
setting little() {
  setting s;
  s.machine = simulate::machines().front();
  s.model = simulate::models().front();
  s.model.layers = 4;
  s.model.vocabulary = 16032;
  s.kv = {0.06, 0.8};
  s.shrink = 8;
  s.budget = 16;
  s.pages = 32;
  const double requests = 4e8;
  s.machine.profile.device_bytes =
      static_cast<std::uint64_t>(setting::reserve_bytes + s.resident_weights() + requests);
  return s;
}
std::vector<arrival> few(double rate) {
  workload w;
  w.requests = 12;
  w.least_prompt = 2048, w.most_prompt = 6144;
  w.least_output = 4, w.most_output = 24;
  return simulate::at_rate(simulate::bursty(w), rate);
}
simulate::serving_options ample() {
  simulate::serving_options o;
  o.most_streams = 16;
  return o;
}
template <class Policy>
served run(Policy policy, const std::vector<arrival>& all) {
  return simulate::server<Policy>(little(), {}, policy, ample()).run(all);
}
std::int64_t tokens_of(const std::vector<arrival>& all) {
  std::int64_t sum = 0;
  for (const arrival& a : all) sum += a.output_tokens;
  return sum;
}

/// A file that is gone again.
struct file {
  std::filesystem::path path = std::filesystem::temp_directory_path() /
                               ("pulseinfer_serving_" + std::to_string(unique()) + ".jsonl");
  explicit file(const std::string& text) { std::ofstream(path) << text; }
  file(const file&) = delete;
  file& operator=(const file&) = delete;
  ~file() {
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
  }
  static std::uint64_t unique() {
    static int here = 0;
    return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(&here)) ^
           static_cast<std::uint64_t>(
               std::filesystem::file_time_type::clock::now().time_since_epoch().count());
  }
};
std::string error_of(const std::string& text) {
  const file f(text);
  try {
    (void)simulate::arrivals_from(f.path.string(), 100);
  } catch (const std::exception& e) {
    return e.what();
  }
  return "";
}
bool names(const std::string& message, const std::string& what) {
  return message.find(what) != std::string::npos;
}

TEST_CASE("serving: steady arrivals have equal gaps, bursts crowd, and both have their rate") {
  workload w;
  w.requests = 4000;
  const auto even = simulate::steady(w);
  CHECK(simulate::rate_of(even) == doctest::Approx(1));
  for (std::size_t i = 1; i < even.size(); ++i) {
    CHECK_MESSAGE(even[i].at_seconds - even[i - 1].at_seconds == doctest::Approx(1), i);
  }
  const auto crowd = simulate::bursty(w);
  CHECK(simulate::rate_of(crowd) == doctest::Approx(1).epsilon(0.15));
  double sum = 0, squares = 0;
  for (std::size_t i = 1; i < crowd.size(); ++i) {
    const double gap = crowd[i].at_seconds - crowd[i - 1].at_seconds;
    CHECK_MESSAGE(gap >= 0, i);
    sum += gap;
    squares += gap * gap;
  }
  const double n = static_cast<double>(crowd.size() - 1);
  // Of a Poisson process alone the gaps' variance is the square of their mean.
  CHECK(squares / n - sum * sum / n / n > 1.2 * sum * sum / n / n);
  for (const arrival& a : crowd) {
    REQUIRE(a.prompt_tokens >= w.least_prompt);
    REQUIRE(a.prompt_tokens <= w.most_prompt);
    REQUIRE(a.output_tokens >= w.least_output);
    REQUIRE(a.output_tokens <= w.most_output);
  }
  CHECK(simulate::rate_of(simulate::at_rate(crowd, 7)) == doctest::Approx(7));
}

TEST_CASE("serving: a seed names its arrivals") {
  workload w;
  CHECK(simulate::bursty(w) == simulate::bursty(w));
  const auto one = simulate::bursty(w);
  w.seed = 2;
  CHECK(one != simulate::bursty(w));
  CHECK_THROWS_AS(simulate::at_rate({{}, {}}, 1), std::invalid_argument);
  CHECK_THROWS_AS(simulate::at_rate(one, 0), std::invalid_argument);
}

TEST_CASE("serving: a trace is read, from its first request on") {
  const file f(
      "{\"timestamp\": 500, \"input_length\": 600, \"output_length\": 3, \"hash_ids\": [0, 1]}\n"
      "\n"
      "{\"output_length\": 1, \"timestamp\": 2500, \"input_length\": 512, \"hash_ids\": [7]}\r\n"
      "{\"timestamp\": 2500, \"input_length\": 9, \"output_length\": 2}\n");
  const auto all = simulate::arrivals_from(f.path.string(), 100);
  CHECK(all == std::vector<arrival>{{0, 600, 3}, {2, 512, 1}, {2, 9, 2}});
  CHECK(simulate::arrivals_from(f.path.string(), 2).size() == 2);
}

TEST_CASE("serving: a bad line of a trace is named") {
  const std::string good = "{\"timestamp\": 5, \"input_length\": 9, \"output_length\": 2}\n";
  CHECK(names(error_of(good + "{\"timestamp\": 5, \"input_length\": 9}\n"),
              ":2: output_length is not there"));
  CHECK(names(error_of(good + good +
                       "{\"timestamp\": 4, \"input_length\": 9, "
                       "\"output_length\": 2}\n"),
              ":3: timestamp goes back"));
  CHECK(names(error_of("{\"timestamp\": 5, \"input_length\": 0, \"output_length\": 2}"),
              ":1: input_length is 0"));
  CHECK(names(error_of("{\"timestamp\": 5, \"input_length\": 1.5, \"output_length\": 2}"),
              ":1: input_length is 1.5"));
  CHECK(names(error_of("{\"timestamp\": x"), ":1: expected a number before 'x'"));
  CHECK(names(error_of("[]"), ":1: expected { before '[]'"));
  CHECK(names(error_of("{\"timestamp"), ":1: a name has no end"));
  CHECK(names(error_of(good + "{\"timestamp\": 5, \"input_length\": 513, \"output_length\": 2, "
                              "\"hash_ids\": [3]}"),
              ":2: hash_ids has 1 entries"));
  CHECK(names(error_of("{\"timestamp\": 5, \"input_length\": 9, \"output_length\": 2} 7"),
              ":1: something stands behind"));
  CHECK(names(error_of("\n\n"), "there is no request"));
  CHECK_THROWS_AS(simulate::arrivals_from("/nonexistent/trace", 1), std::runtime_error);
}

TEST_CASE("serving: every request is served to its end, whatever the policy") {
  const auto all = few(200);
  const auto check = [&](const served& s) {
    CHECK(s.requests == 12);
    CHECK(s.tokens == tokens_of(all));
    CHECK(s.hbm_bytes <= 4e8);
    CHECK(s.seconds > 0);
  };
  for (const double share : {0.0, 0.5, 1.0}) {
    CAPTURE(share);
    const served s = run(pulseinfer::static_ratio_admission(4, share), all);
    check(s);
    // What is away was stored, and nothing else but blocks that filled meanwhile.
    double prompts = 0;
    for (const arrival& a : all) {
      const std::int32_t blocks = (a.prompt_tokens + a.output_tokens - 1) / 16 + 1;
      prompts += blocks * 65536.0 * 4;
    }
    CHECK(s.stored_bytes == doctest::Approx(share * prompts).epsilon(0.02));
    CHECK((s.recalled_bytes > 0) == (share > 0));
  }
  check(run(pulseinfer::adaptive_admission(4), all));
}

TEST_CASE("serving: where all fits the adaptive policy leaves all of it in HBM") {
  const auto all = few(5);
  const served s = run(pulseinfer::adaptive_admission(4), all);
  const served none = run(pulseinfer::static_ratio_admission(4, 0), all);
  CHECK(s.stored_bytes == 0);
  CHECK(s.recalled_bytes == 0);
  CHECK(s.end_ns == none.end_ns);
}

TEST_CASE("serving: next turns are stored but for what is new") {
  workload w;
  w.requests = 200;
  const auto all = simulate::next_turns(w);
  CHECK(all == simulate::next_turns(w));
  for (const arrival& a : all) {
    REQUIRE(a.prompt_tokens >= w.least_turn);
    REQUIRE(a.prompt_tokens <= w.most_turn);
    REQUIRE(a.prompt_tokens - a.stored_tokens >= w.least_new);
    REQUIRE(a.prompt_tokens - a.stored_tokens <= w.most_new);
  }
}

TEST_CASE("serving: what is stored is loaded, and not stored again; or recomputed") {
  auto all = few(200);
  for (std::size_t i = 0; i < all.size(); i += 2) all[i].stored_tokens = 1600 + 7;
  const double loads = 6 * 100 * 65536.0 * 4;  // whole blocks, of four layers
  const auto check = [&](const served& s) {
    CHECK(s.requests == 12);
    CHECK(s.tokens == tokens_of(all));
    CHECK(s.hbm_bytes <= 4e8);
    CHECK(s.admitted_whole + s.admitted_placed + s.recomputed == 12);
  };
  const served kept = run(pulseinfer::static_ratio_admission(4, 0), all);
  check(kept);
  CHECK(kept.admitted_whole == 12);
  CHECK(kept.loaded_bytes == loads);
  CHECK(kept.stored_bytes == 0);
  CHECK(kept.recalled_bytes == 0);  // a load is no recall

  const served away = run(pulseinfer::static_ratio_admission(4, 1), all);
  check(away);
  CHECK(away.admitted_placed == 12);
  CHECK(away.loaded_bytes == loads);
  CHECK(away.stored_bytes + loads ==
        doctest::Approx(run(pulseinfer::static_ratio_admission(4, 1), few(200)).stored_bytes)
            .epsilon(0.02));

  // On a device that computes a prefill in no time nothing is worth loading, once a link is known.
  simulate::serving_options fast = ample();
  fast.flops = 1e19;
  const served again = simulate::server<pulseinfer::adaptive_admission>(
                           little(), {}, pulseinfer::adaptive_admission(4), fast)
                           .run(all);
  check(again);
  CHECK(again.recomputed > 0);
  CHECK(again.loaded_bytes + static_cast<double>(again.recomputed) * (loads / 6) ==
        doctest::Approx(loads));
  CHECK(again.recomputed_tokens == again.recomputed * 1600);
}

TEST_CASE("serving: the same arrivals, the same result") {
  const auto all = few(200);
  const served a = run(pulseinfer::adaptive_admission(4), all);
  const served b = run(pulseinfer::adaptive_admission(4), all);
  CHECK(a.end_ns == b.end_ns);
  CHECK(a.p99_stall_seconds == b.p99_stall_seconds);
  CHECK(a.stored_bytes == b.stored_bytes);
  CHECK(a.deferred == b.deferred);
}

TEST_CASE("serving: a request that no machine holds is an error, not a wait") {
  const std::vector<arrival> all = {{0, 1 << 20, 4}};
  CHECK_THROWS_AS(run(pulseinfer::static_ratio_admission(4, 0), all), std::logic_error);
  CHECK(run(pulseinfer::static_ratio_admission(4, 0), {}).requests == 0);
}

}  // namespace
