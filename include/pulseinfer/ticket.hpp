// SPDX-License-Identifier: Apache-2.0
/// @file
/// Tickets: what a caller holds of a transfer that goes on without it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <utility>
#include <vector>

#include "pulseinfer/block_copy.hpp"
#include "pulseinfer/block_store.hpp"
#include "pulseinfer/concepts.hpp"
#include "pulseinfer/error.hpp"
#include "pulseinfer/transfer_cost.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Life of a transfer. It moves downwards only; the last three are final.
enum class transfer_phase : std::uint8_t {
  pending,    ///< some of its device work is not enqueued yet
  submitted,  ///< all of its device work is enqueued: streams can wait for it
  done,       ///< ended without a failure. Units the store did not have, or refused, say so
  failed,     ///< something failed; units say which. `sync` throws what
  cancelled,  ///< cancelled before the last unit; what had begun was finished
};

/// What became of a wait.
enum class [[nodiscard]] wait_outcome : std::uint8_t{
    enqueued,       ///< the stream will wait
    not_submitted,  ///< nothing was enqueued: the transfer is pending. Run something else, or
                    ///< sync_submitted
    incomplete,     ///< nothing was enqueued: some units will not come. `sync`, then `status` tells
                    ///< which
};

/// A transfer in numbers. Times are the backend's clock; 0 while they have not come.
struct transfer_report {
  std::int64_t units = 0;  ///< asked for; of a resolved step, known once it is submitted
  std::int64_t moved = 0;
  std::int64_t bytes = 0;                   ///< payload moved
  transfer_way way = transfer_way::staged;  ///< that the units went
  /// Of them, those that were copied from where they lay while the first others were gathered; see
  /// transfer_options::head_copies and plans.
  std::int64_t head_units = 0;
  bool planned = false;          ///< went by one of transfer_options::plans
  double predicted_seconds = 0;  ///< of the way, where it was chosen by its cost
  std::uint64_t requested_ns = 0;
  std::uint64_t started_ns = 0;    ///< the first host task ran
  std::uint64_t submitted_ns = 0;  ///< the last device work was enqueued
  /// From when on the link alone held the first copy back, and when the host saw that the last one
  /// was through. Between them the link may have had pauses, and other transfers' copies.
  std::uint64_t link_began_ns = 0;
  std::uint64_t link_ended_ns = 0;
  std::uint64_t ended_ns = 0;  ///< completion, as the host saw it
};

namespace detail {

/// One unit on its way.
struct unit_move {
  std::byte* host = nullptr;          ///< offload: the slot's bytes
  const std::byte* source = nullptr;  ///< recall: the slot's bytes
  device_page page = device_page::none;
  std::int32_t row = 0;    ///< recall: its lease
  logical_block block{0};  ///< recall
  unit_status status = unit_status::pending;
  host_slot slot = host_slot::none;  ///< offload
  unit_status* mirrored = nullptr;   ///< recall of a step: the status in the step's mirror
};

/// The part of a transfer's state that its ticket sees. Reused for a later transfer when it is
/// final and unheld.
template <backend Backend>
struct ticket_state {
  explicit ticket_state(Backend b)
      : backend(b), ready(backend.make_event()), pages_usable(backend.make_event()) {}

  [[nodiscard]] bool is_final() const noexcept {
    return phase.load(std::memory_order_acquire) >= transfer_phase::done;
  }

  Backend backend;
  typename Backend::event ready;         ///< the engine's stream at the call
  typename Backend::event pages_usable;  ///< after the last work on the engine's pages
  std::atomic<transfer_phase> phase{transfer_phase::done};
  std::atomic<bool> held{false};  ///< a ticket points here
  bool ends_with_pages = false;   ///< a recall of units: nothing follows when the pages are usable
  std::atomic<bool> cancel{false};
  std::atomic<bool> incomplete{
      false};  ///< recall: some pages will not be filled; set before `submitted`
  std::atomic<std::int64_t> outstanding{0};  ///< parts of the transfer that run side by side
  std::vector<unit_move> units;
  transfer_report report;
  std::exception_ptr error;  ///< valid when the phase is failed
};

}  // namespace detail

/// Holds a transfer. Move-only; dropping it does not stop the transfer. Outlived by the engine that
/// gave it.
///
/// @par Threads  one at a time may use a ticket, but `cancel` may be called beside any other member;
///               different tickets are independent
/// @par Cost     polls and waits are O(1) and allocate nothing
template <backend Backend>
class [[nodiscard]] ticket {
 public:
  explicit ticket(detail::ticket_state<Backend>& state) noexcept : state_(&state) {}
  ticket(ticket&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}
  /// Swaps: what this one held is dropped with `other`. A ticket that was moved from holds nothing
  /// and may be assigned to or destroyed, nothing else.
  ticket& operator=(ticket&& other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~ticket() {
    if (state_ != nullptr) state_->held.store(false, std::memory_order_release);
  }

  /// Where the transfer is. Does not block; a simulated machine goes on in `sync…` only.
  [[nodiscard]] transfer_phase phase() const noexcept {
    return state_->phase.load(std::memory_order_acquire);
  }
  /// The transfer has ended, well or not.
  [[nodiscard]] bool is_final() const noexcept { return state_->is_final(); }

  /// All units have come, and work that is enqueued from now on may use their pages, on any stream.
  /// Of `recall_units` this is true a little before it has ended: a host task has yet to see it.
  /// False where some units will not come. Asks the device for one event at most.
  [[nodiscard]] bool is_complete() const noexcept {
    const transfer_phase now = phase();
    if (now == transfer_phase::done) return state_->report.moved == state_->report.units;
    return now == transfer_phase::submitted && state_->ends_with_pages &&
           !state_->incomplete.load(std::memory_order_acquire) &&
           state_->backend.poll(state_->pages_usable) == event_state::done;
  }

  /// Makes a stream wait until the pages can be used on it: a recall has filled them, or an offload
  /// has read them. Never blocks, and may be called for several streams.
  /// @return whether the stream waits; if not, nothing was enqueued
  /// @throws device_error  when the wait itself cannot be enqueued; it may be tried again
  wait_outcome enqueue_wait(typename Backend::stream_ref stream) {
    const transfer_phase now = phase();
    if (now == transfer_phase::pending) return wait_outcome::not_submitted;
    if (now >= transfer_phase::failed || state_->incomplete.load(std::memory_order_acquire)) {
      return wait_outcome::incomplete;
    }
    state_->backend.enqueue_wait(state_->pages_usable, stream);
    return wait_outcome::enqueued;
  }

  /// Blocks until `enqueue_wait` can give its answer: the phase is no longer pending. The
  /// transfer's work may still be under way.
  void sync_submitted() {
    state_->backend.sync_until([this] { return phase() != transfer_phase::pending; });
  }

  /// Blocks until the transfer has ended; a cancelled one does not throw.
  /// @throws what failed it, `device_error` as a rule
  void sync() {
    state_->backend.sync_until([this] { return is_final(); });
    if (phase() == transfer_phase::failed && state_->error) std::rethrow_exception(state_->error);
  }

  /// Asks the transfer to stop at its next chunk. What has begun is finished; the rest is
  /// `cancelled`. Whether it came in time, the phase tells once it is final.
  void cancel() noexcept { state_->cancel.store(true, std::memory_order_release); }

  /// Numbers of the transfer. The reference lives as long as the ticket.
  /// @throws std::logic_error  before that
  [[nodiscard]] const transfer_report& report() const {
    detail::expects<std::logic_error>(is_final(), "ticket: the transfer has not ended");
    return state_->report;
  }

  /// What became of unit i, in the order in which the units were given (of a resolved step: row by
  /// row, in block order).
  /// @throws std::logic_error   before the transfer has ended
  /// @throws std::out_of_range  on i
  [[nodiscard]] unit_status status(std::size_t i) const {
    detail::expects<std::logic_error>(is_final(), "ticket: the transfer has not ended");
    detail::expects<std::out_of_range>(i < state_->units.size(), "ticket: unit is ", i,
                                       ", the transfer has ", state_->units.size());
    return state_->units[i].status;
  }

 private:
  detail::ticket_state<Backend>* state_;
};

}  // namespace pulseinfer
