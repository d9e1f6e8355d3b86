"""More than 16 query heads for each KV head: they are attended in equal groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from daemon_process import on_gpu
from helpers import delete_model
from helpers import step as step_of_one
from random_llama import generate, llama, prompt
from reference import dense_attention
from spillway_kv import Client, Model, Policy
from spillway_kv.transformers import AttendEvent, SpillwayCache

pytestmark = pytest.mark.transports("doorbell", "embedded")

KV_HEADS, DIM, TOKENS = 2, 32, 3000
ALL = Policy(selector="all")
# Query heads for each KV head, and the groups that they are attended in.
SIZES = [(17, 17), (32, 2), (48, 3), (71, 71)]


def rows(seed: int, *shape: int) -> np.ndarray:
    """Keys of different lengths, of which few are near a query."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(shape) * random.exponential(1, (*shape[:-1], 1))).astype("f4")


K, V = rows(1, 1, KV_HEADS, TOKENS, DIM), rows(2, 1, KV_HEADS, TOKENS, DIM) + np.float32(0.5)


@pytest.fixture(params=SIZES, ids=lambda size: f"{size[0]} heads")
def scene(request: pytest.FixtureRequest, client: Client) -> Iterator[tuple[Model, int, int]]:
    """A model, its query heads for each KV head, and the number of their groups."""
    heads, groups = request.param
    model = client.create_model(
        layer_count=1,
        query_head_count=KV_HEADS * heads,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="float32",
        policy=Policy(dense_token_count=1024),
    )
    yield model, heads, groups
    delete_model(client, model)


def distances(out: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Relative errors [T, H_q]."""
    made: np.ndarray = np.linalg.norm(out - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return made


def test_attends(client: Client, scene: tuple[Model, int, int]) -> None:
    """Counts of rows are by group; exact attention and certificates are true."""
    model, heads, groups = scene
    q = rows(3, 2, KV_HEADS * heads, DIM)
    wanted, _ = dense_attention(q, K[0], V[0])
    sequence = client.create_sequence(model)
    sequence.append(0, 0, K, V)
    dense = sequence.attend(0, q, ALL)
    assert distances(dense.out, wanted).max() < 1e-5
    seen = np.array([[TOKENS - 1], [TOKENS]])
    assert np.array_equal(dense.touched_row_counts, seen.repeat(KV_HEADS * groups, 1))
    sparse = sequence.attend(0, q)
    assert sparse.touched_row_counts.shape == (2, KV_HEADS * groups)
    assert (sparse.touched_row_counts <= seen).all()
    promised = sparse.certificate.promises == "statistical"
    errors = distances(sparse.out, wanted)
    assert (errors[promised] <= sparse.certificate.epsilon).mean() >= 0.9
    work = client.statistics(model).models[0].work
    touched = int(dense.touched_row_counts.sum() + sparse.touched_row_counts.sum())
    assert work.touched_row_count == touched
    assert work.visible_row_count == 2 * int(dense.touched_row_counts.sum())


def test_select_and_fetch(client: Client, scene: tuple[Model, int, int]) -> None:
    """Each group has its rows; attention to them is what an attend answers."""
    model, heads, groups = scene
    q = rows(4, 1, KV_HEADS * heads, DIM)
    size = heads // groups
    sequence = client.create_sequence(model)
    sequence.append(0, 0, K, V)
    out = sequence.attend(0, q).out
    chosen = sequence.select(0, q)
    assert chosen.offsets.shape == (KV_HEADS * groups + 1,)
    k, v = sequence.fetch(0, selection=chosen)
    for group in range(KV_HEADS * groups):
        place = slice(chosen.offsets[group], chosen.offsets[group + 1])
        tokens = chosen.indices[place]
        assert (np.diff(tokens.astype(np.int64)) > 0).all()
        assert np.array_equal(k[place], K[0, group // groups, tokens])
        assert np.array_equal(v[place], V[0, group // groups, tokens])
        for h in range(group * size, (group + 1) * size):
            logits = k[place] @ q[0, h] / np.sqrt(DIM) + chosen.log_weights[place]
            weights = np.exp(logits - logits.max())
            wanted = weights @ v[place] / weights.sum()
            assert np.linalg.norm(out[0, h] - wanted) < 1e-4 * np.linalg.norm(wanted)
    # A list for each KV head is not one for each group.
    halves = spillway_kv.Selection(offsets=np.array([0, 1, 2]), indices=chosen.indices[:2])
    with pytest.raises(
        spillway_kv.InvalidArgument, match=f"are not {KV_HEADS * groups + 1} values from 0"
    ):
        sequence.fetch(0, selection=halves)
    beyond = spillway_kv.Selection(
        offsets=np.minimum(np.arange(KV_HEADS * groups + 1), 2),
        indices=np.array([TOKENS, 0], np.uint32),
    )
    with pytest.raises(spillway_kv.OutOfRange, match=f"token {TOKENS} is not below"):
        sequence.fetch(0, selection=beyond)


def test_steps(client: Client, scene: tuple[Model, int, int]) -> None:
    """A decode step has the bits of an append and an attend."""
    model, heads, _ = scene
    q = rows(5, 1, KV_HEADS * heads, DIM)
    stepped, whole = (client.create_sequence(model) for _ in range(2))
    stepped.append(0, 0, K[:, :, :-1], V[:, :, :-1])
    whole.append(0, 0, K, V)
    made = step_of_one(stepped, 0, q, K[0, :, -1:], V[0, :, -1:], client=client)
    assert np.array_equal(made.out, whole.attend(0, q).out)


@pytest.mark.skipif(not on_gpu(), reason="needs SPILLWAY_TEST_DEVICE=cuda:N")
@pytest.mark.parametrize("policy", [None, ALL], ids=["default", "all"])
def test_decoders(client: Client, scene: tuple[Model, int, int], policy: Policy | None) -> None:
    """Steps with CUDA tensors, of a sequence and its fork, have the bits of other steps."""
    model, heads, groups = scene
    generator = torch.Generator().manual_seed(6)
    steps = 3
    q = torch.randn(steps, 2, 1, KV_HEADS * heads, DIM, generator=generator)
    k, v = torch.randn(2, steps, 2, KV_HEADS, 1, DIM, generator=generator)
    first = client.create_sequence(model)
    first.append(0, 0, K, V)
    # Forks share their rows, as groups do.
    batch, others = ([first.fork(), first.fork()] for _ in range(2))
    with client.open_decoder(batch, policy=policy) as decoder:
        for t in range(steps):
            with client.begin_step(others, policy=policy) as step:
                out, lse = step.attend(0, q[t], k[t], v[t])
                wanted = step.results()
            decoder.next()
            made, made_lse = decoder.attend(0, q[t].cuda(), k[t].cuda(), v[t].cuda())
            assert torch.equal(made.cpu(), out)
            assert torch.equal(made_lse.cpu(), lse)
            for one, other in zip(decoder.results(0), wanted, strict=True):
                assert one.touched_row_counts.shape == (1, KV_HEADS * groups)
                assert np.array_equal(one.touched_row_counts, other.touched_row_counts)
                errors = one.certificate.relative_errors, other.certificate.relative_errors
                assert np.array_equal(errors[0], errors[1])
            if policy is None:
                # A row that several groups read need not cross the link for each.
                moved = sum(result.moved_row_count for result in decoder.results(0))
                assert moved <= sum(int(one.touched_row_counts.sum()) for one in wanted)


@pytest.fixture
def no_models_left(client: Client) -> Iterator[None]:
    """Deletes the models that caches have made: metrics and `top` list only 16."""
    before = {model.name for model in client.list_models()}
    yield
    for model in client.list_models():
        if model.name not in before:
            delete_model(client, model)


@pytest.mark.usefixtures("no_models_left")
@pytest.mark.parametrize("quality", ["exact", "default"])
def test_a_multi_query_model(client: Client, quality: str) -> None:
    """32 query heads over one KV head; a prompt, decode steps, and sparse ones."""
    shapes: dict[str, Any] = {
        "hidden_size": 256,
        "num_attention_heads": 32,
        "num_key_value_heads": 1,
        "head_dim": 16,
    }
    dense, spilled = llama(**shapes), llama(**shapes)
    spilled.set_attn_implementation("spillway")
    ids = prompt(1, 1500)
    if quality == "exact":
        wanted = generate(dense, ids, max_new_tokens=16)
        with SpillwayCache(spilled.config, client, quality="exact") as cache:
            assert torch.equal(generate(spilled, ids, cache, max_new_tokens=16), wanted)
        return
    policy = Policy(dense_token_count=1024)
    events: list[AttendEvent] = []
    checked = above = 0
    with (
        torch.no_grad(),
        SpillwayCache(spilled.config, client, policy=policy, on_attend=events.append) as cache,
    ):
        spilled(ids[:, :1490], past_key_values=cache)
        for t in range(1490, 1500):
            spilled(ids[:, t : t + 1], past_key_values=cache)
            for event in events:
                true = event.sequence.attend(event.layer, event.query, ALL).out
                error = (event.result.out - true).norm(dim=-1) / true.norm(dim=-1)
                bound = torch.from_numpy(event.result.certificate.relative_errors).to(error)
                checked += error.numel()
                above += int((error > bound + 1e-5).sum())
            events.clear()
        assert 0 < cache.statistics.rows_touched_fraction < 1
    assert checked == 10 * 3 * 32
    assert above <= 0.1 * checked
