// SPDX-License-Identifier: Apache-2.0
/// @file
/// The requests of one decode step, as the engine's own arrays.
#pragma once

#include <cstdint>
#include <span>

#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// The rows of a batch. Row r is request `requests[r]` with `tokens[r]` tokens of context. A view
/// over arrays that the engine keeps anyway (vLLM's `seq_lens`, for one).
///
/// A request is a small index, below the `max_requests` of the objects that it is given to. No
/// request stands twice in a batch. In a graph that is replayed the device arrays may hold others, and
/// of a row that is not in use a negative request with 0 tokens.
struct batch_view {
  std::span<const std::int32_t> requests;  ///< [rows], host memory, read before the call returns
  const std::int32_t* device_requests = nullptr;  ///< [rows], the same on the device
  const std::int32_t* device_tokens = nullptr;    ///< [rows], device memory
  std::int64_t max_tokens = 0;                    ///< no row has more; sizes the launches

  [[nodiscard]] std::int32_t rows() const noexcept {
    return static_cast<std::int32_t>(requests.size());
  }
};

namespace detail {

inline void check_batch(const char* who, const batch_view& batch, std::int32_t max_rows,
                        std::int32_t max_requests) {
  expects(batch.requests.size() <= static_cast<std::size_t>(max_rows), who, ": the batch has ",
          batch.requests.size(), " rows, expected at most ", max_rows);
  expects(batch.rows() == 0 || (batch.device_requests != nullptr && batch.device_tokens != nullptr),
          who, ": a device array of the batch is null");
  for (const std::int32_t request : batch.requests) {
    expects<std::out_of_range>(request >= 0 && request < max_requests, who, ": request is ",
                               request, ", expected 0 to ", max_requests - 1);
  }
}

}  // namespace detail
}  // namespace pulseinfer
