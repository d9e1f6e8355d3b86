"""Measures how well many runners use a device: processes that decode through doorbells.

Every runner is a process with its own sequence of one layer, 32 query heads over 8 KV heads of
128, bf16. It makes steps of one token, one after the other, with the top 2 % of the rows and no
sample. `device` is the rate of the device alone: one step of as many sequences together, by the
device's own time. The first outputs of the runners are compared bit for bit with a step of all
sequences together, and those of the policy `all` with torch's attention over all rows. Prints one
JSON object per line: rates in steps a second, and CPU time in CPUs.

    python bench/rpc/streams.py [--device cuda:0] [--tokens 65536]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import spillway_kv
import torch
from spillway_kv import BFloat16, Client, Policy, Sequence, TopK
from spillway_kv.lab import serving

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SHARE = 0.02
POLICY = Policy(heavy=TopK(fraction=SHARE), tail="none")
# Steps that are not timed.
WARM_UP = 50


def random(seed: int, *shape: int) -> BFloat16:
    rng = np.random.default_rng(seed)
    bits = rng.standard_normal(shape, np.float32).view(np.uint32) >> 16
    return BFloat16(bits.astype(np.uint16))


def step_tensors(seed: int, count: int = 1) -> tuple[BFloat16, BFloat16, BFloat16]:
    """q [B, 1, H_q, d], k and v [B, H_kv, 1, d] of sequences seed, seed + 1, ..."""
    made = []
    for part, shape in enumerate(((1, HEADS), (KV_HEADS, 1), (KV_HEADS, 1))):
        bits = [random(3 * (seed + i) + part, *shape, HEAD_DIM).bits for i in range(count)]
        made.append(BFloat16(np.stack(bits)))
    return made[0], made[1], made[2]


def run(target: str, name: str, seed: int, seconds: float, say: Connection) -> None:
    """One runner. Sends its first output, and later its steps and the seconds they took."""
    with spillway_kv.connect(target) as client:
        sequence = client.get_sequence(name)
        q, k, v = step_tensors(seed)

        def step() -> Any:
            with client.begin_step([sequence], policy=POLICY) as announced:
                return announced.attend(0, q, k, v, out_dtype="float32")[0]

        say.send(step())
        for _ in range(WARM_UP):
            step()
        say.send(None)
        say.recv()
        begin = time.perf_counter()
        count = 0
        while time.perf_counter() < begin + seconds:
            step()
            count += 1
        say.send(count / (time.perf_counter() - begin))
        say.recv()


def processor_time(process: int) -> float:
    """The CPU time that a process has used so far, in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def daemon_of(target: str) -> int:
    """The ID of the daemon that listens on a unix socket, found by the path in its arguments."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if target.encode() in arguments and b"spillwayd" in arguments[0]:
                return int(folder.name)
    raise RuntimeError(f"no process serves {target}")


@contextmanager
def runners(
    target: str, sequences: list[Sequence], seconds: float
) -> Iterator[list[tuple[Any, Connection]]]:
    spawn = multiprocessing.get_context("spawn")
    made = []
    try:
        for seed, sequence in enumerate(sequences):
            here, there = spawn.Pipe()
            process = spawn.Process(target=run, args=(target, sequence.name, seed, seconds, there))
            process.start()
            made.append((process, here))
        yield made
    finally:
        for process, _ in made:
            process.kill()
            process.join()


def check_all(client: Client, sequence: Sequence, k: BFloat16, v: BFloat16) -> float:
    """Relative error of the policy `all`, compared with torch's attention."""
    q, new_k, new_v = step_tensors(0)
    fork = sequence.fork()
    with client.begin_step([fork], policy=Policy(selector="all")) as step:
        out, _ = step.attend(0, q, new_k, new_v, out_dtype="float32")
    fork.delete()

    def floats(x: Any) -> torch.Tensor:
        return torch.from_numpy((x.astype(np.uint32) << 16).view(np.float32))

    rows = [np.concatenate([a.bits[0], b.bits[0]], axis=1) for a, b in ((k, new_k), (v, new_v))]
    wanted = torch.nn.functional.scaled_dot_product_attention(
        floats(q.bits[0]).transpose(0, 1), *map(floats, rows), enable_gqa=True
    )
    difference = torch.from_numpy(out[0]).transpose(0, 1) - wanted
    return float(difference.norm() / wanted.norm())


def measure(client: Client, target: str, count: int, tokens: int, seconds: float) -> dict[str, Any]:
    model = client.create_model(
        layer_count=1, query_head_count=HEADS, kv_head_count=KV_HEADS, head_dim=HEAD_DIM
    )
    k, v = (random(seed, 1, KV_HEADS, tokens, HEAD_DIM) for seed in (10**6, 10**6 + 1))
    region = client.attach_region(k.bits.nbytes + v.bits.nbytes + 4096)
    shared = [BFloat16(region.array(x.bits.shape, np.uint16)) for x in (k, v)]
    for to, of in zip(shared, (k, v), strict=True):
        to.bits[:] = of.bits
    sequences = [client.create_sequence(model) for _ in range(count)]
    for sequence in sequences:
        sequence.append(0, 0, *shared)
    region.detach()
    error = check_all(client, sequences[0], k, v)
    if error > 0.01:
        raise RuntimeError(f"the policy all is off by {error:.4f}")
    # Steps of all sequences together give the device time, and the outputs that each runner must
    # get.
    together = [sequence.fork() for sequence in sequences]
    device = []
    for i in range(WARM_UP):
        with client.begin_step(together, policy=POLICY) as step:
            out, _ = step.attend(0, *step_tensors(0, count), out_dtype="float32")
            results = step.results()
            device.append(results[0].device_time_us)
            rows = int(results[0].touched_row_counts.sum())
        if i == 0:
            expected = out
    for sequence in together:
        sequence.delete()
    process = daemon_of(target)
    with runners(target, sequences, seconds) as made:
        for i, (_, connection) in enumerate(made):
            first = connection.recv()[0]
            if not np.array_equal(first, expected[i]):
                raise RuntimeError(f"runner {i} answers other than the step of all together")
        for _, connection in made:
            connection.recv()
        before, begin = processor_time(process), time.perf_counter()
        for _, connection in made:
            connection.send(None)
        rates = [connection.recv() for _, connection in made]
        busy = (processor_time(process) - before) / (time.perf_counter() - begin)
        # CPU time while no runner decodes but all doorbells are open.
        before, begin = processor_time(process), time.perf_counter()
        time.sleep(5)
        idle = (processor_time(process) - before) / (time.perf_counter() - begin)
    for sequence in sequences:
        sequence.delete()
    client.delete_model(model)
    alone = count / (statistics.median(device) * 1e-6)
    return {
        "streams": count,
        "tokens": tokens,
        "rows_per_kv_head": rows / KV_HEADS,
        "error_of_all": error,
        "device_steps_per_second": alone,
        "steps_per_second": sum(rates),
        "share_of_device": sum(rates) / alone,
        "slowest_over_fastest": min(rates) / max(rates),
        "daemon_processors": busy,
        "daemon_processors_idle": idle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="of the daemon")
    parser.add_argument("--tokens", type=int, default=65536, help="of each sequence")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=5, help="that runners are timed")
    parser.add_argument("--memory", default="32GiB", help="the daemon's limit")
    arguments = parser.parse_args()
    binary = serving.find_binary(ROOT)
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder:
        flags = ("--device", arguments.device, "--memory-limit", arguments.memory)
        log = Path(folder) / "log"
        with (
            serving.running_daemon(binary, log, *flags, timeout=60) as target,
            spillway_kv.connect(target) as client,
        ):
            device = client.server_info.devices[0].description
            for count in arguments.streams:
                measured = measure(client, target, count, arguments.tokens, arguments.seconds)
                told = {"device": device, "cores": os.cpu_count(), **measured}
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
