// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which blocks of its sequences a store does not take in.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/admission_filter.hpp"
#include "pulseinfer/block_key.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/store_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// What a filter has said of the blocks of each sequence: a bit for each that is kept out. Without
/// a filter it is nothing, and nothing is kept out.
///
/// @par Threads  one at a time, under the store's lock
template <admission_filter Filter>
class store_admission {
 public:
  static constexpr bool is_needed = !std::same_as<Filter, admit_all>;

  store_admission(Filter filter, const block_store_options& options)
      : filter_(std::move(filter)),
        words_(is_needed ? (static_cast<std::size_t>(options.max_blocks) + 63) / 64 : 0),
        refused_(words_ * static_cast<std::size_t>(options.max_sequences)) {}

  [[nodiscard]] std::int64_t bytes() const noexcept {
    return static_cast<std::int64_t>(refused_.capacity() * sizeof(std::uint64_t));
  }
  [[nodiscard]] bool is_refused(std::int32_t sequence, std::int32_t position) const noexcept {
    if constexpr (is_needed) {
      return (word(sequence, position) >> (position % 64) & 1) != 0;
    } else {
      return false;
    }
  }
  /// Asks about blocks first, first + 1, ... of a sequence, by their names.
  void ask(std::int32_t sequence, std::int32_t first, std::span<const block_key> keys) {
    if constexpr (is_needed) {
      for (const block_key& key : keys) {
        // As policies are told of it: 0 would be nobody's name.
        if (!filter_.admit(key.low | 1)) word(sequence, first) |= std::uint64_t{1} << (first % 64);
        ++first;
      }
    }
  }
  /// A sequence begins with the first blocks of another one.
  void share(std::int32_t parent, std::int32_t child, std::int32_t blocks) noexcept {
    if constexpr (is_needed) {
      std::copy_n(row(parent), words_, row(child));
      forget(child, blocks);
    }
  }
  /// What was said of a sequence from a block on is over.
  void forget(std::int32_t sequence, std::int32_t first) noexcept {
    if constexpr (is_needed) {
      auto w = static_cast<std::size_t>(first) / 64;
      if (w == words_) return;
      row(sequence)[w] &= (std::uint64_t{1} << (first % 64)) - 1;
      std::fill(row(sequence) + w + 1, row(sequence) + words_, 0);
    }
  }

 private:
  [[nodiscard]] std::uint64_t* row(std::int32_t sequence) noexcept {
    return refused_.data() + static_cast<std::size_t>(sequence) * words_;
  }
  [[nodiscard]] std::uint64_t& word(std::int32_t sequence, std::int32_t position) noexcept {
    return row(sequence)[position / 64];
  }
  [[nodiscard]] std::uint64_t word(std::int32_t sequence, std::int32_t position) const noexcept {
    return refused_[static_cast<std::size_t>(sequence) * words_ +
                    static_cast<std::size_t>(position / 64)];
  }

  Filter filter_;
  std::size_t words_;                   ///< of a sequence
  std::vector<std::uint64_t> refused_;  ///< [sequences, words]
};

}  // namespace pulseinfer::detail
