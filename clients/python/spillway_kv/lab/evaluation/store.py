"""Stores finished parts on disk, so that an interrupted evaluation can continue."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


def digest(parameters: Any) -> str:
    """Returns a short hash of parameters. Equal parameters have the same hash."""
    text = json.dumps(parameters, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """Arrays, with the parameters from which they were computed as keys."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, parameters: Mapping[str, Any]) -> Path:
        return self._folder / f"{digest(parameters)}.npz"

    def has(self, parameters: Mapping[str, Any]) -> bool:
        """Whether arrays with these parameters are stored."""
        return self._path(parameters).exists()

    def get(self, parameters: Mapping[str, Any]) -> Arrays:
        """Returns the arrays with these parameters."""
        with np.load(self._path(parameters)) as file:
            return {name: file[name] for name in file.files}

    def put(self, parameters: Mapping[str, Any], arrays: Arrays) -> None:
        """Stores arrays. If interrupted, none of them is stored."""
        path = self._path(parameters)
        part = path.with_suffix(".part.npz")
        np.savez_compressed(part, **arrays)  # type: ignore[arg-type]
        part.replace(path)
