// SPDX-License-Identifier: Apache-2.0
/// @file
/// Pinned memory in chunks: where they are cut, and how the device comes to reach them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/page_system.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/pinned_options.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Bytes of a chunk: at most `most`, whole units and whole pages; all of `bytes` where that fits.
///
/// Of two registrations that share a page the driver refuses the second, and a copy of a unit that
/// lies in two of them.
[[nodiscard]] inline std::size_t plan_chunk(std::size_t bytes, std::size_t unit, std::size_t page,
                                            std::size_t most) {
  expects(unit > 0, "pinned_region: unit_bytes is 0, expected at least 1");
  expects(most > 0 && most <= pinned_options::most_chunk_bytes,
          "pinned_region: max_chunk_bytes is ", most, ", expected 1 to ",
          pinned_options::most_chunk_bytes);
  if (bytes <= most) return bytes;
  const std::size_t times = unit / std::gcd(unit, page);
  expects(times <= most / page, "pinned_region: max_chunk_bytes is ", most,
          ", expected at least the least common multiple of unit_bytes and a page: of ", unit,
          " and ", page);
  return most / (times * page) * (times * page);
}

struct pinned_chunk {
  enum class phase : std::uint8_t { filling, registering, ready, failed };

  std::size_t offset = 0;
  std::size_t bytes = 0;
  std::size_t slices = 0;
  std::size_t claimed = 0;  ///< slices that somebody has begun
  std::size_t done = 0;
  phase at = phase::filling;
  bool is_registered = false;
  std::byte* device = nullptr;  ///< where the device sees it, null where it does not
  std::exception_ptr error;

  [[nodiscard]] bool is_settled() const noexcept {
    return at == phase::ready || at == phase::failed;
  }
};

/// The chunks that the device reaches: registers them one by one, and takes them back in reverse.
template <backend Backend, class System>
class chunk_registry {
 public:
  chunk_registry(Backend& machine, const System& system) : machine_(machine), system_(system) {}

  /// Nothing can fail once a chunk is registered.
  void reserve(std::size_t chunks) { order_.reserve(chunks); }

  /// Registers [data + c.offset, + c.bytes) and says where the device sees it. On failure nothing
  /// is registered, and what the backend threw is nested in what is thrown.
  [[nodiscard]] std::byte* enter(std::byte* data, std::size_t bytes, const pinned_chunk& c) {
    std::byte* const p = data + c.offset;
    try {
      machine_.register_pinned(p, c.bytes);
      try {
        return machine_.device_pointer(p);
      } catch (...) {
        machine_.unregister_pinned(p, c.bytes);
        throw;
      }
    } catch (const std::exception& cause) {
      const bool is_memory = dynamic_cast<const std::bad_alloc*>(&cause) != nullptr;
      std::string text =
          text_of("pinned_region: ", c.bytes, " bytes at offset ", c.offset, " of ", bytes,
                  " (address ", reinterpret_cast<std::uintptr_t>(p),
                  ") cannot be registered: ", cause.what(), "; ", advice_of(system_.facts()));
      if (is_memory) std::throw_with_nested(out_of_memory(std::move(text)));
      std::throw_with_nested(device_error(text));
    }
  }
  /// Notes what `enter` has registered. Of one thread at a time, as what follows.
  void note(pinned_chunk& c, std::byte* device) noexcept {
    c.is_registered = true;
    c.device = device;
    order_.push_back(&c);
  }
  void leave_all(std::byte* data) noexcept {
    for (; !order_.empty(); order_.pop_back()) {
      pinned_chunk& c = *order_.back();
      machine_.unregister_pinned(data + c.offset, c.bytes);
      c.is_registered = false;
      c.device = nullptr;
    }
  }
  /// Where the device sees memory that is not registered: some reach all of the host's.
  [[nodiscard]] std::byte* look_for(std::byte* p) const noexcept {
    try {
      return machine_.device_pointer(p);
    } catch (...) {
      return nullptr;
    }
  }

 private:
  Backend& machine_;
  const System& system_;
  std::vector<pinned_chunk*> order_;  ///< as they were registered
};

}  // namespace pulseinfer::detail
