// SPDX-License-Identifier: Apache-2.0
/// @file
/// A store's memory: all of it from the constructor, none after it, nothing left behind by one that
/// fails; and units that are where their handles say.
#include <doctest/doctest.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/eviction_adaptive_2q.hpp"
#include "pulseinfer/eviction_prefix_tree.hpp"
#include "pulseinfer/eviction_priority.hpp"
#include "pulseinfer/transfer_options.hpp"
#include "support/allocations.hpp"
#include "support/rounds.hpp"
#include "support/sanitizers.hpp"
#include "support/store_shelf.hpp"

namespace {

using namespace store_test;
template <class Policy>
using store_with = pulseinfer::block_store<test::backend, Policy>;
using store_type = store_with<pulseinfer::lru>;

/// Everything that an engine does, in an order that comes back.
template <class Policy>
class busy_store {
 public:
  busy_store()
      : store_(test::make_backend(), geometry,
               {.capacity_bytes = 24 * unit_bytes,
                .max_sequences = 6,
                .max_blocks = 8,
                .max_events = 16,
                .integrity = pulseinfer::integrity::canary}),
        keys_(32) {
    for (std::uint64_t i = 0; i < keys_.size(); ++i) {
      keys_[i] = {pulseinfer::detail::mixed(i, 1), pulseinfer::detail::mixed(i, 2)};
    }
  }
  /// One request: a prompt of up to 4 blocks, what is missing of it, a fork, a tail.
  void serve(std::uint64_t seed) {
    pulseinfer::detail::random_source draw(seed);
    const std::size_t family = draw.below(8);
    const std::span<const pulseinfer::block_key> prompt(keys_.data() + family * 4, 4);
    (void)store_.ready_blocks(prompt);
    auto found = store_.open_sequence(prompt, static_cast<std::int64_t>(seed));
    if (!found) return;
    const sequence_id id = found->sequence;
    write(id, found->blocks, 4, draw);
    for (std::int32_t block = found->blocks; block < 4; ++block) {
      if (store_.contains(id, 0, logical_block{block})) {
        (void)store_.name_block(id, logical_block{block}, prompt[static_cast<std::size_t>(block)]);
      }
    }
    {
      const auto lease = store_.acquire(id, 1);
      for (std::int32_t block = 0; block < 8; ++block) {
        if (lease.find(logical_block{block}) == nullptr) continue;
        ++found_;
        (void)lease.matches(logical_block{block}, lease.find(logical_block{block}));
      }
    }
    (void)store_.expire(static_cast<std::int64_t>(seed) - 2);
    if (const auto child = store_.fork(id, 4)) {
      write(*child, 4, 8, draw);
      (void)store_.trim(*child, static_cast<std::int32_t>(draw.below(8)));
      (void)store_.close_sequence(*child);
    }
    (void)store_.close_sequence(id);
    pulseinfer::store_event events[8];
    (void)store_.drain_events(events);
    (void)store_.counts();
    if (draw.below(50) == 0) (void)store_.clear();
  }
  [[nodiscard]] std::int64_t found() const { return found_; }
  [[nodiscard]] store_counts counts() const { return store_.counts(); }

 private:
  void write(sequence_id id, std::int32_t first, std::int32_t last,
             pulseinfer::detail::random_source& draw) {
    for (std::int32_t block = first; block < last; ++block) {
      for (std::int32_t layer = 0; layer < layers; ++layer) {
        const auto got = store_.reserve(id, layer, logical_block{block});
        if (got.outcome != reserve_outcome::reserved) continue;
        write_stamp(store_.writable(got.slot), stamp_of(id, {layer, block}));
        draw.below(16) == 0 ? store_.abort(got.slot) : store_.commit(got.slot);
      }
    }
  }

  store_with<Policy> store_;
  std::vector<pulseinfer::block_key> keys_;
  std::int64_t found_ = 0;
};

template <class Policy>
void allocates_nothing() {
  busy_store<Policy> store;
  const std::uint64_t before = test::allocations();
  for (std::uint64_t i = 0; i < 2000; ++i) store.serve(i);
  CHECK(test::allocations() == before);
  CHECK(store.found() > 2000);
}

/// Counts the pinned memory that is out, and refuses the nth that is asked for.
class counting_backend : public test::backend {
 public:
  struct books {
    int until_failure = 0;
    int out = 0;
  };
  counting_backend() : test::backend(test::make_backend()), books_(std::make_shared<books>()) {}

  [[nodiscard]] void* allocate_pinned(std::size_t bytes) {
    if (books_->until_failure > 0 && --books_->until_failure == 0) {
      throw pulseinfer::out_of_memory("counting_backend: refused on purpose");
    }
    void* const p = test::backend::allocate_pinned(bytes);
    ++books_->out;
    return p;
  }
  void deallocate_pinned(void* p, std::size_t bytes) noexcept {
    --books_->out;
    test::backend::deallocate_pinned(p, bytes);
  }
  books& of() { return *books_; }

 private:
  std::shared_ptr<books> books_;
};

/// Memory of the process that lies in RAM, in bytes; 0 where the system does not say.
[[maybe_unused]] std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t all = 0;
  std::int64_t resident = 0;  // pages
  return file >> all >> resident ? resident * 4096 : 0;
}

}  // namespace

TEST_CASE("store life: nothing is allocated after the constructor, whatever is called") {
  allocates_nothing<pulseinfer::lru>();
  allocates_nothing<pulseinfer::prefix_tree_lru>();
  allocates_nothing<pulseinfer::adaptive_2q>();
  allocates_nothing<pulseinfer::prioritized<>>();
}

TEST_CASE("fault 11: a constructor whose nth allocation fails leaves nothing behind") {
  counting_backend machine;
  const pulseinfer::block_store_options options{.capacity_bytes = 64 * unit_bytes,
                                                .max_sequences = 4,
                                                .max_blocks = 8,
                                                .max_events = 16,
                                                .integrity = pulseinfer::integrity::canary};
  using counted = pulseinfer::block_store<counting_backend, pulseinfer::prioritized<>>;
  int failures = 0;
  for (int nth = 1; nth <= 2; ++nth) {  // the payload, then the table
    machine.of().until_failure = nth;
    const std::int64_t live = test::live_allocations();
    CHECK_THROWS_AS(counted(machine, geometry, options), pulseinfer::out_of_memory);
    CHECK(test::live_allocations() == live);
    CHECK(machine.of().out == 0);
  }
  machine.of().until_failure = 0;
  for (std::uint64_t nth = 1; test::counts_allocations(); ++nth) {
    const std::int64_t live = test::live_allocations();
    bool is_made = false;
    test::fail_allocation(nth);
    try {
      const counted store(machine, geometry, options);
      is_made = true;
    } catch (const std::bad_alloc&) {
      ++failures;
    }
    const bool is_over = test::will_fail();
    test::fail_allocation(0);
    CHECK(is_made == is_over);
    CHECK(test::live_allocations() == live);
    CHECK(machine.of().out == 0);
    if (is_over) break;
  }
  CHECK((failures > 5 || !test::counts_allocations()));
  const counted store(machine, geometry, options);
  CHECK(store.counts() == store_counts{.free = 64, .capacity = 64});
}

TEST_CASE("fault 19: resident memory is flat over many lives of units, sequences and names") {
  if constexpr (std::string_view(test::backend_name) == "host") {
    busy_store<pulseinfer::lru> store;
    const auto cycles = test::rounds<std::uint64_t>(10'000, 1'000'000);
    for (std::uint64_t i = 0; i < cycles / 10; ++i) store.serve(i);
    const std::int64_t before = resident_bytes();
    for (std::uint64_t i = 0; i < cycles; ++i) store.serve(i);
    CHECK(resident_bytes() - before < std::int64_t{test::is_sanitized ? 64 : 1} << 20);
    CHECK(store.counts().writing == 0);
    CHECK(store.counts().pinned == 0);
    CHECK(store.counts().quarantined == 0);
  }
}

TEST_CASE("fault 19: stores that come and go leave nothing") {
  const std::int64_t live = test::live_allocations();
  for (int i = 0; i < test::rounds(20, 2000); ++i) {
    busy_store<pulseinfer::lru> store;
    for (std::uint64_t request = 0; request < 10; ++request) store.serve(request);
  }
  CHECK(test::live_allocations() == live);
}

TEST_CASE("store life: what it says of its memory is what it takes") {
  struct shape {
    std::int32_t sequences, blocks, events;
    pulseinfer::integrity integrity;
  };
  for (const shape& of : {shape{2, 8, 0, pulseinfer::integrity::none},
                          shape{64, 512, 1000, pulseinfer::integrity::canary}}) {
    constexpr std::int64_t units = 4096;
    const store_type store(test::make_backend(), geometry,
                           {.capacity_bytes = units * unit_bytes,
                            .max_sequences = of.sequences,
                            .max_blocks = of.blocks,
                            .max_events = of.events,
                            .integrity = of.integrity});
    // A table entry and a holding for each (sequence, layer, block) that there may be; a slot's
    // books, extent and tag; a record, with its name, for each block that may be known.
    const std::int64_t places = std::int64_t{of.sequences} * of.blocks;
    const std::int64_t tags = of.integrity == pulseinfer::integrity::none ? 0 : 8 * units;
    const std::int64_t least = places * (4 * layers + 8) + units * 16 + tags;
    CHECK(store.metadata_bytes() >= least);
    CHECK(store.metadata_bytes() <=
          least + units * (2 + 128) + of.events * 24 + of.sequences * 132 + 4096);
  }
}

TEST_CASE("store life: tables of a large store are a small part of it") {
  if constexpr (std::string_view(test::backend_name) == "host") {
    constexpr std::int64_t units = 1 << 20;
    const store_type store(
        test::make_backend(), geometry,
        {.capacity_bytes = units * unit_bytes, .max_sequences = 1, .max_blocks = 1});
    CHECK(store.metadata_bytes() / units <= 250);  // a record a unit: the dearest that there is
  }
}

// What others throw.

namespace {

/// `lru`, until it is told to do what no policy may.
template <bool TellsEvictable>
class fickle {
 public:
  static inline int until_throw = 0;      ///< the nth call from now on throws, the first being 1
  static inline bool is_lasting = false;  ///< and those after it
  static inline bool refuses = false;     ///< gives nothing up, and has not said so
  static inline bool keeps = false;       ///< what it was told to give up
  static inline std::int32_t lies = -1;   ///< names this block

  explicit fickle(std::int32_t capacity) : order_(capacity) {}
  [[nodiscard]] std::int32_t capacity() const { return order_.capacity(); }
  [[nodiscard]] bool contains(std::int32_t group) const { return order_.contains(group); }
  void insert(std::int32_t group, const pulseinfer::eviction_entry& entry) {
    may_throw();
    order_.insert(group, entry);
    ++size_;
  }
  void touch(std::int32_t group) { order_.touch(group); }
  void erase(std::int32_t group) {
    may_throw();
    order_.erase(group);
    --size_;
  }
  void evict(std::int32_t group) {
    if (!keeps) erase(group);
  }
  template <class CanEvict>
  [[nodiscard]] std::int32_t victim(CanEvict can_evict) const {
    may_throw();
    if (lies >= 0) return lies;
    return refuses ? -1 : order_.victim(can_evict);
  }
  [[nodiscard]] std::int32_t evictable() const requires TellsEvictable {
    may_throw();
    return size_;
  }

 private:
  static void may_throw() {
    if (until_throw <= 0 || --until_throw > 0) return;
    until_throw = is_lasting ? 1 : 0;
    throw std::runtime_error("fickle");
  }

  pulseinfer::lru order_;
  std::int32_t size_ = 0;
};

/// A full store of 16 units: three blocks that only names keep, two sequences that share two blocks,
/// one that is read and one that is held.
template <class Policy>
struct full_scene {
  full_scene() {
    s.leave(named);
    s.leave(keys_of({3}));
    s.put_blocks(parent, 0, 2);
    child = s.fork(parent, 2);
    s.put_blocks(child, 2, 3);
    s.put_blocks(read, 0, 1);
    s.leave(keys_of({9}));
    held = s->open_sequence(keys_of({9}));
    lease = s->acquire(read, 0);
    s.expect({.evictable = 12, .pinned = 4});
  }
  /// What nobody may have touched; and all gates are open.
  void expect_untouched() {
    CHECK(finds(lease, read, {0, 0}));
    CHECK(held->held.is_live());
    CHECK(s->acquire(held->sequence, 1).find(logical_block{0}) != nullptr);
    CHECK(s.prefix_of(parent) == 2);
    CHECK(s.prefix_of(child) == 3);
    for (const sequence_id id : {parent, child, read, writer}) {
      CHECK(static_cast<bool>(s->acquire(id, 0)));
    }
  }
  /// All of it can be had again.
  void end() {
    lease.release();
    held->held.release();
    for (const sequence_id id : {parent, child, read, writer, held->sequence}) {
      CHECK(s->close_sequence(id) == close_outcome::closed);
    }
    (void)s->clear();
    s.expect({.free = 16});
    s.put_blocks(s.open(), 0, 8);
  }

  using store = store_with<Policy>;
  shelf<store> s{test::make_backend(), 16, {.max_events = 64}};
  const std::vector<pulseinfer::block_key> named = keys_of({1, 2});
  sequence_id parent = s.open();
  sequence_id read = s.open();
  sequence_id writer = s.open();
  sequence_id child;
  std::optional<typename store::opened_prefix> held;
  typename store::lease lease;
};

std::vector<logical_block> first_blocks(std::int32_t count) {
  std::vector<logical_block> blocks;
  for (std::int32_t b = 0; b < count; ++b) blocks.push_back(logical_block{b});
  return blocks;
}

/// Each call of the policy that `act` leads to throws, in one run after the other.
template <class Policy, class Act>
int throw_everywhere(Act act) {
  int thrown = 0;
  for (const bool is_lasting : {false, true}) {
    for (int nth = 1;; ++nth) {
      CAPTURE(nth);
      CAPTURE(is_lasting);
      full_scene<Policy> scene;
      Policy::is_lasting = is_lasting;
      Policy::until_throw = nth;
      bool is_through = true;
      try {
        act(scene);
      } catch (const std::runtime_error&) {
        is_through = false;
        ++thrown;
      }
      const bool is_over = Policy::until_throw > 0 && is_through;
      Policy::until_throw = 0;
      if (!is_through) {
        CHECK(scene.s.counts().writing == 0);
        scene.expect_untouched();
      }
      scene.end();
      if (is_over || nth > 50) break;
    }
  }
  Policy::is_lasting = false;
  return thrown;
}

template <class Policy>
void survives_what_policies_throw() {
  const auto undo = [](auto& scene, const std::vector<pulseinfer::reservation>& got) {
    for (const pulseinfer::reservation& r : got) {
      if (r.outcome == reserve_outcome::reserved) scene.s->abort(r.slot);
    }
  };
  CHECK(throw_everywhere<Policy>([&](auto& scene) {
          std::vector<pulseinfer::reservation> got(5 * layers);  // four units more than names keep
          const auto outcome = scene.s->reserve_whole(scene.writer, first_blocks(5), got);
          CHECK(outcome == reserve_outcome::reserved);
          undo(scene, got);
        }) > 6);
  CHECK(throw_everywhere<Policy>([&](auto& scene) {
          const auto got = scene.s->reserve(scene.writer, 0, logical_block{0});
          undo(scene, {got});
        }) > 2);
  CHECK(throw_everywhere<Policy>([&](auto& scene) {
          // One more than what names keep has units: the last one asks again.
          std::vector<pulseinfer::reservation> got(7);
          try {
            scene.s->reserve(scene.writer, 1, first_blocks(7), got);
          } catch (...) {
            for (const pulseinfer::reservation& r : got) {
              CHECK(r.outcome != reserve_outcome::reserved);
            }
            throw;
          }
          undo(scene, got);
        }) > 6);
  CHECK(throw_everywhere<Policy>([&](auto& scene) {
          const auto found = scene.s->open_sequence(scene.named);
          REQUIRE(found.has_value());
          CHECK(found->blocks == 2);
          (void)scene.s->close_sequence(found->sequence);
        }) > 2);
  CHECK(throw_everywhere<Policy>([](auto& scene) { (void)scene.s->clear(); }) > 6);
}

}  // namespace

TEST_CASE("store life: a policy that throws takes nothing with it, and locks nobody out") {
  survives_what_policies_throw<fickle<true>>();
  survives_what_policies_throw<fickle<false>>();
}

TEST_CASE("store life: a block that the policy does not take is given up, and told of") {
  using policy = fickle<true>;
  shelf<store_with<policy>> s(test::make_backend(), 8, {.max_events = 8});
  const auto names = keys_of({1, 2});
  const sequence_id id = s.open();
  s.put_blocks(id, 0, 2);
  s.name(id, names);
  (void)s.events();
  policy::until_throw = 1;  // the last block is the first that it is given
  CHECK(s->close_sequence(id) == close_outcome::closed);
  CHECK(policy::until_throw == 0);
  CHECK(s->ready_blocks(names) == 1);
  s.expect({.free = 6, .evictable = 2});
  const auto events = s.events();
  REQUIRE(events.size() == 1);
  CHECK(events[0] == pulseinfer::store_event{pulseinfer::store_event::what::evicted, names[1]});
  s.leave(keys_of({5, 6}));
  CHECK(s->clear() == 3);
  s.expect({.free = 8});
}

TEST_CASE("store life: a policy that gives less up than there is costs nobody a block") {
  using policy = fickle<false>;
  full_scene<policy> scene;
  std::vector<pulseinfer::reservation> got(5 * layers);
  policy::refuses = true;
  for (const std::int32_t blocks : {2, 3, 5}) {
    CHECK(scene.s->reserve_whole(scene.writer, first_blocks(blocks), got) == reserve_outcome::full);
    scene.expect_untouched();
    scene.s.expect({.evictable = 12, .pinned = 4});
    CHECK(scene.s->ready_blocks(scene.named) == 2);
  }
  policy::refuses = false;
  scene.end();
}

TEST_CASE("store life: a policy that gives up what it does not have takes nobody's units") {
  using policy = fickle<true>;
  for (const std::int32_t lie : {0, 1, 2, 3, 7, 8, 1 << 30}) {
    CAPTURE(lie);
    shelf<store_with<policy>> s(test::make_backend(), 8, {.max_stored_blocks = 8});
    const sequence_id id = s.open();
    s.put_blocks(id, 0, 3);  // blocks 0 to 2 are a sequence's, block 3 its name keeps
    s.leave(keys_of({1}));
    const store_counts before = s.counts();
    const sequence_id writer = s.open();
    policy::lies = lie;
    if (lie != 3) {
      CHECK_THROWS_AS((void)s->reserve(writer, 0, logical_block{0}), std::logic_error);
      CHECK_THROWS_AS((void)s->clear(), std::logic_error);
      CHECK(s.counts() == before);
    }
    policy::lies = -1;
    // One that does not forget what it has given up would do so again and again.
    policy::keeps = true;
    std::vector<pulseinfer::reservation> got(3);
    CHECK_THROWS_AS(s->reserve(writer, 1, first_blocks(3), got), std::logic_error);
    policy::keeps = false;
    s.expect({.free = 2, .evictable = 6});
    for (std::int32_t block = 0; block < 3; ++block) {
      CHECK(finds(s->acquire(id, 0), id, {0, block}));
    }
  }
}

TEST_CASE("store life: an error for which there is no memory leaves the store as it was") {
  full_scene<pulseinfer::lru> scene;
  auto& s = scene.s;
  const store_counts before = s.counts();
  std::vector<pulseinfer::reservation> got(2 * layers);
  const auto blocks = first_blocks(2);
  std::vector<pulseinfer::name_outcome> named(2);
  const auto fails = [&](auto act) {
    for (std::uint64_t nth = 1; nth < 20 && test::counts_allocations(); ++nth) {
      test::fail_allocation(nth);
      bool is_other = false;  // it had the memory to say what was wrong
      try {
        act();
        CHECK(false);
      } catch (const std::bad_alloc&) {
      } catch (const std::logic_error&) {
        is_other = true;
      }
      test::fail_allocation(0);
      CHECK(s.counts() == before);
      if (is_other) return;
    }
    CHECK(!test::counts_allocations());
  };
  const logical_block far{64};
  fails([&] { (void)s->reserve({}, 0, logical_block{0}); });
  fails([&] { (void)s->reserve(scene.writer, 0, far); });
  fails([&] { (void)s->reserve_whole({}, blocks, got); });
  fails([&] { (void)s->reserve_whole(scene.writer, {&far, 1}, got); });
  fails([&] { (void)s->fork(scene.parent, 65); });
  fails([&] { (void)s->trim(scene.parent, -1); });
  fails([&] { (void)s->close_sequence({}); });
  fails([&] { (void)s->acquire(scene.parent, 2); });
  fails([&] { (void)s->acquire({}, 0); });
  fails([&] { (void)s->name_block(scene.parent, logical_block{7}, scene.named[0]); });
  fails([&] { s->name_blocks({}, logical_block{0}, scene.named, named); });
  fails([&] { s->commit(host_slot{3}); });
  fails([&] { s->abort(host_slot::none); });
  fails([&] { (void)s->contains(scene.parent, 0, far); });
  scene.expect_untouched();
  scene.end();
}

// Handles.

using pulseinfer::device_page;
using pulseinfer::unit_target;

/// None of the others is made from the first, nor the first from them, without saying so.
template <class First, class... Others>
constexpr bool is_apart_from = (... && (!std::is_convertible_v<First, Others> &&
                                        !std::is_convertible_v<Others, First> &&
                                        !std::is_assignable_v<First&, Others> &&
                                        !std::is_assignable_v<Others&, First> &&
                                        !std::equality_comparable_with<First, Others>));
template <class First, class... Others>
constexpr bool are_apart = is_apart_from<First, Others...>&& are_apart<Others...>;
template <class Last>
constexpr bool are_apart<Last> = true;

template <class Slot>
constexpr bool commits = requires(store_type& store, Slot slot) {
  store.commit(slot);
  store.abort(slot);
  store.writable(slot);
};
template <class Block>
constexpr bool finds_any = requires(const store_type::lease& lease, Block block) {
  lease.find(block);
};
template <class Block>
constexpr bool reserves = requires(store_type& store, Block block) {
  store.reserve({}, 0, block);
};
template <class Block>
constexpr bool reserves_many = requires(store_type& store, std::vector<Block>& blocks,
                                        std::span<pulseinfer::reservation> to) {
  store.reserve({}, 0, blocks, to);
};
template <class Block>
constexpr bool names = requires(store_type& store, Block block) {
  store.name_block({}, block, {});
};
template <class Block>
constexpr bool takes_block =
    reserves<Block>&& reserves_many<Block>&& finds_any<Block>&& names<Block>;
template <class Block>
constexpr bool takes_nowhere =
    !reserves<Block> && !reserves_many<Block> && !finds_any<Block> && !names<Block>;
template <class Block, class Page>
constexpr bool is_target = requires(Block block, Page page) {
  unit_target{0, block, page};
};

TEST_CASE("fault 15: a block, a slot and a sequence are not taken for each other") {
  static_assert(are_apart<std::int32_t, logical_block, host_slot, device_page, sequence_id>);
  static_assert(commits<host_slot> && !commits<std::int32_t> && !commits<logical_block> &&
                !commits<device_page>);
  static_assert(takes_block<logical_block> && takes_nowhere<std::int32_t> &&
                takes_nowhere<host_slot> && takes_nowhere<device_page>);
  static_assert(is_target<logical_block, device_page> && !is_target<device_page, logical_block> &&
                !is_target<std::int32_t, device_page> && !is_target<logical_block, host_slot> &&
                !is_target<logical_block, std::int32_t>);
  // A block that leaves and comes back lies elsewhere, and is found by its number all the same.
  shelf<store_type> s(test::make_backend(), 64);
  const sequence_id id = s.open();
  const sequence_id other = s.open();
  s.put_blocks(id, 0, 8);
  s.put_blocks(other, 0, 8);
  pulseinfer::detail::random_source draw(1);
  for (int round = 0; round < 50; ++round) {
    const auto first = static_cast<std::int32_t>(draw.below(8));
    CHECK(s->trim(id, first) == pulseinfer::trim_outcome::trimmed);
    CHECK(s->trim(other, first / 2) == pulseinfer::trim_outcome::trimmed);
    s.put_blocks(other, first / 2, 8);
    s.put_blocks(id, first, 8);
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      const auto of_id = s->acquire(id, layer);
      const auto of_other = s->acquire(other, layer);
      for (std::int32_t block = 0; block < 8; ++block) {
        CHECK(finds(of_id, id, {layer, block}));
        CHECK(finds(of_other, other, {layer, block}));
      }
    }
  }
}
