#!/usr/bin/env bash
# A small evaluation: eval-small.sh OUTPUT [MODEL [TEXT]]. The defaults are the
# demo's model and Debian's policy manual.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly python=.venv/bin/python
readonly output=$1
model=${2:-}
text=${3:-}

if [[ -z $model ]]; then
  model=build/models/SmolLM2-135M-Instruct
  PYTHONPATH=scripts "$python" -c \
    'from pathlib import Path; from demonstration import model; model.load(Path("build/models"))'
fi
if [[ -z $text ]]; then
  text=/usr/share/doc/debian-policy/policy.txt.gz
  if [[ ! -f $text ]]; then
    sudo=()
    ((EUID == 0)) || sudo=(sudo)
    "${sudo[@]}" apt-get install --yes --no-install-recommends debian-policy >/dev/null
  fi
fi

mkdir -p "$output"
# The model is on this machine, so the hub is not needed.
HF_HUB_OFFLINE=1 "$python" -m spillway_kv.lab.cli eval all "$model" "$text" --output "$output" \
  --preset small --queries 16
