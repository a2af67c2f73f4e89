// SPDX-License-Identifier: Apache-2.0
/// @file
/// Who gets pages, and from whom they are taken: all that a request lacks or nothing, the oldest
/// first, and never so that everybody waits for everybody.
#pragma once

#include <cstdint>

#include "pulseinfer/detail/schedule_books.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Counts pages. Which ones they are is the engine's business.
///
/// A request that lacks pages gets all of them at once. While the oldest one cannot have its own,
/// younger ones may pass, but not for more than `patience` batches. If what the oldest lacks is
/// held by younger ones that cannot run either, or it has waited for longer than that, they give
/// theirs back, the youngest first. So the oldest always runs, and then the next one is the oldest.
class schedule_pages {
 public:
  schedule_pages(std::int32_t pages, std::uint64_t patience)
      : total_(pages), free_(pages), patience_(patience) {}

  [[nodiscard]] std::int32_t total() const noexcept { return total_; }
  [[nodiscard]] std::int32_t free() const noexcept { return free_; }

  /// Raises what a request must hold, and gives it that if nobody older lacks some.
  /// @return whether it holds all of it
  bool need(schedule_books& books, std::int32_t i, std::int32_t pages) noexcept {
    layer_task& t = books.task(i);
    const bool lacked = t.lacks_pages();
    t.pages_needed = pages > t.pages_needed ? pages : t.pages_needed;
    if (!t.lacks_pages()) return true;
    if (!lacked) begin_lack(books, i);
    if (lacking_ == 1) (void)give(t);
    return !t.lacks_pages();
  }
  /// A request lacks pages again, or no longer wants any.
  void begin_lack(schedule_books& books, std::int32_t i) noexcept {
    ++lacking_;
    books.record(i).short_since = books.batches;
  }
  void end_lack(const layer_task& t) noexcept {
    if (t.lacks_pages()) --lacking_;
  }
  /// The pages of a request are nobody's again.
  void take_back(layer_task& t) noexcept {
    free_ += t.pages_held;
    t.pages_held = 0;
  }

  /// Gives pages to all that can have them, the oldest first. `granted(i)` is called for each that
  /// got some, `preempt(i)` for each that must give its own back.
  template <class Granted, class Preempt>
  void grant(schedule_books& books, Granted granted, Preempt preempt) {
    std::int32_t oldest = -1;
    for (std::int32_t i = books.oldest; i >= 0 && lacking_ > 0; i = books.record(i).younger) {
      layer_task& t = books.task(i);
      if (!asks(t)) continue;
      if (give(t)) {
        granted(i);
        continue;
      }
      if (oldest < 0) oldest = i;
      if (is_overdue(books, oldest)) break;  // nobody passes it any more
    }
    if (oldest >= 0) make_room(books, oldest, preempt);
  }

 private:
  [[nodiscard]] bool is_overdue(const schedule_books& books, std::int32_t i) const noexcept {
    return books.batches - books.records[static_cast<std::size_t>(i)].short_since >= patience_;
  }
  bool give(layer_task& t) noexcept {
    const std::int32_t lacks = t.pages_needed - t.pages_held;
    if (lacks > free_) return false;
    free_ -= lacks;
    t.pages_held = t.pages_needed;
    --lacking_;
    return true;
  }
  [[nodiscard]] static bool asks(const layer_task& t) noexcept {
    return t.lacks_pages() && !t.parked && !t.leaving && !t.done;
  }

  /// Whether a younger request would give what it has: nothing runs on its pages.
  [[nodiscard]] static bool may_give(const schedule_books& books, std::int32_t i,
                                     bool overdue) noexcept {
    const layer_task& t = books.tasks[static_cast<std::size_t>(i)];
    if (t.pages_held == 0 || t.leaving || t.giving_back) return false;
    const layer_state state = books.state(i);
    return overdue || state == layer_state::waiting || state == layer_state::parked ||
           state == layer_state::done;
  }

  template <class Preempt>
  void make_room(schedule_books& books, std::int32_t to, Preempt preempt) {
    const bool overdue = is_overdue(books, to);
    const std::int32_t lacks = books.task(to).pages_needed - books.task(to).pages_held;
    std::int32_t coming = free_;
    std::int32_t could = 0;
    bool is_younger = false;
    for (std::int32_t i = books.oldest; i >= 0; i = books.record(i).younger) {
      const layer_task& t = books.task(i);
      if (t.leaving || t.giving_back) coming += t.pages_held;
      if (is_younger && may_give(books, i, overdue)) could += t.pages_held;
      is_younger = is_younger || i == to;
    }
    if (coming >= lacks || coming + could < lacks) return;
    for (std::int32_t i = books.youngest; coming < lacks; i = books.record(i).older) {
      if (!may_give(books, i, overdue)) continue;
      coming += books.task(i).pages_held;
      preempt(i);
    }
  }

  std::int32_t total_;
  std::int32_t free_;
  std::uint64_t patience_;
  std::int32_t lacking_ = 0;  ///< requests that lack pages, parked ones too
};

}  // namespace pulseinfer::detail
