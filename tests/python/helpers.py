"""What the daemon holds, and how to make it hold less; tensor messages."""

from __future__ import annotations

import spillway
from spillway._proto import tensor_pb2
from spillway.server import MemoryStatistics
from spillway.tensors import Array, fill


def encode(array: Array, what: str) -> tensor_pb2.Tensor:
    """The tensor message of an array of floats."""
    tensor = tensor_pb2.Tensor()
    fill(tensor, array, what)
    return tensor


def held(client: spillway.Client) -> tuple[int, int]:
    """Bytes of rows and of codes that the daemon holds."""
    memory: MemoryStatistics = client.statistics().memory
    return memory.row_bytes, memory.index_bytes


def delete_model(client: spillway.Client, model: spillway.Model) -> None:
    """Deletes a model with all its sequences."""
    for info in list(client.list_sequences(model)):
        client.get_sequence(info.name).delete()
    client.delete_model(model)
