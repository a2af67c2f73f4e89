// SPDX-License-Identifier: Apache-2.0
// Replaces operator new and delete of a whole test program by ones that count, and fail on demand.
#include "support/allocations.hpp"

#if defined(__SANITIZE_THREAD__)
#define TEST_HAS_NO_COUNT
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TEST_HAS_NO_COUNT
#endif
#endif

#if defined(TEST_HAS_NO_COUNT)

// ThreadSanitizer brings its own operator new, and clang links all of it: nothing is counted there.
std::uint64_t test::allocations() noexcept {
  return 0;
}
std::int64_t test::live_allocations() noexcept {
  return 0;
}
void test::fail_allocation(std::uint64_t) noexcept {}
bool test::will_fail() noexcept {
  return false;
}
bool test::counts_allocations() noexcept {
  return false;
}

#else

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::uint64_t> count{0};
std::atomic<std::int64_t> live{0};
thread_local std::uint64_t until_failure = 0;

void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
  count.fetch_add(1, std::memory_order_relaxed);
  if (until_failure > 0 && --until_failure == 0) return nullptr;
  if (bytes == 0) bytes = 1;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* const p = alignment <= __STDCPP_DEFAULT_NEW_ALIGNMENT__ ? std::malloc(bytes)
                  : rounded < bytes                             ? nullptr
                                    : std::aligned_alloc(alignment, rounded);
  if (p != nullptr) live.fetch_add(1, std::memory_order_relaxed);
  return p;
}
void give_back(void* p) noexcept {
  if (p != nullptr) live.fetch_sub(1, std::memory_order_relaxed);
  std::free(p);
}
void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* const p = allocate(bytes, alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

std::uint64_t test::allocations() noexcept {
  return count.load(std::memory_order_relaxed);
}
std::int64_t test::live_allocations() noexcept {
  return live.load(std::memory_order_relaxed);
}
void test::fail_allocation(std::uint64_t nth) noexcept {
  until_failure = nth;
}
bool test::will_fail() noexcept {
  return until_failure > 0;
}
bool test::counts_allocations() noexcept {
  return true;
}

void* operator new(std::size_t bytes) {
  return allocate_or_throw(bytes, 1);
}
void* operator new[](std::size_t bytes) {
  return allocate_or_throw(bytes, 1);
}
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes, 1);
}
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept {
  return allocate(bytes, 1);
}
void operator delete(void* p) noexcept {
  give_back(p);
}
void operator delete[](void* p) noexcept {
  give_back(p);
}
void operator delete(void* p, std::size_t) noexcept {
  give_back(p);
}
void operator delete[](void* p, std::size_t) noexcept {
  give_back(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  give_back(p);
}
void operator delete[](void* p, std::align_val_t) noexcept {
  give_back(p);
}
void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  give_back(p);
}
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept {
  give_back(p);
}
void operator delete(void* p, const std::nothrow_t&) noexcept {
  give_back(p);
}
void operator delete[](void* p, const std::nothrow_t&) noexcept {
  give_back(p);
}

#endif
