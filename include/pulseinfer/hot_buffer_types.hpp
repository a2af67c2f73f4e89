// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a hot buffer is made from and what it gives: its sizes, and the steps that it resolves.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/use_rank.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/residency.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// A step that was resolved: the page table for attention, and the handle by which its misses are
/// recalled.
///
/// `pages` is [rows, k] page ids in the order of the chosen ids, padded with -1; device memory. It
/// is written by the resolve kernel; the pages of misses hold their units once the recall's ticket
/// says so. Once the step has ended, the hot buffer's next `resolve` may use it again: what reads
/// it is ordered before that. Sinks, window and the block being filled are the engine's own pages:
/// they are not in it.
struct resolved_step {
  const std::int32_t* pages = nullptr;
  std::int32_t rows = 0;
  std::int32_t k = 0;
  std::int32_t layer = 0;
  detail::step_record* record = nullptr;
  std::uint64_t generation = 0;

  /// The step has neither ended nor been discarded, and its record is still its own. A held step is
  /// not open: it can be neither recalled nor discarded.
  [[nodiscard]] bool is_open() const noexcept {
    return has_record() && !record->held && !record->discarded;
  }
  /// The step is held (`hot_buffer::hold_step`), and was not dropped.
  [[nodiscard]] bool is_held() const noexcept { return has_record() && record->held; }

  /// The misses of a row, in block order, with what became of each. Host memory; complete once the
  /// recall's ticket is final, or the stream has got past the pull; valid as long as `pages`. None of
  /// a row that there is not.
  [[nodiscard]] std::span<const unit_miss> misses(std::int32_t row) const noexcept {
    if (row < 0 || row >= rows) return {};
    return {record->misses + std::int64_t{row} * k,
            static_cast<std::size_t>(record->miss_counts[row])};
  }

 private:
  [[nodiscard]] bool has_record() const noexcept {
    return record != nullptr && record->generation == generation &&
           record->busy.load(std::memory_order_acquire);
  }
};

/// What became of a request to have pages back.
enum class [[nodiscard]] take_back_outcome : std::uint8_t{
    taken,
    in_use,  ///< a step of the request is in flight: the hardware may still write its pages
};

/// Which resident unit gives its page to a miss.
enum class hot_replacement : std::uint8_t {
  least_recent,  ///< the one that was chosen longest ago
  least_used,    ///< the one whose uses, each worth half as much after `half_life` steps, are worth
                 ///< least. What left is forgotten
};

/// Sizes of a hot buffer. All of it is allocated by the constructor.
struct hot_buffer_options {
  std::int32_t pages_per_request =
      128;                          ///< at least the selector's budget; twice that is a good start
  std::int32_t budget_blocks = 64;  ///< k of the selections that will be resolved
  std::int32_t max_requests = 64;
  std::int32_t max_rows = 16;
  std::int64_t max_blocks = 8192;
  std::int32_t steps_in_flight = 8;
  hot_replacement replacement = hot_replacement::least_used;
  std::int32_t half_life = 8;  ///< of `least_used`, in steps: a power of two
  bool predicts = false;       ///< room for what `resolve_predicted` has to know
  /// [layers] how many of the pages lent to a request each layer uses: the first ones, in the order
  /// in which they were lent. The memory of the others in that layer is left alone, the engine may
  /// use it. Empty: all layers use all.
  std::vector<std::int32_t> pages_of_layer = {};
};

namespace detail {

inline hot_buffer_options checked_hot_buffer_options(const hot_buffer_options& o,
                                                     std::int32_t layers) {
  const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
    expects(value >= least && value <= most, "hot_buffer: ", name, " is ", value, ", expected ",
            least, " to ", most);
  };
  check("budget_blocks", o.budget_blocks, 1, max_extent);
  check("pages_per_request", o.pages_per_request, o.budget_blocks, 1 << 24);
  check("max_requests", o.max_requests, 1, max_extent);
  check("max_rows", o.max_rows, 1, max_extent);
  check("max_blocks", o.max_blocks, 1, 1 << 24);
  check("steps_in_flight", o.steps_in_flight, 1, 1024);
  check("half_life", o.half_life, 1, 1 << 10);
  expects((o.half_life & (o.half_life - 1)) == 0, "hot_buffer: half_life is ", o.half_life,
          ", expected a power of two");
  expects(o.replacement == hot_replacement::least_recent ||
              o.replacement == hot_replacement::least_used,
          "hot_buffer: replacement is ", static_cast<int>(o.replacement), ", expected 0 or 1");
  expects(o.pages_of_layer.empty() || o.pages_of_layer.size() == static_cast<std::size_t>(layers),
          "hot_buffer: pages_of_layer has ", o.pages_of_layer.size(), " entries, expected ", layers,
          " (the layers) or none");
  for (const std::int32_t pages : o.pages_of_layer) {
    check("pages_of_layer", pages, o.budget_blocks, o.pages_per_request);
  }
  return o;
}

[[nodiscard]] inline use_rank ranks_of(const hot_buffer_options& o) {
  use_rank ranks;
  if (o.replacement == hot_replacement::least_recent) return ranks;
  ranks.per_step = 16;
  for (std::int32_t unit = ranks.per_step * o.half_life; unit > 1; unit /= 2) ++ranks.unit_bits;
  return ranks;
}

}  // namespace detail

}  // namespace pulseinfer
