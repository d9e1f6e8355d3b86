#!/usr/bin/env bash
# Collects programs, and the libraries that they need beyond the C and C++
# runtimes, in build/gpu-bundle, which runs on a bare machine with a driver:
# LD_LIBRARY_PATH=FOLDER/lib FOLDER/bin/PROGRAM. Named programs join what is
# there; without a name the folder is made anew with the tests and benchmarks
# that need a GPU. FOLDER/run_all.sh runs those.
set -euo pipefail
cd "$(dirname "$0")/../.."

bundle=build/gpu-bundle
build=build/release
programs=("$@")
if ((${#programs[@]} == 0)); then
  for name in tests/conformance/conformance_tests tests/statistics/statistics_tests \
    tests/gpu/gpu_tests bench/gpu/attend_bench bench/gpu/encode_bench \
    bench/gpu/link/spillway-link-bench; do
    if [[ -x "$build/$name" ]]; then
      programs+=("$build/$name")
    fi
  done
  if ((${#programs[@]} == 0)); then
    echo "stage: $build has none of the programs; build them first" >&2
    exit 1
  fi
  rm -rf "$bundle"
fi

mkdir -p "$bundle/bin" "$bundle/lib"
for program in "${programs[@]}"; do
  strip -o "$bundle/bin/$(basename "$program")" "$program"
  needed=$(ldd "$program")
  if grep 'not found' <<<"$needed"; then
    echo "stage: $program lacks the libraries above" >&2
    exit 1
  fi
  awk '/=> \//{print $3}' <<<"$needed" |
    { grep -vE '/(libc|libm|libstdc\+\+|libgcc_s|ld-linux[^/]*)\.so' || true; } |
    while read -r library; do
      cp -Lu "$library" "$bundle/lib/"
    done
done
cp scripts/gpu/run_tests.py scripts/gpu/run_all.sh "$bundle/"
git describe --always --dirty >"$bundle/COMMIT" 2>/dev/null || echo unknown >"$bundle/COMMIT"
du -sh "$bundle" | cut -f1
