// SPDX-License-Identifier: Apache-2.0
/// @file
/// Buffers own what they were given, once.
#include "pulseinfer/buffer.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "support/archetypes.hpp"

namespace {

using pulseinfer::device_buffer;
using pulseinfer::pinned_buffer;
using pulseinfer::stream_priority;

using pinned = pinned_buffer<std::int32_t, test::backend>;
using device = device_buffer<std::int32_t, test::backend>;

static_assert(std::is_nothrow_move_constructible_v<pinned> &&
              std::is_nothrow_move_assignable_v<pinned>);
static_assert(!std::is_copy_constructible_v<pinned> && !std::is_copy_assignable_v<pinned>);
static_assert(!std::is_default_constructible_v<device>);

// The host cannot reach into device memory by way of a buffer.
template <class Buffer>
concept host_readable = requires(const Buffer& b) {
  b.span();
  b[0];
};
static_assert(host_readable<pinned> && !host_readable<device>);

struct double_each {
  const std::int32_t* in;
  std::int32_t* out;
  PULSEINFER_HD void operator()(std::int64_t, std::int64_t word) const { out[word] = 2 * in[word]; }
};

struct alignas(64) wide {
  std::int64_t parts[8];
};

/// A machine that notes what is allocated and given back.
struct ledger {
  std::map<void*, std::size_t> device, pinned;
  int mistakes = 0;
};
struct noting_backend : archetype::backend {
  ledger* notes;

  explicit noting_backend(ledger& to) : notes(&to) {}
  void* allocate_device(std::size_t bytes) {
    return note(notes->device, archetype::backend::allocate_device(bytes), bytes);
  }
  void* allocate_pinned(std::size_t bytes) {
    return note(notes->pinned, archetype::backend::allocate_pinned(bytes), bytes);
  }
  void deallocate_device(void* p, std::size_t bytes) noexcept {
    take(notes->device, p, bytes);
    archetype::backend::deallocate_device(p, bytes);
  }
  void deallocate_pinned(void* p, std::size_t bytes) noexcept {
    take(notes->pinned, p, bytes);
    archetype::backend::deallocate_pinned(p, bytes);
  }

 private:
  static void* note(std::map<void*, std::size_t>& in, void* p, std::size_t bytes) {
    in[p] = bytes;
    return p;
  }
  void take(std::map<void*, std::size_t>& from, void* p, std::size_t bytes) noexcept {
    const auto found = from.find(p);
    if (found == from.end() || found->second != bytes) ++notes->mistakes;
    if (found != from.end()) from.erase(found);
  }
};

}  // namespace

TEST_CASE("buffer: elements and bytes of both kinds") {
  const test::backend backend = test::make_backend();
  const pinned p(backend, 100);
  CHECK(p.size() == 100);
  CHECK(p.bytes() == 400);
  CHECK(p.span().size() == 100);
  CHECK(p.span().data() == p.data());
  const device d(backend, 7);
  CHECK(d.size() == 7);
  CHECK(d.bytes() == 28);
  CHECK(d.data() != nullptr);
  CHECK(d.device_data() == d.data());
  const pinned_buffer<wide, test::backend> aligned(backend, 3);
  CHECK(aligned.bytes() == 192);
  CHECK(reinterpret_cast<std::uintptr_t>(aligned.data()) % alignof(wide) == 0);
}

TEST_CASE("buffer: an empty one allocates nothing") {
  const test::backend backend = test::make_backend();
  const pinned p(backend, 0);
  const device d(backend, 0);
  for (const std::int32_t* data : {p.data(), p.device_data(), d.data(), d.device_data()}) {
    CHECK(data == nullptr);
  }
  CHECK(p.size() == 0);
  CHECK(p.span().empty());
}

TEST_CASE("buffer: kernels reach both kinds") {
  test::each_backend([](test::backend backend) {
    auto stream = backend.make_stream(stream_priority::normal);
    const pinned in(backend, 50);
    const device middle(backend, 50);
    const pinned out(backend, 50);
    std::iota(in.span().begin(), in.span().end(), 0);
    backend.for_each({1, 50}, {}, 400, double_each{in.device_data(), middle.device_data()}, stream);
    backend.for_each({1, 50}, {}, 400, double_each{middle.device_data(), out.device_data()},
                     stream);
    backend.sync(stream);
    for (std::size_t i = 0; i < 50; ++i) CHECK(out[i] == 4 * in[i]);
  });
}

TEST_CASE("buffer: a move takes the memory along") {
  const test::backend backend = test::make_backend();
  pinned first(backend, 10);
  std::iota(first.span().begin(), first.span().end(), 5);
  std::int32_t* const memory = first.data();

  pinned second(std::move(first));
  CHECK(second.data() == memory);
  CHECK(second.size() == 10);
  CHECK(first.data() == nullptr);  // NOLINT: a moved-from buffer is empty
  CHECK(first.size() == 0);
  CHECK(first.bytes() == 0);

  pinned third(backend, 3);
  third = std::move(second);
  CHECK(third.data() == memory);
  CHECK(third.size() == 10);
  CHECK(third[9] == 14);

  pinned& same = third;
  third = std::move(same);
  CHECK(third.data() == memory);
  CHECK(third[0] == 5);

  std::vector<pinned> many;  // grows by moving
  for (std::size_t i = 0; i < 10; ++i) {
    many.emplace_back(backend, i + 1);
    many.back()[i] = static_cast<std::int32_t>(i);
  }
  for (std::size_t i = 0; i < 10; ++i) CHECK(many[i][i] == static_cast<std::int32_t>(i));
}

TEST_CASE("buffer: memory goes back once, where it came from, with its size") {
  ledger first_ledger, second_ledger;
  {
    const noting_backend first(first_ledger), second(second_ledger);
    pinned_buffer<std::int32_t, noting_backend> a(first, 5), b(second, 6);
    device_buffer<std::int32_t, noting_backend> c(first, 7), d(second, 8);
    CHECK(first_ledger.pinned.size() == 1);
    CHECK(first_ledger.device.size() == 1);
    CHECK(first_ledger.device.begin()->second == 28);  // exactly what was asked for
    a = std::move(b);
    c = std::move(d);
    const auto e = std::move(a);
    CHECK(e.size() == 6);
  }
  CHECK(first_ledger.mistakes + second_ledger.mistakes == 0);
  CHECK(first_ledger.pinned.size() + first_ledger.device.size() == 0);
  CHECK(second_ledger.pinned.size() + second_ledger.device.size() == 0);
}

TEST_CASE("buffer: it keeps its machine alive") {
  pinned kept = [] { return pinned(test::make_backend(), 4); }();
  kept[3] = 9;
  CHECK(kept[3] == 9);
}

TEST_CASE("buffer: sizes that no address space holds are refused before anything is asked for") {
  const test::backend backend = test::make_backend();
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  CHECK_THROWS_WITH_AS(pinned(backend, most / 4 + 1),
                       "buffer: 4611686018427387904 elements of 4 bytes overflow the address space",
                       std::length_error);
  CHECK_THROWS_AS(device(backend, most), std::length_error);
}

TEST_CASE("buffer: memory that cannot be had throws") {
  const test::backend backend = test::make_backend();
  constexpr std::size_t too_much = std::size_t{1} << 58;
  CHECK_THROWS_AS(pinned(backend, too_much), pulseinfer::out_of_memory);
  CHECK_THROWS_AS(device(backend, too_much), pulseinfer::out_of_memory);
}
