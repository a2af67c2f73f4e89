// SPDX-License-Identifier: Apache-2.0
/// @file
/// A policy that grants the link by the second.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>

#include "pulseinfer/admission_types.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

struct token_bucket_options {
  double bytes_per_second = 0;        ///< granted to both directions together
  std::int64_t burst_bytes = 0;       ///< that can be saved up; it begins with as many
  double reserved_for_recalls = 0.5;  ///< share of the burst that stores leave untouched
  double offload_share = 0.9;         ///< of every layer's blocks
};

/// Grants transfers as tokens are there: they come at a fixed rate, and are spent by the byte. What
/// is larger than the bucket waits until it is full, and then leaves it in debt, so nothing is too
/// large to come in the end. Stores are refused first: they leave a part of the bucket to recalls.
/// It looks at the clock of the snapshots alone, not at the link.
///
/// @par Threads  one at a time
class token_bucket_admission {
 public:
  /// @throws std::invalid_argument  naming the option and its limit
  token_bucket_admission(std::int32_t layers, const token_bucket_options& options)
      : layers_(detail::checked_layers(who, layers)),
        options_(checked(options)),
        tokens_(static_cast<double>(options.burst_bytes)) {}

  [[nodiscard]] std::int32_t layers() const noexcept { return layers_; }
  /// Bytes that can be spent; negative while it is in debt.
  [[nodiscard]] double tokens() const noexcept { return tokens_; }

  /// Tokens come by `link.taken_at`. A clock that goes backwards brings none.
  void observe(const link_snapshot& link, std::span<const double> activity) {
    detail::check_snapshot(who, link);
    detail::check_activity(who, layers_, activity);
    if (has_observed_ && link.taken_at > link_.taken_at) {
      tokens_ =
          std::min(burst(), tokens_ + options_.bytes_per_second * (link.taken_at - link_.taken_at));
    }
    link_ = link;
    has_observed_ = true;
  }
  [[nodiscard]] double offload_share(std::int32_t layer) const {
    detail::check_layer_of(who, layers_, layer);
    return options_.offload_share;
  }
  /// A request with something to load is admitted when that is granted; else it recomputes, where
  /// that is sooner than the tokens are there and the load is through, or is deferred.
  admission_answer admit(const admission_request& request, std::span<double> placement) {
    detail::check_admit(who, layers_, request, placement);
    std::fill(placement.begin(), placement.end(), options_.offload_share);
    admission_answer answer{.load_s = predicted_load_s(link_.recalls, request.load_bytes),
                            .recompute_s = predicted_recompute_s(request)};
    if (request.load_bytes > 0) {
      const double missing = std::max(0.0, needed(request.load_bytes, 0) - tokens_);
      answer.load_s += missing / options_.bytes_per_second;
    }
    if (resident_bytes(request.context_bytes, placement) >
        static_cast<double>(request.device_bytes_free)) {
      return answer;
    }
    if (answer.recompute_s < answer.load_s) {
      answer.verdict = admission_verdict::recompute;
    } else if (request.load_bytes == 0 || may_recall(request.load_bytes)) {
      answer.verdict = admission_verdict::admit;
    }
    return answer;
  }
  [[nodiscard]] bool may_store(std::int64_t bytes) {
    return spend(bytes, options_.reserved_for_recalls * burst());
  }
  [[nodiscard]] bool may_recall(std::int64_t bytes) { return spend(bytes, 0); }

 private:
  static constexpr const char* who = "token_bucket_admission";

  [[nodiscard]] static token_bucket_options checked(const token_bucket_options& o) {
    detail::expects(std::isfinite(o.bytes_per_second) && o.bytes_per_second >= 1, who,
                    ": bytes_per_second is ", o.bytes_per_second,
                    ", expected at least 1, and finite");
    detail::expects(o.burst_bytes >= 1, who, ": burst_bytes is ", o.burst_bytes,
                    ", expected at least 1");
    detail::check_number(who, "reserved_for_recalls", o.reserved_for_recalls, 1);
    detail::check_number(who, "offload_share", o.offload_share, 1);
    return o;
  }
  [[nodiscard]] double burst() const noexcept { return static_cast<double>(options_.burst_bytes); }
  /// Tokens that must be there.
  [[nodiscard]] double needed(std::int64_t bytes, double reserve) const noexcept {
    return std::min(static_cast<double>(bytes) + reserve, burst());
  }
  [[nodiscard]] bool spend(std::int64_t bytes, double reserve) {
    detail::check_count(who, "bytes", bytes);
    if (tokens_ < needed(bytes, reserve)) return false;
    tokens_ -= static_cast<double>(bytes);
    return true;
  }

  std::int32_t layers_;
  token_bucket_options options_;
  double tokens_;
  link_snapshot link_;
  bool has_observed_ = false;
};

static_assert(admission_policy<token_bucket_admission>);

}  // namespace pulseinfer
