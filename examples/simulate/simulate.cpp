// SPDX-License-Identifier: Apache-2.0
// What offloading brings, on machines that are not here: `sh cmake/run.sh simulate`.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iterator>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
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

/// Progress, on standard error: what is done now, and how long all took until then.
void say(const char* what) {
  static const auto begin = std::chrono::steady_clock::now();
  const std::chrono::duration<double> now = std::chrono::steady_clock::now() - begin;
  std::fprintf(stderr, "simulate: %5.1f s: %s\n", now.count(), what);
  std::fflush(stderr);
}

/// The guide's table and ours: every system with as many streams as the guide has of it, with 4, and
/// with all that fit; those that are plotted with more.
std::vector<simulate::row> compare(const std::vector<simulate::system>& all,
                                   const simulate::options& o) {
  simulate::overlap_trace trace;
  if (!o.overlap.empty()) trace = simulate::overlap_from(o.overlap);
  struct job {
    std::size_t system;
    std::int32_t streams;
    bool traced;
  };
  std::vector<job> jobs;
  std::vector<simulate::row> rows;
  for (const simulate::system& s : all) {
    simulate::row r{.of = &s};
    const std::int32_t most = s.streams_that_fit();
    const std::int32_t asked = std::min(s.guide.streams > 0 ? s.guide.streams : 16, most);
    std::set<std::int32_t> streams{4, asked, most};
    if (simulate::is_plotted(s)) streams.insert({1, 2, 3, 8, 16});
    for (const std::int32_t n : streams) {
      if (n < 1 || n > most) continue;
      jobs.push_back({rows.size(), n, false});
      r.by_streams[n] = {};
    }
    r.asked = asked;
    // Those that keep what they have: the others miss everything, whatever a trace says.
    if (!trace.empty() && asked > 0 && s.offloads && s.setting.kv.miss < 1) {
      jobs.push_back({rows.size(), asked, true});
    }
    rows.push_back(std::move(r));
  }
  // What takes longest first.
  const auto work = [&](const job& j) {
    const simulate::system& s = all[j.system];
    return j.streams * s.setting.kv.miss * s.policy.moves.pieces;
  };
  std::stable_sort(jobs.begin(), jobs.end(),
                   [&](const job& a, const job& b) { return work(a) > work(b); });
  simulate::in_parallel(jobs.size(), [&](std::size_t i) {
    const job& j = jobs[i];
    const simulate::system& s = all[j.system];
    if (!j.traced) {
      rows[j.system].by_streams.at(j.streams) = simulate::measure(s, j.streams);
      return;
    }
    setting with = s.setting;
    with.streams = j.streams;
    rows[j.system].traced_seconds =
        simulate::decoder(with, s.policy).run(3, simulate::traced_misses(with, trace)).tpot_seconds;
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
    const std::string& key = r.of->key;
    out.text(key + "_is", r.of->what);
    out.number(key + "_streams", r.asked);
    out.number(key + "_tpot_ms", 1e3 * r.as_asked().tpot_seconds);
    out.number(key + "_tpot_ms_bound", 1e3 * r.bound_seconds());
    out.number(key + "_stall_ms", 1e3 * r.as_asked().stall_seconds);
    if (r.traced_seconds > 0) {
      out.number(key + "_tpot_ms_with_overlap_trace", 1e3 * r.traced_seconds);
    }
    if (simulate::formula_ms(*r.of) > 0) {
      out.number(key + "_tpot_ms_by_the_guides_formulas", simulate::formula_ms(*r.of));
    }
    out.number(key + "_best_streams", r.best().streams);
    out.number(key + "_best_tokens_per_second", r.best().tokens_per_second());
  }
  const simulate::row& ours = find(rows, "ours");
  const simulate::row& small = find(rows, "ours_mean_i8");
  if (ours.traced_seconds > 0) {
    out.number("tpot_ms_with_overlap_trace", 1e3 * ours.traced_seconds);
  }
  const bool is_headline = simulate::is_headline(ours.of->setting);
  const auto ratio = [&](const char* key, const char* of, const char* target) {
    const double other = find(rows, of).best().tokens_per_second();
    if (other > 0) out.number(key, ours.best().tokens_per_second() / other);
    if (is_headline) out.target(key, target);
  };
  ratio("throughput_vs_hbm_only", "hbm_only", ">= 9.4");
  ratio("throughput_vs_guide_design", "guide", ">= 2.6");
  if (!is_headline) return;
  const std::string key = "tpot_ms_h100_8b_128k_16_streams";
  const auto headline = [&](const std::string& which, const simulate::row& r) {
    out.number(key + which, 1e3 * r.as_asked().tpot_seconds);
    out.target(key + which, "<= 12.0");
    out.number(key + which + "_bound", 1e3 * r.bound_seconds());
  };
  headline("", ours);
  headline("_int8_means", small);
  std::printf(
      "\n%s, with p = %.2f of what is missed: FP16 means %.2f ms, where no schedule is faster than "
      "%.2f;\nINT8 means %.2f ms, where none is faster than %.2f.\n",
      key.c_str(), ours.of->setting.kv.ahead, 1e3 * ours.as_asked().tpot_seconds,
      1e3 * ours.bound_seconds(), 1e3 * small.as_asked().tpot_seconds, 1e3 * small.bound_seconds());
}

/// TPOT of 16 streams over misses and prediction; `which` ends its keys.
void report_curve(demo::report& out, const setting& base, const char* digests, const char* which) {
  const double misses[] = {0, 0.05, 0.1, 0.2, 0.5, 1};
  const double aheads[] = {0, 0.5, 0.9, 1};
  constexpr std::size_t m = std::size(misses), p = std::size(aheads);
  std::vector<double> ms(m * p);
  simulate::in_parallel(ms.size(), [&](std::size_t nth) {
    const std::size_t i = ms.size() - 1 - nth;  // what takes longest first
    if (misses[i / p] == 0 && i % p > 0) return;
    simulate::system s = simulate::ours(base);
    s.setting.kv = {misses[i / p], aheads[i % p]};
    ms[i] = 1e3 * simulate::decode(s, base.streams, 2).tpot_seconds;
  });
  std::fill_n(ms.begin(), p, ms[0]);  // without misses there is nothing to foretell
  std::printf("\nTPOT in ms of %d streams, %s, %s, ours, %s; p of what is missed:\n   misses",
              base.streams, base.machine.name.c_str(), base.model.name.c_str(), digests);
  for (const double ahead : aheads) std::printf("   p %4.1f", ahead);
  for (std::size_t i = 0; i < m; ++i) {
    std::printf("\n   %5.0f%%", 100 * misses[i]);
    for (std::size_t k = 0; k < p; ++k) {
      std::printf("  %7.2f", ms[i * p + k]);
      char key[80];
      std::snprintf(key, sizeof key, "tpot_ms_at_miss_%.2f_ahead_%.1f%s", misses[i], aheads[k],
                    which);
      out.number(key, ms[i * p + k]);
    }
  }
  std::printf("\n");
}

/// A model on eight GPUs; `key` begins its keys.
void report_tensor_parallel(demo::report& out, const simulate::model& model, const std::string& key,
                            const setting& asked) {
  setting base = simulate::placed(simulate::machines().front(), model);
  base.context = asked.context;
  base.kv = asked.kv;
  std::vector<simulate::system> all = simulate::systems(base);
  std::erase_if(all, [](const auto& s) { return s.key != "hbm_only" && s.key != "ours"; });
  // A batch of 16, and all that fit.
  simulate::throughput each[4];
  simulate::in_parallel(4, [&](std::size_t i) {
    const std::int32_t most = all[i / 2].streams_that_fit();
    if (i % 2 == 0 || most > 16) each[i] = simulate::measure(all[i / 2], i % 2 == 0 ? most : 16);
  });
  const simulate::throughput hbm = simulate::best_of({each[0], each[1]});
  const simulate::throughput ours = simulate::best_of({each[2], each[3]});
  out.text(key + "_model_shape", model.text());
  out.text(key + "_model_source", model.source);
  out.number(key + "_streams", ours.streams);
  out.number(key + "_tpot_ms", 1e3 * ours.tpot_seconds);
  const double ratio = ours.tokens_per_second() / hbm.tokens_per_second();
  out.number(key + "_throughput_vs_hbm_only", ratio);
  if (key == "llama70b_tp8") out.target(key + "_throughput_vs_hbm_only", ">= 4.7");
  std::printf(
      "\n%s on 8 %s, %.0f tokens: ours %d streams, %.2f ms, %.0f tok/s; HBM only %d "
      "streams, %.2f ms, %.0f tok/s (%.2f times)\n%s: %s (%s)\n",
      model.name.c_str(), base.machine.name.c_str(), base.context, ours.streams,
      1e3 * ours.tpot_seconds, ours.tokens_per_second(), hbm.streams, 1e3 * hbm.tpot_seconds,
      hbm.tokens_per_second(), ratio, model.name.c_str(), model.text().c_str(),
      model.source.c_str());
}

void report_sweep(demo::report& out) {
  const std::vector<simulate::point> points = simulate::sweep();
  const simulate::point* worst = nullptr;
  double sum = 0, worst_joined = 0;
  std::size_t within = 0, within_joined = 0;
  for (const simulate::point& p : points) {
    if (worst == nullptr || p.ratio() > worst->ratio()) worst = &p;
    sum += p.ratio();
    within += p.ratio() <= 1.08 ? 1 : 0;
    const double joined = p.seconds / p.joined_seconds;
    worst_joined = std::max(worst_joined, joined);
    within_joined += joined <= 1.08 ? 1 : 0;
  }
  if (worst == nullptr) return;
  out.number("step_time_vs_lower_bound", worst->ratio());
  out.target("step_time_vs_lower_bound", "<= 1.08");
  out.text("step_time_vs_lower_bound_worst_at", worst->text());
  out.number("step_time_vs_lower_bound_mean", sum / static_cast<double>(points.size()));
  out.number("step_time_vs_lower_bound_points", static_cast<double>(points.size()));
  out.number("step_time_vs_lower_bound_points_within_1.08", static_cast<double>(within));
  out.number("step_time_vs_bound_of_joined_calls", worst_joined);
  out.number("step_time_vs_bound_of_joined_calls_points_within_1.08",
             static_cast<double>(within_joined));
  std::printf(
      "\nStep time over its lower bound: worst %.3f (%s), mean %.3f, %zu of %zu points within "
      "1.08\n(were single units copied in the calls of chunks, which ours does not, the bound "
      "would "
      "be lower: worst %.3f, %zu within)\n",
      worst->ratio(), worst->text().c_str(), sum / static_cast<double>(points.size()), within,
      points.size(), worst_joined, within_joined);
}

/// A timeline of 16 streams, and the plots.
void draw(const simulate::options& o, const std::vector<simulate::row>& rows) {
  const simulate::row& ours = find(rows, "ours");
  if (ours.asked < 1) return;
  pulseinfer::trace timeline;
  const simulate::decoded shown = simulate::decode(*ours.of, ours.asked, 3, &timeline);
  timeline.write((o.out / "trace.json").string());
  std::vector<std::pair<double, double>> use = shown.link_use;
  for (auto& at : use) at.first *= 1e3, at.second *= 100;
  simulate::plot(o.out / "link.svg", "link use, " + o.base.model.name, "ms",
                 "busy share of the last half ms, percent", {{"ours", use}});
  std::vector<simulate::curve> curves;
  for (const simulate::row& r : rows) {
    if (!simulate::is_plotted(*r.of)) continue;
    curves.push_back({r.of->name, {}});
    for (const auto& [n, t] : r.by_streams) {
      curves.back().points.emplace_back(n, 1e3 * t.tpot_seconds);
    }
  }
  simulate::plot(o.out / "tpot.svg", "time per token, " + o.base.model.name, "streams", "TPOT, ms",
                 curves);
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
  simulate::report_turns(out, o.base, o.seed);
}

/// Lines of the report, also printed.
void print_lines(demo::report& out, const std::string& key, const std::vector<std::string>& lines) {
  for (std::size_t i = 0; i < lines.size(); ++i) {
    out.text(key + "_" + std::to_string(i + 1), lines[i]);
    std::printf("- %s\n", lines[i].c_str());
  }
}

int run(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 1 << 12);
  const simulate::options o = simulate::parse(argc, argv);
  std::filesystem::create_directories(o.out);
  demo::report out;
  out.text("machine", o.base.machine.name);
  out.text("machine_source", o.base.machine.source);
  out.text("model", o.base.model.name);
  out.text("model_shape", o.base.model.text());
  out.text("model_source", o.base.model.source);
  out.number("context_tokens", o.base.context);
  out.number("budget_blocks", o.base.budget);
  out.number("miss_rate", o.base.kv.miss);
  out.number("p_of_misses", o.base.kv.ahead);
  out.number("p_of_misses_as_studied", simulate::studied.foretold_of_misses());
  out.number("p_of_a_list_as_studied", simulate::studied.foretold);
  for (const simulate::machine& m : simulate::machines()) {
    out.text("machine_source_" + m.name, m.source);
  }

  std::printf(
      "%s: %s\n%s, %.0f tokens a stream, k %d, misses %.0f %%, of them p = %.2f foretold (the "
      "study: "
      "%.2f of what is\nmissed, %.2f of a whole list, which counts where all of it moves)\n",
      o.base.machine.name.c_str(), o.base.machine.source.c_str(), o.base.model.name.c_str(),
      o.base.context, o.base.budget, 100 * o.base.kv.miss, o.base.kv.ahead,
      simulate::studied.foretold_of_misses(), simulate::studied.foretold);
  say("systems");
  const std::vector<simulate::system> all = simulate::systems(o.base);
  const std::vector<simulate::row> rows = compare(all, o);
  simulate::print_table(rows);
  report_table(out, rows);
  std::printf("\nThe guide against itself:\n");
  print_lines(out, "guide_contradiction", simulate::contradictions());
  say("misses and prediction");
  report_curve(out, o.base, "FP16 means", "");
  setting small = o.base;
  small.digest_channel_bytes = 1;
  report_curve(out, small, "INT8 means", "_int8_means");
  say("timeline and plots");
  draw(o, rows);
  say("tensor parallel");
  report_tensor_parallel(out, simulate::models()[1], "llama70b_tp8", o.base);
  report_tensor_parallel(out, simulate::models()[2], "qwen72b_tp8", o.base);
  if (!o.quick) {
    say("a server, and its admission");
    serve(out, o);
    say("step times against their bound");
    report_sweep(out);
  }
  std::printf("\nAssumptions:\n");
  print_lines(out, "assumption", simulate::assumptions());
  say("done");
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
