// SPDX-License-Identifier: Apache-2.0
/// @file
/// The demo from its command line to its reports, for any backend.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "capture.hpp"
#include "decode.hpp"
#include "report.hpp"

namespace demo {

struct command_line {
  std::string backend = "host";
  std::filesystem::path capture =
      PULSEINFER_SOURCE_DIR "/examples/data/smollm2-135m-gpl3.safetensors";
  std::filesystem::path out = "build/demo";
  decode_options decode;
};

inline constexpr const char* usage =
    "usage: demo [--backend host|simulated] [--capture FILE] [--out FOLDER]\n"
    "            [--requests N] [--steps N] [--budget BLOCKS] [--hot-pages N]\n"
    "            [--digest mean|min_max]\n"
    "The CUDA backend is a program of its own, demo_cuda; run.sh demo --backend cuda starts it.\n";

/// @throws std::invalid_argument  naming the argument that is wrong
inline command_line parse(int argc, char** argv) {
  command_line line;
  for (int i = 1; i < argc; ++i) {
    const std::string_view key = argv[i];
    if (i + 1 >= argc) throw std::invalid_argument("demo: " + std::string(key) + " has no value");
    const std::string value = argv[++i];
    const auto number = [&] {
      if (value.empty() || value.size() > 9 ||
          value.find_first_not_of("0123456789") != std::string::npos) {
        throw std::invalid_argument("demo: " + std::string(key) + " is '" + value +
                                    "', expected a whole number");
      }
      return static_cast<std::int32_t>(std::stol(value));
    };
    const auto positive = [&] {
      const std::int32_t n = number();
      if (n == 0)
        throw std::invalid_argument("demo: " + std::string(key) + " is 0, expected 1 or more");
      return n;
    };
    if (key == "--backend") {
      line.backend = value;
    } else if (key == "--capture") {
      line.capture = value;
    } else if (key == "--out") {
      line.out = value;
    } else if (key == "--requests") {
      line.decode.requests = positive();
    } else if (key == "--steps") {
      line.decode.steps = positive();
    } else if (key == "--budget") {
      line.decode.budget_blocks = number();
    } else if (key == "--hot-pages") {
      line.decode.hot_pages = positive();
    } else if (key == "--digest" && (value == "mean" || value == "min_max")) {
      line.decode.digest =
          value == "mean" ? pulseinfer::digest_kind::mean : pulseinfer::digest_kind::min_max;
    } else {
      throw std::invalid_argument("demo: unknown argument " + std::string(key) + " " + value +
                                  "\n" + usage);
    }
  }
  return line;
}

/// Decodes the capture on a backend, prints the table and writes both files.
///
/// @param speedup  measures staged against per-block recall on this kind of machine; empty where
///                 there is no time to measure
template <class Backend>
void run(Backend backend, const command_line& line,
         const std::function<std::optional<double>(const pulseinfer::kv_geometry&)>& speedup) {
  const capture c = load_capture(line.capture.string());
  std::filesystem::create_directories(line.out);
  std::fprintf(stderr, "%s: %lld tokens, %d layers captured, %lld steps; backend %s\n",
               c.model.c_str(), static_cast<long long>(c.tokens), c.geometry.layers,
               static_cast<long long>(c.steps), line.backend.c_str());
  pulseinfer::trace timeline;
  const decode_result r = decoder<Backend>(backend, c, line.decode, timeline).run();
  std::fprintf(stderr, "  staged against per-block recall ...\n");
  const std::optional<double> ratio = speedup(c.geometry);

  const auto share = [](double part, double whole) { return whole > 0 ? part / whole : 0.0; };
  const double samples = static_cast<double>(r.mass_samples);
  const double reduction =
      1 - share(static_cast<double>(r.chosen_units), static_cast<double>(r.union_units));
  const double hit_rate =
      1 - share(static_cast<double>(r.missed_units), static_cast<double>(r.chosen_units));
  const double recalled = share(static_cast<double>(r.missed_units * c.geometry.unit_bytes()),
                                static_cast<double>(r.steps));
  report out;
  out.text("model", c.model);
  out.text("backend", line.backend);
  out.text("digest", line.decode.digest == pulseinfer::digest_kind::mean ? "mean" : "min_max");
  out.number("tokens", static_cast<double>(c.tokens));
  out.number("steps", static_cast<double>(r.steps));
  out.number("requests", static_cast<double>(r.requests));
  out.number("layers", c.geometry.layers);
  out.number("budget_blocks", line.decode.budget_blocks);
  out.number("pool_blocks", static_cast<double>(r.pool_blocks));
  out.number("context_blocks", static_cast<double>(r.context_blocks));
  out.number("bytes_verified", static_cast<double>(r.bytes_verified));
  out.number("bytes_wrong", static_cast<double>(r.bytes_wrong));
  out.number("resident_bytes_verified", static_cast<double>(r.resident_bytes_verified));
  out.number("attention_mass_consensus", r.mass_consensus / samples);
  out.number("attention_mass_per_head", r.mass_per_head / samples);
  out.number("attention_mass_always_in", r.mass_always_in / samples);
  out.number("recall_reduction_vs_union", reduction);
  out.number("output_relative_error", r.output_error / static_cast<double>(r.output_samples));
  out.number("hot_buffer_hit_rate", hit_rate);
  out.number("recalled_bytes_per_step", recalled);
  out.number("staged_vs_per_block_speedup", ratio);
  char hash[20];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(r.selection_hash));
  out.text("selection_hash", hash);
  out.target("bytes_wrong", "0");
  out.target("bytes_verified", "> 0");
  out.target("tokens", ">= 4096");
  out.target("steps", ">= 64");
  out.target("staged_vs_per_block_speedup", "> 1");
  out.write(line.out / "report.json");
  timeline.write((line.out / "trace.json").string());

  const auto row = [](const char* what, const std::string& value) {
    std::printf("  %-58s %s\n", what, value.c_str());
  };
  const auto percent = [](double part) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f %%", 100 * part);
    return std::string(text);
  };
  const auto count = [](double n) {
    char text[32];
    std::snprintf(text, sizeof text, "%.4g", n);
    return std::string(text);
  };
  const auto whole = [](std::int64_t n) { return std::to_string(n); };
  std::printf("\nSparse decode over an offloaded KV cache: %s\n", c.model.c_str());
  row("steps decoded, requests, captured layers",
      whole(r.steps) + ", " + whole(r.requests) + ", " + whole(c.geometry.layers));
  row("context in blocks of 16 tokens, all requests", whole(r.context_blocks));
  row("pages in the pool", whole(r.pool_blocks));
  row("blocks chosen a step and layer, beside sinks and window", whole(line.decode.budget_blocks));
  row("recalled bytes compared with the capture; wrong",
      whole(r.bytes_verified) + "; " + whole(r.bytes_wrong));
  row("chosen units that were in the hot buffer", percent(hit_rate));
  row("KiB recalled for a token", count(recalled / 1024));
  row("attention mass read: one list for all heads", percent(r.mass_consensus / samples));
  row("attention mass read: every head its own list", percent(r.mass_per_head / samples));
  row("  of which sinks and window alone", percent(r.mass_always_in / samples));
  row("bytes saved against the union of the heads' lists", percent(reduction));
  row("error of the attention output (relative L2)",
      percent(r.output_error / static_cast<double>(r.output_samples)));
  row("staged recall against one copy a block and plane",
      ratio ? count(*ratio) + " times as fast" : "not measured: this machine has no time");
  std::printf("  %s\n  %s\n", (line.out / "report.json").string().c_str(),
              (line.out / "trace.json").string().c_str());
  if (r.bytes_wrong != 0)
    throw std::runtime_error("demo: " + whole(r.bytes_wrong) + " bytes are wrong");
}

/// Runs a main function's body; what it throws ends in one line and exit status 1.
template <class Body>
int guarded(Body body) {
  try {
    body();
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return EXIT_FAILURE;
  }
}

}  // namespace demo
