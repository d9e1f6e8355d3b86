"""Trained hash weights: selects the tensors that a part of a model needs."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

import spillway_kv
from spillway_kv.cluster.shares import Share
from spillway_kv.results import Model

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_HEADER_BYTES_MAX = 100 << 20
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class WeightsFile:
    """An uploaded file with weights.

    Attributes:
        path: Path of the file, on every host that uploads it to another daemon.
        sha256: SHA-256 digest of its bytes.
    """

    path: str
    sha256: str

    @classmethod
    def of(cls, path: str | Path) -> WeightsFile:
        """Reads a file and computes its digest."""
        found = Path(path).resolve()
        digest = hashlib.sha256()
        with found.open("rb") as file:
            while piece := file.read(_PIECE_BYTES):
                digest.update(piece)
        return cls(str(found), digest.hexdigest())

    def check(self) -> None:
        """Raises FailedPrecondition if the file cannot be read or has changed."""
        try:
            now = WeightsFile.of(self.path)
        except OSError as error:
            raise spillway_kv.FailedPrecondition(
                f"the hash weights {self.path}, which a daemon is to get, cannot be read here: "
                f"{error.strerror}"
            ) from None
        if now.sha256 != self.sha256:
            raise spillway_kv.FailedPrecondition(
                f"the hash weights {self.path} have changed since they were uploaded: sha256 "
                f"{now.sha256}, not {self.sha256}"
            )


@contextmanager
def weights_of(path: str | Path, model: Model, share: Share) -> Iterator[Path]:
    """Yields a safetensors file with the weights that one part of a model needs.

    The file has the part's layers, with the part's numbers. Of the first dimension of each tensor,
    it has the part's KV heads, or their query heads.

    Args:
        path: File with the weights of the whole model.
        model: The whole model.
        share: Share of the part.

    Raises:
        InvalidArgument: The file is not a safetensors file, or the first dimension of a tensor is
            neither the KV heads nor the query heads.
    """
    whole = range(model.layer_count), range(model.kv_head_count)
    if (share.layers, share.kv_heads) == whole:
        yield Path(path)
        return
    with Path(path).open("rb") as file, tempfile.NamedTemporaryFile("wb") as made:
        _write_part(file, made, model, share, str(path))
        made.flush()
        yield Path(made.name)


def _write_part(file: BinaryIO, made: IO[bytes], model: Model, share: Share, path: str) -> None:
    header, begin = _header(file, path)
    group = model.query_head_count // model.kv_head_count
    tensors = {}
    pieces = []
    size = 0
    for name, tensor in header.items():
        matched = _LAYER.fullmatch(name)
        if name == "__metadata__" or matched is None:
            continue
        layer = int(matched[1])
        # The daemon refuses layers that the model does not have.
        if layer not in share.layers and layer < model.layer_count:
            continue
        first, last = tensor["data_offsets"]
        shape = tensor["shape"]
        heads = shape[0] if shape else 0
        if heads == model.kv_head_count:
            mine = share.heads
        elif heads == model.query_head_count:
            mine = share.query_heads(group)
        else:
            raise spillway_kv.InvalidArgument(
                f"{path}: {name} has shape {shape}, and its first dimension is neither the "
                f"model's {model.kv_head_count} KV heads nor its {model.query_head_count} query "
                "heads"
            )
        head_bytes = (last - first) // heads
        count = mine.stop - mine.start
        tensors[f"layers.{share.local(layer)}.{matched[2]}"] = {
            "dtype": tensor["dtype"],
            "shape": [count, *shape[1:]],
            "data_offsets": [size, size + count * head_bytes],
        }
        pieces.append((begin + first + mine.start * head_bytes, count * head_bytes))
        size += count * head_bytes
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    made.write(len(text).to_bytes(8, "little") + text)
    for place, byte_count in pieces:
        file.seek(place)
        _copy(file, made, byte_count, path)


def _header(file: BinaryIO, path: str) -> tuple[dict[str, dict[str, list[int]]], int]:
    """Returns the description of the tensors, and the offset of their bytes."""
    size = int.from_bytes(file.read(8), "little")
    text = file.read(size) if size <= _HEADER_BYTES_MAX else b""
    try:
        header = json.loads(text)
        if len(text) != size or not isinstance(header, dict):
            raise ValueError
    except ValueError:
        raise spillway_kv.InvalidArgument(f"{path} is not a safetensors file") from None
    return header, 8 + size


def _copy(file: BinaryIO, made: IO[bytes], byte_count: int, path: str) -> None:
    before = made.tell()
    left = byte_count
    while left > 0 and (piece := file.read(min(left, _PIECE_BYTES))):
        made.write(piece)
        left -= len(piece)
    if made.tell() - before != byte_count:
        raise spillway_kv.InvalidArgument(f"{path} ends in the middle of a tensor")
