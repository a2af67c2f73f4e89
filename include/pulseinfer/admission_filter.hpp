// SPDX-License-Identifier: Apache-2.0
/// @file
/// What is worth storing: a filter against blocks that nobody asks for twice.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/ghost_keys.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Keeps nothing out.
struct admit_all {
  [[nodiscard]] bool admit(std::uint64_t) noexcept { return true; }
};
static_assert(admission_filter<admit_all>);

/// Admits a key from its second sight on: what is seen once only is not stored, and moves no bytes.
/// A first sight is remembered for the next `window` first sights of other keys at least, and for
/// fewer than twice as many; after that it is forgotten, and the next one is a first again.
///
/// Two Bloom filters take turns: one fills while the one before it still answers. A key that was
/// never seen is admitted once in a thousand times or less; one that was seen within the window is
/// always. 8 to 16 bytes for each key of the window.
///
/// A store asks it (`block_store<Backend, Policy, reuse_filter>`); or it stands in front of one: ask it
/// once a request for each block that could be offloaded, and offload those that it admits.
///
/// @par Threads  one at a time
/// @see Einziger, Friedman, Manes: "TinyLFU: a highly efficient cache admission policy", ACM ToS
///      13(4), 2017, for the doorkeeper
class reuse_filter {
 public:
  /// @param window  for how many distinct keys one is remembered: a few times what a store holds
  /// @throws std::invalid_argument  if it is not 1 to 2^30
  explicit reuse_filter(std::int64_t window) : window_(checked(window)) {
    const auto words = static_cast<std::size_t>(window) * bits_a_key / 64 + 1;
    for (auto& filter : filters_) filter.assign(std::bit_ceil(words), 0);
  }

  [[nodiscard]] std::int64_t window() const noexcept { return window_; }

  /// A sight of a key. @return true if it was seen before; the key 0, which names nothing, always
  /// @par Cost  O(1), on average over a window; no allocation
  [[nodiscard]] bool admit(std::uint64_t key) noexcept {
    if (key == 0) return true;
    const std::uint64_t hash = detail::mixed(key);
    const std::size_t word = static_cast<std::size_t>(hash >> 32) & (filters_[0].size() - 1);
    std::uint64_t mask = 0;
    for (int i = 0; i < bits_set; ++i) mask |= std::uint64_t{1} << (hash >> (6 * i) & 63);
    for (const auto& filter : filters_) {
      if ((filter[word] & mask) == mask) return true;
    }
    if (first_sights_ == window_) {
      std::swap(filters_[0], filters_[1]);
      std::fill(filters_[0].begin(), filters_[0].end(), 0);
      first_sights_ = 0;
    }
    filters_[0][word] |= mask;
    ++first_sights_;
    return false;
  }

 private:
  static constexpr std::size_t bits_a_key = 32;
  static constexpr int bits_set = 5;  ///< all in one word, so that a sight reads one line a filter

  [[nodiscard]] static std::int64_t checked(std::int64_t window) {
    detail::expects(window >= 1 && window <= std::int64_t{1} << 30, "reuse_filter: window is ",
                    window, ", expected 1 to ", std::int64_t{1} << 30);
    return window;
  }

  std::int64_t window_;
  std::int64_t first_sights_ = 0;          ///< in the filter that fills
  std::vector<std::uint64_t> filters_[2];  ///< the one that fills, and the one before it
};
static_assert(admission_filter<reuse_filter>);

}  // namespace pulseinfer
