"""How vLLM's captures of whole steps leave attends open, with graphs that need no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from spillway_kv.vllm import graphs, layers
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager


class Graph:
    """A graph of torch's that notes what is called."""

    def __new__(cls, keep_graph: bool = False) -> Graph:
        return super().__new__(cls)

    def __init__(self, keep_graph: bool = False) -> None:
        self.keep_graph = keep_graph
        self.calls: list[str] = []

    def capture_begin(self, pool: Any = None) -> None:
        self.calls.append("begin")

    def capture_end(self) -> None:
        self.calls.append("end")

    def instantiate(self) -> None:
        self.calls.append("instantiate")

    def replay(self) -> None:
        self.calls.append("replay")

    def raw_cuda_graph(self) -> int:
        return 42


class ModelGraph:
    """What a capture leaves open."""

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.completed: list[int] = []
        self.step = SimpleNamespace(complete_raw=self.completed.append)


class Attending:
    """Makes graphs, and notes which are run."""

    def __init__(self) -> None:
        self.made: list[ModelGraph] = []
        self.ran: list[Any] = []

    def new_graph(self, without_owner: Any) -> ModelGraph:
        self.made.append(ModelGraph())
        return self.made[-1]

    def run(self, graph: Any) -> None:
        self.ran.append(graph)


@pytest.fixture
def attending(monkeypatch: pytest.MonkeyPatch) -> Iterator[Attending]:
    """The plugin, installed over a manager whose `capture` calls a function with its argument."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(CudaGraphManager, "capture", lambda self, body: body())
    monkeypatch.delattr(CudaGraphManager, "_spillway_captures", raising=False)
    graphs.install()
    graphs.install()
    made: Any = Attending()
    layers.set_attending(made)
    yield made
    layers.set_attending(None)
    del CudaGraphManager._spillway_captures


def capture(body: Any) -> None:
    CudaGraphManager.capture(None, body)  # type: ignore[arg-type]


def captured(layer: str | None) -> Any:
    """Captures a graph as vLLM does, with an attend of a layer or without attends."""
    made: list[Any] = []

    def body() -> None:
        made.append(torch.cuda.CUDAGraph())
        made[0].capture_begin(pool=None)
        graph: Any = layers.capturing()
        if layer is not None and graph is not None:
            graph.layers.append(layer)
        made[0].capture_end()

    capture(body)
    assert layers.capturing() is None
    assert torch.cuda.CUDAGraph is Graph
    return made[0]


def test_a_step_is_kept_and_run_with_its_attends(attending: Attending) -> None:
    graph = captured("a")
    assert graph.keep_graph
    assert graph.calls == ["begin", "end"]
    assert attending.made[0].completed == [42]
    graph.replay()
    graph.replay()
    assert attending.ran == [attending.made[0]] * 2
    assert graph.calls == ["begin", "end"]


def test_a_graph_without_attends_is_torchs(attending: Attending) -> None:
    """Such as that of a draft model."""
    graph = captured(None)
    graph.replay()
    assert graph.calls == ["begin", "end", "instantiate", "replay"]
    assert not attending.ran


def test_a_graph_of_zeros_does_not_run(attending: Attending) -> None:
    """vLLM captures some before the engine is there, to measure memory, and never runs them."""
    layers.set_attending(None)
    graph = captured("a")
    graph.replay()
    assert graph.calls[-1] == "replay"
    layers.set_attending(attending)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="before the engine was there"):
        graph.replay()


def test_pieces_are_torchs(attending: Attending) -> None:
    """vLLM captures them while the model runs."""

    def body() -> None:
        with set_forward_context(None, VllmConfig()):
            assert type(torch.cuda.CUDAGraph()) is Graph

    capture(body)


def test_a_capture_that_fails_leaves_nothing_behind(attending: Attending) -> None:
    def body() -> None:
        graph: Any = torch.cuda.CUDAGraph()
        graph.capture_begin()
        graph.capture_end = lambda: (_ for _ in ()).throw(ValueError("a kernel failed"))
        graph.capture_end()

    with pytest.raises(ValueError, match="a kernel failed"):
        capture(body)
    assert torch.cuda.CUDAGraph is Graph
    assert layers.capturing() is None
