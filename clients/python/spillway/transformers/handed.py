"""What the layers of a cache have in common: how new K/V reach the attention function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from transformers.cache_utils import CacheLayerMixin

if TYPE_CHECKING:
    from spillway.transformers.unfinished import Unfinished

_HANDLE = "_spillway_layer"


class Forward(Protocol):
    """What the layers of one cache share: how far a forward is."""

    # The layer whose K/V were handed out and wait for its attention.
    pending: HandedLayer | None
    # What has begun and not ended; None between forwards.
    unfinished: Unfinished | None
    # Of the model.
    layer_count: int


class HandedLayer(CacheLayerMixin):
    """One layer of a `SpillwayCache`; transformers drives it.

    `update` hands the new K/V through, marked, and the attention function
    that receives them calls `attend`: only there are the mask, the scale and
    the queries known.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    # Positions that a query sees, its own the last; None: all.
    window: int | None = None

    def __init__(self, forward: Forward, model_index: int) -> None:
        super().__init__()
        # Of a layer in the daemon they stay None: transformers looks for them.
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        # The layer's number in the model.
        self.model_index = model_index
        # Positions seen, left padding included.
        self.length = 0
        self._forward = forward

    @staticmethod
    def of(key: torch.Tensor) -> HandedLayer | None:
        """Returns the layer that handed these keys out, if one did."""
        return getattr(key, _HANDLE, None)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Notes that the layer is in use."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands the new K/V [B, H_kv, T, d] to the attention function, marked."""
        if self._forward.pending is not None:
            self._forward.pending.refuse()
        self.lazy_initialization(key_states, value_states)
        # A tensor of its own: the mark must not stay on the caller's.
        key_states = key_states.view_as(key_states)
        setattr(key_states, _HANDLE, self)
        self._forward.pending = self
        return key_states, value_states

    def refuse(self) -> NoReturn:
        """Raises for K/V that were handed out and not attended to."""
        raise RuntimeError(
            f"the K/V of layer {self.model_index} never reached the attention implementation "
            "'spillway'; call model.set_attn_implementation('spillway')"
        )

    def get_seq_length(self) -> int:
        """Returns the positions seen by whole forwards, left padding included."""
        unfinished = self._forward.unfinished
        return self.length if unfinished is None else unfinished.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many positions the mask covers, and where it starts: all of them."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1: there is no limit but memory."""
        return -1

    def reset(self) -> None:
        """Makes the layer empty."""
        self.keys = self.values = None
        self.length = 0
        self.is_initialized = False

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: list[int] | None,
        scaling: float,
    ) -> torch.Tensor:
        """Takes the new K/V and attends.

        Args:
            q: Queries [B, H_q, T, d].
            k: New keys [B, H_kv, T, d].
            v: New values, the same shape.
            padding: Left padding of each row; None is what it was.
            scaling: Factor on q.k.

        Returns:
            Output [B, T, H_q, d], zeros at padding.
        """
        self._forward.pending = None
        out = self._attend(q, k, v, padding, scaling)
        self.length += q.shape[2]
        if self.model_index == self._forward.layer_count - 1:
            self._forward.unfinished = None
        return out

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: list[int] | None,
        scaling: float,
    ) -> torch.Tensor:
        raise NotImplementedError
