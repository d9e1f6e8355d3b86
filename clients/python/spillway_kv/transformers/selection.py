"""A change of a cache's rows that is ready, so that it is done completely or not at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spillway_kv.transformers.rows import Row
from spillway_kv.transformers.sliding import Held
from spillway_kv.transformers.states import HeldState
from spillway_kv.transformers.texts import Texts


@dataclass(frozen=True)
class Selection:
    """What a cache holds after `batch_select_indices` and the like.

    Attributes:
        rows: The rows.
        dropped: Rows that are not used any more.
        held: Contents of the layers with a sliding window.
        states: States of the layers that have one.
        texts: Tokens and turns.
    """

    rows: list[Row]
    dropped: list[Row]
    held: list[Held]
    states: list[HeldState]
    texts: Texts


def row_numbers(indices: torch.Tensor, row_count: int) -> list[int]:
    """Returns the rows that indices (numbers [n], or a mask [B]) select, each in [0, row_count).

    Args:
        indices: Negative numbers count from the last row.
        row_count: Number of rows B.

    Raises:
        IndexError: A row does not exist, or the mask has another size.
        ValueError: No row is selected.
    """
    if indices.dtype == torch.bool:
        if indices.shape != (row_count,):
            raise IndexError(
                f"the mask has shape {list(indices.shape)}, and the cache holds {row_count} rows"
            )
        indices = indices.nonzero().flatten()
    rows = indices.tolist()
    for row in rows:
        if not -row_count <= row < row_count:
            raise IndexError(f"there is no row {row}: the cache holds {row_count} rows")
    if not rows:
        raise ValueError("no row is selected; cache.reset() removes all rows")
    return [row % row_count for row in rows]
