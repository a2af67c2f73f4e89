// SPDX-License-Identifier: Apache-2.0
/// @file
/// The bodies that move units: between pages and a contiguous chunk on the device, from the store's
/// slots straight into pages, and between the store's slots and a contiguous chunk on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/cpu_copy.hpp"
#include "pulseinfer/layout.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What became of one unit of a transfer.
enum class unit_status : std::int32_t {
  pending,  ///< not decided yet
  /// Its bytes are where they were to go. Of an offload whose sequence was closed meanwhile: they
  /// were written, and forgotten with it.
  moved,
  missing,        ///< recall: the store does not have it
  present,        ///< offload: the store had it already
  being_written,  ///< offload: another transfer writes it; only that one tells whether it arrives
  refused,        ///< offload: the store is full
  failed,         ///< a copy or kernel failed
  cancelled,      ///< the transfer was cancelled before it got to the unit
  corrupt,        ///< recall: its bytes are not those that were stored, see integrity.hpp
  not_admitted,   ///< offload: the store's admission filter keeps it out
};

/// The largest grain of a device copy: one load and one store of 16 bytes.
struct alignas(16) copy_word {
  std::uint32_t part[4];
};
static_assert(sizeof(copy_word) == word_bytes);

namespace detail {

/// Where word `word` of a unit lies: in which plane, where in the page's memory, where in the unit.
struct word_position {
  std::int32_t plane;
  std::int32_t bytes;  ///< of the word
  std::int64_t in_pool;
  std::int64_t in_unit;
};
PULSEINFER_HD inline word_position locate_word(const block_layout& layout, std::int64_t page,
                                               std::int64_t word) {
  std::int32_t p = 0;
  for (; p + 1 < layout.planes && word >= layout.plane[p].words(); ++p) {
    word -= layout.plane[p].words();
  }
  const plane_layout& at = layout.plane[p];
  std::int64_t within = word * at.word;
  std::int64_t strip = 0;
  if (at.strips > 1) {
    // A unit is far below 4 GiB, and 32-bit divisions are several times as fast on a device.
    strip = static_cast<std::uint32_t>(within) / static_cast<std::uint32_t>(at.strip_bytes);
    within -= strip * at.strip_bytes;
  }
  return {p, at.word, layout.page_offset(page, p) + strip * at.strip_stride + within,
          at.unit_offset + word * at.word};
}

/// Copies 1, 2, 4, 8 or 16 bytes with one load and one store; both addresses are multiples of that.
PULSEINFER_HD inline void copy_bytes(std::byte* to, const std::byte* from, std::int32_t bytes) {
  switch (bytes) {
    case 16:
      *reinterpret_cast<copy_word*>(to) = *reinterpret_cast<const copy_word*>(from);
      break;
    case 8:
      *reinterpret_cast<std::uint64_t*>(to) = *reinterpret_cast<const std::uint64_t*>(from);
      break;
    case 4:
      *reinterpret_cast<std::uint32_t*>(to) = *reinterpret_cast<const std::uint32_t*>(from);
      break;
    case 2:
      *reinterpret_cast<std::uint16_t*>(to) = *reinterpret_cast<const std::uint16_t*>(from);
      break;
    default:
      *to = *from;
  }
}

/// Copies the strips of a page to or from a unit, on the CPU: what all its words amount to.
template <class Copy>
void each_strip(const block_layout& layout, std::int64_t page, Copy copy) {
  for (std::int32_t p = 0; p < layout.planes; ++p) {
    const plane_layout& plane = layout.plane[p];
    const std::int64_t at = layout.page_offset(page, p);
    for (std::int64_t i = 0; i < plane.strips; ++i) {
      copy(p, at + i * plane.strip_stride, plane.unit_offset + i * plane.strip_bytes,
           static_cast<std::size_t>(plane.strip_bytes));
    }
  }
}

}  // namespace detail

/// Kernel body: word `word` of unit `unit` of a chunk goes to the page that the chunk names. A
/// negative page means that the unit goes nowhere.
struct scatter_units {
  block_layout layout;
  layer_planes pool;
  const std::int32_t* pages;  ///< [units]
  const std::byte* units;     ///< [units, layout.unit_bytes()]

  PULSEINFER_HD void operator()(std::int64_t unit, std::int64_t word) const {
    const std::int64_t page = pages[unit];
    if (page < 0) return;
    const auto at = detail::locate_word(layout, page, word);
    detail::copy_bytes(pool.plane[at.plane] + at.in_pool,
                       units + unit * layout.unit_bytes() + at.in_unit, at.bytes);
  }
  [[nodiscard]] std::int64_t words() const { return layout.unit_words(); }
  void whole_block(std::int64_t unit) const {
    if (pages[unit] < 0) return;
    const std::byte* from = units + unit * layout.unit_bytes();
    detail::each_strip(
        layout, pages[unit],
        [&](std::int32_t p, std::int64_t in_pool, std::int64_t in_unit, std::size_t bytes) {
          std::memcpy(pool.plane[p] + in_pool, from + in_unit, bytes);
        });
  }
};
static_assert(std::is_trivially_copyable_v<scatter_units>);

/// Kernel body: the way back. Word `word` of the page that the chunk names goes to unit `unit` of
/// the chunk.
struct gather_units {
  block_layout layout;
  layer_planes pool;
  const std::int32_t* pages;  ///< [units], each a page of the pool
  std::byte* units;           ///< [units, layout.unit_bytes()]

  PULSEINFER_HD void operator()(std::int64_t unit, std::int64_t word) const {
    const auto at = detail::locate_word(layout, pages[unit], word);
    detail::copy_bytes(units + unit * layout.unit_bytes() + at.in_unit,
                       pool.plane[at.plane] + at.in_pool, at.bytes);
  }
  [[nodiscard]] std::int64_t words() const { return layout.unit_words(); }
  void whole_block(std::int64_t unit) const {
    std::byte* to = units + unit * layout.unit_bytes();
    detail::each_strip(
        layout, pages[unit],
        [&](std::int32_t p, std::int64_t in_pool, std::int64_t in_unit, std::size_t bytes) {
          std::memcpy(to + in_unit, pool.plane[p] + in_pool, bytes);
        });
  }
};
static_assert(std::is_trivially_copyable_v<gather_units>);

/// Kernel body: word `word` of unit `unit` of a list comes from host memory to the page that the
/// list names, with no chunk between. Where the page is negative or the source null, nothing comes.
struct pull_units {
  block_layout layout;
  layer_planes pool;
  const std::int32_t* pages;  ///< [units], memory of the device
  const std::byte* const*
      sources;  ///< [units] of layout.unit_bytes() each, multiples of 16: mapped
                ///< pinned memory, under the addresses that the device knows

  PULSEINFER_HD void operator()(std::int64_t unit, std::int64_t word) const {
    const std::int64_t page = pages[unit];
    const std::byte* from = sources[unit];
    if (page < 0 || from == nullptr) return;
    const auto at = detail::locate_word(layout, page, word);
    detail::copy_bytes(pool.plane[at.plane] + at.in_pool, from + at.in_unit, at.bytes);
  }
  [[nodiscard]] std::int64_t words() const { return layout.unit_words(); }
  void whole_block(std::int64_t unit) const {
    const std::byte* from = sources[unit];
    if (pages[unit] < 0 || from == nullptr) return;
    detail::each_strip(
        layout, pages[unit],
        [&](std::int32_t p, std::int64_t in_pool, std::int64_t in_unit, std::size_t bytes) {
          std::memcpy(pool.plane[p] + in_pool, from + in_unit, bytes);
        });
  }
};
static_assert(std::is_trivially_copyable_v<pull_units>);

/// The stores for a gather into the chunks of a ring that is written round and round.
///
/// A ring that stays in the last-level cache is written there: nothing is read from memory but the
/// units. A larger one is not in the cache when its turn comes again, and each line of it would be
/// read only to be overwritten: it is written past the cache. Others use the cache as well: what is
/// certain to stay is a sixteenth of it (measured, docs/design.md).
///
/// @param ring_bytes  of all chunks together, as the staging of a transfer_engine
[[nodiscard]] inline store_hint stores_for_ring(std::int64_t ring_bytes) noexcept {
  return ring_bytes <= detail::last_level_cache_bytes() / 16 ? store_hint::cached
                                                             : store_hint::streaming;
}

/// Joins scattered units in a chunk, on the CPU. Units that are adjacent are copied as one; the
/// more units a call has, the better they overlap.
///
/// What has been streamed is seen by a device that is told to read the chunk after the call.
///
/// @param sources     one address a unit; a null leaves the chunk's bytes of that unit as they are
/// @param chunk       [sources, unit_bytes]; fastest where the units in it begin at cache lines
/// @param unit_bytes  of one unit
/// @param hint        how the chunk is stored, see stores_for_ring
/// @par Threads       any, over different chunks
/// @par Cost          allocates nothing
inline void gather_into(std::byte* chunk, std::span<const std::byte* const> sources,
                        std::int64_t unit_bytes, store_hint hint = store_hint::cached) noexcept {
  detail::copy_units(
      detail::best_copy_path(), hint,
      detail::unit_groups<const std::byte>(chunk, sources, static_cast<std::size_t>(unit_bytes)));
}

/// Deals the units of a chunk out, on the CPU: gather_into's way back. A null destination is passed
/// over.
///
/// @param chunk         [destinations, unit_bytes]
/// @param destinations  one address a unit
/// @param unit_bytes    of one unit
/// @param hint          how the units are stored. A store is larger than the cache, and what has
///                      just been offloaded is not read soon: it is streamed
inline void scatter_from(const std::byte* chunk, std::span<std::byte* const> destinations,
                         std::int64_t unit_bytes,
                         store_hint hint = store_hint::streaming) noexcept {
  detail::copy_units(
      detail::best_copy_path(), hint,
      detail::unit_groups<std::byte>(chunk, destinations, static_cast<std::size_t>(unit_bytes)));
}

}  // namespace pulseinfer
