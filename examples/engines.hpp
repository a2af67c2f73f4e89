// SPDX-License-Identifier: Apache-2.0
// Every engine's pages: how the tensors and tables of today's engines are named to the library. Each
// function states an engine's own shapes, then moves units out of its pool and back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "pulseinfer/pulseinfer.hpp"

namespace engines {

using namespace pulseinfer;

/// Fills an engine's tensors, offloads the blocks that its table names, clears the tensors, recalls
/// every block into its page, and compares all bytes.
///
/// @param tensor_of  which tensor each plane of the layout lies in
/// @param table      page ids by (row, block); readable on the host
/// @return true if every byte of the named pages is what it was, and every other byte still clear
template <class Backend, page_table Table>
bool round_trip(Backend backend, const kv_geometry& geometry, const block_layout& layout,
                const std::vector<int>& tensor_of, const Table& table, std::int32_t rows,
                std::int32_t blocks) {
  auto stream = backend.make_stream(stream_priority::normal);
  const auto plane_count = static_cast<std::size_t>(layout.planes);
  std::vector<std::int64_t> tensor_bytes(plane_count, 0);
  for (std::size_t p = 0; p < plane_count; ++p) {
    std::int64_t& bytes = tensor_bytes[static_cast<std::size_t>(tensor_of[p])];
    bytes = std::max(bytes, (layout.plane_bytes(static_cast<std::int32_t>(p)) + 15) / 16 * 16);
  }
  std::vector<layer_planes> planes(static_cast<std::size_t>(geometry.layers));
  std::vector<device_buffer<std::byte, Backend>> tensors;
  std::vector<pinned_buffer<std::byte, Backend>> filled;
  std::vector<std::vector<std::byte>> expected;
  std::uint32_t pattern = 1;
  for (layer_planes& layer : planes) {
    const std::size_t first = tensors.size();
    for (const std::int64_t bytes : tensor_bytes) {
      tensors.emplace_back(backend, static_cast<std::size_t>(bytes));
      filled.emplace_back(backend, static_cast<std::size_t>(bytes));
      for (std::byte& b : filled.back().span()) {
        pattern = pattern * 1664525u + 1013904223u;
        b = static_cast<std::byte>(pattern >> 24 | 1u);
      }
      backend.copy_async(tensors.back().data(), filled.back().data(), filled.back().bytes(),
                         copy_direction::host_to_device, stream);
      expected.emplace_back(static_cast<std::size_t>(bytes), std::byte{0});
    }
    for (std::size_t p = 0; p < plane_count; ++p) {
      layer.plane[p] = tensors[first + static_cast<std::size_t>(tensor_of[p])].data();
    }
  }
  const kv_pool pool(geometry, layout, planes);
  block_store<Backend> store(
      backend, geometry,
      {.capacity_bytes = rows * blocks * geometry.layers * geometry.unit_bytes(),
       .max_sequences = rows,
       .max_blocks = blocks});
  transfer_engine mover(backend, store, pool,
                        {.staging_bytes = 4 * geometry.unit_bytes() * 3,
                         .chunk_bytes = 3 * geometry.unit_bytes(),
                         .max_units = 1024});

  std::vector<sequence_id> sequences;
  std::vector<unit_target> units;
  for (std::int32_t row = 0; row < rows; ++row) {
    sequences.push_back(store.open_sequence().value());
    for (std::int32_t block = 0; block < blocks; ++block) {
      const std::int64_t page = table.page(row, block);
      if (page >= 0) units.push_back({row, logical_block{block}, static_cast<device_page>(page)});
    }
  }
  for (std::int32_t layer = 0; layer < geometry.layers; ++layer) {
    mover.offload(layer, sequences, units, stream)->sync();
  }
  for (std::size_t i = 0; i < tensors.size();
       ++i) {  // what the pages held goes, the store keeps it
    std::vector<std::byte> held(filled[i].data(), filled[i].data() + filled[i].size());
    std::fill(filled[i].data(), filled[i].data() + filled[i].size(), std::byte{0});
    backend.copy_async(tensors[i].data(), filled[i].data(), filled[i].bytes(),
                       copy_direction::host_to_device, stream);
    backend.sync(stream);
    const std::size_t layer = i / plane_count;
    for (std::size_t p = 0; p < plane_count; ++p) {
      if (static_cast<std::size_t>(tensor_of[p]) != i - layer * plane_count) continue;
      const plane_layout& plane = layout.plane[p];
      for (const unit_target& unit : units) {
        for (std::int64_t strip = 0; strip < plane.strips; ++strip) {
          const auto at = static_cast<std::ptrdiff_t>(
              layout.page_offset(index_of(unit.page), static_cast<std::int32_t>(p)) +
              strip * plane.strip_stride);
          std::copy_n(held.begin() + at, plane.strip_bytes, expected[i].begin() + at);
        }
      }
    }
  }
  for (std::int32_t layer = 0; layer < geometry.layers; ++layer) {
    auto ticket = mover.recall_units(layer, sequences, units, stream).value();
    ticket.sync_submitted();
    if (ticket.enqueue_wait(stream) != wait_outcome::enqueued) return false;
  }
  bool same = true;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    backend.copy_async(filled[i].data(), tensors[i].data(), filled[i].bytes(),
                       copy_direction::device_to_host, stream);
    backend.sync(stream);
    same = same && std::equal(expected[i].begin(), expected[i].end(), filled[i].data());
  }
  return same;
}

// The examples are small models: 2 layers, 4 KV heads of 32 channels, pages of 16 tokens.

/// vLLM with FlashAttention: `kv_cache[layer]` is [2, num_blocks, block_size, num_kv_heads,
/// head_size], the block table [max_num_reqs, max_blocks].
template <class Backend>
bool vllm(Backend backend) {
  const kv_geometry geometry{.layers = 2, .kv_heads = 4, .head_dim = 32, .block_tokens = 16};
  const block_layout layout =
      make_layout(geometry, 12, {.arrangement = kv_arrangement::one_tensor});
  const std::int32_t entries[2][4] = {{3, 0, 7, -1}, {11, 5, -1, -1}};
  const block_table table = checked_block_table({&entries[0][0], 8}, 2, 4, 12);
  return round_trip(backend, geometry, layout, {0, 0}, table, 2, 4);
}

/// vLLM with FlashInfer, or FlashInfer alone: `paged_kv_cache` is [num_pages, 2, page_size,
/// num_kv_heads, head_dim] (NHD), pages listed by indptr and indices.
template <class Backend>
bool flashinfer(Backend backend) {
  const kv_geometry geometry{.layers = 2, .kv_heads = 4, .head_dim = 32, .block_tokens = 16};
  const block_layout layout =
      make_layout(geometry, 12, {.arrangement = kv_arrangement::interleaved});
  const std::int32_t indptr[] = {0, 3, 3, 5};  // the second request has no page yet
  const std::int32_t indices[] = {3, 0, 7, 11, 5};
  return round_trip(backend, geometry, layout, {0, 0}, ragged_table{indptr, indices, 3}, 3, 4);
}

/// SGLang: `k_buffer[layer]` and `v_buffer[layer]` are [size, head_num, head_dim] of token slots;
/// `req_to_token` is [max_reqs, max_context]. With --page-size 4 the slots of four tokens follow each
/// other; with page size 1 a unit is one token.
template <class Backend>
bool sglang(Backend backend) {
  bool good = true;
  for (const std::int32_t page_size : {4, 1}) {
    const kv_geometry geometry{
        .layers = 2, .kv_heads = 4, .head_dim = 32, .block_tokens = page_size};
    const block_layout layout = make_layout(geometry, 32 / page_size);
    const std::int32_t req_to_token[2][8] = {{12, 13, 14, 15, 4, 5, 6, 7},
                                             {20, 21, 22, 23, -1, -1, -1, -1}};
    const slot_table table{&req_to_token[0][0], 2, 8, page_size};
    good = round_trip(backend, geometry, layout, {0, 1}, table, 2, 8 / page_size) && good;
  }
  return good;
}

/// TensorRT-LLM: the pool is [num_blocks, 2, num_kv_heads, tokens_per_block, size_per_head] (HND).
/// FP8 payloads are bytes to the mover; here with a scale for each head of a block.
template <class Backend>
bool tensorrt_llm(Backend backend) {
  const kv_geometry geometry{.layers = 2,
                             .kv_heads = 4,
                             .head_dim = 32,
                             .block_tokens = 32,
                             .element = element_type::f8_e4m3,
                             .scales = scale_kind::per_head};
  const block_layout layout = make_layout(
      geometry, 12, {.order = page_order::hnd, .arrangement = kv_arrangement::interleaved});
  const std::int32_t entries[2][4] = {{1, 2, 10, 4}, {0, 8, -1, -1}};
  const block_table table = checked_block_table({&entries[0][0], 8}, 2, 4, 12);
  return round_trip(backend, geometry, layout, {0, 0, 1, 2}, table, 2, 4);
}

/// llama.cpp without flash attention: K is [kv_size, n_head_kv * head_dim], V is transposed,
/// [n_head_kv * head_dim, kv_size]: a block of 16 cells is 16 tokens of K and 128 runs of V.
template <class Backend>
bool llama_cpp(Backend backend) {
  const kv_geometry geometry{.layers = 2, .kv_heads = 4, .head_dim = 32, .block_tokens = 16};
  const block_layout layout = make_layout(geometry, 8, {.values = value_order::transposed_context});
  const std::int32_t cells[] = {0, 1, 2, 3, 4, -1, -1, -1};  // one context, block i in cells 16 * i
  const block_table table = checked_block_table(cells, 1, 8, 8);
  return round_trip(backend, geometry, layout, {0, 1}, table, 1, 8);
}

/// DeepSeek's MLA: one latent of 512 + 64 channels for all heads, [num_blocks, 64, 576]; the store
/// keeps one copy, whatever the number of ranks.
template <class Backend>
bool mla(Backend backend) {
  const kv_geometry geometry{.layers = 2,
                             .kv_heads = 1,
                             .head_dim = 576,
                             .block_tokens = 64,
                             .element = element_type::bf16,
                             .planes = 1};
  const std::int32_t entries[] = {2, 0, 3};
  const block_table table = checked_block_table(entries, 1, 3, 4);
  return round_trip(backend, geometry, make_layout(geometry, 4), {0}, table, 1, 3);
}

/// INT8 with a scale for each token and head, as vLLM's per-token-head quantisation keeps it, and
/// selection by KV head: every head is a group, and a row, of its own. `heads` of the 4 to a group.
template <class Backend>
bool head_groups(Backend backend) {
  bool good = true;
  for (const page_order order : {page_order::nhd, page_order::hnd}) {
    for (const std::int32_t heads : {1, 2, 4}) {
      const kv_geometry geometry{.layers = 2,
                                 .kv_heads = heads,
                                 .head_dim = 32,
                                 .block_tokens = 16,
                                 .element = element_type::i8,
                                 .scales = scale_kind::per_token_head};
      const std::int32_t groups = 4 / heads;
      const block_layout layout = make_layout(geometry, 6, {.order = order, .head_groups = groups});
      const std::int32_t entries[2][2] = {{4, 1}, {0, -1}};
      const grouped_table<block_table> table{checked_block_table({&entries[0][0], 4}, 2, 2, 6),
                                             groups};
      good = round_trip(backend, geometry, layout, {0, 1, 2, 3}, table, 2 * groups, 2) && good;
    }
  }
  return good;
}

/// An engine and its example.
template <class Backend>
struct engine_example {
  const char* name;
  bool (*run)(Backend);
};

template <class Backend>
inline constexpr engine_example<Backend> all[] = {
    {"vLLM", vllm<Backend>},
    {"FlashInfer", flashinfer<Backend>},
    {"SGLang", sglang<Backend>},
    {"TensorRT-LLM", tensorrt_llm<Backend>},
    {"llama.cpp", llama_cpp<Backend>},
    {"MLA", mla<Backend>},
    {"head groups", head_groups<Backend>},
};

}  // namespace engines
