// SPDX-License-Identifier: Apache-2.0
/// @file
/// The library's admission policies under the same arrivals: static shares, of which one is always,
/// a token bucket, and the adaptive one; at a low load, and at the load where the best static share
/// begins to stall. And the adaptive one where next turns find their prompts stored.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../demo/report.hpp"
#include "pulseinfer/admission.hpp"
#include "pulseinfer/admission_static.hpp"
#include "pulseinfer/admission_token_bucket.hpp"
#include "serving.hpp"
#include "studied.hpp"
#include "sweep.hpp"

namespace simulate {

/// A static share serves a load if 99 of 100 requests decode so soon after their arrival. Whatever is
/// admitted is served in the end, and a share that stalls nobody may let them wait.
inline constexpr double wait_limit_seconds = 0.5;
/// What the result is with other limits is reported, too: it depends on them.
inline constexpr double wait_limits[] = {0.25, wait_limit_seconds, 1.0};
/// Loads that are tried, as shares of what HBM alone holds.
inline constexpr double load_shares[] = {0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2};
/// The load of the next turns, likewise.
inline constexpr double turns_load = 1;
inline constexpr double static_shares[] = {0, 0.25, 0.5, 0.75, 1};

/// A policy, and what it made of a load; nothing where it was not tried.
struct tried {
  std::string name;
  std::string key;
  std::optional<double> share;  ///< of a static one
  std::function<served(const std::vector<arrival>&)> serve;
  std::optional<served> result = {};

  /// Static, and 99 of 100 requests waited no longer.
  [[nodiscard]] bool serves_statically(double limit) const {
    return share && result && result->p99_wait_seconds <= limit;
  }
};

/// One load: the static shares, least first, then the others, the adaptive policy last.
struct serving_load {
  double rate = 0;  ///< requests a second
  std::vector<tried> policies;

  /// Of the static shares that serve the one that is least by `of`; null where none serves.
  [[nodiscard]] const tried* best_static(double served::*of,
                                         double limit = wait_limit_seconds) const {
    const tried* found = nullptr;
    for (const tried& t : policies) {
      if (!t.serves_statically(limit)) continue;
      if (found == nullptr || (*t.result).*of < (*found->result).*of) found = &t;
    }
    return found;
  }
  /// A static share serves, and stalls less than 10 % of its TPOT.
  [[nodiscard]] bool is_calm(double limit) const {
    return std::any_of(policies.begin(), policies.end(), [&](const tried& t) {
      return t.serves_statically(limit) &&
             t.result->p99_stall_seconds < 0.1 * t.result->tpot_seconds;
    });
  }
  [[nodiscard]] const served& adaptive() const { return *policies.back().result; }
};

/// Requests a second that HBM alone holds in a steady state: so many contexts of the mean length,
/// each as long as its tokens take.
inline double rate_of_hbm(const setting& s, const std::vector<arrival>& all) {
  double prompt = 0, output = 0;
  for (const arrival& a : all) {
    prompt += a.prompt_tokens / static_cast<double>(all.size());
    output += a.output_tokens / static_cast<double>(all.size());
  }
  setting mean = s;
  mean.context = prompt + output;
  const double streams = mean.streams_that_fit(false);
  const pulseinfer::layer_work w = mean.work();
  const double step = s.model.layers * (w.weight_bytes + streams * w.request_bytes) /
                      s.machine.profile.hbm_bytes_per_second;
  return streams / (output * step);
}

/// The setting of the server: misses as studied, and channels that stand for several.
inline setting serving_setting(setting s) {
  s.kv = as_studied();
  s.shrink = s.model.head_dim % 64 == 0 ? 8 : 1;
  return s;
}

template <pulseinfer::admission_policy Policy>
served serve(const setting& s, Policy policy, const std::vector<arrival>& all) {
  return server<Policy>(s, {.moves = {.tuned = true}}, std::move(policy)).run(all);
}
/// All of them at a load, none tried yet. The static share of 1 is the policy that always says yes.
inline serving_load all_policies(const setting& s, double rate) {
  serving_load load{rate, {}};
  const std::int32_t layers = s.model.layers;
  for (const double share : static_shares) {
    char text[8];
    std::snprintf(text, sizeof text, "%.2f", share);
    const char* const kind = share == 1 ? "always, " : "static, ";
    load.policies.push_back({kind + std::string(text) + " away", std::string("static_") + text,
                             share, [=](const std::vector<arrival>& all) {
                               return serve(s, pulseinfer::static_ratio_admission(layers, share),
                                            all);
                             }});
  }
  load.policies.push_back(
      {"token bucket", "token_bucket", {}, [=](const std::vector<arrival>& all) {
         const pulseinfer::token_bucket_options o{
             .bytes_per_second = s.machine.profile.link_bytes_per_second, .burst_bytes = 1 << 30};
         return serve(s, pulseinfer::token_bucket_admission(layers, o), all);
       }});
  load.policies.push_back({"adaptive", "adaptive", {}, [=](const std::vector<arrival>& all) {
                             return serve(s, pulseinfer::adaptive_admission(layers), all);
                           }});
  return load;
}
/// Tries those from one to before another, what takes longest first.
inline void try_policies(serving_load& load, const std::vector<arrival>& all, std::size_t from,
                         std::size_t to) {
  in_parallel(to - from, [&](std::size_t i) {
    tried& t = load.policies[to - 1 - i];
    t.result = t.serve(all);
  });
}

/// What a policy answered.
inline void report_answers(demo::report& out, const std::string& key, const served& r) {
  out.number(key + "_admitted_whole", static_cast<double>(r.admitted_whole));
  out.number(key + "_admitted_placed", static_cast<double>(r.admitted_placed));
  out.number(key + "_recomputed", static_cast<double>(r.recomputed));
  out.number(key + "_deferred_answers", static_cast<double>(r.deferred));
}

/// Prints a load; reports it, too, under keys that begin with `key`, unless that is empty.
inline void show_load(demo::report& out, const std::string& key, const serving_load& load) {
  std::printf("\n%.2f requests a second\n%-18s | %8s %8s %8s | %8s %8s | %7s | %6s %6s | %s\n",
              load.rate, "policy", "tok/s", "TPOT ms", "p99", "stall ms", "p99", "p99wait",
              "recall", "store", "serves");
  if (!key.empty()) out.number(key + "_requests_per_second", load.rate);
  for (const tried& t : load.policies) {
    if (!t.result) continue;
    const served& r = *t.result;
    std::printf("%-18s | %8.0f %8.2f %8.2f | %8.3f %8.3f | %5.2f s | %4.0f %% %4.0f %% | %s\n",
                t.name.c_str(), r.tokens_per_second(), 1e3 * r.tpot_seconds,
                1e3 * r.p99_tpot_seconds, 1e3 * r.stall_seconds, 1e3 * r.p99_stall_seconds,
                r.p99_wait_seconds, 100 * r.recall_share, 100 * r.store_share,
                r.p99_wait_seconds <= wait_limit_seconds ? "yes" : "no");
    if (key.empty()) continue;
    const std::string k = key + "_" + t.key;
    out.number(k + "_p99_stall_ms", 1e3 * r.p99_stall_seconds);
    out.number(k + "_tpot_ms", 1e3 * r.tpot_seconds);
    out.number(k + "_tokens_per_second", r.tokens_per_second());
    out.number(k + "_p99_wait_s", r.p99_wait_seconds);
    report_answers(out, k, r);
  }
}

/// Adaptive against the best static share, at a load where that one stalls.
inline void report_against_best(demo::report& out, const serving_load& load, const tried& best,
                                double limit) {
  const double ratio = load.adaptive().p99_stall_seconds / best.result->p99_stall_seconds;
  const bool serves = load.adaptive().p99_wait_seconds <= limit;
  std::printf(
      "Where 99 of 100 may wait %.2f s the best static share (%.2f) first stalls 10 %% of its TPOT "
      "at %.2f requests a second; adaptive has %.2f times its p99 stall%s\n",
      limit, *best.share, load.rate, ratio,
      serves ? "" : ", and lets requests wait longer than that");
  if (limit == wait_limit_seconds) {
    out.number("serving_busy_best_static_share", *best.share);
    out.number("serving_busy_adaptive_serves", serves ? 1 : 0);
    out.number("adaptive_vs_best_static_p99_stall", ratio);
    out.target("adaptive_vs_best_static_p99_stall", "<= 0.8");
    return;
  }
  char key[80];
  std::snprintf(key, sizeof key, "adaptive_vs_best_static_p99_stall_wait_%.0f_ms", 1e3 * limit);
  out.number(key, ratio);
  out.number(std::string(key) + "_adaptive_serves", serves ? 1 : 0);
}

/// Low load, then more until the best static share stalls 10 % of its TPOT, for each of the limits of
/// what requests may wait; prints and reports all of it.
/// @param all  at any rate: their pattern is what counts
inline void report_serving(demo::report& out, const setting& base,
                           const std::vector<arrival>& all) {
  const setting s = serving_setting(base);
  const double hbm = rate_of_hbm(s, all);
  out.number("serving_requests", static_cast<double>(all.size()));
  out.number("serving_requests_per_second_of_hbm", hbm);
  out.text("serving_rule",
           "a static share serves if 99 of 100 requests decode within 0.5 s of their arrival; the "
           "best one has the least p99 stall, at low load the least TPOT");
  serving_load low = all_policies(s, 0.25 * hbm);
  try_policies(low, at_rate(all, low.rate), 0, low.policies.size());
  show_load(out, "serving_low_load", low);
  if (const tried* const best = low.best_static(&served::tpot_seconds)) {
    out.number("adaptive_vs_best_static_tpot_low_load",
               low.adaptive().tpot_seconds / best->result->tpot_seconds);
    out.target("adaptive_vs_best_static_tpot_low_load", "<= 1.05");
  }
  std::vector<double> limits(std::begin(wait_limits), std::end(wait_limits));
  for (const double share : load_shares) {
    if (limits.empty()) break;
    serving_load load = all_policies(s, share * hbm);
    const std::vector<arrival> now = at_rate(all, load.rate);
    // Shares that stall least first, and no more of them than it takes to see that one is calm.
    const auto all_calm = [&] {
      return std::all_of(limits.begin(), limits.end(), [&](double l) { return load.is_calm(l); });
    };
    try_policies(load, now, 0, 2);
    if (!all_calm()) try_policies(load, now, 2, 4);
    if (!all_calm()) try_policies(load, now, 4, load.policies.size());
    // Of those whose best share stalls here, or has been overrun.
    std::vector<double> stalled;
    std::erase_if(limits, [&](double limit) {
      if (load.is_calm(limit)) return false;
      if (load.best_static(&served::p99_stall_seconds, limit) != nullptr) {
        stalled.push_back(limit);
      } else {
        std::printf("No static share serves %.2f requests a second with a wait of %.2f s\n",
                    load.rate, limit);
      }
      return true;
    });
    if (stalled.empty()) continue;
    const bool is_rule =
        std::find(stalled.begin(), stalled.end(), wait_limit_seconds) != stalled.end();
    show_load(out, is_rule ? "serving_busy" : "", load);
    for (const double limit : stalled) {
      report_against_best(out, load, *load.best_static(&served::p99_stall_seconds, limit), limit);
    }
  }
}

/// Next turns in bursts, whose prompts but for what is new lie in the store: each is loaded, or
/// recomputed where that is sooner, before it decodes. So all that admission can answer comes up.
inline void report_turns(demo::report& out, const setting& base, std::uint64_t seed) {
  const setting s = serving_setting(base);
  workload w;
  w.seed = seed;
  const std::vector<arrival> all = next_turns(w);
  const double rate = turns_load * rate_of_hbm(s, all);
  const served r = serve(s, pulseinfer::adaptive_admission(s.model.layers), at_rate(all, rate));
  out.number("serving_turns_requests_per_second", rate);
  out.number("serving_turns_loaded_gb", 1e-9 * r.loaded_bytes);
  out.number("serving_turns_recomputed_tokens", static_cast<double>(r.recomputed_tokens));
  out.number("serving_turns_p99_wait_s", r.p99_wait_seconds);
  report_answers(out, "serving_turns_adaptive", r);
  std::printf(
      "\nNext turns of %zu conversations, %.2f a second in bursts, their prompts stored but for "
      "what is new; adaptive:\n%lld admitted whole, %lld with a placement, %lld recomputed (%lld "
      "tokens), %lld answers deferred; %.1f GB loaded; 99 of 100\nwait less than %.2f s, TPOT %.2f "
      "ms\n",
      all.size(), rate, static_cast<long long>(r.admitted_whole),
      static_cast<long long>(r.admitted_placed), static_cast<long long>(r.recomputed),
      static_cast<long long>(r.recomputed_tokens), static_cast<long long>(r.deferred),
      1e-9 * r.loaded_bytes, r.p99_wait_seconds, 1e3 * r.tpot_seconds);
}

}  // namespace simulate
