"""Hash functions: the MLPs that the daemon supports, their files, and random hyperplanes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from spillway_kv.indices import MlpHash

_FORMAT = "spillway hash MLPs"


def _normal(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Draws from the normal distribution, in float32 on the CPU, whatever torch's defaults are."""
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


class HashMlp(nn.Module):
    """One MLP per head: z = SiLU(x W1 + b1) (+ x), y = z W2 (+ b2) (+ z), bit j = y_j > 0.

    The residual form has the terms (+ x) and (+ z). Parameters: w1 [H, d, hidden], b1 [H, hidden],
    w2 [H, hidden, b] and optionally b2 [H, b].
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
    def linear(cls, weight: torch.Tensor) -> HashMlp:
        """Returns an MLP that computes x W up to rounding, W [H, d, b]: SiLU(x) - SiLU(-x) is x.

        Its hidden layer has width 2 d.
        """
        head_count, head_dim, _ = weight.shape
        kind: Any = {"dtype": torch.float32, "device": weight.device}
        eye = torch.eye(head_dim, **kind).expand(head_count, -1, -1)
        return cls(
            torch.cat([eye, -eye], dim=2),
            torch.zeros(head_count, 2 * head_dim, **kind),
            torch.cat([weight, -weight], dim=1),
        )

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
        """Gaussian weights. The first are divided by input_scale [H], the size of the inputs."""

        def normal(*shape: int) -> torch.Tensor:
            made = _normal(shape, generator) / math.sqrt(shape[1])
            return made.to(input_scale.device)

        return cls(
            normal(head_count, head_dim, hidden_dim) / input_scale[:, None, None],
            input_scale.new_zeros(head_count, hidden_dim),
            normal(head_count, hidden_dim, hash_bits),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y [H, n, b] for x [H, n, d]."""
        z = functional.silu(torch.baddbmm(self.b1[:, None], x, self.w1))
        if self.residual:
            z = z + x
        y = torch.bmm(z, self.w2)
        if self.b2 is not None:
            y = y + self.b2[:, None]
        return y + z if self.residual else y

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """Returns the tensors for a file, float32 on the CPU."""
        parts = {"w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}
        return {
            f"layers.{layer}.{name}": part.detach().float().cpu().contiguous()
            for name, part in parts.items()
            if part is not None
        }


class ThreeLayerMlp(nn.Module):
    """One MLP per head: y = SiLU(SiLU(x W1 + b1) W2 + b2) W3 + b3."""

    def __init__(
        self,
        head_count: int,
        head_dim: int,
        hidden_dim: int,
        hash_bits: int,
        input_scale: torch.Tensor,
        generator: torch.Generator,
    ) -> None:
        """Gaussian weights. The first are divided by input_scale [H], the size of the inputs."""
        super().__init__()
        device = input_scale.device
        widths = (head_dim, hidden_dim, hidden_dim, hash_bits)
        weights = [
            _normal((head_count, rows, columns), generator) / math.sqrt(rows)
            for rows, columns in zip(widths, widths[1:], strict=False)
        ]
        made = [weight.to(device) for weight in weights]
        made[0] = made[0] / input_scale[:, None, None]
        self.weights = nn.ParameterList(made)
        self.biases = nn.ParameterList(
            [input_scale.new_zeros(head_count, width) for width in widths[1:]]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y [H, n, b] for x [H, n, d]."""
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            x = torch.baddbmm(bias[:, None], x, weight)
            x = x if i == last else functional.silu(x)
        return x

    def tensors(self, layer: int, prefix: str = "") -> dict[str, torch.Tensor]:
        """Returns the tensors for a file, float32 on the CPU."""
        found = {}
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True), 1):
            for name, part in ((f"w{i}", weight), (f"b{i}", bias)):
                kept = part.detach().float().cpu().contiguous()
                found[f"layers.{layer}.{prefix}{name}"] = kept
        return found


class HashAttentionMlps(nn.Module):
    """The pair of HashAttention (arXiv 2412.14468): keys and queries have different MLPs."""

    def __init__(self, of_keys: ThreeLayerMlp, of_queries: ThreeLayerMlp) -> None:
        super().__init__()
        self.of_keys = of_keys
        self.of_queries = of_queries

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y [H, n, b] for keys [H, n, d]."""
        made = self.of_keys(x)
        assert isinstance(made, torch.Tensor)
        return made

    def tensors(self, layer: int) -> dict[str, torch.Tensor]:
        """Returns the tensors for a file, float32 on the CPU."""
        return self.of_keys.tensors(layer) | self.of_queries.tensors(layer, "query_")


class Hyperplanes(nn.Module):
    """LSH: the signs of x R. The columns of R [d, b] are those of random rotations."""

    def __init__(self, head_dim: int, hash_bits: int, seed: int, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        rotations = [
            torch.linalg.qr(_normal((head_dim, head_dim), generator)).Q
            for _ in range(math.ceil(hash_bits / head_dim))
        ]
        self.planes = torch.cat(rotations, dim=1)[:, :hash_bits].to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns y [H, n, b] for x [H, n, d]."""
        return x @ self.planes


def save_hash(
    path: Path, tensors: Mapping[str, torch.Tensor], layer_count: int, described: MlpHash
) -> None:
    """Writes the file that `Client.upload_hash_weights` sends.

    Args:
        path: File to write. An existing file is replaced only when the new one is complete.
        tensors: `HashMlp.tensors` of every layer.
        layer_count: Transformer layers.
        described: The hash for `Client.create_model`.
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
    """Returns the hash for `Client.create_model` for a file of `save_hash`.

    Raises:
        ValueError: The file does not describe its hash, or is not a safetensors file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise ValueError(
            f"{path} does not describe its hash: not written by spillway-lab train-hash"
        )
    return MlpHash(**json.loads(metadata["hash"]))
