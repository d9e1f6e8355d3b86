#!/usr/bin/env bash
# Runs programs with vLLM's CPU build: vllm.sh demo [OPTION...] serves the demo's
# model, vllm.sh test [PYTEST-ARGUMENT...] tests the plugin.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly what=${1:?demo or test}
shift
scripts/vllm-venv.sh
# The model comes from a package in the other environment.
PYTHONPATH=scripts .venv/bin/python -c \
  'from pathlib import Path; from demonstration import model; model.load(Path("build/models"))'
case $what in
  demo)
    exec .venv-vllm/bin/python scripts/vllm_demo.py "$@"
    ;;
  test)
    if [[ ! -f /usr/share/doc/debian-policy/policy.txt.gz ]]; then
      sudo=()
      ((EUID == 0)) || sudo=(sudo)
      "${sudo[@]}" apt-get install --yes --no-install-recommends debian-policy >/dev/null
    fi
    # Tests start and end engines, so each engine runs in its own process.
    exec .venv-vllm/bin/python -m pytest tests/vllm "$@"
    ;;
  *)
    echo "vllm.sh: demo or test, not $what" >&2
    exit 2
    ;;
esac
