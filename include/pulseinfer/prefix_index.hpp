// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which block is where: from the key of a block to its place in a store, and how much of a prompt
/// is there already.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/block_key.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/host_memory.hpp"
#include "pulseinfer/detail/prefetch.hpp"
#include "pulseinfer/detail/prefix_bucket.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A map of fixed capacity from the keys of blocks to groups, which are numbers from 0 to
/// capacity-1: the places of blocks in a store. A group has at most one key, a key one group.
///
/// It knows nothing of the blocks: that one is there says nothing of whether its bytes are. Whoever
/// stores them tells (`set_ready`), or those who ask for a prefix bring a predicate for it.
///
/// @par Structure  Buckets of two entries, one cache line each, three fifths full when all groups
///   have a key. An entry lies in the first bucket with room from that of its key on, and stays
///   there until it is erased. A bucket counts the entries that passed it by, so that a search ends
///   at the first one that nobody passed, and erasing leaves no trace.
///   What takes time in a probe are lines of memory, one for each key that is looked for. So an
///   entry also says which groups the two blocks before its own have, and whether they are ready:
///   a key stands for all that is before it, hence one that is found answers for three blocks.
///   Whoever erases a block, or tells that it is ready, writes that into those behind it.
/// @par Threads  `insert`, `erase` and `set_ready` one at a time, under the caller's lock. `find`,
///   `longest_prefix` and `size` at any time from any thread, also beside those: they take no lock
///   and wait for no one, also not for a writer that was interrupted. A search begins again in a
///   bucket only where an insertion has begun in that very bucket meanwhile. What they tell of a
///   block was true at a moment during the call, for each block at its own. So a store pins the
///   groups that it was told, then looks whether they have those keys still.
///   (An entry could be mistaken if just 2^32 insertions into its bucket fell into one search.)
/// @par Memory   at most 69.5 bytes a group and 600 more, all of it from the constructor, on huge
///   pages where the system grants them
class prefix_index {
 public:
  /// @param capacity  groups are 0 to capacity-1
  /// @throws std::invalid_argument  if it is negative
  /// @throws out_of_memory  naming the bytes
  explicit prefix_index(std::int32_t capacity)
      : buckets_(buckets_for(capacity)),
        table_(allocated(buckets_)),
        hints_(buckets_ / 64 + 1),
        records_(static_cast<std::size_t>(capacity)) {}
  prefix_index(const prefix_index&) = delete;
  prefix_index& operator=(const prefix_index&) = delete;

  [[nodiscard]] std::int32_t capacity() const noexcept {
    return static_cast<std::int32_t>(records_.size());
  }
  /// Groups that have a key.
  [[nodiscard]] std::int32_t size() const noexcept { return size_.load(std::memory_order_relaxed); }
  /// Memory of the index, itself included.
  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(sizeof *this + buckets_ * sizeof(bucket) +
                                     hints_.size() * sizeof hints_[0] +
                                     records_.size() * sizeof records_[0]);
  }

  /// Gives a group a key, unless another group has it: the first one wins.
  /// @param key       of the block
  /// @param group     its place, which has no key yet
  /// @param is_ready  as `set_ready` tells it
  /// @param before    group of the block before this one in all prompts that have it, or -1 if that
  ///                  has none or is not known: then searches for this block and the next two take
  ///                  longer, and find the same
  /// @return the group that has the key: `group`, or the one that had it before
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1
  /// @throws std::logic_error   if the group has a key already, or the one before it has none
  /// @par Cost  O(1), allocates nothing; so do the calls below
  [[nodiscard]] std::int32_t insert(const block_key& key, std::int32_t group, bool is_ready = false,
                                    std::int32_t before = none) {
    record& r = records_[index_of(group)];
    detail::expects<std::logic_error>(r.place == nowhere, "prefix_index: group ", group,
                                      " has a key already");
    const std::size_t place_before = before == none ? nowhere : occupied_place_of(before);
    const std::int32_t first = find(key);
    if (first >= 0) return first;
    std::size_t at = home(key);
    int slot = free_slot(at);
    while (slot < 0) {
      // Seen before the entry is: a search may not stop short of it.
      pass(at, 1);
      at = next(at);
      slot = free_slot(at);
    }
    bucket& b = table_.get()[at];
    bucket::entry& e = b.entries[static_cast<std::size_t>(slot)];
    // Whoever sees a word of the new entry sees the new version, and reads again. Its own group
    // comes last: before that the entry is nobody's.
    b.version.store(b.version.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    e.low.store(key.low, std::memory_order_release);
    e.high.store(key.high, std::memory_order_release);
    r.place = static_cast<std::uint32_t>(at * slots + static_cast<std::size_t>(slot));
    const bool has_before = place_before != nowhere;
    set_word(r.place, 1, has_before ? word_at(place_before, 0) : nobody);
    set_word(r.place, 2, has_before ? word_at(place_before, 1) : nobody);
    if (has_before) put_behind(before, group);
    set_word(r.place, 0, bucket::word_of(group, is_ready));
    size_.store(size() + 1, std::memory_order_relaxed);
    return group;
  }

  /// Takes a group's key from it.
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1
  /// @throws std::logic_error   if it has none
  /// @par Cost  O(1), and as `set_ready` where blocks are behind it
  void erase(std::int32_t group) {
    (void)occupied_place_of(group);
    (void)erase_if_named(group);
  }
  /// The same where it is no error that the group has none. @return whether it had one
  /// @pre  group is 0 to capacity-1
  bool erase_if_named(std::int32_t group) noexcept {
    record& r = record_of(group);
    if (r.place == nowhere) return false;
    const std::size_t at = r.place / slots;
    const std::size_t begin = home(key_at(r.place));
    tell(group, nobody);
    // Those behind it are told nothing any more, neither of it nor of what is before it.
    while (r.first_behind != none) {
      set_word(record_of(r.first_behind).place, 2, nobody);
      take_away(group, r.first_behind);
    }
    const std::int32_t before = bucket::group_of(word_at(r.place, 1));
    if (before != none) take_away(before, group);
    for (std::size_t i = begin; i != at; i = next(i)) pass(i, -1);
    r.place = nowhere;
    size_.store(size() - 1, std::memory_order_relaxed);
    return true;
  }

  /// Tells whether the bytes of a group that has a key are there: those who find it ready see what
  /// was written before this call.
  /// @throws as erase
  /// @par Cost  O(blocks at most two behind it that have a key, in all prompts): cheap for those at
  ///            the end of a prompt
  void set_ready(std::int32_t group, bool is_ready) {
    (void)occupied_place_of(group);
    set_ready_if_named(group, is_ready);
  }
  /// The same where it is no error that the group has no key; then nothing is told.
  /// @pre  group is 0 to capacity-1
  void set_ready_if_named(std::int32_t group, bool is_ready) noexcept {
    if (record_of(group).place != nowhere) tell(group, bucket::word_of(group, is_ready));
  }

  /// Whether a group has a key. Under the caller's lock, as is `key_of`.
  /// @throws std::out_of_range  on a group that is not 0 to capacity-1
  [[nodiscard]] bool contains(std::int32_t group) const {
    return records_[index_of(group)].place != nowhere;
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
    return bucket::group_of(find_from(home(key), key)[0]);
  }

  /// Fetches into the cache what `find` or `insert` of a key reads first, or `erase` and `key_of`
  /// of a group.
  void prefetch(const block_key& key) const noexcept {
    detail::prefetch_line(table_.get() + home(key));
  }
  void prefetch(std::int32_t group) const noexcept {
    const auto g = static_cast<std::size_t>(group);
    if (g >= records_.size() || records_[g].place == nowhere) return;
    detail::prefetch_line(table_.get() + records_[g].place / slots);
  }

  /// How many blocks of a prompt are there and ready, as `set_ready` told it: counts from the first
  /// one on, and stops at the first that is not.
  /// @param keys    [n] keys of the prompt's blocks, from the first on
  /// @param groups  [n] at least; receives the groups of the blocks that count, and nothing else
  /// @throws std::invalid_argument  if `groups` is shorter than `keys`
  /// @par Cost  a line of memory for three blocks whose groups before were told to `insert`, else
  ///            one for each; those of the blocks to come are on their way at once
  [[nodiscard]] std::size_t longest_prefix(std::span<const block_key> keys,
                                           std::span<std::int32_t> groups) const {
    check_room(keys, groups);
    const auto one_by_one = [&](std::size_t first, std::size_t count) {
      return longest(keys.subspan(first, count), groups.subspan(first), bucket::is_ready);
    };
    const std::size_t known = longest_by_steps(keys, groups);
    // The next step has one that does not count, or one that was not told what is before it.
    const std::size_t step = std::min(step_blocks, keys.size() - known);
    const std::size_t more = one_by_one(known, step);
    if (more < step) return known + more;
    return known + step + one_by_one(known + step, keys.size() - known - step);
  }
  /// The same, for those who know by themselves what is ready.
  /// @param keys    [n] keys of the prompt's blocks, from the first on
  /// @param groups  [n] at least; receives the groups of the blocks that count, and nothing else
  /// @param ready   (group) -> whether the block's bytes are there; called once for each block that
  ///                was found, in their order, up to the first one that is not ready
  /// @throws std::invalid_argument  if `groups` is shorter than `keys`; whatever `ready` throws
  /// @par Cost  a line of memory for each block; those of the blocks to come are on their way at once
  template <class Ready>
  [[nodiscard]] std::size_t longest_prefix(std::span<const block_key> keys,
                                           std::span<std::int32_t> groups, Ready ready) const {
    check_room(keys, groups);
    return longest(keys, groups, [&ready](std::uint32_t word) {
      return word != nobody && ready(bucket::group_of(word));
    });
  }

 private:
  using bucket = detail::prefix_bucket;
  using found_words = bucket::found_words;
  static constexpr std::size_t slots = bucket::slots;
  static constexpr std::size_t step_blocks = bucket::known_blocks;
  static constexpr std::uint32_t nobody = bucket::nobody;
  static constexpr std::int32_t none = -1;
  static constexpr std::size_t lines_ahead = 16;
  static constexpr std::uint32_t nowhere = std::numeric_limits<std::uint32_t>::max();

  /// Of a group: where its entry is, and the list of those that are right behind its block.
  struct record {
    std::uint32_t place = nowhere;  ///< bucket * slots + slot
    std::int32_t first_behind = none;
    std::int32_t next = none;  ///< with the same block before it
    std::int32_t previous = none;
  };
  struct free_memory {
    void operator()(bucket* p) const noexcept { std::free(p); }  // trivially destructible
  };

  static std::size_t buckets_for(std::int32_t capacity) {
    detail::expects(capacity >= 0, "prefix_index: capacity is ", capacity, ", expected at least 0");
    return static_cast<std::size_t>(capacity) / 6 * 5 + 5;
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
    const std::uint32_t place = records_[index_of(group)].place;
    detail::expects<std::logic_error>(place != nowhere, "prefix_index: group ", group,
                                      " has no key");
    return place;
  }
  static void check_room(std::span<const block_key> keys, std::span<std::int32_t> groups) {
    detail::expects(groups.size() >= keys.size(), "prefix_index: room for ", groups.size(),
                    " groups, expected one for each of ", keys.size(), " keys");
  }
  [[nodiscard]] record& record_of(std::int32_t group) noexcept {
    return records_[static_cast<std::size_t>(group)];
  }
  [[nodiscard]] block_key key_at(std::size_t place) const noexcept {
    const bucket::entry& e = table_.get()[place / slots].entries[place % slots];
    return {e.low.load(std::memory_order_relaxed), e.high.load(std::memory_order_relaxed)};
  }
  [[nodiscard]] std::uint32_t word_at(std::size_t place, std::size_t which) const noexcept {
    return table_.get()[place / slots].words[place % slots][which].load(std::memory_order_relaxed);
  }
  void set_word(std::size_t place, std::size_t which, std::uint32_t word) noexcept {
    table_.get()[place / slots].words[place % slots][which].store(word, std::memory_order_release);
  }

  /// Writes what is to be known of a group into its entry and into those behind it.
  void tell(std::int32_t group, std::uint32_t word) noexcept {
    const record& r = record_of(group);
    set_word(r.place, 0, word);
    for (std::int32_t i = r.first_behind; i != none; i = record_of(i).next) {
      set_word(record_of(i).place, 1, word);
      for (std::int32_t j = record_of(i).first_behind; j != none; j = record_of(j).next) {
        set_word(record_of(j).place, 2, word);
      }
    }
  }
  void put_behind(std::int32_t before, std::int32_t group) noexcept {
    std::int32_t& first = record_of(before).first_behind;
    if (first != none) record_of(first).previous = group;
    record_of(group).next = std::exchange(first, group);
  }
  void take_away(std::int32_t before, std::int32_t group) noexcept {
    record& r = record_of(group);
    const std::int32_t next = std::exchange(r.next, none);
    const std::int32_t previous = std::exchange(r.previous, none);
    (previous == none ? record_of(before).first_behind : record_of(previous).next) = next;
    if (next != none) record_of(next).previous = previous;
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
    detail::prefetch_line(table_.get() + at);
    detail::prefetch_line(table_.get() + at + (hints >> at % 64 & 1));
    return at;
  }
  [[nodiscard]] int free_slot(std::size_t at) const noexcept {
    const bucket& b = table_.get()[at];
    for (std::size_t i = 0; i < slots; ++i) {
      if (b.words[i][0].load(std::memory_order_relaxed) == nobody) return static_cast<int>(i);
    }
    return -1;
  }
  /// One entry more passes a bucket by, or one less.
  void pass(std::size_t at, int more) noexcept {
    std::atomic<std::uint32_t>& passed = table_.get()[at].passed;
    const std::uint32_t count =
        passed.load(std::memory_order_relaxed) + static_cast<std::uint32_t>(more);
    passed.store(count, std::memory_order_release);
    std::atomic<std::uint64_t>& hints = hints_[at / 64];
    const std::uint64_t bit = std::uint64_t{1} << at % 64;
    const std::uint64_t rest = hints.load(std::memory_order_relaxed) & ~bit;
    hints.store(rest | (count != 0 ? bit : 0), std::memory_order_relaxed);
  }

  /// As `longest_prefix`, by the last key of each three blocks. Ends before the first three that it
  /// does not know to be ready.
  [[nodiscard]] std::size_t longest_by_steps(std::span<const block_key> keys,
                                             std::span<std::int32_t> groups) const noexcept {
    const std::size_t steps = (keys.size() + step_blocks - 1) / step_blocks;
    const auto last_of = [&](std::size_t step) {
      return std::min((step + 1) * step_blocks, keys.size()) - 1;
    };
    // The buckets of the next steps, so that each is computed once.
    std::array<std::size_t, lines_ahead> homes;
    const std::size_t early = std::min(steps, lines_ahead);
    for (std::size_t i = 0; i < early; ++i) homes[i] = fetched(keys[last_of(i)]);
    std::size_t first = 0;
    for (std::size_t i = 0; i < steps; ++i, first += step_blocks) {
      const std::size_t at = homes[i % lines_ahead];
      if (steps - i > lines_ahead) homes[i % lines_ahead] = fetched(keys[last_of(i + lines_ahead)]);
      const std::size_t last = last_of(i);
      const bucket& b = table_.get()[at];
      bucket::search_result found = b.likely(b.version.load(std::memory_order_acquire), keys[last]);
      if (found.is_stale || found.words[0] == nobody) found.words = find_from(at, keys[last]);
      const auto [block, before, before_that] = found.words;
      if (last - first == step_blocks - 1) [[likely]] {
        if (!bucket::is_ready(block & before & before_that)) return first;
        groups[first] = bucket::group_of(before_that);
        groups[first + 1] = bucket::group_of(before);
        groups[first + 2] = bucket::group_of(block);
      } else if (last == first) {
        if (!bucket::is_ready(block)) return first;
        groups[first] = bucket::group_of(block);
      } else {
        if (!bucket::is_ready(block & before)) return first;
        groups[first] = bucket::group_of(before);
        groups[last] = bucket::group_of(block);
      }
    }
    return keys.size();
  }
  /// By each block's own key.
  template <class Counts>
  [[nodiscard]] std::size_t longest(std::span<const block_key> keys, std::span<std::int32_t> groups,
                                    Counts counts) const {
    std::array<std::size_t, lines_ahead> homes{};
    const std::size_t early = std::min(keys.size(), lines_ahead);
    for (std::size_t i = 0; i < early; ++i) homes[i] = fetched(keys[i]);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::size_t at = homes[i % lines_ahead];
      if (keys.size() - i > lines_ahead) homes[i % lines_ahead] = fetched(keys[i + lines_ahead]);
      const std::uint32_t word = find_from(at, keys[i])[0];
      if (!counts(word)) return i;
      groups[i] = bucket::group_of(word);
    }
    return keys.size();
  }

  /// The words of the entry with a key, nobody's if there is none.
  [[nodiscard]] found_words find_from(std::size_t at, const block_key& key) const noexcept {
    for (;;) {
      const bucket& b = table_.get()[at];
      const std::uint32_t version = b.version.load(std::memory_order_acquire);
      const bucket::search_result in_bucket = b.find(version, key);
      if (in_bucket.is_stale) continue;
      if (in_bucket.words[0] != nobody) return in_bucket.words;
      if (b.passed.load(std::memory_order_acquire) == 0) return in_bucket.words;
      at = next(at);
    }
  }
  std::size_t buckets_;
  std::unique_ptr<bucket, free_memory> table_;
  /// A bit a bucket, whether entries passed it by: so few bytes that they stay in a cache. Only
  /// what is fetched early goes by them.
  std::vector<std::atomic<std::uint64_t>> hints_;
  std::vector<record> records_;  ///< [capacity]
  std::atomic<std::int32_t> size_{0};
};

}  // namespace pulseinfer
