// SPDX-License-Identifier: Apache-2.0
/// @file
/// What layers recall: averages by rate, whatever order steps come in.
#include "pulseinfer/layer_activity.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support/allocations.hpp"

namespace {

using doctest::Approx;
using pulseinfer::layer_activity;

std::vector<double> read(const layer_activity& activity, double now) {
  std::vector<double> all(static_cast<std::size_t>(activity.layers()));
  activity.read(all, now);
  return all;
}

}  // namespace

TEST_CASE("layer_activity: a steady layer reads its rate, and a silent one fades") {
  layer_activity activity(3, 0.5);
  CHECK(read(activity, 1) == std::vector<double>{0, 0, 0});
  for (int i = 0; i < 1'000; ++i) {
    CHECK(activity.record(1, {.recalled_bytes = 100, .selected = 64, .missed = 16}, 0.01 * i));
    CHECK(activity.record(2, {.recalled_bytes = 0, .selected = 64, .missed = 0}, 0.01 * i));
  }
  const std::vector<double> now = read(activity, 9.99);
  CHECK(now[0] == 0);
  CHECK(now[1] == Approx(10'000).epsilon(0.02));
  CHECK(now[2] == 0);
  CHECK(activity.miss_rate(0) == 0);
  CHECK(activity.miss_rate(1) == Approx(0.25));
  CHECK(activity.miss_rate(2) == 0);
  CHECK(read(activity, 9.99 + 0.5)[1] == Approx(now[1] * std::exp(-1.0)));
  CHECK(activity.miss_rate(1) == Approx(0.25));
}

TEST_CASE("layer_activity: a moment before the last one counts as that one") {
  layer_activity activity(1, 1);
  CHECK(activity.record(0, {.recalled_bytes = 10, .selected = 1, .missed = 1}, 5));
  CHECK(activity.record(0, {.recalled_bytes = 10, .selected = 1, .missed = 1}, 3));
  CHECK(read(activity, 4)[0] == Approx(20));
  CHECK(read(activity, 6)[0] == Approx(20 * std::exp(-1.0)));
}

TEST_CASE("layer_activity: nonsense is refused and counted") {
  layer_activity activity(2, 1);
  CHECK(activity.record(0, {.recalled_bytes = 8, .selected = 4, .missed = 2}, 1));
  const double no_number = std::numeric_limits<double>::quiet_NaN();
  CHECK(!activity.record(0, {.recalled_bytes = -1}, 1));
  CHECK(!activity.record(0, {.selected = 1, .missed = 2}, 1));
  CHECK(!activity.record(0, {.selected = 1, .missed = -1}, 1));
  CHECK(!activity.record(0, {.selected = -1, .missed = -1}, 1));
  CHECK(!activity.record(0, {.recalled_bytes = 1}, no_number));
  CHECK(!activity.record(0, {.recalled_bytes = 1}, -1));
  CHECK(!activity.record(0, {.recalled_bytes = 1}, std::numeric_limits<double>::infinity()));
  CHECK(activity.refused() == 7);
  CHECK(read(activity, 1) == std::vector<double>{8, 0});
  CHECK(activity.miss_rate(0) == 0.5);
  CHECK_THROWS_WITH_AS(activity.record(2, {}, 1), "layer_activity: layer is 2, expected 0 to 1",
                       std::out_of_range);
  CHECK_THROWS_AS(activity.record(-1, {}, 1), std::out_of_range);
  CHECK_THROWS_AS((void)activity.miss_rate(2), std::out_of_range);
  std::vector<double> room(3);
  CHECK_THROWS_WITH_AS(activity.read(room, 1),
                       "layer_activity: there is room for 3 layers, expected 2",
                       std::invalid_argument);
  CHECK_THROWS_AS((void)read(activity, no_number), std::invalid_argument);
  CHECK_THROWS_WITH_AS(layer_activity(0), "layer_activity: layers is 0, expected 1 to 65536",
                       std::invalid_argument);
  CHECK_THROWS_AS(layer_activity(1, 0), std::invalid_argument);
  CHECK_THROWS_AS(layer_activity(1, no_number), std::invalid_argument);
}

TEST_CASE("layer_activity: ranks merge to the same, in any order") {
  const std::vector<double> a = {1, 5, 0}, b = {2, 4, 0};
  std::vector<double> one = a, other = b;
  pulseinfer::merge_activity(one, b);
  pulseinfer::merge_activity(other, a);
  CHECK(one == std::vector<double>{2, 5, 0});
  CHECK(other == one);
  pulseinfer::merge_activity(other, one);
  CHECK(other == one);
  std::vector<double> longer(4);
  CHECK_THROWS_AS(pulseinfer::merge_activity(longer, a), std::invalid_argument);
}

TEST_CASE("layer_activity: threads record while another one reads, without an allocation") {
  layer_activity activity(4, 1e3);
  std::vector<double> all(4);
  const std::uint64_t before = test::allocations();
  for (int i = 0; i < 100; ++i) {
    activity.record(i % 4, {.recalled_bytes = 0}, 1e-3 * i);
    activity.read(all, 1);
  }
  CHECK(test::allocations() == before);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (std::int32_t layer = 0; layer < 4; ++layer) {
    threads.emplace_back([&activity, layer] {
      for (int i = 0; i < 1'000; ++i) {
        activity.record(layer % 2, {.recalled_bytes = 1, .selected = 2, .missed = 1}, 1);
      }
    });
  }
  for (int i = 0; i < 100; ++i) activity.read(all, 1);
  for (std::thread& t : threads) t.join();
  activity.read(all, 1);
  CHECK(all[0] == Approx(2));
  CHECK(all[1] == Approx(2));
  CHECK(activity.miss_rate(1) == 0.5);
}
