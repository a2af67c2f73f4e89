// SPDX-License-Identifier: Apache-2.0
/// @file
/// One line of memory of a prefix index, and how it is read beside a writer.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "pulseinfer/block_key.hpp"
#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Keys, and words for the groups of their blocks and of those before them: see prefix_index, which
/// writes it.
struct alignas(64) prefix_bucket {
  static constexpr std::size_t slots = 2;         ///< what fits into a line
  static constexpr std::size_t known_blocks = 3;  ///< that an entry tells of
  // A group, with a bit for whether it is ready. Nobody is not ready, and no group.
  static constexpr std::uint32_t ready_bit = 0x80000000u;
  static constexpr std::uint32_t nobody = 0x7fffffffu;

  struct entry {
    std::atomic<std::uint64_t> low{0};
    std::atomic<std::uint64_t> high{0};
  };
  /// Of an entry's block, of the one before it, and of the one before that.
  using entry_words = std::array<std::atomic<std::uint32_t>, known_blocks>;
  using found_words = std::array<std::uint32_t, known_blocks>;

  std::array<entry, slots> entries;
  std::array<entry_words, slots> words{entry_words{nobody, nobody, nobody},
                                       entry_words{nobody, nobody, nobody}};
  std::atomic<std::uint32_t> version{0};  ///< entries that were put into it
  std::atomic<std::uint32_t> passed{0};   ///< entries that passed it by

  [[nodiscard]] static std::uint32_t word_of(std::int32_t group, bool is_ready) noexcept {
    return static_cast<std::uint32_t>(group) | (is_ready ? ready_bit : 0);
  }
  /// The group of a word, -1 of nobody's.
  [[nodiscard]] static std::int32_t group_of(std::uint32_t word) noexcept {
    return word == nobody ? -1 : static_cast<std::int32_t>(word & ~ready_bit);
  }
  [[nodiscard]] static bool is_ready(std::uint32_t word) noexcept {
    return (word & ready_bit) != 0;
  }

  struct search_result {
    found_words words{nobody, nobody, nobody};
    bool is_stale = false;  ///< the entry may be a mixture of two
  };
  /// An entry that is there all the time does not change, but for what is told of the blocks before
  /// it, so that no answer but a hit is in doubt.
  /// @param at_version  read before
  [[nodiscard]] search_result find(std::uint32_t at_version, const block_key& key) const noexcept {
    const search_result guess = likely(at_version, key);
    if (guess.words[0] != nobody) [[likely]]
      return guess;
    for (std::size_t i = 0; i < slots; ++i) {
      const search_result other = look_at(i, at_version, key);
      if (other.words[0] != nobody) return other;
    }
    return {};
  }
  /// The same, but what is there may be missed: which entry it is cannot be predicted, and a wrong
  /// guess would wait for memory before the search for the next block begins. It is chosen without a
  /// branch, by what hardly ever errs.
  [[nodiscard]] search_result likely(std::uint32_t at_version,
                                     const block_key& key) const noexcept {
    const bool is_second = entries[1].low.load(std::memory_order_relaxed) == key.low;
    return look_at(is_second ? 1 : 0, at_version, key);
  }

 private:
  /// The loads are in this order, each acquires: the group first, since an entry without one is
  /// being written; the version again last. What was told of the blocks before was true when the
  /// group was read, or later.
  [[nodiscard]] search_result look_at(std::size_t i, std::uint32_t at_version,
                                      const block_key& key) const noexcept {
    const std::uint32_t block = words[i][0].load(std::memory_order_acquire);
    const std::uint64_t low = entries[i].low.load(std::memory_order_acquire) ^ key.low;
    const std::uint64_t high = entries[i].high.load(std::memory_order_acquire) ^ key.high;
    if ((low | high) != 0 || block == nobody) return {};
    const std::uint32_t before = words[i][1].load(std::memory_order_acquire);
    const std::uint32_t before_that = words[i][2].load(std::memory_order_acquire);
    const std::uint32_t after = version.load(std::memory_order_relaxed);
    return {{block, before, before_that}, at_version != after};
  }
};
static_assert(sizeof(prefix_bucket) == 64);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace pulseinfer::detail
