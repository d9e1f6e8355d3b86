#!/usr/bin/env bash
# Tests of the plugin in vLLM's CPU build: vllm-test.sh [PYTEST-ARGUMENTS].
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/vllm-venv.sh
if [[ ! -f /usr/share/doc/debian-policy/policy.txt.gz ]]; then
  sudo=()
  ((EUID == 0)) || sudo=(sudo)
  "${sudo[@]}" apt-get install --yes --no-install-recommends debian-policy >/dev/null
fi
# The model comes out of a package of the other environment.
PYTHONPATH=scripts .venv/bin/python -c \
  'from pathlib import Path; from demonstration import model; model.load(Path("build/models"))'
exec .venv-vllm/bin/python -m pytest tests/vllm "$@"
