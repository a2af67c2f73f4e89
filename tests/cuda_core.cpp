// SPDX-License-Identifier: Apache-2.0
/// @file
/// The CUDA backend without its top-k: all else works, and CUB is not there.
#include "pulseinfer/backend/cuda_core.cuh"

#include <doctest/doctest.h>

#include <cstdint>
#include <numeric>
#include <vector>

#include "support/device_array.hpp"

#if defined(CUB_VERSION) || defined(THRUST_VERSION)
#error "backend/cuda_core.cuh brings CUB or Thrust in"
#endif

namespace cuda_core {

struct add_to {
  std::int32_t* values;
  PULSEINFER_HD void operator()(std::int64_t block, std::int64_t word) const {
    values[block * 10 + word] += static_cast<std::int32_t>(block);
  }
};

}  // namespace cuda_core

TEST_CASE("cuda core: it models backend, and moves and computes without CUB") {
  static_assert(pulseinfer::backend<pulseinfer::cuda_backend>);
  test::each_backend([](test::backend machine) {
    auto stream = machine.make_stream(pulseinfer::stream_priority::normal);
    test::device_array<std::int32_t, test::backend> values(machine, 50);
    std::vector<std::int32_t> numbers(50);
    std::iota(numbers.begin(), numbers.end(), 0);
    values.upload(numbers, stream);
    machine.for_each({5, 10}, {}, 0, cuda_core::add_to{values.data()}, stream);
    for (std::size_t i = 0; i < 50; ++i) numbers[i] += static_cast<std::int32_t>(i / 10);
    CHECK((values.download(stream) == numbers));
  });
}
