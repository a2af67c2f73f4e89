// SPDX-License-Identifier: Apache-2.0
#include "sparse_decode.hpp"

int main() {
  return sparse_decode(pulseinfer::host_backend{});
}
