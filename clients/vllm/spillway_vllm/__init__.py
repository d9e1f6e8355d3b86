"""Spillway in vLLM: K/V in host memory for contexts that do not fit the GPU.

Installed, it adds an attention backend: `vllm serve MODEL --attention-backend CUSTOM`.
Without that option vLLM is as it is without the plugin. Settings are environment
variables, `spillway_vllm.settings`.
"""

from __future__ import annotations

import logging

# The interfaces of vLLM that this stands on move between minor versions.
VLLM_MINOR = "0.32"

_logger = logging.getLogger("vllm.spillway")


def register() -> None:
    """Makes the backend known; vLLM calls it in each of its processes."""
    from vllm.version import __version__  # noqa: PLC0415

    if not f"{__version__}.".startswith(f"{VLLM_MINOR}."):
        _logger.warning(
            "spillway-vllm is for vLLM %s and this is %s: the backend CUSTOM is not registered",
            VLLM_MINOR,
            __version__,
        )
        return
    from spillway_vllm.hooks import install  # noqa: PLC0415

    install()
