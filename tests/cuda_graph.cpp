// SPDX-License-Identifier: Apache-2.0
/// @file
/// Resolve and pull in one CUDA graph: captured once, replayed on other choices, rows and sequences.
#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "pulseinfer/pull.hpp"
#include "support/pull_rig.hpp"

#if __has_include("ptxsim_stats.h")
#include "ptxsim_stats.h"
#define PULSEINFER_TEST_HAS_STATS 1
#else
#define PULSEINFER_TEST_HAS_STATS 0
#endif

namespace {

using backend = test::backend;
using rig = test::pull_rig<backend>;
using pulseinfer::sequence_id;
using pulseinfer::unit_status;
using ints = std::vector<std::int32_t>;

ints blocks(std::int32_t count) {
  ints all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

/// Whatever `enqueue` gives the stream, captured.
class graph {
 public:
  template <class Enqueue>
  graph(backend::stream& stream, Enqueue enqueue) : stream_(stream) {
    REQUIRE(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeGlobal) == cudaSuccess);
    enqueue();
    REQUIRE(cudaStreamEndCapture(stream.get(), &graph_) == cudaSuccess);
    REQUIRE(cudaGraphInstantiate(&ready_, graph_, 0) == cudaSuccess);
  }
  graph(const graph&) = delete;
  graph& operator=(const graph&) = delete;
  ~graph() {
    (void)cudaGraphExecDestroy(ready_);
    (void)cudaGraphDestroy(graph_);
  }
  void replay() { REQUIRE(cudaGraphLaunch(ready_, stream_.get()) == cudaSuccess); }

 private:
  backend::stream& stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t ready_ = nullptr;
};

}  // namespace

TEST_CASE("graph: resolve and pull are replayed on whatever the device arrays hold") {
  backend machine;
  rig r(machine);
  test::offload_rig<backend> eager(machine);  // the same steps, recalled
  const auto store = [](auto& each) {
    each.lend(0, 30, 6);
    each.lend(1, 50, 4);
    each.lend(2, 70, 5);
    return std::vector<sequence_id>{each.stored(1, blocks(24)), each.stored(2, blocks(24)),
                                    each.stored(3, blocks(24))};
  };
  const auto sequences = store(r), others = store(eager);
  const auto held = r.hot.hold_step(1, 2);
  REQUIRE(held.has_value());
  // Captured over arrays that hold nothing yet.
  auto selected = r.choice({{}, {}});
  const auto* views = r.views(1, {});
  const auto* requests = r.rows_of({-1, -1}).device_requests;
  machine.sync(r.stream);
  const test::pinned_array<std::int32_t, backend> seen(machine, 8);
  graph step(r.stream, [&] {
    r.hot.resolve_held(*held, requests, selected, r.stream);
    r.puller.pull(r.hot, *held, requests, views, r.stream);
    // In the place of attention.
    machine.copy_async(seen.data(), held->pages, seen.bytes(),
                       pulseinfer::copy_direction::device_to_host, r.stream);
  });

  struct replay {
    ints requests;
    std::vector<ints> chosen;
  };
  for (const replay& now : std::vector<replay>{{{0, 1}, {{1, 2, 3, 4}, {5, 6}}},
                                               {{0, 1}, {{2, 3, 4, 9}, {5, 6, 7, 8}}},
                                               {{2, 0}, {{0, 1, 2}, {1, 2, 10, 11}}},
                                               {{1, 2}, {{5, 6, 20, 21}, {0, 2, 22, 23}}},
                                               {{1, 2}, {{5, 6, 20, 21}, {0, 2, 22, 23}}},
                                               {{0, -1}, {{3, 4, 9, 12}, {1, 2}}},
                                               {{-1, 1}, {{}, {1}}}}) {
    std::vector<sequence_id> rows, other_rows;
    ints used;
    std::vector<ints> used_chosen;
    for (std::size_t row = 0; row < 2; ++row) {
      const std::int32_t request = now.requests[row];
      const auto index = static_cast<std::size_t>(request);
      rows.push_back(request < 0 ? sequence_id{} : sequences[index]);
      if (request < 0) continue;
      other_rows.push_back(others[index]);
      used.push_back(request);
      used_chosen.push_back(now.chosen[row]);
    }
    REQUIRE(r.views(1, rows) == views);
    REQUIRE(r.rows_of(now.requests).device_requests == requests);
    REQUIRE(r.choice(now.chosen).ids == selected.ids);
#if PULSEINFER_TEST_HAS_STATS
    const ptxsim::Scope scope;
#endif
    step.replay();
#if PULSEINFER_TEST_HAS_STATS
    if (scope.active()) {
      CHECK(scope.counters().h2d_copies == 0);
      CHECK(scope.counters().kernel_launches == 4);
      CHECK(scope.synchronisations() == 0);
      CHECK(scope.counters().event_records == 0);
    }
#endif
    machine.sync(r.stream);
    // An eager step of the same choice places and misses the same.
    const auto same = eager.resolve(1, used, used_chosen);
    REQUIRE(same.has_value());
    auto ticket = eager.mover.recall(*same, other_rows, eager.stream);
    REQUIRE(ticket.has_value());
    ticket->sync();
    const auto expected = eager.pages_of(*same);
    std::size_t eager_row = 0;
    for (std::size_t row = 0; row < 2; ++row) {
      const auto i = static_cast<std::int32_t>(row);
      const ints table(seen.data() + 4 * row, seen.data() + 4 * row + 4);
      if (now.requests[row] < 0) {
        CHECK((table == ints(4, -1)));
        CHECK(held->misses(i).empty());
        continue;
      }
      CHECK((table == expected[eager_row]));
      CHECK((rig::missed(*held, i) == rig::missed(*same, static_cast<std::int32_t>(eager_row))));
      for (const auto& miss : held->misses(i)) CHECK(miss.status == unit_status::moved);
      CHECK(r.holds(1, table, now.requests[row] + 1, now.chosen[row]));
      ++eager_row;
    }
  }
  r.hot.drop_step(*held);
}

TEST_CASE("graph: a replay finds what has come into the store since the capture") {
  backend machine;
  rig r(machine);
  const sequence_id id = r.stored(1, {0, 1});
  r.lend(0, 0, 6);
  const auto held = r.hot.hold_step(0, 1);
  REQUIRE(held.has_value());
  const auto selected = r.choice({{0, 2}});
  const auto* views = r.views(0, {id});
  const auto* requests = r.rows_of({0}).device_requests;
  graph step(r.stream, [&] {
    r.hot.resolve_held(*held, requests, selected, r.stream);
    r.puller.pull(r.hot, *held, requests, views, r.stream);
  });
  for (int i = 0; i < 2; ++i) {
    step.replay();
    machine.sync(r.stream);
    REQUIRE(rig::missed(*held, 0).back() == 2);
    CHECK(held->misses(0).back().status == unit_status::missing);
    CHECK((r.pages_of(*held)[0] == ints{0, -1, -1, -1}));
  }
  r.add(id, 1, 0, 2);  // the lease on the sequence is older
  step.replay();
  machine.sync(r.stream);
  CHECK((rig::missed(*held, 0) == ints{2}));
  CHECK(held->misses(0)[0].status == unit_status::moved);
  CHECK(r.holds(0, r.pages_of(*held)[0], 1, {0, 2}));
  step.replay();
  machine.sync(r.stream);
  CHECK(held->misses(0).empty());
  r.hot.drop_step(*held);
}

TEST_CASE("graph: replays back to back keep their order") {
  backend machine;
  rig r(machine);
  const sequence_id id = r.stored(1, blocks(20));
  r.lend(0, 0, 4);
  const auto held = r.hot.hold_step(0, 1);
  REQUIRE(held.has_value());
  const auto selected = r.choice({{0}});
  const auto* views = r.views(0, {id});
  const auto* requests = r.rows_of({0}).device_requests;
  test::pinned_array<std::int32_t, backend> ids(machine, 20);
  std::iota(ids.data(), ids.data() + 20, 0);
  const test::pinned_array<std::int32_t, backend> tables(machine, 4 * 5);
  graph step(r.stream, [&] {
    r.hot.resolve_held(*held, requests, selected, r.stream);
    r.puller.pull(r.hot, *held, requests, views, r.stream);
  });
  auto* const device_ids = const_cast<std::int32_t*>(selected.ids);
  const test::device_array<std::int32_t, backend> four(machine, {4}, r.stream);
  machine.copy_async(const_cast<std::int32_t*>(selected.counts), four.data(), 4,
                     pulseinfer::copy_direction::device_to_device, r.stream);
  for (std::size_t i = 0; i < 5; ++i) {  // five choices that have nothing in common
    machine.copy_async(device_ids, ids.data() + 4 * i, 16,
                       pulseinfer::copy_direction::host_to_device, r.stream);
    step.replay();
    machine.copy_async(tables.data() + 4 * i, held->pages, 16,
                       pulseinfer::copy_direction::device_to_host, r.stream);
  }
  machine.sync(r.stream);
  for (std::size_t i = 0; i < 5; ++i) {
    const ints table(tables.data() + 4 * i, tables.data() + 4 * i + 4);
    CHECK((table == ints{0, 1, 2, 3}));
  }
  CHECK(r.holds(0, {0, 1, 2, 3}, 1, {16, 17, 18, 19}));
  r.hot.drop_step(*held);
}

#if PULSEINFER_TEST_HAS_STATS
TEST_CASE("graph: the kernel that pulls keeps within its CTAs, and asks for whole sectors") {
  if (!ptxsim::available()) {
    MESSAGE("left out: this runtime counts no calls");
    return;
  }
  backend machine;
  for (const int max_ctas : {1, 3}) {
    rig r(machine, {}, max_ctas);
    const sequence_id id = r.stored(1, blocks(8));
    r.lend(0, 0, 6);
    ptxsim::reset();
    const auto step = r.pull(0, {0}, {id}, {{1, 3, 4, 6}});
    REQUIRE(step.has_value());
    const auto kernel = ptxsim::kernel("pull_units");
    CHECK(kernel.launches == 1);
    CHECK(kernel.blocks >= 1);
    CHECK(kernel.blocks <= static_cast<std::uint64_t>(max_ctas));
    // Four units, in words of 16 bytes.
    CHECK(kernel.bytes_stored == 4u * static_cast<std::uint64_t>(rig::geometry.unit_bytes()));
    CHECK(ptxsim::store_efficiency(kernel) == doctest::Approx(1.0));
    CHECK(r.holds(0, r.pages_of(*step)[0], 1, {1, 3, 4, 6}));
  }
}
#endif
