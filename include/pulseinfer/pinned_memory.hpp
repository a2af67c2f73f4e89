// SPDX-License-Identifier: Apache-2.0
/// @file
/// Pinned memory of hundreds of gigabytes: exact to the page, reserved at once, filled by several
/// threads, registered chunk by chunk.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/page_system.hpp"
#include "pulseinfer/detail/pinned_state.hpp"
#include "pulseinfer/pinned_options.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Owns pinned memory, or pins memory of the caller's while it lives.
///
/// Memory is reserved as a whole, and comes in *chunks* of at most `max_chunk_bytes`, each of which
/// is touched by several host tasks in slices of 32 MiB, then registered with the backend in one
/// call. A chunk is *ready* when its pages are there and the device reaches it. The host may use the
/// memory from the beginning, ready or not.
///
/// Where the device reaches a chunk is asked for, never taken for the host's address; of two chunks
/// the device may see the second anywhere. Chunks begin at multiples of `unit_bytes`, so that a
/// unit, and a copy of it, lies in one.
///
/// Where registering does not pin (the device is the host), the pages are locked by mlock instead,
/// before they come.
///
/// After fork() the region is the parent's: the child cannot reach the memory that the region owns,
/// its copy of the region may be destroyed and does nothing then. A region of static storage
/// duration may outlive the driver: what cannot be unregistered any more is not.
///
/// @tparam System  the operating system; tests replace its calls
/// @par Threads  any may use it where the backend takes threads; one at a time moves or destroys it
/// @par Life     no stream still uses the memory when it is destroyed; not destroyed by a host task
template <backend Backend, class System = detail::page_system>
class pinned_region {
 public:
  /// Reserves `bytes`, and fills and pins them before it returns, or in the background.
  ///
  /// In the foreground it is all or nothing: if one chunk cannot be registered, those that were are
  /// taken back, the last one first. With `allow_unpinned` the whole region then stays unpinned,
  /// and the report and `options.warn` say so. In the background each chunk has its own fate:
  /// `sync_ready` of those that failed throws.
  ///
  /// @param machine  whose device is to reach it, and whose workers fill it; a copy is kept
  /// @param bytes    0: nothing is reserved
  /// @param options  how it is filled and pinned, and what is done where that fails
  /// @param system   whose calls are made; a copy is kept
  /// @throws std::length_error      when whole pages of it overflow the address space
  /// @throws std::invalid_argument  naming the option and its limit
  /// @throws out_of_memory          when pages cannot be had or locked; the text names the limits of
  ///                                locked memory
  /// @throws device_error           when a chunk cannot be registered, naming its offset, its size
  ///                                and the address; what the backend threw is nested in it
  /// @par Cost     a page fault a page, divided among the workers and the caller; in the background
  ///               a few system calls
  pinned_region(Backend machine, std::size_t bytes, const pinned_options& options = {},
                System system = {})
      : pinned_region(std::move(machine), bytes, nullptr, options, std::move(system)) {}

  /// Pins memory of the caller's: it is registered and locked, and given back as it is. Not unmapped
  /// nor kept from children, and `options.pages` does not count.
  ///
  /// @param machine  as above
  /// @param memory   begins at a page, outlives the region; neighbours on its last page are locked
  ///                 with it, and unlocked: locks of pages do not add up
  /// @param options  as above
  /// @param system   as above
  /// @throws as the other constructor
  pinned_region(Backend machine, std::span<std::byte> memory, const pinned_options& options = {},
                System system = {})
      : pinned_region(std::move(machine), memory.size(), memory.data(), options,
                      std::move(system)) {}

  /// Null when it is empty.
  [[nodiscard]] std::byte* data() const noexcept {
    return state_.get() == nullptr ? nullptr : state_->data();
  }
  /// As asked for.
  [[nodiscard]] std::size_t bytes() const noexcept {
    return state_.get() == nullptr ? 0 : state_->bytes();
  }
  [[nodiscard]] std::span<std::byte> span() const noexcept { return {data(), bytes()}; }
  /// Of every chunk but the last, which may be smaller.
  [[nodiscard]] std::size_t chunk_bytes() const noexcept {
    return state_.get() == nullptr ? 0 : state_->chunk_bytes();
  }

  /// Where the device sees the byte at `offset`, and those behind it to the end of its chunk.
  /// @throws std::invalid_argument  if there is no such byte
  /// @throws std::logic_error       if its chunk is not ready, or the device cannot reach it
  [[nodiscard]] std::byte* device_data(std::size_t offset = 0) const {
    detail::expects(state_.get() != nullptr,
                    "pinned_region: device_data of one that was moved from");
    return state_->device_data(offset);
  }

  /// Bytes from the beginning that are ready.
  [[nodiscard]] std::size_t ready_bytes() const noexcept {
    return state_.get() == nullptr ? 0 : state_->ready_bytes();
  }
  /// Whether all of [offset, offset + count) is ready; false if that is not within the region.
  [[nodiscard]] bool is_ready(std::size_t offset, std::size_t count) const noexcept {
    return state_.get() == nullptr ? count == 0 && offset == 0 : state_->is_ready(offset, count);
  }
  /// Returns once [offset, offset + count) is ready, and no other part is waited for: the caller
  /// fills what nobody has begun of it. Not to be called from a host task.
  /// @throws std::invalid_argument  if the range is not within the region
  /// @throws out_of_memory, device_error  what a chunk of the range has failed with, every time
  void sync_ready(std::size_t offset, std::size_t count) {
    detail::expects(state_.get() != nullptr,
                    "pinned_region: sync_ready of one that was moved from");
    state_->sync_ready(offset, count);
  }

  /// What was got. Asks the system where a thousand of the pages lie, and reads /proc/self/smaps.
  [[nodiscard]] pinned_report report() const {
    return state_.get() == nullptr ? pinned_report{} : state_->report();
  }

 private:
  using state = detail::pinned_state<Backend, System>;

  pinned_region(Backend machine, std::size_t bytes, std::byte* owned, const pinned_options& options,
                System system)
      : state_(new state(std::move(machine), system, options, bytes, owned), system) {
    if (options.in_background) {
      state_->start(0);
    } else {
      state_->fill_now();
    }
  }

  detail::of_this_process<state, System> state_;
};

}  // namespace pulseinfer
