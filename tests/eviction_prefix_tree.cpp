// SPDX-License-Identifier: Apache-2.0
/// @file
/// Leaves first: against a tree whose nodes are searched.
#include "pulseinfer/eviction_prefix_tree.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "conformance/eviction.hpp"
#include "pulseinfer/detail/random.hpp"
#include "support/eviction_model.hpp"
#include "support/rounds.hpp"

namespace {

using namespace eviction_test;
using pulseinfer::prefix_tree_lru;

class naive_tree {
 public:
  explicit naive_tree(std::size_t capacity) : nodes_(capacity) {}
  void insert(std::int32_t group, const eviction_entry& entry) {
    at(group) = {true, false, entry.parent, ++latest_};
  }
  void touch(std::int32_t group) {
    at(group).last_use = ++latest_;
    at(group).passed = false;
  }
  void erase(std::int32_t group) {
    at(group).in = false;
    for (node& n : nodes_) {
      if (n.in && n.parent == group) n.parent = -1;
    }
    const std::int32_t parent = at(group).parent;
    if (parent < 0 || has_children(parent) || !at(parent).in || !at(parent).passed) return;
    at(parent).passed = false;
    at(parent).last_use = --earliest_;
  }
  void evict(std::int32_t group) { erase(group); }
  [[nodiscard]] std::int32_t victim(const std::vector<bool>& allowed) {
    std::vector<std::int32_t> order;
    for (std::int32_t g = 0; g < static_cast<std::int32_t>(nodes_.size()); ++g) {
      if (at(g).in && !at(g).passed && allowed[static_cast<std::size_t>(g)]) order.push_back(g);
    }
    std::sort(order.begin(), order.end(),
              [this](std::int32_t a, std::int32_t b) { return at(a).last_use < at(b).last_use; });
    for (const std::int32_t group : order) {
      if (!has_children(group)) return group;
      at(group).passed = true;
    }
    return -1;
  }
  [[nodiscard]] bool has_children(std::int32_t group) const {
    return std::any_of(nodes_.begin(), nodes_.end(),
                       [&](const node& n) { return n.in && n.parent == group; });
  }

 private:
  struct node {
    bool in = false;
    bool passed = false;  // by a search, since its last use
    std::int32_t parent = -1;
    std::int64_t last_use = 0;
  };
  node& at(std::int32_t group) { return nodes_[static_cast<std::size_t>(group)]; }
  std::vector<node> nodes_;
  std::int64_t latest_ = 0;
  std::int64_t earliest_ = 0;
};

/// Chain of groups 0, 1, ...: each is the parent of the next.
void insert_chain(prefix_tree_lru& policy, std::int32_t first, std::int32_t count) {
  for (std::int32_t i = 0; i < count; ++i) {
    policy.insert(first + i, {.parent = i == 0 ? -1 : first + i - 1});
  }
}

}  // namespace

TEST_CASE("prefix_tree_lru: keeps what every policy keeps") {
  conformance::check_eviction_policy<prefix_tree_lru>();
}

TEST_CASE("prefix_tree_lru: the tail of a chain goes first, whatever was used last") {
  prefix_tree_lru policy(4);
  insert_chain(policy, 0, 4);
  policy.touch(3);
  policy.touch(2);
  CHECK(order_of(policy) == std::vector<std::int32_t>{3, 2, 1, 0});
}

TEST_CASE("prefix_tree_lru: of two chains that share a head the one used longer ago goes first") {
  prefix_tree_lru policy(7);
  insert_chain(policy, 0, 2);
  policy.insert(2, {.parent = 1});
  policy.insert(3, {.parent = 2});
  policy.insert(4, {.parent = 1});
  policy.insert(5, {.parent = 4});
  for (const std::int32_t group : {0, 1, 2, 3}) policy.touch(group);
  CHECK(order_of(policy) == std::vector<std::int32_t>{5, 4, 3, 2, 1, 0});
}

TEST_CASE("prefix_tree_lru: who becomes a leaf is as recent as its own last use") {
  prefix_tree_lru policy(6);
  insert_chain(policy, 0, 2);
  policy.insert(5, {});
  policy.touch(0);  // a request that used the head only, after 5
  REQUIRE(policy.victim(any) == 1);
  policy.evict(1);
  CHECK(order_of(policy) == std::vector<std::int32_t>{5, 0});
}

TEST_CASE("prefix_tree_lru: a parent that leaves makes its children roots") {
  prefix_tree_lru policy(4);
  insert_chain(policy, 0, 3);
  policy.erase(1);
  policy.insert(1, {});                                           // another block in its place
  CHECK(order_of(policy) == std::vector<std::int32_t>{0, 2, 1});  // 1 has no child
  policy.erase(2);
  policy.erase(1);
  CHECK(order_of(policy) == std::vector<std::int32_t>{0});
}

TEST_CASE("prefix_tree_lru: while all leaves are refused nothing goes") {
  prefix_tree_lru policy(4);
  insert_chain(policy, 0, 4);
  const auto not_the_tail = [](std::int32_t group) { return group != 3; };
  CHECK(policy.victim(not_the_tail) == -1);
  CHECK(policy.victim(not_the_tail) == -1);
  CHECK(policy.victim(any) == 3);
  policy.evict(3);
  CHECK(policy.victim(not_the_tail) == 2);
}

TEST_CASE("fault 4: transfers of a chain that end in any order leave its tail the next victim") {
  std::vector<std::int32_t> ends = {0, 1, 2, 3};
  do {
    prefix_tree_lru policy(8);
    policy.insert(7, {});
    for (const std::int32_t group : ends) policy.insert(group, {.parent = group - 1});
    policy.touch(7);
    CHECK(order_of(policy) == std::vector<std::int32_t>{3, 2, 1, 0, 7});
    for (const std::int32_t group : ends) policy.touch(group);  // used in that order as well
    policy.evict(7);
    CHECK(order_of(policy) == std::vector<std::int32_t>{3, 2, 1, 0});
  } while (std::next_permutation(ends.begin(), ends.end()));
}

TEST_CASE("prefix_tree_lru: random trees, and never a block before its children") {
  for (const std::int32_t capacity : {1, 2, 5, 17}) {
    CAPTURE(capacity);
    // Parents of lower index, there or not, so that there is no ring.
    const auto entry = [](pulseinfer::detail::random_source& draw, std::int32_t group) {
      const auto below = static_cast<std::uint64_t>(group) + 1;
      return eviction_entry{.parent = static_cast<std::int32_t>(draw.below(below)) - 1};
    };
    CHECK(differences(prefix_tree_lru(capacity), naive_tree(static_cast<std::size_t>(capacity)),
                      static_cast<std::uint64_t>(capacity), test::rounds(30'000, 3'000'000),
                      entry) == 0);
  }
}

TEST_CASE("prefix_tree_lru: a search passes an inner block once after each of its uses") {
  prefix_tree_lru policy(1'000);
  insert_chain(policy, 0, 1'000);
  std::int64_t asked = 0;
  for (std::int32_t tail = 999; tail >= 0; --tail) {
    const auto count = [&asked](std::int32_t) { return ++asked, true; };
    REQUIRE(policy.victim(count) == tail);
    policy.evict(tail);
  }
  CHECK(asked <= 2'000);
}

TEST_CASE("prefix_tree_lru: a parent that is none is refused, and nothing has changed") {
  prefix_tree_lru policy(4);
  policy.insert(0, {});
  CHECK_THROWS_WITH_AS(policy.insert(1, {.parent = 4}),
                       "prefix_tree_lru: parent is 4, expected -1 to 3", std::out_of_range);
  CHECK_THROWS_AS(policy.insert(1, {.parent = -2}), std::out_of_range);
  CHECK_THROWS_WITH_AS(policy.insert(1, {.parent = 1}),
                       "prefix_tree_lru: group 1 is its own parent", std::logic_error);
  CHECK_THROWS_AS(policy.insert(0, {.parent = 1}), std::logic_error);
  CHECK(!policy.contains(1));
  policy.insert(1, {});
  CHECK(order_of(policy) == std::vector<std::int32_t>{0, 1});
}
