// SPDX-License-Identifier: Apache-2.0
/// @file
/// Requests of a recorded service, from a file of one JSON object a line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace pulseinfer_bench {

/// The blocks of each request in the order of the prefix: [requests][blocks]; equal ids are equal
/// prefixes.
using request_trace = std::vector<std::vector<std::uint64_t>>;

/// The numbers of the array "hash_ids" of each line. No general JSON: the arrays hold integers of
/// at least 0, and no other member's text contains that name.
/// @throws std::runtime_error  if the file cannot be read, or a line has no such array
inline request_trace read_trace(const std::string& path) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error("cannot read " + path);
  request_trace trace;
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty()) continue;
    const std::string wrong =
        path + ", line " + std::to_string(trace.size() + 1) + ": no array hash_ids of numbers";
    const std::size_t name = line.find("\"hash_ids\"");
    const std::size_t begin = name == std::string::npos ? name : line.find('[', name);
    if (begin == std::string::npos) throw std::runtime_error(wrong);
    std::vector<std::uint64_t>& ids = trace.emplace_back();
    const char* at = line.c_str() + begin + 1;
    while (true) {
      while (*at == ' ' || *at == ',') ++at;
      if (*at == ']') break;
      char* end = nullptr;
      ids.push_back(std::strtoull(at, &end, 10));
      if (end == at || *at == '-') throw std::runtime_error(wrong);
      at = end;
    }
  }
  return trace;
}

/// The trace that the environment variable PULSEINFER_TRACE names, read once; null where it names
/// none.
inline const request_trace* environment_trace() {
  static const std::optional<request_trace> trace = []() -> std::optional<request_trace> {
    const char* path = std::getenv("PULSEINFER_TRACE");
    if (path == nullptr || *path == '\0') return std::nullopt;
    return read_trace(path);
  }();
  return trace ? &*trace : nullptr;
}

}  // namespace pulseinfer_bench
