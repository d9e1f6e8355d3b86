#!/usr/bin/env bash
# Tests the vLLM plugin with vLLM's CUDA build, on the GPUs of this machine:
#   vllm.sh [PYTEST-ARGUMENT...]
# These are the tests of `make vllm-test`: schedules, events, refusals, drafts and
# clients over HTTP, each compared with stock vLLM. Random models run in float32,
# and stock vLLM has its Triton attention for them. The trained model runs in
# bfloat16, with FlashAttention, and so does a random Gemma 3. Tests of tensor
# parallelism need two GPUs. With pytest-xdist, `-n 4` runs four at a time; each
# has engines of 1 GiB for K/V beside the model and CUDA's own memory.
#   VLLM_PYTHON          a Python with vLLM, the wheel of spillway_kv, pytest and
#                        hypothesis; by default python3
#   SPILLWAYD            the daemon; by default that of build/release
#   SPILLWAY_TEST_MODEL  folder of a trained model; by default
#                        build/models/SmolLM2-135M-Instruct
set -euo pipefail
cd "$(dirname "$0")/../.."

python=${VLLM_PYTHON:-python3}
"$python" - <<'CHECK'
import sys
from importlib.metadata import PackageNotFoundError, version
import torch
for name in ("vllm", "spillway_kv", "pytest", "hypothesis"):
    try:
        version(name)
    except PackageNotFoundError:
        sys.exit(f"vllm.sh: {sys.executable} has no {name}")
if not torch.cuda.is_available():
    sys.exit("vllm.sh: torch finds no GPU")
CHECK
SPILLWAY_TEST_DEVICE=cuda exec "$python" -m pytest -c tests/vllm/pytest.ini tests/vllm "$@"
