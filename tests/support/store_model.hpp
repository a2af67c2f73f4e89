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
#include <iterator>
#include <stdexcept>
#include <utility>
#include <vector>

#include "pulseinfer/block_store.hpp"
#include "pulseinfer/detail/random.hpp"

namespace store_test {

using pulseinfer::close_outcome;
using pulseinfer::host_slot;
using pulseinfer::reserve_outcome;
using pulseinfer::sequence_id;
using pulseinfer::store_counts;

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

class model {
 public:
  static constexpr std::int32_t sequences = 4;
  static constexpr std::int32_t blocks = 5;
  static constexpr std::int64_t capacity = 14;

  enum class state { absent, writing, ready };
  struct entry {
    state is = state::absent;
    std::int64_t version = 0;
  };
  struct sequence {
    std::uint32_t generation = 0;
    bool used = false;  // open, or still closing
    bool open = false;
    int leases = 0;
    std::int64_t last_use = 0;
    std::int64_t damaged = 0;  // slots that are kept for those who lease
    entry units[layers][blocks] = {};
  };

  [[nodiscard]] sequence& at(std::int32_t index) { return all_[static_cast<std::size_t>(index)]; }
  [[nodiscard]] std::int64_t count(const sequence& s, state is) const {
    std::int64_t found = 0;
    for (const auto& layer : s.units) {
      for (const entry& e : layer) found += e.is == is ? 1 : 0;
    }
    return found;
  }

  [[nodiscard]] store_counts counts() const {
    store_counts c{.quarantined = orphans, .capacity = capacity};
    for (const sequence& s : all_) {
      if (!s.used) continue;
      c.quarantined += s.damaged;
      const std::int64_t ready = count(s, state::ready);
      const std::int64_t writing = count(s, state::writing);
      if (!s.open) {
        c.quarantined += ready;
      } else {
        c.writing += writing;
        (s.leases > 0 ? c.pinned : c.evictable) += ready;
      }
    }
    c.free = capacity - c.writing - c.evictable - c.pinned - c.quarantined;
    return c;
  }

  /// The sequence to take a unit from: of those that are open, not leased, not the writer and not
  /// empty, the one that has not been used for longest. -1: none.
  [[nodiscard]] std::int32_t victim(std::int32_t writer) {
    std::int32_t best = -1;
    for (std::int32_t i = 0; i < sequences; ++i) {
      const sequence& s = at(i);
      if (i == writer || !s.open || s.leases > 0 || count(s, state::ready) == 0) continue;
      if (best < 0 || s.last_use < at(best).last_use) best = i;
    }
    return best;
  }
  void evict(std::int32_t index) {
    for (std::int32_t block = blocks - 1; block >= 0; --block) {
      for (std::int32_t layer = layers - 1; layer >= 0; --layer) {
        entry& e = at(index).units[layer][block];
        if (e.is != state::ready) continue;
        e = {};
        return;
      }
    }
  }
  std::int64_t orphans = 0;  ///< units that are written for sequences that are closed
  void use(std::int32_t index) { at(index).last_use = ++clock_; }
  /// Forgets what a closed sequence no longer needs.
  void settle(std::int32_t index) {
    sequence& s = at(index);
    if (s.open || !s.used) return;
    s.used = s.leases > 0;
  }
  [[nodiscard]] bool has_unused() const {
    return std::any_of(all_.begin(), all_.end(), [](const sequence& s) { return !s.used; });
  }

 private:
  std::vector<sequence> all_ = std::vector<sequence>(sequences);
  std::int64_t clock_ = 0;
};

/// A store and its model, driven by one stream of random numbers.
template <class Backend>
class twins {
 public:
  twins(const Backend& backend, std::uint64_t seed)
      : draw_(seed),
        store_(backend, geometry,
               {.capacity_bytes = model::capacity * unit_bytes,
                .max_sequences = model::sequences,
                .max_blocks = model::blocks,
                .integrity = pulseinfer::integrity::canary}) {}

  /// False once the two differ.
  [[nodiscard]] bool step() {
    bool same = false;
    switch (draw_.below(16)) {
      case 0:
        same = draw_.one_in(2) ? damage() : open();
        break;
      case 1:
        same = draw_.one_in(3) ? close() : open();
        break;
      case 2:
      case 3:
        same = acquire();
        break;
      case 4:
      case 5:
      case 6:
        same = release();
        break;
      case 7:
      case 8:
      case 9:
      case 10:
        same = end_write();
        break;
      default:
        same = reserve();
    }
    return same && agree();
  }

 private:
  using state = model::state;
  using store_type = pulseinfer::block_store<Backend>;
  using lease_type = typename store_type::lease;
  struct held_lease {
    std::int32_t index;
    std::int32_t layer;
    lease_type lease;
  };
  struct write {
    host_slot slot;
    std::int32_t index;
    unit at;
    stamp content;
  };

  [[nodiscard]] std::int32_t some(std::int64_t below) {
    return static_cast<std::int32_t>(draw_.below(static_cast<std::uint64_t>(below)));
  }
  [[nodiscard]] sequence_id id_of(std::int32_t index) {
    return {index, model_.at(index).generation};
  }

  bool open() {
    const auto id = store_.open_sequence();
    if (id.has_value() != model_.has_unused()) return false;
    if (!id) return true;
    model::sequence& s = model_.at(id->index);
    if (s.used || s.generation == id->generation) return false;
    s = {.generation = id->generation, .used = true, .open = true};
    return true;
  }
  bool close() {
    const std::int32_t index = some(model::sequences);
    model::sequence& s = model_.at(index);
    if (!s.open) return throws([&] { (void)store_.close_sequence(id_of(index)); });
    const close_outcome outcome = store_.close_sequence(id_of(index));
    s.open = false;
    model_.orphans += model_.count(s, state::writing);
    const bool is_put_off = s.leases > 0 || model_.count(s, state::writing) > 0;
    model_.settle(index);
    return outcome == (is_put_off ? close_outcome::deferred : close_outcome::closed);
  }
  bool acquire() {
    const std::int32_t index = some(model::sequences);
    const std::int32_t layer = some(layers);
    if (!model_.at(index).open) return throws([&] { (void)store_.acquire(id_of(index), layer); });
    if (leases_.size() > 5) return true;
    leases_.push_back({index, layer, store_.acquire(id_of(index), layer)});
    ++model_.at(index).leases;
    return true;
  }
  bool release() {
    if (leases_.empty()) return true;
    const std::int32_t which = some(static_cast<std::int64_t>(leases_.size()));
    std::swap(leases_[static_cast<std::size_t>(which)], leases_.back());
    const std::int32_t index = leases_.back().index;
    leases_.pop_back();
    // As long as it is leased it is not in the order: it enters as the most recent.
    if (--model_.at(index).leases == 0) {
      model_.use(index);
      model_.at(index).damaged = 0;
    }
    model_.settle(index);
    return true;
  }
  /// A unit that is well stays; one with a flipped bit does not.
  bool damage() {
    if (leases_.empty()) return true;
    held_lease& held = leases_[static_cast<std::size_t>(some(std::ssize(leases_)))];
    const std::int32_t block = some(model::blocks);
    const std::byte* const found = held.lease.find(block);
    if (held.lease.drop_if_corrupt(block)) return false;
    if (found == nullptr || draw_.one_in(2)) return held.lease.find(block) == found;
    const_cast<std::byte&>(found[some(unit_bytes)]) ^= std::byte{1} << some(8);
    if (held.lease.matches(block, found) || !held.lease.drop_if_corrupt(block)) return false;
    model_.at(held.index).units[held.layer][block] = {};
    ++model_.at(held.index).damaged;
    return true;
  }
  bool reserve() {
    const std::int32_t index = some(model::sequences);
    const unit at{some(layers), some(model::blocks)};
    model::sequence& s = model_.at(index);
    if (!s.open) return throws([&] { (void)store_.reserve(id_of(index), at.layer, at.block); });
    model::entry& e = s.units[at.layer][at.block];
    auto expected = reserve_outcome::reserved;
    if (e.is != state::absent) {
      expected = e.is == state::writing ? reserve_outcome::writing : reserve_outcome::exists;
    } else if (model_.counts().free == 0) {
      const std::int32_t victim = model_.victim(index);
      if (victim < 0)
        expected = reserve_outcome::full;
      else
        model_.evict(victim);
    }
    const auto got = store_.reserve(id_of(index), at.layer, at.block);
    if (got.outcome != expected) return false;
    if (expected != reserve_outcome::reserved) return got.slot == host_slot::none;
    const stamp content = stamp_of(id_of(index), at, ++version_);
    write_stamp(store_.writable(got.slot), content);
    writes_.push_back({got.slot, index, at, content});
    e = {state::writing, content.version};
    model_.use(index);
    return true;
  }
  bool end_write() {
    if (writes_.empty()) return true;
    const std::int32_t which = some(static_cast<std::int64_t>(writes_.size()));
    std::swap(writes_[static_cast<std::size_t>(which)], writes_.back());
    const write ended = writes_.back();
    writes_.pop_back();
    if (read_stamp(store_.writable(ended.slot)) != ended.content) return false;
    model::sequence& s = model_.at(ended.index);
    const bool commit = !draw_.one_in(4);
    commit ? store_.commit(ended.slot) : store_.abort(ended.slot);
    if (!s.open || s.generation != ended.content.generation) {
      --model_.orphans;
    } else {
      model::entry& e = s.units[ended.at.layer][ended.at.block];
      e = commit ? model::entry{state::ready, e.version} : model::entry{};
    }
    model_.settle(ended.index);
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

  [[nodiscard]] bool agree() {
    if (!(store_.counts() == model_.counts())) return false;
    for (std::int32_t index = 0; index < model::sequences; ++index) {
      const model::sequence& s = model_.at(index);
      for (std::int32_t layer = 0; s.open && layer < layers; ++layer) {
        for (std::int32_t block = 0; block < model::blocks; ++block) {
          const bool ready = s.units[layer][block].is == state::ready;
          if (store_.contains(id_of(index), layer, block) != ready) return false;
        }
      }
    }
    return std::all_of(leases_.begin(), leases_.end(), [this](const held_lease& held) {
      for (std::int32_t block = 0; block < model::blocks; ++block) {
        const model::entry& e = model_.at(held.index).units[held.layer][block];
        const std::byte* const found = held.lease.find(block);
        if ((found != nullptr) != (e.is == state::ready)) return false;
        if (found == nullptr) continue;
        const unit at{held.layer, block};
        if (read_stamp(found) != stamp_of(id_of(held.index), at, e.version)) return false;
        if (!held.lease.matches(block, found)) return false;
      }
      return true;
    });
  }

  pulseinfer::detail::random_source draw_;
  store_type store_;
  model model_;
  std::vector<held_lease> leases_;  // after the store, which outlives them
  std::vector<write> writes_;
  std::int64_t version_ = 0;
};

}  // namespace store_test
