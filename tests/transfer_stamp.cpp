// SPDX-License-Identifier: Apache-2.0
/// @file
/// Fault 103: no unit is ever another's. Every unit carries key, layer, block and version, and every
/// recall is compared with what the store may hold, under evictions, delays, cancels and failures.
///
/// Several transfers are under way at a time. A block is written again and again, each time as a
/// new version; it is stored anew once it was evicted. Include the backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/failing_backend.hpp"
#include "support/offload_rig.hpp"
#include "support/rounds.hpp"

namespace {

using plain = test::backend;
using backend = test::failing_backend<plain>;
using rig = test::offload_rig<backend>;
using pulseinfer::device_error;
using pulseinfer::unit_status;
using test::job;

/// Takes a moment, on a machine of threads.
struct delay {
  std::int64_t ns;
  void operator()(std::int64_t, std::int64_t) const {
    if constexpr (test::takes_threads<plain>) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::nanoseconds(ns);
      while (std::chrono::steady_clock::now() < until) std::this_thread::yield();
    }
  }
};
struct broken_kernel {
  void operator()(std::int64_t, std::int64_t) const {
    throw device_error("broken_kernel: failed on purpose");
  }
};

/// The versions of one block that the store may hold.
struct block_versions {
  std::int64_t issued = 0;
  std::int64_t stored = 0;            ///< the last that an offload said it had moved; 0: none
  std::vector<std::int64_t> pending;  ///< of offloads that have not been looked at

  [[nodiscard]] std::vector<std::int64_t> possible() const {
    std::vector<std::int64_t> all = pending;
    if (stored > 0) all.push_back(stored);
    return all;
  }
};

/// Every other seed has plans, with heads and without in turn; the others have heads by themselves.
pulseinfer::chunk_plans plans_of(std::uint64_t seed) {
  pulseinfer::chunk_plans plans;
  if (seed % 2 == 1) return plans;
  plans.add({.max_units = 5, .head = seed % 4 == 2 ? 0.4 : 0, .chunks = {0.3}, .parts = 2});
  plans.add({.max_units = 9, .head = seed % 4 == 2 ? 0.2 : 0, .chunks = {0.1, 0.5}});
  return plans;
}

/// One rig, and a random program on it.
class stamp_run {
 public:
  static constexpr std::int32_t blocks = 24;
  static constexpr std::int32_t pages = 160;

  struct counts {
    std::int64_t operations = 0, compared = 0, wrong = 0, missing = 0, cancelled = 0, failed = 0,
                 refused = 0, heads = 0;
  };

  stamp_run(const plain& machine, pulseinfer::transfer_way way, std::uint64_t seed)
      : draw_(seed),
        machine_(machine),
        r_(machine_, {.pages = pages,
                      .capacity_units = 60,  // of up to 5 x 2 x 24
                      .chunk_units = 3,
                      .staging_chunks = 4,
                      .chunks_in_flight = 3,
                      .transfers_in_flight = 4,
                      .way = way,
                      .head_copies = seed % 2 == 1 ? 8 : 0,
                      .plans = plans_of(seed)}) {
    for (std::int32_t page = 0; page < pages; ++page) free_pages_.push_back(page);
  }

  void go_on(std::int64_t operations) {
    for (std::int64_t i = 0; i < operations; ++i) {
      ++seen.operations;
      step();
    }
    settle();
    CHECK(rig::at_rest(r_.store.counts()));
    CHECK(free_pages_.size() == pages);
  }

  counts seen;

 private:
  struct sequence {
    pulseinfer::sequence_id id;
    std::int64_t key;
    std::array<std::array<block_versions, blocks>, 2> versions;
  };
  struct moving {
    std::optional<rig::ticket> ticket;
    std::shared_ptr<sequence> of;
    bool is_recall;
    std::int32_t layer;
    rig::targets units;
    std::vector<std::int64_t> versions;               ///< offload: what was issued
    std::vector<std::vector<std::int64_t>> possible;  ///< recall: at its call
  };

  void step() {
    const std::uint64_t choice = draw_.below(100);
    if (is_armed_ && machine_.has_struck()) settle();
    if (open_.empty() || (choice < 4 && open_.size() < 5)) {
      open();
    } else if (choice < 6) {
      close();
    } else if (choice < 46) {
      move(false);
    } else if (choice < 88) {
      move(true);
    } else if (choice < 93) {
      if (!under_way_.empty()) under_way_[draw_.below(under_way_.size())].ticket->cancel();
    } else if (choice < 98) {
      retire();
    } else {
      settle();
      arm();
    }
  }

  void open() {
    const auto id = r_.store.open_sequence();
    if (!id) return;  // some that were closed are still in use
    auto added = std::make_shared<sequence>();
    added->id = *id;
    added->key = next_key_++;
    open_.push_back(std::move(added));
  }
  void close() {
    const std::size_t which = draw_.below(open_.size());
    (void)r_.store.close_sequence(open_[which]->id);
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(which));
  }

  [[nodiscard]] test::unit_bytes stamp(const sequence& of, std::int32_t layer, std::int32_t block,
                                       std::int64_t version) const {
    return test::stamp(rig::geometry, of.key, layer, block, version);
  }

  void move(bool is_recall) {
    const auto count = static_cast<std::int32_t>(1 + draw_.below(10));
    while (static_cast<std::int32_t>(free_pages_.size()) < count || under_way_.size() >= 4)
      retire();
    moving m{.ticket = {},
             .of = open_[draw_.below(open_.size())],
             .is_recall = is_recall,
             .layer = static_cast<std::int32_t>(draw_.below(2)),
             .units = {},
             .versions = {},
             .possible = {}};
    const auto first = static_cast<std::int32_t>(draw_.below(blocks));
    for (std::int32_t i = 0; i < count; ++i) {
      const std::int32_t block = (first + i * 5) % blocks;  // distinct: 5 and 24 share no factor
      const std::int32_t page = free_pages_.front();
      free_pages_.pop_front();
      m.units.push_back({0, block, page});
      block_versions& v =
          m.of->versions[static_cast<std::size_t>(m.layer)][static_cast<std::size_t>(block)];
      if (is_recall) {
        m.possible.push_back(v.possible());
        continue;
      }
      m.versions.push_back(++v.issued);
      v.pending.push_back(v.issued);
      r_.pages.put(m.layer, page, stamp(*m.of, m.layer, block, v.issued));
    }
    try {
      if (draw_.below(3) == 0) {
        r_.machine.for_each({1, 1}, {}, draw_.below(1 << 20),
                            delay{static_cast<std::int64_t>(draw_.below(40'000))}, r_.stream);
      }
      if (!is_recall) {
        for (const auto& unit : m.units)
          r_.pages.write_page(m.layer, index_of(unit.page), r_.stream);
      }
      m.ticket = is_recall ? r_.recall(m.layer, m.of->id, m.units)
                           : r_.offload(m.layer, m.of->id, m.units);
    } catch (const device_error&) {
      CHECK(is_armed_);
    }
    under_way_.push_back(std::move(m));
    if (!under_way_.back().ticket) settle();  // nothing began: its pages go back with the others
  }

  /// Waits for the oldest transfer and looks at what became of it.
  void retire() {
    if (under_way_.empty()) return;
    moving m = std::move(under_way_.front());
    under_way_.pop_front();
    if (m.ticket) {
      try {
        m.ticket->sync();
      } catch (const device_error&) {
        CHECK(is_armed_);
        ++seen.failed;
      }
      CHECK(m.ticket->is_final());
      seen.heads += m.ticket->report().head_units > 0 ? 1 : 0;
    }
    for (std::size_t i = 0; i < m.units.size(); ++i) look_at(m, i);
    if (m.is_recall) compare(m);
    for (const auto& unit : m.units) free_pages_.push_back(index_of(unit.page));
  }

  void look_at(moving& m, std::size_t i) {
    const unit_status status = m.ticket && i < static_cast<std::size_t>(m.ticket->report().units)
                                   ? m.ticket->status(i)
                                   : unit_status::failed;
    CHECK(status != unit_status::pending);
    seen.missing += status == unit_status::missing ? 1 : 0;
    seen.cancelled += status == unit_status::cancelled ? 1 : 0;
    seen.refused += status == unit_status::refused ? 1 : 0;
    if (m.is_recall) return;
    block_versions& v = m.of->versions[static_cast<std::size_t>(m.layer)]
                                      [static_cast<std::size_t>(m.units[i].block)];
    std::erase(v.pending, m.versions[i]);
    if (status == unit_status::moved) v.stored = m.versions[i];
  }

  void compare(const moving& m) {
    if (!m.ticket) return;
    std::vector<std::size_t> moved;
    for (std::size_t i = 0; i < m.units.size(); ++i) {
      if (i < static_cast<std::size_t>(m.ticket->report().units) &&
          m.ticket->status(i) == unit_status::moved) {
        moved.push_back(i);
      }
    }
    plain quiet = machine_;  // what is compared is not made to fail
    auto stream = quiet.make_stream(pulseinfer::stream_priority::normal);
    for (const std::size_t i : moved) {
      for (int plane = 0; plane < 2; ++plane) read(m, i, plane, quiet, stream);
    }
    quiet.sync(stream);
    for (const std::size_t i : moved) {
      const auto& unit = m.units[i];
      std::vector<std::int64_t> possible = m.possible[i];
      for (const std::int64_t version : m.of->versions[static_cast<std::size_t>(
               m.layer)][static_cast<std::size_t>(index_of(unit.block))]
                                            .possible()) {
        possible.push_back(version);
      }
      const test::unit_bytes got = r_.pages.get(m.layer, index_of(unit.page));
      const bool right = std::any_of(possible.begin(), possible.end(), [&](std::int64_t version) {
        return got == stamp(*m.of, m.layer, index_of(unit.block), version);
      });
      ++seen.compared;
      seen.wrong += right ? 0 : 1;
    }
  }
  void read(const moving& m, std::size_t i, int plane, plain& quiet, plain::stream& stream) {
    const auto& pool = r_.pages.pool();
    const std::int64_t at = pool.layout().page_offset(index_of(m.units[i].page));
    quiet.copy_async(r_.pages.host_bytes(m.layer, plane, index_of(m.units[i].page)),
                     pool.layer(m.layer).plane[plane] + at,
                     static_cast<std::size_t>(pool.layout().plane[plane].strip_bytes),
                     pulseinfer::copy_direction::device_to_host, stream);
  }

  /// Looks at all transfers under way, and forgets a failure.
  void settle() {
    while (!under_way_.empty()) retire();
    machine_.arm(job::copy, 0, {});
    is_armed_ = false;
    try {
      r_.machine.sync(r_.stream);
    } catch (const device_error&) {
    }
    CHECK(rig::at_rest(r_.store.counts()));
  }

  /// One of the next calls fails, or breaks the stream that it is for.
  void arm() {
    const auto which = test::all_jobs[draw_.below(std::size(test::all_jobs))].first;
    const auto nth = static_cast<int>(1 + draw_.below(40));
    is_armed_ = true;
    if (draw_.below(2) == 0) return machine_.arm_throw(which, nth);
    plain quiet = machine_;
    machine_.arm(which, nth, [quiet](const backend::stream_ref* stream) mutable {
      if (stream != nullptr) quiet.for_each({1, 1}, {}, 0, broken_kernel{}, *stream);
    });
  }

  pulseinfer::detail::random_source draw_;
  backend machine_;
  rig r_;
  std::vector<std::shared_ptr<sequence>> open_;
  std::deque<moving> under_way_;
  std::deque<std::int32_t> free_pages_;
  std::int64_t next_key_ = 0;
  bool is_armed_ = false;
};

}  // namespace

TEST_CASE("fault 103: no recall brings a unit that is another's, or an older one, or half of one") {
  const std::int64_t operations = test::rounds<std::int64_t>(10'000, 1'000'000);
  constexpr std::int64_t a_run = 1'000;
  stamp_run::counts all;
  std::uint64_t seed = 0;
  while (all.operations < operations) {
    test::each_backend([&](const plain& machine) {
      if (all.operations >= operations) return;
      ++seed;
      CAPTURE(seed);
      const auto way = test::all_ways[(seed - 1) % std::size(test::all_ways)];
      CAPTURE(static_cast<int>(way));
      stamp_run run(machine, way, seed);
      run.go_on(a_run);
      CHECK(run.seen.wrong == 0);
      all.operations += run.seen.operations;
      all.compared += run.seen.compared;
      all.missing += run.seen.missing;
      all.cancelled += run.seen.cancelled;
      all.failed += run.seen.failed;
      all.refused += run.seen.refused;
      all.heads += run.seen.heads;
    });
  }
  MESSAGE(all.operations, " operations, ", all.compared, " units compared, ", all.missing,
          " missing, ", all.cancelled, " cancelled, ", all.refused, " refused, ", all.failed,
          " transfers failed, ", all.heads, " heads");
  // All of it happens.
  CHECK(all.compared > operations / 10);
  CHECK(all.missing > 0);
  CHECK(all.cancelled > 0);
  CHECK(all.failed > 0);
  CHECK(all.heads > 0);
}
