"""Exact attention on a GPU: a long sequence alone has the same bits as in a batch."""

from __future__ import annotations

import pytest
import spillway_kv
import torch
from daemon_process import binary, device, on_gpu
from spillway_kv import Policy
from spillway_kv.lab.serving import prefer_library

pytestmark = pytest.mark.skipif(not on_gpu() or "," in device(), reason="needs one GPU")

# One KV head has 128 splits, which the warps of blocks share; four sequences have 512, of which
# each warp has its own. Splits have one, two and four runs; the last ones are not full.
LENGTHS = [900, 16_384, 20_003, 33_001, 70_000]
BATCH = 4


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention [H, d] of queries [H, d] over K and V [n, d], in float64."""
    logits = q.double() @ k.double().T / q.shape[-1] ** 0.5
    return torch.softmax(logits, -1) @ v.double()


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(
    ("heads", "dim", "dtype"),
    [(8, 64, torch.bfloat16), (6, 128, torch.bfloat16), (5, 128, torch.float16)],
)
def test_alone_and_in_a_batch(heads: int, dim: int, dtype: torch.dtype, resident: bool) -> None:
    prefer_library(binary())
    settings = {
        "memory.limit": "2GiB",
        "device.name": device(),
        "device.gpu_memory_limit": "4GiB",
        "device.gpu_resident_limit": "512MiB" if resident else "0",
    }
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    with spillway_kv.connect("embedded:", settings=settings) as client:
        model = client.create_model(
            layer_count=1,
            query_head_count=heads,
            kv_head_count=1,
            head_dim=dim,
            dtype="float16" if dtype == torch.float16 else "bfloat16",
        )
        for n in LENGTHS:
            k, v = normal(2, 1, 1, n, dim)
            sequence = client.create_sequence(model)
            sequence.append(0, 0, k, v)
            batch = [sequence, *(sequence.fork() for _ in range(BATCH - 1))]
            q = normal(1, 1, heads, dim)
            new_k, new_v = normal(2, 1, 1, 1, dim)
            wanted = exact(
                q[0, 0], torch.cat([k[0, 0], new_k[0, 0]]), torch.cat([v[0, 0], new_v[0, 0]])
            )
            for of_step in (batch, batch[:1]):
                count = len(of_step)
                with client.begin_step(of_step, policy=Policy(selector="all")) as step:
                    out, lse = step.attend(
                        0,
                        q.expand(count, 1, heads, dim).contiguous(),
                        new_k.expand(count, 1, 1, dim).contiguous(),
                        new_v.expand(count, 1, 1, dim).contiguous(),
                    )
                if of_step is batch:
                    together = (out[0], lse[0])
                    sequence.truncate(n)
                torch.testing.assert_close(out[0, 0].double(), wanted, rtol=0, atol=2e-3)
            assert torch.equal(out[0], together[0]), n
            assert torch.equal(lse[0], together[1]), n
            for one in batch:
                one.delete()
