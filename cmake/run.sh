#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Sets up, builds and runs pulseinfer: `sh cmake/run.sh` lists what it can do.
#
# It installs what is missing through apt-get (as root, or with sudo); where it cannot, it names each
# missing thing and the command that installs it. Settings, all in the environment:
#   CXX, CUDA_HOME, JOBS          compiler, CUDA toolkit, parallel jobs (default: all processors)
#   PULSEINFER_CUDA_ON_CPU        source folder of a CUDA runtime that runs kernels on the CPU; absolute,
#                                 or relative to the current folder or to the repository
#   PULSEINFER_TRACE              recorded requests for `bench`, a JSON object a line, as Mooncake has them
#   PULSEINFER_TEST_SEEDS         seeds a randomised test runs with
#   PULSEINFER_SANITIZE_SHORT     ON: `sanitize` leaves the tests on the simulated machine out, and the
#                                 examples under ThreadSanitizer
#   PULSEINFER_FUZZ_SECONDS       how long `fuzz` runs each target (default: 60)
#   PULSEINFER_CUDA_ARCHITECTURES CUDA architectures to compile for, as CMake writes them
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
build=$root/build/release
jobs=${JOBS:-$(nproc 2>/dev/null || echo 2)}
test_seconds=600 # a test that takes longer hangs
nl='
'

say() { printf 'run.sh: %s\n' "$*"; }
die() {
  printf 'run.sh: %s\n' "$*" >&2
  exit 1
}
not_here() { # not wrong, but not possible on this machine
  printf 'run.sh: %s\n' "$*" >&2
  exit 77
}

usage() {
  cat <<'USAGE'
usage: sh cmake/run.sh VERB [ARGUMENTS...]

  demo [--backend host|simulated|cuda] [ARGUMENTS...]
                        build and run the demo; its report is build/demo/report.json
  test [CTEST ARGUMENTS...]
                        build everything and run all tests on every backend that works here
  simulate [ARGUMENTS...]
                        what offloading brings on simulated machines: tables; report.json,
                        trace.json and plots in build/simulate
  bench                 build and run the benchmarks; the figures are build/bench/report.json
  study [ARGUMENTS...]  how much attention a selection keeps on a real model: captures it over several
                        texts (once, needs PyPI) and measures; tables, and build/study/report.json
  check                 clang-format, clang-tidy, every header alone under g++, clang++ and nvcc
  sanitize [CTEST ARGUMENTS...]
                        host and simulated tests and examples under AddressSanitizer with
                        UndefinedBehaviorSanitizer, then those that have threads, the host's, under
                        ThreadSanitizer
  soak [CTEST ARGUMENTS...]
                        test, with full counts and many seeds: takes long
  fuzz [ARGUMENTS...]   libFuzzer over the targets of tests/fuzz, where clang++ has it, for
                        PULSEINFER_FUZZ_SECONDS each; what it finds is in build/fuzz
  mutants [NAMES...]    seed known faults into copies of the tree; a named check must catch each
  docs                  make the pages of the headers, build/docs/html; any warning fails

CUDA takes part where nvcc is found. Its tests run on the GPU, or without one on the CPU when
PULSEINFER_CUDA_ON_CPU names the source folder of such a runtime.
USAGE
}

# --- What must be installed -----------------------------------------------------------------------

missing_names=
missing_packages=
need() { # NAME PACKAGE
  missing_names=$missing_names$1$nl
  missing_packages="$missing_packages $2"
}

# version_at_least 3.25.1 3.24
version_at_least() {
  [ "$(printf '%s\n%s\n' "$2" "$1" | sort -t. -k1,1n -k2,2n | head -n 1)" = "$2" ]
}

find_compiler() {
  for candidate in ${CXX:-g++ g++-14 g++-13 g++-12}; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      printf '%s\n' '#include <concepts>' '#include <span>' '#include <stop_token>' \
        '#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 12' '#error old' '#endif' |
      "$candidate" -std=c++20 -fsyntax-only -x c++ - >/dev/null 2>&1; then
      CXX=$candidate
      export CXX
      return 0
    fi
  done
  return 1
}

find_cmake() {
  for candidate in cmake /usr/bin/cmake "$root/build/tools/bin/cmake"; do
    version=$("$candidate" --version 2>/dev/null | sed -n 's/^cmake version //p') || continue
    if [ -n "$version" ] && version_at_least "$version" 3.24; then
      cmake=$candidate
      case $candidate in */*) ctest=${candidate%cmake}ctest ;; *) ctest=ctest ;; esac
      return 0
    fi
  done
  return 1
}

# An existing build tree keeps its generator.
find_generator() {
  generator=$(sed -n 's/^CMAKE_GENERATOR:INTERNAL=//p' "$build/CMakeCache.txt" 2>/dev/null) || :
  case $generator in
    '')
      if command -v ninja >/dev/null 2>&1; then
        generator=Ninja
      elif command -v make >/dev/null 2>&1; then
        generator='Unix Makefiles'
      else
        return 1
      fi
      ;;
    Ninja) command -v ninja >/dev/null 2>&1 ;;
    *) command -v make >/dev/null 2>&1 ;;
  esac
}

has_header() { # HEADER
  printf '#include <%s>\n' "$1" | "$CXX" -std=c++20 -E -x c++ - >/dev/null 2>&1
}

look_for_tools() { # VERB
  missing_names=
  missing_packages=
  if ! find_compiler; then
    [ -z "${CXX:-}" ] || die "CXX is $CXX, which is not a working C++20 compiler (g++ 12 or newer, clang++ 14 or newer)"
    if command -v g++ >/dev/null 2>&1; then
      need "g++ 12 or newer" g++-12
    else
      need "g++ 12 or newer" g++
    fi
  fi
  find_cmake || need "cmake 3.24 or newer" cmake
  if ! find_generator; then
    case $generator in
      '' | Ninja) need "ninja (or make)" ninja-build ;;
      *) need "make" make ;;
    esac
  fi
  case $1 in
    check)
      command -v clang++ >/dev/null 2>&1 || need "clang++" clang
      command -v clang-format >/dev/null 2>&1 || need "clang-format" clang-format
      command -v clang-tidy >/dev/null 2>&1 || need "clang-tidy" clang-tidy
      ;;
    mutants | study) command -v python3 >/dev/null 2>&1 || need "python3" python3 ;;
  esac
  case $1 in
    test | sanitize | check | mutants) if [ -z "${CXX:-}" ] || ! has_header doctest/doctest.h; then need "doctest" doctest-dev; fi ;;
    bench) if [ -z "${CXX:-}" ] || ! has_header benchmark/benchmark.h; then need "Google Benchmark" libbenchmark-dev; fi ;;
  esac
}

# Runs a command as root.
as_root() {
  if [ "$(id -u)" = 0 ]; then
    "$@"
  else
    sudo "$@"
  fi
}

may_become_root() {
  [ "$(id -u)" = 0 ] && return 0
  command -v sudo >/dev/null 2>&1 && { sudo -n true 2>/dev/null || [ -t 0 ]; }
}

apt_install() { # PACKAGES...
  command -v apt-get >/dev/null 2>&1 && may_become_root || return 1
  say "installing $*"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 update -q || :
  install_package "$@"
}

# Without a look at what is new, so that it does not take long where there is no network.
install_package() { # PACKAGES...
  command -v apt-get >/dev/null 2>&1 && may_become_root || return 1
  as_root env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=120 \
    install -q -y --no-install-recommends "$@"
}

# apt's cmake is too old on some systems: then pip's, in a folder of its own.
pip_cmake() {
  command -v python3 >/dev/null 2>&1 && python3 -c 'import ensurepip' 2>/dev/null ||
    apt_install python3-venv || return 1
  say "installing cmake into build/tools: the system's is older than 3.24"
  python3 -m venv "$root/build/tools" && "$root/build/tools/bin/pip" install -q 'cmake>=3.24'
}

install_tools() { # VERB
  install_needed "$1"
  case $1 in
    test | sanitize | check)
      # A checksum's tests are skipped without xxHash, so it is no failure when it cannot be had.
      has_header xxhash.h || install_package libxxhash-dev >/dev/null 2>&1 ||
        say "xxHash (libxxhash-dev) is not installed: its tests are skipped"
      ;;
  esac
}

install_needed() { # VERB
  look_for_tools "$1"
  [ -n "$missing_packages" ] || return 0
  # shellcheck disable=SC2086 # a list of package names
  apt_install $missing_packages || :
  find_cmake || { command -v cmake >/dev/null 2>&1 && pip_cmake; } || :
  look_for_tools "$1"
  [ -n "$missing_packages" ] || return 0
  {
    printf 'run.sh: missing, and not installed from here:\n'
    printf '%s' "$missing_names" | sed 's/^/  - /'
    printf 'On Debian and Ubuntu, type:\n  '
    [ "$(id -u)" = 0 ] || printf 'sudo '
    printf 'apt-get update && '
    [ "$(id -u)" = 0 ] || printf 'sudo '
    printf 'apt-get install -y%s\n' "$missing_packages"
    case $missing_packages in
      *cmake*) printf 'Where that cmake is older than 3.24:\n  python3 -m venv %s && %s install cmake\n' \
        "$root/build/tools" "$root/build/tools/bin/pip" ;;
    esac
  } >&2
  exit 1
}

# --- CUDA -----------------------------------------------------------------------------------------

# Sets nvcc (empty: none), device (yes or no), runtime_dir (empty: none), cuda_state: one sentence.
look_for_cuda() {
  nvcc=
  device=no
  runtime_dir=
  if [ -n "${CUDA_HOME:-}" ]; then
    [ -x "$CUDA_HOME/bin/nvcc" ] || die "CUDA_HOME is $CUDA_HOME, but there is no bin/nvcc in it"
    nvcc=$CUDA_HOME/bin/nvcc
  elif command -v nvcc >/dev/null 2>&1; then
    nvcc=$(command -v nvcc)
  elif [ -x /usr/local/cuda/bin/nvcc ]; then
    nvcc=/usr/local/cuda/bin/nvcc
  fi
  if [ -e /dev/nvidia0 ] || nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then
    device=yes
  fi

  if [ -z "$nvcc" ]; then
    cuda_state="left out: no CUDA toolkit (nvcc on PATH, CUDA_HOME or /usr/local/cuda)"
  elif [ $device = yes ]; then
    cuda_state="on the GPU"
  elif [ -n "${PULSEINFER_CUDA_ON_CPU:-}" ]; then
    cuda_state="on the CPU, through $PULSEINFER_CUDA_ON_CPU"
  else
    cuda_state="compiled only: there is no GPU, and PULSEINFER_CUDA_ON_CPU does not name a runtime for the CPU"
  fi
}

# Builds the CUDA runtime for the CPU, when it is asked for, needed, and not there or out of date.
build_cpu_runtime() {
  if [ -z "$nvcc" ] || [ $device = yes ] || [ -z "${PULSEINFER_CUDA_ON_CPU:-}" ]; then
    return 0
  fi
  source_dir=
  for candidate in "$PULSEINFER_CUDA_ON_CPU" "$root/$PULSEINFER_CUDA_ON_CPU"; do
    if [ -f "$candidate/build.sh" ]; then
      source_dir=$(CDPATH='' cd -- "$candidate" && pwd)
      break
    fi
  done
  [ -n "$source_dir" ] ||
    die "PULSEINFER_CUDA_ON_CPU is $PULSEINFER_CUDA_ON_CPU, but there is no build.sh in it"
  runtime_dir=$root/build/cuda_on_cpu
  library=$runtime_dir/libcudart.so.13
  if [ -f "$library" ] && [ "$(cat "$runtime_dir/source" 2>/dev/null)" = "$source_dir" ] &&
    [ -z "$(find "$source_dir/src" "$source_dir/include" "$source_dir/build.sh" -newer "$library" 2>/dev/null | head -n 1)" ]; then
    copy_counters_header
    return 0
  fi
  say "building the CUDA runtime for the CPU (once)"
  toolkit=${CUDA_HOME:-$(true | "$nvcc" --dryrun -x cu - 2>&1 | sed -n 's/^#\$ TOP=//p')}
  rm -rf "$runtime_dir"
  CUDA_HOME=$toolkit JOBS=$jobs bash "$source_dir/build.sh" "$runtime_dir" ||
    die "the CUDA runtime for the CPU cannot be built: see above; unset PULSEINFER_CUDA_ON_CPU to go on without"
  printf '%s\n' "$source_dir" >"$runtime_dir/source"
  copy_counters_header
}

# Tests and benchmarks that count what the runtime was asked for include this header where it is.
copy_counters_header() {
  header=$source_dir/include/ptxsim_stats.h
  if [ -f "$header" ] && ! cmp -s "$header" "$runtime_dir/ptxsim_stats.h"; then
    cp "$header" "$runtime_dir/"
  fi
}

# A compiler cache is used where there is one.
launcher=
if command -v ccache >/dev/null 2>&1; then
  launcher='-DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache'
fi

# --- Building -------------------------------------------------------------------------------------

# configure OPTION...: switches the PULSEINFER_BUILD_* options on. Those that an earlier call switched
# on stay on, so that verbs that take turns do not configure again and again.
configure() {
  if [ "$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$build/CMakeCache.txt" 2>/dev/null)" != "$root" ]; then
    rm -rf "$build" # there is none, or the repository has moved
  fi
  options=
  for option in PULSEINFER_BUILD_TESTS PULSEINFER_BUILD_EXAMPLES PULSEINFER_BUILD_BENCHMARKS; do
    value=OFF
    case " $* " in *" $option "*) value=ON ;; esac
    if grep -q "^$option:BOOL=ON" "$build/CMakeCache.txt" 2>/dev/null; then value=ON; fi
    options="$options -D$option=$value"
  done
  # shellcheck disable=SC2086 # options without blanks
  set -- $options $launcher "-DPULSEINFER_CUDA_RUNTIME_DIR=$runtime_dir"
  # A run on the CPU starts from PTX: one is enough, and machine code is not looked at.
  architectures=${PULSEINFER_CUDA_ARCHITECTURES:-${runtime_dir:+80-virtual}}
  [ -z "$architectures" ] || set -- "$@" "-DPULSEINFER_CUDA_ARCHITECTURES=$architectures"
  tools="$CXX $nvcc"
  wanted=$tools$nl$*
  if [ -f "$build/configured" ] && [ "$(cat "$build/configured")" = "$wanted" ]; then
    return 0 # the generator itself notices changed files
  fi
  if [ "$(sed -n 1p "$build/configured" 2>/dev/null)" != "$tools" ]; then
    rm -rf "$build" # other compilers need a new tree
  fi
  mkdir -p "$build"
  rm -f "$build/configured"
  CUDACXX=$nvcc "$cmake" -G "$generator" -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release "$@"
  printf '%s' "$wanted" >"$build/configured"
}

compile() { # [--target TARGETS...]
  "$cmake" --build "$build" --parallel "$jobs" "$@"
}

has_target() { # TARGET
  "$cmake" --build "$build" --target help | grep -Eq "(^|[ /])$1( |:|\$)"
}

# --- Verbs ----------------------------------------------------------------------------------------

demo() {
  backend=host
  # Takes --backend out of the arguments and keeps the others in order.
  count=$#
  while [ "$count" -gt 0 ]; do
    case $1 in
      --backend)
        [ "$count" -gt 1 ] || die "--backend needs a value: host, simulated or cuda"
        backend=$2
        shift 2
        count=$((count - 2))
        ;;
      --backend=*)
        backend=${1#--backend=}
        shift
        count=$((count - 1))
        ;;
      *)
        set -- "$@" "$1"
        shift
        count=$((count - 1))
        ;;
    esac
  done
  case $backend in
    host | simulated | cuda) ;;
    *) die "there is no backend $backend: choose host, simulated or cuda" ;;
  esac

  look_for_cuda
  target=demo
  if [ "$backend" = cuda ]; then
    target=demo_cuda
    [ -n "$nvcc" ] || not_here "the CUDA demo needs a CUDA toolkit: put nvcc on PATH, or set CUDA_HOME to the toolkit's folder"
    if [ $device = no ] && [ -z "${PULSEINFER_CUDA_ON_CPU:-}" ]; then
      not_here "the CUDA demo needs a GPU (there is none here), or the CUDA runtime for the CPU: set PULSEINFER_CUDA_ON_CPU to its source folder"
    fi
  elif [ -z "$nvcc" ]; then
    say "CUDA is $cuda_state"
  fi
  install_tools demo
  build_cpu_runtime
  configure PULSEINFER_BUILD_EXAMPLES
  [ $target = demo ] || has_target demo_cuda ||
    not_here "CUDA was left out when the build was configured: delete $build and look at CMake's messages"
  compile --target $target
  mkdir -p "$root/build/demo"
  rm -f "$root/build/demo/report.json"
  program=$build/examples/$target
  if [ "$backend" = cuda ] && [ -n "$runtime_dir" ]; then
    LD_LIBRARY_PATH=$runtime_dir${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    export LD_LIBRARY_PATH
  fi
  "$program" --backend "$backend" --out "$root/build/demo" "$@"
}

simulate() {
  look_for_cuda
  install_tools demo
  build_cpu_runtime
  configure PULSEINFER_BUILD_EXAMPLES
  compile --target simulate
  mkdir -p "$root/build/simulate"
  rm -f "$root/build/simulate/report.json"
  overlap=$root/examples/data/smollm2-135m-overlap.csv
  [ ! -f "$overlap" ] || set -- --overlap "$overlap" "$@"
  "$build/examples/simulate" --out "$root/build/simulate" "$@"
}

# One line for each group of tests (the part of the name before the dot), from ctest's own lines.
summarise() { # LOG
  awk -v cuda="$cuda_state" '
    / Test +#[0-9]+: / {
      name = $0
      sub(/^.* Test +#[0-9]+: */, "", name)
      sub(/[ .]*( |\*\*\*).*$/, "", name)
      group = name
      sub(/\..*/, "", group)
      if (!(group in seen)) { seen[group] = 1; groups[++n] = group }
      if ($0 ~ /\*\*\*Skipped/) skipped[group]++
      else if ($0 ~ / Passed +[0-9]/) passed[group]++
      else failed[group]++
    }
    END {
      printf "\n%-12s %7s %8s %7s\n", "backend", "passed", "skipped", "failed"
      for (i = 1; i <= n; ++i) {
        g = groups[i]
        printf "%-12s %7d %8d %7d\n", g, passed[g], skipped[g], failed[g]
      }
      printf "CUDA: %s\n", cuda
    }' "$1"
}

run_tests() { # [CTEST ARGUMENTS...]
  look_for_cuda
  say "CUDA is $cuda_state"
  install_tools test
  build_cpu_runtime
  configure PULSEINFER_BUILD_TESTS PULSEINFER_BUILD_EXAMPLES
  compile
  if [ -n "$nvcc" ] && ! has_target tests_cuda; then
    cuda_state="left out by CMake, although $nvcc is there: delete $build and look at CMake's messages"
  fi
  log=$build/ctest.log
  rm -f "$log"
  [ $device = no ] || export PULSEINFER_REQUIRE_DEVICE=1
  status=0
  (cd "$build" && "$ctest" --output-on-failure --no-tests=error --parallel "$jobs" \
    --timeout "$test_seconds" --output-log "$log" "$@") || status=$?
  if [ -f "$log" ]; then
    summarise "$log"
    printf '\n'
    grep -E 'tests passed, ' "$log" || :
  fi
  return $status
}

# The tests as they are when nobody waits.
soak() {
  PULSEINFER_SOAK=1
  PULSEINFER_TEST_SEEDS=${PULSEINFER_TEST_SEEDS:-400}
  export PULSEINFER_SOAK PULSEINFER_TEST_SEEDS
  test_seconds=14400
  run_tests "$@"
}

# Each target of tests/fuzz under libFuzzer with the address and undefined-behaviour sanitizers. What
# an earlier run found worth keeping is begun with; an input that fails is kept beside the program.
fuzz() { # [ARGUMENTS OF LIBFUZZER...]
  sanitizers=-fsanitize=fuzzer,address,undefined
  mkdir -p "$root/build/fuzz"
  printf 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n' |
    clang++ -std=c++20 $sanitizers -x c++ - -o "$root/build/fuzz/probe" >/dev/null 2>&1 ||
    not_here "fuzz needs a clang++ with libFuzzer (Debian, Ubuntu: apt-get install clang)"
  rm -f "$root/build/fuzz/probe"
  for target in "$root"/tests/fuzz/*.cpp; do
    name=$(basename "$target" .cpp)
    say "fuzz: $name for ${PULSEINFER_FUZZ_SECONDS:-60} seconds"
    clang++ -std=c++20 -O1 -g $sanitizers -fno-sanitize-recover=all -pthread \
      -I "$root/include" -I "$root/tests" "$target" -o "$root/build/fuzz/$name"
    mkdir -p "$root/build/fuzz/corpus/$name"
    (cd "$root/build/fuzz" &&
      "./$name" -max_len=2048 "-max_total_time=${PULSEINFER_FUZZ_SECONDS:-60}" \
        "-artifact_prefix=$name." "$@" "corpus/$name") || die "fuzz: $name failed, see above"
  done
}

# A program that clang++ or, failing that, $CXX builds with a sanitizer must run before they are used:
# clang++ is the faster one, and the second compiler under which the tests then pass.
find_sanitizer() { # FLAGS
  for sanitizer in clang++ "$CXX"; do
    if printf 'int main() {}\n' |
      "$sanitizer" -std=c++20 "$1" -x c++ - -o "$root/build/probe" >/dev/null 2>&1 && "$root/build/probe"; then
      rm -f "$root/build/probe"
      return 0
    fi
  done
  die "neither clang++ nor $CXX can build and run a program with $1"
}

# The presets asan and tsan. Their tests end at the first report, and with it not as they should.
sanitize() {
  install_tools sanitize
  : "${PULSEINFER_TEST_SEEDS:=4}"
  export PULSEINFER_TEST_SEEDS
  mkdir -p "$root/build"
  failed=
  for preset in asan tsan; do
    case $preset in
      asan)
        find_sanitizer -fsanitize=address,undefined
        left_out=PULSEINFER_TEST_SIMULATED
        ;;
      tsan)
        find_sanitizer -fsanitize=thread
        left_out=PULSEINFER_BUILD_EXAMPLES
        ;;
    esac
    kept=ON
    if [ "${PULSEINFER_SANITIZE_SHORT:-OFF}" = ON ]; then kept=OFF; fi
    say "$preset: building with $sanitizer"
    tree=$root/build/$preset
    grep -qs "^CMAKE_CXX_COMPILER:.*/$(basename "$sanitizer")\$" "$tree/CMakeCache.txt" || rm -rf "$tree"
    # shellcheck disable=SC2086 # options without blanks
    "$cmake" -S "$root" --preset $preset -G "$generator" -DCMAKE_CXX_COMPILER="$sanitizer" $launcher \
      -D$left_out=$kept \
      >"$root/build/$preset.log" 2>&1 || {
      cat "$root/build/$preset.log" >&2
      die "$preset cannot be configured"
    }
    "$cmake" --build "$tree" --parallel "$jobs" || die "$preset cannot be built"
    log=$tree/ctest.log
    rm -f "$log"
    status=0
    (cd "$root" && "$ctest" --preset $preset --parallel "$jobs" --timeout 1200 --output-log "$log" "$@") ||
      status=$?
    reports=$(grep -cE '(ERROR|WARNING|SUMMARY): [A-Za-z]*Sanitizer|: runtime error: ' "$log" || :)
    passed=$(grep -cE ' Test +#[0-9]+: .* Passed ' "$log" || :)
    line="$preset: $passed tests passed, $reports lines of sanitizer reports"
    if [ $status -ne 0 ] || [ "$reports" -ne 0 ] || [ "$passed" -eq 0 ]; then
      line="$line: FAILED, see $log"
      failed=yes
    fi
    summary="${summary:-}$line$nl"
  done
  printf '\n%s' "$summary"
  [ -z "$failed" ]
}

check() {
  [ $# -eq 0 ] || die "check takes no arguments"
  look_for_cuda
  install_tools check
  CXX=$CXX NVCC=$nvcc JOBS=$jobs sh "$root/cmake/check.sh"
}

mutants() {
  install_tools mutants
  CXX=$CXX JOBS=$jobs python3 "$root/tests/mutants" "$@"
}

bench() {
  [ $# -eq 0 ] || die "bench takes no arguments"
  look_for_cuda
  say "CUDA is $cuda_state"
  install_tools bench
  build_cpu_runtime
  configure PULSEINFER_BUILD_BENCHMARKS
  compile --target benchmarks
  recorded=$root/../shared/data/mooncake_conversation_trace.jsonl
  if [ -z "${PULSEINFER_TRACE:-}" ] && [ -f "$recorded" ]; then
    PULSEINFER_TRACE=$recorded
  fi
  without_trace=
  if [ -n "${PULSEINFER_TRACE:-}" ]; then
    export PULSEINFER_TRACE
  else
    without_trace='PULSEINFER_TRACE names no trace'
    say "figures of recorded traffic are left out: $without_trace"
  fi
  reports=$root/build/bench
  rm -rf "$reports"
  mkdir -p "$reports/figures"
  count=0
  for program in "$build"/benchmarks/bench_*; do
    if [ ! -f "$program" ] || [ ! -x "$program" ]; then continue; fi
    name=$(basename "$program")
    libraries=${LD_LIBRARY_PATH:-}
    case $name in
      *_counts_cuda) # counts of calls and accesses, which only that runtime tells
        if [ -z "$runtime_dir" ]; then
          say "$name: skipped, the CUDA runtime for the CPU is not used here"
          continue
        fi
        libraries=$runtime_dir${libraries:+:$libraries}
        ;;
      *_cuda)
        if [ $device = no ]; then
          say "$name: skipped, there is no GPU (times of a CPU runtime say nothing)"
          continue
        fi
        ;;
    esac
    say "$name"
    LD_LIBRARY_PATH=$libraries PULSEINFER_BENCH_REPORT=$reports/figures/$name.json "$program" \
      --benchmark_out="$reports/$name.json" --benchmark_out_format=json
    count=$((count + 1))
  done
  [ $count -gt 0 ] || die "there are no benchmarks"
  cpu=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo 2>/dev/null | head -n 1)
  "$cmake" -D "figures=$reports/figures" -D "targets=$root/benchmarks/targets.json" \
    -D "cpu=${cpu:-$(uname -m)}, $(nproc) CPUs" \
    -D "without_cuda=CUDA was $cuda_state" -D "without_trace=$without_trace" \
    -D "report=$reports/report.json" -P "$root/cmake/bench_report.cmake"
}

# The captures are made once, by a Python of their own; see examples/data/study_texts.py.
study() { # [ARGUMENTS OF THE PROGRAM...]
  look_for_cuda
  install_tools study
  configure PULSEINFER_BUILD_EXAMPLES
  compile --target fidelity
  folder=$root/build/study
  python=$folder/python/bin/python
  mkdir -p "$folder"
  if ! "$python" -c 'import numpy, gguf' >/dev/null 2>&1; then
    python3 -c 'import ensurepip' 2>/dev/null || apt_install python3-venv ||
      not_here "the study needs python3 with venv (Debian, Ubuntu: apt-get install python3-venv)"
    rm -rf "$folder/python"
    python3 -m venv "$folder/python"
    "$python" -m pip install -q numpy==2.4.6 gguf==0.19.0 ||
      not_here "the study needs numpy and gguf from PyPI, which cannot be had here"
  fi
  "$python" "$root/examples/data/study_texts.py" --out "$folder/data" --jobs "$jobs"
  rm -f "$folder/report.json"
  "$build/examples/fidelity" --out "$folder" "$@" \
    "$folder/data/licence.safetensors" "$folder/data/code.safetensors" \
    "$folder/data/prose.safetensors" "$folder/data/licence-4k.safetensors" \
    "$folder/data/licence-2k.safetensors"
}

docs() {
  [ $# -eq 0 ] || die "docs takes no arguments"
  command -v doxygen >/dev/null 2>&1 || apt_install doxygen ||
    die "doxygen is missing, and not installed from here: on Debian and Ubuntu, apt-get install doxygen"
  rm -rf "$root/build/docs"
  mkdir -p "$root/build/docs"
  (cd "$root" && doxygen docs/Doxyfile) || die "doxygen has warnings, see above"
  say "written to build/docs/html/index.html"
}

verb=${1:-}
[ $# -eq 0 ] || shift
case $verb in
  '' | help | -h | --help) usage ;;
  demo) demo "$@" ;;
  test) run_tests "$@" ;;
  simulate) simulate "$@" ;;
  bench) bench "$@" ;;
  study) study "$@" ;;
  check) check "$@" ;;
  sanitize) sanitize "$@" ;;
  soak) soak "$@" ;;
  fuzz) fuzz "$@" ;;
  mutants) mutants "$@" ;;
  docs) docs "$@" ;;
  *)
    usage >&2
    die "there is no verb $verb"
    ;;
esac
