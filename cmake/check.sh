#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# What can be said about the sources without running them: format, every header alone under every
# compiler, clang-tidy. `sh cmake/run.sh check` installs what this needs and calls it.
#
#   CXX      a g++ (g++)         CLANGXX  a clang++ (clang++)
#   NVCC     empty: the .cuh are left out
#   JOBS     what runs at once (2)
#   TIDY     no: without clang-tidy
set -eu

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
cd "$root"
out=build/check
warnings='-Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror'
includes="-I$root/include -I$root/tests -I$root/examples -I$root/benchmarks"
: "${CXX:=g++}" "${CLANGXX:=clang++}" "${NVCC:=}" "${JOBS:=2}" "${TIDY:=yes}"
export CXX CLANGXX NVCC JOBS TIDY

# --- One job: `check.sh --job KIND FILE` is quiet when all is well ---------------------------------

# The header as the only thing in a translation unit.
header() { # COMPILER FILE
  # shellcheck disable=SC2086 # flags
  "$1" -std=c++20 $warnings -Iinclude -fsyntax-only -x c++ -include "$2" /dev/null || return 1
}

# What a test or an example may do and the library may not: end by an exception, be slow where nobody
# waits, read the environment, write 128 * 1024 where a std::size_t is wanted.
programs='-bugprone-exception-escape,-performance-inefficient-*,-concurrency-mt-unsafe'
programs=$programs,-bugprone-implicit-widening-of-multiplication-result

tidy() { # UNIT CHECKS FLAGS...
  unit=$1
  checks=$2
  shift 2
  # shellcheck disable=SC2086 # flags
  clang-tidy --quiet --checks="$checks" "$unit" -- -std=c++20 $includes "-DPULSEINFER_SOURCE_DIR=\"$root\"" "$@" \
    2>"$log.stderr" || {
    cat "$log.stderr"
    return 1
  }
}

# As the build compiles them (cmake/PulseinferTests.cmake): first what they include, then each in a
# namespace of its own.
tests_at_once() { # BACKEND NAMES...
  [ "$1" = none ] || echo "#include \"support/backend_$1.hpp\""
  shift
  # But for the header of a runtime for CUDA on the CPU, which no host has.
  for name; do grep '^#include ' "tests/$name.cpp"; done | grep -v ptxsim | sort -u
  for name; do
    echo "namespace tests_of_$name {"
    cat "tests/$name.cpp"
    echo '}'
  done
}

job() { # KIND FILE
  case $1 in
    format) clang-format --dry-run -Werror "$2" ;;
    g++) header "$CXX" "$2" ;;
    clang++) header "$CLANGXX" "$2" ;;
    names) # in the namespace of this version, whose macro is defined where it is used
      ! grep -nE '^namespace pulseinfer(::[a-z_]+)* \{' "$2" || return 1
      ! "$CXX" -std=c++20 -Iinclude -E -P -x c++ -include "$2" /dev/null |
        grep -n 'namespace.*PULSEINFER_'
      ;;
    nvcc) # one virtual architecture: nothing is assembled
      printf '#include "%s"\n' "${2#include/}" >"$log.cu"
      "$NVCC" -std=c++20 -Iinclude -Xcompiler=-Wall,-Wextra -Werror=all-warnings \
        -gencode arch=compute_80,code=compute_80 -c -o /dev/null "$log.cu"
      ;;
    tidy-headers)
      find include -name '*.hpp' | sort | sed 's,^include/\(.*\),#include "\1",' >"$log.cpp"
      tidy "$log.cpp" ""
      ;;
    tidy) tidy "$2" "$programs" ;;
    tidy-tests) # tests behind one backend (none: they know none): at once, and if that fails each alone
      backend=${2%%:*}
      # shellcheck disable=SC2046 # a list of names
      set -- $(printf '%s' "${2#*:}" | tr ':' ' ')
      tests_at_once "$backend" "$@" >"$log.cpp"
      if tidy "$log.cpp" "$programs" >"$log.at_once"; then return 0; fi
      for name; do
        if [ "$backend" = none ]; then
          tidy "tests/$name.cpp" "$programs" || :
        else
          tidy "tests/$name.cpp" "$programs" -include "support/backend_$backend.hpp" || :
        fi
      done
      cat "$log.at_once"
      return 1
      ;;
    *)
      echo "check.sh: no job $1"
      return 1
      ;;
  esac
}

if [ "${1:-}" = --job ]; then
  log=$out/$(printf '%.100s' "$2-$3" | tr '/:' '__')
  began=$(date +%s)
  status=0
  job "$2" "$3" >"$log.log" 2>&1 || status=$?
  echo "$2 $(($(date +%s) - began))" >>"$out/seconds"
  if [ $status -ne 0 ]; then
    # One write, so that jobs side by side do not mix their lines.
    text=$(grep -v 'warnings generated' "$log.log" | head -n 60)
    printf '\nFAILED: %s: %s\n%s\n' "$2" "$3" "$text"
    echo "$2 $3" >>"$out/failed"
  fi
  exit 0
fi

# --- All jobs -------------------------------------------------------------------------------------

sources() { # NAME...: files of these kinds, ours, tracked or not yet
  find include tests examples benchmarks cmake -type f \( "$@" \) | sort
}

# The backend that clang-tidy sees a test with: the first that tests/CMakeLists.txt names. A test for
# CUDA alone is nvcc's. Most of the time goes into what the tests include, so a job takes several.
tests() {
  sed -n 's/^ *pulseinfer_add_test(\([a-z_0-9]*\)\(.*\)).*$/\1\2/p' tests/CMakeLists.txt |
    while read -r name rest; do
      [ -f "tests/$name.cpp" ] || continue
      case " $rest " in
        *" BACKENDS cuda "*) ;;
        *" BACKENDS "*)
          backend=${rest#*BACKENDS }
          echo "${backend%% *} $name $(wc -c <"tests/$name.cpp")"
          ;;
        *) echo "none $name $(wc -c <"tests/$name.cpp")" ;;
      esac
    done |
    awk '{
      names[$1] = names[$1] ":" $2
      if ((bytes[$1] += $3) > 260000) {
        print "tidy-tests " $1 names[$1]
        names[$1] = ""
        bytes[$1] = 0
      }
    }
    END { for (backend in names) if (names[backend] != "") print "tidy-tests " backend names[backend] }'
}

jobs() {
  if [ "$TIDY" = yes ]; then
    echo "tidy-headers include"
    tests
    sources -name '*.cpp' | grep -E '^examples/' | sed 's/^/tidy /'
  fi
  if [ -n "$NVCC" ]; then
    sources -name '*.cuh' | grep '^include/' | sed 's/^/nvcc /'
  fi
  for kind in g++ clang++ names; do
    sources -name '*.hpp' | grep '^include/' | sed "s/^/$kind /"
  done
  sources -name '*.hpp' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' | sed 's/^/format /'
}

rm -rf "$out"
mkdir -p "$out"
jobs | xargs -P "$JOBS" -n 2 sh "$root/cmake/check.sh" --job

awk '{ count[$1]++; seconds[$1] += $2 }
  END { for (kind in count) printf "%-16s %4d files %5d s of one core\n", kind, count[kind], seconds[kind] }' \
  "$out/seconds" | sort
[ -n "$NVCC" ] || echo "nvcc               left out: there is none"
if [ -f "$out/failed" ]; then
  echo "check: $(wc -l <"$out/failed") of $(wc -l <"$out/seconds") failed"
  exit 1
fi
echo "check: all $(wc -l <"$out/seconds") passed"
