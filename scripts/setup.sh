#!/usr/bin/env bash
# Installs every system package that building and testing need, from Debian's
# archive, and with "tidy" also those that `make tidy` needs. Works for root and
# for a user with sudo. If all packages are installed already, it only queries
# dpkg and changes nothing.
set -euo pipefail

packages=(
  # Build.
  ca-certificates ccache cmake g++ make ninja-build pkg-config
  protobuf-compiler protobuf-compiler-grpc
  # Libraries.
  libabsl-dev libboost1.74-dev libcli11-dev libgrpc++-dev libhwloc-dev libhwy-dev
  libmimalloc-dev libprotobuf-dev libspdlog-dev libssl-dev libsystemd-dev libtbb-dev
  libtoml11-dev libxxhash-dev nlohmann-json3-dev prometheus-cpp-dev
  # An example, tests and benchmarks.
  libeigen3-dev libbenchmark-dev libgmock-dev libgtest-dev
  # Packages.
  dpkg-dev file
  # Lint, and the Python client's virtual environment.
  clang-format git python3 python3-venv
)

case "${1:-}" in
  "") ;;
  tidy) packages+=(clang clang-tidy) ;;
  *)
    echo "usage: $0 [tidy]" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "setup: this script installs Debian packages and found no dpkg and apt-get;" >&2
  echo "setup: install the equivalents of: ${packages[*]}" >&2
  exit 1
fi

installed() {
  [[ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" == installed ]]
}

missing=()
for package in "${packages[@]}"; do
  installed "$package" || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  exit 0
fi
echo "setup: installing ${missing[*]}"

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "setup: ${#missing[@]} packages are missing; run as root or install sudo" >&2
    exit 1
  fi
  # sudo drops the environment, so the front end is named on its command line.
  as_root=(sudo env DEBIAN_FRONTEND=noninteractive)
fi
export DEBIAN_FRONTEND=noninteractive

apt_install() {
  "${as_root[@]}" apt-get install -y --no-install-recommends -o Dpkg::Use-Pty=0 "${missing[@]}"
}

# The package lists may be absent or too old to name files that still exist.
if ! apt-get install -s --no-install-recommends "${missing[@]}" >/dev/null 2>&1 || ! apt_install; then
  "${as_root[@]}" apt-get update
  apt_install
fi
