#!/usr/bin/env bash
# Tests the wheel of scripts/wheels.sh as a user without a checkout gets it:
#   wheels-test.sh                  in an empty environment, and with each extra in another one; as
#                                   root also in an empty Debian 12
#   wheels-test.sh bundle [3.12]    makes build/wheels-3.12: the wheel, its dependencies for that
#                                   Python, and try_wheel.py, for a machine without a checkout or an
#                                   index: python3 build/wheels-3.12/try_wheel.py build/wheels-3.12
# The variable WHEELS names the folder of the wheel; the default is build/wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly wheels=${WHEELS:-build/wheels}
readonly work=build/wheels-test
python=.venv/bin/python

bundle() { # PYTHON_VERSION
  local folder=build/wheels-$1 wheel
  wheel=$(echo "$wheels"/spillway_kv-*.whl)
  rm -rf "$folder"
  mkdir -p "$folder"
  cp "$wheels"/*.whl scripts/try_wheel.py "$folder"
  # What it needs, what the --help of the programs needs, and pip.
  local platforms=("$(sed 's/.*-none-\(.*\)\.whl$/\1/' <<<"$wheel")" manylinux_2_28_x86_64
    manylinux_2_17_x86_64 manylinux2014_x86_64)
  "$python" -m pip download --quiet --dest "$folder" --only-binary=:all: --implementation cp \
    --python-version "$1" "${platforms[@]/#/--platform=}" "$wheel" typer pip
  du -sh "$folder"
}

case "${1-}" in
  bundle)
    bundle "${2:-3.12}"
    exit
    ;;
  "") ;;
  *)
    echo "usage: $0 [bundle [PYTHON_VERSION]]" >&2
    exit 2
    ;;
esac

mkdir -p "$work"
# Pins torch to the build in the checkout's environment.
sed -n 's/^readonly torch=//p' scripts/venv.sh >"$work/constraint"
PIP_CONSTRAINT=$PWD/$work/constraint "$python" scripts/try_wheel.py "$wheels" --extras transformers lab ruler ray \
  --output "$work/here.json"
if ((EUID != 0)); then
  echo "wheels-test: for an empty Debian it takes root, which is left out" >&2
  exit
fi

if ! command -v mmdebstrap >/dev/null; then
  apt-get update --quiet=2
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends mmdebstrap
fi
if [[ ! -f $work/base.tar ]]; then
  echo "wheels-test: making an empty Debian"
  mmdebstrap --quiet --variant=minbase --include=python3 bookworm "$work/base.tmp.tar"
  mv "$work/base.tmp.tar" "$work/base.tar"
fi
bundle 3.11
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root"' EXIT
tar -C "$root" -xf "$work/base.tar"
cp -r build/wheels-3.11 "$root/wheels"
# The mounts and processes end with these namespaces.
unshare --mount --pid --fork --kill-child bash -euc '
  mount -t proc proc "$0/proc"
  mount --rbind /dev "$0/dev"
  exec chroot "$0" /usr/bin/env -i PATH=/usr/bin:/bin python3 /wheels/try_wheel.py /wheels --output /result.json
' "$root"
cp "$root/result.json" "$work/debian.json"
