// SPDX-License-Identifier: Apache-2.0
/// @file
/// An engine that decodes on a simulated machine: the library's layer scheduler says which requests
/// run, its transfer engine brings what they lack, a kernel of so many bytes stands for a layer.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "carrier.hpp"
#include "pulseinfer/flight_board.hpp"
#include "pulseinfer/layer_scheduler.hpp"
#include "pulseinfer/link_monitor.hpp"
#include "pulseinfer/trace.hpp"

namespace simulate {

/// What is a system's own way to decode; what it reads and recalls stands in the setting.
struct policy {
  std::int32_t max_groups = 64;
  carriage moves;
};

struct decoded {
  double tpot_seconds = 0;   ///< mean over streams, without the first steps
  double stall_seconds = 0;  ///< a token: how long its next layer was not runnable
  double link_share = 0;     ///< busy, of all the time
  double device_share = 0;
  double recalled_bytes = 0;  ///< real ones, a step
  std::int64_t layers_run = 0;
  std::int64_t batches = 0;
  std::int32_t groups = 0;  ///< planned at the end
  std::uint64_t end_ns = 0;
  std::vector<std::pair<double, double>> link_use;  ///< time, busy share of the last half ms
  std::vector<double> token_seconds;  ///< [steps - 1][streams], in the order in which they ended
  std::vector<double> token_stalls;   ///< likewise
};

/// A machine with streams that decode on it, layer by layer; who comes and goes is others' business.
class engine {
 public:
  using backend = pulseinfer::simulated_backend;
  /// `lacks(request, step, layer)`
  using demand = std::function<lack(std::int32_t, std::int32_t, std::int32_t)>;

  /// Of at most `s.streams` streams at a time.
  engine(const setting& s, const policy& how, double window_seconds,
         pulseinfer::trace* trace = nullptr, std::int32_t stores = 0)
      : setting_(s),
        machine_(pulseinfer::timed{scaled(s)}),
        work_(s.work()),
        monitor_({.window_s = window_seconds}),
        carrier_(machine_, s, moves_of(s, how.moves), &monitor_, stores,
                 equipment_of(s, how.moves)),
        scheduler_({.max_requests = s.streams,
                    .layers = s.model.layers,
                    .max_groups = how.max_groups,
                    .max_flights = flights_of(s, stores),
                    .work = work_,
                    .speeds = speeds_of(s, how.moves)}),
        flights_(machine_, flights_of(s, stores), trace),
        compute_(machine_.make_stream(pulseinfer::stream_priority::normal)),
        streams_(static_cast<std::size_t>(s.streams)),
        late_bytes_(static_cast<std::size_t>(s.model.layers)) {
    flights_.landed = [this](pulseinfer::request_id r, std::uint64_t ns) { at(r).ready_ns = ns; };
  }

  [[nodiscard]] const pulseinfer::link_monitor& monitor() const { return monitor_; }

 protected:
  struct stream {
    pulseinfer::request_id id;
    double bytes = 0;  ///< that a layer reads of it
    std::int32_t step = 0;
    std::uint64_t chosen_ns = 0, ready_ns = 0, began_ns = 0, first_ns = 0, last_ns = 0;
    double stall_seconds = 0;
  };

  /// Flights of the board, of which something is noted when they have ended.
  class flights {
   public:
    flights(backend b, std::int32_t most, pulseinfer::trace* trace)
        : board(b, most, pulseinfer::landing::complete),
          machine_(b),
          trace_(trace),
          notes_(static_cast<std::size_t>(most)) {}

    [[nodiscard]] pulseinfer::flight_state poll(pulseinfer::flight_id id) const noexcept {
      return board.poll(id);
    }
    void retire(pulseinfer::flight_id id) noexcept {
      note& n = of(id);
      const std::uint64_t now = machine_.now_ns();
      for (const pulseinfer::request_id r : n.waiting) landed(r, now);
      n.waiting.clear();
      if (trace_ != nullptr) {
        const bool moves = board.find(id) != nullptr;
        const std::uint64_t begin = std::max(n.begin_ns, moves ? 0 : computed_ns_);
        trace_->add(moves ? "link" : "device",
                    (moves ? "recall, layer " : "layer ") + std::to_string(n.layer), begin, now,
                    moves ? "units" : "requests", n.count);
        if (!moves) computed_ns_ = now;
      }
      board.retire(id);
    }
    void noted(pulseinfer::flight_id id, std::int32_t layer, std::int64_t count,
               std::vector<pulseinfer::request_id> waiting) {
      of(id) = {machine_.now_ns(), layer, count, std::move(waiting)};
    }

    std::function<void(pulseinfer::request_id, std::uint64_t)> landed;
    pulseinfer::flight_board<backend> board;

   private:
    struct note {
      std::uint64_t begin_ns = 0;
      std::int32_t layer = 0;
      std::int64_t count = 0;
      std::vector<pulseinfer::request_id> waiting;
    };
    [[nodiscard]] note& of(pulseinfer::flight_id id) {
      return notes_[static_cast<std::size_t>(static_cast<std::int32_t>(id))];
    }
    backend machine_;
    pulseinfer::trace* trace_;
    std::vector<note> notes_;
    std::uint64_t computed_ns_ = 0;
  };

  struct nothing {
    void operator()(std::int64_t, std::int64_t) const {}
  };

  /// At a time: of each group a batch and two recalls, and there may be more groups than planned.
  static std::int32_t flights_of(const setting& s, std::int32_t stores) {
    return 8 * std::min(s.streams, 16) + 3 * std::max(s.streams - 16, 0) + 16 + stores;
  }
  [[nodiscard]] stream& at(pulseinfer::request_id r) {
    return streams_[static_cast<std::size_t>(r.index)];
  }
  /// How its recalls go: where the link is what takes long, it is not spent on a call for each unit,
  /// though a few units would be there sooner.
  static carriage moves_of(const setting& s, carriage how) {
    const pulseinfer::hardware_profile& p = s.machine.profile;
    const pulseinfer::layer_work w = s.work();
    const double link = s.streams * w.recall_bytes / recall_speed(p);
    const double device = (w.weight_bytes + s.streams * w.request_bytes) / p.hbm_bytes_per_second;
    if (how.way == pulseinfer::transfer_way::automatic && w.known_ahead > 0 &&
        link > 1.2 * device) {
      how.way = pulseinfer::transfer_way::staged;
    }
    return how;
  }
  /// What the scheduler plans with; how long a recall takes to begin is measured on the machine.
  static pulseinfer::step_speeds speeds_of(const setting& s, const carriage& how) {
    const pulseinfer::hardware_profile& p = s.machine.profile;
    const auto seconds = [](std::uint64_t ns) { return 1e-9 * static_cast<double>(ns); };
    const double busy = seconds(p.copy_busy_ns);
    return {.device_bytes_per_second = p.hbm_bytes_per_second,
            .link_bytes_per_second = recall_speed(p),
            .launch_seconds = kernels_of_layer * seconds(p.kernel_launch_ns),
            .recall_seconds = std::max(0.0, recall_start_seconds(s, how) - busy),
            .recall_busy_seconds = busy};
  }

  /// What is known a layer ahead is not needed before all streams have run a layer or two.
  [[nodiscard]] double lead_seconds() const {
    const pulseinfer::hardware_profile& p = setting_.machine.profile;
    const double n = std::max(1, scheduler_.counts().total());
    return 2 * std::max(n * work_.recall_bytes / recall_speed(p),
                        (work_.weight_bytes + n * work_.request_bytes) / p.hbm_bytes_per_second);
  }

  /// A stream that has nothing yet, and will decode.
  stream& open(double bytes) {
    const pulseinfer::request_id id = scheduler_.add({.bytes = bytes}).value();
    stream& s = at(id) = {};
    s.id = id;
    s.bytes = bytes;
    return s;
  }
  /// Notes a token of a stream that has run all its layers.
  void end_step(stream& s) {
    const std::uint64_t now = machine_.now_ns();
    if (++s.step <= warm_steps_) {
      s.first_ns = now;
    } else {
      token_seconds_.push_back(1e-9 * static_cast<double>(now - s.last_ns));
      token_stalls_.push_back(s.stall_seconds);
    }
    s.last_ns = now;
    s.stall_seconds = 0;
  }
  void act(const pulseinfer::schedule_decision& d, const demand& lacks) {
    switch (d.action) {
      case pulseinfer::schedule_action::select:
        select(d, lacks);
        break;
      case pulseinfer::schedule_action::run:
        recall_gathered();
        compute(d);
        break;
      case pulseinfer::schedule_action::wait:
        if (early_.empty()) {
          flights_.board.sync_change(d.until_ns);
        } else {
          if (auto* const late = late_of(early_.front())) late->sync_submitted();
          recall_gathered();
        }
        break;
      case pulseinfer::schedule_action::late:
        throw std::logic_error("simulate: a recall did not bring everything");
      default:
        break;
    }
  }
  void compute(const pulseinfer::schedule_decision& d) {
    double read = work_.weight_bytes;
    for (const pulseinfer::request_id r : d.requests) {
      stream& s = at(r);
      read += s.bytes;
      if (s.ready_ns > s.chosen_ns) {
        s.stall_seconds += 1e-9 * static_cast<double>(s.ready_ns - s.chosen_ns);
      }
    }
    const double bytes = scale_of(setting_) * read / kernels_of_layer;
    for (std::int32_t k = 0; k < kernels_of_layer; ++k) {
      machine_.for_each({1, 1}, {}, static_cast<std::uint64_t>(std::llround(bytes)), nothing{},
                        compute_);
    }
    const double now = 1e-9 * static_cast<double>(machine_.now_ns());
    link_use_.emplace_back(now, monitor_.snapshot(now).recalls.utilisation);
    const pulseinfer::flight_id flight = flights_.board.add(compute_).value();
    flights_.noted(flight, d.layer, static_cast<std::int64_t>(d.requests.size()), {});
    scheduler_.issued(d.batch, flight);
  }
  void select(const pulseinfer::schedule_decision& d, const demand& lacks) {
    const std::vector<pulseinfer::request_id> all(d.requests.begin(), d.requests.end());
    std::vector<pulseinfer::request_id> waiting;
    std::vector<std::int32_t> units;
    const double unit = setting_.unit_bytes();
    for (const pulseinfer::request_id id : all) {
      stream& s = at(id);
      s.chosen_ns = machine_.now_ns();
      const lack here = lacks(id.index, s.step, d.layer);
      // Of the first layer nothing is known before.
      const std::int32_t late = here.late + (d.layer == 0 ? here.ahead : 0);
      const std::int32_t ahead = d.layer == 0 ? 0 : here.ahead;
      late_bytes_[static_cast<std::size_t>(d.layer)] += unit * late;
      const auto outcome =
          scheduler_.selected(id, {.bytes = unit * late, .ahead_bytes = unit * ahead});
      if (outcome == pulseinfer::selected_outcome::recall_now) {
        waiting.push_back(id);
        units.push_back(late);
      }
    }
    const bool is_late = !waiting.empty();
    const auto late = is_late ? recall(d.layer, waiting, units, 0, 0) : pulseinfer::flight_id::none;
    early_recall early = early_of(d, lacks, late);
    if (early.ids.empty()) return;
    if (is_late && !link_is_full()) {
      early_.push_back(std::move(early));
    } else {
      recall_early(early);
    }
  }
  /// What is known of the layer behind one that selects, and what that one waits for.
  struct early_recall {
    pulseinfer::flight_id late = pulseinfer::flight_id::none;
    std::int32_t layer = 0;
    std::vector<pulseinfer::request_id> ids;
    std::vector<std::int32_t> units;
  };
  /// Whether the link, not the way of a group through its layers, is what takes long: it may not rest.
  [[nodiscard]] bool link_is_full() const {
    const std::int32_t n = std::max(1, scheduler_.counts().total());
    const pulseinfer::layer_seconds layer = pulseinfer::predict_layer(
        work_, scheduler_.options().speeds, n, std::min(n, scheduler_.planned_groups()));
    return layer.link >= layer.path;
  }
  /// What is known of the next layer goes behind what this one waits for, which would be gathered more
  /// slowly beside it.
  [[nodiscard]] early_recall early_of(const pulseinfer::schedule_decision& d, const demand& lacks,
                                      pulseinfer::flight_id late) {
    early_recall early{late, d.layer + 1, {}, {}};
    if (d.layer + 1 == setting_.model.layers) return early;
    for (const pulseinfer::request_id id : d.requests) {
      const std::int32_t ahead = lacks(id.index, at(id).step, d.layer + 1).ahead;
      if (ahead == 0) continue;
      early.ids.push_back(id);
      early.units.push_back(ahead);
    }
    return early;
  }
  /// Of those that run, the next layer is the one that is recalled for.
  void recall_early(const early_recall& early) {
    for (const bool runs : {true, false}) {
      std::vector<pulseinfer::request_id> ids;
      std::vector<std::int32_t> units;
      for (std::size_t i = 0; i < early.ids.size(); ++i) {
        const auto state = scheduler_.state_of(early.ids[i]);
        if ((state == pulseinfer::layer_state::running) != runs) continue;
        ids.push_back(early.ids[i]);
        units.push_back(early.units[i]);
      }
      if (!ids.empty()) (void)recall(early.layer, ids, units, 1, runs ? 0 : 1);
    }
  }
  [[nodiscard]] carrier::ticket* late_of(const early_recall& early) {
    return flights_.board.find(early.late);
  }
  /// What goes behind recalls that have been gathered by now, and what is for requests that run
  /// already: they went without those who are late.
  void recall_gathered() {
    std::erase_if(early_, [this](const early_recall& early) {
      const carrier::ticket* const late = late_of(early);
      const bool runs = std::any_of(early.ids.begin(), early.ids.end(), [this](const auto& id) {
        return scheduler_.state_of(id) == pulseinfer::layer_state::running;
      });
      if (!runs && late != nullptr && late->phase() == pulseinfer::transfer_phase::pending) {
        return false;
      }
      recall_early(early);
      return true;
    });
  }
  pulseinfer::flight_id recall(std::int32_t layer, const std::vector<pulseinfer::request_id>& ids,
                               const std::vector<std::int32_t>& units, std::int32_t lead_layers,
                               std::int32_t layers_ahead) {
    std::int64_t count = 0;
    for (const std::int32_t n : units) count += n;
    const double bytes = setting_.unit_bytes() * static_cast<double>(count);
    recalled_bytes_ += bytes;
    const pulseinfer::flight_id flight =
        flights_.board.add(carrier_.recall(layer, units, lead_layers * lead_seconds())).value();
    flights_.noted(flight, layer, count, ids);
    scheduler_.recalling(ids, flight, machine_.now_ns(),
                         {.bytes = bytes, .layers_ahead = layers_ahead});
    return flight;
  }

  setting setting_;
  backend machine_;
  pulseinfer::layer_work work_;
  pulseinfer::link_monitor monitor_;
  carrier carrier_;
  pulseinfer::layer_scheduler scheduler_;
  flights flights_;
  backend::stream compute_;
  std::vector<stream> streams_;
  std::vector<early_recall> early_;  ///< that wait for a recall to be gathered
  std::vector<double> token_seconds_, token_stalls_;
  double recalled_bytes_ = 0;
  std::int32_t warm_steps_ = 1;     ///< of each stream, which are not noted
  std::vector<double> late_bytes_;  ///< [layers] real ones, of recalls that a layer waited for
  std::vector<std::pair<double, double>> link_use_;
};

/// All streams of a setting, token after token.
class decoder : public engine {
 public:
  decoder(const setting& s, const policy& how, pulseinfer::trace* trace = nullptr)
      : engine(s, how, 0.0005, trace) {}

  /// All streams decode `steps` tokens, of which the first `warm` do not count. Those that have them
  /// decode on, uncounted, until the last one has: nobody has the machine to itself at the end.
  decoded run(std::int32_t steps, const demand& lacks, std::int32_t warm = 1) {
    warm_steps_ = warm;
    for (std::int32_t i = 0; i < setting_.streams; ++i) (void)open(work_.request_bytes);
    std::int32_t left = setting_.streams;
    while (left > 0) {
      left -= end_steps(steps);
      if (left <= 0) break;
      const pulseinfer::schedule_decision d = scheduler_.next(machine_.now_ns(), flights_);
      // Who has just run the last layer begins the next step before anybody waits.
      const bool waits = d.action == pulseinfer::schedule_action::wait;
      if (waits && scheduler_.counts()[pulseinfer::layer_state::done] > 0) continue;
      act(d, lacks);
    }
    return result(steps);
  }

 private:
  std::int32_t end_steps(std::int32_t steps) {
    if (scheduler_.counts()[pulseinfer::layer_state::done] == 0) return 0;
    std::int32_t ended = 0;
    for (stream& s : streams_) {
      if (scheduler_.state_of(s.id) != pulseinfer::layer_state::done) continue;
      if (s.step < steps) {
        end_step(s);
        ended += s.step == steps ? 1 : 0;
      } else {
        ++s.step;
      }
      scheduler_.restart(s.id);
    }
    return ended;
  }

  decoded result(std::int32_t steps) {
    decoded r;
    for (const stream& s : streams_) {
      r.tpot_seconds += 1e-9 * static_cast<double>(s.last_ns - s.first_ns) / (steps - warm_steps_) /
                        setting_.streams;
    }
    for (const double stall : token_stalls_) {
      r.stall_seconds += stall / static_cast<double>(token_stalls_.size());
    }
    const auto all = static_cast<double>(machine_.now_ns());
    const pulseinfer::simulated_statistics did = machine_.statistics();
    r.link_share = static_cast<double>(did.host_to_device.busy_ns) / all;
    r.device_share = static_cast<double>(did.kernels.busy_ns) / all;
    r.recalled_bytes = recalled_bytes_ / steps;
    r.layers_run = scheduler_.statistics().layers_run;
    r.batches = scheduler_.statistics().batches;
    r.groups = scheduler_.planned_groups();
    r.end_ns = machine_.now_ns();
    r.link_use = link_use_;
    r.token_seconds = token_seconds_;
    r.token_stalls = token_stalls_;
    return r;
  }
};

/// Misses as the setting says, see `even_lack`.
inline decoder::demand even_misses(const setting& s) {
  return [s](std::int32_t request, std::int32_t step, std::int32_t layer) {
    return even_lack(s, request, step, layer);
  };
}

}  // namespace simulate
