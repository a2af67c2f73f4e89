// SPDX-License-Identifier: Apache-2.0
/// @file
/// The backend under test runs the conformance suite. Include the backend's support header first.
#include <doctest/doctest.h>

#include "conformance/backend.hpp"

static_assert(pulseinfer::backend<test::backend>);

// The sanitizers end the process on an allocation that is meant to fail, unless told otherwise.
// Nobody calls these functions where there is no sanitizer.
extern "C" const char* __asan_default_options();
extern "C" const char* __tsan_default_options();
extern "C" const char* __asan_default_options() {
  return "allocator_may_return_null=1";
}
extern "C" const char* __tsan_default_options() {
  return "allocator_may_return_null=1";
}

namespace {

template <class Case>
void each(Case run) {
  test::each_backend([&](test::backend backend) { run(backend); });
}

}  // namespace

TEST_CASE("backend, memory: memory of zero bytes is null") {
  each(&conformance::memory_of_zero_bytes_is_null<test::backend>);
}

TEST_CASE("backend, memory: memory is aligned as stated") {
  each(&conformance::memory_is_aligned_as_stated<test::backend>);
}

TEST_CASE("backend, memory: memory that cannot be had throws") {
  each(&conformance::memory_that_cannot_be_had_throws<test::backend>);
}

TEST_CASE("backend, memory: kernels reach pinned memory") {
  each(&conformance::kernels_reach_pinned_memory<test::backend>);
}

TEST_CASE("backend, memory: kernels reach registered memory until it is taken back") {
  each(&conformance::kernels_reach_registered_memory<test::backend>);
}

TEST_CASE("backend, streams: work of one stream runs in order") {
  each(&conformance::work_of_one_stream_runs_in_order<test::backend>);
}

TEST_CASE("backend, streams: an event orders two streams") {
  each(&conformance::an_event_orders_two_streams<test::backend>);
}

TEST_CASE("backend, streams: a wait captures the record at its call") {
  each(&conformance::a_wait_captures_the_record_at_its_call<test::backend>);
}

TEST_CASE("backend, streams: a wait before the first record passes") {
  each(&conformance::a_wait_before_the_first_record_passes<test::backend>);
}

TEST_CASE("backend, streams: polling sees an event get done") {
  each(&conformance::polling_sees_an_event_get_done<test::backend>);
}

TEST_CASE("backend, streams: sync of a stream returns after all its work") {
  each(&conformance::sync_of_a_stream_returns_after_all_its_work<test::backend>);
}

TEST_CASE("backend, streams: sync of an event returns after the work before it") {
  each(&conformance::sync_of_an_event_returns_after_the_work_before_it<test::backend>);
}

TEST_CASE("backend, streams: destroying streams and events waits for their work") {
  each(&conformance::destroying_streams_and_events_waits_for_their_work<test::backend>);
}

TEST_CASE("backend, streams: copies of a backend share the machine") {
  each(&conformance::copies_of_a_backend_share_the_machine<test::backend>);
}

TEST_CASE("backend, streams: two threads feed two streams") {
  if constexpr (test::takes_threads<test::backend>) {
    each(&conformance::two_threads_feed_two_streams<test::backend>);
  }
}

TEST_CASE("backend, copies: copies go in all directions") {
  each(&conformance::copies_go_in_all_directions<test::backend>);
}

TEST_CASE("backend, copies: a copy of zero bytes does nothing") {
  each(&conformance::a_copy_of_zero_bytes_does_nothing<test::backend>);
}

TEST_CASE("backend, copies: a batch copies every span and nothing else") {
  each(&conformance::a_batch_copies_every_span_and_nothing_else<test::backend>);
}

TEST_CASE("backend, copies: a copy may read its source late") {
  each(&conformance::a_copy_may_read_its_source_late<test::backend>);
}

TEST_CASE("backend, copies: broken copies are refused") {
  each(&conformance::broken_copies_are_refused<test::backend>);
}

TEST_CASE("backend, tasks: a task runs after its events") {
  each(&conformance::a_task_runs_after_its_events<test::backend>);
}

TEST_CASE("backend, tasks: a task without events runs") {
  each(&conformance::a_task_without_events_runs<test::backend>);
}

TEST_CASE("backend, tasks: tasks hand over tasks") {
  each(&conformance::tasks_hand_over_tasks<test::backend>);
}

TEST_CASE("backend, tasks: tasks enqueue work") {
  each(&conformance::tasks_enqueue_work<test::backend>);
}

TEST_CASE("backend, tasks: more tasks than workers all run") {
  each(&conformance::more_tasks_than_workers_all_run<test::backend>);
}

TEST_CASE("backend, tasks: broken tasks are refused") {
  each(&conformance::broken_tasks_are_refused<test::backend>);
}

TEST_CASE("backend, tasks: the last backend runs pending tasks") {
  conformance::the_last_backend_runs_pending_tasks(&test::make_backend);
}

TEST_CASE("backend, kernels: a kernel visits each pair once") {
  each(&conformance::a_kernel_visits_each_pair_once<test::backend>);
}

TEST_CASE("backend, kernels: a kernel limited in ctas visits each pair once") {
  each(&conformance::a_kernel_limited_in_ctas_visits_each_pair_once<test::backend>);
}

TEST_CASE("backend, kernels: a kernel reads its block count on the device") {
  each(&conformance::a_kernel_reads_its_block_count_on_the_device<test::backend>);
}

TEST_CASE("backend, kernels: row kernels do not depend on the group") {
  each(&conformance::row_kernels_do_not_depend_on_the_group<test::backend>);
}

TEST_CASE("backend, kernels: row kernels run every row") {
  each(&conformance::row_kernels_run_every_row<test::backend>);
}

TEST_CASE("backend, kernels: broken launches are refused") {
  each(&conformance::broken_launches_are_refused<test::backend>);
}

TEST_CASE("backend, top-k: top-k of random rows equals brute force") {
  each(&conformance::top_k_of_random_rows_equals_brute_force<test::backend>);
}

TEST_CASE("backend, top-k: top-k of rows around powers of two equals brute force") {
  each(&conformance::top_k_of_rows_around_powers_of_two<test::backend>);
}

TEST_CASE("backend, top-k: top-k keeps the limits of rows") {
  each(&conformance::top_k_keeps_the_limits_of_rows<test::backend>);
}

TEST_CASE("fault 47: of many ties the first are chosen, and all that is above them") {
  each(&conformance::top_k_of_many_ties_and_few_winners<test::backend>);
}

TEST_CASE("fault 49: nothing to choose from, nothing wanted, and more than there is") {
  each(&conformance::top_k_pads_what_is_missing<test::backend>);
}

TEST_CASE("fault 52: NaN of either sign ranks last on every machine") {
  each(&conformance::top_k_orders_special_scores<test::backend>);
}

TEST_CASE("fault 55: of equal scores the lower index is chosen, for every k and every time") {
  // Kernels that the CPU interprets take their time.
  each([](test::backend& backend) {
    conformance::top_k_orders_ties_by_index(backend,
                                            test::device_memory_is_host_readable ? 100 : 9);
  });
}

TEST_CASE("backend, top-k: broken top-ks are refused") {
  each(&conformance::broken_top_ks_are_refused<test::backend>);
}
