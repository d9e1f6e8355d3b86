"""Steps of many sequences run in parts at once: same bits as steps of one sequence."""

from __future__ import annotations

import functools

import pytest
import spillway_kv
import torch
from daemon_process import binary, device, on_gpu
from spillway_kv import Client, Policy, RotationHash, Sequence
from spillway_kv.lab.serving import prefer_library

pytestmark = pytest.mark.skipif(not on_gpu(), reason="needs a GPU")

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64
TOKENS = 2304
# Contents of the sequences, in turn.
KINDS = 5
# More than a step's slots, and more than the launches of an eager layer before it becomes a graph.
STEPS = 12
BY_MASS = Policy(heavy=spillway_kv.TopP(mass=0.9))


def connect(copies: str, **more: str) -> Client:
    prefer_library(binary())
    settings = {
        "memory.limit": "4GiB",
        "device.name": device().split(",")[0],
        "models.sampling_seed": "0",
        "device.gpu_resident_limit": copies,
        # Without it, copies are attended densely.
        "device.reproducible": "true",
        **{f"device.{name}": value for name, value in more.items()},
    }
    return spillway_kv.connect("embedded:", settings=settings)


@functools.cache
def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def filled(client: Client, count: int, policies: list[Policy], value_bits: int) -> list[Sequence]:
    """Sequences with contents and policies in turn."""
    model = client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="bfloat16",
        hash_weights=RotationHash(value_bits=value_bits),
    )
    sequences = [
        client.create_sequence(model, policy=policies[i % len(policies)]) for i in range(count)
    ]
    for i, sequence in enumerate(sequences):
        sequence.append(0, 0, *normal(i % KINDS, 2, LAYERS, KV_HEADS, TOKENS, DIM))
    return sequences


def inputs(t: int, count: int) -> tuple[torch.Tensor, ...]:
    """q [layers, count, 1, H_q, d], k and v [layers, count, H_kv, 1, d] of a step."""
    kinds = torch.arange(count) % KINDS
    q = normal(100 + t, LAYERS, KINDS, 1, HEADS, DIM)
    k, v = normal(200 + t, 2, LAYERS, KINDS, KV_HEADS, 1, DIM)
    return tuple(x[:, kinds].cuda() for x in (q, k, v))


def decoded(
    client: Client, count: int, policies: list[Policy], *, captured: bool, value_bits: int = 0
) -> tuple[list[torch.Tensor], int]:
    """Outputs [count, 1, H_q, d] of each layer of each step, and how often launches changed."""
    outs, changes = [], 0
    held = [torch.zeros_like(x) for x in inputs(0, count)]
    with client.open_decoder(filled(client, count, policies, value_bits)) as decoder:

        def attend() -> list[torch.Tensor]:
            return [decoder.attend(i, *(x[i] for x in held))[0] for i in range(LAYERS)]

        graph, made = torch.cuda.CUDAGraph(), []
        for t in range(STEPS):
            changed = decoder.next()
            changes += changed
            if captured and changed:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    made = attend()
            for to, new in zip(held, inputs(t, count), strict=True):
                to.copy_(new)
            if captured:
                graph.replay()
            else:
                made = attend()
            outs += [out.clone() for out in made]
    return outs, changes


@functools.cache
def wanted(policy: Policy, value_bits: int) -> list[torch.Tensor]:
    """Outputs [KINDS, 1, H_q, d]: each sequence has steps of its own, as jobs."""
    outs = []
    with connect("0") as client:
        sequences = filled(client, KINDS, [policy], value_bits)
        for t in range(STEPS):
            q, k, v = (x.cpu() for x in inputs(t, KINDS))
            made: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
            for i, sequence in enumerate(sequences):
                with client.begin_step([sequence]) as step:
                    for layer in range(LAYERS):
                        one = slice(i, i + 1)
                        out, _ = step.attend(layer, q[layer, one], k[layer, one], v[layer, one])
                        made[layer].append(out)
            outs += [torch.cat(of_layer).cuda() for of_layer in made]
    return outs


def check(outs: list[torch.Tensor], policies: list[Policy], value_bits: int = 0) -> None:
    """Compares outputs with those of single sequences."""
    assert len(outs) == STEPS * LAYERS
    for i, out in enumerate(outs):
        right = [wanted(policy, value_bits)[i] for policy in policies]
        for at, of_sequence in enumerate(out):
            assert torch.equal(of_sequence, right[at % len(policies)][at % KINDS]), (i, at)


# 31 sequences have 62 units and one lane, 40 have two lanes, 100 three and 180 four.
@pytest.mark.parametrize("count", [31, 40, 100, 180])
# Copies of no rows, of all, and of some.
@pytest.mark.parametrize("copies", ["0", "2GiB", "256MiB"])
@pytest.mark.parametrize("captured", [False, True])
def test_the_bits_of_single_sequences(count: int, copies: str, captured: bool) -> None:
    if copies == "256MiB" and count != 180:
        pytest.skip("all copies fit")
    with connect(copies) as client:
        outs, changes = decoded(client, count, [Policy()], captured=captured)
        (gpu, *_) = client.get_server_info().devices
        rows = count * LAYERS * KV_HEADS * TOKENS * 4 * DIM
        least = {"0": 0, "2GiB": rows, "256MiB": 1}[copies]
        most = {"0": 0, "2GiB": 1.3 * rows, "256MiB": 256 << 20}[copies]
        assert least <= gpu.resident_used_bytes <= most
    check(outs, [Policy()])
    # Whether rows may cross the link is known in the first step.
    assert changes == 1 or copies == "256MiB"


@pytest.mark.parametrize("policies", [[BY_MASS], [Policy(selector="oracle")], [Policy(), BY_MASS]])
def test_other_policies(policies: list[Policy]) -> None:
    """Two in turn are waves of two units each."""
    with connect("0") as client:
        outs, _ = decoded(client, 100, policies, captured=True)
    check(outs, policies)


# A uniform tail has no codes, so some units of a wave have and others do not.
@pytest.mark.parametrize("policies", [[Policy()], [Policy(), Policy(tail="uniform")]])
@pytest.mark.parametrize("copies", ["0", "2GiB"])
@pytest.mark.parametrize("captured", [False, True])
def test_codes_of_values(policies: list[Policy], copies: str, captured: bool) -> None:
    with connect(copies) as client:
        outs, _ = decoded(client, 40, policies, captured=captured, value_bits=2)
    check(outs, policies, value_bits=2)


@pytest.mark.parametrize("captured", [False, True])
def test_several_waves_of_a_lane(captured: bool) -> None:
    """The workspace has no room for all units at once."""
    with connect("0", gpu_workspace="16MiB") as client:
        outs, _ = decoded(client, 180, [Policy()], captured=captured)
    check(outs, [Policy()])
