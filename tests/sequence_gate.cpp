// SPDX-License-Identifier: Apache-2.0
/// @file
/// Leases of a sequence against whoever closes it or takes units from under it.
#include "pulseinfer/detail/sequence_gate.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "support/rounds.hpp"

namespace {

using pulseinfer::detail::sequence_gate;

}  // namespace

TEST_CASE("sequence gate: leases are taken while it is open, in its generation") {
  sequence_gate gate;
  const std::uint32_t first = gate.generation();
  CHECK(!gate.is_open());
  CHECK(!gate.acquire(first));
  gate.open();
  CHECK(gate.is_open());
  CHECK(gate.is_open(first));
  CHECK(!gate.is_open(first + 1));
  CHECK(gate.acquire(first));
  CHECK(gate.acquire(first));
  CHECK(!gate.acquire(first + 1));
  CHECK(!gate.acquire(first - 1));
  CHECK(gate.leases() == 2);
  gate.close();
  CHECK(!gate.is_open());
  CHECK(!gate.acquire(first));
  CHECK(gate.generation() == first + 1);
  CHECK(gate.leases() == 2);  // they go on
  CHECK(!gate.release().is_any);
  const sequence_gate::rest last = gate.release();
  CHECK(last.is_any);  // the last one has the closing to finish
  CHECK(last.generation == first + 1);
  gate.open();
  CHECK(gate.acquire(first + 1));
  CHECK(!gate.release().is_any);  // an open one has nothing to be done
}

TEST_CASE("sequence gate: who gives the last lease back is called where that was asked for") {
  sequence_gate gate;
  gate.open();
  const std::uint32_t generation = gate.generation();
  CHECK(!gate.wants_attention());
  CHECK(gate.acquire(generation));
  CHECK(gate.acquire(generation));
  gate.call_for_attention();
  CHECK(gate.is_open(generation));
  CHECK(gate.acquire(generation));
  CHECK(!gate.release().is_any);
  CHECK(!gate.release().is_any);
  CHECK(gate.release().is_any);
  CHECK(gate.wants_attention());
  gate.end_attention();
  CHECK(!gate.wants_attention());
  CHECK(gate.acquire(generation));
  CHECK(!gate.release().is_any);
}

TEST_CASE("sequence gate: a leased one is not locked, a locked one is not leased") {
  sequence_gate gate;
  gate.open();
  const std::uint32_t generation = gate.generation();
  CHECK(gate.acquire(generation));
  CHECK(!gate.try_lock());
  CHECK(!gate.release().is_any);
  CHECK(gate.try_lock());
  CHECK(gate.leases() == 0);
  std::atomic<bool> is_leased{false};
  std::thread reader([&] {
    CHECK(gate.acquire(generation));
    is_leased = true;
  });
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  CHECK(!is_leased);
  gate.unlock();
  reader.join();
  CHECK(is_leased);
  CHECK(gate.leases() == 1);
}

/// For ThreadSanitizer, too: what is written under the lock is not atomic.
TEST_CASE("sequence gate: nobody has a lease while somebody has the lock") {
  sequence_gate gate;
  gate.open();
  const std::uint32_t generation = gate.generation();
  const int rounds = test::rounds(20'000, 2'000'000);
  std::int64_t content = 0;
  std::atomic<bool> is_over{false};
  std::atomic<int> torn{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!is_over.load()) {
        std::this_thread::yield();  // without a lease, so that the lock can be had on one core, too
        if (!gate.acquire(generation)) ++torn;
        const std::int64_t seen = *const_cast<const volatile std::int64_t*>(&content);
        if (seen != *const_cast<const volatile std::int64_t*>(&content) || seen % 2 != 0) ++torn;
        if (gate.release().is_any) ++torn;
      }
    });
  }
  int locked = 0;
  // However often that takes: a reader that is put to sleep with a lease refuses any number of rounds.
  for (int i = 0; i < rounds || locked < rounds / 100; ++i) {
    if (!gate.try_lock()) {
      if (i % 64 == 0) std::this_thread::yield();
      continue;
    }
    ++locked;
    volatile std::int64_t* const c = &content;
    *c = *c + 1;
    *c = *c + 1;
    gate.unlock();
  }
  is_over = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(torn == 0);
  CHECK(gate.leases() == 0);
}
