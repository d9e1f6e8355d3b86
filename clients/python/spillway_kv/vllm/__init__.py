"""Spillway in vLLM: K/V in host memory for contexts that do not fit the GPU.

After installation, vLLM has another attention backend: `vllm serve MODEL --attention-backend
CUSTOM`. Without this option, vLLM works as without the plugin. Settings are environment variables,
see `spillway_kv.vllm.settings`.
"""

from __future__ import annotations

# The vLLM interfaces that this package uses change between minor versions. Those that it uses are
# the same in these (tests/python/vllm_contracts).
VLLM_MINORS = ("0.32", "0.33")


def register() -> None:
    """Names the backend CUSTOM. vLLM calls this in each of its processes.

    Loads two small modules. The others are loaded if the backend is chosen. With another minor
    version of vLLM, choosing it is an error that names the versions.
    """
    from vllm.version import __version__  # noqa: PLC0415

    if f"{__version__}.".startswith(tuple(f"{minor}." for minor in VLLM_MINORS)):
        from spillway_kv.vllm.hooks import install  # noqa: PLC0415

        install()
        return
    try:
        from vllm.v1.attention.backends.registry import (  # noqa: PLC0415
            AttentionBackendEnum,
            register_backend,
        )
    except ImportError:
        # So old that it has no backend of this name.
        return
    register_backend(AttentionBackendEnum.CUSTOM, "spillway_kv.vllm.other_version.SpillwayBackend")
