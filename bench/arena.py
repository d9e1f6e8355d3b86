"""Compares rows in a folder with rows in anonymous memory, and times the restart of an engine.

For each kind of memory, an engine in its own process appends one sequence, attends to it,
and is killed. If the rows are in a folder, a second process continues with them. `restored`
is the time from the start of its engine to the answer of the first attend, which must be
the same as before. The kinds take turns for several rounds. The program prints medians, with
the smallest and the largest value. On the CPU, `encode_gb_s` is the rate of the encoder alone
(bench/cpu/encode_bench.cc), and `of_encode` is the rate at which codes are computed again,
as a share of it. `step_us` is the time of a decode step after 1,000 tokens, all layers. On a
machine that does other work, compare `append_cpu_s_gb` and `step_cpu_us`, the time on all cores.

    python bench/arena.py run --device cpu --tokens 131072 --folder /dev/shm

With --against, the libspillway of another build takes turns with this one, over the same kinds
of memory.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

ROOT = Path(__file__).resolve().parents[1]
LAYERS, QUERY_HEADS, KV_HEADS, DIM = 4, 32, 8, 128
CHUNK_TOKENS = 8192
ATTENDS = 40
STEPS = 400


def settings(device: str, memory_limit: str, folder: str) -> dict[str, str]:
    """Settings of the engine. An empty folder means anonymous memory."""
    named = {"device.name": device, "memory.limit": memory_limit}
    return named | ({"memory.arena_directory": folder} if folder else {})


def attend_seconds(sequence: Any, q: np.ndarray, policy: Any) -> float:
    """The median time of several attends, without the first ones."""
    times = []
    for i in range(ATTENDS):
        begin = time.perf_counter()
        sequence.attend(i % LAYERS, q, policy)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[ATTENDS // 4 :])


def steps(client: Any, model: Any) -> dict[str, float]:
    """Times of decode steps after 1,000 tokens: the median, and the mean on all cores."""
    random = np.random.default_rng(2)
    rows = random.standard_normal((LAYERS, KV_HEADS, 1000, DIM), np.float32).astype(np.float16)
    sequence = client.create_sequence(model, "steps")
    sequence.append(0, 0, rows, rows)
    row = np.ascontiguousarray(rows[0, :, :1])[None]
    q = random.standard_normal((1, 1, QUERY_HEADS, DIM), np.float32).astype(np.float16)
    times = []
    cpu_begin = time.process_time()
    for _ in range(STEPS):
        begin = time.perf_counter()
        with client.begin_step([sequence]) as step:
            for layer in range(LAYERS):
                step.attend(layer, q, row, row)
        times.append(time.perf_counter() - begin)
    cpu = time.process_time() - cpu_begin
    sequence.delete()
    return {
        "step_us": 1e6 * statistics.median(times[STEPS // 4 :]),
        "step_cpu_us": 1e6 * cpu / STEPS,
    }


def fill(device: str, memory_limit: str, folder: str, token_count: int) -> dict[str, Any]:
    """Appends a sequence and attends to it, in this process."""
    import spillway_kv  # noqa: PLC0415

    random = np.random.default_rng(1)
    shape = (LAYERS, KV_HEADS, CHUNK_TOKENS, DIM)
    chunk = random.standard_normal(shape, np.float32).astype(np.float16)
    client = spillway_kv.connect("embedded:", settings=settings(device, memory_limit, folder))
    model = client.create_model(
        "m",
        layer_count=LAYERS,
        query_head_count=QUERY_HEADS,
        kv_head_count=KV_HEADS,
        head_dim=DIM,
        dtype="float16",
    )
    sequence = client.create_sequence(model, "s", ttl=0)
    row_bytes = 2 * LAYERS * KV_HEADS * DIM * 2
    begin, cpu_begin = time.perf_counter(), time.process_time()
    for start in range(0, token_count, CHUNK_TOKENS):
        sequence.append(0, start, chunk, chunk)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu_begin
    q = random.standard_normal((1, QUERY_HEADS, DIM), np.float32)
    out = np.asarray(sequence.attend(1, q).out)
    return {
        "append_gb_s": token_count * row_bytes / seconds / 1e9,
        "attend_us": 1e6 * attend_seconds(sequence, q, None),
        "append_cpu_s_gb": cpu / (token_count * row_bytes / 1e9),
        **steps(client, model),
        "all_us": 1e6 * attend_seconds(sequence, q, spillway_kv.Policy(selector="all")),
        "huge_page_share": client.statistics().memory.arena_huge_page_bytes
        / max(client.statistics().memory.arena_committed_bytes, 1),
        "out": out.ravel().tolist(),
    }


def restore(device: str, memory_limit: str, folder: str, token_count: int) -> dict[str, Any]:
    """Restores the sequence that `fill` appended, and attends to it."""
    import spillway_kv  # noqa: PLC0415

    random = np.random.default_rng(1)
    random.standard_normal((LAYERS, KV_HEADS, CHUNK_TOKENS, DIM), np.float32)
    q = random.standard_normal((1, QUERY_HEADS, DIM), np.float32)
    begin = time.perf_counter()
    client = spillway_kv.connect("embedded:", settings=settings(device, memory_limit, folder))
    opened = time.perf_counter()
    out = np.asarray(client.get_sequence("sequences/s").attend(1, q).out)
    end = time.perf_counter()
    row_bytes = 2 * LAYERS * KV_HEADS * DIM * 2 * token_count
    return {
        "open_s": opened - begin,
        "restored_gb_s": row_bytes / (end - begin) / 1e9,
        "codes_gb_s": row_bytes / (end - opened) / 1e9,
        "out": out.ravel().tolist(),
    }


def work(library: Path | None, *arguments: str) -> dict[str, Any]:
    """Runs `fill` or `restore` in another process, which kills itself at the end."""
    done = subprocess.run(
        [sys.executable, __file__, "worker", *arguments],
        stdout=subprocess.PIPE,
        check=False,
        env=os.environ | ({"SPILLWAY_LIBRARY": str(library)} if library else {}),
    )
    assert done.returncode == -9, f"the worker ended with {done.returncode}"
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def encode_rate(bench: Path) -> float:
    """How many GB of rows per second the CPU's encoder alone encodes."""
    done = subprocess.run([bench], stdout=subprocess.PIPE, check=True)
    return float(json.loads(done.stdout)["gb_s"])


app = typer.Typer(add_completion=False)


@app.command()
def worker(
    what: str, device: str, memory_limit: str, token_count: int, folder: str = typer.Argument("")
) -> None:
    """Runs `fill` or `restore`, prints its result, and kills this process."""
    act = fill if what == "fill" else restore
    print(json.dumps(act(device, memory_limit, folder, token_count)), flush=True)
    os.kill(os.getpid(), 9)


@app.command()
def run(
    device: Annotated[str, typer.Option()] = "cpu",
    memory_limit: Annotated[str, typer.Option()] = "8GiB",
    tokens: Annotated[int, typer.Option(help="a multiple of 8,192")] = 131072,
    folder: Annotated[list[str], typer.Option(help="of tmpfs; may be said more than once")] = [  # noqa: B006
        "/dev/shm"
    ],
    rounds: Annotated[int, typer.Option()] = 3,
    against: Annotated[Path | None, typer.Option(help="libspillway of another build")] = None,
    encode_bench: Annotated[Path, typer.Option(help="of the release build")] = ROOT
    / "build/release/bench/cpu/encode_cpu_bench",
    output: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Measures all kinds of memory in turn."""
    kinds = [
        (library, where)
        for where in ["", *folder]
        for library in ([None, against] if against else [None])
    ]
    results: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        # Each round starts with another kind.
        for library, where in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
            common = (device, memory_limit, str(tokens))
            name = (where or "anonymous") + (", the other build" if library else "")
            if not where:
                found = work(library, "fill", *common)
                found.pop("out")
                results.setdefault(name, []).append(found)
                continue
            with tempfile.TemporaryDirectory(prefix="spillway-bench-", dir=where) as arena:
                found = work(library, "fill", *common, arena)
                again = work(library, "restore", *common, arena)
                assert found.pop("out") == again.pop("out"), "another answer after the restart"
                if device == "cpu" and against is None:
                    again["encode_gb_s"] = encode_rate(encode_bench)
                    again["of_encode"] = again["codes_gb_s"] / again["encode_gb_s"]
                results.setdefault(name, []).append(found | again)
    for kind, found_all in results.items():
        print(kind)
        for name in found_all[0]:
            values = [found[name] for found in found_all]
            print(
                f"  {name:16} {statistics.median(values):10.3f}"
                f"   ({min(values):.3f} to {max(values):.3f})"
            )
    if output is not None:
        record = {"device": device, "tokens": tokens, "rounds": rounds, "results": results}
        output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    app()
