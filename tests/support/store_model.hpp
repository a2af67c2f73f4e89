// SPDX-License-Identifier: Apache-2.0
/// @file
/// What a block store should do, as slowly and plainly as it can be said, and a driver that holds a
/// store against it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/detail/random.hpp"

namespace store_test {

using pulseinfer::block_key;
using pulseinfer::close_outcome;
using pulseinfer::eviction_scope;
using pulseinfer::host_slot;
using pulseinfer::logical_block;
using pulseinfer::name_outcome;
using pulseinfer::reserve_outcome;
using pulseinfer::sequence_id;
using pulseinfer::store_counts;
using pulseinfer::store_event;
using pulseinfer::trim_outcome;

inline constexpr std::int32_t layers = 2;
inline constexpr std::int64_t unit_bytes = 64;
inline constexpr pulseinfer::kv_geometry geometry{
    .layers = layers, .kv_heads = 1, .head_dim = 8, .block_tokens = 2};
static_assert(geometry.unit_bytes() == unit_bytes);

struct unit {
  std::int32_t layer;
  std::int32_t block;
  friend bool operator==(const unit&, const unit&) = default;
};

/// What the bytes of a unit are made of, so that no other unit's bytes pass for them.
struct stamp {
  std::int32_t index;
  std::uint32_t generation;
  unit at;
  std::int64_t version;
  std::byte rest[unit_bytes - 24];
  friend bool operator==(const stamp&, const stamp&) = default;
};
static_assert(sizeof(stamp) == unit_bytes);

inline stamp stamp_of(sequence_id id, unit at, std::int64_t version = 0) {
  stamp made{id.index, id.generation, at, version, {}};
  std::fill(std::begin(made.rest), std::end(made.rest),
            static_cast<std::byte>(id.index + 7 * at.layer + 13 * at.block + version));
  return made;
}

// Byte by byte, and volatile: ThreadSanitizer does not see a memcpy that the compiler expands.
inline stamp read_stamp(const std::byte* bytes) {
  std::array<std::byte, unit_bytes> found;
  const volatile std::byte* from = bytes;
  for (std::byte& b : found) b = *from++;
  return std::bit_cast<stamp>(found);
}
inline void write_stamp(std::byte* bytes, const stamp& content) {
  volatile std::byte* to = bytes;
  for (const std::byte b : std::bit_cast<std::array<std::byte, unit_bytes>>(content)) *to++ = b;
}

/// A store as a list of blocks and a list of sequences that point to them. Everything that the
/// real one keeps up to date is counted anew here whenever it is asked for.
class model {
 public:
  static constexpr std::int32_t sequences = 5;
  static constexpr std::int32_t positions = 5;

  struct sizes {
    std::int64_t capacity = 0;
    std::int64_t records = 0;
    std::size_t events = 0;
    eviction_scope scope = eviction_scope::unit;
  };

  enum class state { absent, writing, ready };
  struct entry {
    state is = state::absent;
    stamp content = {};
  };
  struct block {
    std::int32_t position = 0;
    std::array<entry, layers> units = {};
    int damaged = 0;  ///< slots that are kept for those who may be reading them
    std::optional<block_key> name = {};
    bool is_told = false;  ///< the last event of it said that it is stored

    [[nodiscard]] int count(state is) const {
      return static_cast<int>(
          std::count_if(units.begin(), units.end(), [is](const entry& e) { return e.is == is; }));
    }
    [[nodiscard]] bool is_whole() const { return count(state::ready) == layers; }
  };
  using block_ptr = std::shared_ptr<block>;
  struct sequence {
    std::uint32_t generation = 0;
    bool is_used = false;  ///< open, or closed and still read
    bool is_open = false;
    int leases = 0;
    bool is_held = false;  ///< one more lease
    std::int64_t deadline = 0;
    std::int64_t last_use = 0;
    std::map<std::int32_t, block_ptr> blocks = {};  ///< by position

    [[nodiscard]] bool is_read() const { return leases > 0 || is_held; }
    /// The last block of which something can be read.
    [[nodiscard]] block_ptr end() const {
      for (auto at = blocks.rbegin(); at != blocks.rend(); ++at) {
        if (at->second->count(state::ready) > 0) return at->second;
      }
      return nullptr;
    }
  };

  explicit model(const sizes& of) : of_(of) {}

  [[nodiscard]] sequence& at(std::int32_t index) { return all_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] bool has_unused() const {
    return std::any_of(all_.begin(), all_.end(), [](const sequence& s) { return !s.is_used; });
  }
  void use(std::int32_t index) { at(index).last_use = ++clock_; }

  [[nodiscard]] store_counts counts() const {
    store_counts c{.capacity = of_.capacity};
    for (const block_ptr& b : blocks_) {
      const auto is_held_by = [&](auto predicate) { return some_holder(b, predicate); };
      (is_wanted(b) ? c.writing : c.quarantined) += b->count(state::writing);
      c.quarantined += b->damaged;
      (is_held_by([](const sequence& s) { return s.is_open && s.is_read(); })    ? c.pinned
       : is_held_by([](const sequence& s) { return !s.is_open && s.is_read(); }) ? c.quarantined
                                                                                 : c.evictable) +=
          b->count(state::ready);
    }
    c.free = c.capacity - c.writing - c.evictable - c.pinned - c.quarantined;
    return c;
  }

  void open(std::int32_t index, std::uint32_t generation) {
    at(index) = {.generation = generation, .is_used = true, .is_open = true};
    use(index);
  }
  /// The blocks of a prompt that can be read, from the first on.
  [[nodiscard]] std::vector<block_ptr> found(const std::vector<block_key>& prompt) const {
    std::vector<block_ptr> chain;
    for (const block_key& key : prompt) {
      const block_ptr b = named(key);
      if (b == nullptr || !b->is_whole() || b->position != std::ssize(chain) ||
          b->position >= positions) {
        break;
      }
      chain.push_back(b);
    }
    return chain;
  }
  void join(std::int32_t index, const block_ptr& b) {
    std::erase(cached_, b);
    at(index).blocks[b->position] = b;
  }
  /// Lets the blocks of a sequence go from a position on, the last one first.
  void let_go(std::int32_t index, std::int32_t first) {
    while (!at(index).blocks.empty() && at(index).blocks.rbegin()->first >= first) {
      const block_ptr b = at(index).blocks.rbegin()->second;
      at(index).blocks.erase(b->position);
      if (some_holder(b, [](const sequence&) { return true; })) continue;
      b->damaged = 0;
      if (b->name && b->is_whole()) {
        cached_.push_back(b);
        continue;
      }
      b->name.reset();
      for (entry& e : b->units) {
        if (e.is == state::ready) e = {};
      }
    }
    settle();
  }
  /// What a change leaves to be done: sequences that nobody reads any more, damaged slots that
  /// nobody can read, blocks of which nothing is left.
  void settle() {
    for (std::int32_t i = 0; i < sequences; ++i) {
      if (!at(i).is_used || at(i).is_open || at(i).is_read()) continue;
      at(i).is_used = false;
      let_go(i, 0);
    }
    for (const block_ptr& b : std::vector<block_ptr>(blocks_)) {
      if (!some_holder(b, [](const sequence& s) { return s.is_read(); })) b->damaged = 0;
      if (b->count(state::absent) < layers || b->damaged > 0) continue;
      for (sequence& s : all_) {
        if (s.blocks.contains(b->position) && s.blocks[b->position] == b)
          s.blocks.erase(b->position);
      }
      std::erase(cached_, b);
      std::erase(blocks_, b);
    }
  }

  /// The block of a unit that is to be written; null if there is no room. Gives up what must go.
  [[nodiscard]] block_ptr make_room(std::int32_t writer, std::int32_t position) {
    const auto there = at(writer).blocks.find(position);
    const bool is_new = there == at(writer).blocks.end();
    const bool needs_record = is_new && std::ssize(blocks_) == of_.records;
    if (counts().free == 0 || needs_record) {
      if (!evict(writer, needs_record)) return nullptr;
    }
    if (!is_new) return there->second;
    blocks_.push_back(std::make_shared<block>(block{.position = position}));
    at(writer).blocks[position] = blocks_.back();
    return blocks_.back();
  }

  /// Makes room for all that is absent of some blocks and gives them to their sequence; empty, and
  /// nothing has changed, if there is not enough.
  [[nodiscard]] std::vector<block_ptr> make_room_for_whole(
      std::int32_t writer, const std::vector<std::int32_t>& wanted) {
    std::int64_t units = 0;
    std::int64_t records = 0;
    for (const std::int32_t position : wanted) {
      const auto there = at(writer).blocks.find(position);
      const bool is_new = there == at(writer).blocks.end();
      records += is_new ? 1 : 0;
      units += is_new ? layers : there->second->count(state::absent);
    }
    const auto makes_room = [&](model& in) {
      while (in.counts().free < units || std::ssize(in.blocks_) + records > of_.records) {
        const bool needs_record = std::ssize(in.blocks_) + records > of_.records;
        if (!in.evict(writer, needs_record, true)) return false;
      }
      return true;
    };
    model tried = copy();
    if (!makes_room(tried) || !makes_room(*this)) return {};
    std::vector<block_ptr> got;
    for (const std::int32_t position : wanted) {
      block_ptr& b = at(writer).blocks[position];
      if (b == nullptr) b = blocks_.emplace_back(std::make_shared<block>(block{position}));
      got.push_back(b);
    }
    return got;
  }

  [[nodiscard]] block_ptr named(const block_key& key) const {
    const auto at = std::find_if(blocks_.begin(), blocks_.end(),
                                 [&](const block_ptr& b) { return b->name == key; });
    return at == blocks_.end() ? nullptr : *at;
  }
  [[nodiscard]] bool is_wanted(const block_ptr& b) const {
    return some_holder(b, [](const sequence& s) { return s.is_open; });
  }
  [[nodiscard]] std::int32_t clear() {
    const std::deque<block_ptr> all = cached_;
    for (const block_ptr& b : all) forget_cached(b, store_event::what::cleared);
    return static_cast<std::int32_t>(all.size());
  }
  /// To be called where a block may have become whole, or got a name, or is neither any more.
  void tell(const block_ptr& b, store_event::what otherwise) {
    const bool now = b->name && b->is_whole();
    if (now == b->is_told) return;
    b->is_told = now;
    const store_event event{now ? store_event::what::stored : otherwise, *b->name};
    if (events.size() < of_.events) {
      events.push_back(event);
    } else if (of_.events > 0) {
      ++lost_events;
    }
  }

  std::deque<store_event> events;
  std::int64_t lost_events = 0;

 private:
  template <class Predicate>
  [[nodiscard]] bool some_holder(const block_ptr& b, Predicate is_so) const {
    return std::any_of(all_.begin(), all_.end(), [&](const sequence& s) {
      const auto at = s.blocks.find(b->position);
      return at != s.blocks.end() && at->second == b && is_so(s);
    });
  }
  void forget_cached(const block_ptr& b, store_event::what why) {
    b->units = {};
    tell(b, why);
    settle();
  }

  /// Another model, with blocks of its own.
  [[nodiscard]] model copy() const {
    model to = *this;
    std::map<block_ptr, block_ptr> twin;
    for (block_ptr& b : to.blocks_) b = twin[b] = std::make_shared<block>(*b);
    for (block_ptr& b : to.cached_) b = twin.at(b);
    for (sequence& s : to.all_) {
      for (auto& held : s.blocks) held.second = twin.at(held.second);
    }
    return to;
  }

  [[nodiscard]] bool evict(std::int32_t writer, bool needs_record, bool is_whole = false) {
    if (!cached_.empty()) {
      forget_cached(block_ptr(cached_.front()), store_event::what::evicted);
      return true;
    }
    std::vector<std::int32_t> by_use(sequences);
    for (std::int32_t i = 0; i < sequences; ++i) by_use[static_cast<std::size_t>(i)] = i;
    std::sort(by_use.begin(), by_use.end(),
              [this](std::int32_t a, std::int32_t b) { return at(a).last_use < at(b).last_use; });
    for (const std::int32_t i : by_use) {
      if (i == writer || !at(i).is_open || at(i).is_read()) continue;
      const block_ptr b = at(i).end();
      if (b == nullptr) continue;
      if (needs_record && b->count(state::writing) + b->damaged > 0) continue;
      const sequence* const of_writer = &at(writer);
      if (some_holder(b, [&](const sequence& s) {
            return &s == of_writer || s.is_read() || s.end() != b;
          })) {
        continue;
      }
      for (auto e = b->units.rbegin(); e != b->units.rend(); ++e) {
        if (e->is != state::ready) continue;
        *e = {};
        if (of_.scope == eviction_scope::unit && !needs_record && !is_whole) break;
      }
      tell(b, store_event::what::evicted);
      settle();
      return true;
    }
    return false;
  }

  sizes of_;
  std::vector<sequence> all_ = std::vector<sequence>(sequences);
  std::vector<block_ptr> blocks_;
  std::deque<block_ptr> cached_;  ///< that only their names keep, the next to go first
  std::int64_t clock_ = 0;
};

/// A store and its model, driven by one source of numbers.
/// @tparam Draw  has `below(bound)`: a number in [0, bound)
template <class Backend, class Draw = pulseinfer::detail::random_source>
class twins {
 public:
  twins(const Backend& backend, Draw draw)
      : draw_(std::move(draw)),
        sizes_(drawn_sizes(draw_)),
        store_(backend, geometry,
               {.capacity_bytes = sizes_.capacity * unit_bytes,
                .max_sequences = model::sequences,
                .max_blocks = model::positions,
                .max_stored_blocks = static_cast<std::int32_t>(sizes_.records),
                .scope = sizes_.scope,
                .max_events = static_cast<std::int32_t>(sizes_.events),
                .zero_freed = true,
                .integrity = pulseinfer::integrity::canary}),
        model_(sizes_) {}

  /// One operation on both. False once the two differ.
  [[nodiscard]] bool step() {
    bool same = false;
    switch (some(32)) {
      case 0:
        same = damage();
        break;
      case 1:
      case 2:
        same = open();
        break;
      case 3:
      case 4:
      case 5:
        same = open_prompt();
        break;
      case 6:
      case 7:
      case 8:
        same = fork();
        break;
      case 9:
        same = trim();
        break;
      case 10:
      case 11:
      case 12:
        same = close();
        break;
      case 13:
      case 14:
        same = acquire();
        break;
      case 15:
      case 16:
      case 17:
        same = release();
        break;
      case 18:
        same = end_hold();
        break;
      case 19:
      case 20:
      case 21:
        same = name();
        break;
      case 22:
        same = one_in(16) ? clear() : drain();
        break;
      case 23:
      case 24:
      case 25:
      case 26:
        same = end_write();
        break;
      case 27:
        same = reserve_whole();
        break;
      default:
        same = reserve();
    }
    return same && agree();
  }
  /// True while the numbers go on, where they end.
  [[nodiscard]] const Draw& draw() const { return draw_; }

 private:
  using state = model::state;
  using block_ptr = model::block_ptr;
  using store_type = pulseinfer::block_store<Backend>;
  using lease_type = typename store_type::lease;
  using hold_type = typename store_type::hold;
  static constexpr std::int32_t most_branches = model::positions + 1;
  struct held_lease {
    std::int32_t index;
    std::int32_t layer;
    lease_type lease;
  };
  struct held_prefix {
    std::int32_t index;
    std::uint32_t generation;
    hold_type hold;
  };
  struct write {
    host_slot slot;
    block_ptr block;
    std::int32_t layer;
    stamp content;
  };

  [[nodiscard]] static model::sizes drawn_sizes(Draw& draw) {
    model::sizes of;
    of.capacity = 3 + static_cast<std::int64_t>(draw.below(24));
    of.records = of.capacity;  // at most a block a unit: then it is never a limit
    if (draw.below(2) == 0) of.records = 1 + static_cast<std::int64_t>(draw.below(8));
    of.records = std::min(of.records, of.capacity);
    of.events = static_cast<std::size_t>(draw.below(4));
    if (draw.below(2) == 0) of.scope = eviction_scope::block;
    return of;
  }
  [[nodiscard]] std::int32_t some(std::int64_t below) {
    return static_cast<std::int32_t>(draw_.below(static_cast<std::uint64_t>(below)));
  }
  [[nodiscard]] bool one_in(std::int64_t n) { return some(n) == 0; }
  [[nodiscard]] sequence_id id_of(std::int32_t index) {
    return {index, model_.at(index).generation};
  }
  /// Keys of prompts that are alike up to a block, `branch`, where they part from one without a
  /// branch. As keys of tokens do, each stands for all before it.
  [[nodiscard]] static block_key key_of(std::int32_t position, std::int32_t branch) {
    const auto at =
        static_cast<std::uint64_t>(position * (most_branches + 1) + std::min(branch, position + 1));
    return {pulseinfer::detail::mixed(at, 1), pulseinfer::detail::mixed(at, 2)};
  }
  [[nodiscard]] std::int32_t some_branch() {
    return one_in(2) ? most_branches : some(most_branches);
  }
  /// The branch of a name that may follow the block before: any, where that has no name.
  [[nodiscard]] std::int32_t some_branch_behind(const model::sequence& s, std::int32_t position) {
    const std::int32_t branch = some_branch();
    const auto before = s.blocks.find(position - 1);
    if (before == s.blocks.end() || !before->second->name) return branch;
    for (std::int32_t b = 0; b < position; ++b) {
      if (*before->second->name == key_of(position - 1, b)) return b;
    }
    return std::max(branch, position);  // it has not parted yet
  }
  [[nodiscard]] std::vector<block_key> some_prompt() {
    std::vector<block_key> prompt;
    const std::int32_t length = some(model::positions + 2);
    const std::int32_t branch = some_branch();
    for (std::int32_t position = 0; position < length; ++position) {
      prompt.push_back(key_of(position, branch));
    }
    return prompt;
  }

  /// True if the store gave what was to be had: a new handle at a place that was free.
  [[nodiscard]] bool is_new(const std::optional<sequence_id>& id) {
    if (id.has_value() != model_.has_unused()) return false;
    return !id ||
           (!model_.at(id->index).is_used && model_.at(id->index).generation < id->generation);
  }
  bool open() {
    const auto id = store_.open_sequence();
    if (!is_new(id)) return false;
    if (id) model_.open(id->index, id->generation);
    return true;
  }
  bool open_prompt() {
    std::vector<block_key> prompt = some_prompt();
    const bool is_chain = prompt.size() < 2 || !one_in(16);  // else what no tokens make
    if (!is_chain) std::swap(prompt[0], prompt[1]);
    if (prompt.size() > 1 && one_in(16)) prompt.erase(prompt.begin());
    const std::int64_t ready = store_.ready_blocks(prompt);
    if (is_chain && ready != std::ssize(model_.found(prompt))) return false;
    const std::int64_t deadline = one_in(2) ? store_type::no_deadline : now_ + some(8);
    const auto chain = model_.found(prompt);
    auto got = store_.open_sequence(prompt, deadline);
    if (!is_new(got ? std::optional(got->sequence) : std::nullopt)) return false;
    if (!got) return true;
    const std::int32_t index = got->sequence.index;
    model_.open(index, got->sequence.generation);
    for (const block_ptr& b : chain) model_.join(index, b);
    model_.at(index).is_held = true;
    model_.at(index).deadline = deadline;
    holds_.push_back({index, got->sequence.generation, std::move(got->held)});
    return got->blocks == std::ssize(chain);
  }
  bool fork() {
    const std::int32_t parent = some(model::sequences);
    const std::int32_t blocks = some(model::positions + 1);
    if (!model_.at(parent).is_open) {
      return throws([&] { (void)store_.fork(id_of(parent), blocks); });
    }
    const auto id = store_.fork(id_of(parent), blocks);
    if (!is_new(id)) return false;
    if (!id) return true;
    const auto shared = model_.at(parent).blocks;
    model_.open(id->index, id->generation);
    for (const auto& [position, b] : shared) {
      if (position < blocks) model_.join(id->index, b);
    }
    model_.use(parent);
    return true;
  }
  bool trim() {
    const std::int32_t index = some(model::sequences);
    const std::int32_t blocks = some(model::positions + 1);
    if (!model_.at(index).is_open) {
      return throws([&] { (void)store_.trim(id_of(index), blocks); });
    }
    const bool is_read = model_.at(index).is_read();
    if (store_.trim(id_of(index), blocks) !=
        (is_read ? trim_outcome::leased : trim_outcome::trimmed)) {
      return false;
    }
    if (!is_read) model_.let_go(index, blocks);
    return true;
  }
  bool close() {
    const std::int32_t index = some(model::sequences);
    model::sequence& s = model_.at(index);
    if (!s.is_open) return throws([&] { (void)store_.close_sequence(id_of(index)); });
    const close_outcome outcome = store_.close_sequence(id_of(index));
    s.is_open = s.is_held = false;
    bool is_put_off = s.is_read();
    for (const auto& at : s.blocks) {
      if (at.second->count(state::writing) > 0 && !model_.is_wanted(at.second)) is_put_off = true;
    }
    model_.settle();
    return outcome == (is_put_off ? close_outcome::deferred : close_outcome::closed);
  }
  bool acquire() {
    const std::int32_t index = some(model::sequences);
    const std::int32_t layer = some(layers);
    if (!model_.at(index).is_open) {
      return throws([&] { (void)store_.acquire(id_of(index), layer); });
    }
    if (leases_.size() > 4) return true;
    leases_.push_back({index, layer, store_.acquire(id_of(index), layer)});
    ++model_.at(index).leases;
    return true;
  }
  bool release() {
    if (leases_.empty()) return true;
    std::swap(leases_[static_cast<std::size_t>(some(std::ssize(leases_)))], leases_.back());
    const std::int32_t index = leases_.back().index;
    leases_.pop_back();
    --model_.at(index).leases;
    model_.use(index);
    model_.settle();
    return true;
  }
  /// A hold is let go, or time goes on.
  bool end_hold() {
    if (one_in(2)) {
      now_ += some(4);
      const std::int64_t now = one_in(32) ? store_type::no_deadline : now_;
      std::int32_t ended = 0;
      for (std::int32_t i = 0; i < model::sequences; ++i) {
        model::sequence& s = model_.at(i);
        if (!s.is_held || s.deadline > now || s.deadline == store_type::no_deadline) continue;
        s.is_held = false;
        model_.use(i);
        ++ended;
      }
      model_.settle();
      return store_.expire(now) == ended;
    }
    if (holds_.empty()) return true;
    std::swap(holds_[static_cast<std::size_t>(some(std::ssize(holds_)))], holds_.back());
    held_prefix held = std::move(holds_.back());
    holds_.pop_back();
    model::sequence& s = model_.at(held.index);
    const bool is_live = s.is_held && s.generation == held.generation;
    if (held.hold.is_live() != is_live) return false;
    if (is_live) {
      s.is_held = false;
      model_.use(held.index);
    }
    held.hold.release();
    model_.settle();
    return true;
  }
  bool name() {
    const std::int32_t index = some(model::sequences);
    const std::int32_t position = some(model::positions);
    const model::sequence& s = model_.at(index);
    const block_key key = key_of(position, some_branch_behind(s, position));
    const auto there = s.blocks.find(position);
    if (!s.is_open || there == s.blocks.end() ||
        (there->second->name && *there->second->name != key)) {
      return throws([&] { (void)store_.name_block(id_of(index), logical_block{position}, key); });
    }
    const block_ptr other = model_.named(key);
    const bool is_other = other != nullptr && other != there->second;
    if (store_.name_block(id_of(index), logical_block{position}, key) !=
        (is_other ? name_outcome::exists : name_outcome::named)) {
      return false;
    }
    if (!is_other) {
      there->second->name = key;
      model_.tell(there->second, store_event::what::damaged);
    }
    return true;
  }
  bool clear() { return store_.clear() == model_.clear(); }
  bool drain() {
    std::vector<store_event> got(static_cast<std::size_t>(some(4)));
    const std::size_t count = store_.drain_events(got);
    if (count != std::min(got.size(), model_.events.size())) return false;
    for (std::size_t i = 0; i < count; ++i) {
      if (got[i] != model_.events.front()) return false;
      model_.events.pop_front();
    }
    return store_.lost_events() == model_.lost_events;
  }
  /// A unit that is well stays; one with a flipped bit does not.
  bool damage() {
    if (leases_.empty()) return true;
    held_lease& held = leases_[static_cast<std::size_t>(some(std::ssize(leases_)))];
    const std::int32_t position = some(model::positions);
    const std::byte* const found = held.lease.find(logical_block{position});
    if (held.lease.drop_if_corrupt(logical_block{position})) return false;
    if (found == nullptr || one_in(2)) return held.lease.find(logical_block{position}) == found;
    const_cast<std::byte&>(found[some(unit_bytes)]) ^= std::byte{1} << some(8);
    if (held.lease.matches(logical_block{position}, found) ||
        !held.lease.drop_if_corrupt(logical_block{position}))
      return false;
    const block_ptr b = model_.at(held.index).blocks.at(position);
    b->units[static_cast<std::size_t>(held.layer)] = {};
    ++b->damaged;
    model_.tell(b, store_event::what::damaged);
    return true;
  }
  bool reserve() {
    const std::int32_t index = some(model::sequences);
    const unit at{some(layers), some(model::positions)};
    const model::sequence& s = model_.at(index);
    if (!s.is_open)
      return throws([&] { (void)store_.reserve(id_of(index), at.layer, logical_block{at.block}); });
    const auto there = s.blocks.find(at.block);
    auto expected = reserve_outcome::reserved;
    block_ptr b;
    const auto layer = static_cast<std::size_t>(at.layer);
    if (there != s.blocks.end() && there->second->units[layer].is != state::absent) {
      expected = there->second->units[layer].is == state::writing ? reserve_outcome::writing
                                                                  : reserve_outcome::exists;
    } else {
      b = model_.make_room(index, at.block);
      if (b == nullptr) expected = reserve_outcome::full;
    }
    const auto got = store_.reserve(id_of(index), at.layer, logical_block{at.block});
    if (got.outcome != expected) return false;
    if (expected != reserve_outcome::reserved) return got.slot == host_slot::none;
    if (got.bytes != store_.writable(got.slot)) return false;
    begin_write(index, got, b, at);
    model_.use(index);
    return true;
  }
  bool reserve_whole() {
    const std::int32_t index = some(model::sequences);
    std::vector<std::int32_t> positions;
    std::vector<logical_block> blocks;
    for (std::int32_t position = 0; position < model::positions; ++position) {
      if (!one_in(3)) continue;
      positions.push_back(position);
      blocks.push_back(logical_block{position});
    }
    std::vector<pulseinfer::reservation> got(positions.size() * layers);
    if (!model_.at(index).is_open) {
      return throws([&] { (void)store_.reserve_whole(id_of(index), blocks, got); });
    }
    const std::vector<block_ptr> made = model_.make_room_for_whole(index, positions);
    const bool is_full = made.size() < positions.size();
    if (store_.reserve_whole(id_of(index), blocks, got) !=
        (is_full ? reserve_outcome::full : reserve_outcome::reserved)) {
      return false;
    }
    if (is_full) return true;
    bool is_any = false;
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto layer = static_cast<std::int32_t>(i) % layers;
      const block_ptr& b = made[i / layers];
      model::entry& e = b->units[static_cast<std::size_t>(layer)];
      const auto expected = e.is == state::absent    ? reserve_outcome::reserved
                            : e.is == state::writing ? reserve_outcome::writing
                                                     : reserve_outcome::exists;
      if (got[i].outcome != expected) return false;
      if (expected != reserve_outcome::reserved) continue;
      begin_write(index, got[i], b, {layer, b->position});
      is_any = true;
    }
    if (is_any) model_.use(index);
    return true;
  }
  void begin_write(std::int32_t index, const pulseinfer::reservation& got, const block_ptr& b,
                   unit at) {
    const stamp content = stamp_of(id_of(index), at, ++version_);
    write_stamp(got.bytes, content);
    writes_.push_back({got.slot, b, at.layer, content});
    b->units[static_cast<std::size_t>(at.layer)] = {state::writing, content};
  }
  bool end_write() {
    if (writes_.empty()) return true;
    std::swap(writes_[static_cast<std::size_t>(some(std::ssize(writes_)))], writes_.back());
    const write ended = writes_.back();
    writes_.pop_back();
    if (read_stamp(store_.writable(ended.slot)) != ended.content) return false;
    const bool commit = !one_in(4);
    commit ? store_.commit(ended.slot) : store_.abort(ended.slot);
    model::entry& e = ended.block->units[static_cast<std::size_t>(ended.layer)];
    if (commit && model_.is_wanted(ended.block)) {
      e.is = state::ready;
      model_.tell(ended.block, store_event::what::damaged);
    } else {
      e = {};
    }
    model_.settle();
    return throws([&] { store_.commit(ended.slot); });
  }

  template <class Call>
  [[nodiscard]] static bool throws(Call call) {
    try {
      call();
    } catch (const std::logic_error&) {
      return true;
    }
    return false;
  }

  [[nodiscard]] const model::entry* entry_of(std::int32_t index, std::int32_t layer,
                                             std::int32_t position) {
    const auto there = model_.at(index).blocks.find(position);
    return there == model_.at(index).blocks.end()
               ? nullptr
               : &there->second->units[static_cast<std::size_t>(layer)];
  }
  [[nodiscard]] bool agree() {
    if (!(store_.counts() == model_.counts())) return false;
    for (std::int32_t index = 0; index < model::sequences; ++index) {
      for (std::int32_t layer = 0; model_.at(index).is_open && layer < layers; ++layer) {
        for (std::int32_t position = 0; position < model::positions; ++position) {
          const model::entry* const e = entry_of(index, layer, position);
          if (store_.contains(id_of(index), layer, logical_block{position}) !=
              (e != nullptr && e->is == state::ready)) {
            return false;
          }
        }
      }
    }
    return std::all_of(leases_.begin(), leases_.end(), [this](const held_lease& held) {
      for (std::int32_t position = 0; position < model::positions; ++position) {
        const model::entry* const e = entry_of(held.index, held.layer, position);
        const std::byte* const found = held.lease.find(logical_block{position});
        if ((found != nullptr) != (e != nullptr && e->is == state::ready)) return false;
        if (found == nullptr) continue;
        if (read_stamp(found) != e->content || !held.lease.matches(logical_block{position}, found))
          return false;
      }
      return true;
    });
  }

  Draw draw_;
  model::sizes sizes_;
  store_type store_;
  model model_;
  std::vector<held_lease> leases_;  // after the store, which outlives them
  std::vector<held_prefix> holds_;
  std::vector<write> writes_;
  std::int64_t version_ = 0;
  std::int64_t now_ = 0;
};

}  // namespace store_test
