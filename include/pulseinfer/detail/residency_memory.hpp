// SPDX-License-Identifier: Apache-2.0
/// @file
/// The memory of a hot buffer's tables.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pulseinfer/buffer.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/config.hpp"
#include "pulseinfer/hot_buffer_types.hpp"
#include "pulseinfer/residency.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

template <backend Backend>
class residency_memory {
 public:
  using stream_ref = typename Backend::stream_ref;

  /// Blocks until the tables are initialised.
  /// @throws out_of_memory  when they cannot be had
  residency_memory(Backend backend, std::int32_t layers, const hot_buffer_options& options)
      : backend_(backend),
        layers_(layers),
        slots_(options.pages_per_request),
        max_blocks_(options.max_blocks),
        requests_(static_cast<std::size_t>(options.max_requests)),
        usable_(options.pages_of_layer),
        block_in_(backend, all() * as_size(slots_)),
        rank_(backend, all() * as_size(slots_)),
        last_use_(backend, options.predicts ? all() * as_size(slots_) : 0),
        clocks_(backend, 2 * all()),
        slot_of_(backend, all() * as_size(max_blocks_)),
        page_in_(backend, requests_ * as_size(slots_)),
        lent_(backend, requests_),
        totals_(backend, all()),
        mirrors_(backend, all()) {
    std::fill(mirrors_.span().begin(), mirrors_.span().end(), residency_counts{});
    auto setup = backend_.make_stream(stream_priority::normal);
    fill(lent_.data(), 1, 0, static_cast<std::int64_t>(lent_.size()), 0, setup);
    fill(clocks_.data(), 1, 0, static_cast<std::int64_t>(clocks_.size()), 0, setup);
    backend_.for_each({1, static_cast<std::int64_t>(totals_.size())}, {}, totals_.bytes(),
                      clear_totals{totals_.data()}, setup);
    backend_.sync(setup);
  }

  [[nodiscard]] residency_tables tables(std::int32_t layer) const {
    const std::size_t first = as_size(layer) * requests_;
    const std::size_t slots = first * as_size(slots_);
    return {.block_in = block_in_.data() + slots,
            .rank = rank_.data() + slots,
            .clock = clocks_.data() + first,
            .reach = clocks_.data() + all() + first,
            .last_use = last_use_.size() == 0 ? nullptr : last_use_.data() + slots,
            .totals = totals_.data() + first,
            .mirrors = mirrors_.device_data() + first,
            .slot_of = slot_of_.data() + first * as_size(max_blocks_),
            .page_in = page_in_.data(),
            .lent = lent_.data(),
            .slots = slots_,
            .usable = usable_.empty() ? slots_ : usable_[as_size(layer)],
            .max_blocks = max_blocks_};
  }

  /// Brings the device's tables of a request to what it holds now, all of it empty.
  void write_lent(std::int32_t request, const std::vector<std::int32_t>& held, stream_ref stream) {
    const auto first = std::int64_t{request} * slots_;
    for (std::size_t start = 0; start < held.size(); start += write_words::capacity) {
      write_words words{page_in_.data() + first + start, {}};
      const std::size_t n = std::min<std::size_t>(held.size() - start, write_words::capacity);
      for (std::size_t i = 0; i < n; ++i) words.values[i] = held[start + i];
      backend_.for_each({1, static_cast<std::int64_t>(n)}, {}, n * 4, words, stream);
    }
    const auto requests = static_cast<std::int64_t>(requests_);
    fill(block_in_.data() + first, layers_, requests * slots_, slots_, -1, stream);
    fill(rank_.data() + first, layers_, requests * slots_, slots_, 0, stream);
    if (last_use_.size() > 0) {
      fill(last_use_.data() + first, layers_, requests * slots_, slots_, 0, stream);
    }
    fill(slot_of_.data() + request * max_blocks_, layers_, requests * max_blocks_, max_blocks_, -1,
         stream);
    fill(lent_.data() + request, 1, 1, 1, static_cast<std::int32_t>(held.size()), stream);
  }

  /// As far as the device has written them.
  [[nodiscard]] residency_counts counts(std::int32_t layer, std::int32_t request) const noexcept {
    const residency_counts& from = mirrors_.data()[as_size(layer) * requests_ + as_size(request)];
    const auto load = [](const std::int64_t& n) { return __atomic_load_n(&n, __ATOMIC_RELAXED); };
    return {.chosen = load(from.chosen),
            .missed = load(from.missed),
            .brought = load(from.brought),
            .used = load(from.used),
            .wasted = load(from.wasted)};
  }

 private:
  [[nodiscard]] static std::size_t as_size(std::int64_t n) noexcept {
    return static_cast<std::size_t>(n);
  }
  [[nodiscard]] std::size_t all() const noexcept { return as_size(layers_) * requests_; }
  void fill(std::int32_t* table, std::int64_t rows, std::int64_t stride, std::int64_t words,
            std::int32_t value, stream_ref stream) {
    backend_.for_each({rows, words}, {}, static_cast<std::uint64_t>(rows * words) * 4,
                      fill_words{table, stride, value}, stream);
  }

  Backend backend_;
  std::int32_t layers_;
  std::int64_t slots_;
  std::int64_t max_blocks_;
  std::size_t requests_;
  std::vector<std::int32_t> usable_;                  ///< [layers] or empty
  device_buffer<std::int32_t, Backend> block_in_;     ///< [layers, requests, slots]
  device_buffer<std::int32_t, Backend> rank_;         ///< [layers, requests, slots]
  device_buffer<std::int32_t, Backend> last_use_;     ///< [layers, requests, slots] or empty
  device_buffer<std::int32_t, Backend> clocks_;       ///< clocks, then reaches, [layers, requests]
  device_buffer<std::int32_t, Backend> slot_of_;      ///< [layers, requests, max_blocks]
  device_buffer<std::int32_t, Backend> page_in_;      ///< [requests, slots]
  device_buffer<std::int32_t, Backend> lent_;         ///< [requests]
  device_buffer<residency_totals, Backend> totals_;   ///< [layers, requests]
  pinned_buffer<residency_counts, Backend> mirrors_;  ///< [layers, requests]
};

}  // namespace pulseinfer::detail
