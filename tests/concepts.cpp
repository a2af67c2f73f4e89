// SPDX-License-Identifier: Apache-2.0
/// @file
/// Archetypes: the least that models each concept, and near misses that do not. All of it at
/// compile time, but for the archetypes at work.
#include "pulseinfer/concepts.hpp"

#include <doctest/doctest.h>

#include <cstdint>
#include <span>

#include "pulseinfer/block_store.hpp"
#include "support/archetypes.hpp"

namespace {

using pulseinfer::admission_filter;
using pulseinfer::admission_policy;
using pulseinfer::eviction_policy;
using pulseinfer::logical_block;
using pulseinfer::page_table;
using pulseinfer::row_group;

// page_table: a trivially copyable type with a const `page`.

struct page_of_int {
  int page(std::int32_t, std::int32_t) const { return 0; }
};
struct page_owns_memory {
  page_owns_memory(const page_owns_memory&) {}
  std::int64_t page(std::int64_t, std::int64_t) const { return 0; }
};
struct page_not_const {
  std::int64_t page(std::int64_t, std::int64_t) { return 0; }
};
struct page_of_block_only {
  std::int64_t page(std::int64_t) const { return 0; }
};
struct page_is_text {
  const char* page(std::int64_t, std::int64_t) const { return ""; }
};
static_assert(page_table<archetype::page_table>);
static_assert(page_table<page_of_int>);  // what converts will do
static_assert(!page_table<page_owns_memory>);
static_assert(!page_table<page_not_const>);
static_assert(!page_table<page_of_block_only>);
static_assert(!page_table<page_is_text>);
static_assert(!page_table<int>);

// eviction_policy: movable, made from a capacity, with six calls and a victim of any predicate.

struct policy_immovable : archetype::eviction_policy {
  using archetype::eviction_policy::eviction_policy;
  policy_immovable(policy_immovable&&) = delete;
};
struct policy_of_nothing : archetype::eviction_policy {
  policy_of_nothing() : archetype::eviction_policy(0) {}
};
struct policy_without_touch : archetype::eviction_policy {
  using archetype::eviction_policy::eviction_policy;
  void touch(std::int32_t) = delete;
};
struct policy_without_evict : archetype::eviction_policy {
  using archetype::eviction_policy::eviction_policy;
  void evict(std::int32_t) = delete;
};
struct policy_told_nothing : archetype::eviction_policy {
  using archetype::eviction_policy::eviction_policy;
  void insert(std::int32_t) {}
};
struct policy_that_is_not_asked : archetype::eviction_policy {
  using archetype::eviction_policy::eviction_policy;
  std::int32_t victim() { return -1; }
};
struct policy_of_one_predicate : archetype::eviction_policy {
  using archetype::eviction_policy::eviction_policy;
  std::int32_t victim(bool (*)(std::int64_t, std::int64_t)) { return -1; }
};
struct policy_of_64_bits : archetype::eviction_policy {
  using archetype::eviction_policy::eviction_policy;
  template <class CanEvict>
  std::int64_t victim(CanEvict) {
    return -1;
  }
};
struct policy_with_changing_contains : archetype::eviction_policy {
  using archetype::eviction_policy::eviction_policy;
  bool contains(std::int32_t) { return false; }
};
static_assert(eviction_policy<archetype::eviction_policy>);
static_assert(!eviction_policy<policy_immovable>);
static_assert(!eviction_policy<policy_of_nothing>);
static_assert(!eviction_policy<policy_without_touch>);
static_assert(!eviction_policy<policy_without_evict>);
static_assert(!eviction_policy<policy_told_nothing>);
static_assert(!eviction_policy<policy_that_is_not_asked>);
static_assert(!eviction_policy<policy_of_one_predicate>);
static_assert(!eviction_policy<policy_of_64_bits>);
static_assert(!eviction_policy<policy_with_changing_contains>);

// admission_policy: movable, six calls; what it is told and what it answers have one type each.

struct admission_immovable : archetype::admission_policy {
  using archetype::admission_policy::admission_policy;
  admission_immovable(admission_immovable&&) = delete;
};
struct admission_that_looks_itself : archetype::admission_policy {
  using archetype::admission_policy::admission_policy;
  void observe() {}
};
struct admission_of_the_link_alone : archetype::admission_policy {
  using archetype::admission_policy::admission_policy;
  void observe(const pulseinfer::link_snapshot&) {}
};
struct admission_with_changing_share : archetype::admission_policy {
  using archetype::admission_policy::admission_policy;
  double offload_share(std::int32_t) { return 1; }
};
struct admission_without_reasons : archetype::admission_policy {
  using archetype::admission_policy::admission_policy;
  bool admit(const pulseinfer::admission_request&, std::span<double>) { return false; }
};
struct admission_without_placement : archetype::admission_policy {
  using archetype::admission_policy::admission_policy;
  pulseinfer::admission_answer admit(const pulseinfer::admission_request&) { return {}; }
};
struct admission_that_never_sheds : archetype::admission_policy {
  using archetype::admission_policy::admission_policy;
  bool may_store(std::int64_t) = delete;
};
static_assert(admission_policy<archetype::admission_policy>);
static_assert(!admission_policy<admission_immovable>);
static_assert(!admission_policy<admission_that_looks_itself>);
static_assert(!admission_policy<admission_of_the_link_alone>);
static_assert(!admission_policy<admission_with_changing_share>);
static_assert(!admission_policy<admission_without_reasons>);
static_assert(!admission_policy<admission_without_placement>);
static_assert(!admission_policy<admission_that_never_sheds>);
static_assert(!admission_policy<int>);

// admission_filter: movable, one call that says yes or no.

struct filter_immovable : archetype::admission_filter {
  filter_immovable(filter_immovable&&) = delete;
};
struct filter_of_text {
  bool admit(const char*);
};
struct filter_that_says_nothing {
  void admit(std::uint64_t);
};
static_assert(admission_filter<archetype::admission_filter>);
static_assert(!admission_filter<filter_immovable>);
static_assert(!admission_filter<filter_of_text>);
static_assert(!admission_filter<filter_that_says_nothing>);

// row_group: copyable, six const calls.

struct group_immovable : archetype::row_group {
  group_immovable(const group_immovable&) = delete;
};
struct group_without_scan {
  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  std::int64_t sum(std::int64_t value) const { return value; }
  std::int64_t min(std::int64_t value) const { return value; }
};
struct group_of_floats : archetype::row_group {
  double sum(double value) const { return value; }
};
struct group_with_changing_sync : archetype::row_group {
  void sync() {}
};
static_assert(row_group<archetype::row_group>);
static_assert(!row_group<group_immovable>);
static_assert(!row_group<group_without_scan>);
static_assert(!row_group<group_of_floats>);
static_assert(!row_group<group_with_changing_sync>);

// backend: seven jobs; one that is missing is missed.

struct backend_without_kernels : archetype::backend {
  template <class... Any>
  void for_each(Any...) = delete;
};
struct backend_with_throwing_poll : archetype::backend {
  pulseinfer::event_state poll(const event&) const { return pulseinfer::event_state::done; }
};
struct backend_with_throwing_deallocate : archetype::backend {
  void deallocate_pinned(void*, std::size_t) {}
};
struct backend_with_throwing_unregister : archetype::backend {
  void unregister_pinned(void*, std::size_t) {}
};
struct backend_that_does_not_register : archetype::backend {
  void register_pinned(void*, std::size_t) = delete;
};
struct backend_uncopyable : archetype::backend {
  backend_uncopyable(const backend_uncopyable&) = delete;
};
struct backend_of_blind_copies : archetype::backend {
  void copy_async(void*, const void*, std::size_t, stream_ref) {}
};
struct backend_without_priority : archetype::backend {
  stream make_stream();
};
struct backend_of_plain_functions : archetype::backend {
  void host_async(std::span<const event* const>, void (*)()) {}
};
static_assert(pulseinfer::backend<archetype::backend>);
static_assert(!pulseinfer::has_kernels<backend_without_kernels>);
static_assert(!pulseinfer::has_streams<backend_with_throwing_poll>);
static_assert(!pulseinfer::has_memory<backend_with_throwing_deallocate>);
static_assert(!pulseinfer::has_memory<backend_with_throwing_unregister>);
static_assert(!pulseinfer::has_memory<backend_that_does_not_register>);
static_assert(!pulseinfer::has_copies<backend_of_blind_copies>);
static_assert(!pulseinfer::has_streams<backend_without_priority>);
static_assert(!pulseinfer::has_host_tasks<backend_of_plain_functions>);
static_assert(!pulseinfer::backend<backend_uncopyable>);
static_assert(!pulseinfer::backend<backend_without_kernels>);
static_assert(!pulseinfer::backend<int>);

}  // namespace

/// What the concepts ask for is enough for what is built on them: this compiles.
TEST_CASE("concepts: a store over archetypes of backend and policy") {
  using store_type = pulseinfer::block_store<archetype::backend, archetype::eviction_policy,
                                             archetype::admission_filter>;
  store_type store(archetype::backend{}, {.layers = 1, .kv_heads = 1, .head_dim = 8},
                   {.capacity_bytes = 1'024, .max_sequences = 2, .max_blocks = 4});
  const auto id = store.open_sequence().value();
  for (const logical_block block : {logical_block{0}, logical_block{1}}) {
    const auto got = store.reserve(id, 0, block);
    REQUIRE(got.outcome == pulseinfer::reserve_outcome::reserved);
    *store.writable(got.slot) = std::byte{7};
    store.commit(got.slot);
  }
  const auto lease = store.acquire(id, 0);
  REQUIRE(lease.find(logical_block{1}) != nullptr);
  CHECK(*lease.find(logical_block{1}) == std::byte{7});
  // This filter keeps out what has a name.
  const pulseinfer::block_key prompt[] = {{1, 2}};
  const auto named = store.open_sequence(prompt)->sequence;
  CHECK(store.reserve(named, 0, logical_block{0}).outcome ==
        pulseinfer::reserve_outcome::not_admitted);
  // This policy never gives anything up.
  CHECK(store.reserve(id, 0, logical_block{2}).outcome == pulseinfer::reserve_outcome::full);
}
