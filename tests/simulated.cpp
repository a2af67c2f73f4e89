// SPDX-License-Identifier: Apache-2.0
/// @file
/// The simulated backend beyond the concept: exact virtual times, and faults found by seeds.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "conformance/backend_failures.hpp"
#include "conformance/backend_streams.hpp"
#include "conformance/backend_tasks.hpp"
#include "pulseinfer/backend/simulated.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/device_array.hpp"
#include "support/host_function.hpp"

namespace {

using pulseinfer::copy_direction;
using pulseinfer::event_state;
using pulseinfer::fuzzed;
using pulseinfer::simulated_backend;
using pulseinfer::stream_priority;
using pulseinfer::timed;

constexpr std::uint64_t seeds = 200;

/// Round numbers: a byte a ns on the link and ten in HBM.
constexpr pulseinfer::hardware_profile round_profile{.dram_bytes_per_second = 3e9,
                                                     .link_bytes_per_second = 1e9,
                                                     .hbm_bytes_per_second = 10e9,
                                                     .worker_bytes_per_second = 2e9,
                                                     .copy_start_ns = 1'000,
                                                     .copy_busy_ns = 100,
                                                     .batched_copy_busy_ns = 10,
                                                     .kernel_launch_ns = 500,
                                                     .task_start_ns = 200,
                                                     .workers = 4,
                                                     .device_bytes = 1'000'000};

struct nothing {
  void operator()(std::int64_t, std::int64_t) const {}
};

/// A timed machine with three streams and memory to copy to and from.
struct timed_machine {
  explicit timed_machine(const pulseinfer::hardware_profile& profile = round_profile)
      : backend(timed{profile}), host(backend, 10'000), device(backend, 10'000) {
    host.fill(std::byte{0});
    for (int i = 0; i < 3; ++i) streams.push_back(backend.make_stream(stream_priority::normal));
  }

  void to_device(std::size_t bytes, simulated_backend::stream& stream) {
    backend.copy_async(device.data(), host.data(), bytes, copy_direction::host_to_device, stream);
  }
  void to_host(std::size_t bytes, simulated_backend::stream& stream) {
    backend.copy_async(host.data(), device.data(), bytes, copy_direction::device_to_host, stream);
  }
  void kernel(std::uint64_t bytes, simulated_backend::stream& stream) {
    backend.for_each({1, 1}, {}, bytes, nothing{}, stream);
  }
  /// The time at which the streams are done.
  std::uint64_t end() {
    for (auto& stream : streams) backend.sync(stream);
    return backend.now_ns();
  }
  /// The time at which all tasks are done.
  std::uint64_t end(const std::vector<test::host_function>& tasks) {
    backend.sync_until([&] { return conformance::all_have_run(tasks); });
    return backend.now_ns();
  }

  simulated_backend backend;
  test::pinned_array<std::byte, simulated_backend> host;
  test::device_array<std::byte, simulated_backend> device;
  std::vector<simulated_backend::stream> streams;
};

}  // namespace

TEST_CASE("simulated, timed: a copy costs its start, its call and its bytes") {
  timed_machine machine;
  machine.to_device(1'000, machine.streams[0]);
  CHECK(machine.backend.now_ns() == 0);
  CHECK(machine.end() == 1'000 + 100 + 1'000);
}

TEST_CASE("simulated, timed: copies in line pay one start") {
  timed_machine machine;
  machine.to_device(1'000, machine.streams[0]);
  machine.to_device(500, machine.streams[0]);
  CHECK(machine.end() == 1'000 + 100 + 1'000 + 100 + 500);
}

TEST_CASE("simulated, timed: a copy enqueued after a sync pays its own start") {
  timed_machine machine;
  machine.to_device(1'000, machine.streams[0]);
  (void)machine.end();
  machine.to_device(1'000, machine.streams[0]);
  CHECK(machine.end() == 2 * (1'000 + 100 + 1'000));
}

TEST_CASE("simulated, timed: a direction moves one copy at a time, both move at once") {
  timed_machine machine;
  machine.to_device(1'000, machine.streams[0]);
  machine.to_device(1'000, machine.streams[1]);
  machine.to_host(700, machine.streams[2]);
  machine.backend.sync(machine.streams[2]);
  CHECK(machine.backend.now_ns() == 1'000 + 100 + 700);
  CHECK(machine.end() == 1'000 + 2 * (100 + 1'000));
}

TEST_CASE("simulated, timed: a batch is one operation with a small cost for each copy") {
  const auto end_of = [](std::size_t copies) {
    timed_machine machine;
    std::vector<pulseinfer::copy_span> spans;
    const std::size_t each = 1'000 / copies;
    for (std::size_t i = 0; i < copies; ++i) {
      spans.push_back({machine.device.data() + each * i, machine.host.data() + each * i, each});
    }
    machine.backend.copy_many_async(spans, copy_direction::host_to_device, machine.streams[0]);
    return machine.end();
  };
  CHECK(end_of(20) == 1'000 + 20 * 10 + 1'000);
  // It is a call, too: two halves are not cheaper than the whole.
  CHECK(end_of(1) == 1'000 + 100 + 1'000);
  CHECK(end_of(2) == 1'000 + 100 + 1'000);
  CHECK(end_of(10) == 1'000 + 100 + 1'000);
}

TEST_CASE("simulated, timed: kernels launch side by side and share HBM") {
  {
    timed_machine machine;
    machine.kernel(5'000, machine.streams[0]);
    machine.kernel(5'000, machine.streams[0]);
    CHECK(machine.end() == 2 * (500 + 500));
  }
  timed_machine machine;
  machine.kernel(5'000, machine.streams[0]);
  machine.kernel(5'000, machine.streams[1]);
  machine.backend.copy_async(machine.device.data(), machine.device.data() + 5'000, 1'000,
                             copy_direction::device_to_device, machine.streams[2]);
  CHECK(machine.end() == 500 + 500 + 500 + 200);  // the copy's bytes are read and written
}

TEST_CASE("simulated, timed: kernels of high priority go first and interrupt nothing") {
  timed_machine machine;
  auto urgent = machine.backend.make_stream(stream_priority::high);
  machine.kernel(10'000, machine.streams[0]);
  machine.backend.sync(machine.streams[0]);
  CHECK(machine.backend.now_ns() == 1'500);
  machine.kernel(10'000, machine.streams[0]);
  machine.kernel(10'000, machine.streams[1]);
  machine.kernel(10'000, urgent);
  machine.backend.sync(urgent);
  CHECK(machine.backend.now_ns() == 1'500 + 500 + 1'000);
  machine.kernel(10'000, urgent);  // finds one running
  machine.backend.sync(urgent);
  CHECK(machine.backend.now_ns() == 3'000 + 1'000 + 1'000);
  CHECK(machine.end() == 6'000);
}

TEST_CASE("simulated, timed: events cost nothing and order streams") {
  timed_machine machine;
  auto copied = machine.backend.make_event();
  machine.to_device(1'000, machine.streams[0]);
  machine.backend.record(copied, machine.streams[0]);
  machine.backend.enqueue_wait(copied, machine.streams[1]);
  machine.kernel(5'000, machine.streams[1]);
  CHECK(machine.end() == 2'100 + 1'000);
}

TEST_CASE("simulated, timed: a host task costs its start and its bytes") {
  timed_machine machine;
  std::vector<test::host_function> tasks(1);
  std::uint64_t seen = 0;
  tasks[0].set([&] { seen = machine.backend.now_ns(); });
  machine.backend.host_async({}, tasks[0].task(), {.bytes = 2'000});
  CHECK(machine.end(tasks) == 200 + 1'000);
  CHECK(seen == 1'200);
}

TEST_CASE("simulated, timed: workers share the DRAM, and one with the other tasks to come") {
  timed_machine machine;
  std::vector<test::host_function> tasks(6);
  std::vector<std::uint64_t> ends;
  for (test::host_function& task : tasks) {
    task.set([&] { ends.push_back(machine.backend.now_ns()); });
  }
  // Two at a time would get 1.5 bytes a ns each, four 0.75.
  for (test::host_function& task : tasks) {
    machine.backend.host_async({}, task.task(), {.bytes = 3'000});
  }
  // Four run in 4000 ns; then two, at 1.5 bytes a ns.
  CHECK(machine.end(tasks) == 200 + 4'000 + 200 + 2'000);
  CHECK((ends == std::vector<std::uint64_t>{4'200, 4'200, 4'200, 4'200, 6'400, 6'400}));
}

TEST_CASE("simulated, timed: a task that starts slows the one that runs") {
  timed_machine machine;
  std::vector<test::host_function> tasks(2);
  std::vector<std::uint64_t> ends;
  auto event = machine.backend.make_event();
  for (test::host_function& task : tasks) {
    task.set([&] { ends.push_back(machine.backend.now_ns()); });
  }
  machine.kernel(5'000, machine.streams[0]);  // until 1000
  machine.backend.record(event, machine.streams[0]);
  const simulated_backend::event* const after[] = {&event};
  machine.backend.host_async({}, tasks[0].task(), {.bytes = 5'000});
  machine.backend.host_async(after, tasks[1].task(), {.bytes = 3'000});
  // The first moves 2000 bytes by 1200, when the second starts to move; the other 3000 of both
  // take 2000 ns.
  CHECK(machine.end(tasks) == 3'200);
  CHECK((ends == std::vector<std::uint64_t>{3'200, 3'200}));
}

TEST_CASE("simulated, timed: copies take their part of the DRAM first") {
  timed_machine machine;
  std::vector<test::host_function> tasks(2);
  for (test::host_function& task : tasks) {
    task.set([] {});
    machine.backend.host_async({}, task.task(), {.bytes = 2'200});
  }
  machine.to_device(8'000, machine.streams[0]);
  // From 200 to 1000 at 1.5 bytes a ns; then the copy leaves 2 for both.
  CHECK(machine.end(tasks) == 1'000 + 1'000);
}

TEST_CASE(
    "simulated, timed: more workers than the DRAM feeds do not get more of it beside a copy") {
  timed_machine machine;
  std::vector<test::host_function> tasks(4);
  for (test::host_function& task : tasks) {
    task.set([] {});
    machine.backend.host_async({}, task.task(), {.bytes = 1'100});
  }
  machine.to_device(8'000, machine.streams[0]);
  // From 200 to 1000 at 0.75 bytes a ns, 600 bytes each; then the copy leaves 2 for all four. (An
  // even share of 3 among the five would be more than there is.)
  CHECK(machine.end(tasks) == 1'000 + 1'000);
}

TEST_CASE("simulated, timed: what a task enqueues starts at its end") {
  timed_machine machine;
  std::vector<test::host_function> tasks(1);
  tasks[0].set([&] { machine.to_device(1'000, machine.streams[0]); });
  machine.backend.host_async({}, tasks[0].task(), {.bytes = 2'000});
  CHECK(machine.end(tasks) == 1'200);
  CHECK(machine.end() == 1'200 + 2'100);
}

TEST_CASE("simulated, timed: bytes arrive at the end of a copy") {
  timed_machine machine;
  auto copied = machine.backend.make_event();
  machine.host.fill(std::byte{1});
  machine.to_device(1'000, machine.streams[0]);
  machine.backend.record(copied, machine.streams[0]);
  std::uint64_t polls = 0;
  for (; machine.backend.poll(copied) == event_state::pending; ++polls) {
    CHECK(machine.device.data()[0] == std::byte{0xbe});
  }
  CHECK(machine.device.data()[0] == std::byte{1});
  CHECK(polls == 2);  // each poll of a pending event takes 1000 ns
  CHECK(machine.backend.now_ns() == 3'000);
}

TEST_CASE("simulated, timed: statistics tell what each resource has done") {
  timed_machine machine;
  machine.to_device(1'000, machine.streams[0]);
  machine.to_device(500, machine.streams[0]);
  machine.to_host(300, machine.streams[1]);
  machine.kernel(4'000, machine.streams[2]);
  (void)machine.end();
  std::vector<test::host_function> tasks(1);
  tasks[0].set([] {});
  machine.backend.host_async({}, tasks[0].task(), {.bytes = 2'000});
  (void)machine.end(tasks);
  const pulseinfer::simulated_statistics found = machine.backend.statistics();
  CHECK(found.host_to_device.operations == 2);
  CHECK(found.host_to_device.bytes == 1'500);
  CHECK(found.host_to_device.busy_ns == 1'700);
  CHECK(found.device_to_host.busy_ns == 400);
  CHECK(found.kernels.operations == 1);
  CHECK(found.kernels.busy_ns == 400);
  CHECK(found.tasks.bytes == 2'000);
  CHECK(found.tasks.busy_ns == 1'000);
}

namespace {

/// A workload drawn from `seed`: what every byte of its memory is afterwards, and the clock.
std::vector<std::uint64_t> outcome_of_a_workload(simulated_backend backend, std::uint64_t seed) {
  constexpr std::size_t size = 64;
  constexpr std::size_t count = 40;
  pulseinfer::detail::random_source draw(seed);
  std::vector<simulated_backend::stream> streams;
  for (int i = 0; i < 4; ++i) streams.push_back(backend.make_stream(stream_priority::normal));
  const test::pinned_array<std::int32_t, simulated_backend> memory(backend, 6 * size);
  std::iota(memory.data(), memory.data() + memory.size(), 0);
  std::vector<test::host_function> tasks(count);
  std::vector<std::uint64_t> outcome;
  for (std::size_t i = 0; i < count; ++i) {
    auto& stream = streams[draw.below(4)];
    std::int32_t* const to = memory.data() + size * draw.below(6);
    const std::int32_t* const from = memory.data() + size * draw.below(6);
    if (draw.one_in(2)) {
      backend.copy_async(to, from == to ? memory.data() + (to == memory.data() ? size : 0) : from,
                         4 * size, copy_direction::host_to_device, stream);
    } else {
      conformance::enqueue_multiply_add(backend, from, to, size, 3, 1, stream);
    }
    tasks[i].set([&outcome, &backend] { outcome.push_back(backend.now_ns()); });
    backend.host_async({}, tasks[i].task(), {.bytes = 1'000 * draw.below(100)});
  }
  backend.sync_until([&] { return conformance::all_have_run(tasks); });
  for (auto& stream : streams) backend.sync(stream);
  for (const std::int32_t value : memory.values()) {
    outcome.push_back(static_cast<std::uint64_t>(value));
  }
  outcome.push_back(backend.now_ns());
  return outcome;
}

}  // namespace

TEST_CASE("simulated, timed: the same run twice gives the same bytes and times") {
  const auto first = outcome_of_a_workload(simulated_backend{timed{}}, 5);
  CHECK((outcome_of_a_workload(simulated_backend{timed{}}, 5) == first));
}

TEST_CASE("simulated, fuzzed: the same seed gives the same bytes and times, others give others") {
  const auto first = outcome_of_a_workload(simulated_backend{fuzzed{.seed = 1}}, 5);
  std::uint64_t different = 0;
  for (std::uint64_t seed = 1; seed <= 50; ++seed) {
    const auto once = outcome_of_a_workload(simulated_backend{fuzzed{.seed = seed}}, 5);
    CHECK((outcome_of_a_workload(simulated_backend{fuzzed{.seed = seed}}, 5) == once));
    different += once != first ? 1 : 0;
  }
  CHECK(different >= 45);
}

namespace {

/// Counts the seeds on which `run(backend)` says that all was right.
template <class Run>
std::uint64_t seeds_that_are_right(Run run) {
  std::uint64_t right = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    right += run(simulated_backend{fuzzed{.seed = seed}}) ? 1 : 0;
  }
  return right;
}

/// A few seeds must suffice to find a fault, and not all of them may fail: a fault that shows
/// always needs no fuzzing, so the order would not be free.
void check_found(std::uint64_t right) {
  CHECK(right > 0);
  CHECK(right < seeds * 9 / 10);
}

constexpr std::size_t elements = 400;

/// Staging is copied to the device on one stream and used on another.
bool consume(simulated_backend backend, bool with_wait) {
  auto copier = backend.make_stream(stream_priority::normal);
  auto user = backend.make_stream(stream_priority::normal);
  auto copied = backend.make_event();
  const test::pinned_array<std::int32_t, simulated_backend> staging(backend, elements);
  test::device_array<std::int32_t, simulated_backend> in(backend, elements), out(backend, elements);
  staging.fill(7);
  backend.copy_async(in.data(), staging.data(), in.bytes(), copy_direction::host_to_device, copier);
  backend.record(copied, copier);
  if (with_wait) backend.enqueue_wait(copied, user);
  conformance::enqueue_multiply_add(backend, in.data(), out.data(), elements, 2, 0, user);
  const bool right = out.download(user) == std::vector<std::int32_t>(elements, 14);
  backend.sync(copier);
  return right;
}

/// A scatter overwrites pages that a kernel of another stream still reads.
bool overwrite(simulated_backend backend, bool with_wait) {
  auto reader = backend.make_stream(stream_priority::normal);
  auto writer = backend.make_stream(stream_priority::high);
  auto has_read = backend.make_event();
  test::device_array<std::int32_t, simulated_backend> old(
      backend, std::vector<std::int32_t>(elements, 1), writer);
  test::device_array<std::int32_t, simulated_backend> next(
      backend, std::vector<std::int32_t>(elements, 2), writer);
  test::device_array<std::int32_t, simulated_backend> out(backend, elements);
  conformance::enqueue_multiply_add(backend, old.data(), out.data(), elements, 1, 0, reader);
  backend.record(has_read, reader);
  if (with_wait) backend.enqueue_wait(has_read, writer);
  conformance::enqueue_multiply_add(backend, next.data(), old.data(), elements, 1, 0, writer);
  const bool right = out.download(reader) == std::vector<std::int32_t>(elements, 1);
  backend.sync(writer);
  return right;
}

/// A host task reads what a copy brings.
bool gather(simulated_backend backend, bool with_event) {
  auto stream = backend.make_stream(stream_priority::normal);
  auto copied = backend.make_event();
  test::device_array<std::int32_t, simulated_backend> in(
      backend, std::vector<std::int32_t>(elements, 3), stream);
  const test::pinned_array<std::int32_t, simulated_backend> out(backend, elements);
  std::int32_t sum = 0;
  test::host_function add([&] { sum = std::accumulate(out.data(), out.data() + elements, 0); });
  out.fill(0);
  backend.copy_async(out.data(), in.data(), in.bytes(), copy_direction::device_to_host, stream);
  backend.record(copied, stream);
  const simulated_backend::event* const after[] = {&copied};
  if (with_event) {
    backend.host_async(after, add.task(), {});
  } else {
    backend.host_async({}, add.task(), {});
  }
  backend.sync_until([&] { return add.has_run(); });
  backend.sync(stream);
  return sum == static_cast<std::int32_t>(3 * elements);
}

/// Staging is filled again for a second copy.
bool fill_again(simulated_backend backend, bool with_sync) {
  auto stream = backend.make_stream(stream_priority::normal);
  auto copied = backend.make_event();
  const test::pinned_array<std::int32_t, simulated_backend> staging(backend, elements);
  test::device_array<std::int32_t, simulated_backend> first(backend, elements);
  staging.fill(1);
  backend.copy_async(first.data(), staging.data(), first.bytes(), copy_direction::host_to_device,
                     stream);
  backend.record(copied, stream);
  if (with_sync) backend.sync(copied);
  staging.fill(2);
  return first.download(stream) == std::vector<std::int32_t>(elements, 1);
}

/// The copy of staging is enqueued before it is filled: right on a lazy machine only.
bool fill_late(simulated_backend backend, bool in_time) {
  auto stream = backend.make_stream(stream_priority::normal);
  const test::pinned_array<std::int32_t, simulated_backend> staging(backend, elements);
  test::device_array<std::int32_t, simulated_backend> out(backend, elements);
  staging.fill(in_time ? 1 : 0);
  backend.copy_async(out.data(), staging.data(), out.bytes(), copy_direction::host_to_device,
                     stream);
  staging.fill(1);
  return out.download(stream) == std::vector<std::int32_t>(elements, 1);
}

/// The copies of a batch are unordered: one reads what another writes.
bool chain_in_a_batch(simulated_backend backend, bool one_by_one) {
  auto stream = backend.make_stream(stream_priority::normal);
  test::device_array<std::int32_t, simulated_backend> a(
      backend, std::vector<std::int32_t>(elements, 1), stream);
  test::device_array<std::int32_t, simulated_backend> b(
      backend, std::vector<std::int32_t>(elements, 2), stream);
  test::device_array<std::int32_t, simulated_backend> c(backend, elements);
  const pulseinfer::copy_span spans[] = {{b.data(), a.data(), a.bytes()},
                                         {c.data(), b.data(), a.bytes()}};
  for (const auto& span : spans) {
    if (one_by_one) {
      backend.copy_many_async({&span, 1}, copy_direction::device_to_device, stream);
    }
  }
  if (!one_by_one) backend.copy_many_async(spans, copy_direction::device_to_device, stream);
  return c.download(stream) == std::vector<std::int32_t>(elements, 1);
}

/// Three streams in a row, the middle one without a wait: wrong only if the first one is later than
/// all that follows.
bool pass_on(simulated_backend backend, bool with_wait) {
  std::vector<simulated_backend::stream> streams;
  std::vector<simulated_backend::event> events;
  for (int i = 0; i < 6; ++i) {
    streams.push_back(backend.make_stream(stream_priority::normal));
    events.push_back(backend.make_event());
  }
  test::device_array<std::int32_t, simulated_backend> values(
      backend, std::vector<std::int32_t>(elements, 1), streams[0]);
  test::device_array<std::int32_t, simulated_backend> last(backend, {0}, streams[0]);
  conformance::enqueue_multiply_add(backend, values.data(), values.data(), elements, 5, 0,
                                    streams[0]);
  backend.record(events[0], streams[0]);
  for (std::size_t i = 1; i < 5; ++i) {  // a chain of small work, each behind the one before
    if (i > 1) backend.enqueue_wait(events[i - 1], streams[i]);
    conformance::enqueue_multiply_add(backend, last.data(), last.data(), 1, 1, 1, streams[i]);
    backend.record(events[i], streams[i]);
  }
  backend.enqueue_wait(events[4], streams[5]);
  if (with_wait) backend.enqueue_wait(events[0], streams[5]);
  const bool right = values.download(streams[5]) == std::vector<std::int32_t>(elements, 5);
  backend.sync(streams[0]);
  return right;
}

}  // namespace

TEST_CASE("simulated, fuzzed: a consumer without a wait is found") {
  check_found(seeds_that_are_right([](auto b) { return consume(b, false); }));
  CHECK(seeds_that_are_right([](auto b) { return consume(b, true); }) == seeds);
}

TEST_CASE("simulated, fuzzed: a writer that does not wait for readers is found") {
  check_found(seeds_that_are_right([](auto b) { return overwrite(b, false); }));
  CHECK(seeds_that_are_right([](auto b) { return overwrite(b, true); }) == seeds);
}

TEST_CASE("simulated, fuzzed: a task that does not wait for a copy is found") {
  check_found(seeds_that_are_right([](auto b) { return gather(b, false); }));
  CHECK(seeds_that_are_right([](auto b) { return gather(b, true); }) == seeds);
}

TEST_CASE("simulated, fuzzed: staging that is filled again too early is found") {
  check_found(seeds_that_are_right([](auto b) { return fill_again(b, false); }));
  CHECK(seeds_that_are_right([](auto b) { return fill_again(b, true); }) == seeds);
}

TEST_CASE("simulated, fuzzed: staging that is filled too late is found") {
  check_found(seeds_that_are_right([](auto b) { return fill_late(b, false); }));
  CHECK(seeds_that_are_right([](auto b) { return fill_late(b, true); }) == seeds);
}

TEST_CASE("simulated, fuzzed: an order within a batch is not relied on unseen") {
  check_found(seeds_that_are_right([](auto b) { return chain_in_a_batch(b, false); }));
  CHECK(seeds_that_are_right([](auto b) { return chain_in_a_batch(b, true); }) == seeds);
}

TEST_CASE("simulated, fuzzed: a stream that is later than a long chain beside it is found") {
  check_found(seeds_that_are_right([](auto b) { return pass_on(b, false); }));
  CHECK(seeds_that_are_right([](auto b) { return pass_on(b, true); }) == seeds);
}

TEST_CASE("simulated, fuzzed: a copy reads late, early, and some of both") {
  int early = 0, late = 0, torn = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    simulated_backend backend{fuzzed{.seed = seed}};
    const std::vector<std::int32_t> words = conformance::copy_of_a_source_that_changes(backend);
    const auto ones = std::count(words.begin(), words.end(), 1);
    const auto twos = std::count(words.begin(), words.end(), 2);
    CHECK(static_cast<std::size_t>(ones + twos) == words.size());
    ++(twos == 0 ? early : ones == 0 ? late : torn);
  }
  CHECK(early > 0);
  CHECK(late > 0);
  CHECK(torn > 0);
}

TEST_CASE("simulated: memory that was never written shows") {
  simulated_backend backend{fuzzed{.seed = 1}};
  auto stream = backend.make_stream(stream_priority::normal);
  test::device_array<std::byte, simulated_backend> device(backend, 100);
  const test::pinned_array<std::byte, simulated_backend> pinned(backend, 100);
  CHECK((device.download(stream) == std::vector<std::byte>(100, std::byte{0xbe})));
  CHECK((pinned.values() == std::vector<std::byte>(100, std::byte{0xcd})));
}

TEST_CASE("simulated: device memory ends where the profile says") {
  const auto check = [](simulated_backend backend) {
    CHECK(backend.limits().device_bytes_total == 1'000);
    void* const first = backend.allocate_device(600);
    CHECK(backend.limits().device_bytes_free == 400);
    CHECK_THROWS_AS((void)backend.allocate_device(401), pulseinfer::out_of_memory);
    void* const second = backend.allocate_device(400);
    backend.deallocate_device(first, 600);
    CHECK(backend.limits().device_bytes_free == 600);
    backend.deallocate_device(second, 400);
    CHECK(backend.limits().device_bytes_free == 1'000);
  };
  check(simulated_backend{timed{{.device_bytes = 1'000}}});
  check(simulated_backend{fuzzed{.seed = 3, .device_bytes = 1'000}});
}

TEST_CASE("simulated: a profile that cannot be is refused") {
  CHECK_THROWS_AS(simulated_backend{timed{{.link_bytes_per_second = 0}}}, std::invalid_argument);
  CHECK_THROWS_AS(simulated_backend{timed{{.hbm_bytes_per_second = -1}}}, std::invalid_argument);
  CHECK_THROWS_AS(simulated_backend{timed{{.workers = 0}}}, std::invalid_argument);
  CHECK_THROWS_AS((simulated_backend{fuzzed{.seed = 1, .workers = -1}}), std::invalid_argument);
}

TEST_CASE("simulated: a deadlock is reported") {
  test::each_backend([](simulated_backend backend) {
    bool ready = false;
    auto stream = backend.make_stream(stream_priority::normal);
    auto event = backend.make_event();
    backend.record(event, stream);
    try {
      backend.sync_until([&] { return ready; });
      FAIL("expected a deadlock");
    } catch (const std::logic_error& error) {
      CHECK(std::string(error.what()).find("deadlock") != std::string::npos);
      CHECK(std::string(error.what()).find("nothing is pending") != std::string::npos);
    }
    CHECK(backend.poll(event) == event_state::done);  // all that could run has run
    ready = true;
    backend.sync_until([&] { return ready; });
  });
}

TEST_CASE("simulated: a host task may not sync") {
  test::each_backend([](simulated_backend backend) {
    auto stream = backend.make_stream(stream_priority::normal);
    auto event = backend.make_event();
    int refused = 0;
    test::host_function task([&] {
      const auto count = [&](auto sync) {
        try {
          sync();
        } catch (const std::logic_error&) {
          ++refused;
        }
      };
      count([&] { backend.sync(stream); });
      count([&] { backend.sync(event); });
      count([&] { backend.sync_until([] { return false; }); });
    });
    backend.host_async({}, task.task(), {});
    backend.sync_until([&] { return task.has_run(); });
    CHECK(refused == 3);
    backend.sync(stream);
  });
}

TEST_CASE("simulated: a task may make and destroy streams with work in flight") {
  test::each_backend([](simulated_backend backend) {
    const test::pinned_array<std::int32_t, simulated_backend> memory(backend, 2 * elements);
    memory.fill(1);
    bool right = false;
    test::host_function task([&] {
      {
        auto stream = backend.make_stream(stream_priority::high);
        conformance::enqueue_multiply_add(backend, memory.data(), memory.data() + elements,
                                          elements, 4, 0, stream);
      }
      right = memory[2 * elements - 1] == 4;
    });
    backend.host_async({}, task.task(), {});
    backend.sync_until([&] { return task.has_run(); });
    CHECK(right);
  });
}

TEST_CASE("simulated: streams and events may outlive the backend") {
  for (const bool by_clock : {true, false}) {
    std::vector<std::byte> from(100, std::byte{1}), to(100);
    std::optional<simulated_backend> backend(by_clock ? simulated_backend{timed{}}
                                                      : simulated_backend{fuzzed{.seed = 2}});
    auto stream = backend->make_stream(stream_priority::normal);
    auto event = backend->make_event();
    backend->copy_async(to.data(), from.data(), 100, copy_direction::host_to_device, stream);
    backend->record(event, stream);
    backend.reset();
    CHECK((to == from));
  }
}

TEST_CASE("simulated: ready tasks start in the order handed over, with one worker") {
  simulated_backend by_clock{timed{{.workers = 1}}};
  conformance::ready_tasks_start_in_the_order_handed_over(by_clock);
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    simulated_backend backend{fuzzed{.seed = seed, .workers = 1}};
    conformance::ready_tasks_start_in_the_order_handed_over(backend);
  }
}

TEST_CASE("simulated, fuzzed: the last backend runs pending tasks") {
  conformance::the_last_backend_runs_pending_tasks(
      [] { return simulated_backend{fuzzed{.seed = 4}}; });
}

TEST_CASE("simulated: failures stay in their stream and reach those that wait for it") {
  test::each_backend([](simulated_backend backend) {
    conformance::a_failure_stops_its_stream_until_sync(backend);
    conformance::a_failure_reaches_streams_that_wait_for_it(backend);
    conformance::a_task_runs_after_an_event_that_failed(backend);
  });
}
