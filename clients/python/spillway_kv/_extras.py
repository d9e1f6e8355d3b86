"""Names the extra of this package whose contents are not installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needs(extra: str, what: str) -> Iterator[None]:
    """Runs imports that need an extra.

    Args:
        extra: The extra.
        what: What needs it, for the error.

    Raises:
        ModuleNotFoundError: A package is missing. The message names the extra.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "spillway_kv"):
            raise
        raise ModuleNotFoundError(
            f"{what} needs {package}, which is not installed: pip install 'spillway-kv[{extra}]'",
            name=error.name,
        ) from error
