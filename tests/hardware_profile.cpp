// SPDX-License-Identifier: Apache-2.0
/// @file
/// Numbers of a machine that cannot be.
#include "pulseinfer/backend/hardware_profile.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace {

using pulseinfer::hardware_profile;
using pulseinfer::detail::check_profile;

constexpr std::pair<const char*, double hardware_profile::*> speeds[] = {
    {"dram_bytes_per_second", &hardware_profile::dram_bytes_per_second},
    {"link_bytes_per_second", &hardware_profile::link_bytes_per_second},
    {"hbm_bytes_per_second", &hardware_profile::hbm_bytes_per_second},
    {"worker_bytes_per_second", &hardware_profile::worker_bytes_per_second}};

}  // namespace

TEST_CASE("hardware profile: the default is a machine, and so is the slowest") {
  CHECK_NOTHROW(check_profile({}));
  hardware_profile slowest;
  for (const auto& [name, speed] : speeds) slowest.*speed = 1;
  slowest.workers = 1;
  CHECK_NOTHROW(check_profile(slowest));
  slowest.workers = 1024;
  CHECK_NOTHROW(check_profile(slowest));
}

TEST_CASE("hardware profile: a speed that is none is refused by its name") {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  for (const auto& named : speeds) {
    const char* name = named.first;  // clang 14 captures no structured binding
    for (const double value :
         {0.0, 0.5, -1.0, infinity, -infinity, std::numeric_limits<double>::quiet_NaN()}) {
      CAPTURE(name);
      CAPTURE(value);
      hardware_profile profile;
      profile.*named.second = value;
      CHECK_THROWS_WITH_AS(check_profile(profile),
                           doctest::Contains((std::string(name) + " is ").c_str()),
                           std::invalid_argument);
    }
  }
}

TEST_CASE("hardware profile: a number of workers that cannot be is refused") {
  for (const int workers : {0, -1, 1025}) {
    CAPTURE(workers);
    CHECK_THROWS_WITH_AS(check_profile({.workers = workers}),
                         doctest::Contains("expected 1 to 1024"), std::invalid_argument);
  }
}

TEST_CASE("hardware profile: a poll that takes no time is refused: who polls would wait for ever") {
  CHECK_NOTHROW(check_profile({.poll_ns = 1}));
  CHECK_THROWS_WITH_AS(check_profile({.poll_ns = 0}), doctest::Contains("poll_ns is 0"),
                       std::invalid_argument);
}
