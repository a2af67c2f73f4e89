// SPDX-License-Identifier: Apache-2.0
/// @file
/// What every backend keeps: memory, streams, events and copies. Each function is one case, for one
/// backend; tests/backend.cpp names them.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/error.hpp"
#include "support/device_array.hpp"
#include "support/hold.hpp"

namespace conformance {

using pulseinfer::copy_direction;
using pulseinfer::event_state;
using pulseinfer::stream_priority;

/// out[i] = in[i] * factor + addend, modulo 2^32, over blocks of `words`.
struct multiply_add {
  const std::int32_t* in;
  std::int32_t* out;
  std::int64_t words;
  std::int32_t factor;
  std::int32_t addend;
  PULSEINFER_HD void operator()(std::int64_t block, std::int64_t word) const {
    const std::int64_t i = block * words + word;
    out[i] = static_cast<std::int32_t>(static_cast<std::uint32_t>(in[i]) *
                                           static_cast<std::uint32_t>(factor) +
                                       static_cast<std::uint32_t>(addend));
  }
};

template <class Backend>
void enqueue_multiply_add(Backend& backend, const std::int32_t* in, std::int32_t* out,
                          std::size_t size, std::int32_t factor, std::int32_t addend,
                          typename Backend::stream& stream) {
  const auto words = static_cast<std::int64_t>(size);
  backend.for_each({1, words}, {}, 8 * size, multiply_add{in, out, words, factor, addend}, stream);
}

inline std::vector<std::byte> random_bytes(std::size_t size, std::uint64_t seed) {
  pulseinfer::detail::random_source draw(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(draw.below(256));
  return bytes;
}

// Memory.

template <class Backend>
void memory_of_zero_bytes_is_null(Backend& backend) {
  CHECK(backend.allocate_device(0) == nullptr);
  CHECK(backend.allocate_pinned(0) == nullptr);
  backend.deallocate_device(nullptr, 0);
  backend.deallocate_pinned(nullptr, 0);
}

template <class Backend>
void memory_is_aligned_as_stated(Backend& backend) {
  const pulseinfer::memory_limits limits = backend.limits();
  CHECK(limits.device_bytes_total > 0);
  CHECK(limits.device_bytes_free <= limits.device_bytes_total);
  for (const std::size_t bytes : {1u, 63u, 257u, 4097u}) {
    void* const device = backend.allocate_device(bytes);
    void* const pinned = backend.allocate_pinned(bytes);
    CHECK(reinterpret_cast<std::uintptr_t>(device) % limits.device_alignment == 0);
    CHECK(reinterpret_cast<std::uintptr_t>(pinned) % limits.pinned_alignment == 0);
    std::memset(pinned, 1, bytes);
    backend.deallocate_device(device, bytes);
    backend.deallocate_pinned(pinned, bytes);
  }
}

template <class Backend>
void memory_that_cannot_be_had_throws(Backend& backend) {
  constexpr std::size_t too_much = std::size_t{1} << 60;
  CHECK_THROWS_AS((void)backend.allocate_device(too_much), pulseinfer::out_of_memory);
  CHECK_THROWS_AS((void)backend.allocate_pinned(too_much), pulseinfer::out_of_memory);
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  CHECK_THROWS_AS((void)backend.allocate_device(most), pulseinfer::out_of_memory);
  CHECK_THROWS_AS((void)backend.allocate_pinned(most), pulseinfer::out_of_memory);
  void* const still_works = backend.allocate_device(64);
  CHECK(still_works != nullptr);
  backend.deallocate_device(still_works, 64);
}

template <class Backend>
void kernels_reach_pinned_memory(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  const test::pinned_array<std::int32_t, Backend> in(backend, 100);
  const test::pinned_array<std::int32_t, Backend> out(backend, 100);
  std::iota(in.data(), in.data() + 100, 0);
  out.fill(0);
  enqueue_multiply_add(backend, backend.device_pointer(in.data()),
                       backend.device_pointer(out.data()), 100, 2, 1, stream);
  backend.sync(stream);
  for (std::size_t i = 0; i < 100; ++i) CHECK(out[i] == 2 * in[i] + 1);
}

template <class Backend>
void kernels_reach_registered_memory(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  constexpr std::size_t bytes = 1 << 16;
  const std::unique_ptr<std::byte, decltype(&std::free)> memory(
      static_cast<std::byte*>(std::aligned_alloc(bytes, 2 * bytes)), &std::free);
  backend.register_pinned(memory.get(), 0);
  backend.unregister_pinned(memory.get(), 0);
  for (int round = 0; round < 2; ++round) {  // the ranges can be had again
    for (const std::size_t at : {bytes, std::size_t{0}}) {
      backend.register_pinned(memory.get() + at, bytes);
    }
    for (const std::size_t at : {std::size_t{0}, bytes}) {
      auto* const values = reinterpret_cast<std::int32_t*>(memory.get() + at);
      std::iota(values, values + 200, round);
      enqueue_multiply_add(backend, backend.device_pointer(values),
                           backend.device_pointer(values + 100), 100, 2, 1, stream);
      backend.sync(stream);
      for (int i = 0; i < 100; ++i) CHECK(values[100 + i] == 2 * (i + round) + 1);
    }
    backend.unregister_pinned(memory.get(), bytes);
    backend.unregister_pinned(memory.get() + bytes, bytes);
  }
}

// Streams and events.

template <class Backend>
void work_of_one_stream_runs_in_order(Backend& backend) {
  constexpr std::size_t size = 300;
  auto stream = backend.make_stream(stream_priority::normal);
  std::vector<std::int32_t> expected(size);
  std::iota(expected.begin(), expected.end(), 0);
  test::device_array<std::int32_t, Backend> a(backend, expected, stream);
  test::device_array<std::int32_t, Backend> b(backend, size);
  for (std::int32_t round = 0; round < 8; ++round) {
    enqueue_multiply_add(backend, a.data(), b.data(), size, 3, round, stream);
    backend.copy_async(a.data(), b.data(), a.bytes(), copy_direction::device_to_device, stream);
    for (std::int32_t& value : expected) value = value * 3 + round;
  }
  CHECK((a.download(stream) == expected));
}

template <class Backend>
void an_event_orders_two_streams(Backend& backend) {
  constexpr std::size_t size = 3000;
  auto writer = backend.make_stream(stream_priority::normal);
  auto reader = backend.make_stream(stream_priority::high);
  auto written = backend.make_event();
  const test::pinned_array<std::int32_t, Backend> source(backend, size);
  std::iota(source.data(), source.data() + size, 0);
  test::device_array<std::int32_t, Backend> middle(backend, std::vector<std::int32_t>(size),
                                                   writer);
  test::device_array<std::int32_t, Backend> result(backend, size);
  test::hold<Backend> held(backend, writer);
  backend.copy_async(middle.data(), source.data(), source.bytes(), copy_direction::host_to_device,
                     writer);
  backend.record(written, writer);
  backend.enqueue_wait(written, reader);
  enqueue_multiply_add(backend, middle.data(), result.data(), size, 1, 7, reader);
  held.release();
  std::vector<std::int32_t> expected(size);
  std::iota(expected.begin(), expected.end(), 7);
  CHECK((result.download(reader) == expected));
}

/// Later records, also on other streams, change nothing for a wait that is enqueued already.
template <class Backend>
void a_wait_captures_the_record_at_its_call(Backend& backend) {
  constexpr std::size_t size = 500;
  auto slow = backend.make_stream(stream_priority::normal);
  auto fast = backend.make_stream(stream_priority::normal);
  auto reader = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  test::device_array<std::int32_t, Backend> a(backend, std::vector<std::int32_t>(size, 1), slow);
  test::device_array<std::int32_t, Backend> b(backend, std::vector<std::int32_t>(size, 2), slow);
  test::device_array<std::int32_t, Backend> c(backend, size);
  test::hold<Backend> held(backend, slow);
  enqueue_multiply_add(backend, a.data(), b.data(), size, 5, 0, slow);
  backend.record(event, slow);
  backend.enqueue_wait(event, reader);
  backend.record(event, fast);
  backend.sync(event);
  enqueue_multiply_add(backend, b.data(), c.data(), size, 1, 0, reader);
  held.release();
  CHECK((c.download(reader) == std::vector<std::int32_t>(size, 5)));
  backend.sync(slow);
}

template <class Backend>
void a_wait_before_the_first_record_passes(Backend& backend) {
  auto slow = backend.make_stream(stream_priority::normal);
  auto reader = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  CHECK(backend.poll(event) == event_state::done);
  backend.sync(event);
  test::hold<Backend> held(backend, slow);
  backend.enqueue_wait(event, reader);
  backend.record(event, slow);
  backend.sync(reader);  // would not return where the hold is exact
  if (test::hold<Backend>::is_exact) CHECK(backend.poll(event) == event_state::pending);
  held.release();
  backend.sync(event);
  CHECK(backend.poll(event) == event_state::done);
}

template <class Backend>
void polling_sees_an_event_get_done(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  const test::pinned_array<std::int32_t, Backend> out(backend, 64);
  test::device_array<std::int32_t, Backend> in(backend, std::vector<std::int32_t>(64, 3), stream);
  test::hold<Backend> held(backend, stream);
  backend.copy_async(out.data(), in.data(), in.bytes(), copy_direction::device_to_host, stream);
  backend.record(event, stream);
  const event_state first = backend.poll(event);
  CHECK((first == event_state::pending || (first == event_state::done && !held.is_exact)));
  held.release();
  while (backend.poll(event) == event_state::pending) {
  }
  CHECK(backend.poll(event) == event_state::done);
  CHECK((out.values() == std::vector<std::int32_t>(64, 3)));
}

template <class Backend>
void sync_of_a_stream_returns_after_all_its_work(Backend& backend) {
  constexpr std::size_t size = 2000;
  std::vector<typename Backend::stream> streams;
  for (int i = 0; i < 3; ++i) streams.push_back(backend.make_stream(stream_priority::normal));
  test::device_array<std::int32_t, Backend> a(backend, std::vector<std::int32_t>(size, 1),
                                              streams[0]);
  const test::pinned_array<std::int32_t, Backend> out(backend, 3 * size);
  out.fill(0);
  for (std::size_t i = 0; i < 3; ++i) {
    for (int part = 0; part < 4; ++part) {
      backend.copy_async(out.data() + i * size + static_cast<std::size_t>(part) * size / 4,
                         a.data(), a.bytes() / 4, copy_direction::device_to_host, streams[i]);
    }
  }
  for (std::size_t i = 0; i < 3; ++i) {
    backend.sync(streams[i]);
    CHECK(std::count(out.data() + i * size, out.data() + (i + 1) * size, 1) == size);
  }
  backend.sync(streams[0]);  // of an idle stream
}

template <class Backend>
void sync_of_an_event_returns_after_the_work_before_it(Backend& backend) {
  constexpr std::size_t size = 1000;
  auto stream = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  test::device_array<std::int32_t, Backend> in(backend, std::vector<std::int32_t>(size, 4), stream);
  const test::pinned_array<std::int32_t, Backend> out(backend, size);
  out.fill(0);
  for (std::int32_t round = 1; round <= 5; ++round) {  // the event is recorded again each time
    enqueue_multiply_add(backend, in.data(), in.data(), size, 1, 1, stream);
    backend.copy_async(out.data(), in.data(), in.bytes(), copy_direction::device_to_host, stream);
    backend.record(event, stream);
    backend.sync(event);
    CHECK((out.values() == std::vector<std::int32_t>(size, 4 + round)));
  }
}

template <class Backend>
void destroying_streams_and_events_waits_for_their_work(Backend& backend) {
  constexpr std::size_t size = 1000;
  const test::pinned_array<std::int32_t, Backend> out(backend, size);
  auto outer = backend.make_stream(stream_priority::normal);
  test::device_array<std::int32_t, Backend> in(backend, std::vector<std::int32_t>(size, 6), outer);
  out.fill(0);
  {
    auto stream = backend.make_stream(stream_priority::high);
    backend.copy_async(out.data(), in.data(), in.bytes(), copy_direction::device_to_host, stream);
    auto moved = std::move(stream);
    stream = backend.make_stream(stream_priority::normal);
  }
  CHECK((out.values() == std::vector<std::int32_t>(size, 6)));
  out.fill(0);
  {
    auto event = backend.make_event();
    backend.copy_async(out.data(), in.data(), in.bytes(), copy_direction::device_to_host, outer);
    backend.record(event, outer);
    auto moved = std::move(event);
  }
  CHECK((out.values() == std::vector<std::int32_t>(size, 6)));
}

template <class Backend>
void copies_of_a_backend_share_the_machine(Backend& backend) {
  auto second = std::make_unique<Backend>(backend);
  auto stream = second->make_stream(stream_priority::normal);
  auto event = backend.make_event();
  test::device_array<std::int32_t, Backend> a(*second, std::vector<std::int32_t>(10, 1), stream);
  test::device_array<std::int32_t, Backend> b(backend, 10);
  enqueue_multiply_add(backend, a.data(), b.data(), 10, 4, 0, stream);
  second->record(event, stream);
  Backend third = *second;
  second.reset();
  third.sync(event);
  CHECK(backend.poll(event) == event_state::done);
  CHECK((b.download(stream) == std::vector<std::int32_t>(10, 4)));
}

template <class Backend>
void two_threads_feed_two_streams(Backend& backend) {
  constexpr std::size_t size = 200;
  constexpr std::int32_t rounds = 50;
  std::vector<typename Backend::stream> streams;
  for (int i = 0; i < 2; ++i) streams.push_back(backend.make_stream(stream_priority::normal));
  test::device_array<std::int32_t, Backend> a(backend, std::vector<std::int32_t>(size), streams[0]);
  test::device_array<std::int32_t, Backend> b(backend, std::vector<std::int32_t>(size), streams[1]);
  const auto feed = [&](test::device_array<std::int32_t, Backend>& values,
                        typename Backend::stream& stream) {
    Backend mine = backend;
    for (std::int32_t round = 0; round < rounds; ++round) {
      enqueue_multiply_add(mine, values.data(), values.data(), size, 1, 1, stream);
      auto event = mine.make_event();
      mine.record(event, stream);
      if (round % 10 == 0) mine.sync(event);
    }
  };
  std::thread other([&] { feed(b, streams[1]); });
  feed(a, streams[0]);
  other.join();
  CHECK((a.download(streams[0]) == std::vector<std::int32_t>(size, rounds)));
  CHECK((b.download(streams[1]) == std::vector<std::int32_t>(size, rounds)));
}

// Copies.

template <class Backend>
void copies_go_in_all_directions(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  std::uint64_t seed = 1;
  for (const std::size_t size : {1u, 3u, 15u, 16u, 17u, 100u, 4099u}) {
    const std::vector<std::byte> bytes = random_bytes(size, ++seed);
    const test::pinned_array<std::byte, Backend> there(backend, size);
    const test::pinned_array<std::byte, Backend> back(backend, size);
    const test::device_array<std::byte, Backend> a(backend, size);
    const test::device_array<std::byte, Backend> b(backend, size);
    std::copy(bytes.begin(), bytes.end(), there.data());
    backend.copy_async(a.data(), there.data(), size, copy_direction::host_to_device, stream);
    backend.copy_async(b.data(), a.data(), size, copy_direction::device_to_device, stream);
    backend.copy_async(back.data(), b.data(), size, copy_direction::device_to_host, stream);
    backend.sync(stream);
    CHECK((back.values() == bytes));
  }
}

template <class Backend>
void a_copy_of_zero_bytes_does_nothing(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  const test::pinned_array<std::byte, Backend> memory(backend, 1);
  memory[0] = std::byte{5};
  backend.copy_async(nullptr, nullptr, 0, copy_direction::host_to_device, stream);
  backend.copy_async(memory.data(), nullptr, 0, copy_direction::device_to_host, stream);
  backend.copy_many_async({}, copy_direction::device_to_host, stream);
  const pulseinfer::copy_span none[] = {{nullptr, nullptr, 0}, {nullptr, nullptr, 0}};
  backend.copy_many_async(none, copy_direction::device_to_device, stream);
  backend.sync(stream);
  CHECK(memory[0] == std::byte{5});
}

template <class Backend>
void a_batch_copies_every_span_and_nothing_else(Backend& backend) {
  constexpr std::size_t size = 20000;
  auto stream = backend.make_stream(stream_priority::normal);
  const std::vector<std::byte> bytes = random_bytes(size, 9);
  const test::device_array<std::byte, Backend> source(backend, bytes, stream);
  const test::pinned_array<std::byte, Backend> out(backend, size);
  out.fill(std::byte{0});
  std::vector<std::byte> expected(size);
  std::vector<pulseinfer::copy_span> spans;
  pulseinfer::detail::random_source draw(10);
  for (std::size_t at = 0; at < size;) {
    const std::size_t count = std::min<std::size_t>(draw.below(300), size - at);
    const std::size_t from = draw.below(size - count + 1);
    if (draw.one_in(3)) {
      at += count + 1;  // a gap
      continue;
    }
    spans.push_back({out.data() + at, source.data() + from, count});
    std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(from), count,
                expected.begin() + static_cast<std::ptrdiff_t>(at));
    at += count;
  }
  backend.copy_many_async(spans, copy_direction::device_to_host, stream);
  spans.clear();  // the list is read before the call returns
  backend.sync(stream);
  CHECK((out.values() == expected));
}

/// Changes the source after a copy was enqueued, which is the caller's fault, and returns what
/// arrived: a word is of before the change or of after it, nothing else.
template <class Backend>
std::vector<std::int32_t> copy_of_a_source_that_changes(Backend& backend) {
  constexpr std::size_t size = 256;
  auto stream = backend.make_stream(stream_priority::normal);
  const test::pinned_array<std::int32_t, Backend> source(backend, size);
  const test::pinned_array<std::int32_t, Backend> result(backend, size);
  const test::device_array<std::int32_t, Backend> middle(backend, size);
  source.fill(1);
  test::hold<Backend> held(backend, stream);
  backend.copy_async(middle.data(), source.data(), source.bytes(), copy_direction::host_to_device,
                     stream);
  source.fill(2);
  held.release();
  backend.copy_async(result.data(), middle.data(), result.bytes(), copy_direction::device_to_host,
                     stream);
  backend.sync(stream);
  return result.values();
}

template <class Backend>
void a_copy_may_read_its_source_late(Backend& backend) {
  for (const std::int32_t word : copy_of_a_source_that_changes(backend)) {
    CHECK((word == 2 || (word == 1 && !test::hold<Backend>::is_exact)));
  }
}

template <class Backend>
void broken_copies_are_refused(Backend& backend) {
  auto stream = backend.make_stream(stream_priority::normal);
  test::device_array<std::int32_t, Backend> a(backend, std::vector<std::int32_t>(8, 1), stream);
  test::device_array<std::int32_t, Backend> b(backend, std::vector<std::int32_t>(8, 2), stream);
  CHECK_THROWS_AS(
      backend.copy_async(nullptr, a.data(), 8, copy_direction::device_to_device, stream),
      std::logic_error);
  CHECK_THROWS_AS(
      backend.copy_async(a.data(), nullptr, 8, copy_direction::device_to_device, stream),
      std::logic_error);
  // One bad span: the good one before it is not copied either.
  const pulseinfer::copy_span spans[] = {{a.data(), b.data(), 32}, {a.data(), nullptr, 8}};
  CHECK_THROWS_AS(backend.copy_many_async(spans, copy_direction::device_to_device, stream),
                  std::logic_error);
  CHECK((a.download(stream) == std::vector<std::int32_t>(8, 1)));
}

}  // namespace conformance
