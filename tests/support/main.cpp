// SPDX-License-Identifier: Apache-2.0
// The main of all test programs. It differs from doctest's own in one point: a run in which the
// filters select no test case fails, so that a test that has moved or lost its cases is noticed.
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>

namespace {

unsigned selected_cases = 0;

/// Notes how many test cases the filters let through. Reports nothing.
struct case_counter : doctest::IReporter {
  explicit case_counter(const doctest::ContextOptions&) {}
  void report_query(const doctest::QueryData&) override {}
  void test_run_start() override {}
  void test_run_end(const doctest::TestRunStats& stats) override {
    selected_cases = stats.numTestCasesPassingFilters;
  }
  void test_case_start(const doctest::TestCaseData&) override {}
  void test_case_reenter(const doctest::TestCaseData&) override {}
  void test_case_end(const doctest::CurrentTestCaseStats&) override {}
  void test_case_exception(const doctest::TestCaseException&) override {}
  void subcase_start(const doctest::SubcaseSignature&) override {}
  void subcase_end() override {}
  void log_assert(const doctest::AssertData&) override {}
  void log_message(const doctest::MessageData&) override {}
  void test_case_skipped(const doctest::TestCaseData&) override {}
};

DOCTEST_REGISTER_LISTENER("case_counter", 1, case_counter);

}  // namespace

int main(int argc, char** argv) {
  doctest::Context context{argc, argv};
  const int status = context.run();
  if (context.shouldExit()) return status;  // a query such as --list-test-cases
  if (status == 0 && selected_cases == 0) {
    std::fputs("failed: the filters select no test case\n", stderr);
    return 1;
  }
  return status;
}
