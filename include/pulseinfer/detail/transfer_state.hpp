// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a transfer consists of while it is under way: its state, and the chunks that its units are
/// dealt into.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "pulseinfer/chunk_plan.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/link_share.hpp"
#include "pulseinfer/hot_buffer.hpp"
#include "pulseinfer/staging_pool.hpp"
#include "pulseinfer/ticket.hpp"
#include "pulseinfer/transfer_options.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Units that the store is asked for in one call.
inline constexpr std::size_t most_units_at_once = 64;

/// A chunk is a list of its units' addresses, a head with their page ids, then the units. The page ids
/// end where the units begin: the DMA takes both and nothing else.
struct chunk_shape {
  std::int64_t units = 0;       ///< of a full chunk
  std::int64_t least = 0;       ///< of the first one
  std::int64_t part = 0;        ///< of what one worker gathers at least
  std::int64_t share = 0;       ///< one in so many of a transfer is its first chunk; 0: no matter
  std::int64_t list_bytes = 0;  ///< an address a unit
  std::int64_t head_bytes = 0;  ///< a page id a unit
  std::int64_t bytes = 0;

  /// Where the page ids of a chunk of so many units begin, on 16 bytes, and where its units do.
  [[nodiscard]] std::size_t ids_at(std::size_t count) const noexcept {
    return units_at() - (count * sizeof(std::int32_t) + 15) / 16 * 16;
  }
  [[nodiscard]] std::size_t units_at() const noexcept {
    return static_cast<std::size_t>(list_bytes + head_bytes);
  }
  static constexpr std::size_t most_parts = 16;
  /// Units that one worker gathers of a chunk of so many. What a task costs to start is paid for each
  /// part: a large chunk's are larger.
  [[nodiscard]] std::size_t part_of(std::size_t count,
                                    std::size_t parts = most_parts) const noexcept {
    return std::max(static_cast<std::size_t>(part), (count + parts - 1) / parts);
  }
  /// Units of chunk number `chunk` of a transfer of `all`, of which `left` are to be dealt out, when
  /// there are so many others on their way.
  [[nodiscard]] std::size_t count(std::int64_t chunk, std::size_t left, std::size_t all,
                                  bool only_lists = false,
                                  std::size_t under_way = 0) const noexcept {
    if (share > 0 && only_lists) return std::min(left, static_cast<std::size_t>(units));
    if (share > 0) {
      std::int64_t growing = std::max(least, static_cast<std::int64_t>(all) / share);
      for (std::int64_t i = 0; i < chunk && growing < units; ++i) growing += growing / 5;
      // Gathered in time all the same, and fewer calls.
      growing = std::max(growing, static_cast<std::int64_t>(under_way / 3));
      return std::min(left, static_cast<std::size_t>(std::min(growing, units)));
    }
    const std::int64_t growing = chunk < 32 ? least << chunk : units;
    const auto shrinking = std::max(static_cast<std::int64_t>((left + 1) / 2), least);
    return std::min(left, static_cast<std::size_t>(std::min({growing, shrinking, units})));
  }
};

[[nodiscard]] inline std::int32_t chunks_of(const transfer_options& o) noexcept {
  return static_cast<std::int32_t>(std::min<std::int64_t>(o.staging_bytes / o.chunk_bytes, 4096));
}
[[nodiscard]] inline chunk_shape shape_of_chunk(const transfer_options& o,
                                                std::int64_t unit_bytes) {
  const auto round_up = [](std::int64_t n) { return (n + 255) / 256 * 256; };
  chunk_shape shape{.units = o.chunk_bytes / unit_bytes};
  shape.least = std::clamp<std::int64_t>(o.first_chunk_bytes / unit_bytes, 1, shape.units);
  shape.part = std::clamp<std::int64_t>(o.part_bytes / unit_bytes, 1, shape.units);
  shape.share = o.first_chunk_share;
  shape.list_bytes = round_up(shape.units * std::int64_t{sizeof(std::byte*)});
  shape.head_bytes = round_up(shape.units * std::int64_t{sizeof(std::int32_t)});
  shape.bytes = round_up(shape.list_bytes + shape.head_bytes + shape.units * unit_bytes);
  return shape;
}

/// One transfer of a pipeline. Several of its chunks are worked on at a time; what they share is
/// behind the mutex. Whoever works on the transfer, or waits for a chunk for it, has a share in it;
/// with the last share it is concluded.
template <backend Backend, class Pipeline>
struct transfer_state : ticket_state<Backend>, staging_waiter<Backend> {
  transfer_state(Backend b, Pipeline& p, const transfer_options& o)
      : ticket_state<Backend>(b), pipeline(&p) {
    this->units.reserve(static_cast<std::size_t>(o.max_units));
    targets.reserve(static_cast<std::size_t>(o.max_units));
    order.reserve(static_cast<std::size_t>(o.max_units));
    leases.reserve(static_cast<std::size_t>(o.max_rows));
    this->chunk_ready = [](staging_waiter<Backend>& self, staging_chunk<Backend>& c) noexcept {
      auto& s = static_cast<transfer_state&>(self);
      s.pipeline->with_chunk(s, c);
    };
  }

  [[nodiscard]] unit_move& at(std::size_t position) noexcept {
    return this->units[static_cast<std::size_t>(order[position])];
  }
  /// Counts what has moved, in the report; whether some was cancelled.
  [[nodiscard]] bool count_moved(std::int64_t unit_bytes) noexcept {
    bool cancelled = false;
    for (const unit_move& unit : this->units) {
      if (unit.status == unit_status::moved) ++this->report.moved;
      cancelled = cancelled || unit.status == unit_status::cancelled;
    }
    this->report.bytes = this->report.moved * unit_bytes;
    return cancelled;
  }
  /// There are units that no chunk has, and they are still wanted. Under the mutex.
  [[nodiscard]] bool has_more() const noexcept {
    return next < order.size() && !this->error && !this->cancel.load(std::memory_order_acquire);
  }
  /// Units of the next chunk, or of the head; of how many that a worker gathers each. Under the mutex.
  struct cut {
    std::size_t units = 0;
    std::size_t part = 0;
  };
  [[nodiscard]] cut next_cut(const chunk_shape& shape, bool only_lists,
                             std::size_t under_way) const noexcept {
    const std::size_t all = order.size();
    const std::size_t left = all - next;
    if (head > 0) return {head, head};
    if (!plan) {
      const std::size_t dealt = shape.count(chunks, left, all, only_lists, under_way);
      return {dealt, shape.part_of(dealt)};
    }
    const std::size_t dealt =
        std::min({left, plan->chunk_of(chunks, all), static_cast<std::size_t>(shape.units)});
    return {dealt, shape.part_of(dealt, static_cast<std::size_t>(plan->parts))};
  }
  /// When the transfer would end, had it a link of that speed to itself from when it is needed on;
  /// 0 where there is no speed. Under the mutex.
  [[nodiscard]] std::uint64_t rank_of(std::size_t unit_bytes, double speed) const noexcept {
    if (speed == 0) return 0;
    const auto bytes = static_cast<double>((order.size() - next) * unit_bytes);
    const auto takes_ns = static_cast<std::uint64_t>(1e9 * std::min(bytes / speed, 1e6));
    return this->report.requested_ns + lead_ns + takes_ns;
  }
  void reset() noexcept {
    step = nullptr;
    this->units.clear();
    targets.clear();
    order.clear();
    next = 0;
    plan.reset();
    head = 0;
    chunks = 0;
    shares = 0;
    is_waiting = false;
    behind_readers = 0;
    this->error = nullptr;
    this->report = {};
    this->cancel.store(false, std::memory_order_relaxed);
    this->incomplete.store(false, std::memory_order_relaxed);
  }

  Pipeline* pipeline;
  std::int32_t layer = 0;
  std::uint64_t lead_ns = 0;  ///< it is not needed before
  step_record* step = nullptr;
  std::vector<typename Pipeline::lease> leases;
  const std::byte* store_on_device = nullptr;  ///< recall that pulls: where kernels see the store
  std::vector<unit_target> targets;  ///< recall: what the host names, until the first task ran
  link_share link;
  std::vector<std::int32_t> order;  ///< the units to move; filled before the first chunk
  std::mutex mutex;                 ///< guards what follows, and `error` until the end
  std::size_t next = 0;             ///< position in `order` of the first that no chunk has
  std::optional<chunk_plan> plan;   ///< recall: that it goes by, if there is one
  std::size_t head = 0;             ///< recall: the first units, if they go by themselves
  std::int64_t chunks = 0;          ///< dealt out, without the head
  std::int32_t shares = 0;
  bool has_arrived = false;  ///< recall: all that was enqueued is done; written once
  bool is_waiting = false;   ///< for a chunk
  /// A bit for each of the pipeline's streams that waits for the engine's; under its enqueue mutex.
  std::uint32_t behind_readers = 0;
};

/// Units [first, first + count) of a transfer's order, in a staging chunk. Workers take its parts,
/// and the one that ends the last part enqueues the chunk.
template <backend Backend, class Pipeline>
struct chunk_job {
  transfer_state<Backend, Pipeline>* owner = nullptr;
  staging_chunk<Backend>* at = nullptr;
  std::size_t first = 0;
  std::size_t count = 0;
  bool is_head = false;  ///< copied from where its units lie
  std::size_t part_units = 0;
  std::uint64_t enqueued_ns = 0;  ///< its first copy was
  std::atomic<std::size_t> next_part{0};
  std::atomic<std::size_t> parts_left{0};
  std::atomic<bool> is_dropped{false};  ///< no worker could be had for a part

  /// The next units of a transfer, in a chunk. No part of the job's last chunk is left.
  void claim(transfer_state<Backend, Pipeline>& s, staging_chunk<Backend>& c, std::size_t units,
             std::size_t units_of_part) noexcept {
    owner = &s;
    at = &c;
    is_head = s.head > 0;
    first = s.next;
    count = units;
    part_units = units_of_part;
    next_part.store(0, std::memory_order_relaxed);
    is_dropped.store(false, std::memory_order_relaxed);
    parts_left.store(parts(), std::memory_order_relaxed);
    s.next += units;
    s.chunks += is_head ? 0 : 1;
    s.head = 0;
  }
  [[nodiscard]] std::size_t parts() const noexcept { return (count + part_units - 1) / part_units; }
};

/// Units of a pipeline: those in chunks, and those that are to be gathered yet, in a chunk or in none;
/// and until when the link has something to do.
struct units_under_way {
  std::atomic<std::size_t> all{0};
  std::atomic<std::size_t> not_gathered{0};
  std::atomic<std::uint64_t> link_free_ns{0};  ///< about; changes under the enqueue mutex

  void enqueued(std::uint64_t now_ns, std::uint64_t takes_ns) noexcept {
    link_free_ns = std::max(link_free_ns.load(), now_ns) + takes_ns;
  }
  /// About how many units of all that is under way have to go over the link yet.
  [[nodiscard]] std::size_t before_link(std::uint64_t now_ns, double units_per_ns) const noexcept {
    const std::uint64_t free_ns = link_free_ns;
    const std::size_t most = all, later = not_gathered;
    if (units_per_ns == 0) return std::max(most, later);
    const double left_ns = free_ns > now_ns ? static_cast<double>(free_ns - now_ns) : 0;
    return later + std::min(most, static_cast<std::size_t>(left_ns * units_per_ns));
  }
};

}  // namespace pulseinfer::detail
