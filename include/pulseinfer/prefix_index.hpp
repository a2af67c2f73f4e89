// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which block is where: from the key of a block to its place in a store, and how much of a prompt
/// is there already.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <vector>

#include "pulseinfer/block_key.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/host_memory.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A map of fixed capacity from the keys of blocks to groups, which are numbers from 0 to
/// capacity-1: the places of blocks in a store. A group has at most one key, a key one group.
///
/// It knows nothing of the blocks: that one is there says nothing of whether its bytes are. Whoever
/// stores them tells (`set_ready`), or those who ask for a prefix bring a predicate for it.
///
/// @par Structure  Buckets of three entries, one cache line each, two thirds full when all groups
///   have a key. An entry lies in the first bucket with room from that of its key on, and stays
///   there until it is erased. A bucket counts the entries that passed it by, so that a search ends
///   at the first one that nobody passed, and erasing leaves no trace.
/// @par Threads  `insert`, `erase` and `set_ready` one at a time, under the caller's lock. `find`,
///   `longest_prefix` and `size` at any time from any thread, also beside those: they take no lock
///   and wait for no one, also not for a writer that was interrupted. A search begins again in a
///   bucket only where an insertion has begun in that very bucket meanwhile. What they tell of a
///   block was true at a moment during the call, for each block at its own. So a store pins the
///   groups that it was told, then looks whether they have those keys still.
///   (An entry could be mistaken if just 2^31 insertions into its bucket fell into one search.)
/// @par Memory   at most 38.1 bytes a group and 200 more, all of it from the constructor, on huge
///   pages where the system grants them
class prefix_index {
 public:
  /// @param capacity  groups are 0 to capacity-1
  /// @throws std::invalid_argument  if it is negative
  /// @throws out_of_memory  naming the bytes
  explicit prefix_index(std::int32_t capacity)
      : buckets_(buckets_for(capacity)),
        table_(allocated(buckets_)),
        passed_(buckets_, 0),
        hints_(buckets_ / 64 + 1),
        place_of_(static_cast<std::size_t>(capacity), nowhere) {}
  prefix_index(const prefix_index&) = delete;
  prefix_index& operator=(const prefix_index&) = delete;

  [[nodiscard]] std::int32_t capacity() const noexcept {
    return static_cast<std::int32_t>(place_of_.size());
  }
  /// Groups that have a key.
  [[nodiscard]] std::int32_t size() const noexcept { return size_.load(std::memory_order_relaxed); }
  /// Memory of the index, itself included.
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(
        sizeof *this + buckets_ * sizeof(bucket) + passed_.size() * sizeof passed_[0] +
        hints_.size() * sizeof hints_[0] + place_of_.size() * sizeof place_of_[0]);
  }

  /// Gives a group a key, unless another group has it: the first one wins.
  /// @param key       of the block
  /// @param group     its place, which has no key yet
  /// @param is_ready  as `set_ready` tells it
  /// @return the group that has the key: `group`, or the one that had it before
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1
  /// @throws std::logic_error   if the group has a key already
  /// @par Cost  O(1), allocates nothing; so do the calls below
  [[nodiscard]] std::int32_t insert(const block_key& key, std::int32_t group,
                                    bool is_ready = false) {
    std::uint32_t& place = place_of_[index_of(group)];
    detail::expects<std::logic_error>(place == nowhere, "prefix_index: group ", group,
                                      " has a key already");
    const std::int32_t first = find(key);
    if (first >= 0) return first;
    std::size_t at = home(key);
    int slot = free_slot(at);
    while (slot < 0) {
      // Seen before the entry is: a search may not stop short of it.
      if (passed_[at]++ == 0) set_passed(at, true);
      at = next(at);
      slot = free_slot(at);
    }
    bucket& b = table_.get()[at];
    entry& e = b.entries[static_cast<std::size_t>(slot)];
    // Whoever sees a word of the new key sees the new version, and reads again. The group comes
    // last: before it the entry is nobody's.
    b.state.store(b.state.load(std::memory_order_relaxed) + one_version, std::memory_order_release);
    e.low.store(key.low, std::memory_order_release);
    e.high.store(key.high, std::memory_order_release);
    b.groups[static_cast<std::size_t>(slot)].store(word_of(group, is_ready),
                                                   std::memory_order_release);
    place = static_cast<std::uint32_t>(at * slots + static_cast<std::size_t>(slot));
    size_.store(size() + 1, std::memory_order_relaxed);
    return group;
  }

  /// Takes a group's key from it.
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1
  /// @throws std::logic_error   if it has none
  void erase(std::int32_t group) {
    (void)occupied_place_of(group);
    (void)erase_if_named(group);
  }
  /// The same where it is no error that the group has none. @return whether it had one
  /// @pre  group is 0 to capacity-1
  bool erase_if_named(std::int32_t group) noexcept {
    const std::size_t place = place_of_[static_cast<std::size_t>(group)];
    if (place == nowhere) return false;
    const std::size_t at = place / slots;
    const std::size_t begin = home(key_at(place));
    table_.get()[at].groups[place % slots].store(nobody, std::memory_order_release);
    for (std::size_t i = begin; i != at; i = next(i)) {
      if (--passed_[i] == 0) set_passed(i, false);
    }
    place_of_[static_cast<std::size_t>(group)] = nowhere;
    size_.store(size() - 1, std::memory_order_relaxed);
    return true;
  }

  /// Tells whether the bytes of a group that has a key are there: those who find it ready see what
  /// was written before this call.
  /// @throws as erase
  void set_ready(std::int32_t group, bool is_ready) {
    (void)occupied_place_of(group);
    set_ready_if_named(group, is_ready);
  }
  /// The same where it is no error that the group has no key; then nothing is told.
  /// @pre  group is 0 to capacity-1
  void set_ready_if_named(std::int32_t group, bool is_ready) noexcept {
    const std::size_t place = place_of_[static_cast<std::size_t>(group)];
    if (place == nowhere) return;
    table_.get()[place / slots].groups[place % slots].store(word_of(group, is_ready),
                                                            std::memory_order_release);
  }

  /// Whether a group has a key. Under the caller's lock, as is `key_of`.
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1
  [[nodiscard]] bool contains(std::int32_t group) const {
    return place_of_[index_of(group)] != nowhere;
  }
  /// The key of a group.
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1
  /// @throws std::logic_error   if it has none
  [[nodiscard]] block_key key_of(std::int32_t group) const {
    return key_at(occupied_place_of(group));
  }

  /// The group that has a key, -1 if there is none.
  /// @par Cost  one cache line, rarely the next one too
  [[nodiscard]] std::int32_t find(const block_key& key) const noexcept {
    return group_of(find_from(home(key), key));
  }

  /// Fetches into the cache what `find` or `insert` of a key reads first, or `erase` and `key_of`
  /// of a group.
  void prefetch(const block_key& key) const noexcept {
    const std::size_t at = home(key);
    __builtin_prefetch(table_.get() + at);
    __builtin_prefetch(passed_.data() + at);
  }
  void prefetch(std::int32_t group) const noexcept {
    const auto g = static_cast<std::size_t>(group);
    if (g >= place_of_.size() || place_of_[g] == nowhere) return;
    __builtin_prefetch(table_.get() + place_of_[g] / slots);
    __builtin_prefetch(passed_.data() + place_of_[g] / slots);
  }

  /// How many blocks of a prompt are there and ready, as `set_ready` told it: counts from the first
  /// one on, and stops at the first that is not.
  /// @param keys    [n] keys of the prompt's blocks, from the first on
  /// @param groups  [n] at least; receives the groups of the blocks that count, and nothing else
  /// @throws std::invalid_argument  if `groups` is shorter than `keys`
  /// @par Cost  one miss of the cache for several blocks: those of the blocks to come overlap
  [[nodiscard]] std::size_t longest_prefix(std::span<const block_key> keys,
                                           std::span<std::int32_t> groups) const {
    return longest(keys, groups,
                   [](std::uint32_t word) { return word != nobody && (word & ready_bit) != 0; });
  }
  /// The same, for those who know by themselves what is ready.
  /// @param keys    [n] keys of the prompt's blocks, from the first on
  /// @param groups  [n] at least; receives the groups of the blocks that count, and nothing else
  /// @param ready   (group) -> whether the block's bytes are there; called once for each block that
  ///                was found, in their order, up to the first one that is not ready
  /// @throws std::invalid_argument  if `groups` is shorter than `keys`; whatever `ready` throws
  /// @par Cost  one miss of the cache for several blocks: those of the blocks to come overlap
  template <class Ready>
  [[nodiscard]] std::size_t longest_prefix(std::span<const block_key> keys,
                                           std::span<std::int32_t> groups, Ready ready) const {
    return longest(keys, groups, [&ready](std::uint32_t word) {
      return word != nobody && ready(group_of(word));
    });
  }

 private:
  static constexpr std::size_t slots = 3;  ///< of a bucket: what fits into a line
  static constexpr std::size_t blocks_ahead = 16;
  // An entry's group, with a bit for whether it is ready.
  static constexpr std::uint32_t nobody = 0xffffffffu;
  static constexpr std::uint32_t ready_bit = 0x80000000u;
  static constexpr std::uint32_t nowhere = std::numeric_limits<std::uint32_t>::max();
  // A bucket's state: whether entries passed it by, and above it how often one was put into it.
  static constexpr std::uint32_t is_passed = 1;
  static constexpr std::uint32_t one_version = 2;

  struct entry {
    std::atomic<std::uint64_t> low{0};
    std::atomic<std::uint64_t> high{0};
  };
  struct alignas(64) bucket {
    std::array<entry, slots> entries;
    std::array<std::atomic<std::uint32_t>, slots> groups{nobody, nobody, nobody};
    std::atomic<std::uint32_t> state{0};
  };
  static_assert(sizeof(bucket) == 64);
  static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
                std::atomic<std::uint32_t>::is_always_lock_free);
  struct free_memory {
    void operator()(bucket* p) const noexcept { std::free(p); }  // trivially destructible
  };

  static std::size_t buckets_for(std::int32_t capacity) {
    detail::expects(capacity >= 0, "prefix_index: capacity is ", capacity, ", expected at least 0");
    return static_cast<std::size_t>(capacity) / 2 + 1;
  }
  static std::unique_ptr<bucket, free_memory> allocated(std::size_t buckets) {
    const std::size_t size = buckets * sizeof(bucket);
    void* const memory = detail::allocate_host(size, alignof(bucket));
    if (memory == nullptr) {
      throw out_of_memory(detail::text_of("prefix_index: ", size, " bytes for ", buckets,
                                          " buckets cannot be had"));
    }
    auto* const first = static_cast<bucket*>(memory);
    std::uninitialized_default_construct_n(first, buckets);
    return std::unique_ptr<bucket, free_memory>(first);
  }

  [[nodiscard]] std::size_t index_of(std::int32_t group) const {
    detail::expects<std::out_of_range>(group >= 0 && group < capacity(), "prefix_index: group is ",
                                       group, ", expected 0 to ", capacity() - 1);
    return static_cast<std::size_t>(group);
  }
  [[nodiscard]] std::size_t occupied_place_of(std::int32_t group) const {
    const std::uint32_t place = place_of_[index_of(group)];
    detail::expects<std::logic_error>(place != nowhere, "prefix_index: group ", group,
                                      " has no key");
    return place;
  }
  [[nodiscard]] block_key key_at(std::size_t place) const noexcept {
    const entry& e = table_.get()[place / slots].entries[place % slots];
    return {e.low.load(std::memory_order_relaxed), e.high.load(std::memory_order_relaxed)};
  }

  [[nodiscard]] static std::uint32_t word_of(std::int32_t group, bool is_ready) noexcept {
    return static_cast<std::uint32_t>(group) | (is_ready ? ready_bit : 0);
  }
  /// The group of an entry's word, -1 of nobody's.
  [[nodiscard]] static std::int32_t group_of(std::uint32_t word) noexcept {
    return word == nobody ? -1 : static_cast<std::int32_t>(word & ~ready_bit);
  }

  /// The bucket where the search for a key begins. Keys are hashes: their bits need no more mixing.
  [[nodiscard]] std::size_t home(const block_key& key) const noexcept {
    return static_cast<std::size_t>((key.low >> 32) * buckets_ >> 32);
  }
  [[nodiscard]] std::size_t next(std::size_t at) const noexcept {
    return at + 1 == buckets_ ? 0 : at + 1;
  }
  [[nodiscard]] std::size_t fetched(const block_key& key) const noexcept {
    const std::size_t at = home(key);
    // Where entries passed the bucket by, one more line is fetched now, instead of waited for
    // later.
    const std::uint64_t hints = hints_[at / 64].load(std::memory_order_relaxed);
    __builtin_prefetch(table_.get() + at);
    __builtin_prefetch(table_.get() + at + (hints >> at % 64 & 1));
    return at;
  }
  [[nodiscard]] int free_slot(std::size_t at) const noexcept {
    const bucket& b = table_.get()[at];
    for (std::size_t i = 0; i < slots; ++i) {
      if (b.groups[i].load(std::memory_order_relaxed) == nobody) return static_cast<int>(i);
    }
    return -1;
  }
  void set_passed(std::size_t at, bool passed) noexcept {
    std::atomic<std::uint32_t>& state = table_.get()[at].state;
    const std::uint32_t others = state.load(std::memory_order_relaxed) & ~is_passed;
    state.store(others | (passed ? is_passed : 0), std::memory_order_release);
    std::atomic<std::uint64_t>& hints = hints_[at / 64];
    const std::uint64_t bit = std::uint64_t{1} << at % 64;
    const std::uint64_t rest = hints.load(std::memory_order_relaxed) & ~bit;
    hints.store(rest | (passed ? bit : 0), std::memory_order_relaxed);
  }

  template <class Counts>
  [[nodiscard]] std::size_t longest(std::span<const block_key> keys, std::span<std::int32_t> groups,
                                    Counts counts) const {
    detail::expects(groups.size() >= keys.size(), "prefix_index: room for ", groups.size(),
                    " groups, expected one for each of ", keys.size(), " keys");
    // The buckets of the next blocks, so that each is computed once.
    std::array<std::size_t, blocks_ahead> homes{};
    const std::size_t early = keys.size() < blocks_ahead ? keys.size() : blocks_ahead;
    for (std::size_t i = 0; i < early; ++i) homes[i] = fetched(keys[i]);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::size_t at = homes[i % blocks_ahead];
      if (keys.size() - i > blocks_ahead) {
        homes[i % blocks_ahead] = fetched(keys[i + blocks_ahead]);
      }
      const std::uint32_t word = find_from(at, keys[i]);
      if (!counts(word)) return i;
      groups[i] = group_of(word);
    }
    return keys.size();
  }

  /// The word of the entry with a key, nobody's if there is none.
  [[nodiscard]] std::uint32_t find_from(std::size_t at, const block_key& key) const noexcept {
    for (;;) {
      const bucket& b = table_.get()[at];
      const std::uint32_t state = b.state.load(std::memory_order_acquire);
      const search_result in_bucket = find_in(b, state, key);
      if (in_bucket.is_stale) continue;
      if (in_bucket.word != nobody) return in_bucket.word;
      if ((state & is_passed) == 0) return nobody;
      at = next(at);
    }
  }
  struct search_result {
    std::uint32_t word;
    bool is_stale;  ///< the entry may be a mixture of two
  };
  /// An entry that is there all the time does not change, so that no answer but a hit is in doubt.
  [[nodiscard]] static search_result find_in(const bucket& b, std::uint32_t state,
                                             const block_key& key) noexcept {
    // Which entry it is cannot be predicted, and a wrong guess would wait for memory before the
    // search for the next block begins: it is chosen without a branch, by what hardly ever errs.
    std::size_t likely = 0;
    for (std::size_t i = 1; i < slots; ++i) {
      const bool is_equal = b.entries[i].low.load(std::memory_order_relaxed) == key.low;
      likely = is_equal ? i : likely;
    }
    const search_result guess = look_at(b, likely, state, key);
    if (guess.word != nobody) [[likely]]
      return guess;
    for (std::size_t i = 0; i < slots; ++i) {
      const search_result other = look_at(b, i, state, key);
      if (other.word != nobody) return other;
    }
    return {nobody, false};
  }
  /// The loads are in this order, each acquires: the group first, since an entry without one is
  /// being written; the version again last.
  [[nodiscard]] static search_result look_at(const bucket& b, std::size_t i, std::uint32_t state,
                                             const block_key& key) noexcept {
    const std::uint32_t word = b.groups[i].load(std::memory_order_acquire);
    const std::uint64_t low = b.entries[i].low.load(std::memory_order_acquire) ^ key.low;
    const std::uint64_t high = b.entries[i].high.load(std::memory_order_acquire) ^ key.high;
    if ((low | high) != 0 || word == nobody) return {nobody, false};
    const std::uint32_t after = b.state.load(std::memory_order_relaxed);
    return {word, ((state ^ after) & ~is_passed) != 0};
  }

  std::size_t buckets_;
  std::unique_ptr<bucket, free_memory> table_;
  std::vector<std::uint32_t> passed_;  ///< [buckets] entries that passed a bucket by
  /// A bit a bucket, whether that is more than none: so few bytes that they stay in a cache. Only
  /// what is fetched early goes by them.
  std::vector<std::atomic<std::uint64_t>> hints_;
  std::vector<std::uint32_t> place_of_;  ///< [capacity] bucket * slots + slot, or nowhere
  std::atomic<std::int32_t> size_{0};
};

}  // namespace pulseinfer
