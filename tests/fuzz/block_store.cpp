// SPDX-License-Identifier: Apache-2.0
/// @file
/// A libFuzzer target: a block store and its model (see store_model.hpp) do what the bytes say, and
/// any difference ends it. `sh cmake/run.sh fuzz` builds and runs it. No test framework is in it,
/// so that what it finds is the store's.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "pulseinfer/backend/host.hpp"
#include "support/store_model.hpp"

namespace {

/// Draws from the input, a byte a number; zeros once it has ended.
class drawn_bytes {
 public:
  drawn_bytes(const std::uint8_t* bytes, std::size_t count) : next_(bytes), end_(bytes + count) {}

  [[nodiscard]] std::uint64_t below(std::uint64_t bound) noexcept {
    return next_ == end_ ? 0 : *next_++ % bound;
  }
  [[nodiscard]] bool is_over() const noexcept { return next_ == end_; }

 private:
  const std::uint8_t* next_;
  const std::uint8_t* end_;
};

/// One for all inputs: its threads are not made anew for each.
const pulseinfer::host_backend& machine() {
  static const pulseinfer::host_backend one{};
  return one;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  store_test::twins both(machine(), drawn_bytes(data, size));
  while (!both.draw().is_over()) {
    if (!both.step()) std::abort();
  }
  return 0;
}
