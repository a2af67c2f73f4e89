#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The study over a few steps of the capture that is in the repository, and on bad input.
#   sh tests/fidelity.sh FIDELITY-PROGRAM CAPTURE
set -eu
fidelity=$1
capture=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# refused "TEXT" ARGUMENTS...: exit status 1, TEXT in the message, no report
refused() {
  text=$1
  shift
  status=0
  "$fidelity" --out "$work/out" "$@" >"$work/stdout" 2>"$work/stderr" || status=$?
  if [ "$status" -ne 1 ] || ! grep -qF -- "$text" "$work/stderr" || [ -e "$work/out/report.json" ]; then
    printf 'fidelity %s: status %s, expected 1, "%s" and no report\n' "$*" "$status" "$text"
    sed 's/^/  | /' "$work/stderr"
    exit 1
  fi
  printf 'refused: %s\n' "$(tail -n 1 "$work/stderr")"
}

refused 'no capture is named'
refused 'unknown argument --budget' --budget 4 "$capture"
refused "--threads is '0'" --threads 0 "$capture"
refused '--steps has no value' "$capture" --steps
refused 'cannot be opened' "$work/nowhere.safetensors"

"$fidelity" --out "$work/out" --steps 3 "$capture" >"$work/stdout"
for key in consensus_mass_vs_per_head recall_reduction_vs_union hot_buffer_hit_rate; do
  # a share of something, once in the report and once among its targets
  value=$(sed -n "s/^  \"$key\": \([0-9.]*\),\$/\1/p" "$work/out/report.json")
  awk -v value="$value" 'BEGIN { exit !(value > 0.3 && value < 1.1) }' || {
    echo "$key is '$value' in the report:"
    cat "$work/out/report.json"
    exit 1
  }
  printf '%s %s\n' "$key" "$value"
done
grep -q '^<svg ' "$work/out/mass.svg"
