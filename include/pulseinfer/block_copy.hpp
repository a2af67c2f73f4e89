// SPDX-License-Identifier: Apache-2.0
/// @file
/// The bodies that move units: between pages and a contiguous chunk on the device, and between the
/// store's slots and a contiguous chunk on the host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>

#include "pulseinfer/config.hpp"
#include "pulseinfer/layout.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// What became of one unit of a transfer.
enum class unit_status : std::int32_t {
  pending,    ///< not decided yet
  moved,      ///< its bytes are where they were to go
  missing,    ///< recall: the store does not have it
  present,    ///< offload: the store had it already
  refused,    ///< offload: the store is full
  failed,     ///< a copy or kernel failed
  cancelled,  ///< the transfer was cancelled before it got to the unit
};

/// The grain of a device copy: one load and one store of 16 bytes.
struct alignas(16) copy_word {
  std::uint32_t part[4];
};
static_assert(sizeof(copy_word) == word_bytes);

namespace detail {

/// Byte offset of word `word` of a unit in its page's planes. Which plane is a comparison, not a
/// division.
struct strip_position {
  int plane;
  std::int64_t offset;
};
PULSEINFER_HD inline strip_position locate_word(const block_layout& layout, std::int64_t page,
                                                std::int64_t word) {
  const std::int64_t offset = word * word_bytes;
  const int plane = offset >= layout.strip_bytes ? 1 : 0;
  return {plane, layout.page_offset(page) + offset - plane * layout.strip_bytes};
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
    const auto* source = reinterpret_cast<const copy_word*>(units + unit * layout.unit_bytes());
    *reinterpret_cast<copy_word*>(pool.plane[at.plane] + at.offset) = source[word];
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
    auto* destination = reinterpret_cast<copy_word*>(units + unit * layout.unit_bytes());
    destination[word] = *reinterpret_cast<const copy_word*>(pool.plane[at.plane] + at.offset);
  }
};
static_assert(std::is_trivially_copyable_v<gather_units>);

/// Joins scattered units in a chunk, on the CPU.
/// @param sources  one address a unit; a null leaves the chunk's bytes of that unit as they are
/// @param chunk    sources.size() * unit_bytes bytes
inline void gather_into(std::byte* chunk, std::span<const std::byte* const> sources,
                        std::int64_t unit_bytes) noexcept {
  for (const std::byte* source : sources) {
    if (source != nullptr) std::memcpy(chunk, source, static_cast<std::size_t>(unit_bytes));
    chunk += unit_bytes;
  }
}

/// Deals the units of a chunk out, on the CPU. A null destination is passed over.
inline void scatter_from(const std::byte* chunk, std::span<std::byte* const> destinations,
                         std::int64_t unit_bytes) noexcept {
  for (std::byte* destination : destinations) {
    if (destination != nullptr) {
      std::memcpy(destination, chunk, static_cast<std::size_t>(unit_bytes));
    }
    chunk += unit_bytes;
  }
}

}  // namespace pulseinfer
