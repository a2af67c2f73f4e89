// SPDX-License-Identifier: Apache-2.0
/// @file
/// IO-adaptive admission: offload much while the link is idle, keep the most active layers in HBM
/// while it is busy, and let nobody in whom it cannot serve.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "pulseinfer/admission_types.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/link_snapshot.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Where an adaptive policy has its limits.
struct adaptive_admission_options {
  double low_utilisation = 0.5;    ///< of the link: below it all layers are offloaded
  double high_utilisation = 0.85;  ///< above it `retained_layers` stay
  double max_offload_share = 0.9;  ///< of the blocks of a layer that does not stay
  std::int32_t retained_layers = 2;
  /// How much the utilisation has to swing before the placement turns round.
  double hysteresis = 0.1;
  double max_step = 0.25;     ///< of the way between both ends, a decision
  std::int32_t patience = 3;  ///< decisions in a row that ask for it before the placement turns
  double swap_margin = 0.25;  ///< by which a layer is more active than one that stays in its place
  std::int64_t store_queue_bytes = 256 << 20;  ///< queued in both directions: then no more stores
  std::int64_t recall_queue_bytes = 1 << 30;   ///< queued recalls: then no more of them
  double resume_share = 0.5;  ///< of each, down to which a queue drains before it is fed again
  double max_wait_s = 5;      ///< so long a request is deferred because of the link
  double utilisation_window_s = 0.1;  ///< over which the link is measured, as its monitor has it
  /// Of the memory that `observe_memory` tells of, the share that is filled before more is offloaded
  /// than the link asks for.
  double memory_share = 1;
  /// So long a request is deferred because it would keep less than there is room for: those who have
  /// more are giving it up.
  double max_wait_for_room_s = 0.5;
};

/// What HBM has for KV caches, and what is to be in it.
struct admission_memory {
  std::int64_t capacity_bytes = 0;  ///< all of it, without what a request takes beside its cache
  std::int64_t context_bytes = 0;   ///< caches of all requests that run, and of those that wait
};

/// Between everything offloaded (0) and all of `retained_layers` kept (1).
struct retention_level {
  double level = 0;
  int direction = 0;            ///< of the last move
  std::int32_t turn_asked = 0;  ///< decisions in a row that asked for the other one

  friend bool operator==(const retention_level&, const retention_level&) = default;
};

/// The next level: a pure function.
///
/// Two straight lines lead from 0 to 1. The level is pushed up by one that ends at
/// `high_utilisation`, and down by one that begins at `low_utilisation`; between them, `hysteresis`
/// apart, it stays where it is. So it is 1 at a busy link and 0 at an idle one, a utilisation that
/// swings by less than that moves nothing, and whoever turns round has been asked to `patience`
/// times in a row, and takes steps of `max_step` at most.
[[nodiscard]] inline retention_level next_level(const retention_level& now, double utilisation,
                                                const adaptive_admission_options& o) noexcept {
  const double width = o.high_utilisation - o.low_utilisation - o.hysteresis;
  const double above_low = utilisation - o.low_utilisation;
  const double pushed_up = std::clamp((above_low - o.hysteresis) / width, 0.0, 1.0);
  const double pushed_down = std::clamp(above_low / width, 0.0, 1.0);
  const double wanted = utilisation >= o.high_utilisation
                            ? 1
                            : std::clamp(now.level, pushed_up, std::max(pushed_up, pushed_down));
  const double step = std::clamp(wanted - now.level, -o.max_step, o.max_step);
  retention_level next = now;
  next.turn_asked = 0;
  if (step == 0) return next;
  const int direction = step > 0 ? 1 : -1;
  if (now.direction == -direction && now.turn_asked + 1 < o.patience) {
    next.turn_asked = now.turn_asked + 1;
    return next;
  }
  next.level = std::clamp(now.level + step, 0.0, 1.0);
  next.direction = direction;
  return next;
}

/// Observes the link, and decides.
///
/// *Placement.* Up to `max_offload_share` of every layer is offloaded; the most active layers stay,
/// as many as `next_level` says of `retained_layers`, the last one of them in part. A link whose
/// queue is too deep counts as busy. Active is what was measured (`layer_activity`); without
/// measurements the outermost layers are taken for the most active: first, last, second, and so on.
/// A layer that stays is recalled less, and would look idle for that reason alone: so what was
/// measured before counts as long as it stays, and another one takes its place, one a decision, when
/// it is more active by `swap_margin`.
///
/// *Memory.* Offloading makes room. Who tells how much there is (`observe_memory`) has as many layers
/// stay as it holds, of all requests alike: all of them where nothing lacks room, none where the
/// link is idle and the room is needed. Then the link's say is what stays at least. A request that
/// runs keeps what it has until somebody waits for room: its engine then asks `offload_share` anew.
///
/// *Requests.* Who fits into HBM by giving up retained layers, the least active first, gets that
/// placement; who does not fit even then is deferred. What has to be loaded is recomputed where that
/// is sooner by the predicted times; such a load is not the link's. A load shares the link with what
/// others move: that loads which were let in before made it busy of late is not counted, they are
/// through or stand in the queue before it. Otherwise a request is deferred
/// while the link sheds stores, or while its load has no place in the queue of recalls; but not for
/// longer than `max_wait_s`. What was let in since the last observation counts as queued, so a crowd
/// that asks again when the link is free does not come in all at once.
///
/// *Transfers.* Stores stop when the queues of both directions together are full, recalls when
/// theirs alone is; either begins again when its queue has drained to `resume_share`. What is larger
/// than a queue goes when nothing waits.
///
/// It never asks for a load to relieve the link: a placement says what is offloaded of that which is
/// on the device (`plan_layer`).
///
/// @par Threads  one at a time
/// @par Cost     `observe` is O(layers) while activities keep their order, at most O(layers^2) where
///               they do not; `admit` O(layers), the others O(1)
class adaptive_admission {
 public:
  /// @throws std::invalid_argument  naming the option and its limit
  explicit adaptive_admission(std::int32_t layers, const adaptive_admission_options& options = {})
      : options_(checked(detail::checked_layers(who, layers), options)),
        order_(static_cast<std::size_t>(layers)),
        position_(order_.size()),
        activity_(order_.size(), 0.0) {
    for (std::size_t i = 0; i < order_.size(); ++i) order_[i] = static_cast<std::int32_t>(i);
    sort_from(0);
  }

  [[nodiscard]] const adaptive_admission_options& options() const noexcept { return options_; }
  [[nodiscard]] std::int32_t layers() const noexcept {
    return static_cast<std::int32_t>(order_.size());
  }
  [[nodiscard]] const retention_level& level() const noexcept { return level_; }
  /// Layers that stay, the last one of them in part: what the link asks for, and what there is
  /// memory for beyond it.
  [[nodiscard]] double retained_layers() const noexcept {
    return std::max(level_.level * options_.retained_layers, layers_with_memory_);
  }
  /// [layers] the layers in the order in which they stay.
  [[nodiscard]] std::span<const std::int32_t> order() const noexcept { return order_; }
  /// True while stores wait and requests are deferred, since the link's queues were full.
  [[nodiscard]] bool is_shedding() const noexcept { return sheds_stores_; }

  void observe(const link_snapshot& link, std::span<const double> activity) {
    detail::check_snapshot(who, link);
    detail::check_activity(who, layers(), activity);
    note_loads(link);
    link_ = link;
    promised_stores_ = promised_recalls_ = 0;
    sheds_stores_ = is_full(sheds_stores_, queued(), options_.store_queue_bytes);
    sheds_recalls_ =
        is_full(sheds_recalls_, link.recalls.queued_bytes, options_.recall_queue_bytes);
    rank(activity);
    level_ = next_level(level_, sheds_stores_ ? 1 : link.utilisation(), options_);
  }

  /// How many layers of every request there is room for. Without this call memory is only looked
  /// at when a request asks (`device_bytes_free`).
  /// @throws std::invalid_argument  on negative bytes; nothing changes
  void observe_memory(const admission_memory& memory) {
    detail::check_count(who, "capacity_bytes", memory.capacity_bytes);
    detail::check_count(who, "context_bytes", memory.context_bytes);
    const double filled = options_.memory_share * static_cast<double>(memory.capacity_bytes);
    layers_with_memory_ =
        layers_that_fit(filled, static_cast<double>(memory.context_bytes), layers());
  }

  [[nodiscard]] double offload_share(std::int32_t layer) const {
    detail::check_layer_of(who, layers(), layer);
    return share_at(position_[static_cast<std::size_t>(layer)], retained_layers());
  }

  admission_answer admit(const admission_request& request, std::span<double> placement) {
    detail::check_admit(who, layers(), request, placement);
    link_load others = link_.recalls;
    others.utilisation = std::max(0.0, others.utilisation - load_share_);
    admission_answer answer{
        .load_s = predicted_load_s(others, request.load_bytes, promised_recalls_),
        .recompute_s = predicted_recompute_s(request)};
    const double retained = retained_that_fit(request);
    for (std::size_t i = 0; i < placement.size(); ++i) {
      placement[i] = share_at(position_[i], std::max(retained, 0.0));
    }
    if (retained < 0) return answer;
    if (retained < layers_with_memory_ - 1 && request.waited_s < options_.max_wait_for_room_s) {
      return answer;
    }
    if (request.load_bytes > 0 && answer.recompute_s < answer.load_s) {
      answer.verdict = admission_verdict::recompute;
    } else if (request.waited_s >= options_.max_wait_s ||
               (!sheds_stores_ && (request.load_bytes == 0 || has_room(request.load_bytes)))) {
      answer.verdict = admission_verdict::admit;
      promise(promised_recalls_, request.load_bytes);
      promise(loads_, request.load_bytes);
    }
    return answer;
  }

  [[nodiscard]] bool may_store(std::int64_t bytes) {
    detail::check_count(who, "bytes", bytes);
    if (sheds_stores_) return false;
    if (!takes(queued(), sum(promised_stores_, promised_recalls_), bytes,
               options_.store_queue_bytes)) {
      return false;
    }
    promise(promised_stores_, bytes);
    return true;
  }
  [[nodiscard]] bool may_recall(std::int64_t bytes) {
    detail::check_count(who, "bytes", bytes);
    if (!has_room(bytes)) return false;
    promise(promised_recalls_, bytes);
    return true;
  }

 private:
  static constexpr const char* who = "adaptive_admission";

  [[nodiscard]] static adaptive_admission_options checked(std::int32_t layers,
                                                          const adaptive_admission_options& o) {
    using detail::expects;
    const auto number = [](const char* name, double value, double limit) {
      detail::check_number(who, name, value, limit);
    };
    number("low_utilisation", o.low_utilisation, 1);
    number("high_utilisation", o.high_utilisation, 1);
    expects(o.low_utilisation < o.high_utilisation, who, ": low_utilisation is ", o.low_utilisation,
            ", expected less than high_utilisation, which is ", o.high_utilisation);
    number("hysteresis", o.hysteresis, 1);
    expects(o.hysteresis < o.high_utilisation - o.low_utilisation, who, ": hysteresis is ",
            o.hysteresis, ", expected less than what is between the two utilisations, ",
            o.high_utilisation - o.low_utilisation);
    number("max_offload_share", o.max_offload_share, 1);
    number("max_step", o.max_step, 1);
    expects(o.max_step > 0, who, ": max_step is ", o.max_step, ", expected more than 0");
    number("swap_margin", o.swap_margin, 1e6);
    number("resume_share", o.resume_share, 1);
    number("max_wait_s", o.max_wait_s, 1e9);
    number("utilisation_window_s", o.utilisation_window_s, 1e3);
    expects(o.utilisation_window_s > 0, who,
            ": utilisation_window_s is 0, expected more than that");
    number("memory_share", o.memory_share, 1);
    number("max_wait_for_room_s", o.max_wait_for_room_s, 1e9);
    expects(o.retained_layers >= 0 && o.retained_layers <= layers, who, ": retained_layers is ",
            o.retained_layers, ", expected 0 to ", layers, ", the layers of the model");
    expects(o.patience >= 1 && o.patience <= 1'000'000, who, ": patience is ", o.patience,
            ", expected 1 to 1000000");
    expects(o.store_queue_bytes >= 1, who, ": store_queue_bytes is ", o.store_queue_bytes,
            ", expected at least 1");
    expects(o.recall_queue_bytes >= o.store_queue_bytes, who, ": recall_queue_bytes is ",
            o.recall_queue_bytes, ", expected at least store_queue_bytes, which is ",
            o.store_queue_bytes, ": stores are refused first");
    return o;
  }

  // Placement.

  /// What is offloaded of the layer at a position of the order, where so many layers stay.
  [[nodiscard]] double share_at(std::int32_t position, double retained) const noexcept {
    return options_.max_offload_share * (1 - std::clamp(retained - position, 0.0, 1.0));
  }
  /// How active layers are without measurements: the outermost first.
  [[nodiscard]] std::int32_t depth(std::int32_t layer) const noexcept {
    return std::min(layer, layers() - 1 - layer);
  }
  /// Orders the layers from a position on; those before it stay where they are. Where memory says
  /// how many stay, what is more active by less than `swap_margin` passes nobody: the first layers of
  /// the order are those that all requests keep, and what has once left is not loaded again.
  void sort_from(std::size_t first) noexcept {
    for (std::size_t i = first + 1; i < order_.size(); ++i) {
      for (std::size_t j = i; j > first && passes(order_[j], order_[j - 1]); --j) {
        std::swap(order_[j], order_[j - 1]);
      }
    }
    for (std::size_t i = 0; i < order_.size(); ++i) {
      position_[static_cast<std::size_t>(order_[i])] = static_cast<std::int32_t>(i);
    }
  }
  [[nodiscard]] bool passes(std::int32_t a, std::int32_t b) const noexcept {
    const double margin = layers_with_memory_ > 0 ? options_.swap_margin : 0;
    if (activity_of(a) != activity_of(b)) return activity_of(a) > (1 + margin) * activity_of(b);
    return depth(a) != depth(b) ? depth(a) < depth(b) : a < b;
  }
  [[nodiscard]] double activity_of(std::int32_t layer) const noexcept {
    return activity_[static_cast<std::size_t>(layer)];
  }
  void rank(std::span<const double> activity) noexcept {
    const auto kept = static_cast<std::size_t>(std::ceil(retained_layers()));
    for (std::size_t i = 0; i < activity.size(); ++i) {
      const bool stays = static_cast<std::size_t>(position_[i]) < kept;
      activity_[i] = stays ? std::max(activity_[i], activity[i]) : activity[i];
    }
    sort_from(kept);
    if (kept == 0 || kept == order_.size()) return;
    const auto weakest = std::min_element(
        order_.begin(), order_.begin() + static_cast<std::ptrdiff_t>(kept),
        [this](std::int32_t a, std::int32_t b) { return activity_of(a) < activity_of(b); });
    // What all requests keep was never measured: it says nothing that it was not recalled.
    if (layers_with_memory_ > 0 && activity_of(*weakest) == 0) return;
    if (activity_of(order_[kept]) <= (1 + options_.swap_margin) * activity_of(*weakest)) return;
    std::swap(*weakest, order_[kept]);
    sort_from(kept);
  }
  /// How many layers of a context stay in so much memory, at most `most`.
  [[nodiscard]] double layers_that_fit(double bytes, double context, double most) const noexcept {
    if (context == 0 || options_.max_offload_share == 0) return most;
    const double least = 1 - options_.max_offload_share;  // of a layer that does not stay
    const double fit =
        (bytes / context - least) * static_cast<double>(layers()) / options_.max_offload_share;
    return std::clamp(fit, 0.0, most);
  }
  /// Of the layers that stay, those for which a request has memory; negative: not even none.
  [[nodiscard]] double retained_that_fit(const admission_request& request) const noexcept {
    const auto context = static_cast<double>(request.context_bytes);
    const auto free = static_cast<double>(request.device_bytes_free);
    if ((1 - options_.max_offload_share) * context > free) return -1;
    return layers_that_fit(free, context, retained_layers());
  }

  // The queues.

  /// Loads that were let in make the link busy until they are through, and no longer: what a later
  /// one shares it with is what the others move. Taken to move as fast as the link is.
  void note_loads(const link_snapshot& link) noexcept {
    const double passed = link.taken_at - link_.taken_at;
    if (!(passed > 0) || !(link.recalls.seconds_per_byte > 0)) return;
    const double can = passed / link.recalls.seconds_per_byte;
    const double moved = std::min(can, static_cast<double>(loads_));
    loads_ -= static_cast<std::int64_t>(moved);
    const double kept = std::exp(-passed / options_.utilisation_window_s);
    load_share_ = kept * load_share_ + (1 - kept) * (moved / can);
  }
  [[nodiscard]] std::int64_t queued() const noexcept {
    return sum(link_.recalls.queued_bytes, link_.stores.queued_bytes);
  }
  /// a + b, or the largest number.
  [[nodiscard]] static std::int64_t sum(std::int64_t a, std::int64_t b) noexcept {
    return a > INT64_MAX - b ? INT64_MAX : a + b;
  }
  static void promise(std::int64_t& promised, std::int64_t bytes) noexcept {
    promised = sum(promised, bytes);
  }
  /// Once full a queue is full until it has drained.
  [[nodiscard]] bool is_full(bool was_full, std::int64_t bytes, std::int64_t limit) const noexcept {
    const double resumes = options_.resume_share * static_cast<double>(limit);
    return bytes >= limit || (was_full && static_cast<double>(bytes) > resumes);
  }
  [[nodiscard]] static bool takes(std::int64_t queued, std::int64_t promised, std::int64_t bytes,
                                  std::int64_t limit) noexcept {
    const std::int64_t before = sum(queued, promised);
    return before == 0 || sum(before, bytes) <= limit;
  }
  [[nodiscard]] bool has_room(std::int64_t bytes) const noexcept {
    return !sheds_recalls_ &&
           takes(link_.recalls.queued_bytes, promised_recalls_, bytes, options_.recall_queue_bytes);
  }

  adaptive_admission_options options_;
  std::vector<std::int32_t> order_;     ///< layers, those that stay first
  std::vector<std::int32_t> position_;  ///< of each layer in the order
  std::vector<double> activity_;        ///< of each layer; while it stays the most that it had
  retention_level level_;
  double layers_with_memory_ = 0;
  link_snapshot link_;
  bool sheds_stores_ = false;
  bool sheds_recalls_ = false;
  std::int64_t promised_stores_ = 0;  ///< let in since the last observation
  std::int64_t promised_recalls_ = 0;
  std::int64_t loads_ = 0;  ///< bytes that were let in, and are not through by the link's speed
  double load_share_ = 0;   ///< of the link, that such loads took of late
};

static_assert(admission_policy<adaptive_admission>);

}  // namespace pulseinfer
