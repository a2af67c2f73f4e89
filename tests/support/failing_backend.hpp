// SPDX-License-Identifier: Apache-2.0
/// @file
/// A backend of which one call does something else first: it throws, breaks the stream, or calls
/// back into the test. One that says what became of an event says that it failed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"

namespace test {

/// The calls that can be made to fail.
enum class job { copy, copy_many, record, wait, kernel, row_kernel, task, poll };

inline constexpr std::pair<job, const char*> all_jobs[] = {
    {job::copy, "copy_async"}, {job::copy_many, "copy_many_async"},
    {job::record, "record"},   {job::wait, "enqueue_wait"},
    {job::kernel, "for_each"}, {job::row_kernel, "for_each_row"},
    {job::task, "host_async"}, {job::poll, "poll"},
};

/// Models `backend` as `Base` does, until the armed call comes.
template <class Base>
class failing_backend : public Base {
 public:
  using typename Base::event;
  using typename Base::stream;
  using typename Base::stream_ref;
  /// What the armed call does before it does what it should. The stream is null for host tasks.
  using action = std::function<void(const stream_ref*)>;

  explicit failing_backend(Base base) : Base(std::move(base)), plan_(std::make_shared<plan>()) {}

  /// The `nth` call of `which` from now on, the first being 1. One call is armed at a time, while
  /// nothing is under way.
  void arm(job which, int nth, action what) {
    plan_->which = which;
    plan_->what = std::move(what);
    plan_->left.store(nth);
  }
  void arm_throw(job which, int nth) {
    arm(which, nth, [](const stream_ref*) {
      throw pulseinfer::device_error("failing_backend: failed on purpose");
    });
  }
  /// The nth poll from now on says that the event failed, after something else.
  void arm_poll(int nth, void (*first)()) {
    plan_->polled = first;
    arm(job::poll, nth, {});
  }
  /// True if the armed call has come.
  [[nodiscard]] bool has_struck() const { return plan_->left.load() <= 0; }

  void record(event& e, stream_ref s) {
    strike(job::record, &s);
    Base::record(e, s);
  }
  void enqueue_wait(const event& e, stream_ref s) {
    strike(job::wait, &s);
    Base::enqueue_wait(e, s);
  }
  void copy_async(void* destination, const void* source, std::size_t bytes,
                  pulseinfer::copy_direction direction, stream_ref s) {
    strike(job::copy, &s);
    Base::copy_async(destination, source, bytes, direction, s);
  }
  void copy_many_async(std::span<const pulseinfer::copy_span> copies,
                       pulseinfer::copy_direction direction, stream_ref s) {
    strike(job::copy_many, &s);
    Base::copy_many_async(copies, direction, s);
  }
  [[nodiscard]] pulseinfer::event_state poll(const event& e) const noexcept {
    if (!is_struck(job::poll)) return Base::poll(e);
    if (plan_->polled) plan_->polled();
    return pulseinfer::event_state::failed;
  }
  void host_async(std::span<const event* const> after, pulseinfer::host_task task,
                  pulseinfer::host_cost cost) {
    strike(job::task, nullptr);
    Base::host_async(after, task, cost);
  }
  template <class Op>
  void for_each(const pulseinfer::launch_shape& shape, const pulseinfer::launch_limits& limits,
                std::uint64_t bytes, const Op& op, stream_ref s) {
    strike(job::kernel, &s);
    Base::for_each(shape, limits, bytes, op, s);
  }
  template <class Op>
  void for_each_row(std::int64_t rows, const pulseinfer::launch_limits& limits, std::uint64_t bytes,
                    const Op& op, stream_ref s) {
    strike(job::row_kernel, &s);
    Base::for_each_row(rows, limits, bytes, op, s);
  }

 private:
  struct plan {
    job which = job::copy;
    std::atomic<int> left{0};
    action what;
    void (*polled)() = nullptr;
  };
  [[nodiscard]] bool is_struck(job which) const noexcept {
    if (which != plan_->which || plan_->left.load() <= 0) return false;
    return plan_->left.fetch_sub(1) == 1;
  }
  void strike(job which, const stream_ref* s) {
    if (is_struck(which)) plan_->what(s);
  }

  std::shared_ptr<plan> plan_;
};

}  // namespace test
