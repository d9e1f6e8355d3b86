"""Queries, keys and values of a model for a segment of text, stored on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spillway_kv.lab.training.traces import attention_seen

# Number of consecutive queries at the end, to compare neighbouring steps.
RUN_LENGTH = 32
# Number of queries from a segment's last eighth that are stored.
GRID_SIZE = 256
_META = "recording.json"


@dataclass(frozen=True)
class Layer:
    """The data of one layer, after the positional encoding.

    Attributes:
        keys: bfloat16 [H_kv, n, d].
        values: bfloat16, same shape.
        queries: float32 [P, H_q, d], at the recording's positions.
    """

    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor


@dataclass(frozen=True)
class Recording:
    """A segment, with the inputs of the model's dense attention.

    Attributes:
        folder: Folder of the files.
        name: Short hash of what it was made from.
        layer_count: Transformer layers.
        tokens: Token ids [n].
        positions: Positions of the stored queries, ascending.
        grid: Those of these positions that are evenly spaced, ascending.
        scaling: Factor on q.k.
    """

    folder: Path
    name: str
    layer_count: int
    tokens: torch.Tensor
    positions: tuple[int, ...]
    grid: tuple[int, ...]
    scaling: float

    def spread(self, count: int) -> tuple[int, ...]:
        """Returns `count` of the grid's positions, including the last."""
        chosen = np.linspace(len(self.grid) - 1, 0, min(count, len(self.grid))).round()
        return tuple(self.grid[int(i)] for i in reversed(chosen))

    @property
    def run(self) -> tuple[int, ...]:
        """The consecutive positions at the end of the segment."""
        return self.positions[-RUN_LENGTH:]

    def layer(self, index: int) -> Layer:
        """Reads a layer."""
        return Layer(**load_file(_path(self.folder, index)))

    def queries(self, index: int) -> torch.Tensor:
        """Reads only the queries of a layer."""
        with safe_open(_path(self.folder, index), framework="pt") as file:
            queries = file.get_tensor("queries")
            assert isinstance(queries, torch.Tensor)
            return queries


def grid_of(token_count: int) -> tuple[int, ...]:
    """Returns evenly spaced positions in the last eighth, including that of the last token."""
    last = token_count // 8
    step = max(1, last // GRID_SIZE)
    return tuple(range(token_count - 1, token_count - 1 - last, -step))[:GRID_SIZE][::-1]


def record(
    load: Callable[[], Any],
    tokens: torch.Tensor,
    grid: Sequence[int],
    folder: Path,
    name: str,
) -> Recording:
    """Returns the recording in a folder. If there is none, lets the model read the tokens.

    Args:
        load: Loads the model. Called only if needed.
        tokens: Token ids [n].
        grid: Positions whose queries are stored, besides those of the last tokens.
        folder: Folder of all recordings.
        name: Name of this one. Equal for equal models, tokens and positions.
    """
    folder = folder / name
    meta = folder / _META
    first = max(0, len(tokens) - RUN_LENGTH)
    positions = tuple(sorted({*grid, *range(first, len(tokens))}))
    if not meta.exists():
        folder.mkdir(parents=True, exist_ok=True)
        told = _read(load(), tokens, positions, folder)
        part = meta.with_suffix(".part")
        part.write_text(json.dumps(told) + "\n")
        part.replace(meta)
    told = json.loads(meta.read_text())
    return Recording(
        folder=folder,
        name=name,
        layer_count=told["layer_count"],
        tokens=tokens,
        positions=positions,
        grid=tuple(grid),
        scaling=told["scaling"],
    )


def read_densely(
    model: Any, tokens: torch.Tensor, see: Callable[[int, Any, Any, Any, float], None]
) -> None:
    """Lets the model read tokens [n]. Calls `see` with the inputs of each layer's attention."""
    with torch.inference_mode(), attention_seen(model, see):
        model.base_model(input_ids=tokens[None].to(model.device), use_cache=False)


def _read(
    model: Any, tokens: torch.Tensor, positions: Sequence[int], folder: Path
) -> dict[str, Any]:
    scales: set[float] = set()
    kept = torch.tensor(positions, device="cpu")

    def see(layer: int, query: Any, key: Any, value: Any, scaling: float) -> None:
        scales.add(float(scaling))
        queries = query[0][:, kept.to(query.device)].transpose(0, 1)
        save_file(
            {
                "keys": key[0].to("cpu", torch.bfloat16).contiguous(),
                "values": value[0].to("cpu", torch.bfloat16).contiguous(),
                "queries": queries.to("cpu", torch.float32).contiguous(),
            },
            _path(folder, layer),
        )

    read_densely(model, tokens, see)
    (scaling,) = scales
    return {"layer_count": model.config.num_hidden_layers, "scaling": scaling}


def _path(folder: Path, layer: int) -> Path:
    return folder / f"layer_{layer:03d}.safetensors"
