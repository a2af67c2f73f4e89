// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory by the page: what is reserved, what comes, and what is said of what did not.
#include "pulseinfer/page_region.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "pulseinfer/numa.hpp"
#include "support/injected_system.hpp"
#include "support/texts.hpp"

namespace {

using pulseinfer::out_of_memory;
using pulseinfer::page_kind;
using pulseinfer::page_region;
using region = page_region<test::injected_system>;
using test::has;
using test::injected_system;
using test::what_of;

static_assert(std::is_nothrow_move_constructible_v<page_region<>> &&
              std::is_nothrow_move_assignable_v<page_region<>>);
static_assert(!std::is_copy_constructible_v<page_region<>>);

constexpr std::size_t mib = std::size_t{1} << 20;
const std::size_t page = pulseinfer::detail::page_system{}.page_bytes();

bool is_zero(const std::byte* p, std::size_t bytes) {
  return std::all_of(p, p + bytes, [](std::byte b) { return b == std::byte{0}; });
}

}  // namespace

TEST_CASE("page_region: sizes are exact to the page") {
  for (const page_kind kind : {page_kind::small, page_kind::transparent}) {
    for (const std::size_t bytes :
         {std::size_t{1}, page - 1, page, page + 1, 3 * mib + 5, 4 * mib, 5 * mib + page}) {
      CAPTURE(bytes);
      injected_system system;
      {
        region r(bytes, {.pages = kind}, system);
        CHECK(r.bytes() == bytes);
        CHECK(r.reserved_bytes() == (bytes + page - 1) / page * page);
        CHECK(r.page_bytes() == page);
        CHECK(system.plan->mapped == static_cast<std::int64_t>(r.reserved_bytes()));
        CHECK(reinterpret_cast<std::uintptr_t>(r.data()) % page == 0);
        r.touch(0, bytes);
        CHECK(is_zero(r.data(), r.reserved_bytes()));
        r.data()[bytes - 1] = std::byte{1};
        r.touch(0, bytes);
        CHECK(r.data()[bytes - 1] == std::byte{1});
      }
      CHECK(system.plan->mapped == 0);
    }
  }
}

TEST_CASE("page_region: no bytes are no memory, and so is one that was moved from") {
  injected_system system;
  region none(0, {}, system);
  CHECK(none.data() == nullptr);
  CHECK(none.reserved_bytes() == 0);
  none.touch(0, 0);
  CHECK(none.placement().sampled == 0);

  region first(100, {}, system);
  std::byte* const memory = first.data();
  region second(std::move(first));
  CHECK(second.data() == memory);
  CHECK(first.data() == nullptr);  // NOLINT: a moved-from region is empty
  CHECK(first.bytes() == 0);
  none = std::move(second);
  CHECK(none.data() == memory);
  region third(page, {}, system);
  none = std::move(third);
  CHECK(system.plan->mapped == static_cast<std::int64_t>(page));  // the old one has gone
  region& same = none;
  none = std::move(same);
  CHECK(none.data() != nullptr);
}

TEST_CASE("page_region: it begins where it is wished") {
  for (const std::size_t alignment : {page, 2 * page, 2 * mib, 8 * mib}) {
    injected_system system;
    const region r(3 * page, {.pages = page_kind::small, .alignment = alignment}, system);
    CHECK(reinterpret_cast<std::uintptr_t>(r.data()) % alignment == 0);
    CHECK(system.plan->mapped == static_cast<std::int64_t>(3 * page));
  }
  const page_region<> large(4 * mib);
  CHECK(reinterpret_cast<std::uintptr_t>(large.data()) % (2 * mib) == 0);  // for huge pages
  CHECK_THROWS_WITH_AS(page_region<>(10, {.alignment = 48}),
                       "page_region: alignment is 48, expected a power of two",
                       std::invalid_argument);
}

TEST_CASE("page_region: sizes that no address space holds are refused") {
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  CHECK_THROWS_WITH_AS(page_region<>{most},
                       "page_region: 18446744073709551615 bytes overflow the address space",
                       std::length_error);
  CHECK_THROWS_AS(page_region<>{most / 2}, std::length_error);
  // Also with an alignment that would wrap the sum round, to a size that can be had.
  for (const std::size_t bytes : {std::size_t{1}, most / 4, most / 2 + 8193, most}) {
    CHECK_THROWS_AS(page_region<>(bytes, {.alignment = most / 2 + 1}), std::length_error);
  }
  CHECK_THROWS_AS(page_region<>{most / 4}, out_of_memory);
  injected_system system;
  system.plan->map = ENOMEM;
  CHECK(what_of<out_of_memory>([&] { region r(5000, {}, system); }) ==
        "page_region: 8192 bytes cannot be reserved (mmap: Cannot allocate memory)");
  CHECK(system.plan->mapped == 0);
}

TEST_CASE("page_region: pages of no kind are refused") {
  CHECK_THROWS_WITH_AS(page_region<>(1, {.pages = static_cast<page_kind>(4)}),
                       "page_region: pages is 4, expected one of page_kind", std::invalid_argument);
}

TEST_CASE("fault 92: where there are no huge pages, others are taken, and it is said") {
  for (const page_kind kind : {page_kind::huge_2m, page_kind::huge_1g}) {
    injected_system system;
    system.plan->map_huge = ENOMEM;
    region r(5 * mib + 1, {.pages = kind}, system);
    CHECK(r.page_bytes() == page);
    CHECK(r.reserved_bytes() == 5 * mib + page);
    CHECK(has(r.remarks(), "no huge pages of "));
    CHECK(has(r.remarks(), "transparent ones instead (mmap: Cannot allocate memory)"));
    system.plan->huge_wish = EINVAL;
    region again(5 * mib, {.pages = kind}, system);
    CHECK(has(again.remarks(), "; no transparent huge pages (madvise: Invalid argument)"));
    again.touch(0, 5 * mib);
    CHECK(is_zero(again.data(), 5 * mib));
  }
  // Of the machine, whatever it has.
  for (const page_kind kind : {page_kind::transparent, page_kind::huge_2m}) {
    page_region<> r(4 * mib + 1, {.pages = kind});
    r.touch(0, 4 * mib + 1);
    const bool is_of_pool = r.page_bytes() != page;
    CHECK(r.reserved_bytes() == (is_of_pool ? 6 * mib : 4 * mib + page));
    CHECK(is_of_pool == (kind == page_kind::huge_2m && r.remarks().empty()));
    CHECK(r.placement().huge_bytes <= r.reserved_bytes());
    r.data()[4 * mib] = std::byte{9};
  }
  page_region<> small(4 * mib, {.pages = page_kind::small});
  small.touch(0, 4 * mib);
  CHECK(small.placement().huge_bytes == 0);
}

TEST_CASE("fault 91: the node that was got is reported, not the one that was wished") {
  injected_system system;
  system.plan->nodes = {0, 1, 3};
  region r(64 * page, {.pages = page_kind::small, .numa_node = 3}, system);
  CHECK(system.plan->bound_to == 3);
  CHECK(r.remarks().empty());
  r.touch(0, 64 * page);
  system.plan->node_of = [](void*) { return 3; };
  CHECK(r.placement().node == 3);
  CHECK(r.placement().share_on_node == 1);
  CHECK(r.placement().sampled == 64);
  system.plan->node_of = [&](void* p) {  // node 3 was full soon
    return static_cast<std::byte*>(p) < r.data() + 16 * page ? 3 : 1;
  };
  CHECK(r.placement().node == 1);
  CHECK(r.placement().share_on_node == 0.75);
  system.plan->node_of = [&](void* p) { return p == r.data() ? 0 : -2; };  // -ENOENT: not there
  CHECK(r.placement().node == 0);
  CHECK(r.placement().sampled == 1);

  // Neither bound nor known, as in a container that forbids both calls.
  system.plan->bind = EPERM;
  system.plan->ask_node = EPERM;
  const region unbound(page, {.numa_node = 1}, system);
  CHECK(unbound.remarks() == "not bound to NUMA node 1 (mbind: Operation not permitted)");
  CHECK(unbound.placement().node == -1);
  system.plan->nodes = {0};  // a machine of one node has no choice
  CHECK(unbound.placement().node == 0);

  system.plan->nodes = {0, 1, 3};
  CHECK(what_of<std::invalid_argument>([&] { region none(page, {.numa_node = 2}, system); }) ==
        "page_region: numa_node is 2, expected -1 or one of those online: 0-1,3");
}

TEST_CASE("page_region: the nodes of this machine can be asked for") {
  for (const int node : pulseinfer::detail::page_system{}.nodes()) {
    page_region<> r(page, {.numa_node = node});
    r.touch(0, page);
    if (r.placement().node != node) CHECK(!r.remarks().empty());
  }
}

TEST_CASE("page_region: pages that cannot be had are an error, where the system can say so") {
  injected_system system;
  system.plan->populate = ENOMEM;
  system.plan->has_facts = true;
  system.plan->facts.cgroup_bytes = 4096;
  region r(10 * page, {}, system);
  const std::string text = what_of<out_of_memory>([&] { r.touch(page, 5); });
  CHECK(
      has(text, "no pages for 5 bytes at offset 4096 of 40960 (madvise: Cannot allocate memory)"));
  CHECK(has(text, "memory.max is 4096 bytes"));
  // A system that does not know the call: pages are written as they are.
  system.plan->populate = EINVAL;
  r.data()[page] = std::byte{7};
  r.touch(0, 10 * page);
  CHECK(r.data()[page] == std::byte{7});
  CHECK(r.placement().sampled == 10);
}

TEST_CASE("fault 88: what limits locked memory is named") {
  using pulseinfer::detail::advice_of;
  using pulseinfer::detail::memory_facts;
  CHECK(advice_of({}) == "RLIMIT_MEMLOCK is unlimited (hard limit: unlimited)");
  const std::string text = advice_of({.memlock_soft = 65536,
                                      .memlock_hard = 8388608,
                                      .cgroup_bytes = 1000,
                                      .is_in_container = true,
                                      .is_in_wsl = true});
  for (const char* part : {"RLIMIT_MEMLOCK is 65536 bytes (hard limit: 8388608 bytes)", "ulimit -l",
                           "memory.max is 1000 bytes", "--ulimit memlock=-1", "--shm-size", "WSL",
                           "pinned_source::allocated"}) {
    CAPTURE(part);
    CHECK(has(text, part));
  }
  const memory_facts here = pulseinfer::detail::page_system{}.facts();
  CHECK(here.memlock_soft <= here.memlock_hard);
}
