// SPDX-License-Identifier: Apache-2.0
/// @file
/// The CUDA backend without the definition of its top-k, for translation units that do not select:
/// they are spared the compile time of CUB. Everybody else includes backend/cuda.cuh.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/cpu_kernels.hpp"
#include "pulseinfer/detail/cuda_batch_copy.cuh"
#include "pulseinfer/detail/cuda_kernels.cuh"
#include "pulseinfer/detail/cuda_runtime.cuh"
#include "pulseinfer/detail/host_workers.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Which device, how many workers and where they run, and what of the driver is used.
struct cuda_options {
  int device = -1;             ///< ordinal; -1: the device that is current in the calling thread
  int workers = 2;             ///< threads for host tasks, 1 to 1024
  std::vector<int> cpus = {};  ///< on which the workers may run, see numa.hpp; empty: on any
  bool batched_copies = true;  ///< copy_many_async uses one call for many copies where it can
};

namespace detail {

inline namespace PULSEINFER_CUDA_TAG {
/// Defined in detail/cuda_top_k.cuh. An error that calls it incomplete means that
/// backend/cuda.cuh is not included.
template <class Backend>
struct cuda_top_k;
}  // namespace PULSEINFER_CUDA_TAG

}  // namespace detail

inline namespace PULSEINFER_CUDA_TAG {

/// Models `backend` for one CUDA device. See concepts.hpp for what every member promises.
///
/// Every member may be called with any device current, and leaves that one current. No failure
/// stays behind as the runtime's last error. Errors are `cuda_error`; memory that cannot be had is
/// `out_of_memory`. Own streams are non-blocking: they are not ordered with the legacy default
/// stream but by events.
///
/// @par Threads  any number; one stream is fed by one thread at a time
class cuda_backend {
 public:
  /// Owns a stream of the device. Its destructor waits for the work in it.
  class stream {
   public:
    stream(stream&& other) noexcept
        : device_(other.device_),
          streams_(std::move(other.streams_)),
          handle_(std::exchange(other.handle_, nullptr)) {}
    stream& operator=(stream&& other) noexcept {
      std::swap(device_, other.device_);
      std::swap(streams_, other.streams_);
      std::swap(handle_, other.handle_);
      return *this;
    }
    ~stream() {
      if (handle_ == nullptr) return;
      streams_->remove(handle_);
      // At the end of a program the runtime may be gone: nothing is in flight then.
      const detail::cuda_device_scope device(device_);
      detail::forget_cuda_error(cudaStreamSynchronize(handle_));
      detail::forget_cuda_error(cudaStreamDestroy(handle_));
    }
    [[nodiscard]] cudaStream_t get() const noexcept { return handle_; }

   private:
    friend class cuda_backend;
    stream(int device, std::shared_ptr<detail::cuda_streams> streams, int priority)
        : device_(device), streams_(std::move(streams)), handle_(streams_->create(priority)) {}
    int device_;
    std::shared_ptr<detail::cuda_streams> streams_;
    cudaStream_t handle_;
  };

  /// Borrows a stream, which must outlive it: one of ours, or any of an engine's, the legacy
  /// default stream (cudaStreamLegacy) and the per-thread one (cudaStreamPerThread) included.
  class stream_ref {
   public:
    stream_ref(stream& owner) noexcept : handle_(owner.get()) {}
    stream_ref(cudaStream_t handle) noexcept : handle_(handle) {}
    stream_ref(int) = delete;  // a literal 0 is a slip more often than the default stream
    stream_ref(std::nullptr_t) = delete;
    [[nodiscard]] cudaStream_t get() const noexcept { return handle_; }
    friend bool operator==(stream_ref, stream_ref) = default;

   private:
    cudaStream_t handle_;
  };

  /// Owns an event without timing. Its destructor waits for its last record.
  class event {
   public:
    event(event&& other) noexcept
        : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}
    event& operator=(event&& other) noexcept {
      std::swap(device_, other.device_);
      std::swap(handle_, other.handle_);
      return *this;
    }
    ~event() {
      if (handle_ == nullptr) return;
      const detail::cuda_device_scope device(device_);
      const detail::cuda_capture_scope relaxed;
      detail::forget_cuda_error(cudaEventSynchronize(handle_));
      detail::forget_cuda_error(cudaEventDestroy(handle_));
    }
    [[nodiscard]] cudaEvent_t get() const noexcept { return handle_; }

   private:
    friend class cuda_backend;
    explicit event(int device) : device_(device) {
      detail::check_cuda(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming),
                         "cudaEventCreateWithFlags");
    }
    int device_;
    cudaEvent_t handle_ = nullptr;
  };

  /// @throws cuda_error             without a device, or with an ordinal that the machine does not
  ///                                have
  /// @throws std::invalid_argument  naming the count of workers, or a CPU that cannot be used
  explicit cuda_backend(const cuda_options& options = {})
      : state_(std::make_shared<state>(find_device(options.device), options)) {}

  [[nodiscard]] int device() const noexcept { return state_->device; }
  [[nodiscard]] std::string device_name() const { return state_->name; }
  /// False where kernels are interpreted by the CPU: results are right, times mean nothing.
  [[nodiscard]] bool measures_time() const noexcept { return state_->name.rfind("ptxsim", 0) != 0; }
  /// Whether copy_many_async has the driver's batched call: since CUDA 12.8, unless the options or
  /// the device say no.
  [[nodiscard]] bool batches_copies() const noexcept {
    return state_->batched_copies && state_->batch_copy.works();
  }

  // Job 1: memory. deallocate_pinned waits for the device (so does the runtime's own free).
  [[nodiscard]] void* allocate_device(std::size_t bytes) {
    return allocate(bytes, "cudaMalloc", "device",
                    [bytes](void** p) { return cudaMalloc(p, bytes); });
  }
  void deallocate_device(void* p, std::size_t) noexcept {
    deallocate(p, [](void* q) { return cudaFree(q); });
  }
  [[nodiscard]] void* allocate_pinned(std::size_t bytes) {
    return allocate(bytes, "cudaHostAlloc", "pinned", [bytes](void** p) {
      return cudaHostAlloc(p, bytes, cudaHostAllocMapped | cudaHostAllocPortable);
    });
  }
  void deallocate_pinned(void* p, std::size_t) noexcept {
    deallocate(p, [](void* q) { return cudaFreeHost(q); });
  }
  /// Maps the memory into the device's address space, for all devices; the device's address is not
  /// always the host's.
  void register_pinned(void* p, std::size_t bytes) {
    (void)allocate(bytes, "cudaHostRegister", "registered", [p, bytes](void** registered) {
      *registered = p;
      return cudaHostRegister(p, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable);
    });
  }
  void unregister_pinned(void* p, std::size_t bytes) noexcept {
    if (bytes > 0) deallocate(p, [](void* q) { return cudaHostUnregister(q); });
  }
  static constexpr bool registration_pins = true;
  /// `pinned` may point anywhere into pinned or registered memory.
  template <class T>
  [[nodiscard]] T* device_pointer(T* pinned) const {
    if (pinned == nullptr) return nullptr;
    const detail::cuda_device_scope device(state_->device);
    // Unlike cudaHostGetDevicePointer this is documented for addresses inside an allocation.
    cudaPointerAttributes found{};
    detail::check_cuda(cudaPointerGetAttributes(&found, pinned), "cudaPointerGetAttributes");
    detail::expects(found.type != cudaMemoryTypeUnregistered && found.devicePointer != nullptr,
                    "device_pointer: the address is not in memory that the device can reach");
    return static_cast<T*>(found.devicePointer);
  }
  [[nodiscard]] memory_limits limits() const {
    const detail::cuda_device_scope device(state_->device);
    std::size_t free = 0;
    std::size_t total = 0;
    detail::check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    memory_limits found;
    found.device_bytes_total = total;
    found.device_bytes_free = free;
    return found;
  }

  // Job 2: streams and events.
  [[nodiscard]] stream make_stream(stream_priority priority) {
    const detail::cuda_device_scope device(state_->device);
    return stream(
        state_->device, state_->streams,
        priority == stream_priority::high ? state_->high_priority : state_->normal_priority);
  }
  [[nodiscard]] event make_event() {
    const detail::cuda_device_scope device(state_->device);
    return event(state_->device);
  }
  void record(event& e, stream_ref s) {
    const detail::cuda_device_scope device(state_->device);
    detail::check_cuda(cudaEventRecord(e.handle_, s.get()), "cudaEventRecord");
  }
  void enqueue_wait(const event& e, stream_ref s) {
    const detail::cuda_device_scope device(state_->device);
    detail::check_cuda(cudaStreamWaitEvent(s.get(), e.handle_, 0), "cudaStreamWaitEvent");
  }
  [[nodiscard]] event_state poll(const event& e) const noexcept { return state::poll(e); }
  void sync(const event& e) {
    const detail::cuda_device_scope device(state_->device);
    const detail::cuda_capture_scope relaxed;
    detail::check_cuda(cudaEventSynchronize(e.handle_), "cudaEventSynchronize");
  }
  void sync(stream_ref s) {
    const detail::cuda_device_scope device(state_->device);
    detail::check_cuda(cudaStreamSynchronize(s.get()), "cudaStreamSynchronize");
  }
  /// Throws `cuda_error` when one of the backend's own streams fails meanwhile: what it waits for
  /// would never come.
  template <class Ready>
  void sync_until(Ready ready) {
    using clock = std::chrono::steady_clock;
    // The streams are asked as long as one is busy, then less and less often: the answer is not
    // needed but for failures, and a driver that starts work only when asked gets its chance.
    std::chrono::microseconds pause(200);
    auto next = clock::now() + pause;
    detail::backoff idle;
    while (!ready()) {
      idle.pause();
      if (clock::now() < next) continue;
      const detail::cuda_device_scope device(state_->device);
      if (state_->streams->query() == detail::cuda_streams::progress::idle) {
        pause = std::min(pause * 2, std::chrono::microseconds(500'000));
        next = clock::now() + pause;
      }
    }
  }
  [[nodiscard]] std::uint64_t now_ns() const noexcept {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
  }

  // Job 3: copies.
  void copy_async(void* destination, const void* source, std::size_t bytes,
                  copy_direction direction, stream_ref s) {
    const copy_span copy{destination, source, bytes};
    detail::check_copies({&copy, 1});
    if (bytes == 0) return;
    const detail::cuda_device_scope device(state_->device);
    detail::check_cuda(cudaMemcpyAsync(destination, source, bytes, kind_of(direction), s.get()),
                       "cudaMemcpyAsync");
  }
  /// In calls of up to 4,096 copies where the driver has that, and the stream is neither the legacy
  /// default one (a null handle included) nor being captured; otherwise one call a copy. The copies
  /// are unordered among themselves, and ordered with the stream's other work. Each lies within one
  /// allocation or registration on either side.
  ///
  /// Where a call fails, what earlier calls enqueued stays in the stream, and is done in its order.
  void copy_many_async(std::span<const copy_span> copies, copy_direction direction, stream_ref s) {
    detail::check_copies(copies);
    const detail::cuda_device_scope device(state_->device);
    if (copies.size() > 1 && batches_copies() && detail::cuda_batch_copy::takes(s.get())) {
      copies = copies.subspan(state_->batch_copy.enqueue(copies, s.get(), state_->device));
    }
    for (const copy_span& copy : copies) {
      if (copy.bytes == 0) continue;
      detail::check_cuda(
          cudaMemcpyAsync(copy.destination, copy.source, copy.bytes, kind_of(direction), s.get()),
          "cudaMemcpyAsync");
    }
  }

  // Job 4: host tasks. Workers ask for events; the driver's own callback thread is not used, where
  // one slow function holds up all others.
  void host_async(std::span<const event* const> after, host_task task, host_cost = {}) {
    state_->workers.submit(after, task);
  }

  // Jobs 5 to 7: kernels.
  template <class Op>
  void for_each(const launch_shape& shape, const launch_limits& limits, std::uint64_t, const Op& op,
                stream_ref s) {
    static_assert(detail::is_kernel_body<Op>);
    detail::check_launch(shape, limits);
    if (shape.blocks == 0 || shape.words == 0) return;
    const detail::cuda_device_scope device(state_->device);
    const auto launch = detail::plan_for_each(shape.blocks, shape.words, max_ctas(limits));
    detail::launch_kernel(&detail::for_each_kernel<Op>, launch, s.get(), op, shape.blocks,
                          shape.words, shape.device_blocks);
  }
  template <class Op>
  void for_each_row(std::int64_t rows, const launch_limits& limits, std::uint64_t, const Op& op,
                    stream_ref s) {
    static_assert(detail::is_kernel_body<Op>);
    detail::check_rows(rows, limits);
    if (rows == 0) return;
    const detail::cuda_device_scope device(state_->device);
    constexpr int threads = detail::for_each_row_threads;
    const auto ctas = static_cast<unsigned>(std::min(rows, max_ctas(limits)));
    detail::launch_kernel(&detail::for_each_row_kernel<threads, Op>, {dim3(ctas), dim3(threads)},
                          s.get(), op, rows);
  }
  template <class Backend = cuda_backend>
  [[nodiscard]] std::size_t top_k_workspace_bytes(const top_k_shape& shape) const {
    const detail::cuda_device_scope device(state_->device);
    return detail::cuda_top_k<Backend>::workspace_bytes(shape);
  }
  template <class Backend = cuda_backend>
  void top_k(const top_k_shape& shape, const top_k_keys& keys, std::int32_t* selected,
             std::int32_t* counts, std::span<std::byte> workspace, stream_ref s) {
    const detail::cuda_device_scope device(state_->device);
    detail::cuda_top_k<Backend>::run(*this, shape, keys, selected, counts, workspace, s);
  }

 private:
  struct state {
    state(int device_ordinal, const cuda_options& options)
        : device(device_ordinal),
          batched_copies(options.batched_copies),
          streams(std::make_shared<detail::cuda_streams>()),
          workers(options.workers, poller{device_ordinal}, options.cpus) {
      const detail::cuda_device_scope scope(device);
      cudaDeviceProp properties{};
      detail::check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
      name = properties.name;
      // Of cudaDeviceProp only what no attribute has: CUDA 13 took fields out of it.
      detail::check_cuda(
          cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
          "cudaDeviceGetAttribute");
      detail::check_cuda(cudaDeviceGetStreamPriorityRange(&normal_priority, &high_priority),
                         "cudaDeviceGetStreamPriorityRange");
    }

    static event_state poll(const event& e) noexcept {
      if (e.handle_ == nullptr) return event_state::done;
      const detail::cuda_capture_scope relaxed;
      const cudaError_t code = cudaEventQuery(e.handle_);
      if (code == cudaSuccess) return event_state::done;
      detail::forget_cuda_error(code);
      return code == cudaErrorNotReady ? event_state::pending : event_state::failed;
    }
    struct poller {
      int device;
      event_state operator()(const event& e) const noexcept { return poll(e); }
      /// Tasks then find their device current, and no scope has to change it.
      void enter_thread() const noexcept { detail::forget_cuda_error(cudaSetDevice(device)); }
    };

    int device;
    bool batched_copies;
    detail::cuda_batch_copy batch_copy;
    std::string name;
    int processors = 1;
    int normal_priority = 0;
    int high_priority = 0;
    // Streams may outlive the backend; they share this part only, so that the last of them never
    // joins the workers.
    std::shared_ptr<detail::cuda_streams> streams;
    detail::host_workers<event, poller> workers;
  };

  static int find_device(int wanted) {
    int count = 0;
    const cudaError_t code = cudaGetDeviceCount(&count);
    detail::forget_cuda_error(code);
    if (code != cudaSuccess || count == 0) {
      throw cuda_error(code == cudaSuccess ? cudaErrorNoDevice : code,
                       "cuda_backend: this machine has 0 usable devices; cudaGetDeviceCount");
    }
    if (wanted == -1) detail::check_cuda(cudaGetDevice(&wanted), "cudaGetDevice");
    if (wanted < 0 || wanted >= count) {
      throw cuda_error(
          cudaErrorInvalidDevice,
          detail::text_of("cuda_backend: device is ", wanted, ", expected 0 to ", count - 1,
                          " (this machine has ", count, "), or -1 for the current one"));
    }
    return wanted;
  }

  static cudaMemcpyKind kind_of(copy_direction direction) {
    switch (direction) {
      case copy_direction::host_to_device:
        return cudaMemcpyHostToDevice;
      case copy_direction::device_to_host:
        return cudaMemcpyDeviceToHost;
      case copy_direction::device_to_device:
        break;
    }
    return cudaMemcpyDeviceToDevice;
  }

  /// Without a limit: four full waves, more would only queue.
  [[nodiscard]] std::int64_t max_ctas(const launch_limits& limits) const {
    return limits.max_ctas > 0 ? limits.max_ctas : std::int64_t{state_->processors} * 32;
  }

  template <class Allocate>
  void* allocate(std::size_t bytes, const char* call, const char* kind, Allocate allocate) {
    if (bytes == 0) return nullptr;
    const detail::cuda_device_scope device(state_->device);
    const detail::cuda_capture_scope relaxed;
    void* p = nullptr;
    const cudaError_t code = allocate(&p);
    if (code == cudaErrorMemoryAllocation) {
      detail::forget_cuda_error(code);
      std::size_t free = 0;
      std::size_t total = 0;
      detail::forget_cuda_error(cudaMemGetInfo(&free, &total));
      throw out_of_memory(detail::text_of("cuda_backend: no ", bytes, " bytes of ", kind,
                                          " memory to be had; device ", state_->device, " has ",
                                          free, " of ", total, " bytes free"));
    }
    detail::check_cuda(code, call);
    return p;
  }
  template <class Free>
  void deallocate(void* p, Free free) noexcept {
    if (p == nullptr) return;
    const detail::cuda_device_scope device(state_->device);
    const detail::cuda_capture_scope relaxed;
    detail::forget_cuda_error(free(p));
  }

  std::shared_ptr<state> state_;
};
static_assert(backend<cuda_backend>);

}  // namespace PULSEINFER_CUDA_TAG
}  // namespace pulseinfer
