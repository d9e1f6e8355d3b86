"""Order on the GPU when all work of the runner is late.

A missing wait shows only if a stream is far behind the host. In these tests, inputs are poison
until a long kernel has ended, inputs become poison again right after the call, and outputs are read
late. The bits must be those of a run without delays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
import torch
from daemon_process import on_gpu
from helpers import delete_model
from spillway_kv import Client, Model, Policy, Selection, Sequence

pytestmark = pytest.mark.skipif(not on_gpu(), reason="needs SPILLWAY_TEST_DEVICE=cuda:N")
# To a daemon through its doorbell and in messages, and to an embedded engine.
ALL_TRANSPORTS = pytest.mark.transports("doorbell", "embedded")

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64
STEPS = 10
# During the steps, a page fills in the first sequence and in the second.
LENGTHS = (6136, 2044)
# Cycles of the GPU's clock: about ten milliseconds, and one to two seconds.
SHORT, LONG = 20_000_000, 3_000_000_000
# NaN is refused when it is read; 3.0 is not noticed.
POISONS = pytest.mark.parametrize("poison", [float("nan"), 3.0])


@pytest.fixture(params=["idle", "busy"])
def load(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs long kernels on another stream, or none. They make the engine's kernels late too."""
    if request.param == "idle":
        yield
        return
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        factor = torch.ones((8192, 8192), dtype=torch.bfloat16, device="cuda")
        product = torch.empty_like(factor)
        torch.cuda.current_stream().synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            while not over.is_set():
                for _ in range(8):
                    torch.mm(factor, factor, out=product)
                stream.synchronize()
                begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(30)
        yield
    finally:
        over.set()
        thread.join()


def made_model(client: Client) -> Model:
    return client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="bfloat16",
    )


@pytest.fixture
def wide(client: Client) -> Iterator[Model]:
    """Two layers, eight query heads over two KV heads of 64, bfloat16."""
    model = made_model(client)
    yield model
    delete_model(client, model)


@pytest.fixture
def wide_here(engine: Client) -> Iterator[Model]:
    """The same model in the embedded engine."""
    model = made_model(engine)
    yield model
    delete_model(engine, model)


def normal(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(torch.bfloat16)


def filled(client: Client, model: Model, length: int, seed: int = 3) -> Sequence:
    sequence = client.create_sequence(model)
    sequence.append(0, 0, *normal(seed, 2, LAYERS, KV_HEADS, length, DIM))
    return sequence


def pause(cycles: int) -> None:
    """Enqueues a kernel on the current stream that only waits for this many cycles."""
    if cycles > 0:
        torch.cuda._sleep(cycles)


class Late:
    """Tensors whose values arrive after a long kernel, are used once, and become poison again."""

    def __init__(self, poison: float, delay: int, *values: torch.Tensor) -> None:
        self.poison, self.delay = poison, delay
        self.values = [x.cuda() for x in values]
        self.places = [torch.full_like(x, poison) for x in self.values]
        # From now on, the tensors hold the poison.
        torch.cuda.synchronize()

    def come(self, *at: int) -> list[torch.Tensor]:
        pause(self.delay)
        for place, value in zip(self.places, self.values, strict=True):
            place[at].copy_(value[at])
        return [place[at] for place in self.places]

    def go(self, *at: int) -> None:
        for place in self.places:
            place[at].fill_(self.poison)


def step_tensors(poison: float, delay: int, batch: int, steps: int = STEPS) -> Late:
    """q, k and v of all steps and layers."""
    return Late(
        poison,
        delay,
        normal(7, steps, LAYERS, batch, 1, HEADS, DIM),
        normal(8, steps, LAYERS, batch, KV_HEADS, 1, DIM),
        normal(9, steps, LAYERS, batch, KV_HEADS, 1, DIM),
    )


def read_late(tensors: Late, outputs: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
    """The outputs as a long kernel later finds them. Their memory becomes poison then."""
    pause(tensors.delay)
    kept = [x.clone() for x in outputs]
    for x in outputs:
        x.fill_(tensors.poison)
    return kept


def expect_behind(delay: int) -> None:
    """Asserts that the host is ahead of the current stream. Otherwise the tests show nothing."""
    if delay > 0:
        end = torch.cuda.Event()
        end.record()
        assert not end.query()


def expect_same(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.cuda.synchronize()
    assert len(mine) == len(theirs)
    for i, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        assert not other.isnan().any()
        assert torch.equal(one, other), f"output {i}"


def exact(sequences: list[Sequence]) -> list[torch.Tensor]:
    """Exact attends over the rows, through the host."""
    q = normal(11, 1, HEADS, DIM)
    return [
        torch.as_tensor(sequence.attend(layer, q, Policy(selector="all")).out)
        for sequence in sequences
        for layer in range(LAYERS)
    ]


# Decoders.


def decoded(engine: Client, model: Model, poison: float, delay: int) -> list[torch.Tensor]:
    sequences = [filled(engine, model, length, i) for i, length in enumerate(LENGTHS)]
    inputs = step_tensors(poison, delay, len(sequences))
    answers = []
    with torch.cuda.stream(torch.cuda.Stream()), engine.open_decoder(sequences) as decoder:
        for t in range(STEPS):
            decoder.next()
            for layer in range(LAYERS):
                outputs = decoder.attend(layer, *inputs.come(t, layer))
                inputs.go(t, layer)
                answers += read_late(inputs, outputs)
        expect_behind(delay)
        decoder.finish()
    return answers + exact(sequences)


@POISONS
def test_attends_of_a_decoder(engine: Client, wide_here: Model, load: None, poison: float) -> None:
    expected = decoded(engine, wide_here, poison, 0)
    expect_same(decoded(engine, wide_here, poison, SHORT), expected)


class Captured:
    """A graph of all layers, in which inputs arrive late and outputs are read late."""

    def __init__(self, decoder: Any, inputs: Late) -> None:
        self.inputs = inputs
        self.values = [torch.full_like(x[0], inputs.poison) for x in inputs.values]
        self.places = [torch.full_like(x[0], inputs.poison) for x in inputs.values]
        self.answers: list[torch.Tensor] = []
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads use the GPU during the capture.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            for layer in range(LAYERS):
                pause(inputs.delay)
                for place, value in zip(self.places, self.values, strict=True):
                    place[layer].copy_(value[layer])
                outputs = decoder.attend(layer, *[place[layer] for place in self.places])
                for place in self.places:
                    place[layer].fill_(inputs.poison)
                self.answers += read_late(inputs, outputs)

    def replay(self, step: int) -> list[torch.Tensor]:
        for value, of_all in zip(self.values, self.inputs.values, strict=True):
            value.copy_(of_all[step])
        self.graph.replay()
        for value in self.values:
            value.fill_(self.inputs.poison)
        return [x.clone() for x in self.answers]


def replayed(engine: Client, model: Model, poison: float, delay: int) -> list[torch.Tensor]:
    sequences = [filled(engine, model, length, i) for i, length in enumerate(LENGTHS)]
    inputs = step_tensors(poison, delay, len(sequences))
    answers = []
    with torch.cuda.stream(torch.cuda.Stream()), engine.open_decoder(sequences) as decoder:
        for t in range(STEPS):
            if decoder.next():
                captured = Captured(decoder, inputs)
            answers += captured.replay(t)
        expect_behind(delay)
        decoder.finish()
    return answers + exact(sequences)


@POISONS
def test_a_decoder_in_a_graph(engine: Client, wide_here: Model, load: None, poison: float) -> None:
    # The bits must also be those of attends without a graph.
    expected = decoded(engine, wide_here, poison, 0)
    for delay in (0, SHORT):
        expect_same(replayed(engine, wide_here, poison, delay), expected)


def both_decoded(engine: Client, model: Model, delay: int) -> list[torch.Tensor]:
    """Two decoders on two streams. The first stream is late."""
    sequences = [filled(engine, model, length, i) for i, length in enumerate(LENGTHS)]
    inputs = [step_tensors(float("nan"), 0, 1, steps=2) for _ in sequences]
    # With different priorities: streams of the same priority may share a queue, and would then wait
    # for each other.
    streams = [torch.cuda.Stream(), torch.cuda.Stream(priority=-1)]
    done = [torch.cuda.Event() for _ in streams]
    answers = []
    with ExitStack() as stack:
        decoders = [stack.enter_context(engine.open_decoder([x])) for x in sequences]
        for t in range(2):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    decoders[i].next()
                    # Not in the first step, in which kernels are loaded.
                    pause(delay if i == 0 and t == 1 else 0)
                    for layer in range(LAYERS):
                        outputs = decoders[i].attend(layer, *inputs[i].come(t, layer))
                        inputs[i].go(t, layer)
                        answers += read_late(inputs[i], outputs)
                    done[i].record()
            done[1].synchronize()
            if t == 0:
                done[0].synchronize()
            elif delay > 0:
                assert not done[0].query()
        for decoder, stream in zip(decoders, streams, strict=True):
            with torch.cuda.stream(stream):
                decoder.finish()
    return answers + exact(sequences)


def test_decoders_do_not_wait_for_one_another(engine: Client, wide_here: Model) -> None:
    expected = both_decoded(engine, wide_here, 0)
    expect_same(both_decoded(engine, wide_here, LONG), expected)


# Steps, for which the host waits.


def stepped(client: Client, model: Model, poison: float, delay: int) -> list[torch.Tensor]:
    sequences = [filled(client, model, length, i) for i, length in enumerate(LENGTHS)]
    inputs = step_tensors(poison, delay, len(sequences))
    answers = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for t in range(STEPS):
            with client.begin_step(sequences) as step:
                for layer in range(LAYERS):
                    outputs = step.attend(layer, *inputs.come(t, layer))
                    assert outputs[0].is_cuda
                    inputs.go(t, layer)
                    answers += read_late(inputs, outputs)
                    expect_behind(delay)
    return answers + exact(sequences)


@ALL_TRANSPORTS
@POISONS
def test_steps(client: Client, wide: Model, load: None, poison: float) -> None:
    assert client.step_transport == ("embedded" if client.transport == "embedded" else "doorbell")
    expected = stepped(client, wide, poison, 0)
    expect_same(stepped(client, wide, poison, SHORT), expected)


# Appends and fetches.

# An append within one stage of the engine, one of several stages, and one that continues an open
# page.
CUTS = (3000, 20_000, 20_100)


def appended(client: Client, model: Model, poison: float, delay: int) -> list[torch.Tensor]:
    rows = normal(4, 2, LAYERS, KV_HEADS, CUTS[-1], DIM)
    sequence = client.create_sequence(model)
    with torch.cuda.stream(torch.cuda.Stream()):
        start = 0
        for end in CUTS:
            # Tensors [1, LAYERS, ...], whose only element arrives late and becomes poison again.
            late = Late(poison, delay, *rows[:, None, :, :, start:end])
            k, v = late.come(0)
            expect_behind(delay)
            sequence.append(0, start, k, v)
            late.go(0)
            start = end
    q = normal(11, 1, HEADS, DIM)
    by_codes = [torch.as_tensor(sequence.attend(layer, q).out) for layer in range(LAYERS)]
    return by_codes + exact([sequence])


@ALL_TRANSPORTS
@POISONS
def test_appends(client: Client, wide: Model, load: None, poison: float) -> None:
    expected = appended(client, wide, poison, 0)
    expect_same(appended(client, wide, poison, SHORT), expected)


def chosen(length: int) -> Selection:
    heads = [np.arange(h, length, 3 + h, dtype=np.uint32) for h in range(KV_HEADS)]
    return Selection(offsets=np.cumsum([0, *map(len, heads)]), indices=np.concatenate(heads))


LENGTH = 9000
SELECTION = chosen(LENGTH)


def fetch_all(sequence: Sequence, into: tuple[torch.Tensor, torch.Tensor]) -> None:
    sequence.fetch(1, 5, LENGTH, into=into)


def fetch_chosen(sequence: Sequence, into: tuple[torch.Tensor, torch.Tensor]) -> None:
    sequence.fetch(1, selection=SELECTION, into=into)


@ALL_TRANSPORTS
@pytest.mark.parametrize("fetch", [fetch_all, fetch_chosen])
def test_fetches(
    client: Client,
    wide: Model,
    load: None,
    fetch: Callable[[Sequence, tuple[torch.Tensor, torch.Tensor]], None],
) -> None:
    sequence = filled(client, wide, LENGTH)
    rows = normal(3, 2, LAYERS, KV_HEADS, LENGTH, DIM)[:, 1]
    if fetch is fetch_all:
        expected = rows[:, :, 5:].clone()
    else:
        heads = np.split(np.asarray(SELECTION.indices).astype(np.int64), SELECTION.offsets[1:-1])
        expected = torch.cat([rows[:, h, head] for h, head in enumerate(heads)], dim=1)
    into = torch.zeros_like(expected, device="cuda")
    before = torch.full_like(into, 5.0)
    beside = torch.cuda.Stream()
    torch.cuda.synchronize()
    for round_ in range(3):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            # Late on the stream, the target is read and then overwritten.
            pause(4 * SHORT)
            into.copy_(before)
            pause(4 * SHORT)
            read = into.clone()
            into.fill_(float("nan"))
            expect_behind(SHORT)
            fetch(sequence, (into[0], into[1]))
            # An embedded engine has written the rows when the call returns, so any stream may read
            # them.
            with torch.cuda.stream(beside if client.transport == "embedded" else stream):
                got = into.clone()
            pause(SHORT)
            later = into.clone()
        torch.cuda.synchronize()
        assert torch.equal(read, before), round_
        assert torch.equal(got.cpu(), expected), round_
        assert torch.equal(later.cpu(), expected), round_
