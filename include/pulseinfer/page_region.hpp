// SPDX-License-Identifier: Apache-2.0
/// @file
/// Memory by the page: exact sizes, huge pages, a NUMA node, and what of all that was got.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/detail/host_memory.hpp"
#include "pulseinfer/detail/page_system.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/numa.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Which pages memory lies on.
///
/// `transparent` asks for huge pages and takes others where there are none. `huge_2m` and `huge_1g`
/// take them from the system's pool (vm.nr_hugepages), where they have to be set aside first; what
/// the pool does not have becomes `transparent`. Their sizes are rounded up to whole huge pages.
enum class page_kind : std::uint8_t { small, transparent, huge_2m, huge_1g };

/// Pages, and where they lie.
struct page_options {
  page_kind pages = page_kind::transparent;
  int numa_node = -1;         ///< as the kernel numbers them; -1: where the touching thread runs
  std::size_t alignment = 0;  ///< of the beginning, a power of two; 0: a page's
};

/// Where pages lie, by a sample of up to 1,024 of them.
struct page_placement {
  int node = -1;               ///< of most of those sampled; -1: the system does not say
  double share_on_node = 0;    ///< how many of those sampled lie there
  std::size_t sampled = 0;     ///< pages that are there
  std::size_t huge_bytes = 0;  ///< on huge pages, transparent ones or of the pool
};

namespace detail {

[[nodiscard]] constexpr std::size_t bytes_of(page_kind kind, std::size_t small) noexcept {
  if (kind == page_kind::huge_2m) return std::size_t{2} << 20;
  if (kind == page_kind::huge_1g) return std::size_t{1} << 30;
  return small;
}

/// Looks where the pages of [data, data + bytes) lie.
template <class System>
[[nodiscard]] page_placement placement_of(const System& system, void* data, std::size_t bytes) {
  page_placement found;
  if (bytes == 0) return found;
  const std::size_t page = system.page_bytes();
  const std::size_t pages = (bytes + page - 1) / page;
  std::vector<void*> sample(std::min<std::size_t>(pages, 1024));
  for (std::size_t i = 0; i < sample.size(); ++i) {
    // (pages * i may not overflow: there are less than 2^52 of them)
    sample[i] = static_cast<std::byte*>(data) + pages * i / sample.size() * page;
  }
  std::vector<int> nodes(sample.size(), -1);
  const int error = system.nodes_of(sample, nodes.data());
  if (error != 0) {
    // A machine of one node has them there.
    const std::vector<int> all = system.nodes();
    std::fill(nodes.begin(), nodes.end(), all.size() == 1 ? all[0] : -1);
  }
  std::erase_if(nodes, [](int node) { return node < 0; });
  std::sort(nodes.begin(), nodes.end());
  found.sampled = nodes.size();
  std::ptrdiff_t most = 0;
  for (auto first = nodes.begin(); first != nodes.end();) {
    const auto last = std::upper_bound(first, nodes.end(), *first);
    if (last - first > most) {
      most = last - first;
      found.node = *first;
    }
    first = last;
  }
  if (most > 0) found.share_on_node = static_cast<double>(most) / static_cast<double>(nodes.size());
  found.huge_bytes = system.bytes_on_huge_pages(data, bytes);
  return found;
}

}  // namespace detail

/// Owns a range of pages, reserved at once and empty until they are touched: pages come as `touch`,
/// or whoever uses the memory, gets to them. They are zeros then.
///
/// A child after fork() does not have the memory: it stays out of it (a read there is a fault), so
/// that a page under DMA is never copied, and the child's destructor does nothing.
///
/// @tparam System  the operating system; tests replace its calls
/// @par Threads  any may touch; one at a time moves or destroys it
template <class System = detail::page_system>
class page_region {
 public:
  page_region() noexcept = default;

  /// Reserves `bytes`, rounded up to whole pages of the size that was got.
  ///
  /// What cannot be had of huge pages and NUMA is replaced (see `page_kind`) or left out, and
  /// `remarks` says which and why.
  ///
  /// @param bytes    0 reserves nothing
  /// @param options  pages, node and alignment that are wanted
  /// @param system   whose calls are made; a copy is kept
  /// @throws std::length_error      when whole pages of it overflow the address space
  /// @throws std::invalid_argument  naming the node and those that there are, the alignment or the
  ///                                kind of pages
  /// @throws out_of_memory          naming the bytes, when the system has no room
  /// @par Cost     two to six system calls; no page is touched
  explicit page_region(std::size_t bytes, const page_options& options = {}, System system = {})
      : system_(std::move(system)), bytes_(bytes), process_(system_.process()) {
    const std::size_t small = system_.page_bytes();
    const std::size_t largest = std::max(detail::bytes_of(options.pages, small),
                                         std::max(options.alignment, detail::huge_page_bytes));
    constexpr std::size_t most = std::numeric_limits<std::size_t>::max() / 2;
    detail::expects((options.alignment & (options.alignment - 1)) == 0,
                    "page_region: alignment is ", options.alignment, ", expected a power of two");
    detail::expects<std::length_error>(largest <= most && bytes <= most - largest,
                                       "page_region: ", bytes, " bytes overflow the address space");
    detail::expects(options.pages <= page_kind::huge_1g, "page_region: pages is ",
                    static_cast<int>(options.pages), ", expected one of page_kind");
    check_node(options.numa_node);
    if (bytes == 0) return;
    try {
      reserve(options, small);
      bind(options.numa_node);
      const int error = system_.advise(data_, reserved_, detail::page_wish::stay_out_of_children);
      if (error != 0) remark("children get copies of it", "madvise", error);
    } catch (...) {
      release();
      throw;
    }
  }
  page_region(page_region&& other) noexcept { swap(other); }
  page_region& operator=(page_region&& other) noexcept {
    page_region taken(std::move(other));
    swap(taken);
    return *this;
  }
  ~page_region() { release(); }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  /// As asked for.
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  /// Address space taken: whole pages.
  [[nodiscard]] std::size_t reserved_bytes() const noexcept { return reserved_; }
  /// Of the pages that the memory is made of; transparent huge ones count as small.
  [[nodiscard]] std::size_t page_bytes() const noexcept { return page_; }
  /// What was asked for and not got, and why; empty if all was.
  [[nodiscard]] const std::string& remarks() const noexcept { return remarks_; }
  [[nodiscard]] page_placement placement() const {
    page_placement found = detail::placement_of(system_, data_, reserved_);
    if (page_ > system_.page_bytes()) found.huge_bytes = reserved_;
    return found;
  }

  /// Brings the pages of [offset, offset + count) in. Contents stay as they are, also of pages that
  /// are written meanwhile.
  /// @pre  offset + count <= reserved_bytes()
  /// @throws out_of_memory  when the system has no page left for it, naming the range
  void touch(std::size_t offset, std::size_t count) {
    if (count == 0) return;
    const std::size_t grain = system_.page_bytes();
    const std::size_t begin = offset / grain * grain;
    const std::size_t end = (offset + count + grain - 1) / grain * grain;
    int error = 0;
    for (int tries = 0; tries < 100; ++tries) {
      error = system_.advise(data_ + begin, end - begin, detail::page_wish::populate);
      if (error != EAGAIN && error != EINTR) break;
    }
    if (error == EINVAL || error == ENOSYS) {  // a system that does not know the wish
      for (std::size_t at = begin; at < end; at += grain) {
        // A write that changes nothing, whatever others write beside it.
        std::atomic_ref<unsigned char>(*reinterpret_cast<unsigned char*>(data_ + at))
            .fetch_or(0, std::memory_order_relaxed);
      }
    } else if (error != 0) {
      throw out_of_memory(detail::text_of(
          "page_region: no pages for ", count, " bytes at offset ", offset, " of ", bytes_,
          " (madvise: ", detail::text_of_error(error), "); ", detail::advice_of(system_.facts())));
    }
  }

 private:
  void swap(page_region& other) noexcept {
    std::swap(system_, other.system_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(reserved_, other.reserved_);
    std::swap(page_, other.page_);
    std::swap(process_, other.process_);
    std::swap(remarks_, other.remarks_);
  }
  void release() noexcept {
    if (data_ != nullptr && system_.process() == process_) system_.unmap(data_, reserved_);
    data_ = nullptr;
  }
  void remark(const std::string& what, const char* call, int error) {
    remarks_ += detail::text_of(remarks_.empty() ? "" : "; ", what, " (", call, ": ",
                                detail::text_of_error(error), ")");
  }
  void check_node(int node) const {
    if (node == -1) return;
    const std::vector<int> nodes = system_.nodes();
    detail::expects(
        std::find(nodes.begin(), nodes.end(), node) != nodes.end(), "page_region: numa_node is ",
        node, ", expected -1 or one of those online: ",
        nodes.empty() ? "none, the system does not list any" : detail::text_of_cpus(nodes));
  }

  void reserve(const page_options& options, std::size_t small) {
    const auto whole = [this](std::size_t page) { return (bytes_ + page - 1) / page * page; };
    page_kind kind = options.pages;
    void* found = nullptr;
    if (kind == page_kind::huge_2m || kind == page_kind::huge_1g) {
      page_ = detail::bytes_of(kind, small);
      reserved_ = whole(page_);
      const int error = options.alignment > page_ ? EINVAL : system_.map(found, reserved_, page_);
      if (error == 0) {
        data_ = static_cast<std::byte*>(found);
        return;
      }
      remark(detail::text_of("no huge pages of ", page_, " bytes for ", reserved_,
                             " bytes, transparent ones instead"),
             "mmap", error);
      kind = page_kind::transparent;
    }
    page_ = small;
    reserved_ = whole(small);
    std::size_t alignment = std::max(options.alignment, small);
    const bool is_large = kind == page_kind::transparent && reserved_ >= detail::huge_page_bytes;
    if (is_large) alignment = std::max(alignment, detail::huge_page_bytes);
    map_aligned(alignment, small);
    if (kind == page_kind::transparent && !is_large) return;
    const std::size_t part =
        is_large ? reserved_ / detail::huge_page_bytes * detail::huge_page_bytes : reserved_;
    const int error =
        system_.advise(data_, part, is_large ? detail::page_wish::huge : detail::page_wish::small);
    if (error != 0 && is_large) remark("no transparent huge pages", "madvise", error);
  }

  /// More than is needed is reserved and what is too much given back: no call aligns.
  void map_aligned(std::size_t alignment, std::size_t small) {
    const std::size_t room = reserved_ + alignment - small;
    void* found = nullptr;
    const int error = system_.map(found, room, 0);
    if (error != 0) {
      throw out_of_memory(
          detail::text_of("page_region: ", reserved_,
                          " bytes cannot be reserved (mmap: ", detail::text_of_error(error), ")"));
    }
    auto* const first = static_cast<std::byte*>(found);
    const std::size_t over = reinterpret_cast<std::uintptr_t>(first) & (alignment - 1);
    const std::size_t before = over == 0 ? 0 : alignment - over;
    data_ = first + before;
    if (before > 0) system_.unmap(first, before);
    const std::size_t behind = room - before - reserved_;
    if (behind > 0) system_.unmap(data_ + reserved_, behind);
  }

  void bind(int node) {
    if (node == -1) return;
    const int error = system_.prefer_node(data_, reserved_, node);
    if (error != 0) remark(detail::text_of("not bound to NUMA node ", node), "mbind", error);
  }

  System system_{};
  std::byte* data_ = nullptr;
  std::size_t bytes_ = 0;
  std::size_t reserved_ = 0;
  std::size_t page_ = 0;
  std::int64_t process_ = 0;
  std::string remarks_;
};

}  // namespace pulseinfer
