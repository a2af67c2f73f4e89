// SPDX-License-Identifier: Apache-2.0
/// @file
/// Every point where an engine plugs in, on one page. All of them are concepts over member
/// functions: no registry, no virtual call, no specialisation.
///
/// - `backend`          memory, streams, copies, host tasks, kernels and top-k of a kind of machine
/// - `page_table`       logical block of a request -> page of the engine's pool
/// - `eviction_policy`  which group of host units goes first when the store is full
/// - `admission_policy`  who may enter, how much of each layer is offloaded, which transfers may go
/// - `admission_filter` which blocks a store does not take in
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "pulseinfer/admission_types.hpp"
#include "pulseinfer/config.hpp"

namespace pulseinfer::inline PULSEINFER_ABI_NAMESPACE {

/// Which way a copy goes. Every copy names it; nothing guesses from addresses.
enum class copy_direction : std::uint8_t { host_to_device, device_to_host, device_to_device };

/// `high` is for what the engine waits for, recalls: on a busy device a small kernel at normal
/// priority waits behind large ones.
enum class stream_priority : std::uint8_t { normal, high };

/// State of the last record of an event. An event that was never recorded is `done`. `failed` means
/// that the work before the record, or the device, failed; it never turns into `done` by itself.
enum class event_state : std::uint8_t { pending, done, failed };

/// One copy of a batch: `bytes` from `source` to `destination`.
struct copy_span {
  void* destination;
  const void* source;
  std::size_t bytes;
};

/// The index space of a kernel: `blocks` x `words`, each pair visited once, in any order.
///
/// Where `device_blocks` is not null, the count of blocks is min(*device_blocks, blocks), read on
/// the device when the kernel runs (a negative value counts as zero); `blocks` is then the bound
/// that sizes the launch.
struct launch_shape {
  std::int64_t blocks = 0;
  std::int64_t words = 0;
  const std::int32_t* device_blocks = nullptr;
};

/// What a kernel may take from the kernels beside it: at most this many CTAs (0: no limit).
struct launch_limits {
  int max_ctas = 0;
};

/// CPU work handed to a backend: a function and its state, so that handing it over allocates
/// nothing. The state outlives the call; the function does not throw. Of the tasks that are ready,
/// those of high priority start first.
struct host_task {
  void (*run)(void* state) noexcept = nullptr;
  void* state = nullptr;
  stream_priority priority = stream_priority::normal;
};

/// Memory traffic of a host task in bytes, read plus written. Real machines ignore it; the
/// simulated one takes its time from it.
struct host_cost {
  std::uint64_t bytes = 0;
};

/// The size of a top-k: `rows` lists of at most `columns` keys, the `k` largest of each.
struct top_k_shape {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t k = 0;
};

/// Keys of a top-k, in device memory. Row r is `keys[r * row_stride + i]` for i in [begin[r],
/// end[r]); keys of one row differ (see top_k.hpp, which packs a score and an index into one).
struct top_k_keys {
  const std::uint64_t* keys = nullptr;
  std::int64_t row_stride = 0;
  const std::int32_t* begin = nullptr;  ///< [rows], device memory
  const std::int32_t* end = nullptr;    ///< [rows], device memory; end <= row_stride
  /// [rows], device memory, or null: of row r only min(k, limits[r]) are chosen, none below zero.
  const std::int32_t* limits = nullptr;
};

/// How much memory there is, and of what grain.
struct memory_limits {
  std::uint64_t device_bytes_total = 0;
  std::uint64_t device_bytes_free = 0;
  std::size_t device_alignment = 256;  ///< alignment of what allocate_device returns
  std::size_t pinned_alignment = 64;   ///< alignment of what allocate_pinned returns
};

/// The cooperating lanes of a row kernel: a CTA on CUDA, one lane on the CPU.
///
/// Every lane of the group makes the same calls in the same order. Sums and scans are over integers
/// only, so that the result of a row kernel does not depend on the size of the group: that is the
/// law its bodies keep.
template <class G>
concept row_group = std::copyable<G> && requires(const G& group, std::int64_t value) {
  { group.rank() } -> std::same_as<int>;
  { group.size() } -> std::same_as<int>;
  group.sync();
  { group.sum(value) } -> std::same_as<std::int64_t>;
  { group.min(value) } -> std::same_as<std::int64_t>;
  { group.scan(value) } -> std::same_as<std::int64_t>;  // sum over the lanes of lower rank
};

/// The most events a host task may wait for. Few, so that a waiting task is stored without an
/// allocation; to wait for more, let a stream wait for them and record one event there.
inline constexpr std::size_t max_task_events = 4;

namespace detail {

/// Stand-ins with which the backend concept asks whether kernels can be launched.
struct probe_kernel {
  void operator()(std::int64_t, std::int64_t) const {}
};
struct probe_row_kernel {
  template <class Group>
  void operator()(std::int64_t, Group) const {}
};

}  // namespace detail

/// Job 1: memory. Pinned memory is mapped: `device_pointer` gives the address under which kernels
/// reach it. Sizes of zero give null. `allocate_*` throw `out_of_memory`; `deallocate_*` take what
/// was allocated, with its size.
///
/// `register_pinned` makes host memory of the caller's pinned memory until `unregister_pinned` takes
/// the same range back; ranges that are registered do not share a page. It throws `device_error` or
/// `out_of_memory`, and has then changed nothing; zero bytes are nothing. `registration_pins` says
/// whether that keeps the pages in place, as a driver does. Where the device is the host nothing
/// does, and pinned_memory.hpp locks them.
template <class B>
concept has_memory = requires(B b, const B c, void* p, std::size_t n, int* pinned) {
  { b.allocate_device(n) } -> std::same_as<void*>;
  { b.deallocate_device(p, n) }
  noexcept;
  { b.allocate_pinned(n) } -> std::same_as<void*>;
  { b.deallocate_pinned(p, n) }
  noexcept;
  b.register_pinned(p, n);
  { b.unregister_pinned(p, n) }
  noexcept;
  { B::registration_pins } -> std::convertible_to<bool>;
  { c.device_pointer(pinned) } -> std::same_as<int*>;
  { c.limits() } -> std::same_as<memory_limits>;
};

/// Job 2: streams and events. `stream` and `event` own; `stream_ref` borrows, also from the engine.
/// Work of one stream runs in order. `enqueue_wait` holds the stream back, not the caller, until
/// the event's last record so far is done. Only `sync` (of a stream, an event or a condition)
/// blocks; it throws `device_error` when the work failed. Destroying a stream or an event with work
/// in flight waits for it.
///
/// `sync_until(ready)` returns once ready() is true; the machine goes on meanwhile (the simulated
/// one advances here).
template <class B>
concept has_streams = requires(B b, const B c, typename B::stream& s, typename B::stream_ref r,
                               typename B::event& e, const typename B::event& f, bool (*ready)()) {
  { b.make_stream(stream_priority::high) } -> std::same_as<typename B::stream>;
  { b.make_event() } -> std::same_as<typename B::event>;
  requires std::convertible_to<typename B::stream&, typename B::stream_ref>;
  requires std::copyable<typename B::stream_ref> && std::movable<typename B::event>;
  b.record(e, r);
  b.enqueue_wait(f, r);
  { c.poll(f) }
  noexcept->std::same_as<event_state>;
  b.sync(f);
  b.sync(r);
  b.sync_until(ready);
  { c.now_ns() }
  noexcept->std::same_as<std::uint64_t>;
};

/// Job 3: asynchronous copies. The source is read, and the destination written, when the stream
/// gets there: both stay valid and untouched until then. Host memory of a copy is pinned memory of
/// this backend. The copies of a batch are unordered among themselves.
template <class B>
concept has_copies = requires(B b, void* p, const void* q, std::size_t n, typename B::stream_ref r,
                              std::span<const copy_span> many) {
  b.copy_async(p, q, n, copy_direction::host_to_device, r);
  b.copy_many_async(many, copy_direction::device_to_host, r);
};

/// Job 4: host tasks. A task runs on one of the backend's workers once every event of `after` (at
/// most `max_task_events`) is done or failed; the events are not recorded again, moved or destroyed
/// before it starts. Tasks that are ready start in the order in which they were handed over, those
/// of high priority before the others; several may run at once. A task may enqueue work and hand over further tasks; it may not sync.
template <class B>
concept has_host_tasks = requires(B b, std::span<const typename B::event* const> after,
                                  host_task task, host_cost cost) {
  b.host_async(after, task, cost);
};

/// Jobs 5 to 7: kernels and top-k. Bodies are trivially copyable functors, at most 512 bytes, whose
/// pointers the device can follow. `bytes` is the device memory traffic, for the simulated clock.
///
/// `for_each(shape, limits, bytes, op, stream)`: op(block, word) for each pair.
/// `for_each_row(rows, limits, bytes, op, stream)`: op(row, group) for each row.
/// `top_k(shape, keys, selected, counts, workspace, stream)`: selected[r * k + i] are the indices
/// of the k largest keys of row r, ascending, padded with -1; counts[r] how many (both device
/// memory; counts may be null): all where there are fewer than k, 0 where k is 0. The workspace is
/// device memory of at least `top_k_workspace_bytes(shape)` bytes, aligned as allocate_device aligns.
template <class B>
concept has_kernels = requires(B b, typename B::stream_ref r, launch_shape shape,
                               launch_limits limits, std::uint64_t bytes, top_k_shape top,
                               top_k_keys keys, std::int32_t* out, std::span<std::byte> workspace) {
  b.for_each(shape, limits, bytes, detail::probe_kernel{}, r);
  b.for_each_row(std::int64_t{1}, limits, bytes, detail::probe_row_kernel{}, r);
  { b.top_k_workspace_bytes(top) } -> std::same_as<std::size_t>;
  b.top_k(top, keys, out, out, workspace, r);
};

/// A machine, as one small copyable value: copies share what it owns, the last one frees it. Copies
/// may be used from several threads at once; one stream is fed by one thread at a time.
template <class B>
concept backend = std::copyable<B> && has_memory<B> && has_streams<B> && has_copies<B> &&
    has_host_tasks<B> && has_kernels<B>;

/// Logical block of a request -> page of the pool, or -1 where it has none. A trivially copyable
/// view: kernels take it by value. `page` is pure, and callable on the device where the view is
/// used there.
template <class T>
concept page_table = std::is_trivially_copyable_v<T> &&
    requires(const T& table, std::int64_t request, std::int64_t block) {
  { table.page(request, block) } -> std::convertible_to<std::int64_t>;
};

/// What a policy is told of a group that enters the order. A policy uses of it what it needs.
struct eviction_entry {
  /// Names what is stored, the same when it comes back: for policies that remember what left. 0
  /// says that it has no name; nothing is remembered then.
  std::uint64_t key = 0;
  /// The group of the block before it in the prefix, or -1: for policies that know the prefix tree.
  /// It may enter later than its children do.
  std::int32_t parent = -1;
  /// Lower goes first: for policies that know priorities.
  std::int32_t priority = 0;
  /// Until when it should stay, in the time that such a policy is told, which begins at 0.
  std::int64_t keep_until = 0;
};

namespace detail {

/// Stand-in with which the concept asks whether a policy takes any predicate.
struct probe_predicate {
  bool operator()(std::int32_t) const { return true; }
};

}  // namespace detail

/// An order in which groups are given up, made from a capacity. A group is an index below
/// `capacity()`, a place in a store; `contains` is true of it from `insert` until it leaves.
///
/// - `touch(group)` is a logical use. A policy counts what it is told: who wants a hundred reads of
///   one request to be one use says so once, when the request takes its lease, and in the order of
///   use, not in that in which transfers end.
/// - `victim(can_evict)` is the group to give up next of those for which the predicate
///   (`bool(group)`) is true, or -1. It may move groups within the policy, but takes none out;
///   those that the predicate refuses keep their place. The predicate calls nothing of the policy.
/// - `evict(group)`: it was given up; the policy may remember its key. It need not be the victim.
/// - `erase(group)`: it left for another reason (closed, trimmed, damaged), and nothing is
///   remembered of it.
/// - `check(entry)`, const, for policies that do not take every entry: throws for those that
///   `insert` would refuse. A store asks when a block gets its name, for later there is nobody to
///   tell.
/// - `evictable()`, const, for policies that never give some groups up: how many `victim` names, one
///   after the other, to who allows all and evicts each. Without it that is all of them.
///
/// All calls come from one thread at a time and allocate nothing. They cost O(1) on average over
/// many calls, `victim` also a few steps for each group that is refused. A call that throws
/// (`std::out_of_range` on an index that is no group, `std::logic_error` on one that is in, or not)
/// has changed nothing; a store gives up a block of which `insert` throws, for there is nobody who
/// could be told. What a policy answers depends on the calls before alone.
template <class P>
concept eviction_policy = std::movable<P> && std::constructible_from<P, std::int32_t> &&
    requires(P policy, const P& view, std::int32_t group, const eviction_entry& entry,
             detail::probe_predicate can_evict) {
  { view.capacity() } -> std::same_as<std::int32_t>;
  { view.contains(group) } -> std::same_as<bool>;
  policy.insert(group, entry);
  policy.touch(group);
  policy.erase(group);
  policy.evict(group);
  { policy.victim(can_evict) } -> std::same_as<std::int32_t>;
};

/// What to offload, whom to admit, and which transfers to let go, of a model with `layers()` layers.
/// (admission_types.hpp has what goes in and comes out.)
///
/// - `observe(link, activity)` is the one moment at which it learns anything: the link, in a group
///   of ranks the snapshot that they agreed on, and how active each layer is ([layers], larger for
///   layers that are recalled more, in any unit; or nothing). Its placement moves here only.
/// - `offload_share(layer)` is the share of a layer's blocks that is to be only in the store, 0 to
///   1. It applies to blocks that are on the device still (`plan_layer`): no policy asks for a load.
/// - `admit(request, placement)` answers a new request, and fills in [layers] the shares that this
///   one gets. Whoever is not deferred fits into the memory that the request names.
/// - `may_store(bytes)`, `may_recall(bytes)`: whether a transfer may be submitted now. Where a recall
///   would be refused, a store of as many bytes is, too.
///
/// All calls come from one thread at a time and allocate nothing. A call that throws
/// (`std::invalid_argument` on values that cannot be, `std::out_of_range` on a layer) has changed
/// nothing. What a policy answers depends on the calls before alone: time enters by the snapshots, and
/// ranks that are told the same answer the same.
template <class P>
concept admission_policy = std::movable<P> &&
    requires(P policy, const P& view, const link_snapshot& link, std::span<const double> activity,
             const admission_request& request, std::span<double> placement, std::int32_t layer,
             std::int64_t bytes) {
  { view.layers() } -> std::same_as<std::int32_t>;
  policy.observe(link, activity);
  { view.offload_share(layer) } -> std::same_as<double>;
  { policy.admit(request, placement) } -> std::same_as<admission_answer>;
  { policy.may_store(bytes) } -> std::same_as<bool>;
  { policy.may_recall(bytes) } -> std::same_as<bool>;
};

/// What is worth storing. `admit(key)` is told of a block that a request has and the store has not,
/// by the name of its content, once a request; what it says holds for that request. All calls come
/// from one thread at a time and allocate nothing. The key 0 names nothing.
template <class F>
concept admission_filter = std::movable<F> && requires(F filter, std::uint64_t key) {
  { filter.admit(key) } -> std::same_as<bool>;
};

}  // namespace pulseinfer
