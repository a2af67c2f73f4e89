// SPDX-License-Identifier: Apache-2.0
/// @file
/// The CUDA runtime's manners: errors as exceptions, the current device, the streams that are ours,
/// names that keep two builds apart.
#pragma once

#include <cuda_runtime.h>

#include <mutex>
#include <source_location>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/error.hpp"

/// Between these two, functions are hidden: of two shared libraries that hold the same kernel, each
/// launches its own. (As an attribute of a template it makes nvcc warn where an argument is a type
/// of an unnamed namespace.)
#define PULSEINFER_HIDDEN_BEGIN _Pragma("GCC visibility push(hidden)")
#define PULSEINFER_HIDDEN_END _Pragma("GCC visibility pop")

/// Names an inline namespace after the architectures that this translation unit is compiled for.
///
/// A template that launches a kernel is one function to the linker, whatever it was compiled for.
/// Of two objects with different architectures it keeps one, and kernels would go missing on the
/// devices of the other. The name keeps them apart. (Clang does not say what it compiles for.)
#define PULSEINFER_CUDA_JOIN(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, ...) \
  cuda_##a##b##c##d##e##f##g##h##i##j##k##l##m##n##o##p
#define PULSEINFER_CUDA_TAG_OF(...) \
  PULSEINFER_CUDA_JOIN(__VA_ARGS__, , , , , , , , , , , , , , , , )
#if defined(__CUDA_ARCH_LIST__)
#define PULSEINFER_CUDA_TAG PULSEINFER_CUDA_TAG_OF(__CUDA_ARCH_LIST__)
#else
#define PULSEINFER_CUDA_TAG PULSEINFER_CUDA_TAG_OF(any)
#endif

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A call of the CUDA runtime failed. The text names the call, the error and where in the library.
class cuda_error : public device_error {
 public:
  explicit cuda_error(cudaError_t code, std::string call,
                      std::source_location where = std::source_location::current())
      : device_error(detail::text_of(call, ": ", cudaGetErrorName(code), " (",
                                     cudaGetErrorString(code), "), at ", where.file_name(), ":",
                                     where.line())),
        code_(code),
        call_(std::move(call)),
        where_(where) {}

  [[nodiscard]] cudaError_t code() const noexcept { return code_; }
  [[nodiscard]] const std::string& call() const noexcept { return call_; }
  [[nodiscard]] const std::source_location& where() const noexcept { return where_; }

 private:
  cudaError_t code_;
  std::string call_;
  std::source_location where_;
};

namespace detail {

/// The runtime keeps a thread's last error until somebody fetches it, and code that looks for its
/// own failures there would be blamed for ours. Fetches it where it is the one that just occurred;
/// an older one of the engine's stays for the engine.
inline void forget_cuda_error(cudaError_t code) noexcept {
  if (code != cudaSuccess && cudaPeekAtLastError() == code) (void)cudaGetLastError();
}

/// Throws unless the call succeeded.
inline void check_cuda(cudaError_t code, const char* call,
                       std::source_location where = std::source_location::current()) {
  if (code == cudaSuccess) return;
  forget_cuda_error(code);
  throw cuda_error(code, call, where);
}

/// Makes a device current in this thread while it lives. Costs a look-up where it is already.
class cuda_device_scope {
 public:
  explicit cuda_device_scope(int device) noexcept {
    // A device that cannot be made current makes the call fail for which it was wanted.
    cudaError_t code = cudaGetDevice(&previous_);
    if (code == cudaSuccess && previous_ != device) {
      code = cudaSetDevice(device);
      changed_ = code == cudaSuccess;
    }
    forget_cuda_error(code);
  }
  ~cuda_device_scope() {
    if (changed_) forget_cuda_error(cudaSetDevice(previous_));
  }
  cuda_device_scope(const cuda_device_scope&) = delete;
  cuda_device_scope& operator=(const cuda_device_scope&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

/// While an engine captures a graph, the runtime forbids other threads to allocate or to ask for
/// events, lest they depend on what was not run; such a call would spoil the engine's capture. What
/// the library asks does not concern the capture, and says so.
class cuda_capture_scope {
 public:
  cuda_capture_scope() noexcept { exchange(); }
  ~cuda_capture_scope() { exchange(); }
  cuda_capture_scope(const cuda_capture_scope&) = delete;
  cuda_capture_scope& operator=(const cuda_capture_scope&) = delete;

 private:
  void exchange() noexcept { forget_cuda_error(cudaThreadExchangeStreamCaptureMode(&mode_)); }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// The streams that a backend and its copies own, so that a waiting thread can ask how they do.
class cuda_streams {
 public:
  enum class progress { idle, pending };

  /// Makes a stream on the current device, not ordered with the legacy default stream.
  [[nodiscard]] cudaStream_t create(int priority) {
    std::lock_guard lock(mutex_);
    streams_.reserve(streams_.size() + 1);  // nothing can fail once the stream is there
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority),
               "cudaStreamCreateWithPriority");
    streams_.push_back(stream);
    return stream;
  }
  void remove(cudaStream_t stream) noexcept {
    std::lock_guard lock(mutex_);
    std::erase(streams_, stream);
  }
  /// Throws what a stream has failed with.
  [[nodiscard]] progress query() const {
    std::lock_guard lock(mutex_);
    progress found = progress::idle;
    for (cudaStream_t stream : streams_) {
      cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
      check_cuda(cudaStreamIsCapturing(stream, &capture), "cudaStreamIsCapturing");
      if (capture != cudaStreamCaptureStatusNone) continue;  // a query would spoil the capture
      const cudaError_t code = cudaStreamQuery(stream);
      forget_cuda_error(code);
      if (code == cudaErrorNotReady) {
        found = progress::pending;
      } else {
        check_cuda(code, "cudaStreamQuery");
      }
    }
    return found;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<cudaStream_t> streams_;
};

}  // namespace detail
}  // namespace pulseinfer
