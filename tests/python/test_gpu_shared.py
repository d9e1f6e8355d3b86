"""Sequences with a common prefix: a row that several of them read crosses the link once."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import spillway_kv
import torch
from daemon_process import binary, device, on_gpu
from spillway_kv import Client, Model, Policy, RotationHash, Sequence, TopK
from spillway_kv.lab.serving import prefer_library

pytestmark = pytest.mark.skipif(not on_gpu(), reason="needs a GPU")

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64
# Whole pages, so that forks have no rows of their own.
TOKENS = 31 * 128
STEPS = 5
# Reads its heavy rows and no others.
TOP = Policy(heavy=TopK(count=300), tail="none")
TAILS = [TOP, Policy(), Policy(epsilon=0.02, delta=0.02)]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    prefer_library(binary())
    settings = {
        "memory.limit": "4GiB",
        "device.name": device().split(",")[0],
        "models.sampling_seed": "0",
        "device.gpu_resident_limit": "0",
    }
    with spillway_kv.connect("embedded:", settings=settings) as client:
        yield client


def create(client: Client, value_bits: int) -> Model:
    return client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="bfloat16",
        hash_weights=RotationHash(value_bits=value_bits),
    )


@pytest.fixture(scope="module")
def model(client: Client) -> Model:
    return create(client, 0)


@pytest.fixture(scope="module")
def coded(client: Client) -> Model:
    return create(client, 2)


@functools.cache
def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def filled(client: Client, model: Model, policy: Policy, tokens: int = TOKENS) -> Sequence:
    sequence = client.create_sequence(model, policy=policy)
    sequence.append(0, 0, *normal(1, 2, LAYERS, KV_HEADS, tokens, DIM))
    return sequence


def queries(seeds: list[int], t: int, scale: float = 1.0) -> torch.Tensor:
    """[layers, B, 1, H_q, d]: near each other."""
    common = 2 * normal(50, LAYERS, 1, 1, HEADS, DIM)
    own = [normal(100 + 10 * seed + t, LAYERS, 1, 1, HEADS, DIM) for seed in seeds]
    return common + scale * torch.cat(own, dim=1) / 2


def news(seeds: list[int], t: int) -> torch.Tensor:
    """k and v [2, layers, B, H_kv, 1, d]."""
    return torch.cat(
        [normal(500 + 10 * seed + t, 2, LAYERS, 1, KV_HEADS, 1, DIM) for seed in seeds], dim=2
    )


def decoded(
    client: Client, sequences: list[Sequence], seeds: list[int], *, captured: bool = False
) -> tuple[list[torch.Tensor], list[int]]:
    """Outputs [B, 1, H_q, d] of each layer of each step, and the rows that crossed the link."""
    outs, moved = [], []
    q = queries(seeds, 0).cuda()
    k, v = news(seeds, 0).cuda()
    with client.open_decoder(sequences) as decoder:

        def attend() -> list[torch.Tensor]:
            return [decoder.attend(i, q[i], k[i], v[i])[0] for i in range(LAYERS)]

        graph, made = torch.cuda.CUDAGraph(), []
        for t in range(STEPS):
            if decoder.next() and captured:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    made = attend()
            q.copy_(queries(seeds, t))
            for to, new in zip((k, v), news(seeds, t), strict=True):
                to.copy_(new)
            if captured:
                graph.replay()
            else:
                made = attend()
            outs += [out.clone() for out in made]
            moved += [
                sum(result.moved_row_count for result in decoder.results(layer))
                for layer in range(LAYERS)
            ]
    return outs, moved


def alone(
    client: Client, model: Model, policy: Policy, seed: int, tokens: int = TOKENS
) -> tuple[list[torch.Tensor], list[int]]:
    """The same of one fork. The GPU has the same of its rows as of another fork's."""
    return decoded(client, [filled(client, model, policy, tokens).fork()], [seed])


def forks(sequence: Sequence, count: int) -> list[Sequence]:
    return [sequence.fork() for _ in range(count)]


def check(outs: list[torch.Tensor], right: list[list[torch.Tensor]]) -> None:
    assert len(outs) == STEPS * LAYERS
    for i, out in enumerate(outs):
        for at, of_sequence in enumerate(out):
            assert torch.equal(of_sequence, right[at][i][0]), (i, at)


# 40 sequences have 80 units and two lanes, with a KV head each.
@pytest.mark.parametrize("count", [2, 7, 40])
@pytest.mark.parametrize("captured", [False, True])
def test_rows_of_forks_cross_the_link_once(
    client: Client, model: Model, count: int, captured: bool
) -> None:
    right, moved = alone(client, model, TOP, 0)
    sequences = forks(filled(client, model, TOP), count)
    outs, of_forks = decoded(client, sequences, [0] * count, captured=captured)
    check(outs, [right] * count)
    assert min(moved) > 300
    assert of_forks == moved


@pytest.mark.parametrize("policy", TAILS)
@pytest.mark.parametrize("captured", [False, True])
def test_forks_with_queries_of_their_own(
    client: Client, model: Model, policy: Policy, captured: bool
) -> None:
    """Of rows that two need, and of those that one needs, each crosses once."""
    singles = [alone(client, model, policy, seed) for seed in (0, 1)]
    two = forks(filled(client, model, policy), 2)
    outs, of_two = decoded(client, two, [0, 1], captured=captured)
    check(outs, [right for right, _ in singles])
    seeds = [1, 0, 1, 1, 0]
    five = forks(filled(client, model, policy), 5)
    outs, of_five = decoded(client, five, seeds, captured=captured)
    check(outs, [singles[seed][0] for seed in seeds])
    for i in range(STEPS * LAYERS):
        first, second = (moved[i] for _, moved in singles)
        assert max(first, second) <= of_two[i] < first + second
        # Rows of a third draw are read in place, by each that needs them.
        if policy is TOP:
            assert of_five[i] == of_two[i]
        assert of_five[i] < 2 * first + 3 * second


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("captured", [False, True])
def test_forks_with_codes_of_values(
    client: Client, coded: Model, count: int, captured: bool
) -> None:
    """The first draw's rows cross once. Those of a second one are read in place."""
    right, moved = alone(client, coded, Policy(), 0)
    sequences = forks(filled(client, coded, Policy()), count)
    outs, of_forks = decoded(client, sequences, [0] * count, captured=captured)
    check(outs, [right] * count)
    for once, all_of in zip(moved, of_forks, strict=True):
        assert once <= all_of < count * once


def test_sequences_of_their_own_share_nothing(client: Client, model: Model) -> None:
    right, moved = alone(client, model, TOP, 0)
    sequences = [filled(client, model, TOP).fork() for _ in range(3)]
    outs, of_three = decoded(client, sequences, [0] * 3)
    check(outs, [right] * 3)
    assert of_three == [3 * x for x in moved]


def test_forks_that_went_on_alone(client: Client, model: Model) -> None:
    """Only the first 3,000 tokens are common; the same positions have other rows then."""
    base = client.create_sequence(model, policy=TOP)
    k, v = normal(1, 2, LAYERS, KV_HEADS, TOKENS, DIM)
    others = normal(2, 2, LAYERS, KV_HEADS, TOKENS, DIM)
    base.append(0, 0, k[:, :, :3000], v[:, :, :3000])
    sequences = forks(base, 2)
    sequences[0].append(0, 3000, k[:, :, 3000:], v[:, :, 3000:])
    sequences[1].append(0, 3000, *others[:, :, :, 3000:])
    whole = client.create_sequence(model, policy=TOP)
    whole.append(
        0,
        0,
        *(
            torch.cat([a[:, :, :3000], b[:, :, 3000:]], dim=2)
            for a, b in zip((k, v), others, strict=True)
        ),
    )
    singles = [alone(client, model, TOP, 0), decoded(client, [whole], [0])]
    outs, moved = decoded(client, sequences, [0, 0])
    check(outs, [right for right, _ in singles])
    for i in range(STEPS * LAYERS):
        first, second = (of_one[i] for _, of_one in singles)
        assert max(first, second) < moved[i] < first + second


def test_more_rows_than_the_table_has_room_for(client: Client, model: Model) -> None:
    """Rows without a slot cross the link for each sequence, and outputs are the same."""
    tokens = 20_000
    policy = Policy(heavy=TopK(count=5_000), tail="none")
    right, moved = alone(client, model, policy, 0, tokens)
    sequences = forks(filled(client, model, policy, tokens), 2)
    outs, of_two = decoded(client, sequences, [0, 0])
    check(outs, [right] * 2)
    for once, both in zip(moved, of_two, strict=True):
        assert once < both < 2 * once


@pytest.mark.parametrize("count", [2, 8])
def test_queries_of_a_request_share_rows(client: Client, model: Model, count: int) -> None:
    """Attends of one sequence, in a job: each query as if it were alone."""
    sequence = filled(client, model, TOP)
    q = queries(list(range(count)), 0)[:, :, 0]
    for layer in range(LAYERS):
        together = sequence.attend(layer, q[layer], visible=[TOKENS] * count)
        single = [sequence.attend(layer, q[layer, t : t + 1]) for t in range(count)]
        for t, one in enumerate(single):
            assert torch.equal(together.out[t], one.out[0])
        moved = [one.moved_row_count for one in single]
        assert max(moved) <= together.moved_row_count < sum(moved)
