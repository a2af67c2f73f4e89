// SPDX-License-Identifier: Apache-2.0
/// @file
/// A store that engines, readers, a router and a metrics reader use at once; for ThreadSanitizer,
/// too.
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/rounds.hpp"
#include "support/store_model.hpp"

namespace {

using namespace store_test;
using store_type = pulseinfer::block_store<test::backend>;

constexpr std::int32_t positions = 8;
constexpr std::int32_t families = 4;
constexpr std::int32_t named_positions = 4;

/// What a unit of a family of prompts holds, whoever wrote it. Behind the named blocks a sequence's
/// own index tells whose it is.
stamp content_of(std::int32_t family, unit at) {
  return stamp_of({family, 1}, at);
}

struct traffic {
  store_type store{test::make_backend(),
                   geometry,
                   {.capacity_bytes = 40 * unit_bytes,
                    .max_sequences = 10,
                    .max_blocks = positions,
                    .max_events = 64,
                    .zero_freed = true}};
  std::vector<pulseinfer::block_key> keys;
  std::mutex mutex;
  std::vector<std::pair<sequence_id, std::int32_t>> known;  ///< sequences, and their families
  std::atomic<bool> is_over{false};
  std::atomic<std::int64_t> wrong{0};
  std::atomic<std::int64_t> read{0};
  std::atomic<std::int64_t> clock{0};

  traffic() {
    for (std::uint64_t i = 0; i < families * named_positions; ++i) {
      keys.push_back({pulseinfer::detail::mixed(i, 1), pulseinfer::detail::mixed(i, 2)});
    }
  }
  [[nodiscard]] std::span<const pulseinfer::block_key> prompt_of(std::int32_t family) const {
    return {keys.data() + family * named_positions, named_positions};
  }
  void expect(bool is_so) {
    if (!is_so) ++wrong;
  }
  void verify(sequence_id id, std::int32_t layer, std::int32_t family, std::int32_t least) {
    const auto lease = store.acquire(id, layer);
    for (std::int32_t round = 0; round < 2; ++round) {
      for (std::int32_t block = 0; block < positions; ++block) {
        const std::byte* const bytes = lease.find(logical_block{block});
        if (bytes == nullptr) {
          expect(block >= least);
          continue;
        }
        ++read;
        expect(read_stamp(bytes) == content_of(family, {layer, block}));
      }
      std::this_thread::yield();
    }
  }

  /// All of it, or nothing.
  void write_whole(sequence_id id, std::int32_t first, std::int32_t last, std::int32_t family,
                   pulseinfer::detail::random_source& draw) {
    std::vector<logical_block> blocks;
    for (std::int32_t b = first; b < last; ++b) blocks.push_back(logical_block{b});
    std::vector<pulseinfer::reservation> got(blocks.size() * layers);
    if (store.reserve_whole(id, blocks, got) != reserve_outcome::reserved) return;
    for (std::size_t i = 0; i < got.size(); ++i) {
      expect(got[i].outcome != reserve_outcome::full);
      if (got[i].outcome != reserve_outcome::reserved) continue;
      const auto at = static_cast<std::int32_t>(i);
      write_stamp(got[i].bytes, content_of(family, {at % layers, first + at / layers}));
      draw.one_in(16) ? store.abort(got[i].slot) : store.commit(got[i].slot);
    }
  }
  void write(sequence_id id, std::int32_t first, std::int32_t last, std::int32_t family,
             pulseinfer::detail::random_source& draw) {
    if (draw.one_in(3) && first < last) write_whole(id, first, last, family, draw);
    for (std::int32_t block = first; block < last; ++block) {
      for (std::int32_t layer = 0; layer < layers; ++layer) {
        const auto got = store.reserve(id, layer, logical_block{block});
        if (got.outcome != reserve_outcome::reserved) continue;
        write_stamp(store.writable(got.slot), content_of(family, {layer, block}));
        draw.one_in(16) ? store.abort(got.slot) : store.commit(got.slot);
      }
    }
  }
  /// Nobody begins to read it any more; who does so already goes on.
  void forget(sequence_id id) {
    std::lock_guard lock(mutex);
    std::erase_if(known, [&](const auto& k) { return k.first == id; });
  }
  void serve(pulseinfer::detail::random_source& draw) {
    const auto family = static_cast<std::int32_t>(draw.below(families));
    auto found = store.open_sequence(prompt_of(family),
                                     draw.one_in(4) ? clock.load() : store_type::no_deadline);
    if (!found) return;
    const sequence_id id = found->sequence;
    if (found->held.is_live() && !draw.one_in(4)) {
      const auto lease = store.acquire(id, 0);
      // Held and leased: all that was found can be read.
      if (found->held.is_live()) verify(id, 1, family, found->blocks);
    }
    if (!draw.one_in(8)) found->held.release();
    {
      std::lock_guard lock(mutex);
      known.emplace_back(id, family);
    }
    write(id, found->blocks, named_positions, family, draw);
    for (std::int32_t block = 0; block < named_positions; ++block) {
      try {
        (void)store.name_block(id, logical_block{block},
                               prompt_of(family)[static_cast<std::size_t>(block)]);
      } catch (const std::logic_error&) {  // it was given up meanwhile
      }
    }
    if (const auto child = store.fork(id, named_positions)) {
      {
        std::lock_guard lock(mutex);
        known.emplace_back(*child, family);
      }
      write(*child, named_positions, positions, family, draw);
      verify(*child, static_cast<std::int32_t>(draw.below(layers)), family, 0);
      if (draw.one_in(2)) {  // somebody may be reading it, and then it stays as it is
        (void)store.trim(*child, static_cast<std::int32_t>(draw.below(positions)));
      }
      forget(*child);
      (void)store.close_sequence(*child);
    }
    forget(id);
    (void)store.close_sequence(id);
  }
  void read_some(pulseinfer::detail::random_source& draw) {
    std::optional<std::pair<sequence_id, std::int32_t>> some;
    {
      std::lock_guard lock(mutex);
      if (!known.empty()) some = known[draw.below(known.size())];
    }
    if (!some) {
      std::this_thread::yield();
      return;
    }
    try {
      verify(some->first, static_cast<std::int32_t>(draw.below(layers)), some->second, 0);
    } catch (const std::invalid_argument&) {  // it was closed meanwhile
    }
  }
  void look() {
    const store_counts c = store.counts();
    expect(c.free + c.writing + c.evictable + c.pinned + c.quarantined == c.capacity);
    for (const std::int64_t part : {c.free, c.writing, c.evictable, c.pinned, c.quarantined}) {
      expect(part >= 0);
    }
    pulseinfer::store_event events[16];
    (void)store.drain_events(events);
    (void)store.expire(++clock);
  }
  void route(pulseinfer::detail::random_source& draw) {
    const std::int32_t blocks =
        store.ready_blocks(prompt_of(static_cast<std::int32_t>(draw.below(families))));
    expect(blocks >= 0 && blocks <= named_positions);
  }
};

}  // namespace

TEST_CASE("store threads: engines, readers, a router and a metrics reader at once") {
  traffic t;
  const auto requests = test::rounds(400, 100'000);
  std::vector<std::thread> engines, others;
  const auto until_over = [&](std::uint64_t seed, auto job) {
    others.emplace_back([&t, seed, job] {
      pulseinfer::detail::random_source draw(seed);
      while (!t.is_over.load()) job(draw);
    });
  };
  until_over(11, [&t](auto& draw) { t.read_some(draw); });
  until_over(12, [&t](auto& draw) { t.read_some(draw); });
  until_over(13, [&t](auto& draw) {
    t.route(draw);
    std::this_thread::yield();
  });
  until_over(14, [&t](auto&) {
    t.look();
    std::this_thread::yield();
  });
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    engines.emplace_back([&t, seed, requests] {
      pulseinfer::detail::random_source draw(seed);
      for (int i = 0; i < requests; ++i) t.serve(draw);
    });
  }
  for (std::thread& engine : engines) engine.join();
  t.is_over = true;
  for (std::thread& other : others) other.join();
  CHECK(t.wrong == 0);
  CHECK(t.read > requests);
  store_counts c = t.store.counts();
  CHECK(c.free + c.evictable == c.capacity);  // nothing is pinned, written or quarantined
  (void)t.store.clear();
  CHECK(t.store.counts() == store_counts{.free = 40, .capacity = 40});
}

TEST_CASE("store threads: a lease is taken beside evictions, and finds whole units or none") {
  store_type store(test::make_backend(), geometry,
                   {.capacity_bytes = 8 * unit_bytes, .max_sequences = 4, .max_blocks = 8});
  const sequence_id parent = store.open_sequence().value();
  const sequence_id writer = store.open_sequence().value();
  std::mutex mutex;
  sequence_id child = store.fork(parent, 8).value();  // anew from time to time
  const auto put = [&](sequence_id id, unit at) {
    const auto got = store.reserve(id, at.layer, logical_block{at.block});
    if (got.outcome != reserve_outcome::reserved) return;
    write_stamp(store.writable(got.slot), stamp_of({0, 0}, at));
    store.commit(got.slot);
  };
  std::atomic<bool> is_over{false};
  std::atomic<std::int64_t> wrong{0}, found{0};
  const auto read = [&](sequence_id id) {
    const auto lease = store.acquire(id, 1);
    for (std::int32_t block = 0; block < 4; ++block) {
      const std::byte* const bytes = lease.find(logical_block{block});
      if (bytes == nullptr) continue;
      ++found;
      if (read_stamp(bytes) != stamp_of({0, 0}, {1, block})) ++wrong;
    }
  };
  std::thread of_parent([&] {
    while (!is_over.load()) {
      read(parent);
      std::this_thread::yield();
    }
  });
  std::thread of_child([&] {
    while (!is_over.load()) {
      sequence_id id;
      {
        std::lock_guard lock(mutex);
        id = child;
      }
      try {
        read(id);
      } catch (const std::invalid_argument&) {  // it was closed meanwhile
      }
      std::this_thread::yield();
    }
  });
  const int rounds = test::rounds(2'000, 200'000);
  for (int i = 0; i < rounds; ++i) {
    for (std::int32_t at = 0; at < 8; ++at) put(parent, {at % layers, at / layers});
    if (i % 4 == 0) {
      std::lock_guard lock(mutex);
      if (child.index >= 0) (void)store.close_sequence(child);
      child = store.fork(parent, 8).value_or(sequence_id{});  // two may be read still
    }
    // Takes from under both what neither has a lease on, the shared end first.
    for (std::int32_t at = 0; at < 6; ++at) put(writer, {at % layers, at / layers});
    (void)store.trim(writer, 0);
  }
  is_over = true;
  of_parent.join();
  of_child.join();
  CHECK(wrong == 0);
  const store_counts c = store.counts();
  CHECK(c.free + c.evictable == c.capacity);
}
