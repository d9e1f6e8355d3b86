#!/usr/bin/env bash
# Tests the packages in build/package, or in the folder that is given:
# unpacks the archive, runs its daemon in a root that contains only glibc, and
# installs the Debian package in a throw-away copy of this system. This needs
# root. Without root it does what user namespaces allow, and prints what it
# left out.
set -euo pipefail

say() { echo "check_package: $*"; }
fail() {
  say "$*" >&2
  exit 1
}

if [[ "${1-}" != --inside ]]; then
  shopt -s nullglob
  folder=${1:-$(dirname "$0")/../build/package}
  archives=("$folder"/spillway-*.tar.gz)
  packages=("$folder"/spillway_*.deb)
  ((${#archives[@]} == 1 && ${#packages[@]} == 1)) ||
    fail "$folder has ${#archives[@]} archives and ${#packages[@]} Debian packages, not one of each"

  work=$(mktemp -d)
  clean() {
    # All mounts were in a namespace that has ended by now.
    if grep -qF " $work" /proc/self/mountinfo; then
      say "something is still mounted below $work, which is left as it is" >&2
    else
      rm -rf --one-file-system "$work"
    fi
  }
  trap clean EXIT

  # Mounts and processes of the check end with this namespace.
  namespace=(unshare --mount --mount-proc --pid --fork --kill-child)
  ((EUID == 0)) || namespace+=(--map-root-user)
  if ! "${namespace[@]}" true 2>/dev/null; then
    say "no namespaces here: this system's libraries are in reach of the programs"
    namespace=()
  fi
  "${namespace[@]}" "$0" --inside "$work" "$(realpath "${archives[0]}")" \
    "$(realpath "${packages[0]}")" "${#namespace[@]}" "$EUID"
  exit
fi

work=$2 archive=$3 package=$4 isolated=$5 user=$6
development=$(dirname "$package")/spillway-dev_${package##*/spillway_}
[[ -f "$development" ]] || fail "there is no $development beside the Debian package"
example=$(dirname "$(realpath "$0")")/../docs/examples/embedded
glibc='(ld-linux-x86-64|lib(c|m|dl|rt|pthread|resolv|util|anl|mvec))\.so'
runtime='lib(stdc\+\+|gcc_s)\.so'

# highest PREFIX FILES...: the highest version of a library that the files need,
# such as 2.34 for GLIBC.
highest() {
  local prefix=$1
  shift
  readelf --version-info --wide "$@" | grep -oE "Name: ${prefix}_[0-9.]+" | sed 's/.*_//' |
    sort -Vu | tail -1
}

# check_config CONFIG PRINTED DEFAULTS: the example file must name every setting
# and must not change defaults, and its commented-out lines must be the defaults.
check_config() {
  local config=$1 printed=$2 defaults=$3 keys=(grep -oE '^(# )?[a-z_]+ = ')
  diff <("${keys[@]}" "$config" | sed 's/^# //') <("${keys[@]}" "$defaults") ||
    fail "$config and --print-config name other settings"
  diff <(grep -vE '^(listen|socket_group|limit|folder) = ' "$printed") <(grep -vE '^(listen|socket_group|limit|folder) = ' "$defaults") ||
    fail "$config changes a default"
  diff <(sed 's/^# \([a-z_]* = \)/\1/' "$config" | grep -E '^[a-z_]+ = |^\[' | grep -vE '^(listen|socket_group|limit|folder) = ') \
    <(grep -vE '^(listen|socket_group|limit|folder) = |^$' "$defaults") || fail "$config misstates a default"
}

# serve ROOT SOCKET DAEMON TOOL CONFIG ALLOWED [WRAPPER...]: starts the daemon
# in ROOT, asks for its status, lets it attend, and stops it. The daemon may map
# only libraries that match ALLOWED.
serve() {
  local root=$1 socket=$2 daemon=$3 tool=$4 config=$5 allowed=$6
  shift 6
  local within=(env -i) output=$work/output pid status mapped
  [[ "$root" == / ]] || within+=("$(command -v chroot)" "$root")
  rm -f "$root/$socket"
  "${within[@]}" "$@" "$daemon" --config "$config" --listen "unix:$socket" --memory-limit 256MiB \
    >"$output" 2>&1 &
  pid=$!
  for ((i = 0; i < 300; ++i)); do
    [[ -S "$root/$socket" ]] && break
    kill -0 "$pid" 2>/dev/null || break
    sleep 0.1
  done
  if [[ ! -S "$root/$socket" ]]; then
    kill -KILL "$pid" 2>/dev/null || true
    cat "$output" >&2
    fail "$daemon does not serve"
  fi

  status=$("${within[@]}" "$tool" status --format json --target "unix:$socket") ||
    fail "$tool gets no answer"
  grep -q "\"version\": *\"$version\"" <<<"$status" || fail "the daemon is not $version: $status"
  "${within[@]}" "$tool" attend-bench --tokens 1024 --target "unix:$socket" >/dev/null ||
    fail "the daemon does not attend"

  # For a process in a chroot, this file has the paths outside of the chroot.
  mapped=$(awk '$6 ~ /\.so/ {print $6}' "/proc/$pid/maps" | sort -u)
  [[ -n "$mapped" ]] || fail "no libraries in /proc/$pid/maps"
  if grep -vE "$allowed" <<<"$mapped"; then
    fail "$daemon runs with the libraries above, which are not its own"
  fi

  kill -TERM "$pid"
  wait "$pid" || {
    status=$?
    cat "$output" >&2
    fail "$daemon exits with $status after SIGTERM"
  }
  [[ ! -e "$root/$socket" ]] || fail "$daemon leaves its socket"
}

# loads NAME [WRAPPER...]: fails unless libspillway can be loaded by this name.
loads() {
  "${@:2}" python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).spillway_interface() != 1)' \
    "$1" || fail "$1 does not load"
}

version=$(dpkg-deb --field "$package" Version)

say "archive: $(basename "$archive")"
name=$(basename "$archive" .tar.gz)
root=$work/root
home=/opt/anywhere/$name
mkdir -p "$root/opt/anywhere" "$root"/{run,tmp,proc,sys,dev}
tar -C "$root/opt/anywhere" -xf "$archive"
[[ "$(ls "$root/opt/anywhere")" == "$name" ]] || fail "the archive has more than the folder $name"
for file in bin/spillwayd bin/spillway etc/spillwayd.{toml,service} include/spillway.h lib/libspillway.so{,.1} \
  lib/cmake/spillway/spillway-config.cmake lib/pkgconfig/spillway.pc \
  share/spillway/proto/spillway/v1/attention_service.proto \
  share/man/man1/spillway.1.gz share/man/man8/spillwayd.8.gz \
  share/{bash-completion/completions/,zsh/site-functions/_}{spillway,spillwayd} \
  share/doc/spillway/{LICENSE,README}; do
  [[ -f "$root$home/$file" ]] || fail "the archive lacks $file"
done
[[ -z "$(find "$root$home" -xtype l)" ]] || fail "the archive has links to nowhere"
programs=("$root$home"/bin/*)
mapfile -t libraries < <(find "$root$home/lib" -maxdepth 1 -type f)
for file in "${programs[@]}"; do
  path=$(readelf --dynamic "$file" | grep -E '\((RPATH|RUNPATH)\)' || true)
  # First the archive's lib, last its lib/fallback, and only system folders between.
  grep -qE '\(RPATH\).*\[\$ORIGIN/\.\./lib(:(/usr)?/lib[^:]*)*:\$ORIGIN/\.\./lib/fallback\]$' \
    <<<"$path" || fail "$file looks for libraries by $path"
done
path=$(readelf --dynamic "$root$home/lib/libspillway.so.1" | grep -E '\((RPATH|RUNPATH)\)' || true)
grep -qE '\(RPATH\).*\[\$ORIGIN(:(/usr)?/lib[^:]*)*:\$ORIGIN/fallback\]$' <<<"$path" ||
  fail "libspillway looks for libraries by $path"
# If a library has a runpath, the loader ignores the programs' rpath for its dependencies.
for file in "${libraries[@]}" "$root$home"/lib/fallback/*; do
  [[ "$file" != */libspillway.so.1 ]] || continue
  ! readelf --dynamic "$file" | grep -E '\((RPATH|RUNPATH)\)' || fail "$file has a path of its own"
done
# libcuda comes with the driver: a daemon that links to it does not start on machines without one.
! readelf --dynamic "${programs[@]}" "${libraries[@]}" | grep -E 'NEEDED.*lib(cuda|cudart|nvidia)' ||
  fail "the archive needs the library above"
say "needs glibc $(highest GLIBC "${programs[@]}" "${libraries[@]}") and libstdc++" \
  "$(highest GLIBCXX "${programs[@]}" "${libraries[@]}"), or without one glibc" \
  "$(highest GLIBC "$root$home"/lib/fallback/*)"

system=/lib/x86_64-linux-gnu
for file in "${programs[@]}"; do
  outside=$(ldd "$file" | grep '=>' | grep -vF "=> $root$home/bin/../lib/" |
    grep -vE "^\s*($glibc|$runtime)" || true)
  [[ -z "$outside" ]] || fail "$(basename "$file") finds libraries outside the archive: $outside"
done
loads "$root$home/lib/libspillway.so.1"
"$root$home/bin/spillwayd" --config "$root$home/etc/spillwayd.toml" --print-config >"$work/printed"
"$root$home/bin/spillwayd" --print-config >"$work/defaults"
check_config "$root$home/etc/spillwayd.toml" "$work/printed" "$work/defaults"

if ((isolated)); then
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mkdir -p "$root$system" "$root/lib64"
  for file in libc.so.6 libm.so.6 libpthread.so.0 libdl.so.2 librt.so.1 libresolv.so.2; do
    cp -L "$system/$file" "$root$system/"
  done
  cp -L /lib64/ld-linux-x86-64.so.2 "$root/lib64/"
  own="^$root($home/lib/|.*/$glibc)"
  serve "$root" /run/spillwayd.sock "$home/bin/spillwayd" "$home/bin/spillway" \
    "$home/etc/spillwayd.toml" "$own"
  say "archive: serves where there is glibc alone"
  cp -L "$system"/{libstdc++.so.6,libgcc_s.so.1} "$root$system/"
  serve "$root" /run/spillwayd.sock "$home/bin/spillwayd" "$home/bin/spillway" \
    "$home/etc/spillwayd.toml" "^$root($home/lib/[^/]*$|.*/($glibc|$runtime))"
  say "archive: serves with the system's C++ runtime"
else
  # This system's libraries are in reach, but serve still checks which ones the daemon maps.
  serve / "$work/socket/spillwayd.sock" "$root$home/bin/spillwayd" "$root$home/bin/spillway" \
    "$root$home/etc/spillwayd.toml" "^$root$home/lib/|/($glibc|$runtime)|/(libcuda|libnvidia-)"
  say "archive: serves with libraries of its own"
fi

say "Debian package: $(basename "$package")"
dpkg-deb --info "$package" >"$work/info"
expected="/etc/spillway/spillwayd.toml
/lib/systemd/system/spillwayd.service
/usr/bin/spillway
/usr/bin/spillwayd
/usr/lib/x86_64-linux-gnu/libspillway.so.1
/usr/share/bash-completion/completions/spillway
/usr/share/bash-completion/completions/spillwayd
/usr/share/doc/spillway/LICENSE
/usr/share/doc/spillway/copyright
/usr/share/doc/spillway/licenses/libboost1.74-dev
/usr/share/doc/spillway/licenses/libcli11-dev
/usr/share/doc/spillway/licenses/libtoml11-dev
/usr/share/doc/spillway/licenses/libxxhash-dev
/usr/share/doc/spillway/licenses/nlohmann-json3-dev
/usr/share/man/man1/spillway.1.gz
/usr/share/man/man8/spillwayd.8.gz
/usr/share/zsh/vendor-completions/_spillway
/usr/share/zsh/vendor-completions/_spillwayd"
contents=$(dpkg-deb --contents "$package" | awk '$1 ~ /^-/ && $2 == "root/root" {print substr($6, 2)}')
diff <(echo "$expected") <(LC_ALL=C sort <<<"$contents") || fail "the package's files differ"
depends=$(dpkg-deb --field "$package" Depends)
for library in libc6 libgrpc++ libprotobuf libsystemd0 libtbb12 libhwloc15 adduser; do
  [[ ", $depends" == *", $library"* ]] || fail "the package does not depend on $library: $depends"
done
[[ "$(dpkg-deb --ctrl-tarfile "$package" | tar -xO ./conffiles)" == /etc/spillway/spillwayd.toml ]] ||
  fail "the package's settings are no conffile"
dpkg-deb --extract "$package" "$work/extracted"
for file in "$work"/extracted/usr/bin/* "$work"/extracted/usr/lib/*/libspillway.so.1; do
  ! readelf --dynamic "$file" | grep -E '\((RPATH|RUNPATH)\)' || fail "$file has an rpath"
  ! ldd "$file" | grep 'not found' || fail "$file lacks the library above"
done
[[ "$(dpkg-deb --field "$development" Depends)" == "spillway (= $version)" ]] ||
  fail "spillway-dev is not for this spillway alone"
dpkg-deb --extract "$development" "$work/development"
for file in include/spillway.h lib/x86_64-linux-gnu/{libspillway.so,pkgconfig/spillway.pc} \
  lib/x86_64-linux-gnu/cmake/spillway/spillway-config{,-version}.cmake \
  share/spillway/proto/spillway/v1/attention_service.proto; do
  [[ -e "$work/development/usr/$file" || -L "$work/development/usr/$file" ]] ||
    fail "spillway-dev lacks $file"
  [[ ! -e "$work/extracted/usr/$file" ]] || fail "$file is in both packages"
done
[[ "$(dpkg-deb --ctrl-tarfile "$development" | tar -t | sort | xargs)" == "./control ./md5sums" ]] ||
  fail "spillway-dev runs scripts"
config=$work/extracted/etc/spillway/spillwayd.toml
"$work/extracted/usr/bin/spillwayd" --config "$config" --print-config >"$work/printed"
check_config "$config" "$work/printed" "$work/defaults"

# This system's root, with an overlay for everything that dpkg writes.
layered=0
if ((isolated && user == 0)); then
  mkdir -p "$work"/{layer,merged}
  mount -t tmpfs -o mode=0755 tmpfs "$work/layer"
  mkdir -p "$work"/layer/{upper,work}
  if mount -t overlay overlay "$work/merged" \
    -o "lowerdir=/,upperdir=$work/layer/upper,workdir=$work/layer/work" 2>/dev/null; then
    layered=1
  fi
fi
if ((layered)); then
  root=$work/merged
  mount -t proc proc "$root/proc"
  mount --rbind /sys "$root/sys"
  mount --rbind /dev "$root/dev"
  mount -t tmpfs tmpfs "$root/run"
  cp "$package" "$root/run/spillway.deb"
  inside() { chroot "$root" "$@"; }
  # If this machine has the package installed, remove it first from the copy.
  inside dpkg --purge spillway >/dev/null 2>&1 || true
  inside dpkg --install /run/spillway.deb >"$work/output" 2>&1 || {
    cat "$work/output" >&2
    fail "dpkg does not install the package"
  }
  loads libspillway.so.1 inside
  cp "$development" "$root/run/spillway-dev.deb"
  inside dpkg --install /run/spillway-dev.deb >"$work/output" 2>&1 || {
    cat "$work/output" >&2
    fail "dpkg does not install spillway-dev"
  }
  # The commands in the example's README: the build with CMake and the one with pkg-config.
  cp -r "$example" "$root/run/embedded"
  sed -n '/^```sh$/,/^```$/{/^```/!p}' "$example/README.md" >"$root/run/commands"
  inside bash -euc 'cd /run/embedded; . /run/commands' >"$work/output" 2>&1 || {
    cat "$work/output" >&2
    fail "the example does not build against spillway-dev"
  }
  (($(grep -c '^attended to' "$work/output") == 2)) || fail "the example does not run"
  inside dpkg --remove spillway-dev >/dev/null 2>&1 || fail "dpkg does not remove spillway-dev"
  say "Debian package: spillway-dev builds the example by CMake and by pkg-config"
  # As with the systemd unit: a user of its own, and a folder that its group may enter.
  inside install -d -o spillway -g spillway -m 0750 /run/spillway
  serve "$root" /run/spillway/spillwayd.sock /usr/bin/spillwayd /usr/bin/spillway \
    /etc/spillway/spillwayd.toml "" /usr/bin/setpriv --reuid=spillway --regid=spillway --clear-groups
  if command -v systemd-analyze >/dev/null; then
    inside systemd-analyze verify /lib/systemd/system/spillwayd.service >"$work/output" 2>&1 || true
    ! grep spillwayd "$work/output" || fail "systemd objects to the unit as above"
  fi
  [[ ! -e "$root/etc/systemd/system/multi-user.target.wants/spillwayd.service" ]] ||
    fail "the package enables its service"
  echo "# mine" >>"$root/etc/spillway/spillwayd.toml"
  inside dpkg --install /run/spillway.deb >/dev/null 2>&1 || fail "dpkg does not install it again"
  inside dpkg --remove spillway >/dev/null 2>&1 || fail "dpkg does not remove the package"
  grep -q "# mine" "$root/etc/spillway/spillwayd.toml" || fail "changed settings are lost"
  inside dpkg --purge spillway >/dev/null 2>&1 || fail "dpkg does not purge the package"
  [[ ! -e "$root/etc/spillway" && ! -e "$root/usr/bin/spillwayd" ]] || fail "a purge leaves files"
  say "Debian package: installs, serves as its own user, and goes"
else
  say "Debian package: unpacked only; root on a system with overlay mounts would install it"
fi
