// SPDX-License-Identifier: Apache-2.0
/// @file
/// Requests of a public LLM service, as Mooncake released them: who asked for which blocks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace pulseinfer_bench {

struct trace_request {
  std::int64_t timestamp = 0;      ///< of its arrival, ms
  std::int64_t input_length = 0;   ///< tokens
  std::int64_t output_length = 0;  ///< tokens
  /// One for each 512 tokens of the input, the last one may hold fewer. Equal ids are equal blocks
  /// behind equal blocks.
  std::vector<std::int32_t> hash_ids;
};

/// The file that PULSEINFER_TRACE names, null if the variable is not set.
inline const char* conversation_trace_path() {
  const char* const path = std::getenv("PULSEINFER_TRACE");
  return path != nullptr && *path != '\0' ? path : nullptr;
}

/// Reads a trace: one JSON object of these four fields a line, no other numbers.
/// @throws std::runtime_error  naming the file, and the line where it is not so
inline std::vector<trace_request> read_conversation_trace(const std::string& path) {
  struct closer {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  const std::unique_ptr<std::FILE, closer> file(std::fopen(path.c_str(), "rb"));
  if (!file) throw std::runtime_error("the trace " + path + " cannot be read");
  std::string text;
  char part[1 << 16];
  while (const std::size_t size = std::fread(part, 1, sizeof part, file.get())) {
    text.append(part, size);
  }

  std::vector<trace_request> requests;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    begin = end + 1;
    if (line.empty()) continue;
    // What stands behind "key": in the line.
    const auto behind = [&](const char* key) {
      std::string quoted = "\"";
      quoted.append(key).append("\":");
      const std::size_t at = line.find(quoted);
      if (at == std::string::npos) {
        throw std::runtime_error(path + ":" + std::to_string(requests.size() + 1) + ": no " + key);
      }
      return line.c_str() + at + quoted.size();
    };
    trace_request request;
    request.timestamp = std::strtoll(behind("timestamp"), nullptr, 10);
    request.input_length = std::strtoll(behind("input_length"), nullptr, 10);
    request.output_length = std::strtoll(behind("output_length"), nullptr, 10);
    const char* at = std::strchr(behind("hash_ids"), '[');
    while (at != nullptr && *at != ']' && *at != '\0') {
      char* number_end = nullptr;
      const long long id = std::strtoll(at + 1, &number_end, 10);
      if (number_end == at + 1) break;  // an empty list
      request.hash_ids.push_back(static_cast<std::int32_t>(id));
      at = number_end;
    }
    requests.push_back(std::move(request));
  }
  return requests;
}

}  // namespace pulseinfer_bench
