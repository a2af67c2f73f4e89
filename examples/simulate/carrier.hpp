// SPDX-License-Identifier: Apache-2.0
/// @file
/// The library's store and transfer engine on a simulated machine, small: a block's 16 tokens stand
/// as one, and every speed of the machine is a sixteenth, so that all times are as they would be.
/// Where many bytes move, channels stand for several, too (`setting::shrink`).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/backend/simulated.hpp"
#include "pulseinfer/block_store.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/calibration.hpp"
#include "pulseinfer/chunk_tuning.hpp"
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
  pulseinfer::transfer_way way = pulseinfer::transfer_way::automatic;
  bool tuned = false;       ///< by plans that were found by trial, see plans_of
  bool serial = false;      ///< gather all, then copy all, then scatter all
  std::int32_t pieces = 1;  ///< of a unit: one for each KV head that chooses by itself
};

/// What a carrier is told of its machine; null: nothing.
struct equipment {
  const pulseinfer::transfer_costs* costs = nullptr;
  const pulseinfer::chunk_plans* plans = nullptr;
};

/// Recalls units of requests, layer by layer. Which blocks they are does not matter to their time:
/// all requests read one sequence, whose blocks lie scattered in the store.
class carrier {
 public:
  using backend = pulseinfer::simulated_backend;
  using ticket = pulseinfer::ticket<backend>;

  /// @param stores  offloads at a time, of `store_units` units each
  carrier(backend b, const setting& s, const carriage& how, pulseinfer::link_monitor* monitor,
          std::int32_t stores = 0, const equipment& with = {})
      : geometry_{.layers = s.model.layers,
                  .kv_heads = std::max(1, s.model.kv_heads / s.ranks / how.pieces),
                  .head_dim = s.model.head_dim / s.shrink,
                  .block_tokens = 1},
        scale_(scale_of(s)),
        link_(scaled(s).link_bytes_per_second),
        pieces_(how.pieces),
        blocks_(static_cast<std::int32_t>(s.chosen()) * how.pieces),
        stored_blocks_(stores > 0 ? store_units : 0),
        rows_(s.streams),
        layout_(pulseinfer::make_layout(geometry_, std::int64_t{2} * rows_ * blocks_,
                                        {.arrangement = pulseinfer::kv_arrangement::interleaved})),
        memory_(b, static_cast<std::size_t>(layout_.plane_bytes(1))),
        pool_(geometry_, layout_, planes()),
        store_(b, geometry_,
               {.capacity_bytes = (std::int64_t{blocks_} * geometry_.layers +
                                   std::int64_t{stores} * stored_blocks_) *
                                  geometry_.unit_bytes(),
                .max_sequences = 1 + stores,
                .max_blocks = std::max(blocks_, stored_blocks_),
                .max_stored_blocks = blocks_ + stores * stored_blocks_}),
        sequence_(filled()),
        sequences_(static_cast<std::size_t>(rows_), sequence_),
        free_(b.make_stream(pulseinfer::stream_priority::normal)),
        mover_(b, store_, pool_, options(how, monitor, with)) {
    targets_.reserve(static_cast<std::size_t>(std::max(rows_ * blocks_, stored_blocks_)));
  }

  /// Plans for recalls of up to so many units, by trial.
  [[nodiscard]] pulseinfer::chunk_plans tune(std::int64_t most_units) {
    targets_.clear();
    for (std::int32_t i = 0; i < blocks_; ++i) {
      targets_.push_back({.row = 0, .block = block_of(i), .page = pulseinfer::device_page{i}});
    }
    return pulseinfer::tune_chunks(mover_, 0, {sequences_.data(), 1}, targets_, free_,
                                   {.most_units = most_units, .seed = tuning_seed});
  }

  /// Of the trials; what other seeds do to the sweep stands in docs/design.md.
  static constexpr std::uint64_t tuning_seed = 2;
  static constexpr std::int32_t store_units = 512;  ///< 32 MiB of a model with units of 64 KiB

  [[nodiscard]] std::int64_t unit_bytes() const { return geometry_.unit_bytes(); }

  /// Recalls `units[row]` blocks of each row at a layer; rows without any are left out. Nobody waits
  /// for them before so many seconds have gone by.
  [[nodiscard]] ticket recall(std::int32_t layer, const std::vector<std::int32_t>& units,
                              double lead_seconds = 0) {
    targets_.clear();
    std::int32_t row = 0;
    for (const std::int32_t n : units) {
      for (std::int32_t i = 0; i < n * pieces_; ++i) {
        targets_.push_back(
            {.row = row, .block = block_of(i), .page = pulseinfer::device_page{page_}});
        page_ = page_ + 1 < 2 * rows_ * blocks_ ? page_ + 1 : 0;
      }
      // A page is left out, so that a row's last unit and the next one's first do not become one copy.
      if (n > 0) page_ = page_ + 1 < 2 * rows_ * blocks_ ? page_ + 1 : 0;
      row += n > 0 ? 1 : 0;
    }
    // Nobody reads the pages now: who read them last was complete before the choice was made.
    auto taken =
        mover_.recall_units(layer, {sequences_.data(), static_cast<std::size_t>(std::max(row, 1))},
                            targets_, static_cast<std::uint64_t>(1e9 * lead_seconds), free_);
    if (!taken) throw std::logic_error("carrier: too many transfers under way");
    return std::move(*taken);
  }

  /// Blocks on their way to the store, as a sequence of their own.
  struct outgoing {
    carrier::ticket ticket;
    pulseinfer::sequence_id sequence;
  };
  /// Offloads so many units of a layer, at most `store_units`.
  [[nodiscard]] outgoing store(std::int32_t layer, std::int32_t units) {
    targets_.clear();
    for (std::int32_t i = 0; i < units; ++i) {
      targets_.push_back({.row = 0,
                          .block = pulseinfer::logical_block{i},
                          .page = pulseinfer::device_page{i % (2 * rows_ * blocks_)}});
    }
    const pulseinfer::sequence_id id = store_.open_sequence().value();
    auto taken = mover_.offload(layer, {&id, 1}, targets_, free_);
    if (!taken) throw std::logic_error("carrier: too many offloads under way");
    return {std::move(*taken), id};
  }
  /// They are there, and their place is for others: what matters is that they came.
  void stored(pulseinfer::sequence_id sequence) { (void)store_.close_sequence(sequence); }

 private:
  std::vector<pulseinfer::layer_planes> planes() {
    std::byte* const keys = memory_.data();
    return std::vector<pulseinfer::layer_planes>(static_cast<std::size_t>(geometry_.layers),
                                                 {.plane = {keys, keys}});
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
                                                     pulseinfer::link_monitor* monitor,
                                                     const equipment& with) const {
    const std::int64_t all = std::int64_t{rows_} * blocks_ * geometry_.unit_bytes();
    const auto scaled_bytes = [this](double real) {
      return std::max(static_cast<std::int64_t>(real * scale_), geometry_.unit_bytes());
    };
    pulseinfer::transfer_options o;
    o.chunk_bytes =
        how.serial ? std::max(all, geometry_.unit_bytes()) : scaled_bytes(4.5 * (1 << 20));
    o.first_chunk_bytes = how.serial ? o.chunk_bytes : scaled_bytes(512 << 10);
    o.first_chunk_share = how.serial ? 0 : 7;
    o.staging_bytes = std::max(2 * o.chunk_bytes, scaled_bytes(72 << 20));
    o.part_bytes = scaled_bytes(16 << 10);
    o.head_copies = how.serial ? 0 : 16;
    o.chunks_in_flight = 5;
    o.link_bytes_per_second = link_;
    o.transfers_in_flight = 4 * rows_ + 8;
    o.max_rows = rows_;
    o.max_units = std::max(std::int64_t{rows_} * blocks_, std::int64_t{stored_blocks_});
    o.way = how.serial ? pulseinfer::transfer_way::staged : how.way;
    if (with.costs != nullptr) o.costs = *with.costs;
    if (with.plans != nullptr) o.plans = *with.plans;
    o.monitor = monitor;
    return o;
  }

  /// Neighbours in a list do not lie side by side in the store, so that none become one copy.
  [[nodiscard]] pulseinfer::logical_block block_of(std::int32_t i) const {
    const bool is_apart =
        blocks_ % 37 != 0 && (blocks_ + 1) % 37 != 0 && 37 % blocks_ != blocks_ - 1;
    const std::int32_t step = is_apart ? 37 : 1;
    return pulseinfer::logical_block{blocks_ - 1 - i * step % blocks_};
  }
  pulseinfer::kv_geometry geometry_;
  double scale_;
  double link_;  ///< bytes a second
  std::int32_t pieces_;
  std::int32_t blocks_;
  std::int32_t stored_blocks_;
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

/// What was found out for a machine and a size of units, once for each.
template <class Found>
const Found& once_for(const setting& s, const std::string& what,
                      const std::function<Found()>& find) {
  struct entry {
    std::once_flag once;
    Found found;
  };
  static std::mutex mutex;
  static std::map<std::string, entry> known;
  const pulseinfer::hardware_profile& p = s.machine.profile;
  const std::string key = what + '/' + s.machine.name + '/' + std::to_string(s.unit_bytes()) + '/' +
                          std::to_string(s.shrink) + '/' + std::to_string(p.dram_bytes_per_second);
  entry* at = nullptr;
  {
    std::lock_guard lock(mutex);
    at = &known[key];
  }
  std::call_once(at->once, [&] { at->found = find(); });
  return at->found;
}

/// One request with so many blocks, at one layer.
inline setting one_of(const setting& s, std::int32_t blocks) {
  setting one = s;
  one.streams = 1;
  one.model.layers = 1;
  one.budget = blocks;
  one.context = std::max(s.context, double(blocks) * block_tokens);
  return one;
}

/// How recalls of up to 34 MB go best on this machine, by the library's trials.
inline const pulseinfer::chunk_plans& plans_of(const setting& s, std::int32_t pieces = 1) {
  return once_for<pulseinfer::chunk_plans>(s, "plans of " + std::to_string(pieces), [&] {
    const double most = std::clamp(34e6 * pieces / s.unit_bytes(), 2.0, 2048.0);
    const auto blocks = static_cast<std::int32_t>(most / pieces) + 1;
    carrier::backend b(pulseinfer::timed{scaled(s)});
    return carrier(b, one_of(s, blocks),
                   {.way = pulseinfer::transfer_way::staged, .pieces = pieces}, nullptr)
        .tune(static_cast<std::int64_t>(most));
  });
}

/// What the ways cost on this machine, by the library's calibration.
inline const pulseinfer::transfer_costs& costs_of(const setting& s, bool tuned) {
  return once_for<pulseinfer::transfer_costs>(s, tuned ? "costs, tuned" : "costs", [&] {
    const setting one = one_of(s, 256);
    pulseinfer::calibration_options o;
    o.ways = {pulseinfer::transfer_way::staged, pulseinfer::transfer_way::batched};
    o.least_entries = 1;
    o.most_entries = 256;
    carrier::backend b(pulseinfer::timed{scaled(s)});
    carrier staged(b, one, {pulseinfer::transfer_way::staged}, nullptr, 0,
                   {nullptr, tuned ? &plans_of(s) : nullptr});
    carrier batched(b, one, {pulseinfer::transfer_way::batched}, nullptr);
    o.least_entry_bytes = o.most_entry_bytes = staged.unit_bytes();
    const auto seconds = [&](pulseinfer::transfer_way way,
                             const pulseinfer::transfer_shape& shape) {
      const std::uint64_t begin = b.now_ns();
      carrier& c = way == pulseinfer::transfer_way::staged ? staged : batched;
      c.recall(0, {static_cast<std::int32_t>(shape.units)}).sync();
      return 1e-9 * static_cast<double>(std::max<std::uint64_t>(b.now_ns() - begin, 1));
    };
    return pulseinfer::calibrate(seconds, o);
  });
}

inline equipment equipment_of(const setting& s, const carriage& how) {
  return {&costs_of(s, how.tuned), how.tuned && !how.serial ? &plans_of(s, how.pieces) : nullptr};
}

/// What a recall of what all streams lack at a layer, of 4 MiB at most, takes beside its bytes.
inline double recall_start_seconds(const setting& s, const carriage& how) {
  const double most = std::min(std::ceil(s.kv.miss * s.chosen()) * s.streams,
                               std::floor(4.0 * (1 << 20) / s.unit_bytes()));
  const auto units = static_cast<std::int32_t>(std::max(most, 1.0));
  carrier::backend b(pulseinfer::timed{scaled(s)});
  carrier c(b, one_of(s, units), how, nullptr, 0, equipment_of(s, how));
  const std::uint64_t begin = b.now_ns();
  c.recall(0, {units}).sync();
  const double took = 1e-9 * static_cast<double>(b.now_ns() - begin);
  return std::max(0.0, took - s.unit_bytes() * units / recall_speed(s.machine.profile));
}

}  // namespace simulate
