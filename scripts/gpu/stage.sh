#!/usr/bin/env bash
# Collects programs, and the libraries that they need beyond the C and C++
# runtimes, in a folder that runs on a bare machine with a driver:
# LD_LIBRARY_PATH=FOLDER/lib FOLDER/bin/PROGRAM. Without arguments: the tests
# and benchmarks that need a GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."

bundle=build/gpu-bundle
build=build/release
programs=("$@")
if ((${#programs[@]} == 0)); then
  for name in tests/conformance/conformance_tests tests/statistics/statistics_tests \
    tests/gpu/gpu_tests bench/gpu/attend_bench bench/gpu/encode_bench \
    bench/gpu/link/spillway-link-bench; do
    [[ -x "$build/$name" ]] && programs+=("$build/$name")
  done
fi

mkdir -p "$bundle/bin" "$bundle/lib"
for program in "${programs[@]}"; do
  strip -o "$bundle/bin/$(basename "$program")" "$program"
  ldd "$program" | awk '/=> \//{print $3}' |
    grep -vE '/(libc|libm|libstdc\+\+|libgcc_s|ld-linux[^/]*)\.so' |
    while read -r library; do
      cp -Lu "$library" "$bundle/lib/"
    done
done
cp scripts/gpu/run_tests.py "$bundle/"
du -sh "$bundle" | cut -f1
