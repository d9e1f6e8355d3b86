"""Stands for the backend in a vLLM of another version, which loads this if it is chosen."""

from vllm.version import __version__

from spillway_kv.vllm import VLLM_MINOR

raise ImportError(
    f"--attention-backend CUSTOM: Spillway's backend is for vLLM {VLLM_MINOR}, and this is vLLM "
    f"{__version__}"
)
