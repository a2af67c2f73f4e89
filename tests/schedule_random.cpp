// SPDX-License-Identifier: Apache-2.0
/// @file
/// Random schedules on the backend under test: requests enter, are interrupted, preempted and
/// cancelled in any state, recalls and batches fail, pages are short. In the end everybody who was
/// not cancelled has run all of his layers, in order. Include the backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/flight_board.hpp"
#include "pulseinfer/layer_scheduler.hpp"
#include "support/rounds.hpp"

namespace {

using backend = test::backend;
using pulseinfer::flight_id;
using pulseinfer::flight_state;
using pulseinfer::layer_scheduler;
using pulseinfer::layer_state;
using pulseinfer::leave_outcome;
using pulseinfer::request_id;
using pulseinfer::schedule_action;
using pulseinfer::selected_outcome;

constexpr std::int32_t max_requests = 12;
constexpr std::int32_t max_flights = 128;
constexpr std::int32_t flights_per_request = 6;

struct nothing {
  void operator()(std::int64_t, std::int64_t) const {}
};

/// Flights of the backend, some of which fail when they end; knows whom each one carries.
class doomed_flights {
 public:
  explicit doomed_flights(backend machine) : board_(machine, max_flights) {}

  flight_id add(backend::stream_ref stream, bool fails, const std::vector<request_id>& who) {
    const flight_id id = board_.add(stream).value();
    const auto i = static_cast<std::size_t>(static_cast<std::int32_t>(id));
    fails_[i] = fails;
    who_[i] = who;
    for (const request_id r : who) ++carried[static_cast<std::size_t>(r.index)];
    return id;
  }
  flight_state poll(flight_id id) const noexcept {
    const flight_state state = board_.poll(id);
    const auto i = static_cast<std::size_t>(static_cast<std::int32_t>(id));
    return state == flight_state::landed && fails_[i] ? flight_state::failed : state;
  }
  void retire(flight_id id) noexcept {
    const auto i = static_cast<std::size_t>(static_cast<std::int32_t>(id));
    for (const request_id r : who_[i]) --carried[static_cast<std::size_t>(r.index)];
    board_.retire(id);
  }
  void sync_change(std::uint64_t until_ns) { board_.sync_change(until_ns); }
  [[nodiscard]] std::int32_t size() const { return board_.size(); }

  std::array<int, max_requests> carried = {};  ///< flights of each request

 private:
  pulseinfer::flight_board<backend> board_;
  std::array<bool, max_flights> fails_ = {};
  std::array<std::vector<request_id>, max_flights> who_ = {};
};

class random_run {
 public:
  /// @param of_any_size  how many requests, layers and pages there are is drawn, too
  random_run(backend machine, std::uint64_t seed, bool of_any_size)
      : machine_(machine),
        random_(seed),
        flights_(machine),
        requests_(of_any_size ? one_to(max_requests) : max_requests),
        layers_(of_any_size ? one_to(5) : 5),
        pages_(of_any_size ? (random_.one_in(5) ? 0 : one_to(24)) : 24),
        scheduler_({.max_requests = requests_,
                    .layers = layers_,
                    .max_groups = one_to(4),
                    .max_flights = max_flights,
                    .flights_per_request = flights_per_request,
                    .batches_in_flight = one_to(3),
                    .max_wait_batches = of_any_size ? one_to(44) : 3 + one_to(40),
                    .pages = pages_,
                    .work = {.weight_bytes = 1e5, .request_bytes = 1e5, .recall_bytes = 1e3}}),
        host_(machine, 4096),
        device_(machine, 4096),
        compute_(machine.make_stream(pulseinfer::stream_priority::normal)),
        link_(machine.make_stream(pulseinfer::stream_priority::high)) {}

  void run(std::int64_t operations) {
    calm_ = false;
    while (operations_ < operations) {
      while (random_.one_in(2)) disturb();
      turn();
    }
    calm_ = true;
    for (std::int64_t turns = 0; scheduler_.counts().total() > 0 && turns < 100'000; ++turns)
      turn();
    CHECK(scheduler_.counts().total() == 0);
    CHECK(flights_.size() == 0);
    CHECK(scheduler_.free_pages() == pages_);
    CHECK(wrong_ == 0);
    CHECK(entered_ == finished_ + cancelled_);
  }

  std::int64_t finished() const { return finished_; }

 private:
  /// What a request should be.
  struct model {
    request_id id;
    std::int32_t layer = 0;
    int steps_left = 0;
    bool next_selected = false;
    bool running = false;
    bool aside = false;  ///< was asked to be, and not to go on
    bool leaving = false;
  };

  template <class Holds>
  void expect(Holds holds) {
    if (!holds) ++wrong_;
  }
  bool chance(std::uint64_t n) { return !calm_ && random_.one_in(n); }
  std::int32_t one_to(std::int32_t most) { return 1 + up_to(most - 1); }
  std::int32_t up_to(std::int32_t most) {
    return static_cast<std::int32_t>(random_.below(static_cast<std::uint64_t>(most) + 1));
  }
  model& of(request_id id) { return *models_[static_cast<std::size_t>(id.index)]; }

  /// Something happens from outside.
  void disturb() {
    ++operations_;
    if (random_.one_in(2)) disturbed_ = static_cast<std::size_t>(up_to(requests_ - 1));
    const std::size_t i = disturbed_;  // the same one often, before anything is done about it
    if (!models_[i]) {
      const auto id = scheduler_.add({.pages = up_to(std::min(pages_, 5))});
      if (!id) return;
      expect(!models_[static_cast<std::size_t>(id->index)]);
      models_[static_cast<std::size_t>(id->index)] =
          model{.id = *id, .steps_left = 1 + static_cast<int>(random_.below(3))};
      ++entered_;
      return;
    }
    model& m = *models_[i];
    if (m.leaving) return;
    const layer_state state = scheduler_.state_of(m.id);
    switch (random_.below(6)) {
      case 0:
        if (scheduler_.cancel(m.id) == leave_outcome::at_once) {
          models_[i].reset();
        } else {
          m.leaving = true;
        }
        ++cancelled_;
        break;
      case 1:
        (void)scheduler_.preempt(m.id);
        m.aside = true;
        if (!m.running) m.next_selected = false;
        break;
      case 2:
      case 3:
        if (scheduler_.interrupt(m.id) != leave_outcome::not_running) m.aside = true;
        break;
      default:
        if (state == layer_state::parked || m.aside) resume(m);
        if (state == layer_state::recalling && random_.one_in(4)) scheduler_.fall_back(m.id);
    }
  }

  void resume(model& m) {
    scheduler_.resume(m.id);
    m.aside = false;
  }

  /// One decision, and what the engine does about it.
  void turn() {
    ++operations_;
    for (auto& m : models_) {
      if (m && !m->leaving && scheduler_.state_of(m->id) == layer_state::parked && calm_) {
        resume(*m);
      }
      if (!m || m->leaving || scheduler_.state_of(m->id) != layer_state::done) continue;
      m->next_selected = false;
      if (--m->steps_left > 0) {
        scheduler_.restart(m->id);
      } else {
        if (scheduler_.cancel(m->id) == leave_outcome::at_once) {
          m.reset();
        } else {
          m->leaving = true;
        }
        ++finished_;
      }
    }
    const auto d = scheduler_.next(machine_.now_ns(), flights_);
    look_at_batches();
    const std::vector<request_id> who(d.requests.begin(), d.requests.end());
    for (const request_id id : who) expect(models_[static_cast<std::size_t>(id.index)].has_value());
    if (wrong_ > 0) return;
    switch (d.action) {
      case schedule_action::release:
        for (const request_id id : who) {
          auto& m = models_[static_cast<std::size_t>(id.index)];
          if (m->leaving) m.reset();
        }
        break;
      case schedule_action::select:
        for (const request_id id : who) expect(of(id).layer == d.layer);
        select(who, d.layer);
        break;
      case schedule_action::recall:
        recall(who, 0);
        break;
      case schedule_action::late:
        for (const request_id id : who) answer(id);
        break;
      case schedule_action::run:
        run_batch(d, who);
        break;
      case schedule_action::wait:
        flights_.sync_change(d.until_ns);
        break;
      case schedule_action::idle:
        break;
    }
    check_books();
  }

  void select(const std::vector<request_id>& who, std::int32_t layer) {
    std::vector<request_id> recalling;
    for (const request_id id : who) {
      const bool recalls = random_.one_in(2);
      const auto outcome = scheduler_.selected(
          id, {.bytes = recalls ? 1000.0 : 0.0,
               .pages = up_to(random_.one_in(9) ? pages_ : std::min(pages_, 5))});
      if (outcome == selected_outcome::recall_now) recalling.push_back(id);
    }
    recall(recalling, 0);
    if (layer + 1 < layers_ && random_.one_in(4)) {
      std::vector<request_id> ahead;
      for (const request_id id : who) {
        if (scheduler_.state_of(id) != layer_state::waiting) ahead.push_back(id);
      }
      recall(ahead, 1);
    }
  }
  /// Now and then with a deadline that is over at once.
  void recall(std::vector<request_id> who, std::int32_t ahead) {
    std::erase_if(who, [&](request_id id) { return is_full(id) && ahead > 0; });
    if (who.empty()) return;
    machine_.copy_async(device_.data(), host_.data(), 64 + random_.below(4000),
                        pulseinfer::copy_direction::host_to_device, link_);
    const std::uint64_t now = machine_.now_ns();
    scheduler_.recalling(who, flights_.add(link_, chance(20), who), now,
                         {.bytes = 1000,
                          .deadline_ns = chance(10) ? now : pulseinfer::detail::no_deadline,
                          .layers_ahead = ahead});
  }
  [[nodiscard]] bool is_full(request_id id) const {
    return flights_.carried[static_cast<std::size_t>(id.index)] >= flights_per_request - 3;
  }
  void answer(request_id id) {
    if (random_.one_in(8) && scheduler_.cancel(id) == leave_outcome::at_once) {
      models_[static_cast<std::size_t>(id.index)].reset();
      ++cancelled_;
    } else if (scheduler_.state_of(id) == layer_state::leaving) {
      of(id).leaving = true;
      ++cancelled_;
    } else if (random_.one_in(2) && !is_full(id)) {
      recall({id}, 0);
    } else {
      scheduler_.fall_back(id);
    }
  }
  void run_batch(const pulseinfer::schedule_decision& d, const std::vector<request_id>& who) {
    for (const request_id id : who) {
      expect(of(id).layer == d.layer && !of(id).running && !of(id).aside && !of(id).leaving);
      of(id).running = true;
    }
    if (chance(30)) {
      scheduler_.withdraw(d.batch);
      for (const request_id id : who) of(id).running = false;
      return;
    }
    machine_.for_each({1, 1}, {}, 1000 + random_.below(100'000), nothing{}, compute_);
    const bool fails = chance(25);
    scheduler_.issued(d.batch, flights_.add(compute_, fails, {}));
    batches_.push_back({who, d.layer, fails});
    std::vector<request_id> stored;
    std::vector<request_id> chosen;
    for (const request_id id : who) {
      if (random_.one_in(6) && !is_full(id)) stored.push_back(id);
      if (d.layer + 1 < layers_ && !of(id).next_selected && random_.one_in(3)) chosen.push_back(id);
    }
    if (!stored.empty()) {
      machine_.copy_async(host_.data(), device_.data(), 512,
                          pulseinfer::copy_direction::device_to_host, link_);
      scheduler_.hold(stored, flights_.add(link_, false, stored));
    }
    std::vector<request_id> recalling;
    for (const request_id id : chosen) {
      of(id).next_selected = true;
      if (scheduler_.selected(id, {.bytes = random_.one_in(2) ? 500.0 : 0.0}) ==
          selected_outcome::recall_now) {
        recalling.push_back(id);
      }
    }
    recall(recalling, 0);
  }
  /// Batches that have ended: their requests are a layer further, unless it failed.
  void look_at_batches() {
    for (std::size_t k = 0; k < batches_.size();) {
      const batch& b = batches_[k];
      bool has_ended = true;
      for (const request_id id : b.who) {
        const auto& m = models_[static_cast<std::size_t>(id.index)];
        if (m && m->id == id && !m->leaving && scheduler_.state_of(id) == layer_state::running &&
            scheduler_.layer_of(id) == b.layer) {
          has_ended = false;
        }
      }
      if (!has_ended || all_leave(b)) {
        if (!has_ended || scheduler_.batches_running() > 0) {
          ++k;
          continue;
        }
      }
      for (const request_id id : b.who) {
        auto& m = models_[static_cast<std::size_t>(id.index)];
        if (!m || !(m->id == id) || m->leaving) continue;
        m->running = false;
        if (!b.fails) {
          m->layer = (b.layer + 1) % layers_;
          m->next_selected = false;
        }
        expect(scheduler_.layer_of(id) == m->layer);
      }
      batches_.erase(batches_.begin() + static_cast<std::ptrdiff_t>(k));
    }
  }
  struct batch {
    std::vector<request_id> who;
    std::int32_t layer;
    bool fails;
  };
  [[nodiscard]] bool all_leave(const batch& b) {
    return std::all_of(b.who.begin(), b.who.end(), [&](request_id id) {
      const auto& m = models_[static_cast<std::size_t>(id.index)];
      return !m || !(m->id == id) || m->leaving;
    });
  }

  void check_books() {
    std::array<std::int32_t, pulseinfer::layer_states> counts = {};
    std::int32_t held = 0;
    for (const auto& m : models_) {
      if (!m) continue;
      ++counts[static_cast<std::size_t>(scheduler_.state_of(m->id))];
      held += scheduler_.pages_of(m->id);
    }
    expect(std::equal(counts.begin(), counts.end(), scheduler_.counts().of));
    expect(held + scheduler_.free_pages() == pages_);
  }

  backend machine_;
  pulseinfer::detail::random_source random_;
  doomed_flights flights_;
  std::int32_t requests_;
  std::int32_t layers_;
  std::int32_t pages_;
  layer_scheduler scheduler_;
  pulseinfer::pinned_buffer<std::byte, backend> host_;
  pulseinfer::device_buffer<std::byte, backend> device_;
  backend::stream compute_;
  backend::stream link_;
  std::array<std::optional<model>, max_requests> models_ = {};
  std::vector<batch> batches_;
  bool calm_ = false;
  std::size_t disturbed_ = 0;
  std::int64_t operations_ = 0;
  std::int64_t entered_ = 0;
  std::int64_t finished_ = 0;
  std::int64_t cancelled_ = 0;
  std::int64_t wrong_ = 0;
};

TEST_CASE("schedule random: whatever happens, everybody finishes and the books balance") {
  std::uint64_t seed = 1;
  std::int64_t configurations = 0;
  test::each_backend([&](const backend&) { ++configurations; });
  test::each_backend([&](backend machine) {
    CAPTURE(seed);
    random_run run(machine, seed++, false);
    run.run(test::rounds(6'000, 240'000) / configurations + 100);
    CHECK(run.finished() > 0);
  });
}

TEST_CASE("schedule random: schedules of any size, one request and one layer among them") {
  const bool has_virtual_time = !test::takes_threads<backend>;
  const auto schedules = has_virtual_time ? test::rounds(600, 100'000) : test::rounds(40, 1'000);
  std::int64_t configurations = 0;
  test::each_backend([&](const backend&) { ++configurations; });
  std::uint64_t seed = 1'000'000;
  std::int64_t finished = 0;
  test::each_backend([&](backend machine) {
    for (std::int64_t i = 0; i <= schedules / configurations; ++i) {
      CAPTURE(seed);
      random_run run(machine, seed++, true);
      run.run(60);
      finished += run.finished();
    }
  });
  CHECK(finished > schedules / 4);
}

}  // namespace
