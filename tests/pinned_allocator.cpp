// SPDX-License-Identifier: Apache-2.0
/// @file
/// Pinned memory behind an allocator, a memory resource and a backend.
#include "pulseinfer/pinned_allocator.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <memory_resource>
#include <new>
#include <numeric>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/staging_pool.hpp"
#include "support/hold.hpp"
#include "support/injected_system.hpp"
#include "support/rounds.hpp"
#include "support/sanitizers.hpp"

namespace {

using pulseinfer::out_of_memory;
using pulseinfer::paged_backend;
using pulseinfer::pinned_allocator;
using pulseinfer::pinned_options;
using pulseinfer::pinned_resource;
using pulseinfer::stream_priority;
using test::injected_system;
using machine = test::noting_backend<test::backend>;
using resource = pinned_resource<machine, injected_system>;
template <class T>
using allocator = pinned_allocator<T, machine, injected_system>;
using paged = paged_backend<test::backend>;

static_assert(pulseinfer::backend<paged>);
static_assert(
    std::is_same_v<std::allocator_traits<allocator<int>>::rebind_alloc<double>, allocator<double>>);

const std::size_t page = pulseinfer::detail::page_system{}.page_bytes();

struct rig {
  std::shared_ptr<test::registrations> notes = std::make_shared<test::registrations>();
  injected_system system;
  machine on{test::make_backend(), notes};
  [[nodiscard]] bool at_rest() const { return notes->now() == 0 && system.plan->mapped == 0; }
};

struct triple_each {
  const std::int32_t* in;
  std::int32_t* out;
  PULSEINFER_HD void operator()(std::int64_t, std::int64_t i) const { out[i] = 3 * in[i]; }
};

/// A figure of /proc/self/status in KiB, such as "VmRSS:".
std::int64_t status_of(const std::string& key) {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    std::int64_t value = -1;
    if (word == key && file >> value) return value;
  }
  return -1;
}

}  // namespace

TEST_CASE("pinned resource: allocations are pinned memory, each of its own pages") {
  rig r;
  {
    resource memory(r.on, {}, r.system);
    std::pmr::memory_resource& any = memory;
    void* const first = any.allocate(100);
    void* const second = any.allocate(page + 1, 16);
    void* const third = any.allocate(0);
    void* const fourth = any.allocate(10, 4 * page);
    CHECK(reinterpret_cast<std::uintptr_t>(fourth) % (4 * page) == 0);
    CHECK(memory.allocations() == 4);
    CHECK(r.system.plan->mapped == static_cast<std::int64_t>(5 * page));
    REQUIRE(memory.find(second) != nullptr);
    CHECK(memory.find(second)->report().pinned_bytes == page + 1);
    CHECK(memory.find(&r) == nullptr);
    std::memset(second, 1, page + 1);
    any.deallocate(second, page + 1, 16);
    any.deallocate(first, 100);
    any.deallocate(third, 0);
    CHECK(memory.allocations() == 1);
    CHECK(any.is_equal(memory));
    resource other(r.on, {}, r.system);
    CHECK(!any.is_equal(other));
    // What is not given back goes with the resource.
  }
  CHECK(r.at_rest());
}

TEST_CASE("pinned resource: containers of the standard library live in it") {
  rig r;
  {
    resource memory(r.on, {}, r.system);
    std::pmr::vector<std::int32_t> values(&memory);
    for (std::int32_t i = 0; i < 5000; ++i) values.push_back(i);
    CHECK(values[4999] == 4999);
    CHECK(memory.allocations() == 1);
    std::pmr::unsynchronized_pool_resource pool(&memory);
    std::pmr::vector<std::pmr::string> texts(&pool);
    for (int i = 0; i < 200; ++i) texts.emplace_back(std::string(40, 'x'));
    CHECK(memory.allocations() < 40);
    r.notes->fail_from = 1;
    const auto before = values;
    CHECK_THROWS_AS(values.resize(100'000), pulseinfer::device_error);
    CHECK(values == before);
  }
  CHECK(r.at_rest());
}

TEST_CASE("pinned allocator: a vector of pinned memory, reached by kernels") {
  rig r;
  {
    auto stream = r.on.make_stream(stream_priority::normal);
    const allocator<std::int32_t> from(r.on, {}, r.system);
    std::vector<std::int32_t, allocator<std::int32_t>> in(1000, from), out(1000, from);
    std::iota(in.begin(), in.end(), 0);
    r.on.for_each({1, 1000}, {}, 8000,
                  triple_each{r.on.device_pointer(in.data()), r.on.device_pointer(out.data())},
                  stream);
    r.on.sync(stream);
    for (std::size_t i = 0; i < 1000; ++i) CHECK(out[i] == 3 * in[i]);

    const allocator<double> doubles(from);
    CHECK(doubles == from);
    CHECK(from.resource()->allocations() == 2);
    const allocator<std::int32_t> other(r.on, {}, r.system);
    CHECK(!(other == from));
    auto moved = std::move(in);
    in = std::vector<std::int32_t, allocator<std::int32_t>>(5, other);
    CHECK(moved[999] == 999);
    std::swap(in, moved);
    CHECK(in.size() == 1000);
    CHECK(in.get_allocator() == from);
  }
  CHECK(r.at_rest());
}

TEST_CASE("pinned allocator: sizes that no address space holds are refused") {
  rig r;
  allocator<std::int64_t> from(r.on, {}, r.system);
  CHECK_THROWS_AS((void)from.allocate(std::numeric_limits<std::size_t>::max() / 4),
                  std::bad_array_new_length);
  CHECK_THROWS_AS((void)from.allocate(std::size_t{1} << 58), out_of_memory);
  r.system.plan->map = ENOMEM;
  CHECK_THROWS_AS((void)from.allocate(1), std::bad_alloc);
  CHECK(from.resource()->allocations() == 0);
  CHECK(r.at_rest());
}

TEST_CASE("paged backend: what allocates through a backend has its pages") {
  test::each_backend([](const test::backend& base) {
    pinned_options options;
    options.max_chunk_bytes = 4 * page;
    paged backend(base, options);
    auto stream = backend.make_stream(stream_priority::normal);
    CHECK(backend.allocate_pinned(0) == nullptr);
    backend.deallocate_pinned(nullptr, 0);
    {
      const pulseinfer::pinned_buffer<std::int32_t, paged> in(backend, 5000), out(backend, 5000);
      CHECK(backend.resource().allocations() == 2);
      CHECK(backend.resource().find(in.data())->report().chunks == 2);
      std::iota(in.span().begin(), in.span().end(), 0);
      const std::size_t half = 4 * page / sizeof(std::int32_t);  // a chunk at a time
      for (const std::size_t at : {std::size_t{0}, half}) {
        backend.for_each({1, static_cast<std::int64_t>(std::min(half, 5000 - at))}, {}, 0,
                         triple_each{backend.device_pointer(in.data() + at),
                                     backend.device_pointer(out.data() + at)},
                         stream);
      }
      backend.sync(stream);
      for (std::size_t i = 0; i < 5000; ++i) CHECK(out[i] == 3 * in[i]);
      pulseinfer::staging_pool<paged> staging(backend, 512, 2);
      CHECK(backend.resource().allocations() == 3);
    }
    CHECK(backend.resource().allocations() == 0);
    CHECK_THROWS_AS((void)backend.allocate_pinned(std::size_t{1} << 60), out_of_memory);
  });
}

TEST_CASE("fault 28: four threads allocate and free at once, also each other's") {
  if (!test::takes_threads<test::backend>) return;
  rig r;
  {
    resource memory(r.on, {}, r.system);
    const int rounds = test::rounds(1'000, 100'000);
    std::vector<std::thread> threads;
    std::atomic<void*> left[4] = {};
    std::atomic<int> wrong{0};
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int i = 0; i < rounds; ++i) {
          const std::size_t bytes = 1 + static_cast<std::size_t>((i * 37 + t) % 9000);
          auto* const p = static_cast<unsigned char*>(memory.allocate(bytes));
          if (p[0] != 0 || p[bytes - 1] != 0) ++wrong;
          std::memset(p, t + 1, bytes);
          if (p[bytes / 2] != t + 1) ++wrong;
          void* const others = left[(t + i) % 4].exchange(p);
          if (others != nullptr) memory.deallocate(others, 0);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(wrong == 0);
    CHECK(memory.allocations() <= 4);
  }
  CHECK(r.at_rest());
}

TEST_CASE("pinned resource: resident and locked memory stay flat over many cycles") {
  rig r;
  resource memory(r.on, {}, r.system);
  const auto cycle = [&](int i) {
    const std::size_t bytes = 1 + static_cast<std::size_t>(i % 40) * 1000;
    void* const p = memory.allocate(bytes);
    static_cast<unsigned char*>(p)[bytes - 1] = 1;
    memory.deallocate(p, bytes);
    if (i % 1'000 == 0) r.notes->entered.clear();
    if (i % 1'000 == 0) r.notes->left.clear();
  };
  for (int i = 0; i < 2'000; ++i) cycle(i);
  const std::int64_t resident = status_of("VmRSS:");
  const std::int64_t locked = status_of("VmLck:");
  const std::int64_t size = status_of("VmSize:");
  REQUIRE(resident > 0);
  const int cycles = test::rounds(10'000, 1'000'000);
  for (int i = 0; i < cycles; ++i) cycle(i);
  constexpr std::int64_t most = test::is_sanitized ? 64 * 1024 : 1024;
  if (!test::is_sanitized) CHECK(status_of("VmSize:") - size < most);
  CHECK(status_of("VmRSS:") - resident < most);
  CHECK(status_of("VmLck:") == locked);
  CHECK(size > 0);
  CHECK(memory.allocations() == 0);
  CHECK(r.at_rest());
}

TEST_CASE("pinned resource: a child leaves it to its parent") {
  rig r;
  std::optional<resource> memory(std::in_place, r.on, pinned_options{}, r.system);
  void* const p = memory->allocate(3 * page);
  const std::size_t before = r.notes->now();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    memory.reset();
    _exit(r.notes->now() == before ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  std::memset(p, 1, 3 * page);
  memory->deallocate(p, 3 * page);
  CHECK(r.at_rest());
}
