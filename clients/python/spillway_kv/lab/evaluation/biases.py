"""A family of contexts with a model's own key and query biases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from spillway_kv.lab.evaluation.families import Context, Family, Floats, Generator, rotated


@dataclass(frozen=True)
class LayerBiases:
    """The vectors that a layer's projections add to keys and queries before the rotary embedding.

    Attributes:
        key: [H_kv, d].
        query: [H_q, d].
    """

    key: Floats
    query: Floats


def read(path: Path) -> tuple[list[LayerBiases], float]:
    """Reads the biases of every layer of a .gguf file, and the base of its rotary embedding.

    Raises:
        ValueError: The file is not such a model.
    """
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    kind = fields.get("general.architecture", "")
    try:
        layers = int(fields[f"{kind}.block_count"])
        heads = int(fields[f"{kind}.attention.head_count"])
        kv_heads = int(fields[f"{kind}.attention.head_count_kv"])
        theta = float(fields[f"{kind}.rope.freq_base"])
        tensors = {tensor.name: tensor.data for tensor in reader.tensors if "bias" in tensor.name}
        read_layers = [
            LayerBiases(
                np.array(tensors[f"blk.{layer}.attn_k.bias"], np.float32).reshape(kv_heads, -1),
                np.array(tensors[f"blk.{layer}.attn_q.bias"], np.float32).reshape(heads, -1),
            )
            for layer in range(layers)
        ]
    except KeyError as error:
        raise ValueError(
            f"{path} has no {error.args[0]}: it is not a model with key biases"
        ) from error
    return read_layers, theta


def family(path: Path) -> Family:
    """Contexts to which the biases of a random layer and KV head of a model are added."""
    layers, theta = read(path)
    return Family(
        "model-biases", f"key and query biases of {path.stem}", partial(_add, layers, theta)
    )


def _add(layers: Sequence[LayerBiases], theta: float, context: Context, random: Generator) -> None:
    layer = layers[int(random.integers(len(layers)))]
    kv_heads, d = layer.key.shape
    n = len(context.keys)
    if d != context.keys.shape[1]:
        raise ValueError(f"the model has head_dim {d}, the contexts {context.keys.shape[1]}")
    head = int(random.integers(kv_heads))
    group = len(layer.query) // kv_heads
    context.keys += rotated(layer.key[head], np.arange(n), theta)
    last = np.array([n - 1])
    for g in range(context.queries.shape[1]):
        bias = layer.query[head * group + g % group]
        context.queries[:, g] += rotated(bias, last, theta)[0]
