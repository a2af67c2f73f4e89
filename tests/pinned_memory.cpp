// SPDX-License-Identifier: Apache-2.0
/// @file
/// Pinned memory: all sizes, all ways to fail, and who may use it when.
#include "pulseinfer/pinned_memory.hpp"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"
#include "support/allocations.hpp"
#include "support/archetypes.hpp"
#include "support/hold.hpp"
#include "support/host_function.hpp"
#include "support/injected_system.hpp"
#include "support/texts.hpp"

#if defined(__CUDACC__) && __has_include("ptxsim_stats.h")
#include "ptxsim_stats.h"
#define PULSEINFER_TEST_CALLS_FAIL
#endif

namespace {

using pulseinfer::device_error;
using pulseinfer::out_of_memory;
using pulseinfer::page_kind;
using pulseinfer::page_locking;
using pulseinfer::pinned_options;
using pulseinfer::pinned_region;
using pulseinfer::pinned_report;
using pulseinfer::pinned_source;
using pulseinfer::stream_priority;
using test::has;
using test::injected_system;
using test::what_of;
using machine = test::noting_backend<test::backend>;
using region = pinned_region<machine, injected_system>;

static_assert(std::is_nothrow_move_constructible_v<region> &&
              std::is_nothrow_move_assignable_v<region>);
static_assert(!std::is_copy_constructible_v<region> && !std::is_default_constructible_v<region>);

constexpr std::size_t kib = 1024;
constexpr std::size_t mib = 1024 * kib;
const std::size_t page = pulseinfer::detail::page_system{}.page_bytes();

/// A machine, a system, and what they have been asked.
struct rig {
  std::shared_ptr<test::registrations> notes = std::make_shared<test::registrations>();
  injected_system system;
  machine on;
  explicit rig(const test::backend& b) : on(b, notes) {}
  [[nodiscard]] region make(std::size_t bytes, const pinned_options& options = {}) {
    return region(on, bytes, options, system);
  }
  /// Everything that was taken has been given back.
  [[nodiscard]] bool at_rest() const { return notes->now() == 0 && system.plan->mapped == 0; }
};

/// Five chunks of two pages.
pinned_options in_chunks() {
  pinned_options options;
  options.max_chunk_bytes = 2 * page;
  options.workers = 0;
  options.pages.pages = page_kind::small;
  return options;
}

std::atomic<int> warnings{0};
std::string last_warning;
void note_warning(const char* text) noexcept {
  ++warnings;
  last_warning = text;
}
pinned_options or_unpinned(pinned_options options) {
  options.allow_unpinned = true;
  options.warn = &note_warning;
  warnings = 0;
  last_warning.clear();
  return options;
}

struct add_to_each {
  std::byte* p;
  PULSEINFER_HD void operator()(std::int64_t, std::int64_t i) const {
    p[i] = static_cast<std::byte>(static_cast<unsigned>(p[i]) + 3u);
  }
};

/// The device adds 3 to each byte of the range, which lies in one chunk.
template <class Region>
void add_on_device(machine& on, const Region& r, std::size_t offset, std::size_t count) {
  auto stream = on.make_stream(stream_priority::normal);
  on.for_each({1, static_cast<std::int64_t>(count)}, {}, count, add_to_each{r.device_data(offset)},
              stream);
  on.sync(stream);
}

/// Memory as an engine has it.
class owned_memory {
 public:
  explicit owned_memory(std::size_t bytes)
      : bytes_(bytes),
        p_(static_cast<std::byte*>(
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  owned_memory(const owned_memory&) = delete;
  owned_memory& operator=(const owned_memory&) = delete;
  ~owned_memory() { munmap(p_, bytes_); }
  [[nodiscard]] std::byte* data() const { return p_; }
  [[nodiscard]] std::span<std::byte> span() const { return {p_, bytes_}; }

 private:
  std::size_t bytes_;
  std::byte* p_;
};

/// Destroyed after everything that tests make, and after the statics of a runtime that is started
/// later.
std::optional<pinned_region<test::backend>> static_region;

}  // namespace

TEST_CASE(
    "pinned memory: of every size it is exact to the page, and the device reaches all of it") {
  test::each_backend([](const test::backend& b) {
    for (const std::size_t bytes : {std::size_t{1}, page - 1, page, page + 1, 3 * page + 7}) {
      CAPTURE(bytes);
      rig r(b);
      {
        const region memory = r.make(bytes);
        CHECK(memory.bytes() == bytes);
        CHECK(memory.ready_bytes() == bytes);
        CHECK(memory.is_ready(0, bytes));
        const pinned_report report = memory.report();
        CHECK(report.reserved_bytes == (bytes + page - 1) / page * page);
        CHECK(report.pinned_bytes == bytes);
        CHECK(report.ready_bytes == bytes);
        CHECK(report.chunks == 1);
        CHECK(report.is_locked == !test::backend::registration_pins);
        CHECK(report.remarks.empty());
        CHECK(r.notes->now() == 1);
        memory.data()[0] = std::byte{1};
        memory.data()[bytes - 1] = std::byte{5};
        add_on_device(r.on, memory, 0, bytes);
        CHECK(memory.data()[bytes - 1] == std::byte{8});
      }
      CHECK(r.at_rest());
    }
  });
}

TEST_CASE("pinned memory: no bytes are no memory") {
  rig r(test::make_backend());
  for (const bool in_background : {false, true}) {
    region none = r.make(0, {.in_background = in_background});
    CHECK(none.data() == nullptr);
    CHECK(none.span().empty());
    CHECK(none.chunk_bytes() == 0);
    CHECK(none.is_ready(0, 0));
    none.sync_ready(0, 0);
    CHECK(none.report().chunks == 0);
    CHECK_THROWS_AS((void)none.device_data(), std::invalid_argument);
    const region nothing(r.on, std::span<std::byte>(), {}, r.system);
    CHECK(nothing.bytes() == 0);
  }
  CHECK(r.notes->entered.empty());
}

TEST_CASE("pinned memory: what is none of its choices is refused") {
  rig r(test::make_backend());
  CHECK_THROWS_AS((void)r.make(1, {.source = static_cast<pulseinfer::pinned_source>(2)}),
                  std::invalid_argument);
  CHECK_THROWS_AS((void)r.make(1, {.locking = static_cast<pulseinfer::page_locking>(3)}),
                  std::invalid_argument);
  CHECK(r.notes->entered.empty());
}

TEST_CASE("pinned memory: a move takes the memory along") {
  rig r(test::make_backend());
  {
    region first = r.make(100);
    std::byte* const memory = first.data();
    region second(std::move(first));
    CHECK(second.data() == memory);
    CHECK(first.data() == nullptr);  // NOLINT: a moved-from region is empty
    CHECK(first.bytes() == 0);
    CHECK(first.ready_bytes() == 0);
    CHECK(first.report().chunks == 0);
    CHECK(first.is_ready(0, 0));
    CHECK(!first.is_ready(0, 1));
    CHECK_THROWS_AS(first.sync_ready(0, 0), std::invalid_argument);
    CHECK_THROWS_AS((void)first.device_data(), std::invalid_argument);
    region third = r.make(5);
    third = std::move(second);
    CHECK(third.data() == memory);
    region& same = third;
    third = std::move(same);
    CHECK(third.data() == memory);
    std::vector<region> many;
    for (std::size_t i = 1; i < 6; ++i) many.push_back(r.make(i));
    CHECK(many[4].bytes() == 5);
  }
  CHECK(r.at_rest());
}

TEST_CASE("fault 21: 2,236,817,408 bytes reserve no more than the next page") {
  for (const page_kind kind : {page_kind::small, page_kind::transparent}) {
    rig r(test::make_backend());
    pinned_options options;
    options.pages.pages = kind;
    options.workers = 0;
    options.in_background = true;  // none of it is touched
    for (const std::size_t bytes : {std::size_t{2'236'817'408}, std::size_t{2'236'817'409}}) {
      const region memory = r.make(bytes, options);
      const std::size_t reserved = (bytes + page - 1) / page * page;
      CHECK(memory.report().reserved_bytes == reserved);
      CHECK(r.system.plan->mapped == static_cast<std::int64_t>(reserved));
      CHECK(memory.ready_bytes() == 0);
    }
  }
}

TEST_CASE("fault 24: no registration is larger than 64 GiB") {
  using pulseinfer::detail::plan_chunk;
  constexpr std::size_t gib = 1024 * mib;
  CHECK(pinned_options{}.max_chunk_bytes == 64 * gib);
  CHECK(plan_chunk(600 * gib, 1, page, 64 * gib) == 64 * gib);
  CHECK(plan_chunk(600 * gib, 3 * 65536, page, 64 * gib) == 64 * gib / (3 * 65536) * (3 * 65536));
  CHECK(plan_chunk(549'755'813'888, 1, gib, 64 * gib) == 64 * gib);
  rig r(test::make_backend());
  CHECK(what_of<std::invalid_argument>([&] {
          (void)r.make(1, {.max_chunk_bytes = 64 * gib + 1});
        }) == "pinned_region: max_chunk_bytes is 68719476737, expected 1 to 68719476736");
  const region memory = r.make(9 * page, in_chunks());
  REQUIRE(r.notes->entered.size() == 5);
  for (const auto& range : r.notes->entered) CHECK(range.bytes <= 2 * page);
  CHECK(r.notes->entered[4].bytes == page);
}

TEST_CASE("fault 25: chunks end on units and on pages") {
  for (const std::size_t unit : {std::size_t{1}, std::size_t{3}, page / 2, page, 3 * page / 2,
                                 std::size_t{5000}, 4 * page}) {
    CAPTURE(unit);
    rig r(test::make_backend());
    pinned_options options = in_chunks();
    options.unit_bytes = unit;
    options.max_chunk_bytes = 3 * page * std::max<std::size_t>(unit, 1);
    const std::size_t bytes = 7 * options.max_chunk_bytes / 2;
    const region memory = r.make(bytes, options);
    std::byte* next = memory.data();
    for (const auto& range : r.notes->entered) {
      CHECK(range.p == next);  // neither a gap nor an overlap
      const auto at = static_cast<std::size_t>(range.p - memory.data());
      CHECK(at % unit == 0);
      CHECK(at % page == 0);
      CHECK(range.bytes <= options.max_chunk_bytes);
      next += range.bytes;
    }
    CHECK(next == memory.data() + bytes);
    CHECK(r.notes->entered.size() >= 3);
    // Where what is allowed ends on neither, less is taken, and no less than has to be.
    for (const std::size_t more : {std::size_t{1}, unit, page - 1, page, page + unit, 5 * page}) {
      const std::size_t most = options.max_chunk_bytes + more;
      const std::size_t chunk = pulseinfer::detail::plan_chunk(4 * most, unit, page, most);
      CHECK(chunk % unit == 0);
      CHECK(chunk % page == 0);
      CHECK(chunk <= most);
      CHECK(most - chunk < std::lcm(unit, page));
    }
  }
  rig r(test::make_backend());
  CHECK(what_of<std::invalid_argument>([&] {
          (void)r.make(100 * page, {.unit_bytes = 4097, .max_chunk_bytes = 20 * page});
        }) ==
        "pinned_region: max_chunk_bytes is 81920, expected at least the least common multiple "
        "of unit_bytes and a page: of 4097 and 4096");
  CHECK_THROWS_AS((void)r.make(5, {.unit_bytes = 0}), std::invalid_argument);
  CHECK_THROWS_AS((void)r.make(5, {.max_chunk_bytes = 0}), std::invalid_argument);
  CHECK_THROWS_AS((void)r.make(5, {.workers = -1}), std::invalid_argument);
  CHECK_THROWS_AS((void)r.make(5, {.warn = nullptr}), std::invalid_argument);
  CHECK(r.at_rest());
}

TEST_CASE("fault 25: when chunk j fails, those before are taken back in reverse") {
  test::each_backend([](const test::backend& b) {
    for (int j = 1; j <= 5; ++j) {
      CAPTURE(j);
      rig r(b);
      r.notes->fail_from = j;
      CHECK_THROWS_AS((void)r.make(10 * page, in_chunks()), device_error);
      CHECK(r.notes->entered.size() == static_cast<std::size_t>(j - 1));
      auto reversed = r.notes->left;
      std::reverse(reversed.begin(), reversed.end());
      CHECK(reversed == r.notes->entered);
      CHECK(r.at_rest());
      r.notes->fail_from = 0;  // the machine is as it was
      const region again = r.make(10 * page, in_chunks());
      add_on_device(r.on, again, 0, 2 * page);
    }
  });
}

TEST_CASE("fault 26: a chunk that cannot be registered is named, with its cause") {
  for (const bool as_memory : {false, true}) {
    rig r(test::make_backend());
    r.notes->fail_from = 3;
    r.notes->fail_as_memory = as_memory;
    std::string text;
    std::string cause;
    try {
      (void)r.make(10 * page, in_chunks());
    } catch (const std::exception& e) {
      text = e.what();
      CHECK((dynamic_cast<const out_of_memory*>(&e) != nullptr) == as_memory);
      CHECK((dynamic_cast<const device_error*>(&e) != nullptr) == !as_memory);
      cause = what_of<std::exception>([&] { std::rethrow_if_nested(e); });
    }
    CHECK(has(text, "8192 bytes at offset 16384 of 40960 (address "));
    CHECK(has(text, cause));
    CHECK(has(text, "RLIMIT_MEMLOCK is "));
    CHECK(has(cause, "on purpose"));
  }
}

TEST_CASE("fault 26: where that is allowed, it stays unpinned as a whole, and says so") {
  test::each_backend([](const test::backend& b) {
    rig r(b);
    r.notes->fail_from = 3;
    {
      const region memory = r.make(10 * page, or_unpinned(in_chunks()));
      CHECK(warnings == 1);
      CHECK(has(last_warning, "not pinned: pinned_region: 8192 bytes at offset 16384"));
      CHECK(memory.report().remarks == last_warning);
      CHECK(r.notes->now() == 0);  // what was pinned is not any more
      CHECK(memory.is_ready(0, 10 * page));
      CHECK(memory.report().pinned_bytes == (test::backend::registration_pins ? 0 : 10 * page));
      std::memset(memory.data(), 1, memory.bytes());
      if (std::string_view(test::backend_name) == "cuda") {
        CHECK_THROWS_AS((void)memory.device_data(5 * page), std::logic_error);
      } else {
        add_on_device(r.on, memory, 5 * page, 10);
      }
    }
    CHECK(r.at_rest());
  });
}

TEST_CASE("fault 87: under WSL, what cannot be pinned stays unpinned, and says so") {
  rig r(test::make_backend());
  r.system.plan->has_facts = true;
  r.system.plan->facts.is_in_wsl = true;
  r.notes->fail_from = 1;
  r.notes->fail_as_memory = true;
  CHECK(has(what_of<out_of_memory>([&] { (void)r.make(600 * kib); }), "this is WSL"));
  const region memory = r.make(600 * kib, or_unpinned({}));
  CHECK(warnings == 1);
  CHECK(has(last_warning, "this is WSL, whose driver pins a part of the memory only"));
  CHECK(memory.is_ready(0, memory.bytes()));
}

TEST_CASE("fault 88: where memory cannot be locked, the error names the limit") {
  for (const int error : {EAGAIN, ENOMEM, EPERM}) {
    rig r(test::make_backend());
    r.system.plan->lock = error;
    r.system.plan->has_facts = true;
    r.system.plan->facts = {.memlock_soft = 65536, .memlock_hard = 65536, .is_in_container = true};
    const pinned_options locked{.locking = page_locking::always};
    const std::string text = what_of<out_of_memory>([&] { (void)r.make(600 * kib, locked); });
    CAPTURE(text);
    CHECK(has(text, "614400 bytes cannot be locked (mlock: " +
                        pulseinfer::detail::text_of_error(error) + "); RLIMIT_MEMLOCK is 65536"));
    CHECK(has(text, "--ulimit memlock=-1"));
    CHECK(r.at_rest());
    CHECK(r.notes->entered.empty());
    const region memory = r.make(600 * kib, or_unpinned(locked));
    CHECK(warnings == 1);
    CHECK(has(last_warning, "RLIMIT_MEMLOCK is 65536 bytes"));
    CHECK(!memory.report().is_locked);
    const bool is_pinned = test::backend::registration_pins;
    CHECK(memory.report().pinned_bytes == (is_pinned ? 600 * kib : 0));
    // Never asked, never refused.
    const int asked = r.system.plan->locks;
    const region unlocked = r.make(page, {.locking = page_locking::never});
    CHECK(r.system.plan->locks == asked);
  }
}

TEST_CASE("fault 91: the report has the node that was got") {
  rig r(test::make_backend());
  r.system.plan->nodes = {0, 1};
  r.system.plan->node_of = [](void*) { return 0; };
  pinned_options options;
  options.pages.numa_node = 1;
  const region memory = r.make(8 * page, options);
  CHECK(r.system.plan->bound_to == 1);
  CHECK(memory.report().placement.node == 0);
  CHECK(memory.report().placement.share_on_node == 1);
  CHECK(memory.report().placement.sampled == 8);
  r.system.plan->bind = EPERM;
  CHECK(r.make(page, options).report().remarks ==
        "not bound to NUMA node 1 (mbind: Operation not permitted)");
}

TEST_CASE("fault 92: huge pages that are not there, and registrations between which others come") {
  test::each_backend([](const test::backend& b) {
    rig r(b);
    r.system.plan->map_huge = ENOMEM;
    pinned_options options;
    options.pages.pages = page_kind::huge_2m;
    options.max_chunk_bytes = mib;
    const region memory = r.make(3 * mib + 1, options);
    CHECK(has(memory.report().remarks, "no huge pages of 2097152 bytes"));
    CHECK(memory.report().page_bytes == page);
    CHECK(r.notes->entered.size() == 4);
    for (const auto& range : r.notes->entered) CHECK(range.bytes <= mib);
    add_on_device(r.on, memory, 3 * mib, 1);
  });
}

TEST_CASE("fault 101: the backend's own allocation is the other way, and addresses are asked for") {
  test::each_backend([](const test::backend& b) {
    rig r(b);
    {
      const region memory = r.make(5000, {.source = pinned_source::allocated});
      CHECK(r.notes->entered.empty());
      CHECK(r.system.plan->mapped == 0);
      CHECK(memory.is_ready(0, 5000));
      const pinned_report report = memory.report();
      CHECK(report.chunks == 1);
      CHECK(report.pinned_bytes == (test::backend::registration_pins ? 5000 : 0));
      CHECK(report.remarks.empty() == test::backend::registration_pins);
      memory.data()[4999] = std::byte{2};
      add_on_device(r.on, memory, 4000, 1000);
      CHECK(memory.data()[4999] == std::byte{5});
    }
    // A device that sees memory elsewhere, and the second chunk not behind the first.
    r.notes->shift = 1 << 20;
    const pinned_options options = in_chunks();
    region first = r.make(4 * page, options);
    CHECK(first.device_data(0) == first.data() + (1 << 20));
    CHECK(first.device_data(page + 5) == first.data() + (1 << 20) + page + 5);
    pinned_options later = options;
    later.in_background = true;
    region second = r.make(4 * page, later);
    second.sync_ready(0, 1);
    r.notes->shift = 1 << 24;
    second.sync_ready(2 * page, 1);
    CHECK(second.device_data(2 * page - 1) == second.data() + (1 << 20) + 2 * page - 1);
    CHECK(second.device_data(2 * page) == second.data() + (1 << 24) + 2 * page);
  });
}

TEST_CASE("pinned memory: in the background, a part is waited for alone, and all is used before") {
  test::each_backend([](const test::backend& b) {
    rig r(b);
    pinned_options options = in_chunks();
    options.in_background = true;
    {
      region memory = r.make(10 * page, options);
      CHECK(memory.ready_bytes() == 0);
      CHECK(r.notes->entered.empty());
      CHECK_THROWS_WITH_AS((void)memory.device_data(5),
                           "pinned_region: the chunk at offset 0 is not ready: sync_ready it first",
                           std::logic_error);
      std::memset(memory.data(), 4, memory.bytes());  // the host need not wait
      memory.sync_ready(5 * page, 1);
      CHECK(memory.is_ready(4 * page, 2 * page));
      CHECK(!memory.is_ready(4 * page, 2 * page + 1));
      CHECK(!memory.is_ready(4 * page - 1, 2));
      CHECK(memory.ready_bytes() == 0);
      CHECK(memory.report().ready_bytes == 2 * page);
      CHECK(r.notes->entered.size() == 1);
      add_on_device(r.on, memory, 4 * page, 2 * page);
      memory.sync_ready(0, 3 * page);
      CHECK(memory.ready_bytes() == 6 * page);
      memory.sync_ready(0, 10 * page);
      memory.sync_ready(0, 10 * page);
      CHECK(r.notes->entered.size() == 5);
      CHECK(std::all_of(memory.data(), memory.data() + 4 * page,
                        [](std::byte v) { return v == std::byte{4}; }));
      CHECK(std::all_of(memory.data() + 4 * page, memory.data() + 6 * page,
                        [](std::byte v) { return v == std::byte{7}; }));
      CHECK_THROWS_AS(memory.sync_ready(10 * page, 1), std::invalid_argument);
      CHECK_THROWS_AS(memory.sync_ready(1, std::numeric_limits<std::size_t>::max()),
                      std::invalid_argument);
      CHECK(!memory.is_ready(10 * page, 1));
      CHECK_THROWS_AS((void)memory.device_data(10 * page), std::invalid_argument);
    }
    CHECK(r.at_rest());
    auto taken_back = r.notes->left;
    std::reverse(taken_back.begin(), taken_back.end());
    CHECK(taken_back == r.notes->entered);  // the last one first, whatever their places
  });
}

TEST_CASE("pinned memory: tasks fill it by themselves, and it may go while they do") {
  test::each_backend([](const test::backend& b) {
    rig r(b);
    pinned_options options = in_chunks();
    options.in_background = true;
    options.workers = 3;
    {
      region memory = r.make(200 * page, options);
      r.on.sync_until([&] { return memory.is_ready(0, 200 * page); });
      CHECK(r.notes->entered.size() == 100);
    }
    CHECK(r.at_rest());
    for (int round = 0; round < 20; ++round) {
      region memory = r.make(200 * page, options);
      memory.data()[round] = std::byte{1};
      if (round % 2 == 0) memory.sync_ready(static_cast<std::size_t>(round) * page, 8 * page);
    }
    CHECK(r.at_rest());
    // Tasks that come after the memory has gone do nothing; the simulated machine has them still.
    test::host_function last([] {});
    r.on.host_async({}, last.task(), {});
    r.on.sync_until([&] { return last.has_run(); });
    CHECK(r.at_rest());
  });
}

TEST_CASE("pinned memory: in the background a chunk that fails is nobody else's failure") {
  test::each_backend([](const test::backend& b) {
    rig r(b);
    pinned_options options = in_chunks();
    options.in_background = true;
    {
      region memory = r.make(10 * page, options);
      memory.sync_ready(0, 4 * page);
      r.notes->fail_from = 3;
      for (int tries = 0; tries < 2; ++tries) {
        CHECK_THROWS_AS(memory.sync_ready(4 * page, 1), device_error);
      }
      CHECK(memory.ready_bytes() == 4 * page);
      CHECK_THROWS_AS((void)memory.device_data(4 * page), std::logic_error);
      r.notes->fail_from = 0;
      memory.sync_ready(6 * page, 4 * page);
      CHECK(memory.report().ready_bytes == 8 * page);
      add_on_device(r.on, memory, 6 * page, 1);
    }
    CHECK(r.at_rest());
    // Allowed to stay unpinned, only that one does.
    region memory = r.make(10 * page, or_unpinned(options));
    r.notes->fail_from = static_cast<int>(r.notes->entered.size()) + 2;
    memory.sync_ready(0, 4 * page);
    r.notes->fail_from = 0;
    memory.sync_ready(0, 10 * page);
    CHECK(warnings == 1);
    CHECK(memory.ready_bytes() == 10 * page);
    CHECK(r.notes->now() == 4);
  });
}

TEST_CASE("pinned memory: when pages cannot be had nothing stays behind") {
  test::each_backend([](const test::backend& b) {
    for (const int workers : {0, 3}) {
      rig r(b);
      r.system.plan->populate = ENOMEM;
      pinned_options options = in_chunks();
      options.workers = workers;
      CHECK_THROWS_AS((void)r.make(60 * page, options), out_of_memory);
      CHECK(r.at_rest());
      r.system.plan->populate = 0;
      r.system.plan->map = ENOMEM;
      CHECK_THROWS_AS((void)r.make(60 * page, options), out_of_memory);
      CHECK(r.at_rest());
    }
  });
  rig r(test::make_backend());
  constexpr std::size_t most = std::numeric_limits<std::size_t>::max();
  CHECK_THROWS_AS((void)r.make(most), std::length_error);
  CHECK_THROWS_AS((void)r.make(most / 4), out_of_memory);
  CHECK_THROWS_AS((void)r.make(std::size_t{1} << 60, {.source = pinned_source::allocated}),
                  out_of_memory);
  CHECK(r.at_rest());
}

TEST_CASE("pinned memory: memory of the caller's is pinned where it is, and given back as it is") {
  test::each_backend([](const test::backend& b) {
    rig r(b);
    const owned_memory memory(10 * page);
    std::memset(memory.data(), 6, 10 * page);
    {
      const region pinned(r.on, memory.span().first(9 * page + 1), in_chunks(), r.system);
      CHECK(pinned.data() == memory.data());
      CHECK(pinned.report().pinned_bytes == 9 * page + 1);
      CHECK(pinned.report().reserved_bytes == 9 * page + 1);
      CHECK(r.notes->entered.size() == 5);
      add_on_device(r.on, pinned, 2 * page, 2 * page);
    }
    CHECK(r.at_rest());
    CHECK(r.system.plan->locks == r.system.plan->unlocks);
    CHECK(memory.data()[2 * page - 1] == std::byte{6});
    CHECK(memory.data()[2 * page] == std::byte{9});
    CHECK(memory.data()[10 * page - 1] == std::byte{6});
    CHECK_THROWS_AS(region(r.on, memory.span().subspan(16), {}, r.system), std::invalid_argument);
    CHECK_THROWS_AS(region(r.on, memory.span(), {.source = pinned_source::allocated}, r.system),
                    std::invalid_argument);
    r.notes->fail_from = static_cast<int>(r.notes->entered.size()) + 3;
    CHECK_THROWS_AS(region(r.on, memory.span(), in_chunks(), r.system), device_error);
    CHECK(r.at_rest());
    CHECK(memory.data()[0] == std::byte{6});
  });
}

TEST_CASE("pinned memory: what is released is zero where that is wished") {
  for (const bool zero : {false, true}) {
    rig r(test::make_backend());
    const owned_memory memory(5 * page);
    std::memset(memory.data(), 6, 5 * page);
    pinned_options options = in_chunks();
    options.zero_on_release = zero;
    { const region pinned(r.on, memory.span().first(4 * page + 100), options, r.system); }
    const auto is_zero = [](std::byte v) { return v == std::byte{0}; };
    CHECK(std::all_of(memory.data(), memory.data() + 4 * page + 100, is_zero) == zero);
    CHECK(memory.data()[4 * page + 100] == std::byte{6});  // and no byte more
    for (const bool in_background : {false, true}) {       // also what is not there yet
      options.in_background = in_background;
      const region own = r.make(10 * page, options);
      own.data()[0] = std::byte{1};
    }
    const region allocated =
        r.make(page, {.source = pinned_source::allocated, .zero_on_release = zero});
  }
}

TEST_CASE("pinned memory: a child neither has it nor takes it away") {
  // On a machine that is not destroyed in the child: its threads are not there.
  rig r(test::make_backend());
  std::optional<region> memory(r.make(10 * page, in_chunks()));
  std::memset(memory->data(), 5, memory->bytes());
  const owned_memory callers(page);
  std::optional<region> pinned(std::in_place, r.on, callers.span(), pinned_options{}, r.system);
  std::byte* const address = memory->data();
  const std::size_t before = r.notes->now();
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    unsigned char there = 0;
    const bool is_gone = mincore(address, page, &there) == -1 && errno == ENOMEM;
    // Something of the child's at the same place: not ours to unmap.
    void* const own =
        mmap(address, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    memory.reset();
    pinned.reset();
    const bool is_kept = own == address && mincore(address, page, &there) == 0;
    _exit(is_gone && is_kept && r.notes->now() == before ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(r.notes->now() == before);
  add_on_device(r.on, *memory, 0, page);
  CHECK(memory->data()[page - 1] == std::byte{8});
  memory.reset();
  pinned.reset();
  CHECK(r.at_rest());
}

TEST_CASE("pinned memory: on a machine that does nothing, it is memory") {
  archetype::backend none;
  pinned_region<archetype::backend> memory(none, 3 * page);
  memory.data()[3 * page - 1] = std::byte{1};
  CHECK(memory.device_data() == memory.data());
}

#if !defined(__CUDACC__)  // a runtime allocates, too, and has no way to say that it could not
TEST_CASE("fault 11: a region of which a step finds no memory leaves nothing behind") {
  for (const bool is_in_background : {false, true}) {
    const rig r(test::make_backend());
    r.notes->entered.reserve(10'000);
    r.notes->left.reserve(10'000);
    pinned_options options = in_chunks();
    options.in_background = is_in_background;
    options.workers = 2;
    const auto make = [&] {  // (the injected system allocates where one may not)
      pinned_region<machine> memory(r.on, 10 * page, options);
      memory.sync_ready(0, memory.bytes());
      return memory.ready_bytes();
    };
    int failures = 0;
    for (std::uint64_t nth = 1; test::counts_allocations(); ++nth) {
      CAPTURE(nth);
      test::fail_allocation(nth);
      try {
        (void)make();
      } catch (const std::exception&) {
        ++failures;
      }
      const bool is_over = test::will_fail();
      test::fail_allocation(0);
      CHECK(r.notes->now() == 0);
      if (is_over) break;
    }
    CHECK((failures > 5 || !test::counts_allocations()));
    CHECK(make() == 10 * page);
    CHECK(r.at_rest());
  }
}
#endif

TEST_CASE("fault 90: the program that exits") {
  // Started by the next one. (A program of its own: no other test's statics count.)
  if (std::getenv("PULSEINFER_TEST_STATIC") == nullptr) return;  // NOLINT(concurrency-mt-unsafe)
  static_region.emplace(test::make_backend(), 5 * page, pinned_options{.max_chunk_bytes = page});
  static const pinned_region<test::backend> local(
      test::make_backend(), 300 * page,
      pinned_options{.max_chunk_bytes = page, .in_background = true});
  CHECK(local.data() != nullptr);
}

TEST_CASE("fault 90: of 50 programs that end with pinned memory in statics, all end well") {
  std::vector<char*> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) environment.push_back(*entry);
  std::string flag = "PULSEINFER_TEST_STATIC=1";
  environment.push_back(flag.data());
  environment.push_back(nullptr);
  std::string program = "/proc/self/exe";
  std::string filter = "--test-case=fault 90: the program that exits";
  char* const arguments[] = {program.data(), filter.data(), nullptr};
  posix_spawn_file_actions_t quiet;
  posix_spawn_file_actions_init(&quiet);
  posix_spawn_file_actions_addopen(&quiet, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  for (int i = 0; i < 50; ++i) {
    CAPTURE(i);
    pid_t child = 0;
    REQUIRE(posix_spawn(&child, program.c_str(), &quiet, nullptr, arguments, environment.data()) ==
            0);
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
    if (status != 0) break;
  }
  posix_spawn_file_actions_destroy(&quiet);
}

#if defined(__CUDACC__)
TEST_CASE("fault 24: after a registration that failed no error is left to be blamed on others") {
  test::backend backend = test::make_backend();
  const owned_memory memory(2 * page);
  backend.register_pinned(memory.data(), page);
  CHECK_THROWS_AS(backend.register_pinned(memory.data(), page), pulseinfer::cuda_error);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
  backend.unregister_pinned(memory.data(), page);
  backend.unregister_pinned(memory.data(), page);  // a driver says no, and nobody hears it
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}
#endif

#if defined(PULSEINFER_TEST_CALLS_FAIL)
TEST_CASE("fault 99: registrations that the driver fails leave no error and no registration") {
  if (!ptxsim::available()) {
    MESSAGE("no call of this runtime can be made to fail");
    return;
  }
  for (const char* failure : {"cudaHostRegister:%:2", "cudaHostRegister:%:1", "cudaHostRegister:%",
                              "cudaPointerGetAttributes:%"}) {
    for (int j = 1; j <= 5; ++j) {
      CAPTURE(failure);
      CAPTURE(j);
      rig r(test::make_backend());
      std::string text = failure;
      text.replace(text.find('%'), 1, std::to_string(j));
      ptxsim::inject(text.c_str());
      CHECK_THROWS_AS((void)r.make(10 * page, in_chunks()), std::exception);
      ptxsim::inject("");
      CHECK(cudaPeekAtLastError() == cudaSuccess);
      CHECK(r.at_rest());
      const region again = r.make(10 * page, in_chunks());
      add_on_device(r.on, again, 8 * page, page);
    }
  }
}
#endif
