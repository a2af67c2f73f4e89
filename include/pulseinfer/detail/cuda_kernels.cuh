// SPDX-License-Identifier: Apache-2.0
/// @file
/// The two kernels that run every functor of the library, and the shapes of their launches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/cuda_runtime.cuh"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {
inline namespace PULSEINFER_CUDA_TAG {

/// A CTA of `Threads` threads in one dimension as a row_group. The threads meet in shared memory,
/// of which the kernel brings one word a warp.
///
/// The members are host functions too, because bodies are: they do nothing there.
template <int Threads>
class cta_group {
  static_assert(Threads % 32 == 0 && Threads >= 32 && Threads <= 1024);

 public:
  static constexpr int warps = Threads / 32;

  /// @param slots  [warps], shared memory
  PULSEINFER_HD explicit cta_group(std::int64_t* slots) : slots_(slots) {}

  [[nodiscard]] PULSEINFER_HD int rank() const {
#if defined(__CUDA_ARCH__)
    return static_cast<int>(threadIdx.x);
#else
    return 0;
#endif
  }
  [[nodiscard]] PULSEINFER_HD int size() const {
    return Threads;
  }
  PULSEINFER_HD void sync() const {
#if defined(__CUDA_ARCH__)
    __syncthreads();
#endif
  }

  [[nodiscard]] PULSEINFER_HD std::int64_t sum(std::int64_t value) const {
#if defined(__CUDA_ARCH__)
    for (int distance = 16; distance > 0; distance /= 2) {
      value += __shfl_xor_sync(0xffffffffu, value, distance);
    }
    publish(value, 0);
    value = 0;
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) value += slots_[warp];
    __syncthreads();  // the next call writes the slots again
#endif
    return value;
  }
  [[nodiscard]] PULSEINFER_HD std::int64_t min(std::int64_t value) const {
#if defined(__CUDA_ARCH__)
    for (int distance = 16; distance > 0; distance /= 2) {
      value = smaller(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    publish(value, 0);
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) value = smaller(value, slots_[warp]);
    __syncthreads();
#endif
    return value;
  }
  [[nodiscard]] PULSEINFER_HD std::int64_t scan(std::int64_t value) const {
#if defined(__CUDA_ARCH__)
    const int lane = rank() % 32;
    std::int64_t up_to = value;
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::int64_t lower = __shfl_up_sync(0xffffffffu, up_to, distance);
      if (lane >= distance) up_to += lower;
    }
    publish(up_to, 31);
    value = up_to - value;
#pragma unroll
    for (int warp = 0; warp < warps; ++warp) value += warp < rank() / 32 ? slots_[warp] : 0;
    __syncthreads();
    return value;
#else
    (void)value;
    return 0;
#endif
  }

 private:
#if defined(__CUDA_ARCH__)
  __device__ void publish(std::int64_t value, int lane) const {
    if (rank() % 32 == lane) slots_[rank() / 32] = value;
    __syncthreads();
  }
  __device__ static std::int64_t smaller(std::int64_t a, std::int64_t b) {
    return a < b ? a : b;
  }
#endif

  std::int64_t* slots_;
};
static_assert(row_group<cta_group<128>>);

inline constexpr int for_each_threads = 256;
inline constexpr int for_each_row_threads = 128;

PULSEINFER_HIDDEN_BEGIN

/// Threads and CTAs run over blocks in one dimension and over words in the other, so that no index
/// is divided.
template <class Op>
__global__ void __launch_bounds__(for_each_threads)
    for_each_kernel(const __grid_constant__ Op op, std::int64_t blocks, std::int64_t words,
                    const std::int32_t* device_blocks) {
  if (device_blocks != nullptr) {
    const std::int64_t count = *device_blocks;
    blocks = count < blocks ? count : blocks;
  }
  const std::int64_t first_block =
      std::int64_t{blockIdx.x} * blockDim.y + static_cast<int>(threadIdx.y);
  const std::int64_t first_word =
      std::int64_t{blockIdx.y} * blockDim.x + static_cast<int>(threadIdx.x);
  const std::int64_t block_stride = std::int64_t{gridDim.x} * blockDim.y;
  const std::int64_t word_stride = std::int64_t{gridDim.y} * blockDim.x;
  for (std::int64_t block = first_block; block < blocks; block += block_stride) {
    // Not unrolled: counting the turns would cost a division, and bodies that load and store
    // through pointers gain nothing.
#pragma unroll 1
    for (std::int64_t word = first_word; word < words; word += word_stride) op(block, word);
  }
}

/// One CTA a row, then the row that is a grid further.
template <int Threads, class Op>
__global__ void __launch_bounds__(Threads)
    for_each_row_kernel(const __grid_constant__ Op op, std::int64_t rows) {
  __shared__ std::int64_t slots[cta_group<Threads>::warps];
  for (std::int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    op(row, cta_group<Threads>(slots));
  }
}

struct cuda_launch_shape {
  dim3 grid;
  dim3 block;
};

/// How `blocks` x `words` (both at least 1) are laid over at most `max_ctas` CTAs.
///
/// Few words: several blocks share a CTA, and neighbouring lanes still take neighbouring words.
/// Many words: as many whole warps as leave the last turn well filled. CTAs that blocks cannot use
/// go to the words of each block.
[[nodiscard]] inline cuda_launch_shape plan_for_each(std::int64_t blocks, std::int64_t words,
                                                     std::int64_t max_ctas) {
  constexpr std::int64_t threads = for_each_threads;
  const auto pieces = [](std::int64_t whole, std::int64_t piece) {
    return (whole - 1) / piece + 1;
  };
  std::int64_t x = words;
  if (words > threads) x = pieces(pieces(words, pieces(words, threads)), 32) * 32;
  const std::int64_t y = std::clamp<std::int64_t>(threads / x, 1, blocks);
  const std::int64_t most = std::min<std::int64_t>(max_ctas, std::numeric_limits<int>::max());
  const std::int64_t across = std::min(pieces(blocks, y), most);
  const std::int64_t along =
      std::min({std::max<std::int64_t>(most / across, 1), pieces(words, x), std::int64_t{65535}});
  return {dim3(static_cast<unsigned>(across), static_cast<unsigned>(along)),
          dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}

/// Launches and throws what the launch itself reports. (The <<<>>> form reports through the last
/// error only, where older errors of other code would be taken for its own.)
template <class... Parameters>
void launch_kernel(void (*kernel)(Parameters...), cuda_launch_shape shape, cudaStream_t stream,
                   const std::type_identity_t<std::remove_const_t<Parameters>>&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.stream = stream;
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx");
}

PULSEINFER_HIDDEN_END

}  // namespace PULSEINFER_CUDA_TAG
}  // namespace pulseinfer::detail
