#!/usr/bin/env bash
# Runs the programs of a bundle of stage.sh on the machine with the GPU:
#   run_all.sh FOLDER [STEP...]
# Writes summary.json, a log of each step and a report of each suite to FOLDER.
# Without names of steps, all run: devices conformance statistics gpu memcheck
# racecheck attend_bench encode_bench python model demo huggingface fairness presence cluster ray.
# If a step fails or exceeds its time, the next ones still run, and the exit
# status is 1. The Python steps use the GPU $SPILLWAY_TEST_DEVICE, by default
# cuda:0.
set -euo pipefail

if (($# < 1)); then
  echo "usage: run_all.sh FOLDER [STEP...]" >&2
  exit 2
fi
mkdir -p "$1"
results=$(cd "$1" && pwd)
shift
only=" $* "
device=${SPILLWAY_TEST_DEVICE:-cuda:0}
cd "$(dirname "$0")"
# The default place of the toolkit's tools.
PATH=$PATH:/usr/local/cuda/bin

begin=$(date -u +%Y-%m-%dT%H:%M:%SZ)
steps=()
failures=0

record() { # NAME RESULT EXIT_STATUS SECONDS
  steps+=("{\"step\": \"$1\", \"result\": \"$2\", \"exit_status\": $3, \"seconds\": $4}")
  echo "=== $1: $2 after $4 s"
}

wanted() { # NAME
  [[ "$only" == *" $1 "* || "$only" == "  " ]]
}

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2 status=0 result=passed start=$SECONDS
  shift 2
  wanted "$name" || return 0
  echo "=== $name"
  # This path also affects python3 and compute-sanitizer, but the bundle contains none of the
  # libraries that they use.
  timeout --kill-after=10 "$limit" env LD_LIBRARY_PATH="$PWD/lib" "$@" 2>&1 |
    tee "$results/$name.log" || status=${PIPESTATUS[0]}
  if ((status != 0)); then
    result=failed
    failures=$((failures + 1))
    # 124: timeout ended the step; 137: it had to be killed.
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

# suite NAME SECONDS PROGRAM FILTER [OPTION...]: runs a test program, each test
# in its own process.
suite() {
  local name=$1 limit=$2 program=bin/$3 filter=$4
  shift 4
  wanted "$name" || return 0
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

# The sanitizers are slow, so they get few tests: an encode, an attend with every
# group size, every index and selector, both stages, and LSH.
few='Devices/Index.AppendInPiecesOfAnySize/cuda_bits2:Devices/Dense.EveryGroupSize/cuda'
few+=':Devices/Methods.EveryIndexAtOnce/cuda:Devices/Stages.NoHeavySet/cuda'
few+=':Devices/LshSampling.WeighsWhatSharesTwoBuckets/cuda'
if command -v compute-sanitizer >/dev/null; then
  for tool in memcheck racecheck; do
    suite "$tool" 1500 conformance_tests "$few" --jobs 6 --timeout 700 \
      --prefix "compute-sanitizer --tool $tool --error-exitcode 99"
  done
else
  ! wanted memcheck || record sanitizers "no compute-sanitizer on this machine" 0 0
fi

for bench in attend_bench encode_bench; do
  if [[ -x "bin/$bench" ]]; then
    step "$bench" 900 "bin/$bench"
  fi
done

# Runs a command in the bundle's tree, which is like a checkout. torch,
# transformers and their dependencies are those of the machine.
in_tree=(env -u LD_LIBRARY_PATH -C tree 
  PYTHONPATH="$PWD/site-packages:$PWD/tree/clients/python"
  SPILLWAY_LIBRARY="$PWD/lib/libspillway.so.1"
  PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 SPILLWAY_TEST_DEVICE="$device")
pytest=(python3 -m pytest -q -p no:cacheprovider --durations=10)

python_steps() {
  if [[ ! -d tree ]]; then
    record python "the bundle has no Python parts" 0 0
    return
  fi
  if ! python3 -c 'import torch, transformers, matplotlib'; then
    record python "python3 lacks torch, transformers or matplotlib" 0 0
    return
  fi
  rm -rf site-packages
  # The folder needs this name, because otherwise hypothesis takes it for the project's code.
  python3 -m pip install --quiet --no-index --no-deps --target site-packages wheels/*.whl || {
    record python "the wheels do not fit python3" 1 0
    failures=$((failures + 1))
    return
  }
  step python 1200 "${in_tree[@]}" "${pytest[@]}" tests/python tests/cluster --junitxml "$results/python.xml"
  if wanted model || wanted demo; then
    model_steps
  fi
  # shellcheck disable=SC2016
  step huggingface 600 "${in_tree[@]}" bash -o pipefail -c \
    'python3 bench/gpu/huggingface.py --device "$1" | tee "$0"' "$results/huggingface.jsonl" \
    "$device"
  # For these measurements, nothing else should use the machine.
  # shellcheck disable=SC2016
  step fairness 900 "${in_tree[@]}" bash -eo pipefail -c 'for tokens in 65536 1048576; do
      for giants in 1 2; do
        python3 bench/rpc/fairness.py --device "$1" --tokens $tokens --giants $giants --steps 1000
      done
    done | tee "$0"' "$results/fairness.jsonl" "$device"
  # shellcheck disable=SC2016
  step presence 900 "${in_tree[@]}" bash -o pipefail -c \
    'python3 bench/rpc/presence.py --device "$1" --steps 2000 | tee "$0"' \
    "$results/presence.jsonl" "$device"
  step cluster 600 "${in_tree[@]}" python3 bench/cluster/scale.py measure hops daemons \
    --output "$results/scale.json"
  # Only if python3 has Ray.
  if python3 -c 'import ray' 2>/dev/null; then
    step ray 300 "${in_tree[@]}" bash -c \
      'PYTHONPATH=$PYTHONPATH:tests/python "$@" tests/cluster_ray/test_gpu_daemon.py' - "${pytest[@]}"
  fi
}

# The steps that need the model. stage.sh --model puts it beside the bundle in two parts.
model_steps() {
  local name=SmolLM2-135M-Instruct.gguf
  if ! compgen -G "../gpu-model/$name.part*" >/dev/null; then
    record model "no ../gpu-model: stage.sh --model makes it" 0 0
    return
  fi
  mkdir -p tree/build/models
  cat ../gpu-model/"$name".part* >"tree/build/models/$name"
  if ! (cd tree/build/models && sha256sum --quiet --check "$OLDPWD/../gpu-model/$name.sha256"); then
    record model "../gpu-model lacks a part" 1 0
    failures=$((failures + 1))
    return
  fi
  step model 1200 "${in_tree[@]}" "${pytest[@]}" tests/model --junitxml "$results/model.xml"
  step demo 600 "${in_tree[@]}" python3 scripts/demo.py --device "$device" --output "$results/demo"
}

if wanted python || wanted model || wanted demo || wanted huggingface || wanted fairness ||
  wanted presence; then
  python_steps
fi

{
  printf '{\n "commit": "%s",\n "begin": "%s",\n "steps": [\n' "$(<COMMIT)" "$begin"
  for ((i = 0; i < ${#steps[@]}; ++i)); do
    printf '  %s%s\n' "${steps[i]}" "$( ((i + 1 < ${#steps[@]})) && echo ,)"
  done
  printf ' ],\n "failure_count": %d\n}\n' "$failures"
} >"$results/summary.json"
echo "=== $failures of ${#steps[@]} steps failed"
((failures == 0))
