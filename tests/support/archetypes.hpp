// SPDX-License-Identifier: Apache-2.0
/// @file
/// The least that models each concept, and nothing more: no default constructor where none is asked
/// for, no comparison, no conversion. A header that compiles with these asks for no more than its
/// concept says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"

namespace archetype {

struct page_table {
  page_table() = delete;
  std::int64_t page(std::int64_t, std::int64_t) const { return -1; }
};

/// Remembers nothing, so that there is never a victim.
struct eviction_policy {
  explicit eviction_policy(std::int32_t capacity) : capacity_(capacity) {}
  eviction_policy(eviction_policy&&) = default;
  eviction_policy& operator=(eviction_policy&&) = default;
  std::int32_t capacity() const { return capacity_; }
  bool contains(std::int32_t) const { return false; }
  void insert(std::int32_t, const pulseinfer::eviction_entry&) {}
  void touch(std::int32_t) {}
  void erase(std::int32_t) {}
  void evict(std::int32_t) {}
  template <class CanEvict>
  std::int32_t victim(CanEvict) {
    return -1;
  }

 private:
  std::int32_t capacity_ = 0;
};

/// Lets nobody in.
struct admission_policy {
  admission_policy() = delete;
  explicit admission_policy(std::int32_t layers) : layers_(layers) {}
  admission_policy(admission_policy&&) = default;
  admission_policy& operator=(admission_policy&&) = default;
  std::int32_t layers() const { return layers_; }
  void observe(const pulseinfer::link_snapshot&, std::span<const double>) {}
  double offload_share(std::int32_t) const { return 1; }
  pulseinfer::admission_answer admit(const pulseinfer::admission_request&, std::span<double>) {
    return {};
  }
  bool may_store(std::int64_t) { return false; }
  bool may_recall(std::int64_t) { return false; }

 private:
  std::int32_t layers_ = 0;
};

/// Keeps everything out.
struct admission_filter {
  admission_filter() = default;
  admission_filter(admission_filter&&) = default;
  admission_filter& operator=(admission_filter&&) = default;
  bool admit(std::uint64_t) { return false; }
};

struct row_group {
  row_group() = delete;
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  std::int64_t sum(std::int64_t value) const { return value; }
  std::int64_t min(std::int64_t value) const { return value; }
  std::int64_t scan(std::int64_t) const { return 0; }
};

/// A machine that has memory and does nothing.
struct backend {
  struct stream {
    stream(const stream&) = delete;
    stream& operator=(const stream&) = delete;
  };
  struct stream_ref {
    stream_ref(stream&) {}
  };
  struct event {
    event(event&&) = default;
    event& operator=(event&&) = default;
  };

  void* allocate_device(std::size_t bytes) { return allocate(bytes); }
  void deallocate_device(void* p, std::size_t) noexcept { std::free(p); }
  void* allocate_pinned(std::size_t bytes) { return allocate(bytes); }
  void deallocate_pinned(void* p, std::size_t) noexcept { std::free(p); }
  void register_pinned(void*, std::size_t) {}
  void unregister_pinned(void*, std::size_t) noexcept {}
  static constexpr bool registration_pins = false;
  template <class T>
  T* device_pointer(T* pinned) const {
    return pinned;
  }
  pulseinfer::memory_limits limits() const { return {}; }

  stream make_stream(pulseinfer::stream_priority);
  event make_event();
  void record(event&, stream_ref) {}
  void enqueue_wait(const event&, stream_ref) {}
  pulseinfer::event_state poll(const event&) const noexcept {
    return pulseinfer::event_state::done;
  }
  void sync(const event&) {}
  void sync(stream_ref) {}
  template <class Ready>
  void sync_until(Ready) {}
  std::uint64_t now_ns() const noexcept { return 0; }

  void copy_async(void*, const void*, std::size_t, pulseinfer::copy_direction, stream_ref) {}
  void copy_many_async(std::span<const pulseinfer::copy_span>, pulseinfer::copy_direction,
                       stream_ref) {}

  void host_async(std::span<const event* const>, pulseinfer::host_task, pulseinfer::host_cost) {}

  template <class Op>
  void for_each(pulseinfer::launch_shape, pulseinfer::launch_limits, std::uint64_t, Op,
                stream_ref) {}
  template <class Op>
  void for_each_row(std::int64_t, pulseinfer::launch_limits, std::uint64_t, Op, stream_ref) {}
  std::size_t top_k_workspace_bytes(pulseinfer::top_k_shape) { return 0; }
  void top_k(pulseinfer::top_k_shape, pulseinfer::top_k_keys, std::int32_t*, std::int32_t*,
             std::span<std::byte>, stream_ref) {}

 private:
  static void* allocate(std::size_t bytes) {
    void* const p = std::malloc(bytes);
    if (p == nullptr && bytes > 0) throw pulseinfer::out_of_memory("archetype: none left");
    return p;
  }
};

}  // namespace archetype
