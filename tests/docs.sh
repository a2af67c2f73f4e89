#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that README.md, CONTRIBUTING.md and docs/*.md say what is there. `sh tests/docs.sh CHECK [ROOT]`;
# each check is the ctest docs.CHECK:
#
#   code      every ```cpp block stands, line for line, in a file that the build compiles, and every
#             ```cmake block in a CMakeLists.txt; other blocks say what they are
#   headers   README's table names each public header once, in the order of CONTRIBUTING's list
#   includes  a header includes only what stands above it in that list
#   verbs     the verbs of cmake/run.sh, and those that README and CONTRIBUTING mention, agree
#   names     tests and files that the pages mention are there
#   can_fail  each of the above fails on a copy in which something is wrong
set -eu

check=${1:-}
root=${2:-$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)}
cd "$root"

pages() {
  for page in README.md CONTRIBUTING.md docs/*.md; do
    if [ -f "$page" ]; then printf '%s\n' "$page"; fi
  done
}

# The files of tests, examples and benchmarks that the build compiles: those that a CMakeLists.txt
# names, and what they include of ours.
compiled() {
  {
    sed -n 's/^ *pulseinfer_add_test(\([a-z0-9_]*\).*/tests\/\1.cpp/p' tests/CMakeLists.txt
    sed -n 's/^ *pulseinfer_add_example(\([a-z0-9_]*\).*/examples\/\1.cpp examples\/\1.cu/p' \
      examples/CMakeLists.txt
    sed -n 's/^ *add_executable([a-z0-9_]* \([a-z0-9_/]*\.[a-z]*\).*/examples\/\1/p' \
      examples/CMakeLists.txt
    sed -n 's/^ *pulseinfer_add_benchmark(\([a-z0-9_]*\).*/benchmarks\/\1.cpp benchmarks\/\1.cu/p' \
      benchmarks/CMakeLists.txt
    ls tests/support/main.cpp tests/support/backend_*
  } | tr ' ' '\n' | awk '
    function add(file) {
      while (match(file, /[^\/]+\/\.\.\//)) {
        file = substr(file, 1, RSTART - 1) substr(file, RSTART + RLENGTH)
      }
      if (!(file in seen)) { seen[file] = 1; queue[++count] = file }
    }
    { add($0) }
    END {
      for (i = 1; i <= count; ++i) {
        file = queue[i]
        folder = file
        sub(/[^\/]*$/, "", folder)
        lines = 0
        while ((getline line < file) > 0) {
          ++lines
          if (line !~ /^#include "/) continue
          split(line, part, "\"")
          add(folder part[2])
          add("tests/" part[2])
          add("examples/" part[2])
          add("benchmarks/" part[2])
        }
        close(file)
        if (lines > 0) print file
      }
    }'
}

code() {
  {
    compiled | sed 's/^/cpp /'
    find CMakeLists.txt tests examples benchmarks -name CMakeLists.txt | sed "s/^/cmake /"
    pages | sed 's/^/page /'
  } | awk '
    # True if the block stands in lines first, first + 1, ... of a file, indented as a whole.
    function stands_at(file, first,    i, have, want, indent) {
      have = source[file, first]
      indent = length(have) - length(block[1])
      if (indent < 0 || substr(have, 1, indent) ~ /[^ ]/) return 0
      for (i = 1; i <= size; ++i) {
        have = source[file, first + i - 1]
        want = block[i] == "" ? "" : sprintf("%" indent "s", "") block[i]
        if (have != want) return 0
      }
      return 1
    }
    function stands_in_a_file(kind,    f, at) {
      for (f = 1; f <= files[kind]; ++f) {
        for (at = 1; at + size - 1 <= lines[kind, f]; ++at) {
          if (stands_at(kind SUBSEP f, at)) return 1
        }
      }
      return 0
    }
    function wrong(page, number, what) {
      printf "%s:%d: %s\n", page, number, what
      failures++
    }
    function end_block(page,    i, least, width) {
      while (size > 0 && block[size] == "") --size
      least = -1
      for (i = 1; i <= size; ++i) {
        match(block[i], /^ */)
        if (block[i] != "" && (least < 0 || RLENGTH < least)) least = RLENGTH
      }
      for (i = 1; i <= size; ++i) block[i] = substr(block[i], least + 1)
      blocks[language]++
      if (size == 0) wrong(page, begin, "the block is empty")
      else if ((language == "cpp" || language == "cmake") && !stands_in_a_file(language)) {
        wrong(page, begin, "no file that is compiled has this block, line for line: " block[1])
      }
    }
    $1 != "page" {
      n = ++files[$1]
      count = 0
      while ((getline line < $2) > 0) source[$1, n, ++count] = line
      close($2)
      lines[$1, n] = count
      next
    }
    {
      page = $2
      inside = in_list = number = 0
      blank = 1
      while ((getline line < page) > 0) {
        ++number
        if (line ~ /^ *```/) {
          if (inside) {
            inside = 0
            end_block(page)
          } else {
            inside = 1
            size = 0
            begin = number
            language = line
            sub(/^ *```/, "", language)
            if (language !~ /^(cpp|cmake|sh|text)$/) {
              wrong(page, number, "a block of \"" language "\", expected cpp, cmake, sh or text")
            }
          }
        } else if (inside) {
          block[++size] = line
        } else {
          if (line ~ /^[^ ]/) in_list = line ~ /^([-*]|[0-9]+\.) /
          if (blank && !in_list && line ~ /^    /) {
            wrong(page, number, "an indented block: fence it, and say what it is")
          }
          blank = line ~ /^ *$/
        }
      }
      close(page)
      if (inside) wrong(page, begin, "the block has no end")
    }
    END {
      printf "%d cpp blocks in %d files, %d cmake blocks, %d others; %d wrong\n", blocks["cpp"],
        files["cpp"], blocks["cmake"], blocks["sh"] + blocks["text"], failures
      exit failures > 0 || blocks["cpp"] == 0
    }'
}

# The public headers of the block of CONTRIBUTING.md that begins with version.hpp, in its order.
listed() {
  awk '
    /^```/ { inside = !inside; started = 0; next }
    inside && /^version\.hpp/ { started = 1 }
    inside && started {
      sub(/   .*/, "")
      for (i = 1; i <= NF; ++i) print $i
    }' CONTRIBUTING.md
}

public_headers() {
  (cd include/pulseinfer && ls ./*.hpp backend/* | sed 's/^\.\///' | sort)
}

# same WHAT FILE FILE: fails where two sorted lists differ.
same() {
  if ! diff "$2" "$3" >"$scratch/diff"; then
    echo "$1 (<: there, not named. >: named, not there, or twice):"
    grep '^[<>]' "$scratch/diff"
    return 1
  fi
  echo "$(wc -l <"$2" | tr -d ' ') $1"
}

headers() {
  public_headers >"$scratch/there"
  awk '/^\| header / { inside = 1; next } inside && !/^\|/ { exit } inside' README.md |
    cut -d '|' -f 2 | tr ' ' '\n' | sed -n 's/^`\(.*\)`$/\1/p' >"$scratch/table"
  listed >"$scratch/list"
  sort "$scratch/table" >"$scratch/table.sorted"
  sort "$scratch/list" >"$scratch/list.sorted"
  same "headers in README's table" "$scratch/there" "$scratch/table.sorted" || return 1
  same "headers in CONTRIBUTING's list" "$scratch/there" "$scratch/list.sorted" || return 1
  if ! diff "$scratch/list" "$scratch/table"; then
    echo "README's table and CONTRIBUTING's list have another order"
    return 1
  fi
}

# What a public header includes, also through detail/, stands above it in the list. Of the backends it
# is asked only that nothing above them includes them: they and detail/ may lean on all of it.
includes() {
  listed | awk '
    function follow(file, by,    path, line, part, found, n, i) {
      path = "include/pulseinfer/" file
      n = 0
      while ((getline line < path) > 0) {
        if (line !~ /^#include "pulseinfer\//) continue
        split(line, part, "\"")
        found[++n] = substr(part[2], length("pulseinfer/") + 1)
      }
      close(path)
      for (i = 1; i <= n; ++i) {
        ++checked
        if (found[i] ~ /^detail\//) {
          if (!((by, found[i]) in seen)) {
            seen[by, found[i]] = 1
            follow(found[i], by)
          }
        } else if (!(found[i] in place) || place[found[i]] >= place[by]) {
          printf "%s includes %s (in %s), which does not stand above it\n", by, found[i], file
          ++failures
        }
      }
    }
    { place[$1] = NR; name[NR] = $1 }
    END {
      for (k = 1; k <= NR; ++k) follow(name[k], name[k])
      printf "%d headers, %d includes, %d wrong\n", NR, checked, failures
      exit failures > 0 || NR == 0
    }'
}

verbs() {
  awk '/<<.USAGE/ { inside = 1; next } /^USAGE/ { inside = 0 } inside && /^  [a-z]/ { print $1 }' \
    cmake/run.sh | sort >"$scratch/usage"
  awk '/^case \$verb in/ { inside = 1; next } /^esac/ { inside = 0 }
    inside && /^  [a-z][a-z_-]*\)/ { sub(/\).*/, ""); print $1 }' cmake/run.sh |
    sort >"$scratch/cases"
  cat README.md CONTRIBUTING.md | grep -o 'cmake/run\.sh [a-z][a-z_-]*' | sed 's/.* //' |
    sort -u >"$scratch/mentioned"
  same "verbs that run.sh knows, as its usage lists them" "$scratch/cases" "$scratch/usage" &&
    same "verbs that README and CONTRIBUTING mention" "$scratch/usage" "$scratch/mentioned"
}

# Backticked names: BACKEND.TEST is registered, TOPIC: WORDS is a test case, PATH exists.
names() {
  {
    sed -n 's/^ *pulseinfer_add_test(\([a-z0-9_]*\)\(.*\))$/\1 \2/p' tests/CMakeLists.txt | awk '
      { if (NF == 1) print "host." $1
        for (i = 2; i <= NF; ++i) if ($i ~ /^(host|simulated|cuda)$/) print $i "." $1 }'
    sed -n 's/^foreach(check IN ITEMS \(.*\))$/\1/p' tests/CMakeLists.txt | tr ' ' '\n' |
      sed 's/^/docs./'
    sed -n 's/^ *pulseinfer_add_example(\([a-z0-9_]*\).*/example.\1/p' examples/CMakeLists.txt
    printf '%s\n' host.strays simulated.strays
  } | sort -u >"$scratch/tests"
  failures=0
  count=0
  pages | while read -r page; do # the even parts of a line between backticks are names
    sed "/^ *\`\`\`/,/^ *\`\`\`/d" "$page" |
      awk '{ n = split($0, part, "`"); for (i = 2; i <= n; i += 2) print part[i] }'
  done | sort -u >"$scratch/quoted"
  while read -r name; do
    case $name in
      fault*[0-9]': '* | order': '*)
        count=$((count + 1))
        cat tests/*.cpp | grep -qF "TEST_CASE(\"$name\")" || {
          echo "no test case is named $name"
          failures=$((failures + 1))
        }
        ;;
      *' '* | *'*'* | *'<'* | *'('*) ;;
      tests/* | examples/* | cmake/* | benchmarks/* | docs/* | include/*)
        count=$((count + 1))
        [ -e "$name" ] || {
          echo "there is no $name"
          failures=$((failures + 1))
        }
        ;;
      *.hpp | *.cpp | *.cuh | *.cu) ;;
      host.* | simulated.* | cuda.* | docs.* | example.*)
        count=$((count + 1))
        grep -qx "$name" "$scratch/tests" || {
          echo "no test is named $name"
          failures=$((failures + 1))
        }
        ;;
    esac
  done <"$scratch/quoted"
  echo "$count names of tests and files, $failures wrong"
  [ $failures = 0 ] && [ $count -gt 0 ]
}

# fails CHECK FILE SED_SCRIPT: the check passes on the copy, and not when the file is edited so.
fails() {
  cp "$copy/$2" "$scratch/kept"
  sed "$3" "$scratch/kept" >"$copy/$2"
  if cmp -s "$scratch/kept" "$copy/$2"; then
    echo "can_fail: $3 changes nothing in $2"
    status=1
  elif sh tests/docs.sh "$1" "$copy" >"$scratch/said" 2>&1; then
    echo "can_fail: $1 does not notice $3 in $2"
    status=1
  else
    echo "$1 notices: $(head -n 1 "$scratch/said")"
  fi
  cp "$scratch/kept" "$copy/$2"
}

can_fail() {
  copy=$scratch/copy
  mkdir "$copy"
  cp -R README.md CONTRIBUTING.md CMakeLists.txt docs include tests examples benchmarks cmake "$copy"
  status=0
  for each in code headers includes verbs names; do
    sh tests/docs.sh $each "$copy" >"$scratch/said" 2>&1 || {
      echo "can_fail: $each fails on a plain copy:"
      cat "$scratch/said"
      status=1
    }
  done
  fails code README.md 's/budget_blocks = 8}/budget_blocks = 9}/'
  fails code README.md 's/^```sh$/```/'
  fails code examples/sparse_decode.hpp 's/hot.lend(0, lent, stream);/hot.lend(0, lent,  stream);/'
  fails code tests/CMakeLists.txt 's/^pulseinfer_add_test(concepts)$//'
  fails headers README.md 's/`buffer.hpp`/`bufer.hpp`/'
  fails headers README.md 's/`trace.hpp`/`trace.hpp` `trace.hpp`/'
  fails headers README.md 's/`ticket.hpp` `transfer.hpp`/`transfer.hpp` `ticket.hpp`/'
  fails includes include/pulseinfer/layout.hpp 's/geometry\.hpp/pool_shape.hpp/'
  fails includes include/pulseinfer/detail/cpu_kernels.hpp 's/pulseinfer\/top_k\.hpp/pulseinfer\/pulseinfer.hpp/'
  fails verbs cmake/run.sh 's/^  bench  /  banch  /'
  fails verbs README.md 's/run\.sh demo/run.sh demos/g'
  fails names CONTRIBUTING.md 's/`simulated\.block_store`/`simulated.block_stores`/'
  fails names docs/design.md 's/waits for the DMA`/waits for a DMA`/'
  fails names README.md 's/examples\/engines\.hpp/examples\/engine.hpp/g'
  return $status
}

case $check in
  code | headers | includes | verbs | names | can_fail)
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    $check
    ;;
  *)
    sed -n 's/^#   //p' "$0"
    exit 2
    ;;
esac
