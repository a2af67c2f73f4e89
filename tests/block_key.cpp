// SPDX-License-Identifier: Apache-2.0
/// @file
/// Names of blocks: what they depend on, that they stay, and how well they are mixed.
#include "pulseinfer/block_key.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <span>
#include <stdexcept>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "support/allocations.hpp"
#include "support/rounds.hpp"

namespace {

using pulseinfer::block_key;
using pulseinfer::block_keys;
using pulseinfer::chained_key;
using pulseinfer::extended_key;
using pulseinfer::root_key;
using pulseinfer::token_id;
using pulseinfer::detail::random_source;
using tokens = std::vector<token_id>;

/// The prompt's keys.
std::vector<block_key> keys_of(block_key root, const tokens& prompt, std::int32_t block_tokens) {
  std::vector<block_key> keys(prompt.size() / static_cast<std::size_t>(block_tokens));
  CHECK(block_keys(root, prompt, block_tokens, keys) == keys.size());
  return keys;
}

tokens random_tokens(random_source& draw, std::size_t count) {
  tokens all(count);
  for (token_id& t : all) t = static_cast<token_id>(draw.below(128'000));
  return all;
}

/// Keys of which no two may be alike, and no two halves either: among 2^21 random words two are
/// with a probability of 2^-23.
class distinct_keys {
 public:
  void add(block_key key) { keys_.push_back(key); }
  [[nodiscard]] std::size_t size() const { return keys_.size(); }
  [[nodiscard]] bool hold() const {
    std::vector<std::uint64_t> low, high;
    for (const block_key& key : keys_) {
      low.push_back(key.low);
      high.push_back(key.high);
    }
    return all_differ(low) && all_differ(high);
  }
  /// Whether no 12 bits, at either end of either half, have one value far more often than they
  /// should: seven deviations, which in 16,384 counts nobody meets.
  [[nodiscard]] bool are_spread() const {
    const double mean = static_cast<double>(keys_.size()) / 4096;
    for (const int shift : {0, 52, 64, 116}) {
      std::vector<std::int64_t> counts(4096, 0);
      for (const block_key& key : keys_) {
        ++counts[(shift < 64 ? key.low >> shift : key.high >> (shift - 64)) & 4095];
      }
      const auto most = static_cast<double>(*std::max_element(counts.begin(), counts.end()));
      if (most > mean + 7 * std::sqrt(mean)) return false;
    }
    return true;
  }

 private:
  [[nodiscard]] static bool all_differ(std::vector<std::uint64_t>& words) {
    std::sort(words.begin(), words.end());
    return std::adjacent_find(words.begin(), words.end()) == words.end();
  }

  std::vector<block_key> keys_;
};

}  // namespace

TEST_CASE("block_key: the names are these, on every machine and in every version") {
  const tokens prompt{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, -1, 2147483647};
  const std::uint64_t extra[] = {3, 5};
  CHECK(root_key(0) == block_key{0x1fc2374d61c2a90bu, 0x9500893748ee7f56u});
  CHECK(root_key(42) == block_key{0xf524307ddd255b8au, 0xd1140141256dce23u});
  CHECK(root_key(42, extra) == block_key{0xfae5e93a45103e9bu, 0x8f8b0967fb218088u});
  CHECK(extended_key(root_key(42), {}) == block_key{0xa29d06e04167455du, 0x030fb1599bbce63au});
  CHECK(chained_key(root_key(42), {}) == block_key{0x7699b479d662495bu, 0x4a86aedee1907e7bu});
  CHECK(chained_key(root_key(42), prompt) == block_key{0xba1777969a34ddd8u, 0x5875f08ccb72e635u});
  CHECK(keys_of(root_key(42), prompt, 4) ==
        std::vector<block_key>{{0xe8ba16e42d78bf3au, 0x8cacda62d369dbcdu},
                               {0x9baeb715ecac8b01u, 0xe3168f5f5c570e9cu},
                               {0x0efd5f20b0829044u, 0x91d629ef1507aa33u}});
  CHECK(keys_of(root_key(42), prompt, 3).back() ==
        block_key{0x343e8ec59fa3b9acu, 0x92356ca28af667ffu});
}

TEST_CASE("block_key: a constant expression has the same value") {
  static constexpr token_id prompt[] = {7, -7, 7, 8, 9};
  constexpr block_key key = chained_key(root_key(1), prompt);
  CHECK(key == chained_key(root_key(1), tokens{7, -7, 7, 8, 9}));
}

TEST_CASE("block_key: a product of halves is that of the machine's wide words") {
  random_source draw(1);
  for (int i = 0; i < 10'000; ++i) {
    const auto edge = [&draw] {
      const std::uint64_t word = draw.next();
      return draw.one_in(4)   ? word | 0xffffffff00000000u
             : draw.one_in(3) ? word | 0xffffffffu
                              : word;
    };
    const std::uint64_t a = edge();
    const std::uint64_t b = edge();
    const block_key product = pulseinfer::detail::product_by_halves(a, b);
    REQUIRE((product.low ^ product.high) == pulseinfer::detail::folded_product(a, b));
    REQUIRE(product.low == a * b);
  }
}

TEST_CASE("block_key: full blocks have names, what is left over has none") {
  random_source draw(2);
  const block_key root = root_key(9);
  const tokens prompt = random_tokens(draw, 50);
  const std::vector<block_key> keys = keys_of(root, prompt, 16);
  REQUIRE(keys.size() == 3);
  block_key parent = root;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    parent = chained_key(parent, std::span(prompt).subspan(16 * i, 16));
    CHECK(keys[i] == parent);
  }
  CHECK(keys_of(root, {}, 16).empty());
  CHECK(keys_of(root, tokens(prompt.begin(), prompt.begin() + 15), 16).empty());
  CHECK(keys_of(root, tokens(prompt.begin(), prompt.begin() + 16), 16).size() == 1);
  CHECK(keys_of(root, prompt, 51).empty());

  // One goes on from the last key as from a root.
  std::array<block_key, 2> more{};
  CHECK(block_keys(keys[0], std::span(prompt).subspan(16), 16, more) == 2);
  CHECK(more[0] == keys[1]);
  CHECK(more[1] == keys[2]);
}

TEST_CASE("block_key: what is written is what is returned, and bad sizes are named") {
  const block_key mark{1, 2};
  std::array<block_key, 4> keys{mark, mark, mark, mark};
  const tokens prompt(12, 5);
  CHECK(block_keys(root_key(0), prompt, 4, keys) == 3);
  CHECK(keys[3] == mark);
  keys.fill(mark);
  CHECK_THROWS_WITH_AS((void)block_keys(root_key(0), prompt, 0, keys),
                       "block_keys: block_tokens is 0, expected at least 1", std::invalid_argument);
  CHECK_THROWS_WITH_AS((void)block_keys(root_key(0), prompt, 4, std::span(keys).first(2)),
                       "block_keys: room for 2 keys, expected at least 3: one for each full block",
                       std::invalid_argument);
  CHECK(keys == std::array<block_key, 4>{mark, mark, mark, mark});
}

TEST_CASE("block_key: tenants share no name") {
  random_source draw(3);
  std::vector<block_key> all;
  const tokens prompt = random_tokens(draw, 64);
  for (std::uint64_t salt = 0; salt < 4096; ++salt) {
    // Salts that differ in one bit, and some that count.
    const std::uint64_t of_tenant = salt < 64 ? std::uint64_t{1} << salt : salt;
    const std::vector<block_key> keys = keys_of(root_key(of_tenant), prompt, 16);
    if (salt >= 64 && std::has_single_bit(salt)) continue;  // a tenant that was there
    all.insert(all.end(), keys.begin(), keys.end());
    CHECK(keys == keys_of(root_key(of_tenant), prompt, 16));
  }
  std::sort(all.begin(), all.end());
  CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
}

TEST_CASE("block_key: what is extra makes other keys, in its order and its number") {
  const std::uint64_t words[] = {1, 2, 0, 0};
  const std::uint64_t swapped[] = {2, 1};
  const std::span<const std::uint64_t> extra(words);
  distinct_keys keys;
  for (std::size_t i = 0; i <= 4; ++i) keys.add(root_key(5, extra.first(i)));
  keys.add(root_key(5, swapped));
  keys.add(root_key(5, extra.subspan(2, 1)));
  keys.add(root_key(5, extra.subspan(2, 2)));
  keys.add(root_key(0));
  keys.add(root_key(1));
  keys.add(extended_key(root_key(5), {}));
  const token_id as_tokens[] = {1, 0, 2, 0};
  keys.add(chained_key(root_key(5), as_tokens));
  keys.add(chained_key(root_key(5), {}));
  CHECK(keys.hold());
  CHECK(root_key(5, extra) == extended_key(root_key(5), extra));
}

TEST_CASE("block_key: one bit of the input changes each bit of the key half of the time") {
  const int trials = test::rounds(4096, 65536);
  constexpr std::size_t count = 16;
  random_source draw(4);
  // [input bit, output bit]: of the tokens, then of the parent.
  std::vector<std::array<int, 128>> flips(32 * count + 128);
  for (int trial = 0; trial < trials; ++trial) {
    // Small tokens: what engines have, and the hardest for products.
    tokens block = random_tokens(draw, count);
    const block_key parent{draw.next(), draw.next()};
    const block_key key = chained_key(parent, block);
    for (std::size_t bit = 0; bit < flips.size(); ++bit) {
      block_key other = parent;
      const std::size_t of_parent = bit - 32 * count;
      auto& word = reinterpret_cast<std::uint32_t&>(block[bit / 32 % count]);
      if (bit < 32 * count) word ^= std::uint32_t{1} << bit % 32;
      if (bit >= 32 * count) {
        (of_parent < 64 ? other.low : other.high) ^= std::uint64_t{1} << of_parent % 64;
      }
      const block_key changed = chained_key(other, block);
      if (bit < 32 * count) word ^= std::uint32_t{1} << bit % 32;
      for (std::size_t i = 0; i < 128; ++i) {
        const std::uint64_t difference = i < 64 ? key.low ^ changed.low : key.high ^ changed.high;
        flips[bit][i] += static_cast<int>(difference >> i % 64 & 1);
      }
    }
  }
  // 82,000 counts of 4,096 fair coins: their deviation is 32, half the root; six of it would come
  // once in 6,000 such tables.
  const int most_off = static_cast<int>(6 * std::sqrt(trials) / 2);
  int least = trials;
  int most = 0;
  for (const auto& row : flips) {
    least = std::min(least, *std::min_element(row.begin(), row.end()));
    most = std::max(most, *std::max_element(row.begin(), row.end()));
  }
  CHECK(least > trials / 2 - most_off);
  CHECK(most < trials / 2 + most_off);
}

TEST_CASE("block_key: blocks that are much alike have nothing in common") {
  const std::int32_t size = test::rounds(1000, 3000);
  distinct_keys keys;
  const block_key root = root_key(0);
  SUBCASE("two tokens count, the others are zero") {
    tokens block(16, 0);
    for (std::int32_t i = 0; i < size; ++i) {
      for (std::int32_t j = 0; j < size; ++j) {
        block[3] = i;
        block[12] = j;
        keys.add(chained_key(root, block));
      }
    }
  }
  SUBCASE("two neighbours of one step count") {
    tokens block(4, 0);
    for (std::int32_t i = 0; i < size; ++i) {
      for (std::int32_t j = 0; j < size; ++j) {
        block[1] = i;
        block[2] = j;
        keys.add(chained_key(root, block));
      }
    }
  }
  SUBCASE("sparse: at most three bits are set, or not set, of 16 tokens") {
    for (const std::uint32_t rest : {0u, ~0u}) {
      std::array<std::uint32_t, 16> words{};
      words.fill(rest);
      const auto add = [&] { keys.add(chained_key(root, tokens(words.begin(), words.end()))); };
      const auto flip = [&](std::size_t bit) { words[bit / 32] ^= std::uint32_t{1} << bit % 32; };
      add();
      for (std::size_t i = 0; i < 512; i += 3) {
        flip(i);
        add();
        for (std::size_t j = i + 1; j < 512; j += 2) {
          flip(j);
          add();
          for (std::size_t k = j + 1; k < 512; k += 16) {
            flip(k);
            add();
            flip(k);
          }
          flip(j);
        }
        flip(i);
      }
    }
  }
  SUBCASE("equal tokens, more and more of them") {
    for (const token_id value : {0, 1, -1}) {
      const tokens run(static_cast<std::size_t>(size), value);
      for (std::size_t length = 1; length <= run.size(); ++length) {
        keys.add(chained_key(root, std::span(run).first(length)));
      }
    }
  }
  SUBCASE("chains of equal blocks do not come round") {
    const tokens block(16, 0);
    block_key key = root;
    for (std::int32_t i = 0; i < size * size; ++i) keys.add(key = chained_key(key, block));
  }
  SUBCASE("each two of a block of many tokens change places, one after the other") {
    tokens block(static_cast<std::size_t>(size));
    std::iota(block.begin(), block.end(), 0);
    keys.add(chained_key(root, block));
    for (std::size_t i = 0; i < block.size(); i += 25) {
      for (std::size_t j = i + 1; j < block.size(); j += 25) {
        std::swap(block[i], block[j]);
        keys.add(chained_key(root, block));
        std::swap(block[i], block[j]);
      }
    }
  }
  SUBCASE("a text, shifted token by token: no block of it is named as another") {
    random_source draw(5);
    const tokens text = random_tokens(draw, 2048);
    for (std::size_t shift = 0; shift < 1024; ++shift) {
      for (const block_key& key :
           keys_of(root, tokens(text.begin() + static_cast<int>(shift), text.end()), 16)) {
        keys.add(key);
      }
    }
  }
  SUBCASE("salts that count") {
    for (std::int32_t i = 0; i < size * size; ++i) {
      keys.add(root_key(static_cast<std::uint64_t>(i)));
    }
  }
  CHECK(keys.hold());
  if (keys.size() > 100'000) CHECK(keys.are_spread());
}

TEST_CASE("block_key: the block before counts, so that equal blocks of other prompts differ") {
  const tokens a{1, 1, 1, 1, 5, 6, 7, 8};
  const tokens b{1, 1, 1, 2, 5, 6, 7, 8};
  const block_key root = root_key(77);
  CHECK(keys_of(root, a, 4)[0] != keys_of(root, b, 4)[0]);
  CHECK(keys_of(root, a, 4)[1] != keys_of(root, b, 4)[1]);
  // A block of eight is not two of four, nor what four and a chain make of it.
  CHECK(keys_of(root, a, 8)[0] != keys_of(root, a, 4)[1]);
}

TEST_CASE("block_key: another hash names the blocks, and has the blocks in their order") {
  struct counted {
    std::vector<tokens>* seen;
    block_key operator()(block_key parent, std::span<const token_id> block) const {
      seen->emplace_back(block.begin(), block.end());
      return {parent.low + 1, parent.high};
    }
  };
  std::vector<tokens> seen;
  std::array<block_key, 2> keys{};
  CHECK(block_keys({10, 3}, tokens{1, 2, 3, 4, 5}, 2, keys, counted{&seen}) == 2);
  CHECK(keys == std::array<block_key, 2>{{{11, 3}, {12, 3}}});
  CHECK(seen == std::vector<tokens>{{1, 2}, {3, 4}});
}

TEST_CASE("block_key: naming allocates nothing") {
  const tokens prompt(10'000, 3);
  std::vector<block_key> keys(625);
  const std::uint64_t extra[] = {1};
  const std::uint64_t before = test::allocations();
  const std::size_t count = block_keys(root_key(1, extra), prompt, 16, keys);
  CHECK(test::allocations() == before);
  CHECK(count == 625);
}
