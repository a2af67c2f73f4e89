// SPDX-License-Identifier: Apache-2.0
/// @file
/// Units of a store as copies into an engine's pages, strip by strip, where no chunk is staged.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/layout.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Adds a copy to a list. One that goes on where the last one ends becomes part of it, if it may.
inline void add_run(std::vector<copy_span>& runs, const copy_span& added, bool may_join) {
  if (may_join && !runs.empty()) {
    copy_span& last = runs.back();
    if (static_cast<std::byte*>(last.destination) + last.bytes == added.destination &&
        static_cast<const std::byte*>(last.source) + last.bytes == added.source) {
      last.bytes += added.bytes;
      return;
    }
  }
  runs.push_back(added);
}

/// Runs of bytes of a unit in the pool. Units that are adjacent on both sides have fewer; that is rare.
[[nodiscard]] inline std::int64_t strips_of(const kv_pool& pool) {
  const block_layout& layout = pool.layout();
  const layer_planes& planes = pool.layer(0);
  std::int64_t runs = 0;
  const std::byte* tensor = nullptr;
  std::int64_t end = -1;  // of the last strip, in the pool; planes of one tensor may go on there
  each_strip(layout, 0, [&](std::int32_t p, std::int64_t in_pool, std::int64_t, std::size_t n) {
    runs += planes.plane[p] == tensor && in_pool == end ? 0 : 1;
    tensor = planes.plane[p];
    end = in_pool + static_cast<std::int64_t>(n);
  });
  return runs;
}

/// The copies of some units of a layer. A run stays within one tensor of the engine and one pinned
/// piece of the store, as addresses may go on where an allocation, or a registration, ends.
class strip_runs {
 public:
  /// Forgets the copies that it had; of an engine's layer, which outlives the adding.
  template <class Store>
  void begin(const block_layout& layout, const layer_planes& planes, const Store& store,
             bool merge) {
    runs_.clear();
    layout_ = &layout;
    planes_ = &planes;
    payload_ = store.payload();
    piece_ = store.piece_bytes();
    tensor_ = nullptr;
    merge_ = merge;
  }
  void add(std::int32_t page, const std::byte* unit) {
    each_strip(
        *layout_, page,
        [&](std::int32_t p, std::int64_t in_pool, std::int64_t in_unit, std::size_t bytes) {
          std::byte* const to = planes_->plane[p];
          const std::byte* const from = unit + in_unit;
          const bool begins_piece = static_cast<std::size_t>(from - payload_) % piece_ == 0;
          add_run(runs_, {to + in_pool, from, bytes}, merge_ && to == tensor_ && !begins_piece);
          tensor_ = to;
        });
  }
  [[nodiscard]] std::span<const copy_span> all() const noexcept { return runs_; }

 private:
  std::vector<copy_span> runs_;
  const block_layout* layout_ = nullptr;
  const layer_planes* planes_ = nullptr;
  const std::byte* payload_ = nullptr;
  std::size_t piece_ = 0;
  const std::byte* tensor_ = nullptr;  ///< of the last run
  bool merge_ = false;
};

}  // namespace pulseinfer::detail
