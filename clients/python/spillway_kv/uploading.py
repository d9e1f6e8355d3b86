"""Uploads of files in messages."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from spillway_kv._proto import model_service_pb2

_CHUNK_BYTES = 2 << 20


def upload_requests(
    model: str, path: str | Path
) -> Iterator[model_service_pb2.UploadHashWeightsRequest]:
    """Opens a file of hash weights. Returns the requests that upload it, which close it.

    Raises:
        OSError: The file cannot be read.
    """
    file = Path(path).open("rb")  # noqa: SIM115  (the requests close it)
    return _requests(model, file, os.fstat(file.fileno()).st_size)


def _requests(
    model: str, file: BinaryIO, total: int
) -> Iterator[model_service_pb2.UploadHashWeightsRequest]:
    with file:
        first = True
        while (data := file.read(_CHUNK_BYTES)) or first:
            yield model_service_pb2.UploadHashWeightsRequest(
                name=model if first else "", total_bytes=total if first else 0, data=data
            )
            first = False
