// SPDX-License-Identifier: Apache-2.0
/// @file
/// Digests: a small summary of the keys of each block, kept on the device, from which blocks are
/// scored unread.
///
/// A request holds tiles of 64 blocks (digest_tile.hpp), not a range: contexts may be ragged, growth
/// never moves data, an append touches one tile. `digest_bytes_per_token` says what they cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "pulseinfer/batch.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/digest_build.hpp"
#include "pulseinfer/digest_tile.hpp"
#include "pulseinfer/element.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/layout.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Sizes of a digest store. All of it is allocated by the constructor. Kind and element that are not
/// told are those that docs/fidelity.md recommends: INT8 bounds weigh as much as FP16 means.
struct digest_options {
  digest_kind kind = digest_kind::min_max;
  std::int32_t max_requests = 64;
  std::int64_t max_blocks = 8192;  ///< blocks a request
  std::int64_t tiles = 0;          ///< of 64 blocks, shared by all requests; 0: enough for all
  element_type element = element_type::i8;  ///< of the parts: f32, f16, bf16, f8_e4m3 or i8
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

/// Kernel body: enters a tile into the table, and makes block `unit` of its head `i % kv_heads` of
/// layer `i / kv_heads` one that has no digest: its scores are NaN, whatever the tile held before.
struct open_tile {
  digest_view first_layer;
  std::int64_t layer_bytes;
  std::int32_t tile;
  std::int32_t* entry;

  PULSEINFER_HD void operator()(std::int64_t i, std::int64_t unit) const {
    if (i == 0 && unit == 0) *entry = tile;
    const digest_form& form = first_layer.form;
    std::byte* const at =
        first_layer.tiles + i / form.kv_heads * layer_bytes + tile * form.tile_bytes();
    const float not_a_number = float_of(0x7fc00000u);
    for (std::int64_t p = 0; p < form.parts(); ++p) {
      if (form.is_scaled()) {
        *first_layer.factor_at(at, p, i % form.kv_heads, unit) = not_a_number;
      } else {
        store_element(first_layer.element_at(at, p, i % form.kv_heads, 0, unit), form.element,
                      not_a_number);
      }
    }
  }
};
static_assert(std::is_trivially_copyable_v<open_tile>);

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
        form_(checked(digest_form{.kind = options.kind,
                                  .element = options.element,
                                  .kv_heads = geometry.kv_heads,
                                  .head_dim = geometry.head_dim})),
        tiles_(backend, static_cast<std::size_t>(geometry.layers) * layer_bytes()),
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
  [[nodiscard]] const digest_form& form() const noexcept { return form_; }
  [[nodiscard]] std::int64_t free_tiles() const noexcept {
    return static_cast<std::int64_t>(free_.size());
  }

  /// The digests of a layer, for kernels. Valid as long as the store.
  /// @throws std::out_of_range  on a layer that the geometry does not have
  [[nodiscard]] digest_view view(std::int32_t layer) const {
    detail::expects<std::out_of_range>(layer >= 0 && layer < geometry_.layers,
                                       "digest_store: layer is ", layer, ", expected 0 to ",
                                       geometry_.layers - 1);
    return {.form = form_,
            .tiles = tiles_.data() + static_cast<std::size_t>(layer) * layer_bytes(),
            .tile_of = table_.data(),
            .tiles_per_request = tiles_per_request()};
  }

  /// Makes room for the first `blocks` blocks of a request, in all layers. False, and nothing
  /// changed, when too few tiles are free. Enqueues on `stream` what makes the room known to
  /// kernels. Blocks of it that are not digested have scores of NaN, and so rank last.
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
    held.reserve(needed);  // a tile that a table has must not stay a free one
    while (held.size() < needed) {
      const auto at = static_cast<std::int64_t>(held.size());
      backend_.for_each(
          {std::int64_t{geometry_.layers} * geometry_.kv_heads, tile_blocks}, {},
          std::uint64_t{4} * tile_blocks * static_cast<std::uint64_t>(geometry_.layers) *
              static_cast<std::uint64_t>(geometry_.kv_heads),
          detail::open_tile{.first_layer = view(0),
                            .layer_bytes = static_cast<std::int64_t>(layer_bytes()),
                            .tile = free_.back(),
                            .entry = table_.data() + request * tiles_per_request() + at},
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
    check_pool(pool);
    const std::int64_t reserved = static_cast<std::int64_t>(held.size()) * tile_blocks;
    detail::expects<std::out_of_range>(first >= 0 && count >= 0 && first <= reserved - count,
                                       "digest_store: ", count, " blocks from block ", first,
                                       " of request ", request, ", reserved are ", reserved);
    backend_.for_each_row(count * geometry_.kv_heads, {}, key_bytes(count),
                          digest_blocks<Table>{.digester = digester(layer, pool),
                                               .table = table,
                                               .request = request,
                                               .first_block = first,
                                               .block_tokens = geometry_.block_tokens},
                          stream);
  }

  /// Brings up to date the digests of the blocks that the last tokens of each row lie in, the block
  /// that is being filled included: on the device, in stream order. The digest of a block that is
  /// filled token by token is, to the bit, that of the same tokens built at once.
  ///
  /// Rows of 0 tokens, blocks that were not reserved and blocks without a page are left alone.
  ///
  /// @param layer       in [0, geometry().layers)
  /// @param batch       its device arrays are valid until the stream has got past this call
  /// @param new_tokens  how many of each row's tokens are new, at most; 0: nothing is done
  /// @param pool        whose keys are read; the same geometry as the digests'
  /// @param table       logical block -> page; readable on the device as long
  /// @param stream      the writers of the pages stand on it before this call
  /// @throws std::invalid_argument  on a pool of another geometry, or a negative count
  /// @throws std::out_of_range      on a layer or a request out of range
  /// @par Cost  one kernel that reads the keys of those blocks once
  template <page_table Table>
  void append(std::int32_t layer, const batch_view& batch, std::int64_t new_tokens,
              const kv_pool& pool, const Table& table, typename Backend::stream_ref stream) {
    check_pool(pool);
    const detail::block_digester body = digester(layer, pool);
    detail::check_batch("append", batch, options_.max_requests, options_.max_requests);
    detail::expects(new_tokens >= 0 && new_tokens <= max_tokens(), "append: new_tokens is ",
                    new_tokens, ", expected 0 to ", max_tokens());
    if (new_tokens == 0) return;
    const std::int64_t blocks =
        (new_tokens + geometry_.block_tokens - 2) / geometry_.block_tokens + 1;
    backend_.for_each_row(batch.rows() * blocks * geometry_.kv_heads, {},
                          key_bytes(batch.rows() * blocks),
                          digest_appended<Table>{.digester = body,
                                                 .table = table,
                                                 .requests = batch.device_requests,
                                                 .tokens = batch.device_tokens,
                                                 .new_tokens = new_tokens,
                                                 .blocks = blocks,
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
  [[nodiscard]] std::size_t layer_bytes() const {
    const std::int64_t bytes = detail::checked_offset(form_.tile_bytes(), options_.tiles, 0);
    (void)detail::checked_offset(bytes, geometry_.layers, 0);
    return static_cast<std::size_t>(bytes);
  }
  [[nodiscard]] std::int64_t max_tokens() const noexcept {
    return options_.max_blocks * geometry_.block_tokens;
  }
  [[nodiscard]] std::uint64_t key_bytes(std::int64_t blocks) const {
    return static_cast<std::uint64_t>(blocks * geometry_.unit_bytes() / geometry_.planes);
  }
  void check_pool(const kv_pool& pool) const {
    detail::expects(pool.geometry() == geometry_,
                    "digest_store: the pool has another geometry than the digests");
  }
  [[nodiscard]] detail::block_digester digester(std::int32_t layer, const kv_pool& pool) const {
    return {.digest = view(layer),
            .keys = pool.reader(layer, 0),
            .scales = geometry_.scales == scale_kind::none ? plane_reader{}
                                                           : pool.reader(layer, geometry_.planes)};
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
  digest_form form_;
  device_buffer<std::byte, Backend> tiles_;
  device_buffer<std::int32_t, Backend> table_;
  std::vector<std::vector<std::int32_t>> held_;  ///< tiles of each request, in block order
  std::vector<std::int32_t> free_;
  typename Backend::stream setup_;
};

}  // namespace pulseinfer
