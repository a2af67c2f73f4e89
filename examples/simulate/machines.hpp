// SPDX-License-Identifier: Apache-2.0
/// @file
/// Machines as numbers, each with where the numbers come from; one of your own from a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "key_values.hpp"
#include "pulseinfer/backend/hardware_profile.hpp"

namespace simulate {

/// One GPU, its link and its part of the host.
struct machine {
  std::string name;
  std::string source;
  pulseinfer::hardware_profile profile;
  double host_bytes = 512e9;         ///< for KV, all GPUs together
  double all_reduce_seconds = 8e-6;  ///< of a small message among the GPUs of a group
};

inline pulseinfer::hardware_profile profile_of(double hbm, double link, double dram,
                                               std::uint64_t device_bytes, int workers) {
  return {.dram_bytes_per_second = dram,
          .link_bytes_per_second = link,
          .hbm_bytes_per_second = hbm,
          .poll_ns = 10,  // see assumptions.hpp
          .workers = workers,
          .device_bytes = device_bytes};
}

/// The machines that come with the simulation; the first one is that of the headline figures.
inline std::vector<machine> machines() {
  return {
      {"h100", "the guide: link 56 GB/s, HBM 3,350 GB/s (H100 SXM data sheet), DDR5 200 GB/s",
       profile_of(3350e9, 56e9, 200e9, 80'000'000'000, 16)},
      {"h100-pcie",
       "data sheet: HBM2e 2,000 GB/s, 80 GB; bulk DMA about 50 GB/s (vLLM, 2026-01-08)",
       profile_of(2000e9, 50e9, 200e9, 80'000'000'000, 16)},
      {"a100-pcie", "data sheet: HBM2e 1,935 GB/s, 80 GB, PCIe 4 x16; 25 GB/s of its 32 assumed",
       profile_of(1935e9, 25e9, 150e9, 80'000'000'000, 16)},
      {"h200",
       "data sheet: HBM3e 4,800 GB/s, 141 GB; line rate 55 GB/s (LMCache's design document)",
       profile_of(4800e9, 55e9, 300e9, 141'000'000'000, 16)},
      {"gh200",
       "data sheet: HBM3 4,000 GB/s, 96 GB, LPDDR5X 500 GB/s, 480 GB; copy engines about "
       "200 GB/s over C2C, as SGLang #40278 has it of a GB300",
       profile_of(4000e9, 200e9, 500e9, 96'000'000'000, 32), 480e9},
  };
}

/// A machine from a file of `key = value` lines: the fields of hardware_profile by name, `name`,
/// `source`, `host_bytes`, `all_reduce_seconds`. What is not there is as the first machine has it.
/// @throws as read_keys, and std::invalid_argument on what is no machine
inline machine machine_from(const std::string& path) {
  machine m = machines().front();
  m.name = path;
  m.source = "the file " + path;
  pulseinfer::hardware_profile& p = m.profile;
  read_keys(
      path,
      {text_key("name", m.name), text_key("source", m.source),
       number_key("dram_bytes_per_second", p.dram_bytes_per_second),
       number_key("link_bytes_per_second", p.link_bytes_per_second),
       number_key("hbm_bytes_per_second", p.hbm_bytes_per_second),
       number_key("worker_bytes_per_second", p.worker_bytes_per_second),
       number_key("copy_start_ns", p.copy_start_ns), number_key("copy_busy_ns", p.copy_busy_ns),
       number_key("batched_copy_busy_ns", p.batched_copy_busy_ns),
       number_key("kernel_launch_ns", p.kernel_launch_ns),
       number_key("task_start_ns", p.task_start_ns), number_key("poll_ns", p.poll_ns),
       number_key("workers", p.workers, 1, 1024), number_key("device_bytes", p.device_bytes),
       number_key("host_bytes", m.host_bytes),
       number_key("all_reduce_seconds", m.all_reduce_seconds)});
  pulseinfer::detail::check_profile(p);
  return m;
}

}  // namespace simulate
