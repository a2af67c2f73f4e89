// SPDX-License-Identifier: Apache-2.0
/// @file
/// The link as it was measured: how busy it is, how fast, and what waits for it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <mutex>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/busy_intervals.hpp"
#include "pulseinfer/detail/link_queue.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/link_snapshot.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Over which times a monitor looks.
struct link_monitor_options {
  double window_s = 0.1;         ///< utilisation is the busy share of this much time
  double time_constant_s = 0.5;  ///< of the average of the speed: what is older weighs 1/e
};

/// One piece of a transfer that has left the link. Times are seconds by any one clock.
struct link_sample {
  copy_direction direction = copy_direction::host_to_device;
  std::int64_t bytes = 0;
  double began_at = 0;  ///< from when on nothing but the link itself held it back
  double ended_at = 0;  ///< it was seen to be there
};

/// What a monitor has seen of one direction since it was made.
struct link_counts {
  std::int64_t bytes = 0;    ///< of samples that were taken
  double busy_s = 0;         ///< while at least one of them was under way
  std::int64_t samples = 0;  ///< taken
  std::int64_t refused = 0;  ///< not taken: they say nothing of a link
};

/// Measures both directions of a link by what has arrived: time is taken at completion, not at
/// submission. A transfer engine that is given one (`transfer_options::monitor`) reports to it;
/// whoever moves bytes by other means can do so, too. Time enters as a number, so it goes by a real
/// clock, or by a virtual one.
///
/// - *Busy time* is a union: transfers that are under way at once keep the link busy once. What is
///   still under way is not counted yet, so utilisation lags by the length of a piece (a chunk).
/// - *Utilisation* is the busy share of the window that ends now. Before the first sample the link
///   was idle. It is exact for the newest 128 separate busy times; what is older is taken to be
///   spread evenly.
/// - *Speed* is bytes over busy time, each an average that forgets with the time constant: what the
///   link carries when it has something to carry, not what was asked of it.
/// - *Refused* are samples of no or fewer bytes, of no time, with times that are no numbers, that
///   end before they begin, or that end a whole window before the newest one. They are counted and
///   change nothing else, but that their bytes no longer wait. A clock that was set back is believed
///   at the 16th such sample in a row: everything but the counts and the queue starts anew.
///
/// @par Threads  any, at any time
/// @par Cost     a short critical section a direction for a sample and a snapshot, none for what
///               waits; nothing allocates, only `snapshot` looks at the whole window
class link_monitor {
 public:
  /// @throws std::invalid_argument  if a time is not at least 1 us and at most 1,000 s
  explicit link_monitor(const link_monitor_options& options = {}) : options_(checked(options)) {}
  link_monitor(const link_monitor&) = delete;
  link_monitor& operator=(const link_monitor&) = delete;

  [[nodiscard]] const link_monitor_options& options() const noexcept { return options_; }

  /// A transfer waits for the link from now on, with so many bytes. Fewer than none are none; a copy
  /// within the device is none of the link's.
  void submitted(copy_direction direction, std::int64_t bytes) noexcept {
    if (!is_of_link(direction)) return;
    of(direction).queue.add_bytes(std::max<std::int64_t>(bytes, 0));
    of(direction).queue.add_transfers(1);
  }

  /// Of a transfer that waits it has turned out that it has more bytes for the link than was said,
  /// or fewer (a negative change): units that were found not to be there, or will not come.
  void resized(copy_direction direction, std::int64_t change) noexcept {
    if (is_of_link(direction)) of(direction).queue.add_bytes(change);
  }

  /// A piece of a transfer has left the link; it waits no longer.
  /// @return whether the sample was taken; the class says what is refused
  bool moved(const link_sample& sample) noexcept {
    traffic& t = of(sample.direction);
    if (is_of_link(sample.direction)) t.take_from_queue(sample.bytes);
    std::lock_guard lock(t.mutex);
    if (!is_of_link(sample.direction) || !t.accepts(sample, options_.window_s)) {
      ++t.counts.refused;
      return false;
    }
    const double busy =
        t.intervals.add(sample.began_at, sample.ended_at,
                        std::max(t.intervals.newest(), sample.ended_at) - options_.window_s);
    t.age_to(sample.ended_at, options_.time_constant_s);
    t.average_bytes += static_cast<double>(sample.bytes);
    t.average_busy_s += busy;
    t.counts.bytes += sample.bytes;
    t.counts.busy_s += busy;
    ++t.counts.samples;
    return true;
  }

  /// A transfer has ended. `bytes_left` of it did not move (failed, cancelled), and wait no longer.
  void ended(copy_direction direction, std::int64_t bytes_left) noexcept {
    if (!is_of_link(direction)) return;
    of(direction).take_from_queue(bytes_left);
    of(direction).queue.add_transfers(-1);
  }

  /// Both directions as they are now.
  /// @param now  seconds, by the clock of the samples; a moment before the newest sample is taken
  ///             for that of the sample
  /// @throws std::invalid_argument  if it is not at least 0, and finite
  [[nodiscard]] link_snapshot snapshot(double now) const {
    detail::check_number("link_monitor", "now", now);
    return {.recalls = load_of(of(copy_direction::host_to_device), now),
            .stores = load_of(of(copy_direction::device_to_host), now),
            .taken_at = now};
  }

  /// @throws std::invalid_argument  on copies within the device
  [[nodiscard]] link_counts counts(copy_direction direction) const {
    detail::expects(is_of_link(direction),
                    "link_monitor: direction is device_to_device, which is no link's");
    const traffic& t = of(direction);
    std::lock_guard lock(t.mutex);
    return t.counts;
  }

 private:
  static constexpr int restart_after = 16;

  struct traffic {
    /// Whether a sample can be true; under the mutex.
    [[nodiscard]] bool accepts(const link_sample& sample, double window_s) noexcept {
      if (sample.bytes <= 0 || !std::isfinite(sample.began_at) || !std::isfinite(sample.ended_at) ||
          sample.began_at < 0 || sample.ended_at <= sample.began_at) {
        return false;
      }
      if (sample.ended_at > intervals.newest() - window_s) {
        behind = 0;
        return true;
      }
      if (++behind < restart_after) return false;
      behind = 0;
      intervals.clear();
      average_bytes = average_busy_s = averaged_at = 0;
      return true;
    }
    void take_from_queue(std::int64_t bytes) noexcept {
      queue.add_bytes(-std::max<std::int64_t>(bytes, 0));
    }
    void age_to(double moment, double time_constant_s) noexcept {
      if (moment <= averaged_at) return;
      const double kept = std::exp((averaged_at - moment) / time_constant_s);
      average_bytes *= kept;
      average_busy_s *= kept;
      averaged_at = moment;
    }

    detail::link_queue queue;
    mutable std::mutex mutex;  ///< guards the rest
    detail::busy_intervals intervals;
    double average_bytes = 0;
    double average_busy_s = 0;
    double averaged_at = 0;
    int behind = 0;  ///< samples in a row that seem to be from long ago
    link_counts counts;
  };

  [[nodiscard]] static link_monitor_options checked(const link_monitor_options& o) {
    const auto check = [](const char* name, double value) {
      detail::expects(std::isfinite(value) && value >= 1e-6 && value <= 1e3, "link_monitor: ", name,
                      " is ", value, ", expected 0.000001 to 1000");
    };
    check("window_s", o.window_s);
    check("time_constant_s", o.time_constant_s);
    return o;
  }
  [[nodiscard]] static bool is_of_link(copy_direction direction) noexcept {
    return direction == copy_direction::host_to_device ||
           direction == copy_direction::device_to_host;
  }
  [[nodiscard]] traffic& of(copy_direction direction) noexcept {
    return direction == copy_direction::device_to_host ? out_ : in_;
  }
  [[nodiscard]] const traffic& of(copy_direction direction) const noexcept {
    return direction == copy_direction::device_to_host ? out_ : in_;
  }
  [[nodiscard]] link_load load_of(const traffic& t, double now) const {
    std::lock_guard lock(t.mutex);
    const double end = std::max(now, t.intervals.newest());
    const double busy = t.intervals.busy_within(end - options_.window_s, end);
    const bool measured = t.average_busy_s > 0 && t.average_bytes > 0;
    return {.utilisation = std::clamp(busy / options_.window_s, 0.0, 1.0),
            .seconds_per_byte = measured ? t.average_busy_s / t.average_bytes : 0,
            .queued_bytes = t.queue.bytes(),
            .queued_transfers = t.queue.transfers()};
  }

  link_monitor_options options_;
  traffic in_;
  traffic out_;
};

}  // namespace pulseinfer
