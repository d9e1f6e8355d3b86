"""Python client of Spillway, and what runs models with it.

`connect()` returns a `Client`. `spillway_kv.transformers` runs Hugging Face models,
`spillway_kv.vllm` is a plugin for vLLM, `spillway_kv.cluster` a client of several daemons, and
`spillway_kv.lab` has research tools. What they need beside this package are its extras
`transformers`, `vllm`, `ray` and `lab`.
"""

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spillway_kv._exports import *  # noqa: F403
    from spillway_kv._exports import __all__ as __all__

__version__: str

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Loads a module, or the names of the client, when they are used.

        vLLM imports this package at each start, also if another backend is chosen.
        """
        if name == "__version__":
            # Sources that are not installed have none.
            return metadata.version("spillway-kv")
        if name != "__all__":
            if name.startswith("__"):
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            module = f"{__name__}.{name}"
            try:
                return import_module(module)
            except ModuleNotFoundError as error:
                if error.name != module:
                    raise
        exports = import_module("spillway_kv._exports")
        globals().update({each: getattr(exports, each) for each in exports.__all__})
        globals()["__all__"] = exports.__all__
        if name in globals():
            return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
