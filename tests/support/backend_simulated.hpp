// SPDX-License-Identifier: Apache-2.0
/// @file
/// The simulated backend as the backend under test: by the clock once, by many seeds.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <cstdlib>

#include "pulseinfer/backend/simulated.hpp"
#include "support/hold.hpp"

namespace test {

using backend = pulseinfer::simulated_backend;
inline constexpr const char* backend_name = "simulated";
inline constexpr bool device_memory_is_host_readable = true;

inline backend make_backend() {
  return backend{pulseinfer::timed{}};
}

/// How many seeds a test runs with. PULSEINFER_TEST_SEEDS overrides it.
inline std::uint64_t seed_count() {
  const char* text = std::getenv("PULSEINFER_TEST_SEEDS");
  const std::uint64_t count = text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
  return count > 0 ? count : 24;
}

/// Calls f(backend) for each configuration worth testing.
template <class F>
void each_backend(F&& f) {
  {
    INFO("simulated backend, timed");
    f(make_backend());
  }
  for (std::uint64_t seed = 1; seed <= seed_count(); ++seed) {
    INFO("simulated backend, fuzzed with seed ", seed);
    f(backend{pulseinfer::fuzzed{.seed = seed}});
  }
}

template <>
inline constexpr bool takes_threads<backend> = false;

/// Holds the stream back for a second of virtual time; a fuzzed machine holds back whom it likes.
template <>
class hold<backend> {
 public:
  static constexpr bool is_exact = false;

  hold(const backend& of, backend::stream& stream) {
    backend(of).for_each({1, 1}, {}, 3'350'000'000'000, nothing{}, stream);
  }
  void release() noexcept {}

 private:
  struct nothing {
    void operator()(std::int64_t, std::int64_t) const {}
  };
};

}  // namespace test
