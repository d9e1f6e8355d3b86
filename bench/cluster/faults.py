"""Kills parts of a Ray cluster on this machine, or drains a node, while sequences decode.

    python bench/cluster/faults.py kills   # kills the directory, node actors and daemons, at random
    python bench/cluster/faults.py drain   # drains one of two daemons, with 20 sequences in use

Every output is compared bit for bit with that of an undisturbed engine in this process. At the
end, every row is compared with the row that was appended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import ray
import spillway_kv
import typer
from ray.cluster_utils import Cluster
from spillway_kv.cluster import deploy
from spillway_kv.cluster.handle import DIRECTORY, DirectoryHandle
from spillway_kv.cluster.settings import Settings
from spillway_kv.lab import serving

sys.path.append(str(Path(__file__).resolve().parents[1]))
import environment  # noqa: E402

LAYERS, KV_HEADS, GROUP, DIM = 4, 4, 2, 64
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": KV_HEADS * GROUP,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
    "dtype": "bfloat16",
    "policy": spillway_kv.Policy(dense_token_count=1024),
}

app = typer.Typer(add_completion=False, no_args_is_help=True)
Output = Annotated[str, typer.Option(help="Where the result is written.")]


@app.callback()
def prepared() -> None:
    """Kills and drains of a cluster."""
    binary = serving.find_binary(environment.ROOT)
    serving.prefer_library(binary)
    # Node actors take the path of the daemon from this variable.
    os.environ["SPILLWAYD"] = str(binary)


class Rows:
    """The rows and queries of every position. They are the same for all sequences."""

    def __init__(self, token_count: int) -> None:
        generator = np.random.default_rng(7)
        shape = (LAYERS, KV_HEADS, token_count, DIM)
        self.k, self.v = (self._bfloat16(generator.standard_normal(shape)) for _ in range(2))
        self.q = generator.standard_normal((token_count, 1, 1, KV_HEADS * GROUP, DIM)).astype("f4")

    @staticmethod
    def _bfloat16(values: np.ndarray) -> Any:
        return spillway_kv.BFloat16.from_float32(values.astype("f4"))

    def prefill(self, sequence: Any, token_count: int) -> None:
        for start in range(0, token_count, 8192):
            at = slice(start, min(start + 8192, token_count))
            sequence.append(0, start, self.k[:, :, at], self.v[:, :, at])

    def step(self, client: Any, sequence: Any, position: int) -> np.ndarray:
        """Decodes one token and returns the outputs of all layers."""
        at = slice(position, position + 1)
        outs = []
        with client.begin_step([sequence], starts=[position]) as step:
            for layer in range(LAYERS):
                k, v = self.k[None, layer, :, at], self.v[None, layer, :, at]
                outs.append(step.attend(layer, self.q[position], k, v)[0])
        return np.stack(outs)

    def lost(self, sequence: Any, token_count: int) -> int:
        """How many of the acknowledged rows are missing or differ from what was appended."""
        missing = 0
        for layer in range(LAYERS):
            k, v = sequence.fetch(layer, 0, token_count)
            for got, put in ((k, self.k), (v, self.v)):
                same = (got.bits == put.bits[layer, :, :token_count]).all(axis=-1)
                missing += int((~same).sum())
        return missing


@contextlib.contextmanager
def ray_nodes(count: int) -> Iterator[None]:
    """Runs a Ray cluster with this many nodes of one core each, and a head without cores."""
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


@contextlib.contextmanager
def daemons(count: int, memory_limit: str) -> Iterator[None]:
    """Runs one daemon on each of `count` nodes."""
    try:
        deploy.up(
            Settings(
                daemon_count=count,
                strategy="STRICT_SPREAD",
                memory_limit=memory_limit,
                listen="unix",
            )
        )
        yield
    finally:
        deploy.down()


def undisturbed(rows: Rows, first: int, end: int) -> list[np.ndarray]:
    """The outputs of an engine in this process that nothing disturbs."""
    with spillway_kv.connect("embedded:", settings={"device.name": "cpu"}) as client:
        client.create_model("m", **SHAPES)
        sequence = client.create_sequence("models/m")
        rows.prefill(sequence, first)
        return [rows.step(client, sequence, position) for position in range(first, end)]


def percentile(values: list[float], share: float) -> float:
    return float(np.percentile(values, 100 * share)) if values else float("nan")


@dataclass
class Decoding:
    """The decode steps of one sequence."""

    sequence: Any
    first: int
    seconds: list[float] = field(default_factory=list)
    # When each step began.
    begun: list[float] = field(default_factory=list)
    wrong: int = 0
    repeated: int = 0


def decode(
    rows: Rows,
    client: Any,
    decoding: Decoding,
    expected: list[np.ndarray],
    stop: threading.Event,
    pause: float,
) -> None:
    """Decodes until `stop` is set. Repeats a step that fails because something was killed."""
    for number, answer in enumerate(expected):
        if stop.is_set():
            return
        begin = time.perf_counter()
        while True:
            try:
                out = rows.step(client, decoding.sequence, decoding.first + number)
                break
            except (spillway_kv.Unavailable, spillway_kv.Cancelled):
                decoding.repeated += 1
                time.sleep(0.05)
        decoding.begun.append(begin)
        decoding.seconds.append(time.perf_counter() - begin)
        decoding.wrong += not np.array_equal(out, answer)
        stop.wait(pause)


def written(output: str, result: dict[str, Any]) -> None:
    text = json.dumps({**environment.describe(), **result}, indent=1)
    if output:
        Path(output).write_text(text + "\n")
    print(text)


def _victims(kind: str, daemon: str) -> int:
    """The ID of the process to kill; 0 if the daemon does not run at the moment."""
    if kind == "directory":
        pid: int = ray.get(ray.get_actor(DIRECTORY, deploy.NAMESPACE).pid.remote())
        return pid
    actor, process = ray.get(deploy.node_of(daemon).pids.remote())
    return int(actor if kind == "node actor" else process or 0)


@app.command()
def kills(
    count: Annotated[int, typer.Option(help="Kills.")] = 100,
    seed: Annotated[int, typer.Option(help="Of what is killed and when.")] = 0,
    output: Output = "",
) -> None:
    """Kills the directory, node actors and daemons at random while sequences decode."""
    first, steps = 2000, 6000
    rows = Rows(first + steps)
    expected = undisturbed(rows, first, first + steps)
    chosen = random.Random(seed)
    killed: dict[str, int] = {}
    with (
        ray_nodes(2),
        daemons(2, "1GiB"),
        spillway_kv.connect("ray:") as whole,
        spillway_kv.connect("ray:?parts=2") as split,
    ):
        whole.create_model("m", **SHAPES)
        split.create_model("split", **SHAPES)
        decodings = []
        for client, model, sequences in ((whole, "models/m", 4), (split, "models/split", 2)):
            for _ in range(sequences):
                sequence = client.create_sequence(model)
                rows.prefill(sequence, first)
                decodings.append((client, Decoding(sequence, first)))
        stop = threading.Event()
        threads = [
            threading.Thread(target=decode, args=(rows, client, each, expected, stop, 0.02))
            for client, each in decodings
        ]
        for thread in threads:
            thread.start()
        while sum(killed.values()) < count and any(thread.is_alive() for thread in threads):
            time.sleep(chosen.uniform(0.2, 1.0))
            kind = chosen.choice(["directory", "node actor", "daemon"])
            # 0: the daemon was killed and does not run again yet.
            pid = _victims(kind, chosen.choice(["daemon-0", "daemon-1"]))
            if pid:
                os.kill(pid, signal.SIGKILL)
                killed[kind] = killed.get(kind, 0) + 1
        time.sleep(3)
        stop.set()
        for thread in threads:
            thread.join()
        each = [decoding for _, decoding in decodings]
        lost = sum(rows.lost(d.sequence, d.first + len(d.seconds)) for d in each)
        seconds = [value for d in each for value in d.seconds]
        written(
            output,
            {
                "kills": killed,
                "seed": seed,
                "sequences": {"whole": 4, "in two parts": 2},
                "steps": len(seconds),
                "wrong_outputs": sum(d.wrong for d in each),
                "lost_rows": lost,
                "steps_said_again_by_the_caller": sum(d.repeated for d in each),
                "step_ms": {
                    "median": 1e3 * statistics.median(seconds),
                    "p99": 1e3 * percentile(seconds, 0.99),
                    "max": 1e3 * max(seconds),
                },
            },
        )
        if lost or any(d.wrong for d in each) or sum(killed.values()) < count:
            raise SystemExit("something was lost or wrong, or less was killed than was asked for")


@app.command()
def drain(
    sequence_count: Annotated[int, typer.Option(help="On the daemon that is drained.")] = 20,
    steps_a_second: Annotated[float, typer.Option(help="Of each sequence.")] = 0.5,
    longest: Annotated[int, typer.Option(help="Tokens of the longest.")] = 131072,
    output: Output = "",
) -> None:
    """Drains one of two daemons while all its sequences decode."""
    steps = 4096
    lengths = [max(longest >> (i % 5), 2048) for i in range(sequence_count)]
    rows = Rows(longest + steps)
    expected = {first: undisturbed(rows, first, first + 200) for first in sorted(set(lengths))}
    with ray_nodes(2), daemons(2, "8GiB"), spillway_kv.connect("ray:") as client:
        client.create_model("m", **SHAPES)
        made: list[Decoding] = []
        directory = DirectoryHandle(deploy.NAMESPACE)
        # Create all sequences on the other daemon.
        directory.ask("set_state", "daemon-1", "draining")
        for first in lengths:
            made.append(Decoding(client.create_sequence("models/m"), first))
            rows.prefill(made[-1].sequence, first)
        directory.ask("set_state", "daemon-1", "up")
        stop = threading.Event()
        pause = 1 / steps_a_second
        threads = []
        for each in made:
            arguments = (rows, client, each, expected[each.first], stop, pause)
            threads.append(threading.Thread(target=decode, args=arguments))
        for thread in threads:
            thread.start()
            time.sleep(pause / sequence_count)
        time.sleep(8)
        begin = time.perf_counter()
        drained = deploy.drain("daemon-0")
        end = time.perf_counter()
        time.sleep(3)
        stop.set()
        for thread in threads:
            thread.join()
        before, during, delays = [], [], []
        for each in made:
            mine = list(zip(each.begun, each.seconds, strict=True))
            alone = [s for at, s in mine if at + s < begin]
            within = [s for at, s in mine if begin <= at + s and at < end]
            before += alone
            during += within
            delays += [max(0.0, s - statistics.median(alone)) for s in within]
        lost = sum(rows.lost(d.sequence, d.first + len(d.seconds)) for d in made)
        copied = [copied for _, copied in drained.moves.values()]
        written(
            output,
            {
                "sequences": sequence_count,
                "tokens": sorted(lengths),
                "steps_a_second_each": steps_a_second,
                "moved": len(copied),
                "drain_seconds": end - begin,
                "moved_bytes": sum(c.token_count * LAYERS * KV_HEADS * DIM * 2 * 2 for c in copied),
                "most_tokens_while_sealed": max(c.sealed_token_count for c in copied),
                "sealed_ms": {
                    "median": 1e3 * statistics.median(c.sealed_seconds for c in copied),
                    "max": 1e3 * max(c.sealed_seconds for c in copied),
                },
                "wrong_outputs": sum(d.wrong for d in made),
                "lost_rows": lost,
                "steps_during_the_drain": len(during),
                "step_ms_before": {
                    "median": 1e3 * statistics.median(before),
                    "p99": 1e3 * percentile(before, 0.99),
                },
                "step_ms_during": {
                    "median": 1e3 * statistics.median(during),
                    "p99": 1e3 * percentile(during, 0.99),
                    "max": 1e3 * max(during),
                },
                "delay_ms": {
                    "median": 1e3 * statistics.median(delays),
                    "p99": 1e3 * percentile(delays, 0.99),
                    "max": 1e3 * max(delays),
                },
            },
        )
        if lost or any(d.wrong for d in made) or len(copied) < sequence_count:
            raise SystemExit("something was lost or wrong, or less was moved than there was")


if __name__ == "__main__":
    app()
