"""The messages between scheduler and workers about a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

LossKind = Literal["again", "memory", "failed"]
# In order of severity.
_KINDS: tuple[LossKind, ...] = get_args(LossKind)


@dataclass(frozen=True)
class Source:
    """Another sequence, from which a request's first rows are forked.

    Attributes:
        key: Key of the other sequence.
        token_count: Number of tokens taken from it.
    """

    key: int
    token_count: int


@dataclass(frozen=True)
class PlannedRequest:
    """A request's part of a step.

    Attributes:
        key: Key of its sequence on every worker. Unique for each request, and never used again.
        epoch: How often its rows have been lost. Reports about an earlier epoch are ignored.
        start: Number of tokens before this step.
        token_count: Number of new tokens.
        decodes: Whether the policy of decode steps applies, to one token or to one and drafts after
            it. A prompt is attended exactly.
        block: Block of its newest token in the pool. No other request of the step has this block.
            None where vLLM says which requests are in the batch.
        source: The sequence from which its first rows are taken. None: its own.
        name: vLLM's id of the request.
        prompt_token_count: Number of tokens of its prompt. 0: not known.
    """

    key: int
    epoch: int
    start: int
    token_count: int
    decodes: bool
    block: int | None
    source: Source | None = None
    name: str = ""
    prompt_token_count: int = 0


@dataclass
class StepPlan:
    """The scheduler's message to the workers.

    Attributes:
        requests: The step's requests, in any order.
        kept: Sequences of finished requests that are kept from now on, the oldest first.
        dropped: Sequences that are deleted before anything else in the step.
    """

    requests: list[PlannedRequest] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loss:
    """A request whose rows of this step are missing.

    Attributes:
        epoch: Epoch in the plan.
        kind: `again`: it can be computed again at once. `memory`: it lacked memory. `failed`: it
            would fail again.
        reason: Description for people.
    """

    epoch: int
    kind: LossKind
    reason: str


@dataclass
class StepReport:
    """The workers' message to the scheduler.

    Attributes:
        losses: Requests whose output of this step is not valid, by key.
        gone: Kept sequences that were dropped to free memory, and sequences to begin with that have
            disappeared, whose requests may be unfinished.
    """

    losses: dict[int, Loss] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def merge(self, other: StepReport) -> None:
        """Adds the report of another rank for the same step."""
        for key, loss in other.losses.items():
            mine = self.losses.get(key)
            if mine is None or _KINDS.index(loss.kind) > _KINDS.index(mine.kind):
                self.losses[key] = loss
        self.gone |= other.gone
