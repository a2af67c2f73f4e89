// SPDX-License-Identifier: Apache-2.0
/// @file
/// Chunks are handed out oldest first, waiters are served in order, and a chunk that the device
/// still works on is fenced by its event.
#include "pulseinfer/staging_pool.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/pinned_allocator.hpp"
#include "support/device_array.hpp"
#include "support/hold.hpp"
#include "support/host_function.hpp"
#include "support/rounds.hpp"

namespace {

using pulseinfer::copy_direction;
using pulseinfer::event_state;
using pulseinfer::stream_priority;
using pool_type = pulseinfer::staging_pool<test::backend>;
using chunk_type = pool_type::chunk;

/// Notes the chunk that it is given.
struct noting_waiter : pool_type::waiter {
  noting_waiter() { chunk_ready = &note; }
  noting_waiter(const noting_waiter&) = delete;
  static void note(pool_type::waiter& self, chunk_type& chunk) noexcept {
    auto& me = static_cast<noting_waiter&>(self);
    ++me.calls;
    me.got.store(&chunk);
  }
  std::atomic<chunk_type*> got{nullptr};
  int calls = 0;
};

struct copy_bytes {
  const std::byte* from;
  std::byte* to;
  PULSEINFER_HD void operator()(std::int64_t, std::int64_t i) const { to[i] = from[i]; }
};

}  // namespace

TEST_CASE("staging pool: a new one has all its chunks") {
  const pool_type pool(test::make_backend(), 768, 3);
  CHECK(pool.size() == 3);
  CHECK(pool.chunk_bytes() == 768);
  CHECK(pool.available() == 3);
}

TEST_CASE("staging pool: each chunk is a pair of its own memory") {
  test::backend backend = test::make_backend();
  pool_type pool(backend, 512, 3);
  noting_waiter waiter;
  std::vector<std::byte*> host, device;
  std::vector<std::int32_t> indices;
  for (std::int32_t left = 2; left >= 0; --left) {
    chunk_type* const chunk = pool.acquire_or_wait(waiter);
    REQUIRE(chunk != nullptr);
    CHECK(pool.available() == left);
    CHECK(chunk->bytes == 512);
    CHECK(chunk->host_on_device == backend.device_pointer(chunk->host));
    // Words of 16 bytes are what kernels move.
    CHECK(reinterpret_cast<std::uintptr_t>(chunk->device) % 256 == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(chunk->host_on_device) % 16 == 0);
    CHECK(backend.poll(chunk->drained) == event_state::done);
    CHECK(backend.poll(chunk->copied) == event_state::done);
    host.push_back(chunk->host);
    device.push_back(chunk->device);
    indices.push_back(chunk->index);
  }
  std::sort(host.begin(), host.end());
  std::sort(device.begin(), device.end());
  for (std::size_t i = 0; i + 1 < 3; ++i) {
    CHECK(host[i + 1] - host[i] >= 512);
    CHECK(device[i + 1] - device[i] >= 512);
  }
  CHECK((indices == std::vector<std::int32_t>{0, 1, 2}));
  CHECK(waiter.calls == 0);
}

TEST_CASE("staging pool: what was released first is handed out first") {
  pool_type pool(test::make_backend(), 256, 3);
  noting_waiter waiter;
  chunk_type* chunks[3];
  for (auto& chunk : chunks) chunk = pool.acquire_or_wait(waiter);
  // Round and round, so that the ring of free chunks wraps at every place.
  for (int round = 0; round < 10; ++round) {
    pool.release(*chunks[2]);
    pool.release(*chunks[0]);
    CHECK(pool.available() == 2);
    CHECK(pool.acquire_or_wait(waiter) == chunks[2]);
    pool.release(*chunks[1]);
    CHECK(pool.acquire_or_wait(waiter) == chunks[0]);
    CHECK(pool.acquire_or_wait(waiter) == chunks[1]);
    CHECK(pool.available() == 0);
    std::swap(chunks[0], chunks[1]);
  }
  CHECK(waiter.calls == 0);
}

TEST_CASE("staging pool: waiters are served in order, each once") {
  pool_type pool(test::make_backend(), 256, 2);
  noting_waiter none, first, second, third;
  chunk_type* const a = pool.acquire_or_wait(none);
  chunk_type* const b = pool.acquire_or_wait(none);
  CHECK(pool.acquire_or_wait(first) == nullptr);
  CHECK(pool.acquire_or_wait(second) == nullptr);
  CHECK(pool.acquire_or_wait(third) == nullptr);
  CHECK(first.calls == 0);

  pool.release(*b);
  CHECK(first.got.load() == b);
  CHECK(second.calls == 0);
  CHECK(pool.available() == 0);  // it went from hand to hand
  pool.release(*a);
  CHECK(second.got.load() == a);
  CHECK(third.calls == 0);
  pool.release(*a);
  CHECK(third.got.load() == a);
  pool.release(*a);
  pool.release(*b);
  CHECK(pool.available() == 2);
  for (const noting_waiter* waiter : {&first, &second, &third}) CHECK(waiter->calls == 1);

  // The queue is empty again: a waiter can be used once more, and no old one is called.
  CHECK(pool.acquire_or_wait(none) == a);
  CHECK(pool.acquire_or_wait(none) == b);
  CHECK(pool.acquire_or_wait(second) == nullptr);
  pool.release(*b);
  CHECK(second.calls == 2);
  CHECK(first.calls + third.calls == 2);
}

namespace {

/// Gives its chunk back at once, and asks again until it has had `rounds` of them.
struct greedy_waiter : pool_type::waiter {
  greedy_waiter(pool_type& of, int turns) : pool(&of), rounds(turns) { chunk_ready = &turn; }
  static void turn(pool_type::waiter& self, chunk_type& chunk) noexcept {
    auto& me = static_cast<greedy_waiter&>(self);
    if (--me.rounds > 0 && me.pool->acquire_or_wait(me) != nullptr) me.took_free_chunk = true;
    me.pool->release(chunk);
  }
  pool_type* pool;
  int rounds;
  bool took_free_chunk = false;
};

}  // namespace

TEST_CASE("staging pool: only so many chunks are out at a time, and the oldest one is next") {
  pool_type pool(test::make_backend(), 256, 4, 2);
  noting_waiter first, second;
  chunk_type* const a = pool.acquire_or_wait(first);
  chunk_type* const b = pool.acquire_or_wait(first);
  REQUIRE(a != nullptr);
  REQUIRE(b != nullptr);
  CHECK(pool.available() == 2);
  CHECK(pool.acquire_or_wait(first) == nullptr);
  CHECK(pool.acquire_or_wait(second) == nullptr);
  pool.release(*a);
  REQUIRE(first.got.load() != nullptr);
  CHECK(first.got.load()->index == 2);  // not the one that has just come back
  CHECK(second.calls == 0);
  pool.release(*b);
  REQUIRE(second.got.load() != nullptr);
  CHECK(second.got.load()->index == 3);
  CHECK(pool.available() == 2);
  pool.release(*first.got.load());
  chunk_type* const again = pool.acquire_or_wait(first);
  REQUIRE(again != nullptr);
  CHECK(again == a);
  pool.release(*again);
  pool.release(*second.got.load());
  CHECK(pool.available() == 4);
}

TEST_CASE("staging pool: lower ranks are served first, equal ones as they came") {
  pool_type pool(test::make_backend(), 256, 1);
  noting_waiter none;
  noting_waiter waiters[5];
  const std::uint64_t ranks[] = {7, 3, 7, 0, 3};
  chunk_type* const chunk = pool.acquire_or_wait(none);
  REQUIRE(chunk != nullptr);
  for (int i = 0; i < 5; ++i) {
    waiters[i].rank = ranks[i];
    CHECK(pool.acquire_or_wait(waiters[i]) == nullptr);
  }
  for (const int next : {3, 1, 4, 0, 2}) {
    CHECK(waiters[next].calls == 0);
    pool.release(*chunk);
    CHECK(waiters[next].calls == 1);
  }
  pool.release(*chunk);
  CHECK(pool.available() == 1);
}

TEST_CASE("staging pool: a waiter may release, and wait again, while it is being called") {
  pool_type pool(test::make_backend(), 256, 1);
  noting_waiter none;
  chunk_type* const chunk = pool.acquire_or_wait(none);
  greedy_waiter first(pool, 5), second(pool, 3);
  CHECK(pool.acquire_or_wait(first) == nullptr);
  CHECK(pool.acquire_or_wait(second) == nullptr);
  pool.release(*chunk);
  CHECK(first.rounds == 0);
  CHECK(second.rounds == 0);
  CHECK(!first.took_free_chunk);
  CHECK(!second.took_free_chunk);
  CHECK(pool.available() == 1);
}

TEST_CASE("staging pool: kernels reach the pinned half of a chunk") {
  test::each_backend([](test::backend backend) {
    auto stream = backend.make_stream(stream_priority::normal);
    pool_type pool(backend, 256, 2);
    noting_waiter none;
    (void)pool.acquire_or_wait(none);
    chunk_type& chunk = *pool.acquire_or_wait(none);  // the second: its offset counts
    std::fill_n(chunk.host, 256, std::byte{9});
    backend.for_each({1, 256}, {}, 512, copy_bytes{chunk.host_on_device, chunk.device}, stream);
    const test::pinned_array<std::byte, test::backend> out(backend, 256);
    backend.copy_async(out.data(), chunk.device, 256, copy_direction::device_to_host, stream);
    backend.sync(stream);
    CHECK((out.values() == std::vector<std::byte>(256, std::byte{9})));
  });
}

/// The pool does not wait for a chunk's device work: it hands the chunk on with the event that says
/// when, and whoever has it next waits for that.
TEST_CASE("fault 30: a chunk handed out again is not written before its last copy is done") {
  test::each_backend([](test::backend backend) {
    constexpr std::size_t size = 2'048;
    auto slow = backend.make_stream(stream_priority::normal);
    auto fast = backend.make_stream(stream_priority::high);
    pool_type pool(backend, size, 1);
    test::device_array<std::byte, test::backend> first(backend, size), second(backend, size);
    noting_waiter none;

    chunk_type& before = *pool.acquire_or_wait(none);
    std::fill_n(before.host, size, std::byte{1});
    test::hold<test::backend> held(backend, slow);
    backend.copy_async(first.data(), before.host, size, copy_direction::host_to_device, slow);
    backend.record(before.drained, slow);
    pool.release(before);

    chunk_type& again = *pool.acquire_or_wait(none);
    CHECK(&again == &before);
    if (test::hold<test::backend>::is_exact) {
      CHECK(backend.poll(again.drained) == event_state::pending);
    }
    test::host_function fill([&] {
      std::fill_n(again.host, size, std::byte{2});
      backend.copy_async(second.data(), again.host, size, copy_direction::host_to_device, fast);
      backend.record(again.drained, fast);
    });
    const test::backend::event* const after[] = {&again.drained};
    backend.host_async(after, fill.task(), {.bytes = size});
    held.release();
    backend.sync_until([&] { return fill.has_run(); });
    backend.sync(again.drained);
    pool.release(again);
    CHECK((first.download(slow) == std::vector<std::byte>(size, std::byte{1})));
    CHECK((second.download(fast) == std::vector<std::byte>(size, std::byte{2})));
  });
}

TEST_CASE("staging pool: its end waits for the work on its chunks") {
  test::each_backend([](test::backend backend) {
    constexpr std::size_t size = 4'096;
    auto stream = backend.make_stream(stream_priority::normal);
    const test::pinned_array<std::byte, test::backend> out(backend, size);
    out.fill(std::byte{0});
    {
      pool_type pool(backend, size, 2);
      noting_waiter none;
      chunk_type& chunk = *pool.acquire_or_wait(none);
      std::fill_n(chunk.host, size, std::byte{5});
      backend.copy_async(chunk.device, chunk.host, size, copy_direction::host_to_device, stream);
      backend.copy_async(out.data(), chunk.device, size, copy_direction::device_to_host, stream);
      backend.record(chunk.drained, stream);
      pool.release(chunk);
    }
    CHECK((out.values() == std::vector<std::byte>(size, std::byte{5})));
    backend.sync(stream);
  });
}

TEST_CASE("staging pool: threads share two chunks") {
  if constexpr (test::takes_threads<test::backend>) {
    const int rounds = test::rounds(300, 100'000);
    pool_type pool(test::make_backend(), 256, 2);
    const auto use = [&pool, rounds](std::byte mine, bool& undisturbed) {
      for (int round = 0; round < rounds; ++round) {
        noting_waiter waiter;
        chunk_type* chunk = pool.acquire_or_wait(waiter);
        while (chunk == nullptr) {
          std::this_thread::yield();
          chunk = waiter.got.load();
        }
        std::fill_n(chunk->host, 256, mine);
        undisturbed = undisturbed && std::count(chunk->host, chunk->host + 256, mine) == 256;
        pool.release(*chunk);
      }
    };
    bool undisturbed[3] = {true, true, true};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < 3; ++i) {
      threads.emplace_back([&, i] { use(static_cast<std::byte>(i + 1), undisturbed[i]); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const bool mine : undisturbed) CHECK(mine);
    CHECK(pool.available() == 2);
  }
}

TEST_CASE("staging pool: sizes that make no sense are refused") {
  const test::backend backend = test::make_backend();
  CHECK_THROWS_WITH_AS(pool_type(backend, 256, 0), "staging_pool: chunks is 0, expected 1 to 4096",
                       std::invalid_argument);
  CHECK_THROWS_AS(pool_type(backend, 256, -1), std::invalid_argument);
  CHECK_THROWS_WITH_AS(pool_type(backend, 256, 4'097), doctest::Contains("chunks is 4097"),
                       std::invalid_argument);
  for (const std::size_t bytes :
       {std::size_t{0}, std::size_t{255}, std::size_t{257}, (std::size_t{1} << 40) + 256}) {
    CAPTURE(bytes);
    CHECK_THROWS_WITH_AS(pool_type(backend, bytes, 1), doctest::Contains("chunk_bytes is "),
                         std::invalid_argument);
  }
  CHECK_THROWS_WITH_AS(pool_type(backend, 256, 3, 4),
                       doctest::Contains("at_once is 4, expected 0 to 3"), std::invalid_argument);
  CHECK_THROWS_AS(pool_type(backend, 256, 3, -1), std::invalid_argument);
  CHECK_THROWS_AS(pool_type(backend, std::size_t{1} << 40, 4'096), pulseinfer::out_of_memory);
}

TEST_CASE("fault 25: pinned memory in pieces that end within chunks is refused") {
  using paged = pulseinfer::paged_backend<test::backend>;
  const std::size_t page = pulseinfer::detail::page_system{}.page_bytes();
  pulseinfer::pinned_options options;
  options.max_chunk_bytes = 4 * page;
  paged backend(test::make_backend(), options);
  CHECK_THROWS_WITH_AS(
      pulseinfer::staging_pool<paged>(backend, 3 * page, 3),
      pulseinfer::detail::text_of("staging_pool: pinned memory in pieces of ", 4 * page,
                                  " bytes that end within chunks of ", 3 * page,
                                  ", expected pinned_options::max_chunk_bytes to be at least ",
                                  9 * page, ", or a backend that is not paged")
          .c_str(),
      std::invalid_argument);
  CHECK(backend.resource().allocations() == 0);
  const pulseinfer::staging_pool<paged> two_a_piece(backend, 2 * page, 5);
  CHECK(two_a_piece.size() == 5);
  const pulseinfer::staging_pool<paged> in_one_piece(backend, page + 256, 3);
  CHECK(in_one_piece.size() == 3);
}
