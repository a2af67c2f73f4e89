// SPDX-License-Identifier: Apache-2.0
/// @file
/// Transfers when a call of the CUDA runtime or driver fails: fault 46 below the backend, at every
/// call that a transfer makes. The runtime that runs kernels on the CPU takes the failures from the
/// test; on another one there is nothing to test here.
#include <doctest/doctest.h>

#include <cstdint>
#include <exception>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "pulseinfer/transfer.hpp"
#include "support/engine_attempts.hpp"
#include "support/offload_rig.hpp"
#include "support/pull_rig.hpp"

#if __has_include("ptxsim_stats.h")
#include "ptxsim_stats.h"

namespace {

using backend = test::backend;
using rig = test::offload_rig<backend>;
using pulseinfer::copy_direction;
using pulseinfer::copy_span;
using pulseinfer::device_error;
using pulseinfer::sequence_id;
using pulseinfer::stream_priority;
using pulseinfer::transfer_phase;
using pulseinfer::transfer_way;
using pulseinfer::unit_status;
using pulseinfer::wait_outcome;
using ints = std::vector<std::int32_t>;

/// A function that is made to fail, and how: once, or from some call on, as a lost device does.
struct victim {
  const char* function;
  bool for_good;
};
using victims = std::vector<victim>;
const victims of_transfers = {
    {"cudaMemcpyAsync", false},    {"cudaMemcpyAsync", true},
    {"cuMemcpyBatchAsync", false}, {"cudaLaunchKernel", false},
    {"cudaLaunchKernel", true},    {"cudaEventRecord", false},
    {"cudaEventRecord", true},     {"cudaStreamWaitEvent", false},
    {"cudaStreamWaitEvent", true}, {"cudaEventQuery", true},
    {"cudaGetDevice", false},      {"cudaThreadExchangeStreamCaptureMode", false}};
const victims of_constructors = {{"cudaMalloc", false},
                                 {"cudaHostAlloc", false},
                                 {"cudaPointerGetAttributes", false},
                                 {"cudaStreamCreateWithPriority", false},
                                 {"cudaEventCreateWithFlags", false}};
const victims of_batches = {
    {"cuMemcpyBatchAsync", false}, {"cuMemcpyBatchAsync", true}, {"cudaStreamIsCapturing", false}};

/// Makes the nth call of a function fail, until the end of the scope.
class injected {
 public:
  injected(const victim& v, int nth)
      : function_(v.function), nth_(static_cast<std::uint64_t>(nth)), before_(calls()) {
    ptxsim::inject((function_ + ":" + std::to_string(nth) + (v.for_good ? "+" : "")).c_str());
  }
  injected(const injected&) = delete;
  injected& operator=(const injected&) = delete;
  ~injected() { stop(); }

  /// No more failures. Says whether there was one.
  bool stop() {
    const bool struck = calls() >= before_ + nth_;
    if (is_on_) ptxsim::inject("");
    is_on_ = false;
    struck_ = struck_ || struck;
    return struck_;
  }

 private:
  [[nodiscard]] std::uint64_t calls() const { return ptxsim::calls(function_.c_str()); }
  std::string function_;
  std::uint64_t nth_;
  std::uint64_t before_;
  bool is_on_ = true;
  bool struck_ = false;
};

std::string text_of(const victim& v) {
  return v.function + std::string(v.for_good ? " fails for good" : " fails");
}

/// Calls f(victim, nth) with the failing call further and further away, until it is not reached any
/// more. f returns whether it was; at least `least` calls are.
template <class F>
void at_every_call(const victims& all, int least, F f) {
  if (!ptxsim::available()) {
    MESSAGE("skipped: no call of this runtime can be made to fail");
    return;
  }
  int struck = 0;
  for (const victim& v : all) {
    INFO(text_of(v));
    for (int n = 1; n < 40; ++n) {
      // How often events are asked for is up to the workers.
      if (std::string(v.function) == "cudaEventQuery" && n > 6) break;
      CAPTURE(n);
      if (!f(v, n)) break;
      ++struck;
    }
  }
  CHECK(struck >= least);
}

ints blocks(std::int32_t count) {
  ints all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}
test::unit_bytes stamp(std::int64_t key, std::int32_t layer, std::int32_t block) {
  return test::stamp(rig::geometry, key, layer, block);
}

/// Units and numbers agree, and an error that cost a unit throws.
void check_end(rig::ticket& t) {
  bool threw = false;
  try {
    t.sync();
  } catch (const device_error& error) {
    threw = true;
    CHECK(std::string(error.what()) != "");
  }
  CHECK(t.is_final());
  CHECK(threw == (t.phase() == transfer_phase::failed));
  std::int64_t moved = 0;
  for (const unit_status status : test::statuses(t)) {
    moved += status == unit_status::moved ? 1 : 0;
    CHECK((status == unit_status::moved || status == unit_status::failed));
  }
  CHECK(t.report().moved == moved);
  if (moved < t.report().units) CHECK(t.phase() == transfer_phase::failed);
}

}  // namespace

TEST_CASE("fault 46: a recall during which a runtime call fails says so, and the next one works") {
  for (const transfer_way way : test::all_ways) {
    CAPTURE(static_cast<int>(way));
    at_every_call(of_transfers, 15, [&](const victim& v, int n) {
      backend machine;
      rig r(machine, {.chunk_units = 2, .way = way});
      const sequence_id id = r.stored(1, blocks(8));
      const auto before = r.store.counts();
      rig::targets units;
      for (std::int32_t b = 0; b < 8; ++b) units.push_back({0, b, 10 + b});
      machine.sync(r.stream);
      injected failure(v, n);
      std::optional<rig::ticket> t;
      try {
        t = r.recall(1, id, units);
        REQUIRE(t.has_value());
      } catch (const device_error&) {  // nothing began
      }
      if (t) check_end(*t);
      const bool struck = failure.stop();
      if (t && !struck) CHECK(t->phase() == transfer_phase::done);
      if (t && t->phase() == transfer_phase::failed) {
        CHECK(t->enqueue_wait(r.stream) == wait_outcome::incomplete);
      }
      CHECK(r.store.counts() == before);
      r.pages.download(r.stream);
      for (std::int32_t b = 0; b < 8; ++b) {
        if (t && t->status(static_cast<std::size_t>(b)) == unit_status::moved) {
          CHECK((r.pages.get(1, 10 + b) == stamp(1, 1, b)));
        }
        CHECK((r.in_store(id, 1, b) == stamp(1, 1, b)));
      }
      t.reset();
      auto again = r.recall(1, id, units).value();
      again.sync();
      CHECK(again.report().moved == 8);
      CHECK(again.enqueue_wait(r.stream) == wait_outcome::enqueued);
      r.pages.download(r.stream);
      for (std::int32_t b = 0; b < 8; ++b) CHECK((r.pages.get(1, 10 + b) == stamp(1, 1, b)));
      CHECK(cudaPeekAtLastError() == cudaSuccess);
      return struck;
    });
  }
}

TEST_CASE(
    "fault 46: an offload during which a runtime call fails says so, and the next one works") {
  at_every_call(of_transfers, 30, [&](const victim& v, int n) {
    backend machine;
    rig r(machine, {.chunk_units = 2});
    const sequence_id id = r.store.open_sequence().value();
    rig::targets units;
    for (std::int32_t b = 0; b < 8; ++b) {
      units.push_back({0, b, 20 + b});
      r.pages.put(1, 20 + b, stamp(1, 1, b));
    }
    r.pages.upload(r.stream);
    injected failure(v, n);
    std::optional<rig::ticket> t;
    try {
      t = r.offload(1, id, units);
      REQUIRE(t.has_value());
    } catch (const device_error&) {
    }
    if (t) check_end(*t);
    const bool struck = failure.stop();
    if (t && !struck) CHECK(t->phase() == transfer_phase::done);
    const std::int64_t moved = t ? t->report().moved : 0;
    CHECK(rig::at_rest(r.store.counts()));
    CHECK(r.store.counts().evictable == moved);
    r.pages.download(r.stream);
    for (std::int32_t b = 0; b < 8; ++b) {
      const bool is_moved = t && t->status(static_cast<std::size_t>(b)) == unit_status::moved;
      CHECK((r.in_store(id, 1, b) == (is_moved ? stamp(1, 1, b) : test::unit_bytes{})));
      CHECK((r.pages.get(1, 20 + b) == stamp(1, 1, b)));
    }
    t.reset();
    auto again = r.offload(1, id, units).value();
    again.sync();
    CHECK(again.report().moved == 8 - moved);
    for (std::int32_t b = 0; b < 8; ++b) CHECK((r.in_store(id, 1, b) == stamp(1, 1, b)));
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    return struck;
  });
}

TEST_CASE("fault 46: a step during which a runtime call fails is discarded, and comes again") {
  for (const bool is_pulled : {false, true}) {
    CAPTURE(is_pulled);
    int struck_in_all = 0;
    for (const victim& v : of_transfers) {
      if (!ptxsim::available()) break;
      INFO(text_of(v));
      for (int n = 1; n < 12; ++n) {
        if (std::string(v.function) == "cudaEventQuery" && (is_pulled || n > 6)) break;
        CAPTURE(n);
        backend machine;
        test::pull_rig<backend> r(machine, {.chunk_units = 2});
        const sequence_id id = r.stored(1, blocks(6));
        r.lend(0, 0, 6);
        const auto chosen = r.choice({{1, 2, 3, 5}});
        const auto& batch = r.rows_of({0});
        const auto* views = r.views(0, {id});
        machine.sync(r.stream);
        injected failure(v, n);
        std::optional<pulseinfer::resolved_step> step;
        std::optional<rig::ticket> t;
        bool ended = false;
        try {
          step.emplace(r.hot.resolve(0, batch, chosen, r.stream).value());
          if (is_pulled) {
            r.puller.pull(r.hot, *step, batch.device_requests, views, r.stream);
            ended = true;
          } else {
            t = r.mover.recall(*step, {&id, 1}, r.stream);
            REQUIRE(t.has_value());
          }
        } catch (const device_error&) {
        }
        if (t) {
          check_end(*t);
          ended = t->phase() == transfer_phase::done;
        }
        const bool struck = failure.stop();
        if (!struck) CHECK(ended);
        machine.sync(r.stream);
        if (step && !ended) {
          CHECK(r.hot.try_take_back(0, r.stream) == pulseinfer::take_back_outcome::in_use);
          r.hot.discard(*step, batch, r.stream);
        }
        t.reset();
        // Whatever was forgotten or not: after this all that is chosen is there.
        const auto next = r.hot.resolve(0, batch, chosen, r.stream);
        REQUIRE(next.has_value());
        auto again = r.mover.recall(*next, {&id, 1}, r.stream).value();
        again.sync();
        CHECK(again.phase() == transfer_phase::done);
        CHECK(r.holds(0, r.pages_of(*next)[0], 1, {1, 2, 3, 5}));
        CHECK(r.hot.try_take_back(0, r.stream) == pulseinfer::take_back_outcome::taken);
        r.end_leases();
        CHECK(rig::at_rest(r.store.counts()));
        machine.sync(r.stream);
        CHECK(cudaPeekAtLastError() == cudaSuccess);
        if (!struck) break;
        ++struck_in_all;
      }
    }
    if (ptxsim::available()) CHECK(struck_in_all > (is_pulled ? 5 : 15));
  }
}

TEST_CASE(
    "fault 46: an engine for which a runtime call fails is not had, and nothing of it stays") {
  backend machine;
  test::engine_attempts<backend> attempts(machine);
  at_every_call(of_constructors, 20, [&](const victim& v, int n) {
    const auto free = machine.limits().device_bytes_free;
    injected failure(v, n);
    bool is_made = false;
    try {
      attempts.make_one([&] {
        is_made = true;
        const bool struck = failure.stop();
        CHECK_FALSE(struck);
      });
    } catch (const std::exception& error) {
      CHECK(std::string(error.what()) != "");
    }
    const bool struck = failure.stop();
    CHECK(is_made != struck);
    CHECK(machine.limits().device_bytes_free == free);
    CHECK(attempts.at_rest());
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    return struck;
  });
}

TEST_CASE("fault 46: a batch of copies during which a call fails throws, and can be made again") {
  at_every_call(of_batches, 20, [&](const victim& v, int n) {
    backend machine;
    auto stream = machine.make_stream(stream_priority::normal);
    constexpr std::size_t size = 5;
    const test::device_array<std::int32_t, backend> source(machine, {5, 4, 3, 2, 1}, stream);
    const test::pinned_array<std::int32_t, backend> out(machine, 8 * size);
    out.fill(0);
    const auto copy = [&] {  // to eight places, so that there is more than one call
      for (std::size_t k = 0; k < 8; ++k) {
        std::vector<copy_span> copies;
        for (std::size_t i = 0; i < size; ++i) {
          copies.push_back({out.data() + k * size + i, source.data() + i, sizeof(std::int32_t)});
        }
        machine.copy_many_async(copies, copy_direction::device_to_host, stream);
      }
    };
    injected failure(v, n);
    bool threw = false;
    try {
      copy();
    } catch (const pulseinfer::cuda_error&) {
      threw = true;
    }
    const bool struck = failure.stop();
    CHECK((struck || !threw));
    if (threw) {
      machine.sync(stream);
      copy();
    }
    machine.sync(stream);
    bool right = true;
    for (std::size_t i = 0; i < 8 * size; ++i) {
      right = right && out[i] == static_cast<std::int32_t>(5 - i % size);
    }
    CHECK(right);
    CHECK(cudaPeekAtLastError() == cudaSuccess);
    return struck;
  });
}

#else

TEST_CASE("fault 46: failures of runtime calls need the runtime that injects them") {
  MESSAGE("skipped: no call of this runtime can be made to fail (ptxsim_stats.h was not found)");
}

#endif
