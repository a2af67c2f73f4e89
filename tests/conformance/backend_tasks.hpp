// SPDX-License-Identifier: Apache-2.0
/// @file
/// What every backend keeps: host tasks.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "support/device_array.hpp"
#include "support/hold.hpp"
#include "support/host_function.hpp"

namespace conformance {

using pulseinfer::copy_direction;
using pulseinfer::stream_priority;

inline bool all_have_run(const std::vector<test::host_function>& tasks) {
  return std::all_of(tasks.begin(), tasks.end(), [](const auto& task) { return task.has_run(); });
}

template <class Backend>
void a_task_runs_after_its_events(Backend& backend) {
  constexpr std::size_t size = 1000;
  std::vector<typename Backend::stream> streams;
  std::vector<typename Backend::event> events;
  for (int i = 0; i < 2; ++i) {
    streams.push_back(backend.make_stream(stream_priority::normal));
    events.push_back(backend.make_event());
  }
  test::device_array<std::int32_t, Backend> in(backend, std::vector<std::int32_t>(size, 1),
                                               streams[0]);
  const test::pinned_array<std::int32_t, Backend> out(backend, 2 * size);
  out.fill(0);
  std::int32_t sum = 0;
  test::host_function add([&] { sum = std::accumulate(out.data(), out.data() + 2 * size, 0); });
  test::hold<Backend> held(backend, streams[1]);
  for (std::size_t i = 0; i < 2; ++i) {
    backend.copy_async(out.data() + i * size, in.data(), in.bytes(), copy_direction::device_to_host,
                       streams[i]);
    backend.record(events[i], streams[i]);
  }
  const typename Backend::event* const after[] = {&events[0], &events[1]};
  backend.host_async(after, add.task(), {.bytes = out.bytes()});
  held.release();
  backend.sync_until([&] { return add.has_run(); });
  CHECK(sum == static_cast<std::int32_t>(2 * size));
}

template <class Backend>
void a_task_without_events_runs(Backend& backend) {
  auto never_recorded = backend.make_event();
  const typename Backend::event* const after[] = {&never_recorded};
  test::host_function first([] {});
  test::host_function second([] {});
  backend.host_async({}, first.task(), {});
  backend.host_async(after, second.task(), {});
  backend.sync_until([&] { return first.has_run() && second.has_run(); });
  CHECK(first.has_run());
}

template <class Backend>
void tasks_hand_over_tasks(Backend& backend) {
  constexpr std::size_t count = 30;
  std::vector<test::host_function> chain(count);
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < count; ++i) {
    chain[i].set([&, i] {
      order.push_back(i);
      if (i + 1 < count) backend.host_async({}, chain[i + 1].task(), {});
    });
  }
  backend.host_async({}, chain[0].task(), {});
  backend.sync_until([&] { return all_have_run(chain); });
  std::vector<std::size_t> expected(count);
  std::iota(expected.begin(), expected.end(), std::size_t{0});
  CHECK((order == expected));
}

/// The road of a transfer: a task fills staging, enqueues its copy, and the next one follows.
template <class Backend>
void tasks_enqueue_work(Backend& backend) {
  constexpr std::size_t size = 500;
  constexpr std::size_t chunks = 6;
  auto stream = backend.make_stream(stream_priority::high);
  auto copied = backend.make_event();
  const test::pinned_array<std::int32_t, Backend> staging(backend, size);
  test::device_array<std::int32_t, Backend> out(backend, size * chunks);
  std::vector<test::host_function> fill(chunks);
  for (std::size_t i = 0; i < chunks; ++i) {
    fill[i].set([&, i] {
      staging.fill(static_cast<std::int32_t>(i));
      backend.copy_async(out.data() + i * size, staging.data(), staging.bytes(),
                         copy_direction::host_to_device, stream);
      backend.record(copied, stream);
      const typename Backend::event* const after[] = {&copied};
      if (i + 1 < chunks) backend.host_async(after, fill[i + 1].task(), {.bytes = 4 * size});
    });
  }
  backend.host_async({}, fill[0].task(), {.bytes = 4 * size});
  backend.sync_until([&] { return all_have_run(fill); });
  std::vector<std::int32_t> expected(size * chunks);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    expected[i] = static_cast<std::int32_t>(i / size);
  }
  CHECK((out.download(stream) == expected));
}

template <class Backend>
void more_tasks_than_workers_all_run(Backend& backend) {
  std::atomic<int> ran{0};
  std::vector<test::host_function> tasks(60);
  for (test::host_function& task : tasks) {
    task.set([&ran] { ++ran; });
    backend.host_async({}, task.task(), {.bytes = 1000});
  }
  backend.sync_until([&] { return all_have_run(tasks); });
  CHECK(ran == 60);
}

/// For a backend with one worker.
template <class Backend>
void ready_tasks_start_in_the_order_handed_over(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  backend.record(event, stream);
  backend.sync(event);
  const typename Backend::event* const after[] = {&event};
  constexpr std::size_t count = 20;
  std::vector<std::size_t> order;
  std::vector<test::host_function> tasks(count);
  for (std::size_t i = 0; i < count; ++i) {
    tasks[i].set([&order, i] { order.push_back(i); });
    const std::span<const typename Backend::event* const> none;
    backend.host_async(i % 2 == 0 ? none : std::span(after), tasks[i].task(), {});
  }
  backend.sync_until([&] { return all_have_run(tasks); });
  CHECK(order.size() == count);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

/// `make()` gives a backend that nobody else has a copy of.
template <class Make>
void the_last_backend_runs_pending_tasks(Make make) {
  std::atomic<int> ran{0};
  std::vector<test::host_function> tasks(20);
  test::host_function last([&ran] { ++ran; });
  {
    auto backend = make();
    for (test::host_function& task : tasks) {
      task.set([&ran] { ++ran; });
      backend.host_async({}, task.task(), {});
    }
    backend.host_async({}, last.task(), {.bytes = 100});
  }
  CHECK(ran == 21);
}

template <class Backend>
void broken_tasks_are_refused(Backend& backend) {
  auto event = backend.make_event();
  test::host_function never([] { FAIL("a task ran that was refused"); });
  CHECK_THROWS_AS(backend.host_async({}, pulseinfer::host_task{}, {}), std::logic_error);
  const std::vector<const typename Backend::event*> many(pulseinfer::max_task_events + 1, &event);
  CHECK_THROWS_AS(backend.host_async(many, never.task(), {}), std::logic_error);
  const typename Backend::event* const null[] = {nullptr};
  CHECK_THROWS_AS(backend.host_async(null, never.task(), {}), std::logic_error);
  test::host_function fine([] {});
  backend.host_async({}, fine.task(), {});
  backend.sync_until([&] { return fine.has_run(); });
  CHECK(!never.has_run());
}

}  // namespace conformance
