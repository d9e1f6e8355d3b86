"""Learned sink logits of a model, as plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING, Any, Union

import numpy as np
import numpy.typing as npt

from spillway_kv.tensors import is_torch

if TYPE_CHECKING:
    import torch

SinkLogits = Union[
    "npt.NDArray[Any]", "torch.Tensor", SequenceABC["SequenceABC[float] | torch.Tensor"]
]


def sink_rows(
    logits: SinkLogits | None, layer_count: int, query_head_count: int
) -> tuple[tuple[float, ...], ...]:
    """Returns sink logits [layer_count, query_head_count], rounded to float32. None gives ().

    Args:
        logits: An array, a tensor of any float dtype on any device, or one row for each layer.
        layer_count: Layers of the model.
        query_head_count: Query heads per layer.

    Raises:
        ValueError: They have another shape.
    """
    if logits is None:
        return ()
    rows = logits if is_torch(logits) else [_plain(row) for row in logits]
    # The engine refuses what float32 does not hold: it becomes infinite.
    with np.errstate(over="ignore"):
        array = np.asarray(_plain(rows), dtype=np.float32)
    if array.size == 0:
        return ()
    if array.shape != (layer_count, query_head_count):
        raise ValueError(
            f"sink_logits has shape {list(array.shape)}, not [layer_count, query_head_count] = "
            f"{[layer_count, query_head_count]}"
        )
    return tuple(map(tuple, array.tolist()))


def filled(sinks: SequenceABC[torch.Tensor | None]) -> list[torch.Tensor] | None:
    """Returns a row for each layer, with -inf for layers without sinks. None: no layer has sinks.

    Args:
        sinks: The sinks of each layer [H_q]. None: it has none.
    """
    first = next((row for row in sinks if row is not None), None)
    if first is None:
        return None
    without = first.new_full(first.shape, -math.inf)
    return [without if row is None else row for row in sinks]


def _plain(values: Any) -> Any:
    return values.detach().float().cpu().numpy() if is_torch(values) else values
