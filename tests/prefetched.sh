#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `sh tests/prefetched.sh COMPILER INCLUDE`: what is asked for ahead of its use is asked for in the
# program, too. A compiler that takes a function that only prefetches for one without effects removes
# its calls, and all answers stay right.
set -eu

code=$("$1" -std=c++20 -O3 -I"$2" -S -x c++ - -o - <<'CPP'
#include "pulseinfer/detail/prefetch.hpp"

[[gnu::noinline]] static void fetch(const char* p, int lines) noexcept {
  for (int i = 0; i < lines; ++i) pulseinfer::detail::prefetch_line(p + 64 * i);
}
int sum(const char* p, int lines) {
  fetch(p, lines);
  int all = 0;
  for (int i = 0; i < lines; ++i) all += p[64 * i];
  return all;
}
CPP
)
if ! printf '%s\n' "$code" | grep -Eq 'prefetch[a-z0-9]+[[:space:]]|prfm'; then
  echo "$1 leaves out what detail/prefetch.hpp asks for" >&2
  exit 1
fi
