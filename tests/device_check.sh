#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds and runs the CUDA tests, examples and benchmarks on a machine with a GPU, and ends with one table.
#
#   sh tests/device_check.sh            on the machine: needs nvcc, CMake 3.24, a C++20 compiler; no network
#   sh tests/device_check.sh --pack     beforehand, where doctest and Google Benchmark are installed: puts
#                                       them into build/device_kit, which travels with the tree
#   sh tests/device_check.sh --on-cpu   tries all of it on the CUDA runtime for the CPU, whose source folder
#                                       PULSEINFER_CUDA_ON_CPU names; times then mean nothing
#
# Without Google Benchmark the tests and the demo, which measures its own speed-up, run all the same.
# Ends with 0 if all that ran passed, 1 if anything failed, 2 if it cannot begin. Environment: CXX, JOBS,
# CUDA_HOME, PULSEINFER_CUDA_ARCHITECTURES (default: the device's own);
# PULSEINFER_BENCHMARK_SOURCE: for --pack, Google Benchmark's source folder, which is packed instead of
# the installed library, and built on the machine: for a machine with an older C library.
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
kit=$root/build/device_kit
build=$root/build/device
jobs=${JOBS:-$(nproc 2>/dev/null || echo 4)}
began=$(date +%s)

say() { printf 'device_check: %s\n' "$*"; }
cannot() {
  printf 'device_check: %s\n' "$*" >&2
  exit 2
}

# --- The kit --------------------------------------------------------------------------------------

# Where the preprocessor finds a header: HEADER -> its path.
path_of() {
  printf '#include <%s>\n' "$1" | "${CXX:-c++}" -std=c++20 -M -x c++ - 2>/dev/null |
    tr ' \\' '\n\n' | grep "/$1\$" | head -n 1
}

pack() {
  rm -rf "$kit"
  mkdir -p "$kit"
  header=$(path_of doctest/doctest.h) || :
  [ -n "$header" ] || cannot "doctest is not installed here (Debian, Ubuntu: apt-get install doctest-dev)"
  mkdir -p "$kit/doctest/doctest"
  cp "$header" "$kit/doctest/doctest/"
  say "packed $header"

  if [ -n "${PULSEINFER_BENCHMARK_SOURCE:-}" ]; then
    [ -f "$PULSEINFER_BENCHMARK_SOURCE/CMakeLists.txt" ] ||
      cannot "PULSEINFER_BENCHMARK_SOURCE is $PULSEINFER_BENCHMARK_SOURCE, but there is no CMakeLists.txt in it"
    mkdir "$kit/benchmark_source"
    for part in CMakeLists.txt LICENSE cmake include src; do
      cp -R "$PULSEINFER_BENCHMARK_SOURCE/$part" "$kit/benchmark_source/"
    done
    say "packed Google Benchmark's source"
  else
    header=$(path_of benchmark/benchmark.h) || :
    library=
    for name in libbenchmark.a libbenchmark.so; do
      found=$("${CXX:-c++}" -print-file-name=$name)
      if [ -f "$found" ]; then
        library=$found
        break
      fi
    done
    if [ -z "$header" ] || [ -z "$library" ]; then
      say "Google Benchmark is not installed here: the check will do without (Debian, Ubuntu: apt-get install libbenchmark-dev)"
      return 0
    fi
    mkdir -p "$kit/benchmark/include" "$kit/benchmark/lib"
    cp -R "$(dirname "$header")" "$kit/benchmark/include/"
    case $library in
      *.a) cp "$library" "$kit/benchmark/lib/" ;;
      # Under the name that programs will look for.
      *) cp -L "$library" "$kit/benchmark/lib/$(basename "$(readlink -f "$library")" | sed 's/\(\.so\.[0-9]*\).*/\1/')" ;;
    esac
    cat >"$kit/benchmark/benchmarkConfig.cmake" <<'CONFIG'
file(GLOB found "${CMAKE_CURRENT_LIST_DIR}/lib/libbenchmark.*")
find_package(Threads REQUIRED)
add_library(benchmark::benchmark UNKNOWN IMPORTED)
set_target_properties(benchmark::benchmark PROPERTIES IMPORTED_LOCATION "${found}"
  INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}/include" INTERFACE_LINK_LIBRARIES Threads::Threads)
CONFIG
    say "packed $library"
  fi
}

# --- The machine ----------------------------------------------------------------------------------

on_cpu=no
case ${1:-} in
  '') ;;
  --pack)
    pack
    exit 0
    ;;
  --on-cpu) on_cpu=yes ;;
  *)
    sed -n 's/^#   //p' "$0" >&2
    exit 2
    ;;
esac

command -v cmake >/dev/null 2>&1 || cannot "there is no cmake on PATH"
if [ -n "${CUDA_HOME:-}" ]; then
  nvcc=$CUDA_HOME/bin/nvcc
else
  nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
fi
[ -x "$nvcc" ] || cannot "there is no $nvcc: set CUDA_HOME to the toolkit's folder"

cuda=$("$nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
runtime_dir=
if [ $on_cpu = yes ]; then
  source_dir=
  for candidate in "${PULSEINFER_CUDA_ON_CPU:-}" "$root/${PULSEINFER_CUDA_ON_CPU:-}"; do
    if [ -n "$candidate" ] && [ -f "$candidate/build.sh" ]; then
      source_dir=$candidate
      break
    fi
  done
  [ -n "$source_dir" ] || cannot "--on-cpu: PULSEINFER_CUDA_ON_CPU names no folder with a build.sh"
  runtime_dir=$root/build/cuda_on_cpu
  if [ ! -f "$runtime_dir/libcudart.so.13" ]; then
    say "building the CUDA runtime for the CPU"
    JOBS=$jobs bash "$source_dir/build.sh" "$runtime_dir" >/dev/null || cannot "it cannot be built"
  fi
  device="the CPU, through a CUDA runtime that interprets kernels"
  driver=none
  architectures=${PULSEINFER_CUDA_ARCHITECTURES:-80}
else
  query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }
  device=$(query name) || device=
  [ -n "$device" ] || cannot "nvidia-smi finds no GPU here; --on-cpu does without"
  driver=$(query driver_version)
  capability=$(query compute_cap | tr -d '.')
  case $capability in
    [0-9][0-9] | [0-9][0-9][0-9]) capability=$capability-real ;;
    *) capability=native ;;
  esac
  architectures=${PULSEINFER_CUDA_ARCHITECTURES:-$capability}
  export PULSEINFER_REQUIRE_DEVICE=1 # a test that finds no device fails, it is not skipped
fi
say "$device; driver $driver, CUDA $cuda, architecture $architectures, $jobs jobs"

# --- The phases -----------------------------------------------------------------------------------

patience=1
[ $on_cpu = no ] || patience=10 # a few cores, and kernels that are interpreted
rows=$build.rows # name, result, seconds
mkdir -p "$build"
: >"$rows"
failed=0
row() { printf '%s\t%s\t%s\n' "$1" "$2" "$3" >>"$rows"; }
# phase NAME SECONDS COMMAND...: runs a command for at most so long, notes what came of it, and goes on.
phase() {
  name=$1
  limit=$(($2 * patience))
  shift 2
  say "$name"
  start=$(date +%s)
  status=0
  timeout "$limit" "$@" || status=$?
  taken=$(($(date +%s) - start))
  case $status in
    0) row "$name" passed $taken ;;
    124) row "$name" "FAILED, stopped" $taken ;;
    *) row "$name" "FAILED, status $status" $taken ;;
  esac
  [ $status = 0 ] || failed=1
  return $status
}

# Google Benchmark: from the kit if a program links with it here, else the machine's own.
benchmark=
if [ -d "$kit/benchmark_source" ]; then
  if phase "build Google Benchmark" 180 sh -c '
      cmake -S "$0" -B "$1/benchmark_build" -DCMAKE_BUILD_TYPE=Release -DBENCHMARK_ENABLE_TESTING=OFF \
        -DBENCHMARK_ENABLE_WERROR=OFF -DBENCHMARK_INSTALL_DOCS=OFF -DCMAKE_INSTALL_LIBDIR=lib \
        -DCMAKE_INSTALL_PREFIX="$1/benchmark_installed" >/dev/null &&
        cmake --build "$1/benchmark_build" --parallel "$2" --target install >/dev/null' \
    "$kit/benchmark_source" "$build" "$jobs"; then
    benchmark=$build/benchmark_installed/lib/cmake/benchmark
  fi
elif [ -f "$kit/benchmark/benchmarkConfig.cmake" ]; then
  if printf '#include <benchmark/benchmark.h>\nint main(int c, char** v) { benchmark::Initialize(&c, v); }\n' |
    "${CXX:-c++}" -std=c++20 -I"$kit/benchmark/include" -x c++ - -x none "$kit"/benchmark/lib/* \
      -pthread -o "$build/link_try" 2>/dev/null &&
    LD_LIBRARY_PATH=$kit/benchmark/lib "$build/link_try" >/dev/null 2>&1; then
    benchmark=$kit/benchmark
  else
    say "the kit's Google Benchmark does not work on this machine"
  fi
fi
if [ -z "$benchmark" ] && [ -n "$(path_of benchmark/benchmark.h)" ]; then benchmark=system; fi

set -- -DCMAKE_BUILD_TYPE=Release -DPULSEINFER_CUDA=ON "-DPULSEINFER_CUDA_ARCHITECTURES=$architectures" \
  "-DPULSEINFER_CUDA_RUNTIME_DIR=$runtime_dir" -DPULSEINFER_INSTALL=OFF
if [ -n "$benchmark" ]; then
  set -- "$@" -DPULSEINFER_BUILD_BENCHMARKS=ON
  [ "$benchmark" = system ] || set -- "$@" "-Dbenchmark_DIR=$benchmark"
else
  set -- "$@" -DPULSEINFER_BUILD_BENCHMARKS=OFF
fi
if [ -f "$kit/doctest/doctest/doctest.h" ]; then
  set -- "$@" -DCMAKE_DISABLE_FIND_PACKAGE_doctest=ON "-DPULSEINFER_DOCTEST_DIR=$kit/doctest"
elif [ -z "$(path_of doctest/doctest.h)" ]; then
  cannot "there is no doctest: run this script with --pack where doctest is installed, and bring build/device_kit along"
fi
if command -v ninja >/dev/null 2>&1; then set -- "$@" -GNinja; fi
if ! cmp -s "$build/source" - <<SOURCE; then
$root $*
SOURCE
  rm -rf "$build/tree"
fi

targets() { # of a build tree: the programs of the CUDA part
  cmake --build "$build/tree" --target help |
    sed -n 's/^\.\.\. //; s/^\([a-z0-9_]*\)\(:.*\)*$/\1/p' |
    grep -E '^(tests_cuda|pulseinfer_on_device|demo_cuda|example_.*_cuda|bench_.*_cuda)$' | sort -u
}

built=no
if phase configure 120 env CUDACXX="$nvcc" cmake -S "$root" -B "$build/tree" "$@"; then
  printf '%s %s\n' "$root" "$*" >"$build/source"
  # shellcheck disable=SC2046 # target names
  if phase build 420 cmake --build "$build/tree" --parallel "$jobs" --target $(targets); then built=yes; fi
fi

figures=$build/figures
rm -rf "$figures"
mkdir -p "$figures"
if [ $built = yes ]; then
  log=$build/ctest.log
  rm -f "$log"
  parallel=$jobs
  [ $on_cpu = yes ] || [ "$jobs" -le 4 ] || parallel=4 # they share one GPU
  say "tests"
  start=$(date +%s)
  status=0
  (cd "$build/tree" && timeout $((300 * patience)) ctest --output-on-failure --no-tests=error --timeout $((180 * patience)) \
    --parallel "$parallel" -R '^(cuda\.|example\..*_cuda)' --output-log "$log") || status=$?
  [ $status = 0 ] || failed=1
  if [ -f "$log" ]; then
    awk '/ Test +#[0-9]+: / {
      name = $0
      sub(/^.* Test +#[0-9]+: */, "", name)
      sub(/ *( |\*\*\*).*$/, "", name)
      sub(/[ .]*$/, "", name)
      seconds = $(NF - 1)
      if ($0 ~ /\*\*\*Skipped/) result = "skipped"
      else if ($0 ~ / Passed +[0-9]/) result = "passed"
      else result = "FAILED"
      printf "%s\t%s\t%s\n", name, result, seconds
    }' "$log" >>"$rows"
  else
    row tests "FAILED, status $status" $(($(date +%s) - start))
  fi

  LD_LIBRARY_PATH=${runtime_dir:+$runtime_dir:}${LD_LIBRARY_PATH:-}
  [ "$benchmark" != "$kit/benchmark" ] || LD_LIBRARY_PATH=$kit/benchmark/lib:$LD_LIBRARY_PATH
  export LD_LIBRARY_PATH
  mkdir -p "$build/demo"
  rm -f "$build/demo/report.json"
  phase "demo on cuda" 120 "$build/tree/examples/demo_cuda" --backend cuda --out "$build/demo" || :
  for program in "$build"/tree/benchmarks/bench_*_cuda; do
    [ -x "$program" ] || continue
    PULSEINFER_BENCH_REPORT=$figures/$(basename "$program").json \
      phase "$(basename "$program")" 180 "$program" || :
  done
  [ -n "$benchmark" ] || row benchmarks "skipped, no library" 0
fi

# --- The table ------------------------------------------------------------------------------------

printf '\n'
printf '%-52s %s\n' device "$device" driver "$driver" CUDA "$cuda" architecture "$architectures"
printf '\n%-52s %-20s %9s\n' what result seconds
awk -F '\t' '
  { printf "%-52s %-20s %9s\n", $1, $2, $3 }
  $2 == "passed" { passed++ } $2 ~ /^FAILED/ { failed++ } $2 ~ /^skipped/ { skipped++ }
  END { printf "\n%d passed, %d failed, %d skipped\n", passed, failed, skipped }' "$rows"
{
  if [ $on_cpu = no ] && [ -f "$build/demo/report.json" ]; then
    sed -n 's/^ *"\(staged_vs_per_block_speedup\)": *\([0-9.e+-]*\).*/demo.\1 \2/p' "$build/demo/report.json"
  fi
  for file in "$figures"/*.json; do
    [ ! -f "$file" ] || sed -n 's/^ *"\(.*\)": *\([0-9.e+-]*\),*$/\1 \2/p' "$file"
  done
} >"$figures/all"
if [ -s "$figures/all" ]; then
  printf '\n%-52s %20s\n' figure value
  while read -r key value; do printf '%-52s %20.6g\n' "$key" "$value"; done <"$figures/all"
elif [ $on_cpu = yes ]; then
  printf '\nno figures: times mean nothing on this runtime\n'
else
  printf '\nno figures\n'
fi
printf '\n%s in %d s\n' "$([ $failed = 0 ] && echo passed || echo FAILED)" $(($(date +%s) - began))
exit $failed
