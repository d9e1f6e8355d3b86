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

    The terms with x and z are those of the residual form. With two hidden
    layers y = SiLU(z W2 + b2) W3 + b3, as HashAttention's MLPs have it
    (github.com/xAlg-ai/HashAttention-1.0). Parameters: w1 [H, d, hidden], b1
    [H, hidden], w2 [H, hidden, b] and, if given, b2 [H, b]; of two hidden
    layers w2 [H, hidden, hidden], b2 [H, hidden], w3 [H, hidden, b], b3 [H, b].

    Attributes:
        queries: What hashes queries, one MLP a query head; None: this does.
    """

    def __init__(
        self,
        w1: torch.Tensor,
        b1: torch.Tensor,
        w2: torch.Tensor,
        b2: torch.Tensor | None = None,
        residual: bool = False,
        w3: torch.Tensor | None = None,
        b3: torch.Tensor | None = None,
        queries: HashMlp | None = None,
    ) -> None:
        super().__init__()
        self.w1 = nn.Parameter(w1)
        self.b1 = nn.Parameter(b1)
        self.w2 = nn.Parameter(w2)
        self.b2 = None if b2 is None else nn.Parameter(b2)
        self.w3 = None if w3 is None else nn.Parameter(w3)
        self.b3 = None if b3 is None else nn.Parameter(b3)
        self.residual = residual
        self.queries = queries

    @classmethod
    def random(
        cls,
        head_count: int,
        head_dim: int,
        hidden_dim: int,
        hash_bits: int,
        input_scale: torch.Tensor,
        generator: torch.Generator,
        hidden_layer_count: int = 1,
    ) -> HashMlp:
        """Gaussian weights, the first divided by the inputs' size, [H]."""

        def normal(*shape: int) -> torch.Tensor:
            made = torch.randn(shape, generator=generator) / math.sqrt(shape[1])
            return made.to(input_scale.device)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, device=input_scale.device)

        first = normal(head_count, head_dim, hidden_dim) / input_scale[:, None, None]
        if hidden_layer_count == 1:
            return cls(
                first, zeros(head_count, hidden_dim), normal(head_count, hidden_dim, hash_bits)
            )
        return cls(
            first,
            zeros(head_count, hidden_dim),
            normal(head_count, hidden_dim, hidden_dim),
            zeros(head_count, hidden_dim),
            w3=normal(head_count, hidden_dim, hash_bits),
            b3=zeros(head_count, hash_bits),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [H, n, b] of x [H, n, d]."""
        z = functional.silu(torch.baddbmm(self.b1[:, None], x, self.w1))
        if self.w3 is not None and self.b2 is not None and self.b3 is not None:
            z = functional.silu(torch.baddbmm(self.b2[:, None], z, self.w2))
            return torch.baddbmm(self.b3[:, None], z, self.w3)
        if self.residual:
            z = z + x
        y = torch.bmm(z, self.w2)
        if self.b2 is not None:
            y = y + self.b2[:, None]
        return y + z if self.residual else y

    def tensors(self, layer: int, prefix: str = "") -> dict[str, torch.Tensor]:
        """What a file holds of them, float32 on the CPU; of queries' own after `query_`."""
        made = {
            f"layers.{layer}.{prefix}{name}": part.detach().float().cpu().contiguous()
            for name, part in self.named_parameters(recurse=False)
        }
        return made | (self.queries.tensors(layer, "query_") if self.queries else {})


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
