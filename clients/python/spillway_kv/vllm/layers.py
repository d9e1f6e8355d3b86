"""The worker with which the layers of this process attend, step by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from spillway_kv.vllm.model_graph import ModelGraph
from spillway_kv.vllm.step_plan import StepPlan, StepReport
from spillway_kv.vllm.worker import Worker


class Batch(Protocol):
    """The part of vLLM's description of a batch that is needed."""

    def newest_blocks(self) -> list[tuple[int, int]]:
        """Returns (block of the newest token, position of the first new one) of each active row."""


class Attending:
    """Combines plan, batch and worker. For one thread.

    Args:
        worker: The worker of this rank.
        layer_names: vLLM's names of the worker's layers, in the model's order.
        read_sinks: Returns the model's learned sinks as for `Worker.set_sinks`, from its weights.
    """

    def __init__(
        self,
        worker: Worker,
        layer_names: list[str],
        read_sinks: Callable[[], list[torch.Tensor | None]] = list,
    ) -> None:
        self.worker = worker
        self._read_sinks = read_sinks
        self._has_new_weights = False
        self._numbers: Mapping[str, int] = {name: i for i, name in enumerate(layer_names)}
        self._plan: StepPlan | None = None
        self._begun = False

    def note_new_weights(self) -> None:
        """Makes the next step read learned sinks anew."""
        self._has_new_weights = True

    def plan(self, plan: StepPlan) -> None:
        """Stores the plan of the next step."""
        if self._has_new_weights:
            self._has_new_weights = False
            self.worker.set_sinks(self._read_sinks())
        self._plan = plan
        self._begun = False

    def begin(self, names: Sequence[str]) -> None:
        """Prepares the sequences of the step, before the first layer.

        Args:
            names: vLLM's ids of the requests, in the order of their rows in the batch.

        Raises:
            RuntimeError: The requests are not those of the plan.
        """
        if self._plan is None:
            return
        requests = {request.name: request for request in self._plan.requests}
        if requests.keys() != set(names) or len(names) != len(requests):
            raise RuntimeError(
                f"the batch has the requests {sorted(names)}, the plan {sorted(requests)}"
            )
        begins, position = {}, 0
        for name in names:
            begins[requests[name].key] = position
            position += requests[name].token_count
        self.worker.begin(self._plan, begins)
        self._begun = True

    def number(self, layer_name: str) -> int:
        """Returns the engine's index of a layer."""
        return self._numbers[layer_name]

    def attend(
        self,
        layer_name: str,
        batch: Batch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attends at a layer. If the step has not begun, this begins it."""
        if self._plan is None:
            if _is_captured(out):
                # Every run of the graph would return zeros.
                raise RuntimeError(
                    "vLLM captures a CUDA graph around Spillway's attention, but not in the way "
                    'that Spillway knows: use --compilation-config \'{"cudagraph_mode": '
                    '"PIECEWISE"}\''
                )
            # vLLM runs a batch that belongs to no request.
            out.zero_()
            return
        if not self._begun:
            self.worker.begin(self._plan, begins_of(self._plan, batch))
            self._begun = True
        self.worker.attend(self._numbers[layer_name], q, k, v, out)

    def new_graph(self, without_owner: Callable[[torch.Tensor], torch.Tensor]) -> ModelGraph:
        """Returns a graph for a capture of the model. Arguments as for `ModelGraph`."""
        return self.worker.new_graph(without_owner)

    def run(self, graph: ModelGraph) -> None:
        """Runs the whole step as a graph. The step must have begun."""
        if self._plan is None:
            for layer in graph.pieces():
                layer.out.zero_()
            return
        if not self._begun:
            raise RuntimeError("vLLM runs a graph, but did not say which requests are in the batch")
        self.worker.run(graph)

    def end(self) -> StepReport:
        """Ends the step. For a step without tokens, keeps and drops sequences as planned."""
        plan, self._plan = self._plan, None
        if plan is not None and not self._begun:
            self.worker.begin(StepPlan(kept=plan.kept, dropped=plan.dropped), {})
        return self.worker.end()


def begins_of(plan: StepPlan, batch: Batch) -> dict[int, int]:
    """Returns the position of each request's first token in the batch, by key.

    vLLM's older model runner (V1) does not say which row belongs to which request. The block of a
    row's newest token tells: only one request has this block.

    Raises:
        RuntimeError: The rows of the batch are not those of the plan.
    """
    rows = batch.newest_blocks()
    starts = dict(rows)
    begins = {
        r.key: starts[r.block] for r in plan.requests if r.block is not None and r.block in starts
    }
    if len(starts) != len(rows) or len(begins) != len(rows) or len(rows) != len(plan.requests):
        raise RuntimeError(
            f"the batch has rows with the blocks {sorted(block for block, _ in rows)}, the plan "
            f"{[request.block for request in plan.requests]}"
        )
    return begins


def _is_captured(tensor: torch.Tensor) -> bool:
    """Whether operations with the tensor become part of a graph now."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


_attending: Attending | None = None
_capturing: ModelGraph | None = None
_pool_is_thin = False


def pool_is_thin() -> bool:
    """Whether other layers have no K/V in vLLM's pool, so that it can be nearly empty."""
    return _pool_is_thin


def set_pool_is_thin(value: bool) -> None:
    """Sets it for this process, when its layers are made."""
    global _pool_is_thin  # noqa: PLW0603
    _pool_is_thin = value


def attending() -> Attending | None:
    """Returns the object of this process. None before vLLM has set it up."""
    return _attending


def set_attending(value: Attending | None) -> None:
    """Sets the object of this process."""
    global _attending  # noqa: PLW0603
    _attending = value


def capturing() -> ModelGraph | None:
    """Returns the graph into which vLLM captures the model, if it does."""
    return _capturing


def set_capturing(value: ModelGraph | None) -> None:
    """Sets the graph."""
    global _capturing  # noqa: PLW0603
    _capturing = value
