// SPDX-License-Identifier: Apache-2.0
/// @file
/// A simulated backend that leaves waits out: to show what each of them is for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/backend/simulated.hpp"

namespace test {

/// A wait: for a record on one stream, by another stream or by a host task. Streams are numbered in
/// the order in which they were made.
struct wait {
  static constexpr int task = -1;
  int from = 0;
  int to = 0;
  std::uint64_t bytes = 0;  ///< of the task, as declared
};

/// Models `backend`, but for the waits that `drop` names: they are not enqueued, and the task does
/// not wait.
class unordered_backend : public pulseinfer::simulated_backend {
  using base = pulseinfer::simulated_backend;

 public:
  using drop_rule = std::function<bool(const wait&)>;

  unordered_backend(const pulseinfer::fuzzed& mode, drop_rule drop)
      : base(mode), plan_(std::make_shared<plan>()) {
    plan_->drop = std::move(drop);
  }

  [[nodiscard]] int streams() const { return static_cast<int>(plan_->streams.size()); }
  [[nodiscard]] int dropped() const { return plan_->dropped; }

  [[nodiscard]] stream make_stream(pulseinfer::stream_priority priority) {
    stream made = base::make_stream(priority);
    plan_->streams.push_back(made);
    return made;
  }
  void record(event& e, stream_ref s) {
    plan_->recorded_on[&e] = number_of(s);
    base::record(e, s);
  }
  void enqueue_wait(const event& e, stream_ref s) {
    if (!drops(e, number_of(s), 0)) base::enqueue_wait(e, s);
  }
  void host_async(std::span<const event* const> after, pulseinfer::host_task task,
                  pulseinfer::host_cost cost) {
    std::vector<const event*> kept;
    for (const event* e : after) {
      if (!drops(*e, wait::task, cost.bytes)) kept.push_back(e);
    }
    base::host_async(kept, task, cost);
  }

 private:
  struct plan {
    drop_rule drop;
    std::vector<stream_ref> streams;
    std::map<const event*, int> recorded_on;
    int dropped = 0;
  };

  /// The last one that was made at this address.
  [[nodiscard]] int number_of(stream_ref s) const {
    int number = streams() - 1;
    while (number >= 0 && !(plan_->streams[static_cast<std::size_t>(number)] == s)) --number;
    return number;
  }
  [[nodiscard]] bool drops(const event& e, int to, std::uint64_t bytes) {
    const auto found = plan_->recorded_on.find(&e);
    if (found == plan_->recorded_on.end() || !plan_->drop) return false;
    const bool dropped = plan_->drop({found->second, to, bytes});
    plan_->dropped += dropped ? 1 : 0;
    return dropped;
  }

  std::shared_ptr<plan> plan_;
};
static_assert(pulseinfer::backend<unordered_backend>);

}  // namespace test
