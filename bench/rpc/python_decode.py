"""Measures what a decode step of the Python client takes beyond the device's time.

A step appends a token to a short sequence and attends, 32 query heads over 8 KV heads of 128,
bf16, with torch tensors of the CPU. The ways: a Decode stream to a daemon through grpcio and
through libspillway, steps by the daemon's doorbell (`Client.begin_step`), announced for each
token, and a stream and steps of an engine in this process. The ways take turns in blocks of
steps, with and without a pause before each step. Before anything is timed, the outputs of all
ways are compared with attention computed here. Prints a table of medians in microseconds.

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
from spillway_kv import Client, DecodeStream, Sequence
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

    def __init__(self, name: str, client: Client, sequence: Sequence, stream: DecodeStream | None):
        self.name, self.client, self.sequence = name, client, sequence
        # None: use begin_step.
        self.stream = stream

    def step(
        self, start: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, Taken]:
        """One timed step: q [1, H_q, d], k and v [H_kv, 1, d]."""
        if self.stream is None:
            with self.client.begin_step([self.sequence]) as step:
                begin = time.perf_counter()
                outs, _ = step.attend(0, q[None], k[None], v[None])
                end = time.perf_counter()
                out, (result,) = outs[0], step.results()
        else:
            begin = time.perf_counter()
            result = self.stream.step(self.sequence, 0, q, k, v, start=start)
            out = result.out
            end = time.perf_counter()
        total, device = (end - begin) * 1e6, result.device_time_us
        return out, Taken(total, device, total - device)

    def check(self) -> None:
        """Raises unless a step's output is what torch computes."""
        k, v = random(KV_HEADS, TOKENS, HEAD_DIM), random(KV_HEADS, TOKENS, HEAD_DIM)
        q = random(1, HEADS, HEAD_DIM)
        self.sequence.append(0, 0, k[:, :-1], v[:, :-1])
        out, _ = self.step(TOKENS - 1, q, k[:, -1:], v[:, -1:])
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
        for step in range(STEPS):
            tensors = random(1, HEADS, HEAD_DIM), *random(2, KV_HEADS, 1, HEAD_DIM)
            if pause:
                time.sleep(pause)
            taken.append(self.step(TOKENS + step, *tensors)[1])
        return taken


def ways(stack: ExitStack, clients: list[Client]) -> list[Way]:
    made = []
    for client in clients:
        model = client.create_model(
            layer_count=1,
            query_head_count=HEADS,
            kv_head_count=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
        )
        embedded = client.transport == "embedded"
        for own in (
            (False, True) if client.step_transport != client.transport or embedded else (False,)
        ):
            stream = None if own else stack.enter_context(client.decode())
            name = f"{client.step_transport} step" if own else f"{client.transport} stream"
            made.append(Way(name, client, client.create_sequence(model), stream))
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
        clients = [
            stack.enter_context(spillway_kv.connect(target, native=n)) for n in (False, True)
        ]
        settings = {"device.name": arguments.device, "memory.limit": limit}
        clients.append(stack.enter_context(spillway_kv.connect("embedded:", settings=settings)))
        sides = ways(stack, clients)
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
