"""What pictures show, as a digest: their data and texts, without their pixels."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from spillway_kv.lab.evaluation import style


@contextlib.contextmanager
def observed(draw: bool) -> Iterator[dict[Path, str]]:
    """Collects the digest of every picture that is saved inside, by its path.

    Args:
        draw: If not, no picture is written, which is much faster.
    """
    found: dict[Path, str] = {}
    save, savefig = style.save, Figure.savefig

    def save_with_caption(figure: Figure, told: dict[str, Any], path: Path) -> Path:
        found[path.resolve()] = shown(figure)
        return save(figure, told, path) if draw else path

    def save_figure(figure: Figure, path: Any, *arguments: Any, **options: Any) -> None:
        if not isinstance(path, io.IOBase):
            found[Path(path).resolve()] = shown(figure)
        if draw:
            savefig(figure, path, *arguments, **options)

    style.save = save_with_caption
    Figure.savefig = save_figure  # type: ignore[assignment, method-assign]
    try:
        yield found
    finally:
        style.save = save
        Figure.savefig = savefig  # type: ignore[method-assign]


def shown(figure: Figure) -> str:
    """A digest of all data, to four digits, and all texts of a figure."""
    parts: list[str] = []
    for artist in _all(figure):
        if isinstance(artist, Text):
            parts.append(artist.get_text())
        elif isinstance(artist, Line2D):
            parts += _numbers(artist.get_xydata())
        elif isinstance(artist, Patch):
            # In the patch's own coordinates: of bars, those of the data.
            parts += _numbers(artist.get_path().transformed(artist.get_patch_transform()).vertices)
        elif isinstance(artist, Collection):
            for path in artist.get_paths():
                parts += _numbers(path.vertices)
            parts += _numbers(artist.get_offsets())
        elif hasattr(artist, "get_array") and (values := artist.get_array()) is not None:
            parts += _numbers(values)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _all(figure: Figure) -> Iterator[Artist]:
    """The texts of the figure, and what was drawn in its axes: not ticks and frames."""
    yield from figure.texts
    if figure.get_suptitle():
        yield Text(text=figure.get_suptitle())
    for axes in figure.axes:
        for text in (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()):
            yield Text(text=text)
        for group in (axes.lines, axes.patches, axes.collections, axes.images, axes.texts):
            yield from group


def _numbers(values: Any) -> list[str]:
    flat = np.ma.filled(np.ma.asarray(values, dtype=np.float64), np.nan).ravel()
    return [f"{value:.4g}" for value in flat]
