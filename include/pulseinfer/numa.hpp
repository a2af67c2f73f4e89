// SPDX-License-Identifier: Apache-2.0
/// @file
/// Which CPUs are near which memory.
#pragma once

#include <cstddef>
#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

namespace detail {

/// The numbers of a list as Linux writes it ("0-3,8,10-11\n"), ascending; nothing if it is no such
/// list. An empty one has no numbers.
[[nodiscard]] inline std::optional<std::vector<int>> parse_cpu_list(std::string_view text) {
  constexpr int most = 1 << 16;
  std::size_t at = 0;
  const auto number = [&]() -> int {  // -1: there is none
    if (at == text.size() || text[at] < '0' || text[at] > '9') return -1;
    int value = 0;
    for (; at < text.size() && text[at] >= '0' && text[at] <= '9'; ++at) {
      value = value * 10 + (text[at] - '0');
      if (value > most) return -1;
    }
    return value;
  };
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  std::vector<int> found;
  while (at < text.size()) {
    const int first = number();
    int last = first;
    if (at < text.size() && text[at] == '-') {
      ++at;
      last = number();
    }
    if (first < 0 || last < first || (!found.empty() && first <= found.back())) return std::nullopt;
    for (int i = first; i <= last; ++i) found.push_back(i);
    if (at == text.size()) break;
    if (text[at] != ',' || at + 1 == text.size()) return std::nullopt;
    ++at;
  }
  return found;
}

/// The list in a file, where it can be read and is one.
[[nodiscard]] inline std::optional<std::vector<int>> read_cpu_list(const std::string& path) {
  std::FILE* const file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return std::nullopt;
  std::string text;
  char part[256];
  for (std::size_t n = 0; (n = std::fread(part, 1, sizeof part, file)) > 0;) text.append(part, n);
  std::fclose(file);
  return parse_cpu_list(text);
}

/// A list as Linux writes it: "0-3,8".
[[nodiscard]] inline std::string text_of_cpus(const std::vector<int>& cpus) {
  std::string text;
  for (std::size_t i = 0; i < cpus.size(); ++i) {
    std::size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(cpus[i]);
    if (last > i) text += '-';  // (not "-" + ...: GCC 12 warns of its own header there)
    if (last > i) text += std::to_string(cpus[last]);
    i = last;
  }
  return text.empty() ? "none" : text;
}

}  // namespace detail

/// The CPUs of a NUMA node, ascending: for `host_options::cpus` and `cuda_options::cpus`, so that
/// the workers run beside the memory that they copy (a GPU's own node is in its `numa_node` file
/// below /sys/bus/pci/devices).
///
/// A process that is confined to some CPUs may not be allowed all of them.
///
/// @param node  as the kernel numbers them; a machine without NUMA has node 0 alone
/// @throws std::invalid_argument  if there is no such node, or it is memory without CPUs; the text
///                                names the nodes that there are
/// @par Cost     reads one file
/// @par Threads  any
[[nodiscard]] inline std::vector<int> cpus_of_numa_node(int node) {
  const std::string nodes = "/sys/devices/system/node/";
  std::optional<std::vector<int>> cpus;
  if (node >= 0) cpus = detail::read_cpu_list(nodes + "node" + std::to_string(node) + "/cpulist");
  if (!cpus) {
    const auto online = detail::read_cpu_list(nodes + "online");
    detail::expects(false, "cpus_of_numa_node: node is ", node, ", expected one of those online: ",
                    online ? detail::text_of_cpus(*online) : "none, the system does not list any");
  }
  detail::expects(!cpus->empty(), "cpus_of_numa_node: node is ", node,
                  ", which is memory without CPUs");
  return *cpus;
}

}  // namespace pulseinfer
