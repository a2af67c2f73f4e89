// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a transfer engine is told: which way units go, and how much memory, how many chunks and
/// transfers there are at a time.
#pragma once

#include <cstdint>
#include <optional>

#include "pulseinfer/chunk_plan.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/link_monitor.hpp"
#include "pulseinfer/store_types.hpp"
#include "pulseinfer/transfer_cost.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// One unit that the host names: block `block` of sequence `sequences[row]`, and its page.
struct unit_target {
  std::int32_t row = 0;
  logical_block block{0};
  device_page page{0};
};

/// Sizes and limits of a transfer engine.
///
/// Chunks of a transfer start small, so that the link starts early, double up to `chunk_bytes`, and
/// get small again at its end, so that little is left to do behind the last DMA. With
/// `first_chunk_share` there are fewer: each costs the link a call.
struct transfer_options {
  /// A direction: pinned, and as much on the device; cut into chunks, 4,096 at most. Lists of 12
  /// bytes a unit come on top.
  std::int64_t staging_bytes = 64 << 20;
  std::int64_t chunk_bytes = 4 << 20;          ///< one DMA at most; at least a unit
  std::int64_t first_chunk_bytes = 256 << 10;  ///< one DMA at least; cut to a unit ... a chunk
  /// One in so many of a transfer is its first chunk, within the two sizes above, and each next one
  /// is a fifth larger, to the end, and a third of what is on its way that direction at least; a
  /// recall that is not staged goes in full chunks, as nobody gathers it. 0: as said above.
  std::int32_t first_chunk_share = 0;
  /// What one worker gathers of it at least; cut to a unit ... a chunk. A chunk has at most 16
  /// parts; one of a plan as many as that says.
  std::int64_t part_bytes = 64 << 10;
  /// Where nothing else is on its way to the device, and nobody uses its pages any more, the first
  /// sixth of a staged recall is copied from where it lies, in one batch of at most so many copies:
  /// the link moves those while the first chunk is gathered. Only with two chunks in flight or more,
  /// and from a store that is ready. 0: everything is gathered.
  std::int32_t head_copies = 0;
  /// How staged recalls go that find nothing else on its way to the device, or only what has been
  /// gathered and is no more than they are themselves, and whose pages nobody uses any more. The head
  /// is as the plan says, whatever `head_copies` says, less what is still on the link. Only with two
  /// chunks in flight or more, and from a store that is ready. For sizes without a plan the options
  /// above hold. See `tune_chunks`.
  chunk_plans plans = {};
  /// Chunks of a direction that are gathered or on the link at a time. More keep more workers busy,
  /// with fewer a small transfer passes a long one sooner.
  std::int32_t chunks_in_flight = 8;
  std::int32_t transfers_in_flight = 16;  ///< a direction
  std::int32_t max_rows = 64;             ///< rows of a transfer
  std::int64_t max_units = 16384;         ///< units of a transfer
  /// What a gather, scatter or pull kernel may take of the device (0: no limit). Two scatters may run
  /// side by side.
  int max_ctas = 0;
  /// About, of a direction: orders its transfers by when they would end if they had the link from
  /// their call, or from their lead, on. One that is nearly through is not held up by one that has
  /// just begun, a small one passes a long one, and no one is passed for longer than it takes by
  /// itself. 0: they take turns, a chunk each. Of a plan's head, what is on the link
  /// yet is taken off; 0: all that is under way.
  double link_bytes_per_second = 0;
  transfer_way way = transfer_way::staged;   ///< of recalls; offloads are always staged
  std::optional<transfer_costs> costs = {};  ///< what `automatic` goes by, see calibration.hpp
  link_monitor* monitor = nullptr;           ///< told of every chunk; outlives the engine
};

namespace detail {

inline void check_way(transfer_way way, const std::optional<transfer_costs>& costs) {
  expects(way <= transfer_way::per_block, "transfer_engine: way is ", static_cast<int>(way),
          ", expected one of transfer_way");
  if (way != transfer_way::automatic) return;
  expects(costs.has_value(), "transfer_engine: way is automatic, and there are no costs to go by: ",
          "calibrate, or load some");
  (void)costs->cheapest({.units = 1, .pieces = 1, .bytes = 1});
}

/// Throws `std::invalid_argument` naming the option and its limit.
inline transfer_options checked_transfer_options(const kv_geometry& store, const kv_pool& pool,
                                                 const transfer_options& o) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
    expects(value >= least && value <= most, "transfer_engine: ", name, " is ", value,
            ", expected ", least, " to ", most);
  };
  expects(pool.geometry() == store,
          "transfer_engine: pool and store have different geometries (units of ",
          pool.layout().unit_bytes(), " and ", store.unit_bytes(), " bytes)");
  check("chunk_bytes", o.chunk_bytes, store.unit_bytes(), std::int64_t{1} << 38);
  check("staging_bytes", o.staging_bytes, 2 * o.chunk_bytes, std::int64_t{1} << 40);
  check("first_chunk_bytes", o.first_chunk_bytes, 1, std::int64_t{1} << 38);
  check("first_chunk_share", o.first_chunk_share, 0, 4096);
  check("head_copies", o.head_copies, 0, 4096);
  check("part_bytes", o.part_bytes, 1, std::int64_t{1} << 38);
  check("chunks_in_flight", o.chunks_in_flight, 1, 4096);
  check("transfers_in_flight", o.transfers_in_flight, 1, 4096);
  check("max_rows", o.max_rows, 1, max_extent);
  check("max_units", o.max_units, 1, 1 << 24);
  check("max_ctas", o.max_ctas, 0, 1 << 20);
  expects(o.link_bytes_per_second == 0 ||
              (o.link_bytes_per_second >= 1 && o.link_bytes_per_second <= 1e18),
          "transfer_engine: link_bytes_per_second is ", o.link_bytes_per_second,
          ", expected 0, or 1 to 1e18");
  check_way(o.way, o.costs);
  return o;
}

}  // namespace detail
}  // namespace pulseinfer
