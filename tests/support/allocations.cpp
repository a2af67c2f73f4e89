// SPDX-License-Identifier: Apache-2.0
// Replaces operator new and delete of a whole test program by ones that count.
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

#else

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace {

std::atomic<std::uint64_t> count{0};

void* allocate(std::size_t bytes, std::size_t alignment) noexcept {
  count.fetch_add(1, std::memory_order_relaxed);
  if (bytes == 0) bytes = 1;
  if (alignment <= __STDCPP_DEFAULT_NEW_ALIGNMENT__) return std::malloc(bytes);
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  return rounded < bytes ? nullptr : std::aligned_alloc(alignment, rounded);
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
  std::free(p);
}
void operator delete[](void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::size_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete(void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept {
  std::free(p);
}
void operator delete(void* p, const std::nothrow_t&) noexcept {
  std::free(p);
}
void operator delete[](void* p, const std::nothrow_t&) noexcept {
  std::free(p);
}

#endif
