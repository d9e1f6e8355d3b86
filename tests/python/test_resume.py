"""Clients continue by themselves when a daemon whose rows outlive it restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import spillway_kv
import torch
from arena_folder import DIM, LAYERS, SHAPES, Daemon, Writer, daemon, rows
from daemon_process import running_daemon
from helpers import once_reached
from random_llama import generate, llama, prompt
from spillway_kv._native import Carrier
from spillway_kv.transformers import SpillwayCache


class Killer:
    """Kills a daemon and starts the next one a little later, while the client waits."""

    def __init__(self, each: Daemon, pause: float = 0.2) -> None:
        self._each, self._pause = each, pause
        self._thread: threading.Thread | None = None
        self.count = 0

    def __call__(self) -> None:
        self.join()
        self._each.kill()
        self._thread = threading.Thread(target=self._start)
        self._thread.start()
        self.count += 1

    def _start(self) -> None:
        time.sleep(self._pause)
        self._each.start()

    def join(self) -> None:
        if self._thread is not None:
            self._thread.join()


@contextmanager
def killer(each: Daemon) -> Iterator[Killer]:
    made = Killer(each)
    try:
        yield made
    finally:
        made.join()


def before_layer(model: Any, layer: int, calls: set[int], act: Callable[[], None]) -> Any:
    """Calls `act` before some of the calls of a layer's attention."""
    count = 0

    def hook(*_: Any, **__: Any) -> None:
        nonlocal count
        count += 1
        if count in calls:
            act()

    return model.model.layers[layer].self_attn.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("how", ["messages", "doorbell"])
def test_generation_is_as_an_undisturbed_one(tmp_path: Path, how: str) -> None:
    dense, spilled = llama(), llama()
    spilled.set_attn_implementation("spillway")
    ids = prompt(1, 40)
    expected = generate(dense, ids)
    with daemon(tmp_path) as each, killer(each) as kill:
        with spillway_kv.connect(each.target) as client:
            if how == "messages":
                client.connection.carrier = Carrier.MESSAGES
            assert client.step_transport == how
            with SpillwayCache(spilled.config, client) as cache:
                # In the middle of a step, and between two steps. The first call is the prompt.
                hooks = [
                    before_layer(spilled, 1, {5, 20, 21}, kill),
                    before_layer(spilled, 0, {33}, kill),
                ]
                assert torch.equal(generate(spilled, ids, cache), expected)
                for hook in hooks:
                    hook.remove()
                assert kill.count == 4
                assert client.step_transport == how
                kill.join()
                assert cache.sequences[0].refresh().token_count == 40 + 63


def test_a_batch_and_a_prompt_in_chunks(tmp_path: Path) -> None:
    dense, spilled = llama(), llama()
    spilled.set_attn_implementation("spillway")
    ids = prompt(3, 70)
    expected = generate(dense, ids)
    with daemon(tmp_path) as each, killer(each) as kill, spillway_kv.connect(each.target) as client:
        with SpillwayCache(spilled.config, client) as cache, torch.no_grad():
            hook = before_layer(spilled, 2, {1, 2, 9}, kill)
            spilled(ids[:, :50], past_key_values=cache)
            assert torch.equal(generate(spilled, ids, cache), expected)
            hook.remove()
            assert kill.count == 3


@pytest.mark.parametrize("how", ["messages", "doorbell"])
def test_calls(tmp_path: Path, how: str) -> None:
    q = rows(99, 0, 2)[0].transpose(1, 0, 2).reshape(1, 4, DIM)
    with daemon(tmp_path) as each, killer(each) as kill:
        with spillway_kv.connect(each.target) as client:
            if how == "messages":
                client.connection.carrier = Carrier.MESSAGES
            client.create_model("m", **SHAPES)
            sequence = client.create_sequence("models/m", "s")
            writer = Writer(1, "sequences/s")
            writer.append(sequence, 3000)
            before = np.asarray(sequence.attend(0, q).out)
            kill()
            np.testing.assert_array_equal(np.asarray(sequence.attend(0, q).out), before)
            kill()
            # Goes through the client's own region, which the restart removes.
            writer.append(sequence, 9000)
            kill()
            assert sequence.refresh().token_count == 12_000
            kill()
            k, _ = sequence.fetch(1, 2990, 3010)
            np.testing.assert_array_equal(np.asarray(k), rows(1, 2990, 20)[1])
            chosen = sequence.select(0, q)
            kill()
            again = sequence.select(0, q)
            np.testing.assert_array_equal(np.asarray(chosen.indices), np.asarray(again.indices))
            # Steps one after the other, with an attend in flight.
            for at in range(12_000, 12_004):
                new = rows(1, at, 1)[:, None]
                with client.begin_step([sequence]) as step:
                    for layer in range(LAYERS):
                        answer = step.state.ask(
                            layer, q[None], new[layer], -new[layer], None, at_once=True
                        )
                        if at % 2 == layer:
                            kill()
                        out, lse = answer()
                        kept = sequence.attend(layer, q)
                        np.testing.assert_array_equal(out[0], kept.out)
                        np.testing.assert_array_equal(lse[0], kept.lse)
            assert client.step_transport == how
            writer.acknowledged += 4
            writer.check(client)


def test_what_does_not_go_on(tmp_path: Path) -> None:
    with daemon(tmp_path) as each:
        impatient = spillway_kv.connect(each.target, resume_seconds=0)
        waiting = spillway_kv.connect(each.target, resume_seconds=0.5)
        impatient.create_model("m", **SHAPES)
        sequence = impatient.create_sequence("models/m", "s")
        other = waiting.get_sequence("sequences/s")
        each.kill()
        with pytest.raises(spillway_kv.Unavailable):
            sequence.refresh()
        begin = time.monotonic()
        with pytest.raises(spillway_kv.Unavailable):
            other.refresh()
        assert time.monotonic() - begin >= 0.5
        each.start()
        other.refresh()
        other.delete()
        # The sequence was deleted, not lost by a restart. Its connection may still be reconnecting.
        with pytest.raises(spillway_kv.NotFound) as caught:
            once_reached(sequence.refresh)
        assert not isinstance(caught.value, spillway_kv.DaemonRestarted)
        each.kill()
        # A daemon with another store at the same address.
        for name in ("rows", "records"):
            (each.arena / name).unlink()
        each.start()
        waiting.create_model("m", **SHAPES)
        each.kill()
        with pytest.raises(spillway_kv.DaemonRestarted):
            each.start()
            other.refresh()
        for client in (impatient, waiting):
            client.close()


@pytest.mark.parametrize("how", ["messages", "doorbell"])
def test_a_step_that_a_restart_broke_can_be_closed(tmp_path: Path, how: str) -> None:
    q = rows(99, 0, 2)[0].transpose(1, 0, 2).reshape(1, 1, 4, DIM)
    new = rows(1, 0, 1)[0][None]
    with (
        daemon(tmp_path) as each,
        spillway_kv.connect(each.target, resume_seconds=0) as client,
    ):
        if how == "messages":
            client.connection.carrier = Carrier.MESSAGES
        sequence = client.create_sequence(client.create_model("m", **SHAPES), "s")
        step = client.begin_step([sequence])
        assert client.step_transport == how
        step.attend(1, q, new, -new)
        each.kill()
        with pytest.raises((spillway_kv.Unavailable, spillway_kv.Cancelled)):
            step.attend(0, q, new, -new)
        each.start()
        step.close()
        with pytest.raises(ValueError, match="the step is closed"):
            step.attend(0, q, new, -new)
        once_reached(sequence.refresh)
        assert sequence.layer_token_counts == (0, 1)


def test_without_a_store_nothing_waits(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as target:
        client = spillway_kv.connect(target)
        client.create_model("m", **SHAPES)
        sequence = client.create_sequence("models/m", "s")
    with client, pytest.raises(spillway_kv.Unavailable):
        sequence.refresh()
