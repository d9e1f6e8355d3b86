"""Conversion of policies to messages and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spillway_kv import Adaptive, Candidates, Policy, TopK, TopP
from spillway_kv._proto import policy_pb2


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


COUNTS = st.integers(0, 2**40)
FRACTIONS = st.floats(0, 1)
HEAVY = (
    st.builds(TopK, count=COUNTS)
    | st.builds(TopK, fraction=FRACTIONS)
    | st.just(Adaptive())
    | st.builds(TopP, maybe(FRACTIONS), maybe(COUNTS), maybe(COUNTS))
)
SELECTORS = st.sampled_from(
    ["asymmetric", "hamming", "oracle", "all", "int4_keys", "quest", "double_sparsity"]
)
CANDIDATES = (
    st.builds(Candidates, maybe(SELECTORS))
    | st.builds(Candidates, SELECTORS, fraction=FRACTIONS)
    | st.builds(Candidates, SELECTORS, count=COUNTS)
)
POLICIES = st.builds(
    Policy,
    sink_token_count=maybe(COUNTS),
    window_token_count=maybe(COUNTS),
    dense_token_count=maybe(COUNTS),
    dense_layers=maybe(st.lists(st.integers(0, 100)).map(tuple)),
    selector=maybe(SELECTORS),
    candidates=maybe(CANDIDATES),
    heavy=maybe(HEAVY),
    tail=maybe(st.sampled_from(["none", "uniform", "stratified", "lsh_sampling"])),
    bound=maybe(st.sampled_from(["denominator", "paper", "ratio"])),
    epsilon=maybe(FRACTIONS),
    delta=maybe(FRACTIONS),
    pilot_token_count=maybe(st.integers(0, 2**31 - 1)),
    inflation=maybe(FRACTIONS),
    seed=maybe(st.integers(0, 2**64 - 1)),
    row_count_max=maybe(COUNTS),
)


@given(POLICIES)
def test_round_trip(policy: Policy) -> None:
    wire = policy.to_proto().SerializeToString()
    assert Policy.from_proto(policy_pb2.Policy.FromString(wire)) == policy


def test_every_field_of_the_message_is_there() -> None:
    message = policy_pb2.Policy.DESCRIPTOR
    heavy = {field.name for field in message.oneofs_by_name["heavy"].fields}
    names = {field.name for field in message.fields} - heavy
    assert names | {"heavy"} == set(Policy.__dataclass_fields__)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="selector 'best' is not one of"):
        Policy(selector="best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tail 'unspecified'"):
        Policy(tail="unspecified")  # type: ignore[arg-type]


def test_top_k_takes_one_size() -> None:
    with pytest.raises(ValueError, match="exactly one of count and fraction"):
        TopK()
    with pytest.raises(ValueError, match="exactly one of count and fraction"):
        TopK(count=1, fraction=0.5)
