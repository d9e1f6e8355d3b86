"""What the daemon holds, and how to make it hold less."""

from __future__ import annotations

import spillway
from spillway.server import MemoryStatistics


def held(client: spillway.Client) -> tuple[int, int]:
    """Bytes of rows and of codes that the daemon holds."""
    memory: MemoryStatistics = client.statistics().memory
    return memory.row_bytes, memory.index_bytes


def delete_model(client: spillway.Client, model: spillway.Model) -> None:
    """Deletes a model with all its sequences."""
    for info in list(client.list_sequences(model)):
        client.get_sequence(info.name).delete()
    client.delete_model(model)
