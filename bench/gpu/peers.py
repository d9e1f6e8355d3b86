"""Times what a user would run on the GPU without Spillway: torch, one layer, batch 1.

Dense attention with K/V in GPU memory (flash and cuDNN, where torch has them),
torch.topk with a gather and attention over the chosen rows, and a copy of all rows
over PCIe. Writes one JSON object per line. Times are medians of CUDA events, and the L2
cache is flushed before each repetition. Before it is timed, every result is compared with
attention in fp32 for some of the heads.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

HEADS = 32
KV_HEADS = 8
HEAD_DIM = 128


def median_us(work: Callable[[], object], flush: torch.Tensor, repetitions: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repetitions):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def check(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """The relative error of the first KV head's query heads, against attention in fp32."""
    group = HEADS // KV_HEADS
    logits = q[0, :group].float() @ k[0, 0].float().T * HEAD_DIM**-0.5
    wanted = torch.softmax(logits, -1) @ v[0, 0].float()
    error = (out[0, :group].float() - wanted).norm() / wanted.norm()
    return float(error)


def measure(n: int, repetitions: int, flush: torch.Tensor) -> None:
    generator = torch.Generator("cuda").manual_seed(n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q = normal(1, HEADS, 1, HEAD_DIM)
    k = normal(1, KV_HEADS, n, HEAD_DIM)
    v = normal(1, KV_HEADS, n, HEAD_DIM)
    for name, backend in (
        ("sdpa flash", SDPBackend.FLASH_ATTENTION),
        ("sdpa cudnn", SDPBackend.CUDNN_ATTENTION),
    ):
        try:
            with sdpa_kernel(backend):
                error = check(dense(q, k, v), q, k, v)
                us = median_us(lambda: dense(q, k, v), flush, repetitions)
        except RuntimeError as refused:
            report(name=name, tokens=n, refused=str(refused).splitlines()[0])
            continue
        report(name=name, tokens=n, us=us, checked_error=error)

    scores = torch.randn(KV_HEADS, n, generator=generator, device="cuda")
    keep = n // 50

    def chosen() -> torch.Tensor:
        index = torch.topk(scores, keep, dim=1, sorted=False).indices
        rows = index[None, :, :, None].expand(1, -1, -1, HEAD_DIM)
        return dense(q, torch.gather(k, 2, rows), torch.gather(v, 2, rows))

    us = median_us(lambda: torch.topk(scores, keep, dim=1, sorted=False), flush, repetitions)
    report(name="torch.topk 2 %", tokens=n, us=us)
    report(
        name="torch.topk 2 % + gather + sdpa",
        tokens=n,
        us=median_us(chosen, flush, repetitions),
    )


def stream(n: int, repetitions: int) -> None:
    """Copies all rows of a layer over PCIe, from pinned memory, in one copy."""
    size = 2 * KV_HEADS * n * HEAD_DIM * 2
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    small = torch.zeros(1, device="cuda")
    us = median_us(lambda: device.copy_(host, non_blocking=True), small, repetitions)
    report(name="stream over PCIe", tokens=n, us=us, gb_per_s=size / us / 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[131072, 524288, 1048576])
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    report(name="environment", torch=torch.__version__, gpu=torch.cuda.get_device_name())
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    for n in options.tokens:
        measure(n, options.repetitions, flush)
        stream(n, 5)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
