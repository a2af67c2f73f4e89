// SPDX-License-Identifier: Apache-2.0
/// @file
/// Copies of the CPU between units that lie anywhere and a chunk.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <type_traits>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/cpu_lines.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Makes groups of the copies between a chunk and scattered units: adjacent units become one run,
/// runs of the same length in turn a group, and a long run without a partner two halves.
///
/// @tparam Byte  of the scattered side: const where it is read, plain where it is written
template <class Byte>
class unit_groups {
 public:
  using chunk_byte = std::conditional_t<std::is_const_v<Byte>, std::byte, const std::byte>;

  /// @param chunk  [units, unit_bytes]
  /// @param units  one address each; those that are null are passed over
  unit_groups(chunk_byte* chunk, std::span<Byte* const> units, std::size_t unit_bytes) noexcept
      : chunk_(chunk), units_(units), unit_bytes_(unit_bytes) {
    if (unit_bytes > 0) next_run();
  }

  /// The next group; one without streams after the last.
  void next(copy_group& group) noexcept {
    group.streams = 0;
    if (run_.bytes == 0) return;
    add(group, run_);
    group.bytes = run_.bytes;
    group.rest = 0;
    const run first = run_;
    next_run();
    if (!begins_line(first)) return;
    while (group.streams < copy_group::max_streams && run_.bytes == first.bytes &&
           begins_line(run_)) {
      add(group, run_);
      next_run();
    }
    if (group.streams == 1 && first.bytes >= split_bytes) {
      group.bytes = first.bytes / 2 / line_bytes * line_bytes;
      group.rest = first.bytes - 2 * group.bytes;
      add(group, {first.in_chunk + group.bytes, first.unit + group.bytes, group.bytes});
    }
  }

 private:
  static constexpr std::size_t split_bytes = 16 << 10;
  static constexpr std::size_t line_bytes = 128;

  struct run {
    chunk_byte* in_chunk = nullptr;
    Byte* unit = nullptr;
    std::size_t bytes = 0;
  };

  [[nodiscard]] static std::byte* to(const run& r) noexcept {
    if constexpr (std::is_const_v<Byte>) {
      return r.in_chunk;
    } else {
      return r.unit;
    }
  }
  [[nodiscard]] static const std::byte* from(const run& r) noexcept {
    if constexpr (std::is_const_v<Byte>) {
      return r.unit;
    } else {
      return r.in_chunk;
    }
  }
  [[nodiscard]] static bool begins_line(const run& r) noexcept {
    return reinterpret_cast<std::uintptr_t>(to(r)) % 64 == 0;
  }
  static void add(copy_group& group, const run& r) noexcept {
    group.to[group.streams] = to(r);
    group.from[group.streams] = from(r);
    ++group.streams;
  }

  void next_run() noexcept {
    run_.bytes = 0;
    while (at_ < units_.size() && units_[at_] == nullptr) ++at_;
    if (at_ == units_.size()) return;
    const std::size_t begin = at_++;
    while (at_ < units_.size() && units_[at_] == units_[at_ - 1] + unit_bytes_) ++at_;
    run_ = {chunk_ + begin * unit_bytes_, units_[begin], (at_ - begin) * unit_bytes_};
  }

  chunk_byte* chunk_;
  std::span<Byte* const> units_;
  std::size_t unit_bytes_;
  std::size_t at_ = 0;
  run run_;  ///< the first that is in no group yet
};

/// Copies all groups, with two of them in view. Streamed bytes are ordered before what follows.
template <class Byte>
void copy_units(copy_path path, store_hint hint, unit_groups<Byte> groups) noexcept {
  const copy_function copy = copy_function_of(path, hint);
  copy_group in_view[3];
  copy_group* group = &in_view[0];
  copy_group* next = &in_view[1];
  copy_group* after_next = &in_view[2];
  groups.next(*group);
  groups.next(*next);
  while (group->streams > 0) {
    groups.next(*after_next);
    copy(*group, *next, *after_next);
    copy_group* const done = group;
    group = next;
    next = after_next;
    after_next = done;
  }
  if (hint == store_hint::streaming && path != copy_path::portable) fence_stores();
}

/// Bytes of the last-level cache that a CPU shares with its neighbours, as the system tells, once;
/// 32 MiB where it does not. (sysconf tells what a whole socket has, which on some machines is
/// several caches.)
[[nodiscard]] inline std::int64_t last_level_cache_bytes() noexcept {
  static const std::int64_t found = []() -> std::int64_t {
    if (std::FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      char text[32] = {};
      const bool is_read = std::fgets(text, sizeof text, file) != nullptr;
      std::fclose(file);
      char* unit = text;
      const long long kib = is_read ? std::strtoll(text, &unit, 10) : 0;
      if (kib > 0 && *unit == 'K') return std::int64_t{kib} * 1024;
    }
#if defined(_SC_LEVEL3_CACHE_SIZE)
    if (const long bytes = sysconf(_SC_LEVEL3_CACHE_SIZE); bytes > 0) return bytes;
#endif
    return std::int64_t{32} << 20;
  }();
  return found;
}

}  // namespace pulseinfer::detail
