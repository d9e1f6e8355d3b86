"""Decode steps of a daemon that end early, by every way: interrupted, or the daemon goes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import spillway_kv
from daemon_process import running_daemon
from helpers import once_reached, process_of, wait_for
from spillway_kv._native import Carrier
from step_scene import LAYERS, LENGTHS, SHAPES, scene_of, tensors

BY_A_DAEMON = pytest.mark.parametrize(
    "carrier", [Carrier.MESSAGES, Carrier.DOORBELL], ids=lambda carrier: carrier.name
)


@contextmanager
def stopped(daemon: int) -> Iterator[None]:
    """Stops the daemon's process for the duration of the block."""

    def states() -> set[str]:
        threads = Path("/proc", str(daemon), "task").glob("*/stat")
        return {stat.read_text().rpartition(")")[2].split()[0] for stat in threads}

    os.kill(daemon, signal.SIGSTOP)
    # A test that would wait for the stopped daemon forever must fail instead of hanging.
    watchdog = threading.Timer(10, os.kill, (daemon, signal.SIGCONT))
    watchdog.start()
    try:
        wait_for(lambda: states() == {"T"})
        yield
    finally:
        watchdog.cancel()
        os.kill(daemon, signal.SIGCONT)


@BY_A_DAEMON
@pytest.mark.parametrize("wakes_who_waits", [True, False])
def test_an_interrupted_step_can_be_said_again(
    tmp_path: Path, rng: np.random.Generator, carrier: Carrier, wakes_who_waits: bool
) -> None:
    """The daemon does nothing before the interrupt. By a doorbell, it never begins the layer."""
    handled = signal.signal(signal.SIGINT, signal.default_int_handler)
    sent: list[float] = []

    def interrupt() -> None:
        sent.append(time.monotonic())
        if wakes_who_waits:
            os.kill(os.getpid(), signal.SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)  # goes to this thread

    with running_daemon(tmp_path) as target, spillway_kv.connect(target) as client:
        client.connection.carrier = carrier
        scene = scene_of(client, client.create_model(**SHAPES, dtype="float32"), rng)
        other = scene.sequences[1].fork()
        rows = [tensors(rng) for _ in range(LAYERS)]
        step = client.begin_step(scene.sequences)
        step.attend(0, *rows[0])
        timer = threading.Timer(0.3, interrupt)
        with stopped(process_of(target)):
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                step.attend(1, *rows[1])
            came = time.monotonic()
            signal.signal(signal.SIGINT, handled)
            timer.join()
            # The daemon does not answer for as long as it is stopped.
            assert came - sent[0] < 2
            for call in (step.results, lambda: step.attend(1, *rows[1])):
                with pytest.raises(ValueError, match="the step is closed"):
                    call()
        # Steps of others go on.
        for _ in range(10):
            with client.begin_step([other]) as step:
                for layer in range(LAYERS):
                    step.attend(layer, *tensors(rng, count=1))
        assert other.refresh().layer_token_counts == (50, 50)
        longer = [(length + 1, length + 1) for length in LENGTHS]
        if carrier == Carrier.DOORBELL:
            assert scene.lengths() == [(length + 1, length) for length in LENGTHS]
        else:
            assert all(
                now in ((length + 1, length), (length + 1, length + 1))
                for now, length in zip(scene.lengths(), LENGTHS, strict=True)
            )
        # The same rows, whether they are there or not. Then other rows at their place.
        for _ in range(2):
            with client.begin_step(scene.sequences, starts=LENGTHS) as step:
                for layer in range(LAYERS):
                    scene.check(step, layer, *rows[layer])
            assert scene.lengths() == longer
            for sequence, length in zip(scene.sequences, LENGTHS, strict=True):
                sequence.truncate(length)
            for sequence, length in zip(scene.alone, LENGTHS, strict=True):
                sequence.truncate(length)
            rows = [tensors(rng) for _ in range(LAYERS)]


@BY_A_DAEMON
def test_the_daemon_goes_in_the_middle_of_a_step(
    tmp_path: Path, rng: np.random.Generator, carrier: Carrier
) -> None:
    with running_daemon(tmp_path) as target:
        client = spillway_kv.connect(target)
        client.connection.carrier = carrier
        scene = scene_of(client, client.create_model(**SHAPES, dtype="float32"), rng)
        row = tensors(rng, count=1)
        # These leave to later ones what they were carried by. The last two are open for longer.
        steps = [client.begin_step([sequence]) for sequence in scene.sequences]
        for each in steps:
            each.attend(0, *row)
        *ended, late, step = steps
        for each in ended:
            each.close()
    for _ in range(2):
        with pytest.raises((spillway_kv.Unavailable, spillway_kv.Cancelled)) as gone:
            step.attend(1, *row)
        if carrier == Carrier.DOORBELL:
            assert gone.value.message == "the daemon is gone"
    with pytest.raises(ValueError, match="the last attend failed"):
        step.results()
    with pytest.raises(spillway_kv.Unavailable):
        client.get_server_info()
    step.close()
    with running_daemon(tmp_path), client:
        # gRPC waits a moment before it connects again. Then nothing is left from before.
        once_reached(client.get_server_info)
        with pytest.raises(spillway_kv.DaemonRestarted):
            client.begin_step(scene.sequences[:1]).attend(1, *row)
        again = scene_of(client, client.create_model(**SHAPES, dtype="float32"), rng)
        with client.begin_step(again.sequences) as step:
            late.close()
            for layer in range(LAYERS):
                again.check(step, layer, *tensors(rng))
        with client.begin_step(again.sequences) as step:
            again.check(step, 0, *tensors(rng))
        assert client.step_transport == carrier.name.lower()


def test_a_step_whose_stream_was_refused_goes_on_with_another(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    with (
        running_daemon(tmp_path, "--open-stream-count-max", "2") as target,
        spillway_kv.connect(target) as client,
    ):
        client.connection.carrier = Carrier.MESSAGES
        scene = scene_of(client, client.create_model(**SHAPES, dtype="float32"), rng, (40, 7))
        rows = tensors(rng, count=2)
        others = [client.begin_step([client.create_sequence(scene.model)]) for _ in range(2)]
        for other in others:
            other.attend(0, *tensors(rng, count=1))
        step = client.begin_step(scene.sequences)
        with pytest.raises(spillway_kv.ResourceExhausted) as told:
            step.attend(0, *rows)
        assert told.value.reason == "STREAM_COUNT_EXHAUSTED"
        for other in others:
            other.close()
        # The daemon hears of the ends of streams a little later.
        once_reached(lambda: scene.check(step, 0, *rows), spillway_kv.ResourceExhausted)
        step.close()
