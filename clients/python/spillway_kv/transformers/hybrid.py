"""A layer with both full attention and a state."""

from __future__ import annotations

from typing import Any

import torch

from spillway_kv.transformers.kinds import LayerKind
from spillway_kv.transformers.layer import Shared, SpillwayLayer
from spillway_kv.transformers.states import StateLayer


class HybridLayer(SpillwayLayer, StateLayer):
    """A layer whose K/V are in the daemon and whose state stays on the model's device."""

    is_compileable = False
    is_croppable = False

    def __init__(
        self,
        shared: Shared,
        index: int,
        model_index: int,
        kind: LayerKind,
        sinks: torch.Tensor | None = None,
    ) -> None:
        SpillwayLayer.__init__(self, shared, index, model_index, sinks)
        StateLayer.__init__(self, kind, model_index)

    def lazy_initialization(self, *tensors: Any, **states: Any) -> None:
        """Marks the layer as used, or makes room for a state."""
        if tensors:
            SpillwayLayer.lazy_initialization(self, *tensors)
        else:
            StateLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        """Makes the layer empty."""
        SpillwayLayer.reset(self)
        self.clear_state()
