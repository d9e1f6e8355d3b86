#!/usr/bin/env bash
# Builds the tests and benchmarks that need a GPU, and runs them:
#   scripts/gpu-test.sh                    on this machine
#   scripts/gpu-test.sh --via 'ssh host'   on a machine that a command connects to
# Like ssh, the command gets a line for a shell as its last argument. Programs
# are sent over its standard input, and results come back over its standard
# output. The machine needs the driver, bash, tar and python3. If it also has
# torch, transformers and matplotlib, the Python tests and the demo run too.
# Results are in build/gpu-results. Exit status: 0 all passed, 1 something
# failed, 2 no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."

bundle=build/gpu-bundle
results=build/gpu-results

say() { echo "gpu-test: $*" >&2; }

via=
while (($# > 0)); do
  case $1 in
    --via)
      via=${2-}
      if [[ -z "$via" ]]; then
        say "--via needs a command, such as 'ssh host'"
        exit 1
      fi
      shift 2
      ;;
    -h | --help)
      sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' scripts/gpu-test.sh
      exit
      ;;
    *)
      say "unknown argument $1; --help lists what there is"
      exit 1
      ;;
  esac
done

# there LINE: runs a line of sh on this or the other machine. sh reads the line,
# whatever the login shell on the other machine is. The line must not contain
# single quotes.
there() {
  if [[ -n "$via" ]]; then
    # bash parses the command, which may contain quotes.
    bash -c "$via \"\$@\"" via "sh -c '$1'"
  else
    sh -c "$1"
  fi
}
place=here
[[ -z "$via" ]] || place="on the machine of '$via'"

# Check this first, because a build takes minutes.
status=0
gpus=$(there 'nvidia-smi -L 2>/dev/null || true' </dev/null) || status=$?
if ((status != 0)); then
  say "'$via' ends with $status; is the machine reachable?"
  exit 1
fi
if ! gpus=$(grep '^GPU ' <<<"$gpus"); then
  say "no GPU $place: nvidia-smi -L lists none."
  [[ -n "$via" ]] || say "--via 'ssh host' runs the suites on a machine that has one."
  exit 2
fi
say "$place:"
echo "$gpus" >&2

[[ -f build/release/build.ninja ]] || cmake --preset release
targets=$(cmake --build --preset release --target help)
if ! grep -q '^gpu_tests:' <<<"$targets"; then
  say "build/release is without CUDA: CMake found no nvcc (set CUDACXX and configure anew)"
  exit 1
fi
# This target exists only if Eigen is installed.
mapfile -t optional < <(grep -o '^decode_example\b' <<<"$targets")
cmake --build --preset release --parallel "${JOBS:-$(nproc)}" \
  --target conformance_tests statistics_tests gpu_tests attend_bench encode_bench \
  spillwayd spillway spillway_c attend_example "${optional[@]}"
scripts/gpu/stage.sh >/dev/null
bundles=(gpu-bundle)
if [[ -x .venv/bin/python ]]; then
  scripts/gpu/stage.sh --model >/dev/null
  bundles+=(gpu-model)
fi

rm -rf "$results"
mkdir -p "$results"
if [[ -z "$via" ]]; then
  "$bundle/run_all.sh" "$results" || status=$?
else
  # The log goes to standard error, because standard output carries the results.
  remote='
    set -e
    folder=$(mktemp -d)
    trap "rm -rf \"$folder\"" EXIT
    trap "exit 130" HUP INT TERM
    tar -C "$folder" -xzf -
    status=0
    mkdir "$folder/results"
    "$folder/gpu-bundle/run_all.sh" "$folder/results" </dev/null >&2 || status=$?
    tar -C "$folder/results" -czf - .
    exit $status'
  tar -C build -czf - "${bundles[@]}" | there "$remote" | tar -C "$results" -xzf - || status=1
fi
if [[ ! -f "$results/summary.json" ]]; then
  say "the run broke off: it left no $results/summary.json"
  exit 1
fi
say "results are in $results"
if ((status != 0)); then
  say "there were failures"
  exit 1
fi
