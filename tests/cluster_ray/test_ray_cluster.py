"""Daemons on the nodes of a Ray cluster, and what happens when a part of it is killed."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import spillway_kv
from helpers import fences
from ray_nodes import RayNodes, daemons, program
from spillway_kv.cluster import deploy
from spillway_kv.cluster.handle import DIRECTORY
from spillway_kv.cluster.settings import Settings

LAYERS, KV_HEADS, GROUP, DIM, TOKENS, STEPS = 3, 2, 2, 64, 2500, 40
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": KV_HEADS * GROUP,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
    "dtype": "float32",
    # Otherwise each engine draws a seed of its own.
    "policy": spillway_kv.Policy(dense_token_count=1024, seed=7),
}


def rows(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


K, V = (rows(seed, LAYERS, KV_HEADS, TOKENS + STEPS, DIM) for seed in (1, 2))
Q = rows(3, STEPS, 1, 1, KV_HEADS * GROUP, DIM)


def filled(client: Any) -> Any:
    sequence = client.create_sequence("models/m")
    sequence.append(0, 0, K[:, :, :TOKENS], V[:, :, :TOKENS])
    return sequence


def decoded(client: Any, sequence: Any, number: int) -> np.ndarray:
    """The outputs of a step, for all layers."""
    at = slice(TOKENS + number, TOKENS + number + 1)
    outs = []
    with client.begin_step([sequence]) as step:
        for layer in range(LAYERS):
            out, _ = step.attend(layer, Q[number], K[None, layer, :, at], V[None, layer, :, at])
            outs.append(out)
    return np.stack(outs)


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    """A head without cores, and three nodes of one core each."""
    made = RayNodes(3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """The answers of an embedded engine with the whole sequence, by step."""
    with spillway_kv.connect("embedded:", settings={"device.name": "cpu"}) as client:
        client.create_model("m", **SHAPES)
        sequence = filled(client)
        return [decoded(client, sequence, number) for number in range(STEPS)]


def test_the_program(nodes: RayNodes, expected: list[np.ndarray]) -> None:
    none = program(nodes, "status")
    assert none.returncode == 1
    assert "no Spillway cluster in Ray's namespace 'spillway'; spillway-cluster up" in none.stderr
    many = program(nodes, "up", "--daemons", "4", "--strategy", "strict-spread", "--timeout", "3")
    assert many.returncode == 1
    assert re.search(r"Ray has no room for 4 daemons .*STRICT_SPREAD", many.stderr), many.stderr
    options = ("--daemons", "2", "--listen", "unix", "--memory-limit", "256MiB")
    up = program(nodes, "up", *options)
    assert up.returncode == 0, up.stderr
    assert 'spillway_kv.connect("ray:")' in up.stderr
    try:
        again = program(nodes, "up", *options)
        assert again.returncode == 1
        assert "there is a Spillway cluster" in again.stderr
        with spillway_kv.connect("ray:") as client:
            client.create_model("m", **SHAPES)
            sequences = [filled(client) for _ in range(2)]
            status = program(nodes, "status")
            assert re.search(r"daemon-0 .* up .*daemon-1 .* up ", status.stdout, re.S), (
                status.stdout
            )
            assert "models/m: 3 layers" in status.stdout
            drain = program(nodes, "drain", "daemon-0")
            assert drain.returncode == 0, drain.stderr
            assert "1 sequences moved, 0 deleted meanwhile" in drain.stdout
            for sequence in sequences:
                assert np.array_equal(decoded(client, sequence, 0), expected[0])
            unknown = program(nodes, "drain", "daemon-7")
            assert unknown.returncode == 1
            assert "no daemon daemon-7 serves; those that do: daemon-1" in unknown.stderr
    finally:
        down = program(nodes, "down")
    assert down.returncode == 0, down.stderr
    assert program(nodes, "down").returncode == 0
    assert program(nodes, "status").returncode == 1


def test_of_two_that_start_at_once_one_is_refused(nodes: RayNodes) -> None:
    with ThreadPoolExecutor(2) as threads:
        ups = [
            threads.submit(deploy.up, Settings(listen="unix", memory_limit="256MiB"))
            for _ in range(2)
        ]
    try:
        failures = [each.exception() for each in ups]
        assert [type(each) for each in failures if each] == [spillway_kv.AlreadyExists]
        assert [each.state for each in deploy.status().daemons] == ["up"]
    finally:
        deploy.down()
    for namespace in ("..", "a/b", "", "a:b"):
        with pytest.raises(ValueError, match="is not of the form"):
            deploy.up(Settings(), namespace)


def test_the_snippets_of_the_page(nodes: RayNodes) -> None:
    (snippet,) = fences("docs/cluster.md", "python")
    with daemons(2):
        for line in snippet.splitlines():
            names: dict[str, Any] = {"spillway_kv": spillway_kv}
            exec(line.replace("parts=4", "parts=2"), names)  # because this cluster has two daemons
            with names["client"] as client:
                client.create_model("m", **SHAPES)
                sequence = filled(client)
                assert sequence.token_count == TOKENS
                sequence.delete()
                client.delete_model("models/m")


def test_daemons_listen_on_tcp_and_their_nodes(nodes: RayNodes) -> None:
    with daemons(3, listen="tcp", allow_remote=True):
        records = deploy.status().daemons
        assert len({record.node for record in records}) == 3
        assert all(record.target.startswith("tcp:") for record in records)
        with spillway_kv.connect("ray:") as client:
            client.create_model("m", **SHAPES)
            assert filled(client).token_count == TOKENS
            # Clients on the node itself connect through its socket.
            every: Any = client
            assert [each.step_transport for each in every.clients] == ["doorbell"] * 3
        with spillway_kv.connect(records[0].target) as far:
            assert far.step_transport == "messages"
            assert far.health()


def test_a_task_of_a_ray_job_connects(nodes: RayNodes) -> None:
    # The task runs in another process, which cannot import the tests.
    def task(q: np.ndarray) -> Any:
        with spillway_kv.connect("ray:") as client:
            return client.get_sequence("sequences/shared").attend(0, q).out

    with daemons(2), spillway_kv.connect("ray:?parts=2") as client:
        client.create_model("m", **SHAPES)
        sequence: Any = client.create_sequence("models/m", "shared")
        sequence.append(0, 0, K[:, :, :TOKENS], V[:, :, :TOKENS])
        assert len(set(sequence.daemons)) == 2
        out = ray.get(ray.remote(task).options(num_cpus=0).remote(Q[0][0]))
        assert np.array_equal(out, sequence.attend(0, Q[0][0]).out)


def test_more_parts_than_daemons_are_refused(nodes: RayNodes) -> None:
    with daemons(2):
        with pytest.raises(ValueError, match=r"parts 3 is not in \[1, 2\]"):
            spillway_kv.connect("ray:?parts=3")
        with pytest.raises(spillway_kv.InvalidArgument, match="parts 'x' is not a number"):
            spillway_kv.connect("ray:?parts=x")
    with pytest.raises(spillway_kv.Unavailable, match="no Spillway cluster in Ray's namespace"):
        spillway_kv.connect("ray:")


def directory_pid() -> int:
    actor = ray.get_actor(DIRECTORY, deploy.NAMESPACE)
    pid: int = ray.get(actor.pid.remote())
    return pid


def kill_directory(_: str) -> None:
    os.kill(directory_pid(), signal.SIGKILL)


def kill_actor(daemon: str) -> None:
    pid, _ = ray.get(deploy.node_of(daemon).pids.remote())
    os.kill(pid, signal.SIGKILL)


def kill_daemon(daemon: str) -> None:
    _, pid = ray.get(deploy.node_of(daemon).pids.remote())
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("part_count", [1, 2])
@pytest.mark.parametrize("kill", [kill_directory, kill_actor, kill_daemon])
def test_what_is_killed_comes_back(
    nodes: RayNodes, expected: list[np.ndarray], kill: Any, part_count: int
) -> None:
    with daemons(2), spillway_kv.connect(f"ray:?parts={part_count}") as client:
        client.create_model("m", **SHAPES)
        sequence: Any = filled(client)
        pids = [ray.get(deploy.node_of(name).pids.remote()) for name in ("daemon-0", "daemon-1")]
        for number in range(10):
            if number == 3:
                kill(sequence.daemons[-1])
            assert np.array_equal(decoded(client, sequence, number), expected[number])
        after = [ray.get(deploy.node_of(name).pids.remote()) for name in ("daemon-0", "daemon-1")]
        # Only the killed process is replaced. A new actor finds its daemon still running.
        changed = [a != b for a, b in zip(pids, after, strict=True)]
        daemons_changed = [a[1] != b[1] for a, b in zip(pids, after, strict=True)]
        assert sum(changed) == (0 if kill is kill_directory else 1)
        assert sum(daemons_changed) == (1 if kill is kill_daemon else 0)
        # Everything works as before.
        assert np.array_equal(decoded(client, filled(client), 0), expected[0])
        # A daemon answers before its node has reported this to the directory.
        end = time.monotonic() + 30
        while [each.state for each in deploy.status().daemons] != ["up", "up"]:
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_node_that_goes_takes_its_sequences_and_no_others(
    nodes: RayNodes, expected: list[np.ndarray]
) -> None:
    # No arena folder: all nodes are on this machine, so a folder would outlive the node.
    with daemons(2, arena_folder=""), spillway_kv.connect("ray:") as client:
        client.create_model("m", **SHAPES)
        sequences: list[Any] = [filled(client) for _ in range(2)]
        lost = sequences[0].daemons[0]
        record = next(each for each in deploy.status().daemons if each.name == lost)
        nodes.remove(record.node)
        try:
            # The daemon ends normally, and a little later Ray knows that its node is gone.
            deadline = time.monotonic() + 50  # as long as a restart may take
            reason = message = ""
            while reason != "DAEMON_LOST":
                assert time.monotonic() < deadline
                try:
                    sequences[0].refresh()
                except (spillway_kv.Unavailable, spillway_kv.Cancelled) as error:
                    reason, message = error.reason, error.message
                except spillway_kv.DaemonRestarted:
                    # The next daemon may already have this address, because both are on this
                    # machine.
                    every: Any = client
                    loss = every.placement.loss(lost)
                    reason, message = loss.reason, loss.message
                time.sleep(0.2)
            assert re.search(f"{lost} is lost with all sequences that it had", message)
            for number in range(3):
                out = decoded(client, sequences[1], number)
                assert np.array_equal(out, expected[number])
            # Ray starts a daemon on one of the remaining nodes. It is a new daemon. It can start
            # when the old one, which is on this machine too, has ended.
            deadline = time.monotonic() + 60
            fresh: Any = None
            while fresh is None or fresh.daemons == sequences[1].daemons:
                assert time.monotonic() < deadline, deploy.status().daemons
                time.sleep(0.5)
                with contextlib.suppress(spillway_kv.Unavailable, spillway_kv.Cancelled):
                    fresh = filled(client)
            assert fresh.daemons == [f"{lost}.1"]
            assert np.array_equal(decoded(client, fresh, 0), expected[0])
        finally:
            nodes.add()


def threads_of(pid: int) -> list[Path]:
    """Status files of the threads of a process."""
    return list(Path(f"/proc/{pid}/task").glob("*/status"))


def test_a_daemon_that_stalls_is_waited_for_until_the_deadline(
    nodes: RayNodes, expected: list[np.ndarray]
) -> None:
    with daemons(2), spillway_kv.connect("ray:", timeout=2.0) as client:
        client.create_model("m", **SHAPES)
        sequences: list[Any] = [filled(client) for _ in range(2)]
        _, pid = ray.get(deploy.node_of(sequences[0].daemons[0]).pids.remote())
        os.kill(pid, signal.SIGSTOP)
        try:
            # Its threads continue for a moment.
            while any("(stopped)" not in each.read_text() for each in threads_of(pid)):
                time.sleep(0.01)
            started = time.monotonic()
            with pytest.raises((spillway_kv.DeadlineExceeded, spillway_kv.Unavailable)):
                sequences[0].attend(0, Q[0][0])
            assert time.monotonic() - started < 30
            assert np.array_equal(decoded(client, sequences[1], 0), expected[0])
        finally:
            os.kill(pid, signal.SIGCONT)
        assert np.array_equal(decoded(client, sequences[0], 0), expected[0])
