// SPDX-License-Identifier: Apache-2.0
/// @file
/// A server: requests arrive, an admission policy of the library says who may enter and what of it
/// stays in HBM, their prompts are stored or loaded, they decode and leave.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "arrivals.hpp"
#include "decoder.hpp"
#include "guest.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/layer_activity.hpp"
#include "served.hpp"

namespace simulate {

/// Decodes what arrives. `s.streams` is not asked; contexts are those of the requests.
///
/// @tparam Policy  admission_policy; one that has `observe_memory` is told what HBM has to hold
template <pulseinfer::admission_policy Policy>
class server : engine {
 public:
  server(const setting& s, const policy& how, Policy admission, const serving_options& o = {})
      : engine(sized(s, o), how, o.window_seconds, nullptr, o.stores),
        options_(o),
        admission_(std::move(admission)),
        arrivals_(machine_.make_stream(pulseinfer::stream_priority::normal)),
        idle_(machine_.make_stream(pulseinfer::stream_priority::normal)),
        activity_(s.model.layers, 1),
        active_(static_cast<std::size_t>(s.model.layers)),
        placement_(active_.size()),
        unsaved_(active_.size()),
        free_bytes_(static_cast<double>(s.machine.profile.device_bytes) - setting::reserve_bytes -
                    s.resident_weights()) {}

  /// Serves all of them, in the order of their arrival.
  /// @throws std::logic_error  where a request does not enter in 10 s of an empty machine
  served run(std::span<const arrival> all) {
    for (const arrival& a : all) guests_.emplace_back(setting_, a, guests_.size());
    std::size_t next = 0;
    while (gone_ < guests_.size()) {
      for (; next < guests_.size() && guests_[next].arrives_ns <= machine_.now_ns(); ++next) {
        queue_.push_back(next);
        decides_ns_ = 0;
      }
      end_tokens();
      if (machine_.now_ns() >= decides_ns_) decide();
      move();
      const std::uint64_t until =
          next < guests_.size() ? guests_[next].arrives_ns : pulseinfer::detail::no_deadline;
      step(until);
    }
    return result();
  }

  [[nodiscard]] const Policy& admission() const { return admission_; }

 private:
  struct piece {
    std::size_t guest;  ///< none: blocks that several of them have filled
    std::int32_t layer;
    std::int32_t units;
  };
  struct under_way {
    piece what;
    pulseinfer::flight_id flight;
    std::optional<pulseinfer::sequence_id> stored_as = {};  ///< none of loads and prefills
    double prefill_s = 0;
  };
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  static constexpr std::int32_t units_of_new_blocks = 32;

  static setting sized(setting s, const serving_options& o) {
    s.streams = o.most_streams;
    return s;
  }
  [[nodiscard]] double now_seconds() const { return 1e-9 * static_cast<double>(machine_.now_ns()); }

  // Who decodes.

  void end_tokens() {
    if (scheduler_.counts()[pulseinfer::layer_state::done] == 0) return;
    for (std::size_t i = 0; i < decoding_.size();) {
      guest& g = guests_[decoding_[i]];
      if (scheduler_.state_of(g.id) != pulseinfer::layer_state::done) {
        ++i;
        continue;
      }
      stream& s = at(g.id);
      end_step(s);
      ++tokens_;
      streams_of_tokens_ += static_cast<double>(decoding_.size());
      if (s.step % block_tokens == 0) fill_block(g);
      if (s.step < g.output_tokens) {
        scheduler_.restart(g.id);
        ++i;
        continue;
      }
      (void)scheduler_.cancel(g.id);
      g.place = guest::where::gone;
      ++gone_;
      decides_ns_ = 0;  // there is memory again
      decoding_.erase(decoding_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  /// A block is full in all layers; where others of its layer are in the store it follows.
  void fill_block(const guest& g) {
    for (std::size_t l = 0; l < unsaved_.size(); ++l) {
      unsaved_[l] += g.away(l);
      if (unsaved_[l] < units_of_new_blocks) continue;
      unsaved_[l] -= units_of_new_blocks;
      pieces_.push_back({none, static_cast<std::int32_t>(l), units_of_new_blocks});
    }
  }
  [[nodiscard]] lack lacks(std::int32_t request, std::int32_t step, std::int32_t layer) const {
    return guests_[static_cast<std::size_t>(of_row_[static_cast<std::size_t>(request)])].lacks(
        setting_, step, layer);
  }
  void begin(std::size_t which) {
    guest& g = guests_[which];
    stream& s = open(g.layer_bytes(setting_));
    g.id = s.id;
    g.place = guest::where::decoding;
    of_row_.resize(static_cast<std::size_t>(options_.most_streams));
    of_row_[static_cast<std::size_t>(s.id.index)] = which;
    decoding_.push_back(which);
    waits_.push_back(now_seconds() - 1e-9 * static_cast<double>(g.arrives_ns));
  }

  // Who enters.

  void decide() {
    const double now = now_seconds();
    decides_ns_ =
        machine_.now_ns() + static_cast<std::uint64_t>(std::llround(1e9 * options_.decide_seconds));
    for (std::size_t l = 0; l < late_bytes_.size(); ++l) {
      (void)activity_.record(static_cast<std::int32_t>(l),
                             {.recalled_bytes = std::llround(std::exchange(late_bytes_[l], 0.0))},
                             now);
    }
    activity_.read(active_, now);
    pulseinfer::link_snapshot link = real(monitor_.snapshot(now));
    link.recalls.queued_bytes += std::llround(loads_left_);  // let in, and kept here
    admission_.observe(link, active_);
    double held = 0, fixed = 0, context = 0;
    for (std::size_t i = first_; i < guests_.size(); ++i) {
      const guest& g = guests_[i];
      if (g.place == guest::where::gone) {
        first_ += i == first_ ? 1 : 0;
        continue;
      }
      if (g.arrives_ns > machine_.now_ns()) break;
      if (g.place != guest::where::queued) held += g.held_bytes(setting_);
      fixed += g.fixed_bytes(setting_);
      context += g.context_bytes(setting_) - g.hot_bytes(setting_);
    }
    most_held_ = std::max(most_held_, held);
    if constexpr (requires { admission_.observe_memory({}); }) {
      admission_.observe_memory({.capacity_bytes = std::llround(std::max(0.0, free_bytes_ - fixed)),
                                 .context_bytes = std::llround(context)});
    }
    double free = free_bytes_ - held;
    while (!queue_.empty() &&
           decoding_.size() + arriving_ < static_cast<std::size_t>(options_.most_streams)) {
      const double took = admit(guests_[queue_.front()], queue_.front(), free, now);
      if (took < 0) break;
      free -= took;
      queue_.pop_front();
    }
    if (!queue_.empty()) make_room();
  }
  /// What it takes of HBM; negative: it does not enter now.
  double admit(guest& g, std::size_t which, double free, double now) {
    double offloads = 0;
    for (std::int32_t l = 0; l < setting_.model.layers; ++l) {
      offloads += admission_.offload_share(l);
    }
    const double beside = offloads > 0 ? g.fixed_bytes(setting_) : g.digest_bytes(setting_);
    // A recomputation begins when the device has prefilled what it was given before.
    const std::int64_t stored_tokens = std::int64_t{g.stored} * block_tokens;
    const pulseinfer::admission_answer answer = admission_.admit(
        {.context_bytes = std::llround(g.context_bytes(setting_)),
         .device_bytes_free = std::llround(std::max(0.0, free - beside)),
         .load_bytes = std::llround(setting_.model.layers * g.stored * setting_.unit_bytes()),
         .load_tokens = stored_tokens,
         .recompute_s_per_token =
             g.stored > 0
                 ? seconds_of_token() + prefill_left_s_ / static_cast<double>(stored_tokens)
                 : 0,
         .waited_s = now - 1e-9 * static_cast<double>(g.arrives_ns)},
        placement_);
    const bool enters = answer.verdict != pulseinfer::admission_verdict::defer;
    if (enters) g.plan(placement_);
    const double takes = enters ? g.held_bytes(setting_) : 0;
    if (!enters || takes > free) {
      ++deferred_;
      // With the machine to itself, for longer than any policy lets it wait.
      const double waited = now - 1e-9 * static_cast<double>(g.arrives_ns);
      if (!held_by_nobody()) others_s_ = now;
      if (waited > 10 && now - others_s_ > 10) {
        throw std::logic_error("serving: a request does not enter though nothing else is there");
      }
      return -1;
    }
    g.place = guest::where::arriving;
    ++arriving_;
    if (answer.verdict == pulseinfer::admission_verdict::recompute) {
      ++recomputed_;
      recomputed_tokens_ += stored_tokens;
      prefill(which, stored_tokens + g.new_tokens);
    } else {
      const bool whole = std::all_of(placement_.begin(), placement_.end(),
                                     [](double share) { return share == 0; });
      ++(whole ? admitted_whole_ : admitted_placed_);
      for (std::int32_t l = 0; l < setting_.model.layers; ++l) load(which, l, g.stored);
      prefill(which, g.new_tokens);
    }
    for (std::int32_t l = 0; l < setting_.model.layers; ++l) {
      // Its keys and values are written to HBM as they come.
      machine_.for_each({1, 1}, {},
                        static_cast<std::uint64_t>(std::llround(
                            scale_of(setting_) * (g.blocks - g.stored) * setting_.unit_bytes())),
                        nothing{}, arrivals_);
      offload(which, l, g.layers[static_cast<std::size_t>(l)].leaving);
    }
    return takes;
  }
  /// What a prefill takes for a token.
  [[nodiscard]] double seconds_of_token() const {
    return setting_.model.weight_bytes() / setting_.ranks / options_.flops;
  }
  /// Prefills so many tokens on this device, between the layers of those who decode: a layer of 128
  /// tokens at a time.
  void prefill(std::size_t which, std::int64_t tokens) {
    if (tokens == 0) return;
    const double seconds = static_cast<double>(tokens) * seconds_of_token();
    prefill_left_s_ += seconds;
    constexpr std::int64_t at_once = 128;
    for (; tokens > 0; tokens -= at_once) {
      const double n = static_cast<double>(std::min(tokens, at_once));
      for (std::int32_t l = 0; l < setting_.model.layers; ++l) {
        busy(n * seconds_of_token() / setting_.model.layers, arrivals_);
      }
    }
    ++guests_[which].pieces;
    under_way_.push_back({.what = {which, 0, 0},
                          .flight = flights_.board.add(arrivals_).value(),
                          .prefill_s = seconds});
  }
  /// Keeps the device from all else.
  void busy(double seconds, backend::stream& on) {
    const double bytes =
        seconds * setting_.machine.profile.hbm_bytes_per_second * scale_of(setting_);
    machine_.for_each({1, 1}, {}, static_cast<std::uint64_t>(std::llround(bytes)), nothing{}, on);
  }
  [[nodiscard]] bool held_by_nobody() const { return decoding_.empty() && arriving_ == 0; }

  /// Somebody waits for memory: those who have more than the policy now grants give it up.
  void make_room() {
    for (const std::size_t which : decoding_) {
      guest& g = guests_[which];
      for (std::int32_t l = 0; l < setting_.model.layers; ++l) {
        const std::int32_t more = g.give_up(l, admission_.offload_share(l));
        if (more > 0) offload(which, l, more);
      }
    }
  }

  // What is stored, and what is loaded.

  void offload(std::size_t which, std::int32_t layer, std::int32_t units) {
    cut(pieces_, {which, layer, units}, carrier::store_units);
  }
  void load(std::size_t which, std::int32_t layer, std::int32_t units) {
    const std::int32_t rows = std::max(1, carrier::store_units / row_units());
    loads_left_ += units * setting_.unit_bytes();
    cut(loads_, {which, layer, units}, std::min(rows, options_.most_streams) * row_units());
  }
  [[nodiscard]] std::int32_t row_units() const {
    return static_cast<std::int32_t>(setting_.chosen());
  }
  void cut(std::deque<piece>& to, piece p, std::int32_t most) {
    for (std::int32_t units = p.units; units > 0; units -= most) {
      to.push_back({p.guest, p.layer, std::min(units, most)});
      ++guests_[p.guest].pieces;
    }
  }
  /// Brings blocks of a request as a recall of several rows does: their time is that of their bytes.
  [[nodiscard]] carrier::ticket loaded(const piece& p) {
    std::vector<std::int32_t> rows;
    for (std::int32_t units = p.units; units > 0; units -= row_units()) {
      rows.push_back(std::min(units, row_units()));
    }
    return carrier_.recall(p.layer, rows);
  }
  void move() {
    for (std::size_t i = 0; i < under_way_.size();) {
      if (flights_.board.poll(under_way_[i].flight) == pulseinfer::flight_state::under_way) {
        ++i;
        continue;
      }
      const under_way ended = under_way_[i];
      flights_.board.retire(ended.flight);
      under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(i));
      prefill_left_s_ -= ended.prefill_s;
      if (ended.stored_as) carrier_.stored(*ended.stored_as);
      if (ended.what.guest == none) continue;
      guest& g = guests_[ended.what.guest];
      if (ended.stored_as) g.left(ended.what.layer, ended.what.units);
      --g.pieces;
      if (g.place == guest::where::decoding) decides_ns_ = 0;
    }
    const auto has_place = [this] {
      return under_way_.size() < static_cast<std::size_t>(options_.stores);
    };
    // Admission has let them in.
    for (; !loads_.empty() && has_place(); loads_.pop_front()) {
      const piece& p = loads_.front();
      loads_left_ -= p.units * setting_.unit_bytes();
      loaded_bytes_ += p.units * setting_.unit_bytes();
      under_way_.push_back({p, flights_.board.add(loaded(p)).value()});
    }
    while (!pieces_.empty() && has_place()) {
      const piece p = pieces_.front();
      const double bytes = p.units * setting_.unit_bytes();
      if (!admission_.may_store(std::llround(bytes))) break;
      pieces_.pop_front();
      carrier::outgoing out = carrier_.store(p.layer, p.units);
      stored_bytes_ += bytes;
      under_way_.push_back({p, flights_.board.add(std::move(out.ticket)).value(), out.sequence});
    }
    if (arriving_ == 0) return;
    for (std::size_t i = first_; i < guests_.size() && arriving_ > 0; ++i) {
      guest& g = guests_[i];
      if (g.place == guest::where::queued) break;
      if (g.place != guest::where::arriving || g.pieces > 0) continue;
      --arriving_;
      begin(i);
    }
  }

  // The machine.

  void step(std::uint64_t until) {
    const demand missing = [this](std::int32_t r, std::int32_t s, std::int32_t l) {
      return lacks(r, s, l);
    };
    pulseinfer::schedule_decision d = scheduler_.next(machine_.now_ns(), flights_);
    if (d.action == pulseinfer::schedule_action::idle) d.action = pulseinfer::schedule_action::wait;
    if (d.action != pulseinfer::schedule_action::wait) return act(d, missing);
    if (scheduler_.counts()[pulseinfer::layer_state::done] > 0 || gone_ == guests_.size()) return;
    recall_gathered();
    // Deferred requests and stores are asked about again at the next decision.
    if (!queue_.empty() || !pieces_.empty()) until = std::min(until, decides_ns_);
    until = std::min(until, d.until_ns);
    if (flights_.board.size() > 0) return flights_.board.sync_change(until);
    if (until <= machine_.now_ns() || until == pulseinfer::detail::no_deadline) return;
    rest(until);
  }
  /// Nothing is under way: the clock goes on.
  void rest(std::uint64_t until) {
    busy(1e-9 * static_cast<double>(until - machine_.now_ns()), idle_);
    machine_.sync(idle_);
  }
  /// In bytes of the machine that is meant.
  [[nodiscard]] pulseinfer::link_snapshot real(pulseinfer::link_snapshot s) const {
    const double scale = scale_of(setting_);
    for (pulseinfer::link_load* load : {&s.recalls, &s.stores}) {
      load->seconds_per_byte *= scale;
      load->queued_bytes = std::llround(static_cast<double>(load->queued_bytes) / scale);
    }
    return s;
  }

  served result() {
    served r;
    r.requests = static_cast<std::int64_t>(gone_);
    r.tokens = tokens_;
    r.end_ns = machine_.now_ns();
    const std::uint64_t first = guests_.empty() ? 0 : guests_.front().arrives_ns;
    r.seconds = 1e-9 * static_cast<double>(r.end_ns - first);
    const auto mean = [](const std::vector<double>& values) {
      double sum = 0;
      for (const double v : values) sum += v;
      return values.empty() ? 0 : sum / static_cast<double>(values.size());
    };
    r.tpot_seconds = mean(token_seconds_);
    r.p99_tpot_seconds = quantile(token_seconds_, 0.99);
    r.stall_seconds = mean(token_stalls_);
    r.p99_stall_seconds = quantile(token_stalls_, 0.99);
    r.wait_seconds = mean(waits_);
    r.p99_wait_seconds = quantile(waits_, 0.99);
    r.streams = tokens_ > 0 ? streams_of_tokens_ / static_cast<double>(tokens_) : 0;
    const pulseinfer::simulated_statistics did = machine_.statistics();
    const auto all = static_cast<double>(machine_.now_ns());
    r.recall_share = static_cast<double>(did.host_to_device.busy_ns) / all;
    r.store_share = static_cast<double>(did.device_to_host.busy_ns) / all;
    r.stored_bytes = stored_bytes_;
    r.recalled_bytes = recalled_bytes_;
    r.hbm_bytes = most_held_;
    r.loaded_bytes = loaded_bytes_;
    r.admitted_whole = admitted_whole_;
    r.admitted_placed = admitted_placed_;
    r.recomputed = recomputed_;
    r.recomputed_tokens = recomputed_tokens_;
    r.deferred = deferred_;
    r.schedule = scheduler_.statistics();
    return r;
  }

  serving_options options_;
  Policy admission_;
  backend::stream arrivals_;
  backend::stream idle_;
  pulseinfer::layer_activity activity_;
  std::vector<double> active_, placement_, unsaved_;
  double free_bytes_;  ///< of HBM, for requests

  std::vector<guest> guests_;
  std::size_t first_ = 0, gone_ = 0, arriving_ = 0;
  std::deque<std::size_t> queue_;
  std::vector<std::size_t> decoding_, of_row_;
  std::deque<piece> pieces_, loads_;  ///< to be stored, and to be loaded
  double loads_left_ = 0;             ///< bytes of those
  double prefill_left_s_ = 0;
  std::vector<under_way> under_way_;
  std::uint64_t decides_ns_ = 0;
  double others_s_ = 0;  ///< when others were last seen by one who waits

  std::int64_t tokens_ = 0, deferred_ = 0;
  std::int64_t admitted_whole_ = 0, admitted_placed_ = 0, recomputed_ = 0, recomputed_tokens_ = 0;
  double streams_of_tokens_ = 0, stored_bytes_ = 0, loaded_bytes_ = 0, most_held_ = 0;
  std::vector<double> waits_;
};

}  // namespace simulate
