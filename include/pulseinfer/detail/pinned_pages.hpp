// SPDX-License-Identifier: Apache-2.0
/// @file
/// The pages of pinned memory: whose they are, and what keeps them in place before a device does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/page_system.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/page_region.hpp"
#include "pulseinfer/pinned_options.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Pages of our own, an allocation of the backend's, or memory of the caller's; locked where that is
/// wished. Stays where it is.
template <backend Backend, class System>
class pinned_pages {
 public:
  /// @param owned  the caller's memory; null: there is to be some
  pinned_pages(Backend& machine, System& system, const pinned_options& options, std::size_t bytes,
               std::byte* owned)
      : machine_(machine), system_(system), warn_(options.warn), bytes_(bytes) {
    if (owned != nullptr) {
      check_owned(owned, options.source);
      data_ = owned;
    } else if (options.source == pinned_source::registered) {
      region_ = page_region<System>(bytes, options.pages, system);
      data_ = region_.data();
      remarks_ = region_.remarks();
    } else {
      if (!Backend::registration_pins) remarks_ = "the backend's own memory is not pinned";
      data_ = static_cast<std::byte*>(machine_.allocate_pinned(bytes));
      is_allocated_ = data_ != nullptr;
    }
    const bool is_wished =
        options.locking == page_locking::always ||
        (options.locking == page_locking::automatic && !Backend::registration_pins);
    if (is_wished && !is_allocated_ && bytes > 0) lock(options.allow_unpinned);
  }
  pinned_pages(const pinned_pages&) = delete;
  pinned_pages& operator=(const pinned_pages&) = delete;
  ~pinned_pages() {
    // (what is unmapped is unlocked by that)
    if (is_locked_ && !is_ours()) system_.unlock(data_, bytes_);
    if (is_allocated_) machine_.deallocate_pinned(data_, bytes_);
  }

  [[nodiscard]] std::byte* data() const noexcept { return data_; }
  [[nodiscard]] bool is_locked() const noexcept { return is_locked_; }
  /// By the backend: it is whole from the beginning.
  [[nodiscard]] bool is_allocated() const noexcept { return is_allocated_; }
  [[nodiscard]] std::size_t page_bytes() const noexcept {
    return is_ours() ? region_.page_bytes() : system_.page_bytes();
  }
  [[nodiscard]] std::size_t reserved_bytes() const noexcept {
    return is_ours() ? region_.reserved_bytes() : bytes_;
  }
  [[nodiscard]] page_placement placement() const {
    return is_ours() ? region_.placement() : placement_of(system_, data_, bytes_);
  }

  /// Brings pages in. Throws out_of_memory.
  void touch(std::size_t offset, std::size_t count) {
    if (is_ours()) return region_.touch(offset, count);
    // The caller's, where that needs no write. Registering them, or their use, does the rest.
    const std::size_t page = system_.page_bytes();
    (void)system_.advise(data_ + offset, (count + page - 1) / page * page, page_wish::populate);
  }
  /// Overwrites `come` of the `count` bytes at `offset`, which have come; all of them where the
  /// memory is not ours.
  void zero(std::size_t offset, std::size_t come, std::size_t count) noexcept {
    std::memset(data_ + offset, 0, is_ours() ? come : count);
  }

  [[nodiscard]] const std::string& remarks() const noexcept { return remarks_; }
  /// Says so where it is heard, and notes it. Of one thread at a time.
  void say_unpinned(const std::string& why) noexcept {
    try {
      const std::string text = "not pinned: " + why;
      warn_(text.c_str());
      remarks_ += (remarks_.empty() ? "" : "; ") + text;
    } catch (...) {
      warn_("not pinned, and no memory is left to say why");
    }
  }

 private:
  [[nodiscard]] bool is_ours() const noexcept { return region_.data() != nullptr; }

  void check_owned(const std::byte* owned, pinned_source source) const {
    const std::size_t page = system_.page_bytes();
    const auto address = reinterpret_cast<std::uintptr_t>(owned);
    expects(address % page == 0, "pinned_region: memory begins at address ", address,
            ", expected a multiple of a page's ", page, " bytes");
    expects(source == pinned_source::registered,
            "pinned_region: source is allocated, expected registered for memory of the caller's");
  }
  void lock(bool allow_unpinned) {
    const int error = system_.lock(data_, bytes_);
    is_locked_ = error == 0;
    if (is_locked_) return;
    const std::string text =
        text_of("pinned_region: ", bytes_, " bytes cannot be locked (mlock: ", text_of_error(error),
                "); ", advice_of(system_.facts()));
    if (!allow_unpinned) throw out_of_memory(text);
    say_unpinned(text);
  }

  Backend& machine_;
  System& system_;
  void (*warn_)(const char*) noexcept;
  std::size_t bytes_;
  page_region<System> region_;
  std::byte* data_ = nullptr;
  bool is_allocated_ = false;
  bool is_locked_ = false;
  std::string remarks_;
};

}  // namespace pulseinfer::detail
