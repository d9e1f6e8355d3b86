"""Hash functions: the MLPs that the daemon serves, their files, and random hyperplanes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from spillway.indices import MlpHash

_FORMAT = "spillway hash MLPs"


class HashMlp(nn.Module):
    """One MLP a head: z = SiLU(x W1 + b1) (+ x), y = z W2 (+ b2) (+ z), bit j = y_j > 0.

    The terms with x and z are those of the residual form. Parameters: w1
    [H, d, hidden], b1 [H, hidden], w2 [H, hidden, b] and, if given, b2 [H, b].
    """

    def __init__(
        self,
        w1: torch.Tensor,
        b1: torch.Tensor,
        w2: torch.Tensor,
        b2: torch.Tensor | None = None,
        residual: bool = False,
    ) -> None:
        super().__init__()
        self.w1 = nn.Parameter(w1)
        self.b1 = nn.Parameter(b1)
        self.w2 = nn.Parameter(w2)
        self.b2 = None if b2 is None else nn.Parameter(b2)
        self.residual = residual

    @classmethod
    def random(
        cls,
        head_count: int,
        head_dim: int,
        hidden_dim: int,
        hash_bits: int,
        input_scale: torch.Tensor,
        generator: torch.Generator,
    ) -> HashMlp:
        """Gaussian weights, the first divided by the inputs' size, [H]."""

        def normal(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
            return made.to(input_scale.device)

        return cls(
            normal(head_count, head_dim, hidden_dim) / input_scale[:, None, None],
            torch.zeros(head_count, hidden_dim, device=input_scale.device),
            normal(head_count, hidden_dim, hash_bits),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [H, n, b] of x [H, n, d]."""
        z = functional.silu(torch.baddbmm(self.b1[:, None], x, self.w1))
        if self.residual:
            z = z + x
        y = torch.bmm(z, self.w2)
        if self.b2 is not None:
            y = y + self.b2[:, None]
        return y + z if self.residual else y

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """What a file holds of them, float32 on the CPU."""
        parts = {"w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}
        return {
            f"layers.{layer}.{name}": part.detach().float().cpu().contiguous()
            for name, part in parts.items()
            if part is not None
        }


class Hyperplanes(nn.Module):
    """LSH: the signs of x R, the columns of R [d, b] being those of random rotations."""

    def __init__(self, head_dim: int, hash_bits: int, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rotations = [
            torch.linalg.qr(torch.randn(head_dim, head_dim, generator=generator)).Q
            for _ in range(math.ceil(hash_bits / head_dim))
        ]
        self.planes = torch.cat(rotations, dim=1)[:, :hash_bits].to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [H, n, b] of x [H, n, d]."""
        return x @ self.planes


def save_hash(
    path: Path, tensors: Mapping[str, torch.Tensor], layer_count: int, described: MlpHash
) -> None:
    """Writes the file that `Client.upload_hash_weights` sends.

    Args:
        path: Where; replaced at once when complete.
        tensors: `HashMlp.tensors` of every layer.
        layer_count: Transformer layers.
        described: What `Client.create_model` is to be told.
    """
    missing = [layer for layer in range(layer_count) if f"layers.{layer}.w1" not in tensors]
    if missing:
        raise ValueError(f"layers without weights: {missing}")
    metadata = {
        "format": _FORMAT,
        "layer_count": str(layer_count),
        "hash": json.dumps(asdict(described)),
    }
    part = path.with_name(path.name + ".part")
    save_file(dict(tensors), part, metadata=metadata)
    part.replace(path)


def describe_hash(path: str | Path) -> MlpHash:
    """What to create a model with for the weights of a file of `save_hash`.

    Raises:
        ValueError: The file says nothing of it.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != _FORMAT:
        raise ValueError(f"{path} does not describe its hash: not written by spillway train-hash")
    return MlpHash(**json.loads(metadata["hash"]))
