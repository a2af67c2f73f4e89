// SPDX-License-Identifier: Apache-2.0
/// @file
/// An engine's pool for tests, and units whose bytes tell whose they are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/pool_shape.hpp"

namespace test {

using unit_bytes = std::vector<std::byte>;

/// A small geometry: two layers, units of 128 bytes.
inline constexpr pulseinfer::kv_geometry small_geometry{.layers = 2,
                                                        .kv_heads = 1,
                                                        .head_dim = 8,
                                                        .block_tokens = 4,
                                                        .element = pulseinfer::element_type::f16};

/// The bytes of a unit: another unit, or another version of it, differs in nearly all of them.
inline unit_bytes stamp(const pulseinfer::kv_geometry& geometry, std::int64_t sequence,
                        std::int64_t layer, std::int64_t block, std::int64_t version = 0) {
  const auto seed =
      static_cast<std::uint64_t>(((version * 64 + sequence) * 64 + layer) * 65536 + block);
  pulseinfer::detail::random_source draw(seed);
  unit_bytes bytes(static_cast<std::size_t>(geometry.unit_bytes()));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(draw.next());
  return bytes;
}

/// A dense pool, and a copy of it on the host through which tests write and read it.
template <class Backend>
class paged_pool {
 public:
  using stream_ref = typename Backend::stream_ref;

  paged_pool(const Backend& machine, const pulseinfer::kv_geometry& geometry, std::int64_t pages)
      : backend_(machine),
        layout_(pulseinfer::nhd_layout(geometry, pages)),
        memory_(machine, static_cast<std::size_t>(geometry.layers) * layer_bytes()),
        host_(machine, memory_.size()),
        pool_(geometry, layout_, planes(geometry.layers)) {
    std::fill(host_.data(), host_.data() + host_.size(), std::byte{0x5a});
    auto stream = backend_.make_stream(pulseinfer::stream_priority::normal);
    upload(stream);
  }

  [[nodiscard]] const pulseinfer::kv_pool& pool() const { return pool_; }

  /// Writes a unit into the host's copy.
  void put(std::int32_t layer, std::int64_t page, const unit_bytes& unit) {
    for (int plane = 0; plane < planes_; ++plane) {
      const auto from = unit.begin() + plane * strip_bytes();
      std::copy(from, from + strip_bytes(), host_strip(layer, plane, page));
    }
  }
  /// The unit in the host's copy.
  [[nodiscard]] unit_bytes get(std::int32_t layer, std::int64_t page) const {
    unit_bytes unit;
    for (int plane = 0; plane < planes_; ++plane) {
      const std::byte* const from = host_strip(layer, plane, page);
      unit.insert(unit.end(), from, from + strip_bytes());
    }
    return unit;
  }

  /// One strip of a page in the host's copy.
  [[nodiscard]] std::byte* host_bytes(std::int32_t layer, int plane, std::int64_t page) const {
    return host_strip(layer, plane, page);
  }

  /// Enqueues the copy of one page of one layer from the host's copy to the pool, or back.
  void write_page(std::int32_t layer, std::int64_t page, stream_ref stream) {
    for (int plane = 0; plane < planes_; ++plane) {
      backend_.copy_async(pool_.layer(layer).plane[plane] + layout_.page_offset(page),
                          host_strip(layer, plane, page), static_cast<std::size_t>(strip_bytes()),
                          pulseinfer::copy_direction::host_to_device, stream);
    }
  }
  void read_page(std::int32_t layer, std::int64_t page, stream_ref stream) {
    for (int plane = 0; plane < planes_; ++plane) {
      backend_.copy_async(host_strip(layer, plane, page),
                          pool_.layer(layer).plane[plane] + layout_.page_offset(page),
                          static_cast<std::size_t>(strip_bytes()),
                          pulseinfer::copy_direction::device_to_host, stream);
    }
  }
  /// All of the pool; returns when it is done.
  void upload(stream_ref stream) {
    backend_.copy_async(memory_.data(), host_.data(), memory_.bytes(),
                        pulseinfer::copy_direction::host_to_device, stream);
    backend_.sync(stream);
  }
  void download(stream_ref stream) {
    backend_.copy_async(host_.data(), memory_.data(), memory_.bytes(),
                        pulseinfer::copy_direction::device_to_host, stream);
    backend_.sync(stream);
  }

 private:
  static constexpr int planes_ = 2;

  [[nodiscard]] std::int64_t strip_bytes() const { return layout_.plane[0].strip_bytes; }
  [[nodiscard]] std::size_t layer_bytes() const {
    return static_cast<std::size_t>(planes_ * layout_.plane_bytes());
  }
  [[nodiscard]] std::byte* host_strip(std::int32_t layer, int plane, std::int64_t page) const {
    return host_.data() + static_cast<std::size_t>(layer) * layer_bytes() +
           plane * layout_.plane_bytes() + layout_.page_offset(page);
  }
  [[nodiscard]] std::vector<pulseinfer::layer_planes> planes(std::int32_t layers) const {
    std::vector<pulseinfer::layer_planes> found;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
      std::byte* const at = memory_.data() + static_cast<std::size_t>(layer) * layer_bytes();
      found.push_back({.plane = {at, at + layout_.plane_bytes()}});
    }
    return found;
  }

  Backend backend_;
  pulseinfer::block_layout layout_;
  pulseinfer::device_buffer<std::byte, Backend> memory_;
  pulseinfer::pinned_buffer<std::byte, Backend> host_;
  pulseinfer::kv_pool pool_;
};

}  // namespace test
