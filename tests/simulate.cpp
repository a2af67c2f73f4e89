// SPDX-License-Identifier: Apache-2.0
/// @file
/// Laws of the simulation in examples/simulate, on a model of a few layers.
#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "../examples/simulate/bound.hpp"
#include "../examples/simulate/decoder.hpp"
#include "../examples/simulate/setting.hpp"
#include "../examples/simulate/sweep.hpp"
#include "../examples/simulate/table.hpp"

namespace {

using simulate::decoded;
using simulate::setting;

/// Four layers, each like those of an 8B model.
setting small(std::int32_t streams, double miss, double ahead) {
  setting s;
  s.machine = simulate::machines().front();
  s.model = simulate::models().front();
  s.model.layers = 4;
  s.streams = streams;
  s.context = 32768;
  s.budget = 32;
  s.kv = {miss, ahead};
  return s;
}
constexpr std::int32_t steps = 3;

decoded run(const setting& s, const simulate::policy& how = {}) {
  return simulate::decoder(s, how).run(steps, simulate::even_misses(s));
}
double compute_seconds(const setting& s) {
  const pulseinfer::layer_work w = s.work();
  return s.model.layers * (w.weight_bytes + s.streams * w.request_bytes) /
         s.machine.profile.hbm_bytes_per_second;
}

/// A file of keys that is gone again.
struct key_file {
  std::string path;
  explicit key_file(const std::string& text) {
    static int here = 0;
    const auto now = std::filesystem::file_time_type::clock::now().time_since_epoch().count();
    path = (std::filesystem::temp_directory_path() /
            ("pulseinfer_keys_" + std::to_string(now) + "_" +
             std::to_string(reinterpret_cast<std::uintptr_t>(&here)) + ".txt"))
               .string();
    std::ofstream(path) << text;
  }
  key_file(const key_file&) = delete;
  key_file& operator=(const key_file&) = delete;
  ~key_file() {
    std::error_code ignored;
    std::filesystem::remove(path, ignored);
  }
};
/// What reading says, after the path; "" where it says nothing.
template <class Read>
std::string complaint(Read read, const std::string& text) {
  const key_file f(text);
  try {
    (void)read(f.path);
  } catch (const std::invalid_argument& e) {
    const std::string said = e.what();
    return said.rfind(f.path, 0) == 0 ? said.substr(f.path.size()) : "no path: " + said;
  }
  return "";
}
bool begins(const std::string& text, const std::string& with) {
  return text.rfind(with, 0) == 0;
}
std::string model_complaint(const std::string& text) {
  return complaint(simulate::model_from, text);
}
std::string machine_complaint(const std::string& text) {
  return complaint(simulate::machine_from, text);
}

TEST_CASE("simulate: a model of a file is what its lines say") {
  const std::string shape =
      "# a comment\n\nname = mine, of two words\nlayers = 2\nhidden = 256\n  heads = 4\n"
      "kv_heads = 2\nhead_dim = 64\nffn = 512\n";
  const key_file f(shape + "vocabulary = 1000");
  const simulate::model m = simulate::model_from(f.path);
  CHECK(m.name == "mine, of two words");
  CHECK(m.source == "the file " + f.path);
  CHECK(m.layers == 2);
  CHECK(m.hidden == 256);
  CHECK(m.heads == 4);
  CHECK(m.kv_heads == 2);
  CHECK(m.head_dim == 64);
  CHECK(m.ffn == 512);
  CHECK(m.vocabulary == 1000);
  CHECK(m.text() ==
        "2 layers, 4 query heads, 2 KV heads of 64 channels, hidden 256 wide, MLP 512 wide, 1000 "
        "tokens");

  CHECK(model_complaint(shape) == ": no line gives vocabulary");
  CHECK(model_complaint("") == ": no line gives layers");
  CHECK(model_complaint("# size\nlayer = 2\n") == ":2: there is no such key: layer = 2");
  CHECK(model_complaint("layers 2\n") == ":1: expected key = value: layers 2");
  CHECK(model_complaint("layers = many\n") == ":1: expected one number: layers = many");
  CHECK(model_complaint("layers =\n") == ":1: expected one number: layers =");
  CHECK(model_complaint("layers = 2 3\n") == ":1: expected one number: layers = 2 3");
  CHECK(model_complaint("layers = nan\n") == ":1: expected one number: layers = nan");
  CHECK(model_complaint("\n\nlayers = 2.5\n") == ":3: expected a whole number: layers = 2.5");
  CHECK(begins(model_complaint("layers = 0\n"), ":1: expected 1 to "));
  CHECK(begins(model_complaint("layers = -1\n"), ":1: expected 1 to "));
  CHECK(begins(model_complaint("layers = 1e9\n"), ":1: expected 1 to "));
  CHECK_THROWS_AS((void)simulate::model_from("/nowhere/pulseinfer"), std::runtime_error);
}

TEST_CASE("simulate: a machine of a file is the first one but for its lines") {
  const simulate::machine first = simulate::machines().front();
  const key_file f("link_bytes_per_second = 25.5e9\nworkers = 3\ndevice_bytes = 4e10\n");
  const simulate::machine m = simulate::machine_from(f.path);
  CHECK(m.name == f.path);
  CHECK(m.profile.link_bytes_per_second == 25.5e9);
  CHECK(m.profile.workers == 3);
  CHECK(m.profile.device_bytes == 40'000'000'000u);
  CHECK(m.profile.hbm_bytes_per_second == first.profile.hbm_bytes_per_second);
  CHECK(m.host_bytes == first.host_bytes);

  CHECK(machine_complaint("") == "");
  CHECK(machine_complaint("# none\nlink = 1\n") == ":2: there is no such key: link = 1");
  CHECK(machine_complaint("workers = 0\n") == ":1: expected 1 to 1024: workers = 0");
  CHECK(machine_complaint("poll_ns = 0.5\n") == ":1: expected a whole number: poll_ns = 0.5");
  CHECK(begins(machine_complaint("host_bytes = -1\n"), ":1: expected 0 to "));
  CHECK_THROWS_AS((void)simulate::machine_from("/nowhere/pulseinfer"), std::runtime_error);
  const key_file still("link_bytes_per_second = 0\n");  // in range, and no machine
  CHECK_THROWS_AS((void)simulate::machine_from(still.path), std::invalid_argument);
}

TEST_CASE("simulate: the guide's formulas, worked out by hand") {
  setting s;
  s.machine = simulate::machines().front();
  s.model = simulate::models().front();  // 32 layers, blocks of 64 KiB, 64 of them chosen
  for (const simulate::system& one : simulate::systems(s)) {
    CAPTURE(one.key);
    const double ms = simulate::formula_ms(one);
    if (one.key == "naive" || one.key == "prefetch") {
      // 8 streams: 512 blocks are 1/32 GiB, 4.1667 ms at 7.5, and 10.24 ms for the copies.
      CHECK(ms == doctest::Approx(32 * (1000.0 / 32 / 7.5 + 10.24)));
    } else if (one.key == "guide") {
      CHECK(ms == doctest::Approx(272));  // 1.5 ms a layer is hidden by its 8.5 of compute
    } else {
      CHECK(ms == 0);
    }
  }
  // The transfers of 16 streams alone: 1/16 GiB a layer.
  CHECK(simulate::guide_formula_ms(s, 16, false, false) ==
        doctest::Approx(32 * (62.5 * (1 / 200.0 + 1 / 56.0 + 1 / 3350.0) + 0.05)));
}

TEST_CASE("simulate: p of misses where misses move, of a list where all of it does") {
  CHECK(simulate::studied.foretold_of_misses() == doctest::Approx(0.562).epsilon(0.001));
  const simulate::locality all = simulate::with_vain({0.2, 0.5}, 0.1);
  CHECK(all.miss == doctest::Approx(0.3));
  CHECK(all.miss * (1 - all.ahead) == doctest::Approx(0.1));  // as late as before
  CHECK(simulate::with_vain({0, 0.9}, 0).ahead == 0);

  setting s;
  s.machine = simulate::machines().front();
  s.model = simulate::models().front();
  s.kv = {0.25, 0.4};
  std::set<std::string> keys;
  for (const simulate::system& one : simulate::systems(s)) {
    CAPTURE(one.key);
    CHECK(keys.insert(one.key).second);
    CHECK(!one.what.empty());
    const simulate::locality& kv = one.setting.kv;
    if (one.key == "prefetch" || one.key == "ours_no_hot_buffer") {
      CHECK(kv.miss == 1);
      CHECK(kv.ahead == simulate::studied.foretold);
    } else if (one.key == "ours" || one.key == "ours_one_group" || one.key == "ours_per_block") {
      CHECK(kv.miss == 0.25);
      CHECK(kv.ahead == 0.4);
    }
  }
  CHECK(keys.count("ours") == 1);
}

TEST_CASE("simulate: the guide's contradictions, in figures") {
  const std::vector<std::string> lines = simulate::contradictions();
  const auto says = [&](const std::string& what) {
    return std::any_of(lines.begin(), lines.end(), [&](const std::string& line) {
      return line.find(what) != std::string::npos;
    });
  };
  for (const char* const what :
       {"597 tok/s", "has 1.73 times; ArkVale 1.36", "2.15 GB, 38.3 ms", "speed-up of 1.00",
        "64 KiB", "41.9 GB", "3 streams", "141 GB", "1/16 of the cache, 17.2 GB"}) {
    CHECK_MESSAGE(says(what), what);
  }
}

TEST_CASE("simulate: shapes give the bytes that the models have") {
  const auto models = simulate::models();
  CHECK(models[0].weight_bytes() == doctest::Approx(16.06e9).epsilon(0.002));
  CHECK(models[1].weight_bytes() == doctest::Approx(141.1e9).epsilon(0.002));
  CHECK(models[2].weight_bytes() == doctest::Approx(145.4e9).epsilon(0.002));
  CHECK(models[0].unit_bytes() == 65536);  // not the 32 KiB of the guide's comment
  CHECK(models[1].kv_bytes(128000) == doctest::Approx(41.9e9).epsilon(0.002));  // nor its 33.5 GB
}

TEST_CASE("simulate: how many streams fit") {
  setting s = small(1, 0, 0);
  s.model = simulate::models().front();
  s.context = 131072;
  s.budget = 64;
  CHECK(s.streams_that_fit(false) == 3);
  CHECK(s.streams_that_fit(true) == 29);  // of 512 GB
  s.machine.host_bytes = 10e9;
  CHECK(s.streams_that_fit(true) == 0);
  s.machine.profile.device_bytes = 16'000'000'000;
  CHECK(s.streams_that_fit(false) == 0);
}

TEST_CASE("simulate: with an infinite link a step is its computation") {
  setting s = small(5, 0.5, 0);
  s.machine.profile.link_bytes_per_second = 1e15;
  s.machine.profile.dram_bytes_per_second = 1e16;
  s.machine.profile.worker_bytes_per_second = 1e15;
  s.machine.profile.copy_start_ns = s.machine.profile.copy_busy_ns = 0;
  s.machine.profile.batched_copy_busy_ns = 0;
  s.machine.profile.task_start_ns = s.machine.profile.kernel_launch_ns = 0;
  const double tpot = run(s).tpot_seconds;
  CHECK(tpot >= 0.9999 * compute_seconds(s));
  CHECK(tpot <= 1.02 * compute_seconds(s));
}

TEST_CASE("simulate: with an infinite device a step is its transfer") {
  setting s = small(8, 1, 0);
  s.budget = 128;
  s.machine.profile.hbm_bytes_per_second = 1e15;
  s.machine.profile.dram_bytes_per_second = 1e16;
  s.machine.profile.worker_bytes_per_second = 1e15;
  s.machine.profile.copy_start_ns = s.machine.profile.copy_busy_ns = 0;
  s.machine.profile.batched_copy_busy_ns = 0;
  s.machine.profile.task_start_ns = s.machine.profile.kernel_launch_ns = 0;
  const double transfer = s.model.layers * s.streams * s.chosen() * s.unit_bytes() /
                          s.machine.profile.link_bytes_per_second;
  const double tpot = run(s).tpot_seconds;
  CHECK(tpot >= 0.9999 * transfer);
  CHECK(tpot <= 1.02 * transfer);
}

TEST_CASE("simulate: no step is below the bound, and a busy link is near it") {
  for (const std::int32_t streams : {1, 6}) {
    for (const double miss : {0.0, 0.25, 1.0}) {
      for (const double ahead : {0.0, 0.9}) {
        const setting s = small(streams, miss, ahead);
        CAPTURE(streams);
        CAPTURE(miss);
        CAPTURE(ahead);
        const double ratio = run(s).tpot_seconds / simulate::lower_bound(s).seconds;
        CHECK(ratio >= 0.999);
        CHECK(ratio <= 1.35);
      }
    }
  }
}

TEST_CASE("simulate: no recall is faster than the bound of one") {
  // On eight of these machines' GPUs that share the DRAM it is slower than the link, gathering is
  // slower yet, and copies of single units cost the DRAM more than they save.
  for (const simulate::machine& m : simulate::machines()) {
    for (const std::size_t which : {std::size_t{0}, std::size_t{1}}) {
      const setting s = simulate::placed(m, simulate::models()[which]);
      CAPTURE(m.name);
      CAPTURE(s.ranks);
      const simulate::recall_bounds bounds(s);
      for (const std::int32_t units : {1, 2, 7, 9, 12, 64, 300, 1200}) {
        CAPTURE(units);
        const auto is_bounded = [&](pulseinfer::transfer_way way,
                                    const pulseinfer::chunk_plans& plans) {
          const setting one = simulate::one_of(s, units);
          simulate::carrier::backend b(pulseinfer::timed{simulate::scaled(one)});
          simulate::carrier c(b, one, {.way = way}, nullptr, 0, {nullptr, &plans});
          const std::uint64_t begin = b.now_ns();
          c.recall(0, {units}).sync();
          CHECK(1e-9 * static_cast<double>(b.now_ns() - begin + 1) >=
                bounds.latency(units));  // whole ns
        };
        is_bounded(pulseinfer::transfer_way::batched, {});
        is_bounded(pulseinfer::transfer_way::staged, {});
        for (const double head : {0.0, 0.01, 0.05, 0.1, 0.3, 0.9}) {
          for (const double chunk : {1.0, 0.5, 0.25, 0.12}) {
            pulseinfer::chunk_plans plans;
            plans.add({.max_units = units, .head = head, .chunks = {chunk}, .parts = 12});
            is_bounded(pulseinfer::transfer_way::staged, plans);
          }
        }
      }
    }
  }
}

TEST_CASE("simulate: what is sooner on the path may take more of the link") {
  // Two groups, of which each recalls while the other computes, and the link has next to no rest.
  setting s = simulate::placed(simulate::machines()[2], simulate::models()[1]);
  s.model.vocabulary = s.model.vocabulary * 6 / s.model.layers;
  s.model.layers = 6;
  s.streams = 16;
  s.context = 8192;
  s.kv = {.miss = 1, .ahead = 0};
  const simulate::bound b = simulate::lower_bound(s);
  CHECK(b.groups == 2);
  CHECK(b.both > 1.01 * std::max({b.compute, b.link, b.path}));
  CHECK(b.seconds == b.both);
  for (const bool tuned : {false, true}) {
    const decoded r =
        simulate::decoder(s, {.moves = {.tuned = tuned}}).run(3, simulate::even_misses(s));
    CHECK(r.tpot_seconds >= b.seconds);
  }
  s.streams = 17;
  CHECK(simulate::lower_bound(s).seconds > b.seconds);
}

TEST_CASE("simulate: units of different rows do not become one copy") {
  // Of blocks whose order has neighbours: of 6 a row's last is next to the first one, if two are chosen.
  for (const std::int32_t blocks : {6, 12, 18, 64}) {
    for (const std::int32_t each : {1, 2, 3, 6}) {
      CAPTURE(blocks);
      CAPTURE(each);
      setting s = small(3, 0.5, 0);
      s.budget = blocks;
      simulate::carrier::backend b(pulseinfer::timed{simulate::scaled(s)});
      simulate::carrier c(b, s, {.way = pulseinfer::transfer_way::batched}, nullptr);
      for (int i = 0; i < 40; ++i) {  // the pages go round
        const std::uint64_t before = b.statistics().host_to_device.operations;
        c.recall(0, {each, 0, each}).sync();
        CHECK(b.statistics().host_to_device.operations - before ==
              2U * static_cast<unsigned>(each));
      }
    }
  }
}

TEST_CASE("simulate: work is conserved") {
  for (const double ahead : {0.0, 0.5, 1.0}) {
    const setting s = small(3, 0.5, ahead);
    const decoded r = run(s);
    CHECK(r.layers_run == std::int64_t{s.streams} * s.model.layers * steps);
    CHECK(r.recalled_bytes ==
          doctest::Approx(s.streams * s.model.layers * s.kv.miss * s.chosen() * s.unit_bytes())
              .epsilon(1e-9));
    CHECK(r.token_seconds.size() == static_cast<std::size_t>(s.streams * (steps - 1)));
  }
}

TEST_CASE("simulate: the same setting, the same result") {
  const setting s = small(5, 0.3, 0.7);
  const decoded a = run(s);
  const decoded b = run(s);
  CHECK(a.end_ns == b.end_ns);
  CHECK(a.token_seconds == b.token_seconds);
  CHECK(a.token_stalls == b.token_stalls);
}

TEST_CASE("simulate: a faster link or less load makes no step slower, beyond 5 percent") {
  for (const std::int32_t streams : {2, 7}) {
    for (const double ahead : {0.0, 0.9}) {
      const setting s = small(streams, 0.5, ahead);
      const double now = run(s).tpot_seconds;
      setting faster = s;
      faster.machine.profile.link_bytes_per_second *= 1.4;
      CHECK(run(faster).tpot_seconds <= 1.05 * now);
      setting less = s;
      less.kv.miss *= 0.6;
      CHECK(run(less).tpot_seconds <= 1.05 * now);
      setting fewer = s;
      --fewer.streams;
      CHECK(run(fewer).tpot_seconds <= 1.05 * now);
    }
  }
}

}  // namespace
