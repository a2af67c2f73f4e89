// SPDX-License-Identifier: Apache-2.0
/// @file
/// Transfers over pools of every layout and scope, with rows of any length, both directions, by
/// every way; and what a single copy may span. Include the backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/pinned_allocator.hpp"
#include "pulseinfer/pool_shape.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/offload_rig.hpp"

namespace {

using pulseinfer::block_layout;
using pulseinfer::copy_direction;
using pulseinfer::copy_span;
using pulseinfer::kv_geometry;
using pulseinfer::pool_shape;
using pulseinfer::transfer_way;
using bytes = std::vector<std::byte>;

/// Notes all copies to the device.
class noting_copies : public test::backend {
 public:
  explicit noting_copies(const test::backend& base) : test::backend(base) {}

  void copy_async(void* to, const void* from, std::size_t size, copy_direction direction,
                  stream_ref s) {
    const copy_span copy{to, from, size};
    note({&copy, 1}, direction);
    test::backend::copy_async(to, from, size, direction, s);
  }
  void copy_many_async(std::span<const copy_span> copies, copy_direction direction, stream_ref s) {
    note(copies, direction);
    test::backend::copy_many_async(copies, direction, s);
  }
  /// What has been noted since the last call.
  [[nodiscard]] std::vector<copy_span> taken() {
    std::lock_guard lock(notes_->mutex);
    return std::exchange(notes_->copies, {});
  }

 private:
  struct notes {
    std::mutex mutex;
    std::vector<copy_span> copies;
  };
  void note(std::span<const copy_span> copies, copy_direction direction) {
    if (direction != copy_direction::host_to_device) return;
    std::lock_guard lock(notes_->mutex);
    notes_->copies.insert(notes_->copies.end(), copies.begin(), copies.end());
  }
  std::shared_ptr<notes> notes_ = std::make_shared<notes>();
};

/// How an engine keeps its pages.
struct engine_shape {
  std::string_view name;
  kv_geometry geometry;
  pool_shape shape;
};

std::vector<engine_shape> engine_shapes() {
  using enum pulseinfer::element_type;
  using enum pulseinfer::kv_arrangement;
  using enum pulseinfer::page_order;
  using enum pulseinfer::value_order;
  using pulseinfer::scale_kind;
  const kv_geometry even{.layers = 1, .kv_heads = 2, .head_dim = 16, .block_tokens = 4};
  kv_geometry odd{.layers = 1, .kv_heads = 3, .head_dim = 5, .block_tokens = 3, .element = i8};
  kv_geometry latent{.layers = 1, .kv_heads = 1, .head_dim = 24, .block_tokens = 4, .planes = 1};
  kv_geometry one_byte{.layers = 1, .kv_heads = 1, .head_dim = 1, .block_tokens = 1, .element = i8};
  kv_geometry scaled = odd, token_scaled = even;
  scaled.scales = scale_kind::per_head;
  token_scaled.element = f8_e4m3;
  token_scaled.scales = scale_kind::per_token_head;
  return {{"apart", even, {}},
          {"one tensor", even, {.arrangement = one_tensor}},
          {"interleaved", even, {.arrangement = interleaved}},
          {"by head", even, {.order = hnd, .arrangement = interleaved}},
          {"groups of heads", even, {.arrangement = interleaved, .head_groups = 2}},
          {"groups of heads, by head", even, {.order = hnd, .head_groups = 2}},
          {"transposed pages", even, {.values = transposed_page}},
          {"transposed context", even, {.values = transposed_context}},
          {"a latent", latent, {}},
          {"rows of 15 bytes", odd, {}},
          {"rows of 15 bytes in groups", odd, {.arrangement = interleaved, .head_groups = 2}},
          {"rows of 3 bytes", odd, {.values = transposed_context}},
          {"rows of a byte", one_byte, {.arrangement = interleaved}},
          {"scales of heads", scaled, {.order = hnd}},
          {"scales of tokens", token_scaled, {.arrangement = interleaved, .head_groups = 2}}};
}

/// A pool of one layer, each tensor in memory of its own, and a copy on the host.
template <class Backend>
class pool_of_tensors {
 public:
  pool_of_tensors(const Backend& machine, const engine_shape& of, std::int64_t engine_pages)
      : machine_(machine),
        layout_(make_layout(of.geometry, engine_pages, of.shape)),
        pool_(of.geometry, layout_, planes(of.shape)) {}

  [[nodiscard]] const block_layout& layout() const { return layout_; }
  [[nodiscard]] const pulseinfer::kv_pool& pool() const { return pool_; }

  void fill(std::uint64_t seed, typename Backend::stream_ref stream) {
    pulseinfer::detail::random_source draw(seed);
    for (std::size_t t = 0; t < device_.size(); ++t) {
      for (std::byte& b : host_[t].span()) b = static_cast<std::byte>(draw.next());
      copy(t, true, stream);
    }
    machine_.sync(stream);
  }
  void download(typename Backend::stream_ref stream) {
    for (std::size_t t = 0; t < device_.size(); ++t) copy(t, false, stream);
    machine_.sync(stream);
  }
  /// The host's copy, all tensors joined.
  [[nodiscard]] bytes all() const {
    bytes joined;
    for (const auto& tensor : host_) {
      joined.insert(joined.end(), tensor.data(), tensor.data() + tensor.size());
    }
    return joined;
  }
  /// Calls visit(offset in all(), bytes) for the strips of a page, in a unit's order.
  template <class Visit>
  void each_strip(std::int64_t page, Visit visit) const {
    for (std::int32_t p = 0; p < layout_.planes; ++p) {
      const pulseinfer::plane_layout& plane = layout_.plane[p];
      std::size_t at = static_cast<std::size_t>(layout_.page_offset(page, p));
      for (std::size_t t = 0; t < tensor_of_[static_cast<std::size_t>(p)]; ++t) {
        at += host_[t].size();
      }
      for (std::int64_t i = 0; i < plane.strips; ++i) {
        visit(at + static_cast<std::size_t>(i * plane.strip_stride),
              static_cast<std::size_t>(plane.strip_bytes));
      }
    }
  }

 private:
  std::vector<pulseinfer::layer_planes> planes(const pool_shape& shape) {
    const bool together = shape.arrangement != pulseinfer::kv_arrangement::apart;
    pulseinfer::layer_planes layer;
    for (std::int32_t p = 0; p < layout_.planes; ++p) {
      const bool shares = p == 1 && together;
      tensor_of_.push_back(shares ? 0 : device_.size());
      if (!shares) {
        std::int64_t size = layout_.plane_bytes(p);
        if (p == 0 && together) size = std::max(size, layout_.plane_bytes(1));
        device_.emplace_back(machine_, static_cast<std::size_t>(size));
        host_.emplace_back(machine_, static_cast<std::size_t>(size));
      }
      layer.plane[p] = device_[tensor_of_.back()].data();
    }
    return {layer};
  }
  void copy(std::size_t t, bool up, typename Backend::stream_ref stream) {
    std::byte* const there = device_[t].data();
    std::byte* const here = host_[t].data();
    machine_.copy_async(up ? there : here, up ? here : there, host_[t].bytes(),
                        up ? copy_direction::host_to_device : copy_direction::device_to_host,
                        stream);
  }

  Backend machine_;
  block_layout layout_;
  std::vector<pulseinfer::device_buffer<std::byte, Backend>> device_;
  std::vector<pulseinfer::pinned_buffer<std::byte, Backend>> host_;
  std::vector<std::size_t> tensor_of_;  ///< of each plane
  pulseinfer::kv_pool pool_;
};

/// Page ids 0 to count - 1: in order, backwards, or drawn.
std::vector<std::int32_t> pages_in(int order, std::int32_t count) {
  std::vector<std::int32_t> pages(static_cast<std::size_t>(count));
  std::iota(pages.begin(), pages.end(), 0);
  if (order == 1) std::reverse(pages.begin(), pages.end());
  if (order == 2) {
    pulseinfer::detail::random_source draw(static_cast<std::uint64_t>(count));
    for (std::size_t i = pages.size(); i > 1; --i) std::swap(pages[i - 1], pages[draw.below(i)]);
  }
  return pages;
}

/// All pages of a pool but two go out; then some of them come into other pages, by each way.
template <class Backend>
void out_and_in(const Backend& with, const engine_shape& of) {
  Backend machine = with;
  auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
  pool_of_tensors<Backend> pages(machine, of, 12);
  const auto units = static_cast<std::int32_t>(pages.layout().pages) - 2;
  pulseinfer::block_store<Backend> store(machine, of.geometry,
                                         {.capacity_bytes = units * of.geometry.unit_bytes(),
                                          .max_sequences = 1,
                                          .max_blocks = units});
  pulseinfer::transfer_engine mover(machine, store, pages.pool(),
                                    {.staging_bytes = 10 * of.geometry.unit_bytes(),
                                     .chunk_bytes = 5 * of.geometry.unit_bytes(),
                                     .first_chunk_bytes = 2 * of.geometry.unit_bytes(),
                                     .transfers_in_flight = 2,
                                     .max_units = units});
  const pulseinfer::sequence_id id = store.open_sequence().value();
  const auto targets = [&](int order, std::int32_t first, std::int32_t count) {
    const auto to = pages_in(order, count);
    test::unit_targets all;
    for (std::int32_t b = 0; b < count; ++b) {
      all.push_back({0, b, first + to[static_cast<std::size_t>(b)]});
    }
    return all;
  };
  pulseinfer::chunk_plans plans;
  plans.add({.max_units = units, .head = 0.4, .chunks = {0.2, 0.4}});
  pages.fill(1, stream);
  const bytes out = pages.all();
  const auto leaving = targets(2, 1, units);
  mover.offload(0, {&id, 1}, leaving, stream)->sync();
  for (int order = 0; order < 3; ++order) {
    CAPTURE(order);
    for (std::size_t run = 0; run <= std::size(test::all_ways); ++run) {  // the last by a plan
      const bool by_plan = run == std::size(test::all_ways);
      const transfer_way way = by_plan ? transfer_way::staged : test::all_ways[run];
      CAPTURE(static_cast<int>(way));
      CAPTURE(by_plan);
      pages.fill(2 + static_cast<std::uint64_t>(order), stream);
      bytes expected = pages.all();
      const auto coming = targets(order, 2, units - 3);
      for (std::size_t i = 0; i < coming.size(); ++i) {
        bytes unit;
        pages.each_strip(index_of(leaving[i].page), [&](std::size_t at, std::size_t size) {
          const auto from = out.begin() + static_cast<std::ptrdiff_t>(at);
          unit.insert(unit.end(), from, from + static_cast<std::ptrdiff_t>(size));
        });
        auto from = unit.begin();
        pages.each_strip(index_of(coming[i].page), [&](std::size_t at, std::size_t size) {
          std::copy_n(from, size, expected.begin() + static_cast<std::ptrdiff_t>(at));
          from += static_cast<std::ptrdiff_t>(size);
        });
      }
      mover.set_way(way);
      mover.set_plans(by_plan ? plans : pulseinfer::chunk_plans{});
      auto t = mover.recall_units(0, {&id, 1}, coming, stream).value();
      t.sync();
      CHECK(t.report().way == way);
      CHECK(t.report().moved == units - 3);
      pages.download(stream);
      CHECK((pages.all() == expected));  // no byte beside them has changed
    }
  }
}

/// Units that follow each other in the store and in the pool.
template <class Engine>
std::vector<copy_span> copies_of(noting_copies& machine, Engine& mover, pulseinfer::sequence_id id,
                                 std::int32_t count, transfer_way way,
                                 noting_copies::stream_ref stream) {
  test::unit_targets units;
  for (std::int32_t b = 0; b < count; ++b) units.push_back({0, b, b});
  mover.set_way(way);
  (void)machine.taken();
  auto t = mover.recall_units(0, {&id, 1}, units, stream).value();
  t.sync();
  CHECK(t.report().moved == count);
  return machine.taken();
}

}  // namespace

TEST_CASE("transfer layouts: units of every layout and scope go out and come in by every way") {
  test::each_backend([](const test::backend& machine) {
    for (const engine_shape& of : engine_shapes()) {
      CAPTURE(of.name);
      out_and_in(machine, of);
    }
  });
}

TEST_CASE("transfer layouts: adjacent strips are one copy, but for the baseline") {
  noting_copies machine(test::make_backend());
  auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
  const engine_shape interleaved = engine_shapes()[2];
  pool_of_tensors<noting_copies> pages(machine, interleaved, 12);
  const std::int64_t unit = interleaved.geometry.unit_bytes();
  pulseinfer::block_store<noting_copies> store(machine, interleaved.geometry,
                                               {.capacity_bytes = 12 * unit, .max_blocks = 12});
  CHECK(store.piece_bytes() == static_cast<std::size_t>(12 * unit));
  pulseinfer::transfer_engine mover(
      machine, store, pages.pool(),
      {.staging_bytes = 24 * unit, .chunk_bytes = 12 * unit, .first_chunk_bytes = 12 * unit});
  const auto id = store.open_sequence().value();
  test::unit_targets units;
  for (std::int32_t b = 0; b < 12; ++b) units.push_back({0, b, b});
  pages.fill(1, stream);
  mover.offload(0, {&id, 1}, units, stream)->sync();
  for (const transfer_way way : {transfer_way::direct, transfer_way::batched}) {
    const auto copies = copies_of(machine, mover, id, 12, way, stream);
    REQUIRE(copies.size() == 1);
    CHECK(copies[0].bytes == static_cast<std::size_t>(12 * unit));
  }
  CHECK(copies_of(machine, mover, id, 12, transfer_way::per_block, stream).size() == 24);
}

TEST_CASE("fault 25: a copy of adjacent units ends where their store's registration does") {
  test::each_backend([](const test::backend& base) {
    using paged = pulseinfer::paged_backend<test::backend>;
    noting_copies machine(base);
    auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
    // Units of 4,608 bytes in registrations of eight.
    const engine_shape latent{
        "a latent",
        {.layers = 1, .kv_heads = 1, .head_dim = 288, .block_tokens = 8, .planes = 1},
        {}};
    const std::int64_t unit = latent.geometry.unit_bytes();
    REQUIRE(unit == 4'608);
    pulseinfer::pinned_options options;
    options.unit_bytes = static_cast<std::size_t>(unit);
    options.max_chunk_bytes = static_cast<std::size_t>(8 * unit);
    pool_of_tensors<noting_copies> pages(machine, latent, 24);
    pulseinfer::block_store<paged> store(paged(base, options), latent.geometry,
                                         {.capacity_bytes = 24 * unit, .max_blocks = 24});
    REQUIRE(store.piece_bytes() == static_cast<std::size_t>(8 * unit));
    pulseinfer::transfer_engine<noting_copies, pulseinfer::block_store<paged>> mover(
        machine, store, pages.pool(),
        {.staging_bytes = 48 * unit, .chunk_bytes = 24 * unit, .first_chunk_bytes = 24 * unit});
    const auto id = store.open_sequence().value();
    test::unit_targets units;
    for (std::int32_t b = 0; b < 24; ++b) units.push_back({0, b, b});
    pages.fill(1, stream);
    const bytes expected = pages.all();
    mover.offload(0, {&id, 1}, units, stream)->sync();
    for (const transfer_way way : {transfer_way::direct, transfer_way::batched}) {
      CAPTURE(static_cast<int>(way));
      pages.fill(2, stream);
      const auto copies = copies_of(machine, mover, id, 24, way, stream);
      CHECK(copies.size() == 3);
      for (const copy_span& copy : copies) {
        const auto at =
            static_cast<std::size_t>(static_cast<const std::byte*>(copy.source) - store.payload());
        CHECK(at / store.piece_bytes() == (at + copy.bytes - 1) / store.piece_bytes());
      }
      pages.download(stream);
      CHECK((pages.all() == expected));
    }
  });
}

TEST_CASE(
    "transfer layouts: a copy stays within one tensor, even if the next begins where it ends") {
  noting_copies machine(test::make_backend());
  auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
  const kv_geometry geometry{.layers = 1, .kv_heads = 2, .head_dim = 16, .block_tokens = 4};
  const block_layout layout = make_layout(geometry, 1);
  pulseinfer::device_buffer<std::byte, noting_copies> memory(
      machine, static_cast<std::size_t>(geometry.unit_bytes()));
  const pulseinfer::kv_pool pool(
      geometry, layout, {{.plane = {memory.data(), memory.data() + layout.plane_bytes()}}});
  pulseinfer::block_store<noting_copies> store(machine, geometry,
                                               {.capacity_bytes = geometry.unit_bytes()});
  pulseinfer::transfer_engine mover(
      machine, store, pool,
      {.staging_bytes = 2 * geometry.unit_bytes(), .chunk_bytes = geometry.unit_bytes()});
  const auto id = store.open_sequence().value();
  mover.offload(0, {&id, 1}, test::unit_targets{{0, 0, 0}}, stream)->sync();
  CHECK(copies_of(machine, mover, id, 1, transfer_way::direct, stream).size() == 2);
  CHECK(copies_of(machine, mover, id, 1, transfer_way::batched, stream).size() == 2);
}
