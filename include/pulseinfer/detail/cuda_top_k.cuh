// SPDX-License-Identifier: Apache-2.0
/// @file
/// Top-k on CUDA. One CTA selects a row, digit by digit, with CUB's scan of a CTA; where rows are so
/// few and so long that most of the device would idle, all of it takes one row after the other:
/// `cub::DeviceTopK` where CUB has it, `cub::DeviceRadixSort` before. The keys of a row differ, so
/// all find the same last chosen key, whatever CUB promises about ties; from there on the shared
/// `compact_top_k` writes the indices.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <cub/version.cuh>
#include <limits>
#include <span>
#include <type_traits>

#if CUB_VERSION >= 300300
#include <cub/device/device_topk.cuh>
#include <cuda/stream_ref>
#else
#include <cub/device/device_radix_sort.cuh>
#endif

#include "pulseinfer/detail/cuda_kernels.cuh"
#include "pulseinfer/top_k.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Copies a row to where CUB reads it, followed by keys that are below all others. (Of a row that is
/// longer than what is chosen none of those is chosen, and of others the result is not read.)
struct gather_top_k_row {
  top_k_keys keys;
  std::int64_t row;
  std::uint64_t* gathered;  ///< [columns]

  PULSEINFER_HD void operator()(std::int64_t, std::int64_t column) const {
    gathered[column] = column < row_length(keys, row) ? row_keys(keys, row)[column] : 0;
  }
};
static_assert(std::is_trivially_copyable_v<gather_top_k_row>);

inline namespace PULSEINFER_CUDA_TAG {

PULSEINFER_HIDDEN_BEGIN

/// Finds one key by its rank: a histogram of the upper digit, then of the next digit of those keys
/// that share it, until all keys of a bucket are wanted. Exact for any keys: there is no buffer of
/// candidates that could be too small. Scores that differ are told apart by two or three digits.
template <int Threads>
class cta_radix_select {
  static constexpr int digit_bits = 11;
  static constexpr int buckets = 1 << digit_bits;
  static constexpr int buckets_a_thread = buckets / Threads;
  static_assert(buckets % Threads == 0);
  using block_scan = cub::BlockScan<std::uint32_t, Threads>;

 public:
  struct storage {
    std::uint32_t histogram[buckets];
    typename block_scan::TempStorage scan;
    std::uint32_t bucket;
    std::uint32_t above;
    std::uint32_t size;
  };

  /// The key of a rank, or a lower bound that no key of a higher rank reaches; the same in every
  /// thread.
  /// @param length   below 2^32
  /// @param rank     1 to length
  /// @param exactly  the key itself: there are further keys that the bound is for
  __device__ static std::uint64_t find(storage& shared, const std::uint64_t* keys,
                                       std::int64_t length, std::int64_t rank, bool exactly) {
    auto wanted = static_cast<std::uint32_t>(rank);
    std::uint64_t prefix = 0;
    for (int shift = 64; shift > 0;) {
      const std::uint64_t known = shift < 64 ? ~std::uint64_t{0} << shift : 0;
      shift = shift > digit_bits ? shift - digit_bits : 0;
      count(shared.histogram, keys, length, prefix, known, shift);
      choose(shared, wanted);
      prefix |= std::uint64_t{shared.bucket} << shift;
      wanted -= shared.above;
      const bool all_wanted = !exactly && shared.size == wanted;
      __syncthreads();  // before they are written again
      if (all_wanted) break;
    }
    return prefix;
  }

 private:
  static constexpr int loads = 8;

  /// Of the lanes of a warp those that have the first one's digit add together: where scores are
  /// alike, all of them.
  __device__ static void count_digit(std::uint32_t* histogram, bool counts, std::uint32_t digit) {
    const unsigned counting = __ballot_sync(0xffffffffu, counts);
    if (counting == 0) return;
    const int first = __ffs(static_cast<int>(counting)) - 1;
    const bool is_first = static_cast<int>(threadIdx.x % 32) == first;
    const std::uint32_t first_digit = __shfl_sync(0xffffffffu, digit, first);
    const bool is_shared = counts && digit == first_digit;
    const int together = __popc(__ballot_sync(0xffffffffu, is_shared));
    if (is_first) {
      atomicAdd(histogram + digit, static_cast<std::uint32_t>(together));
    } else if (counts && !is_shared) {
      atomicAdd(histogram + digit, 1u);
    }
  }

  /// Counts the next digit of all keys that begin like `prefix`.
  __device__ static void count(std::uint32_t* histogram, const std::uint64_t* keys,
                               std::int64_t length, std::uint64_t prefix, std::uint64_t known,
                               int shift) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < buckets; i += Threads) histogram[i] = 0;
    __syncthreads();
    for (std::int64_t start = thread; start - thread < length; start += loads * Threads) {
      // All at once: the CTA waits for memory once a turn.
      std::uint64_t key[loads];
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        const std::int64_t at = start + i * Threads;
        key[i] = at < length ? keys[at] : 0;
      }
#pragma unroll
      for (int i = 0; i < loads; ++i) {
        const bool counts = start + i * Threads < length && (key[i] & known) == prefix;
        count_digit(histogram, counts, static_cast<std::uint32_t>((key[i] & ~known) >> shift));
      }
    }
    __syncthreads();
  }

  /// The bucket that holds the wanted key, how many keys are in buckets above it, and in it.
  __device__ static void choose(storage& shared, std::uint32_t wanted) {
    std::uint32_t sizes[buckets_a_thread];
    std::uint32_t above[buckets_a_thread];
    const int first = buckets - 1 - static_cast<int>(threadIdx.x) * buckets_a_thread;
    for (int i = 0; i < buckets_a_thread; ++i) sizes[i] = shared.histogram[first - i];
    block_scan(shared.scan).ExclusiveSum(sizes, above);
    for (int i = 0; i < buckets_a_thread; ++i) {
      if (above[i] < wanted && wanted - above[i] <= sizes[i]) {
        shared.bucket = static_cast<std::uint32_t>(first - i);
        shared.above = above[i];
        shared.size = sizes[i];
      }
    }
    __syncthreads();
  }
};

/// One CTA a row: finds the last chosen key, and writes the indices.
/// @param thresholds  [rows], those of `compact`
template <int Threads>
__global__ void __launch_bounds__(Threads)
    select_top_k_kernel(const __grid_constant__ compact_top_k compact, std::uint64_t* thresholds,
                        std::int64_t rows) {
  using select = cta_radix_select<Threads>;
  __shared__ typename select::storage shared;
  __shared__ std::int64_t slots[cta_group<Threads>::warps];
  const top_k_keys& keys = compact.keys;
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const std::int64_t chosen = row_choice(keys, compact.k, row);
    const std::int64_t length = chosen > 0 ? row_length(keys, row) : 0;
    if (length > chosen) {
      const std::uint64_t threshold =
          select::find(shared, row_keys(keys, row), length, chosen, false);
      if (threadIdx.x == 0) thresholds[row] = threshold;
      __syncthreads();
    }
    compact(row, cta_group<Threads>(slots));
  }
}

/// One CTA: of the k largest keys of a row, in any order, the one that is the last chosen.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    find_among_best_kernel(const top_k_keys keys, std::int64_t k, std::int64_t row,
                           const std::uint64_t* best, std::uint64_t* thresholds) {
  using select = cta_radix_select<Threads>;
  __shared__ typename select::storage shared;
  const std::int64_t chosen = row_choice(keys, k, row);
  if (chosen <= 0) return;
  const std::uint64_t threshold = select::find(shared, best, k, chosen, true);
  if (threadIdx.x == 0) thresholds[row] = threshold;
}

PULSEINFER_HIDDEN_END

/// How a top-k is spread over the device.
enum class cuda_top_k_way : std::uint8_t {
  automatic,     ///< by the shape
  row_a_cta,     ///< all rows at once, a CTA each
  whole_device,  ///< one row after the other, by CUB
};

/// Job 7. A template, so that only those who select have CUB's kernels compiled.
///
/// A workspace for a shape serves every shape with as many rows and columns, or fewer, and the same
/// k. It holds 8 bytes a row, and from `long_row` columns on what CUB wants for one row (16 bytes a
/// key where it sorts, about 8 where it does not).
template <class Backend>
struct cuda_top_k {
  /// The shortest row that is worth the whole device; for r rows r times as much. Estimated, not
  /// measured: a CTA reads a row three to four times at some 60 GB/s; CUB's launches for a row take
  /// some 40 us.
  static constexpr std::int64_t long_row = std::int64_t{1} << 17;
  /// Of a CTA for a row, long or short: a short one is read in one turn.
  static constexpr int threads = 1024;
  static constexpr int few_threads = 256;
  static constexpr std::int64_t short_row = 2'048;

  [[nodiscard]] static bool takes_whole_device(const top_k_shape& shape,
                                               cuda_top_k_way way) noexcept {
    if (shape.columns <= shape.k) return false;  // only its limit can be shorter than such a row
    if (way != cuda_top_k_way::automatic) return way == cuda_top_k_way::whole_device;
    return shape.rows <= shape.columns / long_row;
  }

  [[nodiscard]] static std::size_t workspace_bytes(const top_k_shape& shape,
                                                   cuda_top_k_way way = cuda_top_k_way::automatic) {
    return plan(shape, way).bytes;
  }

  static void run(Backend& backend, const top_k_shape& shape, const top_k_keys& keys,
                  std::int32_t* selected, std::int32_t* counts, std::span<std::byte> workspace,
                  typename Backend::stream_ref stream,
                  cuda_top_k_way way = cuda_top_k_way::automatic) {
    const plan at(shape, way);
    check_top_k(shape, keys, selected, workspace, at.bytes);
    if (shape.rows == 0) return;
    std::byte* base = workspace.data();
    expects(at.bytes == 0 || reinterpret_cast<std::uintptr_t>(base) % 256 == 0,
            "top_k: the workspace is not aligned to 256 bytes");
    auto* thresholds = reinterpret_cast<std::uint64_t*>(base);
    const compact_top_k compact{keys, shape.k, thresholds, selected, counts};
    if (!takes_whole_device(shape, way)) {
      if (shape.columns <= short_row) {
        launch_kernel(&select_top_k_kernel<few_threads>,
                      {dim3(grid(shape.rows)), dim3(few_threads)}, stream.get(), compact,
                      thresholds, shape.rows);
      } else {
        launch_kernel(&select_top_k_kernel<threads>, {dim3(grid(shape.rows)), dim3(threads)},
                      stream.get(), compact, thresholds, shape.rows);
      }
      return;
    }
    auto* gathered = reinterpret_cast<std::uint64_t*>(base + at.gathered);
    auto* best = reinterpret_cast<std::uint64_t*>(base + at.best);
    std::size_t temporary_bytes = at.bytes - at.temporary;
    for (std::int64_t row = 0; row < shape.rows; ++row) {
      backend.for_each({1, shape.columns}, {}, 0, gather_top_k_row{keys, row, gathered}, stream);
      const std::uint64_t* const chosen =
          take_best(base + at.temporary, temporary_bytes, gathered, best, shape, stream.get());
      launch_kernel(&find_among_best_kernel<few_threads>, {dim3(1), dim3(few_threads)},
                    stream.get(), keys, shape.k, row, chosen, thresholds);
    }
    backend.for_each_row(shape.rows, {}, 0, compact, stream);
  }

 private:
  /// Where everything lies in the workspace, the thresholds first.
  struct plan {
    std::size_t gathered = 0;
    std::size_t best = 0;
    std::size_t temporary = 0;
    std::size_t bytes = 0;

    plan(const top_k_shape& shape, cuda_top_k_way way) {
      if (shape.rows <= 0 || shape.k <= 0 || shape.columns <= 0) return;
      expects(shape.columns <= max_top_k_columns, "top_k: columns is ", shape.columns,
              ", expected at most ", max_top_k_columns);
      (void)take(static_cast<std::size_t>(shape.rows) * sizeof(std::uint64_t));
      // One row may come alone, even if the workspace is for many.
      if (!takes_whole_device({1, shape.columns, shape.k}, way)) return;
      gathered = take(static_cast<std::size_t>(shape.columns) * sizeof(std::uint64_t));
      best = take(static_cast<std::size_t>(best_keys(shape)) * sizeof(std::uint64_t));
      std::size_t wanted = 0;
      (void)take_best(nullptr, wanted, nullptr, nullptr, shape, nullptr);
      // A workspace of no bytes would be null, which to CUB is the question, not the work.
      temporary = take(std::max<std::size_t>(wanted, 1));
    }

   private:
    std::size_t take(std::size_t size) {
      const std::size_t at = bytes;
      bytes += (size + 255) / 256 * 256;
      return at;
    }
  };

  static unsigned grid(std::int64_t rows) noexcept {
    return static_cast<unsigned>(
        std::min<std::int64_t>(rows, std::numeric_limits<std::int32_t>::max()));
  }

#if CUB_VERSION >= 300300
  static std::int64_t best_keys(const top_k_shape& shape) noexcept {
    return shape.k;
  }
#else
  static std::int64_t best_keys(const top_k_shape& shape) noexcept {
    return shape.columns;
  }
#endif

  /// Brings the k largest of the gathered keys together, in any order, and returns where they are:
  /// in `best`, or in place. With a null `temporary` it only sets how many bytes it wants there.
  static const std::uint64_t* take_best(void* temporary, std::size_t& bytes,
                                        std::uint64_t* gathered, std::uint64_t* best,
                                        const top_k_shape& shape, cudaStream_t stream) {
    // CUB takes any last error that it finds after a launch for its own.
    (void)cudaGetLastError();
#if CUB_VERSION >= 300300
    const auto environment = cuda::std::execution::env{
        cuda::stream_ref{stream},
        cuda::execution::require(cuda::execution::determinism::not_guaranteed,
                                 cuda::execution::output_ordering::unsorted)};
    check_cuda(cub::DeviceTopK::MaxKeys(temporary, bytes, gathered, best,
                                        static_cast<std::uint32_t>(shape.columns),
                                        static_cast<std::uint32_t>(shape.k), environment),
               "cub::DeviceTopK::MaxKeys");
    return best;
#else
    cub::DoubleBuffer<std::uint64_t> sorted(gathered, best);
    check_cuda(cub::DeviceRadixSort::SortKeysDescending(temporary, bytes, sorted, shape.columns, 0,
                                                        64, stream),
               "cub::DeviceRadixSort::SortKeysDescending");
    return sorted.Current();
#endif
  }
};

}  // namespace PULSEINFER_CUDA_TAG
}  // namespace pulseinfer::detail
