// SPDX-License-Identifier: Apache-2.0
/// @file
/// What pinned memory asks of the operating system, call by call, so that tests can answer in its
/// place.
#pragma once

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

#include "pulseinfer/config.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/numa.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// What limits the memory that a process may lock, as far as it can be found out.
struct memory_facts {
  static constexpr std::uint64_t unlimited = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t memlock_soft = unlimited;  ///< RLIMIT_MEMLOCK in bytes
  std::uint64_t memlock_hard = unlimited;
  std::uint64_t cgroup_bytes = unlimited;  ///< memory.max of the control group
  bool is_in_container = false;
  bool is_in_wsl = false;
};

/// What is wished for a range of pages.
enum class page_wish : std::uint8_t { huge, small, stay_out_of_children, populate };

/// An errno value in words.
[[nodiscard]] inline std::string text_of_error(int error) {
  return std::generic_category().message(error);
}

/// The beginning of a file, for those of /proc and /sys; empty if it cannot be read.
[[nodiscard]] inline std::string read_text(const std::string& path, std::size_t most = 4096) {
  std::string text;
  std::FILE* const file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return text;
  text.resize(most);
  text.resize(std::fread(text.data(), 1, most, file));
  std::fclose(file);
  return text;
}

/// The system itself. Calls that can fail return 0 or an errno value; ENOSYS stands for what this
/// system does not have. Tests derive from it and replace single calls.
struct page_system {
  [[nodiscard]] std::size_t page_bytes() const noexcept {
    return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  }
  [[nodiscard]] std::int64_t process() const noexcept { return getpid(); }

  /// Private memory of zeros, on pages of `huge` bytes (0: the usual ones).
  [[nodiscard]] int map(void*& found, std::size_t bytes, std::size_t huge) noexcept {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    if (huge != 0) {
#if defined(__linux__)
      int log2 = 0;
      while ((std::size_t{1} << log2) < huge) ++log2;
      flags |= MAP_HUGETLB | (log2 << 26);  // MAP_HUGE_SHIFT
#else
      return ENOSYS;
#endif
    }
    void* const p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (p == MAP_FAILED) return errno;
    found = p;
    return 0;
  }
  int unmap(void* p, std::size_t bytes) noexcept {
    return munmap(p, bytes) == 0 ? 0 : errno;
  }

  [[nodiscard]] int advise(void* p, std::size_t bytes, page_wish wish) noexcept {
#if defined(__linux__)
    int advice = MADV_DONTFORK;
    if (wish == page_wish::huge) advice = MADV_HUGEPAGE;
    if (wish == page_wish::small) advice = MADV_NOHUGEPAGE;
    if (wish == page_wish::populate) advice = 23;  // MADV_POPULATE_WRITE, since Linux 5.14
    return madvise(p, bytes, advice) == 0 ? 0 : errno;
#else
    (void)p, (void)bytes, (void)wish;
    return ENOSYS;
#endif
  }

  /// Pages that come into the range later are locked as they come. (Pages that are locked after
  /// they came have to change lists one by one, which costs half as much as their coming.)
  [[nodiscard]] int lock(void* p, std::size_t bytes) noexcept {
#if defined(__linux__) && defined(MLOCK_ONFAULT)
    if (mlock2(p, bytes, MLOCK_ONFAULT) == 0) return 0;
    if (errno != ENOSYS) return errno;
#endif
    return mlock(p, bytes) == 0 ? 0 : errno;
  }
  int unlock(void* p, std::size_t bytes) noexcept {
    return munlock(p, bytes) == 0 ? 0 : errno;
  }

  /// Pages of the range come from `node` while it has any, from others then.
  [[nodiscard]] int prefer_node(void* p, std::size_t bytes, int node) noexcept {
#if defined(__linux__)
    constexpr int most = 1024;
    constexpr int word = std::numeric_limits<unsigned long>::digits;
    if (node < 0 || node >= most) return EINVAL;
    unsigned long nodes[most / word] = {};
    nodes[node / word] = 1ul << (node % word);
    constexpr long preferred = 1;  // MPOL_PREFERRED
    return syscall(SYS_mbind, p, bytes, preferred, nodes, most + 1ul, 0ul) == 0 ? 0 : errno;
#else
    (void)p, (void)bytes, (void)node;
    return ENOSYS;
#endif
  }
  /// The node of each page, negative for one that is not there.
  [[nodiscard]] int nodes_of(std::span<void*> pages, int* nodes) const noexcept {
#if defined(__linux__)
    const int* const query_only = nullptr;
    if (syscall(SYS_move_pages, 0, pages.size(), pages.data(), query_only, nodes, 0) == 0) return 0;
    const int error = errno;
    for (std::size_t i = 0; i < pages.size(); ++i) {  // not forbidden where the other one is
      constexpr unsigned long node_of_address = 1 | 2;
      if (syscall(SYS_get_mempolicy, nodes + i, nullptr, 0ul, pages[i], node_of_address) != 0) {
        return error;
      }
    }
    return 0;
#else
    (void)pages, (void)nodes;
    return ENOSYS;
#endif
  }
  /// The nodes that there are; empty if the system does not say.
  [[nodiscard]] std::vector<int> nodes() const {
    return read_cpu_list("/sys/devices/system/node/online").value_or(std::vector<int>{});
  }

  /// How much of the range lies on transparent huge pages. Reads a file of a line a mapping.
  [[nodiscard]] std::size_t bytes_on_huge_pages(const void* p, std::size_t bytes) const {
    std::FILE* const file = std::fopen("/proc/self/smaps", "r");
    if (file == nullptr) return 0;
    const auto from = reinterpret_cast<std::uintptr_t>(p);
    bool is_inside = false;
    std::size_t found = 0;
    char line[512];
    while (std::fgets(line, sizeof line, file) != nullptr) {
      constexpr std::string_view key = "AnonHugePages:";
      char* end = nullptr;
      const std::uintptr_t first = std::strtoull(line, &end, 16);  // "7f00-7f80 rw-p ..."
      if (end != line && *end == '-') {
        is_inside = first < from + bytes && std::strtoull(end + 1, nullptr, 16) > from;
      } else if (is_inside && std::string_view(line).starts_with(key)) {
        found += std::strtoull(line + key.size(), nullptr, 10) * 1024;
      }
    }
    std::fclose(file);
    return std::min(found, bytes);
  }

  [[nodiscard]] memory_facts facts() const {
    memory_facts found;
    rlimit limit{};
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
      const auto value = [](rlim_t n) { return n == RLIM_INFINITY ? memory_facts::unlimited : n; };
      found.memlock_soft = value(limit.rlim_cur);
      found.memlock_hard = value(limit.rlim_max);
    }
    std::string group = read_text("/proc/self/cgroup");  // version 2: "0::/path\n"
    group = group.starts_with("0::") ? group.substr(3, group.find('\n') - 3) : "";
    for (const std::string& path :
         {"/sys/fs/cgroup" + group + "/memory.max", std::string("/sys/fs/cgroup/memory.max"),
          std::string("/sys/fs/cgroup/memory/memory.limit_in_bytes")}) {
      const std::string text = read_text(path);
      if (text.empty() || text[0] < '0' || text[0] > '9') continue;
      const std::uint64_t bytes = std::strtoull(text.c_str(), nullptr, 10);
      if (bytes < (1ull << 62)) found.cgroup_bytes = bytes;  // version 1 says so of no limit
      break;
    }
    found.is_in_container =
        access("/.dockerenv", F_OK) == 0 || access("/run/.containerenv", F_OK) == 0;
    const std::string release = read_text("/proc/sys/kernel/osrelease");
    found.is_in_wsl = release.find("icrosoft") != std::string::npos;
    return found;
  }
};

/// The limits in words, and what can be done about them.
[[nodiscard]] inline std::string advice_of(const memory_facts& facts) {
  const auto bytes = [](std::uint64_t n) {
    return n == memory_facts::unlimited ? std::string("unlimited") : text_of(n, " bytes");
  };
  std::string text = text_of("RLIMIT_MEMLOCK is ", bytes(facts.memlock_soft),
                             " (hard limit: ", bytes(facts.memlock_hard), ")");
  if (facts.memlock_soft != memory_facts::unlimited) {
    text += "; raise it with ulimit -l, memlock in limits.conf, or LimitMEMLOCK of a service";
  }
  if (facts.cgroup_bytes != memory_facts::unlimited) {
    text += text_of("; the control group's memory.max is ", bytes(facts.cgroup_bytes));
  }
  if (facts.is_in_container) {
    text +=
        "; in a container the limit is the runtime's: --ulimit memlock=-1, and --shm-size for "
        "memory in /dev/shm";
  }
  if (facts.is_in_wsl) {
    text +=
        "; this is WSL, whose driver pins a part of the memory only, often about 500 MB, and "
        "may not reach registered memory: take less, pinned_source::allocated, or let it be "
        "unpinned";
  }
  return text;
}

/// Owns an object that belongs to the process that made it. After a fork the child's copy is left
/// alone: its threads, its device and its mappings are not the child's to end.
template <class T, class System>
class of_this_process {
 public:
  of_this_process() noexcept = default;
  of_this_process(T* object, System system) noexcept
      : object_(object), system_(system), process_(system.process()) {}
  of_this_process(of_this_process&& other) noexcept
      : object_(std::exchange(other.object_, nullptr)),
        system_(std::move(other.system_)),
        process_(other.process_) {}
  of_this_process& operator=(of_this_process&& other) noexcept {
    std::swap(object_, other.object_);
    std::swap(system_, other.system_);
    std::swap(process_, other.process_);
    return *this;
  }
  ~of_this_process() {
    if (object_ != nullptr && system_.process() == process_) delete object_;
  }
  [[nodiscard]] T* get() const noexcept { return object_; }
  T* operator->() const noexcept { return object_; }
  T& operator*() const noexcept { return *object_; }

 private:
  T* object_ = nullptr;
  System system_{};
  std::int64_t process_ = 0;
};

}  // namespace pulseinfer::detail
