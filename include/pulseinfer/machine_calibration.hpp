// SPDX-License-Identifier: Apache-2.0
/// @file
/// Calibration on the machine itself: what each way of moving costs over a backend's link, found out
/// by real recalls through a transfer engine of their own.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/buffer.hpp"
#include "pulseinfer/calibration.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/pool_shape.hpp"
#include "pulseinfer/transfer.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

namespace detail {

/// A store for measurements: every block is there, in memory that it is given.
class scratch_store {
 public:
  class lease {
   public:
    explicit lease(const scratch_store& of) noexcept : store_(&of) {}
    void find(std::span<const logical_block> blocks, std::span<const std::byte*> found) const {
      for (std::size_t i = 0; i < blocks.size(); ++i) {
        found[i] = store_->payload_ + index_of(blocks[i]) * store_->unit_bytes();
      }
    }
    void prefetch(std::span<const logical_block>) const noexcept {}  // there is no table
    [[nodiscard]] bool matches(logical_block, const std::byte*) const noexcept { return true; }
    bool drop_if_corrupt(logical_block) const noexcept { return false; }

   private:
    const scratch_store* store_;
  };

  scratch_store(const kv_geometry& geometry, std::byte* payload, const std::byte* device_payload,
                std::int32_t blocks) noexcept
      : geometry_(geometry), payload_(payload), device_payload_(device_payload), blocks_(blocks) {}

  [[nodiscard]] const kv_geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] std::int64_t unit_bytes() const noexcept { return geometry_.unit_bytes(); }
  [[nodiscard]] std::int32_t max_blocks() const noexcept { return blocks_; }
  [[nodiscard]] const std::byte* payload() const noexcept { return payload_; }
  [[nodiscard]] std::size_t piece_bytes() const noexcept {
    return std::numeric_limits<std::size_t>::max();
  }
  [[nodiscard]] static constexpr bool is_ready() noexcept { return true; }
  [[nodiscard]] const std::byte* device_payload() const noexcept { return device_payload_; }
  [[nodiscard]] lease acquire(sequence_id, std::int32_t) const noexcept { return lease(*this); }
  void reserve(sequence_id, std::int32_t, std::span<const logical_block> blocks,
               std::span<reservation> results) const {
    std::fill_n(results.begin(), blocks.size(), reservation{.outcome = reserve_outcome::exists});
  }
  void commit(std::span<const host_slot>) const noexcept {}
  void abort(host_slot) const noexcept {}

 private:
  kv_geometry geometry_;
  std::byte* payload_;
  const std::byte* device_payload_;
  std::int32_t blocks_;
};

/// Units of at least so many bytes, each one piece of a page.
[[nodiscard]] inline kv_geometry geometry_of_entry(std::int64_t bytes) {
  const std::int64_t tokens = (bytes + max_extent - 1) / max_extent;
  const std::int64_t channels = ((bytes + tokens - 1) / tokens + 15) / 16 * 16;
  return {.layers = 1,
          .kv_heads = 1,
          .head_dim = static_cast<std::int32_t>(std::min<std::int64_t>(channels, max_extent)),
          .block_tokens = static_cast<std::int32_t>(tokens),
          .element = element_type::i8,
          .planes = 1};
}

/// A stride that visits all of `count` places before one twice, and no two neighbours in turn.
[[nodiscard]] inline std::int64_t scattering_stride(std::int64_t count) noexcept {
  auto stride = std::max<std::int64_t>(1, static_cast<std::int64_t>(0.382 * double(count)));
  while (std::gcd(stride, count) != 1) ++stride;
  return stride;
}

}  // namespace detail

/// Times recalls of one backend: a `transfer_measure`.
///
/// Units are scattered in the store's memory and in the pool. Chunks are of 1 MiB. What is timed is
/// the recall from the call to its end, by the backend's clock.
///
/// @par Threads  one at a time
/// @par Life     holds a backend and twice `capacity_bytes` of memory, pinned and device
template <backend Backend>
class transfer_timer {
 public:
  /// @param b               the machine
  /// @param capacity_bytes  the largest transfer that can be timed
  /// @throws std::invalid_argument  if capacity_bytes is not 1 MiB to 2^40
  /// @throws out_of_memory          when the memory cannot be had
  explicit transfer_timer(Backend b, std::int64_t capacity_bytes = 64 << 20)
      : backend_(b),
        capacity_(checked_capacity(capacity_bytes)),
        host_(b, static_cast<std::size_t>(capacity_bytes)),
        device_(b, static_cast<std::size_t>(capacity_bytes)),
        stream_(backend_.make_stream(stream_priority::normal)) {
    std::memset(host_.data(), 1, host_.size());  // memory that nobody wrote is all one page
  }

  /// Seconds of one recall; infinity if it is larger than the memory.
  /// @throws std::invalid_argument  on a bad shape
  /// @throws whatever fails the transfer
  [[nodiscard]] double operator()(transfer_way way, const transfer_shape& shape) {
    detail::check_shape(shape);
    const std::int64_t entry = (shape.bytes + shape.units - 1) / shape.units;
    if (entry > capacity_) return std::numeric_limits<double>::infinity();
    machine& m = machine_for(entry);
    if (shape.units > m.blocks) return std::numeric_limits<double>::infinity();
    m.engine.set_way(way);
    targets_.clear();
    const std::int64_t stride = detail::scattering_stride(m.blocks);
    for (std::int64_t i = 0; i < shape.units; ++i) {
      targets_.push_back({0, static_cast<logical_block>(i * stride % m.blocks),
                          static_cast<device_page>((i * stride + m.blocks / 2) % m.blocks)});
    }
    const sequence_id any{};
    auto t = m.engine.recall_units(0, {&any, 1}, targets_, stream_).value();
    t.sync();
    return static_cast<double>(t.report().ended_ns - t.report().requested_ns) * 1e-9;
  }

 private:
  static constexpr std::size_t kept = 4;  ///< entry sizes: a calibration goes back and forth

  struct machine {
    machine(const Backend& b, std::int64_t entry_bytes, std::int64_t capacity, std::byte* host,
            std::byte* device)
        : entry(entry_bytes),
          geometry(detail::geometry_of_entry(entry_bytes)),
          blocks(std::min(std::max<std::int64_t>(1, capacity / geometry.unit_bytes()),
                          std::int64_t{1} << 24)),
          store(geometry, host, b.device_pointer(host), static_cast<std::int32_t>(blocks)),
          engine(b, store, kv_pool(geometry, nhd_layout(geometry, blocks), {{.plane = {device}}}),
                 options(geometry.unit_bytes(), blocks)) {}
    static transfer_options options(std::int64_t unit_bytes, std::int64_t blocks) {
      const std::int64_t chunk = std::max<std::int64_t>(1 << 20, unit_bytes);
      return {.staging_bytes = 4 * chunk,
              .chunk_bytes = chunk,
              .transfers_in_flight = 1,
              .max_rows = 1,
              .max_units = blocks};
    }
    std::int64_t entry;
    kv_geometry geometry;
    std::int64_t blocks;
    detail::scratch_store store;
    transfer_engine<Backend, detail::scratch_store> engine;
  };

  static std::int64_t checked_capacity(std::int64_t bytes) {
    detail::expects(bytes >= (1 << 20) && bytes <= (std::int64_t{1} << 40),
                    "transfer_timer: capacity_bytes is ", bytes, ", expected ", 1 << 20,
                    " to 2^40");
    return bytes;
  }
  machine& machine_for(std::int64_t entry) {
    const auto found = std::find_if(machines_.begin(), machines_.end(),
                                    [entry](const auto& m) { return m->entry == entry; });
    if (found != machines_.end()) {
      std::rotate(machines_.begin(), found, found + 1);
    } else {
      if (machines_.size() == kept) machines_.pop_back();
      machines_.insert(machines_.begin(), std::make_unique<machine>(backend_, entry, capacity_,
                                                                    host_.data(), device_.data()));
    }
    return *machines_.front();
  }

  Backend backend_;
  std::int64_t capacity_;
  pinned_buffer<std::byte, Backend> host_;
  device_buffer<std::byte, Backend> device_;
  typename Backend::stream stream_;
  std::vector<std::unique_ptr<machine>> machines_;  ///< the one used last first
  std::vector<unit_target> targets_;
};

/// What each way costs over a backend's link. Save it with `transfer_costs::to_text`; an engine
/// takes it as `transfer_options::costs`.
///
/// @param b        the machine; nothing else should use its link meanwhile
/// @param options  what to ask of it; `max_transfer_bytes` is cut down to `capacity_bytes`
/// @param capacity_bytes  of pinned and of device memory, while this runs
/// @throws as transfer_timer and calibrate
/// @par Cost  under a second where the link moves some GB a second
template <backend Backend>
[[nodiscard]] transfer_costs calibrate_machine(Backend b, calibration_options options = {},
                                               std::int64_t capacity_bytes = 64 << 20) {
  detail::expects(capacity_bytes >= options.least_entry_bytes * options.least_entries,
                  "calibrate_machine: capacity_bytes is ", capacity_bytes,
                  ", expected at least least_entries of least_entry_bytes, which are ",
                  options.least_entry_bytes * options.least_entries);
  transfer_timer<Backend> timer(b, capacity_bytes);
  options.max_transfer_bytes = std::min(options.max_transfer_bytes, capacity_bytes);
  return calibrate(timer, options);
}

}  // namespace pulseinfer
