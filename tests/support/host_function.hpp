// SPDX-License-Identifier: Apache-2.0
/// @file
/// A host task made of a callable, for tests.
#pragma once

#include <atomic>
#include <functional>
#include <utility>

#include "pulseinfer/concepts.hpp"

namespace test {

/// Runs `function` as a host task and then says so. Stays where it is until the task has run.
class host_function {
 public:
  host_function() = default;
  explicit host_function(std::function<void()> function) : function_(std::move(function)) {}
  host_function(const host_function&) = delete;
  host_function& operator=(const host_function&) = delete;

  void set(std::function<void()> function) { function_ = std::move(function); }
  [[nodiscard]] pulseinfer::host_task task() { return {&run, this}; }
  [[nodiscard]] bool has_run() const { return has_run_.load(); }

 private:
  static void run(void* state) noexcept {
    auto* self = static_cast<host_function*>(state);
    self->function_();
    self->has_run_.store(true);
  }
  std::function<void()> function_;
  std::atomic<bool> has_run_{false};
};

}  // namespace test
