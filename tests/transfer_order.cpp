// SPDX-License-Identifier: Apache-2.0
/// @file
/// What each wait of a transfer is for: with it no order of execution gives a wrong byte, without it
/// some order does. On the fuzzed simulated backend alone. Include its support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "pulseinfer/transfer.hpp"
#include "support/offload_rig.hpp"
#include "support/unordered_backend.hpp"

namespace {

using backend = test::unordered_backend;
using rig = test::offload_rig<backend>;
using pulseinfer::transfer_way;
using pulseinfer::unit_status;
using pulseinfer::wait_outcome;

constexpr std::uint64_t seeds = 200;
constexpr std::int32_t count = 6;

/// The streams of a rig, in the order in which they are made. Two belong to the setup.
enum stream_number : int {
  engine = 2,
  recall_copy,
  recall_scatter,
  recall_other_scatter,
  recall_pages,
  offload_gather,
  offload_copy
};
constexpr stream_number scatters[] = {recall_scatter, recall_other_scatter};

test::unit_bytes stamp(std::int64_t key, std::int32_t layer, std::int32_t block) {
  return test::stamp(rig::geometry, key, layer, block);
}

/// Units that the engine's kernels would read or write.
class unit_list {
 public:
  explicit unit_list(const backend& machine)
      : machine_(machine),
        bytes_(machine, static_cast<std::size_t>(count * rig::geometry.unit_bytes())) {
    bytes_.fill(std::byte{0});
  }
  unit_list(const unit_list&) = delete;
  unit_list& operator=(const unit_list&) = delete;
  /// A scenario without a wait may end early, and leave copies under way.
  ~unit_list() {
    try {
      if (used_by_) machine_.sync(*used_by_);
    } catch (const std::exception&) {
    }
  }
  void put(std::int32_t i, const test::unit_bytes& unit) {
    std::copy(unit.begin(), unit.end(), at(i));
  }
  [[nodiscard]] bool is(std::int32_t i, const test::unit_bytes& unit) const {
    return std::equal(unit.begin(), unit.end(), at(i));
  }
  /// Enqueues the copy of unit i from or to a page.
  void move(std::int32_t i, const rig& r, std::int32_t layer, std::int64_t page,
            pulseinfer::copy_direction direction, backend::stream_ref stream) {
    used_by_ = stream;
    const auto& layout = r.pages.pool().layout();
    for (int plane = 0; plane < 2; ++plane) {
      void* const here = at(i) + plane * layout.plane[0].strip_bytes;
      void* const there = r.pages.pool().layer(layer).plane[plane] + layout.page_offset(page);
      const bool out = direction == pulseinfer::copy_direction::device_to_host;
      machine_.copy_async(out ? here : there, out ? there : here,
                          static_cast<std::size_t>(layout.plane[0].strip_bytes), direction, stream);
    }
  }

 private:
  [[nodiscard]] std::byte* at(std::int32_t i) const {
    return bytes_.data() + i * rig::geometry.unit_bytes();
  }
  backend machine_;
  test::pinned_array<std::byte, backend> bytes_;
  std::optional<backend::stream_ref> used_by_;
};

/// A recall into pages that the engine has just read, and reads again: true if it saw the old bytes
/// before and the new ones after.
bool recall_between_readers(rig& r, bool engine_waits = true) {
  using enum pulseinfer::copy_direction;
  const std::vector<std::int32_t> blocks = {0, 1, 2, 3, 4, 5};
  const auto id = r.stored(1, blocks);
  rig::targets units;
  for (std::int32_t b = 0; b < count; ++b) {
    r.pages.put(0, 10 + b, stamp(9, 0, b));
    units.push_back({0, b, 10 + b});
  }
  r.pages.upload(r.stream);
  unit_list before(r.machine), after(r.machine);
  for (std::int32_t b = 0; b < count; ++b) before.move(b, r, 0, 10 + b, device_to_host, r.stream);
  auto t = r.recall(0, id, units).value();
  if (engine_waits) t.sync_submitted();
  const wait_outcome outcome = t.enqueue_wait(r.stream);
  if (engine_waits && outcome != wait_outcome::enqueued) return false;
  for (std::int32_t b = 0; b < count; ++b) after.move(b, r, 0, 10 + b, device_to_host, r.stream);
  r.machine.sync(r.stream);
  t.sync();
  bool right = true;
  for (std::int32_t b = 0; b < count; ++b) {
    right = right && before.is(b, stamp(9, 0, b)) && after.is(b, stamp(1, 0, b)) &&
            t.status(static_cast<std::size_t>(b)) == unit_status::moved;
  }
  return right;
}

/// An offload of pages that the engine has just written, and writes again: true if the store has
/// what was there in between.
bool offload_between_writers(rig& r) {
  using enum pulseinfer::copy_direction;
  const auto id = r.store.open_sequence().value();
  unit_list first(r.machine), second(r.machine);
  rig::targets units;
  for (std::int32_t b = 0; b < count; ++b) {
    first.put(b, stamp(2, 1, b));
    second.put(b, stamp(3, 1, b));
    units.push_back({0, b, 30 + b});
  }
  for (std::int32_t b = 0; b < count; ++b) first.move(b, r, 1, 30 + b, host_to_device, r.stream);
  auto t = r.offload(1, id, units).value();
  t.sync_submitted();
  if (t.enqueue_wait(r.stream) != wait_outcome::enqueued) return false;
  for (std::int32_t b = 0; b < count; ++b) second.move(b, r, 1, 30 + b, host_to_device, r.stream);
  r.machine.sync(r.stream);
  t.sync();
  bool right = true;
  for (std::int32_t b = 0; b < count; ++b) {
    right = right && r.in_store(id, 1, b) == stamp(2, 1, b) &&
            t.status(static_cast<std::size_t>(b)) == unit_status::moved;
  }
  return right;
}

/// A recall into freed pages that a late kernel of the engine may still write: true if the recall
/// has the last word. Counts those that had a head.
bool recall_into_freed(rig& r, bool is_written, int& heads) {
  using enum pulseinfer::copy_direction;
  const auto id = r.stored(1, {0, 1, 2, 3, 4, 5});
  rig::targets units;
  unit_list late(r.machine), after(r.machine);
  for (std::int32_t b = 0; b < count; ++b) {
    late.put(b, stamp(9, 0, b));
    units.push_back({0, b, 10 + b});
  }
  for (std::int32_t b = 0; b < count && is_written; ++b) {
    late.move(b, r, 0, 10 + b, host_to_device, r.stream);
  }
  auto t = r.recall(0, id, units).value();
  t.sync_submitted();
  if (t.enqueue_wait(r.stream) != wait_outcome::enqueued) return false;
  for (std::int32_t b = 0; b < count; ++b) after.move(b, r, 0, 10 + b, device_to_host, r.stream);
  r.machine.sync(r.stream);
  t.sync();
  heads += t.report().head_units > 0 ? 1 : 0;
  bool right = true;
  for (std::int32_t b = 0; b < count; ++b) right = right && after.is(b, stamp(1, 0, b));
  return right;
}
bool recall_over_writers(rig& r) {
  int heads = 0;
  return recall_into_freed(r, true, heads);
}

/// Both layers into the same pages, and a reader of whole pages: true if it saw both. It waits for
/// the layers of which it knows.
bool read_whole_pages(rig& r, int layers_waited_for) {
  using enum pulseinfer::copy_direction;
  const auto id = r.stored(1, {0, 1, 2, 3, 4, 5});
  rig::targets units;
  for (std::int32_t b = 0; b < count; ++b) units.push_back({0, b, 10 + b});
  std::vector<rig::ticket> tickets;
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    tickets.push_back(r.recall(layer, id, units).value());
  }
  for (int i = 0; i < layers_waited_for; ++i) {
    auto& t = tickets[static_cast<std::size_t>(i)];
    t.sync_submitted();
    if (t.enqueue_wait(r.stream) != wait_outcome::enqueued) return false;
  }
  unit_list seen[2] = {unit_list(r.machine), unit_list(r.machine)};
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    for (std::int32_t b = 0; b < count; ++b) {
      seen[layer].move(b, r, layer, 10 + b, device_to_host, r.stream);
    }
  }
  r.machine.sync(r.stream);
  for (auto& t : tickets) t.sync();
  bool right = true;
  for (std::int32_t layer = 0; layer < 2; ++layer) {
    for (std::int32_t b = 0; b < count; ++b) {
      right = right && seen[layer].is(b, stamp(1, layer, b));
    }
  }
  return right;
}

/// An offload of pages that a recall has just been asked to fill: true if the store gets what the
/// recall brought. The engine orders the two by the ticket, as it would a kernel of its own.
bool offload_of_onboarding(rig& r, bool engine_waits) {
  const auto id = r.stored(1, {0, 1, 2, 3, 4, 5});
  const auto copy = r.store.open_sequence().value();
  rig::targets units;
  for (std::int32_t b = 0; b < count; ++b) units.push_back({0, b, 10 + b});
  auto in = r.recall(0, id, units).value();
  in.sync_submitted();
  if (engine_waits && in.enqueue_wait(r.stream) != wait_outcome::enqueued) return false;
  auto out = r.offload(0, copy, units).value();
  out.sync();
  in.sync();
  bool right = true;
  for (std::int32_t b = 0; b < count; ++b) {
    right = right && r.in_store(copy, 0, b) == stamp(1, 0, b);
  }
  return right;
}

/// A request is preempted while its recall is under way, and its pages go to another use. True if
/// what the engine wrote there then stays. `obeys`: it asks until the pages are given back.
bool reuse_of_preempted_pages(rig& r, bool obeys) {
  using enum pulseinfer::copy_direction;
  const auto id = r.stored(1, {0, 1, 2, 3, 4, 5});
  r.lend(0, 50, 6);
  const auto step = r.resolve(0, {0}, {{0, 2, 3, 5}});
  if (!step) return false;
  auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
  t.sync_submitted();
  t.cancel();  // too late for what is in the streams
  auto given_back = r.hot.try_take_back(0, r.stream);
  if (obeys) {
    t.sync();  // what the cancel came too late for is through
    if (step->is_open()) r.hot.discard(*step, r.rows_of({0}), r.stream);
    given_back = r.hot.try_take_back(0, r.stream);
    if (given_back != pulseinfer::take_back_outcome::taken) return false;
  }
  unit_list mine(r.machine), seen(r.machine);
  for (std::int32_t b = 0; b < count; ++b) {
    mine.put(b, stamp(7, 0, b));
    mine.move(b, r, 0, 50 + b, host_to_device, r.stream);
  }
  r.machine.sync(r.stream);
  t.sync();
  for (std::int32_t b = 0; b < count; ++b) seen.move(b, r, 0, 50 + b, device_to_host, r.stream);
  r.machine.sync(r.stream);
  bool right = true;
  for (std::int32_t b = 0; b < count; ++b) right = right && seen.is(b, stamp(7, 0, b));
  return right;
}

/// Two steps: true if all that they missed is there.
bool recall_of_steps(rig& r) {
  const auto id = r.stored(1, {0, 1, 2, 3, 4, 5});
  r.lend(0, 50, 6);
  unit_list other(r.machine);
  for (const std::vector<std::int32_t>& chosen :
       std::vector<std::vector<std::int32_t>>{{0, 2, 4}, {0, 1, 5}}) {
    const pulseinfer::selection selected = r.choice({chosen});
    const pulseinfer::batch_view batch = r.rows_of({0});
    // The engine has other work, so that the step is resolved late.
    for (std::int32_t b = 0; b < count; ++b) {
      other.move(b, r, 1, b, pulseinfer::copy_direction::device_to_host, r.stream);
    }
    const auto step = r.hot.resolve(0, batch, selected, r.stream);
    if (!step) return false;
    auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
    t.sync_submitted();
    if (t.enqueue_wait(r.stream) != wait_outcome::enqueued) return false;
    r.pages.download(r.stream);
    t.sync();
    const auto pages = r.pages_of(*step)[0];
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      if (r.pages.get(0, pages[i]) != stamp(1, 0, chosen[i])) return false;
    }
  }
  return true;
}

/// Runs a scenario on the machine of a seed, without the waits that `drop` names.
template <class Scenario>
bool is_right(std::uint64_t seed, backend::drop_rule drop, Scenario scenario, int& dropped,
              transfer_way way = transfer_way::staged, std::int32_t head_copies = 0) {
  backend machine(pulseinfer::fuzzed{.seed = seed}, std::move(drop));
  bool right = false;
  {
    rig r(machine, {.chunk_units = 1, .way = way, .head_copies = head_copies});
    REQUIRE(machine.streams() == offload_copy + 1);
    try {
      right = scenario(r);
    } catch (const std::exception&) {
      right = false;
    }
  }
  dropped += machine.dropped();
  return right;
}

/// The wait is put in, and some seed shows it.
template <class Scenario>
void is_needed(Scenario scenario, int from, int to, bool by_costly_task = false,
               transfer_way way = transfer_way::staged) {
  const auto drop = [=](const test::wait& w) {
    return w.from == from && w.to == to &&
           (to != test::wait::task || (w.bytes > 0) == by_costly_task);
  };
  std::uint64_t seed = 1;
  int dropped = 0;
  while (seed <= seeds && is_right(seed, drop, scenario, dropped, way)) ++seed;
  CHECK(dropped > 0);
  CHECK_MESSAGE(seed <= seeds, "nothing is wrong without the wait, on any seed");
}

}  // namespace

TEST_CASE("order: with all waits no seed gives a wrong byte") {
  int dropped = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    for (const transfer_way way : test::all_ways) {
      CAPTURE(static_cast<int>(way));
      CHECK(is_right(
          seed, {}, [](rig& r) { return recall_between_readers(r); }, dropped, way));
    }
    CHECK(is_right(
        seed, {}, [](rig& r) { return offload_between_writers(r); }, dropped));
    CHECK(is_right(
        seed, {}, [](rig& r) { return recall_of_steps(r); }, dropped));
  }
  CHECK(dropped == 0);
}

TEST_CASE("fault 33: a recall's head does not go before the pages' readers have gone") {
  int dropped = 0;
  int heads = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    CHECK(is_right(
        seed, {}, [](rig& r) { return recall_between_readers(r); }, dropped, transfer_way::staged,
        16));
    CHECK(is_right(
        seed, {}, [](rig& r) { return recall_over_writers(r); }, dropped, transfer_way::staged,
        16));
    CHECK(is_right(
        seed, {}, [&](rig& r) { return recall_into_freed(r, false, heads); }, dropped,
        transfer_way::staged, 16));
  }
  CHECK(heads > 0);
}

TEST_CASE("order: the scatter waits for the DMA") {
  for (const stream_number scatter : scatters) {
    CAPTURE(static_cast<int>(scatter));
    is_needed([](rig& r) { return recall_between_readers(r); }, recall_copy, scatter);
  }
}

TEST_CASE("fault 33: the scatter waits for the pages' readers") {
  for (const stream_number scatter : scatters) {
    CAPTURE(static_cast<int>(scatter));
    is_needed([](rig& r) { return recall_between_readers(r); }, engine, scatter);
  }
}

TEST_CASE("order: who waits for the pages waits for the scatters of both streams") {
  for (const stream_number scatter : scatters) {
    CAPTURE(static_cast<int>(scatter));
    is_needed([](rig& r) { return recall_between_readers(r); }, scatter, recall_pages);
  }
}

TEST_CASE("fault 33: copies and kernels straight into the pages wait for the pages' readers") {
  for (const transfer_way way : test::all_ways) {
    CAPTURE(static_cast<int>(way));
    const bool staged = way == transfer_way::staged || way == transfer_way::automatic;
    is_needed([](rig& r) { return recall_between_readers(r); }, engine,
              staged ? recall_scatter : recall_pages, false, way);
  }
}

TEST_CASE("faults 30 and 31: the next gather waits until the chunk is drained") {
  for (const stream_number scatter : scatters) {
    CAPTURE(static_cast<int>(scatter));
    is_needed([](rig& r) { return recall_between_readers(r); }, scatter, test::wait::task, true);
  }
}

TEST_CASE("order: the engine waits for a recall by its ticket") {
  is_needed([](rig& r) { return recall_between_readers(r); }, recall_pages, engine);
}

TEST_CASE("order: a recall has arrived only when its last scatter is done") {
  is_needed([](rig& r) { return recall_between_readers(r); }, recall_pages, test::wait::task);
}

TEST_CASE("order: a step's misses are read only when the step is resolved") {
  is_needed([](rig& r) { return recall_of_steps(r); }, engine, test::wait::task);
}

TEST_CASE("fault 32: the gather of an offload waits for the pages' writers") {
  is_needed([](rig& r) { return offload_between_writers(r); }, engine, offload_gather);
}

TEST_CASE("order: the DMA of an offload waits for its gather") {
  is_needed([](rig& r) { return offload_between_writers(r); }, offload_gather, offload_copy);
}

TEST_CASE("order: the store waits for the DMA") {
  is_needed([](rig& r) { return offload_between_writers(r); }, offload_copy, test::wait::task,
            true);
}

TEST_CASE("order: the engine waits until its pages have been read") {
  is_needed([](rig& r) { return offload_between_writers(r); }, offload_gather, engine);
}

TEST_CASE("order: an engine that goes on after not_submitted reads too early") {
  int dropped = 0;
  std::uint64_t wrong = 0;
  for (std::uint64_t seed = 1; seed <= seeds && wrong == 0; ++seed) {
    if (!is_right(
            seed, {}, [](rig& r) { return recall_between_readers(r, false); }, dropped)) {
      wrong = seed;
    }
  }
  CHECK(wrong > 0);
}

TEST_CASE("fault 39: a recall into freed pages comes behind the kernels that still write them") {
  is_needed([](rig& r) { return recall_over_writers(r); }, engine, recall_scatter);
  int dropped = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    for (const transfer_way way : test::all_ways) {
      CHECK(is_right(
          seed, {}, [](rig& r) { return recall_over_writers(r); }, dropped, way));
    }
  }
}

TEST_CASE("fault 38: who reads whole pages waits for every layer") {
  int dropped = 0;
  std::uint64_t wrong = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    CHECK(is_right(
        seed, {}, [](rig& r) { return read_whole_pages(r, 2); }, dropped));
    if (!is_right(
            seed, {}, [](rig& r) { return read_whole_pages(r, 1); }, dropped)) {
      ++wrong;
    }
  }
  CHECK(wrong > 0);
}

TEST_CASE("fault 35: what is offloaded from pages that are being filled is what fills them") {
  int dropped = 0;
  std::uint64_t wrong = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    CHECK(is_right(
        seed, {}, [](rig& r) { return offload_of_onboarding(r, true); }, dropped));
    if (!is_right(
            seed, {}, [](rig& r) { return offload_of_onboarding(r, false); }, dropped)) {
      ++wrong;
    }
  }
  CHECK(wrong > 0);
}

TEST_CASE("fault 35: of two units that a slot gets one after the other it holds the second") {
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    backend machine(pulseinfer::fuzzed{.seed = seed}, {});
    rig r(machine, {.capacity_units = 1, .chunk_units = 1});
    std::vector<rig::ticket> tickets;
    for (std::int32_t b = 0; b < 2; ++b) r.pages.put(0, b, stamp(b + 1, 0, 0));
    r.pages.upload(r.stream);
    const auto first = r.store.open_sequence().value();
    tickets.push_back(r.offload(0, first, {{0, 0, 0}}).value());
    (void)r.store.close_sequence(first);  // its slot is still being written
    const auto second = r.store.open_sequence().value();
    {
      auto refused = r.offload(0, second, {{0, 0, 1}}).value();
      refused.sync();
      // Only when the first transfer has let go of the slot is it the second one's.
      CHECK((refused.status(0) == unit_status::refused || tickets.front().is_final()));
    }
    tickets.front().sync();
    auto again = r.offload(0, second, {{0, 0, 1}}).value();
    again.sync();
    CHECK(r.in_store(second, 0, 0) == stamp(2, 0, 0));
  }
}

TEST_CASE("order: pages of a preempted request are given back when nothing can reach them") {
  int dropped = 0;
  std::uint64_t wrong = 0;
  for (std::uint64_t seed = 1; seed <= seeds; ++seed) {
    CAPTURE(seed);
    CHECK(is_right(
        seed, {}, [](rig& r) { return reuse_of_preempted_pages(r, true); }, dropped));
    if (!is_right(
            seed, {}, [](rig& r) { return reuse_of_preempted_pages(r, false); }, dropped)) {
      ++wrong;
    }
  }
  CHECK(wrong > 0);
}
