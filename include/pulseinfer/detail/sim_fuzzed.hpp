// SPDX-License-Identifier: Apache-2.0
/// @file
/// Any order that the promises allow, drawn from a seed: a simulated machine that means harm.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "pulseinfer/config.hpp"
#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/detail/sim_queues.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE::detail {

/// Performs a portion of one stream's first operation, or a host task, at a time.
///
/// A copy is cut at words; each piece is read in one portion and written in another, in any order
/// within the batch. A kernel visits its indices in a drawn order, in portions. Uniform draws alone
/// would hardly ever hold one stream back while all others finish, which is what most missing waits
/// need to be seen; so a machine also draws its temper:
/// - *ranked*: streams and workers have ranks, the highest runs as long as it can, and now and then
///   the one that runs loses its rank. Otherwise each portion goes to anyone;
/// - *grain*: how much is done before another may go on, from one piece to everything;
/// - *eagerness*: how much is performed within the calls that enqueue. A lazy machine shows what
///   the host reads or overwrites too early, an eager one what it fills in too late.
class fuzzed_order {
 public:
  fuzzed_order(sim_queues& queues, std::uint64_t seed, int workers)
      : queues_(queues), draw_(seed), workers_(workers) {
    expects(workers >= 0 && workers <= 1024, "fuzzed: workers is ", workers,
            ", expected 0 (drawn) to 1024");
    (void)draw_.next();
    constexpr std::uint64_t grains[] = {1, 4, 64, 1u << 30};
    constexpr std::uint64_t eagernesses[] = {0, 0, 2, 64};
    ranked_ = draw_.one_in(2);
    grain_ = grains[draw_.below(4)];
    eagerness_ = eagernesses[draw_.below(4)];
    worker_rank_ = draw_.next();
    if (workers_ == 0) workers_ = static_cast<int>(1 + draw_.below(4));
  }

  /// Performs one portion; false if there is nothing to do.
  bool step(bool with_tasks) {
    queues_.settle();
    runnable_.clear();
    for (const auto& stream : queues_.streams) {
      if (stream->has_work()) runnable_.push_back(stream.get());
    }
    const bool tasks = with_tasks && has_task();
    if (runnable_.empty() && !tasks) return false;
    queues_.clock_ns += 1 + draw_.below(1'000);
    sim_stream* const chosen = choose(tasks);
    if (chosen == nullptr) {
      advance_tasks();
    } else {
      advance(*chosen);
    }
    queues_.settle();
    return true;
  }

  void poll() { step_up_to(1 + draw_.below(8)); }
  void enqueued() {
    if (eagerness_ > 0) step_up_to(draw_.below(eagerness_));
  }
  void stream_added(sim_stream& stream) { stream.rank = draw_.next(); }

 private:
  void step_up_to(std::uint64_t steps) {
    while (steps > 0 && step(false)) --steps;
  }

  [[nodiscard]] bool has_task() const {
    return !started_.empty() || std::any_of(queues_.tasks.begin(), queues_.tasks.end(),
                                            [](const sim_task& task) { return task.is_ready(); });
  }

  /// The stream whose turn it is, or null where it is the workers'.
  sim_stream* choose(bool tasks) {
    sim_stream* chosen = nullptr;
    if (!ranked_) {
      const std::uint64_t drawn = draw_.below(runnable_.size() + (tasks ? 1 : 0));
      return drawn < runnable_.size() ? runnable_[drawn] : nullptr;
    }
    for (sim_stream* stream : runnable_) {
      if (chosen == nullptr || stream->rank > chosen->rank) chosen = stream;
    }
    if (tasks && (chosen == nullptr || worker_rank_ > chosen->rank)) chosen = nullptr;
    if (draw_.one_in(16)) (chosen == nullptr ? worker_rank_ : chosen->rank) = draw_.next();
    return chosen;
  }

  /// A free worker takes the oldest ready task, or one that took its task earlier runs it.
  void advance_tasks() {
    sim_task task;
    const bool can_start = started_.size() < static_cast<std::size_t>(workers_);
    if (can_start && (started_.empty() || draw_.one_in(2)) && queues_.take_ready_task(task)) {
      started_.push_back(std::move(task));
      return;
    }
    if (started_.empty()) return;
    const auto drawn = started_.begin() + static_cast<std::ptrdiff_t>(draw_.below(started_.size()));
    task = std::move(*drawn);
    started_.erase(drawn);
    queues_.statistics.tasks.operations += 1;
    queues_.statistics.tasks.bytes += task.bytes;
    queues_.run(task.task);
  }

  void advance(sim_stream& stream) {
    const bool is_copy = stream.queue.front().what == sim_operation::kind::copy;
    if (!std::exchange(stream.progress.begun, true)) {
      is_copy ? cut(stream) : queues_.perform(stream, [&] { begin_kernel(stream); });
    }
    if (!stream.error) {
      queues_.perform(stream, [&] { is_copy ? move_pieces(stream) : visit(stream); });
    }
    const sim_progress& progress = stream.progress;
    const bool done = progress.pieces.empty() && progress.visited == progress.total;
    if (done || stream.error) queues_.finish(stream, 0);
  }

  /// Cuts every copy of a batch into a few pieces.
  void cut(sim_stream& stream) {
    const sim_operation& batch = stream.queue.front();
    sim_progress& progress = stream.progress;
    const std::uint64_t most = batch.copies.size() > 64 ? 2 : 6;
    const std::size_t word = static_cast<std::size_t>(word_bytes);
    std::size_t buffer = 0;
    for (const copy_span& copy : batch.copies) {
      std::size_t at = 0;
      for (std::uint64_t cuts = draw_.below(most); at<copy.bytes; cuts -= cuts> 0 ? 1 : 0) {
        const std::size_t words = (copy.bytes - at) / word;
        const std::size_t piece =
            cuts == 0 || words < 2 ? copy.bytes - at : word * (1 + draw_.below(words - 1));
        progress.pieces.push_back({{static_cast<std::byte*>(copy.destination) + at,
                                    static_cast<const std::byte*>(copy.source) + at, piece},
                                   buffer});
        buffer += piece;
        at += piece;
      }
    }
    progress.buffer.resize(buffer);
    progress.unread = progress.pieces.size();
    progress.style = draw_.below(3);
  }

  /// Reads or writes some pieces: in any order, all reads before the first write, or one after the
  /// other.
  void move_pieces(sim_stream& stream) {
    constexpr std::uint64_t reads_first = 1, one_by_one = 2;
    sim_progress& progress = stream.progress;
    auto& pieces = progress.pieces;
    for (std::uint64_t left = 1 + draw_.below(grain_); left > 0 && !pieces.empty(); --left) {
      std::size_t i = draw_.below(pieces.size());
      if (progress.style == one_by_one) i = pieces.size() - 1;
      if (progress.style == reads_first && progress.unread > 0) i = progress.unread - 1;
      sim_piece& piece = pieces[i];
      std::byte* const buffer = progress.buffer.data() + piece.buffer;
      if (!std::exchange(piece.is_read, true)) {
        std::memcpy(buffer, piece.span.source, piece.span.bytes);
        --progress.unread;
      } else {
        std::memcpy(piece.span.destination, buffer, piece.span.bytes);
        std::swap(piece, pieces.back());
        pieces.pop_back();
      }
    }
  }

  /// Draws the order of a kernel's indices: upwards, downwards, or by a stride that visits each.
  void begin_kernel(sim_stream& stream) {
    sim_progress& progress = stream.progress;
    const std::uint64_t total = stream.queue.front().kernel.count();
    if (total == 0) return;
    progress.at = draw_.below(total);
    switch (draw_.below(3)) {
      case 0:
        progress.stride = 1;
        break;
      case 1:
        progress.stride = total - 1;
        break;
      default:
        progress.stride = draw_.below(total);
    }
    while (std::gcd(progress.stride, total) != 1) progress.stride = (progress.stride + 1) % total;
    progress.total = total;
  }

  void visit(sim_stream& stream) {
    sim_progress& progress = stream.progress;
    const std::uint64_t left = progress.total - progress.visited;
    if (left == 0) return;
    const std::uint64_t portion =
        grain_ == 1 ? 1 + draw_.below(progress.total / 8 + 1) : 1 + draw_.below(left);
    const std::uint64_t count = std::min(portion, left);
    stream.queue.front().kernel.run(progress.at, progress.stride, count, progress.total);
    progress.at = (progress.at + count % progress.total * progress.stride) % progress.total;
    progress.visited += count;
  }

  sim_queues& queues_;
  random_source draw_;
  int workers_;
  bool ranked_ = false;
  std::uint64_t grain_ = 1;
  std::uint64_t eagerness_ = 0;
  std::uint64_t worker_rank_ = 0;
  std::vector<sim_task> started_;
  std::vector<sim_stream*> runnable_;
};

}  // namespace pulseinfer::detail
