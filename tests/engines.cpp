// SPDX-License-Identifier: Apache-2.0
/// @file
/// The examples of every engine's pages, on every backend.
#include "../examples/engines.hpp"

#include <doctest/doctest.h>

TEST_CASE("engines: units go out of every engine's pages and come back") {
  test::each_backend([](test::backend backend) {
    for (const auto& example : engines::all<test::backend>) {
      CAPTURE(example.name);
      CHECK(example.run(backend));
    }
  });
}
