// SPDX-License-Identifier: Apache-2.0
/// @file
/// The segmented order against two lists that are searched.
#include "pulseinfer/eviction_slru.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "conformance/eviction.hpp"
#include "support/eviction_model.hpp"
#include "support/rounds.hpp"

namespace {

using namespace eviction_test;
using pulseinfer::slru;

class naive_slru {
 public:
  explicit naive_slru(std::size_t limit) : limit_(limit) {}
  void insert(std::int32_t group, const eviction_entry&) { on_probation_.push_back(group); }
  void touch(std::int32_t group) {
    erase(group);
    protected_.push_back(group);
    if (protected_.size() <= limit_) return;
    on_probation_.push_back(protected_.front());
    protected_.erase(protected_.begin());
  }
  void erase(std::int32_t group) { take(on_probation_, group) || take(protected_, group); }
  void evict(std::int32_t group) { erase(group); }
  [[nodiscard]] std::int32_t victim(const std::vector<bool>& allowed) const {
    const std::int32_t group = first_of(on_probation_, allowed);
    return group >= 0 ? group : first_of(protected_, allowed);
  }

 private:
  std::size_t limit_;
  std::vector<std::int32_t> on_probation_;
  std::vector<std::int32_t> protected_;
};

}  // namespace

TEST_CASE("slru: keeps what every policy keeps") {
  conformance::check_eviction_policy<slru>();
}

TEST_CASE("slru: what is new goes before what was used again, however old that is") {
  slru policy(5, 3);
  for (const std::int32_t group : {0, 1, 2, 3, 4}) policy.insert(group, {});
  for (const std::int32_t group : {1, 0, 2}) policy.touch(group);
  CHECK(order_of(policy) == std::vector<std::int32_t>{3, 4, 1, 0, 2});
  policy.touch(4);  // 1 has to make room, and is the last of those on probation
  CHECK(order_of(policy) == std::vector<std::int32_t>{3, 1, 0, 2, 4});
}

TEST_CASE("slru: with nobody protected, and with everybody") {
  slru plain(3, 0);
  for (const std::int32_t group : {0, 1, 2}) plain.insert(group, {});
  plain.touch(0);
  plain.touch(1);
  CHECK(order_of(plain) == std::vector<std::int32_t>{2, 0, 1});
  slru all(3, 3);
  for (const std::int32_t group : {0, 1, 2}) all.insert(group, {});
  for (const std::int32_t group : {2, 1, 0}) all.touch(group);
  CHECK(order_of(all) == std::vector<std::int32_t>{2, 1, 0});
}

TEST_CASE("slru: random operations keep the order of searched lists") {
  for (const std::int32_t capacity : {1, 2, 5, 17}) {
    for (const std::int32_t limit : {0, capacity / 2, capacity - capacity / 5}) {
      CAPTURE(capacity);
      CAPTURE(limit);
      CHECK(differences(slru(capacity, limit), naive_slru(static_cast<std::size_t>(limit)),
                        static_cast<std::uint64_t>(capacity + limit),
                        test::rounds(15'000, 1'500'000), few_keys{40}) == 0);
    }
  }
  CHECK(differences(slru(20), naive_slru(16), 3, test::rounds(10'000, 1'000'000), few_keys{40}) ==
        0);
}

TEST_CASE("slru: a share that is none is refused") {
  CHECK_THROWS_WITH_AS(slru(4, 5), "slru: protected_groups is 5, expected 0 to 4",
                       std::invalid_argument);
  CHECK_THROWS_AS(slru(4, -1), std::invalid_argument);
}
