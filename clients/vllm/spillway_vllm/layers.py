"""The worker that this process' layers attend with, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from spillway_vllm.step_plan import StepPlan, StepReport
from spillway_vllm.worker import Worker


class Batch(Protocol):
    """What vLLM tells of a batch."""

    def newest_blocks(self) -> list[tuple[int, int]]:
        """The block of each row's newest token, and where its first new token is."""


class Attending:
    """Brings plan, batch and worker together. For one thread.

    Args:
        worker: The rank's.
        layer_names: vLLM's names of its layers, in the model's order.
    """

    def __init__(self, worker: Worker, layer_names: list[str]) -> None:
        self.worker = worker
        self._numbers: Mapping[str, int] = {name: i for i, name in enumerate(layer_names)}
        self._plan: StepPlan | None = None
        self._begun = False

    def plan(self, plan: StepPlan) -> None:
        """Takes the plan of the step that comes."""
        self._plan = plan
        self._begun = False

    def attend(
        self,
        layer_name: str,
        batch: Batch,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attends at a layer; the first of a step makes the sequences ready."""
        if self._plan is None:
            # vLLM tries a batch that is no request's.
            out.zero_()
            return
        if not self._begun:
            self.worker.begin(self._plan, begins_of(self._plan, batch))
            self._begun = True
        self.worker.attend(self._numbers[layer_name], q, k, v, out)

    def end(self) -> StepReport:
        """Ends the step; of one without tokens what it keeps and drops is done."""
        plan, self._plan = self._plan, None
        if plan is not None and not self._begun:
            self.worker.begin(StepPlan(kept=plan.kept, dropped=plan.dropped), {})
        return self.worker.end()


def begins_of(plan: StepPlan, batch: Batch) -> dict[int, int]:
    """Where each request's first token is in the batch, by key.

    vLLM does not say which row is whose: their newest blocks do, each of which one request
    alone has.

    Raises:
        RuntimeError: The batch has other rows than the plan.
    """
    rows = batch.newest_blocks()
    starts = dict(rows)
    begins = {r.key: starts[r.block] for r in plan.requests if r.block in starts}
    if len(starts) != len(rows) or len(begins) != len(rows) or len(rows) != len(plan.requests):
        raise RuntimeError(
            f"the batch has rows with the blocks {sorted(block for block, _ in rows)}, the plan "
            f"{sorted(request.block for request in plan.requests)}"
        )
    return begins


_attending: Attending | None = None


def attending() -> Attending | None:
    """The process' own; None before vLLM has set it up."""
    return _attending


def set_attending(value: Attending | None) -> None:
    """Makes it the process' own."""
    global _attending  # noqa: PLW0603
    _attending = value
