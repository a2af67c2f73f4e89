// SPDX-License-Identifier: Apache-2.0
/// @file
/// Append: keeps digests and the store behind growing contexts. The last block of a context, while
/// it is being filled, stays in the pool; a block that becomes full is digested and offloaded.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/digest.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/layout.hpp"
#include "pulseinfer/transfer.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A request and the tokens that its pages hold now.
struct appended_row {
  std::int32_t request = 0;
  std::int64_t tokens = 0;
};

/// Writes full blocks behind the engine, layer by layer, all requests of a layer in one transfer.
///
/// It never blocks, and it leases the sequences of its open requests: the store does not evict what
/// it was given before the request is closed. What cannot be handed over now (too many transfers
/// under way, no digest tile, a full store, a failed copy) is tried again by the next `append` of
/// the layer. A page may be given to other use once `stored_blocks` counts its block, and no stream
/// of the engine reads it any more.
///
/// @par Threads  one at a time
/// @par Life     digests and mover outlive it, and it outlives its transfers; its destructor drops
///               their tickets, the transfers go on
template <backend Backend, class Store>
class context_writer {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// @param digests  outlives the writer
  /// @param mover    outlives the writer; offloads to the store of the sequences
  /// @param pool     of both; copied
  context_writer(digest_store<Backend>& digests, transfer_engine<Backend, Store>& mover,
                 const kv_pool& pool)
      : digests_(&digests),
        mover_(&mover),
        pool_(pool),
        requests_(static_cast<std::size_t>(digests.max_requests())),
        progress_(requests_.size() * static_cast<std::size_t>(pool.geometry().layers)),
        under_way_(static_cast<std::size_t>(pool.geometry().layers)) {}

  /// Begins a request whose blocks go to a sequence of the store. Nothing of it is stored yet.
  /// @throws std::out_of_range on the request, std::invalid_argument if it is open already
  void open(std::int32_t request, sequence_id sequence) {
    entry& e = entry_of(request);
    detail::expects(!e.open, "context_writer: request ", request, " is open already");
    e.lease = mover_->store().acquire(sequence, 0);
    e.sequence = sequence;
    e.open = true;
    ++e.generation;
    for (std::int32_t layer = 0; layer < layers(); ++layer) at(layer, request) = {};
  }

  /// Ends a request. Blocks on their way arrive in the store if the sequence is still open there.
  /// @throws std::out_of_range on the request, std::invalid_argument if it is not open
  void close(std::int32_t request) {
    entry& e = checked_entry(request);
    e.open = false;
    e.lease.release();
  }

  /// Digests and offloads the blocks of a layer that have become full, of all rows in one transfer.
  ///
  /// @param layer         in [0, layers of the pool)
  /// @param rows          distinct requests; their tokens never become fewer
  /// @param host_table    logical block -> page, read before the call returns
  /// @param device_table  the same for kernels, valid until `stream` has got past this call
  /// @param stream        the writers of the pages stand on it before this call
  /// @return true if all full blocks are stored or on their way; false if some must be tried again
  /// @throws std::out_of_range, std::invalid_argument  on a layer, request, token count or page
  ///         that is out of range; nothing was handed over
  template <page_table HostTable, page_table DeviceTable>
  bool append(std::int32_t layer, std::span<const appended_row> rows, const HostTable& host_table,
              const DeviceTable& device_table, stream_ref stream) {
    pool_.check_layer(layer);
    for (std::int32_t l = 0; l < layers(); ++l)
      collect(l);  // their tickets are free to be used again
    sequences_.clear();
    units_.clear();
    for (const appended_row& row : rows) check_row(row);
    bool all = true;
    for (const appended_row& row : rows) {
      const progress& p = at(layer, row.request);
      const std::int64_t full = full_blocks(row.tokens);
      if (p.handed_over >= full) continue;
      const std::int64_t last = add_blocks(row, p.handed_over, full, host_table, stream);
      all = all && last == full;
      if (last > p.handed_over) {
        digests_->build(layer, row.request, p.handed_over, last - p.handed_over, pool_,
                        device_table, stream);
      }
    }
    if (units_.empty()) return all;
    std::vector<written_block> blocks;
    blocks.reserve(units_.size());
    for (const unit_target& unit : units_) {
      const std::int32_t request = request_of_[static_cast<std::size_t>(unit.row)];
      blocks.push_back({request, index_of(unit.block), entry_of(request).generation});
    }
    auto ticket = mover_->offload(layer, sequences_, units_, stream);
    if (!ticket) return false;
    under_way_[static_cast<std::size_t>(layer)].push_back({std::move(*ticket), std::move(blocks)});
    // From here on nothing fails: what is handed over is in the books.
    for (const written_block& b : under_way_[static_cast<std::size_t>(layer)].back().blocks) {
      at(layer, b.request).handed_over = b.block + 1;
    }
    return all;
  }

  /// Leading blocks of a request and layer that the store holds. Asks the transfers first; does not
  /// block.
  /// @throws std::out_of_range      on a layer or request out of range
  /// @throws std::invalid_argument  on a request that is not open
  [[nodiscard]] std::int64_t stored_blocks(std::int32_t layer, std::int32_t request) {
    pool_.check_layer(layer);
    (void)checked_entry(request);
    collect(layer);
    return at(layer, request).stored;
  }

  /// Blocks until every transfer of a layer has ended, well or not: `stored_blocks` tells.
  /// @throws std::out_of_range  on a layer out of range
  void sync_layer(std::int32_t layer) {
    pool_.check_layer(layer);
    for (transfer& t : under_way_[static_cast<std::size_t>(layer)]) {
      try {
        t.ticket.sync();
      } catch (const std::exception&) {
        // Its units say so; they are tried again.
      }
    }
    collect(layer);
  }

 private:
  struct entry {
    sequence_id sequence;
    typename Store::lease lease;  ///< what is written stays, until the request is closed
    bool open = false;
    std::uint64_t generation = 0;
  };
  /// Law: stored <= handed_over, and blocks below `stored` are in the store.
  struct progress {
    std::int64_t handed_over = 0;
    std::int64_t stored = 0;
  };
  struct written_block {
    std::int32_t request;
    std::int32_t block;
    std::uint64_t generation;
  };
  struct transfer {
    pulseinfer::ticket<Backend> ticket;
    std::vector<written_block> blocks;
  };

  [[nodiscard]] std::int32_t layers() const noexcept { return pool_.geometry().layers; }
  [[nodiscard]] std::int64_t full_blocks(std::int64_t tokens) const noexcept {
    return tokens / pool_.geometry().block_tokens;
  }
  [[nodiscard]] entry& entry_of(std::int32_t request) {
    detail::expects<std::out_of_range>(
        request >= 0 && static_cast<std::size_t>(request) < requests_.size(),
        "context_writer: request is ", request, ", expected 0 to ", requests_.size() - 1);
    return requests_[static_cast<std::size_t>(request)];
  }
  [[nodiscard]] entry& checked_entry(std::int32_t request) {
    entry& e = entry_of(request);
    detail::expects(e.open, "context_writer: request ", request, " is not open");
    return e;
  }
  [[nodiscard]] progress& at(std::int32_t layer, std::int32_t request) {
    return progress_[static_cast<std::size_t>(layer) * requests_.size() +
                     static_cast<std::size_t>(request)];
  }

  void check_row(const appended_row& row) {
    (void)checked_entry(row.request);
    detail::expects(row.tokens >= 0 && full_blocks(row.tokens) <= digests_->max_blocks(),
                    "context_writer: tokens is ", row.tokens, " for request ", row.request,
                    ", the digests hold ", digests_->max_blocks(), " blocks of ",
                    pool_.geometry().block_tokens);
  }

  /// Lists blocks [first, full) of a row, or as many as a transfer and the digest tiles take.
  /// Returns the end of what was listed.
  template <page_table HostTable>
  std::int64_t add_blocks(const appended_row& row, std::int64_t first, std::int64_t full,
                          const HostTable& table, stream_ref stream) {
    const transfer_options& most = mover_->options();
    const auto room = most.max_units - static_cast<std::int64_t>(units_.size());
    const std::int64_t last = std::min(full, first + room);
    if (last <= first || sequences_.size() >= static_cast<std::size_t>(most.max_rows)) return first;
    for (std::int64_t block = first; block < last; ++block) {
      pool_.check_page(table.page(row.request, block));
    }
    if (!digests_->reserve(row.request, last, stream)) return first;
    const auto index = static_cast<std::int32_t>(sequences_.size());
    for (std::int64_t block = first; block < last; ++block) {
      units_.push_back({index, static_cast<logical_block>(block),
                        static_cast<device_page>(table.page(row.request, block))});
    }
    sequences_.push_back(entry_of(row.request).sequence);
    request_of_.resize(sequences_.size());
    request_of_.back() = row.request;
    return last;
  }

  /// Takes in what the transfers of a layer have brought, oldest first.
  void collect(std::int32_t layer) {
    auto& queue = under_way_[static_cast<std::size_t>(layer)];
    while (!queue.empty() && queue.front().ticket.is_final()) {
      const transfer& t = queue.front();
      for (std::size_t i = 0; i < t.blocks.size(); ++i) {
        const written_block& b = t.blocks[i];
        const entry& e = entry_of(b.request);
        if (!e.open || e.generation != b.generation) continue;  // of a request that ended
        progress& p = at(layer, b.request);
        const unit_status status = t.ticket.status(i);
        if (status == unit_status::not_admitted) continue;  // it stays in its page
        if (status != unit_status::moved && status != unit_status::present) {
          // From here on the blocks are handed over again; those behind it will be `present`.
          if (p.stored <= b.block && b.block < p.handed_over) p.handed_over = b.block;
        } else if (p.stored == b.block) {
          p.stored = b.block + 1;
        }
      }
      queue.pop_front();
    }
  }

  digest_store<Backend>* digests_;
  transfer_engine<Backend, Store>* mover_;
  kv_pool pool_;
  std::vector<entry> requests_;
  std::vector<progress> progress_;  ///< [layers, requests]
  std::vector<std::deque<transfer>> under_way_;
  std::vector<sequence_id> sequences_;    ///< of the rows of the transfer that is being made
  std::vector<std::int32_t> request_of_;  ///< their requests
  std::vector<unit_target> units_;
};

}  // namespace pulseinfer
