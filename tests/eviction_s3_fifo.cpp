// SPDX-License-Identifier: Apache-2.0
/// @file
/// S3-FIFO against three queues that are searched.
#include "pulseinfer/eviction_s3_fifo.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "conformance/eviction.hpp"
#include "support/eviction_model.hpp"
#include "support/rounds.hpp"

namespace {

using namespace eviction_test;
using pulseinfer::s3_fifo;

class naive_s3_fifo {
 public:
  naive_s3_fifo(std::size_t capacity, std::size_t small)
      : small_limit_(small), ghost_limit_(capacity - small), states_(capacity) {}
  void insert(std::int32_t group, const eviction_entry& entry) {
    state(group) = {entry.key, 0};
    (entry.key != 0 && take(ghosts_, entry.key) ? main_ : small_).push_back(group);
  }
  void touch(std::int32_t group) { state(group).uses = std::min(3, state(group).uses + 1); }
  void erase(std::int32_t group) { take(small_, group) || take(main_, group); }
  void evict(std::int32_t group) {
    const bool was_small = take(small_, group);
    take(main_, group);
    const std::uint64_t key = state(group).key;
    if (!was_small || key == 0) return;
    take(ghosts_, key);
    ghosts_.push_back(key);
    if (ghosts_.size() > ghost_limit_) ghosts_.erase(ghosts_.begin());
  }
  [[nodiscard]] std::int32_t victim(const std::vector<bool>& allowed) {
    while (true) {
      std::int32_t from_small = first_of(small_, allowed);
      const std::int32_t from_main = first_of(main_, allowed);
      if (from_small < 0 && from_main < 0) return -1;
      const bool small_is_due = !small_.empty() && small_.size() >= small_limit_;
      if (from_main < 0 || (small_is_due && from_small >= 0)) {
        if (state(from_small).uses < 2) return from_small;
        take(small_, from_small);
        main_.push_back(from_small);
        state(from_small).uses = 0;
      } else {
        if (state(from_main).uses == 0) return from_main;
        --state(from_main).uses;
        take(main_, from_main);
        main_.push_back(from_main);
      }
    }
  }

 private:
  struct known {
    std::uint64_t key = 0;
    int uses = 0;
  };
  known& state(std::int32_t group) { return states_[static_cast<std::size_t>(group)]; }

  std::size_t small_limit_;
  std::size_t ghost_limit_;
  std::vector<std::int32_t> small_, main_;  // first in first
  std::vector<std::uint64_t> ghosts_;
  std::vector<known> states_;
};

}  // namespace

TEST_CASE("s3_fifo: keeps what every policy keeps") {
  conformance::check_eviction_policy<s3_fifo>();
}

TEST_CASE("s3_fifo: two uses carry a group into the main queue, a remembered key too") {
  s3_fifo policy(4, 2);
  for (const std::int32_t group : {0, 1, 2, 3}) {
    policy.insert(group, {.key = static_cast<std::uint64_t>(group + 1)});
  }
  policy.touch(0);
  policy.touch(0);
  policy.touch(1);
  REQUIRE(policy.victim(any) == 1);  // 0 has moved on; one use is not enough
  policy.evict(1);
  policy.insert(1, {.key = 9});
  REQUIRE(policy.victim(any) == 2);
  policy.evict(2);
  policy.insert(2, {.key = 2});  // what 1 was
  // Small: 3, 1; main: 0, 2. The small queue gives up while it has two.
  CHECK(order_of(policy) == std::vector<std::int32_t>{3, 0, 2, 1});
}

TEST_CASE("s3_fifo: in the main queue each use is one more round, up to three") {
  s3_fifo policy(3, 0);
  for (const std::int32_t group : {0, 1, 2}) {
    policy.insert(group, {});
    policy.touch(group);
    policy.touch(group);
  }
  // All move on. From here on uses count for rounds.
  REQUIRE(policy.victim(any) == 0);
  for (int i = 0; i < 100; ++i) policy.touch(0);  // a hundred uses are three
  for (int i = 0; i < 3; ++i) policy.touch(1);
  CHECK(order_of(policy) == std::vector<std::int32_t>{2, 0, 1});
}

TEST_CASE("s3_fifo: random operations keep the order of searched queues") {
  for (const std::int32_t capacity : {1, 2, 5, 17}) {
    for (const std::int32_t small : {0, 1, capacity / 2, capacity}) {
      CAPTURE(capacity);
      CAPTURE(small);
      CHECK(differences(
                s3_fifo(capacity, small),
                naive_s3_fifo(static_cast<std::size_t>(capacity), static_cast<std::size_t>(small)),
                static_cast<std::uint64_t>(capacity + small), test::rounds(10'000, 1'000'000),
                few_keys{static_cast<std::uint64_t>(2 * capacity + 2)}) == 0);
    }
  }
  CHECK(differences(s3_fifo(30), naive_s3_fifo(30, 3), 3, test::rounds(10'000, 1'000'000),
                    few_keys{60}) == 0);
}

TEST_CASE("s3_fifo: who is refused is asked about once") {
  s3_fifo policy(200, 0);
  for (std::int32_t group = 0; group < 200; ++group) {
    policy.insert(group, {});
    for (int i = 0; i < 2; ++i) policy.touch(group);
  }
  int asked = 0;
  const auto late = [&asked](std::int32_t group) { return ++asked, group >= 100; };
  CHECK(policy.victim(late) == 100);
  CHECK(asked <= 100 + 2 * 100 + 1);
}

TEST_CASE("s3_fifo: a small queue that is none is refused") {
  CHECK_THROWS_WITH_AS(s3_fifo(4, 5), "s3_fifo: small_groups is 5, expected 0 to 4",
                       std::invalid_argument);
  CHECK_THROWS_AS(s3_fifo(4, -1), std::invalid_argument);
}
