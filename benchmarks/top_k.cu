// SPDX-License-Identifier: Apache-2.0
// Top-k on CUDA against what CUB has: its segmented sort of all rows, and, where it is there,
// DeviceTopK of one row after the other.
//
// 16 rows of 8,192 keys, k = 64, and 64 rows of 65,536, k = 2,048; scores are random floats. On a GPU: medians of
// 51 runs in turn, by events on one stream, keys in the cache of the device as far as they fit;
// ours writes ascending indices, CUB only the keys.
//
// - gpu_topk_vs_best_cub: how many times as fast ours is as the better of CUB's, the worse shape
//
// Where kernels are run by the CPU times mean nothing. There the 32-byte sectors that warps ask for
// are counted, at the first shape:
//
// - cuda_topk_sectors_vs_sort: those of CUB's sort for each of ours
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cub/device/device_segmented_radix_sort.cuh>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "pulseinfer/backend/cuda.cuh"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

#if __has_include("ptxsim_stats.h")
#include "ptxsim_stats.h"
#endif

namespace {

using namespace pulseinfer;
using pulseinfer::detail::check_cuda;

template <class T>
using device_memory = device_buffer<T, cuda_backend>;

/// Rows of keys on the device, and what there is to choose them with.
struct rows_of_keys {
  cuda_backend backend;
  cuda_backend::stream stream = backend.make_stream(stream_priority::normal);
  top_k_shape shape;
  pinned_buffer<std::uint64_t, cuda_backend> host_keys;
  pinned_buffer<std::int32_t, cuda_backend>
      ends;  ///< [rows] begins, [rows] ends, [rows + 1] offsets
  device_memory<std::uint64_t> keys, sorted, best;
  device_memory<std::int32_t> selected;
  device_memory<std::byte> workspace, sort_workspace, cub_workspace;

  explicit rows_of_keys(const top_k_shape& s)
      : shape(s),
        host_keys(backend, size()),
        ends(backend, static_cast<std::size_t>(3 * s.rows + 1)),
        keys(backend, size()),
        sorted(backend, size()),
        best(backend, static_cast<std::size_t>(s.k)),
        selected(backend, static_cast<std::size_t>(s.rows * s.k)),
        workspace(backend, backend.top_k_workspace_bytes(s)),
        sort_workspace(backend, sort(nullptr, 0)),
        cub_workspace(backend, best_of_row(0, nullptr, 0)) {
    detail::random_source draw(1);
    for (std::int64_t i = 0; i < s.rows * s.columns; ++i) {
      const auto score = static_cast<float>(draw.below(std::uint64_t{1} << 24)) * 1e-6f;
      host_keys.data()[i] = top_k_key(score, static_cast<std::int32_t>(i % s.columns));
    }
    for (std::int64_t r = 0; r < s.rows; ++r) {
      ends.data()[r] = 0;
      ends.data()[s.rows + r] = static_cast<std::int32_t>(s.columns);
    }
    for (std::int64_t r = 0; r <= s.rows; ++r) {
      ends.data()[2 * s.rows + r] = static_cast<std::int32_t>(r * s.columns);
    }
    backend.copy_async(keys.data(), host_keys.data(), size() * sizeof(std::uint64_t),
                       copy_direction::host_to_device, stream);
    backend.sync(stream);
  }

  [[nodiscard]] std::size_t size() const {
    return static_cast<std::size_t>(shape.rows * shape.columns);
  }
  void select() {
    const std::int32_t* range = backend.device_pointer(ends.data());
    backend.top_k(shape, {keys.data(), shape.columns, range, range + shape.rows}, selected.data(),
                  nullptr, {workspace.data(), workspace.size()}, stream);
  }
  std::size_t sort(void* temporary, std::size_t bytes) {
    const std::int32_t* offsets = backend.device_pointer(ends.data()) + 2 * shape.rows;
    check_cuda(cub::DeviceSegmentedRadixSort::SortKeysDescending(
                   temporary, bytes, keys.data(), sorted.data(), static_cast<int>(size()),
                   static_cast<int>(shape.rows), offsets, offsets + 1, 0, 64, stream.get()),
               "cub::DeviceSegmentedRadixSort::SortKeysDescending");
    return bytes;
  }
  void sort() { (void)sort(sort_workspace.data(), sort_workspace.size()); }

#if CUB_VERSION >= 300300
  static constexpr bool has_device_top_k = true;
  std::size_t best_of_row(std::int64_t row, void* temporary, std::size_t bytes) {
    const auto environment = cuda::std::execution::env{
        cuda::stream_ref{stream.get()},
        cuda::execution::require(cuda::execution::determinism::not_guaranteed,
                                 cuda::execution::output_ordering::unsorted)};
    check_cuda(cub::DeviceTopK::MaxKeys(temporary, bytes, keys.data() + row * shape.columns,
                                        best.data(), static_cast<std::uint32_t>(shape.columns),
                                        static_cast<std::uint32_t>(shape.k), environment),
               "cub::DeviceTopK::MaxKeys");
    return bytes;
  }
#else
  static constexpr bool has_device_top_k = false;
  std::size_t best_of_row(std::int64_t, void*, std::size_t) {
    return 1;
  }
#endif
  void best_of_rows() {
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      (void)best_of_row(row, cub_workspace.data(), cub_workspace.size());
    }
  }

  /// What was selected are the keys that the sort has in front.
  void compare() {
    std::vector<std::int32_t> chosen(selected.size());
    std::vector<std::uint64_t> in_order(size());
    check_cuda(cudaMemcpy(chosen.data(), selected.data(), chosen.size() * sizeof(std::int32_t),
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    check_cuda(cudaMemcpy(in_order.data(), sorted.data(), size() * sizeof(std::uint64_t),
                          cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      std::vector<std::int32_t> expected;
      for (std::int64_t i = 0; i < shape.k; ++i) {
        expected.push_back(
            top_k_index(in_order[static_cast<std::size_t>(row * shape.columns + i)]));
      }
      std::sort(expected.begin(), expected.end());
      if (!std::equal(expected.begin(), expected.end(), chosen.begin() + row * shape.k)) {
        throw std::logic_error("two selections differ");
      }
    }
  }
};

/// Microseconds on the device.
class stopwatch {
 public:
  stopwatch() {
    check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
    check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
  }
  stopwatch(const stopwatch&) = delete;
  stopwatch& operator=(const stopwatch&) = delete;
  ~stopwatch() {
    (void)cudaEventDestroy(begin_);
    (void)cudaEventDestroy(end_);
  }
  template <class F>
  double time(cudaStream_t stream, F&& run) {
    check_cuda(cudaEventRecord(begin_, stream), "cudaEventRecord");
    run();
    check_cuda(cudaEventRecord(end_, stream), "cudaEventRecord");
    check_cuda(cudaEventSynchronize(end_), "cudaEventSynchronize");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
    return 1000.0 * static_cast<double>(ms);
  }

 private:
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

double compare_times(benchmark::State& state, const top_k_shape& shape) {
  rows_of_keys rows(shape);
  stopwatch watch;
  std::vector<double> ours, sorts, bests;
  for (int run = 0; run < 51; ++run) {
    ours.push_back(watch.time(rows.stream.get(), [&] { rows.select(); }));
    sorts.push_back(watch.time(rows.stream.get(), [&] { rows.sort(); }));
    if (rows_of_keys::has_device_top_k) {
      bests.push_back(watch.time(rows.stream.get(), [&] { rows.best_of_rows(); }));
    }
  }
  rows.compare();
  const std::string name = std::to_string(shape.rows) + "x" + std::to_string(shape.columns);
  const double our_us = pulseinfer_bench::median(ours);
  double cub_us = pulseinfer_bench::median(sorts);
  state.counters["us_" + name] = our_us;
  state.counters["sort_us_" + name] = cub_us;
  if (!bests.empty()) {
    state.counters["device_top_k_us_" + name] = pulseinfer_bench::median(bests);
    cub_us = std::min(cub_us, pulseinfer_bench::median(bests));
  }
  return cub_us / our_us;
}

#if __has_include("ptxsim_stats.h")
template <class F>
double sectors_of(rows_of_keys& rows, F&& run) {
  ptxsim::reset();
  run();
  rows.backend.sync(rows.stream);
  const ptxsim_kernel_counters all = ptxsim::kernel();
  return static_cast<double>(all.sectors_loaded + all.sectors_stored);
}
#endif

void top_k(benchmark::State& state) {
  for (auto _ : state) {
    if (cuda_backend{}.measures_time()) {
      const double figure = std::min(compare_times(state, {16, 8'192, 64}),
                                     compare_times(state, {64, 65'536, 2'048}));
      pulseinfer_bench::report("gpu_topk_vs_best_cub", figure);
      continue;
    }
#if __has_include("ptxsim_stats.h")
    rows_of_keys rows({16, 8'192, 64});
    const double ours = sectors_of(rows, [&] { rows.select(); });
    const double sorts = sectors_of(rows, [&] { rows.sort(); });
    rows.compare();
    state.counters["sectors_a_key_sector"] = ours * 32 / (8 * static_cast<double>(rows.size()));
    state.counters["ratio"] = sorts / ours;
    pulseinfer_bench::report("cuda_topk_sectors_vs_sort", sorts / ours);
#endif
  }
}
BENCHMARK(top_k)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
