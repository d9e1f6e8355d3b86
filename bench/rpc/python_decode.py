"""Decode steps of the Python client beyond device time, through grpcio and through libspillway.

Starts a daemon. A step appends a token to a short sequence and attends, 32
query heads over 8 KV heads of 128, bf16, torch tensors in and out. Blocks of
steps go through either in turn, with and without a pause before each step;
before anything is timed, both must answer what attention computed here gives.
Prints a table, in microseconds, medians.

    python bench/rpc/python_decode.py [--device cuda:0]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import spillway
import torch
from spillway import DecodeStream, Sequence
from spillway_lab import serving

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# A sequence's length before each block, and steps of a block.
TOKENS, STEPS = 64, 100
PAUSES = (0.0, 0.001)


class Step(NamedTuple):
    """What a step took, microseconds."""

    send: float
    wait: float
    unpack: float
    device: float
    beyond: float


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def timed_step(stream: DecodeStream, sequence: Sequence, start: int) -> Step:
    q, k, v = (
        random(1, HEADS, HEAD_DIM),
        random(KV_HEADS, 1, HEAD_DIM),
        random(KV_HEADS, 1, HEAD_DIM),
    )
    begin = time.perf_counter()
    stream.send(sequence, 0, q, k, v, start=start)
    sent = time.perf_counter()
    _, result = stream.recv()
    received = time.perf_counter()
    _ = result.out
    end = time.perf_counter()
    device = result.device_time_us
    micro = 1e6
    return Step(
        (sent - begin) * micro,
        (received - sent) * micro,
        (end - received) * micro,
        device,
        (end - begin) * micro - device,
    )


def check(stream: DecodeStream, sequence: Sequence) -> None:
    """Raises unless a step gives what torch computes."""
    k, v = random(KV_HEADS, TOKENS, HEAD_DIM), random(KV_HEADS, TOKENS, HEAD_DIM)
    q = random(1, HEADS, HEAD_DIM)
    sequence.append(0, 0, k[:, :-1], v[:, :-1])
    out = stream.step(sequence, 0, q, k[:, -1:], v[:, -1:]).out
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1).float(), k.float(), v.float(), enable_gqa=True
    )
    difference = (out.float() - wanted.transpose(0, 1)).norm() / wanted.norm()
    if difference > 0.01:
        raise RuntimeError(f"{stream.transport} answers what differs by {difference:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="of the daemon")
    parser.add_argument("--blocks", type=int, default=20, help=f"of {STEPS} steps, of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    binary = serving.find_binary(ROOT)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spillway-bench-")))
        target = stack.enter_context(
            serving.running_daemon(binary, folder / "log", "--device", arguments.device, timeout=60)
        )
        clients = [stack.enter_context(spillway.connect(target, native=n)) for n in (False, True)]
        model = clients[0].create_model(
            layer_count=1,
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
        )
        sides = []
        for client in clients:
            sequence = client.create_sequence(model)
            stream = stack.enter_context(client.decode())
            check(stream, sequence)
            sides.append((stream, sequence))
        print(clients[0].server_info.devices[0].description)
        print(f"{'':24}" + "".join(f"{name:>9}" for name in Step._fields))
        for pause in PAUSES:
            steps: dict[str, list[Step]] = {stream.transport: [] for stream, _ in sides}
            # The first block of each warms up.
            for block in range(arguments.blocks + 1):
                for stream, sequence in sides:
                    sequence.truncate(TOKENS)
                    for step in range(STEPS):
                        if pause:
                            time.sleep(pause)
                        taken = timed_step(stream, sequence, TOKENS + step)
                        if block > 0:
                            steps[stream.transport].append(taken)
            for name, taken_all in steps.items():
                label = f"{name}, {pause * 1000:.0f} ms apart" if pause else f"{name}, at once"
                medians = (statistics.median(column) for column in zip(*taken_all, strict=True))
                print(f"{label:24}" + "".join(f"{median:9.1f}" for median in medians), flush=True)


if __name__ == "__main__":
    main()
