// SPDX-License-Identifier: Apache-2.0
/// @file
/// Names of blocks by content: a chained hash of their tokens under a tenant's salt.
///
/// The name of a block stands for its tokens and for all tokens before them, for the tenant, and
/// for whatever else the keys and values of the block depend on (an adapter, an image). Prompts of
/// one tenant that begin alike give the same names to the blocks of what they have in common;
/// prompts of two tenants share no name, whatever their tokens.
///
///     block_key keys[64];
///     const std::size_t blocks = block_keys(root_key(tenant_salt), prompt, 16, keys);
///
/// @par Collisions  Equal keys are taken for equal content. Among n blocks that nobody chose for
///   their keys, two have the same one with a probability of about n^2 / 2^129: 3e-21 at 10^9
///   blocks. The default hash is not cryptographic: who knows the salt can construct blocks that
///   collide, and who does not is not proven to be unable to. So draw salts at random and keep them
///   secret; where tenants are hostile, hand `block_keys` a cryptographic hash (see there).
/// @par Stability  Keys are the same on every machine and in every version: what is hashed are the
///   values of the tokens, not the order of their bytes. tests/block_key.cpp has some by value.
/// @see M. Dietzfelbinger, Universal hashing and k-wise independent random variables via integer
///   arithmetic without primes (1996), for hashing by the product of two words
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A token as engines number it. Any value will do, negative ones too.
using token_id = std::int32_t;

/// The name of a block, 128 bits. Every bit is as good as every other.
struct block_key {
  std::uint64_t low = 0;
  std::uint64_t high = 0;
  // Written out, since nvcc's host compiler is given no body of a default one.
  friend constexpr bool operator==(const block_key& a, const block_key& b) {
    return a.low == b.low && a.high == b.high;
  }
  friend constexpr auto operator<=>(const block_key&, const block_key&) = default;
};

namespace detail {

/// The 128 bits of a product of two words, from products of their halves.
[[nodiscard]] constexpr block_key product_by_halves(std::uint64_t a, std::uint64_t b) noexcept {
  constexpr std::uint64_t half = 0xffffffffu;
  const std::uint64_t low = (a & half) * (b & half);
  const std::uint64_t middle = (a >> 32) * (b & half) + (low >> 32);
  const std::uint64_t other = (a & half) * (b >> 32) + (middle & half);
  return {other << 32 | (low & half), (a >> 32) * (b >> 32) + (middle >> 32) + (other >> 32)};
}

/// Both halves of the product of two words, by exclusive or.
[[nodiscard]] constexpr std::uint64_t folded_product(std::uint64_t a, std::uint64_t b) noexcept {
#if defined(__SIZEOF_INT128__)
  __extension__ using wide = unsigned __int128;
  const wide product = static_cast<wide>(a) * b;
  return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
#else
  const block_key product = product_by_halves(a, b);
  return product.low ^ product.high;
#endif
}

// Digits of pi: nobody chose them. The last three tell apart what is hashed.
inline constexpr std::uint64_t pi_digits[] = {0x243f6a8885a308d3u, 0x13198a2e03707344u,
                                              0xa4093822299f31d0u, 0x082efa98ec4e6c89u};
inline constexpr std::uint64_t hash_of_root = 0x452821e638d01377u;
inline constexpr std::uint64_t hash_of_tokens = 0xbe5466cf34e90c6cu;
inline constexpr std::uint64_t hash_of_extra = 0xc0ac29b7c97c50ddu;

/// Takes two words into a state. Each word meets each half of the state, once by exclusive or and
/// once by addition, in two products whose factors all depend on the state: what a change of a word
/// does to the products cannot be told without it. One product being zero, which loses a factor,
/// leaves the other.
[[nodiscard]] constexpr block_key absorbed(block_key state, std::uint64_t first,
                                           std::uint64_t second) noexcept {
  return {folded_product(state.low ^ first, state.high ^ second),
          folded_product(state.low + second + pi_digits[2], state.high + first + pi_digits[3])};
}

/// Ends a hash: after it every bit of the last words has reached every bit of the state. The count
/// tells what was padded from what was zero.
[[nodiscard]] constexpr block_key ended(block_key state, std::uint64_t count,
                                        std::uint64_t domain) noexcept {
  return absorbed(absorbed(state, count, domain), domain, count);
}

[[nodiscard]] constexpr std::uint64_t pair_of(token_id low, token_id high) noexcept {
  return std::uint64_t{static_cast<std::uint32_t>(high)} << 32 | static_cast<std::uint32_t>(low);
}

}  // namespace detail

/// A key into which more is hashed than tokens: what the keys and values of the blocks behind it
/// depend on, such as the hash of an adapter's weights or of an image. The order counts.
/// @param key    of the block before, or a root
/// @param extra  any number of words; none still makes another key
/// @par Cost  some 3 ns and 2 ns a word
/// @par Threads  any
[[nodiscard]] constexpr block_key extended_key(block_key key,
                                               std::span<const std::uint64_t> extra) noexcept {
  for (const std::uint64_t word : extra) key = detail::absorbed(key, word, detail::hash_of_extra);
  return detail::ended(key, extra.size(), detail::hash_of_extra);
}

/// Where the chains of a tenant begin: the parent of the first block of each prompt.
/// @param tenant_salt  who shares: equal salts do, others never. Random and secret, see above
/// @param extra        what all prompts of this root depend on besides, see `extended_key`
/// @par Threads  any
[[nodiscard]] constexpr block_key root_key(std::uint64_t tenant_salt,
                                           std::span<const std::uint64_t> extra = {}) noexcept {
  const block_key start{detail::pi_digits[0], detail::pi_digits[1]};
  const block_key root = detail::ended(detail::absorbed(start, tenant_salt, detail::hash_of_root),
                                       1, detail::hash_of_root);
  return extra.empty() ? root : extended_key(root, extra);
}

/// The default hash of a block: products of words, folded. Fast, good, and not cryptographic.
struct fold_hash {
  /// @param parent  of the block before, the root for the first one
  /// @param tokens  of the block, any number
  /// @par Cost  one step of two multiplications for four tokens, each waiting for the last
  [[nodiscard]] constexpr block_key operator()(block_key parent,
                                               std::span<const token_id> tokens) const noexcept {
    const token_id* t = tokens.data();
    const std::size_t count = tokens.size();
    std::size_t i = 0;
    for (; count - i >= 4; i += 4) {
      parent = detail::absorbed(parent, detail::pair_of(t[i], t[i + 1]),
                                detail::pair_of(t[i + 2], t[i + 3]));
    }
    if (i < count) {
      const token_id second = count - i > 1 ? t[i + 1] : 0;
      const token_id third = count - i > 2 ? t[i + 2] : 0;
      parent = detail::absorbed(parent, detail::pair_of(t[i], second), detail::pair_of(third, 0));
    }
    return detail::ended(parent, count, detail::hash_of_tokens);
  }
};

/// The key of a block: of its tokens, behind those that the parent stands for.
/// @see fold_hash
[[nodiscard]] constexpr block_key chained_key(block_key parent,
                                              std::span<const token_id> tokens) noexcept {
  return fold_hash{}(parent, tokens);
}

/// The keys of the full blocks of a prompt, first to last. A block that is not full has no name: it
/// will have another content.
///
/// The hash is a template parameter, for those who need a cryptographic one: anything that makes a
/// `block_key` of (parent, tokens), such as the first 128 bits of SHA-256 over both, as the engines
/// offer it. Its root is its own, too: a `block_key` made of the salt by the same means. 128 bits
/// resist a search for a collision up to some 2^64 tries.
///
/// @param root          `root_key`, or the key of the block before `tokens` to go on from
/// @param tokens        of the prompt, host memory
/// @param block_tokens  tokens a block, at least 1
/// @param keys          room for tokens.size() / block_tokens keys; the rest is left alone
/// @param hash          (parent, tokens of one block) -> key; pure
/// @return the number of keys
/// @throws std::invalid_argument  on block_tokens below 1, or too little room; nothing is written
/// @par Cost     that of the hash; allocates nothing
/// @par Threads  any
template <class Hash = fold_hash>
requires std::is_invocable_r_v<block_key, const Hash&, block_key, std::span<const token_id>>
    std::size_t block_keys(block_key root, std::span<const token_id> tokens,
                           std::int32_t block_tokens, std::span<block_key> keys,
                           const Hash& hash = {}) {
  detail::expects(block_tokens >= 1, "block_keys: block_tokens is ", block_tokens,
                  ", expected at least 1");
  const auto size = static_cast<std::size_t>(block_tokens);
  const std::size_t count = tokens.size() / size;
  detail::expects(keys.size() >= count, "block_keys: room for ", keys.size(),
                  " keys, expected at least ", count, ": one for each full block");
  for (std::size_t i = 0; i < count; ++i)
    keys[i] = root = hash(root, tokens.subspan(i * size, size));
  return count;
}

}  // namespace pulseinfer
