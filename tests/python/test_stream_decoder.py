"""Decoding with CUDA tensors equals steps: on streams, in graphs, and through a daemon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from daemon_process import binary, connected, on_gpu, running_daemon
from helpers import refused, wait_for
from spillway_kv import Client, FailedPrecondition, Model, Policy, Sequence
from spillway_kv._proto import admin_service_pb2
from spillway_kv.lab.serving import prefer_library
from spillway_kv.stream import default_token_count_max

GPU = on_gpu()
needs_gpu = pytest.mark.skipif(not GPU, reason="needs SPILLWAY_TEST_DEVICE=cuda:N")

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64


@pytest.mark.parametrize(
    ("now", "room"),
    [(0, 8192), (4096, 8192), (4097, 16384), (16383, 32768), (16384, 32768), (16385, 65536)],
)
def test_a_decoder_has_room_for_as_much_again(now: int, room: int) -> None:
    assert default_token_count_max(now) == room


@pytest.fixture(scope="module", params=["embedded", "daemon"])
def engine(request: pytest.FixtureRequest) -> Iterator[Client]:
    """An embedded engine, or a client of the session's daemon."""
    if request.param == "embedded":
        with connected("embedded", request) as client:
            yield client
    else:
        with spillway_kv.connect(request.getfixturevalue("target")) as client:
            yield client


def captures(engine: Client) -> bool:
    """Skips the test unless attends can be captured."""
    if engine.transport != "embedded":
        pytest.skip("of an engine in this process: a daemon's attends are calls")
    return True


@pytest.fixture(params=["model", "int8"])
def wide(engine: Client, request: pytest.FixtureRequest) -> Iterator[Model]:
    """Two layers, eight query heads over two KV heads of 64, bfloat16, of each row type."""
    model = engine.create_model(
        row_type=request.param,
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="bfloat16",
    )
    yield model
    for sequence in list(engine.list_sequences(model)):
        engine.get_sequence(sequence.name).delete()
    engine.delete_model(model)


def raising(kind: type[Exception], text: str) -> pytest.RaisesExc[Exception]:
    return pytest.raises(kind, match=re.escape(text))


def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.bfloat16)


def filled(engine: Client, model: Model, length: int, seed: int = 3) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    sequence = engine.create_sequence(model)
    if length > 0:
        k, v = normal(generator, 2, LAYERS, KV_HEADS, length, DIM)
        sequence.append(0, 0, k, v)
    return sequence


class Tensors:
    """q, k and v of steps in all layers, on the host and on the GPU."""

    def __init__(self, batch: int, tokens: int, steps: int, seed: int = 7) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.q = normal(generator, steps, LAYERS, batch, tokens, HEADS, DIM)
        self.k = normal(generator, steps, LAYERS, batch, KV_HEADS, tokens, DIM)
        self.v = normal(generator, steps, LAYERS, batch, KV_HEADS, tokens, DIM)

    def of(self, step: int, layer: int, to: str) -> tuple[torch.Tensor, ...]:
        return tuple(x[step, layer].to(to) for x in (self.q, self.k, self.v))


def by_steps(
    engine: Client, sequences: list[Sequence], tensors: Tensors, steps: int, tokens: int, **how: Any
) -> list[Any]:
    """Outputs, log-sum-exps and results of steps through host memory."""
    answers = []
    for t in range(steps):
        with engine.begin_step(sequences, token_count=tokens, **how) as step:
            for layer in range(LAYERS):
                out, lse = step.attend(layer, *tensors.of(t, layer, "cpu"))
                answers.append((out, lse, step.results()))
    return answers


def same(mine: Any, theirs: Any) -> None:
    assert torch.equal(mine.cpu().float(), theirs.float())


@needs_gpu
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("lengths", [(6000,), (3000, 40, 0, 9000), (2040,), (127,)])
def test_gives_the_bits_of_steps(
    engine: Client, wide: Model, lengths: tuple[int, ...], tokens: int
) -> None:
    steps = 12  # pages fill during some of them
    sequences = [filled(engine, wide, length, i) for i, length in enumerate(lengths)]
    others = [filled(engine, wide, length, i) for i, length in enumerate(lengths)]
    tensors = Tensors(len(lengths), tokens, steps)
    expected = iter(by_steps(engine, others, tensors, steps, tokens))
    with engine.open_decoder(sequences, token_count=tokens) as decoder:
        for t in range(steps):
            decoder.next()
            mine = [decoder.attend(layer, *tensors.of(t, layer, "cuda")) for layer in range(LAYERS)]
            for layer, (out, lse) in enumerate(mine):
                their_out, their_lse, results = next(expected)
                same(out, their_out)
                same(lse, their_lse)
                for one, other in zip(decoder.results(layer), results, strict=True):
                    a, b = one.certificate, other.certificate
                    np.testing.assert_array_equal(a.relative_errors, b.relative_errors)
                    np.testing.assert_array_equal(a.promises, b.promises)
                    np.testing.assert_array_equal(one.touched_row_counts, other.touched_row_counts)
    for sequence, length in zip(sequences, lengths, strict=True):
        assert sequence.refresh().token_count == length + steps * tokens
    # The rows are there too: attends through the host are equal.
    q = tensors.q[0, 0, :, :1]
    for i, (sequence, other) in enumerate(zip(sequences, others, strict=True)):
        for layer in range(LAYERS):
            mine_now = sequence.attend(layer, q[i]).out
            same(mine_now, other.attend(layer, q[i]).out)
            exact = sequence.attend(layer, q[i], policy=Policy(selector="all")).out
            same(exact, other.attend(layer, q[i], policy=Policy(selector="all")).out)


@needs_gpu
@pytest.mark.parametrize("steps", [2, 3, 4])
def test_another_decoder_goes_on_where_one_has_ended(
    engine: Client, wide: Model, steps: int
) -> None:
    # A decoder has planned the step that never comes, for some sequences with new pages.
    lengths, count = (6140, 122, 2042, 0), 12
    sequences = [filled(engine, wide, length, i) for i, length in enumerate(lengths)]
    others = [filled(engine, wide, length, i) for i, length in enumerate(lengths)]
    tensors = Tensors(len(lengths), 1, count)
    expected = iter(by_steps(engine, others, tensors, count, 1))
    for first in range(0, count, steps):
        with engine.open_decoder(sequences) as decoder:
            for t in range(first, first + steps):
                decoder.next()
                for layer in range(LAYERS):
                    out, lse = decoder.attend(layer, *tensors.of(t, layer, "cuda"))
                    their_out, their_lse, _ = next(expected)
                    same(out, their_out)
                    same(lse, their_lse)
        # What is between decoders sees the same rows.
        for sequence, length in zip(sequences, lengths, strict=True):
            assert sequence.refresh().token_count == length + first + steps
    for sequence, other in zip(sequences, others, strict=True):
        q = tensors.q[0, 0, :1, :1].squeeze(0)
        same(sequence.attend(1, q).out, other.attend(1, q).out)


@needs_gpu
def test_grows_past_what_is_dense_with_many_heads(engine: Client) -> None:
    """Dense steps and sparse ones use the same memory, which differs with the heads."""
    model = engine.create_model(
        layer_count=1, query_head_count=32, kv_head_count=8, head_dim=DIM, dtype="bfloat16"
    )
    generator = torch.Generator().manual_seed(3)
    mine, theirs = (engine.create_sequence(model) for _ in range(2))
    k, v = normal(generator, 2, 1, 8, 2040, DIM)
    for sequence in (mine, theirs):
        sequence.append(0, 0, k, v)
    with engine.open_decoder([mine]) as decoder:
        for _ in range(16):
            q = normal(generator, 1, 1, 32, DIM)
            k, v = normal(generator, 2, 1, 8, 1, DIM)
            with engine.begin_step([theirs]) as step:
                expected, _ = step.attend(0, q, k, v)
            decoder.next()
            out, _ = decoder.attend(0, *(x.cuda() for x in (q, k, v)))
            same(out, expected)
        decoder.finish()
    assert mine.refresh().token_count == 2056
    for sequence in (mine, theirs):
        sequence.delete()
    engine.delete_model(model)


@needs_gpu
def test_room_for_a_length_with_fewer_splits_than_a_shorter_one(engine: Client) -> None:
    model = engine.create_model(
        layer_count=1, query_head_count=2, kv_head_count=1, head_dim=64, dtype="bfloat16"
    )
    generator = torch.Generator().manual_seed(3)
    sequence = engine.create_sequence(model, policy=Policy(selector="all"))
    k, v = normal(generator, 2, 1, 1, 125_000, 64)
    sequence.append(0, 0, k, v)
    q = normal(generator, 1, 1, 2, 64)
    new_k, new_v = normal(generator, 2, 1, 1, 1, 64)
    with engine.open_decoder([sequence], token_count_max=132_000) as decoder:
        decoder.next()
        out, _ = decoder.attend(0, q.cuda(), new_k.cuda(), new_v.cuda())
        decoder.finish()
    same(out[0], torch.as_tensor(sequence.attend(0, q[0]).out))
    sequence.delete()
    engine.delete_model(model)


@needs_gpu
def test_layers_and_sequences_differ_in_what_is_dense(engine: Client, wide: Model) -> None:
    policies = [None, Policy(dense_layers=(1,)), Policy(selector="all"), Policy(selector="oracle")]
    tensors = Tensors(len(policies), 1, 3)
    both = []
    for _ in range(2):
        made = []
        for i, policy in enumerate(policies):
            sequence = engine.create_sequence(wide, policy=policy)
            k, v = normal(torch.Generator().manual_seed(i), 2, LAYERS, KV_HEADS, 4000, DIM)
            sequence.append(0, 0, k, v)
            made.append(sequence)
        both.append(made)
    mine, theirs = both
    expected = iter(by_steps(engine, theirs, tensors, 3, 1))
    with engine.open_decoder(mine) as decoder:
        for t in range(3):
            assert decoder.next() == (t == 0)
            for layer in range(LAYERS):
                out, lse = decoder.attend(layer, *tensors.of(t, layer, "cuda"))
                their_out, their_lse, _ = next(expected)
                same(out, their_out)
                same(lse, their_lse)
        decoder.finish()


def stage_counts(engine: Client) -> dict[str, int]:
    """How many attends reported a time for each stage."""
    request = admin_service_pb2.GetStatisticsRequest(include_metrics=True)
    families = {
        each.name: each for each in engine.connection.stubs.admin.GetStatistics(request).metrics
    }
    return {
        metric.labels["stage"]: metric.histogram.cumulative_counts[-1]
        for metric in families["spillway_attend_stage_seconds"].metrics
    }


@needs_gpu
def test_each_layer_of_a_step_reports_the_times_of_its_stages(engine: Client, wide: Model) -> None:
    steps = 5
    sequence = filled(engine, wide, 6000)
    tensors = Tensors(1, 1, steps)
    before = stage_counts(engine)
    with engine.open_decoder([sequence]) as decoder:
        for t in range(steps):
            decoder.next()
            for layer in range(LAYERS):
                decoder.attend(layer, *tensors.of(t, layer, "cuda"))
        decoder.finish()
    after = stage_counts(engine)
    # A decoder reports the stages of the attend, without the append.
    for stage in ("score", "cut", "sample", "fold"):
        assert after[stage] - before[stage] == steps * LAYERS, stage


class Captured:
    """A graph with the attends of all layers. Its tensors keep their addresses."""

    def __init__(self, decoder: Any, tensors: Tensors) -> None:
        self.decoder, self.tensors = decoder, tensors
        self.inputs = [tensors.of(0, layer, "cuda") for layer in range(LAYERS)]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.captures = 0

    def capture(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = [
                self.decoder.attend(layer, *self.inputs[layer]) for layer in range(LAYERS)
            ]
        self.captures += 1

    def replay(self, step: int) -> None:
        for layer in range(LAYERS):
            for to, new in zip(
                self.inputs[layer], self.tensors.of(step, layer, "cuda"), strict=True
            ):
                to.copy_(new)
        assert self.graph is not None
        self.graph.replay()


@needs_gpu
def test_the_engine_does_not_disturb_a_capture(engine: Client, wide: Model) -> None:
    """The engine looks at its GPU once a second, also while a graph is captured."""
    assert captures(engine)
    sequence = filled(engine, wide, 6000)
    tensors = Tensors(1, 1, 1)
    with engine.open_decoder([sequence]) as decoder:
        captured = Captured(decoder, tensors)
        assert decoder.next()
        captured.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured.graph):
            time.sleep(2.5)
            captured.outputs = [decoder.attend(i, *captured.inputs[i]) for i in range(LAYERS)]
        captured.replay(0)
        decoder.finish()
    assert sequence.refresh().token_count == 6001


@needs_gpu
@pytest.mark.parametrize("lengths", [(6000,), (4000, 500, 9000)])
def test_a_graph_serves_step_after_step(
    engine: Client, wide: Model, lengths: tuple[int, ...]
) -> None:
    assert captures(engine)
    steps = 300
    sequences = [filled(engine, wide, length, i) for i, length in enumerate(lengths)]
    others = [filled(engine, wide, length, i) for i, length in enumerate(lengths)]
    tensors = Tensors(len(lengths), 1, steps)
    expected = by_steps(engine, others, tensors, steps, 1)
    answers = []
    with engine.open_decoder(sequences) as decoder:
        captured = Captured(decoder, tensors)
        for t in range(steps):
            if decoder.next():
                captured.capture()
            captured.replay(t)
            answers += [(out.clone(), lse.clone()) for out, lse in captured.outputs]
        decoder.finish()
        assert [each.token_count for each in sequences] == [n + steps for n in lengths]
        # Grids are multiples of segments and of sixteenths, so there are few captures.
        assert 1 <= captured.captures <= 8
    for (out, lse), (their_out, their_lse, _) in zip(answers, expected, strict=True):
        same(out, their_out)
        same(lse, their_lse)


@needs_gpu
def test_a_step_ends_where_it_ran(engine: Client, wide: Model) -> None:
    """It is finished on another stream than the one with its attends, which is far behind."""
    sequence, other = (filled(engine, wide, 5000) for _ in range(2))
    tensors = Tensors(1, 1, 1)
    expected = by_steps(engine, [other], tensors, 1, 1)
    inputs = [tensors.of(0, layer, "cuda") for layer in range(LAYERS)]
    stream = torch.cuda.Stream()
    with engine.open_decoder([sequence]) as decoder:
        decoder.next()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # about 30 milliseconds
            outs = [decoder.attend(layer, *inputs[layer])[0] for layer in range(LAYERS)]
        decoder.finish()
        assert stream.query()
        assert sequence.token_count == 5001
        for out, (their_out, _, _) in zip(outs, expected, strict=True):
            same(out, their_out)


@needs_gpu
def test_finish_waits_for_outputs(engine: Client, wide: Model) -> None:
    """Also where they are copied from the memory of a daemon."""
    sequences = [filled(engine, wide, 1500) for _ in range(8)]
    tensors = Tensors(8, 1, 1)
    inputs = [tensors.of(0, layer, "cuda") for layer in range(LAYERS)]
    stream = torch.cuda.Stream()
    with engine.open_decoder(sequences) as decoder:
        for _ in range(30):
            decoder.next()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outs = [decoder.attend(layer, *inputs[layer])[0] for layer in range(LAYERS)]
            decoder.finish()
            assert stream.query()
    assert all(out.isfinite().all() for out in outs)


@needs_gpu
def test_behind_slow_kernels_order_holds(engine: Client, wide: Model) -> None:
    """A wrong order shows only if the stream is far behind the host."""
    steps = 40
    sequence, other = (filled(engine, wide, 5000) for _ in range(2))
    tensors = Tensors(1, 1, steps)
    expected = by_steps(engine, [other], tensors, steps, 1)
    answers = []
    with engine.open_decoder([sequence]) as decoder:
        for t in range(steps):
            decoder.next()
            for layer in range(LAYERS):
                inputs = tensors.of(t, layer, "cuda")
                late = [torch.zeros_like(x) for x in inputs]
                torch.cuda._sleep(2_000_000)  # about a millisecond
                for to, new in zip(late, inputs, strict=True):
                    to.copy_(new)
                out, lse = decoder.attend(layer, *late)
                for to in late:
                    to.zero_()
                answers.append((out, lse))
        decoder.finish()
    for (out, lse), (their_out, their_lse, _) in zip(answers, expected, strict=True):
        same(out, their_out)
        same(lse, their_lse)


def spoil(tensors: Tensors, what: str, step: int, layer: int, value: float) -> None:
    array = getattr(tensors, what)
    array[step, layer, 0, 0, 0, 5] = value


@needs_gpu
@pytest.mark.parametrize(
    ("what", "value", "told"),
    [
        ("q", float("nan"), "q is not finite at layer 1, query 0, query head 0, element 5"),
        ("k", float("inf"), "K is not finite at layer 1, KV head 0, token 3001, element 5"),
        ("v", -float("inf"), "V is not finite at layer 1, KV head 0, token 3001, element 5"),
    ],
)
def test_what_is_not_finite_is_nan_then_an_error(
    engine: Client, wide: Model, what: str, value: float, told: str
) -> None:
    sequence, other = filled(engine, wide, 3000), filled(engine, wide, 3000)
    tensors = Tensors(1, 1, 4)
    (good_out, _, _), *_ = by_steps(engine, [other], tensors, 1, 1)
    spoil(tensors, what, 1, 1, value)
    with engine.open_decoder([sequence]) as decoder:
        outs = []
        for t in range(2):
            decoder.next()
            outs += [
                decoder.attend(layer, *tensors.of(t, layer, "cuda")) for layer in range(LAYERS)
            ]
        same(outs[0][0], good_out)
        assert not outs[2][0].isnan().any()
        assert outs[3][0].isnan().all()
        assert outs[3][1].isnan().all()
        with raising(spillway_kv.SpillwayError, told):
            decoder.finish()
        # The decoder continues from the token before that step.
        tensors = Tensors(1, 1, 4)
        expected = by_steps(engine, [other], Shifted(tensors), 1, 1)
        decoder.next()
        for layer in range(LAYERS):
            out, _ = decoder.attend(layer, *tensors.of(1, layer, "cuda"))
            same(out, expected[layer][0])
        decoder.finish()
    assert sequence.refresh().token_count == 3002


class Shifted(Tensors):
    """The same tensors from the second step on."""

    def __init__(self, tensors: Tensors) -> None:
        self.q, self.k, self.v = tensors.q[1:], tensors.k[1:], tensors.v[1:]


@needs_gpu
def test_a_logit_beyond_float32_is_nan_then_an_error(engine: Client, wide: Model) -> None:
    sequence = filled(engine, wide, 3000)
    tensors = Tensors(1, 1, 1)
    tensors.q[:] = 3e38
    with engine.open_decoder([sequence]) as decoder:
        decoder.next()
        out, lse = decoder.attend(0, *tensors.of(0, 0, "cuda"))
        assert out.isnan().all()
        with raising(spillway_kv.SpillwayError, "the logit of token"):
            decoder.finish()
    assert sequence.refresh().token_count == 3000


@needs_gpu
def test_an_error_shows_two_steps_later_at_the_latest(engine: Client, wide: Model) -> None:
    sequence = filled(engine, wide, 3000)
    tensors = Tensors(1, 1, 4)
    spoil(tensors, "k", 0, 0, float("nan"))

    def step(t: int) -> None:
        decoder.next()
        for layer in range(LAYERS):
            decoder.attend(layer, *tensors.of(t, layer, "cuda"))

    with engine.open_decoder([sequence]) as decoder:
        step(0)
        step(1)
        with raising(spillway_kv.SpillwayError, "K is not finite at layer 0"):
            decoder.next()
        # Both steps were undone, and the decoder continues.
        step(2)
        decoder.finish()
    assert sequence.refresh().token_count == 3001


@needs_gpu
def test_a_stale_graph_gives_nan_and_an_error(engine: Client, wide: Model) -> None:
    assert captures(engine)
    sequence = filled(engine, wide, 4000)
    tensors = Tensors(1, 1, 300)
    with engine.open_decoder([sequence]) as decoder:
        captured = Captured(decoder, tensors)
        decoder.next()
        captured.capture()
        captured.replay(0)
        t = 1
        while not decoder.next():
            captured.replay(t)
            t += 1
        captured.replay(t)
        assert captured.outputs[0][0].isnan().all()
        with raising(FailedPrecondition, "capture it again"):
            decoder.finish()
    assert sequence.refresh().token_count == 4000 + t


@needs_gpu
def test_a_step_that_ends_between_layers_leaves_nothing(engine: Client, wide: Model) -> None:
    sequence = filled(engine, wide, 3000)
    tensors = Tensors(1, 1, 1)
    with engine.open_decoder([sequence]) as decoder:
        decoder.next()
        decoder.finish()  # no layer was attended: no error
        assert sequence.token_count == 3000
        decoder.next()
        decoder.attend(0, *tensors.of(0, 0, "cuda"))
        with raising(FailedPrecondition, "layer 1 was not attended"):
            decoder.finish()
        assert sequence.token_count == 3000
        decoder.next()  # close() undoes this
    assert sequence.token_count == 3000
    assert sequence.refresh().token_count == 3000


@needs_gpu
def test_misuse_is_refused_where_it_happens(engine: Client, wide: Model) -> None:
    sequence = filled(engine, wide, 3000)
    tensors = Tensors(1, 1, 1)
    q, k, v = tensors.of(0, 0, "cuda")
    with engine.open_decoder([sequence], token_count_max=3001) as decoder:
        with raising(FailedPrecondition, "begin the next step"):
            decoder.attend(0, q, k, v)
        decoder.next()
        with raising(spillway_kv.SpillwayError, "q: is not in the memory of cuda"):
            decoder.attend(0, q.cpu(), k, v)
        with raising(spillway_kv.SpillwayError, "layer: value 2"):
            decoder.attend(2, q, k, v)
        with raising(ValueError, "k has shape"):
            decoder.attend(0, q, k[:, :1], v)
        with raising(FailedPrecondition, "is held by an open decoder"):
            sequence.append(0, 3000, k.cpu().repeat(2, 1, 1, 1), v.cpu().repeat(2, 1, 1, 1))
        with raising(FailedPrecondition, "is held by an open decoder"):
            sequence.attend(0, q[0].cpu())
        for call in (sequence.fork, sequence.delete, lambda: sequence.truncate(1)):
            with raising(FailedPrecondition, "is held by an open decoder"):
                call()
        with raising(FailedPrecondition, "is held by an open decoder"):
            engine.open_decoder([sequence])
        for layer in range(LAYERS):
            decoder.attend(layer, q, k, v)
        with raising(spillway_kv.SpillwayError, "3002 tokens are beyond token_count_max 3001"):
            decoder.next()
        decoder.finish()
        # A view whose rows are not aligned is copied.
        decoder.close()
        with raising(ValueError, "the decoder is closed"):
            decoder.next()
    assert sequence.refresh().token_count == 3001
    with raising(spillway_kv.SpillwayError, "serve the selectors all, asymmetric and oracle"):
        engine.open_decoder([sequence], policy=Policy(selector="hamming"))
    sequence.append(0, 3001, *(x.cpu()[0].expand(LAYERS, -1, -1, -1) for x in (k, v)))


@needs_gpu
def test_announcing_is_no_part_of_a_graph(engine: Client, wide: Model) -> None:
    sequence = filled(engine, wide, 100)
    with engine.open_decoder([sequence]) as decoder:
        with (
            raising(FailedPrecondition, "is being captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            decoder.next()
        decoder.next()
    assert sequence.refresh().token_count == 100


@needs_gpu
def test_a_daemons_attend_is_no_part_of_a_graph(engine: Client, wide: Model) -> None:
    if engine.transport == "embedded":
        pytest.skip("of a daemon")
    sequence = filled(engine, wide, 100)
    tensors = Tensors(1, 1, 1)
    inputs = tensors.of(0, 0, "cuda")
    with engine.open_decoder([sequence]) as decoder:
        decoder.next()
        with (
            raising(
                FailedPrecondition, "attends of a daemon are calls, which a graph cannot contain"
            ),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            decoder.attend(0, *inputs)
        # The decoder continues.
        for layer in range(LAYERS):
            decoder.attend(layer, *tensors.of(0, layer, "cuda"))
        decoder.finish()
    assert sequence.refresh().token_count == 101


@needs_gpu
def test_streams_may_change_between_layers(engine: Client, wide: Model) -> None:
    """A request on one stream must not overwrite what another stream has yet to copy."""
    steps = 20
    sequence, other = (filled(engine, wide, 4000) for _ in range(2))
    tensors = Tensors(1, 1, steps)
    expected = by_steps(engine, [other], tensors, steps, 1)
    streams = [torch.cuda.Stream() for _ in range(2)]
    answers = []
    with engine.open_decoder([sequence]) as decoder:
        for t in range(steps):
            decoder.next()
            for layer in range(LAYERS):
                inputs = tensors.of(t, layer, "cuda")
                torch.cuda.synchronize()
                stream = streams[(t * LAYERS + layer) % 2]
                with torch.cuda.stream(stream):
                    answers.append(decoder.attend(layer, *inputs))
                    torch.cuda._sleep(500_000)
                if engine.transport == "embedded":
                    stream.synchronize()  # an embedded engine's steps need one order
        torch.cuda.synchronize()
        decoder.finish()
    for (out, lse), (their_out, their_lse, _) in zip(answers, expected, strict=True):
        same(out, their_out)
        same(lse, their_lse)


@needs_gpu
def test_outputs_in_float32_and_queries_as_they_lie(engine: Client, wide: Model) -> None:
    sequence, other = (filled(engine, wide, 3000) for _ in range(2))
    tensors = Tensors(1, 2, 1)
    with (
        engine.open_decoder([sequence], token_count=2) as decoder,
        engine.begin_step([other], token_count=2) as step,
    ):
        decoder.next()
        for layer in range(LAYERS):
            q, k, v = tensors.of(0, layer, "cuda")
            # [B, H, T, d] in memory, and with gaps between rows.
            turned = q.transpose(1, 2).contiguous().transpose(1, 2)
            gapped = torch.zeros((1, KV_HEADS, 2, 2 * DIM), dtype=k.dtype, device="cuda")
            gapped[..., :DIM] = k
            out, lse = decoder.attend(layer, turned, gapped[..., :DIM], v, out_dtype="float32")
            expected = step.attend(layer, *tensors.of(0, layer, "cpu"), out_dtype="float32")
            assert out.dtype == torch.float32
            same(out, expected[0])
            same(lse, expected[1])
        decoder.finish()


@needs_gpu
def test_sums_are_those_of_its_results(engine: Client, wide: Model) -> None:
    sequence = filled(engine, wide, 5000)
    tensors = Tensors(1, 1, 3)
    touched = 0
    with engine.open_decoder([sequence]) as decoder:
        for t in range(3):
            decoder.next()
            for layer in range(LAYERS):
                decoder.attend(layer, *tensors.of(t, layer, "cuda"))
            (result,) = decoder.results(1)
            touched += int(result.touched_row_counts.sum())
        sums = decoder.sums(1)
        assert sums.attend_count == 3
        assert sums.touched_row_count == touched
        assert sums.visible_row_count == KV_HEADS * (5001 + 5002 + 5003)


@needs_gpu
def test_gives_its_memory_back(engine: Client, wide: Model) -> None:
    def used() -> tuple[int, int]:
        (gpu,) = engine.get_server_info().devices
        return engine.statistics().memory.used_bytes, gpu.memory_used_bytes

    def shared() -> int:
        return engine.get_server_info().devices[0].shared_used_bytes

    sequence = filled(engine, wide, 3000)
    before_shared = shared()
    # Tables stay with the sequence, and the engine keeps the memory of both for the next ones.
    other = filled(engine, wide, 40)
    with engine.open_decoder([sequence]), engine.open_decoder([other]):
        pass
    # A daemon frees shared memory a little later.
    wait_for(lambda: shared() == before_shared)
    before = used()
    for _ in range(3):
        with engine.open_decoder([sequence]) as decoder:
            decoder.next()
            with engine.open_decoder([other]):
                assert used() == before
        wait_for(lambda: used() == before)


@pytest.mark.skipif(not GPU or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_serves_the_second_gpu_beside_the_first(engine: Client, wide: Model) -> None:
    assert captures(engine)
    prefer_library(binary())
    settings = {"memory.limit": "4GiB", "device.name": "cuda:1"}
    with spillway_kv.connect("embedded:", settings=settings) as second:
        model = second.create_model(
            layer_count=LAYERS,
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16",
        )
        generator = torch.Generator().manual_seed(3)
        k, v = normal(generator, 2, LAYERS, KV_HEADS, 5000, DIM)
        there = second.create_sequence(model)
        there.append(0, 0, k.to("cuda:1"), v.to("cuda:1"))
        here = filled(engine, wide, 5000)
        tensors = Tensors(1, 1, 6)
        with second.open_decoder([there]) as theirs, engine.open_decoder([here]) as mine:
            for t in range(6):
                theirs.next()
                mine.next()
                for layer in range(LAYERS):
                    out, lse = theirs.attend(layer, *tensors.of(t, layer, "cuda:1"))
                    assert out.device == torch.device("cuda:1")
                    other, other_lse = mine.attend(layer, *tensors.of(t, layer, "cuda:0"))
                    same(out, other.cpu())
                    same(lse, other_lse.cpu())
            with raising(spillway_kv.SpillwayError, "q: is in the memory of cuda:0, not of cuda:1"):
                theirs.next()
                theirs.attend(0, *tensors.of(0, 0, "cuda:0"))
        assert torch.cuda.current_device() == 0


@pytest.mark.skipif(GPU, reason="of the CPU device")
def test_the_cpu_has_no_streams(engine: Client, wide: Model) -> None:
    sequence = filled(engine, wide, 10)
    with raising(spillway_kv.SpillwayError, "cpu:0 has no streams"):
        engine.open_decoder([sequence])
    sequence.delete()  # no decoder holds it


@pytest.mark.transports("messages")
def test_none_by_messages(client: Client, model: Model) -> None:
    sequence = client.create_sequence(model)
    with raising(ValueError, "decoders need an embedded engine, or a daemon that shares"):
        client.open_decoder([sequence])


def test_none_where_no_memory_is_shared(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as target:
        # The socket for regions is not beside a link to the daemon's socket.
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / "spillwayd.sock").symlink_to(target.removeprefix("unix:"))
        with spillway_kv.connect(f"unix:{elsewhere}/spillwayd.sock") as client:
            model = client.create_model(
                layer_count=1, query_head_count=1, kv_head_count=1, head_dim=16, dtype="float32"
            )
            sequence = client.create_sequence(model)
            error = refused(lambda: client.open_decoder([sequence]))
            assert error.code == "UNIMPLEMENTED"
            assert "no doorbell: " in error.message
            assert f"no decoder: {error.message}" in client.statistics().transport.reason


# Runners and daemons that end.

RUNNER = """
    import sys, time, torch, spillway_kv
    sys.path.insert(0, {folder!r})
    from test_stream_decoder import LAYERS, Tensors
    client = spillway_kv.connect({target!r})
    sequence = client.get_sequence({sequence!r})
    tensors = Tensors(1, 1, {steps})
    decoder = client.open_decoder([sequence])
    for t in range({steps}):
        decoder.next()
        for layer in range(LAYERS):
            decoder.attend(layer, *tensors.of(t, layer, "cuda"))
            if t * LAYERS + layer + 1 == {cut}:
                print("here", flush=True)
                time.sleep(300)
"""


@needs_gpu
@pytest.mark.parametrize("cut", [1, 2, 3, 8, 11])
def test_a_runner_that_is_killed_between_layers(
    engine: Client, wide: Model, target: str, cut: int
) -> None:
    """Complete steps that were confirmed stay, the rest goes, and another runner continues."""
    if engine.transport == "embedded":
        pytest.skip("of a daemon")
    steps, length = 8, 3000
    sequence, other = (filled(engine, wide, length) for _ in range(2))
    tensors = Tensors(1, 1, steps)
    expected = by_steps(engine, [other], tensors, steps, 1)
    script = RUNNER.format(
        folder=str(Path(__file__).parent),
        target=target,
        sequence=sequence.name,
        steps=steps,
        cut=cut,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    with raising(FailedPrecondition, "is held by an open decoder"):
        sequence.truncate(1)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()

    def free() -> bool:
        try:
            sequence.fork().delete()
        except FailedPrecondition:
            return False
        return True

    wait_for(free)
    info = sequence.refresh()
    assert len(set(info.layer_token_counts)) == 1
    done = info.token_count - length
    assert done == cut // LAYERS
    with engine.open_decoder([sequence]) as decoder:
        for t in range(done, steps):
            decoder.next()
            for layer in range(LAYERS):
                out, lse = decoder.attend(layer, *tensors.of(t, layer, "cuda"))
                their_out, their_lse, _ = expected[t * LAYERS + layer]
                same(out, their_out)
                same(lse, their_lse)
        decoder.finish()
    assert sequence.refresh().token_count == length + steps


@needs_gpu
def test_the_daemon_goes_between_layers(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as target:
        client = spillway_kv.connect(target)
        model = client.create_model(
            layer_count=LAYERS,
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=DIM,
            dtype="bfloat16",
        )
        sequence = filled(client, model, 2000)
        tensors = Tensors(1, 1, 1)
        decoder = client.open_decoder([sequence])
        decoder.next()
        decoder.attend(0, *tensors.of(0, 0, "cuda"))
    for _ in range(2):
        with raising(spillway_kv.Unavailable, "the daemon is gone"):
            decoder.attend(1, *tensors.of(0, 1, "cuda"))
    with pytest.raises(spillway_kv.Unavailable):
        decoder.finish()
    decoder.close()
    client.close()
    # CUDA in this process still works.
    assert torch.ones(3, device="cuda").sum().item() == 3
