// SPDX-License-Identifier: Apache-2.0
/// @file
/// The least engine that a layer scheduler can drive: computing is a kernel that reads bytes, a
/// recall is a copy over the link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/flight_board.hpp"
#include "pulseinfer/layer_scheduler.hpp"

namespace test {

/// What a request needs at a layer of a step.
struct layer_demand {
  std::int64_t recall_bytes = 0;  ///< known when the layer is selected
  std::int64_t ahead_bytes = 0;   ///< known when the layer before is selected
};

/// Requests that run a number of steps each, over a backend.
template <class Backend>
class layer_engine {
 public:
  static constexpr std::int64_t most_bytes = 1 << 20;  ///< of one recall

  layer_engine(Backend b, const pulseinfer::scheduler_options& options)
      : scheduler(options),
        board(b, options.max_flights),
        backend(b),
        options_(options),
        host_(b, static_cast<std::size_t>(most_bytes)),
        device_(b, static_cast<std::size_t>(most_bytes)),
        compute_(b.make_stream(pulseinfer::stream_priority::normal)),
        link_(b.make_stream(pulseinfer::stream_priority::high)) {}

  /// Runs `requests` for `steps` steps; `demand(request index, layer)` says what is recalled.
  /// @return the backend's ns from the first decision until the device is idle
  template <class Demand>
  std::uint64_t run(std::int32_t requests, std::int32_t steps, Demand demand) {
    steps_left_.assign(static_cast<std::size_t>(options_.max_requests), 0);
    ids_.clear();
    for (std::int32_t i = 0; i < requests; ++i) {
      ids_.push_back(scheduler.add().value());
      steps_left_[static_cast<std::size_t>(ids_.back().index)] = steps;
    }
    const std::uint64_t begin = backend.now_ns();
    while (true) {
      end_steps();
      const auto decision = scheduler.next(backend.now_ns(), board);
      if (decision.action == pulseinfer::schedule_action::idle && ids_.size() == done()) {
        if (ids_.empty()) break;
        continue;
      }
      // Who has just run the last layer begins the next step before anybody waits.
      if (decision.action == pulseinfer::schedule_action::wait && done() > 0) continue;
      act(decision, demand);
    }
    return backend.now_ns() - begin;
  }

  pulseinfer::layer_scheduler scheduler;
  pulseinfer::flight_board<Backend> board;
  Backend backend;
  std::vector<std::int32_t> batch_sizes;

 private:
  struct nothing {
    void operator()(std::int64_t, std::int64_t) const {}
  };

  [[nodiscard]] std::size_t done() const {
    return static_cast<std::size_t>(scheduler.counts()[pulseinfer::layer_state::done]);
  }
  void end_steps() {
    if (done() == 0) return;
    for (std::size_t k = 0; k < ids_.size();) {
      const pulseinfer::request_id id = ids_[k];
      if (scheduler.state_of(id) != pulseinfer::layer_state::done) {
        ++k;
      } else if (--steps_left_[static_cast<std::size_t>(id.index)] > 0) {
        scheduler.restart(id);
        ++k;
      } else {
        (void)scheduler.cancel(id);
        ids_.erase(ids_.begin() + static_cast<std::ptrdiff_t>(k));
      }
    }
  }
  template <class Demand>
  void act(const pulseinfer::schedule_decision& d, Demand& demand) {
    using pulseinfer::schedule_action;
    switch (d.action) {
      case schedule_action::select:
        select(d, demand);
        break;
      case schedule_action::run: {
        const auto n = static_cast<double>(d.requests.size());
        batch_sizes.push_back(static_cast<std::int32_t>(d.requests.size()));
        const auto bytes = static_cast<std::uint64_t>(options_.work.weight_bytes +
                                                      n * options_.work.request_bytes);
        backend.for_each({1, 1}, {}, bytes, nothing{}, compute_);
        scheduler.issued(d.batch, board.add(compute_).value());
        break;
      }
      case schedule_action::wait:
        board.sync_change(d.until_ns);
        break;
      case schedule_action::late:
        for (const auto id : d.requests) scheduler.fall_back(id);
        break;
      default:
        break;
    }
  }
  template <class Demand>
  void select(const pulseinfer::schedule_decision& d, Demand& demand) {
    const bool has_next = d.layer + 1 < options_.layers;
    std::int64_t bytes = 0;
    std::int64_t ahead = 0;
    std::vector<pulseinfer::request_id> all(d.requests.begin(), d.requests.end());
    std::vector<pulseinfer::request_id> waiting;
    for (const auto id : all) {
      const layer_demand now = demand(id.index, d.layer);
      if (has_next) ahead += demand(id.index, d.layer + 1).ahead_bytes;
      // Of the first layer nothing is known before.
      const std::int64_t rest = now.recall_bytes + (d.layer == 0 ? now.ahead_bytes : 0);
      const auto outcome = scheduler.selected(
          id, {.bytes = static_cast<double>(rest),
               .ahead_bytes = static_cast<double>(d.layer == 0 ? 0 : now.ahead_bytes)});
      if (outcome == pulseinfer::selected_outcome::recall_now) {
        waiting.push_back(id);
        bytes += rest;
      }
    }
    if (bytes > 0) recall(waiting, bytes, 0);
    if (ahead > 0) recall(all, ahead, 1);
  }
  void recall(const std::vector<pulseinfer::request_id>& ids, std::int64_t bytes,
              std::int32_t ahead) {
    backend.copy_async(device_.data(), host_.data(), static_cast<std::size_t>(bytes),
                       pulseinfer::copy_direction::host_to_device, link_);
    scheduler.recalling(ids, board.add(link_).value(), backend.now_ns(),
                        {.bytes = static_cast<double>(bytes), .layers_ahead = ahead});
  }

  pulseinfer::scheduler_options options_;
  pulseinfer::pinned_buffer<std::byte, Backend> host_;
  pulseinfer::device_buffer<std::byte, Backend> device_;
  typename Backend::stream compute_;
  typename Backend::stream link_;
  std::vector<pulseinfer::request_id> ids_;
  std::vector<std::int32_t> steps_left_;
};

}  // namespace test
