"""Measures what a decode step of the Python client takes beyond the device's time.

A step appends a token to a short sequence and attends, 32 query heads over 8 KV heads of 128,
bf16, with torch tensors of the CPU. It is announced for each token (`Client.begin_step`), and the
time of this is not counted. The ways: by messages to a daemon, by the daemon's doorbell, and of an
engine in this process. The ways take turns in blocks of steps, with and without a pause before each
step. Before anything is timed, the outputs of all ways are compared with attention computed here.
Prints a table of medians in microseconds.

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

import spillway_kv
import torch
from spillway_kv import Client, Sequence
from spillway_kv._native import Carrier
from spillway_kv.lab import serving

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
# Length of the sequence before each block, and number of steps in a block.
TOKENS, STEPS = 64, 100
PAUSES = (0.0, 0.001)


class Taken(NamedTuple):
    """The times of one step, in microseconds."""

    total: float
    device: float
    beyond: float


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


class Way:
    """One way to call an engine, and the sequence that it decodes."""

    def __init__(self, name: str, client: Client, sequence: Sequence):
        self.name, self.client, self.sequence = name, client, sequence

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Taken]:
        """One timed step: q [1, H_q, d], k and v [H_kv, 1, d]."""
        with self.client.begin_step([self.sequence]) as step:
            begin = time.perf_counter()
            outs, _ = step.attend(0, q[None], k[None], v[None])
            end = time.perf_counter()
            (result,) = step.results()
        total, device = (end - begin) * 1e6, result.device_time_us
        return outs[0], Taken(total, device, total - device)

    def check(self) -> None:
        """Raises unless a step's output is what torch computes."""
        k, v = random(KV_HEADS, TOKENS, HEAD_DIM), random(KV_HEADS, TOKENS, HEAD_DIM)
        q = random(1, HEADS, HEAD_DIM)
        self.sequence.append(0, 0, k[:, :-1], v[:, :-1])
        out, _ = self.step(q, k[:, -1:], v[:, -1:])
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1).float(), k.float(), v.float(), enable_gqa=True
        )
        difference = (out.float() - wanted.transpose(0, 1)).norm() / wanted.norm()
        if difference > 0.01:
            raise RuntimeError(f"{self.name} answers what differs by {difference:.3f}")

    def block(self, pause: float) -> list[Taken]:
        """Runs a block of steps, one after another."""
        self.sequence.truncate(TOKENS)
        taken = []
        for _ in range(STEPS):
            tensors = random(1, HEADS, HEAD_DIM), *random(2, KV_HEADS, 1, HEAD_DIM)
            if pause:
                time.sleep(pause)
            taken.append(self.step(*tensors)[1])
        return taken


def ways(clients: list[Client]) -> list[Way]:
    made = []
    for client in clients:
        model = client.create_model(
            layer_count=1,
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
        )
        made.append(Way(client.step_transport, client, client.create_sequence(model)))
        made[-1].check()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", help="of the daemon and the engine")
    parser.add_argument("--blocks", type=int, default=20, help=f"of {STEPS} steps, of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    binary = serving.find_binary(ROOT)
    # Two engines share the machine.
    limit = "4GiB"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spillway-bench-")))
        flags = ("--device", arguments.device, "--memory-limit", limit)
        target = stack.enter_context(
            serving.running_daemon(binary, folder / "log", *flags, timeout=60)
        )
        clients = [stack.enter_context(spillway_kv.connect(target)) for _ in range(2)]
        clients[0].connection.carrier = Carrier.MESSAGES
        settings = {"device.name": arguments.device, "memory.limit": limit}
        clients.append(stack.enter_context(spillway_kv.connect("embedded:", settings=settings)))
        sides = ways(clients)
        print(clients[0].server_info.devices[0].description)
        print(f"{'':28}" + "".join(f"{name:>9}" for name in Taken._fields))
        for pause in PAUSES:
            steps: dict[str, list[Taken]] = {way.name: [] for way in sides}
            # The first block of each way is a warm-up.
            for block in range(arguments.blocks + 1):
                for way in sides:
                    taken = way.block(pause)
                    if block > 0:
                        steps[way.name] += taken
            for name, taken_all in steps.items():
                label = f"{name}, {pause * 1000:.0f} ms apart" if pause else f"{name}, at once"
                medians = (statistics.median(column) for column in zip(*taken_all, strict=True))
                print(f"{label:28}" + "".join(f"{median:9.1f}" for median in medians), flush=True)


if __name__ == "__main__":
    main()
