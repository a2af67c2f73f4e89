#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The demo refuses bad input with one clear line that names the value, and writes nothing.
#   sh tests/demo.sh DEMO-PROGRAM CAPTURE
set -eu
demo=$1
capture=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0

# refused "TEXT" ARGUMENTS...: exit status 1, TEXT in the message, no report
refused() {
  text=$1
  shift
  status=0
  "$demo" --out "$work/out" "$@" >"$work/stdout" 2>"$work/stderr" || status=$?
  if [ "$status" -ne 1 ] || ! grep -qF -- "$text" "$work/stderr"; then
    printf 'demo %s: status %s, expected 1 and "%s"\n' "$*" "$status" "$text"
    sed 's/^/  | /' "$work/stderr"
    failures=$((failures + 1))
  elif [ -e "$work/out/report.json" ] || [ -e "$work/out/trace.json" ]; then
    printf 'demo %s: a report was written\n' "$*"
    failures=$((failures + 1))
  else
    printf 'refused: %s\n' "$(tail -n 1 "$work/stderr")"
  fi
}

refused 'budget (blocks) is 0' --budget 0
refused 'budget (blocks) is 254, expected 1 to 253' --budget 254
refused 'steps is 129, expected 2 to 128' --steps 129
refused '--steps is 0' --steps 0
refused '5 steps cannot be shared evenly by 2 requests' --steps 5
refused "--budget is '-3', expected a whole number" --budget -3
refused "--budget is 'many'" --budget many
refused 'hot pages is 8, expected 32' --hot-pages 8
refused 'unknown argument --digest median' --digest median
refused "backend is 'abacus'" --backend abacus
refused '--capture has no value' --capture
refused 'cannot be opened' --capture "$work/nowhere.safetensors"

# A capture that is damaged, in every way that a file can be.
bytes=$(wc -c <"$capture")
: >"$work/empty"
refused 'has 0 bytes, too few for a header' --capture "$work/empty"
head -c 5 "$capture" >"$work/five"
refused 'has 5 bytes, too few for a header' --capture "$work/five"
head -c 100 "$capture" >"$work/short_header"
refused 'names a header of' --capture "$work/short_header"
head -c $((bytes - 1)) "$capture" >"$work/cut"
refused 'lies outside the file' --capture "$work/cut"
head -c $((bytes / 2)) "$capture" >"$work/half"
refused 'lies outside the file' --capture "$work/half"
edited() { # NAME SED-EXPRESSION: the same length, or the header's would not fit
  LC_ALL=C sed "$2" "$capture" >"$work/$1"
  [ "$(wc -c <"$work/$1")" -eq "$bytes" ] || { echo "$1 changed the length"; exit 2; }
}
edited renamed '1s/"layer\.8\.v"/"layer.9.v"/'
refused 'has no tensor layer.8.v' --capture "$work/renamed"
edited retyped '1s/"layer\.8\.k":{"dtype":"F16"/"layer.8.k":{"dtype":"F32"/'
refused 'tensor layer.8.k (F32) has 1622016 bytes, its shape needs 3244032' --capture "$work/retyped"
edited reshaped '1s/"shape":\[4224,3,64\]/"shape":[4224,6,32]/'
refused 'tensor layer.8.k has another shape' --capture "$work/reshaped"
edited negative '1s/"heads":"9"/"heads":"x"/'
refused "metadata heads is 'x', expected a whole number" --capture "$work/negative"
edited unbalanced '1s/"__metadata__":{/"__metadata__":[/'
refused 'header is not as expected' --capture "$work/unbalanced"
edited steps '1s/"steps":"128"/"steps":"129"/'
refused 'too few for a prompt' --capture "$work/steps"
edited heads '1s/"heads":"9"/"heads":"8"/'
refused 'another shape than the metadata say' --capture "$work/heads"

[ "$failures" -eq 0 ] || { echo "$failures cases failed"; exit 1; }
