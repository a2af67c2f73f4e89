// SPDX-License-Identifier: Apache-2.0
/// @file
/// Threads that run on chosen CPUs only, and behind those that they work for.
#pragma once

#include <climits>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/numa.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

#if defined(__linux__)

/// A set of CPUs, as large as the kernel may ask for (cpu_set_t ends at 1024).
class cpu_mask {
 public:
  static constexpr int most = 1 << 13;

  [[nodiscard]] bool contains(int cpu) const noexcept {
    return cpu >= 0 && cpu < most && (words_[word(cpu)] >> bit(cpu) & 1) != 0;
  }
  void add(int cpu) noexcept { words_[word(cpu)] |= 1ul << bit(cpu); }
  void add_all() noexcept {
    for (unsigned long& w : words_) w = ~0ul;
  }
  /// Confines the calling thread to those CPUs of the set that there are. False if there is none.
  bool bind_this_thread() const noexcept {
    return pthread_setaffinity_np(pthread_self(), sizeof words_,
                                  reinterpret_cast<const cpu_set_t*>(words_)) == 0;
  }
  /// Becomes the set of those on which the calling thread may run.
  void read_from_this_thread() noexcept {
    for (unsigned long& w : words_) w = 0;
    (void)pthread_getaffinity_np(pthread_self(), sizeof words_,
                                 reinterpret_cast<cpu_set_t*>(words_));
  }

 private:
  static constexpr int word_bits = sizeof(unsigned long) * CHAR_BIT;
  static std::size_t word(int cpu) noexcept { return static_cast<std::size_t>(cpu / word_bits); }
  static int bit(int cpu) noexcept { return cpu % word_bits; }

  unsigned long words_[most / word_bits] = {};
};

/// From here on the calling thread takes its turn when it is woken, and does not take the CPU of who
/// woke it: an engine's thread that hands over a transfer is not put to sleep in the middle of the
/// call. Where the CPUs are all busy it waits for its turn; who spins for it should yield. With a
/// policy of its own (real time, idle) it stays as it is.
inline void run_behind_callers() noexcept {
  const sched_param parameter{};
  if (sched_getscheduler(0) == SCHED_OTHER) (void)sched_setscheduler(0, SCHED_BATCH, &parameter);
}

/// The CPUs that this process may use at all, ascending. What the calling thread is confined to
/// does not count, which a thread of its own finds out.
[[nodiscard]] inline std::vector<int> usable_cpus() {
  cpu_mask mask;
  std::thread([&mask] {
    mask.add_all();
    (void)mask.bind_this_thread();
    mask.read_from_this_thread();
  }).join();
  std::vector<int> cpus;
  for (int cpu = 0; cpu < cpu_mask::most; ++cpu) {
    if (mask.contains(cpu)) cpus.push_back(cpu);
  }
  return cpus;
}

/// The threads' CPUs as options name them. Empty: they are not confined.
class thread_cpus {
 public:
  /// @throws std::invalid_argument  naming the CPU that this process may not use
  explicit thread_cpus(std::span<const int> cpus) : is_confined_(!cpus.empty()) {
    if (!is_confined_) return;
    const std::vector<int> usable = usable_cpus();
    for (const int cpu : cpus) {
      bool is_usable = false;
      for (const int u : usable) is_usable = is_usable || u == cpu;
      expects(is_usable, "host workers: cpus names CPU ", cpu,
              ", expected those that this process may use: ", text_of_cpus(usable));
      mask_.add(cpu);
    }
  }
  /// A CPU that went away meanwhile is not used; nor are the others if none is left.
  void bind_this_thread() const noexcept {
    if (is_confined_) (void)mask_.bind_this_thread();
  }

 private:
  cpu_mask mask_;
  bool is_confined_;
};

#else

inline void run_behind_callers() noexcept {}

class thread_cpus {
 public:
  explicit thread_cpus(std::span<const int> cpus) {
    expects(cpus.empty(), "host workers: cpus has ", cpus.size(),
            " entries, expected none: threads are confined to CPUs on Linux only");
  }
  void bind_this_thread() const noexcept {}
};

#endif

}  // namespace pulseinfer::detail
