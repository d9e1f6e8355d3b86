"""What the connector asks vLLM's scheduler for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from spillway_kv.vllm import graphs
from spillway_kv.vllm.connector import SpillwayConnector, _our_group
from spillway_kv.vllm.memory import WINDOW_TOKEN_COUNT
from spillway_kv.vllm.requests import Requests


def _connector(*, needs_blocks: bool) -> SpillwayConnector:
    """The scheduler's connector, with two requests of 100 prompt tokens."""
    made = SpillwayConnector.__new__(SpillwayConnector)
    requests = Requests(0)
    for name in ("a", "b"):
        requests.add(name, [0] * 100, 100, "")
    made.__dict__ |= {
        "_group": 1,
        "_block_size": 16,
        "_needs_blocks": needs_blocks,
        "_running": set(),
        "_requests": requests,
    }
    return made


def _output(asked: list[str]) -> Any:
    """A step with the whole prompt of a, and token 100 of b. Records whose blocks are asked for."""

    def blocks(name: str) -> tuple[list[int], ...]:
        asked.append(name)
        return [0], [10 * (name == "b") + i for i in range(7)]

    return SimpleNamespace(
        kv_connector_block_state=SimpleNamespace(resolve_block_ids=blocks),
        scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=0)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=["b"], num_computed_tokens=[100]),
        num_scheduled_tokens={"a": 100, "b": 1},
        scheduled_spec_decode_tokens={},
        preempted_req_ids=None,
        finished_req_ids=set(),
    )


def test_blocks_tell_which_rows_are_whose() -> None:
    asked: list[str] = []
    meta = _connector(needs_blocks=True).build_connector_meta(_output(asked))
    assert [(r.name, r.start, r.block) for r in meta.plan.requests] == [("a", 0, 6), ("b", 100, 16)]
    assert asked == ["a", "b"]


def test_no_blocks_are_listed_where_rows_have_names() -> None:
    asked: list[str] = []
    output = _output(asked)
    meta = _connector(needs_blocks=False).build_connector_meta(output)
    assert [(r.name, r.token_count, r.block) for r in meta.plan.requests] == [
        ("a", 100, None),
        ("b", 1, None),
    ]
    assert asked == []
    assert output.has_sync_kv_loads


@pytest.mark.parametrize("is_cuda", [True, False])
@pytest.mark.parametrize("is_v2", [True, False])
def test_the_v2_runner_on_cuda_names_them(
    monkeypatch: pytest.MonkeyPatch, *, is_cuda: bool, is_v2: bool
) -> None:
    monkeypatch.setattr(graphs, "current_platform", SimpleNamespace(is_cuda=lambda: is_cuda))
    config = SimpleNamespace(use_v2_model_runner=is_v2)
    assert graphs.names_requests(config) == (is_cuda and is_v2)


class _Layer:
    """A layer of vLLM that keeps something in the pool. window: that of its part of the pool."""

    def __init__(self, names: list[str], window: int | None) -> None:
        self.layer_names = names
        self.kv_cache_spec = SimpleNamespace(sliding_window=window, block_size=16)


def _pool(*groups: _Layer) -> Any:
    return SimpleNamespace(kv_cache_groups=list(groups))


def test_spillways_layers_are_found_among_others() -> None:
    """A group of the pool has as many layers as the others, so Spillway's may have several."""
    states = _Layer(["model.layers.0.mixer", "model.layers.2.mixer"], None)
    window = _Layer(["model.layers.4.attn"], 128)
    late = _Layer(["model.layers.10.attn", "model.layers.5.attn"], WINDOW_TOKEN_COUNT)
    early = _Layer(["model.layers.3.attn", "model.layers.12.attn"], WINDOW_TOKEN_COUNT)
    group, names = _our_group(_pool(states, late, window, early))
    assert group == 3
    assert sorted(names) == sorted(late.layer_names + early.layer_names)
    with pytest.raises(ValueError, match="no layer has full attention"):
        _our_group(_pool(states, window))


@pytest.mark.parametrize("name", ["model.attn.3", "model.layers.5.attn.0", "model.attn"])
def test_layers_whose_order_is_not_known_are_refused(name: str) -> None:
    """In Zamba 2, attention 3 may come after attention 0."""
    layers = _Layer(["model.layers.0.attn", name], WINDOW_TOKEN_COUNT)
    with pytest.raises(ValueError, match=f"the attention {name} is not named by its layer"):
        _our_group(_pool(layers))
