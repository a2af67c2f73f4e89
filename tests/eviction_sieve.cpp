// SPDX-License-Identifier: Apache-2.0
/// @file
/// SIEVE against a row of groups and a hand, as the paper draws them.
#include "pulseinfer/eviction_sieve.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "conformance/eviction.hpp"
#include "support/eviction_model.hpp"
#include "support/rounds.hpp"

namespace {

using namespace eviction_test;
using pulseinfer::sieve;

class naive_sieve {
 public:
  void insert(std::int32_t group, const eviction_entry&) { row_.push_back({group, false}); }
  void touch(std::int32_t group) { at(group)->used = true; }
  void erase(std::int32_t group) {
    const auto gap = static_cast<std::size_t>(at(group) - row_.begin());
    row_.erase(row_.begin() + static_cast<std::ptrdiff_t>(gap));
    if (hand_ > gap) --hand_;
    if (hand_ == row_.size()) hand_ = 0;
  }
  void evict(std::int32_t group) { erase(group); }
  [[nodiscard]] std::int32_t victim(const std::vector<bool>& allowed) {
    std::size_t at = hand_;
    for (std::size_t step = 0; step < 2 * row_.size(); ++step, at = (at + 1) % row_.size()) {
      if (!allowed[static_cast<std::size_t>(row_[at].group)]) continue;
      if (!row_[at].used) {
        hand_ = at;
        return row_[at].group;
      }
      row_[at].used = false;
    }
    return -1;
  }

 private:
  struct place {
    std::int32_t group;
    bool used;
  };
  std::vector<place>::iterator at(std::int32_t group) {
    return std::find_if(row_.begin(), row_.end(), [&](const place& p) { return p.group == group; });
  }
  std::vector<place> row_;  // oldest first
  std::size_t hand_ = 0;
};

}  // namespace

TEST_CASE("sieve: keeps what every policy keeps") {
  conformance::check_eviction_policy<sieve>();
}

TEST_CASE("sieve: the hand passes over what was used, and stays where it was") {
  sieve policy(7);
  for (const std::int32_t group : {0, 1, 2, 3, 4}) policy.insert(group, {});
  for (const std::int32_t group : {0, 1, 3}) policy.touch(group);
  REQUIRE(policy.victim(any) == 2);
  policy.evict(2);
  policy.touch(0);                   // behind the hand, which comes by there last
  policy.insert(5, {});              // at the end of the row
  REQUIRE(policy.victim(any) == 4);  // 3 has lost its mark
  policy.evict(4);
  REQUIRE(policy.victim(any) == 5);
  policy.evict(5);
  CHECK(order_of(policy) == std::vector<std::int32_t>{1, 3, 0});
}

TEST_CASE("sieve: who is refused keeps the mark") {
  sieve policy(3);
  for (const std::int32_t group : {0, 1, 2}) policy.insert(group, {});
  policy.touch(0);
  policy.touch(1);
  CHECK(policy.victim([](std::int32_t group) { return group == 1; }) == 1);
  // The hand is at 1, whose mark is gone; 0 has its own still.
  CHECK(order_of(policy) == std::vector<std::int32_t>{1, 2, 0});
  CHECK(policy.victim([](std::int32_t group) { return group != 1; }) == 2);
}

TEST_CASE("sieve: random operations keep the order of the drawing") {
  for (const std::int32_t capacity : {1, 2, 5, 17}) {
    CAPTURE(capacity);
    CHECK(differences(sieve(capacity), naive_sieve(), static_cast<std::uint64_t>(capacity),
                      test::rounds(40'000, 4'000'000), few_keys{40}) == 0);
  }
}
