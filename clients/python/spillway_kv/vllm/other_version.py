"""Stands for the backend in a vLLM of another version, which loads this if it is chosen."""

from vllm.version import __version__

from spillway_kv.vllm import VLLM_MINORS

raise ImportError(
    f"--attention-backend CUSTOM: Spillway's backend is for vLLM {' and '.join(VLLM_MINORS)}, and "
    f"this is vLLM {__version__}"
)
