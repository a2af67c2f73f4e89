// SPDX-License-Identifier: Apache-2.0
/// @file
/// ARC against four lists that are searched, as the paper writes them.
#include "pulseinfer/eviction_arc.hpp"

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
using pulseinfer::arc;

class naive_arc {
 public:
  explicit naive_arc(std::size_t c) : c_(c), keys_(c) {}
  void insert(std::int32_t group, const eviction_entry& entry) {
    const std::size_t b1 = b1_.size();
    const std::size_t b2 = b2_.size();
    key_of(group) = entry.key;
    if (take(b1_, entry.key)) {
      p_ = std::min(c_, p_ + (b1 >= b2 ? 1 : b2 / b1));
      t2_.push_back(group);
    } else if (take(b2_, entry.key)) {
      const std::size_t step = b2 >= b1 ? 1 : b1 / b2;
      p_ = step > p_ ? 0 : p_ - step;
      t2_.push_back(group);
    } else {
      t1_.push_back(group);
    }
    limit();
  }
  void touch(std::int32_t group) {
    erase(group);
    t2_.push_back(group);
    limit();
  }
  void erase(std::int32_t group) { take(t1_, group) || take(t2_, group); }
  void evict(std::int32_t group) {
    const std::uint64_t key = key_of(group);
    take(b1_, key);
    take(b2_, key);
    std::vector<std::uint64_t>& ghosts = take(t1_, group) ? b1_ : b2_;
    take(t2_, group);
    if (key != 0) ghosts.push_back(key);
    limit();
  }
  [[nodiscard]] std::int32_t victim(const std::vector<bool>& allowed) const {
    const bool from_t1 = t1_.size() > p_;
    const std::int32_t group = first_of(from_t1 ? t1_ : t2_, allowed);
    return group >= 0 ? group : first_of(from_t1 ? t2_ : t1_, allowed);
  }
  [[nodiscard]] std::size_t p() const { return p_; }

 private:
  std::uint64_t& key_of(std::int32_t group) { return keys_[static_cast<std::size_t>(group)]; }
  void limit() {
    while (!b1_.empty() && t1_.size() + b1_.size() > c_) b1_.erase(b1_.begin());
    while (!b2_.empty() && t1_.size() + t2_.size() + b1_.size() + b2_.size() > 2 * c_) {
      b2_.erase(b2_.begin());
    }
  }

  std::size_t c_;
  std::size_t p_ = 0;
  std::vector<std::int32_t> t1_, t2_;   // least recently used first
  std::vector<std::uint64_t> b1_, b2_;  // what was given up first first
  std::vector<std::uint64_t> keys_;
};

/// Gives up what goes first, and enters a key in its place.
void replace(arc& policy, std::uint64_t key) {
  const std::int32_t group = policy.victim(any);
  policy.evict(group);
  policy.insert(group, {.key = key});
}

}  // namespace

TEST_CASE("arc: keeps what every policy keeps") {
  conformance::check_eviction_policy<arc>();
}

TEST_CASE("arc: what comes back to a list that was too short makes it longer") {
  arc policy(4);
  for (const std::int32_t group : {0, 1, 2, 3}) {
    policy.insert(group, {.key = static_cast<std::uint64_t>(group + 1)});
  }
  policy.touch(3);     // used again: 3; once: 0, 1, 2
  replace(policy, 5);  // for key 1
  CHECK(policy.once_target() == 0);
  replace(policy, 1);  // for key 2; key 1 was used once, and is back
  CHECK(policy.once_target() == 1);
  for (int i = 0; i < 4; ++i) policy.touch(policy.victim(any));
  CHECK(policy.once_target() == 1);  // who is there moves nothing
  // What left after it was used again, and is back, makes the first list shorter.
  policy.evict(3);
  policy.insert(3, {.key = 4});
  CHECK(policy.once_target() == 0);
}

TEST_CASE("arc: what was closed or damaged is not remembered") {
  arc policy(4);
  for (const std::int32_t group : {0, 1, 2, 3}) {
    policy.insert(group, {.key = static_cast<std::uint64_t>(group + 1)});
  }
  policy.erase(0);
  policy.insert(0, {.key = 1});
  CHECK(policy.once_target() == 0);
  CHECK(order_of(policy) == std::vector<std::int32_t>{1, 2, 3, 0});  // used once, as the others
}

TEST_CASE("arc: random operations keep the order and the target of the paper's lists") {
  for (const std::int32_t capacity : {1, 2, 5, 17}) {
    for (const std::uint64_t keys : {capacity + 2, 3 * capacity + 3}) {
      CAPTURE(capacity);
      CAPTURE(keys);
      std::int64_t other_targets = 0;
      bool moved = false;
      CHECK(differences(arc(capacity), naive_arc(static_cast<std::size_t>(capacity)), keys,
                        test::rounds(20'000, 2'000'000), few_keys{keys},
                        [&](const arc& policy, const naive_arc& model, auto&) {
                          const auto target = static_cast<std::size_t>(policy.once_target());
                          if (target != model.p()) ++other_targets;
                          moved = moved || target > 0;
                        }) == 0);
      CHECK(other_targets == 0);
      CHECK(moved);
    }
  }
}
