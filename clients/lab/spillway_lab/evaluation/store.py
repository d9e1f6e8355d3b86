"""What is finished, kept on disk, so that an interrupted evaluation goes on."""

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
    """A short name of parameters, the same for equal ones."""
    text = json.dumps(parameters, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Store:
    """Arrays by the parameters that they were made with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def _path(self, parameters: Mapping[str, Any]) -> Path:
        return self._folder / f"{digest(parameters)}.npz"

    def has(self, parameters: Mapping[str, Any]) -> bool:
        """Whether they were made."""
        return self._path(parameters).exists()

    def get(self, parameters: Mapping[str, Any]) -> Arrays:
        """What was made with these parameters."""
        with np.load(self._path(parameters)) as file:
            return {name: file[name] for name in file.files}

    def put(self, parameters: Mapping[str, Any], arrays: Arrays) -> None:
        """Keeps arrays; all of them or, when interrupted, none."""
        path = self._path(parameters)
        part = path.with_suffix(".part.npz")
        np.savez_compressed(part, **arrays)  # type: ignore[arg-type]
        part.replace(path)
