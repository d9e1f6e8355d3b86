"""What scheduler and workers tell each other about a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

LossKind = Literal["again", "memory", "failed"]
# What a later one asks for is more.
_KINDS: tuple[LossKind, ...] = get_args(LossKind)


@dataclass(frozen=True)
class Source:
    """Where a request's first rows come from: another sequence, forked.

    Attributes:
        key: The other sequence.
        token_count: Tokens taken from it.
    """

    key: int
    token_count: int


@dataclass(frozen=True)
class PlannedRequest:
    """A request's part of a step.

    Attributes:
        key: Its sequence on every worker; one for each request, and never used again.
        epoch: How often its rows have been lost; what is said of an earlier one counts no more.
        start: Tokens before this step.
        token_count: New tokens.
        decodes: Whether the policy of decode steps applies; a prompt is attended exactly.
        block: The pool's block of its newest token: no other request of the step has it.
        source: Where its first tokens' rows come from, if not from the request itself.
    """

    key: int
    epoch: int
    start: int
    token_count: int
    decodes: bool
    block: int
    source: Source | None = None


@dataclass
class StepPlan:
    """What the scheduler tells the workers.

    Attributes:
        requests: The step's requests, in any order.
        kept: Sequences of requests that have finished, the oldest first; they stay.
        dropped: Sequences that go, before anything else of the step.
    """

    requests: list[PlannedRequest] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Loss:
    """A request whose rows of this step are not there.

    Attributes:
        epoch: Of the plan.
        kind: `again`, it can be computed again at once; `memory`, it lacked memory;
            `failed`, it would fail again.
        reason: For people.
    """

    epoch: int
    kind: LossKind
    reason: str


@dataclass
class StepReport:
    """What the workers tell the scheduler.

    Attributes:
        losses: Requests whose output of this step is worth nothing, by key.
        gone: Kept sequences that had to make room, or are gone otherwise.
    """

    losses: dict[int, Loss] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)

    def merge(self, other: StepReport) -> None:
        """Adds what another rank says of the same step."""
        for key, loss in other.losses.items():
            mine = self.losses.get(key)
            if mine is None or _KINDS.index(loss.kind) > _KINDS.index(mine.kind):
                self.losses[key] = loss
        self.gone |= other.gone
