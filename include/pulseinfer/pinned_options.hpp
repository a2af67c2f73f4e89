// SPDX-License-Identifier: Apache-2.0
/// @file
/// How pinned memory is wished for, and what was got.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "pulseinfer/page_region.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Where pinned memory comes from: pages of ours that are registered with the backend, or the
/// backend's own allocation (cudaHostAlloc), which knows neither huge pages nor nodes and rounds as
/// it likes, but is reached by kernels where registered memory is not (WSL).
enum class pinned_source : std::uint8_t { registered, allocated };

/// Whether pages are locked (mlock) as well: `automatic` does where registering does not pin.
enum class page_locking : std::uint8_t { automatic, always, never };

namespace detail {

inline void warn_on_stderr(const char* text) noexcept {
  (void)std::fprintf(stderr, "pulseinfer: %s\n", text);
}

}  // namespace detail

/// How memory is pinned.
struct pinned_options {
  /// No driver has been seen to take 512 GiB in one call.
  static constexpr std::size_t most_chunk_bytes = std::size_t{64} << 30;

  page_options pages = {};
  std::size_t unit_bytes = 1;  ///< chunks begin at multiples of it: no unit lies in two of them
  std::size_t max_chunk_bytes = most_chunk_bytes;  ///< registered in one call
  pinned_source source = pinned_source::registered;
  page_locking locking = page_locking::automatic;
  int workers = 4;  ///< host tasks that fill at a time, 0 to 1024; 0: who waits does it all
  bool in_background = false;    ///< returned at once; pages come later, see `sync_ready`
  bool allow_unpinned = false;   ///< what cannot be pinned stays so, and `warn` is told
  bool zero_on_release = false;  ///< what has come is overwritten with zeros at the end
  /// Told what is not pinned, and why. May come from a worker.
  void (*warn)(const char* text) noexcept = &detail::warn_on_stderr;
};

/// What was got.
struct pinned_report {
  std::size_t bytes = 0;           ///< asked for
  std::size_t reserved_bytes = 0;  ///< in whole pages
  std::size_t page_bytes = 0;      ///< of the pages it is made of; transparent huge ones are small
  std::size_t chunk_bytes = 0;     ///< registered in one call; the last chunk may be shorter
  std::size_t chunks = 0;
  std::size_t ready_bytes = 0;   ///< of all parts
  std::size_t pinned_bytes = 0;  ///< of those that are ready, what cannot leave its place
  bool is_locked = false;        ///< by mlock
  page_placement placement;      ///< the node that it lies on, and huge pages
  std::string remarks;           ///< what was asked for and not got, and why; empty if all was
};

}  // namespace pulseinfer
