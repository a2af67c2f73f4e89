// SPDX-License-Identifier: Apache-2.0
/// @file
/// The index of prefixes against std::map, at its edges, and beside a writer.
#include "pulseinfer/prefix_index.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"
#include "support/rounds.hpp"

namespace {

using pulseinfer::block_key;
using pulseinfer::block_keys;
using pulseinfer::prefix_index;
using pulseinfer::root_key;
using pulseinfer::token_id;
using pulseinfer::detail::random_source;

constexpr auto always = [](std::int32_t) { return true; };

block_key some_key(random_source& draw) {
  return {draw.next(), draw.next()};
}

std::int64_t buckets_of(std::int32_t capacity) {
  return capacity / 6 * 5 + 5;
}
/// A key whose search begins in a bucket of an index with `capacity`: buckets divide the range of
/// the upper half of `low` evenly.
block_key key_in(std::int32_t capacity, std::int64_t bucket, std::uint64_t number) {
  const std::int64_t buckets = buckets_of(capacity);
  const auto first = static_cast<std::uint64_t>(((bucket << 32) + buckets - 1) / buckets);
  return {first << 32 | number, number};
}

/// An index and a map, which have to agree.
class twins {
 public:
  using key_maker = block_key (*)(random_source&, std::int32_t capacity);

  twins(std::int32_t capacity, std::uint64_t seed, key_maker make_key)
      : index_(capacity), key_of_(static_cast<std::size_t>(capacity)), draw_(seed) {
    for (int i = 0; i < 3 * capacity + 3; ++i) keys_.push_back(make_key(draw_, capacity));
  }

  /// False once the two differ.
  [[nodiscard]] bool step() {
    const std::uint64_t what = draw_.below(32);
    // Long runs of more insertions and of more erasures: full and empty are both visited.
    if (draw_.one_in(2000)) fills_ = !fills_;
    if (index_.capacity() > 0 && what < 21) return what < (fills_ ? 20u : 1u) ? insert() : erase();
    return what < 28 ? agrees_on(some()) : probe();
  }
  [[nodiscard]] bool agree() const {
    return static_cast<std::size_t>(index_.size()) == map_.size() &&
           std::all_of(keys_.begin(), keys_.end(),
                       [this](const block_key& key) { return agrees_on(key); });
  }
  [[nodiscard]] bool was_full() const { return was_full_; }
  [[nodiscard]] bool was_empty() const { return was_empty_; }

 private:
  [[nodiscard]] const block_key& some() { return keys_[draw_.below(keys_.size())]; }
  [[nodiscard]] std::int32_t some_group() {
    return static_cast<std::int32_t>(draw_.below(key_of_.size()));
  }
  [[nodiscard]] bool agrees_on(const block_key& key) const {
    const auto at = map_.find(key);
    return index_.find(key) == (at == map_.end() ? -1 : at->second);
  }

  bool insert() {
    const block_key key = some();
    const std::int32_t group = some_group();
    std::optional<block_key>& has = key_of_[static_cast<std::size_t>(group)];
    if (index_.contains(group) != has.has_value()) return false;
    if (has) {
      CHECK_THROWS_AS((void)index_.insert(key, group), std::logic_error);
      return index_.key_of(group) == *has;
    }
    const auto [at, is_new] = map_.emplace(key, group);
    if (is_new) has = key;
    if (index_.insert(key, group) != at->second) return false;
    was_full_ = was_full_ || index_.size() == index_.capacity();
    return index_.contains(group) == is_new;
  }
  bool erase() {
    const std::int32_t group = some_group();
    std::optional<block_key>& has = key_of_[static_cast<std::size_t>(group)];
    if (!has) {
      CHECK_THROWS_AS(index_.erase(group), std::logic_error);
      return true;
    }
    map_.erase(*has);
    index_.erase(group);
    was_empty_ = was_empty_ || index_.size() == 0;
    return index_.find(*std::exchange(has, std::nullopt)) == -1;
  }
  bool probe() {
    std::vector<block_key> chain(draw_.below(40));
    const bool is_likely = draw_.one_in(2) && !map_.empty();
    for (block_key& key : chain) {
      key = some();
      // Else long prefixes would never be there.
      for (int i = 0; is_likely && i < 8 && !map_.contains(key); ++i) key = some();
    }
    const auto divisor = static_cast<std::int32_t>(2 + draw_.below(30));
    const auto ready = [divisor](std::int32_t group) { return group % divisor != 1; };
    std::size_t expected = 0;
    for (; expected < chain.size(); ++expected) {
      const auto at = map_.find(chain[expected]);
      if (at == map_.end() || !ready(at->second)) break;
    }
    std::vector<std::int32_t> groups(chain.size() + 1, -7);
    if (index_.longest_prefix(chain, groups, ready) != expected) return false;
    for (std::size_t i = 0; i < groups.size(); ++i) {
      if (groups[i] != (i < expected ? map_.at(chain[i]) : -7)) return false;
    }
    return true;
  }

  prefix_index index_;
  std::map<block_key, std::int32_t> map_;
  std::vector<std::optional<block_key>> key_of_;
  std::vector<block_key> keys_;
  random_source draw_;
  bool fills_ = true;
  bool was_full_ = false;
  bool was_empty_ = false;
};

}  // namespace

static_assert(!std::is_copy_constructible_v<prefix_index> &&
              !std::is_move_constructible_v<prefix_index>);

TEST_CASE("prefix_index: agrees with a map, whatever is done to both") {
  twins::key_maker make_key = nullptr;
  std::int32_t capacity = 64;
  SUBCASE("keys as hashes are") {
    make_key = [](random_source& draw, std::int32_t) { return some_key(draw); };
    SUBCASE("of 64 groups") {
      capacity = 64;
    }
    SUBCASE("of 1,001 groups") {
      capacity = 1001;
    }
    SUBCASE("of one group") {
      capacity = 1;
    }
    SUBCASE("of two groups") {
      capacity = 2;
    }
    SUBCASE("of no group") {
      capacity = 0;
    }
  }
  SUBCASE("all keys begin in one bucket, which is the last but one: searches go round") {
    make_key = [](random_source& draw, std::int32_t groups) {
      return key_in(groups, buckets_of(groups) - 2, draw.below(1 << 30));
    };
  }
  SUBCASE("all keys begin in three buckets across the end") {
    make_key = [](random_source& draw, std::int32_t groups) {
      const auto from = static_cast<std::int64_t>(draw.below(3));
      return key_in(groups, (buckets_of(groups) - 1 + from) % buckets_of(groups),
                    draw.below(1 << 30));
    };
  }
  SUBCASE("keys share a half") {
    make_key = [](random_source& draw, std::int32_t) {
      return block_key{draw.below(16) << 60, draw.below(16)};
    };
  }
  const std::int64_t steps = test::rounds<std::int64_t>(100'000, 10'000'000);
  twins both(capacity, 11, make_key);
  for (std::int64_t i = 0; i < steps; ++i) {
    REQUIRE(both.step());
    if (i % 1000 == 0) REQUIRE(both.agree());
  }
  CHECK(both.agree());
  if (capacity > 0 && capacity <= 64) CHECK(both.was_empty());
  if (capacity > 0 && capacity <= 64) CHECK(both.was_full());
}

TEST_CASE("prefix_index: an empty one has nothing") {
  random_source draw(1);
  for (const std::int32_t capacity : {0, 1, 100}) {
    const prefix_index index(capacity);
    CHECK(index.capacity() == capacity);
    CHECK(index.size() == 0);
    CHECK(index.find({}) == -1);
    CHECK(index.find(some_key(draw)) == -1);
    const std::vector<block_key> chain(20);
    std::vector<std::int32_t> groups(20);
    CHECK(index.longest_prefix(chain, groups, always) == 0);
    CHECK(index.longest_prefix({}, {}, always) == 0);
  }
}

TEST_CASE("prefix_index: all groups find a place, and all of them leave none behind") {
  for (const std::int32_t capacity : {1, 2, 3, 4, 5, 1000, 4097}) {
    for (const bool in_one_bucket : {false, true}) {
      if (in_one_bucket && capacity > 1000) continue;
      random_source draw(2);
      prefix_index index(capacity);
      std::vector<block_key> keys;
      for (int round = 0; round < 3; ++round) {
        keys.clear();
        for (std::int32_t group = 0; group < capacity; ++group) {
          keys.push_back(in_one_bucket
                             ? key_in(capacity, buckets_of(capacity) - 1, draw.below(1 << 30))
                             : some_key(draw));
          REQUIRE(index.insert(keys.back(), group) == group);
        }
        CHECK(index.size() == capacity);
        std::vector<std::int32_t> groups(keys.size());
        CHECK(index.longest_prefix(keys, groups, always) == keys.size());
        for (std::int32_t group = 0; group < capacity; ++group) {
          REQUIRE(groups[static_cast<std::size_t>(group)] == group);
          REQUIRE(index.key_of(group) == keys[static_cast<std::size_t>(group)]);
        }
        for (std::int32_t group = 0; group < capacity; ++group) index.erase(group);
        CHECK(index.size() == 0);
        CHECK(std::all_of(keys.begin(), keys.end(),
                          [&](const block_key& key) { return index.find(key) == -1; }));
      }
    }
  }
}

TEST_CASE("prefix_index: an entry erased from the middle of a cluster hides none behind it") {
  constexpr std::int32_t capacity = 30;
  prefix_index index(capacity);
  std::vector<block_key> keys;
  for (std::int32_t group = 0; group < capacity; ++group) {
    keys.push_back(key_in(capacity, 14, static_cast<std::uint64_t>(group)));
    REQUIRE(index.insert(keys.back(), group) == group);
  }
  for (std::int32_t gone = 0; gone < capacity; ++gone) {
    index.erase(gone);
    for (std::int32_t group = 0; group < capacity; ++group) {
      REQUIRE(index.find(keys[static_cast<std::size_t>(group)]) == (group > gone ? group : -1));
    }
  }
}

TEST_CASE("prefix_index: the first group with a key keeps it, and a key of zeros is one") {
  prefix_index index(3);
  CHECK(index.insert({0, 0}, 2) == 2);
  CHECK(index.insert({0, 0}, 1) == 2);
  CHECK(!index.contains(1));
  CHECK(index.insert({0, 1}, 1) == 1);
  CHECK(index.size() == 2);
  index.erase(2);
  CHECK(index.find({0, 0}) == -1);
  CHECK(index.insert({0, 0}, 0) == 0);
  CHECK(index.find({0, 0}) == 0);
  CHECK(index.find({0, 1}) == 1);
  CHECK(index.find({1, 0}) == -1);
}

TEST_CASE("prefix_index: a prefix ends at the first block that is not there or not ready") {
  random_source draw(3);
  prefix_index index(100);
  std::vector<block_key> chain(100);
  for (block_key& key : chain) key = some_key(draw);
  for (std::int32_t group = 0; group < 100; ++group) {
    (void)index.insert(chain[static_cast<std::size_t>(group)], group);
  }
  std::vector<std::int32_t> groups(100);
  std::vector<std::int32_t> asked;
  for (const std::int32_t end : {0, 1, 2, 15, 16, 17, 31, 32, 33, 99}) {
    asked.clear();
    groups.assign(100, -7);
    const auto count = static_cast<std::size_t>(end);
    CHECK(index.longest_prefix(chain, groups, [&](std::int32_t group) {
      asked.push_back(group);
      return group != end;
    }) == count);
    CHECK(asked.size() == count + 1);
    CHECK(std::is_sorted(asked.begin(), asked.end()));
    CHECK(groups[count] == -7);
    CHECK(index.longest_prefix(std::span(chain).first(count), groups, always) == count);
    index.erase(end);
    CHECK(index.longest_prefix(chain, groups, always) == count);
    (void)index.insert(chain[count], end);
  }
  CHECK(index.longest_prefix(chain, groups, always) == 100);
}

TEST_CASE("prefix_index: what is ready it can be told") {
  random_source draw(8);
  prefix_index index(40);
  std::vector<block_key> chain(40);
  for (block_key& key : chain) key = some_key(draw);
  for (std::int32_t group = 0; group < 40; ++group) {
    CHECK(index.insert(chain[static_cast<std::size_t>(group)], group, group < 20) == group);
  }
  std::vector<std::int32_t> groups(40);
  CHECK(index.longest_prefix(chain, groups) == 20);
  CHECK(index.longest_prefix(chain, groups, always) == 40);
  CHECK(index.find(chain[7]) == 7);  // ready or not
  CHECK(index.find(chain[27]) == 27);
  for (std::int32_t group = 39; group >= 20; --group) {
    CHECK(index.longest_prefix(chain, groups) == 20);
    index.set_ready(group, true);
  }
  CHECK(index.longest_prefix(chain, groups) == 40);
  for (std::int32_t group = 0; group < 40; ++group) {
    CHECK(groups[static_cast<std::size_t>(group)] == group);
  }
  index.set_ready(3, false);
  groups.assign(40, -7);
  CHECK(index.longest_prefix(chain, groups) == 3);
  CHECK(groups[3] == -7);
  CHECK(index.key_of(3) == chain[3]);
  index.erase(3);
  CHECK_THROWS_WITH_AS(index.set_ready(3, true), "prefix_index: group 3 has no key",
                       std::logic_error);
  CHECK(index.insert(chain[3], 3) == 3);  // it is not what it was
  CHECK(index.longest_prefix(chain, groups) == 3);
  CHECK_THROWS_WITH_AS((void)index.longest_prefix(chain, std::span(groups).first(39)),
                       "prefix_index: room for 39 groups, expected one for each of 40 keys",
                       std::invalid_argument);
}

TEST_CASE("prefix_index: 217 blocks that were put are 217 blocks that are found") {
  // Fault 3: those of requests that had ended, and the last block of each, were hashed but not put.
  random_source draw(4);
  prefix_index index(217);
  std::vector<block_key> keys(217);
  std::vector<token_id> prompt(217 * 16 + 15);
  for (token_id& t : prompt) t = static_cast<token_id>(draw.below(1 << 17));
  REQUIRE(block_keys(root_key(1), prompt, 16, keys) == 217);
  // In the order in which transfers end, not in that of the prompt.
  for (std::int32_t i = 0; i < 217; ++i) {
    const std::int32_t group = i * 100 % 217;
    CHECK(index.insert(keys[static_cast<std::size_t>(group)], group) == group);
  }
  std::vector<std::int32_t> groups(217);
  CHECK(index.longest_prefix(keys, groups, always) == 217);
}

TEST_CASE("prefix_index: tenants with equal prompts find their own blocks and no others") {
  const std::vector<token_id> prompt(64, 11);
  prefix_index index(8);
  std::array<block_key, 4> ours{}, theirs{};
  std::array<std::int32_t, 4> groups{};
  (void)block_keys(root_key(1001), prompt, 16, ours);
  (void)block_keys(root_key(1002), prompt, 16, theirs);
  for (std::int32_t i = 0; i < 4; ++i) (void)index.insert(ours[static_cast<std::size_t>(i)], i);
  CHECK(index.longest_prefix(ours, groups, always) == 4);
  CHECK(index.longest_prefix(theirs, groups, always) == 0);
  for (std::int32_t i = 0; i < 4; ++i) {
    CHECK(index.find(theirs[static_cast<std::size_t>(i)]) == -1);
    CHECK(index.insert(theirs[static_cast<std::size_t>(i)], 4 + i) == 4 + i);
  }
  CHECK(index.longest_prefix(theirs, groups, always) == 4);
  CHECK(groups == std::array<std::int32_t, 4>{4, 5, 6, 7});
}

TEST_CASE("prefix_index: bad groups and sizes are named, and change nothing") {
  CHECK_THROWS_WITH_AS(prefix_index(-1), "prefix_index: capacity is -1, expected at least 0",
                       std::invalid_argument);
  prefix_index index(4);
  (void)index.insert({1, 1}, 2);
  for (const std::int32_t group : {-1, 4, INT32_MIN, INT32_MAX}) {
    CHECK_THROWS_AS((void)index.insert({5, 5}, group), std::out_of_range);
    CHECK_THROWS_AS(index.erase(group), std::out_of_range);
    CHECK_THROWS_AS(index.set_ready(group, true), std::out_of_range);
    CHECK_THROWS_AS((void)index.contains(group), std::out_of_range);
    CHECK_THROWS_AS((void)index.key_of(group), std::out_of_range);
  }
  CHECK_THROWS_WITH_AS(index.erase(7), "prefix_index: group is 7, expected 0 to 3",
                       std::out_of_range);
  CHECK_THROWS_WITH_AS((void)index.insert({5, 5}, 2), "prefix_index: group 2 has a key already",
                       std::logic_error);
  CHECK_THROWS_WITH_AS(index.erase(3), "prefix_index: group 3 has no key", std::logic_error);
  CHECK_THROWS_AS((void)index.key_of(3), std::logic_error);
  const std::array<block_key, 2> chain{};
  std::array<std::int32_t, 1> groups{};
  CHECK_THROWS_WITH_AS((void)index.longest_prefix(chain, groups, always),
                       "prefix_index: room for 1 groups, expected one for each of 2 keys",
                       std::invalid_argument);
  CHECK(index.size() == 1);
  CHECK(index.find({1, 1}) == 2);
  CHECK(index.find({5, 5}) == -1);
}

TEST_CASE("prefix_index: allocates in its constructor, few bytes a group, and never again") {
  for (const std::int32_t capacity : {0, 1, 7, 1000, 100'000}) {
    const prefix_index index(capacity);
    CHECK(index.bytes() <= 695 * std::int64_t{capacity} / 10 + 600);
  }
  random_source draw(5);
  prefix_index index(1000);
  std::vector<block_key> keys(1000);
  for (block_key& key : keys) key = some_key(draw);
  std::vector<std::int32_t> groups(1000);
  const std::uint64_t before = test::allocations();
  for (std::int32_t i = 0; i < 1000; ++i) {
    (void)index.insert(keys[static_cast<std::size_t>(i)], i);
  }
  const std::size_t count = index.longest_prefix(keys, groups, always);
  for (std::int32_t i = 0; i < 1000; ++i) index.erase(i);
  CHECK(test::allocations() == before);
  CHECK(count == 1000);
}

TEST_CASE("prefix_index: readers beside a writer see what is there, and nothing that never was") {
  // Keys (i, i), which come and go, keys that stay, and keys (i, j), which a reader would see who
  // mixed two entries up. Few buckets, so that everybody is in each other's way; a key is at one of
  // two groups, which tell which key it is.
  constexpr std::int32_t count = 24;
  constexpr std::int32_t capacity = 4 * count;
  const auto half = [](std::int32_t i) {
    return static_cast<std::uint64_t>(i % 5) << 61 | static_cast<std::uint64_t>(i);
  };
  const auto key = [half](std::int32_t i, std::int32_t j) { return block_key{half(i), half(j)}; };
  prefix_index index(capacity);
  // 24 to 47 stay, and have longer searches than they had if they had come first.
  for (std::int32_t i = 0; i < 2 * count; ++i) (void)index.insert(key(i, i), 2 * i);
  for (std::int32_t i = 0; i < count; ++i) index.erase(2 * i);

  const std::int64_t rounds = test::rounds<std::int64_t>(20'000, 3'000'000);
  std::atomic<bool> is_over{false};
  std::atomic<std::int64_t> wrong{0};
  std::atomic<std::int64_t> hits{0};
  std::vector<std::thread> readers;
  for (std::uint64_t seed = 0; seed < 2; ++seed) {
    readers.emplace_back([&, seed] {
      random_source draw(100 + seed);
      std::vector<block_key> stay;
      for (std::int32_t i = count; i < 2 * count; ++i) stay.push_back(key(i, i));
      std::array<std::int32_t, count> groups{};
      std::int64_t bad = 0;
      while (!is_over.load(std::memory_order_relaxed)) {
        const auto i = static_cast<std::int32_t>(draw.below(count));
        const auto j = static_cast<std::int32_t>(draw.below(count));
        const std::int32_t group = index.find(key(i, i));
        bad += group != -1 && group / 2 != i ? 1 : 0;
        if (group != -1) hits.fetch_add(1, std::memory_order_relaxed);
        bad += i != j && index.find(key(i, j)) != -1 ? 1 : 0;
        bad += index.size() < count || index.size() > 2 * count ? 1 : 0;
        if (index.longest_prefix(stay, groups, always) != stay.size()) ++bad;
        for (std::int32_t k = 0; k < count; ++k) {
          bad += groups[static_cast<std::size_t>(k)] != 2 * (count + k) ? 1 : 0;
        }
      }
      wrong.fetch_add(bad);
    });
  }
  random_source draw(6);
  std::vector<std::int32_t> group_of(count, -1);
  // On one core the readers may not have begun when the rounds are over.
  for (std::int64_t n = 0; n < rounds || hits.load(std::memory_order_relaxed) < rounds / 10; ++n) {
    const auto i = static_cast<std::int32_t>(draw.below(count));
    std::int32_t& group = group_of[static_cast<std::size_t>(i)];
    if (group >= 0) {
      index.erase(group);
      group = -1;
    } else {
      group = 2 * i + static_cast<std::int32_t>(draw.below(2));
      if (index.insert(key(i, i), group) != group) wrong.fetch_add(1);
      index.set_ready(group, draw.one_in(2));
    }
  }
  is_over = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(wrong.load() == 0);
  CHECK(hits.load() > 0);
}

TEST_CASE("prefix_index: a hit in a bucket that was written meanwhile is in doubt") {
  using pulseinfer::detail::prefix_bucket;
  prefix_bucket bucket;
  for (std::size_t i = 0; i < 2; ++i) {
    bucket.entries[i].low = bucket.entries[i].high = i + 1;
    bucket.words[i][0] = prefix_bucket::word_of(static_cast<std::int32_t>(i), true);
  }
  bucket.version = 7;
  for (const std::uint64_t half : {1, 2}) {
    for (const std::uint32_t version : {6, 7, 8}) {
      const auto found = bucket.find(version, {half, half});
      CHECK(prefix_bucket::group_of(found.words[0]) == static_cast<std::int32_t>(half) - 1);
      CHECK(found.is_stale == (version != 7));
      CHECK(bucket.likely(version, {half, half}).is_stale == (version != 7));
    }
  }
  CHECK(bucket.find(7, {1, 2}).words[0] == prefix_bucket::nobody);
}

TEST_CASE("prefix_index: a reader never sees halves of two entries as one") {
  // Two keys take turns in one entry, as fast as they can. Both mixtures of them are looked for.
  const block_key first{1, 1};
  const block_key second{2, 2};
  prefix_index index(1);
  std::atomic<bool> is_over{false};
  std::atomic<std::int64_t> looks{0};
  std::atomic<std::int64_t> wrong{0};
  std::thread reader([&] {
    while (!is_over.load(std::memory_order_relaxed)) {
      for (int i = 0; i < 64; ++i) {
        if (index.find({1, 2}) != -1 || index.find({2, 1}) != -1) wrong.fetch_add(1);
      }
      looks.fetch_add(64, std::memory_order_relaxed);
    }
  });
  const std::int64_t rounds = test::rounds<std::int64_t>(1'000'000, 100'000'000);
  for (std::int64_t n = 0; n < rounds || looks.load(std::memory_order_relaxed) < rounds; ++n) {
    (void)index.insert(n % 2 == 0 ? first : second, 0);
    index.erase(0);
  }
  is_over = true;
  reader.join();
  CHECK(wrong.load() == 0);
}

TEST_CASE("prefix_index: what is told of the blocks before agrees with each block's own entry") {
  // A tree of prompts: block i is behind block (i - 1) / 2, or behind the last one of a long chain.
  constexpr std::int32_t count = 60;
  const auto parent_of = [](std::int32_t i) { return i >= 30 ? i - 1 : (i + 1) / 2 - 1; };
  random_source draw(9);
  prefix_index index(2 * count);
  std::vector<block_key> keys(count);
  for (block_key& key : keys) key = some_key(draw);
  std::vector<std::int32_t> group_of(count, -1);
  std::vector<bool> ready(count, false);
  const std::int64_t rounds = test::rounds<std::int64_t>(50'000, 3'000'000);
  for (std::int64_t n = 0; n < rounds; ++n) {
    const auto block = static_cast<std::int32_t>(draw.below(count));
    const auto i = static_cast<std::size_t>(block);
    const bool is_full_time = n / 1000 % 2 == 0;  // long prefixes are there, then few
    if (group_of[i] < 0) {
      const std::int32_t parent = parent_of(block);
      const std::int32_t before = parent < 0 ? -1 : group_of[static_cast<std::size_t>(parent)];
      group_of[i] = 2 * block + static_cast<std::int32_t>(draw.below(2));
      ready[i] = !draw.one_in(4);
      REQUIRE(index.insert(keys[i], group_of[i], ready[i], draw.one_in(8) ? -1 : before) ==
              group_of[i]);
    } else if (draw.one_in(is_full_time ? 16 : 2)) {
      index.erase(std::exchange(group_of[i], -1));
    } else {
      ready[i] = draw.one_in(2) || is_full_time;
      index.set_ready(group_of[i], ready[i]);
    }
    std::vector<std::int32_t> path;
    for (auto at = static_cast<std::int32_t>(draw.below(count)); at >= 0; at = parent_of(at)) {
      path.insert(path.begin(), at);
    }
    std::vector<block_key> chain;
    std::vector<std::int32_t> expected;
    for (const std::int32_t at : path) {
      chain.push_back(keys[static_cast<std::size_t>(at)]);
      const auto k = static_cast<std::size_t>(at);
      if (expected.size() + 1 == chain.size() && group_of[k] >= 0 && ready[k]) {
        expected.push_back(group_of[k]);
      }
    }
    std::vector<std::int32_t> groups(path.size(), -7);
    REQUIRE(index.longest_prefix(chain, groups) == expected.size());
    expected.resize(groups.size(), -7);
    // (what is behind the prefix may not be written)
    REQUIRE(groups == expected);
  }
}

TEST_CASE("prefix_index: a block before that has no key is named, and changes nothing") {
  prefix_index index(4);
  CHECK_THROWS_WITH_AS((void)index.insert({1, 1}, 0, true, 2), "prefix_index: group 2 has no key",
                       std::logic_error);
  CHECK_THROWS_AS((void)index.insert({1, 1}, 0, true, 4), std::out_of_range);
  CHECK_THROWS_AS((void)index.insert({1, 1}, 0, true, -2), std::out_of_range);
  CHECK(index.size() == 0);
  CHECK(!index.contains(0));
  CHECK(index.insert({1, 1}, 0, true) == 0);
  CHECK(index.insert({2, 2}, 1, true, 0) == 1);
  CHECK(index.insert({2, 2}, 2, true, 0) == 1);  // the first one wins, and stays behind its block
  index.erase(0);
  CHECK(index.insert({3, 3}, 0, true) == 0);  // another block with that group
  const std::array<block_key, 2> chain{{{1, 1}, {2, 2}}};
  std::array<std::int32_t, 2> groups{};
  CHECK(index.longest_prefix(chain, groups) == 0);
}

TEST_CASE("prefix_index: a prefix read beside a writer has its own blocks, which were there") {
  // A chain whose end comes and goes, a key at one of two groups, which tell whose they are; the
  // first six blocks stay, and are ready. Groups are used for another chain meanwhile.
  constexpr std::int32_t length = 12;
  constexpr std::int32_t stay = 6;
  random_source draw(10);
  std::vector<block_key> keys(2 * length);
  for (block_key& key : keys) key = some_key(draw);
  // Key i of one chain has group 2 * i or 2 * i + 1; key i of the other, where it is there, the same.
  prefix_index index(2 * length);
  const std::span<const block_key> ours = std::span(keys).first(length);
  const std::span<const block_key> theirs = std::span(keys).last(length);
  std::vector<std::int32_t> group_of(length, -1);
  for (std::int32_t i = 0; i < stay; ++i) {
    group_of[static_cast<std::size_t>(i)] = 2 * i;
    (void)index.insert(ours[static_cast<std::size_t>(i)], 2 * i, true, 2 * i - (i > 0 ? 2 : 1));
  }
  std::atomic<bool> is_over{false};
  std::atomic<std::int64_t> wrong{0};
  std::atomic<std::int64_t> looks{0};
  std::thread reader([&] {
    std::array<std::int32_t, length> groups{};
    while (!is_over.load(std::memory_order_relaxed)) {
      const std::size_t found = index.longest_prefix(ours, groups);
      std::int64_t bad = found < stay ? 1 : 0;
      for (std::size_t i = 0; i < found; ++i) {
        // Ours have even groups where i is even, odd ones where it is odd, but for those that stay.
        const auto expected = static_cast<std::int32_t>(i < stay ? 2 * i : 2 * i + i % 2);
        bad += groups[i] != expected ? 1 : 0;
      }
      wrong.fetch_add(bad);
      looks.fetch_add(1, std::memory_order_relaxed);
    }
  });
  const std::int64_t rounds = test::rounds<std::int64_t>(20'000, 3'000'000);
  for (std::int64_t n = 0; n < rounds || looks.load(std::memory_order_relaxed) < 1000; ++n) {
    // Ours to the end, gone in some order, and theirs on the other groups.
    const bool is_ours = n % 2 == 0;
    for (std::int32_t i = stay; i < length; ++i) {
      const auto k = static_cast<std::size_t>(i);
      const std::int32_t group = 2 * i + (is_ours ? i % 2 : 1 - i % 2);
      const std::int32_t before = is_ours || i > stay ? group_of[k - 1] : -1;
      group_of[k] = group;
      if (index.insert(is_ours ? ours[k] : theirs[k], group, draw.one_in(2), before) != group) {
        wrong.fetch_add(1);
      }
      index.set_ready(group, true);
    }
    for (std::int32_t i = stay; i < length; ++i) {
      const std::int32_t at = draw.one_in(2) ? i : length - 1 - (i - stay);
      for (const std::int32_t j : {at, i}) {
        std::int32_t& group = group_of[static_cast<std::size_t>(j)];
        if (group >= 0) index.erase(std::exchange(group, -1));
      }
    }
  }
  is_over = true;
  reader.join();
  CHECK(wrong.load() == 0);
}

TEST_CASE("prefix_index: the same calls have the same answers") {
  const auto run = [] {
    random_source draw(7);
    prefix_index index(50);
    std::vector<std::int32_t> answers;
    for (int i = 0; i < 5000; ++i) {
      const auto group = static_cast<std::int32_t>(draw.below(50));
      const block_key key{draw.below(100) << 57, draw.below(100)};
      if (index.contains(group)) index.erase(group);
      answers.push_back(index.insert(key, group));
      answers.push_back(index.find({draw.below(100) << 57, key.high}));
    }
    return answers;
  };
  CHECK(run() == run());
}
