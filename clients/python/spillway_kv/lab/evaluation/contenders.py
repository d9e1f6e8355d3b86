"""The methods that answer the same questions, with budgets of about as many rows as the default."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spillway_kv.indices import KeyIndices, RotationHash
from spillway_kv.lab.evaluation.asking import Asked, Asker, digest_of, forks
from spillway_kv.lab.evaluation.attends import EXACT, Case
from spillway_kv.lab.evaluation.decoding import step
from spillway_kv.lab.evaluation.indexing import Index
from spillway_kv.lab.evaluation.methods import OURS, QUALITY, Method, registry
from spillway_kv.lab.evaluation.perplexity import Arrays, arrays_of
from spillway_kv.lab.evaluation.workbench import Workbench
from spillway_kv.policy import Policy, TopK
from spillway_kv.row_types import RowType

# The data for all rankings, so that all methods share the rows of one sequence.
INDEX = Index(RotationHash(), KeyIndices(quest_page_token_count=16, int4_keys=True))
# The data for those methods that need no other data than codes.
_CODES = Index(RotationHash())
# Tokens of sink and window, which every method attends in addition.
ALWAYS = 128
# Tokens on which budgets are chosen.
PILOT = 32


@dataclass(frozen=True)
class Contender:
    """A method, and its points that may be compared.

    Attributes:
        name: Name in JSON.
        label: Name for people.
        kind: Kind of method, which determines its colour.
        knob: What the values of the points mean. Empty if there is only one point.
        points: Name and policy of each point.
        index: The index of the sequence that it reads.
    """

    name: str
    label: str
    kind: str
    knob: str
    points: tuple[tuple[str, Policy], ...]
    index: Index = INDEX

    def policy(self, value: str) -> Policy:
        """Returns the policy of a point. For top-k any share may be named, also if it is no point.

        Raises:
            KeyError: There is no such point.
        """
        if self.kind == "top-k":
            policy = self.points[0][1]
            return dataclasses.replace(policy, heavy=TopK(fraction=float(value)))
        return dict(self.points)[value]

    def asked(self, value: str) -> Asked:
        """Returns what is asked at a point."""
        return Asked(self.label, Case(self.index, self.policy(value)))


def index_of(row_type: RowType) -> Index:
    """Returns the index that serves all rankings, or with rows of 8 bits those that it can."""
    return INDEX if row_type == "model" else dataclasses.replace(_CODES, row_type=row_type)


def contenders(bench: Workbench, length: int, row_type: RowType = "model") -> list[Contender]:
    """Returns all methods, dense attention first.

    Args:
        bench: The workbench.
        length: Tokens of the context.
        row_type: How the methods' rows are stored. With int8, dense attention has rows in bfloat16,
            and there is no method that needs other data than codes.
    """
    setting = dataclasses.replace(bench.setting, token_count=length)
    known = {method.name: method for method in registry(setting, bench.shapes)}

    def of(method: Method, label: str) -> Contender:
        points = tuple((point.value, point.case.policy) for point in method.points)
        return Contender(method.name, label, method.kind, method.knob, points)

    made = [Contender("exact", "dense, quality `exact`", "dense", "", (("", EXACT),))]
    for point in known[QUALITY].points[::-1]:
        label = f"Spillway, quality `{point.value}`"
        made.append(Contender(point.value, label, OURS, "", (("", point.case.policy),)))
    made += [
        of(known["codes"], "our codes' top-k"),
        of(known["quest"], "Quest"),
        of(known["twilight-quest"], "Twilight on Quest"),
        of(known["vattention-codes"], "vAttention on our codes"),
    ]
    alone = Policy(heavy=TopK(count=0), tail="none")
    made.append(Contender("window", "sink and window alone", "window", "", (("", alone),)))
    if row_type == "model":
        return made
    dense = dataclasses.replace(made[0], index=_CODES)
    stored = dataclasses.replace(made[0], name="stored", label="dense, over rows of 8 bits")
    others = [one for one in (stored, *made[1:]) if one.name not in ("quest", "twilight-quest")]
    index = index_of(row_type)
    return [dense, *(dataclasses.replace(one, index=index) for one in others)]


def comparable(
    contender: Contender, shares: Callable[[Policy], float], length: int
) -> tuple[str, Policy]:
    """Returns the point of a contender that reads about as many rows as the default.

    For top-k a point is made: the default's share of rows without sink and window. For other
    methods, it is the point with the nearest share.

    Args:
        contender: The contender.
        shares: Returns the share of the rows that a policy reads.
        length: Tokens of the context.
    """
    if len(contender.points) == 1:
        return contender.points[0]
    wanted = shares(Policy())
    if contender.kind == "top-k":
        value = f"{float(f'{max(wanted - ALWAYS / length, 0.002):.2g}'):g}"
        return value, contender.policy(value)
    return min(
        contender.points, key=lambda point: abs(math.log(shares(point[1])) - math.log(wanted))
    )


def matched(asker: Asker, tokens: torch.Tensor, rivals: Sequence[Contender]) -> list[str]:
    """Returns the point of each contender that reads about as many rows as the default.

    Args:
        asker: Asker for the length of the contexts.
        tokens: Token ids of a text of that length, on the last ones of which rows are counted.
        rivals: The contenders.
    """
    policies = [EXACT, Policy()]
    policies += [policy for one in rivals if one.kind != "top-k" for _, policy in one.points]
    # Rows are counted on one sequence.
    cases = [Case(rivals[-1].index, policy) for policy in dict.fromkeys(policies)]
    arrays = given(asker, tokens, PILOT, cases)
    shares = {
        case.policy: float(one["shares"].mean()) for case, one in zip(cases, arrays, strict=True)
    }
    return [comparable(one, shares.__getitem__, asker.token_count)[0] for one in rivals]


def given(asker: Asker, tokens: torch.Tensor, count: int, cases: Sequence[Case]) -> list[Arrays]:
    """Decodes the last tokens of a segment, which are given, with every case.

    Args:
        asker: Asker for the length of the segment.
        tokens: Token ids of the segment, [n]. The last one is only a successor.
        count: Number of tokens to decode.
        cases: The cases. The first is dense attention, with which the others are compared.

    Returns:
        The result of `perplexity.arrays_of` for each case.
    """
    store, start = asker.bench.store, len(tokens) - 1 - count
    # The other cases of a batch change only the last bits of the numbers, so they are not in the
    # key.
    keys = [{"given": digest_of(tokens), "count": count, **asker.told(case)} for case in cases]
    missing = [i for i, key in enumerate(keys) if not store.has(key)]
    if missing:
        # Dense attention is decoded again, for cases that were not compared with it yet.
        decoded = sorted({0, *missing})
        wanted = [cases[i] for i in decoded]
        with asker.reading(tokens[:start], wanted) as sequences, forks(sequences, wanted) as rows:
            some = tokens[start : start + count].expand(len(rows), -1)
            model = asker.bench.load(asker.factor)
            found = step(model, asker.bench.client, rows, some, start)
        dense = torch.log_softmax(found[0].logits, dim=-1)
        following = tokens[start + 1 : start + 1 + count]
        for i, steps in zip(decoded, found, strict=True):
            store.put(keys[i], arrays_of(steps, dense, following))
    return [store.get(key) for key in keys]
