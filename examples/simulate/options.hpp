// SPDX-License-Identifier: Apache-2.0
/// @file
/// The command line of the simulation.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <string_view>

#include "setting.hpp"
#include "studied.hpp"

namespace simulate {

struct options {
  setting base;
  std::filesystem::path out = ".";
  std::string overlap;              ///< a trace of misses, see overlap.hpp; none where empty
  std::string arrivals = "bursty";  ///< or steady, or a trace, see arrivals.hpp
  std::uint64_t seed = 1;           ///< of the arrivals
  bool quick = false;               ///< without the sweep and the server
};

namespace detail {

inline double number(std::string_view option, const char* text, double least, double most) {
  char* end = nullptr;
  const double value = std::strtod(text, &end);
  if (end == text || *end != '\0' || !(value >= least) || !(value <= most)) {
    throw std::invalid_argument("simulate: " + std::string(option) + " is '" + text +
                                "', expected a number from " + std::to_string(least) + " to " +
                                std::to_string(most));
  }
  return value;
}
template <class T, class FromFile>
T named(std::string_view what, const std::string& name, const std::vector<T>& known,
        FromFile from_file) {
  for (const T& one : known) {
    if (one.name == name) return one;
  }
  if (std::filesystem::is_regular_file(name)) return from_file(name);
  std::string names;
  for (const T& one : known) names += (names.empty() ? "" : ", ") + one.name;
  throw std::invalid_argument("simulate: " + std::string(what) + " is '" + name +
                              "', expected a file or one of " + names);
}

}  // namespace detail

/// @throws std::invalid_argument  naming the option and what it may be
inline options parse(int argc, char** argv) {
  options o;
  o.base.machine = machines().front();
  o.base.model = models().front();
  o.base.kv.ahead = studied.foretold_of_misses();
  for (int i = 1; i < argc; ++i) {
    const std::string_view option = argv[i];
    if (option == "--quick") {
      o.quick = true;
      continue;
    }
    if (i + 1 == argc) {
      throw std::invalid_argument("simulate: " + std::string(option) +
                                  ": unknown, or without its value; there are --quick and, with a "
                                  "value, --machine, --model, "
                                  "--context, --budget, --miss, --ahead, --overlap, --arrivals, "
                                  "--seed, --out");
    }
    const char* const value = argv[++i];
    if (option == "--machine") {
      o.base.machine = detail::named(option, value, machines(), machine_from);
    } else if (option == "--model") {
      o.base.model = detail::named(option, value, models(), model_from);
    } else if (option == "--context") {
      o.base.context = detail::number(option, value, 16, 1 << 24);
    } else if (option == "--budget") {
      o.base.budget = static_cast<std::int32_t>(detail::number(option, value, 1, 4096));
      o.base.pages = 2 * o.base.budget;
    } else if (option == "--miss") {
      o.base.kv.miss = detail::number(option, value, 0, 1);
    } else if (option == "--ahead") {
      o.base.kv.ahead = detail::number(option, value, 0, 1);
    } else if (option == "--overlap") {
      o.overlap = value;
    } else if (option == "--arrivals") {
      o.arrivals = value;
      if (o.arrivals != "steady" && o.arrivals != "bursty" &&
          !std::filesystem::is_regular_file(o.arrivals)) {
        throw std::invalid_argument("simulate: --arrivals is '" + o.arrivals +
                                    "', expected steady, bursty or a file");
      }
    } else if (option == "--seed") {
      o.seed = static_cast<std::uint64_t>(detail::number(option, value, 0, 1e15));
    } else if (option == "--out") {
      o.out = value;
    } else {
      throw std::invalid_argument("simulate: there is no option " + std::string(option));
    }
  }
  if (o.base.model.weight_bytes() > static_cast<double>(o.base.machine.profile.device_bytes)) {
    o.base.ranks = 8;
    o.base.machine.host_bytes = 2e12;
  }
  return o;
}

}  // namespace simulate
