"""The common part of a cache's layers: how new K/V reach the attention function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
from transformers.cache_utils import CacheLayerMixin

from spillway_kv.transformers.identity import ModelMismatchError, weights_digest
from spillway_kv.transformers.sinks import LayerSinks
from spillway_kv.transformers.unfinished import Unfinished

_HANDLE = "_spillway_layer"
_F = TypeVar("_F", bound=Callable[..., Any])
_UNCOMPILED = "a SpillwayCache attends outside of torch's graphs; compile without fullgraph=True"


def uncompiled(function: _F) -> _F:
    """Keeps a function out of the graphs of `torch.compile`, which then end before it.

    With fullgraph=True, torch refuses the call, and from 2.7 on says why.
    """
    try:
        disabled = torch.compiler.disable(function, reason=_UNCOMPILED)
    except TypeError:
        disabled = torch.compiler.disable(function)
    return cast("_F", disabled)


class Forward(Protocol):
    """The state of a forward pass that the layers of one cache share."""

    # The layer that has passed on its K/V and has not attended yet.
    pending: HandedLayer | None
    # Index of the model's last layer that attends, and whether it has in this forward pass.
    last_index: int
    attended: bool

    @property
    def unfinished(self) -> Unfinished | None:
        """The forward pass or truncation in progress; None if there is none."""


class HandedLayer(CacheLayerMixin):
    """One layer of a `SpillwayCache`. transformers calls it.

    `update` returns the new K/V with a mark. The attention function that receives them calls
    `attend`, because only there the mask, the scale and the queries are known.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    # Number of positions that a query sees, the last of which is its own; None: all.
    window: int | None = None

    def __init__(
        self, forward: Forward, model_index: int, sinks: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        # Learned attention sinks of the layer.
        self.sinks = LayerSinks(model_index, sinks)
        # None for layers in the daemon. transformers expects these attributes.
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        # Index of the layer in the model.
        self.model_index = model_index
        # Positions seen, including left padding.
        self.length = 0
        # Digest of the weights that computed the K/V. None: not known, or not yet.
        self.weights: str | None = None
        # The attention module that computed them here.
        self._module: weakref.ref[torch.nn.Module] | None = None
        self._forward = forward

    @staticmethod
    def of(key: torch.Tensor) -> HandedLayer | None:
        """Returns the layer that marked these keys, or None."""
        return getattr(key, _HANDLE, None)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Marks the layer as used."""
        self.is_initialized = True

    @uncompiled
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new K/V [B, H_kv, T, d], with a mark for the attention function."""
        if self._forward.pending is not None:
            self._forward.pending.refuse()
        self.lazy_initialization(key_states, value_states)
        # A new tensor object, because the mark must not stay on the caller's.
        key_states = key_states.view_as(key_states)
        setattr(key_states, _HANDLE, self)
        self._forward.pending = self
        return key_states, value_states

    def refuse(self) -> NoReturn:
        """Raises an error for K/V that never reached the attention function."""
        raise RuntimeError(
            f"the K/V of layer {self.model_index} never reached the attention implementation "
            "'spillway'; call model.set_attn_implementation('spillway')"
        )

    def get_seq_length(self) -> int:
        """Returns the number of positions of complete forward passes, including left padding."""
        unfinished = self._forward.unfinished
        return self.length if unfinished is None else unfinished.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Returns how many positions the mask covers, and the first of them: it covers all."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Returns -1: only memory limits the length."""
        return -1

    def reset(self) -> None:
        """Makes the layer empty."""
        self.keys = self.values = None
        self.length = 0
        self.is_initialized = False
        self.weights = self._module = None

    def fork_into(self, copy: HandedLayer) -> None:
        """Makes another layer, whose sequences are forks of this one's, hold the same."""
        copy.keys, copy.values = self.keys, self.values
        copy.length = self.length
        copy.is_initialized = self.is_initialized
        copy.weights, copy._module = self.weights, self._module

    def meet(self, module: torch.nn.Module) -> None:
        """Notes the attention module that computes the next K/V.

        Raises:
            ModelMismatchError: The K/V that are there were computed with other weights.
        """
        if self._module is not None and self._module() is module:
            return
        if self.length > 0 and self.weights is not None:
            digest = weights_digest(module)
            if digest is not None and digest != self.weights:
                raise ModelMismatchError(
                    f"the K/V of layer {self.model_index} were computed with other weights than "
                    "the model has. With check_model=False, SpillwayCache.load uses them all the "
                    "same"
                )
        self._module = weakref.ref(module)

    def find_weights(self) -> str | None:
        """Returns the digest of the weights that computed the K/V, if they are known."""
        module = None if self._module is None else self._module()
        if self.weights is None and module is not None:
            self.weights = weights_digest(module)
        return self.weights

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        padding: list[int] | None,
        scaling: float,
    ) -> torch.Tensor:
        """Takes the new K/V and attends. The layer's part of a forward pass ends with this.

        Args:
            q: Queries [B, H_q, T, d].
            k: New keys [B, H_kv, T, d].
            v: New values, with the same shape.
            padding: Left padding of each row. None means unchanged.
            scaling: Factor on q.k.

        Returns:
            Output [B, T, H_q, d], with zeros at padding.
        """
        self._forward.pending = None
        out = self._attend(q, k, v, padding, scaling)
        self.length += q.shape[2]
        if self.model_index == self._forward.last_index:
            self._forward.attended = True
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
