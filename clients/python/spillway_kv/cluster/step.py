"""Decode steps of sequences on several daemons."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from types import TracebackType
from typing import Any, NamedTuple

import spillway_kv
from spillway_kv.at_once import AttendsAtOnce, Portion
from spillway_kv.attend_sums import LayerStatistics
from spillway_kv.batch import check_tensors
from spillway_kv.cluster.groups import groups_of
from spillway_kv.cluster.merging import heads_of, joined, merged_results
from spillway_kv.cluster.part import MOVES_MAX, Part
from spillway_kv.cluster.placement import Placement
from spillway_kv.cluster.sequence import ClusterSequence
from spillway_kv.cluster.shares import local_policy
from spillway_kv.errors import SpillwayError
from spillway_kv.policy import Policy
from spillway_kv.results import AttendResult
from spillway_kv.tensors import Array, OutDType, engine_array


class _Owned(NamedTuple):
    """A part, and the index of its sequence in the step."""

    number: int
    part: Part


def _followed(
    owned: SequenceABC[_Owned], handles: SequenceABC[spillway_kv.Sequence], error: SpillwayError
) -> bool:
    """Whether a call with these handles failed because one of the parts has moved."""
    pairs = zip(owned, handles, strict=True)
    # Every part is checked, not only those up to the first that moved.
    moved = [each.part.follow(error, handle) for each, handle in pairs]
    return any(moved)


def _moved_too_often() -> SpillwayError:
    return spillway_kv.Aborted(f"a sequence of the step has moved {MOVES_MAX} times")


class _Group:
    """The parts with the same daemon and share, and their step on this daemon."""

    def __init__(
        self,
        placement: Placement,
        owned: SequenceABC[_Owned],
        token_count: int,
        policy: Policy | None,
        starts: SequenceABC[int],
    ) -> None:
        """Begins the step. starts: of all sequences of the whole step."""
        self.owned = list(owned)
        self.share = owned[0].part.share
        self.daemon = owned[0].part.daemon
        self.handles = [each.part.sequence for each in owned]
        self._numbers = [each.number for each in owned]
        self._step = placement.client(self.daemon).begin_step(
            self.handles,
            token_count=token_count,
            policy=local_policy(policy, self.share),
            starts=[starts[number] for number in self._numbers],
        )

    def ask(
        self,
        layer: int,
        group: int,
        rows: tuple[Array, Array, Array],
        out_dtype: OutDType | None,
        *,
        at_once: bool,
    ) -> Callable[[], tuple[Any, Any]]:
        """See `StepState.ask`. rows: q, k and v of the whole step."""
        heads, query_heads = self.share.heads, self.share.query_heads(group)
        q, k, v = (self._mine(array) for array in rows)
        return self._step.state.ask(
            self.share.local(layer),
            heads_of(q, query_heads, 2),
            heads_of(k, heads, 1),
            heads_of(v, heads, 1),
            out_dtype,
            at_once=at_once,
        )

    def _mine(self, array: Any) -> Any:
        """Selects the group's sequences from an array of all the step's sequences."""
        if len(self._numbers) == array.shape[0]:
            return array
        first, last = self._numbers[0], self._numbers[-1]
        if last - first + 1 == len(self._numbers):
            return array[first : last + 1]
        return array[self._numbers]

    def portion(self, group: int) -> Portion | None:
        """Returns the group's portion of the whole step's arrays. None: it is no regular slice."""
        first, last = self._numbers[0], self._numbers[-1]
        every = (last - first) // max(len(self._numbers) - 1, 1) or 1
        numbers = range(first, last + 1, every)
        if list(numbers) != self._numbers:
            return None
        share = self.share
        layers, heads = share.layers.start, share.heads
        return Portion(self._step.state, layers, numbers, heads, share.query_heads(group))

    def results(self) -> dict[int, AttendResult]:
        return dict(zip(self._numbers, self._step.results(), strict=True))

    def close(self) -> None:
        self._step.close()


class ClusterStep:
    """Like `spillway_kv.DecodeStep`. `ClusterClient.begin_step` creates it. Not thread-safe.

    Attributes:
        sequences: The sequences, in the order of the arrays.
        starts: Position of the first new token of each sequence.
        token_count: Number of new tokens of each sequence.
    """

    def __init__(
        self,
        placement: Placement,
        sequences: SequenceABC[ClusterSequence],
        token_count: int,
        policy: Policy | None,
        starts: SequenceABC[int] | None = None,
    ) -> None:
        if not sequences:
            raise ValueError("a step needs a sequence")
        for sequence in sequences:
            if sequence.model != sequences[0].model:
                raise ValueError(
                    f"{sequence.name} is of {sequence.model}, {sequences[0].name} of "
                    f"{sequences[0].model}"
                )
        if starts is not None and len(starts) != len(sequences):
            raise ValueError(
                f"{len(starts)} starts for {len(sequences)} sequences: one for each is needed"
            )
        self._placement = placement
        self._policy = policy
        self.sequences = tuple(sequences)
        self.token_count = token_count
        self.starts = (
            tuple(sequence.token_count for sequence in sequences)
            if starts is None
            else tuple(starts)
        )
        # Keys: the first layer of each group of layers.
        self._owned_from = {
            layer: [
                _Owned(number, part)
                for number, sequence in enumerate(self.sequences)
                for part in sequence.parts_of(layer)
            ]
            for layer in sequences[0].first_layers
        }
        self._groups: dict[int, list[_Group]] = {}
        # Asks the groups of such a list together. None: they are asked one by one.
        self._at_once: dict[int, tuple[list[_Group], AttendsAtOnce | None]] = {}
        self._last: list[_Group] = []
        # The object that asked in the last attend. None: the groups were asked one by one.
        self._last_at_once: AttendsAtOnce | None = None
        try:
            for layer in sequences[0].first_layers:
                self._groups_of(layer)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ClusterStep:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _owned(self, layer: int) -> list[_Owned]:
        """Returns the parts that serve a layer and the other layers of its group."""
        first = max((each for each in self._owned_from if each <= layer), default=-1)
        if first < 0 or layer >= self.sequences[0].whole.layer_count:
            self.sequences[0].parts_of(layer)  # raises
        return self._owned_from[first]

    def _groups_of(self, layer: int) -> list[_Group]:
        """Returns the daemons' steps that serve a layer, on the daemons where its parts are now."""
        owned = self._owned(layer)
        first = owned[0].part.share.layers.start
        known = self._groups.get(first, [])
        if known and all(
            each.part.sequence is handle
            for group in known
            for each, handle in zip(group.owned, group.handles, strict=True)
        ):
            return known
        for _ in range(MOVES_MAX):
            begun = self._regrouped(owned, known)
            if begun is not None:
                self._groups[first] = begun
                return begun
        raise _moved_too_often()

    def _regrouped(
        self, owned: SequenceABC[_Owned], known: SequenceABC[_Group]
    ) -> list[_Group] | None:
        """Begins steps on the daemons that have the parts. None: a part has moved meanwhile."""
        # Groups that did not change keep their steps.
        kept = {tuple(map(id, group.handles)): group for group in known}
        groups: list[_Group] = []
        begun: list[_Group] = []
        for indices in groups_of([each.part for each in owned], range(len(owned))):
            mine = [owned[index] for index in indices]
            handles = [each.part.sequence for each in mine]
            group = kept.get(tuple(map(id, handles)))
            if group is None:
                try:
                    group = _Group(
                        self._placement, mine, self.token_count, self._policy, self.starts
                    )
                except BaseException as error:
                    for other in begun:
                        other.close()
                    if not isinstance(error, SpillwayError) or not _followed(mine, handles, error):
                        raise
                    return None
                begun.append(group)
            groups.append(group)
        for group in known:
            if group not in groups:
                group.close()
        return groups

    def attend(
        self, layer: int, q: Array, k: Array, v: Array, *, out_dtype: OutDType | None = None
    ) -> tuple[Any, Any]:
        """Appends the new tokens' K and V to a layer and attends, on all daemons at the same time.

        Arguments, results and errors are those of `spillway_kv.DecodeStep.attend`. After an error
        some daemons may have the new tokens. The same call may be repeated.
        """
        q, k, v = engine_array(q, "q"), engine_array(k, "k"), engine_array(v, "v")
        done: dict[int, tuple[_Group, tuple[Any, Any]]] = {}
        groups = self._groups_of(layer)
        at_once = self._asked_at_once(groups)
        if at_once is not None:
            whole = self.sequences[0].whole
            counts = len(self.sequences), self.token_count
            kind = check_tensors(whole, counts, (q, k, v), out_dtype)
            try:
                out, lse, failed = at_once.attend(layer, (q, k, v), kind)
            except BaseException:
                # For example an interrupt.
                self.close()
                raise
            self._last, self._last_at_once = groups, at_once
            if not failed:
                return out, lse
            # Failed groups are asked again below, where moved parts are followed and seals waited
            # for.
            for index, group in enumerate(groups):
                if index not in failed:
                    portion = at_once.portions[index]
                    done[id(group)] = group, (portion.of(out), portion.of(lse))
            at_once.share_results()
        self._last_at_once = None
        for _ in range(MOVES_MAX):
            groups = self._groups_of(layer)
            waiting = [group for group in groups if id(group) not in done]
            for group, answer in self._answers(waiting, layer, (q, k, v), out_dtype):
                done[id(group)] = group, answer
            if all(id(group) in done for group in groups) and groups is self._groups_of(layer):
                self._last = groups
                return self._joined([done[id(group)] for group in groups])
        raise _moved_too_often()

    def _asked_at_once(self, groups: list[_Group]) -> AttendsAtOnce | None:
        """Returns the object that asks all groups of a layer together. None: not possible."""
        first = groups[0].share.layers.start
        known, at_once = self._at_once.get(first, (None, None))
        if known is groups and (at_once is None or at_once.begun()):
            return at_once
        group = self.sequences[0].group
        portions = [each.portion(group) for each in groups]
        usable = [portion for portion in portions if portion is not None]
        at_once = None
        if len(usable) == len(groups) and AttendsAtOnce.possible(usable):
            at_once = AttendsAtOnce(usable)
        self._at_once[first] = groups, at_once
        return at_once

    def _answers(
        self,
        groups: SequenceABC[_Group],
        layer: int,
        rows: tuple[Array, Array, Array],
        out_dtype: OutDType | None,
    ) -> list[tuple[_Group, tuple[Any, Any]]]:
        """Asks all groups, then waits for each. Leaves out groups from which a part has moved."""
        query_group = self.sequences[0].group
        # In one thread, because waking up another thread takes longer than asking.
        waiting: list[tuple[_Group, Callable[[], tuple[Any, Any]]]] = []
        answers: list[tuple[_Group, tuple[Any, Any]]] = []
        failed: list[Exception] = []

        def note(group: _Group, error: Exception) -> None:
            try:
                moved = isinstance(error, SpillwayError) and _followed(
                    group.owned, group.handles, error
                )
            except SpillwayError as lost:
                error, moved = lost, False
            if not moved:
                failed.append(error)

        try:
            for group in groups:
                try:
                    asked = group.ask(layer, query_group, rows, out_dtype, at_once=len(groups) > 1)
                except Exception as error:  # noqa: BLE001  (raised once the others have ended)
                    note(group, error)
                else:
                    waiting.append((group, asked))
            for group, answer in waiting:
                try:
                    answers.append((group, answer()))
                except Exception as error:  # noqa: BLE001
                    note(group, error)
        except BaseException:
            # An interrupt: give up the other answers too.
            self.close()
            raise
        if failed:
            raise failed[0]
        return answers

    def _joined(self, answers: SequenceABC[tuple[_Group, tuple[Any, Any]]]) -> tuple[Any, Any]:
        """Joins the answers to arrays of all heads of all sequences, in order."""
        count = len(self.sequences)
        if all(len(group.owned) == count for group, _ in answers):
            ordered = sorted(answers, key=lambda each: each[0].share.kv_heads.start)
            return tuple(joined([answer[i] for _, answer in ordered], 2) for i in (0, 1))
        # For each sequence, a dict from the first KV head of a part to its output and log-sum-exp.
        rows: list[dict[int, tuple[Any, Any]]] = [{} for _ in range(count)]
        for group, answer in answers:
            for place, owned in enumerate(group.owned):
                one = slice(place, place + 1)
                rows[owned.number][group.share.kv_heads.start] = answer[0][one], answer[1][one]
        return tuple(
            joined([joined([row[head][i] for head in sorted(row)], 2) for row in rows], 0)
            for i in (0, 1)
        )

    def results(self) -> list[AttendResult]:
        """Returns the full results of the last attend, one per sequence, with certificates."""
        if not self._last:
            raise ValueError(
                "the step has no results: no layer was attended, or the last attend failed"
            )
        if self._last_at_once is not None:
            self._last_at_once.share_results()
        parts: list[list[tuple[int, int, AttendResult]]] = [[] for _ in self.sequences]
        for group in self._last:
            heads = group.share.kv_heads
            for number, result in group.results().items():
                parts[number].append((heads.start, len(heads), result))
        merged = []
        for each in parts:
            each.sort(key=lambda part: part[0])
            merged.append(merged_results([r for _, _, r in each], [count for _, count, _ in each]))
        return merged

    def sums(self) -> LayerStatistics:
        """Returns the sums over the results of the last attend."""
        return LayerStatistics.of(self.results())

    def close(self) -> None:
        """Ends the step."""
        for groups in self._groups.values():
            for group in groups:
                group.close()
