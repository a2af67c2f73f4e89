// SPDX-License-Identifier: Apache-2.0
/// @file
/// The CPUs of a NUMA node, and the lists that Linux writes.
#include "pulseinfer/numa.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using pulseinfer::cpus_of_numa_node;
using pulseinfer::detail::parse_cpu_list;
using pulseinfer::detail::text_of_cpus;
using list = std::vector<int>;

std::string refusal_of(int node) {
  try {
    (void)cpus_of_numa_node(node);
  } catch (const std::invalid_argument& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("numa: a list of CPUs is read as Linux writes it") {
  CHECK(parse_cpu_list("0\n") == list{0});
  CHECK(parse_cpu_list("0-3\n") == list{0, 1, 2, 3});
  CHECK(parse_cpu_list("0-1,4,6-8") == list{0, 1, 4, 6, 7, 8});
  CHECK(parse_cpu_list("7-7") == list{7});
  CHECK(parse_cpu_list("\n") == list{});  // memory without CPUs
  CHECK(parse_cpu_list("") == list{});
}

TEST_CASE("numa: what is no list of CPUs is none") {
  for (const char* text : {"a", "-", "-1", "1-", "3-1", "0,", ",0", "0,,1", "0 1", "1,0", "0-2,2",
                           "99999999999", "0-99999999", "0x1", "0-1-2", "\n0"}) {
    CAPTURE(text);
    CHECK(parse_cpu_list(text) == std::nullopt);
  }
}

TEST_CASE("numa: a list is written as it is read") {
  for (const char* text : {"0", "0-3", "0-1,4,6-8", "5,7,9"}) {
    CHECK(text_of_cpus(*parse_cpu_list(text)) == text);
  }
  CHECK(text_of_cpus({}) == "none");
}

TEST_CASE("numa: the nodes of this machine have CPUs, a node that is none is refused") {
  const auto nodes = pulseinfer::detail::read_cpu_list("/sys/devices/system/node/online");
  const int none = nodes && !nodes->empty() ? nodes->back() + 1 : 0;
  int with_cpus = 0;
  for (const int node : nodes.value_or(list{})) {
    CAPTURE(node);
    if (!refusal_of(node).empty()) continue;
    ++with_cpus;
    const list cpus = cpus_of_numa_node(node);
    CHECK(!cpus.empty());
    CHECK(std::is_sorted(cpus.begin(), cpus.end()));
    CHECK(cpus.front() >= 0);
  }
  if (nodes) CHECK(with_cpus > 0);
  const std::string those = nodes ? text_of_cpus(*nodes) : "none, the system does not list any";
  for (const int node : {-1, none, 4'000}) {
    CHECK(refusal_of(node) == "cpus_of_numa_node: node is " + std::to_string(node) +
                                  ", expected one of those online: " + those);
  }
}
