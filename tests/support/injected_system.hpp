// SPDX-License-Identifier: Apache-2.0
/// @file
/// An operating system of which single calls answer as the test wants, and a backend that notes what
/// is registered with it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/page_system.hpp"
#include "pulseinfer/error.hpp"

namespace test {

/// What the calls answer: an errno value, 0 for what the system itself says.
struct system_plan {
  int map = 0;       ///< of usual pages
  int map_huge = 0;  ///< of the pool of huge pages
  int lock = 0;
  int bind = 0;
  int ask_node = 0;
  int populate = 0;
  int huge_wish = 0;
  std::vector<int> nodes;             ///< empty: those of the machine
  std::function<int(void*)> node_of;  ///< empty: as the machine says
  pulseinfer::detail::memory_facts facts;
  bool has_facts = false;
  // What was called:
  std::atomic<std::int64_t> mapped{0};  ///< bytes that are
  std::atomic<int> touched{0};
  std::atomic<int> locks{0};
  std::atomic<int> unlocks{0};
  int bound_to = -1;
};

/// Copies share a plan.
struct injected_system : pulseinfer::detail::page_system {
  using real = pulseinfer::detail::page_system;
  using page_wish = pulseinfer::detail::page_wish;
  std::shared_ptr<system_plan> plan = std::make_shared<system_plan>();

  int map(void*& found, std::size_t bytes, std::size_t huge) {
    const int planned = huge == 0 ? plan->map : plan->map_huge;
    const int error = planned != 0 ? planned : real::map(found, bytes, huge);
    if (error == 0) plan->mapped += static_cast<std::int64_t>(bytes);
    return error;
  }
  int unmap(void* p, std::size_t bytes) noexcept {
    plan->mapped -= static_cast<std::int64_t>(bytes);
    return real::unmap(p, bytes);
  }
  int advise(void* p, std::size_t bytes, page_wish wish) {
    if (wish == page_wish::populate) {
      ++plan->touched;
      if (plan->populate != 0) return plan->populate;
    }
    if (wish == page_wish::huge && plan->huge_wish != 0) return plan->huge_wish;
    return real::advise(p, bytes, wish);
  }
  int lock(void* p, std::size_t bytes) {
    ++plan->locks;
    return plan->lock != 0 ? plan->lock : real::lock(p, bytes);
  }
  int unlock(void* p, std::size_t bytes) noexcept {
    ++plan->unlocks;
    return real::unlock(p, bytes);
  }
  int prefer_node(void* p, std::size_t bytes, int node) {
    plan->bound_to = node;
    if (plan->bind != 0 || !plan->nodes.empty()) return plan->bind;
    return real::prefer_node(p, bytes, node);
  }
  int nodes_of(std::span<void*> pages, int* found) const {
    if (plan->ask_node != 0) return plan->ask_node;
    if (!plan->node_of) return real::nodes_of(pages, found);
    for (std::size_t i = 0; i < pages.size(); ++i) found[i] = plan->node_of(pages[i]);
    return 0;
  }
  std::vector<int> nodes() const { return plan->nodes.empty() ? real::nodes() : plan->nodes; }
  pulseinfer::detail::memory_facts facts() const {
    return plan->has_facts ? plan->facts : real::facts();
  }
};

/// What a `noting_backend` has seen, and which of its calls fail.
struct registrations {
  struct range {
    std::byte* p;
    std::size_t bytes;
    friend bool operator==(const range&, const range&) = default;
  };
  std::mutex mutex;
  std::vector<range> entered, left;    ///< in the order of the calls
  int fail_from = 0;                   ///< the first call that throws; 0: none does
  bool fail_as_memory = false;         ///< throws out_of_memory, not device_error
  std::atomic<std::int64_t> shift{0};  ///< from the host's address to the device's

  [[nodiscard]] std::size_t now() const { return entered.size() - left.size(); }
};

/// Models `backend` as `Base` does.
template <class Base>
class noting_backend : public Base {
 public:
  noting_backend(Base base, std::shared_ptr<registrations> notes)
      : Base(std::move(base)), notes_(std::move(notes)) {}

  void register_pinned(void* p, std::size_t bytes) {
    std::lock_guard lock(notes_->mutex);
    if (notes_->fail_from > 0 &&
        static_cast<int>(notes_->entered.size()) + 1 >= notes_->fail_from) {
      if (notes_->fail_as_memory)
        throw pulseinfer::out_of_memory("noting_backend: none on purpose");
      throw pulseinfer::device_error("noting_backend: refused on purpose");
    }
    Base::register_pinned(p, bytes);
    notes_->entered.push_back({static_cast<std::byte*>(p), bytes});
  }
  void unregister_pinned(void* p, std::size_t bytes) noexcept {
    std::lock_guard lock(notes_->mutex);
    Base::unregister_pinned(p, bytes);
    notes_->left.push_back({static_cast<std::byte*>(p), bytes});
  }
  template <class T>
  [[nodiscard]] T* device_pointer(T* pinned) const {
    auto* const found = reinterpret_cast<std::byte*>(Base::device_pointer(pinned));
    return reinterpret_cast<T*>(found + notes_->shift.load());
  }

 private:
  std::shared_ptr<registrations> notes_;
};

}  // namespace test
