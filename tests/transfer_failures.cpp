// SPDX-License-Identifier: Apache-2.0
/// @file
/// transfer.hpp when a call or a stream of the backend fails: fault 46, injected at every call of
/// every job. Include the backend's support header first.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "pulseinfer/context_writer.hpp"
#include "pulseinfer/page_table.hpp"
#include "pulseinfer/prefix_stream.hpp"
#include "pulseinfer/transfer.hpp"
#include "support/allocations.hpp"
#include "support/engine_attempts.hpp"
#include "support/failing_backend.hpp"
#include "support/offload_rig.hpp"

namespace {

using backend = test::failing_backend<test::backend>;
using rig = test::offload_rig<backend>;
using pulseinfer::device_error;
using pulseinfer::transfer_phase;
using pulseinfer::transfer_way;
using pulseinfer::unit_status;
using pulseinfer::wait_outcome;
using test::job;
using ints = std::vector<std::int32_t>;

template <class Case>
void each(Case run) {
  test::each_backend([&](test::backend machine) { run(backend(machine)); });
}

struct broken_kernel {
  void operator()(std::int64_t, std::int64_t) const {
    throw device_error("broken_kernel: failed on purpose");
  }
};

/// A machine of which the nth thing that is asked for, memory, stream or event, is not to be had.
class scarce_backend : public test::backend {
 public:
  explicit scarce_backend(const test::backend& base) : test::backend(base) {}
  void fail_at(int nth) { *left_ = nth; }
  /// Memory that has not been given back.
  [[nodiscard]] int out() const { return *out_; }
  [[nodiscard]] bool has_failed() const { return *left_ < 0; }

  [[nodiscard]] void* allocate_device(std::size_t bytes) {
    return counted([&] { return test::backend::allocate_device(bytes); });
  }
  void deallocate_device(void* p, std::size_t bytes) noexcept {
    --*out_;
    test::backend::deallocate_device(p, bytes);
  }
  [[nodiscard]] void* allocate_pinned(std::size_t bytes) {
    return counted([&] { return test::backend::allocate_pinned(bytes); });
  }
  void deallocate_pinned(void* p, std::size_t bytes) noexcept {
    --*out_;
    test::backend::deallocate_pinned(p, bytes);
  }
  [[nodiscard]] stream make_stream(pulseinfer::stream_priority priority) {
    ask();
    return test::backend::make_stream(priority);
  }
  [[nodiscard]] event make_event() {
    ask();
    return test::backend::make_event();
  }

 private:
  void ask() {
    if (*left_ > 0 && --*left_ == 0) {
      *left_ = -1;
      throw pulseinfer::out_of_memory("scarce_backend: none on purpose");
    }
  }
  template <class Allocate>
  void* counted(Allocate allocate) {
    ask();
    void* const p = allocate();
    ++*out_;
    return p;
  }
  std::shared_ptr<int> left_ = std::make_shared<int>(0);
  std::shared_ptr<int> out_ = std::make_shared<int>(0);
};

/// How the armed call fails: it throws, or what the stream was given before it fails there.
enum class way_to_fail { throws, breaks_stream };

void arm(backend& machine, job which, int nth, way_to_fail how) {
  if (how == way_to_fail::throws) {
    machine.arm_throw(which, nth);
    return;
  }
  test::backend plain = machine;
  machine.arm(which, nth, [plain](const backend::stream_ref* stream) mutable {
    if (stream != nullptr) plain.for_each({1, 1}, {}, 0, broken_kernel{}, *stream);
  });
}

ints blocks(std::int32_t count) {
  ints all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}
test::unit_bytes stamp(std::int64_t key, std::int32_t layer, std::int32_t block) {
  return test::stamp(rig::geometry, key, layer, block);
}

/// The error of a failed stream, so that later work goes on.
void clear(backend& machine, backend::stream& stream) {
  try {
    machine.sync(stream);
  } catch (const device_error&) {
  }
}

/// What every transfer says in the end: units and numbers agree, and an error that cost a unit
/// throws.
void check_end(rig::ticket& t) {
  bool threw = false;
  try {
    t.sync();
  } catch (const device_error&) {
    threw = true;
  }
  CHECK(t.is_final());
  CHECK(threw == (t.phase() == transfer_phase::failed));
  std::int64_t moved = 0;
  for (const unit_status status : test::statuses(t)) {
    moved += status == unit_status::moved ? 1 : 0;
    CHECK((status == unit_status::moved || status == unit_status::failed));
  }
  CHECK(t.report().moved == moved);
  CHECK(t.report().bytes == moved * rig::geometry.unit_bytes());
  if (moved < t.report().units) CHECK(t.phase() == transfer_phase::failed);
}

/// Calls f(job, n, how) with the failing call further and further into a transfer, until it is not
/// reached any more. f returns whether the call came.
template <class F>
void at_every_call(F f) {
  int struck = 0;
  for (const auto& named : test::all_jobs) {
    const job which = named.first;
    for (const way_to_fail how : {way_to_fail::throws, way_to_fail::breaks_stream}) {
      const bool has_stream = which != job::task && which != job::poll;
      if (!has_stream && how == way_to_fail::breaks_stream) continue;
      INFO("the call is ", std::string(named.second), ", it ",
           std::string(how == way_to_fail::throws ? "throws" : "breaks its stream"));
      for (int n = 1; n < 100; ++n) {
        CAPTURE(n);
        if (!f(which, n, how)) break;
        ++struck;
      }
    }
  }
  CHECK(struck > 20);
}

}  // namespace

TEST_CASE("fault 46: a recall that fails anywhere ends, says which units, and the next one works") {
  each([](backend machine) {
    test::rig_options by_plan{.chunk_units = 2};
    by_plan.plans.add({.max_units = 8, .head = 0.25, .chunks = {0.125, 0.25}});
    std::vector<test::rig_options> kinds = {by_plan, {.chunk_units = 2, .head_copies = 16}};
    for (const transfer_way way : test::all_ways) kinds.push_back({.chunk_units = 2, .way = way});
    for (const test::rig_options& kind : kinds) {
      at_every_call([&](job which, int n, way_to_fail how) {
        rig r(machine, kind);
        const auto id = r.stored(1, blocks(8));
        const auto before = r.store.counts();
        rig::targets units;
        for (std::int32_t b = 0; b < 8; ++b) units.push_back({0, b, 10 + b});
        arm(machine, which, n, how);
        bool struck = false;
        std::optional<rig::ticket> t;
        try {
          t = r.recall(1, id, units);
          REQUIRE(t.has_value());
        } catch (const device_error&) {
          struck = true;  // nothing began
          CHECK(machine.has_struck());
        }
        if (t) {
          check_end(*t);
          struck = machine.has_struck();
          if (t->phase() == transfer_phase::failed) {
            CHECK(t->enqueue_wait(r.stream) == wait_outcome::incomplete);
          }
          if (!struck) CHECK(t->phase() == transfer_phase::done);
        }
        machine.arm(job::copy, 0, {});
        CHECK(r.store.counts() == before);
        clear(machine, r.stream);
        // What is said to be there is there, and the sources are whole.
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
        for (std::int32_t b = 0; b < 8; ++b) {
          CHECK((r.pages.get(1, 10 + b) == stamp(1, 1, b)));
        }
        return struck;
      });
    }
  });
}

TEST_CASE(
    "fault 46: an offload that fails anywhere ends, says which units, and the next one works") {
  each([](backend machine) {
    at_every_call([&](job which, int n, way_to_fail how) {
      rig r(machine, {.chunk_units = 2});
      const auto id = r.store.open_sequence().value();
      rig::targets units;
      for (std::int32_t b = 0; b < 8; ++b) {
        units.push_back({0, b, 20 + b});
        r.pages.put(1, 20 + b, stamp(1, 1, b));
      }
      r.pages.upload(r.stream);
      arm(machine, which, n, how);
      bool struck = false;
      std::optional<rig::ticket> t;
      try {
        t = r.offload(1, id, units);
        REQUIRE(t.has_value());
      } catch (const device_error&) {
        struck = true;
        CHECK(machine.has_struck());
      }
      std::int64_t moved = 0;
      if (t) {
        check_end(*t);
        struck = machine.has_struck();
        moved = t->report().moved;
        if (!struck) CHECK(t->phase() == transfer_phase::done);
      }
      machine.arm(job::copy, 0, {});
      clear(machine, r.stream);
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
      CHECK(again.phase() == transfer_phase::done);
      for (std::int32_t b = 0; b < 8; ++b) CHECK((r.in_store(id, 1, b) == stamp(1, 1, b)));
      return struck;
    });
  });
}

TEST_CASE("fault 46: a step whose recall fails is discarded, and recalled again") {
  each([](backend machine) {
    at_every_call([&](job which, int n, way_to_fail how) {
      rig r(machine, {.chunk_units = 2});
      const auto id = r.stored(1, blocks(6));
      r.lend(0, 0, 6);
      const pulseinfer::batch_view batch = r.rows_of({0});
      const pulseinfer::selection chosen = r.choice({{1, 2, 3, 5}});
      arm(machine, which, n, how);
      std::optional<pulseinfer::resolved_step> step;
      std::optional<rig::ticket> t;
      bool struck = false;
      try {
        // Not assigned: g++ 12 lets a call that throws write into what it would be assigned to.
        step.emplace(r.hot.resolve(0, batch, chosen, r.stream).value());
        t = r.mover.recall(*step, {&id, 1}, r.stream);
        REQUIRE(t.has_value());
      } catch (const device_error&) {
        struck = true;
      }
      if (t) {
        t->sync_submitted();
        bool complete = false;
        try {
          complete = t->enqueue_wait(r.stream) == wait_outcome::enqueued;
        } catch (const device_error&) {  // it was that call
        }
        check_end(*t);
        struck = machine.has_struck();
        machine.arm(job::copy, 0, {});
        // Whoever was told to wait is stopped, or finds the pages filled, whatever the host has heard.
        bool stopped = false;
        try {
          machine.sync(r.stream);
        } catch (const device_error&) {
          stopped = true;
        }
        if (complete && !stopped) {
          const ints pages = r.pages_of(*step)[0];
          r.pages.download(r.stream);
          for (std::size_t i = 0; i < 4; ++i) {
            CHECK((r.pages.get(0, pages[i]) == stamp(1, 0, ints{1, 2, 3, 5}[i])));
          }
        }
      }
      machine.arm(job::copy, 0, {});
      clear(machine, r.stream);
      const bool arrived = t && t->phase() == transfer_phase::done;
      if (step && !arrived) {
        CHECK(r.hot.try_take_back(0, r.stream) == pulseinfer::take_back_outcome::in_use);
        r.hot.discard(*step, batch, r.stream);
      }
      t.reset();
      const auto next = r.hot.resolve(0, batch, r.choice({{1, 2, 3, 5}}), r.stream);
      REQUIRE(next.has_value());
      auto again = r.mover.recall(*next, {&id, 1}, r.stream).value();
      again.sync();
      CHECK(again.phase() == transfer_phase::done);
      const ints pages = r.pages_of(*next)[0];
      r.pages.download(r.stream);
      for (std::size_t i = 0; i < 4; ++i) {
        REQUIRE(pages[i] >= 0);
        CHECK((r.pages.get(0, pages[i]) == stamp(1, 0, ints{1, 2, 3, 5}[i])));
      }
      CHECK(r.hot.try_take_back(0, r.stream) == pulseinfer::take_back_outcome::taken);
      CHECK(rig::at_rest(r.store.counts()));
      machine.sync(r.stream);
      return struck;
    });
  });
}

TEST_CASE("fault 46: a failure of one transfer is never another's success") {
  // Three in flight share two chunks; whichever the failure meets, what is said to be moved is, and
  // the next call, which collects what the streams remember, changes nothing of that.
  each([](backend machine) {
    for (const job which : {job::copy, job::kernel, job::record, job::wait}) {
      for (const way_to_fail how : {way_to_fail::throws, way_to_fail::breaks_stream}) {
        for (const int n : {1, 2, 3, 5, 8}) {
          CAPTURE(static_cast<int>(which));
          CAPTURE(static_cast<int>(how));
          CAPTURE(n);
          rig r(machine, {.chunk_units = 1});
          const auto id = r.stored(1, blocks(8));
          r.lend(0, 80, 6);
          std::vector<rig::ticket> tickets;
          arm(machine, which, n + 2, how);  // two records belong to the calls
          const auto start = [&](std::int32_t first_page) {
            rig::targets units;
            for (std::int32_t b = 0; b < 8; ++b) units.push_back({0, b, first_page + b});
            try {
              tickets.push_back(r.recall(0, id, units).value());
            } catch (const device_error&) {
            }
          };
          start(10);
          start(20);
          if (!tickets.empty()) {
            machine.sync_until([&] { return tickets[0].is_final(); });
          }
          start(30);  // may collect the failure while the second one is still under way
          for (auto& t : tickets) check_end(t);
          machine.arm(job::copy, 0, {});
          clear(machine, r.stream);
          r.pages.download(r.stream);
          const auto check_moved = [&](const rig::ticket& t, std::int32_t first_page) {
            for (std::int32_t b = 0; b < 8; ++b) {
              if (t.status(static_cast<std::size_t>(b)) != unit_status::moved) continue;
              CHECK((r.pages.get(0, first_page + b) == stamp(1, 0, b)));
            }
          };
          if (tickets.size() == 3) {
            for (std::size_t i = 0; i < 3; ++i) {
              check_moved(tickets[i], 10 + 10 * static_cast<std::int32_t>(i));
            }
          }
          CHECK(rig::at_rest(r.store.counts()));
          tickets.clear();
          start(40);
          REQUIRE(tickets.size() == 1);
          tickets[0].sync();
          CHECK(tickets[0].report().moved == 8);
        }
      }
    }
  });
}

TEST_CASE(
    "fault 46: where the engine's own work fails, a step is not recalled from what was never "
    "written") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(6));
    r.lend(0, 0, 6);
    {
      const auto first = r.resolve(0, {0}, {{1, 2, 3, 4}});  // leaves misses in the mirror
      REQUIRE(first.has_value());
      auto t = r.mover.recall(*first, {&id, 1}, r.stream).value();
      t.sync();
    }
    const pulseinfer::batch_view batch = r.rows_of({0});
    const pulseinfer::selection chosen = r.choice({{0, 5}});
    for (int i = 0; i < 6; ++i) {  // through all the mirrors
      test::backend(machine).for_each({1, 1}, {}, 0, broken_kernel{}, r.stream);
      const auto step = r.hot.resolve(0, batch, chosen, r.stream);
      REQUIRE(step.has_value());
      auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
      t.sync_submitted();
      const auto outcome = t.enqueue_wait(r.stream);
      CHECK(outcome == wait_outcome::incomplete);
      CHECK_THROWS_AS(t.sync(), device_error);
      CHECK(t.phase() == transfer_phase::failed);
      CHECK(t.report().moved == 0);
      CHECK(r.hot.try_take_back(0, r.stream) == pulseinfer::take_back_outcome::in_use);
      clear(machine, r.stream);
      CHECK(step->misses(0).empty());
      r.hot.discard(*step, batch, r.stream);
      machine.sync(r.stream);
    }
    // What was resident still is.
    const auto step = r.hot.resolve(0, batch, r.choice({{1, 2, 5}}), r.stream);
    REQUIRE(step.has_value());
    auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
    t.sync();
    CHECK((rig::missed(*step, 0) == ints{5}));
    CHECK(rig::at_rest(r.store.counts()));
    machine.sync(r.stream);
  });
}

TEST_CASE("fault 46: a discard that fails with its stream is not taken for done") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(6));
    r.lend(0, 0, 6);
    const pulseinfer::batch_view batch = r.rows_of({0});
    const pulseinfer::selection chosen = r.choice({{0, 5}});
    const auto step = r.hot.resolve(0, batch, chosen, r.stream);
    REQUIRE(step.has_value());
    test::backend(machine).for_each({1, 1}, {}, 0, broken_kernel{}, r.stream);
    {
      auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
      CHECK_THROWS_AS(t.sync(), device_error);
    }
    r.hot.discard(*step, batch, r.stream);  // on a stream that has failed: nothing is forgotten
    clear(machine, r.stream);
    // The units never came. Were they taken for hits now, attention would read what lies there.
    CHECK_THROWS_AS((void)r.hot.resolve(0, batch, chosen, r.stream), device_error);
    r.hot.discard(*step, batch, r.stream);
    machine.sync(r.stream);
    const auto again = r.hot.resolve(0, batch, chosen, r.stream);
    REQUIRE(again.has_value());
    auto t = r.mover.recall(*again, {&id, 1}, r.stream).value();
    t.sync();
    CHECK((rig::missed(*again, 0) == ints{0, 5}));
    CHECK(t.report().moved == 2);
    machine.sync(r.stream);
  });
}

TEST_CASE("fault 46: whatever a transfer fails with, what streams and writes layers goes on") {
  each([](backend machine) {
    rig r(machine);
    const auto id = r.stored(1, blocks(4));
    const auto break_next = [&](job which) {
      machine.arm(which, 1, [](const backend::stream_ref*) {
        throw std::runtime_error("transfer_failures: no device_error");
      });
    };
    using pulseinfer::device_page;
    const std::vector<device_page> even = {device_page{10}, device_page{11}};
    const std::vector<device_page> odd = {device_page{20}, device_page{21}};
    {
      break_next(job::copy);
      pulseinfer::prefix_stream layers(r.mover, id, 2, even, odd, r.stream);
      CHECK(layers.sync_layer(r.stream) == pulseinfer::prefix_outcome::incomplete);
      CHECK(!layers.missing().empty());
      CHECK(layers.sync_layer(r.stream) == pulseinfer::prefix_outcome::ready);
    }
    {
      break_next(job::copy);
      pulseinfer::prefix_stream layers(r.mover, id, 2, even, odd, r.stream);
      layers.sync_dropped();  // where it was not begun, nothing has struck yet
      machine.arm(job::copy, 1 << 30, {});
    }
    pulseinfer::digest_store<backend> digests(machine, rig::geometry,
                                              {.max_requests = 1, .max_blocks = rig::max_blocks});
    pulseinfer::context_writer writer(digests, r.mover, r.pages.pool());
    const auto written = r.store.open_sequence().value();
    writer.open(0, written);
    const ints entries = {30, 31};
    const pulseinfer::block_table table{entries.data(), 1, 2};
    const pulseinfer::appended_row row{0, 2 * rig::geometry.block_tokens};
    test::device_array<std::int32_t, backend> on_device(machine, 2);
    on_device.upload(entries, r.stream);
    const pulseinfer::block_table device_table{on_device.data(), 1, 2};
    break_next(job::copy);
    CHECK(writer.append(0, {&row, 1}, table, device_table, r.stream));
    writer.sync_layer(0);
    CHECK(writer.stored_blocks(0, 0) < 2);
    CHECK(writer.append(0, {&row, 1}, table, device_table, r.stream));
    writer.sync_layer(0);
    CHECK(writer.stored_blocks(0, 0) == 2);
    machine.sync(r.stream);
  });
}

TEST_CASE("fault 46: a transfer that fails without memory to say so ends all the same") {
  if (!test::counts_allocations() || std::string_view(test::backend_name) != "host") return;
  each([](backend machine) {
    for (int nth = 1; nth <= 3; ++nth) {
      CAPTURE(nth);
      rig r(machine);
      const auto id = r.stored(1, blocks(2));
      const auto ends = [&](const char* what, auto start) {
        CAPTURE(what);
        machine.arm_poll(nth, [] { test::fail_allocation(1); });  // of the worker that asks
        auto t = start();
        try {
          t.sync();
        } catch (const std::exception&) {  // of what kind depends on what there was memory for
        }
        CHECK(t.is_final());
        machine.arm(job::poll, 1 << 30, {});
      };
      const rig::targets units = {{0, 0, 3}, {0, 1, 4}};
      ends("recall", [&] { return r.recall(0, id, units).value(); });
      const auto anew = r.store.open_sequence().value();
      ends("offload", [&] { return r.mover.offload(0, {&anew, 1}, units, r.stream).value(); });
      CHECK(r.store.counts().writing == 0);
    }
  });
}

TEST_CASE("fault 46: pages whose lending fails are not lent, and can be lent then") {
  each([](backend machine) {
    int failed = 0;
    for (int nth = 1; nth < 20; ++nth) {
      CAPTURE(nth);
      rig r(machine);
      const auto id = r.stored(1, blocks(6));
      const ints lent = {10, 11, 12, 13};
      machine.arm_throw(job::kernel, nth);
      try {
        r.hot.lend(0, lent, r.stream);
      } catch (const device_error&) {
        ++failed;
        CHECK(r.hot.pages_of(0).empty());
        CHECK_THROWS_AS((void)r.resolve(0, {0}, {{0, 5}}), std::invalid_argument);
        r.hot.lend(0, lent, r.stream);
      }
      const bool is_over = !machine.has_struck();
      machine.arm(job::kernel, 1 << 30, {});
      const auto step = r.resolve(0, {0}, {{0, 5}});
      REQUIRE(step.has_value());
      auto t = r.mover.recall(*step, {&id, 1}, r.stream).value();
      t.sync();
      CHECK(t.report().moved == 2);
      machine.sync(r.stream);
      if (is_over) break;
    }
    CHECK(failed >= 4);
  });
}

TEST_CASE("fault 46: an engine that cannot be had leaves nothing behind, and can be had later") {
  test::each_backend([](const test::backend& base) {
    scarce_backend machine(base);
    test::engine_attempts<scarce_backend> attempts(machine);
    const int out = machine.out();
    int failures = 0;
    for (bool is_made = false; !is_made;) {
      CAPTURE(failures);
      machine.fail_at(failures + 1);
      try {
        attempts.make_one([&] { is_made = true; });
      } catch (const pulseinfer::out_of_memory&) {
        ++failures;
      }
      CHECK(is_made != machine.has_failed());
      CHECK(machine.out() == out);
    }
    machine.fail_at(0);
    CHECK(failures > 20);  // two directions of two streams, three chunks, two transfers
    CHECK(attempts.at_rest());
  });
}

TEST_CASE(
    "fault 46: who gets the chunk of a failed transfer comes behind what was enqueued for it") {
  // The scatter of the first transfer is enqueued and waits for the engine when the call behind it
  // fails. It reads the chunk, pages and all: a second transfer's, if that filled it by then.
  each([](backend machine) {
    rig r(machine, {.chunk_units = 1});
    const auto id = r.stored(1, blocks(6));
    auto other = machine.make_stream(pulseinfer::stream_priority::normal);
    constexpr auto size = static_cast<std::size_t>(rig::geometry.unit_bytes());
    rig::targets units;
    for (std::int32_t b = 1; b < 6; ++b) {
      units.push_back({0, b, 20 + b});
      r.pages.put(0, 20 + b, stamp(9, 0, b));
    }
    r.pages.upload(r.stream);
    for (std::int32_t b = 1; b < 6; ++b) r.pages.put(0, 20 + b, test::unit_bytes(size));
    {
      test::hold<test::backend> readers(machine, other);
      for (std::int32_t b = 1; b < 6; ++b) r.pages.read_page(0, 20 + b, other);
      test::hold<test::backend> writers(machine, r.stream);
      machine.arm_throw(job::record, 3);  // the call, the DMA, the scatter
      auto failing = r.recall(0, id, {{0, 0, 10}}).value();
      machine.sync_until([&] { return machine.has_struck(); });
      auto next = r.mover.recall_units(0, {&id, 1}, units, other).value();
      writers.release();
      CHECK_THROWS_AS(failing.sync(), device_error);
      readers.release();
      next.sync();
      CHECK(next.report().moved == 5);
    }
    machine.sync(other);
    for (std::int32_t b = 1; b < 6; ++b) CHECK((r.pages.get(0, 20 + b) == stamp(9, 0, b)));
    r.pages.download(r.stream);
    for (std::int32_t b = 1; b < 6; ++b) CHECK((r.pages.get(0, 20 + b) == stamp(1, 0, b)));
  });
}
