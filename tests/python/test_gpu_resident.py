"""All rows of used sequences are kept in GPU memory: same bits, and no rows over the link."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest
import spillway_kv
import torch
from daemon_process import binary, device, on_gpu
from spillway_kv import Client, Model, Policy, Sequence, TopK
from spillway_kv.lab.serving import prefer_library

pytestmark = pytest.mark.skipif(
    not on_gpu() or "," in device(), reason="counts the memory of one GPU"
)

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64
TOKENS = 4096
# A sequence of TOKENS takes 4 MiB, and with one token more up to 8, because the copies of each
# layer take 2 MiB at a time. So one fits, and the first layer of two.
LIMIT = 10 << 20
POLICIES = [Policy(), Policy(selector="all"), Policy(heavy=TopK(fraction=0.02), tail="none")]


def connect(
    limit: int, *, reproducible: bool = True, memory: str = "4GiB", workspace: str = "0"
) -> Client:
    prefer_library(binary())
    settings = {
        "memory.limit": "2GiB",
        "device.name": device(),
        "models.sampling_seed": "0",
        "device.gpu_memory_limit": memory,
        "device.gpu_workspace": workspace,
        "device.gpu_resident_limit": str(limit),
        "device.reproducible": "true" if reproducible else "false",
    }
    return spillway_kv.connect("embedded:", settings=settings)


@pytest.fixture(scope="module")
def plain() -> Iterator[Client]:
    """An engine whose attends read rows over the link."""
    with connect(0) as client:
        yield client


@pytest.fixture
def resident() -> Iterator[Client]:
    with connect(LIMIT) as client:
        yield client


def create_model(client: Client) -> Model:
    return client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="bfloat16",
    )


@functools.lru_cache(maxsize=4)
def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def filled(client: Client, model: Model, seed: int, where: str = "cpu") -> Sequence:
    sequence = client.create_sequence(model)
    k, v = normal(seed, 2, LAYERS, KV_HEADS, TOKENS, DIM).to(where)
    for start in (0, TOKENS // 2 + 3):
        end = TOKENS // 2 + 3 if start == 0 else TOKENS
        sequence.append(0, start, k[:, :, start:end], v[:, :, start:end])
    return sequence


def step(
    client: Client, sequence: Sequence, seed: int, policy: Policy
) -> tuple[list[torch.Tensor], int]:
    """Outputs and log-sum-exps of all layers, and the number of rows that came over the link."""
    q = normal(seed, LAYERS, 1, 1, HEADS, DIM)
    k, v = normal(seed + 1, 2, LAYERS, 1, KV_HEADS, 1, DIM)
    outs, moved = [], 0
    with client.begin_step([sequence], policy=policy) as step:
        for layer in range(LAYERS):
            outs += list(step.attend(layer, q[layer], k[layer], v[layer]))
            moved += step.results()[0].moved_row_count
    return outs, moved


def used(client: Client) -> int:
    (gpu,) = client.get_server_info().devices
    assert gpu.resident_limit_bytes <= LIMIT
    assert gpu.memory_used_bytes <= gpu.memory_limit_bytes
    return gpu.resident_used_bytes


@pytest.mark.parametrize("where", ["cpu", device() or "cuda:0"])
def test_the_same_bits_without_the_link(plain: Client, resident: Client, where: str) -> None:
    mine = filled(resident, create_model(resident), 1, where)
    other = filled(plain, create_model(plain), 1, where)
    assert used(resident) == 4 << 20
    assert used(plain) == 0
    for seed in range(300):  # pages fill during these steps
        policy = POLICIES[seed % 3]
        outs, moved = step(resident, mine, seed, policy)
        wanted, over_the_link = step(plain, other, seed, policy)
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True)), seed
        assert moved == 0
        assert over_the_link > 0
    fork = mine.fork()
    fork.truncate(TOKENS - 700)
    q = np.random.default_rng(3).standard_normal((40, HEADS, DIM), np.float32)
    for policy in POLICIES:
        a = fork.attend(1, q, policy)
        b = other.attend(1, q, policy, [TOKENS - 700 - 39 + t for t in range(40)])
        np.testing.assert_array_equal(a.out, b.out)
        assert a.moved_row_count == 0
    mine.truncate(TOKENS // 2)
    other.truncate(TOKENS // 2)
    for seed in range(3):
        outs, moved = step(resident, mine, seed, POLICIES[seed])
        wanted, _ = step(plain, other, seed, POLICIES[seed])
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True)), seed
        assert moved == 0


def test_a_decoder_reads_them_too(plain: Client, resident: Client) -> None:
    outs = []
    for client in (plain, resident):
        sequence = filled(client, create_model(client), 5)
        with client.open_decoder([sequence]) as decoder:
            for t in range(150):
                decoder.next()
                q = normal(t, LAYERS, 1, 1, HEADS, DIM).cuda()
                k, v = normal(t + 1, 2, LAYERS, 1, KV_HEADS, 1, DIM).cuda()
                outs += [decoder.attend(i, q[i], k[i], v[i])[0].clone() for i in range(LAYERS)]
        # What the decoder appended is also complete.
        sequence_outs, moved = step(client, sequence, 9, POLICIES[1])
        outs += sequence_outs
        assert (moved == 0) == (client is resident)
    half = len(outs) // 2
    assert all(torch.equal(a, b) for a, b in zip(outs[:half], outs[half:], strict=True))


def test_a_layer_loses_its_copies_while_steps_run(plain: Client, resident: Client) -> None:
    """Other sequences come, and take the room while the GPU still reads the copies."""
    made = []
    for client in (plain, resident):
        model = create_model(client)
        sequence = filled(client, model, 5)
        outs, others, moved = [], [], []
        with client.open_decoder([sequence], policy=POLICIES[1]) as decoder:
            for t in range(60):
                decoder.next()
                if t in {20, 30, 40}:
                    others.append(filled(client, model, t, device() or "cuda:0"))
                q = normal(t, LAYERS, 1, 1, HEADS, DIM).cuda()
                k, v = normal(t + 1, 2, LAYERS, 1, KV_HEADS, 1, DIM).cuda()
                outs += [decoder.attend(i, q[i], k[i], v[i])[0].clone() for i in range(LAYERS)]
                if t in {19, 59}:
                    moved += [decoder.results(i)[0].moved_row_count for i in range(LAYERS)]
        for other in others:
            step_outs, _ = step(client, other, 9, POLICIES[1])
            outs += step_outs
        made.append(outs)
    assert moved == [0, 0, 0, KV_HEADS * (TOKENS + 60)]
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert used(resident) <= LIMIT


def test_codes_take_the_room_of_copies(plain: Client) -> None:
    """48 MiB for both, of which copies may take 40. More and more sequences come."""
    mib = 1 << 20
    held: list[Sequence] = []
    with connect(40 * mib, memory="64MiB", workspace="16MiB") as client:
        model = create_model(client)
        first = [filled(client, model, seed) for seed in (1, 2)]
        expected = create_model(plain)
        wanted = [filled(plain, expected, seed) for seed in (1, 2)]
        (gpu,) = client.get_server_info().devices
        assert gpu.resident_used_bytes == 8 * mib
        with (
            client.open_decoder(first, policy=POLICIES[1]) as decoder,
            plain.open_decoder(wanted, policy=POLICIES[1]) as other,
        ):
            for t in range(100):
                moved = []
                for each in (decoder, other):
                    each.next()
                    q = normal(t, LAYERS, 2, 1, HEADS, DIM).cuda()
                    k, v = normal(t + 1, 2, LAYERS, 2, KV_HEADS, 1, DIM).cuda()
                    moved.append([each.attend(i, q[i], k[i], v[i])[0] for i in range(LAYERS)])
                assert all(torch.equal(a, b) for a, b in zip(*moved, strict=True)), t
                (gpu,) = client.get_server_info().devices
                if gpu.memory_used_bytes >= 54 * mib:
                    break
                assert gpu.memory_used_bytes + gpu.resident_used_bytes <= 64 * mib
                held.append(filled(client, model, 3))
            rows = [decoder.results(i)[0].moved_row_count for i in range(LAYERS)]
        # Copies would not leave 38 MiB to codes. The sequences in use keep those of one layer.
        assert gpu.memory_used_bytes >= 54 * mib
        assert len(held) > 20
        assert rows == [0, KV_HEADS * (TOKENS + t + 1)]
        outs, _ = step(client, held[-1], 9, POLICIES[0])
        outs_wanted, _ = step(plain, filled(plain, expected, 3), 9, POLICIES[0])
        assert all(torch.equal(a, b) for a, b in zip(outs, outs_wanted, strict=True))


def test_steps_ask_for_the_room_of_their_tokens(plain: Client) -> None:
    """Six prompts, with room for their copies and for a page more of each.

    If each sequence might append as much as its last prompt, one layer would not fit.
    """
    count, mib = 6, 1 << 20
    made = []
    with connect(36 * mib) as client:
        for each in (client, plain):
            model = create_model(each)
            sequences = [filled(each, model, seed) for seed in range(count)]
            with each.open_decoder(sequences, policy=POLICIES[1]) as decoder:
                decoder.next()
                q = normal(9, LAYERS, count, 1, HEADS, DIM).cuda()
                k, v = normal(10, 2, LAYERS, count, KV_HEADS, 1, DIM).cuda()
                outs = [decoder.attend(i, q[i], k[i], v[i])[0].clone() for i in range(LAYERS)]
                moved = [r.moved_row_count for i in range(LAYERS) for r in decoder.results(i)]
            made.append((outs, moved))
        (gpu,) = client.get_server_info().devices
        assert gpu.resident_used_bytes == 28 * mib
    assert made[0][1] == [0] * (LAYERS * count)
    assert made[1][1] == [KV_HEADS * (TOKENS + 1)] * (LAYERS * count)
    assert all(torch.equal(a, b) for a, b in zip(made[0][0], made[1][0], strict=True))


@pytest.mark.parametrize(
    ("workspace", "text"),
    [
        ("15MiB", "--gpu-workspace: 15728640 bytes are not in [16777216, 2147483648]"),
        ("2049MiB", "--gpu-workspace: 2148532224 bytes are not in [16777216, 2147483648]"),
    ],
)
def test_workspaces_have_limits(workspace: str, text: str) -> None:
    with pytest.raises(spillway_kv.InvalidArgument, match=re.escape(text)):
        connect(0, workspace=workspace)


def decoded(
    client: Client, sequence: Sequence, policy: Policy, count: int
) -> tuple[list[torch.Tensor], list[set[str]]]:
    """Outputs of all layers of steps on a stream, and the promises of each step."""
    outs, promises = [], []
    with client.open_decoder([sequence], policy=policy) as decoder:
        for t in range(count):
            decoder.next()
            q = normal(t, LAYERS, 1, 1, HEADS, DIM).cuda()
            k, v = normal(t + 1, 2, LAYERS, 1, KV_HEADS, 1, DIM).cuda()
            outs += [decoder.attend(i, q[i], k[i], v[i])[0].clone() for i in range(LAYERS)]
            results = [decoder.results(i)[0] for i in range(LAYERS)]
            promises.append({p for each in results for p in each.certificate.promises.flat})
    return outs, promises


def test_dense_while_all_rows_are_there(plain: Client) -> None:
    exact = Policy(selector="all")
    with connect(LIMIT, reproducible=False) as client:
        model = create_model(client)
        sequence = filled(client, model, 5)
        outs, promises = decoded(client, sequence, Policy(), 20)
        other = filled(plain, create_model(plain), 5)
        wanted, _ = decoded(plain, other, exact, 20)
        assert promises == [{"exact"}] * 20
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
        # A caller who asks for certain rows gets these.
        top = Policy(heavy=TopK(fraction=0.02), tail="none")
        outs, _ = decoded(client, sequence, top, 3)
        wanted, _ = decoded(plain, other, top, 3)
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
        # With two sequences there is room for copies of their first layer. The second one is
        # sparse. The first sequence keeps its room while a decoder holds it.
        with client.open_decoder([sequence]):
            outs, promises = decoded(client, filled(client, model, 2), Policy(), 3)
        other = filled(plain, create_model(plain), 2)
        of_first, _ = decoded(plain, other.fork(), exact, 3)
        of_second, _ = decoded(plain, other, Policy(), 3)
        assert all(torch.equal(a, b) for a, b in zip(outs[::2], of_first[::2], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(outs[1::2], of_second[1::2], strict=True))
        assert promises != [{"exact"}] * 3


@pytest.mark.parametrize("count", [2, 60])
def test_exact_attends_run_beside_the_others(count: int) -> None:
    """Some sequences attend to all rows, the others to rows that codes choose.

    With 60 sequences the others have more units than a lane takes, so there are two lanes.
    """
    policies = [Policy() if i % 3 else Policy(selector="all") for i in range(count)]
    outs: list[list[torch.Tensor]] = []
    for limit in (0, LIMIT):
        with connect(limit) as client:
            model = create_model(client)
            sequences = []
            for i, policy in enumerate(policies):
                sequences.append(client.create_sequence(model, policy=policy))
                sequences[-1].append(0, 0, *normal(i % 3, 2, LAYERS, KV_HEADS, TOKENS, DIM))
            made = []
            with client.open_decoder(sequences) as decoder:
                for t in range(4):
                    decoder.next()
                    q = normal(50 + t, LAYERS, count, 1, HEADS, DIM).cuda()
                    k, v = normal(60 + t, 2, LAYERS, count, KV_HEADS, 1, DIM).cuda()
                    for layer in range(LAYERS):
                        made.append(decoder.attend(layer, q[layer], k[layer], v[layer])[0].clone())
                decoder.finish()
                assert {s.token_count for s in sequences} == {TOKENS + 4}
            outs.append(made)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert all(each.isfinite().all() for each in outs[0])


def test_the_idle_give_theirs_up_and_get_them_back(plain: Client, resident: Client) -> None:
    model = create_model(resident)
    # Made before, so that the first sequence is not idle for long.
    normal(2, 2, LAYERS, KV_HEADS, TOKENS, DIM)
    first = filled(resident, model, 1)
    assert step(resident, first, 0, POLICIES[1])[1] == 0
    # The first sequence was just used. With the second one there is room for copies of one layer.
    second = filled(resident, model, 2)
    assert step(resident, first, 1, POLICIES[1])[1] == KV_HEADS * (TOKENS + 2)
    assert step(resident, second, 1, POLICIES[1])[1] == KV_HEADS * (TOKENS + 1)
    time.sleep(1.1)
    third = filled(resident, model, 3)
    assert step(resident, third, 2, POLICIES[1])[1] == 0
    # The first sequence gave up its room, and its attends are unchanged.
    other = filled(plain, create_model(plain), 1)
    for seed in (0, 1):
        step(plain, other, seed, POLICIES[1])
    outs, moved = step(resident, first, 4, POLICIES[1])
    wanted, over_the_link = step(plain, other, 4, POLICIES[1])
    assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    assert moved == over_the_link == LAYERS * KV_HEADS * (TOKENS + 3)
    # As many bytes came over the link as a copy takes, but no other sequence is idle.
    assert step(resident, third, 5, POLICIES[1])[1] == 0
    assert step(resident, first, 5, POLICIES[1])[1] > 0
    third.delete()
    second.delete()
    step(plain, other, 5, POLICIES[1])
    for seed in (6, 7, 8):
        outs, moved = step(resident, first, seed, POLICIES[1])
        wanted, _ = step(plain, other, seed, POLICIES[1])
        assert all(torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))
    assert moved == 0
    assert used(resident) <= LIMIT


def test_a_limit_that_leaves_nothing_is_refused() -> None:
    text = "--gpu-resident-limit: 3221225472 bytes are more than 3131746989"
    with pytest.raises(spillway_kv.InvalidArgument, match=re.escape(text)):
        connect(3 << 30)
