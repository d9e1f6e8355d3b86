"""K, V and queries of bench/trace_data.py as tensors, and exact attention over them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

# The data's.
KV_HEADS, GROUP, DIM = 8, 4, 128


@dataclass(frozen=True)
class Shape:
    """Layers, and the heads of each."""

    heads: int
    kv_heads: int
    dim: int
    layers: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


class Trace:
    """K, V and a query at one length. Up to 8 layers have the KV heads in another order each."""

    def __init__(self, folder: Path, tokens: int, shape: Shape) -> None:
        meta = json.loads((folder / "meta.json").read_text())
        if tokens not in meta["lengths"]:
            raise SystemExit(f"--tokens {tokens}: {folder} has queries at {meta['lengths']}")
        of_file = (KV_HEADS, meta["token_count"], DIM)
        rows = [
            np.fromfile(folder / name, np.int16).reshape(of_file)[:, :tokens].copy()
            for name in ("k.bf16", "v.bf16")
        ]
        k, v = (torch.from_numpy(x).view(torch.bfloat16) for x in rows)
        queries = np.fromfile(folder / "queries.f32", np.float32)
        of_length = queries.reshape(-1, meta["queries_per_length"], KV_HEADS, GROUP, DIM)
        q = torch.from_numpy(of_length[meta["lengths"].index(tokens)].copy()).bfloat16()
        q = q.transpose(0, 1).reshape(KV_HEADS, -1, DIM)  # the queries of all tokens
        if shape.group > q.shape[1]:
            raise SystemExit(f"--heads: the data has {q.shape[1]} queries for each KV head")
        # k and v [H_kv, N, d], queries [H_kv, queries of all tokens, d]
        self.k, self.v, self.queries = (_of_dim(x, shape.dim) for x in (k, v, q))
        if shape.kv_heads > len(self.k):
            raise SystemExit(f"--kv-heads: the data has {len(self.k)} of {shape.dim}")
        self.q = self.queries[:, : shape.group]
        self.tokens = tokens
        self.shape = shape

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [H_q, d], k and v [H_kv, N, d]."""
        q, k, v = (x.roll(layer, 0)[: self.shape.kv_heads] for x in (self.q, self.k, self.v))
        return q.reshape(self.shape.heads, self.shape.dim), k, v

    def query(self, layer: int, at: int) -> torch.Tensor:
        """The at-th query [H_q, d] of a layer; they repeat."""
        group = self.shape.group
        first = at % (self.queries.shape[1] // group) * group
        of_heads = self.queries.roll(layer, 0)[: self.shape.kv_heads, first : first + group]
        return of_heads.reshape(self.shape.heads, self.shape.dim)


def _of_dim(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Makes heads of another dimension from [heads, n, 128]."""
    heads, n, _ = x.shape
    if dim <= DIM:
        return x.view(heads, n, DIM // dim, dim).transpose(1, 2).reshape(-1, n, dim).contiguous()
    joined = x.view(heads * DIM // dim, dim // DIM, n, DIM).transpose(1, 2)
    return joined.reshape(-1, n, dim).contiguous()


def exact(queries: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tokens: int) -> torch.Tensor:
    """Attention over the first `tokens` tokens in float32, [Q, H_q, d].

    queries: [Q, H_q, d]. k, v: [H_kv, N, d], on the same device.
    """
    count, _, dim = queries.shape
    # [H_kv, Q * group, d]
    of_heads = queries.view(count, len(k), -1, dim).transpose(0, 1).reshape(len(k), -1, dim)
    outs = []
    for h, of_head in enumerate(of_heads.float()):
        logits = of_head @ k[h, :tokens].float().T / dim**0.5
        outs.append(logits.softmax(-1) @ v[h, :tokens].float())
    return torch.stack(outs).view(len(k), count, -1, dim).transpose(0, 1).reshape(queries.shape)


def relative_errors(outs: torch.Tensor, right: torch.Tensor) -> list[float]:
    """||out - right|| / ||right|| of each head. Both: [..., d], and of one shape."""
    errors: list[float] = (
        ((outs.float() - right).norm(dim=-1) / right.norm(dim=-1)).flatten().tolist()
    )
    return errors
