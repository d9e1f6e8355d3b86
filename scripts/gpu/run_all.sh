#!/usr/bin/env bash
# Runs what a bundle of stage.sh holds on the machine with the GPU:
#   run_all.sh FOLDER
# FOLDER gets summary.json, a log of each step and a report of each suite. A
# step that fails, or does not end in its time, does not keep the next ones
# from running; the exit status is 1 if there was one.
set -euo pipefail

if (($# != 1)); then
  echo "usage: run_all.sh FOLDER" >&2
  exit 2
fi
mkdir -p "$1"
results=$(cd "$1" && pwd)
cd "$(dirname "$0")"
# Where the toolkit's tools are when nobody put them on the path.
PATH=$PATH:/usr/local/cuda/bin

begin=$(date -u +%Y-%m-%dT%H:%M:%SZ)
steps=()
failures=0

record() { # NAME RESULT EXIT_STATUS SECONDS
  steps+=("{\"step\": \"$1\", \"result\": \"$2\", \"exit_status\": $3, \"seconds\": $4}")
  echo "=== $1: $2 after $4 s"
}

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 status=0 result=passed start=$SECONDS
  shift 2
  echo "=== $name"
  # python3 and compute-sanitizer get the bundle's libraries too, none of which
  # is theirs.
  timeout --kill-after=10 "$limit" env LD_LIBRARY_PATH="$PWD/lib" "$@" 2>&1 |
    tee "$results/$name.log" || status=${PIPESTATUS[0]}
  if ((status != 0)); then
    result=failed
    failures=$((failures + 1))
    # 137: it had to be killed.
    if ((status == 124 || status == 137)); then
      result="out of time"
    fi
  elif grep -qs '"passed": 0,' "$results/$name.json"; then
    result="nothing ran"
    status=1
    failures=$((failures + 1))
  fi
  record "$name" "$result" "$status" $((SECONDS - start))
}

# suite NAME SECONDS PROGRAM FILTER [OPTION...]: a test program, each test in
# a process of its own.
suite() {
  local name=$1 limit=$2 program=bin/$3 filter=$4
  shift 4
  if [[ ! -x "$program" ]]; then
    echo "=== $name: the bundle has no $program"
    record "$name" missing 127 0
    failures=$((failures + 1))
    return
  fi
  step "$name" "$limit" python3 run_tests.py "$program" --filter "$filter" \
    --report "$results/$name.json" "$@"
}

step devices 60 nvidia-smi -L
nvidia-smi --query-gpu=index,name,uuid,driver_version,memory.total --format=csv \
  >"$results/devices.csv" 2>/dev/null || true

suite conformance 1800 conformance_tests '*cuda*'
export SPILLWAY_TEST_DEVICE=cuda
suite statistics 1800 statistics_tests '*' --timeout 600
unset SPILLWAY_TEST_DEVICE
suite gpu 1800 gpu_tests '*'

# Slow, so on little: an encode and an attend of every shape of group.
few='Devices/Index.AppendInPiecesOfAnySize/cuda_bits2:Devices/Dense.EveryGroupSize/cuda'
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    suite "$tool" 1500 conformance_tests "$few" --jobs 2 --timeout 700 \
      --prefix "compute-sanitizer --tool $tool --error-exitcode 99"
  done
else
  record sanitizers "no compute-sanitizer on this machine" 0 0
fi

for bench in attend_bench encode_bench; do
  if [[ -x "bin/$bench" ]]; then
    step "$bench" 900 "bin/$bench"
  fi
done

{
  printf '{\n "commit": "%s",\n "begin": "%s",\n "steps": [\n' "$(<COMMIT)" "$begin"
  for ((i = 0; i < ${#steps[@]}; ++i)); do
    printf '  %s%s\n' "${steps[i]}" "$( ((i + 1 < ${#steps[@]})) && echo ,)"
  done
  printf ' ],\n "failure_count": %d\n}\n' "$failures"
} >"$results/summary.json"
echo "=== $failures of ${#steps[@]} steps failed"
((failures == 0))
