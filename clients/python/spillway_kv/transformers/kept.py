"""What layers keep in the model's process, as a sequence of the engine, so that it can be saved."""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceABC
from typing import Any

import torch

from spillway_kv.client import Client
from spillway_kv.sequence import Sequence
from spillway_kv.shared_model import shared_model
from spillway_kv.transformers.contents import Contents
from spillway_kv.transformers.sliding import Held, SlidingLayer
from spillway_kv.transformers.states import HeldState, StateLayer

# Elements of a row. A token of the sequence has a key and a value.
_WIDTH = 256
_DTYPES = {str(each): each for each in (torch.float32, torch.bfloat16, torch.float16)}
# What reading data of something else may raise.
_DAMAGES = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)

Tensors = dict[str, torch.Tensor]


def to_sequence(contents: Contents, row: int) -> tuple[Sequence, bytes]:
    """Makes a sequence of what the layers keep of a row, and a description of it.

    The numbers are kept exactly, as float32.

    Raises:
        ValueError: A tensor is of another dtype than float32, bfloat16 or float16.
    """
    described, flat = [], []
    for layer in kept_layers(contents):
        numbers, tensors = _taken(layer, row, contents.length)
        parts = {}
        for name, tensor in tensors.items():
            if str(tensor.dtype) not in _DTYPES:
                raise ValueError(
                    f"layer {layer.model_index} keeps {tensor.dtype}, and {sorted(_DTYPES)} can be "
                    "saved"
                )
            parts[name] = [list(tensor.shape), str(tensor.dtype), str(tensor.device)]
            flat.append(tensor.detach().to("cpu", torch.float32).reshape(-1))
        described.append({"layer": layer.model_index, "numbers": numbers, "tensors": parts})
    values = torch.cat(flat) if flat else torch.empty(0, device="cpu", dtype=torch.float32)
    count = max(-(-len(values) // (2 * _WIDTH)), 1)
    padded = torch.zeros(2, 1, count, _WIDTH, device="cpu", dtype=torch.float32)
    padded.view(-1)[: len(values)] = values
    client = contents.shared.store.client
    sequence = client.create_sequence(_model(client))
    try:
        sequence.append(0, 0, padded[0], padded[1])
    except BaseException:
        sequence.delete()
        raise
    return sequence, json.dumps(described).encode()


def from_sequences(
    contents: Contents,
    rows: SequenceABC[tuple[Sequence, bytes]],
    device: torch.device | str | None,
) -> None:
    """Makes the layers hold what was kept of each row.

    Args:
        contents: The contents of a cache with these rows.
        rows: Sequence and description of each row.
        device: Where the tensors go. None: to the device on which they were, if there is one.

    Raises:
        ValueError: Something else was saved.
    """
    try:
        read = [_read(sequence, json.loads(text), device) for sequence, text in rows]
        for index, layer in enumerate(kept_layers(contents)):
            ofs = [row[index] for row in read]
            if any(each[0] != layer.model_index for each in ofs):
                raise ValueError("other layers")
            names = ofs[0][2]
            stacked = {name: torch.stack([each[2][name] for each in ofs]) for name in names}
            _give(layer, [each[1] for each in ofs], stacked)
    except _DAMAGES as error:
        raise ValueError(
            f"the layers' states were not saved by SpillwayCache.save ({error})"
        ) from None


def kept_layers(contents: Contents) -> list[SlidingLayer | StateLayer]:
    """Returns the layers whose contents, or a part of them, are in this process."""
    return [each for each in contents.layers if isinstance(each, SlidingLayer | StateLayer)]


def _model(client: Client) -> Any:
    return shared_model(
        client,
        "hf-kept",
        "1",
        layer_count=1,
        query_head_count=1,
        kv_head_count=1,
        head_dim=_WIDTH,
        dtype="float32",
        hash_weights=None,
    )


def _taken(layer: Any, row: int, length: int) -> tuple[dict[str, Any], Tensors]:
    if isinstance(layer, SlidingLayer):
        held = layer.selected([row])
        if held.keys is None or held.values is None:
            return {"length": held.length}, {}
        padding = None if held.padding is None else held.padding[0]
        numbers = {"length": held.length, "padding": padding}
        return numbers, {"keys": held.keys[0], "values": held.values[0]}
    state = layer.held_state(length).selected([row])
    numbers = {"columns": state.columns, "kernel_sizes": state.kernel_sizes}
    tensors = {f"convolved.{i}": each[0] for i, each in state.convolved.items()}
    return numbers, tensors | {f"recurrent.{i}": each[0] for i, each in state.recurrent.items()}


def _give(layer: Any, numbers: list[dict[str, Any]], tensors: Tensors) -> None:
    if isinstance(layer, SlidingLayer):
        paddings = [each["padding"] for each in numbers if each.get("padding") is not None]
        layer.hold(
            Held(
                tensors.get("keys"),
                tensors.get("values"),
                [int(each) for each in paddings] if len(paddings) == len(numbers) else None,
                int(numbers[0]["length"]),
            )
        )
        return

    def of(kind: str) -> dict[int, torch.Tensor]:
        return {
            int(name.partition(".")[2]): each
            for name, each in tensors.items()
            if name.startswith(kind)
        }

    kernel_sizes = {int(i): int(size) for i, size in numbers[0]["kernel_sizes"].items()}
    layer.hold_state(
        HeldState(of("convolved."), of("recurrent."), kernel_sizes, int(numbers[0]["columns"]), 0)
    )


def _read(
    sequence: Sequence, described: list[dict[str, Any]], device: torch.device | str | None
) -> list[tuple[int, dict[str, Any], Tensors]]:
    """Returns number, numbers and tensors of each layer."""
    keys, values = sequence.fetch(0, like=torch.empty(0, device="cpu", dtype=torch.float32))
    flat = torch.stack([keys, values]).view(-1)
    made, start = [], 0
    for each in described:
        tensors = {}
        for name, (shape, dtype, saved_device) in each["tensors"].items():
            count = 1
            for size in shape:
                count *= int(size)
            part = flat[start : start + count].view([int(size) for size in shape])
            start += count
            place = _device(saved_device) if device is None else device
            tensors[str(name)] = part.to(place, _DTYPES[dtype], copy=True)
        made.append((int(each["layer"]), dict(each["numbers"]), tensors))
    return made


def _device(name: str) -> str:
    """Returns a saved device, or the CPU if it does not exist here."""
    try:
        torch.empty(0, device=name, dtype=torch.float32)
    except (RuntimeError, AssertionError):
        return "cpu"
    return name
