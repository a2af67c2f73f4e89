// SPDX-License-Identifier: Apache-2.0
/// @file
/// Policies that do not look: one share for every layer, whatever the link does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "pulseinfer/admission_types.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Offloads one share of every layer, and admits whatever then fits into HBM. It loads where it
/// could recompute, and never says no to a transfer. What other engines do, and what a policy that
/// looks has to beat.
///
/// @par Threads  one at a time
class static_ratio_admission {
 public:
  /// @param layers  of the model
  /// @param share   of each layer's blocks that is offloaded, 0 to 1
  /// @throws std::invalid_argument  if there are none, or it is not
  static_ratio_admission(std::int32_t layers, double share)
      : layers_(detail::checked_layers(who, layers)), share_(share) {
    detail::check_number(who, "share", share, 1);
  }

  [[nodiscard]] std::int32_t layers() const noexcept { return layers_; }
  void observe(const link_snapshot& link, std::span<const double> activity) {
    detail::check_snapshot(who, link);
    detail::check_activity(who, layers_, activity);
    link_ = link;
  }
  [[nodiscard]] double offload_share(std::int32_t layer) const {
    detail::check_layer_of(who, layers_, layer);
    return share_;
  }
  admission_answer admit(const admission_request& request, std::span<double> placement) {
    detail::check_admit(who, layers_, request, placement);
    std::fill(placement.begin(), placement.end(), share_);
    const bool fits = resident_bytes(request.context_bytes, placement) <=
                      static_cast<double>(request.device_bytes_free);
    return {.verdict = fits ? admission_verdict::admit : admission_verdict::defer,
            .load_s = predicted_load_s(link_.recalls, request.load_bytes),
            .recompute_s = predicted_recompute_s(request)};
  }
  [[nodiscard]] bool may_store(std::int64_t bytes) {
    detail::check_count(who, "bytes", bytes);
    return true;
  }
  [[nodiscard]] bool may_recall(std::int64_t bytes) {
    detail::check_count(who, "bytes", bytes);
    return true;
  }

 private:
  static constexpr const char* who = "static_ratio_admission";

  std::int32_t layers_;
  double share_;
  link_snapshot link_;
};

/// Admits everything and offloads all of it: the least that there is to say.
class always_admission : public static_ratio_admission {
 public:
  explicit always_admission(std::int32_t layers) : static_ratio_admission(layers, 1) {}
};

static_assert(admission_policy<static_ratio_admission>);
static_assert(admission_policy<always_admission>);

}  // namespace pulseinfer
