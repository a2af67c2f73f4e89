// SPDX-License-Identifier: Apache-2.0
// What is CUDA's alone; the conformance suites hold for every backend.
#include <sched.h>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "pulseinfer/backend/cuda.cuh"

#if __has_include("ptxsim_stats.h")
#include "ptxsim_stats.h"
#define PULSEINFER_TEST_HAS_STATS 1
#else
#define PULSEINFER_TEST_HAS_STATS 0
#endif

namespace {

using pulseinfer::copy_direction;
using pulseinfer::cuda_backend;
using pulseinfer::cuda_error;
using pulseinfer::cuda_options;
using pulseinfer::event_state;
using pulseinfer::launch_shape;
using pulseinfer::stream_priority;

static_assert(!std::is_constructible_v<cuda_backend::stream_ref, int>);
static_assert(!std::is_constructible_v<cuda_backend::stream_ref, std::nullptr_t>);
static_assert(std::is_convertible_v<cuda_backend::stream&, cuda_backend::stream_ref>);
static_assert(std::is_convertible_v<cudaStream_t, cuda_backend::stream_ref>);
static_assert(!std::is_copy_constructible_v<cuda_backend::event>);
static_assert(!std::is_copy_constructible_v<cuda_backend::stream>);
static_assert(std::is_base_of_v<pulseinfer::device_error, cuda_error>);

/// Device or pinned memory of n values, freed at the end of the scope.
template <class T>
class memory {
 public:
  memory(cuda_backend backend, std::size_t n, bool pinned = true)
      : backend_(backend), bytes_(n * sizeof(T)), pinned_(pinned) {
    data_ = static_cast<T*>(pinned ? backend_.allocate_pinned(bytes_)
                                   : backend_.allocate_device(bytes_));
    if (pinned) std::memset(static_cast<void*>(data_), 0, bytes_);
  }
  memory(const memory&) = delete;
  memory& operator=(const memory&) = delete;
  ~memory() {
    pinned_ ? backend_.deallocate_pinned(data_, bytes_) : backend_.deallocate_device(data_, bytes_);
  }
  T* get() const { return data_; }
  T* on_device() { return pinned_ ? backend_.device_pointer(data_) : data_; }
  std::size_t bytes() const { return bytes_; }
  T& operator[](std::size_t i) { return data_[i]; }

 private:
  cuda_backend backend_;
  std::size_t bytes_;
  bool pinned_;
  T* data_;
};

void no_error_is_left() {
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

struct count_visits {
  std::int64_t words;
  int* visits;
  PULSEINFER_HD void operator()(std::int64_t block, std::int64_t word) const {
    visits[block * words + word] += 1;
  }
};

struct add_one {
  int* value;
  PULSEINFER_HD void operator()(std::int64_t, std::int64_t word) const { value[word] += 1; }
};

struct sixteen_bytes {
  std::uint64_t low, high;
};
struct alignas(16) copied_word : sixteen_bytes {};
struct copy_words {
  std::int64_t words;
  const copied_word* from;
  copied_word* to;
  PULSEINFER_HD void operator()(std::int64_t block, std::int64_t word) const {
    to[block * words + word] = from[block * words + word];
  }
};

PULSEINFER_HD inline std::int64_t mixed(std::int64_t row, std::int64_t i) {
  const std::uint64_t x = static_cast<std::uint64_t>(row * 1'000'003 + i + 1) * 0x9e3779b97f4a7c15u;
  return static_cast<std::int64_t>(x ^ (x >> 31)) / 1024;
}

/// Three rounds of each operation, back to back.
struct use_group {
  std::int64_t* scans;  ///< [rows, 3, group size]
  std::int64_t* sums;   ///< [rows, 3]
  std::int64_t* least;  ///< [rows, 3]
  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    for (int round = 0; round < 3; ++round) {
      const std::int64_t value = mixed(row * 3 + round, group.rank());
      const std::int64_t scan = group.scan(value);
      const std::int64_t sum = group.sum(value);
      const std::int64_t min = group.min(value);
      scans[(row * 3 + round) * group.size() + group.rank()] = scan;
      if (group.rank() == group.size() - 1) {
        sums[row * 3 + round] = sum;
        least[row * 3 + round] = min;
      }
    }
  }
};

/// Needs sync: each lane reads what its neighbour wrote.
struct rotate_row {
  std::int64_t columns;
  const int* from;
  int* scratch;
  int* to;
  template <class Group>
  PULSEINFER_HD void operator()(std::int64_t row, Group group) const {
    for (std::int64_t i = group.rank(); i < columns; i += group.size()) {
      scratch[row * columns + i] = from[row * columns + i];
    }
    group.sync();
    for (std::int64_t i = group.rank(); i < columns; i += group.size()) {
      to[row * columns + i] = scratch[row * columns + (i + 1) % columns];
    }
  }
};

template <int Threads>
void check_group() {
  constexpr std::int64_t rows = 5;
  cuda_backend backend;
  memory<std::int64_t> scans(backend, rows * 3 * Threads), sums(backend, rows * 3),
      least(backend, rows * 3);
  auto stream = backend.make_stream(stream_priority::normal);
  const use_group body{scans.on_device(), sums.on_device(), least.on_device()};
  // Two CTAs for five rows: the shared memory of a row is used again for the next.
  pulseinfer::detail::launch_kernel(&pulseinfer::detail::for_each_row_kernel<Threads, use_group>,
                                    {dim3(2), dim3(Threads)}, stream.get(), body, rows);
  backend.sync(stream);
  bool same = true;
  for (std::int64_t r = 0; r < rows * 3; ++r) {
    std::int64_t sum = 0;
    std::int64_t min = std::numeric_limits<std::int64_t>::max();
    for (std::int64_t i = 0; i < Threads; ++i) {
      same = same && scans[static_cast<std::size_t>(r * Threads + i)] == sum;
      sum += mixed(r, i);
      min = std::min(min, mixed(r, i));
    }
    same = same && sums[static_cast<std::size_t>(r)] == sum;
    same = same && least[static_cast<std::size_t>(r)] == min;
  }
  CHECK(same);
}

/// Each pair of the shape visited once, none beyond.
void check_visits(launch_shape shape, std::int64_t expected_blocks, int max_ctas) {
  CAPTURE(shape.blocks);
  CAPTURE(shape.words);
  CAPTURE(max_ctas);
  cuda_backend backend;
  memory<int> visits(backend, static_cast<std::size_t>(shape.blocks * shape.words));
  auto stream = backend.make_stream(stream_priority::high);
  backend.for_each(shape, {max_ctas}, 0, count_visits{shape.words, visits.on_device()}, stream);
  backend.sync(stream);
  bool right = true;
  for (std::int64_t i = 0; i < shape.blocks * shape.words; ++i) {
    right =
        right && visits[static_cast<std::size_t>(i)] == (i < expected_blocks * shape.words ? 1 : 0);
  }
  CHECK(right);
}

/// Top-k of rows with given ranges, compared with a sort on the host.
struct top_k_case {
  std::int64_t columns = 0;
  std::int64_t k = 0;
  std::int64_t row_stride = 0;
  std::vector<std::int32_t> begin;
  std::vector<std::int32_t> end;
  std::vector<std::uint64_t> keys;
  pulseinfer::detail::cuda_top_k_way way = pulseinfer::detail::cuda_top_k_way::automatic;
};

void check_top_k_case(const top_k_case& c) {
  CAPTURE(c.columns);
  CAPTURE(c.k);
  const auto rows = c.begin.size();
  const auto k = static_cast<std::size_t>(c.k);
  using top = pulseinfer::detail::cuda_top_k<cuda_backend>;
  using pulseinfer::detail::cuda_top_k_way;
  cuda_backend backend;
  const pulseinfer::top_k_shape shape{static_cast<std::int64_t>(rows), c.columns, c.k};
  memory<std::uint64_t> keys(backend, c.keys.size(), false);
  memory<std::uint64_t> staged(backend, c.keys.size());
  memory<std::int32_t> begin(backend, rows), end(backend, rows);
  memory<std::int32_t> selected(backend, rows * k + 1), counts(backend, rows);
  memory<std::byte> workspace(backend, top::workspace_bytes(shape, c.way), false);
  std::copy(c.keys.begin(), c.keys.end(), staged.get());
  std::copy(c.begin.begin(), c.begin.end(), begin.get());
  std::copy(c.end.begin(), c.end.end(), end.get());
  std::fill_n(selected.get(), rows * k + 1, -77);
  std::fill_n(counts.get(), rows, -77);
  auto stream = backend.make_stream(stream_priority::normal);
  backend.copy_async(keys.get(), staged.get(), staged.bytes(), copy_direction::host_to_device,
                     stream);
  const pulseinfer::top_k_keys in{keys.get(), c.row_stride, begin.on_device(), end.on_device()};
  for (int round = 0; round < 2; ++round) {  // a used workspace is as good as a new one
    if (c.way == cuda_top_k_way::automatic) {
      backend.top_k(shape, in, selected.on_device(), counts.on_device(),
                    {workspace.get(), workspace.bytes()}, stream);
    } else {
      top::run(backend, shape, in, selected.on_device(), counts.on_device(),
               {workspace.get(), workspace.bytes()}, stream, c.way);
    }
  }
  backend.sync(stream);
  no_error_is_left();
  for (std::size_t r = 0; r < rows; ++r) {
    std::vector<std::int32_t> order(static_cast<std::size_t>(std::max(0, c.end[r] - c.begin[r])));
    std::iota(order.begin(), order.end(), c.begin[r]);
    const std::uint64_t* row = c.keys.data() + static_cast<std::int64_t>(r) * c.row_stride;
    std::sort(order.begin(), order.end(), [row](auto a, auto b) { return row[a] > row[b]; });
    order.resize(std::min(order.size(), k));
    std::sort(order.begin(), order.end());
    CHECK(counts[r] == static_cast<int>(order.size()));
    order.resize(k, -1);
    CHECK(std::equal(order.begin(), order.end(), selected.get() + r * k));
  }
  CHECK(selected[rows * k] == -77);
}

constexpr pulseinfer::detail::cuda_top_k_way top_k_ways[] = {
    pulseinfer::detail::cuda_top_k_way::row_a_cta,
    pulseinfer::detail::cuda_top_k_way::whole_device};

std::vector<std::uint64_t> drawn_keys(std::size_t n, std::mt19937_64& random) {
  std::vector<std::uint64_t> keys(n);
  for (auto& key : keys) key = random();  // equal ones would be a miracle
  return keys;
}

TEST_CASE("a backend says what machine it is") {
  cuda_backend backend;
  CHECK(backend.device() == 0);
  CHECK_FALSE(backend.device_name().empty());
  const auto limits = backend.limits();
  CHECK(limits.device_bytes_free <= limits.device_bytes_total);
  CHECK(limits.device_bytes_total > 0);
#if PULSEINFER_TEST_HAS_STATS
  CHECK(backend.measures_time() == !ptxsim::available());
#endif
}

TEST_CASE("an ordinal that the machine does not have is named, with the count") {
  int count = 0;
  REQUIRE(cudaGetDeviceCount(&count) == cudaSuccess);
  for (int bad : {count, 99, -2}) {
    try {
      cuda_backend backend{cuda_options{.device = bad}};
      FAIL("no error");
    } catch (const cuda_error& error) {
      CHECK(error.code() == cudaErrorInvalidDevice);
      const std::string text = error.what();
      CHECK(text.find("device is " + std::to_string(bad)) != std::string::npos);
      CHECK(text.find("has " + std::to_string(count)) != std::string::npos);
    }
    no_error_is_left();
  }
  CHECK_THROWS_AS(cuda_backend(cuda_options{.workers = 0}), std::invalid_argument);
}

TEST_CASE("workers run on the CPUs that they were given; one that cannot be used is refused") {
  const std::vector<int> usable = pulseinfer::detail::usable_cpus();
  REQUIRE(!usable.empty());
  cuda_backend backend{cuda_options{.workers = 2, .cpus = {usable.back()}}};
  static std::atomic<int> ran_on{-1};
  ran_on = -1;
  backend.host_async({}, {[](void*) noexcept { ran_on = sched_getcpu(); }, nullptr}, {});
  backend.sync_until([] { return ran_on.load() >= 0; });
  CHECK(ran_on.load() == usable.back());
  const cuda_options none{.workers = 1, .cpus = {usable.back() + 1}};
  CHECK_THROWS_AS(cuda_backend{none}, std::invalid_argument);
  no_error_is_left();
}

TEST_CASE("a backend of another device leaves the current one current") {
  int count = 0;
  REQUIRE(cudaGetDeviceCount(&count) == cudaSuccess);
  if (count < 2) return;
  const auto current = [] {
    int device = -1;
    CHECK(cudaGetDevice(&device) == cudaSuccess);
    return device;
  };
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
  cuda_backend backend{cuda_options{.device = 1}};
  CHECK(backend.device() == 1);
  static std::atomic<int> seen{-1};
  {
    auto stream = backend.make_stream(stream_priority::normal);
    auto event = backend.make_event();
    memory<int> value(backend, 8);
    CHECK(current() == 0);
    backend.for_each({1, 8}, {}, 0, add_one{value.on_device()}, stream);
    backend.record(event, stream);
    backend.sync(event);
    backend.sync(stream);
    (void)backend.top_k_workspace_bytes({1, 100, 5});
    (void)backend.limits();
    CHECK(current() == 0);
    seen = -1;
    backend.host_async({},
                       {[](void*) noexcept {
                          int device = -1;
                          (void)cudaGetDevice(&device);
                          seen = device;
                        },
                        nullptr},
                       {});
    backend.sync_until([] { return seen.load() >= 0; });
    CHECK(seen == 1);
  }
  CHECK(current() == 0);
  REQUIRE(cudaSetDevice(1) == cudaSuccess);
  CHECK(cuda_backend{}.device() == 1);
  REQUIRE(cudaSetDevice(0) == cudaSuccess);
}

TEST_CASE("a failed call throws its code and leaves no last error") {
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  try {
    pulseinfer::detail::check_cuda(
        cudaMemcpyAsync(nullptr, nullptr, 16, cudaMemcpyDefault, stream.get()), "cudaMemcpyAsync");
    FAIL("no error");
  } catch (const cuda_error& error) {
    CHECK(error.code() != cudaSuccess);
    CHECK(error.call() == "cudaMemcpyAsync");
    CHECK(std::string(error.what()).find(cudaGetErrorName(error.code())) != std::string::npos);
    CHECK(error.where().line() > 0);
  }
  no_error_is_left();
  int on_stack = 0;
  CHECK_THROWS_AS((void)backend.device_pointer(&on_stack), std::invalid_argument);
  no_error_is_left();
  CHECK_THROWS_AS(backend.copy_async(nullptr, &on_stack, 4, copy_direction::host_to_device, stream),
                  std::invalid_argument);
}

TEST_CASE("an older error of other code is not blamed on a launch") {
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  memory<int> value(backend, 8);
  (void)cudaSetDevice(1000);
  REQUIRE(cudaPeekAtLastError() != cudaSuccess);
  backend.for_each({1, 8}, {}, 0, add_one{value.on_device()}, stream);
  CHECK(cudaGetLastError() != cudaSuccess);  // still there for those who made it
  backend.sync(stream);
  CHECK(value[7] == 1);
}

TEST_CASE("a pending event leaves no last error, one that was never recorded is done") {
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  CHECK(backend.poll(event) == event_state::done);
  memory<int> value(backend, 8);
  for (int i = 0; i < 8; ++i) {
    backend.for_each({1, 8}, {}, 0, add_one{value.on_device()}, stream);
  }
  backend.record(event, stream);
  while (backend.poll(event) == event_state::pending) no_error_is_left();
  CHECK(backend.poll(event) == event_state::done);
  no_error_is_left();
  CHECK(value[0] == 8);
  auto moved = std::move(event);
  CHECK(backend.poll(moved) == event_state::done);
  backend.sync(moved);
}

TEST_CASE("memory that cannot be had is out_of_memory, with the numbers") {
  cuda_backend backend;
  const std::size_t much = std::size_t{1} << 50;
  try {
    (void)backend.allocate_device(much);
    FAIL("no error");
  } catch (const pulseinfer::out_of_memory& error) {
    const std::string text = error.what();
    CHECK(text.find(std::to_string(much)) != std::string::npos);
    CHECK(text.find("bytes free") != std::string::npos);
  }
  no_error_is_left();
  CHECK(backend.allocate_device(0) == nullptr);
  CHECK(backend.allocate_pinned(0) == nullptr);
  backend.deallocate_device(nullptr, 0);
  backend.deallocate_pinned(nullptr, 0);
  no_error_is_left();
}

#if PULSEINFER_TEST_HAS_STATS
TEST_CASE("injected failures come out as errors, once") {
  if (!ptxsim::available()) {
    MESSAGE("left out: this runtime counts no calls");
    return;
  }
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  memory<int> value(backend, 8);
  memory<int> there(backend, 8, false);
  const auto code_of = [](const char* spec, const auto& call) {
    ptxsim::inject(spec);
    cudaError_t code = cudaSuccess;
    try {
      call();
    } catch (const cuda_error& error) {
      code = error.code();
    }
    ptxsim::inject("");
    no_error_is_left();
    return code;
  };
  CHECK(code_of("cudaMemcpyAsync:1", [&] {
          backend.copy_async(there.get(), value.get(), 32, copy_direction::host_to_device, stream);
        }) == cudaErrorUnknown);
  CHECK(code_of("cudaLaunchKernel:1:701", [&] {
          backend.for_each({1, 8}, {}, 0, add_one{value.on_device()}, stream);
        }) == cudaErrorLaunchOutOfResources);
  CHECK(code_of("cudaLaunchKernel:1:701", [&] {
          backend.for_each_row(1, {}, 0, use_group{nullptr, nullptr, nullptr}, stream);
        }) == cudaErrorLaunchOutOfResources);
  CHECK(code_of("cudaEventRecord:1", [&] { backend.record(event, stream); }) == cudaErrorUnknown);
  CHECK(code_of("cudaStreamWaitEvent:1", [&] { backend.enqueue_wait(event, stream); }) ==
        cudaErrorUnknown);
  CHECK(code_of("cudaStreamSynchronize:1", [&] { backend.sync(stream); }) == cudaErrorUnknown);
  CHECK(code_of("cudaGetDeviceCount:1:100", [&] { cuda_backend none; }) == cudaErrorNoDevice);
  CHECK(code_of("cudaHostAlloc:1:1", [&] { (void)backend.allocate_pinned(64); }) ==
        cudaErrorInvalidValue);
  ptxsim::inject("cudaHostAlloc:1");
  CHECK_THROWS_AS((void)backend.allocate_pinned(64), pulseinfer::out_of_memory);
  ptxsim::inject("cudaEventQuery:1");
  CHECK(backend.poll(event) == event_state::failed);
  ptxsim::inject("");
  no_error_is_left();
  // A stream that fails ends a wait for a flag that it would have raised.
  ptxsim::inject("cudaStreamQuery:1");
  CHECK_THROWS_AS(backend.sync_until([] { return false; }), cuda_error);
  ptxsim::inject("");
  no_error_is_left();
  backend.sync(stream);
}
#endif

#if PULSEINFER_TEST_HAS_STATS
TEST_CASE("fault 58: a top-k of which any launch fails throws, and the next one is right") {
  if (!ptxsim::available()) return;
  using pulseinfer::detail::cuda_top_k_way;
  using top = pulseinfer::detail::cuda_top_k<cuda_backend>;
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  const pulseinfer::top_k_shape shape{1, 8, 2};
  memory<std::uint64_t> keys(backend, 8);
  memory<std::int32_t> range(backend, 2), selected(backend, 2);
  for (std::size_t i = 0; i < 8; ++i) keys[i] = 10 + i;
  range[1] = 8;
  const pulseinfer::top_k_keys in{keys.on_device(), 8, range.on_device(), range.on_device() + 1};
  for (const auto way : top_k_ways) {
    memory<std::byte> workspace(backend, top::workspace_bytes(shape, way), false);
    const auto run = [&] {
      top::run(backend, shape, in, selected.on_device(), nullptr,
               {workspace.get(), workspace.bytes()}, stream, way);
    };
    int failed = 0;
    for (int nth = 1; nth < 20; ++nth) {
      selected[0] = selected[1] = -77;
      cudaError_t code = cudaSuccess;
      ptxsim::inject(("cudaLaunchKernel:" + std::to_string(nth) + ":701").c_str());
      try {
        run();
      } catch (const cuda_error& error) {
        code = error.code();
      }
      ptxsim::inject("");
      no_error_is_left();
      backend.sync(stream);
      if (code == cudaSuccess) {
        CHECK(selected[0] == 6);
        CHECK(selected[1] == 7);
        break;
      }
      CHECK(code == cudaErrorLaunchOutOfResources);
      CHECK(selected[0] == -77);
      ++failed;
    }
    CHECK(failed >= (way == cuda_top_k_way::row_a_cta ? 1 : 4));
  }
}
#endif

TEST_CASE("pinned memory is reached by the device, also in its middle") {
  cuda_backend backend;
  memory<int> values(backend, 1000);
  auto stream = backend.make_stream(stream_priority::normal);
  const auto* middle = static_cast<const int*>(values.get() + 501);
  CHECK(backend.device_pointer(middle) == backend.device_pointer(values.get()) + 501);
  CHECK(backend.device_pointer(static_cast<int*>(nullptr)) == nullptr);
  backend.for_each({1, 3}, {}, 0, add_one{backend.device_pointer(values.get() + 501)}, stream);
  backend.sync(stream);
  CHECK(values[500] == 0);
  CHECK(values[501] == 1);
  CHECK(values[503] == 1);
  CHECK(values[504] == 0);
}

TEST_CASE("an engine's streams: legacy default, per thread, its own") {
  cuda_backend backend;
  cudaStream_t own = nullptr;
  cudaStream_t blocking = nullptr;
  REQUIRE(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking) == cudaSuccess);
  REQUIRE(cudaStreamCreate(&blocking) == cudaSuccess);
  const cudaStream_t null_stream = nullptr;
  for (cudaStream_t engine : {null_stream, cudaStreamLegacy, cudaStreamPerThread, own, blocking}) {
    auto ours = backend.make_stream(stream_priority::high);
    auto ready = backend.make_event();
    auto done = backend.make_event();
    memory<int> value(backend, 64);
    memory<int> there(backend, 64, false);
    memory<int> back(backend, 64);
    const cuda_backend::stream_ref borrowed = engine;
    for (int i = 0; i < 3; ++i) {
      backend.for_each({1, 64}, {}, 0, add_one{value.on_device()}, borrowed);
    }
    backend.record(ready, borrowed);
    backend.enqueue_wait(ready, ours);
    backend.copy_async(there.get(), value.get(), value.bytes(), copy_direction::host_to_device,
                       ours);
    backend.record(done, ours);
    backend.enqueue_wait(done, borrowed);
    backend.for_each({1, 64}, {}, 0, add_one{there.get()}, borrowed);
    const pulseinfer::copy_span half[2] = {{back.get(), there.get(), 128},
                                           {back.get() + 32, there.get() + 32, 128}};
    backend.copy_many_async(half, copy_direction::device_to_host, borrowed);
    backend.sync(borrowed);
    CHECK(back[0] == 4);
    CHECK(back[63] == 4);
  }
  CHECK(cudaStreamDestroy(own) == cudaSuccess);
  CHECK(cudaStreamDestroy(blocking) == cudaSuccess);
  no_error_is_left();
}

TEST_CASE("a wait for memory goes on while streams work") {
  cuda_backend backend;
  auto first = backend.make_stream(stream_priority::normal);
  auto second = backend.make_stream(stream_priority::normal);
  memory<int> flag(backend, 1);
  auto event = backend.make_event();
  backend.for_each({1, 1}, {}, 0, add_one{flag.on_device()}, first);
  backend.record(event, first);
  backend.enqueue_wait(event, second);
  backend.for_each({1, 1}, {}, 0, add_one{flag.on_device()}, second);
  const std::uint64_t start = backend.now_ns();
  backend.sync_until([&] { return std::atomic_ref<int>(flag[0]).load() == 2; });
  CHECK(flag[0] == 2);
  CHECK(backend.now_ns() >= start);
  // Work that only an engine's stream has.
  backend.for_each({1, 1}, {}, 0, add_one{flag.on_device()}, cudaStreamPerThread);
  backend.sync_until([&] { return std::atomic_ref<int>(flag[0]).load() == 3; });
  backend.sync(cudaStreamPerThread);
}

TEST_CASE("streams and events wait for their work when they go") {
  memory<int> value(cuda_backend{}, 1);
  {
    cuda_backend backend;
    auto stream = backend.make_stream(stream_priority::normal);
    for (int i = 0; i < 20; ++i) {
      backend.for_each({1, 1}, {}, 0, add_one{value.on_device()}, stream);
    }
    auto replaced = backend.make_stream(stream_priority::normal);
    replaced = std::move(stream);
  }
  CHECK(value[0] == 20);
  // A stream may outlive the backend that made it.
  auto orphan = cuda_backend{}.make_stream(stream_priority::high);
  cuda_backend{}.for_each({1, 1}, {}, 0, add_one{value.on_device()}, orphan);
  cuda_backend{}.sync(orphan);
  CHECK(value[0] == 21);
}

TEST_CASE("a capture in one thread is not spoiled by another that polls and allocates") {
  cuda_backend backend;
  auto captured = backend.make_stream(stream_priority::normal);
  auto stream = backend.make_stream(stream_priority::normal);
  auto event = backend.make_event();
  memory<int> value(backend, 8), other(backend, 8);
  REQUIRE(cudaStreamBeginCapture(captured.get(), cudaStreamCaptureModeGlobal) == cudaSuccess);
  backend.for_each({1, 8}, {}, 0, add_one{value.on_device()}, captured);
  std::thread([&] {
    backend.for_each({1, 8}, {}, 0, add_one{other.get()}, stream);
    backend.record(event, stream);
    while (backend.poll(event) == event_state::pending) {
    }
    backend.sync(event);
    void* p = backend.allocate_device(64);
    backend.deallocate_device(p, 64);
    int polls = 0;
    backend.sync_until([&] { return ++polls > 100; });
    auto mine = backend.make_event();
  }).join();
  cudaGraph_t graph = nullptr;
  REQUIRE(cudaStreamEndCapture(captured.get(), &graph) == cudaSuccess);
  cudaGraphExec_t ready = nullptr;
  REQUIRE(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess);
  for (int i = 0; i < 3; ++i) CHECK(cudaGraphLaunch(ready, stream.get()) == cudaSuccess);
  backend.sync(stream);
  CHECK(value[0] == 3);
  CHECK(other[0] == 1);
  CHECK(cudaGraphExecDestroy(ready) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

TEST_CASE("a top-k can be captured and replayed on new keys") {
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  const pulseinfer::top_k_shape shape{2, 40, 3};
  memory<std::uint64_t> keys(backend, 80);
  memory<std::int32_t> range(backend, 4), selected(backend, 6), counts(backend, 2);
  memory<std::byte> workspace(backend, backend.top_k_workspace_bytes(shape), false);
  range[2] = range[3] = 40;
  const pulseinfer::top_k_keys in{keys.on_device(), 40, range.on_device(), range.on_device() + 2};
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t ready = nullptr;
  REQUIRE(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal) == cudaSuccess);
  backend.top_k(shape, in, selected.on_device(), counts.on_device(),
                {workspace.get(), workspace.bytes()}, stream);
  REQUIRE(cudaStreamEndCapture(stream.get(), &graph) == cudaSuccess);
  REQUIRE(cudaGraphInstantiate(&ready, graph, 0) == cudaSuccess);
  for (std::uint64_t round = 0; round < 3; ++round) {
    for (std::uint64_t i = 0; i < 40; ++i) {
      keys[i] = (i + round * 7) % 40;
      keys[40 + i] = 40 - i;
    }
    REQUIRE(cudaGraphLaunch(ready, stream.get()) == cudaSuccess);
    backend.sync(stream);
    const auto first = static_cast<std::int32_t>(37 - round * 7);
    CHECK(selected[0] == first);
    CHECK(selected[2] == first + 2);
    CHECK(selected[3] == 0);
    CHECK(selected[5] == 2);
    CHECK(counts[1] == 3);
  }
  CHECK(cudaGraphExecDestroy(ready) == cudaSuccess);
  CHECK(cudaGraphDestroy(graph) == cudaSuccess);
}

TEST_CASE("groups of any size sum, scan and find the least alike") {
  check_group<32>();
  check_group<64>();
  check_group<96>();
  check_group<128>();
  check_group<256>();
}

TEST_CASE("row kernels run each row once, and sync") {
  for (std::int64_t rows : {1, 7, 300}) {
    for (int max_ctas : {0, 1, 5}) {
      constexpr std::int64_t columns = 150;
      cuda_backend backend;
      const auto size = static_cast<std::size_t>(rows * columns);
      memory<int> from(backend, size), scratch(backend, size), to(backend, size);
      std::iota(from.get(), from.get() + size, 0);
      auto stream = backend.make_stream(stream_priority::normal);
      backend.for_each_row(
          rows, {max_ctas}, 0,
          rotate_row{columns, from.on_device(), scratch.on_device(), to.on_device()}, stream);
      backend.sync(stream);
      bool right = true;
      for (std::int64_t i = 0; i < rows * columns; ++i) {
        const std::int64_t expected = i / columns * columns + (i % columns + 1) % columns;
        right = right && to[static_cast<std::size_t>(i)] == expected;
      }
      CHECK(right);
    }
  }
}

TEST_CASE("for_each visits each pair once, whatever the shape") {
  for (int max_ctas : {0, 1, 3}) {
    check_visits({1, 1}, 1, max_ctas);
    check_visits({1, 5000}, 1, max_ctas);
    check_visits({5000, 1}, 5000, max_ctas);
    check_visits({3, 264}, 3, max_ctas);
    check_visits({70, 33}, 70, max_ctas);
    check_visits({9, 96}, 9, max_ctas);
    check_visits({2, 256}, 2, max_ctas);
    check_visits({5, 257}, 5, max_ctas);
  }
  memory<std::int32_t> count(cuda_backend{}, 1);
  for (std::int32_t blocks : {-5, 0, 1, 6, 7, 8, 1000}) {
    count[0] = blocks;
    for (std::int64_t words : {1, 40, 300}) {
      check_visits({7, words, count.on_device()}, std::clamp(blocks, 0, 7), 0);
      check_visits({7, words, count.on_device()}, std::clamp(blocks, 0, 7), 2);
    }
  }
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  backend.for_each({0, 8}, {}, 0, add_one{nullptr}, stream);
  backend.for_each({8, 0}, {}, 0, add_one{nullptr}, stream);
  backend.sync(stream);
  CHECK_THROWS_AS(backend.for_each({-1, 1}, {}, 0, add_one{nullptr}, stream),
                  std::invalid_argument);
  CHECK_THROWS_AS(backend.for_each({1, 1}, {-1}, 0, add_one{nullptr}, stream),
                  std::invalid_argument);
}

TEST_CASE("launch plans stay inside every limit and keep their lanes busy") {
  constexpr std::int64_t huge = std::int64_t{1} << 40;
  for (std::int64_t blocks : {std::int64_t{1}, std::int64_t{7}, std::int64_t{64}, huge}) {
    for (std::int64_t words : {std::int64_t{1}, std::int64_t{3}, std::int64_t{64}, std::int64_t{96},
                               std::int64_t{200}, std::int64_t{257}, std::int64_t{4096}, huge}) {
      for (std::int64_t ctas : {std::int64_t{1}, std::int64_t{8}, std::int64_t{4224}, huge}) {
        const auto plan = pulseinfer::detail::plan_for_each(blocks, words, ctas);
        CAPTURE(blocks);
        CAPTURE(words);
        CAPTURE(ctas);
        CHECK(plan.block.x * plan.block.y <= 256);
        CHECK(plan.block.x * plan.block.y >= 1);
        CHECK(plan.grid.x >= 1);
        CHECK(plan.grid.x <= 2147483647u);
        CHECK(plan.grid.y >= 1);
        CHECK(plan.grid.y <= 65535);
        CHECK(std::int64_t{plan.grid.x} * plan.grid.y <= ctas);
        const std::int64_t turns = (words - 1) / plan.block.x + 1;
        if (words > 1) CHECK(words * 10 >= turns * plan.block.x * 6);  // no worse than 60 %
      }
    }
  }
  // The unit of a Llama-3-8B layer is 4096 words: 64 of them fill the device with one word a lane.
  const auto plan = pulseinfer::detail::plan_for_each(64, 4096, 4224);
  CHECK(plan.block.x == 256);
  CHECK(plan.grid.x == 64);
  CHECK(plan.grid.y == 16);
}

TEST_CASE("a copy of words asks for whole sectors") {
  cuda_backend backend;
  constexpr std::int64_t blocks = 12;
  constexpr std::int64_t words = 320;
  memory<copied_word> from(backend, blocks * words), to(backend, blocks * words);
  memory<copied_word> a(backend, blocks * words, false), b(backend, blocks * words, false);
  for (std::size_t i = 0; i < blocks * words; ++i) from[i].low = from[i].high = i * 3 + 1;
  auto stream = backend.make_stream(stream_priority::high);
  backend.copy_async(a.get(), from.get(), from.bytes(), copy_direction::host_to_device, stream);
#if PULSEINFER_TEST_HAS_STATS
  ptxsim::reset();
#endif
  backend.for_each({blocks, words}, {8}, 0, copy_words{words, a.get(), b.get()}, stream);
  backend.copy_async(to.get(), b.get(), to.bytes(), copy_direction::device_to_host, stream);
  backend.sync(stream);
  CHECK(std::memcmp(from.get(), to.get(), from.bytes()) == 0);
#if PULSEINFER_TEST_HAS_STATS
  if (ptxsim::available()) {
    const auto k = ptxsim::kernel("for_each_kernel");
    CHECK(k.launches == 1);
    CHECK(ptxsim::load_efficiency(k) == doctest::Approx(1.0));
    CHECK(ptxsim::store_efficiency(k) == doctest::Approx(1.0));
    CHECK(k.requests_width_16 == k.global_load_requests + k.global_store_requests);
    CHECK(k.bytes_loaded == blocks * words * 16);
  }
#endif
}

TEST_CASE("top-k: one row of 264, ragged rows, k at and above the row") {
  std::mt19937_64 random(7);
  check_top_k_case({264, 64, 264, {0}, {264}, drawn_keys(264, random)});
  check_top_k_case({264, 1, 300, {0}, {264}, drawn_keys(300, random)});
  for (const auto way : top_k_ways) {
    check_top_k_case({264, 263, 264, {0}, {264}, drawn_keys(264, random), way});
    check_top_k_case({264, 264, 264, {0}, {264}, drawn_keys(264, random), way});
    check_top_k_case({264, 500, 264, {0}, {264}, drawn_keys(264, random), way});
  }
  const std::vector<std::int32_t> begin{0, 10, 50, 5, 99, 0, 30};
  const std::vector<std::int32_t> end{100, 10, 20, 6, 100, 17, 47};
  for (std::int64_t k : {1, 17, 120}) {
    for (const auto way : top_k_ways) {
      check_top_k_case({100, k, 111, begin, end, drawn_keys(7 * 111, random), way});
    }
  }
}

TEST_CASE("top-k: nothing to choose from, or nothing wanted") {
  cuda_backend backend;
  auto stream = backend.make_stream(stream_priority::normal);
  memory<std::int32_t> zeros(backend, 3), selected(backend, 6), counts(backend, 3);
  const auto set = [&] {
    std::fill_n(selected.get(), 6, -77);
    std::fill_n(counts.get(), 3, -77);
  };
  set();
  backend.top_k({3, 0, 2}, {nullptr, 0, zeros.on_device(), zeros.on_device()}, selected.on_device(),
                counts.on_device(), {}, stream);
  backend.sync(stream);
  CHECK(std::count(selected.get(), selected.get() + 6, -1) == 6);
  CHECK(std::count(counts.get(), counts.get() + 3, 0) == 3);
  set();
  backend.top_k({3, 9, 0}, {}, nullptr, counts.on_device(), {}, stream);
  backend.top_k({3, 9, 0}, {}, nullptr, nullptr, {}, stream);
  backend.top_k({0, 9, 2}, {}, nullptr, nullptr, {}, stream);
  backend.sync(stream);
  CHECK(std::count(selected.get(), selected.get() + 6, -77) == 6);
  CHECK(std::count(counts.get(), counts.get() + 3, 0) == 3);
  CHECK(backend.top_k_workspace_bytes({0, 9, 2}) == 0);
  CHECK(backend.top_k_workspace_bytes({3, 9, 0}) == 0);
  CHECK(backend.top_k_workspace_bytes({3, 9, 9}) > 0);  // a row's limit may be shorter than it
  CHECK(backend.top_k_workspace_bytes({3, 9, 2}) == backend.top_k_workspace_bytes({3, 9, 2}));
  // Rows x columns beyond 32 bits: the workspace is a threshold a row.
  CHECK(backend.top_k_workspace_bytes({std::int64_t{1} << 20, 8192, 64}) == std::size_t{8} << 20);
  // Long rows: what CUB wants for one of them beside it.
  CHECK(backend.top_k_workspace_bytes({16, std::int64_t{1} << 20, 4096}) < std::size_t{20} << 20);
  CHECK_THROWS_AS((void)backend.top_k_workspace_bytes({1, std::int64_t{1} << 31, 64}),
                  std::invalid_argument);
}

TEST_CASE("top-k: a workspace serves every smaller shape") {
  using top = pulseinfer::detail::cuda_top_k<cuda_backend>;
  bool grows = true;
  const auto bytes = [](std::int64_t rows, std::int64_t columns) {
    return top::workspace_bytes({rows, columns, 30});
  };
  for (std::int64_t rows = 1; rows < 12; ++rows) {
    for (std::int64_t columns = 20; columns < 3'000'000; columns += columns / 3) {
      grows = grows && bytes(rows, columns) <= bytes(rows + 1, columns);
      grows = grows && bytes(rows, columns) <= bytes(rows, columns + columns / 3);
    }
  }
  CHECK(grows);
}

TEST_CASE("top-k: few rows that are long enough are taken by the whole device") {
  using top = pulseinfer::detail::cuda_top_k<cuda_backend>;
  const auto automatic = pulseinfer::detail::cuda_top_k_way::automatic;
  CHECK_FALSE(top::takes_whole_device({1, top::long_row - 1, 64}, automatic));
  CHECK(top::takes_whole_device({1, top::long_row, 64}, automatic));
  CHECK_FALSE(top::takes_whole_device({2, top::long_row, 64}, automatic));
  CHECK(top::takes_whole_device({2, 2 * top::long_row, 64}, automatic));
  CHECK_FALSE(top::takes_whole_device({1, top::long_row, top::long_row}, automatic));
  // One that a CTA reads in several turns, and CUB in several tiles.
  std::mt19937_64 random(5);
  constexpr std::int32_t columns = 9'000;
  for (const auto way : top_k_ways) {
    check_top_k_case({columns, 40, columns, {3}, {columns}, drawn_keys(columns, random), way});
  }
}

TEST_CASE("fault 57: what CUB is given is never null, and never asked for by a null") {
  using pulseinfer::detail::cuda_top_k_way;
  using top = pulseinfer::detail::cuda_top_k<cuda_backend>;
  // The smallest shapes that there are to choose from. (check_top_k_case poisons what is written.)
  std::mt19937_64 random(6);
  for (const auto way : top_k_ways) {
    CHECK(top::workspace_bytes({1, 2, 1}, way) > 0);
    check_top_k_case({2, 1, 2, {0}, {2}, drawn_keys(2, random), way});
    check_top_k_case({2, 1, 2, {0, 1, 2}, {2, 2, 2}, drawn_keys(6, random), way});
  }
  CHECK(top::workspace_bytes({1, 2, 1}, cuda_top_k_way::whole_device) >
        top::workspace_bytes({1, 2, 1}, cuda_top_k_way::row_a_cta));
}

TEST_CASE("top-k: drawn rows") {
  std::mt19937_64 random(20);
  for (int round = 0; round < 12; ++round) {
    top_k_case c;
    c.columns = 1 + static_cast<std::int64_t>(random() % 700);
    c.k = 1 + static_cast<std::int64_t>(random() % 80);
    c.row_stride = c.columns + static_cast<std::int64_t>(random() % 9);
    c.way = round % 3 == 0 ? pulseinfer::detail::cuda_top_k_way::automatic : top_k_ways[round % 2];
    const std::size_t rows = 1 + random() % 9;
    for (std::size_t r = 0; r < rows; ++r) {
      const auto a =
          static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(c.columns + 1));
      const auto b =
          static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(c.columns + 1));
      c.begin.push_back(r % 4 == 0 ? 0 : a);
      c.end.push_back(r % 4 == 0 ? static_cast<std::int32_t>(c.columns) : b);
    }
    c.keys = drawn_keys(rows * static_cast<std::size_t>(c.row_stride), random);
    if (round % 2 == 1) {
      // Equal scores: only the inverted index tells the keys apart.
      for (std::size_t i = 0; i < c.keys.size(); ++i) {
        const auto index = static_cast<std::int32_t>(i % static_cast<std::size_t>(c.row_stride));
        c.keys[i] = pulseinfer::top_k_key(static_cast<float>(c.keys[i] % 5), index);
      }
    }
    check_top_k_case(c);
  }
}

struct pipeline {
  explicit pipeline(cuda_backend b) : backend(b) {}

  cuda_backend backend;
  cuda_backend::stream copies = backend.make_stream(stream_priority::high);
  cuda_backend::event arrived = backend.make_event();
  cuda_backend::event done = backend.make_event();
  memory<int> staging{backend, 256};
  memory<int> device{backend, 256, false};
  memory<int> result{backend, 256};
  std::atomic<bool> finished{false};

  /// What a transfer does: a copy, a task that waits for it, more work from inside the task.
  void start() {
    std::fill_n(staging.get(), 256, 5);
    backend.copy_async(device.get(), staging.get(), 1024, copy_direction::host_to_device, copies);
    backend.record(arrived, copies);
    const cuda_backend::event* after[] = {&arrived};
    backend.host_async(
        after, {[](void* self) noexcept { static_cast<pipeline*>(self)->second(); }, this}, {});
  }
  void second() noexcept {
    // The copy is done: its source may be written.
    std::fill_n(staging.get(), 256, 9);
    backend.for_each({1, 256}, {}, 0, add_one{device.get()}, copies);
    backend.copy_async(result.get(), device.get(), 1024, copy_direction::device_to_host, copies);
    backend.record(done, copies);
    finished = true;
  }
};

TEST_CASE("host tasks wait for events and feed streams, on several workers") {
  for (int workers : {1, 3}) {
    cuda_backend backend{cuda_options{.workers = workers}};
    std::vector<std::unique_ptr<pipeline>> all;
    for (int i = 0; i < 8; ++i) all.push_back(std::make_unique<pipeline>(backend));
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&all, t] {
        for (std::size_t i = static_cast<std::size_t>(t); i < all.size(); i += 4) all[i]->start();
      });
    }
    for (auto& thread : threads) thread.join();
    for (auto& p : all) {
      backend.sync_until([&p] { return p->finished.load(); });
      backend.sync(p->done);
      CHECK(p->result[0] == 6);
      CHECK(p->result[255] == 6);
    }
    no_error_is_left();
  }
}

TEST_CASE("work handed over runs before the last copy of a backend goes") {
  static std::atomic<int> ran{0};
  ran = 0;
  {
    cuda_backend backend;
    cuda_backend copy = backend;
    for (int i = 0; i < 5; ++i) copy.host_async({}, {[](void*) noexcept { ++ran; }, nullptr}, {});
  }
  CHECK(ran == 5);
}

}  // namespace
