// SPDX-License-Identifier: Apache-2.0
/// @file
/// Members of a transfer pipeline as host tasks of its backend.
#pragma once

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/transfer_state.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

template <backend Backend, class Pipeline>
[[nodiscard]] Pipeline& pipeline_of(transfer_state<Backend, Pipeline>& s) noexcept {
  return *s.pipeline;
}
template <backend Backend, class Pipeline>
[[nodiscard]] Pipeline& pipeline_of(chunk_job<Backend, Pipeline>& j) noexcept {
  return *j.owner->pipeline;
}

/// A task that calls a member of the pipeline with one of its transfers or chunks.
/// @tparam Body   pointer to a member function that takes the target, and does not throw
/// @param target  outlives the task
template <auto Body, class Target>
[[nodiscard]] host_task task_of(Target& target, stream_priority urgency) noexcept {
  return {[](void* p) noexcept {
            auto& t = *static_cast<Target*>(p);
            (pipeline_of(t).*Body)(t);
          },
          &target, urgency};
}

}  // namespace pulseinfer::detail
