// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tables that say themselves what they need: asked for a run, a book writes it into the plan while
/// there are no results, and gives its outcome afterwards. A further rule is one more row of a table.
#pragma once

#include <algorithm>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

#include "plan.hpp"
#include "study.hpp"

namespace fidelity {

class book {
 public:
  [[nodiscard]] const std::vector<run>& plan() const { return plan_; }
  [[nodiscard]] bool is_open() const { return texts_ != nullptr; }
  [[nodiscard]] const std::vector<text_result>& texts() const { return *texts_; }

  /// Gives the results to the book. They are of its plan, and outlive it.
  void open(const std::vector<text_result>& texts) {
    texts_ = &texts;
    all_.assign(plan_.size(), {});
    for (const text_result& text : texts) {
      if (text.for_length) continue;
      for (std::size_t i = 0; i < plan_.size(); ++i) all_[i].add(text.all[i]);
    }
  }

  /// What a run gave over all texts that are not here for their length; nothing while the plan is
  /// being made.
  const outcome& operator()(const run& r) {
    const std::size_t i = find(r);
    return is_open() ? all_[i] : nothing_;
  }
  /// What it gave for one text.
  const outcome& of(std::size_t text, const run& r) {
    const std::size_t i = find(r);
    return is_open() ? (*texts_)[text].all[i] : nothing_;
  }
  /// Where a run stands in `text_result::layer` and `all`.
  std::size_t find(const run& r) {
    for (std::size_t i = 0; i < plan_.size(); ++i) {
      run& have = plan_[i];
      if (!(have.how == r.how) || have.exact != r.exact || have.budget != r.budget ||
          have.fraction != r.fraction || have.steps != r.steps) {
        continue;
      }
      if (is_open()) return i;
      have.keep_lists = have.keep_lists || r.keep_lists;
      have.all_lengths = have.all_lengths || r.all_lengths;
      for (const residency& hot : r.through) {
        if (std::find(have.through.begin(), have.through.end(), hot) == have.through.end()) {
          have.through.push_back(hot);
        }
      }
      return i;
    }
    if (is_open()) throw std::logic_error("fidelity: a table asks for a run that was not planned");
    plan_.push_back(r);
    return plan_.size() - 1;
  }
  /// Units that missed a hot buffer that `r` asked for, the first step left out.
  double missed(const outcome& o, const run& r, const residency& hot) {
    if (!is_open()) return 0;
    const auto& all = plan_[find(r)].through;
    const auto at = std::find(all.begin(), all.end(), hot) - all.begin();
    return o.missed.at(static_cast<std::size_t>(at));
  }

  /// Prints, once there is something to print.
  [[gnu::format(printf, 2, 3)]] void print(const char* format, ...) const {
    if (!is_open()) return;
    std::va_list values;
    va_start(values, format);
    std::vprintf(format, values);
    va_end(values);
  }

 private:
  std::vector<run> plan_;
  std::vector<outcome> all_;
  const std::vector<text_result>* texts_ = nullptr;
  outcome nothing_;
};

}  // namespace fidelity
