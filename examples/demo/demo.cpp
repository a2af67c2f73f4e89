// SPDX-License-Identifier: Apache-2.0
// The demo on the host and simulated backends.
#include "pulseinfer/pulseinfer.hpp"
#include "run.hpp"
#include "speedup.hpp"

int main(int argc, char** argv) {
  return demo::guarded([&] {
    const demo::command_line line = demo::parse(argc, argv);
    if (line.backend == "host") {
      demo::run(pulseinfer::host_backend{}, line, [](const auto& geometry) {
        // The link of the figures: a quarter of one thread's copy speed, 2.3 us a call.
        return std::optional(demo::staged_vs_per_block(
            pulseinfer::host_backend{
                {.link = {.bytes_per_second = demo::copy_speed() / 4, .seconds_per_copy = 2.3e-6}}},
            geometry));
      });
    } else if (line.backend == "simulated") {
      demo::run(pulseinfer::simulated_backend{pulseinfer::timed{}}, line, [](const auto& geometry) {
        return std::optional(demo::staged_vs_per_block(
            pulseinfer::simulated_backend{pulseinfer::timed{}}, geometry));
      });
    } else {
      throw std::invalid_argument("demo: backend is '" + line.backend +
                                  "', expected host or simulated (cuda: the program demo_cuda)");
    }
  });
}
