// SPDX-License-Identifier: Apache-2.0
/// @file
/// The rig with a puller, and leases whose views the device reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pulseinfer/pull.hpp"
#include "support/offload_rig.hpp"

namespace test {

template <class Backend>
class pull_rig : public offload_rig<Backend> {
 public:
  using rig = offload_rig<Backend>;
  static constexpr std::int32_t max_rows = 3;

  explicit pull_rig(const Backend& with, const rig_options& o = {}, int max_ctas = 2)
      : rig(with, o),
        puller(with, rig::geometry, this->pages.pool(),
               {.max_rows = max_rows, .budget_blocks = o.budget, .max_ctas = max_ctas}),
        views_(with, max_rows) {}

  /// Leases the sequences of the rows, and gives their views; the last leases end. Nothing that uses
  /// them is under way.
  const pulseinfer::store_view* views(std::int32_t layer,
                                      const std::vector<pulseinfer::sequence_id>& sequences) {
    leases_.clear();
    views_.fill({});
    for (std::size_t row = 0; row < sequences.size(); ++row) {
      if (sequences[row] == pulseinfer::sequence_id{}) continue;
      leases_.push_back(this->store.acquire(sequences[row], layer));
      views_[row] = leases_.back().device_view();
    }
    return views_.device_data();
  }
  void end_leases() { leases_.clear(); }

  /// Resolves and pulls; returns when it is done.
  std::optional<pulseinfer::resolved_step> pull(
      std::int32_t layer, const std::vector<std::int32_t>& requests,
      const std::vector<pulseinfer::sequence_id>& sequences,
      const std::vector<std::vector<std::int32_t>>& chosen) {
    const auto step = this->resolve(layer, requests, chosen);
    if (!step) return step;
    puller.pull(this->hot, *step, this->rows_of(requests).device_requests, views(layer, sequences),
                this->stream);
    this->machine.sync(this->stream);
    return step;
  }

  /// True if the pages of a row hold what it chose, as stamped with `key`.
  bool holds(std::int32_t layer, const std::vector<std::int32_t>& page_table, std::int64_t key,
             const std::vector<std::int32_t>& chosen) {
    this->pages.download(this->stream);
    bool right = true;
    for (std::size_t i = 0; i < page_table.size(); ++i) {
      if (i >= chosen.size()) {
        right = right && page_table[i] == -1;
      } else {
        right =
            right && page_table[i] >= 0 &&
            this->pages.get(layer, page_table[i]) == stamp(rig::geometry, key, layer, chosen[i]);
      }
    }
    return right;
  }

  pulseinfer::unit_puller<Backend> puller;

 private:
  pinned_array<pulseinfer::store_view, Backend> views_;
  std::vector<typename pulseinfer::block_store<Backend>::lease> leases_;
};

}  // namespace test
