"""The scheduler's side: requests, their sequences, and shared prefixes. Does not import vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spillway_kv.vllm.prefixes import Prefixes, block_hashes
from spillway_kv.vllm.step_plan import PlannedRequest, Source, StepPlan, StepReport

# A request waits for rows that another one computes if they are at least this many more tokens.
_WORTH_WAITING = 128
# After this many losses, a request begins only with its own rows. If the daemon has restarted, all
# kept sequences may be gone, and each attempt finds out about one.
_SHARED_LOSSES_MAX = 8
# A request fails if its rows were lost more often than this.
_LOSSES_MAX = 16


@dataclass
class _Request:
    name: str
    key: int
    salt: str
    prompt_token_count: int
    # Whether its tokens determine its K/V, so that equal tokens mean equal rows.
    comparable: bool
    epoch: int = 0
    source: Source | None = None
    # Whether its last step had drafts.
    drafted: bool = False
    # Number of finished requests when it last lacked memory. None: it did not.
    starved_at: int | None = None


@dataclass(frozen=True)
class Scheduled:
    """A request that the scheduler has put into a step.

    Attributes:
        name: vLLM's id of the request.
        start: Number of tokens computed before.
        token_count: Number of new tokens.
        block: Block of its newest token in the pool. None where nothing asks for it.
        draft_count: How many of the new tokens are drafts of speculative decoding.
    """

    name: str
    start: int
    token_count: int
    block: int | None
    draft_count: int = 0


class Requests:
    """Follows the scheduler, and plans the workers' steps. For one thread.

    Args:
        kept_count_max: Most sequences that stay after their request.
        reuses: Whether requests may begin with the rows of others, or with their own after a
            preemption. False if layers other than Spillway's keep K/V or a state, because those
            would be missing.
    """

    def __init__(self, kept_count_max: int, *, reuses: bool = True) -> None:
        self._prefixes = Prefixes(kept_count_max if reuses else 0)
        self._reuses = reuses
        self._requests: dict[str, _Request] = {}
        self._names: dict[int, str] = {}
        self._keys = 0
        self._finished_count = 0
        self._kept: list[int] = []
        self._dropped: list[int] = []
        self.reused_token_count = 0

    @property
    def kept(self) -> list[int]:
        """Sequences of finished requests, the least recently used first."""
        return self._prefixes.kept

    def add(
        self, name: str, tokens: Sequence[int] | None, prompt_token_count: int, salt: str
    ) -> None:
        """Adds a new request.

        Args:
            name: vLLM's id of the request.
            tokens: Its prompt. None if the prompt is not only token ids.
            prompt_token_count: Number of tokens of the prompt.
            salt: Other things that must be equal for K/V to be equal.
        """
        self._keys += 1
        comparable = self._reuses and tokens is not None
        request = _Request(name, self._keys, salt, prompt_token_count, comparable)
        self._requests[name] = request
        self._names[request.key] = name
        self._prefixes.add(
            request.key, block_hashes(salt, tokens) if comparable and tokens is not None else []
        )

    def matched(self, name: str, token_count: int, others_running: bool) -> int | None:
        """Returns for how many tokens a request can begin with existing rows.

        Args:
            name: vLLM's id of the request.
            token_count: Its tokens so far. Fewer are matched, because the last one must be
                computed.
            others_running: Whether other requests are being computed.

        Returns:
            None if it should wait: another request computes its rows, or memory is lacking.
        """
        request = self._requests[name]
        if request.starved_at is not None:
            if others_running and request.starved_at == self._finished_count:
                return None
            request.starved_at = None
        request.source = None
        if not self._reuses:
            # Not even its own rows: after a preemption, what other layers kept of it is gone.
            return 0
        own = min(self._prefixes.row_count(request.key), token_count - 1)
        shares = request.comparable and request.epoch < _SHARED_LOSSES_MAX
        match = self._prefixes.match(request.key, token_count - 1) if shares else None
        if match is None:
            return own
        if others_running and match.coming >= max(own, match.token_count) + _WORTH_WAITING:
            return None
        if match.token_count <= own:
            return own
        request.source = Source(match.key, match.token_count)
        return match.token_count

    def plan(self, scheduled: Iterable[Scheduled], preempted: Iterable[str]) -> StepPlan:
        """Plans a step.

        Args:
            scheduled: The requests of the step.
            preempted: Requests that are no longer being computed. Their rows stay.
        """
        plan = StepPlan(kept=self._kept, dropped=self._dropped)
        self._kept, self._dropped = [], []
        for name in preempted:
            if name in self._requests:
                key = self._requests[name].key
                self._prefixes.set_rows(key, self._prefixes.row_count(key), running=False)
        for item in scheduled:
            request = self._requests[item.name]
            source, request.source = request.source, None
            if source is not None and source.token_count == item.start:
                self._prefixes.use(source.key)
                self.reused_token_count += source.token_count
            else:
                source = None
            request.drafted = item.draft_count > 0
            one_or_drafts = item.token_count == 1 + item.draft_count
            decodes = one_or_drafts and item.start >= request.prompt_token_count
            plan.requests.append(
                PlannedRequest(
                    request.key,
                    request.epoch,
                    item.start,
                    item.token_count,
                    decodes,
                    item.block,
                    source,
                    item.name,
                    request.prompt_token_count,
                )
            )
            self._prefixes.set_rows(request.key, item.start + item.token_count, running=True)
        return plan

    def finish(self, name: str, tokens: Sequence[int] | None) -> None:
        """Handles a request that has finished or was aborted.

        Args:
            name: vLLM's id of the request.
            tokens: All its tokens. None if they do not determine its K/V.
        """
        request = self._requests.pop(name, None)
        if request is None:
            return
        del self._names[request.key]
        self._finished_count += 1
        rows = self._prefixes.row_count(request.key)
        if not request.comparable or tokens is None or rows == 0:
            self._prefixes.forget(request.key)
            self._dropped.append(request.key)
            return
        # The row of the last token may be that of a draft that was rejected for it.
        rows = min(rows, len(tokens) - request.drafted)
        hashes = block_hashes(request.salt, tokens, self._prefixes.hashes(request.key))
        dropped = self._prefixes.keep(request.key, hashes, rows)
        self._dropped += dropped
        if request.key not in dropped:
            self._kept.append(request.key)

    def take_report(self, report: StepReport, running_count: int) -> tuple[list[str], list[str]]:
        """Handles the report of the workers about a step.

        Args:
            report: Merged report of all ranks.
            running_count: Number of requests that are being computed.

        Returns:
            Requests that must be computed again, and requests that fail. A request fails if it
            would fail again, or if it lacks memory although no other request runs.
        """
        for key in report.gone:
            if key not in self._names:
                self._prefixes.forget(key)
                # Other ranks may still have it.
                self._dropped.append(key)
            elif key not in report.losses:
                # Its request was not in the step, and computes its rows again later.
                self._prefixes.set_rows(key, 0, running=False)
        again, failed = [], []
        for key, loss in report.losses.items():
            name = self._names.get(key)
            if name is None:
                # It has finished since. Without its rows, no request can begin with them.
                self._prefixes.forget(key)
                self._dropped.append(key)
                continue
            request = self._requests[name]
            if request.epoch != loss.epoch:
                continue
            request.epoch += 1
            request.source = None
            self._prefixes.set_rows(key, 0, running=False)
            self._dropped.append(key)
            alone = loss.kind == "memory" and running_count <= 1
            if loss.kind == "failed" or alone or request.epoch > _LOSSES_MAX:
                failed.append(name)
                continue
            again.append(name)
            if loss.kind == "memory":
                request.starved_at = self._finished_count
        return again, failed

    def reset(self) -> None:
        """Drops every kept sequence."""
        for key in self._prefixes.kept:
            self._prefixes.forget(key)
            self._dropped.append(key)
