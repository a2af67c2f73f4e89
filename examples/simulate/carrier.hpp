// SPDX-License-Identifier: Apache-2.0
/// @file
/// The library's store and transfer engine on a simulated machine, small: a block's 16 tokens stand
/// as one, and every speed of the machine is a sixteenth, so that all times are as they would be.
/// Where many bytes move, channels stand for several, too (`setting::shrink`).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include "pulseinfer/backend/simulated.hpp"
#include "pulseinfer/block_store.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/pool_shape.hpp"
#include "pulseinfer/transfer.hpp"
#include "setting.hpp"

namespace simulate {

/// Bytes of the simulated machine for one real one.
inline double scale_of(const setting& s) {
  return 1.0 / (block_tokens * s.shrink);
}

inline pulseinfer::hardware_profile scaled(const setting& s) {
  pulseinfer::hardware_profile p = s.machine.profile;
  const double scale = scale_of(s);
  p.dram_bytes_per_second *= scale;
  p.link_bytes_per_second *= scale;
  p.hbm_bytes_per_second *= scale;
  p.worker_bytes_per_second *= scale;
  return p;
}

/// How a system moves what it recalls.
struct carriage {
  pulseinfer::transfer_way way = pulseinfer::transfer_way::staged;
  bool serial = false;      ///< gather all, then copy all, then scatter all
  std::int32_t pieces = 1;  ///< of a unit: one for each KV head that chooses by itself
};

/// Recalls units of requests, layer by layer. Which blocks they are does not matter to their time:
/// all requests read one sequence, whose blocks lie scattered in the store.
class carrier {
 public:
  using backend = pulseinfer::simulated_backend;
  using ticket = pulseinfer::ticket<backend>;

  carrier(backend b, const setting& s, const carriage& how, pulseinfer::link_monitor* monitor)
      : geometry_{.layers = s.model.layers,
                  .kv_heads = std::max(1, s.model.kv_heads / s.ranks / how.pieces),
                  .head_dim = s.model.head_dim / s.shrink,
                  .block_tokens = 1},
        scale_(scale_of(s)),
        pieces_(how.pieces),
        blocks_(static_cast<std::int32_t>(s.chosen()) * how.pieces),
        rows_(s.streams),
        layout_(pulseinfer::nhd_layout(geometry_, std::int64_t{2} * rows_ * blocks_)),
        memory_(b, static_cast<std::size_t>(2 * layout_.plane_bytes())),
        pool_(geometry_, layout_, planes()),
        store_(b, geometry_,
               {.capacity_bytes = std::int64_t{blocks_} * geometry_.layers * geometry_.unit_bytes(),
                .max_sequences = 1,
                .max_blocks = blocks_}),
        sequence_(filled()),
        sequences_(static_cast<std::size_t>(rows_), sequence_),
        free_(b.make_stream(pulseinfer::stream_priority::normal)),
        mover_(b, store_, pool_, options(how, monitor)) {}

  [[nodiscard]] std::int64_t unit_bytes() const { return geometry_.unit_bytes(); }

  /// Recalls `units[row]` blocks of each row at a layer; rows without any are left out.
  [[nodiscard]] ticket recall(std::int32_t layer, const std::vector<std::int32_t>& units) {
    targets_.clear();
    std::int32_t row = 0;
    for (const std::int32_t n : units) {
      for (std::int32_t i = 0; i < n * pieces_; ++i) {
        targets_.push_back({.row = row,
                            .block = pulseinfer::logical_block{i * step_ % blocks_},
                            .page = pulseinfer::device_page{page_}});
        page_ = page_ + 1 < 2 * rows_ * blocks_ ? page_ + 1 : 0;
      }
      row += n > 0 ? 1 : 0;
    }
    // Nobody reads the pages now: who read them last was complete before the choice was made.
    auto taken = mover_.recall_units(
        layer, {sequences_.data(), static_cast<std::size_t>(std::max(row, 1))}, targets_, free_);
    if (!taken) throw std::logic_error("carrier: too many transfers under way");
    return std::move(*taken);
  }

 private:
  std::vector<pulseinfer::layer_planes> planes() {
    std::byte* const keys = memory_.data();
    return std::vector<pulseinfer::layer_planes>(static_cast<std::size_t>(geometry_.layers),
                                                 {.plane = {keys, keys + layout_.plane_bytes()}});
  }
  pulseinfer::sequence_id filled() {
    const pulseinfer::sequence_id id = store_.open_sequence().value();
    for (std::int32_t layer = 0; layer < geometry_.layers; ++layer) {
      for (std::int32_t block = 0; block < blocks_; ++block) {
        const auto r = store_.reserve(id, layer, pulseinfer::logical_block{block});
        std::memset(store_.writable(r.slot), block & 0xff,
                    static_cast<std::size_t>(geometry_.unit_bytes()));
        store_.commit(r.slot);
      }
    }
    return id;
  }
  [[nodiscard]] pulseinfer::transfer_options options(const carriage& how,
                                                     pulseinfer::link_monitor* monitor) const {
    const std::int64_t all = std::int64_t{rows_} * blocks_ * geometry_.unit_bytes();
    const auto scaled_bytes = [this](double real) {
      return std::max(static_cast<std::int64_t>(real * scale_), geometry_.unit_bytes());
    };
    pulseinfer::transfer_options o;
    o.chunk_bytes = how.serial ? std::max(all, geometry_.unit_bytes()) : scaled_bytes(4 << 20);
    o.first_chunk_bytes = how.serial ? o.chunk_bytes : scaled_bytes(1 << 20);
    o.staging_bytes = std::max(2 * o.chunk_bytes, scaled_bytes(64 << 20));
    o.part_bytes = scaled_bytes(64 << 10);
    o.chunks_in_flight = 16;
    o.transfers_in_flight = 4 * rows_ + 8;
    o.max_rows = rows_;
    o.max_units = std::int64_t{rows_} * blocks_;
    o.way = how.way;
    o.monitor = monitor;
    return o;
  }

  static constexpr std::int32_t step_ = 37;  ///< neighbours in a list do not lie side by side

  pulseinfer::kv_geometry geometry_;
  double scale_;
  std::int32_t pieces_;
  std::int32_t blocks_;
  std::int32_t rows_;
  pulseinfer::block_layout layout_;
  pulseinfer::device_buffer<std::byte, backend> memory_;
  pulseinfer::kv_pool pool_;
  pulseinfer::block_store<backend> store_;
  pulseinfer::sequence_id sequence_;
  std::vector<pulseinfer::sequence_id> sequences_;
  backend::stream free_;
  pulseinfer::transfer_engine<backend, pulseinfer::block_store<backend>> mover_;
  std::vector<pulseinfer::unit_target> targets_;
  std::int32_t page_ = 0;
};

/// What a recall of a single unit takes beside its bytes on the link.
inline double recall_start_seconds(const setting& s, const carriage& how) {
  setting one = s;
  one.streams = 1;
  one.model.layers = 1;
  carrier::backend b(pulseinfer::timed{scaled(s)});
  carrier c(b, one, how, nullptr);
  const std::uint64_t begin = b.now_ns();
  c.recall(0, {1}).sync();
  const double took = 1e-9 * static_cast<double>(b.now_ns() - begin);
  return std::max(0.0, took - s.unit_bytes() / s.machine.profile.link_bytes_per_second);
}

}  // namespace simulate
