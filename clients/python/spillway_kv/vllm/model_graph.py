"""A step of vLLM's model in one CUDA graph. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from spillway_kv.batch import HeadShapes
from spillway_kv.step_graph import StepGraph


@dataclass(frozen=True)
class OpenLayer:
    """An attend that the graph leaves open. Its tensors live as long as the graph.

    Attributes:
        layer: Index among the engine's layers.
        q: Queries [N, H_q, d].
        k: Keys [N, H_kv, d].
        v: Values, with the same shape.
        out: Written, [N, H_q, d].
    """

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


class ModelGraph:
    """A decode step of the model for up to N requests, captured with its attends left open.

    For one thread.

    Attributes:
        step: The graph.
        layers: Its attends, in order.
        finite: Whether the outputs of the last layer are finite, [N], when the graph has run.
        failed: Whether a decoder could not run it. It is then run in pieces.

    Args:
        model: Shapes of its heads.
        last_layer: Index of the model's last layer.
        without_owner: Returns the same tensor, but does not keep its memory. The graph's memory is
            kept by the graph, and its tensors share it.
    """

    def __init__(
        self,
        model: HeadShapes,
        last_layer: int,
        without_owner: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.step = StepGraph(model)
        self.layers: list[OpenLayer] = []
        self.finite: torch.Tensor | None = None
        self.failed = False
        self._last_layer = last_layer
        self._without_owner = without_owner

    def leave_open(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Leaves an attend open in the capture. Arguments as for `OpenLayer`."""
        self.step.attend(
            layer,
            q.unsqueeze(1),
            k.unsqueeze(2),
            v.unsqueeze(2),
            out=out.unsqueeze(1),
            wants_lse=False,
        )
        if layer == self._last_layer:
            # The memory of `out` is used again later in the graph.
            self.finite = out[:, 0, 0].isfinite()
        self.layers.append(OpenLayer(layer, *map(self._without_owner, (q, k, v, out))))

    def pieces(self) -> Iterator[OpenLayer]:
        """Runs the graph in pieces. The caller attends at each layer that this yields."""
        for piece, layer in enumerate(self.layers):
            self.step.run_piece(piece)
            yield layer
        self.step.run_piece(len(self.layers))
