"""A model's step in one CUDA graph, whose attends a decoder brings: same bits as layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import spillway_kv
import torch
from daemon_process import binary, device, on_gpu
from spillway_kv import Client, Model, Sequence
from spillway_kv.lab.serving import prefer_library
from spillway_kv.step_graph import StepGraph
from spillway_kv.stream import StreamDecoder

pytestmark = pytest.mark.skipif(not on_gpu() or "," in device(), reason="needs one GPU")

LAYERS, HEADS, KV_HEADS, DIM = 2, 8, 2, 64
WIDTH = 128
# The graph is for one more sequence.
LENGTHS = (4085, 3000)
STEPS = 30

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module", params=["sparse", "dense"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """An engine that chooses rows by codes, or one that attends to all because they are copied."""
    prefer_library(binary())
    dense = request.param == "dense"
    settings = {
        "memory.limit": "1GiB",
        "device.name": device(),
        "models.sampling_seed": "0",
        "device.gpu_memory_limit": "2GiB",
        "device.gpu_resident_limit": "256MiB" if dense else "0",
        "device.reproducible": "false" if dense else "true",
    }
    with spillway_kv.connect("embedded:", settings=settings) as connected:
        yield connected


@pytest.fixture(scope="module")
def model(client: Client) -> Model:
    return client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="bfloat16",
    )


def draw(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def filled(client: Client, model: Model) -> list[Sequence]:
    """Sequences with the same rows at each call."""
    made = []
    for length in LENGTHS:
        made.append(client.create_sequence(model))
        for layer in range(LAYERS):
            k, v = draw(length + layer, 2, KV_HEADS, length, DIM)
            made[-1].append(layer, 0, k, v)
    return made


class Toy:
    """Layers that project to q, k and v, attend, and add to a residual stream [N, WIDTH]."""

    def __init__(self, count: int) -> None:
        self.inputs = torch.zeros(count, WIDTH, dtype=torch.bfloat16, device="cuda")
        heads = HEADS + 2 * KV_HEADS
        self._qkv = [draw(50 + layer, WIDTH, heads * DIM) / 8 for layer in range(LAYERS)]
        self._out = [draw(60 + layer, HEADS * DIM, WIDTH) / 8 for layer in range(LAYERS)]

    def __call__(self, attend: Attend) -> torch.Tensor:
        x = self.inputs + 0
        for layer in range(LAYERS):
            rows = (x @ self._qkv[layer]).view(len(x), 1, HEADS + 2 * KV_HEADS, DIM)
            q, k, v = rows.split([HEADS, KV_HEADS, KV_HEADS], 2)
            made = attend(layer, q, k.transpose(1, 2), v.transpose(1, 2))
            x = x + made.reshape(len(x), HEADS * DIM) @ self._out[layer]
        return x


class Captured:
    """The model's step as a graph for three sequences.

    Attributes:
        toy: The model.
        graph: The graph.
        made: Its output.
        tensors: q, k, v and the output of each layer's attend.
    """

    def __init__(self, model: Model) -> None:
        self.toy = Toy(3)
        self.graph = StepGraph(model)
        self.tensors: list[tuple[torch.Tensor, ...]] = []
        self.toy(lambda layer, q, k, v: q)  # cuBLAS allocates memory at its first use
        with self.graph.capture():
            self.made = self.toy(self._leave_open)
        assert self.graph.counts == (3, 1)
        assert self.graph.attend_count == LAYERS

    def _leave_open(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        out, lse = self.graph.attend(layer, q, k, v)
        assert lse is not None
        assert lse.shape == (3, 1, HEADS)
        self.tensors.append((q, k, v, out))
        return out


@pytest.fixture(scope="module")
def step_of_three(model: Model) -> Captured:
    return Captured(model)


def run(step: Captured, decoder: StreamDecoder, way: str) -> torch.Tensor:
    """Runs a step of the decoder's two sequences in a way. Returns the model's output."""
    if way == "graph":
        decoder.run(step.graph)
        return step.made
    if way == "pieces":
        for layer, (q, k, v, out) in enumerate(step.tensors):
            step.graph.run_piece(layer)
            out[:2] = decoder.attend(layer, q[:2], k[:2], v[:2])[0]
        step.graph.run_piece(LAYERS)
        return step.made

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.cat([decoder.attend(layer, q[:2], k[:2], v[:2])[0], q[2:]])

    return step.toy(attend)


def test_the_same_bits_as_layer_by_layer(
    client: Client, model: Model, step_of_three: Captured
) -> None:
    """Other sequences use the same graph, and one of them outgrows its launches."""
    wanted: list[torch.Tensor] = []
    changes = []
    for way in ("layers", "graph", "graph", "pieces"):
        sequences = filled(client, model)
        with client.open_decoder(sequences) as decoder:
            changes.append(0)
            for step in range(STEPS):
                step_of_three.toy.inputs.copy_(draw(1000 + step, 3, WIDTH))
                changes[-1] += decoder.next()
                made = run(step_of_three, decoder, way)[:2].clone()
                if len(wanted) == step:
                    wanted.append(made)
                assert torch.equal(made, wanted[step]), (way, step)
            decoder.finish()
            if client.get_server_info().devices[0].resident_used_bytes > 0:
                results = [each for layer in range(LAYERS) for each in decoder.results(layer)]
                assert {p for each in results for p in each.certificate.promises.flat} == {"exact"}
            assert [decoder.sums(layer).attend_count for layer in range(LAYERS)] == [2 * STEPS] * 2
        for sequence, length in zip(sequences, LENGTHS, strict=True):
            assert sequence.token_count == length + STEPS
            assert sequence.refresh().layer_token_counts == (length + STEPS,) * LAYERS
            sequence.delete()
    # Launches are new at first, and others beyond 4,096 tokens.
    assert changes[0] >= 2
    assert changes == [changes[0]] * 4
    assert all(step.isfinite().all() for step in wanted)


def test_an_element_that_is_not_finite(
    client: Client, model: Model, step_of_three: Captured
) -> None:
    """Its sequence's outputs are NaN, and it loses the step's token; the other one keeps it."""
    sequences = filled(client, model)
    with client.open_decoder(sequences) as decoder:
        for bad in (False, True):
            step_of_three.toy.inputs.copy_(draw(1000, 3, WIDTH))
            if bad:
                step_of_three.toy.inputs[1, 5] = float("inf")
            decoder.next()
            decoder.run(step_of_three.graph)
        made = step_of_three.made[:2].isfinite().all(1)
        assert made.tolist() == [True, False]
        with pytest.raises(spillway_kv.SpillwayError, match="finite"):
            decoder.finish()
    assert [s.token_count for s in sequences] == [LENGTHS[0] + 2, LENGTHS[1] + 1]


def test_misuse(client: Client, model: Model, step_of_three: Captured) -> None:
    toy = step_of_three.toy
    toy.inputs.copy_(draw(1000, 3, WIDTH))
    sequences = filled(client, model)
    graph = StepGraph(model)
    q, k, v = step_of_three.tensors[0][:3]
    with pytest.raises(spillway_kv.FailedPrecondition, match="not being captured"):
        graph.attend(0, q, k, v)
    with pytest.raises(ValueError, match=r"k has shape \[2, 2, 1, 64\], not \[3, 2, 1, 64\]"):
        graph.attend(0, q, k[:2], v)
    with client.open_decoder(sequences) as decoder:
        with pytest.raises(ValueError, match="the graph is for 0 sequences with 0 new tokens"):
            decoder.run(graph)
        with pytest.raises(spillway_kv.FailedPrecondition, match="begin the next step first"):
            decoder.run(step_of_three.graph)
        decoder.next()
        captured = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(captured):
            toy(lambda layer, q, k, v: graph.attend(layer + 1, q, k, v)[0])
        with pytest.raises(spillway_kv.FailedPrecondition, match="not complete"):
            decoder.run(graph)
        graph.complete(captured)
        with pytest.raises(spillway_kv.InvalidArgument, match=r"layer 2 is not in \[0, 2\)"):
            decoder.run(graph)
        with pytest.raises(spillway_kv.OutOfRange, match=r"piece: 3 is not in \[0, 3\)"):
            graph.run_piece(3)
        decoder.run(step_of_three.graph)
        decoder.finish()
    graph.close()
    graph = StepGraph(model)
    with pytest.raises(ValueError, match="no attend was left open"), graph.capture():
        toy(lambda layer, q, k, v: q)
    with pytest.raises(ZeroDivisionError), graph.capture():
        toy(lambda layer, q, k, v: graph.attend(1 // (1 - layer), q, k, v)[0])
    # A capture that has failed is forgotten.
    with graph.capture():
        toy(lambda layer, q, k, v: graph.attend(layer, q, k, v)[0])
    assert graph.attend_count == LAYERS
    graph.close()
    with pytest.raises(ValueError, match="the graph is closed"):
        graph.run_piece(0)
    assert [s.token_count for s in sequences] == [n + 1 for n in LENGTHS]
