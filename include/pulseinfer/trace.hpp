// SPDX-License-Identifier: Apache-2.0
/// @file
/// A timeline in the Trace Event format, which Perfetto and chrome://tracing open.
#pragma once

#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "pulseinfer/error.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

namespace detail {

/// A JSON string, quotes included. Bytes from 0x20 on are kept: what is valid UTF-8 stays it.
[[nodiscard]] inline std::string json_quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\n':
        out += "\\n";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          char code[8];
          std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
          out += code;
        } else {
          out += c;
        }
    }
  }
  return out += '"';
}

}  // namespace detail

/// Collects named spans on named tracks, and writes them as one JSON object.
///
/// @par Threads  any
/// @par Cost     a span allocates; for demonstrations and diagnosis, not for the hot path
class trace {
 public:
  /// Adds a span; all texts are copied.
  /// @param track       names the row of the timeline
  /// @param name        of the span
  /// @param begin_ns    by a backend's clock
  /// @param end_ns      likewise; before the begin it is taken for the begin
  /// @param value_name  shown with `value` beside the span, where it is not empty
  /// @param value       a number that belongs to the span
  void add(std::string_view track, std::string_view name, std::uint64_t begin_ns,
           std::uint64_t end_ns, std::string_view value_name = {}, std::int64_t value = 0) {
    std::lock_guard lock(mutex_);
    spans_.push_back({index_of(track), std::string(name), begin_ns,
                      end_ns > begin_ns ? end_ns - begin_ns : 0, std::string(value_name), value});
  }

  /// Spans so far.
  [[nodiscard]] std::size_t size() const {
    std::lock_guard lock(mutex_);
    return spans_.size();
  }

  /// The whole timeline; times are in us from the earliest span.
  [[nodiscard]] std::string json() const {
    std::lock_guard lock(mutex_);
    std::uint64_t first = ~std::uint64_t{0};
    for (const span& s : spans_) first = s.begin_ns < first ? s.begin_ns : first;
    std::string out = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
    for (std::size_t i = 0; i < tracks_.size(); ++i) {
      out += "{\"ph\":\"M\",\"pid\":1,\"tid\":" + std::to_string(i + 1) +
             ",\"name\":\"thread_name\",\"args\":{\"name\":" + detail::json_quoted(tracks_[i]) +
             "}}";
      out += i + 1 < tracks_.size() || !spans_.empty() ? ",\n" : "\n";
    }
    for (std::size_t i = 0; i < spans_.size(); ++i) {
      const span& s = spans_[i];
      out += "{\"ph\":\"X\",\"pid\":1,\"tid\":" + std::to_string(s.track + 1) +
             ",\"name\":" + detail::json_quoted(s.name) + ",\"ts\":" + micros(s.begin_ns - first) +
             ",\"dur\":" + micros(s.duration_ns);
      if (!s.value_name.empty()) {
        out +=
            ",\"args\":{" + detail::json_quoted(s.value_name) + ":" + std::to_string(s.value) + "}";
      }
      out += i + 1 < spans_.size() ? "},\n" : "}\n";
    }
    return out + "]}\n";
  }

  /// @throws std::runtime_error  naming the file that cannot be written
  void write(const std::string& path) const {
    const std::string text = json();
    std::FILE* file = std::fopen(path.c_str(), "wb");
    const bool written =
        file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    const bool closed = file != nullptr && std::fclose(file) == 0;
    if (!written || !closed) throw std::runtime_error("trace: cannot write " + path);
  }

 private:
  struct span {
    std::size_t track;
    std::string name;
    std::uint64_t begin_ns;
    std::uint64_t duration_ns;
    std::string value_name;
    std::int64_t value;
  };

  std::size_t index_of(std::string_view track) {
    for (std::size_t i = 0; i < tracks_.size(); ++i) {
      if (tracks_[i] == track) return i;
    }
    tracks_.emplace_back(track);
    return tracks_.size() - 1;
  }
  static std::string micros(std::uint64_t ns) {
    std::string fraction = std::to_string(ns % 1000);
    return std::to_string(ns / 1000) + "." + std::string(3 - fraction.size(), '0') + fraction;
  }

  mutable std::mutex mutex_;
  std::vector<std::string> tracks_;
  std::vector<span> spans_;
};

}  // namespace pulseinfer
