// SPDX-License-Identifier: Apache-2.0
// What offloading brings, on machines that are not here: `sh cmake/run.sh simulate`.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include "../demo/report.hpp"
#include "options.hpp"
#include "overlap.hpp"
#include "plot.hpp"
#include "policies.hpp"
#include "sweep.hpp"
#include "systems.hpp"
#include "table.hpp"

namespace {

using simulate::setting;

void say(const char* what) {
  std::fprintf(stderr, "simulate: %s\n", what);
  std::fflush(stderr);
}

/// The guide's table and ours.
std::vector<simulate::row> compare(const std::vector<simulate::system>& all) {
  std::vector<simulate::row> rows(all.size());
  simulate::in_parallel(all.size(), [&](std::size_t i) {
    const simulate::system& s = all[i];
    const std::int32_t streams =
        std::min(s.guide.streams > 0 ? s.guide.streams : 16, s.streams_that_fit());
    rows[i].of = &s;
    rows[i].at_guide = {streams, streams > 0 ? simulate::decode(s, streams).tpot_seconds : 0};
    rows[i].best = simulate::best_throughput(s);
  });
  return rows;
}

const simulate::row& find(const std::vector<simulate::row>& rows, const std::string& key) {
  for (const simulate::row& r : rows) {
    if (r.of->key == key) return r;
  }
  throw std::logic_error("simulate: no system " + key);
}

void report_table(demo::report& out, const std::vector<simulate::row>& rows) {
  for (const simulate::row& r : rows) {
    out.number(r.of->key + "_tpot_ms", 1e3 * r.at_guide.tpot_seconds);
    out.number(r.of->key + "_best_streams", r.best.streams);
    out.number(r.of->key + "_best_tokens_per_second", r.best.tokens_per_second());
  }
  const double ours = find(rows, "ours").best.tokens_per_second();
  const auto ratio = [&](const char* key, const char* of) {
    const double other = find(rows, of).best.tokens_per_second();
    if (other > 0) out.number(key, ours / other);
  };
  out.number("tpot_ms_h100_8b_128k_16_streams", 1e3 * find(rows, "ours").at_guide.tpot_seconds);
  out.target("tpot_ms_h100_8b_128k_16_streams", "<= 12.0");
  ratio("throughput_vs_hbm_only", "hbm_only");
  out.target("throughput_vs_hbm_only", ">= 9.4");
  ratio("throughput_vs_guide_design", "guide");
  out.target("throughput_vs_guide_design", ">= 2.6");
}

/// TPOT of 16 streams over misses and prediction.
void report_curve(demo::report& out, const setting& base) {
  const double misses[] = {0, 0.05, 0.1, 0.2, 0.5, 1};
  const double aheads[] = {0, 0.5, 0.9};
  constexpr std::size_t m = std::size(misses), p = std::size(aheads);
  std::vector<double> ms(m * p);
  simulate::in_parallel(ms.size(), [&](std::size_t i) {
    simulate::system s = simulate::ours(base);
    s.setting.kv = {misses[i / p], aheads[i % p]};
    ms[i] = 1e3 * simulate::decode(s, base.streams, 2).tpot_seconds;
  });
  std::printf("\nTPOT in ms of %d streams, %s, %s:\n   misses", base.streams,
              base.machine.name.c_str(), base.model.name.c_str());
  for (const double ahead : aheads) std::printf("   p %4.1f", ahead);
  for (std::size_t i = 0; i < m; ++i) {
    std::printf("\n   %5.0f%%", 100 * misses[i]);
    for (std::size_t k = 0; k < p; ++k) {
      std::printf("  %7.2f", ms[i * p + k]);
      char key[64];
      std::snprintf(key, sizeof key, "tpot_ms_at_miss_%.2f_ahead_%.1f", misses[i], aheads[k]);
      out.number(key, ms[i * p + k]);
    }
  }
  std::printf("\n");
}

void report_tensor_parallel(demo::report& out, double context) {
  setting base = simulate::placed(simulate::machines().front(), simulate::models()[1]);
  base.context = context;
  std::vector<simulate::system> all = simulate::systems(base);
  std::erase_if(all, [](const auto& s) { return s.key != "hbm_only" && s.key != "ours"; });
  simulate::throughput best[2];
  simulate::in_parallel(2, [&](std::size_t i) { best[i] = simulate::best_throughput(all[i]); });
  out.number("llama70b_tp8_streams", best[1].streams);
  out.number("llama70b_tp8_tpot_ms", 1e3 * best[1].tpot_seconds);
  const double ratio = best[1].tokens_per_second() / best[0].tokens_per_second();
  out.number("llama70b_tp8_throughput_vs_hbm_only", ratio);
  out.target("llama70b_tp8_throughput_vs_hbm_only", ">= 4.7");
  std::printf(
      "\nLlama-3-70B on 8 %s, %.0f tokens: ours %d streams, %.2f ms, %.0f tok/s; HBM only %d "
      "streams, %.2f ms, %.0f tok/s (%.2f times)\n",
      base.machine.name.c_str(), context, best[1].streams, 1e3 * best[1].tpot_seconds,
      best[1].tokens_per_second(), best[0].streams, 1e3 * best[0].tpot_seconds,
      best[0].tokens_per_second(), ratio);
}

void report_sweep(demo::report& out) {
  const std::vector<simulate::point> points = simulate::sweep();
  const simulate::point* worst = nullptr;
  double sum = 0;
  std::size_t within = 0;
  for (const simulate::point& p : points) {
    if (worst == nullptr || p.ratio() > worst->ratio()) worst = &p;
    sum += p.ratio();
    within += p.ratio() <= 1.08 ? 1 : 0;
  }
  if (worst == nullptr) return;
  out.number("step_time_vs_lower_bound", worst->ratio());
  out.target("step_time_vs_lower_bound", "<= 1.08");
  out.text("step_time_vs_lower_bound_worst_at", worst->text());
  out.number("step_time_vs_lower_bound_mean", sum / static_cast<double>(points.size()));
  out.number("step_time_vs_lower_bound_points", static_cast<double>(points.size()));
  out.number("step_time_vs_lower_bound_points_within_1.08", static_cast<double>(within));
  std::printf(
      "\nStep time over its lower bound: worst %.3f (%s), mean %.3f, %zu of %zu points within "
      "1.08\n",
      worst->ratio(), worst->text().c_str(), sum / static_cast<double>(points.size()), within,
      points.size());
}

/// A timeline of 16 streams, and the plots.
void draw(const simulate::options& o, const std::vector<simulate::system>& all) {
  pulseinfer::trace timeline;
  const simulate::decoded shown =
      simulate::decode(simulate::ours(o.base),
                       std::min(16, simulate::ours(o.base).streams_that_fit()), 3, &timeline);
  timeline.write((o.out / "trace.json").string());
  std::vector<std::pair<double, double>> use = shown.link_use;
  for (auto& at : use) at.first *= 1e3, at.second *= 100;
  simulate::plot(o.out / "link.svg", "link use, " + o.base.model.name, "ms",
                 "busy share of the last half ms, percent", {{"ours", use}});

  std::vector<simulate::curve> curves;
  for (const simulate::system& s : all) {
    if (s.key == "hbm_only" || s.key == "guide" || s.key == "ours" || s.key == "sync") {
      curves.push_back({s.name, {}});
    }
  }
  simulate::in_parallel(curves.size(), [&](std::size_t i) {
    const auto s = std::find_if(all.begin(), all.end(),
                                [&](const auto& one) { return one.name == curves[i].name; });
    for (const std::int32_t n : {1, 2, 3, 8, 16, 29}) {
      if (n > s->streams_that_fit()) break;
      curves[i].points.emplace_back(n, 1e3 * simulate::decode(*s, n, 2).tpot_seconds);
    }
  });
  simulate::plot(o.out / "tpot.svg", "time per token, " + o.base.model.name, "streams", "TPOT, ms",
                 curves);
}

/// The same 16 streams with the misses of the study's trace.
void report_overlap(demo::report& out, const setting& base, const std::string& path) {
  const simulate::overlap_trace trace = simulate::overlap_from(path);
  const double seconds =
      simulate::decoder(base, {}).run(3, simulate::traced_misses(base, trace)).tpot_seconds;
  out.number("tpot_ms_with_overlap_trace", 1e3 * seconds);
  std::printf("\nWith the misses of %s: %.2f ms\n", path.c_str(), 1e3 * seconds);
}

/// Requests that come and go, under the admission policies.
void serve(demo::report& out, const simulate::options& o) {
  simulate::workload w;
  w.seed = o.seed;
  const bool is_made_up = o.arrivals == "steady" || o.arrivals == "bursty";
  out.text("serving_arrivals", o.arrivals);
  if (is_made_up) out.number("serving_seed", static_cast<double>(o.seed));
  const std::vector<simulate::arrival> all = o.arrivals == "steady" ? simulate::steady(w)
                                             : o.arrivals == "bursty"
                                                 ? simulate::bursty(w)
                                                 : simulate::arrivals_from(o.arrivals, 80);
  std::printf("\nA server of %zu requests, arrivals %s%s", all.size(), o.arrivals.c_str(),
              is_made_up ? (", seed " + std::to_string(o.seed)).c_str() : "");
  simulate::report_serving(out, o.base, all);
}

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);
  const simulate::options o = simulate::parse(argc, argv);
  std::filesystem::create_directories(o.out);
  demo::report out;
  out.text("machine", o.base.machine.name);
  out.text("machine_source", o.base.machine.source);
  out.text("model", o.base.model.name);
  out.number("context_tokens", o.base.context);
  out.number("budget_blocks", o.base.budget);
  out.number("miss_rate", o.base.kv.miss);
  out.number("known_ahead", o.base.kv.ahead);
  for (std::size_t i = 0; i < simulate::assumptions().size(); ++i) {
    out.text("assumption_" + std::to_string(i + 1), simulate::assumptions()[i]);
  }

  std::printf("%s: %s\n%s, %.0f tokens a stream, k %d, misses %.0f %%, of them %.0f %% foretold\n",
              o.base.machine.name.c_str(), o.base.machine.source.c_str(), o.base.model.name.c_str(),
              o.base.context, o.base.budget, 100 * o.base.kv.miss, 100 * o.base.kv.ahead);
  say("systems");
  const std::vector<simulate::system> all = simulate::systems(o.base);
  const std::vector<simulate::row> rows = compare(all);
  simulate::print_table(rows);
  simulate::print_contradictions();
  report_table(out, rows);
  say("misses and prediction");
  report_curve(out, o.base);
  if (!o.overlap.empty()) report_overlap(out, o.base, o.overlap);
  say("timeline and plots");
  draw(o, all);
  say("tensor parallel");
  report_tensor_parallel(out, o.base.context);
  if (!o.quick) {
    say("a server, and its admission");
    serve(out, o);
    say("step times against their bound");
    report_sweep(out);
  }
  std::printf("\nAssumptions:\n");
  for (const std::string& line : simulate::assumptions()) std::printf("- %s\n", line.c_str());
  out.write(o.out / "report.json");
  std::printf("\nwritten to %s: report.json, trace.json (opens in Perfetto), tpot.svg, link.svg\n",
              o.out.c_str());
  return EXIT_SUCCESS;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return EXIT_FAILURE;
  }
}
