// SPDX-License-Identifier: Apache-2.0
/// @file
/// The demo's main job: sparse decode of a captured model over an offloaded cache. For each step and
/// layer: select, resolve, recall, attend; and beside it what full attention and per-head selection
/// would have done.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "capture.hpp"
#include "engine.hpp"
#include "pulseinfer/pulseinfer.hpp"

namespace demo {

struct decode_options {
  std::int32_t requests = 2;  ///< they share the captured steps: request r takes the r-th part
  std::int64_t steps = 0;     ///< captured steps to decode in all; 0: every one
  std::int32_t budget_blocks = 32;
  std::int32_t hot_pages = 0;  ///< a request; 0: twice the budget
  std::int32_t sink_blocks = 1;
  std::int32_t window_blocks = 2;
  pulseinfer::digest_kind digest = pulseinfer::digest_options{}.kind;
};

/// Sums over steps, layers and query heads.
struct decode_result {
  std::int64_t steps = 0;
  std::int64_t requests = 0;
  std::int64_t pool_blocks = 0;     ///< pages of the pool
  std::int64_t context_blocks = 0;  ///< of all requests at the end
  std::int64_t bytes_verified = 0;  ///< recalled bytes compared with the capture
  std::int64_t bytes_wrong = 0;     ///< of these, and of the resident ones that were chosen
  std::int64_t resident_bytes_verified = 0;
  std::int64_t chosen_units = 0;
  std::int64_t missed_units = 0;
  std::int64_t union_units = 0;  ///< of the per-head lists
  double mass_consensus = 0;
  double mass_per_head = 0;
  double mass_always_in = 0;
  std::int64_t mass_samples = 0;
  double output_error = 0;
  std::int64_t output_samples = 0;
  std::uint64_t selection_hash = 14695981039346656037ull;  ///< FNV-1a over all chosen ids
};

template <class Backend>
class decoder {
 public:
  using stream_ref = typename Backend::stream_ref;

  decoder(Backend backend, const capture& c, const decode_options& o, pulseinfer::trace& t)
      : backend_(backend),
        capture_(&c),
        o_(checked(c, o)),
        trace_(&t),
        engine_(backend, c, pool_pages(), o_.requests),
        store_(backend, c.geometry,
               {.capacity_bytes = o_.requests * engine_.max_blocks() * c.geometry.layers *
                                  c.geometry.unit_bytes(),
                .max_sequences = o_.requests,
                .max_blocks = static_cast<std::int32_t>(engine_.max_blocks())}),
        digests_(
            backend, c.geometry,
            {.kind = o_.digest, .max_requests = o_.requests, .max_blocks = engine_.max_blocks()}),
        selector_(backend, digests_, selection_options(1)),
        per_head_(backend, digests_, selection_options(c.query_heads)),
        hot_(backend, engine_.pool(),
             {.pages_per_request = o_.hot_pages,
              .budget_blocks = o_.budget_blocks,
              .max_requests = o_.requests,
              .max_rows = o_.requests,
              .max_blocks = engine_.max_blocks()}),
        mover_(backend, store_, engine_.pool(),
               {.staging_bytes = 2 << 20, .chunk_bytes = 256 << 10}),
        writer_(digests_, mover_, engine_.pool()),
        stream_(backend_.make_stream(pulseinfer::stream_priority::normal)),
        batch_arrays_(backend, static_cast<std::size_t>(2 * o_.requests)),
        queries_(backend, row_floats()),
        device_queries_(backend, row_floats()),
        pages_(backend, 2 * row_pages()),
        weights_(backend, static_cast<std::size_t>(o_.requests * c.query_heads * width() *
                                                   c.geometry.block_tokens)),
        output_(backend, row_floats()),
        host_output_(backend, row_floats()),
        ids_(backend,
             static_cast<std::size_t>(o_.requests * (c.query_heads + 1) * o_.budget_blocks)),
        counts_(backend, static_cast<std::size_t>(o_.requests * (c.query_heads + 1))),
        strip_(backend, static_cast<std::size_t>(engine_.pool().layout().unit_bytes())) {}

  decode_result run() {
    result_.requests = o_.requests;
    result_.pool_blocks = engine_.pool().layout().pages;
    for (std::int32_t r = 0; r < o_.requests; ++r) prefill(r);
    for (std::int64_t step = 0; step < steps_per_request(); ++step) {
      decode_step(step);
      if (step % 8 == 7 || step + 1 == steps_per_request()) {
        std::fprintf(
            stderr, "  step %lld of %lld: %lld units recalled, %lld of %lld chosen were hot\n",
            as_ll(step + 1), as_ll(steps_per_request()), as_ll(result_.missed_units),
            as_ll(result_.chosen_units - result_.missed_units), as_ll(result_.chosen_units));
      }
    }
    result_.steps = o_.requests * steps_per_request();
    for (const auto& r : requests_)
      result_.context_blocks += capture_->geometry.blocks_of(r.tokens);
    for (auto& r : requests_) {
      if (hot_.try_take_back(r.index, stream_) != pulseinfer::take_back_outcome::taken) {
        throw std::logic_error("demo: a request's pages are still in use at the end");
      }
      for (std::int32_t layer = 0; layer < capture_->geometry.layers; ++layer) {
        writer_.sync_layer(layer);
      }
      writer_.close(r.index);
      (void)store_.close_sequence(r.sequence);
    }
    backend_.sync(stream_);
    if (store_.counts().free != store_.counts().capacity) {
      throw std::logic_error("demo: the store did not get all its slots back");
    }
    return result_;
  }

 private:
  struct request {
    std::int32_t index = 0;
    pulseinfer::sequence_id sequence;
    std::int64_t first_step = 0;  ///< of the capture
    std::int64_t tokens = 0;      ///< in the cache
  };

  static long long as_ll(std::int64_t n) { return static_cast<long long>(n); }

  static decode_options checked(const capture& c, decode_options o) {
    if (o.steps == 0) o.steps = c.steps;
    if (o.hot_pages == 0) o.hot_pages = 2 * o.budget_blocks;
    const auto check = [](const char* name, std::int64_t value, std::int64_t least,
                          std::int64_t most) {
      if (value < least || value > most) {
        throw std::invalid_argument("demo: " + std::string(name) + " is " + std::to_string(value) +
                                    ", expected " + std::to_string(least) + " to " +
                                    std::to_string(most));
      }
    };
    check("requests", o.requests, 1, 64);
    check("steps", o.steps, o.requests, c.steps);
    const std::int64_t blocks = c.prompt_tokens / c.geometry.block_tokens;
    check("budget (blocks)", o.budget_blocks, 1, blocks - o.sink_blocks - o.window_blocks);
    check("hot pages", o.hot_pages, o.budget_blocks, 1 << 20);
    if (o.steps % o.requests != 0) {
      throw std::invalid_argument("demo: " + std::to_string(o.steps) +
                                  " steps cannot be shared evenly by " +
                                  std::to_string(o.requests) + " requests");
    }
    return o;
  }
  [[nodiscard]] std::int64_t steps_per_request() const { return o_.steps / o_.requests; }
  [[nodiscard]] std::int64_t always_in() const { return o_.sink_blocks + o_.window_blocks + 1; }
  /// Pages through which a prompt passes on its way to the store.
  static constexpr std::int64_t load_pages = 32;
  [[nodiscard]] std::int64_t pool_pages() const {
    // One page more a request: the block that leaves the window gives its page up a moment later.
    return o_.requests * (always_in() + 1 + o_.hot_pages) + load_pages;
  }
  [[nodiscard]] std::int64_t width() const { return always_in() + o_.budget_blocks; }
  [[nodiscard]] std::size_t row_pages() const {
    return static_cast<std::size_t>(o_.requests * width());
  }
  [[nodiscard]] std::size_t row_floats() const {
    return static_cast<std::size_t>(std::int64_t{o_.requests} * capture_->query_heads *
                                    capture_->geometry.head_dim);
  }
  [[nodiscard]] pulseinfer::consensus_options selection_options(std::int32_t head_groups) const {
    return {.query_heads = capture_->query_heads,
            .budget_blocks = o_.budget_blocks,
            .sink_blocks = o_.sink_blocks,
            .window_blocks = o_.window_blocks,
            .head_groups = head_groups,
            .max_rows = o_.requests};
  }

  /// Brings a request's prompt into the store, through a few pages of the pool, and leaves only
  /// sinks, window and the block being filled in it.
  void prefill(std::int32_t index) {
    const auto& g = capture_->geometry;
    request r;
    r.index = index;
    r.sequence = store_.open_sequence().value();
    r.first_step = index * steps_per_request();
    r.tokens = capture_->prompt_tokens + r.first_step;
    std::vector<std::int32_t> lent;
    for (std::int32_t i = 0; i < o_.hot_pages; ++i) lent.push_back(engine_.take_page());
    hot_.lend(index, lent, stream_);
    const std::int64_t blocks = g.blocks_of(r.tokens);
    writer_.open(index, r.sequence);
    const std::uint64_t begin = backend_.now_ns();
    for (std::int64_t first = 0; first < blocks; first += load_pages) {
      const std::int64_t last = std::min(first + load_pages, blocks);
      for (std::int64_t block = first; block < last; ++block) {
        engine_.page_of(index, block) = engine_.take_page();
        const std::int64_t token = block * g.block_tokens;
        engine_.write_tokens(index, token, std::min<std::int64_t>(g.block_tokens, r.tokens - token),
                             stream_);
      }
      write_behind(r, std::min(last * g.block_tokens, r.tokens));
      sync_stored(r, std::min(last, r.tokens / g.block_tokens));
      for (std::int64_t block = first; block < last; ++block) {
        const bool stays =
            block < o_.sink_blocks || block >= r.tokens / g.block_tokens - o_.window_blocks;
        if (!stays) release_block(r, block);
      }
    }
    trace_->add("engine", "prefill and offload", begin, backend_.now_ns(), "blocks", blocks);
    requests_.push_back(std::move(r));
  }

  /// Digests and offloads, in all layers, the blocks that the request's tokens fill.
  void write_behind(const request& r, std::int64_t tokens) {
    engine_.sync_table(stream_);
    const pulseinfer::appended_row row{r.index, tokens};
    for (std::int32_t layer = 0; layer < capture_->geometry.layers; ++layer) {
      if (!writer_.append(layer, {&row, 1}, engine_.host_table(), engine_.device_table(),
                          stream_)) {
        throw std::runtime_error("demo: a block could not be handed over to the store");
      }
    }
  }
  /// Waits until the store has the first `blocks` blocks of a request, in all layers.
  void sync_stored(const request& r, std::int64_t blocks) {
    for (std::int32_t layer = 0; layer < capture_->geometry.layers; ++layer) {
      if (writer_.stored_blocks(layer, r.index) >= blocks) continue;
      writer_.sync_layer(layer);
      if (writer_.stored_blocks(layer, r.index) < blocks) {
        throw std::runtime_error("demo: the store did not get a block");
      }
    }
  }
  static void check_all_moved(const pulseinfer::ticket<Backend>& t) {
    if (t.report().moved != t.report().units) {
      throw std::runtime_error("demo: a transfer moved " + std::to_string(t.report().moved) +
                               " of " + std::to_string(t.report().units) + " units");
    }
  }
  void release_block(request& r, std::int64_t block) {
    std::int32_t& page = engine_.page_of(r.index, block);
    engine_.give_page(page);
    page = -1;
  }

  /// The token of this step goes into the block being filled. A block that becomes full is digested
  /// and offloaded at once; its page is given up when it leaves the window, long after.
  void append(request& r) {
    const std::int32_t block_tokens = capture_->geometry.block_tokens;
    const std::int64_t block = r.tokens / block_tokens;
    if (r.tokens % block_tokens == 0) engine_.page_of(r.index, block) = engine_.take_page();
    engine_.write_tokens(r.index, r.tokens, 1, stream_);
    ++r.tokens;
    if (r.tokens % block_tokens != 0) return;
    write_behind(r, r.tokens);
    const std::int64_t left = r.tokens / block_tokens - o_.window_blocks - 1;
    if (left < o_.sink_blocks) return;
    sync_stored(r, left + 1);
    release_block(r, left);
  }

  void decode_step(std::int64_t step) {
    std::int64_t most_tokens = 0;
    for (request& r : requests_) {
      append(r);
      most_tokens = std::max(most_tokens, r.tokens);
    }
    engine_.sync_table(stream_);
    std::vector<std::int32_t> rows;
    for (const request& r : requests_) {
      const auto row = rows.size();
      rows.push_back(r.index);
      batch_arrays_[row] = r.index;
      batch_arrays_[static_cast<std::size_t>(o_.requests) + row] =
          static_cast<std::int32_t>(r.tokens);
    }
    const pulseinfer::batch_view batch{.requests = rows,
                                       .device_requests = batch_arrays_.device_data(),
                                       .device_tokens = batch_arrays_.device_data() + o_.requests,
                                       .max_tokens = most_tokens};
    for (std::int32_t layer = 0; layer < capture_->geometry.layers; ++layer) {
      decode_layer(step, layer, batch);
    }
  }

  void decode_layer(std::int64_t step, std::int32_t layer, const pulseinfer::batch_view& batch) {
    upload_queries(step, layer);
    const std::string name = "layer " + std::to_string(layer);
    const std::uint64_t begin = backend_.now_ns();
    const pulseinfer::query_view queries{device_queries_.data(), pulseinfer::element_type::f32};
    const auto chosen = selector_.select(layer, batch, queries, stream_);
    const auto resolved = hot_.resolve(layer, batch, chosen, stream_).value();
    std::vector<pulseinfer::sequence_id> sequences;
    for (const request& r : requests_) sequences.push_back(r.sequence);
    auto ticket = mover_.recall(resolved, sequences, stream_).value();
    ticket.sync_submitted();  // a scheduler would run another group here
    const std::uint64_t submitted = backend_.now_ns();
    if (ticket.enqueue_wait(stream_) != pulseinfer::wait_outcome::enqueued) {
      ticket.sync();
      check_all_moved(ticket);
    }
    attend(layer, batch, resolved);
    backend_.copy_async(host_output_.data(), output_.data(), output_.bytes(),
                        pulseinfer::copy_direction::device_to_host, stream_);
    backend_.sync(stream_);
    ticket.sync();
    check_all_moved(ticket);
    const auto& numbers = ticket.report();
    trace_->add("engine", name + ": select, resolve, recall", begin, submitted);
    trace_->add("engine", name + ": attend", submitted, backend_.now_ns());
    trace_->add("recall", name, numbers.requested_ns, numbers.ended_ns, "units", numbers.units);
    result_.missed_units += numbers.units;

    const auto per_head = per_head_.select(layer, batch, queries, stream_);
    download(chosen, 0);
    download(per_head, static_cast<std::size_t>(chosen.lists));
    backend_.sync(stream_);
    verify(layer, resolved);
    compare(step, layer);
  }

  void upload_queries(std::int64_t step, std::int32_t layer) {
    const auto row = std::int64_t{capture_->query_heads} * capture_->geometry.head_dim;
    for (std::size_t r = 0; r < requests_.size(); ++r) {
      const float* from = capture_->queries[static_cast<std::size_t>(layer)].data() +
                          (requests_[r].first_step + step) * row;
      std::copy(from, from + row, queries_.data() + static_cast<std::int64_t>(r) * row);
    }
    backend_.copy_async(device_queries_.data(), queries_.data(), queries_.bytes(),
                        pulseinfer::copy_direction::host_to_device, stream_);
  }

  void attend(std::int32_t layer, const pulseinfer::batch_view& batch,
              const pulseinfer::resolved_step& resolved) {
    const auto& g = capture_->geometry;
    std::int32_t* lengths = pages_.data() + row_pages();
    backend_.for_each({batch.rows(), width()}, {}, row_pages() * 8,
                      list_pages{.table = engine_.device_table(),
                                 .requests = batch.device_requests,
                                 .tokens = batch.device_tokens,
                                 .chosen_pages = resolved.pages,
                                 .k = resolved.k,
                                 .sinks = o_.sink_blocks,
                                 .window = o_.window_blocks,
                                 .block_tokens = g.block_tokens,
                                 .pages = pages_.data(),
                                 .lengths = lengths},
                      stream_);
    const attention_view view{.keys = engine_.pool().reader(layer, 0),
                              .values = engine_.pool().reader(layer, 1),
                              .pages = pages_.data(),
                              .lengths = lengths,
                              .width = width(),
                              .block_tokens = g.block_tokens,
                              .query_heads = capture_->query_heads,
                              .heads_per_kv = capture_->query_heads / g.kv_heads,
                              .head_dim = g.head_dim,
                              .queries = device_queries_.data(),
                              .weights = weights_.data(),
                              .output = output_.data()};
    const auto lists = std::int64_t{batch.rows()} * capture_->query_heads;
    const auto bytes = static_cast<std::uint64_t>(batch.rows() * width() * g.unit_bytes() / 2);
    backend_.for_each({lists, width() * g.block_tokens}, {}, bytes, attention_logits{view},
                      stream_);
    backend_.for_each_row(lists, {}, weights_.bytes(), attention_softmax{view}, stream_);
    backend_.for_each({lists, g.head_dim}, {}, bytes, attention_output{view}, stream_);
  }

  void download(const pulseinfer::selection& s, std::size_t first_list) {
    const std::size_t at = first_list * static_cast<std::size_t>(s.k);
    backend_.copy_async(ids_.data() + at, s.ids,
                        static_cast<std::size_t>(s.lists) * static_cast<std::size_t>(s.k) * 4,
                        pulseinfer::copy_direction::device_to_host, stream_);
    backend_.copy_async(counts_.data() + first_list, s.counts,
                        static_cast<std::size_t>(s.lists) * 4,
                        pulseinfer::copy_direction::device_to_host, stream_);
  }
  /// The blocks of a downloaded list.
  [[nodiscard]] std::span<const std::int32_t> list(std::size_t i) const {
    return {ids_.data() + i * static_cast<std::size_t>(o_.budget_blocks),
            static_cast<std::size_t>(counts_[i])};
  }

  /// Compares the pages of every chosen block, recalled or resident, with the capture.
  void verify(std::int32_t layer, const pulseinfer::resolved_step& resolved) {
    const auto& layout = engine_.pool().layout();
    const std::int64_t strip = layout.plane[0].strip_bytes;  // one a plane, and they are alike
    std::vector<std::int32_t> pages(static_cast<std::size_t>(resolved.rows * resolved.k));
    download_words(resolved.pages, pages);
    for (std::size_t row = 0; row < requests_.size(); ++row) {
      std::set<std::int32_t> missed;
      for (const auto& miss : resolved.misses(static_cast<std::int32_t>(row))) {
        missed.insert(miss.block);
      }
      const auto chosen = list(row);
      result_.chosen_units += static_cast<std::int64_t>(chosen.size());
      for (std::size_t i = 0; i < chosen.size(); ++i) {
        hash(chosen[i]);
        const std::int32_t page = pages[row * static_cast<std::size_t>(resolved.k) + i];
        for (int plane = 0; plane < 2; ++plane) {
          backend_.copy_async(strip_.data() + plane * strip,
                              engine_.pool().layer(layer).plane[plane] + layout.page_offset(page),
                              static_cast<std::size_t>(strip),
                              pulseinfer::copy_direction::device_to_host, stream_);
        }
        backend_.sync(stream_);
        for (int plane = 0; plane < 2; ++plane) {
          const std::byte* is = strip_.data() + plane * strip;
          const std::byte* should = engine_.expected(layer, plane, chosen[i]);
          for (std::int64_t b = 0; b < strip; ++b) {
            result_.bytes_wrong += is[b] != should[b] ? 1 : 0;
          }
        }
        (missed.count(chosen[i]) > 0 ? result_.bytes_verified : result_.resident_bytes_verified) +=
            layout.unit_bytes();
      }
    }
  }
  void download_words(const std::int32_t* from, std::vector<std::int32_t>& to) {
    pulseinfer::pinned_buffer<std::int32_t, Backend> through(backend_, to.size());
    backend_.copy_async(through.data(), from, through.bytes(),
                        pulseinfer::copy_direction::device_to_host, stream_);
    backend_.sync(stream_);
    std::copy(through.data(), through.data() + to.size(), to.begin());
  }
  void hash(std::int32_t id) {
    for (int byte = 0; byte < 4; ++byte) {
      result_.selection_hash ^= static_cast<std::uint64_t>(id >> (8 * byte)) & 0xff;
      result_.selection_hash *= 1099511628211ull;
    }
  }

  /// Attention mass and output error of this step against full attention, and the per-head lists.
  void compare(std::int64_t step, std::int32_t layer) {
    const auto heads = static_cast<std::size_t>(capture_->query_heads);
    const auto dim = static_cast<std::size_t>(capture_->geometry.head_dim);
    for (std::size_t row = 0; row < requests_.size(); ++row) {
      const request& r = requests_[row];
      const full_attention full = attend_fully(*capture_, layer, r.first_step + step);
      const std::int64_t recent = r.tokens / capture_->geometry.block_tokens - o_.window_blocks;
      std::set<std::int32_t> any_head;
      for (std::size_t h = 0; h < heads; ++h) {
        const std::vector<double>& mass = full.block_mass[h];
        double always = 0;
        for (std::size_t b = 0; b < mass.size(); ++b) {
          const auto block = static_cast<std::int64_t>(b);
          if (block < o_.sink_blocks || block >= recent) always += mass[b];
        }
        const auto mass_of = [&](std::span<const std::int32_t> blocks) {
          double sum = always;
          for (const std::int32_t b : blocks) sum += mass[static_cast<std::size_t>(b)];
          return sum;
        };
        const auto own = list(requests_.size() + row * heads + h);
        any_head.insert(own.begin(), own.end());
        result_.mass_consensus += mass_of(list(row));
        result_.mass_per_head += mass_of(own);
        result_.mass_always_in += always;
        ++result_.mass_samples;
        double difference = 0;
        double norm = 0;
        for (std::size_t i = 0; i < dim; ++i) {
          const double is = host_output_[(row * heads + h) * dim + i];
          const double should = full.output[h * dim + i];
          difference += (is - should) * (is - should);
          norm += should * should;
        }
        result_.output_error += std::sqrt(difference / norm);
        ++result_.output_samples;
      }
      result_.union_units += static_cast<std::int64_t>(any_head.size());
    }
  }

  Backend backend_;
  const capture* capture_;
  decode_options o_;
  pulseinfer::trace* trace_;
  engine<Backend> engine_;
  pulseinfer::block_store<Backend> store_;
  pulseinfer::digest_store<Backend> digests_;
  pulseinfer::consensus_selector<Backend> selector_;
  pulseinfer::consensus_selector<Backend> per_head_;
  pulseinfer::hot_buffer<Backend> hot_;
  pulseinfer::transfer_engine<Backend, pulseinfer::block_store<Backend>> mover_;
  pulseinfer::context_writer<Backend, pulseinfer::block_store<Backend>> writer_;
  typename Backend::stream stream_;
  pulseinfer::pinned_buffer<std::int32_t, Backend> batch_arrays_;  ///< requests, then tokens
  pulseinfer::pinned_buffer<float, Backend> queries_;
  pulseinfer::device_buffer<float, Backend> device_queries_;
  pulseinfer::device_buffer<std::int32_t, Backend> pages_;  ///< pages, then lengths
  pulseinfer::device_buffer<float, Backend> weights_;
  pulseinfer::device_buffer<float, Backend> output_;
  pulseinfer::pinned_buffer<float, Backend> host_output_;
  pulseinfer::pinned_buffer<std::int32_t, Backend> ids_;  ///< consensus lists, then per-head lists
  pulseinfer::pinned_buffer<std::int32_t, Backend> counts_;
  pulseinfer::pinned_buffer<std::byte, Backend> strip_;
  std::vector<request> requests_;
  decode_result result_;
};

}  // namespace demo
