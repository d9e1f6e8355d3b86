"""Spillway in vLLM: K/V in host memory for contexts that do not fit the GPU.

After installation, vLLM has another attention backend: `vllm serve MODEL --attention-backend
CUSTOM`. Without this option, vLLM works as without the plugin. Settings are environment variables,
see `spillway_kv.vllm.settings`.
"""

from __future__ import annotations

import logging

# The vLLM interfaces that this package uses change between minor versions.
VLLM_MINOR = "0.32"

_logger = logging.getLogger("vllm.spillway")


def register() -> None:
    """Registers the backend. vLLM calls this in each of its processes."""
    from vllm.version import __version__  # noqa: PLC0415

    if not f"{__version__}.".startswith(f"{VLLM_MINOR}."):
        _logger.warning(
            "spillway-vllm is for vLLM %s and this is %s: the backend CUSTOM is not registered",
            VLLM_MINOR,
            __version__,
        )
        return
    from spillway_kv.vllm.hooks import install  # noqa: PLC0415

    install()
