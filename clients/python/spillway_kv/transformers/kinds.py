"""The kinds of a model's layers, by the words of its config."""

from __future__ import annotations

from typing import Any, NamedTuple

FULL, SLIDING, HYBRID = "full_attention", "sliding_attention", "hybrid"
CONVOLUTION, LINEAR = "conv", "linear_attention"
# Layers that see one token at a time.
_WITHOUT_CACHE = frozenset({"mlp", "moe"})
SERVED = frozenset({FULL, SLIDING, HYBRID, CONVOLUTION, LINEAR}) | _WITHOUT_CACHE


class LayerKind(NamedTuple):
    """What a layer of a model keeps of earlier tokens.

    Attributes:
        name: The kind, by the words of transformers. A hybrid layer has full attention and a state.
        window: Number of tokens of a sliding window. None: no window.
        state_count: Number of states that the layer keeps instead of K/V. 0: none.
    """

    name: str
    window: int | None = None
    state_count: int = 0

    @property
    def is_full(self) -> bool:
        """Whether the layer has full attention, so that its K/V are in the engine."""
        return self.name in (FULL, HYBRID)


def layer_kinds(config: Any) -> list[LayerKind]:
    """Reads the kinds from the config of a text decoder that is served."""
    names = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    states = getattr(config, "number_of_conv_states", 1)
    return [
        LayerKind(
            name,
            config.sliding_window if name == SLIDING else None,
            states if name in (HYBRID, CONVOLUTION, LINEAR) else 0,
        )
        for name in names
    ]
