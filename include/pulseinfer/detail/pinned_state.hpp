// SPDX-License-Identifier: Apache-2.0
/// @file
/// Pinned memory being filled: slices are touched by whoever has time, chunks registered when all of
/// their slices are there.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pulseinfer/concepts.hpp"
#include "pulseinfer/detail/pinned_chunks.hpp"
#include "pulseinfer/detail/pinned_pages.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/pinned_options.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// The door between host tasks and the memory: a task that comes after the memory has gone finds it
/// closed.
template <class State>
struct fill_gate {
  std::mutex mutex;
  std::condition_variable left;
  State* state = nullptr;  ///< null: closed
  int inside = 0;          ///< tasks and callers at work
};

/// All of a pinned_region but its looks. Stays where it is.
template <backend Backend, class System>
class pinned_state {
 public:
  using gate_type = fill_gate<pinned_state>;
  using phase = pinned_chunk::phase;
  static constexpr std::size_t slice_bytes = std::size_t{32} << 20;

  /// Memory of its own, or with `owned` the caller's. Nothing is touched yet.
  pinned_state(Backend b, const System& system, const pinned_options& o, std::size_t bytes,
               std::byte* owned)
      : backend_(std::move(b)),
        system_(system),
        options_(checked(o, bytes)),
        bytes_(bytes),
        pages_(backend_, system_, options_, bytes, owned) {
    if (bytes == 0) return;
    const std::size_t page = pages_.page_bytes();
    const std::size_t chunk =
        pages_.is_allocated() ? bytes : plan_chunk(bytes, o.unit_bytes, page, o.max_chunk_bytes);
    slice_ = std::max(page, slice_bytes / page * page);
    for (std::size_t at = 0; at < bytes; at += std::min(chunk, bytes - at)) {
      pinned_chunk next;
      next.offset = at;
      next.bytes = std::min(chunk, bytes - at);
      next.slices = (next.bytes + slice_ - 1) / slice_;
      chunks_.push_back(next);
    }
    registry_.reserve(chunks_.size());
    gate_->state = this;
    if (!pages_.is_allocated()) return;
    pinned_chunk& all = chunks_.front();
    all.claimed = all.done = all.slices;
    all.at = phase::ready;
    all.device = registry_.look_for(data());
  }
  pinned_state(const pinned_state&) = delete;
  pinned_state& operator=(const pinned_state&) = delete;
  ~pinned_state() {
    close();
    if (options_.zero_on_release) {
      for (const pinned_chunk& c : chunks_) {
        pages_.zero(c.offset, std::min(c.bytes, c.claimed * slice_), c.bytes);
      }
    }
    registry_.leave_all(data());
  }

  /// Hands tasks to the backend, which fill all chunks: `workers`, or fewer where there is not a
  /// slice for each beside `taken` slices.
  void start(std::size_t taken) {
    std::size_t slices = 0;
    for (const pinned_chunk& c : chunks_) slices += c.slices;
    if (pages_.is_allocated() || slices <= taken) return;
    const auto most = static_cast<std::size_t>(options_.workers);
    for (std::size_t i = std::min(most, slices - taken); i > 0; --i) submit(new filler{gate_});
  }

  /// Fills and registers the chunks of [offset, offset + count) together with the tasks, and returns
  /// once all of them are ready. Throws what one of them has failed with.
  void sync_ready(std::size_t offset, std::size_t count) {
    expects(offset <= bytes_ && count <= bytes_ - offset, "pinned_region: the range at ", offset,
            " of ", count, " bytes is not within the ", bytes_, " that there are");
    if (count == 0) return;
    const std::size_t first = offset / chunk_bytes();
    const std::size_t last = (offset + count - 1) / chunk_bytes() + 1;
    std::unique_lock lock(gate_->mutex);
    ++gate_->inside;
    while (work(lock, first, last)) {
    }
    leave();
    lock.unlock();
    const auto settled = [&] {
      std::lock_guard guard(gate_->mutex);
      return std::all_of(chunks_.begin() + static_cast<std::ptrdiff_t>(first),
                         chunks_.begin() + static_cast<std::ptrdiff_t>(last),
                         [](const pinned_chunk& c) { return c.is_settled(); });
    };
    if (!settled()) backend_.sync_until(settled);
    lock.lock();
    for (std::size_t i = first; i < last; ++i) {
      if (chunks_[i].error) std::rethrow_exception(chunks_[i].error);
    }
  }

  /// All at once or nothing: fills everything, and takes back what was registered where a part
  /// cannot be.
  void fill_now() {
    is_all_or_nothing_ = true;
    start(1);  // the caller fills too
    sync_ready(0, bytes_);
    std::lock_guard guard(gate_->mutex);
    if (is_pinning_) return;
    registry_.leave_all(data());
    for (pinned_chunk& c : chunks_) c.device = registry_.look_for(data() + c.offset);
  }

  [[nodiscard]] bool is_ready(std::size_t offset, std::size_t count) const noexcept {
    if (offset > bytes_ || count > bytes_ - offset) return false;
    if (count == 0) return true;
    std::lock_guard guard(gate_->mutex);
    const std::size_t last = (offset + count - 1) / chunk_bytes();
    for (std::size_t i = offset / chunk_bytes(); i <= last; ++i) {
      if (chunks_[i].at != phase::ready) return false;
    }
    return true;
  }
  /// From the beginning to the first byte that is not ready.
  [[nodiscard]] std::size_t ready_bytes() const noexcept {
    std::lock_guard guard(gate_->mutex);
    std::size_t found = 0;
    for (const pinned_chunk& c : chunks_) {
      if (c.at != phase::ready) break;
      found += c.bytes;
    }
    return found;
  }
  [[nodiscard]] std::byte* device_data(std::size_t offset) const {
    expects(offset < bytes_, "pinned_region: offset is ", offset, ", expected less than ", bytes_);
    const pinned_chunk& c = chunks_[offset / chunk_bytes()];
    std::lock_guard guard(gate_->mutex);
    expects<std::logic_error>(c.at == phase::ready, "pinned_region: the chunk at offset ", c.offset,
                              " is not ready: sync_ready it first");
    expects<std::logic_error>(c.device != nullptr, "pinned_region: the chunk at offset ", c.offset,
                              " is not pinned, and the device cannot reach it");
    return c.device + (offset - c.offset);
  }
  [[nodiscard]] pinned_report report() const {
    pinned_report found;
    found.bytes = bytes_;
    found.page_bytes = pages_.page_bytes();
    found.reserved_bytes = pages_.reserved_bytes();
    found.chunk_bytes = chunk_bytes();
    found.chunks = chunks_.size();
    found.is_locked = pages_.is_locked();
    {
      std::lock_guard guard(gate_->mutex);
      found.remarks = pages_.remarks();
      for (const pinned_chunk& c : chunks_) {
        if (c.at != phase::ready) continue;
        found.ready_bytes += c.bytes;
        const bool is_kept =
            Backend::registration_pins && (c.is_registered || pages_.is_allocated());
        if (is_kept || pages_.is_locked()) found.pinned_bytes += c.bytes;
      }
    }
    found.placement = pages_.placement();
    return found;
  }

  [[nodiscard]] std::byte* data() const noexcept { return pages_.data(); }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::size_t chunk_bytes() const noexcept {
    return chunks_.empty() ? 0 : chunks_.front().bytes;
  }
  [[nodiscard]] const Backend& machine() const noexcept { return backend_; }

 private:
  static const pinned_options& checked(const pinned_options& o, std::size_t bytes) {
    expects(o.workers >= 0 && o.workers <= 1024, "pinned_region: workers is ", o.workers,
            ", expected 0 to 1024");
    expects(o.warn != nullptr, "pinned_region: warn is null");
    expects(o.source <= pinned_source::allocated, "pinned_region: source is ",
            static_cast<int>(o.source), ", expected one of pinned_source");
    expects(o.locking <= page_locking::never, "pinned_region: locking is ",
            static_cast<int>(o.locking), ", expected one of page_locking");
    (void)plan_chunk(bytes, o.unit_bytes, 1, o.max_chunk_bytes);
    return o;
  }

  /// A task: fills a slice, then hands itself over again. Tasks that are urgent come between.
  struct filler {
    std::shared_ptr<gate_type> gate;

    static void run(void* self) noexcept {
      std::unique_ptr<filler> task(static_cast<filler*>(self));
      const std::shared_ptr<gate_type> gate = task->gate;  // the task may be gone before we are
      std::unique_lock lock(gate->mutex);
      pinned_state* const state = gate->state;
      if (state == nullptr) return;
      ++gate->inside;
      const bool went_on = state->work(lock, 0, state->chunks_.size());
      lock.unlock();
      if (went_on) state->submit(task.release());
      lock.lock();
      state->leave();
    }
  };

  /// A task that cannot be handed over is one less: whoever waits fills too.
  void submit(filler* task) noexcept {
    std::unique_ptr<filler> kept(task);
    try {
      backend_.host_async({}, {&filler::run, task, stream_priority::normal}, {slice_});
      (void)kept.release();
    } catch (...) {  // NOLINT(bugprone-empty-catch)
    }
  }

  /// Under the mutex: one that was at work is not any more.
  void leave() noexcept {
    --gate_->inside;
    gate_->left.notify_all();
  }
  void close() noexcept {
    std::unique_lock lock(gate_->mutex);
    gate_->state = nullptr;
    gate_->left.wait(lock, [this] { return gate_->inside == 0; });
  }

  /// Does a slice of the chunks [first, last), and what it completes. False if nothing is left to
  /// begin. Called under the mutex, which it releases meanwhile.
  bool work(std::unique_lock<std::mutex>& lock, std::size_t first, std::size_t last) noexcept {
    if (gate_->state == nullptr || is_given_up_) {
      for (std::size_t i = first; i < last; ++i) settle_unbegun(chunks_[i]);
      return false;
    }
    const auto is_begun = [this](std::size_t i) { return chunks_[i].claimed == chunks_[i].slices; };
    while (begun_ < chunks_.size() && is_begun(begun_)) ++begun_;
    first = std::max(first, begun_);
    while (first < last && is_begun(first)) ++first;
    if (first >= last) return false;
    pinned_chunk& c = chunks_[first];
    const std::size_t at = c.claimed++ * slice_;
    const std::size_t count = std::min(slice_, c.bytes - at);
    lock.unlock();
    std::exception_ptr error;
    try {
      pages_.touch(c.offset + at, count);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    ++c.done;
    if (error && !c.error) fail(c, error);
    if (c.done == c.claimed && (c.claimed == c.slices || is_given_up_)) settle(lock, c);
    return true;
  }

  void fail(pinned_chunk& c, std::exception_ptr error) noexcept {
    c.error = std::move(error);
    c.slices = c.claimed;  // no more of it is begun
    if (is_all_or_nothing_) is_given_up_ = true;
  }
  /// After all has been given up: chunks that nobody works on have failed with it.
  void settle_unbegun(pinned_chunk& c) noexcept {
    if (c.at == phase::filling && c.done == c.claimed) c.at = phase::failed;
  }

  /// The last slice of a chunk is there.
  void settle(std::unique_lock<std::mutex>& lock, pinned_chunk& c) noexcept {
    if (!c.error && is_pinning_ && !is_given_up_) {
      c.at = phase::registering;
      lock.unlock();
      std::byte* device = nullptr;
      std::exception_ptr error;
      try {
        device = registry_.enter(data(), bytes_, c);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error && options_.allow_unpinned) {
        if (is_all_or_nothing_) is_pinning_ = false;
        remark_unpinned(error);
        c.device = registry_.look_for(data() + c.offset);
      } else if (error) {
        fail(c, error);
      } else {
        registry_.note(c, device);
      }
    } else if (!c.error && !is_given_up_) {
      c.device = registry_.look_for(data() + c.offset);
    } else {
      c.at = phase::failed;
      return;
    }
    c.at = c.error ? phase::failed : phase::ready;
  }

  void remark_unpinned(const std::exception_ptr& error) noexcept {
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& e) {
      pages_.say_unpinned(e.what());
    } catch (...) {
      pages_.say_unpinned("pinned_region: registering failed");
    }
  }

  Backend backend_;
  System system_;
  pinned_options options_;
  std::size_t bytes_;
  pinned_pages<Backend, System> pages_;
  std::size_t slice_ = 0;
  bool is_all_or_nothing_ = false;
  std::shared_ptr<gate_type> gate_ = std::make_shared<gate_type>();  ///< its mutex guards the rest
  std::vector<pinned_chunk> chunks_;
  chunk_registry<Backend, System> registry_{backend_, system_};
  std::size_t begun_ = 0;  ///< all slices of the chunks before have been begun
  bool is_pinning_ = true;
  bool is_given_up_ = false;
};

}  // namespace pulseinfer::detail
