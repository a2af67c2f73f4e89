// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a backend whose kernels run on the CPU keeps when one of them throws. Kernels on a device
/// cannot.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "conformance/backend_streams.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"
#include "support/device_array.hpp"
#include "support/hold.hpp"
#include "support/host_function.hpp"

namespace conformance {

struct failing_kernel {
  void operator()(std::int64_t, std::int64_t) const {
    throw pulseinfer::device_error("kernel: failed on purpose");
  }
};

template <class Backend>
void a_failure_stops_its_stream_until_sync(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  auto before = backend.make_event();
  auto after = backend.make_event();
  test::device_array<std::int32_t, Backend> out(backend, std::vector<std::int32_t>(4, 1), stream);
  test::hold<Backend> held(backend, stream);
  backend.record(before, stream);
  backend.for_each({3, 3}, {}, 0, failing_kernel{}, stream);
  enqueue_multiply_add(backend, out.data(), out.data(), 4, 1, 1, stream);
  backend.record(after, stream);
  held.release();
  CHECK_THROWS_AS(backend.sync(after), pulseinfer::device_error);
  CHECK_THROWS_AS(backend.sync(after), pulseinfer::device_error);
  CHECK(backend.poll(before) == event_state::done);
  CHECK(backend.poll(after) == event_state::failed);
  CHECK_THROWS_AS(backend.sync(stream), pulseinfer::device_error);
  backend.sync(stream);  // it has been said once
  CHECK(backend.poll(after) == event_state::failed);
  CHECK((out.download(stream) == std::vector<std::int32_t>(4, 1)));  // the next kernel was skipped
  backend.record(after, stream);
  backend.sync(after);
  CHECK(backend.poll(after) == event_state::done);
}

template <class Backend>
void a_failure_reaches_streams_that_wait_for_it(Backend& backend) {
  auto first = backend.make_stream(stream_priority::normal);
  auto second = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  test::device_array<std::int32_t, Backend> out(backend, std::vector<std::int32_t>(4, 1), second);
  backend.for_each({1, 1}, {}, 0, failing_kernel{}, first);
  backend.record(event, first);
  backend.enqueue_wait(event, second);
  enqueue_multiply_add(backend, out.data(), out.data(), 4, 1, 1, second);
  CHECK_THROWS_AS(backend.sync(second), pulseinfer::device_error);
  CHECK_THROWS_AS(backend.sync(first), pulseinfer::device_error);
  CHECK((out.download(second) == std::vector<std::int32_t>(4, 1)));
}

template <class Backend>
void a_task_runs_after_an_event_that_failed(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  backend.for_each({1, 1}, {}, 0, failing_kernel{}, stream);
  backend.record(event, stream);
  event_state seen = event_state::pending;
  test::host_function task([&] { seen = backend.poll(event); });
  const typename Backend::event* const after[] = {&event};
  backend.host_async(after, task.task(), {});
  backend.sync_until([&] { return task.has_run(); });
  CHECK(seen == event_state::failed);
  CHECK_THROWS_AS(backend.sync(stream), pulseinfer::device_error);
}

}  // namespace conformance
