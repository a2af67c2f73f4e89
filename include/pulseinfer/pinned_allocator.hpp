// SPDX-License-Identifier: Apache-2.0
/// @file
/// Pinned memory behind the interfaces of the standard library, and behind those of a backend.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <new>
#include <unordered_map>
#include <utility>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/page_system.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/pinned_memory.hpp"
#include "pulseinfer/pinned_options.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A std::pmr::memory_resource of pinned memory. Every allocation is a `pinned_region` of its own,
/// exact to the page and given back to the system; put a pool resource on it for small ones.
///
/// @par Threads  any where the backend takes threads
/// @par Life     destroyed after what was allocated from it has been given back; what was not goes
///               with it
/// @par Cost     some system calls and a page fault a page
template <backend Backend, class System = detail::page_system>
class pinned_resource final : public std::pmr::memory_resource {
 public:
  /// @param machine  a copy is kept
  /// @param options  of every allocation. `pages.alignment` is a least one
  /// @param system   whose calls are made; a copy is kept
  explicit pinned_resource(Backend machine, const pinned_options& options = {}, System system = {})
      : state_(new state{std::move(machine), options, system, {}, {}}, system) {}

  /// Allocations that have not been given back.
  [[nodiscard]] std::size_t allocations() const {
    std::lock_guard lock(state_->mutex);
    return state_->regions.size();
  }
  /// The region of an allocation, for its report and `sync_ready`; null if `p` is none.
  [[nodiscard]] pinned_region<Backend, System>* find(const void* p) {
    std::lock_guard lock(state_->mutex);
    const auto found = state_->regions.find(p);
    return found == state_->regions.end() ? nullptr : &found->second;
  }

 private:
  struct state {
    Backend machine;
    pinned_options options;
    System system;
    std::mutex mutex;
    std::unordered_map<const void*, pinned_region<Backend, System>> regions;
  };

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    pinned_options options = state_->options;
    options.pages.alignment = std::max(options.pages.alignment, alignment);
    pinned_region<Backend, System> region(state_->machine, std::max<std::size_t>(bytes, 1), options,
                                          state_->system);
    void* const p = region.data();
    std::lock_guard lock(state_->mutex);
    state_->regions.emplace(p, std::move(region));
    return p;
  }
  void do_deallocate(void* p, std::size_t, std::size_t) noexcept override {
    std::unique_lock lock(state_->mutex);
    auto node = state_->regions.extract(p);
    lock.unlock();  // others need not wait until the pages are gone
  }
  [[nodiscard]] bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override {
    return this == &other;
  }

  detail::of_this_process<state, System> state_;
};

/// An allocator of pinned memory, for containers. Copies share a `pinned_resource`, and so do those
/// for other types; what one of them allocates another can give back.
///
/// @par Threads  any where the backend takes threads
template <class T, backend Backend, class System = detail::page_system>
class pinned_allocator {
 public:
  using value_type = T;
  using propagate_on_container_copy_assignment = std::true_type;
  using propagate_on_container_move_assignment = std::true_type;
  using propagate_on_container_swap = std::true_type;
  using is_always_equal = std::false_type;
  using resource_type = pinned_resource<Backend, System>;
  template <class Other>
  struct rebind {
    using other = pinned_allocator<Other, Backend, System>;
  };

  explicit pinned_allocator(Backend machine, const pinned_options& options = {}, System system = {})
      : resource_(std::make_shared<resource_type>(std::move(machine), options, std::move(system))) {
  }
  template <class Other>
  pinned_allocator(const pinned_allocator<Other, Backend, System>& other) noexcept
      : resource_(other.resource()) {}

  /// @throws std::bad_array_new_length  when the bytes overflow
  /// @throws as pinned_region
  [[nodiscard]] T* allocate(std::size_t count) {
    if (count > std::numeric_limits<std::size_t>::max() / sizeof(T)) {
      throw std::bad_array_new_length();
    }
    return static_cast<T*>(resource_->allocate(count * sizeof(T), alignof(T)));
  }
  void deallocate(T* p, std::size_t count) noexcept {
    resource_->deallocate(p, count * sizeof(T), alignof(T));
  }

  [[nodiscard]] const std::shared_ptr<resource_type>& resource() const noexcept {
    return resource_;
  }
  template <class Other>
  friend bool operator==(const pinned_allocator& a,
                         const pinned_allocator<Other, Backend, System>& b) noexcept {
    return a.resource() == b.resource();
  }

 private:
  std::shared_ptr<resource_type> resource_;
};

/// A backend as `Base` is, whose pinned memory is made of `pinned_region`s: what allocates pinned
/// memory through a backend (buffers, stores, staging) then has its sizes, pages, node and chunks.
/// Memory that is filled in the background is used by streams only when it is ready. A store may have
/// such memory, and its transfers the plain backend: what the host writes and reads is there at
/// once, staged recalls and offloads go from the beginning, the other ways once all is ready. Its
/// chunks end on units where `unit_bytes` is the store's. Staging over such memory is refused where
/// what is registered in one call ends within a chunk of it.
template <backend Base, class System = detail::page_system>
class paged_backend : public Base {
 public:
  explicit paged_backend(Base base, const pinned_options& options = {}, System system = {})
      : Base(base),
        resource_(std::make_shared<pinned_resource<Base, System>>(std::move(base), options,
                                                                  std::move(system))) {}

  [[nodiscard]] void* allocate_pinned(std::size_t bytes) {
    return bytes == 0 ? nullptr : resource_->allocate(bytes, alignof(std::max_align_t));
  }
  void deallocate_pinned(void* p, std::size_t bytes) noexcept {
    if (p != nullptr) resource_->deallocate(p, bytes);
  }
  /// How much of an allocation is registered in one call.
  [[nodiscard]] std::size_t pinned_chunk_bytes(const void* p) const {
    return region_of(p).chunk_bytes();
  }
  /// Whether streams may use all of an allocation.
  /// @throws std::invalid_argument  if `p` is no allocation
  [[nodiscard]] bool is_ready(const void* p) const {
    const pinned_region<Base, System>& region = region_of(p);
    return region.is_ready(0, region.bytes());
  }
  /// Where the device sees an allocation, all of it in one piece.
  /// @throws std::logic_error       if not all of it is ready, or it is not pinned
  /// @throws device_error           if its chunks do not follow each other on the device
  /// @throws std::invalid_argument  if `p` is no allocation
  template <class T>
  [[nodiscard]] T* device_range(T* p) const {
    const pinned_region<Base, System>& region = region_of(p);
    std::byte* const first = region.device_data();
    for (std::size_t at = 0; at < region.bytes(); at += region.chunk_bytes()) {
      if (region.device_data(at) != first + at) {
        throw device_error("paged_backend: the device sees a chunk of pinned memory elsewhere");
      }
    }
    return reinterpret_cast<T*>(first);
  }
  [[nodiscard]] pinned_resource<Base, System>& resource() const noexcept { return *resource_; }

 private:
  [[nodiscard]] pinned_region<Base, System>& region_of(const void* p) const {
    pinned_region<Base, System>* const region = resource_->find(p);
    detail::expects(region != nullptr, "paged_backend: no allocation begins there");
    return *region;
  }

  std::shared_ptr<pinned_resource<Base, System>> resource_;
};

}  // namespace pulseinfer
