"""Names that have changed between versions of transformers."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version

_NAME = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


def cache_argument(cache: Any) -> dict[str, Any]:
    """Returns a cache as keyword argument of a model or of `generate`.

    The name is `cache` from transformers 5.24 on, and `past_key_values` before. Later versions
    still accept the old name with a warning: `model(ids, **cache_argument(cache))`.
    """
    return {_NAME: cache}
