// SPDX-License-Identifier: Apache-2.0
// The store's books at 10^7 units: what a lookup, an eviction and a unit cost.
//
// Units are the smallest there are (16 bytes): nothing here reads or writes their bytes. 32 layers.
// All memory is that of the host backend and of the library's tables, on huge pages where the
// system grants them.
//
// - lookup_ns_per_unit: 64 random blocks of one sequence and layer, found through the lease on it
//   by one call. 610 sequences of 512 blocks (8,192 tokens of 16) in 32 layers, 10^7 units, committed
//   in a random order, so that neighbours in a sequence are none in the payload. Each lookup of a
//   pass is in another sequence and layer, in a random order; before each pass 256 MiB of other
//   memory are written, so that nothing of the table is in a cache. Before each lookup the next
//   one's memory is asked for (`prefetch`), as a recall of a batch does it; all of that is in its
//   time. The leases are taken before, one for each lookup, as a transfer has them; the blocks
//   wanted are in the cache, as they were just chosen. No baseline but the target. One thread; the
//   median of passes. Beside it: alone_ns, nothing asked for before, and vs_alone, the median ratio
//   to it in pairs of passes; find_ns, by a call for each block; with_lease_ns, as alone, the lease
//   taken and given back within. Longer sequences have their blocks in more lines, each of which
//   costs what memory takes: lookup_long is the same with 64 sequences of 4,882 blocks (78,112
//   tokens).
// - store_evict_vs_list_map: a full cache of 2^20 units takes new ones, each of which evicts the
//   least recently used. The baseline is the textbook's: a std::list of keys and a
//   std::unordered_map, with room reserved, from a key to its place in the list and its slot; no
//   lock, no states. Keys are hashes already, so its hash is a word of them. Both get the same keys
//   in the same order: prompts of 256 blocks, all layers. Both are full and all their blocks have
//   been used again in a random order before. What is compared is the time for a unit, which is
//   what both store and what both give a slot to: the baseline has a key for each block and layer,
//   as caches have that know no blocks; the store opens a sequence, reserves and commits its units
//   a layer at a time, names its blocks, and closes it, all of which is in its time. In turn, 40
//   rounds of 16,384 units; the median of time of the baseline / time of the store; one thread.
//   The key is for 32 layers. evict/1 has one layer, where every unit is a block with a name of its
//   own and nothing is shared: the least favourable.
// - metadata_bytes_per_unit: a store of 10^7 units in 32 layers with the default options: what the
//   process has allocated more than before it, less the payload. All of it is allocated by the
//   constructor. Beside it what metadata_bytes() says, which leaves the policy out.
// - lookup_under_writes_vs_alone: lookups of 64 as above, each with its own lease, in another
//   sequence each time, while another thread stores blocks as fast as it can, each of which evicts
//   one; over the same without that thread. In turn, 60 times each; the ratio of medians.
//   2 threads.
#include <benchmark/benchmark.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <list>
#include <memory>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pulseinfer/detail/random.hpp"
#include "pulseinfer/pulseinfer.hpp"
#include "support/report.hpp"
#include "support/statistics.hpp"

namespace {

using pulseinfer::block_key;
using pulseinfer::host_backend;
using pulseinfer::host_slot;
using pulseinfer::kv_geometry;
using pulseinfer::logical_block;
using pulseinfer::sequence_id;
using pulseinfer::detail::random_source;
using store_type = pulseinfer::block_store<host_backend>;
using clock_type = std::chrono::steady_clock;

constexpr std::int64_t ten_million = 10'000'000;
constexpr std::int32_t layers = 32;
constexpr std::size_t lookup_units = 64;

constexpr kv_geometry geometry_of(std::int32_t layer_count) {
  return {.layers = layer_count, .kv_heads = 1, .head_dim = 4, .block_tokens = 1};
}
static_assert(geometry_of(1).unit_bytes() == 16);

double ns_since(clock_type::time_point begin) {
  return std::chrono::duration<double, std::nano>(clock_type::now() - begin).count();
}
void write_other_memory() {
  static std::vector<std::uint64_t> memory(std::size_t{256} << 17);
  for (std::uint64_t& word : memory) ++word;
  benchmark::DoNotOptimize(memory.data());
}
template <class T>
void shuffle(std::vector<T>& values, random_source& draw) {
  for (std::size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[draw.below(i)]);
}

/// A store of 10^7 units, all of them ready, at random places.
class full_store {
 public:
  full_store(std::int32_t sequences, std::int32_t blocks, std::int32_t spare_sequences = 0)
      : blocks_(blocks),
        store_(host_backend{{.workers = 1}}, geometry_of(layers),
               {.capacity_bytes = ten_million * 16,
                .max_sequences = sequences + spare_sequences,
                .max_blocks = blocks}) {
    for (std::int32_t i = 0; i < sequences; ++i) ids_.push_back(store_.open_sequence().value());
    const auto in_sequence = static_cast<std::uint32_t>(layers * blocks);
    std::vector<std::uint32_t> order(static_cast<std::size_t>(sequences) * in_sequence);
    std::iota(order.begin(), order.end(), std::uint32_t{0});
    random_source draw(3);
    shuffle(order, draw);
    for (const std::uint32_t unit : order) {
      const std::uint32_t rest = unit % in_sequence;
      const auto got =
          store_.reserve(ids_[unit / in_sequence], static_cast<std::int32_t>(rest) / blocks,
                         logical_block{static_cast<std::int32_t>(rest) % blocks});
      if (got.slot == host_slot::none) throw std::logic_error("a unit does not fit");
      store_.commit(got.slot);
    }
  }
  [[nodiscard]] store_type& store() { return store_; }
  [[nodiscard]] const std::vector<sequence_id>& ids() const { return ids_; }
  [[nodiscard]] std::int32_t blocks() const { return blocks_; }

 private:
  std::int32_t blocks_;
  store_type store_;
  std::vector<sequence_id> ids_;
};

/// What one pass looks up: 64 blocks in each sequence and layer, in a random order.
struct lookups {
  explicit lookups(full_store& in) {
    for (std::size_t s = 0; s < in.ids().size(); ++s) {
      for (std::int32_t layer = 0; layer < layers; ++layer) {
        where.emplace_back(static_cast<std::int32_t>(s), layer);
      }
    }
    most = static_cast<std::uint64_t>(in.blocks());
    wanted.resize(where.size() * lookup_units);
  }
  void redraw(random_source& draw) {
    shuffle(where, draw);
    for (logical_block& block : wanted) block = static_cast<logical_block>(draw.below(most));
  }
  [[nodiscard]] std::span<const logical_block> blocks_of(std::size_t lookup) const {
    return std::span{wanted}.subspan(lookup * lookup_units, lookup_units);
  }
  std::vector<std::pair<std::int32_t, std::int32_t>> where;  // sequence, layer
  std::vector<logical_block> wanted;
  std::uint64_t most = 0;
};

enum class way { in_a_row, alone, one_by_one, with_lease };

/// ns a unit
double lookup_pass(full_store& in, lookups& todo, way how) {
  constexpr std::size_t most_lookups = 2'048;
  const std::size_t count = std::min(todo.where.size(), most_lookups);
  std::vector<store_type::lease> leases;
  const auto lease_of = [&](std::size_t i) {
    const auto [sequence, layer] = todo.where[i];
    return in.store().acquire(in.ids()[static_cast<std::size_t>(sequence)], layer);
  };
  if (how != way::with_lease) {
    for (std::size_t i = 0; i < count; ++i) leases.push_back(lease_of(i));
  }
  write_other_memory();
  benchmark::DoNotOptimize(std::accumulate(todo.wanted.begin(), todo.wanted.end(), 0u,
                                           [](unsigned sum, logical_block block) {
                                             return sum + static_cast<unsigned>(index_of(block));
                                           }));
  for (const store_type::lease& lease : leases) benchmark::DoNotOptimize(static_cast<bool>(lease));
  const std::byte* found[lookup_units];
  const auto begin = clock_type::now();
  if (how == way::in_a_row) leases[0].prefetch(todo.blocks_of(0));
  for (std::size_t i = 0; i < count; ++i) {
    const std::span<const logical_block> blocks = todo.blocks_of(i);
    if (how == way::in_a_row && i + 1 < count) leases[i + 1].prefetch(todo.blocks_of(i + 1));
    if (how == way::one_by_one) {
      for (std::size_t k = 0; k < lookup_units; ++k) found[k] = leases[i].find(blocks[k]);
    } else if (how != way::with_lease) {
      leases[i].find(blocks, found);
    } else {
      lease_of(i).find(blocks, found);
    }
    benchmark::DoNotOptimize(static_cast<const void*>(found));
    benchmark::ClobberMemory();
  }
  return ns_since(begin) / static_cast<double>(count * lookup_units);
}

void measure_lookups(benchmark::State& state, full_store& in, bool is_figure) {
  lookups todo(in);
  random_source draw(4);
  std::vector<double> in_a_row, alone, one_by_one, with_lease, ratios;
  for (auto _ : state) {
    for (int pass = 0; pass < 15; ++pass) {
      todo.redraw(draw);
      in_a_row.push_back(lookup_pass(in, todo, way::in_a_row));
      alone.push_back(lookup_pass(in, todo, way::alone));
      ratios.push_back(in_a_row.back() / alone.back());
      one_by_one.push_back(lookup_pass(in, todo, way::one_by_one));
      with_lease.push_back(lookup_pass(in, todo, way::with_lease));
    }
  }
  state.counters["ns_per_unit"] = pulseinfer_bench::median(in_a_row);
  state.counters["alone_ns"] = pulseinfer_bench::median(alone);
  state.counters["vs_alone"] = pulseinfer_bench::median(ratios);
  state.counters["find_ns"] = pulseinfer_bench::median(one_by_one);
  state.counters["with_lease_ns"] = pulseinfer_bench::median(with_lease);
  state.SetLabel("64 of " + std::to_string(in.blocks()) +
                 " blocks, 10^7 units at random places, no table cached; leases taken before; 1 "
                 "thread");
  if (is_figure) pulseinfer_bench::report("lookup_ns_per_unit", pulseinfer_bench::median(in_a_row));
}
void lookup(benchmark::State& state) {
  full_store in(610, 512);
  measure_lookups(state, in, true);
}
void lookup_long(benchmark::State& state) {
  full_store in(64, 4'882);
  measure_lookups(state, in, false);
}
BENCHMARK(lookup)->Iterations(1)->Unit(benchmark::kMillisecond);
BENCHMARK(lookup_long)->Iterations(1)->Unit(benchmark::kMillisecond);

void metadata(benchmark::State& state) {
  double counted = 0;
  double said = 0;
  for (auto _ : state) {
    const auto allocated = [] {
      const struct mallinfo2 m = mallinfo2();
      return static_cast<double>(m.uordblks + m.hblkhd);
    };
    const double before = allocated();
    const auto store = std::make_unique<store_type>(
        host_backend{{.workers = 1}}, geometry_of(layers),
        pulseinfer::block_store_options{.capacity_bytes = ten_million * 16});
    counted = (allocated() - before) / static_cast<double>(ten_million) - 16;
    said = static_cast<double>(store->metadata_bytes()) / static_cast<double>(ten_million);
  }
  state.counters["bytes_per_unit"] = counted;
  state.counters["metadata_bytes"] = said;
  state.SetLabel("10^7 units in 32 layers, default options: 64 sequences of 8,192 blocks");
  pulseinfer_bench::report("metadata_bytes_per_unit", counted);
}
BENCHMARK(metadata)->Iterations(1)->Unit(benchmark::kMillisecond);

/// The textbook cache: a list of keys, the least recently used in front, and a map from a key to
/// its place in the list and its slot.
class list_map_cache {
 public:
  explicit list_map_cache(std::size_t capacity) : capacity_(capacity) { map_.reserve(capacity); }

  void insert(const block_key& key) {
    std::int32_t slot = static_cast<std::int32_t>(map_.size());
    if (map_.size() == capacity_) {
      const auto victim = map_.find(order_.front());
      slot = victim->second.slot;
      map_.erase(victim);
      order_.pop_front();
    }
    order_.push_back(key);
    map_.emplace(key, entry{std::prev(order_.end()), slot});
  }
  void touch(const block_key& key) {
    order_.splice(order_.end(), order_, map_.find(key)->second.at);
  }

 private:
  struct hash {
    std::size_t operator()(const block_key& key) const noexcept { return key.low; }
  };
  struct entry {
    std::list<block_key>::iterator at;
    std::int32_t slot;
  };
  std::size_t capacity_;
  std::list<block_key> order_;
  std::unordered_map<block_key, entry, hash> map_;
};

constexpr std::int32_t chain_blocks = 256;
using chain = std::vector<block_key>;

chain some_chain(random_source& draw) {
  chain keys(chain_blocks);
  for (block_key& key : keys) key = {draw.next(), draw.next()};
  return keys;
}

/// Stores the blocks of a prompt, whose sequence ends then.
void store_chain(store_type& store, const chain& keys, std::int32_t layer_count) {
  static const std::vector<logical_block> blocks = [] {
    std::vector<logical_block> all;
    for (std::int32_t i = 0; i < chain_blocks; ++i) all.push_back(logical_block{i});
    return all;
  }();
  const sequence_id id = store.open_sequence().value();
  pulseinfer::reservation got[chain_blocks];
  host_slot slots[chain_blocks];
  for (std::int32_t layer = 0; layer < layer_count; ++layer) {
    store.reserve(id, layer, blocks, got);
    for (std::size_t i = 0; i < std::size(got); ++i) {
      if (got[i].slot == host_slot::none) throw std::logic_error("a unit does not fit");
      slots[i] = got[i].slot;
    }
    store.commit(slots);
  }
  pulseinfer::name_outcome named[chain_blocks];
  store.name_blocks(id, logical_block{0}, keys, named);
  for (const pulseinfer::name_outcome outcome : named) {
    if (outcome != pulseinfer::name_outcome::named) throw std::logic_error("a key is there");
  }
  (void)store.close_sequence(id);
}

void evict(benchmark::State& state) {
  const auto layer_count = static_cast<std::int32_t>(state.range(0));
  constexpr std::int64_t units = 1 << 20;
  const std::int64_t chains = units / (chain_blocks * layer_count);
  random_source draw(5);
  std::vector<double> ours, theirs, ratios;
  for (auto _ : state) {
    store_type store(host_backend{{.workers = 1}}, geometry_of(layer_count),
                     {.capacity_bytes = units * 16,
                      .max_sequences = 4,
                      .max_blocks = chain_blocks,
                      .max_stored_blocks = static_cast<std::int32_t>(units / layer_count)});
    list_map_cache cache(static_cast<std::size_t>(units));
    // A unit's key in the cache: of its block and layer.
    const auto insert_all = [&](const chain& keys) {
      for (std::int32_t layer = 0; layer < layer_count; ++layer) {
        for (const block_key& key : keys) {
          cache.insert({key.low + static_cast<std::uint64_t>(layer), key.high});
        }
      }
    };
    std::vector<chain> known;
    for (std::int64_t i = 0; i < chains; ++i) known.push_back(some_chain(draw));
    for (const chain& keys : known) {
      store_chain(store, keys, layer_count);
      insert_all(keys);
    }
    shuffle(known, draw);
    for (const chain& keys : known) {
      const auto opened = store.open_sequence(keys);
      if (opened->blocks != chain_blocks) throw std::logic_error("a block is not found");
      (void)store.close_sequence(opened->sequence);
      for (std::int32_t layer = 0; layer < layer_count; ++layer) {
        for (const block_key& key : keys) {
          cache.touch({key.low + static_cast<std::uint64_t>(layer), key.high});
        }
      }
    }
    for (int round = 0; round < 40; ++round) {
      std::vector<chain> fresh;
      const std::int64_t count = 64 / layer_count;
      for (std::int64_t i = 0; i < count; ++i) fresh.push_back(some_chain(draw));
      const auto per_unit = [&](auto insert) {
        const auto begin = clock_type::now();
        for (const chain& keys : fresh) insert(keys);
        return ns_since(begin) / static_cast<double>(count * chain_blocks * layer_count);
      };
      ours.push_back(per_unit([&](const chain& keys) { store_chain(store, keys, layer_count); }));
      theirs.push_back(per_unit(insert_all));
      ratios.push_back(theirs.back() / ours.back());
    }
  }
  state.counters["ratio"] = pulseinfer_bench::median(ratios);
  state.counters["store_ns"] = pulseinfer_bench::median(ours);
  state.counters["list_map_ns"] = pulseinfer_bench::median(theirs);
  state.SetLabel("2^20 units in " + std::to_string(layer_count) +
                 " layers, prompts of 256 blocks, store's calls by layer; 1 thread");
  if (layer_count == layers)
    pulseinfer_bench::report("store_evict_vs_list_map", pulseinfer_bench::median(ratios));
}
BENCHMARK(evict)->Arg(1)->Arg(32)->Iterations(1)->Unit(benchmark::kMillisecond);

void lookup_under_writes(benchmark::State& state) {
  // Of 10^7 units 8.4 million are read, the others come and go.
  full_store in(512, 512, 4);
  store_type& store = in.store();
  std::atomic<bool> is_on{false}, is_idle{true}, is_over{false};
  std::atomic<std::int64_t> written{0};
  std::thread writer([&] {
    random_source draw(6);
    while (!is_over.load()) {
      if (!is_on.load()) {
        is_idle.store(true);
        std::this_thread::sleep_for(std::chrono::microseconds(50));
        continue;
      }
      is_idle.store(false);
      store_chain(store, some_chain(draw), layers);
      written.fetch_add(chain_blocks * layers);
    }
  });
  // Until what comes is stored for what goes.
  is_on.store(true);
  while (written.load() < 2'000'000) std::this_thread::yield();
  lookups todo(in);
  random_source draw(7);
  std::vector<double> alone, beside;
  double seconds_of_writes = 0;
  const std::int64_t written_before = written.load();
  for (auto _ : state) {
    for (int phase = 0; phase < 120; ++phase) {
      const bool writes = phase % 2 == 1;
      is_on.store(writes);
      while (is_idle.load() == writes) std::this_thread::yield();
      todo.redraw(draw);
      const std::byte* found[lookup_units];
      const auto begin = clock_type::now();
      for (std::size_t i = 0; i < todo.where.size(); ++i) {
        const auto [sequence, layer] = todo.where[i];
        const auto lease = store.acquire(in.ids()[static_cast<std::size_t>(sequence)], layer);
        lease.find(todo.blocks_of(i), found);
        benchmark::DoNotOptimize(static_cast<const void*>(found));
        benchmark::ClobberMemory();
      }
      const double ns = ns_since(begin);
      (writes ? beside : alone)
          .push_back(ns / static_cast<double>(todo.where.size() * lookup_units));
      seconds_of_writes += writes ? ns * 1e-9 : 0;
    }
  }
  const std::int64_t written_beside = written.load() - written_before;
  is_over.store(true);
  writer.join();
  const double ratio = pulseinfer_bench::median(alone) / pulseinfer_bench::median(beside);
  state.counters["ratio"] = ratio;
  state.counters["alone_ns"] = pulseinfer_bench::median(alone);
  state.counters["beside_ns"] = pulseinfer_bench::median(beside);
  state.counters["Munits_per_s_written"] =
      static_cast<double>(written_beside) / seconds_of_writes * 1e-6;
  state.SetLabel("lease, 64 of 512 blocks, release; 1 reader, 1 writer");
  pulseinfer_bench::report("lookup_under_writes_vs_alone", ratio);
}
BENCHMARK(lookup_under_writes)->Iterations(1)->Unit(benchmark::kMillisecond);

}  // namespace
