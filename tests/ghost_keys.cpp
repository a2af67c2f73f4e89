// SPDX-License-Identifier: Apache-2.0
/// @file
/// What policies remember, against a list that is searched.
#include "pulseinfer/detail/ghost_keys.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"
#include "support/rounds.hpp"

namespace {

using ghosts = pulseinfer::detail::ghost_keys<std::int32_t>;

class naive_ghosts {
 public:
  explicit naive_ghosts(std::size_t capacity) : capacity_(capacity) {}
  std::optional<std::int32_t> push(std::uint64_t key, std::int32_t note) {
    if (key == 0 || capacity_ == 0) return std::nullopt;
    std::optional<std::int32_t> forgotten = take(key);
    if (known_.size() == capacity_) forgotten = pop();
    known_.push_back({key, note});
    return forgotten;
  }
  std::optional<std::int32_t> take(std::uint64_t key) {
    for (std::size_t i = 0; i < known_.size(); ++i) {
      if (known_[i].first != key) continue;
      const std::int32_t note = known_[i].second;
      known_.erase(known_.begin() + static_cast<std::ptrdiff_t>(i));
      return note;
    }
    return std::nullopt;
  }
  std::optional<std::int32_t> pop() {
    return known_.empty() ? std::nullopt : take(known_.front().first);
  }
  [[nodiscard]] std::size_t size() const { return known_.size(); }

 private:
  std::size_t capacity_;
  std::vector<std::pair<std::uint64_t, std::int32_t>> known_;
};

}  // namespace

TEST_CASE("ghost_keys: random calls keep the order of a searched list, and allocate nothing") {
  for (const std::int32_t capacity : {0, 1, 2, 7, 8, 50}) {
    for (const std::uint64_t stride :
         {std::uint64_t{1}, std::uint64_t{1} << 32, ~std::uint64_t{}}) {
      CAPTURE(capacity);
      CAPTURE(stride);
      ghosts tested(capacity);
      naive_ghosts model(static_cast<std::size_t>(capacity));
      pulseinfer::detail::random_source draw(static_cast<std::uint64_t>(capacity) + stride);
      std::int64_t differences = 0;
      std::uint64_t allocated = 0;
      for (int i = 0; i < test::rounds(10'000, 1'000'000); ++i) {
        const std::uint64_t key = draw.below(3 * static_cast<std::uint64_t>(capacity) + 2) * stride;
        const std::uint64_t what = draw.below(8);
        const std::uint64_t before = test::allocations();
        const auto got = what == 0  ? tested.pop()
                         : what < 3 ? tested.take(key)
                                    : tested.push(key, i);
        allocated += test::allocations() - before;
        const auto wanted = what == 0  ? model.pop()
                            : what < 3 ? model.take(key)
                                       : model.push(key, i);
        if (got != wanted) ++differences;
        if (static_cast<std::size_t>(tested.size()) != model.size()) ++differences;
      }
      CHECK(differences == 0);
      CHECK(allocated == 0);
    }
  }
}

TEST_CASE("ghost_keys: a share of a capacity fits an index") {
  CHECK(pulseinfer::detail::times(4, 10) == 40);
  CHECK(pulseinfer::detail::times(4, std::numeric_limits<std::int32_t>::max()) == (1 << 30) - 1);
}
