// SPDX-License-Identifier: Apache-2.0
/// @file
/// Chunks to move units through: pairs of pinned and device memory, reused only after the device
/// has let go of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A chunk: the same number of bytes in pinned and in device memory, and the event after which both
/// are free.
///
/// `drained` is recorded by the user after the last work on the chunk. Whoever gets the chunk next
/// makes its own work wait for that event, on the host (host_async) or in a stream.
template <backend Backend>
struct staging_chunk {
  std::byte* host = nullptr;
  std::byte* host_on_device = nullptr;  ///< `host` as kernels see it
  std::byte* device = nullptr;
  std::size_t bytes = 0;
  typename Backend::event drained;
  typename Backend::event copied;  ///< scratch for the user, between two of its streams
  std::int32_t index = 0;
};

/// Told that a chunk is there, when none was at first. Stays where it is while it waits; allocates
/// nothing.
template <backend Backend>
struct staging_waiter {
  void (*chunk_ready)(staging_waiter& self, staging_chunk<Backend>& chunk) noexcept = nullptr;
  staging_waiter* next = nullptr;
  std::uint64_t rank = 0;  ///< lower ones are served first; set before the call, not while it waits
};

/// A fixed number of chunks, handed out oldest release first, and only so many at a time: those that
/// are back already are left to the device until it has drained them.
///
/// @par Threads  any
/// @par Life     destroyed only when every chunk is back; the destructor waits for their last
///               events
/// @par Cost     all calls are O(1), a wait O(waiters), and allocate nothing; the constructor
///               allocates all chunks
template <backend Backend>
class staging_pool {
 public:
  using chunk = staging_chunk<Backend>;
  using waiter = staging_waiter<Backend>;

  /// @param backend      whose memory it is
  /// @param chunk_bytes  of pinned and as many of device memory, a chunk
  /// @param chunks       how many
  /// @param at_once      how many of them may be out at a time; 0: all
  /// @throws std::invalid_argument  if chunks is not 1 to 4096, at_once not 0 to chunks, chunk_bytes
  ///                                no multiple of 256, or the backend's pinned memory comes in
  ///                                pieces that end within chunks
  /// @throws out_of_memory          when the chunks cannot be had
  staging_pool(Backend backend, std::size_t chunk_bytes, std::int32_t chunks,
               std::int32_t at_once = 0)
      : backend_(backend),
        host_(backend, checked_bytes(chunk_bytes, chunks)),
        device_(backend, chunk_bytes * static_cast<std::size_t>(chunks)),
        at_once_(checked_at_once(at_once, chunks)) {
    check_pieces(chunk_bytes);
    chunks_.reserve(static_cast<std::size_t>(chunks));
    free_.resize(static_cast<std::size_t>(chunks));
    for (std::int32_t i = 0; i < chunks; ++i) {
      const std::size_t offset = static_cast<std::size_t>(i) * chunk_bytes;
      std::byte* const host = host_.data() + offset;
      chunks_.push_back({host, backend_.device_pointer(host), device_.data() + offset, chunk_bytes,
                         backend_.make_event(), backend_.make_event(), i});
      free_[static_cast<std::size_t>(i)] = i;
    }
    free_count_ = chunks;
  }
  staging_pool(const staging_pool&) = delete;
  staging_pool& operator=(const staging_pool&) = delete;

  [[nodiscard]] std::size_t chunk_bytes() const noexcept { return chunks_.front().bytes; }
  [[nodiscard]] std::int32_t size() const noexcept {
    return static_cast<std::int32_t>(chunks_.size());
  }
  /// Chunks that nobody holds.
  [[nodiscard]] std::int32_t available() const {
    std::lock_guard lock(mutex_);
    return free_count_;
  }

  /// A chunk, or null: then the waiter is queued, and called once (from the thread that releases)
  /// with one. Waiters are served by rank, those of one rank as they came.
  /// @param w  stays where it is, and alive, until it has been called
  /// @post  the caller's work on the chunk waits for `drained` before it touches the memory
  [[nodiscard]] chunk* acquire_or_wait(waiter& w) {
    std::lock_guard lock(mutex_);
    if (size() - free_count_ < at_once_) return &take();
    waiter** at = &first_waiter_;
    while (*at != nullptr && (*at)->rank <= w.rank) at = &(*at)->next;
    w.next = *at;
    *at = &w;
    return nullptr;
  }

  /// Gives a chunk back, and calls the first waiter, if there is one, with the oldest that is back.
  /// @pre  it is the caller's, who gives it back once; `drained` has been recorded behind all work on
  ///       it, or nothing was enqueued for it
  void release(chunk& c) noexcept {
    waiter* next = nullptr;
    chunk* oldest = nullptr;
    {
      std::lock_guard lock(mutex_);
      free_[static_cast<std::size_t>((free_head_ + free_count_) % size())] = c.index;
      ++free_count_;
      next = first_waiter_;
      if (next != nullptr) {
        first_waiter_ = next->next;
        oldest = &take();
      }
    }
    if (next != nullptr) next->chunk_ready(*next, *oldest);
  }

 private:
  static std::size_t checked_bytes(std::size_t chunk_bytes, std::int32_t chunks) {
    detail::expects(chunks >= 1 && chunks <= 4096, "staging_pool: chunks is ", chunks,
                    ", expected 1 to 4096");
    detail::expects(chunk_bytes > 0 && chunk_bytes % 256 == 0 && chunk_bytes <= (1ull << 40),
                    "staging_pool: chunk_bytes is ", chunk_bytes,
                    ", expected a multiple of 256, at most 2^40");
    return chunk_bytes * static_cast<std::size_t>(chunks);
  }
  /// One copy moves a chunk.
  void check_pieces(std::size_t chunk_bytes) const {
    if constexpr (requires { backend_.pinned_chunk_bytes(host_.data()); }) {
      const std::size_t piece = backend_.pinned_chunk_bytes(host_.data());
      detail::expects(piece >= host_.size() || piece % chunk_bytes == 0,
                      "staging_pool: pinned memory in pieces of ", piece,
                      " bytes that end within chunks of ", chunk_bytes,
                      ", expected pinned_options::max_chunk_bytes to be at least ", host_.size(),
                      ", or a backend that is not paged");
    }
  }
  static std::int32_t checked_at_once(std::int32_t at_once, std::int32_t chunks) {
    detail::expects(at_once >= 0 && at_once <= chunks, "staging_pool: at_once is ", at_once,
                    ", expected 0 to ", chunks, ", the number of chunks");
    return at_once == 0 ? chunks : at_once;
  }
  chunk& take() {
    const std::int32_t index = free_[static_cast<std::size_t>(free_head_)];
    free_head_ = (free_head_ + 1) % size();
    --free_count_;
    return chunks_[static_cast<std::size_t>(index)];
  }

  Backend backend_;
  pinned_buffer<std::byte, Backend> host_;
  device_buffer<std::byte, Backend> device_;
  std::int32_t at_once_;
  std::vector<chunk> chunks_;
  mutable std::mutex mutex_;
  std::vector<std::int32_t> free_;  ///< ring of chunk indices
  std::int32_t free_head_ = 0;
  std::int32_t free_count_ = 0;
  waiter* first_waiter_ = nullptr;
};

}  // namespace pulseinfer
