"""Dense attention of one new token a sequence, over K/V in GPU memory: what serves it fastest.

Every candidate's outputs are compared with exact attention before it is timed. FP8 (e4m3, without
scales) is measured where vLLM's FlashAttention 3 can be imported.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timing import AHEAD_CYCLES, timed
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# Relative error of an output above which a candidate is wrong: rounding explains less.
BF16_ERROR_MAX = 0.02
FP8_ERROR_MAX = 0.5
TRIALS = 5

# Layers of q [B, H_q, 1, d], k and v [B, H_kv, N, d].
Layers = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
# Outputs of the layers, [B, H_q, 1, d] each.
Attends = Callable[[Layers], list[torch.Tensor]]


@dataclass
class Served:
    """A candidate that is right.

    Attributes:
        name: Its name.
        step: Runs it once; returns microseconds of a layer.
        errors: Relative errors of its outputs.
    """

    name: str
    step: Callable[[], float]
    errors: list[float]


def _sdpa(layers: Layers, each: bool) -> list[torch.Tensor]:
    """torch's attention, of all sequences at once or one after the other."""
    if not each:
        return [scaled_dot_product_attention(*layer, enable_gqa=True) for layer in layers]
    return [
        torch.cat(
            [
                scaled_dot_product_attention(q[b, None], k[b, None], v[b, None], enable_gqa=True)
                for b in range(len(q))
            ]
        )
        for q, k, v in layers
    ]


def _of_backend(backend: SDPBackend, each: bool) -> Attends:
    def run(layers: Layers) -> list[torch.Tensor]:
        with sdpa_kernel(backend):
            return _sdpa(layers, each)

    return run


def bf16_candidates(device: torch.device) -> dict[str, Attends]:
    """Candidates by name."""
    if device.type == "cpu":
        return {"torch on the CPU": lambda layers: _sdpa(layers, each=False)}
    return {
        f"{name}, {how}": _of_backend(backend, how == "one by one")
        for name, backend in (
            ("cuDNN", SDPBackend.CUDNN_ATTENTION),
            ("flash", SDPBackend.FLASH_ATTENTION),
        )
        for how in ("batch", "one by one")
    }


def fp8_attends() -> Attends:
    """vLLM's FlashAttention 3 over tensors in e4m3 of [B, N, H_kv, d], as vLLM stores them.

    Raises:
        ImportError: It is not there.
    """
    varlen: Any = importlib.import_module("vllm.vllm_flash_attn").flash_attn_varlen_func

    def run(layers: Layers) -> list[torch.Tensor]:
        outs = []
        for q, k, v in layers:
            count, tokens = k.shape[:2]
            ends = torch.arange(count + 1, dtype=torch.int32, device=q.device)
            out = varlen(
                q.flatten(0, 1),
                k.flatten(0, 1),
                v.flatten(0, 1),
                max_seqlen_q=1,
                cu_seqlens_q=ends,
                max_seqlen_k=tokens,
                cu_seqlens_k=ends * tokens,
                fa_version=3,
            )
            outs.append(out[:, :, None])
        return outs

    return run


def fp8_layers(layers: Layers) -> Layers:
    """The layers' tensors in e4m3, [B, tokens, H, d]."""
    return [
        tuple(x.transpose(1, 2).contiguous().to(torch.float8_e4m3fn) for x in layer)  # type: ignore[misc]
        for layer in layers
    ]


def serve(
    name: str, attends: Attends, layers: Layers, right: list[torch.Tensor], error_max: float
) -> Served:
    """Checks a candidate, and captures it into a CUDA graph on a GPU.

    right: exact outputs [B, H_q, d] of each layer.

    Raises:
        RuntimeError: It cannot serve the layers, or its outputs are wrong.
    """
    outs = attends(layers)
    errors = [
        ((out[:, :, 0].float() - of_layer).norm(dim=-1) / of_layer.norm(dim=-1)).flatten()
        for out, of_layer in zip(outs, right, strict=True)
    ]
    worst = torch.cat(errors).amax().item()
    if not worst <= error_max:
        raise RuntimeError(f"an output has a relative error of {worst:.3g}, above {error_max}")
    if layers[0][0].device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attends(layers)
        run: Callable[[], object] = graph.replay
    else:

        def run() -> object:
            return attends(layers)

    def step() -> float:
        return timed(run, layers[0][0].device, ahead_cycles=AHEAD_CYCLES, cold=True) / len(layers)

    return Served(name, step, torch.cat(errors).tolist())


def fastest(
    candidates: Mapping[str, Attends], layers: Layers, right: list[torch.Tensor]
) -> tuple[Served, dict[str, str]]:
    """The candidate with the least median of a few steps, and why others were refused.

    Raises:
        RuntimeError: All are refused.
    """
    best: tuple[float, Served] | None = None
    refused: dict[str, str] = {}
    for name, attends in candidates.items():
        try:
            served = serve(name, attends, layers, right, BF16_ERROR_MAX)
        except RuntimeError as error:
            refused[name] = str(error).splitlines()[0]
            continue
        us = statistics.median(served.step() for _ in range(TRIALS))
        if best is None or us < best[0]:
            best = us, served
    if best is None:
        raise RuntimeError(f"no dense attention: {refused}")
    return best[1], refused
