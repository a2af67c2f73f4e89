// SPDX-License-Identifier: Apache-2.0
/// @file
/// How a recall that has the machine to itself is cut into a head and chunks, by its size.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pulseinfer/detail/text_fields.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// How a staged recall of at most `max_units` units goes, where little else is under way.
///
/// The head is copied from where its units lie, in one batch, while the first chunk is gathered; each
/// chunk is gathered while those before it are on the link. What is best depends on the machine and
/// on the size: a chunk that comes late lets the link rest, and each one costs it a call. `tune_chunks`
/// (chunk_tuning.hpp) finds it out by trial.
struct chunk_plan {
  static constexpr std::size_t most_chunks = 6;

  std::int64_t max_units = 0;  ///< of a recall that goes by it, at least 1
  double head = 0;             ///< share of the recall's units, in [0, 1]
  /// Shares of the recall's units, in (0, 1], of its first chunks; behind those with a share they go
  /// on as the last one. The first has one.
  std::array<double, most_chunks> chunks{};
  std::int32_t parts = 16;  ///< that a chunk is gathered in, at most; 1 to 1,024

  /// Units of the head, of a recall of so many: rounded, so there may be none.
  [[nodiscard]] std::size_t head_of(std::size_t all) const noexcept { return part_of(head, all); }
  /// Units of chunk number `chunk`, if as many are left; at least one.
  [[nodiscard]] std::size_t chunk_of(std::int64_t chunk, std::size_t all) const noexcept {
    std::size_t i = std::min(static_cast<std::size_t>(chunk), most_chunks - 1);
    while (i > 0 && chunks[i] == 0) --i;
    return std::max<std::size_t>(part_of(chunks[i], all), 1);
  }
  friend bool operator==(const chunk_plan&, const chunk_plan&) = default;

 private:
  [[nodiscard]] static std::size_t part_of(double share, std::size_t all) noexcept {
    return static_cast<std::size_t>(std::llround(share * static_cast<double>(all)));
  }
};

namespace detail {

inline void check_plan(const chunk_plan& p) {
  expects(p.max_units >= 1, "chunk_plan: max_units is ", p.max_units, ", expected at least 1");
  expects(p.head >= 0 && p.head <= 1, "chunk_plan: head is ", number_text(p.head),
          ", expected 0 to 1");
  expects(p.parts >= 1 && p.parts <= 1024, "chunk_plan: parts is ", p.parts,
          ", expected 1 to 1024");
  bool ended = false;
  for (std::size_t i = 0; i < p.chunks.size(); ++i) {
    const double share = p.chunks[i];
    expects(share >= 0 && share <= 1, "chunk_plan: chunk ", i, " has a share of ",
            number_text(share), ", expected 0 to 1");
    expects(i > 0 || share > 0, "chunk_plan: chunk 0 has no share");
    expects(share == 0 || !ended, "chunk_plan: chunk ", i, " has a share, the one before has none");
    ended = share == 0;
  }
}

inline constexpr std::int64_t plan_text_version = 1;

}  // namespace detail

/// Plans for recalls of all sizes up to the largest one's `max_units`.
class chunk_plans {
 public:
  /// @throws std::invalid_argument  naming what of a plan is out of range, or one that is not for
  ///                                larger recalls than the one before; nothing changes
  void add(const chunk_plan& plan) {
    detail::check_plan(plan);
    detail::expects(plans_.empty() || plan.max_units > plans_.back().max_units,
                    "chunk_plans: max_units is ", plan.max_units,
                    ", expected more than the one before has, which is ",
                    plans_.empty() ? 0 : plans_.back().max_units);
    plans_.push_back(plan);
  }
  /// The one for a recall of so many units; null if they are more than any is for.
  /// @par Cost  O(log plans)
  [[nodiscard]] const chunk_plan* find(std::size_t units) const noexcept {
    const auto found = std::lower_bound(
        plans_.begin(), plans_.end(), units,
        [](const chunk_plan& p, std::size_t n) { return std::cmp_less(p.max_units, n); });
    return found == plans_.end() ? nullptr : &*found;
  }
  [[nodiscard]] std::span<const chunk_plan> all() const noexcept { return plans_; }

  /// All of it as lines of text, which `from_text` reads back to the bit, in any locale.
  [[nodiscard]] std::string to_text() const {
    std::string text;
    detail::append_field(text, "pulseinfer chunk_plans", detail::plan_text_version);
    detail::append_field(text, "plans", static_cast<std::int64_t>(plans_.size()));
    text += '\n';
    for (const chunk_plan& p : plans_) {
      detail::append_field(text, "max_units", p.max_units);
      detail::append_field(text, "head", p.head);
      detail::append_field(text, "parts", p.parts);
      for (const double share : p.chunks) detail::append_field(text, "chunk", share);
      text += '\n';
    }
    return text;
  }
  /// Reads what `to_text` wrote. Blank lines and lines that begin with # are passed over.
  /// @throws std::invalid_argument  naming line and field; also on another version of the format, or
  ///                                where the end is missing
  [[nodiscard]] static chunk_plans from_text(std::string_view text) {
    detail::field_reader reader("chunk_plans", text);
    const std::int64_t count = reader.first_line(detail::plan_text_version, "tune", "plans");
    chunk_plans plans;
    for (std::int64_t i = 0; i < count; ++i) {
      if (!reader.next_line()) reader.fail("the text ends before plan ", i + 1, " of ", count);
      chunk_plan p;
      p.max_units = reader.number<std::int64_t>("max_units");
      p.head = reader.number<double>("head");
      p.parts = reader.number<std::int32_t>("parts");
      for (double& share : p.chunks) share = reader.number<double>("chunk");
      reader.end_of_line();
      try {
        plans.add(p);
      } catch (const std::invalid_argument& refused) {
        reader.fail(std::string_view(refused.what()));
      }
    }
    reader.end(count, "plans");
    return plans;
  }

  friend bool operator==(const chunk_plans&, const chunk_plans&) = default;

 private:
  std::vector<chunk_plan> plans_;
};

}  // namespace pulseinfer
