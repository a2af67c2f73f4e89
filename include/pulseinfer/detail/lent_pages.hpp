// SPDX-License-Identifier: Apache-2.0
/// @file
/// The host's book of the pages that an engine has lent to requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

class lent_pages {
 public:
  /// @param pool_pages  pages of the pool
  /// @param least       pages a request, and at most
  lent_pages(std::int32_t requests, std::int64_t pool_pages, std::int32_t least, std::int32_t most)
      : pool_pages_(pool_pages),
        least_(least),
        most_(most),
        pages_(static_cast<std::size_t>(requests)) {}

  /// @throws std::out_of_range  on a request out of range; so do the others
  [[nodiscard]] const std::vector<std::int32_t>& of(std::int32_t request) const {
    expects<std::out_of_range>(request >= 0 && static_cast<std::size_t>(request) < pages_.size(),
                               "hot_buffer: request is ", request, ", expected 0 to ",
                               pages_.size() - 1);
    return pages_[static_cast<std::size_t>(request)];
  }
  /// @throws std::invalid_argument, std::out_of_range  on pages that cannot be lent; nothing changes
  void lend(std::int32_t request, std::span<const std::int32_t> pages) {
    const std::vector<std::int32_t>& held = of(request);
    expects(held.empty(), "hot_buffer: request ", request, " holds ", held.size(),
            " pages already; take them back first");
    expects(pages.size() >= static_cast<std::size_t>(least_) &&
                pages.size() <= static_cast<std::size_t>(most_),
            "hot_buffer: ", pages.size(), " pages lent, expected ", least_, " (the budget) to ",
            most_);
    std::vector<bool> taken(static_cast<std::size_t>(pool_pages_), false);
    for (const auto& other : pages_) {
      for (const std::int32_t page : other) taken[static_cast<std::size_t>(page)] = true;
    }
    for (const std::int32_t page : pages) {
      expects<std::out_of_range>(page >= 0 && page < pool_pages_, "hot_buffer: page is ", page,
                                 ", the pool has pages 0 to ", pool_pages_ - 1);
      expects(!taken[static_cast<std::size_t>(page)], "hot_buffer: page ", page, " is lent twice");
      taken[static_cast<std::size_t>(page)] = true;
    }
    pages_[static_cast<std::size_t>(request)].assign(pages.begin(), pages.end());
  }
  void take_back(std::int32_t request) {
    (void)of(request);
    pages_[static_cast<std::size_t>(request)].clear();
  }

 private:
  std::int64_t pool_pages_;
  std::int32_t least_;
  std::int32_t most_;
  std::vector<std::vector<std::int32_t>> pages_;  ///< [requests]
};

}  // namespace pulseinfer::detail
