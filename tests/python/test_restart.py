"""What the client reports, and how it continues, after the daemon has restarted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from daemon_process import running_daemon
from helpers import step
from random_llama import generate, llama, prompt
from spillway_kv._native import Carrier
from spillway_kv.transformers import SpillwayCache

SHAPES: dict[str, Any] = {
    "layer_count": 1,
    "query_head_count": 2,
    "kv_head_count": 1,
    "head_dim": 16,
    "dtype": "float32",
}


@contextmanager
def lost_by_restart() -> Iterator[None]:
    """Expects an error that says that the daemon has restarted."""
    with pytest.raises(spillway_kv.NotFound, match="the daemon has restarted") as caught:
        yield
    assert isinstance(caught.value, spillway_kv.DaemonRestarted)
    assert caught.value.reason == "SEQUENCE_NOT_FOUND"


@contextmanager
def gone() -> Iterator[None]:
    """Expects an error that says that the sequence was deleted or has expired."""
    with pytest.raises(spillway_kv.NotFound, match="deleted or have expired") as caught:
        yield
    assert not isinstance(caught.value, spillway_kv.DaemonRestarted)


@pytest.mark.parametrize("how", ["messages", "doorbell"])
@pytest.mark.parametrize("token_count", [1, 20], ids=["step", "prompt"])
def test_cache(tmp_path: Path, how: str, token_count: int) -> None:
    dense, spilled = llama(), llama()
    spilled.set_attn_implementation("spillway")
    ids = prompt(1, 40)
    expected = generate(dense, ids)
    with running_daemon(tmp_path) as target:
        client = spillway_kv.connect(target)
        if how == "messages":
            client.connection.carrier = Carrier.MESSAGES
        cache = SpillwayCache(spilled.config, client)
        # Decodes, so that the client has a doorbell or a call, which the restart breaks.
        generate(spilled, ids, cache, max_new_tokens=3)
        assert client.step_transport == how
        fork = cache.fork()
    with running_daemon(tmp_path), client, torch.no_grad():
        for _ in range(2):
            with lost_by_restart():
                spilled(ids[:, :token_count], past_key_values=cache)
        for each in (cache, fork):
            each.reset()
            assert torch.equal(generate(spilled, ids, each), expected)
        # If sequences of the new daemon are missing, the restart is not the reason.
        cache.sequences[0].delete()
        with gone():
            spilled(ids[:, :token_count], past_key_values=cache)
        for each in (cache, fork):
            each.close()
        assert not list(client.list_sequences())


def test_cache_of_a_model_that_was_given(tmp_path: Path) -> None:
    spilled = llama()
    spilled.set_attn_implementation("spillway")
    shapes: dict[str, Any] = {
        "layer_count": 3,
        "query_head_count": 8,
        "kv_head_count": 2,
        "head_dim": 32,
    }
    with running_daemon(tmp_path) as target:
        client = spillway_kv.connect(target)
        model = client.create_model("mine", dtype="float32", **shapes)
        cache = SpillwayCache(spilled.config, client, model=model)
        generate(spilled, prompt(1, 20), cache, max_new_tokens=1)
    with running_daemon(tmp_path), client, cache:
        cache.reset()
        # The cache cannot create this model again, because its user created it.
        with pytest.raises(spillway_kv.NotFound, match="no model models/mine"):
            generate(spilled, prompt(1, 20), cache, max_new_tokens=1)
        client.create_model("mine", dtype="float32", **shapes)
        cache.reset()
        generate(spilled, prompt(1, 20), cache, max_new_tokens=1)
        assert cache.sequences[0].model == "models/mine"


def test_sequence(tmp_path: Path) -> None:
    k = np.ones((1, 4, 16), np.float32)
    q = np.ones((1, 2, 16), np.float32)
    with running_daemon(tmp_path) as target:
        client = spillway_kv.connect(target)
        model = client.create_model("m", **SHAPES)
        sequence = client.create_sequence(model, "s")
        sequence.append(0, 0, k, k)
        handles = [sequence, client.get_sequence("sequences/s"), sequence.fork("t")]
    with running_daemon(tmp_path), client:
        # Nothing has failed yet: the client does not know of the restart.
        fresh = client.create_sequence(client.create_model("m", **SHAPES), "fresh")
        fresh.append(0, 0, k, k)
        calls: tuple[Callable[[spillway_kv.Sequence], Any], ...] = (
            spillway_kv.Sequence.refresh,
            lambda lost: lost.append(0, 4, k, k),
            lambda lost: lost.attend(0, q),
            lambda lost: lost.select(0, q),
            lambda lost: lost.fetch(0, 0, 1),
            lambda lost: step(lost, 0, q, k[:, :1], k[:, :1], start=4),
            spillway_kv.Sequence.fork,
            lambda lost: lost.truncate(0),
            spillway_kv.Sequence.delete,
        )
        for handle in handles:
            for call in calls:
                with lost_by_restart():
                    call(handle)
        with lost_by_restart():
            client.attend(0, {fresh: q, sequence: q})
        copy = fresh.fork()
        for handle in (fresh, copy):
            handle.delete()
            with gone():
                handle.refresh()
