"""Measures what the cost model of docs/scale.md needs, and prints the computed tables.

    python bench/cluster/scale.py measure       # everything, or by name: steps sequences ...
    python bench/cluster/scale.py model         # prints tables computed from the measurements

`steps` and `sequences` run the client against simulated daemons, which answer after a fixed time
and compute nothing. `daemons` runs it against real daemons on the CPU. On a machine with few cores
the daemons wait for each other. The load in the results does not show this.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import spillway_kv
import typer
from local import cluster_of
from simulated_daemon import simulated_daemons
from spillway_kv.cluster import ClusterClient
from spillway_kv.lab import serving

sys.path.append(str(Path(__file__).resolve().parents[1]))
import environment  # noqa: E402
import scale_model  # noqa: E402

RESULT = environment.ROOT / "docs/results/cluster/scale.json"
LAYERS, HEADS, KV_HEADS, DIM = 8, 32, 8, 128
SHAPES: dict[str, Any] = {
    "layer_count": LAYERS,
    "query_head_count": HEADS,
    "kv_head_count": KV_HEADS,
    "head_dim": DIM,
}
# Tokens that are not timed.
WARM_UP = 3

app = typer.Typer(add_completion=False, no_args_is_help=True)


def random(seed: int, *shape: int) -> spillway_kv.BFloat16:
    numbers = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return spillway_kv.BFloat16.from_float32(numbers)


def rows_of(count: int) -> tuple[spillway_kv.BFloat16, ...]:
    """q, k and v of a step of `count` sequences."""
    return (
        random(1, count, 1, HEADS, DIM),
        random(2, count, KV_HEADS, 1, DIM),
        random(3, count, KV_HEADS, 1, DIM),
    )


def microseconds(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1e6 * each for each in seconds)
    return {
        "p50_us": round(statistics.median(ordered), 1),
        "p90_us": round(ordered[9 * len(ordered) // 10], 1),
    }


def timed_steps(client: Any, token_count: int, policy: Any = None) -> dict[str, Any]:
    """Times the attends of one sequence, minus the device time of the slowest part."""
    model = client.create_model(**SHAPES)
    sequence = client.create_sequence(model)
    if policy is not None:
        k, v = (random(seed, LAYERS, KV_HEADS, 8192, DIM) for seed in (4, 5))
        sequence.append(0, 0, k, v)
    rows = rows_of(1)
    beyond, devices = [], []
    used = 0.0
    for token in range(WARM_UP + token_count):
        with client.begin_step([sequence], policy=policy) as step:
            for layer in range(LAYERS):
                begin, begin_used = time.perf_counter(), time.process_time()
                step.attend(layer, *rows)
                taken = time.perf_counter() - begin
                used += time.process_time() - begin_used if token >= WARM_UP else 0.0
                device = step.results()[0].device_time_us / 1e6
                if token >= WARM_UP:
                    beyond.append(taken - device)
                    devices.append(device)
    return {
        "beyond_device": microseconds(beyond),
        "device_us": round(1e6 * statistics.median(devices), 1),
        "client_cpu_us": round(1e6 * used / len(beyond), 1),
    }


def steps(seconds: float = 0.005) -> dict[str, Any]:
    """Measures the client's own cost of a step over several daemons."""
    rows = []
    for parts in (0, 1, 2, 4, 8):
        with (
            tempfile.TemporaryDirectory() as folder,
            simulated_daemons(Path(folder), max(parts, 1), seconds) as targets,
            cluster_of(targets, parts) if parts else spillway_kv.connect(targets[0]) as client,
        ):
            rows.append({"parts": parts, **timed_steps(client, 30)})
    return {"what": "parts 0: spillway_kv.Client alone", "set_us": 1e6 * seconds, "rows": rows}


def rate(client: ClusterClient, seconds: float, *, together: bool) -> float:
    """Attends per second of 8 sequences, with one thread per sequence or in one joint step."""
    model = client.create_model(**SHAPES)
    sequences = [client.create_sequence(model) for _ in range(8)]
    counts = [0] * len(sequences)
    ready = threading.Barrier(len(sequences) if not together else 1)
    end = [0.0]

    def decode(number: int, mine: list[Any]) -> None:
        rows = rows_of(len(mine))
        for round_ in range(10**9):
            if round_ == 1:
                ready.wait()
                end[0] = end[0] or time.perf_counter() + seconds
            with client.begin_step(mine) as step:
                for layer in range(LAYERS):
                    step.attend(layer, *rows)
                    if round_ and time.perf_counter() < end[0]:
                        counts[number] += len(mine)
            if round_ and time.perf_counter() >= end[0]:
                return

    if together:
        decode(0, sequences)
    else:
        threads = [
            threading.Thread(target=decode, args=(number, [sequence]))
            for number, sequence in enumerate(sequences)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return sum(counts) / seconds


def sequences() -> dict[str, Any]:
    """Measures attends per second of 8 whole sequences, on one daemon and on four."""
    rows = []
    for set_seconds in (0.002, 0.005, 0.01):
        for together in (False, True):
            rates = {}
            for count in (1, 4):
                with (
                    tempfile.TemporaryDirectory() as folder,
                    simulated_daemons(Path(folder), count, set_seconds) as targets,
                    cluster_of(targets) as client,
                ):
                    rates[count] = round(rate(client, 5.0, together=together), 1)
            rows.append(
                {
                    "set_us": 1e6 * set_seconds,
                    "sequences": "one step of 8" if together else "8 threads",
                    "rates": rates,
                    "of_four_times_one": round(rates[4] / (4 * rates[1]), 3),
                }
            )
    return {"rows": rows}


@contextmanager
def daemons_of(count: int, kind: str) -> Iterator[list[str]]:
    """Runs real daemons on the CPU, with one worker thread each. Yields their targets."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        targets = []
        for number in range(count):
            target = (
                f"unix:{folder}/{number}.sock"
                if kind == "unix"
                else f"tcp:127.0.0.1:{47710 + number}"
            )
            daemon = serving.Daemon(
                serving.find_binary(environment.ROOT),
                target,
                folder / f"{number}.log",
                *("--device", "cpu", "--threads", "1", "--memory-limit", "1GiB"),
                timeout=30,
            )
            daemon.start()
            stack.callback(daemon.end)
            targets.append(target)
        yield targets


def daemons() -> dict[str, Any]:
    """Measures steps over several real daemons, minus the device time of the slowest."""
    policy = spillway_kv.Policy(heavy=spillway_kv.TopK(fraction=0.02), tail="none")
    rows = []
    for kind in ("unix", "tcp"):
        for parts in (1, 2, 4):
            with daemons_of(parts, kind) as targets, cluster_of(targets, parts) as client:
                rows.append({"socket": kind, "parts": parts, **timed_steps(client, 40, policy)})
    return {"what": "8,192 tokens, the top 2 % of the rows", "rows": rows}


def hops() -> dict[str, Any]:
    """Measures the round trip of an empty call to a daemon on this machine."""
    rows = []
    for kind in ("unix", "tcp"):
        with daemons_of(1, kind) as (target,), spillway_kv.connect(target) as client:
            times = []
            for number in range(2100):
                begin = time.perf_counter()
                client.health()
                if number >= 100:
                    times.append(time.perf_counter() - begin)
            rows.append({"socket": kind, **microseconds(times)})
    return {"what": "grpc.health.v1.Health.Check by the client", "rows": rows}


def directory() -> dict[str, Any]:
    """Measures how many calls one directory, an actor on Ray, answers per second."""
    from scale_directory import directory as measured  # noqa: PLC0415  (a bundle has no Ray)

    return measured()


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "hops": hops,
    "steps": steps,
    "sequences": sequences,
    "daemons": daemons,
    "directory": directory,
}


@app.command()
def measure(
    names: Annotated[list[str] | None, typer.Argument(help=", ".join(PARTS))] = None,
    output: Annotated[Path, typer.Option(help="Result file; other parts in it stay.")] = RESULT,
) -> None:
    """Runs the named measurements, or all, and writes their results."""
    for name in names or list(PARTS):
        made = {**environment.describe(), **PARTS[name]()}
        results = json.loads(output.read_text()) if output.exists() else {}
        results[name] = made
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(results, indent=2) + "\n")
        print(name, json.dumps(made), flush=True)


@app.command()
def model(
    result: Annotated[Path, typer.Option(help="What `measure` has written.")] = RESULT,
) -> None:
    """Prints the tables of docs/scale.md."""
    print("\n".join(scale_model.tables(json.loads(result.read_text()))))


if __name__ == "__main__":
    app()
