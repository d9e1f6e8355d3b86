"""Measures decode steps of many sequences by messages, to a daemon over TCP.

A step appends one token to each of B short sequences and attends, layer by layer, 32 query heads
over 8 KV heads of 128, bf16. Prints, for each B, medians per layer: the time of an attend, what it
takes beyond the device, and the CPU time of this process and of the daemon. The outputs of the
first step are compared with attention computed here.

    python bench/rpc/batches.py [--batches 1 16 64] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import spillway_kv
import torch
from spillway_kv.lab import serving
from streams import processor_time

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 128, 28
# Tokens of each sequence before a round, and steps of a round.
TOKENS, STEPS = 64, 10


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2).float(), k.float(), v.float(), enable_gqa=True
    ).transpose(1, 2)
    difference = ((out.float() - wanted).norm() / wanted.norm()).item()
    if difference > 0.01:
        raise RuntimeError(f"outputs differ by {difference:.3f} from attention computed here")


def measure(client: Any, daemon: int, batch: int, rounds: int) -> dict[str, float]:
    """Returns the medians over rounds, in microseconds per layer."""
    model = client.create_model(
        layer_count=LAYERS,
        query_head_count=HEADS,
        kv_head_count=KV_HEADS,
        head_dim=HEAD_DIM,
        dtype="bfloat16",
    )
    sequences = [client.create_sequence(model) for _ in range(batch)]
    k, v = (_random(batch, KV_HEADS, TOKENS, HEAD_DIM) for _ in range(2))
    for layer in range(LAYERS):
        for row, sequence in enumerate(sequences):
            sequence.append(layer, 0, k[row], v[row])
    q = _random(batch, 1, HEADS, HEAD_DIM)
    new_k, new_v = (_random(batch, KV_HEADS, 1, HEAD_DIM) for _ in range(2))
    taken: dict[str, list[float]] = {"attend": [], "beyond": [], "client": [], "daemon": []}
    for number in range(rounds + 1):
        for sequence in sequences:
            sequence.truncate(TOKENS)
        attends, beyond = [], []
        before = processor_time(os.getpid()), processor_time(daemon)
        for _ in range(STEPS):
            with client.begin_step(sequences) as step:
                for layer in range(LAYERS):
                    begin = time.perf_counter()
                    out, _ = step.attend(layer, q, new_k, new_v)
                    attends.append((time.perf_counter() - begin) * 1e6)
                    beyond.append(attends[-1] - max(r.device_time_us for r in step.results()))
                    if number == 0 and layer == 0 and len(attends) == 1:
                        _check(q, torch.cat([k, new_k], 2), torch.cat([v, new_v], 2), out)
        after = processor_time(os.getpid()), processor_time(daemon)
        if number == 0:
            continue  # a warm-up
        taken["attend"].append(statistics.median(attends))
        taken["beyond"].append(statistics.median(beyond))
        for name, one, other in zip(("client", "daemon"), before, after, strict=True):
            taken[name].append((other - one) * 1e6 / (STEPS * LAYERS))
    for sequence in sequences:
        sequence.delete()
    client.delete_model(model)
    return {name: statistics.median(each) for name, each in taken.items()}


def main() -> None:
    """Runs the program."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5, help=f"of {STEPS} steps")
    parser.add_argument("--device", default="cpu", help="of the daemon")
    parser.add_argument("--json", type=Path, help="file to which the results are written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = f"tcp:127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory(prefix="spillway-bench-") as folder:
        flags = "--device", arguments.device, "--memory-limit", "4GiB"
        daemon = serving.Daemon(
            serving.find_binary(ROOT), target, Path(folder) / "log", *flags, timeout=60
        )
        daemon.start()
        made = []
        try:
            with spillway_kv.connect(target) as client:
                print(client.server_info.devices[0].description, client.step_transport)
                print(f"{'sequences':>9}" + "".join(f"{n:>9}" for n in _COLUMNS))
                for batch in arguments.batches:
                    result = measure(client, daemon.pid, batch, arguments.rounds)
                    made.append({"sequences": batch, **result})
                    print(f"{batch:9}" + "".join(f"{result[n]:9.0f}" for n in _COLUMNS), flush=True)
        finally:
            daemon.end()
    if arguments.json:
        arguments.json.write_text(json.dumps(made, indent=1) + "\n")


_COLUMNS = ("attend", "beyond", "client", "daemon")


if __name__ == "__main__":
    main()
