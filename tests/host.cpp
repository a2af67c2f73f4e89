// SPDX-License-Identifier: Apache-2.0
/// @file
/// The host backend beyond the concept: paced links, and many threads at once.
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "conformance/backend_failures.hpp"
#include "conformance/backend_streams.hpp"
#include "conformance/backend_tasks.hpp"
#include "pulseinfer/backend/host.hpp"
#include "pulseinfer/detail/cpu_affinity.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"
#include "support/device_array.hpp"
#include "support/host_function.hpp"
#include "support/sanitizers.hpp"

namespace {

struct broken_kernel {
  void operator()(std::int64_t, std::int64_t) const {
    throw pulseinfer::device_error("broken_kernel: failed on purpose");
  }
};

struct ask_policy {
  int* policy;
  void operator()(std::int64_t, std::int64_t) const { *policy = sched_getscheduler(0); }
};

using pulseinfer::copy_direction;
using pulseinfer::host_backend;
using pulseinfer::stream_priority;

/// Time that `copies` copies of `bytes` take in each of `directions`, each in a stream of its own.
std::uint64_t ns_of_copies(pulseinfer::link_pace link, std::size_t bytes, int copies,
                           const std::vector<copy_direction>& directions) {
  host_backend backend{{.workers = 1, .link = link}};
  const test::pinned_array<std::byte, host_backend> from(backend, bytes);
  from.fill(std::byte{1});
  std::vector<host_backend::stream> streams;
  std::vector<std::vector<std::byte>> to(directions.size(), std::vector<std::byte>(bytes));
  for (std::size_t i = 0; i < directions.size(); ++i) {
    streams.push_back(backend.make_stream(stream_priority::normal));
  }
  const std::uint64_t start = backend.now_ns();
  for (std::size_t i = 0; i < directions.size(); ++i) {
    for (int copy = 0; copy < copies; ++copy) {
      backend.copy_async(to[i].data(), from.data(), bytes, directions[i], streams[i]);
    }
  }
  for (auto& stream : streams) backend.sync(stream);
  for (const auto& arrived : to) CHECK((arrived == from.values()));
  return backend.now_ns() - start;
}

}  // namespace

// Only lower bounds: how long a shared machine takes is not for a test to say.
TEST_CASE(
    "host backend: of the tasks that are ready, urgent ones start first, the others in order") {
  host_backend backend{{.workers = 1}};
  std::vector<int> order;
  std::vector<test::host_function> tasks(6);
  for (int i = 1; i < 6; ++i)
    tasks[static_cast<std::size_t>(i)].set([&order, i] { order.push_back(i); });
  tasks[0].set([&] {  // on the only worker: none of the others starts before all are there
    for (std::size_t i = 1; i < 6; ++i) {
      pulseinfer::host_task task = tasks[i].task();
      if (i == 2 || i == 4) task.priority = stream_priority::high;
      backend.host_async({}, task);
    }
  });
  backend.host_async({}, tasks[0].task());
  backend.sync_until(
      [&] { return tasks[5].has_run() && tasks[3].has_run() && tasks[1].has_run(); });
  CHECK((order == std::vector<int>{2, 4, 1, 3, 5}));
}

TEST_CASE(
    "host backend: an event on a stream without work is done at once, also behind a failure") {
  host_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  backend.record(event, stream);
  CHECK(backend.poll(event) == pulseinfer::event_state::done);
  backend.for_each({1, 1}, {}, 0, broken_kernel{}, stream);
  auto behind = backend.make_event();
  backend.record(behind, stream);
  CHECK_THROWS_AS(backend.sync(behind), pulseinfer::device_error);
  backend.record(behind, stream);  // the failure is not collected yet
  // A stream reaches a record a moment before it is without work.
  while (backend.poll(behind) == pulseinfer::event_state::pending) std::this_thread::yield();
  CHECK(backend.poll(behind) == pulseinfer::event_state::failed);
  CHECK_THROWS_AS(backend.sync(stream), std::exception);
  backend.record(behind, stream);
  CHECK(backend.poll(behind) == pulseinfer::event_state::done);
}

TEST_CASE("host: a paced copy takes at least as long as the link would") {
  const auto down = copy_direction::host_to_device;
  const auto up = copy_direction::device_to_host;
  CHECK(ns_of_copies({.bytes_per_second = 1e9}, 1'000'000, 1, {down}) >= 1'000'000);
  CHECK(ns_of_copies({.seconds_per_copy = 1e-3}, 100, 3, {up}) >= 3'000'000);
  CHECK(ns_of_copies({1e9, 1e-3}, 1'000'000, 2, {down}) >= 4'000'000);
  // Two streams share a direction.
  CHECK(ns_of_copies({.bytes_per_second = 1e9}, 1'000'000, 2, {down, down}) >= 4'000'000);
  CHECK(ns_of_copies({.bytes_per_second = 1e9}, 1'000'000, 2, {down, up}) >= 2'000'000);
}

TEST_CASE("host: options that cannot be are refused") {
  constexpr double inf = std::numeric_limits<double>::infinity();
  CHECK_THROWS_AS((host_backend{{.workers = 0, .link = {}}}), std::invalid_argument);
  CHECK_THROWS_AS((host_backend{{.workers = 1, .link = {.bytes_per_second = -1}}}),
                  std::invalid_argument);
  CHECK_THROWS_AS((host_backend{{.workers = 1, .link = {.seconds_per_copy = inf}}}),
                  std::invalid_argument);
}

TEST_CASE("host: workers run on the CPUs that they were given, and the caller where it was") {
  const std::vector<int> usable = pulseinfer::detail::usable_cpus();
  REQUIRE(!usable.empty());
  for (const int cpu : {usable.front(), usable.back()}) {
    host_backend backend{{.workers = 2, .link = {}, .cpus = {cpu}}};
    std::vector<int> ran_on(8, -1);
    for (int& where : ran_on) {
      test::host_function ask([&where] { where = sched_getcpu(); });
      backend.host_async({}, ask.task(), {});
      backend.sync_until([&ask] { return ask.has_run(); });
    }
    CHECK((ran_on == std::vector<int>(8, cpu)));
  }
  CHECK((pulseinfer::detail::usable_cpus() == usable));
  pulseinfer::detail::cpu_mask mine;
  mine.read_from_this_thread();
  CHECK(std::all_of(usable.begin(), usable.end(), [&](int cpu) { return mine.contains(cpu); }));
}

/// The scheduling policies of a worker and of a stream's thread, of a backend that a thread of that
/// policy makes.
std::vector<int> policies_under(int policy) {
  std::vector<int> seen;
  std::thread([policy, &seen] {
    const sched_param parameter{};
    seen.push_back(sched_setscheduler(0, policy, &parameter));
    host_backend backend{{.workers = 1}};
    auto stream = backend.make_stream(stream_priority::normal);
    int worker = -1;
    int stream_thread = -1;
    test::host_function ask([&worker] { worker = sched_getscheduler(0); });
    backend.host_async({}, ask.task(), {});
    backend.for_each({1, 1}, {}, 0, ask_policy{&stream_thread}, stream);
    backend.sync(stream);
    backend.sync_until([&ask] { return ask.has_run(); });
    seen.insert(seen.end(), {worker, stream_thread, sched_getscheduler(0)});
  }).join();
  return seen;
}

TEST_CASE("host: who is woken does not take the CPU of who woke it") {
  CHECK(
      (policies_under(SCHED_OTHER) == std::vector<int>{0, SCHED_BATCH, SCHED_BATCH, SCHED_OTHER}));
  // What is not the usual policy is somebody's wish.
  CHECK((policies_under(SCHED_IDLE) == std::vector<int>{0, SCHED_IDLE, SCHED_IDLE, SCHED_IDLE}));
}

TEST_CASE("host: a CPU that cannot be used is refused, with those that can") {
  const auto refusal_of = [](std::vector<int> cpus) -> std::string {
    try {
      host_backend backend{{.workers = 1, .link = {}, .cpus = std::move(cpus)}};
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "";
  };
  const std::vector<int> usable = pulseinfer::detail::usable_cpus();
  REQUIRE(!usable.empty());
  const std::string those = pulseinfer::detail::text_of_cpus(usable);
  for (const int cpu : {-1, usable.back() + 1, 100'000, std::numeric_limits<int>::max()}) {
    CHECK(refusal_of({usable.front(), cpu}) ==
          "host workers: cpus names CPU " + std::to_string(cpu) +
              ", expected those that this process may use: " + those);
  }
  CHECK(refusal_of({usable.front(), usable.front()}).empty());
}

TEST_CASE("host: large blocks are aligned to huge pages, and no block is less usable for it") {
  host_backend backend{{.workers = 1, .link = {}}};
  constexpr std::size_t mib = std::size_t{1} << 20;
  for (const std::size_t bytes :
       {std::size_t{1}, 4 * mib - 1, 4 * mib, 4 * mib + 1, 9 * mib + 77}) {
    for (const bool is_pinned : {false, true}) {
      void* const p = is_pinned ? backend.allocate_pinned(bytes) : backend.allocate_device(bytes);
      REQUIRE(p != nullptr);
      const auto address = reinterpret_cast<std::uintptr_t>(p);
      CHECK(address % (bytes >= 4 * mib ? 2 * mib : is_pinned ? 64 : 256) == 0);
      auto* const begin = static_cast<std::byte*>(p);
      std::fill_n(begin, bytes, std::byte{7});
      CHECK(begin[bytes - 1] == std::byte{7});
      if (is_pinned) {
        backend.deallocate_pinned(p, bytes);
      } else {
        backend.deallocate_device(p, bytes);
      }
    }
  }
  const std::size_t too_much = std::numeric_limits<std::size_t>::max() - 100;
  CHECK_THROWS_AS((void)backend.allocate_pinned(too_much), pulseinfer::out_of_memory);
  CHECK_THROWS_AS((void)backend.allocate_device(too_much / 2), pulseinfer::out_of_memory);
}

/// Tasks come at all distances: while workers look for them, as they go to sleep, and in their
/// sleep.
TEST_CASE("host: no task is lost between a worker's looking for one and its sleep") {
  const auto poll = [](const int&) noexcept { return pulseinfer::event_state::done; };
  for (const int threads : {1, 2, 3}) {
    for (const int look_us : {0, 20, 100}) {
      CAPTURE(threads);
      CAPTURE(look_us);
      std::atomic<int> ran = 0;
      const pulseinfer::host_task count{
          [](void* p) noexcept { ++*static_cast<std::atomic<int>*>(p); }, &ran};
      int handed_over = 0;
      {
        pulseinfer::detail::host_workers<int, decltype(poll)> workers(
            threads, poll, {}, std::chrono::microseconds(look_us));
        pulseinfer::detail::random_source draw(static_cast<std::uint64_t>(threads + look_us));
        for (int round = 0; round < 200; ++round) {
          const int burst = 1 + static_cast<int>(draw.below(3));
          for (int i = 0; i < burst; ++i) workers.submit({}, count);
          handed_over += burst;
          // Without these waits the next burst meets workers that still run this one.
          while (round % 3 > 0 && ran.load() < handed_over) std::this_thread::yield();
          if (draw.below(2) == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(draw.below(160)));
          }
        }
      }
      CHECK(ran.load() == handed_over);
    }
  }
}

TEST_CASE("host: an event whose record finds no memory is what it was") {
  if (!test::counts_allocations()) return;
  host_backend backend{{.workers = 1, .link = {}}};
  std::atomic<bool> may_go = false;
  std::atomic<int> begun = 0;
  struct wait_for {
    std::atomic<bool>* may_go;
    std::atomic<int>* begun;
    void operator()(std::int64_t, std::int64_t) const {
      ++*begun;
      while (!may_go->load()) std::this_thread::yield();
    }
  };
  auto stream = backend.make_stream(stream_priority::normal);
  {
    auto event = backend.make_event();
    backend.for_each({1, 1}, {}, 0, wait_for{&may_go, &begun}, stream);
    while (begun.load() == 0) std::this_thread::yield();
    int recorded = 0;
    for (bool is_full = false; !is_full && recorded < 1000; ++recorded) {
      test::fail_allocation(1);
      try {
        backend.for_each({1, 1}, {}, 0, wait_for{&may_go, &begun}, stream);
      } catch (const std::bad_alloc&) {
        is_full = true;
      }
    }
    CHECK(recorded < 1000);
    test::fail_allocation(1);
    CHECK_THROWS_AS(backend.record(event, stream), std::bad_alloc);
    CHECK(backend.poll(event) == pulseinfer::event_state::done);
    test::fail_allocation(0);
    may_go = true;
  }  // an event that waited for its record would not end
  backend.sync(stream);
}

TEST_CASE("host: where the system has no more threads the backend says so, and leaves none") {
  if (test::is_sanitized) return;  // they have address space of their own
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_AS, &before) == 0);
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  rlimit narrow = before;  // room for some stacks
  narrow.rlim_cur =
      pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + (std::size_t{100} << 20);
  REQUIRE(setrlimit(RLIMIT_AS, &narrow) == 0);
  bool has_thrown = false;
  try {
    const host_backend backend{{.workers = 1024, .link = {}}};
  } catch (const std::system_error&) {
    has_thrown = true;
  } catch (const std::bad_alloc&) {  // what a thread takes beside its stack
    has_thrown = true;
  }
  REQUIRE(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(has_thrown);
  const host_backend backend{{.workers = 4, .link = {}}};
}

TEST_CASE("host: ready tasks start in the order handed over, with one worker") {
  host_backend backend{{.workers = 1, .link = {}}};
  conformance::ready_tasks_start_in_the_order_handed_over(backend);
}

TEST_CASE("host: failures stay in their stream and reach those that wait for it") {
  test::each_backend([](host_backend backend) {
    conformance::a_failure_stops_its_stream_until_sync(backend);
    conformance::a_failure_reaches_streams_that_wait_for_it(backend);
    conformance::a_task_runs_after_an_event_that_failed(backend);
  });
}

TEST_CASE("host: a stream may outlive the backend") {
  std::optional<host_backend> backend(host_backend{{.workers = 1, .link = {1e9, 0}}});
  std::vector<std::byte> from(1'000, std::byte{1}), to(1'000);
  {
    auto stream = backend->make_stream(stream_priority::normal);
    test::hold<host_backend> held(*backend, stream);
    backend->copy_async(to.data(), from.data(), 1'000, copy_direction::host_to_device, stream);
    backend.reset();
  }
  CHECK((to == from));
}

/// For ThreadSanitizer: everything at once, ordered by nothing but what the concept promises.
TEST_CASE("host: threads, streams, events and tasks at once") {
  constexpr std::size_t size = 256;
  constexpr int rounds = 40;
  host_backend backend{{.workers = 3, .link = {}}};
  const auto feed = [&backend] {
    host_backend mine = backend;
    auto upload = mine.make_stream(stream_priority::normal);
    auto compute = mine.make_stream(stream_priority::high);
    auto filled = mine.make_event();
    auto used = mine.make_event();
    const test::pinned_array<std::int32_t, host_backend> staging(mine, size);
    const test::device_array<std::int32_t, host_backend> device(mine, size);
    test::device_array<std::int32_t, host_backend> sum(mine, std::vector<std::int32_t>(size),
                                                       compute);
    for (std::int32_t round = 0; round < rounds; ++round) {
      test::host_function fill([&] { staging.fill(round); });
      const host_backend::event* const after[] = {&filled};
      mine.host_async(after, fill.task(), {});  // the copy of the last round is done
      mine.sync_until([&] { return fill.has_run(); });
      mine.enqueue_wait(used, upload);
      mine.copy_async(device.data(), staging.data(), staging.bytes(),
                      copy_direction::host_to_device, upload);
      mine.record(filled, upload);
      mine.enqueue_wait(filled, compute);
      conformance::enqueue_multiply_add(mine, device.data(), sum.data(), size, 2, round, compute);
      mine.record(used, compute);
    }
    return sum.download(compute) == std::vector<std::int32_t>(size, 3 * (rounds - 1));
  };
  bool right[3] = {};
  std::vector<std::thread> threads;
  for (bool& mine : right) threads.emplace_back([&feed, &mine] { mine = feed(); });
  for (std::thread& thread : threads) thread.join();
  for (const bool mine : right) CHECK(mine);
}
