"""Learned attention sinks: a logit of each query head that takes part in the softmax."""

from __future__ import annotations

from typing import Any

import torch

from spillway_kv.transformers.identity import ModelMismatchError
from spillway_kv.transformers.support import UnsupportedModelError, learns_sinks


def sinks_of(model: Any) -> dict[int, torch.Tensor]:
    """Returns the sinks of a model's layers, [H_q] float32 in host memory, by number of the layer.

    Args:
        model: The model, or its config, which has none. Attention modules of transformers keep
            theirs in `sinks`, and the number of their layer in `layer_idx`.

    Raises:
        UnsupportedModelError: It is a config of a model that learns sinks, or sinks of a layer are
            not in memory.
    """
    if not isinstance(model, torch.nn.Module):
        config = model.get_text_config(decoder=True)
        if learns_sinks(config):
            raise UnsupportedModelError(
                f"a {config.model_type} model has learned attention sinks, which are not in its "
                "config: give SpillwayCache the model itself in place of the config"
            )
        return {}
    found = {}
    for module in model.modules():
        layer, sinks = getattr(module, "layer_idx", None), getattr(module, "sinks", None)
        if not isinstance(layer, int) or not isinstance(sinks, torch.Tensor):
            continue
        if sinks.is_meta:
            raise UnsupportedModelError(f"the sinks of layer {layer} are not loaded (meta)")
        found[layer] = sinks.detach().to("cpu", torch.float32, copy=True)
    return found


class LayerSinks:
    """The sinks of one layer, on the devices where they are used. Not thread-safe."""

    def __init__(self, model_index: int, logits: torch.Tensor | None) -> None:
        """Takes those that the cache knows, [H_q] float32 in host memory. None: there are none."""
        self._model_index = model_index
        self._logits = logits
        # The tensor that was compared last. Comparing one on a GPU waits for the GPU.
        self._compared: torch.Tensor | None = None
        self._placed = logits

    def check(self, given: torch.Tensor | None) -> None:
        """Compares them with those that the model passes to its attention.

        Raises:
            UnsupportedModelError: The cache knows none, or the model passes none.
            ModelMismatchError: They differ.
        """
        if given is None and self._logits is None:
            return
        if self._logits is None:
            raise UnsupportedModelError(
                f"layer {self._model_index} attends with learned sinks (s_aux), which the cache "
                "does not know: give SpillwayCache the model itself in place of the config"
            )
        if given is None:
            raise UnsupportedModelError(
                f"layer {self._model_index} has learned sinks, and attends without them"
            )
        if self._compared is given:
            return
        if not torch.equal(given.detach().to("cpu", torch.float32).flatten(), self._logits):
            raise ModelMismatchError(
                f"the sinks of layer {self._model_index} have changed since the cache was made"
            )
        self._compared = given

    def on(self, device: torch.device) -> torch.Tensor | None:
        """Returns them on a device, [H_q] float32. None: there are none."""
        if self._placed is not None and self._placed.device != device:
            self._placed = self._placed.to(device)
        return self._placed
