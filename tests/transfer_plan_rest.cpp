// SPDX-License-Identifier: Apache-2.0
/// @file
/// What only a machine with a virtual clock shows of recalls that go by a plan: how they are cut, and
/// what may be under way beside them. Include the simulated backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "pulseinfer/chunk_plan.hpp"
#include "pulseinfer/chunk_tuning.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/offload_rig.hpp"

namespace {

using pulseinfer::chunk_plan;
using pulseinfer::chunk_plans;
using pulseinfer::copy_direction;
using test::blocks;
using test::units_of;
using sizes = std::vector<std::size_t>;

/// A machine that notes the single copies to the device, as chunks go; heads go in batches.
class noting_machine : public pulseinfer::simulated_backend {
 public:
  explicit noting_machine(pulseinfer::timed how = {}) : pulseinfer::simulated_backend(how) {}
  void copy_async(void* to, const void* from, std::size_t bytes, copy_direction direction,
                  stream_ref s) {
    if (direction == copy_direction::host_to_device) noted_->push_back(bytes);
    pulseinfer::simulated_backend::copy_async(to, from, bytes, direction, s);
  }
  /// What has been noted since the last call.
  [[nodiscard]] sizes taken() { return std::exchange(*noted_, {}); }
  /// Copies that the link has had.
  [[nodiscard]] std::uint64_t copies() const { return statistics().host_to_device.operations; }

 private:
  std::shared_ptr<sizes> noted_ = std::make_shared<sizes>();
};

using rig = test::offload_rig<noting_machine>;
constexpr auto unit_bytes = static_cast<std::size_t>(rig::geometry.unit_bytes());
constexpr std::uint64_t strips = 2;  // of a unit in this pool

chunk_plans plans_of(std::initializer_list<chunk_plan> all) {
  chunk_plans plans;
  for (const chunk_plan& p : all) plans.add(p);
  return plans;
}

/// A chunk's copy takes its units and the page ids before them, no more.
std::size_t bytes_of_copy(std::size_t units) {
  return (units * 4 + 15) / 16 * 16 + units * unit_bytes;
}
std::size_t units_of_copy(std::size_t bytes) {
  std::size_t units = 0;
  while (bytes_of_copy(units) < bytes) ++units;
  CHECK(bytes_of_copy(units) == bytes);
  return units;
}

/// How a recall of 40 units was cut.
struct seen {
  std::int64_t head = 0;
  sizes chunks;
  std::uint64_t copies = 0;
};
seen recall_40(const chunk_plan& plan, std::int64_t chunk_units, std::int64_t staging_chunks) {
  noting_machine machine;
  rig r(machine,
        {.chunk_units = chunk_units, .staging_chunks = staging_chunks, .plans = plans_of({plan})});
  const auto id = r.stored(1, blocks(40));
  r.machine.sync(r.stream);
  (void)machine.taken();
  const std::uint64_t before = machine.copies();
  auto t = r.recall(1, id, units_of(40)).value();
  t.sync();
  CHECK(t.report().moved == 40);
  seen found{t.report().head_units, machine.taken(), machine.copies() - before};
  for (std::size_t& bytes : found.chunks) bytes = units_of_copy(bytes);
  return found;
}

}  // namespace

TEST_CASE("plan: a recall is cut as its plan says") {
  const auto is_cut = [](const chunk_plan& plan, std::int64_t chunk_units, std::int64_t head,
                         sizes chunks) {
    for (const std::int64_t staging_chunks : {2, 3, 8}) {  // it may have to wait for them
      CAPTURE(staging_chunks);
      seen found = recall_40(plan, chunk_units, staging_chunks);
      CHECK(found.head == head);
      CHECK(found.copies == strips * static_cast<std::uint64_t>(head) + chunks.size());
      if (staging_chunks > 2) {  // of several that are gathered a small one may be the first
        std::sort(found.chunks.begin(), found.chunks.end());
        std::sort(chunks.begin(), chunks.end());
      }
      CHECK(found.chunks == chunks);
    }
  };
  is_cut({.max_units = 40, .head = 0.25, .chunks = {0.125, 0.5}}, 40, 10, {5, 20, 5});
  is_cut({.max_units = 40, .head = 0.25, .chunks = {0.125, 0.5}}, 8, 8, {5, 8, 8, 8, 3});
  is_cut({.max_units = 40, .head = 0, .chunks = {0.1, 0.2, 0.1, 0.2, 0.1, 0.15}}, 40, 0,
         {4, 8, 4, 8, 4, 6, 6});
  is_cut({.max_units = 99, .head = 0.05, .chunks = {1}}, 40, 2, {38});
  is_cut({.max_units = 99, .head = 1, .chunks = {1}}, 40, 40, {});
  is_cut({.max_units = 99, .head = 0.95, .chunks = {0.001}}, 40, 38, {1, 1});
  is_cut({.max_units = 40, .head = 0, .chunks = {1}}, 40, 0, {40});
}

TEST_CASE("plan: a chunk is gathered in as many parts as it says, of as many units as fit") {
  const auto tasks = [](std::int32_t parts, std::int64_t units_of_part) {
    noting_machine machine;
    rig r(machine);
    const auto id = r.stored(1, blocks(32));
    pulseinfer::transfer_engine mover(
        machine, r.store, r.pages.pool(),
        {.staging_bytes = 64 * rig::geometry.unit_bytes(),
         .chunk_bytes = 32 * rig::geometry.unit_bytes(),
         .part_bytes = units_of_part * rig::geometry.unit_bytes(),
         .plans = plans_of({{.max_units = 32, .head = 0, .chunks = {1}, .parts = parts}})});
    const std::uint64_t before = machine.statistics().tasks.operations;
    auto t = mover.recall_units(1, {&id, 1}, units_of(32), r.stream).value();
    t.sync();
    CHECK(t.report().moved == 32);
    return machine.statistics().tasks.operations - before;
  };
  const std::uint64_t whole = tasks(1, 1);
  CHECK(tasks(2, 1) == whole + 1);
  CHECK(tasks(4, 1) == whole + 3);
  CHECK(tasks(5, 1) == whole + 4);  // of 7, 7, 7, 7, 4
  CHECK(tasks(32, 1) == whole + 31);
  CHECK(tasks(1024, 1) == whole + 31);
  CHECK(tasks(32, 8) == whole + 3);  // part_bytes at least
}

namespace {

/// A link that takes 128 us for a unit; a whole recall of it is gathered long before.
const pulseinfer::timed slow_link{{.link_bytes_per_second = 1e6}};
/// Up to 20 units go as one chunk, of more half are a head, and a fifth each chunk.
chunk_plans one_chunk_or_head() {
  return plans_of({{.max_units = 20, .head = 0, .chunks = {1}},
                   {.max_units = 80, .head = 0.5, .chunks = {0.2}}});
}

struct behind {
  std::int64_t head = 0;
  bool is_planned = false;
};
/// A recall of 30 or 40 units, behind one of so many that has been gathered and is on the link.
behind recall_behind(noting_machine& machine, rig& r, pulseinfer::sequence_id id,
                     std::int32_t under_way, std::int32_t own, std::uint64_t after_ns = 0) {
  auto first = r.recall(0, id, units_of(under_way)).value();
  first.sync_submitted();
  for (const std::uint64_t until = machine.now_ns() + after_ns; machine.now_ns() < until;) {
    CHECK(!first.is_complete());
  }
  CHECK(!first.is_final());
  (void)machine.taken();
  auto second = r.recall(1, id, units_of(own)).value();
  second.sync();
  first.sync();
  CHECK(first.report().moved == under_way);
  CHECK(second.report().moved == own);
  // Without a plan chunks have 1, 2, 4, 8 units, and fewer again; none twice so many as a fifth.
  const sizes chunks = machine.taken();
  const std::size_t fifth = bytes_of_copy(static_cast<std::size_t>(own / 5));
  return {second.report().head_units, std::count(chunks.begin(), chunks.end(), fifth) > 1};
}

/// So many tasks end.
void run_tasks(noting_machine& machine, std::uint64_t count) {
  const std::uint64_t until = machine.statistics().tasks.operations + count;
  machine.sync_until([&] { return machine.statistics().tasks.operations >= until; });
}

}  // namespace

TEST_CASE("plan: it is gone by behind what has been gathered, if that is no more than its own") {
  noting_machine machine(slow_link);
  for (const std::int32_t copies : {0, 16}) {  // who has no plan has no head beside others
    CAPTURE(copies);
    rig r(machine, {.chunk_units = 40,
                    .staging_chunks = 8,
                    .head_copies = copies,
                    .plans = one_chunk_or_head()});
    const auto id = r.stored(1, blocks(40));
    const auto is = [&](std::int32_t under_way, std::int32_t own, bool planned, std::int64_t head) {
      CAPTURE(under_way);
      const behind found = recall_behind(machine, r, id, under_way, own);
      CHECK(found.is_planned == planned);
      CHECK(found.head == head);
    };
    is(2, 40, true, 18);  // what is under way is so much less of a head
    is(19, 40, true, 1);
    is(20, 40, true, 0);
    is(30, 30, true, 0);
    is(31, 30, false, 0);
    is(40, 30, false, 0);
    is(4, 30, true, 11);
    r.mover.set_plans({});
    is(4, 30, false, 0);
  }
}

TEST_CASE("plan: the head is less what is on the link yet, where its speed is known") {
  noting_machine machine(slow_link);
  const auto head_behind_10 = [&](double bytes_per_second, std::uint64_t after_ns) {
    rig r(machine, {.chunk_units = 40,
                    .staging_chunks = 8,
                    .link_bytes_per_second = bytes_per_second,
                    .plans = one_chunk_or_head()});
    const auto id = r.stored(1, blocks(40));
    const behind found = recall_behind(machine, r, id, 10, 40, after_ns);
    CHECK(found.is_planned);
    return found.head;
  };
  const auto is_about = [](std::int64_t head, std::int64_t units) {
    return head == units || head == units + 1;
  };
  CHECK(is_about(head_behind_10(1e6, 0), 10));
  CHECK(is_about(head_behind_10(1e6, 5 * 128'000), 15));
  CHECK(is_about(head_behind_10(1e6, 9 * 128'000), 19));
  CHECK(head_behind_10(1e9, 128'000) == 20);          // it should have come
  CHECK(is_about(head_behind_10(1e3, 128'000), 10));  // no more than is under way
  CHECK(head_behind_10(0, 5 * 128'000) == 10);
}

TEST_CASE("plan: not while more than a tenth of as much is to be gathered for others") {
  noting_machine machine({{.worker_bytes_per_second = 1e5}});  // 2.6 ms for a unit
  for (const double link : {0.0, 1e9}) {
    CAPTURE(link);
    rig r(machine, {.chunk_units = 40,
                    .staging_chunks = 8,
                    .link_bytes_per_second = link,
                    .plans = one_chunk_or_head()});
    const auto id = r.stored(1, blocks(40));
    const auto head_beside = [&](std::int32_t others, bool planned) {
      auto first = r.recall(0, id, units_of(others)).value();
      run_tasks(machine, 1);  // it is dealt out
      CHECK(first.phase() == pulseinfer::transfer_phase::pending);
      auto second = r.recall(1, id, units_of(40)).value();
      second.sync();
      first.sync();
      CHECK(second.report().moved == 40);
      CHECK(second.report().planned == planned);
      return second.report().head_units;
    };
    CHECK(head_beside(5, false) == 0);
    CHECK(head_beside(4, true) == 16);  // what comes before is so much less of a head
    CHECK(head_beside(1, true) == 19);
    auto alone = r.recall(1, id, units_of(40)).value();
    alone.sync();
    CHECK(alone.report().head_units == 20);
  }
}

TEST_CASE("plan: not while others wait for a chunk to be gathered into") {
  // All that is in chunks is gathered and little; but there is more to come.
  noting_machine machine(slow_link);
  rig r(machine, {.chunk_units = 4, .staging_chunks = 2, .plans = one_chunk_or_head()});
  const auto id = r.stored(1, blocks(40));
  auto first = r.recall(0, id, units_of(40)).value();
  run_tasks(machine, 2);  // it is dealt out, and a chunk is gathered
  CHECK(first.phase() == pulseinfer::transfer_phase::pending);
  auto second = r.recall(1, id, units_of(40)).value();
  second.sync();
  first.sync();
  CHECK(first.report().head_units == 4);
  CHECK(second.report().head_units == 0);
}

TEST_CASE("plan: recalls that were cancelled are not under way any more") {
  noting_machine machine(slow_link);
  rig r(machine, {.chunk_units = 8, .staging_chunks = 8, .plans = one_chunk_or_head()});
  const auto id = r.stored(1, blocks(40));
  for (std::uint64_t tasks = 0; tasks < 8; ++tasks) {
    CAPTURE(tasks);
    auto t = r.recall(0, id, units_of(40)).value();
    if (tasks > 0) run_tasks(machine, tasks);
    t.cancel();
    t.sync();
    CHECK(recall_behind(machine, r, id, 4, 40).is_planned);
    CHECK(!recall_behind(machine, r, id, 31, 30).is_planned);
  }
}

TEST_CASE("plan: recalls by plans that were found by trial are shorter than without") {
  // A unit is small here; so are the speeds.
  noting_machine machine({{.dram_bytes_per_second = 4e8,
                           .link_bytes_per_second = 1.1e8,
                           .hbm_bytes_per_second = 6.5e9,
                           .worker_bytes_per_second = 5e7}});
  rig r(machine, {.chunk_units = 64, .staging_chunks = 8, .head_copies = 16});
  const auto id = r.stored(1, blocks(64));
  const auto ns = [&](std::int64_t count) {
    auto t = r.recall(1, id, units_of(static_cast<std::int32_t>(count))).value();
    t.sync();
    CHECK(t.report().moved == count);
    return t.report().ended_ns - t.report().requested_ns;
  };
  const chunk_plans found =
      pulseinfer::tune_chunks(r.mover, 1, {&id, 1}, units_of(64), r.stream,
                              {.least_units = 8, .most_units = 64, .step = 1.6});
  CHECK(r.mover.options().plans == found);
  std::uint64_t with = 0, without = 0;
  std::int64_t from = 8;
  for (const chunk_plan& p : found.all()) {
    for (const std::int64_t count : {from, p.max_units}) {
      CAPTURE(count);
      r.mover.set_plans(found);
      const std::uint64_t planned = ns(count);
      r.mover.set_plans({});
      const std::uint64_t unplanned = ns(count);
      CHECK(planned <= unplanned);
      with += planned;
      without += unplanned;
    }
    from = p.max_units + 1;
  }
  MESSAGE("with plans ", with, " ns, without ", without);
  CHECK(20 * with < 19 * without);
}
