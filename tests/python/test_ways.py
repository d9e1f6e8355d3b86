"""Decode steps by every way: in place, by a doorbell and in messages.

Each scenario runs with a client of each carrier, and compares bits with those of the calls Append
and Attend, or with values written out here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from daemon_process import device as daemon_device
from daemon_process import on_gpu
from helpers import delete_model, held
from spillway_kv import Client, Model, Policy
from spillway_kv._native import Carrier
from step_scene import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    LENGTHS,
    SHAPES,
    Scene,
    normal,
    scene_of,
    tensors,
)

pytestmark = pytest.mark.transports("messages", "doorbell", "embedded")

COUNT = len(LENGTHS)


@pytest.fixture
def scene(client: Client, model: Model, rng: np.random.Generator) -> Scene:
    return scene_of(client, model, rng)


# Shapes, strides and types.


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_gives_what_append_and_attend_give(
    scene: Scene, rng: np.random.Generator, tokens: int
) -> None:
    for steps in (1, 2):
        with scene.client.begin_step(scene.sequences, token_count=tokens) as step:
            assert step.starts == tuple(sequence.token_count for sequence in scene.alone)
            for layer in (1, 0):  # in any order
                rows = tensors(rng, tokens)
                out, lse = scene.check(step, layer, *rows)
                assert (out.shape, out.dtype) == (rows[0].shape, np.float32)
                assert (lse.shape, lse.dtype) == (rows[0].shape[:3], np.float32)
        wanted = [length + steps * tokens for length in LENGTHS]
        assert [sequence.token_count for sequence in scene.sequences] == wanted
        assert scene.lengths() == [(length, length) for length in wanted]


def test_each_client_has_its_carrier(
    request: pytest.FixtureRequest, scene: Scene, rng: np.random.Generator
) -> None:
    """Otherwise a scenario would be tested with one carrier twice."""
    carriers = {
        "messages": Carrier.MESSAGES,
        "doorbell": Carrier.DOORBELL,
        "embedded": Carrier.IN_PLACE,
    }
    transport = request.node.callspec.params["client"]
    with scene.client.begin_step(scene.sequences) as step:
        step.attend(0, *tensors(rng))
        assert step.state.native is not None
        assert step.state.native.carrier()[0] == carriers[transport]
    assert scene.client.step_transport == transport


def _layouts() -> dict[str, Callable[[Any, Any, Any], tuple[Any, Any, Any]]]:
    """Other places of q [B, T, H_q, d], k and v [B, H_kv, T, d], with the same elements."""

    def placed(array: Any, *order: int) -> Any:
        """Its memory has the dimensions in this order."""
        back = [order.index(i) for i in range(4)]
        return np.ascontiguousarray(array.transpose(order)).transpose(back)

    def gaps(array: Any, axis: int) -> Any:
        """Behind each index of an axis is memory that is not the array's."""
        wide = np.full((*array.shape[: axis + 1], 2, *array.shape[axis + 1 :]), np.nan, np.float32)
        view: Any = np.moveaxis(wide, axis + 1, 0)[0]
        view[...] = array
        return view

    def one_projection(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        whole = np.concatenate([q, k.swapaxes(1, 2), v.swapaxes(1, 2)], axis=2)
        k_at, v_at = HEADS, HEADS + KV_HEADS
        return (
            whole[:, :, :k_at],
            whole[:, :, k_at:v_at].swapaxes(1, 2),
            whole[:, :, v_at:].swapaxes(1, 2),
        )

    return {
        "one projection": one_projection,
        "heads first": lambda q, k, v: (
            placed(q, 2, 0, 1, 3),
            placed(k, 1, 0, 2, 3),
            placed(v, 0, 2, 1, 3),
        ),
        "tokens first": lambda q, k, v: (
            placed(q, 1, 0, 2, 3),
            placed(k, 2, 0, 1, 3),
            placed(v, 2, 1, 0, 3),
        ),
        "gaps between sequences": lambda q, k, v: (gaps(q, 0), gaps(k, 0), v),
        "gaps between the second": lambda q, k, v: (gaps(q, 1), k, gaps(v, 1)),
        "gaps between the third": lambda q, k, v: (gaps(q, 2), gaps(k, 2), v),
        "gaps between elements": lambda q, k, v: (gaps(q, 3), gaps(k, 3), gaps(v, 3)),
        "backwards": lambda q, k, v: (
            q[::-1, ::-1].copy()[::-1, ::-1],
            k[..., ::-1].copy()[..., ::-1],
            v[:, ::-1].copy()[:, ::-1],
        ),
    }


LAYOUTS = _layouts()


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tensors_lie_anywhere(
    client: Client, model: Model, rng: np.random.Generator, layout: Any, tokens: int
) -> None:
    scene = scene_of(client, model, rng, (40, 7, 0))
    with client.begin_step(scene.sequences, token_count=tokens) as step:
        for layer in range(LAYERS):
            rows = tensors(rng, tokens, 3)
            placed = layout(*rows)
            for array, view in zip(rows, placed, strict=True):
                np.testing.assert_array_equal(array, view)
            scene.check(step, layer, *placed)


def test_rows_that_sequences_share(client: Client, model: Model, rng: np.random.Generator) -> None:
    """A stride of 0."""
    scene = scene_of(client, model, rng, (40, 7, 0))
    q, k, v = tensors(rng, 2, 3)
    with client.begin_step(scene.sequences, token_count=2) as step:
        scene.check(step, 0, np.broadcast_to(q[:1], q.shape), np.broadcast_to(k[:1], k.shape), v)


@pytest.mark.parametrize("rows", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("q_type", "out_type"), [(None, None), (None, "float32"), ("float32", None)]
)
def test_types(
    client: Client, rng: np.random.Generator, rows: Any, q_type: str | None, out_type: Any
) -> None:
    model = client.create_model(**SHAPES, dtype=rows)
    scene = scene_of(client, model, rng, (0, 0))
    with client.begin_step(scene.sequences, token_count=3) as step:
        for layer in range(LAYERS):
            q, k, v = (torch.from_numpy(x) for x in tensors(rng, 3, 2))
            dtype = getattr(torch, rows)
            q = q.to(getattr(torch, q_type or rows))
            out, lse = scene.check(step, layer, q, k.to(dtype), v.to(dtype), out_dtype=out_type)
            assert out.dtype == getattr(torch, out_type or q_type or rows)
            assert lse.dtype == torch.float32
    delete_model(client, model)


def test_a_step_larger_than_a_message(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    """Than a doorbell of a small step, too."""
    small = scene_of(client, model, rng, (7,))
    shapes: dict[str, Any] = {"query_head_count": 32, "kv_head_count": 8, "head_dim": 128}
    wide = client.create_model(layer_count=1, dtype="float32", **shapes)
    large = scene_of(client, wide, rng, (0,) * 20)
    q = normal(rng, 16, 20, 32, 128).swapaxes(0, 1)
    k, v = normal(rng, 2, 20, 8, 16, 128)
    for _ in range(2):
        with client.begin_step(small.sequences) as step:
            for layer in range(LAYERS):
                small.check(step, layer, *tensors(rng, 1, 1))
        with client.begin_step(large.sequences, token_count=16) as step:
            large.check(step, 0, q, k, v)
    delete_model(client, wide)


def test_equals_attention_computed_here(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    sequence = client.create_sequence(model)
    k, v = normal(rng, 2, LAYERS, KV_HEADS, 30, DIM)
    sequence.append(0, 0, k[:, :, :28], v[:, :, :28])
    q = normal(rng, 1, 2, HEADS, DIM)
    with client.begin_step([sequence], token_count=2) as step:
        out, lse = step.attend(1, q, k[1:, :, 28:], v[1:, :, 28:])
    for t in range(2):
        for h in range(HEADS):
            seen = slice(0, 29 + t)
            logits = (k[1, h // 2, seen].astype(np.float64) @ q[0, t, h]) / np.sqrt(DIM)
            weights = np.exp(logits)
            np.testing.assert_allclose(lse[0, t, h], np.log(weights.sum()), rtol=1e-5)
            np.testing.assert_allclose(
                out[0, t, h], weights @ v[1, h // 2, seen] / weights.sum(), rtol=1e-4, atol=1e-5
            )


# Results.


def test_sums_are_those_of_the_results(scene: Scene, rng: np.random.Generator) -> None:
    with scene.client.begin_step(scene.sequences, token_count=3) as step:
        for layer in range(LAYERS):
            step.attend(layer, *tensors(rng, 3))
            sums, results = step.sums(), step.results()
            assert sums.attend_count == 3 * COUNT
            touched = sum(result.touched_row_counts.sum() for result in results)
            assert sums.touched_row_count == touched > 0
            # Query t of a sequence sees the tokens before the step and t + 1 new ones.
            visible = sum(length + t for length in LENGTHS for t in (1, 2, 3))
            assert sums.visible_row_count == visible * KV_HEADS
            promises = [str(p) for r in results for p in r.certificate.promises.ravel()]
            assert sums.exact_count == promises.count("exact")
            assert sums.statistical_count == promises.count("statistical")
            assert sums.none_count == promises.count("none")
            assert len(promises) == 3 * HEADS * COUNT
            # Only attention to the first sequence is sparse.
            assert set(promises[3 * HEADS :]) == {"exact"}
            assert "statistical" in promises
            errors = np.concatenate([r.certificate.relative_errors.ravel() for r in results])
            errors = errors[np.isfinite(errors)]
            assert sums.certified_error_count == len(errors)
            assert sums.certified_error_sum == pytest.approx(errors.sum(dtype=np.float64))
            times = [result.message.statistics.device_time_us for result in results]
            assert sums.device_time_us == pytest.approx(sum(times))
            assert min(times) > 0


def test_a_policy_holds_for_the_step(scene: Scene, rng: np.random.Generator) -> None:
    policy = Policy(selector="all")
    with scene.client.begin_step(scene.sequences, policy=policy) as step:
        step.attend(0, *tensors(rng))
        for result, length in zip(step.results(), LENGTHS, strict=True):
            assert (result.touched_row_counts == length + 1).all()
            assert set(result.certificate.promises.ravel()) == {"exact"}


def test_results_are_those_of_the_layer_that_was_attended_last(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    """Also if those of another layer were asked for before. Layer 1 reads all its rows."""
    length = 6000
    sequence = client.create_sequence(model)
    sequence.append(0, 0, *normal(rng, 2, LAYERS, KV_HEADS, length, DIM))
    policy = Policy(dense_token_count=1024, dense_layers=[1])
    layers = [tensors(rng, count=1) for _ in range(LAYERS)]
    with client.begin_step([sequence], policy=policy) as step:
        for layer in (0, 1, 0, 1):
            out, _ = step.attend(layer, *layers[layer])
            for _ in range(2):
                (result,) = step.results()
                np.testing.assert_array_equal(result.out, out[0])
                assert (result.touched_row_counts == length + 1).all() == (layer == 1)
                assert (result.certificate.promises == "exact").all() == (layer == 1)


def raw_result_count(step: spillway_kv.DecodeStep) -> int:
    """How many results libspillway has. The client asks for them only after an attend."""
    assert step.state.native is not None
    return len(step.state.native.results())


def test_there_are_no_results_of_earlier_steps_or_attends(
    scene: Scene, rng: np.random.Generator
) -> None:
    q, k, v = tensors(rng)
    for _ in range(2):
        with scene.client.begin_step(scene.sequences, starts=LENGTHS) as step:
            assert raw_result_count(step) == 0
            with pytest.raises(ValueError, match="no layer was attended"):
                step.results()
            step.attend(0, q, k, v)
            assert raw_result_count(step) == COUNT
            with pytest.raises(spillway_kv.AlreadyExists):
                step.attend(0, q, k + 1, v)
            assert raw_result_count(step) == 0
            with pytest.raises(ValueError, match="the last attend failed"):
                step.results()


# The same step again, and several steps.


def test_a_step_is_served_once(scene: Scene, rng: np.random.Generator) -> None:
    """Attends, appended rows and rows that are read are counted as those of the calls."""
    before = scene.work(scene.sequences)
    with scene.client.begin_step(scene.sequences, token_count=2) as step:
        for layer in range(LAYERS):
            scene.check(step, layer, *tensors(rng, 2))
    alone, after = scene.work(scene.alone), scene.work(scene.sequences)
    assert [work[:2] for work in alone] == [(2 * LAYERS, 2 * LAYERS * KV_HEADS)] * COUNT
    for was, now, one in zip(before, after, alone, strict=True):
        assert tuple(b - a for a, b in zip(was, now, strict=True)) == one


def test_a_step_of_which_some_layers_are_there_is_said_again(
    scene: Scene, rng: np.random.Generator
) -> None:
    client, sequences = scene.client, scene.sequences
    layers = [tensors(rng, 2) for _ in range(LAYERS)]
    with client.begin_step(sequences, token_count=2) as step:
        starts = step.starts
        first = scene.check(step, 1, *layers[1])
    for _ in range(2):
        with client.begin_step(sequences, token_count=2, starts=starts) as step:
            assert step.starts == starts == LENGTHS
            for _ in range(2):
                for wanted, again in zip(first, step.attend(1, *layers[1]), strict=True):
                    np.testing.assert_array_equal(wanted, again)
            step.attend(0, *layers[0])
            assert step.results()[0].certificate is not None
    assert scene.lengths() == [(n + 2, n + 2) for n in LENGTHS]
    with client.begin_step(sequences, token_count=2, starts=starts) as step:
        q, k, v = layers[0]
        with pytest.raises(spillway_kv.AlreadyExists):
            step.attend(0, q, k + 1, v)
    assert scene.lengths() == [(n + 2, n + 2) for n in LENGTHS]


def test_steps_take_turns(scene: Scene, rng: np.random.Generator) -> None:
    """Of several open steps each has its own tensors, results and errors."""
    steps = [scene.client.begin_step([sequence]) for sequence in scene.sequences]
    for layer in range(LAYERS):
        q, k, v = tensors(rng)
        wanted = scene.answers(layer, q, k, v)
        outs = []
        for i, step in enumerate(steps):
            at = slice(i, i + 1)
            outs.append(step.attend(layer, q[at], k[at], v[at]))
        for i, (step, (out, lse)) in enumerate(zip(steps, outs, strict=True)):
            np.testing.assert_array_equal(out[0], wanted[i].out)
            np.testing.assert_array_equal(lse[0], wanted[i].lse)
            (result,) = step.results()
            assert list(result.message.certificate.visible_token_counts) == [LENGTHS[i] + 1] * HEADS
    with pytest.raises(spillway_kv.AlreadyExists):
        steps[0].attend(1, q[:1], k[:1] + 1, v[:1])
    steps[1].results()
    for step in steps:
        step.close()
    assert scene.lengths() == [(length + 1, length + 1) for length in LENGTHS]


def test_steps_of_several_threads(scene: Scene, rng: np.random.Generator) -> None:
    layers = [[tensors(rng) for _ in range(LAYERS)] for _ in range(10)]
    got: dict[tuple[int, int, int], Any] = {}

    def run(i: int) -> None:
        at = slice(i, i + 1)
        for t, step_layers in enumerate(layers):
            with scene.client.begin_step(scene.sequences[at]) as step:
                for layer, (q, k, v) in enumerate(step_layers):
                    got[t, layer, i] = step.attend(layer, q[at], k[at], v[at])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(COUNT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for t, step_layers in enumerate(layers):
        for layer, rows in enumerate(step_layers):
            for i, one in enumerate(scene.answers(layer, *rows)):
                out, lse = got[t, layer, i]
                np.testing.assert_array_equal(out[0], one.out)
                np.testing.assert_array_equal(lse[0], one.lse)
    assert scene.lengths() == [(length + 10, length + 10) for length in LENGTHS]


def test_closed_steps_hold_nothing(client: Client, model: Model, rng: np.random.Generator) -> None:
    """Neither rows of sequences that are deleted, nor memory for more steps than are open."""
    with client.begin_step([client.create_sequence(model)]) as step:
        step.attend(0, *tensors(rng, 1, 1))
    before, others = held(client), client.statistics().memory.other_bytes
    scene = scene_of(client, model, rng, (7,) * 9)
    steps = [client.begin_step([sequence]) for sequence in scene.sequences]
    for step in steps:
        step.attend(0, *tensors(rng, 1, 1))
    for step in steps:
        step.close()
    for sequence in (*scene.sequences, *scene.alone):
        sequence.delete()
    assert held(client) == before
    # A client keeps four doorbells, of 144 KiB.
    assert client.statistics().memory.other_bytes - others <= 4 * (144 << 10)


def test_steps_that_stop_in_the_middle_hold_nobody_up(
    client: Client, model: Model, rng: np.random.Generator
) -> None:
    """More stalled steps than any device serves at once, and one step that continues."""
    lanes = client.server_info.devices[0].thread_count
    sequences = [client.create_sequence(model) for _ in range(lanes + 3)]
    stalled = []
    for sequence in sequences[:-1]:
        step = client.begin_step([sequence])
        step.attend(0, *tensors(rng, count=1))
        stalled.append(step)
    for _ in range(5):
        with client.begin_step(sequences[-1:]) as step:
            for layer in range(LAYERS):
                step.attend(layer, *tensors(rng, count=1))
    # Stalled steps can also continue later.
    for step in reversed(stalled):
        step.attend(1, *tensors(rng, count=1))
        step.close()
    assert {s.refresh().layer_token_counts for s in sequences} == {(1, 1), (5, 5)}


@pytest.mark.skipif(not on_gpu(), reason="SPILLWAY_TEST_DEVICE names no GPU")
def test_cuda_tensors_of_steps_one_after_the_other(scene: Scene, rng: np.random.Generator) -> None:
    """Each step attends to tensors that the stream has yet to write."""
    client, device = scene.client, daemon_device()
    for _ in range(5):
        # Long enough that a copy that did not wait for it would read old values.
        busy = torch.randn(4096, 4096, device=device)
        with client.begin_step(scene.sequences) as step, client.begin_step(scene.alone) as other:
            for layer in range(LAYERS):
                wanted = tensors(rng)
                on_device = [torch.zeros(x.shape, device=device) for x in wanted]
                pinned = [torch.from_numpy(x).pin_memory() for x in wanted]
                for _ in range(20):
                    busy = busy @ busy / 64
                for to, of in zip(on_device, pinned, strict=True):
                    to.copy_(of, non_blocking=True)
                out, lse = step.attend(layer, *on_device)
                assert (out.device.type, lse.device.type) == ("cuda", "cuda")
                expected, sums = other.attend(layer, *wanted)
                np.testing.assert_array_equal(out.cpu().numpy(), expected)
                np.testing.assert_array_equal(lse.cpu().numpy(), sums)
