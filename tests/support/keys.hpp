// SPDX-License-Identifier: Apache-2.0
/// @file
/// Keys of some requests in a pool, known to the host: what digests and scores are compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/digest.hpp"
#include "pulseinfer/element.hpp"
#include "pulseinfer/page_table.hpp"
#include "support/device_array.hpp"
#include "support/paged_pool.hpp"

namespace test {

/// A float in [-1, 1), a multiple of 2^-10: every element type of interest but bf16 holds it
/// exactly.
inline float random_float(pulseinfer::detail::random_source& draw) {
  return static_cast<float>(static_cast<std::int64_t>(draw.below(2048)) - 1024) / 1024.0f;
}

template <class Backend>
class key_cache {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// Every block has a page; neighbouring blocks have no neighbouring pages.
  key_cache(const Backend& machine, const pulseinfer::kv_geometry& geometry, std::int64_t requests,
            std::int64_t blocks)
      : geometry_(geometry),
        requests_(requests),
        blocks_(blocks),
        pages_(machine, geometry, requests * blocks),
        table_(machine, static_cast<std::size_t>(requests * blocks)) {
    const std::int64_t count = requests * blocks;
    for (std::int64_t i = 0; i < count; ++i) {
      host_table_.push_back(static_cast<std::int32_t>(count - 1 - i));
    }
    units_.assign(static_cast<std::size_t>(count * geometry.layers),
                  unit_bytes(static_cast<std::size_t>(geometry.unit_bytes())));
  }

  [[nodiscard]] const pulseinfer::kv_pool& pool() const { return pages_.pool(); }
  [[nodiscard]] pulseinfer::block_table device_table() const {
    return {table_.data(), requests_, blocks_};
  }

  void randomise(std::uint64_t seed) {
    pulseinfer::detail::random_source draw(seed);
    for (std::int32_t layer = 0; layer < geometry_.layers; ++layer) {
      for (std::int64_t request = 0; request < requests_; ++request) {
        for (std::int64_t block = 0; block < blocks_; ++block) {
          for (std::int64_t i = 0; i < std::int64_t{geometry_.block_tokens} * channels(); ++i) {
            set(layer, request, block, i / channels(), i % channels(), random_float(draw));
          }
        }
      }
    }
  }
  /// `channel` counts through all heads' channels.
  void set(std::int32_t layer, std::int64_t request, std::int64_t block, std::int64_t token,
           std::int64_t channel, float value) {
    const std::int64_t index = token * channels() + channel;
    void* const keys = unit(layer, request, block).data();
    switch (geometry_.element) {
      case pulseinfer::element_type::f16:
        static_cast<std::uint16_t*>(keys)[index] = pulseinfer::f16_from_float(value);
        break;
      case pulseinfer::element_type::bf16:
        static_cast<std::uint16_t*>(keys)[index] =
            static_cast<std::uint16_t>(pulseinfer::detail::bits_of(value) >> 16);
        break;
      case pulseinfer::element_type::f32:
        static_cast<float*>(keys)[index] = value;
        break;
      case pulseinfer::element_type::i8:
        static_cast<std::int8_t*>(keys)[index] = static_cast<std::int8_t>(value * 127);
        break;
      case pulseinfer::element_type::f8_e4m3:
      case pulseinfer::element_type::f8_e5m2:
        // Any finite pattern will do: these bits leave no exponent full.
        static_cast<std::uint8_t*>(keys)[index] =
            static_cast<std::uint8_t>(static_cast<int>(value * 127)) & 0xbb;
        break;
    }
  }
  [[nodiscard]] float key(std::int32_t layer, std::int64_t request, std::int64_t block,
                          std::int64_t token, std::int64_t channel) const {
    return pulseinfer::load_element(units_[at(layer, request, block)].data(),
                                    token * channels() + channel, geometry_.element);
  }
  /// Takes the block's page out of the table.
  void forget_page(std::int64_t request, std::int64_t block) {
    host_table_[static_cast<std::size_t>(request * blocks_ + block)] = -1;
  }

  /// Brings pool and table up to date; returns when it is done.
  void upload(stream_ref stream) {
    for (std::int32_t layer = 0; layer < geometry_.layers; ++layer) {
      for (std::int64_t request = 0; request < requests_; ++request) {
        for (std::int64_t block = 0; block < blocks_; ++block) {
          const std::int32_t page =
              host_table_[static_cast<std::size_t>(request * blocks_ + block)];
          if (page >= 0) pages_.put(layer, page, units_[at(layer, request, block)]);
        }
      }
    }
    pages_.upload(stream);
    table_.upload(host_table_, stream);
  }

  /// The digest of a block, computed in the order that the library promises: part by part, all
  /// channels.
  [[nodiscard]] std::vector<float> digest(pulseinfer::digest_kind kind, std::int32_t layer,
                                          std::int64_t request, std::int64_t block) const {
    const auto count = static_cast<std::size_t>(channels());
    std::vector<float> first(count), second(count);
    for (std::size_t c = 0; c < count; ++c) {
      float total = 0.0f;
      for (std::int64_t token = 0; token < geometry_.block_tokens; ++token) {
        const float value = key(layer, request, block, token, static_cast<std::int64_t>(c));
        total = pulseinfer::detail::sum(total, value);
        if (token == 0 || value < first[c]) first[c] = value;
        if (token == 0 || value > second[c]) second[c] = value;
      }
      if (kind == pulseinfer::digest_kind::mean) {
        first[c] =
            pulseinfer::detail::product(total, 1.0f / static_cast<float>(geometry_.block_tokens));
      }
    }
    if (kind == pulseinfer::digest_kind::min_max) {
      first.insert(first.end(), second.begin(), second.end());
    }
    return first;
  }
  /// The same as digests of an element read it: rounded, or scaled by the largest magnitude of a
  /// head and part. The centre only, of that kind.
  [[nodiscard]] std::vector<float> stored_digest(pulseinfer::digest_kind kind,
                                                 pulseinfer::element_type element,
                                                 std::int32_t layer, std::int64_t request,
                                                 std::int64_t block) const {
    using pulseinfer::detail::product;
    const bool is_bounds = kind == pulseinfer::digest_kind::min_max;
    std::vector<float> values =
        digest(is_bounds ? kind : pulseinfer::digest_kind::mean, layer, request, block);
    const auto dim = static_cast<std::size_t>(geometry_.head_dim);
    for (std::size_t first = 0; first < values.size(); first += dim) {
      float most = 0.0f;
      for (std::size_t c = first; c < first + dim; ++c) most = std::max(most, std::abs(values[c]));
      const float scale = most / (element == pulseinfer::element_type::i8 ? 127.0f : 448.0f);
      for (std::size_t c = first; c < first + dim; ++c) {
        const float scaled = scale > 0.0f ? values[c] / scale : 0.0f;
        switch (element) {
          case pulseinfer::element_type::f16:
            values[c] = pulseinfer::float_from_f16(pulseinfer::f16_from_float(values[c]));
            break;
          case pulseinfer::element_type::bf16:
            values[c] = pulseinfer::float_from_bf16(pulseinfer::bf16_from_float(values[c]));
            break;
          case pulseinfer::element_type::f8_e4m3:
            values[c] = product(
                pulseinfer::float_from_f8_e4m3(pulseinfer::f8_e4m3_from_float(scaled)), scale);
            break;
          case pulseinfer::element_type::i8:
            values[c] = product(static_cast<float>(pulseinfer::i8_from_float(scaled)), scale);
            break;
          default:
            break;
        }
      }
    }
    return values;
  }
  [[nodiscard]] std::int64_t channels() const {
    return std::int64_t{geometry_.kv_heads} * geometry_.head_dim;
  }

 private:
  [[nodiscard]] std::size_t at(std::int32_t layer, std::int64_t request, std::int64_t block) const {
    return static_cast<std::size_t>((layer * requests_ + request) * blocks_ + block);
  }
  [[nodiscard]] unit_bytes& unit(std::int32_t layer, std::int64_t request, std::int64_t block) {
    return units_[at(layer, request, block)];
  }

  pulseinfer::kv_geometry geometry_;
  std::int64_t requests_;
  std::int64_t blocks_;
  paged_pool<Backend> pages_;
  device_array<std::int32_t, Backend> table_;
  std::vector<std::int32_t> host_table_;
  std::vector<unit_bytes> units_;  ///< [layers, requests, blocks]
};

}  // namespace test
