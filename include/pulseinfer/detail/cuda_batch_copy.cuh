// SPDX-License-Identifier: Apache-2.0
/// @file
/// The driver's batched copy, one call for many copies, where there is one: found at run time.
///
/// Of the ways to find it, the driver's entry point is the one that cannot go wrong: a program that
/// links the function does not start on drivers before 12.8; a look-up of the runtime's function by
/// name finds nothing in a statically linked runtime, or the function of another runtime that the
/// process has loaded, with other arguments. The driver is one, and gives a function in the form of
/// the version that is asked for. So nothing here depends on the toolkit that compiles it.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/cuda_runtime.cuh"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Finds functions of the installed driver.
struct cuda_driver {
  /// Newest version of CUDA that the driver supports, 12080 for 12.8; 0 if it cannot be told.
  [[nodiscard]] int version() const noexcept {
    int found = 0;
    const cudaError_t code = cudaDriverGetVersion(&found);
    forget_cuda_error(code);
    return code == cudaSuccess ? found : 0;
  }
  /// A function as it was in a version of CUDA, for streams of which null is the legacy default
  /// one; null where the driver has none.
  [[nodiscard]] void* find(const char* name, int version) const noexcept {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t code = cudaGetDriverEntryPointByVersion(
        name, &function, static_cast<unsigned>(version), cudaEnableLegacyStream, &found);
    forget_cuda_error(code);
    return code == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
#else
    // The runtime asks for functions of its own version only. One of those asks for any.
    using ask = int (*)(const char*, void**, int, unsigned long long, int*);
    void* asking = nullptr;
    const cudaError_t code =
        cudaGetDriverEntryPoint("cuGetProcAddress", &asking, cudaEnableDefault, &found);
    forget_cuda_error(code);
    if (code != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
    int status = 0;  // CU_GET_PROC_ADDRESS_SUCCESS
    const int result =
        reinterpret_cast<ask>(asking)(name, &function, version, cudaEnableLegacyStream, &status);
    return result == 0 && status == 0 ? function : nullptr;
#endif
  }
};

/// The batched copy of a driver, or that there is none.
///
/// @par Threads  any number, on different streams
class cuda_batch_copy {
 public:
  /// Entries of one call, far below where drivers were seen to fail (8,192 and 20,000). A call of
  /// this size takes milliseconds: longer ones would save nothing.
  static constexpr std::size_t max_entries = 4096;

  /// @param driver  where to look: `version()` and `find(name, version)`
  template <class Driver = cuda_driver>
  explicit cuda_batch_copy(const Driver& driver = {}) noexcept {
    // Drivers keep the old forms of a function, so the form of 12.8 is there in all that have any.
    // The other order would be wrong: asked for the form of 13.0, a driver of 12.8 gives the newest
    // it has, which takes one argument more.
    of_12_8_ = reinterpret_cast<form_of_12_8>(driver.find("cuMemcpyBatchAsync", 12080));
    if (of_12_8_ == nullptr && driver.version() >= 13000) {
      of_13_0_ = reinterpret_cast<form_of_13_0>(driver.find("cuMemcpyBatchAsync", 13000));
    }
    works_.store(of_12_8_ != nullptr || of_13_0_ != nullptr, std::memory_order_relaxed);
  }

  /// False where there is none, or where it said that the device does not support it.
  [[nodiscard]] bool works() const noexcept { return works_.load(std::memory_order_relaxed); }

  /// Whether a stream takes batches: not the legacy default stream, and not while it is captured.
  /// Null counts as the legacy one also where per-thread default streams are compiled in.
  [[nodiscard]] static bool takes(cudaStream_t stream) noexcept {
    if (stream == nullptr || stream == cudaStreamLegacy) return false;
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaError_t code = cudaStreamIsCapturing(stream, &status);
    forget_cuda_error(code);
    return code == cudaSuccess && status == cudaStreamCaptureStatusNone;
  }

  /// Enqueues copies in calls of at most `max_entries`; those of zero bytes are left out.
  ///
  /// @param copies  each within one allocation or registration on either side: a call may not cross
  ///                from one into the next, adjacent as they may be
  /// @param stream  one that takes batches
  /// @param device  of the stream, and current
  /// @return how many copies from the front are enqueued; the others the caller enqueues one by
  ///         one. Not all of them where a single copy is left over, or where the device does not
  ///         support batches
  /// @throws cuda_error  naming the entry, if the driver knows it. Copies of earlier calls stay
  ///                     enqueued, in the order of the stream
  /// @par Cost  a call for 4,096 copies; allocates nothing, and takes 96 KiB of the stack
  [[nodiscard]] std::size_t enqueue(std::span<const copy_span> copies, cudaStream_t stream,
                                    int device) {
    // Not initialised: most batches use a small part of it.
    std::array<address, max_entries> to;
    std::array<address, max_entries> from;
    std::array<std::size_t, max_entries> bytes;
    std::size_t enqueued = 0;
    std::size_t n = 0;
    for (std::size_t i = 0; i < copies.size(); ++i) {
      if (copies[i].bytes > 0) {
        to[n] = reinterpret_cast<address>(copies[i].destination);
        from[n] = reinterpret_cast<address>(copies[i].source);
        bytes[n] = copies[i].bytes;
        ++n;
      }
      if (n < max_entries && i + 1 < copies.size()) continue;
      if (n == 1) break;
      if (n > 0 && !call(to.data(), from.data(), bytes.data(), n, stream, device)) break;
      enqueued = i + 1;
      n = 0;
    }
    return enqueued;
  }

 private:
  using address = unsigned long long;  // CUdeviceptr
  static_assert(sizeof(address) == sizeof(void*));

  /// CUmemcpyAttributes, which toolkits before 12.8 do not have.
  struct attributes {
    int source_access_order;
    int source_location_type, source_location_id;
    int destination_location_type, destination_location_id;
    unsigned flags;
  };
  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read when the stream gets to the call. Anything
  // else would have pinned memory read before, or after, whom the stream orders it with.
  static constexpr int in_stream_order = 1;
#if CUDART_VERSION >= 12080
  static_assert(sizeof(attributes) == sizeof(cudaMemcpyAttributes));
  static_assert(offsetof(attributes, source_access_order) ==
                offsetof(cudaMemcpyAttributes, srcAccessOrder));
  static_assert(offsetof(attributes, flags) == offsetof(cudaMemcpyAttributes, flags));
  static_assert(in_stream_order == static_cast<int>(cudaMemcpySrcAccessOrderStream));
#endif

  using form_of_12_8 = int (*)(address* to, address* from, std::size_t* bytes, std::size_t count,
                               attributes*, std::size_t* attribute_starts, std::size_t attributes,
                               std::size_t* failed, cudaStream_t);
  using form_of_13_0 = int (*)(address* to, address* from, std::size_t* bytes, std::size_t count,
                               attributes*, std::size_t* attribute_starts, std::size_t attributes,
                               cudaStream_t);

  /// False if the device does not support it: nothing is enqueued then, nor will it be asked again.
  [[nodiscard]] bool call(address* to, address* from, std::size_t* bytes, std::size_t count,
                          cudaStream_t stream, int device) {
    constexpr std::size_t unknown = std::numeric_limits<std::size_t>::max();
    std::size_t failed = unknown;
    const auto attempt = [&] {
      attributes common{};
      common.source_access_order = in_stream_order;
      std::size_t start = 0;
      return static_cast<cudaError_t>(
          of_12_8_ != nullptr
              ? of_12_8_(to, from, bytes, count, &common, &start, 1, &failed, stream)
              : of_13_0_(to, from, bytes, count, &common, &start, 1, stream));
    };
    cudaError_t code = attempt();
    if (code == cudaErrorDeviceUninitialized) {
      // The driver wants a context in this thread; functions of the runtime bring it as they go.
      check_cuda(cudaSetDevice(device), "cudaSetDevice");
      code = attempt();
    }
    if (code == cudaSuccess) return true;
    if (code == cudaErrorNotSupported) {
      works_.store(false, std::memory_order_relaxed);
      return false;
    }
    throw cuda_error(code, failed == unknown || failed >= count
                               ? text_of("cuMemcpyBatchAsync of ", count, " copies")
                               : text_of("cuMemcpyBatchAsync of ", count, " copies, at copy ",
                                         failed, " of ", bytes[failed], " bytes"));
  }

  form_of_12_8 of_12_8_ = nullptr;
  form_of_13_0 of_13_0_ = nullptr;
  std::atomic<bool> works_{false};
};

}  // namespace pulseinfer::detail
