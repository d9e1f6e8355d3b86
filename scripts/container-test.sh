#!/usr/bin/env bash
# Builds the image of cmake/packaging/Containerfile with the package of build/release, and tests it
# (tests/container). With "full" also tests an image that compiles the package itself. All images
# are in build/container. Their base is made from Debian's archive, so no image registry is needed.
# Needs root. Installs podman and mmdebstrap if they are missing.
set -euo pipefail
cd "$(dirname "$0")/.."

case "${1:-}" in
  "") package=made ;;
  full) package=built ;;
  *)
    echo "usage: $0 [full]" >&2
    exit 2
    ;;
esac
if ((EUID != 0)); then
  echo "container-test: needs root, for the base image's files have owners" >&2
  exit 1
fi

missing=()
for name in podman runc mmdebstrap; do
  command -v "$name" >/dev/null || missing+=("$name")
done
if ((${#missing[@]})); then
  echo "container-test: installing ${missing[*]}"
  apt-get update --quiet=2
  DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 --no-install-recommends "${missing[@]}"
fi

mkdir -p build/container
if [[ $package == made ]]; then
  rm -f build/package/spillway*.deb
  cpack -G DEB --config build/release/CPackConfig.cmake -B "$PWD/build/package" >build/container/cpack.log
  rm -rf build/package/_CPack_Packages
fi
# Leaves out what Debian's slim images leave out.
base=build/container/base.tar
if [[ ! -f $base ]]; then
  echo "container-test: making an empty Debian"
  mmdebstrap --quiet --variant=minbase --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    bookworm "$base.tmp.tar"
  mv "$base.tmp.tar" "$base"
fi
# Podman may leave its storage mounted, and then `make clean` cannot remove it.
unmount() {
  if mountpoint --quiet build/container/store/overlay; then
    umount build/container/store/overlay
  fi
}
trap unmount EXIT
SPILLWAY_IMAGE_PACKAGE=$package .venv/bin/python -m pytest tests/container
