// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a block store allocates through its backend.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/geometry.hpp"
#include "pulseinfer/store_types.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// The memory of a block store that kernels reach. Where they see it is asked for when somebody wants
/// to know: of memory that comes in the background that cannot be said before it is there.
template <backend Backend>
class store_memory {
 public:
  /// @param backend   whose memory it is
  /// @param geometry  of the units
  /// @param options   checked
  /// @throws std::invalid_argument  if the backend's memory comes in chunks that end within a unit
  store_memory(Backend backend, const kv_geometry& geometry, const block_store_options& options)
      : backend_(backend),
        payload_(backend, static_cast<std::size_t>(options.capacity_bytes / geometry.unit_bytes() *
                                                   geometry.unit_bytes())),
        table_(backend, static_cast<std::size_t>(options.max_sequences) *
                            static_cast<std::size_t>(geometry.layers) *
                            static_cast<std::size_t>(options.max_blocks)),
        piece_bytes_(payload_.size()) {
    if constexpr (requires { backend.pinned_chunk_bytes(payload_.data()); }) {
      const std::size_t chunk = backend.pinned_chunk_bytes(payload_.data());
      const auto unit = static_cast<std::size_t>(geometry.unit_bytes());
      expects(chunk >= payload_.size() || chunk % unit == 0, "block_store: pinned chunks of ",
              chunk, " bytes end within units of ", unit,
              ", expected pinned_options::unit_bytes to be that");
      piece_bytes_ = chunk;
    }
  }

  [[nodiscard]] std::byte* payload() const noexcept { return payload_.data(); }
  /// Of the payload, made known to the device in one call: whole units.
  [[nodiscard]] std::size_t piece_bytes() const noexcept { return piece_bytes_; }
  /// Whether streams may copy from all of the payload; once it is so it stays so.
  [[nodiscard]] bool is_ready() const {
    if constexpr (requires { backend_.is_ready(payload_.data()); }) {
      if (payload_.size() == 0 || is_ready_.load(std::memory_order_acquire)) return true;
      if (!backend_.is_ready(payload_.data())) return false;
      is_ready_.store(true, std::memory_order_release);
    }
    return true;
  }
  /// [sequences, layers, blocks] slots
  [[nodiscard]] std::int32_t* table() const noexcept { return table_.data(); }
  [[nodiscard]] std::size_t table_bytes() const noexcept { return table_.bytes(); }

  /// The same, as kernels see them.
  /// @throws what the backend does where the device cannot reach all of it, or not yet
  [[nodiscard]] const std::byte* device_payload() const {
    return on_device(payload_.data(), device_payload_);
  }
  [[nodiscard]] const std::int32_t* device_table() const {
    return on_device(table_.data(), device_table_);
  }

 private:
  template <class T>
  [[nodiscard]] const T* on_device(const T* p, std::atomic<const T*>& known) const {
    const T* at = known.load(std::memory_order_relaxed);
    if (at == nullptr) {
      if constexpr (requires { backend_.device_range(p); }) {
        at = backend_.device_range(p);
      } else {
        at = backend_.device_pointer(p);
      }
      known.store(at, std::memory_order_relaxed);
    }
    return at;
  }

  Backend backend_;
  pinned_buffer<std::byte, Backend> payload_;
  pinned_buffer<std::int32_t, Backend> table_;
  std::size_t piece_bytes_;
  mutable std::atomic<bool> is_ready_{false};
  mutable std::atomic<const std::byte*> device_payload_{nullptr};
  mutable std::atomic<const std::int32_t*> device_table_{nullptr};
};

}  // namespace pulseinfer::detail
