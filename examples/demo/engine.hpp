// SPDX-License-Identifier: Apache-2.0
/// @file
/// An inference engine in miniature: a paged pool, a free list, a block table, and the writes that
/// its model would make. What it knows of the library is in decode.hpp.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "capture.hpp"
#include "pulseinfer/pulseinfer.hpp"

namespace demo {

template <class Backend>
class engine {
 public:
  using stream_ref = typename Backend::stream_ref;

  engine(Backend backend, const capture& c, std::int64_t pages, std::int32_t requests)
      : backend_(backend),
        capture_(&c),
        layout_(pulseinfer::nhd_layout(c.geometry, pages)),
        memory_(backend, static_cast<std::size_t>(std::int64_t{2} * c.geometry.layers *
                                                  layout_.plane_bytes())),
        pool_(c.geometry, layout_, planes()),
        requests_(requests),
        max_blocks_(c.geometry.blocks_of(c.tokens)),
        table_(backend, static_cast<std::size_t>(requests * max_blocks_)),
        device_table_(backend, static_cast<std::size_t>(requests * max_blocks_)) {
    for (std::int64_t page = pages; page > 0; --page) {
      free_.push_back(static_cast<std::int32_t>(page - 1));
    }
    for (std::int32_t& entry : table_.span()) entry = -1;
    for (std::size_t layer = 0; layer < c.keys.size(); ++layer) {
      for (const auto* from : {&c.keys[layer], &c.values[layer]}) {
        source_.emplace_back(backend, from->size());
        std::copy(from->begin(), from->end(), source_.back().data());
      }
    }
  }

  [[nodiscard]] const pulseinfer::kv_pool& pool() const noexcept { return pool_; }
  [[nodiscard]] std::int64_t max_blocks() const noexcept { return max_blocks_; }
  [[nodiscard]] std::size_t free_pages() const noexcept { return free_.size(); }
  [[nodiscard]] pulseinfer::block_table host_table() const {
    return pulseinfer::checked_block_table(table_.span(), requests_, max_blocks_, layout_.pages);
  }
  [[nodiscard]] pulseinfer::block_table device_table() const noexcept {
    return {device_table_.data(), requests_, max_blocks_};
  }

  [[nodiscard]] std::int32_t take_page() {
    if (free_.empty()) throw std::logic_error("demo engine: the pool has no free page");
    const std::int32_t page = free_.back();
    free_.pop_back();
    return page;
  }
  void give_page(std::int32_t page) { free_.push_back(page); }

  [[nodiscard]] std::int32_t& page_of(std::int32_t request, std::int64_t block) {
    return table_[static_cast<std::size_t>(request * max_blocks_ + block)];
  }
  /// Brings the device's block table up to date, and waits: the host's may change at once.
  void sync_table(stream_ref stream) {
    backend_.copy_async(device_table_.data(), table_.data(), table_.bytes(),
                        pulseinfer::copy_direction::host_to_device, stream);
    backend_.sync(stream);
  }

  /// What the model would have computed: keys and values of tokens [first, first + count) of the
  /// text, all of one block, go to the block's page.
  void write_tokens(std::int32_t request, std::int64_t first, std::int64_t count,
                    stream_ref stream) {
    const auto& g = capture_->geometry;
    const std::int64_t block = first / g.block_tokens;
    const std::int64_t page = page_of(request, block);
    for (std::int32_t layer = 0; layer < g.layers; ++layer) {
      for (int plane = 0; plane < 2; ++plane) {
        const auto& from = source_[static_cast<std::size_t>(2 * layer + plane)];
        backend_.copy_async(
            pool_.layer(layer).plane[plane] + layout_.offset(page, first % g.block_tokens, 0),
            reinterpret_cast<const std::byte*>(from.data()) + first * g.token_bytes(),
            static_cast<std::size_t>(count * g.token_bytes()),
            pulseinfer::copy_direction::host_to_device, stream);
      }
    }
  }

  /// The bytes that a block should have in one plane.
  [[nodiscard]] const std::byte* expected(std::int32_t layer, int plane, std::int64_t block) const {
    const auto& from = source_[static_cast<std::size_t>(2 * layer + plane)];
    return reinterpret_cast<const std::byte*>(from.data()) +
           block * layout_.plane[plane].strip_bytes;
  }

 private:
  [[nodiscard]] std::vector<pulseinfer::layer_planes> planes() const {
    std::vector<pulseinfer::layer_planes> out;
    for (std::int32_t layer = 0; layer < capture_->geometry.layers; ++layer) {
      std::byte* at = memory_.data() + std::int64_t{2} * layer * layout_.plane_bytes();
      out.push_back({.plane = {at, at + layout_.plane_bytes()}});
    }
    return out;
  }

  Backend backend_;
  const capture* capture_;
  pulseinfer::block_layout layout_;
  pulseinfer::device_buffer<std::byte, Backend> memory_;
  pulseinfer::kv_pool pool_;
  std::int32_t requests_;
  std::int64_t max_blocks_;
  pulseinfer::pinned_buffer<std::int32_t, Backend> table_;
  pulseinfer::device_buffer<std::int32_t, Backend> device_table_;
  std::vector<pulseinfer::pinned_buffer<std::uint16_t, Backend>> source_;  ///< [layers * 2]
  std::vector<std::int32_t> free_;
};

}  // namespace demo
