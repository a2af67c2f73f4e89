// SPDX-License-Identifier: Apache-2.0
// How much of a real model's attention a selection keeps, and what it moves for it: see
// docs/fidelity.md. `sh cmake/run.sh study` makes the captures and runs this over them.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "../demo/run.hpp"
#include "book.hpp"
#include "figures.hpp"
#include "moved.hpp"
#include "study.hpp"
#include "svg.hpp"
#include "tables.hpp"

namespace {

struct command_line {
  std::vector<std::filesystem::path> captures;
  std::filesystem::path out = "build/study";
  std::int64_t steps = 0;  ///< at most, of each capture; 0: all
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
};

constexpr const char* usage =
    "usage: fidelity [--out FOLDER] [--threads N] [--steps N] CAPTURE.safetensors...\n";

command_line parse(int argc, char** argv) {
  command_line line;
  for (int i = 1; i < argc; ++i) {
    const std::string key = argv[i];
    if (key != "--out" && key != "--threads" && key != "--steps") {
      if (key.starts_with("--")) {
        throw std::invalid_argument("fidelity: unknown argument " + key + "\n" + usage);
      }
      line.captures.emplace_back(key);
      continue;
    }
    if (i + 1 >= argc) throw std::invalid_argument("fidelity: " + key + " has no value");
    const std::string value = argv[++i];
    if (key == "--out") {
      line.out = value;
    } else if (key == "--steps") {
      line.steps = fidelity::whole_number(key, value, 2);
    } else {
      line.threads = static_cast<int>(fidelity::whole_number(key, value, 1));
    }
  }
  if (line.captures.empty()) {
    throw std::invalid_argument(std::string("fidelity: no capture is named\n") + usage);
  }
  return line;
}

void study(const command_line& line) {
  const auto begin = std::chrono::steady_clock::now();
  fidelity::book book;
  std::vector<fidelity::series> plot;
  demo::report report;
  std::string trace;
  const auto tables = [&] {
    report = {};
    fidelity::digests_table(book);
    fidelity::elements_table(book);
    fidelity::rules_table(book);
    fidelity::scopes_table(book);
    fidelity::overlap_table(book);
    fidelity::residency_table(book);
    plot = fidelity::moved_table(book);
    fidelity::adaptive_moved_table(book);
    fidelity::foresight_table(book);
    fidelity::lengths_table(book);
    trace = fidelity::overlap_trace(book);
    fidelity::figures(book, report);
  };
  tables();
  std::fprintf(stderr, "%zu runs over %zu texts\n", book.plan().size(), line.captures.size());
  std::vector<fidelity::text_result> texts;
  for (const auto& path : line.captures) {
    demo::capture capture = demo::load_capture(path.string());
    if (line.steps > 0) capture.steps = std::min(capture.steps, line.steps);
    const std::string name = path.stem().string();
    // licence-4k is the licence again, cut shorter.
    const std::string whole = name.substr(0, name.find('-'));
    const bool for_length =
        std::any_of(texts.begin(), texts.end(), [&](const auto& t) { return t.name == whole; });
    texts.push_back(fidelity::study_text(name, capture, book.plan(), for_length, line.threads));
  }
  book.open(texts);
  tables();
  std::filesystem::create_directories(line.out);
  fidelity::write_text(line.out / "mass.svg",
                       fidelity::svg_plot("Attention mass against bytes moved",
                                          "Hot buffer of twice the list. Points: the budget, as a "
                                          "part of the context",
                                          "KiB moved for a token and layer",
                                          "share of the attention that is read", plot));
  fidelity::write_text(line.out / "overlap.csv", trace);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  report.number("study_seconds", seconds.count());
  report.write(line.out / "report.json");
  std::printf("\n");
  for (const char* file : {"report.json", "mass.svg", "overlap.csv"}) {
    std::printf("  %s\n", (line.out / file).string().c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  return demo::guarded([&] { study(parse(argc, argv)); });
}
