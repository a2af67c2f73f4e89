// SPDX-License-Identifier: Apache-2.0
/// @file
/// Many copies in one call: which function of which driver, on which streams, in how many calls.
#include "pulseinfer/detail/cuda_batch_copy.cuh"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/device_array.hpp"

#if __has_include("ptxsim_stats.h")
#include "ptxsim_stats.h"
#define PULSEINFER_TEST_HAS_STATS 1
#else
#define PULSEINFER_TEST_HAS_STATS 0
#endif

namespace {

using pulseinfer::copy_direction;
using pulseinfer::copy_span;
using pulseinfer::cuda_backend;
using pulseinfer::cuda_error;
using pulseinfer::cuda_options;
using pulseinfer::stream_priority;
using pulseinfer::detail::cuda_batch_copy;
using words = std::vector<std::uint32_t>;

/// What a driver's function was called with.
struct seen_call {
  std::size_t copies = 0;
  int order = 0;
  std::size_t start = 1;
  std::size_t attributes = 0;
  cudaStream_t stream = nullptr;
};
std::vector<seen_call> calls_of_12_8, calls_of_13_0;
int result_of_next_call = 0;

/// Two functions as a driver has them: the first takes one argument more. They copy at once.
void copy_all(unsigned long long* to, unsigned long long* from, std::size_t* bytes, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    std::memcpy(reinterpret_cast<void*>(to[i]), reinterpret_cast<const void*>(from[i]), bytes[i]);
  }
}
int function_of_12_8(unsigned long long* to, unsigned long long* from, std::size_t* bytes,
                     std::size_t n, int* attributes, std::size_t* starts, std::size_t count,
                     std::size_t* failed, cudaStream_t stream) {
  calls_of_12_8.push_back({n, attributes[0], starts[0], count, stream});
  if (result_of_next_call != 0) {
    *failed = 1;
    return std::exchange(result_of_next_call, 0);
  }
  copy_all(to, from, bytes, n);
  return 0;
}
int function_of_13_0(unsigned long long* to, unsigned long long* from, std::size_t* bytes,
                     std::size_t n, int* attributes, std::size_t* starts, std::size_t count,
                     cudaStream_t stream) {
  calls_of_13_0.push_back({n, attributes[0], starts[0], count, stream});
  copy_all(to, from, bytes, n);
  return std::exchange(result_of_next_call, 0);
}

/// A driver that has the forms of `has_12_8` and `has_13_0`, and gives, as drivers do, the newest
/// that it has and that is not newer than asked for.
struct some_driver {
  int newest = 0;
  bool has_12_8 = false;
  bool has_13_0 = false;

  [[nodiscard]] int version() const { return newest; }
  [[nodiscard]] void* find(const char* name, int version) const {
    CHECK(std::string(name) == "cuMemcpyBatchAsync");
    if (has_13_0 && version >= 13000) return reinterpret_cast<void*>(&function_of_13_0);
    if (has_12_8 && version >= 12080) return reinterpret_cast<void*>(&function_of_12_8);
    return nullptr;
  }
};

/// Three copies of host memory, one of them empty, by a driver's function.
words copied_by(cuda_batch_copy& batch, cudaStream_t stream) {
  calls_of_12_8.clear();
  calls_of_13_0.clear();
  words from = {1, 2, 3, 4}, to(4, 0);
  const copy_span copies[] = {{&to[0], &from[2], 8}, {nullptr, nullptr, 0}, {&to[3], &from[0], 4}};
  const std::size_t enqueued = batch.enqueue(copies, stream, 0);
  CHECK(enqueued == 3);
  return to;
}

/// How many batched calls the runtime was given since then; empty where that cannot be told.
class batches {
 public:
  [[nodiscard]] std::optional<std::uint64_t> calls() const { return since(&ptxsim_calls); }
  [[nodiscard]] std::optional<std::uint64_t> copies() const { return since(&ptxsim_copies); }

 private:
#if PULSEINFER_TEST_HAS_STATS
  static std::uint64_t ptxsim_calls() {
    return ptxsim::counters().batch_calls;
  }
  static std::uint64_t ptxsim_copies() {
    return ptxsim::counters().batch_entries;
  }
  static bool is_told() {
    return ptxsim::available();
  }
#else
  static std::uint64_t ptxsim_calls() {
    return 0;
  }
  static std::uint64_t ptxsim_copies() {
    return 0;
  }
  static bool is_told() {
    return false;
  }
#endif
  [[nodiscard]] std::optional<std::uint64_t> since(std::uint64_t (*now)()) const {
    if (!is_told()) return std::nullopt;
    return now() - (now == &ptxsim_calls ? calls_before_ : copies_before_);
  }
  std::uint64_t calls_before_ = ptxsim_calls();
  std::uint64_t copies_before_ = ptxsim_copies();
};

/// Words on the device that are copied one by one to the host, in reverse order.
class reversal {
 public:
  reversal(const cuda_backend& backend, std::size_t n)
      : backend_(backend),
        staging_(backend, n),
        device_(backend, n),
        out_(backend, n),
        expected_(n) {
    for (std::size_t i = 0; i < n; ++i) {
      staging_[i] = static_cast<std::uint32_t>(i * 2654435761u + 1);
      expected_[n - 1 - i] = staging_[i];
      copies_.push_back({out_.data() + (n - 1 - i), device_.data() + i, sizeof(std::uint32_t)});
    }
    out_.fill(0);
  }
  /// Copies to the device in one piece, and back one by one: right only in the stream's order.
  void enqueue(cuda_backend::stream_ref stream) {
    backend_.copy_async(device_.data(), staging_.data(), staging_.bytes(),
                        copy_direction::host_to_device, stream);
    backend_.copy_many_async(copies_, copy_direction::device_to_host, stream);
  }
  [[nodiscard]] bool is_right() const { return out_.values() == expected_; }
  /// How many words have arrived.
  [[nodiscard]] std::size_t arrived() const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < expected_.size(); ++i) count += out_[i] == expected_[i] ? 1 : 0;
    return count;
  }
  std::vector<copy_span>& copies() { return copies_; }

 private:
  cuda_backend backend_;
  test::pinned_array<std::uint32_t, cuda_backend> staging_;
  test::device_array<std::uint32_t, cuda_backend> device_;
  test::pinned_array<std::uint32_t, cuda_backend> out_;
  words expected_;
  std::vector<copy_span> copies_;
};

/// True if the count is as expected, or is not known.
bool is(std::optional<std::uint64_t> count, std::uint64_t expected) {
  return count.value_or(expected) == expected;
}

#if PULSEINFER_TEST_HAS_STATS
/// Failures on purpose, until the end of the scope.
struct injected {
  explicit injected(const char* what) { ptxsim::inject(what); }
  injected(const injected&) = delete;
  injected& operator=(const injected&) = delete;
  ~injected() { ptxsim::inject(""); }
};
#endif

}  // namespace

TEST_CASE("fault 83: the function is taken in the form that the driver has, or not at all") {
  cuda_backend machine;
  auto stream = machine.make_stream(stream_priority::normal);
  const words expected = {3, 4, 0, 1};
  const auto check_call = [&](const std::vector<seen_call>& calls) {
    REQUIRE(calls.size() == 1);
    CHECK(calls[0].copies == 2);
    CHECK(calls[0].order == 1);  // in the order of the stream
    CHECK(calls[0].start == 0);
    CHECK(calls[0].attributes == 1);
    CHECK(calls[0].stream == stream.get());
  };
  for (const int newest : {12040, 12070, 12080, 13000}) {
    CAPTURE(newest);
    CHECK_FALSE(cuda_batch_copy(some_driver{.newest = newest}).works());
  }
  // Asked for the form of 13.0, a driver of 12.8 would give its own, which takes more arguments.
  for (const some_driver driver : {some_driver{12080, true, false}, some_driver{12090, true, false},
                                   some_driver{13000, true, true}, some_driver{0, true, false}}) {
    CAPTURE(driver.newest);
    cuda_batch_copy batch(driver);
    REQUIRE(batch.works());
    CHECK((copied_by(batch, stream.get()) == expected));
    check_call(calls_of_12_8);
    CHECK(calls_of_13_0.empty());
  }
  cuda_batch_copy batch(some_driver{.newest = 14000, .has_12_8 = false, .has_13_0 = true});
  REQUIRE(batch.works());
  CHECK((copied_by(batch, stream.get()) == expected));
  check_call(calls_of_13_0);
  CHECK(calls_of_12_8.empty());
}

TEST_CASE("fault 83: where the driver has no batched copy, each is a call of its own") {
  cuda_backend without{cuda_options{.batched_copies = false}};
  std::vector<cuda_backend> backends = {without};
#if PULSEINFER_TEST_HAS_STATS
  {
    const injected absent("cudaGetDriverEntryPointByVersion:1+");
    backends.emplace_back();
  }
  if (!ptxsim::available()) backends.pop_back();
#endif
  for (cuda_backend& backend : backends) {
    CHECK_FALSE(backend.batches_copies());
    const batches seen;
    auto stream = backend.make_stream(stream_priority::high);
    reversal copies(backend, 300);
    copies.enqueue(stream);
    backend.sync(stream);
    CHECK(copies.is_right());
    CHECK(is(seen.calls(), 0));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }
}

TEST_CASE("fault 84: copies of a batch are right on every kind of stream") {
  cuda_backend backend;
  cudaStream_t own = nullptr;
  cudaStream_t blocking = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaStreamCreate(&blocking) == cudaSuccess);
  const cudaStream_t none = nullptr;
  for (const cudaStream_t engine : {none, cudaStreamLegacy, cudaStreamPerThread, own, blocking}) {
    CAPTURE(engine);
    const batches seen;
    reversal copies(backend, 100);
    copies.enqueue(engine);
    backend.sync(engine);
    CHECK(copies.is_right());
    const bool takes_batches = engine != none && engine != cudaStreamLegacy;
    CHECK(is(seen.calls(), takes_batches && backend.batches_copies() ? 1 : 0));
  }
  CHECK(cudaStreamDestroy(own) == cudaSuccess);
  CHECK(cudaStreamDestroy(blocking) == cudaSuccess);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("batch copy: calls have at most 4,096 copies, a single one is not a batch") {
  struct expectation {
    std::size_t n;
    std::uint64_t calls;
    std::uint64_t batched;
  };
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::high);
  for (const auto& [n, calls, batched] : std::initializer_list<expectation>{{1, 0, 0},
                                                                            {2, 1, 2},
                                                                            {3, 1, 3},
                                                                            {4095, 1, 4095},
                                                                            {4096, 1, 4096},
                                                                            {4097, 1, 4096},
                                                                            {4098, 2, 4098},
                                                                            {10'000, 3, 10'000}}) {
    CAPTURE(n);
    const batches seen;
    reversal copies(backend, n);
    copies.enqueue(stream);
    backend.sync(stream);
    CHECK(copies.is_right());
    if (!backend.batches_copies()) continue;
    CHECK(is(seen.calls(), calls));
    CHECK(is(seen.copies(), batched));
  }
}

TEST_CASE("batch copy: copies of zero bytes are none") {
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::high);
  const copy_span nothing{nullptr, nullptr, 0};
  const std::vector<copy_span> nothings(5000, nothing);
  const batches before;
  backend.copy_many_async(nothings, copy_direction::host_to_device, stream);
  CHECK(is(before.calls(), 0));
  for (const std::size_t real : {1u, 2u, 4096u, 4097u}) {
    CAPTURE(real);
    for (const std::size_t where : {std::size_t{0}, real / 2, real}) {  // front, middle, back
      CAPTURE(where);
      const batches seen;
      reversal copies(backend, real);
      copies.copies().insert(copies.copies().begin() + static_cast<std::ptrdiff_t>(where),
                             nothings.begin(), nothings.end());
      copies.enqueue(stream);
      backend.sync(stream);
      CHECK(copies.is_right());
      if (backend.batches_copies()) CHECK(is(seen.calls(), real > 1 ? 1 : 0));
    }
  }
}

TEST_CASE("batch copy: a captured stream gets single copies, and the graph makes them again") {
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  reversal copies(backend, 40);
  const batches seen;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  REQUIRE(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal) == cudaSuccess);
  copies.enqueue(stream);
  REQUIRE(cudaStreamEndCapture(stream.get(), &graph) == cudaSuccess);
  CHECK(copies.arrived() == 0);
  REQUIRE(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess);
  CHECK(cudaGraphLaunch(ready, stream.get()) == cudaSuccess);
  backend.sync(stream);
  CHECK(copies.is_right());
  CHECK(is(seen.calls(), 0));
  CHECK(cudaGraphExecDestroy(ready) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

TEST_CASE("batch copy: the first call of a new thread may be one") {
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  reversal copies(backend, 64);
  std::thread([&] { copies.enqueue(stream); }).join();
  backend.sync(stream);
  CHECK(copies.is_right());
}

TEST_CASE("batch copy: what fails says where, and nothing is lost of the calls before") {
  cuda_backend machine;
  auto stream = machine.make_stream(stream_priority::normal);
  cuda_batch_copy batch(some_driver{12080, true, false});
  result_of_next_call = 1;  // CUDA_ERROR_INVALID_VALUE, at copy 1
  try {
    (void)copied_by(batch, stream.get());
    FAIL("no error");
  } catch (const cuda_error& error) {
    CHECK(error.code() == cudaErrorInvalidValue);
    CHECK(std::string(error.what()).find("of 2 copies, at copy 1 of 4 bytes") != std::string::npos);
  }
  CHECK(batch.works());
  // Without a context in the thread the driver refuses: it is asked again with one.
  result_of_next_call = 201;
  CHECK((copied_by(batch, stream.get()) == words{3, 4, 0, 1}));
  CHECK(calls_of_12_8.size() == 2);
  // A device without batches: the caller copies, and the driver is not asked again.
  result_of_next_call = 801;
  words from = {1, 2}, to(2, 0);
  const copy_span copies[] = {{&to[0], &from[0], 4}, {&to[1], &from[1], 4}};
  CHECK(batch.enqueue(copies, stream.get(), machine.device()) == 0);
  CHECK_FALSE(batch.works());
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

#if PULSEINFER_TEST_HAS_STATS
TEST_CASE("batch copy: a failing call throws, a device that cannot is spared") {
  if (!ptxsim::available()) {
    MESSAGE("left out: this runtime counts no calls");
    return;
  }
  cuda_backend backend;
  REQUIRE(backend.batches_copies());
  auto stream = backend.make_stream(stream_priority::normal);
  reversal copies(backend, 6000);
  {
    const injected second("cuMemcpyBatchAsync:2");
    CHECK_THROWS_AS(copies.enqueue(stream), cuda_error);
    backend.sync(stream);
    CHECK(copies.arrived() == 4096);  // the first call's, which was in the stream
    CHECK(cudaPeekAtLastError() == cudaSuccess);
  }
  copies.enqueue(stream);
  backend.sync(stream);
  CHECK(copies.is_right());
  CHECK(backend.batches_copies());
  {
    // Whether the stream is captured cannot be told: single copies are right in either case.
    const injected untold("cudaStreamIsCapturing:1");
    const batches seen;
    reversal more(backend, 10);
    more.enqueue(stream);
    backend.sync(stream);
    CHECK(more.is_right());
    CHECK(is(seen.calls(), 0));
  }
  {
    const injected unsupported("cuMemcpyBatchAsync:2:801");
    reversal more(backend, 6000);
    more.enqueue(stream);
    backend.sync(stream);
    CHECK(more.is_right());
    CHECK_FALSE(backend.batches_copies());
  }
  const batches seen;
  reversal more(backend, 10);
  more.enqueue(stream);
  backend.sync(stream);
  CHECK(more.is_right());
  CHECK(is(seen.calls(), 0));
}
#endif
