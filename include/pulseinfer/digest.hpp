// SPDX-License-Identifier: Apache-2.0
/// @file
/// Digests: a small summary of the keys of each block, kept on the device, from which blocks are
/// scored unread.
///
/// Digests lie in tiles of 64 blocks, `[tile][part][kv_head][channel][64]`, FP32: neighbouring
/// threads score neighbouring blocks and read neighbouring floats. A request holds tiles, not a
/// range: contexts may be ragged, growth never moves data, an append touches one tile. Costs 4
/// bytes x head_dim x kv_heads x parts per block and layer.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/layout.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Blocks of a tile.
inline constexpr std::int64_t tile_blocks = 64;

/// What is kept of the keys of a block. See `score_blocks` (consensus.hpp) for how each is scored.
enum class digest_kind : std::uint8_t {
  mean,     ///< one part: the mean of each channel over the block's tokens
  min_max,  ///< two parts: smallest and largest value of each channel (Quest's bound)
};

/// Floats that are kept for a channel of a block.
[[nodiscard]] PULSEINFER_HD constexpr std::int64_t digest_parts(digest_kind kind) {
  return kind == digest_kind::mean ? 1 : 2;
}

/// The digest tiles of one layer, as kernels see them. Trivially copyable; device addresses.
struct digest_view {
  float* tiles = nullptr;                 ///< of the layer
  const std::int32_t* tile_of = nullptr;  ///< [requests, tiles_per_request], -1 where there is none
  std::int64_t tiles_per_request = 0;
  std::int32_t kv_heads = 0;
  std::int32_t head_dim = 0;
  digest_kind kind = digest_kind::mean;

  /// Floats of one part of a tile.
  [[nodiscard]] PULSEINFER_HD std::int64_t part_size() const {
    return std::int64_t{kv_heads} * head_dim * tile_blocks;
  }
  /// Floats from channel 0 of a head to that of the block beside it are 1; to the next channel,
  /// tile_blocks. Null where the request has no tile for the block.
  [[nodiscard]] PULSEINFER_HD float* find(std::int64_t request, std::int64_t block,
                                          std::int64_t kv_head) const {
    const std::int64_t tile_index = block / tile_blocks;
    if (tile_index >= tiles_per_request) return nullptr;
    const std::int32_t tile = tile_of[request * tiles_per_request + tile_index];
    if (tile < 0) return nullptr;
    return tiles + tile * digest_parts(kind) * part_size() + kv_head * head_dim * tile_blocks +
           block % tile_blocks;
  }
};

/// Kernel body: digests channel `channel` (of all heads' channels) of block `first_block + i` of a
/// request, reading the keys from the page that the table names. Tokens are summed in their order.
template <page_table Table>
struct digest_block {
  digest_view digest;
  plane_reader keys;
  plane_reader scales;  ///< of the keys; without memory where they have none
  Table table;
  std::int64_t request;
  std::int64_t first_block;
  std::int32_t block_tokens;

  PULSEINFER_HD void operator()(std::int64_t i, std::int64_t channel) const {
    const std::int64_t block = first_block + i;
    const std::int64_t head = channel / digest.head_dim;
    const std::int64_t within = channel % digest.head_dim;
    const std::int64_t page = table.page(request, block);
    float* out = digest.find(request, block, head);
    if (page < 0 || out == nullptr) return;
    out += within * tile_blocks;
    float total = 0.0f;
    float least = 0.0f;
    float most = 0.0f;
    for (std::int32_t token = 0; token < block_tokens; ++token) {
      float value = keys(page, token, head, within);
      if (scales.memory != nullptr) value = detail::product(value, scales(page, token, head, 0));
      total = detail::sum(total, value);
      // A NaN is taken, whichever token has it, and then stays: no comparison with one holds.
      const bool always = token == 0 || value != value;
      least = always || value < least ? value : least;
      most = always || value > most ? value : most;
    }
    if (digest.kind == digest_kind::mean) {
      *out = detail::product(total, 1.0f / static_cast<float>(block_tokens));
    } else {
      out[0] = least;
      out[digest.part_size()] = most;
    }
  }
};

/// Sizes of a digest store. All of it is allocated by the constructor.
struct digest_options {
  digest_kind kind = digest_kind::mean;
  std::int32_t max_requests = 64;
  std::int64_t max_blocks = 8192;  ///< blocks a request
  std::int64_t tiles = 0;          ///< of 64 blocks, shared by all requests; 0: enough for all
};

namespace detail {

/// Kernel body. (Not a private member: nvcc launches no kernel over one.)
struct fill_table {
  std::int32_t* table;
  std::int64_t stride;
  std::int32_t value;
  PULSEINFER_HD void operator()(std::int64_t row, std::int64_t i) const {
    table[row * stride + i] = value;
  }
};

}  // namespace detail

/// The digests of all requests and layers of a pool.
///
/// @par Threads  one at a time
/// @par Order    all kernels run on the streams that are passed in; a request's calls use one
///               stream, or streams that the engine has ordered
/// @par Life     outlives the work that was enqueued over its views
template <backend Backend>
class digest_store {
 public:
  /// Blocks until the tables are initialised.
  /// @throws std::invalid_argument  naming the option and its limit
  /// @throws out_of_memory          when the tiles cannot be had
  digest_store(Backend backend, const kv_geometry& geometry, const digest_options& options)
      : backend_(backend),
        geometry_(checked(geometry)),
        options_(checked_options(options)),
        tiles_(backend, static_cast<std::size_t>(geometry.layers) * layer_floats()),
        table_(backend, static_cast<std::size_t>(options_.max_requests * tiles_per_request())),
        held_(static_cast<std::size_t>(options_.max_requests)),
        setup_(backend_.make_stream(stream_priority::normal)) {
    free_.reserve(static_cast<std::size_t>(options_.tiles));
    for (std::int64_t i = options_.tiles; i > 0; --i) {
      free_.push_back(static_cast<std::int32_t>(i - 1));
    }
    backend_.for_each({options_.max_requests, tiles_per_request()}, {}, table_.bytes(),
                      detail::fill_table{table_.data(), tiles_per_request(), -1}, setup_);
    backend_.sync(setup_);
  }

  [[nodiscard]] const kv_geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] std::int64_t max_blocks() const noexcept { return options_.max_blocks; }
  [[nodiscard]] std::int32_t max_requests() const noexcept { return options_.max_requests; }
  [[nodiscard]] std::int64_t free_tiles() const noexcept {
    return static_cast<std::int64_t>(free_.size());
  }

  /// The digests of a layer, for kernels. Valid as long as the store.
  /// @throws std::out_of_range  on a layer that the geometry does not have
  [[nodiscard]] digest_view view(std::int32_t layer) const {
    detail::expects<std::out_of_range>(layer >= 0 && layer < geometry_.layers,
                                       "digest_store: layer is ", layer, ", expected 0 to ",
                                       geometry_.layers - 1);
    return {.tiles = tiles_.data() + static_cast<std::size_t>(layer) * layer_floats(),
            .tile_of = table_.data(),
            .tiles_per_request = tiles_per_request(),
            .kv_heads = geometry_.kv_heads,
            .head_dim = geometry_.head_dim,
            .kind = options_.kind};
  }

  /// Makes room for the first `blocks` blocks of a request, in all layers. False, and nothing
  /// changed, when too few tiles are free. Enqueues on `stream` what makes the room known to
  /// kernels.
  /// @throws std::out_of_range  on a request or a count of blocks out of range
  /// @par Cost  a small kernel for each further tile of 64 blocks, otherwise nothing
  [[nodiscard]] bool reserve(std::int32_t request, std::int64_t blocks,
                             typename Backend::stream_ref stream) {
    auto& held = held_of(request);
    detail::expects<std::out_of_range>(blocks >= 0 && blocks <= options_.max_blocks,
                                       "digest_store: blocks is ", blocks, ", expected 0 to ",
                                       options_.max_blocks);
    const auto needed = static_cast<std::size_t>((blocks + tile_blocks - 1) / tile_blocks);
    if (needed <= held.size()) return true;
    if (needed - held.size() > free_.size()) return false;
    while (held.size() < needed) {
      const auto at = static_cast<std::int64_t>(held.size());
      backend_.for_each(
          {1, 1}, {}, sizeof(std::int32_t),
          detail::fill_table{table_.data() + request * tiles_per_request() + at, 1, free_.back()},
          stream);
      held.push_back(free_.back());
      free_.pop_back();
    }
    return true;
  }

  /// Digests blocks [first, first + count) of a request from their pages, on the device, in stream
  /// order. A block whose page is negative keeps the digest that it has.
  ///
  /// @param layer    in [0, geometry().layers)
  /// @param request  in [0, max_requests())
  /// @param first    first block, full of tokens like all that follow
  /// @param count    blocks
  /// @param pool     whose keys are read; the same geometry as the digests'
  /// @param table    logical block -> page; readable on the device until the stream has got past
  ///                 this call
  /// @param stream   the writers of the pages stand on it before this call
  /// @throws std::invalid_argument  on a pool of another geometry
  /// @throws std::out_of_range      on a layer, request or blocks out of range, or blocks that were
  ///                                not reserved
  /// @par Cost  one kernel that reads the keys of the blocks once
  template <page_table Table>
  void build(std::int32_t layer, std::int32_t request, std::int64_t first, std::int64_t count,
             const kv_pool& pool, const Table& table, typename Backend::stream_ref stream) {
    const auto& held = held_of(request);
    detail::expects(pool.geometry() == geometry_,
                    "digest_store: the pool has another geometry than the digests");
    const std::int64_t reserved = static_cast<std::int64_t>(held.size()) * tile_blocks;
    detail::expects<std::out_of_range>(first >= 0 && count >= 0 && first <= reserved - count,
                                       "digest_store: ", count, " blocks from block ", first,
                                       " of request ", request, ", reserved are ", reserved);
    const std::int64_t channels = std::int64_t{geometry_.kv_heads} * geometry_.head_dim;
    const auto key_bytes = static_cast<std::uint64_t>(count * geometry_.unit_bytes() / 2);
    backend_.for_each({count, channels}, {}, key_bytes,
                      digest_block<Table>{.digest = view(layer),
                                          .keys = pool.reader(layer, 0),
                                          .scales = geometry_.scales == scale_kind::none
                                                        ? plane_reader{}
                                                        : pool.reader(layer, geometry_.planes),
                                          .table = table,
                                          .request = request,
                                          .first_block = first,
                                          .block_tokens = geometry_.block_tokens},
                      stream);
  }

  /// Gives the request's tiles back. They may be reserved again at once: by work that is ordered
  /// after `stream`.
  /// @throws std::out_of_range  on a request out of range
  void release(std::int32_t request, typename Backend::stream_ref stream) {
    auto& held = held_of(request);
    backend_.for_each(
        {1, tiles_per_request()}, {}, held.size() * sizeof(std::int32_t),
        detail::fill_table{table_.data() + request * tiles_per_request(), tiles_per_request(), -1},
        stream);
    free_.insert(free_.end(), held.rbegin(), held.rend());
    held.clear();
  }

 private:
  static digest_options checked_options(digest_options options) {
    detail::expects(options.max_requests >= 1 && options.max_requests <= max_extent,
                    "digest_store: max_requests is ", options.max_requests, ", expected 1 to ",
                    max_extent);
    detail::expects(options.max_blocks >= 1 && options.max_blocks <= (1 << 24),
                    "digest_store: max_blocks is ", options.max_blocks, ", expected 1 to ",
                    1 << 24);
    const std::int64_t all =
        std::int64_t{options.max_requests} * ((options.max_blocks + tile_blocks - 1) / tile_blocks);
    if (options.tiles == 0) options.tiles = all;
    detail::expects(options.tiles >= 1 && options.tiles <= all, "digest_store: tiles is ",
                    options.tiles, ", expected 1 to ", all,
                    " (0: as many as all requests can use)");
    return options;
  }
  [[nodiscard]] std::int64_t tiles_per_request() const noexcept {
    return (options_.max_blocks + tile_blocks - 1) / tile_blocks;
  }
  [[nodiscard]] std::size_t layer_floats() const {
    const std::int64_t tile = digest_parts(options_.kind) * tile_blocks * geometry_.kv_heads;
    const std::int64_t floats =
        detail::checked_offset(tile * geometry_.head_dim, options_.tiles, 0);
    (void)detail::checked_offset(detail::checked_offset(floats, sizeof(float), 0), geometry_.layers,
                                 0);
    return static_cast<std::size_t>(floats);
  }
  [[nodiscard]] std::vector<std::int32_t>& held_of(std::int32_t request) {
    detail::expects<std::out_of_range>(request >= 0 && request < options_.max_requests,
                                       "digest_store: request is ", request, ", expected 0 to ",
                                       options_.max_requests - 1);
    return held_[static_cast<std::size_t>(request)];
  }

  Backend backend_;
  kv_geometry geometry_;
  digest_options options_;
  device_buffer<float, Backend> tiles_;
  device_buffer<std::int32_t, Backend> table_;
  std::vector<std::vector<std::int32_t>> held_;  ///< tiles of each request, in block order
  std::vector<std::int32_t> free_;
  typename Backend::stream setup_;
};

}  // namespace pulseinfer
