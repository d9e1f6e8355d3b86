"""Names that have changed between versions of transformers."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version

_NAME = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def cache_argument(cache: Any) -> dict[str, Any]:
    """A cache as the argument of a model or of `generate`, by the name that it has there.

    `cache` from transformers 5.24 on, `past_key_values` before, which later versions
    still take with a warning: `model(ids, **cache_argument(cache))`.
    """
    return {_NAME: cache}
